//! How a migration stands, from what the two agents say: what the controller goes by.

use crate::MigrationId;
use crate::vm::{MigrationPhase, VmStatus};

/// What one agent says of the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen<'a> {
    /// The agent knows the VM.
    Vm(SeenVm<'a>),
    /// The agent answers and knows no such VM.
    NotThere,
    /// The agent does not answer.
    NotKnown,
}

/// What an agent that knows the VM says of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeenVm<'a> {
    /// As its agent tells others ([`super::Arrival::told`]).
    pub status: VmStatus,
    /// Its current or last outgoing migration.
    pub outgoing: Option<(&'a MigrationId, MigrationPhase)>,
    /// The migration that it came by, or waits for.
    pub arrives_by: Option<&'a MigrationId>,
}

/// How a migration stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The source has not heard of this migration, and the destination waits for it.
    NotBegun,
    /// The source has not heard of it and the destination does not wait any more: the source has
    /// to promise that it never begins.
    CallOff,
    /// The source works on it, and has the last word.
    UnderWay,
    /// The VM is at the destination.
    Completed,
    /// The VM is at the source.
    Aborted,
    /// Nobody at the source knows of it any more: the destination's agent decides.
    SourceEnded,
    /// An agent must be heard first.
    NotKnown,
}

/// The source's word counts first: it sends, raises and flips back. Where the source cannot tell,
/// a VM that is at the destination has arrived.
pub fn judge(id: &MigrationId, source: &Seen, destination: &Seen) -> Verdict {
    let arrived = match destination {
        Seen::Vm(there) => there.arrives_by == Some(id) && has_arrived(there.status),
        Seen::NotThere | Seen::NotKnown => false,
    };
    if let Seen::Vm(here) = source {
        match here.outgoing.filter(|(own, _)| *own == id) {
            Some((_, MigrationPhase::Completed)) => return Verdict::Completed,
            Some((_, MigrationPhase::Failed | MigrationPhase::Cancelled)) => {
                return Verdict::Aborted;
            }
            Some(_) => return Verdict::UnderWay,
            None if is_alive(here.status) => return not_begun(id, destination),
            None => {}
        }
    }
    match (source, destination) {
        _ if arrived => Verdict::Completed,
        (Seen::NotKnown, _) | (_, Seen::NotKnown) => Verdict::NotKnown,
        _ => Verdict::SourceEnded,
    }
}

fn not_begun(id: &MigrationId, destination: &Seen) -> Verdict {
    match destination {
        Seen::Vm(there) if there.arrives_by == Some(id) && there.status == VmStatus::Incoming => {
            Verdict::NotBegun
        }
        Seen::Vm(_) | Seen::NotThere => Verdict::CallOff,
        Seen::NotKnown => Verdict::NotKnown,
    }
}

/// Its QEMU is there and may still run it.
fn is_alive(status: VmStatus) -> bool {
    matches!(status, VmStatus::Starting | VmStatus::Running | VmStatus::Paused | VmStatus::IoError)
}

fn has_arrived(status: VmStatus) -> bool {
    !matches!(status, VmStatus::Starting | VmStatus::Incoming | VmStatus::Gone)
}

#[cfg(test)]
mod tests {
    use super::*;

    use MigrationPhase as P;
    use VmStatus as S;

    fn id() -> MigrationId {
        MigrationId::new("j-0001-m1").unwrap()
    }

    fn judged(source: (S, Option<P>), destination: Option<S>) -> Verdict {
        let id = id();
        let outgoing = source.1.map(|phase| (&id, phase));
        let here = Seen::Vm(SeenVm { status: source.0, outgoing, arrives_by: None });
        judge(&id, &here, &there(&id, destination))
    }

    fn there(id: &MigrationId, status: Option<S>) -> Seen<'_> {
        status.map_or(Seen::NotThere, |status| {
            Seen::Vm(SeenVm { status, outgoing: None, arrives_by: Some(id) })
        })
    }

    #[test]
    fn a_silent_source_and_a_waiting_destination_leave_it_open() {
        let verdict = judge(&id(), &Seen::NotKnown, &there(&id(), Some(S::Incoming)));
        assert_eq!(verdict, Verdict::NotKnown);
    }

    #[test]
    fn a_vm_that_is_at_the_destination_has_arrived_whatever_became_of_the_source() {
        for source in [Seen::NotKnown, Seen::NotThere] {
            for status in [S::Running, S::Paused, S::IoError, S::Shutdown] {
                let verdict = judge(&id(), &source, &there(&id(), Some(status)));
                assert_eq!(verdict, Verdict::Completed);
            }
        }
    }

    #[test]
    fn a_vm_that_came_by_another_migration_has_not_arrived_by_this_one() {
        let other = MigrationId::new("j-0001-m2").unwrap();
        let verdict = judge(&id(), &Seen::NotThere, &there(&other, Some(S::Running)));
        assert_eq!(verdict, Verdict::SourceEnded);
    }

    #[test]
    fn what_the_source_says_counts() {
        assert_eq!(judged((S::Running, Some(P::Failed)), None), Verdict::Aborted);
        assert_eq!(judged((S::Migrated, Some(P::Completed)), None), Verdict::Completed);
        assert_eq!(judged((S::Paused, Some(P::Switching)), Some(S::Gone)), Verdict::UnderWay);
        assert_eq!(judged((S::Gone, Some(P::Switching)), Some(S::Incoming)), Verdict::UnderWay);
    }

    #[test]
    fn a_source_that_has_not_heard_of_it_is_asked_while_the_destination_waits() {
        assert_eq!(judged((S::Running, None), Some(S::Incoming)), Verdict::NotBegun);
        assert_eq!(judged((S::Running, None), Some(S::Gone)), Verdict::CallOff);
        assert_eq!(judged((S::Running, None), None), Verdict::CallOff);
        assert_eq!(judged((S::Gone, None), Some(S::Incoming)), Verdict::SourceEnded);
    }
}
