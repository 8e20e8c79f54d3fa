//! What the guest is asked for over its job port, beside acknowledgements.
//!
//! An intent is told at every connection until the VM is gone, so a restarted guest port loses none. An agent
//! that starts again has forgotten it: whoever wants it asks again.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use perigee_model::Problem;
use perigee_model::guest::HostMessage;
use rustix::rand::{GetRandomFlags, getrandom};
use tokio::sync::watch;

/// How long a guest may take to write what is in its memory to its disks.
const SYNC_DEADLINE: Duration = Duration::from_secs(60);

/// So often a guest is told the time again after its VM has gone on. A busy guest reads late, and takes the time then for an earlier one.
const TOLD_AGAIN: u32 = 10;

/// What is wanted of a guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The command of a gang's member may start.
    begin: bool,
    /// The command is to end, and the outputs are to be collected.
    end_command: bool,
    /// The number of the last question to write everything to its disks.
    sync: Option<u32>,
    /// How often its VM has gone on after it stood still, or came here.
    resumes: u32,
}

impl Wanted {
    /// What there is to say to a guest that was told `before`.
    pub fn since(self, before: Self) -> impl Iterator<Item = HostMessage> {
        let begin = (self.begin && !before.begin).then_some(HostMessage::Begin);
        let end = (self.end_command && !before.end_command).then_some(HostMessage::EndCommand);
        let sync = self.sync.filter(|_| self.sync != before.sync);
        let sync = sync.map(|number| [HostMessage::SyncNumber(number), HostMessage::Sync]);
        let clock =
            (self.resumes != before.resumes).then(|| HostMessage::Clock { unix_us: now_us() });
        begin.into_iter().chain(end).chain(sync.into_iter().flatten()).chain(clock)
    }
}

/// Unix time.
fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// The intents for one guest, and what it has done.
#[derive(Debug)]
pub struct Intents {
    wanted: watch::Sender<Wanted>,
    /// How many of the questions to write everything were asked, and are answered.
    synced: watch::Sender<u32>,
    /// The number of the first question. A guest may answer late what an agent has asked that ran before, or at another host.
    first_sync: u32,
    /// How often it is to be told the time once more.
    tells_again: AtomicU32,
}

impl Default for Intents {
    fn default() -> Self {
        let mut number = [0; 4];
        // Without randomness all begin at zero, which an answer that comes late may hit.
        let _ = getrandom(&mut number, GetRandomFlags::empty());
        let first_sync = u32::from_ne_bytes(number);
        let (wanted, synced) = (watch::Sender::default(), watch::Sender::default());
        Self { wanted, synced, first_sync, tells_again: AtomicU32::new(0) }
    }
}

impl Intents {
    /// Sees each change of what is wanted.
    pub fn subscribe(&self) -> watch::Receiver<Wanted> {
        self.wanted.subscribe()
    }

    /// The command of a gang's member may start.
    pub fn begin_command(&self) {
        self.wanted.send_if_modified(|wanted| !std::mem::replace(&mut wanted.begin, true));
    }

    /// The command is to end now.
    pub fn end_command(&self) {
        self.wanted.send_if_modified(|wanted| !std::mem::replace(&mut wanted.end_command, true));
    }

    /// The VM goes on after it has stood still: the guest's clock is behind.
    pub fn tell_time(&self) {
        self.tells_again.store(TOLD_AGAIN, Ordering::Relaxed);
        self.tell_time_now();
    }

    /// Tells the time some times more after that. The VM's owner calls this once a second.
    pub fn tell_time_again(&self) {
        let less = |left: u32| left.checked_sub(1);
        if self.tells_again.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() {
            self.tell_time_now();
        }
    }

    fn tell_time_now(&self) {
        self.wanted.send_modify(|wanted| wanted.resumes = wanted.resumes.wrapping_add(1));
    }

    /// Which question this is, from 1 on.
    fn count(&self, number: u32) -> u32 {
        number.wrapping_sub(self.first_sync).wrapping_add(1)
    }

    /// The guest has done what the question with this number asked for. One that knows no numbers means the last question.
    pub fn note_synced(&self, number: Option<u32>) {
        let Some(last) = self.wanted.borrow().sync else { return };
        let answered = self.count(number.unwrap_or(last));
        // The answer to somebody else's question has a number that was not asked with here.
        if (1..=self.count(last)).contains(&answered) {
            self.synced.send_if_modified(|done| {
                let is_new = answered > *done;
                *done = answered.max(*done);
                is_new
            });
        }
    }

    /// Asks the guest to write everything to its disks, and waits until it has.
    ///
    /// # Errors
    /// `Unavailable` if it does not say so in time.
    pub async fn sync(&self) -> Result<(), Problem> {
        let mut synced = self.synced.subscribe();
        let mut number = self.first_sync;
        self.wanted.send_modify(|wanted| {
            number = wanted.sync.map_or(number, |last| last.wrapping_add(1));
            wanted.sync = Some(number);
        });
        let asked = self.count(number);
        let done = synced.wait_for(|done| *done >= asked);
        if matches!(tokio::time::timeout(SYNC_DEADLINE, done).await, Ok(Ok(_))) {
            return Ok(());
        }
        let why = format!("it did not answer within {} s", SYNC_DEADLINE.as_secs());
        Err(Problem::unavailable("can't have the guest write its memory to its disks", why))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_guest_that_answers_an_earlier_question_late_has_not_answered_the_next_one() {
        let intents = Intents::default();
        let first = tokio::time::timeout(Duration::from_millis(1), intents.sync()).await;
        first.expect_err("it is not answered");
        let number = intents.wanted.borrow().sync.unwrap();
        let second = intents.sync();
        tokio::pin!(second);
        assert!(second.as_mut().now_or_never().is_none());
        intents.note_synced(Some(number));
        assert!(second.as_mut().now_or_never().is_none());
        intents.note_synced(Some(number.wrapping_add(1)));
        second.await.unwrap();
    }

    #[test]
    fn a_guest_is_told_the_time_each_time_its_vm_goes_on_and_at_each_new_connection() {
        let intents = Intents::default();
        let told = *intents.wanted.borrow();
        assert_eq!(told.since(Wanted::default()).count(), 0);
        intents.tell_time();
        let now = *intents.wanted.borrow();
        for before in [told, Wanted::default()] {
            let said: Vec<_> = now.since(before).collect();
            assert!(
                matches!(said[..], [HostMessage::Clock { unix_us }] if unix_us > 0),
                "{said:?}"
            );
        }
        assert_eq!(now.since(now).count(), 0);
        for _ in 0..TOLD_AGAIN {
            let before = *intents.wanted.borrow();
            intents.tell_time_again();
            assert_eq!(intents.wanted.borrow().since(before).count(), 1);
        }
        let before = *intents.wanted.borrow();
        intents.tell_time_again();
        assert_eq!(intents.wanted.borrow().since(before).count(), 0, "that is enough");
    }

    #[tokio::test]
    async fn a_guest_that_knows_no_numbers_answers_the_last_question() {
        let intents = Intents::default();
        intents.note_synced(None);
        let asked = intents.sync();
        tokio::pin!(asked);
        assert!(asked.as_mut().now_or_never().is_none());
        intents.note_synced(None);
        asked.await.unwrap();
    }
}
