//! A pool: one directory with a catalog and the layers' files, open in one process at a time.

pub(crate) mod doubt;
pub(crate) mod imports;
pub(crate) mod pulls;

use std::collections::{HashMap, HashSet};
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use perigee_block::device::Device;
use perigee_block::lease::{HostTag, Lease};
use perigee_block::locking::lock;
use perigee_model::limits::{OutOfLimits, VOLUME_BYTES};
use perigee_model::volume::BLOCK_BYTES;
use perigee_model::{Epoch, ImageName, LayerId, Problem, VolumeName};
use tokio::sync::{Notify, OwnedMutexGuard};
use uuid::Uuid;

use crate::blocking::blocking;
use crate::catalog::{self, Catalog, LayerRow, OpenError, RemoteRow, failed};
use crate::disk::files::LayerFiles;
use crate::layers::chain::{Link, Sealed};
use crate::layers::checksums;
use crate::layers::copy::{LayerCopy, Waiting};
use crate::layers::directories::Directories;
use crate::layers::head::{Head, HeadHome};
use crate::layers::layer::{Layer, LayerError, live_name};
use crate::layers::remote::{Connector, RemoteParent};
use crate::pool::doubt::Doubt;
use crate::pool::imports::Imports;
use crate::pool::pulls::Pulls;
use crate::volume::session::{OwnDevice, SealedDevice, SumsDevice};
use crate::volume::visible_checksums::VisibleSums;
use crate::volume::{Stack, Volume, io_problem};
use crate::work::Work;

/// The directories of a pool, and the connection to other hosts.
pub struct PoolConfig {
    /// The directory for new layers of volumes; by default the pool's directory.
    pub private: Option<PathBuf>,
    /// The pool's directory. It is created if it does not exist.
    pub dir: PathBuf,
    /// How exports of other hosts are opened.
    pub connect: Connector,
}

/// How long whoever copies a layer waits for its checksums: less than the 5 s after which NBD's client gives up, so that it hears
/// why. The last layer of a move is small.
const CHECKSUMS_WAIT: Duration = Duration::from_secs(3);
const CHECKSUMS_AGAIN: Duration = Duration::from_millis(50);

/// The open volumes and layers.
#[derive(Default)]
pub(crate) struct Open {
    volumes: HashMap<VolumeName, Arc<Volume>>,
    layers: HashMap<LayerId, Weak<Layer>>,
    /// The shared chains of sealed layers, by their topmost layer.
    sealed: HashMap<LayerId, Weak<Sealed>>,
    /// The copies that are not complete.
    copies: HashMap<LayerId, Arc<LayerCopy>>,
}

impl Open {
    /// Stops sharing these layers and the chains that contain one of them.
    fn forget_layers(&mut self, gone: &[LayerId]) {
        self.layers.retain(|id, _| !gone.contains(id));
        self.sealed
            .retain(|_, sealed| sealed.upgrade().is_some_and(|sealed| !sealed.has_any(gone)));
    }
}

/// One directory of layers, images and volumes.
pub struct Pool {
    pub(crate) dir: PathBuf,
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) files: Arc<dyn LayerFiles>,
    pub(crate) connect: Connector,
    pub(crate) home: Arc<HeadHome>,
    open: Mutex<Open>,
    opened_at: Instant,
    /// Serializes creating, sealing and deleting.
    pub(crate) changes: Arc<tokio::sync::Mutex<()>>,
    /// Notified when a layer without checksums was added.
    pub(crate) sealed: Notify,
    /// Notified when layers may be free to be merged.
    pub(crate) to_merge: Notify,
    /// The layers whose checksums are being computed.
    pub(crate) checksumming: Mutex<HashSet<LayerId>>,
    /// Notified when a copy is to be completed.
    pub(crate) to_fill: Notify,
    /// Of copies that were not what they have to be.
    pub(crate) doubts: Mutex<HashMap<LayerId, Doubt>>,
    /// Layers that were staged for a volume that may come here.
    pub(crate) staged: Mutex<HashMap<VolumeName, Vec<LayerId>>>,
    /// Rounds of replicas.
    pub(crate) pulls: Mutex<Pulls>,
    waiting: Arc<Waiting>,
    pub(crate) imports: Arc<Imports>,
    /// The computing of checksums for which other hosts have asked.
    asked: Work,
    /// Keeps other servers out.
    _lock: Flock<File>,
}

