//! Rented hosts: what a provider offers, what is asked of it, and what becomes of a rental ([`states`]).
//!
//! A rental's record is written before its provider is asked, and its id is both the idempotency token of the request and a tag of the
//! instance, so that an instance whose request lost its answer is found again.

pub mod states;

use std::fmt;
use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::budget::MoneyRange;
use crate::ids::{HostId, RentalId, SiteId};
use crate::kept::PoolDisk;
use crate::money::{Money, Price};
use crate::renting::RentedFor;
use states::{RentalState, Requested};

/// The disk of a rented host if nobody names its size.
pub const RENT_DISK_DEFAULT_BYTES: u64 = 50 << 30;

/// Nothing is reserved for longer than twice as long as a host is rented for.
const LONGEST_S: u64 = 2 * 365 * 86_400;

/// `POST /v1/rentals`: rents a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RentHost {
    /// The id of the new rental, so that a request whose answer was lost can be repeated. `None`: the controller makes one.
    #[serde(default)]
    pub id: Option<RentalId>,
    /// The provider's name in `providers.yaml`.
    #[schema(min_length = 1)]
    pub provider: String,
    /// As in [`Offer::kind`].
    #[schema(min_length = 1)]
    pub kind: String,
    /// As in [`Offer::zone`]; `None`: where it is cheapest.
    #[serde(default)]
    pub zone: Option<String>,
    /// As in [`Offer::spot`].
    #[serde(default)]
    pub spot: bool,
    /// The site that the host belongs to; `None`: that of the provider's newest rental in the zone, else the one with the zone's name if own hosts are
    /// there, else one with the provider's name.
    #[serde(default)]
    pub site: Option<SiteId>,
    /// After so many seconds the host is given back; `None`: when somebody says so.
    #[serde(default)]
    #[schema(minimum = 60, maximum = 31_536_000)]
    pub for_s: Option<u64>,
    /// The provider's name of the machine image; `None`: the one that `providers.yaml` names, or the provider's own.
    #[serde(default)]
    pub image: Option<String>,
    /// The size of its disk; `None`: [`RENT_DISK_DEFAULT_BYTES`].
    #[serde(default)]
    #[schema(minimum = 1_073_741_824, maximum = 70_368_744_177_664_u64)]
    pub disk_bytes: Option<u64>,
    /// Where the host reaches the controller, `https://HOST:PORT`; `None`: the address that the controller knows of itself.
    #[serde(default)]
    pub controller_url: Option<String>,
}

/// `POST /v1/rentals/{rental}/end`: gives a host back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EndRental {
    /// Do not wait until all has left the host: its VMs end with it.
    #[serde(default)]
    pub now: bool,
}

/// A rental in a state since when, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RentalStep {
    /// The state.
    pub state: RentalState,
    /// Since when; Unix time.
    pub at_ms: u64,
    /// Why; empty where the state says all.
    pub why: String,
}

/// Steps of a rental that are kept: the first ones, and the last one.
pub const RENTAL_STEPS_MAX: usize = 32;

/// What a provider has refused, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OfferRefused {
    /// As in [`Offer::kind`].
    pub kind: String,
    /// As in [`Offer::zone`].
    pub zone: String,
    /// As in [`Offer::spot`].
    pub spot: bool,
    /// What the provider said.
    pub why: String,
    /// When; Unix time.
    pub at_ms: u64,
    /// The quota of the account that is used up, if the provider can tell which other kinds count in it: they are refused too, in all zones, if they have
    /// as many CPUs at least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<String>,
    /// The CPUs of what was refused; 0: not known.
    #[serde(default)]
    pub cpus: u32,
}

impl OfferRefused {
    /// Whether an offer is refused for the same reason. `quota`: that in which the offer's CPUs count.
    pub fn holds_for(&self, offer: &Offer, quota: Option<&str>) -> bool {
        let Self { kind, zone, spot, .. } = self;
        let is_same = (kind, zone) == (&offer.kind, &offer.zone);
        // Fewer CPUs may still be within the quota.
        let shares = self.quota.is_some() && self.quota.as_deref() == quota;
        *spot == offer.spot && (is_same || shares && offer.cpus >= self.cpus)
    }
}

