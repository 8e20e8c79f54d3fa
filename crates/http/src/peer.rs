//! Who sends a request, and whom a certificate of the cluster is for.

use std::fmt;
use std::str::FromStr;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use perigee_model::{HostId, Problem};
use tokio_rustls::rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

use crate::{ClientAddress, Failure};

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

/// Who sends a request: an extension of each request, and an extractor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peer {
    /// A process of this host that runs as root or as this one's user, over a unix socket.
    Local,
    /// It has shown a certificate of the cluster.
    Known(Certified),
    /// It speaks TLS and has shown no certificate, or is a process of another user of this host.
    Stranger,
    /// It speaks plain TCP, so this is not known.
    NotKnown,
}

impl Peer {
    /// Who is at the other end of a connection without TLS. The permissions of a unix socket's directory are not enough:
    /// somebody may have opened them for another user.
    pub(crate) fn of_plain(address: ClientAddress, user: Option<u32>) -> Self {
        match (address.0, user) {
            (Some(_), _) => Self::NotKnown,
            (None, Some(user)) if user == 0 || user == nix::unistd::geteuid().as_raw() => {
                Self::Local
            }
            (None, _) => Self::Stranger,
        }
    }

    /// Whom its certificate is for, if it has shown one.
    pub fn identity(&self) -> Option<&PeerIdentity> {
        match self {
            Self::Known(certified) => Some(&certified.identity),
            Self::Local | Self::Stranger | Self::NotKnown => None,
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("a process of this host"),
            Self::Known(Certified { identity: PeerIdentity::Controller, .. }) => {
                f.write_str("the controller")
            }
            Self::Known(Certified { identity: PeerIdentity::Host(host), .. }) => {
                write!(f, "host {host}")
            }
            Self::Known(Certified { identity: PeerIdentity::Operator, .. }) => {
                f.write_str("an operator")
            }
            Self::Stranger => f.write_str("a client without a certificate"),
            Self::NotKnown => f.write_str("a client over plain TCP"),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Peer {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        parts.extensions.get::<Self>().cloned().ok_or_else(|| {
            let what = format!("{} {}", parts.method, parts.uri.path());
            Failure(Problem::internal(what, "it is not known who sends this request"))
        })
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
