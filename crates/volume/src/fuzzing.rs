//! What the targets in `fuzz/` call. Only there with the feature `fuzzing`.

pub use crate::iscsi::fuzzing::{iscsi_login, iscsi_session};
pub use crate::nbd::fuzzing::{handshake, transmission};
pub use crate::store::fuzzing::{catalog, map_files};
