//! The controller's files: uploaded input bundles, seeds while they are built, and outputs.
//!
//! A bundle is kept under its SHA-256 and an output under its job; both appear under their
//! name only when they are whole. A tar is never unpacked here: entries are copied from one tar to
//! another, and an entry that could leave its directory is refused.

use std::io::{Read, Write};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use perigee_model::guest::Seed;
use perigee_model::job::Bundle;
use perigee_model::{JobId, Problem};
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;

/// A body that is silent for so long is given up.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Larger inputs belong on a volume.
const BUNDLE_BYTES_MAX: u64 = 16 << 30;

#[derive(Debug, thiserror::Error)]
pub enum TarError {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("entry {0:?} is absolute or goes up with '..'")]
    Escapes(String),
    #[error("entry {0:?} is neither a file, a directory nor a symbolic link")]
    Kind(String),
    #[error("the seed's description: {0}")]
    Json(#[from] serde_json::Error),
}

pub fn bundle_path(state_dir: &Path, sha256: &str) -> PathBuf {
    state_dir.join("bundles").join(format!("{sha256}.tar"))
}

pub fn output_path(state_dir: &Path, job: &JobId) -> PathBuf {
    state_dir.join("outputs").join(format!("{job}.tar"))
}

pub fn seed_path(state_dir: &Path, job: &JobId) -> PathBuf {
    state_dir.join("seeds").join(format!("{job}.tar"))
}

/// Makes the directories, and removes the halves that an earlier run left there.
pub fn prepare(state_dir: &Path) -> Result<(), Problem> {
    for name in ["bundles", "outputs", "seeds"] {
        let dir = state_dir.join(name);
        let fault = |e| Problem::internal(format!("prepare {}", dir.display()), e);
        std::fs::create_dir_all(&dir).map_err(fault)?;
        for entry in std::fs::read_dir(&dir).map_err(fault)? {
            let path = entry.map_err(fault)?.path();
            // A seed is built anew by the job that needs it.
            if name == "seeds" || path.extension().is_some_and(|end| end == "part") {
                std::fs::remove_file(&path).map_err(fault)?;
            }
        }
    }
    Ok(())
}

/// Whether a text is the name of a bundle; it becomes part of a path.
pub fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Stores an uploaded tar after looking at every entry.
///
/// # Errors
/// `Invalid` when it is no tar or holds an entry that a job may not have.
pub async fn store_bundle<E: std::fmt::Display>(
    state_dir: &Path,
    body: impl Stream<Item = Result<Bytes, E>> + Unpin,
) -> Result<Bundle, Problem> {
    let part = Part::new(state_dir.join("bundles").join(format!("{}.part", uuid::Uuid::new_v4())));
    let (bytes, sha256) = receive(body, &part.path, BUNDLE_BYTES_MAX).await?;
    let path = part.path.clone();
    blocking("check a bundle", move || {
        let mut archive = tar::Archive::new(std::fs::File::open(path)?);
        for entry in archive.entries()? {
            input_path(&entry?)?;
        }
        Ok(())
    })
    .await
    .map_err(|problem| Problem::invalid("upload input files", problem.why))?;
    part.keep(&bundle_path(state_dir, &sha256))?;
    Ok(Bundle { sha256, bytes })
}

/// Stores a job's output; what was stored before is replaced.
///
/// # Errors
/// `Internal` when length or checksum are not those the guest named.
pub async fn store_output<E: std::fmt::Display>(
    state_dir: &Path,
    job: &JobId,
    body: impl Stream<Item = Result<Bytes, E>> + Unpin,
    expected_bytes: u64,
    expected_sha256: &str,
) -> Result<(), Problem> {
    let target = output_path(state_dir, job);
    let part = Part::new(target.with_extension("part"));
    let (bytes, sha256) = receive(body, &part.path, expected_bytes).await?;
    if bytes != expected_bytes || sha256 != expected_sha256 {
        let why = format!(
            "the output disk gave {bytes} bytes with SHA-256 {sha256}, the guest wrote {expected_bytes} with {expected_sha256}"
        );
        return Err(Problem::internal(format!("fetch the output of job {job}"), why));
    }
    part.keep(&target)
}

