//! The space of a pool, its volumes and its images, from the catalog and the open layers. Nothing is
//! opened for this. For a volume that is not open, the space of its head's file on the disk counts.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use perigee_model::upgrade::DaemonVersion;
use perigee_model::volume::{
    BLOCK_BYTES, ImageInfo, ImageSource, PoolInfo, TenantSpace, VolumeHealth, VolumeInfo,
};
use perigee_model::{ImageName, LayerId, LeaveSite, Problem, TenantName, VolumeName};

use crate::catalog::{LayerSpace, NewVolume, Verdict, VolumeRow, failed};
use crate::layers::layer::data_name;
use crate::pool::Pool;

type Spaces = HashMap<LayerId, LayerSpace>;

/// The space of all layers of a chain.
#[derive(Debug, Default)]
struct ChainSpace {
    chain: Vec<LayerId>,
    head_bytes: u64,
    /// The space of the topmost layers down to the first one that something else needs.
    own_bytes: u64,
    shared_bytes: u64,
    remote_bytes: u64,
    poisoned: bool,
    confined: bool,
}

impl LayerSpace {
    /// Whether the layer has more than one user directly above it.
    pub(crate) fn is_shared(&self) -> bool {
        self.named || self.children > 1
    }
}

impl Pool {
    /// # Errors
    /// When the catalog or the filesystem can't be asked.
    pub async fn info(self: &Arc<Self>) -> Result<PoolInfo, Problem> {
        self.run(move |pool| pool.info_now()).await
    }

    fn info_now(&self) -> Result<PoolInfo, Problem> {
        let what = "can't read the state of the pool";
        let disk = nix::sys::statvfs::statvfs(&self.dir)
            .map_err(|error| Problem::internal(what, error))?;
        let spaces = self.catalog.layer_spaces(None).map_err(failed(what))?;
        let volumes = self.catalog.volumes().map_err(failed(what))?;
        let mut tenants = BTreeMap::<TenantName, TenantSpace>::new();
        let mut own_bytes = 0;
        for row in &volumes {
            let space = self.chain_space(&spaces, row.head);
            add(&mut own_bytes, space.own_bytes);
            let tenant = tenants.entry(row.tenant.clone()).or_insert_with(|| TenantSpace {
                tenant: row.tenant.clone(),
                volumes: 0,
                virtual_bytes: 0,
                own_bytes: 0,
            });
            tenant.volumes += 1;
            add(&mut tenant.virtual_bytes, row.size_bytes);
            add(&mut tenant.own_bytes, space.own_bytes);
        }
        let mut data_bytes = 0;
        spaces.iter().for_each(|(id, space)| add(&mut data_bytes, self.layer_bytes(*id, space)));
        Ok(PoolInfo {
            path: self.dir.display().to_string(),
            total_bytes: disk.blocks() * disk.fragment_size(),
            free_bytes: disk.blocks_available() * disk.fragment_size(),
            images: self.catalog.image_names().map_err(failed(what))?.len() as u64,
            volumes: volumes.len() as u64,
            format_version: self.catalog.format_version().map_err(failed(what))?,
            data_bytes,
            shared_bytes: data_bytes.saturating_sub(own_bytes),
            tenants: tenants.into_values().collect(),
            version: Some(DaemonVersion::own()),
        })
    }

