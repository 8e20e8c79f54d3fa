//! All processes of the job, in one cgroup. This includes those that left its process group.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::mount::MsFlags;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use crate::error::Error;

const TERM_GRACE: Duration = Duration::from_secs(10);
const KILL_DEADLINE_S: u64 = 30;
const POLL_DELAY: Duration = Duration::from_millis(20);

/// A cgroup (version 2) at the top, where no init looks after it.
pub struct JobCgroup {
    directory: PathBuf,
}

impl JobCgroup {
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
        Ok(Self { directory })
    }

    /// A process that writes 0 to this file joins the cgroup.
    pub fn procs_file(&self) -> PathBuf {
        self.directory.join("cgroup.procs")
    }

    /// Stops the remaining processes. SIGTERM comes first, so that a database can shut down, then SIGKILL.
    pub fn end_all(&self, process_group: Option<Pid>) -> Result<(), Error> {
        if self.is_empty()? {
            return Ok(());
        }
        if let Some(group) = process_group {
            // The group may be gone already. Its other processes are in the cgroup.
            killpg(group, Signal::SIGTERM).ok();
        }
        for pid in self.pids()? {
            kill(pid, Signal::SIGTERM).ok();
        }
        if self.wait_empty(TERM_GRACE)? {
            return Ok(());
        }
        std::fs::write(self.directory.join("cgroup.kill"), "1")
            .map_err(Error::io("kill the job's processes"))?;
        if self.wait_empty(Duration::from_secs(KILL_DEADLINE_S))? {
            return Ok(());
        }
        Err(Error::Stragglers(KILL_DEADLINE_S))
    }

    fn wait_empty(&self, limit: Duration) -> Result<bool, Error> {
        let deadline = Instant::now() + limit;
        while !self.is_empty()? {
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(POLL_DELAY);
        }
        Ok(true)
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

    #[test]
    fn the_cgroups_of_version_2_are_found_beside_those_of_version_1() {
        let first = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n";
        let second = "none /sys/fs/cgroup/unified cgroup2 rw,nsdelegate 0 0\n";
        assert_eq!(top_of(&[first, second].concat()), Some(Path::new("/sys/fs/cgroup/unified")));
        assert_eq!(top_of(first), None);
    }
}
