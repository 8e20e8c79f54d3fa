//! Work that may take long: how far it is, and whether it should stop.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use perigee_model::volume::Progress;

/// Shared by the task that does the work and those that watch it.
#[derive(Debug, Default)]
pub struct Work {
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    stopped: AtomicBool,
    /// Of gentle work: when the last step ended.
    stepped: Option<Mutex<Instant>>,
}

/// The longest pause between two steps of gentle work.
const PAUSE_MAX: Duration = Duration::from_millis(50);

impl Work {
    /// Work that nobody waits for: it rests half of the time.
    pub(super) fn gentle() -> Self {
        Self { stepped: Some(Mutex::new(Instant::now())), ..Self::default() }
    }

    pub fn progress(&self) -> Progress {
        Progress {
            done_bytes: self.done_bytes.load(Ordering::Relaxed),
            total_bytes: self.total_bytes.load(Ordering::Relaxed),
        }
    }

    /// Nobody wants the result any more.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    pub(super) fn expect(&self, bytes: u64) {
        self.total_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts what is done; an error once the work should stop.
    pub(super) fn step(&self, bytes: u64) -> io::Result<()> {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
        if self.stopped.load(Ordering::Relaxed) {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "it was interrupted"));
        }
        if let Some(stepped) = &self.stepped {
            let mut stepped = stepped.lock().expect("no holder panics");
            std::thread::sleep(stepped.elapsed().min(PAUSE_MAX));
            *stepped = Instant::now();
        }
        Ok(())
    }
}

/// Stops the work when it is dropped: when who waited for it has gone.
pub struct StopOnDrop(pub std::sync::Arc<Work>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}
