//! Which host may keep blocks of a volume in memory: the home's side.
//!
//! ```text
//! nobody --asks--> held by a host, for a time --renewed, or asked for again: nothing has changed
//!                    |-- not renewed, or given back: it ends, and the home remembers the host
//!                    '-- another host writes: recalled; when it has ended: nobody
//! ```
//!
//! A host answers reads from what it keeps only while it holds the lease. A write of anybody else waits
//! until the lease has been given back, or its time is over. So a block that was kept is never read
//! once a newer one was acknowledged. The lease is the host's and not a session's: its own sessions
//! write through it, and it knows of their writes. Writer epochs don't matter for this.
//!
//! The host counts the time from when it asked, the home from when it answered, and the host counts
//! less of it: no common clock is needed, only clocks that run at about the same speed.
//!
//! While the home remembers a host, nobody else has written: what the host keeps is still right, even
//! when its lease has ended long ago. A home that was started again waits for the host that it remembers
//! as for one that holds the lease, and tells it to begin anew: its pool may be an older copy.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::locking;

/// How long a lease lasts at the home, from the last time that it was asked for.
pub const LEASE_MAX: Duration = Duration::from_secs(10);
/// How long it lasts at the host, from when it asked.
pub const LEASE_USE_MAX: Duration = Duration::from_secs(8);
/// A host that holds it is answered after this time, or when it is recalled.
pub const RENEW_AFTER: Duration = Duration::from_secs(3);
/// After a recall no host gets the lease for this time but the one that wrote. If that one's lease is
/// recalled within this time, no host gets it at all. So writes wait twice in it at most.
pub const RECALL_PAUSE: Duration = Duration::from_secs(10);

/// Tells hosts apart; [`NO_HOST`] for who is no other host's server, and never holds a lease.
pub type HostTag = u64;
/// The tag of clients that are no other host's server. They never hold a lease.
pub const NO_HOST: HostTag = 0;

/// What a host says. Its numbers grow: what it gave back before it asked again, and comes after that,
/// means nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseAsk {
    /// What the host asks for.
    pub wish: LeaseWish,
    /// Grows with each message of the host about this volume. The home remembers the highest one with which
    /// the host asked: a give-back with no higher number is out of date.
    pub number: u64,
}

/// What a host asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseWish {
    /// It wants the lease.
    Hold,
    /// As [`Self::Hold`] by who holds it: the answer comes later, and at once when it is recalled.
    Keep,
    /// It uses it no more.
    GiveBack,
}

/// What it is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseAnswer {
    /// It does not get the lease: another host holds it, a recall is under way or was less than
    /// [`RECALL_PAUSE`] ago, the question came after a later give-back, or the device has no leases. It may
    /// ask again.
    Refused,
    /// It holds the lease; what it kept before may be old.
    Granted,
    /// It holds the lease, and nobody else has written since it held it before.
    Still,
    /// It has to give it back.
    Recalled,
}

/// The lease of one volume.
#[derive(Default)]
pub struct Lease {
    /// The host that is remembered.
    holder: AtomicU64,
    changing: Mutex<()>,
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    /// The holder may use it until then.
    until: Option<Instant>,
    /// Who wants to write meanwhile; [`NO_HOST`] also for several.
    recalled: Option<HostTag>,
    /// The grant to the holder, counted since the start; 0: it was granted before that.
    grants: u64,
    /// The holder has not shown that it has heard of the grant; what it keeps may be old.
    unsure: bool,
    /// The number of the last wish that was granted since the start.
    granted: Option<u64>,
    /// The highest number with which the holder asked.
    number: u64,
    /// Nobody gets it before then but this host.
    paused: Option<(HostTag, Instant)>,
    /// The last give-back, and until when it counts. A question of the same host that has a lower number
    /// was overtaken by it.
    given_back: Option<(HostTag, u64, Instant)>,
}

/// What becomes of a wish for the lease.
pub enum Wish {
    /// The answer is known already. A lease that the host holds was renewed by this.
    Answer(LeaseAnswer),
    /// Possible once no write is in flight: see [`Lease::grant`].
    MayBeGranted,
}

impl State {
    fn is_overtaken(&self, host: HostTag, number: u64, now: Instant) -> bool {
        let given_back = self.given_back.filter(|(who, _, until)| *who == host && now < *until);
        given_back.is_some_and(|(_, last, _)| number < last)
    }
}

