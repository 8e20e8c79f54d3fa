//! The cells of the table: which fault comes in which phase of which placement.

use std::fmt;
use std::time::Duration;

use perigee_model::Problem;
use serde::{Deserialize, Serialize};

/// Where a job's data is, and what moves. The old host is the home of the data, or the host from which a VM moves. The
/// new host is the other one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// A client at the new host uses a volume at the old one.
    Remote,
    /// A volume moves to its client's host.
    Copy,
    /// A volume moves away from its client's host.
    Move,
    /// A replica is made of a volume in use.
    Replica,
    /// A replica becomes the volume.
    Promotion,
    /// A VM migrates, and its volumes stay.
    Stay,
    /// A VM migrates, and its volumes come after it.
    Follow,
}

/// When a fault comes: a part of a move's way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// The volume is read and written.
    Use,
    /// The new host takes the volume.
    Taking,
    /// Blocks are copied to the new host: of a volume, or of a round of a replica.
    Filling,
    /// The move or migration is complete, and what it left behind is dropped.
    Drop,
    /// A promotion was asked for.
    Asked,
    /// The destination of a VM is prepared.
    Preparing,
    /// The VM's memory is copied.
    Copying,
    /// The VM is paused and changes its host.
    Switching,
}

/// What is broken, and for how long. The daemons are started again by the lab; a link comes up after its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    #[serde(rename = "wan-down-1s")]
    WanDown1s,
    #[serde(rename = "wan-down-10s")]
    WanDown10s,
    #[serde(rename = "wan-down-60s")]
    WanDown60s,
    /// The WAN loses 1 % of its frames for a while.
    WanLoss,
    /// The WAN has 1 Mbit/s for a while.
    WanSlow,
    /// SIGKILL to the volume server of the old host.
    KillOldVolume,
    KillNewVolume,
    KillOldAgent,
    KillNewAgent,
    KillController,
    /// SIGKILL to the QEMU that is to receive the VM.
    KillNewQemu,
    /// The disk of a pool is full for a while.
    FullOldPool,
    FullNewPool,
    /// Every access to the disk of a pool fails for a while.
    OldDiskFails,
    NewDiskFails,
}

impl Placement {
    /// In the order in which the table shows them.
    pub const ALL: [Self; 7] = [
        Self::Remote,
        Self::Copy,
        Self::Move,
        Self::Replica,
        Self::Promotion,
        Self::Stay,
        Self::Follow,
    ];

    /// The phases that this placement goes through.
    pub fn phases(self) -> &'static [Phase] {
        match self {
            Self::Remote => &[Phase::Use],
            Self::Copy | Self::Move => &[Phase::Taking, Phase::Filling, Phase::Drop],
            Self::Replica => &[Phase::Filling],
            Self::Promotion => &[Phase::Asked],
            Self::Stay => &[Phase::Preparing, Phase::Copying, Phase::Switching, Phase::Drop],
            Self::Follow => {
                &[Phase::Preparing, Phase::Copying, Phase::Switching, Phase::Filling, Phase::Drop]
            }
        }
    }

    /// Whether a VM is part of it. Otherwise the volume's clients are the experiment's own.
    pub fn has_vm(self) -> bool {
        matches!(self, Self::Stay | Self::Follow)
    }
}

impl Fault {
    /// In the order in which the table shows them.
    pub const ALL: [Self; 15] = [
        Self::WanDown1s,
        Self::WanDown10s,
        Self::WanDown60s,
        Self::WanLoss,
        Self::WanSlow,
        Self::KillOldVolume,
        Self::KillNewVolume,
        Self::KillOldAgent,
        Self::KillNewAgent,
        Self::KillController,
        Self::KillNewQemu,
        Self::FullOldPool,
        Self::FullNewPool,
        Self::OldDiskFails,
        Self::NewDiskFails,
    ];

    /// For how long a fault that ends by itself lasts. Killed programs are started again at once.
    pub fn lasts(self) -> Duration {
        Duration::from_secs(match self {
            Self::WanDown1s => 1,
            Self::WanDown10s | Self::FullOldPool | Self::FullNewPool => 10,
            Self::WanDown60s => 60,
            Self::WanLoss | Self::WanSlow => 20,
            Self::OldDiskFails | Self::NewDiskFails => 3,
            _ => 0,
        })
    }

    /// Whether a client may get errors while the fault lasts. With any other fault its requests only wait.
    pub fn fails_requests(self) -> bool {
        self.fills_pool() || self.fails_disk()
    }

