//! What a job would take and cost at hosts that would be rented for it, beside its ways at the hosts that are there.
//!
//! A run at a kind of machine that is not there is predicted as at every other host where the job never ran: from its earlier runs, with
//! the kind's CPUs, with the disks and links that were measured of the kind ([`MeasuredHost`]), and else with the links of the site where the
//! provider's hosts were. What a prediction lacks makes its range wide, and a kind whose
//! links nobody has measured is not predicted at all. Before the VM's start the machine starts ([`Start`]).
//!
//! The money is that of a host that is rented for this job alone: its machine from the request on and at least its minimum, its whole disk,
//! and the bytes that leave a site. Whether a host is worth that to the whole queue is another question ([`crate::rent`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use perigee_model::budget::MoneyRange;
use perigee_model::job::Start as StartAt;
use perigee_model::job_plan::{JobPlan, NotConsidered, RentOption};
use perigee_model::money::Money;
use perigee_model::plan::{Estimate, OptionCost, PlanOption, Way};
use perigee_model::rental::Offer;
use perigee_model::units::{format_bytes, format_seconds};
use perigee_model::vm::Accelerator;
use perigee_model::{HostId, SiteId};

use crate::facts::{Cluster, CpuLoad, HostFacts, JobFacts, MoneyFacts, Snapshot};
use crate::measured::MeasuredHost;
use crate::options::{Trade, best_trades, way_name, why_over};
use crate::refused::Refused;
use crate::rent::{Start, UNKNOWN_START};

/// How many offers are predicted: the cheapest ones that the job could run at.
pub const OFFERS_MOST: usize = 32;

/// Something that could be rented for a job.
#[derive(Debug, Clone)]
pub struct OfferFacts {
    /// The provider's name in `providers.yaml`.
    pub provider: String,
    /// What is offered. Of its price, what counts.
    pub offer: Offer,
    /// Why its price is not known, where it is not.
    pub why_unknown: String,
    /// The memory that VMs may have there.
    pub memory_bytes: u64,
    /// The size of its disk.
    pub disk_bytes: u64,
    /// The site that such a host would be at.
    pub site: SiteId,
    /// A host of the same kind that is there.
    pub like: Option<HostFacts>,
    /// What was measured of a host of the kind.
    pub measured: Option<Arc<MeasuredHost>>,
    /// What was learned of the kind's starts; `None` if it was never started.
    pub start: Option<Start>,
    /// Why it can't be had now; `None` if it can.
    pub refused: Option<String>,
    /// What may still be spent for rented hosts.
    pub budget_left: Money,
}

/// The ways to run a job at each offer, and the offers that were not looked at.
#[must_use]
pub fn at_offers(
    snapshot: &Snapshot,
    offers: Vec<OfferFacts>,
) -> (Vec<RentOption>, Vec<NotConsidered>) {
    let mut without = Vec::new();
    let mut refuse = |facts: &OfferFacts, why: String| {
        let OfferFacts { provider, offer, .. } = facts;
        let (provider, kind) = (provider.clone(), Some(offer.kind.clone()));
        without.push(NotConsidered { provider, kind, spot: offer.spot, why });
    };
    let mut usable = Vec::new();
    for facts in cheapest_places(offers) {
        match why_not(snapshot, &facts) {
            Some(why) => refuse(&facts, why),
            None => usable.push(facts),
        }
    }
    usable.sort_by_key(|facts| facts.offer.price.per_hour_micros);
    let mut base = Base::of(snapshot);
    let mut rented = Vec::new();
    for (number, facts) in usable.iter().enumerate() {
        if number >= OFFERS_MOST {
            refuse(facts, format!("there are {OFFERS_MOST} cheaper ones"));
            continue;
        }
        match base.options(facts) {
            Ok(options) => rented.extend(options),
            Err(why) => refuse(facts, why),
        }
    }
    (rented, without)
}

