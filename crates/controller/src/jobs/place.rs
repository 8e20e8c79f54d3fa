//! Queued: a host for the VM. The planner proposes from a snapshot; here its proposal is checked
//! against the present and taken, under the lock that all placements share.

use perigee_model::job::{Access, JobSpec};
use perigee_model::plan::Plan;
use perigee_model::states::JobEvent;
use perigee_model::{HostId, JobId, Problem, VolumeName};

use super::driver::{Run, Step};
use crate::records::{PlacedDisk, Placement, VolumeRecord, vm_of};
use crate::{catalog, hosts, planning};

impl Run {
    pub(super) async fn place(&mut self) -> Result<Step, Problem> {
        let cluster = self.cluster.clone();
        if let Some(reason) = self.volume_in_use().await? {
            self.say(&reason).await?;
            return Ok(Step::Wait(cluster.timing.figures));
        }
        let plan = planning::plan(&cluster, &self.job().spec).await?;
        let Some((start, predicted_s)) = chosen(&plan) else {
            return Err(Problem::unavailable("place the job", "the plan chose nothing"));
        };
        let mut volumes = Vec::new();
        for volume in &self.job().spec.volumes {
            volumes.push(catalog::find(&cluster, &volume.volume).await?);
        }
        let _placing = cluster.placing.lock().await;
        if let Some(reason) = self.volume_in_use().await? {
            self.say(&reason).await?;
            return Ok(Step::Wait(cluster.timing.figures));
        }
        if let Some(reason) = no_room(self, &start).await? {
            self.say(&reason).await?;
            return Ok(Step::Wait(cluster.timing.figures));
        }
        planning::record_submission(&cluster, &self.id, &plan).await?;
        let record = &mut self.record.value;
        record.placement = Some(placement(&self.id, &record.job.spec, &start, &volumes));
        record.job.state = record.job.state.next(JobEvent::Placed)?;
        record.job.host = Some(start);
        record.job.vm = Some(vm_of(&self.id));
        record.job.predicted_s = Some(predicted_s);
        record.job.reason.clear();
        self.record.save().await?;
        Ok(Step::Again)
    }

    async fn volume_in_use(&self) -> Result<Option<String>, Problem> {
        let jobs = self.cluster.unfinished_jobs();
        let volumes = &self.job().spec.volumes;
        Ok(volumes.iter().find_map(|v| catalog::conflict(&jobs, &self.id, &v.volume, v.access)))
    }
}

fn chosen(plan: &Plan) -> Option<(HostId, f64)> {
    let option = plan.options.iter().find(|option| option.chosen)?;
    Some((option.start.clone(), option.predicted.total_s))
}

async fn no_room(run: &Run, host: &HostId) -> Result<Option<String>, Problem> {
    let promised = hosts::memory_used(&run.cluster);
    let Some(report) = run.cluster.hosts.report(host) else {
        return Ok(Some(format!("host {host} has not reported yet")));
    };
    let free_bytes = planning::free_bytes(&report, promised.get(host).copied().unwrap_or(0));
    let needed_bytes = run.job().spec.memory_bytes;
    Ok((free_bytes < needed_bytes).then(|| {
        format!(
            "host {host} has {} MiB of memory free, the job needs {} MiB",
            free_bytes >> 20,
            needed_bytes >> 20
        )
    }))
}

/// The VM's disks: root, seed and output beside the VM, data where it is.
fn placement(job: &JobId, spec: &JobSpec, start: &HostId, data: &[VolumeRecord]) -> Placement {
    let own = |serial: &str, suffix: &str, read_only| PlacedDisk {
        serial: serial.to_owned(),
        volume: own_volume(job, suffix),
        data_of: None,
        home: start.clone(),
        epoch: None,
        read_only,
        temporary: true,
    };
    let mut disks =
        vec![own("root", "root", false), own("seed", "seed", true), own("output", "out", false)];
    for (index, (volume, record)) in spec.volumes.iter().zip(data).enumerate() {
        let serial = format!("data{index}");
        let clone = volume.access == Access::Clone;
        disks.push(PlacedDisk {
            volume: if clone { own_volume(job, &serial) } else { volume.volume.clone() },
            data_of: Some(volume.volume.clone()),
            home: record.home.clone(),
            epoch: None,
            read_only: volume.access == Access::Read,
            temporary: clone,
            serial,
        });
    }
    Placement { start: start.clone(), disks }
}

fn own_volume(job: &JobId, suffix: &str) -> VolumeName {
    VolumeName::new(format!("{job}-{suffix}")).expect("submission bounds the length of a job's id")
}
