//! Which ports VMs may publish. The host that has a network's gateway publishes them, so a port is one VM's in the whole
//! cluster: the gateways of all networks may come to one host.

use std::collections::{BTreeMap, BTreeSet};

use perigee_http::authority_of;
use perigee_model::job::JobSpec;
use perigee_model::limits::PUBLISHED_OF_TENANT;
use perigee_model::network::{Protocol, Publish};
use perigee_model::tenant::{DEFAULT_TENANT, tenant_of};
use perigee_model::{JobId, Problem};

use super::NetworkRecord;
use crate::cluster::Cluster;
use crate::records::vm_of;

/// A port of a host.
pub type Port = (Protocol, u16);

fn port(publish: &Publish) -> Port {
    (publish.protocol, publish.outside)
}

/// # Errors
/// `Invalid` or `Forbidden` if a VM in this network can't publish what the file says, `Conflict` if another one does.
pub fn check(cluster: &Cluster, spec: &JobSpec, network: &NetworkRecord) -> Result<(), Problem> {
    let Some(first) = spec.publish.first() else { return Ok(()) };
    let what = |publish: &Publish| format!("can't publish port {}", publish.outside);
    if !network.nat {
        let why = format!("network {} has no way out", network.name);
        return Err(
            Problem::invalid(what(first), why).next("use a network that was made with --nat")
        );
    }
    let allowed = cluster.settings.publish_ports;
    let daemons = of_daemons(cluster);
    let owners = owners(cluster);
    let tenant = tenant_of(&spec.name);
    let own = owners.values().filter(|owner| tenant_of(owner.as_str()) == tenant).count();
    PUBLISHED_OF_TENANT.check(own + spec.publish.len()).map_err(|error| {
        let problem = error.problem(what(first));
        problem.next("delete VMs or cancel jobs that publish ports, or publish fewer")
    })?;
    for publish in &spec.publish {
        if tenant != DEFAULT_TENANT && !allowed.contains(publish.outside) {
            let why = format!("tenants may publish the ports {allowed}");
            return Err(Problem::forbidden(what(publish), why).next(
                "use one of these; an operator allows others with `perigee controller run --publish-ports`",
            ));
        }
        if daemons.contains(&port(publish)) {
            let why = "the cluster's hosts have it themselves";
            return Err(Problem::conflict(what(publish), why).next("use another port"));
        }
        if let Some(owner) = owners.get(&port(publish)) {
            let why = match tenant_of(owner.as_str()) == tenant {
                true => format!("VM {} publishes it", vm_of(owner)),
                false => "another VM publishes it".to_owned(),
            };
            return Err(Problem::conflict(what(publish), why).next("use another port"));
        }
    }
    Ok(())
}

/// Whose each published port is: of several that came at once the first one's.
pub fn owners(cluster: &Cluster) -> BTreeMap<Port, JobId> {
    let mut jobs = cluster.unfinished_jobs();
    jobs.retain(|record| !record.job.spec.publish.is_empty());
    jobs.sort_by_key(|record| (record.job.submitted_ms, record.job.id.clone()));
    let mut owners = BTreeMap::new();
    for record in jobs {
        for publish in &record.job.spec.publish {
            owners.entry(port(publish)).or_insert_with(|| record.job.id.clone());
        }
    }
    owners
}

/// What this job publishes that is not another one's.
pub fn own<'a>(
    owners: &BTreeMap<Port, JobId>,
    job: &JobId,
    publish: &'a [Publish],
) -> impl Iterator<Item = &'a Publish> {
    publish.iter().filter(move |one| owners.get(&port(one)) == Some(job))
}

/// Ports of the daemons of all hosts, and of the controller, which may run at any of them. While such a daemon starts again, nobody
/// else gets its clients.
fn of_daemons(cluster: &Cluster) -> BTreeSet<Port> {
    const SSH: u16 = 22;
    let number = |text: &str| -> Option<u16> {
        let authority = authority_of(text).unwrap_or(text);
        authority.rsplit_once(':')?.1.parse().ok()
    };
    let hosts = cluster.hosts.all();
    let all = hosts.iter().map(|host| &host.addresses).flat_map(|addresses| {
        let own = [&addresses.agent_url, &addresses.volume_url, &addresses.nbd_addr];
        let tunnel = addresses.tunnel.as_ref().and_then(|end| number(&end.endpoint));
        let own = own.into_iter().filter_map(|text| Some((Protocol::Tcp, number(text)?)));
        own.chain(tunnel.map(|port| (Protocol::Udp, port))).collect::<Vec<_>>()
    });
    let doors = cluster.settings.own_ports.iter().copied();
    all.chain(doors.chain([SSH]).map(|port| (Protocol::Tcp, port))).collect()
}
