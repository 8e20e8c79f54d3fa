//! The simulated cluster: an event loop with a clock of its own, in one thread.
//!
//! Between two events nothing changes, so what a host's VMs used, waited for and lost meanwhile is added up when something changes at that
//! host. Processors are shared by what is wanted. Times are whole seconds, but for the length of a move, which is rounded up to them.

mod seen;
mod start;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use perigee_model::{HostId, SiteId, VmId};
use perigee_planner::balance::COPYING_CPUS;

use super::loads::{self, Moment};
use super::outcome::Run;
use super::price::Prices;
use super::rules::{Mover, Rule, View};
use super::scenario::Scenario;
use crate::random::Random;

/// vCPUs of each VM.
const VCPUS: u32 = 8;
/// vCPUs for each processor of a host.
const OVERCOMMIT: u32 = 16;
/// How long a host is away that fails.
const AWAY_S: u64 = 600;
/// How long until the VMs of a host that fails are started elsewhere.
const RESTART_S: u64 = 60;
/// A VM that returns so soon to the host it has left went to and fro.
const BACK_S: u64 = 1800;
/// A move takes so much of what was predicted, at least and at most.
const TAKES: (f64, f64) = (0.7, 1.6);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// What the VM wants changes, unless it has changed since.
    Load {
        vm: usize,
        turn: u32,
    },
    Arrives {
        vm: usize,
        runs_s: u64,
    },
    Ends(usize),
    /// A move that has not been given up since.
    Moved {
        vm: usize,
        turn: u32,
    },
    Fails(usize),
    Returns(usize),
    Restarts(usize),
    Look,
}

struct Host {
    id: HostId,
    site: SiteId,
    is_up: bool,
    in_a_move: bool,
    vms: Vec<usize>,
    free_memory_bytes: u64,
    free_vcpus: u32,
    /// Processors that moves take.
    copying: f64,
    settled_s: u64,
    lost_s: f64,
}

struct Vm {
    id: VmId,
    host: Option<usize>,
    base: f64,
    wanted: f64,
    load_turn: u32,
    /// The host that has its data.
    data: Option<usize>,
    ends_s: Option<u64>,
    used_s: f64,
    waited_s: f64,
    moving_to: Option<usize>,
    move_turn: u32,
    moved_s: Option<u64>,
    left: Option<usize>,
    has_ended: bool,
}

pub struct World<'a> {
    scenario: &'a Scenario,
    rule: Rule,
    seed: u64,
    /// What comes whatever the rule does.
    random: Random,
    /// What the rule's own acts meet.
    luck: Random,
    prices: Prices,
    now_s: u64,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    hosts: Vec<Host>,
    host_numbers: BTreeMap<HostId, usize>,
    vms: Vec<Vm>,
    vm_numbers: BTreeMap<VmId, usize>,
    /// Jobs that wait, with the time of their arrival and how long they run.
    waiting: Vec<(usize, u64, Option<u64>)>,
    hunted: usize,
    looked_s: u64,
    run: Run,
}

