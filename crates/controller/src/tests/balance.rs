//! VMs without a job at an overloaded host.

use perigee_model::auto_mode::AutoMode;
use perigee_model::balance::{SetBalance, SiteBalance, VmStanding};
use perigee_model::drain::DrainHost;
use perigee_model::job::{Access, Job, JobSpec, JobState, MigrationState, Start};
use perigee_model::load::{MemoryUse, Pressure, StalledTime, VcpuUse, VmLoad};
use perigee_model::persistent_vm::{NewVm, SetVm, VmState};
use perigee_model::plan::Trigger;
use perigee_model::vm::{MigrationPhase, VmStatus};
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{HostId, HostRules, Problem, SiteId, VmId};
use perigee_planner::balance::TAKEN;

use super::drain::{source_is_asked, unreachable};
use super::fake::FakeHost;
use super::gone::second_home;
use super::migrations::{moves_to_its_data, switch, switch_to};
use super::persistent_vms::{new_vm, web};
use super::term::{copy_store, is_refused};
use super::{Lab, TIMING, Traffic, running_as, spec, wait_for};
use crate::cluster::Alone;
use crate::cluster::balance::{BalanceRecord, balance_key};
use crate::migration::{Request, by_itself};
use crate::planning::{self, links};
use crate::supervisor::Supervisor;
use crate::vms::persistent;
use crate::{balance, drain, hosts, jobs, term, vms};

fn home() -> SiteId {
    SiteId::new("home").expect("a name")
}

/// The agent says that so many CPUs are in use, and that the VM's vCPU has half of what it wants of one.
pub(super) fn report(host: &FakeHost, cpus_used: Option<f64>, vm: Option<&VmId>) {
    host.inside().cpus_used_1m = cpus_used;
    if let Some(vm) = vm {
        report_vm(host, vm, VcpuUse { running_vcpus: 0.5, waiting_vcpus: 0.5 });
    }
}

fn report_vm(host: &FakeHost, vm: &VmId, load: VcpuUse) {
    if let Some(vm) = host.inside().vms.get_mut(vm) {
        vm.report.load = VmLoad { vcpus_1m: Some(load), ..VmLoad::default() };
    }
}

/// The hosts whose loads are not known, by a look after which nothing has moved. The reasons have these words.
async fn not_known(lab: &Lab, what: &str, wanted: &[(&FakeHost, &str)]) {
    shows(lab, what, |shown| {
        let is = |(host, words): &(&FakeHost, &str)| {
            shown.not_known.iter().any(|one| one.host == host.id && one.why.contains(words))
        };
        shown.not_known.len() == wanted.len() && wanted.iter().all(is)
    })
    .await;
    assert!(lab.cluster.index.migrations_of(&web()).is_empty(), "{what}");
}

pub(super) fn at_home1() -> NewVm {
    NewVm { volumes: Vec::new(), start: Start::Host(host("home1")), ..new_vm("home1") }
}

fn host(name: &str) -> HostId {
    HostId::new(name).expect("a name")
}

async fn set(lab: &Lab, mode: AutoMode) -> SiteBalance {
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
    starving_as(at_home1(), second_used).await
}

async fn starving_as(new: NewVm, second_used: Option<f64>) -> (Lab, FakeHost) {
    let lab = Lab::up().await;
    let second = second_home(&lab).await;
    links::probe_all(&lab.cluster).await.expect("figures");
    lab.make_vm(new).await;
    lab.runs().await;
    report(&lab.home, Some(2.0), Some(&web()));
    report(&second, second_used, None);
    (lab, second)
}

/// Both agents do what a migration from home1 that succeeds does.
pub(super) async fn arrives(lab: &Lab, to: &FakeHost) {
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
    assert_eq!(lab.cluster.balances.mode(&home()), AutoMode::Advise);
    let said = shows(&lab, "the advice", |shown| shown.vms.iter().any(|vm| vm.moves)).await;
    let advice = &said.vms[0];
    assert_eq!((&advice.vm, &advice.host, &advice.to), (&web(), &lab.home.id, &second.id));
    assert!(advice.reason.starts_with("would move home1 → home2: "), "{}", advice.reason);
    assert!(lab.cluster.index.migrations_of(&web()).is_empty(), "it was only advised");

    set(&lab, AutoMode::On).await;
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
    set(&lab, AutoMode::On).await;
    let shown =
        shows(&lab, "a look", |shown| shown.looked_ms.is_some() && shown.not_known.len() == 1)
            .await;
    assert_eq!(shown.not_known[0].host, second.id);
    assert!(shown.not_known[0].why.contains("CPUs"), "{}", shown.not_known[0].why);
    assert!(shown.vms.is_empty(), "{:?}", shown.vms);
    assert!(lab.cluster.index.migrations_of(&web()).is_empty());
}

