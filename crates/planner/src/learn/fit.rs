//! The line through a job's earlier runs, by weighted least squares.

use perigee_model::plan::{Basis, Part, Unknown};

use super::{Learned, REPEATED, VolumeLearned};
use crate::facts::Cluster;
use crate::figures::Figures;
use crate::hosts::{cpu_factor, median};
use crate::noise::is_as_far;
use crate::runs::{FAR_S, OLDER, PastRun, Traits};
use crate::spread::Spread;

/// [`REPEATED`] counts as this many runs, beside the runs of the job itself.
const REPEATED_RUNS: f64 = 4.0;
/// A run that took longer than so many times what the runs from its distance take is weighed by its own time: it has probably
/// not done the same work. All others weigh as what they usually take: by its own time a short run would outweigh the others.
const TOO_LONG: f64 = 2.0;
/// If so many of the newest runs all took longer than those before them, or all less, the job has changed. One alone may be
/// an odd one.
const CHANGED_RUNS: usize = 2;
/// The share of a run that was moved midway, because only the mean of its round trips is known.
const MOVED: f64 = 0.5;

/// Measured: the error, in 9 of 10 cases, of the network's part of the time. The time predicted from the
/// counters of one run was wrong by up to 59 %, and from the replay of its block trace by up to 29 %; the
/// network was two thirds of the time.
const COUNTERS_ERROR: f64 = 0.9;
const REPLAY_ERROR: f64 = 0.44;
/// A local run doesn't show how many requests a job keeps in flight, because each is answered before the next
/// one is sent. With eight in flight, every method was wrong by 400 to 570 %.
const HIDDEN_DEPTH: f64 = 8.0;

/// A run that is used for learning.
struct Sample<'a> {
    run: &'a PastRun,
    /// The share of a run that it counts as.
    share: f64,
    /// Its weight in the least squares: the noise grows with the time.
    weight: f64,
    round_trip_s: f64,
    /// The seconds that it waited for bytes on the links.
    bytes_s: f64,
    /// The seconds of the command at a host of mean speed, without the bytes.
    command_s: f64,
    cpu_s: f64,
}

/// What the newest runs of the job itself show if they differ from all before them.
#[derive(Debug, Clone, Copy)]
struct Apart {
    /// How many runs were left out, because the job has changed since.
    left_out: usize,
    /// What the next run may take too: while only one run is new, what that one took; while only [`CHANGED_RUNS`] are, what
    /// the last one before them took.
    also: Option<Took>,
}

/// What the runs show; `None` if none is usable.
pub(super) fn fit(
    cluster: &Cluster,
    traits: &Traits,
    history: &[PastRun],
    figures: &mut Figures,
) -> Option<Learned> {
    let on_links = OnLinks::of(traits, history);
    let mut samples = samples(cluster, traits, history, on_links);
    let apart = leave_out_old(traits, &mut samples);
    weigh(&mut samples);
    if samples.is_empty() {
        return None;
    }
    figures.measured(match samples.len() {
        1 => "work: 1 earlier run".to_owned(),
        runs => format!("work: {runs} earlier runs"),
    });
    if let Some(left_out) = apart.map(|apart| apart.left_out).filter(|left_out| *left_out > 0) {
        figures.measured(match left_out {
            1 => "the job has changed: 1 older run does not count".to_owned(),
            runs => format!("the job has changed: {runs} older runs do not count"),
        });
    }
    let mut learned = from_runs(traits, &samples, on_links, figures);
    if let Some((round_trip_s, also)) = apart.and_then(|apart| apart.also) {
        let farther_s = round_trip_s - learned.mean_round_trip_s;
        let line_s = learned.mean.expected + learned.round_trips.expected * farther_s;
        learned.mean.up = learned.mean.up.max(also.high() - line_s);
        learned.mean.down = learned.mean.down.max(line_s - also.low());
    }
    Some(learned)
}

/// The shares of the bytes of a job's requests that it waits for, and that a link carries.
#[derive(Debug, Clone, Copy)]
struct OnLinks {
    waited: f64,
    sent: f64,
}

