//! Who uses the repository. The cluster's users are kept elsewhere; the doors ask through [`Accounts`].

use std::future::Future;
use std::pin::Pin;

use perigee_model::TenantName;

/// How much a tenant may keep. Unfinished uploads count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// The sum of the files' lengths.
    pub bytes: u64,
    /// Files and directories.
    pub files: u64,
}

impl Default for Quota {
    /// As many bytes as the disk has. A million files: an answer about all of them stays possible.
    fn default() -> Self {
        Self { bytes: u64::MAX, files: 1_000_000 }
    }
}

/// A user of the repository, and what the user may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// Whose files are the user's own.
    pub tenant: TenantName,
    /// The user's name, for logs.
    pub user: String,
    /// Whether the user may change the tenant's files.
    pub may_write: bool,
    /// Whether the user may read and change the files of every tenant.
    pub is_admin: bool,
    /// How much the tenant may keep.
    pub quota: Quota,
}

/// The answer to a question about an account: `None` if nobody has this secret or key.
pub type Found<'a> = Pin<Box<dyn Future<Output = Option<Account>> + Send + 'a>>;

/// The users whom the doors let in.
pub trait Accounts: Send + Sync {
    /// Whose token this is.
    fn by_token<'a>(&'a self, secret: &'a str) -> Found<'a>;

    /// Whose SSH key this is, in the form `ssh-ed25519 AAAA…`. If several users have it, the one whose `TENANT/USER` the
    /// client has given as its login.
    fn by_key<'a>(&'a self, key: &'a str, login: &'a str) -> Found<'a>;
}
