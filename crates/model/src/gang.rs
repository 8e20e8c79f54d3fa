//! Gangs: jobs with several VMs, which are placed, started and ended as one.
//!
//! Each VM is a member with a rank, from 0 on. A member is a job of its own to the driver of jobs, and has the job's id
//! with `-nRANK` at its end. What its gang does next is decided here, by what is seen of the members: [`next`] is a pure
//! function, so each order of events can be walked.
//!
//! ```text
//! make ─> all members wait at the barrier ─> begin ─> (mpi: the first has ended ─> release) ─> all succeeded ─> finish
//!    \________\____________________________\__________\____________________________\
//!     one failed, was lost or cancelled: judged ─> the others end ─> all are over ─> finish, or start again
//! ```

use serde::{Deserialize, Serialize};

use crate::JobId;
use crate::job::{JobSpec, JobState};

pub mod moving;

/// The gang of a member, and the member's rank in it.
///
/// No other job's id is like a member's: each ends with a number of four digits or more. No VM without a job gets such a name.
pub fn of_member(id: &str) -> Option<(&str, u32)> {
    let (gang, rank) = id.rsplit_once("-n")?;
    let (_, number) = gang.rsplit_once('-')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_rank = is_number(rank) && (rank == "0" || !rank.starts_with('0'));
    (is_rank && number.len() >= 4 && is_number(number)).then(|| Some((gang, rank.parse().ok()?)))?
}

/// The id of a member, which is also its VM's.
///
/// # Panics
/// Never: [`crate::limits::GANG_NAME_BYTES`] leaves room for it.
pub fn member_of(gang: &JobId, rank: u32) -> JobId {
    JobId::new(format!("{gang}-n{rank}")).expect("submission bounds the length of a gang's name")
}

impl JobSpec {
    /// Whether it is a gang. With `mpi`, one VM is one too: the same command runs with any number.
    pub fn is_gang(&self) -> bool {
        self.count > 1 || self.mpi
    }
}

/// How a gang ends, decided before any member is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// A member failed. The others' commands are ended, and their outputs fetched.
    Failed,
    /// A person wants it to end.
    Cancelled {
        /// The VMs are stopped as they are.
        now: bool,
    },
    /// A member's host was lost, and the job's file wants it to start again: all VMs are stopped as they are.
    Lost,
}

impl Verdict {
    /// Whether the members' VMs are stopped as they are.
    pub fn is_at_once(self) -> bool {
        matches!(self, Self::Cancelled { now: true } | Self::Lost)
    }
}

/// What is seen of one member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// It has no record.
    Missing,
    /// Its VM is being made, or boots.
    ComesUp,
    /// Its guest has its address, and waits for the others.
    Ready,
    /// Its command runs.
    Runs,
    /// Its command has ended well. Its outputs are being fetched.
    Done,
    /// Its command has ended with another code, or it ends for another reason.
    Fails,
    /// The same, because its host was lost, and it is to start again.
    IsLost,
    /// Nothing follows: the command had ended well.
    Succeeded,
    /// Nothing follows.
    Failed,
    /// Nothing follows. Its host was lost, and it is to start again.
    Lost,
    /// Nothing follows: it was ended.
    Cancelled,
}

impl Seen {
    /// A member with a record.
    pub fn of(
        state: JobState,
        (is_ready, is_lost): (bool, bool),
        ends: bool,
        exit_code: Option<i32>,
    ) -> Self {
        match state {
            JobState::Succeeded => Self::Succeeded,
            JobState::Failed if is_lost => Self::Lost,
            JobState::Failed => Self::Failed,
            JobState::Cancelled => Self::Cancelled,
            _ if is_lost => Self::IsLost,
            JobState::Collecting if exit_code == Some(0) => Self::Done,
            JobState::Collecting => Self::Fails,
            _ if ends => Self::Fails,
            JobState::Running => Self::Runs,
            JobState::Starting if is_ready => Self::Ready,
            JobState::Queued | JobState::Staging | JobState::Starting => Self::ComesUp,
        }
    }

    /// Nothing follows.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Lost | Self::Cancelled)
    }
}

