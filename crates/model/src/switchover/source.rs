//! The source of a migration: the state that its agent stores, and what it does next.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Fate;
use crate::states::Refused;

/// Where the right to run the VM is, as its source's agent stores it; drawn at the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Switchover {
    /// The source may run the VM and write its volumes.
    #[default]
    Source,
    /// It is stored that the switch comes; nothing was raised.
    Noted,
    /// Raises of the epochs were sent; the last state was not.
    Raising,
    /// The last state may have been sent.
    LetGo,
    /// The destination never runs it, and the epochs go back.
    Returning,
    /// The destination has it for good.
    Destination,
}

/// What happens in a switch, as the source's agent sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SwitchoverEvent {
    /// That the switch comes was stored.
    Note,
    /// QEMU still copies memory: an agent that is back knows then that nothing was raised, for
    /// raises are sent only at the switch, and QEMU never goes back from there to copying.
    StillCopying,
    /// The first raise of an epoch is about to be sent.
    Raise,
    /// QEMU is about to be told to send the last state.
    LetGo,
    /// QEMU sends no more: it failed, was cancelled, or ended.
    StoppedSending,
    /// QEMU has sent everything, or the destination's agent says that the VM has run there.
    Ran,
    /// The destination's agent says that the VM did not run there and never will.
    DidNotRun,
    /// Every epoch is the source's again.
    FlippedBack,
}

impl Switchover {
    /// Every state, in the order of a migration that fails at the end.
    pub const ALL: [Self; 6] =
        [Self::Source, Self::Noted, Self::Raising, Self::LetGo, Self::Returning, Self::Destination];

    /// The source's QEMU may run the VM.
    pub fn may_source_run(self) -> bool {
        self == Self::Source
    }

    /// What stands on disk in this state.
    #[must_use]
    pub fn stored(self) -> Self {
        if matches!(self, Self::Noted | Self::Raising) { Self::LetGo } else { self }
    }

    /// The state after an event.
    ///
    /// # Errors
    /// [`Refused`] when the VM could then run on both sides, or on none.
    pub fn next(self, event: SwitchoverEvent) -> Result<Self, Refused> {
        use SwitchoverEvent as E;
        let refused = |why| Err(Refused::new("switchover", self, event, why));
        match (self, event) {
            (Self::Source, E::Note) => Ok(Self::Noted),
            (Self::Noted | Self::LetGo, E::StillCopying) => Ok(Self::Noted),
            (Self::Noted | Self::Raising, E::Raise) => Ok(Self::Raising),
            (Self::Noted, E::StoppedSending) => Ok(Self::Source),
            (Self::Raising | Self::LetGo, E::LetGo) => Ok(Self::LetGo),
            (Self::Raising, E::StoppedSending | E::DidNotRun) => Ok(Self::Returning),
            (_, E::StoppedSending) => Ok(self),
            (Self::LetGo | Self::Returning, E::DidNotRun) => Ok(Self::Returning),
            (Self::LetGo | Self::Destination, E::Ran) => Ok(Self::Destination),
            (Self::Returning, E::FlippedBack) => Ok(Self::Source),
            (Self::Destination, _) => refused("the VM is at the destination"),
            (Self::Source, E::Raise) => refused("that the switch comes is not stored"),
            (_, E::Raise) => refused("the epochs were raised before"),
            (_, E::Note) => refused("it was stored before"),
            (_, E::StillCopying) => refused("it is behind the copying"),
            (_, E::LetGo) => refused("the epochs are not raised"),
            (_, E::Ran) => refused("the last state was never sent"),
            (_, E::DidNotRun) => refused("the last state was never sent, and nobody was asked"),
            (_, E::FlippedBack) => refused("the destination may still run the VM"),
        }
    }

    /// Whether the owner of the VM's QEMU may do this for a migration in this state.
    ///
    /// # Errors
    /// [`Refused`] when the VM could then run on both sides.
    pub fn allows(self, request: &QemuRequest) -> Result<(), Refused> {
        let why = match request {
            QemuRequest::Begin { .. } if self != Self::Source => "it is under way",
            QemuRequest::LetGo if self != Self::LetGo => "that the VM goes is not stored yet",
            QemuRequest::Run if !self.may_source_run() => "the source may not run the VM",
            _ => return Ok(()),
        };
        Err(Refused::new("switchover", self, request, why))
    }
}

/// What a migration wants of the VM's QEMU; only the VM's owner acts on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QemuRequest {
    /// Send the VM to this address, `tcp:IP:PORT`.
    Begin {
        /// Where the destination's QEMU listens.
        uri: String,
        /// The pause to aim at.
        downtime_limit_ms: u64,
        /// As in [`crate::vm::MigrateOut`].
        compressed: bool,
        /// As in [`crate::vm::MigrateOut`].
        max_bytes_per_s: Option<u64>,
        /// As in [`crate::vm::MigrateOut`].
        throttle_percent: Option<u8>,
    },
    /// The VM may be paused for so long to be sent the rest.
    AllowPause {
        /// The pause to aim at from now on.
        downtime_limit_ms: u64,
    },
    /// Send the last state.
    LetGo,
    /// Stop sending.
    StopSending,
    /// The VM must not run here.
    Hold,
    /// The VM runs on here.
    Run,
}

