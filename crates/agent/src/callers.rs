//! Who may send which request to an agent over TLS.
//!
//! | who | may |
//! |---|---|
//! | the controller | everything |
//! | a host | look at a VM that comes from it, ask for its fate and its key, say that it is paused, measure the link |

use axum::http::Method;
use perigee_http::{Peer, PeerIdentity};
use perigee_model::{HostId, Problem, VmId};

/// Whether this peer may send such a request. `path` has the parts of the address, for example `v1`, `vms`, a VM's name.
pub fn may(peer: &Peer, method: &Method, path: &[&str]) -> bool {
    match peer.identity() {
        Some(PeerIdentity::Controller) => true,
        Some(PeerIdentity::Host(_)) => matches!(
            (method.as_str(), path),
            // The source of a migration asks the destination.
            ("GET", ["v1", "vms", _])
                | ("POST", ["v1", "vms", _, "end-unless-ran" | "expect-frames" | "migration-key"])
                | ("GET", ["v1", "blob"])
        ),
        Some(PeerIdentity::Operator) | None => false,
    }
}

/// Whether who asks may know of a VM that came from this host, or that began here. Of other hosts only the one from which
/// it comes may.
///
/// # Errors
/// `Forbidden`.
pub fn check_source(peer: &Peer, vm: &VmId, from: Option<&HostId>) -> Result<(), Problem> {
    match peer.identity() {
        Some(PeerIdentity::Host(host)) if from != Some(host) => {
            let why = format!("it does not come from host {host}");
            Err(Problem::forbidden(format!("can't tell of the VM {vm}"), why))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use perigee_http::Certified;

    use super::*;

    fn known(identity: PeerIdentity) -> Peer {
        Peer::Known(Certified { identity, issued_ms: 0 })
    }

    #[test]
    fn a_host_hears_only_of_vms_that_come_from_it() {
        let vm = VmId::new("a").expect("a name");
        let host = |name: &str| HostId::new(name).expect("a name");
        let home1 = known(PeerIdentity::Host(host("home1")));
        check_source(&home1, &vm, Some(&host("home1"))).expect("it sends the VM");
        for from in [None, Some(&host("cloud1"))] {
            let refused = check_source(&home1, &vm, from).expect_err("it does not");
            assert_eq!(refused.kind, perigee_model::ProblemKind::Forbidden);
            let controller = known(PeerIdentity::Controller);
            check_source(&controller, &vm, from).expect("it may do everything");
        }
    }

    #[test]
    fn only_the_controller_starts_ends_and_migrates_vms() {
        let host = known(PeerIdentity::Host(HostId::new("home1").expect("a name")));
        let controller = known(PeerIdentity::Controller);
        let strangers = [Peer::Stranger, known(PeerIdentity::Operator)];
        for (method, path) in [
            (Method::PUT, &["v1", "vms", "a"][..]),
            (Method::DELETE, &["v1", "vms", "a"]),
            (Method::GET, &["v1", "vms", "a", "console", "attach"]),
            (Method::GET, &["v1", "vms", "a", "vnc"]),
            (Method::GET, &["v1", "vms", "a", "ssh"]),
            (Method::GET, &["v1", "networks", "7", "ssh", "10.7.0.2"]),
            (Method::POST, &["v1", "vms", "a", "guest-agent"]),
            (Method::POST, &["v1", "vms", "a", "change"]),
            (Method::POST, &["v1", "vms", "a", "power-button"]),
            (Method::POST, &["v1", "vms", "a", "migrate"]),
            (Method::POST, &["v1", "vms", "a", "migrate", "cancel"]),
            (Method::POST, &["v1", "vms", "a", "migrate", "grant"]),
            (Method::GET, &["v1", "vms", "a", "console"]),
            (Method::POST, &["v1", "vms", "a", "begin-command"]),
            (Method::POST, &["v1", "vms", "a", "end-command"]),
            (Method::POST, &["v1", "vms", "a", "sync"]),
            (Method::GET, &["v1", "vms", "a", "events"]),
            (Method::GET, &["v1", "vms"]),
            (Method::GET, &["v1", "changes"]),
            (Method::PUT, &["v1", "networks"]),
            (Method::POST, &["v1", "probe"]),
            (Method::GET, &["v1", "a-route-of-tomorrow"]),
        ] {
            assert!(may(&controller, &method, path), "{method} {path:?}");
            assert!(!may(&host, &method, path), "{method} {path:?}");
            assert!(strangers.iter().all(|peer| !may(peer, &method, path)), "{method} {path:?}");
        }
        assert!(may(&host, &Method::GET, &["v1", "vms", "a"]));
        assert!(may(&host, &Method::POST, &["v1", "vms", "a", "end-unless-ran"]));
        assert!(may(&host, &Method::POST, &["v1", "vms", "a", "expect-frames"]));
        assert!(may(&host, &Method::GET, &["v1", "blob"]));
    }
}
