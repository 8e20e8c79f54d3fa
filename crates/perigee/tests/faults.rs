//! `perigee lab run faults`: a few cells that need no VM. `make faults` runs all.

use std::process::{Command, Stdio};

use serde_json::Value;

/// Long enough for a busy machine.
const PATIENCE_S: &str = "1800";

const CELLS: [&str; 7] = [
    "remote,use,kill-old-volume",
    "copy,taking,kill-old-volume",
    "copy,filling,kill-new-volume",
    "copy,filling,full-new-pool",
    "move,filling,wan-down-1s",
    "replica,filling,kill-new-volume",
    "promotion,asked,kill-controller",
];

#[test]
fn faults_in_the_placements_lose_nothing_and_leave_nothing_behind() {
    let image = std::env::var("PERIGEE_TEST_IMAGE")
        .expect("PERIGEE_TEST_IMAGE names the golden image's directory; make test sets it");
    let dir = tempfile::Builder::new().prefix("pgf").tempdir().expect("a directory");
    let (base, out) = (dir.path().join("labs"), dir.path().join("out"));
    let mut command = Command::new("timeout");
    command.args([PATIENCE_S, env!("CARGO_BIN_EXE_perigee"), "lab", "run", "faults"]);
    command.args(["--image", &image]).args(CELLS.map(|cell| format!("--only={cell}")));
    command.arg("--base").arg(&base).arg("--out").arg(&out).stdin(Stdio::null());
    let ran = command.output().expect("coreutils' timeout");
    let said = [ran.stdout, ran.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(ran.status.success(), "{said}");
    let text = std::fs::read(out.join("results.json")).expect("results.json");
    let results: Value = serde_json::from_slice(&text).expect("JSON");
    let cells = results["cells"].as_array().expect("a list");
    assert_eq!(cells.len(), CELLS.len(), "{said}");
    assert!(cells.iter().all(|cell| cell["verdict"] == "right"), "{said}");
    assert!(out.join("report.html").exists());
    let labs = std::fs::read_dir(&base).map_or(0, |labs| labs.flatten().count());
    assert_eq!(labs, 0, "the lab is removed");
}
