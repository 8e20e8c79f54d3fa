//! How the controller sees a host that joins, or that looks what is wrong with it: its clock, and the addresses that the controller does not reach.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use perigee_model::enrol::{CheckHost, HostSeen, Unreached};
use perigee_model::limits::CHECKED_ADDRESSES;
use perigee_model::{HostId, Problem, SiteId};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::enrol;
use crate::clock::now_ms;
use crate::cluster::Cluster;

/// A packet that a firewall drops is not answered.
const CONNECT_MAX: Duration = Duration::from_secs(3);

/// Whoever asks hears no more than that: what a stranger's program answers is not for him.
const UNREACHED: &str = "no connection";

/// A look at a host, of which there is one at a time. It ends with this.
struct Turn<'a> {
    looked_at: &'a Mutex<BTreeSet<HostId>>,
    host: &'a HostId,
}

impl<'a> Turn<'a> {
    fn take(looked_at: &'a Mutex<BTreeSet<HostId>>, host: &'a HostId) -> Option<Self> {
        let mut all = looked_at.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(host.clone()).then(|| Self { looked_at, host })
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.looked_at.lock().unwrap_or_else(PoisonError::into_inner).remove(self.host);
    }
}

/// Looks at a host that asks for it from this address.
///
/// # Errors
/// As for [`seen`].
pub async fn at_host(
    cluster: &Cluster,
    host: &HostId,
    (ask, from): (CheckHost, Option<IpAddr>),
) -> Result<HostSeen, Problem> {
    let known = enrol::addresses(cluster, host).await?;
    seen(cluster, host, ask, &known.unwrap_or_else(|| from.into_iter().collect())).await
}

/// Looks at a host that has a token and asks for it from this address.
///
/// # Errors
/// `Forbidden` when the token does not count; else as for [`seen`].
pub async fn with_token(
    cluster: &Cluster,
    (host, secret): (&HostId, &str),
    (ask, from): (CheckHost, Option<IpAddr>),
) -> Result<HostSeen, Problem> {
    let only = enrol::check_token(cluster, host, secret).await?;
    let own: Vec<IpAddr> = only.or(from).into_iter().collect();
    seen(cluster, host, ask, &own).await
}

/// Looks at a host, and connects to no other addresses than its own, which are canonical.
///
/// # Errors
/// `Invalid` when it asks for too many addresses; `Conflict` while another look at it goes on.
async fn seen(
    cluster: &Cluster,
    host: &HostId,
    ask: CheckHost,
    own: &[IpAddr],
) -> Result<HostSeen, Problem> {
    let what = format!("can't look at host {host}");
    CHECKED_ADDRESSES.check(ask.reach.len()).map_err(|e| e.problem(&what))?;
    let is_own = |address: &SocketAddr| own.contains(&address.ip().to_canonical());
    let (tried, untried): (Vec<_>, Vec<_>) = ask.reach.into_iter().partition(is_own);
    let turn = Turn::take(&cluster.looked_at, host).map(Some);
    let _turn = turn.or_else(|| tried.is_empty().then_some(None)).ok_or_else(|| {
        let next = format!("ask again after {} s", CONNECT_MAX.as_secs());
        Problem::conflict(&what, "another look at it goes on").next(next)
    })?;
    let looks = join_all(tried.into_iter().map(connect)).await;
    let unreached = looks.into_iter().filter_map(Result::err).collect();
    let all = cluster.hosts.all();
    let sites: BTreeSet<SiteId> = all.iter().map(|host| host.addresses.site.clone()).collect();
    let own = all.iter().find(|known| known.id == *host).map(|known| known.addresses.site.clone());
    let only = sites.first().filter(|_| sites.len() == 1).cloned();
    let site = own.or_else(|| cluster.settings.site.clone()).or(only);
    let sites = sites.into_iter().collect();
    Ok(HostSeen { now_ms: now_ms(), site, sites, unreached, untried })
}

async fn connect(address: SocketAddr) -> Result<(), Unreached> {
    match timeout(CONNECT_MAX, TcpStream::connect(address)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(_)) | Err(_) => Err(Unreached { address, why: UNREACHED.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_looked_at_once_at_a_time() {
        let (looked_at, host) = (Mutex::default(), HostId::new("home1").expect("a name"));
        let other = HostId::new("home2").expect("a name");
        let turn = Turn::take(&looked_at, &host).expect("the first look");
        assert!(Turn::take(&looked_at, &host).is_none());
        assert!(Turn::take(&looked_at, &other).is_some());
        drop(turn);
        assert!(Turn::take(&looked_at, &host).is_some());
    }
}
