//! Live migrations, and what interrupts them.

use perigee_model::guest::GuestBody;
use perigee_model::job::{
    Access, HostState, Job, JobSpec, JobState, Link, Migration, MigrationState, Start,
};
use perigee_model::plan::Trigger;
use perigee_model::vm::{ENDED_SILENTLY, LinkProbe, MigrationPhase, VmStatus};
use perigee_model::{HostId, JobId, ProblemKind, VmId, VmStart};
use perigee_planner::Refused;

use super::fake::FakeHost;
use super::{Lab, TIMING, data_volume, finish, running, running_as, spec, vm_of, wait_for};
use crate::cleaner::{self, Cleanup};
use crate::cluster::Timing;
use crate::cluster::history_cache::History;
use crate::planning::links;
use crate::{hosts, jobs, migration, planning, vms};

/// A running job whose VM is being copied from `home1` to `cloud1`.
async fn copying() -> (Lab, JobId, VmId) {
    copying_of(spec(Access::Write)).await
}

pub async fn copying_of(job: JobSpec) -> (Lab, JobId, VmId) {
    copying_in(Lab::up().await, job).await
}

async fn copying_in(lab: Lab, job: JobSpec) -> (Lab, JobId, VmId) {
    let (id, vm) = running_as(&lab, job).await;
    vms::move_to(&lab.cluster, &vm, lab.cloud.id.clone(), Default::default()).await.expect("move");
    wait_for("the source to be asked", async || {
        lab.home.inside().vms[&vm].asked.is_some().then_some(())
    })
    .await;
    lab.wait_for_job(&id, "copying", |job| job.migrations[0].state == MigrationState::Copying)
        .await;
    (lab, id, vm)
}

/// Both agents do what a migration that succeeds does; the guest says one more thing before the switch.
pub fn switch(lab: &Lab, vm: &VmId) {
    switch_to(lab, &lab.cloud, vm);
}

/// The same for a VM that goes from home1 to another host.
pub fn switch_to(lab: &Lab, to: &FakeHost, vm: &VmId) {
    switch_from(&lab.home, to, vm);
}

/// The same for a VM whose volumes are at the two hosts.
pub fn switch_from(from: &FakeHost, to: &FakeHost, vm: &VmId) {
    from.say(vm, GuestBody::Progress { done: 1, total: 2, label: "before".into() });
    let order = from.inside().vms[vm].asked.clone().expect("asked");
    for raise in order.epochs {
        for host in [from, to] {
            if let Some(volume) = host.inside().volumes.get_mut(&raise.volume) {
                assert_eq!(volume.info.epoch, raise.from);
                volume.info.epoch = raise.to;
            }
        }
    }
    let last_seq = from.inside().vms[vm].report.last_seq;
    to.arrive(vm, last_seq);
    from.set_phase(vm, MigrationPhase::Completed, VmStatus::Migrated);
}

