//! The simulated cluster with hosts that come and go: an event loop with a clock of its own.
//!
//! A job is copied to its host if its data are elsewhere, boots, computes, and sends what it wrote home. A host that is taken back loses the
//! work of its jobs, and they wait again. Nothing arrives after the scenario's hours, and the run goes on until all jobs have ended, so that
//! each rule pays for all of its queue.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::arrivals::{self, Arrival};
use super::file::Renting;
use super::hosts::{Host, Ledger};
use super::market::{self, Market};
use super::rules::RentRule;
use crate::random::Random;
use crate::simulate::network::{FlowId, Network, Wish};
use crate::simulate::outcome::{Bill, Run};
use crate::simulate::scenario::Scenario;

/// The ways to and from the provider's site.
const TO_PROVIDER: usize = 0;
const FROM_PROVIDER: usize = 1;

/// After so many times the scenario's length the run ends in any case.
const LENGTHS_MOST: u64 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrives(usize),
    /// A host that was asked for has started.
    Ready(usize),
    /// The spot hosts of an offer are taken back.
    TakenBack(usize),
    /// A step of a job is over, unless something else has happened since.
    Step {
        job: usize,
        turn: u32,
    },
    Look,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Waits,
    Copies,
    Computes,
    Returns,
    Ended,
}

/// A job that has arrived.
pub(super) struct Job {
    pub arrival: Arrival,
    pub step: Step,
    pub host: Option<usize>,
    turn: u32,
    flow: Option<FlowId>,
    /// What it was charged for what leaves the provider's site, in millionths of a dollar.
    egress: f64,
    /// When it will have ended, as was predicted at its start: expected, and the high end.
    pub ends_ms: u64,
    pub ends_high_ms: u64,
    ended_ms: u64,
}

pub(super) struct World<'a> {
    pub scenario: &'a Scenario,
    pub renting: &'a Renting,
    pub rule: RentRule,
    pub market: Market,
    /// What the rule's own acts meet.
    pub luck: Random,
    network: Network<usize>,
    pub flows: u32,
    pub now_ms: u64,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    arrivals: Vec<Arrival>,
    pub jobs: Vec<Job>,
    pub hosts: Vec<Host>,
    /// In the order of their arrival.
    pub waiting: Vec<usize>,
    /// Of each offer: when it was refused last, and how often since the last start.
    pub refusals: BTreeMap<usize, (u64, u32)>,
    pub ledger: Ledger,
    pub bill: Bill,
    may_start: bool,
    run: Run,
}

