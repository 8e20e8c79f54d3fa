//! The volume server's API: images, volumes, attachments, epochs and I/O figures.
//!
//! It is HTTP/JSON on a unix socket and on TCP. Every path is below `/v1`:
//!
//! | method and path | body | answer |
//! |---|---|---|
//! | `GET /pool` | | [`PoolInfo`] |
//! | `GET /images`, `GET /images/{image}` | | [`ImageInfo`] |
//! | `POST /images` | [`ImportImage`] | lines of [`Step`] of [`ImageInfo`]; it is stopped when the client leaves |
//! | `POST /uploads` | a file's bytes | [`Upload`]; for [`ImportImage::source`] |
//! | `POST /trees` | a tar of files | [`Upload`]; as a source it becomes an ext4 filesystem with these files |
//! | `DELETE /images/{image}` | | ends an import of it first; `?bad_copy_of=LAYER&unless=CONTENT`: only a copy of this layer of which nothing may be made ([`ImageInfo::is_bad`]) |
//! | `POST /images/{image}/copy` | [`CopyImage`] | [`ImageInfo`] |
//! | `PUT /images/{image}/keep` | [`Keep`] | [`ImageInfo`] |
//! | `PUT /images/{image}/leave-site` | `SetLeaveSiteAs` (see [`crate::leave_site`]) | `LeaveSiteSet` |
//! | `POST /images/{image}/fill` | | lines of [`Step`] of [`ImageInfo`] |
//! | `GET /volumes`, `GET /volumes/{volume}` | | [`VolumeInfo`] |
//! | `POST /volumes` | [`CreateVolume`] | [`VolumeInfo`] |
//! | `POST /batch/volumes` | [`CreateVolumes`] | [`VolumeInfo`], all of them or none |
//! | `DELETE /volumes/{volume}?owner=OWNER` | | with an owner: not found unless the volume carries that owner |
//! | `POST /volumes/{volume}/snapshot` | [`Snapshot`] | [`ImageInfo`] |
//! | `POST /volumes/{volume}/resize` | [`Resize`] | [`VolumeInfo`] |
//! | `PUT /volumes/{volume}/leave-site` | `SetLeaveSiteAs` | `LeaveSiteSet` |
//! | `POST /volumes/{volume}/compact` | | lines of [`Step`] of [`Compacted`] |
//! | `PUT /volumes/{volume}/data` | bytes, written from offset 0 | |
//! | `GET /volumes/{volume}/data?length_bytes=N` | | the first N bytes |
//! | `POST /volumes/{volume}/epoch/issue` | | [`EpochIssued`] |
//! | `POST /volumes/{volume}/epoch` | [`EpochChange`] | [`VolumeInfo`] |
//! | `POST /batch/epochs` | [`EpochChanges`] | nothing, or the first change that was refused and why |
//! | `POST /batch/flush` | [`FlushVolumes`] | nothing; earlier writes are then on the disk |
//! | `POST /batch/open` | [`OpenAhead`] | nothing; the sessions are opened in the background |
//! | `GET /volumes/{volume}/home` | | `VolumeHome` (see [`crate::home`]), of a volume that is not here too |
//! | `POST /volumes/{volume}/take` | `TakeVolume` | `VolumeHome`: this server is the home |
//! | `POST /volumes/{volume}/depart` | `Depart` | `Departed` |
//! | `POST /volumes/{volume}/refuse` | `CallOff` | `VolumeHome` |
//! | `POST /volumes/{volume}/return` | `CallOff` | `VolumeHome`: this server is the home again |
//! | `DELETE /volumes/{volume}/departed?tenure=N` | | nothing; N is the tenure at the new home |
//! | `GET /attachments` | | [`Attachment`] |
//! | `PUT /attachments/{volume}` | [`Attach`] | [`Attachment`] |
//! | `DELETE /attachments/{volume}?unless_open=true` | | a conflict while sessions are open, where that is asked |
//! | `GET /admissions` | | [`AllAdmittedHosts`] |
//! | `PUT /admissions` | [`AllAdmittedHosts`] | nothing; these hosts may open the volumes too, and from now on nobody who was not let in |
//! | `GET /volumes/{volume}/hosts` | | [`AdmittedHosts`] |
//! | `PUT /volumes/{volume}/hosts` | [`AdmittedHosts`] | nothing; these hosts may open it too |
//! | `PUT /volumes/{volume}/hosts/{host}` | | nothing; this host may open it too |
//! | `DELETE /volumes/{volume}/hosts/{host}` | | nothing; it may open it no more, and what it has open of it is closed |
//! | `PUT /sites` | `SiteMap` | |
//! | `POST /layers/find` | `FindLayers` | `FoundLayers` |
//! | `PUT /layers/leave-site` | `SetLayersLeaveSite` | |
//! | `GET /vms` | | [`VmSocketSeen`] list |
//! | `PUT /vms/{vm}/socket` | [`VmSocket`] | [`VmSocketAt`]; only through the server's unix socket |
//! | `DELETE /vms/{vm}/socket?uid=N&exports=A,B` | | ends it if it is this user's and has these exports; only through the server's unix socket |
//! | `GET /stats` | | [`ExportStats`] |
//! | `POST /probe` | [`ProbeBlocks`] | [`BlockProbe`] |
//! | `POST /measure` | [`crate::measurement::MeasureDisk`] | lines of [`Step`] of [`crate::measurement::DiskFigures`] |
//! | `POST /measure/{volume}/fill` | | lines of [`Step`]; writes random bytes to all of a volume that is to be measured |
//! | `POST /measure/{volume}/portal` | [`crate::measurement::OpenPortal`] | [`crate::measurement::IscsiPortal`] |
//! | `DELETE /measure/{volume}/portal` | | |
//! | `POST /trace/start` | [`StartTrace`] | |
//! | `POST /trace/stop` | | [`TraceSummary`] |
//! | `PUT /traces/{name}` | [`CollectTrace`] | |
//! | `GET /traces/{name}` | | the trace so far, in the format of [`crate::trace`] |
//! | `DELETE /traces/{name}` | | |
//! | `POST /check` | [`CheckScope`] | lines of [`Step`] of [`CheckReport`] |
//!
//! Long work is answered with lines of JSON, each a [`Step`]: progress, and then the result. The work stops
//! when the client closes the connection.
//!
//! The answer to a request that fails is a [`crate::Problem`].

