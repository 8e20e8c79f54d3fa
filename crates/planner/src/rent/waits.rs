//! When a job could start at each host that is there, if nothing is rented.

use std::collections::BTreeSet;

use perigee_model::HostId;

use super::drain::{Drained, Drains, Place};
use super::{Job, NEVER_S, Snapshot};

/// Of each host where the job can run: in how many seconds it would start there if all jobs of the snapshot come before it. `None`: a job
/// that runs there, or comes before it there, ends nobody knows when ([`NEVER_S`] stands for that in the snapshot).
#[must_use]
pub fn waits(snapshot: &Snapshot, job: &Job) -> Vec<(HostId, Option<f64>)> {
    let starts = |place: &Place| {
        let host = &snapshot.hosts[place.host?].host;
        Some((host.clone(), known(place.starts_s(job)?)))
    };
    drained(snapshot).places.iter().filter_map(starts).collect()
}

/// The same of a job with so many VMs, which all start when all have room: at all hosts of a scope together, with at most so many at each if
/// that is limited. A scope where they never have room has no time.
#[must_use]
pub fn waits_for_all(
    snapshot: &Snapshot,
    job: &Job,
    (count, most_each): (u32, Option<u32>),
    scopes: &[BTreeSet<HostId>],
) -> Vec<(HostId, Option<f64>)> {
    let drained = drained(snapshot);
    let most_each = most_each.map_or(usize::MAX, |most| most as usize);
    let mut waits = Vec::new();
    for scope in scopes {
        let is_within = |place: &&Place| {
            let host = place.host.map(|number| &snapshot.hosts[number].host);
            host.is_some_and(|host| scope.contains(host))
        };
        let within = drained.places.iter().filter(is_within);
        let mut starts_s: Vec<f64> =
            within.flat_map(|place| place.starts_of(job, most_each)).collect();
        starts_s.sort_unstable_by(f64::total_cmp);
        if let Some(last_s) = count.checked_sub(1).and_then(|last| starts_s.get(last as usize)) {
            waits.extend(scope.iter().map(|host| (host.clone(), known(*last_s))));
        }
    }
    waits
}

/// The hosts after all jobs of the snapshot.
fn drained(snapshot: &Snapshot) -> Drained {
    let hosts = snapshot.hosts.iter().enumerate();
    let places: Vec<Place> =
        hosts.map(|(number, host)| Place::of_host(number, host, snapshot)).collect();
    Drains::new(snapshot).best(&places, snapshot.budget_left)
}

fn known(starts_s: f64) -> Option<f64> {
    Some(starts_s).filter(|starts_s| *starts_s < NEVER_S)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{host, job, queue};
    use super::super::{Host, Running};
    use super::*;

    /// Each host has so many CPUs, and a job runs there for so long.
    fn snapshot(jobs: usize, hosts: [(u32, f64); 2]) -> Snapshot {
        let with = |(number, (cpus, left_s)): (usize, (u32, f64))| {
            let running = vec![Running { cpus: 2, memory_bytes: 1, left_s, left_high_s: left_s }];
            Host { cpus, running, ..host(number) }
        };
        let hosts = hosts.into_iter().enumerate().map(with).collect();
        Snapshot { hosts, ..queue(jobs, 1.0) }
    }

    fn waits_of(snapshot: &Snapshot) -> [Option<f64>; 2] {
        let waits = waits(snapshot, &job(99, 1.0));
        [0, 1].map(|at| waits[at].1)
    }

    #[test]
    fn a_job_waits_for_those_that_run_and_for_those_before_it() {
        let hosts = [(2, 100.0), (2, 300.0)];
        assert_eq!(waits_of(&snapshot(0, hosts)), [Some(100.0), Some(300.0)]);
        // A run takes 1,200 s, and the first host is free first.
        assert_eq!(waits_of(&snapshot(1, hosts)), [Some(1300.0), Some(300.0)]);
        assert_eq!(waits_of(&snapshot(2, hosts)), [Some(1300.0), Some(1500.0)]);
    }

    #[test]
    fn what_ends_nobody_knows_when_makes_a_wait_unknown_where_it_runs() {
        let hosts = [(2, NEVER_S), (4, NEVER_S)];
        assert_eq!(waits_of(&snapshot(0, hosts)), [None, Some(0.0)], "the second one has room");
        assert_eq!(waits_of(&snapshot(1, hosts)), [None, Some(1200.0)]);
    }

    #[test]
    fn a_job_with_several_vms_waits_until_all_have_room_at_once() {
        let scope = BTreeSet::from([0, 1].map(|number| host(number).host));
        let wait = |snapshot: &Snapshot, count, most_each| {
            let scopes = [scope.clone()];
            let waits = waits_for_all(snapshot, &job(99, 1.0), (count, most_each), &scopes);
            assert!(waits.is_empty() || waits.len() == 2 && waits[0].1 == waits[1].1, "{waits:?}");
            waits.first().map(|(_, wait)| *wait)
        };
        // Each host has room for one VM now, and for one more when its job has ended.
        let idle = snapshot(0, [(4, 100.0), (4, 300.0)]);
        let of_idle = [2, 3, 4, 5].map(|count| wait(&idle, count, None));
        assert_eq!(of_idle, [Some(Some(0.0)), Some(Some(100.0)), Some(Some(300.0)), None]);
        assert_eq!([2, 3].map(|count| wait(&idle, count, Some(1))), [Some(Some(0.0)), None]);
        let busy = snapshot(1, [(4, 100.0), (4, 300.0)]);
        assert_eq!(wait(&busy, 2, None), Some(Some(100.0)), "the job before it has the first host");
        let never = snapshot(0, [(4, NEVER_S), (4, 300.0)]);
        assert_eq!([3, 4].map(|count| wait(&never, count, None)), [Some(Some(300.0)), Some(None)]);
    }

    #[test]
    fn the_vms_of_a_job_that_waits_before_it_start_together() {
        let mut queue = snapshot(2, [(2, 100.0), (2, 300.0)]);
        assert_eq!(waits_of(&queue), [Some(1300.0), Some(1500.0)], "two jobs");
        queue.jobs[1].job = queue.jobs[0].job.clone();
        assert_eq!(waits_of(&queue), [Some(1500.0), Some(1500.0)], "one job with two VMs");
    }

    #[test]
    fn a_job_whose_vms_never_have_room_together_keeps_no_room_from_those_behind_it() {
        let mut queue = snapshot(2, [(2, NEVER_S), (4, NEVER_S)]);
        queue.jobs[1].job = queue.jobs[0].job.clone();
        assert_eq!(waits_of(&queue), [None, Some(0.0)], "one host has room for one VM");
    }

    #[test]
    fn a_host_that_is_too_small_is_not_waited_for() {
        let small = snapshot(0, [(1, 0.0), (2, 0.0)]);
        assert_eq!(waits(&small, &job(99, 1.0)).len(), 1);
    }
}
