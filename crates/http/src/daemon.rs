//! What every daemon does first.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::files::make_directories;
use crate::notify;
use crate::ours;
use futures_util::future::{BoxFuture, FutureExt as _};
use nix::errno::Errno;
use nix::libc;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{getpid, getsid};
use perigee_model::{Problem, ProblemKind};
use tokio::signal::unix::{SignalKind, signal};

/// The most files that a daemon may open. The limit is not higher, because some programs that it starts close
/// every possible descriptor one by one.
const OPEN_FILES_MAX: u64 = 1 << 20;
/// A daemon has some nine times the part of a CPU that a guest's vCPU has, if both want it: each step is a quarter more (sched(7)).
const NICENESS: i32 = -10;

/// To be called at the start of a daemon, before it makes a file. Its files, directories and sockets are closed to
/// other users from then on, and so are those of the programs that it starts. Its threads, and those of these
/// programs, come before the guests' while both want a CPU.
pub fn prepare_daemon() {
    umask(Mode::S_IRWXG | Mode::S_IRWXO);
    allow_many_files();
    if let Err(error) = take_precedence() {
        // Only root may. Who runs daemons as another user has the CPUs shared as by default.
        tracing::debug!(%error, "the daemon's threads do not come before the guests'");
    }
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
        notify::stopping();
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

/// Where the kernel has autogroups, a thread's niceness counts only within its session, and the session has a niceness of its own.
/// The session of a terminal is not ours to change.
fn take_precedence() -> std::io::Result<()> {
    for task in std::fs::read_dir("/proc/self/task")? {
        let thread = task?.file_name();
        let Some(thread) = thread.to_str().and_then(|name| name.parse().ok()) else { continue };
        // SAFETY: it takes numbers only.
        Errno::result(unsafe { libc::setpriority(libc::PRIO_PROCESS, thread, NICENESS) })?;
    }
    let leads_session = getsid(None).is_ok_and(|session| session == getpid());
    let autogroup = Path::new("/proc/self/autogroup");
    if leads_session && autogroup.exists() {
        std::fs::write(autogroup, NICENESS.to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_a_daemon_starts_come_before_guests() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        take_precedence().expect("root may");
        let niceness = std::thread::spawn(|| {
            // SAFETY: it takes numbers only.
            unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }
        });
        assert_eq!(niceness.join().expect("the thread"), NICENESS);
    }

    #[test]
    fn a_daemon_may_open_as_many_files_as_it_is_allowed_to() {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
        setrlimit(Resource::RLIMIT_NOFILE, hard.min(1024), hard).expect("a low limit");
        allow_many_files();
        let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
        assert_eq!(soft, hard.min(OPEN_FILES_MAX));
    }
}
