//! Which hosts may keep blocks of a volume in memory: the home's side.
//!
//! ```text
//! nobody --asks--> held by hosts, for a time --renewed, or asked for again: nothing has changed
//!                    |-- not renewed, or given back: it ends for that host, and the home remembers the host
//!                    '-- somebody writes: recalled from all others; when it has ended for them: the writer's, if
//!                        the writer held it, or nobody's
//! ```
//!
//! A host answers reads from what it keeps only while it holds the lease. A write of anybody else waits
//! until the lease has been given back, or its time is over. So a block that was kept is never read
//! once a newer one was acknowledged. The lease is the host's and not a session's: its own sessions
//! write through it, and it knows of their writes. Writer epochs don't matter for this.
//!
//! Any number of hosts hold it while nobody writes. A host that writes again and again does not share it: each of its
//! writes would wait for the others. So another host that asks is refused until the holder has not written for some
//! seconds.
//!
//! The host counts the time from when it asked, the home from when it answered, and the host counts
//! less of it: no common clock is needed, only clocks that run at about the same speed.
//!
//! While the home remembers a host, nobody else has written: what the host keeps is still right, even
//! when its lease has ended long ago. A home that was started again waits for the host that it remembers
//! as for one that holds the lease, and tells it to begin anew: its pool may be an older copy. It remembers that there
//! were several, and not which ones.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
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
/// As many hosts are remembered at most; others read everything at the home.
const HOSTS_MAX: usize = 256;

/// Tells hosts apart; [`NO_HOST`] for who is no other host's server, and never holds a lease.
pub type HostTag = u64;
/// The tag of clients that are no other host's server. They never hold a lease.
pub const NO_HOST: HostTag = 0;
/// Stands for two hosts or more, where one can be named. No host has this tag.
pub const SEVERAL: HostTag = HostTag::MAX;

/// What a host says. Its numbers grow: what it gave back before it asked again, and comes after that,
/// means nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseAsk {
    /// What the host asks for.
    pub request: LeaseRequest,
    /// Grows with each message of the host about this volume. The home remembers the highest one with which
    /// the host asked: a give-back with no higher number is out of date.
    pub number: u64,
}

/// What a host asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseRequest {
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
    /// It does not get the lease: another host that holds it writes, a recall is under way or was less than
    /// [`RECALL_PAUSE`] ago, the question came after a later give-back, too many hosts hold it, or the device has no
    /// leases. It may ask again.
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
    /// The host that is remembered, [`NO_HOST`], or [`SEVERAL`]. Only who is alone here may write.
    holder: AtomicU64,
    /// The only holder has written since its lease was renewed.
    has_written: AtomicBool,
    changing: Mutex<()>,
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    /// The hosts that are remembered. [`SEVERAL`] for those of before the start.
    holders: BTreeMap<HostTag, Holder>,
    /// Who wants to write meanwhile; [`NO_HOST`] also for several.
    recalled: Option<HostTag>,
    /// Grants since the start.
    grants: u64,
    /// The only holder had written when its lease was last renewed.
    had_written: bool,
    /// Nobody gets it before then but this host.
    paused: Option<(HostTag, Instant)>,
    /// Each host's last give-back, and until when it counts. A question of the same host that has a lower number
    /// was overtaken by it.
    given_back: BTreeMap<HostTag, (u64, Instant)>,
}

/// A host that is remembered.
#[derive(Default)]
struct Holder {
    /// It may use the lease until then.
    until: Option<Instant>,
    /// It has not shown that it has heard of the grant; what it keeps may be old.
    unsure: bool,
    /// The number of its last request that was granted since the start.
    granted: Option<u64>,
    /// The highest number with which it asked.
    number: u64,
}

impl Holder {
    fn may_use(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }
}

/// What becomes of a request for the lease.
pub enum LeaseDecision {
    /// The answer is known already. A lease that the host holds was renewed by this.
    Answer(LeaseAnswer),
    /// Possible once no write is in flight: see [`Lease::grant`].
    MayBeGranted,
}

impl State {
    fn is_overtaken(&self, host: HostTag, number: u64, now: Instant) -> bool {
        self.given_back.get(&host).is_some_and(|(last, until)| now < *until && number < *last)
    }

