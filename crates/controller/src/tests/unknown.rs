//! What hosts have and no record names there is shown, and nothing is done with it before somebody says so.

use perigee_model::ProblemKind;
use perigee_model::job::{
    Access, AdoptVm, EndUnknownVm, JobState, NewVolume, Unknown, UnknownKind,
};
use perigee_model::persistent_vm::{PowerRequest, StopVm};
use perigee_model::vm::VmStatus;
use perigee_model::volume::VolumeSource;

use super::persistent_vms::{new_vm, web};
use super::term::{copy_store, restore_store};
use super::{Lab, TIMING, data_volume, running, running_as, spec, vm_of, wait_for};
use crate::records::{JobRecord, start_of};
use crate::storage::{unknown, volumes};
use crate::{jobs, term, vms};

impl Lab {
    /// The controller's state becomes that of the backup, which is told to be the one.
    async fn restore(&mut self, backup: &std::path::Path) {
        self.supervisor.stop().await;
        restore_store(backup, self.dir.path());
        term::take_over(self.dir.path()).await.expect("told");
        self.start_controller(TIMING).await;
    }

    async fn unknown(&self) -> Vec<Unknown> {
        unknown::list(&self.cluster).await.expect("a list")
    }
}

#[tokio::test]
async fn a_vm_that_a_restored_controller_does_not_know_is_ended_by_name_and_host_alone() {
    let mut lab = Lab::up().await;
    let backup = tempfile::tempdir().expect("a directory");
    copy_store(lab.dir.path(), backup.path());
    let (id, vm) = running(&lab).await;
    lab.restore(backup.path()).await;
    let all = wait_for("the unknown VM", async || {
        let all = lab.unknown().await;
        all.iter().any(|one| one.kind == UnknownKind::Vm).then_some(all)
    })
    .await;
    let (of_vms, rest): (Vec<_>, Vec<_>) = all.iter().partition(|one| one.kind == UnknownKind::Vm);
    assert_eq!((of_vms.len(), of_vms[0].name.as_str()), (1, vm.as_str()), "{all:?}");
    assert!(of_vms[0].next.contains(&format!("perigee vm end {vm} --host home1")), "{all:?}");
    assert!(rest.iter().any(|one| one.name == format!("{vm}-out")), "its disks too: {all:?}");
    wait_for("the controller to see it", async || {
        (!lab.cluster.hosts.seen(&vm).is_empty()).then_some(())
    })
    .await;
    for force in [false, true] {
        let refused = vms::stop(&lab.cluster, &vm, StopVm { force }).await.expect_err("unknown");
        assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
        let refused = vms::persistent::delete(&lab.cluster, &vm, force).await.expect_err("unknown");
        assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    }
    let next = lab.submit(spec(Access::Read)).await;
    assert_ne!(next, id, "its number is taken");
    assert!(lab.home.inside().vms.contains_key(&vm), "nothing was done with it");
    let ask = |force| EndUnknownVm { host: lab.home.id.clone(), force };
    unknown::end_vm(&lab.cluster, &vm, &ask(false)).await.expect("asked");
    assert_eq!(lab.home.inside().pressed, 1, "its guest is asked");
    unknown::end_vm(&lab.cluster, &vm, &ask(true)).await.expect("at once");
    assert!(!lab.home.inside().vms.contains_key(&vm));
    let out = format!("{vm}-out").parse().expect("a name");
    volumes::adopt(&lab.cluster, &out, &lab.home.id).await.expect("rescued");
    assert!(lab.unknown().await.iter().all(|one| one.name != out.as_str()));
    // A known one is not ended so.
    let vm = vm_of(&next);
    lab.wait_for_vm(&lab.home, &vm).await;
    let refused = unknown::end_vm(&lab.cluster, &vm, &ask(true)).await.expect_err("it is known");
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
}

#[tokio::test]
async fn a_restored_controller_takes_up_a_job_where_its_vm_is_now() {
    let mut lab = Lab::up().await;
    let mut moving = spec(Access::Write);
    moving.may_migrate = true;
    let (id, vm) = running_as(&lab, moving).await;
    let backup = tempfile::tempdir().expect("a directory");
    copy_store(lab.dir.path(), backup.path());
    lab.supervisor.stop().await;
    // It has moved since.
    let moved = lab.home.inside().vms.remove(&vm).expect("the VM");
    lab.cloud.inside().vms.insert(vm.clone(), moved);
    lab.restore(backup.path()).await;
    let cloud = lab.cloud.id.clone();
    let job = lab.wait_for_job(&id, "its VM's host", |job| job.host.as_ref() == Some(&cloud)).await;
    assert_eq!(job.state, JobState::Running, "{job:?}");
    assert!(lab.cloud.inside().vms[&vm].report.status == VmStatus::Running);
    assert!(lab.unknown().await.iter().all(|one| one.kind != UnknownKind::Vm));
}

