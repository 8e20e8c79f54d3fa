//! What a daemon needs for TLS with the cluster's other daemons: its own certificate and key, the authority's
//! certificate, and the list of certificates that are revoked.
//!
//! In a directory these are `ca.pem`, `identity.pem` (the certificate and its key) and `revoked.json`. All can be
//! replaced while connections are open; new connections use the new ones, and each request of an open one is checked
//! against the new list.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use perigee_model::grant::{Grant, SignedGrant};
use perigee_model::term::{SignedTerm, Term};
use perigee_model::{HostId, Problem};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{
    CertificateError, ClientConfig, Error, OtherError, RootCertStore, ServerConfig,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};
use webpki::EndEntityCert;

use crate::browsers::{Besides, BrowserCertificate, Choice};
use crate::certificate::{
    CA_FILE, CERTIFICATE_LIFE, Certified, Credentials, IDENTITY_FILE, PeerIdentity, certificates,
    fingerprint, now_ms,
};
use crate::files::read_private;
use crate::grants::{self, NoGrant};
use crate::peer::Peer;
use crate::trust::{Refusal, Revoked, Trust};
use crate::verify::{Expected, Roots, Verifier, check_now};

/// The revoked certificates.
pub const REVOKED_FILE: &str = "revoked.json";

/// A host that gets only certificates that do not seem to count keeps its own one up to this age. That leaves another third of its
/// life, in case that the host's clock is behind.
const KEPT_MAX: Duration = Duration::from_secs(CERTIFICATE_LIFE.as_secs() / 3 * 2);

/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// A daemon's identity. Its certificate may be replaced at any time.
pub struct Identity {
    provider: Arc<CryptoProvider>,
    trust: Arc<Trust>,
    strangers: Strangers,
    /// The directory of the files, if it was read from some.
    dir: Option<PathBuf>,
    /// What browsers are shown besides.
    besides: Besides,
    loaded: RwLock<Arc<Loaded>>,
}

/// What belongs together of the credentials.
struct Loaded {
    own: Certified,
    roots: Arc<RootCertStore>,
    authorities: Vec<CertificateDer<'static>>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    acceptor: TlsAcceptor,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Identity").field(&self.own()).finish()
    }
}

/// Whether a server talks to clients without a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strangers {
    /// They can't even connect.
    Refused,
    /// They may connect: the controller lets them enrol.
    Heard,
}

impl Identity {
    /// # Errors
    /// When the certificates or the key can't be used.
    pub fn new(credentials: &Credentials, strangers: Strangers) -> Result<Arc<Self>, Problem> {
        Self::of(credentials, strangers, None)
    }

    fn of(
        credentials: &Credentials,
        strangers: Strangers,
        dir: Option<PathBuf>,
    ) -> Result<Arc<Self>, Problem> {
        let (provider, trust) = (Arc::new(ring::default_provider()), Arc::default());
        let besides = Besides::default();
        let loaded = Loaded::new(credentials, strangers, &provider, &besides);
        let loaded = loaded.map_err(|why| Problem::invalid("can't use the certificates", why))?;
        let loaded = RwLock::new(Arc::new(loaded));
        Ok(Arc::new(Self { provider, trust, strangers, dir, besides, loaded }))
    }

    /// Has browsers see this certificate when they call the server by a name in it. The first one counts.
    pub fn show_besides(&self, certificate: Arc<BrowserCertificate>) {
        let _ = self.besides.set(certificate);
    }

    /// The identity in a directory. [`Identity::follow`] keeps it up to date.
    ///
    /// # Errors
    /// When a file is missing or can't be used.
    pub fn load(dir: &Path) -> Result<Arc<Self>, Problem> {
        let identity = Self::of(&read(dir)?, Strangers::Refused, Some(dir.to_owned()));
        let identity = identity.map_err(|p| of(dir, p.why))?;
        identity.revoke(read_revoked(dir)?);
        Ok(identity)
    }

    /// Where its files are, if it was read from some.
    pub fn dir(&self) -> Option<&Path> {
        self.dir.as_deref()
    }

