//! Images that are copies of another host's images. A copy can be used at once: missing blocks are read
//! from the other host, and the copy is completed in the background ([`crate::copies::fill`]).

pub(crate) mod fill;
pub(crate) mod incoming_layers;
pub(crate) mod shared_layers;
pub(crate) mod sources;

use std::io::ErrorKind;
use std::sync::Arc;

use perigee_block::device::IoError;
use perigee_block::exports::OWN_SUFFIX;
use perigee_block::locking::lock;
use perigee_model::volume::{BLOCK_BYTES, ContentDigest, CopyImage, ImageInfo, ImageSource, Keep};
use perigee_model::{ImageName, LayerId, Problem};
use uuid::Uuid;

use crate::catalog::{self, LayerRow, Verdict, failed};
use crate::copies::fill::Pace;
use crate::disk::blocks::BlockState;
use crate::disk::map::{MapFile, StoreError};
use crate::layers::copy::LayerCopy;
use crate::layers::head::Head;
use crate::layers::layer::{self, LayerError, live_name, map_name};
use crate::pool::Pool;
use crate::volume::io_problem;
use crate::work::Work;

impl Pool {
    /// Makes an image of a read-only export of another host. If the export is a sealed layer, the copy has
    /// the same layer id, and a repeated request succeeds: a copy that still lacks blocks gets them from the host
    /// of the last request from then on, which must have all of them itself. A layer that this pool has already, perhaps below a volume that came from
    /// another host, only gets the name.
    ///
    /// # Errors
    /// A conflict when the name or the layer is taken; not found when the other host has no such export;
    /// unavailable when it does not answer. A conflict when a copy is to go on from a host that lacks blocks too.
    pub async fn copy_image(
        self: &Arc<Self>,
        name: &ImageName,
        request: CopyImage,
    ) -> Result<ImageInfo, Problem> {
        let CopyImage { nbd_addr, export, keep, layer: wanted, content } = request;
        let what = format!("can't copy image {name} from {nbd_addr}");
        let export = export.unwrap_or_else(|| format!("image:{name}"));
        if export.ends_with(OWN_SUFFIX) {
            let why = format!("{export} has only a part of what the layer shows");
            return Err(Problem::invalid(what, why));
        }
        let (mut remote, confined) = self.remote_row(&what, &nbd_addr, &export).await?;
        remote.keep = keep;
        if let Some(wanted) = wanted.filter(|wanted| remote.is_layer != Some(*wanted)) {
            let why = format!("the other host's export {export} is not layer {wanted}");
            return Err(Problem::conflict(what, why).next("check the image on the other host"));
        }
        let layer = remote.is_layer.unwrap_or_else(|| LayerId(Uuid::new_v4()));
        let size_bytes = Self::layer_size(&what, remote.size_bytes)?;
        self.check_next_source(&what, layer, &remote).await?;
        let named = name.clone();
        let is_new = self.change(move |pool| {
            if pool.has_named(&what, &named, layer)? {
                let is_told = pool.expect_content(&what, layer, content)?;
                return Ok(pool.change_source(&what, layer, &remote)? || is_told);
            }
            if pool.catalog.has_layer(layer).map_err(failed(&what))? {
                pool.expect_content(&what, layer, content)?;
                pool.catalog.name_layer(&named, layer).map_err(failed(&what))?;
                // Nobody has compared it yet.
                pool.note_sealed();
                return Ok(true);
            }
            let new = LayerRow { id: layer, ..LayerRow::new_head(size_bytes, None) };
            let row = LayerRow { remote: Some(remote), confined, ..new };
            layer::clear(&*pool.files, layer).map_err(|error| io_problem(&what, &error.into()))?;
            pool.catalog.add_image(&named, &row).map_err(failed(&what))?;
            // Nobody completes it before this call has ended. If the server is killed here, the controller says it again.
            pool.expect_content(&what, layer, content).map(|_| true)
        });
        // What has failed is not tried again for a request that says nothing new.
        if is_new.await? {
            self.to_fill.notify_one();
        }
        self.image_info(name).await
    }

