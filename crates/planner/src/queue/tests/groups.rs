//! Rules of VMs about each other, as the queue keeps them.

use perigee_model::HostRules;
use proptest::prelude::*;

use super::*;

fn ruled(together: Option<&str>, apart: Option<&str>, job: Waiting) -> Waiting {
    let group = |name: &str| name.parse().unwrap();
    let rules = HostRules { together: together.map(group), apart: apart.map(group) };
    Waiting { groups: Groups::of(job.job.as_str(), &rules), ..job }
}

fn apart(job: Waiting) -> Waiting {
    ruled(None, Some("db"), job)
}

fn together(job: Waiting) -> Waiting {
    ruled(Some("web"), None, job)
}

/// Where these jobs are already.
fn placed(jobs: &[(&Waiting, &str)]) -> Grouped {
    let mut grouped = Grouped::default();
    jobs.iter().for_each(|(one, host)| grouped.add(&one.job, &one.groups, &host_id(host)));
    grouped
}

fn queue(hosts: &[&str], waiting: Vec<Waiting>, grouped: Grouped) -> Queue {
    let hosts = hosts.iter().map(|host| room(host, 8, 8192)).collect();
    Queue { hosts, waiting, grouped, ..Queue::default() }
}

#[test]
fn jobs_that_are_kept_apart_start_at_different_hosts_in_one_pass_and_the_last_one_waits() {
    let waiting = (1..=3).map(|number| apart(job(number, "ann", 1))).collect();
    let turns = schedule(&queue(&["h1", "h2"], waiting, Grouped::default()), first);
    assert_eq!((hosts_of(&turns, 1), hosts_of(&turns, 2)), (vec!["h1"], vec!["h2"]));
    assert_eq!(
        reason(&turns, "j-0003"),
        "no host that is up may have it beside the VMs that are there; it is kept apart from j-0001 at h1, j-0002 at h2"
    );
}

#[test]
fn a_job_without_the_rule_starts_beside_those_that_have_it() {
    let there = apart(job(1, "ann", 1));
    let grouped = placed(&[(&there, "h1")]);
    let turns = schedule(&queue(&["h1"], vec![job(2, "ann", 1)], grouped), first);
    assert_eq!(hosts_of(&turns, 2), ["h1"]);
}

#[test]
fn a_job_that_waits_for_room_says_where_it_may_not_start() {
    let there = apart(job(1, "ann", 1));
    let mut queue = queue(&["h1", "h2"], vec![apart(job(2, "ann", 1))], placed(&[(&there, "h1")]));
    queue.hosts[1].free = Demand::default();
    let turns = schedule(&queue, first);
    let why = reason(&turns, "j-0002");
    assert!(why.contains("the most that is free is 0 CPUs"), "{why}");
    assert!(why.ends_with("reserved for it; it is kept apart from j-0001 at h1"), "{why}");
}

#[test]
fn jobs_that_are_kept_together_start_where_the_first_one_is_also_if_another_host_is_freer() {
    let waiting = (1..=3).map(|number| together(job(number, "ann", 3))).collect();
    let last = |_: &Waiting, hosts: &[HostId]| Ok(hosts[hosts.len() - 1].clone());
    let turns = schedule(&queue(&["h1", "h2"], waiting, Grouped::default()), last);
    assert_eq!((hosts_of(&turns, 1), hosts_of(&turns, 2)), (vec!["h2"], vec!["h2"]));
    let why = reason(&turns, "j-0003");
    assert!(why.contains("the most that is free is 2 CPUs"), "{why}");
    assert!(why.ends_with("it is kept together with j-0001 at h2"), "{why}");
}

#[test]
fn a_drained_host_and_the_one_at_which_a_job_was_lost_bind_it_no_longer() {
    let there = together(job(1, "ann", 1));
    let waits = || together(job(2, "ann", 1));
    let grouped = || placed(&[(&there, "h1")]);
    let drained =
        Queue { drained: vec![room("h1", 8, 8192)], ..queue(&["h2"], vec![waits()], grouped()) };
    assert_eq!(hosts_of(&schedule(&drained, first), 2), ["h2"]);
    let silent = queue(&["h2"], vec![waits()], grouped());
    let turns = schedule(&silent, first);
    assert!(hosts_of(&turns, 2).is_empty(), "its group may run there");
    assert!(reason(&turns, "j-0002").ends_with("it is kept together with j-0001 at h1"));
    let lost = Waiting { lost_at: vec![host_id("h1")], ..waits() };
    assert_eq!(hosts_of(&schedule(&queue(&["h2"], vec![lost], grouped()), first), 2), ["h2"]);
}

