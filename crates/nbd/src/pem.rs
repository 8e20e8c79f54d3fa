//! Reads certificates and keys from PEM files.

use std::path::Path;

use perigee_model::Problem;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
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

/// `Invalid`: names the file and why it is of no use.
pub fn wrong(path: &Path, why: impl std::fmt::Display) -> Problem {
    Problem::invalid(format!("can't use {} for TLS", path.display()), why)
}

/// # Errors
/// When the file can't be read, or has none.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Problem> {
    let found: Result<Vec<_>, _> =
        CertificateDer::pem_file_iter(path).map_err(|e| wrong(path, e))?.collect();
    match found {
        Ok(found) if found.is_empty() && has_key(path) => {
            Err(wrong(path, "it has a private key and no certificate")
                .next("name the file with the certificate here, and this one as its key"))
        }
        Ok(found) if found.is_empty() => Err(wrong(path, "it has no certificate")),
        found => found.map_err(|e| wrong(path, e)),
    }
}

fn has_key(path: &Path) -> bool {
    PrivateKeyDer::from_pem_file(path).is_ok()
}

/// # Errors
/// When the file can't be read, or has none.
pub fn key(path: &Path) -> Result<PrivateKeyDer<'static>, Problem> {
    PrivateKeyDer::from_pem_file(path).map_err(|e| match e {
        pem::Error::NoItemsFound => wrong(path, "it has no private key")
            .next("name the file with the key, in PEM and without a passphrase"),
        other => wrong(path, other),
    })
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
    // With the key of an authority, whoever reads this file makes certificates of his own.
    if has_key(path) {
        return Err(wrong(path, "it has the private key of an authority, which no server needs")
            .next("name a file that has only the authority's certificate"));
    }
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|e| wrong(path, e))?;
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_in_place_of_a_certificate_is_named_and_an_authoritys_key_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = |name: &str, labels: &[&str]| {
            let parts = labels
                .iter()
                .map(|label| format!("-----BEGIN {label}-----\nAAAA\n-----END {label}-----\n"));
            let path = dir.path().join(name);
            std::fs::write(&path, parts.collect::<String>()).expect("a file");
            path
        };
        let cert = file("cert", &["CERTIFICATE"]);
        let private = file("key", &["PRIVATE KEY"]);
        let both = file("both", &["CERTIFICATE", "PRIVATE KEY"]);
        let why = certificates(&private).expect_err("no certificate").why;
        assert!(why.contains("a private key and no certificate"), "{why}");
        let why = key(&cert).expect_err("no key").why;
        assert!(why.contains("no private key"), "{why}");
        assert!(
            certificates(&both).is_ok() && key(&both).is_ok(),
            "a server's own may be in one file"
        );
        let why = roots(&both).expect_err("the authority's key").why;
        assert!(why.contains("private key of an authority"), "{why}");
    }
}
