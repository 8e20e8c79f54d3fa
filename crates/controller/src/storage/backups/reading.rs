//! The backups that are being read, by a restore or a check: they are not deleted meanwhile. A controller that ends takes the readers with it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use perigee_model::BackupName;

/// How many read each.
static READ: Mutex<BTreeMap<BackupName, u32>> = Mutex::new(BTreeMap::new());

fn lock() -> MutexGuard<'static, BTreeMap<BackupName, u32>> {
    READ.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Somebody reads a backup until this is dropped.
pub struct Reading(BackupName);

/// Somebody begins to read a backup.
pub fn begin(name: &BackupName) -> Reading {
    *lock().entry(name.clone()).or_default() += 1;
    Reading(name.clone())
}

/// Whether somebody reads the backup.
pub fn is_read(name: &BackupName) -> bool {
    lock().contains_key(name)
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut all = lock();
        let Some(readers) = all.get_mut(&self.0) else { return };
        *readers -= 1;
        if *readers == 0 {
            all.remove(&self.0);
        }
    }
}
