//! The users of VMs: each VM's QEMU runs as a user of its own, so that a guest that breaks out of QEMU reaches no other
//! VM's files, processes or disks.
//!
//! A VM's user is the owner of its `run` directory. So it is known after a restart, and free when the VM is deleted.
//! A VM that moves to another host gets a user there.

use std::collections::BTreeSet;
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::unistd::{Gid, Uid};
use perigee_model::Problem;

use crate::files::VmDir;
use crate::process::QemuUser;

/// The users that VMs may have, from the first to the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VmUids {
    first: u32,
    last: u32,
}

impl VmUids {
    /// Whether this is the user of a VM, or of what serves VMs' network cards.
    pub fn contains(self, uid: u32) -> bool {
        (self.first..=self.last).contains(&uid)
    }

    /// The group of what serves VMs' network cards: that of the last user, who is no VM's.
    pub fn group(self) -> Gid {
        Gid::from_raw(self.last)
    }
}

impl Default for VmUids {
    /// Neither distributions nor systemd give these to anybody.
    fn default() -> Self {
        Self { first: 1_900_000_000, last: 1_900_065_535 }
    }
}

impl fmt::Display for VmUids {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl FromStr for VmUids {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts =
            text.split_once('-').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        match parts {
            // 65534 is nobody, 65535 and 4294967295 mean "no user".
            Some((first, last)) if first >= 1000 && first < last && last < u32::MAX => {
                let range = Self { first, last };
                match (65_534..=65_535).find(|uid| (first..=last).contains(uid)) {
                    Some(uid) => Err(format!("{uid} is not a user that a VM can have")),
                    None => Ok(range),
                }
            }
            _ => Err(format!("{text:?} is not FIRST-LAST, two user ids from 1000 on")),
        }
    }
}

/// Gives each VM of this host a user of its own.
#[derive(Debug)]
pub struct Users {
    range: VmUids,
    /// The group of `/dev/kvm`, if KVM is used.
    group: Option<Gid>,
    /// Where the search for the next user begins. A user that was just freed is not given again soon.
    next: Mutex<u32>,
}

impl Users {
    /// # Errors
    /// If this host does not have these users.
    pub fn new(range: VmUids) -> Result<Self, Problem> {
        let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        if !map.is_empty() && !is_mapped(&map, range) {
            let what = format!("can't run VMs as users {range}");
            let known = map.lines().map(str::trim).collect::<Vec<_>>().join("; ");
            let why = format!("the user namespace of this process has only these ids: {known}");
            return Err(Problem::invalid(what, why)
                .next("choose others with --vm-uids FIRST-LAST; /proc/self/uid_map shows the ids and how many"));
        }
        // Another place after each start of the agent.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        let offset = u32::try_from(now % u64::from(range.last - range.first)).unwrap_or(0);
        Ok(Self { range, group: None, next: Mutex::new(range.first + offset) })
    }

    /// The last user is no VM's.
    pub fn for_tests_of_the_host(&self) -> QemuUser {
        self.qemu_user(Uid::from_raw(self.range.last))
    }

    /// Remembers the group with which this user can use `/dev/kvm`, if it has one.
    pub fn take_group(&mut self, user: QemuUser) {
        self.group = Some(user.gid).filter(|gid| gid.as_raw() != user.uid.as_raw());
    }

    /// The user of a VM with the group with which its QEMU runs.
    pub fn qemu_user(&self, uid: Uid) -> QemuUser {
        QemuUser { uid, gid: self.group.unwrap_or(Gid::from_raw(uid.as_raw())) }
    }

