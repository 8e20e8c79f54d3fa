//! Ends QEMU's connection to the destination of a migration from outside.
//!
//! QEMU's TLS handshake with the destination has no deadline, and neither `migrate_cancel` nor `yank` ends it. QEMU 7.2
//! handles nothing else meanwhile: its monitor does not answer, and its guest's disks stand still. A destination whose
//! machine accepts connections and whose QEMU is stopped would hold the VM for ever. When the connection ends, QEMU says
//! that the migration has failed, as after a fault of the network.

use std::collections::BTreeSet;
use std::net::{Shutdown, SocketAddr, TcpStream};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::process::Process;

/// Ends the connections of a process to an address. Returns how many there were.
///
/// # Errors
/// If the process's files can't be looked at.
pub fn cut(process: &Process, to: SocketAddr) -> std::io::Result<usize> {
    cut_where(process, |_, peer| peer == to)
}

/// Ends the connections that other programs have made to a port of this process.
///
/// # Errors
/// As [`cut`].
pub fn cut_from(
    process: &Process,
    at: SocketAddr,
    peers: &BTreeSet<SocketAddr>,
) -> std::io::Result<usize> {
    cut_where(process, |local, peer| local == at && peers.contains(&peer))
}

fn cut_where(
    process: &Process,
    is_meant: impl Fn(SocketAddr, SocketAddr) -> bool,
) -> std::io::Result<usize> {
    let mut count = 0;
    for (socket, local, peer) in connections(process)? {
        if is_meant(local, peer) {
            socket.shutdown(Shutdown::Both)?;
            count += 1;
        }
    }
    Ok(count)
}

/// Who is connected to a port of this process.
///
/// # Errors
/// As [`cut`].
pub fn peers_at(process: &Process, at: SocketAddr) -> std::io::Result<BTreeSet<SocketAddr>> {
    let all = connections(process)?.into_iter();
    Ok(all.filter(|(_, local, _)| *local == at).map(|(_, _, peer)| peer).collect())
}

/// Where a process listens for TCP connections; `None` if it does not. It has one such socket at most.
///
/// # Errors
/// As [`cut`].
pub fn listens_at(process: &Process) -> std::io::Result<Option<SocketAddr>> {
    Ok(listening(process)?.into_iter().filter_map(|socket| socket.local_addr().ok()).next())
}

/// The sockets at which a process takes connections, of whatever kind.
///
/// # Errors
/// As [`cut`].
pub fn listening(process: &Process) -> std::io::Result<Vec<TcpStream>> {
    let mut all = sockets(process)?;
    all.retain(|socket| rustix::net::sockopt::socket_acceptconn(socket) == Ok(true));
    Ok(all)
}

/// The process's TCP connections, and the addresses of their two ends.
fn connections(process: &Process) -> std::io::Result<Vec<(TcpStream, SocketAddr, SocketAddr)>> {
    let of = |socket: TcpStream| {
        let (local, peer) = (socket.local_addr().ok()?, socket.peer_addr().ok()?);
        Some((socket, local, peer))
    };
    Ok(sockets(process)?.into_iter().filter_map(of).collect())
}

