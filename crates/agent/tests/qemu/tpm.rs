//! A VM with a TPM, with real `swtpm` and QEMU. What the TPM keeps is written and read while no VM has it.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use nix::unistd::Uid;
use perigee_model::vm::{Disk, Machine, MigrationPhase, VmSpec, VmStatus};
use perigee_model::{DiskRole, ProblemKind, VolumeName};

use super::support::{Agent, directory, kill_9, order, signal, spec, start, wait_for};
use super::{is_running, scene};

const SECRET: &[u8; 16] = b"kept by the TPM!";
/// The TPM's own commands: Trusted Platform Module Library, part 3.
const NV_DEFINE_SPACE: u32 = 0x12a;
const NV_WRITE: u32 = 0x137;
const NV_READ: u32 = 0x14e;
const OWNER: u32 = 0x4000_0001;
const INDEX: u32 = 0x0150_0000;
/// Its owner writes and reads it.
const OWNERS: u32 = 0x0202_0002;
const SHA256: u16 = 0x000b;

/// A `swtpm` on a file with a TPM's state.
struct Tpm {
    program: Child,
    commands: UnixStream,
    _dir: tempfile::TempDir,
}

impl Tpm {
    fn on(state: &Path) -> Self {
        let dir = directory();
        let at = |name: &str| dir.path().join(name).display().to_string();
        let mut command = Command::new("swtpm");
        command.args(["socket", "--tpm2", "--flags", "not-need-init,startup-clear", "--tpmstate"]);
        command.arg(format!("backend-uri=file://{}", state.display()));
        command.args(["--ctrl", &format!("type=unixio,path={}", at("control"))]);
        command.args(["--server", &format!("type=unixio,path={}", at("commands"))]);
        let program = command.spawn().expect("swtpm is installed");
        let commands = wait_for("swtpm", || {
            UnixStream::connect(at("commands")).map_err(|error| error.to_string())
        });
        Self { program, commands, _dir: dir }
    }

    /// A command for the owner, who has no password. Returns what follows the answer's code.
    fn ask(&mut self, code: u32, more_handles: &[u32], parameters: &[u8]) -> Vec<u8> {
        const SESSIONS: u16 = 0x8002;
        let mut body: Vec<u8> = Vec::new();
        for number in [OWNER].iter().chain(more_handles) {
            body.extend(number.to_be_bytes());
        }
        // A session with an empty password.
        body.extend([0, 0, 0, 9, 0x40, 0, 0, 9, 0, 0, 0, 0, 0]);
        body.extend(parameters);
        let length = u32::try_from(body.len() + 10).unwrap();
        let head = [&SESSIONS.to_be_bytes()[..], &length.to_be_bytes(), &code.to_be_bytes()];
        self.commands.write_all(&[&head.concat()[..], &body].concat()).unwrap();
        let mut head = [0; 10];
        self.commands.read_exact(&mut head).unwrap();
        let [length, answer] =
            [2, 6].map(|at| u32::from_be_bytes(head[at..at + 4].try_into().unwrap()));
        assert_eq!(answer, 0, "the answer to {code:#x}");
        let mut rest = vec![0; length as usize - head.len()];
        self.commands.read_exact(&mut rest).unwrap();
        rest
    }

    fn keep(&mut self, secret: &[u8; 16]) {
        let index = [&INDEX.to_be_bytes()[..], &SHA256.to_be_bytes(), &OWNERS.to_be_bytes()];
        let public = [&index.concat()[..], &[0, 0, 0, 16]].concat();
        self.ask(NV_DEFINE_SPACE, &[], &[&[0, 0, 0, 14][..], &public].concat());
        self.ask(NV_WRITE, &[INDEX], &[&[0, 16][..], secret, &[0, 0]].concat());
    }

    fn kept(&mut self) -> Vec<u8> {
        let answer = self.ask(NV_READ, &[INDEX], &[0, 16, 0, 0]);
        // The lengths of the parameters, and of the data.
        answer[6..22].to_vec()
    }
}

impl Drop for Tpm {
    fn drop(&mut self) {
        self.program.kill().unwrap();
        self.program.wait().unwrap();
    }
}

fn with_tpm(spec: VmSpec) -> VmSpec {
    let volume = VolumeName::new("tpm").unwrap();
    let state = Disk { role: DiskRole::Tpm, volume, ..spec.disks[0].clone() };
    VmSpec { disks: vec![spec.disks[0].clone(), state], ..spec }
}

/// The processes of the VM's TPM.
fn parts_of(agent: &Agent) -> [u32; 2] {
    ["tpm-state.pid", "tpm.pid"].map(|name| {
        let path: PathBuf = agent.vm_dir().join("run").join(name);
        std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
    })
}

