//! How a job that computes comes to its end: it is staged, copies its data, boots, computes, and is collected.
//!
//! Where more is wanted of a host than it has, all of its VMs get the same part of what they want, and jobs end later.

use perigee_planner::queue::{Demand, Holder};

use super::flows::Owner;
use super::start::Waits;
use super::{Event, World};
use crate::random::Random;
use crate::simulate::jobs::{Job, Jobs};
use crate::simulate::loads;
use crate::simulate::network::{FlowId, whole_ms};
use crate::simulate::outcome::JobTimes;
use crate::simulate::scenario::{Scenario, StartOfJob};

/// A part of a job's way.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Step {
    /// For so many seconds.
    Staged(f64),
    /// So many bytes.
    Copies(f64),
    /// CPU seconds, of one processor.
    Boots(f64),
    /// CPU seconds.
    Computes(f64),
    /// CPU seconds, of one processor.
    Collected(f64),
}

/// What is left of a VM's job.
#[derive(Debug, Clone)]
pub struct Work {
    job: usize,
    uses_cpus: f64,
    /// All steps, and at which one it is.
    steps: Vec<Step>,
    at: usize,
    /// CPU seconds of this step that are left.
    left_s: f64,
    turn: u32,
    copies_over: Option<FlowId>,
}

impl Work {
    fn new(number: usize, job: &Job, start: StartOfJob) -> Self {
        let steps = [
            Step::Staged(start.stage_s),
            Step::Copies(job.reads_bytes as f64),
            Step::Boots(start.boot_s),
            Step::Computes(job.compute_s),
            Step::Collected(start.end_s),
        ];
        let is_some = |step: &Step| match *step {
            Step::Staged(much)
            | Step::Copies(much)
            | Step::Boots(much)
            | Step::Computes(much)
            | Step::Collected(much) => much > 0.0,
        };
        let steps = steps.into_iter().filter(is_some).collect();
        let (uses_cpus, turn) = (job.uses_cpus, 0);
        Self { job: number, uses_cpus, steps, at: 0, left_s: 0.0, turn, copies_over: None }
    }

    pub fn job(&self) -> usize {
        self.job
    }

    fn step(&self) -> Option<Step> {
        self.steps.get(self.at).copied()
    }

    /// Processors.
    pub fn wants(&self) -> f64 {
        match self.step() {
            Some(Step::Boots(_) | Step::Collected(_)) => 1.0,
            Some(Step::Computes(_)) => self.uses_cpus,
            Some(Step::Staged(_) | Step::Copies(_)) | None => 0.0,
        }
    }

    /// Processors that it will want when it computes.
    pub fn will_want(&self) -> f64 {
        self.uses_cpus
    }

    /// Processors that it would use if its data were there.
    pub fn waits_for_data(&self) -> f64 {
        match self.step() {
            Some(Step::Copies(_)) => self.uses_cpus,
            _ => 0.0,
        }
    }

    pub fn has_booted(&self) -> bool {
        matches!(self.step(), Some(Step::Computes(_) | Step::Collected(_)) | None)
    }

    pub fn computed(&mut self, cpu_s: f64) {
        self.left_s -= cpu_s;
    }
}

/// A job that has arrived.
pub struct OfJob {
    at_ms: u64,
    holder: Holder,
    vms_left: u32,
    reads_bytes: u64,
    host: Option<usize>,
    started_ms: Option<u64>,
    running_ms: Option<u64>,
    ended_ms: Option<u64>,
    /// What it has of the cluster for each VM that runs.
    size: Demand,
}

impl OfJob {
    pub fn holder(&self) -> &Holder {
        &self.holder
    }

    pub fn reads_bytes(&self) -> u64 {
        self.reads_bytes
    }
}

