//! The WebDAV door with litmus, which tests servers, and with what clients must not be able to do.

use std::fs;
use std::time::{Duration, UNIX_EPOCH};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::http::Curl;
use crate::server::{Server, path, run, text};

/// All of its suites: basic, copymove, props, locks and http.
#[tokio::test(flavor = "multi_thread")]
async fn litmus_finds_nothing() {
    let server = Server::start().await;
    // It writes its log where it runs.
    let script = format!(
        "cd {} && litmus -k {}/dav/a/ any token-of-a",
        path(server.dir.path()),
        server.http
    );
    let output = run("sh", &["-c", &script], "").await;
    let shown = text(&output.stdout);
    for suite in ["basic", "copymove", "props", "locks", "http"] {
        assert!(shown.contains(&format!("<- summary for `{suite}'")), "{suite} did not run");
    }
    assert!(output.status.success() && !shown.contains("FAIL"), "{shown}");
    // What comes after a `#` hyper drops; of a property that is not there the library says nothing.
    let known = ["URI including fragment", "omitted from results with no status"];
    let lines = shown.split(['\n', '\r']);
    let warnings = lines.filter(|line| line.contains("WARNING") || line.contains("SKIPPED"));
    for warning in warnings {
        assert!(known.iter().any(|known| warning.contains(known)), "{warning}");
    }
}

/// The first line of the answer to a request as it stands; nothing if the connection ends without one.
async fn raw(server: &Server, request: &[u8]) -> String {
    let address = server.http.strip_prefix("http://").expect("an address");
    let mut stream = TcpStream::connect(address).await.expect("it listens");
    stream.write_all(request).await.expect("it reads");
    let mut answer = Vec::new();
    // It may be reset after the answer.
    let _ = stream.read_to_end(&mut answer).await;
    text(&answer).lines().next().unwrap_or_default().to_owned()
}

fn request(method: &str, at: &str, header: &[u8], body: &[u8]) -> Vec<u8> {
    let head = format!(
        "{method} {at} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer token-of-a\r\nConnection: close\r\n\
         Depth: 0\r\nDestination: /dav/a/other\r\nContent-Length: {}\r\n",
        body.len()
    );
    [head.as_bytes(), header, b"\r\n\r\n", body].concat()
}

/// The library reads past the end of such headers, or takes them for none.
#[tokio::test(flavor = "multi_thread")]
async fn a_condition_that_ends_early_is_refused_and_nothing_is_changed() {
    let server = Server::start().await;
    let put = request("PUT", "/dav/a/f", b"X-Nothing: 0", b"as it was");
    assert!(raw(&server, &put).await.contains("201"));
    for header in [
        &b"If: (<a"[..],
        b"If: (<",
        b"If: <",
        b"If: [",
        b"If: ([\"",
        b"If: ([\"]",
        b"If: (<a:\"b>)",
        b"If: nothing",
        b"If: (<a:b>)\r\nIf: (<a:b>)",
        b"If: \xff",
        b"If-Match: \"",
        b"If-Match: W/\"",
        b"If-Match: \xff",
        b"If-None-Match: \"",
        b"If-None-Match: \"a\", \"",
        b"If-Range: \"",
        b"If-Range: W/\"",
    ] {
        for method in ["GET", "PUT", "DELETE", "MOVE", "COPY", "PROPPATCH", "LOCK", "MKCOL"] {
            let body = if method == "PUT" { &b"changed"[..] } else { b"" };
            let answer = raw(&server, &request(method, "/dav/a/f", header, body)).await;
            assert!(answer.contains(" 400 "), "{method} {}: {answer}", text(header));
        }
    }
    assert_eq!(fs::read(server.stored("a", "f")).expect("a file"), b"as it was");
    // One that does not hold, and one that does.
    for (header, status) in [
        (&b"If: (<urn:uuid:0>)"[..], " 412 "),
        (b"If: </dav/a/f> ([\"0\"])", " 412 "),
        (b"If-Match: \"0\"", " 412 "),
        (b"If-None-Match: *", " 412 "),
        (b"If: (Not <urn:uuid:0>)", " 204 "),
    ] {
        let answer = raw(&server, &request("PUT", "/dav/a/f", header, b"changed")).await;
        assert!(answer.contains(status), "{}: {answer}", text(header));
    }
}

