//! Backups of volumes, VMs and images: what people ask for and see, and what the controller asks of volume servers.
//!
//! | at a volume server | body | answer |
//! |---|---|---|
//! | `POST /volumes/{volume}/backup` | [`ShipBackup`] | lines of `Step` of [`ShippedBackup`]; it is stopped when the client leaves, and goes on where it was when it is asked for again |
//! | `POST /images/{image}/backup` | [`ShipBackup`] | as of a volume; nothing is sealed, because an image never changes |
//! | `POST /backups/seal` | [`SealForBackup`] | [`SealedForBackup`] of each volume, in their order, all of one moment |
//! | `POST /volumes/{volume}/backup/end` | [`BackupTarget`] | its backup to the target is given up: nothing is kept for it, except what the next one stands on |
//! | `POST /volumes/{volume}/restore` | [`RestoreVolume`] | lines of `Step` of `VolumeInfo`; it is stopped when the client leaves |
//! | `POST /images/{image}/restore` | [`RestoreImage`] | lines of `Step` of `ImageInfo`; it is stopped when the client leaves, and makes the image once |
//! | `GET /backups/restoring` | | [`RestoringLayer`] of each layer that still gets bytes from a backup |
//! | `POST /backups/key` | [`SendBackupKey`] | nothing |
//! | `POST /backups/list` | [`ListBackups`] | [`FoundBackup`] of each |
//! | `POST /backups/delete` | [`DeleteBackup`] | lines of `Step` of the bytes that the target holds, or of nothing; a backup that is not there is no error |
//! | `POST /backups/verify` | [`VerifyBackup`] | lines of `Step` of [`VerifiedBackup`] |
//!
//! What is at a target: `docs/dev/backup.md`.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use crate::backup_key::BackupKey;
use crate::persistent_vm::NewVm;
use crate::units::format_bytes;
use crate::{
    BackupName, HostId, ImageName, LayerId, LeaveSite, OwnerName, Problem, ScheduleName,
    TenantName, UserName, VmId, VolumeName,
};

const S3: &str = "s3://";
/// How the source of a layer begins that is a target of backups, and no host.
const SOURCE: &str = "backup:";
/// What stands before its address there, if its backups were encrypted.
const SOURCE_SEALED: &str = "sealed:";
/// What stands before the endpoint there.
const SOURCE_ENDPOINT: &str = "?endpoint=";

/// Where backups are: a directory of the host that writes or reads them, or an S3 store.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct BackupTarget {
    /// An absolute path, or `s3://BUCKET/PREFIX`.
    #[serde(deserialize_with = "without_end")]
    pub address: String,
    /// The address of the S3 store, if it is not AWS's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
}

/// Addresses are compared: `/srv/backups/` is `/srv/backups`.
fn without_end<'de, D: Deserializer<'de>>(address: D) -> Result<String, D::Error> {
    let mut address = String::deserialize(address)?;
    address.truncate(address.trim_end_matches('/').len());
    Ok(address)
}

