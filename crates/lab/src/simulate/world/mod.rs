//! The simulated cluster: an event loop with a clock of its own, in one thread.
//!
//! Between two events nothing changes, so what a host's VMs used, waited for and lost meanwhile is added up when something changes at that
//! host. Processors are shared by what is wanted, and links by `network.rs`. The clock counts milliseconds. Loads change, and moves take,
//! whole seconds.
//!
//! | question | file |
//! |---|---|
//! | What does a host's clock, a load and a failure do? | this one |
//! | What comes whatever the rule does? | `fill.rs` |
//! | What happens at one moment? | `event.rs` |
//! | How does a job come to its end? | `work.rs` |
//! | How do VMs move? | `moves.rs` |
//! | Who sends what to whom? | `flows.rs` |
//! | What starts next, and where? | `start.rs`, `place.rs` |
//! | What does a rule see? | `seen.rs` |
//! | Which VMs are there? | `vms.rs` |

mod event;
mod fill;
mod flows;
mod moves;
mod place;
mod seen;
mod start;
#[cfg(test)]
mod tests;
mod vms;
mod work;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};

use perigee_model::{HostId, SiteId, VmId};
use perigee_planner::Cluster;
use perigee_planner::queue::{Demand, Holder};

use super::loads::{self, Moment};
use super::network::Network;
use super::outcome::Run;
use super::price::Prices;
use super::rules::{Mover, Rule, View};
use super::scenario::{Scenario, VM_VCPUS};
use crate::random::Random;
use event::Event;
use flows::{Owner, Reads};
use start::{Line, Waits};
use vms::Vms;
use work::{OfJob, Work};

/// How long a host is away that fails.
const AWAY_S: u64 = 600;
/// How long until the VMs of a host that fails are started elsewhere.
const RESTART_S: u64 = 60;

struct Host {
    id: HostId,
    site: SiteId,
    site_number: usize,
    is_up: bool,
    in_a_move: bool,
    vms: Vec<usize>,
    free_memory_bytes: u64,
    free_vcpus: u32,
    /// Processors that moves take.
    copying: f64,
    settled_ms: u64,
    lost_s: f64,
    /// VMs there whose jobs compute, and of these such as have not booted.
    with_work: u32,
    starting: u32,
    computed_turn: u32,
}

struct Vm {
    id: VmId,
    host: Option<usize>,
    base: f64,
    wanted: f64,
    load_turn: u32,
    size: Demand,
    /// The host that has its data.
    data: Option<usize>,
    /// What it reads of them over the network.
    reads: Option<Reads>,
    ends_s: Option<u64>,
    work: Option<Work>,
    used_s: f64,
    waited_s: f64,
    moving_to: Option<usize>,
    move_turn: u32,
    /// The flow of its move.
    moves_over: Option<usize>,
    moved_s: Option<u64>,
    left: Option<usize>,
    /// Its time was over while it waited to be started again. It ends for good when it stops the next time.
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
    /// By the memory of the VMs.
    prices: BTreeMap<u64, Prices>,
    network: Network<Owner>,
    now_ms: u64,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    hosts: Vec<Host>,
    host_numbers: HashMap<HostId, usize>,
    /// What the planner knows of the hosts that are up, as the last pass of the queue has left it.
    cluster: Option<Cluster>,
    vms: Vms,
    line: Line,
    /// The scenario's jobs that compute, those that have arrived.
    jobs: Vec<OfJob>,
    /// What the jobs of each owner have that have started.
    held: BTreeMap<Holder, Demand>,
    /// Hosts whose VMs get more or less than when the end of their work was foreseen.
    changed: BTreeSet<usize>,
    /// Whether a job that computes may start that could not before.
    may_start: bool,
    hunted: usize,
    looked_ms: u64,
    run: Run,
}

