//! The lease of a rented host: a host whose controller is silent for too long ends itself, so that a controller that is gone costs minutes
//! of rent and not a month.
//!
//! ```text
//!   the controller asks ──▶ renewed, the whole length is left ──▶ silence ──▶ nothing is left ──▶ the command, until the host is off
//!                                  ▲                                 │
//!                                  └──────── it asks again ──────────┘
//! ```
//!
//! Time is the kernel's, which nobody can set, and the time of a suspended machine counts. What is left is kept in a file, so a restart of the
//! agent neither lengthens nor cuts the lease, and the time in which no agent runs counts. After a reboot the lease goes on with what was left
//! before, less the time since this boot: nobody has seen for how long the machine was off. VMs that run do not hold the end up: nobody pays for
//! their host any more.
//!
//! A command that fails is repeated soon. One that was carried out may not have ended the host (`systemctl poweroff` only asks for that), so it is
//! repeated too, after a longer while. If the machine is started again after that, a new lease begins.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use perigee_http::Slots;
use perigee_http::clock::since_boot_ms;
use perigee_model::lease::HostLease;
use perigee_model::units::format_duration;
use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Deserialize, Serialize};
use tokio::process::{Child, Command};

/// The name of the file in the agent's state directory.
const LEASE_FILE: &str = "lease";
/// What is left is kept this often, or ten times in a lease that is shorter.
const KEEP_EVERY_MS: u64 = 10_000;
/// The lease is looked at this often.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long the command may take, and how long it is not repeated after it has failed.
const END_MAX: Duration = Duration::from_secs(60);
const REPEAT_MS: u64 = 30_000;
/// A host that still runs so long after the command was carried out is ended again.
const AGAIN_MS: u64 = 600_000;

/// The lease as its file has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Kept {
    /// Grows with each time that the lease is kept.
    number: u64,
    /// The boot of the machine, and the time since that boot, at which so much was left.
    boot_id: String,
    seen_ms: u64,
    left_ms: u64,
    /// When the command was carried out last, in time since that boot; `None`: the lease is not over.
    ended_ms: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct State {
    /// The time since the kernel's start at which the lease ends.
    until_ms: u64,
    /// When the command was carried out last; `None`: the lease is not over.
    ended_ms: Option<u64>,
    /// When it was kept last, until when it lasted then, and with which number.
    kept_ms: Option<u64>,
    kept_until_ms: u64,
    number: u64,
    /// The command has failed, and is not repeated before.
    repeat_ms: u64,
    /// Why it can't be kept.
    trouble: Option<String>,
}

/// What a look at the lease asks for.
#[derive(Debug, PartialEq, Eq)]
struct Look {
    keep: Option<Kept>,
    ends: bool,
}

/// The lease of this host.
#[derive(Debug)]
pub struct Lease {
    length_s: u64,
    end: String,
    boot_id: String,
    path: PathBuf,
    state: Mutex<State>,
}

impl Lease {
    /// Goes on from what the agent before has kept in this directory. Without that, the whole length is left.
    pub fn open(state: &Path, boot_id: &str, length_s: u64, end: &str) -> Self {
        Self::open_at(since_boot_ms(), state, boot_id, (length_s, end))
    }

    fn open_at(now_ms: u64, dir: &Path, boot_id: &str, (length_s, end): (u64, &str)) -> Self {
        let path = dir.join(LEASE_FILE);
        let kept = read(&path).unwrap_or_else(|error| {
            tracing::warn!("a new lease begins, for {} can't be read: {error}", path.display());
            None
        });
        let state = State::begin(kept, boot_id, now_ms, length_s * 1000);
        let (end, boot_id) = (end.to_owned(), boot_id.to_owned());
        Self { length_s, end, boot_id, path, state: Mutex::new(state) }
    }

    /// The lease as people see it.
    pub fn report(&self) -> HostLease {
        let (state, end) = (self.state(), self.end.clone());
        let left_ms = state.until_ms.saturating_sub(since_boot_ms());
        let is_over = state.ended_ms.is_some();
        HostLease { length_s: self.length_s, left_s: left_ms / 1000, end, is_over }
    }

