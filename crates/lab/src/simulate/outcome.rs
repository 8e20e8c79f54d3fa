//! The result of a simulation: the content of `results.json`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// All scenarios, with each rule and each seed.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Outcome {
    pub versions: BTreeMap<String, String>,
    pub scenarios: Vec<Simulated>,
}

/// One scenario.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Simulated {
    pub file: String,
    pub title: String,
    pub about: String,
    pub hours: f64,
    pub hosts: usize,
    pub vms: usize,
    /// Jobs of a log of which it does not say how long they ran, or with how many processors.
    #[serde(default)]
    pub left_out: u64,
    pub rules: Vec<OfRule>,
    /// The jobs in a lab, and in the simulator; `None` if they were not run in a lab.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside_lab: Option<BesideLab>,
    /// The same at other sizes.
    pub sizes: Vec<Size>,
    /// In how much real time all of this was simulated.
    pub took_s: f64,
}

/// A plan takes at most this at every size: the goal.
pub const PLAN_GOAL_MS: f64 = 5.0;

/// How long decisions take at a size, in real time.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Size {
    pub hosts: usize,
    pub vms: usize,
    pub moves: u32,
    /// The balancer's decision about all VMs: the median of all looks, and the longest.
    pub balance_ms: f64,
    pub balance_most_ms: f64,
    /// The queue's decision about one job.
    pub queue_ms: f64,
    /// The plan of one job with a volume, after others of the same pass.
    pub plan_ms: f64,
    /// Whether the plan took at most [`PLAN_GOAL_MS`].
    #[serde(default)]
    pub plan_met_goal: bool,
    /// A whole pass over 100 waiting jobs, with the plan of each.
    #[serde(default)]
    pub pass_ms: f64,
    pub simulated_s: f64,
    pub took_s: f64,
}

/// One rule in a scenario.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OfRule {
    pub rule: String,
    pub title: String,
    /// One for each seed.
    pub runs: Vec<Run>,
}

/// One run. All seconds but those of `decided_s` are simulated; those of VMs are of one vCPU.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Run {
    pub seed: u64,
    /// What the VMs wanted.
    pub wanted_s: f64,
    /// What they wanted and did not get.
    pub waited_s: f64,
    /// What they lost to the network between themselves and their data.
    pub network_s: f64,
    /// What moves cost the VMs that moved. What moves cost their neighbours is in `waited_s`.
    pub moving_s: f64,
    pub moves: u32,
    /// Moves back to the host that the VM had left within half an hour.
    pub back: u32,
    /// Moves that had no room or another move beside them, and were not begun.
    pub refused: u32,
    /// Moves that ended with the VM or with a host.
    pub given_up: u32,
    /// What the VMs lost at the host that lost the most, without the network.
    pub worst_host_s: f64,
    /// Jobs and VMs that were placed by the queue, and the time that they waited there.
    pub started: u32,
    pub queued_s: f64,
    /// Jobs that computed all that they had to; the time from their arrivals to their ends together; and when the last one ended.
    #[serde(default)]
    pub ended: u32,
    #[serde(default)]
    pub jobs_s: f64,
    #[serde(default)]
    pub last_end_s: f64,
    /// VMs that were started again because their hosts failed.
    pub failed: u32,
    pub looks: u32,
    /// In how much real time the rule decided at each look. It is not the same in each run.
    #[serde(skip)]
    pub decided_s: Vec<f64>,
    /// Hours, and what was lost until then.
    pub trace: Vec<(f64, f64)>,
    /// What was paid, where hosts can be rented.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bill: Option<Bill>,
    /// The jobs that compute, in the order of their arrival. A log may have very many.
    #[serde(skip)]
    pub jobs: Vec<JobTimes>,
}

/// No other rule that rents and keeps the budget is cheaper than Perigee's by more than this share: the goal.
pub const RENT_GOAL: f64 = 0.05;

/// What a run cost, in dollars.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Bill {
    pub machines: f64,
    pub egress: f64,
    /// What the jobs' owners say that their waiting costs, from the arrivals to the ends.
    pub waiting: f64,
    /// The budgets of the jobs that missed their deadlines.
    pub late: f64,
    /// What was spent beyond the budget.
    pub over_budget: f64,
    pub late_jobs: u32,
    pub rented: u32,
    pub host_hours: f64,
    /// Requests that the provider refused.
    pub refused: u32,
    /// Spot hosts that the provider has taken back, and jobs that began anew.
    pub taken_back: u32,
    pub lost_jobs: u32,
}

impl Bill {
    /// Money, and what waiting cost.
    pub fn all_in(&self) -> f64 {
        self.machines + self.egress + self.waiting + self.late
    }
}

/// When a job arrived and ended, in seconds since the first one could arrive.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct JobTimes {
    pub at_s: f64,
    /// Where it was first; `None` if it never started.
    pub host: Option<String>,
    pub started_s: Option<f64>,
    /// When its command began.
    pub running_s: Option<f64>,
    pub ended_s: Option<f64>,
}

impl JobTimes {
    /// From the arrival to the end.
    pub fn took_s(&self) -> Option<f64> {
        Some(self.ended_s? - self.at_s)
    }
}

/// The same jobs in a lab and in the simulator.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BesideLab {
    /// What was measured of one job alone, with which the simulator was told how fast the lab is.
    pub alone: Alone,
    pub jobs: Vec<Pair>,
    pub makespan: Compared,
    /// The error of a job's time from its arrival to its end: of the jobs in the middle, and of the worst.
    pub median_error: f64,
    pub most_error: f64,
    /// Jobs that were at the same host in both.
    pub same_host: usize,
    /// In how much real time the lab ran all of this.
    pub took_s: f64,
}

/// A job that had the lab for itself, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Alone {
    pub stage_s: f64,
    pub boot_s: f64,
    pub compute_s: f64,
    pub end_s: f64,
    /// Rounds of the loop that jobs compute with, in each second.
    pub rounds_per_s: f64,
}

/// A job in both.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Pair {
    pub cpus: u32,
    pub compute_s: f64,
    pub lab: JobTimes,
    pub simulated: JobTimes,
    pub took: Compared,
}

/// A time in both.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    pub lab_s: f64,
    pub simulated_s: f64,
    /// By how much the simulator differs, as a share of the lab's time. Below 0: it is too fast.
    pub error: f64,
}

impl Compared {
    pub fn of(lab_s: f64, simulated_s: f64) -> Self {
        Self { lab_s, simulated_s, error: (simulated_s - lab_s) / lab_s.max(f64::MIN_POSITIVE) }
    }
}

impl Run {
    /// All that was lost, with what moves cost.
    pub fn lost_s(&self) -> f64 {
        self.waited_s + self.network_s + self.moving_s
    }
}

/// The mean and the standard deviation of a figure over the runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    pub mean: f64,
    pub deviation: f64,
}

impl OfRule {
    pub fn spread(&self, figure: impl Fn(&Run) -> f64) -> Spread {
        let count = self.runs.len().max(1) as f64;
        let mean = self.runs.iter().map(&figure).sum::<f64>() / count;
        let squares: f64 = self.runs.iter().map(|run| (figure(run) - mean).powi(2)).sum();
        Spread { mean, deviation: (squares / (count - 1.0).max(1.0)).sqrt() }
    }
}
