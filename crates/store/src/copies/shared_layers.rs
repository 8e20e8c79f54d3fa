//! What a volume of another host has in common with the layers of this pool. Only the difference has to be read from
//! the volume's home.
//!
//! The home tells which sealed layers are below the volume's head ([`Pool::open_layers_of`]), and which blocks the
//! volume has above one of them ([`Pool::open_since`]). A sealed layer shows the same bytes on every host that has all
//! of it: the last complete point of a replica, an image, or what a move has left. So every block that the volume does
//! not have above the topmost layer that is here can be read here.
//!
//! This is true only for the moment when the home answered. The caller reports later writes of this host with
//! [`SharedLayers::note_write`], and drops the answer when other hosts may have written.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use perigee_block::device::{Device, Extent, IoError, Zeroing};
use perigee_block::exports::{LAYERS_SUFFIX, SINCE_INFIX};
use perigee_model::volume::{BLOCK_BYTES, Keep};
use perigee_model::{LayerId, Problem, VolumeName};
use uuid::Uuid;

use crate::catalog::{self, LayerRow, RemoteRow};
use crate::copies::incoming_layers::CHAIN_MAX;
use crate::disk::blocks::check_range;
use crate::disk::blocks::{BlockState, BlockStates, index, overlap};
use crate::layers::remote::RemoteParent;
use crate::pool::Pool;
use crate::volume::session::read_only;
use crate::volume::{Volume, io_problem};

/// The bytes of a layer's id in the export of a volume's layers.
const ID_BYTES: usize = 16;

/// A layer of this pool on which a volume of another host stands, and the blocks that the volume has above it.
pub struct SharedLayers {
    layer: LayerId,
    here: Arc<dyn Device>,
    /// Blocks that are not absent have to be read from the home.
    changed: BlockStates,
}

/// What a home has told of a volume, compared with the layers of this pool.
pub enum Compared {
    /// They have nothing in common, or nothing any more.
    Nothing,
    /// The layer that is known already.
    Same,
    /// Another layer than before.
    Other(SharedLayers),
}

impl SharedLayers {
    /// `here` shows the first `blocks` blocks of the volume, except those in `changed`.
    pub fn new(layer: LayerId, here: Arc<dyn Device>, blocks: u64, changed: &[Range<u64>]) -> Self {
        let common = Self { layer, here, changed: BlockStates::new(blocks) };
        changed.iter().for_each(|run| common.note_write(run));
        common
    }

    /// The layer of this pool.
    pub fn layer(&self) -> LayerId {
        self.layer
    }

    /// The layer's content: what the volume had when the layer was sealed.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.here
    }

    /// How much has to be read from the home, within the size of the layer.
    pub fn changed_bytes(&self) -> u64 {
        self.changed.remote_bytes() + self.changed.known_bytes()
    }

    /// From now on these blocks are read from the home.
    pub fn note_write(&self, blocks: &Range<u64>) {
        let within = overlap(blocks, &(0..self.changed.blocks()));
        if !within.is_empty() {
            self.changed.set(within, BlockState::Remote);
        }
    }

    /// Splits a range of blocks, and says which runs can be read here.
    pub fn runs(&self, blocks: &Range<u64>) -> Vec<(Range<u64>, bool)> {
        let mut runs: Vec<(Range<u64>, bool)> = Vec::new();
        let mut add = |run: Range<u64>, is_here| match runs.last_mut() {
            _ if run.is_empty() => {}
            Some((last, same)) if *same == is_here => last.end = run.end,
            _ => runs.push((run, is_here)),
        };
        let within = overlap(blocks, &(0..self.changed.blocks()));
        for (run, state) in self.changed.runs(within.clone()) {
            add(run, state == BlockState::Absent);
        }
        add(within.end.max(blocks.start)..blocks.end, false);
        runs
    }

    /// Whether all these blocks can be read here.
    pub fn has(&self, blocks: &Range<u64>) -> bool {
        blocks.end <= self.changed.blocks() && self.changed.all_are(blocks, BlockState::Absent)
    }
}

impl Pool {
    /// The ids of the sealed layers below a volume's head, topmost first, as the content of an export.
    ///
    /// # Errors
    /// Not found when the volume is not here or stands on no layer.
    pub async fn open_layers_of(
        self: &Arc<Self>,
        name: &VolumeName,
    ) -> Result<Arc<dyn Device>, Problem> {
        let what = format!("can't say on which layers volume {name} stands");
        let volume = self.volume(name).await?;
        let stack = volume.stack();
        let layers = stack.below.layers().take(CHAIN_MAX);
        let ids: Vec<u8> = layers.flat_map(|layer| *layer.id.0.as_bytes()).collect();
        match ids.is_empty() {
            true => Err(Problem::not_found(what, "it stands on none")),
            false => Ok(Arc::new(InMemory(ids.into()))),
        }
    }

