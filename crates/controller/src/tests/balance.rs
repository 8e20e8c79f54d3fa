//! VMs without a job at an overloaded host.

use perigee_model::HostId;
use perigee_model::balance::{BalanceMode, SetBalance, SiteBalance};
use perigee_model::job::Start;
use perigee_model::load::{VcpuUse, VmLoad};
use perigee_model::persistent_vm::NewVm;
use perigee_model::plan::Trigger;
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{Problem, SiteId, VmId};

use super::drain::source_is_asked;
use super::fake::FakeHost;
use super::gone::second_home;
use super::migrations::switch_to;
use super::persistent_vms::{new_vm, web};
use super::{Lab, wait_for};
use crate::planning::{self, links};
use crate::{balance, hosts, vms};

fn home() -> SiteId {
    SiteId::new("home").expect("a name")
}

/// The agent says that so many CPUs are in use, and that the VM's vCPU has half of what it wants of one.
fn report(host: &FakeHost, cpus_used: Option<f64>, vm: Option<&VmId>) {
    let mut inside = host.inside();
    inside.cpus_used_1m = cpus_used;
    if let Some(vm) = vm.and_then(|vm| inside.vms.get_mut(vm)) {
        let vcpus_1m = Some(VcpuUse { running_vcpus: 0.5, waiting_vcpus: 0.5 });
        vm.report.load = VmLoad { vcpus_1m, ..VmLoad::default() };
    }
}

fn at_home1() -> NewVm {
    NewVm { volumes: Vec::new(), start: Start::Host(host("home1")), ..new_vm("home1") }
}

fn host(name: &str) -> HostId {
    HostId::new(name).expect("a name")
}

async fn set(lab: &Lab, mode: BalanceMode) -> SiteBalance {
    balance::set_mode(&lab.cluster, &home(), SetBalance { mode }).await.expect("a site")
}

async fn shows(lab: &Lab, what: &str, is_right: impl Fn(&SiteBalance) -> bool) -> SiteBalance {
    wait_for(what, async || {
        let shown = lab.cluster.balances.shown(&home());
        is_right(&shown).then_some(shown)
    })
    .await
}

/// A VM without a job that starves at home1, whose two CPUs others use, and home2, of which this is reported.
async fn starving(second_used: Option<f64>) -> (Lab, FakeHost) {
    let lab = Lab::up().await;
    let second = second_home(&lab).await;
    links::probe_all(&lab.cluster).await.expect("figures");
    lab.make_vm(at_home1()).await;
    lab.runs().await;
    report(&lab.home, Some(2.0), Some(&web()));
    report(&second, second_used, None);
    (lab, second)
}

/// Both agents do what a migration from home1 that succeeds does.
async fn arrives(lab: &Lab, to: &FakeHost) {
    switch_to(lab, to, &web());
    wait_for("the VM to have arrived", async || {
        let vm = vms::get(&lab.cluster, &web()).await.expect("the VM");
        (vm.host.as_ref() == Some(&to.id)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_vm_that_starves_is_only_advised_to_move_until_its_site_is_switched_on() {
    let (lab, second) = starving(Some(0.0)).await;
    assert_eq!(lab.cluster.balances.mode(&home()), BalanceMode::Advise);
    let said = shows(&lab, "the advice", |shown| shown.vms.iter().any(|vm| vm.moves)).await;
    let advice = &said.vms[0];
    assert_eq!((&advice.vm, &advice.host, &advice.to), (&web(), &lab.home.id, &second.id));
    assert!(advice.reason.starts_with("would move home1 → home2: "), "{}", advice.reason);
    assert!(lab.cluster.index.migrations_of(&web()).is_empty(), "it was only advised");

    set(&lab, BalanceMode::On).await;
    source_is_asked(&lab.home, &web()).await;
    shows(&lab, "the hosts' loads to count as not known while it moves", |shown| {
        shown.not_known.len() == 2
            && shown.not_known.iter().all(|one| one.why.contains("has moved"))
    })
    .await;
    arrives(&lab, &second).await;
    let moved = &lab.cluster.index.migrations_of(&web())[0].migration;
    assert!(moved.reason.starts_with("moves home1 → home2: "), "{}", moved.reason);
    assert_eq!(moved.volumes, VolumesOnMove::Follow);
    wait_for("the decision", async || {
        let job = lab.cluster.index.of_vm(&web())?.job.id.clone();
        let decisions = planning::decisions(&lab.cluster, &job).await.expect("decisions");
        decisions.iter().any(|one| one.trigger == Trigger::Balanced).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_host_whose_load_is_not_known_is_named_and_gets_no_vm() {
    let (lab, second) = starving(None).await;
    set(&lab, BalanceMode::On).await;
    let shown =
        shows(&lab, "a look", |shown| shown.looked_ms.is_some() && shown.not_known.len() == 1)
            .await;
    assert_eq!(shown.not_known[0].host, second.id);
    assert!(shown.not_known[0].why.contains("CPUs"), "{}", shown.not_known[0].why);
    assert!(shown.vms.is_empty(), "{:?}", shown.vms);
    assert!(lab.cluster.index.migrations_of(&web()).is_empty());
}

#[tokio::test]
async fn a_vm_does_not_go_back_to_the_host_from_which_a_person_took_it() {
    let (lab, second) = starving(Some(0.0)).await;
    vms::move_to(&lab.cluster, &web(), second.id.clone(), VolumesOnMove::Stay)
        .await
        .expect("moves");
    source_is_asked(&lab.home, &web()).await;
    arrives(&lab, &second).await;
    report(&second, Some(2.0), Some(&web()));
    report(&lab.home, Some(0.0), None);
    set(&lab, BalanceMode::Off).await;
    let shown = set(&lab, BalanceMode::On).await;
    assert_eq!(shown.looked_ms, None, "what another mode has shown is shown no longer");
    let shown =
        shows(&lab, "a look", |shown| shown.looked_ms.is_some() && shown.not_known.is_empty())
            .await;
    assert!(shown.vms.is_empty(), "{:?}", shown.vms);
}

#[tokio::test]
async fn a_mode_outlives_the_controller_and_is_of_a_site_that_has_a_host() {
    let mut lab = Lab::up().await;
    set(&lab, BalanceMode::On).await;
    lab.restart_controller().await;
    assert_eq!(lab.cluster.balances.mode(&home()), BalanceMode::On);
    let nowhere = SiteId::new("nowhere").expect("a name");
    let asked = balance::set_mode(&lab.cluster, &nowhere, SetBalance { mode: BalanceMode::On });
    let refused: Problem = asked.await.expect_err("no host is there");
    assert!(refused.to_string().contains("perigee site list"), "{refused}");
    assert_eq!(balance::list(&lab.cluster).len(), hosts::sites(&lab.cluster).len());
}
