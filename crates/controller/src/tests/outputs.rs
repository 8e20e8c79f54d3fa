//! What becomes of the outputs of jobs that end in other ways than well, and how long outputs are kept.

use std::time::Duration;

use perigee_model::guest::{GuestBody, LeftOut, LogStream};
use perigee_model::job::{Access, ClusterImage, JobSpec, JobState, Start};
use perigee_model::tenant::Quota;
use perigee_model::vm::VmStatus;
use perigee_model::volume::Snapshot;
use perigee_model::{ImageName, JobId, ProblemKind, TenantName};
use perigee_repository::{Begin, Location};

use super::tenants::{Tenants, small};
use super::{HASTY, Lab, TIMING, answers, finish, running_as, spec, wait_for};
use crate::accounts::files;
use crate::cluster::Timing;
use crate::files::outputs;
use crate::jobs;
use crate::records::JobIntent;
use crate::vms;

const PATIENT: Timing = Timing { cancel_deadline: super::PATIENCE, ..HASTY };

async fn cancel(lab: &Lab, id: &JobId) {
    let request = |intent: &mut JobIntent| intent.cancel = true;
    jobs::intend(&lab.cluster, id, request).await.expect("cancel");
}

async fn up_with(timing: Timing) -> Lab {
    let mut lab = Lab::up().await;
    lab.supervisor.stop().await;
    lab.start_controller(timing).await;
    lab
}

/// A controller that gives a guest time to collect its outputs.
async fn patient() -> Lab {
    up_with(PATIENT).await
}

