//! QEMU as a process: starting it so that it outlives the agent, finding it again, its CPU time.
//!
//! A process is known by its pid and its start time, so that a pid that was given to another
//! process is never taken for QEMU. After a restart it is found by its own command line, which
//! names the VM's pid file: that also finds a QEMU that an agent started just before it died.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Gid, Pid, Uid};
use perigee_model::Problem;

/// The unit of times in `/proc`, the same for every process on Linux.
const TICK_MS: u64 = 10;

/// The user QEMU runs as: a system id that Debian gives to QEMU.
pub const QEMU_UID: u32 = 64055;

/// Whom a QEMU process belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QemuUser {
    pub uid: Uid,
    /// Its own, or that of `/dev/kvm` where KVM is used.
    pub gid: Gid,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    pub pid: u32,
    start_ticks: u64,
}

struct Stat {
    state: u8,
    cpu_ticks: u64,
    start_ticks: u64,
}

fn read_stat(path: &str) -> Option<Stat> {
    parse_stat(&std::fs::read_to_string(path).ok()?)
}

/// The command's name may hold spaces and parentheses: fields count from the last `)`.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    let number = |at: usize| fields.get(at)?.trim_end().parse::<u64>().ok();
    Some(Stat {
        state: *fields.first()?.as_bytes().first()?,
        cpu_ticks: number(11)? + number(12)?,
        start_ticks: number(19)?,
    })
}

impl Process {
    pub fn of_pid(pid: u32) -> Option<Self> {
        let stat = read_stat(&format!("/proc/{pid}/stat"))?;
        Some(Self { pid, start_ticks: stat.start_ticks })
    }

    /// The running process whose command line has `argument` as one whole argument.
    pub fn find(argument: &str) -> Option<Self> {
        let entries = std::fs::read_dir("/proc").ok()?;
        entries.flatten().find_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            let line = std::fs::read(entry.path().join("cmdline")).ok()?;
            if !line.split(|byte| *byte == 0).any(|word| word == argument.as_bytes()) {
                return None;
            }
            Self::of_pid(pid).filter(Self::is_alive)
        })
    }

    pub fn is_alive(&self) -> bool {
        read_stat(&format!("/proc/{}/stat", self.pid)).is_some_and(|stat| {
            stat.start_ticks == self.start_ticks && !matches!(stat.state, b'Z' | b'X')
        })
    }

    pub fn uptime_ms(&self) -> u64 {
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
        let now_ms = uptime.split(' ').next().and_then(parse_seconds_ms).unwrap_or(0);
        now_ms.saturating_sub(self.start_ticks * TICK_MS)
    }

    /// CPU time of the threads that QEMU names `CPU N/…`.
    pub fn vcpu_ms(&self) -> u64 {
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{}/task", self.pid)) else { return 0 };
        let ticks = tasks.flatten().filter_map(|task| {
            let path = task.path();
            let name = std::fs::read_to_string(path.join("comm")).ok()?;
            name.starts_with("CPU ").then(|| read_stat(path.join("stat").to_str()?))?
        });
        ticks.map(|stat| stat.cpu_ticks * TICK_MS).sum()
    }

    /// How long the same threads were ready to run and had no CPU; `None` where the kernel has no
    /// scheduler statistics.
    pub fn vcpu_waiting_ms(&self) -> Option<u64> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid)).ok()?;
        let waits = tasks.flatten().filter_map(|task| {
            let path = task.path();
            let name = std::fs::read_to_string(path.join("comm")).ok()?;
            name.starts_with("CPU ").then_some(())?;
            waiting_ns(&std::fs::read_to_string(path.join("schedstat")).ok()?)
        });
        // They wait at the same time: the slowest one counts.
        waits.max().map(|ns| ns / 1_000_000)
    }

    /// Ends it at once and waits until it is gone.
    pub async fn kill(&self) -> Result<(), Problem> {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
        while self.is_alive() {
            let pid = Pid::from_raw(i32::try_from(self.pid).unwrap_or(i32::MAX));
            // An error means that it is gone already, which the next look tells.
            let _ = kill(pid, Signal::SIGKILL);
            if tokio::time::Instant::now() > deadline {
                return Err(Problem::internal(
                    format!("stop the process {}", self.pid),
                    "it is still there 20 s after SIGKILL",
                ));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }
}

/// Of a thread's `schedstat`: time on a CPU, time waiting for one (both in ns), turns.
fn waiting_ns(schedstat: &str) -> Option<u64> {
    schedstat.split_whitespace().nth(1)?.parse().ok()
}

/// `12.34` to 12340.
fn parse_seconds_ms(text: &str) -> Option<u64> {
    let (seconds, hundredths) = text.split_once('.')?;
    Some(seconds.parse::<u64>().ok()? * 1000 + hundredths.parse::<u64>().ok()? * 10)
}

/// A command that runs as QEMU's user in a session of its own.
pub fn detached(
    program: &str,
    arguments: &[String],
    user: Option<QemuUser>,
) -> tokio::process::Command {
    let mut command = tokio::process::Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).current_dir("/");
    if let Some(user) = user {
        command.uid(user.uid.as_raw()).gid(user.gid.as_raw());
    }
    let new_session = || nix::unistd::setsid().map(drop).map_err(std::io::Error::from);
    // SAFETY: between fork and exec the closure only calls setsid, which is async-signal-safe.
    unsafe { command.pre_exec(new_session) };
    command
}

