//! A VM is made of the backup of one. Its disks are new: each volume that the VM wrote is restored, and the root disk comes as an image, of which the first start
//! makes a clone.

use std::sync::Arc;

use perigee_model::backup::{FoundBackup, RestoreBackup, RestoreVmBackup, VmBackup};
use perigee_model::job::{Start, Vm};
use perigee_model::persistent_vm::{NewVm, NewVmVolume};
use perigee_model::vm::NetworkKind;
use perigee_model::volume::Snapshot;
use perigee_model::{BackupName, ImageName, Problem, ProblemKind, TenantName, VolumeName};

use super::persistent;
use crate::cluster::Cluster;
use crate::records::{ImageRecord, image_key};
use crate::storage::{backups, images, volumes};

/// Makes the VM, which does not run. A user of a tenant gets one that has only things of the tenant.
///
/// # Errors
/// `Invalid` if the backup is not of a VM; `Conflict` if the name of the VM, of a disk or of the image is taken; as [`backups::restore`] and [`persistent::create`].
/// Then nothing of it stays.
pub async fn restore(
    cluster: &Arc<Cluster>,
    backup: &BackupName,
    ask: RestoreVmBackup,
    owner: String,
    tenant: Option<TenantName>,
) -> Result<Vm, Problem> {
    let what = format!("can't restore backup {backup} as VM {}", ask.vm);
    let place = (ask.from.clone(), ask.host.clone());
    // The root disk comes last, and takes the others with it when it is deleted.
    let _reading = backups::begin_reading(backup);
    let (found, ..) = backups::find(cluster, &what, backup, place).await?;
    let FoundBackup { vm: Some(of_vm), size_bytes, .. } = found else {
        let why = "it is not of a VM, or only of one of its disks";
        return Err(Problem::invalid(what, why)
            .next("make a volume of it: perigee backup restore NAME --as VOLUME --disk"));
    };
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
    let mut making = Making { cluster, ask: &ask, volumes: Vec::new(), image: None };
    let made = match making.disks(backup, &of_vm, size_bytes).await {
        Ok(new) => persistent::create(cluster, new, owner).await,
        Err(problem) => Err(problem),
    };
    if made.is_err() {
        making.undo().await;
    }
    made
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

/// Makes a thing that is no answer to the request: a key that the request has is the VM's.
async fn without_key<T: Send + 'static>(
    making: impl Future<Output = Result<T, Problem>> + Send + 'static,
) -> Result<T, Problem> {
    let made = tokio::spawn(making).await;
    made.map_err(|error| Problem::internal("can't restore a disk of a VM", error))?
}

/// What was made so far.
struct Making<'a> {
    cluster: &'a Arc<Cluster>,
    ask: &'a RestoreVmBackup,
    volumes: Vec<VolumeName>,
    image: Option<ImageName>,
}

impl Making<'_> {
    fn named<N: std::str::FromStr<Err: std::fmt::Display>>(&self, end: &str) -> Result<N, Problem> {
        let name = format!("{}-{end}", self.ask.vm);
        name.parse().map_err(|error: N::Err| Problem::invalid(format!("can't name {name}"), error))
    }

    async fn volume(&mut self, of: &BackupName, end: &str) -> Result<VolumeName, Problem> {
        let volume: VolumeName = self.named(end)?;
        let (host, from) = (self.ask.host.clone(), self.ask.from.clone());
        // Of the root disk an image is made, which takes all bytes.
        let ask = RestoreBackup { volume: volume.clone(), host, from, whole: true };
        let (cluster, of) = (Arc::clone(self.cluster), of.clone());
        without_key(async move { backups::restore(&cluster, &of, ask).await }).await?;
        self.volumes.push(volume.clone());
        Ok(volume)
    }

    /// Makes the disks. Returns what makes the VM of them.
    async fn disks(
        &mut self,
        root: &BackupName,
        of_vm: &VmBackup,
        root_bytes: u64,
    ) -> Result<NewVm, Problem> {
        let mut new = of_vm.vm.clone();
        for (number, part) in of_vm.parts.iter().enumerate() {
            let volume = self.volume(&part.backup, &format!("data{number}")).await?;
            let was = |one: &&mut NewVmVolume| one.volume == part.volume;
            new.volumes.iter_mut().filter(was).for_each(|one| one.volume = volume.clone());
        }
        let restored = self.volume(root, "restored").await?;
        let image: ImageName = self.named("restored")?;
        let (cluster, of) = (Arc::clone(self.cluster), restored.clone());
        let ask = Snapshot { image: image.clone() };
        let what = format!("can't snapshot volume {restored} as {image}");
        if cluster.records.read::<ImageRecord>(&image_key(&image)).await?.is_some() {
            let why = "there is an image with this name";
            return Err(Problem::conflict(what, why).next("choose another name for the VM"));
        }
        let made = without_key(async move { images::snapshot(&cluster, &of, &ask).await }).await;
        // If the answer was lost, there may be an image. After a conflict, the one that is there is somebody else's.
        if !made.as_ref().is_err_and(|problem| problem.kind == ProblemKind::Conflict) {
            self.image = Some(image.clone());
        }
        made?;
        volumes::delete(self.cluster, &restored).await?;
        self.volumes.retain(|volume| *volume != restored);
        Ok(NewVm {
            name: self.ask.vm.clone(),
            image,
            disk_bytes: Some(root_bytes),
            // The VM of which the backup is may run, and have these ports. Its hosts may be gone.
            publish: Vec::new(),
            start: Start::default(),
            stopped: true,
            ..new
        })
    }

    /// Deletes what was made. What can't be deleted is logged, and people see it.
    async fn undo(self) {
        for volume in &self.volumes {
            if let Err(problem) = volumes::delete(self.cluster, volume).await {
                tracing::warn!(%problem, "volume {volume} of a restore that has failed stays");
            }
        }
        if let Some(image) = &self.image
            && let Err(problem) = images::delete(self.cluster, image).await
            && problem.kind != ProblemKind::NotFound
        {
            tracing::warn!(%problem, "image {image} of a restore that has failed stays");
        }
    }
}
