//! Backups, as `docs/backup.md` says.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::{Cluster, Daemon, Host, until};

fn json(cluster: &Cluster, args: &[&str]) -> Value {
    let text = cluster.ok(&[&["-f", "json"], args].concat(), "");
    serde_json::from_str(&text).expect("JSON")
}

/// qemu-io at a host's volume server, which has to find all as these commands say.
fn io(host: &Host<'_>, volume: &str, commands: &[&str]) {
    let uri = format!("nbd+unix:///{volume}?socket={}", host.path("nbd.sock"));
    let mut command = Command::new("timeout");
    command.args(["60", "qemu-io", "-f", "raw", &uri]);
    command.args(commands.iter().flat_map(|one| ["-c", one]));
    let output = command.stdin(Stdio::null()).output().expect("qemu-io");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    let failed = ["failed", "error", "verification"].iter().any(|word| said.contains(word));
    assert!(output.status.success() && !failed, "{said}");
}

#[test]
fn a_volume_is_backed_up_twice_verified_and_restored_through_the_controller() {
    let cluster = Cluster::up();
    let host = cluster.host("home1", "127.0.0.1");
    let (_volume, _agent) = (host.volume_server(), host.agent());
    let create = ["volume", "create", "data", "--size", "16MiB", "--host", "home1"];
    until("the volume", || cluster.run(&create, "").status.success());
    io(&host, "data", &["write -P 1 0 8M", "flush"]);
    let to = cluster.path("backups");
    // Its disk is not mounted yet.
    let mut waiting =
        Daemon::start(&["backup", "create", "data", "--to", &to, "--api", &cluster.api]);
    let mut known = Value::Null;
    until("the backup to wait", || {
        known = json(&cluster, &["backup", "list"]);
        known[0]["problem"].as_str().is_some_and(|said| said.contains("there is no such directory"))
    });
    assert_eq!(known[0]["state"], "shipping");
    std::fs::create_dir(&to).expect("a directory");
    until("the backup", || waiting.0.try_wait().expect("its state").is_some());
    let first = json(&cluster, &["backup", "list"])[0].clone();
    assert_eq!((&first["state"], &first["problem"]), (&"completed".into(), &"".into()), "{first}");
    let first = first["name"].as_str().expect("a name").to_owned();

    io(&host, "data", &["write -P 2 1M 1M", "flush"]);
    let second = json(&cluster, &["backup", "create", "data", "--to", &to]);
    let shipped = second["shipped_bytes"].as_u64().expect("bytes");
    assert!((1 << 20..=(1 << 20) + (64 << 10)).contains(&shipped), "{second}");
    let second = second["name"].as_str().expect("a name").to_owned();
    let at = ["backup", "list", "--from", &to, "--host", "home1"];
    assert_eq!(json(&cluster, &at).as_array().expect("a list").len(), 2);
    cluster.ok(&["backup", "verify", &first], "");
    cluster.ok(&["backup", "restore", &first, "--as", "old"], "");
    // As somebody does whose controller knows nothing of the backup.
    cluster.ok(&["backup", "delete", &second, "--forget"], "");
    let from = ["--from", &to, "--host", "home1"];
    cluster.ok(&[&["backup", "restore", &second, "--as", "new"], &from[..]].concat(), "");
    io(&host, "old", &["read -P 1 0 8M", "read -P 0 8M 8M"]);
    io(&host, "new", &["read -P 1 0 1M", "read -P 2 1M 1M", "read -P 1 2M 6M"]);
    let taken = cluster.run(&["backup", "restore", &first, "--as", "old"], "");
    assert_eq!(taken.status.code(), Some(5), "{taken:?}");

    let third = json(&cluster, &["backup", "create", "data", "--to", &to]);
    let before = pieces(Path::new(&to)).len();
    cluster.ok(&["backup", "delete", &first], "");
    until("the first backup to be gone", || {
        let left = json(&cluster, &["backup", "list"]);
        left.as_array().is_some_and(|all| all.len() == 1 && all[0]["name"] == third["name"])
    });
    assert_eq!(pieces(Path::new(&to)).len(), before, "the others stand on its layers");
    cluster.ok(&[&["backup", "verify", &second], &from[..]].concat(), "");
    let piece = pieces(Path::new(&to)).pop().expect("a piece");
    let mut bytes = std::fs::read(&piece).expect("the piece");
    bytes[5000] ^= 1;
    std::fs::write(&piece, bytes).expect("written");
    let damaged = cluster.run(&[&["backup", "verify", &second], &from[..]].concat(), "");
    assert_eq!(damaged.status.code(), Some(5), "{damaged:?}");
    let said = String::from_utf8_lossy(&damaged.stderr).into_owned();
    assert!(said.contains("its bytes are not what was shipped"), "{said}");
}

fn pieces(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for layer in std::fs::read_dir(dir.join("layers")).expect("layers") {
        for file in std::fs::read_dir(layer.expect("a layer").path()).expect("pieces") {
            let path = file.expect("a file").path();
            found.extend(path.to_string_lossy().contains("00000000-").then_some(path));
        }
    }
    found.sort();
    found
}

#[test]
fn a_controller_is_backed_up_while_it_runs_and_killed_backups_are_none() {
    let cluster = Cluster::up();
    let host = cluster.host("home1", "127.0.0.1");
    let (_volume, _agent) = (host.volume_server(), host.agent());
    let create = ["volume", "create", "data", "--size", "1MiB", "--host", "home1"];
    until("the volume", || cluster.run(&create, "").status.success());
    let state = cluster.path("state");
    for tried in 0..6 {
        let file = cluster.path(&format!("killed-{tried}"));
        let mut backup = Daemon::start(&["controller", "backup", &file, "--state", &state]);
        std::thread::sleep(Duration::from_millis(tried * 30));
        // It may have ended by now.
        let _ = backup.0.kill();
        backup.0.wait().expect("its end");
        if Path::new(&file).exists() {
            let to = cluster.path(&format!("restored-{tried}"));
            cluster.ok(&["controller", "restore", &file, "--state", &to], "");
        }
    }
    let file = cluster.path("backup.tar");
    cluster.ok(&["controller", "backup", &file, "--state", &state], "");
    cluster.ok(&["volume", "create", "later", "--size", "1MiB", "--host", "home1"], "");
    let used = cluster.run(&["controller", "restore", &file, "--state", &state], "");
    assert_eq!(used.status.code(), Some(5), "{used:?}");
    let (copy, second) = (cluster.path("copy"), cluster.path("second.sock"));
    let restored = cluster.run(&["controller", "restore", &file, "--state", &copy], "");
    assert!(restored.status.success(), "{restored:?}");
    let said = String::from_utf8_lossy(&restored.stderr).into_owned();
    assert!(said.contains("home1") && said.contains("perigee host give-up"), "{said}");
    let second_api = format!("unix:{second}");
    let _second = Daemon::start(&["controller", "run", "--state", &copy, "--listen", &second_api]);
    until("the second controller", || UnixStream::connect(&second).is_ok());
    let ask = |args: &[&str]| cluster.ok(&[&["--api", &second_api], args].concat(), "");
    until("the host to be heard", || {
        let output = cluster.run(&["--api", &second_api, "host", "list"], "");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        output.status.success() && !said.contains("was restored from a backup")
    });
    ask(&["volume", "info", "data"]);
    let unknown = ask(&["host", "unknown"]);
    assert!(unknown.contains("later") && !unknown.contains("data"), "{unknown}");
}
