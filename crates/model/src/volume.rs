//! What the volume server speaks: images, volumes, attachments, epochs and I/O figures.
//!
//! HTTP/JSON on a unix socket and on TCP, every path below `/v1`:
//!
//! | method and path | body | answer |
//! |---|---|---|
//! | `GET /pool` | | [`PoolInfo`] |
//! | `GET /images`, `GET /images/{image}` | | [`ImageInfo`] |
//! | `POST /images` | [`ImportImage`] | [`ImageInfo`] |
//! | `DELETE /images/{image}` | | |
//! | `POST /images/{image}/copy` | [`CopyImage`] | [`ImageInfo`] |
//! | `PUT /images/{image}/keep` | [`Keep`] | [`ImageInfo`] |
//! | `POST /images/{image}/fill` | | lines of [`Step`] of [`ImageInfo`] |
//! | `GET /volumes`, `GET /volumes/{volume}` | | [`VolumeInfo`] |
//! | `POST /volumes` | [`CreateVolume`] | [`VolumeInfo`] |
//! | `POST /batch/volumes` | [`CreateVolumes`] | [`VolumeInfo`], all of them or none |
//! | `DELETE /volumes/{volume}?owner=OWNER` | | not found unless it carries that owner, where one is named |
//! | `POST /volumes/{volume}/snapshot` | [`Snapshot`] | [`ImageInfo`] |
//! | `POST /volumes/{volume}/resize` | [`Resize`] | [`VolumeInfo`] |
//! | `POST /volumes/{volume}/compact` | | lines of [`Step`] of [`Compacted`] |
//! | `PUT /volumes/{volume}/data` | bytes, written from offset 0 | |
//! | `GET /volumes/{volume}/data?length_bytes=N` | | the first N bytes |
//! | `POST /volumes/{volume}/epoch/issue` | | [`EpochIssued`] |
//! | `POST /volumes/{volume}/epoch` | [`EpochChange`] | [`VolumeInfo`] |
//! | `POST /batch/epochs` | [`EpochChanges`] | all of them were made, or the first that was not and why |
//! | `POST /batch/flush` | [`FlushVolumes`] | what was written before is on the disk |
//! | `POST /batch/open` | [`OpenAhead`] | sessions on attached volumes are being opened for a client that comes soon |
//! | `GET /attachments` | | [`Attachment`] |
//! | `PUT /attachments/{volume}` | [`Attach`] | [`Attachment`] |
//! | `DELETE /attachments/{volume}` | | |
//! | `GET /stats` | | [`ExportStats`] |
//! | `POST /probe` | [`ProbeBlocks`] | [`BlockProbe`] |
//! | `POST /trace/start` | [`StartTrace`] | |
//! | `POST /trace/stop` | | [`TraceSummary`] |
//! | `PUT /traces/{name}` | [`CollectTrace`] | |
//! | `GET /traces/{name}` | | what was collected so far, in the format of [`crate::trace`] |
//! | `DELETE /traces/{name}` | | |
//! | `POST /check` | [`CheckScope`] | lines of [`Step`] of [`CheckReport`] |
//!
//! What may take long answers with lines of JSON, each a [`Step`]: progress, and at last the
//! result. A client that hangs up stops the work.
//!
//! A wrong request answers with a [`crate::Problem`].

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Epoch, ImageName, LayerId, OwnerName, TenantName, VolumeName};

/// The unit of a layer's map and of copy-on-write.
pub const BLOCK_BYTES: u64 = 4096;

/// A pool and the disk that it is on.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct PoolInfo {
    /// The pool's own directory on its host.
    pub path: String,
    /// The size of the filesystem that the pool is on.
    pub total_bytes: u64,
    /// What an ordinary user can still write there.
    pub free_bytes: u64,
    /// Named sealed layers: images and snapshots.
    pub images: u64,
    /// Volumes whose home it is.
    pub volumes: u64,
    /// Version of the catalog's format.
    pub format_version: u64,
    /// Bytes of data in all layers, each counted once.
    pub data_bytes: u64,
    /// Bytes of data that images or more than one volume need, each layer counted once.
    pub shared_bytes: u64,
    /// By name.
    pub tenants: Vec<TenantSpace>,
}

