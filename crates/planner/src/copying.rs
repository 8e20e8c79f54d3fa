//! Predicts what it costs to bring a job's data volumes to its VM's host while it runs.
//!
//! A volume's home moves first, and then the new home copies what it lacks. Its writes wait for the switch only. While
//! it is copied, a read waits for the old home if its block is still missing, and that becomes rarer. So a job that
//! hardly waits for its reads hardly notices the copy.
//!
//! The volumes of several VMs come all at the same time. Clones of one volume stand on the same layers, and a layer that is
//! copied to a host is there for all clones at that host ([`copies_of`]). Not counted is what a clone's VM has written since its start: a volume
//! counts with its bytes at the job's submission. So many clones at one host that have written much need more time and room than is said.

use std::collections::BTreeMap;

use perigee_model::read_ahead::{AHEAD_BYTES_MAX, FILL_BYTES_PER_S};
use perigee_model::units::{format_bytes, format_seconds};
use perigee_model::{HostId, SiteId, VolumeName};

use crate::facts::{Cluster, CopyFacts, HostFacts};
use crate::figures::Figures;
use crate::moving::MoveCost;
use crate::refused::Refused;

/// Why a volume does not move to the site of its replica.
const REPLICA_THERE: &str =
    "its replica is at that site, and no other site would have a copy of it";

/// The switch holds the requests of a job at the new home at most for two round trips and this time: for one round trip
/// until the old home has let the volume go, for what both homes store, and until they are sent anew. Requests at the old
/// home wait as long: their connections to the new home were made before. If that failed, they wait for up to ten round
/// trips; no job waits there that a copy is predicted for.
const SWITCH_ROUND_TRIPS: f64 = 2.0;
const SWITCH_S: f64 = 0.05;
/// Round trips before the switch: the old home seals and tells what it has.
const PREPARE_ROUND_TRIPS: f64 = 8.0;

/// A volume that would come to a host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Coming<'a> {
    pub volume: &'a VolumeName,
    pub home: &'a HostId,
    pub copy: &'a CopyFacts,
}

/// One of several VMs to whose hosts volumes would come.
#[derive(Debug, Clone)]
pub(crate) struct ComingTo<'a> {
    pub host: &'a HostId,
    pub volumes: Vec<Coming<'a>>,
    pub reading: Reading,
}

/// How a job waits for reads of the volumes that would come.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reading {
    /// The seconds that it waits for these reads in each second of its other work, while all of them are far.
    pub waits_per_work: f64,
    /// The seconds of other work that it still has to do; `None` if that is not known.
    pub work_s: Option<f64>,
}

impl Reading {
    /// Of a job that waits so long for reads beside so much other work. `left`: whether that is all it has to do.
    pub fn of(waits_s: f64, work_s: f64, left: bool) -> Self {
        let work_s = work_s.max(1e-3);
        Self { waits_per_work: waits_s.max(0.0) / work_s, work_s: left.then_some(work_s) }
    }

    /// The time that the job still waits for reads while its volumes are copied, which takes `copy_s`.
    ///
    /// The share `f` of the blocks that are here grows by `1 / copy_s` in each second. Of the reads' waits `1 - f` are
    /// left, so the work goes on at a speed of `1 / (1 + n (1 - f))`, where `n` is `waits_per_work`. Integrated over
    /// the copy, `copy_s ln(1 + n) / n` of work is done. A job that has less to do ends before the copy does.
    pub fn waits_s(self, copy_s: f64) -> f64 {
        let n = self.waits_per_work;
        // Below this, the formula would divide two very small numbers.
        if n < 1e-6 || copy_s <= 0.0 {
            return 0.0;
        }
        let done_s = copy_s * n.ln_1p() / n;
        match self.work_s.filter(|work_s| *work_s < done_s) {
            Some(work_s) => {
                let still_far = ((1.0 + n) * (-n * work_s / copy_s).exp() - 1.0) / n;
                (copy_s * (1.0 - still_far) - work_s).max(0.0)
            }
            None => (copy_s - done_s).max(0.0),
        }
    }
}

