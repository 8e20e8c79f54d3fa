//! Keeps the memory of this process, and of the programs that it starts, off the disks of its host.

use std::io;

use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};

/// The number of the capability `CAP_IPC_LOCK`.
const CAP_IPC_LOCK: u32 = 14;

/// Lets this process, and what it starts, lock any amount of memory. A program that gets another user needs the
/// limit to be raised; this process may have the right to ignore it.
///
/// # Errors
/// When the kernel allows neither.
pub fn allow_locked_memory(for_another_user: bool) -> io::Result<()> {
    match setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY) {
        Err(error) if for_another_user || !ignores_limit()? => Err(error.into()),
        _ => Ok(()),
    }
}

fn ignores_limit() -> io::Result<bool> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    Ok(effective.is_some_and(|bits| bits & (1 << CAP_IPC_LOCK) != 0))
}

/// This process, and what it starts, leaves no memory behind when it crashes.
///
/// # Errors
/// When the kernel does not allow it.
pub fn dump_no_core() -> io::Result<()> {
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    // The limit does not count for a core that the kernel hands to a program. With this none has any memory.
    std::fs::write("/proc/self/coredump_filter", "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_started_dumps_no_memory_either() {
        dump_no_core().expect("the kernel lets everyone do that");
        let started = std::process::Command::new("cat").arg("/proc/self/coredump_filter").output();
        let filter = String::from_utf8(started.expect("cat").stdout).expect("digits");
        assert_eq!(u64::from_str_radix(filter.trim(), 16), Ok(0), "{filter}");
    }
}
