//! Locks on ranges of blocks: writes to one block happen one after the other.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;

/// Ranges in use. There are as many as requests in flight, so a list is enough.
#[derive(Default)]
pub(super) struct RangeLocks {
    held: Mutex<Vec<Range<u64>>>,
    released: Notify,
}

/// Holds its range until dropped.
pub(super) struct RangeGuard {
    locks: Arc<RangeLocks>,
    range: Range<u64>,
}

impl RangeLocks {
    pub(super) async fn lock(self: &Arc<Self>, range: Range<u64>) -> RangeGuard {
        loop {
            let released = self.released.notified();
            tokio::pin!(released);
            released.as_mut().enable();
            if let Some(guard) = self.try_lock(range.clone()) {
                return guard;
            }
            released.await;
        }
    }

    pub(super) fn try_lock(self: &Arc<Self>, range: Range<u64>) -> Option<RangeGuard> {
        let mut held = self.held.lock().expect("no holder panics");
        if held.iter().any(|other| other.start < range.end && range.start < other.end) {
            return None;
        }
        held.push(range.clone());
        Some(RangeGuard { locks: Arc::clone(self), range })
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        let mut held = self.locks.held.lock().expect("no holder panics");
        let at = held.iter().position(|range| *range == self.range).expect("it was held");
        held.swap_remove(at);
        drop(held);
        self.locks.released.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn an_overlapping_range_waits_and_another_does_not() {
        let locks = Arc::new(RangeLocks::default());
        let first = locks.lock(2..5).await;
        assert!(locks.try_lock(5..9).is_some(), "ranges that touch do not overlap");
        assert!(locks.try_lock(4..5).is_none());
        let waiting = tokio::spawn({
            let locks = Arc::clone(&locks);
            async move { drop(locks.lock(0..3).await) }
        });
        drop(first);
        tokio::time::timeout(Duration::from_secs(10), waiting)
            .await
            .expect("the range comes free within 10 s")
            .expect("no panic");
    }
}
