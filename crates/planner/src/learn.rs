//! Predicts the next run of a job from its earlier runs.
//!
//! A command's time is linear in the time of a round trip. (77 runs of eight workloads at 0 to 16 ms showed
//! this: a line through the times at two distances predicts the time at a third with a median error of 5 to 7
//! %.)
//!
//! ```text
//! T(x) = T(0) + D x + bytes / rate
//! ```
//!
//! `D` is the number of *dependent round trips*: requests during which the command does nothing else. It is
//! learned from the runs by weighted least squares. Newer runs and runs of more similar jobs weigh more. If all
//! runs are at one distance, `D` comes from the counters of their volume servers, or from the replay of their
//! block traces. The same figure is the prior if there are few runs.
//!
//! The line goes through the mean of the runs. So the uncertainty of `D` grows with the distance between the
//! prediction and the runs; at the distance of the runs themselves it has no effect.

use perigee_model::HostId;
use perigee_model::plan::{Basis, Part, Seconds, Unknown};
use perigee_model::units::format_bytes;

use crate::facts::{Cluster, HostFacts, JobFacts, Snapshot};
use crate::figures::Figures;
use crate::hosts::{cpu_factor, load_factor};
use crate::network::path;
use crate::refused::Refused;
use crate::runs::{FAR_S, PastRun, Traits};
use crate::spread::Spread;

/// Measured: in 9 of 10 cases a repeated run differs from the mean of its repetitions by less than this (by 7 %
/// in the median).
const REPEATED: f64 = 0.24;
/// The figure above counts as this many runs, beside the runs of the job itself.
const REPEATED_RUNS: f64 = 4.0;
/// Each older run counts as this share of the next newer one.
const OLDER: f64 = 0.8;
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

/// Linux's default read-ahead: the assumed request size of a job about which nothing is known.
const READ_AHEAD_BYTES: u64 = 128 << 10;
/// Such a job may read its data in pages of 8 KiB instead, or only an eighth of it.
const ONE_PASS_FACTOR: f64 = 8.0;
/// The assumed seconds of computing of such a job: low, expected, high.
const UNKNOWN_CPU_S: (f64, f64, f64) = (0.1, 5.0, 300.0);

/// The work of a job, wherever it runs. CPU time is that of a host of mean speed.
#[derive(Debug, Clone)]
pub(crate) struct Learned {
    pub basis: Basis,
    /// The command's seconds at a round trip of `mean_round_trip_s`, without the time for its bytes.
    mean: Spread,
    mean_round_trip_s: f64,
    /// `D` in the module's documentation.
    pub round_trips: Spread,
    cpu: Spread,
    /// Of the time that is neither computing nor network, the share that is waiting for local blocks.
    local_share: f64,
    pub volumes: Vec<VolumeLearned>,
    /// The number of requests of a run.
    pub requests: f64,
    /// How much the next run may differ from the mean, as a share of it.
    repeated: f64,
    pub unknown: Vec<Unknown>,
}

/// The work of a job on one volume.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VolumeLearned {
    /// Its share of the round trips.
    pub share: f64,
    /// The bytes that the command reads and writes.
    pub bytes: f64,
    /// The bytes whose time on a link the command waits for.
    pub waited_bytes: f64,
    /// The bytes that a link has to carry: none twice that are in memory.
    pub sent_bytes: f64,
}

/// The properties of a host where the command may run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    /// The mean over the volumes, weighted by their shares of the round trips.
    pub round_trip_s: f64,
    /// The seconds that the command waits for bytes on the links.
    pub bytes_s: f64,
    /// The seconds that the links need at least.
    pub links_s: f64,
    /// The bytes that the links carry.
    pub sent_bytes: f64,
    /// The CPU time here relative to a host of mean speed; more if other VMs compute.
    pub cpu_factor: Spread,
}

impl Place {
    /// With all data there.
    pub fn local(cpu_factor: Spread) -> Self {
        Self { round_trip_s: 0.0, bytes_s: 0.0, links_s: 0.0, sent_bytes: 0.0, cpu_factor }
    }

