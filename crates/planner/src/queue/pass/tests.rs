use perigee_model::job::Start;

use super::super::{Demand, HostRoom};
use super::*;
use crate::fixture::{MIB, cluster, history, host_id};
use crate::queue::{Holder, Waiting};

/// A job with one vCPU and its data at `cloud1`.
fn waiting(number: u64) -> Waiting {
    let job = JobId::new(format!("j-{number:04}")).unwrap();
    Waiting {
        holder: Holder::of(&job, "ann"),
        job,
        priority: 0,
        submitted: number,
        waited_ms: 0,
        demand: Demand { cpus: 1, memory_bytes: 512 * MIB },
        quota_cpus: 1,
        count: 1,
        start: Start::Anywhere,
        volumes: Vec::new(),
        avoid: BTreeSet::new(),
        groups: Default::default(),
        lost_at: Vec::new(),
        blocked: None,
    }
}

fn facts() -> Arc<Prepared> {
    let (job, history) = (crate::fixture::job(), history(2500.0));
    Arc::new(Prepared { job, history, others: Vec::new() })
}

fn read(age_s: f64) -> Option<Read> {
    Some(Read { age_s, homes_changed: false, facts: Ok(facts()) })
}

/// So many jobs whose facts have just been read, and three hosts with room for all of them.
fn snapshot(jobs: u64) -> PassSnapshot {
    let cluster = cluster();
    let total = Demand { cpus: 64, memory_bytes: 64 * 1024 * MIB };
    let room = |host: &crate::HostFacts| HostRoom {
        id: host.id.clone(),
        site: host.site.clone(),
        total,
        free: total,
        persistent: Demand::default(),
        start_slots: 64,
    };
    let hosts = cluster.hosts.iter().map(room).collect();
    let waiting: Vec<Waiting> = (1..=jobs).map(waiting).collect();
    let known = waiting.iter().map(|waiting| {
        let homes = vec![host_id("cloud1")];
        (waiting.job.clone(), Known { homes, read: read(1.0), ..Known::default() })
    });
    let known = known.collect();
    let queue = Queue { hosts, waiting, ..Queue::default() };
    PassSnapshot { queue, cluster, known, ..PassSnapshot::default() }
}

fn known(snapshot: &mut PassSnapshot, number: u64) -> &mut Known {
    snapshot.known.get_mut(&waiting(number).job).expect("such a job")
}

fn started(decision: &PassDecision) -> Vec<(&str, Vec<&str>)> {
    let grants = decision.grants.iter();
    grants.map(|g| (g.job.as_str(), g.hosts.iter().map(HostId::as_str).collect())).collect()
}

fn why(decision: &PassDecision, number: u64) -> &str {
    &decision.waits.get(&waiting(number).job).expect("it waits").1
}

#[test]
fn each_job_is_planned_as_if_those_before_it_ran() {
    let mut snapshot = snapshot(3);
    // Its data are hardly read, so that any idle host is better than a busy one.
    let idle = Prepared { history: history(1.0), ..facts().as_ref().clone() };
    for number in 1..=3 {
        let facts = Ok(Arc::new(idle.clone()));
        known(&mut snapshot, number).read = Some(Read { age_s: 1.0, homes_changed: false, facts });
    }
    snapshot.cluster.hosts.iter_mut().for_each(|host| host.cpus = 1);
    let decision = pass(snapshot);
    let mut hosts: Vec<&str> = started(&decision).into_iter().flat_map(|(_, at)| at).collect();
    hosts.sort_unstable();
    assert_eq!(hosts, ["cloud1", "home1", "home2"]);
    assert!(decision.grants.iter().all(|grant| grant.plan.chosen().is_some()));
    assert!(decision.waits.is_empty() && decision.measure.is_empty());
}

#[test]
fn room_is_kept_for_a_job_while_its_facts_are_read() {
    let mut one = snapshot(2);
    known(&mut one, 1).read = None;
    one.queue.hosts.retain(|room| room.id.as_str() == "cloud1");
    one.queue.hosts[0].start_slots = 1;
    let decision = pass(one);
    assert_eq!(decision.read, [waiting(1).job]);
    assert_eq!(why(&decision, 1), "the facts for its plan are being read");
    assert!(decision.grants.is_empty(), "the only slot is the first one's");
    // Whoever is asked has not answered for a while.
    let mut late = snapshot(2);
    *known(&mut late, 1) = Known { asked_s: Some(6.0), read: None, ..Known::default() };
    let decision = pass(late);
    assert_eq!(decision.read, [] as [JobId; 0]);
    assert_eq!(started(&decision), [("j-0002", vec!["cloud1"])]);
}

