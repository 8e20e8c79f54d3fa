//! Certificates and keys out of PEM files.

use std::path::Path;

use perigee_model::Problem;
use tokio_rustls::rustls::RootCertStore;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

pub fn wrong(path: &Path, why: impl std::fmt::Display) -> Problem {
    Problem::invalid(format!("can't use {} for TLS", path.display()), why)
}

/// # Errors
/// When the file can't be read, or has none.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Problem> {
    let found: Result<Vec<_>, _> =
        CertificateDer::pem_file_iter(path).map_err(|e| wrong(path, e))?.collect();
    match found {
        Ok(found) if found.is_empty() => Err(wrong(path, "it has no certificate")),
        found => found.map_err(|e| wrong(path, e)),
    }
}

/// # Errors
/// When the file can't be read, or has none.
pub fn key(path: &Path) -> Result<PrivateKeyDer<'static>, Problem> {
    PrivateKeyDer::from_pem_file(path).map_err(|e| wrong(path, e))
}

/// Certificates of authorities.
///
/// # Errors
/// When the file can't be read, or one is none.
pub fn roots(path: &Path) -> Result<RootCertStore, Problem> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|e| wrong(path, e))?;
    }
    Ok(roots)
}
