//! How a client's session on an attached volume handles requests.
//!
//! Writes and flushes are sent to the volume's home, and are answered when the home has answered. Reads are answered
//! from memory, or from layers of this host's pool that the volume stands on, if [`crate::coherent`] allows it. Blocks
//! that will probably be read next are fetched ahead ([`perigee_model::read_ahead`]).

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use futures_util::future::{BoxFuture, try_join_all};
use perigee_block::device::{Device, Extent, IoError, Zeroing};
use perigee_block::lease::{LeaseAnswer, LeaseAsk, LeaseRequest, RENEW_AFTER};
use perigee_block::locking;
use perigee_block::sessions::ProxyKey;
use perigee_block::stats::Counters;
use perigee_model::Incarnation;
use perigee_model::read_ahead::{KEPT_READ_BYTES_MAX, Pace, Streams, blocks_of, pieces};
use perigee_model::volume::BLOCK_BYTES;
use perigee_nbd::NbdDevice;
use perigee_store::SharedLayers;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::coherent::{CachedVolume, Plan, Transfer};
use crate::proxies::ProxySlot;
use crate::shared_layers::at_most;

/// How often a read waits for the fetches of others before it asks the home itself.
const WAITS_MAX: u32 = 16;
/// A read becomes no more requests to the home than this.
const READ_RUNS_MAX: usize = 64;
/// As [`READ_RUNS_MAX`], of a piece that is read ahead.
const PIECE_RUNS_MAX: usize = 4;
/// A layer of this host's pool whose disk does not answer a read for this long is not read any more.
const HERE_MAX: Duration = Duration::from_secs(10);
/// The pause before a refused lease is requested again.
const REFUSED_PAUSE: Duration = Duration::from_secs(2);
/// How long this host tries to tell the home that it gives the lease back. After that the home waits until the
/// lease is over.
const GIVE_BACK_MAX: Duration = Duration::from_secs(5);

/// One client's session on an attached volume, with connections of its own to the volume's home.
pub struct ProxySession {
    pub export: String,
    /// The home's address.
    pub nbd_addr: String,
    pub upstream: Arc<NbdDevice>,
    /// Identifies the session to the home.
    pub key: Arc<ProxyKey>,
    pub slot: Arc<ProxySlot>,
    requests: Arc<Requests>,
    ended: CancellationToken,
    _ended: DropGuard,
}

impl ProxySession {
    /// `cached` is shared by all sessions on the volume. `None` if the home does not identify the volume.
    pub fn new(
        export: &str,
        nbd_addr: String,
        upstream: NbdDevice,
        (key, slot): (Arc<ProxyKey>, Arc<ProxySlot>),
        cached: Option<Arc<CachedVolume>>,
        counters: Arc<Counters>,
    ) -> Self {
        let upstream = Arc::new(upstream);
        let requests = Arc::new(Requests::new(upstream.clone(), cached.clone(), counters));
        let ended = CancellationToken::new();
        if let Some(cached) = cached {
            let holding = hold_lease(upstream.clone(), cached, ended.clone());
            // The home closes the older of two connections with one number, so the number stays in use until the
            // last request was sent.
            let number = slot.clone();
            tokio::spawn(async move {
                holding.await;
                drop(number);
            });
        }
        let _ended = ended.clone().drop_guard();
        Self { export: export.to_owned(), nbd_addr, upstream, key, slot, requests, ended, _ended }
    }

    /// Whether its home has its data confined since it was opened, so that it has to be opened again there.
    pub fn is_to_be_opened_again(&self) -> bool {
        let moves = self.upstream.moves();
        let to = moves.borrow();
        to.as_deref() == Some(self.nbd_addr.as_str())
    }

    /// Runs a task until the session ends.
    pub fn run_while_open(&self, task: impl Future<Output = ()> + Send + 'static) {
        let ended = self.ended.clone();
        tokio::spawn(async move { ended.run_until_cancelled(task).await });
    }

    /// Fails all unanswered requests now. They are then sent to another device.
    pub fn recall(&self) {
        self.requests.recalled.store(true, Ordering::SeqCst);
        self.upstream.recall();
    }
}

