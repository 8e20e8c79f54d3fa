//! Wakes drivers when there is news of their VMs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use perigee_model::VmId;
use tokio::sync::Notify;

/// The notifications of the drivers that wait for their VMs.
#[derive(Debug, Default)]
pub struct Wakes {
    waiting: Mutex<BTreeMap<VmId, Arc<Notify>>>,
}

impl Wakes {
    /// The notification of the driver of this VM's job; valid until [`Wakes::forget`].
    pub fn of(&self, vm: &VmId) -> Arc<Notify> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(waiting.entry(vm.clone()).or_default())
    }

    /// Wakes the driver of this VM's job. A driver that does not wait just now looks again when it next does.
    pub fn wake(&self, vm: &VmId) {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(driver) = waiting.get(vm) {
            driver.notify_one();
        }
    }

    /// Forgets a VM whose driver has ended.
    pub fn forget(&self, vm: &VmId) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(vm);
    }
}
