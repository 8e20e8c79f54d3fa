//! Contents in an S3 store: a server of its own, which is killed in the middle. `PERIGEE_TEST_S3` names its program; without
//! it, `scripts/s3-server` builds it.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_http::unused_port;
use perigee_repository::{Address, Objects};
use tempfile::TempDir;
use tokio::io::AsyncWriteExt as _;

use crate::server::{PATIENCE, Server, content, path, run, text};

const BUCKET: &str = "files";
const PREFIX: &str = "of/perigee";
const KEY: &str = "S3RVER";

/// An S3 store with one bucket. Its objects survive a kill.
struct Store {
    dir: TempDir,
    port: u16,
    process: Child,
}

impl Drop for Store {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn program() -> String {
    std::env::var("PERIGEE_TEST_S3").unwrap_or_else(|_| {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/s3-server");
        let output = Command::new(script).stderr(Stdio::inherit()).output().expect("a script");
        assert!(output.status.success(), "it builds");
        text(&output.stdout).trim().to_owned()
    })
}

impl Store {
    async fn start() -> Self {
        let (dir, port) = (tempfile::tempdir().expect("a directory"), unused_port());
        fs::create_dir(dir.path().join(BUCKET)).expect("a bucket");
        let process = Self::begin(&dir, port);
        let store = Self { dir, port, process };
        store.listens().await;
        store
    }

