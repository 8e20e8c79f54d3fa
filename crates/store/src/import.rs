//! Images from elsewhere: `qemu-img` reads every format, we never do.
//!
//! The source is converted into a temporary file beside the layers, its blocks are sorted into
//! data and absent, and only then do the rename and the catalog make it an image.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use perigee_model::volume::{BLOCK_BYTES, ImageInfo, ImportImage};
use perigee_model::{ImageName, LayerId, Problem, ProblemKind};
use serde::Deserialize;
use tokio::process::Command;
use uuid::Uuid;

use super::blocking;
use super::blocks::{BlockState, BlockStates, index};
use super::catalog::{self, LayerRow};
use super::checksums;
use super::files::{BlockFile, DiskFile};
use super::layer::{Layer, data_name, map_name};
use super::map::{self, MapFile};
use super::pool::Pool;
use super::volume::io_problem;
use super::work::Work;

/// How long `qemu-img` may take to look at a source: another host may be gone.
const INFO_DEADLINE: Duration = Duration::from_secs(60);
const SECTOR_BYTES: u64 = 512;

/// What `qemu-img info` says, as far as it matters here.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct SourceInfo {
    format: String,
    virtual_size: u64,
    backing_filename: Option<String>,
    format_specific: Option<FormatSpecific>,
}

#[derive(Debug, Deserialize)]
struct FormatSpecific {
    #[serde(default)]
    data: FormatData,
}

#[derive(Debug, Default, Deserialize)]
struct FormatData {
    #[serde(rename = "data-file")]
    data_file: Option<String>,
    /// Files that hold a VMDK's data.
    #[serde(default)]
    extents: Vec<ExtentFile>,
}

#[derive(Debug, Deserialize)]
struct ExtentFile {
    filename: Option<String>,
}

/// Where an image comes from.
enum Source {
    File(PathBuf),
    Nbd(String),
}

/// A file that goes away unless it was renamed.
struct TempFile(PathBuf);

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
    /// Makes an image of a file or of another host's export. With a layer id that this pool has
    /// under that name already, it succeeds and does nothing.
    ///
    /// # Errors
    /// A conflict when the name or layer is taken; invalid when the source is no image of its
    /// own; no space; unavailable when the other host does not answer.
    pub async fn import_image(
        self: &Arc<Self>,
        request: ImportImage,
    ) -> Result<ImageInfo, Problem> {
        let what = format!("can't import {} as image {}", request.source, request.name);
        let layer = request.layer.unwrap_or_else(|| LayerId(Uuid::new_v4()));
        if self.is_imported(&what, &request.name, layer).await? {
            return self.image_info(&request.name).await;
        }
        let source = parse_source(&what, &request.source)?;
        let info = inspect(&what, &source).await?;
        let size_bytes = Self::layer_size(&what, info.virtual_size)?;
        let temp = TempFile(self.layers_dir().join(format!("import-{}.tmp", Uuid::new_v4())));
        convert(&what, &source, &info.format, &temp.0).await?;

        let guard = Arc::clone(&self.changes).lock_owned().await;
        if !self.is_imported(&what, &request.name, layer).await? {
            let (pool, name) = (Arc::clone(self), request.name.clone());
            blocking(move || {
                let _guard = guard;
                pool.adopt(&what, &temp, size_bytes, &name, layer)
            })
            .await?;
        }
        self.image_info(&request.name).await
    }

    fn layers_dir(&self) -> PathBuf {
        self.dir.join("layers")
    }

    /// Whether this very image is here; a conflict when only its name or its layer is.
    pub(super) async fn is_imported(
        self: &Arc<Self>,
        what: &str,
        name: &ImageName,
        layer: LayerId,
    ) -> Result<bool, Problem> {
        let (pool, what, name) = (Arc::clone(self), what.to_owned(), name.clone());
        blocking(move || {
            let failed = |error| catalog::problem(&what, &error);
            match pool.catalog.image(&name).map_err(failed)? {
                Some(found) if found == layer => Ok(true),
                Some(_) => Err(Problem::conflict(&what, "there is an image of that name")
                    .next("delete it first, or choose another name")),
                None if pool.catalog.has_layer(layer).map_err(failed)? => {
                    Err(Problem::conflict(&what, format!("the pool has layer {layer} already")))
                }
                None => Ok(false),
            }
        })
        .await
    }

    /// Turns a converted file into a sealed layer with a name.
    fn adopt(
        &self,
        what: &str,
        temp: &TempFile,
        size_bytes: u64,
        name: &ImageName,
        layer: LayerId,
    ) -> Result<(), Problem> {
        let made = || -> std::io::Result<u64> {
            let data = File::options().read(true).write(true).open(&temp.0)?;
            data.set_len(size_bytes)?;
            let data = DiskFile::from(data);
            let states = scan(&data, size_bytes)?;
            data.sync_created()?;
            // The map goes where the data are.
            std::fs::rename(&temp.0, self.layers_dir().join(data_name(layer)))?;
            let map = self.files.create(&map_name(layer), map::file_bytes(states.blocks()))?;
            MapFile::create(map, layer, &states)?;
            self.files.sync_names()?;
            // Now, while the data are in memory, and not while clients boot from it.
            let sealed = Layer::open(&*self.files, layer, size_bytes, false);
            let sealed = sealed.map_err(std::io::Error::other)?;
            checksums::make(&*self.files, &sealed, &Work::default())?;
            Ok(states.data_bytes())
        };
        let data_bytes = made().map_err(|error| {
            self.remove_layers(&[layer]);
            io_problem(what, &error.into())
        })?;
        let row = LayerRow::new(layer, size_bytes, None);
        let row = LayerRow { data_bytes: Some(data_bytes), ..row };
        let added = self.catalog.add_image(name, &row);
        added.map_err(|error| self.not_recorded(what, &[layer], &error))?;
        self.note_sealed();
        Ok(())
    }
}

