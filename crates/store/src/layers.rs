//! Layers: what each has, and which one answers a read.
//!
//! | what | file |
//! |---|---|
//! | a sealed layer, and the names of a layer's files | `layer.rs` |
//! | in which directory a layer's files are | `directories.rs` |
//! | the writable head of a volume | `head.rs` |
//! | a copy of another host's layer, which fetches what it lacks | `copy.rs`, `remote.rs` |
//! | which layer of a chain answers a read, and how a read waits for the disk | `chain.rs`, `cold.rs` |
//! | whether the bytes are still what was written, or the image's content | `checksums.rs`, `content.rs` |

pub(crate) mod chain;
pub(crate) mod checksums;
pub(crate) mod cold;
pub(crate) mod content;
pub(crate) mod copy;
pub(crate) mod directories;
pub(crate) mod head;
pub(crate) mod layer;
pub(crate) mod remote;
