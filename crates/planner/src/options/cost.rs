//! What each way to run a job would cost, and which way is chosen where money counts.
//!
//! A way pays for the hosts where its VM is (each as a whole, from the VM's start to the command's end), for the VM's disks at the host where
//! it starts, and for the bytes that leave a site. A host without a price is the users' own and costs nothing. If no host has one, nothing
//! is reckoned, and the plan is that of the times alone.
//!
//! - The range of an amount is that of the seconds, and of the bytes. A job that has a timeout is not paid for longer.
//! - With a budget, a way is not possible whose high end is above it, or is not known; so it is with what is left of the tenant's budget for
//!   the month. Of the others the soonest is chosen.
//! - With a deadline: the cheapest one of those that keep it at the upper end of their range, which is in 9 of 10 cases or more.
//! - With a price of waiting: the least sum of money and of waiting, of those that keep the deadline.
//!
//! Of each way the soonest one is shown, and of the others those that are the best trade: nothing is both sooner and cheaper.

use std::num::NonZeroU64;

use perigee_model::HostId;
use perigee_model::budget::MoneyRange;
use perigee_model::money::{Money, Price};
use perigee_model::plan::{Basis, CostItem, CostOf, Estimate, OptionCost, PlanOption, Way};
use perigee_model::units::{format_bytes, format_seconds};

use super::{Candidate, changes, way_name, whole_bytes};
use crate::facts::{Cluster, JobFacts, MoneyFacts, VolumeFacts};
use crate::figures::Figures;
use crate::learn::Learned;

/// The bytes of a run differ from those of earlier runs by at most this share, as their times do in 9 of 10 cases (`learn.rs`).
const BYTES_REPEATED: f64 = 0.24;
/// A job that never ran may read its data so many times, or not at all.
const PASSES_MOST: f64 = 2.0;

/// A change while the job runs, as far as money depends on it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Changed {
    /// This share of the command's work is done before.
    pub share_before: f64,
    /// From the VM's start until it is at its end.
    pub until_s: f64,
    /// What is sent for it; `None` if that is not known.
    pub bytes: Option<f64>,
}

/// Expected, low and high.
type Three = [f64; 3];

/// Brings the candidates into the order of the plan: the chosen one, then the others by their times, then what is not possible. Fills in what
/// they cost.
pub(super) fn decide(
    candidates: &mut Vec<Candidate>,
    (cluster, money): (&Cluster, &MoneyFacts),
    bill: &dyn Fn(&Candidate) -> OptionCost,
    figures: &mut Figures,
) {
    // The sort is stable: of equal ways the one that was added first wins, and a migration is added last.
    candidates.sort_by(changes::by_time);
    let is_paid = cluster.hosts.iter().any(|host| host.price.is_some());
    if is_paid {
        for candidate in candidates.iter_mut() {
            candidate.option.cost = Some(bill(candidate));
        }
        mark_best_trades(candidates);
        candidates.iter_mut().for_each(|candidate| keep_to_budget(candidate, (cluster, money)));
        let dearness = |one: &Candidate| {
            let cost = expected(&one.option);
            (cost.is_none(), cost)
        };
        candidates.sort_by(|a, b| changes::by_time(a, b).then(dearness(a).cmp(&dearness(b))));
    }
    let keeps = |candidate: &Candidate| keeps_deadline(candidate, money);
    let has_one = candidates.iter().any(|c| c.impossible.is_none() && keeps(c));
    if let (Some(deadline_s), false) = (money.deadline_s, has_one) {
        let until = format_seconds(deadline_s.max(0.0));
        figures.measured(format!("no way keeps the deadline, in {until}, in 9 of 10 cases"));
    }
    let chosen = choice(candidates, money, has_one);
    candidates[..=chosen].rotate_right(1);
    if is_paid {
        keep_few(candidates);
    }
}

