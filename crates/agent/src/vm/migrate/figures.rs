//! The figures of a migration, as QEMU tells them: its phases, its bytes and its pause.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use perigee_model::switchover::{QemuRequest, Sending};

use super::Migration;
use crate::qmp::MigrateInfo;

impl Migration {
    /// Records the phases, and does work early that would otherwise take time in the pause.
    pub(super) async fn follow(&mut self, info: &MigrateInfo, sending: Sending) {
        let phases = &mut self.record.report.phases;
        match sending {
            Sending::Copying => {
                let seen = self.watch.copying(info, phases);
                if seen.is_near {
                    self.machine.near_switch();
                }
                if seen.is_flush_due {
                    self.flush_homes();
                } else {
                    self.keep_warm();
                }
                if let Some(downtime_limit_ms) = seen.new_limit_ms {
                    // This is refused only if the copying has just ended.
                    let _ = self.request(QemuRequest::AllowPause { downtime_limit_ms }).await;
                }
            }
            Sending::AtSwitch => self.watch.at_switch(info, phases),
            Sending::BehindSwitch => {
                let now_us = unix_us();
                self.vm.observed(|seen| {
                    seen.moments.sent_us.get_or_insert(now_us);
                });
            }
            Sending::Ending | Sending::Completed | Sending::Ended => {}
        }
    }

    /// Reports the parts of the pause after QEMU's last event.
    pub(super) async fn tell_pause(&mut self) {
        for _ in 0..20 {
            let moments = self.vm.observed(|seen| seen.moments);
            self.record.report.phases.pause =
                self.watch.pause(&moments, self.record.report.transferred_bytes);
            if moments.completed_us.is_some() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub(super) fn read_figures(&mut self, info: &MigrateInfo) {
        let report = &mut self.record.report;
        if info.total_time > 0 {
            report.total_ms = info.total_time;
            report.downtime_ms = info.downtime;
            report.transferred_bytes = info.ram.transferred;
            report.remaining_bytes = info.ram.remaining;
            report.dirty_bytes_per_s = info.ram.dirty_bytes_per_s();
            report.rate_bytes_per_s = info.ram.bytes_per_s();
        }
        self.publish();
    }

    /// QEMU calculates the times just after it has reported the completion.
    pub(super) async fn final_figures(&mut self) {
        for _ in 0..50 {
            let Some(qmp) = self.vm.observed(|seen| seen.qmp.clone()) else { return };
            match qmp.query::<MigrateInfo>("query-migrate").await {
                Ok(info) if info.status == "completed" && info.total_time == 0 => {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                Ok(info) if info.status == "completed" => return self.read_figures(&info),
                // Also if QEMU thinks that the migration failed: there are no other figures.
                _ => return,
            }
        }
    }
}

/// The Unix time by this host's clock, like the times of QEMU's events.
fn unix_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
