//! Exports, which the protocols serve, and their names.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use perigee_model::Problem;
use perigee_model::client::Over;

use crate::lease::HostTag;
use crate::logins::LoginGuard;
use crate::stats::Counters;
use crate::switch::Switch;

/// The prefix of a sealed layer's export name; the layer's UUID follows.
pub const LAYER_PREFIX: &str = "layer:";
/// The prefix of a volume's incarnation in an export's description.
pub const INCARNATION_PREFIX: &str = "incarnation:";
/// The suffix that turns the name of a sealed layer's export into that of its checksums. A client that may
/// see the layer may also see the checksums.
pub const CHECKSUMS_SUFFIX: &str = "@sums";
/// The suffix that turns the name of a sealed layer's export into that of what the layer itself has, without the
/// layers below it.
pub const OWN_SUFFIX: &str = "@own";

/// An opened export, for one connection.
pub struct Export {
    /// What the requests of the connection go to. It may be changed while the export is open.
    pub device: Arc<Switch>,
    /// Whether writes are refused (NBD_FLAG_READ_ONLY): so for sealed layers and their checksums, and where
    /// the home says so.
    pub read_only: bool,
    /// The counters of its requests.
    pub counters: Arc<Counters>,
}

/// The kind of client that opens an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opener {
    /// A VM or a person, over NBD or iSCSI. It gets the volumes of other hosts too, through a proxy.
    Client,
    /// Another host's server on behalf of its client. It gets only volumes of this pool, because proxying
    /// them again could form a cycle.
    Proxy(HostTag),
}

/// Finds exports by name.
pub trait Exports: Send + Sync + 'static {
    /// The names of the exports for a client that asks for a list (NBD_OPT_LIST, iSCSI SendTargets).
    ///
    /// # Errors
    /// The reason why the list can't be read now.
    fn names(&self) -> BoxFuture<'_, Result<Vec<String>, Problem>>;

    /// # Errors
    /// `NotFound` when the export does not exist; any other problem is the reason why it can't be opened now.
    fn open<'a>(&'a self, name: &'a str, opener: Opener) -> BoxFuture<'a, Result<Export, Problem>>;

    /// Where a volume is that a proxy looks for here and that has another home now: `HOST:PORT`.
    fn moved_to<'a>(&'a self, _name: &'a str) -> BoxFuture<'a, Option<String>> {
        Box::pin(async { None })
    }

    /// Records that a client uses an export, until the guard is dropped.
    fn log_in(&self, _name: &str, _over: Over, _peer: &str) -> Option<LoginGuard> {
        None
    }
}
