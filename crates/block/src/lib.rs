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
//! | Who reads a connection, how do connections share a thread, and how are many requests answered with one write? | `stream/connection.rs` |
//! | What does a proxy keep in memory, and why is that never old? | `lease.rs` (the home's side), `volume/src/coherent.rs` (the host's) |
//! | How does a session get another device while it is open? | `switch.rs`; when its volume's home has another address: `volume/src/repoint.rs` |
//! | How does a session's new connection wait for the end of its old one? | `sessions.rs` |
//! | What happens when the holder of a lock panics? | `locking.rs`; in the controller's tasks: `controller/src/supervisor.rs` |
//! | How is I/O counted and traced? | `measured.rs`, `stats.rs`, `trace.rs` |
//! | How is it known how many reads a job keeps in flight, if it has only run beside its data? | the volume server holds back a few answers: `held_back.rs`; what they show: `planner/src/replay/held_back.rs` |

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
