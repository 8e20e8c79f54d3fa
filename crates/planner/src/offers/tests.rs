//! The fixture's data are at `cloud1`; `home1` and `home2` are 16 ms away, and so is each host at their site.

use std::num::NonZeroU64;

use perigee_model::job_plan::HostWait;
use perigee_model::money::Price;
use perigee_model::plan::CostOf;

use super::*;
use crate::facts::MoneyFacts;
use crate::fixture::*;
use crate::measured::tests::{linked, nothing};
use crate::plan;

const GIB: u64 = 1 << 30;

/// $3.60 an hour: 1,000 millionths a second.
fn offer(kind: &str, site: &str) -> OfferFacts {
    let price = Price { minimum_s: 60, source: "ec2".to_owned(), ..(*price(3_600_000)).clone() };
    OfferFacts {
        provider: "ec2".to_owned(),
        offer: Offer {
            kind: kind.to_owned(),
            zone: "a".to_owned(),
            spot: false,
            cpus: 8,
            memory_bytes: 16 * GIB,
            kvm: Some(true),
            price,
        },
        why_unknown: String::new(),
        memory_bytes: 15 * GIB,
        disk_bytes: 50 * GIB,
        site: SiteId::new(site).expect("a name"),
        like: None,
        measured: None,
        start: Some(Start { expected_s: 40.0, high_s: 70.0, taken_back_every_s: None }),
        refused: None,
        budget_left: "$20".parse().expect("money"),
    }
}

fn snapshot() -> Snapshot {
    let mut job = job();
    job.may_migrate = false;
    job.money.disk_bytes = Some(GIB);
    Snapshot { cluster: cluster(), job, history: history(1000.0), others: Vec::new() }
}

fn planned(snapshot: &Snapshot, offers: Vec<OfferFacts>, waits: Vec<HostWait>) -> JobPlan {
    let (rented, not_considered) = at_offers(snapshot, offers);
    let mut plan = JobPlan { plan: plan(snapshot).expect("a plan"), waits, rented, not_considered };
    weigh(&mut plan);
    plan
}

fn wait(host: &str, seconds: Option<f64>) -> HostWait {
    let estimate = |s: f64| Estimate { expected_s: s, low_s: s, high_s: s };
    HostWait { host: host_id(host), wait: seconds.map(estimate), why: "waits".to_owned() }
}

fn why_not(snapshot: &Snapshot, offer: OfferFacts) -> String {
    let (rented, not) = at_offers(snapshot, vec![offer]);
    assert!(rented.is_empty(), "{rented:?}");
    not[0].why.clone()
}

/// Whole seconds, rounded up.
fn whole_s(seconds: f64) -> u64 {
    std::time::Duration::from_secs_f64(seconds.ceil()).as_secs()
}

#[test]
fn a_rented_host_costs_its_start_its_run_its_whole_disk_and_what_leaves() {
    let mut snapshot = snapshot();
    // All that the job reads leaves the site of its data, which costs something too.
    snapshot.cluster.hosts[2].price = Some(price(3_600_000));
    snapshot.history.iter_mut().for_each(|run| run.volumes[0].bytes = 2.0 * GIB as f64);
    let plan = planned(&snapshot, vec![offer("k", "home")], Vec::new());
    let [rent] = plan.rented.as_slice() else { panic!("{plan:?}") };
    assert_eq!((rent.way, rent.host.as_str()), (Way::Remote, "rented"));
    let of = |of: CostOf| {
        let item = rent.cost.items.iter().find(|item| item.of == of).expect("an item");
        (item.host.to_string(), item.cost.expect("known").expected)
    };
    let seconds = whole_s(rent.ends().expected_s);
    assert_close(rent.ends().expected_s, 40.0 + rent.total.expected_s);
    let price = price(3_600_000);
    let paid = |amount: Option<Money>| ("rented".to_owned(), amount.expect("known"));
    assert_eq!(of(CostOf::Machine), paid(price.machine(seconds)));
    assert_eq!(of(CostOf::Disk), paid(price.disk(50 * GIB, seconds)));
    let (leaves, egress) = of(CostOf::Egress);
    let shipped = rent.shipped_bytes.expect("known");
    assert_eq!(leaves, "cloud1");
    let reckoned = price.egress(shipped).expect("known");
    assert!(egress.micros.abs_diff(reckoned.micros) <= 1 && shipped > GIB / 2, "{egress}");
    let high = rent.cost.total.expect("known").high;
    assert!(Some(high) > price.machine(whole_s(rent.total.high_s + 70.0)), "{high}");
}