    /// A mixture of two places, as for a run with a move: this share of the work is done at the first.
    pub fn mixed(&self, share: f64, other: &Self) -> Self {
        let mix = |a: f64, b: f64| a * share + b * (1.0 - share);
        let (a, b) = (self.cpu_factor, other.cpu_factor);
        Self {
            round_trip_s: mix(self.round_trip_s, other.round_trip_s),
            bytes_s: mix(self.bytes_s, other.bytes_s),
            links_s: mix(self.links_s, other.links_s),
            sent_bytes: mix(self.sent_bytes, other.sent_bytes),
            cpu_factor: Spread {
                expected: mix(a.expected, b.expected),
                down: mix(a.down, b.down),
                up: mix(a.up, b.up),
            },
        }
    }
}

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

impl Learned {
    /// # Errors
    /// [`Refused`] if there are no runs and a volume's home is not up.
    pub fn of(snapshot: &Snapshot, figures: &mut Figures) -> Result<Self, Refused> {
        let Snapshot { cluster, job, history } = snapshot;
        match Self::from_history(cluster, &job.traits, history, figures) {
            Some(learned) => Ok(learned),
            None => one_pass(cluster, job, figures),
        }
    }

    /// `None` if no run is usable.
    pub fn from_history(
        cluster: &Cluster,
        traits: &Traits,
        history: &[PastRun],
        figures: &mut Figures,
    ) -> Option<Self> {
        let on_links = OnLinks::of(traits, history);
        let samples = samples(cluster, traits, history, on_links);
        if samples.is_empty() {
            return None;
        }
        figures.measured(match samples.len() {
            1 => "work: 1 earlier run".to_owned(),
            runs => format!("work: {runs} earlier runs"),
        });
        Some(from_runs(&samples, on_links, figures))
    }

    /// A host as a place for this job, with its volumes at these homes.
    ///
    /// # Errors
    /// [`Refused`] if a link is not measured.
    pub fn place(
        &self,
        cluster: &Cluster,
        host: &HostFacts,
        homes: &[&HostId],
        figures: &mut Figures,
    ) -> Result<Place, Refused> {
        let (speed, _) = cpu_factor(cluster, &host.id);
        let load = load_factor(host, host.running_vms.saturating_add(1));
        let cpu_factor = speed.by(load);
        let mut place = Place::local(cpu_factor);
        for (home, volume) in homes.iter().zip(&self.volumes) {
            if let Some(path) = path(cluster, &host.id, home, figures)? {
                let rate = path.rate_bytes_per_s.max(1) as f64;
                place.round_trip_s += volume.share * path.round_trip_s;
                place.bytes_s += volume.waited_bytes / rate;
                place.links_s += volume.sent_bytes / rate;
                place.sent_bytes += volume.sent_bytes;
            }
        }
        Ok(place)
    }

    /// Predicts the command's seconds at a place, part by part.
    ///
    /// The time is at least that of the computing, and at least the bytes divided by the links' rate.
    pub fn at(&self, place: &Place) -> (Seconds, Spread) {
        let farther_s = place.round_trip_s - self.mean_round_trip_s;
        let cpu_s = self.cpu.expected * place.cpu_factor.expected;
        let least_s = cpu_s.max(place.links_s);
        let total = self
            .mean
            .plus(self.round_trips.times(farther_s))
            .plus(self.slower(place))
            .plus(Spread::exactly(place.bytes_s));
        let total = total.plus(Spread::noise(total.expected.abs() * self.repeated));
        let expected_s = total.expected.max(least_s);
        let total = Spread { expected: expected_s, ..total }.at_least(0.0);
        let network_s = self.round_trips.expected * place.round_trip_s + place.bytes_s;
        let network_s = network_s.min(expected_s - cpu_s).max(0.0);
        let rest_s = expected_s - cpu_s - network_s;
        let seconds = Seconds {
            cpu_s,
            network_s,
            local_io_s: rest_s * self.local_share,
            other_s: rest_s * (1.0 - self.local_share),
            ..Seconds::default()
        };
        (seconds.added_up(), total)
    }

    /// How much longer the command takes at one place than at another. The uncertainty about the command itself
    /// is the same at both and cancels out.
    pub fn longer(&self, here: &Place, there: &Place) -> Spread {
        self.network_longer(here, there)
            .plus(self.slower(here))
            .plus(self.slower(there).times(-1.0))
    }

    /// The same for the network's part alone.
    pub fn network_longer(&self, here: &Place, there: &Place) -> Spread {
        let bytes_s = Spread::exactly(here.bytes_s - there.bytes_s);
        self.round_trips.times(here.round_trip_s - there.round_trip_s).plus(bytes_s)
    }

