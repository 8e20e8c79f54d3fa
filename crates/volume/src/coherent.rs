//! Decides which blocks of a proxied volume may be kept in memory, and when they may be read. These rules keep
//! readers from seeing old data:
//!
//! 1. Blocks are kept, and read from memory, only while this host holds the lease from the volume's home
//!    ([`perigee_block::lease`]). Writes of all others wait until the lease ends. So this host never misses
//!    another host's write.
//! 2. A write of this host removes its blocks before it is sent. While it is in flight, these blocks are neither
//!    kept nor read from memory. The result of a read is kept only if no write of this host overlapped it. The
//!    data of a write is kept when the home has acknowledged it, if no other write overlapped it, because the
//!    order of two concurrent writes is not known.
//! 3. When the home says that others may have written, all blocks are dropped: the volume gets a new [`Content`],
//!    and the results of earlier reads are not kept.
//! 4. A write whose result is not known may still reach the home. Nothing is kept until that is no longer
//!    possible ([`DISTRUST`]).
//! 5. Blocks that the volume has in common with layers of this host's pool ([`SharedLayers`]) are read from there under the
//!    same rules: only with the lease, and not after others may have written. Before this host sends a write, the
//!    blocks of the write stop being common, also while the home is asked ([`CachedVolume::learn`]).
//!
//! All sessions of this host on a volume share one [`CachedVolume`].

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use perigee_block::device::IoError;
use perigee_block::lease::LEASE_USE_MAX;
use perigee_block::locking::lock;
use perigee_model::LayerId;
use perigee_model::read_ahead::{REMOVED_BLOCKS_MAX, blocks_of};
use perigee_store::{Compared, SharedLayers};
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

use crate::cache::{Content, ReadCache};

/// A closed connection never sends its remaining data for longer than this.
pub const DISTRUST: Duration = Duration::from_secs(30 * 60);

/// What this host has in memory of one volume, and what it knows of the volume's home.
pub struct CachedVolume {
    cache: Arc<ReadCache>,
    state: Mutex<State>,
    /// A read that was in flight has ended.
    filled: Notify,
    /// A session reads without a lease.
    pub wanted: Notify,
    /// Held by the session that asks for the lease.
    pub asking: tokio::sync::Mutex<()>,
    /// Held by the session that asks the home what is common.
    pub learning: tokio::sync::Mutex<()>,
    /// This host has the lease, and does not know what is common.
    pub unlearned: Notify,
}

/// If this host sends more writes than this while it asks what is common, the answer is dropped and it asks again.
const LEARN_WRITES_MAX: usize = 1 << 16;

struct State {
    content: Content,
    /// The lease is held until this time.
    until: Option<Instant>,
    distrusted_until: Option<Instant>,
    /// Whether blocks were read since [`CachedVolume::take_used`] was last called.
    used: bool,
    in_flight: BTreeMap<u64, InFlight>,
    next: u64,
    /// The number of this host's sessions on the volume.
    sessions: u64,
    /// The number of the last request about the lease.
    number: u64,
    /// Valid for this content only.
    common: Option<Arc<SharedLayers>>,
    learning: Option<Learning>,
    /// The home must be asked what is common as soon as this host has the lease.
    unlearned: bool,
    /// Layers of this host's pool that could not be read, since the first of the sessions that are open.
    unreadable: Vec<LayerId>,
    /// The disk of one of them did not answer. It probably has the others too.
    hangs: bool,
}

/// A question to the home what is common, which is not answered yet.
struct Learning {
    number: u64,
    /// What this host has written since it asked, and the writes that were in flight then.
    written: Vec<Range<u64>>,
}

struct InFlight {
    blocks: Range<u64>,
    content: Content,
    writes: bool,
    /// A write overlapped it, so its data is not kept.
    overlapped: bool,
}

