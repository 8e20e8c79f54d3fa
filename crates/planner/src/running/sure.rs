//! A change that is made as soon as the command runs, because the job's earlier runs are sure that it pays.
//!
//! They are sure if two things are true:
//!
//! - the low end of what is still to be lost is above the price, and what has been lost so far does not contradict it;
//! - each of the newest [`SURE_RUNS`] runs of this very job made so many requests that it would have lost the price.
//!
//! If they are right, the loss is the best one, which is the price. If they are wrong, the job loses at most one price
//! more than with the best choice. That can be many times the best, so the second condition limits how often it may
//! happen: after a run that was too short the history is not sure again before [`SURE_RUNS`] others were long enough.
//! The best choice loses the price in each of these. So over all runs of a job, the changes that were made at once in
//! vain cost at most `1 / SURE_RUNS` of what the best choices cost.

use perigee_model::HostId;
use perigee_model::plan::{Basis, Plan, PlanOption, Seconds, Way};
use perigee_model::units::format_seconds;

use super::Verdict;
use super::changes::{price_s, reading_later, why_it_may_not_come, why_it_may_not_go};
use super::left::{share_left, sources, without_it};
use crate::copying::copy_of;
use crate::facts::{HostFacts, Running};
use crate::figures::Figures;
use crate::hosts::slower_s;
use crate::learn::{Learned, Place, Source};
use crate::moving::{Dirty, MoveCost, move_cost};
use crate::options::way_name;
use crate::runs::{PastRun, Traits};
use crate::spread::Spread;

/// So many of the newest runs must have been long enough.
pub const SURE_RUNS: usize = 2;
/// A run that is related to the job at least so much is one of the same job: its data may have grown a little.
const NEARLY_THE_SAME_JOB: f64 = 0.9;
/// What was lost so far says something once this share of the work is done.
const DONE_LEAST: f64 = 0.1;

/// What a change is predicted to save.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Saving {
    /// What would be lost in a whole run without the change, and not with it.
    pub whole: Spread,
    /// The share of the work that is left.
    pub share: Spread,
    /// How much longer the rest of the computing takes after the change.
    pub slower_s: f64,
}

impl Saving {
    /// The seconds of the rest of the run that the change would save, as a range from 0 on.
    pub fn left(&self) -> Spread {
        self.whole.by(self.share).at_least(0.0)
    }

    /// Whether the earlier runs of a job with these traits are sure that the change pays.
    pub fn is_sure(
        &self,
        learned: &Learned,
        (traits, history): (&Traits, &[PastRun]),
        price_s: f64,
    ) -> bool {
        let same =
            history.iter().rev().filter(|run| traits.relation(&run.traits) >= NEARLY_THE_SAME_JOB);
        let whole_s = self.whole.expected;
        let long_enough = |run: &PastRun| whole_s * run.requests() >= price_s * learned.requests;
        learned.basis == Basis::History
            && learned.requests >= 1.0
            && self.left().low() - self.slower_s >= price_s
            && same.take(SURE_RUNS).filter(|run| long_enough(run)).count() == SURE_RUNS
    }
}

/// A change that is possible now, judged by the earlier runs.
struct Change<'a> {
    way: Way,
    to: &'a HostId,
    /// Where the rest of the work would be done.
    place: Place,
    saving: Saving,
    cost: MoveCost,
    price_s: f64,
}

impl Change<'_> {
    fn gain_s(&self) -> f64 {
        self.saving.left().expected - self.saving.slower_s - self.price_s
    }

    fn is_sure(&self, running: &Running, learned: &Learned, lost_s: f64) -> bool {
        let done = 1.0 - self.saving.share.expected;
        let as_expected = done < DONE_LEAST || lost_s >= self.saving.whole.low() * done;
        as_expected
            && self.saving.is_sure(learned, (&running.traits, &running.history), self.price_s)
    }
}

/// The change that is made now; `None` if the earlier runs are not sure of any.
pub(super) fn at_once(running: &Running, lost_s: f64, learned: &Learned) -> Option<Verdict> {
    if running.moves > 0 {
        return None;
    }
    let now = now(running, learned)?;
    let mut changes: Vec<Change> = running
        .cluster
        .hosts
        .iter()
        .filter(|host| host.id != running.host && host.memory_free_bytes >= running.memory_bytes)
        .filter_map(|host| moved(running, learned, &now, host))
        .chain(copied(running, learned, &now))
        .collect();
    // The sort is stable: of equally good ones the move is made.
    changes.sort_by(|a, b| b.gain_s().total_cmp(&a.gain_s()));
    let sure = changes.iter().position(|change| change.is_sure(running, learned, lost_s))?;
    let best = changes.remove(sure);
    let reason = reason(running, &best);
    let plan = plan(running, learned, &now, &best, &changes);
    Some(Verdict::Move { way: best.way, to: best.to.clone(), reason, plan })
}

