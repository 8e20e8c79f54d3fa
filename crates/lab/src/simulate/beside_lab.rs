//! The same jobs in a lab of real VMs and in the simulator: how far is the simulator from what happens?
//!
//! Each host of the lab has as many of this machine's CPUs as the scenario says. One job runs alone first. It says how long a job is staged,
//! boots and is collected, and how much a CPU computes in a second; the simulator is told these figures, and no others. Then the scenario's
//! jobs are submitted to the controller when they arrive, and their ends are compared with those in the simulator.

use std::path::{Path, PathBuf};
use std::time::Duration;

use perigee_http::Client;
use perigee_model::job::{Job, JobSpec, JobState};
use perigee_model::{HostId, ImageName, Problem, SiteId, job_file};
use tokio::time::Instant;

use super::jobs::{self, Jobs};
use super::outcome::{Alone, BesideLab, Compared, JobTimes, Pair, Simulated};
use super::rules::Rule;
use super::scenario::{self, Scenario, StartOfJob};
use super::world;
use crate::cluster::Cluster;
use crate::definition::{Definition, LabId, SiteDef};
use crate::measuring::median;
use crate::process::own_cpus;
use crate::progress::{Step, Steps};
use crate::up::{self, Lab, with_lab};
use crate::wan::LinkSettings;

const WORK: &str = include_str!("work.sh");
/// How many jobs and hosts a lab on one machine has time and room for.
const JOBS_MOST: usize = 100;
const HOSTS_MOST: usize = 16;
/// The rounds of the first job, which only says roughly how fast the lab is, and how long the next one is to compute.
const FIRST_ROUNDS: f64 = 300_000.0;
const ALONE_S: f64 = 10.0;
/// For one request to the controller.
const ANSWER: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// For all jobs, from the arrival of the last one on.
const DEADLINE: Duration = Duration::from_secs(900);

/// A scenario that is run in a lab too.
pub struct Options {
    pub file: PathBuf,
    /// The golden image: the directory with its disk and its kernel.
    pub image: PathBuf,
    pub lab: up::Options,
}

/// Runs the scenario's jobs in a lab, which is always removed afterwards, and in the simulator.
///
/// # Errors
/// The scenario is none that a lab can run, a job failed, or the lab did.
pub async fn beside_lab(options: &Options, steps: &Steps) -> Result<Simulated, Problem> {
    let scenario = scenario::read(&options.file)?;
    let jobs = jobs_of(&scenario).map_err(|why| {
        let what = format!("can't run {} in a lab", options.file.display());
        Problem::invalid(what, why)
    })?;
    let began = Instant::now();
    let definition = definition(&scenario, &options.image);
    let (alone, lab) = with_lab(definition, &options.lab, steps, async |lab: Lab| {
        run(&lab, jobs, &options.image, steps).await
    })
    .await?;
    let start = StartOfJob { stage_s: alone.stage_s, boot_s: alone.boot_s, end_s: alone.end_s };
    let told = Scenario { start, ..scenario.clone() };
    let simulated = world::run(&told, Rule::None, 1).jobs;
    let took_s = began.elapsed().as_secs_f64();
    let beside = compare(alone, jobs, lab, simulated, took_s)?;
    Ok(Simulated {
        file: super::name_of(&options.file),
        title: scenario.title.clone(),
        about: scenario.about.clone(),
        hours: scenario.length_s as f64 / 3600.0,
        hosts: scenario.hosts,
        beside_lab: Some(beside),
        took_s,
        ..Simulated::default()
    })
}

/// The jobs, if a lab on this machine can run the scenario.
fn jobs_of(scenario: &Scenario) -> Result<&[jobs::Job], String> {
    let Jobs::Listed(listed) = &scenario.jobs else {
        return Err("its jobs are not listed one by one".to_owned());
    };
    let jobs = &listed.jobs;
    if jobs.is_empty() || jobs.len() > JOBS_MOST {
        return Err(format!("it has {} jobs; a lab runs 1 to {JOBS_MOST}", jobs.len()));
    }
    if jobs.iter().any(|job| job.vms > 1 || job.reads_bytes > 0) {
        return Err("a job has several VMs, or reads data".to_owned());
    }
    if scenario.vms > 0 || scenario.failures > 0 || scenario.sites > 1 {
        return Err("it has VMs without jobs (`vms: 0`), failures, or several sites".to_owned());
    }
    if scenario.start != StartOfJob::default() {
        return Err("how long a job boots is measured in the lab, and not given".to_owned());
    }
    let needed = scenario.hosts * scenario.cpus as usize;
    let there = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if scenario.hosts > HOSTS_MOST || needed > there {
        return Err(format!(
            "{} hosts have {needed} CPUs together, and this machine has {there}; at most {HOSTS_MOST} hosts are run",
            scenario.hosts
        ));
    }
    Ok(jobs)
}

