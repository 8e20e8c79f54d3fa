//! Programs in guests about which somebody has to go on asking. Who ends them: `vms/exec.rs`.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use perigee_model::VmId;

/// The programs that end when nobody asks about them, and when somebody has asked last.
#[derive(Debug, Default)]
pub struct Watched(Mutex<BTreeMap<(VmId, u64), Instant>>);

impl Watched {
    /// All of them, by VM and process id.
    pub fn lock(&self) -> MutexGuard<'_, BTreeMap<(VmId, u64), Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody has just asked about a program.
    pub fn asked(&self, vm: &VmId, pid: u64) {
        if let Some(asked) = self.lock().get_mut(&(vm.clone(), pid)) {
            *asked = Instant::now();
        }
    }

    /// Forgets a program that has ended.
    pub fn forget(&self, vm: &VmId, pid: u64) {
        self.lock().remove(&(vm.clone(), pid));
    }
}
