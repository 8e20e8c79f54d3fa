//! The agent with real QEMU. The guest is the firmware alone, so no image is needed.

mod callers;
mod cards;
mod changes;
mod compressed;
mod screen;
mod starts;
mod support;
mod tpm;

use perigee_model::grant::SignedGrant;
use perigee_model::switchover::Fate;
use perigee_model::vm::{Disk, MigrationPhase, MigrationReport, RenewGrant, VmSpec, VmStatus};
use perigee_model::{DiskRole, MigrationId, ProblemKind};
use serde_json::json;
use support::{Agent, Blocks, Home, directory, kill_9, order, signal, spec, wait_for, writes_port};
use tokio::runtime::Runtime;

/// Dropped from the top down: agents delete their VMs before the disks go away.
struct Scene {
    agents: Vec<Agent>,
    home: Home,
    blocks: Blocks,
    _runtime: Runtime,
    _dir: tempfile::TempDir,
}

fn scene(names: &[&str]) -> Scene {
    scene_with(names, &[])
}

fn scene_with(names: &[&str], boot_sector: &[u8]) -> Scene {
    let dir = directory();
    let runtime = Runtime::new().unwrap();
    let socket = dir.path().join("nbd.sock");
    let home = Home::serve(&runtime, &socket);
    let blocks = Blocks::serve(&socket, boot_sector);
    let agents = names.iter().map(|name| Agent::start(name, dir.path(), &home)).collect();
    Scene { agents, home, blocks, _runtime: runtime, _dir: dir }
}

/// A VM runs at the first of two agents, and stands in the pause of its migration to the second one. The homes
/// answer when `home` is opened.
fn scene_in_the_pause() -> Scene {
    let scene = scene(&["a", "b"]);
    scene.agents[0].put(&spec(1, false)).unwrap();
    scene.agents[0].wait_for_status(VmStatus::Running);
    scene.home.open(false);
    scene.agents[0].migrate_to(&scene.agents[1], &scene.home);
    scene.home.wait_until_asked();
    scene
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

    agent.delete().unwrap();
    assert!(!is_running(pid));
    assert!(!agent.vm_dir().exists());
    assert_eq!(agent.get().unwrap_err().kind, ProblemKind::NotFound);
    agent.delete().unwrap();
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
    assert!((1_900_000_000..1_900_065_535).contains(&owner), "{owner}");
    let run = std::fs::metadata(agent.vm_dir().join("run")).unwrap();
    assert_eq!((run.uid(), run.mode() & 0o777), (owner, 0o700));
}

/// A guest that has taken over its QEMU has the rights of this process.
#[test]
fn a_vm_s_qemu_has_a_filter_of_system_calls_and_opens_no_file_that_every_user_may_read() {
    let mut scene = scene(&["a"]);
    let agent = &mut scene.agents[0];
    let pid = agent.put(&spec(1, false)).unwrap().qemu_pid;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    assert!(status.lines().any(|line| line == "Seccomp:\t2"), "{status}");

    let has_landlock = !agent.warnings().contains("what every user of this host may read");
    let is_wanted = std::env::var_os("PERIGEE_TEST_LANDLOCK").is_some();
    assert!(has_landlock || !is_wanted, "{}", agent.warnings());
    agent.kill();
    assert_eq!(agent.qemu_opens("/etc/passwd").is_some(), has_landlock);
    assert_eq!(agent.qemu_opens("/usr/bin/env"), None, "its programs it opens");
}

#[test]
fn a_disk_that_does_not_exist_is_an_error_and_nothing_stays() {
    let scene = scene(&["a"]);
    let problem = scene.agents[0].put(&spec(9, false)).unwrap_err();
    assert_eq!(problem.kind, ProblemKind::NotFound, "{problem}");
    assert!(problem.why.contains("root@9"), "{problem}");
    assert!(!scene.agents[0].vm_dir().exists());
}

