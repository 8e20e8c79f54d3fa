//! What is assumed about a job that has no usable run.
//!
//! Two things show how long such a job may compute, and how often it may wait for its data: the other jobs of its
//! tenant, most of all those with its image, and runs of this job during which its distance to the data changed. The prediction is the mean of their
//! logarithms, and the range should hold the next job in 9 of 10 cases. A guess counts like one more job. The more jobs
//! have run here, the less the guess counts and the narrower the range is.

use perigee_model::plan::{Basis, Part, Unknown};
use perigee_model::units::format_bytes;

use super::{Learned, REPEATED, VolumeLearned};
use crate::facts::{Cluster, JobFacts};
use crate::figures::Figures;
use crate::hosts::cpu_factor;
use crate::measured::disk_read_s;
use crate::refused::Refused;
use crate::runs::PastRun;
use crate::spread::{NINE_OF_TEN, Spread};

/// Linux's default read-ahead: the assumed request size of a job about which nothing is known.
const READ_AHEAD_BYTES: u64 = 128 << 10;
/// Such a job may read its data in pages of 8 KiB instead, or only an eighth of it.
const ONE_PASS_FACTOR: f64 = 8.0;
/// The assumed seconds of computing of such a job.
const COMPUTED_S: Guess = Guess { low: 0.1, expected: 5.0, high: 300.0 };
/// The assumed dependent round trips for each of its reads. The proxy reads ahead, so a scan waits for at most one of 8
/// reads. A job that reads random pages waits for each of them.
const ROUND_TRIPS: Guess = Guess { low: 1.0 / 512.0, expected: 1.0 / 8.0, high: 8.0 };
/// The share of the time for its bytes that it waits for: none if it reads other blocks, twice if it reads all of them
/// again.
const BYTES: (f64, f64, f64) = (0.0, 1.0, 2.0);

/// A run of another kind of job counts as this many guesses, one with the same image as [`SAME_IMAGE`], and a run of the same
/// kind as [`SAME_JOB`].
const OTHER_JOB: f64 = 0.3;
const SAME_IMAGE: f64 = 1.0;
const SAME_JOB: f64 = 8.0;

/// The runs from which an unknown job is predicted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen<'a> {
    pub history: &'a [PastRun],
    pub others: &'a [PastRun],
}

#[derive(Debug, Clone, Copy)]
struct Guess {
    low: f64,
    expected: f64,
    high: f64,
}

/// A job about which nothing is known is assumed to read its volumes' data once.
pub(super) fn one_pass(
    cluster: &Cluster,
    job: &JobFacts,
    seen: Seen,
    figures: &mut Figures,
) -> Result<Learned, Refused> {
    figures.assumed(
        "one pass over the data, 128 KiB at a time, and a wait for the network at one of 8 reads",
    );
    let none = seen.words();
    let mut unknown = vec![Unknown { part: Part::Cpu, why: none.clone() }];
    let (volumes, local_s) = volumes_of(cluster, job, figures, &mut unknown)?;
    let reads: f64 = volumes.iter().map(|volume| volume.reads).sum();
    if reads > 0.0 {
        let why = format!("how it reads its data is not known: {none}");
        unknown.push(Unknown { part: Part::Network, why });
    }
    let cpu = seen.like_them(job, COMPUTED_S, |run| {
        let factor = cpu_factor(cluster, &run.host).0.expected;
        Some(run.cpu_s / factor)
    });
    let round_trips = seen.like_them(job, ROUND_TRIPS, |run| {
        let reads = whole_reads(run.traits.data_bytes.iter().sum());
        Some(run.round_trips_seen()? / reads).filter(|_| reads > 0.0)
    });
    let local = Spread::between(local_s / ONE_PASS_FACTOR, local_s, local_s * ONE_PASS_FACTOR);
    let (least, expected, most) = BYTES;
    Ok(Learned {
        basis: Basis::OnePass,
        mean: cpu.together(local),
        mean_round_trip_s: 0.0,
        bytes: Spread::between(least, expected, most),
        round_trips: round_trips.times(reads),
        cpu,
        local_share: 1.0,
        volumes: volumes.into_iter().map(|volume| volume.learned(reads)).collect(),
        vcpus: job.traits.cpus,
        requests: reads,
        repeated: REPEATED,
        unknown,
    })
}

