//! Applies the guest's messages to a job's record. This is synchronous, so that tests can feed messages.
//!
//! The guest is not trusted. A message that does not fit the job's state is ignored, or, if the job could
//! otherwise never end, it ends the job. No message is an error.

use perigee_model::DiskRole;
use perigee_model::guest::{CommandEnd, GuestBody, GuestEvent, LeftOut, SEED_REFUSED};
use perigee_model::job::{JobState, LogLine, OomKills, Progress};
use perigee_model::states::JobEvent;
use perigee_model::volume::BLOCK_BYTES;

use crate::hash;
use crate::planning::seconds;
use crate::records::{Collect, Ending, JobRecord, Kind, Output};

/// The limit of a guest's text in a job's record.
const TEXT_BYTES_MAX: usize = 1000;

/// What helps if a job did not start in a guest whose image has a runner of its own, and that runner has said nothing or that it
/// can't read what it is to do.
const OLD_RUNNER: &str = "; if the image was saved or built with an older version of Perigee, its runner may not know this job: \
     build or save the image again";

/// What helps if nothing has started the runner that a job brings with it.
const NO_CLOUD_INIT: &str = "; its image has no runner of Perigee, so cloud-init in it has to start the job: use an image in which \
     cloud-init is installed, runs at each boot and has the data source NoCloud";

/// Why a gang fails whose guests do not wait for each other.
const OLD_RUNNER_OF_GANG: &str = "its guest began without waiting for the other VMs; if its image was saved or built with an older \
     version of Perigee, build or save the image again";

/// The same, of a guest that has said that it waits.
pub(super) const EARLY: &str = "its guest began before the other VMs were ready";

/// The limit of a log line. The runner splits longer lines; only a guest with another program sends them.
const LINE_BYTES_MAX: usize = 8 << 10;

/// What a guest has said that is kept beside its job's record.
#[derive(Debug, Default)]
pub struct Said {
    pub lines: Vec<LogLine>,
    pub left_out: Vec<LeftOut>,
}

/// Applies messages in order, each of them once. Returns the log lines and the names of files among them.
pub fn apply(record: &mut JobRecord, now_ms: u64, events: Vec<GuestEvent>) -> Said {
    let mut said = Said::default();
    for GuestEvent { age_ms, message } in events {
        if message.seq <= record.last_seq {
            continue;
        }
        record.last_seq = message.seq;
        if let GuestBody::Log { stream, line, continues } = message.body {
            let line = shorten(&line, LINE_BYTES_MAX);
            said.lines.push(LogLine {
                seq: message.seq,
                uptime_ms: message.uptime_ms,
                stream,
                line,
                continues,
                arrived_ms: now_ms.saturating_sub(age_ms),
                rank: None,
            });
        } else if let GuestBody::LeftOut(left_out) = message.body {
            said.left_out.push(left_out);
        } else if record.ending.is_none() && !record.job.state.is_final() {
            take(record, When::new(record, now_ms, age_ms), message.body);
        }
    }
    said
}

/// The time of a message, by the controller's clock.
#[derive(Clone, Copy)]
struct When {
    at_ms: u64,
    /// How much later it is applied.
    late_ms: u64,
}

impl When {
    /// The moment is never before that of an earlier message.
    fn new(record: &JobRecord, now_ms: u64, age_ms: u64) -> Self {
        let job = &record.job;
        let earliest_ms = job.running_ms.or(job.started_ms).unwrap_or(0).min(now_ms);
        let at_ms = now_ms.saturating_sub(age_ms).max(earliest_ms);
        Self { at_ms, late_ms: now_ms - at_ms }
    }
}

