//! Runs the job's command and puts its output into the outbox.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use perigee_model::guest::{CommandEnd, GuestBody, LogStream, Seed, Stopped};

use crate::error::Error;
use crate::gang;
use crate::lines::{self, Piece};
use crate::outbox::Outbox;
use crate::processes::{JobCgroup, memory_bytes};
use crate::program::{self, Finding};
use crate::progress::{self, ProgressReader};

/// The exit code of a command that exits with 0 when it is stopped. `timeout` of coreutils uses the same code.
const STOPPED_CODE: i32 = 124;
/// The time until a command that was stopped and has not ended is stopped again.
const STOP_AGAIN: Duration = Duration::from_secs(1);
/// Joins the cgroup first, so that every child process is in it. Also gives up the runner's protection from the
/// out-of-memory killer, which is not for the job.
pub const ENTER_CGROUP: &str =
    r#"echo 0 >"$1" && shift && echo 0 >/proc/self/oom_score_adj && exec "$@""#;
/// How the shell that does so calls itself in its errors.
pub const NAME: &str = "perigee";

/// How often somebody looks whether the kernel has killed a process for lack of memory.
const OOM_LOOK: Duration = Duration::from_secs(1);

/// Returns the exit code, and what it does not say, when no process of the job is left and all of their output is in the outbox.
pub fn run(
    seed: &Seed,
    cgroup: &JobCgroup,
    directory: &Path,
    output: &Path,
    outbox: &Arc<Outbox>,
    wishes: &Arc<Wishes>,
) -> Result<(i32, CommandEnd), Error> {
    let say = |line: &str| {
        outbox.push(GuestBody::log(LogStream::Stderr, format!("perigee: {line}")));
    };
    match program::look(&seed.command, &seed.env, directory) {
        Finding::Fine => {}
        Finding::Doubt(why) => say(&why),
        Finding::Wrong(code, why) => {
            say(&why);
            return Ok((code, CommandEnd::default()));
        }
    }
    let progress = ProgressReader::start(Path::new(progress::FIFO_PATH), Arc::clone(outbox))?;
    let mut child = start(seed, cgroup, directory, output)?;
    let readers = [
        child.stdout.take().map(|pipe| read_log(pipe, LogStream::Stdout, outbox)),
        child.stderr.take().map(|pipe| read_log(pipe, LogStream::Stderr, outbox)),
    ];
    let ended = Arc::clone(wishes);
    std::thread::spawn(move || ended.note_end(child.wait()));

    let (grace, mut oom_kills) = (Duration::from_secs(seed.stop_grace_s), OomKills::default());
    let began = Instant::now();
    let why = loop {
        let left = seed.timeout_s.map(|s| Duration::from_secs(s).saturating_sub(began.elapsed()));
        match wishes.wait(left.map_or(OOM_LOOK, |left| left.min(OOM_LOOK))) {
            Wake::Later if left.is_some_and(|left| left <= OOM_LOOK) => {
                break Some(Stopped::TimedOut);
            }
            Wake::Later => oom_kills.say(cgroup, outbox),
            Wake::Ended => break None,
            Wake::Asked => break Some(Stopped::Cancelled),
        }
    };
    let outlived_grace = match why {
        None => false,
        Some(why) => {
            say(&being_stopped(why, seed));
            stop(cgroup, grace, wishes)?
        }
    };
    let status = wishes.wait_for_end().map_err(Error::io("wait for the command"))?;
    // Processes that the command left in the background would keep the disks and the pipes open.
    cgroup.end_all(grace)?;
    oom_kills.say(cgroup, outbox);
    for reader in readers.into_iter().flatten() {
        if reader.join().is_err() {
            crate::console("a log reader panicked");
        }
    }
    progress.finish();
    let end = CommandEnd { signal: status.signal(), stopped: why, outlived_grace };
    Ok((exit_code(status, why.is_some()), end))
}

/// Starts the command in the cgroup, with nothing of the runner's own environment.
fn start(seed: &Seed, cgroup: &JobCgroup, directory: &Path, output: &Path) -> Result<Child, Error> {
    Command::new("/bin/sh")
        .args(["-c", ENTER_CGROUP, NAME])
        .arg(cgroup.procs_file())
        .args(&seed.command)
        .current_dir(directory)
        .env_clear()
        .env("PATH", program::PATH)
        .env("HOME", "/root")
        .env("USER", "root")
        .env("LOGNAME", "root")
        .env("SHELL", "/bin/sh")
        .env("TMPDIR", "/tmp")
        .env("LANG", "C.UTF-8")
        .envs(&seed.env)
        .env("PERIGEE_JOB", &seed.job)
        .env("PERIGEE_PROGRESS", progress::FIFO_PATH)
        .env("PERIGEE_OUTPUT", output)
        .envs(seed.gang.iter().flat_map(gang::environment))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(Error::io("start the command"))
}

/// Ends all of the job's processes, and says whether one of them had to be killed because it outlived the time of grace.
fn stop(cgroup: &JobCgroup, grace: Duration, wishes: &Wishes) -> Result<bool, Error> {
    let mut stop = cgroup.stop(grace);
    loop {
        stop.end_all()?;
        // One that has just been started may not have been in the cgroup yet.
        if wishes.ends_within(STOP_AGAIN) {
            return Ok(stop.killed);
        }
    }
}

