//! A source that `qemu-img` reads: what it says of it, and the conversion.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use perigee_model::limits::{OutOfLimits, VOLUME_BYTES};
use perigee_model::volume::{BLOCK_BYTES, ImageFormat};
use perigee_model::{Problem, ProblemKind};
use serde::Deserialize;

use crate::images::import::source::ImportFrom;
use crate::images::import::{looks, new_file};
use crate::images::progress::no_room;
use crate::images::qemu_img::{self, OUTPUT, Program, Run, RunUser};
use crate::work::Work;

/// For each of so many bytes of an image, `qemu-img` gets one second of CPU time, and some for a start.
const BYTES_PER_CPU_SECOND: u64 = 8 << 20;
const START_CPU_S: u64 = 60;

/// What a source is.
pub(super) struct Found {
    /// As `qemu-img` names it.
    pub(super) format: String,
    pub(super) disk_bytes: u64,
    /// What the user is to know about it.
    pub(super) note: Option<String>,
}

/// The fields of `qemu-img info` that matter here.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct SourceInfo {
    format: String,
    virtual_size: u64,
    backing_filename: Option<String>,
    #[serde(default)]
    encrypted: bool,
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
    /// The files with a VMDK's data.
    #[serde(default)]
    extents: Vec<ExtentFile>,
}

#[derive(Debug, Deserialize)]
struct ExtentFile {
    filename: Option<String>,
}

#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) what: &'a str,
    pub(super) source: &'a ImportFrom,
    pub(super) user: &'a RunUser,
    pub(super) work: &'a Arc<Work>,
}

