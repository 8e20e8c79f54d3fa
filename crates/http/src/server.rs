//! The server side, for axum.

use std::io;
use std::net::Ipv4Addr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use axum::Router;

use perigee_model::Problem;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::task::JoinSet;

use crate::connections::{self, Limits};
use crate::guard::Guard;
use crate::network::Network;

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// `HOST:PORT`
    Tcp(String),
    /// A unix socket. A socket file on which no process listens is replaced.
    Unix(PathBuf),
}

impl std::str::FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Self::Unix(path.into()));
        }
        match text.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                Ok(Self::Tcp(text.to_owned()))
            }
            _ => Err(format!("{text:?} is neither unix:PATH nor HOST:PORT")),
        }
    }
}

impl std::fmt::Display for Listen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Binds a unix socket. A socket file that an ended process has left is replaced.
///
/// # Errors
/// `AddrInUse` when a process listens there, `AlreadyExists` when the file is not a socket. The file is not
/// changed in either case.
pub async fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    match std::fs::symlink_metadata(path) {
        Ok(file) if !file.file_type().is_socket() => {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "a file with this name exists and is not a socket",
            ));
        }
        Ok(_) => match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path)?;
            }
            _ => {
                return Err(io::Error::new(
                    io::ErrorKind::AddrInUse,
                    "another process listens there",
                ));
            }
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    UnixListener::bind(path)
}

/// A free port of this host, for tests and experiments that need its number before they start a server. It is
/// below 32768, where the ports of clients begin (ip(7)), so no client gets it in the meantime. Until this process
/// ends, no other call gives the same port: a server that is killed finds it free again.
///
/// # Panics
/// If thousands of ports are in use.
pub fn unused_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let of_this_process = std::process::id().wrapping_mul(61);
    let ports = (0..20_000).map(|_| {
        let number = of_this_process.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        10_000 + u16::try_from(number % 20_000).expect("bounded")
    });
    let mut free = ports.filter(|port| {
        is_taken_for_this_process(*port)
            && std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok()
    });
    free.next().expect("a port")
}

/// The process that has bound this name has the port. The name is no file, and goes with the process.
fn is_taken_for_this_process(port: u16) -> bool {
    let name = SocketAddr::from_abstract_name(format!("perigee-unused-port-{port}"));
    let bound = name.and_then(|name| std::os::unix::net::UnixListener::bind_addr(&name));
    bound.map(std::mem::forget).is_ok()
}

/// The problem of an address that could not be bound.
pub fn cannot_listen(what: &str, address: &Listen, error: &io::Error) -> Problem {
    let next = match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => {
            "check that the socket's directory exists and that this user may write to it"
        }
        io::ErrorKind::AddrNotAvailable => "choose an address of this machine",
        _ => "choose another address, or stop the process that listens there",
    };
    Problem::conflict(format!("{what} {address}"), error).next(next)
}

/// Linux generates a new UUID at each boot.
pub const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Which boot of the host this is: what is in the file, by default [`BOOT_ID`]. Hosts that share a
/// kernel have one file each. Empty when it is not known, which is logged.
pub fn boot_id(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| {
        tracing::warn!(path = %path.display(), %error, "a reboot will not be noticed");
        String::new()
    });
    text.trim().to_owned()
}

/// Servers that clients can reach already. They end with this.
pub struct Bound(JoinSet<()>);

/// Binds every address, and serves from then on. The network says how it is spoken over TCP; a unix socket is never encrypted.
///
/// # Errors
/// `Conflict` when an address is taken.
pub async fn bind(
    router: Router,
    addresses: &[Listen],
    network: &Network,
) -> Result<Bound, Problem> {
    let mut servers = JoinSet::new();
    for address in addresses {
        let router = router.clone();
        let refused = |e: io::Error| cannot_listen("listen on", address, &e);
        match address {
            Listen::Tcp(address) => {
                let listener = TcpListener::bind(address).await.map_err(refused)?;
                let name = address.rsplit_once(':').map(|(name, _)| name.to_owned());
                let names = name.into_iter().collect();
                let guard = Guard { names, identity: network.identity().cloned() };
                servers.spawn(connections::serve(listener, router, Limits::default(), guard));
            }
            Listen::Unix(path) => {
                let listener = bind_unix(path).await.map_err(refused)?;
                let guard = Guard::default();
                servers.spawn(connections::serve(listener, router, Limits::default(), guard));
            }
        }
    }
    Ok(Bound(servers))
}

impl Bound {
    /// Serves until the future is dropped or a listener fails.
    ///
    /// # Errors
    /// `Internal` when a listener fails.
    pub async fn serve(mut self) -> Result<(), Problem> {
        match self.0.join_next().await {
            Some(Err(error)) => Err(Problem::internal("HTTP listener", error)),
            Some(Ok(())) | None => Ok(()),
        }
    }
}

