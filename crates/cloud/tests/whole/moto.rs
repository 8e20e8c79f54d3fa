//! moto's server, which answers as EC2 does, but not in all: version 5.2.5 ignores idempotency tokens and `MaxCount`, takes unknown kinds, has no
//! quotas and no price of a machine, makes no spot requests, says that each spot price is $0.00001 since 2006, and leaves out the slash at the end
//! of its namespace.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long the slowest machine needs.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A machine image that moto has from the start.
pub const IMAGE: &str = "ami-12c6146b";

/// The directory of the programs of an environment with moto and libcloud.
pub fn programs() -> String {
    std::env::var("PERIGEE_TEST_MOTO").expect(
        "PERIGEE_TEST_MOTO names the directory of moto's programs, which scripts/moto prints; make test sets it",
    )
}

/// A server with no instances.
pub struct Moto {
    process: Child,
    /// Its port at 127.0.0.1.
    pub port: u16,
}

impl Drop for Moto {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Moto {
    pub async fn start() -> Self {
        let port = unused_port();
        let mut command = Command::new(format!("{}/moto_server", programs()));
        command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut moto = Self { process: command.spawn().expect("moto starts"), port };
        let late = Instant::now() + PATIENCE;
        while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
            let ended = moto.process.try_wait().expect("a state");
            assert!(ended.is_none(), "moto has ended: {ended:?}");
            assert!(Instant::now() < late, "not in time: moto listens");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        moto
    }
}

fn unused_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}
