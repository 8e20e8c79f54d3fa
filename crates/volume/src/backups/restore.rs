//! Reads backups: what is at a target, whether a backup is sound, and a volume or an image that is made of one.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use perigee_model::backup::{
    FoundBackup, ListBackups, RestoreImage, RestoreVolume, VerifiedBackup, VerifyBackup, VmBackup,
};
use perigee_model::persistent_vm::CloudInit;
use perigee_model::volume::{BLOCK_BYTES, ImageInfo, VolumeInfo};
use perigee_model::{BackupName, ImageName, LayerId, LeaveSite, Problem, ProblemKind, VolumeName};
use perigee_store::{IncomingVolume, NewIncoming, Pool, Work, io_problem};
use serde::de::DeserializeOwned;
use uuid::Uuid;

use super::format::{
    FORMAT, HEAD_BYTES_MAX, LAYERS_MAX, LIST_BYTES_MAX, LayerIndex, MANIFESTS, Manifest,
    PIECE_BYTES_MAX, PlacedRuns, Run, checked, index_key, layer_prefix, manifest_key, parse_head,
    parse_piece, sha256,
};
use super::stopped;
use super::target::Target;

/// So much damage of one backup is named.
const PROBLEMS_MAX: usize = 100;
/// No backup has more pieces, in all its layers: what the indexes say of them is in memory.
const PIECES_MAX: usize = 4 << 20;

/// What is read of a target.
#[derive(Clone, Copy)]
pub struct Reading<'a> {
    pub target: &'a Target,
    pub work: &'a Arc<Work>,
}

fn damaged(what: &str, why: impl std::fmt::Display) -> Problem {
    Problem::conflict(what, format!("the backup is damaged: {why}")).next(
        "use another backup; `perigee backup create --whole` ships everything again while the volume is there",
    )
}

/// The bytes of all pieces, as the indexes say it.
fn pieces_bytes(indexes: &[LayerIndex]) -> u64 {
    let pieces = indexes.iter().flat_map(|index| &index.pieces);
    pieces.map(|piece| piece.bytes).fold(0, u64::saturating_add)
}

