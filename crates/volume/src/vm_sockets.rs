//! The NBD sockets of this host's VMs, one for each.
//!
//! ```text
//! DIR/VM/socket.json   what the socket is for, and which server made it
//! DIR/VM/nbd.sock      belongs to the VM's user, mode 0600
//! ```
//!
//! A server that starts makes the sockets again that an earlier one has left, so QEMU reconnects without the agent.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::unistd::{Uid, chown};
use perigee_http::ours;
use perigee_model::volume::{VmSocket, VmSocketAt};
use perigee_model::{Problem, VmId};
use perigee_nbd::server::{OneVm, Server};
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// QEMU's users pass through the directories, and can neither list nor change them.
const PASSABLE: u32 = 0o711;
/// The most sockets. A host has far fewer VMs.
const SOCKETS_MAX: usize = 4096;

struct Open {
    socket: VmSocket,
    vm: Arc<OneVm>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

#[derive(Serialize, Deserialize)]
struct Record {
    /// The pool's server. Another one on this machine does not touch it.
    server: Uuid,
    socket: VmSocket,
}

/// The NBD sockets of this host's VMs, one for each VM.
pub struct VmSockets {
    dir: PathBuf,
    id: Uuid,
    server: Server,
    open: Mutex<BTreeMap<VmId, Open>>,
}

impl VmSockets {
    /// Makes the sockets again that are recorded in the directory.
    pub async fn load(dir: PathBuf, id: Uuid, server: Server) -> Result<Self, Problem> {
        let sockets = Self { dir, id, server, open: Mutex::default() };
        sockets.check_owner()?;
        let entries = match std::fs::read_dir(&sockets.dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(sockets),
            Err(error) => return Err(sockets.failed("can't read", &error)),
        };
        for entry in entries {
            let path = entry.map_err(|error| sockets.failed("can't read", &error))?.path();
            let text = std::fs::read(path.join("socket.json")).unwrap_or_default();
            let made = match serde_json::from_slice::<Record>(&text) {
                Ok(record) if record.server == id => sockets.put(record.socket).await.map(drop),
                // Another server's, or a crash came between the directory and its file: the agent asks again.
                _ => continue,
            };
            if let Err(problem) = made {
                tracing::error!(%problem, "a VM can't reach its disks");
            }
        }
        Ok(sockets)
    }

    /// Another user could put records there, by which this server would serve volumes, and sockets, to which QEMU would
    /// connect.
    fn check_owner(&self) -> Result<(), Problem> {
        if !self.dir.exists() {
            return Ok(());
        }
        ours::check(&self.dir).map_err(|problem| {
            problem.next("choose another directory: --vm-sockets of the volume server")
        })
    }

    fn failed(&self, what: &str, error: &io::Error) -> Problem {
        Problem::internal(format!("{what} the VMs' sockets in {}", self.dir.display()), error)
            .next("check --vm-sockets of the volume server")
    }

    /// The sockets, and how many connections each has.
    pub async fn list(&self) -> Vec<(VmSocket, usize)> {
        let open = self.open.lock().await;
        open.values().map(|open| (open.socket.clone(), open.vm.connections())).collect()
    }

    /// Makes a VM's socket, unless it is there. One of an earlier VM with the same name or user ends. While a VM runs, its disks change: the
    /// sessions of those that stay go on.
    pub async fn put(&self, socket: VmSocket) -> Result<VmSocketAt, Problem> {
        let what = format!("can't make the NBD socket of VM {}", socket.vm);
        if let Some(name) = socket.exports.iter().find(|name| !is_session(name)) {
            let why = format!("{name:?} is not VOLUME@EPOCH");
            return Err(Problem::invalid(what, why));
        }
        let path = self.dir.join(socket.vm.as_str()).join("nbd.sock");
        let mut open = self.open.lock().await;
        if open.get(&socket.vm).is_some_and(|open| open.socket == socket) {
            return Ok(VmSocketAt { path });
        }
        let failed = |error: io::Error| {
            Problem::internal(what.clone(), error).next("check --vm-sockets of the volume server")
        };
        if let Some(own) = open.get_mut(&socket.vm)
            && own.socket.uid == socket.uid
            && path.exists()
        {
            // A server that starts again serves what is recorded.
            self.record(&socket).map_err(failed)?;
            own.vm.change(&socket.exports);
            own.socket = socket;
            return Ok(VmSocketAt { path });
        }
        // An agent that is not root runs all VMs as its own user, which is this server's.
        let is_shared = socket.uid == Uid::effective().as_raw();
        let is_old = |old: &VmSocket| old.vm == socket.vm || (old.uid == socket.uid && !is_shared);
        let old: Vec<VmId> =
            open.values().filter(|o| is_old(&o.socket)).map(|o| o.socket.vm.clone()).collect();
        for vm in old {
            self.end(&mut open, &vm);
        }
        if open.len() >= SOCKETS_MAX {
            let why = format!("{SOCKETS_MAX} VMs have one already, which is the limit");
            return Err(Problem::conflict(what, why).next("delete VMs that have ended"));
        }
        make_passable(&self.dir)
            .map_err(|error| self.failed("can't make the directory of", &error))?;
        self.check_owner()?;
        let listener = self.bind(&path, &socket).await.map_err(failed)?;
        let (name, stop) = (socket.vm.clone(), CancellationToken::new());
        let vm = Arc::new(OneVm::new(socket.uid, &socket.exports));
        let task = tokio::spawn(self.server.clone().serve_vm(listener, vm.clone(), stop.clone()));
        open.insert(name, Open { socket, vm, stop, task });
        Ok(VmSocketAt { path })
    }

