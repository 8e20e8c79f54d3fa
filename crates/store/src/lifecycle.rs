//! Creating, cloning, sealing and deleting volumes and images.
//!
//! Each of these is one transaction of the catalog, because a new head has no files before its first
//! write. A deletion first changes the catalog; after a crash, the next start removes the files. What becomes of the layer
//! of a deleted snapshot says [`crate::upkeep::compact`].

use std::collections::HashSet;
use std::sync::Arc;

use perigee_block::lease::NO_HOST;
use perigee_model::limits::NEW_VOLUMES;
use perigee_model::units::format_bytes;
use perigee_model::volume::{
    ContentDigest, CreateVolume, CreateVolumes, DeletedImage, ImageInfo, Keep, Resize, Snapshot,
    VolumeInfo, VolumeSource,
};
use perigee_model::{ImageName, LayerId, OwnerName, Problem, VolumeName};

use crate::catalog::{self, LayerRow, NewVolume, RemoteRow, failed};
use crate::layers::layer;
use crate::pool::Pool;
use crate::volume::{Volume, io_problem};

/// The parent of a new head.
struct Base {
    size_bytes: u64,
    parent: Option<LayerId>,
    remote: Option<RemoteRow>,
    /// What is made of it is confined too. If it stands on a layer, that layer's mark says so, and this is false.
    confined: bool,
}

impl Base {
    fn volume(&self, name: &VolumeName, size_bytes: u64, request: &CreateVolumes) -> NewVolume {
        let remote = self.remote.clone();
        let confined = self.confined || request.leave_site.is_never();
        NewVolume {
            name: name.clone(),
            head: LayerRow { remote, confined, ..LayerRow::new_head(size_bytes, self.parent) },
            epoch: catalog::first_epoch(),
            tenant: request.tenant.clone(),
            cache: request.cache,
            owner: request.owner.clone(),
        }
    }
}

impl Pool {
    /// # Errors
    /// A conflict when the name is taken; not found when the source does not exist; no space; unavailable
    /// when a remote parent does not answer.
    pub async fn create_volume(
        self: &Arc<Self>,
        request: CreateVolume,
    ) -> Result<VolumeInfo, Problem> {
        let mut made = self.create_volumes(request.into()).await?;
        Ok(made.remove(0))
    }

    /// Creates many volumes in one transaction.
    ///
    /// # Errors
    /// As [`Self::create_volume`]. After an error none of the volumes exists.
    pub async fn create_volumes(
        self: &Arc<Self>,
        request: CreateVolumes,
    ) -> Result<Vec<VolumeInfo>, Problem> {
        let what = match &request.names[..] {
            [] => return Err(Problem::invalid("can't create volumes", "no name is given")),
            [name] => format!("can't create volume {name}"),
            [first, ..] => format!("can't create {} volumes like {first}", request.names.len()),
        };
        NEW_VOLUMES.check(request.names.len()).map_err(|error| error.problem(&what))?;
        // This comes before the lock, because the other host may be slow.
        let remote = match &request.source {
            VolumeSource::Remote { nbd_addr, export } => {
                Some(self.remote_row(&what, nbd_addr, export).await?)
            }
            _ => None,
        };
        if let VolumeSource::Volume(source) = &request.source {
            self.flush_before_sealing(&what, source).await?;
        }
        let guard = self.changes().await;
        let sealed = match &request.source {
            VolumeSource::Volume(source) => {
                let (now, names) = (what.clone(), request.names.clone());
                self.run(move |pool| pool.check_names_free(&now, &names)).await?;
                Some(self.volume_base(&what, source, request.size_bytes).await?)
            }
            _ => None,
        };
        self.run(move |pool| {
            let _guard = guard;
            pool.check_names_free(&what, &request.names)?;
            let base = match (&request.source, remote, sealed) {
                (_, _, Some(base)) => base,
                (_, Some((row, confined)), _) => {
                    Base { size_bytes: row.size_bytes, parent: None, remote: Some(row), confined }
                }
                (VolumeSource::Image(image), ..) => pool.image_base(&what, image)?,
                _ => Base { size_bytes: 0, parent: None, remote: None, confined: false },
            };
            let size_bytes = head_size(&what, &base, request.size_bytes)?;
            let volume = |name| base.volume(name, size_bytes, &request);
            let volumes: Vec<_> = request.names.iter().map(volume).collect();
            pool.catalog.add_volumes(&volumes).map_err(failed(&what))?;
            pool.describe_new(&volumes).map_err(failed(&what))
        })
        .await
    }

