//! The progress of long work, and the request to stop it.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use perigee_block::locking::lock;
use perigee_model::volume::Progress;

/// Long work, shared by the task that does it and the tasks that watch it.
#[derive(Debug, Default)]
pub struct Work {
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    stopped: AtomicBool,
    /// What this is a part of, and stops with.
    whole: Option<Arc<Work>>,
    /// For gentle work: when the last step ended.
    stepped: Option<Mutex<Instant>>,
}

/// The longest pause between two steps of gentle work.
const PAUSE_MAX: Duration = Duration::from_millis(50);

impl Work {
    /// Background work, which pauses half of the time.
    pub(crate) fn gentle() -> Self {
        Self { stepped: Some(Mutex::new(Instant::now())), ..Self::default() }
    }

    /// A part of this work whose bytes do not count, and which stops with it.
    pub fn uncounted(self: &Arc<Self>) -> Arc<Self> {
        Arc::new(Self { whole: Some(Arc::clone(self)), ..Self::default() })
    }

    /// Whether it is done in the background.
    pub(crate) fn is_gentle(&self) -> bool {
        self.stepped.is_some()
    }

    /// How far the work is, as the control API says it.
    pub fn progress(&self) -> Progress {
        Progress {
            done_bytes: self.done_bytes.load(Ordering::Relaxed),
            total_bytes: self.total_bytes.load(Ordering::Relaxed),
        }
    }

    /// Asks the work to stop.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Whether it was asked to stop.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
            || self.whole.as_ref().is_some_and(|whole| whole.is_stopped())
    }

    /// So many more bytes are to come.
    pub fn expect(&self, bytes: u64) {
        self.total_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts finished bytes.
    ///
    /// # Errors
    /// When the work should stop.
    pub fn step(&self, bytes: u64) -> io::Result<()> {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
        if self.is_stopped() {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "it was interrupted"));
        }
        if let Some(stepped) = &self.stepped {
            let mut stepped = lock(stepped);
            std::thread::sleep(stepped.elapsed().min(PAUSE_MAX));
            *stepped = Instant::now();
        }
        Ok(())
    }
}

/// Stops the work when this is dropped, because nobody waits for it any more.
pub struct StopOnDrop(pub std::sync::Arc<Work>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}