/// It waits for a migration that never comes, so that 255 vCPUs stand still.
#[test]
fn qemu_starts_with_as_many_cpus_and_disks_as_a_vm_can_have() {
    let scene = scene(&["a"]);
    let agent = &scene.agents[0];
    let mut largest = VmSpec { cpus: 255, ..spec(2, true) };
    for role in [DiskRole::Seed, DiskRole::Output].into_iter().chain((0..17).map(DiskRole::Data)) {
        largest.disks.push(Disk { role, ..largest.disks[0].clone() });
    }
    let beyond = agent.put(&VmSpec { cpus: 256, ..largest.clone() }).unwrap_err();
    assert_eq!(beyond.kind, ProblemKind::Invalid, "{beyond}");
    assert!(beyond.why.contains("1 to 255"), "{beyond}");
    let report = agent.put(&largest).unwrap();
    assert_eq!(report.spec.disks.len(), 20);
    assert!(is_running(report.qemu_pid));
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
fn a_reboot_is_told_with_the_vm_that_it_ended() {
    let mut scene = scene(&["a"]);
    let agent = &mut scene.agents[0];
    let report = agent.put(&spec(1, false)).unwrap();
    assert_eq!(report.boot_id, "boot-1");
    agent.kill();
    kill_9(report.qemu_pid);
    agent.boot_anew("boot-2");
    agent.run();
    assert_eq!(agent.wait_for_status(VmStatus::Gone).boot_id, "boot-2");
}

#[test]
fn a_vm_whose_spec_cannot_be_read_keeps_no_agent_from_starting() {
    let mut scene = scene(&["a"]);
    let agent = &mut scene.agents[0];
    let pid = agent.put(&spec(1, false)).unwrap().qemu_pid;
    agent.kill();
    // Without it the VM would lose the disks that came while it ran.
    let since = agent.vm_dir().join("since.json");
    std::fs::write(&since, "{").unwrap();
    agent.run();
    let refused = agent.put(&spec(1, false)).unwrap_err();
    assert!(refused.why.contains("since.json"), "{refused}");
    agent.kill();
    std::fs::remove_file(since).unwrap();
    let path = agent.vm_dir().join("spec.json");
    let stored = std::fs::read(&path).unwrap();
    std::fs::write(&path, &stored[..stored.len() / 2]).unwrap();
    agent.run();
    let refused = [
        agent.get().unwrap_err(),
        agent.put(&spec(1, false)).unwrap_err(),
        agent.delete().unwrap_err(),
        agent.end_unless_ran("m-1").unwrap_err(),
    ];
    for problem in refused {
        assert_eq!(problem.kind, ProblemKind::Internal, "{problem}");
        assert!(problem.why.contains("spec.json"), "{problem}");
    }
    assert!(is_running(pid));
    agent.kill();
    std::fs::write(&path, stored).unwrap();
    agent.run();
    assert_eq!(agent.wait_for_status(VmStatus::Running).qemu_pid, pid);
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

    assert_eq!(there.end_unless_ran("m-1").unwrap(), Fate::Ran);
    there.wait_for_status(VmStatus::Running);
    there.delete().unwrap();
    assert_eq!(there.end_unless_ran("m-1").unwrap(), Fate::Ran, "also when it is gone since");
}

/// QEMU tells a VM that came by migration of that one's success until it is to send it on.
#[test]
fn a_vm_that_has_moved_once_runs_on_when_its_next_move_does_not_begin() {
    let mut scene = scene(&["a", "b"]);
    let (here, there) = (&scene.agents[0], &scene.agents[1]);
    here.put(&spec(1, false)).unwrap();
    here.wait_for_status(VmStatus::Running);
    here.migrate_to(there, &scene.home);
    here.wait_for_phase(MigrationPhase::Completed);
    there.wait_for_status(VmStatus::Running);
    here.delete().unwrap();

    // Its agent was killed after it had stored the order and before it told QEMU.
    let order = order("m-2", 2, "tcp:127.0.0.1:1".into(), here, &scene.home);
    let report = MigrationReport::new(order.migration.clone(), 2, MigrationPhase::Setup);
    let record = json!({ "order": order, "report": report, "switchover": "source" });
    let there = &mut scene.agents[1];
    there.kill();
    std::fs::write(there.vm_dir().join("migration.json"), record.to_string()).unwrap();
    there.run();
    there.wait_for_phase(MigrationPhase::Failed);
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
fn a_volume_with_another_writer_is_not_moved() {
    let scene = scene(&["a", "b"]);
    let (here, there) = (&scene.agents[0], &scene.agents[1]);
    here.put(&spec(1, false)).unwrap();
    here.wait_for_status(VmStatus::Running);
    scene.home.set_epoch(2);
    here.migrate_to(there, &scene.home);
    let report = here.wait_for_phase(MigrationPhase::Failed);
    let figures = report.migration.unwrap();
    assert!(figures.reason.contains("its epoch is 2, not 1"), "{figures:?}");
    here.wait_for_status(VmStatus::Running);
    assert_eq!(scene.home.epoch(), 2);
    assert_ne!(there.get().unwrap().status, VmStatus::Running);
}

#[test]
fn an_order_that_comes_late_lets_no_vm_run_that_waits_for_another_migration() {
    let scene = scene(&["a", "b"]);
    let (here, there) = (&scene.agents[0], &scene.agents[1]);
    here.put(&spec(1, false)).unwrap();
    here.wait_for_status(VmStatus::Running);
    let waiting = there.put(&spec(2, true)).unwrap();
    here.order("m-0", 1, waiting.incoming_uri.unwrap(), there, &scene.home);
    let report = here.wait_for_phase(MigrationPhase::Failed);
    let reason = report.migration.unwrap().reason;
    assert!(reason.contains("does not wait for this migration"), "{reason}");
    here.wait_for_status(VmStatus::Running);
    assert_eq!(scene.home.epoch(), 1);
    assert_eq!(there.end_unless_ran("m-1").unwrap(), Fate::DidNotRun);
}

#[test]
fn a_destination_killed_in_the_pause_gives_the_vm_back() {
    let scene = scene_in_the_pause();
    let (here, there) = (&scene.agents[0], &scene.agents[1]);
    kill_9(there.get().unwrap().qemu_pid);
    scene.home.open(true);
    here.wait_for_phase(MigrationPhase::Failed);
    here.wait_for_status(VmStatus::Running);
    assert_eq!(scene.home.epoch(), 1);
    assert_eq!(there.get().unwrap_err().kind, ProblemKind::NotFound);
    assert_eq!(there.end_unless_ran("m-1").unwrap(), Fate::DidNotRun, "the question comes again");
}

/// Its QEMU has got everything and says nothing, for which the source's QEMU has no deadline.
#[test]
fn a_destination_that_stands_still_behind_the_switch_gives_the_vm_back() {
    let scene = scene_in_the_pause();
    let (here, there) = (&scene.agents[0], &scene.agents[1]);
    signal("-STOP", there.get().unwrap().qemu_pid);
    scene.home.open(true);
    here.wait_for_phase(MigrationPhase::Failed);
    here.wait_for_status(VmStatus::Running);
    assert_eq!(scene.home.epoch(), 1);
}

#[test]
fn a_paused_vm_whose_grant_is_too_old_goes_on_with_a_new_one() {
    let scene = scene_in_the_pause();
    let grant = SignedGrant("a newer one".to_owned());
    let migration = MigrationId::new("m-1").unwrap();
    let renewed = RenewGrant { migration, grant: grant.clone() };
    kill_9(scene.agents[1].get().unwrap().qemu_pid);
    scene.home.expect(&grant);
    scene.home.open(true);
    // The reason comes first. QEMU then ends its sending, may let the guest run for a moment, and is told to hold it.
    wait_for("a paused VM that says why", || {
        let report = scene.agents[0].get().map_err(|e| e.to_string())?;
        let reason = report.migration.as_ref().map(|own| own.reason.clone()).unwrap_or_default();
        let says_why =
            reason.contains("the VM stays paused") && reason.contains("the grant is too old");
        (says_why && report.status == VmStatus::Paused)
            .then_some(())
            .ok_or_else(|| format!("{:?}: {reason}", report.status))
    });
    let other = RenewGrant { migration: MigrationId::new("m-7").unwrap(), ..renewed.clone() };
    let refused = scene.agents[0].post("migrate/grant", &other).unwrap_err();
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    scene.agents[0].post("migrate/grant", &renewed).unwrap();
    scene.agents[0].wait_for_phase(MigrationPhase::Failed);
    scene.agents[0].wait_for_status(VmStatus::Running);
    assert_eq!(scene.home.epoch(), 1);
    let late = scene.agents[0].post("migrate/grant", &renewed).unwrap_err();
    assert_eq!(late.kind, ProblemKind::Conflict, "{late}");
}

#[test]
fn a_migration_cancelled_in_the_pause_gives_the_vm_back() {
    let scene = scene_in_the_pause();
    let here = &scene.agents[0];
    here.cancel("m-1").unwrap();
    scene.home.open(true);
    here.wait_for_phase(MigrationPhase::Cancelled);
    here.wait_for_status(VmStatus::Running);
    assert_eq!(scene.home.epoch(), 1);
}

#[test]
fn an_agent_killed_in_the_pause_finishes_the_migration_when_it_is_back() {
    let mut scene = scene_in_the_pause();
    scene.agents[0].kill();
    scene.home.open(true);
    scene.agents[0].run();
    let report = scene.agents[0].wait_for_phase(MigrationPhase::Completed);
    assert_eq!(report.status, VmStatus::Migrated);
    assert_eq!(scene.home.epoch(), 2);
    scene.agents[1].wait_for_status(VmStatus::Running);
}

/// What an agent stores before the switch does not say whether the epochs were raised. The homes do.
#[test]
fn a_guest_whose_epochs_were_never_raised_goes_on_without_its_destination() {
    let mut scene = scene_in_the_pause();
    scene.agents[0].kill();
    scene.agents[1].kill();
    // The copying fails while no agent looks.
    scene.agents[0].tell_qemu("migrate_cancel");
    // Else the killed agent's request could still raise the epoch.
    scene.home.wait_until_left();
    scene.home.open(true);
    scene.agents[0].run();
    scene.agents[0].wait_for_phase(MigrationPhase::Failed);
    scene.agents[0].wait_for_status(VmStatus::Running);
    assert_eq!(scene.home.epoch(), 1);
    // It ends its VM.
    scene.agents[1].run();
}

#[test]
fn a_vm_that_was_to_come_is_deleted_when_it_did_not() {
    let scene = scene(&["a"]);
    let agent = &scene.agents[0];
    let waiting = agent.put(&spec(2, true)).unwrap();
    assert_eq!(waiting.status, VmStatus::Incoming);
    assert!(waiting.incoming_uri.is_some());
    assert_eq!(agent.end_unless_ran("m-2").unwrap(), Fate::NotKnown, "another migration");
    assert!(is_running(waiting.qemu_pid));
    assert_eq!(agent.end_unless_ran("m-1").unwrap(), Fate::DidNotRun);
    assert!(!is_running(waiting.qemu_pid));
    assert_eq!(agent.end_unless_ran("m-1").unwrap(), Fate::DidNotRun, "the question comes again");
}

#[test]
fn a_qemu_that_is_silent_has_not_run_a_vm_that_its_agent_never_let_run() {
    let mut scene = scene(&["a"]);
    let agent = &mut scene.agents[0];
    let pid = agent.put(&spec(2, true)).unwrap().qemu_pid;
    agent.kill();
    signal("-STOP", pid);
    agent.run();
    let fate = wait_for("the answer", || agent.end_unless_ran("m-1").map_err(|e| e.to_string()));
    assert_eq!(fate, Fate::DidNotRun);
    assert!(!is_running(pid));
}

#[test]
fn an_agent_that_lost_what_it_stored_does_not_say_that_a_vm_did_not_run() {
    let mut scene = scene(&["a", "b"]);
    let (source, destination) = (0, 1);
    scene.agents[source].put(&spec(1, false)).unwrap();
    scene.agents[source].wait_for_status(VmStatus::Running);
    scene.agents[source].migrate_to(&scene.agents[destination], &scene.home);
    scene.agents[destination].wait_for_status(VmStatus::Running);
    let pid = scene.agents[destination].get().unwrap().qemu_pid;

    scene.agents[destination].kill();
    std::fs::write(scene.agents[destination].vm_dir().join("arrival"), "").unwrap();
    scene.agents[destination].run();
    let there = &scene.agents[destination];
    assert_eq!(there.end_unless_ran("m-1").unwrap(), Fate::NotKnown, "its mark is lost");
    assert!(is_running(pid));

    let elsewhere = there.end_unless_ran("m-7").unwrap();
    assert_eq!(elsewhere, Fate::NotKnown, "a migration it has never heard of");
}

#[test]
fn an_arrival_that_cannot_be_stored_does_not_run() {
    let scene = scene(&["a", "b"]);
    let (here, there) = (&scene.agents[0], &scene.agents[1]);
    here.put(&spec(1, false)).unwrap();
    here.wait_for_status(VmStatus::Running);
    there.put(&spec(2, true)).unwrap();
    let mark = there.vm_dir().join("arrival");
    std::fs::remove_file(&mark).unwrap();
    here.migrate_to(there, &scene.home);
    let stuck = wait_for("the reason", || {
        let report = there.get().map_err(|e| e.to_string())?;
        let stuck = report.reason.contains("its arrival is not stored");
        if stuck { Ok(report) } else { Err(format!("{report:?}")) }
    });
    assert_eq!(stuck.status, VmStatus::Incoming, "for others it has not come");
    std::fs::write(&mark, "waits\n").unwrap();
    there.wait_for_status(VmStatus::Running);
    assert_eq!(std::fs::read_to_string(&mark).unwrap(), "ran  \n");
}

#[test]
fn a_migration_that_is_called_off_before_its_order_comes_never_begins() {
    let scene = scene(&["a", "b"]);
    let (here, there) = (&scene.agents[0], &scene.agents[1]);
    here.put(&spec(1, false)).unwrap();
    here.wait_for_status(VmStatus::Running);
    here.cancel("m-1").unwrap();
    here.migrate_to(there, &scene.home);
    let report = here.wait_for_phase(MigrationPhase::Cancelled);
    assert_eq!(report.migration.unwrap().reason, "the test wants it so");
    assert_eq!((report.status, scene.home.epoch()), (VmStatus::Running, 1));
    there.wait_for_status(VmStatus::Incoming);
}

#[test]
fn a_guest_that_reboots_has_ended_and_its_job_does_not_run_again() {
    let scene = scene_with(&["a"], &writes_port(0xcf9, 6));
    let agent = &scene.agents[0];
    let pid = agent.put(&spec(1, false)).unwrap().qemu_pid;
    agent.wait_for_end("the guest rebooted");
    assert!(is_running(pid), "it can still be looked at");
}

#[test]
fn a_guest_whose_kernel_panics_has_ended_with_this_reason() {
    let scene = scene_with(&["a"], &writes_port(0x505, 1));
    scene.agents[0].put(&spec(1, false)).unwrap();
    scene.agents[0].wait_for_end("the guest's kernel panicked");
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
