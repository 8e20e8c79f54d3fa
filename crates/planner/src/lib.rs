//! Decides where a job's VM runs and when it moves, and predicts what that costs.
//!
//! The planner is a pure function of a snapshot. It never does I/O and never reads a clock, so the controller,
//! `job plan` and a simulation use the same code. Every figure that it uses is a measurement in the snapshot.
//! If one is missing, the assumption in its place is named in [`perigee_model::plan::Plan::figures`].
//!
//! - [`plan`]: the ways to run a job that has not started, with predicted seconds and their ranges.
//! - [`consider`]: whether a running VM moves now (the ski-rental rule).
//! - [`predicted_end`]: when a running job ends.
//! - [`balance::balance`]: which VM moves because its host is overloaded, or because its data are elsewhere.
//! - [`rent::decide`]: which host is rented or given back.
//! - [`amounts::decide`]: how much memory a VM has that may have more or less of it.
//! - [`move_cost`]: how long one live migration takes.
//! - [`PastRun::learn`]: what a finished run shows about the job.
//! - [`mod@noise`]: how much equal runs differ.
//!
//! | question | file |
//! |---|---|
//! | When does the planner move all VMs of a job, or their data? | `gangs/moves.rs`; what the copies cost: `copying.rs`; its facts: `controller/src/jobs/gang/decide_move.rs` |
//! | What leaves a host that is drained, in which order, and where does it go? | `drain.rs`; its facts: `controller/src/drain/facts.rs` |
//! | Is a VM's memory sent compressed, and is the VM slowed down meanwhile? | `modes.rs` |
//! | Which queued job starts next, and where? | `queue/` (`pass.rs`: the decision), `controller/src/scheduler.rs` (its snapshot), `queue/refusals.rs` (how many refused plans a pass makes) |
//! | Where do all of its VMs start, or none? | `queue/gang.rs` |
//! | What would each way to run a job with several VMs take? | `options/gang.rs` (where its VMs would be), `gangs/ranks.rs` (what is learnt of each, and what they take together) |
//! | What would each way to run a job take? | `options/mod.rs` |
//! | What would a way cost, and which one is chosen where money counts? | `options/cost.rs`; a tenant's budget for the month: `queue/pass.rs` |
//! | When does a running VM move, or its data? | `running.rs`, `running/changes.rs`; at once, by its history: `running/sure.rs`; what that costs: `moving.rs`, `copying.rs` |
//! | When does a running job end, and how much of its work is left? | `running/left.rs` |
//! | When does a VM move because its host is overloaded, or to its data? | `balance/` |
//! | Which VM gets memory while it runs, and which gives some back? | `amounts.rs`; its facts: `controller/src/amounts.rs` |
//! | When is a host rented, for which jobs, and when is it given back? | `rent/` |
//! | Is the disk of a host that is given back kept at the provider? | `rent/keep.rs` |
//! | What would a job take and cost at a host that would be rented for it, and how long would it wait at the others? | `offers.rs`, `rent/waits.rs`; its facts: `controller/src/rentals/plan.rs`, `controller/src/planning/waits.rs` |
//! | How much do equal runs differ? | `noise.rs` |
//! | What is kept of a job's runs, and which runs count for which job? | `runs.rs` |
//! | How is a time predicted at a distance that a job never ran at, and how sure is that? | `learn.rs`; from runs: `learn/fit.rs`, without: `learn/one_pass.rs` (a guess, improved by the cluster's other jobs); whether recorded runs are in the ranges: `options/recorded.rs` |
//! | What would a run have taken farther from its data, by its block trace? | `replay/mod.rs`; over the proxy of its host: `replay/proxy.rs` |
//! | What does a measurement of a host, or of its kind, say of disks and links? | `measured.rs` |
//! | How are hosts and links found among 10,000? | `index.rs`; which hosts does a plan look at closely: `options/alike.rs` |
//! | What does a server with too little memory read again, by a trace? | `page_cache.rs` |
//! | How long does a VM boot at a host, and how fast is the host? | `hosts.rs`; how much slower while others compute there: `cpu_load.rs` |

#![warn(missing_docs, clippy::missing_errors_doc)]

pub mod amounts;
mod arrange;
pub mod balance;
mod copying;
mod cpu_load;
pub mod drain;
mod experience;
mod facts;
mod figures;
#[cfg(test)]
mod fixture;
pub mod gangs;
mod hosts;
mod index;
mod learn;
mod measured;
mod modes;
mod moving;
mod network;
mod noise;
pub mod offers;
mod options;
pub mod page_cache;
pub mod queue;
mod refused;
pub mod rent;
pub mod replay;
mod running;
mod runs;
mod spread;
mod work;

pub use experience::compression;
pub use facts::{
    Boot, Cluster, CopyFacts, CpuLoad, DiskFacts, HostFacts, JobFacts, LinkFacts, LinkForMoves,
    MoneyFacts, Moving, PastMove, Prepared, RefusedWay, Running, Snapshot, StillToCome,
    VolumeFacts,
};
pub use measured::MeasuredHost;
pub use modes::{CompressionGain, Mode};
pub use moving::{Dirty, MoveCost, move_cost};
pub use network::{Path, lost_s};
pub use noise::noise;
pub use options::plan;
pub use refused::Refused;
pub use running::{SURE_RUNS, TRUST, Verdict, consider, predicted_end};
pub use runs::{Measured, MeasuredVolume, PastRun, RUNS_KEPT, Traits, VolumeRun, keep};
