//! `prices.yaml`: what hosts, disks and traffic cost, as people write it down.
//!
//! ```yaml
//! max-age: 30d                 # an older price is not known; default: 30d
//! sites:
//!   cloud:
//!     machine: $0.085/h        # each of its hosts
//!     minimum: 60s             # the least time that is paid for; default: none
//!     egress: $0.09/GiB        # what leaves the site
//!     disk: $0.08/GiB-month    # a month has 730 hours
//!     as-of: 2026-11-29        # when that was so
//! hosts:
//!   cloud3:                    # what its entry leaves out is as its site's entry says
//!     machine: $0.34/h
//!     as-of: 2026-11-29
//!     max-age: 7d
//! ```
//!
//! Hosts that no entry names, neither by themselves nor by their site, are the users' own and cost nothing, but for rented ones, which cost
//! what their provider has said. Where there is a price that is 0, missing or too old, it is not known, and what is not known is never free.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::limits::{MINIMUM_S, PRICE_AGE_S, PRICES};
use crate::money::{AHEAD_MAX_S, Money, PRICE_AGE_S_DEFAULT, Price};
use crate::units::{format_duration, parse_date, parse_duration};
use crate::yaml::{Document, Field};
use crate::{HostId, Problem, SiteId};

const DAY_S: u64 = 86_400;

/// Whom [`Price::source`] names for what stands in the file.
pub const SOURCE: &str = "prices.yaml";

/// The content of `prices.yaml`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PriceList {
    /// What the file says; see [`PriceList::max_age_s`].
    max_age_s: Option<u64>,
    sites: BTreeMap<SiteId, Entry>,
    hosts: BTreeMap<HostId, Entry>,
}

/// What stands there about one site or host.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    machine: Said,
    minimum_s: Option<u32>,
    egress: Said,
    disk: Said,
    /// Unix time.
    as_of_s: u64,
    max_age_s: u64,
}

/// A price of an entry with its name.
type Named = (&'static str, fn(&Entry) -> Said);

/// One price of an entry, in millionths of a dollar for a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Said {
    Missing,
    Zero,
    Is(NonZeroU64),
}

/// What is known of the prices: `GET /v1/prices`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KnownPrices {
    /// The file; `None` if the controller was not told one: nothing but rented hosts costs anything then.
    pub file: Option<String>,
    /// Why the file as it is now can't be used; empty if it can. The last good one counts.
    pub problem: String,
    /// One for each entry, sites first, and then one for each rented host that no entry is for.
    pub prices: Vec<KnownPrice>,
}

/// What is known of the prices at one place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KnownPrice {
    /// The site, of an entry for all of its hosts that have none of their own.
    pub site: Option<SiteId>,
    /// The host, of an entry for one host, and of a rented one.
    pub host: Option<HostId>,
    /// What counts now.
    pub price: Price,
    /// What is not known, and why; empty if all is known.
    pub unknown: Vec<String>,
}

impl PriceList {
    /// Parses a file. Errors name `file_name`.
    ///
    /// # Errors
    /// A [`Problem`] that names line and field.
    pub fn parse(text: &str, file_name: &str) -> Result<Self, Problem> {
        let document = Document::parse(file_name, text)?;
        let root = document.root();
        let [max_age, sites, hosts] = root.fields(["max-age", "sites", "hosts"])?;
        let said_age_s = max_age.as_ref().map(read_price_age).transpose()?;
        let max_age_s = said_age_s.unwrap_or(PRICE_AGE_S_DEFAULT);
        let sites = entries(sites.as_ref(), |name| SiteId::new(name), max_age_s)?;
        let hosts = entries(hosts.as_ref(), |name| HostId::new(name), max_age_s)?;
        PRICES.check(sites.len() + hosts.len()).map_err(|why| root.problem(why))?;
        Ok(Self { max_age_s: said_age_s, sites, hosts })
    }

    /// How old a price may be, in seconds, where nothing else is said of that price.
    #[must_use]
    pub fn max_age_s(&self) -> u64 {
        self.max_age_s.unwrap_or(PRICE_AGE_S_DEFAULT)
    }

