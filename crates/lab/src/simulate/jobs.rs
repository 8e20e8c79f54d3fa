//! Which jobs arrive: at random, from a log, or each by itself.
//!
//! ```yaml
//! jobs: 60                               # arrive in each hour, at random
//! jobs: {per-hour: 60, like: azure}      # pareto (the default), azure or borg: `loads.rs`
//! jobs: {per-hour: 60, like: borg, reads: 1GiB}
//! jobs: {swf: log.swf, from: 24h}        # a log, beside the scenario: `swf.rs`
//! jobs:                                  # each by itself; only `compute` is needed
//! - {at: 10s, cpus: 2, memory: 256MiB, compute: 20s, reads: 1GiB}
//! ```
//!
//! `compute` is the time for which each vCPU of the job computes, if it has a processor all the time. `reads` is what the job copies from a
//! host that has its data, before the job begins.

use std::path::Path;

use perigee_model::Problem;
use perigee_model::units::{parse_bytes, parse_duration};
use perigee_model::yaml::Field;
use perigee_planner::queue::Demand;

use super::scenario::{MORE_ROOM, Machine, bytes, number};
use super::swf;

/// How many jobs a log or a list may have.
pub const JOBS_MOST: usize = 1_000_000;
/// How many jobs may arrive at random in an hour.
const PER_HOUR_MOST: u64 = 100_000;
/// And in all hours.
const AT_RANDOM_MOST: u64 = 20_000_000;

/// The jobs of a scenario.
#[derive(Debug, Clone, PartialEq)]
pub enum Jobs {
    /// They arrive at random.
    AtRandom(AtRandom),
    /// These.
    Listed(Listed),
}

/// Jobs that arrive at random.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AtRandom {
    pub per_hour: u64,
    pub like: Like,
    /// What each job that computes copies before it begins.
    pub reads_bytes: u64,
}

/// What jobs that arrive at random are like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Like {
    /// They run for a time that has a Pareto distribution, and use what the scenario's load says.
    Pareto,
    /// They live as long as VMs in Azure, and use what the scenario's load says.
    Azure,
    /// They compute as much as jobs of Borg, and end when they have.
    Borg,
}

const LIKES: [(&str, Like); 3] =
    [("pareto", Like::Pareto), ("azure", Like::Azure), ("borg", Like::Borg)];

/// Jobs that are known one by one.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Listed {
    /// In the order of their arrival.
    pub jobs: Vec<Job>,
    /// Jobs of the log of which it does not say how long they ran, or with how many processors.
    pub left_out: u64,
}

/// A job that arrives, and ends when it has computed.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    pub at_ms: u64,
    /// How many VMs the job has. All start at once.
    pub vms: u32,
    /// vCPUs of each VM.
    pub cpus: u32,
    /// Memory of each VM.
    pub memory_bytes: u64,
    /// Processors that each VM uses at most, above 0.
    pub uses_cpus: f64,
    /// CPU seconds of each VM.
    pub compute_s: f64,
    /// What each VM copies before it begins.
    pub reads_bytes: u64,
    /// Tenants share the cluster equally, and owners their tenant's part.
    pub tenant: String,
    pub owner: String,
}

impl Job {
    /// Of each VM.
    pub fn size(&self) -> Demand {
        Demand { cpus: self.cpus, memory_bytes: self.memory_bytes }
    }
}

impl Jobs {
    pub fn parse(field: &Field<'_>, dir: &Path, machine: &Machine) -> Result<Self, Problem> {
        if field.is_list() {
            let list = field.list()?;
            let jobs = list.iter().map(|job| read_job(job, machine)).collect::<Result<_, _>>()?;
            return listed(jobs, 0).map_err(|why| field.problem(why));
        }
        if !field.is_map() {
            return Ok(Self::at_random(per_hour(field, machine)?, Like::Pareto, 0));
        }
        let [many, like, reads, log, from] =
            field.fields(["per-hour", "like", "reads", "swf", "from"])?;
        match (many, log) {
            (Some(many), None) => {
                from.map_or(Ok(()), |from| Err(from.problem("it belongs to swf")))?;
                let like = like.map(|like| like.parse(parse_like)).transpose()?;
                let like = like.unwrap_or(Like::Pareto);
                if let Some(reads) = reads.as_ref().filter(|_| like != Like::Borg) {
                    return Err(reads.problem("only jobs that compute copy data: `like: borg`"));
                }
                let reads = reads.map(|reads| reads.parse(parse_bytes)).transpose()?;
                Ok(Self::at_random(per_hour(&many, machine)?, like, reads.unwrap_or(0)))
            }
            (None, Some(log)) => {
                let other = like.or(reads);
                other.map_or(Ok(()), |other| Err(other.problem("it belongs to per-hour")))?;
                let from_s = from.map(|from| from.parse(parse_duration)).transpose()?;
                let file = dir.join(log.text()?);
                let read = swf::read(&file, from_s.unwrap_or(0), machine)?;
                listed(read.jobs, read.left_out).map_err(|why| log.problem(why))
            }
            _ => Err(field.problem("it has either per-hour or swf")),
        }
    }

