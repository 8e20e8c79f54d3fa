//! What the guest's messages do to a job's record: synchronous, so that tests feed messages.

use perigee_model::guest::{GuestBody, GuestMessage};
use perigee_model::job::{JobState, LogLine, Progress};
use perigee_model::states::{JobEvent, Refused};
use perigee_model::{JobId, Problem};

use crate::cluster::Cluster;
use crate::planning::seconds;
use crate::records::{Ending, JobRecord, Output};

/// Lines kept under one key of the store.
const LINES_PER_CHUNK: usize = 100;

/// Takes messages into account, in order, each once; gives back the log lines among them.
///
/// # Errors
/// [`Refused`] when a message does not fit the job's state.
pub fn apply(
    record: &mut JobRecord,
    now_ms: u64,
    messages: Vec<GuestMessage>,
) -> Result<Vec<LogLine>, Refused> {
    let mut lines = Vec::new();
    for message in messages {
        if message.seq <= record.last_seq {
            continue;
        }
        record.last_seq = message.seq;
        match message.body {
            GuestBody::Log { stream, line } => {
                lines.push(LogLine { seq: message.seq, uptime_ms: message.uptime_ms, stream, line })
            }
            GuestBody::Started => started(record, now_ms)?,
            GuestBody::Progress { done, total, label } => {
                record.job.progress = Some(Progress { done, total, label });
            }
            GuestBody::Exited { code } => exited(record, now_ms, code)?,
            GuestBody::Finished { output_bytes, output_sha256 } => {
                record.finished = Some(Output { bytes: output_bytes, sha256: output_sha256 });
            }
            GuestBody::Failed { reason } => {
                record.ending = Some(Ending::Failed);
                record.job.reason = format!("the runner in the guest: {reason}");
            }
        }
    }
    Ok(lines)
}

fn started(record: &mut JobRecord, now_ms: u64) -> Result<(), Refused> {
    record.job.state = record.job.state.next(JobEvent::CommandStarted)?;
    record.job.running_ms = Some(now_ms);
    record.meter.command_started(now_ms);
    Ok(())
}

fn exited(record: &mut JobRecord, now_ms: u64, code: i32) -> Result<(), Refused> {
    if record.job.state == JobState::Starting {
        started(record, now_ms)?;
    }
    record.job.state = record.job.state.next(JobEvent::CommandEnded)?;
    record.meter.command_ended();
    record.job.exit_code = Some(code);
    record.job.measured_s = record.job.started_ms.map(|ms| seconds(now_ms.saturating_sub(ms)));
    Ok(())
}

pub fn log_prefix(job: &JobId) -> String {
    format!("logs/{job}/")
}

/// Stores lines under the number of the first one: storing them again changes nothing.
pub async fn store_lines(cluster: &Cluster, job: &JobId, lines: &[LogLine]) -> Result<(), Problem> {
    for chunk in lines.chunks(LINES_PER_CHUNK) {
        let key = format!("{}{:012}", log_prefix(job), chunk[0].seq);
        cluster.records.put(&key, &chunk).await?;
    }
    Ok(())
}
