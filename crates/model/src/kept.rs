//! The disk of a rented host's pool, kept at the provider as a snapshot while no host is rented at its site.
//!
//! Replicas at such a host would end with the host, and would be shipped again to the next one. So before the host is given back, its provider is
//! asked for a snapshot of the disk, if that is worth its price. The next host that is rented there has a disk made of the snapshot, and its
//! replicas ship only what has changed since. A record carries the id of the rental whose disk it is, and so does the snapshot, as a tag.

use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::ids::{HostId, RentalId, SiteId, VolumeName};
use crate::money::{MONTH_S, Money, PRICE_AGE_S_DEFAULT};
use crate::states::Refused;

/// The root disk of a host whose pool has a disk of its own.
pub const ROOT_DISK_BYTES: u64 = 16 << 30;

/// A pool has a disk of its own if that has at least so many bytes.
const POOL_DISK_MIN_BYTES: u64 = 1 << 30;

/// A disk is kept for so long at most.
pub const KEPT_MAX_S: u64 = 30 * 86_400;

/// The label of the filesystem on a pool's disk.
pub const POOL_LABEL: &str = "perigee-pool";

/// The disk of an instance's pool, beside its root disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolDisk {
    /// Its size, in whole GiB. The root disk has [`ROOT_DISK_BYTES`], and both together have the size that was asked for.
    pub bytes: u64,
    /// The provider's id of the snapshot that the disk is made of; `None`: the disk is blank.
    #[serde(default)]
    pub snapshot: Option<String>,
}

impl PoolDisk {
    /// A blank one, if a host with so many bytes of disk has room for one beside its root disk.
    #[must_use]
    pub fn of(disk_bytes: u64) -> Option<Self> {
        // Disks have whole GiB, and a host finds its one by its size.
        let bytes = disk_bytes.checked_sub(ROOT_DISK_BYTES)? >> 30 << 30;
        (bytes >= POOL_DISK_MIN_BYTES).then_some(Self { bytes, snapshot: None })
    }
}

/// What a provider takes for snapshots, as `providers.yaml` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotPrice {
    /// Millionths of a dollar for each GiB and month; `None`, also for 0: not known.
    pub per_gib_month_micros: Option<NonZeroU64>,
    /// When that was so, in seconds since 1970.
    pub as_of_unix_s: u64,
    /// How old it may be.
    pub age_max_s: u64,
}

impl SnapshotPrice {
    /// What counts of it at this Unix time, in seconds.
    #[must_use]
    pub fn at(&self, now_s: u64) -> Option<Money> {
        let is_old = now_s.saturating_sub(self.as_of_unix_s) > self.age_max_s;
        let is_ahead = self.as_of_unix_s > now_s.saturating_add(crate::money::AHEAD_MAX_S);
        let price = self.per_gib_month_micros.filter(|_| !is_old && !is_ahead)?;
        Some(Money::from_micros(price.get()))
    }
}

impl Default for SnapshotPrice {
    fn default() -> Self {
        let age_max_s = PRICE_AGE_S_DEFAULT;
        Self { per_gib_month_micros: None, as_of_unix_s: 0, age_max_s }
    }
}

/// A provider is asked for a snapshot of the disk of an instance's pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewSnapshot {
    /// The rental whose disk it is; the snapshot's tag [`crate::rental::RENTAL_TAG`].
    pub rental: String,
    /// The snapshot's tag [`crate::rental::CLUSTER_TAG`].
    pub cluster: String,
    /// The provider's id of the instance.
    pub instance: String,
}

/// How a snapshot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SnapshotState {
    /// It has the disk's content of the moment when it was asked for, and can't be used yet.
    Pending,
    /// A disk can be made of it.
    Complete,
    /// No disk can be made of it.
    Failed,
}

/// A snapshot that a provider has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The provider's id of it.
    pub id: String,
    /// What its tag [`crate::rental::RENTAL_TAG`] says; `None` if it has no such tag.
    pub rental: Option<String>,
    /// How it is.
    pub state: SnapshotState,
    /// What is paid for; `None` if the provider does not say so: then it is taken for as large as the disk.
    pub stored_bytes: Option<u64>,
}

