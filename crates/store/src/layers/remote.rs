//! A read-only export of another host, from which this pool's layers get what they don't have. Several hosts may have
//! the same layer: if one of them is gone, another one takes its place.

use std::future::Future;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::{StreamExt, TryStreamExt, stream};
use perigee_block::device::{Device, Extent, IoError};
use perigee_block::exports::{CHECKSUMS_SUFFIX, LAYER_PREFIX, VISIBLE_CHECKSUMS_SUFFIX};
use perigee_block::locking::lock;
use perigee_block::trace::{self, Stage};
use perigee_model::volume::BLOCK_BYTES;
use perigee_model::{Problem, ProblemKind};
use tokio::sync::{OnceCell, watch};

use crate::catalog::RemoteRow;
use crate::disk::blocks::join;
use crate::disk::blocks::{BlockState, BlockStates, blocks_of, index, overlap};

/// The pause before the next attempt to reach a host that does not answer.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// A host that is reached may need this long for an answer: longer than it waits for another host in its turn.
pub(crate) const ANSWER_MAX: Duration = Duration::from_secs(180);

/// The extents of any disk are multiples of this.
const SECTOR_BYTES: u64 = 512;

/// A layer's map is asked for in parts of this much of the layer; an answer of our server covers one.
const MAP_PART_BYTES: u64 = 1 << 30;
const MAP_PARTS_AT_ONCE: usize = 64;

type Connect =
    dyn Fn(String, String) -> BoxFuture<'static, Result<Arc<dyn Device>, Problem>> + Send + Sync;

/// The pool's means to reach other hosts.
#[derive(Clone)]
pub struct Connector {
    /// How long a read waits for a host that does not answer.
    pub patience: Duration,
    /// Opens an export, given `HOST:PORT` and its name. The problem is [`perigee_model::ProblemKind::NotFound`] if the other
    /// host answers that it has no such export.
    pub connect: Arc<Connect>,
}

/// The connection is made when a read first needs it, so a volume can be opened while the other host does
/// not answer.
pub(crate) struct RemoteParent {
    /// The export, and where it was at first. [`Self::source`] says where it is now.
    row: RemoteRow,
    connector: Connector,
    source: watch::Sender<Arc<Source>>,
}

/// Where the export is, and the connection to it.
struct Source {
    nbd_addr: String,
    export: String,
    /// The connection, and the name by which the export was opened.
    device: OnceCell<(Arc<dyn Device>, String)>,
    /// The reason why the last attempt to connect failed.
    failed: Mutex<String>,
}

/// Another host's checksums of a layer.
pub(crate) enum Checksums {
    /// Of what the layer itself has.
    Own(Arc<dyn Device>),
    /// Of all that the layer shows.
    Visible(Arc<dyn Device>),
}

impl Source {
    fn of(row: &RemoteRow, device: Option<Arc<dyn Device>>) -> Arc<Self> {
        let RemoteRow { nbd_addr, export, .. } = row.clone();
        let device = device.map(|device| (device, export.clone()));
        let (device, failed) = (OnceCell::new_with(device), Mutex::default());
        Arc::new(Self { nbd_addr, export, device, failed })
    }
}

impl RemoteParent {
    pub(crate) fn new(row: RemoteRow, connector: &Connector) -> Self {
        let source = watch::Sender::new(Source::of(&row, None));
        Self { row, connector: connector.clone(), source }
    }

    /// As [`Self::new`], with a connection that is open already.
    pub(crate) fn connected(
        row: RemoteRow,
        connector: &Connector,
        device: Arc<dyn Device>,
    ) -> Result<Self, String> {
        let new = Self::new(row, connector);
        match new.difference(&*device) {
            None => {
                new.source.send_replace(Source::of(&new.row, Some(device)));
                Ok(new)
            }
            Some(difference) => Err(difference),
        }
    }

    /// Goes on from another host's export of the same layer. Requests that wait for the present one are sent to
    /// the new one.
    pub(crate) fn change_source(&self, row: &RemoteRow) {
        let source = self.source();
        if (&source.nbd_addr, &source.export) != (&row.nbd_addr, &row.export) {
            self.source.send_replace(Source::of(row, None));
        }
    }

