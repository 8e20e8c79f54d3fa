//! The users of imports. Each import has one that no other process of the host has, so its programs can neither read what
//! another import reads nor change what that writes, and all that they have started can be found and ended.

use std::collections::BTreeSet;
use std::io;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::libc::uid_t;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::{Gid, Pid, Uid, setgroups, setresgid, setresuid};
use uuid::Uuid;

/// The owner of files that were uploaded for an import, and nobody's user. Neither distributions nor systemd give this
/// one and the following ones to anybody, and no VM has them.
pub const UPLOADED: u32 = 1_900_065_536;
/// Only who ends the processes of an import has it.
const ENDER: u32 = 1_900_065_537;
/// So many that two volume servers of one host do not choose the same one.
const FIRST: u32 = 1_920_000_000;
const COUNT: u32 = 1 << 24;

static TAKEN: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

fn taken() -> MutexGuard<'static, BTreeSet<u32>> {
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether only an import has such a user.
pub fn is_for_imports(uid: u32) -> bool {
    uid == UPLOADED || (FIRST..FIRST + COUNT).contains(&uid)
}

/// The user and group of one import, until this is dropped. A server that is not root has only its own.
#[derive(Debug)]
pub struct RunUser(Option<u32>);

impl RunUser {
    /// Takes a user that no other import of this process has.
    pub fn new() -> Self {
        if !Uid::effective().is_root() {
            return Self(None);
        }
        let mut taken = taken();
        loop {
            let random = Uuid::new_v4().as_u128() % u128::from(COUNT);
            let uid = FIRST + u32::try_from(random).unwrap_or(0);
            if taken.insert(uid) {
                return Self(Some(uid));
            }
        }
    }

    /// `None` if it has no user of its own.
    pub fn uid(&self) -> Option<u32> {
        self.0
    }
}

impl Drop for RunUser {
    fn drop(&mut self) {
        if let Some(uid) = self.0 {
            taken().remove(&uid);
        }
    }
}

/// Ends all processes of a run when it is dropped.
pub struct End {
    uid: Option<u32>,
    group: Option<Pid>,
}

impl End {
    /// Of the process with this id, which leads a group.
    pub fn of(user: &RunUser, pid: Option<u32>) -> Self {
        let group = pid.and_then(|pid| i32::try_from(pid).ok()).map(Pid::from_raw);
        Self { uid: user.uid(), group }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let ended = match (self.uid, self.group) {
            (Some(uid), _) => kill_all_of(uid),
            (None, Some(group)) => match killpg(group, Signal::SIGKILL) {
                Err(error) if error != Errno::ESRCH => Err(error.into()),
                _ => Ok(()),
            },
            (None, None) => Ok(()),
        };
        if let Err(error) = ended {
            tracing::warn!(%error, "can't end what an import has started");
        }
    }
}

/// Kills all processes of a user. Who does it has this user only as the effective one: it may signal them, and they may not
/// signal it.
fn kill_all_of(uid: u32) -> io::Result<()> {
    let (user, ender) = (Uid::from_raw(uid), Uid::from_raw(ENDER));
    let group = Gid::from_raw(ENDER);
    let end = move || {
        setgroups(&[])?;
        setresgid(group, group, group)?;
        setresuid(ender, user, ender)?;
        // With any other user, the signal would go to others.
        let (mut real, mut effective, mut saved): (uid_t, uid_t, uid_t) = (0, 0, 0);
        // SAFETY: the three pointers are those of local variables.
        Errno::result(unsafe { nix::libc::getresuid(&mut real, &mut effective, &mut saved) })?;
        if (real, effective, saved) != (ENDER, uid, ENDER) {
            return Err(Errno::EPERM.into());
        }
        match kill(Pid::from_raw(-1), Signal::SIGKILL) {
            // Nothing is started: this was all.
            Ok(()) | Err(Errno::ESRCH) => Err(Errno::ECANCELED.into()),
            Err(error) => Err(error.into()),
        }
    };
    let mut command = Command::new("/proc/self/exe");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // SAFETY: between fork and exec the closure only makes system calls that are async-signal-safe.
    unsafe { std::os::unix::process::CommandExt::pre_exec(&mut command, end) };
    match command.spawn() {
        Err(error) if error.raw_os_error() == Some(Errno::ECANCELED as i32) => Ok(()),
        Err(error) => Err(error),
        Ok(mut started) => {
            started.kill()?;
            started.wait()?;
            Err(io::Error::other("a process was started that should have ended others"))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt as _;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn no_two_imports_have_one_user() {
        let users: Vec<RunUser> = (0..64).map(|_| RunUser::new()).collect();
        let uids: BTreeSet<_> = users.iter().filter_map(RunUser::uid).collect();
        if Uid::effective().is_root() {
            assert_eq!(uids.len(), users.len());
            assert!(uids.iter().all(|uid| is_for_imports(*uid) && *uid != UPLOADED));
        } else {
            assert!(uids.is_empty());
        }
    }

    /// What had left its group went on after the import, without a limit of time.
    #[test]
    fn nothing_that_a_run_has_started_goes_on_after_it() {
        assert!(Uid::effective().is_root(), "run this test as root, as `make test` does");
        let (user, other) = (RunUser::new(), RunUser::new());
        let sleep_of = |of: &RunUser| {
            let uid = of.uid().expect("a user");
            let mut sleep = Command::new("setsid");
            sleep.args(["sleep", "600"]).uid(uid).gid(uid);
            sleep.spawn().expect("util-linux' setsid")
        };
        let (mut left, mut stays) = (sleep_of(&user), sleep_of(&other));
        drop(End::of(&user, None));
        let begun = Instant::now();
        while left.try_wait().expect("a child").is_none() {
            assert!(begun.elapsed() < Duration::from_secs(30), "it goes on");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(stays.try_wait().expect("a child").is_none(), "another import's is not ended");
        stays.kill().expect("it runs");
        stays.wait().expect("it ends");
    }
}
