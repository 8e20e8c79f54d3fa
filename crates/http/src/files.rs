//! Files that only their owner may read.

use std::fs::{DirBuilder, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use perigee_model::{Problem, ProblemKind};

fn can_not(what: &str, path: &Path, error: &std::io::Error) -> Problem {
    let problem =
        Problem::of_io(ProblemKind::Invalid, format!("can't {what} {}", path.display()), error);
    match problem.kind {
        ProblemKind::NoSpace => problem,
        _ => problem.next("check that the directory exists and that this user may use it"),
    }
}

/// The content of a file.
///
/// # Errors
/// `Internal` with the path if it can't be read.
pub fn read(path: &Path) -> Result<Vec<u8>, Problem> {
    std::fs::read(path).map_err(|e| can_not("read", path, &e))
}

/// Reads a file with a secret.
///
/// # Errors
/// Also when other users may read it, because then it is no secret any more, and when it is another user's.
pub fn read_private(path: &Path) -> Result<Vec<u8>, Problem> {
    let failed = |e| can_not("read", path, &e);
    let mut file = File::open(path).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    let mode = meta.mode();
    if meta.uid() != 0 && meta.uid() != nix::unistd::geteuid().as_raw() {
        let why = format!("it belongs to user {}, who may know or change it", meta.uid());
        return Err(Problem::invalid(format!("can't use {}", path.display()), why)
            .next("make a new one as the user of this program"));
    }
    if mode & 0o077 != 0 {
        let (what, mode) = (format!("can't use {}", path.display()), mode & 0o777);
        let why = format!("its mode is {mode:o}: other users may use the key in it too");
        return Err(Problem::invalid(what, why)
            .next("make a new key if somebody else may have read it; else give it mode 600"));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

/// Where the next content of a file is written. No host has such a name.
pub(crate) fn unfinished(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.new-{}", std::process::id()))
}

/// Has what was made at this path, or renamed to it, be there after a power cut.
pub(crate) fn keep_entry(path: &Path) -> std::io::Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    File::open(dir.unwrap_or(Path::new(".")))?.sync_all()
}

/// Makes a directory and those above it that do not exist, which nobody else may use.
pub(crate) fn make_directories(dir: &Path) -> std::io::Result<()> {
    let is_missing = |dir: &&Path| !dir.as_os_str().is_empty() && !dir.exists();
    let missing: Vec<&Path> = dir.ancestors().take_while(is_missing).collect();
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    missing.into_iter().try_for_each(keep_entry)
}

/// Replaces a file, so that it is the old or the new one at any time, also after a power cut. Its directory is made if it does
/// not exist. When this returns, the new one stays.
///
/// # Errors
/// When it can't be written.
pub fn write_private(path: &Path, bytes: &[u8]) -> Result<(), Problem> {
    let part = unfinished(path);
    let write = || {
        if let Some(dir) = path.parent() {
            make_directories(dir)?;
        }
        let mut file =
            File::options().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&part, path)?;
        keep_entry(path)
    };
    write().map_err(|e| can_not("write", path, &e))
}