/// The place of the one that is chosen, in the order of the times.
fn choice(candidates: &[Candidate], money: &MoneyFacts, keeps_one: bool) -> usize {
    let counts = money.deadline_s.is_some() || money.waiting_per_hour.is_some();
    let is_late = money.deadline_s.is_some() && !keeps_one;
    if !counts || is_late {
        return 0;
    }
    let possible = candidates.iter().enumerate().filter(|(_, candidate)| {
        candidate.impossible.is_none() && (!keeps_one || keeps_deadline(candidate, money))
    });
    // Of equal ones the first is taken, which ends soonest. What is not known is dearer than all that is.
    let best = possible.min_by_key(|(_, candidate)| {
        let cost = expected(&candidate.option);
        let seconds = whole_up(candidate.option.total.expected_s);
        let waiting = money.waiting_per_hour.map_or(Money::ZERO, |per| per.of(seconds, 3600));
        cost.map_or((true, waiting), |cost| (false, cost.plus(waiting)))
    });
    best.map_or(0, |(index, _)| index)
}

fn keeps_deadline(candidate: &Candidate, money: &MoneyFacts) -> bool {
    money.deadline_s.is_none_or(|deadline_s| candidate.option.total.high_s <= deadline_s)
}

/// What an option is expected to cost; `None` if that is not known. Nothing, where nothing has a price.
fn expected(option: &PlanOption) -> Option<Money> {
    match &option.cost {
        None => Some(Money::ZERO),
        Some(cost) => cost.total.map(|total| total.expected),
    }
}

/// Marks what is above the budget as not possible.
fn keep_to_budget(candidate: &mut Candidate, (cluster, money): (&Cluster, &MoneyFacts)) {
    let Some(cost) = candidate.option.cost.as_mut().filter(|_| candidate.impossible.is_none())
    else {
        return;
    };
    let price = |host: &HostId| cluster.host(host).ok()?.price.as_ref();
    let (start, end) = (price(&candidate.option.start), price(&candidate.option.end));
    let has_budget = money.budget.is_some() || money.month.is_some();
    // The controller does not make such a move either (`migration/by_itself.rs`).
    let moves = has_budget && end.is_some() && start != end;
    let of_move =
        moves.then(|| "a job with a budget does not move to a host of another price".to_owned());
    let Some(why) = of_move.or_else(|| why_over(cost.total, money)) else { return };
    cost.is_best_trade = false;
    (candidate.impossible, candidate.over_budget) = (Some(why), !moves);
}

/// Why the job's budget, or its tenant's for the month, does not allow that.
pub(crate) fn why_over(total: Option<MoneyRange>, money: &MoneyFacts) -> Option<String> {
    let whose = match (money.budget, money.month) {
        (Some(_), _) => "the job has a budget",
        (None, Some(_)) => "the tenant has a budget for the month",
        (None, None) => return None,
    };
    let Some(total) = total else {
        return Some(format!("what it costs is not known, and {whose}"));
    };
    if let Some(budget) = money.budget.filter(|budget| total.high > *budget) {
        let (budget, spent) = (money.whole_budget(budget), money.spent);
        return Some(match spent > Money::ZERO {
            true => format!(
                "over the {budget} that are left of the job's budget: it has cost {spent} before"
            ),
            false => format!("over the job's budget of {budget}"),
        });
    }
    let (budget, spending) = money.month?;
    // What costs nothing has room in every budget, also in one that was lowered.
    spending.lacks(budget, total.high).filter(|_| total.high > Money::ZERO)
}

/// The Pareto front of seconds and money.
fn mark_best_trades(candidates: &mut [Candidate]) {
    let figures: Vec<Trade> = candidates
        .iter()
        .map(|one| {
            let cost = expected(&one.option).filter(|_| one.impossible.is_none())?;
            Some((one.option.total.expected_s, cost))
        })
        .collect();
    for (candidate, is_best) in candidates.iter_mut().zip(best_trades(&figures)) {
        if let Some(cost) = candidate.option.cost.as_mut() {
            cost.is_best_trade = is_best;
        }
    }
}

/// Seconds, and money; `None` if one of them is not known.
pub(crate) type Trade = Option<(f64, Money)>;

