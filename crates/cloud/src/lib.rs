//! Clouds: who has machines for rent, what they cost, and how the cluster gets one and gives it back.
//!
//! Nothing here decides whether to rent, and nothing here keeps a record: each call is one question to one provider, with a deadline.
//!
//! Each top-level module is a room, and a room imports only from the floors below its own (`scripts/check-floors`):
//!
//! ```text
//! floors, from the ground up:
//! provider
//! file
//! ```
//!
//! | question | file |
//! |---|---|
//! | What can every provider do, and what does an error of it mean? | `provider.rs` |
//! | What is in `providers.yaml`? | `file.rs` |

#![warn(missing_docs, clippy::missing_errors_doc)]

mod file;
mod provider;

pub use file::{BadProviders, providers};
pub use provider::{CloudError, CloudErrorKind, Provider};
