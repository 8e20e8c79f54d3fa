//! Which orders a source takes to migrate a VM, and to cancel the migration.

use super::Switchover;
use crate::vm::{MigrationPhase, VmStatus};

/// Why a migration does not begin at its source.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotBegun {
    /// A VM that starts, is paused or has ended can't be sent.
    #[error("it is {0:?}, and only a running VM can be moved")]
    NotRunning(VmStatus),
    /// An earlier migration has not ended.
    #[error("its migration {0} is under way")]
    Busy(u32),
    /// The order was overtaken by that of a later migration.
    #[error("its migration {0} came after this one")]
    Late(u32),
}

/// Whether to begin the migration of the number `asked`; `Ok(false)` when it was begun or called
/// off before. `last` is the last one that was.
///
/// # Errors
/// [`NotBegun`].
pub fn may_begin(
    status: VmStatus,
    last: Option<(u32, MigrationPhase)>,
    asked: u32,
) -> Result<bool, NotBegun> {
    match last {
        Some((last, _)) if last == asked => return Ok(false),
        Some((last, phase)) if !phase.is_final() => return Err(NotBegun::Busy(last)),
        Some((last, _)) if last > asked => return Err(NotBegun::Late(last)),
        _ => {}
    }
    if status != VmStatus::Running {
        return Err(NotBegun::NotRunning(status));
    }
    Ok(true)
}

/// What an agent does when it is asked to cancel a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnCancel {
    /// Tell its task.
    Stop,
    /// Store that it is cancelled, so that its order begins nothing when it comes.
    Store,
    /// It never begins: a later one has.
    Nothing,
}

/// Why a migration is not cancelled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotCancelled {
    /// Another migration than the one named is under way.
    #[error("its migration {0} is under way")]
    Busy(u32),
    /// It is too late: the VM is at its destination.
    #[error("the VM has moved away")]
    Moved,
}

/// What to do with a cancel of the migration of the number `asked`.
///
/// # Errors
/// [`NotCancelled`].
pub fn on_cancel(
    last: Option<(u32, MigrationPhase)>,
    at: Switchover,
    asked: u32,
) -> Result<OnCancel, NotCancelled> {
    match last {
        Some((last, _)) if last == asked => Ok(OnCancel::Stop),
        Some((last, _)) if last > asked => Ok(OnCancel::Nothing),
        Some((last, phase)) if !phase.is_final() => Err(NotCancelled::Busy(last)),
        _ if at != Switchover::Source => Err(NotCancelled::Moved),
        _ => Ok(OnCancel::Store),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_migration_again_changes_nothing_and_another_waits_for_its_end() {
        use MigrationPhase as P;
        let begin = |status, phase, asked| may_begin(status, Some((1, phase)), asked);
        assert_eq!(begin(VmStatus::Running, P::Copying, 1), Ok(false));
        assert_eq!(begin(VmStatus::Running, P::Cancelled, 1), Ok(false));
        assert_eq!(begin(VmStatus::Running, P::Switching, 2), Err(NotBegun::Busy(1)));
        assert_eq!(begin(VmStatus::Running, P::Failed, 2), Ok(true));
        let paused = Err(NotBegun::NotRunning(VmStatus::Paused));
        assert_eq!(begin(VmStatus::Paused, P::Failed, 2), paused);
    }

    #[test]
    fn an_order_that_comes_after_a_later_migration_begins_nothing() {
        let last = Some((2, MigrationPhase::Cancelled));
        assert_eq!(may_begin(VmStatus::Running, last, 1), Err(NotBegun::Late(2)));
        assert_eq!(on_cancel(last, Switchover::Source, 1), Ok(OnCancel::Nothing));
    }

    #[test]
    fn a_cancel_ends_its_own_migration_or_lets_it_never_begin() {
        use MigrationPhase as P;
        let cancel = |phase, at| on_cancel(Some((1, phase)), at, 2);
        assert_eq!(cancel(P::Failed, Switchover::Source), Ok(OnCancel::Store));
        assert_eq!(cancel(P::Copying, Switchover::Source), Err(NotCancelled::Busy(1)));
        assert_eq!(cancel(P::Completed, Switchover::Destination), Err(NotCancelled::Moved));
        let own = on_cancel(Some((2, P::Copying)), Switchover::Source, 2);
        assert_eq!(own, Ok(OnCancel::Stop));
        assert_eq!(on_cancel(None, Switchover::Source, 2), Ok(OnCancel::Store));
    }
}
