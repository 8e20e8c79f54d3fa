//! What the runs of a gang show of each of its VMs, and what all of them together take.
//!
//! Each rank is predicted as a job with one VM is (`learn.rs`). The slowest one decides, because a gang has ended when its last command has.
//!
//! ```text
//! T = max over the ranks (T of a rank) + talk + uneven
//! ```
//!
//! - A VM that waits for another one does neither compute nor wait for its data, so its wait is in what is left of its time: its **rest**. Of a
//!   run's slowest ranks, the one with the least rest waited for nobody. What the others rest longer is taken for waits, and is left out of
//!   their times. It may have been work of their own, as far as none of the runs shows a shorter rest: then they take longer, and the
//!   upper end of the range has that.
//! - **Talk** is the time for which the busiest link between two sites carries what the ranks send to each other, and a number of round trips between them. That
//!   number is learnt from runs with the VMs at different distances from each other; without these it is a guess.
//! - **Uneven** is what the runs took beyond the slowest rank's line: in each step of a program another rank may be the slowest.
//!
//! What makes one rank slow makes the others slow too: they are of one program and often at one host. So the ends of the range are those of the rank whose end is
//! the latest, and the errors are not taken for independent ones.

use std::collections::BTreeMap;

use perigee_model::HostId;
use perigee_model::plan::{Basis, Estimate, Part, Seconds, Unknown};
use perigee_model::units::format_seconds;
use serde::{Deserialize, Serialize};

use crate::facts::{Cluster, JobFacts, Snapshot};
use crate::figures::Figures;
use crate::hosts::{Times, elsewhere};
use crate::learn::{Learned, Place};
use crate::refused::Refused;
use crate::runs::{FAR_S, OLDER, PastRun, RUNS_KEPT, oldest_of_most};
use crate::spread::{NINE_OF_TEN, Spread};

/// So many ranks' runs are kept of one kind of gang, and the ranks of one run at least.
pub const RANKS_KEPT: usize = 256;

/// Of a run's ranks, those that took at least this share of the longest time are its slowest ones.
const SLOWEST: f64 = 0.9;

/// Where no run had its VMs apart, a rank is guessed to wait for one round trip for so many bytes that it sends. The rate of the link has the
/// waits of a stream already.
const BYTES_PER_WAIT: f64 = 1_048_576.0;
/// At most it waits for each segment of TCP.
const BYTES_PER_WAIT_LEAST: f64 = 1448.0;
/// Measured runs apart give the number of round trips with this error, as counters of I/O do for one VM.
const ROUNDS_ERROR: f64 = 0.9;

/// What is known of the VMs of a gang that has not started.
#[derive(Debug, Clone, Default)]
pub struct GangFacts {
    /// The volumes that each rank has, by their numbers in [`JobFacts::volumes`]. There is one list for each rank.
    pub volumes: Vec<Vec<usize>>,
    /// Its earlier runs, the newest last.
    pub runs: Vec<RanksRun>,
    /// How long it takes by its whole times, where nothing is known of its ranks.
    pub whole: Option<Estimate>,
    /// What its ranks sent to each other in the last run of which this is known: a row for each.
    pub sent: Vec<Vec<u64>>,
    /// A host has room for so many vCPUs for each of its CPUs.
    pub vcpus_per_cpu: u32,
    /// The vCPUs of each of its VMs that count for room, as in the queue: the least that a VM has.
    pub least_cpus: u32,
    /// When all jobs have ended, one site has room for all of its VMs: then they start at one site.
    pub one_site: bool,
    /// All of its VMs are to be at one host.
    pub together: bool,
    /// Each of its VMs is to be at another host.
    pub apart: bool,
}

/// One run, rank by rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RanksRun {
    /// A digest of what it ran. Runs of another program say nothing.
    pub program: String,
    /// One for each rank.
    pub ranks: Vec<PastRun>,
    /// What they sent to each other.
    pub talk: Talked,
}

/// What the VMs of a gang send to each other from where they are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Talked {
    /// The bytes of the rank that sends most.
    pub most_bytes: f64,
    /// For so many seconds the busiest link between two sites carries what they send.
    pub link_s: f64,
    /// The seconds of a round trip between sender and receiver, as the mean over all bytes; within a site they count as none.
    pub round_trip_s: f64,
}