impl BackupTarget {
    /// Refuses what is neither, and what names the same place in another way.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn check(&self) -> Result<(), Problem> {
        let what = format!("can't use {} for backups", self.address);
        let is_path = self.address.starts_with('/');
        if self.address.len() > 1000 || !(is_path || self.is_s3()) {
            let why = "it is neither the absolute path of a directory nor s3://BUCKET/PREFIX";
            return Err(Problem::invalid(what, why));
        }
        let start = if is_path { "/" } else { S3 };
        let below = self.address.strip_prefix(start).unwrap_or_default();
        if below.split('/').any(|name| matches!(name, "" | "." | "..")) {
            let why = "a part of it is empty, `.` or `..`";
            return Err(Problem::invalid(what, why).next("write the address without that"));
        }
        match &self.endpoint {
            Some(_) if is_path => Err(Problem::invalid(what, "a directory has no endpoint")),
            _ => Ok(()),
        }
    }

    /// As the home of a VM's disk names what it keeps for the VM's backups. A backup of the volume alone to the same target has layers of its own.
    #[must_use]
    pub fn of_vms(&self) -> Self {
        Self { address: format!("vm:{}", self.address), endpoint: self.endpoint.clone() }
    }

    /// Whether one of both is the other one, or is below it.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.is_within(other) || other.is_within(self)
    }

    /// Whether it is the other one, or is below that.
    pub fn is_within(&self, outer: &Self) -> bool {
        let rest = self.address.strip_prefix(&outer.address);
        let is_below = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        self.endpoint == outer.endpoint && is_below
    }

    /// Whether it is an S3 store.
    pub fn is_s3(&self) -> bool {
        self.address.starts_with(S3)
    }

    /// As the source of a layer that gets its bytes from here. Other layers have the address of a host there.
    pub fn as_source(&self) -> String {
        let endpoint = self.endpoint.as_ref().map(|at| format!("{SOURCE_ENDPOINT}{at}"));
        format!("{SOURCE}{}{}", self.address, endpoint.unwrap_or_default())
    }

    /// As [`Self::as_source`], of a target whose backups were encrypted when the layer was made.
    pub fn as_sealed_source(&self) -> String {
        let address = format!("{SOURCE_SEALED}{}", self.address);
        Self { address, endpoint: self.endpoint.clone() }.as_source()
    }

    /// Whether the source of a layer is a target whose backups were encrypted when the layer was made. A layer of an older version does not say so.
    pub fn is_sealed_source(source: &str) -> bool {
        source.strip_prefix(SOURCE).is_some_and(|address| address.starts_with(SOURCE_SEALED))
    }

    /// The target that is the source of a layer; `None` if a host is.
    pub fn of_source(source: &str) -> Option<Self> {
        let address = source.strip_prefix(SOURCE)?;
        let address = address.strip_prefix(SOURCE_SEALED).unwrap_or(address);
        let (address, endpoint) = match address.rsplit_once(SOURCE_ENDPOINT) {
            Some((address, endpoint)) if address.starts_with(S3) => (address, Some(endpoint)),
            _ => (address, None),
        };
        Some(Self { address: address.to_owned(), endpoint: endpoint.map(str::to_owned) })
    }
}

/// The user of a tenant who has a backup made. The backup is that tenant's, and counts in its quota.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BackupUser {
    /// The tenant.
    pub tenant: TenantName,
    /// The user.
    pub user: UserName,
}

/// What a backup is of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackupOf {
    /// A volume.
    Volume(VolumeName),
    /// A VM without a job: its own disks, and the volumes that it writes.
    Vm(VmId),
    /// An image.
    Image(ImageName),
}

impl BackupOf {
    /// The one that is named.
    ///
    /// # Errors
    /// `Invalid` if several are, or none.
    pub fn one(
        volume: Option<VolumeName>,
        vm: Option<VmId>,
        image: Option<ImageName>,
    ) -> Result<Self, Problem> {
        match (volume, vm, image) {
            (Some(volume), None, None) => Ok(Self::Volume(volume)),
            (None, Some(vm), None) => Ok(Self::Vm(vm)),
            (None, None, Some(image)) => Ok(Self::Image(image)),
            _ => {
                let why = "name a volume, a VM or an image, and one only";
                Err(Problem::invalid("can't make a backup", why))
            }
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            Self::Volume(volume) => volume.as_str(),
            Self::Vm(vm) => vm.as_str(),
            Self::Image(image) => image.as_str(),
        }
    }
}

impl fmt::Display for BackupOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume(volume) => write!(f, "volume {volume}"),
            Self::Vm(vm) => write!(f, "VM {vm}"),
            Self::Image(image) => write!(f, "image {image}"),
        }
    }
}

