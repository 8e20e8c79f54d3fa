//! Rented hosts: what a provider offers, what is asked of it, and what becomes of a rental.
//!
//! ```text
//! wanted → asked → starting → joined → draining → ending → gone
//! ```
//!
//! A rental's record is written before its provider is asked, and its id is both the idempotency token of the request and a tag of the
//! instance, so that an instance whose request lost its answer is found again.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::money::Price;

/// The tag of an instance that holds its rental's id.
pub const RENTAL_TAG: &str = "perigee-rental";

/// The tag of an instance that holds its cluster's id, so that two clusters in one account leave each other's instances alone.
pub const CLUSTER_TAG: &str = "perigee-cluster";

/// One kind of machine that a provider has at one place, and its price.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Offer {
    /// The provider's name of the kind, such as `c8i.2xlarge`.
    pub kind: String,
    /// The provider's name of the place, such as `eu-central-1a`.
    pub zone: String,
    /// May the provider take the machine back at any time, for a lower price?
    pub spot: bool,
    /// Its CPUs.
    pub cpus: u32,
    /// Its memory.
    pub memory_bytes: u64,
    /// Can VMs on it use KVM? `None`: the provider does not say so, which is not a yes.
    pub kvm: Option<bool>,
    /// What it costs.
    pub price: Price,
}

/// What a provider is asked for. Asking twice with one `rental` gives one instance where the provider can do that.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewInstance {
    /// The id of the rental; the idempotency token and the tag [`RENTAL_TAG`].
    pub rental: String,
    /// The id of the cluster; the tag [`CLUSTER_TAG`].
    pub cluster: String,
    /// As in [`Offer::kind`].
    pub kind: String,
    /// As in [`Offer::zone`].
    pub zone: String,
    /// As in [`Offer::spot`].
    pub spot: bool,
    /// Must VMs on it be able to use KVM? Some kinds have to be asked for that.
    pub kvm: bool,
    /// The provider's name of the machine image.
    pub image: String,
    /// The size of its disk.
    pub disk_bytes: u64,
    /// What cloud-init reads there. Never logged: it has a join token.
    pub user_data: String,
}

/// What a provider says of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum InstanceState {
    /// It was asked for, and does not run yet.
    Pending,
    /// It runs.
    Running,
    /// It ends, or it stopped and is still paid for in part.
    Ending,
    /// It is gone, and costs nothing any more.
    Gone,
    /// The provider says something that is not understood. The instance is taken for one that costs money.
    Unknown,
}

/// An instance that a provider has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Instance {
    /// The provider's id of it.
    pub id: String,
    /// What its tag [`RENTAL_TAG`] says; `None` if it has no such tag.
    pub rental: Option<String>,
    /// How it is.
    pub state: InstanceState,
    /// As in [`Offer::kind`].
    pub kind: String,
    /// As in [`Offer::zone`].
    pub zone: String,
    /// As in [`Offer::spot`].
    pub spot: bool,
    /// Its address inside the provider's network; `None` as long as it has none.
    pub address: Option<String>,
    /// When the provider started it, in seconds since 1970; `None` if the provider does not say so.
    pub started_unix_s: Option<u64>,
}

/// A provider's word that it will take an instance back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Notice {
    /// The provider's id of the instance.
    pub instance: String,
    /// When the instance goes, in seconds since 1970.
    pub ends_unix_s: u64,
}
