//! Looks at how the host's CPUs are used, and at what the VMs' vCPUs have of them, so that a report can say what they did in the last minute.

use std::sync::Arc;

use crate::host::Host;
use crate::load::LOOK_EVERY;
use crate::vms::Vms;

/// Looks at the host and at all VMs, again and again.
pub async fn keep(host: Arc<Host>, vms: Arc<Vms>) {
    loop {
        host.look_at_load();
        for vm in vms.list() {
            vm.look_at_load();
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
