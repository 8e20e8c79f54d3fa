//! VMs that are changed while they run, and that leave their host, or are deleted, meanwhile.

use std::sync::Arc;

use perigee_model::job::{JobState, NewVolume, Start};
use perigee_model::persistent_vm::{
    AttachVolume, DetachVolume, NewVm, PowerRequest, ResizeVm, VmState,
};
use perigee_model::vm::ChangeVm;
use perigee_model::volume::VolumeSource;
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{HostId, JobId, ProblemKind, VolumeName};

use super::fake::FakeHost;
use super::gone::{second_home, up};
use super::migrations::switch;
use super::persistent_vms::{new_vm, web};
use super::queue::unreachable;
use super::{Lab, TIMING, running, wait_for, wait_while};
use crate::records::{JobIntent, JobRecord, Live, VolumeChange, job_intent_key, start_of};
use crate::storage::volumes;
use crate::vms::{self, attachments, change, persistent};

fn further() -> VolumeName {
    VolumeName::new("further").expect("a name")
}

fn attach() -> AttachVolume {
    AttachVolume { volume: further(), read_only: false }
}

fn detach() -> DetachVolume {
    DetachVolume { volume: further() }
}

impl Lab {
    async fn make_further(&self, home: &HostId) {
        let new = NewVolume {
            name: further(),
            size_bytes: Some(1 << 20),
            source: VolumeSource::Empty,
            host: Some(home.clone()),
            leave_site: Default::default(),
        };
        volumes::create(&self.cluster, new).await.expect("a volume");
    }

    pub(super) fn web(&self) -> Arc<JobRecord> {
        self.cluster.index.of_vm(&web()).expect("its record")
    }

    fn has_further(&self) -> bool {
        self.web().job.spec.volumes.iter().any(|volume| volume.volume == further())
    }

    /// Its host is lost, and it runs at another one.
    async fn begins_anew(&self) {
        unreachable(self, &self.cloud).await;
        wait_for("the VM to run elsewhere", async || {
            let record = self.web();
            (record.restarts == 1 && record.job.state == JobState::Running).then_some(())
        })
        .await;
    }
}

/// A VM at `cloud1` whose own disks are at `home1`, and a volume at a third host.
async fn away() -> (Lab, FakeHost) {
    let lab = Lab::up().await;
    unreachable(&lab, &lab.cloud).await;
    let (start, restart_elsewhere) = (Start::Anywhere, true);
    lab.make_vm(NewVm { start, restart_elsewhere, volumes: Vec::new(), ..new_vm("home1") }).await;
    lab.runs().await;
    up(&lab, &lab.cloud).await;
    let third = second_home(&lab).await;
    up(&lab, &third).await;
    lab.make_further(&third.id).await;
    let to = lab.cloud.id.clone();
    vms::move_to(&lab.cluster, &web(), to.clone(), VolumesOnMove::Stay).await.expect("it moves");
    wait_for("the source to be asked", async || {
        lab.home.inside().vms[&web()].asked.is_some().then_some(())
    })
    .await;
    switch(&lab, &web());
    wait_for("the VM to be there", async || {
        let moving = lab.cluster.index.migrations_of(&web());
        let is_over = moving.iter().all(|one| one.migration.state.is_final());
        (is_over && lab.web().job.host.as_ref() == Some(&to)).then_some(())
    })
    .await;
    (lab, third)
}

#[tokio::test]
async fn a_detach_that_is_answered_late_takes_nothing_from_a_later_run() {
    let (lab, _third) = away().await;
    wait_for("the volume to come", async || {
        attachments::attach(&lab.cluster, &web(), attach()).await.ok()
    })
    .await;
    lab.cloud.inside().holds_changes = true;
    let cluster = Arc::clone(&lab.cluster);
    let mut detached =
        tokio::spawn(async move { attachments::detach(&cluster, &web(), detach()).await });
    wait_while(&mut detached, "the guest to be asked", async || {
        let changed = lab.cloud.inside().changed.clone();
        changed.iter().any(|one| matches!(one, ChangeVm::Unplug { .. })).then_some(())
    })
    .await;
    lab.begins_anew().await;
    lab.cloud.inside().holds_changes = false;
    let late = detached.await.expect("it ends").expect_err("the VM has it again");
    assert_eq!(late.kind, ProblemKind::Conflict, "{late}");
    assert!(lab.has_further());
}

#[tokio::test]
async fn an_attachment_that_waits_for_its_home_does_not_come_to_a_later_run() {
    let (lab, third) = away().await;
    let asked = third.inside().epochs_asked;
    third.inside().holds_epochs = true;
    let cluster = Arc::clone(&lab.cluster);
    let mut attached =
        tokio::spawn(async move { attachments::attach(&cluster, &web(), attach()).await });
    wait_while(&mut attached, "its home to be asked", async || {
        (third.inside().epochs_asked > asked).then_some(())
    })
    .await;
    lab.begins_anew().await;
    third.inside().holds_epochs = false;
    attached.await.expect("it ends").expect_err("that run is over");
    assert!(!lab.has_further());
}

/// A VM at `home1` without volumes, and a volume at `cloud1`.
async fn beside() -> Lab {
    let lab = Lab::up().await;
    lab.make_vm(NewVm { volumes: Vec::new(), ..new_vm("home1") }).await;
    lab.runs().await;
    lab.make_further(&lab.cloud.id).await;
    lab
}

