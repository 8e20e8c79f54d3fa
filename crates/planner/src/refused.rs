//! Why there is no plan.

use perigee_model::{HostId, Problem, ProblemKind, VolumeName};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("no host can take the job: {0}")]
    NoHost(String),
    #[error("host {0} is not up")]
    HostNotUp(HostId),
    #[error("volume {volume} has its home at {home}, which is not up")]
    HomeNotUp { volume: VolumeName, home: HostId },
    #[error("the link from {from} to {to} is not measured yet")]
    LinkNotMeasured { from: HostId, to: HostId },
    #[error("a running VM cannot go from {from} to {to}: their processors differ ({why})")]
    ProcessorDiffers { from: HostId, to: HostId, why: String },
    #[error(
        "the VM changes {dirty}/s of its memory and the link from {from} to {to} carries {rate}/s: a live migration would not end"
    )]
    WouldNotConverge { from: HostId, to: HostId, dirty: String, rate: String },
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
