//! A child process: it is stopped by its id, and measured through `/proc`.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// How long a server may take to stop before it is killed. A server that has just removed a large volume ends
/// only after the filesystem has freed its blocks. If the filesystem is mounted with `discard`, that takes one
/// discard for each run of blocks.
const STOP_MAX: Duration = Duration::from_secs(240);

/// It is stopped and waited for when this is dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    pub name: String,
}

impl Process {
    /// Starts a program, bound to the CPU if one is given, with its standard error in `log`.
    ///
    /// # Errors
    /// If the program does not exist.
    pub fn start(
        program: &str,
        arguments: &[String],
        cpu: Option<usize>,
        log: &Path,
    ) -> Result<Self> {
        let mut command = match cpu {
            Some(cpu) => {
                let mut command = Command::new("taskset");
                command.args(["-c", &cpu.to_string(), program]);
                command
            }
            None => Command::new(program),
        };
        // Some servers keep their overlay in a temporary file, which must be on the same disk as the others'
        // files.
        let scratch = log.parent().context("the log is in a directory")?.to_owned();
        let log = fs::File::create(log).context("can't write the server's log")?;
        let child = command
            .args(arguments)
            .env("TMPDIR", scratch)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("can't start {program}"))?;
        Ok(Self { child, name: program.to_owned() })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until `ready`. On failure the error says what it waited for.
    pub fn wait_until(&mut self, what: &str, mut ready: impl FnMut() -> bool) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !ready() {
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended with {status} before {what}", self.name);
            }
            if Instant::now() > deadline {
                bail!("waited 60 s for {what} of {}, and it did not come", self.name);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Asks the process to stop, and waits until it has ended.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        if self.child.try_wait()?.is_some() {
            return Ok(());
        }
        let pid = Pid::from_raw(i32::try_from(self.child.id()).context("a process id")?);
        kill(pid, Signal::SIGTERM)?;
        let deadline = Instant::now() + STOP_MAX;
        loop {
            if let Some(status) = self.child.try_wait()? {
                if !status.success() && status.signal().is_none() {
                    bail!("{} ended with {status}", self.name);
                }
                return Ok(());
            }
            if Instant::now() > deadline {
                self.child.kill()?;
                self.child.wait()?;
                bail!("{} did not end within {} s", self.name, STOP_MAX.as_secs());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A caller that needs the exit status calls `stop`.
        let _ended = self.end();
    }
}

/// The kernel's counters for a process with all of its threads.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Usage {
    pub cpu_s: f64,
    pub rss_mib: f64,
    /// Memory that no other process shares.
    pub private_mib: f64,
    /// Bytes that were read from the device for the process.
    pub device_read_bytes: u64,
}

/// # Errors
/// If the process has ended.
pub fn usage(pid: u32) -> io::Result<Usage> {
    let memory = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let io = fs::read_to_string(format!("/proc/{pid}/io"))?;
    Ok(Usage {
        cpu_s: cpu_s(pid)?,
        rss_mib: mib(&memory, "Rss:"),
        private_mib: mib(&memory, "Private_Clean:") + mib(&memory, "Private_Dirty:"),
        device_read_bytes: number(&io, "read_bytes:"),
    })
}

/// CPU seconds of a process with all of its threads, including threads that have ended.
///
/// # Errors
/// If the process has ended.
pub fn cpu_s(pid: u32) -> io::Result<f64> {
    cpu_of_stat(&fs::read_to_string(format!("/proc/{pid}/stat"))?)
        .ok_or_else(|| io::Error::other("the kernel's figures have another form"))
}

/// More precise than [`cpu_s`], but only for the threads that exist. It is for a server that is idle.
pub fn live_threads_cpu_ms(pid: u32) -> io::Result<f64> {
    let mut total_ns = 0.0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = fs::read_to_string(task?.path().join("schedstat")).unwrap_or_default();
        total_ns += text.split_whitespace().next().and_then(|w| w.parse().ok()).unwrap_or(0.0);
    }
    Ok(total_ns / 1e6)
}

/// A clock tick is 1/100 s on every current Linux.
const TICKS_PER_S: f64 = 100.0;

/// The program's name is in parentheses and may contain anything, so the fields after it are counted.
fn cpu_of_stat(stat: &str) -> Option<f64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let user: f64 = fields.next()?.parse().ok()?;
    let system: f64 = fields.next()?.parse().ok()?;
    Some((user + system) / TICKS_PER_S)
}

fn number(text: &str, key: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix(key))
        .and_then(|rest| rest.split_whitespace().next())
        .and_then(|word| word.parse().ok())
        .unwrap_or(0)
}

#[expect(clippy::cast_precision_loss, reason = "KiB of a process")]
fn mib(text: &str, key: &str) -> f64 {
    number(text, key) as f64 / 1024.0
}

/// fincore checks each page of a file's length, which takes hours for a sparse file of many TiB.
const SPARSE_BYTES_MIN: u64 = 4 << 30;

/// How much of these files is in the page cache. Large sparse files are left out.
#[expect(clippy::cast_precision_loss, reason = "bytes of a machine's memory")]
pub fn cached_mib(files: &[PathBuf]) -> Result<f64> {
    // One file may be listed under several names.
    let mut seen = BTreeSet::new();
    let mut bytes = 0;
    for path in files {
        let Ok(data) = fs::metadata(path) else { continue };
        let sparse = data.len() > SPARSE_BYTES_MIN;
        if !sparse && seen.insert((data.dev(), data.ino())) {
            let output =
                Command::new("fincore").args(["-n", "-b", "-o", "RES"]).arg(path).output()?;
            let text = String::from_utf8_lossy(&output.stdout);
            bytes += text.trim().parse::<u64>().context("fincore's figure")?;
        }
    }
    Ok(bytes as f64 / f64::from(1 << 20))
}

/// The regular files that a process has open, as paths that also work for deleted files.
pub fn open_files(pid: u32) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| fs::metadata(path).is_ok_and(|data| data.is_file()))
        .collect()
}

pub fn pin_this_thread(cpu: usize) -> io::Result<()> {
    let mut cpus = CpuSet::new();
    cpus.set(cpu)?;
    Ok(sched_setaffinity(Pid::from_raw(0), &cpus)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_found_behind_a_name_with_brackets() {
        let stat = "12 (a) b) S 1 2 3 4 5 6 7 8 9 10 150 50 0 0 20 0 1";
        assert_eq!(cpu_of_stat(stat), Some(2.0));
        assert_eq!(cpu_of_stat("12 (a"), None);
    }

    #[test]
    fn a_key_that_is_missing_counts_zero() {
        assert_eq!(number("Rss:  12 kB\n", "Rss:"), 12);
        assert_eq!(number("Rss:  12 kB\n", "Pss:"), 0);
    }

    #[test]
    fn this_process_has_used_memory() {
        let usage = usage(std::process::id()).expect("figures");
        assert!(usage.rss_mib > 0.0 && usage.private_mib > 0.0 && usage.cpu_s >= 0.0);
    }

    #[test]
    fn a_process_that_ends_early_is_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut process =
            Process::start("false", &[], None, &dir.path().join("log")).expect("started");
        let error = process.wait_until("its socket", || false).expect_err("it has ended");
        assert!(error.to_string().contains("its socket"), "{error}");
    }
}