#[tokio::test]
async fn a_restored_controller_does_not_start_a_job_again_that_runs_already() {
    let mut lab = Lab::up().await;
    // So the record does not say that it was started.
    lab.home.inside().loses_answers = true;
    let id = lab.submit(spec(Access::Write)).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    let backup = tempfile::tempdir().expect("a directory");
    copy_store(lab.dir.path(), backup.path());
    lab.supervisor.stop().await;
    lab.home.inside().loses_answers = false;
    let moved = lab.home.inside().vms.remove(&vm).expect("the VM");
    lab.cloud.inside().vms.insert(vm.clone(), moved);
    lab.restore(backup.path()).await;
    lab.wait_for_job(&id, "a reason", |job| job.reason.contains("has it already")).await;
    assert!(!lab.home.inside().vms.contains_key(&vm), "it runs once");
}

#[tokio::test]
async fn a_volume_whose_record_names_an_older_home_is_adopted_without_deleting_the_record() {
    let lab = Lab::up().await;
    let volume = data_volume();
    let moved = lab.cloud.inside().volumes.remove(&volume).expect("the volume");
    let refused = volumes::adopt(&lab.cluster, &volume, &lab.home.id).await.expect_err("not there");
    assert_eq!(refused.kind, ProblemKind::NotFound, "{refused}");
    lab.home.inside().volumes.insert(volume.clone(), moved);
    let shown = lab.unknown().await;
    assert!(shown[0].why.contains("has it at host cloud1"), "{shown:?}");
    let adopted = volumes::adopt(&lab.cluster, &volume, &lab.home.id).await.expect("adopted");
    assert_eq!(adopted.home, lab.home.id);
    assert!(lab.unknown().await.is_empty());
    assert!(jobs::submit(&lab.cluster, spec(Access::Read)).await.is_ok(), "and used");
}

#[tokio::test]
async fn a_volume_that_could_not_be_made_does_not_block_its_name() {
    let lab = Lab::up().await;
    let new = || NewVolume {
        name: "fresh".parse().expect("a name"),
        host: Some(lab.home.id.clone()),
        size_bytes: Some(1 << 20),
        source: VolumeSource::Empty,
        leave_site: Default::default(),
    };
    lab.home.inside().down = true;
    let failed = volumes::create(&lab.cluster, new()).await.expect_err("its home is away");
    assert_eq!(failed.kind, ProblemKind::Unavailable, "{failed}");
    let key = crate::records::volume_key(&new().name);
    let record = lab.cluster.records.read::<crate::records::VolumeRecord>(&key).await;
    assert!(record.expect("the store").is_none(), "nothing has the name");
    lab.home.inside().down = false;
    // It answers, and the answer to the creation itself is lost.
    lab.home.inside().no_new_volumes = true;
    volumes::create(&lab.cluster, new()).await.expect_err("not made");
    lab.home.inside().no_new_volumes = false;
    volumes::create(&lab.cluster, new()).await.expect("made now");
    let taken = volumes::create(&lab.cluster, new()).await.expect_err("it is there");
    assert_eq!(taken.kind, ProblemKind::Conflict, "{taken}");
    let unknown = "left".parse().expect("a name");
    lab.home.make_volume(&unknown);
    let blocked = volumes::create(&lab.cluster, NewVolume { name: unknown, ..new() }).await;
    let blocked = blocked.expect_err("a host has one");
    assert!(blocked.next.contains("perigee volume adopt left --host home1"), "{blocked}");
}

#[tokio::test]
async fn a_vm_that_a_restored_controller_does_not_know_is_adopted_and_goes_on() {
    let mut lab = Lab::up().await;
    let backup = tempfile::tempdir().expect("a directory");
    copy_store(lab.dir.path(), backup.path());
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    let before = (*lab.web()).clone();
    lab.restore(backup.path()).await;
    wait_for("the unknown VM", async || {
        let is_it = |one: &Unknown| one.next.contains("perigee vm adopt web --host home1");
        lab.unknown().await.iter().any(is_it).then_some(())
    })
    .await;
    let image = Some(new_vm("home1").image);
    let ask = || AdoptVm { host: lab.home.id.clone(), image: image.clone() };
    let vm = web();
    let adopted = vms::adopt::adopt(&lab.cluster, &vm, ask(), "ann".to_owned());
    adopted.await.expect("adopted");
    lab.runs().await;
    let after = (*lab.web()).clone();
    let disks = |record: &JobRecord| record.placement.clone().expect("placed").disks;
    assert_eq!(disks(&after), disks(&before));
    assert_eq!(start_of(&after, 0), start_of(&before, 0));
    assert_eq!(lab.home.inside().vms[&web()].report.status, VmStatus::Running);
    assert!(lab.unknown().await.is_empty(), "its disks are its own again");
    let refused = vms::adopt::adopt(&lab.cluster, &web(), ask(), "ann".to_owned()).await;
    assert_eq!(refused.expect_err("it is known").kind, ProblemKind::Conflict);
    // It obeys its record.
    lab.power(PowerRequest::Stop { force: true }).await;
    wait_for("it to be gone", async || (!lab.home.inside().vms.contains_key(&web())).then_some(()))
        .await;
}