impl Talked {
    /// `sent[i][j]` is what rank `i` sends to rank `j`.
    ///
    /// # Errors
    /// [`Refused`] if a host is not up or a link is not measured.
    pub fn at(cluster: &Cluster, hosts: &[HostId], sent: &[Vec<u64>]) -> Result<Self, Refused> {
        let mut lanes = BTreeMap::new();
        let (mut talked, mut all_bytes, mut waited) = (Self::default(), 0.0, 0.0);
        for (from, row) in hosts.iter().zip(sent) {
            let mut row_bytes = 0.0;
            for (to, bytes) in hosts.iter().zip(row).filter(|(_, bytes)| **bytes > 0) {
                let bytes = *bytes as f64;
                row_bytes += bytes;
                let (here, there) = (&cluster.host(from)?.site, &cluster.host(to)?.site);
                if here != there {
                    // The receiver has probed this direction.
                    let probe = cluster.link(to, from)?.probe;
                    let lane_s: &mut f64 = lanes.entry((here, there)).or_default();
                    *lane_s += bytes / probe.rate_bytes_per_s.max(1) as f64;
                    waited += bytes * probe.rtt_ms / 1e3;
                }
            }
            all_bytes += row_bytes;
            talked.most_bytes = talked.most_bytes.max(row_bytes);
        }
        talked.link_s = lanes.into_values().fold(0.0, f64::max);
        talked.round_trip_s = if all_bytes > 0.0 { waited / all_bytes } else { 0.0 };
        Ok(talked)
    }

    fn is_far(&self) -> bool {
        self.round_trip_s > FAR_S
    }
}

impl RanksRun {
    /// What of a rank's time is neither computing nor waiting for its data.
    fn rest_s(run: &PastRun) -> f64 {
        (run.wall_s - run.cpu_s - run.local_io_s - run.network_s).max(0.0)
    }

    /// From the commands' start to the end of the last one.
    fn command_s(&self) -> f64 {
        self.ranks.iter().map(|run| run.wall_s).fold(0.0, f64::max)
    }

    /// From the first VM's start to the commands' start.
    fn boot_s(&self) -> f64 {
        self.ranks.iter().map(|run| run.boot_s).fold(0.0, f64::max)
    }

    /// The rank that took longest.
    pub fn slowest(&self) -> Option<(usize, &PastRun)> {
        let all = self.ranks.iter().enumerate();
        all.max_by(|(_, one), (_, other)| one.wall_s.total_cmp(&other.wall_s))
    }

    /// The rest of a rank that waited for nobody.
    fn least_rest_s(&self) -> f64 {
        let slowest_s = self.command_s() * SLOWEST;
        let slowest = self.ranks.iter().filter(|run| run.wall_s >= slowest_s);
        slowest.map(Self::rest_s).fold(f64::INFINITY, f64::min)
    }

    /// Whether a VM moved. Then [`Self::talk`] is that of the hosts where the VMs started, and not that of the whole run.
    fn has_moved(&self) -> bool {
        self.ranks.iter().any(|run| run.moved)
    }

    /// Whether all VMs stayed where they were, as their data did.
    fn is_at_one_place(&self) -> bool {
        !self.has_moved() && self.ranks.iter().all(PastRun::is_at_one_distance)
    }

    /// In milliseconds, for comparing distances.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the cast saturates"
    )]
    fn distance(&self) -> (String, u64) {
        let far_s = self.ranks.iter().map(PastRun::round_trip_s).fold(0.0, f64::max);
        let whole_s = far_s.max(self.talk.round_trip_s);
        (self.program.clone(), (whole_s * 1e3).round() as u64)
    }
}

/// Adds a run, the newest last. If there are too many, the oldest one of those at the most frequent distance goes, so a run at a rare
/// distance is kept.
pub fn keep(runs: &mut Vec<RanksRun>, newest: RanksRun) {
    runs.push(newest);
    let ranks = |runs: &[RanksRun]| runs.iter().map(|run| run.ranks.len()).sum::<usize>();
    while runs.len() > RUNS_KEPT || runs.len() > 1 && ranks(runs) > RANKS_KEPT {
        runs.remove(oldest_of_most(runs, RanksRun::distance));
    }
}