#[tokio::test]
async fn figures_that_can_t_be_are_not_known_and_move_nothing() {
    let (lab, second) = starving(Some(-3.0)).await;
    set(&lab, AutoMode::On).await;
    not_known(&lab, "less than none in use", &[(&second, "-3 of its 2 CPUs")]).await;
    report(&second, Some(4711.0), None);
    not_known(&lab, "more than all in use", &[(&second, "4711 of its 2 CPUs")]).await;
    report(&lab.home, Some(4711.0), None);
    not_known(&lab, "the same of both", &[(&second, "4711"), (&lab.home, "4711")]).await;
    report(&second, Some(0.0), None);
    not_known(&lab, "one that would be left", &[(&lab.home, "4711")]).await;
    report_vm(&lab.home, &web(), VcpuUse { running_vcpus: -1.0, waiting_vcpus: 2.0 });
    wait_for("the VM's figures", async || {
        let (_, vm) = lab.cluster.hosts.fresh_vm(&lab.home.id, &web(), super::PATIENCE)?;
        vm.load.vcpus_1m.filter(|load| load.running_vcpus < 0.0)
    })
    .await;
    report(&lab.home, Some(2.0), None);
    not_known(&lab, "a VM that runs for less than no time", &[(&lab.home, "VM web")]).await;
}

#[tokio::test]
async fn a_host_that_is_away_neither_gets_nor_loses_a_vm() {
    let (lab, second) = starving(Some(0.0)).await;
    set(&lab, AutoMode::Off).await;
    unreachable(&lab, &second).await;
    set(&lab, AutoMode::On).await;
    let silent = "has not answered";
    not_known(&lab, "the idle host to be away", &[(&second, silent)]).await;
    set(&lab, AutoMode::Off).await;
    unreachable(&lab, &lab.home).await;
    second.inside().down = false;
    set(&lab, AutoMode::On).await;
    not_known(&lab, "the overloaded host to be away", &[(&lab.home, silent)]).await;
}

#[tokio::test]
async fn a_target_that_dies_during_the_move_ends_no_vm_and_is_not_idle() {
    let (lab, second) = starving(Some(0.0)).await;
    set(&lab, AutoMode::On).await;
    source_is_asked(&lab.home, &web()).await;
    second.inside().down = true;
    lab.home.set_phase(&web(), MigrationPhase::Failed, VmStatus::Running);
    shows(&lab, "only the dead host's load to be not known", |shown| {
        matches!(&shown.not_known[..], [one] if one.host == second.id && one.why.contains("has not answered"))
    })
    .await;
    let moves = lab.cluster.index.migrations_of(&web());
    let states: Vec<MigrationState> = moves.iter().map(|one| one.migration.state).collect();
    assert_eq!(states, [MigrationState::Aborted]);
    let vm = vms::get(&lab.cluster, &web()).await.expect("the VM");
    assert_eq!((vm.status, vm.host.as_ref()), (VmState::Running, Some(&lab.home.id)));
}

#[tokio::test]
async fn of_two_controllers_only_the_one_that_the_hosts_obey_moves_a_vm() {
    let (lab, second_home) = starving(None).await;
    set(&lab, AutoMode::On).await;
    let copy = tempfile::tempdir().expect("a directory");
    copy_store(lab.dir.path(), copy.path());
    term::take_over(copy.path()).await.expect("told");
    let second = Supervisor::start(copy.path(), TIMING, Traffic::Plain).await.expect("the one");
    is_refused(&lab).await;
    links::probe_all(&second.cluster).await.expect("figures");
    report(&second_home, Some(0.0), None);
    source_is_asked(&lab.home, &web()).await;
    assert_eq!(second.cluster.index.migrations_of(&web()).len(), 1);
    assert!(lab.cluster.index.migrations_of(&web()).is_empty(), "the first one has decided too");
    second.stop().await;
}