#[test]
fn a_home_is_asked_about_few_jobs_at_once() {
    let mut many = snapshot(20);
    many.known.values_mut().for_each(|known| known.read = None);
    known(&mut many, 20).asked_s = Some(1.0);
    let decision = pass(many);
    assert_eq!(decision.read.len(), 7, "{:?}", decision.read);
}

#[test]
fn old_facts_are_read_again_and_very_old_ones_are_not_planned_with() {
    for (age_s, homes_changed, is_read, is_planned) in [
        (1.0, false, false, true),
        (61.0, false, true, true),
        (121.0, false, true, false),
        (1.0, true, true, false),
    ] {
        let mut one = snapshot(1);
        let facts = Ok(facts());
        known(&mut one, 1).read = Some(Read { age_s, homes_changed, facts });
        let decision = pass(one);
        assert_eq!(decision.read.len(), usize::from(is_read), "{age_s} s");
        assert_eq!(decision.grants.len(), usize::from(is_planned), "{age_s} s");
    }
}

#[test]
fn a_job_whose_facts_cannot_be_read_waits_for_that_and_is_tried_again() {
    for (age_s, is_read) in [(1.0, false), (3.0, true)] {
        let mut one = snapshot(1);
        let facts = Err("can't reach cloud1: it is asleep".to_owned());
        known(&mut one, 1).read = Some(Read { age_s, homes_changed: false, facts });
        let decision = pass(one);
        assert_eq!(why(&decision, 1), "can't reach cloud1: it is asleep");
        assert_eq!(decision.read.len(), usize::from(is_read));
    }
}

#[test]
fn links_are_waited_for_and_not_for_ever() {
    let not_measured = NotMeasured {
        at: vec![host_id("cloud1"), host_id("home2")],
        between: vec![(host_id("home1"), host_id("cloud1")), (host_id("home1"), host_id("home2"))],
    };
    let with = |waits_for_links_s| {
        let mut one = snapshot(1);
        one.not_measured = not_measured.clone();
        known(&mut one, 1).waits_for_links_s = waits_for_links_s;
        pass(one)
    };
    let needed = [(host_id("cloud1"), host_id("cloud1")), (host_id("home1"), host_id("cloud1"))];
    let begun = with(None);
    // It comes soon, so that the links are asked for too because of that.
    assert_eq!(begun.measure, [needed.clone(), needed.clone()].concat());
    assert_eq!(begun.wait_for_links, [(waiting(1).job, true)].into());
    assert_eq!(why(&begun, 1), "the link between cloud1 and cloud1 is being measured");
    assert_eq!(with(Some(59.0)).grants.len(), 0);
    assert_eq!(with(Some(61.0)).grants.len(), 1);
}

/// The facts say less than the queue: each host has memory for one VM.
#[test]
fn a_gang_of_which_one_vm_cannot_be_planned_takes_nothing() {
    let mut one = snapshot(2);
    one.queue.waiting[0].count = 2;
    one.cluster.hosts.iter_mut().for_each(|host| host.memory_free_bytes = 600 * MIB);
    let decision = pass(one);
    assert!(why(&decision, 1).contains("512 MiB of memory"), "{}", why(&decision, 1));
    assert_eq!(started(&decision), [("j-0002", vec!["cloud1"])]);
}

#[test]
fn a_gang_has_the_plan_of_its_first_vm() {
    let mut one = snapshot(1);
    one.queue.waiting[0].count = 2;
    let decision = pass(one);
    assert_eq!(started(&decision), [("j-0001", vec!["cloud1", "cloud1"])]);
    let grant = &decision.grants[0];
    assert_eq!(grant.plan.chosen().map(|option| option.total), Some(grant.predicted));
}

/// The host of their data is not up.
#[test]
fn refused_plans_take_turns() {
    let without_home = || {
        let mut many = snapshot(300);
        many.cluster.hosts.retain(|host| host.id.as_str() != "cloud1");
        many
    };
    let first = pass(without_home());
    assert!(first.refusals.has_put_off());
    assert!(why(&first, 1).contains("is not up"), "{}", why(&first, 1));
    assert!(why(&first, 300).contains("many others are before it"), "{}", why(&first, 300));
    let second = pass(PassSnapshot { refusals: first.refusals, ..without_home() });
    assert!(why(&second, 300).contains("is not up"), "{}", why(&second, 300));
    assert!(why(&second, 1).contains("is not up"), "{}", why(&second, 1));
}

