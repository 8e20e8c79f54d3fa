//! Faults that cost a job its work, each with the way it came about.

use perigee_model::guest::{GuestBody, LogStream};
use perigee_model::job::{Access, JobState};
use perigee_model::{VolumeName, vm::VmStatus};

use super::fake::FakeHost;
use super::{Lab, answers, finish, spec, vm_of, wait_for};
use crate::{hosts, jobs};

fn epoch_of_the_data(lab: &Lab) -> u64 {
    lab.cloud.inside().volumes[&super::data_volume()].info.epoch.0
}

/// A running job whose guest has ended its command and left an output.
async fn running(lab: &Lab) -> (perigee_model::JobId, perigee_model::VmId) {
    let id = lab.submit(spec(Access::Clone)).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    lab.home.say(&vm, GuestBody::Started);
    lab.wait_for_state(&id, JobState::Running).await;
    (id, vm)
}

#[tokio::test]
async fn a_repository_that_takes_no_output_ends_no_job() {
    let lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    let tree = lab.dir.path().join("data/tenants/default/tree");
    std::fs::create_dir_all(&tree).expect("the tenant's files");
    std::fs::write(tree.join("jobs"), "in the way").expect("a file");
    finish(&lab.home, &lab.home, &vm);
    let job = lab
        .wait_for_job(&id, "waiting for its output", |job| {
            job.state.is_final() || !job.reason.is_empty()
        })
        .await;
    assert_eq!(job.state, JobState::Collecting, "{}", job.reason);
    assert!(job.reason.contains("jobs"), "{}", job.reason);
    std::fs::remove_file(tree.join("jobs")).expect("a person has made room");
    lab.wait_for_state(&id, JobState::Succeeded).await;
    assert_eq!(answers(&lab, &id).as_deref(), Some("the answers"));
}

#[tokio::test]
async fn a_disk_that_is_full_for_a_while_ends_no_job_and_loses_no_line() {
    let lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    lab.cluster.job_files.set_full(true);
    lab.home.say(&vm, GuestBody::log(LogStream::Stdout, "kept"));
    let job = lab
        .wait_for_job(&id, "waiting for its log", |job| {
            job.state.is_final() || job.reason.contains("full")
        })
        .await;
    assert_eq!(job.state, JobState::Running, "{}", job.reason);
    lab.cluster.job_files.set_full(false);
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    let lines = jobs::log(&lab.cluster, &id, 0, 100).await.expect("log");
    assert_eq!(lines.iter().map(|l| l.line.as_str()).collect::<Vec<_>>(), ["kept"]);
}

#[tokio::test]
async fn trouble_at_a_job_s_end_does_not_hide_why_it_ended() {
    let lab = Lab::up().await;
    let id = lab.submit(spec(Access::Clone)).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    let other = rusqlite::Connection::open(lab.dir.path().join("state.db")).expect("open");
    other.busy_timeout(super::PATIENCE).expect("patience");
    let full = "CREATE TRIGGER full_2 BEFORE INSERT ON entries WHEN NEW.key LIKE 'cleanups/%'
                BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END;";
    other.execute_batch(full).expect("the disk fills up");
    jobs::intend(&lab.cluster, &id, |intent| intent.cancel = true).await.expect("cancel");
    lab.wait_for_job(&id, "waiting for its cleanup", |job| job.reason.contains("full")).await;
    other.execute_batch("DROP TRIGGER full_2").expect("there is room again");
    let job = lab.wait_for_state(&id, JobState::Cancelled).await;
    assert_eq!(job.reason, "cancelled on request");
}

