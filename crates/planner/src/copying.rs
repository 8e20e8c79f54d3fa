//! Predicts what it costs to bring a job's data volumes to its VM's host while it runs.
//!
//! A volume's home moves first, and then the new home copies what it lacks. Its requests wait for the switch only;
//! while it is copied, those that need a block that is still missing wait for the old home, and share the link
//! with the background.

use perigee_model::read_ahead::{AHEAD_BYTES_MAX, FILL_BYTES_PER_S};
use perigee_model::units::{format_bytes, format_seconds};
use perigee_model::{HostId, VolumeName};

use crate::facts::{Cluster, CopyFacts, HostFacts};
use crate::figures::Figures;
use crate::moving::{MoveCost, SPEED_WHILE_COPIED};
use crate::refused::Refused;

/// Why a volume does not move to the site of its replica.
const REPLICA_THERE: &str =
    "its replica is at that site, and no other site would have a copy of it";

/// The switch holds the volume's requests at most for two round trips and this time.
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

/// Predicts how these volumes come to a host, and says why they can't; `None` if they can.
///
/// # Errors
/// [`Refused`] if a link is not measured.
pub(crate) fn copy_of(
    cluster: &Cluster,
    to: &HostId,
    volumes: &[Coming],
) -> Result<(MoveCost, Option<String>), Refused> {
    let shipped: Vec<(&HostId, u64)> =
        volumes.iter().map(|volume| (volume.home, volume.copy.bytes_to(to))).collect();
    let needed_bytes = shipped.iter().map(|(_, bytes)| *bytes).fold(0, u64::saturating_add);
    let cost = copy_cost(cluster, to, &shipped)?;
    let kept = volumes.iter().find_map(|volume| why_it_stays(cluster, to, volume));
    let free_bytes = cluster.host(to)?.pool_free_bytes;
    let no_room = free_bytes.filter(|free| *free < needed_bytes).map(|free| {
        let (free, needed) = (format_bytes(free), format_bytes(needed_bytes));
        format!("{to} has {free} of disk space free, and up to {needed} would come")
    });
    Ok((cost, kept.or(no_room)))
}

fn why_it_stays(cluster: &Cluster, to: &HostId, coming: &Coming) -> Option<String> {
    let Coming { volume, home, copy } = coming;
    let is_held = copy.held && !cluster.is_one_site(home, to);
    let held = is_held.then(|| "its policy is leave-site: never".to_owned());
    let is_near = |to: &HostFacts| copy.replica_sites.contains(&to.site);
    let replica = cluster.host(to).is_ok_and(is_near).then(|| REPLICA_THERE.to_owned());
    let why = held.or_else(|| copy.stays.clone()).or(replica)?;
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
) -> Result<MoveCost, Refused> {
    let mut figures = Figures::default();
    let mut cost = MoveCost::default();
    for (home, copy_bytes) in volumes {
        let link = cluster.link(to, home)?;
        figures.link(link, cluster.probe_request_bytes);
        let rtt_s = link.probe.rtt_ms / 1e3;
        let by_window = if rtt_s > 0.0 { AHEAD_BYTES_MAX as f64 / rtt_s } else { f64::INFINITY };
        let link_rate = link.probe.rate_bytes_per_s as f64;
        let rate = link_rate.min(by_window).min(FILL_BYTES_PER_S as f64);
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
    figures.assumed("the job works at half of its speed while its volumes are copied");
    cost.total_s = cost.prepare_s + cost.copy_s + cost.pause_s;
    cost.job_s = cost.pause_s + cost.copy_s * (1.0 - SPEED_WHILE_COPIED);
    cost.figures = figures.into_vec();
    Ok(cost)
}

#[cfg(test)]
mod tests {
    use perigee_model::SiteId;

    use super::*;
    use crate::fixture::*;

    #[test]
    fn a_copy_takes_its_bytes_at_the_rate_of_the_link_up_to_that_of_copies() {
        let (to, home) = (host_id("home1"), host_id("cloud1"));
        let cost = copy_cost(&cluster(), &to, &[(&home, 256 * MIB)]).unwrap();
        assert_close(cost.copy_s, 2.56);
        assert_close(cost.pause_s, 0.082);
        assert_close(cost.job_s, 0.082 + 1.28);
        let mut thin = cluster();
        thin.links.iter_mut().for_each(|link| link.probe.rate_bytes_per_s = 10 * MIB);
        assert_close(copy_cost(&thin, &to, &[(&home, 256 * MIB)]).unwrap().copy_s, 25.6);
        let near = copy_cost(&cluster(), &to, &[(&host_id("home2"), 256 * MIB)]).unwrap();
        assert_close(near.copy_s, 2.56);
        let both = copy_cost(&cluster(), &to, &[(&home, MIB), (&home, 3 * MIB)]).unwrap();
        assert_close(both.copy_s, 0.04);
        assert_close(both.pause_s, 0.164);
    }

    /// Of two volumes like this one: the cost of their copies to a host, and why they can't come.
    fn two(cluster: &Cluster, to: &str, home: &str, copy: &CopyFacts) -> (MoveCost, String) {
        let (volume, home) = (&volume_name("data"), &host_id(home));
        let coming = Coming { volume, home, copy };
        let (cost, why) = copy_of(cluster, &host_id(to), &[coming, coming]).unwrap();
        (cost, why.unwrap_or_default())
    }

    #[test]
    fn data_that_may_not_leave_their_site_come_to_hosts_of_it_only() {
        let held = CopyFacts { bytes: MIB, held: true, ..CopyFacts::default() };
        let (_, why) = two(&cluster(), "home1", "cloud1", &held);
        assert_eq!(why, "volume data stays at cloud1: its policy is leave-site: never");
        assert_eq!(two(&cluster(), "home1", "home2", &held).1, "");
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