/// Sends requests to a home, and keeps and uses blocks in memory.
pub struct Requests {
    upstream: Arc<dyn Device>,
    cached: Option<Arc<CachedVolume>>,
    counters: Arc<Counters>,
    ahead: Mutex<(Streams, Pace)>,
    /// The number of bytes that reads have fetched.
    came_bytes: AtomicU64,
    recalled: AtomicBool,
}

impl Requests {
    /// Requests to a home over this device, with what is in memory of the volume, if blocks of it may be kept.
    pub fn new(
        upstream: Arc<dyn Device>,
        cached: Option<Arc<CachedVolume>>,
        counters: Arc<Counters>,
    ) -> Self {
        let (ahead, came_bytes, recalled) = Default::default();
        Self { upstream, cached, counters, ahead, came_bytes, recalled }
    }

    fn ahead(&self) -> MutexGuard<'_, (Streams, Pace)> {
        locking::lock(&self.ahead)
    }

    fn try_read(self: &Arc<Self>, offset: u64, buffer: &mut [u8]) -> bool {
        let Some(cached) = &self.cached else { return false };
        let length_bytes = buffer.len() as u64;
        if cached.read(offset, buffer) {
            self.look_ahead(cached, offset, length_bytes);
            return true;
        }
        let common = cached.common().filter(|common| common.has(&blocks_of(offset, length_bytes)));
        let found = common.and_then(|common| common.device().try_read(offset, buffer));
        if !matches!(found, Some(Ok(()))) {
            return false;
        }
        self.counters.read_from_replica();
        self.look_ahead(cached, offset, length_bytes);
        true
    }

    /// Reads from memory, from a layer that is here too, or from the home.
    ///
    /// # Errors
    /// The home's.
    pub async fn read(self: &Arc<Self>, offset: u64, length_bytes: u32) -> Result<Bytes, IoError> {
        let Some(cached) = &self.cached else {
            return self.upstream.read(offset, length_bytes).await;
        };
        match cached.common() {
            Some(common) => self.read_mixed(cached, &common, offset, length_bytes).await,
            None => self.read_there(cached, offset, length_bytes, true).await,
        }
    }

    /// Reads each part of a request where it is.
    async fn read_mixed(
        self: &Arc<Self>,
        cached: &Arc<CachedVolume>,
        common: &Arc<SharedLayers>,
        offset: u64,
        length_bytes: u32,
    ) -> Result<Bytes, IoError> {
        self.look_ahead(cached, offset, length_bytes.into());
        let end = offset + u64::from(length_bytes);
        let runs = common.runs(&blocks_of(offset, length_bytes.into()));
        let runs = at_most(READ_RUNS_MAX, runs);
        if runs.iter().all(|(_, is_here)| *is_here) {
            self.counters.read_from_replica();
        }
        let parts = runs.into_iter().map(|(run, is_here)| {
            let start = offset.max(run.start * BLOCK_BYTES);
            let length = end.min(run.end * BLOCK_BYTES) - start;
            (start, u32::try_from(length).unwrap_or(u32::MAX), is_here)
        });
        let mut read = try_join_all(parts.map(async |(start, length_bytes, is_here)| {
            if is_here {
                match read_here(common, start, length_bytes).await {
                    Ok(data) => return Ok(data),
                    Err(error) => cached.forget_common(common, &error),
                }
            }
            self.read_there(cached, start, length_bytes, false).await
        }))
        .await?;
        if let [_] = &read[..] {
            return Ok(read.swap_remove(0));
        }
        Ok(read.concat().into())
    }

    /// Reads from memory or from the home. `is_new`: the request was not noted for reading ahead.
    async fn read_there(
        self: &Arc<Self>,
        cached: &Arc<CachedVolume>,
        offset: u64,
        length_bytes: u32,
        is_new: bool,
    ) -> Result<Bytes, IoError> {
        match length_bytes <= KEPT_READ_BYTES_MAX {
            true => self.read_kept(cached, offset, length_bytes, !is_new).await,
            false => self.upstream.read(offset, length_bytes).await,
        }
    }

    async fn read_kept(
        self: &Arc<Self>,
        cached: &Arc<CachedVolume>,
        offset: u64,
        length_bytes: u32,
        mut noted: bool,
    ) -> Result<Bytes, IoError> {
        let blocks = blocks_of(offset, length_bytes.into());
        let mut buffer = BytesMut::zeroed(length_bytes as usize);
        for _ in 0..WAITS_MAX {
            if cached.read(offset, &mut buffer) {
                return Ok(buffer.freeze());
            }
            let plan = cached.plan(&blocks);
            if !noted && !matches!(plan, Some(Plan::Direct)) {
                noted = true;
                self.look_ahead(cached, offset, length_bytes.into());
            }
            match plan {
                Some(Plan::Direct) => break,
                Some(Plan::Wait(filled)) => filled.await,
                Some(Plan::Fetch(transfer)) => {
                    let (begins, data) = self.fetch(transfer).await?;
                    let end = offset + u64::from(length_bytes);
                    if begins <= offset && end <= begins + data.len() as u64 {
                        let from = usize::try_from(offset - begins).unwrap_or(usize::MAX);
                        return Ok(data.slice(from..from + length_bytes as usize));
                    }
                }
                None => {}
            }
        }
        self.upstream.read(offset, length_bytes).await
    }

    /// Returns the offset of the first byte, and the bytes.
    async fn fetch(&self, transfer: Transfer) -> Result<(u64, Bytes), IoError> {
        let begins = transfer.blocks.start * BLOCK_BYTES;
        let end = (transfer.blocks.end * BLOCK_BYTES).min(self.upstream.size_bytes());
        let length_bytes = u32::try_from(end - begins).unwrap_or(u32::MAX);
        let (asked, before) = (Instant::now(), self.came_bytes.load(Ordering::Relaxed));
        match self.upstream.read(begins, length_bytes).await {
            Ok(data) => {
                let came = u64::from(length_bytes);
                let came = self.came_bytes.fetch_add(came, Ordering::Relaxed) + came - before;
                self.ahead().1.note(came, asked.elapsed());
                transfer.done(begins, &data);
                Ok((begins, data))
            }
            Err(error) => {
                transfer.failed();
                Err(error)
            }
        }
    }

    /// Fetches blocks that will probably be read next.
    fn look_ahead(self: &Arc<Self>, cached: &Arc<CachedVolume>, offset: u64, length_bytes: u64) {
        let ranges = {
            let mut ahead = self.ahead();
            let pipe_bytes = ahead.1.pipe_bytes(self.upstream.round_trip());
            ahead.0.note(offset, length_bytes, pipe_bytes)
        };
        let end = self.upstream.size_bytes().div_ceil(BLOCK_BYTES);
        let common = cached.common().filter(|_| !ranges.is_empty());
        for piece in ranges.iter().flat_map(pieces).filter(|piece| piece.start < end) {
            let piece = piece.start..piece.end.min(end);
            let Some(common) = &common else {
                self.fetch_ahead(cached, &piece);
                continue;
            };
            let runs = at_most(PIECE_RUNS_MAX, common.runs(&piece));
            let there = runs.into_iter().filter(|(_, is_here)| !is_here);
            there.for_each(|(run, _)| self.fetch_ahead(cached, &run));
        }
    }

    fn fetch_ahead(self: &Arc<Self>, cached: &Arc<CachedVolume>, piece: &Range<u64>) {
        let count = u32::try_from(piece.end - piece.start).unwrap_or(u32::MAX);
        let Ok(place) = Arc::clone(cached.ahead()).try_acquire_many_owned(count) else { return };
        if let Some(Plan::Fetch(transfer)) = cached.plan(piece) {
            let requests = Arc::clone(self);
            tokio::spawn(async move {
                // A reader that needs these blocks requests them again.
                let _failed = requests.fetch(transfer).await;
                drop(place);
            });
        }
    }

    async fn change(
        &self,
        offset: u64,
        length_bytes: u64,
        data: Option<Bytes>,
        work: impl Future<Output = Result<(), IoError>>,
    ) -> Result<(), IoError> {
        let Some(cached) = &self.cached else { return work.await };
        let transfer = cached.write(offset, length_bytes);
        let done = work.await;
        match &done {
            Ok(()) => match data {
                Some(data) => transfer.done(offset, &data),
                None => transfer.failed(),
            },
            Err(IoError::Unreachable(_)) if !self.recalled.load(Ordering::SeqCst) => drop(transfer),
            Err(_) => transfer.failed(),
        }
        done
    }

    /// Writes at the home, and then keeps what was written. `fua`: it is durable when this returns.
    ///
    /// # Errors
    /// The home's.
    pub async fn write(&self, offset: u64, data: Bytes, fua: bool) -> Result<(), IoError> {
        let work = self.upstream.write(offset, data.clone(), fua);
        self.change(offset, data.len() as u64, Some(data), work).await
    }
}

