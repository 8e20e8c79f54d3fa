//! An S3 server that keeps its objects in files: the tests of the volume server's backups have it too. `PERIGEE_TEST_S3` names its program;
//! without it, `scripts/s3-server` builds it.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The id of the access key that it knows, and the key itself.
pub const KEY: &str = "S3RVER";
const LISTENS_MAX: Duration = Duration::from_secs(120);

/// The server's process, which is killed when this is dropped.
pub struct S3(Child);

impl S3 {
    /// A server with one bucket. Its objects are below the directory, and outlive it.
    pub async fn start(dir: &Path, bucket: &str, port: u16) -> Self {
        std::fs::create_dir_all(dir.join(bucket)).expect("a bucket");
        let mut command = Command::new(program());
        command.args(["--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args(["--access-key", KEY, "--secret-key", KEY]).arg(dir);
        let server = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let server = Self(server.expect("an S3 server"));
        let late = Instant::now() + LISTENS_MAX;
        while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
            assert!(Instant::now() < late, "waited {LISTENS_MAX:?} for the S3 server to listen");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        server
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn program() -> String {
    std::env::var("PERIGEE_TEST_S3").unwrap_or_else(|_| {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/s3-server");
        let output = Command::new(script).stderr(Stdio::inherit()).output().expect("a script");
        assert!(output.status.success(), "it builds");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    })
}