/// One VM of a gang.
pub(crate) struct Rank {
    /// As if it were a job of its own.
    pub job: JobFacts,
    pub learned: Learned,
    /// The same if it waited for others no longer than is certain; `None` if that makes no difference.
    longest: Option<Learned>,
}

/// All VMs of a gang.
pub(crate) struct Ranks {
    pub all: Vec<Rank>,
    /// The round trips between them that the gang waits for.
    rounds: Spread,
    rounds_unknown: Option<Unknown>,
    uneven: Spread,
    /// Of all VMs together, with the hosts where they have booted; `None` before the first run.
    boot: Option<(Spread, Vec<HostId>)>,
}

/// A rank somewhere.
pub(crate) struct Somewhere {
    pub place: Place,
    pub seconds: Seconds,
    pub command: Spread,
}

/// All ranks somewhere.
pub(crate) struct Together {
    /// The rank that decides. The parts are its own.
    pub slowest: usize,
    /// Without the boot.
    pub seconds: Seconds,
    pub command: Spread,
}

impl Ranks {
    /// # Errors
    /// [`Refused`] if a rank never ran, and a home of its data is not up.
    pub fn of(
        snapshot: &Snapshot,
        gang: &GangFacts,
        figures: &mut Figures,
    ) -> Result<Self, Refused> {
        let Snapshot { cluster, job, others, .. } = snapshot;
        let count = gang.volumes.len();
        let runs: Vec<&RanksRun> = gang.runs.iter().filter(|r| r.ranks.len() == count).collect();
        let (rounds, rounds_unknown) = rounds(&runs, &gang.sent);
        let mut all = Vec::with_capacity(count);
        for (rank, volumes) in gang.volumes.iter().enumerate() {
            let job = of_rank(job, volumes);
            let own = |waits: &dyn Fn(&RanksRun) -> f64| own_runs(&runs, rank, rounds, waits);
            let least = own(&RanksRun::least_rest_s);
            let own_most_s = runs.iter().map(|run| RanksRun::rest_s(&run.ranks[rank]));
            let own_most_s = own_most_s.fold(f64::INFINITY, f64::min);
            let most = own(&|run| run.least_rest_s().max(own_most_s));
            let learned =
                Learned::of_job((cluster, &job), (least.as_slice(), others.as_slice()), figures)?;
            let longest = (most != least)
                .then(|| {
                    Learned::from_history(cluster, &job.traits, &most, &mut Figures::default())
                })
                .flatten();
            all.push(Rank { job, learned, longest });
        }
        let mut ranks = Self {
            all,
            rounds,
            rounds_unknown,
            uneven: Spread::default(),
            boot: boot(&runs).filter(|_| count > 1),
        };
        ranks.uneven = ranks.uneven_of(cluster, &runs);
        ranks.say(&runs, figures);
        Ok(ranks)
    }

    fn say(&self, runs: &[&RanksRun], figures: &mut Figures) {
        if let Some((boot, _)) = &self.boot {
            figures.measured(format!(
                "its VMs were ready together after {} in its earlier runs",
                format_seconds(boot.expected)
            ));
        }
        if self.all.len() > 1 && !runs.is_empty() {
            figures.assumed(
                "a VM that neither computes nor waits for its data waits for the slowest one",
            );
        }
        if self.uneven.expected > 0.0 {
            figures.measured(format!(
                "its earlier runs took {} longer than their slowest VM alone",
                format_seconds(self.uneven.expected)
            ));
        }
    }

