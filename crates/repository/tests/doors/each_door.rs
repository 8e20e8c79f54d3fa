//! What holds at each door, asked for with one client of each: curl over HTTP, WebDAV and FTPS, and OpenSSH's sftp.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use perigee_model::percent::encoded_path;
use perigee_repository::Quota;

use crate::ftps::Gateway;
use crate::http::Curl;
use crate::server::{Server, path, run, text};
use crate::sftp::Client;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Door {
    Http,
    Dav,
    Sftp,
    Ftps,
}

const DOORS: [Door; 4] = [Door::Http, Door::Dav, Door::Sftp, Door::Ftps];

/// What a client asks for. Places are `TENANT/PATH`.
#[derive(Debug, Clone, Copy)]
enum Ask<'a> {
    /// A file of this content.
    Put(&'a str, &'a [u8]),
    Get(&'a str),
    List(&'a str),
    Remove(&'a str),
    RemoveDirectory(&'a str),
    MakeDirectory(&'a str),
    Rename(&'a str, &'a str),
}

/// A server, and a client of each kind for each tenant.
struct Doors<'a> {
    server: &'a Server,
    gateway: Gateway,
    sftp: [Client<'a>; 2],
}

impl<'a> Doors<'a> {
    async fn of(server: &'a Server) -> Self {
        let gateway = Gateway::start(server).await;
        let sftp = [Client::new(server, "a").await, Client::new(server, "b").await];
        Self { server, gateway, sftp }
    }

    /// Whether it was done, and what came.
    async fn ask(&self, door: Door, tenant: &str, ask: Ask<'_>) -> (bool, String) {
        let file = match ask {
            Ask::Put(_, content) => self.server.file("sent", content),
            _ => self.server.dir.path().join("got"),
        };
        // What an earlier one has fetched; it may have fetched nothing.
        let _ = matches!(ask, Ask::Get(_)).then(|| fs::remove_file(&file));
        let (is_done, shown) = match door {
            Door::Http => self.over_http(tenant, ask, &file).await,
            Door::Dav => self.over_dav(tenant, ask, &file).await,
            Door::Sftp => self.over_sftp(tenant, ask, &file).await,
            Door::Ftps => self.over_ftps(tenant, ask, &file).await,
        };
        let got = match ask {
            Ask::Get(_) => text(&fs::read(&file).unwrap_or_default()),
            _ => shown,
        };
        (is_done, got)
    }

    async fn is_done(&self, door: Door, tenant: &str, ask: Ask<'_>) -> bool {
        self.ask(door, tenant, ask).await.0
    }

    async fn curl(&self, tenant: &str, arguments: &[&str], url: &str) -> (bool, String) {
        let token = format!("token-of-{tenant}");
        let curl = Curl { server: self.server, token: &token };
        let all = [&["--path-as-is", "-f"], arguments].concat();
        let (status, body) = curl.ask(&all, url).await;
        ((200..300).contains(&status), body)
    }

    async fn over_http(&self, tenant: &str, ask: Ask<'_>, file: &Path) -> (bool, String) {
        let url = |at: &str| format!("/v1/data/{}", encoded_path(at));
        let post = ["-X", "POST"];
        match ask {
            Ask::Put(at, _) => self.curl(tenant, &["-T", path(file)], &url(at)).await,
            Ask::Get(at) => self.curl(tenant, &["-o", path(file)], &url(at)).await,
            Ask::List(at) => self.curl(tenant, &[], &url(at)).await,
            Ask::Remove(at) | Ask::RemoveDirectory(at) => {
                self.curl(tenant, &["-X", "DELETE"], &url(at)).await
            }
            Ask::MakeDirectory(at) => {
                self.curl(tenant, &post, &format!("{}?directory", url(at))).await
            }
            Ask::Rename(from, to) => {
                let (_, to) = to.split_once('/').expect("TENANT/PATH");
                let from = format!("{}?rename={}", url(from), encoded_path(to));
                self.curl(tenant, &post, &from).await
            }
        }
    }

    async fn over_dav(&self, tenant: &str, ask: Ask<'_>, file: &Path) -> (bool, String) {
        let url = |at: &str| format!("/dav/{}", encoded_path(at));
        match ask {
            Ask::Put(at, _) => self.curl(tenant, &["-T", path(file)], &url(at)).await,
            Ask::Get(at) => self.curl(tenant, &["-o", path(file)], &url(at)).await,
            Ask::List(at) => {
                self.curl(tenant, &["-X", "PROPFIND", "-H", "Depth: 1"], &url(at)).await
            }
            Ask::Remove(at) | Ask::RemoveDirectory(at) => {
                self.curl(tenant, &["-X", "DELETE"], &url(at)).await
            }
            Ask::MakeDirectory(at) => self.curl(tenant, &["-X", "MKCOL"], &url(at)).await,
            Ask::Rename(from, to) => {
                let to = format!("Destination: {}{}", self.server.http, url(to));
                self.curl(tenant, &["-X", "MOVE", "-H", &to], &url(from)).await
            }
        }
    }

    async fn over_sftp(&self, tenant: &str, ask: Ask<'_>, file: &Path) -> (bool, String) {
        let file = path(file);
        // Within quotes only these two mean something.
        let at = |at: &str| format!("\"/{}\"", at.replace('\\', "\\\\").replace('"', "\\\""));
        let command = match ask {
            Ask::Put(to, _) => format!("put {file} {}", at(to)),
            Ask::Get(from) => format!("get {} {file}", at(from)),
            Ask::List(of) => format!("ls -1 {}", at(of)),
            Ask::Remove(what) => format!("rm {}", at(what)),
            Ask::RemoveDirectory(what) => format!("rmdir {}", at(what)),
            Ask::MakeDirectory(what) => format!("mkdir {}", at(what)),
            Ask::Rename(from, to) => format!("rename {} {}", at(from), at(to)),
        };
        let client = &self.sftp[usize::from(tenant == "b")];
        let output = client.sftp(&format!("{command}\n")).await;
        (output.status.success(), text(&output.stdout))
    }

    async fn over_ftps(&self, tenant: &str, ask: Ask<'_>, file: &Path) -> (bool, String) {
        let token = format!("token-of-{tenant}");
        let named = async |arguments: &[&str], at: &str| {
            let all = [&["--ftp-method", "nocwd"], arguments].concat();
            let output = self.gateway.curl(&token, &all, &format!("/{}", encoded_path(at))).await;
            (output.status.success(), text(&output.stdout))
        };
        let told = async |commands: &[String]| {
            let mut all: Vec<&str> = commands.iter().flat_map(|told| ["-Q", told]).collect();
            all.push("-I");
            let output = self.gateway.curl(&token, &all, "").await;
            (output.status.success(), text(&output.stdout))
        };
        match ask {
            Ask::Put(at, _) => named(&["-T", path(file)], at).await,
            Ask::Get(at) => named(&["-o", path(file)], at).await,
            Ask::List(at) => named(&["-l"], &format!("{at}/")).await,
            Ask::Remove(at) => told(&[format!("DELE /{at}")]).await,
            Ask::RemoveDirectory(at) => told(&[format!("RMD /{at}")]).await,
            Ask::MakeDirectory(at) => told(&[format!("MKD /{at}")]).await,
            Ask::Rename(from, to) => told(&[format!("RNFR /{from}"), format!("RNTO /{to}")]).await,
        }
    }

    /// The names in the top directory of the tenant `a`, as they are on the disk.
    fn names(&self) -> BTreeSet<String> {
        let all = fs::read_dir(self.server.stored("a", "")).expect("a directory");
        all.map(|entry| text(entry.expect("an entry").file_name().as_encoded_bytes())).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn names_mean_the_same_at_each_door() {
    let server = Server::start().await;
    let doors = Doors::of(&server).await;
    let (longest, of_two_bytes) = ("x".repeat(255), "ü".repeat(127));
    let deepest = format!("{}f", "d/".repeat(63));
    for door in DOORS {
        for name in [
            &longest,
            &of_two_bytes,
            "A",
            "a",
            " a b ",
            "..a",
            "-rf",
            "~",
            "%2e%2e",
            "..%2fa",
            "a?b#c&d",
            "*[x]",
            "\\..\\a",
            "'\"",
            "e\u{301}",
            "\u{e9}",
            "\u{202e}",
        ] {
            let at = format!("a/{name}");
            let put = doors.ask(door, "a", Ask::Put(&at, name.as_bytes())).await;
            assert!(put.0, "{door:?} {name:?}: {put:?}");
            assert_eq!(doors.names(), BTreeSet::from([name.to_owned()]), "{door:?}");
            let got = doors.ask(door, "a", Ask::Get(&at)).await;
            assert_eq!(got, (true, name.to_owned()), "{door:?}");
            let removed = doors.ask(door, "a", Ask::Remove(&at)).await;
            assert!(removed.0 && doors.names().is_empty(), "{door:?} {name:?}: {removed:?}");
        }
        for part in ["d", &deepest[..deepest.len() - 2]] {
            // Over WebDAV and SFTP a directory has to be there.
            fs::create_dir_all(server.stored("a", part)).expect("directories");
        }
        let deep = format!("a/{deepest}");
        assert!(doors.is_done(door, "a", Ask::Put(&deep, b"deep")).await, "{door:?}");
        assert!(server.stored("a", &deepest).exists(), "{door:?}");
        fs::remove_dir_all(server.stored("a", "d")).expect("it is there");
        let (long, of_256_bytes) = ("x".repeat(256), "ü".repeat(128));
        let (deep, long_path) = ("d/".repeat(64) + "f", vec!["y".repeat(255); 17].join("/"));
        for name in [&long, &of_256_bytes, &deep, &long_path, "a\u{1}b", "a\u{7f}", "a\u{85}b"] {
            let at = format!("a/{name}");
            for ask in
                [Ask::Put(&at, b"x"), Ask::MakeDirectory(&at), Ask::Get(&at), Ask::Remove(&at)]
            {
                assert!(!doors.is_done(door, "a", ask).await, "{door:?} {ask:?}");
            }
            assert!(doors.names().is_empty(), "{door:?} {name:?}: {:?}", doors.names());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_was_cut_is_deleted_at_each_door() {
    let server = Server::start().await;
    let doors = Doors::of(&server).await;
    let half = server.file("half", b"12345");
    let uploads = async || doors.curl("a", &[], "/v1/data/a?uploads").await.1;
    for door in DOORS {
        let part = ["-T", path(&half), "-H", "Content-Range: bytes 0-4/10"];
        assert!(doors.curl("a", &part, "/v1/data/a/cut").await.0, "{door:?}");
        let shown = uploads().await;
        assert!(shown.contains(r#""path":"cut","size_bytes":5"#), "{door:?}: {shown}");
        let removed = doors.ask(door, "a", Ask::Remove("a/cut")).await;
        assert!(removed.0 && uploads().await == "[]", "{door:?}: {removed:?}");
        assert!(!doors.is_done(door, "a", Ask::Remove("a/cut")).await, "{door:?}");
    }
}

/// Nobody can make a link. If one is in the tree anyway, it leads nowhere.
#[tokio::test(flavor = "multi_thread")]
async fn no_door_makes_links_or_follows_them() {
    let server = Server::start().await;
    let doors = Doors::of(&server).await;
    let outside = server.file("outside", b"secret");
    assert!(doors.is_done(Door::Http, "b", Ask::Put("b/f", b"secret of b")).await);
    assert!(doors.is_done(Door::Http, "a", Ask::Put("a/f", b"own")).await);
    symlink(&outside, server.stored("a", "link")).expect("a link");
    symlink("../../b/tree", server.stored("a", "leading-out")).expect("a link");
    for door in DOORS {
        for at in ["a/link", "a/leading-out/f"] {
            let (is_done, got) = doors.ask(door, "a", Ask::Get(at)).await;
            assert!(!is_done && !got.contains("secret"), "{door:?} {at}: {got}");
        }
        for ask in [
            Ask::Put("a/leading-out/new", b"x"),
            Ask::Put("a/leading-out/f", b"x"),
            Ask::MakeDirectory("a/leading-out/new"),
            Ask::Remove("a/leading-out/f"),
            Ask::Rename("a/f", "a/leading-out/f"),
            Ask::Rename("a/leading-out/f", "a/got"),
            Ask::List("a/leading-out"),
        ] {
            assert!(!doors.is_done(door, "a", ask).await, "{door:?} {ask:?}");
        }
        let (is_done, list) = doors.ask(door, "a", Ask::List("a")).await;
        assert!(
            is_done && !list.contains("link") && !list.contains("leading-out"),
            "{door:?}: {list}"
        );
    }
    for command in ["ln -s f soft", "ln f hard"] {
        assert!(!doors.sftp[0].sftp(&format!("{command}\n")).await.status.success(), "{command}");
    }
    for command in ["SITE SYMLINK f soft", "SITE LINK f hard"] {
        let told = doors.gateway.curl("token-of-a", &["-Q", command, "-l"], "").await;
        assert!(!told.status.success(), "{command}");
    }
    for method in ["BIND", "LINK", "MKREDIRECTREF"] {
        for url in ["/dav/a/soft", "/v1/data/a/soft"] {
            assert!(!doors.curl("a", &["-X", method], url).await.0, "{method} {url}");
        }
    }
    assert_eq!(doors.names(), ["f", "leading-out", "link"].map(str::to_owned).into());
    assert_eq!(fs::read(outside).expect("it is there"), b"secret");
    assert_eq!(fs::read(server.stored("b", "f")).expect("it is there"), b"secret of b");
    let of_b = fs::read_dir(server.stored("b", "")).expect("a directory");
    assert_eq!(of_b.count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn quotas_hold_at_each_door() {
    let server = Server::start().await;
    let doors = Doors::of(&server).await;
    for door in DOORS {
        server.accounts.change(|account| account.quota = Quota { bytes: 1_000_000, files: 1000 });
        let large = vec![7; 600_000];
        assert!(doors.is_done(door, "a", Ask::Put("a/large", &large)).await, "{door:?}");
        assert!(!doors.is_done(door, "a", Ask::Put("a/second", &large)).await, "{door:?}");
        assert_eq!(doors.names(), BTreeSet::from(["large".to_owned()]), "{door:?}");
        // What was refused takes no room of what fits.
        assert!(doors.is_done(door, "a", Ask::Put("a/small", &large[..300_000])).await, "{door:?}");
        server.accounts.change(|account| account.quota = Quota { bytes: 1_000_000, files: 3 });
        assert!(doors.is_done(door, "a", Ask::MakeDirectory("a/d")).await, "{door:?}");
        for ask in [Ask::Put("a/fourth", b"x"), Ask::MakeDirectory("a/e")] {
            assert!(!doors.is_done(door, "a", ask).await, "{door:?} {ask:?}");
        }
        let left = ["d", "large", "small"].map(str::to_owned);
        assert_eq!(doors.names(), left.into(), "{door:?}");
        for ask in [Ask::Remove("a/large"), Ask::Remove("a/small"), Ask::RemoveDirectory("a/d")] {
            assert!(doors.is_done(door, "a", ask).await, "{door:?} {ask:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_shared_is_read_and_not_changed_at_each_door() {
    let server = Server::start().await;
    let doors = Doors::of(&server).await;
    assert!(doors.is_done(Door::Http, "a", Ask::MakeDirectory("a/out")).await);
    assert!(doors.is_done(Door::Http, "a", Ask::MakeDirectory("a/out/empty")).await);
    assert!(doors.is_done(Door::Http, "a", Ask::Put("a/out/f", b"shared")).await);
    assert!(doors.is_done(Door::Http, "a", Ask::Put("a/private", b"secret")).await);
    assert!(doors.is_done(Door::Http, "b", Ask::Put("b/own", b"own")).await);
    let share = async |method: &str| {
        assert!(doors.curl("a", &["-X", method], "/v1/data/a/out?share=b").await.0);
    };
    share("PUT").await;
    for door in DOORS {
        let got = doors.ask(door, "b", Ask::Get("a/out/f")).await;
        assert_eq!(got, (true, "shared".to_owned()), "{door:?}");
        let (is_done, list) = doors.ask(door, "b", Ask::List("a")).await;
        assert!(is_done && list.contains("out") && !list.contains("private"), "{door:?}: {list}");
        for ask in [
            Ask::Put("a/out/f", b"changed"),
            Ask::Put("a/out/new", b"new"),
            Ask::Put("a/new", b"new"),
            Ask::MakeDirectory("a/out/new"),
            Ask::Remove("a/out/f"),
            Ask::RemoveDirectory("a/out/empty"),
            Ask::Rename("a/out/f", "a/out/g"),
            Ask::Rename("a/out/f", "b/taken"),
            Ask::Rename("b/own", "a/out/given"),
            Ask::Get("a/private"),
        ] {
            let (is_done, shown) = doors.ask(door, "b", ask).await;
            assert!(!is_done && !shown.contains("secret"), "{door:?} {ask:?}: {shown}");
        }
    }
    assert_eq!(doors.names(), ["out", "private"].map(str::to_owned).into());
    assert_eq!(fs::read(server.stored("a", "out/f")).expect("it is there"), b"shared");
    assert_eq!(fs::read_dir(server.stored("a", "out")).expect("a directory").count(), 2);
    assert!(server.stored("b", "own").exists() && !server.stored("b", "taken").exists());
    share("DELETE").await;
    for door in DOORS {
        let (is_done, got) = doors.ask(door, "b", Ask::Get("a/out/f")).await;
        assert!(!is_done && got.is_empty(), "{door:?}: {got}");
    }
}

/// All that curl shows of an answer, with `NAME` for what was asked for, but the time, and whether the connection stays: it
/// does if all of the request was there already.
async fn reply(server: &Server, arguments: &[&str], url: &str, hide: &[&str]) -> String {
    let all = ["-sS", "-i", "--path-as-is", "-H", "Authorization: Bearer token-of-b"];
    let url = format!("{}{url}", server.http);
    let output = run("curl", &[&all, arguments, &[&url]].concat(), "").await;
    let shown = text(&output.stdout);
    let is_meant = |line: &&str| !line.starts_with("date:") && !line.starts_with("connection:");
    let lines = shown.lines().filter(is_meant);
    let told = lines.collect::<Vec<_>>().join("\n");
    assert!(!told.contains("secret"), "{arguments:?} {url}: {told}");
    hide.iter().fold(told, |told, name| told.replace(name, "NAME"))
}

/// By whatever is asked, another tenant's names answer as names that never were: status, headers and text.
#[tokio::test(flavor = "multi_thread")]
async fn over_http_and_webdav_another_tenants_files_are_not_there() {
    let server = Server::start().await;
    let doors = Doors::of(&server).await;
    assert!(doors.is_done(Door::Http, "a", Ask::Put("a/in/f", b"secret")).await);
    assert!(doors.is_done(Door::Http, "b", Ask::Put("b/own", b"own")).await);
    let file = server.file("sent", b"sent");
    let root = format!("{}/dav", server.http);
    let methods = [
        "GET",
        "HEAD",
        "PUT",
        "POST",
        "PATCH",
        "DELETE",
        "OPTIONS",
        "PROPFIND",
        "PROPPATCH",
        "MKCOL",
        "COPY",
        "MOVE",
        "LOCK",
        "UNLOCK",
    ];
    for door in ["/v1/data", "/dav"] {
        for method in methods {
            for (inside, query) in [
                ("", ""),
                ("/in", ""),
                ("/in/f", ""),
                ("/in/f", "?stat"),
                ("/in/f", "?shares"),
                ("/in/f", "?share=b"),
                ("/in/f", "?directory"),
                ("/in/f", "?rename=in/g"),
                ("/in/f", "?upload"),
                ("/in/f", "?upload=0"),
                ("/in/new", ""),
            ] {
                if door == "/dav" && !query.is_empty() {
                    continue;
                }
                let mut said = Vec::new();
                for named in ["a", "c"] {
                    let what = format!("{door}/{named}{inside}");
                    let to = format!("Destination: {root}/b/taken");
                    let mut arguments =
                        vec!["-X", method, "-H", "Depth: 1", "-H", &to, "-H", "Lock-Token: <x:y>"];
                    arguments.extend((method == "HEAD").then_some("-I"));
                    if method == "PUT" && query.is_empty() {
                        arguments.extend(["-T", path(&file)]);
                    }
                    let hide =
                        [what.as_str(), &format!("//{named}{inside}"), &format!("//{named}")];
                    said.push(reply(&server, &arguments, &format!("{what}{query}"), &hide).await);
                }
                assert_eq!(said[0], said[1], "{method} {door} {inside} {query}");
            }
        }
    }
    for method in ["COPY", "MOVE"] {
        let mut said = Vec::new();
        for named in ["a", "c"] {
            let to = format!("Destination: {root}/{named}/in/given");
            let hide = format!("repo://{named}/in/given");
            said.push(
                reply(&server, &["-X", method, "-H", &to], "/dav/b/own", &[&to, &hide]).await,
            );
        }
        assert_eq!(said[0], said[1], "{method}");
    }
    assert_eq!(fs::read(server.stored("a", "in/f")).expect("it is there"), b"secret");
    assert_eq!(fs::read_dir(server.stored("a", "in")).expect("a directory").count(), 1);
    assert_eq!(fs::read_dir(server.stored("b", "")).expect("a directory").count(), 1);
}
