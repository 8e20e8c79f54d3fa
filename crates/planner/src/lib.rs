//! Decides where a job's VM runs and when it moves, and predicts what that costs.
//!
//! The planner is a pure function of a snapshot. It never does I/O and never reads a clock, so the controller,
//! `job plan` and a simulation use the same code. Every figure that it uses is a measurement in the snapshot.
//! If one is missing, the assumption in its place is named in [`perigee_model::plan::Plan::figures`].
//!
//! - [`plan`]: the ways to run a job that has not started, with predicted seconds and their ranges.
//! - [`consider`]: whether a running VM moves now (the ski-rental rule).
//! - [`predicted_end`]: when a running job ends.
//! - [`move_cost`]: how long one live migration takes.
//! - [`PastRun::learn`]: what a finished run shows about the job.
//! - [`mod@noise`]: how much equal runs differ.

#![warn(missing_docs, clippy::missing_errors_doc)]

pub mod arrange;
mod copying;
mod experience;
mod facts;
mod figures;
#[cfg(test)]
mod fixture;
pub mod gangs;
mod hosts;
mod learn;
mod modes;
mod moving;
mod network;
mod noise;
mod options;
pub mod queue;
mod refused;
pub mod replay;
mod running;
mod runs;
mod spread;
mod work;

pub use experience::compression;
pub use facts::{
    Boot, Cluster, CopyFacts, DiskFacts, HostFacts, JobFacts, LinkFacts, LinkForMoves, Moving,
    PastMove, RefusedWay, Running, Snapshot, StillToCome, VolumeFacts,
};
pub use modes::{CompressionGain, Mode};
pub use moving::{Dirty, MoveCost, move_cost};
pub use network::{Path, lost_s};
pub use noise::noise;
pub use options::plan;
pub use refused::Refused;
pub use running::{AFTER_A_MOVE, SURE_RUNS, TRUST, Verdict, consider, predicted_end};
pub use runs::{Measured, MeasuredVolume, PastRun, RUNS_KEPT, Traits, VolumeRun, keep};