#[tokio::test]
async fn a_vm_that_the_balancer_and_a_drain_want_elsewhere_moves_once() {
    let (lab, second) = starving(Some(0.0)).await;
    for host in [&lab.home, &second] {
        host.inside().pool_free_bytes = Some(1 << 40);
    }
    let (by, ask) = ("ann".to_owned(), DrainHost::default());
    let drained = drain::drain(&lab.cluster, &lab.home.id, by, ask);
    let (_, drained) = tokio::join!(set(&lab, AutoMode::On), drained);
    drained.expect("a drain");
    source_is_asked(&lab.home, &web()).await;
    arrives(&lab, &second).await;
    report(&second, Some(0.5), Some(&web()));
    wait_for("the host to be drained", async || {
        let host = hosts::info(&lab.cluster, &lab.home.id).await.ok()?;
        host.drain.filter(|drain| drain.is_drained()).map(drop)
    })
    .await;
    shows(&lab, "a look at known loads", |shown| {
        shown.looked_ms.is_some() && shown.not_known.is_empty()
    })
    .await;
    assert_eq!(lab.cluster.index.migrations_of(&web()).len(), 1);
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
    set(&lab, AutoMode::Off).await;
    let shown = set(&lab, AutoMode::On).await;
    assert_eq!(shown.looked_ms, None, "what another mode has shown is shown no longer");
    let shown =
        shows(&lab, "a look", |shown| shown.looked_ms.is_some() && shown.not_known.is_empty())
            .await;
    assert!(shown.vms.is_empty(), "{:?}", shown.vms);
}

#[tokio::test]
async fn a_vm_that_starves_does_not_go_to_one_from_which_it_is_kept_apart() {
    let (lab, second) = starving(Some(0.0)).await;
    let apart = || HostRules { apart: Some("db".parse().expect("a name")), ..Default::default() };
    let other = VmId::new("other").expect("a name");
    let start = Start::Host(second.id.clone());
    lab.make_vm(NewVm { name: other.clone(), start, rules: apart(), ..at_home1() }).await;
    wait_for("the other VM to run", async || {
        let record = lab.cluster.index.of_vm(&other)?;
        (record.job.state == JobState::Running).then_some(())
    })
    .await;
    report(&second, Some(0.5), Some(&other));
    vms::set::set(&lab.cluster, &web(), SetVm { rules: Some(apart()), ..SetVm::default() })
        .await
        .expect("they are at different hosts");
    set(&lab, AutoMode::Off).await;
    set(&lab, AutoMode::On).await;
    let shown =
        shows(&lab, "a look", |shown| shown.looked_ms.is_some() && shown.not_known.is_empty())
            .await;
    assert!(shown.vms.is_empty(), "{:?}", shown.vms);
    assert!(lab.cluster.index.migrations_of(&web()).is_empty());
}

#[tokio::test]
async fn a_mode_outlives_the_controller_and_is_of_a_site_that_has_a_host() {
    let mut lab = Lab::up().await;
    set(&lab, AutoMode::On).await;
    lab.restart_controller().await;
    assert_eq!(lab.cluster.balances.mode(&home()), AutoMode::On);
    let nowhere = SiteId::new("nowhere").expect("a name");
    let asked = balance::set_mode(&lab.cluster, &nowhere, SetBalance { mode: AutoMode::On });
    let refused: Problem = asked.await.expect_err("no host is there");
    assert!(refused.to_string().contains("perigee site list"), "{refused}");
    assert_eq!(balance::list(&lab.cluster).len(), hosts::sites(&lab.cluster).len());
}

pub(super) async fn standing(lab: &Lab, vm: &VmId) -> VmStanding {
    balance::explain::of_vm(&lab.cluster, vm).await.expect("a VM")
}

#[tokio::test]
async fn a_vm_with_move_never_is_weighed_and_stays_until_that_is_set_anew() {
    let (lab, _second) = starving_as(NewVm { may_migrate: false, ..at_home1() }, Some(0.0)).await;
    set(&lab, AutoMode::On).await;
    let shown =
        shows(&lab, "a look", |shown| shown.looked_ms.is_some() && shown.not_known.is_empty())
            .await;
    assert!(shown.vms.is_empty(), "{:?}", shown.vms);
    let of = standing(&lab, &web()).await;
    assert!(!of.may_migrate && of.next.contains("perigee vm set web --move auto"), "{of:?}");
    assert_eq!(of.figures.measured.expect("it was looked at").waited_cpus, Some(0.5));
    let ask = SetVm { may_migrate: Some(true), ..SetVm::default() };
    let vm = vms::set::set(&lab.cluster, &web(), ask).await.expect("set");
    assert_eq!(vm.may_migrate, Some(true));
    source_is_asked(&lab.home, &web()).await;
}

