//! A job's time series. Its size is limited: when it is full, every second point of its older three quarters
//! is dropped. So the last minutes have many points, and earlier times have fewer. After a crash the last
//! seconds may be missing.
//!
//! The series is in a file ([`crate::job_files`]), to which new points are appended; the file is written anew when points were dropped. Before
//! [`level::JOB_FILES`] the series is a record, and the one of an older job stays so until a point is added.

use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::job::Sample;
use perigee_model::{JobId, Problem};

use super::log::files_of;
use crate::cluster::Cluster;
use crate::job_files::JobDirectory;
use crate::level;
use crate::records::JobRecord;

const SAMPLES_MAX: usize = 1000;
const DENSE: usize = SAMPLES_MAX / 4;
const STORE_EVERY: Duration = Duration::from_secs(5);

/// A job's figures over time, at most [`SAMPLES_MAX`].
pub struct Samples {
    points: Vec<Sample>,
    /// The points that the file has, and its length; `None` if it has to be written anew.
    in_file: Option<(usize, u64)>,
    /// The record with them is to be removed when the file has them.
    has_record: bool,
    stored: Option<Instant>,
}

impl Samples {
    /// As stored; a driver that continues goes on from there.
    pub async fn load(cluster: &Cluster, files: &Arc<JobDirectory>) -> Result<Self, Problem> {
        let Some(found) = files.samples().await? else {
            let points: Option<Vec<Sample>> = cluster.records.read(&key(&files.job)).await?;
            let has_record = points.is_some();
            let points = points.unwrap_or_default();
            return Ok(Self { points, in_file: None, has_record, stored: None });
        };
        let in_file = found.length.map(|length| (found.samples.len(), length));
        Ok(Self { points: found.samples, in_file, has_record: false, stored: None })
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
            self.in_file = None;
        }
    }

    /// Writes the series from time to time.
    pub async fn store_sometimes(
        &mut self,
        cluster: &Cluster,
        files: &Arc<JobDirectory>,
    ) -> Result<(), Problem> {
        if self.stored.is_none_or(|at| at.elapsed() >= STORE_EVERY) {
            self.write(cluster, files, false).await?;
        }
        Ok(())
    }

    /// Writes the series, which is on the disk then.
    pub async fn store(
        &mut self,
        cluster: &Cluster,
        files: &Arc<JobDirectory>,
    ) -> Result<(), Problem> {
        self.write(cluster, files, true).await
    }

    async fn write(
        &mut self,
        cluster: &Cluster,
        files: &Arc<JobDirectory>,
        is_synced: bool,
    ) -> Result<(), Problem> {
        if self.points.is_empty() {
            return Ok(());
        }
        // If this fails, or nobody waits for it any more, the file is written anew.
        let length = match self.in_file.take() {
            Some((count, length)) => {
                files.add_samples(length, self.points[count..].to_vec(), is_synced).await?
            }
            None if level::in_force(&cluster.records).await? < level::JOB_FILES => {
                cluster.records.put(&key(&files.job), &self.points).await?;
                self.has_record = true;
                self.stored = Some(Instant::now());
                return Ok(());
            }
            None => files.set_samples(self.points.clone()).await?,
        };
        if std::mem::take(&mut self.has_record) {
            cluster.records.remove(&key(&files.job)).await?;
        }
        self.in_file = Some((self.points.len(), length));
        self.stored = Some(Instant::now());
        Ok(())
    }
}

/// A job's stored figures, the oldest first; none if there are none.
pub async fn read(cluster: &Cluster, record: &JobRecord) -> Result<Vec<Sample>, Problem> {
    let files = files_of(cluster, record);
    if let Some(found) = files.samples().await? {
        return Ok(found.samples);
    }
    if let Some(points) = cluster.records.read(&key(&files.job)).await? {
        return Ok(points);
    }
    // They may have come into a file meanwhile.
    Ok(files.samples().await?.map_or_else(Vec::new, |found| found.samples))
}

/// The key of a job's figures.
pub fn key(job: &JobId) -> String {
    format!("samples/{job}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at_ms: u64) -> Sample {
        let host = perigee_model::HostId::new("h").expect("name");
        Sample { at_ms, host, progress: None, io: Default::default(), vcpu_ms: 0 }
    }

    fn none() -> Samples {
        Samples { points: Vec::new(), in_file: None, has_record: false, stored: None }
    }

    fn times(points: &[Sample]) -> Vec<u64> {
        points.iter().map(|point| point.at_ms).collect()
    }

    #[test]
    fn a_long_series_stays_bounded_and_thins_out_with_age() {
        let mut samples = none();
        (0..10_000).for_each(|at_ms| samples.push(sample(at_ms)));
        assert!(samples.points.len() < SAMPLES_MAX);
        assert_eq!(samples.points[0].at_ms, 0);
        assert!(samples.points.is_sorted_by_key(|point| point.at_ms));
        let times = times(&samples.points);
        let steps: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(steps[steps.len() - DENSE + 1..].iter().all(|step| *step == 1), "{steps:?}");
        assert!(steps.is_sorted_by(|older, newer| older >= newer), "{steps:?}");
        assert_eq!(times.last(), Some(&9_999));
    }

    #[tokio::test]
    async fn the_file_has_the_series_at_any_time_and_an_older_record_goes() {
        let (dir, cluster) = crate::jobs::log::tests::controller(level::JOB_FILES - 1).await;
        let files = cluster.job_files.of(&JobId::new("q-0001").expect("name"), 1);
        let mut samples = none();
        (0..3).for_each(|at_ms| samples.push(sample(at_ms)));
        samples.store(&cluster, &files).await.expect("stored");
        assert!(files.samples().await.expect("read").is_none(), "the version before reads records");
        level::raise(&cluster.records, level::JOB_FILES).await.expect("a level");
        let mut samples = Samples::load(&cluster, &files).await.expect("loaded");
        for at_ms in 3..1_700 {
            samples.push(sample(at_ms));
            if at_ms % 50 == 3 {
                samples.write(&cluster, &files, false).await.expect("written");
                let found = files.samples().await.expect("read").expect("a file");
                assert_eq!(times(&found.samples), times(&samples.points), "at {at_ms}");
            }
        }
        let record: Option<Vec<Sample>> =
            cluster.records.read(&key(&files.job)).await.expect("read");
        assert!(record.is_none());
        // A torn end is written anew.
        let path = dir.path().join("jobs/q-0001.1/samples");
        let whole = std::fs::read(&path).expect("the file");
        std::fs::write(&path, &whole[..whole.len() - 5]).expect("torn");
        let mut samples = Samples::load(&cluster, &files).await.expect("loaded");
        samples.push(sample(2_000));
        samples.store(&cluster, &files).await.expect("stored");
        let found = files.samples().await.expect("read").expect("a file");
        assert_eq!(times(&found.samples), times(&samples.points));
        assert_eq!(found.samples.last().map(|last| last.at_ms), Some(2_000));
    }
}
