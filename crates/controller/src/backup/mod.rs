//! A backup of the controller: one tar file with what only the controller knows. It is made while the controller runs.
//!
//! | entry | |
//! |---|---|
//! | `backup.json` | [`Header`] |
//! | `state.db` | the store at one moment |
//! | `jobs/` | the logs and samples of jobs, each at least as long as the store's copy says |
//! | `authority/`, `audit/`, `sftp-host-key` | the files as they are |
//! | `data/` | contents of users' files that are on this disk, if they were asked for |
//! | `entries.json` | each file, directory and name ([`Listed`]), with the SHA-256 of each file. A name is a file whose content is in the S3 store |
//! | `entries.sha256` | the SHA-256 of `entries.json` |
//!
//! The store comes first, so nothing that the store names is newer than the backup's copy of it. The last entry shows that the backup is whole. The file gets
//! its name when all of it is on the disk, so a backup that was cut off has no name.

mod made;
mod restore;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use made::{Made, make};
pub use restore::{Restored, restore};

/// The version of the format, which is the only one so far.
const FORMAT: u32 = 1;

const HEADER: &str = "backup.json";
const ENTRIES: &str = "entries.json";
const ENTRIES_SHA256: &str = "entries.sha256";

/// What the state directory has beside the store and the files of jobs. Its lock is not among it.
const PARTS: [&str; 4] = ["authority", "audit", "sftp-host-key", "data"];

/// The first entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Header {
    format: u32,
    /// Unix time.
    made_ms: u64,
    /// The authority's fingerprint, by which people know the cluster.
    cluster: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Directory,
    File,
    /// A file of the repository whose content is in the S3 store.
    Name,
}

/// A file, directory or name of the backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Listed {
    /// Below the state directory.
    path: String,
    kind: Kind,
    length: u64,
    /// Empty unless it is a file.
    sha256: String,
    /// When its content was last changed; Unix time.
    modified_ms: u64,
    /// Its extended attributes of users, each value in base64.
    attributes: BTreeMap<String, String>,
}