impl Reading<'_> {
    async fn list<T: DeserializeOwned + Send + 'static>(
        &self,
        key: &str,
    ) -> Result<Option<T>, Problem> {
        let what = format!("can't read {key}");
        if self.work.is_stopped() {
            return Err(stopped(&what));
        }
        let Some(bytes) = self.target.get(key, LIST_BYTES_MAX).await? else { return Ok(None) };
        let parsed = tokio::task::spawn_blocking(move || checked(&bytes)).await;
        let parsed = parsed.map_err(|error| Problem::internal(&what, error))?;
        parsed.map(Some).map_err(|why| damaged(&what, why))
    }

    /// The index of a layer; `None`: the target does not have the layer.
    ///
    /// # Errors
    /// `Conflict` if it is damaged.
    pub async fn index_of(&self, layer: LayerId) -> Result<Option<LayerIndex>, Problem> {
        let found = self.list::<LayerIndex>(&index_key(layer)).await?;
        match &found {
            Some(index) if index.layer != layer || index.format != FORMAT => {
                Err(damaged(&format!("can't read layer {layer}"), "its index is another one's"))
            }
            _ => Ok(found),
        }
    }

    /// The indexes of the layers from this one down.
    ///
    /// # Errors
    /// `Conflict` if one is missing or damaged, or if they have too many pieces.
    pub async fn indexes_from(
        &self,
        what: &str,
        top: Option<LayerId>,
    ) -> Result<Vec<LayerIndex>, Problem> {
        let (mut indexes, mut seen, mut next) = (Vec::new(), BTreeSet::new(), top);
        let mut pieces = 0_usize;
        while let Some(layer) = next {
            if indexes.len() == LAYERS_MAX {
                return Err(damaged(what, format!("it has more than {LAYERS_MAX} layers")));
            }
            if !seen.insert(layer) {
                return Err(damaged(what, format!("layer {layer} stands on itself")));
            }
            let index = self.index_of(layer).await?;
            let index = index.ok_or_else(|| damaged(what, format!("layer {layer} is missing")))?;
            pieces = pieces.saturating_add(index.pieces.len());
            if pieces > PIECES_MAX {
                return Err(damaged(what, format!("it has more than {PIECES_MAX} pieces")));
            }
            next = index.parent;
            indexes.push(index);
        }
        Ok(indexes)
    }

    /// What a backup shows: its layers, topmost first.
    ///
    /// # Errors
    /// `Conflict` if one is missing or damaged.
    pub async fn indexes(&self, manifest: &Manifest) -> Result<Vec<LayerIndex>, Problem> {
        let top = manifest.layers.first().map(|layer| layer.layer);
        self.indexes_from(&format!("can't read backup {}", manifest.name), top).await
    }

    /// What a backup is of.
    ///
    /// # Errors
    /// `NotFound` if there is no such backup; `Conflict` if it is damaged.
    pub async fn manifest(&self, name: &BackupName) -> Result<Manifest, Problem> {
        let what = format!("can't read backup {name}");
        let found = self.list::<Manifest>(&manifest_key(name)).await?;
        let Some(manifest) = found else {
            return Err(Problem::not_found(what, "the target has no backup with this name")
                .next("`perigee backup list --from TARGET` shows those that it has"));
        };
        if manifest.format != FORMAT || manifest.encryption.is_some() {
            let why = "it is of a newer version of perigee";
            return Err(Problem::new(ProblemKind::Unsupported, what, why)
                .next("read it with that version, or a newer one"));
        }
        match manifest.name == *name {
            true => Ok(manifest),
            false => Err(damaged(&what, "it is another one under this name")),
        }
    }

    /// A piece of a layer that is not at the target, if there is one.
    pub async fn missing_piece(&self, index: &LayerIndex) -> Result<Option<String>, Problem> {
        let there = self.target.names(&layer_prefix(index.layer)).await?;
        let named = index.pieces.iter().enumerate();
        let mut named = named.map(|(number, piece)| self.target.piece_name(number, &piece.sha256));
        Ok(named.find(|name| !there.contains(name)))
    }

    /// The runs of a piece, of which only the head is read.
    ///
    /// # Errors
    /// `Conflict` if it is missing or damaged; when the target fails.
    pub async fn head(&self, index: &LayerIndex, number: usize) -> Result<PlacedRuns, Problem> {
        let what = format!("can't read the head of piece {number} of layer {}", index.layer);
        let piece = index.pieces.get(number);
        let Some((piece, head)) = piece.and_then(|piece| Some((piece, piece.head.as_ref()?)))
        else {
            return Err(damaged(&what, "its index has none"));
        };
        let name = self.target.piece_name(number, &piece.sha256);
        let key = format!("{}/{name}", layer_prefix(index.layer));
        let read = self.target.get_start(&key, head.bytes.min(HEAD_BYTES_MAX)).await?;
        let bytes = read.ok_or_else(|| damaged(&what, format!("{key} is missing")))?;
        if sha256(&bytes) != head.sha256 {
            return Err(damaged(&what, format!("{key}: its head is not what was shipped")));
        }
        let runs = parse_head(&bytes, index.size_bytes / BLOCK_BYTES);
        runs.map_err(|why| damaged(&what, format!("{key}: {why}")))
    }

    /// A piece, with its runs and where each has its bytes.
    ///
    /// # Errors
    /// As [`Self::head`].
    pub async fn piece(
        &self,
        index: &LayerIndex,
        number: usize,
    ) -> Result<(Vec<u8>, PlacedRuns), Problem> {
        let what = format!("can't read piece {number} of layer {}", index.layer);
        let Some(piece) = index.pieces.get(number) else {
            return Err(damaged(&what, "no such piece"));
        };
        let name = self.target.piece_name(number, &piece.sha256);
        let key = format!("{}/{name}", layer_prefix(index.layer));
        let read = self.target.get(&key, PIECE_BYTES_MAX).await?;
        let bytes = read.ok_or_else(|| damaged(&what, format!("{key} is missing")))?;
        self.work.step(bytes.len() as u64).map_err(|_| stopped(&what))?;
        let (blocks, wanted) = (index.size_bytes / BLOCK_BYTES, piece.sha256.clone());
        let parsed = tokio::task::spawn_blocking(move || {
            if sha256(&bytes) != wanted {
                return Err("its bytes are not what was shipped".to_owned());
            }
            parse_piece(&bytes, blocks).map(|runs| (bytes, runs))
        });
        let parsed = parsed.await.map_err(|error| Problem::internal(&what, error))?;
        parsed.map_err(|why| damaged(&what, format!("{key}: {why}")))
    }
}

