//! Runs the job's command and puts its output into the outbox.

use std::io::{BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::unistd::Pid;
use perigee_model::guest::{GuestBody, LogStream, Seed};

use crate::error::Error;
use crate::lines;
use crate::outbox::Outbox;
use crate::processes::JobCgroup;
use crate::progress::{self, ProgressReader};

/// The exit code after a timeout if the command exits with 0 when it is stopped. `timeout` of coreutils uses the
/// same code.
const TIMED_OUT_CODE: i32 = 124;
/// Joins the cgroup first, so that every child process is in it. Also gives up the runner's protection from the
/// out-of-memory killer, which is not for the job.
const ENTER_CGROUP: &str = r#"echo 0 >"$0" && echo 0 >/proc/self/oom_score_adj && exec "$@""#;

/// Returns the exit code when no process of the job is left and all of their output is in the outbox.
pub fn run(
    seed: &Seed,
    directory: &Path,
    output: &Path,
    outbox: &Arc<Outbox>,
) -> Result<i32, Error> {
    let cgroup = JobCgroup::create()?;
    let fifo = Path::new(progress::FIFO_PATH);
    let progress = ProgressReader::start(fifo, Arc::clone(outbox))?;
    let mut child = Command::new("/bin/sh")
        .args(["-c", ENTER_CGROUP])
        .arg(cgroup.procs_file())
        .args(&seed.command)
        .current_dir(directory)
        .env_clear()
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", "/root")
        .env("LANG", "C.UTF-8")
        .envs(&seed.env)
        .env("PERIGEE_JOB", &seed.job)
        .env("PERIGEE_PROGRESS", fifo)
        .env("PERIGEE_OUTPUT", output)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(Error::io("start the command"))?;
    let readers = [
        child.stdout.take().map(|pipe| read_log(pipe, LogStream::Stdout, outbox)),
        child.stderr.take().map(|pipe| read_log(pipe, LogStream::Stderr, outbox)),
    ];
    let group = Pid::from_raw(child.id().cast_signed());
    let (ended, status) = mpsc::channel();
    // The receiver waits for this one message.
    std::thread::spawn(move || ended.send(child.wait()).ok());

    let (status, timed_out) = match wait(&status, seed.timeout_s) {
        Some(status) => (status, false),
        None => {
            let limit_s = seed.timeout_s.unwrap_or_default();
            outbox.push(GuestBody::Log {
                stream: LogStream::Stderr,
                line: format!(
                    "perigee: the command ran longer than its timeout of {limit_s} s and is being stopped"
                ),
            });
            cgroup.end_all(Some(group))?;
            (wait(&status, None).expect("no timeout"), true)
        }
    };
    let status = status.map_err(Error::io("wait for the command"))?;
    // Processes that the command left in the background would keep the disks and the pipes open.
    cgroup.end_all(None)?;
    for reader in readers.into_iter().flatten() {
        if reader.join().is_err() {
            crate::console("a log reader panicked");
        }
    }
    progress.finish();
    Ok(exit_code(status, timed_out))
}

type Ended = std::io::Result<ExitStatus>;

/// `None` after the timeout.
fn wait(ended: &mpsc::Receiver<Ended>, timeout_s: Option<u64>) -> Option<Ended> {
    let received = match timeout_s {
        Some(limit_s) => ended.recv_timeout(Duration::from_secs(limit_s)),
        None => ended.recv().map_err(RecvTimeoutError::from),
    };
    match received {
        Ok(ended) => Some(ended),
        Err(RecvTimeoutError::Timeout) => None,
        Err(RecvTimeoutError::Disconnected) => {
            Some(Err(std::io::Error::other("the waiting thread is gone")))
        }
    }
}

fn read_log(
    pipe: impl Read + Send + 'static,
    stream: LogStream,
    outbox: &Arc<Outbox>,
) -> JoinHandle<()> {
    let outbox = Arc::clone(outbox);
    std::thread::spawn(move || {
        let read = lines::read_lines(BufReader::new(pipe), lines::TEXT_BYTES_MAX, |line| {
            outbox.push_when_room(GuestBody::Log { stream, line });
        });
        if let Err(error) = read {
            outbox.push(GuestBody::Log {
                stream,
                line: format!("perigee: reading the command's output stopped: {error}"),
            });
        }
    })
}

fn exit_code(status: ExitStatus, timed_out: bool) -> i32 {
    let code = match (status.code(), status.signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => unreachable!("a process that was waited for has exited or was killed"),
    };
    if timed_out && code == 0 { TIMED_OUT_CODE } else { code }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_128_and_its_number() {
        assert_eq!(exit_code(ExitStatus::from_raw(9), false), 137);
        assert_eq!(exit_code(ExitStatus::from_raw(3 << 8), false), 3);
    }

    #[test]
    fn a_timeout_is_never_a_success() {
        assert_eq!(exit_code(ExitStatus::from_raw(0), true), TIMED_OUT_CODE);
        assert_eq!(exit_code(ExitStatus::from_raw(15), true), 143);
    }
}
