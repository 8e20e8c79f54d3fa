//! How a daemon talks with the other daemons of its cluster.

use std::sync::Arc;
use std::time::Duration;

use perigee_model::Problem;
use perigee_model::term::{SignedTerm, Term};

use crate::Client;
use crate::identity::Identity;
use crate::verify::Expected;

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
    /// A client for an address that comes from another host. It is `http://HOST:PORT`, or `https://HOST:PORT` if the
    /// network has TLS; never a unix socket.
    ///
    /// # Errors
    /// `Invalid` when the address is anything else.
    pub fn client(
        &self,
        address: &str,
        expected: Expected,
        answer_max: Duration,
    ) -> Result<Client, Problem> {
        let authority =
            address.strip_prefix(self.scheme()).and_then(authority).ok_or_else(|| {
                Problem::invalid(
                    format!("can't use the address {address:?}"),
                    format!("it is not {}HOST:PORT", self.scheme()),
                )
            })?;
        Ok(Client::to_authority(address, authority, self, expected, answer_max))
    }

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

fn authority(rest: &str) -> Option<&str> {
    let authority = rest.strip_suffix('/').unwrap_or(rest);
    let (host, port) = authority.rsplit_once(':')?;
    let plain = host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._:[]".contains(&b));
    (!host.is_empty() && plain && port.parse::<u16>().is_ok()).then_some(authority)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_from_another_host_is_never_a_unix_socket() {
        let wait = Duration::from_secs(1);
        for bad in [
            "unix:/run/perigee/controller.sock",
            "https://10.0.0.1:1",
            "http://10.0.0.1",
            "http://10.0.0.1:1/v1",
            "http://user@10.0.0.1:1",
            "http://a b:1",
            "http://:1",
            "10.0.0.1:1",
            "",
        ] {
            let refused = Network::Plain.client(bad, Expected::Address, wait);
            assert!(refused.is_err(), "{bad:?}");
        }
        for good in ["http://10.0.0.1:1", "http://[fd00::1]:1/", "http://home-1.example:1"] {
            Network::Plain.client(good, Expected::Address, wait).expect(good);
        }
    }

    #[test]
    fn an_authority_is_found_in_both_schemes() {
        assert_eq!(authority_of("https://10.0.0.1:1/"), Some("10.0.0.1:1"));
        assert_eq!(authority_of("http://[::1]:1"), Some("[::1]:1"));
        assert_eq!(authority_of("unix:/a:1"), None);
    }
}
