//! Images that are copies of another host's images. A copy can be used at once: missing blocks are read
//! from the other host, and the copy is completed in the background.

use std::collections::HashSet;
use std::convert::Infallible;
use std::io::ErrorKind;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};
use perigee_block::device::IoError;
use perigee_model::volume::{BLOCK_BYTES, CopyImage, ImageInfo, Keep};
use perigee_model::{ImageName, LayerId, Problem};
use tokio::time::Instant;
use uuid::Uuid;

use super::blocking;
use super::blocks::{blocks_of, index};
use super::catalog::{self, LayerRow, Sealed};
use super::checksums;
use super::copy::LayerCopy;
use super::head::Head;
use super::layer::{self, LayerError, live_name};
use super::pool::Pool;
use super::volume::io_problem;
use super::work::{StopOnDrop, Work};

/// 128 KiB are fetched at a time. A reader of one of these blocks waits for all of them.
const PIECE_BLOCKS: u64 = 32;
const PIECES_IN_FLIGHT: usize = 8;
/// The other host is asked for the extents of this much at a time. The fetched blocks are then made durable.
const WINDOW_BYTES: u64 = 256 << 20;
/// Fetched blocks are made durable at least this often.
const FLUSH_EVERY: Duration = Duration::from_secs(30);

/// The result of completing a copy in the background.
#[derive(PartialEq, Eq)]
enum Filled {
    AsFarAsItGoes,
    /// The fetched bytes differ from the other host's checksums.
    Damaged,
}

/// Limits a transfer to a number of bytes per second.
struct Pace {
    bytes_per_s: u64,
    next: Instant,
}

impl Pace {
    fn new(bytes_per_s: u64) -> Self {
        Self { bytes_per_s, next: Instant::now() }
    }

    fn after(&mut self, bytes: u64) -> Instant {
        let at = self.next.max(Instant::now());
        let micros = bytes.saturating_mul(1_000_000) / self.bytes_per_s.max(1);
        self.next = at + Duration::from_micros(micros);
        at
    }
}

fn failed(what: &str) -> impl Fn(rusqlite::Error) -> Problem {
    move |error| catalog::problem(what, &error)
}

