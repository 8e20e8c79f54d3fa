//! A job's time series. Its size is limited: when it is full, every second point of its older three quarters
//! is dropped. So the last minutes have many points, and earlier times have fewer. After a crash the last
//! seconds may be missing.

use std::time::{Duration, Instant};

use perigee_model::job::Sample;
use perigee_model::{JobId, Problem};

use crate::cluster::Cluster;

const SAMPLES_MAX: usize = 1000;
const DENSE: usize = SAMPLES_MAX / 4;
const STORE_EVERY: Duration = Duration::from_secs(5);

/// A job's figures over time, at most [`SAMPLES_MAX`].
pub struct Samples {
    points: Vec<Sample>,
    stored: Option<Instant>,
}

impl Samples {
    /// As stored; a driver that continues goes on from there.
    pub async fn load(cluster: &Cluster, job: &JobId) -> Result<Self, Problem> {
        Ok(Self { points: read(cluster, job).await?, stored: None })
    }

    /// Adds the newest. If there are too many, every second one of the older half goes.
    pub fn push(&mut self, sample: Sample) {
        self.points.push(sample);
        if self.points.len() >= SAMPLES_MAX {
            let older = self.points.len() - DENSE;
            let mut index = 0;
            self.points.retain(|_| {
                index += 1;
                index > older || index % 2 == 1
            });
        }
    }

    /// Writes the series from time to time.
    pub async fn store_sometimes(&mut self, cluster: &Cluster, job: &JobId) -> Result<(), Problem> {
        if self.stored.is_none_or(|at| at.elapsed() >= STORE_EVERY) {
            self.store(cluster, job).await?;
        }
        Ok(())
    }

    /// Writes them to the store.
    pub async fn store(&mut self, cluster: &Cluster, job: &JobId) -> Result<(), Problem> {
        cluster.records.put(&key(job), &self.points).await?;
        self.stored = Some(Instant::now());
        Ok(())
    }
}

/// A job's stored figures, the oldest first; none if there are none.
pub async fn read(cluster: &Cluster, job: &JobId) -> Result<Vec<Sample>, Problem> {
    Ok(cluster.records.read(&key(job)).await?.unwrap_or_default())
}

/// The key of a job's figures.
pub fn key(job: &JobId) -> String {
    format!("samples/{job}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_series_stays_bounded_and_thins_out_with_age() {
        let mut samples = Samples { points: Vec::new(), stored: None };
        for at_ms in 0..10_000 {
            samples.push(Sample {
                at_ms,
                host: perigee_model::HostId::new("h").expect("name"),
                progress: None,
                io: Default::default(),
                vcpu_ms: 0,
            });
        }
        assert!(samples.points.len() < SAMPLES_MAX);
        assert_eq!(samples.points[0].at_ms, 0);
        assert!(samples.points.is_sorted_by_key(|point| point.at_ms));
        let times: Vec<u64> = samples.points.iter().map(|point| point.at_ms).collect();
        let steps: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(steps[steps.len() - DENSE + 1..].iter().all(|step| *step == 1), "{steps:?}");
        assert!(steps.is_sorted_by(|older, newer| older >= newer), "{steps:?}");
        assert_eq!(times.last(), Some(&9_999));
    }
}
