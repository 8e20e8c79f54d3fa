//! Clouds: who has machines for rent, what they cost, and how the cluster gets one and gives it back.
//!
//! Nothing here decides whether to rent, and nothing here keeps a record: each call is one question to one provider, with a deadline. A call that failed
//! says whether an instance may be there nevertheless ([`CloudErrorKind::Unclear`]).
//!
//! Each top-level module is a room, and a room imports only from the floors below its own (`scripts/check-floors`):
//!
//! ```text
//! floors, from the ground up:
//! provider, time, xml
//! credentials
//! sigv4
//! ec2, program
//! file
//! ```
//!
//! | question | file |
//! |---|---|
//! | What can every provider do, and what does an error of it mean? | `provider.rs` |
//! | What is in `providers.yaml`? | `file.rs` |
//! | How is EC2 asked? | `ec2/mod.rs`; how a request is signed: `sigv4.rs`; with which keys: `credentials.rs` |
//! | How is another provider asked, and what may it answer? | `program.rs`, `program/answer.rs`; for snapshots: `program/snapshots.rs`; how its program ends: `program/run.rs` |

#![warn(missing_docs, clippy::missing_errors_doc)]

mod credentials;
mod ec2;
mod file;
mod program;
mod provider;
mod sigv4;
mod time;
mod xml;

pub use file::{BadProviders, providers};
pub use provider::{CloudError, CloudErrorKind, Provider, Snapshots};