    /// Makes the directories of a VM for a user that nobody has. A VM whose directories are there keeps its user.
    pub fn create(&self, dir: &VmDir, state: &Path) -> Result<(), Problem> {
        // One after the other, so that no two VMs get the same.
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(uid) = dir.user()
            && !uid.is_root()
        {
            return dir.create(uid);
        }
        let what = "can't choose a user for a VM";
        let taken = taken(state).map_err(|error| Problem::internal(what, error))?;
        let range = self.range.first..self.range.last;
        let from_next = (*next..range.end).chain(range.start..*next);
        let Some(uid) = from_next.into_iter().find(|uid| !taken.contains(uid)) else {
            let why = format!("all users of --vm-uids {} have a VM or a process", self.range);
            return Err(
                Problem::no_space(what, why).next("delete VMs, or give the agent more users")
            );
        };
        *next = if uid + 1 < range.end { uid + 1 } else { range.start };
        dir.create(Uid::from_raw(uid))
    }
}

/// Whether a user namespace has all these users. Each line of the map is: first id inside, first id outside, count.
fn is_mapped(map: &str, range: VmUids) -> bool {
    map.lines().any(|line| {
        let mut numbers = line.split_whitespace().map(|number| number.parse::<u64>().unwrap_or(0));
        let (inside, _, count) = (numbers.next(), numbers.next(), numbers.next());
        let (Some(inside), Some(count)) = (inside, count) else { return false };
        inside <= u64::from(range.first) && u64::from(range.last) < inside + count
    })
}

/// The users of this agent's VMs, and of all processes: another agent on this machine may have the same range.
fn taken(state: &Path) -> std::io::Result<BTreeSet<u32>> {
    let mut taken = BTreeSet::new();
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(state.join("vms"))? {
        paths.push(entry?.path().join("run"));
    }
    for entry in std::fs::read_dir("/proc")? {
        paths.push(entry?.path());
    }
    for path in paths {
        match std::fs::symlink_metadata(path) {
            Ok(meta) => drop(taken.insert(meta.uid())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            // A process that ends just now.
            Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use perigee_model::VmId;

    use super::*;

    fn create(users: &Users, state: &Path, name: &str) -> Result<u32, Problem> {
        let dir = VmDir::new(state, &VmId::new(name).unwrap());
        users.create(&dir, state)?;
        Ok(dir.user().unwrap().as_raw())
    }

    #[test]
    fn each_vm_has_a_user_of_its_own_that_it_keeps_and_that_is_free_at_its_end() {
        if !Uid::effective().is_root() {
            return;
        }
        let state = tempfile::tempdir().unwrap();
        std::fs::create_dir(state.path().join("vms")).unwrap();
        // The last one is no VM's, so there are three.
        let range: VmUids = "1777000000-1777000003".parse().unwrap();
        let users = Users::new(range).unwrap();
        let (a, b) = (create(&users, state.path(), "a"), create(&users, state.path(), "b"));
        let (a, b) = (a.unwrap(), b.unwrap());
        assert_ne!(a, b);
        assert_eq!(create(&users, state.path(), "a").unwrap(), a);
        // After a restart of the agent nothing is given twice.
        let users = Users::new(range).unwrap();
        let c = create(&users, state.path(), "c").unwrap();
        assert!(c != a && c != b, "{a} {b} {c}");
        let full = create(&users, state.path(), "d").unwrap_err();
        assert!(full.why.contains("--vm-uids 1777000000-1777000003"), "{full}");
        VmDir::new(state.path(), &VmId::new("b").unwrap()).remove().unwrap();
        assert_eq!(create(&users, state.path(), "e").unwrap(), b);
    }

    #[test]
    fn a_range_of_users_is_checked() {
        assert_eq!("2000-2999".parse(), Ok(VmUids { first: 2000, last: 2999 }));
        for bad in ["", "0-5000", "5-4", "3000-2000", "2000", "2000-4294967295", "60000-70000"] {
            assert!(bad.parse::<VmUids>().is_err(), "{bad:?}");
        }
        let range = VmUids { first: 2000, last: 2999 };
        assert!(is_mapped("         0          0 4294967295\n", range));
        assert!(is_mapped("0 100000 1000\n1000 101000 64536\n", range));
        assert!(!is_mapped("0 100000 2500\n", range));
    }
}
