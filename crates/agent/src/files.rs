//! The agent's files, and their permissions.
//!
//! ```text
//! STATE/lock             held while an agent runs
//! STATE/resolvers.json   the resolvers that guests in user networks may know
//! STATE/accelerator.json the cached answer of the KVM probe
//! STATE/vms/VM/          root only, except for passing through
//!   spec.json            the VmSpec; without it the VM was never started
//!   since.json           how the VM was changed while it ran
//!   migration.json       the current or last outgoing migration
//!   tls/                 the key of a migration, for QEMU to read: see [`crate::vm`]'s `tls`
//!   arrival              for a VM that arrives by migration: whether it has run here
//!   events.jsonl         the guest's messages
//!   qemu.log             QEMU's stderr
//!   network.sock         where QEMU waits for the `passt` of its card
//!   passt.json           which process that is
//!   passt.log            what it says
//!   tpm.qmp              the monitor of the program that shows the TPM's state as a file
//!   tpm.log              what the VM's TPM says
//!   run/                 owned by the VM's own user, mode 0700: sockets, pid file, console.log
//! STATE/ended/VM.json    the last start of a VM that was ended, and the fate of one that arrived by migration
//! ```
//!
//! The owner of `run/` is the record of which user the VM has. QEMU runs as this user, and no other VM has it: see
//! [`crate::users`]. Everything under `run/` was written by this user: it is opened without following links, and a
//! socket there counts only if the process that listens has this user.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, Flock, FlockArg, fallocate};
use nix::libc;
use nix::unistd::{Gid, Uid, chown};
use perigee_model::vm::MigrationKey;
use perigee_model::{Problem, VmId};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

/// The unit in which the kernel says how much of the disk a file takes.
const BLOCK_BYTES: u64 = 512;

/// The longest path of a unix socket: `sun_path` without its final zero.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The names of these files, and of the key's only user, are QEMU's.
const PSK_FILE: &str = "keys.psk";
const PSK_USER: &str = "qemu";
const PSK_FILE_BYTES_MAX: u64 = 256;
const DH_FILE: &str = "dh-params.pem";
/// The group ffdhe2048 of RFC 7919. Without this file QEMU 7.2 computes a group, for which it takes seconds.
const DH_PARAMETERS: &str = "-----BEGIN DH PARAMETERS-----
MIIBCAKCAQEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz
+8yTnc4kmz75fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a
87VXE15/V8k1mE8McODmi3fipona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7
YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W7edjcrsZCwenyO4KbXCeAvzhzffi
7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8vC7CIAXFjvGDfRaD
ssbzSibBsu/6iGtCOGEoXJf//////////wIBAg==
-----END DH PARAMETERS-----
";

/// The paths of one VM.
#[derive(Debug, Clone)]
pub struct VmDir {
    root: PathBuf,
}

impl VmDir {
    /// The paths of this VM below the agent's state directory. Nothing is made.
    pub fn new(state: &Path, vm: &VmId) -> Self {
        Self { root: state.join("vms").join(vm.as_str()) }
    }

    /// QEMU reads below it what its user may.
    pub fn root(&self) -> PathBuf {
        self.root.clone()
    }

    /// What the VM was asked for, as JSON.
    pub fn spec(&self) -> PathBuf {
        self.root.join("spec.json")
    }

    /// How the VM differs from its spec since it was started.
    pub fn since(&self) -> PathBuf {
        self.root.join("since.json")
    }

    /// The record of the VM's last migration from here, as JSON.
    pub fn migration(&self) -> PathBuf {
        self.root.join("migration.json")
    }

    /// The directory of what encrypts the VM's migration. The VM's user enters it.
    pub fn tls(&self) -> PathBuf {
        self.root.join("tls")
    }

    /// The key of a migration, in the form that GnuTLS reads (PSK).
    pub fn migration_key_file(&self) -> PathBuf {
        self.tls().join(PSK_FILE)
    }

    /// Where QEMU's own end of a tunnel is, if it sends. Its path is as long as the monitor's.
    pub fn migration_out(&self) -> PathBuf {
        self.run().join("out.sock")
    }

    /// The same if it waits.
    pub fn migration_in(&self) -> PathBuf {
        self.run().join("in.sock")
    }

    /// What the tunnel of a migration says. `end` is `source` or `destination`.
    pub fn tunnel_log(&self, end: &str) -> PathBuf {
        self.root.join(format!("tunnel-{end}.log"))
    }

