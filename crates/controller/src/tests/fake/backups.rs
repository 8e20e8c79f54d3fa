//! The part of a fake volume server that ships backups: of what a target has, it remembers what it was asked to ship.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::routing::post;
use perigee_http::{Json, Reply};
use perigee_model::backup::{
    BackupTarget, DeleteBackup, FoundBackup, ListBackups, RestoreImage, RestoreVolume,
    RestoringLayer, SealForBackup, SealedForBackup, SendBackupKey, ShipBackup, ShippedBackup,
    VmBackup,
};
use perigee_model::backup_key::BackupKey;
use perigee_model::volume::{CreateVolume, ImageInfo, IoStats, Step, VolumeInfo, VolumeSource};
use perigee_model::{BackupName, ImageName, LayerId, Problem, VolumeName};

use super::measure::step;
use super::restoring::TO_COME_BYTES;
use super::{Inside, Shared, Volume, volume_info};

/// What a test looks at or changes.
#[derive(Default)]
pub struct Backups {
    /// What each target has.
    pub at: BTreeMap<String, BTreeMap<BackupName, ShipBackup>>,
    /// Those of images.
    pub of_images: BTreeSet<BackupName>,
    /// The volumes that were sealed together.
    pub sealed: Vec<Vec<VolumeName>>,
    /// How often something was to be shipped.
    pub asked: u64,
    /// Nothing is complete meanwhile.
    pub hangs: bool,
    /// Why nothing can be shipped.
    pub refuses: Option<Problem>,
    /// The moment of the next backup; `None`: as the controller says.
    pub taken_ms: Option<u64>,
    /// This one can't be deleted.
    pub stays: Option<BackupName>,
    /// The keys that were sent.
    pub keys: Vec<BackupKey>,
    /// The keys with which targets were listed.
    pub listed_with: Vec<Option<BackupKey>>,
}

pub fn routes() -> Router<Arc<Mutex<Inside>>> {
    Router::new()
        .route("/v1/volumes/{volume}/backup", post(ship))
        .route("/v1/volumes/{volume}/backup/end", post(end))
        .route("/v1/images/{image}/backup", post(ship_image))
        .route("/v1/images/{image}/restore", post(restore_image))
        .route("/v1/backups/delete", post(delete))
        .route("/v1/backups/key", post(take_key))
        .route("/v1/backups/seal", post(seal))
        .route("/v1/backups/list", post(list))
        .route("/v1/volumes/{volume}/restore", post(restore))
}

async fn ship(
    State(inside): Shared,
    Path(_): Path<VolumeName>,
    Json(ask): Json<ShipBackup>,
) -> String {
    ship_it(&inside, ask).await
}