/// Of each kind the zone where it is cheapest, as `perigee rent host` takes it; what can be had goes before what can't.
fn cheapest_places(offers: Vec<OfferFacts>) -> Vec<OfferFacts> {
    let mut best: BTreeMap<(String, String, bool), OfferFacts> = BTreeMap::new();
    let dearness = |facts: &OfferFacts| {
        let micros = facts.offer.price.per_hour_micros;
        (facts.refused.is_some(), micros.is_none(), micros)
    };
    for facts in offers {
        let offer = &facts.offer;
        let kind = (facts.provider.clone(), offer.kind.clone(), offer.spot);
        if best.get(&kind).is_none_or(|before| dearness(&facts) < dearness(before)) {
            best.insert(kind, facts);
        }
    }
    best.into_values().collect()
}

/// Why the job can't run at such a host, or nobody knows at what price.
fn why_not(snapshot: &Snapshot, facts: &OfferFacts) -> Option<String> {
    let (job, offer) = (&snapshot.job, &facts.offer);
    let needs_kvm = snapshot.cluster.hosts.iter().any(|host| host.accelerator == Accelerator::Kvm);
    match &job.start {
        StartAt::Host(host) => return Some(format!("its file lets the job start only at {host}")),
        StartAt::Site(site) if *site != facts.site => {
            return Some(format!("its file lets the job start only at site {site}"));
        }
        StartAt::Site(_) | StartAt::Anywhere => {}
    }
    if job.uses_confined {
        return Some("the job uses data that may not leave their site".to_owned());
    }
    // A cluster without KVM runs its jobs without KVM anyway.
    if needs_kvm && offer.kvm != Some(true) {
        let why = if offer.kvm == Some(false) { "no KVM" } else { "not known whether it has KVM" };
        return Some(why.to_owned());
    }
    if offer.cpus < job.traits.cpus {
        let s = if offer.cpus == 1 { "" } else { "s" };
        return Some(format!("only {} CPU{s}", offer.cpus));
    }
    if facts.memory_bytes < job.memory_bytes {
        return Some(format!("only {} for VMs", format_bytes(facts.memory_bytes)));
    }
    if offer.price.per_hour_micros.is_none() {
        let why = &facts.why_unknown;
        let why = if why.is_empty() { String::new() } else { format!(": {why}") };
        return Some(format!("price unknown{why}"));
    }
    facts.refused.clone()
}

/// Makes a cluster one in which jobs start at one more host and nowhere else: no move from there is looked at, and none to there. Returns the name
/// of that host, which no other has. [`idle_host`] makes it.
#[must_use]
pub fn close_all(cluster: &mut Cluster) -> HostId {
    for other in &mut cluster.hosts {
        (other.takes_jobs, other.memory_free_bytes) = (false, 0);
    }
    let is_taken = |name: &str| cluster.hosts.iter().any(|host| host.id.as_str() == name);
    let names = (1..).map(|number| match number {
        1 => "rented".to_owned(),
        _ => format!("rented-{number}"),
    });
    let mut free = names.filter(|name| !is_taken(name)).filter_map(|name| HostId::new(name).ok());
    free.next().unwrap_or_else(|| unreachable!("there are more names than hosts"))
}

/// The snapshot with one more host, at which alone the job may start.
struct Base {
    snapshot: Snapshot,
    host: HostId,
}

impl Base {
    fn of(snapshot: &Snapshot) -> Self {
        let mut snapshot = snapshot.clone();
        let host = close_all(&mut snapshot.cluster);
        snapshot.job.start = StartAt::Anywhere;
        Self { snapshot, host }
    }

    /// The ways there.
    ///
    /// # Errors
    /// Why nobody knows how long they take.
    fn options(&mut self, facts: &OfferFacts) -> Result<Vec<RentOption>, String> {
        let hosts = &mut self.snapshot.cluster.hosts;
        hosts.retain(|host| host.id != self.host);
        let OfferFacts { offer, site, memory_bytes, disk_bytes, like, measured, .. } = facts;
        let room = (*memory_bytes, *disk_bytes);
        let known = (like.as_ref(), measured.as_deref());
        hosts.push(idle_host(self.host.clone(), site.clone(), offer, room, known));
        let (start, wait) = wait(facts);
        let mut job = self.snapshot.job.clone();
        job.money.paid_before = wait;
        job.money.disk_bytes = Some(facts.disk_bytes);
        let whole = std::mem::replace(&mut self.snapshot.job, job);
        let plan = crate::plan(&self.snapshot);
        self.snapshot.job = whole;
        let money = &self.snapshot.job.money;
        let plan = plan.map_err(|refused| why_refused(&self.snapshot, &refused, facts))?;
        let stays = [Way::Beside, Way::Replica, Way::Remote, Way::Copy];
        let options = plan.options.into_iter().filter(|option| {
            option.start == self.host && option.end == self.host && stays.contains(&option.way)
        });
        let said = options.filter_map(|option| {
            let says = says_measured(&self.snapshot, &self.host, option.way);
            let start = if says.is_empty() { start.clone() } else { format!("{start}; {says}") };
            rent_option(option, facts, money, (wait, &start))
        });
        Ok(said.collect())
    }
}

