//! The field `rent` of a scenario.
//!
//! ```yaml
//! rent:
//!   budget: $20          # of the whole run; without this field nothing limits but what each job says
//!   hosts-most: 16       # rented at once
//!   refused: 0.05        # the share of the requests that the provider refuses, of those on demand
//!   jobs:                # as many kinds as you like; they arrive at random
//!   - per-hour: 30
//!     burst: 60          # so many more arrive together, every `every`
//!     every: 6h
//!     cpus: 2
//!     memory: 4GiB
//!     compute: 20m       # the mean at an own host; times have a log-normal distribution whose standard deviation is 0.8 times the mean
//!     reads: 2GiB        # before it begins, if it runs elsewhere than its data are
//!     at-provider: true  # its data are at the provider's site; without this field at home
//!     writes: 100MiB     # goes home when it has computed
//!     confined: true     # its data never leave their site
//!     without-kvm: true  # it may run without KVM
//!     waiting-costs: $0.25  # for each hour from its arrival to its end
//!     deadline: 2h       # after its arrival; a missed one costs its budget
//!     budget: $1
//!   offers:
//!   - {kind: c8i.2xlarge, zone: a, cpus: 8, memory: 16GiB, price: $0.36, minimum: 60s, egress: $0.09, kvm: true, boot: 90s, speed: 1.1, spot: true}
//! ```
//!
//! `uplink` of the scenario is the way to the provider's site, which all that is sent shares. An offer without `price`, `egress` or `kvm` has
//! none that is known. The price of a spot offer is its mean (`market.rs`).

use std::num::NonZeroU64;

use perigee_model::Problem;
use perigee_model::money::{Money, Price};
use perigee_model::rental::Offer;
use perigee_model::units::{parse_bytes, parse_duration};
use perigee_model::yaml::Field;

use crate::simulate::scenario::{bytes, number};

/// What can be rented in a scenario, and who waits.
#[derive(Debug, Clone)]
pub struct Renting {
    /// `None`: nothing limits.
    pub budget: Option<Money>,
    pub hosts_most: usize,
    pub refused: f64,
    pub jobs: Vec<Stream>,
    pub offers: Vec<Offered>,
}

/// Jobs of one kind.
#[derive(Debug, Clone)]
pub struct Stream {
    pub per_hour: u64,
    pub burst: u64,
    pub every_s: u64,
    pub cpus: u32,
    pub memory_bytes: u64,
    /// The mean at an own host.
    pub compute_s: u64,
    pub reads_bytes: u64,
    pub writes_bytes: u64,
    pub is_at_provider: bool,
    pub is_confined: bool,
    pub without_kvm: bool,
    pub waiting_per_hour: Option<Money>,
    pub deadline_s: Option<u64>,
    pub budget: Option<Money>,
}

/// An offer, and what becomes of a request for it.
#[derive(Debug, Clone)]
pub struct Offered {
    pub offer: Offer,
    /// The median of its starts.
    pub boot_s: u64,
    /// How much faster than an own host it computes.
    pub speed: f64,
}

/// # Errors
/// A field is wrong: the problem names the line and the field.
pub fn parse(field: &Field<'_>) -> Result<Renting, Problem> {
    let [budget, hosts_most, refused, jobs, offers] =
        field.fields(["budget", "hosts-most", "refused", "jobs", "offers"])?;
    let missing = |name: &str| field.problem(format!("the field {name:?} is missing"));
    let jobs = jobs.ok_or_else(|| missing("jobs"))?.list()?;
    let offers = offers.ok_or_else(|| missing("offers"))?.list()?;
    Ok(Renting {
        budget: money(budget.as_ref())?,
        hosts_most: number(hosts_most.as_ref(), 16, 1..=1000)?,
        refused: share(refused.as_ref())?,
        jobs: jobs.iter().map(stream).collect::<Result<_, _>>()?,
        offers: offers.iter().map(offered).collect::<Result<_, _>>()?,
    })
}

fn money(field: Option<&Field<'_>>) -> Result<Option<Money>, Problem> {
    field.map(|field| field.parse(str::parse)).transpose()
}

fn seconds(field: Option<&Field<'_>>) -> Result<Option<u64>, Problem> {
    field.map(|field| field.parse(parse_duration)).transpose()
}