    /// Looks up an export of another host that is to be read without keeping blocks, and whether it may
    /// not leave its site.
    pub(crate) async fn remote_row(
        &self,
        what: &str,
        nbd_addr: &str,
        export: &str,
    ) -> Result<(RemoteRow, bool), Problem> {
        let connected = (self.connect.connect)(nbd_addr.to_owned(), export.to_owned());
        let device = connected.await.map_err(|error| Problem::unavailable(what, error))?;
        let row = RemoteRow {
            nbd_addr: nbd_addr.to_owned(),
            export: export.to_owned(),
            size_bytes: device.size_bytes(),
            keep: Keep::Never,
            is_layer: device.layer(),
            own: false,
        };
        Ok((row, device.is_confined()))
    }

    pub(crate) fn check_names_free(&self, what: &str, names: &[VolumeName]) -> Result<(), Problem> {
        let attached = self.catalog.attachments().map_err(failed(what))?;
        let attached: HashSet<_> = attached.into_iter().map(|(name, _)| name).collect();
        let mut asked = HashSet::new();
        for name in names {
            if self.catalog.volume(name).map_err(failed(what))?.is_some() {
                return Err(Problem::conflict(what, format!("a volume {name} exists already")));
            }
            if attached.contains(name) {
                let why = format!("a volume {name} of another host is attached here");
                return Err(Problem::conflict(what, why).next(
                    "choose another name; if that volume was deleted, try again in a minute",
                ));
            }
            if !asked.insert(name) {
                return Err(Problem::invalid(what, format!("{name} is named twice")));
            }
        }
        Ok(())
    }

    fn image_base(&self, what: &str, image: &ImageName) -> Result<Base, Problem> {
        let (layer, size_bytes) = self.image_layer(what, image)?;
        Ok(Base { size_bytes, parent: Some(layer), remote: None, confined: false })
    }

    /// An image's topmost layer, and its size.
    pub(crate) fn image_layer(
        &self,
        what: &str,
        image: &ImageName,
    ) -> Result<(LayerId, u64), Problem> {
        let layer = self.catalog.image(image).map_err(failed(what))?.ok_or_else(|| {
            Problem::not_found(what, format!("this pool has no image {image}"))
                .next("import it first")
        })?;
        let rows = self.catalog.chain(layer).map_err(failed(what))?;
        Ok((layer, rows[0].size_bytes))
    }

    /// Seals the source's head without a name. A head to which nothing was written is not sealed: the clone
    /// then uses the layer below, so that many clones of an idle volume make no deep chain.
    async fn volume_base(
        self: &Arc<Self>,
        what: &str,
        source: &VolumeName,
        size_bytes: Option<u64>,
    ) -> Result<Base, Problem> {
        let volume = self.volume(source).await?;
        // The size is checked before the source is changed. The volume can't be resized at the same time,
        // because the caller holds the lock `changes`.
        let (now, name) = (what.to_owned(), source.clone());
        let confined = self.run(move |pool| pool.is_volume_confined(&now, &name)).await?;
        let whole = Base { size_bytes: volume.size_bytes(), parent: None, remote: None, confined };
        head_size(what, &whole, size_bytes)?;
        let (pool, what_now, source) = (Arc::clone(self), what.to_owned(), source.clone());
        volume
            .replace_stack(what, move |stack| {
                // If the layer below is larger than the volume, the clone must not see its end.
                let below = stack.below.layers().next().filter(|below| {
                    stack.head.is_untouched() && below.blocks() <= stack.head.layer.blocks()
                });
                if let Some(below) = below {
                    return Ok((None, Base { parent: Some(below.id), ..whole }));
                }
                let sealed = stack.head.layer.id;
                let new = pool.seal(&what_now, &source, whole.size_bytes, stack, None)?;
                Ok((Some(new), Base { parent: Some(sealed), ..whole }))
            })
            .await
    }