impl OnLinks {
    /// As the replays of its traces show it. Without one, each byte counts.
    fn of(traits: &Traits, history: &[PastRun]) -> Self {
        let (mut bytes, mut waited, mut sent) = (0.0, 0.0, 0.0);
        for run in history {
            if let Some(replayed) = run.replayed {
                let related = traits.relation(&run.traits);
                bytes += related * run.bytes();
                waited += related * replayed.waited_bytes;
                sent += related * replayed.sent_bytes;
            }
        }
        let share = |part: f64| if bytes > 0.0 { part / bytes } else { 1.0 };
        Self { waited: share(waited).min(1.0), sent: share(sent) }
    }
}

fn samples<'a>(
    cluster: &Cluster,
    traits: &Traits,
    history: &'a [PastRun],
    on_links: OnLinks,
) -> Vec<Sample<'a>> {
    let mut age_share = 1.0;
    let mut samples = Vec::new();
    // What was measured of each volume says nothing of a job with other ones.
    let is_alike = |run: &&PastRun| {
        run.is_at_one_distance() && run.traits.data_bytes.len() == traits.data_bytes.len()
    };
    for run in history.iter().rev().filter(is_alike) {
        let factor = cpu_factor(cluster, &run.host).0.expected;
        let cpu_s = run.cpu_s / factor;
        let bytes_s = run.bytes_s() * on_links.waited;
        let command_s = (run.wall_s - bytes_s - run.cpu_s + cpu_s).max(cpu_s);
        let related = traits.relation(&run.traits);
        let moved = if run.moved { MOVED } else { 1.0 };
        let share = age_share * related * moved;
        age_share *= OLDER;
        if share <= 0.0 || command_s <= 0.0 {
            continue;
        }
        let round_trip_s = run.round_trip_s();
        samples.push(Sample { run, share, weight: 0.0, round_trip_s, bytes_s, command_s, cpu_s });
    }
    samples
}

/// Removes the runs of the job itself from before it changed. The newest one is the first.
fn leave_out_old(traits: &Traits, samples: &mut Vec<Sample>) -> Option<Apart> {
    let is_own = |s: &Sample| traits.is_same_but_for_data(&s.run.traits);
    let own: Vec<&Sample> = samples.iter().filter(|s| is_own(s)).collect();
    let split = |newer: usize| Some((newer, compare(&own[..newer], &own[newer..])?));
    let splits: Vec<(usize, Compared)> = (1..own.len()).filter_map(split).collect();
    // The last change counts.
    let changed = splits.iter().find(|(_, compared)| compared.runs >= CHANGED_RUNS);
    let Some((newer, compared)) = changed else {
        let (_, compared) = splits.first()?;
        return Some(Apart { left_out: 0, also: Some(compared.new) });
    };
    let left_out = own.len() - newer;
    let mut seen = 0;
    samples.retain(|s| {
        seen += usize::from(is_own(s));
        !is_own(s) || seen <= *newer
    });
    Some(Apart { left_out, also: (compared.runs == CHANGED_RUNS).then_some(compared.old) })
}

/// What a run took, with its round trip.
type Took = (f64, Spread);

/// New runs that all took longer than all old ones from the same distance, or all less.
#[derive(Debug, Clone, Copy)]
struct Compared {
    /// How many of the new ones there are old ones for.
    runs: usize,
    /// The newest of them.
    new: Took,
    /// The newest of the old ones.
    old: Took,
}

/// `None` if the new runs are like the old ones, or if there are none from the same distance.
fn compare(new: &[&Sample], old: &[&Sample]) -> Option<Compared> {
    let took = |s: &Sample| (s.round_trip_s, Spread::repeated(s.command_s, REPEATED));
    let (mut longer, mut less, mut first) = (0, 0, None);
    for s in new {
        let as_far = |other: &&&Sample| is_as_far(other.round_trip_s, s.round_trip_s);
        let old: Vec<Took> = old.iter().filter(as_far).map(|other| took(other)).collect();
        let Some(newest) = old.first() else { continue };
        first.get_or_insert((took(s), *newest));
        if old.iter().all(|(_, before)| s.command_s > before.high()) {
            longer += 1;
        } else if old.iter().all(|(_, before)| s.command_s < before.low()) {
            less += 1;
        } else {
            return None;
        }
    }
    let (new, old) = first.filter(|_| longer == 0 || less == 0)?;
    Some(Compared { runs: longer + less, new, old })
}

