//! Networks of tenants, and who has which address in them. [`sync`] says what each host has to do for them.
//!
//! An address is given when a VM is staged first, and stands in the VM's record. The VM keeps it over moves and
//! starts, and it is free again when the record is final. The search for the next one goes on where the last one ended, so
//! what still knows a VM that is gone does not meet another one at its address.

mod gateways;
mod publish;
mod sync;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;

use perigee_model::ids::Owned as _;
use perigee_model::job::{Job, JobSpec, Start};
use perigee_model::limits::{NETWORKS, TUNNELS, VNIS};
use perigee_model::network::{
    BridgeCard, BridgeName, Card, ClusterNetwork, NetworkVm, NewNetwork, Subnet, TUNNEL_NETWORK,
    guest_mtu,
};
use perigee_model::tenant::{SEPARATOR, tenant_of};
use perigee_model::vm::{HostReport, NetworkKind, VmNetwork};
use perigee_model::{HostId, JobId, NetworkName, Problem, ProblemKind};
use serde::{Deserialize, Serialize};

use crate::clock::now_ms;
use crate::cluster::{Cluster, HostLink};
use crate::records::{JobRecord, Owned, vm_of};

#[cfg(test)]
pub use sync::place_of;
pub use sync::{concerns, keep};

const NETWORKS_PREFIX: &str = "networks/";
const LAST_VNI: &str = "network_numbers/last";
const TUNNELS_PREFIX: &str = "tunnels/";
/// The addresses of a gang's own network. Networks may have the same: they never meet.
const OWN_SUBNET: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 0);
const OWN_PREFIX_BITS: u8 = 24;
/// A job's id ends with at least so many.
const JOB_NUMBER_DIGITS: usize = 4;
/// Of Ethernet, for as long as no host has said its own.
const MTU_DEFAULT: u16 = 1500;

/// `networks/NETWORK`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkRecord {
    pub name: NetworkName,
    pub subnet: Subnet,
    pub nat: bool,
    pub vni: u16,
    /// It does not change: guests are told it once.
    pub mtu: u16,
    pub made_ms: u64,
    /// The host that has the gateway's address, as long as it answers.
    pub gateway: Option<HostId>,
    /// The number of the address that was given last.
    pub last: u16,
    /// The gang that it was made for, and that removes it.
    pub job: Option<JobId>,
}

/// `tunnels/HOST`: the number of a host's address in the tunnels.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct TunnelRecord {
    number: u16,
}

fn key(name: &NetworkName) -> String {
    format!("{NETWORKS_PREFIX}{name}")
}

fn unknown(name: &NetworkName) -> Problem {
    Problem::not_found(format!("network {name}"), "there is no network with this name")
        .next("`perigee network list` shows the networks")
}

/// # Errors
/// `NotFound`.
pub async fn find(cluster: &Cluster, name: &NetworkName) -> Result<NetworkRecord, Problem> {
    cluster.records.read(&key(name)).await?.ok_or_else(|| unknown(name))
}

/// # Errors
/// `NotFound` if the card is to be in a network that is not there, `Conflict` if that is a job's own; another if its ports
/// can't be published.
pub async fn check(cluster: &Cluster, spec: &JobSpec) -> Result<(), Problem> {
    let Some(name) = spec.network.name() else { return Ok(()) };
    let network = find(cluster, name).await?;
    if let Some(job) = &network.job {
        let why = format!("network: {name} is job {job}'s own, and goes with it");
        return Err(Problem::conflict(format!("can't use it for {}", spec.name), why)
            .next("make a network with `perigee network create`, and name it"));
    }
    publish::check(cluster, spec, &network)
}

/// Whether a VM that comes with its card fits the network as it is now. The caller has its turn.
///
/// # Errors
/// `Conflict` if another one has the address, or the network of this name is another one; `NotFound` if there is none.
pub async fn check_card(cluster: &Cluster, record: &JobRecord) -> Result<(), Problem> {
    let Some(card) = &record.card else { return Ok(()) };
    let (network, id) = (find(cluster, &card.network).await?, &record.job.id);
    let refused =
        |why: String| Err(Problem::conflict(format!("can't take up the card of {id}"), why));
    if (network.vni, network.subnet) != (card.vni, card.subnet) {
        return refused(format!(
            "network {} is not the one that the card was made for",
            network.name
        ));
    }
    match network.subnet.number_of(card.address) {
        number if taken(cluster, &network).contains(&number) => refused(format!(
            "another VM of network {} has its address {}",
            network.name, card.address
        )),
        _ => Ok(()),
    }
}

