//! Nothing flushed is ever lost: workloads on a recorded disk ([`crate::sim`]), and then
//! the disk as it was after each single operation of them, killed there or cut off from power.
//!
//! | file | |
//! |---|---|
//! | `steps` | what a workload does, and how workloads are made up |
//! | `expect` | the reference: arrays with the history of what was written, answered and flushed |
//! | `run` | runs a workload on a pool, beside the reference |
//! | `check` | whether a pool that was opened again has what the reference says |
//! | `cuts` | a power cut and a kill at every point |
//! | `faults` | every operation failing |
//!
//! A failing workload shrinks, and its message has the seed to replay it with. `Together` steps
//! run on several threads, so only workloads without them replay to the operation.
//!
//! `PERIGEE_POWER_CASES` is the number of random workloads (default 6 of each kind); `make soak`
//! runs many.

mod check;
mod cuts;
mod expect;
mod faults;
mod run;
mod steps;

/// How many random workloads a test runs.
fn cases(default: u32) -> u32 {
    let asked = std::env::var("PERIGEE_POWER_CASES").ok().and_then(|n| n.parse().ok());
    asked.unwrap_or(default)
}
