//! Keeps this process's memory off this host's disks. Blocks that may not leave another site must not get into a
//! swap file or a core dump here.

use std::sync::OnceLock;

use nix::errno::Errno;
use nix::libc;
use perigee_http::memory::{allow_locked_memory, dump_no_core};
use perigee_model::Problem;

/// To be called before such blocks come. Only the first call does something.
///
/// # Errors
/// `Unsupported` when the kernel does not allow it.
pub fn keep_off_disks(what: &str) -> Result<(), Problem> {
    static DONE: OnceLock<Result<(), String>> = OnceLock::new();
    let done = DONE.get_or_init(|| {
        // Under a limit the lock would succeed, and memory would be refused later.
        allow_locked_memory().map_err(|error| error.to_string())?;
        dump_no_core().map_err(|error| error.to_string())?;
        // Only what is touched takes memory.
        let flags = libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT;
        // SAFETY: mlockall takes no pointer, and changes nothing that the process can see in its memory.
        let locked = Errno::result(unsafe { libc::mlockall(flags) });
        locked.map(drop).map_err(|error| error.to_string())
    });
    done.as_ref().copied().map_err(|error| {
        let why = format!(
            "its policy is leave-site: never, and this host's memory can't be kept off its disks: {error}"
        );
        Problem::unsupported(what, why).next(
            "run the volume server as root, or without a limit of locked memory (`ulimit -l unlimited`)",
        )
    })
}