fn size(field: Option<&Field<'_>>) -> Result<u64, Problem> {
    Ok(field.map(|field| field.parse(parse_bytes)).transpose()?.unwrap_or(0))
}

fn share(field: Option<&Field<'_>>) -> Result<f64, Problem> {
    let read = |text: &str| {
        let share = text.parse().ok().filter(|share| (0.0..1.0).contains(share));
        share.ok_or_else(|| "it is a share, 0 to less than 1".to_owned())
    };
    Ok(field.map(|field| field.parse(read)).transpose()?.unwrap_or(0.0))
}

fn yes(field: Option<&Field<'_>>) -> Result<Option<bool>, Problem> {
    let read = |text: &str| text.parse::<bool>().map_err(|_| "it is true or false".to_owned());
    field.map(|field| field.parse(read)).transpose()
}

fn stream(field: &Field<'_>) -> Result<Stream, Problem> {
    let [
        per_hour,
        burst,
        every,
        cpus,
        memory,
        compute,
        reads,
        writes,
        at_provider,
        confined,
        without_kvm,
        waiting,
        deadline,
        budget,
    ] = field.fields([
        "per-hour",
        "burst",
        "every",
        "cpus",
        "memory",
        "compute",
        "reads",
        "writes",
        "at-provider",
        "confined",
        "without-kvm",
        "waiting-costs",
        "deadline",
        "budget",
    ])?;
    Ok(Stream {
        per_hour: number(per_hour.as_ref(), 0, 0..=10_000)?,
        burst: number(burst.as_ref(), 0, 0..=10_000)?,
        every_s: seconds(every.as_ref())?.unwrap_or(3600).max(60),
        cpus: number(cpus.as_ref(), 1, 1..=1024)?,
        memory_bytes: bytes(memory, 1 << 30)?,
        compute_s: seconds(compute.as_ref())?.unwrap_or(600).max(1),
        reads_bytes: size(reads.as_ref())?,
        writes_bytes: size(writes.as_ref())?,
        is_at_provider: yes(at_provider.as_ref())?.unwrap_or(false),
        is_confined: yes(confined.as_ref())?.unwrap_or(false),
        without_kvm: yes(without_kvm.as_ref())?.unwrap_or(false),
        waiting_per_hour: money(waiting.as_ref())?,
        deadline_s: seconds(deadline.as_ref())?,
        budget: money(budget.as_ref())?,
    })
}

fn offered(field: &Field<'_>) -> Result<Offered, Problem> {
    let [kind, zone, cpus, memory, price, minimum, egress, kvm, boot, speed, spot] =
        field.fields([
            "kind", "zone", "cpus", "memory", "price", "minimum", "egress", "kvm", "boot", "speed",
            "spot",
        ])?;
    let text = |found: Option<&Field<'_>>, other: &str| {
        found.map_or_else(|| Ok(other.to_owned()), |found| found.text().map(str::to_owned))
    };
    let known = |found: Option<&Field<'_>>| {
        Ok::<_, Problem>(money(found)?.and_then(|money| NonZeroU64::new(money.micros)))
    };
    let faster = |text: &str| {
        let speed = text.parse().ok().filter(|speed| (0.1..=10.0).contains(speed));
        speed.ok_or_else(|| "it is a number from 0.1 to 10".to_owned())
    };
    let minimum_s = seconds(minimum.as_ref())?.unwrap_or(60);
    Ok(Offered {
        offer: Offer {
            kind: text(kind.as_ref(), "kind")?,
            zone: text(zone.as_ref(), "a")?,
            spot: yes(spot.as_ref())?.unwrap_or(false),
            cpus: number(cpus.as_ref(), 8, 1..=1024)?,
            memory_bytes: bytes(memory, 16 << 30)?,
            kvm: yes(kvm.as_ref())?,
            price: Price {
                per_hour_micros: known(price.as_ref())?,
                minimum_s: u32::try_from(minimum_s).unwrap_or(u32::MAX),
                egress_per_gib_micros: known(egress.as_ref())?,
                disk_per_gib_month_micros: None,
                source: "scenario".to_owned(),
                as_of_unix_s: 0,
            },
        },
        boot_s: seconds(boot.as_ref())?.unwrap_or(90).max(1),
        speed: speed.map(|speed| speed.parse(faster)).transpose()?.unwrap_or(1.0),
    })
}
