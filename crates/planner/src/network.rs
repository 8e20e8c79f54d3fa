//! The time that the network adds to a volume's I/O: predicted from probes, or measured.

use perigee_model::HostId;
use perigee_model::volume::IoStats;

use crate::facts::{Cluster, DiskFacts};
use crate::figures::Figures;
use crate::learn::far_of_all;
use crate::refused::Refused;
use crate::work::VolumeWork;

/// Predicts the seconds in which at least one of the volume's requests is in flight, when a VM at `at` does
/// `work` on a volume whose home is `home`.
///
/// The model is a closed loop of `q` requests in flight, each of `s` bytes, over a link of rate `R`:
///
/// ```text
/// latency = latency at home + (probe there from here - probe there at home) + (s - s_probe) / R
/// seconds = max(requests * latency / q, bytes / R)
/// ```
///
/// The latency by the size of a request is that of the probe and the link's rate. It is not learned from jobs' requests: these
/// come beside others, so theirs is also the wait for each other, which the fit of runs has already. The last term is the
/// limit of the link's rate. At the home the result is `requests * latency at home / q`.
pub(crate) fn io_s(
    cluster: &Cluster,
    at: &HostId,
    home: &HostId,
    work: &VolumeWork,
    figures: &mut Figures,
) -> Result<f64, Refused> {
    let requests = work.requests();
    if at == home || requests == 0.0 {
        return Ok(work.home_s());
    }
    let link = cluster.link(at, home)?;
    figures.link(link, cluster.probe_request_bytes);
    let rate = cluster.read_rate(link, at, home, figures) as f64;
    let local_us = cluster.host(home)?.local_blocks.map(|b| b.latency_median_us as f64);
    let extra_us = match (link.blocks, local_us) {
        (Some(blocks), Some(local_us)) => {
            figures.measured(format!("the same read at {home} takes {local_us:.0} us"));
            (blocks.latency_median_us as f64 - local_us).max(0.0)
        }
        _ => {
            figures.assumed("a remote block read takes one RTT more than a local one");
            link.probe.rtt_ms * 1e3
        }
    };
    let longer_bytes = work.bytes / requests - cluster.probe_request_bytes as f64;
    let latency_us =
        (work.home_latency_us + extra_us + longer_bytes / rate * 1e6).max(work.home_latency_us);
    let in_flight = work.queue_depth();
    Ok((requests * latency_us / 1e6 / in_flight).max(work.bytes / rate))
}

/// The time that the network should add to a VM's I/O on these disks at a host, according to the probes. Only the ratio of two hosts is
/// used, where both are far, so an error that the probes make at both has no effect.
pub(crate) fn added_s(
    cluster: &Cluster,
    disks: &[DiskFacts],
    at: &HostId,
    figures: &mut Figures,
) -> Result<f64, Refused> {
    let mut total_s = 0.0;
    for disk in disks {
        let work = VolumeWork::learn(disk);
        let read_share = if work.requests() > 0.0 { work.reads / work.requests() } else { 1.0 };
        let far_share = far_of_all(disk.copy.far_share(at), read_share);
        let longer_s = io_s(cluster, at, &disk.home, &work, figures)? - work.home_s();
        total_s += far_share * longer_s;
    }
    Ok(total_s.max(0.0))
}

/// The path from a VM to a volume whose home is another host.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Path {
    /// How much longer a small request takes than at the home.
    pub round_trip_s: f64,
    /// The rate of one TCP stream from the home to the VM's host, or of the volume servers where that is less. Above 0.
    pub rate_bytes_per_s: u64,
}

/// A round trip that block reads measured counts at most this much more than the link's RTT. A higher value
/// means that the host was busy during the probe.
const PROBE_SLACK: f64 = 1.25;
const PROBE_SLACK_S: f64 = 0.0005;

