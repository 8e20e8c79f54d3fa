//! Another tenant's files answer as if they did not exist, unless they are shared.

use perigee_model::ProblemKind;
use tempfile::tempdir;

use super::view;
use crate::path::Location;
use crate::repository::Repository;
use crate::upload::Begin;
use crate::view::View;

/// What waits for nothing is there at once, and on a busy machine soon.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);

fn at(text: &str) -> Location {
    Location::resolve(text, &perigee_model::TenantName::default()).expect("a location")
}

async fn put(view: &View, to: &str, content: &[u8]) {
    let mut writing = view.write(at(to), Begin::Empty, true).await.expect("an upload");
    writing.write(0, content).await.expect("bytes");
    writing.commit(None).await.expect("a file");
}

async fn names(view: &View, of: &str) -> Vec<String> {
    let list = view.list(at(of), None, 100).await.expect("a list");
    list.entries.into_iter().map(|entry| entry.name).collect()
}

#[tokio::test]
async fn anothers_files_look_like_files_that_never_were() {
    let dir = tempdir().expect("a directory");
    let repository = Repository::open(dir.path()).expect("a repository");
    let (a, b) = (view(&repository, "a"), view(&repository, "b"));
    put(&a, "/a/secret/file", b"x").await;
    for (there, nowhere) in
        [("/a/secret/file", "/a/other/file"), ("/a", "/c"), ("/a/secret", "/c/x")]
    {
        let told = |problem: perigee_model::Problem, path: &str| {
            let shown = format!("repo:/{path}");
            (problem.kind, problem.to_string().replace(&shown, "PATH"))
        };
        let mut answers = Vec::new();
        for path in [there, nowhere] {
            let mut of_one = Vec::new();
            of_one.push(told(b.entry(at(path)).await.expect_err(path), path));
            of_one.push(told(b.list(at(path), None, 1).await.expect_err(path), path));
            of_one.push(told(b.read(at(path)).await.expect_err(path), path));
            of_one.push(told(b.write(at(path), Begin::Empty, true).await.expect_err(path), path));
            of_one.push(told(b.remove_file(at(path)).await.expect_err(path), path));
            of_one.push(told(b.remove_directory(at(path)).await.expect_err(path), path));
            of_one.push(told(b.make_directory(at(path)).await.expect_err(path), path));
            of_one.push(told(
                b.share(at(path), "b".parse().expect("b"), true).await.expect_err(path),
                path,
            ));
            assert_eq!(b.unfinished_bytes(at(path)).await, None);
            answers.push(of_one);
        }
        assert_eq!(answers[0], answers[1], "{there} and {nowhere}");
        assert!(answers[0].iter().all(|(kind, _)| *kind == ProblemKind::NotFound));
    }
    assert_eq!(names(&b, "/").await, ["b"]);
    b.rename(at("/a/secret/file"), at("/b/mine"), true).await.expect_err("it is not theirs");
    b.copy(at("/a/secret/file"), at("/b/mine"), None).await.expect_err("it is not theirs");
}

#[tokio::test]
async fn what_is_shared_can_be_read_and_not_changed() {
    let dir = tempdir().expect("a directory");
    let repository = Repository::open(dir.path()).expect("a repository");
    let (a, b) = (view(&repository, "a"), view(&repository, "b"));
    put(&a, "/a/out/2026/file", b"shared").await;
    put(&a, "/a/out/2025", b"not shared").await;
    a.share(at("/a/out/2026"), "b".parse().expect("b"), true).await.expect("it is shared");
    assert_eq!(names(&b, "/").await, ["a", "b"]);
    assert_eq!(names(&b, "/a").await, ["out"]);
    assert_eq!(names(&b, "/a/out").await, ["2026"], "only what leads there");
    assert_eq!(names(&b, "/a/out/2026").await, ["file"]);
    let mut reading = b.read(at("/a/out/2026/file")).await.expect("it may be read");
    assert_eq!(&reading.read(0, 100).await.expect("bytes")[..], b"shared");
    b.read(at("/a/out/2025")).await.expect_err("it is not shared");
    b.read(at("/a/out/20260")).await.expect_err("a name that begins like it");
    let problem = b.write(at("/a/out/2026/file"), Begin::Empty, true).await.expect_err("read only");
    assert_eq!(problem.kind, ProblemKind::Forbidden);
    b.remove_file(at("/a/out/2026/file")).await.expect_err("read only");
    drop((a, b, repository));
    let repository = Repository::open(dir.path()).expect("the repository again");
    let (a, b) = (view(&repository, "a"), view(&repository, "b"));
    b.read(at("/a/out/2026/file")).await.expect("shares are kept");
    a.share(at("/a/out/2026"), "b".parse().expect("b"), false).await.expect("it ends");
    b.read(at("/a/out/2026/file")).await.expect_err("not any more");
}

