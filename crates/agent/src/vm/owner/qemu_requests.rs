//! Carries out what a migration asks of QEMU, if its switchover allows that.

use perigee_model::Problem;
use perigee_model::switchover::{QemuRequest, Switchover};
use serde_json::json;

use super::Owner;
use crate::qmp::{Qmp, QmpError};
use crate::vm::start::set_compression;
use crate::vm::tls::{End, set_encryption};
use crate::vm::{tpm, tunnel};

impl Owner {
    /// # Errors
    /// If the request is refused here or by QEMU, or if there is no connection to QEMU.
    pub(super) async fn grant(&self, request: QemuRequest) -> Result<(), QmpError> {
        // An unknown state is treated like the state that allows least.
        let at = self.vm.observed(|seen| seen.switchover).unwrap_or(Switchover::Returning);
        if let Err(refused) = at.allows(&request) {
            tracing::error!(vm = %self.vm.id(), %refused, "a migration's request is not granted");
            let reason = refused.to_string();
            return Err(QmpError::Refused { command: format!("{request:?}"), reason });
        }
        let qmp = self.vm.observed(|seen| seen.qmp.clone()).ok_or(QmpError::Closed)?;
        let done = match request {
            begin @ QemuRequest::Begin { .. } => {
                return self.begin_to_send(&qmp, begin).await;
            }
            QemuRequest::AllowPause { downtime_limit_ms } => {
                let limit = json!({"downtime-limit": downtime_limit_ms});
                qmp.execute("migrate-set-parameters", limit).await
            }
            QemuRequest::LetGo => {
                tpm::let_go(&self.vm).await?;
                qmp.execute("migrate-continue", json!({"state": "pre-switchover"})).await
            }
            QemuRequest::StopSending => qmp.execute("migrate_cancel", json!({})).await,
            QemuRequest::Hold => qmp.execute("stop", json!({})).await,
            QemuRequest::Run => {
                tpm::take_back(&self.vm).await;
                qmp.execute("cont", json!({})).await
            }
        };
        done.map(drop)
    }
}

/// For how many percent of the time QEMU stops the vCPUs at first if the planner chose nothing: QEMU's default.
const THROTTLE_PERCENT: u8 = 20;

impl Owner {
    /// `auto-converge` is always on. With it QEMU slows the VM down if copying would not end, also if the planner did not
    /// predict that.
    async fn begin_to_send(&self, qmp: &Qmp, begin: QemuRequest) -> Result<(), QmpError> {
        let QemuRequest::Begin {
            uri,
            downtime_limit_ms,
            compressed,
            max_bytes_per_s,
            throttle_percent,
        } = begin
        else {
            return Ok(());
        };
        let plain = |problem: Problem| QmpError::Odd {
            command: "migrate".to_owned(),
            reason: problem.to_string(),
        };
        tunnel::check_encrypted(&self.vm, &self.host).map_err(plain)?;
        let on = |name: &str| json!({"capability": name, "state": true});
        let capabilities =
            ["pause-before-switchover", "return-path", "events", "auto-converge"].map(on);
        qmp.execute("migrate-set-capabilities", json!({"capabilities": capabilities})).await?;
        set_compression(qmp, compressed).await?;
        let inside = tunnel::way_out(&self.vm, &self.host, &uri).await.map_err(plain)?;
        let tls = self.host.network.identity().filter(|_| inside.is_none());
        set_encryption(qmp, End::Source, tls.map(|_| self.vm.dir.tls()).as_deref()).await?;
        let parameters = json!({
            "downtime-limit": downtime_limit_ms.clamp(1, 2_000_000),
            // In bytes per second; without this QEMU's limit is 128 MiB/s.
            "max-bandwidth": max_bytes_per_s.unwrap_or(1 << 40),
            "cpu-throttle-initial": throttle_percent.unwrap_or(THROTTLE_PERCENT).clamp(1, 99),
        });
        qmp.execute("migrate-set-parameters", parameters).await?;
        qmp.execute("migrate", json!({"uri": inside.unwrap_or(uri)})).await.map(drop)
    }
}
