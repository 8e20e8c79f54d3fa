//! The destination of a migration: what its agent stores, and what it may say.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::MigrationId;
use crate::vm::VmStatus;

/// Whether a VM that came by a migration has run here, as its agent's disk says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrival {
    /// The agent has not let it run, and nobody else can.
    Waits,
    /// Stored before the agent lets it run: it may have run.
    Ran,
    /// The record is lost.
    NotKnown,
}

impl Arrival {
    /// The status that others are told. A VM that has come and whose arrival is not stored yet
    /// still waits, for them: it is not here for good.
    pub fn told(self, status: VmStatus) -> VmStatus {
        match (self, status) {
            (_, VmStatus::Starting | VmStatus::Gone) | (Self::Ran | Self::NotKnown, _) => status,
            (Self::Waits, _) => VmStatus::Incoming,
        }
    }
}

/// The answer to a source that does not know how its migration ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// The VM has run here. It is left alone.
    Ran,
    /// The VM has not run here and never will: its QEMU was ended.
    DidNotRun,
    /// Nothing is known of this migration here.
    NotKnown,
}

/// What is known of the VM that `asked` was to bring: of the VM that is here, or of the last one
/// that was.
pub fn fate(kept: Option<(&MigrationId, Arrival)>, asked: &MigrationId) -> Fate {
    match kept {
        Some((migration, Arrival::Ran)) if migration == asked => Fate::Ran,
        Some((migration, Arrival::Waits)) if migration == asked => Fate::DidNotRun,
        _ => Fate::NotKnown,
    }
}

/// What the destination's agent does with a VM that comes by migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArrivalStep {
    /// It waits for its state, runs already, or must not run.
    Nothing,
    /// Store [`Arrival::Ran`]. Before that the VM does not run.
    Store,
    /// Let it run, whatever stopped it.
    Run,
}

/// `may_run`: no migration away from here holds the VM.
pub fn on_arrival(status: VmStatus, arrival: Arrival, may_run: bool) -> ArrivalStep {
    match (status, arrival) {
        (VmStatus::Paused | VmStatus::IoError | VmStatus::Shutdown, Arrival::Waits) => {
            ArrivalStep::Store
        }
        (VmStatus::Paused, Arrival::Ran) if may_run => ArrivalStep::Run,
        _ => ArrivalStep::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> MigrationId {
        MigrationId::new(text).unwrap()
    }

    #[test]
    fn an_agent_without_a_record_does_not_say_that_a_vm_did_not_run() {
        let (asked, other) = (id("m-1"), id("m-2"));
        assert_eq!(fate(None, &asked), Fate::NotKnown);
        assert_eq!(fate(Some((&asked, Arrival::NotKnown)), &asked), Fate::NotKnown);
        assert_eq!(fate(Some((&other, Arrival::Waits)), &asked), Fate::NotKnown);
        assert_eq!(fate(Some((&asked, Arrival::Waits)), &asked), Fate::DidNotRun);
        assert_eq!(fate(Some((&asked, Arrival::Ran)), &asked), Fate::Ran);
    }

    #[test]
    fn an_arrival_is_stored_before_the_vm_runs() {
        use VmStatus as S;
        assert_eq!(on_arrival(S::Incoming, Arrival::Waits, true), ArrivalStep::Nothing);
        assert_eq!(on_arrival(S::Paused, Arrival::Waits, true), ArrivalStep::Store);
        assert_eq!(on_arrival(S::Paused, Arrival::Ran, true), ArrivalStep::Run);
        assert_eq!(on_arrival(S::Paused, Arrival::Ran, false), ArrivalStep::Nothing);
        assert_eq!(on_arrival(S::Paused, Arrival::NotKnown, true), ArrivalStep::Nothing);
        assert_eq!(on_arrival(S::Running, Arrival::Ran, true), ArrivalStep::Nothing);
    }
}
