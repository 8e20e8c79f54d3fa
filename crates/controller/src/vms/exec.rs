//! Programs that qemu-guest-agent runs in a VM that lives without a job, and their ends.
//!
//! The guest agent itself ends no program. So another program does, a shell, which finds all processes that the first one has
//! started. A program of a client that went away without a word is ended when nobody has asked about it for a while.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::prelude::{BASE64_STANDARD, Engine as _};
use perigee_model::guest_agent::ProgramStatus;
use perigee_model::persistent_vm::{ExecBegun, ExecInVm, ExecStatus};
use perigee_model::{Problem, ProblemKind, VmId};
use serde_json::json;

use super::guest::{ask, check_lasts};
use crate::cluster::Cluster;

/// How long a program may take to end when it is asked to, before it is killed.
const GRACE: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Kills a process, the first argument, and all that it has started, with the signal that is the second argument. A process comes before
/// those that it has started, so that it starts no others.
const KILL_TREE: &str = r#"
tree() {
  echo "$1"
  for stat in /proc/[0-9]*/stat; do
    { read -r line <"$stat"; } 2>/dev/null || continue
    rest=${line##*) }
    rest=${rest#* }
    [ "${rest%% *}" != "$1" ] || { child=${stat#/proc/}; tree "${child%/stat}"; }
  done
}
for pid in $(tree "$0"); do kill -s "$1" "$pid" 2>/dev/null; done
:"#;

/// Starts a program in the guest, as root.
///
/// # Errors
/// `Unavailable` if no guest agent answers; `Conflict` with its words if it can't.
pub async fn begin(
    cluster: &Arc<Cluster>,
    vm: &VmId,
    wanted: ExecInVm,
) -> Result<ExecBegun, Problem> {
    let is_watched = wanted.end_unwatched;
    let begun = start(cluster, vm, wanted).await?;
    if is_watched {
        cluster.watched.lock().insert((vm.clone(), begun.pid), Instant::now());
        tokio::spawn(end_unwatched(Arc::downgrade(cluster), vm.clone(), begun.pid));
    }
    Ok(begun)
}

/// As [`begin`]; nobody sees to the program's end.
///
/// # Errors
/// As [`begin`].
pub(super) async fn start(
    cluster: &Cluster,
    vm: &VmId,
    wanted: ExecInVm,
) -> Result<ExecBegun, Problem> {
    check_lasts(cluster, vm)?;
    let Some((program, arguments)) = wanted.command.split_first() else {
        return Err(Problem::invalid(format!("can't run it in VM {vm}"), "it names no program"));
    };
    let mut order = json!({"path": program, "arg": arguments, "capture-output": true});
    if let Some(input) = &wanted.input_base64 {
        order["input-data"] = json!(input);
    }
    ask(cluster, vm, "guest-exec", order).await
}

/// Of a program that was started. The guest agent forgets it when it has said that it ended.
///
/// # Errors
/// As [`begin`].
pub async fn status(cluster: &Cluster, vm: &VmId, pid: u64) -> Result<ExecStatus, Problem> {
    check_lasts(cluster, vm)?;
    cluster.watched.asked(vm, pid);
    let said: ProgramStatus = ask(cluster, vm, "guest-exec-status", json!({"pid": pid})).await?;
    if said.exited {
        cluster.watched.forget(vm, pid);
    }
    let is_base64 = |text: &String| BASE64_STANDARD.decode(text).is_ok();
    if !is_base64(&said.out_data) || !is_base64(&said.err_data) {
        let what = format!("can't understand the guest agent of {vm}");
        return Err(Problem::new(ProblemKind::Unsupported, what, "an output is no base64"));
    }
    Ok(ExecStatus {
        exited: said.exited,
        exit_code: said.exitcode,
        signal: said.signal,
        stdout_base64: said.out_data,
        stderr_base64: said.err_data,
        truncated: said.out_truncated || said.err_truncated,
    })
}

/// Ends a program that was started, and what it has started itself: it is asked to (SIGTERM), and killed if it does not follow. Says what it has
/// printed.
///
/// # Errors
/// As [`begin`]; `Unavailable` if the program goes on.
pub async fn end(cluster: &Cluster, vm: &VmId, pid: u64) -> Result<ExecStatus, Problem> {
    for signal in ["TERM", "KILL"] {
        // A number whose program has ended may be another one's by now.
        let now = status(cluster, vm, pid).await?;
        if now.exited {
            return Ok(now);
        }
        let command = ["/bin/sh", "-c", KILL_TREE, &pid.to_string(), signal].map(str::to_owned);
        let wanted = ExecInVm { command: command.to_vec(), ..ExecInVm::default() };
        let killer = start(cluster, vm, wanted).await?;
        let begun = Instant::now();
        let mut has_killed = false;
        while begun.elapsed() < GRACE {
            // The guest agent keeps an end until somebody asks for it.
            has_killed = has_killed || status(cluster, vm, killer.pid).await?.exited;
            let now = status(cluster, vm, pid).await?;
            if now.exited {
                return Ok(now);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
    let why = format!("program {pid} goes on, although it was killed");
    Err(Problem::unavailable(format!("can't end the program in VM {vm}"), why)
        .next(format!("look at it in the guest: perigee vm exec {vm} -- ps -ef")))
}

/// Ends a program when nobody has asked about it for a while.
async fn end_unwatched(cluster: std::sync::Weak<Cluster>, vm: VmId, pid: u64) {
    loop {
        let Some(cluster) = cluster.upgrade() else { return };
        let limit = cluster.timing.exec_unwatched;
        let asked = cluster.watched.lock().get(&(vm.clone(), pid)).copied();
        let Some(asked) = asked else { return };
        if asked.elapsed() >= limit {
            tracing::info!(
                "VM {vm}: ending program {pid}, about which nobody has asked for {} s",
                limit.as_secs()
            );
            if let Err(problem) = end(&cluster, &vm, pid).await {
                tracing::warn!("VM {vm}: {problem}");
            }
            return cluster.watched.forget(&vm, pid);
        }
        drop(cluster);
        tokio::time::sleep(limit / 4).await;
    }
}
