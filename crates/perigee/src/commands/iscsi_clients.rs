//! Options of `perigee volume serve` about iSCSI initiators.

use std::path::PathBuf;

use clap::Args;
use perigee_volume::IscsiOptions;

/// The target and its initiators.
#[derive(Debug, Args)]
pub struct IscsiClientOptions {
    /// Address for iSCSI initiators, `HOST:PORT`; may be given more than once. Each volume is the
    /// target iqn.2026-11.org.perigee:VOLUME, unit 0
    #[arg(long, value_name = "ADDRESS")]
    iscsi: Vec<String>,
    /// The file that says which initiators may use which volumes, and their CHAP secrets. Each line is INITIATOR
    /// VOLUME... [chap=USER:SECRET [mutual=USER:SECRET]]. Without the file, and in a pool that never had a client, every
    /// initiator may use every volume
    #[arg(long, value_name = "FILE", requires = "iscsi")]
    iscsi_clients: Option<PathBuf>,
}

impl IscsiClientOptions {
    /// Whether there is an iSCSI target at all.
    pub fn listens(&self) -> bool {
        !self.iscsi.is_empty()
    }
}

impl From<IscsiClientOptions> for IscsiOptions {
    fn from(options: IscsiClientOptions) -> Self {
        Self { listen: options.iscsi, clients: options.iscsi_clients }
    }
}
