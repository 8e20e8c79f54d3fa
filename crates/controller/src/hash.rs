//! The controller's directory, and texts of hashes.

use std::fs::File;
use std::path::Path;

use perigee_model::Problem;

/// The store, in the controller's directory.
pub const STORE: &str = "state.db";

/// Removes what earlier controllers kept here: input files, which are in the repository now.
pub fn prepare(state_dir: &Path) -> Result<(), Problem> {
    for old in ["bundles", "seeds"].map(|name| state_dir.join(name)) {
        match std::fs::remove_dir_all(&old) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Problem::internal(format!("can't remove {}", old.display()), e));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Locks the state directory. The kernel releases the lock when the process ends, in whatever way.
pub fn lock(state_dir: &Path) -> Result<File, Problem> {
    let path = state_dir.join("lock");
    let file = File::create(&path)
        .map_err(|e| Problem::internal(format!("can't make {}", path.display()), e))?;
    file.try_lock().map_err(|e| {
        Problem::conflict(format!("can't use the state directory {}", state_dir.display()), e)
            .next("another controller uses it: stop that one, or choose another directory")
    })?;
    Ok(file)
}

/// Whether a text is a SHA-256. It becomes part of a path, so this must be checked.
pub fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
