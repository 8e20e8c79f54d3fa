//! Whether data may leave the site where it is. The volume server that has the data enforces this. It finds the
//! site of a client or a host by its address, and does not trust what the other side says. Data that may not
//! leave its site is called *confined*.
//!
//! Other sites read confined data over encrypted links into memory, and in no other way: there is no copy and no
//! replica of it, and its home does not move there. What is made from confined data, for example a clone or a
//! snapshot, is confined too.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{ImageName, LayerId, SiteId, TenantName, VolumeName};

/// Whether data may leave its site.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum LeaveSite {
    /// Copies may be made anywhere.
    #[default]
    Allowed,
    /// Other sites may only read and write it where it is, over an encrypted link.
    Never,
}

impl LeaveSite {
    /// Whether it is confined to its site.
    pub fn is_never(self) -> bool {
        self == Self::Never
    }

    /// The policy of data that is confined, or that is not.
    pub fn confined(confined: bool) -> Self {
        if confined { Self::Never } else { Self::Allowed }
    }
}

/// A text that is not the name of a [`LeaveSite`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} does not say whether data may leave its site: use allowed or never")]
pub struct BadLeaveSite(String);

impl std::str::FromStr for LeaveSite {
    type Err = BadLeaveSite;

    fn from_str(text: &str) -> Result<Self, BadLeaveSite> {
        match text {
            "allowed" => Ok(Self::Allowed),
            "never" => Ok(Self::Never),
            _ => Err(BadLeaveSite(text.chars().take(80).collect())),
        }
    }
}

impl std::fmt::Display for LeaveSite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Allowed => "allowed",
            Self::Never => "never",
        })
    }
}

/// Changes whether a volume or an image may leave its site, at its volume server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SetLeaveSite {
    /// The policy from now on.
    pub leave_site: LeaveSite,
    /// Confirms that data which was confined may leave from now on. It is needed for that only.
    #[serde(default)]
    pub confirmed: bool,
}

/// [`SetLeaveSite`] as the controller passes it on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SetLeaveSiteAs {
    /// What is asked for.
    #[serde(flatten)]
    pub set: SetLeaveSite,
    /// Who asks; `None`: somebody who may change everything.
    #[serde(default)]
    pub asker: Option<LeaveSiteAsker>,
}

impl From<SetLeaveSite> for SetLeaveSiteAs {
    fn from(set: SetLeaveSite) -> Self {
        Self { set, asker: None }
    }
}

/// For whom a policy is changed, if that is not an admin. Layers on which something of others stands stay confined, and
/// the answer names nothing of others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeaveSiteAsker {
    /// Whose data it may change.
    pub tenant: TenantName,
    /// Images of this tenant that are all tenants', so only an admin changes their policy.
    #[serde(default)]
    pub shared: Vec<ImageName>,
}

impl LeaveSiteAsker {
    /// Whether it may change the policy of what stands on a layer, named as in [`LeaveSiteSet::also`].
    pub fn may_change(&self, user: &str) -> bool {
        let (kind, name) = kind_and_name(user);
        self.tenant.owns(name)
            && !(kind == "image" && self.shared.iter().any(|shared| shared.as_str() == name))
    }

    /// Whether it may see the name of what stands on a layer.
    pub fn sees(&self, user: &str) -> bool {
        self.tenant.owns(kind_and_name(user).1)
    }
}

/// Splits `volume NAME`, `image NAME`, `volume NAME, which departed,` or `the replica of volume NAME`.
fn kind_and_name(user: &str) -> (&str, &str) {
    let named = user.strip_prefix("the replica of ").unwrap_or(user);
    let (kind, name) = named.split_once(' ').unwrap_or(("", named));
    (kind, name.split_once(',').map_or(name, |(name, _)| name))
}

/// What a change of [`LeaveSite`] did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeaveSiteSet {
    /// The policy before.
    pub before: LeaveSite,
    /// The policy now.
    pub leave_site: LeaveSite,
    /// The layers that are marked now, or that are not marked any more.
    pub layers: Vec<LayerId>,
    /// Volumes and images of this pool that have the same policy now, because they stand on these layers:
    /// `volume NAME`, `image NAME`.
    pub also: Vec<String>,
    /// Volumes and images that share data with it and may still leave, because the shared data is not confined.
    pub may_leave: Vec<String>,
}

/// Looks for layers at a volume server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FindLayers {
    /// The layers to look for; at most [`crate::limits::FOUND_LAYERS`].
    pub layers: Vec<LayerId>,
    /// What a replica has of this volume, and what it left there when it moved, is looked for as well.
    #[serde(default)]
    pub volume: Option<VolumeName>,
}

/// Changes whether those of these layers that are at a volume server may leave their site.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SetLayersLeaveSite {
    /// The layers.
    #[serde(flatten)]
    pub of: FindLayers,
    /// The policy from now on.
    pub leave_site: LeaveSite,
    /// Who asks; `None`: somebody who may change everything.
    #[serde(default)]
    pub asker: Option<LeaveSiteAsker>,
}

/// Layers that are at a volume server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FoundLayers {
    /// Those that were found.
    pub layers: Vec<LayerId>,
    /// The volumes and images that have them in their chains, named as in [`LeaveSiteSet::also`].
    pub users: Vec<String>,
    /// The volumes of which something stands on them that they left here when they moved away.
    pub departed: Vec<VolumeName>,
    /// The volumes and images, named as in `users`, that read one of the layers that were asked for from another host and
    /// keep nothing of it.
    pub readers: Vec<String>,
}

/// The sites of the cluster's hosts, as the controller knows them. A volume server keeps the last map that
/// it got, also over a restart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SiteMap {
    /// The site of the volume server.
    pub here: SiteId,
    /// The hosts' addresses; at most [`crate::limits::SITE_ADDRESSES`].
    pub hosts: Vec<SiteAddress>,
    /// The site of the sender, if the sender knows it. Then the sender's address belongs to that site.
    #[serde(default)]
    pub teller: Option<SiteId>,
}

/// An address of a host, and the host's site.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct SiteAddress {
    /// The address from which it connects to others.
    #[schema(value_type = String)]
    pub address: IpAddr,
    /// The host's site.
    pub site: SiteId,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_changes_and_sees_only_its_own_things() {
        let name = |name: &str| ImageName::new(name).expect("a name");
        let acme =
            LeaveSiteAsker { tenant: TenantName::new("acme").expect("a name"), shared: Vec::new() };
        let own = [
            "volume acme~v",
            "image acme~v",
            "volume acme~v, which departed,",
            "the replica of volume acme~v",
        ];
        for own in own {
            assert!(acme.may_change(own) && acme.sees(own), "{own}");
            let other = own.replace("acme~", "blue~");
            let others = own.replace("acme~", "");
            assert!(!acme.may_change(&other) && !acme.sees(&other), "{other}");
            assert!(!acme.may_change(&others) && !acme.sees(&others), "{others}");
        }
        let default =
            LeaveSiteAsker { tenant: TenantName::default(), shared: vec![name("debian")] };
        assert!(default.sees("image debian") && !default.may_change("image debian"));
        assert!(default.may_change("volume debian") && default.may_change("image other"));
    }

    #[test]
    fn a_policy_is_read_as_it_is_shown() {
        for leave_site in [LeaveSite::Allowed, LeaveSite::Never] {
            assert_eq!(leave_site.to_string().parse(), Ok(leave_site));
            assert_eq!(LeaveSite::confined(leave_site.is_never()), leave_site);
        }
        assert!("Never".parse::<LeaveSite>().is_err());
    }
}
