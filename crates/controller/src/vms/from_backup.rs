//! A VM is made of the backup of one. All that can be refused is refused first. Then the VM gets its record, which names its new disks, and its driver has these made of
//! the backup (`jobs/from_backup.rs`). The VM can be started as soon as they are there, which is before their bytes are.

use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::backup::{BackupTarget, FoundBackup, RestoreVmBackup, VmBackup, VmBackupPart};
use perigee_model::from_backup::{DiskFromBackup, FromBackup};
use perigee_model::job::{Start, Vm};
use perigee_model::persistent_vm::NewVm;
use perigee_model::vm::NetworkKind;
use perigee_model::{
    BackupName, DiskRole, HostId, JobId, LayerId, LeaveSite, Problem, ProblemKind, TenantName,
    VmId, VolumeName,
};
use perigee_planner::Traits;
use uuid::Uuid;

use super::{live, persistent};
use crate::accounts::hold_volume;
use crate::cluster::Cluster;
use crate::jobs::{self, own_volume};
use crate::records::{JobRecord, PlacedDisk, Placement, job_key};
use crate::storage::{backups, volumes};
use crate::store::{Change, Watch};
use crate::vms;

/// The disks of a restore that has failed are deleted. Who asked waits for that no longer than this.
const UNDO_PATIENCE: Duration = Duration::from_secs(60);

/// Makes the VM, which does not run. A user of a tenant gets one that has only things of the tenant.
///
/// # Errors
/// `Invalid` if the backup is not of a VM; `Conflict` if it is damaged, or the name of the VM or of a disk is taken; as [`backups::restore`] and
/// [`persistent::create`]. Then nothing of it stays.
pub async fn restore(
    cluster: &Arc<Cluster>,
    backup: &BackupName,
    ask: RestoreVmBackup,
    owner: String,
    tenant: Option<TenantName>,
) -> Result<Vm, Problem> {
    let what = format!("can't restore backup {backup} as VM {}", ask.vm);
    let place = (ask.from.clone(), ask.host.clone());
    let mut reading = vec![backups::begin_reading(backup)];
    let (found, from, host) = backups::find(cluster, &what, backup, place).await?;
    let FoundBackup { vm: Some(of_vm), size_bytes, .. } = found else {
        let why = "it is not of a VM, or only of one of its disks";
        return Err(Problem::invalid(what, why)
            .next("make a volume of it: perigee backup restore NAME --as VOLUME --disk"));
    };
    check_parts(&what, backup, &of_vm)?;
    if let Some(tenant) = tenant {
        check_of_tenant(&what, &of_vm.vm, &tenant)?;
    }
    if cluster.index.of_vm(&ask.vm).is_some() {
        return Err(Problem::conflict(what, "there is a VM with this name").next("choose another"));
    }
    // What the VM only reads is in no backup.
    for read in of_vm.vm.volumes.iter().filter(|volume| volume.read_only) {
        volumes::find(cluster, &read.volume).await?;
    }
    let id = persistent::id_of(&ask.vm)?;
    let mut planned = Planned { cluster, what: &what, id: &id, disks: Vec::new() };
    let new = planned.volumes(&of_vm, &ask)?;
    let root = (backup.clone(), size_bytes);
    planned.own(DiskRole::Root, Some(root), &host.id);
    let record = persistent::new_record(cluster, new, owner, size_bytes).await?;
    reading.extend(of_vm.parts.iter().map(|part| backups::begin_reading(&part.backup)));
    planned.find_parts(&of_vm, &record, (&ask, &from, &host.id)).await?;
    planned.check_names().await?;
    let disks = planned.disks;
    let all_bytes = disks.iter().map(|disk| disk.size_bytes).fold(0, u64::saturating_add);
    let room = hold_volume(cluster, ask.vm.as_str(), all_bytes).await?;
    let of = FromBackup { backup: backup.clone(), from, whole: ask.whole, disks, failed: None };
    let record = with_disks(record, of, &host.id);
    let changes = cluster.records.watch_key(&job_key(&id));
    jobs::add(cluster, record).await?;
    // From here on its record counts, and each of its volumes takes room of its own.
    drop(room);
    cluster.drive_job(&id);
    until_made(cluster, &id, changes).await?;
    vms::get(cluster, &ask.vm).await
}

/// Refuses what a user of this tenant may not have: an admin may have given it to the VM, or whoever can write to the target.
fn check_of_tenant(what: &str, vm: &NewVm, tenant: &TenantName) -> Result<(), Problem> {
    let mut volumes = vm.volumes.iter().map(|volume| volume.volume.as_str());
    let why = match &vm.network {
        NetworkKind::Bridge(_) => "it is in a bridge of the operator",
        NetworkKind::Cluster(network) if !tenant.owns(network.as_str()) => {
            "it is in a network of others"
        }
        _ if volumes.any(|volume| !tenant.owns(volume)) => "it has a volume of others",
        _ => return Ok(()),
    };
    Err(Problem::forbidden(what, why).next("ask an admin to restore it"))
}