/// As [`bind`], until the future is dropped or a listener fails.
///
/// # Errors
/// As [`bind`]; `Internal` when a listener fails later.
pub async fn serve(router: Router, addresses: &[Listen], network: &Network) -> Result<(), Problem> {
    bind(router, addresses, network).await?.serve().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_was_given_is_not_given_again() {
        let port = unused_port();
        assert!(!is_taken_for_this_process(port));
    }

    #[tokio::test]
    async fn a_listener_takes_neither_a_live_socket_nor_a_file_away() {
        let dir = std::env::temp_dir().join(format!("perigee-listen-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let (socket, file) = (dir.join("socket"), dir.join("file"));
        std::fs::write(&file, "kept").expect("a file");
        let live = bind_unix(&socket).await.expect("a new socket");
        let refused = bind_unix(&socket).await.expect_err("somebody listens");
        assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
        UnixStream::connect(&socket).await.expect("the first listener still answers");
        drop(live);
        bind_unix(&socket).await.expect("what an ended process left is replaced");
        let refused = bind_unix(&file).await.expect_err("it is no socket");
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read_to_string(&file).expect("it is still there"), "kept");
        std::fs::remove_dir_all(&dir).expect("tidy up");
    }

    /// Somebody may have opened the socket for another user (setfacl).
    #[tokio::test(flavor = "multi_thread")]
    async fn a_process_of_another_user_may_not_do_everything_over_a_unix_socket() {
        use std::os::unix::fs::PermissionsExt as _;
        if !nix::unistd::geteuid().is_root() {
            eprintln!("only root can be another user");
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let open = |path: &Path| {
            let mode = std::fs::Permissions::from_mode(0o777);
            std::fs::set_permissions(path, mode).expect("a mode");
        };
        open(dir.path());
        let socket = dir.path().join("socket");
        let say = axum::routing::get(async |peer: crate::Peer| crate::Json(peer.to_string()));
        let router = crate::guard::restrict(Router::new().route("/", say), |_, _, _| false);
        let listens = [Listen::Unix(socket.clone())];
        tokio::spawn(async move { serve(router, &listens, &Network::Plain).await });
        let begun = std::time::Instant::now();
        while UnixStream::connect(&socket).await.is_err() {
            assert!(begun.elapsed().as_secs() < 60, "nobody listens");
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        open(&socket);
        let ask = async |user: &str| {
            let mut curl = tokio::process::Command::new("setpriv");
            curl.args(["--reuid", user, "--clear-groups", "curl", "-sS", "--unix-socket"]);
            let said = curl.arg(&socket).arg("http://localhost/").output().await.expect("setpriv");
            String::from_utf8_lossy(&said.stdout).into_owned()
        };
        assert_eq!(ask("0").await, "\"a process of this host\"");
        let refused = ask("12345").await;
        assert!(refused.contains("forbidden"), "{refused}");
    }

    /// A tunnel (`ssh -L`) leads a browser to a unix socket.
    #[tokio::test]
    async fn a_web_page_does_not_reach_a_unix_socket_through_a_tunnel() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let dir = tempfile::tempdir().expect("a directory");
        let socket = dir.path().join("socket");
        let say = axum::routing::get(async |peer: crate::Peer| crate::Json(peer.to_string()));
        let router = Router::new().route("/", say);
        let listens = [Listen::Unix(socket.clone())];
        tokio::spawn(async move { serve(router, &listens, &Network::Plain).await });
        let begun = std::time::Instant::now();
        while UnixStream::connect(&socket).await.is_err() {
            assert!(begun.elapsed().as_secs() < 60, "nobody listens");
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        for (headers, is_answered) in [
            ("host: localhost:7000", true),
            ("host: localhost:7000\r\norigin: http://localhost:7000", true),
            ("host: localhost:7000\r\norigin: http://evil.example", false),
            ("host: localhost:7000\r\nsec-fetch-site: cross-site", false),
            ("host: evil.example:7000", false),
        ] {
            let mut stream = UnixStream::connect(&socket).await.expect("a connection");
            let request = format!("GET / HTTP/1.1\r\n{headers}\r\nconnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.expect("sent");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.expect("an answer");
            let status = if is_answered { "HTTP/1.1 200" } else { "HTTP/1.1 403" };
            assert!(answer.starts_with(status), "{headers}: {answer}");
        }
    }

    #[test]
    fn an_address_is_a_socket_or_a_host_and_port() {
        assert_eq!("unix:/a/b".parse(), Ok(Listen::Unix("/a/b".into())));
        assert_eq!("[::1]:10809".parse(), Ok(Listen::Tcp("[::1]:10809".to_owned())));
        for bad in ["", "foo", "unix:", ":1", "/a/b", "a:b", "a:70000"] {
            assert!(bad.parse::<Listen>().is_err(), "{bad:?}");
        }
    }
}
