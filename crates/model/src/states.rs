//! The state machines: which state follows which event, and why not where it does not.
//!
//! Pure functions without I/O or clock. Whoever owns a state asks here before it acts; a typed
//! refusal says what was asked of what. The job's and the migration's drawings stand at
//! [`JobState`] and [`MigrationState`], the VM's and the write right's here.
//!
//! A VM as its host's agent sees it ([`VmStatus`]):
//!
//! ```text
//! starting ──┐            ┌─> paused ───┐
//!            ├─> running ─┤             ├─> running
//! incoming ──┘            ├─> io_error ─┘
//!                         └─> shutdown
//! incoming ─> io_error, shutdown          (it was stopped so when its state was sent)
//! running, paused, io_error ─> migrated   (its state is elsewhere: it never runs here again)
//! everything ─> gone
//! ```
//!
//! Who may write a VM's volumes while it migrates ([`WriteRight`]):
//!
//! ```text
//! source ─raise─> destination ─destination gone─> nobody ─flip back─> source
//! ```
//!
//! The raise happens while the source is paused. Once it has begun, the source runs again only
//! after the destination's QEMU is known to be gone and the epochs are back, in this order;
//! [`WriteRight::may_source_run`] is the guard.

use crate::Epoch;
use crate::job::{JobState, MigrationState};
use crate::vm::VmStatus;
use crate::volume::EpochChange;
use crate::{Problem, ProblemKind};

/// An event that is not possible in a state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a {machine} that is {state} cannot take the event {event}: {why}")]
pub struct Refused {
    pub machine: &'static str,
    pub state: String,
    pub event: String,
    pub why: &'static str,
}

impl Refused {
    fn new(
        machine: &'static str,
        state: impl std::fmt::Debug,
        event: impl std::fmt::Debug,
        why: &'static str,
    ) -> Self {
        Self { machine, state: format!("{state:?}"), event: format!("{event:?}"), why }
    }
}

