//! A gang as its driver holds it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::gang::Seen;
use perigee_model::gang::moving::Failed;
use perigee_model::job::{Job, JobState};
use perigee_model::{JobId, Problem};

use crate::cluster::Cluster;
use crate::jobs::driver::{Drives, Said, Step, fatal};
use crate::records::{Ending, Gang, JobRecord, Owned};

/// A gang with its record, held by its driver. Its members have drivers of their own.
pub(in crate::jobs) struct GangRun {
    pub cluster: Arc<Cluster>,
    pub id: JobId,
    pub record: Owned<JobRecord>,
    /// The members, by their ranks, that may not move back now.
    pub move_refused: BTreeMap<usize, Failed>,
    /// The migrations of members that were called off: their ranks and numbers.
    pub called_off: BTreeMap<usize, u32>,
    /// Since when a host has not answered that such a migration needs.
    pub move_silent: Option<Instant>,
    /// When the planner was asked last whether all members move, and when what it wants was refused last.
    pub considered: Option<Instant>,
    pub refused: Option<Instant>,
    /// When this controller first saw that a member has failed.
    pub failure_seen: Option<Instant>,
    /// What the log says of its troubles.
    trouble_said: Said,
    /// [`crate::cluster::Index::home_changes`] before the step.
    homes_at: u64,
}

impl GangRun {
    /// The job, as people see it.
    pub fn job(&self) -> &Job {
        &self.record.value.job
    }

    /// What only a gang's record has.
    ///
    /// # Errors
    /// `Internal` if the record is of another kind.
    pub fn gang(&mut self) -> Result<&mut Gang, Problem> {
        let what = format!("job {}", self.id);
        let gang = self.record.value.kind.gang_mut();
        gang.ok_or_else(|| Problem::internal(what, "it is no gang"))
    }
}

impl Drives for GangRun {
    async fn load(cluster: &Arc<Cluster>, id: &JobId) -> Result<Option<Self>, Problem> {
        let Some(record) = cluster.own_job(id).await? else {
            return Ok(None);
        };
        Ok(Some(Self {
            cluster: Arc::clone(cluster),
            id: id.clone(),
            record,
            move_refused: BTreeMap::new(),
            called_off: BTreeMap::new(),
            move_silent: None,
            considered: None,
            refused: None,
            failure_seen: None,
            trouble_said: Said::default(),
            homes_at: 0,
        }))
    }

    fn go_on_as(self, again: Self) -> Self {
        again
    }

    fn state(&self) -> JobState {
        self.job().state
    }

    async fn step(&mut self) -> Result<Step, Problem> {
        self.homes_at = self.cluster.index.home_changes();
        self.gang_step().await
    }

    /// Each step reads what is asked of it.
    async fn apply_intent(&mut self) -> Result<(), Problem> {
        Ok(())
    }

    /// It is in no gang itself.
    fn seen_by_gang(&self) -> Option<Seen> {
        None
    }

    fn wake_gang(&self) {}

    async fn troubled(&mut self, problem: Problem) -> Result<Duration, Problem> {
        let homes_may_be_old = self.homes_at != self.cluster.index.home_changes();
        let (cluster, said) = (&self.cluster, &mut self.trouble_said);
        let Some(text) = fatal(cluster, &mut self.record, said, homes_may_be_old, problem).await?
        else {
            return Ok(self.cluster.timing.monitor);
        };
        tracing::warn!("job {} fails: {text}", self.id);
        self.record.end(Ending::Failed, text).await?;
        Ok(Duration::ZERO)
    }
}
