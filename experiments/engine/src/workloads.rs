//! The workloads, and the servers that they run on.

use crate::load::Kind;
use crate::servers::{Disk, Server, Transport};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    Random,
    Sequential,
    /// Every block at most once.
    Once,
}

/// The CPUs to which the server and the load generator are bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pin {
    Free,
    /// Both on the same CPU.
    Same,
    /// Each on its own CPU.
    Apart,
}

impl Pin {
    pub fn server(self) -> Option<usize> {
        (self != Self::Free).then_some(0)
    }

    pub fn generator(self) -> Option<usize> {
        match self {
            Self::Free => None,
            Self::Same => Some(0),
            Self::Apart => Some(1),
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Workload {
    pub name: &'static str,
    /// The title in headings.
    pub title: &'static str,
    pub kind: Kind,
    pub request_bytes: u32,
    pub order: Order,
    pub connections: usize,
    pub depth: usize,
    pub transport: Transport,
    pub disk: Disk,
    pub pin: Pin,
    /// The page cache is empty at the start.
    pub cold: bool,
    /// It ends with a flush, which is timed separately.
    pub flush: bool,
    pub structured: bool,
    /// It also runs on the server variants that hardly differ.
    pub all_servers: bool,
    /// No goal uses it, so one round is enough.
    pub once: bool,
}

const READ: Workload = Workload {
    name: "read-4k-qd32",
    title: "4 KiB random read, queue depth 32",
    kind: Kind::Read,
    request_bytes: 4096,
    order: Order::Random,
    connections: 1,
    depth: 32,
    transport: Transport::Unix,
    disk: Disk::Mixed,
    pin: Pin::Free,
    cold: false,
    flush: false,
    structured: false,
    all_servers: false,
    once: false,
};

const WRITE: Workload = Workload {
    name: "write-4k-qd32",
    title: "4 KiB random overwrite, queue depth 32",
    kind: Kind::Write,
    flush: true,
    ..READ
};

const CLIENTS: Workload = Workload {
    name: "read-4k-64-clients",
    title: "4 KiB random read, 64 clients at queue depth 1",
    connections: 64,
    depth: 1,
    ..READ
};

const SINGLE: Workload = Workload {
    name: "read-4k-qd1-same-cpu",
    title: "4 KiB random read, queue depth 1, server and client on one CPU",
    depth: 1,
    pin: Pin::Same,
    ..READ
};

const LONG: Workload = Workload {
    name: "read-128k-qd8",
    title: "128 KiB sequential read, queue depth 8; every other MiB is the clone's own",
    request_bytes: 128 << 10,
    order: Order::Sequential,
    depth: 8,
    disk: Disk::Runs,
    ..READ
};

const COLD: Workload = Workload {
    name: "cold-4k-qd32",
    title: "4 KiB random read of what is not in the page cache, one client at queue depth 32",
    order: Order::Once,
    cold: true,
    ..READ
};

/// The workloads in their order. Those that empty the page cache come last.
pub const WORKLOADS: [Workload; 16] = [
    Workload { all_servers: true, ..READ },
    Workload { transport: Transport::Tcp, ..READ },
    Workload {
        name: "read-4k-qd32-structured",
        title: "4 KiB random read, queue depth 32, structured replies",
        structured: true,
        once: true,
        ..READ
    },
    CLIENTS,
    Workload { transport: Transport::Tcp, ..CLIENTS },
    SINGLE,
    Workload {
        name: "read-4k-qd1-two-cpus",
        title: "4 KiB random read, queue depth 1, server and client on a CPU each",
        pin: Pin::Apart,
        ..SINGLE
    },
    LONG,
    Workload { transport: Transport::Tcp, ..LONG },
    Workload {
        name: "read-128k-qd8-mixed",
        title: "128 KiB sequential read, queue depth 8; half of the 4 KiB blocks are the clone's own",
        disk: Disk::Mixed,
        once: true,
        ..LONG
    },
    Workload { all_servers: true, ..WRITE },
    Workload { transport: Transport::Tcp, ..WRITE },
    Workload {
        name: "write-128k-qd8",
        title: "128 KiB sequential overwrite, queue depth 8",
        kind: Kind::Write,
        flush: true,
        once: true,
        ..LONG
    },
    Workload {
        name: "first-touch-4k-qd32",
        title: "4 KiB random write to a new clone, queue depth 32",
        order: Order::Once,
        disk: Disk::Fresh,
        all_servers: true,
        ..WRITE
    },
    COLD,
    Workload {
        name: "cold-4k-64-clients",
        title: "4 KiB random read of what is not in the page cache, 64 clients at queue depth 1",
        connections: 64,
        depth: 1,
        ..COLD
    },
];

impl Workload {
    pub fn servers(&self) -> Vec<Server> {
        let all: &[Server] = if self.all_servers { &Server::ALL } else { &Server::MAIN };
        all.iter()
            .copied()
            .filter(|server| self.kind == Kind::Read || server.takes_writes())
            // The echo server neither reads from a disk nor sends structured replies.
            .filter(|server| *server != Server::Echo || !(self.cold || self.structured))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_has_one_name_and_transport() {
        let cases: std::collections::BTreeSet<_> =
            WORKLOADS.iter().map(|w| (w.name, w.transport.word())).collect();
        assert_eq!(cases.len(), WORKLOADS.len());
    }

    #[test]
    fn nobody_writes_to_the_golden_image() {
        for workload in WORKLOADS.iter().filter(|w| w.kind == Kind::Write) {
            assert!(!workload.servers().contains(&Server::NbdkitFile), "{}", workload.name);
        }
    }
}
