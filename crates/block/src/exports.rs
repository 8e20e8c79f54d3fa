//! What the protocols serve: exports, found by name.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use perigee_model::Problem;
use perigee_model::client::Over;

use crate::logins::LoginGuard;
use crate::stats::Counters;
use crate::switch::Switch;

/// The name of an export that is a sealed layer, before the layer's UUID.
pub const LAYER_PREFIX: &str = "layer:";
/// Before a volume's incarnation, where an export is described.
pub const INCARNATION_PREFIX: &str = "incarnation:";
/// After the name of a sealed layer's export: its checksums. Who may see the one may see the other.
pub const CHECKSUMS_SUFFIX: &str = "@sums";

/// What one connection works on.
pub struct Export {
    pub device: Arc<Switch>,
    pub read_only: bool,
    /// Where its requests are counted.
    pub counters: Arc<Counters>,
}

/// Who wants to open an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opener {
    Client,
    /// Another host's server on behalf of its client. It gets only what is here: proxying once
    /// more could go round in a circle.
    Proxy,
}

/// Finds exports by name.
pub trait Exports: Send + Sync + 'static {
    fn names(&self) -> BoxFuture<'_, Result<Vec<String>, Problem>>;

    /// # Errors
    /// `NotFound` when there is no such export; anything else is why it can't be opened now.
    fn open<'a>(&'a self, name: &'a str, opener: Opener) -> BoxFuture<'a, Result<Export, Problem>>;

    /// A client has begun to use an export.
    fn log_in(&self, _name: &str, _over: Over, _peer: &str) -> Option<LoginGuard> {
        None
    }
}
