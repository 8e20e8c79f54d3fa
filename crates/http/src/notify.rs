//! What a daemon tells systemd of itself (sd_notify(3)): lines in a datagram to the socket that `NOTIFY_SOCKET` names. Without one, nothing is
//! sent.

use std::convert::Infallible;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

const SOCKET: &str = "NOTIFY_SOCKET";
/// Within this time, in microseconds, a sign of life has to come.
const WATCHDOG_US: &str = "WATCHDOG_USEC";
/// The process of which that is said.
const WATCHDOG_PID: &str = "WATCHDOG_PID";
/// How long systemd may take to take a message while its queue is full.
const SEND_MAX: Duration = Duration::from_secs(2);

/// Whether the daemon has said that it answers. Until then systemd hears nothing of settings: the end of reading them would be taken for that.
static IS_READY: AtomicBool = AtomicBool::new(false);

/// The daemon answers now. `status` is one line for people; an empty one changes nothing.
pub fn ready(status: &str) {
    IS_READY.store(true, Ordering::Relaxed);
    say(&with_status("READY=1", status));
}

/// What the daemon does, in one line for people.
pub fn status(status: &str) {
    say(&with_status("", status));
}

/// The daemon ends soon.
pub fn stopping() {
    say("STOPPING=1");
}

/// The daemon reads its settings again, until it has [`reloaded`].
pub fn reloading() {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default();
    say_if_ready(&format!("RELOADING=1\nMONOTONIC_USEC={}", now.as_micros()));
}

/// The daemon has read its settings again.
pub fn reloaded() {
    say_if_ready("READY=1");
}

fn say_if_ready(message: &str) {
    if IS_READY.load(Ordering::Relaxed) {
        say(message);
    }
}

/// Gives signs of life, if systemd waits for them. It stops to if the runtime does not run its tasks any more, so it belongs beside the
/// daemon's own work, in one task.
pub async fn keep_alive() -> Infallible {
    let Some(every) = watchdog_of(|name| std::env::var(name).ok(), std::process::id()) else {
        return std::future::pending().await;
    };
    loop {
        tokio::time::sleep(every).await;
        // One of the other threads of the runtime runs it.
        if tokio::spawn(std::future::ready(())).await.is_ok() {
            say("WATCHDOG=1");
        }
    }
}

/// Half of the time within which systemd wants a sign of life of this process.
fn watchdog_of(variable: impl Fn(&str) -> Option<String>, own_pid: u32) -> Option<Duration> {
    let within_us: u64 = variable(WATCHDOG_US)?.parse().ok().filter(|us| *us > 0)?;
    let is_own = variable(WATCHDOG_PID).is_none_or(|pid| pid == own_pid.to_string());
    is_own.then(|| Duration::from_micros(within_us) / 2)
}

fn with_status(state: &str, status: &str) -> String {
    // A line feed would begin another message.
    let status = status.lines().next().unwrap_or_default();
    let status = (!status.is_empty()).then(|| format!("STATUS={status}"));
    let lines = [Some(state.to_owned()).filter(|state| !state.is_empty()), status];
    lines.into_iter().flatten().collect::<Vec<_>>().join("\n")
}

fn say(message: &str) {
    let Some(socket) = std::env::var_os(SOCKET).filter(|socket| !socket.is_empty()) else {
        return;
    };
    if let Err(error) = send(&socket, message) {
        tracing::warn!(%error, "systemd was not told: {message}");
    }
}

/// A name that begins with `@` is no file.
fn send(socket: &OsStr, message: &str) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(Path::new(socket))?,
    };
    let own = UnixDatagram::unbound()?;
    own.set_write_timeout(Some(SEND_MAX))?;
    own.send_to_addr(message.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(at: &UnixDatagram) -> String {
        at.set_read_timeout(Some(Duration::from_secs(60))).expect("a deadline");
        let mut bytes = [0; 512];
        let length = at.recv(&mut bytes).expect("a message");
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    }

    #[test]
    fn a_message_comes_to_a_socket_with_a_file_and_to_one_without() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("notify");
        let with_file = UnixDatagram::bind(&path).expect("a socket");
        send(path.as_os_str(), &with_status("READY=1", "serves\nmore")).expect("it is sent");
        assert_eq!(heard(&with_file), "READY=1\nSTATUS=serves");
        let name = format!("perigee-notify-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("a name");
        let without = UnixDatagram::bind_addr(&address).expect("a socket");
        send(OsStr::new(&format!("@{name}")), "STOPPING=1").expect("it is sent");
        assert_eq!(heard(&without), "STOPPING=1");
    }

    #[test]
    fn signs_of_life_are_for_the_process_that_systemd_means_and_come_twice_as_often() {
        let with = |us: &str, pid: Option<&str>| {
            let (us, pid) = (us.to_owned(), pid.map(str::to_owned));
            watchdog_of(|name| if name == WATCHDOG_US { Some(us.clone()) } else { pid.clone() }, 7)
        };
        assert_eq!(with("30000000", None), Some(Duration::from_secs(15)));
        assert_eq!(with("30000000", Some("7")), Some(Duration::from_secs(15)));
        assert_eq!(with("30000000", Some("8")), None);
        assert_eq!(with("0", None), None);
        assert_eq!(watchdog_of(|_| None, 7), None);
    }
}