#[test]
fn a_gang_that_is_kept_apart_has_one_vm_at_each_host() {
    let hosts = ["h1", "h2", "h3"];
    let other = apart(job(1, "ann", 1));
    let start =
        |count, grouped| schedule(&queue(&hosts, vec![apart(gang(2, count, 1))], grouped), first);
    assert_eq!(hosts_of(&start(3, Grouped::default()), 2), hosts);
    assert_eq!(hosts_of(&start(2, placed(&[(&other, "h1")])), 2), ["h2", "h3"]);
    let turns = start(4, Grouped::default());
    let why = reason(&turns, "j-0002");
    assert!(why.contains("one at each host") && why.contains("room for 3 at most"), "{why}");
}

#[test]
fn a_gang_that_is_kept_together_is_at_one_host_or_waits() {
    let start = |count| {
        let mut queue = queue(&["h1", "h2"], vec![together(gang(1, count, 2))], Grouped::default());
        queue.hosts[0].free.cpus = 5;
        schedule(&queue, first)
    };
    assert_eq!(hosts_of(&start(3), 1), ["h2"; 3]);
    let turns = start(5);
    let why = reason(&turns, "j-0001");
    assert!(why.starts_with("it needs 10 CPUs") && why.contains("the largest host is"), "{why}");
}

/// The rules of a job, by the numbers of its groups; beyond them it has none.
fn with_rules(rules: (usize, usize), job: Waiting) -> Waiting {
    let group = |number: usize| ["a", "b"].get(number).copied();
    let (mut own, other) = (group(rules.0), group(rules.1));
    if own == other || job.count > 1 && other.is_some() {
        own = None;
    }
    ruled(own, other, job)
}

proptest! {
    /// Whatever waits, and whatever has started before: no host gets two VMs of a group that is kept apart, and a group that is kept
    /// together comes to one host.
    #[test]
    fn no_start_breaks_a_rule(
        sizes in proptest::collection::vec(1u32..8, 1..6),
        jobs in proptest::collection::vec((1u32..3, 1u32..4, (0usize..4, 0usize..4)), 1..30),
        choices in proptest::collection::vec(0usize..6, 100),
        passes in 1usize..4,
    ) {
        let hosts: Vec<HostRoom> = sizes.iter().enumerate()
            .map(|(index, cpus)| room(&format!("h{index}"), *cpus, 8192)).collect();
        let mut left: Vec<Waiting> = jobs.into_iter().zip(1u64..)
            .map(|((cpus, count, rules), number)| with_rules(rules, Waiting { count, ..job(number, "ann", cpus) }))
            .collect();
        let mut there: Vec<(Waiting, HostId)> = Vec::new();
        let mut choices = choices.into_iter().cycle();
        for pass in 1..=passes {
            // More jobs wait in each pass.
            let rest = left.split_off(left.len() * pass / passes);
            let mut free = hosts.clone();
            let mut grouped = Grouped::default();
            for (one, at) in &there {
                grouped.add(&one.job, &one.groups, at);
                free.iter_mut().find(|host| host.id == *at).unwrap().free.take(one.demand);
            }
            let queue = Queue { hosts: free, waiting: left, grouped, ..Queue::default() };
            let turns: BTreeMap<JobId, Turn> = schedule(&queue, |_, hosts| {
                Ok(hosts[choices.next().unwrap() % hosts.len()].clone())
            }).into_iter().collect();
            left = rest;
            for one in queue.waiting {
                match &turns[&one.job] {
                    Turn::Start(host) => there.push((one, host.clone())),
                    Turn::StartAll(all) => there.extend(all.iter().map(|host| (one.clone(), host.clone()))),
                    Turn::Wait { .. } => left.push(one),
                }
            }
            for (index, (one, at)) in there.iter().enumerate() {
                for (other, host) in &there[index + 1..] {
                    let is_of = |one: &Option<String>, other: &Option<String>| one.is_some() && one == other;
                    prop_assert!(at != host || !is_of(&one.groups.apart, &other.groups.apart));
                    prop_assert!(at == host || !is_of(&one.groups.together, &other.groups.together));
                }
            }
            for host in &hosts {
                let cpus: u32 = there.iter().filter(|(_, at)| *at == host.id).map(|(one, _)| one.demand.cpus).sum();
                prop_assert!(cpus <= host.total.cpus);
            }
        }
    }
}