impl Source<'_> {
    /// Refuses a source that is not an image, or that refers to other files of the machine.
    pub(super) async fn inspect(
        &self,
        said: Option<ImageFormat>,
        silence_max: Duration,
    ) -> Result<Found, Problem> {
        let Self { what, source, .. } = *self;
        let look = match source {
            ImportFrom::File(file) => looks::look(what, file, said)?,
            // A guest wrote these bytes, so qemu-img must not guess a format from them.
            ImportFrom::Nbd(_) => looks::Look::of(ImageFormat::Raw),
            ImportFrom::Tree(_) => looks::Look::default(),
        };
        let arguments = ["info", "--output=json"];
        let given = look.format.map(|format| ["-f", format.qemu_name()]);
        let arguments =
            [&arguments[..], given.as_ref().map_or(&[][..], |given| given), &[source.argument()]]
                .concat();
        let run = self.reading(&arguments, START_CPU_S, silence_max);
        let answer = run.run(None, self.work).await?;
        if !answer.status.success() {
            let kind = match source {
                ImportFrom::File(_) | ImportFrom::Tree(_) => ProblemKind::Invalid,
                ImportFrom::Nbd(_) => ProblemKind::Unavailable,
            };
            return Err(Problem::new(kind, what, answer.reason()));
        }
        let info: SourceInfo = serde_json::from_slice(&answer.stdout)
            .map_err(|error| Problem::internal(what, format!("qemu-img's answer: {error}")))?;
        self.check(&info)?;
        if let Some(content_bytes) = look.content_bytes
            && content_bytes != info.virtual_size
        {
            let why = format!(
                "it is a VHD of fixed size whose footer describes a disk of {} bytes, and the file has {content_bytes} before it",
                info.virtual_size
            );
            return Err(Problem::invalid(what, why).next(
                "say what the disk is: --image-format vhd for what the footer describes, --image-format raw for the whole file",
            ));
        }
        let mut disk_bytes = info.virtual_size;
        if let ImportFrom::File(file) = source
            && info.format == ImageFormat::Raw.qemu_name()
        {
            // qemu-img counts whole sectors.
            disk_bytes = looks::check_raw(what, file, said)?;
        }
        Ok(Found { format: info.format, disk_bytes, note: look.note })
    }

    /// A run that reads the source, without an output.
    pub(super) fn reading<'r>(
        &'r self,
        arguments: &'r [&'r str],
        cpu_s_max: u64,
        silence_max: Duration,
    ) -> Run<'r> {
        Run {
            what: self.what,
            user: self.user,
            program: Program::QemuImg,
            directory: None,
            arguments,
            input: self.source.file(),
            output: None,
            edits: None,
            has_network: matches!(self.source, ImportFrom::Nbd(_)),
            cpu_s_max,
            silence_max,
        }
    }

    pub(super) async fn convert(
        &self,
        found: &Found,
        to: &Path,
        silence_max: Duration,
    ) -> Result<(), Problem> {
        let Self { what, source, user, work } = *self;
        let failed = |error: std::io::Error| Problem::internal(what, error);
        let target = new_file(to).map_err(failed)?;
        let room_bytes = found.disk_bytes.next_multiple_of(BLOCK_BYTES);
        target.set_len(room_bytes).and_then(|()| user.give(&target)).map_err(failed)?;
        let new = ["convert", "-n", "--target-is-zero", "-f", &found.format, "-O", "raw"];
        let arguments = [&new[..], &[source.argument(), OUTPUT]].concat();
        let reading = self.reading(&arguments, found.cpu_s_max(), silence_max);
        let run = Run { output: Some((&target, room_bytes)), ..reading };
        let said = run.run(Some(to), work).await?;
        qemu_img::take_back(&target).map_err(failed)?;
        if said.status.success() {
            return Ok(());
        }
        let reason = said.reason();
        if reason.contains("No space left on device") {
            return Err(no_room(what));
        }
        Err(Problem::invalid(what, reason))
    }

    fn check(&self, info: &SourceInfo) -> Result<(), Problem> {
        let refused = |why: String, next: &str| Err(Problem::invalid(self.what, why).next(next));
        if let Some(backing) = &info.backing_filename {
            let why = format!("it has a backing file, {backing}");
            return refused(why, "flatten it with `qemu-img convert` first");
        }
        let data = info.format_specific.as_ref().map(|specific| &specific.data);
        let own_name = self.source.argument();
        let foreign = data.and_then(|data| {
            let extents = data.extents.iter().filter_map(|extent| extent.filename.as_ref());
            data.data_file.iter().chain(extents.filter(|name| **name != own_name)).next()
        });
        if let Some(file) = foreign {
            let why = format!("its data is in another file, {file}");
            return refused(why, "convert it to one file with `qemu-img convert` first");
        }
        if info.encrypted {
            let why = "its content is encrypted, and only who has its key can read it".to_owned();
            return refused(why, "convert it with `qemu-img convert` and its key first");
        }
        if info.virtual_size == 0 {
            return refused("it is not a disk image: its size is 0".to_owned(), "");
        }
        if ImageFormat::of_qemu(&info.format).is_none() {
            let why = format!("its format is {}, from which no image is made", info.format);
            return refused(why, "convert it with `qemu-img convert -O qcow2` first");
        }
        Ok(())
    }
}

impl Found {
    /// The size of an image of it.
    ///
    /// # Errors
    /// When it is too large, or so small that clients would see a larger disk than the user has.
    pub(super) fn image_bytes(&self, what: &str) -> Result<u64, Problem> {
        let refused = |error: OutOfLimits| {
            let problem = error.problem(what);
            match self.disk_bytes < BLOCK_BYTES {
                true => problem.next("append zeros if that is all right: `truncate -s 4KiB FILE`"),
                false => problem,
            }
        };
        let bytes = VOLUME_BYTES.check(self.disk_bytes).map_err(refused)?;
        Ok(bytes.next_multiple_of(BLOCK_BYTES))
    }

    pub(super) fn cpu_s_max(&self) -> u64 {
        START_CPU_S + self.disk_bytes / BYTES_PER_CPU_SECOND
    }
}
