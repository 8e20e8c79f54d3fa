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