    /// Records what a copy has to show when it is complete. The caller holds the lock `changes`. Returns whether that is new.
    ///
    /// # Errors
    /// A conflict if it is complete and shows something else.
    fn expect_content(
        &self,
        what: &str,
        layer: LayerId,
        wanted: Option<ContentDigest>,
    ) -> Result<bool, Problem> {
        let Some(wanted) = wanted else { return Ok(false) };
        let chain = self.catalog.chain(layer).map_err(failed(what))?;
        let remote = chain.first().and_then(|row| row.remote.as_ref());
        if remote.is_some_and(|remote| !remote.own) {
            let is_known = self.catalog.content(layer).map_err(failed(what))? == Some(wanted);
            if !is_known {
                self.catalog.set_content(layer, wanted).map_err(failed(what))?;
            }
            return Ok(!is_known);
        }
        // What came with a volume is compared when all of it is here: its content is computed then, and the controller sees it.
        match self.catalog.content(layer).map_err(failed(what))? {
            Some(found) if found != wanted => {
                let why = format!("its content here is {found}, and it has to be {wanted}");
                Err(Problem::conflict(what, why)
                    .next("delete it here: perigee image delete --pool, and copy it again"))
            }
            _ => Ok(false),
        }
    }

    /// Whether the pool has this image. A conflict if another layer has the name, or the layer another name, or a
    /// volume writes it.
    fn has_named(&self, what: &str, name: &ImageName, layer: LayerId) -> Result<bool, Problem> {
        let images = self.catalog.images().map_err(failed(what))?;
        if let Some((other, _)) = images.iter().find(|(n, l)| *l == layer && n != name) {
            let why = format!("layer {layer} is image {other} here");
            return Err(Problem::conflict(what, why));
        }
        match images.iter().find(|(found, _)| found == name) {
            Some((_, found)) if *found == layer => Ok(true),
            Some(_) => Err(Problem::conflict(what, "an image with that name exists already")
                .next("delete it first, or choose another name")),
            None => {
                let here = self.catalog.has_layer(layer).map_err(failed(what))?;
                if here && !self.catalog.is_sealed(layer).map_err(failed(what))? {
                    let why = format!("a volume of this pool writes layer {layer}");
                    return Err(Problem::conflict(what, why));
                }
                Ok(false)
            }
        }
    }

    /// Changes what a copy keeps: [`Keep::All`] starts completing it, [`Keep::Read`] stops that.
    ///
    /// # Errors
    /// Not found; a conflict when the image is not a copy, or is a copy that keeps nothing.
    pub async fn keep_image(
        self: &Arc<Self>,
        name: &ImageName,
        keep: Keep,
    ) -> Result<ImageInfo, Problem> {
        let what = format!("can't change what image {name} keeps to {keep}");
        let info = self.image_info(name).await?;
        match info.remote.as_ref().map(|remote| remote.keep) {
            Some(now) if (now == Keep::Never) != (keep == Keep::Never) => {
                let why = format!("it was made to keep {now}");
                return Err(Problem::conflict(what, why).next("delete it and copy it again"));
            }
            Some(_) => {}
            None => {
                let why = "it is not a copy, or it is a complete copy";
                return Err(Problem::conflict(what, why));
            }
        }
        self.run(move |pool| {
            let copies = pool.copies_of(&info);
            if copies.iter().any(|copy| copy.is_own()) && keep != Keep::All {
                let why = "it came with a volume from another host, and is always copied whole";
                return Err(Problem::conflict(what, why));
            }
            for copy in copies {
                pool.catalog.set_keep(copy.layer().id, keep).map_err(failed(&what))?;
                if keep != Keep::All {
                    copy.stop_filling();
                }
            }
            Ok::<_, Problem>(())
        })
        .await?;
        self.to_fill.notify_one();
        self.image_info(name).await
    }

    /// Completes a copy without a rate limit. It does nothing if the copy is already complete.
    ///
    /// # Errors
    /// Not found; a conflict when the copy keeps nothing; no space; unavailable when the other host does not
    /// answer or the work was stopped. Blocks that were fetched before an error are kept.
    pub async fn fill_image(
        self: &Arc<Self>,
        name: &ImageName,
        work: Arc<Work>,
    ) -> Result<ImageInfo, Problem> {
        let what = format!("can't complete image {name}");
        let info = self.image_info(name).await?;
        if info.remote.as_ref().is_some_and(|remote| remote.keep == Keep::Never) {
            return Err(Problem::conflict(what, "it does not keep the blocks that it reads"));
        }
        let not_from_there = |remote: &&ImageSource| remote.refused || remote.unclear;
        if let Some(remote) = info.remote.as_ref().filter(not_from_there) {
            let why = match remote.refused {
                true => format!("{} has other content than the image's", remote.nbd_addr),
                false => format!("what came from {} was not the image's content", remote.nbd_addr),
            };
            return Err(Problem::conflict(what, why).next("copy it from another host"));
        }
        for copy in self.run(move |pool| Ok::<_, Problem>(pool.copies_of(&info))).await? {
            let what = what.clone();
            let filled = self.fill(&copy, &work, &Pace::new(u64::MAX)).await;
            filled.map_err(|error| match error {
                IoError::Io(error) if error.kind() == ErrorKind::Interrupted => {
                    Problem::unavailable(what, error)
                }
                IoError::Io(error) if error.kind() == ErrorKind::InvalidData => {
                    Problem::conflict(what, error).next("check the image at the other host")
                }
                error => io_problem(&what, &error),
            })?;
        }
        self.image_info(name).await
    }

