//! The NBD socket of a VM at the volume server of its host.

use perigee_model::Problem;
use perigee_model::volume::{VmSocket, VmSocketAt};

use super::Vm;
use crate::command::export;
use crate::files::SOCKET_PATH_BYTES_MAX;
use crate::host::{Host, check_reachable};

/// Asks the volume server for a VM's socket. It may be there already.
pub async fn open(host: &Host, vm: &Vm) -> Result<VmSocketAt, Problem> {
    let _turn = host.sockets_turn.lock().await;
    ask_for(host, vm).await
}

/// As [`open`], for one that has the turn already.
pub async fn ask_for(host: &Host, vm: &Vm) -> Result<VmSocketAt, Problem> {
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
