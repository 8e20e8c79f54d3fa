//! What of a tar comes into the repository, also of one that somebody has written who means harm.

use std::path::Path;

use futures_util::{StreamExt, stream};
use perigee_repository::{Account, Quota, Repository};
use sha2::{Digest, Sha256};

use super::*;

/// An archive of files.
pub fn tar_of(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut tar = Hostile::default();
    for (name, content) in files {
        tar.add(name, tar::EntryType::Regular, "", content);
    }
    tar.end()
}

/// Writes what the builder would refuse.
#[derive(Default)]
struct Hostile {
    bytes: Vec<u8>,
}

impl Hostile {
    fn add(&mut self, name: &str, kind: tar::EntryType, link: &str, content: &[u8]) {
        self.add_claiming(name, kind, link, content, content.len() as u64);
    }

    fn add_claiming(
        &mut self,
        name: &str,
        kind: tar::EntryType,
        link: &str,
        content: &[u8],
        size: u64,
    ) {
        let mut header = tar::Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(0o4777);
        header.set_size(size);
        header.set_cksum();
        self.bytes.extend_from_slice(header.as_bytes());
        self.bytes.extend_from_slice(content);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
    }

    fn end(mut self) -> Vec<u8> {
        self.bytes.resize(self.bytes.len() + 1024, 0);
        self.bytes
    }
}

struct Bench {
    dir: tempfile::TempDir,
    repository: Arc<Repository>,
    quota: Quota,
    place: OutputPlace,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("tempdir");
        let repository = Repository::open(dir.path()).expect("a repository");
        let path = DataPath::parse("jobs/j-0001").expect("a path");
        let place = OutputPlace { tenant: TenantName::default(), path, is_own: true };
        Self { dir, repository, quota: Quota::default(), place }
    }

    fn view(&self) -> View {
        let account = Account {
            tenant: TenantName::default(),
            user: "job j-0001".to_owned(),
            may_write: true,
            is_admin: false,
            quota: self.quota,
        };
        View::new(Arc::clone(&self.repository), account)
    }

    async fn try_take(&self, tar: &[u8]) -> Result<OutputsTaken, Problem> {
        let expected = Expected {
            bytes: tar.len() as u64,
            sha256: crate::hash::hex(&Sha256::digest(tar)),
            room_bytes: 1 << 20,
        };
        self.take_as(tar, expected).await
    }

    async fn take_as(&self, tar: &[u8], expected: Expected) -> Result<OutputsTaken, Problem> {
        let pieces: Vec<_> = tar.chunks(1000).map(Bytes::copy_from_slice).collect();
        let body = stream::iter(pieces.into_iter().map(Ok::<_, io::Error>));
        intake::take(&self.view(), &self.place, body, &expected).await
    }

    async fn take(&self, tar: &[u8]) -> OutputsTaken {
        self.try_take(tar).await.expect("taken")
    }

    fn tree(&self) -> std::path::PathBuf {
        self.dir.path().join("tenants/default/tree")
    }

    /// All files of the tenant with their contents, sorted.
    fn files(&self) -> Vec<(String, String)> {
        fn walk(base: &Path, at: &Path, found: &mut Vec<(String, String)>) {
            for entry in std::fs::read_dir(at).into_iter().flatten().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    walk(base, &path, found);
                } else {
                    let name = path.strip_prefix(base).expect("below").display().to_string();
                    let content = std::fs::read(&path).expect("read");
                    let shown = match content.len() {
                        0..50 => String::from_utf8_lossy(&content).into_owned(),
                        length => format!("{length} bytes"),
                    };
                    found.push((name, shown));
                }
            }
        }
        let mut found = Vec::new();
        walk(&self.tree(), &self.tree(), &mut found);
        found.sort();
        found
    }

    fn names(&self) -> Vec<String> {
        self.files().into_iter().map(|(name, _)| name).collect()
    }
}

