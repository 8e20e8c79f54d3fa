//! How a volume server reaches other hosts: for volumes that it proxies, for what its layers stand
//! on, and to measure them.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use perigee_block::device::Device;
use perigee_http::{Client, Expected, Identity, Listen, Network};
use perigee_model::Problem;
use perigee_model::grant::SignedGrant;
use perigee_model::home::ServerAddresses;
use perigee_model::read_ahead::{FILL_BYTES_PER_S, READ_CACHE_BYTES};
use perigee_nbd::{ClientTls, NbdDevice, RemoteExport, RemoteTlsFiles};
use perigee_store::Connector;

/// What the server's options say.
#[derive(Debug, Clone)]
pub struct RemoteOptions {
    /// How it talks with the controller and the other hosts.
    pub network: Network,
    /// Certificates for NBD to other hosts, instead of the network's. If neither has any, NBD is not encrypted.
    pub tls: Option<RemoteTlsFiles>,
    /// How long a read of a layer waits for a host that is away.
    pub patience: Duration,
    /// How long a request of a VM waits for the home of its volume, before the VM is stopped.
    pub home_patience: Duration,
    /// The highest rate at which copies are completed in the background.
    pub fill_bytes_per_s: u64,
    /// How much memory may be used for blocks of proxied volumes.
    pub cache_bytes: u64,
}

impl Default for RemoteOptions {
    fn default() -> Self {
        let (patience, fill_bytes_per_s) = (Duration::from_secs(60), FILL_BYTES_PER_S);
        let (network, tls, cache_bytes) = (Network::Plain, None, READ_CACHE_BYTES);
        let home_patience = perigee_nbd::PATIENCE_DEFAULT;
        Self { network, tls, patience, home_patience, fill_bytes_per_s, cache_bytes }
    }
}

/// How other hosts' exports are opened.
#[derive(Clone)]
pub struct Remotes {
    network: Network,
    tls: Option<ClientTls>,
    patience: Duration,
    home_patience: Duration,
    pub cache_bytes: u64,
}

impl Remotes {
    /// # Errors
    /// When a file for TLS can't be used.
    pub fn load(options: &RemoteOptions) -> Result<Self, Problem> {
        let tls = match (&options.tls, options.network.identity()) {
            (Some(files), _) => Some(ClientTls::load(files)?),
            (None, identity) => identity.cloned().map(ClientTls::from),
        };
        let (network, patience) = (options.network.clone(), options.patience);
        let (home_patience, cache_bytes) = (options.home_patience, options.cache_bytes);
        Ok(Self { network, tls, patience, home_patience, cache_bytes })
    }

    /// This host's identity, if it has one.
    pub fn identity(&self) -> Option<&Arc<Identity>> {
        self.network.identity()
    }

    /// A client of another host's volume server, to which it shows the grant.
    ///
    /// # Errors
    /// `Invalid` when the address can't be used.
    pub fn client(
        &self,
        address: &ServerAddresses,
        grant: Option<&SignedGrant>,
        answer_max: Duration,
    ) -> Result<Client, Problem> {
        let client = self.network.client(&address.control_url, Expected::Address, answer_max)?;
        Ok(client
            .granted(grant)
            .hint("does that host's volume server run, and is this its address?"))
    }

    /// An export at `HOST:PORT`.
    pub fn export(&self, nbd_addr: String, name: impl Into<String>) -> RemoteExport {
        let remote = RemoteExport::new(Listen::Tcp(nbd_addr), name);
        RemoteExport { tls: self.tls.clone(), ..remote }
    }

    /// An export of a volume's home for a VM. A home is lost when it is silent for half of the time that a request waits.
    pub fn export_of_home(&self, nbd_addr: String, name: impl Into<String>) -> RemoteExport {
        let remote = self.export(nbd_addr, name);
        let silence_max = remote.silence_max.min(self.home_patience / 2);
        RemoteExport { patience: self.home_patience, silence_max, ..remote }
    }

    /// How the pool's layers reach what they stand on.
    pub fn connector(&self) -> Connector {
        let remotes = self.clone();
        let connect = move |nbd_addr, export: String| {
            let mut remote = remotes.export(nbd_addr, export);
            remote.patience = remotes.patience;
            async move {
                let device = NbdDevice::open(remote).await?;
                Ok(Arc::new(device) as Arc<dyn Device>)
            }
            .boxed()
        };
        Connector { patience: self.patience, connect: Arc::new(connect) }
    }
}
