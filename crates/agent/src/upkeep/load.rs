//! Looks at how the host's CPUs are used, and at what the VMs have of them and of the memory, so that a report can say what they did in the last minute.

use std::sync::Arc;

use crate::host::Host;
use crate::load::LOOK_EVERY;
use crate::vms::Vms;

/// With so many looks how fast a guest changes its memory is sampled once, each minute.
const SAMPLE_LOOKS: usize = 12;

/// Looks at the host and at all VMs, again and again.
pub async fn keep(host: Arc<Host>, vms: Arc<Vms>) {
    for look in (0..SAMPLE_LOOKS).cycle() {
        host.look_at_load();
        for vm in vms.list() {
            vm.look_at_load();
            // QEMU is asked for the rest. One that does not answer must not delay the looks at the others.
            let (has_range, is_sampled) = (vm.has_memory_range(), look == 1);
            if has_range || is_sampled {
                tokio::spawn(async move {
                    vm.look_by_qemu(has_range, is_sampled).await;
                });
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
