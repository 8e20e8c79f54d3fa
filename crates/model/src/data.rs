//! The repository of files: `repo://TENANT/PATH`, and what its API says.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::TenantName;
use crate::percent::encoded;

/// What a name in the repository stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// A file. It is complete: a file has its name only when all of it is on the disk.
    File,
    /// A directory.
    Directory,
}

/// A file or a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileEntry {
    /// Its name in its directory.
    pub name: String,
    /// What it is.
    pub kind: FileKind,
    /// A file's length; 0 for a directory.
    pub size_bytes: u64,
    /// When it was last changed, in milliseconds since 1970.
    pub modified_ms: u64,
    /// The SHA-256 of a file's content, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

impl FileEntry {
    /// Whether it is a directory.
    pub fn is_directory(&self) -> bool {
        self.kind == FileKind::Directory
    }
}

/// A part of a directory's content, sorted by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileList {
    /// Files and directories.
    pub entries: Vec<FileEntry>,
    /// If there are more: the name after which they begin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
}

/// Another tenant may read what is below a path.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct FileShare {
    /// The path of a file or a directory, without the tenant's name. Empty: everything.
    pub path: String,
    /// Who may read it.
    pub with: TenantName,
}

/// An upload that is not complete and that nobody continues just now. It has no name in its directory, and counts for the quota.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CutUpload {
    /// The path of the file that it is to be, without the tenant's name.
    pub path: String,
    /// What counts of it for the quota: what has arrived, or of an upload in parts the file's length.
    pub size_bytes: u64,
    /// Until when it can be continued, in milliseconds since 1970. Then it is dropped.
    pub kept_until_ms: u64,
}

/// Begins an upload whose parts may come in any order and at the same time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BeginUpload {
    /// The file's length.
    pub size_bytes: u64,
    /// The SHA-256 of the file's content, in hexadecimal. An unfinished upload of the same content is continued.
    pub sha256: String,
}

/// An upload that is not complete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UploadState {
    /// Names the upload in later requests.
    pub upload: String,
    /// What has arrived: the first byte, and the one after the last, of each part, sorted.
    pub parts: Vec<(u64, u64)>,
}

/// Where files are: `repo://TENANT/PATH`, or a path in the caller's own tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileAddress {
    /// `None`: the tenant of whoever asks.
    pub tenant: Option<TenantName>,
    /// Without a slash at the beginning or the end. Empty: all of the tenant's files.
    pub path: String,
}

/// What the address of a file begins with.
pub const REPOSITORY_SCHEME: &str = "repo://";

/// The header with which a file is stored only if its content has this SHA-256, in 64 hexadecimal digits.
pub const CONTENT_SHA256: &str = "x-content-sha256";

/// Stands for the caller's own tenant in a request.
pub const OWN_TENANT: &str = "~";

impl FileAddress {
    /// The address of a name in this directory.
    #[must_use]
    pub fn join(&self, name: &str) -> Self {
        let path =
            if self.path.is_empty() { name.to_owned() } else { format!("{}/{name}", self.path) };
        Self { tenant: self.tenant.clone(), path }
    }

    /// The path of the controller's API.
    pub fn url(&self) -> String {
        let tenant = self.tenant.as_ref().map_or(OWN_TENANT, TenantName::as_str);
        let mut url = format!("/v1/data/{tenant}");
        for name in self.path.split('/').filter(|name| !name.is_empty()) {
            url.push('/');
            url.extend(encoded(name));
        }
        url
    }
}

impl std::str::FromStr for FileAddress {
    type Err = crate::ids::BadName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (tenant, path) = match text.strip_prefix(REPOSITORY_SCHEME) {
            Some(rest) => {
                let (tenant, path) = rest.split_once('/').unwrap_or((rest, ""));
                (Some(tenant.parse()?), path)
            }
            None => (None, text),
        };
        Ok(Self { tenant, path: path.trim_matches('/').to_owned() })
    }
}

impl std::fmt::Display for FileAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.tenant {
            Some(tenant) => write!(f, "repo://{tenant}/{}", self.path),
            None => f.write_str(&self.path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_names_a_tenant_or_the_callers_own() {
        let full: FileAddress = "repo://physics/in/a b.csv".parse().expect("an address");
        assert_eq!(full.url(), "/v1/data/physics/in/a%20b.csv");
        assert_eq!(full.to_string(), "repo://physics/in/a b.csv");
        let own: FileAddress = "/in/ü?#%".parse().expect("an address");
        assert_eq!(own.url(), "/v1/data/~/in/%C3%BC%3F%23%25");
        assert_eq!("repo://physics".parse::<FileAddress>().expect("all").url(), "/v1/data/physics");
        "repo://UPPER/x".parse::<FileAddress>().expect_err("no name of a tenant");
    }
}
