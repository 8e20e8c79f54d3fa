//! Jobs and moves with a volume that may not leave its site. `tpch` is at `cloud1`, jobs start at `home1`.

use perigee_model::guest::{GuestBody, LogStream};
use perigee_model::job::{Access, JobSpec, JobState, Start};
use perigee_model::leave_site::SetLeaveSite;
use perigee_model::persistent_vm::{NewVm, PowerRequest, VmState};
use perigee_model::plan::Way;
use perigee_model::vm::{Machine, NetworkKind, VmSpec};
use perigee_model::volume::Snapshot;
use perigee_model::volume_move::{VolumeMoveCause, VolumesOnMove};
use perigee_model::{DiskRole, ImageName, JobId, LeaveSite, ProblemKind, VmId};

use super::migrations::switch_from;
use super::persistent_vms::{new_vm, web};
use super::{FakeHost, Lab, data_volume, finish, running_as, spec, vm_of, vm_spec, wait_for};
use crate::cleaner::Pending;
use crate::records::{ImageRecord, image_key};
use crate::storage::leave_site::{self, Of};
use crate::storage::{images, moves};
use crate::{jobs, migration, rentals, vms};

async fn confined() -> Lab {
    let lab = Lab::up().await;
    let name = data_volume();
    lab.cloud.inside().volumes.get_mut(&name).expect("it").info.leave_site = LeaveSite::Never;
    lab
}

#[tokio::test]
async fn what_a_job_writes_stays_at_the_site_of_confined_data() {
    let lab = confined().await;
    let id = lab.submit(spec(Access::Read)).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    let disks = jobs::record(&lab.cluster, &id).await.expect("record").placement.expect("it").disks;
    for disk in disks {
        let is_confined = disk.role != DiskRole::Seed;
        let home = if is_confined { &lab.cloud.id } else { &lab.home.id };
        assert_eq!(
            (&disk.home, disk.leave_site),
            (home, LeaveSite::confined(is_confined)),
            "{disk:?}"
        );
        if disk.temporary {
            let host = if is_confined { &lab.cloud } else { &lab.home };
            let made = host.inside().volumes[&disk.volume].info.leave_site;
            assert_eq!(made, disk.leave_site, "{disk:?}");
        }
    }
    let vm = vm_of(&id);
    assert!(
        lab.home.inside().vms[&vm].report.spec.locks_memory,
        "its memory stays off the disks there"
    );
    lab.home.say(&vm, GuestBody::Started);
    let line = |line: &str| GuestBody::log(LogStream::Stdout, line);
    lab.home.say(&vm, line("the secret"));
    lab.home.say(&vm, line("and more"));
    lab.home.say(&vm, GuestBody::exited(0));
    lab.wait_for_state(&id, JobState::Collecting).await;
    let log = jobs::log(&lab.cluster, &id, 0, 10).await.expect("its log");
    assert_eq!(log.len(), 1, "{log:?}");
    assert!(log[0].line.contains("write it to a file in /output"), "{log:?}");
    assert!(lab.home.inside().vms[&vm].report.spec.hides_output, "the agent is told");
}

