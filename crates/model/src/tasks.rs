//! The controller's endless tasks, as an operator sees them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What an endless task of the controller did last. A task works in rounds, as long as the controller runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskStatus {
    /// What the task does.
    pub name: String,
    /// Rounds that have ended since the controller started.
    pub rounds: u64,
    /// Those that have failed, also by a panic.
    pub failures: u64,
    /// When the round began that is under way; `None` between two rounds. Unix time.
    pub busy_since_ms: Option<u64>,
    /// When the last round ended; `None` before the first one has. Unix time.
    pub ended_ms: Option<u64>,
    /// How long the last round took.
    pub took_ms: u64,
    /// What the last round did, in words; empty if it failed.
    pub did: String,
    /// Why the last round failed; empty if it did not.
    pub problem: String,
    /// The last round that failed, also if later ones did not.
    pub last_failure: Option<TaskFailure>,
}

/// A round of a task that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskFailure {
    /// When it ended. Unix time.
    pub at_ms: u64,
    /// Why.
    pub why: String,
}