impl Pool {
    /// Makes an image of a read-only export of another host. If the export is a sealed layer, the copy has
    /// the same layer id, and a repeated request succeeds and does nothing.
    ///
    /// # Errors
    /// A conflict when the name or the layer is taken; not found when the other host has no such export;
    /// unavailable when it does not answer.
    pub async fn copy_image(
        self: &Arc<Self>,
        name: &ImageName,
        request: CopyImage,
    ) -> Result<ImageInfo, Problem> {
        let CopyImage { nbd_addr, export, keep, layer: wanted } = request;
        let what = format!("can't copy image {name} from {nbd_addr}");
        let export = export.unwrap_or_else(|| format!("image:{name}"));
        let mut remote = self.remote_row(&what, &nbd_addr, &export).await?;
        remote.keep = keep;
        if let Some(wanted) = wanted.filter(|wanted| remote.is_layer != Some(*wanted)) {
            let why = format!("the other host's export {export} is not layer {wanted}");
            return Err(Problem::conflict(what, why).next("check the image on the other host"));
        }
        let layer = remote.is_layer.unwrap_or_else(|| LayerId(Uuid::new_v4()));
        let size_bytes = Self::layer_size(&what, remote.size_bytes)?;
        let guard = Arc::clone(&self.changes).lock_owned().await;
        if !self.is_imported(&what, name, layer).await? {
            let (pool, name) = (Arc::clone(self), name.clone());
            blocking(move || {
                let _guard = guard;
                let new = LayerRow { id: layer, ..LayerRow::new_head(size_bytes, None) };
                let row = LayerRow { remote: Some(remote), ..new };
                layer::clear(&*pool.files, layer)
                    .map_err(|error| io_problem(&what, &error.into()))?;
                pool.catalog.add_image(&name, &row).map_err(failed(&what))
            })
            .await?;
            self.to_fill.notify_one();
        }
        self.image_info(name).await
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
        let (pool, layer) = (Arc::clone(self), bottom(&info));
        blocking(move || {
            pool.catalog.set_keep(layer, keep).map_err(failed(&what))?;
            if keep != Keep::All
                && let Some(copy) = pool.layer_copy(layer)
            {
                copy.stop_filling();
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
        let (pool, layer) = (Arc::clone(self), bottom(&info));
        if let Some(copy) = blocking(move || Ok::<_, Problem>(pool.layer_copy(layer))).await? {
            let filled = self.fill(&copy, &work, &mut Pace::new(u64::MAX)).await;
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

    /// Completes the copies that keep everything, one after the other and at most at this rate, and makes the
    /// fetched blocks of the other copies durable. It runs until the future is dropped.
    pub async fn fill_copies(self: Arc<Self>, bytes_per_s: u64) {
        let mut pace = Pace::new(bytes_per_s);
        // Damaged copies are not tried again in the background.
        let mut damaged = HashSet::new();
        loop {
            let pool = Arc::clone(&self);
            let copies = blocking(move || Ok::<_, Infallible>(pool.copies_to_fill())).await;
            for copy in copies.unwrap_or_default() {
                if !damaged.contains(&copy.layer().id)
                    && self.fill_in_background(&copy, &mut pace).await == Filled::Damaged
                {
                    damaged.insert(copy.layer().id);
                }
            }
            let again = self.to_fill.notified();
            if self.open_copies().is_empty() {
                again.await;
                damaged.clear();
            } else if tokio::time::timeout(FLUSH_EVERY, again).await.is_ok() {
                damaged.clear();
            } else if let Err(problem) = self.flush_copies().await {
                tracing::error!(%problem, "can't make fetched blocks durable");
            }
        }
    }

    async fn fill_in_background(
        self: &Arc<Self>,
        copy: &Arc<LayerCopy>,
        pace: &mut Pace,
    ) -> Filled {
        let layer = copy.layer().id;
        let work = copy.begin_filling();
        let _stop = StopOnDrop(Arc::clone(&work));
        // From now on, `stop_filling` stops this work.
        let wanted = self.catalog.copies_to_fill();
        if !wanted.is_ok_and(|wanted| wanted.contains(&layer)) {
            return Filled::AsFarAsItGoes;
        }
        let Err(error) = self.fill(copy, &work, pace).await else { return Filled::AsFarAsItGoes };
        let kind = if let IoError::Io(error) = &error { Some(error.kind()) } else { None };
        if kind != Some(ErrorKind::Interrupted) {
            tracing::warn!(%layer, %error, "can't complete a copy now; trying again later");
        }
        if kind == Some(ErrorKind::InvalidData) { Filled::Damaged } else { Filled::AsFarAsItGoes }
    }

    fn copies_to_fill(&self) -> Vec<Arc<LayerCopy>> {
        let layers = self.catalog.copies_to_fill().unwrap_or_else(|error| {
            tracing::error!(%error, "can't list the copies to complete");
            Vec::new()
        });
        layers.into_iter().filter_map(|layer| self.layer_copy(layer)).collect()
    }

    /// Fetches the blocks that are missing here and not empty on the other host. One pass is enough, because
    /// the other host's layer never changes.
    async fn fill(
        self: &Arc<Self>,
        copy: &Arc<LayerCopy>,
        work: &Arc<Work>,
        pace: &mut Pace,
    ) -> Result<(), IoError> {
        copy.head.check_writable()?;
        let size_bytes = copy.layer().blocks() * BLOCK_BYTES;
        work.expect(size_bytes);
        for start in (0..size_bytes).step_by(index(WINDOW_BYTES)) {
            let window = start..(start + WINDOW_BYTES).min(size_bytes);
            fill_window(copy, window, work, pace).await?;
            self.flush_copy(copy).await?;
        }
        compare_with_source(copy, work).await?;
        self.complete(copy).await
    }

    /// Turns a fully fetched copy into a sealed layer like any other.
    async fn complete(self: &Arc<Self>, copy: &Arc<LayerCopy>) -> Result<(), IoError> {
        let guard = Arc::clone(&self.changes).lock_owned().await;
        let (pool, copy) = (Arc::clone(self), Arc::clone(copy));
        blocking(move || {
            let _guard = guard;
            if copy.is_closed() {
                // It was deleted in the meantime, or another task has completed it.
                return Ok(());
            }
            copy.close(true);
            let completed = pool.complete_closed(&copy);
            if completed.is_err() {
                copy.close(false);
            }
            completed
        })
        .await
    }

    fn complete_closed(&self, copy: &LayerCopy) -> Result<(), IoError> {
        copy.head.flush_now()?;
        let id = copy.layer().id;
        let figures = Sealed { layer: id, data_bytes: copy.layer().data_bytes() };
        self.catalog.complete_copy(figures).map_err(catalog::io_error)?;
        copy.set_complete();
        tracing::info!(layer = %id, "a copy is complete");
        self.forget_copy(id);
        if let Err(error) = self.reopen_chains(&[id]) {
            // Their chains in memory have the same bytes.
            tracing::error!(%error, "volumes keep their old chains until the next start");
        }
        if let Err(error) = self.files.remove(&live_name(id)) {
            tracing::warn!(layer = %id, %error, "can't remove a complete layer's live map");
        }
        self.note_sealed();
        Ok(())
    }

    async fn flush_copy(self: &Arc<Self>, copy: &Arc<LayerCopy>) -> Result<(), IoError> {
        let flushed = copy.head.flush().await;
        if matches!(flushed, Err(IoError::Poisoned(_))) {
            let (pool, copy) = (Arc::clone(self), Arc::clone(copy));
            let recorded = blocking(move || {
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
    pub(super) async fn flush_copies(self: &Arc<Self>) -> Result<(), Problem> {
        let mut flushed = Ok(());
        for copy in self.open_copies() {
            if let Err(error) = self.flush_copy(&copy).await {
                flushed =
                    Err(io_problem(&format!("can't flush layer {}", copy.layer().id), &error));
            }
        }
        flushed
    }

    /// Waits until all fetched blocks are written.
    #[cfg(test)]
    pub(super) async fn settle_copies(&self) {
        for copy in self.open_copies() {
            drop(copy.head.locks.lock(0..copy.layer().blocks()).await);
        }
    }

    /// Opens the files of a copy. If they have failed before, the copy starts again with empty files; if that
    /// is not possible, all its blocks are read from the other host.
    pub(super) fn copy_head(&self, row: &LayerRow) -> Result<Head, LayerError> {
        let why = match &row.poisoned {
            Some(why) => why.clone(),
            None => {
                let head = Head::open(&self.home, row.id, row.size_bytes, row.untouched)?;
                let Some(why) = head.poisoned() else { return Ok(head) };
                why.to_owned()
            }
        };
        let head = Head::new(&self.home, row.id, row.size_bytes);
        // The catalog is changed last: until then it says that the files must not be used.
        let emptied = layer::clear(&*self.files, row.id)
            .and_then(|()| self.catalog.empty_copy(row.id).map_err(catalog::io_error));
        if let Err(error) = emptied {
            tracing::error!(layer = %row.id, %error, "can't start a copy again with empty files");
            head.poison(why);
        }
        Ok(head)
    }

    /// Drops the open copies of layers that were deleted from the catalog.
    pub(super) fn drop_copies(&self, deleted: &[LayerId]) {
        for copy in self.open_copies().iter().filter(|copy| deleted.contains(&copy.layer().id)) {
            copy.close(true);
            copy.stop_filling();
            self.forget_copy(copy.layer().id);
        }
    }
}

/// Compares the fetched bytes with the other host's checksums, if it has any.
async fn compare_with_source(copy: &LayerCopy, work: &Arc<Work>) -> Result<(), IoError> {
    let Some(checksums) = copy.remote.checksums().await else { return Ok(()) };
    work.expect(copy.layer().data_bytes());
    let findings = checksums::compare_with_source(copy, &*checksums, work).await?;
    let Some((range, _)) = findings.first() else { return Ok(()) };
    let at = range.as_ref().map_or(0, |range| range.start);
    let why =
        format!("the bytes fetched from offset {at} on differ from the other host's checksums");
    Err(std::io::Error::new(ErrorKind::InvalidData, why).into())
}

/// The lowest layer of an image, which is the one that may be an incomplete copy.
fn bottom(image: &ImageInfo) -> LayerId {
    image.chain.last().copied().unwrap_or(image.layer)
}

async fn fill_window(
    copy: &Arc<LayerCopy>,
    window: Range<u64>,
    work: &Work,
    pace: &mut Pace,
) -> Result<(), IoError> {
    let (mut at, mut missing) = (window.start, Vec::new());
    for extent in copy.remote.extents(&window).await? {
        let length_bytes = extent.length_bytes;
        if !extent.zero {
            missing.extend(copy.missing(&blocks_of(at, length_bytes), PIECE_BLOCKS));
        }
        at += length_bytes;
    }
    let missing_bytes: u64 = missing.iter().map(length_bytes).sum();
    work.step((window.end - window.start).saturating_sub(missing_bytes))?;
    let paced = stream::iter(missing).then(|blocks| {
        let next_at = pace.after(length_bytes(&blocks));
        async move {
            tokio::time::sleep_until(next_at).await;
            blocks
        }
    });
    let fetch = |blocks: Range<u64>| async move {
        let fetched_bytes = length_bytes(&blocks);
        if let (_, Some(keeping)) = copy.fetch(blocks).await? {
            keeping.await.map_err(std::io::Error::other)??;
        }
        Ok::<_, IoError>(fetched_bytes)
    };
    let mut fetched = std::pin::pin!(paced.map(fetch).buffer_unordered(PIECES_IN_FLIGHT));
    while let Some(bytes) = fetched.try_next().await? {
        work.step(bytes)?;
    }
    Ok(())
}

fn length_bytes(blocks: &Range<u64>) -> u64 {
    (blocks.end - blocks.start) * BLOCK_BYTES
}
