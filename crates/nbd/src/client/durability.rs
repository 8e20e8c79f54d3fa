//! Whether a flush still covers every write that was acknowledged.
//!
//! A write that was not flushed is in the page cache of the home's host, and is lost if that host loses power. When
//! the home is back, it does not know which writes were lost, but this side knows that there were some. From then
//! on all flushes of the session fail. If only one flush failed, QEMU would repeat it for a guest that it has
//! stopped, the second one would succeed, and the guest would continue with a disk that lacks its writes.
//!
//! A client whose server was started again, as QEMU's is, goes on with a new session, and nobody knows what its earlier one
//! has left unflushed. That session begins as [`Durability::of_unknown`]: as with a write that needs a flush. Whoever
//! opens it flushes at once, because a flush covers what earlier sessions wrote too. If the home's host boots anew before
//! a flush has succeeded, all flushes of the session fail. A reboot before this session was connected first is not
//! noticed: which boot the earlier session knew has ended with its process.

use std::sync::{Mutex, MutexGuard};

use perigee_block::device::IoError;
use perigee_block::exports::SessionHome;
use perigee_block::locking;

/// What one session has written. It outlives the session's connections.
#[derive(Debug, Default)]
pub struct Durability(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    home: Option<SessionHome>,
    /// Changes that were acknowledged and need a flush.
    acknowledged: u64,
    /// How many of them are covered by a successful flush.
    flushed: u64,
    lost: bool,
}

impl Durability {
    /// For a session whose client may have left unflushed writes in an earlier one.
    pub fn of_unknown() -> Self {
        Self(Mutex::new(State { acknowledged: 1, ..State::default() }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        locking::lock(&self.0)
    }

    /// Records that the session is connected, for the first time or again. Returns whether writes were lost since
    /// the last connection.
    pub fn connected(&self, home: Option<&SessionHome>) -> bool {
        let Some(home) = home else { return false };
        let mut state = self.lock();
        let rebooted = state.home.as_ref().is_some_and(|before| before.was_rebooted_to(home));
        let lost = rebooted && state.acknowledged > state.flushed;
        state.home = Some(home.clone());
        state.lost |= lost;
        lost
    }

    /// Counts an acknowledged change that needs a flush to be durable.
    pub fn acknowledged(&self) {
        self.lock().acknowledged += 1;
    }

    /// The number of changes that a flush covers if it begins now.
    pub fn flush_begins(&self) -> u64 {
        self.lock().acknowledged
    }

    /// Records a successful flush that covers this many changes.
    pub fn flushed(&self, covered: u64) {
        let mut state = self.lock();
        state.flushed = state.flushed.max(covered);
    }

    /// # Errors
    /// When writes were lost: nothing is durable any more.
    pub fn check(&self) -> Result<(), IoError> {
        if !self.lock().lost {
            return Ok(());
        }
        let why =
            "the host of the volume's home booted anew, and writes that were not flushed are lost";
        Err(std::io::Error::other(why).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn home(server: u32, boot: &str) -> SessionHome {
        let told = format!("00000000-0000-0000-0000-{server:012} 1 {boot}");
        SessionHome::parse(&told).expect("a home")
    }

    #[test]
    fn only_a_reboot_of_the_home_loses_and_only_what_was_not_flushed() {
        let session = Durability::default();
        assert!(!session.connected(Some(&home(1, "a"))));
        assert!(!session.connected(Some(&home(1, "b"))), "nothing was written");
        session.acknowledged();
        assert!(!session.connected(Some(&home(1, "b"))), "its server was started again");
        assert!(!session.connected(None), "it does not tell");
        assert!(!session.connected(Some(&home(1, ""))), "its boot is not known");
        assert!(!session.connected(Some(&home(1, "c"))), "nor was it before");
        let covered = session.flush_begins();
        session.flushed(covered);
        assert!(!session.connected(Some(&home(1, "d"))), "all was flushed");
        let covered = session.flush_begins();
        session.acknowledged();
        session.flushed(covered);
        assert!(!session.connected(Some(&home(2, "e"))), "the volume has moved to another home");
        assert!(session.check().is_ok());
        assert!(session.connected(Some(&home(2, "f"))), "a write came after the flush began");
        assert!(session.check().is_err() && session.check().is_err());
    }

    #[test]
    fn a_session_that_may_go_on_with_an_earlier_one_has_to_flush_before_a_reboot_loses_nothing() {
        let session = Durability::of_unknown();
        assert!(!session.connected(Some(&home(1, "a"))));
        assert!(session.connected(Some(&home(1, "b"))), "the earlier one may have written");
        session.flushed(session.flush_begins());
        assert!(session.check().is_err(), "a later flush does not bring that back");
        let session = Durability::of_unknown();
        session.connected(Some(&home(1, "a")));
        session.flushed(session.flush_begins());
        assert!(!session.connected(Some(&home(1, "b"))), "all of it was flushed");
        assert!(session.check().is_ok());
    }
}
