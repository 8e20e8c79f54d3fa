//! The real relay between real namespaces. What a link lets pass is tested strictly; that it is
//! quick is not.

use std::time::{Duration, Instant};

use perigee_lab::wan::{self, Change, Counts, LinkSettings, Rate};
use perigee_lab::{Definition, Lab, LabId, Link, SiteDef};
use perigee_model::SiteId;

use crate::bench::{Bench, answers, host, kill, round_trip, until};

fn site(name: &str) -> SiteId {
    SiteId::new(name).expect("a name")
}

async fn set(lab: &Lab, one: &str, other: &str, change: Change) -> Link {
    wan::set(lab, &site(one), &site(other), change).await.expect("wan set")
}

fn rtt_ms(rtt_ms: u64) -> Change {
    Change { rtt_us: Some(rtt_ms * 1000), ..Change::default() }
}

/// What the relay has counted so far, from the first site of a link to the second.
fn counts(lab: &Lab) -> Counts {
    wan::counts(lab).expect("the relay's counts")[0].counts[0]
}

#[tokio::test]
async fn the_wan_is_what_it_is_set_to_while_the_lab_runs() {
    let bench = Bench::new();
    let lab = bench.up().await;
    set(&lab, "home", "cloud", rtt_ms(60)).await;
    assert!(round_trip(&lab, "home1", "cloud1") >= Duration::from_millis(60));
    assert!(round_trip(&lab, "cloud1", "home2") >= Duration::from_millis(60));

    set(&lab, "cloud", "home", Change { down: Some(true), ..Change::default() }).await;
    assert_eq!(answers(&lab, "home1", "cloud1"), None, "the link is down");
    assert!(answers(&lab, "home1", "home2").is_some(), "a site's own network is not");
    let measured = wan::report(&lab, &lab.links().expect("links")).expect("a report");
    assert_eq!((measured[0].measured.rtt_us, measured[0].differences.len()), (None, 0));

    let up = set(&lab, "home", "cloud", Change { down: Some(false), ..Change::default() }).await;
    assert_eq!(up.settings, LinkSettings::of_rtt_us(60_000));
    until("the link to be up again", || answers(&lab, "home1", "cloud1").is_some()).await;
    assert!(round_trip(&lab, "home1", "cloud1") >= Duration::from_millis(60));

    let refused = wan::set(&lab, &site("home"), &site("moon"), rtt_ms(1)).await;
    assert!(refused.expect_err("no such site").why.contains("home-cloud"));
    bench.down(&lab.definition.id).await;
}

#[tokio::test]
async fn loss_loses_and_a_rate_is_never_exceeded() {
    let bench = Bench::new();
    let lab = bench.up().await;
    set(&lab, "home", "cloud", Change { loss_ppm: Some(1_000_000), ..rtt_ms(1) }).await;
    let before = counts(&lab);
    assert_eq!(answers(&lab, "home1", "cloud1"), None, "all is lost");
    let after = counts(&lab);
    assert!(after.lost_frames > before.lost_frames);
    assert_eq!(after.carried_frames, before.carried_frames);

    let rate = 20_000_000;
    let slow = Change { loss_ppm: Some(0), rate: Some(Rate(Some(rate))), ..Change::default() };
    let link = set(&lab, "home", "cloud", slow).await;
    let (before, began) = (counts(&lab), Instant::now());
    // It sends as much as TCP gets through, both ways.
    let report = wan::report(&lab, std::slice::from_ref(&link)).expect("a report");
    let carried = counts(&lab).carried_bytes - before.carried_bytes;
    let waits_us = began.elapsed().as_micros() + u128::from(link.settings.wait_us_max());
    let most_bytes = waits_us * u128::from(rate) / 8_000_000 + 2000;
    assert!(u128::from(carried) <= most_bytes, "{carried} of {most_bytes} bytes: {report:?}");
    assert!(report[0].measured.rate_bits_per_s.iter().all(Option::is_some), "{report:?}");
    bench.down(&lab.definition.id).await;
}

#[tokio::test]
async fn each_pair_of_three_sites_has_a_link_of_its_own() {
    let bench = Bench::new();
    let sites = ["home", "cloud", "edge"]
        .map(|name| SiteDef { name: site(name), hosts: vec![host(&format!("{name}1"))] });
    let id = LabId::random();
    let mut definition = Definition::new(id, sites.to_vec(), LinkSettings::of_rtt_us(1000));
    for (link, rtt_us) in definition.links.iter_mut().zip([10_000, 30_000, 50_000]) {
        link.settings.rtt_us = rtt_us;
    }
    let lab = bench.up_as(definition).await;
    for (from, to, rtt_ms) in
        [("home1", "cloud1", 10), ("home1", "edge1", 30), ("cloud1", "edge1", 50)]
    {
        assert!(round_trip(&lab, from, to) >= Duration::from_millis(rtt_ms), "{from} to {to}");
    }
    let cut = Change { down: Some(true), ..Change::default() };
    set(&lab, "edge", "home", cut).await;
    assert_eq!(answers(&lab, "home1", "edge1"), None, "also not by way of the third site");
    assert!(round_trip(&lab, "home1", "cloud1") >= Duration::from_millis(10));
    assert!(round_trip(&lab, "edge1", "cloud1") >= Duration::from_millis(50));
    bench.down(&lab.definition.id).await;
}

#[tokio::test]
async fn a_killed_relay_comes_back_as_it_was_set_and_leaves_nothing() {
    let bench = Bench::new();
    let lab = bench.up().await;
    set(&lab, "home", "cloud", rtt_ms(40)).await;
    let old = lab.relay_pid().expect("it runs");
    kill(old);
    until("a new relay", || lab.relay_pid().is_ok_and(|new| new != old)).await;
    until("the WAN", || answers(&lab, "home1", "cloud1").is_some()).await;
    assert!(round_trip(&lab, "home1", "cloud1") >= Duration::from_millis(40));

    let text = std::fs::read_to_string(lab.dir().join("supervisor.json")).expect("a supervisor");
    let supervisor: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    kill(i32::try_from(supervisor["pid"].as_i64().expect("a pid")).expect("a pid"));
    kill(lab.relay_pid().expect("it runs"));
    bench.down(&lab.definition.id).await;
}
