//! The backup of an image. An image never changes, so nothing is sealed for it: a host that has all of it ships its layers. A restore is an import of the backup
//! (`images/imports.rs`): the image is there when all bytes were read and checked.

use std::sync::Arc;

use perigee_model::backup::{Backup, RestoreImageBackup};
use perigee_model::job::ClusterImage;
use perigee_model::{BackupName, ImageName, Problem};

use super::driver::LOOKING;
use super::{find, reading, restoring};
use crate::accounts;
use crate::cluster::{Cluster, HostLink};
use crate::level;
use crate::records::{ImageRecord, ImportedBackup, image_key};
use crate::storage::images;

/// Refuses an image that there is not, and all as long as the version before may come back.
///
/// # Errors
/// `NotFound`; `Conflict`.
pub async fn check(cluster: &Cluster, what: &str, image: &ImageName) -> Result<(), Problem> {
    check_level(cluster, what).await?;
    images::layer_of(cluster, image).await.map(drop)
}

async fn check_level(cluster: &Cluster, what: &str) -> Result<(), Problem> {
    if level::in_force(&cluster.records).await? >= level::BACKUPS_OF_IMAGES {
        return Ok(());
    }
    let why = "the version before this one knows no backups of images, and may come back";
    Err(Problem::conflict(what, why).next("end the upgrade first: perigee upgrade finish"))
}

/// The record of an image that people have made. No host is asked.
///
/// # Errors
/// `NotFound`; `Conflict` for an image of a job's inputs.
pub async fn check_listed(cluster: &Cluster, what: &str, image: &ImageName) -> Result<(), Problem> {
    let record: Option<ImageRecord> = cluster.records.read(&image_key(image)).await?;
    match record {
        None => Err(Problem::not_found(what, "there is no such image")
            .next("`perigee image list` shows the images")),
        Some(record) if record.inputs.is_some() => {
            Err(Problem::conflict(what, "it was made of a job's inputs and goes by itself"))
        }
        Some(_) => Ok(()),
    }
}

/// The host that ships an image: that of an earlier try, or the one that has made the image. To an S3 store any other one ships too while that one is away, unless an
/// earlier request (`asks`) may still be under way there.
///
/// # Errors
/// `Unavailable` if no such host answers; `NotFound` if the image is gone.
pub async fn shipper(
    cluster: &Cluster,
    (view, asks): (&Backup, bool),
    image: &ImageName,
) -> Result<Arc<HostLink>, Problem> {
    let may_be_any = view.at.is_s3() && !asks;
    images::whole_at(cluster, image, view.host.as_ref(), may_be_any).await
}

/// Makes an image of a backup, when all of it was read and checked.
///
/// # Errors
/// `NotFound` if there is no such backup; `Invalid` if it is not of an image; `Conflict` if the name is taken, or the backup damaged; `NoSpace`; what the host says. Then
/// there is no image.
pub async fn restore(
    cluster: &Cluster,
    name: &BackupName,
    ask: RestoreImageBackup,
) -> Result<ClusterImage, Problem> {
    let what = format!("can't restore backup {name} as image {}", ask.image);
    check_level(cluster, &what).await?;
    let _reading = reading::begin(name);
    let (found, from, host) = find(cluster, &what, name, (ask.from, ask.host)).await?;
    if found.image.is_none() {
        return Err(Problem::invalid(what, "it is not the backup of an image")
            .next("restore it as a volume, and make an image of that: perigee volume snapshot"));
    }
    {
        let _looking = LOOKING.lock().await;
        restoring::check_not_deleted(cluster, &what, name, &from).await?;
    }
    // What has no room is not even begun. From then on, when the image has its name, its record counts.
    let room = accounts::hold_volume(cluster, ask.image.as_str(), found.size_bytes).await?;
    let of = ImportedBackup { backup: name.clone(), from };
    images::restore(cluster, &what, ask.image, (of, found.size_bytes), &host, || drop(room)).await
}