/// Gives the runs their weights in the least squares.
fn weigh(samples: &mut [Sample]) {
    let weight = |s: &Sample| s.share / (REPEATED * weighed_s(s, samples)).powi(2);
    let weights: Vec<f64> = samples.iter().map(weight).collect();
    for (sample, weight) in samples.iter_mut().zip(weights) {
        sample.weight = weight;
    }
}

/// The time by which a run is weighed: what the runs from its distance usually take, unless it is [`TOO_LONG`].
fn weighed_s(sample: &Sample, all: &[Sample]) -> f64 {
    let own_s = sample.run.wall_s;
    let beside = all.iter().filter(|other| is_as_far(other.round_trip_s, sample.round_trip_s));
    let mut walls_s: Vec<f64> = beside.map(|other| other.run.wall_s).collect();
    let usual_s = median(&mut walls_s).unwrap_or(own_s);
    if own_s > usual_s * TOO_LONG { own_s } else { usual_s }
}

/// The mean, with the weights of the least squares.
fn mean(samples: &[Sample], value: impl Fn(&Sample) -> f64) -> f64 {
    let weights: f64 = samples.iter().map(|s| s.weight).sum();
    samples.iter().map(|s| s.weight * value(s)).sum::<f64>() / weights
}

fn from_runs(
    traits: &Traits,
    samples: &[Sample],
    on_links: OnLinks,
    figures: &mut Figures,
) -> Learned {
    let weights: f64 = samples.iter().map(|s| s.weight).sum();
    let mean_round_trip_s = mean(samples, |s| s.round_trip_s);
    let command_s = mean(samples, |s| s.command_s);
    let cpu_s = mean(samples, |s| s.cpu_s);
    let (prior, unknown) = by_one_distance(samples, figures);
    let mut round_trips = by_line(samples, mean_round_trip_s, command_s, prior).at_least(0.0);
    if mean_round_trip_s > FAR_S {
        // The command did not wait while it computed.
        round_trips = round_trips.at_most((command_s - cpu_s).max(0.0) / mean_round_trip_s);
    }
    let unexplained = |s: &Sample| {
        let line_s = command_s + round_trips.expected * (s.round_trip_s - mean_round_trip_s);
        // Of one that was too short no more is unexplained than all of it.
        ((s.command_s - line_s) / s.command_s).max(-1.0)
    };
    let count: f64 = samples.iter().map(|s| s.share).sum();
    // 9 of 10 values are within 1.645 standard deviations.
    let squares: f64 = samples.iter().map(|s| s.share * (1.645 * unexplained(s)).powi(2)).sum();
    let repeated = (REPEATED_RUNS * REPEATED.powi(2) + squares) / (REPEATED_RUNS + count - 1.0);
    let mean_distance_s = 1.0 / weights.sqrt();
    let (local_s, other_s) = (mean(samples, |s| s.run.local_io_s), mean(samples, other_s));
    let local_share = if local_s > 0.0 { local_s / (local_s + other_s) } else { 0.0 };
    let newest = samples[0].run;
    let volume = |index: usize| {
        let of = |s: &Sample| s.run.volumes.get(index).map_or(0.0, |v| v.bytes);
        let share = |s: &Sample| s.run.shares().get(index).copied().unwrap_or_default();
        let (share, bytes) = (mean(samples, share), mean(samples, of));
        let (waited_bytes, sent_bytes) = (bytes * on_links.waited, bytes * on_links.sent);
        // A run that does not say what it read counts as if it had only written: nothing is promised of a replica.
        let reads = |s: &Sample| s.run.volumes.get(index).and_then(|v| v.reads).unwrap_or_default();
        let requests = mean(samples, |s| s.run.volumes.get(index).map_or(0.0, |v| v.requests));
        let read_share =
            if requests > 0.0 { (mean(samples, reads) / requests).min(1.0) } else { 1.0 };
        let read_time_share = read_time_share(samples, index).unwrap_or(read_share);
        VolumeLearned { share, read_share, read_time_share, bytes, waited_bytes, sent_bytes }
    };
    Learned {
        basis: Basis::History,
        bytes: Spread::exactly(1.0),
        mean: Spread::exactly(command_s).plus(Spread::noise(mean_distance_s)),
        mean_round_trip_s,
        round_trips,
        cpu: Spread::relative(cpu_s, REPEATED),
        local_share,
        volumes: (0..newest.volumes.len()).map(volume).collect(),
        vcpus: traits.cpus,
        requests: mean(samples, |s| s.run.requests()),
        repeated: repeated.sqrt(),
        unknown,
    }
}