/// The library builds trees by recursion: with 1,000 elements in each other it ended the whole process.
#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_nests_deep_is_refused() {
    let server = Server::start().await;
    let deep = ["<a>".repeat(9000), "</a>".repeat(9000)].concat();
    let deep = deep.as_bytes();
    let inside = [
        &b"<D:propertyupdate xmlns:D=\"DAV:\"><D:set><D:prop>"[..],
        deep,
        b"</D:prop></D:set></D:propertyupdate>",
    ]
    .concat();
    for method in ["PROPFIND", "PROPPATCH", "LOCK"] {
        for body in [deep, &inside] {
            let answer = raw(&server, &request(method, "/dav/a/", b"X-Nothing: 0", body)).await;
            assert!(answer.contains(" 400 "), "{method}: {answer}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_or_a_move_replaces_what_is_there_unless_it_is_told_not_to() {
    let server = Server::start().await;
    let curl = Curl { server: &server, token: "token-of-a" };
    let put = async |at: &str| {
        let file = server.file("sent", at.as_bytes());
        assert!(curl.ask(&["-T", path(&file)], &format!("/v1/data/a/{at}")).await.0 < 300);
    };
    let ask = async |method: &str, from: &str, to: &str, more: &[&str]| {
        let to = format!("Destination: {}/dav/{to}", server.http);
        let all = [&["-X", method, "-H", &to], more].concat();
        curl.ask(&all, &format!("/dav/{from}")).await.0
    };
    let read = |at: &str| fs::read_to_string(server.stored("a", at)).ok();
    for at in ["f", "g", "d/old", "e/new"] {
        put(at).await;
    }
    for method in ["MOVE", "COPY"] {
        assert_eq!(ask(method, "a/f", "a/g", &["-H", "Overwrite: F"]).await, 412);
        assert_eq!(ask(method, "a/f", "a/g", &["-H", "Overwrite: f"]).await, 400);
        // One in the other, all of a tenant's files, and another tenant's.
        for (from, to) in
            [("a/d", "a/d/old"), ("a/d/old", "a/d"), ("a/d", "a/d/in"), ("a/d", "a"), ("a/f", "")]
        {
            assert_eq!(ask(method, from, to, &[]).await, 403, "{method} {from} {to}");
        }
        assert!((400..500).contains(&ask(method, "a/f", "b/f", &[]).await));
        assert_eq!(ask(method, "a/nothing", "a/g", &[]).await, 404);
        assert_eq!(ask(method, "a/f", "a/nowhere/g", &[]).await, 409);
    }
    assert_eq!((read("g").as_deref(), read("d/old").as_deref()), (Some("g"), Some("d/old")));
    assert_eq!(ask("COPY", "a/f", "a/g", &[]).await, 204);
    assert_eq!(read("g").as_deref(), Some("f"));
    assert_eq!(ask("MOVE", "a/g", "a/d/old", &["-H", "Overwrite: T"]).await, 204);
    assert_eq!((read("g"), read("d/old").as_deref()), (None, Some("f")));
    // A directory takes the place of all that was there.
    assert_eq!(ask("COPY", "a/e", "a/d", &[]).await, 204);
    assert_eq!((read("d/old"), read("d/new").as_deref()), (None, Some("e/new")));
    assert_eq!(ask("MOVE", "a/e", "a/d", &[]).await, 204);
    assert_eq!((read("e/new"), read("d/new").as_deref()), (None, Some("e/new")));
    assert_eq!(ask("MOVE", "a/f", "a/d", &[]).await, 204);
    assert_eq!(read("d").as_deref(), Some("f"));
    // With `..`, too, nobody deletes all by mistake.
    assert_eq!(curl.ask(&["--path-as-is", "-X", "DELETE"], "/dav/a/d/%2e%2e/").await.0, 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn times_are_kept_over_http_and_webdav() {
    let server = Server::start().await;
    let curl = Curl { server: &server, token: "token-of-a" };
    let file = server.file("sent", b"content");
    let time = |at: &str| {
        let time = fs::metadata(server.stored("a", at)).and_then(|found| found.modified());
        time.expect("a time").duration_since(UNIX_EPOCH).expect("later")
    };
    let said = ["-T", path(&file), "-H", "X-OC-Mtime: 1000000000.5"];
    for (door, at) in [("/v1/data/a", "h"), ("/dav/a", "d")] {
        let (status, head) =
            curl.ask(&[&["-D", "-"][..], &said].concat(), &format!("{door}/{at}")).await;
        assert_eq!(status, 201, "{head}");
        assert_eq!(time(at), Duration::from_millis(1_000_000_000_500), "{door}");
        let (_, head) = curl.ask(&["-I"], &format!("{door}/{at}")).await;
        let head = head.to_ascii_lowercase();
        assert!(head.contains("last-modified: sun, 09 sep 2001 01:46:40 gmt"), "{head}");
        let since = ["-H", "If-Modified-Since: Sun, 09 Sep 2001 01:46:40 GMT"];
        assert_eq!(curl.ask(&since, &format!("{door}/{at}")).await.0, 304);
        let wrong = ["-T", path(&file), "-H", "X-OC-Mtime: now"];
        assert_eq!(curl.ask(&wrong, &format!("{door}/{at}")).await.0, 400);
    }
    assert_eq!(curl.ask(&["-X", "POST"], "/v1/data/a/h?modified=1100000000").await.0, 200);
    assert_eq!(time("h").as_secs(), 1_100_000_000);
    assert_eq!(curl.ask(&["-X", "POST"], "/v1/data/b/h?modified=1").await.0, 404);
    let patch = |property: &str| {
        format!(
            "<D:propertyupdate xmlns:D=\"DAV:\" xmlns:Z=\"urn:schemas-microsoft-com:\"><D:set><D:prop>{property}\
             </D:prop></D:set></D:propertyupdate>"
        )
    };
    for (property, then) in [
        ("<D:getlastmodified>Sun, 06 Nov 1994 08:49:37 GMT</D:getlastmodified>", 784_111_777),
        ("<lastmodified xmlns=\"DAV:\">1200000000</lastmodified>", 1_200_000_000),
        (
            "<Z:Win32LastModifiedTime>Sun, 06 Nov 1994 08:49:37 GMT</Z:Win32LastModifiedTime>",
            784_111_777,
        ),
    ] {
        let all = ["-X", "PROPPATCH", "--data-binary", &patch(property)];
        let (status, answer) = curl.ask(&all, "/dav/a/d").await;
        assert!(status == 207 && answer.contains("200 OK"), "{answer}");
        assert_eq!(time("d").as_secs(), then, "{property}");
    }
    // All or nothing.
    let wrong = patch("<x xmlns=\"urn:x\">y</x><D:getlastmodified>now</D:getlastmodified>");
    let (status, answer) =
        curl.ask(&["-X", "PROPPATCH", "--data-binary", &wrong], "/dav/a/d").await;
    assert!(status == 207 && answer.contains("409") && answer.contains("424"), "{answer}");
    let (_, noted) = curl.ask(&["-X", "PROPFIND", "-H", "Depth: 0"], "/dav/a/d").await;
    assert!(!noted.contains("urn:x"), "{noted}");
}

/// What a client notes stays with the file when another client writes it.
#[tokio::test(flavor = "multi_thread")]
async fn notes_stay_with_a_file_and_have_a_limit() {
    let server = Server::start().await;
    let curl = Curl { server: &server, token: "token-of-a" };
    let file = server.file("sent", b"content");
    assert_eq!(curl.ask(&["-T", path(&file)], "/dav/a/f").await.0, 201);
    let note = async |text: &str| {
        let body = format!(
            "<D:propertyupdate xmlns:D=\"DAV:\"><D:set><D:prop><x xmlns=\"urn:x\">{text}</x></D:prop></D:set>\
             </D:propertyupdate>"
        );
        curl.ask(&["-X", "PROPPATCH", "--data-binary", &body], "/dav/a/f").await.1
    };
    assert!(note("noted").await.contains("200 OK"));
    assert!(note(&"n".repeat(3000)).await.contains("507"));
    assert_eq!(curl.ask(&["-T", path(&file)], "/v1/data/a/f").await.0, 201);
    let to = format!("Destination: {}/dav/a/g", server.http);
    assert_eq!(curl.ask(&["-X", "COPY", "-H", &to], "/dav/a/f").await.0, 201);
    for at in ["/dav/a/f", "/dav/a/g"] {
        let (_, noted) = curl.ask(&["-X", "PROPFIND", "-H", "Depth: 0"], at).await;
        assert!(noted.contains(">noted<"), "{at}: {noted}");
    }
}

/// A lock keeps other clients from changing a file, and nobody locks what he may only read.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_keeps_others_out_and_only_who_may_write_has_one() {
    let server = Server::start().await;
    let (ann, bob) = (
        Curl { server: &server, token: "token-of-a" },
        Curl { server: &server, token: "token-of-b" },
    );
    let file = server.file("sent", b"content");
    assert_eq!(ann.ask(&["-T", path(&file)], "/dav/a/f").await.0, 201);
    assert_eq!(ann.ask(&["-X", "PUT"], "/v1/data/a/f?share=b").await.0, 200);
    let body = "<D:lockinfo xmlns:D=\"DAV:\"><D:lockscope><D:exclusive/></D:lockscope><D:locktype><D:write/></D:locktype>\
                </D:lockinfo>";
    let lock = ["-X", "LOCK", "--data-binary", body, "-D", "-"];
    assert_eq!(bob.ask(&lock, "/dav/a/f").await.0, 403);
    assert_eq!(bob.ask(&lock, "/dav/a/g").await.0, 404);
    let (status, head) = ann.ask(&lock, "/dav/a/f").await;
    assert_eq!(status, 200, "{head}");
    let token = head.lines().find_map(|line| line.strip_prefix("lock-token: ")).expect("a token");
    let put = ["-T", path(&file)];
    assert_eq!(ann.ask(&put, "/dav/a/f").await.0, 423);
    assert_eq!(ann.ask(&["-X", "DELETE"], "/dav/a/f").await.0, 423);
    let known = format!("If: ({})", token.trim());
    assert_eq!(ann.ask(&[&put[..], &["-H", &known]].concat(), "/dav/a/f").await.0, 204);
    // The other doors write whole files, as ever.
    assert_eq!(ann.ask(&put, "/v1/data/a/f").await.0, 201);
    let unlock = format!("Lock-Token: {}", token.trim());
    assert_eq!(ann.ask(&["-X", "UNLOCK", "-H", &unlock], "/dav/a/f").await.0, 204);
    assert_eq!(ann.ask(&put, "/dav/a/f").await.0, 204);
}
