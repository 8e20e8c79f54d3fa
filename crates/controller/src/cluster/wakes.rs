//! Wakes drivers when there is news of their VMs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use perigee_model::VmId;
use tokio::sync::Notify;

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

    pub fn wake(&self, vm: &VmId) {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(driver) = waiting.get(vm) {
            driver.notify_one();
        }
    }

    pub fn forget(&self, vm: &VmId) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(vm);
    }
}