/// `GET /v1/providers`: a provider and what it offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProviderOffers {
    /// Its name in `providers.yaml`.
    pub provider: String,
    /// What can be rented; `None` if the provider does not say.
    pub offers: Option<Vec<Offer>>,
    /// Why it does not; empty if it does.
    pub problem: String,
    /// What it has refused lately for want of capacity or quota.
    pub refused: Vec<OfferRefused>,
}

/// Who or what has ended a rental. [`Rental::ends_because`] says it in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EndedBy {
    /// A person has given the host back, or removed it from the cluster.
    Person,
    /// The renting rule has given the host back.
    Rule,
    /// The time for which it was rented is over.
    Time,
    /// The budget has no more for it, or its price is not known.
    Money,
    /// The provider takes it back, or shows no such instance any more.
    Provider,
    /// The provider has refused it.
    Refused,
    /// The provider does not let the account ask for it: a person has to act.
    NotAllowed,
    /// The provider has made something else than what was rented.
    OtherKind,
    /// No instance was shown, or its host did not join in time.
    NeverCame,
    /// Its host was silent for the length of its lease.
    Silent,
    /// The controller could not ask for it.
    NotAsked,
    /// No rental owned the instance.
    NotOwned,
}

/// A rented host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Rental {
    /// The idempotency token of its requests, and the tag [`RENTAL_TAG`] of its instance.
    pub id: RentalId,
    /// The provider's name in `providers.yaml`.
    pub provider: String,
    /// What was rented, for the price that held then.
    pub offer: Offer,
    /// The provider's name of the machine image; empty: the provider's own.
    pub image: String,
    /// The size of its disk.
    pub disk_bytes: u64,
    /// The site that the host belongs to.
    pub site: SiteId,
    /// The host's name in the cluster.
    pub host: HostId,
    /// Who asked for it, as the audit log names them.
    pub by: String,
    /// How far it is.
    pub state: RentalState,
    /// The states that it was in, the present one last.
    pub steps: Vec<RentalStep>,
    /// What it waits for, or why it ended; empty when there is nothing to say.
    pub why: String,
    /// Why it is to end, once that is so.
    pub ends_because: Option<String>,
    /// Who or what has said so; `None` also for one that ended before this was recorded.
    #[serde(default)]
    pub ended_by: Option<EndedBy>,
    /// When it is given back; Unix time. `None`: when somebody says so.
    pub until_ms: Option<u64>,
    /// The provider's id of its instance; `None` while that is not known.
    pub instance: Option<String>,
    /// The instance's address inside the provider's network; `None` while that is not known.
    pub address: Option<String>,
    /// What the requests to the provider may have made.
    pub requested: Requested,
    /// How often the provider was asked for it.
    pub asks: u32,
    /// When the provider was asked last; Unix time.
    pub asked_ms: Option<u64>,
    /// Why the provider has refused it, if it did so for want of capacity or quota.
    pub refused: Option<OfferRefused>,
    /// When the provider takes it back; Unix time.
    pub notice_ms: Option<u64>,
    /// When its host was first seen in the cluster; Unix time.
    pub joined_ms: Option<u64>,
    /// What it was predicted to cost when it was asked for; `None` if nobody said for how long it is rented.
    pub predicted: Option<MoneyRange>,
    /// What the ledger has reserved for it in all: the most that it costs until [`Rental::reserved_until_ms`]. A record does not say it.
    pub reserved: Money,
    /// Until when that is enough, if nothing more leaves its site; Unix time. A record does not say it.
    pub reserved_until_ms: Option<u64>,
    /// What has left its site, as far as that was counted. A record does not say it.
    pub left_bytes: u64,
    /// What its machine, its disk, and what has left its site have cost until now, by the price of the offer; `None`: not known. If only the price
    /// of what has left is not known, this is the rest: see [`Rental::is_spent_at_least`]. A record does not say it.
    pub spent: Option<Money>,
    /// For which jobs the cluster has rented it by itself, and why; `None` if a person has rented it.
    #[serde(default)]
    pub rented_for: Option<RentedFor>,
    /// When the first job ran there; Unix time.
    #[serde(default)]
    pub first_job_ms: Option<u64>,
    /// What its host has shown to be; `None` if it has not joined.
    #[serde(default)]
    pub found: Option<HostFound>,
}

