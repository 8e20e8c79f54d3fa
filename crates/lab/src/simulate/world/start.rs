//! Starts what waits, by the planner's queue.

use std::collections::BTreeMap;

use perigee_model::{HostId, JobId};
use perigee_planner::queue::{Demand, HostRoom, Queue, Turn, Waiting, schedule};

use super::{Event, Host, OVERCOMMIT, VCPUS, World};
use crate::simulate::rules::Rule;
use crate::simulate::scenario::Scenario;

impl World<'_> {
    /// Starts what waits, by the planner's queue.
    pub(super) fn start_waiting(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let wanted: BTreeMap<&HostId, f64> = self
            .hosts
            .iter()
            .map(|host| (&host.id, host.vms.iter().map(|vm| self.vms[*vm].wanted).sum()))
            .collect();
        let (rule, random) = (self.rule, &mut self.luck);
        let turns =
            schedule(&queue(self.scenario, &self.hosts, &self.waiting, self.now_s), |_, hosts| {
                let chosen = match rule {
                    Rule::FirstFit => hosts.first(),
                    Rule::Random => random.pick(hosts),
                    _ => hosts.iter().min_by(|a, b| wanted[a].total_cmp(&wanted[b])),
                };
                chosen.cloned().ok_or_else(|| "no host has room".to_owned().into())
            });
        for (job, turn) in turns {
            let Turn::Start(host) = turn else { continue };
            let is_it = |(vm, ..): &(usize, u64, Option<u64>)| job_of(*vm) == job;
            let Some(place) = self.waiting.iter().position(is_it) else { continue };
            let (vm, since_s, runs_s) = self.waiting.swap_remove(place);
            self.run.started += 1;
            self.run.queued_s += (self.now_s - since_s) as f64;
            if let Some(runs_s) = runs_s {
                self.vms[vm].ends_s = Some(self.now_s + runs_s);
                self.at(self.now_s + runs_s, Event::Ends(vm));
            }
            self.put(vm, self.host_numbers[&host]);
        }
    }
}

fn job_of(vm: usize) -> JobId {
    JobId::new(format!("j-{vm}")).expect("letters and digits")
}

fn queue(
    scenario: &Scenario,
    hosts: &[Host],
    waiting: &[(usize, u64, Option<u64>)],
    now_s: u64,
) -> Queue {
    let total = Demand { cpus: scenario.cpus * OVERCOMMIT, memory_bytes: scenario.memory_bytes };
    let room = |host: &Host| HostRoom {
        id: host.id.clone(),
        site: host.site.clone(),
        total,
        free: Demand { cpus: host.free_vcpus, memory_bytes: host.free_memory_bytes },
        persistent: Demand::default(),
        start_slots: u32::MAX,
    };
    let demand = Demand { cpus: VCPUS, memory_bytes: scenario.vm_memory_bytes };
    let waits = |(vm, since_s, _): &(usize, u64, Option<u64>)| {
        let submitted = *vm as u64;
        let waited_ms = (now_s - since_s) * 1000;
        Waiting { submitted, waited_ms, demand, ..scenario.waiting(job_of(*vm)) }
    };
    Queue {
        hosts: hosts.iter().filter(|host| host.is_up).map(room).collect(),
        waiting: waiting.iter().map(waits).collect(),
        ..Queue::default()
    }
}