async fn end_at_the_destination(lab: &Lab, id: &JobId, vm: &VmId) {
    let job =
        lab.wait_for_job(id, "at cloud1", |job| job.host.as_ref() == Some(&lab.cloud.id)).await;
    assert_eq!(job.migrations.len(), 1);
    assert_eq!(job.migrations[0].state, MigrationState::Completed);
    assert_eq!(job.progress.expect("said at the source").label, "before");
    wait_for("the source to be empty", async || {
        let inside = lab.home.inside();
        (inside.vms.is_empty() && inside.attachments.is_empty()).then_some(())
    })
    .await;
    finish(&lab.cloud, &lab.home, vm);
    lab.wait_for_state(id, JobState::Succeeded).await;
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_job_follows_its_vm_to_the_data() {
    let (lab, id, vm) = copying().await;
    {
        let cloud = lab.cloud.inside();
        let mut attached: Vec<_> = cloud.attachments.keys().map(|name| name.as_str()).collect();
        attached.sort_unstable();
        assert_eq!(attached, ["q-0001-out", "q-0001-root", "q-0001-seed"], "the data is at home");
        let order = lab.home.inside().vms[&vm].asked.clone().expect("asked");
        let mut raised: Vec<_> = order.epochs.iter().map(|e| e.volume.as_str()).collect();
        raised.sort_unstable();
        assert_eq!(raised, ["q-0001-out", "q-0001-root", "tpch"], "the seed is never written");
    }
    switch(&lab, &vm);
    end_at_the_destination(&lab, &id, &vm).await;
    let job = lab.job(&id).await;
    let moved = &job.migrations[0];
    let prepare = moved.phases.prepare.expect("the preparation was timed");
    assert_eq!((moved.total_ms, moved.downtime_ms), (1500 + prepare.total_ms(), 200));
    let decisions = planning::decisions(&lab.cluster, &id).await.expect("decisions");
    assert_eq!(decisions.len(), 2, "placement and the move that was asked for");
    assert!(decisions.iter().all(|decision| decision.measured_s.is_some()));
}

/// The agents of an older version do not say that they have it.
#[tokio::test]
async fn a_move_goes_through_a_tunnel_only_if_both_agents_have_it() {
    for both in [false, true] {
        let lab = Lab::up().await;
        for (host, has) in [(&lab.home, true), (&lab.cloud, both)] {
            host.inside().tunnels_moves = has;
            wait_for("the report", async || {
                (lab.cluster.hosts.report(&host.id)?.tunnels_moves == has).then_some(())
            })
            .await;
        }
        let (lab, _, vm) = copying_in(lab, spec(Access::Write)).await;
        assert_eq!(lab.cloud.inside().vms[&vm].report.spec.arrives_tunnelled, both);
    }
}

/// What it did between the last reading of its figures and its arrival was lost from the account, so its shown end was too
/// late.
#[tokio::test]
async fn what_a_vm_did_last_at_its_old_host_is_counted() {
    let (lab, id, vm) = copying().await;
    {
        let mut home = lab.home.inside();
        for disk in &mut home.vms.get_mut(&vm).expect("VM").report.io {
            disk.reads += 1000;
        }
    }
    switch(&lab, &vm);
    lab.wait_for_job(&id, "at cloud1", |job| job.host.as_ref() == Some(&lab.cloud.id)).await;
    let record = jobs::record(&lab.cluster, &id).await.expect("record");
    let own = record.placement.expect("placed").disks.len() as u64 - 1;
    assert!(record.meter.io().reads >= own * 1000, "{:?}", record.meter.totals);
    end_at_the_destination(&lab, &id, &vm).await;
}

#[tokio::test]
async fn a_request_without_an_answer_does_not_undo_a_migration_that_is_preparing() {
    let lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    lab.cloud.inside().loses_answers = true;
    vms::move_to(&lab.cluster, &vm, lab.cloud.id.clone(), Default::default()).await.expect("move");
    wait_for("the destination's QEMU", async || {
        lab.cloud.inside().vms.contains_key(&vm).then_some(())
    })
    .await;
    lab.cloud.inside().loses_answers = false;
    wait_for("the source to be asked", async || {
        assert_ne!(lab.job(&id).await.migrations[0].state, MigrationState::Aborted);
        lab.home.inside().vms[&vm].asked.is_some().then_some(())
    })
    .await;
    lab.wait_for_job(&id, "copying", |job| job.migrations[0].state == MigrationState::Copying)
        .await;
    assert_eq!(lab.cloud.inside().starts[&vm], 1, "the same start");
    switch(&lab, &vm);
    end_at_the_destination(&lab, &id, &vm).await;
}

/// The time lost is in the counters, so the test does not take that time.
#[tokio::test]
async fn a_job_that_loses_time_to_the_network_is_moved_to_its_data() {
    let (lab, id, vm) = moves_to_its_data().await;
    let job = lab.job(&id).await;
    assert_eq!(job.migrations[0].to, lab.cloud.id);
    assert!(job.migrations[0].predicted_total_ms.is_some());
    let decisions = planning::decisions(&lab.cluster, &id).await.expect("decisions");
    assert_eq!(decisions.last().expect("decisions").trigger, Trigger::TimeLost);
    switch(&lab, &vm);
    end_at_the_destination(&lab, &id, &vm).await;
}

/// A job at home1 that has lost time to the network, and whose VM is being sent to its data at cloud1.
pub async fn moves_to_its_data() -> (Lab, JobId, VmId) {
    let lab = Lab::up().await;
    let mut moving = spec(Access::Read);
    (moving.may_migrate, moving.memory_bytes) = (true, 64 << 20);
    let (id, vm) = running_as(&lab, moving).await;
    wait_for("the planner to move the VM", async || {
        let mut home = lab.home.inside();
        let io = &mut home.vms.get_mut(&vm).expect("VM").report.io[3];
        io.reads += 1;
        io.read_bytes += 8192;
        io.network_requests += 1;
        for ns in [&mut io.read_ns, &mut io.busy_ns, &mut io.network_ns, &mut io.network_busy_ns] {
            *ns += 20_000_000;
        }
        home.vms.get(&vm).and_then(|vm| vm.asked.as_ref()).map(drop)
    })
    .await;
    (lab, id, vm)
}

#[tokio::test]
async fn a_controller_restart_in_the_middle_of_a_migration_goes_on() {
    let (mut lab, id, vm) = copying().await;
    lab.restart_controller().await;
    lab.supervisor.stop().await;
    switch(&lab, &vm);
    lab.restart_controller().await;
    end_at_the_destination(&lab, &id, &vm).await;
}

#[tokio::test]
async fn a_controller_restart_at_any_moment_of_a_migration_goes_on() {
    let mut lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    vms::move_to(&lab.cluster, &vm, lab.cloud.id.clone(), Default::default()).await.expect("move");
    for _ in 0..10 {
        lab.restart_controller().await;
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    wait_for("the source to be asked", async || {
        lab.home.inside().vms[&vm].asked.is_some().then_some(())
    })
    .await;
    switch(&lab, &vm);
    for _ in 0..10 {
        lab.restart_controller().await;
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    end_at_the_destination(&lab, &id, &vm).await;
}

#[tokio::test]
async fn a_migration_that_fails_leaves_the_vm_at_the_source() {
    let (lab, id, vm) = copying().await;
    lab.home.set_phase(&vm, MigrationPhase::Failed, VmStatus::Running);
    let job = lab
        .wait_for_job(&id, "not moved", |job| job.migrations[0].state == MigrationState::Aborted)
        .await;
    assert_eq!(job.host.as_ref(), Some(&lab.home.id));
    wait_for("the destination to be empty", async || {
        let inside = lab.cloud.inside();
        (inside.vms.is_empty() && inside.attachments.is_empty()).then_some(())
    })
    .await;
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
}

#[tokio::test]
async fn a_migration_whose_waiting_qemu_was_killed_says_where_it_was() {
    let (lab, id, vm) = copying().await;
    {
        let mut cloud = lab.cloud.inside();
        let report = &mut cloud.vms.get_mut(&vm).expect("it waits").report;
        (report.status, report.reason) = (VmStatus::Gone, ENDED_SILENTLY.to_owned());
        lab.home.set_phase(&vm, MigrationPhase::Failed, VmStatus::Running);
    }
    let job = lab
        .wait_for_job(&id, "not moved", |job| job.migrations[0].state == MigrationState::Aborted)
        .await;
    let error = &job.migrations[0].error;
    assert!(error.contains("its QEMU at cloud1 ended"), "{error}");
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
}

#[tokio::test]
async fn a_source_that_refuses_aborts_the_migration() {
    ends_at_the_source(|lab| lab.home.inside().refuse_migration = true, "this QEMU cannot").await;
}

/// A move that is aborted for this reason, and its job.
async fn ends_at_the_source(prepare: impl FnOnce(&Lab), reason: &str) {
    let lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    prepare(&lab);
    vms::move_to(&lab.cluster, &vm, lab.cloud.id.clone(), Default::default()).await.expect("move");
    let job = lab
        .wait_for_job(&id, "not moved", |job| {
            job.migrations.first().is_some_and(|m| m.state == MigrationState::Aborted)
        })
        .await;
    assert!(job.migrations[0].error.contains(reason), "{}", job.migrations[0].error);
    wait_for("the destination to be empty", async || {
        lab.cloud.inside().vms.is_empty().then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_source_that_refuses_an_old_certificate_is_asked_again() {
    let lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    lab.home.inside().forbids_migration_once = true;
    vms::move_to(&lab.cluster, &vm, lab.cloud.id.clone(), Default::default()).await.expect("move");
    lab.wait_for_job(&id, "copying", |job| {
        job.migrations.first().is_some_and(|m| m.state == MigrationState::Copying)
    })
    .await;
    assert!(!lab.home.inside().forbids_migration_once);
}

#[tokio::test]
async fn a_vm_that_stands_still_is_not_moved_and_its_host_says_why() {
    let lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    lab.home.inside().vms.get_mut(&vm).expect("VM").report.status = VmStatus::IoError;
    vms::move_to(&lab.cluster, &vm, lab.cloud.id.clone(), Default::default()).await.expect("move");
    let job = lab
        .wait_for_job(&id, "not moved", |job| {
            job.migrations.first().is_some_and(|m| m.state == MigrationState::Aborted)
        })
        .await;
    let why = &job.migrations[0].error;
    assert!(why.contains("it is IoError, and only a running VM can be moved"), "{why}");
}

#[tokio::test]
async fn a_migration_that_a_person_cancels_leaves_the_vm_at_the_source() {
    let (lab, id, vm) = copying().await;
    migration::cancel(&lab.cluster, &vm).await.expect("cancel");
    let aborted = |job: &Job| job.migrations[0].state == MigrationState::Aborted;
    let job = lab.wait_for_job(&id, "not moved", aborted).await;
    assert_eq!(job.migrations[0].error, "cancelled");
    // The store has it before the index.
    let elsewhere = [HostId::new("cloud2").expect("name")];
    wait_for("the planner to wait for a while", async || {
        let failed = migration::by_itself::failed_lately(&lab.cluster, &vm, &elsewhere);
        Some(failed).filter(|all| all.len() == 1)
    })
    .await;
    assert_eq!(job.host.as_ref(), Some(&lab.home.id));
    let again = migration::cancel(&lab.cluster, &vm).await.expect_err("none is under way");
    assert_eq!(again.kind, ProblemKind::Conflict);
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
}

/// The destination never listens, so the source is never asked.
#[tokio::test]
async fn a_migration_can_be_cancelled_while_it_is_prepared() {
    let lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    lab.cloud.inside().down = true;
    let moved = vms::move_to(&lab.cluster, &vm, lab.cloud.id.clone(), Default::default())
        .await
        .expect("move");
    assert_eq!(moved.state, MigrationState::Preparing);
    // Its driver may have given up by itself: the destination does not answer.
    let cancelled = migration::cancel(&lab.cluster, &vm).await;
    lab.cloud.inside().down = false;
    let aborted = |job: &Job| job.migrations[0].state == MigrationState::Aborted;
    let job = lab.wait_for_job(&id, "not moved", aborted).await;
    assert!(cancelled.is_err() || !job.migrations[0].error.is_empty());
    assert!(lab.home.inside().vms[&vm].asked.is_none());
}

#[tokio::test]
async fn what_hinders_a_migration_is_shown_while_it_is_under_way() {
    let (lab, id, vm) = copying().await;
    let why = "QEMU has not answered for more than 10 s";
    {
        let mut home = lab.home.inside();
        let report = &mut home.vms.get_mut(&vm).expect("VM").report;
        report.migration.as_mut().expect("it migrates").reason = why.to_owned();
    }
    lab.wait_for_job(&id, "what hinders it", |job| job.migrations[0].error == why).await;
    switch(&lab, &vm);
    let completed = |job: &Job| job.migrations[0].state == MigrationState::Completed;
    let job = lab.wait_for_job(&id, "at cloud1", completed).await;
    assert_eq!(job.migrations[0].error, "");
}

#[tokio::test]
async fn an_old_move_teaches_with_the_link_it_went_over() {
    let (lab, id, vm) = copying().await;
    switch(&lab, &vm);
    end_at_the_destination(&lab, &id, &vm).await;
    let then = planning::past_moves(&lab.cluster);
    assert_eq!((then[0].rate_bytes_per_s, then.len()), (50 << 20, 1));
    let key = format!("links/{}/{}", lab.cloud.id, lab.home.id);
    let faster = |link: Option<Link>| {
        let mut link = link.expect("it was measured");
        link.probe = LinkProbe { rtt_ms: 1.0, rate_bytes_per_s: 1 << 30 };
        link
    };
    lab.cluster.records.update(&key, faster).await.expect("the link of today");
    let now = planning::past_moves(&lab.cluster);
    assert_eq!((now[0].rate_bytes_per_s, now[0].rtt_ms), (50 << 20, then[0].rtt_ms));
}

/// The drivers look again only after an hour: what ends a migration is told to them.
#[tokio::test]
async fn the_end_of_a_migration_is_heard_when_it_comes_and_not_at_the_next_look() {
    let (mut lab, id, vm) = copying().await;
    lab.supervisor.stop().await;
    let hour = std::time::Duration::from_secs(3600);
    lab.start_controller(Timing { poll: hour, ..TIMING }).await;
    switch(&lab, &vm);
    let completed = |job: &Job| job.migrations[0].state == MigrationState::Completed;
    lab.wait_for_job(&id, "at the destination", completed).await;
}

#[tokio::test]
async fn a_silent_source_leaves_a_migration_open_until_it_is_back() {
    let (lab, id, vm) = copying().await;
    lab.home.inside().down = true;
    lab.wait_for_job(&id, "waiting", |job| job.reason.contains("unreachable")).await;
    assert_eq!(lab.job(&id).await.migrations[0].state, MigrationState::Copying);
    lab.home.inside().down = false;
    switch(&lab, &vm);
    end_at_the_destination(&lab, &id, &vm).await;
}

#[tokio::test]
async fn a_cancel_in_the_middle_of_a_migration_takes_both_vms_down() {
    let (lab, id, _) = copying().await;
    jobs::intend(&lab.cluster, &id, |intent| intent.cancel = true).await.expect("cancel");
    let job = lab.wait_for_state(&id, JobState::Cancelled).await;
    assert_eq!(job.migrations[0].state, MigrationState::Aborted);
    lab.wait_for_clean_hosts().await;
}

#[tokio::test]
async fn a_vm_moves_only_once_at_a_time_and_only_elsewhere() {
    let (lab, id, vm) = copying().await;
    for to in [&lab.cloud.id, &lab.home.id] {
        let again = vms::move_to(&lab.cluster, &vm, to.clone(), Default::default())
            .await
            .expect_err("refused");
        assert_eq!(again.kind, ProblemKind::Conflict);
    }
    assert_eq!(lab.job(&id).await.migrations.len(), 1);
}

/// The job learns that its VM has arrived only when the source has given its last words.
#[tokio::test]
async fn what_an_arrived_vm_needs_is_not_detached_before_its_job_knows() {
    let (mut lab, id, vm) = copying().await;
    lab.supervisor.stop().await;
    switch(&lab, &vm);
    lab.home.inside().down = true;
    let patient = Timing { host_deadline: std::time::Duration::from_secs(3600), ..TIMING };
    lab.start_controller(patient).await;
    let arrived = |job: &Job| job.migrations[0].state == MigrationState::Completed;
    let job = lab.wait_for_job(&id, "at the destination", arrived).await;
    assert_eq!(job.host.as_ref(), Some(&lab.home.id));
    let used = hosts::memory_used(&lab.cluster);
    assert_eq!(used.get(&lab.cloud.id), Some(&job.spec.memory_bytes));

    let disks = jobs::record(&lab.cluster, &id).await.expect("job").placement.expect("disks").disks;
    let other = JobId::new("other-0001").expect("name");
    let cleanup = Cleanup::of_host(&other, "end", VmStart::default(), &lab.cloud.id, &disks);
    cleaner::hand_over(&lab.cluster, &cleanup).await.expect("hand over");
    cleaner::try_now(&lab.cluster, &other).await.expect("clean");
    assert!(!cleaner::is_pending(&lab.cluster, &other, &lab.cloud.id).await.expect("pending"));
    assert_eq!(lab.cloud.inside().attachments.len(), 3);

    lab.home.inside().down = false;
    end_at_the_destination(&lab, &id, &vm).await;
}

#[tokio::test]
async fn a_vm_does_not_move_back_to_what_it_left_and_is_not_removed_yet() {
    let lab = Lab::up().await;
    let (id, _) = running(&lab).await;
    let mut record = jobs::record(&lab.cluster, &id).await.expect("job");
    record.left = Some(lab.cloud.id.clone());
    let request = migration::Request {
        to: lab.cloud.id.clone(),
        reason: "back".into(),
        job_progress: None,
        volumes: Default::default(),
    };
    let refused = migration::request(&lab.cluster, &record, request).await.expect_err("refused");
    assert!(refused.why.contains("not removed yet"), "{refused}");
    assert!(lab.job(&id).await.migrations.is_empty());
}

#[tokio::test]
async fn a_host_is_not_forgotten_while_a_vm_is_on_its_way_there() {
    let lab = Lab::up().await;
    let third = FakeHost::start("cloud2", "cloud").await;
    let register = hosts::register(&lab.cluster, &third.id, third.addresses.clone());
    register.await.expect("register");
    let (_, vm) = running(&lab).await;
    vms::move_to(&lab.cluster, &vm, third.id.clone(), Default::default()).await.expect("move");
    wait_for("the source to be asked", async || {
        lab.home.inside().vms[&vm].asked.is_some().then_some(())
    })
    .await;
    third.inside().down = true;
    wait_for("cloud2 to be unreachable", async || {
        let host = hosts::info(&lab.cluster, &third.id).await.expect("host");
        (host.state == HostState::Unreachable).then_some(())
    })
    .await;
    let kept = hosts::remove(&lab.cluster, &third.id, false).await.expect_err("a VM may be there");
    assert!(kept.why.contains("q-0001-m1"), "{kept}");
}

/// As when a client hangs up: its request is dropped while the store writes.
#[tokio::test]
async fn a_move_whose_request_is_dropped_has_a_driver() {
    let lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    let record = jobs::record(&lab.cluster, &id).await.expect("job");
    let request = migration::Request {
        to: lab.cloud.id.clone(),
        reason: "asked".into(),
        job_progress: None,
        volumes: Default::default(),
    };
    let mut request = Box::pin(migration::request(&lab.cluster, &record, request));
    while futures_util::FutureExt::now_or_never(request.as_mut()).is_none()
        && !lab.cluster.index.is_move_being_recorded(&vm)
    {
        tokio::task::yield_now().await;
    }
    drop(request);
    wait_for("the source to be asked", async || {
        lab.home.inside().vms[&vm].asked.is_some().then_some(())
    })
    .await;
    switch(&lab, &vm);
    end_at_the_destination(&lab, &id, &vm).await;
}

#[tokio::test]
async fn a_migration_without_a_driver_keeps_no_job_from_its_end() {
    let lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    let request = migration::Request {
        to: lab.cloud.id.clone(),
        reason: "asked".into(),
        job_progress: None,
        volumes: Default::default(),
    };
    let start = VmStart::default().by_migration(1);
    let unknown = Err(Refused::HostNotUp(lab.cloud.id.clone()));
    let record = migration::new_record(&vm, start, lab.home.id.clone(), request, None, unknown)
        .expect("record");
    let key = crate::records::migration_key(&vm, 1);
    assert!(lab.cluster.records.create(&key, &record).await.expect("create"));
    jobs::intend(&lab.cluster, &id, |intent| intent.cancel = true).await.expect("cancel");
    lab.wait_for_state(&id, JobState::Cancelled).await;
    lab.wait_for_clean_hosts().await;
}

/// Two jobs at `home1`, each with a VM that runs.
async fn two_running() -> (Lab, [(JobId, VmId); 2]) {
    let lab = Lab::up().await;
    let mut both = Vec::new();
    for _ in 0..2 {
        let small = JobSpec { memory_bytes: 64 << 20, ..spec(Access::Read) };
        let (id, vm) = running_as(&lab, small).await;
        both.push((id, vm));
    }
    (lab, both.try_into().expect("two"))
}

async fn wait_for_order(lab: &Lab, vm: &VmId) -> perigee_model::vm::MigrateOut {
    let asked = async || lab.home.inside().vms[vm].asked.clone();
    wait_for("the source to be asked", asked).await
}

#[tokio::test]
async fn vms_move_one_after_another_over_one_link() {
    let (lab, [(first_id, first), (second_id, second)]) = two_running().await;
    for vm in [&first, &second] {
        vms::move_to(&lab.cluster, vm, lab.cloud.id.clone(), Default::default())
            .await
            .expect("move");
    }
    wait_for_order(&lab, &first).await;
    let waits = |job: &Job| job.migrations[0].moves_ahead == 1;
    let job = lab.wait_for_job(&second_id, "waiting for the link", waits).await;
    assert_eq!(job.migrations[0].state, MigrationState::Preparing);
    assert!(!lab.cloud.inside().vms.contains_key(&second), "nothing is prepared for it yet");
    switch(&lab, &first);
    let arrived = |job: &Job| job.migrations[0].state == MigrationState::Completed;
    lab.wait_for_job(&first_id, "the first one at cloud1", arrived).await;
    wait_for_order(&lab, &second).await;
    switch(&lab, &second);
    let job = lab.wait_for_job(&second_id, "the second one at cloud1", arrived).await;
    assert_eq!(job.migrations[0].moves_ahead, 0);
}

/// The drivers of both begin again at once, and that of the waiting one may be the first.
#[tokio::test]
async fn a_migration_that_waits_does_not_begin_beside_one_under_way_after_a_restart() {
    let (mut lab, [(first_id, first), (_, second)]) = two_running().await;
    for vm in [&second, &first] {
        vms::move_to(&lab.cluster, vm, lab.cloud.id.clone(), Default::default())
            .await
            .expect("move");
    }
    wait_for_order(&lab, &second).await;
    let waits = |job: &Job| job.migrations[0].moves_ahead == 1;
    lab.wait_for_job(&first_id, "waiting for the link", waits).await;
    lab.restart_controller().await;
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    lab.wait_for_job(&first_id, "still waiting for the link", waits).await;
    assert!(lab.home.inside().vms[&first].asked.is_none());
    switch(&lab, &second);
    wait_for_order(&lab, &first).await;
    switch(&lab, &first);
    let arrived = |job: &Job| job.migrations[0].state == MigrationState::Completed;
    let job = lab.wait_for_job(&first_id, "at cloud1", arrived).await;
    assert!(job.migrations[0].waited_ms > 0);
}

#[tokio::test]
async fn a_migration_tells_its_time_left_with_the_wait_for_others() {
    let (lab, [(_, first), (second_id, second)]) = two_running().await;
    links::probe_all(&lab.cluster).await.expect("probe");
    for vm in [&first, &second] {
        vms::move_to(&lab.cluster, vm, lab.cloud.id.clone(), Default::default())
            .await
            .expect("move");
    }
    wait_for_order(&lab, &first).await;
    let waits = |job: &Job| job.migrations[0].moves_ahead == 1;
    let job = lab.wait_for_job(&second_id, "waiting for the link", waits).await;
    assert!(job.migrations[0].left_ms.is_some(), "the job tells it too");
    let of = async |vm| migration::of_vm(&lab.cluster, vm).await.expect("moves").remove(0);
    let waiting = of(&second).await;
    assert!(waiting.predicted_wait_ms.is_some() && !waiting.mode_reason.is_empty());
    assert!(waiting.left_ms >= waiting.predicted_total_ms);
    switch(&lab, &first);
    wait_for_order(&lab, &second).await;
    assert!(of(&second).await.left_ms <= waiting.predicted_total_ms);
    assert_eq!(of(&first).await.left_ms, None);
}

#[tokio::test]
async fn a_migration_that_is_cancelled_while_it_waits_leaves_the_link_to_the_next() {
    let (lab, [(_, first), (second_id, second)]) = two_running().await;
    for vm in [&first, &second] {
        vms::move_to(&lab.cluster, vm, lab.cloud.id.clone(), Default::default())
            .await
            .expect("move");
    }
    wait_for_order(&lab, &first).await;
    migration::cancel(&lab.cluster, &second).await.expect("cancel");
    let aborted = |job: &Job| job.migrations[0].state == MigrationState::Aborted;
    lab.wait_for_job(&second_id, "not moved", aborted).await;
    assert!(lab.home.inside().vms[&second].asked.is_none());
}

/// The link of the test double has 50 MiB/s, and the other VM reads over it.
#[tokio::test]
async fn a_migration_leaves_a_part_of_the_link_to_vms_that_read_over_it() {
    let (lab, [(_, first), _]) = two_running().await;
    links::probe_all(&lab.cluster).await.expect("probe");
    vms::move_to(&lab.cluster, &first, lab.cloud.id.clone(), Default::default())
        .await
        .expect("move");
    let order = wait_for_order(&lab, &first).await;
    assert_eq!((order.max_bytes_per_s, order.compressed), (Some((50 << 20) / 100 * 80), false));

    let (lab, _, vm) = copying().await;
    assert_eq!(wait_for_order(&lab, &vm).await.max_bytes_per_s, None, "no other VM uses the link");
}

/// The first move of a VM over a link of 50 MiB/s, of which it gets 40. Earlier runs of its job changed so much memory.
async fn first_move(dirty_bytes_per_s: u64) -> Migration {
    let (lab, [(_, vm), _]) = two_running().await;
    links::probe_all(&lab.cluster).await.expect("probe");
    let history = History { dirty_bytes_per_s: Some(dirty_bytes_per_s), ..History::default() };
    let key = planning::history_key(&spec(Access::Read));
    lab.cluster.history_cache.set_history(&key, std::sync::Arc::new(history));
    let to = lab.cloud.id.clone();
    vms::move_to(&lab.cluster, &vm, to, Default::default()).await.expect("move")
}

#[tokio::test]
async fn the_first_move_of_a_vm_is_sent_as_the_history_of_its_job_says() {
    let moved = first_move(45 << 20).await;
    assert!(moved.throttle_percent.is_some(), "{}", moved.mode_reason);
    assert!(moved.mode_reason.contains("changes 45 MiB/s of its memory"), "{}", moved.mode_reason);
}

#[tokio::test]
async fn a_move_that_would_not_end_is_slowed_down_and_compressed_and_says_why() {
    let moved = first_move(1 << 40).await;
    assert_eq!((moved.compressed, moved.throttle_percent), (true, Some(99)));
    assert!(moved.mode_reason.contains("would not end"), "{}", moved.mode_reason);
}

/// A job does not act on its dead VM while the VM moves, but this one only waits.
#[tokio::test]
async fn a_vm_that_ends_while_its_migration_waits_for_the_link_ends_its_job() {
    let (lab, [(_, first), (second_id, second)]) = two_running().await;
    for vm in [&first, &second] {
        vms::move_to(&lab.cluster, vm, lab.cloud.id.clone(), Default::default())
            .await
            .expect("move");
    }
    wait_for_order(&lab, &first).await;
    let waits = |job: &Job| job.migrations[0].moves_ahead == 1;
    lab.wait_for_job(&second_id, "waiting for the link", waits).await;
    lab.home.inside().vms.get_mut(&second).expect("VM").report.status = VmStatus::Gone;
    let job = lab.wait_for_state(&second_id, JobState::Failed).await;
    assert_eq!(job.migrations[0].state, MigrationState::Aborted);
}

#[tokio::test]
async fn a_migration_whose_source_is_silent_leaves_the_link_to_the_next() {
    let (lab, _, _) = copying_of(spec(Access::Read)).await;
    let third = FakeHost::start("home2", "home").await;
    hosts::register(&lab.cluster, &third.id, third.addresses.clone()).await.expect("register");
    let elsewhere = JobSpec {
        memory_bytes: 64 << 20,
        start: Start::Host(third.id.clone()),
        ..spec(Access::Read)
    };
    let id = lab.submit(elsewhere).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&third, &vm).await;
    third.say(&vm, GuestBody::Started);
    lab.wait_for_state(&id, JobState::Running).await;
    lab.home.inside().down = true;
    vms::move_to(&lab.cluster, &vm, lab.cloud.id.clone(), Default::default()).await.expect("move");
    wait_for("the second source to be asked", async || third.inside().vms[&vm].asked.clone()).await;
}

#[tokio::test]
async fn a_link_is_measured_although_what_has_the_most_data_may_not_be_read() {
    let lab = Lab::up().await;
    lab.home.inside().reads_no_images = true;
    for (host, other) in [(&lab.home, &lab.cloud), (&lab.cloud, &lab.home)] {
        let hosts = [other.id.clone()].into();
        host.inside().admissions.insert(data_volume(), hosts);
    }
    links::probe_all(&lab.cluster).await.expect("probe");
    let link = lab.cluster.links.get(&lab.home.id, &lab.cloud.id).expect("a link");
    assert!(link.blocks.is_some(), "the data volume is there too: {link:?}");
}
