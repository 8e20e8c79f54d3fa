//! A process, identified by its pid and its start time, because pids are reused.

use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use perigee_model::Problem;
use serde::{Deserialize, Serialize};

/// A process that stays the same one when the kernel uses its id again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: i32,
    /// Clock ticks from the machine's boot to the process's start.
    pub start_ticks: u64,
}

impl Process {
    /// `None` when there is no such process (a zombie counts as none).
    pub fn of(pid: i32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name in parentheses may contain any character; the fields after it are numbers.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let state = *fields.first()?;
        let start_ticks = fields.get(19)?.parse().ok()?;
        (!matches!(state, "Z" | "X")).then_some(Self { pid, start_ticks })
    }

    /// Whether it still runs.
    pub fn alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// Signals it if it is still the same process.
    pub fn signal(self, signal: Signal) -> Result<(), Problem> {
        if self.alive() { signal_pid(self.pid, signal) } else { Ok(()) }
    }
}

/// Sends a signal. It is not an error if the process no longer exists.
pub fn signal_pid(pid: i32, signal: Signal) -> Result<(), Problem> {
    match kill(Pid::from_raw(pid), signal) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(error) => {
            Err(Problem::internal(format!("can't send {signal} to process {pid}"), error))
        }
    }
}

/// The numbers of the CPUs that this process may use, in their order. None if the kernel does not tell.
pub fn own_cpus() -> Vec<usize> {
    let own = sched_getaffinity(Pid::from_raw(0)).unwrap_or_else(|_| CpuSet::new());
    (0..CpuSet::count()).filter(|cpu| own.is_set(*cpu).unwrap_or(false)).collect()
}

/// Checks a condition 20 times per second. Returns whether it became true before the deadline.
pub async fn wait_until(deadline: std::time::Duration, mut holds: impl FnMut() -> bool) -> bool {
    let end = tokio::time::Instant::now() + deadline;
    loop {
        if holds() {
            return true;
        }
        if tokio::time::Instant::now() >= end {
            return false;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_alive_and_one_with_another_start_is_not() {
        let pid = i32::try_from(std::process::id()).expect("a pid");
        let me = Process::of(pid).expect("this process");
        assert!(me.alive());
        assert!(!Process { start_ticks: me.start_ticks + 1, ..me }.alive());
    }
}
