//! Replicas of volumes: copies of a volume's sealed layers at another site, made again and again.
//!
//! One round: the home seals what the volume has ([`SealReplica`]), and the replica's volume server makes
//! copies of the layers that it lacks ([`PullReplica`]). A replica keeps its last complete points. When the
//! home is lost, a complete point becomes the volume ([`PromoteReplica`]), with a new incarnation. So no
//! session, epoch or message of the lost volume fits it. When the lost home comes back, it keeps what it has as
//! an image, and does not have the volume any more ([`Supersede`]).

use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::grant::SignedGrant;
use crate::home::{DepartedLayer, ServerAddresses, Tenure};
use crate::kept::KeptReplica;
use crate::volume::CachePolicy;
use crate::{HostId, ImageName, LayerId, SiteId, TenantName, VolumeName};

/// If a volume or its replica has more sealed layers than this, those that can be merged are merged.
pub const CHAIN_LAYERS_MAX: u64 = 32;

/// Seals what a volume has, at its home, for a replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealReplica {
    /// The replica's site. The home keeps the layer that each replica has, so that the next round ships only what is
    /// newer.
    pub replica: SiteId,
}

/// A volume's content at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealedReplica {
    /// The volume's tenure at its home.
    pub tenure: Tenure,
    /// Size of the disk that a client sees.
    pub size_bytes: u64,
    /// The sealed layers, topmost first; at least one.
    pub chain: Vec<DepartedLayer>,
    /// The tenant whose space it counts as.
    pub tenant: TenantName,
    /// How the volume's own layer is read and written.
    pub cache: CachePolicy,
}

/// Tells a volume's home that a replica has all of a layer, or that the replica does not exist any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinReplica {
    /// The replica's site.
    pub replica: SiteId,
    /// Its newest complete point; `None`: the replica does not exist any more.
    pub layer: Option<LayerId>,
}

/// A layer that a volume's home keeps for a replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaPin {
    /// The replica's site.
    pub replica: SiteId,
    /// The layer.
    pub layer: LayerId,
    /// The replica does not have all of it yet: everything below is kept as it is, too.
    pub filling: bool,
    /// What was written to the volume since: data of the layers above this one.
    pub newer_bytes: u64,
}

/// Begins a round: the replica's server asks the home for the volume's content and makes copies of what it lacks.
/// What has come of a round that is not complete is used again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullReplica {
    /// The volume's home.
    pub from: ServerAddresses,
    /// The replica's site.
    pub replica: SiteId,
    /// How many complete points are kept beside the new one, at least one.
    pub keep: u32,
    /// The present time by the controller's clock; Unix time.
    pub taken_ms: u64,
    /// For the volume's home; `None` in a cluster without certificates.
    #[serde(default)]
    pub grant: Option<SignedGrant>,
}

/// A round that has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PulledReplica {
    /// What the replica lacked of the volume, and ships in this round.
    pub ships_bytes: u64,
}

/// What a replica has of a volume at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReplicaPoint {
    /// The topmost layer.
    pub layer: LayerId,
    /// When the volume was sealed; Unix time.
    pub taken_ms: u64,
    /// Bytes that are still missing; 0 when it is complete, compared with the home's checksums, and durable.
    pub missing_bytes: u64,
    /// Why they could not be fetched the last time; empty if nothing has failed.
    pub problem: String,
    /// What is here of it is not used as it is: its bytes are not those of the home, or their disk has failed. So
    /// only a round that begins anew makes a complete point. That one ships again what is damaged.
    pub broken: bool,
}

/// A replica, at the volume server that has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeReplica {
    /// The volume.
    pub volume: VolumeName,
    /// The volume's tenure when its newest point was made; `None`: there is no point.
    pub tenure: Option<Tenure>,
    /// The newest first.
    pub points: Vec<ReplicaPoint>,
    /// The number of layers of the newest point.
    pub layers: u64,
}