/// What stands for an image where records and manifests name a volume: both kinds of names have the same form.
///
/// # Panics
/// Never.
pub fn in_place_of_volume(image: &ImageName) -> VolumeName {
    VolumeName::new(image.as_str()).expect("both kinds of names have the same form")
}

/// Asks for a backup of a volume, of a VM or of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewBackup {
    /// The volume. It may be in use. Either this, a VM or an image is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<VolumeName>,
    /// The VM, which has no job. It may run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<VmId>,
    /// The image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageName>,
    /// A directory of the home of each disk or of the host that has made the image, or an S3 store.
    pub to: BackupTarget,
    /// Also what the target has already is shipped, for example because it was damaged there.
    #[serde(default)]
    pub whole: bool,
    /// It is encrypted at the target with the tenant's key. All backups at a target are, or none is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypted: bool,
}

/// The state of a backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BackupState {
    /// It is being shipped, or waits for what `problem` says.
    Shipping,
    /// All of it is at the target.
    Completed,
    /// It was given up. What was shipped is used by the next one.
    Failed,
    /// It is being deleted at the target, or waits for what `problem` says.
    Deleting,
}

/// A backup, as the controller knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Backup {
    /// The name of what it is of, and the time.
    pub name: BackupName,
    /// The volume; of a VM its root disk, and of an image the image's name.
    pub volume: VolumeName,
    /// The VM that it is of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<VmId>,
    /// The image that it is of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageName>,
    /// Of a VM: the backups of its other disks, which are made, restored and deleted with this one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<BackupName>,
    /// The backup of a VM of which this one is a part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part_of: Option<BackupName>,
    /// Where it is.
    pub at: BackupTarget,
    /// The volume's home, or a host that has the image, which ships it; `None`: not asked yet.
    pub host: Option<HostId>,
    /// How far it is.
    pub state: BackupState,
    /// When it was asked for; Unix time.
    pub begun_ms: u64,
    /// When the volume was sealed for it; Unix time. It has what was written until then.
    pub taken_ms: Option<u64>,
    /// When it was complete or failed; Unix time.
    pub ended_ms: Option<u64>,
    /// The size of the volume's disk.
    pub size_bytes: Option<u64>,
    /// The data of all its layers.
    pub data_bytes: Option<u64>,
    /// What was sent to the target for it.
    pub shipped_bytes: u64,
    /// How far it is, while it is shipped.
    pub progress: Option<BackupProgress>,
    /// Why it failed, or what it waits for; else empty.
    pub problem: String,
    /// The schedule that has begun it; `None`: a person has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<ScheduleName>,
    /// The user who has it made; `None`: an admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<BackupUser>,
    /// It is encrypted at the target with the key of the tenant of the volume, VM or image.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypted: bool,
}

impl Backup {
    /// What it is of. A part of a VM's backup is of that VM.
    pub fn of(&self) -> BackupOf {
        match (&self.vm, &self.image) {
            (Some(vm), _) => BackupOf::Vm(vm.clone()),
            (None, Some(image)) => BackupOf::Image(image.clone()),
            (None, None) => BackupOf::Volume(self.volume.clone()),
        }
    }
}

/// How far a backup is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BackupProgress {
    /// The volume's data that were put at the target in this try.
    pub done_bytes: u64,
    /// The data of the layers that are shipped, as far as they are known. What the target has of them already is not put again.
    pub total_bytes: u64,
}

/// Asks for a new volume with what a backup has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RestoreBackup {
    /// The new volume.
    pub volume: VolumeName,
    /// Its home; `None`: the host that has shipped the backup, or for an S3 store the host with the most room.
    pub host: Option<HostId>,
    /// Where the backup is; `None`: where the controller knows it.
    pub from: Option<BackupTarget>,
    /// All bytes are read and checked before the volume is made. Otherwise the volume can be used at once, and its bytes come afterwards: see `restoring` of the volume.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub whole: bool,
}

