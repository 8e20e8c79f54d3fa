//! Volumes and images as the cluster knows them, requests for new ones, and what hosts have that no record names.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::backup::Restoring;
use crate::replica::Replica;
use crate::vm::VmStatus;
use crate::volume::{ImageFormat, VolumeSource};
use crate::volume_move::VolumeMove;
use crate::waiting::Waiting;
use crate::{Epoch, HostId, ImageName, JobId, LeaveSite, SiteId, VolumeName};

/// A volume as the cluster knows it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ClusterVolume {
    /// Unique in the cluster.
    pub name: VolumeName,
    /// The host whose pool has the writable head.
    pub home: HostId,
    /// The size of the disk that a VM sees.
    pub size_bytes: u64,
    /// Data of the volume in head and chain, as last seen at its home; 0 when it was never seen.
    pub allocated_bytes: u64,
    /// Who may write it now, as last seen at its home.
    pub epoch: Epoch,
    /// The job that has it open for writing.
    pub used_by: Option<JobId>,
    /// Its move to another home, while one is under way.
    pub moving: Option<VolumeMove>,
    /// Whether it may leave its site, as last seen at its home.
    pub leave_site: LeaveSite,
    /// Its replicas at other sites.
    pub replicas: Vec<Replica>,
    /// The backup from which bytes of it are still to come, while some are.
    #[serde(default)]
    pub restoring: Option<Restoring>,
    /// Its home does not answer: what is shown is as last seen there.
    pub waits: Vec<Waiting>,
}

/// Makes a volume known to the controller that was made at a host without it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AdoptVolume {
    /// The host that has it.
    pub host: HostId,
}

/// Something that a host says it has, and that no record of the controller names there. Nothing is done with it until somebody says so.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Unknown {
    /// What it is.
    pub kind: UnknownKind,
    /// Its name there.
    pub name: String,
    /// The host.
    pub host: HostId,
    /// A VM's memory, or the size of the disk that a client sees.
    pub size_bytes: u64,
    /// The data of a volume or an image.
    pub allocated_bytes: u64,
    /// What a VM does.
    pub status: Option<VmStatus>,
    /// Why it is unknown.
    pub why: String,
    /// What can be done with it.
    pub next: String,
}

/// What a host may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum UnknownKind {
    /// A virtual machine.
    Vm,
    /// A volume, also one that was made for a job.
    Volume,
    /// An image or a snapshot.
    Image,
}

/// Ends a VM that a host has and no record names there.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct EndUnknownVm {
    /// The host that has it.
    pub host: HostId,
    /// At once, as a power cut does. Else its guest is asked to power off, and one that is off is removed.
    #[serde(default)]
    pub force: bool,
}

/// Makes the record of a VM that a host has and no record names there.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AdoptVm {
    /// The host at which it runs.
    pub host: HostId,
    /// The image of which its root disk is a clone; `None`: that whose layer the disk stands on.
    #[serde(default)]
    pub image: Option<ImageName>,
}

/// A volume to be made.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NewVolume {
    /// Unique in the cluster.
    pub name: VolumeName,
    /// Its home; default: the source's home, else the host with the most room.
    #[serde(default)]
    pub host: Option<HostId>,
    /// At least the source's size, which is the default. See [`crate::limits::VOLUME_BYTES`].
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// What it starts with.
    pub source: VolumeSource,
    /// Whether it may leave its site. If its source may not, it may not either, whatever this says.
    #[serde(default)]
    pub leave_site: LeaveSite,
}

/// An image as the cluster knows it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ClusterImage {
    /// Stands for one layer in the whole cluster.
    pub name: ImageName,
    /// The size of the disk that it is an image of.
    pub size_bytes: u64,
    /// Data in its layers, as one complete copy has it.
    pub allocated_bytes: u64,
    /// Hosts that can use it.
    pub hosts: Vec<HostId>,
    /// What the hosts' copies together have not fetched yet.
    pub missing_bytes: u64,
    /// Whether it may leave its site.
    pub leave_site: LeaveSite,
    /// Whether every tenant may use it.
    pub shared: bool,
    /// In the answer to a snapshot of a VM that runs: why it is only what a power cut would have left. In the answer to an import: what its
    /// user is to know about it. Otherwise empty, as of every image that is only shown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
}

/// An image to be imported.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NewImage {
    /// Must not stand for another image in the cluster.
    pub name: ImageName,
    /// What an upload to that host was answered with, or a path below a directory that its operator allows for this
    /// (`--image-dir`).
    pub source: String,
    /// The source's format. Default: it is found out.
    #[serde(default)]
    pub format: Option<ImageFormat>,
    /// Where to import it first; every other host gets a copy. Default: any host.
    #[serde(default)]
    pub host: Option<HostId>,
    /// Whether it may leave its site. If not, only hosts of the site get copies.
    #[serde(default)]
    pub leave_site: LeaveSite,
}

/// Asks for copies of an image at a site.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReplicateImage {
    /// Each of its hosts that is up gets one.
    pub to: SiteId,
}
