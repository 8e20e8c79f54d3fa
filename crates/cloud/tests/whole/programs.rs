//! Programs as providers: shell scripts that answer well, badly or never.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_cloud::{CloudErrorKind, Provider, providers};
use perigee_model::kept::{NewSnapshot, SnapshotState};
use perigee_model::rental::{InstanceState, NewInstance};
use tempfile::TempDir;

use crate::moto::PATIENCE;
use crate::new_instance;

struct Script {
    dir: TempDir,
    provider: Arc<dyn Provider>,
}

/// A provider whose program is this shell script. `$dir` is a directory of its own.
fn script(lines: &str) -> Script {
    script_within(lines, "10m")
}

fn script_within(lines: &str, timeout: &str) -> Script {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("program");
    let text = format!("#!/bin/sh\ndir='{}'\n{lines}\n", dir.path().display());
    std::fs::write(&file, text).expect("it is written");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).expect("a mode");
    let yaml = format!(
        "p:\n  program: [/bin/sh, {}, first]\n  environment: [CARGO_PKG_NAME]\n  timeout: {timeout}\n",
        file.display()
    );
    let provider = providers(&yaml).expect("a provider").remove(0);
    Script { dir, provider }
}

impl Script {
    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let late = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < late, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Whether a process has ended; nobody may have asked for its end.
fn has_ended(pid: &str) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    state.map_or(true, |state| state.rsplit(')').next().is_some_and(|rest| rest.starts_with(" Z")))
}

fn new() -> NewInstance {
    let user_data = "#cloud-config\njoin: top-secret\n".to_owned();
    NewInstance { kvm: true, user_data, ..new_instance("r1") }
}

const INSTANCE: &str = r#"{"id": "i1", "rental": "RENTAL", "state": "pending", "kind": "k", "zone": "z", "spot": false, "address": null, "started_unix_s": null}"#;

fn instance(rental: &str) -> String {
    INSTANCE.replace("RENTAL", rental)
}

#[tokio::test]
async fn a_program_gets_its_verb_its_input_and_little_else() {
    let script = script(&format!(
        "cat > $dir/input; env > $dir/env; echo \"$@\" > $dir/arguments; echo '{{\"instance\": {}}}'",
        instance("r1")
    ));
    let made = script.provider.create(&new()).await.expect("an instance");
    assert_eq!((made.id.as_str(), made.state), ("i1", InstanceState::Pending));
    assert_eq!(read(&script.file("arguments")), "first create\n");
    let input: NewInstance = serde_json::from_str(&read(&script.file("input"))).expect("its input");
    assert_eq!(input, new());
    let env = read(&script.file("env"));
    assert!(env.contains("CARGO_PKG_NAME=") && env.contains("PATH="), "{env}");
    assert!(!env.contains("CARGO_PKG_VERSION="), "it is not named: {env}");
}

#[tokio::test]
async fn each_verb_has_its_answer() {
    let script = script(&format!(
        "case $2 in\n\
         offers) echo '{{\"offers\": []}}';;\n\
         list) echo '{{\"instances\": [{{\"cluster\": \"c1\", {}]}}';;\n\
         end) grep -q '\"i1\"' && echo '{{}}';;\n\
         notices) echo '{{\"notices\": [{{\"instance\": \"i1\", \"ends_unix_s\": 7}}]}}';;\n\
         esac",
        instance("r9").trim_start_matches('{')
    ));
    let provider = &script.provider;
    assert_eq!(provider.offers().await.expect("offers"), []);
    let listed = provider.list("c1").await.expect("a list");
    assert_eq!(listed[0].rental.as_deref(), Some("r9"));
    let error = provider.list("c2").await.expect_err("somebody else's may not be ended");
    assert_eq!(error.kind, CloudErrorKind::Unclear, "{error}");
    assert!(error.message.contains("i1 of another cluster"), "{error}");
    provider.end("i1").await.expect("its end");
    assert_eq!(provider.notices("c1").await.expect("notices")[0].ends_unix_s, 7);
    let error = provider.end("i2").await.expect_err("it says nothing");
    assert_eq!(error.kind, CloudErrorKind::Unclear, "{error}");
}

