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
//!
//! | question | file |
//! |---|---|
//! | How is a file of the repository written, and what survives a crash? | `upload.rs` |
//! | How do contents of files get into an S3 store, and when are they deleted there? | `objects.rs`, `Part::send_all` in `upload.rs` |
//! | What becomes of an upload that was cut? | `upload.rs`, `drop_cut` and `cut_uploads` in `view.rs` |
//! | What can be named in the repository, and what keeps a path in its tenant's tree? | `path.rs`, `beneath.rs` |
//! | Who may read and change which files? | `view.rs` |
//! | What does each request to the repository do? | `http.rs`, `http/parallel.rs`; WebDAV: `dav.rs`; SFTP: `sftp/session.rs` |
//! | What do the libraries of WebDAV and SFTP never see? | `dav/headers.rs`, `sftp/serve.rs` |
//! | What does an SFTP session see of a file before it is closed? | `sftp/written.rs` |
//! | Who may log in over SFTP, and how long may that take? | `sftp.rs` |

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
mod sums;
#[cfg(test)]
mod tests;
mod transfer;
mod upload;
mod usage;
mod view;

pub use account::{Account, Accounts, Credential, Quota};
pub use objects::{Address, NotDone, OBJECT as OBJECT_ATTRIBUTE, Objects, Waits};
pub use path::{DataPath, Location};
pub use repository::Repository;
pub use transfer::{Reading, Writing};
pub use upload::Begin;
pub use view::View;

pub use http::router;
