//! A real QEMU that waits for a migration, and those who should not send it one.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use perigee_model::VmId;
use perigee_model::vm::MigrationKey;
use serde::Deserialize;
use serde_json::json;
use tokio::net::TcpSocket;

use super::{End, set_encryption};
use crate::command::QEMU;
use crate::files::VmDir;
use crate::process::Process;
use crate::qmp::{Event, MigrateInfo, Qmp};
use crate::vm::migrate::cut::peers_at;
use crate::vm::start::listen_for_migration;
use crate::vm::strangers::{Waiting, keep_away_from};

const PATIENCE: Duration = Duration::from_secs(60);
/// How QEMU's state begins when it is not encrypted: its mark, and version 3.
const PLAIN_STATE: &[u8] = b"QEVM\0\0\0\x03";

struct Vm {
    process: Child,
    qmp: Qmp,
    _events: tokio::sync::mpsc::Receiver<Event>,
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[derive(Deserialize)]
struct Status {
    status: String,
}

impl Vm {
    async fn start(dir: &Path, name: &str, more: &[&str]) -> Self {
        let monitor = dir.join(format!("{name}.sock"));
        let mut qemu = Command::new(QEMU);
        qemu.args(["-nodefaults", "-display", "none", "-S", "-machine", "q35", "-m", "64"]);
        qemu.args(["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]).args(more);
        let process = qemu.spawn().unwrap();
        let until = Instant::now() + PATIENCE;
        loop {
            match Qmp::connect(&monitor).await {
                Ok((qmp, _events)) => return Self { process, qmp, _events },
                Err(error) => assert!(Instant::now() < until, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn waits(&self) -> bool {
        let status: Status = self.qmp.query("query-status").await.unwrap();
        status.status == "inmigrate"
    }

    /// Sends its state there, and returns how that ended.
    async fn migrate(&self, to: SocketAddr) -> MigrateInfo {
        self.qmp.execute("migrate", json!({"uri": format!("tcp:{to}")})).await.unwrap();
        let until = Instant::now() + PATIENCE;
        loop {
            let info: MigrateInfo = self.qmp.query("query-migrate").await.unwrap();
            if ["completed", "failed"].contains(&info.status.as_str()) {
                return info;
            }
            assert!(Instant::now() < until, "{}", info.status);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// A directory with this key, as the agent gives it to QEMU.
fn key(dir: &Path, name: &str, byte: &str) -> VmDir {
    let of = VmDir::new(&dir.join(name), &VmId::new("vm-1").unwrap());
    std::fs::create_dir_all(of.run()).unwrap();
    of.keep_migration_key(&MigrationKey { hex: byte.repeat(MigrationKey::DIGITS / 2) }).unwrap();
    of
}

/// Waits until QEMU has hung up.
fn is_hung_up_on(mut stream: TcpStream) -> bool {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // It may send an alert of TLS first.
    let ended = stream.read_to_end(&mut Vec::new());
    ended.is_ok() || ended.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset)
}

#[tokio::test]
async fn a_qemu_that_waits_for_a_vm_takes_it_only_from_who_has_the_key() {
    let dir = tempfile::tempdir().unwrap();
    let (right, wrong) = (key(dir.path(), "right", "ab"), key(dir.path(), "wrong", "cd"));
    let waiting = Vm::start(dir.path(), "waiting", &["-incoming", "defer"]).await;
    let keys = right.tls();
    let uri = listen_for_migration(&waiting.qmp, "127.0.0.1", false, Some(&keys)).await.unwrap();
    let to: SocketAddr = uri.strip_prefix("tcp:").unwrap().parse().unwrap();

    let mut plain = TcpStream::connect(to).unwrap();
    plain.write_all(PLAIN_STATE).unwrap();
    plain.write_all(&[0; 4096]).unwrap();
    let ended = tokio::task::spawn_blocking(move || is_hung_up_on(plain)).await.unwrap();
    assert!(ended && waiting.waits().await, "a plain connection");

    let stranger = Vm::start(dir.path(), "stranger", &[]).await;
    set_encryption(&stranger.qmp, End::Source, Some(&wrong.tls())).await.unwrap();
    let refused = stranger.migrate(to).await;
    assert_eq!(refused.status, "failed", "a wrong key: {}", refused.error_desc);
    assert!(waiting.waits().await);

    // TLS without a key: anonymous Diffie-Hellman.
    let anonymous = json!({"qom-type": "tls-creds-anon", "id": "anon", "endpoint": "client"});
    stranger.qmp.execute("object-add", anonymous).await.unwrap();
    let set = json!({"tls-creds": "anon"});
    stranger.qmp.execute("migrate-set-parameters", set).await.unwrap();
    let refused = stranger.migrate(to).await;
    assert_eq!(refused.status, "failed", "no key: {}", refused.error_desc);
    assert!(waiting.waits().await);

    // One that connects and says nothing keeps QEMU busy, and gets nothing. When its connection ends, QEMU goes on.
    let process = Process::of_pid(waiting.process.id()).unwrap();
    let (qmp, source) = (waiting.qmp.clone(), Some([127, 0, 0, 1].into()));
    let wanted = move || Some(Waiting { process, at: to, source, qmp: Some(qmp.clone()) });
    let door = tokio::spawn(keep_away_from(wanted));
    let from_elsewhere = async || {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, 2], 0))).unwrap();
        socket.connect(to).await.unwrap().into_std().unwrap()
    };
    let (silent, half) = (from_elsewhere().await, from_elsewhere().await);
    silent.set_nonblocking(false).unwrap();
    let ended = tokio::task::spawn_blocking(move || is_hung_up_on(silent)).await.unwrap();
    assert!(ended, "a silent one");
    half.set_nonblocking(false).unwrap();
    let ended = tokio::task::spawn_blocking(move || is_hung_up_on(half)).await.unwrap();
    assert!(ended, "the next one");
    assert!(waiting.waits().await);
    // It may be the VM's source, over a slow link.
    let own = TcpStream::connect(to).unwrap();
    let until = Instant::now() + PATIENCE;
    while !peers_at(&process, to).unwrap().contains(&own.local_addr().unwrap()) {
        assert!(Instant::now() < until, "it has not accepted the connection");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(peers_at(&process, to).unwrap().contains(&own.local_addr().unwrap()), "it stays");
    drop(own);

    let source = Vm::start(dir.path(), "source", &[]).await;
    set_encryption(&source.qmp, End::Source, Some(&keys)).await.unwrap();
    let done = source.migrate(to).await;
    assert_eq!(done.status, "completed", "{}", done.error_desc);
    let until = Instant::now() + PATIENCE;
    while waiting.waits().await {
        assert!(Instant::now() < until, "it did not take the VM that it waited for");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    door.abort();
}