/// How far a kept disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum KeptState {
    /// Its host is empty. The provider was not asked.
    Wanted,
    /// The provider was asked for a snapshot, which is not complete.
    Asked,
    /// The snapshot is complete.
    Kept,
    /// The provider is asked to delete the snapshot, until there is none.
    Ending,
    /// There is no snapshot, and none comes.
    Gone,
}

/// What happens to a kept disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeptEvent {
    /// The money is reserved, and the provider is asked.
    Asks,
    /// The provider has refused, and has made nothing.
    Refused,
    /// The snapshot is complete.
    Complete,
    /// It is not wanted any more.
    Ends,
    /// There is no snapshot.
    Vanished,
}

impl KeptState {
    /// Every state.
    pub const ALL: [Self; 5] = [Self::Wanted, Self::Asked, Self::Kept, Self::Ending, Self::Gone];

    /// Whether nothing is left to do.
    #[must_use]
    pub fn is_over(self) -> bool {
        self == Self::Gone
    }

    /// Whether its host still waits for the snapshot.
    #[must_use]
    pub fn is_being_made(self) -> bool {
        matches!(self, Self::Wanted | Self::Asked)
    }

    /// The state after an event.
    ///
    /// # Errors
    /// [`Refused`] when the event belongs to another state.
    pub fn next(self, event: KeptEvent) -> Result<Self, Refused> {
        use KeptEvent::{Asks, Complete, Ends, Refused as No, Vanished};
        match (self, event) {
            (Self::Wanted, Asks) => Ok(Self::Asked),
            (Self::Asked, No) => Ok(Self::Wanted),
            (Self::Asked, Complete) => Ok(Self::Kept),
            // Nobody was asked.
            (Self::Wanted, Ends) => Ok(Self::Gone),
            (Self::Asked | Self::Kept, Ends) => Ok(Self::Ending),
            (Self::Asked | Self::Kept | Self::Ending, Vanished) => Ok(Self::Gone),
            _ => Err(Refused::new("kept disk", self, event, "its steps have one order")),
        }
    }
}

/// Lower-case, as in JSON.
impl std::fmt::Display for KeptState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Wanted => "wanted",
            Self::Asked => "asked",
            Self::Kept => "kept",
            Self::Ending => "ending",
            Self::Gone => "gone",
        })
    }
}

/// What the provider's lists say of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SnapshotSeen {
    /// It is not there, or no list is newer than the last request. A list may be late.
    Absent,
    /// All lists of a whole grace period, which began after the last request was over, are without it.
    AbsentForLong,
    /// It is there.
    There(SnapshotState),
}

/// What is known of a kept disk when the next step is decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeptKnown {
    /// As its record has it.
    pub state: KeptState,
    /// What the provider shows.
    pub seen: SnapshotSeen,
    /// Its host is there, and nothing at its pool changes any more.
    pub is_still: bool,
    /// There is a reason to end it.
    pub ends: bool,
}

/// What is done next for a kept disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeptStep {
    /// Nothing now.
    Wait,
    /// Ask the provider for a snapshot, after the record says so.
    Ask,
    /// Record this.
    Event(KeptEvent),
    /// Ask the provider to delete the snapshot.
    Delete,
}

/// The next step. What is not known ends nothing, and has nothing made twice.
#[must_use]
pub fn decide(known: &KeptKnown) -> KeptStep {
    use KeptEvent::{Complete, Ends, Vanished};
    use SnapshotSeen::{AbsentForLong, There};
    let KeptKnown { state, seen, is_still, ends } = *known;
    match state {
        KeptState::Wanted if ends => KeptStep::Event(Ends),
        KeptState::Wanted if is_still => KeptStep::Ask,
        KeptState::Asked | KeptState::Kept if ends || seen == There(SnapshotState::Failed) => {
            KeptStep::Event(Ends)
        }
        KeptState::Asked if seen == There(SnapshotState::Complete) => KeptStep::Event(Complete),
        KeptState::Asked | KeptState::Kept | KeptState::Ending if seen == AbsentForLong => {
            KeptStep::Event(Vanished)
        }
        KeptState::Ending => KeptStep::Delete,
        KeptState::Wanted | KeptState::Asked | KeptState::Kept | KeptState::Gone => KeptStep::Wait,
    }
}