/// How far QEMU is with sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sending {
    /// It sends memory while the guest runs.
    Copying,
    /// Paused before the switch, until it is told to go on.
    AtSwitch,
    /// It was told to go on.
    BehindSwitch,
    /// On its way to an end.
    Ending,
    /// Everything was sent and loaded.
    Completed,
    /// It does not send: failed, cancelled, never begun, or there is no QEMU any more.
    Ended,
}

/// What the source's agent does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// Look at QEMU again in a while.
    Wait,
    /// Store that the switch comes, then [`Outgoing::noted`]. QEMU may still be copying.
    Store,
    /// [`Outgoing::raising`], then raise the epochs at all homes, then [`Outgoing::raised`].
    Raise,
    /// [`Outgoing::letting_go`], then tell QEMU to send the last state.
    LetGo,
    /// Have QEMU stop sending, and look at it again.
    StopSending,
    /// Ask the destination's agent, and the homes whether an epoch was never raised, then
    /// [`Outgoing::answered`].
    AskDestination,
    /// Lower the epochs at all homes, then [`Outgoing::flipped_back`].
    FlipBack,
    /// The VM is the source's again: let it run, and the migration has failed.
    Resume,
    /// The VM is at the destination: the migration has completed.
    Complete,
}

/// An outgoing migration. What is not [`Switchover`] is forgotten when the agent ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Outgoing {
    at: Switchover,
    is_greeted: bool,
    is_near: bool,
    is_raised: bool,
    is_told: bool,
    is_given_up: bool,
}

impl Outgoing {
    /// A new migration, or one that an agent stored which ran before.
    pub fn new(stored: Switchover) -> Self {
        Self {
            at: stored,
            // Nothing is stored before.
            is_greeted: stored != Switchover::Source,
            is_near: false,
            is_raised: false,
            is_told: false,
            is_given_up: false,
        }
    }

    /// What has to be on the disk now ([`Switchover::stored`]).
    pub fn at(&self) -> Switchover {
        self.at
    }

    /// The homes can raise the epochs and the destination waits for this migration. QEMU sends
    /// meanwhile: what it copies before the switch does no harm wherever it comes to.
    pub fn greeted(&mut self) {
        self.is_greeted = true;
    }

    /// Whether they have agreed; an agent that is back before anything was stored asks again.
    pub fn is_greeted(&self) -> bool {
        self.is_greeted
    }

    /// The switch comes soon: what is stored now costs no time in the pause.
    pub fn near_switch(&mut self) {
        self.is_near = true;
    }

    /// It cannot go on.
    pub fn give_up(&mut self) {
        self.is_given_up = true;
    }

    /// Somebody wants it to end; too late once QEMU was told to send the last state.
    pub fn cancel(&mut self) {
        self.is_given_up |= !self.is_told;
    }

    /// Whether it only waits for QEMU to stop sending.
    pub fn is_given_up(&self) -> bool {
        self.is_given_up
    }

    /// What is next, where QEMU is so far.
    ///
    /// # Errors
    /// [`Refused`] when QEMU is further than it was ever told to go.
    pub fn step(&mut self, sending: Sending) -> Result<Step, Refused> {
        use Switchover as S;
        match sending {
            Sending::Completed if self.at != S::Returning => self.take(SwitchoverEvent::Ran)?,
            Sending::Ended => {
                self.is_given_up = true;
                self.take(SwitchoverEvent::StoppedSending)?;
            }
            Sending::Copying if self.at == S::LetGo && !self.is_told => {
                self.take(SwitchoverEvent::StillCopying)?;
            }
            _ => {}
        }
        Ok(match (self.at, sending) {
            (S::Destination, _) => Step::Complete,
            (S::Returning, _) => Step::FlipBack,
            (S::LetGo, Sending::Ended) => Step::AskDestination,
            (S::Source, Sending::Ended) => Step::Resume,
            (_, Sending::Ending) => Step::Wait,
            _ if self.is_given_up => Step::StopSending,
            _ if !self.is_greeted => Step::Wait,
            (S::Source, Sending::Copying) if self.is_near => Step::Store,
            (S::Source, Sending::AtSwitch) => Step::Store,
            (_, Sending::AtSwitch) if !self.is_raised => Step::Raise,
            (_, Sending::AtSwitch) if !self.is_told => Step::LetGo,
            _ => Step::Wait,
        })
    }

    fn take(&mut self, event: SwitchoverEvent) -> Result<(), Refused> {
        self.at = self.at.next(event)?;
        Ok(())
    }

    /// That the switch comes is stored.
    ///
    /// # Errors
    /// [`Refused`] when it is not the step that was due; so with the others here.
    pub fn noted(&mut self) -> Result<(), Refused> {
        self.take(SwitchoverEvent::Note)
    }

    /// The raises of the epochs are about to be sent.
    ///
    /// # Errors
    /// As [`Outgoing::noted`].
    pub fn raising(&mut self) -> Result<(), Refused> {
        // An agent that is back raises once more: the homes take it as the same raise.
        if self.at == Switchover::LetGo {
            return Ok(());
        }
        self.take(SwitchoverEvent::Raise)
    }

