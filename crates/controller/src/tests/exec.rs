//! Programs in guests, and their ends. The guest agent's programs are processes of this machine.

use std::path::Path;
use std::time::Duration;

use perigee_model::persistent_vm::ExecInVm;

use super::persistent_vms::{new_vm, web};
use super::{Lab, TIMING, wait_for};
use crate::cluster::Timing;
use crate::vms::exec;

/// Writes the number of a process that it starts to a file, and lasts longer than any test.
fn parent(file: &Path) -> ExecInVm {
    let script = format!("sleep 3600 & echo $! >{0}.part; mv {0}.part {0}; wait", file.display());
    let command = ["/bin/sh", "-c", &script].map(str::to_owned).to_vec();
    ExecInVm { command, ..ExecInVm::default() }
}

async fn child(file: &Path) -> String {
    wait_for("the program's child", async || std::fs::read_to_string(file).ok()).await
}

/// A process that ended and was not waited for counts as gone.
fn is_gone(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
    stat.map_or(true, |stat| stat.contains(") Z "))
}

#[tokio::test]
async fn a_program_in_a_guest_is_ended_with_all_that_it_has_started() {
    let lab = Lab::up().await;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("child");
    let begun = exec::begin(&lab.cluster, &web(), parent(&file)).await.expect("it starts");
    let child = child(&file).await;
    assert!(!is_gone(&child));
    let ended = exec::end(&lab.cluster, &web(), begun.pid).await.expect("it ends");
    assert!(ended.exited);
    wait_for("the child's end", async || is_gone(&child).then_some(())).await;
    let again = exec::end(&lab.cluster, &web(), begun.pid).await.expect("it has ended");
    assert!(again.exited);
}

#[tokio::test]
async fn a_program_whose_client_went_away_without_a_word_is_ended() {
    let mut lab = Lab::up().await;
    lab.supervisor.stop().await;
    let exec_unwatched = Duration::from_millis(500);
    lab.start_controller(Timing { exec_unwatched, ..TIMING }).await;
    lab.make_vm(new_vm("home1")).await;
    lab.runs().await;
    let dir = tempfile::tempdir().expect("a directory");
    let [watched, other] = ["watched", "other"].map(|name| dir.path().join(name));
    let ask = ExecInVm { end_unwatched: true, ..parent(&watched) };
    exec::begin(&lab.cluster, &web(), ask).await.expect("it starts");
    let left = exec::begin(&lab.cluster, &web(), parent(&other)).await.expect("it starts");
    let (watched, other) = (child(&watched).await, child(&other).await);
    wait_for("its end", async || is_gone(&watched).then_some(())).await;
    assert!(!is_gone(&other), "nobody has asked for its end");
    exec::end(&lab.cluster, &web(), left.pid).await.expect("it ends");
}
