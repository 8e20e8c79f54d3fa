//! Numbered changes of this host's VMs. A watcher sends one request, which is answered when there is a
//! change.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::watch;

/// The longest wait, so that a broken connection does not stay open unnoticed.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// The numbers begin at the agent's start time in microseconds, so they are higher than those of earlier
/// runs.
#[derive(Debug)]
pub struct Changes {
    last: watch::Sender<u64>,
}

impl Changes {
    /// The first number is the time in microseconds, so that numbers grow over a restart of the agent.
    pub fn new() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (last, _) = watch::channel(u64::try_from(since.as_micros()).unwrap_or(1));
        Self { last }
    }

    /// The number of the last change of any VM.
    pub fn now(&self) -> u64 {
        *self.last.borrow()
    }

    /// Records a change. `keep` stores its number before any watcher can see the number.
    fn note_with(&self, keep: impl FnOnce(u64)) {
        self.last.send_modify(|last| {
            *last += 1;
            keep(*last);
        });
    }

    /// Waits for a change after this one, at most for this time.
    pub async fn wait(&self, after: u64, at_most: Duration) {
        let mut last = self.last.subscribe();
        let newer = last.wait_for(|last| *last > after);
        // The sender lives as long as `self`, and the end of the wait is no error.
        drop(tokio::time::timeout(at_most.min(WAIT_MAX), newer).await);
    }

    /// Waits until a change makes the condition true, at most for this time.
    pub async fn wait_until(&self, at_most: Duration, is_due: impl Fn() -> bool) {
        let mut last = self.last.subscribe();
        let due = last.wait_for(|_| is_due());
        drop(tokio::time::timeout(at_most.min(WAIT_MAX), due).await);
    }
}

/// The last change of one VM.
#[derive(Debug)]
pub struct Changed {
    all: Arc<Changes>,
    last: AtomicU64,
}

impl Changed {
    /// A VM that changes at this moment: it is new.
    pub fn new(all: Arc<Changes>) -> Self {
        let changed = Self { all, last: AtomicU64::new(0) };
        changed.note();
        changed
    }

    /// Notes a change, and ends the waits for one.
    pub fn note(&self) {
        self.all.note_with(|number| self.last.store(number, Ordering::SeqCst));
    }

    /// The number of the last change.
    pub fn last(&self) -> u64 {
        self.last.load(Ordering::SeqCst)
    }

    /// Whether the VM has changed after this number.
    pub fn since(&self, revision: u64) -> bool {
        self.last() > revision
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_change_ends_a_wait_and_is_told_to_who_knows_less() {
        let all = Arc::new(Changes::new());
        let vm = Changed::new(Arc::clone(&all));
        let before = all.now();
        assert!(!vm.since(before));
        let waiting = tokio::spawn({
            let all = Arc::clone(&all);
            async move { all.wait(before, Duration::from_secs(30)).await }
        });
        vm.note();
        tokio::time::timeout(Duration::from_secs(20), waiting)
            .await
            .expect("waited 20 s for the change")
            .expect("no panic");
        assert!(vm.since(before) && all.now() > before);
    }

    /// The number was visible before the VM had it, so a watcher that then asked for later changes never got
    /// this one.
    #[test]
    fn a_change_whose_number_is_told_is_known_to_be_of_its_vm() {
        let all = Arc::new(Changes::new());
        let vm = Changed::new(Arc::clone(&all));
        let end = all.now() + 20_000;
        std::thread::scope(|scope| {
            scope.spawn(|| (all.now()..end).for_each(|_| vm.note()));
            while all.now() < end {
                let told = all.now();
                assert!(vm.since(told - 1), "change {told} is of no VM");
            }
        });
    }

    #[tokio::test]
    async fn a_wait_for_one_vm_ends_with_its_change_and_not_with_another() {
        let all = Arc::new(Changes::new());
        let [one, other] = [(); 2].map(|()| Arc::new(Changed::new(Arc::clone(&all))));
        let before = one.last();
        let waiting = tokio::spawn({
            let (all, one) = (Arc::clone(&all), Arc::clone(&one));
            async move { all.wait_until(Duration::from_secs(30), || one.since(before)).await }
        });
        other.note();
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        one.note();
        tokio::time::timeout(Duration::from_secs(20), waiting)
            .await
            .expect("waited 20 s for the change")
            .expect("no panic");
    }

    #[tokio::test]
    async fn a_wait_without_a_change_ends_in_its_time() {
        let all = Changes::new();
        all.wait(all.now(), Duration::from_millis(10)).await;
    }
}
