//! Whether a job that stands still says why.

use std::time::{Duration, Instant};

use perigee_model::job::{Job, JobState};

use super::outcome::Wait;

/// A command that reports no progress for so long stands still: a busy machine needs some seconds for a round.
const STILL_MIN: Duration = Duration::from_secs(90);
/// The same for a job that is placed, prepared, booted or collected.
const OTHER_MIN: Duration = Duration::from_secs(300);

/// Where a job was when it last went on.
#[derive(Debug)]
pub struct Still {
    mark: String,
    since: Instant,
    why: String,
}

impl Still {
    /// The job waits from `now` on for what it says.
    pub fn new(job: &Job, now: Instant) -> Self {
        Self { mark: mark(job), since: now, why: why(job) }
    }

    /// Takes note of what the controller says of the job. Returns the wait that has ended, if it was one.
    pub fn look(&mut self, job: &Job, began: Instant, now: Instant) -> Option<Wait> {
        let ended = if mark(job) == self.mark { None } else { Some(self.wait(job, began, now)) };
        if ended.is_some() {
            *self = Self::new(job, now);
        } else if self.why.is_empty() {
            self.why = why(job);
        }
        ended.flatten()
    }

    /// The wait that is under way, if it is one.
    pub fn wait(&self, job: &Job, began: Instant, now: Instant) -> Option<Wait> {
        let length = now.saturating_duration_since(self.since);
        let least = if self.mark.starts_with(RUNNING) { STILL_MIN } else { OTHER_MIN };
        (length >= least).then(|| Wait {
            job: job.id.clone(),
            at: self.mark.clone(),
            from_s: self.since.saturating_duration_since(began).as_secs_f64(),
            length_s: length.as_secs_f64(),
            why: self.why.clone(),
        })
    }
}

const RUNNING: &str = "running";

/// What the job shows as what it waits for.
fn why(job: &Job) -> String {
    let waits = job.waits.iter().map(ToString::to_string);
    let reason = Some(job.reason.clone()).filter(|reason| !reason.is_empty());
    reason.into_iter().chain(waits).collect::<Vec<_>>().join("; ")
}

/// What changes when the job goes on.
fn mark(job: &Job) -> String {
    let host = job.host.as_ref().map_or_else(|| "no host".to_owned(), ToString::to_string);
    let moves = job.migrations.len();
    let over = job.migrations.iter().filter(|migration| migration.state.is_final()).count();
    let done = job.progress.as_ref().map_or(0, |progress| progress.done);
    let state = match job.state {
        JobState::Running => RUNNING.to_owned(),
        other => format!("{other:?}").to_lowercase(),
    };
    format!("{state} at {host}, {done} done, {over} of {moves} moves over")
}
