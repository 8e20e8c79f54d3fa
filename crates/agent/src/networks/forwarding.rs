//! The kernel's forwarding of IPv4 packets, which the gateways of networks with a way out need.
//!
//! A host that forwards nothing else is not to become a router for its neighbours. So the agent remembers that it has turned
//! forwarding on itself. Then the packet filter drops what is neither from a gateway nor to one, and when the last such
//! gateway is gone, forwarding is off again.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

const SWITCH: &str = "/proc/sys/net/ipv4/ip_forward";

/// The file says for which boot and which network namespace it was written.
fn file(dir: &Path) -> PathBuf {
    dir.join("forwarding")
}

fn here() -> Result<String, String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let namespace = std::fs::read_link("/proc/thread-self/ns/net");
    match (boot, namespace) {
        (Ok(boot), Ok(namespace)) => Ok(format!("{} {}", boot.trim(), namespace.display())),
        (Err(error), _) | (_, Err(error)) => Err(format!("can't tell this boot: {error}")),
    }
}

fn is_on() -> Result<bool, String> {
    let text = std::fs::read_to_string(SWITCH);
    text.map(|text| text.trim() != "0").map_err(|error| format!("can't read {SWITCH}: {error}"))
}

fn switch(to: &str) -> Result<(), String> {
    std::fs::write(SWITCH, to).map_err(|error| format!("can't write {SWITCH}: {error}"))
}

/// Whether the agent has turned it on, or will: then the host forwards nothing else. It is asked before [`bring_about`].
pub fn is_own(dir: &Path, is_needed: bool) -> Result<bool, String> {
    let path = file(dir);
    let known = match std::fs::read_to_string(&path) {
        Ok(text) => text == here()?,
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        Err(error) => return Err(format!("can't read {}: {error}", path.display())),
    };
    if known || !is_needed || is_on()? {
        return Ok(known);
    }
    let written = std::fs::write(&path, here()?);
    written.map_err(|error| format!("can't write {}: {error}", path.display()))?;
    Ok(true)
}

/// Turns it on if it is needed, and off if it is not and the agent has turned it on.
pub fn bring_about(dir: &Path, is_needed: bool, is_own: bool) -> Result<(), String> {
    if is_needed {
        return if is_on()? { Ok(()) } else { switch("1") };
    }
    if !is_own {
        return Ok(());
    }
    switch("0")?;
    let path = file(dir);
    std::fs::remove_file(&path).map_err(|error| format!("can't remove {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a network namespace of its own.
    #[test]
    fn it_is_on_for_as_long_as_it_is_needed_and_then_as_it_was() {
        if !nix::unistd::Uid::effective().is_root() {
            return;
        }
        let looked = || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("a namespace");
            let dir = tempfile::tempdir().expect("a directory");
            let pass = |is_needed| {
                let own = is_own(dir.path(), is_needed).expect("it is known");
                bring_about(dir.path(), is_needed, own).expect("it is done");
                (own, is_on().expect("it is known"))
            };
            switch("0").expect("it is off");
            assert_eq!(pass(false), (false, false));
            assert_eq!(pass(true), (true, true), "the agent's own");
            assert_eq!(pass(true), (true, true));
            switch("0").expect("somebody turns it off");
            assert_eq!(pass(true), (true, true), "it is on again");
            assert_eq!(pass(false), (true, false), "as it was");
            switch("1").expect("it is on");
            assert_eq!(pass(true), (false, true), "the operator's");
            assert_eq!(pass(false), (false, true), "and it stays");
            // A file of an earlier boot says nothing.
            std::fs::write(file(dir.path()), "another boot").expect("a file");
            assert_eq!(pass(false), (false, true));
        };
        std::thread::spawn(looked).join().expect("no panic");
    }
}
