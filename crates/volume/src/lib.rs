//! Layers, volumes and their NBD exports.

pub mod device;
pub mod nbd;
mod stats;
