//! The files with the logs and samples of jobs: with their jobs, over restarts of the controller, and at an upgrade.

use std::io::Write as _;
use std::path::PathBuf;

use perigee_model::guest::{GuestBody, LogStream};
use perigee_model::job::{Access, JobState};
use perigee_model::upgrade::{DaemonVersion, FORMAT_LEVEL, FinishUpgrade};
use perigee_model::{JobId, VmId};

use super::{Lab, finish, running_as, spec, wait_for};
use crate::upgrade::raise_to;
use crate::{job_files, jobs, level};

/// What is in the directory of all jobs.
fn directories(lab: &Lab) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(lab.dir.path().join(job_files::JOBS));
    entries.into_iter().flatten().map(|entry| entry.expect("an entry").path()).collect()
}

async fn lines(lab: &Lab, id: &JobId) -> Vec<String> {
    let lines = jobs::log(&lab.cluster, id, 0, 100).await.expect("a log");
    lines.into_iter().map(|line| line.line).collect()
}

/// The guest prints a line, which comes into the log.
async fn prints(lab: &Lab, (id, vm): (&JobId, &VmId), line: &str) {
    lab.home.say(vm, GuestBody::log(LogStream::Stdout, line));
    wait_for("the line", async || {
        (lines(lab, id).await.last().map(String::as_str) == Some(line)).then_some(())
    })
    .await;
}

/// The keys of logs and samples in the store.
async fn in_records(lab: &Lab) -> Vec<String> {
    let records = &lab.cluster.records;
    let mut keys = records.keys("logs/").await.expect("keys");
    keys.extend(records.keys("samples/").await.expect("keys"));
    keys
}

/// A job that has printed a line and has ended.
async fn ended(lab: &Lab) -> JobId {
    let (id, vm) = running_as(lab, spec(Access::Clone)).await;
    prints(lab, (&id, &vm), "one").await;
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    id
}

#[tokio::test]
async fn a_job_has_one_directory_and_none_when_it_is_deleted() {
    let lab = Lab::up().await;
    let id = ended(&lab).await;
    assert_eq!(lines(&lab, &id).await, ["one"]);
    assert!(!jobs::samples(&lab.cluster, &id).await.expect("samples").is_empty());
    assert_eq!((directories(&lab).len(), in_records(&lab).await.len()), (1, 0));
    jobs::delete(&lab.cluster, &id, false).await.expect("deleted");
    assert!(directories(&lab).is_empty());
}

#[tokio::test]
async fn while_a_backup_copies_the_files_none_is_removed_and_the_cleaner_removes_them_later() {
    let mut lab = Lab::up().await;
    let id = ended(&lab).await;
    let held = job_files::hold(lab.dir.path()).expect("held").expect("there are files");
    jobs::delete(&lab.cluster, &id, false).await.expect("deleted");
    assert_eq!(directories(&lab).len(), 1);
    drop(held);
    lab.restart_controller().await;
    wait_for("the cleaner", async || directories(&lab).is_empty().then_some(())).await;
}

#[tokio::test]
async fn the_cleaner_removes_files_of_no_job_and_those_of_an_earlier_job_of_the_same_name() {
    let mut lab = Lab::up().await;
    let id = ended(&lab).await;
    let own = directories(&lab);
    let all = lab.dir.path().join(job_files::JOBS);
    for name in ["q-0009.1".to_owned(), format!("{id}.1")] {
        std::fs::create_dir_all(all.join(&name).join("log")).expect("a directory");
        std::fs::write(all.join(&name).join("samples"), "{}").expect("a file");
    }
    lab.restart_controller().await;
    wait_for("the cleaner", async || (directories(&lab) == own).then_some(())).await;
    assert_eq!(lines(&lab, &id).await, ["one"]);
}

#[tokio::test]
async fn a_line_that_a_crash_has_torn_is_never_shown_and_the_log_goes_on_behind_the_last_whole_one()
{
    let mut lab = Lab::up().await;
    let (id, vm) = running_as(&lab, spec(Access::Clone)).await;
    prints(&lab, (&id, &vm), "one").await;
    lab.supervisor.stop().await;
    let log = directories(&lab)[0].join("log");
    let segment = std::fs::read_dir(&log).expect("a list").next().expect("a segment");
    let segment = segment.expect("an entry").path();
    let mut file = std::fs::File::options().append(true).open(segment).expect("the segment");
    file.write_all(b"{\"seq\":7,\"uptime_ms\":1,\"stream\":\"stdout\",\"li").expect("torn");
    lab.restart_controller().await;
    assert_eq!(lines(&lab, &id).await, ["one"]);
    prints(&lab, (&id, &vm), "two").await;
    assert_eq!(lines(&lab, &id).await, ["one", "two"]);
}

#[tokio::test]
async fn until_the_upgrade_is_ended_logs_and_samples_are_records_and_then_they_become_files() {
    let lab = Lab::up().await;
    level::raise(&lab.cluster.records, level::JOB_FILES - 1).await.expect("an older store");
    let older = ended(&lab).await;
    let (id, vm) = running_as(&lab, spec(Access::Clone)).await;
    prints(&lab, (&id, &vm), "one").await;
    wait_for("samples", async || (in_records(&lab).await.len() > 3).then_some(())).await;
    assert!(directories(&lab).is_empty(), "a version that knows no files can go on");
    assert_eq!(in_records(&lab).await.len(), 4);
    for host in [&lab.home, &lab.cloud] {
        let mut inside = host.inside();
        inside.pool_free_bytes = Some(1 << 40);
        inside.version = Some(DaemonVersion::own());
    }
    raise_to(&lab.cluster, FinishUpgrade::default(), FORMAT_LEVEL).await.expect("it is ended");
    prints(&lab, (&id, &vm), "two").await;
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    assert_eq!(lines(&lab, &id).await, ["one", "two"]);
    assert!(!jobs::samples(&lab.cluster, &id).await.expect("samples").is_empty());
    assert_eq!(directories(&lab).len(), 1);
    // Nobody adds to the other one.
    assert_eq!(lines(&lab, &older).await, ["one"]);
    let samples = async || jobs::samples(&lab.cluster, &older).await.expect("samples").len();
    let before = samples().await;
    assert!(in_records(&lab).await.iter().all(|key| key.contains(older.as_str())));
    jobs::move_to_files(&lab.cluster).await.expect("moved");
    assert_eq!((lines(&lab, &older).await, samples().await), (vec!["one".to_owned()], before));
    assert!(in_records(&lab).await.is_empty());
}
