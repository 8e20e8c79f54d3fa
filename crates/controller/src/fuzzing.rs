//! Entries for the fuzz targets, with bytes that people and guests could send.

use perigee_model::JobId;
use perigee_model::guest::GuestEvent;
use perigee_model::job::{JobSpec, JobState};
use perigee_model::states::JobEvent;

use crate::records::Ending;
use crate::{jobs, outputs, tars};

/// An archive of a guest.
pub fn tar(input: &[u8]) {
    drop(tars::check_output(input));
    outputs::read_entries(input, |_| true);
}

/// A job's description in the first line, and its guest's messages in the others. Whatever they are, the job
/// must still be able to end.
pub fn guest_messages(input: &[u8]) {
    let mut lines = input.split(|byte| *byte == b'\n');
    let Some(Ok(spec)) = lines.next().map(serde_json::from_slice::<JobSpec>) else { return };
    let id = JobId::new("q-0001").expect("a name");
    let mut record = jobs::new_record(id, spec);
    record.job.state = JobState::Starting;
    record.job.started_ms = Some(1);
    for line in lines {
        let Ok(event) = serde_json::from_slice::<GuestEvent>(line) else { continue };
        jobs::apply(&mut record, u64::from(u32::MAX), vec![event]);
        let next = match (record.ending, record.finished.is_some()) {
            (Some(Ending::Cancelled), _) => JobEvent::Cancelled,
            (None, true) => {
                JobEvent::Collected { exit_code: record.job.exit_code.expect("it ended") }
            }
            _ => JobEvent::Failed,
        };
        record.job.state.next(next).expect("the job can end");
    }
}
