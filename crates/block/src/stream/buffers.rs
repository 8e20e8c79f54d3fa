//! Large buffers that connections borrow only while something is in them.
//!
//! A connection that waits for its client holds none. So many clients that ask one thing at a time
//! share the few buffers that their workers use at a moment, and those stay in the CPU's cache.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

/// The reply to a read of 128 KiB, the longest that most clients send, with some room.
pub const BUFFER_BYTES: usize = 160 << 10;
/// So many are kept for the next borrower; what a burst needed beyond that is given back.
const KEPT_MAX: usize = 16;

static KEPT: Mutex<Vec<Box<[u8]>>> = Mutex::new(Vec::new());

/// [`BUFFER_BYTES`] bytes that may hold anything: they are not cleared between borrowers.
pub struct Buffer(Box<[u8]>);

impl Buffer {
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
