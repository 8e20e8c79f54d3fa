//! The NBD sockets of this host's VMs at the volume server: the agent asks for each VM's, and ends those of VMs that
//! are no more.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use perigee_model::volume::{VmSocket, VmSocketAt};
use perigee_model::{Problem, ProblemKind, VmId};

use crate::command::export;
use crate::files::SOCKET_PATH_BYTES_MAX;
use crate::host::{Host, check_reachable};
use crate::vm::Vm;
use crate::vms::Vms;

/// A volume server that lost its records gets them again within this time. QEMU tries to reconnect once a second.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Asks the volume server for a VM's socket. It may be there already.
pub async fn open(host: &Host, vm: &Vm) -> Result<VmSocketAt, Problem> {
    let _turn = host.sockets_turn.lock().await;
    ask_for(host, vm).await
}

async fn ask_for(host: &Host, vm: &Vm) -> Result<VmSocketAt, Problem> {
    let socket = of(vm)?;
    let path = format!("/v1/vms/{}/socket", socket.vm);
    let at: VmSocketAt = host.sockets.put(&path, &socket).await?;
    let what = || format!("can't use the socket {} for a VM", at.path.display());
    if at.path.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
        let why = format!("the path is longer than {SOCKET_PATH_BYTES_MAX} bytes");
        return Err(Problem::invalid(what(), why)
            .next("give the volume server a shorter directory with --vm-sockets"));
    }
    if !nix::unistd::Uid::effective().is_root() {
        return Ok(at);
    }
    check_reachable(&at.path).map(|()| at)
}

fn of(vm: &Vm) -> Result<VmSocket, Problem> {
    let uid = vm.dir.user().map_err(|error| {
        Problem::internal(format!("can't find out the user of the VM {}", vm.id()), error)
    })?;
    let exports = vm.now().disks.iter().map(export).collect();
    Ok(VmSocket { vm: vm.id().clone(), uid: uid.as_raw(), exports })
}

/// Keeps the volume server's sockets those of this host's VMs.
pub async fn keep(host: Arc<Host>, vms: Arc<Vms>) {
    loop {
        if let Err(problem) = put_right(&host, &vms).await {
            tracing::debug!(%problem, "the NBD sockets of the VMs are not looked after");
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn put_right(host: &Host, vms: &Vms) -> Result<(), Problem> {
    // A start that comes meanwhile asks after this.
    let _turn = host.sockets_turn.lock().await;
    // A VM is in the list before it has a socket. So one whose socket is found and which is not in the list has ended.
    let open: Vec<VmSocket> = host.sockets.get("/v1/vms").await?;
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
            failed = ask_for(host, vm).await.map(drop).and(failed);
        }
    }
    failed
}
