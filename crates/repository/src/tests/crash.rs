//! A file is whole or not there, and damage is found.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use perigee_model::{ProblemKind, TenantName};
use tempfile::tempdir;

use super::{get, path, put, space};
use crate::space::Space;
use crate::upload::{Begin, Upload};

#[test]
fn a_file_that_is_not_complete_has_no_name() {
    let dir = tempdir().expect("a directory");
    let space = space(dir.path());
    put(&space, "a", b"old").expect("a file");
    let mut upload = Upload::begin(&space, &path("a"), Begin::Empty).expect("an upload");
    upload.write(0, b"half of the ne").expect("some bytes");
    assert_eq!(get(&space, "a").expect("the old file"), b"old");
    drop(upload);
    assert_eq!(get(&space, "a").expect("the old file"), b"old");
    let mut upload = Upload::begin(&space, &path("a"), Begin::Continue(14)).expect("it goes on");
    upload.write(14, b"w").expect("the rest");
    upload.commit(None).expect("it is complete");
    assert_eq!(get(&space, "a").expect("the new file"), b"half of the new");
}

#[test]
fn an_upload_goes_on_after_a_kill_but_not_after_a_reboot() {
    let dir = tempdir().expect("a directory");
    let cut = || {
        let space = space(dir.path());
        let mut upload = Upload::begin(&space, &path("d"), Begin::Empty).expect("an upload");
        upload.write(0, b"0123456789").expect("some bytes");
        // As after a kill: nobody tidies up.
        std::mem::forget(upload);
    };
    cut();
    let again = space(dir.path());
    assert_eq!(again.unfinished_bytes(&path("d")), Some(10));
    let problem = Upload::begin(&again, &path("d"), Begin::Continue(11)).expect_err("a gap");
    assert_eq!(problem.kind, ProblemKind::Conflict);
    assert!(problem.next.contains("10"), "it says where to go on: {problem}");
    let mut upload = Upload::begin(&again, &path("d"), Begin::Continue(8)).expect("it goes on");
    upload.write(8, b"89").expect("the rest");
    upload.commit(None).expect("it is complete");
    assert_eq!(get(&again, "d").expect("the file"), b"0123456789");
    cut();
    let clock = Arc::clone(&again.clock);
    let rebooted = Space::open(TenantName::default(), dir.path(), "boot 2", clock);
    let rebooted = rebooted.expect("a space");
    assert_eq!(rebooted.unfinished_bytes(&path("d")), None);
    assert_eq!(std::fs::read_dir(dir.path().join("parts")).expect("parts").count(), 0);
}

/// Holes cost their sender nothing, and whoever hashes them hours.
#[test]
fn a_file_has_no_large_holes() {
    const MIB: u64 = 1 << 20;
    let dir = tempdir().expect("a directory");
    let space = space(dir.path());
    let mut upload = Upload::begin(&space, &path("a"), Begin::Empty).expect("an upload");
    let refused = |done: Result<(), perigee_model::Problem>| {
        let problem = done.expect_err("too much is left out");
        assert_eq!(problem.kind, ProblemKind::Invalid, "{problem}");
    };
    refused(upload.write(1 << 40, b"x"));
    upload.write(40 * MIB, b"x").expect("a window");
    refused(upload.write(100 * MIB, b"x"));
    // What was left out comes later, and then more may be left out.
    let piece = vec![7; 1 << 20];
    for at in 0..40 {
        upload.write(at * MIB, &piece).expect("what was left out");
    }
    upload.write(100 * MIB, b"x").expect("another window");
    drop(upload);
}

/// A client that says a file's length first, and then sends all of it, was refused.
#[test]
fn the_length_of_a_file_may_come_before_its_bytes() {
    const MIB: u64 = 1 << 20;
    let dir = tempdir().expect("a directory");
    let space = space(dir.path());
    let mut upload = Upload::begin(&space, &path("a"), Begin::Empty).expect("an upload");
    upload.set_length(100 * MIB).expect("a length");
    let piece = vec![7; 1 << 20];
    (0..100).for_each(|at| upload.write(at * MIB, &piece).expect("a piece"));
    assert_eq!(upload.commit(None).expect("all has come").size_bytes, 100 * MIB);
    // What only has a length is no file, and nobody hashes it.
    let mut upload = Upload::begin(&space, &path("b"), Begin::Empty).expect("an upload");
    upload.set_length(1 << 40).expect("a length");
    let problem = upload.commit(None).expect_err("nothing has come");
    assert_eq!(problem.kind, ProblemKind::Invalid, "{problem}");
}