    async fn bind(&self, path: &Path, socket: &VmSocket) -> io::Result<tokio::net::UnixListener> {
        let dir = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
        make_passable(dir)?;
        for dir in [&*self.dir, dir] {
            std::fs::set_permissions(dir, Permissions::from_mode(PASSABLE))?;
        }
        self.record(socket)?;
        let listener = perigee_http::bind_unix(path).await?;
        std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
        if Uid::effective().as_raw() != socket.uid {
            chown(path, Some(socket.uid.into()), None)?;
        }
        Ok(listener)
    }

    /// Stores what the socket is for.
    fn record(&self, socket: &VmSocket) -> io::Result<()> {
        let dir = self.dir.join(socket.vm.as_str());
        let text = serde_json::to_vec(&Record { server: self.id, socket: socket.clone() })?;
        let (new, record) = (dir.join("socket.new"), dir.join("socket.json"));
        let mut options = File::options();
        let mut file = options.create(true).truncate(true).write(true).mode(0o600).open(&new)?;
        file.write_all(&text)?;
        std::fs::rename(&new, &record)
    }

    fn end(&self, open: &mut BTreeMap<VmId, Open>, vm: &VmId) {
        let Some(old) = open.remove(vm) else { return };
        old.stop.cancel();
        match std::fs::remove_dir_all(self.dir.join(vm.as_str())) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%vm, %error, "can't remove the NBD socket of a VM that has ended");
            }
            _ => {}
        }
    }

    /// Ends a VM's socket if it is of this user and has these exports. A later start of the VM may have the same user by now,
    /// and has other epochs.
    pub async fn delete(&self, vm: &VmId, uid: u32, exports: &str) {
        let mut open = self.open.lock().await;
        let is_meant = |socket: &VmSocket| socket.uid == uid && socket.exports.join(",") == exports;
        if open.get(vm).is_some_and(|open| is_meant(&open.socket)) {
            self.end(&mut open, vm);
        }
    }

    /// Ends when all connections are drained. The sockets stay for the next server.
    pub async fn drain(&self) {
        let open = std::mem::take(&mut *self.open.lock().await);
        open.values().for_each(|open| open.stop.cancel());
        for (_, open) in open {
            if let Err(error) = open.task.await {
                tracing::error!(%error, "a VM's NBD socket did not end well");
            }
        }
    }
}

/// Makes a directory, and those above it that are missing. One that is there keeps its mode.
fn make_passable(dir: &Path) -> io::Result<()> {
    // The empty path is the working directory.
    if dir.as_os_str().is_empty() || dir.exists() {
        return Ok(());
    }
    dir.parent().map_or(Ok(()), make_passable)?;
    match DirBuilder::new().mode(PASSABLE).create(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        made => made?,
    }
    // The umask takes away bits from new directories.
    std::fs::set_permissions(dir, Permissions::from_mode(PASSABLE))
}

/// Whether this is the export of one writer epoch: a VM joins no other session.
fn is_session(export: &str) -> bool {
    crate::exports::epoch_of(export).is_some()
}

#[cfg(test)]
mod tests {
    use futures_util::future::BoxFuture;
    use perigee_block::exports::{Export, Exports, Opener, Peer};
    use perigee_model::ProblemKind;
    use perigee_nbd::ServerOptions;

    use super::*;

    struct Nothing;

    impl Exports for Nothing {
        fn names(&self) -> BoxFuture<'_, Result<Vec<String>, Problem>> {
            Box::pin(async { Ok(Vec::new()) })
        }

        fn open<'a>(
            &'a self,
            name: &'a str,
            _: Opener,
            _: Peer,
        ) -> BoxFuture<'a, Result<Export, Problem>> {
            Box::pin(async move { Err(Problem::not_found(name, "there is nothing")) })
        }
    }

    /// The only user of such a directory could serve himself every volume.
    #[tokio::test]
    async fn sockets_are_not_made_where_another_user_could_put_his_own() {
        let dir = tempfile::tempdir().expect("a directory");
        let (above, own) = (dir.path().join("above"), dir.path().join("above/vms"));
        let mode = |path: &Path, mode| {
            std::fs::set_permissions(path, Permissions::from_mode(mode)).expect("a mode");
        };
        let server = Server::new(Arc::new(Nothing), ServerOptions::default()).expect("a server");
        let load = async || VmSockets::load(own.clone(), Uuid::nil(), server.clone()).await;
        let socket = |vm: &str| VmSocket {
            vm: vm.parse().expect("a name"),
            uid: Uid::effective().as_raw(),
            exports: vec!["data@1".to_owned()],
        };
        std::fs::create_dir(&above).expect("a directory");
        mode(&above, 0o775);
        let sockets = load().await.expect("it is not there yet");
        let refused = sockets.put(socket("vm-1")).await.expect_err("others can replace it");
        assert_eq!(refused.kind, ProblemKind::Invalid, "{refused}");
        mode(&above, 0o755);
        sockets.put(socket("vm-1")).await.expect("nobody else can");
        sockets.drain().await;
        mode(&above, 0o775);
        load().await.err().expect("others can replace it again");
        mode(&above, 0o755);
        let sockets = load().await.expect("its VMs keep their disks after a restart");
        assert_eq!(sockets.list().await, [(socket("vm-1"), 0)]);
        sockets.drain().await;
        mode(&own, 0o777);
        load().await.err().expect("everybody can put records there");
        mode(&own, 0o711);
        if Uid::effective().is_root() {
            chown(&own, Some(12345.into()), None).expect("another's");
            let refused = load().await.err().expect("it is another user's");
            assert!(refused.why.contains("12345"), "{refused}");
        }
    }
}
