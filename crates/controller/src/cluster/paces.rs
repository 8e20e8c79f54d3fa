//! How fast inputs and outputs of jobs may come and go. Who sets it: `files/pace.rs`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use perigee_model::SiteId;
use tokio::time::Instant;

use super::HostLink;

/// What could not be sent in time may be sent faster afterwards, but not more than this much.
const LATE_MAX: Duration = Duration::from_millis(10);

/// Where bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// From the controller to a host.
    In,
    /// From a host to the controller.
    Out,
}

/// How fast staging may be, by the site of the host.
#[derive(Debug, Default)]
pub struct Paces(Mutex<BTreeMap<(SiteId, Way), Arc<Pace>>>);

/// A limit for all that is staged over one link in one direction.
#[derive(Debug)]
pub struct Pace {
    /// 0: as fast as it can.
    bytes_per_s: AtomicU64,
    next: Mutex<Instant>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Paces {
    /// The pace that all staging with the site of this host shares.
    pub fn of(&self, host: &HostLink, way: Way) -> Arc<Pace> {
        let site = host.addresses.site.clone();
        Arc::clone(locked(&self.0).entry((site, way)).or_insert_with(|| Arc::new(Pace::new())))
    }
}

impl Pace {
    /// A pace without a limit.
    pub fn new() -> Self {
        Self { bytes_per_s: AtomicU64::new(0), next: Mutex::new(Instant::now()) }
    }

    /// `None`: as fast as it can.
    pub fn set(&self, bytes_per_s: Option<u64>) {
        self.bytes_per_s.store(bytes_per_s.unwrap_or(0), Ordering::Relaxed);
    }

    /// The limit that holds now.
    pub fn bytes_per_s(&self) -> Option<u64> {
        Some(self.bytes_per_s.load(Ordering::Relaxed)).filter(|rate| *rate > 0)
    }

    /// Waits until so many bytes may go.
    pub async fn pass(&self, bytes: usize) {
        let Some(bytes_per_s) = self.bytes_per_s() else { return };
        let at = {
            let mut next = locked(&self.next);
            let now = Instant::now();
            let at = (*next).max(now.checked_sub(LATE_MAX).unwrap_or(now));
            let micros = (bytes as u64).saturating_mul(1_000_000) / bytes_per_s;
            *next = at + Duration::from_micros(micros);
            at
        };
        tokio::time::sleep_until(at).await;
    }
}
