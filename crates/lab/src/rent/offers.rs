//! What a lab offers for rent: the field `rent` of its definition file, and what stands there by default.
//!
//! ```yaml
//! rent:
//!   boot: 5s                    # from the request to the user-data [default: 1s]
//!   quota: 4                    # so many instances at once [default: 40]
//!   no-capacity: [lab.large]    # kinds of which none is free
//!   zones: [cloud]              # sites at which there are hosts for rent [default: all]
//!   budget: $5                  # what the controller may spend on rented hosts in 30 days [default: $1000]
//!   kinds:
//!     lab.small: {cpus: 1, memory: 1GiB, price: $0.05, spot-price: $0.02}    # for an hour
//!     lab.large: {cpus: 2, memory: 4GiB, price: $0.20, kvm: false}
//! ```

use std::num::NonZeroU64;

use perigee_model::money::{Money, Price};
use perigee_model::rental::Offer;
use perigee_model::units::{parse_bytes, parse_duration};
use perigee_model::yaml::Field;
use perigee_model::{Problem, SiteId};
use serde::{Deserialize, Serialize};

use crate::definition::Definition;
use crate::process::own_cpus;

/// Instances that a lab has room for at once: as many addresses are above its hosts'.
pub const INSTANCES_MAX: usize = 40;
/// What a real provider takes at least.
const MINIMUM_S: u32 = 60;
/// What EC2 takes in most regions, so that predictions in a lab weigh as they would there: a GiB that leaves, and a GiB of disk for a month.
const EGRESS_PER_GIB_MICROS: u64 = 90_000;
const DISK_PER_GIB_MONTH_MICROS: u64 = 80_000;
const GIB: u64 = 1 << 30;
/// Nobody is paid for the hosts that a lab rents out.
const BUDGET: Money = Money::from_micros(1_000_000_000);

/// What can be rented in a lab.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rent {
    /// How long an instance takes until it runs what it was given.
    pub boot_s: u64,
    /// Instances at once.
    pub quota: usize,
    /// Kinds of which none is free.
    pub no_capacity: Vec<String>,
    /// The kinds of machines.
    pub kinds: Vec<Kind>,
    /// The sites at which there are hosts for rent; empty: all.
    pub zones: Vec<SiteId>,
    /// What the lab's controller may spend on rented hosts.
    pub budget: Money,
}

/// A kind of machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kind {
    /// As in [`Offer::kind`].
    pub name: String,
    /// The machine runs on so many of this machine's CPUs.
    pub cpus: u32,
    /// What the offer says. A machine of a lab has all memory of this machine.
    pub memory_bytes: u64,
    /// Whether the offer says that VMs can use KVM.
    pub kvm: bool,
    /// For an hour.
    pub price: Money,
    /// The same of a machine that may be taken back; `None`: there is none.
    pub spot_price: Option<Money>,
}

impl Default for Rent {
    fn default() -> Self {
        let kvm = has_kvm();
        let kind = |name: &str, cpus, memory_bytes, cents: u64, spot_cents: u64| Kind {
            name: name.to_owned(),
            cpus,
            memory_bytes,
            kvm,
            price: Money::from_micros(cents * 10_000),
            spot_price: Some(Money::from_micros(spot_cents * 10_000)),
        };
        let kinds = vec![
            kind("lab.small", 1, GIB, 5, 2),
            kind("lab.large", cpus_here().min(2), 4 * GIB, 20, 6),
        ];
        Self {
            boot_s: 1,
            quota: INSTANCES_MAX,
            no_capacity: Vec::new(),
            kinds,
            zones: Vec::new(),
            budget: BUDGET,
        }
    }
}

fn has_kvm() -> bool {
    std::path::Path::new("/dev/kvm").exists()
}

fn cpus_here() -> u32 {
    u32::try_from(own_cpus().len()).unwrap_or(1).max(1)
}

impl Rent {
    /// The kind with this name.
    pub fn kind(&self, name: &str) -> Option<&Kind> {
        self.kinds.iter().find(|kind| kind.name == name)
    }

    /// Whether there are hosts for rent at the site.
    pub fn has_zone(&self, site: &SiteId) -> bool {
        self.zones.is_empty() || self.zones.contains(site)
    }

    /// Every kind at every site, with the prices as of now.
    pub fn offers(&self, definition: &Definition, now_unix_s: u64) -> Vec<Offer> {
        let mut offers = Vec::new();
        for site in definition.sites.iter().filter(|site| self.has_zone(&site.name)) {
            for kind in &self.kinds {
                let prices = [(false, Some(kind.price)), (true, kind.spot_price)];
                for (spot, price) in prices {
                    let Some(price) = price else { continue };
                    offers.push(Offer {
                        kind: kind.name.clone(),
                        zone: site.name.to_string(),
                        spot,
                        cpus: kind.cpus,
                        memory_bytes: kind.memory_bytes,
                        kvm: Some(kind.kvm),
                        price: price_of(price, now_unix_s),
                    });
                }
            }
        }
        offers
    }
}

fn price_of(per_hour: Money, as_of_unix_s: u64) -> Price {
    Price {
        per_hour_micros: NonZeroU64::new(per_hour.micros),
        minimum_s: MINIMUM_S,
        egress_per_gib_micros: NonZeroU64::new(EGRESS_PER_GIB_MICROS),
        disk_per_gib_month_micros: NonZeroU64::new(DISK_PER_GIB_MONTH_MICROS),
        source: "the lab's definition".to_owned(),
        as_of_unix_s,
    }
}

