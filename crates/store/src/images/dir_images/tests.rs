//! Tars as they should be, and as somebody who means harm writes them; and filesystems made of what they hold.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;

use perigee_model::limits::FILE_NAME_BYTES;
use perigee_model::volume::ImportImage;
use perigee_model::{ImageName, LayerId};
use proptest::prelude::*;
use tar::{Builder, EntryType, Header};

use super::*;
use crate::images::import::ImportFrom;

fn header(kind: EntryType, path: &[u8], size: u64) -> Header {
    let mut header = Header::new_gnu();
    // Straight into the field: the builder would refuse what is tested here.
    header.as_old_mut().name[..path.len()].copy_from_slice(path);
    header.set_entry_type(kind);
    header.set_mode(0o4777);
    header.set_uid(1234);
    header.set_mtime(77);
    header.set_size(size);
    header.set_cksum();
    header
}

fn tar_of(entries: &[(EntryType, &str)]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (kind, path) in entries {
        let content: &[u8] = if kind.is_file() { b"hi" } else { b"" };
        builder.append(&header(*kind, path.as_bytes(), content.len() as u64), content).unwrap();
    }
    builder.into_inner().unwrap()
}

fn refused(archive: impl Read) -> TreeError {
    let outer = tempfile::tempdir().unwrap();
    let into = outer.path().join("tree");
    std::fs::create_dir(&into).unwrap();
    let error = unpack(archive, &into).expect_err("it must be refused");
    assert_eq!(std::fs::read_dir(outer.path()).unwrap().count(), 1, "nothing is beside the tree");
    error
}

#[test]
fn what_would_lead_out_of_the_tree_is_refused() {
    for bad in ["/etc/passwd", "a/../../b", "..", "./a", "a//b", "a/./b"] {
        let error = refused(&tar_of(&[(EntryType::Regular, bad)])[..]);
        assert!(matches!(error, TreeError::Path(_)), "{bad}: {error}");
        refused(&tar_of(&[(EntryType::Directory, bad)])[..]);
    }
}

#[test]
fn a_tree_has_files_and_directories_and_nothing_else() {
    for kind in [
        EntryType::Symlink,
        EntryType::Link,
        EntryType::Char,
        EntryType::Block,
        EntryType::Fifo,
        EntryType::Continuous,
        EntryType::GNUSparse,
        EntryType::new(b'M'),
    ] {
        let mut link = header(kind, b"x", 0);
        link.set_link_name("/etc/passwd").unwrap();
        link.set_cksum();
        let mut builder = Builder::new(Vec::new());
        builder.append(&link, &b""[..]).unwrap();
        builder.append(&header(EntryType::Regular, b"x/y", 0), &b""[..]).unwrap();
        refused(&builder.into_inner().unwrap()[..]);
    }
}

#[test]
fn no_file_replaces_another_one_or_is_a_directory_too() {
    let (file, directory) = (EntryType::Regular, EntryType::Directory);
    for entries in [
        [(file, "a"), (file, "a")],
        [(file, "a"), (file, "a/b")],
        [(file, "a"), (directory, "a")],
        [(file, "a/b"), (file, "a")],
    ] {
        let error = refused(&tar_of(&entries)[..]);
        assert!(matches!(error, TreeError::Twice(_)), "{entries:?}: {error}");
    }
    let dir = tempfile::tempdir().unwrap();
    let twice = tar_of(&[(directory, "a/"), (directory, "a"), (file, "a/b")]);
    assert_eq!(unpack(&twice[..], dir.path()).unwrap().entries, 3);
}

/// Repeats one entry without end.
struct Endless(Vec<u8>, usize);

impl Read for Endless {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let from = &self.0[self.1..];
        let length = from.len().min(buffer.len());
        buffer[..length].copy_from_slice(&from[..length]);
        self.1 = (self.1 + length) % self.0.len();
        Ok(length)
    }
}

#[test]
fn an_archive_without_end_ends_at_the_limits() {
    let one = header(EntryType::Directory, b"d", 0).as_bytes().to_vec();
    let error = refused(Endless(one, 0));
    assert!(error.to_string().contains("number of input files"), "{error}");
    let zeros = refused(io::repeat(7));
    assert!(matches!(zeros, TreeError::Io(_)), "{zeros}");
}

#[test]
fn a_file_that_says_it_is_huge_is_refused_before_it_is_read() {
    let huge = header(EntryType::Regular, b"huge", 65 << 30);
    let error = refused(huge.as_bytes().chain(io::repeat(1)));
    assert!(matches!(error, TreeError::Limit(_)), "{error}");
    let mut two = Builder::new(Vec::new());
    two.append(&header(EntryType::Regular, b"a", 2), &b"hi"[..]).unwrap();
    let mut bytes = two.into_inner().unwrap();
    bytes.truncate(1024);
    let rest = header(EntryType::Regular, b"b", (64 << 30) - 1);
    refused(bytes.chain(&rest.as_bytes()[..]));
}