/// Runs the scenario once. The same seed gives the same run.
pub fn run(scenario: &Scenario, rule: Rule, seed: u64) -> Run {
    let mut world = World::new(scenario, rule, seed);
    world.fill();
    let mut mover = Mover::new(rule, seed);
    while let Some(Reverse((at_ms, event))) = world.events.pop() {
        if at_ms > scenario.length_s * 1000 {
            break;
        }
        world.now_ms = at_ms;
        match event {
            Event::Look => world.look(&mut mover),
            other => world.apply(other),
        }
        let is_last = world.events.peek().is_none_or(|Reverse((next_ms, _))| *next_ms > at_ms);
        if is_last {
            world.follow();
        }
    }
    world.now_ms = scenario.length_s * 1000;
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
            prices: BTreeMap::new(),
            network: flows::network(scenario),
            now_ms: 0,
            events: BinaryHeap::new(),
            host_numbers: numbers.collect(),
            cluster: None,
            hosts,
            vms: Vms::default(),
            line: Line::default(),
            jobs: Vec::new(),
            held: BTreeMap::new(),
            changed: BTreeSet::new(),
            may_start: false,
            hunted: 0,
            looked_ms: 0,
            run: Run { seed, ..Run::default() },
            scenario,
        }
    }

    fn at(&mut self, at_ms: u64, event: Event) {
        self.events.push(Reverse((at_ms, event)));
    }

    fn now_s(&self) -> u64 {
        self.now_ms / 1000
    }

    fn any(&mut self, count: usize) -> usize {
        usize::try_from(self.random.next() % count.max(1) as u64).unwrap_or(0)
    }

    fn has_room(&self, host: usize, size: Demand) -> bool {
        let host = &self.hosts[host];
        host.is_up && host.free_memory_bytes >= size.memory_bytes && host.free_vcpus >= size.cpus
    }

    /// Adds up what has happened at the host until now. To be called before anything changes there.
    fn settle(&mut self, host: usize) {
        let passed_s = (self.now_ms - self.hosts[host].settled_ms) as f64 / 1000.0;
        self.hosts[host].settled_ms = self.now_ms;
        if self.hosts[host].with_work > 0 {
            self.changed.insert(host);
        }
        if passed_s <= 0.0 {
            return;
        }
        let share = self.share(host);
        let vms = std::mem::take(&mut self.hosts[host].vms);
        let mut wanted = 0.0;
        for &vm in &vms {
            let by_network = self.network_lost(vm, host) * passed_s;
            let one = &mut self.vms[vm];
            wanted += one.wanted;
            one.used_s += one.wanted * share * passed_s;
            one.waited_s += one.wanted * (1.0 - share) * passed_s;
            if let Some(work) = &mut one.work {
                work.computed(one.wanted * share * passed_s);
            }
            self.run.wanted_s += one.wanted * passed_s;
            self.run.waited_s += one.wanted * (1.0 - share) * passed_s;
            self.run.network_s += by_network;
        }
        self.hosts[host].lost_s += wanted * (1.0 - share) * passed_s;
        self.hosts[host].vms = vms;
    }

    /// The part of what its VMs want that they get of the host's processors.
    fn share(&self, host: usize) -> f64 {
        let host = &self.hosts[host];
        let wanted: f64 = host.vms.iter().map(|vm| self.vms[*vm].wanted).sum();
        let cpus = f64::from(self.scenario.cpus);
        (cpus / (wanted + host.copying).max(cpus)).min(1.0)
    }

    /// The vCPUs that are placed at the host, with those that a move there will bring.
    fn placed_vcpus(&self, host: &Host) -> u32 {
        self.scenario.cpus * self.scenario.overcommit - host.free_vcpus
    }

    fn put(&mut self, vm: usize, host: usize) {
        self.settle(host);
        let size = self.vms[vm].size;
        self.hosts[host].vms.push(vm);
        self.hosts[host].free_memory_bytes -= size.memory_bytes;
        self.hosts[host].free_vcpus -= size.cpus;
        if let Some(work) = &self.vms[vm].work {
            self.hosts[host].with_work += 1;
            self.hosts[host].starting += u32::from(!work.has_booted());
        }
        self.vms[vm].host = Some(host);
        self.begin_to_read(vm, host);
        self.change_load(vm);
    }

    fn take(&mut self, vm: usize) {
        let Some(host) = self.vms[vm].host.take() else { return };
        self.settle(host);
        self.hosts[host].vms.retain(|one| *one != vm);
        if let Some(work) = &self.vms[vm].work {
            self.hosts[host].with_work -= 1;
            self.hosts[host].starting -= u32::from(!work.has_booted());
        }
        self.end_to_read(vm);
        self.release(host, self.vms[vm].size);
    }

    fn release(&mut self, host: usize, size: Demand) {
        self.hosts[host].free_memory_bytes += size.memory_bytes;
        self.hosts[host].free_vcpus += size.cpus;
        self.may_start = true;
    }

    fn change_load(&mut self, vm: usize) {
        let Some(host) = self.vms[vm].host else { return };
        self.settle(host);
        if let Some(work) = &self.vms[vm].work {
            self.vms[vm].wanted = work.wants();
            return;
        }
        let moment = Moment {
            now_s: self.now_s(),
            vm,
            groups: self.scenario.hosts,
            moved_s: self.vms[vm].moved_s,
            host,
            hunted: self.hunted,
        };
        let one = &mut self.vms[vm];
        let (wanted, until_s) = loads::wanted(self.scenario.load, one.base, self.seed, moment);
        one.wanted = wanted.min(f64::from(VM_VCPUS));
        one.load_turn += 1;
        let turn = one.load_turn;
        if until_s <= self.scenario.length_s {
            self.at(until_s * 1000, Event::Load { vm, turn });
        }
    }

    fn apply(&mut self, event: Event) {
        if event.vm().is_some_and(|vm| !self.vms.has(vm)) {
            return;
        }
        match event {
            Event::Load { vm, turn } if self.vms[vm].load_turn == turn => self.change_load(vm),
            Event::Load { .. } | Event::Look => {}
            Event::Arrives { vm, runs_s } => {
                self.wait(Waits::of_vm(vm, self.now_ms, Some(runs_s)));
            }
            Event::Ends(vm) => {
                self.give_up_move(vm);
                if self.vms[vm].host.is_some() {
                    self.take(vm);
                    self.vms.forget(vm);
                } else {
                    self.vms[vm].has_ended = true;
                }
            }
            Event::Moved { vm, turn } if self.vms[vm].move_turn == turn => self.moved(vm),
            Event::Moved { .. } => {}
            Event::Fails(host) => self.fail(host),
            Event::Returns(host) => {
                self.hosts[host].is_up = true;
                self.cluster = None;
                self.may_start = true;
            }
            Event::Restarts(vm) if !self.vms[vm].has_ended => self.restart(vm),
            Event::Restarts(vm) => self.vms.forget(vm),
            Event::Submitted(job) => self.submitted(job),
            Event::Step { vm, turn } => self.step_done(vm, turn),
            Event::Computed { host, turn } => self.computed(host, turn),
        }
    }

    /// What follows from all that has happened at this moment: other shares of the links, other ends of jobs, and jobs that start.
    fn follow(&mut self) {
        while std::mem::take(&mut self.may_start) && !self.jobs.is_empty() {
            self.start_waiting();
        }
        self.share_links();
        for host in std::mem::take(&mut self.changed) {
            self.foresee(host);
        }
    }

    fn fail(&mut self, host: usize) {
        if !self.hosts[host].is_up {
            return;
        }
        self.settle(host);
        self.hosts[host].is_up = false;
        self.cluster = None;
        self.at(self.now_ms + AWAY_S * 1000, Event::Returns(host));
        let coming = self.vms.iter().filter(|(_, vm)| vm.moving_to == Some(host));
        for vm in coming.map(|(number, _)| number).collect::<Vec<_>>() {
            self.give_up_move(vm);
        }
        for vm in self.hosts[host].vms.clone() {
            self.give_up_move(vm);
            self.take(vm);
            self.lose_work(vm);
            self.run.failed += 1;
            self.at(self.now_ms + RESTART_S * 1000, Event::Restarts(vm));
        }
    }

    fn restart(&mut self, vm: usize) {
        let now_s = self.now_s();
        let left_s = self.vms[vm].ends_s.map(|ends_s| ends_s.saturating_sub(now_s));
        let job = self.vms[vm].work.as_ref().map(Work::job);
        self.wait(Waits { job, ..Waits::of_vm(vm, self.now_ms, left_s) });
        self.may_start = true;
    }

    fn look(&mut self, mover: &mut Mover) {
        (0..self.hosts.len()).for_each(|host| self.settle(host));
        self.start_waiting();
        if self.run.trace.len() as u64 * self.scenario.length_s / 60 <= self.now_s() {
            let hours = self.now_s() as f64 / 3600.0;
            self.run.trace.push((hours, self.run.lost_s()));
        }
        for vm in self.vms.take_gone() {
            mover.forget(&vm);
        }
        self.run.looks += 1;
        let moves = if mover.has_nothing_to_do(|| self.loses_nothing()) {
            Vec::new()
        } else {
            let look = self.measured();
            let elsewhere = |vm: &VmId, host: &HostId| self.elsewhere(vm, host);
            let view = View { now_s: self.now_s(), look: &look, elsewhere: &elsewhere };
            let began = std::time::Instant::now();
            let moves = mover.moves(&view);
            self.run.decided_s.push(began.elapsed().as_secs_f64());
            moves
        };
        for (vm, to) in moves {
            if let Some(vm) = self.vms.number(&vm) {
                self.begin_move(vm, self.host_numbers[&to]);
            }
        }
        self.vms.each(|vm| (vm.used_s, vm.waited_s) = (0.0, 0.0));
        self.looked_ms = self.now_ms;
        self.at(self.now_ms + self.scenario.look_s * 1000, Event::Look);
    }

    /// Since the look before. Of a log most looks are at hosts that have as much as their VMs want.
    fn loses_nothing(&self) -> bool {
        let loses = |(vm, one): (usize, &Vm)| {
            one.waited_s > 0.0 || one.host.is_some_and(|host| self.network_lost(vm, host) > 0.0)
        };
        !self.vms.iter().any(loses)
    }

    fn end(mut self) -> Run {
        (0..self.hosts.len()).for_each(|host| self.settle(host));
        let hours = self.now_s() as f64 / 3600.0;
        self.run.trace.push((hours, self.run.lost_s()));
        let worst = self.hosts.iter().map(|host| host.lost_s).fold(0.0, f64::max);
        self.run.worst_host_s = worst;
        self.run.jobs = self.times_of_jobs();
        self.run
    }
}

fn host(scenario: &Scenario, number: usize) -> Host {
    let site_number = number % scenario.sites;
    Host {
        id: HostId::new(format!("h{number}")).expect("letters and digits"),
        site: SiteId::new(format!("s{site_number}")).expect("letters and digits"),
        site_number,
        is_up: true,
        in_a_move: false,
        vms: Vec::new(),
        free_memory_bytes: scenario.memory_bytes,
        free_vcpus: scenario.cpus * scenario.overcommit,
        copying: 0.0,
        settled_ms: 0,
        lost_s: 0.0,
        with_work: 0,
        starting: 0,
        computed_turn: 0,
    }
}
