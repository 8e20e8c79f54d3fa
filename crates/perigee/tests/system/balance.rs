//! Four busy VMs at one host and an idle host beside it, in `perigee lab run balance`.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use serde_json::Value;

/// nextest ends a test after 25 minutes.
const PATIENCE_S: &str = "1440";

/// The exit code says that no VM moved twice, that no move was aborted by the kill of the controller, and that every guest has gone on with
/// its files right. How much is gained depends on what else the machine does, and is only printed: `perigee lab run balance` measures that
/// on a quiet one. The guests want all of their CPU, so that the second host is worth a move even where other tests use its CPU.
#[test]
fn busy_vms_leave_their_host_once_while_the_controller_is_killed() {
    let image = std::env::var("PERIGEE_TEST_IMAGE")
        .expect("PERIGEE_TEST_IMAGE names the golden image's directory; make test sets it");
    let dir = tempfile::Builder::new().prefix("pgb").tempdir().expect("a directory");
    // QEMU's users pass through.
    let passable = std::fs::Permissions::from_mode(0o711);
    std::fs::set_permissions(dir.path(), passable).expect("a mode");
    let (base, out) = (dir.path().join("labs"), dir.path().join("out"));
    let mut command = Command::new("timeout");
    command.args([PATIENCE_S, env!("CARGO_BIN_EXE_perigee"), "lab", "run", "balance"]);
    command.args(["--image", &image, "--busy", "100", "--measure", "10s", "--calm", "2"]);
    command.arg("--base").arg(&base).arg("--out").arg(&out).stdin(Stdio::null());
    let ran = command.output().expect("coreutils' timeout");
    let said = [ran.stdout, ran.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    eprintln!("{said}");
    assert!(ran.status.success(), "{said}");
    let text = std::fs::read(out.join("results.json")).expect("results.json");
    let results: Value = serde_json::from_slice(&text).expect("JSON");
    let list = |of: &str| results[of].as_array().cloned().unwrap_or_default();
    let (moves, vms) = (list("moves"), list("vms"));
    let hosts: BTreeSet<&str> = vms.iter().filter_map(|vm| vm["host"].as_str()).collect();
    assert_eq!((vms.len(), hosts), (4, BTreeSet::from(["home1", "home2"])), "{said}");
    for one in &moves {
        let reason = one["reason"].as_str().unwrap_or_default();
        assert!(reason.starts_with("moves home1 → home2: home2 would have saved "), "{reason}");
    }
    let labs = std::fs::read_dir(&base).map_or(0, |labs| labs.flatten().count());
    assert_eq!(labs, 0, "the lab is removed");
}
