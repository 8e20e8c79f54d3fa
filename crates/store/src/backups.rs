//! Backups of volumes and images, at the pool: what is sealed for one, whether a layer is sound before it is shipped, and how a volume or an image comes from one.
//!
//! **Increments.** The home keeps the newest layer that each target has as it is, so that the next backup ships only what stands on that layer. Layers below it may
//! be merged here: at the target they stay as they were shipped. While a backup is shipped, all its layers stay.
//!
//! **An image** is a sealed layer with a name, which is never merged into another one. Layers below it without a name may be: then a try to ship them ends, and the
//! next one ships what they have become.
//!
//! **A restore** writes what all layers show together into one file, which no catalog names until all of it is there. A start of the server removes such a file.
//! The layer that is made of it has a new id: whoever can write to the target may not say what the layer of an image or of another volume shows. So the next backup
//! of the new volume ships all of it.
//!
//! **A restore that can be used at once** is the same layer, before its bytes are here: `restoring`.

mod restoring;

use std::sync::Arc;

use perigee_block::device::IoError;
use perigee_model::replica::SealedReplica;
use perigee_model::volume::{CachePolicy, ImageInfo, VolumeInfo};
use perigee_model::{ImageName, LayerId, LeaveSite, OwnerName, Problem, TenantName, VolumeName};

use crate::catalog::{self, LayerRow, NewVolume, failed};
use crate::disk::blocks::index;
use crate::disk::files::{BlockFile, DiskFile};
use crate::homes::sealing::Pin;
use crate::images::import::{TempFile, new_file};
use crate::layers::checksums::{self, Compared};
use crate::pool::Pool;
use crate::pool::imports::Importing;
use crate::volume::io_problem;
use crate::work::Work;

fn keeper(target: &str) -> String {
    format!("backup:{target}")
}

impl Pool {
    /// Seals what a volume has, and keeps its layers for a backup to this target. `leaves_site` says whether the target is elsewhere.
    ///
    /// # Errors
    /// As [`Self::seal_ahead`]; a conflict when the volume may not leave its site, and the backup would.
    pub async fn seal_backup(
        self: &Arc<Self>,
        name: &VolumeName,
        target: &str,
        leaves_site: bool,
    ) -> Result<SealedReplica, Problem> {
        let what = format!("can't seal what volume {name} has for a backup to {target}");
        self.flush_before_sealing(&what, name).await?;
        let guard = self.wait_for_changes(&what).await?;
        let pin = Pin { keeper: keeper(target), leaves_site };
        self.seal_in_use(&what, name, Some(pin), guard).await
    }

    /// Seals what volumes have at one moment, and keeps their layers for backups to this target. Returns the topmost sealed layer of each, for
    /// [`Self::sealed_before`], and the size of its disk.
    ///
    /// # Errors
    /// As [`Self::seal_backup`], of any of them.
    pub async fn seal_backups(
        self: &Arc<Self>,
        names: &[VolumeName],
        target: &str,
        leaves_site: bool,
    ) -> Result<Vec<(LayerId, u64)>, Problem> {
        let all = names.iter().map(VolumeName::as_str).collect::<Vec<_>>().join(", ");
        let what = format!("can't seal what volumes {all} have for a backup to {target}");
        let pin = Pin { keeper: keeper(target), leaves_site };
        self.seal_together(&what, names, &pin).await
    }

    /// What a volume had when this was its topmost sealed layer. The size is that of now.
    ///
    /// # Errors
    /// A conflict if the layer is not the volume's any more.
    pub async fn sealed_before(
        self: &Arc<Self>,
        name: &VolumeName,
        layer: LayerId,
    ) -> Result<SealedReplica, Problem> {
        let name = name.clone();
        self.run(move |pool| {
            let what = format!("can't back up what volume {name} had");
            pool.layers_sealed_before(&what, &name, layer)
        })
        .await
    }

    /// What an image has. Nothing is sealed for its backup, and nothing is kept. `leaves_site` is as in [`Self::seal_backup`].
    ///
    /// # Errors
    /// Not found; a conflict when the image may not leave its site, and the backup would.
    pub async fn image_for_backup(
        self: &Arc<Self>,
        name: &ImageName,
        leaves_site: bool,
    ) -> Result<ImageForBackup, Problem> {
        let name = name.clone();
        self.run(move |pool| {
            let what = format!("can't back up image {name}");
            let top = pool.catalog.image(&name).map_err(failed(&what))?;
            let why = "there is no such image in this pool";
            let top = top.ok_or_else(|| Problem::not_found(&what, why))?;
            let rows = pool.catalog.chain(top).map_err(failed(&what))?;
            let is_confined = rows.iter().any(|row| row.confined);
            if is_confined && leaves_site {
                let why = "it, or what it stands on, may not leave its site";
                return Err(Problem::conflict(what, why));
            }
            let size_bytes = rows.first().map_or(0, |row| row.size_bytes);
            let chain = rows.into_iter().map(|row| row.id).collect();
            Ok(ImageForBackup { size_bytes, is_confined, chain })
        })
        .await
    }

