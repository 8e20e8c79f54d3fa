//! What the VMs without a job lose to the network between themselves and their data, as their volume servers and those of the data measure it.

use perigee_model::job::HostState;
use perigee_model::vm::VmReport;
use perigee_model::volume::{ExportStats, IoStats};
use perigee_model::{HostId, Problem, VolumeName};
use perigee_planner::balance::Waited;
use perigee_planner::{CopyFacts, DiskFacts};

use super::disk_waits::{DiskWaits, Done};
use super::look::LOAD_AGE_MAX;
use crate::cluster::Cluster;
use crate::meter::Reading;
use crate::planning::seconds;
use crate::records::{JobRecord, PlacedDisk, vm_of};

/// What is known of a VM's data.
#[derive(Debug, Default)]
pub(super) struct Data {
    /// The other hosts that have some.
    pub far: Vec<HostId>,
    /// What it did with all its disks since the look before; `None` if that is not known.
    pub waited: Option<Waited>,
}

impl Data {
    /// Of a VM without a job at this host; of others nothing.
    ///
    /// # Errors
    /// If the store can't be read.
    pub async fn of(
        cluster: &Cluster,
        record: &JobRecord,
        host: &HostId,
        waits: &mut DiskWaits,
    ) -> Result<Self, Problem> {
        if !record.kind.is_persistent_vm() {
            return Ok(Self::default());
        }
        let mut far: Vec<HostId> = Vec::new();
        for disk in record.disks_needed().filter(|disk| disk.home != *host) {
            if !far.contains(&disk.home) {
                far.push(disk.home.clone());
            }
        }
        let vm = vm_of(&record.job.id);
        let Some((at, report)) = cluster.hosts.fresh_vm(host, &vm, LOAD_AGE_MAX) else {
            return Ok(Self { far, waited: None });
        };
        let mut readings = Vec::new();
        for disk in record.disks_needed() {
            let reading = reading(cluster, disk, host, &report).await?;
            readings.push(((disk.volume.clone(), disk.home.clone()), reading));
        }
        let done = waits.note((vm, host.clone()), at, report.vcpu_ms, &readings);
        Ok(Self { far, waited: done.map(|done| waited(record, done)) })
    }

    /// The share of the time that the VM loses where it is, 0 to 1; `None` if that is not known.
    pub fn lost(&self) -> Option<f64> {
        if self.far.is_empty() { Some(0.0) } else { self.waited.as_ref().map(Waited::lost) }
    }
}

async fn reading(
    cluster: &Cluster,
    disk: &PlacedDisk,
    host: &HostId,
    report: &VmReport,
) -> Result<Reading, Problem> {
    let mut disks = report.spec.disks.iter().zip(&report.io);
    let client = disks.find(|(of, _)| of.volume == disk.volume).map(|(_, io)| *io);
    let far = disk.home != *host;
    let home = if far { at_home(cluster, &disk.home, &disk.volume).await? } else { client };
    Ok(Reading { client, home, far })
}

/// What the volume's home says of it; `None` if it does not answer.
async fn at_home(
    cluster: &Cluster,
    home: &HostId,
    volume: &VolumeName,
) -> Result<Option<IoStats>, Problem> {
    // A host that was removed is not up either.
    if cluster.hosts.state(home) != HostState::Up {
        return Ok(None);
    }
    let stats = cluster.hosts.volume_stats(home, cluster.timing.monitor).await?;
    let of_volume =
        |all: &Vec<ExportStats>| all.iter().find(|one| one.volume == *volume).map(|one| one.stats);
    Ok(stats.as_deref().and_then(of_volume))
}

fn waited(record: &JobRecord, done: Done) -> Waited {
    let disks = record.disks_needed().zip(done.totals.disks).map(|(disk, totals)| DiskFacts {
        volume: disk.volume.clone(),
        home: disk.home.clone(),
        client: totals.client,
        at_home: totals.home,
        far_requests: totals.far_requests,
        copy: CopyFacts::default(),
        coming: None,
        outage_ns: totals.outage_ns,
    });
    Waited {
        wall_s: done.wall_s,
        vcpu_s: seconds(done.totals.vcpu_ms),
        cpus: record.job.spec.cpus_most(),
        disks: disks.collect(),
    }
}
