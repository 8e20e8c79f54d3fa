//! Backups of volumes: the volume's home seals the volume, as for a replica, and ships the layers that the target lacks. A layer never changes, so a second backup
//! ships only what was written since the first one. An image is sealed already: its layers are shipped in the same way, and nothing is kept for its next backup.
//!
//! 1. The volume is sealed while it is in use. Its layers stay as they are until the backup is complete or another one begins.
//! 2. From the top down, the first layer is looked for that the target has. All layers above it are shipped, the lowest first: so what the target has of a layer, it has
//!    of all layers below. Each piece that is there already is left out, so a backup that was cut off goes on where it was.
//! 3. The manifest is written. The home keeps the topmost layer as it is for the next backup.
//!
//! | question | file |
//! |---|---|
//! | What is at a target? | `format.rs` |
//! | How does it get there, whole or not at all? | `target.rs` |
//! | How is it encrypted? | `sealing.rs` |
//! | How does a volume or an image come back, and how is damage found? | `restore.rs` |
//! | Which piece has which block, known before the pieces are read? | `plan.rs` |
//! | What does a read of a volume get whose bytes have not all arrived? | `source.rs` |
//! | When is a layer at a target deleted? | `delete.rs` |

pub mod delete;
pub mod format;
mod plan;
pub mod restore;
mod sealing;
pub mod source;
pub mod target;

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::sync::Arc;

use perigee_block::device::{Device, IoError};
use perigee_model::backup::{
    BackupRoom, BackupTarget, SealForBackup, SealedForBackup, SendBackupKey, ShipBackup,
    ShippedBackup, in_place_of_volume,
};
use perigee_model::replica::SealedReplica;
use perigee_model::volume::BLOCK_BYTES;
use perigee_model::{ImageName, LayerId, Problem, ProblemKind, TenantName, VolumeName};
use perigee_store::{Data, ImageForBackup, Pool, Work, io_problem};

use format::{
    FORMAT, LayerIndex, Manifest, NamedLayer, Piece, PieceBuilder, Run, head_of, index_key,
    layer_prefix, manifest_key, push, sha256, with_checksum,
};
use restore::Reading;
use target::Target;

/// The blocks of a layer are asked for in pieces of this size.
const LOOK_BYTES: u64 = 16 << 30;
/// The layer is read in pieces of this size.
const READ_BYTES: usize = 1 << 20;

/// What is backed up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A volume, which may be in use.
    Volume(VolumeName),
    /// An image.
    Image(ImageName),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume(volume) => write!(f, "volume {volume}"),
            Self::Image(image) => write!(f, "image {image}"),
        }
    }
}

/// What a source has at one moment.
struct Has {
    tenant: TenantName,
    size_bytes: u64,
    is_confined: bool,
    /// Its layers, topmost first.
    chain: Vec<LayerId>,
}

/// Ships a backup of a volume or an image of this pool. `work` says how far it is, and may stop it.
///
/// # Errors
/// `NotFound` if there is no such volume or image; `Conflict` if it is damaged here, or may not leave its site, or the target has backups that are encrypted otherwise; `NoSpace` if the target
/// is full; `Unavailable` if the target fails or is away, or a part of the volume is still at another host. Nothing that is complete at the target is changed.
pub async fn ship(
    pool: &Arc<Pool>,
    of: &Source,
    ask: &ShipBackup,
    work: &Arc<Work>,
) -> Result<ShippedBackup, Problem> {
    let target = Target::begin(ask).await?;
    let what = format!("can't back up {of} to {}", ask.to.address);
    let keeper = keeper(ask);
    let room = Room::count(&target, ask.room.as_ref()).await?;
    if let Some(shipped) = complete(&target, ask, work).await? {
        if let Source::Volume(volume) = of {
            pool.drop_filling(volume, &keeper).await?;
        }
        return Ok(ShippedBackup { held_bytes: room.map(|room| room.held_bytes), ..shipped });
    }
    let Has { tenant, size_bytes, is_confined, chain } = match of {
        Source::Volume(volume) => seal_volume(pool, volume, ask, &keeper).await?,
        Source::Image(image) => look_at_image(pool, image, ask).await?,
    };
    let (volume, image) = match of {
        Source::Volume(volume) => (volume.clone(), None),
        Source::Image(image) => (in_place_of_volume(image), Some(image.clone())),
    };
    let taken_ms = ask.sealed.as_ref().map_or(ask.now_ms, |sealed| sealed.taken_ms);
    let mut shipping =
        Shipping { what, pool, target: &target, whole: ask.whole, work, room, shipped_bytes: 0 };
    let there = shipping.first_that_is_there(&chain).await?;
    for at in (0..there).rev() {
        shipping.layer(chain[at], chain.get(at + 1).copied()).await?;
    }
    let layers = shipping.layers_from(chain.first().copied(), there).await?;
    let confined = confined_now(pool, of, ask).await?.unwrap_or(is_confined);
    let manifest = Manifest {
        format: FORMAT,
        name: ask.name.clone(),
        volume,
        image,
        tenant,
        taken_ms,
        size_bytes,
        confined,
        encryption: None,
        vm: ask.vm.clone(),
        layers,
    };
    target.check_marker().await?;
    shipping.put_list(&manifest_key(&ask.name), &manifest).await?;
    if let Source::Volume(volume) = of {
        pool.has_backup(volume, &keeper, chain.first().copied()).await?;
    }
    Ok(ShippedBackup {
        taken_ms,
        size_bytes: manifest.size_bytes,
        data_bytes: manifest.data_bytes(),
        shipped_bytes: shipping.shipped_bytes,
        held_bytes: shipping.room.map(|room| room.held_bytes),
        encrypted: target.is_sealed(),
    })
}

