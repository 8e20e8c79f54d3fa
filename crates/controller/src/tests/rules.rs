//! VMs that are kept together or apart, and sites that pack.

use perigee_model::balance::{PlacePolicy, SetPlace};
use perigee_model::drain::{DrainFate, DrainHost, DrainStep};
use perigee_model::guest::GuestBody;
use perigee_model::job::{Access, JobSpec, JobState, Start, Vm};
use perigee_model::persistent_vm::{NewVm, PowerRequest, SetVm, VmState};
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{HostId, HostRules, JobId, Problem, ProblemKind, SiteId, VmId};

use super::fake::FakeHost;
use super::gone::second_home;
use super::migrations::switch_to;
use super::persistent_vms::{new_vm, web};
use super::{Lab, finish, spec, vm_of, wait_for};
use crate::cluster::Index;
use crate::planning::links;
use crate::records::{JobIntent, job_intent_key};
use crate::{drain, hosts, jobs, vms};

fn apart() -> HostRules {
    HostRules { apart: Some("db".parse().expect("a name")), ..HostRules::default() }
}

fn together() -> HostRules {
    HostRules { together: Some("web".parse().expect("a name")), ..HostRules::default() }
}

/// A job without data that starts anywhere.
fn small(rules: HostRules) -> JobSpec {
    let (start, volumes) = (Start::Anywhere, Vec::new());
    JobSpec { start, volumes, memory_bytes: 128 << 20, rules, ..spec(Access::Read) }
}

fn lone(name: &str, start: Start, rules: HostRules) -> NewVm {
    let name = VmId::new(name).expect("a name");
    NewVm { name, start, rules, volumes: Vec::new(), ..new_vm("home1") }
}

fn at(host: &FakeHost) -> Start {
    Start::Host(host.id.clone())
}

/// Makes the VM, and returns the host at which it runs.
async fn runs(lab: &Lab, new: NewVm) -> HostId {
    let name = new.name.clone();
    lab.make_vm(new).await;
    wait_for("the VM to run", async || {
        let record = lab.cluster.index.of_vm(&name)?;
        record.job.host.clone().filter(|_| record.job.state == JobState::Running)
    })
    .await
}

async fn host_of(lab: &Lab, id: &JobId) -> HostId {
    let placed = lab.wait_for_job(id, "a host", |job| job.host.is_some()).await;
    placed.host.expect("it has one")
}

async fn give(lab: &Lab, vm: &VmId, rules: HostRules) -> Result<Vm, Problem> {
    vms::set::set(&lab.cluster, vm, SetVm { rules: Some(rules), ..SetVm::default() }).await
}

async fn is_moved(lab: &Lab, vm: &VmId, to: &FakeHost) -> Result<(), Problem> {
    vms::move_to(&lab.cluster, vm, to.id.clone(), VolumesOnMove::Stay).await.map(drop)
}

async fn drain_of(lab: &Lab, host: &FakeHost) {
    let by = "ann".to_owned();
    drain::drain(&lab.cluster, &host.id, by, DrainHost::default()).await.expect("a drain");
}

async fn left(lab: &Lab, host: &FakeHost, is: impl Fn(&[DrainStep]) -> bool) -> Vec<DrainStep> {
    wait_for("the drain", async || {
        let shown = hosts::info(&lab.cluster, &host.id).await.expect("the host").drain;
        shown?.left.filter(|left| is(left))
    })
    .await
}

#[tokio::test]
async fn jobs_that_are_kept_apart_start_at_different_hosts_and_the_next_one_waits_for_an_end() {
    let lab = Lab::up().await;
    let first = lab.submit(small(apart())).await;
    let second = lab.submit(small(apart())).await;
    let hosts = [host_of(&lab, &first).await, host_of(&lab, &second).await];
    assert_ne!(hosts[0], hosts[1]);
    let third = lab.submit(small(apart())).await;
    let why = format!("it is kept apart from {second} at cloud1, {first} at home1");
    let other = format!("it is kept apart from {first} at cloud1, {second} at home1");
    lab.wait_for_job(&third, "the reason", |job| {
        job.reason.contains(&why) || job.reason.contains(&other)
    })
    .await;
    let free = lab.submit(small(HostRules::default())).await;
    host_of(&lab, &free).await;
    let host = if hosts[0] == lab.home.id { &lab.home } else { &lab.cloud };
    lab.wait_for_vm(host, &vm_of(&first)).await;
    host.say(&vm_of(&first), GuestBody::Started);
    finish(host, host, &vm_of(&first));
    lab.wait_for_state(&first, JobState::Succeeded).await;
    assert_eq!(host_of(&lab, &third).await, hosts[0]);
}

