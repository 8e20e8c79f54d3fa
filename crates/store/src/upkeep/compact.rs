//! Compaction: merges the sealed layers of a chain that nothing else needs into what stands on them.
//!
//! A run is made of layers without names, of which each but the topmost has only the next one above it. Where a volume's head
//! stands on the run, and nothing else does, the head takes the blocks that it lacks ([`crate::upkeep::absorb`]). Elsewhere the run
//! becomes one layer:
//!
//! 1. The layers are compared with their checksums, so that damage is not sealed again.
//! 2. The visible blocks are copied into a new layer's files, which are made durable.
//! 3. One catalog transaction replaces the run by the new layer. It does not if a layer of the run was named or
//!    cloned in the meantime, or if another host may be reading one.
//! 4. Open volumes get the new chain while clients use them, and the files of the run are removed.
//!
//! A crash before 3 leaves the old chain and files that the next server removes; a crash after it
//! leaves the new chain. A read that began before 4 ends in the old files, which are still open.
//!
//! A sealed layer with a name, and one that another host uses, stays as it is: other hosts know it by its id. So a deleted
//! snapshot whose neighbour above has a name waits until that name is deleted too.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use perigee_model::units::format_bytes;
use perigee_model::volume::{BLOCK_BYTES, Compacted};
use perigee_model::{LayerId, Problem, VolumeName};
use uuid::Uuid;

use crate::catalog::{LayerRow, failed};
use crate::disk::blocks::{BlockState, BlockStates, by_page, index, overlap};
use crate::disk::map::{self, MapFile};
use crate::layers::checksums::{self, Compared};
use crate::layers::layer::{Layer, data_name, map_name};
use crate::pool::Pool;
use crate::volume::io_problem;
use crate::work::Work;

/// Bytes are copied in pieces of this size.
pub(crate) const PIECE_BLOCKS: u64 = 256;

/// Layers of one chain that become one, from the top down.
pub(crate) struct Run {
    pub(crate) rows: Vec<LayerRow>,
    /// The end of the layers below the run, in blocks.
    pub(crate) below_blocks: u64,
    /// The chain's topmost layer stands directly on the run, and nothing else does.
    is_below_top: bool,
}

/// What is to be merged of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// All that can be: the chain becomes as short as possible.
    All,
    /// Sealed layers with each other. The head stays small, because a volume that moves ships its head last.
    Sealed,
    /// The run with this layer, whose name was deleted.
    Released(LayerId),
}

/// A run of at most so many bytes is merged at once in the background.
const SMALL_BYTES: u64 = 1 << 30;
/// A larger one only when all but its largest layer have this part of that layer: a merge copies all of it, to give back no more than they
/// have.
const WORTH_PART: u64 = 8;
/// What work in the background leaves free for the volumes' clients: this part of the disk.
const SPARE_PART: u64 = 20;

impl Pool {
    /// Makes a volume's chain as short as it can be. It is not an error if nothing can be merged.
    ///
    /// # Errors
    /// Not found; a conflict when a layer is damaged or the chain changed in the meantime; no space;
    /// unavailable when the work was stopped. Runs that were merged before an error stay merged.
    pub async fn compact_volume(
        self: &Arc<Self>,
        name: &VolumeName,
        work: Arc<Work>,
    ) -> Result<Compacted, Problem> {
        self.compact(name, Wanted::All, work).await
    }

    /// Merges the sealed layers of a volume's deep chain.
    pub(crate) async fn compact_deep(
        self: &Arc<Self>,
        name: &VolumeName,
        work: Arc<Work>,
    ) -> Result<Compacted, Problem> {
        self.compact(name, Wanted::Sealed, work).await
    }

    async fn compact(
        self: &Arc<Self>,
        name: &VolumeName,
        wanted: Wanted,
        work: Arc<Work>,
    ) -> Result<Compacted, Problem> {
        let what = format!("can't compact volume {name}");
        let (named, now) = (name.clone(), what.clone());
        let head = self.run(move |pool| pool.head_of(&now, &named)).await?;
        self.merge_chain(what, head, Some(name), wanted, work).await
    }

    /// Merges the sealed layers below this one.
    pub(crate) async fn compact_below(
        self: &Arc<Self>,
        what: String,
        top: LayerId,
        work: Arc<Work>,
    ) -> Result<Compacted, Problem> {
        self.merge_chain(what, top, None, Wanted::Sealed, work).await
    }

