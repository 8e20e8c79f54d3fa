//! VMs that are changed while they run, at real QEMUs.

use perigee_model::vm::{ChangeVm, Disk, Hardware, Machine, MigrationPhase, VmSpec, VmStatus};
use perigee_model::{DiskRole, Epoch, ProblemKind};

use super::scene;
use super::support::{Agent, spec, wait_for};

const MIB: u64 = 1 << 20;

/// It can have up to four vCPUs, and further disks.
fn changeable(spec: VmSpec) -> VmSpec {
    let machine =
        Machine { persistent: true, cpus_max: 4, ports: Machine::PORTS, ..Machine::default() };
    VmSpec { machine, ..spec }
}

/// The node and the size that the root disk's device has, as its QEMU says while the agent is away.
fn root_disk(agent: &mut Agent) -> (String, u64) {
    agent.kill();
    let drives = agent.ask_qemu("query-block");
    agent.run();
    agent.wait_for_status(VmStatus::Running);
    let inserted = &drives[0]["inserted"];
    let node = inserted["node-name"].as_str().unwrap().to_owned();
    (node, inserted["image"]["virtual-size"].as_u64().unwrap())
}

#[test]
fn a_disk_that_has_grown_is_seen_by_the_guest_and_a_move_goes_on_with_it() {
    let mut scene = scene(&["a", "b"]);
    scene.agents[0].put(&changeable(spec(1, false))).unwrap();
    scene.agents[0].wait_for_status(VmStatus::Running);
    assert_eq!(root_disk(&mut scene.agents[0]), ("root".to_owned(), 64 * MIB));
    let grow = ChangeVm::GrowDisk { role: DiskRole::Root, size_bytes: 96 * MIB };
    let early = scene.agents[0].change(&grow).unwrap_err();
    assert!(early.why.contains("67108864"), "the home has not grown it: {early}");
    scene.blocks.grow(96 * MIB);
    for _ in 0..2 {
        scene.agents[0].change(&grow).unwrap();
        assert_eq!(root_disk(&mut scene.agents[0]), ("root".to_owned(), 96 * MIB));
    }
    let none = ChangeVm::GrowDisk { role: DiskRole::Data(0), size_bytes: MIB };
    assert_eq!(scene.agents[0].change(&none).unwrap_err().kind, ProblemKind::NotFound);

    let waiting = scene.agents[1].put(&changeable(spec(2, true))).unwrap();
    let uri = waiting.incoming_uri.expect("it waits for the migration");
    scene.agents[0].order("m-1", 1, uri, &scene.agents[1], &scene.home);
    scene.agents[0].wait_for_phase(MigrationPhase::Completed);
    scene.agents[1].wait_for_status(VmStatus::Running);
}

#[test]
fn a_vm_gets_vcpus_while_it_runs_and_keeps_them_when_it_moves() {
    let mut scene = scene(&["a", "b"]);
    scene.agents[0].put(&changeable(spec(1, false))).unwrap();
    scene.agents[0].wait_for_status(VmStatus::Running);
    let cpus = |count| ChangeVm::Cpus { count };
    for _ in 0..2 {
        scene.agents[0].change(&cpus(3)).unwrap();
        assert_eq!(scene.agents[0].get().unwrap().spec.cpus, 3);
    }
    for count in [2, 5] {
        let refused = scene.agents[0].change(&cpus(count)).unwrap_err();
        assert_eq!(refused.kind, ProblemKind::Unsupported, "{refused}");
    }
    scene.agents[0].kill();
    let running = scene.agents[0].ask_qemu("query-cpus-fast");
    assert_eq!(running.as_array().map(Vec::len), Some(3));
    scene.agents[0].run();
    let report = scene.agents[0].wait_for_status(VmStatus::Running);
    assert_eq!(report.spec.cpus, 3, "another agent knows it too");

    let there = VmSpec { cpus: report.spec.cpus, ..changeable(spec(2, true)) };
    let uri = scene.agents[1].put(&there).unwrap().incoming_uri.expect("it waits");
    scene.agents[0].order("m-1", 1, uri, &scene.agents[1], &scene.home);
    scene.agents[0].wait_for_phase(MigrationPhase::Completed);
    assert_eq!(scene.agents[1].wait_for_status(VmStatus::Running).spec.cpus, 3);
}