/// Seals a volume, unless it was sealed for this backup before.
async fn seal_volume(
    pool: &Arc<Pool>,
    volume: &VolumeName,
    ask: &ShipBackup,
    keeper: &str,
) -> Result<Has, Problem> {
    let sealed = match &ask.sealed {
        None => pool.seal_backup(volume, keeper, ask.to.is_s3()).await?,
        Some(was) => {
            let sealed = pool.sealed_before(volume, was.layer).await?;
            SealedReplica { size_bytes: was.size_bytes, ..sealed }
        }
    };
    // Of its head too, which is not shipped while nothing is written to it.
    let is_confined = pool.volume_info(volume).await?.leave_site.is_never();
    let chain = sealed.chain.iter().map(|layer| layer.layer).collect();
    Ok(Has { tenant: sealed.tenant, size_bytes: sealed.size_bytes, is_confined, chain })
}

async fn look_at_image(
    pool: &Arc<Pool>,
    image: &ImageName,
    ask: &ShipBackup,
) -> Result<Has, Problem> {
    let has = pool.image_for_backup(image, ask.to.is_s3()).await?;
    let ImageForBackup { size_bytes, is_confined, chain } = has;
    Ok(Has { tenant: TenantName::of(image.as_str()), size_bytes, is_confined, chain })
}

/// Whether what is backed up may not leave its site by now: that may have changed since the backup began. `None`: it is not here any more.
async fn confined_now(
    pool: &Arc<Pool>,
    of: &Source,
    ask: &ShipBackup,
) -> Result<Option<bool>, Problem> {
    let data = match of {
        Source::Volume(volume) => Data::Volume(volume.clone()),
        Source::Image(image) => Data::Image(image.clone()),
    };
    let confined = pool.leave_site(&data).await?.map(|leave_site| leave_site.is_never());
    if confined == Some(true) && ask.to.is_s3() {
        let what = format!("can't back up {of} to {}", ask.to.address);
        let why = "since the backup began, it may not leave its site any more";
        return Err(Problem::conflict(what, why).next("back it up to a directory"));
    }
    Ok(confined)
}

/// What a tenant's backups may hold, and what they hold at this target.
struct Room<'a> {
    of: &'a BackupRoom,
    held_bytes: u64,
}

impl<'a> Room<'a> {
    /// Counts what the target has, if that is limited or wanted.
    async fn count(target: &Target, of: Option<&'a BackupRoom>) -> Result<Option<Self>, Problem> {
        let Some(of) = of else { return Ok(None) };
        Ok(Some(Self { of, held_bytes: target.bytes().await? }))
    }

    /// Takes room for an object, before it is put.
    fn take(&mut self, what: &str, bytes: u64) -> Result<(), Problem> {
        self.of.check(what, self.held_bytes, bytes)?;
        self.held_bytes = self.held_bytes.saturating_add(bytes);
        Ok(())
    }
}

/// Whether a layer wants bytes of this target whose key was not sent since the start.
pub fn lacks_key(at: &BackupTarget) -> bool {
    sealing::is_lacking(at)
}

/// Takes the key of a target, for layers that get their bytes from there.
///
/// # Errors
/// `Conflict` if it is the wrong one; when the target fails.
pub async fn take_backup_key(ask: &SendBackupKey) -> Result<(), Problem> {
    Target::open(&ask.at, Some(&ask.key)).await.map(drop)
}

/// For whom the home keeps the layers of a backup that is under way, and the topmost one of the last backup.
fn keeper(ask: &ShipBackup) -> String {
    match &ask.sealed {
        None => ask.to.address.clone(),
        Some(_) => ask.to.of_vms().address,
    }
}

