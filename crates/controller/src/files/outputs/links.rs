//! Symbolic links among outputs. The repository has none, so a link to a file of the outputs becomes a copy of it.

use std::collections::BTreeMap;

/// The most links. Others are left out.
pub const LINKS_MAX: usize = 10_000;

/// The most bytes of their names and targets together: all are in memory until the archive has ended.
pub const LINK_BYTES_MAX: usize = 4 << 20;

/// The most names of a path on the way, and in all. The repository takes no longer paths.
const NAMES_MAX: usize = 64;
const STEPS_MAX: usize = 4096;

/// As in Linux.
const FOLLOWED_MAX: usize = 40;

/// Where each link leads, as its guest has written it.
#[derive(Debug, Default)]
pub struct Links {
    to: BTreeMap<String, String>,
    bytes: usize,
}

impl Links {
    /// Whether there was room for it.
    pub fn add(&mut self, path: String, to: String) -> bool {
        let bytes = self.bytes + path.len() + to.len();
        if self.to.len() >= LINKS_MAX || bytes > LINK_BYTES_MAX {
            return false;
        }
        self.bytes = bytes;
        self.to.insert(path, to);
        true
    }

    /// The paths of all links, sorted.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.to.keys().map(String::as_str)
    }

    /// What a link leads to, through other links too. Paths begin at the guest's root, where all outputs are. What it
    /// leads to need not exist. `None` if it leads around in a circle, or along more names than a path has.
    pub fn follow(&self, path: &str) -> Option<String> {
        let mut todo: Vec<&str> = path.split('/').rev().collect();
        let mut at: Vec<&str> = Vec::new();
        let (mut followed, mut steps) = (0, 0);
        while let Some(name) = todo.pop() {
            steps += 1;
            if steps > STEPS_MAX || at.len() > NAMES_MAX {
                return None;
            }
            match name {
                "" | "." => continue,
                ".." => {
                    at.pop();
                    continue;
                }
                name => at.push(name),
            }
            if let Some(to) = self.to.get(&at.join("/")) {
                followed += 1;
                if followed > FOLLOWED_MAX {
                    return None;
                }
                if to.starts_with('/') {
                    at.clear();
                } else {
                    at.pop();
                }
                todo.extend(to.split('/').rev());
            }
        }
        Some(at.join("/"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn links(of: &[(&str, &str)]) -> Links {
        let mut links = Links::default();
        for (path, to) in of {
            assert!(links.add((*path).to_owned(), (*to).to_owned()));
        }
        links
    }

    #[test]
    fn a_link_is_followed_through_others_from_where_it_is() {
        let links = links(&[
            ("output/latest", "run2"),
            ("output/a", "latest/a.csv"),
            ("output/b", "/output/run1/../b.csv"),
            ("output/up", "../../../../etc/passwd"),
        ]);
        let follow = |path| links.follow(path).unwrap();
        assert_eq!(follow("output/a"), "output/run2/a.csv");
        assert_eq!(follow("output/b"), "output/b.csv");
        assert_eq!(follow("output/up"), "etc/passwd", "nothing is above the guest's root");
    }

    #[test]
    fn circles_end() {
        let links = links(&[("a", "b"), ("b", "a"), ("c", "c/c"), ("d", ".")]);
        assert_eq!((links.follow("a"), links.follow("c")), (None, None));
        let long = self::links(&[("e", &"x/".repeat(20_000)), ("f", &"./".repeat(20_000))]);
        assert_eq!((long.follow("e"), long.follow("f")), (None, None));
        assert_eq!(links.follow("d").as_deref(), Some(""));
    }

    #[test]
    fn the_number_of_links_is_bounded() {
        let mut links = Links::default();
        for number in 0..LINKS_MAX {
            assert!(links.add(number.to_string(), "x".to_owned()));
        }
        assert!(!links.add("more".to_owned(), "x".to_owned()));
        assert!(!Links::default().add("a".to_owned(), "x".repeat(LINK_BYTES_MAX)));
    }
}