/// The path from a VM at `at` to a volume whose home is `home`; `None` at the home.
///
/// # Errors
/// [`Refused`] when the link is not measured.
pub(crate) fn path(
    cluster: &Cluster,
    at: &HostId,
    home: &HostId,
    figures: &mut Figures,
) -> Result<Option<Path>, Refused> {
    if at == home {
        return Ok(None);
    }
    let link = cluster.link(at, home)?;
    figures.link(link, cluster.probe_request_bytes);
    let rtt_s = link.probe.rtt_ms / 1e3;
    let local = cluster.host(home).ok().and_then(|home| home.local_blocks);
    let by_blocks_s = link.blocks.zip(local).map(|(far, near)| {
        let near_us = near.latency_median_us;
        far.latency_median_us.saturating_sub(near_us) as f64 / 1e6
    });
    let most_s = rtt_s * PROBE_SLACK + PROBE_SLACK_S;
    let round_trip_s = by_blocks_s.map_or(rtt_s, |s| s.clamp(rtt_s, most_s));
    let rate_bytes_per_s = cluster.read_rate(link, at, home, figures);
    Ok(Some(Path { round_trip_s, rate_bytes_per_s }))
}

impl Cluster {
    /// The path from a VM at `at` to a volume whose home is `home`; `None` at the home, and if the link is not
    /// measured.
    pub fn path(&self, at: &HostId, home: &HostId) -> Option<Path> {
        path(self, at, home, &mut Figures::default()).ok().flatten()
    }
}

/// The seconds in which a running command could not continue because of the network.
///
/// In `network_busy` the volume server had a request at another host in flight, and in `busy` one of the VM. The
/// time that the home itself needed for such a request is not lost to the network:
///
/// ```text
/// lost = min( sum over disks of min(network_busy, busy) * (1 - latency at home / latency at client),
///             wall time - vCPU time )
/// ```
///
/// Time in which the link was down is not in `network_busy` here, because it says nothing about the link when
/// it works. The second term is there because a vCPU that computed was not blocked. With several vCPUs it is
/// their mean.
pub fn lost_s(disks: &[DiskFacts], wall_s: f64, vcpu_s: f64, cpus: u32) -> f64 {
    let by_disks: f64 = disks.iter().map(disk_network_s).sum();
    by_disks.min(not_computing_s(wall_s, vcpu_s, cpus))
}

pub(crate) fn not_computing_s(wall_s: f64, vcpu_s: f64, cpus: u32) -> f64 {
    (wall_s - vcpu_s / f64::from(cpus.max(1))).max(0.0)
}

fn disk_network_s(disk: &DiskFacts) -> f64 {
    let client = &disk.client;
    if client.network_requests == 0 || client.network_ns == 0 {
        return 0.0;
    }
    let client_us = client.network_ns as f64 / client.network_requests as f64 / 1e3;
    let home_share = (mean_latency_us(&disk.at_home) / client_us).min(1.0);
    // A read-ahead alone delays nobody.
    let waited_ns = client.network_busy_ns.min(client.busy_ns);
    seconds(waited_ns.saturating_sub(disk.outage_ns)) * (1.0 - home_share)
}

pub(crate) fn latencies_s(stats: &IoStats) -> f64 {
    seconds(stats.read_ns) + seconds(stats.write_ns) + seconds(stats.flush_ns)
}

/// The share of the requests' time that was the reads'; 1 if there was none.
pub(crate) fn read_time_share(stats: &IoStats) -> f64 {
    let all_s = latencies_s(stats);
    if all_s > 0.0 { seconds(stats.read_ns) / all_s } else { 1.0 }
}

/// The share of the time lost to the network that was lost by reads; 1 if none was lost.
pub(crate) fn lost_by_reads_share(disks: &[DiskFacts]) -> f64 {
    let lost_s: f64 = disks.iter().map(disk_network_s).sum();
    let by_reads = |disk| disk_network_s(disk) * read_time_share(&disk.client);
    if lost_s > 0.0 { disks.iter().map(by_reads).sum::<f64>() / lost_s } else { 1.0 }
}