    /// `top` is the head of the volume, if one is given.
    async fn merge_chain(
        self: &Arc<Self>,
        what: String,
        top: LayerId,
        volume: Option<&VolumeName>,
        wanted: Wanted,
        work: Arc<Work>,
    ) -> Result<Compacted, Problem> {
        let now = what.clone();
        let (runs, layers) = self.run(move |pool| pool.runs(&now, top)).await?;
        let mut done = Compacted { layers_before: layers, layers_after: layers, copied_bytes: 0 };
        for run in runs {
            let has = |layer: &LayerId| run.rows.iter().any(|row| row.id == *layer);
            let into = volume.filter(|_| run.is_below_top && wanted != Wanted::Sealed);
            let is_wanted = match &wanted {
                Wanted::All | Wanted::Sealed => true,
                Wanted::Released(layer) => has(layer),
            };
            if !is_wanted || (into.is_none() && run.rows.len() == 1) {
                continue;
            }
            let merged = run.rows.len() as u64;
            if let Wanted::Released(_) = wanted {
                let above = into.map(|_| top);
                let ids: Vec<_> = run.rows.iter().map(|row| row.id).chain(above).collect();
                if !self.run(move |pool| pool.is_worth(&ids)).await.map_err(failed(&what))? {
                    continue;
                }
            }
            let work = Arc::clone(&work);
            if let Some(volume) = into {
                done.copied_bytes += self.absorb(&what, volume, top, run, work).await?;
                done.layers_after -= merged;
            } else {
                done.copied_bytes += self.merge_into_one(&what, run, work).await?;
                done.layers_after -= merged - 1;
            }
        }
        Ok(done)
    }

    async fn merge_into_one(
        self: &Arc<Self>,
        what: &str,
        run: Run,
        work: Arc<Work>,
    ) -> Result<u64, Problem> {
        let now = what.to_owned();
        let (row, run) = self.run(move |pool| pool.merge(&now, run, &work)).await?;
        let copied_bytes = row.data_bytes.unwrap_or(0);
        // While this lock is held, no layer is sealed, cloned or named.
        let now = what.to_owned();
        self.change(move |pool| pool.put_in_place(&now, &run, &row)).await?;
        Ok(copied_bytes)
    }

    /// Merges a layer whose name was deleted into what stands on it, if that can be done now and is worth what it costs.
    pub(crate) async fn merge_released(
        self: &Arc<Self>,
        layer: LayerId,
        work: Arc<Work>,
    ) -> Result<(), Problem> {
        let what = format!("can't merge layer {layer}, which has no name any more,");
        let above = self.run(move |pool| pool.catalog.top_above(layer));
        let Some((top, volume)) = above.await.map_err(failed(&what))? else { return Ok(()) };
        let wanted = Wanted::Released(layer);
        let done = self.merge_chain(what, top, volume.as_ref(), wanted, work).await?;
        if done.layers_after < done.layers_before {
            let Compacted { layers_before, layers_after, copied_bytes } = done;
            tracing::info!(%layer, layers_before, layers_after, copied_bytes, "merged what was a snapshot");
        }
        Ok(())
    }

    /// Whether merging these layers gives back enough for what it copies.
    fn is_worth(&self, layers: &[LayerId]) -> rusqlite::Result<bool> {
        let spaces = self.catalog.layer_spaces(None)?;
        let bytes = layers.iter().filter_map(|id| Some(self.layer_bytes(*id, spaces.get(id)?)));
        let (total, largest) = bytes.fold((0_u64, 0), |(total, largest), bytes| {
            (total.saturating_add(bytes), bytes.max(largest))
        });
        Ok(total <= SMALL_BYTES || total - largest >= largest / WORTH_PART)
    }

    /// Refuses to copy more than there is space for. Work in the background leaves some for others.
    pub(crate) fn check_room(
        &self,
        what: &str,
        needed_bytes: u64,
        work: &Work,
    ) -> Result<(), Problem> {
        let disk = nix::sys::statvfs::statvfs(&self.dir)
            .map_err(|error| Problem::internal(what, error))?;
        let fragment = disk.fragment_size();
        let spare_bytes = disk.blocks() * fragment / SPARE_PART * u64::from(work.is_gentle());
        let free_bytes = (disk.blocks_available() * fragment).saturating_sub(spare_bytes);
        if needed_bytes <= free_bytes {
            return Ok(());
        }
        let [needed, free] = [needed_bytes, free_bytes].map(format_bytes);
        let why = format!("it has to copy {needed} first, and there is space for {free}");
        Err(Problem::no_space(what, why).next("free space in the pool"))
    }