/// Predicts how these volumes come to a host, and says why they can't; `None` if they can.
///
/// # Errors
/// [`Refused`] if a link is not measured.
pub(crate) fn copy_of(
    cluster: &Cluster,
    to: &HostId,
    volumes: &[Coming],
    reading: Reading,
) -> Result<(MoveCost, Option<String>), Refused> {
    let cost = copy_cost(cluster, to, &shipped(to, volumes), reading)?;
    Ok((cost, why_not(cluster, to, volumes)?))
}

/// Each volume's home, and what it would ship at most.
fn shipped<'a>(to: &HostId, volumes: &[Coming<'a>]) -> Vec<(&'a HostId, u64)> {
    volumes.iter().map(|volume| (volume.home, volume.copy.bytes_to(to))).collect()
}

/// Why these volumes can't come to a host; `None` if they can.
fn why_not(cluster: &Cluster, to: &HostId, volumes: &[Coming]) -> Result<Option<String>, Refused> {
    let each = volumes.iter().map(|volume| volume.copy.bytes_to(to));
    let needed_bytes = each.fold(0, u64::saturating_add);
    let kept = volumes.iter().find_map(|volume| why_it_stays(cluster, to, volume));
    let free_bytes = cluster.host(to)?.pool_free_bytes;
    let no_room = free_bytes.filter(|free| *free < needed_bytes).map(|free| {
        let (free, needed) = (format_bytes(free), format_bytes(needed_bytes));
        format!("{to} has {free} of disk space free, and up to {needed} would come")
    });
    Ok(kept.or(no_room))
}

/// Predicts how volumes come to the hosts of several VMs that wait for each other, all at the same time, and says why they can't; `None` if
/// they can. The VM that loses most decides.
///
/// What clones of one volume have in common is shipped once to each host. The copies of a host share its rate, and those over a link between
/// two sites share the link. So a host's copies are taken to end together, and a VM waits for its reads as if it alone read what is copied.
///
/// # Errors
/// [`Refused`] if a link is not measured.
pub(crate) fn copies_of(
    cluster: &Cluster,
    vms: &[ComingTo],
) -> Result<(MoveCost, Option<String>), Refused> {
    let mut of_hosts: BTreeMap<&HostId, Vec<Coming>> = BTreeMap::new();
    for vm in vms {
        let there = of_hosts.entry(vm.host).or_default();
        for coming in &vm.volumes {
            if !there.iter().any(|other| other.volume == coming.volume) {
                there.push(*coming);
            }
        }
    }
    let mut figures = Figures::default();
    let (mut all, mut impossible) = (MoveCost { wait_s: Some(0.0), ..MoveCost::default() }, None);
    let mut copies_s: BTreeMap<&HostId, f64> = BTreeMap::new();
    let mut links_s: BTreeMap<(&SiteId, &SiteId), f64> = BTreeMap::new();
    for (&to, volumes) in &of_hosts {
        let shipped = shipped(to, volumes);
        let cost = copies(cluster, to, &shipped, &mut figures)?;
        impossible = impossible.or(why_not(cluster, to, volumes)?);
        all.bytes += cost.bytes;
        copies_s.insert(to, cost.copy_s);
        for (home, bytes) in shipped {
            let rate = cluster.link(to, home)?.probe.rate_bytes_per_s.max(1) as f64;
            *links_s.entry(sites(cluster, home, to)?).or_default() += bytes as f64 / rate;
        }
    }
    for vm in vms.iter().filter(|vm| !vm.volumes.is_empty()) {
        let own =
            copies(cluster, vm.host, &shipped(vm.host, &vm.volumes), &mut Figures::default())?;
        let mut copy_s = copies_s.get(vm.host).copied().unwrap_or_default();
        for coming in &vm.volumes {
            let (from, to) = sites(cluster, coming.home, vm.host)?;
            let link_s = links_s.get(&(from, to)).filter(|_| from != to);
            copy_s = link_s.map_or(copy_s, |link_s| copy_s.max(*link_s));
        }
        let one = waited_for(MoveCost { copy_s, ..own }, vm.reading);
        all.prepare_s = all.prepare_s.max(one.prepare_s);
        all.copy_s = all.copy_s.max(one.copy_s);
        all.pause_s = all.pause_s.max(one.pause_s);
        all.total_s = all.total_s.max(one.total_s);
        all.job_s = all.job_s.max(one.job_s);
    }
    figures.measured(waits_in_words(all.job_s - all.pause_s));
    all.figures = figures.into_vec();
    Ok((all, impossible))
}

