//! Entries for the fuzz targets, with bytes that people and guests could send.

use perigee_model::guest::GuestEvent;
use perigee_model::inputs::{InputFrom, InputList};
use perigee_model::job::{JobSpec, JobState};
use perigee_model::states::JobEvent;
use perigee_model::{JobId, TenantName};
use perigee_repository::Location;

use crate::files::inputs::{InputManifest, ManifestEntry, ManifestFile};
use crate::files::outputs;
use crate::guest::tars;
use crate::jobs;
use crate::records::Ending;

/// An archive of a guest.
pub fn tar(input: &[u8]) {
    drop(tars::check_output(input));
    outputs::read_entries(input, 1 << 20, |_| true);
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

/// A list of a job's inputs. What is taken of it becomes a tar whose entries are below its directory, each once.
pub fn input_list(input: &[u8]) {
    let Ok(list) = serde_json::from_slice::<InputList>(input) else { return };
    if list.check().is_err() {
        return;
    }
    let tenant = TenantName::default();
    let mut manifest = InputManifest::default();
    for input in list.inputs {
        let at = |path: &str| Location::new(tenant.as_str(), path);
        let entry = match input.from {
            InputFrom::Directory {} => Ok(ManifestEntry::Directory),
            InputFrom::File(file) => at(&file.sha256).map(|at| {
                let (size_bytes, executable) = (file.size_bytes, file.executable);
                ManifestEntry::File(ManifestFile {
                    size_bytes,
                    sha256: file.sha256,
                    executable,
                    at,
                })
            }),
            InputFrom::Repository(address) => at(&address).map(|at| {
                let (size_bytes, sha256, executable) = (0, String::new(), true);
                ManifestEntry::File(ManifestFile { size_bytes, sha256, executable, at })
            }),
        };
        let Ok(entry) = entry else { return };
        if manifest.add(input.to, entry).is_err() {
            return;
        }
    }
    if manifest.check().is_err() {
        return;
    }
    manifest.image(&tenant).expect("a name");
    for part in manifest.into_parts() {
        let (headers, _) = part.expect("a path that was checked can be in a tar");
        let mut archive = tar::Archive::new(&headers[..]);
        let mut entries = archive.entries().expect("entries");
        let entry = entries.next().expect("one").expect("an entry");
        let path = entry.path().expect("a path").into_owned();
        let mut names = path.components();
        assert!(names.all(|name| matches!(name, std::path::Component::Normal(_))), "{path:?}");
    }
}
