//! How a daemon talks with the other daemons of its cluster.

use std::sync::Arc;

use perigee_model::term::{SignedTerm, Term};

use crate::identity::Identity;

/// How a daemon talks with the others over TCP.
#[derive(Debug, Clone, Default)]
pub enum Network {
    /// Nothing is encrypted, and nobody proves who they are.
    #[default]
    Plain,
    /// TLS, and both sides show a certificate of the cluster's authority.
    Tls(Arc<Identity>),
}

impl Network {
    /// This daemon's identity, if the network has TLS.
    pub fn identity(&self) -> Option<&Arc<Identity>> {
        match self {
            Self::Plain => None,
            Self::Tls(identity) => Some(identity),
        }
    }

    /// The term that is shown; `None` if it does not count here. Without certificates everybody is believed.
    pub fn term(&self, shown: &SignedTerm) -> Option<Term> {
        match self {
            Self::Plain => serde_json::from_str(shown.0.split_once(' ')?.1).ok(),
            Self::Tls(identity) => identity.term(shown),
        }
    }

    /// Keeps this daemon's identity as its files are: [`Identity::follow`]. It does not end.
    pub async fn follow(&self) {
        match self {
            Self::Plain => std::future::pending().await,
            Self::Tls(identity) => Arc::clone(identity).follow().await,
        }
    }

    /// How addresses of this network begin.
    pub fn scheme(&self) -> &'static str {
        match self {
            Self::Plain => "http://",
            Self::Tls(_) => "https://",
        }
    }
}

/// `HOST:PORT` of `http://HOST:PORT` or `https://HOST:PORT`; `None` for anything else.
pub fn authority_of(address: &str) -> Option<&str> {
    let rest = address.strip_prefix("http://").or_else(|| address.strip_prefix("https://"));
    rest.and_then(authority)
}

/// `HOST:PORT` of what follows the scheme; `None` for anything else.
pub(crate) fn authority(rest: &str) -> Option<&str> {
    let authority = rest.strip_suffix('/').unwrap_or(rest);
    let (host, port) = authority.rsplit_once(':')?;
    let plain = host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._:[]".contains(&b));
    (!host.is_empty() && plain && port.parse::<u16>().is_ok()).then_some(authority)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_authority_is_found_in_both_schemes() {
        assert_eq!(authority_of("https://10.0.0.1:1/"), Some("10.0.0.1:1"));
        assert_eq!(authority_of("http://[::1]:1"), Some("[::1]:1"));
        assert_eq!(authority_of("unix:/a:1"), None);
    }
}