fn sites<'a>(
    cluster: &'a Cluster,
    from: &HostId,
    to: &HostId,
) -> Result<(&'a SiteId, &'a SiteId), Refused> {
    Ok((&cluster.host(from)?.site, &cluster.host(to)?.site))
}

fn why_it_stays(cluster: &Cluster, to: &HostId, coming: &Coming) -> Option<String> {
    let Coming { volume, home, copy } = coming;
    let is_confined = copy.confined && !cluster.is_one_site(home, to);
    let confined = is_confined.then(|| "its policy is leave-site: never".to_owned());
    let is_near = |to: &HostFacts| copy.replica_sites.contains(&to.site);
    let replica = cluster.host(to).is_ok_and(is_near).then(|| REPLICA_THERE.to_owned());
    let why = confined.or_else(|| copy.stays.clone()).or(replica)?;
    Some(format!("volume {volume} stays at {home}: {why}"))
}

/// Predicts how the volumes of these homes come to a host, one after the other, each with at most these bytes.
///
/// # Errors
/// [`Refused`] if a link is not measured.
pub(crate) fn copy_cost(
    cluster: &Cluster,
    to: &HostId,
    volumes: &[(&HostId, u64)],
    reading: Reading,
) -> Result<MoveCost, Refused> {
    let mut figures = Figures::default();
    let mut cost = waited_for(copies(cluster, to, volumes, &mut figures)?, reading);
    figures.measured(waits_in_words(cost.job_s - cost.pause_s));
    cost.figures = figures.into_vec();
    Ok(cost)
}

/// The same without what the job waits meanwhile.
fn copies(
    cluster: &Cluster,
    to: &HostId,
    volumes: &[(&HostId, u64)],
    figures: &mut Figures,
) -> Result<MoveCost, Refused> {
    let mut cost = MoveCost { wait_s: Some(0.0), ..MoveCost::default() };
    for (home, copy_bytes) in volumes {
        let link = cluster.link(to, home)?;
        figures.link(link, cluster.probe_request_bytes);
        let rtt_s = link.probe.rtt_ms / 1e3;
        let by_window = if rtt_s > 0.0 { AHEAD_BYTES_MAX as f64 / rtt_s } else { f64::INFINITY };
        let link_rate = cluster.read_rate(link, to, home, figures) as f64;
        let by_disks = cluster.copy_rate_of_disks(to, home, figures);
        let by_disks = by_disks.map_or(f64::INFINITY, |rate| rate as f64);
        let rate = link_rate.min(by_window).min(by_disks).min(FILL_BYTES_PER_S as f64);
        let copy_s = *copy_bytes as f64 / rate;
        cost.prepare_s += PREPARE_ROUND_TRIPS * rtt_s;
        cost.copy_s += copy_s;
        cost.pause_s += SWITCH_ROUND_TRIPS * rtt_s + SWITCH_S;
        cost.bytes += *copy_bytes as f64;
        figures.measured(format!(
            "a copy from {home} to {to}: {} for at most {}",
            format_seconds(copy_s),
            format_bytes(*copy_bytes)
        ));
    }
    Ok(cost)
}

