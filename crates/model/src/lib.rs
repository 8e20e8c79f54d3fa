//! The words of the system: ids, specs, states and their legal transitions, API types, errors.
//!
//! No I/O and no clock. Every daemon and every client speaks these types.

#![warn(missing_docs, clippy::missing_errors_doc)]

pub mod client;
pub mod clock;
pub mod compression;
pub mod data;
pub mod disk_role;
pub mod enrol;
pub mod exposition;
pub mod gang;
pub mod grant;
pub mod guest;
pub mod guest_agent;
pub mod home;
pub mod ids;
pub mod inputs;
pub mod job;
pub mod job_file;
pub mod lasting;
pub mod leave_site;
pub mod limits;
pub mod network;
pub mod phases;
pub mod plan;
pub mod problem;
pub mod read_ahead;
pub mod replica;
pub mod secret;
pub mod spec;
pub mod starts;
pub mod states;
pub mod switchover;
pub mod tar_headers;
pub mod tenant;
pub mod term;
pub mod trace;
pub mod units;
pub mod vm;
pub mod volume;
pub mod volume_move;
pub mod waiting;
#[cfg(test)]
mod walker;
pub mod yaml;

pub use disk_role::DiskRole;
pub use ids::{
    BadName, ClientName, Epoch, HostId, ImageName, Incarnation, JobId, LayerId, MigrationId,
    NetworkName, OwnerName, SiteId, TenantName, UserName, VmId, VolumeName,
};
pub use leave_site::LeaveSite;
pub use problem::{Problem, ProblemKind};
pub use starts::VmStart;