/// Nobody knows any more with whom a name was shared that is gone.
#[tokio::test]
async fn a_share_ends_with_what_is_shared() {
    let dir = tempdir().expect("a directory");
    let repository = Repository::open(dir.path()).expect("a repository");
    let (a, b) = (view(&repository, "a"), view(&repository, "b"));
    for name in ["/a/in", "/a/moved", "/a/stays"] {
        put(&a, &format!("{name}/file"), b"shared").await;
        a.share(at(name), "b".parse().expect("b"), true).await.expect("it is shared");
    }
    a.share(at("/a/in/file"), "b".parse().expect("b"), true).await.expect("it is shared");
    a.remove_file(at("/a/in/file")).await.expect("it is deleted");
    b.entry(at("/a/in")).await.expect("the directory is still shared");
    a.remove_directory(at("/a/in")).await.expect("it is deleted");
    a.rename(at("/a/moved"), at("/a/new"), false).await.expect("it is renamed");
    for name in ["/a/in/file", "/a/moved/file"] {
        put(&a, name, b"secret").await;
        b.read(at(name)).await.expect_err("another file of the same name");
    }
    b.read(at("/a/new/file")).await.expect_err("it has another name now");
    b.read(at("/a/stays/file")).await.expect("it is shared");
}

/// The controller may be killed between the end of a file and that of its shares.
#[tokio::test]
async fn a_share_ends_also_when_its_file_was_gone_before() {
    for is_killed in [false, true] {
        let dir = tempdir().expect("a directory");
        let mut repository = Repository::open(dir.path()).expect("a repository");
        put(&view(&repository, "a"), "/a/file", b"shared").await;
        let with = "b".parse().expect("b");
        view(&repository, "a").share(at("/a/file"), with, true).await.expect("it is shared");
        let space = repository.space(&"a".parse().expect("a"), false).expect("files");
        space.expect("it has some").remove_file(&super::path("file")).expect("it is deleted");
        if is_killed {
            repository = Repository::open(dir.path()).expect("the repository again");
        } else {
            let again = view(&repository, "a").remove_file(at("/a/file")).await;
            assert_eq!(again.expect_err("it is gone").kind, ProblemKind::NotFound);
        }
        put(&view(&repository, "a"), "/a/file", b"secret").await;
        view(&repository, "b").read(at("/a/file")).await.expect_err("another file");
    }
}

/// A rename looks through all of a directory before, and all other changes of the tenant wait meanwhile.
#[test]
fn a_tenant_whose_changes_wait_leaves_threads_to_others() {
    let threads = 80;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .max_blocking_threads(threads)
        .enable_all()
        .build()
        .expect("a runtime");
    let dir = tempdir().expect("a directory");
    let repository = Repository::open(dir.path()).expect("a repository");
    let space =
        repository.space(&"a".parse().expect("a"), true).expect("files").expect("it is made");
    let held = space.hold();
    runtime.block_on(async {
        let mut waiting = Vec::new();
        for number in 0..2 * threads {
            let a = view(&repository, "a");
            waiting.push(tokio::spawn(async move {
                a.make_directory(at(&format!("/a/d{number}"))).await
            }));
        }
        let places = repository.places(&"a".parse().expect("a"));
        let all_wait = async {
            while places.available_permits() > 0 {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(PATIENCE, all_wait).await.expect("all of its places are taken");
        let b = view(&repository, "b");
        let answered = tokio::time::timeout(PATIENCE, b.list(at("/b"), None, 1)).await;
        answered.expect("it waits for the other tenant").expect("a list");
        drop(held);
        for one in waiting {
            one.await.expect("it ends").expect("a directory");
        }
    });
}

#[tokio::test]
async fn who_may_only_read_changes_nothing() {
    let dir = tempdir().expect("a directory");
    let repository = Repository::open(dir.path()).expect("a repository");
    put(&view(&repository, "a"), "/a/file", b"x").await;
    let account = crate::Account { may_write: false, ..super::account("a") };
    let reader = View::new(repository, account);
    reader.read(at("/a/file")).await.expect("it may be read");
    for problem in [
        reader.remove_file(at("/a/file")).await.expect_err("no"),
        reader.make_directory(at("/a/d")).await.expect_err("no"),
        reader.write(at("/a/file"), Begin::Empty, true).await.map(drop).expect_err("no"),
    ] {
        assert_eq!(problem.kind, ProblemKind::Forbidden);
    }
}