#[test]
fn a_short_run_costs_the_least_time_that_is_paid() {
    let mut long = offer("k", "home");
    long.offer.price.minimum_s = 3600;
    let plan = planned(&snapshot(), vec![long], Vec::new());
    let machine = &plan.rented[0].cost.items[0];
    assert_eq!(machine.cost.expect("known").expected.micros, 3_600_000);
    assert!(machine.why.contains("3600 s are the least that is paid"), "{}", machine.why);
}

#[test]
fn the_best_trades_are_those_of_own_and_rented_hosts_with_their_waits() {
    let snapshot = snapshot();
    let best = |plan: &JobPlan| {
        let own = plan.plan.options.iter().map(|o| (o.start.to_string(), &o.cost));
        let own = own.filter(|(_, cost)| cost.as_ref().is_some_and(|cost| cost.is_best_trade));
        let rented = plan.rented.iter().filter(|rent| rent.cost.is_best_trade);
        own.map(|(at, _)| at).chain(rented.map(|rent| rent.kind.clone())).collect::<Vec<_>>()
    };
    let free = planned(&snapshot, vec![offer("k", "home")], Vec::new());
    assert_eq!(best(&free), ["cloud1"], "own hosts are sooner and cost nothing");
    let long = ["home1", "home2", "cloud1"].map(|host| wait(host, Some(2000.0)));
    let queue = planned(&snapshot, vec![offer("k", "home")], long.to_vec());
    assert_eq!(best(&queue), ["cloud1", "k"]);
    let reason = &queue.rented[0].reason;
    assert!(
        reason.contains("starts in 40 s; ends 19")
            && reason.contains("sooner than beside at cloud1, and $0."),
        "{reason}"
    );
    let unknown = ["home1", "home2", "cloud1"].map(|host| wait(host, None));
    let unknown = planned(&snapshot, vec![offer("k", "home")], unknown.to_vec());
    assert_eq!(best(&unknown), ["k"], "what ends nobody knows when is no trade");
}

#[test]
fn a_start_that_was_never_seen_is_said_to_be_assumed() {
    let plan =
        planned(&snapshot(), vec![OfferFacts { start: None, ..offer("k", "home") }], Vec::new());
    let rent = &plan.rented[0];
    assert_close(rent.wait.expected_s, UNKNOWN_START.expected_s);
    assert!(rent.reason.contains("assumed: no host of this kind was started yet"), "{rent:?}");
}

#[test]
fn a_link_that_nobody_has_measured_is_not_known_and_no_constant() {
    let why = why_not(&snapshot(), offer("k", "elsewhere"));
    assert_eq!(
        why,
        "not known how far cloud1 is from site elsewhere: no host of this site was ever measured"
    );
    let mut without_data = snapshot();
    without_data.job.volumes.clear();
    without_data.job.traits.data_bytes.clear();
    without_data.history.clear();
    let plan = planned(&without_data, vec![offer("k", "elsewhere")], Vec::new());
    assert_eq!(plan.rented[0].way, Way::Beside, "a job without data needs no link");
}