    /// Whether nothing costs anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sites.is_empty() && self.hosts.is_empty()
    }

    /// Whether an entry names this host.
    #[must_use]
    pub fn names(&self, host: &HostId) -> bool {
        self.hosts.contains_key(host)
    }

    /// Whether an entry says what a host at this site costs, by its own name or by the site's.
    #[must_use]
    pub fn covers(&self, host: &HostId, site: &SiteId) -> bool {
        self.names(host) || self.sites.contains_key(site)
    }

    /// What a host costs at this Unix time, in seconds; `None` if it is the users' own. `host` is `None` for one that no entry names.
    #[must_use]
    pub fn of(&self, host: Option<&HostId>, site: &SiteId, now_s: u64) -> Option<Price> {
        let (own, of_site) = (host.and_then(|host| self.hosts.get(host)), self.sites.get(site));
        let first = own.or(of_site)?;
        let get = |of: fn(&Entry) -> Said| {
            let entry = own.filter(|own| of(own) != Said::Missing).or(of_site)?;
            entry.counts(of(entry), now_s).ok()
        };
        let minimum_s = own.and_then(|own| own.minimum_s).or_else(|| of_site?.minimum_s);
        Some(Price {
            per_hour_micros: get(|entry| entry.machine),
            minimum_s: minimum_s.unwrap_or(0),
            egress_per_gib_micros: get(|entry| entry.egress),
            disk_per_gib_month_micros: get(|entry| entry.disk),
            source: SOURCE.to_owned(),
            as_of_unix_s: first.as_of_s,
        })
    }

    /// What is known at this Unix time, in seconds, and what is not and why. `site_of` says at which site a host is.
    pub fn known(
        &self,
        now_s: u64,
        site_of: impl Fn(&HostId) -> Option<SiteId>,
    ) -> Vec<KnownPrice> {
        let mut known = Vec::new();
        for (site, entry) in &self.sites {
            let Some(price) = self.of(None, site, now_s) else { continue };
            let unknown = entry.unknown(None, now_s);
            known.push(KnownPrice { site: Some(site.clone()), host: None, price, unknown });
        }
        let alone = Self { sites: BTreeMap::new(), ..self.clone() };
        for (host, entry) in &self.hosts {
            let site = site_of(host);
            let of_site = site.as_ref().and_then(|site| self.sites.get(site));
            let no_site = || SiteId::new("none").ok();
            let price = match site.as_ref() {
                Some(site) => self.of(Some(host), site, now_s),
                None => no_site().and_then(|site| alone.of(Some(host), &site, now_s)),
            };
            let Some(price) = price else { continue };
            let unknown = entry.unknown(of_site, now_s);
            known.push(KnownPrice { site: None, host: Some(host.clone()), price, unknown });
        }
        known
    }
}

impl Entry {
    /// What counts of a price at this time.
    ///
    /// # Errors
    /// Why it is not known.
    fn counts(&self, said: Said, now_s: u64) -> Result<NonZeroU64, String> {
        let micros = match said {
            Said::Missing => return Err("the file does not say it".to_owned()),
            Said::Zero => return Err("the file says 0".to_owned()),
            Said::Is(micros) => micros,
        };
        why_not_now(self.as_of_s, self.max_age_s, now_s).map_or(Ok(micros), Err)
    }

    /// What is not known, and why.
    fn unknown(&self, of_site: Option<&Self>, now_s: u64) -> Vec<String> {
        let fields: [Named; 3] =
            [("machine", |e| e.machine), ("egress", |e| e.egress), ("disk", |e| e.disk)];
        let why = |(name, of): Named| {
            let entry = of_site.filter(|_| of(self) == Said::Missing).unwrap_or(self);
            entry.counts(of(entry), now_s).err().map(|why| format!("{name}: {why}"))
        };
        fields.into_iter().filter_map(why).collect()
    }
}

/// What counts of a provider's price at this Unix time, in seconds, and what does not and why. `max_age_s`: how old the provider's prices may be.
#[must_use]
pub fn of_provider(price: &Price, now_s: u64, max_age_s: u64) -> (Price, Vec<String>) {
    // An offer whose price is too old says no figures any more.
    let too_old = price.out_of_date(now_s, max_age_s);
    let mut unknown = Vec::new();
    let mut counts = |name: &str, micros: Option<NonZeroU64>| {
        let not_said = || micros.is_none().then(|| "the provider does not say it".to_owned());
        let why = too_old.clone().or_else(not_said);
        unknown.extend(why.as_ref().map(|why| format!("{name}: {why}")));
        micros.filter(|_| why.is_none())
    };
    let price = Price {
        per_hour_micros: counts("machine", price.per_hour_micros),
        egress_per_gib_micros: counts("egress", price.egress_per_gib_micros),
        disk_per_gib_month_micros: counts("disk", price.disk_per_gib_month_micros),
        ..price.clone()
    };
    (price, unknown)
}