impl VolumeReplica {
    /// The newest point that could become the volume.
    pub fn complete(&self) -> Option<&ReplicaPoint> {
        self.points.iter().find(|point| point.missing_bytes == 0)
    }
}

/// Makes a complete point of a replica the volume. A repeated request succeeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromoteReplica {
    /// The point.
    pub layer: LayerId,
    /// The first tenure of a new incarnation.
    pub tenure: Tenure,
}

/// Tells a home that was lost that a replica has become the volume. A repeated request succeeds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Supersede {
    /// The volume's tenure at this server before.
    pub lost: Tenure,
    /// The tenure of the volume that the replica has become.
    pub tenure: Tenure,
    /// Where the volume is now.
    pub to: ServerAddresses,
}

/// What a lost home has kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Superseded {
    /// The volume's last content there; `None` if it was not there.
    pub image: Option<ImageName>,
}

/// Asks for a replica of a volume at a site, or changes how it is made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReplicateVolume {
    /// Where the replica is to be.
    pub to: SiteId,
    /// Seconds between two rounds.
    pub every_s: u64,
    /// How many complete points are kept.
    pub keep: u32,
}

/// Ends a replica and drops what it has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StopReplica {
    /// Where the replica is.
    pub to: SiteId,
}

/// A volume's replica at a site, as the controller knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Replica {
    /// The volume.
    pub volume: VolumeName,
    /// The site.
    pub site: SiteId,
    /// The host that has it.
    pub host: HostId,
    /// Seconds between two rounds.
    pub every_s: u64,
    /// How many complete points are kept.
    pub keep: u32,
    /// When the volume was sealed for the newest complete point; Unix time. `None`: no round is complete yet.
    pub complete_ms: Option<u64>,
    /// The number of complete points.
    pub points: u32,
    /// What was written to the volume since the newest complete point; `None` while that is not known.
    pub behind_bytes: Option<u64>,
    /// What the present round still has to ship; `None` while none is under way.
    pub missing_bytes: Option<u64>,
    /// It is being dropped.
    pub stopping: bool,
    /// Its host is given back, and its disk is kept at the provider: no round is made meanwhile.
    #[serde(default)]
    pub kept: Option<KeptReplica>,
    /// Why the last round failed, or what it waits for; empty when there is no trouble.
    pub problem: String,
}

impl Replica {
    /// How old the newest complete point is.
    pub fn age(&self, now_ms: u64) -> Option<Duration> {
        self.complete_ms.map(|at_ms| Duration::from_millis(now_ms.saturating_sub(at_ms)))
    }
}

/// Makes a replica the volume, because its home is lost.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PromoteVolume {
    /// The host whose replica is taken [default: the one with the newest].
    #[serde(default)]
    pub host: Option<HostId>,
    /// Do it although the home answers.
    #[serde(default)]
    pub force: bool,
    /// Only say what would be lost.
    #[serde(default)]
    pub dry_run: bool,
    /// The point of the replica that is taken, as a dry run has named it [default: the newest complete one].
    #[serde(default)]
    pub layer: Option<LayerId>,
    /// Call off a promotion that is not done, because its host does not answer. The volume stays what it was.
    #[serde(default)]
    pub cancel: bool,
}

/// What a promotion does, or would do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Promotion {
    /// The volume.
    pub volume: VolumeName,
    /// The home that is lost.
    pub from: HostId,
    /// The new home.
    pub to: HostId,
    /// The point of the replica there.
    pub layer: LayerId,
    /// Everything that was written after this is lost; Unix time.
    pub taken_ms: u64,
    /// How long that is before the home last answered. What a home that is cut off still takes is lost too.
    pub age_s: u64,
    /// How long ago the home last answered; 0 if it answers.
    pub silent_s: u64,
    /// What was known to be written since, when the home last answered; `None` if that is not known.
    pub behind_bytes: Option<u64>,
    /// Whether the volume had sessions at its home when that last answered; `None` if that is not known.
    pub in_use: Option<bool>,
}