    /// Every home has raised its epochs.
    pub fn raised(&mut self) {
        self.is_raised = true;
    }

    /// QEMU is about to be told to send the last state.
    ///
    /// # Errors
    /// As [`Outgoing::noted`].
    pub fn letting_go(&mut self) -> Result<(), Refused> {
        self.take(SwitchoverEvent::LetGo)?;
        self.is_told = true;
        Ok(())
    }

    /// The destination's agent has said what became of the VM.
    ///
    /// # Errors
    /// As [`Outgoing::noted`].
    pub fn answered(&mut self, fate: Fate) -> Result<(), Refused> {
        match fate {
            Fate::Ran => self.take(SwitchoverEvent::Ran),
            Fate::DidNotRun => self.take(SwitchoverEvent::DidNotRun),
            // Not known is not no: ask again.
            Fate::NotKnown => Ok(()),
        }
    }

    /// Every home has given its epoch back to the source.
    ///
    /// # Errors
    /// As [`Outgoing::noted`].
    pub fn flipped_back(&mut self) -> Result<(), Refused> {
        self.take(SwitchoverEvent::FlippedBack)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_runs_again_only_when_the_destination_never_will_and_the_epochs_are_back() {
        use SwitchoverEvent as E;
        let let_go = Switchover::LetGo;
        assert!(let_go.next(E::FlippedBack).is_err());
        assert_eq!(let_go.next(E::StoppedSending), Ok(let_go), "that alone says nothing");
        let returning = let_go.next(E::DidNotRun).unwrap();
        assert!(!returning.may_source_run());
        assert!(returning.next(E::FlippedBack).unwrap().may_source_run());
        for state in Switchover::ALL {
            assert_eq!(state.allows(&QemuRequest::Run).is_ok(), state == Switchover::Source);
        }
    }

    fn greeted() -> Outgoing {
        let mut outgoing = Outgoing::new(Switchover::Source);
        outgoing.greeted();
        outgoing
    }

    #[test]
    fn nothing_is_stored_or_raised_before_the_homes_and_the_destination_have_agreed() {
        let mut outgoing = Outgoing::new(Switchover::Source);
        outgoing.near_switch();
        assert_eq!(outgoing.step(Sending::Copying), Ok(Step::Wait));
        assert_eq!(outgoing.step(Sending::AtSwitch), Ok(Step::Wait));
        let mut refused = outgoing;
        refused.give_up();
        assert_eq!(refused.step(Sending::AtSwitch), Ok(Step::StopSending));
        assert_eq!(refused.step(Sending::Ended), Ok(Step::Resume));
        outgoing.greeted();
        assert_eq!(outgoing.step(Sending::AtSwitch), Ok(Step::Store));
        assert!(
            !Outgoing::new(Switchover::Source).is_greeted(),
            "an agent that is back asks again"
        );
    }

    #[test]
    fn an_agent_that_is_back_does_not_know_whether_its_qemu_was_let_go() {
        let mut outgoing = greeted();
        assert_eq!(outgoing.step(Sending::AtSwitch), Ok(Step::Store));
        outgoing.noted().unwrap();
        outgoing.raising().unwrap();
        let mut back = Outgoing::new(outgoing.at().stored());
        assert_eq!(back.step(Sending::Ended), Ok(Step::AskDestination));
        assert_eq!(outgoing.step(Sending::Ended), Ok(Step::FlipBack));
    }

    #[test]
    fn what_is_stored_while_memory_is_copied_holds_no_guest_when_the_copying_fails() {
        let mut outgoing = greeted();
        assert_eq!(outgoing.step(Sending::Copying), Ok(Step::Wait), "it is not near yet");
        outgoing.near_switch();
        assert_eq!(outgoing.step(Sending::Copying), Ok(Step::Store));
        outgoing.noted().unwrap();
        assert_eq!(outgoing.step(Sending::Copying), Ok(Step::Wait));
        let mut back = Outgoing::new(outgoing.at().stored());
        assert_eq!(back.step(Sending::Copying), Ok(Step::Wait), "nothing was raised");
        for mut failed in [outgoing, back] {
            assert_eq!(failed.step(Sending::Ended), Ok(Step::Resume));
        }
        assert_eq!(outgoing.step(Sending::AtSwitch), Ok(Step::Raise));
    }

    #[test]
    fn a_destination_that_does_not_know_is_asked_again() {
        let mut outgoing = Outgoing::new(Switchover::LetGo);
        outgoing.answered(Fate::NotKnown).unwrap();
        assert_eq!(outgoing.step(Sending::Ended), Ok(Step::AskDestination));
    }

    #[test]
    fn a_cancel_after_the_last_state_was_sent_comes_too_late() {
        let mut outgoing = Outgoing::new(Switchover::LetGo);
        outgoing.raised();
        outgoing.letting_go().unwrap();
        outgoing.cancel();
        assert_eq!(outgoing.step(Sending::BehindSwitch), Ok(Step::Wait));
    }
}