#[test]
fn headers_are_bounded_before_they_are_read_into_memory() {
    for kind in [EntryType::GNULongName, EntryType::XHeader, EntryType::GNULongLink] {
        let long = header(kind, b"././@LongLink", 16 << 30);
        let error = refused(long.as_bytes().chain(io::repeat(b'n')));
        assert!(error.to_string().contains("65536 bytes"), "{error}");
    }
}

#[test]
fn names_are_text_and_as_long_as_a_disk_takes_them() {
    let mut builder = Builder::new(Vec::new());
    builder.append(&header(EntryType::Regular, b"\xff\xfe", 0), &b""[..]).unwrap();
    assert!(matches!(refused(&builder.into_inner().unwrap()[..]), TreeError::Name(_)));
    let mut builder = Builder::new(Vec::new());
    let long = "n".repeat(usize::try_from(FILE_NAME_BYTES.max).unwrap() + 1);
    builder.append_data(&mut header(EntryType::Regular, b"", 0), long, &b""[..]).unwrap();
    assert!(matches!(refused(&builder.into_inner().unwrap()[..]), TreeError::Path(_)));
}

type Files = BTreeMap<String, Option<(Vec<u8>, bool)>>;

/// A tree in which no file is above another one.
fn files() -> impl Strategy<Value = Files> {
    let name = prop_oneof!["[a-c]", "[ -~&&[^/.]]{1,8}", "ü{1,40}", "x{150,255}"];
    let path = prop::collection::vec(name, 1..5).prop_map(|names| names.join("/"));
    let content = prop::option::of((prop::collection::vec(any::<u8>(), 0..9000), any::<bool>()));
    prop::collection::btree_map(path, content, 0..12).prop_map(|all: Files| {
        let mut kept = Files::new();
        for (path, content) in all {
            let above = kept.iter().any(|(other, content)| {
                content.is_some() && path.starts_with(&format!("{other}/"))
            });
            if !above {
                kept.insert(path, content);
            }
        }
        // A name that sorts between a file and what is below it.
        let names: Vec<String> = kept.keys().cloned().collect();
        kept.retain(|path, content| {
            content.is_none() || !names.iter().any(|other| other.starts_with(&format!("{path}/")))
        });
        kept
    })
}

fn pack(files: &Files) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (path, content) in files {
        let kind = if content.is_some() { EntryType::Regular } else { EntryType::Directory };
        let (bytes, executable) = content.clone().unwrap_or_default();
        let mut header = header(kind, b"", bytes.len() as u64);
        header.set_mode(if executable { 0o755 } else { 0o640 });
        builder.append_data(&mut header, path, &bytes[..]).unwrap();
    }
    builder.into_inner().unwrap()
}

/// Everything below a directory, without the directories that lead to something.
fn look(root: &Path) -> Files {
    let mut found = Files::new();
    let mut left = vec![root.to_owned()];
    while let Some(directory) = left.pop() {
        let entries: Vec<_> =
            std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
        let name = |path: &Path| path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        if entries.is_empty() && directory != root {
            found.insert(name(&directory), None);
        }
        for path in entries {
            let meta = std::fs::symlink_metadata(&path).unwrap();
            if meta.is_dir() {
                left.push(path);
            } else {
                let executable = meta.permissions().mode() & 0o111 == 0o111;
                found.insert(name(&path), Some((std::fs::read(&path).unwrap(), executable)));
            }
        }
    }
    found
}

fn without_parents(files: &Files) -> Files {
    let mut kept = files.clone();
    let names: Vec<String> = kept.keys().cloned().collect();
    kept.retain(|path, _| !names.iter().any(|other| other.starts_with(&format!("{path}/"))));
    kept
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn what_was_packed_is_unpacked(files in files()) {
        let dir = tempfile::tempdir().unwrap();
        let size = unpack(&pack(&files)[..], dir.path()).unwrap();
        prop_assert_eq!(look(dir.path()), without_parents(&files));
        let bytes: usize = files.values().flatten().map(|(bytes, _)| bytes.len()).sum();
        prop_assert_eq!((size.bytes, size.entries), (bytes as u64, files.len() as u64));
    }

    #[test]
    fn a_cut_or_changed_archive_harms_nothing(files in files(), at in any::<usize>(), byte: u8, cut: bool) {
        let outer = tempfile::tempdir().unwrap();
        let into = outer.path().join("tree");
        std::fs::create_dir(&into).unwrap();
        let mut bytes = pack(&files);
        let at = at % bytes.len();
        if cut { bytes.truncate(at) } else { bytes[at] = byte }
        drop(unpack(&bytes[..], &into));
        prop_assert_eq!(std::fs::read_dir(outer.path()).unwrap().count(), 1);
    }
}

