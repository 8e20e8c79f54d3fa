//! The words of the system: ids, specs, states and their legal transitions, API types, errors.
//!
//! No I/O and no clock. Every daemon and every client speaks these types.
//!
//! | question | file |
//! |---|---|
//! | What do the daemons say to each other? | `volume.rs`, `vm.rs`, `job.rs`, `controller/openapi.json` |
//! | What do host and guest say to each other? | `guest.rs` |
//! | Which state follows which event? | `states.rs`; of a VM that migrates: `switchover.rs` |
//! | What is a backup, and where is it? | `backup.rs`; which backups of a schedule are kept, and when the next one is due: `backup_schedule.rs`; a VM whose disks are being made of one: `from_backup.rs` |
//! | Which fields has a job file? | `job_file.rs` |
//! | How many CPUs, how long a name, how large a volume: where are the limits? | `limits.rs`; which of them a job and a VM have: `spec.rs` |
//! | How does a VM live without a job: what is wanted of it, and what happens next? | `persistent_vm.rs` (the decisions), `controller/src/jobs/persistent_vm.rs` (what its driver does), `controller/src/vms/persistent.rs` (what people ask for), `controller/src/vms/change.rs` (while it is off) |
//! | Which controller commands the hosts, and how does a copy take over? | `term.rs`, `controller/src/term.rs`; at the hosts: `http/src/terms.rs`; what the controller shows them: `http/src/claim.rs` |
//! | What keeps a private key or a token from being sent where a public thing is wanted? | `secret.rs`; before anything leaves the machine: `perigee/src/commands/public_keys.rs` |
//! | What is at a host that is drained, and what becomes of it? | `drain.rs` (how that is shown), `planner/src/drain.rs` (the decision), `controller/src/drain/` (what is done) |
//! | Which VM leaves an overloaded host, or goes to its data, by itself? | `balance.rs` (how that is shown), `planner/src/balance/` (the decision), `controller/src/balance/` (what is done) |
//! | How far does the cluster go by itself? | `auto_mode.rs` |
//! | Which VMs share a host, and which never do? | `host_rules.rs`, `planner/src/queue/groups.rs` (the decision); where the VMs are: `controller/src/cluster/index/groups.rs` |
//! | How does somebody find VMs again that somebody made for something? | `labels.rs` |
//! | How much memory has a VM that may have more or less of it? | `amounts.rs` (how that is asked for and shown), `planner/src/amounts.rs` (the decision), `controller/src/amounts.rs` (what is done); at the host: `agent/src/vm/memory.rs` |
//! | What is a VM's disk for? | `disk_role.rs` |
//! | Which networks do tenants have, who has which address in them, and where is the gateway? | `network.rs`, `controller/src/networks.rs`; who tells the hosts: `controller/src/networks/sync.rs` |
//! | How do all VMs of a job move, or none, and what if one can't? | `gang/moving.rs` (the decisions), `controller/src/jobs/gang/moving.rs` (what the job's driver does); the room at both ends: `kept_for_moves` in `controller/src/cluster/index.rs` |
//! | What are a job's inputs, and whose files may they be? | `inputs.rs` (the list), `controller/src/files/inputs.rs` |
//! | Which reads between hosts are compressed? | `compression.rs` (the decision); on the wire: `PERIGEE_COMPRESSED` in `nbd/src/wire/mod.rs` |
//! | What does a proxy fetch before it is asked for? | `read_ahead.rs` |
//! | Who decides where a volume's home is, and why are there never two? | `home/residence.rs`; `home/walk.rs` walks it through every order of events |
//! | What is in a trace file, and what writes it? | `trace.rs`, `block/src/recording.rs` |
//! | How does a migration proceed, and how does it fail? | `switchover/` (what is decided), `agent/src/vm/migrate.rs` (done at the source), `controller/src/migration/` (the whole: `prepare.rs`, then `watch.rs`) |
//! | What may one host do to volumes of another one, and how does that one know? | what the controller has allowed: `grant.rs`; signed and checked: `http/src/grants.rs`; where: `volume/src/control/grants.rs` |
//! | Which start of a VM does a request mean, and what becomes of one that comes late? | `starts.rs` (the decision), `agent/src/vms.rs`, `agent/src/ended.rs` (what is kept) |
//! | How does a volume get another home, step by step? | `volume_move.rs` (the states), `controller/src/storage/moves/` (who is asked and told) |
//! | Why do two VMs never write one volume? | `switchover/walk.rs` |
//! | Where does a migration's time go? | `phases.rs`; what that teaches the planner: `planner/src/experience.rs` |
//! | What does a job with several VMs do next, and what does its driver do for it? | `gang.rs` (the decisions), `controller/src/jobs/gang.rs` |
//! | What does a job, a VM or a host wait for, and since when? | `waiting.rs`; which part of a host answers: `controller/src/cluster/parts.rs`; at the host: `agent/src/upkeep/sockets.rs`, `agent/src/vm/owner/question.rs` |
//! | Whose is a thing, and what does a user mean with a name? | `tenant.rs`; in the controller's API: `controller/src/api/caller.rs` |
//! | Which figures are there for Prometheus, and how is a page written? | `exposition.rs`, `controller/src/api/metrics.rs`, `agent/src/metrics.rs`, `volume/src/metrics.rs` |
//! | How busy are a host and a VM, in which units? | `load.rs`; measured: `agent/src/load.rs`, `agent/src/process.rs`; what follows for predictions: `planner/src/hosts.rs` |
//! | What can a host do, as it is measured? | `measurement.rs`; by whom: `controller/src/measuring/`, `volume/src/measure/`, `agent/src/link.rs` |
//! | What does a machine cost, and what is not known? | `money.rs` |
//! | What does a provider of rented hosts offer, and what is it asked for? | `rental.rs` |
//! | What is kept of a rented host's disk while no host is rented? | `kept.rs`; what is done: `controller/src/rentals/kept/`, `controller/src/storage/replicas/kept.rs`; whether it is worth its price: `planner/src/rent/keep.rs` |
//! | Does the cluster rent hosts by itself, and what has it decided? | `renting.rs` |
//! | When does a rented host end itself, and what does it say of its end? | `lease.rs`; at the host: `agent/src/lease.rs` |
//! | How does any text stand in a URL or a header? | `percent.rs` |
//! | Which versions have the daemons, and what of an upgrade is held back? | `upgrade.rs`, `controller/src/upgrade.rs`, `controller/src/level.rs`; fields of newer versions in records: `controller/src/records/unknown_fields.rs` |
//! | What may a tar from a guest contain? | `tar_headers.rs`, `controller/src/guest/tars.rs`, `controller/src/files/outputs/entries.rs` |

