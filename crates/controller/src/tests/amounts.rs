//! VMs that have more or less memory while they run.

use perigee_model::amounts::MemoryAmount;
use perigee_model::job::{Access, JobSpec, JobState, Start, Vm};
use perigee_model::load::{MemoryUse, VmLoad};
use perigee_model::persistent_vm::{NewVm, ResizeVm};
use perigee_model::tenant::Quota;
use perigee_model::vm::ChangeVm;
use perigee_model::{ProblemKind, VmId};

use super::persistent_vms::{new_vm, web};
use super::tenants::Tenants;
use super::{Lab, spec, wait_for};
use crate::vms;

const MIB: u64 = 1 << 20;

/// The VM `web` at home1 with 128 MiB to 512 MiB.
async fn with_range() -> Lab {
    let lab = Lab::up().await;
    let memory_max_bytes = Some(512 * MIB);
    let volumes = Vec::new();
    lab.make_vm(NewVm { memory_bytes: 128 * MIB, memory_max_bytes, volumes, ..new_vm("home1") })
        .await;
    lab.runs().await;
    lab
}

/// Its guest says that it has so much, and uses so much of it.
fn says(lab: &Lab, has_mib: u64, used_mib: u64) {
    says_of(lab, &web(), has_mib, used_mib);
}

fn says_of(lab: &Lab, vm: &VmId, has_mib: u64, used_mib: u64) {
    let (has_bytes, available_bytes) = (has_mib * MIB, Some((has_mib - used_mib) * MIB));
    let memory = Some(MemoryUse { has_bytes, available_bytes });
    let mut inside = lab.home.inside();
    let report = &mut inside.vms.get_mut(vm).expect("the VM").report;
    report.load = VmLoad { memory, ..VmLoad::default() };
}

async fn shows(lab: &Lab, what: &str, is_right: impl Fn(&MemoryAmount) -> bool) -> MemoryAmount {
    wait_for(what, async || {
        let vm = vms::get(&lab.cluster, &web()).await.expect("the VM");
        vm.memory.filter(|memory| is_right(memory))
    })
    .await
}

fn asked(lab: &Lab) -> Vec<u64> {
    let changed = lab.home.inside().changed.clone();
    let bytes = changed.iter().filter_map(|change| match change {
        ChangeVm::Memory { bytes } => Some(*bytes),
        _ => None,
    });
    bytes.collect()
}

#[tokio::test]
async fn a_vm_begins_with_its_least_and_gets_what_its_host_has() {
    let lab = with_range().await;
    let spec = lab.home.inside().vms[&web()].report.spec.clone();
    let started_with = (spec.memory_bytes, spec.machine.memory_least_bytes);
    assert_eq!(started_with, (512 * MIB, Some(128 * MIB)));
    let shown = shows(&lab, "a first look", |memory| !memory.reason.is_empty()).await;
    assert_eq!((shown.has_bytes, shown.used_bytes), (None, None), "its guest has said nothing");
    assert!(asked(&lab).is_empty(), "what is not known changes nothing");

    says(&lab, 128, 120);
    let shown = shows(&lab, "more memory", |memory| memory.has_bytes == Some(184 * MIB)).await;
    assert_eq!((shown.least_bytes, shown.most_bytes), (128 * MIB, 512 * MIB));
    assert_eq!(shown.used_bytes, Some(120 * MIB));
    assert_eq!(asked(&lab), [184 * MIB]);
    shows(&lab, "that it has enough", |memory| memory.reason.contains("needs no more")).await;
}

#[tokio::test]
async fn what_is_lent_is_given_back_to_a_vm_that_comes_and_what_is_in_use_is_not() {
    let lab = with_range().await;
    for (has_mib, used_mib, then_mib) in [(128, 127, 191), (191, 190, 254)] {
        says(&lab, has_mib, used_mib);
        shows(&lab, "more memory", |memory| memory.has_bytes == Some(then_mib * MIB)).await;
    }
    says(&lab, 254, 100);
    shows(&lab, "that it has enough", |memory| memory.reason.contains("needs no more")).await;
    wait_for("what its guest can't give back to count", async || {
        let used = lab.cluster.index.used();
        (used[&lab.home.id].demand.memory_bytes == 132 * MIB).then_some(())
    })
    .await;
    // The host has 960 MiB for VMs.
    let start = Start::Host(lab.home.id.clone());
    let job = |memory_mib: u64| JobSpec {
        start: start.clone(),
        memory_bytes: memory_mib * MIB,
        volumes: Vec::new(),
        ..spec(Access::Read)
    };
    lab.submit(job(720)).await;
    let shown = shows(&lab, "less memory", |memory| memory.has_bytes == Some(240 * MIB)).await;
    assert_eq!(asked(&lab), [191, 254, 240].map(|mib| mib * MIB), "{shown:?}");
    let waits = lab.submit(job(256)).await;
    wait_for("the reason why the next job waits", async || {
        let (_, reason) = lab.cluster.index.wait_of(&waits)?;
        reason.contains("memory").then_some(())
    })
    .await;
}

#[tokio::test]
async fn no_more_is_lent_than_the_quota_of_the_tenant_has() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    let memory_bytes = Some(150 * MIB);
    tenants.set_quota("acme", Quota { memory_bytes, ..Quota::default() }).await;
    let memory_max_bytes = Some(512 * MIB);
    let volumes = Vec::new();
    let new = NewVm { memory_bytes: 128 * MIB, memory_max_bytes, volumes, ..new_vm("home1") };
    let made: Vm = tenants.ann.post("/v1/vms", &new).await.expect("a VM");
    let lab = &tenants.lab;
    wait_for("the VM to run", async || {
        let record = lab.cluster.index.of_vm(&made.id)?;
        (record.job.state == JobState::Running).then_some(())
    })
    .await;
    says_of(lab, &made.id, 128, 120);
    let shown = wait_for("what the quota has", async || {
        let memory = vms::get(&lab.cluster, &made.id).await.expect("the VM").memory;
        memory.filter(|memory| memory.reason.contains("its tenant's quota has no more"))
    })
    .await;
    assert_eq!(asked(lab), [150 * MIB], "{shown:?}");
}

#[tokio::test]
async fn a_range_is_changed_only_while_the_vm_is_off() {
    let lab = with_range().await;
    let more = ResizeVm { memory_bytes: Some(256 * MIB), ..ResizeVm::default() };
    let refused = vms::change::resize(&lab.cluster, &web(), more).await.expect_err("it runs");
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    let most = ResizeVm { memory_max_bytes: Some(256 * MIB), ..ResizeVm::default() };
    let refused = vms::change::resize(&lab.cluster, &web(), most).await.expect_err("no least");
    assert_eq!(refused.kind, ProblemKind::Invalid, "{refused}");
}