/// Seals the disks of a VM that have their home here, all at one moment, for a backup that is shipped then.
///
/// # Errors
/// As those of [`ship`] before anything is shipped.
pub async fn seal(pool: &Arc<Pool>, ask: &SealForBackup) -> Result<Vec<SealedForBackup>, Problem> {
    Target::new(&ask.to)?;
    let keeper = ask.to.of_vms().address;
    let sealed = pool.seal_backups(&ask.volumes, &keeper, ask.to.is_s3()).await?;
    let taken_ms = ask.now_ms;
    let of = |(layer, size_bytes)| SealedForBackup { layer, size_bytes, taken_ms };
    Ok(sealed.into_iter().map(of).collect())
}

/// The figures of the backup, if a try before has completed it and its answer was lost. That one is not replaced by a later state of the volume.
async fn complete(
    target: &Target,
    ask: &ShipBackup,
    work: &Arc<Work>,
) -> Result<Option<ShippedBackup>, Problem> {
    match (Reading { target, work }).manifest(&ask.name).await {
        Ok(manifest) => Ok(Some(ShippedBackup {
            taken_ms: manifest.taken_ms,
            size_bytes: manifest.size_bytes,
            data_bytes: manifest.data_bytes(),
            shipped_bytes: 0,
            held_bytes: None,
            encrypted: target.is_sealed(),
        })),
        // There is none, or it is damaged: then it is written anew.
        Err(problem) if matches!(problem.kind, ProblemKind::NotFound | ProblemKind::Conflict) => {
            Ok(None)
        }
        Err(problem) => Err(problem),
    }
}

/// A backup that is being shipped.
struct Shipping<'a> {
    what: String,
    pool: &'a Arc<Pool>,
    target: &'a Target,
    /// What the target has is shipped again.
    whole: bool,
    work: &'a Arc<Work>,
    /// Of a tenant's backup.
    room: Option<Room<'a>>,
    shipped_bytes: u64,
}

