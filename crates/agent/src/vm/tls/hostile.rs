//! A real QEMU that waits for a migration, and those who should not send it one.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
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
use crate::vm::migrate::cut::{listens_at, peers_at};
use crate::vm::start::listen_for_migration;
use crate::vm::strangers::{Waiting, keep_away_from};
use crate::vm::tunnel::{self, Tunnel, said};

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
                Ok((qmp, _events)) => {
                    // As for all VMs that move: the source ends when the destination says that it has everything.
                    let on = json!({"capability": "return-path", "state": true});
                    let set = json!({"capabilities": [on]});
                    qmp.execute("migrate-set-capabilities", set).await.unwrap();
                    return Self { process, qmp, _events };
                }
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
        self.migrate_to(&format!("tcp:{to}")).await
    }

    async fn migrate_to(&self, uri: &str) -> MigrateInfo {
        self.qmp.execute("migrate", json!({"uri": uri})).await.unwrap();
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

/// Waits until QEMU, or what is before it, has hung up.
fn is_hung_up_on(mut stream: TcpStream) -> bool {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // It may send an alert of TLS first.
    let ended = stream.read_to_end(&mut Vec::new());
    ended.is_ok() || ended.is_err_and(|e| e.kind() == ErrorKind::ConnectionReset)
}

/// Whether a VM that is sent without encryption is hung up on.
async fn refuses_plain(to: SocketAddr) -> bool {
    let mut plain = TcpStream::connect(to).unwrap();
    let sent = plain.write_all(PLAIN_STATE).and_then(|()| plain.write_all(&[0; 4096]));
    // It may hang up before it has all.
    if let Err(error) = sent {
        return matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe);
    }
    tokio::task::spawn_blocking(move || is_hung_up_on(plain)).await.unwrap()
}

#[tokio::test]
async fn a_qemu_that_waits_for_a_vm_takes_it_only_from_who_has_the_key() {
    let dir = tempfile::tempdir().unwrap();
    let (right, wrong) = (key(dir.path(), "right", "ab"), key(dir.path(), "wrong", "cd"));
    let waiting = Vm::start(dir.path(), "waiting", &["-incoming", "defer"]).await;
    let keys = right.tls();
    let at = listen_for_migration(&waiting.qmp, "tcp:127.0.0.1:0", false, Some(&keys)).await;
    let to = SocketAddr::from(([127, 0, 0, 1], at.unwrap().port.parse().unwrap()));

    assert!(refuses_plain(to).await && waiting.waits().await, "a plain connection");

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

/// What sends with these keys, or waits for who has them.
fn tunnel_of(of: &VmDir, end: End) -> Tunnel<'_> {
    Tunnel { dir: of, user: None, end }
}

fn outwards(of: &VmDir) -> String {
    format!("unix:{}", of.migration_out().display())
}

#[tokio::test]
async fn a_vm_comes_through_two_tunnels_and_nothing_of_them_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let [from, at] = ["from", "at"].map(|end| key(dir.path(), end, "ab"));
    let waiting = Vm::start(dir.path(), "waiting", &["-incoming", "defer"]).await;
    let inside = format!("unix:{}", at.migration_in().display());
    listen_for_migration(&waiting.qmp, &inside, false, None).await.unwrap();
    let (_, to) = tunnel_of(&at, End::Destination).receive("127.0.0.1").await.unwrap();
    let source = Vm::start(dir.path(), "source", &[]).await;
    tunnel_of(&from, End::Source).send(to).await.unwrap();
    let done = source.migrate_to(&outwards(&from)).await;
    assert_eq!(done.status, "completed", "{} {:?}", done.error_desc, said(&from, End::Source));
    let until = Instant::now() + PATIENCE;
    while waiting.waits().await {
        assert!(Instant::now() < until, "it did not take the VM that it waited for");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for (dir, end) in [(&from, End::Source), (&at, End::Destination)] {
        assert!(tunnel::end(dir, end).await.unwrap(), "it was there");
        assert!(!tunnel::end(dir, end).await.unwrap(), "it is not any more");
    }
}