/// Reads from a layer of this host's pool, whose disk may hang.
async fn read_here(
    common: &SharedLayers,
    offset: u64,
    length_bytes: u32,
) -> Result<Bytes, IoError> {
    let read = common.device().read(offset, length_bytes);
    tokio::time::timeout(HERE_MAX, read).await.unwrap_or_else(|_| {
        let limit_s = HERE_MAX.as_secs();
        Err(IoError::Unreachable(format!("its disk has not answered for {limit_s} s")))
    })
}

/// Keeps the lease until the session has ended. This host's last session on the volume gives it back. Otherwise the
/// next writer at another host would wait until the lease is over.
pub fn hold_lease(
    upstream: Arc<dyn Device>,
    cached: Arc<CachedVolume>,
    ended: CancellationToken,
) -> impl Future<Output = ()> {
    cached.enter();
    async move {
        ended.run_until_cancelled(keep_lease(&*upstream, &cached)).await;
        ended.cancelled().await;
        if let Some(number) = cached.leave() {
            let ask = LeaseAsk { request: LeaseRequest::GiveBack, number };
            // If the connection is lost and the client has gone, this fails at once.
            let _too_late = tokio::time::timeout(GIVE_BACK_MAX, upstream.lease(ask)).await;
        }
    }
}

/// Requests the lease as long as somebody reads. Only one of a volume's sessions requests it at a time.
async fn keep_lease(upstream: &dyn Device, cached: &CachedVolume) {
    let _turn = cached.asking.lock().await;
    cached.wanted.notify_one();
    loop {
        let keeps = cached.is_held();
        if !keeps {
            cached.wanted.notified().await;
        }
        let request = if keeps { LeaseRequest::Keep } else { LeaseRequest::Hold };
        let ask = LeaseAsk { request, number: cached.number() };
        let asked = tokio::time::Instant::now();
        match upstream.lease(ask).await {
            Ok(LeaseAnswer::Granted) => cached.granted(asked, false),
            Ok(LeaseAnswer::Still) => {
                cached.granted(asked, true);
                if keeps && !cached.take_used() {
                    give_back(upstream, cached, false).await;
                }
            }
            Ok(LeaseAnswer::Recalled) => give_back(upstream, cached, true).await,
            Ok(LeaseAnswer::Refused) => tokio::time::sleep(REFUSED_PAUSE).await,
            // The home does not know leases.
            Err(IoError::Invalid(_)) => return,
            Err(_) => tokio::time::sleep(RENEW_AFTER).await,
        }
    }
}

