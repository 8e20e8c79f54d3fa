//! All processes of the job, in one cgroup. This includes those that left its process group.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::mount::MsFlags;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::error::Error;

const KILL_DEADLINE_S: u64 = 30;
const POLL_DELAY: Duration = Duration::from_millis(20);

/// A cgroup (version 2) at the top, where no init looks after it.
pub struct JobCgroup {
    directory: PathBuf,
    /// Of the whole guest, before the job began.
    oom_kills_before: u64,
}

impl JobCgroup {
    /// The cgroup of the job's processes. Where the guest has no cgroup v2 mounted, it is mounted.
    pub fn create() -> Result<Self, Error> {
        let doing = "make the job's cgroup";
        let mounts = std::fs::read_to_string("/proc/self/mounts").map_err(Error::io(doing))?;
        let top = if let Some(top) = top_of(&mounts) {
            top
        } else {
            // OpenRC mounts it only where a service asks for it.
            let (top, kind) = (Path::new("/sys/fs/cgroup"), Some("cgroup2"));
            nix::mount::mount(kind, top, kind, MsFlags::empty(), None::<&str>)
                .map_err(Error::io("mount the cgroups"))?;
            top
        };
        let directory = top.join("perigee-job");
        std::fs::create_dir_all(&directory).map_err(Error::io(doing))?;
        // Without this controller the kernel counts its OOM kills for the whole guest only.
        std::fs::write(top.join("cgroup.subtree_control"), "+memory").ok();
        let oom_kills_before = oom_kills_of_guest().unwrap_or_default();
        Ok(Self { directory, oom_kills_before })
    }

    /// A process that writes 0 to this file joins the cgroup.
    pub fn procs_file(&self) -> PathBuf {
        self.directory.join("cgroup.procs")
    }

    /// Stops the remaining processes. SIGTERM comes first, so that a database can shut down, and SIGKILL after the grace.
    pub fn stop(&self, grace: Duration) -> Stop<'_> {
        Stop {
            cgroup: self,
            deadline: Instant::now() + grace,
            told: BTreeSet::new(),
            killed: false,
        }
    }

    /// Stops what the command has left in the background.
    pub fn end_all(&self, grace: Duration) -> Result<(), Error> {
        self.stop(grace).end_all()
    }

    fn wait_empty(&self, deadline: Instant) -> Result<bool, Error> {
        while !self.is_empty()? {
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(POLL_DELAY);
        }
        Ok(true)
    }

    /// How many of the job's processes the kernel has killed because no memory was left. If the guest has no controller of memory,
    /// those of the whole guest since the job began.
    pub fn oom_kills(&self) -> u64 {
        let own = std::fs::read_to_string(self.directory.join("memory.events"));
        match own.ok().and_then(|events| count_of(&events, "oom_kill")) {
            Some(own) => own,
            None => oom_kills_of_guest().unwrap_or_default().saturating_sub(self.oom_kills_before),
        }
    }

    fn is_empty(&self) -> Result<bool, Error> {
        let events = std::fs::read_to_string(self.directory.join("cgroup.events"))
            .map_err(Error::io("look for the job's processes"))?;
        Ok(events.lines().any(|line| line == "populated 0"))
    }

    fn pids(&self) -> Result<Vec<Pid>, Error> {
        let procs = std::fs::read_to_string(self.procs_file())
            .map_err(Error::io("list the job's processes"))?;
        Ok(procs.lines().filter_map(|line| line.parse().ok()).map(Pid::from_raw).collect())
    }
}

/// The processes of a job are being stopped.
pub struct Stop<'a> {
    cgroup: &'a JobCgroup,
    deadline: Instant,
    /// Who has got SIGTERM. A program may take a second one as an order to leave its work as it is.
    told: BTreeSet<Pid>,
    /// Some had not ended within the grace.
    pub killed: bool,
}

impl Stop<'_> {
    /// Ends the processes that are there. A program that one of them starts in order to end well has the rest of the grace, and gets
    /// no SIGTERM.
    pub fn end_all(&mut self) -> Result<(), Error> {
        for pid in self.cgroup.pids()? {
            if self.told.insert(pid) {
                // It may be gone already.
                kill(pid, Signal::SIGTERM).ok();
            }
        }
        if self.cgroup.wait_empty(self.deadline)? {
            return Ok(());
        }
        self.killed = true;
        std::fs::write(self.cgroup.directory.join("cgroup.kill"), "1")
            .map_err(Error::io("kill the job's processes"))?;
        if self.cgroup.wait_empty(Instant::now() + Duration::from_secs(KILL_DEADLINE_S))? {
            return Ok(());
        }
        Err(Error::Stragglers(KILL_DEADLINE_S))
    }
}

fn oom_kills_of_guest() -> Option<u64> {
    count_of(&std::fs::read_to_string("/proc/vmstat").ok()?, "oom_kill")
}

/// The memory that all programs of the guest have together.
pub fn memory_bytes() -> u64 {
    let about = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    count_of(&about, "MemTotal:").unwrap_or_default() * 1024
}

/// The number behind a word in lines `WORD NUMBER …`.
fn count_of(lines: &str, word: &str) -> Option<u64> {
    lines.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next()? == word).then(|| words.next()?.parse().ok())?
    })
}

/// Where the cgroups of version 2 are mounted, parsed from `/proc/self/mounts`.
fn top_of(mounts: &str) -> Option<&Path> {
    mounts.lines().find_map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
        [_, top, "cgroup2", ..] => Some(Path::new(top)),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The formats of `memory.events` (cgroup-v2.rst), `/proc/vmstat` and `/proc/meminfo` (proc(5)).
    #[test]
    fn oom_kills_are_counted_and_nothing_else() {
        let events = "low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n";
        assert_eq!(count_of(events, "oom_kill"), Some(2));
        assert_eq!(count_of("nr_free_pages 100\n", "oom_kill"), None);
        let about = "MemTotal:         221920 kB\nMemFree: 1 kB\n";
        assert_eq!(count_of(about, "MemTotal:"), Some(221_920));
    }

    #[test]
    fn the_cgroups_of_version_2_are_found_beside_those_of_version_1() {
        let first = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n";
        let second = "none /sys/fs/cgroup/unified cgroup2 rw,nsdelegate 0 0\n";
        assert_eq!(top_of(&[first, second].concat()), Some(Path::new("/sys/fs/cgroup/unified")));
        assert_eq!(top_of(first), None);
    }
}