    fn begin(dir: &TempDir, port: u16) -> Child {
        let mut command = Command::new(program());
        command.args(["--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args(["--access-key", KEY, "--secret-key", KEY]).arg(dir.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("a store")
    }

    async fn listens(&self) {
        let address = ("127.0.0.1", self.port);
        until("the store listens", async || tokio::net::TcpStream::connect(address).await.is_ok())
            .await;
    }

    /// SIGKILL, and a new start.
    async fn restart(&mut self) {
        self.process.kill().expect("a kill");
        self.process.wait().expect("its end");
        self.process = Self::begin(&self.dir, self.port);
        self.listens().await;
    }

    async fn objects(&self) -> Arc<Objects> {
        let credentials = self.dir.path().with_extension("credentials");
        let lines = format!("[default]\naws_access_key_id={KEY}\naws_secret_access_key={KEY}\n");
        fs::write(&credentials, lines).expect("a file");
        let endpoint = Some(format!("http://127.0.0.1:{}", self.port));
        let address = Address::parse(&format!("s3://{BUCKET}/{PREFIX}"), endpoint);
        let address = Address { credentials: Some(credentials), ..address.expect("an address") };
        Objects::open(&address).await.expect("a store")
    }

    /// What the store answers to curl.
    async fn ask(&self, arguments: &[&str], at: &str) -> String {
        let (url, user) = (format!("http://127.0.0.1:{}/{at}", self.port), format!("{KEY}:{KEY}"));
        let mut all = vec!["-sS", "--aws-sigv4", "aws:amz:us-east-1:s3", "--user", &user];
        all.extend(["-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD"]);
        all.extend_from_slice(arguments);
        all.push(&url);
        text(&run("curl", &all, "").await.stdout)
    }

    /// The keys in one of the store's lists.
    async fn keys_of(&self, list: &str) -> Vec<String> {
        let answer = self.ask(&[], &format!("{BUCKET}{list}")).await;
        let found = answer.split("<Key>").skip(1).filter_map(|rest| rest.split('<').next());
        found.map(str::to_owned).collect()
    }

    /// The keys of all objects.
    async fn keys(&self) -> Vec<String> {
        self.keys_of("?list-type=2").await
    }

    /// Whether it has pieces of an object that is not complete. Some stores do not list them, but keep them in files.
    async fn has_pieces(&self) -> bool {
        let kept =
            run("find", &[path(self.dir.path()), "-type", "f", "-path", "*upload*"], "").await;
        !kept.stdout.is_empty() || !self.keys_of("?uploads=").await.is_empty()
    }

    /// Waits until it has so many objects, and no pieces of others.
    async fn has(&self, count: usize) {
        let is_so = async || self.keys().await.len() == count && !self.has_pieces().await;
        until("the store has what it should", is_so).await;
    }

    async fn gets_pieces(&self) {
        until("a piece is in the store", async || self.has_pieces().await).await;
    }
}

async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let late = Instant::now() + PATIENCE;
    while !is_so().await {
        assert!(Instant::now() < late, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn curl(server: &Server, arguments: &[&str], at: &str) -> u16 {
    let url = format!("{}/v1/data/a/{at}", server.http);
    let mut all = vec!["-sS", "-w", "\n%{http_code}", "-H", "Authorization: Bearer token-of-a"];
    all.extend_from_slice(arguments);
    all.push(&url);
    let shown = text(&run("curl", &all, "").await.stdout);
    let status = shown.rsplit('\n').next().unwrap_or_default();
    status.parse().expect("a status")
}

async fn get(server: &Server, at: &str) -> Vec<u8> {
    let to = server.dir.path().join("got");
    assert_eq!(curl(server, &["-o", path(&to)], at).await, 200, "{at}");
    fs::read(to).expect("it came")
}

#[tokio::test(flavor = "multi_thread")]
async fn contents_are_in_the_store_and_names_on_the_disk() {
    let store = Store::start().await;
    let dir = tempfile::tempdir().expect("a directory");
    let server = Server::start_in(dir, Some(store.objects().await)).await;
    // In one request, in pieces, and no content at all.
    let (small, large) = (content(100_000), content(40 << 20));
    for (name, content) in [("small", &small[..]), ("large", &large), ("empty", b"")] {
        let file = server.file(name, content);
        assert_eq!(curl(&server, &["-T", path(&file)], &format!("in/{name}")).await, 201);
        assert!(get(&server, &format!("in/{name}")).await == content, "{name}");
        let metadata = fs::metadata(server.stored("a", &format!("in/{name}"))).expect("a file");
        assert_eq!(metadata.len(), content.len() as u64, "{name}");
        // Its attributes may need some.
        assert!(metadata.blocks() * 512 <= 8192, "{name} is still on the disk");
    }
    store.has(2).await;
    let got = server.dir.path().join("part");
    assert_eq!(
        curl(&server, &["-r", "20000000-20000999", "-o", path(&got)], "in/large").await,
        206
    );
    assert!(fs::read(&got).expect("it came") == large[20_000_000..20_001_000]);
    // A file that is replaced, and one that is deleted, take their objects with them; a rename changes none.
    let file = server.file("small", &large[..5_000]);
    assert_eq!(curl(&server, &["-T", path(&file)], "in/small").await, 201);
    assert_eq!(curl(&server, &["-X", "POST"], "in/small?rename=in/other").await, 200);
    assert_eq!(curl(&server, &["-X", "DELETE"], "in/large").await, 200);
    store.has(1).await;
    assert!(get(&server, "in/other").await == large[..5_000]);
    // Damage in the store is found before the last bytes.
    let key = store.keys().await.remove(0);
    assert!(key.starts_with(&format!("{PREFIX}/a/")), "{key}");
    let damaged = server.file("damaged", &large[1..5_001]);
    store.ask(&["-T", path(&damaged)], &format!("{BUCKET}/{key}")).await;
    let url = format!("{}/v1/data/a/in/other", server.http);
    let token = ["-H", "Authorization: Bearer token-of-a", "-o", path(&got)];
    let cut = run("curl", &[&["-sS"][..], &token, &[&url]].concat(), "").await;
    assert!(!cut.status.success() && fs::metadata(&got).map_or(0, |got| got.len()) < 5_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn transfers_go_on_when_the_store_was_killed() {
    let mut store = Store::start().await;
    let dir = tempfile::tempdir().expect("a directory");
    let server = Server::start_in(dir, Some(store.objects().await)).await;
    let sent = content(80 << 20);
    let file = server.file("large", &sent);
    let send = ["--limit-rate", "20M", "-T", path(&file)];
    let (put, ()) = tokio::join!(curl(&server, &send, "large"), async {
        store.gets_pieces().await;
        store.restart().await;
    });
    assert_eq!(put, 201);
    let got = server.dir.path().join("slow");
    let fetch = ["--limit-rate", "20M", "-o", path(&got)];
    let (fetched, ()) = tokio::join!(curl(&server, &fetch, "large"), async {
        until("some of it has come", async || fs::metadata(&got).is_ok_and(|m| m.len() > 0)).await;
        store.restart().await;
    });
    assert_eq!(fetched, 200);
    assert!(fs::read(&got).expect("it came") == sent);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_was_killed_leaves_no_object_that_nobody_names() {
    let store = Store::start().await;
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path().to_owned();
    let server = Server::start_in(dir, Some(store.objects().await)).await;
    let sent = content(50 << 20);
    let kept = server.file("kept", b"kept");
    assert_eq!(curl(&server, &["-T", path(&kept)], "kept").await, 201);
    // A client that has sent 40 MiB, and waits.
    let address = server.http.trim_start_matches("http://").to_owned();
    let mut client = tokio::net::TcpStream::connect(address).await.expect("it listens");
    let head = format!(
        "PUT /v1/data/a/large HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer token-of-a\r\nContent-Length: {}\r\n\r\n",
        server.http.trim_start_matches("http://"),
        sent.len()
    );
    client.write_all(head.as_bytes()).await.expect("it reads");
    client.write_all(&sent[..40 << 20]).await.expect("it reads");
    store.gets_pieces().await;
    // As after a kill: the first server does nothing more, and another one begins with what it has left.
    let other = tempfile::tempdir().expect("a directory");
    let copied = Command::new("cp").arg("-a").arg(at.join("data")).arg(other.path()).status();
    assert!(copied.expect("cp").success());
    let again = Server::start_in(other, Some(store.objects().await)).await;
    assert!(get(&again, "kept").await == b"kept");
    store.has(1).await;
    let file = again.file("large", &sent);
    let continued = ["-C", "33554432", "-T", path(&file)];
    assert_eq!(curl(&again, &continued, "large").await, 201, "it goes on");
    assert!(get(&again, "large").await == sent);
    store.has(2).await;
}
