//! Adopts a VM that a host has and no record names, for example after a restore of an older copy of the state: the VM goes on, and gets a
//! record that says of it what its host says. What no host knows of is as for a new VM: its cloud-init data and its published ports.

use std::sync::Arc;

use futures_util::future::join_all;
use perigee_model::job::{AdoptVm, Vm};
use perigee_model::persistent_vm::{NewVm, NewVmVolume, PersistentVm};
use perigee_model::states::JobEvent;
use perigee_model::vm::{Disk, NetworkKind, VmNetwork, VmReport, VmSpec, VmStatus};
use perigee_model::volume::VolumeInfo;
use perigee_model::{DiskRole, HostId, ImageName, JobId, LayerId, Problem, ProblemKind, VmId};
use perigee_planner::Traits;

use super::persistent;
use crate::accounts::hold_volume;
use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::records::{
    ImageRecord, JobRecord, Kind, PlacedDisk, Placement, VolumeRecord, volume_key,
};
use crate::storage::{images, unknown};
use crate::{jobs, vms};

/// Makes the record of a VM that runs at this host. Its other volumes have to be the cluster's before.
///
/// # Errors
/// `NotFound` if the host has no such VM or nobody has one of its disks; `Conflict` if a record names the VM, it is a job's, it does not run,
/// or its name or address is taken; `Unavailable` if a host that may have a disk does not answer.
pub async fn adopt(
    cluster: &Arc<Cluster>,
    vm: &VmId,
    ask: AdoptVm,
    owner: String,
) -> Result<Vm, Problem> {
    let what = format!("can't adopt VM {vm} of host {}", ask.host);
    let report = unknown::unknown_vm(cluster, vm, &ask.host, &what).await?;
    check_runs(&report, &what)?;
    let id = persistent::id_of(vm)?;
    let mut disks = Vec::new();
    for disk in &report.spec.disks {
        disks.push(found(cluster, disk, &what).await?);
    }
    let image = image_of(cluster, ask.image, &disks, &what).await?;
    let record = record(&id, &report, &disks, (&ask.host, image, owner), &what)?;
    persistent::forget_deleted(cluster, &id).await?;
    let own_bytes = disks.iter().filter(|disk| disk.is_own()).map(|disk| disk.info.size_bytes);
    let _room = hold_volume(cluster, vm.as_str(), own_bytes.sum()).await?;
    tracing::warn!("VM {vm} of host {} is adopted, which no record named", ask.host);
    jobs::add(cluster, record).await?;
    cluster.drive_job(&id);
    vms::get(cluster, vm).await
}

/// A disk of the VM, and its home.
struct Found {
    disk: Disk,
    home: HostId,
    info: VolumeInfo,
}

impl Found {
    /// It was made for the VM and goes with it.
    fn is_own(&self) -> bool {
        !self.disk.role.is_data()
    }
}

fn check_runs(report: &VmReport, what: &str) -> Result<(), Problem> {
    let refused = |why: &str, next: &str| Err(Problem::conflict(what, why).next(next));
    let (vm, spec) = (&report.spec.vm, &report.spec);
    if !spec.machine.persistent {
        return refused(
            "it is of a job, whose file and outputs nobody knows",
            &format!("end it (perigee vm end {vm} --host HOST), and adopt its disks"),
        );
    }
    if matches!(report.status, VmStatus::Shutdown | VmStatus::Gone | VmStatus::Migrated) {
        return refused(
            "it does not run",
            &format!(
                "end it (perigee vm end {vm} --host HOST), adopt its disks, and make a VM with them"
            ),
        );
    }
    if matches!(report.status, VmStatus::Starting | VmStatus::Incoming) {
        return refused("it is starting, or comes from another host", "try again when it runs");
    }
    if report.migration.as_ref().is_some_and(|going| !going.phase.is_final()) {
        return refused("it is on its way to another host", "try again when it has arrived there");
    }
    Ok(())
}

/// Where a disk is: the one host whose volume of this name has the epoch with which the VM has opened it.
async fn found(cluster: &Cluster, disk: &Disk, what: &str) -> Result<Found, Problem> {
    let (name, mut hosts) = (&disk.volume, cluster.hosts.all());
    let recorded = recorded_home(cluster, disk, what).await?;
    hosts.retain(|host| recorded.as_ref().is_none_or(|home| host.id == *home));
    let path = format!("/v1/volumes/{name}");
    let answers = join_all(hosts.iter().map(|host| host.volume.get::<VolumeInfo>(&path))).await;
    let (mut homes, mut silent) = (Vec::new(), Vec::new());
    for (host, answer) in hosts.iter().zip(answers) {
        match answer {
            Ok(info) if disk.read_only || info.epoch == disk.epoch => {
                homes.push((host.id.clone(), info));
            }
            Ok(_) => {}
            Err(problem) if problem.kind == ProblemKind::NotFound => {}
            Err(_) => silent.push(host.id.to_string()),
        }
    }
    match homes.pop() {
        Some((home, info)) if homes.is_empty() => Ok(Found { disk: disk.clone(), home, info }),
        Some(_) => Err(Problem::conflict(what, format!("several hosts have its disk {name}"))),
        None if !silent.is_empty() => {
            let why =
                format!("its disk {name} may be at {}, which does not answer", silent.join(" or "));
            Err(Problem::unavailable(what, why).next("try again when it answers"))
        }
        None => Err(Problem::not_found(
            what,
            format!("no host has its disk {name} as the VM has it open"),
        )),
    }
}

