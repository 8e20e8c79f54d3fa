//! What every daemon does first.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::files::make_directories;
use crate::ours;
use futures_util::future::{BoxFuture, FutureExt as _};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::{Mode, umask};
use perigee_model::{Problem, ProblemKind};
use tokio::signal::unix::{SignalKind, signal};

/// The most files that a daemon may open. The limit is not higher, because some programs that it starts close
/// every possible descriptor one by one.
const OPEN_FILES_MAX: u64 = 1 << 20;

/// To be called at the start of a daemon, before it makes a file. Its files, directories and sockets are closed to
/// other users from then on, and so are those of the programs that it starts.
pub fn prepare_daemon() {
    umask(Mode::S_IRWXG | Mode::S_IRWXO);
    allow_many_files();
}

/// Waits for SIGTERM or SIGINT, by which a daemon is stopped.
///
/// # Errors
/// When signals can't be waited for.
pub fn stopped() -> Result<BoxFuture<'static, ()>, Problem> {
    let on = |kind| signal(kind).map_err(|e| Problem::internal("can't wait for signals", e));
    let mut terminate = on(SignalKind::terminate())?;
    let mut interrupt = on(SignalKind::interrupt())?;
    let stopped = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    Ok(stopped.boxed())
}

/// Makes a daemon's directory, and closes it to other users if it exists already.
///
/// # Errors
/// If it can't be made, or if another user can have put something else in its place.
pub fn private_directory(path: &Path) -> Result<(), Problem> {
    let refused = |error: std::io::Error| {
        let what = format!("can't use the directory {}", path.display());
        let problem = Problem::of_io(ProblemKind::Invalid, what, &error);
        match problem.kind {
            ProblemKind::NoSpace => problem,
            _ => problem.next("choose a directory that this user may make, or that it owns"),
        }
    };
    make_directories(path).map_err(refused)?;
    ours::check_owner(path)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o700)).map_err(refused)?;
    ours::check(path)
}

/// Raises the limit of open files. Clients, volumes and VMs need some descriptors
/// each, and shells and service managers often allow only 1024 unless a program asks for more.
fn allow_many_files() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        let wanted = hard.min(OPEN_FILES_MAX);
        if soft >= wanted { Ok(()) } else { setrlimit(Resource::RLIMIT_NOFILE, wanted, hard) }
    });
    if let Err(error) = raised {
        tracing::warn!(%error, "can't raise the limit of open files");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_may_open_as_many_files_as_it_is_allowed_to() {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
        setrlimit(Resource::RLIMIT_NOFILE, hard.min(1024), hard).expect("a low limit");
        allow_many_files();
        let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
        assert_eq!(soft, hard.min(OPEN_FILES_MAX));
    }
}
