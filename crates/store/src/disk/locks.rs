//! Locks on ranges of blocks, which serialize the writes to one block.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use perigee_block::locking::lock;
use tokio::sync::Notify;

/// The locked ranges. There are only as many as requests in flight, so a list is enough.
#[derive(Default)]
pub(crate) struct RangeLocks {
    held: Mutex<HeldRange>,
    released: Notify,
}

#[derive(Default)]
struct HeldRange {
    ranges: Vec<Range<u64>>,
    /// A task has found its range locked since the last release.
    wanted: bool,
}

/// Holds the lock on its range until it is dropped. `L` is a reference to the locks.
pub(crate) struct RangeGuard<L: AsRef<RangeLocks> = Arc<RangeLocks>> {
    locks: L,
    range: Range<u64>,
}

impl AsRef<Self> for RangeLocks {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl RangeLocks {
    fn held(&self) -> MutexGuard<'_, HeldRange> {
        lock(&self.held)
    }

    /// Waits until nobody has a lock on a part of the range.
    pub(crate) async fn lock(self: &Arc<Self>, range: Range<u64>) -> RangeGuard {
        loop {
            let released = self.released.notified();
            tokio::pin!(released);
            released.as_mut().enable();
            if self.take(&range, true) {
                return RangeGuard { locks: Arc::clone(self), range };
            }
            released.await;
        }
    }

    /// The lock, if it is free now.
    pub(crate) fn try_lock(&self, range: Range<u64>) -> Option<RangeGuard<&Self>> {
        self.take(&range, false).then(|| RangeGuard { locks: self, range })
    }

    fn take(&self, range: &Range<u64>, will_wait: bool) -> bool {
        let mut held = self.held();
        if held.ranges.iter().any(|other| other.start < range.end && range.start < other.end) {
            held.wanted |= will_wait;
            return false;
        }
        held.ranges.push(range.clone());
        true
    }
}

impl<L: AsRef<RangeLocks>> Drop for RangeGuard<L> {
    fn drop(&mut self) {
        let locks = self.locks.as_ref();
        let mut held = locks.held();
        let at = held.ranges.iter().position(|range| *range == self.range).expect("it was held");
        held.ranges.swap_remove(at);
        let wanted = std::mem::take(&mut held.wanted);
        drop(held);
        if wanted {
            locks.released.notify_waiters();
        }
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
        tokio::time::timeout(Duration::from_secs(120), waiting)
            .await
            .expect("the range comes free within 120 s")
            .expect("no panic");
    }
}
