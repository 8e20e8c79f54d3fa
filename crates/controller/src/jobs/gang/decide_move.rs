//! Asks the planner whether all VMs of a gang move to another site, or their data come to them, and begins that.

use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::job::JobState;
use perigee_model::plan::Way;
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{HostId, Problem};
use perigee_planner::balance::TAKEN;
use perigee_planner::gangs::{GangVerdict, RunningGang, consider};
use perigee_planner::{RefusedWay, Running};

use super::moving::{has_ended, may_move, rooms, sent};
use super::{GangRun, Members};
use crate::cluster::Cluster;
use crate::jobs::driver::Step;
use crate::migration::{self, by_itself};
use crate::planning::links;
use crate::records::{Gang, JobRecord, vm_of};
use crate::storage::volumes;
use crate::{networks, planning, tpm};

/// A gang is considered once in so many intervals of [`crate::cluster::Timing::monitor`]: its facts are those of all its VMs.
const CONSIDERED_EVERY: u32 = 3;

/// After a move that was refused or undone; doubled for each further one that was undone in a row.
const PAUSE_FIRST: Duration = Duration::from_secs(30);
const PAUSE_MAX: Duration = Duration::from_secs(60 * 60);

/// How long a change is not made again of which so many in a row were undone.
pub(super) fn pause_after(undone: u32) -> Duration {
    let doublings = undone.saturating_sub(1).min(16);
    PAUSE_FIRST.saturating_mul(1 << doublings).min(PAUSE_MAX)
}

impl GangRun {
    /// `Some` if a change was begun.
    pub(super) async fn decide_move(&mut self, members: &Members) -> Result<Option<Step>, Problem> {
        // First, whatever may be considered: it ends a copy that is over.
        if self.data_move(members).await? || !self.may_be_considered()? {
            return Ok(None);
        }
        self.considered = Some(Instant::now());
        let Some(running) = self.running_gang(members).await? else { return Ok(None) };
        let (to, reason, plan) = match consider(&running) {
            GangVerdict::Stay { reason } => {
                tracing::debug!("job {}: its VMs stay: {reason}", self.id);
                return Ok(None);
            }
            GangVerdict::Copy { reason, plan } => {
                let hosts = running.members.into_iter().map(|member| member.host).collect();
                return self.begin_copy(hosts, reason, plan).await.map(Some);
            }
            GangVerdict::Move { to, reason, plan } => (to, reason, plan),
        };
        let cluster = self.cluster.clone();
        let all: Vec<&JobRecord> = members.iter().flatten().map(|member| &**member).collect();
        match may_move(&cluster, &self.record.value, &all, &to).await {
            Ok((legs, _room)) => {
                self.begin_move(legs, (None, VolumesOnMove::Stay), reason, plan).await?;
                Ok(Some(Step::Again))
            }
            Err(problem) => {
                tracing::info!("job {}: its VMs stay: {}: {}", self.id, problem.what, problem.why);
                self.refused = Some(Instant::now());
                Ok(None)
            }
        }
    }

    fn may_be_considered(&mut self) -> Result<bool, Problem> {
        let every = self.cluster.timing.monitor * CONSIDERED_EVERY;
        let job = self.job();
        let is_due = self.considered.is_none_or(|at| at.elapsed() >= every)
            && self.refused.is_none_or(|at| at.elapsed() >= PAUSE_FIRST);
        if !is_due || job.state != JobState::Running || !job.spec.may_migrate {
            return Ok(false);
        }
        let cluster = Arc::clone(&self.cluster);
        let gang = self.gang()?;
        let Some(of) = gang.last_move.as_ref().filter(|of| of.is_undone()) else { return Ok(true) };
        let pause = pause_after(gang.undone);
        let age_ms = |ended_ms| cluster.clock.age_ms(ended_ms);
        let since_ms = of.ended_ms.map_or(u64::MAX, age_ms);
        Ok(Duration::from_millis(since_ms) >= pause)
    }

