//! After a restore of an older state, hosts may have VMs and volumes that the records do not name, or name elsewhere. These hosts are known here until each of
//! them was heard or given up.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use perigee_model::units::format_time;
use perigee_model::{HostId, Problem};
use tokio::sync::Notify;

use crate::records::{RESTORED, Records, RestoredRecord};

/// The restore, and the hosts that are still waited for.
#[derive(Debug)]
struct Hold {
    backup_ms: u64,
    waits_for: BTreeSet<HostId>,
}

/// Whether the state was restored, and nothing is begun yet.
#[derive(Debug)]
pub struct Restored {
    hold: Mutex<Option<Hold>>,
    /// Notified when a host was given up.
    pub changed: Notify,
}

impl Restored {
    /// # Errors
    /// If the store can't be read.
    pub async fn load(records: &Records) -> Result<Self, Problem> {
        let record: Option<RestoredRecord> = records.read(RESTORED).await?;
        let hold = record.map(|record| Hold {
            backup_ms: record.backup_ms,
            waits_for: record.waits_for.into_iter().collect(),
        });
        Ok(Self { hold: Mutex::new(hold), changed: Notify::new() })
    }

    fn with<T>(&self, act: impl FnOnce(&mut Option<Hold>) -> T) -> T {
        act(&mut self.hold.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The hosts that are waited for; `None` if nothing was restored, or all were heard.
    pub fn waits_for(&self) -> Option<BTreeSet<HostId>> {
        self.with(|hold| hold.as_ref().map(|hold| hold.waits_for.clone()))
    }

    /// The host is waited for too; `false` if it was already, or nobody is waited for.
    pub fn add(&self, host: &HostId) -> bool {
        self.with(|hold| hold.as_mut().is_some_and(|hold| hold.waits_for.insert(host.clone())))
    }

    /// Refuses what must not be done before each host was heard.
    ///
    /// # Errors
    /// `Conflict`.
    pub fn check(&self, what: impl Into<String>) -> Result<(), Problem> {
        let Some(hosts) = self.waits_for() else { return Ok(()) };
        let names: Vec<&str> = hosts.iter().map(HostId::as_str).collect();
        let why = format!(
            "this controller was restored, and does not know yet what these hosts have: {}",
            names.join(", ")
        );
        Err(Problem::conflict(what, why).next(
            "wait until each of them has been heard; one that is gone: perigee host give-up NAME",
        ))
    }

    /// The host has said what it has, or was given up.
    pub fn forget(&self, host: &HostId) {
        self.with(|hold| {
            hold.as_mut().map(|hold| hold.waits_for.remove(host));
        });
        self.changed.notify_one();
    }

    /// Nobody is waited for any more.
    pub fn end(&self) {
        self.with(|hold| *hold = None);
    }

    /// What everybody is told who asks for something meanwhile.
    pub fn notice(&self) -> Option<String> {
        self.with(|hold| {
            let hold = hold.as_ref()?;
            let names: Vec<&str> = hold.waits_for.iter().map(HostId::as_str).collect();
            Some(format!(
                "this controller was restored from a backup of {}; no job or VM starts, and nothing moves, until these hosts have said what they have: {}; \
                 one that is gone: perigee host give-up NAME",
                format_time(hold.backup_ms),
                names.join(", ")
            ))
        })
    }
}