#[tokio::test]
async fn a_job_with_several_vms_has_them_at_different_hosts_or_is_refused() {
    let lab = Lab::up().await;
    let gang = |count| JobSpec { name: "g".into(), count, ..small(apart()) };
    let refused = jobs::submit(&lab.cluster, gang(3)).await.expect_err("there are two hosts");
    assert!(refused.why.contains("one at each host"), "{refused}");
    let id = lab.submit(gang(2)).await;
    for rank in 0..2 {
        let member = vm_of(&perigee_model::gang::member_of(&id, rank));
        wait_for("its VM", async || {
            let all = [&lab.home, &lab.cloud];
            all.iter().any(|host| host.inside().vms.contains_key(&member)).then_some(())
        })
        .await;
    }
    assert_eq!((lab.home.inside().vms.len(), lab.cloud.inside().vms.len()), (1, 1));
}

#[tokio::test]
async fn vms_of_a_job_that_are_kept_together_are_at_one_host() {
    let lab = Lab::up().await;
    let id = lab.submit(JobSpec { name: "g".into(), count: 3, ..small(together()) }).await;
    let member = |rank| vm_of(&perigee_model::gang::member_of(&id, rank));
    wait_for("its VMs at one host", async || {
        let has_all =
            |host: &&FakeHost| (0..3).all(|rank| host.inside().vms.contains_key(&member(rank)));
        [&lab.home, &lab.cloud].into_iter().any(|host| has_all(&host)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_vm_is_not_moved_to_one_from_which_it_is_kept_apart_until_it_has_other_rules() {
    let lab = Lab::up().await;
    links::probe_all(&lab.cluster).await.expect("figures");
    runs(&lab, lone("web", at(&lab.home), apart())).await;
    runs(&lab, lone("other", at(&lab.cloud), apart())).await;
    let refused = is_moved(&lab, &web(), &lab.cloud).await.expect_err("other is there");
    assert_eq!(refused.kind, ProblemKind::Conflict);
    assert_eq!(refused.why, "other is there, and the VMs of group db are kept apart");
    assert!(refused.to_string().contains("perigee vm set web"), "{refused}");
    let shown = give(&lab, &web(), HostRules::default()).await.expect("other rules");
    assert_eq!(shown.rules, HostRules::default());
    is_moved(&lab, &web(), &lab.cloud).await.expect("it moves");
}

#[tokio::test]
async fn rules_that_the_driver_of_a_vm_has_not_recorded_hold_until_then() {
    let lab = Lab::up().await;
    links::probe_all(&lab.cluster).await.expect("figures");
    let other = VmId::new("other").expect("a name");
    runs(&lab, lone("web", at(&lab.home), HostRules::default())).await;
    runs(&lab, lone("other", at(&lab.cloud), apart())).await;
    let record = lab.cluster.index.of_vm(&web()).expect("its record");
    lab.cluster.index.keep_rules(&record, 1, &apart());
    let refused = is_moved(&lab, &web(), &lab.cloud).await.expect_err("other is there");
    assert!(refused.why.contains("other is there"), "{refused}");
    let refused = is_moved(&lab, &other, &lab.home).await.expect_err("web is there");
    assert!(refused.why.contains("web is there"), "{refused}");
    // This is the first request that its driver records.
    give(&lab, &web(), HostRules::default()).await.expect("other rules");
    is_moved(&lab, &web(), &lab.cloud).await.expect("it moves");
}

/// A started controller knew of rules that were just given only when the VM's driver had recorded them.
#[tokio::test]
async fn rules_that_were_asked_for_before_the_controller_started_hold_from_its_start() {
    let lab = Lab::up().await;
    runs(&lab, lone("web", at(&lab.home), HostRules::default())).await;
    let record = lab.cluster.index.of_vm(&web()).expect("its record");
    let asked = SetVm { rules: Some(apart()), ..SetVm::default() };
    let intent = |_| JobIntent { set: Some((1, asked.clone())), ..JobIntent::default() };
    lab.cluster.records.update(&job_intent_key(&record.job.id), intent).await.expect("stored");
    runs(&lab, lone("other", at(&lab.cloud), apart())).await;
    let index = Index::load(&lab.cluster.records).await.expect("the index");
    let other = index.of_vm(&VmId::new("other").expect("a name")).expect("its record");
    let bounds = index.bounds_of(&other, |_| true).expect("its rule");
    let why = bounds.why_not(&lab.home.id).expect("web is there");
    assert!(why.contains("web is there"), "{why}");
}

#[tokio::test]
async fn a_rule_that_does_not_hold_where_the_vm_is_is_refused_and_one_that_holds_outlives_the_controller()
 {
    let mut lab = Lab::up().await;
    runs(&lab, lone("web", at(&lab.home), HostRules::default())).await;
    runs(&lab, lone("other", at(&lab.home), apart())).await;
    let refused = give(&lab, &web(), apart()).await.expect_err("other is at the same host");
    let why = "it is at home1: other is there, and the VMs of group db are kept apart";
    assert_eq!((refused.kind, refused.why.as_str()), (ProblemKind::Conflict, why));
    give(&lab, &web(), together()).await.expect("it is the only one of the group");
    lab.restart_controller().await;
    let record = lab.cluster.index.of_vm(&web()).expect("its record");
    assert_eq!(record.job.spec.rules, together());
    lab.power(PowerRequest::Stop { force: true }).await;
    lab.vm_is(VmState::Stopped).await;
    give(&lab, &web(), apart()).await.expect("it is off");
    lab.power(PowerRequest::Start).await;
    wait_for("the reason", async || {
        let shown = vms::get(&lab.cluster, &web()).await.expect("the VM");
        shown.reason.contains("it is kept apart from other at home1").then_some(())
    })
    .await;
    give(&lab, &web(), HostRules::default()).await.expect("it waits");
    lab.vm_is(VmState::Running).await;
    let both = HostRules { together: Some("db".parse().expect("a name")), ..apart() };
    let refused = give(&lab, &web(), both).await.expect_err("they contradict each other");
    assert_eq!(refused.kind, ProblemKind::Invalid);
}

#[tokio::test]
async fn a_vm_starts_where_its_group_is_and_moves_nowhere_else() {
    let lab = Lab::up().await;
    links::probe_all(&lab.cluster).await.expect("figures");
    runs(&lab, lone("first", at(&lab.home), together())).await;
    // The other host is idle.
    assert_eq!(runs(&lab, lone("web", Start::Anywhere, together())).await, lab.home.id);
    let refused = is_moved(&lab, &web(), &lab.cloud).await.expect_err("first is at home1");
    assert_eq!(refused.why, "the VMs of group web are kept together: first at home1");
    lab.make_vm(lone("third", at(&lab.cloud), together())).await;
    wait_for("the reason", async || {
        let third = VmId::new("third").expect("a name");
        let shown = vms::get(&lab.cluster, &third).await.expect("the VM");
        shown.reason.contains("it is kept together with first at home1").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_drain_names_the_vm_that_a_rule_keeps_there() {
    let lab = Lab::up().await;
    for host in [&lab.home, &lab.cloud] {
        host.inside().pool_free_bytes = Some(1 << 40);
    }
    runs(&lab, lone("web", at(&lab.home), apart())).await;
    runs(&lab, lone("other", at(&lab.cloud), apart())).await;
    drain_of(&lab, &lab.home).await;
    let stays = |left: &[DrainStep]| {
        left.iter().any(|step| step.name == "web" && step.fate == DrainFate::Stays)
    };
    let named = left(&lab, &lab.home, stays).await;
    let step = named.iter().find(|step| step.name == "web").expect("it is named");
    assert_eq!(step.why, "cloud1: other is there, and the VMs of group db are kept apart");
    assert!(lab.cluster.index.migrations_of(&web()).is_empty());
}

#[tokio::test]
async fn a_group_that_is_kept_together_leaves_a_drained_host_for_one_other_host() {
    let lab = Lab::up().await;
    let second = second_home(&lab).await;
    for host in [&lab.home, &lab.cloud, &second] {
        host.inside().pool_free_bytes = Some(1 << 40);
    }
    links::probe_all(&lab.cluster).await.expect("figures");
    let names = ["a", "b"].map(|name| VmId::new(name).expect("a name"));
    for name in &names {
        runs(&lab, lone(name.as_str(), at(&lab.home), together())).await;
    }
    drain_of(&lab, &lab.home).await;
    let mut hosts = Vec::new();
    // One after the other.
    for _ in &names {
        let vm = wait_for("a VM to be asked to move", async || {
            let inside = lab.home.inside();
            let asked =
                names.iter().find(|vm| inside.vms.get(*vm).is_some_and(|vm| vm.asked.is_some()));
            asked.cloned()
        })
        .await;
        let moves = lab.cluster.index.migrations_of(&vm);
        let to = moves.last().expect("its move").migration.to.clone();
        let host = [&lab.cloud, &second].into_iter().find(|host| host.id == to).expect("a host");
        switch_to(&lab, host, &vm);
        wait_for("the VM to have left", async || {
            (!lab.home.inside().vms.contains_key(&vm)).then_some(())
        })
        .await;
        hosts.push(to);
    }
    assert_eq!(hosts[0], hosts[1]);
    left(&lab, &lab.home, <[DrainStep]>::is_empty).await;
}

fn site(name: &str) -> SiteId {
    SiteId::new(name).expect("a name")
}

async fn place(lab: &Lab, name: &str, place: PlacePolicy) -> Result<PlacePolicy, Problem> {
    let set = hosts::place::set(&lab.cluster, &site(name), SetPlace { place }).await;
    set.map(|shown| shown.place)
}

#[tokio::test]
async fn a_site_that_packs_fills_one_host_after_the_other_also_with_another_controller() {
    let mut lab = Lab::up().await;
    let _second = second_home(&lab).await;
    assert_eq!(place(&lab, "home", PlacePolicy::Pack).await.expect("a site"), PlacePolicy::Pack);
    lab.restart_controller().await;
    let shown = hosts::sites(&lab.cluster);
    let of = |name: &str| shown.iter().find(|one| one.id == site(name)).expect("a site").place;
    assert_eq!((of("home"), of("cloud")), (PlacePolicy::Pack, PlacePolicy::Spread));
    let at_home = || Start::Site(site("home"));
    let mut at = Vec::new();
    for name in ["a", "b", "c"] {
        at.push(runs(&lab, lone(name, at_home(), HostRules::default())).await);
    }
    assert!(at.iter().all(|host| *host == at[0]), "{at:?}");
    place(&lab, "home", PlacePolicy::Spread).await.expect("a site");
    assert_ne!(runs(&lab, lone("d", at_home(), HostRules::default())).await, at[0]);
    let refused = place(&lab, "nowhere", PlacePolicy::Pack).await.expect_err("no host is there");
    assert_eq!(refused.kind, ProblemKind::NotFound);
}

/// A lost VM would wait for the host that is lost.
#[tokio::test]
async fn a_vm_that_is_kept_together_with_one_at_a_lost_host_starts_elsewhere_when_its_host_is_lost()
{
    let lab = Lab::up().await;
    let restart = perigee_model::job::Restart::OnHostFailure;
    let there = lone("first", at(&lab.home), together());
    runs(&lab, there).await;
    let job = JobSpec { restart, ..small(together()) };
    let id = lab.submit(job).await;
    assert_eq!(host_of(&lab, &id).await, lab.home.id);
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    lab.home.say(&vm_of(&id), GuestBody::Started);
    lab.wait_for_state(&id, JobState::Running).await;
    super::queue::unreachable(&lab, &lab.home).await;
    let other = lab.cloud.id.clone();
    lab.wait_for_job(&id, "at the other host", |job| job.host.as_ref() == Some(&other)).await;
}