/// What a tenant's volumes have, and would give back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TenantSpace {
    /// Whose volumes they are.
    pub tenant: TenantName,
    /// How many volumes they are.
    pub volumes: u64,
    /// Sum of the volumes' sizes.
    pub virtual_bytes: u64,
    /// Bytes that only this tenant's volumes need, each needed by one of them.
    pub own_bytes: u64,
}

/// A named sealed layer with its chain: an imported image or a snapshot.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ImageInfo {
    /// Unique in the pool; images and snapshots share their names.
    pub name: ImageName,
    /// The topmost layer, the same at every host that has a copy.
    pub layer: LayerId,
    /// Size of the address space.
    pub size_bytes: u64,
    /// Bytes that are `data` in the whole chain, topmost layer first.
    pub allocated_bytes: u64,
    /// Layers from the top down.
    pub chain: Vec<LayerId>,
    /// Volumes and images that stand on it; it can be deleted only when there are none.
    pub children: u64,
    /// Of a copy that is not complete: where the rest comes from.
    #[serde(default)]
    pub remote: Option<ImageSource>,
}

/// The export of another host that an image is a copy of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageSource {
    /// `HOST:PORT` of the other host's NBD server.
    pub nbd_addr: String,
    /// The export's name there, `image:NAME` or `layer:UUID`.
    pub export: String,
    /// What of it stays here.
    pub keep: Keep,
    /// Bytes of which it is not known here what they are. They may be fewer than that in truth:
    /// what is empty there is never fetched.
    pub missing_bytes: u64,
}

/// What a copy keeps of what it reads from the other host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// Nothing: for data that may not leave its site.
    Never,
    /// What is read.
    Read,
    /// Everything: what nobody reads is fetched in the background.
    #[default]
    All,
}

/// None of the three.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not what a copy keeps: never, read or all")]
pub struct BadKeep(String);

impl std::str::FromStr for Keep {
    type Err = BadKeep;

    fn from_str(text: &str) -> Result<Self, BadKeep> {
        match text {
            "never" => Ok(Self::Never),
            "read" => Ok(Self::Read),
            "all" => Ok(Self::All),
            _ => Err(BadKeep(text.chars().take(80).collect())),
        }
    }
}

impl std::fmt::Display for Keep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Never => "never",
            Self::Read => "read",
            Self::All => "all",
        })
    }
}

/// Makes an image that is a copy of a sealed layer of another host, to be used at once: what is
/// not here is read from there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CopyImage {
    /// `HOST:PORT`.
    pub nbd_addr: String,
    /// An export that nobody writes. Default: the image of the same name.
    #[serde(default)]
    pub export: Option<String>,
    /// What of it stays here; all of it where nothing is said.
    #[serde(default)]
    pub keep: Keep,
    /// Refuses an export that is not this sealed layer.
    #[serde(default)]
    pub layer: Option<LayerId>,
}

/// A disk image to take into the pool.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ImportImage {
    /// Unique in the pool.
    pub name: ImageName,
    /// What `qemu-img convert` reads: a path on the volume server's machine or an
    /// `nbd://HOST:PORT/EXPORT` address. A file may not have a backing file.
    pub source: String,
    /// The UUID to give the layer: set when this is a copy of a sealed layer of another host.
    #[serde(default)]
    pub layer: Option<LayerId>,
}

/// What a new volume starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VolumeSource {
    /// All zeros; `size_bytes` is needed.
    Empty,
    /// A copy-on-write clone of an image or a snapshot in this pool.
    Image(ImageName),
    /// A copy-on-write clone of another volume in this pool, as it is at this moment.
    Volume(VolumeName),
    /// A head over a remote parent: an NBD export of another host that nobody writes
    /// (`image:NAME`), read through and not kept.
    Remote {
        /// `HOST:PORT` of the other host's NBD server.
        nbd_addr: String,
        /// The export's name there.
        export: String,
    },
}

/// A volume to make.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct CreateVolume {
    /// Unique in the cluster; the pool knows its own volumes only.
    pub name: VolumeName,
    /// At least the source's size; beyond the source it reads zeros. Default: the source's size.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// What it starts with.
    pub source: VolumeSource,
    /// Whose space it counts as; `default` where nothing is said.
    #[serde(default)]
    pub tenant: TenantName,
    /// How its own layer is read and written.
    #[serde(default)]
    pub cache: CachePolicy,
    /// Stays with the volume, and deleting can ask for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<OwnerName>,
}

