//! For each figure: what Toyoshima's paper shows, and whether these runs agree. The measurements decide that, so a
//! report never contradicts its own figures.
//!
//! S. Toyoshima, S. Yamaguchi, M. Oguchi, "Storage access optimization with virtual machine migration during
//! execution of parallel data processing on a virtual machine PC cluster". It has Xen guests of 2 GB with OSDL-DBT-3
//! in PostgreSQL, iSCSI from Linux's initiator to iSCSI-Enterprise-Target, and Dummynet with 1 to 16 ms of round
//! trip. The text names only some figures' values; of the others it describes the shape.

use crate::case::{Way, Work};
use crate::results::{Results, float};

fn agrees(yes: bool) -> &'static str {
    if yes { "Ours agrees" } else { "Ours does not agree" }
}

/// The shortest and the longest round trip of which there are runs.
fn ends(results: &Results) -> Option<(u32, u32)> {
    let rtts = results.rtts_ms();
    let (first, last) = (*rtts.first()?, *rtts.last()?);
    (first < last).then_some((first, last))
}

/// The execution time against the round trip, figure 5.
pub fn execution(results: &Results) -> Option<String> {
    let (near, far) = ends(results)?;
    let at = |way, rtt_ms| results.work_s(Work::Tpch, rtt_ms, way);
    let growth = |way| Some((at(way, far)?, at(way, far)? / at(way, near)?));
    let (iscsi_s, iscsi) = growth(Way::Iscsi)?;
    let mut text = format!(
        "Toyoshima, figure 5: over iSCSI the execution time grows with the round trip, and severely beyond 4 ms. {}: \
         from {near} to {far} ms our queries over plain iSCSI take {iscsi:.2} times as long ({iscsi_s:.1} s).",
        agrees(iscsi >= 1.2)
    );
    if let Some((remote_s, remote)) = growth(Way::Remote) {
        text.push_str(&format!(
            " Through the local volume server they take {remote:.2} times as long ({remote_s:.1} s), because it reads \
             ahead over the WAN: fewer reads wait for a round trip."
        ));
    }
    Some(text)
}

/// The migration time against the round trip, figure 14.
pub fn migration(results: &Results) -> Option<String> {
    let (near, far) = ends(results)?;
    let at = |rtt_ms| {
        results.median(Work::Tpch, rtt_ms, Way::Stay, |run| Some(float(run.migration?.total_ms)))
    };
    let (near_ms, far_ms) = (at(near)?, at(far)?);
    let ratio = far_ms / near_ms;
    let mut text = format!(
        "Toyoshima, figure 14: a migration takes 21 s from 0 to 4 ms, and 52 s at 16 ms, 2.5 times as long. {}: ours takes \
         {near_ms:.0} ms at {near} ms, and {far_ms:.0} ms at {far} ms, {ratio:.2} times as long.",
        agrees((1.7..=3.5).contains(&ratio))
    );
    if ratio < 1.7 {
        text.push_str(
            " The paper's memory of 2 GB goes through one TCP connection, whose window of that time does not fill a link \
             of 16 ms; here the windows are as large as the link needs, and what remains are the round trips of the \
             preparation and of the pause.",
        );
    } else if ratio > 3.5 {
        text.push_str(
            " Our guest has 256 MiB, of which little has to be sent: the round trips of the preparation and of the pause \
             are a larger part of the whole.",
        );
    }
    Some(text)
}

/// The sum of migration and execution, figure 15.
pub fn total(results: &Results) -> Option<String> {
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
        "Toyoshima, figure 15: migration and execution beside the data together are faster than remote access when the \
         round trip is long. {}: the sum is below plain iSCSI {from} (measured from {near} to {far} ms).",
        agrees(far_wins)
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
    Some(text)
}

/// The paper's sum: a migration, and then the work beside the data.
pub fn sum_s(results: &Results, rtt_ms: u32) -> Option<f64> {
    let migration = results
        .median(Work::Tpch, rtt_ms, Way::Stay, |run| Some(float(run.migration?.total_ms)))?;
    Some(migration / 1e3 + results.work_s(Work::Tpch, rtt_ms, Way::Local)?)
}