/// One site, whose hosts have the names of the simulator's.
fn definition(scenario: &Scenario, image: &Path) -> Definition {
    let host = |number| HostId::new(format!("h{number}")).expect("letters and digits");
    let site = SiteDef {
        name: SiteId::new("s0").expect("letters and digits"),
        hosts: (0..scenario.hosts).map(host).collect(),
    };
    let mut definition = Definition::new(LabId::random(), vec![site], LinkSettings::of_rtt_us(0));
    definition.probe_kernel = Some(image.join("vmlinuz"));
    let cpus = own_cpus();
    let of_hosts = cpus.chunks_exact(scenario.cpus as usize).map(<[usize]>::to_vec);
    definition.cpus = (0..scenario.hosts).map(host).zip(of_hosts).collect();
    definition
}

async fn run(
    lab: &Lab,
    jobs: &[jobs::Job],
    image: &Path,
    steps: &Steps,
) -> Result<(Alone, Vec<JobTimes>), Problem> {
    let cluster = Cluster::new(lab)?;
    let step = steps.begin("import the image");
    let name =
        ImageName::new("debian").map_err(|e| Problem::internal("can't name the image", e))?;
    cluster.import_image(&name, &image.join("debian-pg.raw")).await?;
    step.done("");
    let mut step = steps.begin("one job alone");
    let first = alone(&cluster, FIRST_ROUNDS, &mut step).await?;
    let alone = alone(&cluster, first.rounds_per_s * ALONE_S, &mut step).await?;
    step.done(&format!("{:.1} s to boot", alone.boot_s));
    let mut step = steps.begin("the jobs in the lab");
    let times = run_all(&lab.client(ANSWER)?, jobs, alone.rounds_per_s, &mut step).await?;
    step.done("");
    Ok((alone, times))
}

/// Measures a job that has the lab for itself.
async fn alone(cluster: &Cluster, rounds: f64, step: &mut Step) -> Result<Alone, Problem> {
    let job = cluster.run(&spec("alone", 1, rounds)?, step).await?;
    let output = cluster.output(&job.id).await?;
    let took = output.iter().find(|(name, _)| name == "took_ms");
    let took_ms: Option<f64> = took.and_then(|(_, text)| text.trim().parse().ok());
    let what = || format!("can't measure job {}", job.id);
    let took_ms = took_ms.filter(|took_ms| *took_ms > 0.0);
    let compute_s = took_ms
        .ok_or_else(|| Problem::internal(what(), "it did not say how long it computed"))?
        / 1000.0;
    let (Some(started_ms), Some(running_ms), Some(ended_ms)) =
        (job.started_ms, job.running_ms, job.ended_ms)
    else {
        return Err(Problem::internal(what(), "its times are not known"));
    };
    let seconds = |from_ms: u64, to_ms: u64| to_ms.saturating_sub(from_ms) as f64 / 1000.0;
    Ok(Alone {
        stage_s: seconds(job.submitted_ms, started_ms),
        boot_s: seconds(started_ms, running_ms),
        compute_s,
        end_s: (seconds(running_ms, ended_ms) - compute_s).max(0.0),
        rounds_per_s: rounds / compute_s,
    })
}

/// A job whose vCPUs each compute for so many rounds.
fn spec(name: &str, cpus: u32, rounds: f64) -> Result<JobSpec, Problem> {
    let script: String = WORK.lines().map(|line| format!("    {line}\n")).collect();
    let text = format!(
        "name: {name}\nimage: debian\ncpus: {cpus}\noutput: 16MiB\nplacement: {{move: never}}\n\
         env: {{LOOPS: \"{cpus}\", ROUNDS: \"{rounds:.0}\"}}\n\
         command:\n  - /bin/sh\n  - -c\n  - |\n{script}"
    );
    Ok(job_file::parse(&text, "beside-lab.yaml")?.spec)
}

/// Submits each job when it arrives, and waits for the ends of all.
async fn run_all(
    client: &Client,
    jobs: &[jobs::Job],
    rounds_per_s: f64,
    step: &mut Step,
) -> Result<Vec<JobTimes>, Problem> {
    let began = Instant::now();
    let mut all: Vec<Job> = Vec::new();
    for (number, job) in (1..).zip(jobs) {
        tokio::time::sleep_until(began + Duration::from_millis(job.at_ms)).await;
        let rounds = rounds_per_s * job.compute_s / f64::from(job.cpus);
        let mut spec = spec(&format!("job-{number}"), job.cpus, rounds)?;
        spec.memory_bytes = job.memory_bytes;
        all.push(client.post("/v1/jobs", &spec).await?);
    }
    let mut hosts: Vec<Option<HostId>> = vec![None; all.len()];
    let end = Instant::now() + DEADLINE;
    while all.iter().any(|job| !job.state.is_final()) {
        if Instant::now() >= end {
            let why = format!("they have not ended after {DEADLINE:?}");
            return Err(Problem::unavailable("can't run the jobs in the lab", why));
        }
        tokio::time::sleep(LOOK_EVERY).await;
        for (job, host) in all.iter_mut().zip(&mut hosts).filter(|(job, _)| !job.state.is_final()) {
            *job = client.get(&format!("/v1/jobs/{}", job.id)).await?;
            *host = job.host.clone().or(host.take());
        }
        let ended = all.iter().filter(|job| job.state.is_final()).count();
        step.at(&format!("{ended} of {} jobs ended", all.len()));
    }
    if let Some(job) = all.iter().find(|job| job.state != JobState::Succeeded) {
        let what = format!("can't run job {} in the lab", job.id);
        return Err(Problem::internal(what, format!("{:?}: {}", job.state, job.reason)));
    }
    let first_ms = all[0].submitted_ms - jobs[0].at_ms.min(all[0].submitted_ms);
    let since = |ms: u64| ms.saturating_sub(first_ms) as f64 / 1000.0;
    let times = all.iter().zip(hosts).map(|(job, host)| JobTimes {
        at_s: since(job.submitted_ms),
        host: host.map(|host| host.to_string()),
        started_s: job.started_ms.map(since),
        running_s: job.running_ms.map(since),
        ended_s: job.ended_ms.map(since),
    });
    Ok(times.collect())
}