async fn give_back(upstream: &dyn Device, cached: &CachedVolume, recalled: bool) {
    cached.ended(recalled);
    let ask = LeaseAsk { request: LeaseRequest::GiveBack, number: cached.number() };
    // Otherwise the home waits until the lease is over.
    let _unheard = upstream.lease(ask).await;
}

impl Device for ProxySession {
    fn size_bytes(&self) -> u64 {
        self.upstream.size_bytes()
    }

    fn incarnation(&self) -> Option<Incarnation> {
        self.upstream.incarnation()
    }

    fn try_read(&self, offset: u64, buffer: &mut [u8]) -> Option<Result<(), IoError>> {
        self.requests.try_read(offset, buffer).then_some(Ok(()))
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(self.requests.read(offset, length_bytes))
    }

    fn write(&self, offset: u64, data: Bytes, fua: bool) -> BoxFuture<'_, Result<(), IoError>> {
        Box::pin(self.requests.write(offset, data, fua))
    }

    fn zero(
        &self,
        offset: u64,
        length_bytes: u64,
        how: Zeroing,
        fua: bool,
    ) -> BoxFuture<'_, Result<(), IoError>> {
        let work = self.upstream.zero(offset, length_bytes, how, fua);
        Box::pin(self.requests.change(offset, length_bytes, None, work))
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        self.upstream.flush()
    }

    fn extents(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        self.upstream.extents(offset, length_bytes)
    }

    fn hang_up(&self) {
        self.upstream.hang_up();
    }
}
