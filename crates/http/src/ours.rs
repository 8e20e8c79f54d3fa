//! Whether only this user and root can have made what a path names.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::unistd::Uid;
use perigee_model::Problem;

const OTHERS_WRITE: u32 = 0o022;
/// In such a directory, each user can remove and rename only what is his own.
const STICKY: u32 = 0o1000;

/// Whether a directory is this user's or root's.
///
/// # Errors
/// As [`check`].
pub(crate) fn check_owner(directory: &Path) -> Result<(), Problem> {
    let what = || format!("can't use {}", directory.display());
    let meta = std::fs::metadata(directory).map_err(|e| Problem::internal(what(), e))?;
    match stranger(&meta, true) {
        Some(why) => Err(Problem::invalid(what(), format!("it {why}"))
            .next("choose another directory, or give it to the user of this program")),
        None => Ok(()),
    }
}

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
            return Err(Problem::invalid(what(), why)
                .next("choose another directory, below directories that only root can write"));
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_directory_that_others_can_write_or_replace_is_not_ours() {
        let dir = tempfile::tempdir().expect("a directory");
        let (below, file) = (dir.path().join("a"), dir.path().join("a/b"));
        std::fs::create_dir_all(&file).expect("directories");
        let mode = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("a mode");
        };
        mode(&below, 0o755);
        check(&file).expect("only we can have made it");
        for open in [0o777, 0o775] {
            mode(&below, open);
            let refused = check(&file).expect_err("others can replace it");
            assert!(refused.why.contains(&format!("{open:o}")), "{refused}");
        }
        mode(&below, 0o1777);
        check(&file).expect("others can't replace what is ours there");
        mode(&file, 0o1777);
        check(&file).expect_err("others can put something into it");
        if Uid::effective().is_root() {
            mode(&file, 0o700);
            std::os::unix::fs::chown(&file, Some(12345), None).expect("another's");
            let refused = check(&file).expect_err("it is another user's");
            assert!(refused.why.contains("12345"), "{refused}");
            let refused = crate::private_directory(&file).expect_err("it is another user's");
            assert!(refused.why.contains("12345"), "{refused}");
            let secret = dir.path().join("secret");
            crate::write_private(&secret, b"x").expect("written");
            assert_eq!(crate::read_private(&secret).expect("ours"), b"x");
            std::os::unix::fs::chown(&secret, Some(12345), None).expect("another's");
            let refused = crate::read_private(&secret).expect_err("it is another user's");
            assert!(refused.why.contains("12345"), "{refused}");
        }
    }
}
