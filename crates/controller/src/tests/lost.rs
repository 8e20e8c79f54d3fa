//! Hosts that a person gives up, with what was there.

use perigee_model::guest::GuestBody;
use perigee_model::job::{
    Access, Job, JobSpec, JobState, JobVolume, MigrationState, NewVolume, Restart,
};
use perigee_model::vm::VmStatus;
use perigee_model::volume::VolumeSource;
use perigee_model::volume_move::{VolumeMoveCause, VolumeMoveState};
use perigee_model::{HostId, JobId, ProblemKind, VmStart, VolumeName};
use perigee_planner::Boot;

use super::fake::FakeHost;
use super::gone::{ends_anew, restarting, second_home, up};
use super::migrations::{copying_of, switch};
use super::queue::unreachable;
use super::{Lab, data_volume, finish, spec, vm_of, wait_for};
use crate::cleaner::{self, Cleanup};
use crate::cluster::history_cache::BOOTS;
use crate::storage::{given_up, moves, volumes};
use crate::{hosts, jobs};

fn epoch(host: &FakeHost) -> u64 {
    host.inside().volumes[&data_volume()].info.epoch.0
}

async fn remove(lab: &Lab, host: &FakeHost) -> perigee_model::job::HostRemoval {
    unreachable(lab, host).await;
    hosts::remove(&lab.cluster, &host.id, true).await.expect("remove")
}

/// The agent of a host that was removed is back.
async fn register(lab: &Lab, host: &FakeHost) {
    host.inside().down = false;
    hosts::register(&lab.cluster, &host.id, host.addresses.clone()).await.expect("register");
}

/// A volume at `home1` that no job made.
async fn make_words(lab: &Lab) -> VolumeName {
    let name = VolumeName::new("words").expect("name");
    let new = NewVolume {
        name: name.clone(),
        host: Some(lab.home.id.clone()),
        size_bytes: Some(1 << 20),
        source: VolumeSource::Empty,
        leave_site: Default::default(),
    };
    volumes::create(&lab.cluster, new).await.expect("create");
    name
}

fn aborted(job: &Job) -> bool {
    job.migrations[0].state == MigrationState::Aborted
}

#[tokio::test]
async fn a_removed_source_ends_its_migration_and_writes_no_more() {
    let (lab, id, vm) = copying_of(spec(Access::Write)).await;
    let before = epoch(&lab.cloud);
    unreachable(&lab, &lab.home).await;
    let refused = hosts::remove(&lab.cluster, &lab.home.id, false).await.expect_err("a job");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    assert!(refused.why.contains("q-0001-m1"), "{refused}");
    let removal = remove(&lab, &lab.home).await;
    assert_eq!(removal.moving_jobs, std::slice::from_ref(&id));
    let job = lab.wait_for_state(&id, JobState::Failed).await;
    assert!(aborted(&job));
    assert!(job.reason.contains("home1 was removed"), "{}", job.reason);
    assert!(epoch(&lab.cloud) > before, "the source could write");
    assert!(!lab.cloud.inside().vms.contains_key(&vm), "its memory never came");
}

#[tokio::test]
async fn what_a_removed_host_has_taught_says_nothing_of_the_next_one_with_its_name() {
    let lab = Lab::up().await;
    let (key, host) = (format!("{BOOTS}{}", lab.cloud.id), &lab.cloud.id);
    let boots = vec![Boot { image: "debian".to_owned(), seconds: 60.0, cpu_s: 50.0 }];
    lab.cluster.records.put(&key, &boots).await.expect("stored");
    lab.cluster.history_cache.set_boots(host, boots);
    remove(&lab, &lab.cloud).await;
    assert!(lab.cluster.history_cache.boots(host).is_empty());
    let kept: Option<Vec<Boot>> = lab.cluster.records.read(&key).await.expect("read");
    assert_eq!(kept, None);
}

#[tokio::test]
async fn a_job_whose_vm_was_on_its_way_from_a_removed_host_begins_anew() {
    let (lab, id, _) = copying_of(restarting()).await;
    let other = second_home(&lab).await;
    remove(&lab, &lab.home).await;
    ends_anew(&lab, [&other, &lab.cloud], &id).await;
    assert!(aborted(&lab.job(&id).await));
}

#[tokio::test]
async fn a_removed_source_waits_for_the_word_of_a_silent_destination() {
    let (lab, id, vm) = copying_of(spec(Access::Write)).await;
    lab.cloud.inside().down = true;
    remove(&lab, &lab.home).await;
    let job = lab.wait_for_job(&id, "open", |job| job.reason.contains("cloud1")).await;
    assert_eq!(job.migrations[0].state, MigrationState::Copying, "{}", job.reason);
    // It had arrived: what is known of it now is that it runs.
    let last_seq = lab.home.inside().vms[&vm].report.last_seq;
    lab.cloud.arrive(&vm, last_seq);
    lab.cloud.inside().down = false;
    let job = lab.wait_for_state(&id, JobState::Failed).await;
    assert_eq!(job.migrations[0].state, MigrationState::Completed);
    // Its root disk was at the host that is gone.
    assert!(job.reason.contains("home1 was removed"), "{}", job.reason);
}