/// A job that reads so waits for the switches, and for what it reads before that is copied.
fn waited_for(mut cost: MoveCost, reading: Reading) -> MoveCost {
    cost.total_s = cost.prepare_s + cost.copy_s + cost.pause_s;
    cost.job_s = cost.pause_s + reading.waits_s(cost.copy_s);
    cost
}

fn waits_in_words(waits_s: f64) -> String {
    let waits = format_seconds(waits_s);
    format!("meanwhile the job waits {waits} for what it reads before it is copied")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use perigee_model::SiteId;

    use super::*;
    use crate::fixture::*;
    use crate::measured::MeasuredHost;
    use crate::measured::tests::nothing;

    #[test]
    fn a_copy_takes_its_bytes_at_the_rate_of_the_link_up_to_that_of_copies_and_of_disks() {
        let (to, home) = (host_id("home1"), host_id("cloud1"));
        let copy_cost = |cluster: &Cluster, volumes: &[(&HostId, u64)]| {
            copy_cost(cluster, &to, volumes, Reading::default()).unwrap()
        };
        let cost = copy_cost(&cluster(), &[(&home, 256 * MIB)]);
        assert_close(cost.copy_s, 2.56);
        assert_close(cost.pause_s, 0.082);
        assert_close(cost.job_s, 0.082);
        let mut thin = cluster();
        thin.links.iter_mut().for_each(|link| link.probe.rate_bytes_per_s = 10 * MIB);
        assert_close(copy_cost(&thin, &[(&home, 256 * MIB)]).copy_s, 25.6);
        let near = copy_cost(&cluster(), &[(&host_id("home2"), 256 * MIB)]);
        assert_close(near.copy_s, 2.56);
        let both = copy_cost(&cluster(), &[(&home, MIB), (&home, 3 * MIB)]);
        assert_close(both.copy_s, 0.04);
        assert_close(both.pause_s, 0.164);
        let mut slow = cluster();
        let write_bytes_per_s = Some(8 * MIB);
        slow.hosts[0].measured =
            Some(Arc::new(MeasuredHost { write_bytes_per_s, ..nothing("home1") }));
        assert_close(copy_cost(&slow, &[(&home, 256 * MIB)]).copy_s, 32.0);
    }

    #[test]
    fn a_job_waits_for_its_reads_until_their_blocks_are_copied() {
        let waits_s =
            |waits_s, work_s, left, copy_s| Reading::of(waits_s, work_s, left).waits_s(copy_s);
        assert_close(waits_s(0.0, 10.0, true, 5.0), 0.0);
        assert_close(waits_s(10.0, 10.0, true, 0.0), 0.0);
        // n = 1: of the 4 s, 4 ln 2 s are work.
        assert_close(waits_s(10.0, 10.0, true, 4.0), 4.0 * (1.0 - 2.0f64.ln()));
        assert_close(waits_s(10.0, 10.0, false, 4.0), 4.0 * (1.0 - 2.0f64.ln()));
        // A copy that takes far longer than the job saves it nothing.
        assert!((9.99..10.0).contains(&waits_s(10.0, 10.0, true, 1e5)));
        // A job that only reads ends when it has read all.
        let reads_only = waits_s(10.0, 0.0, true, 10.0);
        assert!((6.31..6.33).contains(&reads_only), "10 (1 - 1/e): {reads_only}");
    }

    /// What `experiments/prediction` measured: the seconds of a command beside its data, with its data far away, how
    /// many of these more were for reads, the MiB to copy, and with a copy from its start on. The rule was made without
    /// looking at `merge`.
    #[rustfmt::skip]
    const COPIED: [(&str, f64, f64, f64, f64, f64, f64); 14] = [
        ("tpch", 4.0, 12.7, 13.63, 1.0, 160.0, 13.36), ("tpch", 16.0, 12.7, 14.98, 1.0, 160.0, 11.39),
        ("scan", 4.0, 2.21, 2.63, 1.0, 250.0, 3.135), ("scan", 16.0, 2.21, 3.02, 1.0, 250.0, 3.06),
        ("think", 4.0, 2.44, 4.35, 1.0, 250.0, 3.18), ("think", 16.0, 2.44, 8.05, 1.0, 250.0, 4.0),
        ("depth8", 4.0, 1.32, 2.25, 1.0, 250.0, 2.05), ("depth8", 16.0, 1.32, 6.52, 1.0, 250.0, 5.58),
        ("mix", 4.0, 3.06, 3.7, 1.0, 250.0, 3.13), ("mix", 16.0, 3.06, 6.96, 1.0, 250.0, 3.96),
        ("writer", 4.0, 2.2, 4.4, 0.05, 250.0, 2.29), ("writer", 16.0, 2.2, 12.19, 0.05, 250.0, 2.3),
        ("merge", 4.0, 2.39, 2.39, 1.0, 250.0, 2.09), ("merge", 16.0, 2.39, 2.56, 1.0, 250.0, 2.55),
    ];
    const BOOT_S: f64 = 3.7;

    #[test]
    fn copies_that_were_measured_are_predicted() {
        let mut errors = Vec::new();
        for (job, rtt_ms, beside_s, far_s, reads, copied_mib, measured_s) in COPIED {
            let reading = Reading::of((far_s - beside_s) * reads, beside_s, true);
            let mut lab = cluster();
            lab.links.iter_mut().for_each(|link| link.probe.rtt_ms = rtt_ms);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small")]
            let bytes = copied_mib as u64 * MIB;
            let (to, home) = (host_id("home1"), host_id("cloud1"));
            let cost = copy_cost(&lab, &to, &[(&home, bytes)], reading).unwrap();
            let error = (beside_s + cost.job_s - measured_s) / (BOOT_S + measured_s);
            let is_confined_out = job == "merge";
            assert!(!is_confined_out || error.abs() < 0.1, "{job} at {rtt_ms} ms: {error:+.2}");
            errors.push((error.abs(), job, rtt_ms));
        }
        errors.sort_by(|a, b| a.0.total_cmp(&b.0));
        let median = f64::midpoint(errors[6].0, errors[7].0);
        assert!(median < 0.05, "{errors:?}");
        // With eight reads in flight at 16 ms the copy was five times slower than its rate.
        assert!(errors[12].0 < 0.15 && errors[13].1 == "depth8", "{errors:?}");
    }

    /// VMs with a clone of the volume each, at these hosts.
    fn all_at<'a>(hosts: &'a [HostId], coming: Coming<'a>) -> Vec<ComingTo<'a>> {
        let one = |host| ComingTo { host, volumes: vec![coming], reading: Reading::default() };
        hosts.iter().map(one).collect()
    }

    #[test]
    fn clones_of_one_volume_come_once_to_each_host_and_hosts_share_the_link() {
        let (volume, home) = (&volume_name("data"), &host_id("cloud1"));
        let copy = &CopyFacts { bytes: 256 * MIB, ..CopyFacts::default() };
        let coming = Coming { volume, home, copy };
        let cost = |cluster: &Cluster, hosts: &[&str]| {
            let hosts: Vec<HostId> = hosts.iter().map(|host| host_id(host)).collect();
            copies_of(cluster, &all_at(&hosts, coming)).unwrap()
        };
        let one = copy_of(&cluster(), &host_id("home1"), &[coming], Reading::default()).unwrap();
        assert_eq!(cost(&cluster(), &["home1"]), one, "one VM is predicted as a job");
        assert_eq!(cost(&cluster(), &["home1"; 4]), one, "nothing is shipped twice");
        let (both, _) = cost(&cluster(), &["home1", "home2", "home1"]);
        assert_close(both.bytes, 512.0 * MIB as f64);
        // 128 MiB/s for both, of which neither may have more than 100 MiB/s.
        assert_close(both.copy_s, 4.0);
        assert_close(both.job_s, one.0.job_s);
        let mut full = cluster();
        full.hosts[1].pool_free_bytes = Some(300 * MIB);
        assert_eq!(cost(&full, &["home2"; 3]).1, None);
        full.hosts[1].pool_free_bytes = Some(200 * MIB);
        let why = cost(&full, &["home1", "home2"]).1;
        assert!(why.is_some_and(|why| why.contains("home2 has 200 MiB of disk space free")));
    }

    #[test]
    fn of_several_vms_the_one_decides_that_waits_longest_for_its_data() {
        let (volume, home, host) = (&volume_name("data"), &host_id("cloud1"), &host_id("home1"));
        let copy = &CopyFacts { bytes: 400 * MIB, ..CopyFacts::default() };
        let waits = |waits_s| ComingTo {
            host,
            volumes: vec![Coming { volume, home, copy }],
            reading: Reading::of(waits_s, 10.0, false),
        };
        let without = ComingTo { volumes: Vec::new(), ..waits(90.0) };
        let (cost, _) = copies_of(&cluster(), &[waits(0.0), waits(10.0), without]).unwrap();
        assert_close(cost.job_s, 0.082 + 4.0 * (1.0 - 2.0f64.ln()));
    }

    /// Of two volumes like this one: the cost of their copies to a host, and why they can't come.
    fn two(cluster: &Cluster, to: &str, home: &str, copy: &CopyFacts) -> (MoveCost, String) {
        let (volume, home) = (&volume_name("data"), &host_id(home));
        let coming = Coming { volume, home, copy };
        let (cost, why) =
            copy_of(cluster, &host_id(to), &[coming, coming], Reading::default()).unwrap();
        (cost, why.unwrap_or_default())
    }

    #[test]
    fn data_that_may_not_leave_their_site_come_to_hosts_of_it_only() {
        let confined = CopyFacts { bytes: MIB, confined: true, ..CopyFacts::default() };
        let (_, why) = two(&cluster(), "home1", "cloud1", &confined);
        assert_eq!(why, "volume data stays at cloud1: its policy is leave-site: never");
        assert_eq!(two(&cluster(), "home1", "home2", &confined).1, "");
    }

    #[test]
    fn data_come_only_where_their_bytes_have_room() {
        let mut cluster = cluster();
        let copy = CopyFacts { bytes: 100 * MIB, ..CopyFacts::default() };
        cluster.hosts[0].pool_free_bytes = Some(200 * MIB);
        assert_eq!(two(&cluster, "home1", "cloud1", &copy).1, "");
        cluster.hosts[0].pool_free_bytes = Some(199 * MIB);
        assert_eq!(
            two(&cluster, "home1", "cloud1", &copy).1,
            "home1 has 199 MiB of disk space free, and up to 200 MiB would come"
        );
    }

    #[test]
    fn a_host_with_a_replica_is_sent_only_what_it_lacks() {
        let lacking = vec![(host_id("home1"), 2 * MIB)];
        let copy = CopyFacts { bytes: 100 * MIB, lacking, ..CopyFacts::default() };
        assert_close(two(&cluster(), "home1", "cloud1", &copy).0.bytes, 4.0 * MIB as f64);
        assert_close(two(&cluster(), "home2", "cloud1", &copy).0.bytes, 200.0 * MIB as f64);
        assert_eq!(two(&cluster(), "home1", "cloud1", &copy).1, "");
        // Its first round may be under way, as no host has all of it.
        let site = SiteId::new("home").unwrap();
        let replicated = CopyFacts { replica_sites: vec![site], lacking: Vec::new(), ..copy };
        let (_, why) = two(&cluster(), "home2", "cloud1", &replicated);
        assert!(why.contains("its replica is at that site"), "{why}");
    }
}