#[tokio::test]
async fn a_program_that_keeps_disks_says_which_and_one_that_does_not_says_so() {
    let snapshot = r#""id": "s1", "rental": "r1", "state": "complete", "stored_bytes": null"#;
    let script = script(&format!(
        "case $2 in\n\
         snapshot) echo '{{\"snapshot\": {{{snapshot}}}}}';;\n\
         snapshots) echo '{{\"snapshots\": [{{\"cluster\": \"c1\", {snapshot}}}]}}';;\n\
         *) echo '{{\"error\": {{\"kind\": \"refused\", \"message\": \"no such verb\"}}}}';;\n\
         esac"
    ));
    let snapshots = script.provider.snapshots().expect("a program may know the verbs");
    let new = |rental: &str| NewSnapshot {
        rental: rental.to_owned(),
        cluster: "c1".to_owned(),
        instance: "i1".to_owned(),
    };
    let taken = snapshots.take(&new("r1")).await.expect("a snapshot");
    assert_eq!((taken.id.as_str(), taken.state), ("s1", SnapshotState::Complete));
    let error = snapshots.take(&new("r2")).await.expect_err("it is of another rental");
    assert_eq!(error.kind, CloudErrorKind::Unclear, "{error}");
    assert_eq!(snapshots.list("c1").await.expect("a list"), [taken]);
    let error = snapshots.list("c2").await.expect_err("somebody else's may not be deleted");
    assert!(error.message.contains("s1 of another cluster"), "{error}");
    let error = snapshots.delete("s1").await.expect_err("it does not know that verb");
    assert_eq!(error.kind, CloudErrorKind::Refused, "{error}");
}

#[tokio::test]
async fn errors_and_nonsense_are_told_apart() {
    let quota =
        script("echo '{\"error\": {\"kind\": \"quota\", \"message\": \"8 of 8 used\"}}'; exit 3");
    let error = quota.provider.create(&new()).await.expect_err("over the quota");
    assert_eq!(error.kind, CloudErrorKind::Quota);
    assert_eq!(error.message, "can't rent a k in z at p: over the account's quota: 8 of 8 used");
    let other = instance("r2");
    for (lines, why) in [
        ("echo hello", "makes no sense"),
        ("true", "makes no sense"),
        ("echo '{\"instance\": {}}'", "missing field"),
        (format!("echo '{{\"instance\": {other}}}'").as_str(), "not the one of the rental r1"),
        ("echo '{\"instance\"' >&2; exit 1", "without saying why; it wrote: {\"instance\""),
        ("cat >&2; exit 1", "it wrote"),
        ("yes", "bytes"),
    ] {
        let script = script(lines);
        let error = script.provider.create(&new()).await.expect_err(lines);
        assert_eq!(error.kind, CloudErrorKind::Unclear, "{lines}: {error}");
        assert!(error.message.contains(why), "{lines}: {error}");
        assert!(!error.message.contains("top-secret"), "{lines}: {error}");
    }
}

#[tokio::test]
async fn a_program_that_is_not_there_has_done_nothing() {
    let yaml = "p:\n  program: [/nowhere/at/all]\n";
    let provider = providers(yaml).expect("a provider").remove(0);
    let error = provider.create(&new()).await.expect_err("nobody there");
    assert_eq!(error.kind, CloudErrorKind::Refused, "{error}");
    assert!(error.message.contains("/nowhere/at/all"), "{error}");
}

#[tokio::test]
async fn a_program_that_hangs_is_ended() {
    let script = script_within("exec sleep 100000", "1s");
    let error = script.provider.create(&new()).await.expect_err("it hangs");
    assert_eq!(error.kind, CloudErrorKind::Unclear, "{error}");
    assert!(error.message.contains("within 1 s"), "{error}");
}

#[tokio::test]
async fn what_a_program_has_started_ends_with_the_call() {
    let script = script("sleep 100000 & echo $! > $dir/made; mv $dir/made $dir/child; wait");
    let provider = Arc::clone(&script.provider);
    let call = tokio::spawn(async move { provider.offers().await });
    let child = script.file("child");
    until("the program has started another one", || child.exists()).await;
    let child = read(&child).trim().to_owned();
    assert!(!has_ended(&child));
    call.abort();
    until("the program's child has ended", || has_ended(&child)).await;
}

#[tokio::test]
async fn a_program_that_leaves_a_child_behind_is_not_waited_for() {
    let script = script("sleep 100000 & echo $! > $dir/child; echo '{\"offers\": []}'");
    assert_eq!(script.provider.offers().await.expect("offers"), []);
    let child = read(&script.file("child")).trim().to_owned();
    until("the program's child has ended", || has_ended(&child)).await;
}
