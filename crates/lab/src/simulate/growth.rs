//! How long decisions take, by the number of hosts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use perigee_model::job::Start;
use perigee_model::load::VcpuUse;
use perigee_model::vm::LinkProbe;
use perigee_model::{HostId, JobId, SiteId, VolumeName};
use perigee_planner::queue::{
    Demand, HostRoom, Known, PassSnapshot, Queue, Read, Waiting, pass, schedule,
};
use perigee_planner::{
    Boot, Cluster, CopyFacts, CpuLoad, HostFacts, JobFacts, LinkFacts, LinkForMoves, Prepared,
    Snapshot, Traits, VolumeFacts, plan,
};

use super::outcome::{PLAN_GOAL_MS, Size};
use super::rules::Rule;
use super::scenario::Scenario;
use super::world;
use crate::measuring::median;
use crate::random::Random;

/// Decisions of one kind at one size, of which the median counts.
const TIMES: usize = 5;
/// Of decisions that take long together, no more are made.
const LONGEST_S: f64 = 1.0;
/// How many jobs wait in a pass that plans and places all of them.
const PASS_JOBS: u64 = 100;
/// vCPUs for each processor of a host.
const OVERCOMMIT: u32 = 16;
/// How many boots of jobs' VMs each host has seen, of as many images.
const BOOTS: (usize, u64) = (10, 3);

/// The scenario at each of its sizes, with VMs in proportion.
pub fn sizes(scenario: &Scenario) -> Vec<Size> {
    let of_size = |&hosts: &usize| {
        let vms = scenario.vms * hosts / scenario.hosts;
        let sized = Scenario { hosts, vms, ..scenario.clone() };
        let began = Instant::now();
        let run = world::run(&sized, Rule::Perigee, 1);
        let took_s = began.elapsed().as_secs_f64();
        let one_waits = queue(&sized, 1);
        let first = |_: &Waiting, hosts: &[HostId]| {
            hosts.first().cloned().ok_or_else(|| "no host".to_owned().into())
        };
        let queue_s = timed(|| (), |()| drop(schedule(&one_waits, first)));
        let cluster = cluster(&sized);
        let many_wait = pass_snapshot(&sized, &cluster);
        let pass_s = timed(
            || many_wait.clone(),
            |snapshot| {
                drop(pass(snapshot));
            },
        );
        let Prepared { job, history, others } = prepared(&sized, 0);
        let snapshot = Snapshot { cluster, job, history, others };
        let planned = || drop(plan(&snapshot));
        // What is known of the whole cluster is kept from one plan to the next.
        planned();
        let plan_s = timed(|| (), |()| planned());
        Size {
            hosts,
            vms,
            moves: run.moves,
            balance_ms: 1e3 * median(run.decided_s.iter().copied()).unwrap_or_default(),
            balance_most_ms: 1e3 * run.decided_s.iter().copied().fold(0.0, f64::max),
            queue_ms: 1e3 * queue_s,
            plan_ms: 1e3 * plan_s,
            plan_met_goal: 1e3 * plan_s <= PLAN_GOAL_MS,
            pass_ms: 1e3 * pass_s,
            simulated_s: scenario.length_s as f64,
            took_s,
        }
    };
    scenario.sizes.iter().map(of_size).collect()
}

/// The median time of a decision, without what it is made from. One that takes long is made once.
fn timed<T>(prepare: impl Fn() -> T, decide: impl Fn(T)) -> f64 {
    let mut times = Vec::new();
    while times.len() < TIMES && times.iter().sum::<f64>() < LONGEST_S {
        let prepared = prepare();
        let began = Instant::now();
        decide(prepared);
        times.push(began.elapsed().as_secs_f64());
    }
    median(times).unwrap_or_default()
}

fn host_id(number: usize) -> HostId {
    HostId::new(format!("h{number}")).expect("letters and digits")
}

fn site_id(scenario: &Scenario, number: usize) -> SiteId {
    SiteId::new(format!("s{}", number % scenario.sites)).expect("letters and digits")
}

fn job_id(number: u64) -> JobId {
    JobId::new(format!("j-{number}")).expect("letters and digits")
}