fn why_refused(snapshot: &Snapshot, refused: &Refused, facts: &OfferFacts) -> String {
    let site = &facts.site;
    match refused {
        Refused::LinkNotMeasured { to, .. } => {
            let is_there = snapshot.cluster.host(to).is_ok_and(|home| home.site == *site);
            let other = if is_there { "other host" } else { "host" };
            format!(
                "not known how far {to} is from site {site}: no {other} of this site was ever measured"
            )
        }
        other => other.to_string(),
    }
}

/// What of the way to the job's data counts as it was measured on another host of the kind, in words; empty if nothing does.
fn says_measured(snapshot: &Snapshot, host: &HostId, way: Way) -> String {
    let JobFacts { volumes, .. } = &snapshot.job;
    let Ok(host) = snapshot.cluster.host(host) else { return String::new() };
    let Some(measured) = &host.measured else { return String::new() };
    let homes = || volumes.iter().filter_map(|volume| snapshot.cluster.host(&volume.home).ok());
    let has_link = homes().any(|home| HostFacts::link_of_kind(host, home).is_some());
    let is_slower = homes().any(|home| measured.remote_read(&home.site).is_some());
    let has_disk = way == Way::Copy && measured.write_bytes_per_s.is_some();
    let said = [(has_link, "links"), (is_slower, "remote reads"), (has_disk, "copies to its disk")];
    let said: Vec<&str> =
        said.into_iter().filter(|(counts, _)| *counts).map(|(_, what)| what).collect();
    if said.is_empty() {
        String::new()
    } else {
        format!("{} as {}", said.join(", "), measured.source)
    }
}

/// A host of what is offered that does nothing, with so much memory for VMs and so large a disk. What is known of its kind: a host of it that is
/// there, and what was measured of one.
#[must_use]
pub fn idle_host(
    id: HostId,
    site: SiteId,
    offer: &Offer,
    (memory_bytes, disk_bytes): (u64, u64),
    (like, measured): (Option<&HostFacts>, Option<&MeasuredHost>),
) -> HostFacts {
    let measured = measured.map(|measured| Arc::new(measured.of_host(&id)));
    let offered = if offer.kvm == Some(true) { Accelerator::Kvm } else { Accelerator::Tcg };
    HostFacts {
        id,
        site,
        cpus: offer.cpus,
        memory_free_bytes: memory_bytes,
        running_vcpus: 0,
        cpu_load: Some(CpuLoad::default()),
        takes_jobs: true,
        packs: false,
        accelerator: like.map_or(offered, |like| like.accelerator),
        cpu_model: like.map(|like| like.cpu_model.clone()).unwrap_or_default(),
        boots: like.map(|like| like.boots.clone()).unwrap_or_default(),
        local_blocks: None,
        pool_free_bytes: Some(disk_bytes),
        price: Some(Arc::new(offer.price.clone())),
        measured,
    }
}

/// From the request to the VM's start, in words and in seconds.
fn wait(facts: &OfferFacts) -> (String, Estimate) {
    let start = facts.start.unwrap_or(UNKNOWN_START);
    let in_s = format_seconds(start.expected_s);
    let words = match facts.start {
        Some(_) => format!("starts in {in_s}"),
        None => format!("starts in {in_s}, which is assumed: no host of this kind was started yet"),
    };
    (words, Estimate { expected_s: start.expected_s, low_s: 0.0, high_s: start.high_s })
}