/// The kind's one way, and why nothing is known of it.
fn measured_at(site: &str, measured: Option<MeasuredHost>) -> Result<RentOption, String> {
    let mut snapshot = snapshot();
    for run in &mut snapshot.history {
        run.volumes[0].bytes = 2.0 * GIB as f64;
        // 2 GiB at 128 MiB/s.
        let bytes_s = if run.volumes[0].remote_share > 0.0 { 16.0 } else { 0.0 };
        (run.wall_s, run.network_s) = (run.wall_s + bytes_s, run.network_s + bytes_s);
    }
    let offer = OfferFacts { measured: measured.map(Arc::new), ..offer("k", site) };
    let (mut rented, not) = at_offers(&snapshot, vec![offer]);
    rented.pop().ok_or_else(|| not[0].why.clone())
}

#[test]
fn a_kind_that_was_measured_has_its_own_links_and_says_so() {
    let at =
        |rtt_ms, rate| measured_at("elsewhere", Some(linked("old", "elsewhere", rtt_ms, rate)));
    let near = at(4.0, 512 * MIB).expect("its links are known");
    let thin = at(4.0, 16 * MIB).expect("its links are known");
    let far = at(40.0, 512 * MIB).expect("its links are known");
    assert!(thin.total.expected_s > near.total.expected_s + 100.0, "{thin:?}");
    assert!(far.total.expected_s > near.total.expected_s + 30.0, "{far:?}");
    assert!(near.reason.starts_with("starts in 40 s; links as measured on k 3d ago"), "{near:?}");
    // Measured at another site, it says nothing of this one.
    let elsewhere = measured_at("elsewhere", Some(linked("old", "home", 4.0, 512 * MIB)));
    assert!(elsewhere.expect_err("not known").contains("not known how far"));
    // Of the two, what was measured of the kind says more than what was measured at its site.
    let own = measured_at("home", Some(linked("old", "home", 40.0, WAN_BYTES_PER_S)));
    let site = measured_at("home", None).expect("its site's links are known");
    assert!(own.expect("known").total.expected_s > site.total.expected_s + 15.0, "{site:?}");
}

#[test]
fn a_kind_whose_volume_servers_are_slow_reads_slowly_and_without_figures_all_is_as_before() {
    let before = measured_at("home", None).expect("its site's links are known");
    let empty = measured_at("home", Some(nothing("old"))).expect("the same");
    assert_eq!((empty.total, &empty.reason), (before.total, &before.reason));
    let remote_reads = vec![(SiteId::new("cloud").expect("a name"), 16 * MIB)];
    let slow = measured_at("home", Some(MeasuredHost { remote_reads, ..nothing("old") }));
    let slow = slow.expect("its site's links are known");
    assert!(slow.total.expected_s > before.total.expected_s + 90.0, "{slow:?}");
    assert!(slow.reason.contains("remote reads as measured on k 3d ago"), "{slow:?}");
}

#[test]
fn what_is_not_considered_has_its_reason() {
    let snapshot = snapshot();
    let with = |change: fn(&mut OfferFacts)| {
        let mut offer = offer("k", "home");
        change(&mut offer);
        offer
    };
    for (offer, why) in [
        (with(|of| of.offer.kvm = Some(false)), "no KVM"),
        (with(|of| of.offer.kvm = None), "not known whether it has KVM"),
        (with(|of| of.offer.cpus = 0), "only 0 CPUs"),
        (with(|of| of.memory_bytes = 256 * MIB), "only 256 MiB for VMs"),
        (with(|of| of.offer.price.per_hour_micros = None), "price unknown"),
        (with(|of| of.refused = Some("no capacity".to_owned())), "no capacity"),
    ] {
        assert_eq!(why_not(&snapshot, offer), why);
    }
    let mut old = with(|of| of.offer.price.per_hour_micros = None);
    old.why_unknown = "it is 58 days old, more than 30d".to_owned();
    assert_eq!(why_not(&snapshot, old), "price unknown: it is 58 days old, more than 30d");
    let of_job = |change: fn(&mut Snapshot)| {
        let mut snapshot = self::snapshot();
        change(&mut snapshot);
        why_not(&snapshot, self::offer("k", "home"))
    };
    assert!(of_job(|s| s.job.uses_confined = true).contains("may not leave their site"));
    let at = |s: &mut Snapshot| s.job.start = StartAt::Host(host_id("home1"));
    assert_eq!(of_job(at), "its file lets the job start only at home1");
    let at = |s: &mut Snapshot| s.job.start = StartAt::Site(SiteId::new("cloud").expect("a name"));
    assert_eq!(of_job(at), "its file lets the job start only at site cloud");
}

