//! Other hosts' sessions on volumes here, so that they end when the controller says that a host may open a volume no more.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use perigee_block::exports::Admission;
use perigee_block::locking::lock;
use perigee_model::{HostId, VolumeName};

/// Beyond so many entries, those without sessions are removed first.
const KEPT_MIN: usize = 1024;

#[derive(Default)]
pub(crate) struct Admissions {
    open: Mutex<HashMap<(VolumeName, HostId), Weak<Admission>>>,
}

impl Admissions {
    /// To be taken before it is looked up whether the host may open the volume: then what ends in between ends this too.
    pub(crate) fn of(&self, volume: &VolumeName, host: &HostId) -> Arc<Admission> {
        let mut open = lock(&self.open);
        let key = (volume.clone(), host.clone());
        if let Some(present) = open.get(&key).and_then(Weak::upgrade) {
            return present;
        }
        if open.len() >= KEPT_MIN && open.len() == open.capacity() {
            open.retain(|_, admission| admission.strong_count() > 0);
        }
        let new = Arc::new(Admission::default());
        open.insert(key, Arc::downgrade(&new));
        new
    }

    /// Ends what the host has open of the volume.
    pub(crate) fn end(&self, volume: &VolumeName, host: &HostId) {
        let ended = lock(&self.open).remove(&(volume.clone(), host.clone()));
        if let Some(admission) = ended.as_ref().and_then(Weak::upgrade) {
            admission.end();
        }
    }
}