/// Only these two forms: `qemu-img` itself would take many more, with options in them.
fn parse_source(what: &str, text: &str) -> Result<Source, Problem> {
    if text.starts_with("nbd://") {
        return Ok(Source::Nbd(text.to_owned()));
    }
    let path = Path::new(text);
    if !path.is_absolute() {
        return Err(Problem::invalid(what, "the source is no absolute path and no nbd:// address"));
    }
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(Problem::invalid(what, "the source is a directory")),
        Ok(_) => Ok(Source::File(path.to_owned())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(Problem::not_found(what, "there is no such file on the volume server's machine"))
        }
        Err(error) => Err(Problem::invalid(what, error)),
    }
}

impl Source {
    fn argument(&self) -> &std::ffi::OsStr {
        match self {
            Self::File(path) => path.as_os_str(),
            Self::Nbd(address) => address.as_ref(),
        }
    }
}

async fn qemu_img(what: &str, command: &mut Command) -> Result<Output, Problem> {
    command.stdin(Stdio::null()).kill_on_drop(true).output().await.map_err(|error| {
        Problem::internal(what, format!("can't run qemu-img: {error}"))
            .next("install the package qemu-utils")
    })
}

/// Refuses a source that is no image, or that would read other files of the machine.
async fn inspect(what: &str, source: &Source) -> Result<SourceInfo, Problem> {
    let mut command = Command::new("qemu-img");
    command.args(["info", "--output=json"]);
    if matches!(source, Source::Nbd(_)) {
        // The bytes are a guest's: what they look like must not choose how they are read.
        command.args(["-f", "raw"]);
    }
    command.arg(source.argument());
    let run = tokio::time::timeout(INFO_DEADLINE, qemu_img(what, &mut command));
    let output = run.await.map_err(|_| {
        Problem::unavailable(what, format!("no answer in {} s", INFO_DEADLINE.as_secs()))
    })??;
    if !output.status.success() {
        let kind = match source {
            Source::File(_) => ProblemKind::Invalid,
            Source::Nbd(_) => ProblemKind::Unavailable,
        };
        return Err(Problem::new(kind, what, said(&output)));
    }
    let info: SourceInfo = serde_json::from_slice(&output.stdout)
        .map_err(|error| Problem::internal(what, format!("qemu-img's answer: {error}")))?;
    check_source(what, source, &info)?;
    Ok(info)
}