mod content;
mod epoch;
mod figures;
mod image;
mod long;
mod vm_socket;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::upgrade::DaemonVersion;
use crate::{Epoch, HostId, ImageName, LayerId, LeaveSite, OwnerName, TenantName, VolumeName};

pub use content::{BadContentDigest, ContentDigest};
pub use epoch::{
    EpochChange, EpochChanges, EpochIssued, FlushVolumes, OpenAhead, VolumeEpochChange,
};
pub use figures::{
    BlockProbe, CollectTrace, ExportStats, IoStats, ProbeBlocks, StageTime, StartTrace,
    TraceSummary, TracedRequest,
};
pub use image::{
    BadKeep, CopyImage, DeletedImage, ImageFormat, ImageInfo, ImageSource, ImportImage, Keep,
    TREE_PREFIX, UPLOAD_PREFIX, Upload,
};
pub use long::{ByteRange, CheckReport, CheckScope, Compacted, Fault, FaultKind, Progress, Step};
pub use vm_socket::{Unanswered, VmSocket, VmSocketAt, VmSocketSeen};

/// The unit of a layer's map and of copy-on-write.
pub const BLOCK_BYTES: u64 = 4096;

/// A pool and the disk that it is on.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct PoolInfo {
    /// The pool's own directory on its host.
    pub path: String,
    /// The size of the filesystem that the pool is on.
    pub total_bytes: u64,
    /// Bytes that an ordinary user can still write there.
    pub free_bytes: u64,
    /// Named sealed layers: images and snapshots.
    pub images: u64,
    /// Volumes whose home is this pool.
    pub volumes: u64,
    /// Version of the catalog's format.
    pub format_version: u64,
    /// Bytes of data in all layers, each counted once.
    pub data_bytes: u64,
    /// Bytes of data that images or more than one volume need, each layer counted once.
    pub shared_bytes: u64,
    /// Sorted by name.
    pub tenants: Vec<TenantSpace>,
    /// The version of the volume server; `None` if the volume server is older than this field.
    #[serde(default)]
    pub version: Option<DaemonVersion>,
}

