//! How long the own hosts alone would need at least for the queue: the renting rule's own drain of the queue, without a machine for rent.

use std::collections::BTreeMap;

use perigee_model::job::Job;
use perigee_model::money::Money;
use perigee_model::plan::Estimate;
use perigee_model::{HostId, Problem};
use perigee_planner::rent::{self, Host, Run, Snapshot, Worth};

use super::outcome::{Alone, waiting};
use super::stage::JOB_CPUS;

/// By the plan of each job before it was submitted. Each host runs one job at a time. The least: each job is taken to run at each of the hosts as
/// fast as its plan's best way does, which is beside its data.
///
/// # Errors
/// `Internal` if a job would not run at any of the hosts.
pub fn alone(queue: &[(Job, Estimate)], own: &[HostId], per_hour: Money) -> Result<Alone, Problem> {
    let snapshot = Snapshot {
        jobs: queue.iter().map(|(job, predicted)| waits(job, *predicted, per_hour)).collect(),
        arrived: Vec::new(),
        hosts: own.iter().map(host).collect(),
        offers: Vec::new(),
        starts: BTreeMap::new(),
        refusals: Vec::new(),
        budget_left: Money::ZERO,
        period: None,
        rented_most: 0,
    };
    let ends: Vec<f64> = rent::planned(&snapshot).iter().map(|planned| planned.end_s).collect();
    if ends.len() != queue.len() {
        let why = format!("{} of {} jobs have an end", ends.len(), queue.len());
        return Err(Problem::internal("can't predict the queue's end at the own hosts", why));
    }
    Ok(Alone {
        seconds: ends.iter().copied().fold(0.0, f64::max),
        waiting: ends.iter().map(|end_s| waiting(per_hour, *end_s)).sum(),
    })
}

fn waits(job: &Job, predicted: Estimate, per_hour: Money) -> rent::Job {
    rent::Job {
        job: job.id.clone(),
        cpus: JOB_CPUS,
        memory_bytes: job.spec.memory_bytes,
        own: Some(Run {
            expected_s: predicted.expected_s,
            high_s: predicted.high_s,
            egress_bytes: 0,
        }),
        own_egress: Money::ZERO,
        rented: BTreeMap::new(),
        may_leave: false,
        without_kvm: true,
        worth: Worth { waiting_per_hour: Some(per_hour), ..Worth::default() },
    }
}

fn host(host: &HostId) -> Host {
    Host {
        host: host.clone(),
        cpus: JOB_CPUS,
        memory_bytes: u64::MAX,
        kvm: true,
        ready_in_s: 0.0,
        running: Vec::new(),
        rented: None,
    }
}