/// The field `rent` of a lab's definition file.
///
/// # Errors
/// `Invalid`, with the line and the field that is wrong.
pub fn read_rent(field: &Field<'_>) -> Result<Rent, Problem> {
    let [boot, quota, no_capacity, kinds, zones, budget] =
        field.fields(["boot", "quota", "no-capacity", "kinds", "zones", "budget"])?;
    let mut rent = Rent::default();
    if let Some(boot) = boot {
        rent.boot_s = boot.parse(parse_duration)?;
    }
    if let Some(quota) = quota {
        rent.quota = quota.parse(read_quota)?;
    }
    if let Some(kinds) = kinds {
        let read = |(name, kind): (&str, Field<'_>)| read_kind(name, &kind);
        rent.kinds = kinds.entries()?.into_iter().map(read).collect::<Result<_, _>>()?;
    }
    if let Some(zones) = zones {
        let read = |zone: &Field<'_>| zone.parse(SiteId::new);
        rent.zones = zones.list()?.iter().map(read).collect::<Result<_, _>>()?;
    }
    if let Some(budget) = budget {
        rent.budget = budget.parse(str::parse::<Money>)?;
    }
    for name in no_capacity.map(|names| names.list()).transpose()?.unwrap_or_default() {
        let kind = name.text()?;
        if rent.kind(kind).is_none() {
            return Err(name.problem(format!("{kind:?} is none of the kinds")));
        }
        rent.no_capacity.push(kind.to_owned());
    }
    Ok(rent)
}

fn read_quota(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|quota| *quota <= INSTANCES_MAX).ok_or_else(|| {
        format!("{text:?} is no number of instances; a lab has room for {INSTANCES_MAX}")
    })
}

fn read_kind(name: &str, field: &Field<'_>) -> Result<Kind, Problem> {
    let [cpus, memory, price, spot_price, kvm] =
        field.fields(["cpus", "memory", "price", "spot-price", "kvm"])?;
    let missing = |what: &str| field.problem(format!("the field {what:?} is missing"));
    Ok(Kind {
        name: name.to_owned(),
        cpus: cpus.ok_or_else(|| missing("cpus"))?.parse(read_cpus)?,
        memory_bytes: memory.ok_or_else(|| missing("memory"))?.parse(parse_bytes)?,
        kvm: kvm.map(|kvm| kvm.parse(str::parse::<bool>)).transpose()?.unwrap_or_else(has_kvm),
        price: price.ok_or_else(|| missing("price"))?.parse(str::parse::<Money>)?,
        spot_price: spot_price.map(|price| price.parse(str::parse::<Money>)).transpose()?,
    })
}

fn read_cpus(text: &str) -> Result<u32, String> {
    let most = cpus_here();
    text.parse()
        .ok()
        .filter(|cpus| (1..=most).contains(cpus))
        .ok_or_else(|| format!("{text:?} is no number of CPUs; the lab's machine has {most}"))
}

#[cfg(test)]
mod tests {
    use perigee_model::yaml::Document;

    use super::*;
    use crate::definition::LabId;

    fn read(text: &str) -> Result<Rent, Problem> {
        let document = Document::parse("lab.yaml", text)?;
        let [rent] = document.root().fields(["rent"])?;
        read_rent(&rent.expect("the field"))
    }

    #[test]
    fn what_a_lab_offers_is_read_and_the_rest_is_as_by_default() {
        assert_eq!(
            read("rent: {boot: 5s}\n").expect("rent"),
            Rent { boot_s: 5, ..Rent::default() }
        );
        let rent = read(
            "rent:\n  quota: 3\n  budget: $5\n  no-capacity: [big]\n  kinds:\n    \
             big: {cpus: 1, memory: 2GiB, price: $0.40, spot-price: 0.1, kvm: true}\n    \
             small: {cpus: 1, memory: 1GiB, price: $0.004}\n",
        )
        .expect("rent");
        assert_eq!((rent.quota, rent.no_capacity.len(), rent.boot_s), (3, 1, 1));
        let lab = Definition::default_demo(LabId::random(), 1);
        let offers = rent.offers(&lab, 7);
        let shown: Vec<_> =
            offers.iter().map(|o| (o.kind.as_str(), o.zone.as_str(), o.spot)).collect();
        let at_each = |zone| [("big", zone, false), ("big", zone, true), ("small", zone, false)];
        assert_eq!(shown, [at_each("home"), at_each("cloud")].concat());
        let per_hour = |offer: &Offer| offer.price.per_hour_micros.map(NonZeroU64::get);
        assert_eq!((per_hour(&offers[1]), per_hour(&offers[2])), (Some(100_000), Some(4_000)));
        assert_eq!((offers[1].kvm, offers[1].price.as_of_unix_s), (Some(true), 7));
        assert_eq!(rent.budget, Money::from_micros(5_000_000));
        let only = read("rent: {zones: [cloud]}\n").expect("rent");
        assert!(only.offers(&lab, 7).iter().all(|offer| offer.zone == "cloud"));
    }

    #[test]
    fn what_is_wrong_is_told_with_its_field() {
        for (text, word) in [
            ("rent: {boot: 5}\n", "boot"),
            ("rent: {quota: 41}\n", "40"),
            ("rent: {no-capacity: [huge]}\n", "huge"),
            ("rent: {kinds: {a: {cpus: 1, memory: 1GiB}}}\n", "price"),
            ("rent: {kinds: {a: {cpus: 0, memory: 1GiB, price: 1}}}\n", "cpus"),
            ("rent: {kinds: {a: {cpus: 1, memory: 1GiB, price: cheap}}}\n", "cheap"),
            ("rent: {price: 1}\n", "price"),
            ("rent: {zones: [a b]}\n", "zones"),
            ("rent: {budget: much}\n", "much"),
        ] {
            let problem = read(text).expect_err(text).to_string();
            assert!(problem.contains(word), "{text:?} gives {problem:?} without {word:?}");
        }
    }
}