#[tokio::test]
async fn data_become_confined_only_without_copies_elsewhere_and_while_no_job_uses_them() {
    let lab = Lab::up().await;
    let (of, name) = (Of::Volume(data_volume()), data_volume());
    let set = async |leave_site| {
        let ask = SetLeaveSite { leave_site, confirmed: true };
        leave_site::set(&lab.cluster, &of, ask, None).await
    };
    let now = || lab.cloud.inside().volumes[&name].info.leave_site;
    lab.home.inside().copies = vec!["the replica of volume tpch".to_owned()];
    let refused = set(LeaveSite::Never).await.expect_err("there is a copy");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    assert!(refused.why.contains("the replica of volume tpch at home1"), "{refused}");
    assert_eq!(now(), LeaveSite::Allowed, "it is as before");
    lab.home.inside().copies.clear();

    lab.home.inside().down = true;
    let refused = set(LeaveSite::Never).await.expect_err("who knows what home1 has");
    assert_eq!(refused.kind, ProblemKind::Unavailable, "{refused}");
    assert_eq!(now(), LeaveSite::Allowed, "it is as before");
    lab.home.inside().down = false;

    let id = lab.submit(spec(Access::Read)).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    let refused = set(LeaveSite::Never).await.expect_err("a VM elsewhere has it in its memory");
    assert!(refused.why.contains(id.as_str()), "{refused}");
    assert_eq!(now(), LeaveSite::Allowed, "it is as before");
    lab.home.say(&vm, GuestBody::Started);
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;

    set(LeaveSite::Never).await.expect("nothing stands against it");
    assert_eq!(now(), LeaveSite::Never);
    set(LeaveSite::Never).await.expect("again");
    set(LeaveSite::Allowed).await.expect("it is confirmed");
    assert_eq!(now(), LeaveSite::Allowed);
}

/// The controller was stopped after the home had confined the volume, and before it had looked for jobs.
#[tokio::test]
async fn a_job_that_does_not_know_that_its_data_became_confined_is_named_when_that_is_asked_again()
{
    let lab = Lab::up().await;
    let (id, _) = running_as(&lab, spec(Access::Read)).await;
    let name = data_volume();
    lab.cloud.inside().volumes.get_mut(&name).expect("it").info.leave_site = LeaveSite::Never;
    let ask = SetLeaveSite { leave_site: LeaveSite::Never, confirmed: true };
    let refused = leave_site::set(&lab.cluster, &Of::Volume(name.clone()), ask, None).await;
    let refused = refused.expect_err("a VM elsewhere has it in its memory");
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    assert!(refused.why.contains(id.as_str()), "{refused}");
    let now = lab.cloud.inside().volumes[&name].info.leave_site;
    assert_eq!(now, LeaveSite::Never, "what was confined before stays so");
}

#[tokio::test]
async fn confining_data_again_does_not_mind_a_job_that_was_placed_with_them_confined() {
    let lab = confined().await;
    running_as(&lab, spec(Access::Read)).await;
    let ask = SetLeaveSite { leave_site: LeaveSite::Never, confirmed: true };
    let of = Of::Volume(data_volume());
    leave_site::set(&lab.cluster, &of, ask, None).await.expect("nothing stands against it");
}

#[tokio::test]
async fn a_job_file_may_let_what_it_writes_leave_and_a_free_volume_is_no_way_out() {
    let lab = confined().await;
    let writes = LeaveSite::Allowed;
    let id = lab.submit(JobSpec { writes, ..spec(Access::Read) }).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    let disks = jobs::record(&lab.cluster, &id).await.expect("record").placement.expect("it").disks;
    let output = disks.iter().find(|disk| disk.role == DiskRole::Output).expect("an output");
    assert_eq!((&output.home, output.leave_site), (&lab.home.id, LeaveSite::Allowed));
    let vm = vm_of(&id);
    assert!(
        lab.home.inside().vms[&vm].report.spec.locks_memory,
        "what it reads is confined all the same"
    );
    assert!(!lab.home.inside().vms[&vm].report.spec.hides_output, "what it prints may leave");
}

/// Whatever it says of what it writes.
#[tokio::test]
async fn a_job_with_a_network_card_does_not_get_confined_data() {
    let lab = confined().await;
    for writes in [LeaveSite::Never, LeaveSite::Allowed] {
        let spec = JobSpec { network: NetworkKind::User, writes, ..spec(Access::Read) };
        let refused = leave_site::confined_of(&lab.cluster, &spec).await.expect_err("a way out");
        assert_eq!(refused.kind, ProblemKind::Conflict);
        assert!(refused.why.contains("tpch"), "{refused}");
    }
    let id = lab.submit(JobSpec { network: NetworkKind::Default, ..spec(Access::Read) }).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    let network = lab.home.inside().vms[&vm_of(&id)].report.spec.network.clone();
    assert_eq!(network, perigee_model::vm::VmNetwork::None, "it has none by default");
}