    /// The facts of all members; `None` if one does not run.
    async fn running_gang(&mut self, members: &Members) -> Result<Option<RunningGang>, Problem> {
        let mut running: Vec<Running> = Vec::new();
        for member in members {
            let Some(member) = member.as_ref().filter(|member| !has_ended(member)) else {
                return Ok(None);
            };
            let facts = planning::running(&self.cluster, member, Duration::ZERO).await?;
            let Some(mut facts) = facts else { return Ok(None) };
            facts.refused = self.refused_to(member);
            let refused = self.refused_copy(&facts.host);
            let refused = refused.or_else(|| refused_now(&self.cluster, &facts));
            facts.refused.extend(refused);
            running.push(facts);
        }
        let all: Vec<&JobRecord> = members.iter().flatten().map(|member| &**member).collect();
        let hosts: Vec<HostId> = running.iter().map(|member| member.host.clone()).collect();
        for (from, to) in links::missing(&self.cluster, &hosts) {
            // They are known the next time.
            links::want_missing(&self.cluster, &from, &to);
        }
        let rooms = rooms(&self.cluster, &self.record.value);
        let left = self.cluster.index.predicted_end(&self.id).left;
        let cluster = Arc::clone(&self.cluster);
        let gang = self.gang()?;
        // A request that was refused has moved nothing, and what was sent before it counts on.
        let last = gang.last_move.as_ref().filter(|of| !of.legs.is_empty());
        let since_move_s = last
            .and_then(|of| of.ended_ms)
            .map_or(f64::INFINITY, |ended_ms| planning::seconds(cluster.clock.age_ms(ended_ms)));
        let wall_s = running.iter().map(|one| one.wall_s).fold(since_move_s, f64::min);
        let sent = since(sent(&all), gang);
        Ok(Some(RunningGang { members: running, sent, wall_s, left, rooms }))
    }

    /// The hosts to which this member does not go now.
    fn refused_to(&self, member: &JobRecord) -> Vec<RefusedWay> {
        let hosts: Vec<HostId> =
            self.cluster.hosts.up().into_iter().map(|host| host.id.clone()).collect();
        let vm = vm_of(&member.job.id);
        let mut all = by_itself::failed_lately(&self.cluster, &vm, &hosts);
        let taken_from = by_itself::taken_from(&self.cluster, &vm).into_iter();
        all.extend(taken_from.map(|to| RefusedWay {
            way: Way::Migrate,
            to,
            why: TAKEN.to_owned(),
        }));
        let unable = networks::refusing(&self.cluster, &networks::kind_of(member));
        let unable = unable.into_iter().chain(tpm::refusing(&self.cluster, member));
        let unable = unable.chain(migration::ruled_out(&self.cluster, member));
        all.extend(unable.map(|(to, why)| RefusedWay { way: Way::Migrate, to, why }));
        all
    }
}

/// Why no data come to a VM now: its host is drained, or a host does not answer.
fn refused_now(cluster: &Cluster, vm: &Running) -> Option<RefusedWay> {
    let far = vm.disks.iter().filter(|disk| disk.home != vm.host && disk.copy.stays.is_none());
    let may_come = |home: &HostId| {
        let what = format!("can't move volumes to {}", vm.host);
        cluster.hosts.check_not_drained(&vm.host, what)?;
        volumes::reachable(cluster, home)?;
        volumes::reachable(cluster, &vm.host).map(drop)
    };
    let problem = far.map(|disk| may_come(&disk.home)).find_map(Result::err)?;
    let why = format!("{}: {}", problem.what, problem.why);
    Some(RefusedWay { way: Way::Copy, to: vm.host.clone(), why })
}

/// What was sent since the gang's last change.
fn since(mut sent: Vec<Vec<u64>>, gang: &Gang) -> Vec<Vec<u64>> {
    for (row, before) in sent.iter_mut().zip(&gang.sent_before) {
        for (bytes, before) in row.iter_mut().zip(before) {
            *bytes = bytes.saturating_sub(*before);
        }
    }
    sent
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_after_changes_that_were_undone_doubles_up_to_an_hour() {
        let pauses_s = [0, 1, 2, 3, 7, 8, u32::MAX].map(|undone| pause_after(undone).as_secs());
        assert_eq!(pauses_s, [30, 30, 60, 120, 1920, 3600, 3600]);
    }
}