fn files(of: &[(&str, &str)]) -> Vec<(String, String)> {
    of.iter().map(|(name, content)| ((*name).to_owned(), (*content).to_owned())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_files_are_there_with_their_directories() {
    let bench = Bench::new();
    let mut tar = Hostile::default();
    tar.add("output/", tar::EntryType::Directory, "", b"");
    tar.add("output/empty/", tar::EntryType::Directory, "", b"");
    tar.add("output/a", tar::EntryType::Regular, "", b"one");
    tar.add("output/none", tar::EntryType::Regular, "", b"");
    tar.add("output/large", tar::EntryType::Regular, "", &vec![7; 300_000]);
    tar.add("deep/er/b", tar::EntryType::Regular, "", b"two");
    let taken = bench.take(&tar.end()).await;
    assert_eq!((taken.files, taken.bytes), (4, 300_006));
    assert!(taken.left_out.count() == 0 && taken.damaged.is_none(), "{taken:?}");
    let expected = files(&[
        ("jobs/j-0001/deep/er/b", "two"),
        ("jobs/j-0001/output/a", "one"),
        ("jobs/j-0001/output/large", "300000 bytes"),
        ("jobs/j-0001/output/none", ""),
    ]);
    assert_eq!(bench.files(), expected);
    assert!(bench.tree().join("jobs/j-0001/output/empty").is_dir());
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_entries_are_left_out_and_named_and_the_others_are_kept() {
    let bench = Bench::new();
    std::fs::create_dir_all(bench.tree()).expect("mkdir");
    std::fs::write(bench.tree().join("mine"), "untouched").expect("write");
    let hostile: [(&str, tar::EntryType, &str, &str); 9] = [
        ("/etc/passwd", tar::EntryType::Regular, "", "absolute"),
        ("a/../../../mine", tar::EntryType::Regular, "", "goes up"),
        ("..", tar::EntryType::Directory, "", "goes up"),
        ("disk", tar::EntryType::Block, "", "a device"),
        ("tty", tar::EntryType::Char, "", "a device"),
        ("pipe", tar::EntryType::Fifo, "", "a FIFO"),
        ("hard", tar::EntryType::Link, "../../mine", "a hard link"),
        ("bell\u{7}", tar::EntryType::Regular, "", "control character"),
        ("odd", tar::EntryType::new(b'Z'), "", "neither"),
    ];
    for (name, kind, link, why) in hostile {
        let mut tar = Hostile::default();
        tar.add("before", tar::EntryType::Regular, "", b"1");
        tar.add(name, kind, link, if kind.is_file() { b"evil" } else { b"" });
        tar.add("after", tar::EntryType::Regular, "", b"2");
        let taken = bench.take(&tar.end()).await;
        assert_eq!(taken.files, 2, "{name}: {taken:?}");
        assert!(taken.left_out.to_string().contains(why), "{name}: {}", taken.left_out);
        assert_eq!(bench.names(), ["jobs/j-0001/after", "jobs/j-0001/before", "mine"], "{name}");
    }
    assert_eq!(std::fs::read_to_string(bench.tree().join("mine")).expect("read"), "untouched");
}

/// A file of this size with "data" at its begin, as the runner writes one with holes.
fn with_holes(name: &str, size_bytes: u64) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
    header.set_entry_type(tar::EntryType::GNUSparse);
    header.set_mode(0o644);
    header.set_size(4);
    let gnu = header.as_gnu_mut().expect("a GNU header");
    gnu.set_real_size(size_bytes);
    gnu.sparse[0].set_offset(0);
    gnu.sparse[0].set_length(4);
    gnu.sparse[1].set_offset(size_bytes);
    gnu.sparse[1].set_length(0);
    header.set_cksum();
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend_from_slice(b"data");
    bytes.resize(1024, 0);
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_with_holes_is_whole_in_the_repository() {
    let bench = Bench::new();
    let mut tar = Hostile::default();
    tar.bytes.extend(with_holes("holes", 2 << 20));
    tar.add("after", tar::EntryType::Regular, "", b"2");
    tar.add("link", tar::EntryType::Symlink, "after", b"");
    let taken = bench.take(&tar.end()).await;
    assert_eq!((taken.files, taken.bytes, taken.left_out.count()), (3, (2 << 20) + 2, 0));
    let content = std::fs::read(bench.tree().join("jobs/j-0001/holes")).expect("read");
    assert!(content.len() == 2 << 20 && content.starts_with(b"data\0"));
}

/// Two names that are no UTF-8 were lost, and the job succeeded.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_whose_name_is_not_taken_is_lost_and_named_as_it_is() {
    let bench = Bench::new();
    let mut tar = Hostile::default();
    for last in [0xe8, 0xe9] {
        let mut header = tar::Header::new_gnu();
        header.as_mut_bytes()[..4].copy_from_slice(&[b'c', b'a', b'f', last]);
        header.set_size(0);
        header.set_mode(0o644);
        header.set_cksum();
        tar.bytes.extend_from_slice(header.as_bytes());
    }
    let long = format!("{}/x", "n".repeat(300));
    tar.add("././@LongLink", tar::EntryType::GNULongName, "", format!("{long}\0").as_bytes());
    tar.add("long", tar::EntryType::Regular, "", b"1");
    let taken = bench.take(&tar.end()).await;
    assert!(taken.files == 0 && taken.left_out.has_lost() && taken.left_out.count() == 3);
    let said = taken.left_out.to_string();
    for what in [r#""caf\\xe8" (its name is not UTF-8)"#, r#""caf\\xe9""#, r#"nnn…" ("#] {
        assert!(said.contains(what), "{what}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_archive_that_breaks_off_keeps_what_came_before() {
    let bench = Bench::new();
    let good = |bytes: &dyn Fn(&mut Hostile)| {
        let mut tar = Hostile::default();
        tar.add("good", tar::EntryType::Regular, "", b"1");
        bytes(&mut tar);
        tar.add("after", tar::EntryType::Regular, "", b"2");
        tar.end()
    };
    let long_name = vec![b'n'; 1 << 20];
    let claims = |kind, content: &[u8]| {
        good(&|tar| tar.add_claiming("././@PaxHeader", kind, "", content, 16 << 30))
    };
    let large = format!("{} size={}\n", 3 + "size=".len() + 11 + 1, 16_u64 << 30);
    let cases: [(&str, Vec<u8>); 9] = [
        ("16 GiB of PAX", claims(tar::EntryType::XHeader, b"x")),
        ("16 GiB of PAX that go on", claims(tar::EntryType::XHeader, &long_name)),
        ("16 GiB of PAX for all", claims(tar::EntryType::XGlobalHeader, &long_name)),
        (
            "16 GiB, as PAX says",
            good(&|tar| {
                tar.add("././@PaxHeader", tar::EntryType::XHeader, "", large.as_bytes());
                tar.add("cut", tar::EntryType::Regular, "", b"x");
            }),
        ),
        // A header that claims 16 GiB of a name, and one that has a MiB of it.
        (
            "16 GiB",
            good(&|tar| {
                tar.add_claiming("././@LongLink", tar::EntryType::GNULongName, "", b"x", 16 << 30);
            }),
        ),
        (
            "a MiB",
            good(&|tar| {
                tar.add("././@LongLink", tar::EntryType::GNULongName, "", &long_name);
            }),
        ),
        ("holes that are too large", good(&|tar| tar.bytes.extend(with_holes("huge", 16 << 40)))),
        ("no header", good(&|tar| tar.bytes.extend_from_slice(&[7; 512]))),
        (
            "cut",
            good(&|tar| {
                tar.add_claiming("cut", tar::EntryType::Regular, "", b"x", 16 << 30);
            }),
        ),
    ];
    for (name, tar) in cases {
        let taken = bench.take(&tar).await;
        assert_eq!(
            (taken.files, bench.names()),
            (1, vec!["jobs/j-0001/good".to_owned()]),
            "{name}"
        );
        assert!(taken.left_out.count() > 0 && taken.damaged.is_none(), "{name}: {taken:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_is_a_file_and_a_directory_is_one_of_them() {
    let bench = Bench::new();
    let mut tar = Hostile::default();
    tar.add("a", tar::EntryType::Regular, "", &vec![1; 200_000]);
    tar.add("a/b", tar::EntryType::Regular, "", b"2");
    tar.add("c/", tar::EntryType::Directory, "", b"");
    tar.add("c", tar::EntryType::Regular, "", b"3");
    tar.add(".", tar::EntryType::Regular, "", b"4");
    tar.add("a", tar::EntryType::Regular, "", b"again");
    let taken = bench.take(&tar.end()).await;
    assert_eq!(bench.files(), files(&[("jobs/j-0001/a", "again")]));
    let left_out = taken.left_out.to_string();
    for why in ["\"a/b\"", "\"c\"", "no name"] {
        assert!(left_out.contains(why), "{left_out}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_to_a_file_of_the_outputs_becomes_a_copy_and_no_other_one_does() {
    let bench = Bench::new();
    std::fs::create_dir_all(bench.tree().join("jobs")).expect("mkdir");
    std::fs::write(bench.tree().join("secret"), "of another job").expect("write");
    let mut tar = Hostile::default();
    let link = tar::EntryType::Symlink;
    tar.add("output/latest", link, "run/b", b"");
    tar.add("output/absolute", link, "/output/run/b", b"");
    tar.add("output/directory", link, "run", b"");
    tar.add("output/out", link, "../../../secret", b"");
    tar.add("output/shadow", link, "/etc/shadow", b"");
    tar.add("output/circle", link, "circle", b"");
    tar.add("output/run/b", tar::EntryType::Regular, "", b"two");
    let taken = bench.take(&tar.end()).await;
    let expected = files(&[
        ("jobs/j-0001/output/absolute", "two"),
        ("jobs/j-0001/output/latest", "two"),
        ("jobs/j-0001/output/run/b", "two"),
        ("secret", "of another job"),
    ]);
    assert_eq!(bench.files(), expected);
    assert_eq!((taken.files, taken.bytes), (3, 9));
    let left_out = taken.left_out.to_string();
    for why in ["a link to a directory", "\"secret\", which is no file", "\"etc/shadow\"", "circle"]
    {
        assert!(left_out.contains(why), "{left_out}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn links_make_no_more_of_a_file_than_the_output_disk_has() {
    let bench = Bench::new();
    let mut tar = Hostile::default();
    tar.add("file", tar::EntryType::Regular, "", &vec![1; 200_000]);
    for number in 0..20 {
        tar.add(&format!("link{number}"), tar::EntryType::Symlink, "file", b"");
    }
    let taken = bench.take(&tar.end()).await;
    assert_eq!((taken.files, taken.bytes), (5, 1_000_000));
    assert!(taken.left_out.to_string().contains("more than 1 MiB"), "{}", taken.left_out);
    assert!(taken.left_out.to_string().ends_with("and 11 more"), "{}", taken.left_out);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_differs_from_what_the_guest_wrote_is_said() {
    let bench = Bench::new();
    let tar = tar_of(&[("a", b"1")]);
    let bytes = tar.len() as u64;
    let expected = Expected { bytes, sha256: "0".repeat(64), room_bytes: 1 << 20 };
    let taken = bench.take_as(&tar, expected.clone()).await.expect("taken");
    assert!(taken.damaged.expect("a reason").contains("the guest wrote"), "{:?}", taken.files);
    let longer = Expected { bytes: bytes - 1, ..expected };
    bench.take_as(&tar, longer).await.expect_err("the host sends more than it was asked for");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_cut_is_read_again_from_its_beginning() {
    let bench = Bench::new();
    let tar = tar_of(&[("a", &vec![1; 300_000]), ("b", b"2")]);
    let expected = Expected {
        bytes: tar.len() as u64,
        sha256: crate::hash::hex(&Sha256::digest(&tar)),
        room_bytes: 1 << 20,
    };
    for cut_at in [0, 1000, 150_000, 301_000] {
        let piece = Bytes::copy_from_slice(&tar[..cut_at]);
        let lost = Err(io::Error::from(io::ErrorKind::ConnectionReset));
        let body = stream::iter([Ok(piece), lost]);
        let cut = intake::take(&bench.view(), &bench.place, body, &expected).await;
        assert_eq!(cut.expect_err("it is cut").kind, ProblemKind::Unavailable);
    }
    let taken = bench.take(&tar).await;
    assert_eq!((taken.files, bench.names().len()), (2, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quota_without_room_is_waited_for_and_then_all_is_there_once() {
    let mut bench = Bench::new();
    let tar = tar_of(&[("a", &vec![1; 300_000]), ("b", &vec![2; 100_000])]);
    for bytes in [100_000, 350_000] {
        bench.quota = Quota { bytes, ..Quota::default() };
        let refused = bench.try_take(&tar).await.expect_err("there is no room");
        assert_eq!(refused.kind, ProblemKind::NoSpace, "{refused}");
    }
    bench.quota = Quota { bytes: 400_000, ..Quota::default() };
    let taken = bench.take(&tar).await;
    assert_eq!((taken.files, taken.bytes), (2, 400_000), "what an earlier try left takes no room");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_of_the_users_keeps_what_it_has() {
    let mut bench = Bench::new();
    bench.place.is_own = false;
    bench.take(&tar_of(&[("a", b"1"), ("b", b"2")])).await;
    bench.take(&tar_of(&[("b", b"3")])).await;
    assert_eq!(bench.files(), files(&[("jobs/j-0001/a", "1"), ("jobs/j-0001/b", "3")]));
}

#[tokio::test(flavor = "multi_thread")]
async fn many_small_files_come_in_and_go_out_as_they_were() {
    let bench = Bench::new();
    let names: Vec<String> = (0..1200).map(|number| format!("d{}/f{number}", number % 7)).collect();
    let entries: Vec<(&str, &[u8])> =
        names.iter().map(|name| (name.as_str(), name.as_bytes())).collect();
    assert_eq!(bench.take(&tar_of(&entries)).await.files, 1200);
    let sent = archive::archive(bench.view(), bench.place.clone()).await.expect("an archive");
    let pieces: Vec<_> = sent.collect().await;
    let tar: Vec<u8> = pieces.into_iter().flat_map(|piece| piece.expect("a piece")).collect();
    let mut found = 0;
    for entry in tar::Archive::new(&tar[..]).entries().expect("entries") {
        let mut entry = entry.expect("an entry");
        if entry.header().entry_type().is_file() {
            let name = entry.path().expect("a name").display().to_string();
            let mut content = String::new();
            io::Read::read_to_string(&mut entry, &mut content).expect("its content");
            assert_eq!(name, content);
            found += 1;
        }
    }
    assert_eq!(found, 1200);
    let long = format!("{}/{}", "n".repeat(200), "m".repeat(200));
    bench.take(&tar_of(&[("short", b"x")])).await;
    let to = Location::In(
        TenantName::default(),
        DataPath::parse(&format!("jobs/j-0001/{long}")).expect("a path"),
    );
    let mut writing =
        bench.view().write(to, perigee_repository::Begin::Empty, true).await.expect("a file");
    writing.write(0, b"long").await.expect("written");
    writing.commit(None).await.expect("whole");
    let sent = archive::archive(bench.view(), bench.place.clone()).await.expect("an archive");
    let pieces: Vec<_> = sent.collect().await;
    let tar: Vec<u8> = pieces.into_iter().flat_map(|piece| piece.expect("a piece")).collect();
    let mut archive = tar::Archive::new(&tar[..]);
    let paths: Vec<_> = archive
        .entries()
        .expect("entries")
        .map(|entry| entry.expect("an entry").path().expect("a name").display().to_string())
        .collect();
    assert!(paths.contains(&long) && paths.contains(&"short".to_owned()), "{paths:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_is_removed_with_all_that_is_in_it() {
    let bench = Bench::new();
    bench.take(&tar_of(&[("a/b/c", b"1"), ("a/d", b"2"), ("e", b"3")])).await;
    std::fs::write(bench.tree().join("jobs/other"), "stays").expect("write");
    let view = bench.view();
    for _ in 0..2 {
        remove_tree(&view, &bench.place.tenant, &bench.place.path).await.expect("removed");
        assert_eq!(bench.names(), ["jobs/other"]);
    }
    assert!(!bench.tree().join("jobs/j-0001").exists());
}

#[test]
fn outputs_go_to_the_own_tenant_only() {
    let mut spec = crate::tests::spec(perigee_model::job::Access::Read);
    let id = JobId::new("acme~q-0001").expect("an id");
    spec.name = "acme~q".to_owned();
    let place = OutputPlace::wanted(&id, &spec).expect("a place");
    assert_eq!((place.to_string().as_str(), place.is_own), ("repo://acme/jobs/q-0001", true));
    for (to, at) in [
        ("runs/today", Some("repo://acme/runs/today")),
        ("repo://acme/x", Some("repo://acme/x")),
        ("repo://blue/x", None),
        ("repo://default/x", None),
    ] {
        spec.outputs_to = Some(to.to_owned());
        let place = OutputPlace::wanted(&id, &spec).ok().map(|place| place.to_string());
        assert_eq!(place.as_deref(), at, "{to}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_somebody_has_put_into_the_directory_of_a_job_stays() {
    let bench = Bench::new();
    let output = bench.tree().join("jobs/j-0001/output");
    std::fs::create_dir_all(&output).expect("directories");
    std::fs::write(output.join("note"), "mine").expect("a file");
    std::fs::write(output.join("a"), "old").expect("a file");
    std::fs::create_dir(output.join("b")).expect("a directory");
    bench.take(&tar_of(&[("output/a", b"1"), ("output/b", b"2"), ("output/c/d", b"3")])).await;
    let expected = [
        ("jobs/j-0001/output/a", "1"),
        ("jobs/j-0001/output/b", "2"),
        ("jobs/j-0001/output/c/d", "3"),
        ("jobs/j-0001/output/note", "mine"),
    ];
    assert_eq!(bench.files(), files(&expected));
    assert!(!bench.tree().join("jobs/.j-0001-part").exists());
}

/// Whoever looks for outputs finds all of them or none.
#[tokio::test(flavor = "multi_thread")]
async fn outputs_that_are_still_fetched_are_not_in_their_place() {
    let bench = Bench::new();
    let tar = tar_of(&[("output/a", b"1"), ("output/large", &[7; 300_000])]);
    let (pieces, body) = tokio::sync::mpsc::unbounded_channel::<Result<Bytes, io::Error>>();
    let mut body = body;
    let body = stream::poll_fn(move |context| body.poll_recv(context));
    let expected = Expected {
        bytes: tar.len() as u64,
        sha256: crate::hash::hex(&Sha256::digest(&tar)),
        room_bytes: 1 << 20,
    };
    let (view, place) = (bench.view(), bench.place.clone());
    let taking = tokio::spawn(async move { intake::take(&view, &place, body, &expected).await });
    pieces.send(Ok(Bytes::copy_from_slice(&tar[..200_000]))).expect("it is read");
    let late = std::time::Instant::now() + crate::tests::PATIENCE;
    while !bench.tree().join("jobs/.j-0001-part/output/a").exists() {
        assert!(std::time::Instant::now() < late, "the first file does not come");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert!(!bench.tree().join("jobs/j-0001").exists());
    pieces.send(Ok(Bytes::copy_from_slice(&tar[200_000..]))).expect("it is read");
    drop(pieces);
    taking.await.expect("a task").expect("taken");
    assert_eq!(bench.names(), ["jobs/j-0001/output/a", "jobs/j-0001/output/large"]);
}