impl Shipping<'_> {
    fn reading(&self) -> Reading<'_> {
        Reading { target: self.target, work: self.work }
    }

    fn failed(&self, error: &IoError) -> Problem {
        match self.work.is_stopped() {
            true => stopped(&self.what),
            false => io_problem(&self.what, error),
        }
    }

    /// The place in the chain of the topmost layer that the target has, with all that is below it.
    async fn first_that_is_there(&self, chain: &[LayerId]) -> Result<usize, Problem> {
        if self.whole {
            return Ok(chain.len());
        }
        for (at, layer) in chain.iter().enumerate() {
            match self.reading().index_of(*layer).await {
                Ok(Some(_)) => return Ok(at),
                Ok(None) => {}
                // One that can't be read is made anew.
                Err(problem) if problem.kind == ProblemKind::Conflict => {
                    tracing::warn!(%problem, "a layer is backed up again");
                }
                Err(problem) => return Err(problem),
            }
        }
        Ok(chain.len())
    }

    /// Ships what a layer itself has.
    async fn layer(&mut self, layer: LayerId, parent: Option<LayerId>) -> Result<(), Problem> {
        // It is not all here yet, or was merged into another one since the try began.
        let later = |problem: Problem| match problem.kind {
            ProblemKind::NotFound => Problem::unavailable(&self.what, problem.why).next(
                "wait until its copy is complete (`perigee image list`); the backup is tried again",
            ),
            _ => problem,
        };
        let device = self.pool.open_own(layer).await.map_err(later)?;
        let runs = runs_of(&*device).await.map_err(|error| self.failed(&error))?;
        let data_bytes: u64 = runs.iter().filter(|run| !run.is_zero).map(Run::length_bytes).sum();
        // Only what is put there counts: a backup that is read again and again gets no further.
        self.work.expect(data_bytes);
        self.pool.check_before_backup(layer, self.work.uncounted()).await.map_err(later)?;
        let there = self.target.names(&layer_prefix(layer)).await?;
        let mut pieces = Pieces { layer, there, done: Vec::new(), next: PieceBuilder::default() };
        for run in runs {
            if run.is_zero {
                pieces.next.zeros(run.blocks);
                self.put_full(&mut pieces).await?;
                continue;
            }
            let (mut at, end) = (run.blocks.start * BLOCK_BYTES, run.blocks.end * BLOCK_BYTES);
            while at < end {
                let room = READ_BYTES.min(pieces.next.room_bytes()) as u64;
                let length = u32::try_from(room.min(end - at)).expect("a small piece");
                let read = device.read(at, length).await;
                let bytes = read.map_err(|error| self.failed(&error))?;
                pieces.next.data(at / BLOCK_BYTES, &bytes);
                at += u64::from(length);
                self.work.step(0).map_err(|_| stopped(&self.what))?;
                self.put_full(&mut pieces).await?;
            }
        }
        if !pieces.next.is_empty() {
            self.put_piece(&mut pieces).await?;
        }
        let size_bytes = device.size_bytes();
        let pieces = pieces.done;
        let index = LayerIndex { format: FORMAT, layer, size_bytes, parent, data_bytes, pieces };
        self.put_list(&index_key(layer), &index).await
    }

    async fn put_full(&mut self, pieces: &mut Pieces) -> Result<(), Problem> {
        if pieces.next.is_full() { self.put_piece(pieces).await } else { Ok(()) }
    }

    async fn put_piece(&mut self, pieces: &mut Pieces) -> Result<(), Problem> {
        let piece = std::mem::take(&mut pieces.next);
        let data_bytes = piece.data_bytes();
        let hashed = tokio::task::spawn_blocking(move || {
            let bytes = piece.finish();
            let (sum, head) = (sha256(&bytes), head_of(&bytes));
            (bytes, sum, head)
        });
        let (bytes, sum, head) =
            hashed.await.map_err(|error| Problem::internal(&self.what, error))?;
        let name = self.target.piece_name(pieces.done.len(), &sum);
        let bytes_of_piece = bytes.len() as u64;
        let length = self.target.stored_bytes(bytes_of_piece);
        pieces.done.push(Piece { bytes: bytes_of_piece, sha256: sum, head });
        let is_there = pieces.there.contains(&name);
        if is_there && !self.whole {
            return Ok(());
        }
        if let Some(room) = self.room.as_mut().filter(|_| !is_there) {
            room.take(&self.what, length)?;
        }
        self.target.put(&format!("{}/{name}", layer_prefix(pieces.layer)), bytes).await?;
        self.shipped_bytes += length;
        self.work.step(data_bytes).map_err(|_| stopped(&self.what))
    }

    async fn put_list(
        &mut self,
        key: &str,
        list: &(impl serde::Serialize + Sync),
    ) -> Result<(), Problem> {
        let bytes = with_checksum(list).map_err(|error| Problem::internal(&self.what, error))?;
        let length = self.target.stored_bytes(bytes.len() as u64);
        self.shipped_bytes += length;
        if let Some(room) = &mut self.room {
            room.take(&self.what, length)?;
        }
        self.target.put(key, bytes).await
    }

    /// The layers at the target from this one down. So many of them were shipped just now, and must have all their pieces.
    async fn layers_from(
        &self,
        top: Option<LayerId>,
        shipped: usize,
    ) -> Result<Vec<NamedLayer>, Problem> {
        let indexes = self.reading().indexes_from(&self.what, top).await?;
        for index in indexes.iter().take(shipped) {
            if let Some(piece) = self.reading().missing_piece(index).await? {
                // Without its index the layer is shipped again.
                self.target.delete(&index_key(index.layer)).await?;
                let why = format!("piece {piece} of layer {} has gone meanwhile", index.layer);
                return Err(Problem::unavailable(&self.what, why)
                    .next("nothing else may delete at the target; the backup is tried again"));
            }
        }
        let named =
            |index: LayerIndex| NamedLayer { layer: index.layer, data_bytes: index.data_bytes };
        Ok(indexes.into_iter().map(named).collect())
    }
}

/// The pieces of a layer.
struct Pieces {
    layer: LayerId,
    /// Those that are at the target.
    there: BTreeSet<String>,
    done: Vec<Piece>,
    next: PieceBuilder,
}

fn stopped(what: &str) -> Problem {
    Problem::unavailable(what, "it was stopped, because nobody waits for it any more")
        .next("it goes on where it was when it is asked for again")
}

/// What a layer itself has, in order.
async fn runs_of(device: &dyn Device) -> Result<Vec<Run>, IoError> {
    let (size_bytes, mut at) = (device.size_bytes(), 0);
    let mut runs: Vec<Run> = Vec::new();
    while at < size_bytes {
        let begun = at;
        for extent in device.extents(at, LOOK_BYTES.min(size_bytes - at)).await? {
            let end = at + extent.length_bytes;
            let blocks = at / BLOCK_BYTES..end / BLOCK_BYTES;
            at = end;
            // A hole that is not known to be zeros is what layers below have.
            if extent.hole && !extent.zero {
                continue;
            }
            push(&mut runs, Run { blocks, is_zero: extent.hole });
        }
        if at == begun {
            return Err(io::Error::other("a layer does not say what it has").into());
        }
    }
    Ok(runs)
}
