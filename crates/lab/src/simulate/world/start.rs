//! Starts what waits, by the planner's queue.

use std::collections::HashMap;

use perigee_model::{HostId, JobId};
use perigee_planner::queue::{Demand, HostRoom, Queue, Waiting, starts};

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

/// All that waits, in the order in which it came.
#[derive(Default)]
pub(super) struct Line {
    waits: Vec<Waits>,
    /// The same for the queue, which is asked at each change: a log may have thousands of jobs that wait.
    asks: Vec<Waiting>,
}

impl Line {
    /// What any of it needs at least: of two jobs, the vCPUs of one and the memory of the other.
    fn least(&self) -> Option<Demand> {
        self.asks.iter().map(|waiting| waiting.demand).reduce(Demand::least)
    }

    /// Takes these out, in this order.
    fn take(&mut self, numbers: impl Iterator<Item = usize>) -> Vec<Waits> {
        let mut all: Vec<Option<Waits>> =
            std::mem::take(&mut self.waits).into_iter().map(Some).collect();
        let taken = numbers.filter_map(|number| all[number].take()).collect();
        let mut stays = all.iter().map(Option::is_some);
        self.asks.retain(|_| stays.next().unwrap_or(true));
        self.waits = all.into_iter().flatten().collect();
        taken
    }
}

impl World<'_> {
    pub(super) fn wait(&mut self, waits: Waits) {
        let plain = self.scenario.waiting(waits.id());
        let holder = waits.job.map(|job| self.jobs[job].holder().clone());
        self.line.asks.push(Waiting {
            holder: holder.unwrap_or_else(|| plain.holder.clone()),
            submitted: waits.vms[0] as u64,
            demand: self.vms[waits.vms[0]].size,
            count: u32::try_from(waits.vms.len()).unwrap_or(u32::MAX),
            ..plain
        });
        self.line.waits.push(waits);
    }

    /// Starts what waits, by the planner's queue.
    pub(super) fn start_waiting(&mut self) {
        let Some(least) = self.line.least() else { return };
        if !(0..self.hosts.len()).any(|host| self.has_room(host, least)) {
            return;
        }
        let queue = self.queue();
        let numbers: HashMap<&JobId, usize> =
            queue.waiting.iter().enumerate().map(|(number, one)| (&one.job, number)).collect();
        let mut luck = std::mem::replace(&mut self.luck, crate::random::Random(0));
        let cluster = self.cluster.take();
        let mut places = Places::of(self, cluster);
        let starts = starts(&queue, |waiting, hosts| {
            places.choose(&self.line.waits[numbers[&waiting.job]], hosts, &mut luck)
        });
        let started = starts.into_iter().map(|(job, hosts)| (numbers[&job], hosts));
        let started: Vec<(usize, Vec<HostId>)> = started.collect();
        self.cluster = places.into_cluster();
        self.luck = luck;
        (self.line.asks, self.held) = (queue.waiting, queue.held);
        if started.is_empty() {
            return;
        }
        let waits = self.line.take(started.iter().map(|(number, _)| *number));
        for (waits, (_, hosts)) in waits.iter().zip(&started) {
            self.start(waits, hosts);
        }
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

    /// What waits and what is held are moved there, and come back from it.
    fn queue(&mut self) -> Queue {
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
        let hosts = room.collect();
        let mut waiting = std::mem::take(&mut self.line.asks);
        for (asks, waits) in waiting.iter_mut().zip(&self.line.waits) {
            asks.waited_ms = self.now_ms - waits.since_ms;
        }
        let held = std::mem::take(&mut self.held);
        Queue { hosts, waiting, held, ..Queue::default() }
    }
}
