//! How `perigee volume serve` meets other hosts.

use std::time::Duration;

use clap::Args;
use perigee_volume::RemoteOptions;

use crate::commands::volume::size;

#[derive(Debug, Args)]
pub struct RemoteFlags {
    /// How long a read waits for another host that is away
    #[arg(long, value_name = "SECONDS", default_value_t = RemoteOptions::default().patience.as_secs())]
    remote_patience: u64,
    /// Fetch at most so much in a second for copies that are completed in the background
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "100MiB")]
    fill_rate: u64,
}

impl From<RemoteFlags> for RemoteOptions {
    fn from(flags: RemoteFlags) -> Self {
        let RemoteFlags { remote_patience, fill_rate } = flags;
        Self { patience: Duration::from_secs(remote_patience), fill_bytes_per_s: fill_rate }
    }
}
