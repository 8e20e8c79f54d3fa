//! Hosts that are drained.

use perigee_model::drain::{DrainFate, DrainHost, DrainStep, DrainedKind, HostDrain};
use perigee_model::guest::GuestBody;
use perigee_model::job::{
    Access, HostState, Job, JobSpec, JobState, MigrationState, NewVolume, Start,
};
use perigee_model::lease::HostNotice;
use perigee_model::persistent_vm::{NewVm, PowerRequest, VmState};
use perigee_model::plan::Trigger;
use perigee_model::vm::{MigrationPhase, VmStatus};
use perigee_model::volume::VolumeSource;
use perigee_model::volume_move::{VolumeMoveCause, VolumeMoveState, VolumesOnMove};
use perigee_model::{HostId, JobId, LeaveSite, ProblemKind, VmId, VolumeName};

use super::fake::FakeHost;
use super::gone::second_home;
use super::migrations::switch;
use super::persistent_vms::{new_vm, web};
use super::{Lab, data_volume, finish, running_as, spec, vm_of, wait_for};
use crate::records::volume_key;
use crate::storage::{moves, volumes};
use crate::{drain, hosts, jobs, migration, planning, vms};

const POOL_BYTES: u64 = 1 << 40;

/// What can take volumes.
async fn lab() -> Lab {
    let lab = Lab::up().await;
    for host in [&lab.home, &lab.cloud] {
        host.inside().pool_free_bytes = Some(POOL_BYTES);
    }
    lab
}

/// A job at `home1` that moves by itself only when it has to.
fn movable() -> JobSpec {
    JobSpec { may_migrate: true, ..spec(Access::Write) }
}

async fn ask(lab: &Lab, host: &FakeHost, dry_run: bool) -> HostDrain {
    let by = "ann".to_owned();
    drain::drain(&lab.cluster, &host.id, by, DrainHost { dry_run }).await.expect("a drain")
}

async fn shown(lab: &Lab, host: &FakeHost) -> Option<HostDrain> {
    hosts::info(&lab.cluster, &host.id).await.expect("the host").drain
}

/// What is left, as soon as that is so.
async fn left(
    lab: &Lab,
    host: &FakeHost,
    what: &str,
    is: impl Fn(&[DrainStep]) -> bool,
) -> Vec<DrainStep> {
    let begun = tokio::time::Instant::now();
    loop {
        let left = shown(lab, host).await.expect("it is drained").left;
        if let Some(left) = left.clone().filter(|left| is(left)) {
            return left;
        }
        assert!(begun.elapsed() < super::PATIENCE, "waited for {what}: {left:?}");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

fn step<'a>(left: &'a [DrainStep], name: &str) -> &'a DrainStep {
    left.iter().find(|step| step.name == name).unwrap_or_else(|| panic!("{name} in {left:?}"))
}

pub async fn source_is_asked(host: &FakeHost, vm: &VmId) {
    wait_for("the source to be asked", async || {
        host.inside().vms[vm].asked.is_some().then_some(())
    })
    .await;
}

pub async fn unreachable(lab: &Lab, host: &FakeHost) {
    host.inside().down = true;
    wait_for("the host to be unreachable", async || {
        (lab.cluster.hosts.state(&host.id) == HostState::Unreachable).then_some(())
    })
    .await;
}

fn at_cloud(lab: &Lab) -> impl Fn(&Job) -> bool {
    let cloud = lab.cloud.id.clone();
    move |job| job.host.as_ref() == Some(&cloud)
}