/// A volume can be used, and bytes of it are still to come from a backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Restoring {
    /// The backup. It can't be deleted meanwhile.
    pub backup: BackupName,
    /// What had to come.
    pub total_bytes: u64,
    /// What is still to come.
    pub missing_bytes: u64,
    /// Why nothing comes now; else empty.
    pub problem: String,
    /// All bytes have come, except those that are damaged at the target. Reads of these give I/O errors.
    pub is_damaged: bool,
}

/// Asks for a new VM with what the backup of a VM has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RestoreVmBackup {
    /// The new VM.
    pub vm: VmId,
    /// The home of its disks; `None`: as for a volume.
    pub host: Option<HostId>,
    /// Where the backup is; `None`: where the controller knows it.
    pub from: Option<BackupTarget>,
    /// All bytes are read and checked before the VM is made. Otherwise the VM can be started at once, and bytes of its disks come afterwards.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub whole: bool,
}

/// Asks for a new image with what the backup of an image has. The image is there when all bytes were read and checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RestoreImageBackup {
    /// The new image.
    pub image: ImageName,
    /// The host that makes it; `None`: as for a volume.
    pub host: Option<HostId>,
    /// Where the backup is; `None`: where the controller knows it.
    pub from: Option<BackupTarget>,
}

/// Has a backup read, and compared with its checksums.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CheckBackup {
    /// Where the backup is; `None`: where the controller knows it.
    pub at: Option<BackupTarget>,
    /// The host that reads it; `None`: the host that has shipped it, or for an S3 store any.
    pub host: Option<HostId>,
}

/// Asks for the backups at a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LookForBackups {
    /// The target.
    pub at: BackupTarget,
    /// The host that looks; `None`: any, which is for S3 stores.
    pub host: Option<HostId>,
    /// With whose key encrypted ones are read; `None`: of the tenant that may use the target, or else of one's own. Another one than one's own is for admins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<TenantName>,
}

/// Asks a volume server for the backups at a target. An older one ignores all but the target, and answers with all that each has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListBackups {
    /// The target.
    #[serde(flatten)]
    pub at: BackupTarget,
    /// Only the one of this name, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only: Option<BackupName>,
    /// Without the `cloud_init` of VMs, which may be long.
    #[serde(default)]
    pub is_short: bool,
    /// The tenant's key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<BackupKey>,
    /// As in [`RestoreVolume`].
    #[serde(default)]
    pub encrypted: bool,
}

/// A backup that was found at a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FoundBackup {
    /// Its name.
    pub name: BackupName,
    /// The volume that it is of, as in [`Backup`]; `None`: that can't be read.
    pub volume: Option<VolumeName>,
    /// The image that it is of; `None`: it is of none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageName>,
    /// When the volume was sealed; Unix time.
    pub taken_ms: u64,
    /// The size of the volume's disk.
    pub size_bytes: u64,
    /// The data of all its layers.
    pub data_bytes: u64,
    /// Why it can't be read; else empty.
    pub problem: String,
    /// The VM that it is of, without what may be secret; `None`: it is of a volume, or of one of a VM's other disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<Box<VmBackup>>,
}

/// What the backup of a VM has, beside the bytes of its root disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmBackup {
    /// What makes such a VM.
    pub vm: NewVm,
    /// Its other disks, as far as they are in the backup.
    pub parts: Vec<VmBackupPart>,
}

/// One of a VM's other disks: a volume that it writes, the variables of its firmware, or the state of its TPM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmBackupPart {
    /// The volume. One that is not among the VM's volumes is a disk of its own, and its name says which (`VM-nvram`, `VM-tpm`).
    pub volume: VolumeName,
    /// The backup of the volume, at the same target.
    pub backup: BackupName,
}

/// Seals volumes of one home for the backup of a VM, all at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealForBackup {
    /// The volumes.
    pub volumes: Vec<VolumeName>,
    /// The target.
    pub to: BackupTarget,
    /// The present time by the controller's clock; Unix time.
    pub now_ms: u64,
}