/// Many volumes from one source, in one transaction. The clones of a volume are all of one moment.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct CreateVolumes {
    /// 1 to [`crate::limits::NEW_VOLUMES`], each once.
    pub names: Vec<VolumeName>,
    /// Of each, as in [`CreateVolume`].
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// What each starts with.
    pub source: VolumeSource,
    /// Whose space they count as.
    #[serde(default)]
    pub tenant: TenantName,
    /// How their own layers are read and written.
    #[serde(default)]
    pub cache: CachePolicy,
    /// As in [`CreateVolume::owner`], of each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<OwnerName>,
}

impl From<CreateVolume> for CreateVolumes {
    fn from(one: CreateVolume) -> Self {
        let CreateVolume { name, size_bytes, source, tenant, cache, owner } = one;
        Self { names: vec![name], size_bytes, source, tenant, cache, owner }
    }
}

impl CreateVolume {
    /// Of the default tenant, with the default cache policy, made by a person.
    pub fn new(name: VolumeName, size_bytes: Option<u64>, source: VolumeSource) -> Self {
        let (tenant, cache, owner) = Default::default();
        Self { name, size_bytes, source, tenant, cache, owner }
    }
}

/// How a volume's own data are read and written. Sealed layers always go through the page cache,
/// which all clones share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CachePolicy {
    /// Through the page cache.
    #[default]
    Shared,
    /// Past the page cache.
    Direct,
}

/// Neither `shared` nor `direct`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a cache policy: shared or direct")]
pub struct BadCachePolicy(String);

impl std::str::FromStr for CachePolicy {
    type Err = BadCachePolicy;

    fn from_str(text: &str) -> Result<Self, BadCachePolicy> {
        match text {
            "shared" => Ok(Self::Shared),
            "direct" => Ok(Self::Direct),
            _ => Err(BadCachePolicy(text.chars().take(80).collect())),
        }
    }
}

impl std::fmt::Display for CachePolicy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Shared => "shared",
            Self::Direct => "direct",
        })
    }
}

/// Whether a volume takes writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VolumeHealth {
    /// Nothing is known to be wrong with it.
    Ok,
    /// A flush failed: it serves reads and refuses writes until it is copied elsewhere.
    Poisoned,
}

/// A volume whose head is in this pool.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct VolumeInfo {
    /// Unique in the cluster.
    pub name: VolumeName,
    /// The size of the disk that a client sees, a whole number of blocks.
    pub size_bytes: u64,
    /// Bytes of the head layer that are `data`; of a volume that is not open, what the head takes
    /// on the disk.
    pub head_bytes: u64,
    /// Bytes that are `data` in head and local chain together: own and shared ones.
    pub allocated_bytes: u64,
    /// Bytes of layers that only this volume needs: deleting it gives them back.
    #[serde(default)]
    pub own_bytes: u64,
    /// Bytes of layers that images or other volumes need too.
    #[serde(default)]
    pub shared_bytes: u64,
    /// Bytes of another host's export below the local layers that are not here; 0 without one.
    #[serde(default)]
    pub remote_bytes: u64,
    /// Head first.
    pub chain: Vec<LayerId>,
    /// Sessions of this epoch may write, and no others.
    pub epoch: Epoch,
    /// Whether it takes writes.
    pub health: VolumeHealth,
    /// Open NBD sessions.
    pub sessions: u64,
    /// Whose space it counts as.
    #[serde(default)]
    pub tenant: TenantName,
    /// How its own layer is read and written.
    #[serde(default)]
    pub cache: CachePolicy,
    /// Who made it and may delete it for its own; `None`: a person.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<OwnerName>,
}

/// Seals the head under a name and puts a new head on it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Snapshot {
    /// The name to seal it under, unique in the pool.
    pub image: ImageName,
}

/// Gives a volume another size while it is in use; what is new reads as zeros. A client sees the
/// new size when it connects again.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Resize {
    /// The new size, rounded up to whole blocks; see [`crate::limits::VOLUME_BYTES`].
    pub size_bytes: u64,
    /// What is beyond a smaller size may be lost. Only while no session is open.
    #[serde(default)]
    pub shrink: bool,
}

