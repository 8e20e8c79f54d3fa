//! What the renting rule sees: how the waiting jobs would run at own and at rented hosts, the hosts that are there or starting, and what runs there.
//!
//! A run is predicted as `job plan` predicts it, at a cluster whose hosts have nothing to do: at the own hosts, and at one more host for each kind
//! that can be rented. What leaves the provider's site is in the plan's bill, at a price of a millionth of a dollar for each byte.

mod hosts;
mod predict;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;

use perigee_model::job::Start;
use perigee_model::money::{Money, Price};
use perigee_model::rental::{Offer, Rental};
use perigee_model::renting::RentSettings;
use perigee_model::vm::Accelerator;
use perigee_model::{HostId, JobId, Problem, SiteId};
use perigee_planner::queue::{Goes, Rented};
use perigee_planner::rent::{self, Job, Snapshot, Worth};

use crate::cluster::renter::{Basis, Predicted, kind_key};
use crate::cluster::{Cluster, capacity_of, demand_of};
use crate::records::{JobRecord, Kind as RecordKind};

pub use hosts::place_of;
pub use predict::{forget_money, key_of, like, predict, read_facts};

/// A host that is starting is expected in so many seconds at least.
const STARTS_S: f64 = 10.0;

/// A kind of machine that a provider has, and the site to which a host of it would belong.
#[derive(Debug, Clone)]
pub struct Kind {
    pub provider: String,
    pub offer: Offer,
    pub site: SiteId,
}

impl Kind {
    /// Its name among the kinds of all providers.
    pub fn key(&self) -> String {
        kind_key(&self.provider, &self.offer.kind)
    }
}

/// The sites to which hosts belong that are rented without a site's name.
#[derive(Debug, Default)]
pub struct Sites {
    /// Of the newest rental, by provider and zone.
    pub rented: BTreeMap<(String, String), SiteId>,
    /// Those of own hosts.
    pub own: BTreeSet<SiteId>,
}

impl Sites {
    pub fn of(cluster: &Cluster) -> Self {
        let mut rentals = cluster.rentals.all();
        rentals.sort_by_key(Rental::begun_ms);
        let hosts: BTreeSet<&HostId> = rentals.iter().map(|rental| &rental.host).collect();
        let all = cluster.hosts.all();
        let own = all.iter().filter(|host| !hosts.contains(&host.id));
        let own = own.map(|host| host.addresses.site.clone()).collect();
        // The newest one is the last.
        // An instance that nobody had asked for was of no known kind: nobody has chosen its site.
        let known = rentals.into_iter().filter(|one| one.offer.cpus > 0);
        let rented = known.map(|one| ((one.provider, one.offer.zone), one.site));
        Self { rented: rented.collect(), own }
    }

    /// The site of the provider's newest rental in the zone; without any, that with the zone's name, if own hosts are there, else one with the
    /// provider's name. `None` if that is no name of a site.
    pub fn at(&self, provider: &str, zone: &str) -> Option<SiteId> {
        let place = (provider.to_owned(), zone.to_owned());
        let same = || self.own.iter().find(|site| site.as_str() == zone);
        let known = self.rented.get(&place).or_else(same).cloned();
        known.or_else(|| SiteId::new(provider).ok())
    }
}

/// The offer as the renting rule sees it: with room for as many vCPUs and as much memory as VMs may have there, and with its disk in the price of
/// the machine.
pub fn as_seen(provider: &str, offer: &Offer, disk_bytes: u64) -> Offer {
    let room = capacity_of(offer.cpus, offer.memory_bytes);
    Offer {
        kind: kind_key(provider, &offer.kind),
        cpus: room.cpus,
        memory_bytes: room.memory_bytes,
        price: with_disk(&offer.price, disk_bytes),
        ..offer.clone()
    }
}

