//! Who may send which request to an agent over TLS.
//!
//! | who | may |
//! |---|---|
//! | the controller | everything |
//! | a host | look at a VM that migrates, ask for its fate and its key, measure the link |

use axum::http::Method;
use perigee_http::{Peer, PeerIdentity};

pub fn may(peer: &Peer, method: &Method, path: &[&str]) -> bool {
    match peer.identity() {
        Some(PeerIdentity::Controller) => true,
        Some(PeerIdentity::Host(_)) => matches!(
            (method.as_str(), path),
            // The source of a migration asks the destination.
            ("GET", ["v1", "vms", _])
                | ("POST", ["v1", "vms", _, "end-unless-ran" | "migration-key"])
                | ("GET", ["v1", "blob"])
        ),
        Some(PeerIdentity::Operator) | None => false,
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
    fn only_the_controller_starts_ends_and_migrates_vms() {
        let host = known(PeerIdentity::Host(HostId::new("home1").expect("a name")));
        let controller = known(PeerIdentity::Controller);
        let strangers = [Peer::Stranger, known(PeerIdentity::Operator)];
        for (method, path) in [
            (Method::PUT, &["v1", "vms", "a"][..]),
            (Method::DELETE, &["v1", "vms", "a"]),
            (Method::POST, &["v1", "vms", "a", "migrate"]),
            (Method::POST, &["v1", "vms", "a", "migrate", "cancel"]),
            (Method::GET, &["v1", "vms", "a", "console"]),
            (Method::GET, &["v1", "vms", "a", "events"]),
            (Method::GET, &["v1", "vms"]),
            (Method::GET, &["v1", "changes"]),
            (Method::POST, &["v1", "probe"]),
            (Method::GET, &["v1", "a-route-of-tomorrow"]),
        ] {
            assert!(may(&controller, &method, path), "{method} {path:?}");
            assert!(!may(&host, &method, path), "{method} {path:?}");
            assert!(strangers.iter().all(|peer| !may(peer, &method, path)), "{method} {path:?}");
        }
        assert!(may(&host, &Method::GET, &["v1", "vms", "a"]));
        assert!(may(&host, &Method::POST, &["v1", "vms", "a", "end-unless-ran"]));
        assert!(may(&host, &Method::GET, &["v1", "blob"]));
    }
}