/// A volume that is read once.
struct Volume {
    /// Requests of [`READ_AHEAD_BYTES`].
    reads: f64,
    only_read: bool,
    bytes: f64,
}

impl Volume {
    /// `reads` are the requests to all of the job's volumes.
    fn learned(self, reads: f64) -> VolumeLearned {
        VolumeLearned {
            share: if reads > 0.0 { self.reads / reads } else { 0.0 },
            // What it writes is not known.
            read_share: if self.only_read { 1.0 } else { 0.0 },
            read_time_share: 1.0,
            bytes: self.bytes,
            waited_bytes: self.bytes,
            sent_bytes: self.bytes,
        }
    }
}

/// The job's volumes, and the seconds that the disks of their homes take to read all of them, as far as the disks are measured.
fn volumes_of(
    cluster: &Cluster,
    job: &JobFacts,
    figures: &mut Figures,
    unknown: &mut Vec<Unknown>,
) -> Result<(Vec<Volume>, f64), Refused> {
    let (mut volumes, mut local_s) = (Vec::new(), 0.0);
    for volume in &job.volumes {
        figures.measured(format!(
            "volume {} at {} holds {}",
            volume.volume,
            volume.home,
            format_bytes(volume.allocated_bytes)
        ));
        let home = cluster.host(&volume.home)?;
        let reads = whole_reads(volume.allocated_bytes);
        match home.local_blocks {
            Some(blocks) => local_s += reads * blocks.latency_median_us as f64 / 1e6,
            None => match disk_read_s(home, volume.allocated_bytes, figures) {
                Some(read_s) => local_s += read_s,
                None => {
                    let why = format!("no block read at {} was measured", home.id);
                    unknown.push(Unknown { part: Part::LocalIo, why });
                }
            },
        }
        let (only_read, bytes) = (volume.only_read, volume.allocated_bytes as f64);
        volumes.push(Volume { reads, only_read, bytes });
    }
    Ok((volumes, local_s))
}

fn whole_reads(bytes: u64) -> f64 {
    bytes.div_ceil(READ_AHEAD_BYTES) as f64
}

impl Seen<'_> {
    fn words(&self) -> String {
        let why = match self.history.len() {
            0 => "no such job has run",
            _ => "the distance to its data changed while such jobs ran",
        };
        match self.history.len() + self.others.len() {
            0 => why.to_owned(),
            1 => format!("{why}; its range is that of 1 run and a guess"),
            runs => format!("{why}; its range is that of {runs} runs and a guess"),
        }
    }

    /// Predicts a figure from the runs that show it and from the guess.
    fn like_them(
        &self,
        job: &JobFacts,
        guess: Guess,
        figure: impl Fn(&PastRun) -> Option<f64>,
    ) -> Spread {
        let same =
            self.history.iter().map(|run| (SAME_JOB * job.traits.relation(&run.traits), run));
        let weight = |run: &PastRun| match run.traits.image == job.traits.image {
            true => SAME_IMAGE,
            false => OTHER_JOB,
        };
        let others = self.others.iter().map(|run| (weight(run), run));
        let shown: Vec<(f64, f64)> = same
            .chain(others)
            .filter_map(|(weight, run)| {
                // A value that is too small to measure counts as the guess's low end.
                Some((weight, figure(run)?.max(guess.low).ln()))
            })
            .collect();
        if shown.is_empty() {
            return Spread::between(guess.low, guess.expected, guess.high);
        }
        let guessed = guess.expected.ln();
        let weights: f64 = 1.0 + shown.iter().map(|(weight, _)| weight).sum::<f64>();
        let sum: f64 = shown.iter().map(|(weight, value)| weight * value).sum();
        let mean = (guessed + sum) / weights;
        let widest = (guess.high / guess.expected).max(guess.expected / guess.low).ln();
        let squares: f64 =
            shown.iter().map(|(weight, value)| weight * (value - mean).powi(2)).sum();
        let variance = ((widest / NINE_OF_TEN).powi(2) + squares) / weights;
        // The mean itself is uncertain too.
        let distance = NINE_OF_TEN * (variance * (1.0 + 1.0 / weights)).sqrt();
        Spread::between((mean - distance).exp(), mean.exp(), (mean + distance).exp())
    }
}
