//! Contents in an S3 store: a server of its own (`s3.rs`), which is killed in the middle.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_http::unused_port;
use perigee_repository::{Address, Objects, Waits};
use tempfile::TempDir;
use tokio::io::AsyncWriteExt as _;

use crate::relay::{Fate, Relay};
use crate::s3::{KEY, S3};
use crate::server::{PATIENCE, Server, content, path, run, text};

const BUCKET: &str = "files";
const PREFIX: &str = "of/perigee";

/// An S3 store with one bucket. Its objects survive a kill.
struct Store {
    server: Option<S3>,
    port: u16,
    dir: TempDir,
}

impl Store {
    async fn start() -> Self {
        let (dir, port) = (tempfile::tempdir().expect("a directory"), unused_port());
        let server = Some(S3::start(dir.path(), BUCKET, port).await);
        Self { server, port, dir }
    }

    /// SIGKILL, and a new start.
    async fn restart(&mut self) {
        drop(self.server.take());
        self.server = Some(S3::start(self.dir.path(), BUCKET, self.port).await);
    }

    async fn objects(&self) -> Arc<Objects> {
        self.objects_at(self.port, Waits::default()).await
    }

    async fn objects_at(&self, port: u16, waits: Waits) -> Arc<Objects> {
        let credentials = self.dir.path().join("credentials");
        let lines = format!("[default]\naws_access_key_id={KEY}\naws_secret_access_key={KEY}\n");
        fs::write(&credentials, lines).expect("a file");
        let endpoint = Some(format!("http://127.0.0.1:{port}"));
        let address = Address::parse(&format!("s3://{BUCKET}/{PREFIX}"), endpoint);
        let credentials = Some(credentials);
        let address = Address { credentials, waits, ..address.expect("an address") };
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

async fn status_and_text(server: &Server, arguments: &[&str], at: &str) -> (u16, String) {
    let url = format!("{}/v1/data/a/{at}", server.http);
    let mut all =
        vec!["-sS", "-i", "-w", "\n%{http_code}", "-H", "Authorization: Bearer token-of-a"];
    all.extend_from_slice(arguments);
    all.push(&url);
    let shown = text(&run("curl", &all, "").await.stdout);
    let (text, status) = shown.rsplit_once('\n').expect("a status");
    (status.parse().expect("a status"), text.to_owned())
}

/// What curl shows of a file's unfinished upload.
async fn offset(server: &Server, at: &str) -> usize {
    let (_, head) = status_and_text(server, &["-I"], at).await;
    let line = head.lines().find_map(|line| line.strip_prefix("upload-offset: "));
    line.expect("it can be continued").trim().parse().expect("a number")
}

fn is_sent(head: &str) -> bool {
    ["PUT ", "POST "].iter().any(|method| head.starts_with(method))
}

/// Threads that may block are few: whoever waits for the store must not hold one.
#[test]
fn a_store_that_is_silent_holds_up_nobody_who_does_not_need_it() {
    let clients = tokio::runtime::Runtime::new().expect("a runtime");
    let mut few = tokio::runtime::Builder::new_multi_thread();
    let few = few.max_blocking_threads(4).enable_all().build().expect("a runtime");
    let (_store, relay, server) = few.block_on(async {
        let store = Store::start().await;
        let relay = Relay::start(store.port).await;
        let objects = store.objects_at(relay.port, Waits::default()).await;
        let dir = tempfile::tempdir().expect("a directory");
        let server = Server::start_in(dir, Some(objects)).await;
        (store, relay, Arc::new(server))
    });
    clients.block_on(async {
        relay.set(|head| if is_sent(head) { Fate::Silent } else { Fate::Pass });
        let file = server.file("file", &content(100_000));
        for number in 0..12 {
            let (server, file) = (Arc::clone(&server), file.clone());
            tokio::spawn(async move {
                curl(&server, &["-T", path(&file)], &format!("in/{number}")).await
            });
        }
        until("all have their places", async || relay.waiting() >= 8).await;
        let wait = PATIENCE.as_secs().to_string();
        assert_eq!(curl(&server, &["--max-time", &wait], "in").await, 200);
    });
    few.shutdown_background();
    clients.shutdown_background();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_place_that_does_not_come_is_told_and_the_upload_goes_on_later() {
    let store = Store::start().await;
    let relay = Relay::start(store.port).await;
    let waits = Waits { place: Duration::from_secs(1), ..Waits::default() };
    let objects = store.objects_at(relay.port, waits).await;
    let dir = tempfile::tempdir().expect("a directory");
    let server = Arc::new(Server::start_in(dir, Some(objects)).await);
    relay.set(|head| if head.contains("partNumber=") { Fate::Silent } else { Fate::Pass });
    let sent = content(40 << 20);
    let file = server.file("large", &sent);
    let fill = |number: usize| {
        let (server, file) = (Arc::clone(&server), file.clone());
        async move { curl(&server, &["-T", path(&file)], &format!("{number}")).await }
    };
    let mut others = tokio::task::JoinSet::new();
    (0..4).for_each(|number| drop(others.spawn(fill(number))));
    until("8 pieces are under way", async || relay.waiting() == 8).await;
    let (status, why) = status_and_text(&server, &["-T", path(&file)], "late").await;
    assert_eq!(status, 503, "{why}");
    assert!(why.contains("none of the 8 pieces"), "{why}");
    let there = offset(&server, "late").await;
    assert!(there >= 16 << 20, "what has arrived is kept: {there}");
    relay.set(|_| Fate::Pass);
    // The others have waited, and some of them for a place.
    while let Some(status) = others.join_next().await {
        let status = status.expect("a client");
        assert!([201, 503].contains(&status), "{status}");
    }
    let from = there.to_string();
    assert_eq!(curl(&server, &["-C", &from, "-T", path(&file)], "late").await, 201);
    assert!(get(&server, "late").await == sent);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_store_refuses_at_the_end_is_not_sent_to_the_server_again() {
    let store = Store::start().await;
    let relay = Relay::start(store.port).await;
    let objects = store.objects_at(relay.port, Waits::default()).await;
    let server = Server::start_in(tempfile::tempdir().expect("a directory"), Some(objects)).await;
    relay.set(|head| if is_sent(head) { Fate::Refuse } else { Fate::Pass });
    let sent = content(100_000);
    let file = server.file("file", &sent);
    let (status, why) = status_and_text(&server, &["-T", path(&file)], "whole").await;
    assert_eq!(status, 503, "{why}");
    assert_eq!(offset(&server, "whole").await, sent.len());
    // An upload in parts.
    let sha256 = text(&run("sha256sum", &[path(&file)], "").await.stdout);
    let begin = format!(r#"{{"size_bytes": {}, "sha256": "{}"}}"#, sent.len(), &sha256[..64]);
    let (_, begun) = status_and_text(&server, &["-d", &begin], "parts?upload").await;
    let id = begun.split(r#""upload":""#).nth(1).and_then(|rest| rest.split('"').next());
    let at = format!("parts?upload={}", id.expect("an id"));
    let range = format!("Content-Range: bytes 0-{}/{}", sent.len() - 1, sent.len());
    assert_eq!(curl(&server, &["-H", &range, "-T", path(&file)], &at).await, 200);
    assert_eq!(curl(&server, &["-X", "POST"], &at).await, 503);
    relay.set(|_| Fate::Pass);
    assert_eq!(curl(&server, &["-X", "POST"], &at).await, 200);
    assert!(get(&server, "parts").await == sent);
    let from = (sent.len() - 1).to_string();
    assert_eq!(curl(&server, &["-C", &from, "-T", path(&file)], "whole").await, 201);
    assert!(get(&server, "whole").await == sent);
    store.has(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_is_whole_when_only_the_answer_was_lost() {
    let store = Store::start().await;
    let relay = Relay::start(store.port).await;
    let objects = store.objects_at(relay.port, Waits::default()).await;
    let server = Server::start_in(tempfile::tempdir().expect("a directory"), Some(objects)).await;
    let is_first = std::sync::atomic::AtomicBool::new(true);
    relay.set(move |head| {
        let is_completion = head.starts_with("POST ") && head.contains("uploadId=");
        match is_completion && is_first.swap(false, std::sync::atomic::Ordering::Relaxed) {
            true => Fate::NoAnswer,
            false => Fate::Pass,
        }
    });
    let sent = content(20 << 20);
    let file = server.file("large", &sent);
    assert_eq!(curl(&server, &["-T", path(&file)], "large").await, 201);
    assert!(get(&server, "large").await == sent);
    store.has(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_that_can_not_be_deleted_hold_up_no_other() {
    let store = Store::start().await;
    let relay = Relay::start(store.port).await;
    let objects = store.objects_at(relay.port, Waits::default()).await;
    let server = Server::start_in(tempfile::tempdir().expect("a directory"), Some(objects)).await;
    let file = server.file("file", &content(1000));
    let mut keys = std::collections::BTreeSet::new();
    for name in ["locked", "free"] {
        assert_eq!(curl(&server, &["-T", path(&file)], name).await, 201);
        if name == "locked" {
            keys.extend(store.keys().await);
        }
    }
    let locked = keys.pop_first().expect("a key");
    relay.set(move |head| {
        let is_refused = head.contains("delete") && head.contains(&locked);
        if is_refused { Fate::Refuse } else { Fate::Pass }
    });
    for name in ["locked", "free"] {
        assert_eq!(curl(&server, &["-X", "DELETE"], name).await, 200);
    }
    store.has(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_nobody_has_acknowledged_are_not_part_of_an_upload() {
    let server = Server::start().await;
    let file = server.file("begin", b"0123456789");
    let range = ["-H", "Content-Range: bytes 0-9/20", "-T", path(&file)];
    assert_eq!(curl(&server, &range, "file").await, 202);
    // As a write leaves them that has failed before its end.
    let parts = server.dir.path().join("data/tenants/a/parts");
    let part = fs::read_dir(parts).expect("parts").next().expect("a part").expect("a part");
    let mut part = fs::File::options().append(true).open(part.path()).expect("a part");
    std::io::Write::write_all(&mut part, &[b'x'; 100]).expect("it has room");
    let file = server.file("end", b"abcdefghij");
    let range = ["-H", "Content-Range: bytes 10-19/20", "-T", path(&file)];
    assert_eq!(curl(&server, &range, "file").await, 201);
    assert_eq!(text(&get(&server, "file").await), "0123456789abcdefghij");
}
