//! What is assumed of a job of which no run is known.

use perigee_model::plan::{Basis, Part, Unknown};
use perigee_model::units::format_bytes;

use super::{Learned, REPEATED, VolumeLearned};
use crate::facts::{Cluster, JobFacts};
use crate::figures::Figures;
use crate::refused::Refused;
use crate::spread::Spread;

/// Linux's default read-ahead: the assumed request size of a job about which nothing is known.
const READ_AHEAD_BYTES: u64 = 128 << 10;
/// Such a job may read its data in pages of 8 KiB instead, or only an eighth of it.
const ONE_PASS_FACTOR: f64 = 8.0;
/// The assumed seconds of computing of such a job: low, expected, high.
const UNKNOWN_CPU_S: (f64, f64, f64) = (0.1, 5.0, 300.0);

/// A job about which nothing is known is assumed to read its volumes' data once.
pub(super) fn one_pass(
    cluster: &Cluster,
    job: &JobFacts,
    figures: &mut Figures,
) -> Result<Learned, Refused> {
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
