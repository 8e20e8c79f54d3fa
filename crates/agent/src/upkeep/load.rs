//! Looks at what the VMs' vCPUs have of the host's CPUs, so that a report can say what they did in the last minute.

use std::sync::Arc;

use crate::load::LOOK_EVERY;
use crate::vms::Vms;

/// Looks at all VMs, again and again.
pub async fn keep(vms: Arc<Vms>) {
    loop {
        for vm in vms.list() {
            vm.look_at_load();
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
