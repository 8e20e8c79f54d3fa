//! What two papers say of the figures, and whether this run agrees. The measurements decide that, so a report never contradicts its own
//! figures.
//!
//! "001" is Toyoshima, Yamaguchi, Oguchi: an evaluation of load balancing of a virtual-machine PC cluster, and a study of its application to a
//! real cloud (in Japanese), figures 9 to 12 in section 5.4. "004" is the same authors' English paper on the migration of virtual machines by the access to remote
//! storage, figures 13 to 15 in sections 5.2 and 5.3. The bars of the figures are pictures; their texts name relations, and one number.

use perigee_lab::paper::{Figure, judge_nothing};
use perigee_model::measurement::{DiskFigures, DiskPath, HostMeasurement};

use crate::results::{Results, Where, disk, link, mbits};

/// "About 4.5 times" is taken for agreed from here on, as an order.
const MUCH: f64 = 2.0;
/// Two figures that differ by less are about the same.
const SAME: f64 = 1.5;
const SIGNIFICANT: f64 = 0.67;

const ONE_MACHINE: &str = "Both sites of the lab are on one machine: an own host and a rented one share its CPUs, its memory and its disk, and nothing slows the \
     network inside a site down. What a provider sells can't be seen here; `perigee host measure` at a host that is really rented shows it.";

pub fn figures(results: &Results) -> Vec<Figure> {
    let [write, read] = iscsi_beside_local(results);
    let mut figures = vec![inside_a_site(results), local_disk(results), write, read];
    figures.extend([iscsi_of_both(results), between_sites(results)]);
    if results.is_quick {
        judge_nothing(&mut figures);
    }
    figures
}

fn inside_a_site(results: &Results) -> Figure {
    let rate = |of| link(of, Where::Near)?.to_bytes_per_s.map(mbits);
    let ours = rate(&results.own).zip(rate(&results.rented)).map(|(own, rented)| {
        let times = own / rented.max(0.001);
        let text = format!(
            "{own:.0} Mbit/s between two own hosts, {rented:.0} Mbit/s between the rented host and one of its site: {times:.1} times, with TLS."
        );
        (text, times >= MUCH)
    });
    Figure::new(
        "001 Fig. 9, 004 Fig. 13, network inside a site",
        "The local cluster's network is about 4.5 times as fast as the one between instances of EC2.",
        ours,
        ONE_MACHINE,
    )
}

fn local_disk(results: &Results) -> Figure {
    let own = disk(&results.own, DiskPath::Pool, Where::Near);
    let rented = disk(&results.rented, DiskPath::Pool, Where::Near);
    let ours = own.zip(rented).map(|(own, rented)| {
        let text = format!(
            "The rented host reads {} and writes {}, the own host {} and {}.",
            mb(rented.read_bytes_per_s),
            mb(rented.write_bytes_per_s),
            mb(own.read_bytes_per_s),
            mb(own.write_bytes_per_s)
        );
        let is_better = rented.read_bytes_per_s > own.read_bytes_per_s
            && rented.write_bytes_per_s > own.write_bytes_per_s;
        (text, is_better)
    });
    Figure::new(
        "001 Fig. 10, local disk",
        "The local disks of EC2's instances are faster than the cluster's.",
        ours,
        ONE_MACHINE,
    )
}

/// Of writing and of reading.
fn iscsi_beside_local(results: &Results) -> [Figure; 2] {
    let of = |path| disk(&results.rented, path, Where::Near);
    let (local, iscsi, nbd) = (of(DiskPath::Pool), of(DiskPath::Iscsi), of(DiskPath::Nbd));
    let ours = |does: &str, rate: fn(&DiskFigures) -> f64| {
        let (own, remote) = (rate(local?), rate(iscsi?));
        let share = remote / own.max(1.0);
        let through = nbd.map_or_else(String::new, |nbd| {
            format!(" Through Perigee's volume servers (NBD, TLS): {}.", mb(rate(nbd)))
        });
        let text = format!(
            "The rented host {does} {} over iSCSI in its site, {share:.2} of what its own disk does.{through}",
            mb(remote)
        );
        Some((text, share <= SIGNIFICANT))
    };
    let own = match local.map(|local| local.direct) {
        Some(false) => "and what is read of the own disk may be in that of its own host",
        _ => "while the own disk is read with direct I/O",
    };
    let theirs = "iSCSI is significantly slower than the local disk, which comes from the slow network of EC2.";
    let why = "The network inside the lab's site is not slow";
    [
        Figure::new(
            "004 Fig. 14, local and iSCSI disk of the cloud, write",
            theirs,
            ours("writes", |of| of.write_bytes_per_s),
            &format!("{why}."),
        ),
        Figure::new(
            "004 Fig. 15, local and iSCSI disk of the cloud, read",
            theirs,
            ours("reads", |of| of.read_bytes_per_s),
            &format!(
                "{why}, and what is read over iSCSI is in the other host's page cache, {own}."
            ),
        ),
    ]
}

fn iscsi_of_both(results: &Results) -> Figure {
    let of = |of: &HostMeasurement| disk(of, DiskPath::Iscsi, Where::Near).copied();
    let ours = of(&results.own).zip(of(&results.rented)).map(|(own, rented)| {
        let is_same = |a: f64, b: f64| a.max(b) / a.min(b).max(1.0) <= SAME;
        let text = format!(
            "Over iSCSI in its site the rented host reads {} and writes {}, the own host {} and {}.",
            mb(rented.read_bytes_per_s),
            mb(rented.write_bytes_per_s),
            mb(own.read_bytes_per_s),
            mb(own.write_bytes_per_s)
        );
        let agrees = is_same(own.read_bytes_per_s, rented.read_bytes_per_s)
            && is_same(own.write_bytes_per_s, rented.write_bytes_per_s);
        (text, agrees)
    });
    Figure::new(
        "001 Fig. 11, iSCSI disk",
        "iSCSI disks of the cluster and of EC2's instance High-CPU Medium are about equally fast.",
        ours,
        "The rented host has one CPU, and the own host shares all of the machine's.",
    )
}

fn between_sites(results: &Results) -> Figure {
    let far = link(&results.rented, Where::Far);
    let both =
        far.and_then(|far| far.from_bytes_per_s.map(mbits).zip(far.to_bytes_per_s.map(mbits)));
    let ours = both.map(|(own_sends, rented_sends)| {
        let rate = results.rate_bits_per_s / 1_000_000;
        let text = format!(
            "{own_sends:.0} Mbit/s when the own host sends, {rented_sends:.0} when the rented one does, over a WAN of {rate} Mbit/s and {} ms.",
            results.rtt_ms
        );
        (text, own_sends > rented_sends)
    });
    Figure::new(
        "001 Fig. 12, network between the cluster and EC2",
        "It is faster when the cluster sends, whose machines are taken for the better ones.",
        ours,
        "The lab's WAN has the same rate in both directions, and one CPU is enough to fill it.",
    )
}

fn mb(bytes_per_s: f64) -> String {
    format!("{:.0} MB/s", bytes_per_s / 1e6)
}
