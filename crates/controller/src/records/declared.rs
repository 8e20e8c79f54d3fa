//! What makes a VM such as one is now.

use perigee_model::job::{Access, Restart};
use perigee_model::persistent_vm::{CloudInit, NewVm, NewVmVolume};

use super::{JobRecord, vm_of};

/// What makes such a VM as this one is now; `None` for a job's. Its cloud-init data may have secrets, and are left out.
pub fn declared(record: &JobRecord) -> Option<NewVm> {
    let (persistent, spec) = (record.kind.persistent_vm()?, &record.job.spec);
    let mounts = persistent.mounts.iter().cloned().chain(std::iter::repeat(None));
    let volumes = spec.volumes.iter().zip(mounts).map(|(volume, mount)| NewVmVolume {
        volume: volume.volume.clone(),
        read_only: volume.access == Access::Read,
        mount,
    });
    Some(NewVm {
        name: vm_of(&record.job.id),
        image: spec.image.clone(),
        cpus: spec.cpus,
        cpus_max: spec.cpus_max,
        memory_bytes: persistent.memory_next.unwrap_or(spec.memory_bytes),
        memory_max_bytes: spec.memory_max_bytes,
        disk_bytes: spec.root_bytes,
        network: spec.network.clone(),
        publish: spec.publish.clone(),
        volumes: volumes.collect(),
        start: spec.start.clone(),
        may_migrate: spec.may_migrate,
        restart_elsewhere: spec.restart == Restart::OnHostFailure,
        stopped: !persistent.on,
        cloud_init: CloudInit::default(),
        firmware: persistent.firmware,
        hardware: persistent.hardware.clone(),
        rules: spec.rules.clone(),
        labels: persistent.labels.clone(),
    })
}