/// Runs the scenario once. The same seed gives the same run.
pub fn run(scenario: &Scenario, renting: &Renting, rule: RentRule, seed: u64) -> Run {
    let mut world = World::new(scenario, renting, rule, seed);
    let last_ms = scenario.length_s * 1000 * LENGTHS_MOST;
    while let Some(Reverse((at_ms, event))) = world.events.pop() {
        if at_ms > last_ms || world.is_over() {
            break;
        }
        world.now_ms = at_ms;
        world.apply(event);
        let is_last = world.events.peek().is_none_or(|Reverse((next_ms, _))| *next_ms > at_ms);
        if is_last {
            world.follow();
        }
    }
    world.end()
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario, renting: &'a Renting, rule: RentRule, seed: u64) -> Self {
        let length_s = scenario.length_s;
        let way = scenario.uplink_bytes_per_s.unwrap_or(scenario.link_bytes_per_s) as f64;
        let mut world = Self {
            scenario,
            renting,
            rule,
            market: Market::new(renting.offers.len(), length_s * LENGTHS_MOST, seed),
            luck: Random(!seed),
            network: Network::new(vec![way; 2]),
            flows: 0,
            now_ms: 0,
            events: BinaryHeap::new(),
            arrivals: arrivals::of(&renting.jobs, length_s, seed),
            jobs: Vec::new(),
            hosts: (0..scenario.hosts).map(|number| Host::own(number, scenario)).collect(),
            waiting: Vec::new(),
            refusals: BTreeMap::new(),
            ledger: Ledger::new(renting.budget),
            bill: Bill::default(),
            may_start: false,
            run: Run { seed, ..Run::default() },
        };
        for number in 0..world.arrivals.len() {
            let at_ms = world.arrivals[number].at_ms;
            world.at(at_ms, Event::Arrives(number));
        }
        for (offer, offered) in renting.offers.iter().enumerate() {
            if offered.offer.spot {
                world.next_taken_back(offer, 0);
            }
        }
        world.at(scenario.look_s * 1000, Event::Look);
        world
    }

    fn at(&mut self, at_ms: u64, event: Event) {
        self.events.push(Reverse((at_ms, event)));
    }

    fn next_taken_back(&mut self, offer: usize, from_ms: u64) {
        if let Some(at_ms) = self.market.taken_back_ms(offer, from_ms) {
            self.at(at_ms, Event::TakenBack(offer));
        }
    }

    fn is_over(&self) -> bool {
        let have_arrived = self.jobs.len() == self.arrivals.len();
        let none_rented = self.hosts.iter().all(|host| host.is_own() || host.is_gone);
        have_arrived && none_rented && self.jobs.iter().all(|job| job.step == Step::Ended)
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Arrives(number) => {
                let arrival = self.arrivals[number].clone();
                self.waiting.push(self.jobs.len());
                self.jobs.push(Job {
                    arrival,
                    step: Step::Waits,
                    host: None,
                    turn: 0,
                    flow: None,
                    egress: 0.0,
                    ends_ms: 0,
                    ends_high_ms: 0,
                    ended_ms: 0,
                });
                self.may_start = true;
            }
            Event::Ready(host) => {
                self.hosts[host].has_started(self.now_ms);
                self.may_start = true;
            }
            Event::TakenBack(offer) => self.taken_back(offer),
            Event::Step { job, turn } if self.jobs[job].turn == turn => self.next_step(job),
            Event::Step { .. } => {}
            Event::Look => self.look(),
        }
    }

    fn look(&mut self) {
        (0..self.hosts.len()).for_each(|host| self.pay(host));
        let hours = self.now_ms as f64 / 3_600_000.0;
        let spent = self.bill.machines + self.bill.egress;
        if self.now_ms.is_multiple_of(600_000) {
            self.run.trace.push((hours, spent));
        }
        let began = std::time::Instant::now();
        self.rent();
        self.run.decided_s.push(began.elapsed().as_secs_f64());
        self.run.looks += 1;
        self.may_start = true;
        self.at(self.now_ms + self.scenario.look_s * 1000, Event::Look);
    }

    fn follow(&mut self) {
        if std::mem::take(&mut self.may_start) && !self.waiting.is_empty() {
            self.start_waiting();
        }
        self.share_links();
    }

    fn share_links(&mut self) {
        for changed in self.network.share(self.now_ms) {
            let Some(in_ms) = changed.ends_in_ms else { continue };
            let job = changed.owner;
            self.jobs[job].turn += 1;
            let turn = self.jobs[job].turn;
            self.at(self.now_ms + in_ms, Event::Step { job, turn });
        }
    }

    /// A host has started for the job.
    pub fn start(&mut self, number: usize, host: usize) {
        self.run.started += 1;
        let run = self.predicted(number, host);
        let egress = self.egress(number, host);
        let job = &mut self.jobs[number];
        self.run.queued_s += (self.now_ms - job.arrival.at_ms) as f64 / 1000.0;
        job.host = Some(host);
        job.egress = egress;
        self.bill.egress += egress / 1e6;
        job.ends_ms = self.now_ms + market::milliseconds(run.expected_s);
        job.ends_high_ms = self.now_ms + market::milliseconds(run.high_s);
        let (cpus, memory_bytes) = (job.arrival.cpus, job.arrival.memory_bytes);
        self.hosts[host].take(number, cpus, memory_bytes);
        let there = self.hosts[host].jobs.iter();
        let together = there.map(|job| self.jobs[*job].arrival.waiting_per_hour).sum();
        self.hosts[host].waiting_per_hour = together;
        self.begin(number, Step::Copies);
    }

    fn begin(&mut self, number: usize, step: Step) {
        let Some(host) = self.jobs[number].host else { return };
        self.jobs[number].step = step;
        self.jobs[number].turn += 1;
        let is_there = !self.hosts[host].is_own();
        let arrival = &self.jobs[number].arrival;
        let bytes = match step {
            Step::Copies if arrival.is_at_provider != is_there => arrival.reads_bytes,
            Step::Returns if is_there => arrival.writes_bytes,
            _ => 0,
        };
        match step {
            Step::Computes => {
                let speed = self.speed(host);
                let seconds = self.scenario.start.boot_s + arrival.compute_s / speed;
                let (at_ms, turn) =
                    (self.now_ms + market::milliseconds(seconds), self.jobs[number].turn);
                self.at(at_ms, Event::Step { job: number, turn });
            }
            Step::Copies | Step::Returns if bytes > 0 => {
                let is_out = (step == Step::Returns) || !is_there;
                let links = vec![if is_out { FROM_PROVIDER } else { TO_PROVIDER }];
                let wish = Wish { links, most: f64::MAX };
                let flow = self.network.begin(number, wish, Some(bytes as f64), self.now_ms);
                self.jobs[number].flow = Some(flow);
                self.flows += 1;
            }
            Step::Copies | Step::Returns => self.next_step(number),
            Step::Waits | Step::Ended => {}
        }
    }

    fn end_flow(&mut self, number: usize) {
        if let Some(flow) = self.jobs[number].flow.take() {
            self.network.end(flow);
            self.flows -= 1;
        }
    }

    fn next_step(&mut self, number: usize) {
        self.end_flow(number);
        match self.jobs[number].step {
            Step::Copies => self.begin(number, Step::Computes),
            Step::Computes => self.begin(number, Step::Returns),
            Step::Returns => {
                self.leave_host(number);
                let job = &mut self.jobs[number];
                (job.step, job.ended_ms) = (Step::Ended, self.now_ms);
            }
            Step::Waits | Step::Ended => {}
        }
    }

    fn leave_host(&mut self, number: usize) {
        let Some(host) = self.jobs[number].host.take() else { return };
        let arrival = &self.jobs[number].arrival;
        let (cpus, memory_bytes) = (arrival.cpus, arrival.memory_bytes);
        self.hosts[host].release(number, cpus, memory_bytes, self.now_ms);
        self.may_start = true;
    }

    fn taken_back(&mut self, offer: usize) {
        let at: Vec<usize> = (0..self.hosts.len())
            .filter(|host| self.hosts[*host].offer == Some(offer) && !self.hosts[*host].is_gone)
            .collect();
        for host in at {
            self.bill.taken_back += 1;
            self.lose_jobs(host);
            self.end_host(host, true);
        }
        self.next_taken_back(offer, self.now_ms + 1);
    }

    /// The host's jobs begin anew elsewhere.
    pub fn lose_jobs(&mut self, host: usize) {
        for number in self.hosts[host].jobs.clone() {
            self.end_flow(number);
            self.bill.lost_jobs += 1;
            self.leave_host(number);
            let job = &mut self.jobs[number];
            // What a job writes is sent only when it has computed.
            self.bill.egress -= job.egress / 1e6;
            (job.step, job.egress) = (Step::Waits, 0.0);
            job.turn += 1;
            let at = self.waiting.partition_point(|other| *other < number);
            self.waiting.insert(at, number);
        }
    }

    /// Asks the provider for a host. Returns whether the request was granted.
    pub fn ask(&mut self, offer: usize) -> Option<usize> {
        let offered = &self.renting.offers[offer];
        let is_refused = if offered.offer.spot {
            !self.market.has(offer, self.now_ms)
        } else {
            self.luck.share() < self.renting.refused
        };
        if is_refused {
            self.bill.refused += 1;
            let (last_ms, times) = self.refusals.entry(offer).or_default();
            (*last_ms, *times) = (self.now_ms, *times + 1);
            return None;
        }
        self.bill.rented += 1;
        let ready_ms = self.now_ms + market::start_ms(offered.boot_s, &mut self.luck);
        let number = self.hosts.len();
        self.hosts.push(Host::rented(number, offer, &offered.offer, self.now_ms));
        self.at(ready_ms, Event::Ready(number));
        Some(number)
    }

    fn end(mut self) -> Run {
        for host in 0..self.hosts.len() {
            self.end_host(host, false);
        }
        for job in &self.jobs {
            let ended_ms = if job.step == Step::Ended { job.ended_ms } else { self.now_ms };
            let hours = (ended_ms - job.arrival.at_ms) as f64 / 3_600_000.0;
            self.bill.waiting += hours * job.arrival.waiting_per_hour;
            if job.arrival.deadline_ms.is_some_and(|deadline_ms| ended_ms > deadline_ms) {
                self.bill.late_jobs += 1;
                self.bill.late += job.arrival.budget.unwrap_or(0.0);
            }
            if job.step == Step::Ended {
                self.run.ended += 1;
                self.run.jobs_s += hours * 3600.0;
                self.run.last_end_s = self.run.last_end_s.max(ended_ms as f64 / 1000.0);
            }
        }
        let budget = self.renting.budget.map(|budget| budget.micros as f64 / 1e6);
        let spent = self.bill.machines + self.bill.egress;
        self.bill.over_budget = budget.map_or(0.0, |budget| (spent - budget).max(0.0));
        let hours = self.now_ms as f64 / 3_600_000.0;
        self.run.trace.push((hours, spent));
        self.run.bill = Some(self.bill);
        self.run
    }
}