/// An epoch that was never given out before; nobody may write with it until it is raised.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
pub struct EpochIssued {
    /// No other request is ever answered with this number.
    pub epoch: Epoch,
}

/// Compare-and-swap of the writer's epoch. Refused with a conflict unless the volume's
/// epoch is `from` (or already `to`: a repeated call succeeds) and `to` was issued. A change to
/// an older epoch gives `from` back for good, so that a raise to it that comes late is refused.
/// Writes in flight with the old epoch have ended when this answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub struct EpochChange {
    /// The epoch that the volume is taken to have.
    pub from: Epoch,
    /// The epoch that it shall have.
    pub to: Epoch,
}

/// Changes of several volumes' epochs in one request, as the pause of a migration needs them. All
/// are tried, each as an [`EpochChange`]; a repeated call succeeds.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct EpochChanges {
    /// At most [`crate::limits::BATCH_VOLUMES`].
    pub changes: Vec<VolumeEpochChange>,
}

/// One volume's part of [`EpochChanges`].
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct VolumeEpochChange {
    /// A volume whose home it is.
    pub volume: VolumeName,
    /// The change, flat beside the name in JSON.
    #[serde(flatten)]
    pub change: EpochChange,
}

/// Flushes volumes whose home it is.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct FlushVolumes {
    /// At most [`crate::limits::BATCH_VOLUMES`].
    pub volumes: Vec<VolumeName>,
}

/// Exports of attached volumes that a client is about to open, one after the other. What does not come
/// about is opened when the client comes.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct OpenAhead {
    /// Names of exports, as the client will say them; at most [`crate::limits::BATCH_VOLUMES`].
    pub exports: Vec<String>,
}

/// Makes a volume of another host reachable through this host's volume server.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Attach {
    /// The home's NBD address, `HOST:PORT`.
    pub nbd_addr: String,
}

/// A volume of another host that can be opened here under its name.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Attachment {
    /// The name, which no volume of this pool has.
    pub volume: VolumeName,
    /// The home's NBD address, `HOST:PORT`.
    pub nbd_addr: String,
    /// Open sessions of clients of this host.
    pub sessions: u64,
}

/// Counters of one export since the volume server started; they only grow.
///
/// `busy_ns` is the time during which at least one request was in flight; with the sum of
/// latencies it gives the mean queue depth while busy. The `network_*` half counts the same for
/// requests this server sent to another host on behalf of the export.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IoStats {
    /// Read requests that were answered, with or without an error.
    pub reads: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Sum of the reads' latencies, from the request to its answer.
    pub read_ns: u64,
    /// Requests that change data: writes, zeros and trims.
    pub writes: u64,
    /// Data that came with them; zeros and trims bring none.
    pub write_bytes: u64,
    /// Sum of their latencies.
    pub write_ns: u64,
    /// Flush requests.
    pub flushes: u64,
    /// Sum of their latencies.
    pub flush_ns: u64,
    /// Time in which at least one request of a client was in flight.
    pub busy_ns: u64,
    /// Requests that were sent to another host.
    pub network_requests: u64,
    /// Sum of their latencies.
    pub network_ns: u64,
    /// Time in which at least one of them was in flight.
    pub network_busy_ns: u64,
    /// Data that crossed the network for them.
    pub network_bytes: u64,
    /// Writes refused because the session's epoch was not the volume's.
    pub fenced: u64,
}

/// The counters of one volume.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ExportStats {
    /// The volume, at its home or attached.
    pub volume: VolumeName,
    /// Since the volume server started.
    pub stats: IoStats,
}

/// One request of a client, as `GET /v1/volumes/VOLUME/trace` tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedRequest {
    /// Microseconds since 1970.
    pub ended_us: u64,
    /// `read`, `write`, `flush`, `zero`, `status` or `cache`.
    pub command: String,
    /// Where in the volume, in bytes.
    pub offset: u64,
    /// How much of the volume; 0 for a flush.
    pub length_bytes: u64,
    /// Nothing had to be waited for.
    pub at_once: bool,
    /// From taking it until it was answered.
    pub total_ns: u64,
    /// What the time was spent on; parts that ran at the same time count in full.
    pub stages: Vec<StageTime>,
    /// Why it failed, in words; `None` when it did not.
    pub error: Option<String>,
}