/// Builds the tar for a job's seed disk.
pub async fn build_seed(
    state_dir: &Path,
    job: &JobId,
    seed: Seed,
    bundle: Option<&str>,
) -> Result<PathBuf, Problem> {
    let path = seed_path(state_dir, job);
    let bundle = bundle.map(|sha256| bundle_path(state_dir, sha256));
    let target = path.clone();
    blocking("build a seed", move || {
        let file = std::io::BufWriter::new(std::fs::File::create(target)?);
        let bundle = bundle.map(std::fs::File::open).transpose()?;
        write_seed(file, &seed, bundle)?.into_inner().map_err(std::io::Error::from)?;
        Ok(())
    })
    .await?;
    Ok(path)
}

fn write_seed<W: Write>(target: W, seed: &Seed, bundle: Option<impl Read>) -> Result<W, TarError> {
    let mut builder = tar::Builder::new(target);
    let json = serde_json::to_vec(seed)?;
    let mut header = header_of_root(0o644, 0);
    header.set_size(json.len() as u64);
    builder.append_data(&mut header, "job.json", &json[..])?;
    let Some(bundle) = bundle else { return Ok(builder.into_inner()?) };
    for entry in tar::Archive::new(bundle).entries()? {
        copy_entry(entry?, &mut builder)?;
    }
    Ok(builder.into_inner()?)
}

fn copy_entry<R: Read, W: Write>(
    entry: tar::Entry<'_, R>,
    builder: &mut tar::Builder<W>,
) -> Result<(), TarError> {
    let Some(path) = input_path(&entry)? else { return Ok(()) };
    let mut header = header_of_root(entry.header().mode()? & 0o777, entry.header().mtime()?);
    header.set_entry_type(entry.header().entry_type());
    if let Some(link) = entry.link_name()? {
        builder.append_link(&mut header, path, link)?;
    } else {
        header.set_size(entry.size());
        builder.append_data(&mut header, path, entry)?;
    }
    Ok(())
}

/// The numbering is the guest's: there the job runs as root.
fn header_of_root(mode: u32, mtime_s: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_mode(mode);
    header.set_mtime(mtime_s);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(0);
    header
}

/// Where an entry goes on the seed; `None` for the bundle's own top directory and for what is no
/// file but a word about the archive.
fn input_path<R: Read>(entry: &tar::Entry<'_, R>) -> Result<Option<PathBuf>, TarError> {
    if entry.header().entry_type().is_pax_global_extensions() {
        return Ok(None);
    }
    let path = entry.path()?;
    let shown = || path.to_string_lossy().into_owned();
    let kind = entry.header().entry_type();
    if !(kind.is_file() || kind.is_dir() || kind.is_symlink()) {
        return Err(TarError::Kind(shown()));
    }
    let mut inside = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(part) => inside.push(part),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                return Err(TarError::Escapes(shown()));
            }
        }
    }
    let is_top = inside.as_os_str().is_empty();
    Ok((!is_top).then(|| Path::new("inputs").join(inside)))
}