/// Of each trade whether nothing is both as soon and as cheap, and better in one of the two. Of equal ones the first one is.
pub(crate) fn best_trades(all: &[Trade]) -> Vec<bool> {
    let is_best = |(at, own): (usize, &Trade)| {
        let Some(own) = own else { return false };
        !all.iter().enumerate().any(|(other_at, other)| {
            other.is_some_and(|other| {
                other.0 <= own.0 && other.1 <= own.1 && (other != *own || other_at < at)
            })
        })
    };
    all.iter().enumerate().map(is_best).collect()
}

/// Drops what nobody would choose: in a cluster with many prices there is one candidate for each way and price.
fn keep_few(candidates: &mut Vec<Candidate>) {
    let mut seen: Vec<(Way, bool)> = Vec::new();
    let mut index = 0;
    candidates.retain(|candidate| {
        index += 1;
        let of_way = (candidate.option.way, candidate.impossible.is_some());
        let is_possible_elsewhere = seen.contains(&(of_way.0, false));
        let is_first = !(seen.contains(&of_way) || of_way.1 && is_possible_elsewhere);
        seen.push(of_way);
        let is_best_trade = candidate.option.cost.as_ref().is_some_and(|cost| cost.is_best_trade);
        index == 1 || is_first || is_best_trade
    });
}

/// Why the first candidate is chosen, if that is not because it ends first.
pub(super) fn why_chosen(candidates: &[Candidate], money: &MoneyFacts) -> Option<String> {
    let (first, rest) = candidates.split_first()?;
    let seconds = |candidate: &Candidate| candidate.option.predicted.total_s;
    let sooner =
        rest.iter().find(|one| one.impossible.is_none() && seconds(one) < seconds(first))?;
    let rule = match (money.waiting_per_hour, money.deadline_s) {
        (Some(per_hour), _) => {
            format!("the least sum of money and of waiting at {}/h", per_hour.exact())
        }
        (None, Some(deadline_s)) => {
            let until = format_seconds(deadline_s.max(0.0));
            format!("the least money of what ends in {until} in 9 of 10 cases")
        }
        (None, None) => return None,
    };
    let (total, cost) = (format_seconds(seconds(first)), in_words(&first.option));
    let other = &sooner.option;
    let (other_s, other_cost) = (format_seconds(seconds(sooner)), in_words(other));
    Some(format!(
        "{total} for {cost} instead of {other_s} for {other_cost} {} at {}: {rule}",
        way_name(other.way),
        other.start
    ))
}

fn in_words(option: &PlanOption) -> String {
    expected(option).map_or_else(|| "a price that is not known".to_owned(), |cost| cost.to_string())
}

/// How much more or less than the chosen one; empty if nothing has a price.
pub(super) fn beside(chosen: &PlanOption, other: &PlanOption) -> String {
    if other.cost.is_none() {
        return String::new();
    }
    match (expected(chosen), expected(other)) {
        (Some(chosen), Some(other)) if other > chosen => {
            format!(", and {} more", other.less(chosen))
        }
        (Some(chosen), Some(other)) if other < chosen => {
            format!(", and {} less", chosen.less(other))
        }
        (Some(_), Some(_)) => String::new(),
        _ => ", and the difference in money is not known".to_owned(),
    }
}

/// What one candidate would cost.
pub(super) fn bill(
    facts: (&Cluster, &JobFacts),
    learned: &Learned,
    candidate: &Candidate,
) -> OptionCost {
    Bill::of(facts, learned, candidate)
}

/// What all VMs of a gang would cost together.
pub(super) fn sum(bills: impl IntoIterator<Item = OptionCost>) -> OptionCost {
    let mut items: Vec<(CostItem, usize)> = Vec::new();
    for item in bills.into_iter().flat_map(|bill| bill.items) {
        let same = |(one, _): &&mut (CostItem, usize)| one.of == item.of && one.host == item.host;
        match items.iter_mut().find(same) {
            Some((one, count)) => {
                one.cost = one.cost.zip(item.cost).map(|(one, other)| one.plus(other));
                *count += 1;
            }
            None => items.push((item, 1)),
        }
    }
    let said = |(item, count): (CostItem, usize)| match count {
        1 => item,
        _ => CostItem { why: format!("{count} VMs, the first one: {}", item.why), ..item },
    };
    let items: Vec<CostItem> = items.into_iter().map(said).collect();
    let total = total_of(&items);
    OptionCost { items, total, is_best_trade: false }
}

