//! Ways of a gang that begin far from the data and change that while its commands run: all VMs move to the data, or the data to the VMs.

use perigee_model::plan::{Basis, Seconds, Way};

use super::Placer;
use crate::copying::{Coming, ComingTo, copies_of};
use crate::figures::Figures;
use crate::gangs::Rank;
use crate::hosts::slower_s;
use crate::learn::Place;
use crate::moving::{Dirty, MoveCost, Moves};
use crate::options::changes::{self, may_not_move};
use crate::options::cost::Changed;
use crate::options::{CONFINED, Candidate, whole_bytes};
use crate::running::{is_clearly_less, moves_at_s, price_s};
use crate::spread::Spread;

impl Placer<'_> {
    /// What the rank loses to its data that loses most there.
    fn lost_to_data_s(&self, at: &Candidate) -> f64 {
        let each = self.ranks.all.iter().zip(&at.ranks);
        each.map(|(rank, alone)| rank.lost_s(&alone.place)).fold(0.0, f64::max)
    }

    /// The network's part of what the gang loses there.
    fn lost_s(&self, at: &Candidate) -> f64 {
        self.lost_to_data_s(at) + at.talk.expected
    }

    /// The best move of all VMs from a place where they may start.
    pub(super) fn moves(
        &self,
        starts: &[Candidate],
        ends: &[Candidate],
        figures: &mut Figures,
    ) -> Option<Candidate> {
        let costs = Moves::of(&self.snapshot.cluster);
        let far = starts.iter().filter(|s| s.impossible.is_none() && s.option.way != Way::Beside);
        let pairs = far.flat_map(|start| ends.iter().map(move |end| (start, end)));
        let moved = pairs.filter_map(|(start, end)| self.moved(&costs, start, end));
        let (best, cost) = moved.min_by(|a, b| changes::by_time(&a.0, &b.0))?;
        if best.impossible.is_none() {
            cost.figures.into_iter().for_each(|figure| figures.measured(figure));
            figures.assumed("its VMs move one after another, and wait for the one that moves");
        }
        Some(best)
    }

    /// `None` if there is nothing to save, or if the hosts can't exchange the VMs.
    fn moved(
        &self,
        costs: &Moves,
        start: &Candidate,
        end: &Candidate,
    ) -> Option<(Candidate, MoveCost)> {
        let (here_s, there_s) = (self.lost_s(start), self.lost_s(end));
        let slower = self.ranks.all.iter().zip(start.ranks.iter().zip(&end.ranks));
        let slower = slower.map(|(rank, (from, to))| {
            let (from, to) = (&from.place, &to.place);
            slower_s(rank.learned.computing_s(from), from.cpu_factor, to.cpu_factor)
        });
        let saved_s = here_s - there_s - slower.fold(0.0, f64::max);
        if !is_clearly_less(there_s, here_s) || saved_s <= 0.0 {
            return None;
        }
        let (cost, impossible) = self.cost(costs, start, end)?;
        let slowest = &self.ranks.all[start.slowest].learned;
        let at = |c: &Candidate| c.ranks[start.slowest].place;
        let avoidable = slowest.network_longer(&at(start), &at(end)).plus(start.talk);
        let avoidable = Spread { expected: here_s - there_s, ..avoidable };
        let change = self.change(start, &cost, saved_s, avoidable);
        let mut candidate = self.mixed(start, end, change, cost.of_the_job());
        candidate.impossible = impossible;
        candidate.option.way = Way::Migrate;
        candidate.option.end.clone_from(&end.option.start);
        candidate.option.end_hosts.clone_from(&end.option.hosts);
        let moved = candidate.ranks.iter_mut().zip(&end.ranks);
        for (alone, to) in moved.filter(|(alone, to)| alone.option.start != to.option.start) {
            alone.option.way = Way::Migrate;
            alone.option.end.clone_from(&to.option.start);
            let bytes = change.bytes.map(|bytes| bytes / end.ranks.len() as f64);
            alone.change = Some(Changed { bytes, ..change });
        }
        Some((candidate, cost))
    }

    /// The gang runs as it starts until [`crate::gangs::consider`] would make a change that saves so much.
    fn change(
        &self,
        start: &Candidate,
        cost: &MoveCost,
        saved_s: f64,
        avoidable: Spread,
    ) -> Changed {
        let known = (self.ranks.basis() == Basis::History).then_some(avoidable);
        let command_s = start.option.predicted.total_s - start.option.predicted.boot_s;
        let price_s = price_s(cost, saved_s, command_s);
        let lost_before_s = price_s - cost.job_s + moves_at_s(price_s, known);
        let share_before = (lost_before_s / saved_s).min(1.0);
        let until_s = start.boot.expected + share_before * command_s + cost.job_s;
        Changed { share_before, until_s, bytes: Some(cost.bytes) }
    }

    /// The data come to all VMs where these start: the soonest such way.
    pub(super) fn copies(&self, starts: &[Candidate], figures: &mut Figures) -> Option<Candidate> {
        let far = starts.iter().filter(|s| s.impossible.is_none() && s.option.way != Way::Beside);
        let copied = far.filter_map(|start| self.copied(start));
        let (best, cost) = copied.min_by(|a, b| changes::by_time(&a.0, &b.0))?;
        if best.impossible.is_none() {
            cost.figures.into_iter().for_each(|figure| figures.measured(figure));
            if best.ranks.iter().any(|alone| !alone.come_with_others.is_empty()) {
                figures.assumed("what clones of one volume have in common comes once to each host");
            }
        }
        Some(best)
    }

    /// `None` if there is nothing to save, or if a link is not measured.
    fn copied(&self, start: &Candidate) -> Option<(Candidate, MoveCost)> {
        let saved_s = self.lost_to_data_s(start);
        if !is_clearly_less(0.0, saved_s) {
            return None;
        }
        let each = self.ranks.all.iter().zip(&start.ranks);
        let vms: Vec<ComingTo> = each.map(|(rank, alone)| coming_to(rank, alone)).collect();
        let (cost, kept) = copies_of(&self.snapshot.cluster, &vms).ok()?;
        let mut end = start.clone();
        for alone in &mut end.ranks {
            alone.place = Place::local(alone.place.cpu_factor);
        }
        let slowest = &self.ranks.all[start.slowest].learned;
        let at = |c: &Candidate| c.ranks[start.slowest].place;
        let avoidable = slowest.network_longer(&at(start), &at(&end));
        let avoidable = Spread { expected: saved_s, ..avoidable };
        let change = self.change(start, &cost, saved_s, avoidable);
        let mut candidate = self.mixed(start, &end, change, cost.of_the_job());
        candidate.impossible = may_not_move(self.snapshot).or(kept);
        candidate.option.way = Way::Copy;
        for (rank, (alone, vm)) in candidate.ranks.iter_mut().zip(&vms).enumerate() {
            if vm.volumes.is_empty() {
                continue;
            }
            alone.option.way = Way::Copy;
            alone.change = Some(change);
            let has_come = |of: &&Coming| {
                let mut before = vms[..rank].iter().filter(|other| other.host == vm.host);
                before.any(|other| other.volumes.iter().any(|other| other.volume == of.volume))
            };
            let with_others = vm.volumes.iter().filter(has_come);
            alone.come_with_others = with_others.map(|of| of.volume.clone()).collect();
        }
        Some((candidate, cost))
    }

    /// All migrations, one after the other, and why they are not possible.
    fn cost(
        &self,
        costs: &Moves,
        start: &Candidate,
        end: &Candidate,
    ) -> Option<(MoveCost, Option<String>)> {
        let job = &self.snapshot.job;
        let mut sum = MoveCost { wait_s: Some(0.0), ..MoveCost::default() };
        let mut impossible = may_not_move(self.snapshot);
        let ranks = self.ranks.all.iter().zip(start.ranks.iter().zip(&end.ranks));
        let command_s = start.option.predicted.total_s - start.option.predicted.boot_s;
        for (rank, (from, to)) in ranks {
            let (from, to) = (&from.option.start, &to.option.start);
            if from == to {
                continue;
            }
            let data_bytes: f64 = rank.learned.volumes.iter().map(|volume| volume.bytes).sum();
            let dirty = Dirty::new(job.dirty_bytes_per_s, data_bytes, command_s);
            let cost = costs.cost(from, to, job.memory_bytes, dirty).ok()?;
            let is_one_site = self.snapshot.cluster.is_one_site(from, to);
            let confined = job.uses_confined && !is_one_site;
            impossible = impossible
                .or_else(|| confined.then(|| CONFINED.to_owned()))
                .or_else(|| cost.too_long());
            sum.job_s += cost.job_s;
            sum.total_s += cost.total_s;
            sum.pause_s += cost.pause_s;
            sum.bytes += cost.bytes;
            sum.wait_s = sum.wait_s.zip(cost.wait_s).map(|(one, other)| one.max(other));
            let new = cost.figures.into_iter().filter(|figure| !sum.figures.contains(figure));
            let new: Vec<String> = new.collect();
            sum.figures.extend(new);
        }
        Some((sum, impossible))
    }

    /// A share of the work is done where the gang starts, and the rest where it ends. The way is still that of the start.
    fn mixed(
        &self,
        start: &Candidate,
        end: &Candidate,
        change: Changed,
        migration: Spread,
    ) -> Candidate {
        let share = change.share_before;
        let mut moved = start.clone();
        let mut each = Vec::with_capacity(self.ranks.all.len());
        for ((rank, alone), to) in self.ranks.all.iter().zip(&mut moved.ranks).zip(&end.ranks) {
            alone.place = alone.place.mixed(share, &to.place);
            each.push(rank.somewhere(alone.place));
        }
        moved.talk = start.talk.times(share).plus(end.talk.times(1.0 - share));
        let all = self.ranks.together(&each, moved.talk);
        (moved.slowest, moved.place) = (all.slowest, each[all.slowest].place);
        (moved.migration, moved.change) = (migration, Some(change));
        let boot_s = start.boot.expected;
        let parts = Seconds { boot_s, migration_s: migration.expected, ..all.seconds };
        moved.option.predicted = parts.added_up();
        let total = start.boot.together(all.command).plus(migration);
        let expected = moved.option.predicted.total_s;
        moved.option.total = Spread { expected, ..total }.estimate();
        let read: f64 = each.iter().map(|one| one.place.sent_bytes).sum();
        let talk = share * self.between(&start.option.hosts)
            + (1.0 - share) * self.between(&end.option.hosts);
        let sent = read + talk + change.bytes.unwrap_or(0.0);
        moved.option.shipped_bytes = Some(whole_bytes(sent));
        for alone in &mut moved.ranks {
            alone.option.total = moved.option.total;
        }
        moved
    }
}

/// The volumes that would come to a rank.
fn coming_to<'a>(rank: &'a Rank, alone: &'a Candidate) -> ComingTo<'a> {
    let host = &alone.option.start;
    let far = rank.job.volumes.iter().filter(|volume| volume.home != *host);
    let volumes = far.map(|v| Coming { volume: &v.volume, home: &v.home, copy: &v.copy });
    let reading = rank.learned.reading(&alone.place, 1.0);
    ComingTo { host, volumes: volumes.collect(), reading }
}