/// Returns a number that no other content has had.
fn new_content() -> Content {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// What to do for blocks that are not all in memory.
pub enum Plan<'a> {
    /// Ask the home, and keep nothing.
    Direct,
    /// Another session fetches them. Wait until it has ended.
    Wait(tokio::sync::futures::Notified<'a>),
    /// Ask the home for the transfer's blocks.
    Fetch(Transfer),
}

/// A read or a write on its way to the home.
pub struct Transfer {
    volume: Arc<CachedVolume>,
    number: u64,
    pub blocks: Range<u64>,
    writes: bool,
    ended: bool,
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

impl State {
    fn usable(&self) -> bool {
        let now = Instant::now();
        let trusted = self.distrusted_until.is_none_or(|until| now >= until);
        trusted && self.until.is_some_and(|until| now < until)
    }

    fn note_write(&mut self, blocks: &Range<u64>) {
        if let Some(common) = &self.common {
            common.note_write(blocks);
        }
        if let Some(learning) = &mut self.learning {
            learning.written.push(blocks.clone());
        }
        self.learning.take_if(|learning| learning.written.len() > LEARN_WRITES_MAX);
    }

    /// Others may have written.
    fn forget_all(&mut self) {
        self.content = new_content();
        self.forget_common();
    }

    fn forget_common(&mut self) {
        (self.common, self.learning, self.unlearned) = (None, None, true);
    }

    fn add(&mut self, blocks: Range<u64>, writes: bool, overlapped: bool) -> u64 {
        self.next += 1;
        let content = self.content;
        self.in_flight.insert(self.next, InFlight { blocks, content, writes, overlapped });
        self.next
    }

    fn next_number(&mut self) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let micros = u64::try_from(now.as_micros()).unwrap_or_default();
        self.number = (self.number + 1).max(micros);
        self.number
    }

    fn overlapping(&mut self, blocks: &Range<u64>) -> impl Iterator<Item = &mut InFlight> {
        self.in_flight.values_mut().filter(move |other| overlap(&other.blocks, blocks))
    }
}

impl CachedVolume {
    /// Nothing is known of the volume yet.
    pub fn new(cache: Arc<ReadCache>) -> Self {
        let (until, distrusted_until, used) = Default::default();
        let (in_flight, next, sessions, number, common, learning) = Default::default();
        let (unreadable, hangs) = Default::default();
        let state = State {
            content: new_content(),
            until,
            distrusted_until,
            used,
            in_flight,
            next,
            sessions,
            number,
            common,
            learning,
            unlearned: true,
            unreadable,
            hangs,
        };
        let (filled, wanted, asking, learning, unlearned) = Default::default();
        Self { cache, state: Mutex::new(state), filled, wanted, asking, learning, unlearned }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Counts a session that begins.
    pub fn enter(&self) {
        self.lock().sessions += 1;
    }

    /// Counts a session that has ended. After the last one the lease is not used any more. Then this returns the
    /// number with which the lease is given back. A session that begins in the meantime asks with a higher number,
    /// and its lease stays.
    pub fn leave(&self) -> Option<u64> {
        let mut state = self.lock();
        state.sessions -= 1;
        if state.sessions > 0 {
            return None;
        }
        state.until = None;
        // Files of layers that were deleted meanwhile are not kept open.
        state.forget_common();
        state.unreadable.clear();
        state.hangs = false;
        Some(state.next_number())
    }

    /// Whether this object has to be kept although no session uses it. See [`DISTRUST`].
    pub fn is_distrusted(&self) -> bool {
        self.lock().distrusted_until.is_some_and(|until| Instant::now() < until)
    }

    /// Copies the bytes into `buffer`. Returns false if they are not all in memory, or may not be read from there.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> bool {
        let content = {
            let mut state = self.lock();
            state.used = true;
            state.usable().then_some(state.content)
        };
        match content {
            Some(content) => self.cache.read(content, offset, buffer),
            None => {
                self.wanted.notify_one();
                false
            }
        }
    }

    /// Decides how to read blocks of which some are not in memory. Returns `None` if all of them are in memory.
    pub fn plan(self: &Arc<Self>, blocks: &Range<u64>) -> Option<Plan<'_>> {
        let filled = self.filled.notified();
        let mut state = self.lock();
        if !state.usable() || state.overlapping(blocks).any(|other| other.writes) {
            return Some(Plan::Direct);
        }
        let mut missing = self.cache.missing(state.content, blocks)?;
        let content = state.content;
        for other in state.overlapping(&missing.clone()) {
            let valid = !other.overlapped && other.content == content;
            if valid && other.blocks.contains(&missing.start) {
                return Some(Plan::Wait(filled));
            }
            if valid && other.blocks.start > missing.start {
                missing.end = missing.end.min(other.blocks.start);
            }
        }
        let number = state.add(missing.clone(), false, false);
        let volume = Arc::clone(self);
        let transfer = Transfer { volume, number, blocks: missing, writes: false, ended: false };
        Some(Plan::Fetch(transfer))
    }

    /// Records that a write of this host begins.
    pub fn write(self: &Arc<Self>, offset: u64, length_bytes: u64) -> Transfer {
        let blocks = blocks_of(offset, length_bytes);
        let mut state = self.lock();
        state.note_write(&blocks);
        if blocks.end - blocks.start > REMOVED_BLOCKS_MAX {
            state.content = new_content();
        } else {
            self.cache.remove(state.content, blocks.clone());
        }
        let mut overlapped = false;
        for other in state.overlapping(&blocks) {
            overlapped |= other.writes;
            other.overlapped = true;
        }
        let number = state.add(blocks.clone(), true, overlapped);
        let volume = Arc::clone(self);
        Transfer { volume, number, blocks, writes: true, ended: false }
    }

    /// Records that the home has granted the lease that was requested at `asked`. `still` is true if nobody else
    /// has written since this host held the lease before.
    pub fn granted(&self, asked: Instant, still: bool) {
        let mut state = self.lock();
        if !still {
            state.forget_all();
        }
        state.until = Some(asked + LEASE_USE_MAX);
        if state.unlearned {
            self.unlearned.notify_one();
        }
    }

    /// Begins to ask the home what is common. Returns the question's number, and the layer that is known to be
    /// common now. `None` without a lease, and when nothing can be read here.
    pub fn learn(&self) -> Option<(u64, Option<LayerId>)> {
        let mut state = self.lock();
        if !state.usable() || state.hangs {
            return None;
        }
        state.next += 1;
        state.unlearned = false;
        let number = state.next;
        let written = state.in_flight.values().filter(|one| one.writes);
        let written = written.map(|one| one.blocks.clone()).collect();
        state.learning = Some(Learning { number, written });
        Some((number, state.common.as_ref().map(|common| common.layer())))
    }

    /// Layers that are not to be chosen when the home tells what is common.
    pub fn unreadable(&self) -> Vec<LayerId> {
        self.lock().unreadable.clone()
    }

    /// Records the home's answer. It is not used if others may have written since the question. Returns whether it is
    /// used.
    pub fn learned(&self, number: u64, told: Compared) -> bool {
        let mut state = self.lock();
        let Some(asked) = state.learning.take_if(|asked| asked.number == number) else {
            return false;
        };
        match told {
            Compared::Nothing => state.common = None,
            Compared::Same => {}
            // It was asked before that became known.
            Compared::Other(common)
                if state.hangs || state.unreadable.contains(&common.layer()) =>
            {
                return false;
            }
            Compared::Other(common) => {
                asked.written.iter().for_each(|blocks| common.note_write(blocks));
                state.common = Some(Arc::new(common));
            }
        }
        true
    }

    /// What may be read from the layers of this host's pool now.
    pub fn common(&self) -> Option<Arc<SharedLayers>> {
        let state = self.lock();
        state.common.as_ref().filter(|_| state.usable()).map(Arc::clone)
    }

    /// Stops reading from the layer of this host's pool, because that failed. It is not chosen again as long as this
    /// host has sessions on the volume. If its disk does not answer, no other one is chosen either: with each of them
    /// reads would wait once more.
    pub fn forget_common(&self, failed: &Arc<SharedLayers>, error: &IoError) {
        let (mut state, layer) = (self.lock(), failed.layer());
        state.hangs |= matches!(error, IoError::Unreachable(_));
        state.common.take_if(|common| Arc::ptr_eq(common, failed));
        if !state.unreadable.contains(&layer) {
            state.unreadable.push(layer);
            tracing::warn!(%layer, %error, "can't read a layer here: its blocks are read from the volume's home");
        }
    }

    /// Records that the lease is not used any more. `recalled` is true if somebody else is about to write.
    pub fn ended(&self, recalled: bool) {
        let mut state = self.lock();
        state.until = None;
        if recalled {
            state.forget_all();
        }
    }

    /// One permit for each block that may be fetched ahead at the same time.
    pub fn ahead(&self) -> &Arc<Semaphore> {
        &self.cache.ahead
    }

    /// The number of the next request about the lease. It always grows, also over a restart.
    pub fn number(&self) -> u64 {
        self.lock().next_number()
    }

    /// Whether this host has the lease now.
    pub fn is_held(&self) -> bool {
        let state = self.lock();
        state.until.is_some_and(|until| Instant::now() < until)
    }

    /// Whether blocks were read since this was last called.
    pub fn take_used(&self) -> bool {
        std::mem::take(&mut self.lock().used)
    }
}

impl Transfer {
    /// Ends the transfer after the home's answer. The volume has these bytes at this offset.
    pub fn done(mut self, offset: u64, data: &[u8]) {
        self.end(Some((offset, data)));
    }

    /// Ends a transfer that failed, or that had no data. The home does nothing more for it.
    pub fn failed(mut self) {
        self.end(None);
    }

    fn end(&mut self, data: Option<(u64, &[u8])>) {
        self.ended = true;
        let mut state = self.volume.lock();
        let Some(ended) = state.in_flight.remove(&self.number) else { return };
        let kept = !ended.overlapped && ended.content == state.content && state.usable();
        if let Some((offset, data)) = data
            && kept
        {
            self.volume.cache.insert(ended.content, offset, data);
        }
        drop(state);
        self.volume.filled.notify_waiters();
    }
}

/// The request was dropped, so its result is not known.
impl Drop for Transfer {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        if self.writes {
            self.volume.lock().distrusted_until = Some(Instant::now() + DISTRUST);
        }
        self.end(None);
    }
}

#[cfg(test)]
mod tests;