async fn all(cluster: &Cluster) -> Result<Vec<NetworkRecord>, Problem> {
    cluster.records.list(NETWORKS_PREFIX).await
}

/// # Errors
/// `Conflict` if the tenant has a network of this name; `Invalid` if there are too many, or if a job may have this name.
pub async fn create(cluster: &Cluster, new: NewNetwork) -> Result<ClusterNetwork, Problem> {
    if is_of_a_job(new.name.full()) {
        let why = "it ends as a job's name does, and a job with several VMs gives its name to its network";
        return Err(Problem::invalid(format!("can't create network {}", new.name), why)
            .next("choose a name that does not end with `-` and a number of four digits or more"));
    }
    create_for(cluster, new, None).await
}

/// `job`: it is that job's own, and goes with it.
async fn create_for(
    cluster: &Cluster,
    new: NewNetwork,
    job: Option<&JobId>,
) -> Result<ClusterNetwork, Problem> {
    let name = &new.name;
    let what = || format!("can't create network {name}");
    let short = name.full().rsplit(SEPARATOR).next().unwrap_or_default();
    if NetworkKind::WORDS.contains(&short) {
        let why = format!("{short:?} means something else where a card's network is named");
        return Err(Problem::invalid(what(), why).next("choose another name"));
    }
    let _turn = cluster.networks.turn().await;
    let others = all(cluster).await?;
    let tenant = tenant_of(name.full());
    // A gang's own network goes with it: there are no more of them than gangs that have hosts.
    let of_people = others.iter().filter(|other| other.job.is_none());
    let own = of_people.filter(|other| tenant_of(other.name.full()) == tenant).count();
    if job.is_none() && others.iter().all(|other| other.name != *name) {
        NETWORKS.check(own + 1).map_err(|error| error.problem(what()))?;
    }
    let count = others.len() + 1;
    #[cfg(test)]
    let count = count + cluster.networks.counted.load(std::sync::atomic::Ordering::SeqCst);
    if let Err(error) = VNIS.check(count) {
        *cluster.networks.full() = Some(error.to_string());
        return Err(error.problem(what()));
    }
    let ends = cluster.hosts.all();
    let underlay = ends.iter().filter_map(|host| Some(host.addresses.tunnel.as_ref()?.mtu)).min();
    let record = NetworkRecord {
        name: name.clone(),
        subnet: new.subnet,
        nat: new.nat,
        vni: give_vni(cluster, others.iter().map(|other| other.vni).collect()).await?,
        mtu: guest_mtu(underlay.unwrap_or(MTU_DEFAULT)),
        made_ms: now_ms(),
        gateway: None,
        last: 0,
        job: job.cloned(),
    };
    if !cluster.records.create_asked(&key(name), &record).await? {
        let why = "there is a network with this name already";
        return Err(Problem::conflict(what(), why).next("choose another name"));
    }
    tracing::info!("network {name} has the number {}", record.vni);
    Ok(view(cluster, record))
}

/// The next number after the last one that was given: what a deleted network has left at a host that does not answer
/// meets no other network.
async fn give_vni(cluster: &Cluster, taken: BTreeSet<u16>) -> Result<u16, Problem> {
    let next = |last: Option<u16>| next_vni(last.unwrap_or_default(), &taken);
    cluster.records.update(LAST_VNI, next).await
}

fn next_vni(last: u16, taken: &BTreeSet<u16>) -> u16 {
    let mut next = (last..=u16::MAX).skip(1).chain(1..=u16::MAX);
    next.find(|vni| !taken.contains(vni)).unwrap_or(u16::MAX)
}

/// # Errors
/// `NotFound`; `Conflict` while VMs use it.
pub async fn delete(cluster: &Cluster, name: &NetworkName) -> Result<(), Problem> {
    let _turn = cluster.networks.turn().await;
    find(cluster, name).await?;
    let mut users = users(cluster, name);
    if let Some(first) = users.next() {
        let more = match users.count() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let why = format!("{}{more} use it", vm_of(&first.job.id));
        return Err(Problem::conflict(format!("can't delete network {name}"), why)
            .next("delete these VMs first, or wait until their jobs have ended"));
    }
    cluster.records.remove(&key(name)).await?;
    cluster.networks.removed();
    Ok(())
}

