//! Input files and outputs of jobs.

pub mod inputs;
pub mod outputs;
pub mod pace;
