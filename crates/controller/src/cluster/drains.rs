//! Which hosts are to be drained, and what is still there.

use std::sync::Arc;

use perigee_model::drain::{Drain, DrainStep, HostDrain};
use perigee_model::lease::HostNotice;
use perigee_model::{HostId, Problem};

use super::Hosts;
use super::hosts::HostEntry;

impl HostEntry {
    /// How far its drain is; `None` if it is not drained.
    pub fn shown_drain(&self) -> Option<HostDrain> {
        let left = self.left.as_ref().map(|left| left.to_vec());
        self.drain.clone().map(|asked| HostDrain { asked: Some(asked), left, keeps: Vec::new() })
    }
}

impl Hosts {
    /// Since when the host is to be drained, and who asked for that.
    pub fn drain(&self, id: &HostId) -> Option<Drain> {
        self.lock().get(id)?.drain.clone()
    }

    /// Whether the host keeps a group of VMs together that are there: of one that is drained all VMs leave.
    pub fn binds(&self, id: &HostId) -> bool {
        self.lock().get(id).is_some_and(|known| known.drain.is_none())
    }

    /// The hosts that are to be drained.
    pub fn drained(&self) -> Vec<HostId> {
        let known = self.lock();
        let drained = known.iter().filter(|(_, known)| known.drain.is_some());
        drained.map(|(id, _)| id.clone()).collect()
    }

    /// The hosts that are to be drained only as long as they are in the boot with this id.
    pub fn drained_for_a_boot(&self) -> Vec<(HostId, String)> {
        let known = self.lock();
        let of_boot = |known: &HostEntry| known.drain.as_ref()?.boot_id.clone();
        known.iter().filter_map(|(id, known)| Some((id.clone(), of_boot(known)?))).collect()
    }

    /// The hosts whose provider takes them back, as they last said, and that are not drained yet.
    pub fn taken_back(&self) -> Vec<(HostId, HostNotice)> {
        let known = self.lock();
        let not_drained = known.iter().filter(|(_, known)| known.drain.is_none());
        let notice = |known: &HostEntry| known.report.as_ref()?.notice.clone();
        not_drained.filter_map(|(id, known)| Some((id.clone(), notice(known)?))).collect()
    }

    /// Whether the host's provider takes it back, as the host last said.
    pub fn is_taken_back(&self, id: &HostId) -> bool {
        self.report(id).is_some_and(|report| report.notice.is_some())
    }

    /// Why nothing new comes to the host, in plain words.
    pub fn why_drained(&self, id: &HostId) -> Option<String> {
        self.drain(id).map(|_| drained(id))
    }

    /// # Errors
    /// `Conflict` if the host is to be drained: nothing new comes to it.
    pub fn check_not_drained(&self, id: &HostId, what: impl ToString) -> Result<(), Problem> {
        match self.drain(id) {
            None => Ok(()),
            Some(_) => Err(Problem::conflict(what.to_string(), format!("host {id} is drained"))
                .next(format!("name another host, or call it off: perigee host undrain {id}"))),
        }
    }

    /// Notes what its record says.
    pub fn note_drain(&self, id: &HostId, drain: Option<Drain>) {
        if let Some(known) = self.lock().get_mut(id) {
            if known.drain != drain {
                known.left = None;
            }
            known.drain = drain;
        }
    }

    /// Notes what is still at a host that is drained.
    pub fn note_left(&self, id: &HostId, left: Vec<DrainStep>) {
        if let Some(known) = self.lock().get_mut(id).filter(|known| known.drain.is_some()) {
            known.left = Some(Arc::new(left));
        }
    }
}

/// What is said of a host to which nothing comes because it is drained.
pub fn drained(id: &HostId) -> String {
    format!("host {id} is drained: perigee host undrain {id}")
}
