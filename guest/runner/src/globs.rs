//! Patterns of output paths: `*`, `?` and `[a-z]` in names, and `**` for directories of any depth.
//!
//! As in a shell, a name that begins with a dot is matched only by a pattern that begins with one. `**` at the end stands
//! for all that is in a directory. Links to directories are not followed.

use std::fs;
use std::path::{Path, PathBuf};

/// They are full of files that are none, and some of these have no end.
const SYSTEM_DIRECTORIES: [&str; 4] = ["/dev", "/proc", "/run", "/sys"];

/// The paths that exist and match, sorted, none of them below another one. A path that exists is meant as it is, whatever
/// characters it has.
pub fn expand(directory: &Path, pattern: &str) -> Vec<PathBuf> {
    let whole = directory.join(pattern);
    if whole.symlink_metadata().is_ok() {
        return vec![whole];
    }
    let (base, rest) = match pattern.strip_prefix('/') {
        Some(rest) => (Path::new("/"), rest),
        None => (directory, pattern),
    };
    let names: Vec<&str> = rest.split('/').filter(|name| !name.is_empty()).collect();
    let mut found = Vec::new();
    search(base, &names, &mut found);
    without_nested(found)
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

fn search(base: &Path, names: &[&str], found: &mut Vec<PathBuf>) {
    let Some((name, rest)) = names.split_first() else {
        found.push(base.to_owned());
        return;
    };
    if *name == "**" {
        search(base, rest, found);
        if !rest.is_empty() {
            for (path, below) in children(base) {
                if is_directory(&path) && !below.starts_with('.') {
                    search(&path, names, found);
                }
            }
        }
        return;
    }
    if !name.contains(['*', '?', '[', '\\']) {
        let path = base.join(name);
        if path.symlink_metadata().is_ok() && (rest.is_empty() || is_directory(&path)) {
            search(&path, rest, found);
        }
        return;
    }
    for (path, child) in children(base) {
        if matches(name, &child) && (rest.is_empty() || is_directory(&path)) {
            search(&path, rest, found);
        }
    }
}

fn is_directory(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|meta| meta.is_dir())
}

/// What is in a directory, with names; nothing if it can't be read.
fn children(directory: &Path) -> Vec<(PathBuf, String)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let named =
        entries.map(|entry| (entry.path(), entry.file_name().to_string_lossy().into_owned()));
    named
        .filter(|(path, _)| !SYSTEM_DIRECTORIES.iter().any(|system| path == Path::new(system)))
        .collect()
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
        let names = found.iter().map(|path| path.strip_prefix(tree.path()).unwrap());
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
}
