//! The SFTP door with OpenSSH's sftp and scp, and with lftp.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Output;
use std::sync::Arc;
use std::time::{Duration, Instant};

use russh::client::{DisconnectReason, Handler};
use russh::keys::PublicKeyOrCertificate;
use russh_sftp::client::RawSftpSession;
use russh_sftp::protocol::{FileAttributes, OpenFlags};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::server::{PATIENCE, Server, content, cut_download, path, run, text};

/// A user's side: a key, a directory, and what OpenSSH is to know.
pub struct Client<'a> {
    server: &'a Server,
    key: PathBuf,
}

impl<'a> Client<'a> {
    pub async fn new(server: &'a Server, tenant: &str) -> Self {
        let key = server.dir.path().join(format!("key-of-{tenant}"));
        let made =
            run("ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-f", path(&key)], "").await;
        assert!(made.status.success());
        let public = fs::read_to_string(key.with_extension("pub")).expect("a key");
        server.accounts.allow_key(&public, tenant);
        Self { server, key }
    }

    pub fn options(&self) -> Vec<String> {
        let known = self.server.dir.path().join("known_hosts");
        [
            format!("-oPort={}", self.server.sftp_port),
            format!("-oIdentityFile={}", self.key.display()),
            format!("-oUserKnownHostsFile={}", known.display()),
            "-oIdentitiesOnly=yes".to_owned(),
            "-oStrictHostKeyChecking=accept-new".to_owned(),
            "-oBatchMode=yes".to_owned(),
        ]
        .into()
    }

    pub async fn sftp(&self, batch: &str) -> Output {
        let options = self.options();
        let mut all: Vec<&str> = options.iter().map(String::as_str).collect();
        all.extend(["-b", "-", "any@127.0.0.1"]);
        run("sftp", &all, batch).await
    }

    /// What makes `sftp:` the tree of the tenant for rclone.
    pub fn rclone(&self) -> [(&'static str, String); 5] {
        [
            ("RCLONE_CONFIG_SFTP_TYPE", "sftp".to_owned()),
            ("RCLONE_CONFIG_SFTP_HOST", "127.0.0.1".to_owned()),
            ("RCLONE_CONFIG_SFTP_PORT", self.server.sftp_port.to_string()),
            ("RCLONE_CONFIG_SFTP_USER", "any".to_owned()),
            ("RCLONE_CONFIG_SFTP_KEY_FILE", path(&self.key).to_owned()),
        ]
    }

    /// What lftp is to do to do some commands.
    fn lftp(&self, commands: &str) -> String {
        let ssh = format!("ssh -a -x {}", self.options().join(" "));
        let port = self.server.sftp_port;
        format!(
            "set cmd:fail-exit yes; set net:max-retries 1; set sftp:connect-program \"{ssh}\"; \
             open -u any, sftp://127.0.0.1:{port}; {commands}; bye"
        )
    }

    async fn ok(&self, batch: &str) -> String {
        let output = self.sftp(batch).await;
        assert!(output.status.success(), "{batch}");
        text(&output.stdout)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sftp_uploads_lists_renames_fetches_and_deletes() {
    let server = Server::start().await;
    let client = Client::new(&server, "a").await;
    let sent = content(3_000_000);
    let (file, got) = (server.file("sent", &sent), server.dir.path().join("got"));
    let (file, got) = (path(&file), path(&got));
    let shown =
        client.ok(&format!("pwd\nmkdir in\nput {file} in/f\nput {file} in/g\nls -l in\n")).await;
    assert!(shown.contains("Remote working directory: /a"), "{shown}");
    assert!(shown.contains("3000000") && shown.contains("in/f"), "{shown}");
    assert_eq!(fs::read(server.stored("a", "in/f")).expect("it is stored"), sent);
    client.ok(&format!("cd in\nrename f h\nrename g h\nget ../in/h {got}\n")).await;
    assert_eq!(fs::read(got).expect("it came"), sent);
    assert_eq!(fs::read_dir(server.stored("a", "in")).expect("a directory").count(), 1);
    client.ok("rm in/h\nrmdir in\n").await;
    assert!(!server.stored("a", "in").exists());
    for refused in [
        "get nothing",
        "ln -s /etc/passwd link",
        "put /etc/hostname /x",
        "put /etc/hostname /b/x",
        "cd /b",
    ] {
        assert!(!client.sftp(&format!("{refused}\n")).await.status.success(), "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sftp_goes_on_with_uploads_and_fetches_that_were_cut() {
    let server = Server::start().await;
    let client = Client::new(&server, "a").await;
    let sent = content(6_000_000);
    let file = server.file("sent", &sent);
    // A client that is killed in the middle: 1 Mbit/s gives it 48 s for all.
    let slow = || {
        let mut slow = tokio::process::Command::new("sftp");
        slow.args(client.options()).args(["-l", "1000", "-b", "-", "any@127.0.0.1"]);
        slow
    };
    server.cut_upload(&mut slow(), &format!("put {} f\n", path(&file))).await;
    let until = std::time::Instant::now() + PATIENCE;
    // Its ssh ends a moment later than sftp.
    while !client.sftp("ls -l f\n").await.status.success() {
        assert!(std::time::Instant::now() < until, "what has arrived is kept");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    assert!(!server.stored("a", "f").exists(), "it is not whole");
    client.ok(&format!("reput {} f\n", path(&file))).await;
    assert!(fs::read(server.stored("a", "f")).expect("it is stored") == sent);
    // All has come but the end: the client must not take it for done.
    server.cut_at_the_end("almost", &file).await;
    client.ok(&format!("reput {} almost\n", path(&file))).await;
    assert!(fs::read(server.stored("a", "almost")).expect("it is stored") == sent);
    let got = server.dir.path().join("got");
    cut_download(&mut slow(), &format!("get f {}\n", path(&got)), (&got, &sent)).await;
    client.ok(&format!("reget f {}\n", path(&got))).await;
    assert!(fs::read(&got).expect("it came") == sent);
}

/// The client asks for much at once, and takes it as its window allows.
#[tokio::test(flavor = "multi_thread")]
async fn a_large_file_goes_there_and_comes_back() {
    let server = Server::start().await;
    let client = Client::new(&server, "a").await;
    let sent = content(100 << 20);
    let (file, got) = (server.file("sent", &sent), server.dir.path().join("got"));
    let (file, got) = (path(&file), path(&got));
    let options = client.options();
    let wait = PATIENCE.as_secs().to_string();
    for command in [format!("put {file} f\n"), format!("get f {got}\n")] {
        let mut all = vec![wait.as_str(), "sftp"];
        all.extend(options.iter().map(String::as_str));
        all.extend(["-b", "-", "any@127.0.0.1"]);
        assert!(run("timeout", &all, &command).await.status.success(), "{command}");
    }
    assert!(fs::read(got).expect("it came") == sent);
}

#[tokio::test(flavor = "multi_thread")]
async fn scp_copies_a_directory_there_and_back() {
    let server = Server::start().await;
    let client = Client::new(&server, "a").await;
    let many = server.dir.path().join("many");
    fs::create_dir_all(many.join("sub")).expect("a directory");
    for number in 0..200 {
        fs::write(many.join(format!("sub/f{number}")), content(number)).expect("a file");
    }
    let options = client.options();
    let mut all: Vec<&str> = options.iter().map(String::as_str).collect();
    all.extend(["-r", path(&many), "any@127.0.0.1:"]);
    assert!(run("scp", &all, "").await.status.success());
    let back = server.dir.path().join("back");
    let mut all: Vec<&str> = options.iter().map(String::as_str).collect();
    all.extend(["-r", "any@127.0.0.1:many", path(&back)]);
    assert!(run("scp", &all, "").await.status.success());
    let same = run("diff", &["-r", path(&many), path(&back)], "").await;
    assert!(same.status.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_a_password_and_nothing_else_lets_in() {
    let server = Server::start().await;
    let client = Client::new(&server, "a").await;
    let port = server.sftp_port.to_string();
    for (token, is_let_in) in [("token-of-b", true), ("wrong", false), ("", false)] {
        let ask = server.file("ask", format!("#!/bin/sh\necho '{token}'\n").as_bytes());
        fs::set_permissions(&ask, fs::Permissions::from_mode(0o700)).expect("a script");
        let arguments = [
            "-u",
            "DISPLAY",
            &format!("SSH_ASKPASS={}", ask.display()),
            "SSH_ASKPASS_REQUIRE=force",
            "sftp",
            "-P",
            &port,
            "-oStrictHostKeyChecking=no",
            "-oUserKnownHostsFile=/dev/null",
            "-oPubkeyAuthentication=no",
            "-oNumberOfPasswordPrompts=1",
            "any@127.0.0.1",
        ];
        let output = run("env", &arguments, "pwd\n").await;
        assert_eq!(text(&output.stdout).contains("/b"), is_let_in, "{token}");
    }
    server.accounts.forget_all();
    assert!(!client.sftp("pwd\n").await.status.success(), "the key counts no more");
    let host_key = server.dir.path().join("host-key");
    assert_eq!(fs::metadata(host_key).expect("a key").permissions().mode() & 0o777, 0o600);
}

#[tokio::test(flavor = "multi_thread")]
async fn lftp_mirrors_a_directory_over_sftp() {
    let server = Server::start().await;
    let client = Client::new(&server, "a").await;
    let many = server.dir.path().join("many");
    fs::create_dir_all(&many).expect("a directory");
    for number in 0..50 {
        fs::write(many.join(format!("f{number}")), content(number * 100)).expect("a file");
    }
    let back = server.dir.path().join("back");
    let script = client.lftp(&format!(
        "mirror -R {} many; mv many/f1 many/g1; rm many/f2; mirror many {}",
        path(&many),
        path(&back)
    ));
    assert!(run("lftp", &["--norc", "-c", &script], "").await.status.success());
    assert_eq!(fs::read(back.join("g1")).expect("it came"), content(100));
    assert_eq!(fs::read_dir(&back).expect("a directory").count(), 49);
}

#[tokio::test(flavor = "multi_thread")]
async fn lftp_goes_on_with_uploads_and_fetches_that_were_cut_and_lists() {
    let server = Server::start().await;
    let client = Client::new(&server, "a").await;
    let sent = content(6_000_000);
    let file = server.file("sent", &sent);
    let slow = |command: &str| {
        let mut slow = tokio::process::Command::new("lftp");
        let script = client.lftp(&format!("set net:limit-rate 100000; {command}"));
        slow.args(["--norc", "-c", &script]).env("HOME", "/nonexistent");
        slow
    };
    server.cut_upload(&mut slow(&format!("put {} -o f", path(&file))), "").await;
    let until = std::time::Instant::now() + PATIENCE;
    // Its ssh ends a moment later.
    while !client.sftp("ls -l f\n").await.status.success() {
        assert!(std::time::Instant::now() < until, "what has arrived is kept");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    assert!(!server.stored("a", "f").exists(), "it is not whole");
    let put = client.lftp(&format!("put -c {} -o f", path(&file)));
    assert!(run("lftp", &["--norc", "-c", &put], "").await.status.success());
    let got = server.dir.path().join("got");
    cut_download(&mut slow(&format!("get f -o {}", path(&got))), "", (&got, &sent)).await;
    let script = client.lftp(&format!(
        "cls -l f; get -c f -o {}; mkdir in; mv f in/g; cls -1 in; rm in/g; rmdir in",
        path(&got)
    ));
    let done = run("lftp", &["--norc", "-c", &script], "").await;
    assert!(done.status.success());
    let shown = text(&done.stdout);
    assert!(shown.contains("6000000") && shown.contains("in/g"), "{shown}");
    assert!(fs::read(&got).expect("it came") == sent);
    assert!(!server.stored("a", "in").exists());
}

/// scp can't go on with anything: it sends all of it again.
#[tokio::test(flavor = "multi_thread")]
async fn scp_that_was_cut_leaves_no_file_and_a_second_one_completes_it() {
    let server = Server::start().await;
    let client = Client::new(&server, "a").await;
    let sent = content(6_000_000);
    let file = server.file("sent", &sent);
    let options = client.options();
    let slow = |from: &str, to: &str| {
        let mut slow = tokio::process::Command::new("scp");
        slow.args(&options).args(["-q", "-l", "1000", from, to]);
        slow
    };
    server.cut_upload(&mut slow(path(&file), "any@127.0.0.1:f"), "").await;
    assert!(!server.stored("a", "f").exists(), "it is not whole");
    let got = server.dir.path().join("got");
    for (from, to) in [(path(&file), "any@127.0.0.1:f"), ("any@127.0.0.1:f", path(&got))] {
        let mut all: Vec<&str> = options.iter().map(String::as_str).collect();
        all.extend(["-q", from, to]);
        let until = std::time::Instant::now() + PATIENCE;
        // The server may not have noticed yet that the first one is gone.
        while !run("scp", &all, "").await.status.success() {
            assert!(std::time::Instant::now() < until, "it does not become whole");
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }
    assert!(fs::read(server.stored("a", "f")).expect("it is stored") == sent);
    assert!(fs::read(&got).expect("it came") == sent);
    cut_download(&mut slow("any@127.0.0.1:f", path(&got)), "", (&got, &sent)).await;
    let mut all: Vec<&str> = options.iter().map(String::as_str).collect();
    all.extend(["-q", "any@127.0.0.1:f", path(&got)]);
    assert!(run("scp", &all, "").await.status.success());
    assert!(fs::read(&got).expect("it came") == sent);
}

/// A session of OpenSSH's sftp that is open, and answers one command after the other.
struct Talk {
    child: tokio::process::Child,
    stdin: tokio::process::ChildStdin,
    shown: PathBuf,
}

impl Talk {
    /// Commands begin with `-`, so that the session goes on after one that fails.
    fn begin(client: &Client<'_>, name: &str, more: &[String]) -> Self {
        let mut options = client.options();
        options.extend_from_slice(more);
        options.extend(["-b", "-", "any@127.0.0.1"].map(str::to_owned));
        let shown = client.server.dir.path().join(name);
        let file = fs::File::create(&shown).expect("a file");
        let mut child = tokio::process::Command::new("sftp")
            .args(&options)
            .stdin(std::process::Stdio::piped())
            .stdout(file.try_clone().expect("a file"))
            .stderr(file)
            .kill_on_drop(true)
            .spawn()
            .expect("sftp; `make setup` installs it");
        let stdin = child.stdin.take().expect("it has one");
        Self { child, stdin, shown }
    }

    async fn say(&mut self, command: &str) {
        use tokio::io::AsyncWriteExt as _;
        let line = format!("{command}\n");
        self.stdin.write_all(line.as_bytes()).await.expect("it reads");
        self.stdin.flush().await.expect("it reads");
    }

    /// Waits until all that was said is done, and gives what was shown.
    async fn shown(&mut self, end: &str) -> String {
        self.say(&format!("!echo {end}")).await;
        let until = std::time::Instant::now() + PATIENCE;
        loop {
            let shown = fs::read_to_string(&self.shown).expect("a file");
            if shown.lines().any(|line| line == end) {
                return shown;
            }
            assert!(std::time::Instant::now() < until, "{shown}");
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_session_has_the_rights_of_now_and_none_when_its_key_is_removed() {
    let server = Server::start().await;
    let client = Client::new(&server, "a").await;
    let file = server.file("sent", b"content");
    let mut talk = Talk::begin(&client, "shown", &[]);
    talk.say(&format!("-put {} before", path(&file))).await;
    let shown = talk.shown("END1").await;
    assert!(server.stored("a", "before").exists(), "{shown}");
    server.accounts.change(|account| account.may_write = false);
    talk.say(&format!("-put {} reader", path(&file))).await;
    talk.say("-ls -l before").await;
    let shown = talk.shown("END2").await;
    assert!(shown.contains("before"), "{shown}");
    assert!(!server.stored("a", "reader").exists(), "{shown}");
    server.accounts.forget_all();
    let got = server.dir.path().join("got");
    talk.say(&format!("-get before {}", path(&got))).await;
    talk.say("-rm before").await;
    let shown = talk.shown("END3").await;
    assert!(!got.exists() && server.stored("a", "before").exists(), "{shown}");
    assert!(shown.contains("Permission denied"), "{shown}");
    drop(talk.stdin);
    talk.child.wait().await.expect("it ends");
}

/// Each channel has files open, so one connection has only so many.
#[tokio::test(flavor = "multi_thread")]
async fn one_connection_has_four_sessions_and_no_fifth() {
    let server = Server::start().await;
    let client = Client::new(&server, "a").await;
    let control = server.dir.path().join("control");
    let path_option = format!("-oControlPath={}", control.display());
    let mut options = client.options();
    options.extend(["-M", "-N", &path_option, "any@127.0.0.1"].map(str::to_owned));
    let mut master = tokio::process::Command::new("ssh")
        .args(&options)
        .kill_on_drop(true)
        .spawn()
        .expect("ssh; `make setup` installs it");
    let until = std::time::Instant::now() + PATIENCE;
    while !control.exists() {
        assert!(std::time::Instant::now() < until, "ssh makes no connection");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    // Without a connection of its own.
    let shared = [path_option, "-oControlMaster=no".to_owned(), "-oProxyCommand=false".to_owned()];
    let mut talks = Vec::new();
    for number in 0..4 {
        let mut talk = Talk::begin(&client, &format!("shown{number}"), &shared);
        talk.say("pwd").await;
        let shown = talk.shown("END").await;
        assert!(shown.contains("Remote working directory: /a"), "{shown}");
        talks.push(talk);
    }
    let mut fifth = Talk::begin(&client, "shown4", &shared);
    assert!(!fifth.child.wait().await.expect("it ends").success());
    // One that has ended makes room.
    let first = talks.remove(0);
    drop(first.stdin);
    let mut child = first.child;
    child.wait().await.expect("it ends");
    loop {
        let mut options = client.options();
        options.extend_from_slice(&shared);
        options.extend(["-b", "-", "any@127.0.0.1"].map(str::to_owned));
        let words: Vec<&str> = options.iter().map(String::as_str).collect();
        if run("sftp", &words, "pwd\n").await.status.success() {
            break;
        }
        assert!(std::time::Instant::now() < until, "the place is not free again");
    }
    master.kill().await.expect("a kill");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_changed_over_sftp_is_logged_and_so_is_who_is_not_let_in() {
    let server = Server::start().await;
    let client = Client::new(&server, "a").await;
    let file = server.file("sent", b"content");
    client
        .ok(&format!("mkdir in\nput {} in/f\nrename in/f in/g\nrm in/g\nrmdir in\n", path(&file)))
        .await;
    assert!(!client.sftp("mkdir /x\n").await.status.success());
    server.accounts.change(|account| account.may_write = false);
    assert!(!client.sftp(&format!("put {} f\n", path(&file))).await.status.success());
    assert_eq!(
        server.accounts.log(),
        [
            "a/tester make the directory /a/in: 200",
            "a/tester write /a/in/f: 200",
            "a/tester rename /a/in/f to /a/in/g: 200",
            "a/tester delete /a/in/g: 200",
            "a/tester delete the directory /a/in: 200",
            "a/tester make the directory /x: 404",
            "a/tester write /a/f: 403",
        ]
    );
    server.accounts.forget_all();
    assert!(!client.sftp("pwd\n").await.status.success());
    assert_eq!(
        server.accounts.log().last().expect("a line"),
        "the key of an SFTP client is nobody's"
    );
}

const SOON: Duration = Duration::from_secs(1);

/// russh says farewell only to a client that goes on with the handshake.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_says_nothing_or_stops_in_the_handshake_is_disconnected() {
    let server = Server::start_that_waits(SOON).await;
    for hello in ["", "SSH-2.0-silent\r\n"] {
        let mut client =
            TcpStream::connect(("127.0.0.1", server.sftp_port)).await.expect("it listens");
        client.write_all(hello.as_bytes()).await.expect("it reads");
        let mut said = Vec::new();
        let ended = timeout(PATIENCE, client.read_to_end(&mut said)).await;
        // With an end of the stream or a reset.
        assert!(ended.is_ok(), "it is still connected: {hello:?}");
    }
}

/// It shakes hands, and tells what it hears at the end.
struct Nobody(mpsc::UnboundedSender<String>);

impl Handler for Nobody {
    type Error = russh::Error;

    async fn check_server_key(&mut self, _: &PublicKeyOrCertificate) -> Result<bool, russh::Error> {
        Ok(true)
    }

    async fn disconnected(
        &mut self,
        reason: DisconnectReason<russh::Error>,
    ) -> Result<(), russh::Error> {
        if let DisconnectReason::ReceivedDisconnect(farewell) = reason {
            let _ = self.0.send(farewell.message);
        }
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_log_in_is_disconnected_and_hears_why() {
    let server = Server::start_that_waits(SOON).await;
    let begun = Instant::now();
    let said = loop {
        assert!(begun.elapsed() < PATIENCE, "it has never heard why");
        let (tell, mut told) = mpsc::unbounded_channel();
        let address = ("127.0.0.1", server.sftp_port);
        let client = russh::client::connect(Arc::default(), address, Nobody(tell)).await;
        // On a busy machine the handshake, or the farewell, may take too long.
        let Ok(client) = client else { continue };
        let _ = timeout(PATIENCE, client).await.expect("it is disconnected");
        if let Ok(said) = told.try_recv() {
            break said;
        }
    };
    assert_eq!(said, "it took too long to log in");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_has_logged_in_stays() {
    let server = Server::start_that_waits(SOON).await;
    let client = Client::new(&server, "a").await;
    let begun = Instant::now();
    // On a busy machine the login may come too late.
    while !client.sftp("ls\n!sleep 3\nls\n").await.status.success() {
        assert!(begun.elapsed() < PATIENCE, "it is disconnected each time");
    }
}

/// Logs in as the tester of the tenant `a`.
async fn logged_in(server: &Server) -> russh::client::Handle<Nobody> {
    let (address, begun) = (("127.0.0.1", server.sftp_port), Instant::now());
    loop {
        assert!(begun.elapsed() < PATIENCE, "it is not let in");
        let (tell, _) = mpsc::unbounded_channel();
        let client = russh::client::connect(Arc::default(), address, Nobody(tell)).await;
        // On a busy machine the login may come too late.
        let Ok(mut client) = client else { continue };
        let Ok(admitted) = client.authenticate_password("any", "token-of-a").await else {
            continue;
        };
        assert!(admitted.success());
        return client;
    }
}

async fn session(client: &russh::client::Handle<Nobody>) -> RawSftpSession {
    let channel = client.channel_open_session().await.expect("a channel");
    channel.request_subsystem(true, "sftp").await.expect("a subsystem");
    let session = RawSftpSession::new(channel.into_stream());
    session.init().await.expect("it speaks SFTP");
    session
}

/// It may have files open, which count.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_whose_user_is_none_any_more_is_ended_although_it_asks_nothing() {
    let server = Server::start_that_looks(SOON).await;
    let client = logged_in(&server).await;
    let _session = session(&client).await;
    server.accounts.forget_all();
    let _ = timeout(PATIENCE, client).await.expect("it is disconnected");
}

/// Each takes descriptors of the server.
#[tokio::test(flavor = "multi_thread")]
async fn open_directories_count_as_open_files() {
    let server = Server::start().await;
    let client = logged_in(&server).await;
    let mut sessions = Vec::new();
    for _ in 0..2 {
        let session = session(&client).await;
        for number in 0..128 {
            let opened = session.opendir("/").await;
            opened.unwrap_or_else(|error| panic!("directory {number}: {error}"));
        }
        sessions.push(session);
    }
    let third = session(&client).await;
    let refused = third.opendir("/").await.expect_err("all are in use");
    assert!(refused.to_string().contains("256 of the tenant"), "{refused}");
}

async fn length_at(session: &RawSftpSession, at: &str) -> Option<u64> {
    session.lstat(at).await.ok().and_then(|found| found.attrs.size)
}

/// sshfs asks for a file as soon as it is open, and closes it a moment after its program has.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_written_is_there_for_its_own_session_and_for_no_other() {
    let server = Server::start().await;
    let client = logged_in(&server).await;
    let (own, other) = (session(&client).await, session(&client).await);
    let new = OpenFlags::WRITE | OpenFlags::CREATE | OpenFlags::EXCLUDE;
    let none = FileAttributes::empty;
    let file = own.open("/a/f", new, none()).await.expect("a new file").handle;
    assert_eq!(length_at(&own, "/a/f").await, Some(0));
    own.write(file.as_str(), 0, b"01234".to_vec()).await.expect("it is written");
    let stat = own.fstat(file.as_str()).await.expect("it is open").attrs;
    assert_eq!((length_at(&own, "/a/f").await, stat.size), (Some(5), Some(5)));
    assert_eq!(own.read(file.as_str(), 1, 100).await.expect("what was written").data, b"1234");
    let reader = own.open("/a/f", OpenFlags::READ, none()).await.expect("it is there").handle;
    assert_eq!(own.read(reader.as_str(), 0, 2).await.expect("what was written").data, b"01");
    own.open("/a/f", new, none()).await.expect_err("it is there already");
    own.mkdir("/a/f", none()).await.expect_err("it is there already");
    let directory = own.opendir("/a").await.expect("a directory").handle;
    let listed = own.readdir(directory.as_str()).await.expect("an entry").files;
    assert_eq!((listed.len(), listed[0].filename.as_str()), (1, "f"));
    own.readdir(directory.as_str()).await.expect_err("no more");
    assert_eq!(length_at(&other, "/a/f").await, None);
    other.open("/a/f", OpenFlags::READ, none()).await.expect_err("it is not whole");
    own.close(file.as_str()).await.expect("it gets its name");
    assert_eq!(length_at(&other, "/a/f").await, Some(5));
    assert_eq!(own.read(reader.as_str(), 3, 9).await.expect("as it is now").data, b"34");
    // What is only looked at stays as it is.
    let before = fs::metadata(server.stored("a", "f")).expect("a file").modified().expect("a time");
    let both = OpenFlags::READ | OpenFlags::WRITE;
    let file = own.open("/a/f", both, none()).await.expect("a file").handle;
    assert_eq!(own.read(file.as_str(), 0, 9).await.expect("a file").data, b"01234");
    own.close(file.as_str()).await.expect("nothing to do");
    let after = fs::metadata(server.stored("a", "f")).expect("a file").modified().expect("a time");
    assert_eq!(before, after);
    // Other bytes of it: the rest stays.
    let file = own.open("/a/f", both, none()).await.expect("a file").handle;
    own.write(file.as_str(), 1, b"xy".to_vec()).await.expect("it is written");
    own.close(file.as_str()).await.expect("it is stored");
    assert_eq!(fs::read(server.stored("a", "f")).expect("a file"), b"0xy34");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_written_is_renamed_and_deleted_before_it_is_closed() {
    let server = Server::start().await;
    let client = logged_in(&server).await;
    let own = session(&client).await;
    let new = OpenFlags::WRITE | OpenFlags::CREATE | OpenFlags::TRUNCATE;
    let begin = async |at: &str, content: &[u8]| {
        let opened = own.open(at, new, FileAttributes::empty()).await.expect("a file");
        own.write(opened.handle.as_str(), 0, content.to_vec()).await.expect("it is written");
        opened.handle
    };
    // To a new name, and from a directory that moves.
    own.mkdir("/a/d", FileAttributes::empty()).await.expect("a directory");
    let file = begin("/a/d/f", b"moved").await;
    own.rename("/a/d/f", "/a/d/g").await.expect("it moves");
    own.rename("/a/d", "/a/e").await.expect("they move");
    own.rmdir("/a/e").await.expect_err("it is not empty");
    assert_eq!(length_at(&own, "/a/d/f").await, None);
    assert_eq!(length_at(&own, "/a/e/g").await, Some(5));
    own.close(file.as_str()).await.expect("it gets its name");
    assert_eq!(fs::read(server.stored("a", "e/g")).expect("a file"), b"moved");
    // Over a file that is there: only if that is asked for.
    let file = begin("/a/new", b"new").await;
    own.rename("/a/new", "/a/e/g").await.expect_err("the name is taken");
    own.rename("/a/new", "/b/new").await.expect_err("it is of another tenant");
    let mut names = Vec::new();
    for name in ["/a/new", "/a/e/g"] {
        names.extend(u32::try_from(name.len()).expect("short").to_be_bytes());
        names.extend(name.as_bytes());
    }
    own.extended("posix-rename@openssh.com", names).await.expect("it replaces the other");
    assert_eq!(fs::read(server.stored("a", "e/g")).expect("a file"), b"moved", "until it is whole");
    own.close(file.as_str()).await.expect("it gets its name");
    assert_eq!(fs::read(server.stored("a", "e/g")).expect("a file"), b"new");
    let file = begin("/a/gone", b"gone").await;
    own.remove("/a/gone").await.expect("it is there");
    own.write(file.as_str(), 4, b"more".to_vec()).await.expect("it is still open");
    own.close(file.as_str()).await.expect("nothing to do");
    own.remove("/a/gone").await.expect_err("it is not there");
    let parts = fs::read_dir(server.dir.path().join("data/tenants/a/parts")).expect("parts");
    assert_eq!((length_at(&own, "/a/gone").await, parts.count()), (None, 0));
}

/// What rsync, rclone and `cp -p` set, of a file that is being written too. Owner and mode are not kept, and to set them is no error.
#[tokio::test(flavor = "multi_thread")]
async fn sftp_keeps_modification_times_and_sets_lengths() {
    let server = Server::start().await;
    let client = logged_in(&server).await;
    let own = session(&client).await;
    let new = OpenFlags::WRITE | OpenFlags::CREATE | OpenFlags::TRUNCATE;
    let at = |mtime: u32| FileAttributes {
        mtime: Some(mtime),
        atime: Some(1),
        permissions: Some(0o600),
        uid: Some(7),
        gid: Some(7),
        ..FileAttributes::empty()
    };
    let file = own.open("/a/f", new, FileAttributes::empty()).await.expect("a file").handle;
    own.write(file.as_str(), 0, b"0123456789".to_vec()).await.expect("it is written");
    own.fsetstat(file.as_str(), at(1_000_000_000)).await.expect("a time");
    let now = own.stat("/a/f").await.expect("it is there").attrs.mtime;
    own.close(file.as_str()).await.expect("it is stored");
    let then = own.stat("/a/f").await.expect("it is there").attrs.mtime;
    assert_eq!((now, then), (Some(1_000_000_000), Some(1_000_000_000)));
    for place in ["/a/f", "/a"] {
        own.setstat(place, at(1_100_000_000)).await.expect("a time");
        let then = own.stat(place).await.expect("it is there").attrs.mtime;
        assert_eq!(then, Some(1_100_000_000), "{place}");
    }
    let cut = FileAttributes { size: Some(4), ..at(1_200_000_000) };
    own.setstat("/a/f", cut).await.expect("a length");
    let stat = own.stat("/a/f").await.expect("it is there").attrs;
    assert_eq!((stat.size, stat.mtime), (Some(4), Some(1_200_000_000)));
    assert_eq!(fs::read(server.stored("a", "f")).expect("a file"), b"0123");
    own.setstat("/a/nothing", at(1)).await.expect_err("it is not there");
    own.setstat("/b/f", at(1)).await.expect_err("it is another's");
}

/// Two such names would become one text, and two files one.
#[tokio::test(flavor = "multi_thread")]
async fn names_that_are_no_utf_8_are_refused_over_sftp() {
    let server = Server::start().await;
    let client = Client::new(&server, "a").await;
    let tree = server.dir.path().join("names");
    fs::create_dir(&tree).expect("a directory");
    for name in [&b"caf\xe9.txt"[..], b"caf\xe8.txt", "café.txt".as_bytes(), b"plain"] {
        fs::write(tree.join(OsStr::from_bytes(name)), name).expect("a file");
    }
    let options = client.options().join(" ");
    // Each of them after the others, whatever became of these.
    let script = format!(
        "cd {} && for name in *; do printf -- '-put \"%s\"\\n' \"$name\"; done > ../batch; \
         printf -- '-mkdir \"d\\351\"\\n-rename plain \"p\\351\"\\n-ls \"d\\351\"\\n' >> ../batch; \
         sftp {options} -b ../batch any@127.0.0.1",
        path(&tree)
    );
    let output = run("sh", &["-c", &script], "").await;
    let said = text(&output.stderr);
    for name in [r"caf\350.txt", r"caf\351.txt", r"d\351", r"p\351"] {
        assert!(said.contains(&format!("{name}\": Failure")), "{name}: {said}");
    }
    let names = fs::read_dir(server.stored("a", "")).expect("a directory").map(|entry| {
        let entry = entry.expect("an entry");
        assert_eq!(fs::read(entry.path()).expect("a file"), entry.file_name().as_bytes());
        entry.file_name().into_string().expect("UTF-8")
    });
    let names: BTreeSet<String> = names.collect();
    assert_eq!(names, ["café.txt", "plain"].map(str::to_owned).into());
}

/// What another tenant has answers as names that never were, whatever is asked.
#[tokio::test(flavor = "multi_thread")]
async fn over_sftp_another_tenants_files_are_not_there() {
    let server = Server::start().await;
    let (ann, bob) = (Client::new(&server, "a").await, Client::new(&server, "b").await);
    let file = server.file("sent", b"secret");
    let got = server.dir.path().join("got");
    ann.ok(&format!("mkdir in\nput {} in/f\n", path(&file))).await;
    bob.ok(&format!("mkdir own\nput {} own/f\n", path(&file))).await;
    let (file, got) = (path(&file), path(&got));
    for asked in [
        "ls -l DIR/in/f".to_owned(),
        "ls -l DIR/in".to_owned(),
        "ls DIR".to_owned(),
        "cd DIR/in".to_owned(),
        format!("get DIR/in/f {got}"),
        format!("put {file} DIR/in/f"),
        format!("put {file} DIR/in/new"),
        format!("reput {file} DIR/in/f"),
        "rm DIR/in/f".to_owned(),
        "rmdir DIR/in".to_owned(),
        "mkdir DIR/in/new".to_owned(),
        "mkdir DIR/new".to_owned(),
        "rename DIR/in/f own/taken".to_owned(),
        "rename own/f DIR/in/given".to_owned(),
        "rename DIR/in/f DIR/in/g".to_owned(),
        "chmod 600 DIR/in/f".to_owned(),
        "chown 0 DIR/in/f".to_owned(),
        "chgrp 0 DIR/in/f".to_owned(),
        "ln DIR/in/f own/linked".to_owned(),
        "ln -s DIR/in/f own/linked".to_owned(),
        "df DIR/in".to_owned(),
        "cp DIR/in/f own/copied".to_owned(),
        format!("reget DIR/in/f {got}"),
    ] {
        let mut said = Vec::new();
        for (of, named) in [("a", "/a"), ("nobody", "/c"), ("a", "/b/../a"), ("nobody", "/b/../c")]
        {
            let output = bob.sftp(&format!("{}\n", asked.replace("DIR", named))).await;
            assert!(!output.status.success(), "{asked} of {of}: {output:?}");
            let shown = format!("{}{}", text(&output.stdout), text(&output.stderr));
            assert!(!shown.contains("secret"), "{shown}");
            // But for the name that was asked for.
            let same = ["/b/../a", "/b/../c", "/a", "/c"];
            said.push(same.iter().fold(shown, |shown, name| shown.replace(name, "DIR")));
        }
        assert!(said.iter().all(|one| *one == said[0]), "{asked}: {said:?}");
    }
    let shown = bob.ok("ls /\n").await;
    assert!(shown.contains("/b") && !shown.contains("/a"), "{shown}");
    assert_eq!(fs::read(server.stored("a", "in/f")).expect("it is there"), b"secret");
    assert_eq!(fs::read_dir(server.stored("a", "in")).expect("a directory").count(), 1);
    assert!(server.stored("b", "own/f").exists() && !server.stored("b", "own/taken").exists());
}