/// What a rented host has shown to be, whatever its offer says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostFound {
    /// Its CPUs.
    pub cpus: u32,
    /// Its memory.
    pub memory_bytes: u64,
    /// Whether its VMs can use KVM.
    pub kvm: bool,
}

/// More than any machine that can be rented has. What says that it has more CPUs is a mistake, or no host.
pub const MACHINE_CPUS_MAX: u32 = 8192;

/// Whether such a machine can be: it has memory, and a number of CPUs that machines have.
#[must_use]
pub fn is_machine(cpus: u32, memory_bytes: u64) -> bool {
    (1..=MACHINE_CPUS_MAX).contains(&cpus) && memory_bytes > 0
}

impl HostFound {
    /// An offer of the same kind, as its next host will be. What can't be corrects nothing.
    #[must_use]
    pub fn correct(self, offer: &Offer) -> Offer {
        let Self { cpus, memory_bytes, kvm } = self;
        if !is_machine(cpus, memory_bytes) {
            return offer.clone();
        }
        Offer { cpus, memory_bytes, kvm: Some(kvm), ..offer.clone() }
    }
}

impl Rental {
    /// Since when it is in this state for the first time; Unix time.
    pub fn since_ms(&self, state: RentalState) -> Option<u64> {
        self.steps.iter().find(|step| step.state == state).map(|step| step.at_ms)
    }

    /// When somebody wanted it; Unix time.
    pub fn begun_ms(&self) -> u64 {
        self.steps.first().map_or(0, |step| step.at_ms)
    }

    /// It is to end. The first reason counts.
    pub fn end(&mut self, by: EndedBy, why: impl Into<String>) {
        if self.ends_because.is_none() {
            (self.ended_by, self.ends_because) = (Some(by), Some(why.into()));
        }
    }

    /// Takes an event into account.
    ///
    /// # Errors
    /// [`crate::states::Refused`] if the event belongs to another state.
    pub fn take(
        &mut self,
        event: states::RentalEvent,
        at_ms: u64,
        why: impl Into<String>,
    ) -> Result<(), crate::states::Refused> {
        let state = self.state.next(event)?;
        if state != self.state {
            if self.steps.len() >= RENTAL_STEPS_MAX {
                self.steps.pop();
            }
            self.steps.push(RentalStep { state, at_ms, why: why.into() });
        }
        self.state = state;
        Ok(())
    }

    /// What its machine and its disk cost for so many seconds; `None` if that is not known.
    pub fn cost(&self, seconds: u64) -> Option<Money> {
        let price = &self.offer.price;
        Some(price.machine(seconds)?.plus(price.disk(self.disk_bytes, seconds)?))
    }

    /// What has left its site costs; `None` if that is not known.
    pub fn egress(&self) -> Option<Money> {
        self.offer.price.egress(self.left_bytes)
    }

    /// What it has cost after so many seconds, without what has left its site if the price for that is not known; `None` if that is not known.
    pub fn cost_so_far(&self, seconds: u64) -> Option<Money> {
        Some(self.cost(seconds)?.plus(self.egress().unwrap_or_default()))
    }

    /// Whether it has cost more than is known: something has left its site, and the price for that is not known.
    pub fn is_spent_at_least(&self) -> bool {
        self.egress().is_none()
    }

    /// `$1.20`, or `at least $1.20`; `-` if it is not known.
    pub fn spent_in_words(&self) -> String {
        match self.spent {
            None => "-".to_owned(),
            Some(spent) if self.is_spent_at_least() => format!("at least {spent}"),
            Some(spent) => spent.to_string(),
        }
    }

