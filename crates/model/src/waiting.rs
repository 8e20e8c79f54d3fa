//! What a job, a VM or a host waits for, and from when on: the same words for all of them.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::units::format_time;
use crate::{HostId, VolumeName};

/// What something waits for. It goes on by itself when that is there.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(tag = "for", rename_all = "snake_case")]
pub enum WaitsFor {
    /// The agent of a host does not answer the controller.
    Agent {
        /// The host.
        host: HostId,
    },
    /// The agent of a host was stopped in order. Its VMs go on.
    StoppedAgent {
        /// The host.
        host: HostId,
    },
    /// The volume server of a host does not answer: its VMs' disks stand still.
    VolumeServer {
        /// The host.
        host: HostId,
    },
    /// The home of a volume does not answer the volume server of the VM's host.
    Home {
        /// The volume.
        volume: VolumeName,
        /// The home's name; where that is not known, the address of its volume server.
        home: String,
    },
    /// A disk answers with an error. The guest stands still, and the disk is tried again and again.
    Disk {
        /// What failed.
        why: String,
    },
    /// QEMU does not answer the agent of its host.
    Qemu,
}

impl WaitsFor {
    /// The word for it, as in JSON.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Agent { .. } => "agent",
            Self::StoppedAgent { .. } => "stopped_agent",
            Self::VolumeServer { .. } => "volume_server",
            Self::Home { .. } => "home",
            Self::Disk { .. } => "disk",
            Self::Qemu => "qemu",
        }
    }
}

impl fmt::Display for WaitsFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Agent { host } => write!(f, "the agent of host {host}, which does not answer"),
            Self::StoppedAgent { host } => write!(f, "the agent of host {host}, which was stopped"),
            Self::VolumeServer { host } => {
                write!(f, "the volume server of host {host}, which does not answer")
            }
            Self::Home { volume, home } => {
                write!(f, "volume {volume}: its home {home} does not answer")
            }
            Self::Disk { why } => write!(f, "a disk that answers with errors: {why}"),
            Self::Qemu => f.write_str("QEMU, which does not answer the agent"),
        }
    }
}

/// What something waits for, and from when on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct Waiting {
    /// What for.
    #[serde(flatten)]
    pub waits_for: WaitsFor,
    /// Unix time, by the clock of who noticed.
    pub since_ms: u64,
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "waits for {} (since {})", self.waits_for, format_time(self.since_ms))
    }
}

/// All of them in one text; empty if nothing is waited for.
pub fn in_words(waits: &[Waiting]) -> String {
    waits.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_waited_for_is_said_with_its_time_and_read_back_as_it_was() {
        let waiting = Waiting {
            waits_for: WaitsFor::Home {
                volume: VolumeName::new("data").expect("a name"),
                home: "cloud1".to_owned(),
            },
            since_ms: 1_764_352_284_000,
        };
        let said = "waits for volume data: its home cloud1 does not answer (since 2025-11-28 17:51:24 UTC)";
        assert_eq!(in_words(std::slice::from_ref(&waiting)), said);
        let text = serde_json::to_value(&waiting).expect("JSON");
        assert_eq!(text["for"], waiting.waits_for.word());
        assert_eq!(serde_json::from_value::<Waiting>(text).expect("a waiting"), waiting);
        assert_eq!(in_words(&[]), "");
    }
}