    /// The layers of an image that still get blocks from another host.
    fn copies_of(&self, image: &ImageInfo) -> Vec<Arc<LayerCopy>> {
        image.chain.iter().filter_map(|layer| self.layer_copy(*layer)).collect()
    }

    pub(crate) async fn flush_copy(self: &Arc<Self>, copy: &Arc<LayerCopy>) -> Result<(), IoError> {
        let flushed = copy.head.flush().await;
        if matches!(flushed, Err(IoError::Poisoned(_))) {
            let copy = Arc::clone(copy);
            let recorded = self.run(move |pool| {
                let (layer, why) = (copy.layer().id, copy.head.poisoned().unwrap_or_default());
                pool.catalog.poison(layer, why)
            });
            if let Err(error) = recorded.await {
                tracing::error!(%error, "can't record that a flush failed");
            }
        }
        flushed
    }

    /// # Errors
    /// The last failure.
    pub(crate) async fn flush_copies(self: &Arc<Self>) -> Result<(), Problem> {
        let mut flushed = Ok(());
        for copy in self.open_copies() {
            if let Err(error) = self.flush_copy(&copy).await {
                flushed =
                    Err(io_problem(&format!("can't flush layer {}", copy.layer().id), &error));
            }
        }
        flushed
    }

    /// Completes every copy, without a rate limit.
    #[cfg(test)]
    pub(crate) async fn fill_all_copies(self: &Arc<Self>) {
        for copy in self.copies_to_fill() {
            self.fill(&copy, &Arc::default(), &Pace::new(u64::MAX)).await.expect("a filling");
        }
    }

    /// Waits until all fetched blocks are written.
    #[cfg(test)]
    pub(crate) async fn settle_copies(&self) {
        for copy in self.open_copies() {
            drop(copy.head.locks.lock(0..copy.layer().blocks()).await);
        }
    }

    /// Opens the files of a copy. If they have failed before, the copy starts again without any of its bytes; if
    /// that is not possible, all its blocks are read from the other host.
    pub(crate) fn copy_head(&self, row: &LayerRow) -> Result<Head, LayerError> {
        let own = row.remote.as_ref().is_some_and(|remote| remote.own);
        let open = || {
            let open = if own { Head::open_copy } else { Head::open };
            open(&self.home, row.id, row.size_bytes, row.untouched)
        };
        let why = match &row.poisoned {
            Some(why) => why.clone(),
            None => {
                let head = open()?;
                let Some(why) = head.poisoned() else { return Ok(head) };
                why.to_owned()
            }
        };
        // The catalog is changed first and last: in between it says that the files must not be used.
        let noted = self.catalog.poison(row.id, &why).map_err(catalog::io_error);
        let renewed = noted.and_then(|()| {
            if own {
                return self.renew_own(row);
            }
            layer::clear(&*self.files, row.id)?;
            self.catalog.empty_copy(row.id).map_err(catalog::io_error)
        });
        let Err(error) = renewed else {
            return if own { open() } else { Ok(Head::new(&self.home, row.id, row.size_bytes)) };
        };
        tracing::error!(layer = %row.id, %error, "can't start a copy again without its bytes");
        let head = if own { open()? } else { Head::new(&self.home, row.id, row.size_bytes) };
        head.poison(why);
        Ok(head)
    }

    /// Makes all data of a copy of own blocks remote again, durably. Which blocks it has stays as it is.
    fn renew_own(&self, row: &LayerRow) -> std::io::Result<()> {
        let blocks = row.size_bytes / BLOCK_BYTES;
        let map = self.files.open(&map_name(row.id))?;
        map.sync_created()?;
        let loaded = MapFile::load(map, row.id, blocks);
        let (mut map, states) = loaded.map_err(std::io::Error::other)?;
        let data = states.runs(0..blocks).filter(|(_, state)| *state == BlockState::Data);
        for (run, _) in data.collect::<Vec<_>>() {
            states.set(run, BlockState::Remote);
        }
        let pages: Vec<_> =
            states.pages_in_use().map(|page| (page, states.payload(page))).collect();
        match map.store(&pages) {
            Err(StoreError::Write(error) | StoreError::Sync(error)) => return Err(error),
            Ok(()) => {}
        }
        self.files.remove(&live_name(row.id))?;
        self.files.sync_names()?;
        self.catalog.renew_copy(row.id).map_err(catalog::io_error)
    }

