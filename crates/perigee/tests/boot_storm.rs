//! `perigee lab run boot-storm` with real guests.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use perigee_lab::LabId;
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(400);

fn storm(dir: &Path, id: &str, clients: &str) -> Command {
    let image = std::env::var("PERIGEE_TEST_IMAGE")
        .expect("PERIGEE_TEST_IMAGE names the golden image's directory; make test sets it");
    let mut command = Command::new(env!("CARGO_BIN_EXE_perigee"));
    command.args(["lab", "run", "boot-storm", "--clients", clients, "--id", id, "--image", &image]);
    command.arg("--base").arg(dir.join("labs")).arg("--out").arg(dir.join("out"));
    command.arg("--trace").arg(dir.join("storm.trace")).stdin(Stdio::null());
    command
}

fn namespace(id: &str) -> PathBuf {
    Path::new("/run/netns").join(format!("pg-{id}-boot"))
}

/// The processes that run in the storm's namespace.
fn processes(id: &str) -> String {
    let name = namespace(id);
    let name = name.file_name().expect("a name");
    let pids = Command::new("ip").args(["netns", "pids"]).arg(name).output().expect("iproute2");
    String::from_utf8_lossy(&pids.stdout).into_owned()
}

fn wait_for(child: &mut Child) -> bool {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().expect("its state") {
            return status.success();
        }
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} for the storm to end");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_storm_boots_real_machines_and_leaves_nothing_even_when_it_is_broken_off() {
    let dir = tempfile::Builder::new().prefix("pgs").tempdir().expect("a directory");
    let base = dir.path().join("labs");
    let id = &LabId::random().to_string();

    let mut broken_off = storm(dir.path(), id, "3").spawn().expect("the storm");
    let deadline = Instant::now() + PATIENCE;
    // Two servers, dnsmasq and three machines.
    while !base.join(id).join("m3.console").exists() {
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} for the machines");
        std::thread::sleep(Duration::from_millis(50));
    }
    let ids = processes(id);
    assert!(ids.lines().count() >= 5, "{ids:?}");
    let sent = Command::new("kill").args(["-INT", &broken_off.id().to_string()]).status();
    assert!(sent.expect("kill").success());
    assert!(!wait_for(&mut broken_off));
    assert!(!namespace(id).exists() && !base.join(id).exists());
    let lives =
        |id: &&str| std::fs::read(format!("/proc/{id}/cmdline")).is_ok_and(|line| !line.is_empty());
    assert_eq!(ids.lines().filter(lives).collect::<Vec<_>>(), [""; 0]);

    assert!(wait_for(&mut storm(dir.path(), id, "2").spawn().expect("the storm")));
    assert!(!namespace(id).exists() && !base.join(id).exists());
    let text = std::fs::read(dir.path().join("out/results.json")).expect("results.json");
    let result: Value = serde_json::from_slice(&text).expect("JSON");
    let number = |value: &Value| value.as_f64().expect("a number");
    let machines = result["machines"].as_array().expect("a list");
    assert_eq!(machines.len(), 2);
    assert!(machines.iter().all(|m| number(&m["up_s"]) > 0.0 && number(&m["read_bytes"]) > 0.0));
    // Both read nearly the same, and of what both read there is one block in the image.
    let [distinct, all] =
        ["source_distinct_bytes", "source_read_bytes"].map(|n| number(&result[n]));
    assert!(distinct > 0.0 && distinct < all * 0.75, "{distinct} of {all}");
    let page = std::fs::read_to_string(dir.path().join("out/report.html")).expect("a report");
    assert!(page.contains("<td>m2</td>"));
    let trace = std::fs::read(dir.path().join("storm.trace")).expect("the trace");
    assert!(!perigee_model::trace::read_trace(&trace).expect("a trace").is_empty());
}