/// The firmware has no driver for it. What a guest with one does is seen in `perigee`'s tests.
#[test]
fn a_guest_that_gives_no_memory_back_is_told() {
    let scene = scene(&["a"]);
    let agent = &scene.agents[0];
    agent.put(&changeable(VmSpec { memory_bytes: 128 * MIB, ..spec(1, false) })).unwrap();
    agent.wait_for_status(VmStatus::Running);
    let changed = agent.change(&ChangeVm::Memory { bytes: 64 * MIB }).unwrap();
    assert!(changed.memory_bytes.is_some_and(|has| has > 120 * MIB), "{changed:?}");
}

/// The firmware has no driver of a balloon.
#[test]
fn what_a_guest_without_a_driver_uses_is_not_known_and_what_it_has_is() {
    let scene = scene(&["a"]);
    let agent = &scene.agents[0];
    let machine = Machine { memory_least_bytes: Some(64 * MIB), ..Machine::default() };
    agent.put(&VmSpec { memory_bytes: 128 * MIB, machine, ..spec(1, false) }).unwrap();
    agent.wait_for_status(VmStatus::Running);
    let memory = wait_for("what it has", || {
        let report = agent.get().unwrap();
        report.load.memory.ok_or_else(|| format!("{:?}", report.load))
    });
    assert!(memory.has_bytes > 120 * MIB && memory.has_bytes <= 128 * MIB, "{memory:?}");
    assert_eq!(memory.available_bytes, None);
    let rate = wait_for("a sample of how fast it changes its memory", || {
        let report = agent.get().unwrap();
        report.load.dirty_bytes_per_s.ok_or_else(|| format!("{:?}", report.load))
    });
    assert_eq!(rate % MIB, 0, "it is rounded down");
}

#[test]
fn the_vcpus_of_a_vm_with_a_range_give_way_to_others() {
    let scene = scene(&["a"]);
    let agent = &scene.agents[0];
    let machine = Machine { cpus_least: Some(1), ..Machine::default() };
    let pid = agent.put(&VmSpec { cpus: 4, machine, ..spec(1, false) }).unwrap().qemu_pid;
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let stat = |task: std::io::Result<std::fs::DirEntry>| {
        // A thread that serves a disk may end meanwhile.
        std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default()
    };
    // Of proc(5), counted from behind the name: state, and so on; nice is the 17th.
    let niceness = |stat: String| {
        let (name, rest) = stat.rsplit_once(") ")?;
        name.contains("(CPU ").then(|| rest.split(' ').nth(16).unwrap().to_owned())
    };
    let found: Vec<String> = tasks.map(stat).filter_map(niceness).collect();
    assert_eq!(found, ["6"; 4]);
}

/// The stand-in for a volume server serves only one volume, so the second disk is the root disk's.
#[test]
fn a_disk_comes_while_the_vm_runs_and_is_there_after_a_move() {
    let mut scene = scene(&["a", "b"]);
    let first = changeable(spec(1, false));
    let further = Disk { role: DiskRole::Data(1), read_only: true, ..first.disks[0].clone() };
    scene.agents[0].put(&first).unwrap();
    scene.agents[0].wait_for_status(VmStatus::Running);
    for _ in 0..2 {
        scene.agents[0].change(&ChangeVm::Plug(further.clone())).unwrap();
        assert_eq!(scene.agents[0].get().unwrap().spec.disks.last(), Some(&further));
    }
    let far = Disk { role: DiskRole::Data(8), ..further.clone() };
    let refused = scene.agents[0].change(&ChangeVm::Plug(far)).unwrap_err();
    assert_eq!(refused.kind, ProblemKind::Unsupported, "{refused}");
    scene.agents[0].kill();
    let drives = scene.agents[0].ask_qemu("query-block");
    assert_eq!(drives.as_array().map(Vec::len), Some(2), "{drives}");
    scene.agents[0].run();
    let report = scene.agents[0].wait_for_status(VmStatus::Running);

    let moved = report.spec.disks.into_iter().map(|disk| Disk { epoch: Epoch(2), ..disk });
    let there = VmSpec { disks: moved.collect(), ..changeable(spec(2, true)) };
    let uri = scene.agents[1].put(&there).unwrap().incoming_uri.expect("it waits");
    scene.agents[0].order("m-1", 1, uri, &scene.agents[1], &scene.home);
    scene.agents[0].wait_for_phase(MigrationPhase::Completed);
    let report = scene.agents[1].wait_for_status(VmStatus::Running);
    assert_eq!(report.spec.disks.len(), 2);
}