/// Refuses what no backup of a VM has: whoever can write to the target may have named other backups as its parts.
fn check_parts(what: &str, backup: &BackupName, of_vm: &VmBackup) -> Result<(), Problem> {
    let is_own = |part: &VmBackupPart| {
        let end = part.backup.as_str().strip_prefix(backup.as_str());
        end.is_some_and(|end| end.starts_with('.'))
    };
    let has = |volume: &VolumeName| of_vm.parts.iter().any(|part| part.volume == *volume);
    let other = of_vm.parts.iter().find(|part| !is_own(part));
    let mut written = of_vm.vm.volumes.iter().filter(|volume| !volume.read_only);
    let why = match (other, written.find(|one| !has(&one.volume))) {
        (Some(part), _) => format!("it names backup {}, which is none of its parts", part.backup),
        (None, Some(one)) => format!("it has no part for volume {}", one.volume),
        (None, None) => return Ok(()),
    };
    Err(Problem::conflict(what, format!("the backup is damaged: {why}")).next("use another backup"))
}

/// The disks of a VM that is to be made.
struct Planned<'a> {
    cluster: &'a Cluster,
    what: &'a str,
    id: &'a JobId,
    disks: Vec<DiskFromBackup>,
}

impl Planned<'_> {
    /// What makes such a VM, with new volumes in place of those that it wrote.
    fn volumes(&self, of_vm: &VmBackup, ask: &RestoreVmBackup) -> Result<NewVm, Problem> {
        let mut new = of_vm.vm.clone();
        let data = of_vm.parts.iter().filter(|part| is_volume_of(&of_vm.vm, &part.volume));
        for (number, part) in data.enumerate() {
            let name = data_name(&ask.vm, number)?;
            // By what they were: a new name may be that of another one before.
            let both = new.volumes.iter_mut().zip(&of_vm.vm.volumes);
            let was = both.filter(|(_, was)| was.volume == part.volume);
            was.for_each(|(one, _)| one.volume = name.clone());
        }
        Ok(NewVm {
            name: ask.vm.clone(),
            // The VM of which the backup is may run, and have these ports. Its hosts may be gone.
            publish: Vec::new(),
            start: Start::default(),
            stopped: true,
            ..new
        })
    }

    fn own(&mut self, role: DiskRole, of: Option<(BackupName, u64)>, host: &HostId) {
        let (backup, size_bytes) = of.unzip();
        self.disks.push(DiskFromBackup {
            role,
            volume: own_volume(self.id, 0, role),
            host: host.clone(),
            backup,
            layer: LayerId(Uuid::new_v4()),
            size_bytes: size_bytes.unwrap_or_default(),
            is_made: false,
        });
    }

    /// Looks for the backups of the other disks. The root disk is among the disks already.
    async fn find_parts(
        &mut self,
        of_vm: &VmBackup,
        record: &JobRecord,
        (ask, from, root): (&RestoreVmBackup, &BackupTarget, &HostId),
    ) -> Result<(), Problem> {
        // The disks of a VM are together, if each host reaches the target.
        let host = ask.host.clone().or_else(|| from.is_s3().then(|| root.clone()));
        let find = async |backup: &BackupName| {
            let place = (ask.from.clone(), host.clone());
            backups::find(self.cluster, self.what, backup, place).await
        };
        let persistent = record.kind.persistent_vm();
        let own = persistent.into_iter().flat_map(|persistent| persistent.own_disks());
        let mut own: Vec<DiskRole> = own.copied().filter(|role| role.lasts()).collect();
        own.retain(|role| *role != DiskRole::Root);
        let was = JobId::new(of_vm.vm.name.as_str());
        let was = was.map_err(|error| Problem::conflict(self.what, error))?;
        let mut found = Vec::new();
        for part in &of_vm.parts {
            let (of_part, _, host) = find(&part.backup).await?;
            let role = own.iter().copied().find(|role| own_volume(&was, 0, *role) == part.volume);
            found.push((part, role, of_part.size_bytes, host));
        }
        for role in own {
            let part = found.iter().find(|(_, is, ..)| *is == Some(role));
            let of = part.map(|(part, _, size_bytes, _)| (part.backup.clone(), *size_bytes));
            let host = part.map_or(root, |(.., host)| &host.id).clone();
            self.own(role, of, &host);
        }
        found.retain(|(part, ..)| is_volume_of(&of_vm.vm, &part.volume));
        for (number, (part, _, size_bytes, host)) in found.into_iter().enumerate() {
            let volume = data_name(&ask.vm, number)?;
            let at = record.job.spec.volumes.iter().position(|one| one.volume == volume);
            let role = at.and_then(|at| persistent?.role_of(at));
            let role = role.ok_or_else(|| Problem::internal(self.what, "a disk has no place"))?;
            let (host, backup) = (host.id.clone(), Some(part.backup.clone()));
            let layer = LayerId(Uuid::new_v4());
            let is_made = false;
            self.disks.push(DiskFromBackup {
                role,
                volume,
                host,
                backup,
                layer,
                size_bytes,
                is_made,
            });
        }
        Ok(())
    }

    /// # Errors
    /// `Conflict` if there is a volume with the name of a disk.
    async fn check_names(&self) -> Result<(), Problem> {
        for disk in &self.disks {
            match volumes::find(self.cluster, &disk.volume).await {
                Err(problem) if problem.kind == ProblemKind::NotFound => {}
                Err(problem) => return Err(problem),
                Ok(_) => {
                    let why = format!("there is a volume {} already", disk.volume);
                    return Err(Problem::conflict(self.what, why)
                        .next("choose another name for the VM, or delete that volume first"));
                }
            }
        }
        Ok(())
    }
}

