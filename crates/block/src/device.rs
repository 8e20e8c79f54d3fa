//! What can be read and written at byte offsets: a volume of this pool, or an export of another host.
//!
//! The NBD server serves a [`Device`] and does not know which one it has.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use perigee_model::{Epoch, Incarnation, LayerId};

/// What is brought closer passes through memory in pieces of this size.
const PREFETCH_PIECE_BYTES: u32 = 1 << 20;

/// Why a request failed. Each has one NBD error.
#[derive(Debug, Clone, thiserror::Error)]
pub enum IoError {
    #[error("no space left in the pool")]
    NoSpace,
    #[error("the layer is read-only since a flush failed: {0}")]
    Poisoned(String),
    #[error("writer epoch {session} is not the volume's epoch {volume}")]
    Fenced { session: Epoch, volume: Epoch },
    #[error("the other host refused the write: {0}")]
    Refused(String),
    #[error("the export is read-only")]
    ReadOnly,
    #[error("request beyond the end or not aligned: {0}")]
    Invalid(String),
    #[error("the other host does not serve it: {0}")]
    Unreachable(String),
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
    pub length_bytes: u64,
    /// No layer has data here (NBD_STATE_HOLE).
    pub hole: bool,
    /// It reads as zeros (NBD_STATE_ZERO).
    pub zero: bool,
}

/// Who has the bytes of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// It reads as zeros.
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
    pub length_bytes: u64,
    pub origin: Origin,
}

/// How a range is made to read as zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Zeroing {
    /// WRITE_ZEROES with NO_HOLE: the space stays allocated.
    KeepSpace,
    /// WRITE_ZEROES or TRIM: the space may be given back.
    FreeSpace,
}

/// Whether a range lies within a device. All three have the same unit.
pub fn is_within(size: u64, offset: u64, length: u64) -> bool {
    offset.checked_add(length).is_some_and(|end| end <= size)
}

/// A block device. Requests within the device's size only: the protocol checks that with
/// [`is_within`] before it asks. A device whose size can change looks again when it has it fixed.
///
/// Requests may run at the same time. A read that overlaps a write in flight sees old or new
/// bytes, sector by sector; anything else sees the last completed write.
pub trait Device: Send + Sync + 'static {
    fn size_bytes(&self) -> u64;

    /// Which sealed layer it is, if it is one: it never changes.
    fn layer(&self) -> Option<LayerId> {
        None
    }

    /// Which volume of its name it is, if it is a volume.
    fn incarnation(&self) -> Option<Incarnation> {
        None
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>>;

    /// Fills `buffer` from `offset` on if nothing has to be waited for: every byte is in memory,
    /// or known to be zero. `None`: use [`Device::read`]; `buffer` may hold anything then.
    fn try_read(&self, _offset: u64, _buffer: &mut [u8]) -> Option<Result<(), IoError>> {
        None
    }

    /// Writes if nothing has to be waited for but the copy into the page cache. `None`: nothing
    /// was written; use [`Device::write`].
    fn try_write(&self, _offset: u64, _data: &[u8]) -> Option<Result<(), IoError>> {
        None
    }

    /// With `fua`, durable when it returns.
    fn write(&self, offset: u64, data: Bytes, fua: bool) -> BoxFuture<'_, Result<(), IoError>>;

    fn zero(
        &self,
        offset: u64,
        length_bytes: u64,
        how: Zeroing,
        fua: bool,
    ) -> BoxFuture<'_, Result<(), IoError>>;

    /// Every write that returned before this call is durable when it returns.
    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>>;

    /// Extents from `offset` on; they cover at least the first byte and at most `length_bytes`.
    fn extents(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> BoxFuture<'_, Result<Vec<Extent>, IoError>>;

    /// As [`Device::extents`], who has the bytes. A device that knows no better is another host's.
    fn origins(
        &self,
        _offset: u64,
        length_bytes: u64,
    ) -> BoxFuture<'_, Result<Vec<OriginRun>, IoError>> {
        Box::pin(async move { Ok(vec![OriginRun { length_bytes, origin: Origin::Remote }]) })
    }

    /// Brings bytes closer, so that a read of them that comes soon need not wait.
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

    /// Nobody waits for answers any more: requests that wait for another host fail now.
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
