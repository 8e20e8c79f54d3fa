//! Why a program of a VM did not start, from its last words.

use perigee_model::ProblemKind;

/// Why QEMU did not start, by who can solve it. QEMU reports this only in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartError {
    /// The volume server has no such export: the job ends.
    NoExport,
    /// No QEMU can make such a VM: the job ends.
    BadVm,
    /// The volume server does not answer: the job waits for it.
    NoVolumeServer,
    /// The host lacks something that other VMs use now: the job waits for it.
    NoRoom,
    /// The host does not have this accelerator, or has an unknown version of QEMU: the job goes to another
    /// host.
    HostCannot,
    /// The words are not known. This counts as a fault of the cluster and ends no job: the job waits and shows
    /// the words.
    Other,
}

impl StartError {
    /// The words of QEMU by which each error is recognized, in the order of the search.
    const WORDS: [(Self, &'static [&'static str]); 4] = [
        (Self::NoVolumeServer, &["Failed to connect", "Connection refused"]),
        (
            Self::NoRoom,
            &[
                "Cannot allocate memory",
                "Too many open files",
                "No space left on device",
                "Resource temporarily unavailable",
            ],
        ),
        (Self::BadVm, &["Invalid SMP CPUs"]),
        (
            Self::HostCannot,
            &[
                "invalid accelerator",
                "failed to initialize",
                "Could not access KVM",
                "supported by KVM",
                "invalid option",
                "Invalid parameter",
                "is not a valid device model name",
                "unsupported machine type",
                "unable to find CPU model",
                "support is not enabled",
                "support requested feature",
                "requires KVM",
            ],
        ),
    ];

    /// Finds the error in QEMU's last words.
    pub fn of(said: &str) -> Self {
        if said.contains("xport '") && said.contains("not ") {
            return Self::NoExport;
        }
        if said.contains("Property '") && said.contains("not found") {
            return Self::HostCannot;
        }
        let known = Self::WORDS.iter().find(|(_, words)| words.iter().any(|w| said.contains(w)));
        known.map_or(Self::Other, |(error, _)| *error)
    }

    /// The kind of problem, by which the controller decides what becomes of the job.
    pub fn kind(self) -> ProblemKind {
        match self {
            Self::NoExport => ProblemKind::NotFound,
            Self::BadVm => ProblemKind::Invalid,
            Self::NoVolumeServer => ProblemKind::Unavailable,
            Self::NoRoom => ProblemKind::NoSpace,
            Self::HostCannot => ProblemKind::Unsupported,
            Self::Other => ProblemKind::Internal,
        }
    }
}
