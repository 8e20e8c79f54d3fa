//! One layer's data and states, for readers. Volumes that share a sealed layer share this object, and so
//! share one file, one inode and its page cache.

use std::io;
use std::sync::{Arc, OnceLock};

use perigee_model::LayerId;
use perigee_model::volume::{BLOCK_BYTES, CachePolicy};

use crate::disk::blocks::BlockStates;
use crate::disk::files::{BlockFile, LayerFiles};
use crate::disk::map::{self, MapError, MapFile};

/// The reason why a layer can't be opened.
#[derive(Debug, thiserror::Error)]
#[error("layer {layer}: {source}")]
pub(crate) struct LayerError {
    pub(crate) layer: LayerId,
    pub(crate) source: MapError,
}

/// A layer's data and the states of its blocks.
pub(crate) struct Layer {
    pub(crate) id: LayerId,
    /// Empty as long as the layer has no blocks.
    data: OnceLock<Arc<dyn BlockFile>>,
    /// Only the [`crate::layers::head::Head`] of this layer changes them, and never after sealing.
    pub(crate) states: BlockStates,
}

/// The file with the blocks, each at its place.
pub(crate) fn data_name(layer: LayerId) -> String {
    format!("{layer}.data")
}

/// The file with the durable map ([`crate::disk::map`]).
pub(crate) fn map_name(layer: LayerId) -> String {
    format!("{layer}.map")
}

/// The file with the live map ([`crate::disk::live`]).
pub(crate) fn live_name(layer: LayerId) -> String {
    format!("{layer}.live")
}

/// The file with the checksums ([`crate::layers::checksums`]).
pub(crate) fn checksums_name(layer: LayerId) -> String {
    format!("{layer}.sum")
}

/// Removes a layer's files.
pub(crate) fn remove(files: &dyn LayerFiles, layer: LayerId) -> io::Result<()> {
    files.remove(&live_name(layer))?;
    files.remove(&checksums_name(layer))?;
    files.remove(&map_name(layer))?;
    files.remove(&data_name(layer))
}

/// As [`remove`], durably: after a power cut, old files of this layer must not come back beside its new
/// ones.
pub(crate) fn clear(files: &dyn LayerFiles, layer: LayerId) -> io::Result<()> {
    remove(files, layer)?;
    files.sync_names()
}

/// Whether any file of a layer exists.
pub(crate) fn has_any_file(files: &dyn LayerFiles, layer: LayerId) -> io::Result<bool> {
    for name in [data_name(layer), map_name(layer), live_name(layer)] {
        match files.open(&name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            found => return found.map(|_| true),
        }
    }
    Ok(false)
}

/// Whether an untouched layer has everything that a flush makes durable: both files with their length, and
/// the map's header. After a power cut without an acknowledged flush any part of this may be missing.
pub(crate) fn was_flushed(
    files: &dyn LayerFiles,
    id: LayerId,
    size_bytes: u64,
) -> Result<bool, LayerError> {
    let found = || -> io::Result<bool> {
        let (data, map) = (files.open(&data_name(id))?, files.open(&map_name(id))?);
        Ok(data.len()? == size_bytes
            && map.len()? == map::file_bytes(size_bytes / BLOCK_BYTES)
            && map::has_header(&*map)?)
    };
    match found() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        found => found.map_err(|error| LayerError { layer: id, source: error.into() }),
    }
}

/// Refuses the map of an incomplete copy.
pub(crate) fn check_all_here(states: &BlockStates) -> Result<(), MapError> {
    if states.remote_bytes() == 0 { Ok(()) } else { Err(MapError::States) }
}

impl Layer {
    /// A layer without blocks and without files.
    pub(crate) fn empty(id: LayerId, size_bytes: u64) -> Self {
        Self { id, data: OnceLock::new(), states: BlockStates::new(size_bytes / BLOCK_BYTES) }
    }

    pub(crate) fn new(id: LayerId, data: Arc<dyn BlockFile>, states: BlockStates) -> Self {
        Self { id, data: data.into(), states }
    }

    /// Opens a sealed layer. `untouched` comes from the catalog.
    pub(crate) fn open(
        files: &dyn LayerFiles,
        id: LayerId,
        size_bytes: u64,
        untouched: bool,
    ) -> Result<Self, LayerError> {
        if untouched && !was_flushed(files, id, size_bytes)? {
            return Ok(Self::empty(id, size_bytes));
        }
        let open = || {
            let data = files.open(&data_name(id))?;
            let map = files.open(&map_name(id))?;
            let (_, states) = MapFile::load(map, id, size_bytes / BLOCK_BYTES)?;
            check_all_here(&states)?;
            Ok(Self::new(id, data, states))
        };
        open().map_err(|source| LayerError { layer: id, source })
    }

    /// A layer to which nothing was ever written has no files.
    pub(crate) fn has_files(&self) -> bool {
        self.data.get().is_some()
    }

    /// The data file. It exists as soon as a block is data.
    pub(crate) fn data(&self) -> &Arc<dyn BlockFile> {
        self.data.get().expect("a layer gets its data file before its first block")
    }

    /// Gives an empty layer its data file.
    pub(crate) fn set_data(&self, data: Arc<dyn BlockFile>) {
        assert!(self.data.set(data).is_ok(), "a layer gets its data file once");
    }

    /// Sets whether its data goes through the page cache. A filesystem that can't bypass the cache is
    /// accepted.
    pub(crate) fn set_cache(&self, policy: CachePolicy) {
        if let Some(Err(error)) = self.data.get().map(|data| data.set_cache(policy)) {
            tracing::warn!(layer = %self.id, %error, "can't bypass the page cache for a layer's data");
        }
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.states.blocks()
    }

    /// The bytes of all blocks that are data.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.states.data_bytes()
    }
}