#[tokio::test]
async fn a_host_that_its_provider_takes_back_is_drained_at_once() {
    let lab = lab().await;
    let (id, vm) = running_as(&lab, movable()).await;
    assert_eq!(shown(&lab, &lab.home).await, None);
    let notice = HostNotice { action: "terminate".to_owned(), ends_unix_s: 1_795_986_120 };
    lab.home.inside().notice = Some(notice.clone());
    source_is_asked(&lab.home, &vm).await;
    let asked = shown(&lab, &lab.home).await.expect("it is drained").asked.expect("asked for");
    assert_eq!(asked.by, "its provider's notice (terminate at 2026-11-29 21:02:00 UTC)");
    let host = hosts::info(&lab.cluster, &lab.home.id).await.expect("the host");
    assert_eq!(host.notice, Some(notice));
    switch(&lab, &vm);
    lab.wait_for_job(&id, "at cloud1", at_cloud(&lab)).await;
    left(&lab, &lab.home, "nothing to be left", <[DrainStep]>::is_empty).await;
    assert_eq!(shown(&lab, &lab.cloud).await, None, "the other one stays");
    // As long as the notice stands nobody brings the host back, and after that a person does.
    let is_asked = async |lab: &Lab| shown(lab, &lab.home).await.is_some().then_some(());
    drain::undrain(&lab.cluster, &lab.home.id).await.expect("called off");
    wait_for("the drain to begin again", async || is_asked(&lab).await).await;
    lab.home.inside().notice = None;
    wait_for("the notice to be over", async || {
        let host = hosts::info(&lab.cluster, &lab.home.id).await.expect("the host");
        host.notice.is_none().then_some(())
    })
    .await;
    assert!(is_asked(&lab).await.is_some(), "that was not called off");
    drain::undrain(&lab.cluster, &lab.home.id).await.expect("called off");
    assert_eq!(shown(&lab, &lab.home).await, None);
}

/// A job's VM that somebody moves to `cloud1`, while its memory is copied.
async fn moving(lab: &Lab) -> (JobId, VmId) {
    let (id, vm) = running_as(lab, movable()).await;
    vms::move_to(&lab.cluster, &vm, lab.cloud.id.clone(), Default::default()).await.expect("move");
    source_is_asked(&lab.home, &vm).await;
    (id, vm)
}

/// The provider takes the host back.
async fn is_taken_back(lab: &Lab, host: &FakeHost) {
    let action = "terminate".to_owned();
    host.inside().notice = Some(HostNotice { action, ends_unix_s: 1_795_986_120 });
    wait_for("the drain", async || shown(lab, host).await.map(drop)).await;
}

#[tokio::test]
async fn a_notice_during_a_move_away_lets_the_move_go_on_and_begins_no_second_one() {
    let lab = lab().await;
    let (id, vm) = moving(&lab).await;
    is_taken_back(&lab, &lab.home).await;
    switch(&lab, &vm);
    lab.wait_for_job(&id, "at cloud1", at_cloud(&lab)).await;
    left(&lab, &lab.home, "nothing to be left", <[DrainStep]>::is_empty).await;
    let job = lab.job(&id).await;
    assert_eq!((job.state, job.migrations.len()), (JobState::Running, 1), "{job:?}");
    assert_eq!(job.migrations[0].state, MigrationState::Completed);
}

#[tokio::test]
async fn a_notice_of_the_host_to_which_a_vm_moves_ends_no_job_and_the_vm_leaves_again() {
    let lab = lab().await;
    let (id, vm) = moving(&lab).await;
    is_taken_back(&lab, &lab.cloud).await;
    switch(&lab, &vm);
    lab.wait_for_job(&id, "at cloud1", at_cloud(&lab)).await;
    // Its time has come to leave that host too.
    source_is_asked(&lab.cloud, &vm).await;
    let job = lab.job(&id).await;
    assert_eq!((job.state, job.migrations.len()), (JobState::Running, 2), "{job:?}");
    let back = &job.migrations[1];
    assert_eq!((&back.from, &back.to), (&lab.cloud.id, &lab.home.id), "{back:?}");
}

/// `home1` is left by its VM before it goes down.
async fn shuts_down() -> (Lab, VmId) {
    let lab = lab().await;
    let (_, vm) = running_as(&lab, movable()).await;
    drain::shuts_down(&lab.cluster, &lab.home.id).await.expect("it shuts down");
    source_is_asked(&lab.home, &vm).await;
    (lab, vm)
}

#[tokio::test]
async fn a_host_that_shuts_down_is_left_and_is_used_again_when_it_has_booted() {
    let (lab, vm) = shuts_down().await;
    switch(&lab, &vm);
    left(&lab, &lab.home, "nothing to be left", <[DrainStep]>::is_empty).await;
    lab.home.reboot(true);
    wait_for("the drain's end", async || shown(&lab, &lab.home).await.is_none().then_some(()))
        .await;
}

