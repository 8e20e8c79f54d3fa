//! One layer's bytes and states, as readers see it. Volumes that share a sealed layer share this
//! object, hence one file, one inode and one page cache.

use std::io;
use std::ops::Range;
use std::sync::{Arc, RwLock};

use perigee_model::LayerId;
use perigee_model::volume::BLOCK_BYTES;

use super::blocks::{BlockState, BlockStates};
use super::files::{BlockFile, LayerFiles};
use super::map::{MapError, MapFile};

/// Why a layer can't be opened.
#[derive(Debug, thiserror::Error)]
#[error("layer {layer}: {source}")]
pub(super) struct LayerError {
    pub(super) layer: LayerId,
    pub(super) source: MapError,
}

pub(super) struct Layer {
    pub(super) id: LayerId,
    pub(super) data: Arc<dyn BlockFile>,
    /// Changed only by the [`super::head::Head`] that has this layer, never after sealing.
    pub(super) states: RwLock<BlockStates>,
}

pub(super) fn data_name(layer: LayerId) -> String {
    format!("{layer}.data")
}

pub(super) fn map_name(layer: LayerId) -> String {
    format!("{layer}.map")
}

pub(super) fn live_name(layer: LayerId) -> String {
    format!("{layer}.live")
}

/// Removes what a layer has on disk.
pub(super) fn remove(files: &dyn LayerFiles, layer: LayerId) -> io::Result<()> {
    files.remove(&live_name(layer))?;
    files.remove(&map_name(layer))?;
    files.remove(&data_name(layer))
}

impl Layer {
    /// Opens a sealed layer.
    pub(super) fn open(
        files: &dyn LayerFiles,
        id: LayerId,
        size_bytes: u64,
    ) -> Result<Self, LayerError> {
        let open = || {
            let data = files.open(&data_name(id))?;
            let map = files.open(&map_name(id))?;
            let (_, states) = MapFile::load(map, id, size_bytes / BLOCK_BYTES)?;
            Ok(Self { id, data, states: RwLock::new(states) })
        };
        open().map_err(|source| LayerError { layer: id, source })
    }

    pub(super) fn blocks(&self) -> u64 {
        self.states.read().expect("no holder panics").blocks()
    }

    /// Runs of equal state that together are `range`, which lies within the layer.
    pub(super) fn runs(&self, range: Range<u64>) -> Vec<(Range<u64>, BlockState)> {
        self.states.read().expect("no holder panics").runs(range).collect()
    }

    pub(super) fn data_bytes(&self) -> u64 {
        self.states.read().expect("no holder panics").data_bytes()
    }
}
