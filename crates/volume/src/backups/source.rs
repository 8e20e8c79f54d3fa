//! A backup as the source of a volume whose bytes have not all arrived: a read-only device, which fetches the piece that has a block.
//!
//! A target gives out whole pieces, because only a whole piece can be compared with its checksum. So whoever keeps a block asks for the others of its piece next
//! ([`Device::beside`]), and the last pieces stay in memory for that.
//!
//! | the target | a read |
//! |---|---|
//! | is away, or refuses | waits as long as for another host that is away, and then fails; after a refusal with the credentials of now |
//! | has lost or changed the piece | fails at once, and the piece is asked for again only after a while |
//! | answers, and fails for this piece only | waits as if it was away; then the piece counts as damaged |

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use perigee_block::device::{Device, Extent, IoError, Zeroing};
use perigee_block::locking::lock;
use perigee_model::backup::BackupTarget;
use perigee_model::volume::BLOCK_BYTES;
use perigee_model::{BackupName, LayerId, Problem, ProblemKind};
use perigee_store::{Connector, Work};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::format::{LayerIndex, PlacedRuns, layer_prefix};
use super::plan::Plan;
use super::restore::Reading;
use super::target::Target;

/// So many pieces are in memory, of all backups together, beside those that are being fetched.
const PIECES_MAX: usize = 8;
/// So many pieces are fetched at once, of all backups together.
static FETCHES: Semaphore = Semaphore::const_new(PIECES_MAX);
/// For so long a piece that is damaged is not asked for again.
const DAMAGED_KEPT: Duration = Duration::from_secs(20);
/// The pause before a target that is away is asked again.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// The pieces that were asked for last, the latest at the end.
static PIECES: Mutex<VecDeque<(String, Arc<Slot>)>> = Mutex::new(VecDeque::new());

/// The place of a piece in memory. One reader fetches the piece, and others wait for that.
type Slot = tokio::sync::Mutex<Fetching>;

#[derive(Default)]
struct Fetching {
    kept: Option<Kept>,
    /// Why the piece has not come when it was last asked for.
    failed: String,
}

enum Kept {
    Piece(Arc<ReadPiece>),
    Damaged(Instant, String),
}

/// A piece whose bytes are what was shipped.
struct ReadPiece {
    bytes: Vec<u8>,
    runs: PlacedRuns,
}

/// As `of_hosts`, and the backups at a target too.
pub fn connector(of_hosts: Connector) -> Connector {
    let patience = of_hosts.patience;
    let connect = move |address: String, export: String| match BackupTarget::of_source(&address) {
        None => (of_hosts.connect)(address, export),
        Some(from) => open(from, address, export, patience).boxed(),
    };
    Connector { patience, connect: Arc::new(connect) }
}

type Opening = Shared<BoxFuture<'static, Result<Arc<dyn Device>, Problem>>>;

/// What is being opened, by the address and the backup's name.
static OPENING: Mutex<BTreeMap<(String, String), Opening>> = Mutex::new(BTreeMap::new());

/// Opens a backup. What was begun goes on when its reader has gone: to read what a large backup has takes longer than a reader waits.
async fn open(
    from: BackupTarget,
    address: String,
    backup: String,
    patience: Duration,
) -> Result<Arc<dyn Device>, Problem> {
    let was_sealed = BackupTarget::is_sealed_source(&address);
    let key = (address, backup.clone());
    let begin = || {
        let opening = tokio::spawn(async move {
            let source = BackupSource::open(&from, was_sealed, &backup, patience).await?;
            Ok(Arc::new(source) as Arc<dyn Device>)
        });
        let gone = |error| Err(Problem::internal("can't open a backup", error));
        opening.map(move |opened| opened.unwrap_or_else(gone)).boxed().shared()
    };
    let opening = lock(&OPENING).entry(key.clone()).or_insert_with(begin).clone();
    let opened = opening.await;
    lock(&OPENING).remove(&key);
    opened
}

struct BackupSource(Arc<Source>);

struct Source {
    name: BackupName,
    from: BackupTarget,
    /// The backups there were encrypted when the volume was made.
    was_sealed: bool,
    address: String,
    /// Made anew when it refuses: the credentials of an S3 store may be others by then.
    target: Mutex<Target>,
    plan: Plan,
    patience: Duration,
    round_trip: Duration,
    work: Arc<Work>,
}

