//! Queued: the scheduler has given the job a host; here that is recorded.

use perigee_model::job::{Access, JobSpec};
use perigee_model::states::JobEvent;
use perigee_model::{HostId, JobId, Problem, VolumeName};

use super::driver::{Run, Step};
use crate::planning;
use crate::records::{PlacedDisk, Placement, vm_of};

impl Run {
    pub(super) async fn place(&mut self) -> Result<Step, Problem> {
        let Some(grant) = self.cluster.index.grant_of(&self.id) else { return Ok(Step::Leave) };
        planning::record_submission(&self.cluster, &self.id, &grant.plan).await?;
        let record = &mut self.record.value;
        let (spec, restarts) = (&record.job.spec, record.restarts);
        let start = grant.host.clone();
        let disks = disks(&self.id, spec, &start, &grant.volume_homes, restarts);
        let traits = grant.traits.clone();
        record.placement = Some(Placement { start: start.clone(), disks, traits });
        record.job.state = record.job.state.next(JobEvent::Placed)?;
        record.job.host = Some(start);
        record.job.vm = Some(vm_of(&self.id));
        record.job.predicted = Some(grant.predicted);
        record.job.reason.clear();
        self.record.save().await?;
        Ok(Step::Again)
    }
}

/// The VM's disks: root, seed and output beside the VM, data where it is.
fn disks(
    job: &JobId,
    spec: &JobSpec,
    start: &HostId,
    data_homes: &[HostId],
    restarts: u32,
) -> Vec<PlacedDisk> {
    let own = |serial: &str, suffix: &str, read_only| PlacedDisk {
        serial: serial.to_owned(),
        volume: own_volume(job, restarts, suffix),
        data_of: None,
        home: start.clone(),
        epoch: None,
        read_only,
        temporary: true,
    };
    let mut disks =
        vec![own("root", "root", false), own("seed", "seed", true), own("output", "out", false)];
    for (index, (volume, home)) in spec.volumes.iter().zip(data_homes).enumerate() {
        let serial = format!("data{index}");
        let clone = volume.access == Access::Clone;
        disks.push(PlacedDisk {
            volume: if clone { own_volume(job, restarts, &serial) } else { volume.volume.clone() },
            data_of: Some(volume.volume.clone()),
            home: home.clone(),
            epoch: None,
            read_only: volume.access == Access::Read,
            temporary: clone,
            serial,
        });
    }
    disks
}

/// What an earlier start of the job left may still stand: the next one has names of its own.
fn own_volume(job: &JobId, restarts: u32, suffix: &str) -> VolumeName {
    let name = match restarts {
        0 => format!("{job}-{suffix}"),
        _ => format!("{job}-r{restarts}-{suffix}"),
    };
    VolumeName::new(name).expect("submission bounds the length of a job's id")
}
