//! The controller's directory: its lock, its store and the cluster's certificate authority.

use std::fs::File;
use std::path::{Path, PathBuf};

use perigee_http::Authority;
use perigee_model::Problem;

/// The store, in the controller's directory.
pub const STORE: &str = "state.db";

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

/// The authority of the cluster whose controller has this state directory. It is made if there is none.
///
/// # Errors
/// When its files can't be used.
pub fn authority(state: &Path) -> Result<Authority, Problem> {
    Authority::open(&authority_dir(state))
}

/// Where the authority's keys are in a state directory.
pub fn authority_dir(state: &Path) -> PathBuf {
    state.join("authority")
}
