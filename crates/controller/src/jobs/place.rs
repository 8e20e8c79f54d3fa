//! Queued: records the host that the scheduler has given to the job.

use perigee_model::job::{Access, JobSpec};
use perigee_model::persistent_vm::PersistentVm;
use perigee_model::states::JobEvent;
use perigee_model::vm::NetworkKind;
use perigee_model::{DiskRole, HostId, JobId, LeaveSite, Problem, VolumeName};

use super::cost;
use super::driver::{Run, Step};
use crate::records::{PlacedDisk, Placement, vm_of};
use crate::storage::leave_site::{self, Confined};
use crate::{networks, planning};

/// The disks of a job's VM, beside its volumes.
pub(super) fn job_disks(spec: &JobSpec) -> &'static [DiskRole] {
    use DiskRole::{Nvram, Output, Root, Seed, Tpm};
    match (spec.firmware.has_variables(), spec.tpm) {
        (false, false) => &[Root, Seed, Output],
        (true, false) => &[Root, Seed, Output, Nvram],
        (false, true) => &[Root, Seed, Output, Tpm],
        (true, true) => &[Root, Seed, Output, Nvram, Tpm],
    }
}

impl Run {
    pub(super) async fn place(&mut self) -> Result<Step, Problem> {
        let Some(grant) = self.cluster.index.grant_of(&self.id) else {
            cost::release(&self.cluster, &self.record.value).await?;
            return Ok(Step::Leave);
        };
        let is_job = self.record.value.kind.is_a_job();
        if is_job && !cost::reserve(&self.cluster, &mut self.record.value, grant.cost).await? {
            return Ok(Step::Leave);
        }
        if self.persistent().is_none() {
            planning::record_submission(&self.cluster, &self.id, &grant.plan).await?;
        }
        let confined = leave_site::confined_of(&self.cluster, &self.job().spec).await?;
        let has_user_card = self.job().spec.network == NetworkKind::Default
            && !confined.is_any()
            && networks::refusal(&self.cluster, &grant.host, &NetworkKind::User).is_none();
        let record = &mut self.record.value;
        let (spec, restarts) = (&record.job.spec, record.restarts);
        let start = grant.host.clone();
        let is_persistent = record.kind.is_persistent_vm();
        let own =
            record.kind.persistent_vm().map_or_else(|| job_disks(spec), PersistentVm::own_disks);
        let mut disks =
            disks(&self.id, spec, (&start, &confined), &grant.volume_homes, (own, restarts));
        if let Some(persistent) = record.kind.persistent_vm() {
            let data = disks.iter_mut().filter(|disk| disk.role.is_data());
            for (index, disk) in data.enumerate() {
                disk.role = persistent.role_of(index).unwrap_or(disk.role);
            }
        }
        for disk in disks.iter_mut().filter(|disk| disk.temporary) {
            let kept =
                record.kept().and_then(|kept| kept.disks.iter().find(|k| k.role == disk.role));
            if let Some(kept) = kept {
                // Its image may have become confined since it was made.
                let is_confined = disk.leave_site.is_never() || kept.leave_site.is_never();
                let leave_site = LeaveSite::confined(is_confined);
                *disk = PlacedDisk { epoch: None, leave_site, ..kept.clone() };
            } else if is_persistent && disk.role.lasts() {
                // It is the same one at all starts, unless another image was restored.
                let root =
                    record.kind.persistent_vm().map_or(0, |persistent| persistent.root_number);
                let number = if disk.role == DiskRole::Root { root } else { 0 };
                disk.volume = own_volume(&self.id, number, disk.role);
            }
        }
        let traits = grant.traits.clone();
        record.placement = Some(Placement { start: start.clone(), disks, traits, has_user_card });
        record.job.state = record.job.state.next(JobEvent::Placed)?;
        record.job.host = Some(start);
        record.job.vm = Some(vm_of(&self.id));
        record.job.predicted = Some(grant.predicted);
        record.job.reason.clear();
        self.record.save().await?;
        Ok(Step::Again)
    }
}

