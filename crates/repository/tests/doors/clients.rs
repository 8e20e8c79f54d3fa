//! The WebDAV and SFTP doors with rclone.

use std::fs;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use crate::server::{Server, content, cut_download, path, run, text};
use crate::sftp::Client;

/// What makes `dav:` the tree of the tenant `a` for rclone.
fn dav(server: &Server) -> [(&'static str, String); 4] {
    [
        ("RCLONE_CONFIG_DAV_TYPE", "webdav".to_owned()),
        ("RCLONE_CONFIG_DAV_VENDOR", "other".to_owned()),
        ("RCLONE_CONFIG_DAV_URL", format!("{}/dav/a", server.http)),
        ("RCLONE_CONFIG_DAV_BEARER_TOKEN", "token-of-a".to_owned()),
    ]
}

/// rclone over WebDAV; `dav:` is the tree of the tenant `a`.
async fn rclone(server: &Server, arguments: &[&str]) -> String {
    let settings = dav(server).map(|(name, value)| format!("{name}={value}"));
    let mut all: Vec<&str> = settings.iter().map(String::as_str).collect();
    all.extend(["rclone", "--config", "/dev/null"]);
    all.extend_from_slice(arguments);
    let output = run("env", &all, "").await;
    assert!(output.status.success(), "{arguments:?}");
    text(&output.stdout)
}

async fn same(one: &Path, other: &Path) {
    assert!(run("diff", &["-r", path(one), path(other)], "").await.status.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn rclone_sends_changes_and_deletes_over_webdav() {
    let server = Server::start().await;
    let tree = server.dir.path().join("tree");
    fs::create_dir_all(tree.join("sub dir ü")).expect("a directory");
    fs::write(tree.join("a"), "a".repeat(100_000)).expect("a file");
    fs::write(tree.join("sub dir ü/b"), "b").expect("a file");
    rclone(&server, &["sync", path(&tree), "dav:tree"]).await;
    same(&tree, &server.stored("a", "tree")).await;
    rclone(&server, &["check", "--download", path(&tree), "dav:tree"]).await;
    rclone(&server, &["moveto", "dav:tree/a", "dav:tree/c"]).await;
    assert!(!server.stored("a", "tree/a").exists() && server.stored("a", "tree/c").exists());
    rclone(&server, &["copyto", "dav:tree/c", "dav:tree/d"]).await;
    assert_eq!(fs::read(server.stored("a", "tree/d")).expect("a file").len(), 100_000);
    // What is there already is replaced.
    fs::write(tree.join("a"), "other").expect("a file");
    rclone(&server, &["copyto", path(&tree.join("a")), "dav:tree/c"]).await;
    assert_eq!(rclone(&server, &["cat", "dav:tree/c"]).await, "other");
    rclone(&server, &["purge", "dav:tree"]).await;
    assert!(!server.stored("a", "tree").exists());
}

/// It compares lengths and times. Over WebDAV it keeps times where it takes the server for one that knows ownCloud's header.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_rclone_sync_sends_nothing_over_sftp_and_webdav() {
    let server = Server::start().await;
    let client = Client::new(&server, "a").await;
    let tree = server.dir.path().join("tree");
    fs::create_dir_all(tree.join("sub %+# ü")).expect("a directory");
    fs::write(tree.join("sub %+# ü/b"), "b").expect("a file");
    let old = tree.join("old");
    fs::write(&old, "old").expect("a file");
    assert!(run("touch", &["-d", "@1000000000", path(&old)], "").await.status.success());
    let settings = dav(&server).into_iter().chain(client.rclone());
    let settings: Vec<String> = settings.map(|(name, value)| format!("{name}={value}")).collect();
    for to in ["sftp:s", "dav,vendor=owncloud:o", "dav,vendor=nextcloud:n"] {
        let rclone = async |arguments: &[&str]| {
            let mut all: Vec<&str> = settings.iter().map(String::as_str).collect();
            all.extend(["rclone", "--config", "/dev/null", "-v"]);
            let output = run("env", &[&all, arguments].concat(), "").await;
            assert!(output.status.success(), "{arguments:?}");
            text(&output.stderr)
        };
        let sync = ["sync", path(&tree), to];
        let first = rclone(&sync).await;
        assert!(first.contains("old: Copied (new)"), "{to}: {first}");
        let second = rclone(&sync).await;
        assert!(second.contains("There was nothing to transfer"), "{to}: {second}");
        rclone(&["check", path(&tree), to]).await;
        let stored = server.stored("a", to.split_once(':').expect("a place").1);
        same(&tree, &stored).await;
        let old = fs::metadata(stored.join("old")).and_then(|old| old.modified());
        assert_eq!(old.expect("a time"), UNIX_EPOCH + Duration::from_secs(1_000_000_000), "{to}");
        // A copy at the server is as old, too.
        rclone(&["copyto", &format!("{to}/old"), &format!("{to}/copy")]).await;
        let copy = fs::metadata(stored.join("copy")).and_then(|copy| copy.modified());
        assert_eq!(copy.expect("a time"), UNIX_EPOCH + Duration::from_secs(1_000_000_000), "{to}");
    }
}

/// rclone can't go on with an upload: it sends all of it again. What is there already is not sent.
#[tokio::test(flavor = "multi_thread")]
async fn rclone_that_was_cut_leaves_no_file_and_a_second_one_sends_or_fetches_the_rest() {
    let server = Server::start().await;
    let tree = server.dir.path().join("tree");
    fs::create_dir_all(&tree).expect("a directory");
    for number in 0..20 {
        fs::write(tree.join(format!("f{number}")), format!("{number}")).expect("a file");
    }
    rclone(&server, &["copy", path(&tree), "dav:tree"]).await;
    let sent = content(4_000_000);
    fs::write(tree.join("large"), &sent).expect("a file");
    let slow = |from: &str, to: &str| {
        let mut slow = tokio::process::Command::new("rclone");
        slow.args(["--config", "/dev/null", "--bwlimit", "200k", "copy", from, to]);
        slow.envs(dav(&server));
        slow
    };
    server.cut_upload(&mut slow(path(&tree), "dav:tree"), "").await;
    assert!(!server.stored("a", "tree/large").exists(), "it is not whole");
    let listed = rclone(&server, &["lsf", "dav:tree"]).await;
    assert!(listed.lines().count() == 20 && !listed.contains("large"), "{listed}");
    rclone(&server, &["copy", path(&tree), "dav:tree"]).await;
    same(&tree, &server.stored("a", "tree")).await;
    let back = server.dir.path().join("back");
    let large = back.join("large");
    cut_download(&mut slow("dav:tree", path(&back)), "", (&large, &sent)).await;
    rclone(&server, &["copy", "dav:tree", path(&back)]).await;
    same(&tree, &back).await;
}
