//! Looks for what other users could read.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Everything below a directory that is open to other users. Only the named directories may be passed through, and no
/// directory may be listed.
pub fn open_to_others(root: &Path, may_pass: impl Fn(&Path) -> bool) -> Vec<String> {
    let mut open = Vec::new();
    let mut todo: Vec<PathBuf> = vec![root.to_owned()];
    while let Some(path) = todo.pop() {
        // It may have gone in the meantime.
        let Ok(meta) = std::fs::symlink_metadata(&path) else { continue };
        if meta.is_symlink() {
            continue;
        }
        let mode = meta.permissions().mode() & 0o777;
        let allowed = if meta.is_dir() && may_pass(&path) { 0o711 } else { 0o700 };
        if mode & !allowed != 0 {
            open.push(format!("{mode:03o} {}", path.display()));
        }
        if meta.is_dir() {
            todo.extend(std::fs::read_dir(&path).into_iter().flatten().flatten().map(|e| e.path()));
        }
    }
    open
}
