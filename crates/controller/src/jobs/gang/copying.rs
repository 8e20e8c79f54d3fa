//! The data of a gang come to its VMs, where the planner wants that.
//!
//! The gang's driver records that it is wanted, and when it is over. Each member's driver has its own data come, as that of a job with one VM
//! does (`follow_moves.rs`), and records how far it is. A gang that ends calls nothing off here: each member ends with its data, as such a job.

use std::sync::Arc;
use std::time::Duration;

use perigee_model::job::JobState;
use perigee_model::plan::{Plan, Trigger, Way};
use perigee_model::volume_move::{VolumeMove, VolumeMoveCause, VolumeMoveState};
use perigee_model::{HostId, Problem, VolumeName};
use perigee_planner::RefusedWay;

use super::decide_move::pause_after;
use super::moving::{has_ended, sent};
use super::{GangRun, Members};
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::jobs::decide_move::Change;
use crate::jobs::driver::{Run, Step};
use crate::planning;
use crate::records::{GangCopy, JobRecord, PlacedDisk, vm_of};

/// Why data of a VM do not come that is about to move, or was moved.
pub(super) const MOVED: &str = "the VMs of its job move or were moved";

impl GangRun {
    /// The data of each VM are to come to these hosts, where the VMs are.
    pub(super) async fn begin_copy(
        &mut self,
        hosts: Vec<HostId>,
        reason: String,
        plan: Plan,
    ) -> Result<Step, Problem> {
        let summary = format!("copy the data to its VMs: {reason}");
        tracing::info!("job {}: {summary}", self.id);
        self.record_decision(Trigger::TimeLost, plan, summary).await?;
        let run = self.record.value.restarts;
        let gang = self.gang()?;
        // At other hosts it may go better.
        let before = gang.copy_of(run).filter(|last| last.hosts == hosts);
        let undone_in_a_row = before.map_or(0, |last| last.undone_in_a_row);
        gang.last_copy = Some(GangCopy {
            number: gang.last_copy.as_ref().map_or(1, |last| last.number + 1),
            run,
            hosts,
            reason,
            started_ms: now_ms(),
            ended_ms: None,
            undone: String::new(),
            undone_in_a_row,
        });
        self.record.save().await?;
        self.wake_members();
        Ok(Step::Again)
    }

    /// Whether data of a member move, or are still to come to its VM. Meanwhile nothing else is decided. Records when all have come that
    /// were to come.
    pub(super) async fn data_move(&mut self, members: &Members) -> Result<bool, Problem> {
        let all = || members.iter().flatten().filter(|member| !has_ended(member));
        let data_moves = all().any(|member| data_of_moves(&self.cluster, member));
        let run = self.record.value.restarts;
        let Some(copy) = self.gang()?.open_copy(run).cloned() else { return Ok(data_moves) };
        if data_moves || !all().all(|member| has_begun(member, &copy)) {
            return Ok(true);
        }
        let known = || members.iter().flatten().filter(|member| copied(member) == copy.number);
        let undone = known().find_map(|member| refused_of(member)).unwrap_or_default();
        let clock = &self.cluster.clock;
        let began_anew = |member: &Arc<JobRecord>| {
            clock.age_ms(member.meter.arrived_ms) <= clock.age_ms(copy.started_ms)
        };
        if known().any(began_anew) {
            // With each volume that came its VM's account began anew, and so does that of the talk.
            let every: Vec<&JobRecord> = members.iter().flatten().map(|member| &**member).collect();
            self.gang()?.sent_before = sent(&every);
        }
        self.end_copy(undone).await?;
        Ok(false)
    }

    /// Records that the data that are to come to its VMs have come, or why not all of them.
    pub(super) async fn end_copy(&mut self, undone: String) -> Result<(), Problem> {
        let run = self.record.value.restarts;
        let Some(copy) = self.gang()?.open_copy(run).cloned() else { return Ok(()) };
        if !undone.is_empty() {
            tracing::info!("job {}: not all of its data come to its VMs: {undone}", self.id);
            planning::not_done(&self.cluster, &self.id, &undone).await?;
        }
        let undone_in_a_row = match undone.as_str() {
            "" | MOVED => 0,
            _ => copy.undone_in_a_row.saturating_add(1),
        };
        let ended_ms = Some(now_ms());
        self.gang()?.last_copy = Some(GangCopy { ended_ms, undone, undone_in_a_row, ..copy });
        self.record.save().await
    }

