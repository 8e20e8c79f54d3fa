//! The layer store: one pool of sealed layers and writable heads in one directory.
//!
//! A **layer** is a block address space in which each 4 KiB block is absent, data or zero. A
//! **sealed** layer never changes; a volume's **head** is the only writable one, and stands on a
//! chain of sealed layers and perhaps a remote parent. A block is read from the topmost layer
//! that has it.
//!
//! Each top-level module is a room, and a room imports only from the floors below its own (`scripts/check-floors`):
//!
//! ```text
//! floors, from the ground up:
//! blocking, work
//! disk
//! catalog
//! layers
//! volume
//! pool
//! copies
//! homes
//! images
//! lifecycle, upkeep
//! backups
//! sim, fuzzing
//! ```
//!
//! | question | file |
//! |---|---|
//! | what survives a power cut, and why | `disk/map` (the durable map), `layers/head` (the order of a flush) |
//! | what survives a kill of this process | `disk/live` |
//! | which epoch may write now, and snapshots under load | `volume` |
//! | what one request does | `volume/session` |
//! | which host may keep blocks in memory, and who waits for it | `volume/leases` |
//! | which layer answers a read | `layers/chain` |
//! | how a read waits for the disk | `layers/cold` |
//! | exports of other hosts below the local layers, and copies of them | `layers/remote`, `layers/copy`, `copies`, `copies/fill` |
//! | from which host a copy goes on when its source is gone | `copies/sources` |
//! | copies of layers of a volume that comes from another host | `copies/incoming_layers` |
//! | which blocks of another host's volume are here | `copies/shared_layers` |
//! | which layers, images and volumes exist | `catalog` |
//! | which directory has a layer's files | `layers/directories` |
//! | a volume gets another home, or comes from one | `homes/handover`, `homes/steps`, `homes/arrivals` |
//! | creating, cloning, sealing, deleting | `lifecycle`, `images/import`, `pool/imports` |
//! | files become an image | `images/dir_images` |
//! | merging the layers of a deep chain, and of a snapshot that was deleted | `upkeep/compact`, `upkeep/absorb` |
//! | whether a copy has the image's content | `layers/content` |
//! | whether the bytes are still what was written | `layers/checksums`, `upkeep/check`, `upkeep/background` |
//! | the space on the disk of volumes, images and tenants | `upkeep/space` |
//! | What survives a power cut? | `disk/map.rs`, `layers/head.rs` |
//! | What survives a kill of the volume server? | `disk/live.rs` |
//! | How is damage found? | `layers/checksums.rs`, `volume/visible_checksums.rs`, `upkeep/check.rs` |
//! | Which format does a pool have, and how is an older one upgraded? | `catalog/schema.rs` |
//! | How is it known that a copy of an image is what its host has made? | `layers/content.rs` (what is computed), `compare` in `copies/fill.rs`, `controller/src/storage/images/contents.rs` (what becomes of one that is not) |
//! | Which files are refused as images, and how is it known that all of one is there? | `images/import/looks.rs`, `images/import/whole.rs`, `images/import/qcow2.rs` |
//! | How do deep chains become shallow, and what becomes of a deleted snapshot? | `upkeep/compact.rs`; into a volume's head: `upkeep/absorb.rs` |
//! | How long may an import take, and how is one ended? | `images/import.rs`, `pool/imports.rs`, `controller/src/storage/images/imports.rs` |
//! | How does long work report its progress, and how is it stopped? | `work.rs`, `volume/src/control/long.rs` |
//! | How does a copy of another host's layer get its blocks, and where are they kept? | `layers/copy.rs`, `copies.rs`, `copies/fill.rs` |
//! | Which layers of a volume that comes from another host are copied, and which are used as they are here? | `copies/incoming_layers.rs` |
//! | What happens if the other host does not answer, or has another image with that name? | `layers/remote.rs` |
//! | In which directory are a layer's files? | `layers/directories.rs` |
//! | How much space does a volume take on the disk? | `upkeep/space.rs` |
//! | Which layer answers a read? | `layers/chain.rs` |
//! | When does a head get its files, and what happens if a crash interrupts this? | `layers/head.rs` |
//! | Which requests are answered at once, and which wait? | `volume/session.rs`; for the disk: `layers/cold.rs` |
//! | For which clients is data read ahead, and how much? | `disk/ahead.rs` |
//! | How many file operations does a request need? | `tests/costs.rs` |
//! | Who may write a volume now? | `volume.rs` |
//! | What may a tenant confine or release of data that it shares? | `let_go` in `homes/confined.rs`, `LeaveSiteAsker` in `model/src/leave_site.rs` |
//! | As which user do `qemu-img` and `mke2fs` run, and what ends with them? | `images/qemu_img/users.rs` |
//! | Which blocks of another host's volume are read from a replica here, and why are they never old? | `copies/shared_layers.rs` (which blocks), `volume/src/shared_layers.rs` (when the home is asked), `volume/src/coherent.rs` (the rules) |
//! | What does a server do when a volume leaves it or comes to it? | on the disk: `homes/{handover,arrivals}.rs`; with open sessions: `volume/src/{handover,reopen}.rs` |
//! | What does a client boot, and when is its clone made or dropped? | `homes/clients.rs` |
//! | How is a volume sealed while it is in use, for other hosts to copy? | `homes/sealing.rs` |
//! | What is sealed for a backup, and how does a volume or an image come from one? | `backups.rs`; before its bytes are here: `backups/restoring.rs`; at its target: `volume/src/backups/`; who orders it: `controller/src/storage/backups/` |
//! | How is a replica of a volume made, and how does it become the volume? | `homes/replicas.rs`, `controller/src/storage/replicas/` |
//! | Which data may not leave its site, and who may have it? | `homes/confined.rs` (which data), `volume/src/sites.rs` (who may have it); what the controller does about it: `controller/src/storage/leave_site.rs` |

#![warn(missing_docs)]

mod backups;
mod blocking;
mod catalog;
mod copies;
mod disk;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod homes;
mod images;
mod layers;
mod lifecycle;
mod pool;
#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;
mod upkeep;
mod volume;
mod work;

pub use backups::{ImageForBackup, IncomingImage, IncomingVolume, NewIncoming};
pub use copies::shared_layers::{Compared, SharedLayers};
pub use disk::direct::open_direct;
pub use homes::clients::Grant;
pub use homes::confined::Data;
pub use homes::steps::MoveStep;
pub use images::dir_images::{TreeError, TreeSize, unpack};
pub use images::import::{ImportFrom, Tree};
pub use images::qemu_img::{give as give_to_qemu_img, lower_priority};
pub use layers::remote::Connector;
pub use pool::imports::Importing;
pub use pool::{Pool, PoolConfig};
pub use volume::{Volume, io_problem};
pub use work::{StopOnDrop, Work};
