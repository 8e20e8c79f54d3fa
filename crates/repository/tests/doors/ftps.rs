//! The FTPS gateway with curl and lftp, and with a client that keeps no rules.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant, UNIX_EPOCH};

use crate::server::{PATIENCE, Server, content, cut_download, path, run, text, wait_for};

const GATEWAY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../gateways/ftps/perigee-ftps");
/// Its first argument is the gateway's port, and its second one the certificate.
const HOSTILE: &str = include_str!("hostile_ftps.py");

/// The gateway, in front of a server. It ends with the test.
pub struct Gateway {
    pub port: u16,
    certificate: PathBuf,
    process: tokio::process::Child,
}

async fn certificate(dir: &Path) -> (PathBuf, PathBuf) {
    let (certificate, key) = (dir.join("ftps.pem"), dir.join("ftps.key"));
    let words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 \
                 -subj /CN=files -addext subjectAltName=IP:127.0.0.1";
    let mut all: Vec<&str> = words.split_whitespace().collect();
    all.extend(["-keyout", path(&key), "-out", path(&certificate)]);
    assert!(run("openssl", &all, "").await.status.success());
    (certificate, key)
}

impl Gateway {
    pub async fn start(server: &Server) -> Self {
        let (certificate, key) = certificate(server.dir.path()).await;
        let tls = ["--cert", path(&certificate), "--key", path(&key)];
        Self::start_with(server, &tls, certificate.clone()).await
    }

    async fn start_with(server: &Server, more: &[&str], certificate: PathBuf) -> Self {
        let port = perigee_http::unused_port();
        let listen = format!("127.0.0.1:{port}");
        let mut command = tokio::process::Command::new(GATEWAY);
        command.args(["--api", &server.http, "--listen", &listen]).args(more);
        let process =
            command.kill_on_drop(true).spawn().expect("python3; `make setup` installs it");
        wait_for(&listen).await;
        Self { port, certificate, process }
    }

    fn curl_words(&self, token: &str) -> Vec<String> {
        let user = format!("any:{token}");
        ["-sS", "--ssl-reqd", "--cacert", path(&self.certificate), "-u", &user]
            .map(str::to_owned)
            .into()
    }

    pub async fn curl(&self, token: &str, arguments: &[&str], at: &str) -> Output {
        let mut all = self.curl_words(token);
        all.extend(arguments.iter().map(ToString::to_string));
        all.push(format!("ftp://127.0.0.1:{}/{at}", self.port));
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        run("curl", &all, "").await
    }

    /// By a user of the tenant `a`, and it is done.
    async fn ok(&self, arguments: &[&str], at: &str) -> String {
        let output = self.curl("token-of-a", arguments, at).await;
        assert!(output.status.success(), "{arguments:?} {at}");
        text(&output.stdout)
    }

    /// What lftp is to do to do some commands as a user of the tenant `a`.
    fn lftp_script(&self, commands: &str) -> String {
        format!(
            "set cmd:fail-exit yes; set net:max-retries 1; set ftp:ssl-force yes; \
             set ftp:ssl-protect-data yes; set ssl:ca-file {}; \
             open -u any,token-of-a ftp://127.0.0.1:{}; {commands}; bye",
            path(&self.certificate),
            self.port
        )
    }

    async fn lftp(&self, commands: &str) -> Output {
        run("lftp", &["--norc", "-c", &self.lftp_script(commands)], "").await
    }

    async fn lftp_ok(&self, commands: &str) -> String {
        let output = self.lftp(commands).await;
        assert!(output.status.success(), "{commands}");
        text(&output.stdout)
    }

    /// A client that keeps no rules. What it does is a function of the script.
    async fn hostile(&self, what: &str) {
        let certificate = path(&self.certificate);
        let all = ["-", &self.port.to_string(), certificate, what];
        let output = run("/usr/bin/python3", &all, HOSTILE).await;
        assert!(output.status.success(), "{what}");
    }

