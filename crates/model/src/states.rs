//! The state machines: which state follows which event, and why not where it does not.
//!
//! Pure functions without I/O or clock. Whoever owns a state asks here before it acts; a typed
//! refusal says what was asked of what. The job's and the migration's drawings stand at
//! [`JobState`] and [`MigrationState`], the VM's and the write right's here.
//!
//! A VM as its host's agent sees it ([`VmStatus`]):
//!
//! ```text
//! starting ─> incoming ─> paused        (its state has arrived; its agent lets it run)
//! starting, incoming, running, paused, io_error ─> running, paused, io_error, shutdown
//! all but starting and incoming ─> migrated   (its state is elsewhere: it never runs here again)
//! all but migrated ─> gone
//! ```
//!
//! Who may run a VM while it migrates is [`crate::switchover`].

use crate::job::{JobState, MigrationState};
use crate::vm::VmStatus;
use crate::{Problem, ProblemKind};

/// An event that is not possible in a state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a {machine} that is {state} cannot take the event {event}: {why}")]
pub struct Refused {
    /// Which kind of thing was to change: `job`, `VM`, `migration`, `switchover`.
    pub machine: &'static str,
    /// The state it is in.
    pub state: String,
    /// What was asked of it.
    pub event: String,
    /// The rule that forbids it, as the end of a sentence.
    pub why: &'static str,
}

impl Refused {
    pub(crate) fn new(
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

/// What happens to a job.
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
        /// The command's own; other than 0 the job has failed.
        exit_code: i32,
    },
    /// It cannot go on: the VM is lost, the runner failed, the time is up.
    Failed,
    /// A person wants it to end.
    Cancelled,
    /// Its host is gone: it begins anew elsewhere.
    HostLost,
    /// The VM of no job runs its guest.
    GuestRuns,
    /// The VM of no job was taken down; its disks stay ([`crate::persistent_vm`]).
    TakenDown,
}

impl JobState {
    /// Every state, in the order in which a job goes through them.
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

    /// The state after an event.
    ///
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
            )
            | (
                Self::Queued | Self::Staging | Self::Starting | Self::Running,
                JobEvent::TakenDown,
            ) => Ok(Self::Queued),
            (Self::Queued, JobEvent::Placed) => Ok(Self::Staging),
            (Self::Staging, JobEvent::Staged) => Ok(Self::Starting),
            (Self::Starting, JobEvent::CommandStarted | JobEvent::GuestRuns) => Ok(Self::Running),
            (Self::Running, JobEvent::CommandEnded) => Ok(Self::Collecting),
            (Self::Collecting, JobEvent::Collected { exit_code: 0 }) => Ok(Self::Succeeded),
            (Self::Collecting, JobEvent::Collected { .. }) => Ok(Self::Failed),
            _ => Err(Refused::new("job", self, event, "the steps of a job have one order")),
        }
    }
}

/// What happens to a VM's QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum VmEvent {
    /// QEMU waits for the VM's state.
    Waits,
    /// QEMU runs the guest: it booted or was let run.
    Resumed,
    /// QEMU stands still, and could go on. An incoming VM has arrived.
    Stopped,
    /// QEMU stopped the guest because a disk answered with an error.
    DiskError,
    /// The VM is at the destination of a migration.
    HandedOver,
    /// The guest powered off, rebooted or panicked: it does not go on.
    PoweredOff,
    /// The QEMU process has ended.
    ProcessEnded,
}

impl VmStatus {
    /// Every status.
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

    /// The status after an event.
    ///
    /// # Errors
    /// [`Refused`] when the guest would run twice or after its end.
    pub fn next(self, event: VmEvent) -> Result<Self, Refused> {
        use VmEvent as E;
        let refused = |why| Err(Refused::new("VM", self, event, why));
        match (self, event) {
            (Self::Starting | Self::Incoming, E::HandedOver) => {
                refused("it has no state to hand over yet")
            }
            // Also when its QEMU ended before anybody knew.
            (_, E::HandedOver) => Ok(Self::Migrated),
            (Self::Migrated, E::Resumed | E::Waits) => refused("its state is at another host"),
            (Self::Migrated, _) => Ok(Self::Migrated),
            (_, E::ProcessEnded) => Ok(Self::Gone),
            (Self::Gone, _) => refused("its QEMU has ended"),
            (Self::Shutdown, E::PoweredOff | E::Stopped) => Ok(Self::Shutdown),
            (Self::Shutdown, _) => refused("it is powered off"),
            (Self::Starting | Self::Incoming, E::Waits) => Ok(Self::Incoming),
            (_, E::Waits) => refused("it was here already"),
            (_, E::Resumed) => Ok(Self::Running),
            (_, E::DiskError) => Ok(Self::IoError),
            (_, E::PoweredOff) => Ok(Self::Shutdown),
            (_, E::Stopped) => Ok(Self::Paused),
        }
    }
}