/// Another handle of each of the process's sockets, of whatever kind.
///
/// # Errors
/// As [`cut`].
pub fn sockets(process: &Process) -> std::io::Result<Vec<TcpStream>> {
    let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(std::io::ErrorKind::InvalidInput)?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
    // From here on the number is that of no other process.
    if process.has_ended() {
        return Ok(Vec::new());
    }
    let mut all = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{}/fd", process.pid))? {
        let path = entry?.path();
        let is_socket = std::fs::read_link(&path)
            .is_ok_and(|target| target.to_string_lossy().starts_with("socket:"));
        let number = path.file_name().and_then(|name| name.to_str()?.parse().ok());
        let Some(number) = number.filter(|_| is_socket) else { continue };
        match pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty()) {
            Ok(socket) => all.push(TcpStream::from(socket)),
            // It was closed meanwhile.
            Err(rustix::io::Errno::BADF) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::path::Path;
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    use serde_json::json;

    use super::*;
    use crate::command::QEMU;
    use crate::qmp::{MigrateInfo, Qmp};
    use crate::vm::tls::{End, set_encryption};

    const PATIENCE: Duration = Duration::from_secs(60);

    struct Killed(Child);

    impl Drop for Killed {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// A QEMU, and its monitor.
    async fn qemu(dir: &Path, name: &str, more: &[&str]) -> (Killed, Qmp) {
        let monitor = dir.join(format!("{name}.sock"));
        let mut qemu = Command::new(QEMU);
        qemu.args(["-nodefaults", "-display", "none", "-machine", "q35", "-m", "64"]);
        qemu.args(["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]).args(more);
        let qemu = Killed(qemu.spawn().unwrap());
        let until = Instant::now() + PATIENCE;
        loop {
            match Qmp::connect(&monitor).await {
                Ok((qmp, _events)) => return (qemu, qmp),
                Err(error) => assert!(Instant::now() < until, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits for a state of QEMU's migration.
    async fn wait_until(qmp: &Qmp, status: &str) -> MigrateInfo {
        let until = Instant::now() + PATIENCE;
        loop {
            let info: MigrateInfo = qmp.query("query-migrate").await.unwrap();
            if info.status == status {
                return info;
            }
            assert!(Instant::now() < until, "waited for {status:?}, saw {:?}", info.status);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The real QEMU, and a destination that accepts its connection and says nothing.
    #[tokio::test]
    async fn a_handshake_that_nobody_answers_is_ended_and_qemu_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let key = format!("qemu:{}\n", "ab".repeat(32));
        std::fs::write(dir.path().join("keys.psk"), key).unwrap();
        let (qemu, qmp) = qemu(dir.path(), "source", &["-S"]).await;
        set_encryption(&qmp, End::Source, Some(dir.path())).await.unwrap();
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = silent.local_addr().unwrap();
        qmp.execute("migrate", json!({"uri": format!("tcp:{to}")})).await.unwrap();
        let accepted = tokio::task::spawn_blocking(move || silent.accept().unwrap());
        let _open = accepted.await.unwrap();
        let process = Process::of_pid(qemu.0.id()).unwrap();
        let other = SocketAddr::from(([127, 0, 0, 1], 1));
        assert_eq!(cut(&process, other).unwrap(), 0, "only this address is meant");
        assert_eq!(cut(&process, to).unwrap(), 1);
        let info = wait_until(&qmp, "failed").await;
        assert!(info.error_desc.contains("TLS handshake"), "{}", info.error_desc);
    }

    #[tokio::test]
    async fn a_qemu_that_copies_runs_its_guest_on_when_its_connection_ends() {
        let dir = tempfile::tempdir().unwrap();
        let (qemu, source) = qemu(dir.path(), "source", &[]).await;
        let incoming = ["-incoming", "tcp:127.0.0.1:0"];
        let (_destination, destination) = self::qemu(dir.path(), "destination", &incoming).await;
        let on = json!({"capabilities": [{"capability": "return-path", "state": true}]});
        for qmp in [&source, &destination] {
            qmp.execute("migrate-set-capabilities", on.clone()).await.unwrap();
        }
        let waiting: serde_json::Value = destination.query("query-migrate").await.unwrap();
        let port: u16 = waiting["socket-address"][0]["port"].as_str().unwrap().parse().unwrap();
        let to = SocketAddr::from(([127, 0, 0, 1], port));
        let slow = json!({"max-bandwidth": 10_000, "downtime-limit": 1});
        source.execute("migrate-set-parameters", slow).await.unwrap();
        source.execute("migrate", json!({"uri": format!("tcp:{to}")})).await.unwrap();
        wait_until(&source, "active").await;
        assert_eq!(cut(&Process::of_pid(qemu.0.id()).unwrap(), to).unwrap(), 1);
        wait_until(&source, "failed").await;
        let until = Instant::now() + PATIENCE;
        loop {
            let state: serde_json::Value = source.query("query-status").await.unwrap();
            if state["status"] == "running" {
                break;
            }
            assert!(Instant::now() < until, "waited for a guest that runs, saw {state}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
