//! Hosts that the cluster has rented by itself.

use std::sync::Arc;

use super::*;

fn goes(number: u64, host: &str, start_s: f64) -> (JobId, Goes) {
    let goes = Goes { host: host_id(host), start_s, is_starting: start_s > 1.0 };
    (job(number, "ann", 1).job, goes)
}

/// An own host and a rented one, each with room for so many jobs of one CPU.
fn queue(own: u32, rented: u32, waiting: Vec<Waiting>, all: Vec<(JobId, Goes)>) -> Queue {
    let hosts = vec![room("own1", own, 4096), room("rent1", rented, 4096)];
    let hosts_of_rule = [host_id("rent1")].into();
    let rented = Arc::new(Rented { hosts: hosts_of_rule, goes: all.into_iter().collect() });
    Queue { hosts, waiting, rented, ..Queue::default() }
}

fn turn(turns: &[(JobId, Turn)], number: u64) -> &Turn {
    let id = job(number, "ann", 1).job;
    &turns.iter().find(|(job, _)| *job == id).unwrap().1
}

#[test]
fn a_job_that_the_rule_has_not_put_there_starts_at_no_rented_host_unless_its_file_names_it() {
    let named = Waiting { start: Start::Host(host_id("rent1")), ..job(3, "ann", 1) };
    let waiting = vec![job(1, "ann", 1), job(2, "ann", 1), named];
    let turns = schedule(&queue(1, 4, waiting, Vec::new()), first);
    assert_eq!(*turn(&turns, 1), Turn::Start(host_id("own1")));
    assert!(matches!(turn(&turns, 2), Turn::Wait { for_room: true, .. }), "{turns:?}");
    assert_eq!(*turn(&turns, 3), Turn::Start(host_id("rent1")));
}

#[test]
fn a_job_that_the_rule_has_put_there_leaves_the_own_hosts_to_others() {
    let waiting = vec![job(1, "ann", 1), job(2, "ann", 1)];
    let turns = schedule(&queue(1, 4, waiting, vec![goes(1, "rent1", 0.0)]), first);
    assert_eq!(*turn(&turns, 1), Turn::Start(host_id("rent1")));
    assert_eq!(*turn(&turns, 2), Turn::Start(host_id("own1")));
}

#[test]
fn a_job_that_waits_for_a_starting_host_names_it_and_goes_nowhere_else() {
    let waiting = vec![job(1, "ann", 1), job(2, "ann", 1)];
    let mut queue = queue(1, 4, waiting, vec![goes(1, "rent1", 90.0)]);
    queue.hosts.pop();
    let turns = schedule(&queue, first);
    let Turn::Wait { reason, for_room: true, .. } = turn(&turns, 1) else { panic!("{turns:?}") };
    assert!(reason.contains("rent1 is starting for it"), "{reason}");
    assert_eq!(*turn(&turns, 2), Turn::Start(host_id("own1")));
}

#[test]
fn a_job_whose_plan_is_refused_at_the_rented_host_starts_at_an_own_one() {
    let queue = queue(1, 4, vec![job(1, "ann", 1)], vec![goes(1, "rent1", 0.0)]);
    let turns = schedule(&queue, |_, hosts| match hosts[0].as_str() {
        "rent1" => Err(NotChosen::Refused("over its budget".to_owned())),
        _ => Ok(hosts[0].clone()),
    });
    assert_eq!(*turn(&turns, 1), Turn::Start(host_id("own1")));
}

#[test]
fn a_job_that_may_not_go_where_the_rule_has_put_it_starts_at_an_own_host() {
    let avoids = Waiting { avoid: [host_id("rent1")].into(), ..job(1, "ann", 1) };
    let rules = perigee_model::HostRules { together: None, apart: Some("web".parse().unwrap()) };
    let groups = Groups::of("j-0001", &rules);
    let apart = Waiting { groups: groups.clone(), ..job(1, "ann", 1) };
    let mut grouped = Grouped::default();
    grouped.add(&job(9, "ann", 1).job, &groups, &host_id("rent1"));
    // The host is still starting, or is there.
    for start_s in [90.0, 0.0] {
        for waiting in [avoids.clone(), apart.clone()] {
            let queue = queue(1, 4, vec![waiting], vec![goes(1, "rent1", start_s)]);
            let queue = Queue { grouped: grouped.clone(), ..queue };
            assert_eq!(*turn(&schedule(&queue, first), 1), Turn::Start(host_id("own1")));
        }
    }
}

#[test]
fn a_job_without_room_at_the_rented_host_starts_at_an_own_one_and_reserves_none() {
    let waiting = vec![job(1, "ann", 2), job(2, "ann", 1)];
    let all = vec![goes(1, "rent1", 0.0), goes(2, "rent1", 0.0)];
    let mut queue = queue(2, 2, waiting, all);
    queue.hosts[1].free.cpus = 1;
    let turns = schedule(&queue, first);
    assert_eq!(*turn(&turns, 1), Turn::Start(host_id("own1")));
    assert_eq!(*turn(&turns, 2), Turn::Start(host_id("rent1")));
    queue.hosts.pop();
    let turns = schedule(&queue, first);
    assert_eq!(*turn(&turns, 1), Turn::Start(host_id("own1")), "it does not answer");
}

#[test]
fn a_job_that_waits_for_something_else_than_room_is_no_reason_to_rent() {
    let blocked = Waiting { blocked: Some("its data".to_owned()), ..job(1, "ann", 1) };
    let refused = |_: &Waiting, _: &[HostId]| Err(NotChosen::Refused("no".to_owned()));
    let turns = schedule(&queue(4, 4, vec![blocked, job(2, "ann", 1)], Vec::new()), refused);
    for number in [1, 2] {
        assert!(matches!(turn(&turns, number), Turn::Wait { for_room: false, .. }), "{turns:?}");
    }
}
