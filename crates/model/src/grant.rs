//! What the controller lets one host do to volumes of another.
//!
//! A host raises writer epochs, takes a volume and makes a replica because the controller has ordered that. The order
//! carries a grant, which the controller's authority has signed, and the host shows it to the volume's home
//! ([`GRANT_HEADER`]). So the home need not ask the controller, which may be away, and nothing of a grant is stored there.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::home::Tenure;
use crate::volume::{EpochChange, VolumeEpochChange};
use crate::{HostId, SiteId, VolumeName};

/// The header of a request that shows a [`SignedGrant`].
pub const GRANT_HEADER: &str = "perigee-grant";

/// For how long a grant counts. A migration that broke may wait this long for the homes of its VM's volumes. It is much
/// longer than the clocks of two machines may differ.
pub const GRANT_LIFE_MS: u64 = 24 * 3600 * 1000;

/// What one host may do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// The host that may do it.
    pub host: HostId,
    /// What it may do.
    pub allows: Allowed,
    /// Until when, by the controller's clock; Unix time.
    pub until_ms: u64,
}

/// The part of a [`Grant`] that says what.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Allowed {
    /// Make these changes of writer epochs, and take them back.
    Epochs(Vec<VolumeEpochChange>),
    /// Become the volume's home when this tenure ends.
    Home {
        /// The volume.
        volume: VolumeName,
        /// Its tenure at the old home.
        tenure: Tenure,
    },
    /// Make a replica of the volume for this site.
    Replica {
        /// The volume.
        volume: VolumeName,
        /// The replica's site.
        site: SiteId,
    },
}

impl Allowed {
    /// Whether the writer's epoch may be changed so.
    pub fn changes(&self, volume: &VolumeName, change: EpochChange) -> bool {
        let Self::Epochs(all) = self else { return false };
        let back = EpochChange { from: change.to, to: change.from };
        all.iter().any(|one| one.volume == *volume && [change, back].contains(&one.change))
    }

    /// Whether the volume may be sealed, to be taken then.
    pub fn takes(&self, volume: &VolumeName) -> bool {
        matches!(self, Self::Home { volume: of, .. } if of == volume)
    }

    /// Whether the volume may be taken when this tenure ends.
    pub fn takes_after(&self, volume: &VolumeName, ends: Tenure) -> bool {
        matches!(self, Self::Home { volume: of, tenure } if of == volume && *tenure == ends)
    }

    /// Whether a replica of the volume may be made for this site.
    pub fn replicates(&self, volume: &VolumeName, at: &SiteId) -> bool {
        matches!(self, Self::Replica { volume: of, site } if of == volume && site == at)
    }
}

/// A [`Grant`] as its host shows it: the authority's signature in hexadecimal, a blank, and the grant as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct SignedGrant(pub String);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Epoch;

    fn volume(name: &str) -> VolumeName {
        VolumeName::new(name).expect("a name")
    }

    #[test]
    fn a_grant_allows_what_it_names_and_nothing_else() {
        let (a, b) = (volume("a"), volume("b"));
        let change = EpochChange { from: Epoch(1), to: Epoch(2) };
        let epochs = Allowed::Epochs(vec![VolumeEpochChange { volume: a.clone(), change }]);
        assert!(epochs.changes(&a, change));
        assert!(epochs.changes(&a, EpochChange { from: Epoch(2), to: Epoch(1) }), "and back");
        assert!(!epochs.changes(&b, change));
        assert!(!epochs.changes(&a, EpochChange { from: Epoch(2), to: Epoch(3) }));
        let home = Allowed::Home { volume: a.clone(), tenure: Tenure(7) };
        assert!(home.takes(&a) && home.takes_after(&a, Tenure(7)));
        assert!(!home.takes(&b) && !home.takes_after(&a, Tenure(8)));
        let site = |name: &str| SiteId::new(name).expect("a name");
        let replica = Allowed::Replica { volume: a.clone(), site: site("home") };
        assert!(replica.replicates(&a, &site("home")));
        assert!(!replica.replicates(&a, &site("cloud")) && !replica.replicates(&b, &site("home")));
        assert!(!replica.takes(&a) && !home.changes(&a, change) && !epochs.takes(&a));
    }
}