pub(crate) fn mean_latency_us(stats: &IoStats) -> f64 {
    let requests = (stats.reads + stats.writes + stats.flushes) as f64;
    if requests == 0.0 { 0.0 } else { latencies_s(stats) * 1e6 / requests }
}

pub(crate) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::*;

    #[test]
    fn the_network_loses_what_a_request_takes_longer_than_at_home() {
        // 100 reads of 16.4 ms, of which 0.2 ms are the home's.
        let disks = [disk("data", "cloud1", 100, 1, true)];
        assert_close(lost_s(&disks, 10.0, 1.0, 1), 1.62);
    }

    #[test]
    fn requests_in_flight_together_are_waited_for_once() {
        let disks = [disk("data", "cloud1", 100, 4, true)];
        assert_close(lost_s(&disks, 10.0, 1.0, 1), 1.62 / 4.0);
    }

    #[test]
    fn what_is_read_ahead_while_the_vm_waits_for_nothing_is_not_lost() {
        let mut disk = disk("data", "cloud1", 100, 1, true);
        disk.client.network_busy_ns *= 3;
        assert_close(lost_s(&[disk], 10.0, 1.0, 1), 1.62);
    }

    #[test]
    fn the_time_lost_is_at_most_the_time_not_computed() {
        let disks = [disk("data", "cloud1", 100, 1, true)];
        assert_close(lost_s(&disks, 10.0, 9.0, 1), 1.0);
        assert_close(lost_s(&disks, 10.0, 11.0, 1), 0.0);
        assert_close(lost_s(&disks, 10.0, 18.0, 2), 1.0);
    }

    #[test]
    fn a_disk_at_home_loses_nothing() {
        assert_close(lost_s(&[disk("data", "cloud1", 100, 1, false)], 10.0, 1.0, 1), 0.0);
    }

    #[test]
    fn a_home_slower_than_its_client_loses_nothing() {
        let mut slow = disk("data", "cloud1", 100, 1, true);
        slow.at_home.read_ns *= 1000;
        assert_close(lost_s(&[slow], 10.0, 1.0, 1), 0.0);
    }

    fn io_at(host: &str, work: &VolumeWork) -> f64 {
        let (at, home) = (host_id(host), host_id("cloud1"));
        io_s(&cluster(), &at, &home, work, &mut Figures::default()).unwrap()
    }

    #[test]
    fn io_is_requests_times_latency_by_queue_depth() {
        let mut work = work(1000.0);
        assert_close(io_at("cloud1", &work), 0.2);
        assert_close(io_at("home1", &work), 16.4);
        (work.latencies_s, work.busy_s) = (4.0, 1.0);
        assert_close(io_at("home1", &work), 4.1);
    }

    #[test]
    fn a_long_request_takes_the_time_of_its_bytes_too() {
        let mut work = work(1000.0);
        work.bytes = 1000.0 * (1.0 / 128.0 * MIB as f64 + 128.0 * 1024.0);
        // 128 KiB more than the probe at 128 MiB/s: 0.9765625 ms.
        assert_close(io_at("home1", &work), 16.4 + 0.976_562_5);
    }

    #[test]
    fn io_is_never_faster_than_the_link() {
        let mut work = work(1000.0);
        (work.latencies_s, work.busy_s) = (64.0, 1.0);
        work.bytes = 256.0 * MIB as f64;
        assert_close(io_at("home1", &work), 2.0);
    }

    #[test]
    fn a_link_that_is_not_measured_is_a_refusal() {
        let mut cluster = cluster();
        cluster.links.clear();
        let work = work(1.0);
        let (at, home) = (host_id("home1"), host_id("cloud1"));
        let refused = io_s(&cluster, &at, &home, &work, &mut Figures::default());
        assert_eq!(refused, Err(Refused::LinkNotMeasured { from: at, to: home }));
    }
}