/// The backups at a target, or the one that is named. One that can't be read says why.
///
/// # Errors
/// `Unavailable` if the target is away; `Conflict` without the right key, or if the backups were encrypted and those that are there are not.
pub async fn list(ask: &ListBackups) -> Result<Vec<FoundBackup>, Problem> {
    let target = &Target::open(&ask.at, ask.key.as_ref()).await?;
    target.check_encrypted(ask.encrypted)?;
    let (work, mut found) = (Arc::default(), Vec::new());
    let reading = Reading { target, work: &work };
    let mut names: Vec<BackupName> = Vec::new();
    match &ask.only {
        Some(name) => names.push(name.clone()),
        None => names.extend(
            target
                .names(MANIFESTS)
                .await?
                .into_iter()
                .filter_map(|name| BackupName::new(name).ok()),
        ),
    }
    for name in names {
        found.push(match reading.manifest(&name).await {
            Ok(manifest) => FoundBackup {
                data_bytes: manifest.data_bytes(),
                volume: Some(manifest.volume),
                image: manifest.image,
                taken_ms: manifest.taken_ms,
                size_bytes: manifest.size_bytes,
                problem: String::new(),
                vm: manifest.vm.map(|of_vm| if ask.is_short { short(of_vm) } else { of_vm }),
                name,
            },
            Err(problem) if problem.kind == ProblemKind::Unavailable => return Err(problem),
            Err(problem) if problem.kind == ProblemKind::NotFound => continue,
            Err(problem) => {
                let (volume, image, vm, problem) = (None, None, None, problem.why);
                let (taken_ms, size_bytes, data_bytes) = (0, 0, 0);
                FoundBackup { name, volume, image, taken_ms, size_bytes, data_bytes, problem, vm }
            }
        });
    }
    found.sort_by(|a, b| (a.taken_ms, &a.name).cmp(&(b.taken_ms, &b.name)));
    Ok(found)
}

fn short(mut of_vm: Box<VmBackup>) -> Box<VmBackup> {
    of_vm.vm.cloud_init = CloudInit::default();
    of_vm
}

/// Reads all of a backup, and names what is missing or damaged.
///
/// # Errors
/// `NotFound` if there is no such backup; `Unavailable` if the target fails, or the work was stopped.
pub async fn verify(ask: &VerifyBackup, work: &Arc<Work>) -> Result<VerifiedBackup, Problem> {
    let target = Target::open(&ask.at, ask.key.as_ref()).await?;
    target.check_encrypted(ask.encrypted)?;
    let reading = Reading { target: &target, work };
    let mut problems = Vec::new();
    // What can't be read is damage, if the rest of the target can be read; that the target is away is not.
    let mut note = async |problem: Problem| {
        match problem.kind {
            ProblemKind::Conflict => {}
            ProblemKind::Unavailable | ProblemKind::Invalid if !work.is_stopped() => {
                target.look().await?;
            }
            _ => return Err(problem),
        }
        if problems.len() < PROBLEMS_MAX {
            problems.push(format!("{}: {}", problem.what, problem.why));
        }
        Ok(())
    };
    let found = async { reading.indexes(&reading.manifest(&ask.backup).await?).await };
    let indexes = match found.await {
        Ok(indexes) => indexes,
        Err(problem) => {
            note(problem).await?;
            Vec::new()
        }
    };
    work.expect(pieces_bytes(&indexes));
    for index in &indexes {
        for number in 0..index.pieces.len() {
            if let Err(problem) = reading.piece(index, number).await {
                note(problem).await?;
            }
        }
    }
    Ok(VerifiedBackup { read_bytes: work.progress().done_bytes, problems })
}

/// Makes a volume of a backup: at once where that is asked for and the backup says which of its pieces has which block.
///
/// # Errors
/// `NotFound` if there is no such backup; `Conflict` if it is damaged, or the volume's name is taken; `NoSpace`; `Unavailable` if the target fails, or the work was stopped.
pub async fn restore(
    pool: &Arc<Pool>,
    volume: &VolumeName,
    ask: &RestoreVolume,
    work: &Arc<Work>,
) -> Result<VolumeInfo, Problem> {
    let Some(layer) = ask.at_once else { return restore_whole(pool, volume, ask, work).await };
    let target = Target::open(&ask.from, ask.key.as_ref()).await?;
    target.check_encrypted(ask.encrypted)?;
    let reading = Reading { target: &target, work };
    let manifest = reading.manifest(&ask.backup).await?;
    let indexes = reading.indexes(&manifest).await?;
    // Of an older version: to read all of it twice would be no sooner.
    if indexes.iter().flat_map(|index| &index.pieces).any(|piece| piece.head.is_none()) {
        tracing::info!(%volume, "a backup does not say which of its pieces has which block, and is restored whole");
        return restore_whole(pool, volume, ask, work).await;
    }
    let new = new_volume(volume, ask, &manifest);
    let is_sealed = target.is_sealed();
    match pool.restore_at_once(new, layer, &ask.from, is_sealed, &ask.backup).await {
        Err(problem) if problem.kind == ProblemKind::Unsupported => {
            tracing::info!(%volume, %problem, "a backup is restored whole");
            restore_whole(pool, volume, ask, work).await
        }
        made => made,
    }
}