/// Makes the network of a gang that has named none, unless it is there. It has the gang's name.
///
/// # Errors
/// `Conflict` if somebody else has made a network with this name; otherwise as [`create`].
pub async fn ensure_own(cluster: &Cluster, job: &JobId) -> Result<(), Problem> {
    let name = own_name(job)?;
    if let Some(found) = cluster.records.read::<NetworkRecord>(&key(&name)).await? {
        if found.job.as_ref() == Some(job) {
            return Ok(());
        }
        let why = format!("there is a network {name} that somebody else has made");
        return Err(Problem::conflict(format!("can't start job {job}"), why)
            .next("name the network of the job in its file, and submit it again"));
    }
    let subnet = Subnet::new(OWN_SUBNET, OWN_PREFIX_BITS)
        .map_err(|e| Problem::internal(format!("can't make network {name}"), e))?;
    let new = NewNetwork { name, subnet, nat: false };
    let made = create_for(cluster, new, Some(job)).await.map(drop);
    // There are too many: the job waits until one goes.
    made.map_err(|problem| match problem.kind {
        ProblemKind::Invalid => Problem { kind: ProblemKind::NoSpace, ..problem },
        _ => problem,
    })
}

/// Removes it. A gang whose VMs have all ended calls this; there may be none.
///
/// # Errors
/// If the store fails.
pub async fn remove_own(cluster: &Cluster, job: &JobId) -> Result<(), Problem> {
    let name = own_name(job)?;
    let _turn = cluster.networks.turn().await;
    let found: Option<NetworkRecord> = cluster.records.read(&key(&name)).await?;
    if found.is_some_and(|network| network.job.as_ref() == Some(job)) {
        cluster.records.remove(&key(&name)).await?;
        cluster.networks.removed();
    }
    Ok(())
}

/// The name of a gang's own network.
///
/// # Errors
/// Never: a job's id is a name.
pub fn own_name(job: &JobId) -> Result<NetworkName, Problem> {
    NetworkName::new(job.as_str())
        .map_err(|e| Problem::internal(format!("can't name the network of job {job}"), e))
}

/// Whether it is a gang's own network: only its VMs are in it, it leads nowhere else, and it is only at the hosts of these VMs.
pub fn is_own(name: &NetworkName) -> bool {
    is_of_a_job(name.full())
}

/// Whether a job's id may be like this.
fn is_of_a_job(name: &str) -> bool {
    let number = name.rsplit_once('-').map_or("", |(_, number)| number);
    number.len() >= JOB_NUMBER_DIGITS && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// The VMs that are in a network, or will be.
fn users<'a>(
    cluster: &Cluster,
    name: &'a NetworkName,
) -> impl Iterator<Item = Arc<JobRecord>> + use<'a> {
    let jobs = cluster.unfinished_jobs().into_iter();
    jobs.filter(move |record| record.job.spec.network.name() == Some(name))
}

/// The networks of all tenants.
///
/// # Errors
/// If the store does not answer.
pub async fn list(cluster: &Cluster) -> Result<Vec<ClusterNetwork>, Problem> {
    Ok(all(cluster).await?.into_iter().map(|record| view(cluster, record)).collect())
}

/// # Errors
/// `NotFound`.
pub async fn info(cluster: &Cluster, name: &NetworkName) -> Result<ClusterNetwork, Problem> {
    Ok(view(cluster, find(cluster, name).await?))
}

fn view(cluster: &Cluster, record: NetworkRecord) -> ClusterNetwork {
    let owners = publish::owners(cluster);
    let vms: Vec<NetworkVm> = users(cluster, &record.name)
        .filter(|job| !job.kind.is_gang())
        .map(|job| NetworkVm {
            vm: vm_of(&job.job.id),
            address: job.card.as_ref().map(|card| card.address),
            mac: job.card.as_ref().map(|card| card.mac().to_string()),
            host: job.job.host.clone(),
            publish: publish::own(&owners, &job.job.id, &job.job.spec.publish).copied().collect(),
        })
        .collect();
    ClusterNetwork {
        gateway: record.subnet.gateway(),
        gateway_host: record.gateway.filter(|_| vms.iter().any(|vm| vm.host.is_some())),
        name: record.name,
        subnet: record.subnet,
        nat: record.nat,
        vni: record.vni,
        mtu: record.mtu,
        vms,
    }
}

/// Gives the VM its card, if it is to have one in a tenant's network and has none yet.
///
/// # Errors
/// `NoSpace` if the network has no address left; `NotFound` if it was deleted.
pub async fn give_card(cluster: &Cluster, record: &mut Owned<JobRecord>) -> Result<(), Problem> {
    let Some(name) = record.value.job.spec.network.name().cloned() else { return Ok(()) };
    if record.value.card.is_some() {
        return Ok(());
    }
    let _turn = cluster.networks.turn().await;
    record.value.card = cards(cluster, &name, 1, &record.value.job.id).await?.pop();
    // The index learns it with this, before the next one takes its turn.
    record.save().await
}