    /// Keeps the key of a migration where what encrypts it reads it, and nobody else can.
    pub fn keep_migration_key(&self, key: &MigrationKey) -> Result<(), Problem> {
        let what = || format!("can't keep the key of a migration in {}", self.tls().display());
        if !key.is_one() {
            return Err(Problem::invalid(what(), "it is no key"));
        }
        let keep = || -> std::io::Result<()> {
            make_dir(&self.tls(), 0o711)?;
            self.write_for_user(&self.migration_key_file(), &format!("{PSK_USER}:{}\n", key.hex))?;
            self.write_for_user(&self.tls().join(DH_FILE), DH_PARAMETERS)
        };
        keep().map_err(|e| Problem::internal(what(), e))
    }

    /// `None` if there is no key.
    pub fn migration_key(&self) -> Result<Option<MigrationKey>, Problem> {
        let path = self.migration_key_file();
        let text = tail(&path, PSK_FILE_BYTES_MAX)
            .map_err(|e| Problem::internal(format!("can't read {}", path.display()), e))?;
        let text = String::from_utf8_lossy(&text);
        let hex = text.trim_end().strip_prefix(PSK_USER).and_then(|rest| rest.strip_prefix(':'));
        let key = hex.map(|hex| MigrationKey { hex: hex.to_owned() });
        Ok(key.filter(MigrationKey::is_one))
    }

    /// Whether the guest of a VM that comes by migration has run here (`vm/arrival.rs`). It is there before QEMU starts.
    pub fn arrival(&self) -> PathBuf {
        self.root.join("arrival")
    }

    /// The guest's messages, one JSON object a line.
    pub fn events(&self) -> PathBuf {
        self.root.join("events.jsonl")
    }

    /// What QEMU prints on its standard error.
    pub fn log(&self) -> PathBuf {
        self.root.join("qemu.log")
    }

    /// The directory of sockets and other files that QEMU's user makes.
    pub fn run(&self) -> PathBuf {
        self.root.join("run")
    }

    /// The socket of QEMU's monitor (QMP).
    pub fn qmp(&self) -> PathBuf {
        self.run().join("qmp.sock")
    }

    /// The socket of the guest's job port.
    pub fn job(&self) -> PathBuf {
        self.run().join("job.sock")
    }

    /// The guest's serial console, for one client. Its path is no longer than the monitor's.
    pub fn tty(&self) -> PathBuf {
        self.run().join("tty.sock")
    }

    /// The channel of qemu-guest-agent. Its path is shorter than the monitor's.
    pub fn guest_agent(&self) -> PathBuf {
        self.run().join("ga.sock")
    }

    /// The VM's screen, if it has one. Its path is as long as the monitor's.
    pub fn vnc(&self) -> PathBuf {
        self.run().join("vnc.sock")
    }

    /// Where QEMU reaches the VM's TPM. Its path is as long as the monitor's.
    pub fn tpm(&self) -> PathBuf {
        self.run().join("tpm.sock")
    }

    /// It is there when the TPM can be used.
    pub fn tpm_pid(&self) -> PathBuf {
        self.run().join("tpm.pid")
    }

    /// The volume with the TPM's state, as the TPM's programs see it. Others see an empty file.
    pub fn tpm_state(&self) -> PathBuf {
        self.run().join("tpm-state")
    }

    /// It is there when the TPM's state can be used.
    pub fn tpm_state_pid(&self) -> PathBuf {
        self.run().join("tpm-state.pid")
    }

    /// Where the program that shows the state is told what to do, by root only.
    pub fn tpm_monitor(&self) -> PathBuf {
        self.root.join("tpm.qmp")
    }

    /// What the programs of the VM's TPM print.
    pub fn tpm_log(&self) -> PathBuf {
        self.root.join("tpm.log")
    }

    /// What the guest has printed there.
    pub fn console(&self) -> PathBuf {
        self.run().join("console.log")
    }

    /// The process id of QEMU, in decimal digits.
    pub fn pid(&self) -> PathBuf {
        self.run().join("qemu.pid")
    }

    /// It is there when the VM's network is ready.
    pub fn network_pid(&self) -> PathBuf {
        self.run().join("passt.pid")
    }

    /// The process of the VM's network.
    pub fn network_process(&self) -> PathBuf {
        self.root.join("passt.json")
    }

    /// Where QEMU waits for the VM's network. Its path is as long as the monitor's.
    pub fn network_socket(&self) -> PathBuf {
        self.root.join("network.sock")
    }

    /// What the VM's `passt` prints.
    pub fn network_log(&self) -> PathBuf {
        self.root.join("passt.log")
    }