/// Runs the scenario once. The same seed gives the same run.
pub fn run(scenario: &Scenario, rule: Rule, seed: u64) -> Run {
    let mut world = World::new(scenario, rule, seed);
    world.fill();
    let mut mover = Mover::new(rule, seed);
    while let Some(Reverse((at_s, event))) = world.events.pop() {
        if at_s > scenario.length_s {
            break;
        }
        world.now_s = at_s;
        match event {
            Event::Look => world.look(&mut mover),
            other => world.apply(other),
        }
    }
    world.now_s = scenario.length_s;
    world.end()
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario, rule: Rule, seed: u64) -> Self {
        let hosts: Vec<Host> = (0..scenario.hosts).map(|number| host(scenario, number)).collect();
        let numbers = hosts.iter().enumerate().map(|(number, host)| (host.id.clone(), number));
        Self {
            rule,
            seed,
            random: Random(seed),
            luck: Random(!seed),
            prices: Prices::of(scenario),
            now_s: 0,
            events: BinaryHeap::new(),
            host_numbers: numbers.collect(),
            hosts,
            vms: Vec::new(),
            vm_numbers: BTreeMap::new(),
            waiting: Vec::new(),
            hunted: 0,
            looked_s: 0,
            run: Run { seed, ..Run::default() },
            scenario,
        }
    }

    /// All that comes whatever the rule does: VMs, jobs and failures.
    fn fill(&mut self) {
        let Scenario { hosts, vms, length_s, .. } = *self.scenario;
        let first = if self.scenario.starts_skewed { hosts.div_ceil(2) } else { hosts };
        for number in 0..vms {
            let vm = self.add_vm();
            let at = if self.scenario.starts_skewed { self.any(first) } else { number % hosts };
            // A host that is full gives the VM to the next one.
            let room = (0..hosts).map(|next| (at + next) % hosts).find(|host| self.has_room(*host));
            if let Some(at) = room {
                self.put(vm, at);
            } else {
                self.waiting.push((vm, 0, None));
            }
        }
        for _ in 0..self.scenario.jobs_per_hour * length_s / 3600 {
            let at_s = self.random.between((0, length_s));
            let (vm, runs_s) = (self.add_vm(), loads::job_s(&mut self.random));
            self.at(at_s, Event::Arrives { vm, runs_s });
        }
        for _ in 0..self.scenario.failures {
            let (at_s, host) = (self.random.between((0, length_s)), self.any(hosts));
            self.at(at_s, Event::Fails(host));
        }
        self.at(self.scenario.look_s, Event::Look);
    }

    fn at(&mut self, at_s: u64, event: Event) {
        self.events.push(Reverse((at_s, event)));
    }

    fn any(&mut self, count: usize) -> usize {
        usize::try_from(self.random.next() % count.max(1) as u64).unwrap_or(0)
    }

    fn add_vm(&mut self) -> usize {
        let number = self.vms.len();
        let id = VmId::new(format!("vm{number}")).expect("letters and digits");
        let base = loads::base(&mut self.random);
        let hosts = self.scenario.hosts;
        let data = self.scenario.far.map(|_| self.any(hosts));
        self.vm_numbers.insert(id.clone(), number);
        self.vms.push(Vm {
            id,
            host: None,
            base,
            wanted: 0.0,
            load_turn: 0,
            data,
            ends_s: None,
            used_s: 0.0,
            waited_s: 0.0,
            moving_to: None,
            move_turn: 0,
            moved_s: None,
            left: None,
            has_ended: false,
        });
        number
    }

    fn has_room(&self, host: usize) -> bool {
        let host = &self.hosts[host];
        host.is_up
            && host.free_memory_bytes >= self.scenario.vm_memory_bytes
            && host.free_vcpus >= VCPUS
    }

    /// The share of its time that the VM loses to the network there.
    fn data_lost(&self, vm: usize, host: usize) -> f64 {
        let (Some(home), Some(far)) = (self.vms[vm].data, self.scenario.far) else { return 0.0 };
        match (home == host, self.hosts[home].site == self.hosts[host].site) {
            (true, _) => 0.0,
            (false, true) => far / 10.0,
            (false, false) => far,
        }
    }

    /// Adds up what has happened at the host until now. To be called before anything changes there.
    fn settle(&mut self, host: usize) {
        let passed_s = (self.now_s - self.hosts[host].settled_s) as f64;
        self.hosts[host].settled_s = self.now_s;
        if passed_s <= 0.0 {
            return;
        }
        let vms = std::mem::take(&mut self.hosts[host].vms);
        let wanted: f64 = vms.iter().map(|vm| self.vms[*vm].wanted).sum();
        let cpus = f64::from(self.scenario.cpus);
        let share = (cpus / (wanted + self.hosts[host].copying).max(cpus)).min(1.0);
        for &vm in &vms {
            let by_network = self.data_lost(vm, host) * passed_s;
            let one = &mut self.vms[vm];
            one.used_s += one.wanted * share * passed_s;
            one.waited_s += one.wanted * (1.0 - share) * passed_s;
            self.run.wanted_s += one.wanted * passed_s;
            self.run.waited_s += one.wanted * (1.0 - share) * passed_s;
            self.run.network_s += by_network;
        }
        self.hosts[host].lost_s += wanted * (1.0 - share) * passed_s;
        self.hosts[host].vms = vms;
    }

    fn put(&mut self, vm: usize, host: usize) {
        self.settle(host);
        self.hosts[host].vms.push(vm);
        self.hosts[host].free_memory_bytes -= self.scenario.vm_memory_bytes;
        self.hosts[host].free_vcpus -= VCPUS;
        self.vms[vm].host = Some(host);
        self.change_load(vm);
    }

    fn take(&mut self, vm: usize) {
        let Some(host) = self.vms[vm].host.take() else { return };
        self.settle(host);
        self.hosts[host].vms.retain(|one| *one != vm);
        self.release(host);
    }

    fn release(&mut self, host: usize) {
        self.hosts[host].free_memory_bytes += self.scenario.vm_memory_bytes;
        self.hosts[host].free_vcpus += VCPUS;
    }

    fn change_load(&mut self, vm: usize) {
        let Some(host) = self.vms[vm].host else { return };
        self.settle(host);
        let moment = Moment {
            now_s: self.now_s,
            vm,
            groups: self.scenario.hosts,
            moved_s: self.vms[vm].moved_s,
            host,
            hunted: self.hunted,
        };
        let one = &mut self.vms[vm];
        let (wanted, until_s) = loads::wanted(self.scenario.load, one.base, self.seed, moment);
        one.wanted = wanted.min(f64::from(VCPUS));
        one.load_turn += 1;
        let turn = one.load_turn;
        if until_s <= self.scenario.length_s {
            self.at(until_s, Event::Load { vm, turn });
        }
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Load { vm, turn } if self.vms[vm].load_turn == turn => self.change_load(vm),
            Event::Load { .. } | Event::Look => {}
            Event::Arrives { vm, runs_s } => self.waiting.push((vm, self.now_s, Some(runs_s))),
            Event::Ends(vm) => {
                self.give_up_move(vm);
                self.take(vm);
                self.vms[vm].has_ended = true;
            }
            Event::Moved { vm, turn } if self.vms[vm].move_turn == turn => self.moved(vm),
            Event::Moved { .. } => {}
            Event::Fails(host) => self.fail(host),
            Event::Returns(host) => self.hosts[host].is_up = true,
            Event::Restarts(vm) if !self.vms[vm].has_ended => {
                let left_s = self.vms[vm].ends_s.map(|ends_s| ends_s.saturating_sub(self.now_s));
                self.waiting.push((vm, self.now_s, left_s));
            }
            Event::Restarts(_) => {}
        }
    }

    fn fail(&mut self, host: usize) {
        if !self.hosts[host].is_up {
            return;
        }
        self.settle(host);
        self.hosts[host].is_up = false;
        self.at(self.now_s + AWAY_S, Event::Returns(host));
        let coming = |vm: &usize| self.vms[*vm].moving_to == Some(host);
        let coming: Vec<usize> = (0..self.vms.len()).filter(coming).collect();
        for vm in coming {
            self.give_up_move(vm);
        }
        for vm in self.hosts[host].vms.clone() {
            self.give_up_move(vm);
            self.take(vm);
            self.run.failed += 1;
            self.at(self.now_s + RESTART_S, Event::Restarts(vm));
        }
    }

    fn begin_move(&mut self, vm: usize, to: usize) {
        let Some(from) = self.vms[vm].host else { return };
        let is_busy = self.hosts[from].in_a_move || self.hosts[to].in_a_move;
        if from == to || is_busy || self.vms[vm].moving_to.is_some() || !self.has_room(to) {
            self.run.refused += 1;
            return;
        }
        let cost = self.prices.of_move(&self.hosts[from].site, &self.hosts[to].site).clone();
        let times = TAKES.0 + (TAKES.1 - TAKES.0) * self.luck.share();
        self.run.moves += 1;
        self.run.moving_s += self.vms[vm].wanted * cost.job_s * times;
        self.hosts[to].free_memory_bytes -= self.scenario.vm_memory_bytes;
        self.hosts[to].free_vcpus -= VCPUS;
        for host in [from, to] {
            self.settle(host);
            self.hosts[host].copying += COPYING_CPUS;
            self.hosts[host].in_a_move = true;
        }
        self.vms[vm].moving_to = Some(to);
        self.vms[vm].move_turn += 1;
        let turn = self.vms[vm].move_turn;
        let takes_s = std::time::Duration::from_secs_f64(cost.total_s * times).as_secs() + 1;
        self.at(self.now_s + takes_s, Event::Moved { vm, turn });
    }

    /// Ends the VM's move, if there is one, and returns its hosts. The room at the target is free again.
    fn end_move(&mut self, vm: usize) -> Option<(usize, usize)> {
        let to = self.vms[vm].moving_to.take()?;
        let from = self.vms[vm].host?;
        self.vms[vm].move_turn += 1;
        for host in [from, to] {
            self.settle(host);
            self.hosts[host].copying -= COPYING_CPUS;
            self.hosts[host].in_a_move = false;
        }
        self.release(to);
        Some((from, to))
    }

    fn give_up_move(&mut self, vm: usize) {
        if self.end_move(vm).is_some() {
            self.run.given_up += 1;
        }
    }

    fn moved(&mut self, vm: usize) {
        let Some((from, to)) = self.end_move(vm) else { return };
        let since_s = self.vms[vm].moved_s.map(|moved_s| self.now_s - moved_s);
        if self.vms[vm].left == Some(to) && since_s.is_some_and(|since_s| since_s < BACK_S) {
            self.run.back += 1;
        }
        (self.vms[vm].left, self.vms[vm].moved_s) = (Some(from), Some(self.now_s));
        self.hunted = to;
        self.take(vm);
        self.put(vm, to);
    }

    fn look(&mut self, mover: &mut Mover) {
        (0..self.hosts.len()).for_each(|host| self.settle(host));
        self.start_waiting();
        if self.run.trace.len() as u64 * self.scenario.length_s / 60 <= self.now_s {
            let hours = self.now_s as f64 / 3600.0;
            self.run.trace.push((hours, self.run.lost_s()));
        }
        let moves = {
            let look = self.measured();
            let elsewhere = |vm: &VmId, host: &HostId| self.elsewhere(vm, host);
            let view = View { now_s: self.now_s, look: &look, elsewhere: &elsewhere };
            let began = std::time::Instant::now();
            let moves = mover.moves(&view);
            self.run.decided_s.push(began.elapsed().as_secs_f64());
            self.run.looks += 1;
            moves
        };
        for (vm, to) in moves {
            self.begin_move(self.vm_numbers[&vm], self.host_numbers[&to]);
        }
        self.vms.iter_mut().for_each(|vm| (vm.used_s, vm.waited_s) = (0.0, 0.0));
        self.looked_s = self.now_s;
        self.at(self.now_s + self.scenario.look_s, Event::Look);
    }

    fn end(mut self) -> Run {
        (0..self.hosts.len()).for_each(|host| self.settle(host));
        self.run.trace.push((self.now_s as f64 / 3600.0, self.run.lost_s()));
        let worst = self.hosts.iter().map(|host| host.lost_s).fold(0.0, f64::max);
        self.run.worst_host_s = worst;
        self.run
    }
}

fn host(scenario: &Scenario, number: usize) -> Host {
    Host {
        id: HostId::new(format!("h{number}")).expect("letters and digits"),
        site: SiteId::new(format!("s{}", number % scenario.sites)).expect("letters and digits"),
        is_up: true,
        in_a_move: false,
        vms: Vec::new(),
        free_memory_bytes: scenario.memory_bytes,
        free_vcpus: scenario.cpus * OVERCOMMIT,
        copying: 0.0,
        settled_s: 0,
        lost_s: 0.0,
    }
}