impl From<Refused> for Problem {
    fn from(refused: Refused) -> Self {
        Problem::new(ProblemKind::Conflict, format!("change a {}", refused.machine), refused)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum JobEvent {
    /// A host with room was chosen.
    Placed,
    /// Volumes and seed stand; the VM starts.
    Staged,
    /// The guest says that the command starts.
    CommandStarted,
    /// The guest says that the command has ended.
    CommandEnded,
    /// Outputs are stored.
    Collected {
        exit_code: i32,
    },
    /// It cannot go on: the VM is lost, the runner failed, the time is up.
    Failed,
    Cancelled,
    /// Its host is gone: it begins anew elsewhere.
    HostLost,
}

impl JobState {
    pub const ALL: [Self; 8] = [
        Self::Queued,
        Self::Staging,
        Self::Starting,
        Self::Running,
        Self::Collecting,
        Self::Succeeded,
        Self::Failed,
        Self::Cancelled,
    ];

    /// Nothing follows this state.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled)
    }

    /// # Errors
    /// [`Refused`] when the job has ended or the event belongs to another state.
    pub fn next(self, event: JobEvent) -> Result<Self, Refused> {
        if self.is_final() {
            return Err(Refused::new("job", self, event, "it has ended"));
        }
        match (self, event) {
            (_, JobEvent::Failed) => Ok(Self::Failed),
            (_, JobEvent::Cancelled) => Ok(Self::Cancelled),
            (
                Self::Staging | Self::Starting | Self::Running | Self::Collecting,
                JobEvent::HostLost,
            ) => Ok(Self::Queued),
            (Self::Queued, JobEvent::Placed) => Ok(Self::Staging),
            (Self::Staging, JobEvent::Staged) => Ok(Self::Starting),
            (Self::Starting, JobEvent::CommandStarted) => Ok(Self::Running),
            (Self::Running, JobEvent::CommandEnded) => Ok(Self::Collecting),
            (Self::Collecting, JobEvent::Collected { exit_code: 0 }) => Ok(Self::Succeeded),
            (Self::Collecting, JobEvent::Collected { .. }) => Ok(Self::Failed),
            _ => Err(Refused::new("job", self, event, "the steps of a job have one order")),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum VmEvent {
    /// QEMU runs the guest: it booted, arrived or was resumed.
    Resumed,
    /// QEMU stopped the guest because it was told to.
    Stopped,
    /// QEMU stopped the guest because a disk answered with an error.
    DiskError,
    /// The last state has arrived at the destination of a migration.
    HandedOver,
    /// The guest powered off.
    PoweredOff,
    /// The QEMU process has ended.
    ProcessEnded,
}

impl VmStatus {
    pub const ALL: [Self; 8] = [
        Self::Starting,
        Self::Incoming,
        Self::Running,
        Self::Paused,
        Self::IoError,
        Self::Migrated,
        Self::Shutdown,
        Self::Gone,
    ];

    /// # Errors
    /// [`Refused`] when the guest would run twice or after its end.
    pub fn next(self, event: VmEvent) -> Result<Self, Refused> {
        use VmEvent as E;
        match (self, event) {
            (_, E::ProcessEnded) => Ok(Self::Gone),
            (Self::Gone, _) => Err(Refused::new("VM", self, event, "its QEMU has ended")),
            (Self::Migrated, _) => {
                Err(Refused::new("VM", self, event, "its state is at another host"))
            }
            (Self::Shutdown, _) => Err(Refused::new("VM", self, event, "it is powered off")),
            (_, E::Resumed) => Ok(Self::Running),
            // It arrives as it was when its state was sent.
            (_, E::DiskError) => Ok(Self::IoError),
            (_, E::PoweredOff) => Ok(Self::Shutdown),
            (Self::Incoming, _) => {
                Err(Refused::new("VM", self, event, "its state has not arrived yet"))
            }
            (Self::Starting, E::HandedOver) => {
                Err(Refused::new("VM", self, event, "it has no state to hand over yet"))
            }
            (_, E::HandedOver) => Ok(Self::Migrated),
            (_, E::Stopped) => Ok(Self::Paused),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MigrationEvent {
    /// The destination listens and the source was told to send.
    Sending,
    /// The source is paused, before the switch.
    Paused,
    /// The VM runs at the destination.
    Arrived,
    /// It was given up and the VM's write right is at the source.
    RolledBack(WriteRight),
}

impl MigrationState {
    pub const ALL: [Self; 5] =
        [Self::Preparing, Self::Copying, Self::Switching, Self::Completed, Self::Aborted];

    pub fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::Aborted)
    }

    /// # Errors
    /// [`Refused`] when it has ended, when a step is left out, or when it is to be given up while
    /// the destination may write.
    pub fn next(self, event: MigrationEvent) -> Result<Self, Refused> {
        use MigrationEvent as E;
        if self.is_final() {
            return Err(Refused::new("migration", self, event, "it has ended"));
        }
        match (self, event) {
            (_, E::RolledBack(right)) if right.may_source_run() => Ok(Self::Aborted),
            (_, E::RolledBack(_)) => {
                Err(Refused::new("migration", self, event, "the source may not write yet"))
            }
            (Self::Preparing, E::Sending) => Ok(Self::Copying),
            (Self::Copying, E::Paused) => Ok(Self::Switching),
            (Self::Switching, E::Arrived) => Ok(Self::Completed),
            _ => Err(Refused::new("migration", self, event, "its steps have one order")),
        }
    }
}

/// Which side of a migration may write the VM's volumes; the drawing is at the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WriteRight {
    Source,
    /// At least one epoch was raised, or its raise was sent and not answered.
    Destination,
    /// The epochs are the destination's, whose QEMU is gone for good.
    Nobody,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WriteRightEvent {
    /// The first raise of an epoch is about to be sent.
    Raise,
    /// The destination's agent says that the VM's QEMU is gone there.
    DestinationGone,
    /// Every epoch is back at the source's.
    FlippedBack,
}

impl WriteRight {
    /// The source's QEMU may be resumed.
    pub fn may_source_run(self) -> bool {
        self == Self::Source
    }

    /// # Errors
    /// [`Refused`] when the epochs would go back while the destination may still run.
    pub fn next(self, event: WriteRightEvent) -> Result<Self, Refused> {
        use WriteRightEvent as E;
        match (self, event) {
            (Self::Source, E::Raise) => Ok(Self::Destination),
            (Self::Source, E::DestinationGone) => Ok(Self::Source),
            (Self::Destination | Self::Nobody, E::DestinationGone) => Ok(Self::Nobody),
            (Self::Nobody | Self::Source, E::FlippedBack) => Ok(Self::Source),
            (Self::Destination, E::FlippedBack) => {
                Err(Refused::new("write right", self, event, "the destination may still run"))
            }
            (Self::Destination | Self::Nobody, E::Raise) => {
                Err(Refused::new("write right", self, event, "the epochs were raised before"))
            }
        }
    }
}

impl EpochChange {
    /// The epoch of a volume after this change: compare-and-swap, where a repeated call succeeds.
    ///
    /// # Errors
    /// [`Refused`] when the volume's epoch is neither `from` nor `to`, or `to` was never issued.
    pub fn apply(self, current: Epoch, last_issued: Epoch) -> Result<Epoch, Refused> {
        let refused = |why| Err(Refused::new("volume's epoch", current, self, why));
        if self.to > last_issued {
            return refused("the new epoch was never issued");
        }
        if current != self.from && current != self.to {
            return refused("the volume's epoch is another one");
        }
        Ok(self.to)
    }
}

#[cfg(test)]
mod switchover_tests;

#[cfg(test)]
mod tests {
    use super::*;

    const JOB_EVENTS: [JobEvent; 9] = [
        JobEvent::Placed,
        JobEvent::Staged,
        JobEvent::CommandStarted,
        JobEvent::CommandEnded,
        JobEvent::Collected { exit_code: 0 },
        JobEvent::Collected { exit_code: 1 },
        JobEvent::Failed,
        JobEvent::Cancelled,
        JobEvent::HostLost,
    ];

    const VM_EVENTS: [VmEvent; 6] = [
        VmEvent::Resumed,
        VmEvent::Stopped,
        VmEvent::DiskError,
        VmEvent::HandedOver,
        VmEvent::PoweredOff,
        VmEvent::ProcessEnded,
    ];

    #[test]
    fn a_job_takes_its_steps_in_order_and_no_other() {
        use JobState as S;
        let steps = [
            (S::Queued, JobEvent::Placed, S::Staging),
            (S::Staging, JobEvent::Staged, S::Starting),
            (S::Starting, JobEvent::CommandStarted, S::Running),
            (S::Running, JobEvent::CommandEnded, S::Collecting),
            (S::Collecting, JobEvent::Collected { exit_code: 0 }, S::Succeeded),
            (S::Collecting, JobEvent::Collected { exit_code: 1 }, S::Failed),
            (S::Staging, JobEvent::HostLost, S::Queued),
            (S::Starting, JobEvent::HostLost, S::Queued),
            (S::Running, JobEvent::HostLost, S::Queued),
            (S::Collecting, JobEvent::HostLost, S::Queued),
        ];
        for state in S::ALL {
            for event in JOB_EVENTS {
                let expected = match (state.is_final(), event) {
                    (true, _) => None,
                    (false, JobEvent::Failed) => Some(S::Failed),
                    (false, JobEvent::Cancelled) => Some(S::Cancelled),
                    _ => steps.iter().find(|s| (s.0, s.1) == (state, event)).map(|s| s.2),
                };
                assert_eq!(state.next(event).ok(), expected, "{state:?} and {event:?}");
            }
        }
    }

    #[test]
    fn a_job_that_ended_takes_nothing_more() {
        for state in JobState::ALL.into_iter().filter(|s| s.is_final()) {
            for event in JOB_EVENTS {
                let refused = state.next(event).unwrap_err();
                assert_eq!(refused.why, "it has ended");
            }
        }
    }

    #[test]
    fn a_vm_whose_state_left_or_ended_never_runs_here_again() {
        for first in [VmStatus::Migrated, VmStatus::Shutdown, VmStatus::Gone] {
            let mut reachable = vec![first];
            let mut looked_at = 0;
            while looked_at < reachable.len() {
                let state = reachable[looked_at];
                looked_at += 1;
                for next in VM_EVENTS.iter().filter_map(|event| state.next(*event).ok()) {
                    if !reachable.contains(&next) {
                        reachable.push(next);
                    }
                }
            }
            assert!(!reachable.contains(&VmStatus::Running), "{first:?} reaches {reachable:?}");
        }
    }

    #[test]
    fn every_qemu_can_end() {
        for state in VmStatus::ALL {
            assert_eq!(state.next(VmEvent::ProcessEnded), Ok(VmStatus::Gone));
        }
    }

    #[test]
    fn a_vm_stopped_by_a_disk_error_goes_on_when_the_disk_does() {
        let stopped = VmStatus::Running.next(VmEvent::DiskError).unwrap();
        assert_eq!(stopped, VmStatus::IoError);
        assert_eq!(stopped.next(VmEvent::Resumed), Ok(VmStatus::Running));
    }

    #[test]
    fn a_migration_cannot_be_given_up_while_the_destination_may_write() {
        for state in [MigrationState::Preparing, MigrationState::Copying, MigrationState::Switching]
        {
            for right in [WriteRight::Destination, WriteRight::Nobody] {
                assert!(state.next(MigrationEvent::RolledBack(right)).is_err());
            }
            let back = state.next(MigrationEvent::RolledBack(WriteRight::Source));
            assert_eq!(back, Ok(MigrationState::Aborted));
        }
    }

    #[test]
    fn an_epoch_changes_only_from_the_one_expected_to_one_that_was_issued() {
        let change = EpochChange { from: Epoch(3), to: Epoch(5) };
        assert_eq!(change.apply(Epoch(3), Epoch(5)), Ok(Epoch(5)));
        assert_eq!(change.apply(Epoch(5), Epoch(5)), Ok(Epoch(5)), "a repeated call");
        assert!(change.apply(Epoch(4), Epoch(5)).is_err(), "somebody else's epoch");
        assert!(change.apply(Epoch(3), Epoch(4)).is_err(), "never issued");
    }

    #[test]
    fn a_refusal_is_a_conflict_that_names_state_event_and_reason() {
        let refused = JobState::Failed.next(JobEvent::Placed).unwrap_err();
        let problem = Problem::from(refused);
        assert_eq!(problem.kind, ProblemKind::Conflict);
        assert!(problem.why.contains("Failed cannot take the event Placed: it has ended"));
    }
}
