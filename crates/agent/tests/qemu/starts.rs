//! Requests to start and to delete a VM that come late or twice, at the agent's HTTP door.

use perigee_model::ProblemKind;
use perigee_model::vm::{VmSpec, VmStatus};

use super::support::{kill_9, spec, start, wait_for};
use super::{is_running, scene};

#[test]
fn a_start_that_comes_after_its_vm_was_deleted_starts_nothing() {
    let mut scene = scene(&["a"]);
    let agent = &mut scene.agents[0];
    agent.put(&spec(1, false)).unwrap();
    agent.delete_start(start(0)).unwrap();
    let late = agent.put(&spec(1, false)).unwrap_err();
    assert_eq!(late.kind, ProblemKind::Conflict, "{late}");
    assert!(late.why.contains("start 1000.0.0") && late.why.contains("came late"), "{late}");

    agent.kill();
    agent.run();
    agent.put(&spec(1, false)).unwrap_err();
    assert!(!agent.vm_dir().exists());
    agent.put(&VmSpec { start: start(1), ..spec(1, false) }).unwrap();
    agent.wait_for_status(VmStatus::Running);
}

#[test]
fn a_delete_that_comes_before_its_start_keeps_it_from_starting() {
    let scene = scene(&["a"]);
    let agent = &scene.agents[0];
    agent.delete_start(start(0).by_migration(1)).unwrap();
    agent.put(&spec(2, true)).unwrap_err();
    agent.put(&spec(1, false)).unwrap_err();
    assert!(!agent.vm_dir().exists());
}

#[test]
fn a_delete_of_an_earlier_start_does_not_end_the_vm_that_runs() {
    let scene = scene(&["a"]);
    let agent = &scene.agents[0];
    let second = VmSpec { start: start(1), ..spec(1, false) };
    let pid = agent.put(&second).unwrap().qemu_pid;
    let late = agent.delete_start(start(0).whole_run()).unwrap_err();
    assert_eq!(late.kind, ProblemKind::Conflict, "{late}");
    assert!(late.why.contains("its later start 1000.1.0 is here"), "{late}");
    assert!(is_running(pid));
    agent.delete_start(start(1).whole_run()).unwrap();
    assert!(!is_running(pid));
}

#[test]
fn a_later_start_takes_the_place_of_an_earlier_one_and_no_earlier_one_its_place() {
    let scene = scene(&["a"]);
    let agent = &scene.agents[0];
    let first = agent.put(&spec(1, false)).unwrap().qemu_pid;
    let second = agent.put(&VmSpec { start: start(1), ..spec(1, false) }).unwrap().qemu_pid;
    assert!(!is_running(first) && is_running(second));
    let late = agent.put(&spec(1, false)).unwrap_err();
    assert_eq!(late.kind, ProblemKind::Conflict, "{late}");
    assert!(is_running(second));
    assert_eq!(agent.get().unwrap().spec.start, start(1));
}

/// As a job's outputs are fetched with one start of its VM, an end that is none would lose them.
#[test]
fn a_vm_whose_agent_ended_before_its_qemu_was_started_has_not_ended_and_can_start() {
    let mut scene = scene(&["a"]);
    let agent = &mut scene.agents[0];
    let before = agent.put(&spec(1, false)).unwrap().qemu_pid;
    agent.kill();
    kill_9(before);
    wait_for("the end of its QEMU", || {
        (!is_running(before)).then_some(()).ok_or_else(|| "it runs".to_owned())
    });
    // What a QEMU leaves.
    for file in ["qemu.log", "run/qemu.pid", "run/console.log"] {
        std::fs::remove_file(agent.vm_dir().join(file)).unwrap();
    }
    agent.run();
    assert_eq!(agent.get().unwrap_err().kind, ProblemKind::NotFound);
    agent.put(&spec(1, false)).unwrap();
    agent.wait_for_status(VmStatus::Running);
}

/// A full disk, say: the VM's end makes room, and then the end must be stored.
#[test]
fn a_delete_whose_end_cannot_be_stored_ends_the_vm_and_is_not_answered_as_done() {
    let scene = scene(&["a"]);
    let agent = &scene.agents[0];
    let pid = agent.put(&spec(1, false)).unwrap().qemu_pid;
    let ended = agent.vm_dir().ancestors().nth(2).unwrap().join("ended");
    std::fs::remove_dir(&ended).unwrap();
    let problem = agent.delete_start(start(0)).unwrap_err();
    assert_eq!(problem.kind, ProblemKind::Internal, "{problem}");
    assert!(!is_running(pid));
    std::fs::create_dir(&ended).unwrap();
    agent.delete_start(start(0)).unwrap();
    agent.put(&spec(1, false)).unwrap_err();
}