#[test]
fn a_cluster_without_kvm_needs_none_of_a_rented_host() {
    let mut snapshot = snapshot();
    snapshot.cluster.hosts.iter_mut().for_each(|host| host.accelerator = Accelerator::Tcg);
    let mut offer = offer("k", "home");
    offer.offer.kvm = Some(false);
    assert_eq!(at_offers(&snapshot, vec![offer]).0.len(), 1);
}

#[test]
fn of_a_kind_the_cheapest_zone_counts_that_was_not_refused() {
    let zone = |zone: &str, per_hour: u64, refused: bool| {
        let mut offer = offer("k", "home");
        offer.offer.zone = zone.to_owned();
        offer.offer.price.per_hour_micros = NonZeroU64::new(per_hour);
        OfferFacts { refused: refused.then(|| "no capacity".to_owned()), ..offer }
    };
    let offers = vec![
        zone("a", 300, false),
        zone("b", 100, true),
        zone("c", 200, false),
        zone("d", 0, false),
    ];
    let (rented, _) = at_offers(&snapshot(), offers);
    assert!(rented.iter().all(|rent| rent.zone == "c") && !rented.is_empty(), "{rented:?}");
}

#[test]
fn what_is_over_a_budget_is_shown_and_is_not_possible() {
    let mut snapshot = snapshot();
    let poor = OfferFacts { budget_left: Money::from_micros(1), ..offer("k", "home") };
    let plan = planned(&snapshot, vec![poor], Vec::new());
    let rent = &plan.rented[0];
    assert!(!rent.possible && !rent.cost.is_best_trade, "{rent:?}");
    assert_eq!(rent.reason, "not possible: over what is left of --rent-budget");
    snapshot.job.money =
        MoneyFacts { budget: Some(Money::from_micros(10_000)), ..snapshot.job.money };
    let plan = planned(&snapshot, vec![offer("k", "home")], Vec::new());
    assert_eq!(plan.rented[0].reason, "not possible: over the job's budget of $0.01");
}

#[test]
fn of_many_offers_few_are_shown_and_the_rest_is_not_looked_at() {
    let many = (0..OFFERS_MOST + 5).map(|number| {
        let mut offer = offer(&format!("k{number:02}"), "home");
        offer.offer.price.per_hour_micros = NonZeroU64::new(1_000_000 + number as u64);
        offer
    });
    let plan = planned(&snapshot(), many.collect(), Vec::new());
    assert_eq!((plan.rented.len(), plan.not_considered.len()), (1, 5), "{plan:?}");
    assert_eq!(plan.rented[0].kind, "k00", "no other one is sooner or cheaper");
    assert!(plan.not_considered[0].why.contains("32 cheaper ones"));
}

#[test]
fn a_host_boots_as_one_of_its_kind_that_is_there() {
    let boot_s = |like: Option<HostFacts>| {
        let offer = OfferFacts { like, ..offer("k", "home") };
        planned(&snapshot(), vec![offer], Vec::new()).rented[0].predicted.boot_s
    };
    let mut slow = cluster().hosts[0].clone();
    slow.boots = vec![booted_in(300.0); 8].into();
    assert!(boot_s(Some(slow)) > 2.0 * boot_s(None));
}

#[test]
fn the_host_that_would_be_rented_is_called_as_no_other_one_is() {
    let mut cluster = cluster();
    assert_eq!(close_all(&mut cluster).as_str(), "rented");
    cluster.hosts[0].id = host_id("rented");
    assert_eq!(close_all(&mut cluster).as_str(), "rented-2");
}
