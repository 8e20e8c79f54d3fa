//! Encrypted connections: what `STARTTLS` leads to.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use perigee_block::stream::socket::Socket;
use perigee_http::{Certified, Identity, PeerIdentity};
use perigee_model::{HostId, Problem};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::server::TlsStream;

use super::super::of_files::OfFiles;
use super::super::pem;
use super::common_name;

/// With which certificates a server speaks TLS.
#[derive(Debug, Clone)]
pub enum ServerTls {
    /// From files.
    Files(TlsFiles),
    /// The cluster's: each client over TCP has to be a host of it.
    Cluster(Arc<Identity>),
}

/// The PEM files of a server that speaks TLS.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// The server's certificate, and the intermediate certificates up to its authority.
    pub cert: PathBuf,
    pub key: PathBuf,
    /// If this is set, every client needs a certificate of this authority.
    pub ca: Option<PathBuf>,
    /// Whether clients over TCP must use TLS. A unix socket is protected by its directory's permissions.
    pub required: bool,
}

/// With which certificate the server answers, and whether clients over TCP need TLS.
pub struct Tls {
    how: How,
    pub required: bool,
}

enum How {
    Files(OfFiles<TlsAcceptor>),
    Cluster(Arc<Identity>),
}

/// A client that has shown a certificate of the cluster.
pub struct Shown(Arc<Identity>, Certified);

impl Shown {
    /// The host whose certificate it is; `None` for the controller's and an operator's.
    pub fn host(&self) -> Option<HostId> {
        match &self.1.identity {
            PeerIdentity::Host(host) => Some(host.clone()),
            PeerIdentity::Controller | PeerIdentity::Operator => None,
        }
    }

    /// Returns when the cluster has revoked the certificate, and otherwise never.
    pub async fn until_revoked(&self) {
        self.0.until_revoked(&self.1).await;
    }
}

impl Tls {
    /// # Errors
    /// When a file can't be read, or certificate and key do not belong together.
    pub fn load(tls: &ServerTls) -> Result<Self, Problem> {
        match tls {
            ServerTls::Files(files) => Self::of_files(files),
            ServerTls::Cluster(identity) => {
                Ok(Self { how: How::Cluster(Arc::clone(identity)), required: true })
            }
        }
    }

    /// The files are read again when they have changed.
    fn of_files(files: &TlsFiles) -> Result<Self, Problem> {
        let (paths, required) =
            ([&files.cert, &files.key].into_iter().chain(&files.ca), files.required);
        let (paths, files) = (paths.cloned().collect(), files.clone());
        let how = OfFiles::load(paths, move || Self::acceptor(&files)).map(How::Files)?;
        Ok(Self { how, required })
    }

    fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, Problem> {
        let chain = pem::certificates(&files.cert)?;
        let key = pem::key(&files.key)?;
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|e| Problem::internal("can't set up TLS", e))?;
        let builder = match &files.ca {
            None => builder.with_no_client_auth(),
            Some(ca) => {
                let roots = Arc::new(pem::roots(ca)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider)
                    .build()
                    .map_err(|e| pem::wrong(ca, e))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let config = builder
            .with_single_cert(chain.clone(), key)
            .map_err(|e| pem::unusable(&files.cert, &files.key, &chain, &e))?;
        Ok(TlsAcceptor::from(Arc::new(config)))
    }

    /// # Errors
    /// When the client's certificate does not count, or it shows none where one is needed.
    pub async fn accept(&self, socket: Socket) -> io::Result<(TlsStream<Socket>, Option<Shown>)> {
        match &self.how {
            How::Files(files) => Ok((files.get().await.accept(socket).await?, None)),
            How::Cluster(identity) => {
                let (stream, certified) = identity.accept_host(socket).await?;
                Ok((stream, Some(Shown(Arc::clone(identity), certified))))
            }
        }
    }
}

/// The common name of the certificate that the client showed, which was verified.
pub fn common_name<S>(stream: &TlsStream<S>) -> Option<String> {
    common_name::of(stream.get_ref().1.peer_certificates()?.first()?)
}