/// A layer that was sealed for a backup before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealedForBackup {
    /// The layer.
    pub layer: LayerId,
    /// The size of the volume's disk at that moment.
    pub size_bytes: u64,
    /// When; Unix time.
    pub taken_ms: u64,
}

/// Has a volume's home ship a backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShipBackup {
    /// The backup's name.
    pub name: BackupName,
    /// The target.
    pub to: BackupTarget,
    /// The present time by the controller's clock; Unix time.
    pub now_ms: u64,
    /// The target has had backups, so it is not an empty directory over which a disk should be mounted.
    pub is_known: bool,
    /// As in [`NewBackup`].
    pub whole: bool,
    /// What was sealed for it ([`SealForBackup`]); `None`: the volume is sealed now.
    #[serde(default)]
    pub sealed: Option<SealedForBackup>,
    /// Of a VM's root disk: what else the backup has.
    #[serde(default)]
    pub vm: Option<Box<VmBackup>>,
    /// Of a tenant's user: how much may be at the target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub room: Option<BackupRoom>,
    /// As in [`NewBackup`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypted: bool,
    /// The tenant's key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<BackupKey>,
}

/// How much a tenant's backups may hold. The target has nothing but these.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupRoom {
    /// The tenant.
    pub tenant: TenantName,
    /// What its backups may hold; `None`: as much as there is room for.
    pub limit_bytes: Option<u64>,
    /// What they hold at other targets.
    pub elsewhere_bytes: u64,
}

impl BackupRoom {
    /// Refuses more than the tenant may have.
    ///
    /// # Errors
    /// `NoSpace` with the figures.
    pub fn check(&self, what: &str, held_bytes: u64, more_bytes: u64) -> Result<(), Problem> {
        let held_bytes = held_bytes.saturating_add(self.elsewhere_bytes);
        let is_beyond = |limit: &u64| held_bytes.saturating_add(more_bytes) > *limit;
        let Some(limit_bytes) = self.limit_bytes.filter(is_beyond) else { return Ok(()) };
        let [limit, held, more] = [limit_bytes, held_bytes, more_bytes].map(format_bytes);
        let why = format!(
            "tenant {} may have {limit} of backups and has {held}; {more} more are to be shipped",
            self.tenant
        );
        Err(Problem::no_space(what, why).next(
            "delete old ones (perigee backup delete), or ask an admin for more (perigee tenant quota)",
        ))
    }
}

/// A backup that is complete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShippedBackup {
    /// When the volume was sealed; Unix time.
    pub taken_ms: u64,
    /// The size of the volume's disk.
    pub size_bytes: u64,
    /// The data of all its layers.
    pub data_bytes: u64,
    /// What was sent.
    pub shipped_bytes: u64,
    /// What the target holds now, if that was to be counted ([`ShipBackup::room`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_bytes: Option<u64>,
    /// It is encrypted at the target, whether that was asked for or not.
    #[serde(default)]
    pub encrypted: bool,
}

/// Has a host make a volume of a backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreVolume {
    /// The backup.
    pub backup: BackupName,
    /// Where it is.
    pub from: BackupTarget,
    /// The tenant of the new volume.
    pub tenant: TenantName,
    /// Whether the new volume may leave its site.
    pub leave_site: LeaveSite,
    /// The volume is made at once, on this new layer, which gets its bytes from the backup afterwards. `None`, or a backup that does not say which of its pieces has
    /// which block: all bytes are read and checked first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_once: Option<LayerId>,
    /// The new layer that gets all bytes first, where the volume is not made at once; `None`, or an older host: the host draws its id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<LayerId>,
    /// Whose own disk the volume is, as in `CreateVolume`. An older host makes nobody's volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<OwnerName>,
    /// The tenant's key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<BackupKey>,
    /// The backup was encrypted, so one that is not is another one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypted: bool,
}