/// `None` if one of them is not known.
fn total_of(items: &[CostItem]) -> Option<MoneyRange> {
    let mut costs = items.iter().map(|item| item.cost);
    costs.try_fold(MoneyRange::default(), |sum, cost| Some(sum.plus(cost?)))
}

struct Bill<'a> {
    cluster: &'a Cluster,
    job: &'a JobFacts,
    items: Vec<CostItem>,
    /// The bytes that leave the site of a host; `None` if they are not known.
    leaving: Vec<(HostId, Option<Three>)>,
}

impl<'a> Bill<'a> {
    fn of(
        (cluster, job): (&'a Cluster, &'a JobFacts),
        learned: &Learned,
        candidate: &Candidate,
    ) -> OptionCost {
        let mut bill = Self { cluster, job, items: Vec::new(), leaving: Vec::new() };
        let option = &candidate.option;
        let money = &job.money;
        let seconds = paid_s(&option.total, candidate.boot.expected + candidate.boot.up, money);
        let before = three(&money.paid_before);
        let seconds = [0, 1, 2].map(|end| seconds[end] + before[end]);
        match candidate.change {
            Some(change) if option.start != option.end => {
                let total_s = option.total.expected_s;
                let before = if total_s > 0.0 { (change.until_s / total_s).min(1.0) } else { 1.0 };
                bill.machine(&option.start, seconds.map(|s| s * before));
                bill.machine(&option.end, seconds.map(|s| s * (1.0 - before)));
            }
            _ => bill.machine(&option.start, seconds),
        }
        bill.disk(&option.start, seconds);
        bill.traffic(learned, candidate);
        bill.egress();
        let total = total_of(&bill.items);
        OptionCost { items: bill.items, total, is_best_trade: false }
    }

