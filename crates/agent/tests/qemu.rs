//! The agent with real QEMU. The guest is the firmware alone, so no image is needed.

mod support;

use perigee_model::ProblemKind;
use perigee_model::vm::{MigrationPhase, VmStatus};
use support::{Agent, Blocks, Home, directory, kill_9, signal, spec, wait_for};
use tokio::runtime::Runtime;

/// Dropped from the top down: agents delete their VMs before the disks go away.
struct Scene {
    agents: Vec<Agent>,
    home: Home,
    _blocks: Blocks,
    _runtime: Runtime,
    _dir: tempfile::TempDir,
}

fn scene(names: &[&str]) -> Scene {
    let dir = directory();
    let runtime = Runtime::new().unwrap();
    let home = Home::serve(&runtime);
    let socket = dir.path().join("nbd.sock");
    let blocks = Blocks::serve(&socket);
    let agents = names.iter().map(|name| Agent::start(name, dir.path(), &socket, &home)).collect();
    Scene { agents, home, _blocks: blocks, _runtime: runtime, _dir: dir }
}

fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

#[test]
fn a_vm_outlives_its_agent_and_ends_when_deleted() {
    let mut scene = scene(&["a"]);
    let agent = &mut scene.agents[0];
    let pid = agent.put(&spec(1, false)).unwrap().qemu_pid;
    agent.wait_for_status(VmStatus::Running);
    assert_eq!(agent.put(&spec(1, false)).unwrap().qemu_pid, pid, "the same spec changes nothing");
    let other = agent.put(&spec(2, false)).unwrap_err();
    assert_eq!(other.kind, ProblemKind::Conflict, "{other}");

    agent.kill();
    assert!(is_running(pid));
    agent.run();
    let adopted = agent.wait_for_status(VmStatus::Running);
    assert_eq!(adopted.qemu_pid, pid);

    agent.delete("").unwrap();
    assert!(!is_running(pid));
    assert!(!agent.vm_dir().exists());
    assert_eq!(agent.get().unwrap_err().kind, ProblemKind::NotFound);
    agent.delete("").unwrap();
}

#[test]
fn qemu_runs_as_a_user_of_its_own_whose_files_are_closed_to_others() {
    use std::os::unix::fs::MetadataExt;
    let scene = scene(&["a"]);
    let agent = &scene.agents[0];
    let pid = agent.put(&spec(1, false)).unwrap().qemu_pid;
    let me = std::fs::metadata("/proc/self").unwrap().uid();
    if me != 0 {
        // Not root: QEMU runs as the one who runs this test.
        return;
    }
    let owner = std::fs::metadata(format!("/proc/{pid}")).unwrap().uid();
    assert_eq!(owner, 64055);
    let run = std::fs::metadata(agent.vm_dir().join("run")).unwrap();
    assert_eq!((run.uid(), run.mode() & 0o777), (64055, 0o700));
}

#[test]
fn a_disk_that_does_not_exist_is_an_error_and_nothing_stays() {
    let scene = scene(&["a"]);
    let problem = scene.agents[0].put(&spec(9, false)).unwrap_err();
    assert_eq!(problem.kind, ProblemKind::NotFound, "{problem}");
    assert!(problem.why.contains("root@9"), "{problem}");
    assert!(!scene.agents[0].vm_dir().exists());
}

#[test]
fn a_qemu_that_is_killed_is_gone() {
    let scene = scene(&["a"]);
    let pid = scene.agents[0].put(&spec(1, false)).unwrap().qemu_pid;
    kill_9(pid);
    let report = scene.agents[0].wait_for_status(VmStatus::Gone);
    assert!(report.reason.contains("QEMU has ended"), "{report:?}");
}

#[test]
fn a_migrated_vm_runs_there_and_no_more_here() {
    let scene = scene(&["a", "b"]);
    let (here, there) = (&scene.agents[0], &scene.agents[1]);
    here.put(&spec(1, false)).unwrap();
    here.wait_for_status(VmStatus::Running);
    here.migrate_to(there, &scene.home);
    let report = here.wait_for_phase(MigrationPhase::Completed);
    assert_eq!(report.status, VmStatus::Migrated);
    assert_eq!(scene.home.epoch(), 2);
    there.wait_for_status(VmStatus::Running);
    let figures = report.migration.unwrap();
    assert!(figures.total_ms > 0 && figures.transferred_bytes > 0, "{figures:?}");

    let ran = there.delete("?unless_ran=true").unwrap_err();
    assert_eq!(ran.kind, ProblemKind::Conflict, "{ran}");
    there.wait_for_status(VmStatus::Running);
}

#[test]
fn a_refused_epoch_leaves_the_vm_where_it_was() {
    let scene = scene(&["a", "b"]);
    let (here, there) = (&scene.agents[0], &scene.agents[1]);
    here.put(&spec(1, false)).unwrap();
    here.wait_for_status(VmStatus::Running);
    scene.home.refuse();
    here.migrate_to(there, &scene.home);
    let report = here.wait_for_phase(MigrationPhase::Failed);
    assert!(report.migration.unwrap().reason.contains("the test wants it so"));
    here.wait_for_status(VmStatus::Running);
    assert_eq!(scene.home.epoch(), 1);
}

