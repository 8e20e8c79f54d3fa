//! Signs what the controller allows a host to do at others ([`perigee_model::grant`]) and which controller commands ([`perigee_model::term`]), and
//! checks it.

use perigee_model::grant::{Grant, SignedGrant};
use perigee_model::term::{SignedTerm, Term};
use perigee_model::{HostId, Problem};
use rcgen::SigningKey as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_rustls::rustls::crypto::CryptoProvider;
use tokio_rustls::rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

use crate::authority::Authority;
use crate::certificate::{hex, of_hex};

/// What is signed begins with one of these, so that a signature of the authority for something else is none for a grant.
const GRANT: &str = "perigee grant 1\n";
const TERM: &str = "perigee term 1\n";

/// Why a grant does not count.
#[derive(Debug, thiserror::Error)]
pub enum NoGrant {
    /// The signature is not the authority's.
    #[error("the controller has not signed it")]
    NotSigned,
    /// It is another host's.
    #[error("it is for host {0}")]
    Another(HostId),
    /// Its time is over.
    #[error("it is too old; the clock here, or at the controller, may be wrong")]
    TooOld,
}

impl Authority {
    /// # Errors
    /// `Internal` when it can't be signed.
    pub fn sign(&self, grant: &Grant) -> Result<SignedGrant, Problem> {
        self.signed(GRANT, grant).map(SignedGrant)
    }

    /// # Errors
    /// `Internal` when it can't be signed.
    pub fn sign_term(&self, term: &Term) -> Result<SignedTerm, Problem> {
        self.signed(TERM, term).map(SignedTerm)
    }

    fn signed(&self, domain: &str, value: &impl Serialize) -> Result<String, Problem> {
        let failed = |e: &dyn std::fmt::Display| Problem::internal("can't sign for a host", e);
        let text = serde_json::to_string(value).map_err(|e| failed(&e))?;
        let message = format!("{domain}{text}");
        let signature = self.key().sign(message.as_bytes()).map_err(|e| failed(&e))?;
        Ok(format!("{} {text}", hex(&signature)))
    }
}

/// The certificates of the authorities, and what checks their signatures.
pub(crate) type Authorities<'a> = (&'a [CertificateDer<'a>], &'a CryptoProvider);

/// What one of the authorities has signed in this domain.
fn read<T: DeserializeOwned>(
    shown: &str,
    domain: &str,
    (authorities, provider): Authorities<'_>,
) -> Option<T> {
    let (signature, text) = shown.split_once(' ')?;
    let signature = of_hex(signature)?;
    let message = format!("{domain}{text}");
    let algorithms = provider.signature_verification_algorithms.all;
    let has_signed = |authority: EndEntityCert<'_>| {
        let with = |algorithm| {
            authority.verify_signature(algorithm, message.as_bytes(), &signature).is_ok()
        };
        algorithms.iter().copied().any(with)
    };
    let mut authorities = authorities.iter().filter_map(|der| EndEntityCert::try_from(der).ok());
    if authorities.any(has_signed) { serde_json::from_str(text).ok() } else { None }
}

/// The term that is shown, if one of the authorities has signed it.
pub(crate) fn term(shown: &SignedTerm, authorities: Authorities<'_>) -> Option<Term> {
    read(&shown.0, TERM, authorities)
}

/// The grant of this host, if one of the authorities has signed it.
pub(crate) fn check(
    shown: &SignedGrant,
    host: &HostId,
    authorities: Authorities<'_>,
    now_ms: u64,
) -> Result<Grant, NoGrant> {
    let grant: Grant = read(&shown.0, GRANT, authorities).ok_or(NoGrant::NotSigned)?;
    if grant.host != *host {
        return Err(NoGrant::Another(grant.host));
    }
    if grant.until_ms < now_ms {
        return Err(NoGrant::TooOld);
    }
    Ok(grant)
}

#[cfg(test)]
mod tests {
    use perigee_model::VolumeName;
    use perigee_model::grant::Allowed;
    use perigee_model::home::Tenure;

    use super::*;
    use crate::certificate::{PeerIdentity, now_ms};
    use crate::identity::{Identity, Strangers};

    fn host(name: &str) -> HostId {
        HostId::new(name).expect("a name")
    }

    fn grant() -> Grant {
        let volume = VolumeName::new("data").expect("a name");
        let allows = Allowed::Home { volume, tenure: Tenure(3) };
        Grant { host: host("home1"), allows, until_ms: now_ms() + 1000 }
    }

    #[test]
    fn a_grant_counts_for_its_host_and_for_a_time() {
        let dir = tempfile::tempdir().expect("a directory");
        let authority = Authority::open(&dir.path().join("one")).expect("an authority");
        let other = Authority::open(&dir.path().join("other")).expect("an authority");
        let own = authority.credentials(&PeerIdentity::Host(host("cloud1")), &[]);
        let home = Identity::new(&own.expect("credentials"), Strangers::Refused);
        let home = home.expect("an identity");
        let signed = authority.sign(&grant()).expect("a grant");
        assert_eq!(home.grant(&signed, &host("home1")).expect("it counts").allows, grant().allows);
        let refused = home.grant(&signed, &host("home2")).expect_err("another host's");
        assert!(matches!(refused, NoGrant::Another(_)), "{refused}");
        let changed = SignedGrant(signed.0.replace("data", "date"));
        let foreign = other.sign(&grant()).expect("a grant");
        let [none, no_text] = ["", "00"].map(|text| SignedGrant(text.to_owned()));
        for bad in [changed, foreign, none, no_text] {
            let refused = home.grant(&bad, &host("home1")).expect_err("not signed");
            assert!(matches!(refused, NoGrant::NotSigned), "{refused}");
        }
        let old = authority.sign(&Grant { until_ms: now_ms() - 1, ..grant() }).expect("a grant");
        let refused = home.grant(&old, &host("home1")).expect_err("too old");
        assert!(matches!(refused, NoGrant::TooOld), "{refused}");
    }
}
