//! Tells each host what it has to do for the networks: at once when something has changed, and otherwise now and then.
//!
//! Where a VM is, its hosts say: of those at which it runs, the one with its latest start counts. In the pause of a
//! migration the destination counts already, so that what is sent to the VM then waits there for it.
//!
//! Each host is told by a task of its own, so one that does not answer delays no other.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use perigee_http::authority_of;
use perigee_model::job::HostState;
use perigee_model::network::{
    HostNetwork, HostNetworks, Member, NetworksKnown, Published, TunnelPeer,
};
use perigee_model::vm::{MigrationPhase, VmReport, VmStatus};
use perigee_model::{HostId, JobId, Problem, VmId};

use super::gateways::Gateways;
use super::{NetworkRecord, all, publish, tunnel_address};
use crate::clock;
use crate::clock::now_ms;
use crate::cluster::tasks::Task;
use crate::cluster::{Cluster, HostLink};
use crate::records::{JobRecord, MigrationRecord, vm_of};

/// A host that has lost what it was told gets it again after this time.
const TELL_AGAIN: Duration = Duration::from_secs(30);

/// For how long an answer for a name counts, and how long one is waited for.
const RESOLVED_FOR: Duration = Duration::from_secs(60);
const RESOLVE_MAX: Duration = Duration::from_secs(2);
const RESOLVE_AGAIN: Duration = Duration::from_secs(5);

/// The addresses of names that hosts' daemons have, with the time of the answer. Without a new answer the former one stays.
#[derive(Default)]
struct Resolved(Mutex<BTreeMap<String, (Instant, Vec<IpAddr>)>>);

impl Resolved {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, (Instant, Vec<IpAddr>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of(&self, name: &str) -> Vec<IpAddr> {
        self.lock().get(name).map(|(_, found)| found.clone()).unwrap_or_default()
    }

    /// Asks for the names that were not asked for lately, all at once, and forgets those of no host. Returns whether an answer is
    /// another one.
    async fn look(&self, names: BTreeSet<String>) -> bool {
        let is_new = |at: &Instant| at.elapsed() < RESOLVED_FOR;
        let asked: Vec<String> = {
            let mut all = self.lock();
            all.retain(|name, _| names.contains(name));
            names
                .into_iter()
                .filter(|name| !all.get(name).is_some_and(|(at, _)| is_new(at)))
                .collect()
        };
        let answers = asked.iter().map(async |name| {
            // The port means nothing.
            let found =
                tokio::time::timeout(RESOLVE_MAX, tokio::net::lookup_host((name.as_str(), 1)));
            let found: BTreeSet<IpAddr> =
                found.await.ok()?.ok()?.map(|address| address.ip()).collect();
            Some((name.clone(), found.into_iter().collect::<Vec<_>>()))
        });
        let mut is_other = false;
        for (name, found) in futures_util::future::join_all(answers).await.into_iter().flatten() {
            let before = self.lock().insert(name, (Instant::now(), found.clone()));
            is_other |= before.is_none_or(|(_, before)| before != found);
        }
        is_other
    }
}

/// What the hosts were told.
#[derive(Default)]
struct Sent(Mutex<BTreeMap<HostId, Last>>);

#[derive(Default)]
struct Last {
    /// When, and what; `None` if the last try failed.
    sent: Option<(Instant, HostNetworks)>,
    /// When what the host knows was made: the next is later, also if the clock was set back.
    made_ms: u64,
    /// A task is telling it something.
    busy: bool,
}

impl Sent {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<HostId, Last>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the host is to be told this now, and then when it was made. Nobody else tells it something meanwhile.
    fn begin(&self, host: &HostId, wanted: &HostNetworks, now_ms: u64) -> Option<u64> {
        let mut all = self.lock();
        let last = all.entry(host.clone()).or_default();
        let knows = |(at, sent): &(Instant, HostNetworks)| {
            let same = HostNetworks { made_ms: 0, ..sent.clone() };
            same == *wanted && at.elapsed() < TELL_AGAIN
        };
        if last.busy || last.sent.as_ref().is_some_and(knows) {
            return None;
        }
        last.busy = true;
        last.made_ms = now_ms.max(last.made_ms + 1);
        Some(last.made_ms)
    }

