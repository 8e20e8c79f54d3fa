//! Moves of volumes as the controller keeps and shows them.
//!
//! ```text
//! taking ──────> redirecting ──> filling ──> completed
//!    │              ^ (it had been taken)    │
//!    └─> calling_off ┘ ──> called_off        └─> lost (a host with a part of it was removed)
//! ```
//!
//! Who is a volume's home is decided by the volume servers ([`crate::home`]), and never here.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::states::Refused;
use crate::{HostId, VmId, VolumeName};

/// How far a volume's move is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VolumeMoveState {
    /// The new home is asked to take the volume; it may have done so.
    Taking,
    /// The new home is asked to refuse the volume for good, then the old one to take it back.
    CallingOff,
    /// The new home has the volume. Other hosts and jobs learn where it is.
    Redirecting,
    /// The volume is used at its new home, which copies what is still at the old one.
    Filling,
    /// All of the volume is at its new home.
    Completed,
    /// The volume is at its old home.
    CalledOff,
    /// A host that had the volume, or a part of it, was removed.
    Lost,
}

/// What happens to a volume's move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum VolumeMoveEvent {
    /// The new home says that it has the volume.
    Taken,
    /// It is not wanted any more, or cannot be done.
    GivenUp,
    /// The volume is at its old home, and the new one will not take it.
    Returned,
    /// Whoever uses the volume knows its new home.
    Redirected,
    /// The new home has all of it.
    Filled,
    /// A removed host had the volume, or a part of it.
    HostRemoved,
}

impl VolumeMoveState {
    /// Every state, in the order in which a move goes through them.
    pub const ALL: [Self; 7] = [
        Self::Taking,
        Self::CallingOff,
        Self::Redirecting,
        Self::Filling,
        Self::Completed,
        Self::CalledOff,
        Self::Lost,
    ];

    /// Nothing follows this state.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::CalledOff | Self::Lost)
    }

    /// Whether the volume's home may change at any moment, or is not yet known to all who use the volume.
    pub fn is_changing_home(self) -> bool {
        matches!(self, Self::Taking | Self::CallingOff | Self::Redirecting)
    }

    /// Whether the new home has taken the volume.
    pub fn is_taken(self) -> bool {
        matches!(self, Self::Redirecting | Self::Filling | Self::Completed)
    }

    /// The state after an event.
    ///
    /// # Errors
    /// [`Refused`] when the move is over or the event belongs to another state.
    pub fn next(self, event: VolumeMoveEvent) -> Result<Self, Refused> {
        if self.is_final() {
            return Err(Refused::new("volume's move", self, event, "it is over"));
        }
        match (self, event) {
            (_, VolumeMoveEvent::HostRemoved) => Ok(Self::Lost),
            (Self::Taking | Self::CallingOff, VolumeMoveEvent::Taken) => Ok(Self::Redirecting),
            (Self::Taking, VolumeMoveEvent::GivenUp) => Ok(Self::CallingOff),
            // Also where the new home was removed after it had the volume.
            (_, VolumeMoveEvent::Returned) => Ok(Self::CalledOff),
            (Self::Redirecting, VolumeMoveEvent::Redirected) => Ok(Self::Filling),
            (Self::Filling, VolumeMoveEvent::Filled) => Ok(Self::Completed),
            _ => Err(Refused::new("volume's move", self, event, "its steps have one order")),
        }
    }
}

/// Who wants a volume to move.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VolumeMoveCause {
    /// A person.
    Asked,
    /// It comes after the VM that uses it.
    Follows(VmId),
    /// Its home is drained.
    Drains(HostId),
}

impl std::fmt::Display for VolumeMoveCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Asked => write!(f, "asked"),
            Self::Follows(vm) => write!(f, "follows VM {vm}"),
            Self::Drains(host) => write!(f, "host {host} is drained"),
        }
    }
}

/// A volume's move to another home.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeMove {
    /// The volume that moves.
    pub volume: VolumeName,
    /// Its old home.
    pub from: HostId,
    /// Its new home.
    pub to: HostId,
    /// How far it is.
    pub state: VolumeMoveState,
    /// Who wants it.
    pub cause: VolumeMoveCause,
    /// When it was asked for; Unix time.
    pub started_ms: u64,
    /// When the new home was known to have the volume; Unix time.
    pub taken_ms: Option<u64>,
    /// When it was over; Unix time.
    pub ended_ms: Option<u64>,
    /// The most that the new home still has to copy. The whole size counts until it is known which parts hold
    /// data. `None` while nothing is known.
    pub missing_bytes: Option<u64>,
    /// How long that still takes at the rate of the last seconds; `None` while it is not known.
    pub left_ms: Option<u64>,
    /// What it waits for, or why it was called off; empty when there is no trouble.
    pub problem: String,
}

/// Asks for a volume's move.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct MoveVolume {
    /// The new home.
    pub to: HostId,
    /// Move it even if the new home's site has its replica, and no other site has a copy of it then.
    #[serde(default)]
    pub confirmed: bool,
}

/// What becomes of a VM's volumes when it moves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VolumesOnMove {
    /// They stay, and the VM reaches them over the network.
    #[default]
    Stay,
    /// Its own disks and the data that it writes come after it when it runs at the destination.
    Follow,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_that_is_taken_is_never_called_off_by_a_request() {
        for state in VolumeMoveState::ALL.into_iter().filter(|state| state.is_taken()) {
            assert!(state.next(VolumeMoveEvent::GivenUp).is_err(), "{state:?}");
        }
    }

    #[test]
    fn nothing_happens_to_a_move_that_is_over() {
        use VolumeMoveEvent as Event;
        let events = [
            Event::Taken,
            Event::GivenUp,
            Event::Returned,
            Event::Redirected,
            Event::Filled,
            Event::HostRemoved,
        ];
        for state in VolumeMoveState::ALL.into_iter().filter(|state| state.is_final()) {
            assert!(events.into_iter().all(|event| state.next(event).is_err()), "{state:?}");
        }
    }

    #[test]
    fn a_volume_that_its_new_home_had_taken_is_settled_though_it_was_called_off() {
        let called_off = VolumeMoveState::Taking.next(VolumeMoveEvent::GivenUp).expect("legal");
        assert_eq!(called_off.next(VolumeMoveEvent::Taken), Ok(VolumeMoveState::Redirecting));
    }
}
