//! The UDP ports of guests in user networks are no ports of their host. `passt` binds a port with the guest's own number, at all
//! addresses, and shares it with whoever else shares it: so a guest could have ports of daemons, and another guest's answers. Two
//! programs in the kernel (BPF, at the group of `passt` and QEMU in the cgroup v2) see to it that a UDP socket gets a port that
//! the kernel chooses, and shares it with nobody. `passt` knows its sockets by their descriptors, so the guest sees no difference.
//!
//! The programs are there for as long as the group is, also while no agent runs.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::libc;

use crate::process::Process;

/// The group of all VMs' processes, which [`crate::cgroup`] uses too, and that of `passt` in it.
const GROUP: &str = "perigee";
const CARDS: &str = "cards";
const MOUNTS: &str = "/proc/self/mountinfo";
const RESERVED: &str = "/proc/sys/net/ipv4/ip_local_reserved_ports";

/// An instruction of the kernel's machine (RFC 9669).
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    /// The source's number, and the destination's.
    registers: u8,
    offset: i16,
    value: i32,
}

/// Of a structure of the kernel's (`linux/bpf.h`).
type Offset = i16;

/// Register 1 has the kernel's structure at the start, and register 0 the answer at the end.
mod code {
    use super::{Instruction, Offset};

    const fn of(code: u8, (to, from): (u8, u8), offset: Offset, value: i32) -> Instruction {
        Instruction { code, registers: from << 4 | to, offset, value }
    }
    /// Reads 4 bytes from the address in `from`.
    pub const fn load(to: u8, from: u8, offset: Offset) -> Instruction {
        of(0x61, (to, from), offset, 0)
    }
    /// Reads 8 bytes from the address in `from`.
    pub const fn load_pointer(to: u8, from: u8, offset: Offset) -> Instruction {
        of(0x79, (to, from), offset, 0)
    }
    /// Sets a register.
    pub const fn set(to: u8, value: i32) -> Instruction {
        of(0xb7, (to, 0), 0, value)
    }
    /// Writes 4 bytes to the address in `to`.
    pub const fn store(to: u8, offset: Offset, from: u8) -> Instruction {
        of(0x63, (to, from), offset, 0)
    }
    /// Leaves out as many instructions.
    pub const fn skip_if(register: u8, value: i32, count: i16) -> Instruction {
        of(0x15, (register, 0), count, value)
    }
    /// Leaves out as many instructions, unless the register has this value.
    pub const fn skip_unless(register: u8, value: i32, count: i16) -> Instruction {
        of(0x55, (register, 0), count, value)
    }
    /// Ends the program.
    pub const fn end() -> Instruction {
        of(0x95, (0, 0), 0, 0)
    }
}

/// `bind` of UDP: any port.
const ANY_PORT: [Instruction; 6] = {
    const PORT: Offset = 24;
    const PROTOCOL: Offset = 36;
    [
        code::load(0, 1, PROTOCOL),
        code::skip_unless(0, libc::IPPROTO_UDP, 2),
        code::set(2, 0),
        code::store(1, PORT, 2),
        code::set(0, 1),
        code::end(),
    ]
};

/// `setsockopt` of UDP: `SO_REUSEADDR` and `SO_REUSEPORT` do nothing.
const SHARES_NOTHING: [Instruction; 12] = {
    const SOCKET: Offset = 0;
    const LEVEL: Offset = 24;
    const OPTION: Offset = 28;
    const LENGTH: Offset = 32;
    const PROTOCOL_OF_SOCKET: Offset = 12;
    [
        code::load_pointer(2, 1, SOCKET),
        code::load(3, 2, PROTOCOL_OF_SOCKET),
        code::skip_unless(3, libc::IPPROTO_UDP, 7),
        code::load(3, 1, LEVEL),
        code::skip_unless(3, libc::SOL_SOCKET, 5),
        code::load(3, 1, OPTION),
        code::skip_if(3, libc::SO_REUSEADDR, 1),
        code::skip_unless(3, libc::SO_REUSEPORT, 2),
        // The kernel does not look at the option then.
        code::set(3, -1),
        code::store(1, LENGTH, 3),
        code::set(0, 1),
        code::end(),
    ]
};

/// Where a program is run, and of which type it is (`enum bpf_attach_type`, `enum bpf_prog_type`).
struct ProgramAt {
    at: u32,
    kind: u32,
    program: &'static [Instruction],
}

const PLACES: [ProgramAt; 3] = [
    ProgramAt { at: 8, kind: 18, program: &ANY_PORT },
    ProgramAt { at: 9, kind: 18, program: &ANY_PORT },
    ProgramAt { at: 22, kind: 25, program: &SHARES_NOTHING },
];

