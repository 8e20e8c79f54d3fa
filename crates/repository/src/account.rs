//! Who uses the repository. The cluster's users are kept elsewhere; the doors ask through [`Accounts`].

use std::net::IpAddr;

use perigee_model::{Problem, TenantName};

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

/// By what a user has logged in. A door keeps it instead of the account, and asks anew with each request, so that a
/// revoked token, a removed key and a changed role count at once. It holds no secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Credential {
    /// A token, by its id.
    Token(String),
    /// An SSH key.
    Key {
        /// In the form `ssh-ed25519 AAAA…`.
        key: String,
        /// The login name, which says whose of those who have the key: anybody can register a public key.
        login: String,
    },
}

/// The users whom the doors let in.
pub trait Accounts: Send + Sync {
    /// What this token is, if it is good now.
    fn by_token(&self, secret: &str) -> Option<Credential>;

    /// Whose credential it is, and what the user may do now; `None` if it does not count any more.
    fn account(&self, credential: &Credential) -> Option<Account>;

    /// A user has asked a door that does not speak HTTP for a change, which was made or refused: for the log of who did
    /// what. Nobody waits for it.
    fn did(&self, account: &Account, what: &str, done: Result<(), &Problem>);

    /// A token or a key from this address did not count. Nobody waits for it.
    fn refused(&self, from: IpAddr, why: &str);
}