    fn source(&self) -> Arc<Source> {
        Arc::clone(&self.source.borrow())
    }

    /// The address from which it gets what this pool lacks.
    pub(crate) fn nbd_addr(&self) -> String {
        self.source().nbd_addr.clone()
    }

    /// Whether the export has one layer's own blocks only.
    pub(crate) fn is_own(&self) -> bool {
        self.row.own
    }

    /// Whether an extent of the export has bytes of its layer.
    pub(crate) fn has_bytes(&self, extent: &Extent) -> bool {
        // A layer's own extents are holes where the layer has nothing.
        !extent.zero && (!self.is_own() || !extent.hole)
    }

    /// Whether it is a backup at a target, and no host has it.
    pub(crate) fn is_backup(&self) -> bool {
        self.row.target().is_some()
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.row.size_bytes.div_ceil(BLOCK_BYTES)
    }

    /// Sends a request to the other host, and again if the source changes before it is answered.
    async fn ask<T, F>(&self, request: impl Fn(Arc<dyn Device>) -> F) -> Result<T, IoError>
    where
        F: Future<Output = Result<T, IoError>>,
    {
        let mut sources = self.source.subscribe();
        loop {
            let source = Arc::clone(&sources.borrow_and_update());
            let asked = async {
                let device = self.device(&source).await?;
                let answer = tokio::time::timeout(ANSWER_MAX, request(device));
                answer.await.unwrap_or_else(|_| {
                    let (Source { nbd_addr, export, .. }, max_s) = (&*source, ANSWER_MAX.as_secs());
                    let why = format!("{export} at {nbd_addr} did not answer in {max_s} s");
                    Err(IoError::Unreachable(why))
                })
            };
            tokio::select! {
                biased;
                answer = asked => {
                    if answer.is_ok() || !sources.has_changed().unwrap_or(false) {
                        return answer;
                    }
                }
                _ = sources.changed() => {}
            }
        }
    }

    async fn device(&self, source: &Source) -> Result<Arc<dyn Device>, IoError> {
        let connected = source.device.get_or_init(|| self.connect(source));
        let patience = self.connector.patience;
        let connected = tokio::time::timeout(patience, connected).await;
        connected.map(|(device, _)| Arc::clone(device)).map_err(|_| {
            let Source { nbd_addr, export, failed, .. } = source;
            let why = lock(failed);
            IoError::Unreachable(format!("{export} at {nbd_addr}: {why}"))
        })
    }

