//! How long the own hosts alone would need for the queue: the renting rule's own drain of the queue, without a machine for rent.

use std::collections::BTreeMap;

use perigee_model::money::Money;
use perigee_model::{HostId, Problem, job::Job};
use perigee_planner::rent::{self, Host, Run, Snapshot, Worth};

use super::outcome::{Alone, waiting};
use super::stage::JOB_CPUS;

/// By what was predicted of each job when it was submitted. Each host runs one job at a time.
///
/// # Errors
/// `Internal` if the time of a job was not predicted.
pub fn alone(queue: &[Job], own: &[HostId], per_hour: Money) -> Result<Alone, Problem> {
    let jobs = queue.iter().map(|job| waits(job, per_hour)).collect::<Result<_, _>>()?;
    let snapshot = Snapshot {
        jobs,
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

fn waits(job: &Job, per_hour: Money) -> Result<rent::Job, Problem> {
    let predicted = job.predicted.ok_or_else(|| {
        let what = format!("can't predict the end of job {}", job.id);
        Problem::internal(what, "the planner does not say how long the job takes")
    })?;
    Ok(rent::Job {
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
    })
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