impl Lease {
    /// As it was remembered over a restart.
    pub fn remembered(holder: Option<HostTag>) -> Self {
        let until = holder.map(|_| Instant::now() + LEASE_MAX);
        let state = Mutex::new(State { until, unsure: until.is_some(), ..State::default() });
        let holder = AtomicU64::new(holder.unwrap_or(NO_HOST));
        Self { holder, changing: Mutex::new(()), state, changed: Notify::new() }
    }

    /// Held while the holder is changed here and where it is remembered durably, so that both name
    /// the same one.
    pub fn changing(&self) -> MutexGuard<'_, ()> {
        locking::lock(&self.changing)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        locking::lock(&self.state)
    }

    /// Whether this host may write now: nobody else is remembered. It stays true as long as writes
    /// that were admitted are waited for before [`Self::grant`].
    pub fn allows(&self, host: HostTag) -> bool {
        let holder = self.holder.load(Ordering::SeqCst);
        holder == NO_HOST || holder == host
    }

    /// Decides about a wish to hold the lease. A holder's lease lasts [`LEASE_MAX`] from now on.
    pub fn wish(&self, host: HostTag, keeps: bool, number: u64) -> Wish {
        let (now, mut state) = (Instant::now(), self.lock());
        let holder = self.holder.load(Ordering::SeqCst);
        let paused = state.paused.is_some_and(|(excepted, until)| excepted != host && now < until);
        let taken = holder != NO_HOST && state.until.is_some_and(|until| now < until);
        let overtaken = state.is_overtaken(host, number, now);
        if host == NO_HOST || state.recalled.is_some() || paused || overtaken {
            return Wish::Answer(LeaseAnswer::Refused);
        }
        if holder == host {
            // The answer to its wish may have been lost. It says that it keeps the lease only after it
            // has heard of it.
            if keeps && state.granted.is_some_and(|granted| granted < number) {
                state.unsure = false;
            }
            if keeps && state.unsure {
                return Wish::Answer(LeaseAnswer::Recalled);
            }
            state.until = Some(now + LEASE_MAX);
            state.number = state.number.max(number);
            if state.unsure {
                state.granted = state.granted.max(Some(number));
                return Wish::Answer(LeaseAnswer::Granted);
            }
            return Wish::Answer(LeaseAnswer::Still);
        }
        if taken { Wish::Answer(LeaseAnswer::Refused) } else { Wish::MayBeGranted }
    }

    /// Grants it. No write of another host is in flight, and none is admitted meanwhile; it is
    /// remembered durably already.
    pub fn grant(&self, host: HostTag, number: u64) -> LeaseAnswer {
        let mut state = self.lock();
        (state.until, state.unsure) = (Some(Instant::now() + LEASE_MAX), true);
        (state.number, state.granted) = (number, Some(number));
        state.grants += 1;
        self.holder.store(host, Ordering::SeqCst);
        LeaseAnswer::Granted
    }

    /// Answers who holds it, after a while or when it is recalled.
    pub async fn keep(&self, host: HostTag, number: u64) -> LeaseAnswer {
        let end = Instant::now() + RENEW_AFTER;
        loop {
            let changed = self.changed.notified();
            {
                let state = self.lock();
                let overtaken = state.is_overtaken(host, number, Instant::now());
                if state.recalled.is_some() || overtaken || !self.is_held_by(host) {
                    return LeaseAnswer::Recalled;
                }
            }
            if tokio::time::timeout_at(end, changed).await.is_err() {
                return match self.wish(host, true, number) {
                    Wish::Answer(LeaseAnswer::Still) => LeaseAnswer::Still,
                    _ => LeaseAnswer::Recalled,
                };
            }
        }
    }

    fn is_held_by(&self, host: HostTag) -> bool {
        self.holder.load(Ordering::SeqCst) == host
    }

    /// Ends the lease of this host, unless it has asked for it again with this number or a higher one. The host
    /// is still remembered, until another host writes.
    pub fn give_back(&self, host: HostTag, number: u64) {
        let mut state = self.lock();
        state.given_back = Some((host, number, Instant::now() + LEASE_MAX));
        if self.is_held_by(host) && state.number < number {
            state.until = None;
            drop(state);
            self.changed.notify_waiters();
        }
    }

    /// Recalls it from any host but this one. When this returns no other host uses it, or will before
    /// [`Self::forget`].
    /// Gives the grant that it ended, for [`Self::is_recalled`]; `None` when there was none.
    pub async fn recall(&self, by: HostTag) -> Option<u64> {
        loop {
            let changed = self.changed.notified();
            let until = {
                let mut state = self.lock();
                if self.allows(by) {
                    return None;
                }
                match &mut state.recalled {
                    None => {
                        state.recalled = Some(by);
                        drop(state);
                        self.changed.notify_waiters();
                        continue;
                    }
                    Some(writer) if *writer != by => *writer = NO_HOST,
                    Some(_) => {}
                }
                match state.until {
                    Some(until) if Instant::now() < until => until,
                    _ => return Some(state.grants),
                }
            };
            let _timed_out = tokio::time::timeout_at(until, changed).await;
        }
    }

    /// Whether this grant is recalled and not yet forgotten: another may have come since.
    pub fn is_recalled(&self, grant: u64) -> bool {
        let state = self.lock();
        state.recalled.is_some() && state.grants == grant
    }

    /// Nobody is remembered any more. It was recalled, and is forgotten durably already.
    pub fn forget(&self) {
        let mut state = self.lock();
        let Some(writer) = state.recalled.take() else { return };
        self.holder.store(NO_HOST, Ordering::SeqCst);
        let now = Instant::now();
        // Else two hosts that read and write in turn would recall each other's lease on and on.
        let again = state.paused.is_some_and(|(_, until)| now < until);
        let excepted = if again { NO_HOST } else { writer };
        state.paused = Some((excepted, now + RECALL_PAUSE));
        state.until = None;
        drop(state);
        self.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use super::*;

    fn asks(lease: &Lease, host: HostTag, number: u64) -> LeaseAnswer {
        match lease.wish(host, false, number) {
            Wish::Answer(answer) => answer,
            Wish::MayBeGranted => lease.grant(host, number),
        }
    }

    /// How many times the write waited for another host, which gives the lease back at once.
    async fn write(lease: &Lease, host: HostTag, number: u64) -> u32 {
        let mut waits = 0;
        for other in (1..4).filter(|other| *other != host && lease.is_held_by(*other)) {
            lease.give_back(other, number);
        }
        while let Some(grant) = lease.recall(host).await {
            assert!(lease.is_recalled(grant));
            lease.forget();
            waits += 1;
        }
        waits
    }

    #[tokio::test(start_paused = true)]
    async fn readers_in_turn_do_not_recall_a_writer_s_lease_again_and_again() {
        let (lease, mut number, mut waits) = (Lease::default(), 0, 0);
        assert_eq!(asks(&lease, 1, 1), LeaseAnswer::Granted);
        for second in 0..60_u64 {
            waits += write(&lease, 3, number).await;
            number += 10;
            let _maybe = asks(&lease, 1 + second % 2, number - 1);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert!(waits <= 7, "the writer waited {waits} times in a minute");
        write(&lease, 3, number).await;
        assert_eq!(asks(&lease, 1, number + 1), LeaseAnswer::Refused);
        assert_eq!(asks(&lease, 3, number + 1), LeaseAnswer::Granted, "the writer may keep blocks");
    }

    #[tokio::test(start_paused = true)]
    async fn hosts_that_write_in_turn_wait_twice_in_a_pause_at_most() {
        let (lease, mut number, mut waits) = (Lease::default(), 0, 0);
        for second in 0..60_u64 {
            let host = 1 + second % 2;
            waits += write(&lease, host, number).await;
            number += 10;
            let _maybe = asks(&lease, host, number - 1);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert!(waits <= 12, "they waited {waits} times in a minute");
    }

    #[tokio::test(start_paused = true)]
    async fn a_question_that_a_give_back_overtook_does_not_bring_the_lease_back() {
        let lease = Lease::default();
        assert_eq!(asks(&lease, 1, 1), LeaseAnswer::Granted);
        let mut keeps = Box::pin(lease.keep(1, 2));
        assert!(keeps.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        lease.give_back(1, 4);
        assert_eq!(keeps.await, LeaseAnswer::Recalled);
        assert_eq!(asks(&lease, 1, 3), LeaseAnswer::Refused);
        let begun = Instant::now();
        assert_eq!(write(&lease, 2, 5).await, 1);
        assert_eq!(begun.elapsed(), Duration::ZERO, "nobody holds it");
    }
}