/// Nobody in the firmware answers when a disk is to go.
#[test]
fn a_disk_stays_while_its_guest_does_not_let_it_go() {
    let scene = scene(&["a"]);
    let agent = &scene.agents[0];
    let first = changeable(spec(1, false));
    let further = Disk { role: DiskRole::Data(0), read_only: true, ..first.disks[0].clone() };
    agent.put(&VmSpec { disks: vec![first.disks[0].clone(), further], ..first }).unwrap();
    agent.wait_for_status(VmStatus::Running);
    let unplug = |role| agent.change(&ChangeVm::Unplug { role });
    let refused = unplug(DiskRole::Data(0)).unwrap_err();
    assert!(refused.why.contains("has not let it go"), "{refused}");
    assert_eq!(agent.get().unwrap().spec.disks.len(), 2);
    unplug(DiskRole::Data(3)).expect("it has no such disk");
    assert_eq!(unplug(DiskRole::Root).unwrap_err().kind, ProblemKind::Unsupported);
}

/// The firmware lets no disk go, but a reset takes those that are to go.
#[test]
fn a_disk_goes_while_its_home_answers_nothing_and_the_guest_goes_on() {
    let mut scene = scene(&["a"]);
    let first = changeable(spec(1, false));
    let further = Disk { role: DiskRole::Data(0), ..first.disks[0].clone() };
    scene.agents[0].put(&first).unwrap();
    scene.agents[0].wait_for_status(VmStatus::Running);
    scene.agents[0].change(&ChangeVm::Plug(further)).unwrap();
    scene.agents[0].kill();
    let device = "/machine/peripheral/disk-data0/virtio-backend";
    let written = scene.agents[0].ask_monitor(&format!("qemu-io -d {device} \"write 0 4k\""));
    assert!(!written.contains("rror"), "{written}");
    scene.agents[0].run();
    scene.agents[0].wait_for_status(VmStatus::Running);
    let gone = ChangeVm::Unplug { role: DiskRole::Data(0) };
    let refused = scene.agents[0].change(&gone).unwrap_err();
    assert!(refused.why.contains("has not let it go"), "{refused}");
    scene.agents[0].kill();
    scene.agents[0].ask_qemu("system_reset");
    wait_for("its device to go", || {
        let drives = scene.agents[0].ask_qemu("query-block");
        let count = drives.as_array().map_or(0, Vec::len);
        if count == 1 { Ok(()) } else { Err(format!("{drives}")) }
    });
    scene.blocks.pause();
    scene.agents[0].run();
    scene.agents[0].wait_for_status(VmStatus::Running);
    wait_for("the disk to go", || scene.agents[0].change(&gone).map_err(|e| e.to_string()));
    assert_eq!(scene.agents[0].get().unwrap().spec.disks.len(), 1);
    scene.agents[0].kill();
    assert_eq!(scene.agents[0].ask_qemu("query-status")["status"], "running");
    scene.agents[0].run();
    scene.blocks.go_on();
}

/// It waits for a migration that never comes, so that nothing runs.
#[test]
fn qemu_starts_with_everything_that_a_vm_can_have() {
    let scene = scene(&["a"]);
    let agent = &scene.agents[0];
    let hardware = Hardware { vnc: true, ..Hardware::default() };
    let cpus_max = Machine::cpus_max_of(255);
    let mut largest = changeable(VmSpec { cpus: 255, ..spec(2, true) });
    largest.machine = Machine { hardware, cpus_max, ..largest.machine };
    for role in [DiskRole::CloudInit].into_iter().chain((0..17).map(DiskRole::Data)) {
        largest.disks.push(Disk { role, ..largest.disks[0].clone() });
    }
    assert_eq!(agent.put(&largest).unwrap().spec.disks.len(), 19);
}