fn check_source(what: &str, source: &Source, info: &SourceInfo) -> Result<(), Problem> {
    if let Some(backing) = &info.backing_filename {
        return Err(Problem::invalid(what, format!("it has a backing file, {backing}"))
            .next("flatten it with `qemu-img convert` first"));
    }
    let data = info.format_specific.as_ref().map(|specific| &specific.data);
    let own_name = source.argument().to_string_lossy();
    let foreign = data.and_then(|data| {
        let extents = data.extents.iter().filter_map(|extent| extent.filename.as_ref());
        data.data_file.iter().chain(extents.filter(|name| **name != own_name)).next()
    });
    if let Some(file) = foreign {
        return Err(Problem::invalid(what, format!("its data are in another file, {file}"))
            .next("convert it to one file with `qemu-img convert` first"));
    }
    if info.virtual_size == 0 {
        return Err(Problem::invalid(what, "it is no disk image: its size is 0"));
    }
    match source {
        Source::File(path) if info.format == "raw" => check_raw_file(what, path),
        _ => Ok(()),
    }
}

/// A raw image has no sign but its length; what is no image at all also looks raw to `qemu-img`.
fn check_raw_file(what: &str, path: &Path) -> Result<(), Problem> {
    let length_bytes = std::fs::metadata(path).map_err(|e| Problem::invalid(what, e))?.len();
    if length_bytes.is_multiple_of(SECTOR_BYTES) {
        return Ok(());
    }
    Err(Problem::invalid(
        what,
        format!(
            "it is no disk image: it has no format that qemu-img knows, and its length of \
             {length_bytes} bytes is no whole number of {SECTOR_BYTES}-byte sectors"
        ),
    )
    .next("`qemu-img info FILE` shows what it is taken for"))
}

async fn convert(what: &str, source: &Source, format: &str, to: &Path) -> Result<(), Problem> {
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-f", format, "-O", "raw"]).arg(source.argument()).arg(to);
    let output = qemu_img(what, &mut command).await?;
    if output.status.success() {
        return Ok(());
    }
    let said = said(&output);
    if said.contains("No space left on device") {
        return Err(
            Problem::no_space(what, "no space left in the pool").next("free space in the pool")
        );
    }
    Err(Problem::invalid(what, said))
}

fn said(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    format!("qemu-img: {}", text.trim().trim_start_matches("qemu-img: "))
}

/// Which blocks of a sparse file are data. Zeros that take space are given back: there is nothing
/// below an image, so absent reads the same.
fn scan(file: &DiskFile, size_bytes: u64) -> std::io::Result<BlockStates> {
    let states = BlockStates::new(size_bytes / BLOCK_BYTES);
    let mut at = 0;
    while let Some(extent) = file.next_data(at)? {
        let start = extent.start - extent.start % BLOCK_BYTES;
        let end = extent.end.next_multiple_of(BLOCK_BYTES).min(size_bytes);
        scan_extent(file, start..end, &states)?;
        at = end;
    }
    Ok(states)
}

fn scan_extent(file: &DiskFile, extent: Range<u64>, states: &BlockStates) -> std::io::Result<()> {
    const CHUNK_BYTES: u64 = 1 << 20;
    const ZEROS: [u8; 4096] = [0; 4096];
    let mut buffer = vec![0; index(CHUNK_BYTES)];
    for start in (extent.start..extent.end).step_by(index(CHUNK_BYTES)) {
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
