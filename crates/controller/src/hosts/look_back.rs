//! How the controller sees a host that joins, or that looks what is wrong with it: its clock, and the addresses that the controller does not reach.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use perigee_http::certificate::now_ms;
use perigee_model::enrol::{CheckHost, HostSeen, Unreached};
use perigee_model::limits::CHECKED_ADDRESSES;
use perigee_model::{HostId, Problem, SiteId};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::cluster::Cluster;

/// A packet that a firewall drops is not answered.
const CONNECT_MAX: Duration = Duration::from_secs(3);

/// Looks at a host that asks for it.
///
/// # Errors
/// `Invalid` when it asks for too many addresses.
pub async fn seen(cluster: &Cluster, host: &HostId, ask: CheckHost) -> Result<HostSeen, Problem> {
    let what = format!("can't look at host {host}");
    CHECKED_ADDRESSES.check(ask.reach.len()).map_err(|e| e.problem(&what))?;
    let looks = join_all(ask.reach.into_iter().map(connect)).await;
    let unreached = looks.into_iter().filter_map(Result::err).collect();
    let all = cluster.hosts.all();
    let sites: BTreeSet<SiteId> = all.iter().map(|host| host.addresses.site.clone()).collect();
    let own = all.iter().find(|known| known.id == *host).map(|known| known.addresses.site.clone());
    let only = sites.first().filter(|_| sites.len() == 1).cloned();
    let site = own.or_else(|| cluster.settings.site.clone()).or(only);
    let sites = sites.into_iter().collect();
    Ok(HostSeen { now_ms: now_ms(), site, sites, unreached })
}

async fn connect(address: SocketAddr) -> Result<(), Unreached> {
    let why = match timeout(CONNECT_MAX, TcpStream::connect(address)).await {
        Ok(Ok(_)) => return Ok(()),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {} s", CONNECT_MAX.as_secs()),
    };
    Err(Unreached { address, why })
}
