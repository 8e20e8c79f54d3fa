//! The memory of a VM that has more or less of it while it runs: what its guest has at first, and what the guest says of it.
//!
//! QEMU is started with the most, and the guest's balloon gives back what is above the least. What it is asked to have afterwards, QEMU keeps,
//! also over a migration. A guest that would have to end a program takes memory from its balloon by itself, up to the most.

use std::sync::PoisonError;
use std::time::Duration;

use perigee_http::certificate::now_ms;
use perigee_model::load::MemoryUse;
use serde::Deserialize;
use serde_json::json;

use super::Vm;
use crate::process::memory_resident_bytes;
use crate::qmp::{BalloonInfo, Qmp, QmpError};

/// The balloon among QEMU's objects (`command.rs`).
const BALLOON: &str = "/machine/peripheral/balloon";

/// How often QEMU asks the guest what it uses. Each time the guest's driver adds up some counters.
const ASK_GUEST_EVERY_S: u64 = 5;

/// What a guest has not said again for so long is not known.
const GUEST_SILENT_S: u64 = 30;

/// Another look follows soon, so a QEMU that takes longer is not waited for.
const LOOK_DEADLINE: Duration = Duration::from_secs(4);

/// QEMU has at most so much in RAM beside the memory of its guest: of that 256 MiB for the code that TCG makes (`command.rs`).
const OF_QEMU_BYTES: u64 = 512 << 20;

/// `guest-stats` of a balloon (docs/interop/virtio-balloon-stats.rst of QEMU).
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct GuestStats {
    stats: Stats,
    /// Unix time in seconds; 0 if the guest has said nothing.
    last_update: u64,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Stats {
    /// [`NOT_SAID`] by a guest that does not say it.
    stat_available_memory: u64,
}

const NOT_SAID: u64 = u64::MAX;

impl GuestStats {
    fn available_bytes(&self, now_s: u64) -> Option<u64> {
        let is_fresh = now_s.abs_diff(self.last_update) <= GUEST_SILENT_S;
        Some(self.stats.stat_available_memory).filter(|bytes| is_fresh && *bytes != NOT_SAID)
    }
}

/// Asks the guest of a VM that begins here to have its least.
pub(super) async fn begin(vm: &Vm, qmp: &Qmp) -> Result<(), QmpError> {
    match vm.spec.machine.memory_least_bytes {
        Some(least) if vm.spec.arrives_by.is_none() => {
            qmp.execute("balloon", json!({"value": least})).await.map(drop)
        }
        _ => Ok(()),
    }
}

/// A guest can say that it has given memory back, and use that memory all the same. So what is in RAM counts, where that is more.
fn counted(said: MemoryUse, resident_bytes: Option<u64>, most_bytes: u64) -> MemoryUse {
    let in_ram_bytes = resident_bytes.unwrap_or_default().saturating_sub(OF_QEMU_BYTES);
    MemoryUse { has_bytes: said.has_bytes.max(in_ram_bytes.min(most_bytes)), ..said }
}

async fn use_of(qmp: &Qmp) -> Result<MemoryUse, QmpError> {
    // A QEMU that is new here, as after a migration, does not ask yet.
    let every = json!({
        "path": BALLOON, "property": "guest-stats-polling-interval", "value": ASK_GUEST_EVERY_S,
    });
    qmp.execute("qom-set", every).await?;
    let has: BalloonInfo = qmp.query("query-balloon").await?;
    let asked = json!({"path": BALLOON, "property": "guest-stats"});
    let said = qmp.execute("qom-get", asked).await?;
    let said: GuestStats = serde_json::from_value(said).map_err(|error| QmpError::Odd {
        command: "qom-get".to_owned(),
        reason: error.to_string(),
    })?;
    let available_bytes = said.available_bytes(now_ms() / 1000).map(|bytes| bytes.min(has.actual));
    Ok(MemoryUse { has_bytes: has.actual, available_bytes })
}

impl Vm {
    /// Whether it has more or less memory while it runs.
    pub fn has_memory_range(&self) -> bool {
        self.spec.machine.memory_least_bytes.is_some()
    }

    /// Looks at the guest's memory and samples how fast it changes, unless the look before is not over yet.
    pub async fn look_by_qemu(&self, at_memory: bool, at_dirty_rate: bool) {
        let Ok(_turn) = self.looking.try_lock() else { return };
        if at_memory {
            self.look_at_memory().await;
        }
        if at_dirty_rate {
            self.look_at_dirty_rate().await;
        }
    }

    /// Looks at what the guest has of its memory, and uses.
    async fn look_at_memory(&self) {
        let (qmp, process) = self
            .observed(|seen| (seen.qmp.clone().filter(|_| seen.may_be_looked_at()), seen.process));
        let seen = match qmp {
            Some(qmp) => tokio::time::timeout(LOOK_DEADLINE, use_of(&qmp)).await.ok(),
            None => None,
        };
        let seen = seen.transpose().unwrap_or_else(|error| {
            tracing::debug!(vm = %self.id(), %error, "what it has of its memory is not known");
            None
        });
        let resident_bytes = process.and_then(|process| memory_resident_bytes(process.pid));
        let seen = seen.map(|said| counted(said, resident_bytes, self.spec.memory_bytes));
        *self.memory.lock().unwrap_or_else(PoisonError::into_inner) = seen;
    }

    /// What was seen last.
    pub(super) fn memory_use(&self) -> Option<MemoryUse> {
        *self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As QEMU 7.2 says it.
    fn said(available: u64, last_update: u64) -> GuestStats {
        let stats = json!({"stat-available-memory": available, "stat-free-memory": 7});
        serde_json::from_value(json!({"stats": stats, "last-update": last_update})).unwrap()
    }

    #[test]
    fn memory_that_is_in_ram_counts_whatever_a_guest_says_and_not_above_the_most() {
        const GIB: u64 = 1 << 30;
        let said = MemoryUse { has_bytes: GIB, available_bytes: Some(7) };
        let has = |resident_bytes| counted(said, resident_bytes, 4 * GIB).has_bytes;
        assert_eq!(has(Some(GIB + OF_QEMU_BYTES)), GIB, "QEMU itself is not the guest");
        assert_eq!(has(Some(3 * GIB + OF_QEMU_BYTES)), 3 * GIB);
        assert_eq!(has(Some(9 * GIB)), 4 * GIB);
        assert_eq!(has(None), GIB, "nothing else is known");
    }

    #[test]
    fn what_a_guest_has_not_said_lately_is_not_known() {
        assert_eq!(said(5, 1000).available_bytes(1030), Some(5));
        assert_eq!(said(5, 1000).available_bytes(1031), None);
        assert_eq!(said(NOT_SAID, 1000).available_bytes(1000), None);
        assert_eq!(said(NOT_SAID, 0).available_bytes(1000), None, "it boots, or has no driver");
    }
}
