//! Whether all of an image is in its file. What a file's end has cut off reads as zeros for `qemu-img`, so half a download
//! would become a good image.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use perigee_model::Problem;
use perigee_model::units::format_bytes;
use perigee_model::volume::ImageFormat;
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::ChildStdout;

use crate::images::import::inspect::{Found, Source};
use crate::images::import::source::ImportFrom;
use crate::images::import::{looks, qcow2};
use crate::images::progress::stopped;

/// A line of `qemu-img map` is an extent, and much shorter.
const LINE_BYTES_MAX: u64 = 4096;

/// What `qemu-img map` says of a part of the disk.
#[derive(Debug, Deserialize)]
struct Extent {
    length: u64,
    data: bool,
    /// Where it is in the file, if it is there as it is.
    offset: Option<u64>,
}

impl Source<'_> {
    /// Refuses a file that ends before the last of its data.
    pub(super) async fn check_whole(
        &self,
        found: &Found,
        silence_max: Duration,
    ) -> Result<(), Problem> {
        let ImportFrom::File(file) = self.source else { return Ok(()) };
        if found.format == ImageFormat::Raw.qemu_name() {
            return Ok(());
        }
        let what = self.what;
        let failed = |error: io::Error| match self.work.is_stopped() {
            true => stopped(what),
            false => Problem::internal(what, error),
        };
        let length_bytes = looks::length(file).map_err(failed)?;
        if found.format == ImageFormat::Qcow2.qemu_name() {
            let (file, work) = (file.try_clone().map_err(failed)?, Arc::clone(self.work));
            let look = move || qcow2::missing(&file, length_bytes, &work);
            let missing = tokio::task::spawn_blocking(look).await;
            let missing = missing.map_err(|error| Problem::internal(what, error))?;
            if let Some(missing) = missing.map_err(failed)? {
                return Err(cut(what, length_bytes, &missing));
            }
        }
        let arguments = ["map", "--output=json", "-f", &found.format, self.source.argument()];
        let run = self.reading(&arguments, found.cpu_s_max(), silence_max);
        let said = run.run_reading(None, self.work, end_of_data).await?;
        if !said.status.success() {
            return Err(Problem::invalid(what, said.reason()));
        }
        if said.stdout > length_bytes {
            let missing = format!("its data goes on to byte {}", said.stdout);
            return Err(cut(what, length_bytes, &missing));
        }
        Ok(())
    }
}

fn cut(what: &str, length_bytes: u64, missing: &str) -> Problem {
    let why = format!(
        "it was cut off: the file ends after {length_bytes} bytes ({}), and {missing}",
        format_bytes(length_bytes)
    );
    Problem::invalid(what, why)
        .next("copy or download it again, and compare its size or checksum with its source's")
}

/// Where the last data of a file ends, as `qemu-img map` says it.
async fn end_of_data(stdout: Option<ChildStdout>) -> io::Result<u64> {
    let Some(stdout) = stdout else { return Ok(0) };
    let (mut lines, mut line, mut end) = (BufReader::new(stdout), String::new(), 0);
    loop {
        line.clear();
        if (&mut lines).take(LINE_BYTES_MAX).read_line(&mut line).await? == 0 {
            return Ok(end);
        }
        let text = line.trim().trim_start_matches('[').trim_end_matches([',', ']']);
        if text.is_empty() {
            continue;
        }
        let extent: Extent = serde_json::from_str(text).map_err(io::Error::other)?;
        if let (true, Some(offset)) = (extent.data, extent.offset) {
            end = end.max(offset.saturating_add(extent.length));
        }
    }
}
