//! Ways that begin far from the data and change that while the job runs: the VM moves to the data, or the data to
//! the VM.

use perigee_model::HostId;
use perigee_model::plan::{Basis, Seconds, Way};

use super::{Candidate, Stay, whole_bytes};
use crate::copying::copy_cost;
use crate::facts::{Snapshot, VolumeFacts};
use crate::figures::Figures;
use crate::learn::{Learned, Place};
use crate::moving::{Dirty, MoveCost, move_cost_with};
use crate::refused::Refused;
use crate::running::moves_at_s;

const MAY_NOT_MOVE: &str = "the job file says that it may not move";
const HELD: &str =
    "it uses data whose policy is leave-site: never, and a live migration is not encrypted";

/// `migrate` for its best two hosts, and `follow` for the same.
pub(super) fn best_moves(
    snapshot: &Snapshot,
    learned: &Learned,
    stays: &[Stay],
    figures: &mut Figures,
) -> Vec<Candidate> {
    let starts = stays.iter().filter(|s| s.allowed && s.way == Way::Remote);
    let pairs = starts.flat_map(|start| {
        let better = stays.iter().filter(|end| avoidable(learned, start, &end.place) > 0.0);
        better.map(move |end| (start, end))
    });
    let mut refused = None;
    let moves = pairs.filter_map(|(start, end)| {
        let predicted = predict_move(snapshot, learned, start, end);
        predicted.map_err(|why| refused = Some((start, end, why))).ok()
    });
    let best = moves.min_by(|a, b| total_s(&a.0).total_cmp(&total_s(&b.0)));
    let Some((mut best, cost)) = best else {
        // An impossible move is listed only if the hosts cannot exchange a VM at all.
        let Some((start, end, why @ Refused::ProcessorDiffers { .. })) = refused else {
            return Vec::new();
        };
        let mut candidate = Candidate::new(Way::Migrate, start, &end.host);
        candidate.impossible = Some(why.to_string());
        return vec![candidate];
    };
    if snapshot.job.uses_held {
        best.impossible = Some(HELD.to_owned());
    } else if snapshot.job.may_migrate {
        cost.figures.into_iter().for_each(|figure| figures.measured(figure));
        let start = &best.option.start;
        figures.assumed(&format!(
            "after a move the job hardly reads its root disk, which stays at {start}"
        ));
    } else {
        best.impossible = Some(MAY_NOT_MOVE.to_owned());
    }
    let follow = following(snapshot, &best);
    std::iter::once(best).chain(follow).collect()
}

/// The same move, after which root and output disk come to the VM. How much they have to ship is not known.
fn following(snapshot: &Snapshot, migrate: &Candidate) -> Option<Candidate> {
    let (start, end) = (&migrate.option.start, &migrate.option.end);
    let switches = copy_cost(&snapshot.cluster, end, &[(start, 0), (start, 0)]).ok()?;
    let mut follow = migrate.clone();
    follow.option.way = Way::Follow;
    follow.option.shipped_bytes = None;
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

/// The volumes come to the host where the VM starts.
pub(super) fn best_copy(
    snapshot: &Snapshot,
    learned: &Learned,
    stays: &[Stay],
    figures: &mut Figures,
) -> Option<Candidate> {
    let starts = stays.iter().filter(|s| s.allowed && s.way == Way::Remote);
    let copies = starts.filter_map(|start| predict_copy(snapshot, learned, start));
    let (mut best, cost) = copies.min_by(|a, b| total_s(&a.0).total_cmp(&total_s(&b.0)))?;
    let start = &best.option.start;
    let kept = far_volumes(snapshot, start).find_map(|volume| {
        let why = volume.stays.as_ref()?;
        Some(format!("volume {} stays at {}: {why}", volume.volume, volume.home))
    });
    let forbidden = (!snapshot.job.may_migrate).then(|| MAY_NOT_MOVE.to_owned());
    best.impossible = forbidden.or(kept);
    if best.impossible.is_none() {
        cost.figures.into_iter().for_each(|figure| figures.measured(figure));
    }
    Some(best)
}

fn far_volumes<'a>(
    snapshot: &'a Snapshot,
    host: &'a HostId,
) -> impl Iterator<Item = &'a VolumeFacts> {
    snapshot.job.volumes.iter().filter(move |volume| volume.home != *host)
}

fn total_s(candidate: &Candidate) -> f64 {
    candidate.option.predicted.total_s
}

/// How much more the network adds to the command at one place than at the other.
fn avoidable(learned: &Learned, start: &Stay, end: &Place) -> f64 {
    learned.network_longer(&start.place, end).expected
}

fn predict_move(
    snapshot: &Snapshot,
    learned: &Learned,
    start: &Stay,
    end: &Stay,
) -> Result<(Candidate, MoveCost), Refused> {
    let data_bytes: f64 = learned.volumes.iter().map(|volume| volume.bytes).sum();
    let command_s = start.seconds.total_s - start.seconds.boot_s;
    let dirty = Dirty::new(snapshot.job.dirty_bytes_per_s, data_bytes, command_s);
    let memory_bytes = snapshot.job.memory_bytes;
    let cost = move_cost_with(&snapshot.cluster, &start.host, &end.host, memory_bytes, dirty)?;
    let candidate = Candidate::new(Way::Migrate, start, &end.host);
    Ok((changed(candidate, learned, start, &end.place, &cost), cost))
}

/// `None` if a link is not measured, or if there is nothing to save.
fn predict_copy(
    snapshot: &Snapshot,
    learned: &Learned,
    start: &Stay,
) -> Option<(Candidate, MoveCost)> {
    let volumes: Vec<(&HostId, u64)> =
        far_volumes(snapshot, &start.host).map(|v| (&v.home, v.allocated_bytes)).collect();
    let cost = copy_cost(&snapshot.cluster, &start.host, &volumes).ok()?;
    let local = Place::local(start.place.cpu_factor);
    if avoidable(learned, start, &local) <= 0.0 {
        return None;
    }
    let candidate = Candidate::new(Way::Copy, start, &start.host);
    Some((changed(candidate, learned, start, &local, &cost), cost))
}

/// The job runs as it starts until [`crate::consider`] would make the change, and then at the other place.
fn changed(
    mut candidate: Candidate,
    learned: &Learned,
    start: &Stay,
    end: &Place,
    cost: &MoveCost,
) -> Candidate {
    let avoidable = learned.network_longer(&start.place, end);
    let known = (learned.basis == Basis::History).then_some(avoidable);
    let lost_before_s = moves_at_s(cost.job_s, known);
    let share_before = (lost_before_s / avoidable.expected).min(1.0);
    candidate.place = start.place.mixed(share_before, end);
    candidate.migration = cost.of_the_job();
    let (command, of_command) = learned.at(&candidate.place);
    let boot_s = start.boot.expected;
    let migration_s = cost.job_s;
    candidate.option.predicted = Seconds { boot_s, migration_s, ..command }.added_up();
    candidate.option.total = start.boot.plus(of_command).plus(candidate.migration).estimate();
    candidate.option.shipped_bytes = Some(whole_bytes(candidate.place.sent_bytes + cost.bytes));
    candidate
}
