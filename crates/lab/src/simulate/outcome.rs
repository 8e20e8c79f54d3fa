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
    pub rules: Vec<OfRule>,
    /// The same at other sizes.
    pub sizes: Vec<Size>,
    /// In how much real time all of this was simulated.
    pub took_s: f64,
}

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
    /// VMs that were started again because their hosts failed.
    pub failed: u32,
    pub looks: u32,
    /// In how much real time the rule decided at each look. It is not the same in each run.
    #[serde(skip)]
    pub decided_s: Vec<f64>,
    /// Hours, and what was lost until then.
    pub trace: Vec<(f64, f64)>,
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
