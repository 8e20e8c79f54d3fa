//! The HTTP and WebDAV doors with curl.

use crate::server::{Server, content, cut_download, path, run, text};

pub struct Curl<'a> {
    pub server: &'a Server,
    pub token: &'a str,
}

impl Curl<'_> {
    /// What curl shows, and the status of the answer.
    pub async fn ask(&self, arguments: &[&str], url: &str) -> (u16, String) {
        let url = format!("{}{url}", self.server.http);
        let token = format!("Authorization: Bearer {}", self.token);
        let mut all = vec!["-sS", "-w", "\n%{http_code}", "-H", &token];
        all.extend_from_slice(arguments);
        all.push(&url);
        let output = run("curl", &all, "").await;
        let shown = text(&output.stdout);
        let (body, status) = shown.rsplit_once('\n').expect("a status");
        (status.parse().expect("a number"), body.to_owned())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn curl_uploads_reads_ranges_lists_renames_and_deletes() {
    let server = Server::start().await;
    let curl = Curl { server: &server, token: "token-of-a" };
    let sent = content(300_000);
    let file = server.file("sent", &sent);
    let (status, entry) = curl.ask(&["-T", path(&file)], "/v1/data/a/in/sub%20dir/f").await;
    assert_eq!(status, 201, "{entry}");
    assert_eq!(std::fs::read(server.stored("a", "in/sub dir/f")).expect("it is stored"), sent);
    let to = server.dir.path().join("got");
    let (status, _) = curl.ask(&["-o", path(&to)], "/v1/data/~/in/sub%20dir/f").await;
    assert_eq!((status, std::fs::read(&to).expect("it came")), (200, sent.clone()));
    let (status, _) =
        curl.ask(&["-r", "1000-1999", "-o", path(&to)], "/v1/data/a/in/sub%20dir/f").await;
    assert_eq!((status, std::fs::read(&to).expect("it came")), (206, sent[1000..2000].to_vec()));
    let (_, head) = curl.ask(&["-I"], "/v1/data/a/in/sub%20dir/f").await;
    let sha256 = serde_json::from_str::<serde_json::Value>(&entry).expect("JSON")["sha256"].clone();
    let etag = format!("etag: \"{}\"", sha256.as_str().expect("a hash"));
    assert!(head.contains(&etag) && head.contains("content-length: 300000"), "{head}");
    let known = format!("If-None-Match: \"{}\"", sha256.as_str().expect("a hash"));
    assert_eq!(curl.ask(&["-H", &known], "/v1/data/a/in/sub%20dir/f").await.0, 304);
    let (_, list) = curl.ask(&[], "/v1/data/a/in").await;
    assert!(list.contains("\"sub dir\"") && list.contains("\"directory\""), "{list}");
    let (status, _) = curl.ask(&["-X", "POST"], "/v1/data/a/in/sub%20dir/f?rename=in/g").await;
    assert_eq!(status, 200);
    assert_eq!(curl.ask(&["-X", "DELETE"], "/v1/data/a/in/sub%20dir").await.0, 200);
    assert_eq!(curl.ask(&["-X", "DELETE"], "/v1/data/a/in/g").await.0, 200);
    let (status, problem) = curl.ask(&[], "/v1/data/a/in/g").await;
    assert_eq!(status, 404, "{problem}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_goes_on_only_where_it_has_ended() {
    let server = Server::start().await;
    let curl = Curl { server: &server, token: "token-of-a" };
    let sent = content(400_000);
    let file = server.file("sent", &sent);
    let beginning = server.file("beginning", &sent[..150_000]);
    let part = ["-H", "Content-Range: bytes 0-149999/400000", "-T", path(&beginning)];
    let (status, _) = curl.ask(&part, "/v1/data/a/f").await;
    assert_eq!(status, 202, "it is not complete");
    assert_eq!(curl.ask(&[], "/v1/data/a/f").await.0, 404, "it has no name yet");
    let (_, head) = curl.ask(&["-I"], "/v1/data/a/f").await;
    assert!(head.contains("upload-offset: 150000"), "{head}");
    let (status, problem) = curl.ask(&["-C", "160000", "-T", path(&file)], "/v1/data/a/f").await;
    assert_eq!(status, 409, "{problem}");
    let (status, entry) = curl.ask(&["-C", "150000", "-T", path(&file)], "/v1/data/a/f").await;
    assert_eq!(status, 201, "{entry}");
    assert_eq!(std::fs::read(server.stored("a", "f")).expect("it is stored"), sent);
}

/// A door whose protocol does not say how long a file will be: its end is the end of the body.
#[tokio::test(flavor = "multi_thread")]
async fn an_upload_goes_on_at_an_offset_without_a_known_end() {
    let server = Server::start().await;
    let curl = Curl { server: &server, token: "token-of-a" };
    let sent = content(400_000);
    let part = server.file("part", &sent[..150_000]);
    let begin = ["-H", "Content-Range: bytes 0-149999/400000", "-T", path(&part)];
    assert_eq!(curl.ask(&begin, "/v1/data/a/f").await.0, 202);
    let rest = server.file("rest", &sent[140_000..]);
    for (refused, status) in
        [("150001", 409), ("-1", 400), ("+1", 400), ("x", 400), ("99999999999999999999", 400)]
    {
        let offset = format!("Upload-Offset: {refused}");
        let put = ["-H", &offset, "-T", path(&rest)];
        assert_eq!(curl.ask(&put, "/v1/data/a/f").await.0, status, "{refused}");
    }
    let both = ["-H", "Upload-Offset: 1", "-H", "Content-Range: bytes 1-2/3", "-T", path(&rest)];
    assert_eq!(curl.ask(&both, "/v1/data/a/f").await.0, 400);
    let chunked = ["-H", "Upload-Offset: 140000", "-H", "Transfer-Encoding: chunked"];
    let put = [&chunked[..], &["-T", path(&rest)]].concat();
    let (status, entry) = curl.ask(&put, "/v1/data/a/f").await;
    assert_eq!(status, 201, "{entry}");
    assert!(std::fs::read(server.stored("a", "f")).expect("it is stored") == sent);
}

#[tokio::test(flavor = "multi_thread")]
async fn curl_goes_on_with_uploads_and_fetches_over_http_that_were_cut() {
    let server = Server::start().await;
    let curl = Curl { server: &server, token: "token-of-a" };
    let sent = content(6_000_000);
    let (file, got) = (server.file("sent", &sent), server.dir.path().join("got"));
    let url = format!("{}/v1/data/a/f", server.http);
    let slow = || {
        let mut slow = tokio::process::Command::new("curl");
        let token = "Authorization: Bearer token-of-a";
        slow.args(["-sS", "--limit-rate", "200k", "-H", token, &url]);
        slow
    };
    server.cut_upload(slow().args(["-T", path(&file)]), "").await;
    let until = std::time::Instant::now() + crate::server::PATIENCE;
    let offset = loop {
        let (_, head) = curl.ask(&["-I"], "/v1/data/a/f").await;
        if let Some((_, offset)) = head.split_once("upload-offset: ") {
            break offset.lines().next().expect("a line").trim().to_owned();
        }
        assert!(std::time::Instant::now() < until, "what has arrived is kept: {head}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    };
    let kept: usize = offset.parse().expect("a number");
    assert!(kept > 0 && kept < sent.len(), "{kept}");
    assert_eq!(curl.ask(&[], "/v1/data/a/f").await.0, 404, "it has no name yet");
    let (status, why) = curl.ask(&["-C", &offset, "-T", path(&file)], "/v1/data/a/f").await;
    assert_eq!(status, 201, "{why}");
    assert!(std::fs::read(server.stored("a", "f")).expect("it is stored") == sent);
    cut_download(slow().args(["-o", path(&got)]), "", (&got, &sent)).await;
    assert_eq!(curl.ask(&["-C", "-", "-o", path(&got)], "/v1/data/a/f").await.0, 206);
    assert!(std::fs::read(&got).expect("it came") == sent);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_leads_out_and_what_is_anothers_is_not_there() {
    let server = Server::start().await;
    let file = server.file("sent", b"secret");
    let a = Curl { server: &server, token: "token-of-a" };
    assert_eq!(a.ask(&["-T", path(&file)], "/v1/data/a/f").await.0, 201);
    let b = Curl { server: &server, token: "token-of-b" };
    let (status, theirs) = b.ask(&[], "/v1/data/a/f").await;
    let (same, nobodys) = b.ask(&[], "/v1/data/c/f").await;
    assert_eq!((status, same), (404, 404));
    assert_eq!(theirs.replace("//a/", "//c/"), nobodys);
    for url in [
        "/v1/data/b/../a/f",
        "/v1/data/b/%2e%2e/a/f",
        "/v1/data/b/..%2fa%2ff",
        "/v1/data/b/x%00",
        "/v1/data/b/%ff",
        "/dav/b/../a/f",
        "/dav/b/%2e%2e/a/f",
        "/dav/b/%2e%2e%2fa/f",
    ] {
        for how in [&["--path-as-is"][..], &["--path-as-is", "-T", path(&file)]] {
            let (status, answer) = b.ask(how, url).await;
            assert!((400..500).contains(&status), "{url}: {status} {answer}");
            assert!(!answer.contains("secret"), "{url}");
        }
    }
    assert_eq!(std::fs::read(server.stored("a", "f")).expect("it is there"), b"secret");
    assert_eq!(b.ask(&["-X", "PUT"], "/v1/data/a/f?share=b").await.0, 404);
    assert_eq!(a.ask(&["-X", "PUT"], "/v1/data/a/f?share=b").await.0, 200);
    assert_eq!(b.ask(&[], "/v1/data/a/f").await, (200, "secret".to_owned()));
    assert_eq!(b.ask(&["-T", path(&file)], "/v1/data/a/f").await.0, 403);
    let nobody = Curl { server: &server, token: "wrong" };
    assert_eq!(nobody.ask(&[], "/v1/data/a/f").await.0, 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_in_any_order_become_one_file_that_is_checked() {
    let server = Server::start().await;
    let curl = Curl { server: &server, token: "token-of-a" };
    let sent = content(90_000);
    let file = server.file("sent", &sent);
    let hashed = run("sha256sum", &[path(&file)], "").await;
    let sha256 = text(&hashed.stdout).split(' ').next().expect("a hash").to_owned();
    let begin = format!("{{\"size_bytes\": 90000, \"sha256\": \"{sha256}\"}}");
    // Twice as much as a quota without a limit has would be nothing at all.
    let endless = begin.replace("90000", "18446744073709551615");
    let (status, why) = curl.ask(&["-d", &endless], "/v1/data/a/f?upload").await;
    assert_eq!(status, 400, "{why}");
    let (status, state) = curl.ask(&["-d", &begin], "/v1/data/a/f?upload").await;
    assert_eq!(status, 200, "{state}");
    let state: serde_json::Value = serde_json::from_str(&state).expect("JSON");
    let url = format!("/v1/data/a/f?upload={}", state["upload"].as_str().expect("an id"));
    for (from, until) in [(60_000, 90_000), (0, 30_000)] {
        let part = server.file("part", &sent[from..until]);
        let range = format!("Content-Range: bytes {from}-{}/90000", until - 1);
        assert_eq!(curl.ask(&["-H", &range, "-T", path(&part)], &url).await.0, 200);
    }
    assert_eq!(curl.ask(&["-X", "POST"], &url).await.0, 409, "a part is missing");
    let (_, again) = curl.ask(&["-d", &begin], "/v1/data/a/f?upload").await;
    let again: serde_json::Value = serde_json::from_str(&again).expect("JSON");
    assert_eq!(again["upload"], state["upload"], "the same upload goes on");
    assert_eq!(again["parts"], serde_json::json!([[0, 30_000], [60_000, 90_000]]));
    let part = server.file("part", &sent[30_000..60_000]);
    let range = "Content-Range: bytes 30000-59999/90000";
    assert_eq!(curl.ask(&["-H", range, "-T", path(&part)], &url).await.0, 200);
    assert_eq!(curl.ask(&["-X", "POST"], &url).await.0, 200);
    assert_eq!(std::fs::read(server.stored("a", "f")).expect("it is stored"), sent);
}

#[tokio::test(flavor = "multi_thread")]
async fn webdav_lists_writes_moves_copies_and_deletes() {
    let server = Server::start().await;
    let curl = Curl { server: &server, token: "token-of-a" };
    let sent = content(200_000);
    let file = server.file("sent", &sent);
    assert_eq!(curl.ask(&["-X", "MKCOL"], "/dav/a/dir").await.0, 201);
    assert_eq!(curl.ask(&["-T", path(&file)], "/dav/a/dir/f").await.0, 201);
    assert_eq!(curl.ask(&["-T", path(&file)], "/dav/a/nowhere/f").await.0, 409);
    let (status, list) = curl.ask(&["-X", "PROPFIND", "-H", "Depth: 1"], "/dav/a/dir/").await;
    assert_eq!(status, 207, "{list}");
    assert!(list.contains("/dav/a/dir/f") && list.contains("200000"), "{list}");
    let (status, _) = curl.ask(&["-X", "PROPFIND", "-H", "Depth: infinity"], "/dav/a/").await;
    assert_eq!(status, 403, "a list of a whole tree has no limit");
    let to = format!("Destination: {}/dav/a/dir/g", server.http);
    assert_eq!(curl.ask(&["-X", "COPY", "-H", &to], "/dav/a/dir/f").await.0, 201);
    let to = format!("Destination: {}/dav/a/h", server.http);
    assert_eq!(curl.ask(&["-X", "MOVE", "-H", &to], "/dav/a/dir/g").await.0, 201);
    assert_eq!(std::fs::read(server.stored("a", "h")).expect("it is stored"), sent);
    for whole in ["/dav/a", "/dav/a/", "/dav", "/dav/"] {
        assert_eq!(curl.ask(&["-X", "DELETE"], whole).await.0, 403, "{whole}");
    }
    for kept in ["h", "dir/f"] {
        assert_eq!(std::fs::read(server.stored("a", kept)).expect("it is still there"), sent);
    }
    let (status, part) = curl.ask(&["-r", "0-9"], "/dav/a/h").await;
    assert_eq!((status, part.is_empty()), (206, false));
    assert_eq!(curl.ask(&["-X", "DELETE"], "/dav/a/dir").await.0, 204);
    assert!(!server.stored("a", "dir").exists());
    assert_eq!(curl.ask(&[], "/dav/b/h").await.0, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_replaced_only_if_it_is_what_the_client_expects() {
    let server = Server::start().await;
    let curl = Curl { server: &server, token: "token-of-a" };
    let (one, two) = (server.file("one", b"one"), server.file("two", b"two"));
    let new = ["-H", "If-None-Match: *", "-T"];
    for door in ["/v1/data/a", "/dav/a"] {
        let at = &format!("{door}/f");
        assert_eq!(curl.ask(&[&new[..], &[path(&one)]].concat(), at).await.0, 201);
        assert_eq!(curl.ask(&[&new[..], &[path(&two)]].concat(), at).await.0, 412);
        let (_, head) = curl.ask(&["-I"], at).await;
        let tag = head.lines().find_map(|line| line.strip_prefix("etag: ")).expect("a tag").trim();
        let (same, other) = (format!("If-Match: {tag}"), "If-Match: \"0\"".to_owned());
        assert_eq!(curl.ask(&["-H", &other, "-T", path(&two)], at).await.0, 412);
        assert_eq!(curl.ask(&["-H", &other, "-X", "DELETE"], at).await.0, 412);
        assert_eq!(std::fs::read(server.stored("a", "f")).expect("it is there"), b"one");
        assert!(curl.ask(&["-H", &same, "-T", path(&two)], at).await.0 < 300);
        assert_eq!(curl.ask(&["-H", &same, "-X", "DELETE"], at).await.0, 412);
        assert!(curl.ask(&["-X", "DELETE"], at).await.0 < 300);
    }
}

/// Whoever opens another user's file in a browser would run its scripts with its own rights here.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_no_page_in_a_browser() {
    let server = Server::start().await;
    let curl = Curl { server: &server, token: "token-of-a" };
    let file = server.file("sent", b"<script>alert(1)</script>");
    for name in ["page.html", "picture.svg", "text.xml", "plain"] {
        assert_eq!(curl.ask(&["-T", path(&file)], &format!("/dav/a/{name}")).await.0, 201);
        for door in ["/dav", "/v1/data"] {
            for how in [&["-D", "-", "-o", "/dev/null"][..], &["-I"]] {
                let (status, head) = curl.ask(how, &format!("{door}/a/{name}")).await;
                assert_eq!(status, 200, "{head}");
                let head = head.to_ascii_lowercase();
                for part in
                    ["content-type: application/octet-stream", "x-content-type-options: nosniff"]
                {
                    assert!(head.contains(part), "{door} {name} {how:?}: {head}");
                }
                assert!(door != "/dav" || head.contains("content-security-policy: sandbox"));
            }
        }
    }
    let (status, list) =
        curl.ask(&["-D", "-", "-X", "PROPFIND", "-H", "Depth: 0"], "/dav/a/").await;
    assert!(status == 207 && list.contains("application/xml"), "{list}");
    assert!(list.to_ascii_lowercase().contains("content-security-policy: sandbox"), "{list}");
}