    fn slower(&self, place: &Place) -> Spread {
        let factor = place.cpu_factor;
        Spread { expected: factor.expected - 1.0, ..factor }.times(self.cpu.expected)
    }
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
    for run in history.iter().rev().filter(|run| run.is_of_today()) {
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
        let weight = share / (REPEATED * run.wall_s).powi(2);
        let round_trip_s = run.round_trip_s();
        samples.push(Sample { run, share, weight, round_trip_s, bytes_s, command_s, cpu_s });
    }
    samples
}

/// The mean, with the weights of the least squares.
fn mean(samples: &[Sample], value: impl Fn(&Sample) -> f64) -> f64 {
    let weights: f64 = samples.iter().map(|s| s.weight).sum();
    samples.iter().map(|s| s.weight * value(s)).sum::<f64>() / weights
}

fn from_runs(samples: &[Sample], on_links: OnLinks, figures: &mut Figures) -> Learned {
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
        (s.command_s - line_s) / s.command_s
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
        VolumeLearned { share, bytes, waited_bytes, sent_bytes }
    };
    Learned {
        basis: Basis::History,
        mean: Spread::exactly(command_s).plus(Spread::noise(mean_distance_s)),
        mean_round_trip_s,
        round_trips,
        cpu: Spread::relative(cpu_s, REPEATED),
        local_share,
        volumes: (0..newest.volumes.len()).map(volume).collect(),
        requests: mean(samples, |s| s.run.requests()),
        repeated: repeated.sqrt(),
        unknown,
    }
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
    let replayed = samples.iter().filter_map(|s| Some((s.share, s.run.replayed?.round_trips)));
    let (shares, trips) =
        replayed.fold((0.0, 0.0), |sum, (share, trips)| (sum.0 + share, sum.1 + share * trips));
    let (expected, error) = if shares > 0.0 {
        figures.measured("dependent round trips: by replaying the block trace".to_owned());
        (trips / shares, REPLAY_ERROR)
    } else {
        (
            sum(&|s| s.run.serial_requests() * (1.0 - s.run.hidden_share())) / sum(&|_| 1.0),
            COUNTERS_ERROR,
        )
    };
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

/// A job about which nothing is known is assumed to read its volumes' data once.
fn one_pass(cluster: &Cluster, job: &JobFacts, figures: &mut Figures) -> Result<Learned, Refused> {
    figures.assumed("one pass over the data, 128 KiB at a time, one request in flight");
    let mut local_s = 0.0;
    let mut volumes = Vec::new();
    let mut unknown = vec![Unknown { part: Part::Cpu, why: "no such job has run".to_owned() }];
    for volume in &job.volumes {
        figures.measured(format!(
            "volume {} at {} holds {}",
            volume.volume,
            volume.home,
            format_bytes(volume.allocated_bytes)
        ));
        let home = cluster.host(&volume.home)?;
        let reads = volume.allocated_bytes.div_ceil(READ_AHEAD_BYTES) as f64;
        match home.local_blocks {
            Some(blocks) => local_s += reads * blocks.latency_median_us as f64 / 1e6,
            None => {
                let why = format!("no block read at {} was measured", home.id);
                unknown.push(Unknown { part: Part::LocalIo, why });
            }
        }
        volumes.push((reads, volume.allocated_bytes as f64));
    }
    let reads: f64 = volumes.iter().map(|(reads, _)| reads).sum();
    if reads > 0.0 {
        let why = "no such job has run: how it reads its data is not known".to_owned();
        unknown.push(Unknown { part: Part::Network, why });
    }
    let (low_s, cpu_s, high_s) = UNKNOWN_CPU_S;
    let cpu = Spread::between(low_s, cpu_s, high_s);
    let local = Spread::between(local_s / ONE_PASS_FACTOR, local_s, local_s * ONE_PASS_FACTOR);
    let share = |(of_volume, bytes)| {
        let share = if reads > 0.0 { of_volume / reads } else { 0.0 };
        VolumeLearned { share, bytes, waited_bytes: bytes, sent_bytes: bytes }
    };
    Ok(Learned {
        basis: Basis::OnePass,
        mean: cpu.plus(local),
        mean_round_trip_s: 0.0,
        round_trips: Spread::between(reads / ONE_PASS_FACTOR, reads, reads * ONE_PASS_FACTOR),
        cpu,
        local_share: 1.0,
        volumes: volumes.into_iter().map(share).collect(),
        requests: reads,
        repeated: REPEATED,
        unknown,
    })
}

#[cfg(test)]
mod tests;
