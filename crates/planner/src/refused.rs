//! Why there is no plan.

use perigee_model::{HostId, Problem, ProblemKind, VolumeName};

/// Why a job can't be planned, or a VM can't be moved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// No host has what the job needs. The text says what is missing.
    #[error("no host can take the job: {0}")]
    NoHost(String),
    /// The host does not answer, so nothing runs there.
    #[error("host {0} is not up")]
    HostNotUp(HostId),
    /// The host that has a volume's data does not answer.
    #[error("volume {volume} has its home at {home}, which is not up")]
    HomeNotUp {
        /// The volume.
        volume: VolumeName,
        /// The host that has its data.
        home: HostId,
    },
    /// A move over this link can't be predicted yet.
    #[error("the link from {from} to {to} is not measured yet")]
    LinkNotMeasured {
        /// The host that reads.
        from: HostId,
        /// The host that is read from.
        to: HostId,
    },
    /// A live migration needs the same processor on both hosts.
    #[error("a running VM cannot go from {from} to {to}: their processors differ ({why})")]
    ProcessorDiffers {
        /// The host where the VM runs.
        from: HostId,
        /// The host it would move to.
        to: HostId,
        /// What differs.
        why: String,
    },
    /// The VM changes its memory faster than the link carries it.
    #[error(
        "the VM changes {dirty}/s of its memory and the link from {from} to {to} carries {rate}/s: a live migration would not end"
    )]
    WouldNotConverge {
        /// The host where the VM runs.
        from: HostId,
        /// The host it would move to.
        to: HostId,
        /// How much memory the VM changes in a second, such as `20 MiB`.
        dirty: String,
        /// How much the link carries in a second.
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
                "move it when it writes less to its memory, or stop it and start it again elsewhere"
            }
        };
        Problem::new(ProblemKind::Unavailable, "plan the job", refused).next(next)
    }
}