/// Its root disk counted as free for ever, so confining the image again was refused because of it, however often it was started.
#[tokio::test]
async fn a_vm_that_starts_after_its_image_became_confined_knows_its_disk_as_confined() {
    let lab = Lab::up().await;
    let new = new_vm("home1");
    let image = new.image.clone();
    lab.make_vm(NewVm { volumes: Vec::new(), ..new }).await;
    lab.runs().await;
    lab.power(PowerRequest::Stop { force: true }).await;
    lab.vm_is(VmState::Stopped).await;
    let confine = |old: Option<ImageRecord>| {
        let old = old.unwrap_or_else(|| ImageRecord::new(image.clone()));
        ImageRecord { leave_site: LeaveSite::Never, ..old }
    };
    lab.cluster.records.update(&image_key(&image), confine).await.expect("it is confined");
    lab.power(PowerRequest::Start).await;
    lab.runs().await;
    let record = lab.cluster.index.of_vm(&web()).expect("its record");
    let disks = &record.placement.as_ref().expect("its disks").disks;
    let root = disks.iter().find(|disk| disk.role == DiskRole::Root).expect("its root disk");
    assert_eq!(root.leave_site, LeaveSite::Never);
}

/// The controller was stopped before it had the answer, and jobs from the image got a network card.
#[tokio::test]
async fn an_image_of_confined_data_is_known_as_confined_when_it_is_found_at_its_host() {
    let lab = confined().await;
    let image = ImageName::new("copy").expect("a name");
    let ask = Snapshot { image: image.clone() };
    images::snapshot(&lab.cluster, &data_volume(), &ask).await.expect("an image");
    let before = ImageRecord::new(image.clone());
    lab.cluster.records.put(&image_key(&image), &before).await.expect("as before the answer");
    images::layer_of(&lab.cluster, &image).await.expect("its host has it");
    let (volumes, network) = (Vec::new(), NetworkKind::User);
    let spec = JobSpec { image, volumes, network, ..spec(Access::Read) };
    let refused = leave_site::confined_of(&lab.cluster, &spec).await.expect_err("a way out");
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    assert!(refused.why.contains("image copy"), "{refused}");
}

#[tokio::test]
async fn no_move_is_begun_or_planned_that_the_home_would_refuse() {
    let lab = confined().await;
    let cause = VolumeMoveCause::Asked;
    let refused = moves::request(&lab.cluster, &data_volume(), &lab.home.id, cause).await;
    let refused = refused.expect_err("another site");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    for part in ["tpch", "leave-site: never", "site cloud", "home1 is at home"] {
        assert!(refused.to_string().contains(part), "{refused}");
    }
    let plan = rentals::plan(&lab.cluster, &spec(Access::Read)).await.expect("a plan").plan;
    let migrate = plan.options.iter().find(|option| option.way == Way::Migrate);
    if let Some(migrate) = migrate {
        assert!(migrate.reason.contains("leave-site: never"), "{}", migrate.reason);
    }
    let (id, vm) = runs_beside_its_data(&lab, spec(Access::Read)).await;
    let record = jobs::record(&lab.cluster, &id).await.expect("its record");
    let pending = Pending::of(&lab.cluster, &id).await.expect("what is to be removed");
    let may_move = |to| migration::check(&lab.cluster, &record, to, &pending);
    let refused = may_move(&lab.home.id).expect_err("its memory has some of it");
    assert!(refused.to_string().contains("leave-site: never"), "{refused}");
    let asks = format!("perigee vm move {vm} home1");
    assert!(refused.next.contains(&asks), "{refused}");
}

/// At the site of the data.
async fn runs_beside_its_data(lab: &Lab, spec: JobSpec) -> (JobId, VmId) {
    let start = Start::Host(lab.cloud.id.clone());
    let id = lab.submit(JobSpec { start, ..spec }).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.cloud, &vm).await;
    lab.cloud.say(&vm, GuestBody::Started);
    lab.wait_for_state(&id, JobState::Running).await;
    (id, vm)
}

