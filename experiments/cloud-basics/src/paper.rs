//! What two papers say of the figures, and whether this run agrees. The measurements decide that, so a report never contradicts its own
//! figures.
//!
//! "001" is Toyoshima, Yamaguchi, Oguchi: an evaluation of load balancing of a virtual-machine PC cluster, and a study of its application to a
//! real cloud (in Japanese), figures 9 to 12 in section 5.4. "004" is the same authors' English paper on the migration of virtual machines by the access to remote
//! storage, figures 13 to 15 in sections 5.2 and 5.3. The bars of the figures are pictures; their texts name relations, and one number.

use perigee_model::measurement::{DiskPath, HostMeasurement};

use crate::results::{Figure, Results, Where, disk, link, mbits};

/// "About 4.5 times" is taken for agreed from here on, as an order.
const MUCH: f64 = 2.0;
/// Two figures that differ by less are about the same.
const SAME: f64 = 1.5;
const SIGNIFICANT: f64 = 0.67;

const ONE_MACHINE: &str = "Both sites of the lab are on one machine: an own host and a rented one share its CPUs, its memory and its disk, and nothing slows the \
     network inside a site down. What a provider sells can't be seen here; `perigee host measure` at a host that is really rented shows it.";

pub fn figures(results: &Results) -> Vec<Figure> {
    let all = [inside_a_site, local_disk, iscsi_beside_local, iscsi_of_both, between_sites];
    let mut figures: Vec<Figure> = all.into_iter().map(|of| of(results)).collect();
    if results.is_quick {
        figures.iter_mut().for_each(|figure| (figure.agrees, figure.why) = (None, None));
    }
    figures
}

fn figure(number: &str, theirs: &str, ours: Option<(String, bool)>, why: &str) -> Figure {
    let (ours, agrees) = match ours {
        Some((ours, agrees)) => (ours, Some(agrees)),
        None => ("Not all of it was measured.".to_owned(), None),
    };
    Figure {
        figure: number.to_owned(),
        theirs: theirs.to_owned(),
        ours,
        agrees,
        why: (agrees == Some(false)).then(|| why.to_owned()),
    }
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
    figure(
        "Network inside a site (001, figure 9; 004, figure 13)",
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
    figure(
        "Local disk (001, figure 10)",
        "The local disks of EC2's instances are faster than the cluster's.",
        ours,
        ONE_MACHINE,
    )
}

fn iscsi_beside_local(results: &Results) -> Figure {
    let local = disk(&results.rented, DiskPath::Pool, Where::Near);
    let iscsi = disk(&results.rented, DiskPath::Iscsi, Where::Near);
    let nbd = disk(&results.rented, DiskPath::Nbd, Where::Near);
    let own = match local.map(|local| local.direct) {
        Some(false) => "and what is read of the own disk may be in that of its own host",
        _ => "while the own disk is read with direct I/O",
    };
    let ours = local.zip(iscsi).map(|(local, iscsi)| {
        let shares = (
            iscsi.write_bytes_per_s / local.write_bytes_per_s.max(1.0),
            iscsi.read_bytes_per_s / local.read_bytes_per_s.max(1.0),
        );
        let through = nbd.map_or_else(String::new, |nbd| {
            format!(
                " Through Perigee's volume servers (NBD, TLS): {} and {}.",
                mb(nbd.write_bytes_per_s),
                mb(nbd.read_bytes_per_s)
            )
        });
        let text = format!(
            "The rented host writes {} and reads {} over iSCSI in its site, {:.2} and {:.2} of what its own disk does.{through}",
            mb(iscsi.write_bytes_per_s),
            mb(iscsi.read_bytes_per_s),
            shares.0,
            shares.1
        );
        (text, shares.0 <= SIGNIFICANT && shares.1 <= SIGNIFICANT)
    });
    figure(
        "Local and iSCSI disk of the cloud, write and read (004, figures 14 and 15)",
        "iSCSI is significantly slower than the local disk, which comes from the slow network of EC2.",
        ours,
        &format!(
            "The network inside the lab's site is not slow, and what is read over iSCSI is in the other host's page cache, {own}."
        ),
    )
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
    figure(
        "iSCSI disk (001, figure 11)",
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
    figure(
        "Network between the cluster and EC2 (001, figure 12)",
        "It is faster when the cluster sends, whose machines are taken for the better ones.",
        ours,
        "The lab's WAN has the same rate in both directions, and one CPU is enough to fill it.",
    )
}

fn mb(bytes_per_s: f64) -> String {
    format!("{:.0} MB/s", bytes_per_s / 1e6)
}