/// Starts QEMU with its stderr in a file; a task of its own takes the exit status.
pub fn start(
    program: &str,
    arguments: &[String],
    user: Option<QemuUser>,
    log: &Path,
) -> Result<Process, Problem> {
    let fail = |e: std::io::Error| Problem::internal(format!("start {program}"), e);
    let log: File =
        OpenOptions::new().create(true).append(true).mode(0o600).open(log).map_err(fail)?;
    let mut child = detached(program, arguments, user).stderr(log).spawn().map_err(fail)?;
    let process = child.id().and_then(Process::of_pid);
    tokio::spawn(async move {
        let status = child.wait().await;
        tracing::debug!(?status, "QEMU has ended");
    });
    process.ok_or_else(|| Problem::internal(format!("start {program}"), "it ended at once"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_line_is_read_behind_a_name_with_spaces_and_parentheses() {
        let line = "4242 (CPU 0/(TCG) x) S 1 2 3 4 5 6 7 8 9 10 70 30 0 0 20 0 4 0 987654 1 2";
        let stat = parse_stat(line).unwrap();
        assert_eq!((stat.state, stat.cpu_ticks, stat.start_ticks), (b'S', 100, 987_654));
    }

    #[test]
    fn the_time_without_a_cpu_is_the_second_figure() {
        assert_eq!(waiting_ns("5000000 4226092 17\n"), Some(4_226_092));
        assert_eq!(waiting_ns(""), None);
    }

    #[test]
    fn a_broken_stat_line_is_nothing() {
        for line in ["", "1 (x", "1 (x) S 1 2"] {
            assert!(parse_stat(line).is_none(), "{line:?}");
        }
    }

    #[test]
    fn a_pid_with_another_start_time_is_another_process() {
        let me = Process::of_pid(std::process::id()).unwrap();
        assert!(me.is_alive());
        assert!(!Process { start_ticks: me.start_ticks + 1, ..me }.is_alive());
    }

    #[tokio::test]
    async fn a_process_is_found_by_its_argument_and_killed() {
        let dir = tempfile::tempdir().unwrap();
        let mark = dir.path().join("mark").display().to_string();
        let arguments = ["-c".into(), "sleep 60; true".into(), mark.clone()];
        let started = start("/bin/sh", &arguments, None, &dir.path().join("log")).unwrap();
        let found = Process::find(&mark);
        started.kill().await.unwrap();
        assert_eq!(found, Some(started));
        assert!(!started.is_alive());
        assert_eq!(Process::find(&mark), None);
    }
}