    /// What the runs took beyond what is predicted for them: the mean, of which the newer ones make more. One VM waits for no other one.
    fn uneven_of(&self, cluster: &Cluster, runs: &[&RanksRun]) -> Spread {
        if self.all.len() < 2 {
            return Spread::default();
        }
        let (mut share, mut shares, mut sum, mut squares) = (1.0, 0.0, 0.0, 0.0);
        let mut count = 0.0;
        for run in runs.iter().rev().filter(|run| run.is_at_one_place()) {
            let each = self.all.iter().zip(&run.ranks);
            let each = each.map(|(rank, run)| rank.somewhere(rank.learned.place_of(cluster, run)));
            let each: Vec<Somewhere> = each.collect();
            let predicted = self.slowest(&each).command.expected + self.talk(&run.talk).expected;
            let longer_s = run.command_s() - predicted;
            sum += share * longer_s;
            squares += share * longer_s * longer_s;
            shares += share;
            count += 1.0;
            share *= OLDER;
        }
        if shares <= 0.0 {
            return Spread::default();
        }
        let mean_s = sum / shares;
        let variance = (squares / shares - mean_s * mean_s).max(0.0);
        Spread::exactly(mean_s).plus(Spread::noise(NINE_OF_TEN * (variance / count).sqrt()))
    }

    /// What the ranks wait for to hear from each other.
    pub fn talk(&self, talked: &Talked) -> Spread {
        self.rounds.times(talked.round_trip_s).plus(Spread::exactly(talked.link_s))
    }

    /// What is not known of their talk there.
    pub fn talk_unknown(&self, talked: &Talked) -> Option<Unknown> {
        self.rounds_unknown.clone().filter(|_| talked.is_far())
    }

    /// Whether every rank has run before.
    pub fn basis(&self) -> Basis {
        let is_known = |rank: &Rank| rank.learned.basis == Basis::History;
        if self.all.iter().all(is_known) { Basis::History } else { Basis::OnePass }
    }

    /// From the first VM's start to the commands' start. `each` are the boots of the ranks alone, at these hosts. The flag says whether it is
    /// known from earlier runs at these hosts.
    pub fn boot(&self, each: &[Spread], hosts: &[HostId]) -> (Spread, bool) {
        let Some((boot, seen)) = &self.boot else { return (latest(each), false) };
        if hosts.iter().all(|host| seen.contains(host)) {
            return (*boot, true);
        }
        let there = elsewhere(boot.expected);
        let (low_s, high_s) = (there.low().min(boot.low()), there.high().max(boot.high()));
        (Spread::between(low_s, boot.expected, high_s), false)
    }

    fn slowest(&self, each: &[Somewhere]) -> Together {
        let mut slowest = 0;
        for (rank, one) in each.iter().enumerate() {
            if one.command.expected > each[slowest].command.expected {
                slowest = rank;
            }
        }
        let all: Vec<Spread> = each.iter().map(|one| one.command).collect();
        Together { slowest, seconds: each[slowest].seconds, command: latest(&all) }
    }

    /// All commands. `each` has one for each rank.
    pub fn together(&self, each: &[Somewhere], talk: Spread) -> Together {
        let mut all = self.slowest(each);
        if each.len() < 2 {
            return all;
        }
        let longest = self.all.iter().zip(each).filter_map(|(rank, one)| {
            Some(rank.longest.as_ref()?.at(&one.place).1.expected - all.command.expected)
        });
        let longer_s = longest.fold(0.0, f64::max);
        all.command.up = all.command.up.hypot(longer_s);
        all.seconds.network_s += talk.expected;
        all.seconds.other_s = (all.seconds.other_s + self.uneven.expected).max(0.0);
        all.seconds = all.seconds.added_up();
        let command = all.command.plus(talk).plus(self.uneven);
        let expected = all.seconds.total_s;
        all.command = Spread { expected, ..command }.at_least(0.0);
        all
    }
}

impl Rank {
    pub fn somewhere(&self, place: Place) -> Somewhere {
        let (seconds, command) = self.learned.at(&place);
        Somewhere { place, seconds, command }
    }

    /// The seconds that it loses to the network there.
    pub fn lost_s(&self, place: &Place) -> f64 {
        self.learned.network_longer(place, &Place::local(place.cpu_factor)).expected
    }
}

/// The latest of several times that are late together.
fn latest(all: &[Spread]) -> Spread {
    let most = |of: fn(Spread) -> f64| all.iter().copied().map(of).fold(f64::MIN, f64::max);
    match all {
        [] => return Spread::default(),
        [one] => return *one,
        _ => {}
    }
    Spread::between(most(Spread::low), most(|one| one.expected), most(Spread::high))
}

