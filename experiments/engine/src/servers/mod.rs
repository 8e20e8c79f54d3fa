//! The volume server and its peers: how each is started for a disk, and stopped by its id.

mod fixtures;
mod start;

pub use fixtures::{Fixtures, GOLDEN, SECOND_POOL, write_once};
pub use start::Started;

/// How QEMU's block layer does file I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aio {
    Threads,
    IoUring,
}

impl Aio {
    fn word(self) -> &'static str {
        match self {
            Self::Threads => "threads",
            Self::IoUring => "io_uring",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Server {
    Perigee,
    QemuNbd {
        aio: Aio,
        extended_l2: bool,
    },
    StorageDaemon {
        aio: Aio,
        extended_l2: bool,
    },
    /// The golden image itself, read-only and without a clone.
    NbdkitFile,
    /// A copy-on-write overlay in a temporary file, whose map is in memory and lost at the end.
    NbdkitCow,
    /// No storage at all.
    Echo,
}

impl Server {
    pub const ALL: [Self; 12] = [
        Self::Perigee,
        Self::QemuNbd { aio: Aio::Threads, extended_l2: false },
        Self::QemuNbd { aio: Aio::Threads, extended_l2: true },
        Self::QemuNbd { aio: Aio::IoUring, extended_l2: false },
        Self::QemuNbd { aio: Aio::IoUring, extended_l2: true },
        Self::StorageDaemon { aio: Aio::Threads, extended_l2: false },
        Self::StorageDaemon { aio: Aio::Threads, extended_l2: true },
        Self::StorageDaemon { aio: Aio::IoUring, extended_l2: false },
        Self::StorageDaemon { aio: Aio::IoUring, extended_l2: true },
        Self::NbdkitFile,
        Self::NbdkitCow,
        Self::Echo,
    ];

    /// One server of each kind, for workloads in which the variants hardly differ.
    pub const MAIN: [Self; 7] = [
        Self::Perigee,
        Self::QemuNbd { aio: Aio::Threads, extended_l2: false },
        Self::QEMU,
        Self::StorageDaemon { aio: Aio::IoUring, extended_l2: false },
        Self::NbdkitFile,
        Self::NbdkitCow,
        Self::Echo,
    ];

    /// The fastest of QEMU's servers in most workloads.
    pub const QEMU: Self = Self::QemuNbd { aio: Aio::IoUring, extended_l2: false };

    pub fn name(self) -> String {
        let qemu = |program: &str, aio: Aio, extended_l2: bool| {
            let extended = if extended_l2 { " extended-l2" } else { "" };
            format!("{program} {}{extended}", aio.word())
        };
        match self {
            Self::Perigee => "perigee".into(),
            Self::QemuNbd { aio, extended_l2 } => qemu("qemu-nbd", aio, extended_l2),
            Self::StorageDaemon { aio, extended_l2 } => {
                qemu("qemu-storage-daemon", aio, extended_l2)
            }
            Self::NbdkitFile => "nbdkit file".into(),
            Self::NbdkitCow => "nbdkit cow".into(),
            Self::Echo => "echo".into(),
        }
    }

    /// Whether it does the same task: copy-on-write clones of a shared image.
    pub fn is_clone_peer(name: &str) -> bool {
        Self::keeps_metadata(name) || name == "nbdkit cow"
    }

    /// Whether its writes still exist after a restart.
    pub fn keeps_metadata(name: &str) -> bool {
        name.starts_with("qemu-")
    }

    pub fn is_peer(name: &str) -> bool {
        Self::is_clone_peer(name) || name == "nbdkit file"
    }

    pub fn takes_writes(self) -> bool {
        self != Self::NbdkitFile
    }

    pub fn extended_l2(self) -> bool {
        matches!(
            self,
            Self::QemuNbd { extended_l2: true, .. } | Self::StorageDaemon { extended_l2: true, .. }
        )
    }
}

/// The disk that is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disk {
    /// A clone with half of its 4 KiB blocks written, at random.
    Mixed,
    /// A clone with every other MiB written.
    Runs,
    /// A new clone.
    Fresh,
    /// A new clone that was grown to this size.
    Large(u64),
    /// A clone at the end of a chain of this many layers, each with its share of the blocks.
    Chain(u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Unix,
    Tcp,
}

impl Transport {
    pub fn word(self) -> &'static str {
        match self {
            Self::Unix => "unix",
            Self::Tcp => "tcp",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_server_has_a_name_and_a_place_of_its_own() {
        let names: std::collections::BTreeSet<String> =
            Server::ALL.iter().map(|server| server.name()).collect();
        assert_eq!(names.len(), Server::ALL.len());
        assert!(Server::MAIN.iter().all(|server| Server::ALL.contains(server)));
        assert_eq!(names.iter().filter(|name| Server::is_clone_peer(name)).count(), 9);
        assert_eq!(names.iter().filter(|name| Server::is_peer(name)).count(), 10);
    }
}