    /// What people should know.
    pub fn warning(&self) -> Option<String> {
        let why = self.state().trouble.clone()?;
        let path = self.path.display();
        Some(format!("a restart of the agent would begin a new lease: can't write {path}: {why}"))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the lease again and again. `commanded_ms` says when the controller was heard last, in time since the kernel's start.
    pub async fn keep(&self, commanded_ms: impl Fn() -> Option<u64>) {
        loop {
            self.round(since_boot_ms(), commanded_ms()).await;
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Looks once, keeps what is left, and ends the host if nothing is.
    pub async fn round(&self, now_ms: u64, commanded_ms: Option<u64>) {
        let look = self.look(now_ms, commanded_ms);
        if let Some(kept) = look.keep {
            self.store(kept).await;
        }
        if look.ends {
            self.end(now_ms).await;
        }
    }

    fn look(&self, now_ms: u64, commanded_ms: Option<u64>) -> Look {
        let length_ms = self.length_s * 1000;
        let mut state = self.state();
        if let Some(at_ms) = commanded_ms.filter(|_| state.ended_ms.is_none()) {
            state.until_ms = state.until_ms.max(at_ms.min(now_ms) + length_ms);
        }
        let every_ms = KEEP_EVERY_MS.min(length_ms / 10);
        // The first renewal after a long silence is kept at once: an agent that is started again goes on with it.
        let is_longer = state.until_ms >= state.kept_until_ms + every_ms;
        let is_due = is_longer || state.kept_ms.is_none_or(|at_ms| at_ms + every_ms <= now_ms);
        let keep = is_due.then(|| state.kept(&self.boot_id, now_ms));
        let due_ms = state.ended_ms.map_or(state.until_ms, |at_ms| at_ms.saturating_add(AGAIN_MS));
        let ends = due_ms <= now_ms && state.repeat_ms <= now_ms;
        Look { keep, ends }
    }

    async fn store(&self, kept: Kept) {
        let path = self.path.clone();
        let write = move || -> std::io::Result<()> {
            let record = serde_json::to_vec(&kept).map_err(std::io::Error::other)?;
            Slots::open(&path)?.write(kept.number, &record)
        };
        let written = tokio::task::spawn_blocking(write).await;
        let failed = written.map_err(std::io::Error::other).flatten().err();
        let trouble = failed.map(|error| error.to_string());
        let is_new = trouble.is_some() && self.state().trouble.is_none();
        self.state().trouble = trouble;
        if let (true, Some(warning)) = (is_new, self.warning()) {
            tracing::warn!("{warning}");
        }
    }

    async fn end(&self, now_ms: u64) {
        let (length, end) = (format_duration(self.length_s), &self.end);
        tracing::error!(
            "the controller was not heard for {length}: this host ends itself with `{end}`"
        );
        match self.run().await {
            Ok(()) => {
                let kept = {
                    let mut state = self.state();
                    state.ended_ms = Some(now_ms);
                    state.kept(&self.boot_id, now_ms)
                };
                self.store(kept).await;
            }
            Err(why) => {
                let again = format_duration(REPEAT_MS / 1000);
                tracing::error!("`{end}` failed, and is repeated in {again}: {why}");
                self.state().repeat_ms = now_ms + REPEAT_MS;
            }
        }
    }

    async fn run(&self) -> Result<(), String> {
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(&self.end).stdin(Stdio::null()).process_group(0).kill_on_drop(true);
        let child = command.spawn().map_err(|error| error.to_string())?;
        let id = child.id().and_then(|id| i32::try_from(id).ok());
        let mut running = Running { child, group: id.and_then(Pid::from_raw) };
        let Ok(ended) = tokio::time::timeout(END_MAX, running.child.wait()).await else {
            return Err(format!("it did not end within {} s, and was ended", END_MAX.as_secs()));
        };
        // Its number may be another process's from now on. What it has left running goes on.
        running.group = None;
        match ended {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(status.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// A command that runs. If it is not waited for, all of its process group ends with this.
struct Running {
    child: Child,
    group: Option<Pid>,
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(group) = self.group {
            // The shell was not waited for, so that nobody else has its number. All of them may have ended.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl State {
    fn begin(kept: Option<Kept>, boot_id: &str, now_ms: u64, length_ms: u64) -> Self {
        let number = kept.as_ref().map_or(0, |kept| kept.number);
        let (left_ms, ended_ms) = match kept {
            None => (length_ms, None),
            Some(kept) => match kept.boot(boot_id, now_ms) {
                Boot::Same => {
                    let until_ms = kept.seen_ms.saturating_add(kept.left_ms);
                    (until_ms.saturating_sub(now_ms), kept.ended_ms)
                }
                _ if kept.ended_ms.is_some() => (length_ms, None),
                // Nobody has seen for how long the machine was off, and since its start no controller was heard.
                Boot::Another => (kept.left_ms.saturating_sub(now_ms), None),
                Boot::Unknown => (kept.left_ms, None),
            },
        };
        let until_ms = now_ms + left_ms.min(length_ms);
        let (kept_ms, kept_until_ms) = (None, until_ms);
        Self { until_ms, ended_ms, kept_ms, kept_until_ms, number, repeat_ms: 0, trouble: None }
    }

    fn kept(&mut self, boot_id: &str, now_ms: u64) -> Kept {
        (self.kept_ms, self.kept_until_ms) = (Some(now_ms), self.until_ms);
        self.number += 1;
        Kept {
            number: self.number,
            boot_id: boot_id.to_owned(),
            seen_ms: now_ms,
            left_ms: self.until_ms.saturating_sub(now_ms),
            ended_ms: self.ended_ms,
        }
    }
}

/// Which boot of the machine was kept, seen from this one.
#[derive(Debug, PartialEq, Eq)]
enum Boot {
    Same,
    Another,
    /// A kernel does not tell its id.
    Unknown,
}

impl Kept {
    fn boot(&self, boot_id: &str, now_ms: u64) -> Boot {
        let is_unknown = boot_id.is_empty() || self.boot_id.is_empty();
        // The time since the kernel's start never goes back.
        if self.seen_ms > now_ms || (!is_unknown && self.boot_id != boot_id) {
            return Boot::Another;
        }
        if is_unknown { Boot::Unknown } else { Boot::Same }
    }
}

/// The newest of what was kept; `None` if there is nothing.
fn read(path: &Path) -> std::io::Result<Option<Kept>> {
    if !path.exists() {
        return Ok(None);
    }
    let mut newest: Option<Kept> = None;
    for (_, record) in Slots::open(path)?.read()? {
        let kept: Kept = serde_json::from_slice(&record)?;
        newest = newest.into_iter().chain([kept]).max_by_key(|kept| kept.number);
    }
    Ok(newest)
}

#[cfg(test)]
#[path = "lease/any_order.rs"]
mod any_order;

#[cfg(test)]
mod tests {
    use super::*;

    const START_MS: u64 = 5_000;
    const LENGTH_S: u64 = 600;
    const LENGTH_MS: u64 = LENGTH_S * 1000;

    fn open(dir: &Path, boot_id: &str, now_ms: u64) -> Lease {
        Lease::open_at(now_ms, dir, boot_id, (LENGTH_S, "echo end >> ended; exit 0"))
    }

    fn left_ms(lease: &Lease, now_ms: u64) -> u64 {
        lease.state().until_ms.saturating_sub(now_ms)
    }

    #[test]
    fn the_host_ends_when_the_controller_was_silent_for_the_length_of_the_lease() {
        let dir = tempfile::tempdir().expect("a directory");
        let lease = open(dir.path(), "a", START_MS);
        let heard_ms = START_MS + LENGTH_MS - 1;
        assert!(!lease.look(heard_ms, None).ends, "there is a moment left");
        assert!(!lease.look(heard_ms + 1, Some(heard_ms)).ends, "it was renewed");
        assert!(!lease.look(heard_ms + LENGTH_MS - 1, Some(heard_ms)).ends);
        assert!(lease.look(heard_ms + LENGTH_MS, Some(heard_ms)).ends);
    }

    /// Only the time since the kernel's start is looked at, so a clock that is set has no way in. What remains is a time that was heard
    /// wrongly.
    #[test]
    fn a_renewal_that_lies_ahead_does_not_lengthen_the_lease() {
        let dir = tempfile::tempdir().expect("a directory");
        let lease = open(dir.path(), "a", START_MS);
        lease.look(START_MS, Some(START_MS + 10 * LENGTH_MS));
        assert_eq!(left_ms(&lease, START_MS), LENGTH_MS);
        lease.look(START_MS + 1, Some(1));
        assert_eq!(left_ms(&lease, START_MS), LENGTH_MS, "an old renewal cuts nothing");
    }

    #[tokio::test]
    async fn a_restart_of_the_agent_neither_lengthens_nor_cuts_the_lease() {
        let dir = tempfile::tempdir().expect("a directory");
        let lease = open(dir.path(), "a", START_MS);
        let mut now_ms = START_MS + 30_000;
        lease.round(now_ms, Some(now_ms)).await;
        // The agent was away for a part of the time.
        now_ms += 400_000;
        let lease = open(dir.path(), "a", now_ms);
        assert_eq!(left_ms(&lease, now_ms), LENGTH_MS - 400_000);
        lease.round(now_ms, None).await;
        now_ms += 200_000;
        assert!(open(dir.path(), "a", now_ms).look(now_ms, None).ends, "all of the time counts");
        // With a shorter lease no more than that is left.
        let begun_ms = now_ms - 500_000;
        let short = Lease::open_at(begun_ms, dir.path(), "a", (100, "true"));
        assert!(left_ms(&short, begun_ms) <= 100_000);
    }

    #[tokio::test]
    async fn after_a_reboot_as_much_is_left_as_before_less_the_time_since_the_boot() {
        let dir = tempfile::tempdir().expect("a directory");
        let lease = open(dir.path(), "a", START_MS);
        lease.round(START_MS + 200_000, None).await;
        let left_before_ms = LENGTH_MS - 200_000;
        // Another boot has another id, and its time begins anew.
        for (boot_id, now_ms) in [("b", 1_000), ("b", START_MS + 300_000), ("a", 1_000), ("", 9)] {
            let again = open(dir.path(), boot_id, now_ms);
            assert_eq!(left_ms(&again, now_ms), left_before_ms - now_ms, "{boot_id:?} {now_ms}");
        }
        let late_ms = START_MS + 10 * LENGTH_MS;
        assert!(open(dir.path(), "b", late_ms).look(late_ms, None).ends, "silent since the boot");
        // A kernel that does not tell its id may or may not have been started again.
        assert_eq!(left_ms(&open(dir.path(), "", late_ms), late_ms), left_before_ms);
    }

    #[tokio::test]
    async fn a_host_that_reboots_again_and_again_runs_out() {
        let dir = tempfile::tempdir().expect("a directory");
        let boots = (0..20).map(|boot| format!("boot {boot}"));
        for (seen, boot_id) in boots.enumerate() {
            let lease = open(dir.path(), &boot_id, 60_000);
            if left_ms(&lease, 60_000) == 0 {
                assert!(lease.look(60_000, None).ends);
                return assert_eq!(seen, 10, "a lease of 600 s has ten boots of 60 s");
            }
            lease.round(60_000, None).await;
        }
        unreachable!("it never ends");
    }

    #[tokio::test]
    async fn the_command_is_repeated_soon_if_it_has_failed_and_later_if_the_host_still_runs() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("ended");
        // The first time it fails.
        let command = format!("echo end >> {0}; [ $(wc -l < {0}) -ge 2 ]", file.display());
        let lines = || std::fs::read_to_string(&file).unwrap_or_default().lines().count();
        let at = |now_ms| Lease::open_at(now_ms, dir.path(), "a", (LENGTH_S, &command));
        let lease = at(START_MS);
        let mut now_ms = START_MS + LENGTH_MS - 1;
        lease.round(now_ms, None).await;
        assert_eq!(lines(), 0, "a moment is left");
        now_ms += 1;
        lease.round(now_ms, None).await;
        lease.round(now_ms + REPEAT_MS - 1, None).await;
        assert_eq!((lines(), lease.report().is_over), (1, false), "it has failed");
        now_ms += REPEAT_MS;
        lease.round(now_ms, None).await;
        assert_eq!((lines(), lease.report().is_over), (2, true));
        // The controller does not call it off, and a restart of the agent does not begin the time anew.
        lease.round(now_ms + 1_000, Some(now_ms + 1_000)).await;
        let again = at(now_ms + 1_000);
        again.round(now_ms + AGAIN_MS - 1, None).await;
        assert_eq!((lines(), again.report().is_over), (2, true));
        again.round(now_ms + AGAIN_MS, None).await;
        assert_eq!(lines(), 3, "the host still runs");
        again.round(now_ms + 2 * AGAIN_MS - 1, None).await;
        assert_eq!(lines(), 3);
        at(now_ms + 2 * AGAIN_MS).round(now_ms + 2 * AGAIN_MS, None).await;
        assert_eq!(lines(), 4);
        // Somebody has started the machine again.
        let next = Lease::open_at(1_000, dir.path(), "b", (LENGTH_S, &command));
        assert_eq!((left_ms(&next, 1_000), next.report().is_over), (LENGTH_MS, false));
    }

    /// What a deadline does to the command, without the wait for it.
    #[tokio::test]
    async fn what_the_command_has_started_ends_with_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("id");
        let command =
            format!("sleep 600 & echo $! > {0}.part; mv {0}.part {0}; wait", file.display());
        let lease = Lease::open_at(0, dir.path(), "a", (LENGTH_S, &command));
        let started = async {
            while !file.exists() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::select! {
            ended = lease.run() => unreachable!("{ended:?}"),
            done = tokio::time::timeout(END_MAX / 2, started) => done.expect("waited for its start"),
        }
        let id = std::fs::read_to_string(&file).expect("the id of its child");
        // Nobody may have asked yet how it has ended.
        let runs = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", id.trim()));
            stat.is_ok_and(|stat| !stat.contains(") Z ") && !stat.contains(") X "))
        };
        let ended = async {
            while runs() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let ended = tokio::time::timeout(Duration::from_secs(60), ended).await;
        ended.expect("waited for the end of its child");
    }

    #[tokio::test]
    async fn what_was_kept_and_is_damaged_begins_a_new_lease_and_the_next_restart_does_not() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join(LEASE_FILE), [b'x'; 8192]).expect("a damaged disk");
        let lease = open(dir.path(), "a", START_MS);
        assert_eq!(left_ms(&lease, START_MS), LENGTH_MS);
        lease.round(START_MS + 100_000, None).await;
        assert_eq!(lease.warning(), None, "it is kept again");
        let again = open(dir.path(), "a", START_MS + 100_000);
        assert_eq!(left_ms(&again, START_MS + 100_000), LENGTH_MS - 100_000);
        // A directory that is gone can't be written, and people are told.
        dir.close().expect("removed");
        lease.round(START_MS + 200_000, None).await;
        assert!(lease.warning().expect("it can't be kept").contains("begin a new lease"));
    }

    /// By the real clock of the kernel.
    #[tokio::test]
    async fn a_host_whose_controller_is_gone_is_ended_by_the_real_command() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("ended");
        let lease = Lease::open(dir.path(), "a", 1, &format!("echo end >> {}", file.display()));
        let last_heard = since_boot_ms();
        let ended = async {
            while !file.exists() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::select! {
            () = lease.keep(|| Some(last_heard)) => unreachable!("it goes on"),
            done = tokio::time::timeout(Duration::from_secs(60), ended) => done.expect("waited for the command"),
        }
        assert!(since_boot_ms() >= last_heard + 1000, "not before the lease was over");
    }
}