/// The disk of a rented host's pool, kept at the provider while no host is rented at its site.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeptDisk {
    /// The rental whose disk it is; the tag [`crate::rental::RENTAL_TAG`] of the snapshot.
    pub id: RentalId,
    /// The provider's name in `providers.yaml`.
    pub provider: String,
    /// The site of the host.
    pub site: SiteId,
    /// The host that had the disk.
    pub host: HostId,
    /// The provider's id of the host's instance.
    pub instance: String,
    /// The volumes whose replicas are there.
    pub volumes: Vec<VolumeName>,
    /// How far it is.
    pub state: KeptState,
    /// Why, or what it waits for; empty when there is nothing to say.
    pub why: String,
    /// Since when it is wanted; Unix time.
    pub wanted_ms: u64,
    /// When the provider was asked for the snapshot; Unix time.
    pub asked_ms: Option<u64>,
    /// Since when the snapshot is complete; Unix time.
    pub kept_ms: Option<u64>,
    /// When it was over; Unix time.
    pub ended_ms: Option<u64>,
    /// The provider's id of the snapshot; `None` while that is not known.
    pub snapshot: Option<String>,
    /// The size of the disk: what is reserved for, and what a disk made of the snapshot has at least.
    pub disk_bytes: u64,
    /// What is paid for, as far as that is known.
    pub stored_bytes: u64,
    /// The price for each GiB and month when the provider was asked; nothing before.
    pub per_gib_month: Money,
    /// What shipping the replicas again would cost. If keeping has cost as much, it ends.
    pub shipping: Money,
    /// The rental whose host has a disk made of the snapshot, or is about to. A record does not say it.
    #[serde(default)]
    pub used_by: Option<RentalId>,
    /// What it has cost until now. A record does not say it until it is over.
    #[serde(default)]
    pub spent: Option<Money>,
    /// What the ledger has reserved for it. A record does not say it.
    #[serde(default)]
    pub reserved: Money,
}

impl KeptDisk {
    /// What so many bytes cost for so many seconds, rounded up.
    #[must_use]
    pub fn cost(per_gib_month: Money, bytes: u64, seconds: u64) -> Money {
        per_gib_month.of(bytes.div_ceil(1024).saturating_mul(seconds), MONTH_S << 20)
    }

    /// What keeping it costs in a month.
    #[must_use]
    pub fn monthly(&self) -> Money {
        Self::cost(self.per_gib_month, self.stored_bytes, MONTH_S)
    }

    /// The most that it may cost in all.
    #[must_use]
    pub fn high(&self) -> Money {
        Self::cost(self.per_gib_month, self.disk_bytes, KEPT_MAX_S)
    }

    /// Takes an event into account.
    ///
    /// # Errors
    /// [`Refused`] if the event belongs to another state.
    pub fn take(
        &mut self,
        event: KeptEvent,
        at_ms: u64,
        why: impl Into<String>,
    ) -> Result<(), Refused> {
        self.state = self.state.next(event)?;
        self.why = why.into();
        match self.state {
            KeptState::Asked => self.asked_ms = Some(at_ms),
            KeptState::Kept => self.kept_ms = Some(at_ms),
            KeptState::Gone => self.ended_ms = Some(at_ms),
            KeptState::Wanted | KeptState::Ending => {}
        }
        Ok(())
    }
}

/// A replica whose host is given back, and whose disk is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeptReplica {
    /// The provider's name in `providers.yaml`.
    pub provider: String,
    /// Since when the snapshot is complete; Unix time. `None`: it is being made.
    pub since_ms: Option<u64>,
    /// What keeping the whole disk costs in a month.
    pub monthly: Money,
}