fn new_volume(volume: &VolumeName, ask: &RestoreVolume, manifest: &Manifest) -> NewIncoming {
    let leave_site = if manifest.confined { LeaveSite::Never } else { ask.leave_site };
    let (tenant, owner) = (ask.tenant.clone(), ask.owner.clone());
    NewIncoming { name: volume.clone(), tenant, leave_site, owner }
}

/// As [`restore`]. All of the backup is read and compared with its checksums before there is a volume.
async fn restore_whole(
    pool: &Arc<Pool>,
    volume: &VolumeName,
    ask: &RestoreVolume,
    work: &Arc<Work>,
) -> Result<VolumeInfo, Problem> {
    let target = Target::open(&ask.from, ask.key.as_ref()).await?;
    target.check_encrypted(ask.encrypted)?;
    let reading = Reading { target: &target, work };
    let manifest = reading.manifest(&ask.backup).await?;
    let indexes = reading.indexes(&manifest).await?;
    let incoming = pool.begin_incoming(volume, manifest.size_bytes).await?;
    let what = format!("can't restore volume {volume}");
    let incoming = read_into(&what, reading, &indexes, incoming).await?;
    let new = new_volume(volume, ask, &manifest);
    let layer = ask.at_once.or(ask.layer).unwrap_or_else(|| LayerId(Uuid::new_v4()));
    pool.finish_incoming(incoming, new, layer, Arc::clone(work)).await
}

/// Makes an image of a backup, when all of it was read and compared with its checksums.
///
/// # Errors
/// As [`restore`].
pub async fn restore_image(
    pool: &Arc<Pool>,
    image: &ImageName,
    ask: &RestoreImage,
    work: &Arc<Work>,
) -> Result<ImageInfo, Problem> {
    // From the beginning, also while nothing but lists is read: whoever deletes the image ends this.
    let importing = pool.begin_restore(image, work);
    // An earlier try has made it, and its answer was lost.
    if let Ok(made) = pool.image_info(image).await
        && made.layer == ask.layer
    {
        return Ok(made);
    }
    let target = Target::open(&ask.from, ask.key.as_ref()).await?;
    target.check_encrypted(ask.encrypted)?;
    let reading = Reading { target: &target, work };
    let manifest = reading.manifest(&ask.backup).await?;
    let indexes = reading.indexes(&manifest).await?;
    let size_bytes = manifest.size_bytes;
    let begun = pool.begin_incoming_image(image, ask.layer, size_bytes, importing).await?;
    let Some((incoming, new)) = begun else { return pool.image_info(image).await };
    let what = format!("can't restore image {image}");
    let incoming = read_into(&what, reading, &indexes, incoming).await?;
    let leave_site = LeaveSite::confined(manifest.confined);
    pool.finish_incoming_image(incoming, new, leave_site, Arc::clone(work)).await
}

/// Reads all pieces of these layers, and writes what they show together.
async fn read_into(
    what: &str,
    reading: Reading<'_>,
    indexes: &[LayerIndex],
    incoming: IncomingVolume,
) -> Result<IncomingVolume, Problem> {
    reading.work.expect(pieces_bytes(indexes));
    let incoming = Arc::new(incoming);
    // The lowest layer first: what stands on it overwrites it.
    for index in indexes.iter().rev() {
        for number in 0..index.pieces.len() {
            let (bytes, runs) = reading.piece(index, number).await?;
            let to = Arc::clone(&incoming);
            write(what, move || put(&to, &bytes, &runs)).await?;
        }
        // A layer hides what layers below have beyond its end.
        let (to, end) = (Arc::clone(&incoming), index.size_bytes);
        write(what, move || to.cut(end)).await?;
    }
    Arc::into_inner(incoming).ok_or_else(|| Problem::internal(what, "something still writes to it"))
}

async fn write(
    what: &str,
    act: impl FnOnce() -> Result<(), perigee_block::device::IoError> + Send + 'static,
) -> Result<(), Problem> {
    let done = tokio::task::spawn_blocking(act).await;
    let done = done.map_err(|error| Problem::internal(what, error))?;
    done.map_err(|error| io_problem(what, &error))
}

fn put(
    to: &IncomingVolume,
    bytes: &[u8],
    runs: &[(Run, Range<usize>)],
) -> Result<(), perigee_block::device::IoError> {
    runs.iter().try_for_each(|(run, at)| {
        let data = (!run.is_zero).then(|| &bytes[at.clone()]);
        to.write(run.blocks.start * BLOCK_BYTES, run.length_bytes(), data)
    })
}
