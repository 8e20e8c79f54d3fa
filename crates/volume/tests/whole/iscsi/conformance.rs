//! libiscsi's conformance tests, all of them. A test that skips itself has passed nothing: each one
//! that may is listed here with its reason, and any other is a failure.

use std::collections::BTreeMap;
use std::process::Command;

use crate::server::{MIB, Server, assert_io, try_run};

/// The whole set takes half a minute, most of it in the tool's own pauses.
const DEADLINE_S: &str = "240";

/// Tests that may skip themselves, and why: `SUITE.TEST`, or `SUITE.*`.
const SKIPPED: &[(&str, &str)] = &[
    ("ExtendedCopy.*", "copying between units by the target is not offered (3PC is 0)"),
    ("ReceiveCopyResults.*", "as ExtendedCopy"),
    ("PreventAllow.*", "a volume is not removable (RMB is 0)"),
    ("StartStopUnit.Simple", "as PreventAllow: it ejects the medium"),
    (
        "WriteSame10.ZeroBlocks",
        "WSNZ is 1: the tool sees that no blocks are refused, and calls that skipped",
    ),
    ("WriteSame16.ZeroBlocks", "as WriteSame10.ZeroBlocks"),
    ("Sanitize.*", "SANITIZE is not offered: it promises more than a shared filesystem can"),
    (
        "WriteAtomic16.*",
        "WRITE ATOMIC is not offered: no more than a block is atomic over a power cut",
    ),
    ("ReadOnly.ReadOnlySBC", "the volume can be written; it runs on an image instead"),
];

#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    Passed,
    Skipped(String),
    Failed(String),
}

/// What the tool says of each test, by `SUITE.TEST`.
fn verdicts(said: &str) -> BTreeMap<String, Verdict> {
    let mut found = BTreeMap::new();
    let mut suite = "";
    let mut open: Option<(String, String)> = None;
    for line in said.lines() {
        if let Some(name) = line.trim().strip_prefix("Suite: ") {
            suite = name;
        }
        let mut rest = line;
        if let Some((name, after)) =
            line.trim_start().strip_prefix("Test: ").and_then(|line| line.split_once(" ..."))
        {
            open = Some((format!("{suite}.{name}"), String::new()));
            rest = after;
        }
        let Some((name, text)) = &mut open else { continue };
        text.push_str(rest);
        text.push('\n');
        let ended = rest.trim_start().starts_with("passed");
        let failed = rest.trim_start().starts_with("FAILED");
        if ended || failed {
            let verdict = match (failed, text.contains("[SKIPPED]")) {
                (true, _) => Verdict::Failed(text.clone()),
                (false, true) => Verdict::Skipped(text.clone()),
                (false, false) => Verdict::Passed,
            };
            found.insert(name.clone(), verdict);
            open = None;
        }
    }
    // The tool ended in the middle of it.
    if let Some((name, text)) = open {
        found.insert(name, Verdict::Failed(text));
    }
    found
}

fn may_be_skipped(name: &str) -> bool {
    SKIPPED.iter().any(|(pattern, _)| match pattern.strip_suffix('*') {
        Some(front) => name.starts_with(front),
        None => *pattern == name,
    })
}

fn run_tests(which: &str, urls: &[&str]) -> BTreeMap<String, Verdict> {
    let output = Command::new("timeout")
        .args([DEADLINE_S, "iscsi-test-cu", "--dataloss", "--verbose", "--test", which])
        .args(urls)
        .output()
        .expect("iscsi-test-cu (package libiscsi-bin)");
    verdicts(&String::from_utf8_lossy(&output.stdout))
}

#[tokio::test(flavor = "multi_thread")]
async fn libiscsi_s_conformance_tests_pass() {
    let server = Server::start().await;
    server.create("data", 256 * MIB).await;
    let url = server.iscsi_url("data");
    // Twice: the tests of two paths to one unit need both.
    let found = run_tests("ALL", &[&url, &url]);
    let failed: Vec<_> =
        found.iter().filter(|(_, verdict)| matches!(verdict, Verdict::Failed(_))).collect();
    assert!(failed.is_empty(), "{failed:#?}");
    let skipped = |verdict: &Verdict| matches!(verdict, Verdict::Skipped(_));
    let unexpected: Vec<_> =
        found.iter().filter(|(name, verdict)| skipped(verdict) && !may_be_skipped(name)).collect();
    assert!(unexpected.is_empty(), "{unexpected:#?}");
    assert_eq!(found.len(), 230, "the tool has run all of its tests");
    let passed = found.values().filter(|verdict| **verdict == Verdict::Passed).count();
    eprintln!("{passed} passed, {} skipped with a reason", found.len() - passed);
    for (pattern, _) in SKIPPED {
        let front = pattern.trim_end_matches('*');
        let stale = !found.iter().any(|(name, v)| name.starts_with(front) && skipped(v));
        assert!(!stale, "{pattern} is not skipped any more");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_of_an_image_is_read_only() {
    let server = Server::start().await;
    server.create("data", 16 * MIB).await;
    assert_io(&server.qemu_io("data", &["write -P 7 0 1M"]));
    let image = perigee_model::ImageName::new("golden").expect("a name");
    let snapshot = perigee_model::volume::Snapshot { image };
    let _: perigee_model::volume::ImageInfo =
        server.control.post("/v1/volumes/data/snapshot", &snapshot).await.expect("a snapshot");
    let url = server.iscsi_url("image:golden");
    let found = run_tests("ALL.ReadOnly", &[&url]);
    assert_eq!(found.get("ReadOnly.ReadOnlySBC"), Some(&Verdict::Passed), "{found:?}");
    assert_io(&try_run(&["qemu-io", "-r", "-f", "raw", "-c", "read -P 7 0 1M", &url]));
}

#[test]
fn what_the_tool_says_is_understood() {
    let said = "
Suite: One
  Test: Good ...passed
  Test: Bad ...    [FAILED] READ10
FAILED
    1. test.c:3  - CU_ASSERT(x)
  Test: Away ...    [SKIPPED] not implemented.
passed
Suite: Two
  Test: Told ...    [FAILED] as it has to
passed
  Test: Cut ...
";
    let found = verdicts(said);
    assert_eq!(found["One.Good"], Verdict::Passed);
    assert!(matches!(found["One.Bad"], Verdict::Failed(_)));
    assert!(matches!(found["One.Away"], Verdict::Skipped(_)));
    assert_eq!(found["Two.Told"], Verdict::Passed);
    assert!(matches!(found["Two.Cut"], Verdict::Failed(_)));
    assert_eq!(found.len(), 5);
}
