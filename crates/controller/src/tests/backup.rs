//! A backup of the controller, and what a restored controller does before it has heard all hosts.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use perigee_model::guest::{GuestBody, LogStream};
use perigee_model::job::{Access, JobState, LogLine};
use perigee_model::{HostId, JobId, ProblemKind};
use rustix::fs::{XattrFlags, fgetxattr, fsetxattr};

use super::api::client;
use super::{Lab, TIMING, running_as, spec, vm_of, wait_for};
use crate::backup::{make, restore};
use crate::job_files::JobFiles;
use crate::records::{LogKept, RESTORED, Records, RestoredRecord};
use crate::store::{SqliteStore, Store as _, Write};
use crate::{jobs, restored};

/// A backup in a directory of its own.
fn backed_up(state: &Path) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a directory");
    let made = make(state, dir.path(), false).expect("a backup");
    (dir, made.file)
}

impl Lab {
    /// The controller ends, and another one begins with what a backup has, in another directory.
    async fn restore_elsewhere(&mut self, backup: &Path) {
        self.supervisor.stop().await;
        let dir = tempfile::tempdir().expect("a directory");
        restore(backup, dir.path()).await.expect("restored");
        self.dir = dir;
        self.start_controller(TIMING).await;
    }

    /// Waits until the restored controller waits for these hosts only.
    async fn waits_for(&self, hosts: &[&HostId]) {
        let hosts: BTreeSet<HostId> = hosts.iter().map(|host| (*host).clone()).collect();
        wait_for("the other hosts to be heard", async || {
            (self.cluster.restored.waits_for().unwrap_or_default() == hosts).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_restored_controller_starts_no_job_before_each_host_was_heard_or_given_up() {
    let mut lab = Lab::up().await;
    let not_restored = restored::give_up(&lab.cluster, &lab.cloud.id).await.expect_err("no need");
    assert_eq!(not_restored.kind, ProblemKind::Conflict, "{not_restored}");
    lab.supervisor.stop().await;
    let mut alone = spec(Access::Read);
    alone.volumes.clear();
    let id = lab.submit(alone).await;
    let (_dir, backup) = backed_up(lab.dir.path());
    lab.cloud.inside().down = true;
    lab.restore_elsewhere(&backup).await;
    let cloud = lab.cloud.id.clone();
    lab.waits_for(&[&cloud]).await;
    let notice = lab.cluster.restored.notice().expect("a notice");
    assert!(notice.contains("cloud1") && notice.contains("perigee host give-up"), "{notice}");
    let passes = lab.cluster.counters.passes.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(passes, 0, "the scheduler has begun");
    assert_eq!(lab.job(&id).await.state, JobState::Queued);
    // Who was given up stays so after a restart.
    restored::give_up(&lab.cluster, &cloud).await.expect("given up");
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    lab.restart_controller().await;
    let left: Option<RestoredRecord> = lab.cluster.records.read(RESTORED).await.expect("a store");
    assert!(left.is_none() && lab.cluster.restored.notice().is_none(), "{left:?}");
}

#[tokio::test]
async fn a_job_that_has_moved_since_the_backup_waits_for_a_silent_host_and_is_found_there() {
    let mut lab = Lab::up().await;
    let mut moving = spec(Access::Write);
    moving.may_migrate = true;
    let (id, vm) = running_as(&lab, moving).await;
    let (_dir, backup) = backed_up(lab.dir.path());
    lab.supervisor.stop().await;
    let moved = lab.home.inside().vms.remove(&vm).expect("the VM");
    lab.cloud.inside().vms.insert(vm.clone(), moved);
    lab.cloud.inside().down = true;
    lab.restore_elsewhere(&backup).await;
    let cloud = lab.cloud.id.clone();
    lab.waits_for(&[&cloud]).await;
    assert_eq!(lab.job(&id).await.state, JobState::Running, "its VM is not lost");
    lab.cloud.inside().down = false;
    let job = lab.wait_for_job(&id, "its VM's host", |job| job.host.as_ref() == Some(&cloud)).await;
    assert_eq!(job.state, JobState::Running, "{job:?}");
    assert!(!lab.home.inside().vms.contains_key(&vm), "it runs once");
}

#[tokio::test]
async fn backups_to_the_same_name_at_once_give_one_that_is_whole() {
    let lab = Lab::up().await;
    let to = tempfile::tempdir().expect("a directory");
    let file = to.path().join("one");
    let (state, name) = (lab.dir.path(), file.as_path());
    let made = std::thread::scope(|scope| {
        let runs = [(); 4].map(|()| scope.spawn(move || make(state, name, false)));
        runs.map(|run| run.join().expect("no panic"))
    });
    assert_eq!(made.iter().filter(|made| made.is_ok()).count(), 1, "{made:?}");
    let refused = made.into_iter().filter_map(Result::err);
    for refused in refused {
        assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    }
    restore(&file, &to.path().join("restored")).await.expect("restored");
    assert_eq!(std::fs::read_dir(to.path()).expect("a list").count(), 2, "nothing else is left");
}

#[tokio::test]
async fn what_could_destroy_newer_data_is_refused_until_each_host_was_heard() {
    let mut lab = Lab::up().await;
    let (_dir, backup) = backed_up(lab.dir.path());
    lab.cloud.inside().down = true;
    lab.restore_elsewhere(&backup).await;
    let cloud = lab.cloud.id.clone();
    lab.waits_for(&[&cloud]).await;
    let client = client(&lab).await;
    let mut refused = vec![client.delete("/v1/volumes/none").await];
    refused.push(client.delete("/v1/images/none").await);
    for path in ["/v1/volumes/none/promote", "/v1/vms/none/end-unknown", "/v1/backups/none/restore"]
    {
        refused.push(client.post::<()>(path, &()).await);
    }
    for refused in refused {
        let refused = refused.expect_err("it is held");
        assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
        assert!(refused.next.contains("perigee host give-up"), "{refused}");
    }
    restored::give_up(&lab.cluster, &cloud).await.expect("given up");
    wait_for("the end", async || lab.cluster.restored.waits_for().is_none().then_some(())).await;
    let unknown = client.delete("/v1/volumes/none").await.expect_err("there is none");
    assert_eq!(unknown.kind, ProblemKind::NotFound, "{unknown}");
}

#[tokio::test]
async fn a_host_that_has_joined_since_the_backup_is_waited_for_too() {
    let mut lab = Lab::up().await;
    let (_dir, backup) = backed_up(lab.dir.path());
    lab.cloud.inside().down = true;
    lab.restore_elsewhere(&backup).await;
    let (cloud, newer) = (lab.cloud.id.clone(), "newer".parse::<HostId>().expect("a name"));
    lab.waits_for(&[&cloud]).await;
    restored::knocked(&lab.cluster, &newer).await.expect("recorded");
    restored::give_up(&lab.cluster, &cloud).await.expect("given up");
    lab.waits_for(&[&newer]).await;
    lab.restart_controller().await;
    lab.waits_for(&[&newer]).await;
    restored::give_up(&lab.cluster, &newer).await.expect("given up");
    wait_for("the end", async || lab.cluster.restored.waits_for().is_none().then_some(())).await;
    restored::knocked(&lab.cluster, &newer).await.expect("nothing is held");
    assert!(lab.cluster.restored.waits_for().is_none());
}

#[tokio::test]
async fn a_backup_that_was_cut_off_or_changed_restores_nothing() {
    let lab = Lab::up().await;
    let (dir, backup) = backed_up(lab.dir.path());
    let whole = std::fs::read(&backup).expect("the backup");
    let at = |text: &[u8]| {
        whole.windows(text.len()).position(|window| window == text).expect("it is there")
    };
    let changed = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    let cut =
        [0, 100, 512, 5000, whole.len() / 2, whole.len() - 2048].map(|end| whole[..end].to_vec());
    let changes = [
        at(b"SQLite format 3") + 2000,
        at(b"-----BEGIN") + 60,
        at(br#""path":"state.db""#) + 10,
        at(b"backup.json"),
    ];
    let bad = dir.path().join("bad.tar");
    for bytes in cut.into_iter().chain(changes.map(changed)) {
        std::fs::write(&bad, &bytes).expect("written");
        let to = dir.path().join("restored");
        let refused = restore(&bad, &to).await.expect_err("it is not whole");
        assert_eq!(refused.kind, ProblemKind::Invalid, "{refused}");
        assert!(!to.exists() && !dir.path().join(".restored.restoring").exists(), "{refused}");
    }
    for used in [lab.dir.path(), dir.path()] {
        let refused = restore(&backup, used).await.expect_err("something is there");
        assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    }
    let again = make(lab.dir.path(), &backup, false).expect_err("it is there");
    assert_eq!(again.kind, ProblemKind::Conflict, "{again}");
}

#[tokio::test]
async fn a_backup_is_of_one_moment_while_the_controller_writes() {
    let state = tempfile::tempdir().expect("a directory");
    crate::authority(state.path()).expect("an authority");
    let store = SqliteStore::open(&state.path().join("state.db")).expect("a store");
    let put = async |key: &str, value: u64| {
        let present = store.get(key).await.expect("read").map(|entry| entry.revision);
        let write = Write::Put(value.into());
        drop(store.compare_and_swap(key, present, write).await.expect("written"));
    };
    let (mut number, writes) = (0, std::sync::atomic::AtomicBool::new(true));
    let writing = async {
        while writes.load(std::sync::atomic::Ordering::Relaxed) {
            number += 1;
            put("first", number).await;
            put("second", number).await;
        }
    };
    let to = tempfile::tempdir().expect("a directory");
    let backing_up = async {
        let mut files = Vec::new();
        for name in ["a", "b", "c"] {
            let (state, file) = (state.path().to_owned(), to.path().join(name));
            // What a kill has left long ago is removed.
            let left = to.path().join(format!(".{name}.1.part"));
            std::fs::write(&left, "half").expect("written");
            let left = File::options().write(true).open(&left).expect("it");
            left.set_modified(std::time::UNIX_EPOCH).expect("a time");
            let made = tokio::task::spawn_blocking(move || make(&state, &file, false));
            files.push(made.await.expect("no panic").expect("a backup").file);
        }
        writes.store(false, std::sync::atomic::Ordering::Relaxed);
        files
    };
    let ((), files) = tokio::join!(writing, backing_up);
    for (file, name) in files.iter().zip(["x", "y", "z"]) {
        let restored = to.path().join(name);
        restore(file, &restored).await.expect("restored");
        let store = SqliteStore::open(&restored.join("state.db")).expect("the store");
        let value = async |key: &str| {
            let entry = store.get(key).await.expect("read");
            entry.map_or(0, |entry| entry.value.as_u64().expect("a number"))
        };
        let (first, second) = (value("first").await, value("second").await);
        assert!(first == second || first == second + 1, "{first} {second}");
    }
    let names = std::fs::read_dir(to.path()).expect("a list").count();
    assert_eq!(names, 6, "nothing else is left");
}

/// The log is at its limit, so that the oldest lines are dropped all the time.
#[tokio::test]
async fn a_log_in_a_backup_is_never_shorter_than_the_store_in_it_says() {
    let state = tempfile::tempdir().expect("a directory");
    crate::authority(state.path()).expect("an authority");
    let store = SqliteStore::open(&state.path().join("state.db")).expect("a store");
    let records = Records::new(Arc::new(store));
    let id = JobId::new("q-0001").expect("a name");
    let files = JobFiles::new(state.path()).of(&id, 1);
    let (mut kept, mut last) = (LogKept::default(), 0_u64);
    // A piece has ten of them.
    let line = |number: u64| LogLine {
        seq: 10 * number,
        uptime_ms: 0,
        stream: LogStream::Stdout,
        line: "x".repeat(50 << 10),
        continues: false,
        arrived_ms: 0,
        rank: None,
    };
    let mut add = async |count: u64| {
        let lines = (last + 1..=last + count).map(line).collect();
        kept = files.add_lines(Vec::new(), lines, kept).await.expect("added").0;
        last += count;
        records.put("said", &(kept, last)).await.expect("recorded");
    };
    add(350).await;
    let to = tempfile::tempdir().expect("a directory");
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let writing = async {
        while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
            add(5).await;
        }
    };
    let backing_up = async {
        for name in ["a", "b"] {
            let (state, file) = (state.path().to_owned(), to.path().join(name));
            let made = tokio::task::spawn_blocking(move || make(&state, &file, false));
            made.await.expect("no panic").expect("a backup");
        }
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    };
    tokio::join!(writing, backing_up);
    for (file, name) in [("a", "x"), ("b", "y")] {
        let restored = to.path().join(name);
        restore(&to.path().join(file), &restored).await.expect("restored");
        let store = SqliteStore::open(&restored.join("state.db")).expect("the store");
        let said = Records::new(Arc::new(store)).read("said").await.expect("read");
        let (kept, last): (LogKept, u64) = said.expect("a record");
        let files = JobFiles::new(&restored).of(&id, 1);
        let read = files.log_after(kept.dropped_seq, (usize::MAX, u64::MAX)).await.expect("read");
        let seqs: Vec<u64> = read.expect("a log").lines.iter().map(|line| line.seq).collect();
        let named: Vec<u64> =
            (kept.dropped_seq / 10 + 1..=last).map(|number| 10 * number).collect();
        assert!(kept.dropped_seq > 0 && seqs.starts_with(&named), "{kept:?} {last}: {seqs:?}");
    }
}

/// Lines after the damaged one would be taken for a torn end, and cut off.
#[tokio::test]
async fn damage_in_the_last_segment_of_a_log_is_named_by_a_backup() {
    let state = tempfile::tempdir().expect("a directory");
    crate::authority(state.path()).expect("an authority");
    drop(SqliteStore::open(&state.path().join("state.db")).expect("a store"));
    let id = JobId::new("q-0001").expect("a name");
    let files = JobFiles::new(state.path()).of(&id, 1);
    let line = |seq: u64| LogLine {
        seq,
        uptime_ms: 0,
        stream: LogStream::Stdout,
        line: "said".to_owned(),
        continues: false,
        arrived_ms: 0,
        rank: None,
    };
    let lines = (1..=3).map(line).collect();
    files.add_lines(Vec::new(), lines, LogKept::default()).await.expect("added");
    let to = tempfile::tempdir().expect("a directory");
    let sound = make(state.path(), &to.path().join("sound"), false).expect("a backup");
    assert!(sound.damaged.is_empty(), "{sound:?}");
    let segment = state.path().join("jobs/q-0001.1/log/00000000000000000001");
    let mut bytes = std::fs::read(&segment).expect("the segment");
    bytes[2] ^= 0x80;
    std::fs::write(&segment, bytes).expect("damaged");
    let damaged = make(state.path(), &to.path().join("damaged"), false).expect("a backup");
    let named = "jobs/q-0001.1/log/00000000000000000001: line 1 can't be read";
    assert_eq!(damaged.damaged, [named]);
}

#[tokio::test]
async fn a_restored_controller_has_the_logs_and_samples_and_goes_on_with_them() {
    let mut lab = Lab::up().await;
    let (id, vm) = running_as(&lab, spec(Access::Clone)).await;
    let lines = async |lab: &Lab| -> Vec<String> {
        let lines = jobs::log(&lab.cluster, &id, 0, 100).await.expect("a log");
        lines.into_iter().map(|line| line.line).collect()
    };
    for line in ["one", "two"] {
        lab.home.say(&vm, GuestBody::log(LogStream::Stdout, line));
        wait_for("the line", async || {
            (lines(&lab).await.last().map(String::as_str) == Some(line)).then_some(())
        })
        .await;
        if line == "one" {
            wait_for("samples", async || {
                let samples = jobs::samples(&lab.cluster, &id).await.expect("samples");
                (!samples.is_empty()).then_some(())
            })
            .await;
            let (_dir, backup) = backed_up(lab.dir.path());
            lab.restore_elsewhere(&backup).await;
            assert_eq!(lines(&lab).await, ["one"]);
            let samples = jobs::samples(&lab.cluster, &id).await.expect("samples");
            assert!(!samples.is_empty());
        }
    }
    assert_eq!(lines(&lab).await, ["one", "two"]);
}

#[tokio::test]
async fn keys_stay_private_and_names_of_files_are_kept_with_their_attributes() {
    let lab = Lab::up().await;
    let tree = lab.dir.path().join("data/tenants/acme/tree/results");
    std::fs::create_dir_all(&tree).expect("a directory");
    let far = File::create(tree.join("far")).expect("a file");
    far.set_len(1 << 40).expect("a length");
    fsetxattr(&far, "user.perigee.object", b"acme/17", XattrFlags::empty()).expect("an attribute");
    fsetxattr(&far, "user.perigee.sha256", b"abc", XattrFlags::empty()).expect("an attribute");
    let day = std::time::UNIX_EPOCH + std::time::Duration::from_secs(86_400);
    far.set_modified(day).expect("a time");
    std::fs::write(tree.join("near"), "content").expect("a file");
    let to = tempfile::tempdir().expect("a directory");
    let names = make(lab.dir.path(), &to.path().join("names"), false).expect("a backup");
    assert_eq!((names.left_out_files, names.left_out_bytes), (1, 7));
    let all = make(lab.dir.path(), &to.path().join("all"), true).expect("a backup");
    assert_eq!(all.left_out_files, 0);
    let mode = |path: &Path| std::fs::metadata(path).expect("it").permissions().mode() & 0o777;
    assert_eq!(mode(&all.file), 0o600);
    for (backup, has_content) in [(&names, false), (&all, true)] {
        let restored = to.path().join(format!("restored-{has_content}"));
        restore(&backup.file, &restored).await.expect("restored");
        assert_eq!(mode(&restored), 0o700);
        assert_eq!(mode(&restored.join("authority/ca.key")), 0o600);
        assert!(restored.join("audit").is_dir());
        let tree = restored.join("data/tenants/acme/tree/results");
        let near = std::fs::read_to_string(tree.join("near")).ok();
        assert_eq!(near.as_deref(), has_content.then_some("content"));
        let far = File::open(tree.join("far")).expect("the name");
        let meta = far.metadata().expect("it");
        assert_eq!((meta.len(), meta.modified().expect("a time")), (1 << 40, day));
        let mut key = [0_u8; 64];
        let length = fgetxattr(&far, "user.perigee.object", &mut key[..]).expect("an attribute");
        assert_eq!(&key[..length], b"acme/17");
    }
}
