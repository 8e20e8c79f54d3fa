//! A job's time series. Its size is limited: when it is full, every second point of its older three quarters
//! is dropped. So the last minutes have many points, and earlier times have fewer.
//!
//! All of a series is written each time, so a long one is stored less often. After a crash its last minute may be missing. Whoever
//! reads the series of a running job gets what its driver has in memory.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use perigee_model::job::Sample;
use perigee_model::{JobId, Problem};

use crate::cluster::{Cluster, Points};

const SAMPLES_MAX: usize = 1000;
const DENSE: usize = SAMPLES_MAX / 4;
/// A short series is stored so often.
const STORE_EVERY: Duration = Duration::from_secs(5);
/// With each so many points more, the pause between two writes is longer by [`STORE_EVERY`].
const POINTS_A_PAUSE: usize = 100;

/// A job's figures over time, at most [`SAMPLES_MAX`].
pub struct Samples {
    points: Points,
    stored: Option<Instant>,
}

impl Samples {
    /// As an earlier driver of the job has left them.
    pub async fn load(cluster: &Cluster, job: &JobId) -> Result<Self, Problem> {
        let before = read(cluster, job).await?;
        Ok(Self { points: cluster.series.begin(job, before), stored: None })
    }

    /// Adds the newest. If there are too many, every second one of the older half goes.
    pub fn push(&mut self, sample: Sample) {
        let mut points = self.points.lock().unwrap_or_else(PoisonError::into_inner);
        points.push(sample);
        if points.len() >= SAMPLES_MAX {
            let older = points.len() - DENSE;
            let mut index = 0;
            points.retain(|_| {
                index += 1;
                index > older || index % 2 == 1
            });
        }
    }

    fn now(&self) -> Vec<Sample> {
        self.points.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How long ago the series may have been stored.
    fn pause(&self) -> Duration {
        let count = self.points.lock().unwrap_or_else(PoisonError::into_inner).len();
        let pauses = u32::try_from(1 + count / POINTS_A_PAUSE).unwrap_or(u32::MAX);
        STORE_EVERY.saturating_mul(pauses)
    }

    /// Writes the series from time to time.
    pub async fn store_sometimes(&mut self, cluster: &Cluster, job: &JobId) -> Result<(), Problem> {
        if self.stored.is_none_or(|at| at.elapsed() >= self.pause()) {
            self.store(cluster, job).await?;
        }
        Ok(())
    }

    /// Writes them to the store.
    pub async fn store(&mut self, cluster: &Cluster, job: &JobId) -> Result<(), Problem> {
        cluster.records.put(&key(job), &self.now()).await?;
        self.stored = Some(Instant::now());
        Ok(())
    }
}

/// A job's figures, the oldest first; none if there are none.
pub async fn read(cluster: &Cluster, job: &JobId) -> Result<Vec<Sample>, Problem> {
    match cluster.series.now(job) {
        Some(points) => Ok(points),
        None => Ok(cluster.records.read(&key(job)).await?.unwrap_or_default()),
    }
}

/// The key of a job's figures.
pub fn key(job: &JobId) -> String {
    format!("samples/{job}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(count: u64) -> Samples {
        let mut samples = Samples { points: Points::default(), stored: None };
        for at_ms in 0..count {
            samples.push(Sample {
                at_ms,
                host: perigee_model::HostId::new("h").expect("name"),
                progress: None,
                io: Default::default(),
                vcpu_ms: 0,
            });
        }
        samples
    }

    #[test]
    fn a_long_series_stays_bounded_and_thins_out_with_age() {
        let points = samples(10_000).now();
        assert!(points.len() < SAMPLES_MAX);
        assert_eq!(points[0].at_ms, 0);
        assert!(points.is_sorted_by_key(|point| point.at_ms));
        let times: Vec<u64> = points.iter().map(|point| point.at_ms).collect();
        let steps: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(steps[steps.len() - DENSE + 1..].iter().all(|step| *step == 1), "{steps:?}");
        assert!(steps.is_sorted_by(|older, newer| older >= newer), "{steps:?}");
        assert_eq!(times.last(), Some(&9_999));
    }

    /// 500 VMs that have run for some minutes took a whole CPU for their series alone.
    #[test]
    fn a_long_series_is_stored_less_often_than_a_short_one() {
        let pause_s = |count| samples(count).pause().as_secs();
        assert_eq!((pause_s(0), pause_s(99), pause_s(999)), (5, 5, 50));
    }
}