    /// Jobs that arrive at random.
    pub fn at_random(per_hour: u64, like: Like, reads_bytes: u64) -> Self {
        Self::AtRandom(AtRandom { per_hour, like, reads_bytes })
    }

    /// Whether jobs copy data before they begin.
    pub fn have_data(&self) -> bool {
        match self {
            Self::Listed(listed) => listed.jobs.iter().any(|job| job.reads_bytes > 0),
            Self::AtRandom(random) => random.reads_bytes > 0,
        }
    }
}

fn per_hour(field: &Field<'_>, machine: &Machine) -> Result<u64, Problem> {
    let most = AT_RANDOM_MOST / (machine.length_s / 3600).max(1);
    number(Some(field), 0, 0..=most.min(PER_HOUR_MOST))
}

fn parse_like(text: &str) -> Result<Like, String> {
    let found = LIKES.iter().find(|(name, _)| *name == text).map(|(_, like)| *like);
    found.ok_or_else(|| format!("it is one of {}", LIKES.map(|(name, _)| name).join(", ")))
}

fn listed(mut jobs: Vec<Job>, left_out: u64) -> Result<Jobs, String> {
    if jobs.len() > JOBS_MOST {
        return Err(format!("it has {} jobs; the limit is {JOBS_MOST}", jobs.len()));
    }
    // Jobs that arrive together keep their order.
    jobs.sort_by_key(|job| job.at_ms);
    Ok(Jobs::Listed(Listed { jobs, left_out }))
}

fn read_job(field: &Field<'_>, machine: &Machine) -> Result<Job, Problem> {
    let [at, cpus, memory, compute, reads] =
        field.fields(["at", "cpus", "memory", "compute", "reads"])?;
    let compute = compute.ok_or_else(|| field.problem("the field \"compute\" is missing"))?;
    let compute_s = compute.parse(parse_duration)?;
    if compute_s == 0 {
        return Err(compute.problem("it is more than 0"));
    }
    let cpus = number(cpus.as_ref(), 1, 1..=1024)?;
    let at_s = at.as_ref().map(|at| at.parse(parse_duration)).transpose()?.unwrap_or(0);
    if let Some(at) = at.filter(|_| at_s > machine.length_s) {
        return Err(at.problem("it is after the simulated hours"));
    }
    let at_ms = at_s.saturating_mul(1000);
    let job = Job {
        at_ms,
        vms: 1,
        cpus,
        memory_bytes: bytes(memory, machine.vm_memory_bytes)?,
        uses_cpus: f64::from(cpus),
        compute_s: compute_s as f64 * f64::from(cpus),
        reads_bytes: reads.map(|reads| reads.parse(parse_bytes)).transpose()?.unwrap_or(0),
        tenant: "default".to_owned(),
        owner: "simulated".to_owned(),
    };
    machine.check(&job).map_err(|why| field.problem(why).next(MORE_ROOM))?;
    Ok(job)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::scenario;

    fn parse(jobs: &str) -> Result<Jobs, Problem> {
        let text = format!("title: T\nabout: A\nhosts: 2\ncpus: 4\nvms: 0\njobs: {jobs}\n");
        scenario::parse(&text, "s.yaml").map(|scenario| scenario.jobs)
    }

    #[test]
    fn jobs_that_are_listed_come_in_the_order_of_their_arrival() {
        let jobs = parse("[{at: 20s, compute: 5s}, {at: 10s, cpus: 2, compute: 3s, reads: 1MiB}]");
        let Jobs::Listed(Listed { jobs, left_out: 0 }) = jobs.expect("jobs") else {
            panic!("they are listed")
        };
        let said: Vec<_> = jobs.iter().map(|job| (job.at_ms, job.cpus, job.reads_bytes)).collect();
        assert_eq!(said, [(10_000, 2, 1 << 20), (20_000, 1, 0)]);
        assert!((jobs[0].compute_s - 6.0).abs() < 1e-9, "3 s of each vCPU");
    }

    #[test]
    fn a_number_of_jobs_is_of_each_hour() {
        assert_eq!(parse("60").expect("jobs"), Jobs::at_random(60, Like::Pareto, 0));
        let borg = parse("{per-hour: 6, like: borg, reads: 1KiB}").expect("jobs");
        assert_eq!(borg, Jobs::at_random(6, Like::Borg, 1024));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (jobs, said) in [
            ("{}", "either per-hour or swf"),
            ("{per-hour: 6, like: heavy}", "pareto, azure, borg"),
            ("{per-hour: 6, from: 1h}", "belongs to swf"),
            ("100001", "from 0 to 100000"),
            ("{per-hour: 6, reads: 1GiB}", "only jobs that compute"),
            ("[{at: 1s}]", "compute"),
            ("[{compute: 0s}]", "more than 0"),
            ("[{compute: 1s, cpus: 500}]", "no host has room"),
            ("{swf: missing.swf}", "missing.swf"),
        ] {
            let shown = format!("{:?}", parse(jobs).expect_err(jobs));
            assert!(shown.contains(said), "{jobs}: {shown}");
        }
    }
}