    /// Opens the copies of own blocks from this layer down anew, with connections of their own. What is damaged in
    /// them, or can't be read any more, is missing from then on. Returns `false` if one of them can't be used again, or
    /// is a whole copy, which does not go on from another address. The caller holds the lock `changes`.
    pub(crate) fn renew_copies(&self, what: &str, top: LayerId) -> Result<bool, Problem> {
        let rows = self.catalog.chain(top).map_err(failed(what))?;
        let copies: Vec<_> = rows.iter().filter(|row| row.is_copy()).collect();
        let is_own = |row: &&LayerRow| row.remote.as_ref().is_some_and(|remote| remote.own);
        if !copies.iter().all(is_own) {
            return Ok(false);
        }
        for row in copies {
            let Some(copy) = self.layer_copy(row.id) else { return Ok(false) };
            self.renew_copy(&copy).map_err(|error| io_problem(what, &error))?;
            if self.layer_copy(row.id).is_none_or(|copy| copy.is_broken()) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// As [`Self::renew_copies`], for one copy, if it is still damaged. The caller holds the lock `changes`.
    pub(crate) fn renew_damaged(&self, copy: &Arc<LayerCopy>) -> Result<(), IoError> {
        // It may have been deleted or opened anew meanwhile.
        let open = self.layer_copy(copy.layer().id);
        let is_open = open.is_some_and(|open| Arc::ptr_eq(&open, copy));
        if is_open && copy.is_broken() { self.renew_copy(copy) } else { Ok(()) }
    }

    /// Drops what has come of a copy, because it is not the image's content. `is_clear`: it is what its source says that it
    /// has. If all of it came from there, that host is to blame. If not, it is fetched again, but not without end.
    pub(crate) async fn drop_content(
        self: &Arc<Self>,
        copy: &Arc<LayerCopy>,
        is_clear: bool,
    ) -> Result<Option<Verdict>, IoError> {
        let copy = Arc::clone(copy);
        self.change(move |pool| {
            let layer = copy.layer().id;
            let open = pool.layer_copy(layer);
            // It was deleted, or another task has dropped it.
            if !open.is_some_and(|open| Arc::ptr_eq(&open, &copy)) || copy.is_closed() {
                return Ok(None);
            }
            let from = copy.remote.nbd_addr();
            let is_proved =
                is_clear && pool.catalog.is_of_one_source(layer).map_err(catalog::io_error)?;
            let verdict = match is_proved {
                true => Some(Verdict::Deceit),
                false => lock(&pool.doubts).entry(layer).or_default().drop_from(&from),
            };
            // First: a server that is killed after this does not complete it from there. What it may still have is not taken
            // for another source's: that source is not its only one.
            if let Some(verdict) = verdict {
                pool.catalog.refuse_source(layer, verdict).map_err(catalog::io_error)?;
            }
            tracing::error!(%layer, from, ?verdict, "what came of a copy is not the image's content");
            copy.set_damaged(std::iter::once(0..copy.layer().blocks()).collect());
            pool.renew_copy(&copy)?;
            pool.catalog.begin_with_one_source(layer).map_err(catalog::io_error)?;
            Ok(verdict)
        })
        .await
    }

    fn renew_copy(&self, copy: &LayerCopy) -> Result<(), IoError> {
        let layer = copy.layer().id;
        copy.stop_filling();
        // Nothing of the old object is written after the new one has read the files.
        copy.close(true);
        let written = copy.lose_damaged().and_then(|()| copy.head.flush_now());
        match written {
            // Its files are not used any more, and all of its bytes are missing when it is opened.
            Ok(()) | Err(IoError::Poisoned(_)) => {}
            Err(error) => {
                copy.close(false);
                return Err(error);
            }
        }
        self.forget_copy(layer);
        if let Err(error) = self.reopen_chains(&[layer]) {
            // They read from the other host what the old object lacks, and keep nothing of it.
            tracing::error!(%layer, %error, "volumes keep their old chains until the next start");
        }
        Ok(())
    }

    /// Drops the open copies of layers that were deleted from the catalog.
    pub(crate) fn drop_copies(&self, deleted: &[LayerId]) {
        for copy in self.open_copies().iter().filter(|copy| deleted.contains(&copy.layer().id)) {
            copy.close(true);
            copy.stop_filling();
            self.forget_copy(copy.layer().id);
        }
        lock(&self.doubts).retain(|layer, _| !deleted.contains(layer));
    }
}
