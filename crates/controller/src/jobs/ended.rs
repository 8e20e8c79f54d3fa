//! How the command of a job ended, in words, and whether that is a success. What the guest says of it is all that counts:
//! nothing is guessed from codes and times.

use nix::sys::signal::Signal;
use perigee_model::guest::{CommandEnd, Stopped};
use perigee_model::job::{Job, OomKill};
use perigee_model::units::{format_bytes, format_duration};

/// Whether a process was killed for lack of memory that the job does not do without.
pub(super) fn fails_of_memory(job: &Job) -> bool {
    job.oom_kills.is_some() && job.spec.oom_kill == OomKill::Fail
}

/// What there is to say of the command's end; empty if it ended by itself, with 0 and all of its processes.
pub(super) fn in_words(job: &Job) -> String {
    let (code, end) = (job.exit_code.unwrap_or_default(), job.end.unwrap_or_default());
    let ended = match end.stopped {
        Some(Stopped::TimedOut) => timed_out(job, code, end),
        // That it was cancelled is said elsewhere.
        Some(Stopped::Cancelled) if end.outlived_grace => after_grace(job),
        Some(Stopped::Cancelled) => String::new(),
        None if code == 0 => String::new(),
        None => format!("the command {}", by_itself(code, end)),
    };
    let parts = [ended, out_of_memory(job).unwrap_or_default()];
    parts.iter().filter(|part| !part.is_empty()).cloned().collect::<Vec<_>>().join("; ")
}

/// Also while the command runs.
pub(super) fn out_of_memory(job: &Job) -> Option<String> {
    let kills = job.oom_kills?;
    let processes = match kills.processes {
        1 => "a process".to_owned(),
        more => format!("{more} processes"),
    };
    let (vm, guest) = (format_bytes(job.spec.memory_bytes), format_bytes(kills.memory_bytes));
    Some(format!(
        "out of memory: the guest's kernel killed {processes} of the job (memory: {vm}, of which its programs have {guest})"
    ))
}

fn by_itself(code: i32, end: CommandEnd) -> String {
    match end.signal {
        None => format!("ended with code {code}"),
        Some(number) => match Signal::try_from(number) {
            Ok(signal) => format!("was ended by signal {number} ({})", signal.as_str()),
            Err(_) => format!("was ended by signal {number}"),
        },
    }
}

fn timed_out(job: &Job, code: i32, end: CommandEnd) -> String {
    let limit = job.spec.timeout_s.map(|s| format!(" of {}", format_duration(s)));
    let limit = limit.unwrap_or_default();
    let ended = match end.outlived_grace {
        true => after_grace(job),
        false => format!("it {}", by_itself(code, end)),
    };
    format!("the command ran longer than its timeout{limit} and was stopped; {ended}")
}

fn after_grace(job: &Job) -> String {
    let grace = format_duration(job.spec.stop_grace_s);
    format!("it had not ended within its stop-grace of {grace} and was killed")
}

#[cfg(test)]
mod tests {
    use perigee_model::job::{JobState, OomKills};

    use super::super::guest::tests::record;
    use super::*;

    fn job(code: i32, end: CommandEnd) -> Job {
        let mut job = record(JobState::Collecting).job;
        job.spec.timeout_s = Some(3);
        (job.exit_code, job.end) = (Some(code), Some(end));
        job
    }

    /// `timeout: 8s; sleep 1; exit 137` was called a timeout, and `timeout: 3s; trap 'exit 1' TERM` was not.
    #[test]
    fn only_what_the_guest_has_stopped_is_a_timeout() {
        let by_itself = CommandEnd::default();
        assert_eq!(in_words(&job(0, by_itself)), "");
        assert_eq!(in_words(&job(137, by_itself)), "the command ended with code 137");
        let killed = CommandEnd { signal: Some(9), ..by_itself };
        assert_eq!(in_words(&job(137, killed)), "the command was ended by signal 9 (SIGKILL)");
        let stopped = CommandEnd { stopped: Some(Stopped::TimedOut), ..by_itself };
        assert_eq!(
            in_words(&job(1, stopped)),
            "the command ran longer than its timeout of 3s and was stopped; it ended with code 1"
        );
        let killed = CommandEnd { outlived_grace: true, signal: Some(9), ..stopped };
        assert_eq!(
            in_words(&job(137, killed)),
            "the command ran longer than its timeout of 3s and was stopped; it had not ended within its stop-grace of 10s \
             and was killed"
        );
        let cancelled = CommandEnd { stopped: Some(Stopped::Cancelled), ..by_itself };
        assert_eq!(in_words(&job(143, cancelled)), "");
    }

    #[test]
    fn a_process_that_was_killed_for_lack_of_memory_is_said_and_makes_the_job_fail() {
        let mut job = job(0, CommandEnd::default());
        assert!(!fails_of_memory(&job));
        job.oom_kills = Some(OomKills { processes: 2, memory_bytes: 30 << 20 });
        assert_eq!(
            in_words(&job),
            "out of memory: the guest's kernel killed 2 processes of the job (memory: 64 MiB, of which its programs have 30 MiB)"
        );
        assert!(fails_of_memory(&job));
        job.spec.oom_kill = OomKill::Ignore;
        assert!(!fails_of_memory(&job) && !in_words(&job).is_empty());
    }
}