#[tokio::test]
async fn what_is_said_of_a_vm_has_its_accounts_and_then_its_move_and_the_surcharge() {
    let (mut lab, second) = starving(Some(0.0)).await;
    shows(&lab, "the advice", |shown| shown.vms.iter().any(|vm| vm.moves)).await;
    let of = standing(&lab, &web()).await;
    assert_eq!((of.mode, of.host.as_ref()), (Some(AutoMode::Advise), Some(&lab.home.id)));
    assert!(of.next.starts_with("would move home1 → home2: "), "{}", of.next);
    let best = &of.figures.targets[0];
    assert_eq!((&best.host, best.why_not.as_str()), (&second.id, ""));
    assert!(best.saved_s > 0.0 && best.needed_s == best.price_s, "{best:?}");
    assert_eq!(of.figures.price_factor, 1.0);

    set(&lab, AutoMode::On).await;
    source_is_asked(&lab.home, &web()).await;
    assert_eq!(standing(&lab, &web()).await.next, "it moves to home2 now");
    arrives(&lab, &second).await;
    let judged = async |lab: &Lab| {
        let of = standing(lab, &web()).await;
        of.figures.on_trial.clone().map(|trial| (of, trial))
    };
    let (of, trial) = wait_for("a look at home2", async || judged(&lab).await).await;
    assert_eq!(trial.from, lab.home.id);
    assert!(of.moves[0].reason.starts_with("moves home1 → home2: "), "{:?}", of.moves);
    assert!(of.figures.price_factor > 1.9, "{:?}", of.figures);
    lab.restart_controller().await;
    assert!(lab.cluster.balances.price_factor(&web()) > 1.9, "a restart forgets no move");
}

#[tokio::test]
async fn a_job_s_move_makes_its_next_one_dearer_and_a_restart_does_not_forget_that() {
    let (mut lab, id, vm) = moves_to_its_data().await;
    assert_eq!(lab.cluster.balances.price_factor(&vm), 1.0, "it has not come anywhere");
    switch(&lab, &vm);
    let at_cloud = |job: &Job| job.host.as_ref() == Some(&lab.cloud.id);
    lab.wait_for_job(&id, "at cloud1", at_cloud).await;
    wait_for("the surcharge", async || {
        (lab.cluster.balances.price_factor(&vm) > 1.9).then_some(())
    })
    .await;
    // Its record is written after that.
    wait_for("the record", async || {
        let cloud = SiteId::new("cloud").expect("a name");
        let record = lab.cluster.records.read::<BalanceRecord>(&balance_key(&cloud)).await;
        record.expect("the store").filter(|record| record.decided_ms > 0)
    })
    .await;
    lab.restart_controller().await;
    let record = lab.cluster.index.of_vm(&vm).expect("its record");
    let age = std::time::Duration::ZERO;
    let running = planning::running(&lab.cluster, &record, age).await.expect("facts");
    assert!(running.expect("it runs").price_factor > 1.9, "the planner has it");
}

#[tokio::test]
async fn a_new_vm_with_the_name_of_a_deleted_one_has_not_moved() {
    let mut lab = Lab::up().await;
    lab.make_vm(at_home1()).await;
    lab.runs().await;
    let hosts = (&lab.cloud.id, &lab.home.id);
    lab.cluster.note_change(&web(), hosts).await.expect("noted");
    assert!(lab.cluster.balances.price_factor(&web()) > 1.9);
    persistent::delete(&lab.cluster, &web(), true).await.expect("deleted");
    let id = "web".parse().expect("an id");
    wait_for("the VM to be forgotten", async || {
        jobs::erase_deleted(&lab.cluster).await.expect("the store answers");
        jobs::any_record(&lab.cluster, &id).await.is_err().then_some(())
    })
    .await;
    lab.make_vm(at_home1()).await;
    assert_eq!(lab.cluster.balances.price_factor(&web()), 1.0);
    lab.restart_controller().await;
    assert_eq!(lab.cluster.balances.price_factor(&web()), 1.0, "a restart remembers no old VM");
}

