//! What a record of a job or a VM is of.
//!
//! Whoever adds a kind finds here, and in the drivers of `jobs`, what the kind has to answer: each question is a `match` without
//! a rest.

use std::collections::BTreeMap;

use perigee_model::gang::GangState;
use perigee_model::gang::moving::GangMove;
use perigee_model::guest::GuestKey;
use perigee_model::job::JobSpec;
use perigee_model::network::Card;
use perigee_model::persistent_vm::PersistentVm;
use perigee_model::vm::{Firmware, Hardware};
use perigee_model::volume_move::VolumesOnMove;
use perigee_model::{HostId, JobId};
use perigee_planner::{PastRun, Traits};
use serde::{Deserialize, Serialize};

use super::{LogKept, Talk};

/// What a [`super::JobRecord`] is of, with what only this kind knows.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A job with one VM.
    #[default]
    Job,
    /// A VM of a gang, which is a job to its driver.
    Member(Membership),
    /// A job with several VMs. It has no VM of its own: each member does, which has a record of its own.
    Gang(Gang),
    /// A VM that lives without a job.
    PersistentVm(PersistentVm),
}

impl Kind {
    // --- what only one kind knows ---

    /// Which member of which gang it is; `None` for other kinds.
    pub fn member(&self) -> Option<&Membership> {
        match self {
            Self::Member(member) => Some(member),
            Self::Job | Self::Gang(_) | Self::PersistentVm(_) => None,
        }
    }

    /// As [`Self::member`], to change.
    pub fn member_mut(&mut self) -> Option<&mut Membership> {
        match self {
            Self::Member(member) => Some(member),
            Self::Job | Self::Gang(_) | Self::PersistentVm(_) => None,
        }
    }

    /// The state of the gang; `None` for other kinds.
    pub fn gang(&self) -> Option<&Gang> {
        match self {
            Self::Gang(gang) => Some(gang),
            Self::Job | Self::Member(_) | Self::PersistentVm(_) => None,
        }
    }

    /// As [`Self::gang`], to change.
    pub fn gang_mut(&mut self) -> Option<&mut Gang> {
        match self {
            Self::Gang(gang) => Some(gang),
            Self::Job | Self::Member(_) | Self::PersistentVm(_) => None,
        }
    }

    /// What only a VM without a job has; `None` for other kinds.
    pub fn persistent_vm(&self) -> Option<&PersistentVm> {
        match self {
            Self::PersistentVm(vm) => Some(vm),
            Self::Job | Self::Member(_) | Self::Gang(_) => None,
        }
    }

    /// As [`Self::persistent_vm`], to change.
    pub fn persistent_vm_mut(&mut self) -> Option<&mut PersistentVm> {
        match self {
            Self::PersistentVm(vm) => Some(vm),
            Self::Job | Self::Member(_) | Self::Gang(_) => None,
        }
    }

    /// Whether it is a VM of a gang.
    pub fn is_member(&self) -> bool {
        self.member().is_some()
    }

    /// Whether it has members, and no VM of its own.
    pub fn is_gang(&self) -> bool {
        self.gang().is_some()
    }

    /// Whether it keeps its disks when its VM is off, and has no command whose end is awaited.
    pub fn is_persistent_vm(&self) -> bool {
        self.persistent_vm().is_some()
    }

    // --- what every kind answers ---

