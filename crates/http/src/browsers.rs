//! A certificate of the operator's own, for browsers: they know its issuer already, and not the cluster's authority.
//!
//! A browser that calls the server by a name of this certificate gets it. Our own programs trust the cluster's authority and nothing
//! else, so they get the cluster's certificate, by whatever name they call. A browser offers protocols in the handshake (ALPN), and our
//! programs offer none.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use perigee_model::Problem;
use tokio_rustls::rustls::Error;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;
use webpki::EndEntityCert;

use crate::certificate::certificates;
use crate::files::{self, read_private};

/// A certificate of the operator's own with its key, in two files.
#[derive(Debug)]
pub struct BrowserCertificate {
    certificate: PathBuf,
    key: PathBuf,
    loaded: RwLock<Arc<CertifiedKey>>,
}

impl BrowserCertificate {
    /// That of these files.
    ///
    /// # Errors
    /// `Invalid`, and what is wrong with which file.
    pub fn load(certificate: PathBuf, key: PathBuf) -> Result<Arc<Self>, Problem> {
        let loaded = RwLock::new(Arc::new(pair(&certificate, &key)?));
        Ok(Arc::new(Self { certificate, key, loaded }))
    }

    /// Reads the files again, for connections that begin later.
    ///
    /// # Errors
    /// As [`Self::load`]. Then the former one stays.
    pub fn read_again(&self) -> Result<(), Problem> {
        let read = Arc::new(pair(&self.certificate, &self.key)?);
        *self.loaded.write().unwrap_or_else(PoisonError::into_inner) = read;
        Ok(())
    }

    /// It, if the server is called so.
    fn named(&self, name: &str) -> Option<Arc<CertifiedKey>> {
        let loaded = Arc::clone(&self.loaded.read().unwrap_or_else(PoisonError::into_inner));
        let name = ServerName::try_from(name).ok()?;
        let certificate = EndEntityCert::try_from(loaded.cert.first()?).ok()?;
        let is_named = certificate.verify_is_valid_for_subject_name(&name).is_ok();
        is_named.then_some(loaded)
    }
}

/// The one that a server has besides its own, once it has one.
pub(crate) type Besides = Arc<OnceLock<Arc<BrowserCertificate>>>;

/// Chooses what a client is shown.
#[derive(Debug)]
pub(crate) struct Choice {
    pub own: Arc<CertifiedKey>,
    pub besides: Besides,
}

impl ResolvesServerCert for Choice {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let is_browser = hello.alpn().is_some();
        let besides = self.besides.get().filter(|_| is_browser);
        let named = besides.zip(hello.server_name()).and_then(|(one, name)| one.named(name));
        named.or_else(|| Some(Arc::clone(&self.own)))
    }
}

fn pair(certificate: &Path, key: &Path) -> Result<CertifiedKey, Problem> {
    let unusable = |file: &Path, why: &dyn std::fmt::Display| {
        Problem::invalid(format!("can't use {} for browsers", file.display()), why)
    };
    let pem = files::read(certificate)?;
    let chain = certificates(&pem).map_err(|why| unusable(certificate, &why))?;
    let first = EndEntityCert::try_from(&chain[0]).map_err(|e| unusable(certificate, &e))?;
    if first.valid_dns_names().next().is_none() {
        let why = "its first certificate has no DNS name (subjectAltName), and browsers say a name only when they ask for one";
        return Err(unusable(certificate, &why)
            .next("put the server's own certificate first, then those between it and its issuer"));
    }
    let private = PrivateKeyDer::from_pem_slice(&read_private(key)?)
        .map_err(|e| unusable(key, &format!("there is no private key in it: {e}")))?;
    let loaded = CertifiedKey::from_der(chain, private, &ring::default_provider());
    loaded.map_err(|error| match error {
        Error::InconsistentKeys(_) => {
            let why =
                format!("it is not the key of the first certificate in {}", certificate.display());
            unusable(key, &why)
        }
        error => unusable(key, &error),
    })
}
