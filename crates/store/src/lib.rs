//! The layer store: one pool of sealed layers and writable heads in one directory.
//!
//! A **layer** is a block address space in which each 4 KiB block is absent, data or zero. A
//! **sealed** layer never changes; a volume's **head** is the only writable one, and stands on a
//! chain of sealed layers and perhaps a remote parent. A block is read from the topmost layer
//! that has it.
//!
//! | question | file |
//! |---|---|
//! | what survives a power cut, and why | `map` (the durable map), `head` (the order of a flush) |
//! | what survives a kill of this process | `live` |
//! | which epoch may write now, and snapshots under load | `volume` |
//! | what one request does | `session` |
//! | which host may keep blocks in memory, and who waits for it | `leases` |
//! | which layer answers a read | `chain` |
//! | how a read waits for the disk | `cold` |
//! | exports of other hosts below the local layers, and copies of them | `remote`, `copy`, `copies`, `fill` |
//! | from which host a copy goes on when its source is gone | `sources` |
//! | copies of layers of a volume that comes from another host | `stage` |
//! | which blocks of another host's volume are here | `common` |
//! | which layers, images and volumes exist | `catalog` |
//! | which directory has a layer's files | `directories` |
//! | a volume gets another home, or comes from one | `homes`, `steps`, `arrive` |
//! | creating, cloning, sealing, deleting | `lifecycle`, `import`, `imports` |
//! | files become an image | `trees` |
//! | merging the layers of a deep chain, and of a snapshot that was deleted | `compact`, `absorb` |
//! | whether a copy has the image's content | `content` |
//! | whether the bytes are still what was written | `checksums`, `check`, `keeper` |
//! | the space on the disk of volumes, images and tenants | `space` |
//! | What survives a power cut? | `map.rs`, `head.rs` |
//! | What survives a kill of the volume server? | `live.rs` |
//! | How is damage found? | `checksums.rs`, `shown.rs`, `check.rs` |
//! | Which format does a pool have, and how is an older one upgraded? | `catalog/schema.rs` |
//! | How is it known that a copy of an image is what its host has made? | `content.rs` (what is computed), `compare` in `fill.rs`, `controller/src/storage/images/contents.rs` (what becomes of one that is not) |
//! | Which files are refused as images, and how is it known that all of one is there? | `import/looks.rs`, `import/whole.rs`, `import/qcow2.rs` |
//! | How do deep chains become shallow, and what becomes of a deleted snapshot? | `compact.rs`; into a volume's head: `absorb.rs` |
//! | How long may an import take, and how is one ended? | `import.rs`, `imports.rs`, `controller/src/storage/images/imports.rs` |
//! | How does long work report its progress, and how is it stopped? | `work.rs`, `volume/src/control/long.rs` |
//! | How does a copy of another host's layer get its blocks, and where are they kept? | `copy.rs`, `copies.rs`, `fill.rs` |
//! | Which layers of a volume that comes from another host are copied, and which are used as they are here? | `stage.rs` |
//! | What happens if the other host does not answer, or has another image with that name? | `remote.rs` |
//! | In which directory are a layer's files? | `directories.rs` |
//! | How much space does a volume take on the disk? | `space.rs` |
//! | Which layer answers a read? | `chain.rs` |
//! | When does a head get its files, and what happens if a crash interrupts this? | `head.rs` |
//! | Which requests are answered at once, and which wait? | `session.rs`; for the disk: `cold.rs` |
//! | For which clients is data read ahead, and how much? | `ahead.rs` |
//! | How many file operations does a request need? | `tests/costs.rs` |
//! | Who may write a volume now? | `volume.rs` |
//! | What may a tenant confine or release of data that it shares? | `let_go` in `confined.rs`, `LeaveSiteAsker` in `model/src/leave_site.rs` |
//! | As which user do `qemu-img` and `mke2fs` run, and what ends with them? | `qemu_img/users.rs` |
//! | Which blocks of another host's volume are read from a replica here, and why are they never old? | `common.rs` (which blocks), `volume/src/common.rs` (when the home is asked), `volume/src/coherent.rs` (the rules) |
//! | What does a server do when a volume leaves it or comes to it? | on the disk: `{homes,arrive}.rs`; with open sessions: `volume/src/{homes,settle}.rs` |
//! | What does a client boot, and when is its clone made or dropped? | `clients.rs` |
//! | How is a volume sealed while it is in use, for other hosts to copy? | `sealing.rs` |
//! | How is a replica of a volume made, and how does it become the volume? | `replicas.rs`, `controller/src/storage/replicas/` |
//! | Which data may not leave its site, and who may have it? | `confined.rs` (which data), `volume/src/sites.rs` (who may have it); what the controller does about it: `controller/src/storage/leave_site.rs` |

mod absorb;
mod ahead;
mod arrive;
mod attach;
mod blocks;
mod catalog;
mod chain;
mod check;
mod checksums;
mod clients;
mod closing;
mod cold;
mod common;
mod compact;
mod confined;
mod content;
mod copies;
mod copy;
mod direct;
mod directories;
mod files;
mod fill;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod head;
mod homes;
mod import;
mod imports;
mod keeper;
mod layer;
mod leases;
mod lifecycle;
mod live;
mod locks;
mod map;
mod openers;
mod pool;
mod qemu_img;
mod remote;
mod replicas;
mod reservations;
mod sealing;
mod session;
mod shown;
#[cfg(test)]
mod sim;
mod sources;
mod space;
mod sparse;
mod stage;
mod steps;
#[cfg(test)]
mod tests;
mod trees;
mod volume;
mod work;

pub use clients::Grant;
pub use common::{Common, Compared};
pub use confined::Data;
pub use import::{ImportFrom, Tree};
pub use pool::{Pool, PoolConfig};
pub use qemu_img::{give as give_to_qemu_img, lower_priority};
pub use remote::Connector;
pub use steps::MoveStep;
pub use trees::{TreeError, TreeSize, unpack};
pub use volume::{Volume, io_problem};
pub use work::{StopOnDrop, Work};

use std::sync::{Arc, Mutex};

use perigee_block::device::{IoError, is_within};
use perigee_block::locking::lock;
use perigee_block::trace;
use tokio::task::JoinHandle;

/// Runs blocking file or catalog work on another thread. The work runs to its end even if the caller is
/// dropped, so steps that must not be separated are put into one call.
async fn blocking<T, E>(work: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<T, E>
where
    T: Send + 'static,
    E: Send + 'static,
{
    let result = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&result);
    let work = trace::carry(move || {
        let done = work();
        *lock(&slot) = Some(done);
    });
    if let Err(failed) = spawn(Box::new(work)).await {
        std::panic::resume_unwind(failed.into_panic());
    }
    let done = lock(&result).take();
    done.expect("work that did not panic has a result")
}

/// This is not generic, so that the runtime's part is compiled only once.
fn spawn(work: Box<dyn FnOnce() + Send>) -> JoinHandle<()> {
    tokio::task::spawn_blocking(work)
}

/// Refuses a range that is not within a volume. The volume may have become smaller since the protocol
/// server checked the range.
fn check_range(size_bytes: u64, offset: u64, length_bytes: u64) -> Result<(), IoError> {
    if is_within(size_bytes, offset, length_bytes) {
        return Ok(());
    }
    let why = format!("{length_bytes} bytes at {offset} of a volume of {size_bytes}");
    Err(IoError::Invalid(why))
}
