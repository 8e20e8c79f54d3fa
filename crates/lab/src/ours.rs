//! Whether only this user and root can have made what a path names.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::unistd::Uid;
use perigee_model::Problem;

const OTHERS_WRITE: u32 = 0o022;
/// In such a directory, each user can remove and rename only what is his own.
const STICKY: u32 = 0o1000;

/// # Errors
/// `Invalid` if another user can have put something else in this directory's place or into it, `Internal` if that is
/// not known.
pub fn check(directory: &Path) -> Result<(), Problem> {
    let what = || format!("can't use {}", directory.display());
    let failed = |error| Problem::internal(what(), error);
    let named = std::path::absolute(directory).map_err(failed)?;
    let real = directory.canonicalize().map_err(failed)?;
    for path in named.ancestors().chain(real.ancestors()) {
        let meta = std::fs::symlink_metadata(path).map_err(failed)?;
        let is_shared = path != named && path != real && meta.mode() & STICKY != 0;
        if let Some(why) = stranger(&meta, is_shared) {
            let why = format!("{} {why}", path.display());
            return Err(Problem::invalid(what(), why).next(
                "choose another base directory with --base, below directories that only root can write",
            ));
        }
    }
    Ok(())
}

/// Who else could have made what is there.
fn stranger(meta: &Metadata, is_shared: bool) -> Option<String> {
    if meta.uid() != 0 && meta.uid() != Uid::effective().as_raw() {
        return Some(format!("belongs to user {}", meta.uid()));
    }
    let is_open = meta.mode() & OTHERS_WRITE != 0 && !meta.is_symlink() && !is_shared;
    is_open.then(|| format!("has mode {:o}: other users can write there", meta.mode() & 0o7777))
}
