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
//! | who may write now | `volume` (epochs, snapshots under load) |
//! | what one request does | `session` |
//! | which layer answers a read | `chain` |
//! | how a read waits for the disk | `cold` |
//! | another host below the local layers; what is kept of it | `remote`, `copy`, `copies` |
//! | what exists | `catalog` |
//! | which directory has a layer's files | `directories` |
//! | creating, cloning, sealing, deleting | `lifecycle`, `import` |
//! | merging the layers of a deep chain | `compact` |
//! | whether the bytes are still what was written | `checksums`, `check`, `keeper` |
//! | what it takes on the disk, and for whom | `space` |

mod ahead;
mod attach;
mod blocks;
mod catalog;
mod chain;
mod check;
mod checksums;
mod clients;
mod closing;
mod cold;
mod compact;
mod copies;
mod copy;
mod direct;
mod directories;
mod files;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod head;
mod import;
mod keeper;
mod layer;
mod lifecycle;
mod live;
mod locks;
mod map;
mod pool;
mod remote;
mod reservations;
mod session;
#[cfg(test)]
mod sim;
mod space;
mod sparse;
#[cfg(test)]
mod tests;
mod volume;
mod work;

pub use clients::Grant;
pub use pool::{Pool, PoolConfig};
pub use remote::Connector;
pub use volume::{Volume, io_problem};
pub use work::{StopOnDrop, Work};

use std::sync::{Arc, Mutex};

use perigee_block::device::{IoError, is_within};
use perigee_block::trace;
use tokio::task::JoinHandle;

const UNHARMED: &str = "nothing that can panic runs under this lock";

/// Runs blocking file or catalog work away from the async threads. It runs to its end even when
/// the caller goes away, so what must not be torn apart is put into one such call.
async fn blocking<T, E>(work: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<T, E>
where
    T: Send + 'static,
    E: Send + 'static,
{
    let result = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&result);
    let work = trace::carry(move || {
        let done = work();
        *slot.lock().expect(UNHARMED) = Some(done);
    });
    if let Err(failed) = spawn(Box::new(work)).await {
        std::panic::resume_unwind(failed.into_panic());
    }
    let done = result.lock().expect(UNHARMED).take();
    done.expect("work that did not panic has a result")
}

/// Not generic: the runtime's part is compiled once, and not for each kind of work.
fn spawn(work: Box<dyn FnOnce() + Send>) -> JoinHandle<()> {
    tokio::task::spawn_blocking(work)
}

/// Refuses a range that does not lie within a volume: it may have become smaller since the protocol
/// looked.
fn check_range(size_bytes: u64, offset: u64, length_bytes: u64) -> Result<(), IoError> {
    if is_within(size_bytes, offset, length_bytes) {
        return Ok(());
    }
    let why = format!("{length_bytes} bytes at {offset} of a volume of {size_bytes}");
    Err(IoError::Invalid(why))
}
