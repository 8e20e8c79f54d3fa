//! Layers, volumes and their NBD exports.

pub mod device;
