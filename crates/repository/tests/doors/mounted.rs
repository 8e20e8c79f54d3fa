//! The SFTP door as a filesystem: sshfs, and programs that know nothing of it.

use std::fs;
use std::path::PathBuf;

use crate::server::{Server, content, path, run, text};
use crate::sftp::Client;

/// A tenant's tree in a directory, until it is dropped.
struct Mounted(PathBuf);

impl Mounted {
    /// # Panics
    /// If there is no /dev/fuse: containers have it with `--device /dev/fuse`.
    async fn new(server: &Server, client: &Client<'_>) -> Self {
        let at = server.dir.path().join("mounted");
        fs::create_dir(&at).expect("a directory");
        let mut options = client.options();
        options.extend(["any@127.0.0.1:".to_owned(), path(&at).to_owned()]);
        let words: Vec<&str> = options.iter().map(String::as_str).collect();
        let done = run("sshfs", &words, "").await;
        assert!(done.status.success(), "sshfs needs /dev/fuse and root: {}", text(&done.stderr));
        Self(at)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let done = std::process::Command::new("fusermount3").args(["-uz", path(&self.0)]).status();
        assert!(done.is_ok_and(|status| status.success()), "{} stays mounted", self.0.display());
    }
}

/// Each ends with an error if what it has written is not there at once.
const PROGRAMS: &str = r#"
set -eux
cd "$1"
echo one > f; test "$(cat f)" = one
echo two >> f; test "$(cat f)" = "one
two"
echo three > f; test "$(cat f)" = three
sed -i s/three/four/ f; test "$(cat f)" = four
mv f g; test "$(cat g)" = four
cp ../large large; cmp ../large large
cp -p ../old old; test "$(stat -c %Y old)" = 1000000000
mkdir out; tar -C ../tree -cf - . | tar -C out -xf -; diff -r ../tree out
test "$(stat -c %Y out/sub/old)" = 1000000000
truncate -s 3 g; test "$(cat g)" = fou
touch -d @1100000000 g; test "$(stat -c %Y g)" = 1100000000
git init -q repo
git -C repo -c user.name=a -c user.email=a@example.org commit -q --allow-empty -m first
git -C repo fsck
rsync -a ../tree/ synced
test -z "$(rsync -ai ../tree/ synced)"
rm -r repo out synced
"#;

#[tokio::test(flavor = "multi_thread")]
async fn programs_write_over_sshfs_as_on_a_disk() {
    let server = Server::start().await;
    let client = Client::new(&server, "a").await;
    let tree = server.dir.path().join("tree");
    fs::create_dir_all(tree.join("sub")).expect("directories");
    server.file("large", &content(3_000_000));
    for old in [server.file("old", b"old"), server.file("tree/sub/old", b"old"), tree.clone()] {
        assert!(run("touch", &["-d", "@1000000000", path(&old)], "").await.status.success());
    }
    let mounted = Mounted::new(&server, &client).await;
    let words = [
        "HOME=/nonexistent",
        "GIT_CONFIG_NOSYSTEM=1",
        "sh",
        "-c",
        PROGRAMS,
        "sh",
        path(&mounted.0),
    ];
    assert!(run("env", &words, "").await.status.success());
    drop(mounted);
    assert_eq!(fs::read(server.stored("a", "g")).expect("a file"), b"fou");
    assert!(fs::read(server.stored("a", "large")).expect("a file") == content(3_000_000));
    assert_eq!(fs::read_dir(server.stored("a", "")).expect("a directory").count(), 3);
}
