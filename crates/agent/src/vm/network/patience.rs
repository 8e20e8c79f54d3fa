//! QEMU's end of the cable to `passt` must not wait.
//!
//! QEMU makes the socket of a `stream` network non-blocking where QEMU connects, but not where QEMU accepts (seen with 7.2). And `passt` waits when
//! it has sent a part of a frame, because the rest has to follow. Under traffic in both directions each then waits for the other to
//! read, for ever; and QEMU does nothing else meanwhile: its monitor does not answer, and disks stand still. So the agent makes the socket
//! non-blocking from outside. QEMU then keeps the packet, and reads.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::process::Process;
use crate::vm::migrate::cut::sockets;

/// Makes what a process has accepted at a Unix socket non-blocking. Returns how many connections there were.
///
/// # Errors
/// If the process's files can't be looked at.
pub fn never_wait(process: &Process, at: &Path) -> std::io::Result<usize> {
    let mut count = 0;
    for socket in sockets(process)? {
        if rustix::net::sockopt::socket_acceptconn(&socket) == Ok(true) {
            continue;
        }
        // An accepted connection has the address of the socket that accepted it.
        let socket = UnixStream::from(OwnedFd::from(socket));
        let is_meant = socket.local_addr().is_ok_and(|own| own.as_pathname() == Some(at));
        if is_meant {
            socket.set_nonblocking(true)?;
            count += 1;
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::command::QEMU;

    const PATIENCE: Duration = Duration::from_secs(60);

    struct Killed(Child);

    impl Drop for Killed {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// The flags of the process's connections at a socket, as the kernel has them.
    fn waiting(process: &Process, at: &Path) -> Vec<bool> {
        let of = |socket: std::net::TcpStream| {
            let is_listening = rustix::net::sockopt::socket_acceptconn(&socket) == Ok(true);
            let flags = rustix::fs::fcntl_getfl(&socket).unwrap();
            let socket = UnixStream::from(OwnedFd::from(socket));
            let own = socket.local_addr().ok()?;
            let is_meant = !is_listening && own.as_pathname() == Some(at);
            is_meant.then(|| !flags.contains(rustix::fs::OFlags::NONBLOCK))
        };
        sockets(process).unwrap().into_iter().filter_map(of).collect()
    }

    /// The real QEMU, which accepts as with a `passt`.
    #[test]
    fn what_qemu_has_accepted_for_its_card_does_not_wait() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("network.sock");
        let mut qemu = Command::new(QEMU);
        qemu.args(["-nodefaults", "-display", "none", "-machine", "q35", "-m", "64", "-S"]);
        let network =
            format!("stream,id=network,server=on,addr.type=unix,addr.path={}", at.display());
        qemu.args(["-netdev", &network, "-device", "virtio-net-pci,netdev=network,romfile="]);
        let qemu = Killed(qemu.spawn().unwrap());
        let process = Process::of_pid(qemu.0.id()).unwrap();
        let until = Instant::now() + PATIENCE;
        let _passt = loop {
            match UnixStream::connect(&at) {
                Ok(passt) => break passt,
                Err(error) => assert!(Instant::now() < until, "QEMU does not listen: {error}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        while never_wait(&process, &at).unwrap() == 0 {
            assert!(Instant::now() < until, "QEMU has accepted nothing");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(waiting(&process, &at), [false]);
        let other = dir.path().join("other.sock");
        assert_eq!(never_wait(&process, &other).unwrap(), 0, "only this socket is meant");
    }
}