/// The VM has arrived there, and this is what it was started with.
async fn moves(lab: &Lab, vm: &VmId, from: &FakeHost, to: &FakeHost) -> VmSpec {
    // What the move before has left there is removed first.
    wait_for("the move to begin", async || {
        vms::move_to(&lab.cluster, vm, to.id.clone(), VolumesOnMove::Stay).await.ok()
    })
    .await;
    wait_for("the source to be asked", async || {
        from.inside().vms[vm].asked.is_some().then_some(())
    })
    .await;
    switch_from(from, to, vm);
    wait_for("the VM to be there", async || {
        let record = lab.cluster.index.of_vm(vm).expect("its record");
        (record.job.host.as_ref() == Some(&to.id) && record.settled > 0).then_some(())
    })
    .await;
    to.inside().vms[vm].report.spec.clone()
}

#[tokio::test]
async fn a_person_moves_a_vm_with_confined_data_to_another_site_where_its_memory_is_locked_and_back()
 {
    let lab = confined().await;
    let (_, vm) = running_as(&lab, spec(Access::Read)).await;
    let before = lab.home.inside().vms[&vm].report.spec.clone();
    assert!(before.locks_memory && before.machine.keeps_free_memory);
    let beside = moves(&lab, &vm, &lab.home, &lab.cloud).await;
    assert!(!beside.locks_memory && beside.machine.keeps_free_memory, "{beside:?}");
    let far = moves(&lab, &vm, &lab.cloud, &lab.home).await;
    assert!(far.locks_memory && far.hides_output && far.machine.keeps_free_memory, "{far:?}");
}

#[tokio::test]
async fn a_vm_that_gives_its_free_memory_back_does_not_go_where_its_memory_would_be_locked() {
    let lab = confined().await;
    let (id, _) = running_as(&lab, spec(Access::Read)).await;
    let disks = jobs::record(&lab.cluster, &id).await.expect("record").placement.expect("it").disks;
    let of = |spec| leave_site::confine_arriving(&lab.cluster, &disks, spec, &lab.home.id);
    let refused = of(vm_spec()).expect_err("it was started before");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    let machine = Machine { keeps_free_memory: true, ..vm_spec().machine };
    assert!(of(VmSpec { machine: machine.clone(), ..vm_spec() }).expect("it may").locks_memory);
}

#[tokio::test]
async fn a_vm_whose_memory_has_a_range_stays_at_the_site_of_its_confined_data() {
    let lab = confined().await;
    let spec = spec(Access::Read);
    let memory_max_bytes = Some(2 * spec.memory_bytes);
    let (_, vm) = runs_beside_its_data(&lab, JobSpec { memory_max_bytes, ..spec }).await;
    assert!(!lab.cloud.inside().vms[&vm].report.spec.machine.keeps_free_memory);
    let moved = vms::move_to(&lab.cluster, &vm, lab.home.id.clone(), VolumesOnMove::Stay).await;
    let refused = moved.expect_err("its memory can't be locked");
    assert!(refused.to_string().contains("can't be locked"), "{refused}");
}

/// What it writes may leave, and what it has of its image may not.
#[tokio::test]
async fn a_vm_of_a_confined_image_has_its_memory_locked_at_another_site() {
    let lab = confined().await;
    let image = ImageName::new("copy").expect("a name");
    let ask = Snapshot { image: image.clone() };
    images::snapshot(&lab.cluster, &data_volume(), &ask).await.expect("an image");
    let (volumes, writes) = (Vec::new(), LeaveSite::Allowed);
    let id = lab.submit(JobSpec { image, volumes, writes, ..spec(Access::Read) }).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    let started = lab.home.inside().vms[&vm].report.spec.clone();
    assert!(started.locks_memory && !started.hides_output, "{started:?}");
}