/// The price with the disk's in that of the machine. If the disk's is not known, neither is that.
fn with_disk(price: &Price, disk_bytes: u64) -> Price {
    let both = || {
        let disk = price.disk(disk_bytes, 3600)?;
        // Machine and disk are each rounded up; nothing is reserved for less than a minute.
        NonZeroU64::new(price.per_hour_micros?.get().saturating_add(disk.micros).saturating_add(60))
    };
    Price { per_hour_micros: both(), ..price.clone() }
}

/// A job as the renting rule sees it; `None` for what is no reason to rent: a job with several VMs, a VM without a job, and a job whose file names
/// its host.
pub fn job_of(
    cluster: &Cluster,
    record: &JobRecord,
    predicted: &Predicted,
    settings: RentSettings,
    without_kvm: bool,
) -> Option<Job> {
    is_asked_for(record).then(|| {
        let demand = demand_of(record);
        Job {
            job: record.job.id.clone(),
            cpus: demand.cpus,
            memory_bytes: demand.memory_bytes,
            own: predicted.own,
            own_egress: predicted.own_egress,
            rented: predicted.rented.clone(),
            may_leave: predicted.may_leave,
            without_kvm,
            worth: worth_of(cluster, record, settings),
        }
    })
}

/// Whether hosts may be rented for it.
pub fn is_asked_for(record: &JobRecord) -> bool {
    let spec = &record.job.spec;
    let is_named = matches!(spec.start, Start::Host(_));
    matches!(record.kind, RecordKind::Job) && spec.count <= 1 && !is_named
}

/// What the job's file says of waiting and money, or else what an admin says.
fn worth_of(cluster: &Cluster, record: &JobRecord, settings: RentSettings) -> Worth {
    let job = &record.job;
    let says = job.spec.money;
    let spent = job.cost.and_then(|cost| cost.spent).unwrap_or_default();
    // The time goes by the clock that nobody sets.
    let passed_s = super::seconds(cluster.clock.age_ms(job.submitted_ms));
    let deadline_in_s = says.deadline.map(|deadline| {
        super::seconds(deadline.at_ms(job.submitted_ms).saturating_sub(job.submitted_ms)) - passed_s
    });
    Worth {
        waiting_per_hour: waiting_per_hour(record, settings),
        deadline_in_s,
        budget: says.budget.map(|budget| budget.less(spent)),
    }
}

/// What an hour of waiting costs a job.
fn waiting_per_hour(record: &JobRecord, settings: RentSettings) -> Option<Money> {
    let says = record.job.spec.money;
    let says_nothing = says.budget.is_none() && says.deadline.is_none();
    says.waiting_costs_per_hour.or(settings.waiting_costs_per_hour.filter(|_| says_nothing))
}

/// What the rule decides from now: what the last look has gathered, with the jobs that wait for room and the hosts as they are now.
pub fn snapshot(cluster: &Cluster, basis: &Basis) -> Snapshot {
    let waiting = cluster.index.waiting();
    let waits: BTreeSet<&JobId> = waiting.iter().map(|record| &record.job.id).collect();
    let for_room = cluster.renter.for_room();
    let jobs = for_room.iter().filter(|job| waits.contains(job));
    let refused = cluster.renter.refused_jobs();
    let as_it_may_go = |job: &JobId| {
        let mut known = basis.jobs.get(job).cloned()?;
        if refused.contains(job) {
            known.rented.clear();
        }
        Some(known)
    };
    Snapshot {
        jobs: jobs.filter_map(as_it_may_go).collect(),
        hosts: hosts::all(cluster, basis),
        ..basis.rest.clone()
    }
}