/// Has a host make an image of a backup, when all bytes were read and checked. If there is this image on this layer, that is the answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreImage {
    /// The backup.
    pub backup: BackupName,
    /// Where it is.
    pub from: BackupTarget,
    /// The image's new layer.
    pub layer: LayerId,
    /// The tenant's key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<BackupKey>,
    /// As in [`RestoreVolume`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypted: bool,
}

/// A layer of a host that still gets bytes from a backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoringLayer {
    /// The layer.
    pub layer: LayerId,
    /// The backup's name.
    pub backup: String,
    /// Where it is.
    pub from: BackupTarget,
    /// What is still to come.
    pub missing_bytes: u64,
    /// Why the host could not get more when it last tried; else empty.
    pub problem: String,
    /// As in [`Restoring`].
    pub is_damaged: bool,
    /// The backups there are encrypted, and the host does not have their key since its volume server has started ([`SendBackupKey`]).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lacks_key: bool,
}

/// Sends a host the key of a target, for layers that get their bytes from there. The host has the key in memory only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendBackupKey {
    /// The target.
    pub at: BackupTarget,
    /// The key.
    pub key: BackupKey,
}

/// Has a host read a backup, and compare it with its checksums.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifyBackup {
    /// The backup.
    pub backup: BackupName,
    /// Where it is.
    pub at: BackupTarget,
    /// The tenant's key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<BackupKey>,
    /// As in [`RestoreVolume`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypted: bool,
}

/// Has a host delete a backup, and the layers that no other backup at the target needs. Nothing may be shipped to the target meanwhile.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeleteBackup {
    /// The backup.
    pub backup: BackupName,
    /// Where it is.
    pub at: BackupTarget,
    /// The answer says how many bytes the target holds afterwards.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub counts: bool,
    /// The tenant's key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<BackupKey>,
}

