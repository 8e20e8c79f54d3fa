//! Starts what waits, by the planner's queue.

use std::collections::BTreeMap;

use perigee_model::{HostId, JobId};
use perigee_planner::queue::{Demand, HostRoom, Queue, Turn, Waiting, schedule};

use super::place::Places;
use super::{Event, World};

/// What waits for room: a job, or a VM without a job.
pub struct Waits {
    /// All start at once.
    pub vms: Vec<usize>,
    pub since_ms: u64,
    /// How long it runs, if that does not depend on what it gets.
    pub runs_s: Option<u64>,
    /// The job that computes.
    pub job: Option<usize>,
}

impl Waits {
    pub fn of_vm(vm: usize, since_ms: u64, runs_s: Option<u64>) -> Self {
        Self { vms: vec![vm], since_ms, runs_s, job: None }
    }

    fn id(&self) -> JobId {
        JobId::new(format!("j-{}", self.vms[0])).expect("letters and digits")
    }
}

impl World<'_> {
    /// Starts what waits, by the planner's queue.
    pub(super) fn start_waiting(&mut self) {
        if !self.waiting.iter().any(|waits| self.finds_room(waits)) {
            return;
        }
        let queue = self.queue();
        let numbers: BTreeMap<JobId, usize> =
            self.waiting.iter().enumerate().map(|(number, waits)| (waits.id(), number)).collect();
        let mut luck = std::mem::replace(&mut self.luck, crate::random::Random(0));
        let cluster = self.cluster.take();
        let mut places = Places::of(self, cluster);
        let turns = schedule(&queue, |waiting, hosts| {
            places.choose(&self.waiting[numbers[&waiting.job]], hosts, &mut luck)
        });
        self.cluster = places.into_cluster();
        self.luck = luck;
        let mut started: Vec<(usize, Vec<HostId>)> = Vec::new();
        for (job, turn) in turns {
            match turn {
                Turn::Start(host) => started.push((numbers[&job], vec![host])),
                Turn::StartAll(hosts) => started.push((numbers[&job], hosts)),
                Turn::Wait { .. } => {}
            }
        }
        let mut waiting: Vec<Option<Waits>> =
            std::mem::take(&mut self.waiting).into_iter().map(Some).collect();
        for (number, hosts) in started {
            if let Some(waits) = waiting[number].take() {
                self.start(&waits, &hosts);
            }
        }
        self.waiting = waiting.into_iter().flatten().collect();
    }

    /// Whether a host has room for one of its VMs. If it is so of none that waits, a pass of the queue would start nothing.
    fn finds_room(&self, waits: &Waits) -> bool {
        let size = self.vms[waits.vms[0]].size;
        (0..self.hosts.len()).any(|host| self.has_room(host, size))
    }

    fn start(&mut self, waits: &Waits, hosts: &[HostId]) {
        self.run.started += 1;
        self.run.queued_s += (self.now_ms - waits.since_ms) as f64 / 1000.0;
        for (vm, host) in waits.vms.iter().zip(hosts) {
            if let Some(runs_s) = waits.runs_s {
                self.vms[*vm].ends_s = Some(self.now_s() + runs_s);
                self.at(self.now_ms + runs_s * 1000, Event::Ends(*vm));
            }
            let host = self.host_numbers[host];
            self.put(*vm, host);
            self.begin_work(*vm, host);
        }
    }

    fn queue(&self) -> Queue {
        let scenario = self.scenario;
        let total = Demand {
            cpus: scenario.cpus * scenario.overcommit,
            memory_bytes: scenario.memory_bytes,
        };
        let up = self.hosts.iter().filter(|host| host.is_up);
        let room = up.map(|host| HostRoom {
            id: host.id.clone(),
            site: host.site.clone(),
            total,
            free: Demand { cpus: host.free_vcpus, memory_bytes: host.free_memory_bytes },
            persistent: Demand::default(),
            start_slots: scenario.starts.saturating_sub(host.starting),
        });
        let waits = |waits: &Waits| {
            let id = waits.id();
            let plain = scenario.waiting(id);
            let holder = waits.job.map(|job| self.jobs[job].holder().clone());
            Waiting {
                holder: holder.unwrap_or_else(|| plain.holder.clone()),
                submitted: waits.vms[0] as u64,
                waited_ms: self.now_ms - waits.since_ms,
                demand: self.vms[waits.vms[0]].size,
                count: u32::try_from(waits.vms.len()).unwrap_or(u32::MAX),
                ..plain
            }
        };
        Queue {
            hosts: room.collect(),
            waiting: self.waiting.iter().map(waits).collect(),
            held: self.held.clone(),
            ..Queue::default()
        }
    }
}