#[tokio::test]
async fn a_job_whose_disks_were_at_a_removed_host_begins_anew() {
    let (lab, id, vm) = copying_of(restarting()).await;
    let other = second_home(&lab).await;
    switch(&lab, &vm);
    lab.wait_for_job(&id, "at cloud1", |job| job.host.as_ref() == Some(&lab.cloud.id)).await;
    let removal = remove(&lab, &lab.home).await;
    assert_eq!(removal.placed_again, std::slice::from_ref(&id));
    ends_anew(&lab, [&other, &lab.cloud], &id).await;
}

/// Its seed is still there, but the guest has read it.
#[tokio::test]
async fn a_job_that_has_left_a_removed_host_with_all_it_needs_goes_on() {
    let (lab, id, vm) = copying_of(JobSpec { volumes: Vec::new(), ..spec(Access::Write) }).await;
    switch(&lab, &vm);
    lab.wait_for_job(&id, "at cloud1", |job| job.host.as_ref() == Some(&lab.cloud.id)).await;
    for part in ["root", "out"] {
        let volume = VolumeName::new(format!("{vm}-{part}")).expect("name");
        wait_for("the volume to move", async || {
            let cause = VolumeMoveCause::Asked;
            moves::request(&lab.cluster, &volume, &lab.cloud.id, cause).await.ok()
        })
        .await;
        wait_for("the volume to have moved", async || {
            let last = moves::of_volume(&lab.cluster, &volume).await.ok()?;
            (last.state == VolumeMoveState::Completed).then_some(())
        })
        .await;
    }
    let removal = remove(&lab, &lab.home).await;
    assert_eq!(removal.failed_jobs, []);
    assert_eq!(lab.job(&id).await.state, JobState::Running);
    finish(&lab.cloud, &lab.cloud, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
}

#[tokio::test]
async fn a_removed_destination_ends_a_migration_at_its_source() {
    let (lab, id, vm) = copying_of(JobSpec { volumes: Vec::new(), ..spec(Access::Write) }).await;
    remove(&lab, &lab.cloud).await;
    lab.wait_for_job(&id, "not moved", aborted).await;
    assert_eq!(lab.job(&id).await.host, Some(lab.home.id.clone()));
    super::finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
}

#[tokio::test]
async fn a_vm_of_a_removed_host_ends_when_the_host_is_back() {
    let mut lab = Lab::up().await;
    let words = make_words(&lab).await;
    let id = lab.submit(spec(Access::Write)).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    let before = epoch(&lab.cloud);
    remove(&lab, &lab.home).await;
    lab.wait_for_state(&id, JobState::Failed).await;
    assert!(epoch(&lab.cloud) > before, "its VM could write");
    lab.restart_controller().await;
    jobs::delete(&lab.cluster, &id, false).await.expect("nothing of it stands in the cluster");
    register(&lab, &lab.home).await;
    wait_for("the VM to end", async || {
        let inside = lab.home.inside();
        (inside.vms.is_empty() && inside.attachments.is_empty() && inside.volumes.len() == 1)
            .then_some(())
    })
    .await;
    let warnings = async || hosts::info(&lab.cluster, &lab.home.id).await.expect("host").warnings;
    let said = warnings().await.join("\n");
    assert!(said.contains("words"), "{said}");
    // Whoever uses or deletes it has seen it.
    volumes::delete(&lab.cluster, &words).await.expect("delete");
    assert_eq!(warnings().await, Vec::<String>::new());
}

#[tokio::test]
async fn a_host_is_warned_of_no_more_when_every_volume_named_there_was_found() {
    let lab = Lab::up().await;
    let word = VolumeName::new("words").expect("name");
    let record = serde_json::json!({
        "host": lab.home.id, "removed_ms": 1, "volumes": [&word], "more_volumes": 5,
    });
    let key = format!("given_up/{}", lab.home.id);
    lab.cluster.records.put(&key, &record).await.expect("put");
    assert_eq!(given_up::warnings(&lab.cluster).await.expect("warnings").len(), 1);
    given_up::found_again(&lab.cluster, &lab.home.id, &word).await.expect("found");
    assert!(given_up::warnings(&lab.cluster).await.expect("warnings").is_empty());
}

#[tokio::test]
async fn of_what_waits_for_removed_hosts_the_oldest_is_forgotten() {
    let lab = Lab::up().await;
    let (job, gone) = (JobId::new("q-0009").expect("name"), HostId::new("gone").expect("name"));
    for number in 0..=cleaner::GIVEN_UP_MAX {
        let mut cleanup =
            Cleanup::of_host(&job, &format!("n{number}"), VmStart::default(), &gone, &[]);
        cleanup.made_ms = u64::try_from(number).expect("small");
        cleaner::hand_over(&lab.cluster, &cleanup).await.expect("hand over");
    }
    wait_for("the oldest to be forgotten", async || {
        let keys = lab.cluster.records.keys(&cleaner::prefix(&job)).await.expect("keys");
        let oldest = format!("{}n0", cleaner::prefix(&job));
        (keys.len() == cleaner::GIVEN_UP_MAX && !keys.contains(&oldest)).then_some(())
    })
    .await;
    assert!(!cleaner::is_left(&lab.cluster, &job).await.expect("read"));
}

#[tokio::test]
async fn a_job_that_cannot_leave_a_silent_host_says_why() {
    let lab = Lab::up().await;
    let words = make_words(&lab).await;
    let volume = JobVolume {
        volume: words,
        mount: "/words".into(),
        access: Access::Write,
        ranks: Vec::new(),
    };
    let id = lab.submit(JobSpec { volumes: vec![volume], ..restarting() }).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    lab.home.say(&vm_of(&id), GuestBody::Started);
    lab.home.inside().down = true;
    let job = lab.wait_for_job(&id, "waiting", |job| job.reason.contains("words")).await;
    assert!(!job.state.is_final() && job.reason.contains("restart"), "{}", job.reason);
    up(&lab, &lab.home).await;
    lab.wait_for_job(&id, "at work again", |job| job.reason.is_empty()).await;
}

/// A job that runs at `home1`.
async fn running_at_home(restart: Restart) -> (Lab, JobId) {
    let lab = Lab::up().await;
    let id = lab.submit(JobSpec { restart, ..spec(Access::Write) }).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    lab.home.say(&vm_of(&id), GuestBody::Started);
    lab.wait_for_state(&id, JobState::Running).await;
    (lab, id)
}

/// It never counts as away: the host is back at once.
#[tokio::test]
async fn a_reboot_of_the_host_is_a_host_failure() {
    for keeps_files in [true, false] {
        let (lab, id) = running_at_home(Restart::OnHostFailure).await;
        let before = epoch(&lab.cloud);
        lab.home.reboot(keeps_files);
        ends_anew(&lab, [&lab.home, &lab.cloud], &id).await;
        assert!(epoch(&lab.cloud) > before);
    }
}

#[tokio::test]
async fn a_job_that_may_not_restart_names_the_reboot_of_its_host() {
    let (lab, id) = running_at_home(Restart::Never).await;
    lab.home.reboot(true);
    let job = lab.wait_for_state(&id, JobState::Failed).await;
    assert!(job.reason.contains("home1 rebooted"), "{}", job.reason);
}

#[tokio::test]
async fn a_qemu_that_ended_by_itself_is_no_host_failure() {
    let (lab, id) = running_at_home(Restart::OnHostFailure).await;
    lab.home.inside().vms.get_mut(&vm_of(&id)).expect("VM").report.status = VmStatus::Gone;
    let job = lab.wait_for_state(&id, JobState::Failed).await;
    assert!(job.reason.contains("its QEMU is gone"), "{}", job.reason);
}

#[tokio::test]
async fn a_job_whose_host_cannot_start_it_goes_to_another() {
    let lab = Lab::up().await;
    let other = second_home(&lab).await;
    unreachable(&lab, &other).await;
    lab.home.inside().starts_no_vm = true;
    let id = lab.submit(JobSpec { restart: Restart::Never, ..restarting() }).await;
    let refused = |job: &Job| job.reason.contains("cannot start it");
    lab.wait_for_job(&id, "queued again", refused).await;
    up(&lab, &other).await;
    ends_anew(&lab, [&other, &lab.home], &id).await;
}

#[tokio::test]
async fn a_job_that_no_host_can_start_ends_with_the_reason() {
    let lab = Lab::up().await;
    let other = second_home(&lab).await;
    for host in [&lab.home, &other] {
        host.inside().starts_no_vm = true;
    }
    let id = lab.submit(JobSpec { restart: Restart::Never, ..restarting() }).await;
    let job = lab.wait_for_state(&id, JobState::Failed).await;
    assert!(job.reason.contains("invalid accelerator"), "{}", job.reason);
    assert!(job.reason.contains("no host can start"), "{}", job.reason);
    let record = jobs::record(&lab.cluster, &id).await.expect("record");
    assert_eq!(record.refused_by.len(), 2, "each was tried once");
}
