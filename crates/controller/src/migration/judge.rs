//! How a migration stands, from what the two agents say: a pure function.

use perigee_model::MigrationId;
use perigee_model::vm::{MigrationPhase, MigrationReport, VmReport, VmStatus};

/// What one agent says of the VM.
#[derive(Debug)]
pub enum Seen {
    Vm(Box<VmReport>),
    /// The agent answers and has no such VM.
    NotThere,
    /// The agent does not answer.
    NotKnown,
}

#[derive(Debug)]
pub enum Verdict {
    /// The source has not heard of this migration.
    NotBegun,
    UnderWay(Box<MigrationReport>),
    /// The VM is at the destination.
    Completed,
    /// The VM is at the source.
    Aborted(String),
    /// The source's QEMU has ended; the destination may have all it needs, or not.
    SourceEnded,
    /// An agent must be heard first.
    NotKnown,
}

/// The source's word counts first: it sends, raises and flips back. Where the source cannot tell,
/// a VM that runs at the destination has arrived, because it starts only with its whole state.
pub fn judge(id: &MigrationId, source: &Seen, destination: &Seen) -> Verdict {
    if let Seen::Vm(report) = source {
        let own = report.migration.as_ref().filter(|migration| migration.migration == *id);
        match own {
            Some(own) => match own.phase {
                MigrationPhase::Completed => return Verdict::Completed,
                MigrationPhase::Failed | MigrationPhase::Cancelled => {
                    return Verdict::Aborted(reason_of(own));
                }
                MigrationPhase::Setup | MigrationPhase::Copying | MigrationPhase::Switching
                    if is_alive(report.status) =>
                {
                    return Verdict::UnderWay(Box::new(own.clone()));
                }
                MigrationPhase::Setup | MigrationPhase::Copying | MigrationPhase::Switching => {}
            },
            None if is_alive(report.status) => {
                return match destination {
                    Seen::Vm(there) if is_there(there.status) => Verdict::NotBegun,
                    Seen::Vm(_) | Seen::NotThere => {
                        Verdict::Aborted("the destination's QEMU ended before the start".to_owned())
                    }
                    Seen::NotKnown => Verdict::NotKnown,
                };
            }
            None => {}
        }
        if report.status == VmStatus::Migrated {
            return Verdict::Completed;
        }
    }
    match (source, destination) {
        (_, Seen::Vm(there)) if has_arrived(there.status) => Verdict::Completed,
        (Seen::NotKnown, _) | (_, Seen::NotKnown) => Verdict::NotKnown,
        (Seen::Vm(_) | Seen::NotThere, Seen::Vm(_) | Seen::NotThere) => Verdict::SourceEnded,
    }
}

fn reason_of(report: &MigrationReport) -> String {
    if report.reason.is_empty() {
        format!("the source says: {:?}", report.phase).to_lowercase()
    } else {
        report.reason.clone()
    }
}

/// Its QEMU is there and may still run it.
fn is_alive(status: VmStatus) -> bool {
    matches!(status, VmStatus::Starting | VmStatus::Running | VmStatus::Paused | VmStatus::IoError)
}

fn is_there(status: VmStatus) -> bool {
    !matches!(status, VmStatus::Gone | VmStatus::Shutdown)
}

fn has_arrived(status: VmStatus) -> bool {
    matches!(
        status,
        VmStatus::Running | VmStatus::IoError | VmStatus::Migrated | VmStatus::Shutdown
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use perigee_model::VmId;
    use perigee_model::vm::VmSpec;

    fn id() -> MigrationId {
        MigrationId::new("j-0001-m1").expect("name")
    }

    fn vm(status: VmStatus, phase: Option<MigrationPhase>) -> Seen {
        let migration = phase.map(|phase| MigrationReport::new(id(), phase));
        Seen::Vm(Box::new(VmReport {
            spec: VmSpec {
                vm: VmId::new("j-0001").expect("name"),
                cpus: 1,
                memory_bytes: 1,
                disks: Vec::new(),
                incoming: false,
            },
            status,
            reason: String::new(),
            qemu_pid: 1,
            uptime_ms: 0,
            vcpu_ms: 0,
            waiting_ms: None,
            incoming_uri: None,
            migration,
            last_seq: 0,
            io: Vec::new(),
        }))
    }

    use MigrationPhase as P;
    use VmStatus as S;

    #[test]
    fn a_silent_source_and_a_waiting_destination_leave_it_open() {
        let verdict = judge(&id(), &Seen::NotKnown, &vm(S::Incoming, None));
        assert!(matches!(verdict, Verdict::NotKnown));
    }

    #[test]
    fn a_vm_that_runs_at_the_destination_has_arrived_whatever_became_of_the_source() {
        for source in [Seen::NotKnown, Seen::NotThere, vm(S::Gone, Some(P::Switching))] {
            let verdict = judge(&id(), &source, &vm(S::Running, None));
            assert!(matches!(verdict, Verdict::Completed), "{source:?}");
        }
    }

    #[test]
    fn the_source_says_that_it_failed_and_the_vm_is_there() {
        let verdict = judge(&id(), &vm(S::Running, Some(P::Failed)), &Seen::NotThere);
        assert!(matches!(verdict, Verdict::Aborted(_)));
    }

    #[test]
    fn a_lost_destination_is_left_to_the_source_while_it_switches() {
        let verdict = judge(&id(), &vm(S::Paused, Some(P::Switching)), &vm(S::Gone, None));
        assert!(matches!(verdict, Verdict::UnderWay(_)));
    }

    #[test]
    fn a_vm_that_ended_at_the_source_is_not_waited_for() {
        let verdict = judge(&id(), &vm(S::Shutdown, Some(P::Copying)), &vm(S::Incoming, None));
        assert!(matches!(verdict, Verdict::SourceEnded));
    }

    #[test]
    fn a_source_that_has_not_heard_of_it_is_asked() {
        let verdict = judge(&id(), &vm(S::Running, None), &vm(S::Incoming, None));
        assert!(matches!(verdict, Verdict::NotBegun));
    }
}
