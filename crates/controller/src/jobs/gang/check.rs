//! Which gangs are refused when they are submitted, and what their records begin with.

use perigee_model::Problem;
use perigee_model::job::{JobSpec, Start};
use perigee_model::vm::NetworkKind;
use perigee_planner::queue::Demand;

use crate::cluster::{Cluster, capacity};
use crate::records::{Gang, JobRecord, Kind};
use crate::{level, networks};

/// Refuses a gang that the cluster's hosts have no room for, even if nothing else runs. A host that has not said how large it is
/// may be large enough.
///
/// # Errors
/// `Invalid`, with what each host has room for.
pub fn check(cluster: &Cluster, spec: &JobSpec) -> Result<(), Problem> {
    if !spec.is_gang() {
        return Ok(());
    }
    let demand = Demand { cpus: spec.cpus, memory_bytes: spec.memory_bytes };
    let (mut most, mut each) = (0_u32, Vec::new());
    for host in cluster.hosts.all() {
        let may_start = match &spec.start {
            Start::Anywhere => true,
            Start::Site(site) => host.addresses.site == *site,
            Start::Host(id) => host.id == *id,
        };
        if !may_start {
            continue;
        }
        let Some(report) = cluster.hosts.report(&host.id) else { return Ok(()) };
        let holds = capacity(&report).holds(demand);
        let holds = if spec.rules.apart.is_some() { holds.min(1) } else { holds };
        most = match spec.rules.together {
            Some(_) => most.max(holds),
            None => most.saturating_add(holds),
        };
        each.push(format!("{} {holds}", host.id));
    }
    if each.is_empty() || most >= spec.count {
        return Ok(());
    }
    let why = format!(
        "count: it needs {} VMs with {} CPUs and {} of memory each, all at once{}; {} where it may start {} room for {most}: {}",
        spec.count,
        spec.cpus,
        perigee_model::units::format_bytes(spec.memory_bytes),
        if spec.rules.apart.is_some() { ", one at each host" } else { "" },
        if spec.rules.together.is_some() { "the largest host" } else { "the hosts" },
        if spec.rules.together.is_some() { "has" } else { "have" },
        each.join(", "),
    );
    Err(Problem::invalid(format!("job {}", spec.name), why)
        .next("ask for fewer or smaller VMs, let it start at more hosts, or add hosts"))
}

/// Refuses volumes of some ranks only, as long as the version before may come back.
///
/// # Errors
/// `Conflict` before the end of the upgrade.
pub async fn check_ranks(cluster: &Cluster, spec: &JobSpec) -> Result<(), Problem> {
    let has_ranks = spec.volumes.iter().any(|volume| !volume.ranks.is_empty());
    if !has_ranks || level::in_force(&cluster.records).await? >= level::DATA_OF_GANGS {
        return Ok(());
    }
    let why = "ranks of volumes: the version before this one does not know them, and may come back";
    Err(Problem::conflict(format!("job {}", spec.name), why)
        .next("end the upgrade first: perigee upgrade finish"))
}

/// Refuses a gang whose network has fewer addresses than it has VMs.
///
/// # Errors
/// `Invalid`; `NotFound` if there is no such network.
pub async fn check_network(cluster: &Cluster, spec: &JobSpec) -> Result<(), Problem> {
    let Some(name) = spec.network.name().filter(|_| spec.is_gang()) else { return Ok(()) };
    let subnet = networks::find(cluster, name).await?.subnet;
    let all = subnet.of_vms().len();
    if all >= spec.count as usize {
        return Ok(());
    }
    let why = format!(
        "network: {name} has {all} addresses for VMs ({subnet}), and it needs {}",
        spec.count
    );
    Err(Problem::invalid(format!("job {}", spec.name), why)
        .next("name a larger network, or none: then it gets one of its own"))
}

/// Makes the new record of a job that of a gang, if it has several VMs.
///
/// # Errors
/// Never: a job's id is a name.
pub fn prepare(record: &mut JobRecord) -> Result<(), Problem> {
    let spec = &mut record.job.spec;
    if !spec.is_gang() {
        return Ok(());
    }
    if matches!(spec.network, NetworkKind::None | NetworkKind::Default) {
        spec.network = NetworkKind::Cluster(networks::own_name(&record.job.id)?);
    }
    record.kind = Kind::Gang(Gang::default());
    Ok(())
}