    /// Until when what is reserved is enough, if nothing more leaves its site; Unix time. `None` if it does not run, or its price is not known.
    pub fn reserved_until_ms(&self) -> Option<u64> {
        let first_ms = self.since_ms(RentalState::Asked).filter(|_| !self.state.is_over())?;
        let is_enough = |seconds| Some(self.cost_so_far(seconds)? <= self.reserved);
        if !is_enough(0)? {
            return Some(first_ms);
        }
        // The longest time for which it is enough is in this range.
        let (mut enough_s, mut beyond_s) = (0, LONGEST_S);
        while enough_s + 1 < beyond_s {
            let middle_s = enough_s.midpoint(beyond_s);
            if is_enough(middle_s)? { enough_s = middle_s } else { beyond_s = middle_s }
        }
        Some(first_ms.saturating_add(enough_s.saturating_mul(1000)))
    }
}

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
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
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
    /// Of a spot host the most that an hour may cost, in millionths of a dollar, for so much is reserved: beyond that the provider takes it back.
    #[serde(default)]
    #[schema(value_type = Option<u64>, minimum = 1)]
    pub max_per_hour_micros: Option<NonZeroU64>,
    /// Must VMs on it be able to use KVM? Some kinds have to be asked for that.
    pub kvm: bool,
    /// The provider's name of the machine image.
    pub image: String,
    /// The size of its disk, of both together if its pool has one of its own.
    pub disk_bytes: u64,
    /// The disk of its pool; `None`: the pool is on the root disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolDisk>,
    /// What cloud-init reads there. Never logged: it has a join token.
    pub user_data: String,
}

impl fmt::Debug for NewInstance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rental, cluster, kind, zone, spot, max_per_hour_micros, .. } = self;
        let Self { kvm, image, disk_bytes, pool, .. } = self;
        f.debug_struct("NewInstance")
            .field("rental", rental)
            .field("cluster", cluster)
            .field("kind", kind)
            .field("zone", zone)
            .field("spot", spot)
            .field("max_per_hour_micros", max_per_hour_micros)
            .field("kvm", kvm)
            .field("image", image)
            .field("disk_bytes", disk_bytes)
            .field("pool", pool)
            .finish_non_exhaustive()
    }
}

/// What a provider says of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum InstanceState {
    /// It was asked for, and does not run yet.
    Pending,
    /// It runs.
    Running,
    /// It is on its way out, and nobody has to end it any more. One that only stopped is [`InstanceState::Unknown`].
    Ending,
    /// It is gone, and costs nothing any more.
    Gone,
    /// It is stopped, suspended or broken, or the provider says something that is not understood. The instance is taken for one that costs money.
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
    /// As in [`Offer::kind`]; [`KIND_UNKNOWN`] if the provider does not say it.
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

/// An instance in a list of a provider's program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedInstance {
    /// What its tag [`CLUSTER_TAG`] says.
    pub cluster: String,
    /// The instance.
    #[serde(flatten)]
    pub instance: Instance,
}

/// [`Instance::kind`] where the provider does not say it.
pub const KIND_UNKNOWN: &str = "unknown";

/// A provider's word that it will take an instance back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Notice {
    /// The provider's id of the instance.
    pub instance: String,
    /// When the instance goes, in seconds since 1970.
    pub ends_unix_s: u64,
}

/// What follows from an error of a provider. A provider's program says it in the same words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CloudErrorKind {
    /// The provider has no such machine free now: another kind, another zone, or later.
    NoCapacity,
    /// The account may have no more of this: until something is given back, or the provider raises the account's limit.
    Quota,
    /// The account may not do this, or the provider does not know the account: a person has to act.
    NotAllowed,
    /// Too many requests: later.
    Throttled,
    /// The provider refuses what was asked for, and would do so again.
    Refused,
    /// Nobody knows whether it was done. Before asking again, look.
    Unclear,
}

impl fmt::Display for CloudErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::NoCapacity => "no capacity",
            Self::Quota => "over the account's quota",
            Self::NotAllowed => "not allowed",
            Self::Throttled => "too many requests",
            Self::Refused => "refused",
            Self::Unclear => "not known whether it was done",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_data_are_not_shown() {
        let new = NewInstance {
            rental: "r1".to_owned(),
            cluster: "c1".to_owned(),
            kind: "k".to_owned(),
            zone: "z".to_owned(),
            spot: false,
            max_per_hour_micros: None,
            kvm: true,
            image: "image".to_owned(),
            disk_bytes: 1 << 30,
            pool: None,
            user_data: "join-token".to_owned(),
        };
        let shown = format!("{new:?} {new:#?}");
        assert!(shown.contains("r1") && !shown.contains("join-token"), "{shown}");
    }
}
