//! What happens at one moment.

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// What the VM wants changes, unless it has changed since.
    Load {
        vm: usize,
        turn: u32,
    },
    Arrives {
        vm: usize,
        runs_s: u64,
    },
    Ends(usize),
    /// A move that has not been given up since.
    Moved {
        vm: usize,
        turn: u32,
    },
    Fails(usize),
    Returns(usize),
    Restarts(usize),
    /// A job that computes.
    Submitted(usize),
    /// A VM's job has waited, or copied its data, unless something else has happened since.
    Step {
        vm: usize,
        turn: u32,
    },
    /// A job's VM at this host has computed all that it had to, unless the host's load has changed since.
    Computed {
        host: usize,
        turn: u32,
    },
    Look,
}

impl Event {
    /// The VM to which it happens.
    pub(super) fn vm(self) -> Option<usize> {
        match self {
            Self::Load { vm, .. }
            | Self::Arrives { vm, .. }
            | Self::Ends(vm)
            | Self::Moved { vm, .. }
            | Self::Restarts(vm)
            | Self::Step { vm, .. } => Some(vm),
            Self::Fails(_)
            | Self::Returns(_)
            | Self::Submitted(_)
            | Self::Computed { .. }
            | Self::Look => None,
        }
    }
}