    /// The target has this layer, and what is below it. Only this layer stays for the next backup.
    ///
    /// # Errors
    /// When the catalog can't be written.
    pub async fn has_backup(
        self: &Arc<Self>,
        name: &VolumeName,
        target: &str,
        layer: Option<LayerId>,
    ) -> Result<(), Problem> {
        let (name, keeper) = (name.clone(), keeper(target));
        self.run(move |pool| {
            let what = format!("can't keep what the next backup of volume {name} needs");
            pool.catalog.pin_complete(&name, &keeper, layer).map_err(failed(&what))?;
            pool.note_sealed();
            Ok(())
        })
        .await
    }

    /// The backup that was begun to this target is complete, failed or deleted: its layers need not stay for it any more. What the next backup stands on stays.
    ///
    /// # Errors
    /// When the catalog can't be written.
    pub async fn drop_filling(
        self: &Arc<Self>,
        name: &VolumeName,
        target: &str,
    ) -> Result<(), Problem> {
        let (name, keeper) = (name.clone(), keeper(target));
        self.run(move |pool| {
            let what = format!("can't let go of what a backup of volume {name} has kept");
            pool.catalog.drop_filling_pin(&name, &keeper).map_err(failed(&what))?;
            pool.note_sealed();
            Ok(())
        })
        .await
    }

    /// Compares a sealed layer with its checksums, so that damage of this disk is not backed up as if it was sound. One that has none yet was sealed a moment
    /// ago.
    ///
    /// # Errors
    /// A conflict when it is damaged; unavailable when a part of it is at another host.
    pub async fn check_before_backup(
        self: &Arc<Self>,
        id: LayerId,
        work: Arc<Work>,
    ) -> Result<(), Problem> {
        self.run(move |pool| {
            let what = format!("can't back up layer {id}");
            let row = pool.row_with_own_blocks(&what, id)?;
            let layer = pool.open_sealed(&row).map_err(|error| Problem::internal(&what, error))?;
            if !layer.has_files() {
                return Ok(());
            }
            let compared = checksums::compare(&*pool.files, &layer, &work);
            let findings = match compared.map_err(|error| io_problem(&what, &error.into()))? {
                Compared::WithoutChecksums => Vec::new(),
                Compared::DamagedChecksums(findings) | Compared::Data { findings, .. } => findings,
            };
            let Some((range, why)) = findings.into_iter().next() else { return Ok(()) };
            let at = range.map_or(0, |range| range.start);
            let why = format!("it is damaged at offset {at}: {why}");
            Err(Problem::conflict(what, why).next(
                "`perigee volume check` names all damage; restore the volume from an earlier backup, or promote a replica",
            ))
        })
        .await
    }
}

/// What an image has, for a backup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageForBackup {
    /// The size of the disk that a client sees.
    pub size_bytes: u64,
    /// It may not leave its site.
    pub is_confined: bool,
    /// Its layers, topmost first.
    pub chain: Vec<LayerId>,
}

/// The bytes of a volume or an image that come from a backup. Nothing names them yet.
pub struct IncomingVolume {
    temp: TempFile,
    file: Arc<DiskFile>,
    size_bytes: u64,
}

/// The image that an [`IncomingVolume`] is to become.
pub struct IncomingImage {
    what: String,
    name: ImageName,
    layer: LayerId,
    /// Whoever deletes the image ends its restore.
    importing: Importing,
}

/// What becomes of an [`IncomingVolume`].
#[derive(Debug, Clone)]
pub struct NewIncoming {
    /// The volume's name.
    pub name: VolumeName,
    /// The tenant whose space it counts as.
    pub tenant: TenantName,
    /// Whether it may leave its site.
    pub leave_site: LeaveSite,
    /// Whose own disk it is.
    pub owner: Option<OwnerName>,
}

impl NewIncoming {
    /// The volume, whose empty head stands on this layer.
    fn over(&self, layer: &LayerRow) -> NewVolume {
        NewVolume {
            name: self.name.clone(),
            head: LayerRow::new_head(layer.size_bytes, Some(layer.id)),
            epoch: catalog::first_epoch(),
            tenant: self.tenant.clone(),
            cache: CachePolicy::default(),
            owner: self.owner.clone(),
        }
    }
}

impl IncomingVolume {
    /// Writes bytes, or makes a range zeros again if `bytes` is `None`. Blocks the thread.
    ///
    /// # Errors
    /// No space; the disk fails.
    pub fn write(
        &self,
        offset: u64,
        length_bytes: u64,
        bytes: Option<&[u8]>,
    ) -> Result<(), IoError> {
        // What is beyond its end was cut off when a later layer was made.
        let length = length_bytes.min(self.size_bytes.saturating_sub(offset));
        match bytes {
            _ if length == 0 => Ok(()),
            Some(bytes) => Ok(self.file.write_at(offset, &bytes[..index(length)])?),
            None => Ok(self.file.punch_hole(offset, length)?),
        }
    }

