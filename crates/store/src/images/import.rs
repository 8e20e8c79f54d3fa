//! Import of disk images. `qemu-img` reads all formats; Perigee itself never parses them.
//!
//! The source is a descriptor that is open already, or an address. It is converted into a temporary file beside the layers. Its blocks are scanned for data. Then
//! the file is renamed, and the catalog records it as an image.
//!
//! An import may take as long as it needs while it makes progress. It ends when it makes none for
//! [`Patience::progress`], or when it is stopped: because nobody waits for it, or because the image is deleted.

mod inspect;
mod looks;
mod notes;
mod qcow2;
mod source;
mod whole;

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use perigee_model::volume::{BLOCK_BYTES, ContentDigest, ImageInfo, ImportImage};
use perigee_model::{ImageName, LayerId, Problem};
use uuid::Uuid;

use crate::catalog::{LayerRow, failed};
use crate::disk::blocks::{BlockState, BlockStates, index};
use crate::disk::files::{BlockFile, DiskFile};
use crate::disk::map::{self, MapFile};
use crate::images::dir_images;
use crate::images::import::inspect::Source;
pub use crate::images::import::source::{ImportFrom, Tree};
use crate::images::progress::{no_room, stopped};
use crate::images::qemu_img::RunUser;
use crate::layers::checksums;
use crate::layers::layer::{Layer, data_name, map_name};
use crate::pool::Pool;
use crate::pool::imports::Importing;
use crate::volume::io_problem;
use crate::work::Work;

/// How long an import waits for its source, which may be on another host that does not answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// For `qemu-img info`, which reads some sectors.
    pub(crate) info: Duration,
    /// For `qemu-img convert`, without progress.
    pub(crate) progress: Duration,
}

const PATIENCE: Patience =
    Patience { info: Duration::from_secs(60), progress: Duration::from_secs(5 * 60) };

/// A file that is removed when this is dropped, unless it was renamed.
pub(crate) struct TempFile(pub(crate) PathBuf);

impl Drop for TempFile {
    fn drop(&mut self) {
        match std::fs::remove_file(&self.0) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(path = %self.0.display(), %error, "can't remove a temporary file");
            }
            _ => {}
        }
    }
}

impl Pool {
    /// As [`Self::import_opened`], from any file of this host that this process may read.
    ///
    /// # Errors
    /// As [`Self::import_opened`].
    pub async fn import_image(
        self: &Arc<Self>,
        request: ImportImage,
        work: &Arc<Work>,
    ) -> Result<ImageInfo, Problem> {
        self.import_opened(request, ImportFrom::open_any, work).await
    }

    /// Makes an image from a file or from another host's export. `open` opens the source. It succeeds and does nothing if the pool
    /// already has an image with this name and the requested layer id.
    ///
    /// # Errors
    /// A conflict when the name or layer is taken, or when the import is stopped; invalid when the source is
    /// not a complete image; no space; unavailable when the source does not answer.
    pub async fn import_opened(
        self: &Arc<Self>,
        request: ImportImage,
        open: impl FnOnce(&str, &str) -> Result<ImportFrom, Problem>,
        work: &Arc<Work>,
    ) -> Result<ImageInfo, Problem> {
        self.import_within(PATIENCE, request, open, work).await
    }