    /// Replaces a file that only the VM's user and root read.
    pub fn write_for_user(&self, path: &Path, text: &str) -> std::io::Result<()> {
        let user = self.user()?;
        let temporary = path.with_extension("new");
        let mut options = OpenOptions::new();
        let mut file =
            options.create(true).truncate(true).write(true).mode(0o600).open(&temporary)?;
        file.write_all(text.as_bytes())?;
        if user != Uid::effective() {
            chown(&temporary, Some(user), Some(Gid::from_raw(user.as_raw())))?;
        }
        std::fs::rename(&temporary, path)
    }

    /// The VM's user.
    pub fn user(&self) -> std::io::Result<Uid> {
        Ok(Uid::from_raw(std::fs::symlink_metadata(self.run())?.uid()))
    }

    /// Makes the directories, and gives QEMU's one to the VM's user.
    pub fn create(&self, owner: Uid) -> Result<(), Problem> {
        let fail = |e: std::io::Error| {
            Problem::internal(format!("can't make the directory {}", self.root.display()), e)
        };
        if self.qmp().as_os_str().len() > SOCKET_PATH_BYTES_MAX {
            return Err(Problem::invalid(
                format!("can't use {} for a socket", self.qmp().display()),
                format!("the path is longer than {SOCKET_PATH_BYTES_MAX} bytes"),
            )
            .next("give the agent a state directory with a shorter path"));
        }
        make_dir(&self.root, 0o711).map_err(fail)?;
        make_dir(&self.run(), 0o700).map_err(fail)?;
        if owner != Uid::effective() {
            chown(&self.run(), Some(owner), Some(Gid::from_raw(owner.as_raw())))
                .map_err(|e| fail(e.into()))?;
        }
        Ok(())
    }

    /// `rm` removes directories however deep they are in each other; the standard library's function would need a
    /// descriptor and a part of the stack for each.
    pub fn remove(&self) -> Result<(), Problem> {
        let what = || format!("can't remove {}", self.root.display());
        let mut rm = std::process::Command::new("rm");
        rm.args(["-rf", "--one-file-system", "--"]).arg(&self.root).stdin(Stdio::null());
        let ended = rm.output().map_err(|error| Problem::internal(what(), error))?;
        if ended.status.success() {
            return Ok(());
        }
        Err(Problem::internal(what(), String::from_utf8_lossy(&ended.stderr).trim()))
    }
}

fn make_dir(path: &Path, mode: u32) -> std::io::Result<()> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
        other => other?,
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
}

/// Makes the state directory and takes its lock.
pub fn prepare_state(state: &Path) -> Result<Flock<File>, Problem> {
    let fail = |e: std::io::Error| {
        Problem::internal(format!("can't use the state directory {}", state.display()), e)
    };
    std::fs::create_dir_all(state).map_err(fail)?;
    make_dir(state, 0o711).map_err(fail)?;
    // What another user has put there would be read as this agent's own.
    perigee_http::ours::check(state)?;
    make_dir(&state.join("vms"), 0o711).map_err(fail)?;
    make_dir(&state.join("ended"), 0o700).map_err(fail)?;
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(state.join("lock"))
        .map_err(fail)?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| {
        Problem::conflict(format!("can't use the state directory {}", state.display()), error)
            .next("another agent uses it: stop that one, or give this one a directory of its own")
    })
}

/// The first directory above `path` that other users may not pass through.
pub fn closed_ancestor(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    let closed = |dir: &&Path| {
        std::fs::metadata(dir).is_ok_and(|meta| meta.is_dir() && meta.mode() & 0o001 == 0)
    };
    path.ancestors().skip(1).find(closed).map(Path::to_path_buf)
}

/// Replaces a file atomically: after a crash either the old or the new one exists.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<(), Problem> {
    let what = || format!("can't write {}", path.display());
    let text = serde_json::to_vec_pretty(value).map_err(|e| Problem::internal(what(), e))?;
    let temporary = path.with_extension("new");
    let write = || -> std::io::Result<()> {
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all(&text)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)?;
        match path.parent() {
            Some(parent) => File::open(parent)?.sync_all(),
            None => Ok(()),
        }
    };
    write().map_err(|e| Problem::internal(what(), e))
}

/// Returns `None` if the file does not exist.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, Problem> {
    let what = || format!("can't read {}", path.display());
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Problem::internal(what(), e)),
    };
    serde_json::from_slice(&text).map(Some).map_err(|e| Problem::internal(what(), e))
}