    /// Whether a filesystem is full while the fault lasts.
    pub fn fills_pool(self) -> bool {
        matches!(self, Self::FullOldPool | Self::FullNewPool)
    }

    /// Whether a host's disk answers with errors while the fault lasts.
    pub fn fails_disk(self) -> bool {
        matches!(self, Self::OldDiskFails | Self::NewDiskFails)
    }
}

/// One experiment: a placement, the phase of it, and the fault in that phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Cell {
    pub placement: Placement,
    pub phase: Phase,
    pub fault: Fault,
}

impl Cell {
    /// Every cell, in the order in which they are run.
    pub fn all() -> Vec<Self> {
        let mut cells = Vec::new();
        for placement in Placement::ALL {
            for &phase in placement.phases() {
                let of = |fault| Self { placement, phase, fault };
                cells.extend(Fault::ALL.map(of).into_iter().filter(Self::is_possible));
            }
        }
        cells
    }

    fn is_possible(&self) -> bool {
        let is_used = self.phase == Phase::Use;
        match self.fault {
            // After the switch this QEMU is the VM itself.
            Fault::KillNewQemu => {
                matches!(self.phase, Phase::Preparing | Phase::Copying | Phase::Switching)
            }
            Fault::FullOldPool => is_used,
            Fault::FullNewPool => self.phase == Phase::Filling,
            // After a failed sync a volume takes no more writes, so its guest can't go on in any placement.
            Fault::OldDiskFails => {
                !self.placement.has_vm() && (is_used || self.phase != Phase::Drop)
            }
            Fault::NewDiskFails => {
                !self.placement.has_vm() && matches!(self.phase, Phase::Taking | Phase::Filling)
            }
            _ => true,
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{},{}", word(self.placement), word(self.phase), word(self.fault))
    }
}

/// The name of a placement, a phase or a fault, as in the results and for `--only`.
pub fn word(of: impl Serialize) -> String {
    serde_json::to_value(of)
        .ok()
        .and_then(|value| value.as_str().map(str::to_owned))
        .unwrap_or_default()
}

/// The cells that a person chose: `PLACEMENT,PHASE,FAULT`. A part that is empty or missing means all. No choice has no
/// cells.
///
/// # Errors
/// `Invalid` when a choice has no cell.
pub fn choose(only: &[String]) -> Result<Vec<Cell>, Problem> {
    let all = Cell::all();
    for choice in only {
        if !all.iter().any(|cell| is_meant(cell, choice)) {
            let words = |words: Vec<String>| words.join(", ");
            return Err(Problem::invalid(
                format!("can't run the faults {choice:?}"),
                "there is no such cell",
            )
            .next(format!(
                "give PLACEMENT,PHASE,FAULT; a part may be left out. Placements: {}. Phases of copy: {}. Faults: {}",
                words(Placement::ALL.map(word).to_vec()),
                words(Placement::Copy.phases().iter().map(word).collect()),
                words(Fault::ALL.map(word).to_vec()),
            )));
        }
    }
    Ok(all.into_iter().filter(|cell| only.iter().any(|choice| is_meant(cell, choice))).collect())
}

fn is_meant(cell: &Cell, choice: &str) -> bool {
    let words = [word(cell.placement), word(cell.phase), word(cell.fault)];
    let parts: Vec<&str> = choice.split(',').map(str::trim).collect();
    parts.len() <= words.len()
        && parts.iter().zip(&words).all(|(part, word)| part.is_empty() || part == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_placement_has_every_fault_of_the_wan_and_of_the_daemons_in_each_phase() {
        let all = Cell::all();
        for placement in Placement::ALL {
            for &phase in placement.phases() {
                for fault in &Fault::ALL[..10] {
                    assert!(all.contains(&Cell { placement, phase, fault: *fault }));
                }
            }
        }
        assert!(all.iter().all(|cell| cell.placement.has_vm() || cell.fault != Fault::KillNewQemu));
    }

    #[test]
    fn a_choice_names_cells_by_their_parts() {
        let count = |only: &str| choose(&[only.to_owned()]).map(|cells| cells.len());
        assert_eq!(count("copy,filling,kill-new-volume").expect("a cell"), 1);
        assert_eq!(count("remote").expect("cells"), count("remote,use").expect("cells"));
        assert!(count(",,wan-down-60s").expect("cells") >= 10);
        for none in ["copies", "copy,switching", "copy,filling,kill-new-qemu", "copy,filling,,"] {
            assert!(count(none).is_err(), "{none}");
        }
        assert!(choose(&[]).expect("no choice").is_empty());
    }
}
