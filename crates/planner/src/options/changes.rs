//! Ways that begin far from the data and change that while the job runs: the VM moves to the data, or the data to
//! the VM.

use std::cmp::Ordering;

use perigee_model::plan::{Basis, Seconds, Way};

use super::cost::Changed;
use super::stays::Stay;
use super::{Candidate, add_new, whole_bytes};
use crate::copying::{Coming, Reading, copy_cost, copy_of};
use crate::facts::Snapshot;
use crate::figures::Figures;
use crate::hosts::slower_s;
use crate::learn::{Learned, Place};
use crate::moving::{Dirty, MoveCost, Moves};
use crate::refused::Refused;
use crate::running::{MAY_NOT_MOVE, Saving, all_left, is_clearly_less, moves_at_s, price_s};

/// Why a VM does not move to another site.
pub(crate) const CONFINED: &str = "it uses data whose policy is leave-site: never, so the planner moves it within its site or to that of the data only";

/// `migrate` for its best two hosts of each two prices, the soonest one first, and `follow` for that one.
pub(super) fn best_moves(
    snapshot: &Snapshot,
    learned: &Learned,
    stays: &[Stay],
    figures: &mut Figures,
) -> Vec<Candidate> {
    let starts = stays.iter().filter(|s| s.refused.is_none() && s.way != Way::Beside);
    let pairs = starts.flat_map(|start| {
        let ends = stays.iter().filter(|end| end.may_be_end);
        let better = ends.filter(|end| may_pay(learned, start, &end.place));
        better.map(move |end| (start, end))
    });
    let costs = Moves::of(&snapshot.cluster);
    let mut refused = None;
    let moves = pairs.filter_map(|(start, end)| {
        let predicted = predict_move(snapshot, learned, &costs, (start, end));
        let (moved, cost) = predicted.map_err(|why| refused = Some((start, end, why))).ok()?;
        Some((moved, cost, [start.price, end.price]))
    });
    let mut moves: Vec<_> = moves.collect();
    moves.sort_by(|a, b| by_time(&a.0, &b.0));
    // The soonest one between hosts of each two prices.
    let mut prices = Vec::new();
    moves.retain(|(_, _, of)| add_new(&mut prices, *of));
    let mut moves = moves.into_iter();
    let Some((best, cost, _)) = moves.next() else {
        // An impossible move is listed only if the hosts cannot exchange a VM at all.
        let Some((start, end, why @ Refused::ProcessorDiffers { .. })) = refused else {
            return Vec::new();
        };
        let mut candidate = Candidate::new(Way::Migrate, start, &end.host);
        candidate.impossible = Some(why.to_string());
        return vec![candidate];
    };
    if best.impossible.is_none() {
        cost.figures.into_iter().for_each(|figure| figures.measured(figure));
        let start = &best.option.start;
        figures.assumed(&format!(
            "after a move the job hardly reads its root disk, which stays at {start}"
        ));
    }
    let follow = following(snapshot, &best);
    std::iter::once(best).chain(follow).chain(moves.map(|(moved, ..)| moved)).collect()
}

/// The same move, after which root and output disk come to the VM. How much they have to ship is not known.
fn following(snapshot: &Snapshot, migrate: &Candidate) -> Option<Candidate> {
    let (start, end) = (&migrate.option.start, &migrate.option.end);
    let switches =
        copy_cost(&snapshot.cluster, end, &[(start, 0), (start, 0)], Reading::default()).ok()?;
    let mut follow = migrate.clone();
    follow.option.way = Way::Follow;
    follow.option.shipped_bytes = None;
    follow.change = follow.change.map(|change| Changed { bytes: None, ..change });
    follow.option.predicted.migration_s += switches.pause_s;
    follow.option.predicted = follow.option.predicted.added_up();
    follow.migration.expected += switches.pause_s;
    let mut total = follow.option.total;
    for seconds in [&mut total.expected_s, &mut total.low_s, &mut total.high_s] {
        *seconds += switches.pause_s;
    }
    follow.option.total = total;
    Some(follow)
}

/// The volumes come to the host where the VM starts: of each price one.
pub(super) fn best_copies(
    snapshot: &Snapshot,
    learned: &Learned,
    stays: &[Stay],
    figures: &mut Figures,
) -> Vec<Candidate> {
    let starts = stays.iter().filter(|s| s.refused.is_none() && s.way != Way::Beside);
    let copies = starts.filter_map(|start| {
        let (copied, cost) = predict_copy(snapshot, learned, start)?;
        Some((copied, cost, start.price))
    });
    let mut copies: Vec<_> = copies.collect();
    copies.sort_by(|a, b| by_time(&a.0, &b.0));
    let mut prices = Vec::new();
    copies.retain(|(_, _, price)| add_new(&mut prices, *price));
    if let Some((_, cost, _)) = copies.first().filter(|(best, ..)| best.impossible.is_none()) {
        cost.figures.iter().for_each(|figure| figures.measured(figure.clone()));
    }
    copies.into_iter().map(|(copied, ..)| copied).collect()
}