#[test]
fn bytes_in_any_order_make_the_same_file() {
    let dir = tempdir().expect("a directory");
    let space = space(dir.path());
    let mut upload = Upload::begin(&space, &path("a"), Begin::Empty).expect("an upload");
    for (offset, bytes) in [(4, &b"4567"[..]), (0, b"abcd"), (8, b"89"), (0, b"0123")] {
        upload.write(offset, bytes).expect("some bytes");
    }
    let entry = upload.commit(None).expect("it is complete");
    put(&space, "b", b"0123456789").expect("the same in order");
    assert_eq!(entry.sha256, space.entry(&path("b")).expect("b").sha256);
    assert_eq!(get(&space, "a").expect("the file"), b"0123456789");
}

#[test]
fn content_that_is_not_what_the_client_meant_is_not_stored() {
    let dir = tempdir().expect("a directory");
    let space = space(dir.path());
    let mut upload = Upload::begin(&space, &path("a"), Begin::Empty).expect("an upload");
    upload.write(0, b"x").expect("a byte");
    let problem = upload.commit(Some(&"0".repeat(64))).expect_err("another hash");
    assert_eq!(problem.kind, ProblemKind::Invalid);
    space.entry(&path("a")).expect_err("it has no name");
    assert_eq!(std::fs::read_dir(dir.path().join("parts")).expect("parts").count(), 0);
}

#[test]
fn damage_on_the_disk_is_found_before_the_last_byte_is_given_out() {
    let dir = tempdir().expect("a directory");
    let space = space(dir.path());
    put(&space, "a", &[7; 100]).expect("a file");
    let file = std::fs::File::options().write(true).open(dir.path().join("tree/a"));
    file.and_then(|file| file.write_all_at(&[8], 50)).expect("a damaged byte");
    let mut reader = space.read(&path("a")).expect("it opens");
    reader.read(0, 60).expect("the beginning");
    for try_ in ["the end", "again"] {
        let problem = reader.read(60, 60).expect_err(try_);
        assert!(problem.why.contains("damaged"), "{problem}");
    }
}

#[test]
fn a_rename_takes_the_place_of_a_file_only_when_it_may() {
    let dir = tempdir().expect("a directory");
    let space = space(dir.path());
    for name in ["a", "b"] {
        put(&space, name, name.as_bytes()).expect("a file");
    }
    space.make_directory(&path("d")).expect("a directory");
    space.make_directory(&path("d/e")).expect("a directory");
    let kind = |from: &str, to: &str, replace| {
        space.rename(&path(from), &path(to), replace).err().map(|problem| problem.kind)
    };
    assert_eq!(kind("a", "b", false), Some(ProblemKind::Conflict));
    assert_eq!(kind("a", "d", true), Some(ProblemKind::Conflict), "a file over a directory");
    assert_eq!(kind("d", "a", true), Some(ProblemKind::Conflict), "a directory over a file");
    assert_eq!(kind("d", "d/e/f", false), Some(ProblemKind::Invalid), "a directory into itself");
    assert_eq!(kind("x", "y", true), Some(ProblemKind::NotFound));
    assert_eq!(kind("a", "nowhere/a", true), Some(ProblemKind::NotFound));
    assert_eq!(kind("a", "a", true), None);
    assert_eq!(kind("a", "b", true), None);
    assert_eq!(get(&space, "b").expect("the file"), b"a");
}

#[test]
fn a_deep_tree_does_not_become_too_deep_by_a_rename() {
    let dir = tempdir().expect("a directory");
    let space = space(dir.path());
    let deep = vec!["x"; 40].join("/");
    space.make_directories_above(&path(&format!("{deep}/f"))).expect("directories");
    let other = vec!["y"; 30].join("/");
    space.make_directories_above(&path(&format!("{other}/f"))).expect("directories");
    let problem = space.rename(&path("x"), &path(&format!("{other}/x")), false);
    assert_eq!(problem.expect_err("70 names").kind, ProblemKind::Invalid);
}
