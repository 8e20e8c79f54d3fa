//! Who sends a request, and from which address.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use perigee_model::Problem;

use crate::certificate::{Certified, PeerIdentity};
use crate::reply::Failure;

/// The address from which a request comes, as an extension of the request; `None` for a unix socket of this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientAddress(pub Option<IpAddr>);

impl From<SocketAddr> for ClientAddress {
    fn from(address: SocketAddr) -> Self {
        Self(Some(address.ip().to_canonical()))
    }
}

impl From<tokio::net::unix::SocketAddr> for ClientAddress {
    fn from(_: tokio::net::unix::SocketAddr) -> Self {
        Self(None)
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