#![warn(missing_docs, clippy::missing_errors_doc)]

pub mod amounts;
pub mod auto_mode;
pub mod backup;
pub mod backup_key;
pub mod backup_schedule;
pub mod balance;
pub mod budget;
pub mod client;
pub mod clock;
pub mod compression;
pub mod data;
pub mod disk_role;
pub mod drain;
pub mod enrol;
pub mod exposition;
pub mod finding;
pub mod from_backup;
pub mod gang;
pub mod grant;
pub mod guest;
pub mod guest_agent;
pub mod home;
pub mod host_rules;
pub mod ids;
pub mod inputs;
pub mod job;
pub mod job_file;
pub mod job_plan;
pub mod kept;
pub mod labels;
pub mod lease;
pub mod leave_site;
pub mod limits;
pub mod load;
pub mod measurement;
pub mod money;
pub mod network;
pub mod percent;
pub mod persistent_vm;
pub mod phases;
pub mod plan;
pub mod prices;
pub mod problem;
pub mod read_ahead;
pub mod rental;
pub mod renting;
pub mod replica;
pub mod secret;
pub mod spec;
pub mod starts;
pub mod states;
pub mod switchover;
pub mod tar_headers;
pub mod tasks;
pub mod tenant;
pub mod term;
pub mod trace;
pub mod units;
pub mod upgrade;
pub mod vm;
pub mod volume;
pub mod volume_move;
pub mod waiting;
#[cfg(test)]
mod walker;
pub mod yaml;

pub use disk_role::DiskRole;
pub use host_rules::HostRules;
pub use ids::{
    BackupName, BadName, ClientName, Epoch, GroupName, HostId, ImageName, Incarnation, JobId,
    LayerId, MigrationId, NetworkName, OwnerName, RentalId, ScheduleName, SiteId, TenantName,
    UserName, VmId, VolumeName,
};
pub use leave_site::LeaveSite;
pub use problem::{Problem, ProblemKind};
pub use starts::VmStart;