/// Begins a trace of all volumes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartTrace {
    /// A new file on the volume server's machine, in the format of [`crate::trace`].
    pub file: PathBuf,
}

/// Collects a trace of some volumes in memory, for whoever fetches it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectTrace {
    /// The clients of the trace, by these numbers.
    pub volumes: Vec<VolumeName>,
}

/// What a trace came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceSummary {
    /// The file that has the trace.
    pub file: PathBuf,
    /// How many clients are in it.
    pub clients: u64,
    /// How many requests are in it.
    pub requests: u64,
    /// Requests that came faster than the disk took them.
    pub lost: u64,
}

/// A part of a request's time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageTime {
    /// `queue`, `network`, `map`, `source_read`, `head_read`, `remote_read`, `write` or `flush`.
    pub stage: String,
    /// How long the request was in that stage.
    pub ns: u64,
}

/// Reads blocks of an export at random offsets, one at a time, and tells how long each took.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ProbeBlocks {
    /// `HOST:PORT` of the NBD server to ask; this server's own address measures the local case.
    pub nbd_addr: String,
    /// The export to read from; nothing is written.
    pub export: String,
    /// 1 to 1000.
    pub requests: u32,
    /// 512 to 1 MiB.
    pub request_bytes: u32,
}

/// What reading blocks of an export takes.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
pub struct BlockProbe {
    /// Half of the reads were answered sooner, one in flight at a time.
    pub latency_median_us: u64,
    /// 95 of 100 reads were answered sooner, one in flight at a time.
    pub latency_p95_us: u64,
    /// With 16 requests in flight.
    pub rate_bytes_per_s: u64,
}

/// One line of a long answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step<T> {
    /// How far it is; more lines follow.
    Progress(Progress),
    /// The result, and the last line.
    Done(T),
    /// Why there is no result; the last line.
    Failed(crate::Problem),
}

/// How far long work is. The total may grow while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Of what has to be looked at or copied.
    pub done_bytes: u64,
    /// As far as it is known now.
    pub total_bytes: u64,
}

/// What merging the layers of a chain came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compacted {
    /// Layers of the chain, the head counted.
    pub layers_before: u64,
    /// Layers of the chain afterwards, the head counted.
    pub layers_after: u64,
    /// Data that were written into the new layers.
    pub copied_bytes: u64,
}

/// What to check: the layers of one volume or image, or everything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckScope {
    /// Every layer, the catalog, and files that nothing needs.
    Pool,
    /// The layers of this volume's chain.
    Volume(VolumeName),
    /// The layers of this image's chain.
    Image(ImageName),
}

/// What a check found. Without faults the layers that were looked at are sound.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct CheckReport {
    /// Layers that were looked at.
    pub layers: u64,
    /// Data that were read and compared with their checksums.
    pub compared_bytes: u64,
    /// What was found wrong.
    pub faults: Vec<Fault>,
    /// Sealed layers that have no checksums yet; the volume server makes them in the background.
    pub without_checksums: Vec<LayerId>,
    /// Files that nothing needs. The volume server removes them when it starts.
    pub leftovers: Vec<String>,
}

/// What is damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// SQLite finds the catalog damaged.
    Catalog,
    /// A layer's file is not there.
    Missing,
    /// Which blocks a layer has is not known.
    Map,
    /// Data are not what was sealed, or can't be read.
    Data,
    /// The checksums themselves are damaged.
    Checksums,
}

/// One thing that a check found wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Which part of the pool is damaged.
    pub kind: FaultKind,
    /// In plain words.
    pub what: String,
    /// The layer that is concerned; `None` for the catalog.
    pub layer: Option<LayerId>,
    /// The bytes of the layer that are concerned, where it is not all of them.
    pub range: Option<ByteRange>,
    /// Some of the volumes and images that have the layer in their chain: `volume NAME`, `image NAME`.
    pub used_by: Vec<String>,
    /// How many they are.
    pub users: u64,
}

/// A run of bytes of a layer or a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByteRange {
    /// Where it begins, in bytes.
    pub offset: u64,
    /// How long it is.
    pub length_bytes: u64,
}
