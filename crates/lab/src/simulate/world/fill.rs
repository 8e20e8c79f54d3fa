//! What comes whatever the rule does.

use perigee_model::VmId;
use perigee_planner::queue::Demand;

use super::start::Waits;
use super::{Event, Vm, World};
use crate::simulate::jobs::{Jobs, Like};
use crate::simulate::loads;
use crate::simulate::price::Prices;
use crate::simulate::scenario::{Scenario, VM_VCPUS};

impl World<'_> {
    /// All that comes whatever the rule does: VMs, jobs and failures.
    pub(super) fn fill(&mut self) {
        let Scenario { hosts, vms, length_s, .. } = *self.scenario;
        let first = if self.scenario.starts_skewed { hosts.div_ceil(2) } else { hosts };
        for number in 0..vms {
            let vm = self.add_vm();
            let at = if self.scenario.starts_skewed { self.any(first) } else { number % hosts };
            // A host that is full gives the VM to the next one.
            let room = (0..hosts).map(|next| (at + next) % hosts);
            let size = self.vms[vm].size;
            if let Some(at) = room.into_iter().find(|host| self.has_room(*host, size)) {
                self.put(vm, at);
            } else {
                self.wait(Waits::of_vm(vm, 0, None));
            }
        }
        self.fill_jobs();
        for _ in 0..self.scenario.failures {
            let (at_s, host) = (self.random.between((0, length_s)), self.any(hosts));
            self.at(at_s * 1000, Event::Fails(host));
        }
        self.at(self.scenario.look_s * 1000, Event::Look);
        self.follow();
    }

    fn fill_jobs(&mut self) {
        let length_s = self.scenario.length_s;
        let scenario = self.scenario;
        let random = match &scenario.jobs {
            Jobs::AtRandom(random) => *random,
            Jobs::Listed(listed) => {
                for (number, job) in listed.jobs.iter().enumerate() {
                    self.at(job.at_ms, Event::Submitted(number));
                }
                return;
            }
        };
        let count = usize::try_from(random.per_hour * length_s / 3600).unwrap_or(0);
        for number in 0..count {
            let at_ms = self.random.between((0, length_s)) * 1000;
            if random.like == Like::Borg {
                self.at(at_ms, Event::Submitted(number));
                continue;
            }
            let vm = self.add_vm();
            let runs_s = match random.like {
                Like::Azure => loads::azure_s(&mut self.random),
                _ => loads::job_s(&mut self.random),
            };
            self.at(at_ms, Event::Arrives { vm, runs_s });
        }
    }

    /// A VM of the scenario's size.
    fn add_vm(&mut self) -> usize {
        let memory_bytes = self.scenario.vm_memory_bytes;
        self.add_vm_of(Demand { cpus: VM_VCPUS, memory_bytes })
    }

    pub(super) fn add_vm_of(&mut self, size: Demand) -> usize {
        let prices = || Prices::of(self.scenario, size.memory_bytes);
        self.prices.entry(size.memory_bytes).or_insert_with(prices);
        let number = self.vms.next();
        let id = VmId::new(format!("vm{number}")).expect("letters and digits");
        let base = loads::base(&mut self.random);
        let hosts = self.scenario.hosts;
        let data = self.scenario.far.map(|_| self.any(hosts));
        self.vms.add(Vm {
            id,
            host: None,
            base,
            wanted: 0.0,
            load_turn: 0,
            size,
            data,
            reads: None,
            ends_s: None,
            work: None,
            used_s: 0.0,
            waited_s: 0.0,
            moving_to: None,
            move_turn: 0,
            moves_over: None,
            moved_s: None,
            left: None,
            has_ended: false,
        });
        number
    }
}