fn compare(
    alone: Alone,
    jobs: &[jobs::Job],
    lab: Vec<JobTimes>,
    simulated: Vec<JobTimes>,
    took_s: f64,
) -> Result<BesideLab, Problem> {
    let not_ended = || {
        Problem::invalid("can't compare the jobs", "one did not end in the simulated time")
            .next("give the scenario more `hours`")
    };
    if simulated.len() != jobs.len() || lab.len() != jobs.len() {
        return Err(not_ended());
    }
    let both = jobs.iter().zip(lab.into_iter().zip(simulated));
    let pairs = both.map(|(job, (lab, simulated))| {
        let took = Compared::of(lab.took_s()?, simulated.took_s()?);
        let compute_s = job.compute_s / f64::from(job.cpus);
        Some(Pair { cpus: job.cpus, compute_s, lab, simulated, took })
    });
    let pairs: Option<Vec<Pair>> = pairs.collect();
    let pairs = pairs.ok_or_else(not_ended)?;
    let last = |of: fn(&Pair) -> &JobTimes| {
        pairs.iter().filter_map(|pair| of(pair).ended_s).fold(0.0, f64::max)
    };
    let first = |of: fn(&Pair) -> &JobTimes| {
        pairs.iter().map(|pair| of(pair).at_s).fold(f64::INFINITY, f64::min)
    };
    let makespan = |of: fn(&Pair) -> &JobTimes| last(of) - first(of);
    let errors = || pairs.iter().map(|pair| pair.took.error.abs());
    Ok(BesideLab {
        alone,
        makespan: Compared::of(makespan(|pair| &pair.lab), makespan(|pair| &pair.simulated)),
        median_error: median(errors()).unwrap_or_default(),
        most_error: errors().fold(0.0, f64::max),
        same_host: pairs.iter().filter(|pair| pair.lab.host == pair.simulated.host).count(),
        took_s,
        jobs: pairs,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scenario(lines: &str) -> Scenario {
        let text = format!("title: T\nabout: A\nhosts: 2\ncpus: 1\nvms: 0\n{lines}");
        scenario::parse(&text, "s.yaml").expect("a scenario")
    }

    #[test]
    fn what_a_lab_can_not_run_is_said() {
        for (lines, said) in [
            ("jobs: 60\n", "not listed"),
            ("jobs: []\n", "0 jobs"),
            ("jobs: [{compute: 5s, reads: 1GiB}]\n", "reads data"),
            ("jobs: [{compute: 5s}]\nfailures: 1\n", "failures"),
            ("jobs: [{compute: 5s}]\nboot: 5s\n", "measured"),
        ] {
            let why = jobs_of(&scenario(lines)).expect_err(lines);
            assert!(why.contains(said), "{why}");
        }
    }

    #[test]
    fn the_job_file_is_one() {
        let spec = spec("job-1", 2, 1e6).expect("a job");
        assert_eq!((spec.cpus, spec.env["ROUNDS"].as_str()), (2, "1000000"));
        assert!(!spec.may_migrate);
    }

    #[test]
    fn errors_are_of_the_lab_s_times() {
        let jobs = scenario("jobs: [{compute: 5s}, {at: 10s, compute: 5s}]\n").jobs;
        let Jobs::Listed(jobs) = jobs else { panic!("they are listed") };
        let times = |at_s: f64, ended_s: f64| JobTimes {
            at_s,
            ended_s: Some(ended_s),
            ..JobTimes::default()
        };
        let lab = vec![times(0.0, 20.0), times(10.0, 50.0)];
        let simulated = vec![times(0.0, 22.0), times(10.0, 48.0)];
        let compared = compare(Alone::default(), &jobs.jobs, lab, simulated, 1.0).expect("two");
        assert!((compared.makespan.error + 0.04).abs() < 1e-9, "{compared:?}");
        assert!((compared.median_error - 0.075).abs() < 1e-9, "{compared:?}");
        assert!((compared.most_error - 0.1).abs() < 1e-9, "{compared:?}");
    }
}