    /// All volumes, sorted by name.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn volumes(self: &Arc<Self>) -> Result<Vec<VolumeInfo>, Problem> {
        self.run(move |pool| {
            let what = "can't list the volumes";
            let rows = pool.catalog.volumes().map_err(failed(what))?;
            let spaces = pool.catalog.layer_spaces(None).map_err(failed(what))?;
            Ok(rows.into_iter().map(|row| pool.describe(row, &spaces)).collect())
        })
        .await
    }

    /// # Errors
    /// Not found; or the catalog can't be read.
    pub async fn volume_info(self: &Arc<Self>, name: &VolumeName) -> Result<VolumeInfo, Problem> {
        let name = name.clone();
        self.run(move |pool| {
            let what = format!("can't describe volume {name}");
            let row =
                pool.catalog.volume(&name).map_err(failed(&what))?.ok_or_else(|| {
                    Problem::not_found(&what, "there is no such volume in this pool")
                })?;
            let spaces = pool.catalog.layer_spaces(Some(row.head)).map_err(failed(&what))?;
            Ok(pool.describe(row, &spaces))
        })
        .await
    }

    /// The descriptions of volumes that were just created from one source.
    pub(crate) fn describe_new(&self, volumes: &[NewVolume]) -> rusqlite::Result<Vec<VolumeInfo>> {
        let mut spaces = Spaces::new();
        let mut infos = Vec::new();
        for volume in volumes {
            let head = volume.head.id;
            if spaces.is_empty() {
                spaces = self.catalog.layer_spaces(Some(head))?;
            } else {
                let empty = spaces[&volumes[0].head.id].clone();
                spaces.insert(head, empty);
            }
            let NewVolume { name, head, epoch, tenant, cache, owner } = volume.clone();
            let (head, size_bytes) = (head.id, head.size_bytes);
            let row = VolumeRow { name, head, size_bytes, epoch, tenant, cache, owner };
            infos.push(self.describe(row, &spaces));
        }
        Ok(infos)
    }

    fn describe(&self, row: VolumeRow, spaces: &Spaces) -> VolumeInfo {
        let space = self.chain_space(spaces, row.head);
        let open = self.opened(&row.name);
        let poisoned = space.poisoned || open.as_ref().is_some_and(|volume| volume.is_poisoned());
        VolumeInfo {
            name: row.name,
            size_bytes: row.size_bytes,
            head_bytes: space.head_bytes,
            allocated_bytes: space.own_bytes.saturating_add(space.shared_bytes),
            own_bytes: space.own_bytes,
            shared_bytes: space.shared_bytes,
            remote_bytes: space.remote_bytes,
            chain: space.chain,
            epoch: row.epoch,
            health: if poisoned { VolumeHealth::Poisoned } else { VolumeHealth::Ok },
            sessions: open.map_or(0, |volume| volume.open_sessions()),
            tenant: row.tenant,
            cache: row.cache,
            owner: row.owner,
            leave_site: LeaveSite::confined(space.confined),
        }
    }

    /// The space of the layer `top` and the layers below it. The chain ends at a layer that is not in `spaces`.
    fn chain_space(&self, spaces: &Spaces, top: LayerId) -> ChainSpace {
        let mut found = ChainSpace::default();
        let mut shared = false;
        let mut next = Some(top);
        while let Some((id, space)) = next.and_then(|id| Some((id, spaces.get(&id)?))) {
            let bytes = self.layer_bytes(id, space);
            shared |= space.is_shared();
            found.confined |= space.confined;
            if shared {
                add(&mut found.shared_bytes, bytes);
            } else {
                add(&mut found.own_bytes, bytes);
            }
            if found.chain.is_empty() {
                found.head_bytes = bytes;
                found.poisoned = space.poisoned;
            }
            add(&mut found.remote_bytes, self.remote_bytes(id, space));
            found.chain.push(id);
            // In a damaged catalog a chain may have a cycle.
            next = space.parent.filter(|_| found.chain.len() < spaces.len());
        }
        found
    }

    /// Bytes below a head that are to come here from other hosts. A copy lacks at least one block until the
    /// catalog has it as complete: before that, a power cut may lose what was fetched, and nobody has compared it
    /// with its source.
    pub(crate) fn missing_bytes(&self, head: LayerId) -> rusqlite::Result<u64> {
        let mut missing_bytes = 0;
        for (id, space) in self.catalog.layer_spaces(Some(head))?.iter().filter(|(_, s)| s.is_copy)
        {
            add(&mut missing_bytes, self.remote_bytes(*id, space).max(BLOCK_BYTES));
        }
        Ok(missing_bytes)
    }

    /// Why the background could not fetch them when it last tried, if it could not.
    pub(crate) fn why_missing(&self, head: LayerId) -> rusqlite::Result<Option<String>> {
        let spaces = self.catalog.layer_spaces(Some(head))?;
        let copies = spaces.iter().filter(|(_, space)| space.is_copy);
        // Of several reasons always the same one.
        Ok(copies.filter_map(|(id, _)| self.layer_copy(*id)?.why_not_filled()).min())
    }

    pub(crate) fn layer_bytes(&self, id: LayerId, space: &LayerSpace) -> u64 {
        if let Some(bytes) = space.data_bytes {
            return bytes;
        }
        if let Some(layer) = self.opened_layer(id) {
            return layer.data_bytes();
        }
        self.files.allocated_bytes(&data_name(id)).unwrap_or_else(|error| {
            tracing::warn!(layer = %id, %error, "can't find out how much space a layer takes");
            0
        })
    }

    /// The bytes of the layer that are only on another host.
    fn remote_bytes(&self, id: LayerId, space: &LayerSpace) -> u64 {
        let copy = if space.is_copy { self.layer_copy(id) } else { None };
        copy.map_or(space.remote_bytes, |copy| copy.missing_bytes())
    }

    /// # Errors
    /// Not found; or the catalog can't be read.
    pub async fn image_info(self: &Arc<Self>, name: &ImageName) -> Result<ImageInfo, Problem> {
        let name = name.clone();
        self.run(move |pool| {
            let what = format!("can't describe image {name}");
            let layer =
                pool.catalog.image(&name).map_err(failed(&what))?.ok_or_else(|| {
                    Problem::not_found(&what, "there is no such image in this pool")
                })?;
            pool.describe_image(name.clone(), layer).map_err(failed(&what))
        })
        .await
    }

    pub(crate) fn describe_image(
        &self,
        name: ImageName,
        layer: LayerId,
    ) -> rusqlite::Result<ImageInfo> {
        let rows = self.catalog.chain(layer)?;
        let spaces = self.catalog.layer_spaces(Some(layer))?;
        let space = self.chain_space(&spaces, layer);
        let source = rows.iter().find_map(|row| Some((row.id, row.remote.clone()?)));
        let refused = self.catalog.refused_source(layer)?;
        let remote = source.map(|(id, remote)| ImageSource {
            nbd_addr: remote.nbd_addr,
            export: remote.export,
            keep: remote.keep,
            missing_bytes: space.remote_bytes,
            failed: self.layer_copy(id).and_then(|copy| copy.why_not_filled()),
            refused: refused == Some(Verdict::Deceit),
            unclear: refused == Some(Verdict::Unclear),
        });
        Ok(ImageInfo {
            remote,
            content: self.catalog.content(layer)?,
            name,
            layer,
            size_bytes: rows[0].size_bytes,
            allocated_bytes: space.own_bytes.saturating_add(space.shared_bytes),
            chain: space.chain,
            leave_site: LeaveSite::confined(space.confined),
            children: self.catalog.dependants(layer)?.len() as u64,
            note: String::new(),
        })
    }

    /// All images, sorted by name.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn images(self: &Arc<Self>) -> Result<Vec<ImageInfo>, Problem> {
        self.run(move |pool| {
            let images = pool.catalog.images().map(|images| {
                images.into_iter().map(|(name, layer)| pool.describe_image(name, layer)).collect()
            });
            images.and_then(|infos| infos).map_err(failed("can't list the images"))
        })
        .await
    }

    /// The names that can be exported: volumes, attached volumes and images.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn names(self: &Arc<Self>) -> Result<(Vec<VolumeName>, Vec<ImageName>), Problem> {
        self.run(move |pool| {
            let read = || -> rusqlite::Result<_> {
                let mut volumes = pool.catalog.volume_names()?;
                volumes.extend(pool.catalog.attachments()?.into_iter().map(|(name, _)| name));
                Ok((volumes, pool.catalog.image_names()?))
            };
            read().map_err(failed("can't list the pool's names"))
        })
        .await
    }
}

/// Adds without overflow, because a damaged catalog may have any numbers.
fn add(total: &mut u64, bytes: u64) {
    *total = total.saturating_add(bytes);
}