impl KeptReplica {
    /// What people see of a disk.
    #[must_use]
    pub fn of(kept: &KeptDisk) -> Self {
        let monthly = kept.monthly();
        Self { provider: kept.provider.clone(), since_ms: kept.kept_ms, monthly }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(state: KeptState, seen: SnapshotSeen, is_still: bool, ends: bool) -> KeptKnown {
        KeptKnown { state, seen, is_still, ends }
    }

    const SEEN: [SnapshotSeen; 5] = [
        SnapshotSeen::Absent,
        SnapshotSeen::AbsentForLong,
        SnapshotSeen::There(SnapshotState::Pending),
        SnapshotSeen::There(SnapshotState::Complete),
        SnapshotSeen::There(SnapshotState::Failed),
    ];

    #[test]
    fn each_step_is_one_that_the_state_allows() {
        for state in KeptState::ALL {
            for seen in SEEN {
                for (is_still, ends) in [(false, false), (false, true), (true, false), (true, true)]
                {
                    let step = decide(&known(state, seen, is_still, ends));
                    match step {
                        KeptStep::Event(event) => drop(state.next(event).expect("it is allowed")),
                        KeptStep::Ask => drop(state.next(KeptEvent::Asks).expect("allowed")),
                        KeptStep::Delete => assert_eq!(state, KeptState::Ending),
                        KeptStep::Wait => {}
                    }
                }
            }
        }
    }

    #[test]
    fn one_that_may_have_a_snapshot_is_forgotten_only_when_no_list_has_it_for_long() {
        for state in [KeptState::Asked, KeptState::Kept, KeptState::Ending] {
            for seen in SEEN {
                for ends in [false, true] {
                    let step = decide(&known(state, seen, true, ends));
                    let is_over = step == KeptStep::Event(KeptEvent::Vanished);
                    assert!(!is_over || seen == SnapshotSeen::AbsentForLong, "{state} {seen:?}");
                }
            }
        }
    }

    #[test]
    fn nobody_is_asked_while_a_replica_may_still_change() {
        let step = decide(&known(KeptState::Wanted, SnapshotSeen::Absent, false, false));
        assert_eq!(step, KeptStep::Wait);
    }

    #[test]
    fn a_month_of_a_gib_costs_its_price_and_a_part_its_part() {
        let per = Money::from_micros(50_000);
        assert_eq!(KeptDisk::cost(per, 1 << 30, MONTH_S), per);
        assert_eq!(KeptDisk::cost(per, 1 << 29, MONTH_S).micros, 25_000);
        assert_eq!(KeptDisk::cost(per, 10 << 40, KEPT_MAX_S).micros, 504_986_302);
    }

    #[test]
    fn a_price_of_0_or_one_that_is_too_old_is_not_known() {
        let price = SnapshotPrice {
            per_gib_month_micros: NonZeroU64::new(50_000),
            as_of_unix_s: 1_000_000,
            age_max_s: 100,
        };
        assert_eq!(price.at(1_000_100), Some(Money::from_micros(50_000)));
        assert_eq!(price.at(1_000_101), None);
        assert_eq!(price.at(1_000_000 - 86_401), None);
        assert_eq!(SnapshotPrice { per_gib_month_micros: None, ..price }.at(1_000_000), None);
    }

    #[test]
    fn a_pool_has_a_disk_of_its_own_where_there_is_room() {
        assert_eq!(PoolDisk::of(16 << 30), None);
        assert_eq!(PoolDisk::of(50 << 30), Some(PoolDisk { bytes: 34 << 30, snapshot: None }));
    }

    #[test]
    fn a_pools_disk_has_whole_gib() {
        assert_eq!(PoolDisk::of(50_000_000_000).map(|disk| disk.bytes), Some(30 << 30));
        assert_eq!(PoolDisk::of((17 << 30) - 1), None);
    }
}