    pub(crate) async fn import_within(
        self: &Arc<Self>,
        patience: Patience,
        request: ImportImage,
        open: impl FnOnce(&str, &str) -> Result<ImportFrom, Problem>,
        work: &Arc<Work>,
    ) -> Result<ImageInfo, Problem> {
        let what = format!("can't import {} as image {}", request.source, request.name);
        let importing = self.imports.begin(&request.name, work);
        let layer = request.layer.unwrap_or_else(|| LayerId(Uuid::new_v4()));
        if self.is_imported(&what, &request.name, layer).await? {
            return self.image_info(&request.name).await;
        }
        let temp = self.temp_file();
        let user = RunUser::new();
        let (size_bytes, note) = match open(&what, &request.source)? {
            ImportFrom::Tree(tree) => {
                let target = new_file(&temp.0).map_err(|error| Problem::internal(&what, error))?;
                let to = (temp.0.as_path(), &target);
                let built =
                    dir_images::build(&what, &tree.directory, to, &user, patience.progress, work);
                (built.await?, String::new())
            }
            source => {
                let source = self.readable(&what, source, &user, work).await?;
                let from = Source { what: &what, source: &source, user: &user, work };
                let found = from.inspect(request.format, patience.info).await?;
                let size_bytes = found.image_bytes(&what)?;
                work.expect(size_bytes);
                from.check_whole(&found, patience.progress).await?;
                from.convert(&found, &temp.0, patience.progress).await?;
                let note = notes::of(&found, size_bytes, &temp.0);
                (size_bytes, note.map_err(|error| Problem::internal(&what, error))?)
            }
        };

        let of = (&request.name, layer, request.leave_site.is_never());
        self.adopt_new(what, importing, (temp, size_bytes), of, Arc::clone(work)).await?;
        Ok(ImageInfo { note, ..self.image_info(&request.name).await? })
    }

    /// Turns a file with so many bytes into an image, unless the pool has that image by now. The flag says whether it may not leave its site.
    pub(crate) async fn adopt_new(
        self: &Arc<Self>,
        what: String,
        importing: Importing,
        (temp, size_bytes): (TempFile, u64),
        (name, layer, confined): (&ImageName, LayerId, bool),
        work: Arc<Work>,
    ) -> Result<(), Problem> {
        let guard = self.changes().await;
        if self.is_imported(&what, name, layer).await? {
            return Ok(());
        }
        let name = name.clone();
        self.run(move |pool| {
            // Also when nobody waits any more: whoever deletes the image waits for this.
            let (_importing, _guard) = (importing, guard);
            pool.adopt(&what, &temp, size_bytes, (&name, layer, confined), &work)
        })
        .await
    }

    pub(crate) fn temp_file(&self) -> TempFile {
        TempFile(self.layers_dir().join(format!("import-{}.tmp", Uuid::new_v4())))
    }

