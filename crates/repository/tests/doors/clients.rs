//! The WebDAV door with rclone.

use std::fs;
use std::path::Path;

use crate::server::{Server, path, run, text};

/// rclone over WebDAV; `dav:` is the tree of the tenant `a`.
async fn rclone(server: &Server, arguments: &[&str]) -> String {
    let url = format!("RCLONE_CONFIG_DAV_URL={}/dav/a", server.http);
    let mut all = vec!["RCLONE_CONFIG_DAV_TYPE=webdav", "RCLONE_CONFIG_DAV_VENDOR=other", &url];
    all.extend(["RCLONE_CONFIG_DAV_BEARER_TOKEN=token-of-a", "rclone", "--config", "/dev/null"]);
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