/// The kernel's id of this boot.
fn boot_id() -> std::io::Result<Uuid> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    text.trim().parse().map_err(std::io::Error::other)
}

fn head_home(files: &Arc<dyn LayerFiles>, boot: Uuid, catalog: &Arc<Catalog>) -> HeadHome {
    let catalog = Arc::clone(catalog);
    let record_touched = move |layer| catalog.touched(layer).map_err(catalog::io_error);
    HeadHome { files: Arc::clone(files), boot, record_touched: Box::new(record_touched) }
}

/// A catalog that no other process has open.
struct Locked {
    catalog: Catalog,
    lock: Flock<File>,
}

impl Locked {
    fn open(what: &str, dir: &Path) -> Result<Self, Problem> {
        let lock_file =
            File::create(dir.join("lock")).map_err(|error| Problem::invalid(what, error))?;
        let lock =
            Flock::lock(lock_file, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| {
                match error {
                    nix::Error::EWOULDBLOCK => {
                        Problem::conflict(what, "another process has it open").next(
                            "stop the other volume server, or give this one a pool of its own",
                        )
                    }
                    error => Problem::internal(what, error),
                }
            })?;
        let path = dir.join("catalog.sqlite");
        let catalog = Catalog::open(&path).map_err(|error| match error {
            OpenError::Newer { .. } => Problem::conflict(what, error)
                .next("open it with the version of perigee that wrote it, or a newer one"),
            OpenError::Sqlite(error) => catalog::open_problem(what, &error, &path),
            OpenError::Io(error) => Problem::internal(what, error),
        })?;
        Ok(Self { catalog, lock })
    }
}

impl Pool {
    /// Where traces of its volumes are kept.
    pub fn traces_dir(&self) -> PathBuf {
        self.dir.join("traces")
    }

    /// Opens the pool in a directory, and creates it if it does not exist.
    ///
    /// # Errors
    /// A conflict when another process has it open.
    pub async fn open(config: PoolConfig) -> Result<Arc<Self>, Problem> {
        blocking(move || {
            let pool = Self::open_dir(config)?;
            pool.tidy()?;
            Ok(Arc::new(pool))
        })
        .await
    }