/// `None` if the way is not possible for another reason than money: the same is said of the hosts that are there.
fn rent_option(
    option: PlanOption,
    facts: &OfferFacts,
    money: &MoneyFacts,
    (wait, start): (Estimate, &String),
) -> Option<RentOption> {
    let is_possible = option.is_possible();
    let nothing = OptionCost { items: Vec::new(), total: None, is_best_trade: false };
    let cost = option.cost.unwrap_or(nothing);
    let left = facts.budget_left;
    let why_over = why_over(cost.total, money).or_else(|| match cost.total {
        None => Some("what it costs is not known".to_owned()),
        Some(total) if total.high > left => Some("over what is left of --rent-budget".to_owned()),
        Some(_) => None,
    });
    if !is_possible && why_over.is_none() {
        return None;
    }
    let possible = is_possible && why_over.is_none();
    let why_not = why_over.map(|why| format!("not possible: {why}"));
    Some(RentOption {
        provider: facts.provider.clone(),
        kind: facts.offer.kind.clone(),
        zone: facts.offer.zone.clone(),
        spot: facts.offer.spot,
        site: facts.site.clone(),
        host: option.start,
        way: option.way,
        wait,
        predicted: option.predicted,
        total: option.total,
        shipped_bytes: option.shipped_bytes,
        unknown: option.unknown,
        possible,
        reason: why_not.unwrap_or_else(|| start.clone()),
        cost,
    })
}

/// Marks the best trades of all ways, at hosts that are there and at rented ones, with the wait before each; says how the rented ones differ
/// from the chosen one, and drops those that nobody would choose.
pub fn weigh(plan: &mut JobPlan) {
    if plan.rented.is_empty() {
        return;
    }
    // Beside rented hosts, those that are the users' own cost nothing.
    for option in &mut plan.plan.options {
        let nothing = || OptionCost {
            items: Vec::new(),
            total: Some(MoneyRange::default()),
            is_best_trade: false,
        };
        option.cost.get_or_insert_with(nothing);
    }
    let own = |option: &PlanOption| {
        let ends = plan.ends(option).filter(|_| option.is_possible())?;
        Some((ends.expected_s, option.cost.as_ref()?.total?.expected))
    };
    let mut trades: Vec<Trade> = plan.plan.options.iter().map(own).collect();
    let chosen = plan.plan.options.iter().zip(&trades).find(|(option, _)| option.chosen);
    let chosen = chosen.and_then(|(option, trade)| Some((option.clone(), (*trade)?)));
    plan.rented.sort_by(|one, other| {
        let ends = one.ends().expected_s.total_cmp(&other.ends().expected_s);
        other.possible.cmp(&one.possible).then(ends)
    });
    for rent in &mut plan.rented {
        let cost = rent.cost.total.filter(|_| rent.possible);
        let trade = cost.map(|cost| (rent.ends().expected_s, cost.expected));
        trades.push(trade);
        if let (Some((chosen, than)), Some(trade)) = (&chosen, trade) {
            rent.reason = format!("{}; {}", rent.reason, differs(trade, chosen, *than));
        }
    }
    let is_best = best_trades(&trades);
    let own = plan.plan.options.iter_mut().filter_map(|option| option.cost.as_mut());
    let costs = own.chain(plan.rented.iter_mut().map(|rent| &mut rent.cost));
    costs.zip(is_best).for_each(|(cost, is_best)| cost.is_best_trade = is_best);
    keep_few(&mut plan.rented);
}

fn differs(trade: (f64, Money), chosen: &PlanOption, than: (f64, Money)) -> String {
    let longer_s = trade.0 - than.0;
    let word = if longer_s < 0.0 { "sooner" } else { "later" };
    let money = match trade.1.cmp(&than.1) {
        std::cmp::Ordering::Greater => format!(", and {} more", trade.1.less(than.1)),
        std::cmp::Ordering::Less => format!(", and {} less", than.1.less(trade.1)),
        std::cmp::Ordering::Equal => String::new(),
    };
    let seconds = format_seconds(longer_s.abs());
    format!("ends {seconds} {word} than {} at {}{money}", way_name(chosen.way), chosen.start)
}

/// The best trades, and of each way the first one, which is the soonest that is possible if one is.
fn keep_few(rented: &mut Vec<RentOption>) {
    let mut seen: Vec<Way> = Vec::new();
    rented.retain(|rent| {
        let is_first = !seen.contains(&rent.way);
        seen.push(rent.way);
        is_first || rent.cost.is_best_trade
    });
}

#[cfg(test)]
mod tests;