/// The last bytes of a text file; empty if the file does not exist. It never follows a link.
pub fn tail(path: &Path, bytes_max: u64) -> std::io::Result<Vec<u8>> {
    let mut file = match OpenOptions::new().read(true).custom_flags(NO_TRICKS).open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let length_bytes = file.metadata()?.len();
    file.seek(SeekFrom::Start(length_bytes.saturating_sub(bytes_max)))?;
    let mut text = Vec::new();
    file.take(bytes_max).read_to_end(&mut text)?;
    Ok(text)
}

/// Gives the beginning of a file to which QEMU appends back to the disk once it takes more than `bytes_max` there, and keeps its
/// last `keep_bytes`. The file stays as long as it is, with a hole: nothing that QEMU writes meanwhile is lost. Where the filesystem
/// has no holes, the file becomes as short as that.
pub fn bound(path: &Path, bytes_max: u64, keep_bytes: u64) -> std::io::Result<()> {
    let file = match OpenOptions::new().read(true).append(true).custom_flags(NO_TRICKS).open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    let meta = file.metadata()?;
    if meta.blocks() * BLOCK_BYTES <= bytes_max || meta.len() <= keep_bytes {
        return Ok(());
    }
    let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let length = i64::try_from(meta.len() - keep_bytes).map_err(std::io::Error::other)?;
    match fallocate(&file, hole, 0, length) {
        Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => shorten(file, keep_bytes),
        done => Ok(done?),
    }
}

/// Keeps the end of a file to which QEMU appends: whatever its length is, the next bytes come at its end. What QEMU writes at this very
/// moment may be lost, or come before what is kept.
fn shorten(mut file: File, keep_bytes: u64) -> std::io::Result<()> {
    let length_bytes = file.metadata()?.len();
    file.seek(SeekFrom::Start(length_bytes.saturating_sub(keep_bytes)))?;
    let mut kept = Vec::new();
    (&file).take(keep_bytes).read_to_end(&mut kept)?;
    file.set_len(0)?;
    file.write_all(&kept)
}

