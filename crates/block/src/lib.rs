//! What the store and the protocols of the volume server share. Nothing here knows a protocol or a
//! layer.
//!
//! | question | module |
//! |---|---|
//! | what can be read and written | [`device`] |
//! | how a session gets another device while it is open | [`switch`] |
//! | what a protocol serves, found by name | [`exports`] |
//! | how frames come from and go to sockets, for every protocol | [`stream`] |
//! | how a session's new connection waits for the end of its old one | [`sessions`] |
//! | which host may keep blocks of a volume in memory | [`lease`] |
//! | who uses which volume now | [`logins`] |
//! | what a panic of a lock's holder means | [`locking`] |
//! | where requests' time goes | [`measured`], [`stats`], [`trace`], [`collection`] |

#![warn(missing_docs, clippy::missing_errors_doc)]

pub mod collection;
pub mod device;
pub mod exports;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod held_back;
pub mod lease;
pub mod locking;
pub mod logins;
pub mod measured;
mod recording;
pub mod sessions;
pub mod stats;
pub mod stream;
pub mod switch;
pub mod trace;