    /// Reads the files again when they have changed. It does not end.
    pub async fn follow(self: Arc<Self>) {
        let Some(dir) = self.dir.clone() else { return std::future::pending().await };
        // What has changed since `load` is read with the first look.
        let mut seen = [None; 3];
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let now = changed(&dir);
            if now == seen {
                continue;
            }
            let renewed = read(&dir).and_then(|new| self.replace(&new));
            match renewed.and_then(|()| read_revoked(&dir)) {
                Ok(revoked) => {
                    self.revoke(revoked);
                    seen = now;
                    tracing::info!(own = ?self.own(), "the certificates were read again");
                }
                // The one that is in use counts until it expires.
                Err(problem) => tracing::warn!(%problem, "the new certificates are not used"),
            }
        }
    }

    /// # Errors
    /// When the certificates or the key can't be used. Then the former ones stay.
    pub fn replace(&self, new: &Credentials) -> Result<(), Problem> {
        self.set(self.read(new)?);
        Ok(())
    }

    /// As [`Identity::replace`], with a certificate that was just issued. If the clock of its issuer is wrong, nobody may take it.
    /// If the clock of this host is wrong, all others take it. So it is used also if it does not seem to count, before the former
    /// one ends.
    ///
    /// # Errors
    /// Also when the new certificate does not count now, and the former one is less than [`KEPT_MAX`] old.
    pub fn renew(&self, new: &Credentials) -> Result<(), Problem> {
        let loaded = self.read(new)?;
        let counts = check_now(&loaded.chain, &loaded.roots, &self.provider);
        let age_ms = now_ms().abs_diff(self.own().issued_ms);
        if let Err(why) = counts
            && u128::from(age_ms) < KEPT_MAX.as_millis()
        {
            return Err(Problem::invalid("can't use the new certificate", why)
                .next("check the clocks of this host and of the controller"));
        }
        self.set(loaded);
        Ok(())
    }

    fn read(&self, new: &Credentials) -> Result<Loaded, Problem> {
        let loaded = Loaded::new(new, self.strangers, &self.provider, &self.besides);
        loaded.map_err(|why| Problem::invalid("can't use the certificates", why))
    }

    fn set(&self, loaded: Loaded) {
        *self.loaded.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(loaded);
    }

    /// Adds to the list of revoked certificates, and returns the whole list. What is revoked stays so, even if the
    /// one who keeps the list has lost it.
    pub fn revoke(&self, revoked: Revoked) -> Revoked {
        self.trust.revoke(revoked)
    }

    /// Whom the own certificate is for.
    pub fn own(&self) -> Certified {
        self.loaded().own.clone()
    }

    /// Whether the own certificate counts at all of these addresses.
    pub fn names(&self, addresses: &[IpAddr]) -> bool {
        let loaded = self.loaded();
        let Some(Ok(own)) = loaded.chain.first().map(EndEntityCert::try_from) else {
            return false;
        };
        let named = |ip: &IpAddr| {
            own.verify_is_valid_for_subject_name(&ServerName::from(ip.to_canonical())).is_ok()
        };
        addresses.iter().all(named)
    }

    /// The SHA-256 of the certificate of its authority, in hexadecimal.
    pub fn authority_fingerprint(&self) -> String {
        fingerprint(&self.loaded().authorities[0])
    }

    fn loaded(&self) -> Arc<Loaded> {
        Arc::clone(&self.loaded.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether this peer's certificate counts now.
    pub(crate) fn check(&self, certified: &Certified) -> Result<(), Refusal> {
        self.trust.check(certified)
    }

    /// The server's side of a handshake. Whether the client's certificate is revoked is checked with each request,
    /// which is told so.
    ///
    /// # Errors
    /// When the client shows a certificate that is not one of the authority, or none where one is needed.
    pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> io::Result<(server::TlsStream<S>, Peer)> {
        let stream = self.loaded().acceptor.accept(stream).await?;
        let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let peer = match shown {
            None => Peer::Stranger,
            Some(certificate) => {
                let certified = Certified::of(certificate).ok_or(Refusal::NotOurs);
                Peer::Known(certified.map_err(io::Error::other)?)
            }
        };
        Ok((stream, peer))
    }

    /// As [`Identity::accept`], for protocols that hosts alone speak. [`Identity::until_revoked`] watches the client.
    ///
    /// # Errors
    /// When the client shows no certificate of a host of the cluster, or a revoked one.
    pub async fn accept_host<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> io::Result<(server::TlsStream<S>, Certified)> {
        let (stream, peer) = self.accept(stream).await?;
        let denied = |refusal: Refusal| io::Error::new(io::ErrorKind::PermissionDenied, refusal);
        let Peer::Known(certified) = peer else { return Err(denied(Refusal::NotOurs)) };
        self.check(&certified).map_err(denied)?;
        match certified.identity {
            PeerIdentity::Host(_) => Ok((stream, certified)),
            other => Err(denied(Refusal::NoHost(other))),
        }
    }

    /// Waits until the certificate is revoked.
    pub async fn until_revoked(&self, certified: &Certified) {
        while self.check(certified).is_ok() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// The grant that this host shows, if the authority has signed it for the host and its time is not over.
    ///
    /// # Errors
    /// Why it does not count.
    pub fn grant(&self, shown: &SignedGrant, host: &HostId) -> Result<Grant, NoGrant> {
        let loaded = self.loaded();
        grants::check(shown, host, (&loaded.authorities, &self.provider), now_ms())
    }

    /// The term that is shown, if the authority has signed it.
    pub fn term(&self, shown: &SignedTerm) -> Option<Term> {
        grants::term(shown, (&self.loaded().authorities, &self.provider))
    }

    /// The client's side of a handshake with the server at `HOST:PORT`.
    ///
    /// # Errors
    /// When the server's certificate does not count, or is not the expected one's.
    pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        authority: &str,
        expected: Expected,
        stream: S,
    ) -> io::Result<client::TlsStream<S>> {
        let loaded = self.loaded();
        let verifier = Verifier {
            roots: Roots::Known(Arc::clone(&loaded.roots)),
            provider: Arc::clone(&self.provider),
            expected,
            trust: Arc::clone(&self.trust),
        };
        let own = (loaded.chain.clone(), loaded.key.clone_key());
        handshake(verifier, Some(own), authority, stream).await
    }
}

/// A connection to a controller, without a certificate of one's own. Only the fingerprint of its authority's certificate
/// is known.
pub(crate) async fn connect_to_enrol<S: AsyncRead + AsyncWrite + Unpin>(
    authority: &str,
    fingerprint: String,
    stream: S,
) -> io::Result<client::TlsStream<S>> {
    let verifier = Verifier {
        roots: Roots::Pinned(fingerprint),
        provider: Arc::new(ring::default_provider()),
        expected: Expected::Identity(PeerIdentity::Controller),
        trust: Arc::default(),
    };
    handshake(verifier, None, authority, stream).await
}

async fn handshake<S: AsyncRead + AsyncWrite + Unpin>(
    verifier: Verifier,
    own: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
    authority: &str,
    stream: S,
) -> io::Result<client::TlsStream<S>> {
    let config = ClientConfig::builder_with_provider(Arc::clone(&verifier.provider))
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let config = match own {
        None => config.with_no_client_auth(),
        Some((chain, key)) => config.with_client_auth_cert(chain, key).map_err(io::Error::other)?,
    };
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let name = ServerName::try_from(host).map_err(io::Error::other)?;
    TlsConnector::from(Arc::new(config)).connect(name, stream).await.map_err(readable)
}

/// An error of a handshake. The TLS library shows our own reasons as they stand in the code.
fn readable(error: io::Error) -> io::Error {
    match error.get_ref().and_then(|inner| inner.downcast_ref()) {
        Some(Error::InvalidCertificate(CertificateError::Other(OtherError(refusal)))) => {
            io::Error::new(io::ErrorKind::PermissionDenied, refusal.to_string())
        }
        _ => error,
    }
}

impl Loaded {
    fn new(
        credentials: &Credentials,
        strangers: Strangers,
        provider: &Arc<CryptoProvider>,
        besides: &Besides,
    ) -> Result<Self, String> {
        let text = |e: &dyn std::fmt::Display| e.to_string();
        let mut roots = RootCertStore::empty();
        let authorities = certificates(&credentials.ca)?;
        for authority in authorities.iter().cloned() {
            roots.add(authority).map_err(|e| text(&e))?;
        }
        let roots = Arc::new(roots);
        let mut chain = certificates(&credentials.identity)?;
        let key = PrivateKeyDer::from_pem_slice(&credentials.identity).map_err(|e| text(&e))?;
        let own = chain.first().and_then(Certified::of).ok_or(Refusal::NotOurs);
        let own = own.map_err(|e| text(&e))?;
        // A host that joins knows only the fingerprint of the authority's certificate, so it is sent along.
        chain.extend(authorities.iter().cloned());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(provider));
        let verifier = match strangers {
            Strangers::Refused => verifier,
            Strangers::Heard => verifier.allow_unauthenticated(),
        };
        let verifier = verifier.build().map_err(|e| text(&e))?;
        let shown = CertifiedKey::from_der(chain.clone(), key.clone_key(), provider);
        let shown = Arc::new(shown.map_err(|e| text(&e))?);
        let mut config = ServerConfig::builder_with_provider(Arc::clone(provider))
            .with_safe_default_protocol_versions()
            .map_err(|e| text(&e))?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(Choice { own: shown, besides: Arc::clone(besides) }));
        // A client that resumes a session shows no certificate again, and nobody would look at its time.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        let acceptor = TlsAcceptor::from(Arc::new(config));
        Ok(Self { own, roots, authorities, chain, key, acceptor })
    }
}

