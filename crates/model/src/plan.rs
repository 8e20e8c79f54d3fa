//! What the planner says: options with predictions, a choice, a reason, and later the measurement.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{HostId, JobId};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// The VM stays where it starts and reads over the network.
    Remote,
    /// The VM starts there and is migrated live to its data.
    Migrate,
    /// The VM starts beside its data.
    Beside,
}

/// Where a prediction's seconds go. They add up to `total_s`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Seconds {
    /// From VM start to the command's start.
    pub boot_s: f64,
    /// vCPU time of the command.
    pub cpu_s: f64,
    /// Waiting for blocks as if they were local.
    pub local_io_s: f64,
    /// Waiting for the network on top of that.
    pub network_s: f64,
    /// Waiting for anything else, as in the measured runs: the root disk, timers, the host's CPU.
    #[serde(default)]
    pub other_s: f64,
    /// Slow-down and pause by the migration.
    pub migration_s: f64,
    pub total_s: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlanOption {
    pub way: Way,
    pub start: HostId,
    /// Where the VM ends: the same host, but for `migrate`.
    pub end: HostId,
    pub predicted: Seconds,
    pub chosen: bool,
    /// Why it was chosen, or why not.
    pub reason: String,
}

/// What a prediction of the job's work rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// Earlier runs of the same job, measured.
    History,
    /// Nothing known: one pass over the data its volumes hold, CPU time not counted.
    OnePass,
    /// This job's own figures while it runs.
    Running,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Plan {
    pub basis: Basis,
    /// The best first.
    pub options: Vec<PlanOption>,
    /// The measurements used, in plain words with units ("RTT home1-cloud1 16.2 ms").
    pub figures: Vec<String>,
    /// Whether the chosen option moves a running VM or places it away from where it would start.
    pub moves: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Trigger {
    Submitted,
    /// The ski-rental rule: time lost to the network reached the predicted cost of moving.
    TimeLost,
    /// A person asked (`vm move`).
    Asked,
}

/// One decision, kept for good.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Decision {
    pub job: JobId,
    pub at_ms: u64,
    pub trigger: Trigger,
    pub plan: Plan,
    /// The choice and its reason in one sentence.
    pub summary: String,
    /// Filled in when the job or the migration has ended.
    pub measured_s: Option<f64>,
}