    /// As [`Self::open`], but does not remove unneeded files.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn open_as_is(config: PoolConfig) -> Result<Arc<Self>, Problem> {
        blocking(move || Self::open_dir(config).map(Arc::new)).await
    }

    fn open_dir(config: PoolConfig) -> Result<Self, Problem> {
        let what = format!("can't open the pool {}", config.dir.display());
        let own = config.dir.join("layers");
        let closed = Permissions::from_mode(0o700);
        std::fs::create_dir_all(&own)
            .and_then(|()| std::fs::set_permissions(&config.dir, closed))
            .map_err(|error| Problem::invalid(&what, error))?;
        let boot = boot_id().map_err(|error| Problem::internal(&what, error))?;
        let locked = Locked::open(&what, &config.dir)?;
        let directories =
            Directories::open(&what, own, &locked.catalog, config.private.as_deref())?;
        Ok(Self::assemble(config, locked, Arc::new(directories), boot))
    }

    /// As [`Self::open`], with given layer files and a given boot id.
    #[cfg(test)]
    pub(crate) fn open_with(
        config: PoolConfig,
        files: Arc<dyn LayerFiles>,
        boot: Uuid,
    ) -> Result<Arc<Self>, Problem> {
        let what = format!("can't open the pool {}", config.dir.display());
        let locked = Locked::open(&what, &config.dir)?;
        let pool = Self::assemble(config, locked, files, boot);
        pool.tidy()?;
        Ok(Arc::new(pool))
    }

    fn tidy(&self) -> Result<(), Problem> {
        let what = || format!("can't clean up the pool {}", self.dir.display());
        self.catalog.drop_all_staged().map_err(failed(&what()))?;
        self.remove_leftovers().map_err(|error| Problem::internal(what(), error))
    }

    fn assemble(
        config: PoolConfig,
        locked: Locked,
        files: Arc<dyn LayerFiles>,
        boot: Uuid,
    ) -> Self {
        let catalog = Arc::new(locked.catalog);
        Self {
            dir: config.dir,
            home: Arc::new(head_home(&files, boot, &catalog)),
            catalog,
            files,
            connect: config.connect,
            open: Mutex::default(),
            opened_at: Instant::now(),
            changes: Arc::default(),
            sealed: Notify::new(),
            to_merge: Notify::new(),
            checksumming: Mutex::default(),
            to_fill: Notify::new(),
            doubts: Mutex::default(),
            staged: Mutex::default(),
            pulls: Mutex::default(),
            waiting: Arc::default(),
            imports: Arc::default(),
            asked: Work::default(),
            _lock: locked.lock,
        }
    }

    /// Runs work on the catalog or on files on another thread. See [`blocking`].
    pub(crate) async fn run<T, E>(
        self: &Arc<Self>,
        work: impl FnOnce(&Arc<Self>) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: Send + 'static,
    {
        let pool = Arc::clone(self);
        blocking(move || work(&pool)).await
    }

    /// Takes the lock `changes`. Who holds it works on this pool only and waits for no other host, so there is no
    /// deadline; [`Self::wait_for_changes`] has one, for callers that are asked again.
    pub(crate) async fn changes(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.changes).lock_owned().await
    }

    /// As [`Self::run`], under the lock `changes`.
    pub(crate) async fn change<T, E>(
        self: &Arc<Self>,
        work: impl FnOnce(&Arc<Self>) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: Send + 'static,
    {
        let guard = self.changes().await;
        self.run(move |pool| {
            let _guard = guard;
            work(pool)
        })
        .await
    }

    /// Removes files that a killed server has left unfinished, and live maps of sealed layers.
    fn remove_leftovers(&self) -> io::Result<()> {
        self.unneeded_files()?.iter().try_for_each(|name| self.files.remove(name))
    }

    /// The files that belong to no layer of the catalog.
    pub(crate) fn unneeded_files(&self) -> io::Result<HashSet<String>> {
        // The files are listed before the catalog: a layer that is made at the same time has its files
        // before it is in the catalog.
        let names = self.files.names()?;
        let layers = self.catalog.layers().map_err(io::Error::other)?;
        let heads: HashMap<LayerId, bool> =
            layers.into_iter().map(|(row, head)| (row.id, head || row.is_copy())).collect();
        let unneeded = |name: &String| {
            let layer = name.split('.').next().and_then(|stem| stem.parse::<LayerId>().ok());
            let head = layer.and_then(|layer| Some((layer, heads.get(&layer)?)));
            head.is_none_or(|(layer, head)| !head && *name == live_name(layer))
        };
        Ok(names.into_iter().filter(unneeded).collect())
    }

    /// A volume of this pool. It is opened if it is not open yet.
    ///
    /// # Errors
    /// Not found, or its layers can't be read.
    pub async fn volume(self: &Arc<Self>, name: &VolumeName) -> Result<Arc<Volume>, Problem> {
        let name = name.clone();
        self.run(move |pool| pool.volume_now(&name)).await
    }

    pub(crate) fn volume_now(&self, name: &VolumeName) -> Result<Arc<Volume>, Problem> {
        let what = format!("can't open volume {name}");
        self.with_open(&what, |open| match open.volumes.get(name) {
            Some(volume) => Ok(Arc::clone(volume)),
            None => self.open_volume(&what, name, open),
        })
    }

    /// Runs `work` with the lock on the open volumes. If `work` panics, the lock is released properly and
    /// only this request fails; the open volumes stay usable.
    pub(crate) fn with_open<T>(
        &self,
        what: &str,
        work: impl FnOnce(&mut Open) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        let mut open = lock(&self.open);
        // `work` adds only complete entries to the table, so a panic leaves it consistent.
        catch_unwind(AssertUnwindSafe(|| work(&mut open))).unwrap_or_else(|_| {
            let why = "the program has a fault, which its log describes";
            Err(Problem::internal(what, why).next("report it with the log of the volume server"))
        })
    }

    fn open_volume(
        &self,
        what: &str,
        name: &VolumeName,
        open: &mut Open,
    ) -> Result<Arc<Volume>, Problem> {
        let row = self
            .catalog
            .volume(name)
            .map_err(failed(what))?
            .ok_or_else(|| Problem::not_found(what, "there is no such volume in this pool"))?;
        let rows = self.catalog.chain(row.head).map_err(failed(what))?;
        let head = Head::open(&self.home, row.head, row.size_bytes, rows[0].untouched)
            .map_err(|error| match error.source.passes() {
                true => Problem::unavailable(what, error).next("try again"),
                false => Problem::internal(what, error),
            })?
            .with_cache(row.cache);
        match (&rows[0].poisoned, head.poisoned()) {
            (Some(why), _) => drop(head.poison(why.clone())),
            // The server that saw the failure was killed before it recorded it in the catalog.
            (None, Some(why)) => {
                if let Err(error) = self.catalog.poison(row.head, why) {
                    tracing::error!(volume = %name, %error, "can't record that a flush failed");
                }
            }
            (None, None) => {}
        }
        let below = self
            .sealed(open, &rows[1..], rows[0].remote.clone())
            .map_err(|error| Problem::internal(what, error))?;
        let stack = Stack { head: Arc::new(head), below };
        let catalog = Arc::clone(&self.catalog);
        let holder = catalog.lease(name).map_err(failed(what))?;
        let lease = Lease::remembered(holder);
        let volume = Volume::new(name.clone(), row.epoch, stack, catalog, lease);
        let volume = Arc::new(volume);
        open.layers.insert(row.head, Arc::downgrade(&volume.stack().head.layer));
        open.volumes.insert(name.clone(), Arc::clone(&volume));
        Ok(volume)
    }

    /// The sealed layers of a chain as one object, which is shared by all users of the topmost layer. `remote`
    /// is the parent of a chain without sealed layers.
    fn sealed(
        &self,
        open: &mut Open,
        rows: &[LayerRow],
        remote: Option<RemoteRow>,
    ) -> Result<Arc<Sealed>, LayerError> {
        let top = rows.first().map(|row| row.id);
        if let Some(shared) = top.and_then(|top| open.sealed.get(&top)).and_then(Weak::upgrade) {
            return Ok(shared);
        }
        let mut links = Vec::new();
        for row in rows {
            let shared = open.layers.get(&row.id).and_then(Weak::upgrade);
            let (layer, copy) = match shared {
                _ if row.is_copy() => {
                    let copy = self.open_copy(open, row)?;
                    (Arc::clone(copy.layer()), Some(copy))
                }
                Some(layer) => (layer, None),
                None => (Arc::new(self.open_sealed(row)?), None),
            };
            open.layers.insert(row.id, Arc::downgrade(&layer));
            links.push(Link { layer, copy });
        }
        let export =
            rows.last().map_or(remote, |row| row.remote.clone().filter(|_| !row.is_copy()));
        let export = export.map(|row| Arc::new(RemoteParent::new(row, &self.connect)));
        let sealed = Arc::new(Sealed::new(links, export));
        if let Some(top) = top {
            open.sealed.insert(top, Arc::downgrade(&sealed));
        }
        open.layers.retain(|_, layer| layer.strong_count() > 0);
        open.sealed.retain(|_, sealed| sealed.strong_count() > 0);
        Ok(sealed)
    }

    /// A copy that gets its blocks from another host, as one object that all its readers share.
    fn open_copy(&self, open: &mut Open, row: &LayerRow) -> Result<Arc<LayerCopy>, LayerError> {
        if let Some(copy) = open.copies.get(&row.id) {
            return Ok(Arc::clone(copy));
        }
        let remote = row.remote.clone().expect("a copy has a remote parent");
        self.open_copy_over(open, row, Arc::new(RemoteParent::new(remote, &self.connect)))
    }

    fn open_copy_over(
        &self,
        open: &mut Open,
        row: &LayerRow,
        remote: Arc<RemoteParent>,
    ) -> Result<Arc<LayerCopy>, LayerError> {
        let head = self.copy_head(row)?;
        let copy = Arc::new(LayerCopy::new(head, remote, Arc::clone(&self.waiting)));
        open.copies.insert(row.id, Arc::clone(&copy));
        Ok(copy)
    }

    /// Opens a copy that was just made, with the connection over which its map came.
    pub(crate) fn open_new_copy(
        &self,
        row: &LayerRow,
        remote: RemoteParent,
    ) -> Result<(), LayerError> {
        let mut open = lock(&self.open);
        self.open_copy_over(&mut open, row, Arc::new(remote)).map(drop)
    }

    /// A copy. It is opened if it is not open yet. `None` if the layer is not a copy or can't be opened.
    pub(crate) fn layer_copy(&self, id: LayerId) -> Option<Arc<LayerCopy>> {
        let mut open = lock(&self.open);
        if let Some(copy) = open.copies.get(&id) {
            return Some(Arc::clone(copy));
        }
        let row = self.catalog.chain(id).ok()?.into_iter().next().filter(LayerRow::is_copy)?;
        let opened = self.open_copy(&mut open, &row);
        opened.inspect_err(|error| tracing::error!(%error, "can't open a copy")).ok()
    }

    /// The copies that are open.
    pub(crate) fn open_copies(&self) -> Vec<Arc<LayerCopy>> {
        lock(&self.open).copies.values().map(Arc::clone).collect()
    }

    /// The exports from which an open layer gets what it lacks. A copy has one, and each chain over a layer of which
    /// nothing is kept has one.
    pub(crate) fn remotes_of(&self, id: LayerId) -> Vec<Arc<RemoteParent>> {
        let open = lock(&self.open);
        let copy = open.copies.get(&id).map(|copy| Arc::clone(&copy.remote));
        let chains = open.sealed.values().filter_map(Weak::upgrade);
        let below = open.volumes.values().map(|volume| Arc::clone(&volume.stack().below));
        let over = chains.chain(below).filter_map(|chain| chain.export_of(id));
        copy.into_iter().chain(over).collect()
    }

    /// Forgets a copy that was deleted or completed. The next opening of this layer makes a new object.
    pub(crate) fn forget_copy(&self, id: LayerId) {
        let mut open = lock(&self.open);
        open.copies.remove(&id);
        open.forget_layers(&[id]);
    }

    /// Rebuilds the chains of open volumes that contain layers that are no longer in the catalog. The caller
    /// holds the lock `changes`, so that no head is sealed at the same time.
    pub(crate) fn reopen_chains(&self, gone: &[LayerId]) -> Result<(), Box<dyn std::error::Error>> {
        let mut open = lock(&self.open);
        open.forget_layers(gone);
        let volumes: Vec<_> = open.volumes.values().map(Arc::clone).collect();
        for volume in volumes {
            let stack = volume.stack();
            if stack.below.has_any(gone) {
                let rows = self.catalog.chain(stack.head.layer.id)?;
                let below = self.sealed(&mut open, &rows[1..], rows[0].remote.clone())?;
                volume.replace_below(below);
            }
        }
        Ok(())
    }

    /// Opens a sealed layer's files separately, without sharing them.
    pub(crate) fn open_sealed(&self, row: &LayerRow) -> Result<Layer, LayerError> {
        Layer::open(&*self.files, row.id, row.size_bytes, row.untouched)
    }

    /// Shares the chain of a head that was just sealed, for later users.
    pub(crate) fn share(&self, head: &Head, below: &Arc<Sealed>) {
        let mut open = lock(&self.open);
        for layer in std::iter::once(&head.layer).chain(below.layers()) {
            open.layers.insert(layer.id, Arc::downgrade(layer));
        }
        if let Some(top) = below.layers().next() {
            open.sealed.insert(top.id, Arc::downgrade(below));
        }
    }

    pub(crate) fn forget_volume(&self, name: &VolumeName) {
        lock(&self.open).volumes.remove(name);
    }

    /// The volume, if it is open.
    pub(crate) fn opened(&self, name: &VolumeName) -> Option<Arc<Volume>> {
        lock(&self.open).volumes.get(name).map(Arc::clone)
    }

    /// Opens a session with a writer epoch; `None` means the volume's current epoch.
    ///
    /// # Errors
    /// As [`Self::volume`]; a conflict when the epoch belongs to an earlier volume with this name.
    pub async fn open_session(
        self: &Arc<Self>,
        name: &VolumeName,
        epoch: Option<Epoch>,
        host: HostTag,
    ) -> Result<Arc<dyn Device>, Problem> {
        let name = name.clone();
        self.run(move |pool| {
            let volume = pool.volume_now(&name)?;
            if epoch.is_some_and(|epoch| epoch.incarnation() != volume.incarnation()) {
                let what =
                    format!("can't open volume {name} at epoch {}", epoch.unwrap_or(Epoch(0)));
                let why = "it was deleted, and another volume was created with its name";
                return Err(Problem::conflict(what, why)
                    .next("restart its user, so that it opens the new volume"));
            }
            // The session is counted before it is recorded, so that the clone is not deleted in between.
            let session = volume.session_of(host, epoch);
            if let Err(error) = pool.catalog.note_opened(&name) {
                // The clones of earlier boots are then kept for longer.
                tracing::warn!(volume = %name, %error, "can't record that a volume was opened");
            }
            Ok(session)
        })
        .await
    }

    /// When this process last had a session of the volume open.
    pub(crate) fn last_used(&self, name: &VolumeName) -> Instant {
        self.opened(name).map_or(self.opened_at, |volume| volume.last_used())
    }

    /// The number of open sessions of a volume.
    pub fn open_sessions(&self, name: &VolumeName) -> u64 {
        self.opened(name).map_or(0, |volume| volume.open_sessions())
    }

    /// Returns the volume if it is open. Otherwise runs `work`, during which it can't be opened.
    pub(crate) fn unless_opened(
        &self,
        name: &VolumeName,
        work: impl FnOnce() -> Result<(), Problem>,
    ) -> Result<Option<Arc<Volume>>, Problem> {
        let open = lock(&self.open);
        match open.volumes.get(name) {
            Some(volume) => Ok(Some(Arc::clone(volume))),
            None => work().map(|()| None),
        }
    }

    /// The layer, if it is the head of an open volume or below one.
    pub(crate) fn opened_layer(&self, id: LayerId) -> Option<Arc<Layer>> {
        lock(&self.open).layers.get(&id).and_then(Weak::upgrade)
    }

    /// Flushes all open volumes and copies, even if some of them fail.
    ///
    /// # Errors
    /// The last failure.
    pub async fn flush(self: &Arc<Self>) -> Result<(), Problem> {
        let open: Vec<_> = lock(&self.open).volumes.values().map(Arc::clone).collect();
        let mut flushed = self.flush_copies().await;
        for volume in open {
            if let Err(error) = volume.flush().await {
                flushed = Err(io_problem(&format!("can't flush volume {}", volume.name()), &error));
            }
        }
        flushed
    }

    /// A sealed layer by its id, read-only.
    ///
    /// # Errors
    /// Not found, or its layers can't be read.
    pub async fn open_layer(self: &Arc<Self>, id: LayerId) -> Result<Arc<dyn Device>, Problem> {
        self.run(move |pool| {
            let what = format!("can't open layer {id}");
            let is_sealed = pool.catalog.is_sealed(id).map_err(failed(&what))?;
            if is_sealed {
                Ok(Arc::new(pool.sealed_device(&what, id)?) as Arc<dyn Device>)
            } else {
                Err(Problem::not_found(what, "there is no such sealed layer in this pool"))
            }
        })
        .await
    }

    /// Only what a sealed layer itself has, read-only, for hosts that have the layers below it.
    ///
    /// # Errors
    /// Not found when there is no such sealed layer, or when a part of its content is at another host; its layers
    /// can't be read.
    pub async fn open_own(self: &Arc<Self>, id: LayerId) -> Result<Arc<dyn Device>, Problem> {
        self.run(move |pool| {
            let what = format!("can't open the own blocks of layer {id}");
            let row = pool.row_with_own_blocks(&what, id)?;
            let device = pool.with_open(&what, |open| {
                let shared = open.layers.get(&id).and_then(Weak::upgrade);
                let layer = match shared {
                    Some(layer) => layer,
                    None => {
                        let opened = pool.open_sealed(&row);
                        Arc::new(opened.map_err(|error| Problem::internal(&what, error))?)
                    }
                };
                open.layers.insert(id, Arc::downgrade(&layer));
                let layers = Arc::new(Sealed::new(vec![Link::whole(&layer)], None));
                Ok(SealedDevice { size_bytes: row.size_bytes, layers })
            })?;
            Ok(Arc::new(OwnDevice(device)) as Arc<dyn Device>)
        })
        .await
    }

    /// A sealed layer whose own blocks are all here.
    pub(crate) fn row_with_own_blocks(&self, what: &str, id: LayerId) -> Result<LayerRow, Problem> {
        if !self.catalog.is_sealed(id).map_err(failed(what))? {
            return Err(Problem::not_found(what, "there is no such sealed layer in this pool"));
        }
        let row = self.catalog.chain(id).map_err(failed(what))?.swap_remove(0);
        if row.remote.is_some() {
            let why = "a part of its content is still at another host";
            return Err(Problem::not_found(what, why));
        }
        Ok(row)
    }

    /// The checksums of a sealed layer without a parent, for hosts that copy all that the layer shows. With `own`,
    /// those of any sealed layer, for hosts that copy only what the layer itself has: they take a volume, and when nothing
    /// is missing in their copy the original is deleted. So those of a layer that was sealed a moment ago are computed now.
    ///
    /// # Errors
    /// Not found when the layer has a parent, is not complete, or has none. Unavailable while they are computed.
    pub async fn open_checksums(
        self: &Arc<Self>,
        id: LayerId,
        own: bool,
    ) -> Result<Arc<dyn Device>, Problem> {
        let what = format!("can't open the checksums of layer {id}");
        let until = Instant::now() + CHECKSUMS_WAIT;
        loop {
            let named = what.clone();
            let found = self.run(move |pool| pool.checksums_now(&named, id, own)).await?;
            let row = match found {
                Ok(device) => return Ok(device),
                Err(row) => row,
            };
            let pool = Arc::clone(self);
            // It goes on when the wait is over, or the asking host goes away, until `stop_work`.
            let making = tokio::spawn(async move {
                pool.run(move |pool| pool.make_checksums(&row, &pool.asked)).await
            });
            match tokio::time::timeout_at(until.into(), making).await {
                Ok(Ok(Ok(true))) => {}
                Ok(Ok(Ok(false))) if Instant::now() < until => {
                    tokio::time::sleep(CHECKSUMS_AGAIN).await;
                }
                Ok(Ok(Err(why))) => return Err(Problem::internal(what, why)),
                Ok(Err(panicked)) => return Err(Problem::internal(what, panicked)),
                Ok(Ok(Ok(false))) | Err(_) => {
                    return Err(Problem::unavailable(what, "they are being computed")
                        .next("try again in some seconds"));
                }
            }
        }
    }

    /// Ends what goes on for other hosts that have asked for it. They ask again.
    pub fn stop_work(&self) {
        self.asked.stop();
    }

    /// The checksums of all that a sealed layer shows, for hosts that copy that. They are computed when they are read.
    ///
    /// # Errors
    /// Not found, or its layers can't be read.
    pub async fn open_visible_checksums(
        self: &Arc<Self>,
        id: LayerId,
    ) -> Result<Arc<dyn Device>, Problem> {
        self.run(move |pool| {
            let what = format!("can't open the checksums of what layer {id} shows");
            if !pool.catalog.is_sealed(id).map_err(failed(&what))? {
                return Err(Problem::not_found(what, "there is no such sealed layer in this pool"));
            }
            let device = pool.sealed_device(&what, id)?;
            let blocks = device.size_bytes / BLOCK_BYTES;
            let here = device.layers.complete_layers().cloned().collect();
            let device = Arc::new(device);
            let sums = VisibleSums::new((id, blocks), device, here, &pool.files);
            Ok(Arc::new(sums) as Arc<dyn Device>)
        })
        .await
    }

    /// The checksums, or the row of the layer whose checksums are still to be computed.
    fn checksums_now(
        &self,
        what: &str,
        id: LayerId,
        own: bool,
    ) -> Result<Result<Arc<dyn Device>, LayerRow>, Problem> {
        let row = self.row_with_own_blocks(what, id)?;
        if !own && row.parent.is_some() {
            return Err(Problem::not_found(what, "the layer stands on another one"));
        }
        let failed = |error: std::io::Error| Problem::internal(what, error);
        if let Some(file) = checksums::finished(&*self.files, id).map_err(failed)? {
            let size_bytes = file.len().map_err(failed)?;
            return Ok(Ok(Arc::new(SumsDevice { size_bytes, file })));
        }
        // Those of all that it shows are computed when they are read.
        let layer = self.open_sealed(&row).map_err(|error| Problem::internal(what, error))?;
        if own && layer.has_files() {
            return Ok(Err(row));
        }
        Err(Problem::not_found(what, "the layer has none"))
    }

    /// A sealed layer by name, read-only.
    ///
    /// # Errors
    /// Not found, or its layers can't be read.
    pub async fn open_image(
        self: &Arc<Self>,
        name: &ImageName,
    ) -> Result<Arc<dyn Device>, Problem> {
        let name = name.clone();
        self.run(move |pool| Ok(Arc::new(pool.image_now(&name)?) as Arc<dyn Device>)).await
    }

    fn image_now(&self, name: &ImageName) -> Result<SealedDevice, Problem> {
        let what = format!("can't open image {name}");
        let layer = self
            .catalog
            .image(name)
            .map_err(failed(&what))?
            .ok_or_else(|| Problem::not_found(&what, "there is no such image in this pool"))?;
        self.sealed_device(&what, layer)
    }

    pub(crate) fn sealed_device(
        &self,
        what: &str,
        layer: LayerId,
    ) -> Result<SealedDevice, Problem> {
        self.with_open(what, |open| {
            let rows = self.catalog.chain(layer).map_err(failed(what))?;
            let layers =
                self.sealed(open, &rows, None).map_err(|error| Problem::internal(what, error))?;
            Ok(SealedDevice { size_bytes: rows[0].size_bytes, layers })
        })
    }

    /// Rounds a size up to whole blocks, and refuses sizes that no layer can have.
    pub(crate) fn layer_size(what: &str, size_bytes: u64) -> Result<u64, Problem> {
        let refused =
            |error: OutOfLimits| error.problem(what).next("give a possible size, say 10GiB");
        Ok(VOLUME_BYTES.check(size_bytes).map_err(refused)?.next_multiple_of(BLOCK_BYTES))
    }
}