#[tokio::test]
async fn a_cancelled_job_gives_its_log_and_the_outputs_that_it_has() {
    let mut lab = patient().await;
    let (id, vm) = running_as(&lab, spec(Access::Clone)).await;
    cancel(&lab, &id).await;
    wait_for("the guest to be asked", async || {
        lab.home.inside().ended_commands.contains(&vm).then_some(())
    })
    .await;
    // Neither a kill of the controller nor the same request again changes anything.
    lab.supervisor.stop().await;
    lab.start_controller(PATIENT).await;
    cancel(&lab, &id).await;
    let job = lab.wait_for_job(&id, "cancelling", |job| !job.reason.is_empty()).await;
    assert!(job.reason.contains("its command ends"), "{}", job.reason);
    let line = "half of it".to_owned();
    lab.home.say(&vm, GuestBody::log(LogStream::Stdout, line));
    finish(&lab.home, &lab.home, &vm);
    let job = lab.wait_for_state(&id, JobState::Cancelled).await;
    assert_eq!(job.reason, "cancelled on request");
    assert_eq!(answers(&lab, &id).as_deref(), Some("the answers"));
    assert_eq!(jobs::log(&lab.cluster, &id, 0, 10).await.expect("log").len(), 1);
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_guest_that_does_not_heed_a_cancel_is_stopped_after_a_while() {
    let lab = up_with(HASTY).await;
    let (id, _) = running_as(&lab, spec(Access::Clone)).await;
    cancel(&lab, &id).await;
    let job = lab.wait_for_state(&id, JobState::Cancelled).await;
    assert!(job.reason.contains("did not write its outputs within"), "{}", job.reason);
    assert!(job.reason.contains("its outputs are lost: that took longer"), "{}", job.reason);
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_cancelled_job_whose_vm_dies_ends_and_says_what_is_lost() {
    let lab = patient().await;
    let (id, vm) = running_as(&lab, spec(Access::Clone)).await;
    cancel(&lab, &id).await;
    lab.wait_for_job(&id, "cancelling", |job| !job.reason.is_empty()).await;
    lab.home.inside().vms.get_mut(&vm).expect("VM").report.status = VmStatus::Gone;
    let job = lab.wait_for_state(&id, JobState::Cancelled).await;
    assert!(job.reason.contains("its VM ended before its outputs"), "{}", job.reason);
    assert!(job.reason.contains("its outputs are lost"), "{}", job.reason);
}

#[tokio::test]
async fn outputs_that_did_not_fit_fail_the_job_and_what_fitted_is_kept() {
    let lab = Lab::up().await;
    let (id, vm) = running_as(&lab, spec(Access::Clone)).await;
    let tar = outputs::tests::tar_of(&[("output/answers", b"the answers")]);
    let out = perigee_model::VolumeName::new(format!("{vm}-out")).expect("name");
    let output_sha256 = crate::hash::hex(&<sha2::Sha256 as sha2::Digest>::digest(&tar));
    let output_bytes = tar.len() as u64;
    lab.home.inside().volumes.get_mut(&out).expect("its disk").data = tar;
    lab.home.say(&vm, GuestBody::exited(0));
    let left_out = |path: &str, why: &str, is_lost| {
        GuestBody::LeftOut(LeftOut { path: path.to_owned(), why: why.to_owned(), is_lost })
    };
    lab.home.say(&vm, left_out("/output/huge", "it does not fit", true));
    lab.home.say(&vm, left_out("/output/pipe", "a FIFO", false));
    lab.home.say(&vm, GuestBody::Finished { output_bytes, output_sha256, lacks: None });
    let job = lab.wait_for_state(&id, JobState::Failed).await;
    assert_eq!(
        job.reason,
        "its outputs are not complete: \"/output/huge\" (it does not fit); left out of the outputs: \"/output/pipe\" (a FIFO)"
    );
    let named = jobs::left_out(&lab.cluster, &id).await.expect("a list");
    assert_eq!((job.left_out, named.files.len(), named.more), (2, 2, 0));
    assert_eq!(answers(&lab, &id).as_deref(), Some("the answers"));
}

const DAYS_60_MS: i64 = 60 * 24 * 3600 * 1000;

#[tokio::test]
async fn outputs_are_deleted_when_their_time_is_over_and_the_audit_log_says_so() {
    let lab = Lab::up().await;
    let hour = JobSpec { keep_outputs_s: Some(3600), ..spec(Access::Clone) };
    let (kept, vm) = running_as(&lab, spec(Access::Clone)).await;
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&kept, JobState::Succeeded).await;
    let (id, vm) = running_as(&lab, hour).await;
    finish(&lab.home, &lab.home, &vm);
    let job = lab.wait_for_state(&id, JobState::Succeeded).await;
    job.outputs.expect("outputs").kept_until_ms.expect("a time");
    let expire = async || outputs::expire(&lab.cluster).await.expect("a search");
    assert_eq!(expire().await, 0);
    for by_ms in [DAYS_60_MS, -DAYS_60_MS, -DAYS_60_MS, DAYS_60_MS] {
        lab.cluster.clock.pretend_set(by_ms);
        assert_eq!(expire().await, 0, "the clock was set by {by_ms} ms, and nothing is older");
    }
    lab.cluster.clock.pretend_passed(Duration::from_secs(3500));
    assert_eq!(expire().await, 0);
    lab.cluster.clock.pretend_passed(Duration::from_secs(100));
    assert_eq!(expire().await, 1);
    assert_eq!(expire().await, 0);
    assert_eq!((answers(&lab, &id), lab.job(&id).await.outputs), (None, None));
    assert!(answers(&lab, &kept).is_some(), "a job that says nothing keeps its outputs");
    let log = lab.cluster.audit.read(&Default::default(), 0).expect("the audit log");
    let last = log.last().expect("an entry");
    assert!(last.request.contains(&format!("repo://default/jobs/{id}")), "{last:?}");
}

#[tokio::test]
async fn a_job_can_be_deleted_without_its_outputs() {
    let lab = Lab::up().await;
    let (id, vm) = running_as(&lab, spec(Access::Clone)).await;
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    lab.wait_for_clean_hosts().await;
    jobs::delete(&lab.cluster, &id, true).await.expect("delete");
    assert_eq!(answers(&lab, &id).as_deref(), Some("the answers"));
}

#[tokio::test]
async fn outputs_go_where_the_file_says_and_stay_there() {
    let lab = Lab::up().await;
    let to = Some("runs/today".to_owned());
    let (id, vm) = running_as(&lab, JobSpec { outputs_to: to, ..spec(Access::Clone) }).await;
    finish(&lab.home, &lab.home, &vm);
    let job = lab.wait_for_state(&id, JobState::Succeeded).await;
    assert_eq!(job.outputs.expect("outputs").at, "repo://default/runs/today");
    lab.wait_for_clean_hosts().await;
    jobs::delete(&lab.cluster, &id, false).await.expect("delete");
    let tree = lab.dir.path().join("data/tenants/default/tree");
    assert!(tree.join("runs/today/output/answers").exists() && !tree.join("jobs").exists());
    let other = Some("repo://other/x".to_owned());
    let refused = jobs::submit(&lab.cluster, JobSpec { outputs_to: other, ..spec(Access::Clone) });
    assert_eq!(refused.await.expect_err("another tenant's").kind, ProblemKind::Invalid);
}

#[tokio::test]
async fn the_root_disk_of_a_running_vm_becomes_an_image_that_jobs_use() {
    let lab = Lab::up().await;
    let (id, vm) = running_as(&lab, spec(Access::Clone)).await;
    let ask = Snapshot { image: ImageName::new("mine").expect("a name") };
    let made: ClusterImage = vms::save(&lab.cluster, &vm, &ask).await.expect("an image");
    assert_eq!((made.name.as_str(), lab.home.inside().synced), ("mine", 1));
    let taken = vms::save(&lab.cluster, &vm, &ask).await.expect_err("the name is taken");
    assert_eq!(taken.kind, ProblemKind::Conflict);
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    // The index learns of the end a moment after the record.
    wait_for("the end", async || lab.cluster.index.of_vm(&vm).is_none().then_some(())).await;
    let late = Snapshot { image: ImageName::new("late").expect("a name") };
    let none = vms::save(&lab.cluster, &vm, &late).await.expect_err("it has ended");
    assert_eq!(none.kind, ProblemKind::NotFound);
    let image = ImageName::new("mine").expect("a name");
    let (_, vm) = running_as(&lab, JobSpec { image, ..spec(Access::Clone) }).await;
    finish(&lab.home, &lab.home, &vm);
}

#[tokio::test]
async fn a_file_where_outputs_are_to_go_sends_them_to_the_jobs_own_directory() {
    let lab = Lab::up().await;
    let to = Some("runs/today".to_owned());
    let with = || JobSpec { outputs_to: to.clone(), ..spec(Access::Clone) };
    let (id, vm) = running_as(&lab, with()).await;
    let view = files::view(&lab.cluster, &TenantName::default(), "ann".to_owned(), true);
    let at = Location::new("default", "runs/today").expect("a path");
    let writing = view.write(at, Begin::Empty, true).await.expect("a file");
    writing.commit(None).await.expect("a file");
    finish(&lab.home, &lab.home, &vm);
    let job = lab.wait_for_state(&id, JobState::Succeeded).await;
    assert!(job.reason.contains("repo://default/runs/today is a file"), "{}", job.reason);
    let own = format!("repo://default/jobs/{id}");
    assert_eq!(job.outputs.as_ref().map(|outputs| outputs.at.as_str()), Some(own.as_str()));
    assert_eq!(answers(&lab, &id).as_deref(), Some("the answers"));
    let refused = jobs::submit(&lab.cluster, with()).await.expect_err("it is a file");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    lab.wait_for_clean_hosts().await;
    jobs::delete(&lab.cluster, &id, false).await.expect("delete");
    assert_eq!(answers(&lab, &id), None, "they go with the job");
}

/// They may be large, and their home has other work.
#[tokio::test]
async fn outputs_that_have_no_room_are_read_again_only_when_there_is_some() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    let quota = |bytes| Quota { file_bytes: Some(bytes), ..Quota::default() };
    tenants.set_quota("acme", quota(4)).await;
    let lab = &tenants.lab;
    let start = Start::Host(lab.home.id.clone());
    let (id, vm) = running_as(lab, JobSpec { start, ..small("acme~out") }).await;
    let before = lab.home.inside().data_reads;
    finish(&lab.home, &lab.home, &vm);
    let waits = |job: &perigee_model::job::Job| job.reason.contains("quota");
    lab.wait_for_job(&id, "no room", waits).await;
    tokio::time::sleep(TIMING.monitor * 10).await;
    assert_eq!(lab.home.inside().data_reads, before + 1);
    tenants.set_quota("acme", quota(1 << 20)).await;
    lab.wait_for_state(&id, JobState::Succeeded).await;
}