    /// Waits until so much of an upload by the tenant `a` is kept.
    async fn wait_for_kept(&self, at: &str) -> u64 {
        let until = Instant::now() + PATIENCE;
        loop {
            let head = self.curl("token-of-a", &["-I"], at).await;
            let shown = text(&head.stdout);
            let size = shown.lines().find_map(|line| line.strip_prefix("Content-Length: "));
            if let Some(size) = size.and_then(|size| size.trim().parse().ok()) {
                return size;
            }
            assert!(Instant::now() < until, "what has arrived is kept: {shown}");
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn curl_uploads_lists_fetches_renames_and_deletes_over_ftps() {
    let server = Server::start().await;
    let gateway = Gateway::start(&server).await;
    let sent = content(3_000_000);
    let (file, got) = (server.file("sent", &sent), server.dir.path().join("got"));
    gateway.ok(&["--ftp-create-dirs", "-T", path(&file)], "in/sub%20d%C3%BC/f").await;
    assert!(fs::read(server.stored("a", "in/sub dü/f")).expect("it is stored") == sent);
    gateway.ok(&["-o", path(&got)], "in/sub%20d%C3%BC/f").await;
    assert!(fs::read(&got).expect("it came") == sent);
    gateway.ok(&["-r", "1000-1999", "-o", path(&got)], "in/sub%20d%C3%BC/f").await;
    assert_eq!(fs::read(&got).expect("it came"), sent[1000..2000]);
    fs::write(&got, &sent).expect("a file");
    // All of it is there already.
    gateway.ok(&["-C", "-", "-o", path(&got)], "in/sub%20d%C3%BC/f").await;
    assert!(fs::read(&got).expect("it came") == sent);
    let list = gateway.ok(&[], "in/").await;
    assert!(list.contains("drwxr-xr-x") && list.contains("sub dü"), "{list}");
    let list = gateway.ok(&[], "in/sub%20d%C3%BC/").await;
    assert!(list.contains(" 3000000 ") && list.trim_end().ends_with(" f"), "{list}");
    assert_eq!(gateway.ok(&["-l"], "in/sub%20d%C3%BC/").await, "f\n");
    let empty = server.file("empty", b"");
    gateway.ok(&["-T", path(&empty)], "in/empty").await;
    assert_eq!(fs::read(server.stored("a", "in/empty")).expect("it is stored"), b"");
    gateway.ok(&["-o", path(&got)], "in/empty").await;
    let rename = ["-Q", "RNFR in/sub dü/f", "-Q", "RNTO in/g"];
    gateway.ok(&[&rename[..], &["-l"]].concat(), "in/").await;
    assert!(fs::read(server.stored("a", "in/g")).expect("it is there") == sent);
    // What is there is replaced only by a whole file.
    gateway.ok(&["-T", path(&empty)], "in/g").await;
    assert_eq!(fs::read(server.stored("a", "in/g")).expect("it is stored"), b"");
    for delete in ["DELE in/g", "DELE in/empty", "RMD in/sub dü", "RMD in"] {
        gateway.ok(&["-Q", delete, "-l"], "").await;
    }
    assert!(!server.stored("a", "in").exists());
    for refused in ["DELE nothing", "RMD nothing", "RNFR nothing", "MKD /b/x", "CWD /b", "MKD /"] {
        let output = gateway.curl("token-of-a", &["-Q", refused, "-l"], "").await;
        assert!(!output.status.success(), "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn curl_goes_on_with_uploads_and_fetches_over_ftps_that_were_cut() {
    let server = Server::start().await;
    let gateway = Gateway::start(&server).await;
    let sent = content(6_000_000);
    let file = server.file("sent", &sent);
    let url = format!("ftp://127.0.0.1:{}/f", gateway.port);
    let slow = || {
        let mut slow = tokio::process::Command::new("curl");
        slow.args(gateway.curl_words("token-of-a")).args(["--limit-rate", "200k", &url]);
        slow
    };
    server.cut_upload(slow().args(["-T", path(&file)]), "").await;
    let kept = gateway.wait_for_kept("f").await;
    assert!(kept > 0 && kept < 6_000_000, "{kept}");
    assert!(!server.stored("a", "f").exists(), "it is not whole");
    assert_eq!(gateway.ok(&["-l"], "").await, "", "it is in no list");
    gateway.ok(&["-C", "-", "-T", path(&file)], "f").await;
    assert!(fs::read(server.stored("a", "f")).expect("it is stored") == sent);
    let got = server.dir.path().join("got");
    cut_download(slow().args(["-o", path(&got)]), "", (&got, &sent)).await;
    gateway.ok(&["-C", "-", "-o", path(&got)], "f").await;
    assert!(fs::read(&got).expect("it came") == sent);
    // A client that gives up ends its data connection in good order, and leaves then. The machine may stand still between
    // the two, but not each time.
    let mut is_whole = true;
    for number in 0..5 {
        let at = format!("given-up-{number}");
        let given_up = ["--limit-rate", "200k", "--max-time", "10", "-T", path(&file)];
        assert!(!gateway.curl("token-of-a", &given_up, &at).await.status.success());
        assert!(gateway.wait_for_kept(&at).await < 6_000_000);
        is_whole = server.stored("a", &at).exists();
        if !is_whole {
            break;
        }
    }
    assert!(!is_whole, "what a client gives up is not whole");
    // It is whole: nothing is added to it.
    let longer = server.file("longer", &[&sent[..], b"more"].concat());
    let added = gateway.curl("token-of-a", &["-C", "-", "-T", path(&longer)], "f").await;
    assert!(!added.status.success());
    assert!(fs::read(server.stored("a", "f")).expect("it is stored") == sent);
}

#[tokio::test(flavor = "multi_thread")]
async fn lftp_goes_on_with_uploads_and_fetches_over_ftps_that_were_cut() {
    let server = Server::start().await;
    let gateway = Gateway::start(&server).await;
    let sent = content(6_000_000);
    let file = server.file("sent", &sent);
    let slow = |command: &str| {
        let mut slow = tokio::process::Command::new("lftp");
        let script = gateway.lftp_script(&format!("set net:limit-rate 200000; {command}"));
        slow.args(["--norc", "-c", &script]);
        slow
    };
    server.cut_upload(&mut slow(&format!("put {} -o f", path(&file))), "").await;
    gateway.wait_for_kept("f").await;
    assert!(!server.stored("a", "f").exists(), "it is not whole");
    gateway.lftp_ok(&format!("put -c {} -o f", path(&file))).await;
    assert!(fs::read(server.stored("a", "f")).expect("it is stored") == sent);
    // All has come but the end: lftp must not take it for done.
    server.cut_at_the_end("almost", &file).await;
    gateway.lftp_ok(&format!("put -c {} -o almost", path(&file))).await;
    assert!(fs::read(server.stored("a", "almost")).expect("it is stored") == sent);
    let got = server.dir.path().join("got");
    cut_download(&mut slow(&format!("get f -o {}", path(&got))), "", (&got, &sent)).await;
    gateway.lftp_ok(&format!("get -c f -o {}", path(&got))).await;
    assert!(fs::read(&got).expect("it came") == sent);
}

#[tokio::test(flavor = "multi_thread")]
async fn lftp_mirrors_a_tree_over_ftps_there_and_back() {
    let server = Server::start().await;
    let gateway = Gateway::start(&server).await;
    let (tree, back) = (server.dir.path().join("tree"), server.dir.path().join("back"));
    fs::create_dir_all(tree.join("sub/deeper ü")).expect("a directory");
    for number in 0..300 {
        fs::write(tree.join(format!("sub/f{number}")), content(number)).expect("a file");
    }
    fs::write(tree.join("sub/deeper ü/g"), content(100_000)).expect("a file");
    let old = ["-d", "@1000000000", &format!("{}/sub/f3", path(&tree))];
    assert!(run("touch", &old, "").await.status.success());
    let send = format!("mirror -R --parallel=4 {} tree", path(&tree));
    gateway.lftp_ok(&send).await;
    let stored = fs::metadata(server.stored("a", "tree/sub/f3")).and_then(|found| found.modified());
    assert_eq!(stored.expect("a time"), UNIX_EPOCH + Duration::from_secs(1_000_000_000));
    // Times are kept, so nothing is sent again.
    let again = gateway.lftp_ok(&format!("mirror -R --dry-run {} tree", path(&tree))).await;
    assert!(again.lines().all(|line| line.starts_with("mkdir ")), "{again}");
    gateway.lftp_ok(&format!("mirror --parallel=4 tree {}", path(&back))).await;
    let same = run("diff", &["-r", path(&tree), path(&back)], "").await;
    assert!(same.status.success());
    let listed = gateway.lftp_ok("cls -1 tree/sub").await;
    assert_eq!(listed.lines().count(), 301, "{listed}");
    let shown = gateway.lftp_ok("mv tree/sub/f7 tree/moved; cls -l tree; rm -r tree; cls").await;
    assert!(shown.contains("moved"), "{shown}");
    assert!(!server.stored("a", "tree").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_file_takes_no_memory_of_the_ftps_gateway() {
    let server = Server::start().await;
    let gateway = Gateway::start(&server).await;
    let sent = content(200 << 20);
    let (file, got) = (server.file("sent", &sent), server.dir.path().join("got"));
    gateway.ok(&["-T", path(&file)], "f").await;
    gateway.ok(&["-o", path(&got)], "f").await;
    assert!(fs::read(got).expect("it came") == sent);
    let id = gateway.process.id().expect("it runs");
    let status = fs::read_to_string(format!("/proc/{id}/status")).expect("it runs");
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let most_kib: u64 = most
        .and_then(|most| most.split_whitespace().next()?.parse().ok())
        .expect("the most memory it had");
    assert!(most_kib < 100 << 10, "{most_kib} KiB");
}

/// What another tenant has answers as names that never were, whatever is asked.
#[tokio::test(flavor = "multi_thread")]
async fn over_ftps_another_tenants_files_are_not_there() {
    let server = Server::start().await;
    let gateway = Gateway::start(&server).await;
    let file = server.file("sent", b"secret");
    gateway.ok(&["--ftp-create-dirs", "-T", path(&file)], "in/f").await;
    let own = gateway.curl("token-of-b", &["-T", path(&file)], "own").await;
    assert!(own.status.success());
    gateway.hostile("another_tenants_names").await;
    assert_eq!(text(&gateway.curl("token-of-b", &["-l"], "/").await.stdout), "b\n");
    assert_eq!(fs::read(server.stored("a", "in/f")).expect("it is there"), b"secret");
    assert_eq!(fs::read_dir(server.stored("a", "in")).expect("a directory").count(), 1);
    assert!(server.stored("b", "own").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn ftps_lets_nobody_in_without_tls_or_with_a_wrong_token() {
    let server = Server::start().await;
    let gateway = Gateway::start(&server).await;
    let wrong = gateway.curl("token-of-nobody", &["-l"], "").await;
    assert_eq!(wrong.status.code(), Some(67), "curl: the login was denied");
    // Without TLS at all, and with TLS for the commands only.
    let url = format!("ftp://127.0.0.1:{}/", gateway.port);
    let plain = run("curl", &["-sS", "-u", "any:token-of-a", &url], "").await;
    assert!(!plain.status.success());
    let words = ["-sS", "--ftp-ssl-control", "--cacert", path(&gateway.certificate)];
    let control = [&words[..], &["-u", "any:token-of-a", &url]].concat();
    assert!(!run("curl", &control, "").await.status.success());
    gateway.ok(&["-l"], "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_ftps_gateway_bears_clients_that_keep_no_rules() {
    let server = Server::start().await;
    let gateway = Gateway::start(&server).await;
    gateway.ok(&["-T", path(&server.file("sent", b"whole"))], "whole").await;
    for what in [
        "commands_before_the_handshake",
        "active_connections",
        "odd_names",
        "a_long_line",
        "a_data_connection_that_breaks",
        "a_replacement_that_breaks",
        "sessions_that_break",
        "an_upload_that_breaks_at_its_very_end",
        "bytes_that_nobody_asked_for",
        "an_upload_that_is_given_up",
        "a_transfer_that_is_stopped_before_it_begins",
        "an_upload_that_is_given_up_late",
        "strangers_at_the_data_port",
        "sessions_of_nobody",
        "names_that_change",
        "a_browser",
        "old_tls",
    ] {
        gateway.hostile(what).await;
    }
    assert!(!server.stored("a", "broken").exists());
    gateway.ok(&["-l"], "").await;
}

/// It ended, and all sessions with it.
#[tokio::test(flavor = "multi_thread")]
async fn the_ftps_gateway_goes_on_when_it_can_open_no_more_files() {
    let server = Server::start().await;
    let mut gateway = Gateway::start(&server).await;
    let pid = gateway.process.id().expect("it runs").to_string();
    assert!(run("prlimit", &["--pid", &pid, "--nofile=40"], "").await.status.success());
    gateway.hostile("more_connections_than_files").await;
    assert!(gateway.process.try_wait().expect("its state").is_none(), "it goes on");
    let until = Instant::now() + PATIENCE;
    while !gateway.curl("token-of-a", &["-l"], "").await.status.success() {
        assert!(Instant::now() < until, "waited for the gateway to let a client in again");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ftps_data_goes_only_to_the_client_of_the_session_if_that_is_asked_for() {
    let server = Server::start().await;
    let (certificate, key) = certificate(server.dir.path()).await;
    let more = ["--cert", path(&certificate), "--key", path(&key), "--require-session-reuse"];
    let gateway = Gateway::start_with(&server, &more, certificate.clone()).await;
    let sent = content(300_000);
    let file = server.file("sent", &sent);
    let url = format!("ftp://127.0.0.1:{}/again", gateway.port);
    gateway.ok(&["-T", path(&file), &url, "-T", path(&file)], "whole").await;
    gateway.lftp_ok(&format!("put {0} -o l1; put {0} -o l2; cls", path(&file))).await;
    for name in ["whole", "again", "l1", "l2"] {
        assert!(fs::read(server.stored("a", name)).expect("it is stored") == sent, "{name}");
    }
    gateway.hostile("data_of_another_session").await;
    assert!(!server.stored("a", "stolen").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_for_ftps_data_that_are_all_taken_are_no_reason_to_use_others() {
    let server = Server::start().await;
    let (certificate, key) = certificate(server.dir.path()).await;
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port();
    let ports = format!("{port}-{port}");
    let more = ["--cert", path(&certificate), "--key", path(&key), "--passive-ports", &ports];
    let gateway = Gateway::start_with(&server, &more, certificate.clone()).await;
    let listed = gateway.curl("token-of-a", &["-l", "-v"], "").await;
    assert!(!listed.status.success());
    assert!(text(&listed.stderr).contains("425 all ports"), "{}", text(&listed.stderr));
    drop(taken);
    gateway.ok(&["-l"], "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_ftp_is_served_only_when_it_is_asked_for() {
    let server = Server::start().await;
    let listen = format!("127.0.0.1:{}", perigee_http::unused_port());
    let args = ["--api", server.http.as_str(), "--listen", &listen];
    let refused = run(GATEWAY, &args, "").await;
    assert!(text(&refused.stderr).contains("--cert and --key are missing"));
    let far = ["--api", "http://192.0.2.1:7000", "--listen", &listen, "--insecure"];
    let refused = run(GATEWAY, &far, "").await;
    assert!(text(&refused.stderr).contains("it is not encrypted"));
    let gateway = Gateway::start_with(&server, &["--insecure"], PathBuf::new()).await;
    let file = server.file("sent", &content(300_000));
    let url = format!("ftp://127.0.0.1:{}/f", gateway.port);
    let put = ["-sS", "-u", "any:token-of-a", "-T", path(&file), &url];
    assert!(run("curl", &put, "").await.status.success());
    assert!(fs::read(server.stored("a", "f")).expect("it is stored") == content(300_000));
}
