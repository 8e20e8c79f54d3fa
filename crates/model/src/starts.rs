//! The starts of a VM: which start a message means, and what an agent does with it.
//!
//! A message to start or to delete a VM may come late or twice: a client gave up waiting, a proxy stands in
//! between, or a controller stood still for a while and goes on. So each start of a VM has a number, a
//! [`VmStart`], that is greater than the numbers of all starts before it, at whichever host. A delete names
//! the greatest start that it means.
//!
//! An agent keeps [`Starts`] for each VM. They are pure functions, and the code that runs: the tests here
//! walk them with messages lost, doubled and late, and with crashes at every step.
//!
//! ```text
//!                    nothing here        start N is here
//! start M > ended    begins M            M = N: the same again    M > N: ends N, then begins M
//!                                        M < N: refused
//!                                        of another submission: refused
//! start M <= ended   refused             refused
//! delete M           keeps M as ended    M >= N: keeps M as ended, ends N
//!                                        M < N: keeps M as ended, leaves N alone and says so
//! ```
//!
//! A newer start may end an older one because the controller gives out a number only after it has decided that
//! no older start is to run at that host: a migration never goes to the host where the VM runs, and a job
//! begins anew only when it has given up its VM. That is so for the starts of one job. What another job or VM of that name has left is ended by
//! a delete alone: a controller whose state was restored from an older copy gives out its name again, and does not know that it runs.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Problem;

#[cfg(test)]
mod walk;

/// One start of a VM. Later starts are greater.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    Serialize,
    Deserialize,
    ToSchema,
)]
pub struct VmStart {
    /// When the VM's job was submitted: another controller may have had a job of the same name.
    pub submitted_ms: u64,
    /// How often the job began anew.
    pub run: u32,
    /// The number of the migration that the VM arrives by; 0 where it boots.
    pub migration: u32,
}

impl VmStart {
    /// The start at the destination of this run's migration with this number.
    #[must_use]
    pub fn by_migration(self, migration: u32) -> Self {
        Self { migration, ..self }
    }

    /// Greater than or equal to every start of this run, and smaller than those of the next run.
    #[must_use]
    pub fn whole_run(self) -> Self {
        self.by_migration(u32::MAX)
    }

    /// Whether both are starts of one run.
    pub fn is_in_run_of(self, other: Self) -> bool {
        self.whole_run() == other.whole_run()
    }

    /// As a delete, or a change, names it in its URL, without the question mark.
    pub fn query(self) -> String {
        let Self { submitted_ms, run, migration } = self;
        format!("submitted_ms={submitted_ms}&run={run}&migration={migration}")
    }
}

impl fmt::Display for VmStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.submitted_ms, self.run, self.migration)
    }
}

/// What one agent knows of one VM's starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Starts {
    /// The start that is here, also if its QEMU has ended.
    pub here: Option<VmStart>,
    /// No start up to this one begins here any more. The agent stores it before a delete is answered.
    pub ended: Option<VmStart>,
}

/// What an agent does when it is asked to start a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnStart {
    /// Nothing of the VM is here: it is started.
    Begin,
    /// This start is here already.
    Same,
    /// This older start is here. It is deleted first; then the agent decides again.
    EndFirst(VmStart),
}

/// Why a VM is not started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StartRefused {
    /// A delete came first.
    #[error(
        "this is the VM's start {asked}, and its starts up to {ended} were ended here; the request came late"
    )]
    Ended {
        /// The start that was asked for.
        asked: VmStart,
        /// The greatest start that was ended.
        ended: VmStart,
    },
    /// Another VM of this name is here.
    #[error(
        "another VM with this name is here (start {here}, and not {asked}); it ends when somebody ends it"
    )]
    Another {
        /// The start that was asked for.
        asked: VmStart,
        /// The one that is here.
        here: VmStart,
    },
    /// A later start is here.
    #[error(
        "this is the VM's start {asked}, and its later start {here} is here; the request came late"
    )]
    Older {
        /// The start that was asked for.
        asked: VmStart,
        /// The one that is here.
        here: VmStart,
    },
}

