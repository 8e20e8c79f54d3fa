//! The reasons why there is no plan.

use perigee_model::{HostId, Problem, ProblemKind, VolumeName};

/// Why a job can't start, or a VM can't move, according to this snapshot.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// No host is up where the job may start, or none of them has enough memory. The text says which of the
    /// two.
    #[error("no host can take the job: {0}")]
    NoHost(String),
    /// A host that was asked for is not in the snapshot.
    #[error("host {0} is not up")]
    HostNotUp(HostId),
    /// A data volume can't be reached.
    #[error("volume {volume} has its home at {home}, which is not up")]
    HomeNotUp {
        /// The data volume.
        volume: VolumeName,
        /// The host that has its data.
        home: HostId,
    },
    /// There is no usable probe between the two hosts or their sites, in this direction.
    #[error("the link from {from} to {to} is not measured yet")]
    LinkNotMeasured {
        /// The host that would read.
        from: HostId,
        /// The host that it would read from.
        to: HostId,
    },
    /// The guest would see a different processor while it runs.
    #[error("a running VM cannot go from {from} to {to}: their processors differ ({why})")]
    ProcessorDiffers {
        /// Where the VM runs.
        from: HostId,
        /// Where it would go.
        to: HostId,
        /// What differs, in plain words.
        why: String,
    },
    /// An earlier migration measured that the VM changes its memory at least as fast as the link carries it, so
    /// pre-copy would never end.
    #[error(
        "the VM changes {dirty}/s of its memory and the link from {from} to {to} carries {rate}/s: a live migration would not end"
    )]
    WouldNotConverge {
        /// Where the VM runs.
        from: HostId,
        /// Where it would go.
        to: HostId,
        /// Memory changed in a second, with its unit.
        dirty: String,
        /// Bytes that the link carries in a second, with their unit.
        rate: String,
    },
}

impl From<Refused> for Problem {
    fn from(refused: Refused) -> Self {
        let next = match &refused {
            Refused::NoHost(_) | Refused::HostNotUp(_) | Refused::HomeNotUp { .. } => {
                "`perigee host list` shows the hosts, their sites and their memory"
            }
            Refused::LinkNotMeasured { .. } => {
                "links are measured within a minute of a host's start: see `perigee link list`"
            }
            Refused::ProcessorDiffers { .. } => {
                "move it to a host with the same processor: see `perigee host list`"
            }
            Refused::WouldNotConverge { .. } => {
                "move it when it writes less, or stop and restart it"
            }
        };
        Problem::new(ProblemKind::Unavailable, "can't plan the job", refused).next(next)
    }
}
