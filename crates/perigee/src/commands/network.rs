//! How a daemon of a host talks with the other hosts.

use std::path::{Path, PathBuf};

use clap::Args;
use perigee_http::{Identity, Network};
use perigee_model::Problem;

/// Where a host keeps its certificate and key.
pub const IDENTITY_DIR: &str = "/etc/perigee/identity";

/// Certificates, or the explicit consent to do without.
#[derive(Debug, Args)]
pub struct NetworkFlags {
    /// This host's certificate, as `perigee host join` has put it there [default: /etc/perigee/identity]
    #[arg(long, value_name = "DIR")]
    identity: Option<PathBuf>,
    /// Allow what is not encrypted: whoever reaches a port of this daemon can do everything. With --identity, only a volume
    /// server's iSCSI is not encrypted
    #[arg(long)]
    pub insecure: bool,
}

impl NetworkFlags {
    /// # Errors
    /// `Invalid` when this host has no certificate, and did not say that it needs none.
    pub fn network(&self) -> Result<Network, Problem> {
        if self.insecure && self.identity.is_none() {
            warn_insecure();
            return Ok(Network::Plain);
        }
        let dir = self.identity.as_deref().unwrap_or(Path::new(IDENTITY_DIR));
        Identity::load(dir).map(Network::Tls).map_err(|problem| {
            let next = format!("{}; or, on a network that you trust: --insecure", problem.next);
            problem.next(next)
        })
    }

    /// For a server that may also be used by this machine alone, which needs no certificate.
    ///
    /// # Errors
    /// As [`NetworkFlags::network`], if it listens on TCP.
    pub fn network_if(&self, listens_on_tcp: bool) -> Result<Network, Problem> {
        let needed = listens_on_tcp || self.insecure || self.identity.is_some();
        if needed { self.network() } else { Ok(Network::Plain) }
    }
}

/// Says at each start what `--insecure` means.
pub fn warn_insecure() {
    tracing::warn!(
        "--insecure: nothing is encrypted unless it has certificates of its own, and whoever reaches a port of this daemon can do everything"
    );
}
