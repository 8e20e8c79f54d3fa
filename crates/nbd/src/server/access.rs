//! The access list: which exports a client may see. Other exports are reported to it as missing.
//!
//! The list is a small file. It is read for each request of a client, so a change takes effect at once:
//!
//! ```text
//! # export      common names of client certificates
//! data          host-a host-b
//! image:*       *
//! ```
//!
//! A name or an export may end in `*`, which matches any text. `data` also means `data@4`, and an image's name also means the
//! layer that it is (`layer:UUID`), which other servers ask for. A client on a
//! unix socket that runs as the server's own user or as root sees all exports. A VM, which has a socket of its own,
//! sees its own ones.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use perigee_model::{HostId, Problem};

use super::OneVm;

/// The options about access.
#[derive(Debug, Default)]
pub struct Access {
    /// Whether clients can list exports.
    pub listing: bool,
    /// The file with the list. Without it every client sees every export.
    pub list: Option<PathBuf>,
}

/// The client.
#[derive(Debug, Clone, Default)]
pub struct Peer {
    /// Whether it is a process of this host that needs neither TLS nor a line in the access list: one of the
    /// server's own user, or a VM.
    pub local: bool,
    /// Whether it runs as the server's own user or as root on this host, and is no VM.
    pub is_own: bool,
    /// The VM whose socket it is connected to.
    pub vm: Option<Arc<OneVm>>,
    /// Its address and port.
    pub address: String,
    /// Its address; `None` for a unix socket.
    pub ip: Option<IpAddr>,
    pub encrypted: bool,
    /// The common name in its certificate.
    pub common_name: Option<String>,
    /// The host of the cluster that it is, by its certificate.
    pub host: Option<HostId>,
}

/// The exports that one client may see at this moment.
#[derive(Debug)]
pub enum View {
    Everything,
    Only(AccessList),
    Vm(Arc<OneVm>),
}

impl View {
    /// Whether the peer may see and open the export.
    pub fn shows(&self, export: &str, peer: &Peer) -> bool {
        match self {
            Self::Everything => true,
            Self::Only(list) => list.allows(export, peer.common_name.as_deref()),
            Self::Vm(vm) => vm.has(export),
        }
    }
}

impl Access {
    /// # Errors
    /// When the list can't be read or is wrong. Then no client sees any export.
    pub fn view(&self, peer: &Peer) -> Result<View, Problem> {
        if let Some(vm) = &peer.vm {
            return Ok(View::Vm(Arc::clone(vm)));
        }
        let Some(path) = self.list.as_ref().filter(|_| !peer.local) else {
            return Ok(View::Everything);
        };
        let what = format!("can't use the access list {}", path.display());
        let text = std::fs::read_to_string(path).map_err(|e| Problem::invalid(&what, e))?;
        AccessList::parse(&text).map(View::Only).map_err(|line| {
            Problem::invalid(what, format!("line {line} names no client"))
                .next("each line is an export and the common names that may see it")
        })
    }
}

/// The exports and the common names of the certificates that may see them, as the file lists them line by line.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct AccessList {
    lines: Vec<(String, Vec<String>)>,
}

impl AccessList {
    /// The error is the number of the line that is wrong.
    fn parse(text: &str) -> Result<Self, usize> {
        let mut lines = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.split_once('#').map_or(line, |(before, _)| before);
            let mut words = line.split_whitespace().map(str::to_owned);
            let Some(export) = words.next() else { continue };
            let names: Vec<String> = words.collect();
            if names.is_empty() {
                return Err(number + 1);
            }
            lines.push((export, names));
        }
        Ok(Self { lines })
    }

    fn allows(&self, export: &str, common_name: Option<&str>) -> bool {
        let volume = export.split_once('@').map_or(export, |(volume, _)| volume);
        self.lines.iter().any(|(pattern, names)| {
            matches(pattern, volume)
                && names.iter().any(|name| {
                    common_name.map_or(name == "*", |common_name| matches(name, common_name))
                })
        })
    }
}

fn matches(pattern: &str, text: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => text.starts_with(prefix),
        None => pattern == text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list() -> AccessList {
        AccessList::parse("# who sees what\ndata host-a host-b # two\n\nimage:* *\nall-* host-a\n")
            .expect("a list")
    }

    #[test]
    fn an_export_is_seen_by_those_whom_its_line_names() {
        assert!(list().allows("data", Some("host-a")));
        assert!(list().allows("data@7", Some("host-b")));
        assert!(!list().allows("data", Some("host-c")));
        assert!(!list().allows("data", None));
        assert!(!list().allows("other", Some("host-a")));
    }

    #[test]
    fn a_star_stands_for_anything() {
        assert!(list().allows("image:debian", Some("host-c")));
        assert!(list().allows("image:debian", None));
        assert!(list().allows("all-mine", Some("host-a")));
        assert!(!list().allows("image", Some("host-a")));
    }

    #[test]
    fn a_line_that_names_nobody_is_wrong() {
        assert_eq!(AccessList::parse("data a\nother\n"), Err(2));
    }

    #[test]
    fn a_vm_sees_its_own_exports_only() {
        let vm = Arc::new(OneVm::new(7, &["data@3".to_owned()]));
        let peer = Peer { local: true, vm: Some(vm.clone()), ..Peer::default() };
        let view = Access { listing: true, list: None }.view(&peer).expect("a view");
        assert!(view.shows("data@3", &peer));
        for other in ["data", "data@4", "other@3", "data@layers", "image:debian"] {
            assert!(!view.shows(other, &peer), "{other}");
        }
        vm.change(&["other@3".to_owned()]);
        assert!(view.shows("other@3", &peer) && !view.shows("data@3", &peer));
    }

    #[test]
    fn the_sessions_of_exports_that_a_vm_keeps_go_on() {
        let [one, two] = ["one@3", "two@3"].map(str::to_owned);
        let vm = OneVm::new(7, &[one.clone(), two.clone()]);
        let [first, second] = [&one, &two].map(|name| vm.end_of(name));
        vm.change(&[one.clone(), "three@1".to_owned()]);
        assert!(!first.is_cancelled() && second.is_cancelled());
        assert!(vm.end_of(&two).is_cancelled(), "one that was agreed on while it went");
        vm.change(std::slice::from_ref(&two));
        assert!(first.is_cancelled() && !vm.end_of(&two).is_cancelled(), "it has come back");
    }

    #[test]
    fn without_a_list_and_on_a_unix_socket_everything_is_seen() {
        let open = Access { listing: true, list: None };
        let view = open.view(&Peer::default()).expect("a view");
        assert!(matches!(view, View::Everything));
        let listed = Access { listing: true, list: Some("/nonexistent".into()) };
        assert!(listed.view(&Peer::default()).is_err());
        let local = Peer { local: true, ..Peer::default() };
        let view = listed.view(&local).expect("a view");
        assert!(matches!(view, View::Everything));
    }
}
