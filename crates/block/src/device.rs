//! Block devices: a volume of this pool, a sealed layer, or an export of another host.
//!
//! The NBD server serves a [`Device`] and does not know which one it has.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use perigee_model::{Epoch, Incarnation, LayerId};

use crate::lease::{LeaseAnswer, LeaseAsk};

/// A prefetch reads pieces of this size.
const PREFETCH_PIECE_BYTES: u32 = 1 << 20;

/// The reason why a request failed. Each reason has one NBD error.
#[derive(Debug, Clone, thiserror::Error)]
pub enum IoError {
    /// The filesystem of the pool is full (`ENOSPC`). NBD_ENOSPC.
    #[error("no space left in the pool")]
    NoSpace,
    /// A flush of the layer has failed, so nobody knows which of its writes are durable. Every write
    /// fails from then on. The text is the error of that flush. NBD_EIO.
    #[error("the layer is read-only since a flush failed: {0}")]
    Poisoned(String),
    /// A newer writer has the volume. The request changed nothing. NBD_EPERM.
    #[error("writer epoch {session} is not the volume's epoch {volume}")]
    Fenced {
        /// The epoch with which the client opened the volume.
        session: Epoch,
        /// The epoch that the volume has now.
        volume: Epoch,
    },
    /// The volume's home answered NBD_EPERM to a write through this host, for which a newer writer is the
    /// usual reason. The text is the home's. NBD_EPERM.
    #[error("the other host refused the write: {0}")]
    Refused(String),
    /// A write to an export that takes none, for example a sealed layer. NBD_EPERM.
    #[error("the export is read-only")]
    ReadOnly,
    /// The device never does such a request. The text says why: a range beyond its end, a deleted
    /// volume, a command that the other host does not have. NBD_EINVAL.
    #[error("request beyond the end or not aligned: {0}")]
    Invalid(String),
    /// The other host did not answer in time, or the client gave up. Whether a write was done there is
    /// not known. The text says what happened. NBD_EIO.
    #[error("the other host does not serve it: {0}")]
    Unreachable(String),
    /// The volume has another home now. The request changed nothing here, and is not answered: the
    /// connection ends, and its client sends it again over the next one, which reaches the new home.
    #[error("the volume has another home now")]
    Moved,
    /// Any other error of the disk or of the other host. NBD_EIO.
    #[error("I/O error: {0}")]
    Io(Arc<std::io::Error>),
}

impl From<std::io::Error> for IoError {
    fn from(error: std::io::Error) -> Self {
        if error.raw_os_error() == Some(nix::libc::ENOSPC) {
            Self::NoSpace
        } else {
            Self::Io(Arc::new(error))
        }
    }
}

/// A run of bytes of one kind, for NBD's `base:allocation`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The length of the run, from the end of the one before it.
    pub length_bytes: u64,
    /// No layer has data here (NBD_STATE_HOLE).
    pub hole: bool,
    /// It reads as zeros (NBD_STATE_ZERO).
    pub zero: bool,
}

/// The origin of the bytes of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// No layer: the run reads as zeros.
    Nobody,
    /// The volume's own layer.
    Head,
    /// A sealed layer of this pool.
    Source,
    /// Another host.
    Remote,
}

/// A run of bytes of one origin, for NBD's `perigee:origin`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OriginRun {
    /// The length of the run, from the end of the one before it.
    pub length_bytes: u64,
    /// Where a read of the whole run gets its bytes.
    pub origin: Origin,
}

/// How a range is made to read as zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Zeroing {
    /// WRITE_ZEROES with NO_HOLE: the space stays allocated.
    KeepSpace,
    /// WRITE_ZEROES or TRIM: the space may be freed.
    FreeSpace,
}

/// Whether a range lies within a device. All three numbers have the same unit.
pub fn is_within(size: u64, offset: u64, length: u64) -> bool {
    offset.checked_add(length).is_some_and(|end| end <= size)
}