/// Where the rule lets waiting jobs start. Nothing is asked, and all of it is in memory.
///
/// # Errors
/// `Internal` for a fault in the rule.
pub async fn rented(cluster: &Cluster) -> Result<Rented, Problem> {
    if cluster.rentals.hosts_by_rule().is_empty() {
        return Ok(Rented::default());
    }
    let basis = cluster.renter.basis();
    let snapshot = snapshot(cluster, &basis);
    // Of 2,000 jobs that takes long.
    let planned = tokio::task::spawn_blocking(move || (rent::planned(&snapshot), snapshot)).await;
    let (planned, snapshot) =
        planned.map_err(|e| Problem::internal("can't tell which jobs go to rented hosts", e))?;
    // One that was rented meanwhile is no own host.
    let of_rule = cluster.rentals.hosts_by_rule();
    let ready: BTreeMap<&HostId, f64> =
        snapshot.hosts.iter().map(|host| (&host.host, host.ready_in_s)).collect();
    let goes = |planned: rent::Planned| {
        let host = planned.host.filter(|host| of_rule.contains(host))?;
        let is_starting = ready.get(&host).is_some_and(|ready_in_s| *ready_in_s > 0.0);
        // A host that does not come is not waited for.
        let is_late = is_starting
            && cluster.rentals.of_host(&host).is_none_or(|it| hosts::is_late(cluster, &basis, &it));
        let start_s = planned.start_s;
        (!is_late).then_some((planned.job, Goes { host, start_s, is_starting }))
    };
    let goes = planned.into_iter().filter_map(goes).collect();
    Ok(Rented { hosts: of_rule, goes })
}

/// Whether jobs run without KVM at own hosts, so that they may at rented ones.
pub fn runs_without_kvm(cluster: &Cluster) -> bool {
    let of_rule = cluster.rentals.hosts_by_rule();
    let own = cluster.hosts.able().into_iter().filter(|host| !of_rule.contains(&host.id));
    let mut reports = own.filter_map(|host| cluster.hosts.report(&host.id));
    reports.any(|report| report.accelerator == Accelerator::Tcg)
}

/// What the jobs that run at a host of the rule have of waiting; `None` if none runs there.
pub fn note_uses(cluster: &Cluster, settings: RentSettings) {
    let of_rule = cluster.rentals.hosts_by_rule();
    cluster.renter.forget_uses_but(&of_rule);
    let up = cluster.hosts.able();
    for host in up.iter().map(|host| &host.id).filter(|host| of_rule.contains(*host)) {
        let there = hosts::records_at(cluster, host);
        let costs = || {
            let all = there.iter().filter_map(|record| waiting_per_hour(record, settings));
            all.sum()
        };
        cluster.renter.note_use(host, (!there.is_empty()).then(costs));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_at_the_site_of_the_newest_rental_of_its_zone() {
        let site = |name: &str| SiteId::new(name).expect("a name");
        let rented = [(("lab".to_owned(), "a".to_owned()), site("cloud"))].into();
        let sites = Sites { rented, own: [site("a"), site("b")].into() };
        let at = |provider, zone| sites.at(provider, zone).expect("a site").to_string();
        assert_eq!([at("lab", "a"), at("lab", "b"), at("lab", "c")], ["cloud", "b", "lab"]);
        assert_eq!(at("other", "a"), "a");
    }

    #[test]
    fn a_disk_whose_price_is_not_known_is_not_free() {
        let price = Price {
            per_hour_micros: NonZeroU64::new(1_000_000),
            minimum_s: 60,
            egress_per_gib_micros: None,
            disk_per_gib_month_micros: NonZeroU64::new(73_000),
            source: String::new(),
            as_of_unix_s: 0,
        };
        let seen = with_disk(&price, 100 << 30);
        assert_eq!(seen.per_hour_micros, NonZeroU64::new(1_010_060));
        for seconds in [60, 61, 3599, 3601, 100_000] {
            let apart = price.machine(seconds).zip(price.disk(100 << 30, seconds));
            let apart = apart.map(|(machine, disk)| machine.plus(disk));
            assert!(seen.machine(seconds) >= apart, "{seconds} s: {seen:?} {apart:?}");
        }
        let unknown = Price { disk_per_gib_month_micros: None, ..price };
        assert_eq!(with_disk(&unknown, 1).per_hour_micros, None);
    }
}
