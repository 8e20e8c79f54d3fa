//! What is done to layers beside clients' requests: merging, checking, and the space that they take.
//!
//! | what | file |
//! |---|---|
//! | the endless tasks of a pool | `background.rs` |
//! | merging the layers of deep chains, and of deleted snapshots | `compact.rs`, `absorb.rs` |
//! | a check of all layers against their checksums | `check.rs` |
//! | the space of volumes, images and tenants on the disk | `space.rs` |

pub(crate) mod absorb;
pub(crate) mod background;
pub(crate) mod check;
pub(crate) mod compact;
pub(crate) mod space;