async fn until_let_go(lab: &Lab) {
    wait_for("the host to let the volume go", async || {
        let has_it = lab.home.inside().attachments.contains_key(&further());
        let lets_in =
            lab.cloud.inside().admissions.get(&further()).is_some_and(|all| !all.is_empty());
        (!has_it && !lets_in).then_some(())
    })
    .await;
}

/// The record of what its host had was made afterwards.
#[tokio::test]
async fn a_controller_that_ends_in_a_detach_has_the_volume_let_go_by_its_host() {
    let mut lab = beside().await;
    attachments::attach(&lab.cluster, &web(), attach()).await.expect("attached");
    let record = lab.web();
    let run = start_of(&record, 0);
    lab.supervisor.stop().await;
    let goes = |old: Option<JobIntent>| {
        let change = VolumeChange::Goes(further());
        JobIntent { volume: Some(Live { number: 2, change, run }), ..old.unwrap_or_default() }
    };
    lab.cluster.records.update(&job_intent_key(&record.job.id), goes).await.expect("recorded");
    lab.start_controller(TIMING).await;
    until_let_go(&lab).await;
    assert!(!lab.has_further());
}

#[tokio::test]
async fn a_volume_that_comes_while_its_vm_is_stopped_is_let_go_by_its_host() {
    let lab = beside().await;
    lab.home.inside().holds_attachments = true;
    let cluster = Arc::clone(&lab.cluster);
    let mut attached =
        tokio::spawn(async move { attachments::attach(&cluster, &web(), attach()).await });
    wait_while(&mut attached, "the host to be asked", async || {
        (lab.home.inside().attachments_asked > 0).then_some(())
    })
    .await;
    lab.power(PowerRequest::Stop { force: true }).await;
    lab.vm_is(VmState::Stopped).await;
    lab.home.inside().holds_attachments = false;
    let late = attached.await.expect("it ends").expect_err("the VM is off");
    assert!(late.next.contains("it is still in the VM's list"), "{late}");
    until_let_go(&lab).await;
}

#[tokio::test]
async fn a_volume_is_let_go_also_where_the_controller_ends_while_it_comes_to_a_vm_that_is_stopped()
{
    let mut lab = beside().await;
    lab.home.inside().holds_attachments = true;
    let cluster = Arc::clone(&lab.cluster);
    let mut attached =
        tokio::spawn(async move { attachments::attach(&cluster, &web(), attach()).await });
    wait_while(&mut attached, "the host to be asked", async || {
        (lab.home.inside().attachments_asked > 0).then_some(())
    })
    .await;
    lab.power(PowerRequest::Stop { force: true }).await;
    lab.vm_is(VmState::Stopped).await;
    lab.supervisor.stop().await;
    attached.abort();
    // The host has done what it was asked.
    let at = "10.0.0.9:10809".to_owned();
    lab.home.inside().attachments.insert(further(), at);
    lab.home.inside().holds_attachments = false;
    lab.start_controller(TIMING).await;
    until_let_go(&lab).await;
}

#[tokio::test]
async fn a_change_that_ends_after_its_vm_was_deleted_changes_no_later_vm_of_its_name() {
    let lab = beside().await;
    lab.home.inside().holds_changes = true;
    let cluster = Arc::clone(&lab.cluster);
    let ask = ResizeVm { memory_bytes: Some(128 << 20), ..ResizeVm::default() };
    let mut resized = tokio::spawn(async move { change::resize(&cluster, &web(), ask).await });
    wait_while(&mut resized, "the guest to be asked", async || {
        (lab.home.inside().changed.len() == 1).then_some(())
    })
    .await;
    persistent::delete(&lab.cluster, &web(), true).await.expect("deleted");
    wait_for("the VM to be unknown", async || vms::get(&lab.cluster, &web()).await.err()).await;
    lab.make_vm(NewVm { volumes: Vec::new(), ..new_vm("home1") }).await;
    lab.runs().await;
    lab.home.inside().holds_changes = false;
    let late = resized.await.expect("it ends").expect_err("its VM is no more");
    assert_eq!(late.kind, ProblemKind::NotFound, "{late}");
    let persistent = lab.web().kind.persistent_vm().cloned().expect("a VM without a job");
    assert_eq!((persistent.sized, persistent.memory_next), (0, None));
}

#[tokio::test]
async fn what_was_asked_of_a_deleted_vm_is_not_asked_of_a_later_one_of_its_name() {
    let lab = Lab::up().await;
    let id = JobId::new(web().as_str()).expect("an id");
    let stop = Some((1, PowerRequest::Stop { force: true }));
    let late = JobIntent { power: stop, cancel: true, ..JobIntent::default() };
    lab.cluster.records.put(&job_intent_key(&id), &late).await.expect("recorded");
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
}

#[tokio::test]
async fn a_look_at_one_vm_asks_only_its_own_host() {
    let lab = Lab::up().await;
    let (_, vm) = running(&lab).await;
    let listed = || (lab.home.inside().vms_listed, lab.cloud.inside().vms_listed);
    let (at_home, at_cloud) = listed();
    let found = vms::get(&lab.cluster, &vm).await.expect("the VM");
    assert_eq!(found.host, Some(lab.home.id.clone()));
    assert_eq!(listed(), (at_home + 1, at_cloud));
    let unknown = "nobody".parse().expect("a name");
    vms::get(&lab.cluster, &unknown).await.expect_err("no host has it");
    assert_eq!(listed(), (at_home + 2, at_cloud + 1), "any host could have it");
}
