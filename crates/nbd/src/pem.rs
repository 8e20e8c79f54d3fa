//! Reads certificates and keys from PEM files.

use std::path::Path;

use perigee_model::Problem;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{Error, RootCertStore};
use webpki::EndEntityCert;

use crate::server::common_name::{OBJECT_IDENTIFIER, SEQUENCE, take};

/// The TLS library accepts only RSA keys whose size is a multiple of this.
const RSA_STEP_BITS: usize = 512;

const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
/// `rsaEncryption`, 1.2.840.113549.1.1.1.
const RSA_ENCRYPTION: [u8; 9] = [0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01];

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

/// A certificate and its key that can't be used together.
pub fn unusable(cert: &Path, key: &Path, chain: &[CertificateDer<'_>], error: &Error) -> Problem {
    let bits = chain.first().and_then(rsa_bits);
    match bits.filter(|bits| !bits.is_multiple_of(RSA_STEP_BITS)) {
        Some(bits) => {
            let why = format!(
                "it is an RSA key of {bits} bits, and the only supported sizes are a \
                 multiple of {RSA_STEP_BITS} bits, from 2048 to 4096"
            );
            wrong(key, why).next(
                "make another key, say of 3072 bits or an elliptic one, and a certificate for it: \
                 `certtool --generate-privkey --bits 3072`, \
                 `openssl genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:3072`",
            )
        }
        None => wrong(cert, error),
    }
}

/// The size of the public key, if it is RSA's (RFC 8017, A.1.1).
fn rsa_bits(certificate: &CertificateDer<'_>) -> Option<usize> {
    let info = EndEntityCert::try_from(certificate).ok()?.subject_public_key_info();
    let mut info = &info[..];
    let mut key = take(&mut info, SEQUENCE)?;
    let mut algorithm = take(&mut key, SEQUENCE)?;
    if take(&mut algorithm, OBJECT_IDENTIFIER)? != RSA_ENCRYPTION {
        return None;
    }
    // The first byte says how many bits of the last one are unused: none.
    let mut numbers = take(&mut key, BIT_STRING)?.get(1..)?;
    let modulus = take(&mut take(&mut numbers, SEQUENCE)?, INTEGER)?;
    // The first byte of the number may be a zero that only says that it is not negative.
    Some(modulus.iter().skip_while(|byte| **byte == 0).count() * 8)
}

/// Certificates of authorities.
///
/// # Errors
/// When the file can't be read, or an entry in it is not a certificate.
pub fn roots(path: &Path) -> Result<RootCertStore, Problem> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|e| wrong(path, e))?;
    }
    Ok(roots)
}