    /// Copies to these hosts that were refused a short time ago are not asked for again. That time doubles with each one in a row.
    pub(super) fn refused_copy(&self, to: &HostId) -> Option<RefusedWay> {
        let record = &self.record.value;
        let last = record.kind.gang()?.copy_of(record.restarts);
        let last = last.filter(|last| last.hosts.contains(to))?;
        let age_ms = self.cluster.clock.age_ms(last.ended_ms?);
        let is_recent = Duration::from_millis(age_ms) < pause_after(last.undone_in_a_row);
        (is_recent && !last.undone.is_empty()).then(|| RefusedWay {
            way: Way::Copy,
            to: to.clone(),
            why: last.undone.clone(),
        })
    }

    /// How far its data are that come to its VMs.
    pub(super) fn copy_in_words(&self, members: &[&JobRecord]) -> Option<String> {
        let record = &self.record.value;
        let copy = record.kind.gang()?.open_copy(record.restarts)?;
        let stays =
            |member: &JobRecord| copied(member) == copy.number && refused_of(member).is_some();
        let is_done = |member: &JobRecord| {
            has_begun(member, copy) && !stays(member) && !data_of_moves(&self.cluster, member)
        };
        let done = members.iter().filter(|member| is_done(member)).count();
        let stay = match members.iter().filter(|member| stays(member)).count() {
            0 => String::new(),
            some => format!(", and data of {some} stay where they are"),
        };
        let (all, reason) = (members.len(), &copy.reason);
        Some(format!("its data come to its VMs ({reason}): {done} of {all} have theirs{stay}"))
    }
}

/// Whether a member's driver has begun the copy, or need not.
fn has_begun(member: &JobRecord, copy: &GangCopy) -> bool {
    copied(member) >= copy.number
}

/// The last copy that a member's driver has begun; 0 is none.
fn copied(member: &JobRecord) -> u32 {
    member.kind.member().map_or(0, |of| of.copied)
}

/// Why not all data of a member have come.
fn refused_of(member: &JobRecord) -> Option<String> {
    let of = member.kind.member().filter(|of| !of.copy_refused.is_empty())?;
    Some(format!("rank {}: {}", of.rank, of.copy_refused))
}

fn data_of_moves(cluster: &Cluster, member: &JobRecord) -> bool {
    let mut disks = member.placement.iter().flat_map(|placement| &placement.disks);
    !member.to_follow.is_empty() || disks.any(|disk| moves(cluster, disk))
}

/// Whether a volume is on its way to another host than this one.
fn goes_elsewhere(last: &VolumeMove, host: &HostId) -> bool {
    !last.state.is_final() && last.to != *host
}

/// Whether the home of a disk changes, or is not complete yet.
fn moves(cluster: &Cluster, disk: &PlacedDisk) -> bool {
    let last = cluster.index.volume_move(&disk.volume);
    last.is_some_and(|last| !last.view.state.is_final())
}

