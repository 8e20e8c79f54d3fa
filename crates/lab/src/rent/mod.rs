//! Hosts for rent: a running lab is a provider of them, and `perigee lab provider VERB` is its program.
//!
//! ```text
//! create ──▶ a record ──▶ a namespace at the bridge of the site ──▶ the machine, a process in the namespace
//!                                                                     │ waits as long as a boot takes
//!                                                                     │ serves the metadata address, and runs the user-data, once
//!                                                                     ▼
//! end, power-off, the end of a notice ──▶ its processes are killed, the namespace is removed, the record says `gone`
//! ```
//!
//! All of it is in `BASE/ID/rented`, and the namespaces carry the lab's id, so [`crate::down()`] removes it with the lab.
//!
//! | question | file |
//! |---|---|
//! | which machines does a lab offer, at which price, and what does it refuse | `offers.rs` |
//! | what is kept of an instance, and where | `records.rs` |
//! | what do the verbs do | `verbs.rs` |
//! | how does an instance begin and end | `instance.rs` |
//! | what is kept of the disk of a pool | `snapshots.rs` |
//! | what runs in an instance | `machine.rs` |
//! | what does an instance hear at 169.254.169.254 | `metadata.rs` |

mod instance;
mod machine;
mod metadata;
mod offers;
mod records;
mod snapshots;
mod verbs;

pub use machine::machine;
pub use offers::{INSTANCES_MAX, Kind, Rent, read_rent};
pub use verbs::{Failure, Verb, answer};

use perigee_model::SiteId;

use crate::definition::Definition;

/// The zones of a lab's instances are its sites.
fn zone(definition: &Definition, zone: &str) -> Option<SiteId> {
    definition.sites.iter().map(|site| &site.name).find(|name| name.as_str() == zone).cloned()
}
