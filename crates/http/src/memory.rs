//! Keeps the memory of this process, and of the programs that it starts, off the disks of its host.

use std::io;
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::libc;
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use perigee_model::Problem;

/// The number of the capability `CAP_IPC_LOCK`.
const CAP_IPC_LOCK: u32 = 14;

/// What lets a process lock any amount of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockedMemory {
    /// There is no limit, also for the programs that this process starts.
    Unlimited,
    /// There is a limit, which this process may ignore. A program that it starts as another user may not, unless it is
    /// given `CAP_IPC_LOCK` ([`pass_lock_right`]).
    ByRight,
}

/// Lets this process lock any amount of memory.
///
/// # Errors
/// When the kernel allows neither to raise the limit nor to ignore it.
pub fn allow_locked_memory() -> io::Result<LockedMemory> {
    match setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY) {
        Ok(()) => Ok(LockedMemory::Unlimited),
        Err(_) if ignores_limit()? => Ok(LockedMemory::ByRight),
        Err(error) => Err(error.into()),
    }
}

/// Changes the user of the calling process, which keeps the right to lock memory over this and over an exec, and
/// no other right. It is async-signal-safe: to be called between fork and exec, by root.
///
/// # Errors
/// When a system call is refused.
pub fn pass_lock_right(uid: libc::uid_t, gid: libc::gid_t) -> io::Result<()> {
    // The layout of capget(2), version 3: two groups of 32 capabilities.
    let header: [u32; 2] = [0x2008_0522, 0];
    let lock = 1_u32 << CAP_IPC_LOCK;
    // Effective, permitted and inheritable, of the lower and of the higher group.
    let rights: [u32; 6] = [lock, lock, lock, 0, 0, 0];
    // SAFETY: the pointers are valid for the calls, which keep none of them.
    unsafe {
        Errno::result(libc::setgroups(0, std::ptr::null()))?;
        Errno::result(libc::setgid(gid))?;
        Errno::result(libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0))?;
        Errno::result(libc::setuid(uid))?;
        Errno::result(libc::syscall(libc::SYS_capset, header.as_ptr(), rights.as_ptr()))?;
        let raise = libc::PR_CAP_AMBIENT_RAISE;
        Errno::result(libc::prctl(libc::PR_CAP_AMBIENT, raise, CAP_IPC_LOCK, 0, 0))?;
    }
    Ok(())
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

/// Keeps this process's memory off this host's disks. What may not leave another site must not get into a swap file or a core dump here.
/// To be called before such data come. Only the first call does something.
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
            "run this daemon as root, or without a limit of locked memory (`ulimit -l unlimited`)",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This is for a machine where root may not raise the limit.
    #[test]
    fn a_program_of_another_user_keeps_the_right_to_lock_memory_and_no_other() {
        use std::os::unix::process::CommandExt;
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let mut command = std::process::Command::new("cat");
        command.arg("/proc/self/status");
        // SAFETY: it makes system calls only.
        unsafe { command.pre_exec(|| pass_lock_right(65534, 65534)) };
        let status = String::from_utf8(command.output().expect("cat").stdout).expect("text");
        assert!(status.contains("Uid:\t65534\t65534\t65534\t65534"), "{status}");
        assert!(status.contains("CapEff:\t0000000000004000"), "{status}");
        assert!(status.contains("CapPrm:\t0000000000004000"), "{status}");
    }

    #[test]
    fn what_is_started_dumps_no_memory_either() {
        dump_no_core().expect("the kernel lets everyone do that");
        let started = std::process::Command::new("cat").arg("/proc/self/coredump_filter").output();
        let filter = String::from_utf8(started.expect("cat").stdout).expect("digits");
        assert_eq!(u64::from_str_radix(filter.trim(), 16), Ok(0), "{filter}");
    }
}