    /// Removes the files of layers that are not in the catalog. Failures are tried again at the next start.
    pub(crate) fn remove_layers(&self, layers: &[LayerId]) {
        for layer in layers {
            if let Err(error) = layer::remove(&*self.files, *layer) {
                tracing::warn!(%layer, %error, "can't remove a deleted layer's files");
            }
        }
    }

    /// Removes the files of layers that the catalog failed to record. If it is not known whether it recorded
    /// them, the files stay, and the next start finds out.
    pub(crate) fn not_recorded(
        &self,
        what: &str,
        layers: &[LayerId],
        error: &rusqlite::Error,
    ) -> Problem {
        if error.sqlite_error_code() != Some(rusqlite::ErrorCode::SystemIoFailure) {
            self.remove_layers(layers);
        }
        catalog::problem(what, error)
    }

    /// Seals the volume's head under a name, while it is in use.
    ///
    /// # Errors
    /// A conflict when the name is taken; no space for the new head; the flush failed.
    pub async fn snapshot(
        self: &Arc<Self>,
        volume: &VolumeName,
        request: Snapshot,
    ) -> Result<ImageInfo, Problem> {
        let what = format!("can't snapshot volume {volume} as {}", request.image);
        self.flush_before_sealing(&what, volume).await?;
        let guard = self.changes().await;
        let opened = self.volume(volume).await?;
        let size_bytes = opened.size_bytes();
        let (pool, name, image) = (Arc::clone(self), volume.clone(), request.image.clone());
        let what_now = what.clone();
        opened
            .replace_stack(&what, move |stack| {
                if pool.catalog.image(&image).map_err(failed(&what_now))?.is_some() {
                    return Err(Problem::conflict(
                        what_now,
                        "an image with that name exists already",
                    ));
                }
                let new = pool.seal(&what_now, &name, size_bytes, stack, Some(&image))?;
                // The lock is released when the volume has its new layers.
                Ok((Some(new), guard))
            })
            .await?;
        self.image_info(&request.image).await
    }

    /// Changes a volume's size, also while it is in use: its head is sealed, and a head with the new size is
    /// put on it. A layer hides everything below it beyond its own end, so added space reads as zeros.
    ///
    /// # Errors
    /// Shrinking is invalid unless `shrink` is set, and a conflict while sessions are open.
    pub async fn resize_volume(
        self: &Arc<Self>,
        name: &VolumeName,
        request: Resize,
    ) -> Result<VolumeInfo, Problem> {
        let what = format!("can't resize volume {name} to {}", format_bytes(request.size_bytes));
        let size_bytes = Self::layer_size(&what, request.size_bytes)?;
        self.flush_before_sealing(&what, name).await?;
        let guard = self.changes().await;
        let volume = self.volume(name).await?;
        let (pool, resized, now) = (Arc::clone(self), Arc::clone(&volume), what.clone());
        volume
            .replace_stack(&what, move |stack| {
                let old_bytes = stack.size_bytes();
                if size_bytes == old_bytes {
                    return Ok((None, guard));
                }
                if size_bytes < old_bytes {
                    check_shrink(&now, old_bytes, request.shrink, resized.open_sessions())?;
                }
                let new = pool.seal(&now, resized.name(), size_bytes, stack, None)?;
                // The lock is released when the volume has its new layers.
                Ok((Some(new), guard))
            })
            .await?;
        // What was cut off reads as zeros when the volume grows again, on every host.
        volume.end_leases(NO_HOST).await.map_err(|error| io_problem(&what, &error))?;
        self.volume_info(name).await
    }