#[test]
fn a_volume_with_another_writer_is_not_even_begun_to_move() {
    let scene = scene(&["a", "b"]);
    let (here, there) = (&scene.agents[0], &scene.agents[1]);
    here.put(&spec(1, false)).unwrap();
    here.wait_for_status(VmStatus::Running);
    scene.home.set_epoch(2);
    here.migrate_to(there, &scene.home);
    let report = here.wait_for_phase(MigrationPhase::Failed);
    let figures = report.migration.unwrap();
    assert!(figures.reason.contains("its epoch is 2, not 1"), "{figures:?}");
    assert_eq!((report.status, figures.transferred_bytes), (VmStatus::Running, 0));
    assert_eq!(scene.home.epoch(), 2);
}

#[test]
fn a_destination_killed_in_the_pause_gives_the_vm_back() {
    let scene = scene(&["a", "b"]);
    let (here, there) = (&scene.agents[0], &scene.agents[1]);
    here.put(&spec(1, false)).unwrap();
    here.wait_for_status(VmStatus::Running);
    scene.home.open(false);
    here.migrate_to(there, &scene.home);
    scene.home.wait_until_asked();
    kill_9(there.get().unwrap().qemu_pid);
    scene.home.open(true);
    here.wait_for_phase(MigrationPhase::Failed);
    here.wait_for_status(VmStatus::Running);
    assert_eq!(scene.home.epoch(), 1);
    assert_eq!(there.get().unwrap_err().kind, ProblemKind::NotFound);
}

#[test]
fn a_migration_cancelled_in_the_pause_gives_the_vm_back() {
    let scene = scene(&["a", "b"]);
    let (here, there) = (&scene.agents[0], &scene.agents[1]);
    here.put(&spec(1, false)).unwrap();
    here.wait_for_status(VmStatus::Running);
    scene.home.open(false);
    here.migrate_to(there, &scene.home);
    scene.home.wait_until_asked();
    here.post("migrate/cancel", &()).unwrap();
    scene.home.open(true);
    here.wait_for_phase(MigrationPhase::Cancelled);
    here.wait_for_status(VmStatus::Running);
    assert_eq!(scene.home.epoch(), 1);
}

#[test]
fn an_agent_killed_in_the_pause_finishes_the_migration_when_it_is_back() {
    let mut scene = scene(&["a", "b"]);
    scene.agents[0].put(&spec(1, false)).unwrap();
    scene.agents[0].wait_for_status(VmStatus::Running);
    scene.home.open(false);
    scene.agents[0].migrate_to(&scene.agents[1], &scene.home);
    scene.home.wait_until_asked();
    scene.agents[0].kill();
    scene.home.open(true);
    scene.agents[0].run();
    let report = scene.agents[0].wait_for_phase(MigrationPhase::Completed);
    assert_eq!(report.status, VmStatus::Migrated);
    assert_eq!(scene.home.epoch(), 2);
    scene.agents[1].wait_for_status(VmStatus::Running);
}

#[test]
fn a_vm_that_was_to_come_is_deleted_when_it_did_not() {
    let scene = scene(&["a"]);
    let agent = &scene.agents[0];
    let waiting = agent.put(&spec(2, true)).unwrap();
    assert_eq!(waiting.status, VmStatus::Incoming);
    assert!(waiting.incoming_uri.is_some());
    agent.delete("?unless_ran=true").unwrap();
    assert!(!is_running(waiting.qemu_pid));
}

#[test]
fn while_its_qemu_is_silent_nobody_says_that_a_vm_did_not_arrive() {
    let mut scene = scene(&["a"]);
    let agent = &mut scene.agents[0];
    let pid = agent.put(&spec(2, true)).unwrap().qemu_pid;
    agent.kill();
    signal("-STOP", pid);
    agent.run();
    let silent = agent.delete("?unless_ran=true").unwrap_err();
    assert_eq!(silent.kind, ProblemKind::Unavailable, "{silent}");
    assert!(is_running(pid));
    signal("-CONT", pid);
    wait_for("QEMU to answer again", || {
        agent.delete("?unless_ran=true").map_err(|problem| problem.to_string())
    });
    assert!(!is_running(pid));
}

#[test]
fn a_vm_asked_for_twice_has_not_started_for_the_second_one_when_it_fails() {
    let scene = scene(&["a"]);
    let agent = &scene.agents[0];
    std::thread::scope(|scope| {
        let asked = [0, 1].map(|_| scope.spawn(|| agent.put(&spec(9, false))));
        for put in asked {
            let problem = put.join().unwrap().unwrap_err();
            let kinds = [ProblemKind::NotFound, ProblemKind::Unavailable];
            assert!(kinds.contains(&problem.kind), "{problem}");
        }
    });
}