/// What happens to a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MigrationEvent {
    /// The destination listens and the source was told to send.
    Sending,
    /// The source is paused, before the switch.
    Paused,
    /// The VM runs at the destination.
    Arrived,
    /// It was given up and the VM is at the source, or nowhere.
    GivenUp,
}

impl MigrationState {
    /// Every state, in the order in which a migration goes through them.
    pub const ALL: [Self; 5] =
        [Self::Preparing, Self::Copying, Self::Switching, Self::Completed, Self::Aborted];

    /// Nothing follows this state.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::Aborted)
    }

    /// The state after an event.
    ///
    /// # Errors
    /// [`Refused`] when it has ended or a step is left out.
    pub fn next(self, event: MigrationEvent) -> Result<Self, Refused> {
        use MigrationEvent as E;
        if self.is_final() {
            return Err(Refused::new("migration", self, event, "it has ended"));
        }
        match (self, event) {
            (_, E::GivenUp) => Ok(Self::Aborted),
            (Self::Preparing, E::Sending) => Ok(Self::Copying),
            (Self::Copying, E::Paused) => Ok(Self::Switching),
            (Self::Switching, E::Arrived) => Ok(Self::Completed),
            _ => Err(Refused::new("migration", self, event, "its steps have one order")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB_EVENTS: [JobEvent; 11] = [
        JobEvent::Placed,
        JobEvent::Staged,
        JobEvent::CommandStarted,
        JobEvent::CommandEnded,
        JobEvent::Collected { exit_code: 0 },
        JobEvent::Collected { exit_code: 1 },
        JobEvent::Failed,
        JobEvent::Cancelled,
        JobEvent::HostLost,
        JobEvent::GuestRuns,
        JobEvent::TakenDown,
    ];

    const VM_EVENTS: [VmEvent; 7] = [
        VmEvent::Waits,
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
            (S::Starting, JobEvent::GuestRuns, S::Running),
            (S::Queued, JobEvent::TakenDown, S::Queued),
            (S::Staging, JobEvent::TakenDown, S::Queued),
            (S::Starting, JobEvent::TakenDown, S::Queued),
            (S::Running, JobEvent::TakenDown, S::Queued),
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
    fn every_qemu_can_end_and_a_vm_that_moved_away_stays_known_as_moved() {
        for state in VmStatus::ALL {
            let expected = match state {
                VmStatus::Migrated => VmStatus::Migrated,
                _ => VmStatus::Gone,
            };
            assert_eq!(state.next(VmEvent::ProcessEnded), Ok(expected));
        }
    }

    #[test]
    fn a_vm_that_comes_by_migration_stands_still_when_it_has_arrived() {
        let waits = VmStatus::Starting.next(VmEvent::Waits).unwrap();
        let arrived = waits.next(VmEvent::Stopped).unwrap();
        assert_eq!((waits, arrived), (VmStatus::Incoming, VmStatus::Paused));
        assert_eq!(waits.next(VmEvent::DiskError), Ok(VmStatus::IoError), "as it was sent");
        assert_eq!(waits.next(VmEvent::PoweredOff), Ok(VmStatus::Shutdown), "as it was sent");
    }

    #[test]
    fn a_vm_stopped_by_a_disk_error_goes_on_when_the_disk_does() {
        let stopped = VmStatus::Running.next(VmEvent::DiskError).unwrap();
        assert_eq!(stopped, VmStatus::IoError);
        assert_eq!(stopped.next(VmEvent::Resumed), Ok(VmStatus::Running));
    }

    #[test]
    fn a_migration_that_has_ended_is_neither_completed_nor_given_up_again() {
        for state in MigrationState::ALL {
            let given_up = state.next(MigrationEvent::GivenUp);
            assert_eq!(given_up.is_err(), state.is_final(), "{state:?}");
        }
    }

    #[test]
    fn a_refusal_is_a_conflict_that_names_state_event_and_reason() {
        let refused = JobState::Failed.next(JobEvent::Placed).unwrap_err();
        let problem = Problem::from(refused);
        assert_eq!(problem.kind, ProblemKind::Conflict);
        assert!(problem.why.contains("Failed cannot take the event Placed: it has ended"));
    }
}