#[tokio::test]
async fn a_job_s_vm_does_not_go_back_by_itself_to_the_host_from_which_a_person_took_it() {
    let lab = Lab::up().await;
    let (id, vm) = running_as(&lab, spec(Access::Read)).await;
    vms::move_to(&lab.cluster, &vm, lab.cloud.id.clone(), VolumesOnMove::Stay)
        .await
        .expect("moves");
    source_is_asked(&lab.home, &vm).await;
    switch(&lab, &vm);
    let at_cloud = |job: &Job| job.host.as_ref() == Some(&lab.cloud.id);
    lab.wait_for_job(&id, "at cloud1", at_cloud).await;
    let record = lab.cluster.index.of_vm(&vm).expect("its record");
    let refused = by_itself::refused(&lab.cluster, &record, &vm);
    let back = refused.iter().find(|way| way.to == lab.home.id).expect("no way back");
    assert_eq!(back.why, TAKEN);
    assert_eq!(lab.cluster.balances.price_factor(&vm), 1.0, "what a person asks for has no price");
}

#[tokio::test]
async fn a_host_takes_part_in_one_move_that_nobody_has_asked_for() {
    let lab = Lab::up().await;
    let second = second_home(&lab).await;
    links::probe_all(&lab.cluster).await.expect("figures");
    let small = JobSpec { memory_bytes: 64 << 20, ..spec(Access::Read) };
    let (_, vm) = running_as(&lab, small).await;
    lab.make_vm(at_home1()).await;
    lab.runs().await;
    vms::move_to(&lab.cluster, &vm, lab.cloud.id.clone(), VolumesOnMove::Stay)
        .await
        .expect("moves");
    let record = lab.cluster.index.of_vm(&web()).expect("its record");
    let (from, to) = (&lab.home.id, &second.id);
    let begin = async |alone| {
        let reason = "a test".to_owned();
        let volumes = VolumesOnMove::Stay;
        let request = Request { to: to.clone(), reason, job_progress: None, volumes };
        by_itself::begin(&lab.cluster, &record, from, request, alone).await
    };
    let why = "host home1 takes part in another move";
    let waits = by_itself::waits_for(&lab.cluster, from, to, Alone::AtBoth);
    assert_eq!(waits.as_deref(), Some(why));
    let refused = begin(Alone::AtBoth).await.expect_err("home1 is in a move");
    assert_eq!(refused.why, why);
    // A drain empties its host whatever the loads are.
    begin(Alone::AtDestination).await.expect("nothing comes to home2");
}

/// Of the last minute, so that the host's other tasks do not have their memory back from its VMs.
fn waits_for_memory(host: &FakeHost) {
    let some = StalledTime { share_60s: 0.9, ..StalledTime::default() };
    host.inside().pressure.memory = Some(Pressure { some, full: None });
}

async fn next_look(lab: &Lab) {
    let before = lab.cluster.balances.shown(&home()).looked_ms;
    shows(lab, "the next look", |shown| shown.looked_ms != before).await;
}

/// Its guest was asked for the memory when it started, and has a minute to give that back.
#[tokio::test]
async fn nobody_moves_for_want_of_memory_that_a_guest_is_about_to_give_back() {
    const MIB: u64 = 1 << 20;
    let lab = Lab::up().await;
    let second = second_home(&lab).await;
    links::probe_all(&lab.cluster).await.expect("figures");
    let memory_max_bytes = Some(512 * MIB);
    lab.make_vm(NewVm { memory_bytes: 128 * MIB, memory_max_bytes, ..at_home1() }).await;
    lab.runs().await;
    report(&lab.home, Some(0.5), None);
    report(&second, Some(0.0), None);
    let has = |mib: u64| {
        let vcpus_1m = Some(VcpuUse { running_vcpus: 0.5, waiting_vcpus: 0.0 });
        let memory = Some(MemoryUse { has_bytes: mib * MIB, available_bytes: None });
        let mut home = lab.home.inside();
        let of = &mut home.vms.get_mut(&web()).expect("the VM").report;
        of.load = VmLoad { vcpus_1m, memory, ..VmLoad::default() };
    };
    has(512);
    wait_for("the memory to be awaited", async || {
        lab.cluster.amounts.gives_back(&lab.home.id).then_some(())
    })
    .await;
    waits_for_memory(&lab.home);
    wait_for("the controller to know that", async || {
        let report = lab.cluster.hosts.report(&lab.home.id)?;
        report.pressure.memory.map(drop)
    })
    .await;
    set(&lab, AutoMode::On).await;
    for _ in 0..3 {
        next_look(&lab).await;
    }
    let measured = standing(&lab, &web()).await.figures.measured.expect("it was looked at");
    assert_eq!(measured.host_memory_stalled, None, "what comes back is no reason");
    assert!(lab.cluster.index.migrations_of(&web()).is_empty());
    has(128);
    source_is_asked(&lab.home, &web()).await;
}