fn being_stopped(why: Stopped, seed: &Seed) -> String {
    let why = match (why, seed.timeout_s) {
        (Stopped::TimedOut, Some(limit_s)) => format!("ran longer than its timeout of {limit_s} s"),
        _ => "is to end on request".to_owned(),
    };
    let grace_s = seed.stop_grace_s;
    format!("the command {why} and is being stopped: SIGTERM now, SIGKILL in {grace_s} s")
}

/// What was said of processes that the kernel has killed.
#[derive(Default)]
struct OomKills {
    said: u64,
}

impl OomKills {
    /// Says it as soon as there are more.
    fn say(&mut self, cgroup: &JobCgroup, outbox: &Outbox) {
        let killed = cgroup.oom_kills();
        if killed <= self.said {
            return;
        }
        let (more, memory_bytes) = (killed - self.said, memory_bytes());
        self.said = killed;
        let line = format!(
            "perigee: out of memory: the kernel killed {more} of the job's processes; all programs of this VM have {} MiB together",
            memory_bytes >> 20
        );
        outbox.push(GuestBody::log(LogStream::Stderr, line));
        outbox.push(GuestBody::OutOfMemory { killed, memory_bytes });
    }
}

type Ended = std::io::Result<ExitStatus>;

/// Why the runner does not wait for the command any longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wake {
    Ended,
    /// The time is over.
    Later,
    /// The host wants it to end.
    Asked,
}

/// What becomes of the command: what the host wants, and how it ended.
#[derive(Debug, Default)]
pub struct Wishes {
    state: Mutex<Wanted>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Wanted {
    begin: bool,
    end: bool,
    ended: Option<Ended>,
}

impl Wishes {
    /// All members of the gang are ready.
    pub fn begin(&self) {
        self.lock().begin = true;
        self.changed.notify_all();
    }

    /// Waits until the command may start, or is to end.
    pub fn wait_for_begin(&self) {
        let waits = |state: &mut Wanted| !state.begin && !state.end;
        drop(self.changed.wait_while(self.lock(), waits).expect(NO_PANIC));
    }

    /// Waits until the host wants an end.
    pub fn wait_until_asked(&self) {
        drop(self.changed.wait_while(self.lock(), |state| !state.end).expect(NO_PANIC));
    }

    /// The command is to end; one that has not started ends as soon as it starts.
    pub fn end_command(&self) {
        self.lock().end = true;
        self.changed.notify_all();
    }

    fn note_end(&self, ended: Ended) {
        self.lock().ended = Some(ended);
        self.changed.notify_all();
    }

    /// Waits until the command has ended, or is to.
    fn wait(&self, limit: Duration) -> Wake {
        let goes_on = |state: &mut Wanted| !state.end && state.ended.is_none();
        let waited = self.changed.wait_timeout_while(self.lock(), limit, goes_on);
        let state = waited.expect(NO_PANIC).0;
        match (&state.ended, state.end) {
            (Some(_), _) => Wake::Ended,
            (None, true) => Wake::Asked,
            (None, false) => Wake::Later,
        }
    }

    fn ends_within(&self, limit: Duration) -> bool {
        let waits =
            self.changed.wait_timeout_while(self.lock(), limit, |state| state.ended.is_none());
        waits.expect(NO_PANIC).0.ended.is_some()
    }

    fn wait_for_end(&self) -> Ended {
        let waits = self.changed.wait_while(self.lock(), |state| state.ended.is_none());
        let mut state = waits.expect(NO_PANIC);
        state.ended.take().unwrap_or_else(|| Err(std::io::Error::other("it has not ended")))
    }

    fn lock(&self) -> MutexGuard<'_, Wanted> {
        self.state.lock().expect(NO_PANIC)
    }
}

const NO_PANIC: &str = "no thread panics with the wishes locked";

fn read_log(
    pipe: impl Read + Send + 'static,
    stream: LogStream,
    outbox: &Arc<Outbox>,
) -> JoinHandle<()> {
    let outbox = Arc::clone(outbox);
    std::thread::spawn(move || {
        let read = lines::read_lines_and_parts(pipe, |Piece { text: line, continues }| {
            outbox.push_when_room(GuestBody::Log { stream, line, continues });
        });
        if let Err(error) = read {
            let line = format!("perigee: reading the command's output stopped: {error}");
            outbox.push(GuestBody::log(stream, line));
        }
    })
}

fn exit_code(status: ExitStatus, was_stopped: bool) -> i32 {
    let code = match (status.code(), status.signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => unreachable!("a process that was waited for has exited or was killed"),
    };
    if was_stopped && code == 0 { STOPPED_CODE } else { code }
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
    fn a_wish_that_comes_before_the_command_is_kept() {
        let wishes = Wishes::default();
        assert_eq!(wishes.wait(Duration::ZERO), Wake::Later);
        wishes.end_command();
        assert_eq!(wishes.wait(OOM_LOOK), Wake::Asked);
        wishes.note_end(Ok(ExitStatus::from_raw(0)));
        assert_eq!(wishes.wait(OOM_LOOK), Wake::Ended);
        assert!(wishes.wait_for_end().is_ok());
    }

    #[test]
    fn a_timeout_is_never_a_success() {
        assert_eq!(exit_code(ExitStatus::from_raw(0), true), STOPPED_CODE);
        assert_eq!(exit_code(ExitStatus::from_raw(15), true), 143);
    }
}