    fn head_of(&self, what: &str, name: &VolumeName) -> Result<LayerId, Problem> {
        let volume = self.catalog.volume(name).map_err(failed(what))?;
        let why = "there is no such volume in this pool";
        Ok(volume.ok_or_else(|| Problem::not_found(what, why))?.head)
    }

    /// The runs below a layer from the top down, and the number of layers in the chain, `top` included.
    pub(crate) fn runs(&self, what: &str, top: LayerId) -> Result<(Vec<Run>, u64), Problem> {
        let rows = self.catalog.chain(top).map_err(failed(what))?;
        let spaces = self.catalog.layer_spaces(Some(top)).map_err(failed(what))?;
        // Copies that are not complete are not merged.
        let kept = self.catalog.layers_kept_for_others().map_err(failed(what))?;
        let space = |row: &LayerRow| spaces.get(&row.id);
        let free = |row: &LayerRow| {
            let is_named = space(row).is_none_or(|space| space.named);
            !row.is_copy() && !kept.contains(&row.id) && !is_named
        };
        let is_alone = |row: &LayerRow| space(row).is_some_and(|space| space.children == 1);
        let sealed = &rows[1..];
        let mut runs = Vec::new();
        let mut at = 0;
        while at < sealed.len() {
            // Several may stand on the topmost layer of a run: all of them get the merged one.
            let length = match free(&sealed[at]) {
                false => 0,
                true => {
                    let next = sealed[at + 1..].iter();
                    1 + next.take_while(|row| free(row) && is_alone(row)).count()
                }
            };
            let end = at + length;
            if length > 0 {
                let rows = sealed[at..end].to_vec();
                let is_below_top = at == 0 && is_alone(&rows[0]);
                let remote = rows.last().and_then(|row| row.remote.as_ref());
                let below = sealed.get(end).map(|row| row.size_bytes);
                let below_bytes = below.or(remote.map(|remote| remote.size_bytes)).unwrap_or(0);
                let below_blocks = below_bytes.div_ceil(BLOCK_BYTES);
                runs.push(Run { rows, below_blocks, is_below_top });
            }
            at = end.max(at + 1);
        }
        Ok((runs, rows.len() as u64))
    }

    /// Makes the files of the merged layer.
    pub(crate) fn merge(
        &self,
        what: &str,
        run: Run,
        work: &Work,
    ) -> Result<(LayerRow, Run), Problem> {
        let layers = self.open_run(what, &run, work)?;
        let data_bytes = layers.iter().map(Layer::data_bytes).fold(0, u64::saturating_add);
        self.check_room(what, data_bytes, work)?;
        self.check_before_merge(what, &layers, work)?;
        let id = LayerId(Uuid::new_v4());
        let made = self.copy(id, &layers, run.below_blocks, work);
        let states = made.map_err(|error| {
            self.remove_layers(&[id]);
            stopped_or_failed(what, error)
        })?;
        let (top, bottom) = (&run.rows[0], &run.rows[run.rows.len() - 1]);
        let row = LayerRow {
            remote: bottom.remote.clone(),
            data_bytes: Some(states.data_bytes()),
            ..LayerRow::new(id, top.size_bytes, bottom.parent)
        };
        Ok((row, run))
    }

    /// The layers of a run, from the top down.
    pub(crate) fn open_run(
        &self,
        what: &str,
        run: &Run,
        work: &Work,
    ) -> Result<Vec<Layer>, Problem> {
        let mut layers = Vec::new();
        for row in &run.rows {
            let layer = self.open_sealed(row).map_err(|error| Problem::conflict(what, error))?;
            // Each layer is read twice: to compare it, and to copy it.
            work.expect(2 * layer.data_bytes());
            layers.push(layer);
        }
        Ok(layers)
    }

    pub(crate) fn check_before_merge(
        &self,
        what: &str,
        layers: &[Layer],
        work: &Work,
    ) -> Result<(), Problem> {
        for layer in layers.iter().filter(|layer| layer.has_files()) {
            let compared = checksums::compare(&*self.files, layer, work);
            match compared.map_err(|error| stopped_or_failed(what, error))? {
                Compared::WithoutChecksums => {
                    work.step(layer.data_bytes()).map_err(|error| stopped_or_failed(what, error))?
                }
                Compared::Data { findings, .. } if findings.is_empty() => {}
                Compared::Data { .. } | Compared::DamagedChecksums(_) => {
                    let why = format!("layer {} is damaged", layer.id);
                    return Err(Problem::conflict(what, why)
                        .next("`perigee volume check` shows what is damaged"));
                }
            }
        }
        Ok(())
    }

