//! A tenant that is made again under the name of one that was deleted has nothing of it.

use perigee_model::ProblemKind;
use perigee_model::data::BeginUpload;
use tempfile::tempdir;

use super::{path, put, view};
use crate::http::parallel;
use crate::path::Location;
use crate::repository::Repository;
use crate::upload::{Begin, Upload};

fn at(text: &str) -> Location {
    Location::resolve(text, &perigee_model::TenantName::default()).expect("a location")
}

#[tokio::test]
async fn a_tenant_that_is_forgotten_leaves_nothing_to_the_next_of_its_name() {
    let dir = tempdir().expect("a directory");
    let repository = Repository::open(dir.path()).expect("a repository");
    let (a, b) = (view(&repository, "a"), view(&repository, "b"));
    let tenant = a.account().tenant.clone();
    let space = repository.space(&tenant, true).expect("a space").expect("it is made");
    put(&space, "f", b"x").expect("a file");
    b.make_directory(at("/b/in")).await.expect("a directory");
    a.share(at("/a/f"), "b".parse().expect("b"), true).await.expect("shared");
    b.share(at("/b/in"), tenant.clone(), true).await.expect("shared");
    let refused = repository.forget(&tenant).expect_err("it has a file");
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    a.remove_file(at("/a/f")).await.expect("deleted");
    // Three uploads: one was cut, one in parts has begun, and one is just being sent.
    let mut cut = Upload::begin(&space, &path("cut"), Begin::Empty).expect("an upload");
    cut.write(0, b"secret").expect("bytes");
    drop(cut);
    let begin = BeginUpload { size_bytes: 5, sha256: "0".repeat(64) };
    let in_parts = parallel::begin(&a, &at("/a/p"), begin.clone()).await.expect("an upload");
    let mut sending = Upload::begin(&space, &path("late"), Begin::Empty).expect("an upload");
    sending.write(0, b"late").expect("bytes");
    repository.forget(&tenant).expect("it has no files");
    let refused = sending.commit(None).expect_err("its tenant is gone");
    assert_eq!(refused.kind, ProblemKind::NotFound, "{refused}");
    drop(space);

    let again = view(&repository, "a");
    assert!(again.list(at("/a"), None, 10).await.expect("a list").entries.is_empty());
    assert_eq!(again.unfinished_bytes(at("/a/cut")).await, None);
    assert!(again.shares(at("/a")).await.expect("shares").is_empty());
    again.entry(at("/b/in")).await.expect_err("it was shared with another tenant");
    parallel::state(&again, &at("/a/p"), &in_parts.upload).await.expect_err("it is dropped");
    let other = parallel::begin(&again, &at("/a/p"), begin).await.expect("a new one");
    assert_ne!(other.upload, in_parts.upload);
    let space = repository.space(&tenant, false).expect("a space").expect("it is there");
    let used = space.usage.used();
    assert_eq!((used.bytes, used.files, used.uploads), (5, 1, 1), "the new upload only");
    again.make_directory(at("/a/d")).await.expect("the new tenant uses its files");
    // The same after a restart.
    drop((again, a, b, space));
    let repository = Repository::open(dir.path()).expect("a repository");
    assert!(view(&repository, "a").shares(at("/a")).await.expect("shares").is_empty());
    assert_eq!(view(&repository, "a").unfinished_bytes(at("/a/cut")).await, None);
}

#[test]
fn a_tenant_without_files_is_forgotten_too() {
    let dir = tempdir().expect("a directory");
    let repository = Repository::open(dir.path()).expect("a repository");
    repository.forget(&"nobody".parse().expect("a name")).expect("there is nothing");
    assert!(!dir.path().join("tenants/nobody").exists());
}
