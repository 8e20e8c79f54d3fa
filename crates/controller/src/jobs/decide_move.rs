//! Asks the planner when a running job ends, and whether its VM moves or its data come to it, and requests that.

use std::time::{Duration, Instant};

use perigee_model::job::{JobState, Migration};
use perigee_model::plan::{Trigger, Way};
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{HostId, Problem};
use perigee_planner::{RefusedWay, Verdict};

use super::driver::Run;
use crate::planning::shared_links;
use crate::records::vm_of;
use crate::{migration, networks, planning, tpm};

/// How long a change is not made again after it was refused. After an aborted migration: [`migration::refused_after`].
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
        if self
            .job()
            .host
            .as_ref()
            .is_some_and(|from| shared_links::is_busy(&self.cluster, from, to))
        {
            // By the time of its turn the move may not pay any more.
            tracing::info!(
                "job {} stays where it is: another VM moves over the link to {to}",
                self.id
            );
            return Ok(Change::NotNow);
        }
        let request = migration::Request {
            volumes: VolumesOnMove::Stay,
            to: to.clone(),
            reason: reason.to_owned(),
            job_progress: self.job().progress_part(),
        };
        let asked = migration::request(&self.cluster, &self.record.value, request).await;
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
        let moves = self.cluster.index.migrations_of(&vm_of(&self.id));
        let moves: Vec<&Migration> = moves.iter().map(|record| &record.migration).collect();
        let hosts: Vec<HostId> =
            self.cluster.hosts.up().into_iter().map(|host| host.id.clone()).collect();
        all.extend(migration::refused_after(&moves, &hosts, |at_ms| {
            self.cluster.clock.age_ms(at_ms)
        }));
        for host in self.cluster.hosts.drained() {
            let why = self.cluster.hosts.why_drained(&host).unwrap_or_default();
            let ways = [Way::Migrate, Way::Copy];
            all.extend(ways.map(|way| RefusedWay { way, to: host.clone(), why: why.clone() }));
        }
        let unable = networks::refusing(&self.cluster, &networks::kind_of(&self.record.value));
        let unable = unable.into_iter().chain(tpm::refusing(&self.cluster, &self.record.value));
        all.extend(unable.map(|(to, why)| RefusedWay { way: Way::Migrate, to, why }));
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