    /// What is from here on reads as zeros.
    ///
    /// # Errors
    /// The disk fails.
    pub fn cut(&self, from: u64) -> Result<(), IoError> {
        self.write(from, u64::MAX, None)
    }
}

impl Pool {
    /// Makes room for a volume that comes from a backup.
    ///
    /// # Errors
    /// A conflict when the name is taken; no space.
    pub async fn begin_incoming(
        self: &Arc<Self>,
        name: &VolumeName,
        size_bytes: u64,
    ) -> Result<IncomingVolume, Problem> {
        let name = name.clone();
        self.run(move |pool| {
            let what = format!("can't restore volume {name}");
            pool.check_names_free(&what, std::slice::from_ref(&name))?;
            pool.new_incoming(&what, size_bytes)
        })
        .await
    }

    fn new_incoming(&self, what: &str, size_bytes: u64) -> Result<IncomingVolume, Problem> {
        let size_bytes = Self::layer_size(what, size_bytes)?;
        let temp = self.temp_file();
        let made = new_file(&temp.0).and_then(|file| {
            file.set_len(size_bytes)?;
            Ok(file)
        });
        let file = made.map_err(|error| io_problem(what, &error.into()))?;
        Ok(IncomingVolume { temp, file: Arc::new(DiskFile::from(file)), size_bytes })
    }

    /// An image is about to be made of a backup. Until what this gives is dropped, whoever deletes the image ends the work, as that of an import.
    pub fn begin_restore(&self, name: &ImageName, work: &Arc<Work>) -> Importing {
        self.imports.begin(name, work)
    }

    /// Makes an image of a backup, as an import does. `None`: the image is there already on this layer.
    ///
    /// # Errors
    /// A conflict when the name or the layer is taken; no space.
    pub async fn begin_incoming_image(
        self: &Arc<Self>,
        name: &ImageName,
        layer: LayerId,
        size_bytes: u64,
        importing: Importing,
    ) -> Result<Option<(IncomingVolume, IncomingImage)>, Problem> {
        let what = format!("can't restore image {name}");
        if self.is_imported(&what, name, layer).await? {
            return Ok(None);
        }
        let now = what.clone();
        let incoming = self.run(move |pool| pool.new_incoming(&now, size_bytes)).await?;
        let image = IncomingImage { what, name: name.clone(), layer, importing };
        Ok(Some((incoming, image)))
    }

    /// All bytes are there: they become the image.
    ///
    /// # Errors
    /// As [`Self::begin_incoming_image`]; unavailable when the work was stopped.
    pub async fn finish_incoming_image(
        self: &Arc<Self>,
        incoming: IncomingVolume,
        image: IncomingImage,
        leave_site: LeaveSite,
        work: Arc<Work>,
    ) -> Result<ImageInfo, Problem> {
        let IncomingImage { what, name, layer, importing } = image;
        let IncomingVolume { temp, size_bytes, .. } = incoming;
        let confined = leave_site.is_never();
        self.adopt_new(what, importing, (temp, size_bytes), (&name, layer, confined), work).await?;
        self.image_info(&name).await
    }

    /// All bytes are there: they become a volume on this new layer.
    ///
    /// # Errors
    /// A conflict when the name was taken meanwhile, or there is such a layer; no space; unavailable when the work was stopped.
    pub async fn finish_incoming(
        self: &Arc<Self>,
        incoming: IncomingVolume,
        new: NewIncoming,
        id: LayerId,
        work: Arc<Work>,
    ) -> Result<VolumeInfo, Problem> {
        let name = new.name.clone();
        // As an import: nobody else makes a layer with this id, or a volume with this name.
        self.change(move |pool| {
            let what = format!("can't restore volume {}", new.name);
            pool.check_incoming(&what, &new, id)?;
            let layer = pool.make_incoming(&incoming, &new, id, &work)?;
            let added = pool.catalog.add_volume_on(&layer, &new.over(&layer));
            added.map_err(|error| pool.not_recorded(&what, &[layer.id], &error))?;
            pool.note_sealed();
            Ok::<_, Problem>(())
        })
        .await?;
        self.volume_info(&name).await
    }

    /// Whether the names of what is to be made are free.
    fn check_incoming(&self, what: &str, new: &NewIncoming, id: LayerId) -> Result<(), Problem> {
        self.check_names_free(what, std::slice::from_ref(&new.name))?;
        match self.catalog.has_layer(id).map_err(failed(what))? {
            true => Err(Problem::conflict(what, format!("layer {id} is here already"))),
            false => Ok(()),
        }
    }

    fn make_incoming(
        &self,
        incoming: &IncomingVolume,
        new: &NewIncoming,
        id: LayerId,
        work: &Work,
    ) -> Result<LayerRow, Problem> {
        let what = format!("can't restore volume {}", new.name);
        let size_bytes = incoming.size_bytes;
        let (data_bytes, _) = self.make_layer(&what, &incoming.temp, size_bytes, id, work)?;
        let row = LayerRow::new(id, size_bytes, None);
        Ok(LayerRow { data_bytes: Some(data_bytes), confined: new.leave_site.is_never(), ..row })
    }
}
