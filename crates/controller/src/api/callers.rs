//! Who may send which request to the controller over TLS. A process of the controller's host may do everything over the
//! unix socket, which is protected by the permissions of its directory.
//!
//! | who | may |
//! |---|---|
//! | an operator | everything |
//! | host H | report as H, renew its certificate, ask which certificates are revoked |
//! | a client without a certificate | enrol with a token |

use axum::http::Method;
use perigee_http::{Peer, PeerIdentity};

pub fn may(peer: &Peer, method: &Method, path: &[&str]) -> bool {
    match peer.identity() {
        Some(PeerIdentity::Operator) => true,
        Some(PeerIdentity::Host(own)) => match (method.as_str(), path) {
            ("PUT", ["v1", "hosts", host]) => *host == own.as_str(),
            ("POST", ["v1", "hosts", host, "certificate"]) => *host == own.as_str(),
            ("GET", ["v1", "revoked"]) => true,
            _ => false,
        },
        // The controller does not call itself.
        Some(PeerIdentity::Controller) => false,
        None => matches!((method.as_str(), path), ("POST", ["v1", "enrol"])),
    }
}