fn of(dir: &Path, why: impl std::fmt::Display) -> Problem {
    Problem::invalid(format!("can't use the identity in {}", dir.display()), why).next(
        "enrol this host: `perigee host token NAME` at the controller, `perigee host join` here",
    )
}

fn read(dir: &Path) -> Result<Credentials, Problem> {
    let ca = std::fs::read(dir.join(CA_FILE));
    let ca = ca.map_err(|e| of(dir, format!("can't read {CA_FILE}: {e}")))?;
    let identity = read_private(&dir.join(IDENTITY_FILE)).map_err(|p| of(dir, p.why))?;
    Ok(Credentials { ca, identity })
}

/// The list of revoked certificates in a directory. Without one nothing is revoked yet.
///
/// # Errors
/// When there is a list that can't be read.
pub fn read_revoked(dir: &Path) -> Result<Revoked, Problem> {
    match std::fs::read(dir.join(REVOKED_FILE)) {
        Ok(text) => {
            serde_json::from_slice(&text).map_err(|e| of(dir, format!("{REVOKED_FILE}: {e}")))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Revoked::new()),
        Err(error) => Err(of(dir, format!("can't read {REVOKED_FILE}: {error}"))),
    }
}

fn changed(dir: &Path) -> [Option<SystemTime>; 3] {
    let time = |name: &str| std::fs::metadata(dir.join(name)).ok()?.modified().ok();
    [CA_FILE, IDENTITY_FILE, REVOKED_FILE].map(time)
}