fn some_files() -> Files {
    let long = "x".repeat(200);
    let mut files = Files::from([
        ("run.sh".to_owned(), Some((b"#!/bin/sh\n".to_vec(), true))),
        (format!("deep/{long}/{long}"), Some((vec![7; 3 << 20], false))),
        ("empty".to_owned(), None),
        ("nothing".to_owned(), Some((Vec::new(), false))),
    ]);
    for number in 0..700 {
        files.insert(format!("many/{number}"), Some((vec![1; number], false)));
    }
    files
}

/// The files of an image are those of the tree, root's, and a check finds nothing wrong.
#[tokio::test]
async fn a_filesystem_has_the_files_of_the_tree() {
    let dir = tempfile::tempdir().unwrap();
    let (tree, image) = (dir.path().join("tree"), dir.path().join("image"));
    std::fs::create_dir(&tree).unwrap();
    let files = some_files();
    unpack(&pack(&files)[..], &tree).unwrap();
    let file = File::options().read(true).write(true).create_new(true).open(&image).unwrap();
    let work = Work::default();
    let to = (image.as_path(), &file);
    let bytes = build("build", &tree, to, &RunUser::new(), Duration::from_secs(60), &work)
        .await
        .expect("an image");
    assert_eq!(bytes, std::fs::metadata(&image).unwrap().len());
    let run = |program: &str, arguments: &[&str]| {
        let image = image.to_str().unwrap();
        let run = Command::new(program).args(arguments).arg(image).output().unwrap();
        let said = String::from_utf8_lossy(&run.stdout).into_owned();
        assert!(run.status.success(), "{said}{}", String::from_utf8_lossy(&run.stderr));
        said
    };
    run("/sbin/e2fsck", &["-fn"]);
    let out = dir.path().join("out");
    std::fs::create_dir(&out).unwrap();
    run("/sbin/debugfs", &["-R", &format!("rdump / {}", out.display())]);
    std::fs::remove_dir(out.join("lost+found")).unwrap();
    assert_eq!(look(&out), files);
    let said = run("/sbin/debugfs", &["-R", "stat /many"]);
    assert!(said.contains("User:     0   Group:     0"), "{said}");
    assert!(said.contains("Flags: 0x1000") || said.contains("Flags: 0x81000"), "indexed: {said}");
    let free = run("/sbin/dumpe2fs", &["-h"]);
    let free = free.lines().find_map(|line| line.strip_prefix("Free blocks:")).unwrap();
    let free: u64 = free.trim().parse().unwrap();
    assert!(free * BLOCK_BYTES >= FREE_BYTES, "the guest can write");
}

#[tokio::test]
async fn a_tree_becomes_an_image_of_the_pool() {
    let (pool_dir, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let pool = crate::tests::open_real(pool_dir.path()).await;
    unpack(&pack(&some_files())[..], dir.path()).unwrap();
    let name = ImageName::new("inputs-1").unwrap();
    let layer = Some(LayerId(uuid::Uuid::new_v4()));
    let leave_site = Default::default();
    let source = "tree:1".to_owned();
    let ask = ImportImage { name: name.clone(), source, format: None, layer, leave_site };
    let open = |what: &str, _: &str| ImportFrom::tree(what, dir.path().to_owned(), ());
    let work = Arc::new(Work::default());
    let info = pool.import_opened(ask.clone(), open, &work).await.expect("an image");
    assert_eq!((info.name.clone(), Some(info.layer)), (name, layer));
    assert!(info.allocated_bytes > 3 << 20 && info.allocated_bytes < 16 << 20, "{info:?}");
    assert!(info.size_bytes > FREE_BYTES);
    let again = pool.import_opened(ask, |_, _| panic!("it is there"), &work).await;
    assert_eq!(again.expect("the same").layer, info.layer);
    let left: Vec<_> = std::fs::read_dir(pool_dir.path().join("layers")).unwrap().collect();
    assert!(left.iter().all(|entry| {
        !entry.as_ref().unwrap().file_name().to_str().unwrap().starts_with("import-")
    }));
}

#[tokio::test]
async fn the_making_of_a_filesystem_ends_when_it_is_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let (tree, image) = (dir.path().join("tree"), dir.path().join("image"));
    std::fs::create_dir(&tree).unwrap();
    unpack(&pack(&some_files())[..], &tree).unwrap();
    let file = File::options().read(true).write(true).create_new(true).open(&image).unwrap();
    let work = Work::default();
    work.stop();
    let to = (image.as_path(), &file);
    // It may have ended before somebody looked.
    if let Err(problem) =
        build("build", &tree, to, &RunUser::new(), Duration::from_secs(60), &work).await
    {
        assert_eq!(problem.kind, perigee_model::ProblemKind::Conflict, "{problem}");
    }
}