    /// A source that `qemu-img`'s user may read: a file that is closed to it is copied first.
    async fn readable(
        self: &Arc<Self>,
        what: &str,
        source: ImportFrom,
        user: &RunUser,
        work: &Arc<Work>,
    ) -> Result<ImportFrom, Problem> {
        let ImportFrom::File(file) = source else { return Ok(source) };
        let failed = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::StorageFull => no_room(what),
            _ if work.is_stopped() => stopped(what),
            _ => Problem::internal(what, error),
        };
        if user.may_read(&file).map_err(failed)? {
            return Ok(ImportFrom::File(file));
        }
        // It has no name any more when the copy begins.
        let temp = self.temp_file();
        let copy = new_file(&temp.0).map_err(failed)?;
        drop(temp);
        let copying = Arc::clone(work);
        let copied = tokio::task::spawn_blocking(move || {
            source::copy(&file, &copy, &copying)?;
            Ok(copy)
        });
        let copy = copied.await.map_err(|error| Problem::internal(what, error))?.map_err(failed)?;
        user.give(&copy).map_err(failed)?;
        Ok(ImportFrom::File(copy))
    }

    fn layers_dir(&self) -> PathBuf {
        self.dir.join("layers")
    }

    /// Whether the pool has this image. A conflict if it has only the name or only the layer.
    pub(crate) async fn is_imported(
        self: &Arc<Self>,
        what: &str,
        name: &ImageName,
        layer: LayerId,
    ) -> Result<bool, Problem> {
        let (what, name) = (what.to_owned(), name.clone());
        self.run(move |pool| match pool.catalog.image(&name).map_err(failed(&what))? {
            Some(found) if found == layer => Ok(true),
            Some(_) => Err(Problem::conflict(&what, "an image with that name exists already")
                .next("delete it first, or choose another name")),
            None if pool.catalog.has_layer(layer).map_err(failed(&what))? => {
                Err(Problem::conflict(&what, format!("the pool has layer {layer} already")))
            }
            None => Ok(false),
        })
        .await
    }

    /// Turns a file into the files of a sealed layer, which no catalog knows yet. Returns its data bytes and its content.
    pub(crate) fn make_layer(
        &self,
        what: &str,
        temp: &TempFile,
        size_bytes: u64,
        layer: LayerId,
        work: &Work,
    ) -> Result<(u64, ContentDigest), Problem> {
        let made = || -> std::io::Result<(u64, ContentDigest)> {
            let data = File::options().read(true).write(true).open(&temp.0)?;
            data.set_len(size_bytes)?;
            let data = DiskFile::from(data);
            let states = scan(&data, size_bytes, work)?;
            data.sync_created()?;
            // The map goes to the directory that has the data file.
            std::fs::rename(&temp.0, self.layers_dir().join(data_name(layer)))?;
            let map = self.files.create(&map_name(layer), map::file_bytes(states.blocks()))?;
            MapFile::create(map, layer, &states)?;
            self.files.sync_names()?;
            // The checksums are computed now, while the data is in memory, and not while clients boot.
            let sealed = Layer::open(&*self.files, layer, size_bytes, false);
            let sealed = sealed.map_err(std::io::Error::other)?;
            let content = checksums::make(&*self.files, &sealed, work)?;
            Ok((states.data_bytes(), content))
        };
        made().map_err(|error| {
            self.remove_layers(&[layer]);
            if work.is_stopped() { stopped(what) } else { io_problem(what, &error.into()) }
        })
    }

    /// Turns a converted file into a sealed layer with an image name.
    fn adopt(
        &self,
        what: &str,
        temp: &TempFile,
        size_bytes: u64,
        (name, layer, confined): (&ImageName, LayerId, bool),
        work: &Work,
    ) -> Result<(), Problem> {
        let (data_bytes, content) = self.make_layer(what, temp, size_bytes, layer, work)?;
        let row = LayerRow::new(layer, size_bytes, None);
        let row = LayerRow { data_bytes: Some(data_bytes), confined, ..row };
        let added = self.catalog.add_image(name, &row);
        added.map_err(|error| self.not_recorded(what, &[layer], &error))?;
        // If that fails, it is computed again in the background.
        if let Err(error) = self.catalog.set_content(layer, content) {
            tracing::warn!(%layer, %error, "can't record an image's content");
        }
        self.note_sealed();
        Ok(())
    }
}

pub(crate) fn new_file(path: &Path) -> std::io::Result<File> {
    File::options().read(true).write(true).create_new(true).mode(0o600).open(path)
}

/// Finds the blocks of a sparse file that are data. Blocks of zeros are freed: an image has no parent, so
/// an absent block also reads as zeros.
fn scan(file: &DiskFile, size_bytes: u64, work: &Work) -> std::io::Result<BlockStates> {
    let states = BlockStates::new(size_bytes / BLOCK_BYTES);
    let mut at = 0;
    while let Some(extent) = file.next_data(at)? {
        let start = extent.start - extent.start % BLOCK_BYTES;
        let end = extent.end.next_multiple_of(BLOCK_BYTES).min(size_bytes);
        work.step(0)?;
        scan_extent(file, start..end, &states, work)?;
        at = end;
    }
    Ok(states)
}

fn scan_extent(
    file: &DiskFile,
    extent: Range<u64>,
    states: &BlockStates,
    work: &Work,
) -> std::io::Result<()> {
    const CHUNK_BYTES: u64 = 1 << 20;
    const ZEROS: [u8; 4096] = [0; 4096];
    let mut buffer = vec![0; index(CHUNK_BYTES)];
    for start in (extent.start..extent.end).step_by(index(CHUNK_BYTES)) {
        work.step(0)?;
        let chunk = &mut buffer[..index(CHUNK_BYTES.min(extent.end - start))];
        file.read_at(start, chunk)?;
        for (block, bytes) in (start / BLOCK_BYTES..).zip(chunk.chunks(ZEROS.len())) {
            if bytes == ZEROS {
                file.punch_hole(block * BLOCK_BYTES, BLOCK_BYTES)?;
            } else {
                states.set(block..block + 1, BlockState::Data);
            }
        }
    }
    Ok(())
}