    /// What people call it.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Job | Self::Member(_) | Self::Gang(_) => "job",
            Self::PersistentVm(_) => "VM",
        }
    }

    /// Whether people see it as a job: a gang with all of its VMs is one.
    pub fn is_a_job(&self) -> bool {
        match self {
            Self::Job | Self::Gang(_) => true,
            Self::Member(_) | Self::PersistentVm(_) => false,
        }
    }

    /// The job that people name for it, if it is of one. `id` is that of the record.
    pub fn job_of<'a>(&'a self, id: &'a JobId) -> Option<&'a JobId> {
        match self {
            Self::Job | Self::Gang(_) => Some(id),
            Self::Member(member) => Some(&member.gang),
            Self::PersistentVm(_) => None,
        }
    }

    /// Whether it wants a host while it is queued.
    pub fn waits_for_a_host(&self) -> bool {
        match self {
            Self::Job | Self::Member(_) => true,
            Self::Gang(gang) => gang.state.verdict.is_none(),
            Self::PersistentVm(vm) => vm.waits_for_a_host(),
        }
    }

    /// Whether it is off, and is to stay so until a person starts it.
    pub fn rests(&self) -> bool {
        match self {
            Self::Job | Self::Member(_) | Self::Gang(_) => false,
            Self::PersistentVm(vm) => !vm.waits_for_a_host(),
        }
    }

    /// Whether its disks are being made of a backup, which somebody has to do before anything else.
    pub fn is_made_of_backup(&self) -> bool {
        match self {
            Self::Job | Self::Member(_) | Self::Gang(_) => false,
            Self::PersistentVm(vm) => vm.from_backup.is_some(),
        }
    }

    /// Whether its VM is to be off, and its record stays.
    pub fn goes_down(&self) -> bool {
        match self {
            Self::Job | Self::Member(_) | Self::Gang(_) => false,
            Self::PersistentVm(vm) => vm.down.is_some(),
        }
    }

    /// Whether its VM is being removed from its hosts, and its record stays.
    pub fn is_taken_down(&self) -> bool {
        match self {
            Self::Job | Self::Member(_) | Self::Gang(_) => false,
            Self::PersistentVm(vm) => vm.is_taken_down(),
        }
    }

    /// Whether it was decided how it ends, beside [`super::JobRecord::ending`].
    pub fn is_judged(&self) -> bool {
        match self {
            Self::Gang(gang) => gang.state.verdict.is_some(),
            Self::Job | Self::Member(_) | Self::PersistentVm(_) => false,
        }
    }

    /// Whether its guest has booted, and waits for other ones.
    pub fn is_at_barrier(&self) -> bool {
        match self {
            Self::Member(member) => member.ready,
            Self::Job | Self::Gang(_) | Self::PersistentVm(_) => false,
        }
    }

    /// What boots its VM's root disk.
    pub fn firmware(&self, spec: &JobSpec) -> Firmware {
        match self {
            Self::Job | Self::Member(_) | Self::Gang(_) => spec.firmware,
            Self::PersistentVm(vm) => vm.firmware,
        }
    }

    /// What was asked for of its VM's machine.
    pub fn hardware(&self, spec: &JobSpec) -> Hardware {
        match self {
            Self::Job | Self::Member(_) | Self::Gang(_) => {
                Hardware { tpm: spec.tpm, ..Hardware::default() }
            }
            Self::PersistentVm(vm) => vm.hardware.clone(),
        }
    }
}

/// What a gang's driver must know after a restart, beside its members' records.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Gang {
    /// Where its members start, in the order of their ranks; empty while it is queued.
    pub hosts: Vec<HostId>,
    pub traits: Traits,
    pub state: GangState,
    /// The cards of its members, in the order of their ranks. They are given before it has its hosts, so that no host is
    /// taken by a gang that waits for addresses.
    pub cards: Vec<Card>,
    /// The keys of its members; `None` while it is queued, and after its end.
    pub keys: Option<GangKeys>,
    /// The last move of all its VMs.
    pub last_move: Option<GangMove>,
    /// The last time in this run that its data were to come to its VMs.
    #[serde(default)]
    pub last_copy: Option<GangCopy>,
    /// `JobIntent::move_gang` as far as it is carried out.
    pub applied_move: u64,
    /// So many moves in a row were undone.
    pub undone: u32,
    /// What its VMs had sent to each other when the last move was over.
    pub sent_before: Vec<Vec<u64>>,
    /// Whether what was predicted rests on its earlier runs.
    #[serde(default)]
    pub has_run: bool,
    /// The logs of the members of runs that were lost, by their ranks, and the numbers of their last lines.
    pub logs: BTreeMap<u32, (LogKept, u64)>,
}

impl Gang {
    /// What is kept when it starts again: what was asked of it is not asked again.
    pub fn of_next_run(&self) -> Self {
        let mut next = Self { applied_move: self.applied_move, ..Self::default() };
        next.last_move.clone_from(&self.last_move);
        next.logs.clone_from(&self.logs);
        next.close_changes("the job began anew");
        next
    }