/// Whether the VM had this volume. A part of its backup that is none is one of its own disks.
fn is_volume_of(vm: &NewVm, volume: &VolumeName) -> bool {
    vm.volumes.iter().any(|one| one.volume == *volume)
}

fn data_name(vm: &VmId, number: usize) -> Result<VolumeName, Problem> {
    let name = format!("{vm}-data{number}");
    VolumeName::new(&name).map_err(|error| Problem::invalid(format!("can't name {name}"), error))
}

/// The record of the VM, off, with its disks where they are to be made.
fn with_disks(mut record: JobRecord, of: FromBackup, start: &HostId) -> JobRecord {
    let placed = of.disks.iter().map(|disk| PlacedDisk {
        role: disk.role,
        volume: disk.volume.clone(),
        data_of: disk.role.is_data().then(|| disk.volume.clone()),
        home: disk.host.clone(),
        home_changed: false,
        epoch: None,
        read_only: false,
        temporary: !disk.role.is_data(),
        leave_site: LeaveSite::Allowed,
    });
    record.placement = Some(Placement {
        start: start.clone(),
        disks: placed.collect(),
        traits: Traits::default(),
        has_user_card: false,
    });
    record.job.reason = format!("its disks are being made of backup {}", of.backup);
    if let Some(persistent) = record.kind.persistent_vm_mut() {
        // A controller of the version before, which knows nothing of the backup, makes no empty disks in their place.
        persistent.made = true;
        persistent.from_backup = Some(of);
    }
    record
}

/// Waits until a VM that has ended is shown no more.
async fn until_forgotten(cluster: &Cluster, id: &JobId) {
    let begun = Instant::now();
    while cluster.index.job(id).is_some() && begun.elapsed() < UNDO_PATIENCE {
        tokio::time::sleep(cluster.timing.poll).await;
    }
}

/// Waits until the VM has its disks. If they can't be made, until it is deleted again.
async fn until_made(cluster: &Arc<Cluster>, id: &JobId, mut changes: Watch) -> Result<(), Problem> {
    let key = job_key(id);
    let mut why = Problem::conflict(
        format!("can't make VM {id} of a backup"),
        "it was deleted before it had its disks",
    );
    let mut now: Option<JobRecord> = cluster.records.read(&key).await?;
    let mut end = None;
    loop {
        let Some(record) = &now else { return Err(why) };
        let Some(of) = record.kind.persistent_vm().and_then(|vm| vm.from_backup.as_ref()) else {
            // What others see of it comes after the store.
            return live::until_heeded(cluster, record, |vm| vm.from_backup.is_none()).await;
        };
        if let Some(problem) = &of.failed {
            why = problem.clone();
        }
        if record.job.state.is_final() {
            until_forgotten(cluster, id).await;
            return Err(why);
        }
        let change = match record.ending {
            None => changes.next().await,
            // What is left at a host that is away goes later.
            Some(_) => {
                let end = *end.get_or_insert_with(|| tokio::time::Instant::now() + UNDO_PATIENCE);
                match tokio::time::timeout_at(end, changes.next()).await {
                    Ok(change) => change,
                    Err(_) => return Err(why),
                }
            }
        };
        now = match change {
            Some(Change::Put(entry)) => {
                let parsed = serde_json::from_value(entry.value);
                Some(
                    parsed
                        .map_err(|error| Problem::internal(format!("can't read {key}"), error))?,
                )
            }
            Some(Change::Deleted(_)) => None,
            Some(Change::Missed) => cluster.records.read(&key).await?,
            None => return Err(Problem::internal(format!("can't follow {key}"), "no store")),
        };
    }
}