    /// Deletes an image's name at once. If something stands on its layer, the layer is merged into that in the
    /// background, as soon as only one chain needs it.
    ///
    /// # Errors
    /// A conflict, with their names, when volumes that departed from here stand on it, or when it is a copy that is
    /// not complete and something stands on it: other hosts are still needed for them.
    pub async fn delete_image(self: &Arc<Self>, name: &ImageName) -> Result<DeletedImage, Problem> {
        let was_imported = self.imports.stop(name).await?;
        let name = name.clone();
        self.change(move |pool| {
            let what = format!("can't delete image {name}");
            let Some(layer) = pool.catalog.image(&name).map_err(failed(&what))? else {
                let why = "there is no such image in this pool";
                return match was_imported {
                    true => Ok(DeletedImage::default()),
                    false => Err(Problem::not_found(&what, why)),
                };
            };
            let rows = pool.catalog.chain(layer).map_err(failed(&what))?;
            let on_it = pool.catalog.dependants(layer).map_err(failed(&what))?;
            let departed = pool.catalog.departed_dependants(layer).map_err(failed(&what))?;
            if rows[0].is_copy() && !on_it.is_empty() {
                let why = format!(
                    "{} on it, and this copy of it is not complete",
                    names_and_verb(&on_it, "stands", "stand")
                );
                return Err(Problem::conflict(what, why).next("delete them first"));
            }
            if !departed.is_empty() {
                let why = format!("{} on it", names_and_verb(&departed, "depends", "depend"));
                return Err(Problem::conflict(what, why)
                    .next("wait until their new homes have copied all of them"));
            }
            pool.delete_image_now(&what, &name)?;
            Ok(DeletedImage { stands_on_it: on_it })
        })
        .await
    }

    /// Deletes an image if it is a copy of this layer of which nothing may be made ([`ImageInfo::is_bad`]).
    ///
    /// # Errors
    /// A conflict if the copy is another one, or good; as [`Pool::delete_image`].
    pub async fn delete_bad_copy(
        self: &Arc<Self>,
        name: &ImageName,
        copy_of: LayerId,
        wanted: Option<ContentDigest>,
    ) -> Result<(), Problem> {
        let name = name.clone();
        self.change(move |pool| {
            let what = format!("can't delete the copy of image {name}");
            let Some(layer) = pool.catalog.image(&name).map_err(failed(&what))? else {
                return Err(Problem::not_found(&what, "there is no such image in this pool"));
            };
            let info = pool.describe_image(name.clone(), layer).map_err(failed(&what))?;
            if layer != copy_of || !info.is_bad(wanted) {
                let why = "it is another one, or good, by now";
                return Err(Problem::conflict(what, why).next("look at it again"));
            }
            let on_it = pool.catalog.dependants(layer).map_err(failed(&what))?;
            if !on_it.is_empty() {
                let why = format!("{} on it", names_and_verb(&on_it, "depends", "depend"));
                return Err(Problem::conflict(what, why).next("delete them first"));
            }
            pool.delete_image_now(&what, &name)
        })
        .await
    }

    /// The caller holds the lock `changes`.
    fn delete_image_now(&self, what: &str, name: &ImageName) -> Result<(), Problem> {
        let unneeded = self.catalog.delete_image(name).map_err(failed(what))?;
        self.drop_copies(&unneeded);
        self.remove_layers(&unneeded);
        // Its layer, or one below it, may be free to be merged now.
        self.note_sealed();
        Ok(())
    }

    /// # Errors
    /// A conflict while sessions are open.
    pub async fn delete_volume(self: &Arc<Self>, name: &VolumeName) -> Result<(), Problem> {
        self.delete_volume_of(name, None).await
    }

