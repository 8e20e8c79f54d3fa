//! Encrypted connections to other hosts.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use perigee_block::stream::socket::Socket;
use perigee_http::{Expected, Identity};
use perigee_model::Problem;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::ServerName;

use super::super::of_files::OfFiles;
use super::super::pem;

/// The PEM files of a client that speaks TLS.
#[derive(Debug, Clone)]
pub struct RemoteTlsFiles {
    /// Certificates of the authorities of other hosts.
    pub ca: PathBuf,
    /// This host's own certificate and its key, for servers that require one.
    pub own: Option<(PathBuf, PathBuf)>,
}

/// Connections to other hosts use only TLS. Unix sockets are not encrypted.
#[derive(Clone)]
pub struct ClientTls(How);

#[derive(Clone)]
enum How {
    Files(OfFiles<TlsConnector>),
    /// The other side has to be a host of the cluster.
    Cluster(Arc<Identity>),
}

impl From<Arc<Identity>> for ClientTls {
    fn from(identity: Arc<Identity>) -> Self {
        Self(How::Cluster(identity))
    }
}

impl ClientTls {
    /// The files are read again when they have changed.
    ///
    /// # Errors
    /// When a file can't be read, or certificate and key do not belong together.
    pub fn load(files: &RemoteTlsFiles) -> Result<Self, Problem> {
        let own = files.own.iter().flat_map(|(cert, key)| [cert, key]);
        let paths = [&files.ca].into_iter().chain(own).cloned().collect();
        let files = files.clone();
        OfFiles::load(paths, move || Self::connector(&files)).map(|files| Self(How::Files(files)))
    }

    fn connector(files: &RemoteTlsFiles) -> Result<TlsConnector, Problem> {
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|e| Problem::internal("can't set up TLS", e))?
            .with_root_certificates(pem::roots(&files.ca)?);
        let config = match &files.own {
            None => builder.with_no_client_auth(),
            Some((cert, key)) => {
                let chain = pem::certificates(cert)?;
                builder
                    .with_client_auth_cert(chain.clone(), pem::key(key)?)
                    .map_err(|e| pem::unusable(cert, key, &chain, &e))?
            }
        };
        Ok(TlsConnector::from(Arc::new(config)))
    }

    /// The server's certificate has to be for the host in `HOST:PORT`.
    pub async fn connect(&self, address: &str, socket: Socket) -> io::Result<TlsStream<Socket>> {
        let connector = match &self.0 {
            How::Files(files) => files.get().await,
            How::Cluster(identity) => {
                return identity.connect(address, Expected::Address, socket).await;
            }
        };
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        connector.connect(name, socket).await
    }
}
