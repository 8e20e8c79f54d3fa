//! When a job could start at each host that is there, if nothing is rented.

use perigee_model::HostId;

use super::drain::{Drains, Place};
use super::{Job, NEVER_S, Snapshot};

/// Of each host where the job can run: in how many seconds it would start there if all jobs of the snapshot come before it. `None`: a job
/// that runs there, or comes before it there, ends nobody knows when ([`NEVER_S`] stands for that in the snapshot).
#[must_use]
pub fn waits(snapshot: &Snapshot, job: &Job) -> Vec<(HostId, Option<f64>)> {
    let drains = Drains::new(snapshot);
    let hosts = snapshot.hosts.iter().enumerate();
    let places: Vec<Place> =
        hosts.map(|(number, host)| Place::of_host(number, host, snapshot)).collect();
    let drained = drains.best(&places, snapshot.budget_left);
    let starts = |place: &Place| {
        let host = &snapshot.hosts[place.host?].host;
        let starts_s = place.starts_s(job)?;
        Some((host.clone(), Some(starts_s).filter(|starts_s| *starts_s < NEVER_S)))
    };
    drained.places.iter().filter_map(starts).collect()
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
    fn a_host_that_is_too_small_is_not_waited_for() {
        let small = snapshot(0, [(1, 0.0), (2, 0.0)]);
        assert_eq!(waits(&small, &job(99, 1.0)).len(), 1);
    }
}