/// As in [`VolumeLearned`]. Runs far from the data show it best: at their home writes may take longer than reads.
fn read_time_share(samples: &[Sample], index: usize) -> Option<f64> {
    let shown = |far: bool| {
        let those = samples.iter().filter(move |s| !far || s.round_trip_s > FAR_S);
        let shares =
            those.filter_map(|s| Some((s.weight, s.run.volumes.get(index)?.read_time_share?)));
        let (weights, sum) = shares
            .fold((0.0, 0.0), |(all, sum), (weight, share)| (all + weight, sum + weight * share));
        (weights > 0.0).then(|| sum / weights)
    };
    shown(true).or_else(|| shown(false))
}

fn other_s(sample: &Sample) -> f64 {
    let run = sample.run;
    (run.wall_s - run.cpu_s - run.local_io_s - run.network_s).max(0.0)
}

/// `D` without a comparison of runs at different distances.
fn by_one_distance(samples: &[Sample], figures: &mut Figures) -> (Spread, Vec<Unknown>) {
    let sum = |value: &dyn Fn(&Sample) -> f64| -> f64 {
        samples.iter().map(|s| s.share * value(s)).sum()
    };
    let far = |s: &Sample| s.round_trip_s > FAR_S;
    if samples.iter().any(far) {
        let lost = |s: &Sample| if far(s) { (s.run.network_s - s.bytes_s).max(0.0) } else { 0.0 };
        let round_trip = |s: &Sample| if far(s) { s.round_trip_s } else { 0.0 };
        let round_trips = sum(&lost) / sum(&round_trip);
        return (Spread::relative(round_trips, COUNTERS_ERROR), Vec::new());
    }
    let serial = sum(&|s| s.run.serial_requests()) / sum(&|_| 1.0);
    if serial == 0.0 {
        return (Spread::default(), Vec::new());
    }
    let unknown = Unknown {
        part: Part::Network,
        why: "no run has read its data over a network: how many requests it keeps in flight together is not seen"
            .to_owned(),
    };
    let depth = samples.iter().find_map(|s| s.run.replayed?.depth);
    let replayed = samples.iter().filter_map(|s| Some((s.share, s.run.replayed?.round_trips)));
    let (shares, trips) =
        replayed.fold((0.0, 0.0), |sum, (share, trips)| (sum.0 + share, sum.1 + share * trips));
    let (expected, error) = if shares > 0.0 {
        figures.measured(match depth {
            Some(depth) => format!(
                "dependent round trips: by replaying the block trace; a few answers were held back, which shows \
                 {depth:.0} reads in flight"
            ),
            None => "dependent round trips: by replaying the block trace".to_owned(),
        });
        (trips / shares, REPLAY_ERROR)
    } else {
        (
            sum(&|s| s.run.serial_requests() * (1.0 - s.run.hidden_share())) / sum(&|_| 1.0),
            COUNTERS_ERROR,
        )
    };
    if depth.is_some() {
        return (Spread::relative(expected, error), Vec::new());
    }
    let (low, high) = (expected / HIDDEN_DEPTH, expected * (1.0 + error));
    (Spread::between(low, expected, high), vec![unknown])
}

/// The slope of the line through the runs. `prior` counts as one more measurement of it.
fn by_line(samples: &[Sample], mean_round_trip_s: f64, command_s: f64, prior: Spread) -> Spread {
    let (mut squares, mut products) = (0.0, 0.0);
    for s in samples {
        let farther_s = s.round_trip_s - mean_round_trip_s;
        squares += s.weight * farther_s.powi(2);
        products += s.weight * farther_s * (s.command_s - command_s);
    }
    if prior.distance() == 0.0 || squares == 0.0 {
        return prior;
    }
    let prior_weight = prior.distance().powi(-2);
    let expected = (prior.expected * prior_weight + products) / (prior_weight + squares);
    // With more weight than the prior's, the uncertainty is that much smaller.
    let narrower = (prior_weight / (prior_weight + squares)).sqrt();
    Spread { expected, down: prior.down * narrower, up: prior.up * narrower }
}