#[tokio::test]
async fn a_guest_that_begins_with_finished_ends_its_job() {
    let lab = Lab::up().await;
    let id = lab.submit(spec(Access::Clone)).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    lab.home.say(
        &vm,
        GuestBody::Finished { output_bytes: 0, output_sha256: empty.into(), lacks: None },
    );
    let job = lab.wait_for_job(&id, "ended", |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Failed, "{}", job.reason);
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn an_output_that_the_guest_claims_beyond_its_disk_ends_the_job() {
    let lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    lab.home.say(&vm, GuestBody::exited(0));
    let sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855".into();
    lab.home.say(
        &vm,
        GuestBody::Finished { output_bytes: 16 << 40, output_sha256: sha256, lacks: None },
    );
    let job = lab.wait_for_job(&id, "ended", |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Failed);
    assert!(job.reason.contains("output disk"), "{}", job.reason);
}

#[tokio::test]
async fn an_empty_answer_of_a_volume_server_keeps_the_account() {
    let lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    let set = |reads: Option<u64>| {
        let mut inside = lab.home.inside();
        let report = &mut inside.vms.get_mut(&vm).expect("VM").report;
        let stats = |reads| perigee_model::volume::IoStats { reads, ..Default::default() };
        report.io =
            reads.map(|reads| vec![stats(reads); report.spec.disks.len()]).unwrap_or_default();
    };
    let reads = async || {
        let samples = jobs::samples(&lab.cluster, &id).await.expect("samples");
        samples.last().map_or(0, |sample| sample.io.reads)
    };
    for count in [Some(10), Some(1010), None, Some(1020)] {
        set(count);
        tokio::time::sleep(super::TIMING.figures * 4).await;
    }
    lab.home.inside().vms.get_mut(&vm).expect("VM").report.status = VmStatus::Running;
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    assert_eq!(reads().await, 4 * 1020, "four disks, from zero on");
}

#[tokio::test]
async fn a_volume_that_somebody_else_made_under_a_jobs_name_is_neither_taken_nor_deleted() {
    let lab = Lab::up().await;
    let theirs = VolumeName::new("q-0001-root").expect("name");
    lab.home.make_volume(&theirs);
    let id = lab.submit(spec(Access::Clone)).await;
    let job = lab.wait_for_job(&id, "ended", |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Failed);
    assert!(job.reason.contains("q-0001-root"), "{}", job.reason);
    wait_for("everything else to be gone", async || {
        (lab.home.inside().volumes.len() <= 1 && lab.cloud.inside().volumes.len() == 1)
            .then_some(())
    })
    .await;
    assert!(lab.home.inside().volumes.contains_key(&theirs), "it was never the job's");
    assert!(lab.home.inside().vms.is_empty());
}

#[tokio::test]
async fn a_vm_that_a_cancelled_job_left_at_a_silent_host_writes_its_volume_no_more() {
    let lab = Lab::up().await;
    let id = lab.submit(spec(Access::Write)).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    let opened = epoch_of_the_data(&lab);
    lab.home.inside().down = true;
    lab.cloud.inside().down = true;
    jobs::intend(&lab.cluster, &id, |intent| intent.cancel = true).await.expect("cancel");
    let job = lab
        .wait_for_job(&id, "waiting for the volume's home", |job| {
            job.state.is_final() || job.reason.contains("cloud1")
        })
        .await;
    assert!(!job.state.is_final(), "{}", job.reason);
    assert!(job.reason.contains("may still run at home1"), "{}", job.reason);
    lab.cloud.inside().down = false;
    lab.wait_for_state(&id, JobState::Cancelled).await;
    assert!(epoch_of_the_data(&lab) > opened, "the VM's session has an old epoch");
    lab.home.inside().down = false;
    lab.wait_for_clean_hosts().await;
}

/// A job whose command has a timeout of one second and began long ago, in a stopped controller.
async fn begun_long_ago(
    lab: &mut Lab,
    counted_ms: u64,
) -> (perigee_model::JobId, perigee_model::VmId) {
    let limited = perigee_model::job::JobSpec { timeout_s: Some(1), ..spec(Access::Clone) };
    let id = lab.submit(limited).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    lab.home.say(&vm, GuestBody::Started);
    lab.wait_for_state(&id, JobState::Running).await;
    lab.supervisor.stop().await;
    let long_ago = |record: Option<crate::records::JobRecord>| {
        let mut record = record.expect("job");
        record.job.running_ms = record.job.running_ms.map(|ms| ms - 3_600_000);
        record.counted_ms = counted_ms;
        record
    };
    lab.cluster.records.update(&crate::records::job_key(&id), long_ago).await.expect("update");
    (id, vm)
}

#[tokio::test]
async fn time_in_which_a_disk_did_not_answer_is_not_the_jobs() {
    let mut lab = Lab::up().await;
    let (id, vm) = begun_long_ago(&mut lab, 0).await;
    lab.home.inside().vms.get_mut(&vm).expect("VM").report.status = VmStatus::IoError;
    lab.start_controller(super::TIMING).await;
    let job = lab
        .wait_for_job(&id, "in trouble", |job| job.state.is_final() || !job.reason.is_empty())
        .await;
    assert_eq!(job.state, JobState::Running, "{}", job.reason);
    lab.home.inside().vms.get_mut(&vm).expect("VM").report.status = VmStatus::Running;
    lab.wait_for_job(&id, "at work again", |job| job.reason.is_empty()).await;
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
}

#[tokio::test]
async fn a_job_that_ran_longer_than_its_timeout_ends() {
    let mut lab = Lab::up().await;
    let (id, _) = begun_long_ago(&mut lab, 3_600_000).await;
    lab.start_controller(super::TIMING).await;
    let job = lab.wait_for_state(&id, JobState::Failed).await;
    assert!(job.reason.contains("timeout of 1 s"), "{}", job.reason);
}

#[tokio::test]
async fn a_host_that_could_not_be_stored_registers_with_its_next_word() {
    let mut lab = Lab::up().await;
    let store = rusqlite::Connection::open(lab.dir.path().join("state.db")).expect("open");
    store.busy_timeout(super::PATIENCE).expect("patience");
    let full = "CREATE TRIGGER full_1 BEFORE INSERT ON entries WHEN NEW.key LIKE 'hosts/%'
                BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END;";
    store.execute_batch(full).expect("the disk fills up");
    let third = FakeHost::start("home2", "home").await;
    let register =
        async |lab: &Lab| hosts::register(&lab.cluster, &third.id, third.addresses.clone()).await;
    register(&lab).await.expect_err("it is not stored");
    store.execute_batch("DROP TRIGGER full_1").expect("there is room again");
    register(&lab).await.expect("register");
    lab.restart_controller().await;
    hosts::info(&lab.cluster, &third.id).await.expect("it is known");
}