impl Run {
    /// Has the data of a member come to its VM, if its gang wants that and it has not begun that yet.
    pub(in crate::jobs) async fn bring_data_for_gang(&mut self) -> Result<(), Problem> {
        let Some(of) = self.record.value.kind.member() else { return Ok(()) };
        let Some(gang) = self.cluster.index.job(&of.gang) else { return Ok(()) };
        let is_this_run = gang.restarts == self.record.value.restarts;
        let Some(gang) = gang.kind.gang().filter(|_| is_this_run) else { return Ok(()) };
        let copy = gang.open_copy(self.record.value.restarts);
        let Some(copy) = copy.filter(|copy| copy.number > of.copied) else { return Ok(()) };
        if self.job().state != JobState::Running {
            return Ok(());
        }
        let host = copy.hosts.get(of.rank as usize).filter(|_| gang.open_move().is_none());
        let host = host.filter(|host| self.job().host.as_ref() == Some(*host)).cloned();
        let number = copy.number;
        // Stored with what is to come.
        self.note_copy(number, String::new());
        let refused = match host {
            None => MOVED.to_owned(),
            Some(host) if self.homes_move()? || self.has_begun_to_come(&host)? => {
                // A step that was cut has begun it, or a person moves one: the others come after that.
                self.record.value.to_follow = self.to_come(&host)?;
                self.going_elsewhere(&host)?.unwrap_or_default()
            }
            Some(host) => match self.bring_data(&host).await? {
                Change::Begun => return Ok(()),
                Change::NotNow => String::new(),
                Change::Refused(problem) => {
                    let why = format!("{}: {}", problem.what, problem.why);
                    self.refuse(Way::Copy, host, why.clone());
                    why
                }
            },
        };
        self.note_copy(number, refused);
        self.record.save().await
    }

    /// Whether a data volume comes after the VM since the VM is at this host, or has come.
    fn has_begun_to_come(&self, host: &HostId) -> Result<bool, Problem> {
        Ok(self.placement()?.disks.iter().any(|disk| self.has_begun(disk, host)))
    }

    /// The data volumes that are not at the VM's host, and those that come after the VM or have come. One that goes elsewhere is not
    /// brought back.
    fn to_come(&self, host: &HostId) -> Result<Vec<VolumeName>, Problem> {
        let data = self.placement()?.disks.iter().filter(|disk| disk.data_of.is_some());
        let data = data.filter(|disk| self.other_goal(disk, host).is_none());
        let all = data.filter(|disk| disk.home != *host || self.has_begun(disk, host));
        Ok(all.map(|disk| disk.volume.clone()).collect())
    }

    /// That a data volume goes to another host than the VM's.
    fn going_elsewhere(&self, host: &HostId) -> Result<Option<String>, Problem> {
        let mut data = self.placement()?.disks.iter().filter(|disk| disk.data_of.is_some());
        Ok(data.find_map(|disk| {
            let to = self.other_goal(disk, host)?;
            Some(format!("volume {} moves to {to}", disk.volume))
        }))
    }

    fn other_goal(&self, disk: &PlacedDisk, host: &HostId) -> Option<HostId> {
        let last = self.cluster.index.volume_move(&disk.volume)?;
        goes_elsewhere(&last.view, host).then(|| last.view.to.clone())
    }

    fn has_begun(&self, disk: &PlacedDisk, host: &HostId) -> bool {
        let cause = VolumeMoveCause::Follows(vm_of(&self.id));
        let last = self.cluster.index.volume_move(&disk.volume).filter(|_| disk.data_of.is_some());
        last.is_some_and(|last| {
            let VolumeMove { to, state, cause: of, started_ms, .. } = &last.view;
            let is_ours = *of == cause && to == host && *state != VolumeMoveState::CalledOff;
            is_ours && *started_ms >= self.record.value.meter.arrived_ms
        })
    }

    fn note_copy(&mut self, number: u32, refused: String) {
        if let Some(of) = self.record.value.kind.member_mut() {
            (of.copied, of.copy_refused) = (number, refused);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_that_a_person_moves_to_another_host_is_not_brought_back() {
        let host = |name| HostId::new(name).expect("a name");
        let moved = |to, state| VolumeMove {
            volume: VolumeName::new("data").expect("a name"),
            from: host("cloud1"),
            to: host(to),
            state,
            cause: VolumeMoveCause::Asked,
            started_ms: 0,
            taken_ms: None,
            ended_ms: None,
            missing_bytes: None,
            left_ms: None,
            problem: String::new(),
        };
        let goes = |to, state| goes_elsewhere(&moved(to, state), &host("home1"));
        assert!(goes("other1", VolumeMoveState::Taking));
        assert!(!goes("other1", VolumeMoveState::CalledOff), "it is over");
        assert!(!goes("home1", VolumeMoveState::Taking), "it comes to the VM");
    }
}
