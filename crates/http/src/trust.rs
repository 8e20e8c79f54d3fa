//! Which of the certificates that the authority has signed count: neither expired nor revoked.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use perigee_model::units::format_duration;
use tokio_rustls::rustls::{CertificateError, Error, OtherError};

use crate::certificate::{CERTIFICATE_LIFE, Certified, PeerIdentity, fingerprint, now_ms};

/// For each identity, the time up to which its certificates are revoked. The key is the identity as a URI.
pub type Revoked = BTreeMap<String, u64>;

/// Says which list it is: whoever knows it already need not be sent it again.
pub fn list_id(revoked: &Revoked) -> String {
    let lines = revoked.iter().map(|(identity, until_ms)| format!("{identity} {until_ms}\n"));
    fingerprint(lines.collect::<String>().as_bytes())
}

/// Says whether a certificate that the authority has signed still counts.
#[derive(Debug, Default)]
pub(crate) struct Trust(RwLock<Revoked>);

impl Trust {
    /// Adds to the list of revoked certificates, and returns the whole list.
    pub fn revoke(&self, revoked: Revoked) -> Revoked {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        for (identity, until_ms) in revoked {
            let known = known.entry(identity).or_default();
            *known = until_ms.max(*known);
        }
        known.clone()
    }

    /// A handshake has looked at the certificate's time already, but a connection may be open for longer.
    pub fn check(&self, certified: &Certified) -> Result<(), Refusal> {
        let life_ms = u64::try_from(CERTIFICATE_LIFE.as_millis()).unwrap_or(u64::MAX);
        let (now_ms, end_ms) = (now_ms(), certified.issued_ms.saturating_add(life_ms));
        if now_ms > end_ms {
            return Err(Refusal::Expired(certified.identity.clone(), (now_ms - end_ms) / 1000));
        }
        let revoked = self.0.read().unwrap_or_else(PoisonError::into_inner);
        match revoked.get(&certified.identity.to_string()) {
            Some(until_ms) if certified.issued_ms <= *until_ms => {
                Err(Refusal::Revoked(certified.identity.clone()))
            }
            _ => Ok(()),
        }
    }
}

/// Why a certificate that the authority has signed is not accepted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("the certificate is not one of a cluster")]
    NotOurs,
    #[error("its certificate is not one of the cluster with this fingerprint")]
    AnotherCluster,
    #[error("the certificate of {0} is revoked")]
    Revoked(PeerIdentity),
    #[error("by the clock here the certificate of {0} has expired {age} ago: this clock, or that of its issuer, may be wrong", age = format_duration(*.1))]
    Expired(PeerIdentity, u64),
    #[error("by the clock here the certificate of {0} does not count yet, for {age}: this clock, or that of its issuer, may be wrong", age = format_duration(*.1))]
    NotYet(PeerIdentity, u64),
    #[error("the certificate is for {0}, and not for {1}")]
    Another(PeerIdentity, PeerIdentity),
    #[error("the certificate is for {0}, which is no host")]
    NoHost(PeerIdentity),
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Self::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(refusal))))
    }
}