/// A block device. Requests must be within the device's size; the protocol server checks this with
/// [`is_within`] first. A device whose size can change checks again after it has locked its size.
///
/// Requests may run at the same time. A read that overlaps a write in flight sees old or new
/// bytes, sector by sector; anything else sees the last completed write.
pub trait Device: Send + Sync + 'static {
    /// The size at this moment. A volume may grow while it is open.
    fn size_bytes(&self) -> u64;

    /// The id of the sealed layer, if the device is one. A sealed layer never changes.
    fn layer(&self) -> Option<LayerId> {
        None
    }

    /// The incarnation of the volume, if the device is one. It tells volumes with the same name apart.
    fn incarnation(&self) -> Option<Incarnation> {
        None
    }

    /// Whether the device is at another host, and that host says that the data may not leave its site.
    fn is_confined(&self) -> bool {
        false
    }

    /// The writer epoch of the session, if the device is one of a volume.
    fn epoch(&self) -> Option<Epoch> {
        None
    }

    /// Reads `length_bytes` bytes from byte `offset` on, exactly as many as were asked for.
    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>>;

    /// Fills `buffer` from `offset` on if that needs no waiting, because every byte is in memory or known to
    /// be zero. `None` means: use [`Device::read`]; `buffer` may then contain anything.
    fn try_read(&self, _offset: u64, _buffer: &mut [u8]) -> Option<Result<(), IoError>> {
        None
    }

    /// Writes if that needs no waiting except for the copy into the page cache. `None` means: nothing was
    /// written; use [`Device::write`].
    fn try_write(&self, _offset: u64, _data: &[u8]) -> Option<Result<(), IoError>> {
        None
    }

    /// Writes data. With `fua` it is durable when this returns.
    fn write(&self, offset: u64, data: Bytes, fua: bool) -> BoxFuture<'_, Result<(), IoError>>;

    /// Makes `length_bytes` bytes from byte `offset` on read as zeros. With `fua` that is durable when this
    /// returns.
    fn zero(
        &self,
        offset: u64,
        length_bytes: u64,
        how: Zeroing,
        fua: bool,
    ) -> BoxFuture<'_, Result<(), IoError>>;

    /// Every write that returned before this call is durable when it returns.
    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>>;

    /// The extents from `offset` on. They cover at least the first byte and at most `length_bytes`.
    fn extents(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> BoxFuture<'_, Result<Vec<Extent>, IoError>>;

    /// As [`Device::extents`], with the origins of the bytes. By default the whole device is another host's.
    fn origins(
        &self,
        _offset: u64,
        length_bytes: u64,
    ) -> BoxFuture<'_, Result<Vec<OriginRun>, IoError>> {
        Box::pin(async move { Ok(vec![OriginRun { length_bytes, origin: Origin::Remote }]) })
    }

    /// Reads bytes into caches, so that a later read of them need not wait.
    fn prefetch(&self, offset: u64, length_bytes: u64) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(async move {
            let mut done = 0;
            while done < length_bytes {
                let piece = u32::try_from(length_bytes - done).unwrap_or(u32::MAX);
                let piece = piece.min(PREFETCH_PIECE_BYTES);
                self.read(offset + done, piece).await?;
                done += u64::from(piece);
            }
            Ok(())
        })
    }

    /// The ranges that come together with the byte at `offset`, if the device gets many at once: whoever keeps bytes reads these next. In order.
    fn beside(&self, _offset: u64) -> Vec<Range<u64>> {
        Vec::new()
    }

    /// The least time that another host takes to answer, if there is one.
    fn round_trip(&self) -> Duration {
        Duration::ZERO
    }

    /// Asks for the right to keep blocks in memory, or gives it back.
    fn lease(&self, _ask: LeaseAsk) -> BoxFuture<'_, Result<LeaseAnswer, IoError>> {
        Box::pin(async { Ok(LeaseAnswer::Refused) })
    }

    /// Tells the device that its client has gone. Requests that wait for another host fail now.
    fn hang_up(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_ends_within_its_device_and_never_overflows() {
        assert!(is_within(4096, 0, 4096) && is_within(4096, 4096, 0) && is_within(0, 0, 0));
        assert!(!is_within(4096, 1, 4096) && !is_within(4096, 4097, 0));
        assert!(!is_within(u64::MAX, u64::MAX, 1));
    }
}
