//! Patterns of output paths: `*`, `?` and `[a-z]` in names, and `**` for directories of any depth.
//!
//! As in a shell, a name that begins with a dot is matched only by a pattern that begins with one. `**` at the end stands
//! for all that is in a directory. Links to directories are not followed.

use std::path::{Path, PathBuf};
use std::{fs, io};

/// They are full of files that are none, and some of these have no end.
const SYSTEM_DIRECTORIES: [&str; 4] = ["/dev", "/proc", "/run", "/sys"];

/// What a pattern stands for.
#[derive(Debug, Default)]
pub struct Found {
    /// The paths that exist and match, sorted, none of them below another one.
    pub paths: Vec<PathBuf>,
    /// What could not be looked at, and why: files that match may be there.
    pub unread: Vec<(PathBuf, io::Error)>,
}

/// Looks for the paths that match. A path that exists is meant as it is, whatever characters it has.
pub fn expand(directory: &Path, pattern: &str) -> Found {
    let whole = directory.join(pattern);
    if whole.symlink_metadata().is_ok() {
        return Found { paths: vec![whole], unread: Vec::new() };
    }
    let (base, rest) = match pattern.strip_prefix('/') {
        Some(rest) => (Path::new("/"), rest),
        None => (directory, pattern),
    };
    let names: Vec<&str> = rest.split('/').filter(|name| !name.is_empty()).collect();
    let mut found = Found::default();
    found.search(base, &names);
    found.unread.sort_by(|one, other| one.0.cmp(&other.0));
    found.unread.dedup_by(|one, other| one.0 == other.0);
    Found { paths: without_nested(found.paths), ..found }
}

/// Sorts the paths, and drops those that are below another one.
pub fn without_nested(mut paths: Vec<PathBuf>) -> Vec<PathBuf> {
    paths.sort();
    let mut kept: Vec<PathBuf> = Vec::new();
    for path in paths {
        // Paths are sorted by their names, so what is below a path comes right after it.
        if !kept.last().is_some_and(|above| path.starts_with(above)) {
            kept.push(path);
        }
    }
    kept
}

impl Found {
    fn search(&mut self, base: &Path, names: &[&str]) {
        let Some((name, rest)) = names.split_first() else {
            self.paths.push(base.to_owned());
            return;
        };
        if *name == "**" {
            self.search(base, rest);
            if !rest.is_empty() {
                for (path, below) in self.children(base) {
                    if !below.starts_with('.') && self.is_directory(&path) {
                        self.search(&path, names);
                    }
                }
            }
            return;
        }
        if !name.contains(['*', '?', '[', '\\']) {
            let path = base.join(name);
            if self.kind(&path).is_some_and(|kind| rest.is_empty() || kind.is_dir()) {
                self.search(&path, rest);
            }
            return;
        }
        for (path, child) in self.children(base) {
            if matches(name, &child) && (rest.is_empty() || self.is_directory(&path)) {
                self.search(&path, rest);
            }
        }
    }

    fn is_directory(&mut self, path: &Path) -> bool {
        self.kind(path).is_some_and(|kind| kind.is_dir())
    }

    fn kind(&mut self, path: &Path) -> Option<fs::FileType> {
        self.note(path, path.symlink_metadata()).map(|meta| meta.file_type())
    }

    /// What is in a directory, with names.
    fn children(&mut self, directory: &Path) -> Vec<(PathBuf, String)> {
        let mut named = Vec::new();
        for entry in self.note(directory, fs::read_dir(directory)).into_iter().flatten() {
            let Some(entry) = self.note(directory, entry) else { continue };
            let path = entry.path();
            if !SYSTEM_DIRECTORIES.iter().any(|system| path == Path::new(system)) {
                named.push((path, entry.file_name().to_string_lossy().into_owned()));
            }
        }
        named
    }

    /// What is not there, or no longer, or no directory, can't match. All else that fails is not known.
    fn note<T>(&mut self, path: &Path, looked: io::Result<T>) -> Option<T> {
        looked
            .map_err(|error| match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {}
                _ => self.unread.push((path.to_owned(), error)),
            })
            .ok()
    }
}

