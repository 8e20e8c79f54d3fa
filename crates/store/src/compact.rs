//! Compaction: merges the sealed layers of a chain that nothing else needs.
//!
//! A run of layers without names, where each has only the next one above it, becomes one layer:
//!
//! 1. The layers are compared with their checksums, so that damage is not sealed again.
//! 2. The visible blocks are copied into a new layer's files, which are made durable.
//! 3. One catalog transaction replaces the run by the new layer. It does not if a layer of the run was named or
//!    cloned in the meantime, or if another host may be reading one.
//! 4. Open volumes get the new chain while clients use them, and the files of the run are removed.
//!
//! A crash before 3 leaves the old chain and files that the next server removes; a crash after it
//! leaves the new chain. A read that began before 4 ends in the old files, which are still open.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use perigee_model::volume::{BLOCK_BYTES, Compacted};
use perigee_model::{LayerId, Problem, VolumeName};
use uuid::Uuid;

use super::blocks::{BlockState, BlockStates, by_page, index, overlap};
use super::catalog::{LayerRow, failed};
use super::checksums::{self, Compared};
use super::layer::{Layer, data_name, map_name};
use super::map::{self, MapFile};
use super::pool::Pool;
use super::volume::io_problem;
use super::work::Work;

/// Bytes are copied in pieces of this size.
const PIECE_BLOCKS: u64 = 256;

/// Layers of one chain that are merged into one, from the top down.
pub(super) struct Run {
    rows: Vec<LayerRow>,
    /// The end of the layers below the run, in blocks.
    below_blocks: u64,
}

impl Pool {
    /// Merges all layers that can be merged in a volume's chain. It is not an error if there are none.
    ///
    /// # Errors
    /// Not found; a conflict when a layer is damaged or the chain changed in the meantime; no space;
    /// unavailable when the work was stopped. Runs that were merged before an error stay merged.
    pub async fn compact_volume(
        self: &Arc<Self>,
        name: &VolumeName,
        work: Arc<Work>,
    ) -> Result<Compacted, Problem> {
        let what = format!("can't compact volume {name}");
        let (named, now) = (name.clone(), what.clone());
        let head = self.run(move |pool| pool.head_of(&now, &named)).await?;
        self.compact_below(what, head, work).await
    }

    /// Merges all layers that can be merged below this one.
    pub(super) async fn compact_below(
        self: &Arc<Self>,
        what: String,
        top: LayerId,
        work: Arc<Work>,
    ) -> Result<Compacted, Problem> {
        let now = what.clone();
        let (runs, layers) = self.run(move |pool| pool.runs(&now, top)).await?;
        let mut done = Compacted { layers_before: layers, layers_after: layers, copied_bytes: 0 };
        for run in runs {
            let merged = run.rows.len() as u64;
            let (now, work) = (what.clone(), Arc::clone(&work));
            let (row, run) = self.run(move |pool| pool.merge(&now, run, &work)).await?;
            let copied_bytes = row.data_bytes.unwrap_or(0);
            // While this lock is held, no layer is sealed, cloned or named.
            let now = what.clone();
            self.change(move |pool| pool.put_in_place(&now, &run, &row)).await?;
            done.layers_after -= merged - 1;
            done.copied_bytes += copied_bytes;
        }
        Ok(done)
    }

    fn head_of(&self, what: &str, name: &VolumeName) -> Result<LayerId, Problem> {
        let volume = self.catalog.volume(name).map_err(failed(what))?;
        let why = "there is no such volume in this pool";
        Ok(volume.ok_or_else(|| Problem::not_found(what, why))?.head)
    }

    /// The runs below a layer from the top down, and the number of layers in the chain, `top` included.
    pub(super) fn runs(&self, what: &str, top: LayerId) -> Result<(Vec<Run>, u64), Problem> {
        let rows = self.catalog.chain(top).map_err(failed(what))?;
        let spaces = self.catalog.layer_spaces(Some(top)).map_err(failed(what))?;
        // Copies that are not complete are not merged.
        let kept = self.catalog.layers_kept_for_others().map_err(failed(what))?;
        let own = |row: &LayerRow| {
            !row.is_copy()
                && !kept.contains(&row.id)
                && spaces.get(&row.id).is_some_and(|space| !space.is_shared())
        };
        let sealed = &rows[1..];
        let mut runs = Vec::new();
        let mut at = 0;
        while at < sealed.len() {
            let end = at + sealed[at..].iter().take_while(|row| own(row)).count();
            if end - at > 1 {
                let rows = sealed[at..end].to_vec();
                let remote = rows.last().and_then(|row| row.remote.as_ref());
                let below = sealed.get(end).map(|row| row.size_bytes);
                let below_bytes = below.or(remote.map(|remote| remote.size_bytes)).unwrap_or(0);
                runs.push(Run { rows, below_blocks: below_bytes.div_ceil(BLOCK_BYTES) });
            }
            at = end + 1;
        }
        Ok((runs, rows.len() as u64))
    }

    /// Makes the files of the merged layer.
    pub(super) fn merge(
        &self,
        what: &str,
        run: Run,
        work: &Work,
    ) -> Result<(LayerRow, Run), Problem> {
        let mut layers = Vec::new();
        for row in &run.rows {
            let layer = self.open_sealed(row).map_err(|error| Problem::conflict(what, error))?;
            // Each layer is read twice: to compare it, and to copy it.
            work.expect(2 * layer.data_bytes());
            layers.push(layer);
        }
        for layer in &layers {
            self.check_before_merge(what, layer, work)?;
        }
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

    fn check_before_merge(&self, what: &str, layer: &Layer, work: &Work) -> Result<(), Problem> {
        if !layer.has_files() {
            return Ok(());
        }
        let compared = checksums::compare(&*self.files, layer, work);
        match compared.map_err(|error| stopped_or_failed(what, error))? {
            Compared::WithoutChecksums => work.step(layer.data_bytes()),
            Compared::Data { findings, .. } if findings.is_empty() => Ok(()),
            Compared::Data { .. } | Compared::DamagedChecksums(_) => {
                let why = format!("layer {} is damaged", layer.id);
                return Err(Problem::conflict(what, why)
                    .next("`perigee volume check` shows what is damaged"));
            }
        }
        .map_err(|error| stopped_or_failed(what, error))
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
    pub(super) fn put_in_place(
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
                let why =
                    "a layer of it was named, cloned, deleted or given to another host meanwhile";
                return Err(Problem::conflict(what, why).next("compact it again"));
            }
            Err(error) => return Err(self.not_recorded(what, &[row.id], &error)),
        }
        if let Err(error) = self.reopen_chains(&old) {
            // Their chains in memory have the same bytes, in files that stay open.
            tracing::error!(%error, "volumes keep their old chains until the next start");
        }
        self.remove_layers(&old);
        self.note_sealed();
        Ok(())
    }
}

fn stopped_or_failed(what: &str, error: io::Error) -> Problem {
    if error.kind() == io::ErrorKind::Interrupted {
        Problem::unavailable(what, error)
    } else {
        io_problem(what, &error.into())
    }
}

/// The visible content of a block in a stack of layers.
enum Shown<'a> {
    /// None of the layers has the block; the layers below are visible.
    Nothing,
    Zeros,
    Data(&'a Layer),
}

/// Runs of blocks in order, with their visible content.
fn showing(layers: &[Layer], blocks: Range<u64>) -> Vec<(Range<u64>, Shown<'_>)> {
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
