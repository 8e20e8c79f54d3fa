//! A VM's `passt` is started again when it has ended, for as long as the VM's QEMU runs.
//!
//! QEMU listens at a socket of the agent's for its card's network, one connection at a time, and again when that one has
//! closed. So the guest keeps its card; what was connected through the old `passt` is lost. Nobody but root reaches the
//! socket.

use std::sync::Arc;
use std::time::Duration;

use perigee_model::Problem;
use tokio::time::{Instant, sleep};

use super::{begin_passt, patience};
use crate::cgroup;
use crate::files::read_json;
use crate::host::Host;
use crate::process::Process;
use crate::vm::Vm;

const LOOK: Duration = Duration::from_secs(1);
/// And no oftener: one that ends at once, again and again, costs little.
const TRY_AGAIN: Duration = Duration::from_secs(10);

/// Runs until the VM's QEMU has ended.
pub async fn keep(vm: Arc<Vm>, host: Arc<Host>) {
    let mut passt = loop {
        match read_json::<Process>(&vm.dir.network_process()) {
            Ok(Some(passt)) => break passt,
            // An earlier agent has started it, and its QEMU would not take another one.
            Ok(None) => return,
            Err(_) if vm.qemu_has_ended() => return,
            Err(problem) => {
                tracing::warn!(vm = %vm.id(), %problem, "its passt is not watched yet");
                sleep(TRY_AGAIN).await;
            }
        }
    };
    let mut tried: Option<Instant> = None;
    // It has not been tried to start one in place of this one.
    let mut is_new = true;
    // QEMU's end of the cable to this one may wait.
    let mut may_wait = true;
    while !vm.qemu_has_ended() {
        sleep(LOOK).await;
        if may_wait {
            may_wait = !never_wait(&vm).await;
        }
        let is_due = tried.is_none_or(|tried| tried.elapsed() > TRY_AGAIN);
        if !passt.has_ended() || vm.qemu_has_ended() {
            continue;
        }
        if !is_due {
            if is_new {
                say(&vm, "passt has ended again".to_owned());
            }
            continue;
        }
        tried = Some(Instant::now());
        match start_again(&vm, &host).await {
            Ok(started) => {
                (passt, is_new, may_wait) = (started, true, true);
                vm.observed(|seen| seen.no_network.clear());
                tracing::warn!(vm = %vm.id(), "its passt had ended: it has another one now, and the connections of its guest are lost");
            }
            Err(problem) => {
                is_new = false;
                say(&vm, problem.to_string());
            }
        }
    }
}

/// Returns whether QEMU has accepted its `passt`, and waits for nothing there. If that is not known, it is looked at again.
async fn never_wait(vm: &Vm) -> bool {
    let Some(qemu) = vm.observed(|seen| seen.process) else { return false };
    let at = vm.dir.network_socket();
    let done = tokio::task::spawn_blocking(move || patience::never_wait(&qemu, &at)).await;
    match done.map_err(std::io::Error::other).flatten() {
        Ok(count) => count > 0,
        Err(error) => {
            tracing::debug!(vm = %vm.id(), %error, "whether QEMU waits for its passt is not known");
            false
        }
    }
}

fn say(vm: &Vm, why: String) {
    let again_s = TRY_AGAIN.as_secs();
    let trouble = format!(
        "its guest has no network: {why}; the agent tries again every {again_s} s (or move the VM to another host)"
    );
    if vm.observed(|seen| std::mem::replace(&mut seen.no_network, trouble.clone())) != trouble {
        tracing::warn!(vm = %vm.id(), "{trouble}");
    }
}

async fn start_again(vm: &Vm, host: &Host) -> Result<Process, Problem> {
    let passt = begin_passt(vm, host).await?;
    let qemu = vm.observed(|seen| seen.process).filter(|_| host.has_cgroups);
    if let Some(qemu) = qemu
        && let Err(error) = cgroup::join(&qemu, &passt)
    {
        tracing::warn!(vm = %vm.id(), %error, "its passt runs without limits");
    }
    Ok(passt)
}