impl BackupSource {
    async fn open(
        from: &BackupTarget,
        was_sealed: bool,
        backup: &str,
        patience: Duration,
    ) -> Result<Self, Problem> {
        let what = format!("can't read backup {backup} in {}", from.address);
        // The checksums of a layer have a name of their own, which is that of no backup.
        let name = BackupName::new(backup).map_err(|error| Problem::not_found(&what, error))?;
        let asked = Instant::now();
        let target = Target::open_again(from, was_sealed).await?;
        let (round_trip, work) = (asked.elapsed(), Arc::default());
        let reading = Reading { target: &target, work: &work };
        let manifest = reading.manifest(&name).await?;
        let plan = Plan::read(reading, &manifest).await?.ok_or_else(|| {
            let why = "it has too many runs of blocks";
            Problem::unsupported(what, why).next("read all of it before the volume is made")
        })?;
        let (from, address) = (from.clone(), from.address.clone());
        let target = Mutex::new(target);
        Ok(Self(Arc::new(Source {
            name,
            from,
            was_sealed,
            address,
            target,
            plan,
            patience,
            round_trip,
            work,
        })))
    }

    /// A piece, from memory or from the target. What was begun goes on when its reader has gone: a slow target must not begin again and again.
    async fn piece(&self, piece: usize) -> Result<Arc<ReadPiece>, IoError> {
        let fetched = tokio::spawn(Arc::clone(&self.0).piece(piece)).await;
        fetched.map_err(io::Error::other)?
    }

    async fn read_range(&self, range: Range<u64>) -> Result<Bytes, IoError> {
        let length = usize::try_from(range.end - range.start).expect("a 64-bit machine");
        let (mut buffer, mut at) = (vec![0; length], range.start);
        while at < range.end {
            let (piece, run_end) = self.0.plan.run(at / BLOCK_BYTES);
            let end = run_end.saturating_mul(BLOCK_BYTES).min(range.end);
            if let Some(piece) = piece {
                let read = self.piece(piece).await?;
                let within = usize::try_from(at - range.start).expect("within the buffer");
                let until = usize::try_from(end - range.start).expect("within the buffer");
                read.copy(at, &mut buffer[within..until])?;
            }
            at = end;
        }
        Ok(buffer.into())
    }
}