    /// Whether this host has to give it back, because another one wants to write.
    fn is_recalled_from(&self, host: HostTag) -> bool {
        self.recalled.is_some_and(|by| by != host)
    }

    /// Who is remembered, as one tag.
    fn remembered(&self) -> HostTag {
        match self.holders.len() {
            0 => NO_HOST,
            1 => *self.holders.keys().next().expect("there is one"),
            _ => SEVERAL,
        }
    }
}

impl Lease {
    /// As it was remembered over a restart.
    pub fn remembered(holder: Option<HostTag>) -> Self {
        let until = Some(Instant::now() + LEASE_MAX);
        let known = |host| (host, Holder { until, unsure: true, ..Holder::default() });
        let state = State { holders: holder.map(known).into_iter().collect(), ..State::default() };
        Self {
            holder: AtomicU64::new(state.remembered()),
            state: Mutex::new(state),
            ..Self::default()
        }
    }

    /// Held while the holders are changed here and where they are remembered durably, so that both name
    /// the same ones.
    pub fn changing(&self) -> MutexGuard<'_, ()> {
        locking::lock(&self.changing)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        locking::lock(&self.state)
    }

    /// Whether this host may write now: nobody else is remembered. It stays true as long as writes
    /// that were admitted are waited for before [`Self::grant`]. A holder that asks counts as one that writes.
    pub fn allows(&self, host: HostTag) -> bool {
        let holder = self.holder.load(Ordering::SeqCst);
        if holder == NO_HOST {
            return true;
        }
        let is_alone = holder == host && host != SEVERAL;
        if is_alone && !self.has_written.load(Ordering::Relaxed) {
            self.has_written.store(true, Ordering::Relaxed);
        }
        is_alone
    }

    /// Decides about a request to hold the lease. A holder's lease lasts [`LEASE_MAX`] from now on.
    pub fn decide(&self, host: HostTag, keeps: bool, number: u64) -> LeaseDecision {
        let (now, mut state) = (Instant::now(), self.lock());
        let refused = LeaseDecision::Answer(LeaseAnswer::Refused);
        if host == NO_HOST || host == SEVERAL || state.is_overtaken(host, number, now) {
            return refused;
        }
        if state.holders.contains_key(&host) {
            let is_recalled = state.is_recalled_from(host);
            return if is_recalled { refused } else { self.renew(&mut state, host, keeps, number) };
        }
        let paused = state.paused.is_some_and(|(excepted, until)| excepted != host && now < until);
        let has_written = state.had_written || self.has_written.load(Ordering::Relaxed);
        let alone = state.holders.values().next().filter(|_| state.holders.len() == 1);
        let is_writers = has_written && alone.is_some_and(|holder| holder.may_use(now));
        if state.recalled.is_some() || paused || is_writers || state.holders.len() >= HOSTS_MAX {
            return refused;
        }
        LeaseDecision::MayBeGranted
    }

    fn renew(&self, state: &mut State, host: HostTag, keeps: bool, number: u64) -> LeaseDecision {
        let is_alone = state.holders.len() == 1;
        let Some(holder) = state.holders.get_mut(&host) else {
            return LeaseDecision::Answer(LeaseAnswer::Refused);
        };
        // The answer to its request may have been lost. It says that it keeps the lease only after it
        // has heard of it.
        if keeps && holder.granted.is_some_and(|granted| granted < number) {
            holder.unsure = false;
        }
        if keeps && holder.unsure {
            return LeaseDecision::Answer(LeaseAnswer::Recalled);
        }
        holder.until = Some(Instant::now() + LEASE_MAX);
        holder.number = holder.number.max(number);
        let answer = match holder.unsure {
            true => {
                holder.granted = holder.granted.max(Some(number));
                LeaseAnswer::Granted
            }
            false => LeaseAnswer::Still,
        };
        if is_alone {
            state.had_written = self.has_written.swap(false, Ordering::Relaxed);
        }
        LeaseDecision::Answer(answer)
    }

    /// What is remembered after this host was granted the lease, for [`Self::grant`]. The caller holds
    /// [`Self::changing`].
    pub fn remembered_with(&self, host: HostTag) -> HostTag {
        let state = self.lock();
        if state.holders.keys().all(|holder| *holder == host) { host } else { SEVERAL }
    }

    /// Grants it. No write of another host is in flight, and none is admitted meanwhile; it is
    /// remembered durably already.
    pub fn grant(&self, host: HostTag, number: u64) -> LeaseAnswer {
        let mut state = self.lock();
        let until = Some(Instant::now() + LEASE_MAX);
        let holder = Holder { until, unsure: true, granted: Some(number), number };
        state.holders.insert(host, holder);
        state.grants += 1;
        state.had_written = self.has_written.swap(false, Ordering::Relaxed);
        self.holder.store(state.remembered(), Ordering::SeqCst);
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
                let is_holder = state.holders.contains_key(&host);
                if state.is_recalled_from(host) || overtaken || !is_holder {
                    return LeaseAnswer::Recalled;
                }
            }
            if tokio::time::timeout_at(end, changed).await.is_err() {
                return match self.decide(host, true, number) {
                    LeaseDecision::Answer(LeaseAnswer::Still) => LeaseAnswer::Still,
                    _ => LeaseAnswer::Recalled,
                };
            }
        }
    }

    /// Ends the lease of this host, unless it has asked for it again with this number or a higher one. The host
    /// is still remembered, until another host writes.
    pub fn give_back(&self, host: HostTag, number: u64) {
        let (now, mut state) = (Instant::now(), self.lock());
        state.given_back.retain(|_, (_, until)| now < *until);
        if state.given_back.len() < HOSTS_MAX {
            state.given_back.insert(host, (number, now + LEASE_MAX));
        }
        if let Some(holder) = state.holders.get_mut(&host)
            && holder.number < number
        {
            holder.until = None;
            drop(state);
            self.changed.notify_waiters();
        }
    }

    /// Recalls it from all hosts but this one. When this returns no other host uses it, or will before
    /// [`Self::forget`].
    /// Gives the last grant of those that it ended, for [`Self::is_recalled`]; `None` when there was none.
    pub async fn recall(&self, by: HostTag) -> Option<u64> {
        loop {
            let changed = self.changed.notified();
            let until = {
                let (now, mut state) = (Instant::now(), self.lock());
                let holder = self.holder.load(Ordering::SeqCst);
                if holder == NO_HOST || holder == by {
                    return None;
                }
                let recalled = match state.recalled {
                    Some(writer) if writer != by => NO_HOST,
                    _ => by,
                };
                if state.recalled != Some(recalled) {
                    state.recalled = Some(recalled);
                    drop(state);
                    self.changed.notify_waiters();
                    continue;
                }
                let others = state.holders.iter().filter(|(host, _)| **host != by);
                let until = others.filter_map(|(_, holder)| holder.until).max();
                match until.filter(|until| now < *until) {
                    Some(until) => until,
                    None => return Some(state.grants),
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

    /// Begins to forget the hosts whose lease has ended by a recall for this writer; nobody may write yet. Returns who
    /// is remembered then, which the caller makes durable before [`Self::forget`]. It holds [`Self::changing`].
    pub fn forgetting(&self, by: HostTag) -> Option<HostTag> {
        let (now, mut state) = (Instant::now(), self.lock());
        state.holders.retain(|host, holder| *host == by || holder.may_use(now));
        Some(state.remembered()).filter(|holder| *holder != NO_HOST)
    }

    /// The hosts of [`Self::forgetting`] are not remembered any more. They are forgotten durably already.
    pub fn forget(&self) {
        let mut state = self.lock();
        let Some(writer) = state.recalled.take() else { return };
        self.holder.store(state.remembered(), Ordering::SeqCst);
        let now = Instant::now();
        // Else two hosts that read and write in turn would recall each other's lease on and on.
        let again = state.paused.is_some_and(|(_, until)| now < until);
        let excepted = if again { NO_HOST } else { writer };
        state.paused = Some((excepted, now + RECALL_PAUSE));
        drop(state);
        self.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use super::*;

    fn asks(lease: &Lease, host: HostTag, number: u64) -> LeaseAnswer {
        match lease.decide(host, false, number) {
            LeaseDecision::Answer(answer) => answer,
            LeaseDecision::MayBeGranted => lease.grant(host, number),
        }
    }

    /// How many times the write waited for another host, which gives the lease back at once.
    async fn write(lease: &Lease, host: HostTag, number: u64) -> u32 {
        let mut waits = 0;
        for other in (1..4).filter(|other| *other != host) {
            lease.give_back(other, number);
        }
        while let Some(grant) = lease.recall(host).await {
            assert!(lease.is_recalled(grant));
            lease.forgetting(host);
            lease.forget();
            waits += 1;
        }
        assert!(lease.allows(host));
        waits
    }

    #[tokio::test(start_paused = true)]
    async fn several_readers_hold_it_until_somebody_writes() {
        let (lease, begun) = (Lease::default(), Instant::now());
        assert_eq!(asks(&lease, 1, 1), LeaseAnswer::Granted);
        assert_eq!(asks(&lease, 2, 1), LeaseAnswer::Granted, "nobody writes");
        assert_eq!(lease.keep(1, 2).await, LeaseAnswer::Still);
        assert_eq!(lease.keep(2, 2).await, LeaseAnswer::Still);
        assert!(!lease.allows(1) && !lease.allows(2) && !lease.allows(NO_HOST));
        // The third one has not heard of its grant, and does not answer.
        assert_eq!(asks(&lease, 3, 1), LeaseAnswer::Granted);
        lease.give_back(2, 3);
        let asked = Instant::now();
        assert_eq!(write(&lease, 1, 0).await, 1);
        assert_eq!(asked.elapsed(), LEASE_MAX, "the third one's time had to end");
        assert_eq!(asks(&lease, 2, 4), LeaseAnswer::Refused, "{:?}", begun.elapsed());
        assert_eq!(lease.keep(1, 3).await, LeaseAnswer::Still, "only it has written");
    }

    #[tokio::test(start_paused = true)]
    async fn a_host_that_writes_again_and_again_does_not_share_it() {
        let (lease, mut waits) = (Lease::default(), 0);
        assert_eq!(asks(&lease, 1, 1), LeaseAnswer::Granted);
        for number in 2..22 {
            waits += write(&lease, 1, 0).await;
            assert_eq!(lease.keep(1, number).await, LeaseAnswer::Still);
            assert_eq!(asks(&lease, 2, number), LeaseAnswer::Refused);
        }
        assert_eq!(waits, 0);
        for number in 22..24 {
            assert_eq!(lease.keep(1, number).await, LeaseAnswer::Still);
        }
        assert_eq!(asks(&lease, 2, 24), LeaseAnswer::Granted, "it has not written for a while");
    }

    #[tokio::test(start_paused = true)]
    async fn two_holders_that_write_at_once_wait_for_each_other() {
        let lease = Lease::default();
        for host in [1, 2] {
            assert_eq!(asks(&lease, host, 1), LeaseAnswer::Granted);
        }
        let mut keeps = Box::pin(lease.keep(1, 2));
        let pending = |future: std::pin::Pin<&mut dyn Future<Output = Option<u64>>>| {
            future.poll(&mut Context::from_waker(Waker::noop())).is_pending()
        };
        let (mut first, mut second) = (Box::pin(lease.recall(1)), Box::pin(lease.recall(2)));
        assert!(pending(first.as_mut()));
        assert!(keeps.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert!(pending(second.as_mut()));
        assert_eq!(keeps.await, LeaseAnswer::Recalled, "the other one wants to write too");
        lease.give_back(2, 2);
        let grant = first.await.expect("it ended");
        assert!(lease.is_recalled(grant));
        assert_eq!(lease.forgetting(1), Some(1));
        lease.forget();
        assert!(lease.allows(1) && !lease.allows(2), "the first one may still read from memory");
        lease.give_back(1, 3);
        let grant = second.await.expect("it ended");
        assert!(lease.is_recalled(grant));
        assert_eq!(lease.forgetting(2), None);
        lease.forget();
        assert!(lease.allows(2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_home_that_was_started_again_waits_for_hosts_that_it_can_not_name() {
        let (lease, begun) = (Lease::remembered(Some(SEVERAL)), Instant::now());
        assert!(!lease.allows(SEVERAL) && !lease.allows(1));
        assert!(matches!(lease.decide(1, true, 5), LeaseDecision::MayBeGranted), "it begins anew");
        assert_eq!(write(&lease, 1, 5).await, 1);
        assert_eq!(begun.elapsed(), LEASE_MAX);
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
