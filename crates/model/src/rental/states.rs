//! What becomes of a rental, and what its driver does next.
//!
//! ```text
//!             ┌──────── nothing was made, or nobody asked ─────────────────┐
//! wanted ──> asked ──> starting ──> joined ──> draining ──> ending ──────> gone
//!             │            └───────────┴──────────┴──────────> ^  <──────────┘
//!             └── given back, or never found ─────────────────>┘   shown again
//! ```
//!
//! [`decide`] is given what is known, and names the one thing to do next. What is not known is never taken for a no: nothing is made twice, and
//! nothing is ended or forgotten, because a provider did not answer, or answered late. Between a request that may have been carried out and
//! the next one the provider's lists are without the instance for the whole of a grace period. A host that has joined is forgotten for the lists'
//! sake only after its lease. A host that is silent after its lease should have ended itself: its instance is ended, so that no instance outlives its
//! lease by much, also if the host's agent can't end the host any more.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::states::Refused;

/// How far a rental is.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum RentalState {
    /// The provider was not asked yet.
    Wanted,
    /// The provider was asked, and did not show an instance yet.
    Asked,
    /// The provider shows the instance, and its host has not joined yet.
    Starting,
    /// Its host belongs to the cluster.
    Joined,
    /// What its host has leaves the host.
    Draining,
    /// The provider is asked to end the instance, until the instance is gone.
    Ending,
    /// There is no instance, and none comes.
    Gone,
}

/// What happens to a rental.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RentalEvent {
    /// The money is reserved, and the provider is asked.
    Asks,
    /// The provider shows the instance.
    Shown,
    /// Its host has joined the cluster.
    HostJoined,
    /// It is not wanted any more.
    GivenBack,
    /// Nothing is at its host any more, or a person gives up what is there.
    Emptied,
    /// The provider has no instance of it, and will not have one.
    Vanished,
}

impl RentalState {
    /// Every state, in the order in which a rental goes through them.
    pub const ALL: [Self; 7] = [
        Self::Wanted,
        Self::Asked,
        Self::Starting,
        Self::Joined,
        Self::Draining,
        Self::Ending,
        Self::Gone,
    ];

    /// Whether nothing is left to do.
    pub fn is_over(self) -> bool {
        self == Self::Gone
    }

    /// Whether an instance of it may exist, and costs money then.
    pub fn may_cost(self) -> bool {
        !matches!(self, Self::Wanted | Self::Gone)
    }

    /// The state after an event.
    ///
    /// # Errors
    /// [`Refused`] when the event belongs to another state.
    pub fn next(self, event: RentalEvent) -> Result<Self, Refused> {
        use RentalEvent::{Asks, Emptied, GivenBack, HostJoined, Shown, Vanished};
        match (self, event) {
            (Self::Wanted | Self::Asked, Asks) => Ok(Self::Asked),
            (Self::Wanted, GivenBack) => Ok(Self::Gone),
            (Self::Asked, Shown) => Ok(Self::Starting),
            (Self::Asked | Self::Starting, GivenBack) => Ok(Self::Ending),
            (Self::Starting, HostJoined) => Ok(Self::Joined),
            (Self::Joined, GivenBack) => Ok(Self::Draining),
            (Self::Draining, Emptied) => Ok(Self::Ending),
            // Its host may still be known to the cluster, and is removed there.
            (Self::Starting | Self::Joined | Self::Draining, Vanished) => Ok(Self::Ending),
            (Self::Asked | Self::Ending, Vanished) => Ok(Self::Gone),
            (Self::Gone, Shown) => Ok(Self::Ending),
            _ => Err(Refused::new("rental", self, event, "its steps have one order")),
        }
    }
}

/// Lower-case, as in JSON.
impl std::fmt::Display for RentalState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Wanted => "wanted",
            Self::Asked => "asked",
            Self::Starting => "starting",
            Self::Joined => "joined",
            Self::Draining => "draining",
            Self::Ending => "ending",
            Self::Gone => "gone",
        })
    }
}

/// What the provider's lists say of a rental's instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Seen {
    /// No list is newer than the last request.
    NotKnown,
    /// The newest list is without it. A list may be late.
    Absent,
    /// All lists of a whole grace period, which began after the last request was over, are without it.
    AbsentForLong,
    /// It is there, and costs money.
    There,
    /// The provider says that it is gone.
    Ended,
}

/// What the requests for an instance, all of them together, may have made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Requested {
    /// Nothing: there was no request, or the provider has refused each and may do it later.
    Nothing,
    /// Nothing, and the provider would refuse it again.
    Refused,
    /// Perhaps an instance: a request is under way, or its answer was lost.
    Perhaps,
}

/// The host of a rental, as the cluster knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RentedHost {
    /// It has not joined, or was removed.
    Unknown,
    /// It has joined and answers.
    Up,
    /// It has joined and does not answer.
    Silent,
}