impl Source {
    async fn piece(self: Arc<Self>, piece: usize) -> Result<Arc<ReadPiece>, IoError> {
        let begun = Instant::now();
        let planned = self.plan.piece(piece);
        let (index, number) = (&self.plan.indexes[planned.index], planned.number);
        let sum = &index.pieces[number].sha256;
        let slot = slot_of(format!("{}/{}/{sum}", self.address, layer_prefix(index.layer)));
        let mut fetching = slot.lock().await;
        match &fetching.kept {
            Some(Kept::Piece(piece)) => return Ok(Arc::clone(piece)),
            Some(Kept::Damaged(at, why)) if at.elapsed() < DAMAGED_KEPT => return Err(damage(why)),
            _ => {}
        }
        loop {
            // At the end of a wait the target may just have come back: the piece is asked for once more after an answer.
            let is_last = !fetching.failed.is_empty() && begun.elapsed() >= self.patience;
            if is_last && self.target().look().await.is_err() {
                return Err(IoError::Unreachable(fetching.failed.clone()));
            }
            match self.fetch(index, number).await {
                Ok(read) => {
                    let read = Arc::new(read);
                    let kept = Some(Kept::Piece(Arc::clone(&read)));
                    *fetching = Fetching { kept, failed: String::new() };
                    return Ok(read);
                }
                Err(problem) if problem.kind == ProblemKind::Conflict => {
                    let why = format!("{}: {}", problem.what, problem.why);
                    return Err(self.mark_damaged(&mut fetching, why));
                }
                Err(problem) => {
                    fetching.failed = format!("{}: {}", problem.what, problem.why);
                    if problem.kind == ProblemKind::Invalid {
                        self.connect_again().await;
                    }
                }
            }
            if is_last {
                return Err(self.give_up(&mut fetching).await);
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    fn target(&self) -> Target {
        lock(&self.target).clone()
    }

    /// The target refuses: it is asked with the credentials that this host has now.
    async fn connect_again(&self) {
        match Target::open_again(&self.from, self.was_sealed).await {
            Ok(target) => *lock(&self.target) = target,
            Err(problem) => tracing::warn!(%problem, "a target refuses"),
        }
    }

    async fn fetch(&self, index: &LayerIndex, number: usize) -> Result<ReadPiece, Problem> {
        let what = || format!("can't read backup {}", self.name);
        let _turn = FETCHES.acquire().await.map_err(|error| Problem::internal(what(), error))?;
        let target = self.target();
        let reading = Reading { target: &target, work: &self.work };
        match reading.piece(index, number).await {
            Ok((bytes, runs)) => Ok(ReadPiece { bytes, runs }),
            // What is missing in a directory over which no disk is mounted is not damaged.
            Err(problem) if problem.kind == ProblemKind::Conflict => {
                target.look().await?;
                Err(problem)
            }
            Err(problem) => Err(problem),
        }
    }

    /// The piece has not come for long. If the target answers otherwise, the piece can't be read there.
    async fn give_up(&self, fetching: &mut Fetching) -> IoError {
        let why = fetching.failed.clone();
        match self.target().look().await {
            Ok(()) => self.mark_damaged(fetching, why),
            Err(_) => IoError::Unreachable(why),
        }
    }

    fn mark_damaged(&self, fetching: &mut Fetching, why: String) -> IoError {
        let (backup, at) = (&self.name, &self.address);
        tracing::error!(%backup, at, why, "bytes of a volume can't be restored");
        let error = damage(&why);
        let kept = Some(Kept::Damaged(Instant::now(), why));
        *fetching = Fetching { kept, failed: String::new() };
        error
    }
}

/// Nothing is kept in memory for volumes that have all their bytes, or were deleted.
impl Drop for Source {
    fn drop(&mut self) {
        lock(&PIECES).retain(|(key, _)| !key.starts_with(&self.address));
    }
}

/// The place of a piece. Of those that nobody fetches or waits for, the one that was asked for longest ago gives its place up.
fn slot_of(key: String) -> Arc<Slot> {
    let mut pieces = lock(&PIECES);
    let slot = match pieces.iter().position(|(known, _)| *known == key) {
        Some(at) => pieces.remove(at).map(|(_, slot)| slot).unwrap_or_default(),
        None => Arc::default(),
    };
    pieces.push_back((key, Arc::clone(&slot)));
    let is_free = |(_, slot): &(String, Arc<Slot>)| Arc::strong_count(slot) == 1;
    if pieces.len() > PIECES_MAX
        && let Some(at) = pieces.iter().position(is_free)
    {
        pieces.remove(at);
    }
    slot
}

fn damage(why: &str) -> IoError {
    io::Error::new(io::ErrorKind::InvalidData, why.to_owned()).into()
}

impl ReadPiece {
    /// Fills the buffer from this byte of the layer on. The piece has all of these bytes.
    fn copy(&self, from: u64, buffer: &mut [u8]) -> Result<(), IoError> {
        let mut done = 0;
        while done < buffer.len() {
            let at = from + done as u64;
            let next = self.runs.partition_point(|(run, _)| run.blocks.end * BLOCK_BYTES <= at);
            let run = self
                .runs
                .get(next)
                .filter(|(run, _)| run.blocks.start * BLOCK_BYTES <= at && !run.is_zero);
            let Some((run, place)) = run else {
                return Err(damage("a piece has other blocks than its head says"));
            };
            let skip =
                usize::try_from(at - run.blocks.start * BLOCK_BYTES).expect("within a piece");
            let bytes = &self.bytes[place.start + skip..place.end];
            let length = bytes.len().min(buffer.len() - done);
            buffer[done..done + length].copy_from_slice(&bytes[..length]);
            done += length;
        }
        Ok(())
    }
}

impl Device for BackupSource {
    fn size_bytes(&self) -> u64 {
        self.0.plan.size_bytes
    }

    fn layer(&self) -> Option<LayerId> {
        self.0.plan.layer
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        self.read_range(offset..offset + u64::from(length_bytes)).boxed()
    }

    fn write(&self, _: u64, _: Bytes, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        async { Err(IoError::ReadOnly) }.boxed()
    }

    fn zero(&self, _: u64, _: u64, _: Zeroing, _: bool) -> BoxFuture<'_, Result<(), IoError>> {
        async { Err(IoError::ReadOnly) }.boxed()
    }

    fn flush(&self) -> BoxFuture<'_, Result<(), IoError>> {
        async { Ok(()) }.boxed()
    }

    fn extents(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        let (mut at, end, mut extents) = (offset, offset + length_bytes, Vec::new());
        while at < end {
            let (piece, run_end) = self.0.plan.run(at / BLOCK_BYTES);
            let next = run_end.saturating_mul(BLOCK_BYTES).min(end);
            let hole = piece.is_none();
            extents.push(Extent { length_bytes: next - at, hole, zero: false });
            at = next;
        }
        async { Ok(extents) }.boxed()
    }

    fn beside(&self, offset: u64) -> Vec<Range<u64>> {
        let (piece, _) = self.0.plan.run(offset / BLOCK_BYTES);
        let blocks = piece.map(|piece| self.0.plan.piece(piece).blocks.as_slice());
        let bytes = |run: &Range<u64>| run.start * BLOCK_BYTES..run.end * BLOCK_BYTES;
        blocks.unwrap_or_default().iter().map(bytes).collect()
    }

    fn round_trip(&self) -> Duration {
        self.0.round_trip
    }
}
