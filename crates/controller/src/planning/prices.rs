//! What live migrations would cost. Whoever asks for many gathers once what all of them have in common.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use perigee_model::job::Link;
use perigee_model::{HostId, Problem, SiteId};
use perigee_planner::{Cluster as Facts, Dirty, HostFacts, LinkFacts, MoveCost, PastMove, Refused};

use super::history::history;
use super::{
    as_its_guest_sees, at_its_host_s, data_disks, dirty_rate_of, host_facts, links, past_moves,
    shared_links,
};
use crate::cluster::{Cluster, Lane, Used};
use crate::records::JobRecord;

/// What all migrations have in common that are predicted at one time.
pub struct Prices<'a> {
    cluster: &'a Cluster,
    used: BTreeMap<HostId, Used>,
    lanes: BTreeSet<Lane>,
    past_moves: Arc<Vec<PastMove>>,
    /// Of each ordered pair of sites one link that is measured: it counts for hosts that have not measured theirs.
    of_sites: BTreeMap<(SiteId, SiteId), Link>,
}

/// The same for one VM, with its ways to some hosts.
pub struct VmPrices {
    from: HostId,
    facts: Facts,
    memory_bytes: u64,
    dirty: Dirty,
}

impl<'a> Prices<'a> {
    pub fn of(cluster: &'a Cluster) -> Self {
        Self {
            cluster,
            used: cluster.index.used(),
            lanes: shared_links::used_lanes(cluster, None),
            past_moves: Arc::new(past_moves(cluster)),
            of_sites: of_sites(cluster),
        }
    }

    /// Gathers what a VM's moves from one host to each of the others depend on.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn of_vm(
        &self,
        record: &JobRecord,
        from: &HostId,
        to: &[HostId],
    ) -> Result<VmPrices, Problem> {
        let cluster = self.cluster;
        let history = history(cluster, &record.job.spec).await?;
        let measured = dirty_rate_of(cluster, record, history.dirty_bytes_per_s);
        let here = record.meter.totals.since(&record.meter.at_arrival);
        let placement = record.placement.as_ref();
        let disks = placement.map(|placement| data_disks(placement, &here)).unwrap_or_default();
        let dirty = Dirty::of_running(measured, &disks, at_its_host_s(cluster, record));
        let facts = self.facts(record, from, to);
        let memory_bytes = cluster.index.demand_to_move(record).memory_bytes;
        Ok(VmPrices { from: from.clone(), facts, memory_bytes, dirty })
    }

    /// These hosts and those of the VM's disks, as far as they are up, and the links from the first one to the others and from all of them to
    /// the disks.
    fn facts(&self, record: &JobRecord, from: &HostId, to: &[HostId]) -> Facts {
        let cluster = self.cluster;
        let vm = record.job.vm.as_ref();
        // A VM's own use of a link for its disks does not limit its own migration.
        let is_far = record.disks_needed().any(|disk| disk.home != *from);
        let own = is_far.then(|| shared_links::used_lanes(cluster, vm));
        let lanes = own.as_ref().unwrap_or(&self.lanes);
        let places: BTreeSet<&HostId> = std::iter::once(from).chain(to).collect();
        let homes: BTreeSet<&HostId> = record.disks_needed().map(|disk| &disk.home).collect();
        let hosts = places.union(&homes);
        let mut hosts: Vec<HostFacts> =
            hosts.filter_map(|host| host_facts(cluster, host, &self.used, vm)).collect();
        hosts.iter_mut().for_each(|host| as_its_guest_sees(host, record));
        // The destination has probed the direction from the source to the destination.
        let mut pairs: BTreeSet<(&HostId, &HostId)> = to.iter().map(|to| (to, from)).collect();
        pairs.extend(places.iter().flat_map(|at| homes.iter().map(|home| (*at, *home))));
        pairs.retain(|(at, home)| at != home);
        let links = pairs.into_iter().flat_map(|(at, home)| {
            let sites = [at, home].map(|host| shared_links::site_of(cluster, host));
            let [Some(from_site), Some(to_site)] = sites else { return Vec::new() };
            let sites = (from_site, to_site);
            let links = cluster.links.get(at, home).into_iter();
            let links = links.chain(self.of_sites.get(&sites).cloned());
            let facts = links.map(|link| LinkFacts {
                from_site: sites.0.clone(),
                to_site: sites.1.clone(),
                moves: shared_links::for_moves(cluster, lanes, &link.to, &link.from),
                from: link.from,
                to: link.to,
                probe: link.probe,
                blocks: link.blocks,
            });
            facts.collect()
        });
        Facts {
            hosts: hosts.into(),
            links: links.collect(),
            probe_request_bytes: u64::from(links::PROBE_REQUEST_BYTES),
            past_moves: Arc::clone(&self.past_moves),
        }
    }
}

impl VmPrices {
    /// The hosts and links that these prices depend on, and those to the VM's disks.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Predicts the migration as [`perigee_planner::consider`] does, and chooses how the memory is sent.
    ///
    /// # Errors
    /// Why it can't be predicted.
    pub fn to(&self, to: &HostId) -> Result<MoveCost, Refused> {
        perigee_planner::move_cost(&self.facts, &self.from, to, self.memory_bytes, self.dirty)
    }
}

fn is_measured(link: &Link) -> bool {
    link.probe.rtt_ms >= 0.0 && link.probe.rate_bytes_per_s > 0
}

fn of_sites(cluster: &Cluster) -> BTreeMap<(SiteId, SiteId), Link> {
    let mut of_sites = BTreeMap::new();
    for link in cluster.links.all().into_iter().filter(is_measured) {
        let sites = [&link.from, &link.to].map(|host| shared_links::site_of(cluster, host));
        if let [Some(from), Some(to)] = sites {
            of_sites.entry((from, to)).or_insert(link);
        }
    }
    of_sites
}

/// The same for one migration.
///
/// # Errors
/// If the store fails.
pub async fn move_cost(
    cluster: &Cluster,
    record: &JobRecord,
    from: &HostId,
    to: &HostId,
) -> Result<Result<MoveCost, Refused>, Problem> {
    let prices = Prices::of(cluster).of_vm(record, from, std::slice::from_ref(to)).await?;
    Ok(prices.to(to))
}
