//! The outputs of jobs.
//!
//! An output's name is its job. It gets it only when it is complete. Outputs are on the same disk as the controller's
//! store, for which some space is always reserved. A tar is never unpacked here (see [`crate::tars`]).

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use perigee_model::{JobId, Problem};
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;

/// A request body without new bytes for this long is aborted.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// The space that files leave to the store. A job that can't be recorded can't continue.
const RESERVE_BYTES: u64 = 256 << 20;

/// The disk's free space is checked each time a file has grown by this much.
const LOOK_EVERY_BYTES: u64 = 16 << 20;

pub fn output_path(state_dir: &Path, job: &JobId) -> PathBuf {
    state_dir.join("outputs").join(format!("{job}.tar"))
}

/// Creates the directories, and removes incomplete files of an earlier run.
pub fn prepare(state_dir: &Path) -> Result<(), Problem> {
    let dir = state_dir.join("outputs");
    let fault = |e| Problem::internal(format!("can't prepare {}", dir.display()), e);
    std::fs::create_dir_all(&dir).map_err(fault)?;
    for entry in std::fs::read_dir(&dir).map_err(fault)? {
        let path = entry.map_err(fault)?.path();
        if path.extension().is_some_and(|end| end == "part") {
            std::fs::remove_file(&path).map_err(fault)?;
        }
    }
    // Earlier controllers kept input files here.
    for old in ["bundles", "seeds"].map(|name| state_dir.join(name)) {
        match std::fs::remove_dir_all(&old) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(fault(e)),
            _ => {}
        }
    }
    Ok(())
}

/// Whether a text is a SHA-256. It becomes part of a path, so this must be checked.
pub fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Stores a job's output. An earlier output of the job is replaced.
///
/// # Errors
/// `Invalid` if the length or the checksum differs from the guest's: a new try would not help. `NoSpace` if
/// there is no room for it now.
pub async fn store_output<E: std::fmt::Display>(
    state_dir: &Path,
    job: &JobId,
    body: impl Stream<Item = Result<Bytes, E>> + Unpin,
    expected_bytes: u64,
    expected_sha256: &str,
) -> Result<(), Problem> {
    let target = output_path(state_dir, job);
    let part = Part::new(target.with_extension("part"));
    check_room(&part.path, expected_bytes)?;
    let (bytes, sha256) = receive(body, &part.path, expected_bytes).await?;
    if bytes != expected_bytes || sha256 != expected_sha256 {
        let why = format!(
            "the output disk has {bytes} bytes with SHA-256 {sha256}, but the guest wrote {expected_bytes} with {expected_sha256}"
        );
        return Err(Problem::invalid(format!("can't fetch the output of job {job}"), why));
    }
    part.keep(&target)
}

/// Writes a body to a file, and returns its length and its SHA-256.
async fn receive<E: std::fmt::Display>(
    mut body: impl Stream<Item = Result<Bytes, E>> + Unpin,
    path: &Path,
    bytes_max: u64,
) -> Result<(u64, String), Problem> {
    let fault = |e: std::io::Error| write_problem(path, &e);
    check_room(path, 0)?;
    let mut file = tokio::fs::File::create(path).await.map_err(fault)?;
    let mut hash = Sha256::new();
    let mut bytes = 0;
    let mut look_at = LOOK_EVERY_BYTES;
    loop {
        let next = tokio::time::timeout(SILENCE_MAX, body.next()).await.map_err(|_| {
            let why = format!("no bytes arrived for {} s", SILENCE_MAX.as_secs());
            Problem::unavailable("can't receive a file", why)
        })?;
        let Some(chunk) = next else { break };
        let chunk = chunk.map_err(|e| Problem::unavailable("can't receive a file", e))?;
        bytes += chunk.len() as u64;
        if bytes > bytes_max {
            let why = format!("it is longer than {bytes_max} bytes");
            return Err(Problem::invalid("can't receive a file", why));
        }
        if bytes >= look_at {
            check_room(path, 0)?;
            look_at = bytes + LOOK_EVERY_BYTES;
        }
        hash.update(&chunk);
        file.write_all(&chunk).await.map_err(fault)?;
    }
    file.sync_all().await.map_err(fault)?;
    Ok((bytes, hex(&hash.finalize())))
}

fn write_problem(path: &Path, error: &std::io::Error) -> Problem {
    let what = format!("can't write {}", path.display());
    match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => no_room(what, error),
        _ => Problem::internal(what, error),
    }
}

fn no_room(what: String, why: impl std::fmt::Display) -> Problem {
    Problem::no_space(what, why)
        .next("free space on the controller's disk, or delete jobs whose outputs nobody needs")
}

/// # Errors
/// `NoSpace` if a file of this size would use the space that is reserved for the store.
fn check_room(path: &Path, bytes: u64) -> Result<(), Problem> {
    let dir = path.parent().unwrap_or(path);
    let disk = rustix::fs::statvfs(dir).map_err(|e| write_problem(path, &e.into()))?;
    let free_bytes = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free_bytes >= bytes.saturating_add(RESERVE_BYTES) {
        return Ok(());
    }
    let (free, reserve) = (free_bytes >> 20, RESERVE_BYTES >> 20);
    let why = format!(
        "it needs {} MiB; the disk has {free} MiB free, and {reserve} MiB are kept for the controller's store",
        bytes >> 20
    );
    Err(no_room(format!("can't write {}", path.display()), why))
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An incomplete file. It is removed when this is dropped, unless it is kept.
struct Part {
    path: PathBuf,
}

impl Part {
    fn new(path: PathBuf) -> Self {
        Self { path }
    }

    fn keep(self, target: &Path) -> Result<(), Problem> {
        std::fs::rename(&self.path, target)
            .map_err(|e| Problem::internal(format!("can't keep {}", target.display()), e))
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // After `keep` the file no longer has this name, which is not an error.
        drop(std::fs::remove_file(&self.path));
    }
}

#[cfg(test)]
mod tests;
