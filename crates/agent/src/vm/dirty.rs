//! How fast guests change their memory while they don't move. QEMU compares a sample of each guest's pages (512 of each GiB) with themselves
//! a second later, in a thread of its own. A page that has changed often in that second counts once, as in a pass of a migration.

use std::sync::PoisonError;
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;

use super::Vm;
use crate::qmp::{Qmp, QmpError};

/// What QEMU waits for between its looks at the pages.
const SAMPLE_S: u64 = 1;
/// How often QEMU is asked for the result, and how many times.
const RESULT_AGAIN: Duration = Duration::from_millis(1100);
const RESULT_TRIES: u32 = 4;
/// QEMU says it in MiB/s.
const UNIT_BYTES_PER_S: u64 = 1 << 20;

/// The answer to `query-dirty-rate`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct DirtyRate {
    status: String,
    /// Only of a sample that is complete.
    dirty_rate: Option<i64>,
}

impl DirtyRate {
    fn bytes_per_s(&self) -> Option<u64> {
        let rate = self.dirty_rate.filter(|_| self.status == "measured")?;
        u64::try_from(rate).ok()?.checked_mul(UNIT_BYTES_PER_S)
    }
}

async fn sample(qmp: &Qmp) -> Result<Option<u64>, QmpError> {
    qmp.execute("calc-dirty-rate", json!({"calc-time": SAMPLE_S})).await?;
    for _ in 0..RESULT_TRIES {
        tokio::time::sleep(RESULT_AGAIN).await;
        let result: DirtyRate = qmp.query("query-dirty-rate").await?;
        if let Some(rate) = result.bytes_per_s() {
            return Ok(Some(rate));
        }
    }
    Ok(None)
}

impl Vm {
    /// Samples how fast its guest changes its memory. Of a guest that stands still or moves that is not known.
    pub(super) async fn look_at_dirty_rate(&self) {
        let qmp = self.observed(|seen| {
            let moves = seen.migration.as_ref().is_some_and(|moved| !moved.phase.is_final());
            seen.qmp.clone().filter(|_| seen.may_be_looked_at() && !moves)
        });
        let rate = match qmp {
            Some(qmp) => sample(&qmp).await.unwrap_or_else(|error| {
                tracing::debug!(vm = %self.id(), %error, "how fast it changes its memory is not known");
                None
            }),
            None => None,
        };
        *self.dirty_bytes_per_s.lock().unwrap_or_else(PoisonError::into_inner) = rate;
    }

    /// What the last sample has shown.
    pub(super) fn dirty_rate(&self) -> Option<u64> {
        *self.dirty_bytes_per_s.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(answer: serde_json::Value) -> Option<u64> {
        serde_json::from_value::<DirtyRate>(answer).unwrap().bytes_per_s()
    }

    #[test]
    fn only_a_complete_sample_counts() {
        let measured = json!({"status": "measured", "dirty-rate": 7, "sample-pages": 512});
        assert_eq!(rate(measured), Some(7 << 20));
        assert_eq!(rate(json!({"status": "measured", "dirty-rate": 0})), Some(0));
        assert_eq!(rate(json!({"status": "measured", "dirty-rate": -1})), None);
        assert_eq!(rate(json!({"status": "measuring"})), None);
    }
}