/// What is recorded of a gang that has hosts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GangState {
    /// Each member was made. One that is missing is not made again.
    pub made: bool,
    /// All members were ready: their commands may start.
    pub begun: bool,
    /// The first member's command has ended, and the others wait for nothing any more.
    pub released: bool,
    /// How it ends, if that is decided.
    pub verdict: Option<Verdict>,
}

/// What a person asks of a gang.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EndRequest {
    /// It is to end.
    pub cancel: bool,
    /// At once: the VMs are stopped as they are.
    pub now: bool,
}

/// What a gang's driver does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Makes the members that are missing, and then records that all are made.
    Make,
    /// Records that the commands may start.
    Begin,
    /// Records that the members without a command are to end.
    Release,
    /// Records how it ends, because of this member if there is one.
    Judge(Verdict, Option<u32>),
    /// Has the members that are not over end.
    EndMembers,
    /// All members have succeeded, but for lost ones that had nothing left to do.
    Succeed,
    /// All members are over: it ends as was decided.
    End(Verdict),
    /// The members' records are removed, and the gang waits for hosts.
    StartAgain,
    /// Nothing, until a member changes.
    Wait,
}

/// Decides it. The members are in the order of their ranks.
pub fn next(gang: GangState, mpi: bool, request: EndRequest, members: &[Seen]) -> Next {
    if let Some(verdict) = gang.verdict {
        return end(verdict, request, members);
    }
    if request.cancel {
        return Next::Judge(Verdict::Cancelled { now: request.now }, None);
    }
    let first_is_done = matches!(members.first(), Some(Seen::Done | Seen::Succeeded));
    if mpi && gang.begun && !gang.released && first_is_done {
        return Next::Release;
    }
    // One without a command that is lost afterwards has nothing left to do: it undoes nothing.
    let is_idle = |rank: u32| mpi && gang.released && rank > 0;
    let is_lost = |seen: Seen| matches!(seen, Seen::Lost | Seen::IsLost);
    let ranked = || (0_u32..).zip(members.iter().copied());
    let first = |is: fn(Seen) -> bool| ranked().find(|(_, seen)| is(*seen)).map(|(rank, _)| rank);
    // A lost host may also have made others fail.
    if let Some((rank, _)) = ranked().find(|(rank, seen)| is_lost(*seen) && !is_idle(*rank)) {
        return Next::Judge(Verdict::Lost, Some(rank));
    }
    if let Some(rank) = first(|seen| matches!(seen, Seen::Fails | Seen::Failed | Seen::Cancelled)) {
        return Next::Judge(Verdict::Failed, Some(rank));
    }
    if !gang.made {
        return Next::Make;
    }
    if let Some(rank) = first(|seen| seen == Seen::Missing) {
        // Somebody has removed its record by hand.
        return Next::Judge(Verdict::Failed, Some(rank));
    }
    if !gang.begun {
        // All would wait for it for ever.
        if let Some(rank) = first(|seen| matches!(seen, Seen::Runs | Seen::Done | Seen::Succeeded))
        {
            return Next::Judge(Verdict::Failed, Some(rank));
        }
        let all_ready = members.iter().all(|seen| *seen == Seen::Ready);
        return if all_ready { Next::Begin } else { Next::Wait };
    }
    let is_well = |(rank, seen)| seen == Seen::Succeeded || (seen == Seen::Lost && is_idle(rank));
    if ranked().all(is_well) { Next::Succeed } else { Next::Wait }
}

fn end(verdict: Verdict, request: EndRequest, members: &[Seen]) -> Next {
    let judged = match verdict {
        // Nothing is started again that a person has cancelled.
        Verdict::Lost if request.cancel => Verdict::Cancelled { now: true },
        Verdict::Cancelled { now: false } if request.now => Verdict::Cancelled { now: true },
        verdict => verdict,
    };
    if judged != verdict {
        return Next::Judge(judged, None);
    }
    // A member that was not made yet never is.
    let is_over = |seen: &Seen| seen.is_over() || *seen == Seen::Missing;
    match verdict {
        _ if !members.iter().all(is_over) => Next::EndMembers,
        Verdict::Lost => Next::StartAgain,
        verdict => Next::End(verdict),
    }
}

#[cfg(test)]
mod tests;
