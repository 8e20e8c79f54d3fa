//! Which pool is the home of a volume, who may write and read it there, and its replicas elsewhere.
//!
//! | what | file |
//! |---|---|
//! | a home gives a volume away, and another pool takes it | `handover.rs`, `steps.rs`, `arrivals.rs` |
//! | which hosts may open a volume, and which epoch may write | `admissions.rs`, `attach.rs`, `reservations.rs` |
//! | clients of other protocols, and the clones that they boot | `clients.rs` |
//! | data that may not leave its site | `confined.rs` |
//! | replicas at other hosts, and the snapshots that they are made from | `replicas.rs`, `sealing.rs` |

pub(crate) mod admissions;
pub(crate) mod arrivals;
pub(crate) mod attach;
pub(crate) mod clients;
pub(crate) mod confined;
pub(crate) mod handover;
pub(crate) mod replicas;
pub(crate) mod reservations;
pub(crate) mod sealing;
pub(crate) mod steps;
