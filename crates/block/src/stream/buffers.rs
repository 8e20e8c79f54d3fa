//! Large buffers that connections borrow only while the buffers contain something.
//!
//! A connection that waits for its client holds no buffer. So many clients with one request at a time
//! share the few buffers that the worker threads use at a moment, and these stay in the CPU's cache.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

/// Enough for the reply to a read of 128 KiB, which is the longest request of most clients.
pub const BUFFER_BYTES: usize = 160 << 10;
/// The number of unused buffers that are kept. Further ones are freed.
const KEPT_MAX: usize = 16;

static KEPT: Mutex<Vec<Box<[u8]>>> = Mutex::new(Vec::new());

/// [`BUFFER_BYTES`] bytes with any content: they are not cleared between borrowers.
pub(crate) struct Buffer(Box<[u8]>);

impl Buffer {
    /// A kept buffer, or a new one when none is kept. It is given back when it is dropped.
    pub fn borrow() -> Self {
        let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Self(kept.unwrap_or_else(|| vec![0; BUFFER_BYTES].into_boxed_slice()))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT_MAX {
            kept.push(std::mem::take(&mut self.0));
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}
