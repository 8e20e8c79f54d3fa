//! How long decisions take, by the number of hosts.

use std::time::Instant;

use perigee_model::job::Start;
use perigee_model::vm::LinkProbe;
use perigee_model::{HostId, JobId, SiteId, VolumeName};
use perigee_planner::queue::{Demand, HostRoom, Queue, Waiting, schedule};
use perigee_planner::{
    Cluster, CopyFacts, HostFacts, JobFacts, LinkFacts, LinkForMoves, Snapshot, Traits,
    VolumeFacts, plan,
};

use super::outcome::Size;
use super::rules::Rule;
use super::scenario::Scenario;
use super::world;
use crate::measuring::median;

/// Decisions of one kind at one size, of which the median counts.
const TIMES: usize = 5;
/// If a decision takes longer, it is not measured with more hosts.
const LONGEST_S: f64 = 1.0;

/// The scenario at each of its sizes, with VMs in proportion.
pub fn sizes(scenario: &Scenario) -> Vec<Size> {
    let mut plan_s = Some(0.0);
    let of_size = |&hosts: &usize| {
        let vms = scenario.vms * hosts / scenario.hosts;
        let sized = Scenario { hosts, vms, ..scenario.clone() };
        let began = Instant::now();
        let run = world::run(&sized, Rule::Perigee, 1);
        let took_s = began.elapsed().as_secs_f64();
        let queue = queue(&sized);
        let first = |_: &Waiting, hosts: &[HostId]| {
            hosts.first().cloned().ok_or_else(|| "no host".to_owned().into())
        };
        let queue_s = timed(|| drop(schedule(&queue, first)));
        plan_s = plan_s.filter(|last_s| *last_s < LONGEST_S).map(|_| {
            let snapshot = snapshot(&sized);
            timed(|| drop(plan(&snapshot).expect("a host with room and a link")))
        });
        Size {
            hosts,
            vms,
            moves: run.moves,
            balance_ms: 1e3 * median(run.decided_s.iter().copied()).unwrap_or_default(),
            balance_most_ms: 1e3 * run.decided_s.iter().copied().fold(0.0, f64::max),
            queue_ms: 1e3 * queue_s,
            plan_ms: plan_s.map(|seconds| seconds * 1e3),
            simulated_s: scenario.length_s as f64,
            took_s,
        }
    };
    scenario.sizes.iter().map(of_size).collect()
}

/// The median time of a decision. One that takes long is made once.
fn timed(decide: impl Fn()) -> f64 {
    let mut times = Vec::new();
    while times.len() < TIMES && times.iter().sum::<f64>() < LONGEST_S {
        let began = Instant::now();
        decide();
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

/// One job that waits, and half of each host free.
fn queue(scenario: &Scenario) -> Queue {
    let total = Demand { cpus: scenario.cpus * 2, memory_bytes: scenario.memory_bytes };
    let half = Demand { cpus: scenario.cpus, memory_bytes: scenario.memory_bytes / 2 };
    let room = |number| HostRoom {
        id: host_id(number),
        site: site_id(scenario, number),
        total,
        free: half,
        persistent: Demand::default(),
        start_slots: 1,
    };
    let job = JobId::new("j-1").expect("letters and digits");
    Queue {
        hosts: (0..scenario.hosts).map(room).collect(),
        waiting: vec![scenario.waiting(job)],
        ..Queue::default()
    }
}

/// A new job with a volume at the first host.
fn snapshot(scenario: &Scenario) -> Snapshot {
    const VOLUME_BYTES: u64 = 1 << 30;
    let host = |number| HostFacts {
        memory_free_bytes: scenario.memory_bytes / 2,
        running_vcpus: scenario.cpus,
        ..scenario.host(host_id(number), site_id(scenario, number))
    };
    let traits = Traits {
        name: "job".to_owned(),
        cpus: 1,
        memory_bytes: scenario.vm_memory_bytes,
        image: "image".to_owned(),
        inputs: String::new(),
        data_bytes: vec![VOLUME_BYTES],
    };
    let volume = VolumeFacts {
        volume: VolumeName::new("data").expect("letters"),
        home: host_id(0),
        allocated_bytes: VOLUME_BYTES,
        only_read: true,
        copy: CopyFacts { bytes: VOLUME_BYTES, ..CopyFacts::default() },
    };
    Snapshot {
        cluster: Cluster {
            hosts: (0..scenario.hosts).map(host).collect(),
            links: links(scenario),
            probe_request_bytes: 8192,
            past_moves: Vec::new(),
        },
        job: JobFacts {
            traits,
            memory_bytes: scenario.vm_memory_bytes,
            start: Start::Anywhere,
            may_migrate: true,
            uses_confined: false,
            volumes: vec![volume],
            dirty_bytes_per_s: Some(0),
        },
        history: Vec::new(),
        others: Vec::new(),
    }
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