    /// Writes the visible blocks of these layers into a new layer, durably.
    fn copy(
        &self,
        id: LayerId,
        layers: &[Layer],
        below_blocks: u64,
        work: &Work,
    ) -> io::Result<BlockStates> {
        let blocks = layers[0].blocks();
        let states = BlockStates::new(blocks);
        let data = self.files.create(&data_name(id), blocks * BLOCK_BYTES)?;
        let mut buffer = vec![0; index(PIECE_BLOCKS * BLOCK_BYTES)];
        for (_, part) in by_page(0..blocks) {
            for (run, shown) in showing(layers, part) {
                match shown {
                    Shown::Nothing => {}
                    // Zeros are needed only where a layer below the run could show through.
                    Shown::Zeros => states.set(overlap(&run, &(0..below_blocks)), BlockState::Zero),
                    Shown::Data(layer) => {
                        for start in (run.start..run.end).step_by(index(PIECE_BLOCKS)) {
                            let length = (run.end - start).min(PIECE_BLOCKS) * BLOCK_BYTES;
                            let piece = &mut buffer[..index(length)];
                            layer.data().read_at(start * BLOCK_BYTES, piece)?;
                            data.write_at(start * BLOCK_BYTES, piece)?;
                            work.step(length)?;
                        }
                        states.set(run, BlockState::Data);
                    }
                }
            }
        }
        data.sync_created()?;
        let map = self.files.create(&map_name(id), map::file_bytes(blocks))?;
        MapFile::create(map, id, &states)?;
        self.files.sync_names()?;
        Ok(states)
    }

    /// Replaces the run by the new layer, in the catalog and in open volumes. The caller holds the lock
    /// `changes`.
    pub(crate) fn put_in_place(
        &self,
        what: &str,
        run: &Run,
        row: &LayerRow,
    ) -> Result<(), Problem> {
        let old: Vec<LayerId> = run.rows.iter().map(|row| row.id).collect();
        let replaced = self.catalog.replace_layers(&old, row);
        match replaced {
            Ok(true) => {}
            Ok(false) => {
                self.remove_layers(&[row.id]);
                return Err(changed(what));
            }
            Err(error) => return Err(self.not_recorded(what, &[row.id], &error)),
        }
        self.forget_merged(&old);
        Ok(())
    }

    /// Open volumes use the new chains from now on, and the files of these layers are removed.
    pub(crate) fn forget_merged(&self, old: &[LayerId]) {
        if let Err(error) = self.reopen_chains(old) {
            // Their chains in memory have the same bytes, in files that stay open.
            tracing::error!(%error, "volumes keep their old chains until the next start");
        }
        self.remove_layers(old);
        self.note_sealed();
    }
}

pub(crate) fn changed(what: &str) -> Problem {
    let why = "a layer of it was named, cloned, deleted or given to another host meanwhile";
    Problem::conflict(what, why).next("compact it again")
}

pub(crate) fn stopped_or_failed(what: &str, error: io::Error) -> Problem {
    if error.kind() == io::ErrorKind::Interrupted {
        Problem::unavailable(what, error)
    } else {
        io_problem(what, &error.into())
    }
}

/// The visible content of a block in a stack of layers.
pub(crate) enum Shown<'a> {
    /// None of the layers has the block; the layers below are visible.
    Nothing,
    Zeros,
    Data(&'a Layer),
}

/// Runs of blocks in order, with their visible content.
pub(crate) fn showing(layers: &[Layer], blocks: Range<u64>) -> Vec<(Range<u64>, Shown<'_>)> {
    let Some((top, below)) = layers.split_first() else {
        return vec![(blocks, Shown::Nothing)];
    };
    let mut found = Vec::new();
    let inside = overlap(&blocks, &(0..top.blocks()));
    for (run, state) in top.states.runs(inside.clone()) {
        match state {
            BlockState::Data => found.push((run, Shown::Data(top))),
            BlockState::Zero => found.push((run, Shown::Zeros)),
            BlockState::Absent => found.extend(showing(below, run)),
            BlockState::Remote => unreachable!("an opened layer has all its blocks here"),
        }
    }
    let beyond = inside.end.max(blocks.start)..blocks.end;
    if !beyond.is_empty() {
        // Beyond the end of a layer, the layers below are not visible.
        found.push((beyond, Shown::Zeros));
    }
    found
}