/// Why a price as of then, a Unix time, does not count now.
fn why_not_now(as_of_s: u64, max_age_s: u64, now_s: u64) -> Option<String> {
    if as_of_s > now_s.saturating_add(AHEAD_MAX_S) {
        return Some("its as-of is not yet".to_owned());
    }
    // It was so until the end of that day.
    let age_s = now_s.saturating_sub(as_of_s.saturating_add(DAY_S));
    (age_s > max_age_s).then(|| {
        let max = format_duration(max_age_s);
        format!("it is {} days old, more than {max}", age_s / DAY_S)
    })
}

fn entries<K: Ord, E: std::fmt::Display>(
    field: Option<&Field<'_>>,
    name: impl Fn(&str) -> Result<K, E>,
    max_age_s: u64,
) -> Result<BTreeMap<K, Entry>, Problem> {
    let Some(field) = field else { return Ok(BTreeMap::new()) };
    let each = field.entries()?.into_iter().map(|(key, value)| {
        let name = name(key).map_err(|why| value.problem(why))?;
        Ok((name, read_entry(&value, max_age_s)?))
    });
    each.collect()
}

fn read_entry(field: &Field<'_>, max_age_s: u64) -> Result<Entry, Problem> {
    let [machine, minimum, egress, disk, as_of, max_age] =
        field.fields(["machine", "minimum", "egress", "disk", "as-of", "max-age"])?;
    let as_of = as_of.ok_or_else(|| {
        field
            .problem("the field \"as-of\" is missing: how old a price is decides whether it counts")
            .next("add a line with the day on which you looked, such as `as-of: 2026-11-29`")
    })?;
    let price = |field: Option<Field<'_>>, unit: &'static str| match field {
        None => Ok(Said::Missing),
        Some(field) => field
            .parse(|text| per(text, unit))
            .map(|money| NonZeroU64::new(money.micros).map_or(Said::Zero, Said::Is)),
    };
    let minimum_s = minimum.map(|field| {
        let seconds =
            MINIMUM_S.check(field.parse(parse_duration)?).map_err(|why| field.problem(why))?;
        u32::try_from(seconds).map_err(|why| field.problem(why))
    });
    Ok(Entry {
        machine: price(machine, HOUR)?,
        minimum_s: minimum_s.transpose()?,
        egress: price(egress, "GiB")?,
        disk: price(disk, "GiB-month")?,
        as_of_s: as_of.parse(parse_date)?,
        max_age_s: max_age.as_ref().map(read_price_age).transpose()?.unwrap_or(max_age_s),
    })
}

/// A field that says how old prices may be, in seconds.
///
/// # Errors
/// A [`Problem`] that names line and field.
pub fn read_price_age(field: &Field<'_>) -> Result<u64, Problem> {
    PRICE_AGE_S.check(field.parse(parse_duration)?).map_err(|why| field.problem(why))
}

/// The unit of a machine's price.
pub(crate) const HOUR: &str = "h";

/// `$0.085/h`: an amount for an hour.
///
/// # Errors
/// What is wrong with it, in words.
pub fn per_hour(text: &str) -> Result<Money, String> {
    per(text, HOUR)
}

/// `$0.085/h`: an amount for one of this unit.
///
/// # Errors
/// What is wrong with it, in words.
pub(crate) fn per(text: &str, unit: &str) -> Result<Money, String> {
    let wanted = || {
        format!(
            "{:?} is not a price: write dollars for one {unit}, as in $0.25/{unit}",
            short(text)
        )
    };
    let (amount, of) = text.split_once('/').ok_or_else(wanted)?;
    if of.trim() != unit {
        return Err(wanted());
    }
    amount.parse().map_err(|why: crate::money::BadMoney| why.to_string())
}

fn short(text: &str) -> String {
    text.chars().take(40).collect()
}

#[cfg(test)]
mod tests;
