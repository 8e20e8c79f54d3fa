//! A volume's home moves to another host while the volume is in use.
//!
//! The new home's volume server does it, when the controller asks it to ([`TakeVolume`]): it asks the old
//! home to let the volume depart ([`Depart`]), and puts a new head on the layers that the old home then
//! has sealed. What is not yet copied of them is read from the old home. [`Tenure`]s order all this: each
//! move has a number of its own, so that a message of an earlier move that comes late is known by it.

mod residence;
#[cfg(test)]
mod walk;

pub use residence::{HomeRefused, Place, Residence};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::grant::SignedGrant;
use crate::switchover::WriterEpochs;
use crate::volume::CachePolicy;
use crate::{Epoch, Incarnation, LayerId, LeaveSite, OwnerName, TenantName, VolumeName};

/// The number of a volume's stay at a home. It grows by at least one each time that the volume gets
/// another home, and by two when a move of it is called off.
///
/// The number has the volume's incarnation in front, as an [`Epoch`] has, and then counts from 0. So
/// a message about a volume that was deleted does not fit the next one of its name.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    ToSchema,
)]
#[serde(transparent)]
#[schema(value_type = u64)]
pub struct Tenure(pub u64);

impl Tenure {
    /// The tenure of a volume that never moved.
    pub fn first(incarnation: Incarnation) -> Self {
        Self(Epoch::first(incarnation).0 - 1)
    }

    /// Of which volume it is, among those that ever had the volume's name.
    pub fn incarnation(self) -> Incarnation {
        Epoch(self.0).incarnation()
    }

    /// The last one of its incarnation.
    #[must_use]
    pub fn last(self) -> Self {
        Self(Self::first(self.incarnation()).0 + Epoch::COUNT_MAX)
    }

    /// The one after it.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// The tenure before this one.
    #[must_use]
    pub fn before(self) -> Self {
        Self(self.0.saturating_sub(1))
    }
}

impl std::fmt::Display for Tenure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Where a volume server is reached.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub struct ServerAddresses {
    /// `HOST:PORT` of its NBD server.
    pub nbd_addr: String,
    /// Base address of its control API.
    pub control_url: String,
}

/// Has a volume server become a volume's home. A repeated request succeeds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TakeVolume {
    /// The home until now.
    pub from: ServerAddresses,
    /// This server, as the old home reaches it.
    pub to: ServerAddresses,
    /// The volume's tenure at the old home. Its tenure here is the next one.
    pub tenure: Tenure,
    /// For the old home; `None` in a cluster without certificates.
    #[serde(default)]
    pub grant: Option<SignedGrant>,
}

/// Lets a volume go to a new home: its head is flushed and sealed, and nothing is written here any more.
/// A repeated request gets the same answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Depart {
    /// The tenure that ends. Any other is refused.
    pub tenure: Tenure,
    /// Where the volume goes.
    pub to: ServerAddresses,
}

/// A volume that departed, with all that its new home has to know of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Departed {
    /// The tenure at the new home.
    pub tenure: Tenure,
    /// Size of the disk that a client sees.
    pub size_bytes: u64,
    /// Who may write, and which epochs were issued.
    pub epochs: WriterEpochs,
    /// The sealed layers, topmost first. The old home serves each as export `layer:UUID`.
    pub chain: Vec<DepartedLayer>,
    /// Whose space it counts as.
    pub tenant: TenantName,
    /// How its own layer is read and written.
    pub cache: CachePolicy,
    /// Who made it and may delete it for its own; `None`: a person.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<OwnerName>,
    /// Whether it may leave its site.
    pub leave_site: LeaveSite,
}

/// A sealed layer of a volume that departed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DepartedLayer {
    /// The same at every host that has the layer.
    pub layer: LayerId,
    /// Size of its address space.
    pub size_bytes: u64,
    /// Its own bytes that are `data`.
    pub data_bytes: u64,
    /// Whether it, and what stands on it, may leave its site.
    pub leave_site: LeaveSite,
    /// The blocks that the layer itself has, in order, so that nobody has to ask for them while sessions wait.
    /// `None`: they are not told here, and the layer's export `layer:UUID@own` tells them if it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own: Option<Vec<OwnBlocks>>,
}

/// Consecutive blocks that a layer itself has. It does not have the blocks between two of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OwnBlocks {
    /// The first one, in blocks of 4096 bytes.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// They are zeros, and nothing is stored of them.
    pub zero: bool,
}

/// Calls a move off at the host that should have become the volume's home, or takes the volume back at
/// its old home once the other host has refused it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CallOff {
    /// The volume's tenure at the old home before the move.
    pub tenure: Tenure,
}

/// What a volume server has of a volume's home.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum HomeState {
    /// It is the home: the volume's head is here.
    Here {
        /// Its number.
        tenure: Tenure,
        /// Bytes of the volume's layers that are still at the old home; 0 when the move is complete.
        missing_bytes: u64,
    },
    /// It was the home, and keeps the volume's sealed layers until it is told to forget them.
    Departed {
        /// The tenure at the new home.
        tenure: Tenure,
        /// The new home.
        to: ServerAddresses,
    },
    /// It is not the home, and will not become it in this tenure or an earlier one.
    NotHere {
        /// The highest tenure that it refused or had; 0: it never heard of the volume.
        refused: Tenure,
        /// The highest tenure that began at this server; 0: none that it knows of. If it is the volume's latest tenure,
        /// the volume was deleted there.
        had: Tenure,
    },
}

/// [`HomeState`] of one volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeHome {
    /// The volume.
    pub volume: VolumeName,
    /// Where its home is, as far as this server knows.
    pub home: HomeState,
    /// Why the background could not fetch what is missing here when it last tried; it tries again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}