/// So many jobs that wait, and half of each host free.
fn queue(scenario: &Scenario, jobs: u64) -> Queue {
    let cpus = scenario.cpus * OVERCOMMIT;
    let total = Demand { cpus, memory_bytes: scenario.memory_bytes };
    let half = Demand { cpus: cpus / 2, memory_bytes: scenario.memory_bytes / 2 };
    let room = |number| HostRoom {
        id: host_id(number),
        site: site_id(scenario, number),
        total,
        free: half,
        persistent: Demand::default(),
        start_slots: u32::MAX,
    };
    let waiting = |submitted| Waiting { submitted, ..scenario.waiting(job_id(submitted)) };
    Queue {
        hosts: (0..scenario.hosts).map(room).collect(),
        waiting: (1..=jobs).map(waiting).collect(),
        ..Queue::default()
    }
}

/// Many jobs wait, each with its data at another host, and all that their plans need is known.
fn pass_snapshot(scenario: &Scenario, cluster: &Cluster) -> PassSnapshot {
    let known = |number: u64| {
        let home = usize::try_from(number).unwrap_or_default() * 7 % scenario.hosts;
        let facts = Ok(Arc::new(prepared(scenario, home)));
        let read = Some(Read { age_s: 1.0, homes_changed: false, facts });
        (job_id(number), Known { homes: vec![host_id(home)], read, ..Known::default() })
    };
    PassSnapshot {
        queue: queue(scenario, PASS_JOBS),
        cluster: cluster.clone(),
        known: (1..=PASS_JOBS).map(known).collect::<BTreeMap<_, _>>(),
        ..PassSnapshot::default()
    }
}

/// Hosts of which no two are equally busy or have booted in the same times.
fn cluster(scenario: &Scenario) -> Cluster {
    let mut random = Random(1);
    let mut host = |number| {
        let load = CpuLoad {
            measured_vcpus: scenario.cpus,
            vcpus_1m: VcpuUse {
                running_vcpus: random.share() * f64::from(scenario.cpus),
                waiting_vcpus: random.share(),
            },
            pressure_share: Some(random.share() / 10.0),
        };
        let boot = |_| Boot {
            image: format!("image-{}", random.between((1, BOOTS.1))),
            seconds: 5.0 + 10.0 * random.share(),
            cpu_s: 3.0 + 2.0 * random.share(),
        };
        HostFacts {
            memory_free_bytes: scenario.memory_bytes / 2,
            boots: Arc::new((0..BOOTS.0).map(boot).collect()),
            running_vcpus: scenario.cpus,
            cpu_load: Some(load),
            ..scenario.host(host_id(number), site_id(scenario, number))
        }
    };
    Cluster {
        hosts: (0..scenario.hosts).map(&mut host).collect(),
        links: links(scenario).into(),
        probe_request_bytes: 8192,
        past_moves: Arc::default(),
    }
}

/// A new job with a volume at this host.
fn prepared(scenario: &Scenario, home: usize) -> Prepared {
    const VOLUME_BYTES: u64 = 1 << 30;
    let traits = Traits {
        name: "job".to_owned(),
        cpus: 1,
        memory_bytes: scenario.vm_memory_bytes,
        image: "image-1".to_owned(),
        inputs: String::new(),
        data_bytes: vec![VOLUME_BYTES],
    };
    let volume = VolumeFacts {
        volume: VolumeName::new("data").expect("letters"),
        home: host_id(home),
        allocated_bytes: VOLUME_BYTES,
        only_read: true,
        copy: CopyFacts { bytes: VOLUME_BYTES, ..CopyFacts::default() },
    };
    let job = JobFacts {
        traits,
        memory_bytes: scenario.vm_memory_bytes,
        start: Start::Anywhere,
        may_migrate: true,
        uses_confined: false,
        volumes: vec![volume],
        dirty_bytes_per_s: Some(0),
        money: Default::default(),
        gang: None,
    };
    Prepared { job, history: Vec::new(), others: Vec::new() }
}

/// One pair of hosts for each two sites, and one inside each site.
fn links(scenario: &Scenario) -> Vec<LinkFacts> {
    let sites = scenario.sites;
    let pairs = (0..sites).flat_map(|from| (0..sites).map(move |to| (from, to)));
    let link = |(from, to): (usize, usize)| LinkFacts {
        from: host_id(from),
        to: host_id(if from == to { from + sites } else { to }),
        from_site: site_id(scenario, from),
        to_site: site_id(scenario, to),
        probe: LinkProbe {
            rtt_ms: if from == to { 0.2 } else { 16.0 },
            rate_bytes_per_s: scenario.link_bytes_per_s,
        },
        blocks: None,
        moves: LinkForMoves { wait_s: Some(0.0), max_bytes_per_s: None },
    };
    pairs.map(link).collect()
}