/// Cards for so many VMs of a job, or none. The caller has its turn until the index knows whose they are.
///
/// # Errors
/// As [`give_card`].
pub async fn cards(
    cluster: &Cluster,
    name: &NetworkName,
    count: usize,
    job: &JobId,
) -> Result<Vec<Card>, Problem> {
    let network = find(cluster, name).await?;
    let mut taken = taken(cluster, &network);
    lacks(&network, &taken, count, job)?;
    let (mut last, mut numbers) = (network.last, Vec::new());
    while numbers.len() < count {
        let Some(number) = next_number(network.subnet, last, &taken) else { break };
        taken.insert(number);
        numbers.push(number);
        last = number;
    }
    let note = move |old: Option<NetworkRecord>| NetworkRecord {
        last,
        ..old.unwrap_or_else(|| network.clone())
    };
    let network = cluster.records.update(&key(name), note).await?;
    let card = |number| Card {
        network: name.clone(),
        vni: network.vni,
        subnet: network.subnet,
        address: network.subnet.address(number),
        mtu: network.mtu,
    };
    Ok(numbers.into_iter().map(card).collect())
}

/// The numbers of the addresses that VMs have.
fn taken(cluster: &Cluster, network: &NetworkRecord) -> BTreeSet<u16> {
    let number_of = |card: &Card| network.subnet.number_of(card.address);
    let users = users(cluster, &network.name);
    let of_users = users.flat_map(|user| {
        let of_gang = user.kind.gang().into_iter().flat_map(|gang| &gang.cards);
        of_gang.chain(&user.card).map(number_of).collect::<Vec<_>>()
    });
    of_users.collect()
}

/// # Errors
/// `NoSpace` if there are fewer addresses.
fn lacks(
    network: &NetworkRecord,
    taken: &BTreeSet<u16>,
    count: usize,
    job: &JobId,
) -> Result<(), Problem> {
    let (all, subnet) = (network.subnet.of_vms().len(), network.subnet);
    let free = all.saturating_sub(taken.len());
    if free >= count {
        return Ok(());
    }
    let why = format!("of the {all} addresses of {subnet}, {free} are free");
    let what = format!("can't give {count} of them to job {job}");
    Err(Problem::no_space(what, why).next("delete VMs of this network, or use a larger one"))
}

/// Why a gang can't have its network or its addresses now. It then waits without hosts.
pub async fn why_no_cards(cluster: &Cluster, gang: &JobRecord) -> Option<String> {
    let name = gang.job.spec.network.name().filter(|_| gang.kind.is_gang())?;
    let Ok(network) = find(cluster, name).await else {
        // Its own network is made when it has hosts, and has addresses for all.
        own_name(&gang.job.id).ok().filter(|own| own == name)?;
        let why = cluster.networks.full().clone()?;
        return Some(format!("it waits until a network is deleted: {why}"));
    };
    let count = gang.job.spec.count as usize;
    let refused = lacks(&network, &taken(cluster, &network), count, &gang.job.id).err()?;
    Some(format!("{}: {}", refused.what, refused.why))
}

/// The next number after the last one that nobody has.
fn next_number(subnet: Subnet, last: u16, taken: &BTreeSet<u16>) -> Option<u16> {
    let all = subnet.of_vms();
    let (before, after) = (all.clone(), all.clone());
    let mut next = after.filter(|n| *n > last).chain(before.filter(|n| *n <= last));
    next.find(|number| !taken.contains(number))
}

/// What the VM's card is connected to.
///
/// # Errors
/// `Internal` if it has none yet.
pub fn of_vm(record: &JobRecord) -> Result<VmNetwork, Problem> {
    Ok(match kind_of(record) {
        NetworkKind::Default | NetworkKind::None => VmNetwork::None,
        NetworkKind::User => VmNetwork::User,
        NetworkKind::Cluster(_) => VmNetwork::Cluster(record.card.clone().ok_or_else(|| {
            let what = format!("can't start {}", record.job.id);
            Problem::internal(what, "it has no card yet")
        })?),
        NetworkKind::Bridge(bridge) => VmNetwork::Bridge(bridge_card(bridge, &record.job)),
    })
}

/// The same one at all hosts and starts.
fn bridge_card(bridge: BridgeName, job: &Job) -> BridgeCard {
    // FNV-1a: the same for every version of the controller.
    let text = format!("{}\0{}", job.id, job.submitted_ms);
    let hash = text
        .bytes()
        .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    BridgeCard { bridge, number: hash }
}