#[test]
fn what_a_tpm_keeps_is_there_after_a_stop_and_after_a_move() {
    if !Uid::effective().is_root() {
        return;
    }
    let mut scene = scene(&["a", "b"]);
    let state = scene.blocks.tpm();
    Tpm::on(&state).keep(SECRET);
    scene.agents[0].put(&with_tpm(spec(1, false))).unwrap();
    scene.agents[0].wait_for_status(VmStatus::Running);
    let parts = parts_of(&scene.agents[0]);
    scene.agents[0].kill();
    scene.agents[0].run();
    scene.agents[0].wait_for_status(VmStatus::Running);
    assert!(parts.into_iter().all(is_running), "they outlive the agent");
    scene.agents[0].delete().unwrap();
    assert!(!parts.into_iter().any(is_running), "they end with the VM");
    assert_eq!(Tpm::on(&state).kept(), SECRET);

    let again = VmSpec { start: start(1), ..spec(1, false) };
    scene.agents[0].put(&with_tpm(again)).unwrap();
    scene.agents[0].wait_for_status(VmStatus::Running);
    let there = VmSpec { start: start(1).by_migration(1), ..spec(2, true) };
    let waiting = scene.agents[1].put(&with_tpm(there)).unwrap();
    scene.home.open(false);
    let uri = waiting.incoming_uri.expect("it waits for the migration");
    scene.agents[0].order("m-1", 1, uri, &scene.agents[1], &scene.home);
    scene.home.wait_until_asked();
    // Only what the destination writes from here on is in the volume.
    scene.blocks.wipe_tpm();
    scene.home.open(true);
    scene.agents[0].wait_for_phase(MigrationPhase::Completed);
    assert_eq!(scene.agents[1].wait_for_status(VmStatus::Running).reason, "");
    scene.agents[0].delete().unwrap();
    scene.agents[1].delete().unwrap();
    assert_eq!(Tpm::on(&state).kept(), SECRET);
}

/// QEMU would find that out in the pause only.
#[test]
fn a_vm_whose_tpm_has_ended_is_not_moved_and_runs_on() {
    if !Uid::effective().is_root() {
        return;
    }
    let scene = scene(&["a", "b"]);
    let (here, there) = (&scene.agents[0], &scene.agents[1]);
    here.put(&with_tpm(spec(1, false))).unwrap();
    here.wait_for_status(VmStatus::Running);
    let [storage, _] = parts_of(here);
    kill_9(storage);
    wait_for("the end of its storage daemon", || {
        (!is_running(storage)).then_some(()).ok_or_else(|| "it runs".to_owned())
    });
    let waiting = there.put(&with_tpm(spec(2, true))).unwrap();
    let uri = waiting.incoming_uri.expect("it waits for the migration");
    let order = order("m-1", 1, uri, there, &scene.home);
    let refused = here.post("migrate", &order).unwrap_err();
    assert_eq!(refused.kind, ProblemKind::Unsupported, "{refused}");
    here.wait_for_status(VmStatus::Running);
}

#[test]
fn what_a_tpm_changes_is_kept_after_a_move_that_was_undone_behind_the_switch() {
    if !Uid::effective().is_root() {
        return;
    }
    let mut scene = scene(&["a", "b"]);
    let state = scene.blocks.tpm();
    let reboots = |spec: VmSpec| {
        let machine = Machine { persistent: true, ..spec.machine.clone() };
        with_tpm(VmSpec { machine, ..spec })
    };
    scene.agents[0].put(&reboots(spec(1, false))).unwrap();
    scene.agents[0].wait_for_status(VmStatus::Running);
    let waiting = scene.agents[1].put(&reboots(spec(2, true))).unwrap();
    let uri = waiting.incoming_uri.expect("it waits for the migration");
    scene.home.open(false);
    scene.agents[0].order("m-1", 1, uri, &scene.agents[1], &scene.home);
    scene.home.wait_until_asked();
    let destination = scene.agents[1].get().unwrap().qemu_pid;
    signal("-STOP", destination);
    scene.home.open(true);
    scene.agents[0].wait_for_phase(MigrationPhase::Failed);
    scene.agents[0].wait_for_status(VmStatus::Running);
    scene.agents[0].kill();
    let before = std::fs::read(&state).unwrap();
    // The firmware starts the TPM, which counts that.
    scene.agents[0].tell_qemu("system_reset");
    wait_for("a change of what the TPM keeps", || {
        let is_changed = std::fs::read(&state).unwrap() != before;
        is_changed.then_some(()).ok_or_else(|| "none".to_owned())
    });
}

#[test]
fn a_vm_whose_tpm_has_ended_runs_on_and_says_so() {
    if !Uid::effective().is_root() {
        return;
    }
    let scene = scene(&["a"]);
    let agent = &scene.agents[0];
    agent.put(&with_tpm(spec(1, false))).unwrap();
    agent.wait_for_status(VmStatus::Running);
    let [storage, swtpm] = parts_of(agent);
    kill_9(swtpm);
    wait_for("the reason", || match agent.get().unwrap() {
        vm if vm.status == VmStatus::Running && vm.reason.contains("its TPM has ended") => Ok(()),
        vm => Err(format!("{vm:?}")),
    });
    agent.delete().unwrap();
    assert!(!is_running(storage));
}