impl World<'_> {
    pub(super) fn submitted(&mut self, number: usize) {
        let scenario = self.scenario;
        let job = match &scenario.jobs {
            Jobs::Listed(listed) => listed.jobs[number].clone(),
            Jobs::AtRandom(random) => Job {
                reads_bytes: random.reads_bytes,
                ..large_or_small(scenario, &mut self.random, self.now_ms)
            },
        };
        let size = job.size();
        let hosts = self.hosts.len();
        let data = (job.reads_bytes > 0).then(|| self.any(hosts));
        let this = self.jobs.len();
        let vms: Vec<usize> = (0..job.vms).map(|_| self.add_vm_of(size)).collect();
        for &vm in &vms {
            self.vms[vm].data = data;
            self.vms[vm].work = Some(Work::new(this, &job, self.scenario.start));
        }
        self.jobs.push(OfJob {
            at_ms: self.now_ms,
            holder: Holder { tenant: job.tenant, owner: job.owner },
            vms_left: job.vms,
            reads_bytes: job.reads_bytes,
            host: None,
            started_ms: None,
            running_ms: None,
            ended_ms: None,
            size,
        });
        self.wait(Waits { vms, since_ms: self.now_ms, runs_s: None, job: Some(this) });
        self.may_start = true;
    }

    /// A job's VM has a host, and begins.
    pub(super) fn begin_work(&mut self, vm: usize, host: usize) {
        let Some(work) = &self.vms[vm].work else { return };
        let job = &mut self.jobs[work.job];
        job.host.get_or_insert(host);
        job.started_ms.get_or_insert(self.now_ms);
        self.held.entry(job.holder.clone()).or_default().add(job.size);
        self.begin_step(vm);
    }

    fn begin_step(&mut self, vm: usize) {
        self.change_load(vm);
        let (Some(host), Some(work)) = (self.vms[vm].host, &mut self.vms[vm].work) else { return };
        work.turn += 1;
        match work.step() {
            Some(Step::Staged(seconds)) => {
                let ends_ms = self.now_ms + whole_ms(seconds);
                self.step_ends(vm, ends_ms);
            }
            Some(Step::Copies(bytes)) => {
                let elsewhere = self.vms[vm].data.filter(|data| *data != host);
                let Some(data) = elsewhere else { return self.next_step(vm) };
                let rate = self.alone(data, host);
                let flow = self.send(Owner::Copy(vm), (data, host), rate, Some(bytes));
                if let Some(work) = &mut self.vms[vm].work {
                    work.copies_over = Some(flow);
                }
            }
            Some(Step::Boots(cpu_s) | Step::Computes(cpu_s) | Step::Collected(cpu_s)) => {
                work.left_s = cpu_s;
                if matches!(work.step(), Some(Step::Computes(_))) {
                    self.jobs[work.job].running_ms.get_or_insert(self.now_ms);
                }
            }
            None => self.job_ends(vm),
        }
    }

    /// When the step that waits for no processor will be done, as is known now.
    pub(super) fn step_ends(&mut self, vm: usize, ends_ms: u64) {
        let Some(work) = &mut self.vms[vm].work else { return };
        work.turn += 1;
        let turn = work.turn;
        self.at(ends_ms, Event::Step { vm, turn });
    }

    pub(super) fn step_done(&mut self, vm: usize, turn: u32) {
        if self.vms[vm].work.as_ref().is_some_and(|work| work.turn == turn) {
            self.next_step(vm);
        }
    }

    fn next_step(&mut self, vm: usize) {
        let Some(host) = self.vms[vm].host else { return };
        // Until now it has had what it wanted in the step before.
        self.settle(host);
        self.end_copy(vm);
        let Some(work) = &mut self.vms[vm].work else { return };
        let had_booted = work.has_booted();
        work.at += 1;
        if work.has_booted() && !had_booted {
            self.hosts[host].starting -= 1;
            // Where any number may start at once, nobody has waited for this.
            self.may_start |= self.scenario.starts < u32::MAX;
        }
        self.begin_step(vm);
    }

    fn end_copy(&mut self, vm: usize) {
        let work = self.vms[vm].work.as_mut();
        if let Some(flow) = work.and_then(|work| work.copies_over.take()) {
            self.network.end(flow);
        }
    }

    /// Some VMs at the host may have computed all that their steps had.
    pub(super) fn computed(&mut self, host: usize, turn: u32) {
        /// Less than the clock can tell.
        const NOTHING_S: f64 = 1e-6;
        if self.hosts[host].computed_turn != turn {
            return;
        }
        self.settle(host);
        let is_done = |vm: &&usize| {
            let work = self.vms[**vm].work.as_ref();
            work.is_some_and(|work| work.wants() > 0.0 && work.left_s <= NOTHING_S)
        };
        let done: Vec<usize> = self.hosts[host].vms.iter().filter(is_done).copied().collect();
        for vm in done {
            self.next_step(vm);
        }
    }

    /// Finds when the next VM at the host will have computed all that its step has, if nothing changes there.
    pub(super) fn foresee(&mut self, host: usize) {
        self.hosts[host].computed_turn += 1;
        let share = self.share(host);
        let ends_in_s = |vm: &usize| {
            let work = self.vms[*vm].work.as_ref().filter(|work| work.wants() > 0.0)?;
            Some(work.left_s.max(0.0) / (work.wants() * share))
        };
        let first_s = self.hosts[host].vms.iter().filter_map(ends_in_s).min_by(f64::total_cmp);
        if let Some(first_s) = first_s {
            let turn = self.hosts[host].computed_turn;
            // Not at this moment again.
            let at_ms = self.now_ms + whole_ms(first_s).max(1);
            if at_ms <= self.scenario.length_s * 1000 {
                self.at(at_ms, Event::Computed { host, turn });
            }
        }
    }

    fn job_ends(&mut self, vm: usize) {
        self.give_up_move(vm);
        self.take(vm);
        let job = self.vms[vm].work.as_ref().map(Work::job);
        self.vms.forget(vm);
        let Some(job) = job else { return };
        self.give_back(job);
        let job = &mut self.jobs[job];
        job.vms_left -= 1;
        if job.vms_left == 0 {
            job.ended_ms = Some(self.now_ms);
            self.run.ended += 1;
            self.run.jobs_s += (self.now_ms - job.at_ms) as f64 / 1000.0;
            self.run.last_end_s = self.now_ms as f64 / 1000.0;
        }
    }

    fn give_back(&mut self, job: usize) {
        let job = &self.jobs[job];
        if let Some(held) = self.held.get_mut(&job.holder) {
            held.take(job.size);
            // Each pass of the queue looks at all that are there, and a log has many users.
            if *held == Demand::default() {
                self.held.remove(&job.holder);
            }
        }
    }

    /// The VM's host has failed: its job begins anew.
    pub(super) fn lose_work(&mut self, vm: usize) {
        self.end_copy(vm);
        let Some(work) = &mut self.vms[vm].work else { return };
        work.turn += 1;
        (work.at, work.left_s) = (0, 0.0);
        let job = work.job;
        self.give_back(job);
    }

    /// The jobs in the order of their arrival.
    pub(super) fn times_of_jobs(&self) -> Vec<JobTimes> {
        let seconds = |ms: u64| ms as f64 / 1000.0;
        let times = |job: &OfJob| JobTimes {
            at_s: seconds(job.at_ms),
            host: job.host.map(|host| self.hosts[host].id.to_string()),
            started_s: job.started_ms.map(seconds),
            running_s: job.running_ms.map(seconds),
            ended_s: job.ended_ms.map(seconds),
        };
        self.jobs.iter().map(times).collect()
    }
}

/// A job as Borg's. What is large is done in parallel, as far as a host has processors.
fn large_or_small(scenario: &Scenario, random: &mut Random, at_ms: u64) -> Job {
    const HOUR_S: f64 = 3600.0;
    let compute_s = loads::borg_s(random);
    let is_enough = |cpus: &u32| f64::from(*cpus) * HOUR_S >= compute_s;
    let cpus = (1..=scenario.cpus).find(is_enough).unwrap_or(scenario.cpus);
    Job {
        at_ms,
        vms: 1,
        cpus,
        memory_bytes: scenario.vm_memory_bytes,
        uses_cpus: f64::from(cpus),
        compute_s,
        reads_bytes: 0,
        tenant: "default".to_owned(),
        owner: "simulated".to_owned(),
    }
}
