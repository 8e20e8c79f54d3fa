//! Asks the planner when a running job ends, and whether its VM moves or its data come to it, and requests that.

use std::time::{Duration, Instant};

use perigee_model::job::JobState;
use perigee_model::plan::{Trigger, Way};
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{HostId, Problem};
use perigee_planner::{RefusedWay, Verdict};

use super::driver::Run;
use crate::cluster::Alone;
use crate::migration::by_itself;
use crate::records::vm_of;
use crate::{migration, planning};

/// How long a change is not made again after it was refused. After an aborted migration: [`by_itself::failed_lately`].
const AFTER_REFUSAL: Duration = Duration::from_secs(30);

/// A change that the planner wanted and that was refused.
#[derive(Debug)]
pub struct RefusedChange {
    way: Way,
    to: HostId,
    at: Instant,
    why: String,
}

/// What became of a change that the planner wants.
pub(super) enum Change {
    Begun,
    /// It may be made a little later.
    NotNow,
    Refused(Problem),
}

impl Run {
    /// Predicts the job's end anew, and makes a change that pays. If a change is refused, the next best one is made
    /// where that pays by itself.
    pub(super) async fn decide_move(&mut self, moving: bool) -> Result<(), Problem> {
        if self.job().state != JobState::Running {
            return Ok(());
        }
        let index = &self.cluster.index;
        let may_migrate = self.job().spec.may_migrate;
        let changes = moving || !self.record.value.to_follow.is_empty() || self.homes_move()?;
        let is_new = !index.is_end_older(&self.id, self.cluster.timing.monitor);
        if !may_migrate && !changes && is_new {
            return Ok(());
        }
        let age = self.reported.elapsed();
        let mut facts = planning::running(&self.cluster, &self.record.value, age).await?;
        if let Some(running) = &facts {
            index.put_end(&self.id, self.reported, perigee_planner::predicted_end(running));
        }
        if changes || !may_migrate {
            return Ok(());
        }
        while let Some(mut running) = facts {
            running.refused = self.refused_changes();
            let Verdict::Move { way, to, reason, plan } = perigee_planner::consider(&running)
            else {
                return Ok(());
            };
            let (change, what) = match way {
                Way::Copy => (self.bring_data(&to).await?, "copy the data"),
                _ => (self.move_vm(&to, &reason).await?, "move"),
            };
            match change {
                Change::Begun => {
                    let summary = format!("{what} to {to}: {reason}");
                    let (cluster, job) = (&self.cluster, &self.id);
                    return planning::record(cluster, job, Trigger::TimeLost, plan, summary).await;
                }
                Change::NotNow => return Ok(()),
                Change::Refused(problem) => {
                    self.refuse(way, to, format!("{}: {}", problem.what, problem.why));
                }
            }
            facts = planning::running(&self.cluster, &self.record.value, age).await?;
        }
        Ok(())
    }

    async fn move_vm(&mut self, to: &HostId, reason: &str) -> Result<Change, Problem> {
        self.record.save().await?;
        let (cluster, from) = (&self.cluster, self.record.value.job.host.clone());
        let Some(from) = from else { return Ok(Change::NotNow) };
        if let Some(why) = by_itself::waits_for(cluster, &from, to, Alone::AtBoth) {
            // By the time of its turn the move may not pay any more.
            tracing::info!("job {} stays where it is: {why}", self.id);
            return Ok(Change::NotNow);
        }
        let request = migration::Request {
            volumes: VolumesOnMove::Stay,
            to: to.clone(),
            reason: reason.to_owned(),
            job_progress: self.job().progress_part(),
        };
        let record = &self.record.value;
        let asked = by_itself::begin(cluster, record, &from, request, Alone::AtBoth).await;
        Ok(asked.map_or_else(Change::Refused, |_| Change::Begun))
    }

    /// Records a refusal: the same change to the same host is not tried for a while.
    pub(super) fn refuse(&mut self, way: Way, to: HostId, why: String) {
        if !self.refused.iter().any(|refused| refused.why == why) {
            tracing::info!("job {}: {why}", self.id);
        }
        self.refused.retain(|refused| (refused.way, &refused.to) != (way, &to));
        self.refused.push(RefusedChange { way, to, at: Instant::now(), why });
    }

    fn refused_changes(&self) -> Vec<RefusedWay> {
        let recent = self.refused.iter().filter(|refused| refused.at.elapsed() < AFTER_REFUSAL);
        let mut all: Vec<RefusedWay> = recent
            .map(|RefusedChange { way, to, why, .. }| RefusedWay {
                way: *way,
                to: to.clone(),
                why: why.clone(),
            })
            .collect();
        all.extend(by_itself::refused(&self.cluster, &self.record.value, &vm_of(&self.id)));
        all
    }

    /// What was refused a short time ago, for people; empty if nothing was.
    pub(super) fn refusals(&self) -> String {
        let recent = self.refused.iter().filter(|refused| refused.at.elapsed() < AFTER_REFUSAL);
        let words = recent.map(|refused| match refused.way {
            Way::Copy => format!("its volumes do not come to it for now: {}", refused.why),
            _ => format!("its VM does not move to {} for now: {}", refused.to, refused.why),
        });
        words.collect::<Vec<String>>().join("; ")
    }
}