    /// The VMs are taken down, wherever they and their data are.
    pub fn close_changes(&mut self, why: &str) {
        if let Some(copy) = self.last_copy.as_mut().filter(|copy| copy.is_open()) {
            copy.ended_ms = Some(crate::clock::now_ms());
            why.clone_into(&mut copy.undone);
        }
        let Some(of) = self.last_move.as_mut().filter(|of| of.is_open()) else { return };
        of.ended_ms = Some(crate::clock::now_ms());
        if of.undone.is_empty() {
            why.clone_into(&mut of.undone);
        }
    }

    /// The move that is under way, unless the gang ends.
    pub fn open_move(&self) -> Option<&GangMove> {
        let is_open = |of: &&GangMove| of.is_open() && self.state.verdict.is_none();
        self.last_move.as_ref().filter(is_open)
    }

    /// The last time that the data of this run were to come to the VMs. An older controller keeps one over a restart, which says nothing of
    /// the next run. `run`: [`super::JobRecord::restarts`].
    pub fn copy_of(&self, run: u32) -> Option<&GangCopy> {
        self.last_copy.as_ref().filter(|copy| copy.run == run)
    }

    /// The same while the data come, unless the gang ends.
    pub fn open_copy(&self, run: u32) -> Option<&GangCopy> {
        self.copy_of(run).filter(|copy| copy.is_open() && self.state.verdict.is_none())
    }
}

/// The data of each VM of a gang are to come to its host. The gang's driver wants that, and each member's driver has its own data come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GangCopy {
    /// Which of the run's it is, from 1 on.
    pub number: u32,
    /// [`super::JobRecord::restarts`] of the gang.
    #[serde(default)]
    pub run: u32,
    /// Where each VM was, in the order of their ranks. Its data come to no other host.
    pub hosts: Vec<HostId>,
    /// Why, as the planner says it.
    pub reason: String,
    /// When it was decided; Unix time.
    #[serde(default)]
    pub started_ms: u64,
    /// All have come or stay; Unix time.
    pub ended_ms: Option<u64>,
    /// Why not all have come; empty: they have, or still come.
    pub undone: String,
    /// So many in a row have not brought all data, with this one if it is over.
    #[serde(default)]
    pub undone_in_a_row: u32,
}

impl GangCopy {
    pub fn is_open(&self) -> bool {
        self.ended_ms.is_none()
    }
}

/// What a person asks of a gang's VMs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum GangMoveRequest {
    /// Each rank goes to its host.
    To {
        hosts: Vec<HostId>,
        /// The host that is drained, where that is the reason.
        drains: Option<HostId>,
        /// Whether its disks come after each VM.
        #[serde(default)]
        volumes: VolumesOnMove,
    },
    /// All stay, or go back.
    Stay,
}

/// The SSH keys of a gang's run.
#[derive(Clone, Serialize, Deserialize)]
pub struct GangKeys {
    pub user: GuestKey,
    pub host: GuestKey,
}

impl std::fmt::Debug for GangKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GangKeys")
    }
}

/// Of a gang's member.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Membership {
    pub gang: JobId,
    pub rank: u32,
    pub count: u32,
    /// Only the first member has a command.
    pub mpi: bool,
    /// Its guest waits for the others.
    pub ready: bool,
    /// All others are ready, and its guest is told to begin.
    pub begun: bool,
    /// The first member's command has ended, and its guest is told to end.
    pub released: bool,
    /// It ends because of its host, and its gang may start again elsewhere. Of one that was released this undoes nothing.
    pub lost: Option<HostId>,
    /// What it has sent to the others.
    pub talk: Talk,
    /// [`GangCopy::number`] of the last one that its driver has begun, or has found to be over.
    #[serde(default)]
    pub copied: u32,
    /// Why its data did not all come then; empty: they have, or still come.
    #[serde(default)]
    pub copy_refused: String,
    /// What its run shows, once its command has succeeded and its counters were read in time. Its gang remembers it.
    #[serde(default)]
    pub run: Option<Box<PastRun>>,
}

impl Membership {
    /// Whether it is there until the first member's command has ended.
    pub fn serves(&self) -> bool {
        self.mpi && self.rank > 0
    }
}
