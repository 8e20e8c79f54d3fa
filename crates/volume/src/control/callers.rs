//! Who may send which request to a volume server over TLS.
//!
//! | who | may |
//! |---|---|
//! | the controller | everything |
//! | a host | look at a volume, flush it, change its writer epoch: the agent of a VM that migrates; seal a volume and have it depart: the volume server that becomes its home or has a replica |
//! | an operator | read the metrics |
//!
//! A host changes an epoch, seals a volume and has it depart only where the controller has allowed it: [`super::grants`].
//! Whether an epoch or a tenure is the right one is decided where it is changed.

use axum::http::Method;
use perigee_http::{Peer, PeerIdentity};

/// Whether this peer may send such a request. `path` has the parts of the address, for example `v1`, `volumes`, a volume's name.
pub fn may(peer: &Peer, method: &Method, path: &[&str]) -> bool {
    match peer.identity() {
        Some(PeerIdentity::Controller) => true,
        Some(PeerIdentity::Host(_)) => matches!(
            (method.as_str(), path),
            ("GET", ["v1", "volumes", _])
                | ("POST", ["v1", "batch", "flush" | "epochs"])
                | ("POST", ["v1", "volumes", _, "epoch" | "seal" | "depart"])
                | ("POST", ["v1", "volumes", _, "replica", "seal" | "pins"])
        ),
        Some(PeerIdentity::Operator) => matches!((method.as_str(), path), ("GET", ["metrics"])),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use perigee_http::Certified;
    use perigee_model::HostId;

    use super::*;

    fn known(identity: PeerIdentity) -> Peer {
        Peer::Known(Certified { identity, issued_ms: 0 })
    }

    #[test]
    fn another_host_moves_writers_and_homes_and_does_nothing_else() {
        let host = known(PeerIdentity::Host(HostId::new("home1").expect("a name")));
        let controller = known(PeerIdentity::Controller);
        let strangers = [Peer::Stranger, known(PeerIdentity::Operator)];
        for (method, path) in [
            (Method::GET, &["v1", "volumes"][..]),
            (Method::POST, &["v1", "volumes"]),
            (Method::DELETE, &["v1", "volumes", "a"]),
            (Method::GET, &["v1", "volumes", "a", "data"]),
            (Method::GET, &["v1", "volumes", "a", "hosts"]),
            (Method::PUT, &["v1", "volumes", "a", "hosts"]),
            (Method::PUT, &["v1", "volumes", "a", "hosts", "home1"]),
            (Method::PUT, &["v1", "volumes", "a", "data"]),
            (Method::POST, &["v1", "volumes", "a", "take"]),
            (Method::POST, &["v1", "volumes", "a", "epoch", "issue"]),
            (Method::POST, &["v1", "images"]),
            (Method::PUT, &["v1", "trees", "a"]),
            (Method::DELETE, &["v1", "trees", "a"]),
            (Method::GET, &["v1", "clients"]),
            (Method::GET, &["v1", "sources"]),
            (Method::GET, &["v1", "volumes", "a", "replica", "pins"]),
            (Method::POST, &["v1", "volumes", "a", "replica", "promote"]),
            (Method::PUT, &["v1", "sites"]),
            (Method::POST, &["v1", "trace"]),
            (Method::POST, &["v1", "measure"]),
            (Method::POST, &["v1", "measure", "perigee-measured-1", "fill"]),
            (Method::POST, &["v1", "measure", "perigee-measured-1", "portal"]),
            (Method::DELETE, &["v1", "measure", "perigee-measured-1", "portal"]),
            (Method::GET, &["v1", "a-route-of-tomorrow"]),
        ] {
            assert!(may(&controller, &method, path), "{method} {path:?}");
            assert!(!may(&host, &method, path), "{method} {path:?}");
            assert!(strangers.iter().all(|peer| !may(peer, &method, path)), "{method} {path:?}");
        }
        for (method, path) in [
            (Method::GET, &["v1", "volumes", "a"][..]),
            (Method::POST, &["v1", "batch", "epochs"]),
            (Method::POST, &["v1", "volumes", "a", "depart"]),
            (Method::POST, &["v1", "volumes", "a", "seal"]),
            (Method::POST, &["v1", "volumes", "a", "replica", "seal"]),
            (Method::POST, &["v1", "volumes", "a", "replica", "pins"]),
        ] {
            assert!(may(&host, &method, path), "{method} {path:?}");
        }
    }
}