/// The space that a tenant's volumes take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TenantSpace {
    /// The tenant.
    pub tenant: TenantName,
    /// Number of the tenant's volumes.
    pub volumes: u64,
    /// Sum of the volumes' sizes.
    pub virtual_bytes: u64,
    /// Bytes that deleting one of the tenant's volumes gives back, summed over its volumes.
    pub own_bytes: u64,
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
    /// The initial content.
    pub source: VolumeSource,
    /// The tenant whose space it counts as.
    #[serde(default)]
    pub tenant: TenantName,
    /// How its own layer is read and written.
    #[serde(default)]
    pub cache: CachePolicy,
    /// A name for whoever made the volume. A deletion can require it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<OwnerName>,
    /// Whether it may leave its site. If its source may not, it may not either, whatever this says.
    #[serde(default)]
    pub leave_site: LeaveSite,
}

/// Creates many volumes from one source, in one transaction. All clones of a volume have its content of
/// one moment.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct CreateVolumes {
    /// 1 to [`crate::limits::NEW_VOLUMES`] different names.
    pub names: Vec<VolumeName>,
    /// The size of each, as in [`CreateVolume`].
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// The initial content of each.
    pub source: VolumeSource,
    /// The tenant whose space they count as.
    #[serde(default)]
    pub tenant: TenantName,
    /// How their own layers are read and written.
    #[serde(default)]
    pub cache: CachePolicy,
    /// The owner of each, as in [`CreateVolume::owner`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<OwnerName>,
    /// As in [`CreateVolume::leave_site`].
    #[serde(default)]
    pub leave_site: LeaveSite,
}

impl From<CreateVolume> for CreateVolumes {
    fn from(one: CreateVolume) -> Self {
        let CreateVolume { name, size_bytes, source, tenant, cache, owner, leave_site } = one;
        Self { names: vec![name], size_bytes, source, tenant, cache, owner, leave_site }
    }
}

impl CreateVolume {
    /// A volume of the tenant in its name, with the default cache policy and without an owner.
    pub fn new(name: VolumeName, size_bytes: Option<u64>, source: VolumeSource) -> Self {
        let (tenant, (cache, owner, leave_site)) =
            (TenantName::of(name.as_str()), Default::default());
        Self { name, size_bytes, source, tenant, cache, owner, leave_site }
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

/// A text that names no [`CachePolicy`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a cache policy: use shared or direct")]
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
    /// Bytes of the head layer that are `data`. For a volume that is not open: the bytes that the head
    /// takes on the disk.
    pub head_bytes: u64,
    /// Bytes that are `data` in the head and the local chain together, own and shared.
    pub allocated_bytes: u64,
    /// Bytes of layers that only this volume needs: deleting it gives them back.
    pub own_bytes: u64,
    /// Bytes of layers that images or other volumes need too.
    pub shared_bytes: u64,
    /// Bytes of another host's export below the local layers that are not here; 0 without one.
    pub remote_bytes: u64,
    /// The layers, the head first.
    pub chain: Vec<LayerId>,
    /// Only sessions with this epoch may write.
    pub epoch: Epoch,
    /// Whether it takes writes.
    pub health: VolumeHealth,
    /// Open NBD sessions.
    pub sessions: u64,
    /// The tenant whose space it counts as.
    pub tenant: TenantName,
    /// How its own layer is read and written.
    pub cache: CachePolicy,
    /// Whoever made it, for example a job; `None`: a person.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<OwnerName>,
    /// Whether it may leave its site.
    pub leave_site: LeaveSite,
}

/// Seals the head under a name and puts a new head on it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Snapshot {
    /// The name to seal it under, unique in the pool.
    pub image: ImageName,
}

/// Gives a volume another size while it is in use; new bytes read as zeros. A client sees the new size when
/// it connects again.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Resize {
    /// The new size, rounded up to whole blocks; see [`crate::limits::VOLUME_BYTES`].
    pub size_bytes: u64,
    /// Allows a smaller size: the data beyond it are lost. Refused while a session is open.
    #[serde(default)]
    pub shrink: bool,
}

/// Makes a volume of another host reachable through this host's volume server.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Attach {
    /// The home's NBD address, `HOST:PORT`.
    pub nbd_addr: String,
}

/// The other hosts of the cluster that may open a volume at its home. The controller says so.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AdmittedHosts {
    /// Their names.
    pub hosts: Vec<HostId>,
}

/// The same for all volumes of a host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AllAdmittedHosts {
    /// By the volumes' names.
    pub volumes: BTreeMap<VolumeName, Vec<HostId>>,
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
