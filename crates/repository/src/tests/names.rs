//! What can be named, and what can't.

use std::os::fd::AsFd;
use std::os::unix::fs::symlink;

use perigee_model::{ProblemKind, TenantName};
use rustix::fs::OFlags;
use rustix::io::Errno;
use tempfile::tempdir;

use super::{get, path, put, space};
use crate::beneath::{open, walk};
use crate::path::{DataPath, Location};

#[test]
fn a_path_that_leads_out_is_none() {
    let long = "x".repeat(256);
    let deep = "x/".repeat(65);
    for bad in [
        "..", "a/../b", "a/..", ".", "a/./b", "nul\0", "a\nb", "a\rb", "\u{7f}", "\u{85}", &long,
        &deep,
    ] {
        let problem = DataPath::parse(bad).expect_err(bad);
        assert_eq!(problem.kind, ProblemKind::Invalid, "{bad}");
    }
    let many = vec!["y".repeat(255); 17].join("/");
    DataPath::parse(&many).expect_err("a path that is too long");
    for good in
        ["...", "a..b", "-rf", "~", "ü", "a b", " ", "%2e%2e", "..%2f", "\\..\\", &"x".repeat(255)]
    {
        assert_eq!(DataPath::parse(good).expect(good).to_string(), good);
    }
    assert_eq!(path("//a///b/").to_string(), "a/b");
}

#[test]
fn dots_are_resolved_by_their_text_and_stop_at_the_top() {
    let home = TenantName::default();
    for (text, means) in [
        ("", "/default"),
        (".", "/default"),
        ("a", "/default/a"),
        ("a/../b", "/default/b"),
        ("..", "/"),
        ("../../..", "/"),
        ("../other/x", "/other/x"),
        ("/other/../default/x/.", "/default/x"),
        ("/", "/"),
    ] {
        let location = Location::resolve(text, &home).expect(text);
        assert_eq!(location.to_string(), means, "{text}");
    }
    for bad in ["/UPPER/x", "a\0", "/a b/x"] {
        Location::resolve(bad, &home).expect_err(bad);
    }
}

#[test]
fn case_and_encodings_of_one_letter_are_different_names() {
    let dir = tempdir().expect("a directory");
    let space = space(dir.path());
    let names = ["A", "a", "\u{e9}", "e\u{301}"];
    for name in names {
        put(&space, name, name.as_bytes()).expect(name);
    }
    for name in names {
        assert_eq!(get(&space, name).expect(name), name.as_bytes());
    }
    assert_eq!(space.list(&path(""), None, 10).expect("a list").entries.len(), 4);
}

/// Nobody can store a link. If one is there anyway, it leads nowhere.
#[test]
fn a_link_in_the_tree_is_not_followed() {
    let dir = tempdir().expect("a directory");
    let space = space(dir.path());
    put(&space, "file", b"x").expect("a file");
    std::fs::write(dir.path().join("secret"), "s").expect("a file outside");
    symlink("../secret", dir.path().join("tree/link")).expect("a link");
    symlink("..", dir.path().join("tree/up")).expect("a link");
    for name in ["link", "up/secret", "up", "link/x"] {
        let problem = space.read(&path(name)).expect_err(name);
        assert_eq!(problem.kind, ProblemKind::NotFound, "{name}: {problem}");
        space.directory(&path(name)).expect_err(name);
    }
    let entries = space.list(&path(""), None, 10).expect("a list").entries;
    assert_eq!(entries.len(), 1, "links are not shown: {entries:?}");
    put(&space, "link", b"new").expect("a link is replaced like a file");
    assert_eq!(std::fs::read(dir.path().join("secret")).expect("it is there"), b"s");
}

/// What a kernel without openat2 does is the same.
#[test]
fn walking_opens_what_the_kernel_opens_beneath() {
    let dir = tempdir().expect("a directory");
    std::fs::create_dir_all(dir.path().join("a/b")).expect("directories");
    std::fs::write(dir.path().join("a/b/f"), "x").expect("a file");
    symlink("b", dir.path().join("a/l")).expect("a link");
    let tree = std::fs::File::open(dir.path()).expect("the directory");
    let errno = |opened: Result<_, Errno>| opened.map(drop).err();
    for name in ["", "a", "a/b", "a/b/f", "a/b/f/g", "a/x", "a/l", "a/l/f"] {
        let kernel = errno(open(tree.as_fd(), &path(name), OFlags::RDONLY));
        let walked = errno(walk(tree.as_fd(), &path(name), OFlags::RDONLY));
        assert_eq!(kernel.is_none(), walked.is_none(), "{name}: {kernel:?} {walked:?}");
    }
}

#[test]
fn a_directory_is_listed_in_sorted_pages() {
    let dir = tempdir().expect("a directory");
    let space = space(dir.path());
    let names: Vec<String> = (0..25).map(|n| format!("f{n:02}")).collect();
    for name in names.iter().rev() {
        std::fs::write(dir.path().join("tree").join(name), "").expect("a file");
    }
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let page = space.list(&path(""), after.as_deref(), 10).expect("a page");
        assert!(page.entries.len() <= 10);
        found.extend(page.entries.into_iter().map(|entry| entry.name));
        after = page.after;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(found, names);
}