#[tokio::test]
async fn a_drain_that_a_person_has_asked_for_outlives_a_shutdown() {
    let lab = lab().await;
    ask(&lab, &lab.home, false).await;
    drain::shuts_down(&lab.cluster, &lab.home.id).await.expect("it shuts down");
    assert_eq!(lab.cluster.hosts.drain(&lab.home.id).expect("drained").boot_id, None);
}

#[tokio::test]
async fn a_drain_that_a_person_asks_for_during_a_shutdown_outlives_it() {
    let (lab, _) = shuts_down().await;
    ask(&lab, &lab.home, true).await;
    assert!(lab.cluster.hosts.drain(&lab.home.id).expect("drained").boot_id.is_some());
    ask(&lab, &lab.home, false).await;
    let now = lab.cluster.hosts.drain(&lab.home.id).expect("drained");
    assert_eq!((now.by.as_str(), now.boot_id), ("ann", None));
}

#[tokio::test]
async fn a_drained_host_is_left_by_its_vm_and_then_by_its_volumes_and_can_be_removed() {
    let lab = lab().await;
    let (id, vm) = running_as(&lab, movable()).await;
    ask(&lab, &lab.home, false).await;
    source_is_asked(&lab.home, &vm).await;
    let moving = left(&lab, &lab.home, "the VM to move", |left| {
        left.first().is_some_and(|first| first.fate == DrainFate::Moving)
    })
    .await;
    let root = format!("{vm}-root");
    assert_eq!(step(&moving, vm.as_str()).to, std::slice::from_ref(&lab.cloud.id));
    assert_eq!(step(&moving, &root).why, format!("it comes after VM {vm}, which uses it"));
    switch(&lab, &vm);
    let job = lab.wait_for_job(&id, "at cloud1", at_cloud(&lab)).await;
    assert_eq!(job.migrations[0].reason, "host home1 is drained");
    left(&lab, &lab.home, "nothing to be left", <[DrainStep]>::is_empty).await;
    assert_eq!(shown(&lab, &lab.home).await.expect("drained").in_words(), "drained");
    for part in ["root", "seed", "out"] {
        let name = VolumeName::new(format!("{vm}-{part}")).expect("a name");
        assert!(lab.cloud.inside().volumes.contains_key(&name), "{part}");
        assert!(!lab.home.inside().volumes.contains_key(&name), "{part}");
    }
    let decisions = planning::decisions(&lab.cluster, &id).await.expect("decisions");
    let last = decisions.last().expect("a decision");
    assert_eq!(last.trigger, Trigger::Drained, "{last:?}");
    finish(&lab.cloud, &lab.cloud, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    lab.wait_for_clean_hosts().await;
    unreachable(&lab, &lab.home).await;
    hosts::remove(&lab.cluster, &lab.home.id, false).await.expect("nothing is lost with it");
}

#[tokio::test]
async fn a_dry_run_says_what_would_leave_and_begins_nothing() {
    let lab = lab().await;
    let (id, vm) = running_as(&lab, movable()).await;
    let said = wait_for("the links to be measured", async || {
        let said = ask(&lab, &lab.home, true).await;
        let left = said.left.clone().expect("it has looked");
        (step(&left, vm.as_str()).fate == DrainFate::Moves).then_some(said)
    })
    .await;
    assert_eq!(said.asked, None);
    assert!(said.keeps.contains(&"a copy of image debian".to_owned()), "{:?}", said.keeps);
    let left = said.left.expect("it has looked");
    let first = step(&left, vm.as_str());
    assert_eq!(
        (first.kind, first.to.as_slice()),
        (DrainedKind::Vm, std::slice::from_ref(&lab.cloud.id))
    );
    assert!(first.takes_s.is_some_and(|s| s > 0.0) && first.bytes.is_some_and(|bytes| bytes > 0));
    assert_eq!(shown(&lab, &lab.home).await, None);
    assert!(lab.job(&id).await.migrations.is_empty());
}

#[tokio::test]
async fn a_job_that_could_only_start_at_a_drained_host_says_so_and_starts_when_that_is_called_off()
{
    let lab = lab().await;
    ask(&lab, &lab.home, false).await;
    let id = lab.submit(movable()).await;
    let why = "host home1 is drained: perigee host undrain home1";
    lab.wait_for_job(&id, "its reason", |job| job.reason.contains(why)).await;
    let elsewhere =
        lab.submit(JobSpec { start: Start::Anywhere, volumes: Vec::new(), ..movable() }).await;
    lab.wait_for_vm(&lab.cloud, &vm_of(&elsewhere)).await;
    drain::undrain(&lab.cluster, &lab.home.id).await.expect("called off");
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
}

#[tokio::test]
async fn no_volume_and_no_vm_comes_to_a_drained_host() {
    let lab = lab().await;
    let (_, vm) = running_as(&lab, movable()).await;
    ask(&lab, &lab.cloud, false).await;
    let moved = vms::move_to(&lab.cluster, &vm, lab.cloud.id.clone(), Default::default()).await;
    assert!(moved.expect_err("it is drained").next.contains("perigee host undrain cloud1"));
    let new = |name: &str, host: Option<HostId>| NewVolume {
        name: VolumeName::new(name).expect("a name"),
        host,
        size_bytes: Some(1 << 30),
        source: VolumeSource::Empty,
        leave_site: LeaveSite::Allowed,
    };
    let named = volumes::create(&lab.cluster, new("one", Some(lab.cloud.id.clone()))).await;
    assert_eq!(named.expect_err("it is drained").kind, ProblemKind::Conflict);
    let made = volumes::create(&lab.cluster, new("two", None)).await.expect("made elsewhere");
    assert_eq!(made.home, lab.home.id);
    let cause = VolumeMoveCause::Asked;
    let moved = moves::request(&lab.cluster, &made.name, &lab.cloud.id, cause).await;
    assert_eq!(moved.expect_err("it is drained").kind, ProblemKind::Conflict);
}

/// The volume's move is on its way when the controller ends, and when the drain is called off.
#[tokio::test]
async fn a_drain_goes_on_after_a_restart_of_the_controller_and_can_be_called_off() {
    let mut lab = lab().await;
    lab.home.inside().moves.stands_still = true;
    ask(&lab, &lab.cloud, false).await;
    let moving = |left: &[DrainStep]| left.iter().any(|step| step.fate == DrainFate::Moving);
    left(&lab, &lab.cloud, "the volume to move", moving).await;
    lab.restart_controller().await;
    let drained = shown(&lab, &lab.cloud).await.expect("it is drained still");
    assert_eq!(drained.asked.expect("it was asked for").by, "ann");
    left(&lab, &lab.cloud, "the volume to move still", moving).await;
    drain::undrain(&lab.cluster, &lab.cloud.id).await.expect("called off");
    wait_for("the move to be called off", async || {
        let last = moves::of_volume(&lab.cluster, &data_volume()).await.expect("a move");
        (last.state == VolumeMoveState::CalledOff).then_some(())
    })
    .await;
    assert_eq!(shown(&lab, &lab.cloud).await, None);
    assert!(lab.cloud.inside().volumes.contains_key(&data_volume()));
    lab.restart_controller().await;
    assert_eq!(shown(&lab, &lab.cloud).await, None, "also after a restart");
}

#[tokio::test]
async fn a_restart_in_the_middle_of_a_vm_s_move_moves_it_once() {
    let mut lab = lab().await;
    let (id, vm) = running_as(&lab, movable()).await;
    ask(&lab, &lab.home, false).await;
    source_is_asked(&lab.home, &vm).await;
    lab.restart_controller().await;
    switch(&lab, &vm);
    let job = lab.wait_for_job(&id, "at cloud1", at_cloud(&lab)).await;
    left(&lab, &lab.home, "nothing to be left", <[DrainStep]>::is_empty).await;
    assert_eq!(job.migrations.len(), 1, "{:?}", job.migrations);
}

/// After a move that failed the job runs, and its VM moves when the pause is over.
async fn leaves_at_the_next_try(lab: &Lab, id: &JobId, vm: &VmId) {
    lab.cluster.clock.pretend_passed(std::time::Duration::from_secs(60));
    lab.wait_for_job(id, "another try", |job| {
        job.migrations.get(1).is_some_and(|moved| moved.state == MigrationState::Copying)
    })
    .await;
    switch(lab, vm);
    lab.wait_for_job(id, "at cloud1", at_cloud(lab)).await;
}

#[tokio::test]
async fn a_move_that_fails_ends_no_job_and_is_named_until_it_is_tried_again() {
    let lab = lab().await;
    let (id, vm) = running_as(&lab, movable()).await;
    ask(&lab, &lab.home, false).await;
    source_is_asked(&lab.home, &vm).await;
    lab.home.set_phase(&vm, MigrationPhase::Failed, VmStatus::Running);
    let named = left(&lab, &lab.home, "the failure", |left| {
        left.iter().any(|step| step.why.contains("was aborted"))
    })
    .await;
    let of_vm = step(&named, vm.as_str());
    assert_eq!(of_vm.fate, DrainFate::Waits, "{of_vm:?}");
    let job = lab.job(&id).await;
    assert_eq!((job.state, job.migrations.len()), (JobState::Running, 1), "{}", job.reason);
    leaves_at_the_next_try(&lab, &id, &vm).await;
}

#[tokio::test]
async fn a_target_that_dies_during_the_move_ends_no_job_and_is_named_until_it_is_back() {
    let lab = lab().await;
    let (id, vm) = running_as(&lab, movable()).await;
    ask(&lab, &lab.home, false).await;
    source_is_asked(&lab.home, &vm).await;
    lab.cloud.inside().down = true;
    lab.home.set_phase(&vm, MigrationPhase::Failed, VmStatus::Running);
    let named = left(&lab, &lab.home, "the target's silence", |left| {
        left.iter().any(|step| step.name == vm.as_str() && step.why.contains("does not answer"))
    })
    .await;
    assert_eq!(step(&named, vm.as_str()).fate, DrainFate::Stays, "{named:?}");
    let job = lab.job(&id).await;
    assert_eq!((job.state, job.migrations.len()), (JobState::Running, 1), "{}", job.reason);
    lab.cloud.inside().down = false;
    leaves_at_the_next_try(&lab, &id, &vm).await;
}

#[tokio::test]
async fn what_was_asked_to_move_and_waits_for_its_turn_stays_when_the_drain_is_called_off() {
    let lab = lab().await;
    let (id, vm) = running_as(&lab, movable()).await;
    wait_for("the links to be measured", async || {
        let left = ask(&lab, &lab.home, true).await.left.expect("it has looked");
        (step(&left, vm.as_str()).fate == DrainFate::Moves).then_some(())
    })
    .await;
    // Its destination's QEMU is never ready.
    lab.cloud.inside().loses_answers = true;
    ask(&lab, &lab.home, false).await;
    wait_for("a migration", async || (lab.job(&id).await.migrations.len() == 1).then_some(()))
        .await;
    drain::undrain(&lab.cluster, &lab.home.id).await.expect("called off");
    lab.cloud.inside().loses_answers = false;
    let job = lab
        .wait_for_job(&id, "the end of its move", |job| job.migrations[0].state.is_final())
        .await;
    assert_eq!(job.migrations[0].state, MigrationState::Aborted);
    assert_eq!((job.state, job.host.as_ref()), (JobState::Running, Some(&lab.home.id)));
    assert!(lab.home.inside().vms.contains_key(&vm));
}

#[tokio::test]
async fn what_cant_leave_is_named_with_the_reason() {
    let lab = lab().await;
    let (id, vm) = running_as(&lab, spec(Access::Write)).await;
    let secret = VolumeName::new("secret").expect("a name");
    let new = NewVolume {
        name: secret.clone(),
        host: Some(lab.home.id.clone()),
        size_bytes: Some(1 << 30),
        source: VolumeSource::Empty,
        leave_site: LeaveSite::Never,
    };
    volumes::create(&lab.cluster, new).await.expect("create");
    lab.home.inside().volumes.get_mut(&secret).expect("it").info.leave_site = LeaveSite::Never;
    ask(&lab, &lab.home, false).await;
    let named = left(&lab, &lab.home, "the volume", |left| {
        left.iter().any(|step| step.name == "secret" && step.fate == DrainFate::Stays)
    })
    .await;
    let why = &step(&named, "secret").why;
    assert!(why.contains("cloud1: another site, and its policy is leave-site: never"), "{why}");
    let why = &step(&named, vm.as_str()).why;
    assert!(why.starts_with("its file says move: never"), "{why}");
    assert!(lab.job(&id).await.migrations.is_empty());
    // A host of the same site takes it.
    let second = second_home(&lab).await;
    second.inside().pool_free_bytes = Some(POOL_BYTES);
    wait_for("the volume at home2", async || {
        second.inside().volumes.contains_key(&secret).then_some(())
    })
    .await;
    // The job ends there, and then nothing is left.
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    left(&lab, &lab.home, "nothing to be left", <[DrainStep]>::is_empty).await;
}

#[tokio::test]
async fn the_drain_of_all_hosts_names_everything_and_moves_nothing() {
    let lab = lab().await;
    let (id, vm) = running_as(&lab, JobSpec { volumes: Vec::new(), ..movable() }).await;
    // What the first one sends there does not arrive.
    lab.home.inside().moves.stands_still = true;
    for host in [&lab.cloud, &lab.home] {
        ask(&lab, host, false).await;
    }
    let named = left(&lab, &lab.home, "all to stay", |left| {
        left.iter().all(|step| step.fate == DrainFate::Stays)
    })
    .await;
    assert_eq!(step(&named, vm.as_str()).why, "cloud1: it is drained too");
    assert!(shown(&lab, &lab.home).await.expect("it is drained").is_stuck());
    assert!(lab.job(&id).await.migrations.is_empty());
}

#[tokio::test]
async fn a_host_that_is_away_is_named_and_its_drain_goes_on_when_it_is_back() {
    let lab = lab().await;
    let (id, vm) = running_as(&lab, movable()).await;
    unreachable(&lab, &lab.home).await;
    ask(&lab, &lab.home, false).await;
    let named = left(&lab, &lab.home, "the reason", |left| !left.is_empty()).await;
    let why = &step(&named, vm.as_str()).why;
    assert!(
        why.starts_with("it goes on when the host is back: host home1 has not answered"),
        "{why}"
    );
    lab.home.inside().down = false;
    source_is_asked(&lab.home, &vm).await;
    switch(&lab, &vm);
    lab.wait_for_job(&id, "at cloud1", at_cloud(&lab)).await;
}

#[tokio::test]
async fn a_host_is_not_drained_while_a_volume_is_still_copied_from_it() {
    let lab = lab().await;
    lab.home.inside().moves.missing_bytes = 1 << 20;
    ask(&lab, &lab.cloud, false).await;
    wait_for("the volume's new home", async || {
        let shown = volumes::volume(&lab.cluster, &data_volume()).await.expect("volume");
        (shown.home == lab.home.id).then_some(())
    })
    .await;
    let is_moving = |left: &[DrainStep]| {
        left.iter().any(|step| step.fate == DrainFate::Moving && step.to == [lab.home.id.clone()])
    };
    let now = ask(&lab, &lab.cloud, false).await.left.expect("looked at");
    assert!(is_moving(&now), "{now:?}");
    lab.home.inside().moves.missing_bytes = 0;
    left(&lab, &lab.cloud, "the copy to end", <[DrainStep]>::is_empty).await;
}

#[tokio::test]
async fn the_disks_of_a_vm_that_is_off_leave_together() {
    let lab = lab().await;
    lab.make_vm(NewVm { volumes: Vec::new(), ..new_vm("home1") }).await;
    lab.runs().await;
    lab.power(PowerRequest::Stop { force: true }).await;
    lab.vm_is(VmState::Stopped).await;
    ask(&lab, &lab.home, false).await;
    left(&lab, &lab.home, "nothing to be left", <[DrainStep]>::is_empty).await;
    let record = lab.cluster.index.of_vm(&web()).or_else(|| {
        let id = JobId::new(web().as_str()).expect("a name");
        lab.cluster.index.job(&id)
    });
    let disks = record.expect("its record").placement.clone().expect("its disks").disks;
    assert!(disks.iter().all(|disk| disk.home == lab.cloud.id), "{disks:?}");
}

#[tokio::test]
async fn a_vm_without_a_job_leaves_while_it_runs() {
    let lab = lab().await;
    lab.make_vm(NewVm { volumes: Vec::new(), ..new_vm("home1") }).await;
    lab.runs().await;
    ask(&lab, &lab.home, false).await;
    source_is_asked(&lab.home, &web()).await;
    switch(&lab, &web());
    left(&lab, &lab.home, "nothing to be left", <[DrainStep]>::is_empty).await;
    assert!(lab.cloud.inside().vms.contains_key(&web()));
}

#[tokio::test]
async fn a_vm_with_move_never_is_named_and_leaves_when_a_person_says_so() {
    let lab = lab().await;
    lab.make_vm(NewVm { may_migrate: false, volumes: Vec::new(), ..new_vm("home1") }).await;
    lab.runs().await;
    ask(&lab, &lab.home, false).await;
    let named = left(&lab, &lab.home, "the VM", |left| {
        left.iter().any(|step| step.name == "web" && step.fate == DrainFate::Stays)
    })
    .await;
    let why = &step(&named, "web").why;
    assert!(why.contains("perigee vm move web HOST"), "{why}");
    assert!(lab.cluster.index.migrations_of(&web()).is_empty());
    vms::move_to(&lab.cluster, &web(), lab.cloud.id.clone(), VolumesOnMove::Stay)
        .await
        .expect("a person moves it");
    source_is_asked(&lab.home, &web()).await;
    switch(&lab, &web());
    left(&lab, &lab.home, "nothing to be left", <[DrainStep]>::is_empty).await;
}

/// What is kept of earlier runs of its kind can't be read.
#[tokio::test]
async fn a_vm_that_cant_be_looked_at_is_named_and_the_others_leave() {
    let lab = lab().await;
    let broken = JobSpec { name: "broken".into(), memory_bytes: 64 << 20, ..movable() };
    let broken = JobSpec { command: vec!["other".into()], volumes: Vec::new(), ..broken };
    let (_, broken) = running_as(&lab, broken).await;
    let record = lab.cluster.index.of_vm(&broken).expect("its record");
    let key = planning::history_key(&record.job.spec);
    lab.cluster.records.put(&key, &"no history".to_owned()).await.expect("written");
    lab.cluster.history_cache.forget_history(&key);
    let good = JobSpec { memory_bytes: 64 << 20, volumes: Vec::new(), ..movable() };
    let (_, good) = running_as(&lab, good).await;
    ask(&lab, &lab.home, false).await;
    source_is_asked(&lab.home, &good).await;
    let named = left(&lab, &lab.home, "the other one", |left| {
        left.iter().any(|step| step.name == broken.as_str() && step.fate == DrainFate::Waits)
    })
    .await;
    let why = &step(&named, broken.as_str()).why;
    assert!(why.starts_with("it could not be looked at"), "{why}");
}

#[tokio::test]
async fn a_volume_whose_record_cant_be_read_is_named_where_it_may_be_and_the_others_leave() {
    let lab = lab().await;
    let (_, vm) = running_as(&lab, JobSpec { volumes: Vec::new(), ..movable() }).await;
    let odd = VolumeName::new("odd").expect("a name");
    let new = NewVolume {
        name: odd.clone(),
        host: Some(lab.home.id.clone()),
        size_bytes: Some(1 << 30),
        source: VolumeSource::Empty,
        leave_site: LeaveSite::Allowed,
    };
    volumes::create(&lab.cluster, new).await.expect("create");
    lab.cluster.records.put(&volume_key(&odd), &"no volume".to_owned()).await.expect("written");
    ask(&lab, &lab.home, false).await;
    source_is_asked(&lab.home, &vm).await;
    let named = left(&lab, &lab.home, "the volume", |left| {
        left.iter().any(|step| step.name == odd.as_str())
    })
    .await;
    let of_it = step(&named, odd.as_str());
    assert_eq!((of_it.kind, of_it.fate), (DrainedKind::Volume, DrainFate::Waits));
    assert!(of_it.why.starts_with("it could not be looked at"), "{}", of_it.why);
    let elsewhere = ask(&lab, &lab.cloud, true).await.left.expect("it has looked");
    let is_named = elsewhere.iter().any(|step| step.name == odd.as_str());
    assert!(!is_named, "cloud1 says that it has no such volume: {elsewhere:?}");
}

/// What a drain of home1 would do with the VM.
async fn said_of(lab: &Lab, vm: &VmId) -> DrainStep {
    let left = ask(lab, &lab.home, true).await.left.expect("it has looked");
    step(&left, vm.as_str()).clone()
}

async fn planned(lab: &Lab, vm: &VmId) -> DrainStep {
    wait_for("a planned move", async || {
        let said = said_of(lab, vm).await;
        (said.fate == DrainFate::Moves).then_some(said)
    })
    .await
}

#[tokio::test]
async fn a_vm_with_a_disk_that_its_host_does_not_name_waits_and_its_time_is_not_known() {
    let lab = lab().await;
    let (_, vm) = running_as(&lab, JobSpec { volumes: Vec::new(), ..movable() }).await;
    let record = lab.cluster.index.of_vm(&vm).expect("its record");
    let disks = record.placement.as_ref().expect("it is placed").disks.iter();
    let disk = disks.map(|disk| disk.volume.clone()).next().expect("its disk");
    assert!(planned(&lab, &vm).await.takes_s.is_some());
    let volume = lab.home.inside().volumes.remove(&disk).expect("its volume");
    let of_vm = said_of(&lab, &vm).await;
    assert_eq!((of_vm.fate, of_vm.takes_s, of_vm.bytes), (DrainFate::Waits, None, None));
    assert!(of_vm.why.contains("how much its disks hold is not known yet"), "{}", of_vm.why);
    lab.home.inside().volumes.insert(disk, volume);
    planned(&lab, &vm).await;
}

#[tokio::test]
async fn draining_twice_changes_nothing_and_an_unknown_host_is_not_found() {
    let lab = lab().await;
    let first = ask(&lab, &lab.home, false).await.asked.expect("asked");
    let by = "bob".to_owned();
    let again = drain::drain(&lab.cluster, &lab.home.id, by, DrainHost::default()).await;
    assert_eq!(again.expect("the same").asked.expect("asked"), first);
    // A host that registers once more is drained still.
    let other = perigee_model::vm::HostAddresses {
        nbd_addr: "home1:10810".to_owned(),
        ..lab.home.addresses.clone()
    };
    hosts::register(&lab.cluster, &lab.home.id, other).await.expect("registered");
    assert_eq!(shown(&lab, &lab.home).await.expect("drained").asked, Some(first));
    let nobody = HostId::new("home9").expect("a name");
    let by = "ann".to_owned();
    let unknown = drain::drain(&lab.cluster, &nobody, by, DrainHost::default()).await;
    assert_eq!(unknown.expect_err("no such host").kind, ProblemKind::NotFound);
    let unknown = drain::undrain(&lab.cluster, &nobody).await;
    assert_eq!(unknown.expect_err("no such host").kind, ProblemKind::NotFound);
}

/// Nobody said a word of its progress, so only its own end is known.
#[tokio::test]
async fn a_job_that_ends_soon_is_waited_for() {
    let lab = lab().await;
    let (id, vm) = running_as(&lab, movable()).await;
    lab.home.say(&vm, GuestBody::Progress { done: 999, total: 1000, label: "almost".into() });
    let said = wait_for("a predicted end", async || {
        let said = ask(&lab, &lab.home, true).await.left.expect("it has looked");
        let of_vm = step(&said, vm.as_str()).clone();
        of_vm.why.starts_with("it ends in about").then_some(of_vm)
    })
    .await;
    assert_eq!(said.fate, DrainFate::Waits, "{said:?}");
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    ask(&lab, &lab.home, false).await;
    left(&lab, &lab.home, "nothing to be left", <[DrainStep]>::is_empty).await;
    let record = jobs::any_record(&lab.cluster, &id).await.expect("record");
    let moved = migration::of_vm(&lab.cluster, &vm_of(&record.job.id)).await.expect("its moves");
    assert!(moved.is_empty(), "{moved:?}");
}
