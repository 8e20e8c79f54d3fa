//! A VM's TPM: the program `swtpm`, whose state is a volume of the VM's own, as the variables of its UEFI firmware are.
//!
//! `swtpm` knows files only, so `qemu-storage-daemon` shows it the volume as one (FUSE). A change of the state is in the volume before the
//! guest hears that its command was carried out.
//!
//! ```text
//! guest ── QEMU ── run/tpm.sock ── swtpm ── run/tpm-state ── qemu-storage-daemon ── NBD, unix socket ── volume server
//! ```
//!
//! Both are processes of the VM's user and in its cgroup. `swtpm` ends when QEMU closes its socket, and then the other one is ended. The
//! file is in mounts that only these two see, so no mount is left on the host, however they end. Like QEMU, they outlive the agent and are
//! found again by their command lines.
//!
//! QEMU connects once. When one of the two ends before QEMU, the guest's TPM answers with errors until the VM is started again; the
//! VM's reason says so. Such a VM can't be moved either: QEMU gets no state of the TPM to send (`tpm_emulator_pre_save` in QEMU's
//! `tpm_emulator.c`; `swtpm` writes to the file for it).
//!
//! **Migration.** QEMU sends the TPM's whole state with that of its other devices, after the epochs were raised. The destination's `swtpm` opens
//! the file only when it has come. (`tpm_emulator_post_load` in QEMU's `tpm_emulator.c`.) The source's `swtpm` writes its state to
//! the file once more before it gives it away, and the volume takes no more writes from there. So the storage daemon drops them from then on
//! ([`let_go`]), until the VM goes on here after all ([`take_back`]). All that the guest was told to be kept is in the volume before.
//!
//! **An escaped guest** has the user of both programs. The storage daemon may mount, in mounts of its own, so nobody but root tells it
//! what to do, and no program with these mounts gets more rights than its user has.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nix::unistd::{Gid, Uid, fchown};
use perigee_model::Problem;
use perigee_model::vm::Disk;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout};

use super::Vm;
use super::start_error::StartError;
use crate::command::block_node_as;
use crate::confinement::Sandbox;
use crate::files::{VmDir, listen, tail};
use crate::host::Host;
use crate::process::{self, Looks, Mounts, Process};
use crate::programs::{STORAGE_DAEMON, SWTPM, no_tpm};
use crate::qmp::{Qmp, QmpError, named_size};

/// The storage daemon opens the volume before it is ready, and waits some time for the volume server.
const START_DEADLINE: Duration = Duration::from_secs(60);
/// How long the storage daemon may take to change where it writes: the guest stands still meanwhile.
const TELL_DEADLINE: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(5);
const LOOK: Duration = Duration::from_secs(1);
/// `swtpm` ends by itself within some milliseconds, unless its state's volume does not answer.
const END_PATIENCE: Duration = Duration::from_secs(5);
const REASON_BYTES: u64 = 2000;
const MAY_BE_LOST: &str = "what its TPM changes may be lost when the VM is stopped";

/// Starts the VM's TPM, if it has one. After a failure [`end`] ends what runs.
///
/// # Errors
/// `Unsupported` if this host can't.
pub async fn start(vm: &Vm, host: &Host, volume_socket: &Path) -> Result<Vec<Process>, Problem> {
    let Some(disk) = vm.spec.tpm() else { return Ok(Vec::new()) };
    let what = || format!("can't start the TPM of the VM {}", vm.id());
    if let Some(why) = no_tpm() {
        return Err(Problem::unsupported(what(), why)
            .next("change that, or let the VM run at another host"));
    }
    let user = host.user_of(&vm.dir)?;
    let user = user.ok_or_else(|| Problem::unsupported(what(), "the agent is not root"))?;
    let dir = &vm.dir;
    prepare(dir, user.uid, user.gid).map_err(|error| Problem::internal(what(), error))?;
    let log = dir.tpm_log();
    let monitor = listen(&dir.tpm_monitor()).map_err(|error| Problem::internal(what(), error))?;
    let arguments = storage_arguments(dir, disk, volume_socket, monitor.as_raw_fd());
    let monitor = Some(monitor.as_fd());
    let (storage, _) = process::start_with_mounts(
        STORAGE_DAEMON,
        &arguments,
        user,
        Mounts::Own,
        monitor,
        &log,
        None,
    )?;
    ready(vm, &storage, &dir.tpm_state_pid()).await?;
    let sandbox = Some(Sandbox::new(SWTPM, &dir.root(), &dir.run())?);
    let arguments = swtpm_arguments(dir);
    let mounts = Mounts::Of(&storage);
    let (swtpm, _) =
        process::start_with_mounts(SWTPM, &arguments, user, mounts, None, &log, sandbox)?;
    ready(vm, &swtpm, &dir.tpm_pid()).await?;
    Ok(vec![storage, swtpm])
}