    /// Tries to connect until it succeeds. Each request that waits for this has its own deadline.
    async fn connect(&self, source: &Source) -> (Arc<dyn Device>, String) {
        loop {
            let mut reasons = Vec::new();
            for name in self.names(source) {
                match (self.connector.connect)(source.nbd_addr.clone(), name.clone()).await {
                    Ok(device) => match self.difference(&*device) {
                        None => return (device, name),
                        Some(difference) => reasons.push(difference),
                    },
                    Err(error) => reasons.push(error.to_string()),
                }
            }
            *lock(&source.failed) = reasons.join("; ");
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    /// By which names the export may be known, the best first. Another image may get the name of this one, and a host gives
    /// images to the others of its cluster by their layers only; an access list may know only the name.
    fn names(&self, source: &Source) -> Vec<String> {
        if let Some((_, name)) = source.device.get() {
            return vec![name.clone()];
        }
        let by_name = source.export.starts_with("image:");
        let layer = self.row.is_layer.filter(|_| by_name);
        let by_layer = layer.map(|layer| format!("{LAYER_PREFIX}{layer}"));
        by_layer.into_iter().chain([source.export.clone()]).collect()
    }

    /// The difference, in words, if an export is not the one that it was before.
    fn difference(&self, device: &dyn Device) -> Option<String> {
        let (was, is) = (self.row.size_bytes, device.size_bytes());
        if was != is {
            return Some(format!("it now has {is} bytes, not {was}"));
        }
        match (self.row.is_layer, device.layer()) {
            (Some(was), Some(is)) if was == is => None,
            (Some(was), Some(is)) => Some(format!("it is now layer {is}, not {was}")),
            (Some(was), None) => Some(format!("it does not say that it is layer {was}")),
            (None, _) => None,
        }
    }

    /// The other host's checksums of the layer. Where it has none of all that the layer shows, it computes them. `None` if the
    /// layer is not there any more, or has no data of its own.
    ///
    /// # Errors
    /// It is not known: the other host does not answer, or can't open them.
    pub(crate) async fn checksums(&self) -> Result<Option<Checksums>, IoError> {
        if self.row.is_layer.is_none() {
            return Ok(None);
        }
        let source = self.source();
        if let Some(device) = self.checksums_at(&source, CHECKSUMS_SUFFIX).await? {
            return Ok(Some(Checksums::Own(device)));
        }
        if self.is_own() {
            return Ok(None);
        }
        let shown = self.checksums_at(&source, VISIBLE_CHECKSUMS_SUFFIX).await?;
        Ok(shown.map(Checksums::Visible))
    }

    async fn checksums_at(
        &self,
        source: &Source,
        suffix: &str,
    ) -> Result<Option<Arc<dyn Device>>, IoError> {
        let nbd_addr = &source.nbd_addr;
        let mut answer = Ok(None);
        for name in self.names(source) {
            let export = format!("{name}{suffix}");
            let connected = (self.connector.connect)(nbd_addr.clone(), export.clone());
            let Ok(connected) = tokio::time::timeout(ANSWER_MAX, connected).await else {
                let max_s = ANSWER_MAX.as_secs();
                let why = format!("{export} at {nbd_addr} did not answer in {max_s} s");
                return Err(IoError::Unreachable(why));
            };
            match connected {
                Ok(device) => return Ok(Some(device)),
                Err(problem) if problem.kind == ProblemKind::NotFound => {}
                Err(problem) => {
                    let why = format!("the checksums of {name} at {nbd_addr}: {problem}");
                    answer = Err(IoError::Unreachable(why));
                }
            }
        }
        answer
    }

    /// Which blocks the export's layer has, and which of them are zeros there; the others are remote here. Several
    /// parts are asked for at once, so this takes few round trips.
    pub(crate) async fn own_states(&self) -> Result<BlockStates, IoError> {
        let size_bytes = self.row.size_bytes;
        let states = BlockStates::new(size_bytes / BLOCK_BYTES);
        let parts = (0..size_bytes).step_by(index(MAP_PART_BYTES));
        let asked = parts.map(|start| async move {
            let part = start..(start + MAP_PART_BYTES).min(size_bytes);
            self.extents(&part).await.map(|extents| (start, extents))
        });
        let mut answers = std::pin::pin!(stream::iter(asked).buffer_unordered(MAP_PARTS_AT_ONCE));
        while let Some((mut at, extents)) = answers.try_next().await? {
            for extent in extents {
                let end = at + extent.length_bytes;
                let blocks = at / BLOCK_BYTES..end / BLOCK_BYTES;
                if self.has_bytes(&extent) {
                    states.set(blocks, BlockState::Remote);
                } else if extent.zero {
                    states.set(blocks, BlockState::Zero);
                }
                at = end;
            }
        }
        Ok(states)
    }

    /// The sum of what `missing` says of each part of the export that holds data. Several parts are asked for at once.
    pub(crate) async fn data_bytes(
        &self,
        missing: impl Fn(&Range<u64>) -> u64,
    ) -> Result<u64, IoError> {
        let size_bytes = self.row.size_bytes;
        let parts = (0..size_bytes).step_by(index(MAP_PART_BYTES));
        let asked = parts.map(|start| async move {
            let part = start..(start + MAP_PART_BYTES).min(size_bytes);
            self.extents(&part).await.map(|extents| (start, extents))
        });
        let mut answers = std::pin::pin!(stream::iter(asked).buffer_unordered(MAP_PARTS_AT_ONCE));
        let mut data_bytes = 0;
        while let Some((mut at, extents)) = answers.try_next().await? {
            for extent in extents {
                if self.has_bytes(&extent) {
                    data_bytes += missing(&blocks_of(at, extent.length_bytes));
                }
                at += extent.length_bytes;
            }
        }
        Ok(data_bytes)
    }

    /// The least time that the other host takes to answer, as far as is known.
    pub(crate) fn round_trip(&self) -> Duration {
        self.source().device.get().map_or(Duration::ZERO, |(device, _)| device.round_trip())
    }

    /// The ranges that the other side hands out together with this byte, if it is connected and says so.
    pub(crate) fn beside(&self, offset: u64) -> Vec<Range<u64>> {
        self.source().device.get().map_or_else(Vec::new, |(device, _)| device.beside(offset))
    }

    /// Reads a range. The part beyond the export's end is zeros.
    pub(crate) async fn read(&self, span: &Range<u64>) -> Result<Bytes, IoError> {
        let span = overlap(span, &(0..self.row.size_bytes));
        if span.is_empty() {
            return Ok(Bytes::new());
        }
        let _stage = trace::stage(Stage::RemoteRead);
        let length_bytes =
            u32::try_from(span.end - span.start).expect("within a request of 32 bits");
        let start = span.start;
        self.ask(|device| async move { device.read(start, length_bytes).await }).await
    }

    /// The other host's extents for a range; neighbours differ, and each ends where a block does, or the range. It is
    /// asked repeatedly until they cover the range.
    ///
    /// # Errors
    /// The other host does not answer, or what it tells of is smaller than it can be.
    pub(crate) async fn extents(&self, span: &Range<u64>) -> Result<Vec<Extent>, IoError> {
        let within = overlap(span, &(0..self.row.size_bytes));
        let mut found = WholeBlocks { at: span.start, open: None, extents: Vec::new() };
        while found.at < within.end {
            let at = found.at;
            let asked = self.ask(|device| async move { device.extents(at, within.end - at).await });
            for extent in asked.await? {
                let length_bytes = extent.length_bytes.min(within.end - found.at);
                found.push(Extent { length_bytes, ..extent });
                // A layer's own blocks are whole. No other disk has less than a sector.
                let (least_bytes, part) = match self.is_own() {
                    true => (BLOCK_BYTES, "a part of a block"),
                    false => (SECTOR_BYTES, "a part of a sector"),
                };
                if !found.at.is_multiple_of(least_bytes) && found.at < within.end {
                    let source = self.source();
                    let (nbd_addr, export) = (&source.nbd_addr, &source.export);
                    let why = format!("{nbd_addr} has {part} in {export}");
                    return Err(std::io::Error::other(why).into());
                }
            }
            if found.at == at {
                let source = self.source();
                let (nbd_addr, export) = (&source.nbd_addr, &source.export);
                let why = format!("{nbd_addr} returned no extents of {export}");
                return Err(std::io::Error::other(why).into());
            }
        }
        if found.at < span.end {
            let length_bytes = span.end - found.at;
            found.push(Extent { length_bytes, hole: true, zero: true });
        }
        Ok(found.finish())
    }
}

/// Extents in whole blocks, from ones that may end within a block: a block is a hole, and zeros, only if all of it is.
/// There is no more than one for each block, so another host can't fill the memory with small ones.
struct WholeBlocks {
    at: u64,
    /// What is known of the block in which `at` is.
    open: Option<Extent>,
    extents: Vec<Extent>,
}

impl WholeBlocks {
    fn push(&mut self, mut extent: Extent) {
        while extent.length_bytes > 0 {
            let begun = self.at % BLOCK_BYTES;
            if begun == 0 && extent.length_bytes >= BLOCK_BYTES {
                let length_bytes = extent.length_bytes - extent.length_bytes % BLOCK_BYTES;
                join(&mut self.extents, Extent { length_bytes, ..extent });
                self.at += length_bytes;
                extent.length_bytes -= length_bytes;
                continue;
            }
            let length_bytes = extent.length_bytes.min(BLOCK_BYTES - begun);
            let open = self.open.get_or_insert(Extent { length_bytes: 0, ..extent });
            open.length_bytes += length_bytes;
            open.hole &= extent.hole;
            open.zero &= extent.zero;
            self.at += length_bytes;
            extent.length_bytes -= length_bytes;
            if self.at.is_multiple_of(BLOCK_BYTES) {
                self.end_block();
            }
        }
    }

    fn end_block(&mut self) {
        if let Some(block) = self.open.take() {
            join(&mut self.extents, block);
        }
    }

    fn finish(mut self) -> Vec<Extent> {
        self.end_block();
        self.extents
    }
}