impl StartRefused {
    /// What an agent answers. The place of another VM may become free.
    pub fn problem(self, what: impl Into<String>) -> Problem {
        match self {
            Self::Another { .. } => Problem::unavailable(what, self)
                .next("`perigee vm list --unknown` shows it if no record names it"),
            Self::Ended { .. } | Self::Older { .. } => Problem::conflict(what, self),
        }
    }
}

/// What an agent does when it is asked to delete a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnDelete {
    /// Nothing of the VM is here.
    Nothing,
    /// The start that is here is ended.
    End,
    /// A later start is here, and is left alone.
    Leave(DeleteRefused),
}

/// Why a VM is not deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the request means the VM's start {asked} and those before it, and its later start {here} is here; that \
     one goes on"
)]
pub struct DeleteRefused {
    /// The greatest start that the request means.
    pub asked: VmStart,
    /// The one that is here.
    pub here: VmStart,
}

impl Starts {
    /// # Errors
    /// [`StartRefused`] when the request came late.
    pub fn on_start(self, asked: VmStart) -> Result<OnStart, StartRefused> {
        if let Some(ended) = self.ended.filter(|ended| asked <= *ended) {
            return Err(StartRefused::Ended { asked, ended });
        }
        match self.here {
            None => Ok(OnStart::Begin),
            Some(here) if here == asked => Ok(OnStart::Same),
            Some(here) if here.submitted_ms < asked.submitted_ms => {
                Err(StartRefused::Another { asked, here })
            }
            Some(here) if here < asked => Ok(OnStart::EndFirst(here)),
            Some(here) => Err(StartRefused::Older { asked, here }),
        }
    }

    /// What is done, and what is kept as [`Starts::ended`] from now on.
    pub fn on_delete(self, asked: VmStart) -> (OnDelete, VmStart) {
        let ended = self.ended.map_or(asked, |ended| ended.max(asked));
        let act = match self.here {
            None => OnDelete::Nothing,
            Some(here) if here <= asked => OnDelete::End,
            Some(here) => OnDelete::Leave(DeleteRefused { asked, here }),
        };
        (act, ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(run: u32, migration: u32) -> VmStart {
        VmStart { submitted_ms: 1000, run, migration }
    }

    #[test]
    fn a_later_job_run_or_migration_is_a_later_start() {
        assert!(start(0, 0) < start(0, 1));
        assert!(start(0, 7) < start(1, 0));
        assert!(start(0, 7) < start(0, 0).whole_run());
        assert!(start(0, 0).whole_run() < start(1, 0));
        let of_a_later_job = VmStart { submitted_ms: 1001, run: 0, migration: 0 };
        assert!(start(3, 0).whole_run() < of_a_later_job);
    }

    /// A new job of a restored controller had the id of one that ran, and ended its VM.
    #[test]
    fn what_another_vm_of_the_name_has_left_is_ended_by_a_delete_alone() {
        let of_a_later_job = VmStart { submitted_ms: 1001, run: 0, migration: 0 };
        let starts = Starts { here: Some(start(3, 1)), ended: None };
        let refused = starts.on_start(of_a_later_job).unwrap_err();
        assert_eq!(refused, StartRefused::Another { asked: of_a_later_job, here: start(3, 1) });
        assert_eq!(refused.problem("start it").kind, crate::ProblemKind::Unavailable);
        assert_eq!(starts.on_start(start(4, 0)), Ok(OnStart::EndFirst(start(3, 1))));
    }

    #[test]
    fn a_late_request_names_both_starts() {
        let starts = Starts { here: None, ended: Some(start(1, 2)) };
        let refused = starts.on_start(start(1, 1)).unwrap_err().to_string();
        assert!(refused.contains("start 1000.1.1"), "{refused}");
        assert!(refused.contains("up to 1000.1.2"), "{refused}");
        let starts = Starts { here: Some(start(2, 0)), ended: None };
        let (act, ended) = starts.on_delete(start(1, 2));
        let OnDelete::Leave(refused) = act else { panic!("{act:?}") };
        assert!(refused.to_string().contains("start 1000.2.0 is here"), "{refused}");
        assert_eq!(ended, start(1, 2));
    }
}