/// Puts the programs in place, and returns the group for `passt`.
pub fn prepare() -> Result<PathBuf, String> {
    let mounts = std::fs::read_to_string(MOUNTS);
    let mounts = mounts.map_err(|error| format!("can't read {MOUNTS}: {error}"))?;
    let root = cgroup_in(&mounts).ok_or("no cgroup v2 is mounted")?;
    let group = root.join(GROUP);
    let cards = group.join(CARDS);
    let failed = |error: std::io::Error| {
        format!(
            "can't keep guests from this host's UDP ports with a program at the cgroup {}: {error}",
            group.display()
        )
    };
    std::fs::create_dir_all(&cards).map_err(failed)?;
    let directory = File::open(&group).map_err(failed)?;
    for place in &PLACES {
        place.attach(&directory).map_err(failed)?;
    }
    Ok(cards)
}

/// Puts a `passt` into its group. It has made no UDP socket yet: no guest has sent anything.
pub fn enter(cards: &Path, passt: &Process) -> std::io::Result<()> {
    std::fs::write(cards.join("cgroup.procs"), passt.pid.to_string())
}

/// The kernel chooses none of these by itself.
pub fn reserve(port: u16) {
    let reserved = std::fs::read_to_string(RESERVED).unwrap_or_default();
    if let Some(reserved) = with(reserved.trim(), port)
        && let Err(error) = std::fs::write(RESERVED, reserved)
    {
        tracing::warn!(%error, "port {port} of this host may become another program's ({RESERVED})");
    }
}

/// The kernel's list with this port; `None` if it is there.
fn with(reserved: &str, port: u16) -> Option<String> {
    let has = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        first.parse().is_ok_and(|first: u16| first <= port)
            && last.parse().is_ok_and(|last: u16| port <= last)
    };
    match reserved {
        "" => Some(port.to_string()),
        some if some.split(',').any(has) => None,
        some => Some(format!("{some},{port}")),
    }
}

/// A line has the directory in its fifth field, and the type behind a hyphen.
fn cgroup_in(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let is_it = file_system.split(' ').next() == Some("cgroup2");
        is_it.then(|| mount.split(' ').nth(4).map(PathBuf::from))?
    })
}

const BPF_PROG_LOAD: u32 = 5;
const BPF_PROG_ATTACH: u32 = 8;

/// The beginning of what `bpf` takes; the kernel takes zeros for the rest.
#[repr(C)]
struct Load {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log: [u32; 4],
    kernel: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    at: u32,
}

#[repr(C)]
struct Attach {
    group: u32,
    program: u32,
    at: u32,
    flags: u32,
}

/// `T` begins as the kernel's `union bpf_attr` does for this command.
fn bpf<T>(command: u32, ask: &T) -> std::io::Result<libc::c_long> {
    let bytes = size_of::<T>();
    // SAFETY: what is asked, and what it points to, live until the call has ended, and the kernel only reads it.
    let answer = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(ask), bytes) };
    if answer < 0 { Err(std::io::Error::last_os_error()) } else { Ok(answer) }
}

impl ProgramAt {
    /// One that is there already is replaced.
    fn attach(&self, group: &File) -> std::io::Result<()> {
        let mut name = [0; 16];
        name[..7].copy_from_slice(b"perigee");
        let program = bpf(
            BPF_PROG_LOAD,
            &Load {
                kind: self.kind,
                count: u32::try_from(self.program.len()).map_err(std::io::Error::other)?,
                instructions: self.program.as_ptr() as u64,
                license: c"Apache-2.0".as_ptr() as u64,
                log: [0; 4],
                kernel: 0,
                flags: 0,
                name,
                interface: 0,
                at: self.at,
            },
        )?;
        let number = i32::try_from(program).map_err(std::io::Error::other)?;
        // SAFETY: the kernel has just made this descriptor, and nobody else has it.
        let program = unsafe { OwnedFd::from_raw_fd(number) };
        let number = |file: i32| u32::try_from(file).map_err(std::io::Error::other);
        let (group, program) = (number(group.as_raw_fd())?, number(program.as_raw_fd())?);
        bpf(BPF_PROG_ATTACH, &Attach { group, program, at: self.at, flags: 0 }).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cgroup_is_the_first_of_version_2() {
        let mounts = "29 22 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                      30 29 0:27 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu\n\
                      31 29 0:28 / /sys/fs/cgroup/unified rw,relatime shared:10 - cgroup2 cgroup2 rw\n";
        assert_eq!(cgroup_in(mounts), Some(PathBuf::from("/sys/fs/cgroup/unified")));
        assert_eq!(cgroup_in("29 22 0:26 / /sys rw - sysfs sysfs rw\n"), None);
    }

    #[test]
    fn a_port_is_reserved_beside_others() {
        assert_eq!(with("", 51_871).as_deref(), Some("51871"));
        assert_eq!(with("80,8000-8010", 51_871).as_deref(), Some("80,8000-8010,51871"));
        assert_eq!(with("80,51871", 51_871), None);
        assert_eq!(with("50000-52000", 51_871), None);
    }
}