    /// Returns whether the host knows what it was told; `known`: its answer.
    fn end(&self, host: &HostId, sent: HostNetworks, known: Option<NetworksKnown>) -> bool {
        let is_known = known.is_some_and(|known| known.made_ms == sent.made_ms);
        if let Some(last) = self.lock().get_mut(host) {
            last.busy = false;
            last.made_ms = last.made_ms.max(known.map_or(0, |known| known.made_ms));
            last.sent = is_known.then(|| (Instant::now(), sent));
        }
        is_known
    }

    /// The hosts that may have something of a network.
    fn hosts(&self) -> Vec<HostId> {
        self.lock().keys().cloned().collect()
    }

    fn forget(&self, host: &HostId) {
        self.lock().remove(host);
    }
}

/// What the task knows from one round to the next.
#[derive(Default)]
struct Memory {
    sent: Arc<Sent>,
    /// Where the VMs were in the last round.
    places: BTreeMap<VmId, HostId>,
    gateways: Gateways,
}

/// Keeps the hosts informed. It does not end.
pub async fn keep(cluster: Arc<Cluster>, task: Task) {
    let resolved = Resolved::default();
    tokio::join!(keep_telling(&cluster, &task, &resolved), keep_resolving(&cluster, &resolved));
}

/// A resolver that does not answer delays nothing else.
async fn keep_resolving(cluster: &Cluster, resolved: &Resolved) {
    loop {
        let all = cluster.hosts.all();
        let names = all.iter().flat_map(|host| daemons_of(host));
        let names = names.filter(|name| ip_in(name).is_none()).map(str::to_owned).collect();
        if resolved.look(names).await {
            cluster.networks.changed();
        }
        tokio::time::sleep(RESOLVE_AGAIN).await;
    }
}

async fn keep_telling(cluster: &Arc<Cluster>, task: &Task, resolved: &Resolved) {
    let mut memory = Memory::default();
    loop {
        let tell_all = async {
            round(cluster, resolved, &mut memory).await?;
            Ok("told the hosts what has changed".to_owned())
        };
        task.round(tell_all).await;
        tokio::select! {
            () = cluster.networks.until_changed() => {}
            () = tokio::time::sleep(cluster.timing.monitor) => {}
        }
    }
}

async fn round(
    cluster: &Arc<Cluster>,
    resolved: &Resolved,
    memory: &mut Memory,
) -> Result<(), Problem> {
    let networks = all(cluster).await?;
    memory.places.retain(|vm, _| cluster.index.of_vm(vm).is_some());
    let able: Vec<Arc<HostLink>> =
        cluster.hosts.all().into_iter().filter(|host| host.addresses.tunnel.is_some()).collect();
    memory.gateways.note(cluster, &able);
    let owners = publish::owners(cluster);
    let mut here = Vec::new();
    for network in networks {
        // One that was deleted just now, for example, holds up no other.
        match spread(cluster, memory, network, &able, &owners).await {
            Ok(spread) => here.push(spread),
            Err(problem) => tracing::warn!("a network's hosts are not known: {problem}"),
        }
    }
    // Those without tunnels too: no guest in a user network reaches a host.
    let all = cluster.hosts.all();
    for host in &all {
        let wanted = match wanted_of(cluster, resolved, host, &here, &able).await {
            Ok(wanted) => wanted,
            Err(problem) => {
                tracing::warn!("host {} is not told of networks: {problem}", host.id);
                continue;
            }
        };
        if let Some(made_ms) = memory.sent.begin(&host.id, &wanted, now_ms()) {
            let wanted = HostNetworks { made_ms, ..wanted };
            let sent = Arc::clone(&memory.sent);
            tokio::spawn(send(Arc::clone(cluster), sent, Arc::clone(host), wanted));
        }
    }
    for host in memory.sent.hosts() {
        if all.iter().all(|known| known.id != host) {
            memory.sent.forget(&host);
        }
    }
    Ok(())
}

async fn send(cluster: Arc<Cluster>, sent: Arc<Sent>, host: Arc<HostLink>, networks: HostNetworks) {
    let result = host.agent.put::<NetworksKnown>("/v1/networks", &networks).await;
    if let Err(problem) = &result {
        // The host says in its report what it can't do.
        tracing::debug!("host {} was not told of networks: {problem}", host.id);
    }
    let has_answered = result.is_ok();
    if !sent.end(&host.id, networks, result.ok()) && has_answered {
        let set_back = cluster.clock.seen().last_jump.filter(|jump| !jump.is_ahead());
        let why = match set_back {
            Some(jump) => clock::in_words(jump),
            None => {
                "another controller has told the host, or the clock of an earlier one was ahead"
                    .to_owned()
            }
        };
        tracing::warn!("host {} knows of networks what was made later: {why}", host.id);
    }
    // Something may have changed meanwhile. A host that does not answer is asked again later.
    if has_answered {
        cluster.networks.changed();
    }
}

/// A network with the hosts that have a part of it.
struct Spread {
    network: NetworkRecord,
    members: Vec<Member>,
    published: Vec<Published>,
    hosts: BTreeSet<HostId>,
}

/// Where the VMs of a network are. Chooses another gateway if it has none that answers and can be one.
async fn spread(
    cluster: &Cluster,
    memory: &mut Memory,
    network: NetworkRecord,
    able: &[Arc<HostLink>],
    owners: &BTreeMap<publish::Port, JobId>,
) -> Result<Spread, Problem> {
    let mut spread = locate(cluster, &mut memory.places, network, owners);
    let answers = |host: &HostId| {
        able.iter().any(|able| able.id == *host) && cluster.hosts.state(host) == HostState::Up
    };
    let Spread { network, members, hosts, .. } = &spread;
    let changed = memory.gateways.see_to(cluster, network, members, hosts, answers).await?;
    if let Some(changed) = changed {
        spread.network = changed;
    }
    if !spread.hosts.is_empty() && spread.network.job.is_none() {
        spread.hosts.extend(spread.network.gateway.clone());
    }
    Ok(spread)
}

/// The VMs of a network, the ports that they publish, and the hosts at which they are or come to be.
fn locate(
    cluster: &Cluster,
    places: &mut BTreeMap<VmId, HostId>,
    network: NetworkRecord,
    owners: &BTreeMap<publish::Port, JobId>,
) -> Spread {
    let moves = cluster.unfinished_migrations();
    let jobs = cluster.unfinished_jobs();
    let mut spread =
        Spread { network, members: Vec::new(), published: Vec::new(), hosts: BTreeSet::new() };
    for record in jobs {
        let Some(card) = &record.card else { continue };
        if card.network != spread.network.name || card.vni != spread.network.vni {
            continue;
        }
        let vm = vm_of(&record.job.id);
        let before = places.get(&vm).cloned();
        let host = place(&cluster.hosts.seen(&vm), &record, &moves, before.as_ref());
        match &host {
            Some(host) => drop(places.insert(vm.clone(), host.clone())),
            None => drop(places.remove(&vm)),
        }
        let moved = moves.iter().filter(|moved| moved.migration.vm == vm);
        let ends = moved.flat_map(|moved| [&moved.migration.from, &moved.migration.to]);
        spread.hosts.extend(ends.chain(&host).chain(&record.job.host).cloned());
        let own = publish::own(owners, &record.job.id, &record.job.spec.publish);
        let address = card.address;
        spread.published.extend(own.map(|publish| Published { publish: *publish, address }));
        spread.members.push(Member { vm, address, host });
    }
    spread
}

/// Where a VM is, by what the hosts say at which it may be; `before`: where it was in the last round.
fn place(
    seen: &[(HostId, VmReport)],
    record: &JobRecord,
    moves: &[Arc<MigrationRecord>],
    before: Option<&HostId>,
) -> Option<HostId> {
    let own = moves.iter().map(|moved| &moved.migration);
    let own = own.filter(|migration| migration.vm == vm_of(&record.job.id));
    let mut known: BTreeSet<&HostId> = own.flat_map(|moved| [&moved.from, &moved.to]).collect();
    // A move may be over, and its job's record may not say so yet.
    known.extend(record.job.host.iter().chain(before));
    // Others say nothing of this VM that counts: it never was there.
    let is_of_this_run = |(host, report): &&(HostId, VmReport)| {
        let start = report.spec.start;
        let is_of_this = start.submitted_ms == record.job.submitted_ms;
        known.contains(host) && is_of_this && start.run <= record.restarts
    };
    let is_here = |status| {
        !matches!(
            status,
            VmStatus::Starting | VmStatus::Incoming | VmStatus::Migrated | VmStatus::Gone
        )
    };
    let here = seen.iter().filter(is_of_this_run).filter(|(_, report)| is_here(report.status));
    let Some((host, report)) = here.max_by_key(|(_, report)| report.spec.start) else {
        return record.job.host.clone();
    };
    let sends = report.migration.as_ref().filter(|own| own.phase == MigrationPhase::Switching);
    let to = sends.and_then(|own| {
        let known = moves.iter().find(|moved| moved.migration.id == own.migration)?;
        Some(known.migration.to.clone())
    });
    Some(to.unwrap_or_else(|| host.clone()))
}

/// All that a host has to do.
async fn wanted_of(
    cluster: &Cluster,
    resolved: &Resolved,
    host: &HostLink,
    networks: &[Spread],
    able: &[Arc<HostLink>],
) -> Result<HostNetworks, Problem> {
    let here: Vec<&Spread> =
        networks.iter().filter(|spread| spread.hosts.contains(&host.id)).collect();
    if here.is_empty() {
        // Guests in user networks don't reach the hosts either.
        return Ok(HostNetworks { hosts: addresses(cluster, resolved), ..HostNetworks::default() });
    }
    let others: BTreeSet<&HostId> = here.iter().flat_map(|spread| &spread.hosts).collect();
    let mut peers = Vec::new();
    for other in able.iter().filter(|other| others.contains(&other.id) && other.id != host.id) {
        let Some(end) = other.addresses.tunnel.clone() else { continue };
        let address = tunnel_address(cluster, &other.id).await?;
        peers.push(TunnelPeer { host: other.id.clone(), address, end });
    }
    let networks = here.iter().map(|spread| HostNetwork {
        name: spread.network.name.clone(),
        vni: spread.network.vni,
        subnet: spread.network.subnet,
        mtu: spread.network.mtu,
        nat: spread.network.nat,
        gateway: spread.network.gateway.clone(),
        members: spread.members.clone(),
        published: spread.published.clone(),
    });
    Ok(HostNetworks {
        made_ms: 0,
        address: Some(tunnel_address(cluster, &host.id).await?),
        peers,
        networks: networks.collect(),
        hosts: addresses(cluster, resolved),
    })
}

/// The addresses of the cluster's hosts: at which they have their daemons, those of their other interfaces, and this machine's.
fn addresses(cluster: &Cluster, resolved: &Resolved) -> Vec<IpAddr> {
    let all = cluster.hosts.all();
    let reported = all.iter().flat_map(|host| cluster.hosts.interfaces(&host.id)).map(IpAddr::V4);
    let own = nix::ifaddrs::getifaddrs().into_iter().flatten();
    let own = own.filter_map(|interface| Some(interface.address?.as_sockaddr_in()?.ip().into()));
    let of_daemons = |host: &Arc<HostLink>| {
        daemons_of(host)
            .into_iter()
            .flat_map(|at| match ip_in(at) {
                Some(ip) => vec![ip],
                None => resolved.of(at),
            })
            .collect::<Vec<_>>()
    };
    let ips = all.iter().flat_map(of_daemons);
    let ips: BTreeSet<IpAddr> = ips.chain(reported).chain(own).collect();
    ips.into_iter().filter(|ip| !ip.is_loopback()).collect()
}

/// Where a host has its daemons: addresses, or names.
fn daemons_of(host: &HostLink) -> [&str; 3] {
    let addresses = &host.addresses;
    [&addresses.agent_url, &addresses.volume_url, &addresses.nbd_addr].map(|address| {
        let authority = authority_of(address).unwrap_or(address);
        authority.rsplit_once(':').map_or(authority, |(at, _)| at)
    })
}

fn ip_in(text: &str) -> Option<IpAddr> {
    text.trim_matches(['[', ']']).parse().ok()
}

/// Whether a report says something of a VM in a tenant's network.
pub fn concerns(report: &VmReport) -> bool {
    report.spec.network.card().is_some()
}

/// As [`place`], for the tests.
#[cfg(test)]
pub fn place_of(
    seen: &[(HostId, VmReport)],
    record: &JobRecord,
    moves: &[Arc<MigrationRecord>],
    before: Option<&HostId>,
) -> Option<HostId> {
    place(seen, record, moves, before)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn hosts_that_are_known_by_name_have_addresses() {
        let resolved = Resolved::default();
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        assert!(resolved.look(names(&["localhost", "no-such-host.invalid"])).await);
        assert!(resolved.of("localhost").iter().any(IpAddr::is_loopback));
        assert!(resolved.of("no-such-host.invalid").is_empty());
        assert!(!resolved.look(names(&["localhost"])).await, "it is known already");
        resolved.look(BTreeSet::new()).await;
        assert!(resolved.of("localhost").is_empty(), "no host has the name any more");
    }
}