/// Where the VM is.
pub(super) fn now(running: &Running, learned: &Learned) -> Option<Place> {
    let here = running.cluster.host(&running.host).ok()?;
    let here = without_it(running, here);
    place(running, learned, &here, &sources(running, &running.host))
}

fn place(
    running: &Running,
    learned: &Learned,
    host: &HostFacts,
    sources: &[Source],
) -> Option<Place> {
    learned.place(&running.cluster, host, sources, &mut Figures::default()).ok()
}

fn moved<'a>(
    running: &'a Running,
    learned: &Learned,
    now: &Place,
    host: &'a HostFacts,
) -> Option<Change<'a>> {
    let to = &host.id;
    let there = place(running, learned, host, &sources(running, to))?;
    let bytes: f64 = learned.volumes.iter().map(|volume| volume.bytes).sum();
    let dirty = Dirty::new(running.dirty_bytes_per_s, bytes, learned.at(now).0.total_s);
    let cost = move_cost(&running.cluster, &running.host, to, running.memory_bytes, dirty).ok()?;
    if why_it_may_not_go(running, to, &cost).is_some() {
        return None;
    }
    change(running, learned, now, (Way::Migrate, to, there), cost)
}

fn copied<'a>(running: &'a Running, learned: &Learned, now: &Place) -> Option<Change<'a>> {
    let to = &running.host;
    let reading = reading_later(running, learned, now)?;
    let coming = super::changes::coming(running);
    if coming.is_empty() {
        return None;
    }
    let (cost, kept) = copy_of(&running.cluster, to, &coming, reading).ok()?;
    if kept.or_else(|| why_it_may_not_come(running)).is_some() {
        return None;
    }
    change(running, learned, now, (Way::Copy, to, Place::local(now.cpu_factor)), cost)
}

fn change<'a>(
    running: &Running,
    learned: &Learned,
    now: &Place,
    (way, to, place): (Way, &'a HostId, Place),
    cost: MoveCost,
) -> Option<Change<'a>> {
    let share = share_left(running, learned)?;
    let whole = learned.network_longer(now, &place);
    let slower_s =
        share.expected * slower_s(learned.computing_s(now), now.cpu_factor, place.cpu_factor);
    let price_s = price_s(&cost, whole.expected, learned.at(now).0.total_s);
    let saving = Saving { whole, share, slower_s };
    let change = Change { way, to, place, saving, cost, price_s };
    (change.gain_s() > 0.0).then_some(change)
}

fn reason(running: &Running, change: &Change) -> String {
    let what = match change.way {
        Way::Copy => "copying its data here".to_owned(),
        _ => format!("moving to {}", change.to),
    };
    format!(
        "its last {SURE_RUNS} runs show that {} are still to be lost to the network at {}; {what} costs {}",
        change.saving.left().estimate(),
        running.host,
        format_seconds(change.price_s)
    )
}

/// All ways for the rest of the job.
fn plan(
    running: &Running,
    learned: &Learned,
    now: &Place,
    best: &Change,
    others: &[Change],
) -> Plan {
    let start = &running.host;
    let option = |way, end: &HostId, place: &Place, price: Spread, chosen, reason| {
        let (seconds, total) = learned.at(place);
        let seconds = seconds.times(best.saving.share.expected);
        PlanOption {
            way,
            start: start.clone(),
            end: end.clone(),
            predicted: Seconds { migration_s: price.expected, ..seconds }.added_up(),
            total: total.by(best.saving.share).plus(price).estimate(),
            shipped_bytes: None,
            unknown: Vec::new(),
            longer: None,
            chosen,
            reason,
            cost: None,
            hosts: Vec::new(),
            end_hosts: Vec::new(),
        }
    };
    let changed = |change: &Change, chosen, reason| {
        let price = Spread { expected: change.price_s, ..change.cost.of_the_job() };
        option(change.way, change.to, &change.place, price, chosen, reason)
    };
    let mut options = vec![changed(best, true, reason(running, best))];
    for other in others {
        let less = format_seconds((best.gain_s() - other.gain_s()).max(0.0));
        let best = way_name(best.way);
        options.push(changed(other, false, format!("would save {less} less than {best}")));
    }
    let more = format!("would lose {} more", format_seconds(best.gain_s()));
    options.push(option(Way::Remote, start, now, Spread::default(), false, more));
    Plan { basis: Basis::History, options, figures: best.cost.figures.clone(), moves: true }
}

#[cfg(test)]
mod tests;
