//! A setting that an operator may change while the controller runs.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// The value that counts now. Clones share it.
#[derive(Default)]
pub struct Live<T>(Arc<Mutex<T>>);

impl<T: Copy> Live<T> {
    /// A setting with this value at first.
    pub fn new(value: T) -> Self {
        Self(Arc::new(Mutex::new(value)))
    }

    /// What counts now.
    pub fn get(&self) -> T {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on this counts.
    pub fn set(&self, value: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = value;
    }
}

impl<T> Clone for Live<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T: Copy + fmt::Debug> fmt::Debug for Live<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}
