//! A host that is drained: no new VM or volume comes to it, and what it has leaves it while it runs.
//!
//! What is at the host is listed anew again and again, as [`DrainStep`]s in the order in which they are carried out. The planner makes
//! them (`planner/src/drain.rs`), and the controller carries them out (`controller/src/drain/`).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::ids::HostId;

/// That a host is to be drained.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Drain {
    /// When that was asked for; Unix time.
    pub asked_ms: u64,
    /// Who asked, as the audit log names them.
    pub by: String,
    /// The boot of the host for which it holds: it is called off when the host has booted again. `None`: until somebody calls it off.
    #[serde(default)]
    pub boot_id: Option<String>,
}

/// Drains a host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainHost {
    /// Only say what would happen.
    #[serde(default)]
    pub dry_run: bool,
}

/// How far the drain of a host is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostDrain {
    /// `None` if it was not asked for: this says what would happen.
    pub asked: Option<Drain>,
    /// What is still there, in the order in which it leaves. Empty: the host is drained. `None`: this controller has just been started,
    /// and has not looked yet.
    pub left: Option<Vec<DrainStep>>,
    /// What stays there, because nothing needs it elsewhere: replicas, and copies of images, in plain words. Only in the answer to a request to
    /// drain.
    #[serde(default)]
    pub keeps: Vec<String>,
}

impl HostDrain {
    /// Whether nothing is left.
    pub fn is_drained(&self) -> bool {
        self.left.as_ref().is_some_and(Vec::is_empty)
    }

    /// Whether all that is left can't leave.
    pub fn is_stuck(&self) -> bool {
        let stays = |step: &DrainStep| step.fate == DrainFate::Stays;
        self.left.as_ref().is_some_and(|left| !left.is_empty() && left.iter().all(stays))
    }

    /// The state in words, as `host list` shows it.
    pub fn in_words(&self) -> String {
        match &self.left {
            None => "draining".to_owned(),
            Some(left) if left.is_empty() => "drained".to_owned(),
            Some(left) if self.is_stuck() => format!("draining ({} can't leave)", left.len()),
            Some(left) => format!("draining ({} left)", left.len()),
        }
    }
}

/// What is at a host that is drained, and what becomes of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DrainStep {
    /// What it is.
    pub kind: DrainedKind,
    /// Its name.
    pub name: String,
    /// What becomes of it.
    pub fate: DrainFate,
    /// Where it goes. A job with several VMs has one host for each of them, in the order of their ranks.
    pub to: Vec<HostId>,
    /// Why it waits or can't leave; may be empty.
    pub why: String,
    /// How long its move is predicted to take, with the disks that come after a VM.
    pub takes_s: Option<f64>,
    /// What its move is predicted to send.
    pub bytes: Option<u64>,
}

/// What can be at a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DrainedKind {
    /// A VM, of a job or without one.
    Vm,
    /// A job with several VMs, of which at least one is there. All of them move, or none.
    Job,
    /// A volume whose home the host is.
    Volume,
    /// A network whose gateway the host is, although other hosts have VMs of the network.
    Network,
}

impl std::fmt::Display for DrainedKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Vm => "VM",
            Self::Job => "job",
            Self::Volume => "volume",
            Self::Network => "network",
        })
    }
}

/// What becomes of a thing at a host that is drained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DrainFate {
    /// Its move is under way.
    Moving,
    /// It moves when its turn comes.
    Moves,
    /// Something else comes first: its job ends sooner than it could move, or what stands against its move passes by itself.
    Waits,
    /// It can't leave.
    Stays,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(fates: &[DrainFate]) -> HostDrain {
        let step = |fate: &DrainFate| DrainStep {
            kind: DrainedKind::Vm,
            name: "vm".to_owned(),
            fate: *fate,
            to: Vec::new(),
            why: String::new(),
            takes_s: None,
            bytes: None,
        };
        HostDrain { asked: None, left: Some(fates.iter().map(step).collect()), keeps: Vec::new() }
    }

    #[test]
    fn a_host_whose_rest_is_not_known_is_neither_drained_nor_stuck() {
        let not_known = HostDrain { asked: None, left: None, keeps: Vec::new() };
        assert!(!not_known.is_drained() && !not_known.is_stuck());
        assert_eq!(not_known.in_words(), "draining");
    }

    #[test]
    fn the_words_say_how_much_is_left_and_whether_it_can_leave() {
        use DrainFate::{Moves, Stays, Waits};
        assert_eq!(drain(&[]).in_words(), "drained");
        assert_eq!(drain(&[Moves, Waits, Stays]).in_words(), "draining (3 left)");
        assert_eq!(drain(&[Stays]).in_words(), "draining (1 can't leave)");
    }
}
