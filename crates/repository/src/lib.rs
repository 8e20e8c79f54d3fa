//! The data repository: files of tenants, `repo://TENANT/PATH`, in one store with several doors.
//!
//! ```text
//! HTTP (http)   WebDAV (dav)   SFTP (sftp)      each door speaks one protocol, and knows nothing of files
//!        └─────────────┼────────────┘
//!             View (view)         one account's view: which tenants' files it may read and write
//!          Repository, Space      one tenant's files, quota and unfinished uploads
//!       tree/  parts/  shares     a directory of this machine
//! ```
//!
//! Contents may be in an S3 store instead ([`objects`]).
//!
//! A file is whole or not there. Its bytes go into `parts/`, and it gets its name in `tree/` when all of them are on
//! the disk (see [`upload`]). The SHA-256 of its content is an extended attribute of the same inode, so that name,
//! content and hash appear in one rename. A read of a whole file checks it.
//!
//! Nothing outside of a tenant's tree can be named: a path is checked ([`path`]), and the kernel resolves it below the
//! tree and follows no link ([`beneath`]). The tree has only files and directories.

#![warn(missing_docs)]

mod account;
mod beneath;
mod dav;
mod errors;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod http;
mod listing;
mod objects;
mod path;
mod properties;
mod reader;
mod repository;
pub mod sftp;
mod shares;
mod space;
#[cfg(test)]
mod tests;
mod transfer;
mod upload;
mod usage;
mod view;

pub use account::{Account, Accounts, Credential, Quota};
pub use objects::{Address, Objects, Waits};
pub use path::{DataPath, Location};
pub use repository::Repository;
pub use transfer::{Reading, Writing};
pub use upload::Begin;
pub use view::View;

pub use http::router;