async fn ship_it(inside: &Mutex<Inside>, ask: ShipBackup) -> String {
    inside.lock().expect("lock").backups.asked += 1;
    while inside.lock().expect("lock").backups.hangs {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let backups = &mut inside.lock().expect("lock").backups;
    if let Some(problem) = backups.refuses.clone() {
        return step(&Step::<ShippedBackup>::Failed(problem));
    }
    let taken_ms = ask.sealed.as_ref().map_or(ask.now_ms, |sealed| sealed.taken_ms);
    let taken_ms = backups.taken_ms.unwrap_or(taken_ms);
    let at = backups.at.entry(ask.to.address.clone()).or_default();
    // Each holds 4096 bytes.
    let held_bytes = 4096 * at.len() as u64;
    if let Some(room) = &ask.room
        && let Err(problem) = room.check("can't back up", held_bytes, 4096)
    {
        return step(&Step::<ShippedBackup>::Failed(problem));
    }
    let held_bytes = ask.room.is_some().then_some(held_bytes + 4096);
    let encrypted = ask.encrypted;
    at.insert(ask.name.clone(), ask);
    step(&Step::Done(ShippedBackup {
        taken_ms,
        size_bytes: 1 << 30,
        data_bytes: 4096,
        shipped_bytes: 4096,
        held_bytes,
        encrypted,
    }))
}

async fn ship_image(
    State(inside): Shared,
    Path(image): Path<ImageName>,
    Json(ask): Json<ShipBackup>,
) -> String {
    {
        let inside = &mut *inside.lock().expect("lock");
        if !inside.images.contains_key(&image) {
            let none = Problem::not_found("can't back up", "there is no such image");
            return step(&Step::<ShippedBackup>::Failed(none));
        }
        inside.backups.of_images.insert(ask.name.clone());
    }
    ship_it(&inside, ask).await
}

async fn end(State(_): Shared, Json(_): Json<BackupTarget>) -> Reply<()> {
    Ok(Json(()))
}

async fn delete(State(inside): Shared, Json(ask): Json<DeleteBackup>) -> String {
    let Inside { backups, restores, .. } = &mut *inside.lock().expect("lock");
    if let Some(problem) = backups.refuses.clone() {
        return step(&Step::<()>::Failed(problem));
    }
    restores.deleted.push(ask.backup.clone());
    if backups.stays.as_ref() == Some(&ask.backup) {
        let damaged = Problem::conflict("can't delete a backup", "its directory is damaged");
        return step(&Step::<()>::Failed(damaged));
    }
    let at = backups.at.entry(ask.at.address).or_default();
    at.remove(&ask.backup);
    step(&Step::Done(ask.counts.then_some(4096 * at.len() as u64)))
}

async fn take_key(State(inside): Shared, Json(ask): Json<SendBackupKey>) -> Reply<()> {
    let Inside { backups, restores, .. } = &mut *inside.lock().expect("lock");
    restores.layers.iter_mut().for_each(|layer| layer.lacks_key = false);
    backups.keys.push(ask.key);
    Ok(Json(()))
}

async fn seal(
    State(inside): Shared,
    Json(ask): Json<SealForBackup>,
) -> Reply<Vec<SealedForBackup>> {
    let taken_ms = ask.now_ms;
    let layer = |_: &VolumeName| LayerId(uuid::Uuid::new_v4());
    let sealed = ask.volumes.iter().map(layer);
    let sealed = sealed.map(|layer| SealedForBackup { layer, size_bytes: 1 << 30, taken_ms });
    let sealed = sealed.collect();
    inside.lock().expect("lock").backups.sealed.push(ask.volumes);
    Ok(Json(sealed))
}

async fn list(State(inside): Shared, Json(ask): Json<ListBackups>) -> Reply<Vec<FoundBackup>> {
    let mut inside = inside.lock().expect("lock");
    inside.backups.listed_with.push(ask.key);
    let all = inside.backups.at.get(&ask.at.address).into_iter().flatten();
    let of_images = &inside.backups.of_images;
    let shipped = all.map(|(name, asked)| FoundBackup {
        image: of_images.contains(name).then(|| ImageName::new("any").expect("a name")),
        ..found(name, asked.now_ms, asked.vm.clone())
    });
    let there = inside.restores.backup.iter().map(|name| found(name, 1, None));
    Ok(Json(shipped.chain(there).collect()))
}

fn found(name: &BackupName, taken_ms: u64, vm: Option<Box<VmBackup>>) -> FoundBackup {
    FoundBackup {
        name: name.clone(),
        volume: None,
        image: None,
        taken_ms,
        size_bytes: 1 << 30,
        data_bytes: 4096,
        problem: String::new(),
        vm,
    }
}

async fn restore(
    State(inside): Shared,
    Path(name): Path<VolumeName>,
    Json(ask): Json<RestoreVolume>,
) -> String {
    inside.lock().expect("lock").restores.asked.push(name.clone());
    while inside.lock().expect("lock").restores.hangs {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut inside = inside.lock().expect("lock");
    if inside.restores.refuses.as_ref() == Some(&name) || inside.volumes.contains_key(&name) {
        let problem = Problem::conflict("restore", "its bytes are not what was shipped");
        return step(&Step::<VolumeInfo>::Failed(problem));
    }
    let has = inside.backups.at.get(&ask.from.address);
    let is_there = has.is_some_and(|has| has.contains_key(&ask.backup));
    if !is_there && inside.restores.backup.as_ref() != Some(&ask.backup) {
        return step(&Step::<VolumeInfo>::Failed(Problem::not_found("restore", "it is not here")));
    }
    let is_older = inside.restores.is_older;
    let mut info = volume_info(&CreateVolume {
        tenant: ask.tenant,
        leave_site: ask.leave_site,
        owner: ask.owner.filter(|_| !is_older),
        ..CreateVolume::new(name.clone(), Some(1 << 30), VolumeSource::Empty)
    });
    let at_once = ask.at_once.filter(|_| !is_older);
    let new_layer = || LayerId(uuid::Uuid::new_v4());
    let below = at_once.or(ask.layer.filter(|_| !is_older));
    info.chain = vec![new_layer(), below.unwrap_or_else(new_layer)];
    let data = ask.backup.to_string().into_bytes();
    if let Some(layer) = at_once {
        info.remote_bytes = TO_COME_BYTES;
        inside.restores.layers.push(RestoringLayer {
            layer,
            backup: ask.backup.to_string(),
            from: ask.from,
            missing_bytes: TO_COME_BYTES,
            problem: String::new(),
            is_damaged: false,
            lacks_key: false,
        });
    }
    let stats = IoStats::default();
    let volume = Volume { info: info.clone(), issued: 1, returned: 0, data, stats };
    inside.volumes.insert(name, volume);
    step(&Step::Done(info))
}

async fn restore_image(
    State(inside): Shared,
    Path(name): Path<ImageName>,
    Json(ask): Json<RestoreImage>,
) -> String {
    while inside.lock().expect("lock").restores.hangs {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut inside = inside.lock().expect("lock");
    let has = inside.backups.at.get(&ask.from.address);
    if !has.is_some_and(|has| has.contains_key(&ask.backup)) {
        return step(&Step::<ImageInfo>::Failed(Problem::not_found("restore", "it is not here")));
    }
    let info = ImageInfo { name: name.clone(), layer: ask.layer, ..super::images::image() };
    let made = inside.images.entry(name).or_insert(info).clone();
    assert_eq!(made.layer, ask.layer, "a restore that is asked for again has the same layer");
    step(&Step::Done(made))
}