#[tokio::test]
async fn a_move_whose_tunnel_is_killed_fails_and_says_so() {
    for killed in [End::Source, End::Destination] {
        let dir = tempfile::tempdir().unwrap();
        let [from, at] = ["from", "at"].map(|end| key(dir.path(), end, "ab"));
        let waiting = Vm::start(dir.path(), "waiting", &["-incoming", "defer"]).await;
        let inside = format!("unix:{}", at.migration_in().display());
        listen_for_migration(&waiting.qmp, &inside, false, None).await.unwrap();
        let (process, to) = tunnel_of(&at, End::Destination).receive("127.0.0.1").await.unwrap();
        let source = Vm::start(dir.path(), "source", &[]).await;
        let slow = json!({"max-bandwidth": 10_000});
        source.qmp.execute("migrate-set-parameters", slow).await.unwrap();
        let sends = tunnel_of(&from, End::Source).send(to).await.unwrap();
        let kill = async || {
            let until = Instant::now() + PATIENCE;
            while peers_at(&process, to).unwrap().is_empty() {
                assert!(Instant::now() < until, "nobody has connected");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            let of = if killed == End::Source { &from } else { &at };
            assert!(tunnel::end(of, killed).await.unwrap());
        };
        let to = outwards(&from);
        let (failed, ()) = tokio::join!(source.migrate_to(&to), kill());
        assert_eq!(failed.status, "failed", "{killed:?}");
        let status: Status = source.qmp.query("query-status").await.unwrap();
        assert_ne!(status.status, "postmigrate", "it can go on");
        if killed == End::Destination {
            assert!(said(&from, End::Source).is_some(), "why");
        }
        for process in [process, sends] {
            process.kill().await.unwrap();
        }
    }
}

#[tokio::test]
async fn what_comes_through_a_tunnel_has_the_key() {
    let dir = tempfile::tempdir().unwrap();
    let (right, wrong) = (key(dir.path(), "right", "ab"), key(dir.path(), "wrong", "cd"));
    let waiting = Vm::start(dir.path(), "waiting", &["-incoming", "defer"]).await;
    let inside = format!("unix:{}", right.migration_in().display());
    listen_for_migration(&waiting.qmp, &inside, false, None).await.unwrap();
    let (process, to) = tunnel_of(&right, End::Destination).receive("127.0.0.1").await.unwrap();

    assert!(refuses_plain(to).await && waiting.waits().await, "a plain connection");

    let stranger = Vm::start(dir.path(), "stranger", &[]).await;
    tunnel_of(&wrong, End::Source).send(to).await.unwrap();
    let refused = stranger.migrate_to(&outwards(&wrong)).await;
    assert_eq!(refused.status, "failed", "a wrong key");
    assert!(said(&wrong, End::Source).is_some(), "why");
    assert!(waiting.waits().await);
    set_encryption(&stranger.qmp, End::Source, Some(&wrong.tls())).await.unwrap();
    assert_eq!(stranger.migrate(to).await.status, "failed", "a wrong key in QEMU");
    assert!(waiting.waits().await);

    let silent = TcpStream::connect(to).unwrap();
    let source = Vm::start(dir.path(), "source", &[]).await;
    let own = key(dir.path(), "own", "ab");
    let sends = tunnel_of(&own, End::Source).send(to).await.unwrap();
    let done = source.migrate_to(&outwards(&own)).await;
    assert_eq!(done.status, "completed", "beside a silent connection: {}", done.error_desc);
    drop(silent);
    for process in [process, sends] {
        process.kill().await.unwrap();
    }
    tunnel::end(&wrong, End::Source).await.unwrap();
}

/// It has a certificate in place of the key, and would take everything.
#[tokio::test]
async fn a_destination_without_the_key_gets_nothing_through_a_tunnel() {
    let dir = tempfile::tempdir().unwrap();
    let right = key(dir.path(), "right", "ab");
    let [own_key, own] = ["key", "crt"].map(|kind| dir.path().join(kind));
    let mut openssl = Command::new("openssl");
    openssl.args(["req", "-x509", "-newkey", "ed25519", "-nodes", "-subj", "/CN=test", "-keyout"]);
    openssl.arg(&own_key).arg("-out").arg(&own);
    assert!(openssl.output().expect("openssl is installed").status.success());
    let got = dir.path().join("got");
    let mut server = Command::new("openssl");
    server.args(["s_server", "-quiet", "-accept", "127.0.0.1:0", "-key"]).arg(own_key);
    server.arg("-cert").arg(own).stdin(Stdio::piped()).stdout(File::create(&got).unwrap());
    let server = Ended(server.spawn().unwrap());
    let process = Process::of_pid(server.0.id()).unwrap();
    let until = Instant::now() + PATIENCE;
    let to = loop {
        if let Some(at) = listens_at(&process).unwrap() {
            break at;
        }
        assert!(Instant::now() < until, "the stranger does not listen");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let source = Vm::start(dir.path(), "source", &[]).await;
    let sends = tunnel_of(&right, End::Source).send(to).await.unwrap();
    let refused = source.migrate_to(&outwards(&right)).await;
    assert_eq!(refused.status, "failed");
    let said = said(&right, End::Source).unwrap();
    assert!(said.contains("CertificateType"), "{said}");
    sends.kill().await.unwrap();
    drop(server);
    assert_eq!(std::fs::read(got).unwrap(), b"");
}

/// A process that is killed at the end.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