/// Writes a body to a file and says how long it is and its SHA-256.
async fn receive<E: std::fmt::Display>(
    mut body: impl Stream<Item = Result<Bytes, E>> + Unpin,
    path: &Path,
    bytes_max: u64,
) -> Result<(u64, String), Problem> {
    let fault = |e: std::io::Error| Problem::internal(format!("write {}", path.display()), e);
    let mut file = tokio::fs::File::create(path).await.map_err(fault)?;
    let mut hash = Sha256::new();
    let mut bytes = 0;
    loop {
        let next = tokio::time::timeout(SILENCE_MAX, body.next()).await.map_err(|_| {
            let why = format!("no byte came for {} s", SILENCE_MAX.as_secs());
            Problem::unavailable("receive a file", why)
        })?;
        let Some(chunk) = next else { break };
        let chunk = chunk.map_err(|e| Problem::unavailable("receive a file", e))?;
        bytes += chunk.len() as u64;
        if bytes > bytes_max {
            let why = format!("it is longer than {bytes_max} bytes");
            return Err(Problem::invalid("receive a file", why));
        }
        hash.update(&chunk);
        file.write_all(&chunk).await.map_err(fault)?;
    }
    file.sync_all().await.map_err(fault)?;
    Ok((bytes, hex(&hash.finalize())))
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A file that is not whole yet; it goes away unless it is kept.
struct Part {
    path: PathBuf,
}

impl Part {
    fn new(path: PathBuf) -> Self {
        Self { path }
    }

    fn keep(self, target: &Path) -> Result<(), Problem> {
        std::fs::rename(&self.path, target)
            .map_err(|e| Problem::internal(format!("keep {}", target.display()), e))
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // After `keep` it is not there any more, and that is fine.
        drop(std::fs::remove_file(&self.path));
    }
}

async fn blocking<T: Send + 'static>(
    what: &'static str,
    act: impl FnOnce() -> Result<T, TarError> + Send + 'static,
) -> Result<T, Problem> {
    tokio::task::spawn_blocking(act)
        .await
        .map_err(|e| Problem::internal(what, e))?
        .map_err(|e| Problem::internal(what, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tar_of(entries: &[(&str, tar::EntryType)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (path, kind) in entries {
            let mut header = tar::Header::new_gnu();
            // Straight into the field: the builder would refuse what is tested here.
            header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
            header.set_entry_type(*kind);
            header.set_uid(1234);
            header.set_mode(0o4755);
            header.set_size(if kind.is_file() { 2 } else { 0 });
            header.set_cksum();
            let data: &[u8] = if kind.is_file() { b"hi" } else { b"" };
            builder.append(&header, data).expect("append");
        }
        builder.into_inner().expect("tar")
    }

    fn body(bytes: Vec<u8>) -> impl Stream<Item = Result<Bytes, std::io::Error>> + Unpin {
        futures_util::stream::iter([Ok(Bytes::from(bytes))])
    }

    fn seed() -> Seed {
        Seed {
            job: "j-0001".into(),
            command: vec!["true".into()],
            env: Default::default(),
            mounts: Vec::new(),
            outputs: Vec::new(),
            timeout_s: None,
        }
    }

    #[tokio::test]
    async fn an_entry_that_leaves_its_directory_is_refused() {
        let dir = tempfile::tempdir().expect("tempdir");
        std::fs::create_dir(dir.path().join("bundles")).expect("mkdir");
        for bad in ["/etc/passwd", "a/../../b", ".."] {
            let tar = tar_of(&[(bad, tar::EntryType::Regular)]);
            let problem = store_bundle(dir.path(), body(tar)).await.expect_err(bad);
            assert_eq!(problem.kind, perigee_model::ProblemKind::Invalid);
        }
        let device = tar_of(&[("disk", tar::EntryType::Block)]);
        assert!(store_bundle(dir.path(), body(device)).await.is_err());
        assert!(store_bundle(dir.path(), body(vec![7; 2000])).await.is_err());
        let left = std::fs::read_dir(dir.path().join("bundles")).expect("ls").count();
        assert_eq!(left, 0, "nothing stays of a refused bundle");
    }

    #[test]
    fn a_seed_begins_with_the_job_and_gives_its_files_to_root() {
        let bundle =
            tar_of(&[("./", tar::EntryType::Directory), ("./a/q.sql", tar::EntryType::Regular)]);
        let seed = write_seed(Vec::new(), &seed(), Some(&bundle[..])).expect("seed");
        let mut archive = tar::Archive::new(&seed[..]);
        let entries: Vec<_> = archive
            .entries()
            .expect("entries")
            .map(|entry| {
                let entry = entry.expect("entry");
                let header = entry.header();
                let path = entry.path().expect("path").to_string_lossy().into_owned();
                (path, header.uid().expect("uid"), header.mode().expect("mode"))
            })
            .collect();
        assert_eq!(
            entries,
            [("job.json".to_owned(), 0, 0o644), ("inputs/a/q.sql".to_owned(), 0, 0o755)]
        );
    }

    #[tokio::test]
    async fn an_output_that_differs_from_what_the_guest_wrote_is_refused() {
        let dir = tempfile::tempdir().expect("tempdir");
        std::fs::create_dir(dir.path().join("outputs")).expect("mkdir");
        let job = JobId::new("j-0001").expect("id");
        let sha256 = hex(&Sha256::digest(b"right"));
        let stored = store_output(dir.path(), &job, body(b"wrong".to_vec()), 5, &sha256).await;
        assert!(stored.is_err());
        assert!(!output_path(dir.path(), &job).exists());
        let stored = store_output(dir.path(), &job, body(b"right".to_vec()), 5, &sha256).await;
        stored.expect("whole");
        assert!(output_path(dir.path(), &job).exists());
    }
}
