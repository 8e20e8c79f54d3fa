//! For each figure: what Toyoshima's paper shows, and whether these runs agree. The measurements decide that, so a
//! report never contradicts its own figures.
//!
//! S. Toyoshima, S. Yamaguchi, M. Oguchi, "Storage access optimization with virtual machine migration during
//! execution of parallel data processing on a virtual machine PC cluster". It has Xen guests of 2 GB with OSDL-DBT-3
//! in PostgreSQL, iSCSI from Linux's initiator to iSCSI-Enterprise-Target, and Dummynet with 1 to 16 ms of round
//! trip. The text names only some figures' values; of the others it describes the shape.

use perigee_lab::paper::Figure;

use crate::case::{Way, Work};
use crate::results::{Results, float};

/// From so many times the time over the shortest round trip on, the time over the longest one has grown.
const GROWN: f64 = 1.2;
/// Their migration takes 2.5 times as long over the longest round trip. Within this range ours is like it.
const LIKE_THEIRS: std::ops::RangeInclusive<f64> = 1.7..=3.5;

pub fn figures(results: &Results) -> Vec<Figure> {
    [execution(results), migration(results), total(results)].into_iter().flatten().collect()
}

/// The shortest and the longest round trip of which there are runs.
fn ends(results: &Results) -> Option<(u32, u32)> {
    let rtts = results.rtts_ms();
    let (first, last) = (*rtts.first()?, *rtts.last()?);
    (first < last).then_some((first, last))
}

/// The execution time against the round trip.
fn execution(results: &Results) -> Option<Figure> {
    let (near, far) = ends(results)?;
    let at = |way, rtt_ms| results.work_s(Work::Tpch, rtt_ms, way);
    let growth = |way| Some((at(way, far)?, at(way, far)? / at(way, near)?));
    let (iscsi_s, iscsi) = growth(Way::Iscsi)?;
    let mut text = format!(
        "From {near} to {far} ms the queries over plain iSCSI take {iscsi:.2} times as long ({iscsi_s:.1} s)."
    );
    if let Some((remote_s, remote)) = growth(Way::Remote) {
        text.push_str(&format!(
            " Through the local volume server they take {remote:.2} times as long ({remote_s:.1} s), because it reads \
             ahead over the WAN: fewer reads wait for a round trip."
        ));
    }
    Some(Figure::new(
        "000 Fig. 5, iSCSI in QEMU",
        "Over iSCSI the execution time grows with the round trip, and severely beyond 4 ms.",
        Some((text, iscsi >= GROWN)),
        "The queries compute for longer than their reads wait.",
    ))
}

/// The migration time against the round trip.
fn migration(results: &Results) -> Option<Figure> {
    let (near, far) = ends(results)?;
    let at = |rtt_ms| {
        results.median(Work::Tpch, rtt_ms, Way::Stay, |run| Some(float(run.migration?.total_ms)))
    };
    let (near_ms, far_ms) = (at(near)?, at(far)?);
    let ratio = far_ms / near_ms;
    let text = format!(
        "A migration takes {near_ms:.0} ms at {near} ms, and {far_ms:.0} ms at {far} ms, {ratio:.2} times as long."
    );
    let why = if ratio < *LIKE_THEIRS.start() {
        "The paper's memory of 2 GB goes through one TCP connection, whose window of that time does not fill a link of 16 ms; here \
         the windows are as large as the link needs, and what remains are the round trips of the preparation and of the pause."
    } else {
        "Our guest has 256 MiB, of which little has to be sent: the round trips of the preparation and of the pause are a larger \
         part of the whole."
    };
    Some(Figure::new(
        "000 Fig. 14",
        "A migration takes 21 s from 0 to 4 ms, and 52 s at 16 ms, 2.5 times as long.",
        Some((text, LIKE_THEIRS.contains(&ratio))),
        why,
    ))
}

/// The sum of migration and execution.
fn total(results: &Results) -> Option<Figure> {
    let rtts = results.rtts_ms();
    let wins = |rtt_ms: &u32| {
        let sum = sum_s(results, *rtt_ms)?;
        Some(sum < results.work_s(Work::Tpch, *rtt_ms, Way::Iscsi)?)
    };
    let (near, far) = ends(results)?;
    let far_wins = wins(&far)?;
    let from = rtts.iter().find(|rtt_ms| wins(rtt_ms) == Some(true));
    let from = from.map_or_else(|| "nowhere".to_owned(), |rtt_ms| format!("from {rtt_ms} ms on"));
    let mut text = format!(
        "A migration and the work beside the data together are below plain iSCSI {from} (measured from {near} to {far} ms)."
    );
    let stay = results.work_s(Work::Tpch, far, Way::Stay);
    let remote = results.work_s(Work::Tpch, far, Way::Remote);
    if let Some((stay, remote)) = stay.zip(remote) {
        let verdict = if stay < remote { "shorter" } else { "not shorter" };
        text.push_str(&format!(
            " The paper moves first and works then. Here the job works while it is moved: at {far} ms that takes {stay:.1} s, \
             {verdict} than staying remote behind the local volume server ({remote:.1} s)."
        ));
    }
    let follow = results.work_s(Work::Tpch, far, Way::Follow);
    if let Some((stay, follow)) = stay.zip(follow).filter(|(stay, follow)| follow < stay) {
        text.push_str(&format!(
            " With its own disks coming after it, the work takes {follow:.1} s instead of {stay:.1} s. A likely reason, \
             not measured by itself: a guest whose root disk stays behind reads its programs over the WAN."
        ));
    }
    Some(Figure::new(
        "000 Fig. 15",
        "A migration and the execution beside the data together are faster than remote access when the round trip is long.",
        Some((text, far_wins)),
        "The queries are short beside the move here: theirs took minutes.",
    ))
}

/// The paper's sum: a migration, and then the work beside the data.
pub fn sum_s(results: &Results, rtt_ms: u32) -> Option<f64> {
    let migration = results
        .median(Work::Tpch, rtt_ms, Way::Stay, |run| Some(float(run.migration?.total_ms)))?;
    Some(migration / 1e3 + results.work_s(Work::Tpch, rtt_ms, Way::Local)?)
}
