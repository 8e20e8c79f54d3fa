//! Exports, which the protocols serve, and their names.

use std::net::IpAddr;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use perigee_model::client::Over;
use perigee_model::{Epoch, HostId, Problem};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

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
/// The suffix that turns the name of a sealed layer's export into that of the checksums of all that the layer shows. They
/// are computed when they are asked for.
pub const VISIBLE_CHECKSUMS_SUFFIX: &str = "@visible@sums";
/// The suffix that turns the name of a sealed layer's export into that of what the layer itself has, without the
/// layers below it.
pub const OWN_SUFFIX: &str = "@own";
/// At the end of an export's name: the ids of the sealed layers below a volume's head, 16 bytes each, topmost first.
pub const LAYERS_SUFFIX: &str = "@layers";
/// In an export's name between a volume and a layer: what the volume has above the layer.
pub const SINCE_INFIX: &str = "@since:";

/// This suffix of an export's description says that the export's data may not leave its site.
pub const CONFINED_SUFFIX: &str = " held";

/// What a volume's home says to another host's server about a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionHome {
    /// The volume server that has the volume.
    pub server: Uuid,
    /// Which boot of its host this is: what was not flushed is lost with it. Empty: not known.
    pub boot: String,
    /// The writer epoch of the session.
    pub epoch: Epoch,
}

/// Longest id of a boot.
const BOOT_BYTES_MAX: usize = 64;

impl SessionHome {
    /// As it is sent: `SERVER EPOCH BOOT`.
    pub fn told(&self) -> String {
        let boot = &self.boot[..self.boot.floor_char_boundary(BOOT_BYTES_MAX)];
        format!("{} {} {boot}", self.server, self.epoch)
    }

    /// `None` if it is something else.
    pub fn parse(told: &str) -> Option<Self> {
        let mut parts = told.splitn(3, ' ');
        let server = parts.next()?.parse().ok()?;
        let epoch = Epoch(parts.next()?.parse().ok()?);
        let boot = parts.next().filter(|boot| boot.len() <= BOOT_BYTES_MAX)?;
        Some(Self { server, boot: boot.to_owned(), epoch })
    }

    /// Whether the server's host has booted anew since. A volume that has moved to another server is
    /// durable there.
    pub fn was_rebooted_to(&self, now: &Self) -> bool {
        let known = !self.boot.is_empty() && !now.boot.is_empty();
        known && self.server == now.server && self.boot != now.boot
    }
}

/// An opened export, for one connection.
pub struct Export {
    /// What the requests of the connection go to. It may be changed while the export is open.
    pub device: Arc<Switch>,
    /// Whether writes are refused (NBD_FLAG_READ_ONLY): so for sealed layers and their checksums, and where
    /// the home says so.
    pub read_only: bool,
    /// The counters of its requests.
    pub counters: Arc<Counters>,
    /// Where the volume is, if it is one.
    pub home: Option<SessionHome>,
    /// Its data may not leave its site. A copy of it is confined too, where the copy is.
    pub confined: bool,
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

/// How a client is connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its address; `None` for a unix socket of this host.
    pub address: Option<IpAddr>,
    /// Whether what it gets is encrypted.
    pub encrypted: bool,
    /// A process of this host that runs as the server's own user or as root. Only such a one may join whoever
    /// writes a volume.
    pub is_own: bool,
    /// Whether the protocol knows who it is: by its user, by its certificate, or as an initiator that the target let in.
    pub is_authenticated: bool,
}

impl Peer {
    /// A client of the server's own user on a unix socket of this host.
    pub const LOCAL: Self =
        Self { address: None, encrypted: false, is_own: true, is_authenticated: true };
}

/// What lets another host open a volume. Its sessions end with it.
#[derive(Debug, Default)]
pub struct Admission(CancellationToken);

impl Admission {
    /// The host may open the volume no more.
    pub fn end(&self) {
        self.0.cancel();
    }

    /// Waits for that.
    pub async fn ended(&self) {
        self.0.cancelled().await;
    }
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
    fn open<'a>(
        &'a self,
        name: &'a str,
        opener: Opener,
        peer: Peer,
    ) -> BoxFuture<'a, Result<Export, Problem>>;

    /// Whether another host of the cluster, known by its certificate, may have this export. `None`: it always may.
    ///
    /// # Errors
    /// `Forbidden` if it may not; the reason why that can't be looked up.
    fn admits<'a>(
        &'a self,
        _name: &'a str,
        _host: &'a HostId,
    ) -> BoxFuture<'a, Result<Option<Arc<Admission>>, Problem>> {
        Box::pin(async { Ok(None) })
    }

    /// Other names of the same sealed data: those of the images that a layer is. Who may see one of them may see it.
    ///
    /// # Errors
    /// The reason why they can't be looked up.
    fn also_named<'a>(&'a self, _name: &'a str) -> BoxFuture<'a, Result<Vec<String>, Problem>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    /// Where a volume is that a proxy looks for here and that has another home now: `HOST:PORT`.
    fn moved_to<'a>(&'a self, _name: &'a str) -> BoxFuture<'a, Option<String>> {
        Box::pin(async { None })
    }

    /// Whether the volume here is another one than that of the writer epoch in the name. Then nobody opens this name
    /// here any more.
    fn is_replaced<'a>(&'a self, _name: &'a str) -> BoxFuture<'a, bool> {
        Box::pin(async { false })
    }

    /// Records that a client uses an export, until the guard is dropped.
    fn log_in(&self, _name: &str, _over: Over, _peer: &str) -> Option<LoginGuard> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_a_volume_is_arrives_as_it_was_told() {
        for boot in ["", "0b5d9e0c-6b0e-4d4c-9f8e-3c7d2f1a5b60", "a lab's 7"] {
            let home = SessionHome {
                server: Uuid::from_u128(7),
                boot: boot.to_owned(),
                epoch: Epoch(1 << 40 | 3),
            };
            assert_eq!(SessionHome::parse(&home.told()), Some(home));
        }
        for bad in ["", "x 1 a", "00000000-0000-0000-0000-000000000007 1"] {
            assert_eq!(SessionHome::parse(bad), None, "{bad:?}");
        }
    }
}
