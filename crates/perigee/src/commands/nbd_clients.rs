//! Options of `perigee volume serve` about its NBD clients.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use perigee_volume::{ServerOptions, ServerTls, TlsFiles};

/// TLS, access and limits of NBD clients.
#[derive(Debug, Args)]
pub struct ClientOptions {
    /// The server's certificate for NBD over TLS, a PEM file [default: the certificate of --identity]
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The certificate's key, a PEM file
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Require a certificate of this authority from clients that use TLS, a PEM file
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_ca: Option<PathBuf>,
    /// Whether TCP clients must use TLS. Clients of a unix socket use none: the permissions of its directory protect it
    #[arg(long, value_name = "WHEN", default_value = "required", requires = "tls_cert")]
    tls: TlsWhen,
    /// The file that says which TCP clients see which exports. Each line has an export, and the common names in the
    /// certificates of those who see it
    #[arg(long, value_name = "FILE")]
    access_list: Option<PathBuf>,
    /// Do not list the exports to clients
    #[arg(long)]
    no_list: bool,
    /// Disconnect clients beyond this number
    #[arg(long, value_name = "N", default_value_t = ServerOptions::default().clients_max)]
    max_clients: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TlsWhen {
    Required,
    Optional,
}

impl ClientOptions {
    /// Whether the options name a certificate.
    pub fn has_certificate(&self) -> bool {
        self.tls_cert.is_some()
    }

    /// Whether clients over TCP may go without TLS although there is a certificate.
    pub fn may_be_plain(&self) -> bool {
        self.has_certificate() && self.tls == TlsWhen::Optional
    }
}

impl From<ClientOptions> for ServerOptions {
    fn from(options: ClientOptions) -> Self {
        let ClientOptions { tls_cert, tls_key, tls_ca, tls, .. } = options;
        let required = tls == TlsWhen::Required;
        let files = tls_cert.zip(tls_key);
        Self {
            tls: files
                .map(|(cert, key)| ServerTls::Files(TlsFiles { cert, key, ca: tls_ca, required })),
            access_list: options.access_list,
            listing: !options.no_list,
            clients_max: options.max_clients,
        }
    }
}