/// The VM's disks: root, seed, output and inputs at the VM's host, and data volumes at their homes. What the job
/// writes stays at the site of data that may not leave it.
pub(super) fn disks(
    job: &JobId,
    spec: &JobSpec,
    (start, confined): (&HostId, &Confined),
    data_homes: &[HostId],
    (own_disks, restarts): (&[DiskRole], u32),
) -> Vec<PlacedDisk> {
    let own = |role: DiskRole| PlacedDisk {
        role,
        volume: own_volume(job, restarts, role),
        data_of: None,
        home: match role {
            DiskRole::Seed | DiskRole::CloudInit => start.clone(),
            // A confined image is at the hosts of its site only.
            DiskRole::Root => {
                confined.writes_at.as_ref().or(confined.image_at.as_ref()).unwrap_or(start).clone()
            }
            _ => confined.writes_at.as_ref().unwrap_or(start).clone(),
        },
        home_changed: false,
        epoch: None,
        read_only: matches!(role, DiskRole::Seed | DiskRole::CloudInit),
        temporary: true,
        leave_site: match role {
            DiskRole::Seed | DiskRole::CloudInit => LeaveSite::Allowed,
            // It has the image's data, also where what the job writes may leave.
            DiskRole::Root if confined.image_at.is_some() => LeaveSite::Never,
            _ => LeaveSite::confined(confined.writes_at.is_some()),
        },
    };
    let mut disks: Vec<PlacedDisk> = own_disks.iter().copied().map(own).collect();
    disks.extend(spec.inputs.is_some().then(|| own(DiskRole::Inputs)));
    for (index, (volume, home)) in spec.volumes.iter().zip(data_homes).enumerate() {
        let role = DiskRole::data(index).expect("submission bounds the number of volumes");
        let clone = volume.access == Access::Clone;
        disks.push(PlacedDisk {
            role,
            volume: if clone { own_volume(job, restarts, role) } else { volume.volume.clone() },
            data_of: Some(volume.volume.clone()),
            home: home.clone(),
            home_changed: false,
            epoch: None,
            read_only: volume.access == Access::Read,
            temporary: clone,
            leave_site: LeaveSite::confined(confined.volumes.contains(&volume.volume)),
        });
    }
    disks
}

/// Volumes of an earlier start of the job may still exist, so each start has names of its own.
pub fn own_volume(job: &JobId, restarts: u32, role: DiskRole) -> VolumeName {
    let suffix = match role {
        DiskRole::Output => "out".to_owned(),
        _ => role.to_string(),
    };
    let name = match restarts {
        0 => format!("{job}-{suffix}"),
        _ => format!("{job}-r{restarts}-{suffix}"),
    };
    VolumeName::new(name).expect("submission bounds the length of a job's id")
}

/// Of the root disk of a VM without a job, whose volumes are named by [`own_volume`]: the number in its name, 0 without one.
pub fn number_of_root(vm: &JobId, root: &VolumeName) -> u32 {
    let number = root.as_str().strip_prefix(vm.as_str()).and_then(|rest| rest.strip_prefix("-r"));
    let digits = number.and_then(|rest| rest.strip_suffix("-root"));
    digits.and_then(|digits| digits.parse().ok()).unwrap_or_default()
}

/// The job that has a volume with this name for its own, if there is such a job.
pub fn job_of(volume: &VolumeName) -> Option<JobId> {
    let (rest, suffix) = volume.as_str().rsplit_once('-')?;
    let is_own = suffix == "out" || suffix.parse::<DiskRole>().is_ok_and(|r| r != DiskRole::Output);
    let is_restart = |text: &str| {
        let number = text.strip_prefix('r').unwrap_or_default();
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    };
    let id = rest.rsplit_once('-').filter(|(_, last)| is_restart(last)).map_or(rest, |(id, _)| id);
    is_own.then(|| JobId::new(id).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_job_is_found_whose_own_a_volume_is() {
        let job = JobId::new("acme~q-0001").expect("a name");
        for role in [DiskRole::Root, DiskRole::Seed, DiskRole::Output, DiskRole::Data(2)] {
            for restarts in [0, 1, 12] {
                assert_eq!(job_of(&own_volume(&job, restarts, role)), Some(job.clone()));
            }
        }
        for other in ["data", "acme~data", "acme~q-0001", "q-output", "q-0001-r1"] {
            assert_eq!(job_of(&VolumeName::new(other).expect("a name")), None, "{other}");
        }
    }
}
