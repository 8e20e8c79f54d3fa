//! The answers of work that may take long: progress, then the result. Such work is checking a pool and
//! merging layers, for example.

use serde::{Deserialize, Serialize};

use crate::{ImageName, LayerId, VolumeName};

/// One line of a long answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step<T> {
    /// The progress so far; more lines follow.
    Progress(Progress),
    /// The result, and the last line.
    Done(T),
    /// Why there is no result; the last line.
    Failed(crate::Problem),
}

/// The progress of long work. The total may grow while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Bytes that are checked or copied.
    pub done_bytes: u64,
    /// All bytes to check or copy, as far as this is known now.
    pub total_bytes: u64,
}

/// The result of merging the layers of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compacted {
    /// Number of layers before, with the head.
    pub layers_before: u64,
    /// Number of layers afterwards, with the head.
    pub layers_after: u64,
    /// Bytes that were written into the new layers.
    pub copied_bytes: u64,
}

/// What to check: the layers of one volume or image, or the whole pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckScope {
    /// Every layer, the catalog, and files that are not needed any more.
    Pool,
    /// The layers of this volume's chain.
    Volume(VolumeName),
    /// The layers of this image's chain.
    Image(ImageName),
}

/// The result of a check. If it has no faults, the checked layers are sound.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct CheckReport {
    /// Number of layers that were checked.
    pub layers: u64,
    /// Bytes that were read and compared with their checksums.
    pub compared_bytes: u64,
    /// The faults that were found.
    pub faults: Vec<Fault>,
    /// Sealed layers that have no checksums yet; the volume server makes them in the background.
    pub without_checksums: Vec<LayerId>,
    /// Files that are not needed any more. The volume server removes them when it starts.
    pub leftovers: Vec<String>,
}

/// What is damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// SQLite finds the catalog damaged.
    Catalog,
    /// A layer's file does not exist.
    Missing,
    /// A layer's map is damaged: its blocks are not known.
    Map,
    /// Data differ from the sealed data, or can't be read.
    Data,
    /// The checksums themselves are damaged.
    Checksums,
}

/// One fault that a check found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Which part of the pool is damaged.
    pub kind: FaultKind,
    /// What is wrong, in plain words.
    pub what: String,
    /// The damaged layer; `None` for the catalog.
    pub layer: Option<LayerId>,
    /// The damaged bytes of the layer; `None` for the whole layer.
    pub range: Option<ByteRange>,
    /// Some of the volumes and images that have the layer in their chain: `volume NAME`, `image NAME`.
    pub used_by: Vec<String>,
    /// The number of all such volumes and images.
    pub users: u64,
}

/// A run of bytes of a layer or a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByteRange {
    /// The offset of the first byte.
    pub offset: u64,
    /// Number of bytes.
    pub length_bytes: u64,
}