/// A socket in place of what is there, which only root can connect to.
pub fn listen(socket: &Path) -> std::io::Result<UnixListener> {
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    std::fs::set_permissions(socket, Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Connects to a socket of a VM's QEMU, in a directory of QEMU's user. This user can put a link to any other socket in its
/// place, for example to another VM's.
///
/// # Errors
/// `PermissionDenied` if the process that listens has another user than the directory.
pub async fn connect(socket: &Path) -> std::io::Result<UnixStream> {
    let dir = socket.parent().ok_or(std::io::ErrorKind::InvalidInput)?;
    let owner = std::fs::symlink_metadata(dir)?.uid();
    let stream = UnixStream::connect(socket).await?;
    let listener = stream.peer_cred()?.uid();
    if listener != owner {
        let why = format!(
            "user {listener} listens at {}, and not user {owner}, whose VM it is",
            socket.display()
        );
        return Err(std::io::Error::new(std::io::ErrorKind::PermissionDenied, why));
    }
    Ok(stream)
}

/// A link or a FIFO planted by QEMU's user must not lead or stop the agent.
const NO_TRICKS: i32 = libc::O_NOFOLLOW | libc::O_NONBLOCK;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_value_is_read_again_and_replaces_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("value.json");
        assert_eq!(read_json::<u32>(&path).unwrap(), None);
        write_json(&path, &1).unwrap();
        write_json(&path, &2).unwrap();
        assert_eq!(read_json::<u32>(&path).unwrap(), Some(2));
    }

    #[test]
    fn a_second_agent_on_the_same_state_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let _first = prepare_state(dir.path()).unwrap();
        let problem = prepare_state(dir.path()).unwrap_err();
        assert!(problem.next.contains("another agent"), "{problem}");
    }

    #[test]
    fn a_state_directory_that_another_user_could_replace_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (above, state) = (dir.path().join("above"), dir.path().join("above/state"));
        std::fs::create_dir_all(&state).unwrap();
        std::fs::set_permissions(&above, std::fs::Permissions::from_mode(0o775)).unwrap();
        prepare_state(&state).unwrap_err();
        std::fs::set_permissions(&above, std::fs::Permissions::from_mode(0o755)).unwrap();
        drop(prepare_state(&state).unwrap());
        if Uid::effective().is_root() {
            chown(&state, Some(Uid::from_raw(12345)), None).unwrap();
            let refused = prepare_state(&state).unwrap_err();
            assert!(refused.why.contains("12345"), "{refused}");
        }
    }

    #[test]
    fn a_long_file_takes_less_of_the_disk_and_nothing_that_is_appended_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut qemus = OpenOptions::new().create(true).append(true).open(&path).unwrap();
        let taken_bytes = || std::fs::metadata(&path).unwrap().blocks() * BLOCK_BYTES;
        qemus.write_all(&[b'a'; 1 << 20]).unwrap();
        qemus.sync_all().unwrap();
        bound(&path, 2 << 20, 64 << 10).unwrap();
        assert!(taken_bytes() >= 1 << 20, "it is not long yet");
        qemus.write_all(b"before").unwrap();
        bound(&path, 512 << 10, 64 << 10).unwrap();
        qemus.write_all(b" and after").unwrap();
        qemus.sync_all().unwrap();
        assert!(taken_bytes() < 128 << 10, "{}", taken_bytes());
        assert_eq!(tail(&path, 18).unwrap(), b"aabefore and after");
        assert!(tail(&path, 64 << 10).unwrap().iter().all(|byte| *byte != 0));
    }

    #[test]
    fn a_long_file_where_there_are_no_holes_becomes_short_and_is_appended_to() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut qemus = OpenOptions::new().create(true).append(true).open(&path).unwrap();
        qemus.write_all(&[b'a'; 100_000]).unwrap();
        qemus.write_all(b"before").unwrap();
        let ours = OpenOptions::new().read(true).append(true).open(&path).unwrap();
        shorten(ours, 8).unwrap();
        qemus.write_all(b" and after").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"aabefore and after");
    }

    #[test]
    fn a_link_in_place_of_the_console_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (secret, link) = (dir.path().join("secret"), dir.path().join("console.log"));
        std::fs::write(&secret, "root only").unwrap();
        std::os::unix::fs::symlink(&secret, &link).unwrap();
        assert!(tail(&link, 100).is_err());
        assert!(bound(&link, 1, 1).is_err());
        assert_eq!(std::fs::read(&secret).unwrap(), b"root only");
    }

    #[tokio::test]
    async fn the_agent_does_not_speak_to_another_vm_in_place_of_the_one_whose_socket_it_opens() {
        let dir = tempfile::tempdir().unwrap();
        let (other, run) = (dir.path().join("other.sock"), dir.path().join("run"));
        let _listener = tokio::net::UnixListener::bind(&other).unwrap();
        std::fs::create_dir(&run).unwrap();
        let link = run.join("qmp.sock");
        std::os::unix::fs::symlink(&other, &link).unwrap();
        connect(&link).await.expect("of the same user");
        if !Uid::effective().is_root() {
            return;
        }
        chown(&run, Some(Uid::from_raw(1_777_200_001)), None).unwrap();
        let refused = connect(&link).await.unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied, "{refused}");
    }

    #[test]
    fn what_a_vm_has_made_does_not_keep_its_directory_from_being_removed() {
        let state = tempfile::tempdir().unwrap();
        std::fs::create_dir(state.path().join("vms")).unwrap();
        let dir = VmDir::new(state.path(), &VmId::new("vm-1").unwrap());
        dir.create(Uid::effective()).unwrap();
        let (mode, flags) = (nix::sys::stat::Mode::S_IRWXU, nix::fcntl::OFlag::O_DIRECTORY);
        let mut deepest = std::os::fd::OwnedFd::from(File::open(dir.run()).unwrap());
        for _ in 0..20_000 {
            nix::sys::stat::mkdirat(&deepest, "d", mode).unwrap();
            deepest = nix::fcntl::openat(&deepest, "d", flags, mode).unwrap();
        }
        drop(deepest);
        dir.remove().unwrap();
        assert!(!dir.run().exists());
        dir.remove().expect("nothing to do");
    }

    #[test]
    fn a_socket_path_that_does_not_fit_is_refused_before_qemu_starts() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("x".repeat(80));
        let vm = VmId::new("vm-1").unwrap();
        let problem = VmDir::new(&state, &vm).create(Uid::effective()).unwrap_err();
        assert!(problem.why.contains("107 bytes"), "{problem}");
    }

    #[test]
    fn a_directory_closed_to_others_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("closed/inner");
        std::fs::create_dir_all(&inner).unwrap();
        make_dir(dir.path(), 0o711).unwrap();
        make_dir(&dir.path().join("closed"), 0o700).unwrap();
        assert_eq!(closed_ancestor(&inner.join("x")), Some(dir.path().join("closed")));
    }
}