    fn price(&self, host: &HostId) -> Option<&'a Price> {
        self.cluster.host(host).ok()?.price.as_deref()
    }

    fn add(&mut self, of: CostOf, host: &HostId, cost: Option<MoneyRange>, why: String) {
        let unknown =
            || format!("the {} price of {host} is not known: see `perigee price list`", of.name());
        let why = if cost.is_some() { why } else { unknown() };
        self.items.push(CostItem { of, host: host.clone(), cost, why });
    }

    fn machine(&mut self, host: &HostId, seconds: Three) {
        let Some(price) = self.price(host) else { return };
        let cost = MoneyRange::of(seconds.map(whole_up), |s| price.machine(s));
        let per_hour = exact(price.per_hour_micros);
        let least = match price.minimum_s {
            minimum_s if f64::from(minimum_s) > seconds[0] => {
                format!("; {minimum_s} s are the least that is paid")
            }
            _ => String::new(),
        };
        let why = format!("{} at {per_hour}/h{least}", format_seconds(seconds[0]));
        self.add(CostOf::Machine, host, cost, why);
    }

    fn disk(&mut self, host: &HostId, seconds: Three) {
        let Some(price) = self.price(host) else { return };
        let Some(bytes) = self.job.money.disk_bytes else {
            let why = "the size of its disks is not known".to_owned();
            return self.items.push(CostItem {
                of: CostOf::Disk,
                host: host.clone(),
                cost: None,
                why,
            });
        };
        let cost = MoneyRange::of(seconds.map(whole_up), |s| price.disk(bytes, s));
        let per =
            Money::from_micros(price.disk_per_gib_month_micros.map_or(0, |micros| micros.get()));
        let why = format!(
            "{} for {} at {per}/GiB-month",
            format_bytes(bytes),
            format_seconds(seconds[0])
        );
        self.add(CostOf::Disk, host, cost, why);
    }

    /// What the job reads and writes over links, and what is sent for a change.
    fn traffic(&mut self, learned: &Learned, candidate: &Candidate) {
        let option = &candidate.option;
        let share = candidate.change.map_or(1.0, |change| change.share_before);
        self.reads(learned, &option.start, share);
        let Some(change) = candidate.change else { return };
        let is_known = learned.basis != Basis::OnePass;
        match option.way {
            Way::Copy => {
                let comes = |v: &&VolumeFacts| {
                    v.home != option.start && !candidate.come_with_others.contains(&v.volume)
                };
                for volume in self.job.volumes.iter().filter(comes) {
                    let bytes = volume.copy.bytes_to(&option.start) as f64;
                    self.leaves(&volume.home, &option.start, Some([bytes; 3]));
                }
            }
            _ => {
                self.leaves(
                    &option.start,
                    &option.end,
                    change.bytes.map(|bytes| around(bytes, is_known)),
                );
                self.reads(learned, &option.end, 1.0 - share);
            }
        }
    }

    /// This share of the job's work is done at a host.
    fn reads(&mut self, learned: &Learned, at: &HostId, share: f64) {
        let is_known = learned.basis != Basis::OnePass;
        for (facts, volume) in self.job.volumes.iter().zip(&learned.volumes) {
            if facts.home == *at {
                continue;
            }
            let bytes = share * volume.sent_bytes;
            let read = bytes * volume.read_share * facts.copy.far_share(at);
            let written = if facts.only_read { 0.0 } else { bytes * (1.0 - volume.read_share) };
            self.leaves(&facts.home, at, Some(around(read, is_known)));
            self.leaves(at, &facts.home, Some(around(written, is_known)));
        }
    }

    fn leaves(&mut self, from: &HostId, to: &HostId, bytes: Option<Three>) {
        let is_paid = self.price(from).is_some() && !self.cluster.is_one_site(from, to);
        if !is_paid || bytes.is_some_and(|bytes| bytes[2] <= 0.0) {
            return;
        }
        match self.leaving.iter_mut().find(|(host, _)| host == from) {
            Some((_, sum)) => {
                let both = sum.zip(bytes);
                *sum = both.map(|(a, b)| [a[0] + b[0], a[1] + b[1], a[2] + b[2]]);
            }
            None => self.leaving.push((from.clone(), bytes)),
        }
    }

    fn egress(&mut self) {
        for (host, bytes) in std::mem::take(&mut self.leaving) {
            let Some(price) = self.price(&host) else { continue };
            let Some(bytes) = bytes else {
                let why = "how much it sends is not known".to_owned();
                self.items.push(CostItem { of: CostOf::Egress, host, cost: None, why });
                continue;
            };
            let bytes = bytes.map(whole_bytes);
            let cost = MoneyRange::of(bytes, |bytes| price.egress(bytes));
            let per =
                Money::from_micros(price.egress_per_gib_micros.map_or(0, |micros| micros.get()));
            let why = format!("{} at {per}/GiB", format_bytes(bytes[0]));
            self.add(CostOf::Egress, &host, cost, why);
        }
    }
}

fn exact(micros: Option<NonZeroU64>) -> String {
    Money::from_micros(micros.map_or(0, NonZeroU64::get)).exact()
}

/// The seconds that are paid for, at most until the command's timeout.
fn paid_s(total: &Estimate, boot_most_s: f64, money: &MoneyFacts) -> Three {
    let most_s = money.timeout_s.map_or(f64::INFINITY, |s| boot_most_s + s as f64);
    three(total).map(|s| s.clamp(0.0, most_s))
}

fn three(of: &Estimate) -> Three {
    [of.expected_s, of.low_s, of.high_s]
}

fn around(bytes: f64, is_known: bool) -> Three {
    match is_known {
        true => [bytes, bytes * (1.0 - BYTES_REPEATED), bytes * (1.0 + BYTES_REPEATED)],
        false => [bytes, 0.0, bytes * PASSES_MOST],
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
fn whole_up(seconds: f64) -> u64 {
    seconds.ceil() as u64
}

#[cfg(test)]
mod tests;