fn take(record: &mut JobRecord, when: When, body: GuestBody) {
    match body {
        GuestBody::Log { .. } | GuestBody::Synced { .. } | GuestBody::LeftOut(_) => {}
        GuestBody::Ready => {
            if let Some(member) = record.kind.member_mut()
                && record.job.state == JobState::Starting
            {
                member.ready = true;
            }
        }
        GuestBody::Started | GuestBody::Exited { .. } if begins_early(record) => {
            fail(record, if record.kind.is_at_barrier() { EARLY } else { OLD_RUNNER_OF_GANG });
        }
        GuestBody::Started => {
            started(record, when);
        }
        GuestBody::Progress { done, total, label } => {
            record.job.progress =
                Some(Progress { done, total, label: shorten(&label, TEXT_BYTES_MAX) });
        }
        GuestBody::OutOfMemory { killed: processes, memory_bytes } => {
            // Of the guest that only writes the outputs no process of the job is left.
            if record.collect.is_none() && processes > 0 {
                record.job.oom_kills = Some(OomKills { processes, memory_bytes });
            }
        }
        GuestBody::Exited { code, end } => exited(record, when, code, end),
        GuestBody::Finished { output_bytes: bytes, output_sha256: sha256, lacks } => {
            let lacks = lacks.map(|lacks| shorten(&lacks, TEXT_BYTES_MAX));
            finished(record, Output { bytes, sha256, lacks });
        }
        GuestBody::Failed { reason } => {
            let is_seed_refused = reason.starts_with(SEED_REFUSED);
            let reason = format!("the runner in the guest: {}", shorten(&reason, TEXT_BYTES_MAX));
            let has_begun = matches!(record.job.state, JobState::Running | JobState::Collecting);
            match (has_begun, &record.collect) {
                (true, None) => record.collect = Some(Collect::new(Ending::Failed, reason)),
                (true, Some(_)) => fail(record, reason),
                (false, _) if !brings_runner(record) && is_seed_refused => {
                    fail(record, format!("{reason}{OLD_RUNNER}"));
                }
                (false, _) => fail(record, reason),
            }
        }
    }
}

/// What may be wrong with the image of a job that its guest has not started.
pub(super) fn why_not_started(record: &JobRecord) -> &'static str {
    if brings_runner(record) { NO_CLOUD_INIT } else { OLD_RUNNER }
}

fn brings_runner(record: &JobRecord) -> bool {
    let mut disks = record.placement.iter().flat_map(|placement| &placement.disks);
    disks.any(|disk| disk.role == DiskRole::CloudInit)
}

/// Whether it is a gang's member whose guest was not told to begin.
fn begins_early(record: &JobRecord) -> bool {
    let is_told = match &record.kind {
        Kind::Job | Kind::Gang(_) | Kind::PersistentVm(_) => true,
        Kind::Member(member) => member.ready && member.begun,
    };
    record.job.state == JobState::Starting && !is_told
}

/// Whether the command starts with this message. It starts only once.
fn started(record: &mut JobRecord, when: When) -> bool {
    let Ok(state) = record.job.state.next(JobEvent::CommandStarted) else { return false };
    record.job.state = state;
    record.job.running_ms = Some(when.at_ms);
    record.counted_ms = 0;
    record.meter.command_started(when.at_ms, when.late_ms);
    true
}

fn exited(record: &mut JobRecord, when: When, code: i32, end: CommandEnd) {
    if record.job.state == JobState::Starting && !started(record, when) {
        return;
    }
    let Ok(state) = record.job.state.next(JobEvent::CommandEnded) else { return };
    record.job.state = state;
    record.meter.command_ended(when.late_ms);
    record.counted_ms = 0;
    (record.job.exit_code, record.job.end) = (Some(code), Some(end));
    record.job.measured_s = record.job.started_ms.map(|ms| seconds(when.at_ms.saturating_sub(ms)));
}

fn finished(record: &mut JobRecord, output: Output) {
    if record.finished.is_some() {
        return;
    }
    if record.job.state != JobState::Collecting {
        return fail(record, "the guest reports its outputs before the end of its command");
    }
    let disk_bytes = record.job.spec.output_bytes.next_multiple_of(BLOCK_BYTES);
    if output.bytes > disk_bytes {
        let said = output.bytes;
        let why = format!("the guest reports {said} bytes on an output disk of {disk_bytes}");
        return fail(record, why);
    }
    if !hash::is_sha256(&output.sha256) {
        return fail(record, "the guest gives no SHA-256 of its outputs");
    }
    record.finished = Some(output);
}

fn fail(record: &mut JobRecord, reason: impl Into<String>) {
    if let Some(collect) = &mut record.collect {
        // How the job ends is decided.
        collect.failed = Some(reason.into());
        return;
    }
    record.ending = Some(Ending::Failed);
    record.job.reason = reason.into();
}

fn shorten(text: &str, bytes_max: usize) -> String {
    text[..text.floor_char_boundary(bytes_max)].to_owned()
}

#[cfg(test)]
pub(super) mod tests;
