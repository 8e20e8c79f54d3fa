//! Which host is the gateway of a network: one that has VMs of the network, answers, can have networks, and starts the gateway. From a host
//! that is drained the gateway goes to another one with such VMs.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::network::Member;
use perigee_model::{HostId, NetworkName, Problem, ProblemKind};

use super::{NetworkRecord, find, key};
use crate::cluster::{Cluster, HostLink};

/// For how long the host of a gateway may say that it can't have networks, or that the gateway does not start. It may be its passing
/// trouble.
const UNABLE_MAX: Duration =
    if cfg!(test) { Duration::from_millis(200) } else { Duration::from_secs(60) };

/// For how long a gateway does not come back to a host where it did not start. Where it starts nowhere, it does not go to and fro.
const LEFT_FOR: Duration = Duration::from_secs(3600);

/// What is known of the gateways' hosts from one round to the next. A gateway is known by its host and the network's number.
#[derive(Default)]
pub(super) struct Gateways {
    /// The hosts that say that they can't have networks, and since when.
    unable: BTreeMap<HostId, Instant>,
    /// The gateways that do not start at their hosts, and since when the hosts say so.
    failing: BTreeMap<(HostId, u16), Instant>,
    /// When gateways have left a host because of that.
    left: BTreeMap<(HostId, u16), Instant>,
}

impl Gateways {
    /// Notes what the last reports of these hosts say of networks and gateways.
    pub(super) fn note(&mut self, cluster: &Cluster, hosts: &[Arc<HostLink>]) {
        let mut unable = BTreeSet::new();
        let mut failing = BTreeSet::new();
        for host in hosts {
            let Some(report) = cluster.hosts.report(&host.id) else { continue };
            if report.no_networks.is_some() {
                unable.insert(host.id.clone());
            }
            failing.extend(report.failing_gateways.iter().map(|vni| (host.id.clone(), *vni)));
        }
        since_when(&mut self.unable, unable);
        since_when(&mut self.failing, failing);
        self.left.retain(|_, at| at.elapsed() < LEFT_FOR);
    }

    /// Gives the network another gateway if it has none that answers and can be one. `hosts` are those with VMs of the network.
    /// Returns the changed record; `None` if the gateway stays.
    ///
    /// # Errors
    /// `NotFound` if the network was deleted just now.
    pub(super) async fn see_to(
        &mut self,
        cluster: &Cluster,
        network: &NetworkRecord,
        members: &[Member],
        hosts: &BTreeSet<HostId>,
        answers: impl Fn(&HostId) -> bool,
    ) -> Result<Option<NetworkRecord>, Problem> {
        let drained = cluster.hosts.drained();
        let Some(next) = self.next(network, members, hosts, &drained, answers) else {
            return Ok(None);
        };
        match set_gateway(cluster, &network.name, next).await {
            Ok(changed) => {
                let before = network.gateway.as_ref().filter(|host| self.fails(host, network.vni));
                let left = before.map(|host| ((host.clone(), changed.vni), Instant::now()));
                self.left.extend(left);
                Ok(Some(changed))
            }
            Err(problem) if problem.kind == ProblemKind::NotFound => Err(problem),
            // Its hosts would remove what they are not told of.
            Err(problem) => {
                tracing::warn!("network {} keeps its gateway: {problem}", network.name);
                Ok(None)
            }
        }
    }

    /// The host that is to be the gateway instead; `None` if the gateway stays.
    fn next(
        &self,
        network: &NetworkRecord,
        members: &[Member],
        hosts: &BTreeSet<HostId>,
        drained: &[HostId],
        answers: impl Fn(&HostId) -> bool,
    ) -> Option<HostId> {
        let (at, vni) = (network.gateway.as_ref(), network.vni);
        // What is in a gang's own network is told to no host without a VM of the gang.
        let may_stay = |host| network.job.is_none() || hosts.contains(host);
        let is_served = at.is_some_and(|host| {
            may_stay(host)
                && answers(host)
                && self.unable.get(host).is_none_or(|since| since.elapsed() < UNABLE_MAX)
        });
        let fails = at.is_some_and(|host| self.fails(host, vni));
        if is_served && !fails && !at.is_some_and(|host| drained.contains(host)) {
            return None;
        }
        let able = hosts.iter().filter(|host| answers(host) && !self.unable.contains_key(*host));
        let able: Vec<&HostId> = able.collect();
        let is_untried =
            |host: &&HostId| Some(*host) != at && !self.left.contains_key(&((*host).clone(), vni));
        let untried = |is_drained| {
            let hosts = able.iter().copied().filter(is_untried);
            with_most_vms(members, hosts.filter(|host| drained.contains(host) == is_drained))
        };
        match (is_served, fails) {
            (true, false) => untried(false),
            (true, true) => untried(false).or_else(|| untried(true)),
            // One that may not start is better than none.
            (false, _) => untried(false)
                .or_else(|| untried(true))
                .or_else(|| with_most_vms(members, able.iter().copied())),
        }
    }

    /// Whether the gateway has not started at this host for so long that it is to leave, if another one can have it.
    fn fails(&self, host: &HostId, vni: u16) -> bool {
        let since = self.failing.get(&(host.clone(), vni));
        since.is_some_and(|since| since.elapsed() >= UNABLE_MAX)
    }
}

/// Keeps since when something is so, of all that is so now.
fn since_when<K: Ord>(since: &mut BTreeMap<K, Instant>, now: BTreeSet<K>) {
    since.retain(|known, _| now.contains(known));
    for one in now {
        since.entry(one).or_insert_with(Instant::now);
    }
}

/// The host with most of the VMs; of several the first by name.
fn with_most_vms<'a>(
    members: &[Member],
    hosts: impl Iterator<Item = &'a HostId>,
) -> Option<HostId> {
    let count = |host: &HostId| members.iter().filter(|m| m.host.as_ref() == Some(host)).count();
    hosts.min_by_key(|host| (Reverse(count(host)), *host)).cloned()
}

async fn set_gateway(
    cluster: &Cluster,
    name: &NetworkName,
    host: HostId,
) -> Result<NetworkRecord, Problem> {
    // Whoever deletes it meanwhile comes before or after.
    let _turn = cluster.networks.turn().await;
    let network = find(cluster, name).await?;
    tracing::info!("host {host} is the gateway of network {name} from now on");
    let change = |old: Option<NetworkRecord>| NetworkRecord {
        gateway: Some(host.clone()),
        ..old.unwrap_or_else(|| network.clone())
    };
    cluster.records.update(&key(name), change).await
}
