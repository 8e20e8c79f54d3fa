//! The figures over time of the jobs that run now. Their drivers add to them, and store them from time to time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use perigee_model::JobId;
use perigee_model::job::Sample;

/// One job's figures, the oldest first.
pub type Points = Arc<Mutex<Vec<Sample>>>;

/// Those of all jobs that have a driver.
#[derive(Debug, Default)]
pub struct Series(Mutex<BTreeMap<JobId, Weak<Mutex<Vec<Sample>>>>>);

impl Series {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<JobId, Weak<Mutex<Vec<Sample>>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those of a job whose driver begins: as another driver of the job has them, or else as they are stored.
    pub fn begin(&self, job: &JobId, stored: Vec<Sample>) -> Points {
        let mut all = self.lock();
        if let Some(points) = all.get(job).and_then(Weak::upgrade) {
            return points;
        }
        all.retain(|_, points| points.strong_count() > 0);
        let points: Points = Arc::new(Mutex::new(stored));
        all.insert(job.clone(), Arc::downgrade(&points));
        points
    }

    /// Those of a job as they are now; `None` if it has no driver.
    pub fn now(&self, job: &JobId) -> Option<Vec<Sample>> {
        let points = self.lock().get(job).and_then(Weak::upgrade)?;
        let points = points.lock().unwrap_or_else(PoisonError::into_inner);
        Some(points.clone())
    }
}