    /// Which blocks a volume has above one of its sealed layers, as the extents of an export. A block that it does
    /// not have there is a hole that is not known to be zeros. The export ends where the layer or one above it ends.
    ///
    /// # Errors
    /// Not found when the volume is not here or does not stand on the layer.
    pub async fn open_since(
        self: &Arc<Self>,
        name: &VolumeName,
        layer: LayerId,
    ) -> Result<Arc<dyn Device>, Problem> {
        let volume = self.volume(name).await?;
        let Some(blocks) = volume.stack().chain().blocks_since(layer).filter(|end| *end > 0) else {
            let what = format!("can't say what volume {name} has above layer {layer}");
            return Err(Problem::not_found(what, "it does not stand on that layer"));
        };
        Ok(Arc::new(Since { volume, layer, size_bytes: blocks * BLOCK_BYTES }))
    }

    /// Finds what a volume at this address has in common with this pool. The layer `known` is known already.
    /// Layers that are `unreadable`, and those that stand on them, are passed over.
    ///
    /// # Errors
    /// When the home does not answer, or does not tell this.
    pub async fn common_with(
        self: &Arc<Self>,
        volume: &VolumeName,
        nbd_addr: &str,
        known: Option<LayerId>,
        unreadable: &[LayerId],
    ) -> Result<Compared, Problem> {
        let what = format!("can't compare volume {volume} at {nbd_addr} with the layers here");
        let export = format!("{volume}{LAYERS_SUFFIX}");
        let told = (self.connect.connect)(nbd_addr.to_owned(), export).await?;
        let length = u32::try_from(told.size_bytes().min((CHAIN_MAX * ID_BYTES) as u64));
        let ids = told.read(0, length.unwrap_or(u32::MAX)).await;
        let ids = ids.map_err(|error| io_problem(&what, &error))?;
        let ids = ids.as_chunks::<ID_BYTES>().0.iter().map(|id| LayerId(Uuid::from_bytes(*id)));
        let ids: Vec<LayerId> = ids.collect();
        let (now, unreadable) = (what.clone(), unreadable.to_vec());
        let found = self.run(move |pool| pool.topmost_here(&now, &ids, &unreadable)).await?;
        let Some(layer) = found else { return Ok(Compared::Nothing) };
        if known == Some(layer) {
            return Ok(Compared::Same);
        }
        let here = self.open_layer(layer).await?;
        let export = format!("{volume}{SINCE_INFIX}{layer}");
        let since = (self.connect.connect)(nbd_addr.to_owned(), export.clone()).await?;
        let size_bytes = since.size_bytes();
        if size_bytes > here.size_bytes() || !size_bytes.is_multiple_of(BLOCK_BYTES) {
            let why = format!("the home describes {size_bytes} bytes, and the layer has fewer");
            return Err(Problem::internal(what, why)
                .next("check that both hosts run the same version of perigee"));
        }
        let (nbd_addr, keep) = (nbd_addr.to_owned(), Keep::Never);
        // As for a layer's own blocks: a block that is no hole is there.
        let row = RemoteRow { nbd_addr, export, size_bytes, keep, is_layer: None, own: true };
        let remote = RemoteParent::connected(row, &self.connect, since)
            .map_err(|why| Problem::conflict(&what, why))?;
        let changed = remote.own_states().await.map_err(|error| io_problem(&what, &error))?;
        Ok(Compared::Other(SharedLayers { layer, here, changed }))
    }

    /// The topmost of these layers that is complete in this pool and can be read.
    fn topmost_here(
        &self,
        what: &str,
        layers: &[LayerId],
        unreadable: &[LayerId],
    ) -> Result<Option<LayerId>, Problem> {
        let failed = |error| catalog::problem(what, &error);
        let is_whole = |row: &LayerRow| {
            row.remote.is_none() && row.poisoned.is_none() && !unreadable.contains(&row.id)
        };
        for layer in layers {
            if self.catalog.has_layer(*layer).map_err(failed)?
                && self.catalog.is_sealed(*layer).map_err(failed)?
                && self.catalog.chain(*layer).map_err(failed)?.iter().all(is_whole)
            {
                return Ok(Some(*layer));
            }
        }
        Ok(None)
    }
}

/// See [`Pool::open_layers_of`].
struct InMemory(Bytes);

impl Device for InMemory {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move {
            check_range(self.size_bytes(), offset, length_bytes.into())?;
            Ok(self.0.slice(index(offset)..index(offset + u64::from(length_bytes))))
        })
    }

    read_only!();

    fn extents(&self, _: u64, length: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(async move { Ok(vec![Extent { length_bytes: length, hole: false, zero: false }]) })
    }
}

/// See [`Pool::open_since`].
struct Since {
    volume: Arc<Volume>,
    layer: LayerId,
    size_bytes: u64,
}

impl Device for Since {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, _: u64, _: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async { Err(IoError::Invalid("this export has extents only".to_owned())) })
    }

    read_only!();

    fn extents(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(async move {
            self.volume.check_here()?;
            let stack = self.volume.stack();
            // The volume may have become smaller, or its layers merged.
            let end = stack.chain().blocks_since(self.layer).unwrap_or(0);
            if end * BLOCK_BYTES < self.size_bytes {
                let why = format!("the volume does not stand on layer {} any more", self.layer);
                return Err(IoError::Invalid(why));
            }
            check_range(self.size_bytes, offset, length_bytes)?;
            Ok(stack.chain().extents_since(self.layer, offset, length_bytes))
        })
    }
}