/// The home of a data volume, which others may need too: it has a record of its own, or gets one by its name. The VM's own disks have none.
async fn recorded_home(
    cluster: &Cluster,
    disk: &Disk,
    what: &str,
) -> Result<Option<HostId>, Problem> {
    let name = &disk.volume;
    let record: Option<VolumeRecord> = cluster.records.read(&volume_key(name)).await?;
    let refused = |why: String, next: String| Err(Problem::conflict(what, why).next(next));
    match (disk.role.is_data(), record) {
        (true, Some(record)) => Ok(Some(record.home)),
        (true, None) => refused(
            format!("its volume {name} is unknown too"),
            format!("adopt the volume first: perigee volume adopt {name} --host HOST"),
        ),
        (false, None) => Ok(None),
        (false, Some(_)) => refused(
            format!("its own disk {name} was adopted as a volume"),
            "end the VM (perigee vm end), and make one with that disk".to_owned(),
        ),
    }
}

/// The image of its root disk: the one that was named, or that whose layer the disk stands on.
async fn image_of(
    cluster: &Cluster,
    named: Option<ImageName>,
    disks: &[Found],
    what: &str,
) -> Result<ImageName, Problem> {
    if let Some(name) = named {
        return images::image(cluster, &name).await.map(|image| image.name);
    }
    let root = disks.iter().find(|found| found.disk.role == DiskRole::Root);
    let chain: &[LayerId] = root.map_or(&[], |found| &found.info.chain);
    let records: Vec<ImageRecord> = cluster.records.list("images/").await?;
    let is_below = |record: &&ImageRecord| record.layer.is_some_and(|own| chain.contains(&own));
    records.iter().find(is_below).map(|record| record.name.clone()).ok_or_else(|| {
        let why = "no image is known of which its root disk is a clone";
        Problem::conflict(what, why).next("name its image: --image IMAGE")
    })
}

/// What a person would have asked for to get this VM.
fn as_asked_for(spec: &VmSpec, root: &Found, disks: &[Found], image: ImageName) -> NewVm {
    let data = disks.iter().filter(|found| !found.is_own());
    let volumes = data.map(|found| NewVmVolume {
        volume: found.disk.volume.clone(),
        read_only: found.disk.read_only,
        mount: None,
    });
    NewVm {
        name: spec.vm.clone(),
        image,
        cpus: spec.machine.cpus_least.unwrap_or(spec.cpus),
        cpus_max: spec.machine.cpus_least.map(|_| spec.cpus),
        memory_bytes: spec.machine.memory_least_bytes.unwrap_or(spec.memory_bytes),
        memory_max_bytes: spec.machine.memory_least_bytes.map(|_| spec.memory_bytes),
        disk_bytes: Some(root.info.size_bytes),
        network: match &spec.network {
            VmNetwork::None => NetworkKind::None,
            VmNetwork::User => NetworkKind::User,
            VmNetwork::Cluster(card) => NetworkKind::Cluster(card.network.clone()),
            VmNetwork::Bridge(card) => NetworkKind::Bridge(card.bridge.clone()),
        },
        publish: Vec::new(),
        volumes: volumes.collect(),
        start: Default::default(),
        may_migrate: true,
        restart_elsewhere: false,
        stopped: false,
        cloud_init: Default::default(),
        firmware: spec.machine.firmware,
        hardware: spec.machine.hardware.clone(),
        rules: Default::default(),
        labels: Default::default(),
    }
}

fn record(
    id: &JobId,
    report: &VmReport,
    disks: &[Found],
    (host, image, owner): (&HostId, ImageName, String),
    what: &str,
) -> Result<JobRecord, Problem> {
    let spec = &report.spec;
    let root = disks.iter().find(|found| found.disk.role == DiskRole::Root);
    let root = root.ok_or_else(|| Problem::conflict(what, "it has no root disk"))?;
    let new = as_asked_for(spec, root, disks, image);
    let slots = disks.iter().filter_map(|found| match found.disk.role {
        DiskRole::Data(slot) => Some(slot),
        _ => None,
    });
    let placed = disks.iter().map(|found| PlacedDisk {
        role: found.disk.role,
        volume: found.disk.volume.clone(),
        data_of: (!found.is_own()).then(|| found.disk.volume.clone()),
        home: found.home.clone(),
        home_changed: false,
        epoch: Some(found.disk.epoch),
        read_only: found.disk.read_only,
        temporary: found.is_own(),
        leave_site: found.info.leave_site,
    });
    let mut record =
        jobs::new_record(id.clone(), persistent::job_spec(&new, owner, root.info.size_bytes)?);
    record.kind = Kind::PersistentVm(PersistentVm {
        on: true,
        made: true,
        mounts: new.volumes.iter().map(|_| None).collect(),
        slots: slots.collect(),
        firmware: new.firmware,
        hardware: new.hardware,
        root_number: jobs::number_of_root(id, &root.disk.volume),
        ..PersistentVm::default()
    });
    record.card = spec.network.card().cloned();
    record.vm_started = true;
    record.boot_id.clone_from(&report.boot_id);
    (record.restarts, record.settled) = (spec.start.run, spec.start.migration);
    let job = &mut record.job;
    job.submitted_ms = spec.start.submitted_ms;
    (job.vm, job.host) = (Some(spec.vm.clone()), Some(host.clone()));
    job.started_ms = Some(now_ms().saturating_sub(report.uptime_ms));
    // The driver sees the guest run.
    job.state = job.state.next(JobEvent::Placed)?.next(JobEvent::Staged)?;
    record.placement = Some(Placement {
        start: host.clone(),
        disks: placed.collect(),
        traits: Traits::default(),
        has_user_card: false,
    });
    Ok(record)
}