/// Which card a VM has that was placed. Until then nothing is decided for one of which nothing was said.
pub fn kind_of(record: &JobRecord) -> NetworkKind {
    match &record.job.spec.network {
        NetworkKind::Default => match &record.placement {
            Some(placement) if placement.has_user_card => NetworkKind::User,
            _ => NetworkKind::None,
        },
        said => said.clone(),
    }
}

/// Why no VM with such a card can start at a host, or move there, now; `None` if it can.
pub fn refusal(cluster: &Cluster, host: &HostId, network: &NetworkKind) -> Option<String> {
    let link = cluster.hosts.get(host).ok()?;
    refusal_of(&link, cluster.hosts.report(host).as_deref(), network)
}

/// The same by this report of the host. A host that has not reported yet is refused.
pub fn refusal_of(
    link: &HostLink,
    report: Option<&HostReport>,
    network: &NetworkKind,
) -> Option<String> {
    match network {
        NetworkKind::Default | NetworkKind::None => None,
        NetworkKind::User => match report {
            Some(report) => report.no_user_networks.clone(),
            None => Some("its agent has said nothing of user networks".to_owned()),
        },
        NetworkKind::Bridge(bridge) => {
            let has = report.is_some_and(|report| report.bridges.contains(bridge));
            (!has).then(|| format!("it has no bridge {bridge} that its operator allows (perigee agent run --bridge)"))
        }
        NetworkKind::Cluster(_) => {
            match (&link.addresses.tunnel, report.and_then(|report| report.no_networks.clone())) {
                (_, Some(why)) => Some(why),
                (None, None) => Some("its agent has said nothing of tunnels".to_owned()),
                (Some(_), None) => None,
            }
        }
    }
}

/// What a card needs of its host: [`refusing`] is the same for all networks that need the same.
pub fn needed(network: &NetworkKind) -> String {
    match network {
        NetworkKind::Cluster(_) => "a tunnel".to_owned(),
        other => other.clone().into(),
    }
}

/// The hosts that are up and at which no VM with such a card can be now, each with the reason.
pub fn refusing(cluster: &Cluster, network: &NetworkKind) -> Vec<(HostId, String)> {
    // Most VMs are so, and are asked for one after the other.
    if matches!(network, NetworkKind::Default | NetworkKind::None) {
        return Vec::new();
    }
    let up = cluster.hosts.up().into_iter();
    up.filter_map(|host| Some((host.id.clone(), refusal(cluster, &host.id, network)?))).collect()
}

/// Why a job waits that none of the hosts can take at which it may start. `what` it is that these can't.
pub fn why_blocked(
    cluster: &Cluster,
    start: &Start,
    refusing: &[(HostId, String)],
    what: &str,
) -> Option<String> {
    let first = refusing.first()?;
    let up = cluster.hosts.up();
    let mut allowed = up.iter().filter(|host| match start {
        Start::Anywhere => true,
        Start::Site(site) => host.addresses.site == *site,
        Start::Host(id) => host.id == *id,
    });
    let all_refusing: BTreeSet<&HostId> = refusing.iter().map(|(host, _)| host).collect();
    if !allowed.all(|host| all_refusing.contains(&host.id)) {
        return None;
    }
    let (host, why) = match start {
        Start::Host(id) => refusing.iter().find(|(host, _)| host == id)?,
        _ => first,
    };
    Some(format!("it waits for a host that can {what}; {host} can't: {why}"))
}

/// A removed host's address in the tunnels is free for another one.
pub async fn forget_host(cluster: &Cluster, host: &HostId) -> Result<(), Problem> {
    let _turn = cluster.networks.turn().await;
    cluster.records.remove(&format!("{TUNNELS_PREFIX}{host}")).await
}

/// A host's address in the tunnels. It is given once.
async fn tunnel_address(cluster: &Cluster, host: &HostId) -> Result<Ipv4Addr, Problem> {
    let own = format!("{TUNNELS_PREFIX}{host}");
    if let Some(known) = cluster.records.read::<TunnelRecord>(&own).await? {
        return Ok(TUNNEL_NETWORK.address(known.number));
    }
    let _turn = cluster.networks.turn().await;
    let others: Vec<TunnelRecord> = cluster.records.list(TUNNELS_PREFIX).await?;
    let what = || format!("can't give host {host} a tunnel");
    TUNNELS.check(others.len() + 1).map_err(|error| error.problem(what()))?;
    let taken: BTreeSet<u16> = others.into_iter().map(|other| other.number).collect();
    let free = (1..u16::MAX).find(|number| !taken.contains(number));
    let number = free.ok_or_else(|| Problem::no_space(what(), "all addresses have hosts"))?;
    cluster.records.put(&own, &TunnelRecord { number }).await?;
    Ok(TUNNEL_NETWORK.address(number))
}