fn matches(pattern: &str, name: &str) -> bool {
    if name.starts_with('.') && !pattern.starts_with('.') {
        return false;
    }
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    // Where the last `*` was, and how many characters it stands for.
    let mut star: Option<(usize, usize)> = None;
    let (mut at, mut next) = (0, 0);
    while next < name.len() {
        match one(&pattern[at..], name[next]) {
            Some(length) if pattern.get(at) != Some(&'*') => {
                at += length;
                next += 1;
            }
            _ if pattern.get(at) == Some(&'*') => {
                star = Some((at, next));
                at += 1;
            }
            _ => match star {
                Some((star_at, from)) => {
                    star = Some((star_at, from + 1));
                    at = star_at + 1;
                    next = from + 1;
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|c| *c == '*')
}

/// The length of the pattern's first element, if that matches one character.
fn one(pattern: &[char], c: char) -> Option<usize> {
    match pattern {
        ['?', ..] => Some(1),
        ['\\', escaped, ..] => (*escaped == c).then_some(2),
        ['[', rest @ ..] => match class(rest, c) {
            Some((length, is_in)) => is_in.then_some(length + 1),
            // Without an end it is the character itself.
            None => (c == '[').then_some(1),
        },
        [first, ..] => (*first == c).then_some(1),
        [] => None,
    }
}

/// The length of `a-z]` or `!a-z]`, and whether a character is in it; `None` if it has no end.
fn class(rest: &[char], c: char) -> Option<(usize, bool)> {
    let is_negated = matches!(rest.first(), Some('!' | '^'));
    let begin = usize::from(is_negated);
    // A bracket that comes first is one of the characters.
    let end = begin + 1 + rest.get(begin + 1..)?.iter().position(|c| *c == ']')?;
    let members = &rest[begin..end];
    let (mut is_in, mut at) = (false, 0);
    while at < members.len() {
        if let (Some('-'), Some(last)) = (members.get(at + 1), members.get(at + 2)) {
            is_in |= (members[at]..=*last).contains(&c);
            at += 3;
        } else {
            is_in |= members[at] == c;
            at += 1;
        }
    }
    Some((end + 1, is_in != is_negated))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn names_match_as_in_a_shell() {
        for (pattern, name) in [
            ("*.csv", "a.csv"),
            ("*", "a"),
            ("a*b*c", "aXbYbZc"),
            ("?", "ü"),
            ("[a-c]x", "bx"),
            ("[!a-c]x", "dx"),
            ("[]]", "]"),
            ("[", "["),
            ("\\*", "*"),
            (".*", ".hidden"),
            ("run[0-9][0-9]*", "run07-b"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [
            ("*.csv", "a.csv.gz"),
            ("*", ".hidden"),
            ("?", "ab"),
            ("[a-c]x", "dx"),
            ("a*b", "acd"),
            ("\\*", "x"),
            ("", "x"),
        ] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn many_stars_take_no_long_time() {
        let name = "a".repeat(255);
        assert!(!matches(&"*a".repeat(100).replace("*a*a", "*a*b"), &name));
    }

    fn tree(files: &[&str]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for file in files {
            let path = directory.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        }
        directory
    }

    fn found(tree: &tempfile::TempDir, pattern: &str) -> Vec<String> {
        let found = expand(tree.path(), pattern);
        assert!(found.unread.is_empty(), "{found:?}");
        let names = found.paths.iter().map(|path| path.strip_prefix(tree.path()).unwrap());
        names.map(|name| name.display().to_string()).collect()
    }

    #[test]
    fn a_pattern_names_what_exists_when_the_command_has_ended() {
        let tree =
            tree(&["o/a.csv", "o/b.csv", "o/c.txt", "o/d/e.csv", "o/d/f/g.csv", "o/.h/i.csv"]);
        assert_eq!(found(&tree, "o/*.csv"), ["o/a.csv", "o/b.csv"]);
        assert_eq!(found(&tree, "o/**/*.csv"), ["o/a.csv", "o/b.csv", "o/d/e.csv", "o/d/f/g.csv"]);
        assert_eq!(found(&tree, "o/**"), ["o"]);
        assert_eq!(found(&tree, "*/d"), ["o/d"]);
        assert_eq!(found(&tree, "o/*"), ["o/a.csv", "o/b.csv", "o/c.txt", "o/d"]);
        assert_eq!(found(&tree, "o/*.pdf"), [""; 0]);
        assert_eq!(found(&tree, "none"), [""; 0]);
        let absolute = format!("{}/o/?.txt", tree.path().display());
        assert_eq!(found(&tree, &absolute), ["o/c.txt"]);
    }

    #[test]
    fn a_file_with_a_patterns_name_is_meant_itself() {
        let tree = tree(&["[1].txt", "1.txt"]);
        assert_eq!(found(&tree, "[1].txt"), ["[1].txt"]);
    }

    #[test]
    fn links_to_directories_are_not_followed() {
        let tree = tree(&["o/a.csv"]);
        std::os::unix::fs::symlink("..", tree.path().join("o/up")).unwrap();
        assert_eq!(found(&tree, "o/**/*.csv"), ["o/a.csv"]);
    }

    /// What is below such a directory was passed over in silence.
    #[test]
    fn a_directory_that_cannot_be_read_is_told_with_why() {
        let tree = tree(&["o/a/x.csv", "o/b/x.csv"]);
        let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode));
        mode(tree.path(), 0o755).unwrap();
        let closed = tree.path().join("o/b");
        mode(&closed, 0).unwrap();
        let look = || {
            // Root can read each directory; only this thread is somebody else.
            nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65534));
            ["o/*/*.csv", "o/**/*.csv", "*/b/x.csv"].map(|pattern| expand(tree.path(), pattern))
        };
        let found = std::thread::scope(|scope| scope.spawn(look).join().unwrap());
        mode(&closed, 0o700).unwrap();
        let open = [tree.path().join("o/a/x.csv")];
        let paths = found.each_ref().map(|found| &found.paths[..]);
        assert_eq!(paths, [&open[..], &open[..], &[]]);
        let denied = io::ErrorKind::PermissionDenied;
        let unread = found.map(|found| {
            found.unread.into_iter().map(|(path, why)| (path, why.kind())).collect::<Vec<_>>()
        });
        assert_eq!(
            unread,
            [closed.clone(), closed.clone(), closed.join("x.csv")].map(|path| vec![(path, denied)])
        );
    }
}
