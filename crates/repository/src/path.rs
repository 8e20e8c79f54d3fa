//! Names of files: one check for all doors, so that what one door stores every other door can name.
//!
//! A name is 1 to 255 bytes of UTF-8 without `/` and without control characters, and neither `.` nor `..`. Names are
//! compared byte by byte: `A` and `a` are two names, and so are two ways to encode one accented letter.

use std::fmt;

use perigee_model::limits::{FILE_NAME_BYTES, PATH_BYTES, PATH_NAMES};
use perigee_model::{Problem, TenantName};

/// A path in a tenant's tree. The empty path is the tree itself.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct DataPath(Vec<String>);

impl DataPath {
    /// Checks every name. Slashes at the beginning, at the end and in a row do not count.
    ///
    /// # Errors
    /// `Invalid` if a name is none, or if there are too many or they are too long.
    pub fn parse(text: &str) -> Result<Self, Problem> {
        let refused = |why: String| {
            let shown: String = text.chars().take(80).collect();
            Problem::invalid(format!("can't use the path {shown:?}"), why)
        };
        let mut names = Vec::new();
        for name in text.split('/').filter(|name| !name.is_empty()) {
            check_name(name).map_err(refused)?;
            names.push(name.to_owned());
            PATH_NAMES.check(names.len()).map_err(|e| refused(e.to_string()))?;
        }
        let path = Self(names);
        if !path.is_root() {
            PATH_BYTES.check(path.length_bytes()).map_err(|e| refused(e.to_string()))?;
        }
        Ok(path)
    }

    /// Whether it is the tree itself.
    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// The names, from the top.
    pub fn names(&self) -> &[String] {
        &self.0
    }

    /// The directory and the name in it; `None` for the tree itself.
    pub fn split(&self) -> Option<(Self, &str)> {
        let (name, above) = self.0.split_last()?;
        Some((Self(above.to_vec()), name))
    }

    /// A path with one more name.
    ///
    /// # Errors
    /// As [`DataPath::parse`].
    pub fn join(&self, name: &str) -> Result<Self, Problem> {
        Self::parse(&format!("{self}/{name}"))
    }

    /// Whether it is `other` or below it.
    pub fn is_within(&self, other: &Self) -> bool {
        self.0.starts_with(&other.0)
    }

    pub(crate) fn length_bytes(&self) -> usize {
        self.0.iter().map(|name| name.len() + 1).sum::<usize>().saturating_sub(1)
    }
}

impl fmt::Display for DataPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("/"))
    }
}

/// Bytes that no door takes for a path. To make them into a text would give two files one name.
pub fn not_utf8(path: &[u8]) -> Problem {
    let shown: String = path.escape_ascii().take(80).map(char::from).collect();
    Problem::invalid(format!("can't use the path \"{shown}\""), "it is not UTF-8")
        .next("rename the file, or convert its name (convmv)")
}

fn check_name(name: &str) -> Result<(), String> {
    if name == "." || name == ".." {
        return Err(format!("{name:?} is not the name of a file"));
    }
    if name.chars().any(char::is_control) {
        return Err("a name has a control character".to_owned());
    }
    FILE_NAME_BYTES.check(name.len()).map(drop).map_err(|e| e.to_string())
}

/// What a path means at every door: `/` lists tenants, `/TENANT/PATH` is `repo://TENANT/PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// Above all tenants.
    Top,
    /// In a tenant's tree.
    In(TenantName, DataPath),
}

impl Location {
    /// For protocols in which a path may have `.` and `..`, and may begin in the user's own tree. There are no links,
    /// so what a path means follows from its text.
    ///
    /// # Errors
    /// `Invalid` if a name is none.
    pub fn resolve(text: &str, home: &TenantName) -> Result<Self, Problem> {
        let mut names = Vec::new();
        if !text.starts_with('/') {
            names.push(home.as_str());
        }
        for name in text.split('/') {
            match name {
                "" | "." => {}
                ".." => drop(names.pop()),
                name => names.push(name),
            }
        }
        match names.split_first() {
            None => Ok(Self::Top),
            Some((tenant, names)) => Self::new(tenant, &names.join("/")),
        }
    }

    /// A path in the tree of the tenant with this name.
    ///
    /// # Errors
    /// `Invalid` if a name is none.
    pub fn new(tenant: &str, path: &str) -> Result<Self, Problem> {
        let tenant =
            tenant.parse().map_err(|e| Problem::invalid("can't use the name of a tenant", e))?;
        Ok(Self::In(tenant, DataPath::parse(path)?))
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Top => f.write_str("/"),
            Self::In(tenant, path) if path.is_root() => write!(f, "/{tenant}"),
            Self::In(tenant, path) => write!(f, "/{tenant}/{path}"),
        }
    }
}
