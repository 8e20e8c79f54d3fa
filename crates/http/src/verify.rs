//! Which certificates of the other side are accepted.

use std::sync::Arc;

use tokio_rustls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use tokio_rustls::rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use tokio_rustls::rustls::crypto::{
    CryptoProvider, verify_tls12_signature, verify_tls13_signature,
};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::{
    CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};

use crate::certificate::{Certified, PeerIdentity, fingerprint};
use crate::trust::{Refusal, Trust};

/// Whose certificate a server has to show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expected {
    /// This one's, at whatever address.
    Identity(PeerIdentity),
    /// That of the host to which the authority has given the address that is called.
    Address,
}

/// The authority that has to have signed a server's certificate.
#[derive(Debug)]
pub(crate) enum Roots {
    Known(Arc<RootCertStore>),
    /// The one whose own certificate, which the server shows too, has this SHA-256 in hexadecimal.
    Pinned(String),
}

impl Roots {
    fn find(&self, shown: &[CertificateDer<'_>]) -> Result<Arc<RootCertStore>, Error> {
        match self {
            Self::Known(roots) => Ok(Arc::clone(roots)),
            Self::Pinned(pinned) => {
                let found = shown.iter().find(|shown| fingerprint(shown) == *pinned);
                let mut roots = RootCertStore::empty();
                roots.add(found.ok_or(Refusal::AnotherCluster)?.clone().into_owned())?;
                Ok(Arc::new(roots))
            }
        }
    }
}

/// Says whose certificate does not count by the clock, and by how much.
fn by_clock(error: Error, shown: &CertificateDer<'_>) -> Error {
    let Some(Certified { identity, .. }) = Certified::of(shown) else { return error };
    match error {
        Error::InvalidCertificate(CertificateError::ExpiredContext { time, not_after }) => {
            Refusal::Expired(identity, time.as_secs().abs_diff(not_after.as_secs())).into()
        }
        Error::InvalidCertificate(CertificateError::NotValidYetContext { time, not_before }) => {
            Refusal::NotYet(identity, time.as_secs().abs_diff(not_before.as_secs())).into()
        }
        other => other,
    }
}

/// Whether the first certificate of a chain counts now.
pub(crate) fn check_now(
    chain: &[CertificateDer<'_>],
    roots: &RootCertStore,
    provider: &CryptoProvider,
) -> Result<(), Error> {
    let (own, intermediates) = chain.split_first().ok_or(Refusal::NotOurs)?;
    verify_server_cert_signed_by_trust_anchor(
        &ParsedCertificate::try_from(own)?,
        roots,
        intermediates,
        UnixTime::now(),
        provider.signature_verification_algorithms.all,
    )
}

/// Checks a server's certificate.
#[derive(Debug)]
pub(crate) struct Verifier {
    pub roots: Roots,
    pub provider: Arc<CryptoProvider>,
    pub expected: Expected,
    pub trust: Arc<Trust>,
}

impl Verifier {
    fn check(&self, certified: &Certified) -> Result<(), Refusal> {
        self.trust.check(certified)?;
        match (&self.expected, &certified.identity) {
            (Expected::Identity(expected), found) if expected == found => Ok(()),
            (Expected::Identity(expected), found) => {
                Err(Refusal::Another(found.clone(), expected.clone()))
            }
            (Expected::Address, PeerIdentity::Host(_)) => Ok(()),
            (Expected::Address, found) => Err(Refusal::NoHost(found.clone())),
        }
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let roots = self.roots.find(intermediates)?;
        verify_server_cert_signed_by_trust_anchor(
            &certificate,
            &roots,
            intermediates,
            now,
            self.provider.signature_verification_algorithms.all,
        )
        .map_err(|error| by_clock(error, end_entity))?;
        let certified = Certified::of(end_entity).ok_or(Refusal::NotOurs)?;
        self.check(&certified)?;
        if self.expected == Expected::Address {
            verify_server_name(&certificate, server_name)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
