//! The SFTP door with OpenSSH's sftp and scp, and with lftp.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Output;

use crate::server::{PATIENCE, Server, content, path, run, text};

/// A user's side: a key, a directory, and what OpenSSH is to know.
struct Client<'a> {
    server: &'a Server,
    key: PathBuf,
}

impl<'a> Client<'a> {
    async fn new(server: &'a Server, tenant: &str) -> Self {
        let key = server.dir.path().join(format!("key-of-{tenant}"));
        let made =
            run("ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-f", path(&key)], "").await;
        assert!(made.status.success());
        let public = fs::read_to_string(key.with_extension("pub")).expect("a key");
        server.accounts.allow_key(&public, tenant);
        Self { server, key }
    }

    fn options(&self) -> Vec<String> {
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

    async fn sftp(&self, batch: &str) -> Output {
        let options = self.options();
        let mut all: Vec<&str> = options.iter().map(String::as_str).collect();
        all.extend(["-b", "-", "any@127.0.0.1"]);
        run("sftp", &all, batch).await
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
    let mut options = client.options();
    options.extend(["-l", "1000", "-b", "-", "any@127.0.0.1"].map(str::to_owned));
    let mut killed = tokio::process::Command::new("sftp")
        .args(&options)
        .stdin(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("sftp; `make setup` installs it");
    let mut stdin = killed.stdin.take().expect("it has one");
    let batch = format!("put {} f\n", path(&file));
    tokio::io::AsyncWriteExt::write_all(&mut stdin, batch.as_bytes()).await.expect("it reads");
    let parts = server.dir.path().join("data/tenants/a/parts");
    let arrived = || -> u64 {
        let parts = fs::read_dir(&parts).into_iter().flatten().flatten();
        parts.filter_map(|part| part.metadata().ok()).map(|part| part.len()).sum()
    };
    let until = std::time::Instant::now() + PATIENCE;
    while arrived() == 0 {
        assert!(std::time::Instant::now() < until, "nothing arrives");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    killed.kill().await.expect("a kill");
    // Its ssh ends a moment later than sftp.
    while !client.sftp("ls -l f\n").await.status.success() {
        assert!(std::time::Instant::now() < until, "what has arrived is kept");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    assert!(!server.stored("a", "f").exists(), "it is not whole");
    client.ok(&format!("reput {} f\n", path(&file))).await;
    assert!(fs::read(server.stored("a", "f")).expect("it is stored") == sent);
    let got = server.file("got", &sent[..1_234_567]);
    client.ok(&format!("reget f {}\n", path(&got))).await;
    assert!(fs::read(&got).expect("it came") == sent);
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
    server.accounts.forget_keys();
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
    let ssh = format!("ssh -a -x {}", client.options().join(" "));
    let back = server.dir.path().join("back");
    let script = format!(
        "set cmd:fail-exit yes; set net:max-retries 1; set sftp:connect-program \"{ssh}\"; open -u any, sftp://127.0.0.1:{}; \
         mirror -R {} many; mv many/f1 many/g1; rm many/f2; mirror many {}; bye",
        server.sftp_port,
        path(&many),
        path(&back)
    );
    assert!(run("lftp", &["--norc", "-c", &script], "").await.status.success());
    assert_eq!(fs::read(back.join("g1")).expect("it came"), content(100));
    assert_eq!(fs::read_dir(&back).expect("a directory").count(), 49);
}