#[test]
fn a_job_that_can_t_start_at_the_rented_host_where_it_was_put_is_named_with_it() {
    let goes = |start_s| crate::queue::Goes {
        host: host_id("home1"),
        start_s,
        is_starting: start_s > 1.0,
    };
    let put_there = |start_s| {
        let mut one = snapshot(1);
        one.queue.rented = Arc::new(Rented {
            hosts: [host_id("home1")].into(),
            goes: [(waiting(1).job, goes(start_s))].into(),
        });
        one.queue.hosts.retain(|host| host.id.as_str() == "home1");
        one
    };
    assert!(pass(put_there(0.0)).not_at.is_empty(), "it starts there");
    let there = || [(waiting(1).job, host_id("home1"))].into();
    let mut refused = put_there(0.0);
    // The host of its data is not up.
    refused.cluster.hosts.retain(|host| host.id.as_str() != "cloud1");
    assert_eq!(pass(refused).not_at, there());
    // The host is still starting, or is there.
    for start_s in [90.0, 0.0] {
        let mut avoids = put_there(start_s);
        avoids.queue.waiting[0].avoid = [host_id("home1")].into();
        assert_eq!(pass(avoids).not_at, there());
    }
    let mut unread = put_there(0.0);
    known(&mut unread, 1).read = None;
    assert!(pass(unread).not_at.is_empty(), "its plan is not made yet");
}

#[test]
fn the_same_snapshot_gives_the_same_decision() {
    let decided = || {
        let decision = pass(snapshot(8));
        let started: Vec<String> =
            started(&decision).iter().map(|one| format!("{one:?}")).collect();
        (started, decision.waits, decision.read)
    };
    assert_eq!(decided(), decided());
}

/// A gang of two VMs with facts about each of them.
fn gang_of_two() -> PassSnapshot {
    let mut one = snapshot(1);
    one.queue.waiting[0].count = 2;
    let mut facts = facts().as_ref().clone();
    let volumes = vec![vec![0]; 2];
    let gang =
        crate::gangs::GangFacts { volumes, vcpus_per_cpu: 64, least_cpus: 1, ..Default::default() };
    facts.job.gang = Some(Arc::new(gang));
    let facts = Ok(Arc::new(facts));
    known(&mut one, 1).read = Some(Read { age_s: 1.0, homes_changed: false, facts });
    one
}

#[test]
fn the_vms_of_a_gang_start_where_the_plan_of_all_of_them_says() {
    let decision = pass(gang_of_two());
    let grant = &decision.grants[0];
    let option = grant.plan.chosen().expect("a choice");
    assert_eq!((option.hosts.len(), &option.hosts), (2, &grant.hosts));
    assert_eq!(grant.predicted, option.total);
}

/// The queue knows more of the rooms than the plan.
#[test]
fn a_gang_whose_planned_host_is_full_starts_elsewhere_and_its_plan_says_so() {
    let mut tight = gang_of_two();
    for room in &mut tight.queue.hosts {
        let holds = if room.id.as_str() == "home1" { 0 } else { 1 };
        room.free = Demand { cpus: holds, memory_bytes: u64::from(holds) * 512 * MIB };
        room.total = room.free;
    }
    let decision = pass(tight);
    let grant = &decision.grants[0];
    let mut hosts: Vec<&str> = grant.hosts.iter().map(HostId::as_str).collect();
    hosts.sort_unstable();
    assert_eq!(hosts, ["cloud1", "home2"]);
    let says = |figure: &String| figure.ends_with("where there was room");
    assert!(grant.plan.figures.iter().any(says), "{:?}", grant.plan.figures);
}