/// A backup that was read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VerifiedBackup {
    /// What was read.
    pub read_bytes: u64,
    /// What is missing or damaged; none if the backup is sound.
    pub problems: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ProblemKind;

    #[test]
    fn older_volume_servers_and_controllers_read_what_is_asked_of_a_target() {
        let at = BackupTarget { address: "s3://b".to_owned(), endpoint: None };
        let only = Some(BackupName::new("data-1").expect("a name"));
        let (key, encrypted) = (None, true);
        let ask = ListBackups { at: at.clone(), only, is_short: true, key, encrypted };
        let json = serde_json::to_value(&ask).expect("JSON");
        assert_eq!(serde_json::from_value::<BackupTarget>(json.clone()).expect("a target"), at);
        assert_eq!(serde_json::from_value::<ListBackups>(json).expect("what is asked"), ask);
        let json = serde_json::to_value(&at).expect("JSON");
        let (key, encrypted) = (None, false);
        let all = ListBackups { at, only: None, is_short: false, key, encrypted };
        assert_eq!(serde_json::from_value::<ListBackups>(json).expect("what is asked"), all);
    }

    #[test]
    fn a_backup_is_of_one_thing() {
        let (volume, vm) = (VolumeName::new("data").ok(), VmId::new("web").ok());
        let image = ImageName::new("golden").ok();
        let of = BackupOf::one(None, None, image.clone()).expect("one thing");
        assert_eq!((of.to_string(), of.name()), ("image golden".to_owned(), "golden"));
        BackupOf::one(volume, None, image.clone()).expect_err("two");
        BackupOf::one(None, vm, image).expect_err("two");
        BackupOf::one(None, None, None).expect_err("none");
    }

    #[test]
    fn a_target_is_an_absolute_path_or_an_s3_store() {
        let check = |address: &str, endpoint: Option<&str>| {
            let endpoint = endpoint.map(str::to_owned);
            BackupTarget { address: address.to_owned(), endpoint }.check()
        };
        for good in ["/srv/backups", "s3://bucket", "s3://bucket/of/mine"] {
            check(good, None).expect(good);
        }
        check("s3://bucket", Some("http://10.0.0.1:9000")).expect("an endpoint");
        for bad in ["", "backups", "./backups", "https://bucket"] {
            check(bad, None).expect_err(bad);
        }
        for other_way in [
            "/",
            "/srv/../etc",
            "/srv/..",
            "/srv/./b",
            "/srv//b",
            "//srv",
            "/srv/b/",
            "s3://",
            "s3:///b",
            "s3://b//p",
            "s3://b/../c",
            "s3://b/.",
            "s3://b/p/",
        ] {
            check(other_way, None).expect_err(other_way);
        }
        check("/srv/backups", Some("http://10.0.0.1:9000")).expect_err("it has none");
    }

    #[test]
    fn a_target_overlaps_what_is_below_it_and_nothing_beside_it() {
        let at = |address: &str| BackupTarget { address: address.to_owned(), endpoint: None };
        let overlaps = |one, two| at(one).overlaps(&at(two)) && at(two).overlaps(&at(one));
        assert!(overlaps("/srv/b", "/srv/b") && overlaps("s3://b", "s3://b/acme"));
        assert!(!overlaps("/srv/b", "/srv/b2") && !overlaps("s3://b/acme", "s3://b/blue"));
        let elsewhere = BackupTarget { endpoint: Some("http://x".to_owned()), ..at("s3://b") };
        assert!(!elsewhere.overlaps(&at("s3://b")));
        assert!(at("/srv/b/c").is_within(&at("/srv/b")) && !at("/srv").is_within(&at("/srv/b")));
    }

    #[test]
    fn the_room_of_a_tenant_counts_what_is_elsewhere_and_names_the_limit() {
        let tenant = TenantName::new("acme").expect("a name");
        let room = BackupRoom { tenant, limit_bytes: Some(5 << 30), elsewhere_bytes: 1 << 30 };
        room.check("ship", 2 << 30, 2 << 30).expect("there is room");
        let full = room.check("ship", 3 << 30, 2 << 30).expect_err("there is none");
        assert_eq!(full.kind, ProblemKind::NoSpace);
        let why =
            "tenant acme may have 5 GiB of backups and has 4 GiB; 2 GiB more are to be shipped";
        assert_eq!(full.why, why);
        let any = BackupRoom { limit_bytes: None, ..room };
        any.check("ship", u64::MAX, u64::MAX).expect("there is no limit");
    }

    #[test]
    fn a_layer_s_source_is_a_target_or_a_host() {
        for (address, endpoint) in [
            ("/srv/back ups", None),
            ("/srv/a?endpoint=b", None),
            ("s3://bucket/of/mine", None),
            ("s3://bucket", Some("http://10.0.0.1:9000")),
        ] {
            let endpoint = endpoint.map(str::to_owned);
            let target = BackupTarget { address: address.to_owned(), endpoint };
            let (plain, sealed) = (target.as_source(), target.as_sealed_source());
            assert_eq!(BackupTarget::of_source(&plain).as_ref(), Some(&target));
            assert_eq!(BackupTarget::of_source(&sealed).as_ref(), Some(&target));
            let is_sealed = [&plain, &sealed].map(|one| BackupTarget::is_sealed_source(one));
            assert_eq!(is_sealed, [false, true]);
        }
        assert_eq!(BackupTarget::of_source("home1:10809"), None);
        assert!(!BackupTarget::is_sealed_source("sealed:10809"));
    }

    #[test]
    fn a_slash_at_the_end_of_an_address_names_the_same_target() {
        for (asked, target) in
            [("/srv/backups/", "/srv/backups"), ("s3://b/p//", "s3://b/p"), ("s3://b/", "s3://b")]
        {
            let json = serde_json::json!({ "address": asked });
            let parsed: BackupTarget = serde_json::from_value(json).expect("a target");
            assert_eq!(parsed.address, target);
            parsed.check().expect("a target");
        }
    }
}
