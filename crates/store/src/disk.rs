//! Files on the local disk, and which blocks of a layer they have.
//!
//! | what | file |
//! |---|---|
//! | the states of a layer's blocks | `blocks.rs`, `sparse.rs` |
//! | the durable map of a layer: what survives a power cut | `map.rs` |
//! | the map of a head since its last flush: what survives a kill | `live.rs` |
//! | files, and how the kernel reads ahead in them | `files.rs`, `ahead.rs`, `direct.rs` |
//! | files that are closed later, by another thread | `closing.rs` |
//! | locks of ranges of blocks | `locks.rs` |

pub(crate) mod ahead;
pub(crate) mod blocks;
pub(crate) mod closing;
pub(crate) mod direct;
pub(crate) mod files;
pub(crate) mod live;
pub(crate) mod locks;
pub(crate) mod map;
pub(crate) mod sparse;