/// The job of one rank, with the volumes that it has.
fn of_rank(job: &JobFacts, volumes: &[usize]) -> JobFacts {
    let mut own = job.clone();
    own.gang = None;
    own.volumes = volumes.iter().filter_map(|at| job.volumes.get(*at).cloned()).collect();
    let sizes = &job.traits.data_bytes;
    own.traits.data_bytes = volumes.iter().filter_map(|at| sizes.get(*at).copied()).collect();
    own
}

/// A rank's runs without its talk, and without its waits for others: what it rests longer than `own_s` says of the run. How long it talked in a
/// run in which the gang moved is not known.
fn own_runs(
    runs: &[&RanksRun],
    rank: usize,
    rounds: Spread,
    own_s: &dyn Fn(&RanksRun) -> f64,
) -> Vec<PastRun> {
    let own = |run: &&RanksRun| {
        let past = &run.ranks[rank];
        let rest_s = RanksRun::rest_s(past);
        let own_s = own_s(run).min(rest_s);
        let talk_s = match run.has_moved() {
            true => 0.0,
            false => run.talk.link_s + rounds.expected * run.talk.round_trip_s,
        };
        let left_s = (own_s - talk_s).max(0.0);
        PastRun { wall_s: past.wall_s - (rest_s - left_s), ..past.clone() }
    };
    runs.iter().map(own).collect()
}

/// How many round trips between its VMs a gang waits for. A run in which it moved does not show that.
fn rounds(runs: &[&RanksRun], sent: &[Vec<u64>]) -> (Spread, Option<Unknown>) {
    let shows = |run: &&&RanksRun| run.talk.most_bytes > 0.0 && !run.has_moved();
    let talked: Vec<&&RanksRun> = runs.iter().filter(shows).collect();
    let by_row = sent.iter().map(|row| row.iter().map(|bytes| *bytes as f64).sum());
    let sent_most = by_row.fold(0.0, f64::max);
    let most_bytes = talked.last().map_or(sent_most, |newest| newest.talk.most_bytes);
    if most_bytes <= 0.0 {
        return (Spread::default(), None);
    }
    let (far, near): (Vec<&RanksRun>, Vec<&RanksRun>) =
        talked.iter().map(|run| **run).partition(|run| run.talk.is_far());
    if far.is_empty() {
        let (expected, most) = (most_bytes / BYTES_PER_WAIT, most_bytes / BYTES_PER_WAIT_LEAST);
        let why = "no run has had its VMs apart: how often they wait for each other's answers is not seen";
        let unknown = Unknown { part: Part::Network, why: why.to_owned() };
        return (Spread::between(0.0, expected, most), Some(unknown));
    }
    let mean = |all: &[&RanksRun], of: &dyn Fn(&RanksRun) -> f64| {
        all.iter().map(|run| of(run)).sum::<f64>() / all.len() as f64
    };
    let near_s = if near.is_empty() { 0.0 } else { mean(&near, &RanksRun::least_rest_s) };
    let seen = mean(&far, &|run| {
        let longer_s = run.least_rest_s() - near_s - run.talk.link_s;
        longer_s.max(0.0) / run.talk.round_trip_s
    });
    match near.is_empty() {
        // All of the rest may be talk, or none of it.
        true => (Spread::between(0.0, seen / 2.0, seen), None),
        false => (Spread::relative(seen, ROUNDS_ERROR), None),
    }
}

fn boot(runs: &[&RanksRun]) -> Option<(Spread, Vec<HostId>)> {
    let mut seconds: Vec<f64> = runs.iter().map(|run| run.boot_s()).collect();
    let boot = Times::of(&mut seconds)?.next_boot();
    let mut hosts: Vec<HostId> =
        runs.iter().flat_map(|run| run.ranks.iter().map(|past| past.host.clone())).collect();
    hosts.sort();
    hosts.dedup();
    Some((boot, hosts))
}

#[cfg(test)]
mod tests;
