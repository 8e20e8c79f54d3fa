//! Options of `perigee volume serve` about other hosts.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use perigee_http::Network;
use perigee_volume::{RemoteOptions, RemoteTlsFiles};

use crate::arguments::size;

/// Waits, rates and certificates towards other hosts.
#[derive(Debug, Args)]
pub struct RemoteFlags {
    /// How long a read waits for another host that does not answer
    #[arg(long, value_name = "SECONDS", default_value_t = RemoteOptions::default().patience.as_secs())]
    remote_patience: u64,
    /// How long a request of a VM waits for the home of its volume that does not answer, before the VM is paused
    #[arg(long, value_name = "SECONDS", default_value_t = RemoteOptions::default().home_patience.as_secs())]
    home_patience: u64,
    /// Fetch at most this much per second for copies in the background
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "100MiB")]
    fill_rate: u64,
    /// Keep at most this much of other hosts' volumes in memory
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "512MiB")]
    read_cache: u64,
    /// Connect to other hosts over TLS only, and require certificates of this authority, a PEM file
    #[arg(long, value_name = "FILE")]
    remote_tls_ca: Option<PathBuf>,
    /// The certificate that this host shows to others, a PEM file
    #[arg(long, value_name = "FILE", requires_all = ["remote_tls_ca", "remote_tls_key"])]
    remote_tls_cert: Option<PathBuf>,
    /// That certificate's key, a PEM file
    #[arg(long, value_name = "FILE", requires = "remote_tls_cert")]
    remote_tls_key: Option<PathBuf>,
}

impl RemoteFlags {
    /// The same as the volume server takes it. Sizes are in bytes, a second where they are rates.
    pub fn options(self, network: Network) -> RemoteOptions {
        let flags = self;
        let own = flags.remote_tls_cert.zip(flags.remote_tls_key);
        RemoteOptions {
            network,
            tls: flags.remote_tls_ca.map(|ca| RemoteTlsFiles { ca, own }),
            patience: Duration::from_secs(flags.remote_patience),
            home_patience: Duration::from_secs(flags.home_patience),
            fill_bytes_per_s: flags.fill_rate,
            cache_bytes: flags.read_cache,
        }
    }
}