/// What is known of a rental when its driver decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Known {
    /// As its record has it.
    pub state: RentalState,
    /// As its record has it.
    pub requested: Requested,
    /// What the provider shows.
    pub seen: Seen,
    /// Its host in the cluster.
    pub host: RentedHost,
    /// Its host has been silent for the length of its lease, after which a host that runs ends itself.
    pub is_lease_over: bool,
    /// A person, its end of time, the provider's notice or the budget wants it to end.
    pub is_given_back: bool,
    /// A person gives up what is at its host.
    pub is_forced: bool,
    /// Its host had all the time that it may take to join.
    pub is_late: bool,
    /// The provider may be asked: money is there, and a pause after a refusal is over.
    pub may_ask: bool,
    /// Whether nothing is at its host; `None`: not known.
    pub is_empty: Option<bool>,
}

impl Known {
    /// Whether there is surely no instance. Lists may lack one that runs, whose tags somebody has changed: of one whose host has joined they
    /// count only when its lease is over as well.
    fn is_gone(&self) -> bool {
        match (self.seen, self.host) {
            (Seen::Ended, _) | (Seen::AbsentForLong, RentedHost::Unknown) => true,
            (Seen::AbsentForLong, RentedHost::Silent) => self.is_lease_over,
            _ => false,
        }
    }
}

/// What a driver does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// Nothing now.
    Wait,
    /// Ask the provider for an instance, after the record says so.
    Ask,
    /// Record this.
    Event(RentalEvent),
    /// Have its host drained.
    Drain,
    /// Ask the provider to end the instance.
    End,
    /// Remove its host from the cluster.
    Forget,
}

/// The next step.
pub fn decide(known: &Known) -> Step {
    use RentalEvent::{Emptied, GivenBack, HostJoined, Shown, Vanished};
    let Known { seen, host, is_given_back, .. } = *known;
    let vanished = known.is_gone() && host != RentedHost::Up;
    match known.state {
        RentalState::Wanted if is_given_back => Step::Event(GivenBack),
        RentalState::Wanted if known.may_ask => Step::Ask,
        RentalState::Wanted => Step::Wait,
        RentalState::Asked => asked(known),
        RentalState::Starting if vanished => Step::Event(Vanished),
        // A host that has joined may have VMs, and is drained first, whatever else is wanted.
        RentalState::Starting if host != RentedHost::Unknown => Step::Event(HostJoined),
        RentalState::Starting if is_given_back || known.is_late => Step::Event(GivenBack),
        RentalState::Starting => Step::Wait,
        RentalState::Joined if vanished => Step::Event(Vanished),
        // A person has removed its host.
        RentalState::Joined if is_given_back || host == RentedHost::Unknown => {
            Step::Event(GivenBack)
        }
        // It should have ended itself, and costs money if its agent can't do that any more.
        RentalState::Joined if known.is_lease_over => Step::Event(GivenBack),
        RentalState::Joined => Step::Wait,
        RentalState::Draining if vanished => Step::Event(Vanished),
        RentalState::Draining if host == RentedHost::Unknown => Step::Event(Emptied),
        RentalState::Draining if known.is_forced || known.is_lease_over => Step::Event(Emptied),
        RentalState::Draining if known.is_empty == Some(true) => Step::Event(Emptied),
        RentalState::Draining => Step::Drain,
        RentalState::Ending if !known.is_gone() => Step::End,
        RentalState::Ending if host == RentedHost::Unknown => Step::Event(Vanished),
        RentalState::Ending => Step::Forget,
        RentalState::Gone if seen == Seen::There => Step::Event(Shown),
        RentalState::Gone => Step::Wait,
    }
}

/// The next step of one that was asked for, whose instance is not known.
fn asked(known: &Known) -> Step {
    use RentalEvent::{GivenBack, Shown, Vanished};
    match (known.requested, known.seen, known.host) {
        (_, Seen::There, _) => Step::Event(Shown),
        // A host that has joined says that there is an instance, whatever the lists say.
        (.., RentedHost::Up) if known.is_given_back => Step::Drain,
        (.., RentedHost::Up) => Step::Wait,
        (.., RentedHost::Silent) if known.is_gone() || known.is_lease_over => {
            Step::Event(GivenBack)
        }
        (.., RentedHost::Silent) => Step::Wait,
        (Requested::Refused, ..) => Step::Event(Vanished),
        (Requested::Nothing, ..) if known.is_given_back => Step::Event(Vanished),
        (Requested::Nothing, ..) if known.may_ask => Step::Ask,
        (Requested::Nothing, ..) => Step::Wait,
        (Requested::Perhaps, ..) if known.is_given_back => Step::Event(GivenBack),
        // It came and went.
        (Requested::Perhaps, Seen::Ended, _) => Step::Event(GivenBack),
        (Requested::Perhaps, Seen::AbsentForLong, _) if known.is_late => Step::Event(GivenBack),
        (Requested::Perhaps, Seen::AbsentForLong, _) if known.may_ask => Step::Ask,
        (Requested::Perhaps, ..) => Step::Wait,
    }
}

#[cfg(test)]
#[path = "walk.rs"]
mod walk;
