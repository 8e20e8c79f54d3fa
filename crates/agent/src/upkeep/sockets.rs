//! Keeps the volume server's NBD sockets those of this host's VMs, and ends those of VMs that are no more.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use perigee_http::certificate::now_ms;
use perigee_model::volume::{Unanswered, VmSocket, VmSocketSeen};
use perigee_model::waiting::{Waiting, WaitsFor};
use perigee_model::{Problem, ProblemKind, VmId};

use crate::host::Host;
use crate::vm::{Vm, socket};
use crate::vms::Vms;

/// A volume server that lost its records gets them again within this time. QEMU tries to reconnect once a second.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Keeps the volume server's sockets those of this host's VMs, and notes what their disks wait for.
pub async fn keep(host: Arc<Host>, vms: Arc<Vms>) {
    let mut away_since_ms = None;
    loop {
        let asked_ms = now_ms();
        // A start that comes meanwhile asks after this.
        let turn = host.sockets_turn.lock().await;
        match host.volume.get::<Vec<VmSocketSeen>>("/v1/vms").await {
            Ok(seen) => {
                if away_since_ms.take().is_some() {
                    tracing::info!("the volume server answers again");
                }
                note_silent_homes(&vms, &seen);
                let open: Vec<VmSocket> = seen.into_iter().map(|seen| seen.socket).collect();
                if let Err(problem) = put_right(&host, &vms, &open).await {
                    tracing::debug!(%problem, "the NBD sockets of the VMs are not looked after");
                }
            }
            Err(problem) => {
                if away_since_ms.is_none() {
                    tracing::warn!(%problem, "the volume server does not answer: the VMs' disks stand still");
                }
                let since_ms = *away_since_ms.get_or_insert(asked_ms);
                note_silent_server(&host, &vms, since_ms);
            }
        }
        drop(turn);
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn note_silent_server(host: &Host, vms: &Vms, since_ms: u64) {
    let waits_for = WaitsFor::VolumeServer { host: host.name.clone() };
    let waits = vec![Waiting { waits_for, since_ms }];
    for vm in vms.list() {
        vm.observed(|seen| seen.disks_wait.clone_from(&waits));
    }
}

fn note_silent_homes(vms: &Vms, seen: &[VmSocketSeen]) {
    for vm in vms.list() {
        let own = seen.iter().filter(|seen| seen.socket.vm == *vm.id());
        let waits = own.flat_map(|seen| &seen.unanswered).map(|unanswered| {
            let Unanswered { volume, nbd_addr, since_ms } = unanswered.clone();
            Waiting { waits_for: WaitsFor::Home { volume, home: nbd_addr }, since_ms }
        });
        let waits: Vec<Waiting> = waits.collect();
        vm.observed(|seen| keep_since(&mut seen.disks_wait, waits));
    }
}

/// What is computed from a clock differs by some milliseconds each time. What waits for the same goes on doing so.
fn keep_since(before: &mut Vec<Waiting>, mut now: Vec<Waiting>) {
    for waiting in &mut now {
        let same = before.iter().find(|before| before.waits_for == waiting.waits_for);
        waiting.since_ms = same.map_or(waiting.since_ms, |before| before.since_ms);
    }
    *before = now;
}

async fn put_right(host: &Host, vms: &Vms, open: &[VmSocket]) -> Result<(), Problem> {
    // A VM is in the list before it has a socket. So one whose socket is found and which is not in the list has ended.
    let here: BTreeMap<VmId, Arc<Vm>> =
        vms.list().into_iter().map(|vm| (vm.id().clone(), vm)).collect();
    // One that fails holds up no other.
    let mut failed = Ok(());
    for socket in open.iter().filter(|socket| !here.contains_key(&socket.vm)) {
        if vms.get(&socket.vm).is_err_and(|problem| problem.kind == ProblemKind::NotFound) {
            // A later start of it may have asked for its own one meanwhile.
            let exports = socket.exports.join(",");
            let path = format!("/v1/vms/{}/socket?uid={}&exports={exports}", socket.vm, socket.uid);
            failed = host.sockets.delete(&path).await.and(failed);
        }
    }
    for vm in here.values().filter(|vm| !vm.qemu_has_ended()) {
        if !open.iter().any(|socket| socket.vm == *vm.id()) {
            failed = socket::ask_for(host, vm).await.map(drop).and(failed);
        }
    }
    failed
}
