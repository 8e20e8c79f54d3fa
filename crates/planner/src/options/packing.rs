//! Sites whose hosts are filled one after the other.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use perigee_model::{HostId, SiteId};

use super::alike::vcpus_per_cpu;
use super::stays::Stay;
use crate::facts::HostFacts;

/// A job may take so many times longer at a fuller host. Measured times of equal hosts differ by some percent.
pub(super) const AS_FAST: f64 = 1.1;

/// The fullest host comes first.
pub(super) fn order(host: &HostFacts) -> (Reverse<u64>, u64, &HostId) {
    (Reverse(vcpus_per_cpu(host)), host.memory_free_bytes, &host.id)
}

/// Has the hosts of each site that packs change places among themselves: the fullest one comes first.
pub(super) fn fullest_first<'a, T: Copy>(hosts: &mut [T], of: impl Fn(T) -> &'a HostFacts) {
    let mut sites: BTreeMap<&SiteId, Vec<usize>> = BTreeMap::new();
    for (place, host) in hosts.iter().enumerate().filter(|(_, host)| of(**host).packs) {
        sites.entry(&of(*host).site).or_default().push(place);
    }
    for places in sites.into_values() {
        let mut own: Vec<T> = places.iter().map(|place| hosts[*place]).collect();
        own.sort_by(|a, b| order(of(*a)).cmp(&order(of(*b))));
        for (place, host) in places.into_iter().zip(own) {
            hosts[place] = host;
        }
    }
}

/// At a site that packs: the first host where the job takes hardly longer than at the fastest one. `stays` are in their order.
pub(super) fn fullest_as_fast<'a>(stays: &'a [Stay], best: &'a Stay) -> &'a Stay {
    stays.iter().find(|stay| is_as_fast(stay, best)).unwrap_or(best)
}

/// Whether the one is at the same site as the best one, which packs, and the job takes hardly longer there.
pub(super) fn is_as_fast(stay: &Stay, best: &Stay) -> bool {
    best.packs.is_some()
        && stay.way == best.way
        && stay.packs == best.packs
        && stay.price == best.price
        && stay.refused.is_some() == best.refused.is_some()
        && stay.seconds.total_s <= best.seconds.total_s * AS_FAST
}

#[cfg(test)]
mod tests {
    use perigee_model::job::Start;

    use crate::facts::HostFacts;
    use crate::fixture::{booted_in, cluster, job};
    use crate::{Snapshot, plan};

    /// Where a job without data starts at site `home`, whose hosts have 2 CPUs each and so many vCPUs of VMs.
    fn starts_at(packs: bool, vcpus: [u32; 2], second_boots_in_s: f64) -> String {
        let mut job = job();
        job.start = Start::Site("home".parse().expect("a name"));
        job.volumes.clear();
        let mut cluster = cluster();
        for (host, vcpus) in cluster.hosts.iter_mut().zip(vcpus) {
            (host.packs, host.running_vcpus) = (packs, vcpus);
        }
        // So many that each host is known by its own.
        cluster.hosts[0].boots = vec![booted_in(12.0); 8].into();
        cluster.hosts[1].boots = vec![booted_in(second_boots_in_s); 8].into();
        let snapshot = Snapshot { cluster, job, history: Vec::new(), others: Vec::new() };
        let plan = plan(&snapshot).expect("a plan");
        plan.chosen().expect("a way").start.to_string()
    }

    #[test]
    fn a_site_that_spreads_gives_a_vm_to_the_least_busy_host_and_one_that_packs_to_the_fullest() {
        assert_eq!(starts_at(false, [1, 0], 12.0), "home2");
        assert_eq!(starts_at(true, [1, 0], 12.0), "home1");
        assert_eq!(starts_at(true, [0, 1], 12.0), "home2");
        assert_eq!(starts_at(true, [0, 0], 12.0), "home1", "of equal ones the first");
    }

    #[test]
    fn a_large_site_packs_too() {
        let mut job = job();
        job.start = Start::Site("home".parse().expect("a name"));
        job.volumes.clear();
        let mut cluster = cluster();
        let first = cluster.hosts[0].clone();
        let hosts = (0..40_u32).map(|number| HostFacts {
            id: format!("h{number:02}").parse().expect("a name"),
            packs: true,
            running_vcpus: number % 7,
            ..first.clone()
        });
        cluster.hosts = hosts.collect::<Vec<_>>().into();
        let snapshot = Snapshot { cluster, job, history: Vec::new(), others: Vec::new() };
        let plan = plan(&snapshot).expect("a plan");
        let start = &plan.chosen().expect("a way").start;
        // With three vCPUs of others at its two CPUs, the job would take longer.
        assert_eq!(start.to_string(), "h02", "the first of those with two vCPUs");
    }

    #[test]
    fn a_site_packs_only_where_the_job_takes_hardly_longer() {
        assert_eq!(starts_at(true, [0, 1], 13.0), "home2");
        assert_eq!(starts_at(true, [0, 1], 600.0), "home1", "it boots much later there");
    }
}