/// A gang pays for all of its VMs; what starts in this pass counts for the next ones.
#[test]
fn what_jobs_cost_that_start_together_stays_within_the_month_s_budget() {
    use perigee_model::tenant::Quota;

    use crate::queue::QuotaUse;

    let mut snapshot = snapshot(5);
    snapshot
        .cluster
        .hosts
        .iter_mut()
        .for_each(|host| host.price = Some(crate::fixture::price(3_600_000)));
    let mut paid = facts().as_ref().clone();
    paid.job.may_migrate = false;
    paid.job.money.disk_bytes = Some(1 << 30);
    let only_cloud = |waiting: &mut Waiting| waiting.start = Start::Host(host_id("cloud1"));
    paid.job.start = Start::Host(host_id("cloud1"));
    for number in 1..=5 {
        let facts = Ok(Arc::new(paid.clone()));
        known(&mut snapshot, number).read = Some(Read { age_s: 1.0, homes_changed: false, facts });
    }
    snapshot.queue.waiting.iter_mut().for_each(only_cloud);
    let mut alone = snapshot.clone();
    alone.queue.waiting.truncate(1);
    let one = pass(alone).grants[0].cost.expect("a cost").high;
    snapshot.queue.waiting[0].count = 2;
    // Later VMs take a little longer at a host that is busier: there is room for three, and not for four.
    let budget_month = Some(one.of(7, 2));
    let quota = Quota { budget_month, ..Quota::default() };
    let of = QuotaUse { quota, ..QuotaUse::default() };
    snapshot.queue.quotas = [("default".to_owned(), of)].into();
    let decision = pass(snapshot);
    let sum: Money = decision.grants.iter().filter_map(|grant| Some(grant.cost?.high)).sum();
    assert!(Some(sum) <= budget_month, "{sum}");
    let vms: usize = decision.grants.iter().map(|grant| grant.hosts.len()).sum();
    assert!((2..=3).contains(&vms) && decision.grants[0].hosts.len() == 2, "{vms}");
    let gang = decision.grants[0].cost.expect("a cost").high;
    assert!(gang >= one.plus(one), "{gang} for two, {one} for one");
    assert!(
        why(&decision, 5).contains("for this month $0 are spent and $0"),
        "{}",
        why(&decision, 5)
    );
}

/// A gang of two VMs, where all hosts cost money.
fn paid_gang(vcpus_per_cpu: u32) -> PassSnapshot {
    let mut one = snapshot(1);
    one.queue.waiting[0].count = 2;
    let hosts = one.cluster.hosts.iter_mut();
    hosts.for_each(|host| host.price = Some(crate::fixture::price(3_600_000)));
    let mut facts = facts().as_ref().clone();
    facts.job.may_migrate = false;
    facts.job.money.disk_bytes = Some(1 << 30);
    let volumes = vec![vec![0]; 2];
    let gang =
        crate::gangs::GangFacts { volumes, vcpus_per_cpu, least_cpus: 1, ..Default::default() };
    facts.job.gang = Some(Arc::new(gang));
    let facts = Ok(Arc::new(facts));
    known(&mut one, 1).read = Some(Read { age_s: 1.0, homes_changed: false, facts });
    one
}

/// By its own facts no host has vCPUs for one of its VMs, so there is no plan of all of them.
#[test]
fn a_gang_that_is_placed_one_by_one_pays_for_each_of_its_vms() {
    let mut alone = paid_gang(0);
    alone.queue.waiting[0].count = 1;
    let one = pass(alone).grants[0].cost.expect("a cost").high;
    let decision = pass(paid_gang(0));
    let grant = &decision.grants[0];
    assert!(grant.plan.chosen().is_some_and(|option| option.hosts.is_empty()));
    let cost = grant.cost.expect("a cost").high;
    assert!(cost >= one.plus(one), "{cost} for two, {one} for one");
}

#[test]
fn a_gang_whose_plan_is_paid_is_not_charged_again_when_a_vm_goes_elsewhere() {
    use perigee_model::tenant::Quota;

    use crate::queue::QuotaUse;

    let tight = || {
        let mut tight = paid_gang(64);
        for room in &mut tight.queue.hosts {
            let holds = if room.id.as_str() == "home1" { 0 } else { 1 };
            room.free = Demand { cpus: holds, memory_bytes: u64::from(holds) * 512 * MIB };
            room.total = room.free;
        }
        tight
    };
    let cost = pass(tight()).grants[0].cost.expect("a cost").high;
    let mut just = tight();
    let quota = Quota { budget_month: Some(cost), ..Quota::default() };
    let of = QuotaUse { quota, ..QuotaUse::default() };
    just.queue.quotas = [("default".to_owned(), of)].into();
    let decision = pass(just);
    assert_eq!(decision.grants.len(), 1, "{:?}", decision.waits);
    assert_eq!(decision.grants[0].cost.expect("a cost").high, cost);
}
