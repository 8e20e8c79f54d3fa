//! How a host gets a certificate of the cluster: the words that a person carries from the controller to the host, and
//! the messages that follow.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{HostId, SiteId};

/// `POST /v1/hosts/{host}/token`: asks for a token with which the host joins once.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NewToken {
    /// `https://HOST:PORT`, where the host reaches the controller. None: the address that the controller knows of itself.
    #[serde(default)]
    pub controller_url: Option<String>,
}

/// The answer to [`NewToken`].
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct MadeToken {
    /// One word for `perigee host join`.
    pub token: String,
}

/// What a host needs to join: `NAME,SECRET,FINGERPRINT,URL`, in one word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// The host that joins.
    pub host: HostId,
    /// It is good for one host that joins, within an hour.
    pub secret: String,
    /// The SHA-256 of the authority's certificate, in hexadecimal.
    pub fingerprint: String,
    /// `https://HOST:PORT`.
    pub controller_url: String,
}

impl fmt::Display for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, secret, fingerprint, controller_url } = self;
        write!(f, "{host},{secret},{fingerprint},{controller_url}")
    }
}

impl FromStr for JoinToken {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.trim().splitn(4, ',').map(str::to_owned);
        let mut next = || {
            parts.next().filter(|part| !part.is_empty()).ok_or_else(|| {
                "it is not a token: NAME,SECRET,FINGERPRINT,URL, as `perigee host token` prints it"
                    .to_owned()
            })
        };
        let host = HostId::new(next()?).map_err(|error| error.to_string())?;
        Ok(Self { host, secret: next()?, fingerprint: next()?, controller_url: next()? })
    }
}

/// `POST /v1/enrol`: a host joins. It has no certificate yet.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Enrol {
    /// The host that joins.
    pub host: HostId,
    /// The token's secret.
    pub secret: String,
    /// The public half of the host's new key: a point of P-256 in hexadecimal.
    pub public_key: String,
    /// The addresses at which the other hosts and the controller reach this host.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
}

/// `POST /v1/enrol/check`: a host that has a token asks, before it joins, how the controller sees it. The token stays good.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct CheckToken {
    /// The host that will join.
    pub host: HostId,
    /// The token's secret.
    pub secret: String,
    /// What the controller is to look at.
    #[serde(flatten)]
    pub check: CheckHost,
}

/// `POST /v1/hosts/{host}/check`: a host asks how the controller sees it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct CheckHost {
    /// The addresses of the host at which somebody listens: the controller tries to connect to each that is at an address of the host's
    /// certificate. Before there is one, it tries those at the address for which the token is, or from which the host asks.
    #[schema(value_type = Vec<String>)]
    pub reach: Vec<SocketAddr>,
}

/// How the controller sees a host.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct HostSeen {
    /// The controller's clock; Unix time.
    pub now_ms: u64,
    /// The site where the host is, if it was there before; else the controller's own, or the only one that there is. None: the cluster has none
    /// yet, or several.
    pub site: Option<SiteId>,
    /// The sites that the cluster has.
    pub sites: Vec<SiteId>,
    /// The addresses to which the controller could not connect.
    pub unreached: Vec<Unreached>,
    /// The addresses to which it did not try to connect, because it does not know them as the host's.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub untried: Vec<SocketAddr>,
}

/// An address to which the controller could not connect.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Unreached {
    /// One of those that were asked for.
    #[schema(value_type = String)]
    pub address: SocketAddr,
    /// Why not.
    pub why: String,
}

/// `POST /v1/hosts/{host}/certificate`: a host asks for another certificate, before its own one expires.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RenewCertificate {
    /// The public half of the host's next key: a point of P-256 in hexadecimal.
    pub public_key: String,
}

/// The answer to `POST /v1/hosts/{host}/revoke`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct HostRevoked {
    /// Whether a host with this name had joined. If not, its name may be wrong.
    pub was_enrolled: bool,
}

/// `PUT /v1/hosts/{host}/site`: an admin says at which site a host is from now on.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct SetSite {
    /// The host's agent has to say the same (`perigee agent run --site`).
    pub site: SiteId,
}

/// A new certificate.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Enrolled {
    /// PEM.
    pub certificate: String,
    /// The authority's certificate, PEM.
    pub ca: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_one_word_that_is_read_as_it_was_written() {
        let token = JoinToken {
            host: HostId::new("home_1.a").expect("a name"),
            secret: "5e".to_owned(),
            fingerprint: "f1".to_owned(),
            controller_url: "https://[fd00::1]:7000".to_owned(),
        };
        assert_eq!(token.to_string().parse(), Ok(token));
        for bad in ["", "a", "a,b,c", "a,,c,d", "A,b,c,d", "a,b,c,"] {
            assert!(bad.parse::<JoinToken>().is_err(), "{bad:?}");
        }
    }
}
