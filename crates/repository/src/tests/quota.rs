//! Quotas hold, also for uploads at the same time.

use std::sync::Arc;

use perigee_model::ProblemKind;
use perigee_model::data::BeginUpload;
use tempfile::tempdir;

use super::{path, put, space, view};
use crate::account::Quota;
use crate::http::parallel;
use crate::path::Location;
use crate::repository::Repository;
use crate::space::Space;
use crate::upload::{Begin, Upload};

fn used(space: &Space) -> (u64, u64, usize) {
    let used = space.usage.used();
    (used.bytes, used.files, used.uploads)
}

#[test]
fn a_quota_counts_bytes_files_and_directories_and_gives_them_back() {
    let dir = tempdir().expect("a directory");
    let space = space(dir.path());
    space.usage.set_quota(Quota { bytes: 100, files: 3 });
    put(&space, "a", &[0; 60]).expect("it fits");
    let problem = put(&space, "b", &[0; 41]).expect_err("101 bytes");
    assert_eq!(problem.kind, ProblemKind::NoSpace);
    assert!(problem.why.contains("100 B"), "the limit is named: {problem}");
    assert_eq!(used(&space), (60, 1, 0), "what was refused takes nothing");
    space.make_directory(&path("d")).expect("a directory");
    put(&space, "d/c", &[0; 40]).expect("exactly full");
    let problem = put(&space, "e", &[]).expect_err("a fourth file");
    assert!(problem.why.contains('3'), "the limit is named: {problem}");
    space.make_directory(&path("f")).expect_err("a fourth directory");
    space.remove_file(&path("a")).expect("it is deleted");
    assert_eq!(used(&space), (40, 2, 0));
    put(&space, "e", &[0; 60]).expect("there is room again");
    space.rename(&path("e"), &path("d/c"), true).expect("it replaces the other file");
    assert_eq!(used(&space), (60, 2, 0));
    drop(space);
    let again = super::space(dir.path());
    assert_eq!(used(&again), (60, 2, 0), "the same is counted when it is opened");
}

#[test]
fn uploads_at_the_same_time_do_not_exceed_the_quota_together() {
    let dir = tempdir().expect("a directory");
    let space = space(dir.path());
    space.usage.set_quota(Quota { bytes: 1000, files: 100 });
    let threads: Vec<_> = (0..8)
        .map(|number| {
            let space = Arc::clone(&space);
            std::thread::spawn(move || put(&space, &format!("f{number}"), &[1; 300]).is_ok())
        })
        .collect();
    let stored = threads.into_iter().filter_map(|t| t.join().ok()).filter(|stored| *stored).count();
    assert!((1..=3).contains(&stored), "{stored} files of 300 bytes in a quota of 1000");
    assert_eq!(used(&space), (300 * stored as u64, stored as u64, 0));
}

#[test]
fn what_has_come_of_an_upload_that_does_not_fit_takes_no_room() {
    let dir = tempdir().expect("a directory");
    let space = space(dir.path());
    space.usage.set_quota(Quota { bytes: 100, files: 10 });
    let mut upload = Upload::begin(&space, &path("a"), Begin::Empty).expect("an upload");
    upload.write(0, &[0; 90]).expect("it fits");
    let problem = upload.write(90, &[0; 20]).expect_err("110 bytes");
    assert_eq!(problem.kind, ProblemKind::NoSpace);
    drop(upload);
    assert_eq!(used(&space), (0, 0, 0));
    assert_eq!(space.unfinished_bytes(&path("a")), None);
}

#[test]
fn an_upload_that_was_cut_counts_until_it_is_dropped() {
    let dir = tempdir().expect("a directory");
    let space = space(dir.path());
    let mut upload = Upload::begin(&space, &path("a"), Begin::Empty).expect("an upload");
    upload.write(0, &[0; 10]).expect("ten bytes");
    drop(upload);
    assert_eq!(used(&space), (10, 1, 1));
    put(&space, "a", &[0; 5]).expect("a new upload replaces the old one");
    assert_eq!(used(&space), (5, 1, 0));
    assert_eq!(std::fs::read_dir(dir.path().join("parts")).expect("parts").count(), 0);
}

#[tokio::test]
async fn uploads_that_were_cut_are_shown_and_deleted_like_files() {
    let dir = tempdir().expect("a directory");
    let repository = Repository::open(dir.path()).expect("a repository");
    let a = view(&repository, "a");
    let at = |text| Location::resolve(text, &a.account().tenant).expect("a location");
    let space = repository.space(&a.account().tenant, true).expect("a space").expect("it is made");
    for (file, bytes) in [("f", 10), ("d/g", 20), ("d/e/h", 30)] {
        space.make_directories_above(&path(file)).expect("directories");
        let mut upload = Upload::begin(&space, &path(file), Begin::Empty).expect("an upload");
        upload.write(0, &vec![0; bytes]).expect("bytes");
    }
    let begin = BeginUpload { size_bytes: 40, sha256: "0".repeat(64) };
    parallel::begin(&a, &at("/a/d/p"), begin).await.expect("an upload in parts");
    let shown = async |location| {
        let cut = a.cut_uploads(location).await.expect("a list");
        cut.into_iter().map(|one| (one.path, one.size_bytes)).collect::<Vec<_>>()
    };
    let named = |all: &[(&str, u64)]| {
        all.iter().map(|(path, bytes)| ((*path).to_owned(), *bytes)).collect::<Vec<_>>()
    };
    let below_d = named(&[("d/e/h", 30), ("d/g", 20), ("d/p", 40)]);
    assert_eq!(shown(at("/a/d")).await, below_d);
    assert_eq!(shown(at("/a")).await, [below_d, named(&[("f", 10)])].concat());
    // There is no file of that name.
    a.remove_file(at("/a/f")).await.expect("deleted");
    let gone = a.remove_file(at("/a/f")).await.expect_err("nothing is there");
    assert_eq!(gone.kind, ProblemKind::NotFound, "{gone}");
    a.remove_file(at("/a/d/p")).await.expect("deleted");
    a.remove_directory(at("/a/d/e")).await.expect("it is empty");
    assert_eq!(shown(at("/a")).await, named(&[("d/g", 20)]));
    put(&space, "d/g", &[0; 5]).expect("a whole file in place of it");
    a.remove_file(at("/a/d/g")).await.expect("deleted");
    assert_eq!(used(&space), (0, 1, 0), "the directory is left");
}
