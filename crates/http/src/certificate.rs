//! What is in a certificate of the cluster, and how a daemon keeps its own one.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use perigee_model::{HostId, Problem};
use sha2::{Digest as _, Sha256};
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use webpki::EndEntityCert;

use crate::files::write_private;

/// The authority's certificate, in an identity's directory.
pub const CA_FILE: &str = "ca.pem";
/// The certificate and its key, in one file, so that they are replaced together.
pub const IDENTITY_FILE: &str = "identity.pem";
/// How long a certificate counts. It is renewed after a third of this time.
pub const CERTIFICATE_LIFE: Duration = Duration::from_secs(30 * 24 * 3600);

/// Whom a certificate of the cluster's authority is for. It stands in the certificate as a URI.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PeerIdentity {
    /// `perigee:controller`
    Controller,
    /// `perigee:host:NAME`: the agent and the volume server of a host.
    Host(HostId),
    /// `perigee:operator`: a person or program that may do everything.
    Operator,
}

const CONTROLLER: &str = "perigee:controller";
const HOST: &str = "perigee:host:";
const OPERATOR: &str = "perigee:operator";

impl fmt::Display for PeerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Controller => f.write_str(CONTROLLER),
            Self::Host(host) => write!(f, "{HOST}{host}"),
            Self::Operator => f.write_str(OPERATOR),
        }
    }
}

impl FromStr for PeerIdentity {
    type Err = String;

    fn from_str(uri: &str) -> Result<Self, String> {
        match uri {
            CONTROLLER => Ok(Self::Controller),
            OPERATOR => Ok(Self::Operator),
            _ => {
                let host =
                    uri.strip_prefix(HOST).ok_or_else(|| format!("{uri:?} is no identity"))?;
                HostId::new(host).map(Self::Host).map_err(|e| e.to_string())
            }
        }
    }
}

/// A certificate of the cluster: whom it is for, and when it was issued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certified {
    /// Whom it is for.
    pub identity: PeerIdentity,
    /// The authority's clock when it issued the certificate.
    pub issued_ms: u64,
}

/// The first byte of a serial number. The time of the issue follows, then random bytes.
const SERIAL_MARK: u8 = 1;
const SERIAL_BYTES: usize = 16;

impl Certified {
    /// The serial number of a certificate that is issued at this time.
    pub fn serial(issued_ms: u64) -> [u8; SERIAL_BYTES] {
        let mut serial = *uuid::Uuid::new_v4().as_bytes();
        serial[0] = SERIAL_MARK;
        serial[1..9].copy_from_slice(&issued_ms.to_be_bytes());
        serial
    }

    /// Reads a certificate, whose signature is checked elsewhere. `None` if it is not one of a cluster, or names more
    /// than one owner.
    pub fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let certificate = EndEntityCert::try_from(certificate).ok()?;
        let mut uris = certificate.valid_uri_names();
        let identity = uris.next()?.parse().ok()?;
        let serial: &[u8; SERIAL_BYTES] = certificate.serial().try_into().ok()?;
        let [SERIAL_MARK, issued @ .., _, _, _, _, _, _, _] = serial else { return None };
        let issued_ms = u64::from_be_bytes(*issued);
        uris.next().is_none().then_some(Self { identity, issued_ms })
    }
}

/// The time since the beginning of 1970; 0 for earlier ones.
pub(crate) fn since_1970(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// This moment, as certificates and lists of revoked ones have it.
pub fn now_ms() -> u64 {
    u64::try_from(since_1970(SystemTime::now()).as_millis()).unwrap_or(u64::MAX)
}

/// Lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `None` if it is not hexadecimal, two digits for each byte.
pub(crate) fn of_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    digits
        .map(|two| {
            let two = std::str::from_utf8(two).ok().filter(|two| two.len() == 2)?;
            u8::from_str_radix(two, 16).ok().filter(|_| !two.starts_with('+'))
        })
        .collect()
}

/// The SHA-256 of a certificate, in hexadecimal.
pub fn fingerprint(certificate_der: &[u8]) -> String {
    hex(&Sha256::digest(certificate_der))
}

/// Certificates and a key, as PEM.
#[derive(Clone)]
pub struct Credentials {
    /// The authority's certificate.
    pub ca: Vec<u8>,
    /// The own certificate and its key.
    pub identity: Vec<u8>,
}

impl Credentials {
    /// Keeps them in a directory, which is made if it does not exist. Nobody else can read them there.
    ///
    /// # Errors
    /// When a file can't be written.
    pub fn save(&self, dir: &Path) -> Result<(), Problem> {
        write_private(&dir.join(CA_FILE), &self.ca)?;
        write_private(&dir.join(IDENTITY_FILE), &self.identity)
    }
}

/// The certificates of a file; an error says why there are none.
pub(crate) fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match found {
        Ok(found) if found.is_empty() => Err("there is no certificate".to_owned()),
        found => found.map_err(|e| e.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_written_and_read_as_a_uri() {
        let host = HostId::new("home1").expect("a name");
        for identity in [PeerIdentity::Controller, PeerIdentity::Operator, PeerIdentity::Host(host)]
        {
            assert_eq!(identity.to_string().parse(), Ok(identity));
        }
        for bad in ["", "perigee:", "perigee:host:", "perigee:host:A", "perigee:host:a/b", "host:a"]
        {
            assert!(bad.parse::<PeerIdentity>().is_err(), "{bad:?}");
        }
    }
}
