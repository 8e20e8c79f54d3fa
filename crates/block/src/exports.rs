//! What the protocols serve: exports, found by name.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use perigee_model::Problem;
use perigee_model::client::Over;

use crate::device::Device;
use crate::logins::LoginGuard;
use crate::stats::Counters;

/// The export of a sealed layer has this name, followed by the layer's UUID.
pub const LAYER_PREFIX: &str = "layer:";
/// The checksums of a sealed layer have the name of the layer's export, followed by this. A client that may read the layer
/// may read them too.
pub const SUMS_SUFFIX: &str = "@sums";

/// What one connection works on.
pub struct Export {
    /// What is read and written.
    pub device: Arc<dyn Device>,
    /// Writes are refused.
    pub read_only: bool,
    /// Where its requests are counted.
    pub counters: Arc<Counters>,
}

/// What kind of client opens an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opener {
    /// A client of this server: a VM of its host, or a program.
    Client,
    /// The server of another host, for a client there. It gets only what is on this host: if it were sent on to a third
    /// host, requests could go round in a circle.
    Proxy,
}

/// Finds exports by name.
pub trait Exports: Send + Sync + 'static {
    /// The names of all exports that a client may be shown.
    fn names(&self) -> BoxFuture<'_, Result<Vec<String>, Problem>>;

    /// # Errors
    /// `NotFound` when there is no such export; anything else is why it can't be opened now.
    fn open<'a>(&'a self, name: &'a str, opener: Opener) -> BoxFuture<'a, Result<Export, Problem>>;

    /// A client has begun to use an export.
    fn log_in(&self, _name: &str, _over: Over, _peer: &str) -> Option<LoginGuard> {
        None
    }
}