/// What is possible comes first, then what only lacks money, which may come, and last what its file or its hosts rule out. Of these each what
/// ends first.
pub(super) fn by_time(a: &Candidate, b: &Candidate) -> Ordering {
    let rank = |one: &Candidate| (one.impossible.is_some(), !one.over_budget);
    let totals = a.option.predicted.total_s.total_cmp(&b.option.predicted.total_s);
    rank(a).cmp(&rank(b)).then(totals)
}

/// How much a run at the one place loses that it would not lose at the other, as [`crate::consider`] counts it.
fn saved_s(learned: &Learned, start: &Place, end: &Place) -> f64 {
    let slower_s = slower_s(learned.computing_s(start), start.cpu_factor, end.cpu_factor);
    learned.network_longer(start, end).expected - slower_s
}

/// Whether [`crate::consider`] might ever make the change.
fn may_pay(learned: &Learned, start: &Stay, end: &Place) -> bool {
    let lost_at =
        |place: &Place| learned.network_longer(place, &Place::local(place.cpu_factor)).expected;
    is_clearly_less(lost_at(end), lost_at(&start.place))
        && saved_s(learned, &start.place, end) > 0.0
}

fn predict_move(
    snapshot: &Snapshot,
    learned: &Learned,
    costs: &Moves,
    (start, end): (&Stay, &Stay),
) -> Result<(Candidate, MoveCost), Refused> {
    let data_bytes: f64 = learned.volumes.iter().map(|volume| volume.bytes).sum();
    let command_s = start.seconds.total_s - start.seconds.boot_s;
    let dirty = Dirty::new(snapshot.job.dirty_bytes_per_s, data_bytes, command_s);
    let memory_bytes = snapshot.job.memory_bytes;
    let cost = costs.cost(&start.host, &end.host, memory_bytes, dirty)?;
    let mut candidate = Candidate::new(Way::Migrate, start, &end.host);
    let is_one_site = snapshot.cluster.is_one_site(&start.host, &end.host);
    let confined = (snapshot.job.uses_confined && !is_one_site).then(|| CONFINED.to_owned());
    candidate.impossible = confined.or_else(|| cost.too_long()).or_else(|| may_not_move(snapshot));
    Ok((changed(candidate, snapshot, learned, (start, &end.place), &cost), cost))
}

/// `None` if a link is not measured, or if there is nothing to save.
fn predict_copy(
    snapshot: &Snapshot,
    learned: &Learned,
    start: &Stay,
) -> Option<(Candidate, MoveCost)> {
    let far = snapshot.job.volumes.iter().filter(|volume| volume.home != start.host);
    let volumes: Vec<Coming> =
        far.map(|v| Coming { volume: &v.volume, home: &v.home, copy: &v.copy }).collect();
    let local = Place::local(start.place.cpu_factor);
    if !may_pay(learned, start, &local) {
        return None;
    }
    let reading = learned.reading(&start.place, 1.0);
    let (cost, kept) = copy_of(&snapshot.cluster, &start.host, &volumes, reading).ok()?;
    let mut candidate = Candidate::new(Way::Copy, start, &start.host);
    candidate.impossible = may_not_move(snapshot).or(kept);
    Some((changed(candidate, snapshot, learned, (start, &local), &cost), cost))
}

pub(super) fn may_not_move(snapshot: &Snapshot) -> Option<String> {
    (!snapshot.job.may_migrate).then(|| MAY_NOT_MOVE.to_owned())
}

/// The job runs as it starts until [`crate::consider`] would make the change, and then at the other place.
fn changed(
    mut candidate: Candidate,
    snapshot: &Snapshot,
    learned: &Learned,
    (start, end): (&Stay, &Place),
    cost: &MoveCost,
) -> Candidate {
    let avoidable = learned.network_longer(&start.place, end);
    let known = (learned.basis == Basis::History).then_some(avoidable);
    let saved_s = saved_s(learned, &start.place, end);
    let in_s = learned.at(&start.place).0.total_s;
    let price_s = price_s(cost, saved_s, in_s);
    let of_the_job = (&snapshot.job.traits, snapshot.history.as_slice());
    let slower_s = avoidable.expected - saved_s;
    let saving = Saving { whole: avoidable, share: all_left(), slower_s };
    let is_sure = saving.is_sure(learned, of_the_job, price_s);
    let waiting_s = price_s - cost.job_s;
    let lost_before_s = waiting_s + if is_sure { 0.0 } else { moves_at_s(price_s, known) };
    // `may_pay` has checked that something is saved.
    let share_before = (lost_before_s / saved_s).min(1.0);
    candidate.place = start.place.mixed(share_before, end);
    candidate.migration = cost.of_the_job();
    let until_s = start.boot.expected + share_before * in_s + cost.job_s;
    candidate.change = Some(Changed { share_before, until_s, bytes: Some(cost.bytes) });
    let (command, of_command) = learned.at(&candidate.place);
    let boot_s = start.boot.expected;
    let migration_s = cost.job_s;
    candidate.option.predicted = Seconds { boot_s, migration_s, ..command }.added_up();
    candidate.option.total = start.boot.together(of_command).plus(candidate.migration).estimate();
    candidate.option.shipped_bytes = Some(whole_bytes(candidate.place.sent_bytes + cost.bytes));
    candidate
}
