//! What somebody sees who listens on the WAN: nothing of volumes that are read and written over it, nothing of a file of the repository
//! that a job reads and writes there, and nothing of the memory of a VM that migrates.

use perigee_lab::capture::{Capture, Seen};
use perigee_lab::{Definition, LabId};
use perigee_model::job::{Job, JobState, Migration, MigrationState};

use super::{Checked, System, ensure, until, with_system_of};

const BYTES: u64 = 16 << 20;
/// The guest puts them together, so no job file has them.
const IN_VOLUME: &str = "volume-marker-4711";
const IN_WRITTEN: &str = "written-marker-4711";
const IN_MEMORY: &str = "memory-marker-4711";
const IN_FILE: &str = "file-marker-4711";

/// Lines of random text, so that they take as many bytes on the way when they are compressed.
fn lines(of: &str) -> String {
    format!("head -c {BYTES} /dev/urandom | base64 -w 100 | sed s/^/{of}-marker-$((4700 + 11))/")
}

fn fill_job() -> String {
    let lines = lines("volume");
    format!(
        "name: fill\nimage: debian\nmemory: 256MiB\nplacement: {{host: cloud1, move: never}}\n\
         volumes: [{{volume: data}}]\n\
         command: {lines} > /data/text; sync\n"
    )
}

/// Reads one volume, writes another one, fills memory, and then waits until its seed begins with an S.
fn read_job() -> String {
    let (lines, written) = (lines("memory"), lines("written"));
    format!(
        "name: read\nimage: debian\nmemory: 256MiB\nplacement: {{host: home1, move: never}}\n\
         volumes: [{{volume: data, access: read}}, {{volume: new, mount: /new}}]\n\
         command: |\n  set -eu\n  seed=$(grep -lx seed /sys/block/*/serial | cut -d/ -f4)\n  \
         cat /data/text > /dev/null\n  \
         {written} > /new/text; sync\n  \
         mkdir -p /mnt/memory; mount -t tmpfs tmpfs /mnt/memory\n  \
         {lines} > /mnt/memory/text\n  \
         echo \"1/1 ready\" > $PERIGEE_PROGRESS\n  \
         while [ \"$(dd if=/dev/$seed bs=512 count=1 iflag=direct 2>/dev/null | head -c 1)\" != S ]; do\n    \
         sleep 0.2\n  done\n"
    )
}

/// Its input comes from the repository, and its output goes there.
const COPY_JOB: &str = "\
name: copy
image: debian
memory: 256MiB
placement: {host: cloud1, move: never}
inputs: ['repo://default/marker']
outputs: [/output/copy]
command: cp inputs/marker/text /output/copy
";

/// What is seen while a job reads a file of the repository at another site than the controller's, and writes one.
async fn file(system: &System, begin: impl Fn() -> Checked<Capture>) -> Checked<Seen> {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let path = scratch.path().join("text");
    // Other than zeros, and so long that it takes many frames.
    let line =
        |number: u64| format!("{IN_FILE} {:016x}\n", number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let text: String = (0..BYTES / 40).map(line).collect();
    std::fs::write(&path, &text).expect("a file");
    let seeing = begin()?;
    let put =
        system.perigee(&["data", "put", &path.display().to_string(), "repo://default/marker/text"]);
    ensure!(put.status.success(), "{put:?}");
    let job_file = scratch.path().join("copy.yaml");
    std::fs::write(&job_file, COPY_JOB).expect("a file");
    let submitted =
        system.perigee(&["-f", "json", "job", "submit", &job_file.display().to_string()]);
    ensure!(submitted.status.success(), "{submitted:?}");
    let job: Job = serde_json::from_slice(&submitted.stdout).expect("a job");
    let job = system.ended(&job.id).await?;
    ensure!(job.state == JobState::Succeeded, "{:?}: {}", job.state, job.reason);
    let seen = seeing.end()?;
    let copy = system.client.get_bytes(&format!("/v1/data/~/jobs/{}/output/copy", job.id)).await?;
    ensure!(copy[..] == *text.as_bytes(), "{} bytes came back", copy.len());
    Ok(seen)
}

/// What is seen while a file is read and written, while volumes are, and while the VM migrates. The site `cloud` has one host, so all that its
/// network carries has come over the WAN or goes there.
async fn listen(system: &System) -> Checked<([Seen; 3], Migration)> {
    let site = "cloud".parse().expect("a name");
    let namespace = system.lab.definition.site_namespace(&site);
    let begin = || Capture::begin(&namespace, &[IN_VOLUME, IN_MEMORY, IN_FILE, IN_WRITTEN]);
    let file = file(system, begin).await?;
    system.volume("data", "cloud1", 64 << 20).await?;
    system.volume("new", "cloud1", 64 << 20).await?;
    let filled = system.submit(&fill_job()).await?;
    let filled = system.ended(&filled.id).await?;
    ensure!(filled.state == JobState::Succeeded, "{:?}: {}", filled.state, filled.reason);
    let using = begin()?;
    let job = system.submit(&read_job()).await?;
    let job = until("the job to have used the volumes", async || {
        let now = system.job(&job.id).await?;
        ensure!(!now.state.is_final(), "{:?}: {}", now.state, now.reason);
        let is_ready = now.progress.as_ref().is_some_and(|progress| progress.done == 1);
        Ok(is_ready.then_some(now))
    })
    .await?;
    let using = using.end()?;
    let moving = begin()?;
    let migration = system.begin_move(&job, "cloud1").await?;
    let migration = system.migration_ended(&job.id, &migration).await?;
    ensure!(migration.state == MigrationState::Completed, "{}", migration.error);
    let moving = moving.end()?;
    system.stop_writer(&job.id).await?;
    let job = system.ended(&job.id).await?;
    ensure!(job.state == JobState::Succeeded, "{:?}: {}", job.state, job.reason);
    eprintln!("file: {file:?}, using: {using:?}, moving: {moving:?}");
    let all = [file, using, moving];
    ensure!(all.iter().all(|seen| seen.bytes > BYTES / 2), "{all:?}");
    Ok((all, migration))
}

#[test]
fn a_listener_on_the_wan_sees_nothing_of_volumes_files_and_memory() {
    with_system_of(Definition::default_demo(LabId::random(), 16), async |system| {
        let (seen, _) = listen(&system).await?;
        ensure!(seen.iter().all(|seen| seen.found == [0; 4]), "{seen:?}");
        Ok(())
    });
}

/// The listener finds what is there. On a busy machine the WAN may be measured as so slow that the memory is sent compressed; no text of
/// it can be seen then.
#[test]
fn a_listener_on_the_wan_sees_all_in_a_lab_without_encryption() {
    let definition = Definition::default_demo(LabId::random(), 16);
    with_system_of(Definition { insecure: true, ..definition }, async |system| {
        let ([file, using, moving], migration) = listen(&system).await?;
        ensure!(file.found[2] > 100, "{file:?}");
        ensure!(using.found[0] > 100 && using.found[3] > 100, "{using:?}");
        ensure!(moving.found[1] > 100 || migration.compressed, "{moving:?}, {migration:?}");
        Ok(())
    });
}