/// The file over which the volume is mounted, and nothing of an earlier start that would say that something is ready.
fn prepare(dir: &VmDir, uid: Uid, gid: Gid) -> io::Result<()> {
    let pids = [dir.tpm_pid(), dir.tpm_state_pid()];
    let files = [dir.tpm(), dir.tpm_state(), dir.tpm_log()];
    for old in pids.into_iter().chain(files) {
        match std::fs::remove_file(old) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    let mut options = OpenOptions::new();
    let file = options.create_new(true).write(true).mode(0o600).open(dir.tpm_state())?;
    Ok(fchown(file, Some(uid), Some(gid))?)
}

/// `monitor`: the number of its socket.
fn storage_arguments(
    dir: &VmDir,
    disk: &Disk,
    volume_socket: &Path,
    monitor: RawFd,
) -> Vec<String> {
    let export = json!({
        "type": "fuse",
        "id": "tpm",
        "node-name": "tpm",
        "mountpoint": dir.tpm_state().display().to_string(),
        "writable": true,
        "growable": false,
        "allow-other": "off",
    });
    let node = block_node_as("volume", disk, volume_socket);
    let parts = [
        ("--blockdev", node.to_string()),
        ("--blockdev", places().to_string()),
        ("--export", export.to_string()),
        ("--chardev", format!("socket,id=monitor,fd={monitor},server=on,wait=off")),
        ("--monitor", "chardev=monitor".to_owned()),
    ];
    let parts = parts.into_iter().flat_map(|(option, value)| [option.to_owned(), value]);
    parts.chain(storage_mark(dir)).collect()
}

/// Of several places to write to, it is enough if one takes it. There is one, but for the end of a migration.
fn places() -> Value {
    json!({
        "driver": "quorum",
        "node-name": "tpm",
        "children": ["volume"],
        "vote-threshold": 1,
        "read-pattern": "fifo",
    })
}

/// The source of a migration may not write the volume any more: what its `swtpm` writes from here on is dropped.
pub async fn let_go(vm: &Vm) -> Result<(), QmpError> {
    if vm.spec.tpm().is_none() {
        return Ok(());
    }
    let told = async { drop_writes(&monitor_of(vm).await?).await.map_err(io::Error::other) };
    let told = timeout(TELL_DEADLINE, told).await.map_err(io::Error::from).flatten();
    told.map_err(|error| QmpError::Refused {
        command: "what drops the writes of its TPM".to_owned(),
        reason: error.to_string(),
    })
}

/// Whether one of the programs of the VM's TPM is known to have ended: then QEMU can't get the TPM's state, which it has to send with the VM.
pub fn has_ended(vm: &Vm) -> bool {
    let is_over = |part: Option<Process>| part.is_none_or(|process| process.has_ended());
    vm.spec.tpm().is_some() && find(&vm.dir).is_ok_and(|parts| parts.into_iter().any(is_over))
}

/// It may have been done before, or in part.
async fn drop_writes(storage: &Qmp) -> Result<(), QmpError> {
    // All places have to be equally large.
    let size_bytes = named_size(storage, "volume").await?;
    let nowhere = json!({"driver": "null-co", "node-name": "nowhere", "size": size_bytes});
    done_or_refused(storage.execute("blockdev-add", nowhere).await)?;
    let add = json!({"parent": "tpm", "node": "nowhere"});
    let Err(refused) = storage.execute("x-blockdev-change", add).await else { return Ok(()) };
    // What is in use as a place can't be removed.
    match storage.execute("blockdev-del", json!({"node-name": "nowhere"})).await {
        Err(QmpError::Refused { .. }) if has_node(storage, "nowhere").await? => Ok(()),
        _ => Err(refused),
    }
}

/// It may have been done before, or in part, or there is nothing to do.
async fn write_again(storage: &Qmp) -> Result<(), QmpError> {
    let remove = json!({"parent": "tpm", "child": "children.1"});
    done_or_refused(storage.execute("x-blockdev-change", remove).await)?;
    let deleted = storage.execute("blockdev-del", json!({"node-name": "nowhere"})).await;
    match has_node(storage, "nowhere").await? {
        true => deleted.map(drop),
        false => Ok(()),
    }
}

fn done_or_refused(result: Result<Value, QmpError>) -> Result<(), QmpError> {
    match result {
        Ok(_) | Err(QmpError::Refused { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

async fn has_node(storage: &Qmp, name: &str) -> Result<bool, QmpError> {
    let nodes: Vec<Value> = storage.query("query-named-block-nodes").await?;
    Ok(nodes.iter().any(|node| node["node-name"] == name))
}

async fn monitor_of(vm: &Vm) -> io::Result<Qmp> {
    let stream = UnixStream::connect(vm.dir.tpm_monitor()).await?;
    Ok(Qmp::begin(stream).await?.0)
}

/// The VM goes on here after [`let_go`], if that was done. It goes on also if this fails.
pub async fn take_back(vm: &Vm) {
    if vm.spec.tpm().is_none() {
        return;
    }
    let told = async { write_again(&monitor_of(vm).await?).await.map_err(io::Error::other) };
    let taken = timeout(TELL_DEADLINE, told).await.map_err(io::Error::from).flatten();
    let why = match taken {
        Err(error) if !has_ended(vm) => format!("{MAY_BE_LOST}: {error}"),
        _ => String::new(),
    };
    if !why.is_empty() {
        tracing::warn!(vm = %vm.id(), "{why}");
    }
    vm.observed(|seen| {
        if is_not_said_dead(&seen.no_tpm) {
            seen.no_tpm = why;
        }
    });
}

fn is_not_said_dead(no_tpm: &str) -> bool {
    no_tpm.is_empty() || no_tpm.starts_with(MAY_BE_LOST)
}

fn swtpm_arguments(dir: &VmDir) -> Vec<String> {
    let [mark, pid] = swtpm_mark(dir);
    let state = format!("backend-uri=file://{}", dir.tpm_state().display());
    let control = format!("type=unixio,path={},mode=0600", dir.tpm().display());
    let line = ["socket", "--tpm2", "--terminate", "--tpmstate", &state, "--ctrl", &control];
    line.map(str::to_owned).into_iter().chain([mark, pid]).collect()
}

/// The arguments by which each is recognized among all processes.
fn storage_mark(dir: &VmDir) -> [String; 2] {
    ["--pidfile".to_owned(), dir.tpm_state_pid().display().to_string()]
}

fn swtpm_mark(dir: &VmDir) -> [String; 2] {
    ["--pid".to_owned(), format!("file={}", dir.tpm_pid().display())]
}

/// Waits until a process that was just started has written its pid.
async fn ready(vm: &Vm, process: &Process, pid: &Path) -> Result<(), Problem> {
    let what = || format!("can't start the TPM of the VM {}", vm.id());
    let deadline = Instant::now() + START_DEADLINE;
    while std::fs::symlink_metadata(pid).map_or(0, |meta| meta.len()) == 0 {
        if process.has_ended() {
            let said = tail(&vm.dir.tpm_log(), REASON_BYTES).unwrap_or_default();
            let said = String::from_utf8_lossy(&said).trim().to_owned();
            return Err(Problem::new(StartError::of(&said).kind(), what(), said));
        }
        if Instant::now() > deadline {
            let why = format!(
                "its programs were not ready within {} s, and have not said why",
                START_DEADLINE.as_secs()
            );
            return Err(Problem::unavailable(what(), why));
        }
        sleep(LOOK_AGAIN).await;
    }
    Ok(())
}

/// The processes of a VM's TPM: the storage daemon and `swtpm`.
fn find(dir: &VmDir) -> io::Result<[Option<Process>; 2]> {
    let uid = match dir.user() {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok([None, None]),
        user => user?,
    };
    let one = |program, mark: [String; 2]| {
        let arguments = mark.each_ref().map(String::as_str);
        Process::find(Looks { program, arguments, uid })
    };
    Ok([one(STORAGE_DAEMON, storage_mark(dir))?, one(SWTPM, swtpm_mark(dir))?])
}

/// Ends what is left of a VM's TPM when QEMU has ended. `swtpm` ends by itself, and what it wrote is in the volume then.
///
/// # Errors
/// `Unavailable` if the processes of this host can't be read.
pub async fn end(vm: &Vm) -> Result<(), Problem> {
    if vm.spec.tpm().is_none() {
        return Ok(());
    }
    let [storage, swtpm] = find(&vm.dir).map_err(|error| {
        let what = format!("can't end the TPM of the VM {}", vm.id());
        Problem::unavailable(what, error)
    })?;
    if let Some(swtpm) = swtpm {
        let deadline = Instant::now() + END_PATIENCE;
        while !swtpm.has_ended() && Instant::now() < deadline {
            sleep(LOOK_AGAIN).await;
        }
    }
    // One that waits for its volume ends only after what it waits for.
    for process in [storage, swtpm].into_iter().flatten() {
        process.kill().await?;
    }
    Ok(())
}

/// Says when the TPM ends before the VM's QEMU, and ends it after that.
pub async fn keep(vm: Arc<Vm>) {
    let mut found = None;
    // A QEMU that has just ended takes its TPM with it, so one look says nothing.
    let mut has_ended = false;
    while !vm.qemu_has_ended() {
        let parts = match found {
            Some(parts) => parts,
            None => match find(&vm.dir) {
                Ok(parts) => *found.insert(parts),
                Err(error) => {
                    tracing::warn!(vm = %vm.id(), %error, "whether its TPM runs is not known");
                    sleep(LOOK).await;
                    continue;
                }
            },
        };
        if has_ended {
            say_dead(&vm);
        }
        has_ended = parts.iter().any(|part| part.is_none_or(|process| process.has_ended()));
        sleep(LOOK).await;
    }
    if let Err(problem) = end(&vm).await {
        tracing::warn!(vm = %vm.id(), %problem, "what served its TPM goes on");
    }
}

fn say_dead(vm: &Vm) {
    if vm.qemu_has_ended() || !vm.observed(|seen| is_not_said_dead(&seen.no_tpm)) {
        return;
    }
    let said = tail(&vm.dir.tpm_log(), REASON_BYTES).unwrap_or_default();
    let said = String::from_utf8_lossy(&said).lines().next_back().unwrap_or_default().to_owned();
    let said = if said.is_empty() { said } else { format!(" ({said})") };
    let why = format!(
        "its TPM has ended{said}: the guest's TPM answers with errors, and the VM may end when its guest reboots; \
         `perigee vm restart {}` starts it again",
        vm.id()
    );
    tracing::warn!(vm = %vm.id(), "{why}");
    vm.observed(|seen| seen.no_tpm = why);
}

#[cfg(test)]
mod tests {
    use perigee_model::{DiskRole, Epoch, VmId, VolumeName};

    use super::*;

    /// A storage daemon whose volume is no volume and has no export.
    struct Storage {
        daemon: std::process::Child,
        monitor: Qmp,
        _dir: tempfile::TempDir,
    }

    impl Storage {
        async fn start() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let at = dir.path().join("monitor.sock");
            let mut daemon = std::process::Command::new(STORAGE_DAEMON);
            let volume = json!({"driver": "null-co", "node-name": "volume", "size": 1 << 20});
            daemon.args(["--blockdev", &volume.to_string(), "--blockdev", &places().to_string()]);
            let socket = format!("socket,id=monitor,path={},server=on,wait=off", at.display());
            daemon.args(["--chardev", &socket, "--monitor", "chardev=monitor"]);
            let daemon = daemon.spawn().unwrap();
            let deadline = Instant::now() + START_DEADLINE;
            let monitor = loop {
                match UnixStream::connect(&at).await {
                    Ok(stream) => break Qmp::begin(stream).await.unwrap().0,
                    Err(error) => assert!(Instant::now() < deadline, "its monitor: {error}"),
                }
                sleep(LOOK_AGAIN).await;
            };
            Self { daemon, monitor, _dir: dir }
        }

        /// Whether what is written goes nowhere as well.
        async fn drops(&self) -> bool {
            let graph = self.monitor.execute("x-debug-query-block-graph", json!({})).await.unwrap();
            let id = |name: &str| {
                let nodes = graph["nodes"].as_array().unwrap();
                nodes.iter().find(|node| node["name"] == name).map(|node| node["id"].clone())
            };
            let Some(nowhere) = id("nowhere") else { return false };
            graph["edges"].as_array().unwrap().iter().any(|edge| edge["child"] == nowhere)
        }
    }

    impl Drop for Storage {
        fn drop(&mut self) {
            self.daemon.kill().unwrap();
            self.daemon.wait().unwrap();
        }
    }

    #[tokio::test]
    async fn writes_are_dropped_and_taken_again_however_often_this_is_asked() {
        let storage = Storage::start().await;
        write_again(&storage.monitor).await.unwrap();
        for _ in 0..2 {
            drop_writes(&storage.monitor).await.unwrap();
            drop_writes(&storage.monitor).await.unwrap();
            assert!(storage.drops().await);
            write_again(&storage.monitor).await.unwrap();
            write_again(&storage.monitor).await.unwrap();
            assert!(!storage.drops().await);
        }
    }

    #[tokio::test]
    async fn an_agent_that_ended_before_it_had_dropped_the_writes_drops_them_when_it_is_back() {
        let storage = Storage::start().await;
        let nowhere = json!({"driver": "null-co", "node-name": "nowhere", "size": 1 << 20});
        storage.monitor.execute("blockdev-add", nowhere).await.unwrap();
        drop_writes(&storage.monitor).await.unwrap();
        assert!(storage.drops().await);
    }

    #[test]
    fn the_state_is_the_vm_s_volume_with_its_epoch_and_never_grows() {
        let dir = VmDir::new(Path::new("/s"), &VmId::new("web").unwrap());
        let volume = VolumeName::new("web-tpm").unwrap();
        let disk = Disk { role: DiskRole::Tpm, volume, epoch: Epoch(4), read_only: false };
        let storage = storage_arguments(&dir, &disk, Path::new("/run/v.sock"), 7).join(" ");
        let state = "/s/vms/web/run/tpm-state";
        for part in [r#""export":"web-tpm@4""#, r#""growable":false"#, r#""path":"/run/v.sock""#] {
            assert!(storage.contains(part), "{storage}");
        }
        assert!(storage.contains(&format!(r#""mountpoint":"{state}""#)), "{storage}");
        let swtpm = swtpm_arguments(&dir).join(" ");
        assert!(swtpm.contains(&format!("backend-uri=file://{state}")), "{swtpm}");
        assert!(swtpm.contains("path=/s/vms/web/run/tpm.sock"), "{swtpm}");
    }
}