    /// Deletes the volume. With an owner, only if the volume has this owner; another volume with the same
    /// name is left alone.
    ///
    /// # Errors
    /// As [`Pool::delete_volume`].
    pub async fn delete_volume_of(
        self: &Arc<Self>,
        name: &VolumeName,
        owner: Option<OwnerName>,
    ) -> Result<(), Problem> {
        let guard = self.changes().await;
        if let Some(owner) = owner {
            let named = name.clone();
            self.run(move |pool| pool.check_owner(&named, &owner)).await?;
        }
        let closed = name.clone();
        let opened = self.run(move |pool| pool.delete_closed(&closed)).await?;
        let Some(volume) = opened else { return Ok(()) };
        let (pool, name) = (Arc::clone(self), name.clone());
        volume
            .delete_with(move || {
                let _guard = guard;
                let what = format!("can't delete volume {name}");
                let unneeded = pool.catalog.delete_volume(&name).map_err(failed(&what))?;
                pool.forget_volume(&name);
                pool.drop_copies(&unneeded);
                pool.remove_layers(&unneeded);
                pool.note_sealed();
                Ok(())
            })
            .await?;
        // The space of its files is free when they are closed.
        drop(volume);
        self.run(|pool| {
            pool.catalog.keep_reserve();
            Ok(())
        })
        .await
    }
}

impl Pool {
    fn check_owner(&self, name: &VolumeName, owner: &OwnerName) -> Result<(), Problem> {
        let what = format!("can't delete volume {name}");
        match self.catalog.volume(name).map_err(failed(&what))? {
            Some(row) if row.owner.as_ref() == Some(owner) => Ok(()),
            _ => Err(Problem::not_found(
                what,
                format!("{owner} has no volume with this name in this pool"),
            )),
        }
    }

    /// Deletes a volume that is not open, without opening it, so that a volume with damaged files can be
    /// deleted. If the volume is open, it is returned and not deleted.
    fn delete_closed(&self, name: &VolumeName) -> Result<Option<Arc<Volume>>, Problem> {
        let what = format!("can't delete volume {name}");
        let mut unneeded = Vec::new();
        let opened = self.unless_opened(name, || {
            if self.catalog.volume(name).map_err(failed(&what))?.is_none() {
                return Err(Problem::not_found(&what, "there is no such volume in this pool"));
            }
            unneeded = self.catalog.delete_volume(name).map_err(failed(&what))?;
            Ok(())
        })?;
        self.drop_copies(&unneeded);
        self.remove_layers(&unneeded);
        self.note_sealed();
        Ok(opened)
    }
}

/// For example: `volume a, volume b stand`.
fn names_and_verb(names: &[String], one: &str, several: &str) -> String {
    format!("{} {}", names.join(", "), if names.len() == 1 { one } else { several })
}

fn check_shrink(what: &str, old_bytes: u64, shrink: bool, sessions: u64) -> Result<(), Problem> {
    if !shrink {
        let why = format!(
            "it has {}; the data beyond the new end would be lost",
            format_bytes(old_bytes)
        );
        return Err(Problem::invalid(what, why)
            .next("shrink the filesystem in it first, then use --shrink"));
    }
    if sessions > 0 {
        let why = format!("it can't shrink while it is in use; open sessions: {sessions}");
        return Err(Problem::conflict(what, why).next("stop what uses it"));
    }
    Ok(())
}

/// The size of a new head, which is at least its parent's.
fn head_size(what: &str, base: &Base, asked_bytes: Option<u64>) -> Result<u64, Problem> {
    let size_bytes = Pool::layer_size(what, asked_bytes.unwrap_or(base.size_bytes))?;
    if size_bytes < base.size_bytes {
        let [size, least] = [size_bytes, base.size_bytes].map(format_bytes);
        let why = format!("a size of {size} is less than the source's {least}");
        return Err(Problem::invalid(what, why).next("leave the size out, or give a larger one"));
    }
    Ok(size_bytes)
}
