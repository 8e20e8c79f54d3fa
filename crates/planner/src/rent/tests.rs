use std::num::NonZeroU64;

use proptest::prelude::*;

use super::*;

const GIB: u64 = 1 << 30;

fn dollars(dollars: f64) -> Money {
    drain::money(dollars * 1e6)
}

fn price(per_hour: Option<f64>) -> Price {
    Price {
        per_hour_micros: per_hour.and_then(|per_hour| NonZeroU64::new(dollars(per_hour).micros)),
        minimum_s: 60,
        egress_per_gib_micros: NonZeroU64::new(90_000),
        disk_per_gib_month_micros: None,
        source: "test".to_owned(),
        as_of_unix_s: 0,
    }
}

fn offer(kind: &str, per_hour: Option<f64>) -> Offer {
    Offer {
        kind: kind.to_owned(),
        zone: "a".to_owned(),
        spot: false,
        cpus: 8,
        memory_bytes: 32 * GIB,
        kvm: Some(true),
        price: price(per_hour),
    }
}

pub(super) fn job(number: usize, per_hour: f64) -> Job {
    let run = Run { expected_s: 1200.0, high_s: 1500.0, egress_bytes: 0 };
    Job {
        job: JobId::new(format!("j-{number}")).expect("letters and digits"),
        cpus: 2,
        memory_bytes: GIB,
        own: Some(run),
        own_egress: Money::ZERO,
        rented: [("k".to_owned(), run)].into(),
        may_leave: true,
        without_kvm: false,
        worth: Worth { waiting_per_hour: Some(dollars(per_hour)), ..Worth::default() },
    }
}

pub(super) fn host(number: usize) -> Host {
    Host {
        host: HostId::new(format!("h{number}")).expect("letters and digits"),
        cpus: 8,
        memory_bytes: 32 * GIB,
        kvm: true,
        ready_in_s: 0.0,
        running: Vec::new(),
        rented: None,
    }
}

fn rented(number: usize, idle_s: Option<f64>) -> Host {
    let rented = Rented {
        kind: "k".to_owned(),
        spot: false,
        price: price(Some(0.36)),
        paid_s: 4000.0,
        idle_s,
        reserved_s: 600.0,
        waiting_per_hour: dollars(1.0),
    };
    Host { rented: Some(rented), ..host(number) }
}

/// One own host, and so many jobs that wait.
pub(super) fn queue(jobs: usize, per_hour: f64) -> Snapshot {
    Snapshot {
        jobs: (0..jobs).map(|number| job(number, per_hour)).collect(),
        arrived: Vec::new(),
        hosts: vec![host(0)],
        offers: vec![offer("k", Some(0.36))],
        starts: [(
            "k".to_owned(),
            Start { expected_s: 90.0, high_s: 120.0, taken_back_every_s: None },
        )]
        .into(),
        refusals: Vec::new(),
        budget_left: dollars(1000.0),
        period: None,
        rented_most: 20,
    }
}

fn rents(decided: &Decided) -> Vec<&Rent> {
    let rents = decided.decisions.iter().filter_map(|decision| match decision {
        Decision::Rent(rent) => Some(rent.as_ref()),
        Decision::Keep(_) | Decision::GiveBack(_) => None,
    });
    rents.collect()
}

fn given_back(decided: &Decided) -> usize {
    decided.decisions.iter().filter(|one| matches!(one, Decision::GiveBack(_))).count()
}

#[test]
fn a_long_queue_with_dear_waiting_rents_and_says_what_that_saves() {
    let decided = decide(&queue(60, 1.0));
    let rents = rents(&decided);
    assert!(rents.len() > 1, "{decided:?}");
    assert!(rents.iter().all(|rent| rent.saves > rent.costs && !rent.jobs.is_empty()));
    assert!(rents[0].why.contains("of 60 jobs") && rents[0].why.contains('$'), "{}", rents[0].why);
}

#[test]
fn nobody_who_waits_or_waiting_that_costs_nothing_rents_nothing() {
    assert!(rents(&decide(&queue(0, 1.0))).is_empty());
    assert!(rents(&decide(&queue(60, 0.0))).is_empty());
    assert!(rents(&decide(&queue(3, 100.0))).is_empty(), "the own host has room");
}

#[test]
fn why_nothing_is_rented_is_said() {
    let why = |snapshot: &Snapshot| {
        let decided = decide(snapshot);
        assert!(rents(&decided).is_empty(), "{decided:?}");
        decided.no_more_because
    };
    assert_eq!(why(&queue(0, 1.0)), "no job waits for room");
    let mut free = queue(60, 1.0);
    free.jobs.iter_mut().for_each(|job| job.worth = Worth::default());
    assert!(why(&free).contains("60 jobs wait for room, and waiting costs none"));
    assert!(why(&queue(5, 0.2)).contains("would save"), "the whole machine costs more");
    let poor = Snapshot { budget_left: Money::from_micros(10), ..queue(60, 1.0) };
    assert!(why(&poor).contains("which does not pay for a job"), "{}", why(&poor));
    let none = Snapshot { offers: Vec::new(), ..queue(60, 1.0) };
    assert!(why(&none).contains("no provider"));
    let full = Snapshot { rented_most: 0, ..queue(60, 1.0) };
    assert_eq!(why(&full), "0 hosts are rented, and 0 may be at once");
    let mut refused = queue(60, 1.0);
    let (kind, zone) = ("k".to_owned(), "a".to_owned());
    refused.refusals = vec![Refusal { kind, zone, spot: false, ago_s: 1.0, times: 1 }];
    assert!(why(&refused).contains("1 were refused lately"));
}

#[test]
fn a_starting_host_counts_as_room() {
    let mut snapshot = queue(8, 1.0);
    let before = rents(&decide(&snapshot)).len();
    assert_eq!(before, 1);
    let starting = Host { ready_in_s: 80.0, ..rented(1, None) };
    snapshot.hosts.push(starting);
    assert!(rents(&decide(&snapshot)).is_empty());
}

#[test]
fn a_stream_of_jobs_is_worth_a_host_that_its_short_queue_is_not() {
    let mut snapshot = queue(1, 1.0);
    let running = Running { cpus: 8, memory_bytes: GIB, left_s: 300.0, left_high_s: 400.0 };
    snapshot.hosts[0].running = vec![running];
    snapshot.offers[0].price = price(Some(0.6));
    assert!(rents(&decide(&snapshot)).is_empty());
    let stream =
        (0..60).map(|number| Arrived { ago_s: f64::from(number) * 30.0, job: job(9, 1.0) });
    snapshot.arrived = stream.collect();
    let decided = decide(&snapshot);
    assert_eq!(decided.planned.len(), 1, "what is expected is not planned");
    assert!(!rents(&decided).is_empty());
    snapshot.jobs.clear();
    assert!(rents(&decide(&snapshot)).is_empty(), "nobody waits");
}

#[test]
fn the_jobs_whose_data_are_dear_to_move_stay_at_home() {
    let mut snapshot = queue(8, 1.0);
    for job in &mut snapshot.jobs[4..] {
        if let Some(run) = job.rented.get_mut("k") {
            run.egress_bytes = 50 * GIB;
        }
    }
    let decided = decide(&snapshot);
    let mut gone = rents(&decided)[0].jobs.clone();
    gone.sort();
    let light: Vec<JobId> = snapshot.jobs[..4].iter().map(|job| job.job.clone()).collect();
    assert_eq!(gone, light, "those without egress go, though they are the first of the queue");
}

#[test]
fn confined_data_and_jobs_that_need_kvm_never_go() {
    let mut confined = queue(60, 9.0);
    confined.jobs.iter_mut().for_each(|job| job.may_leave = false);
    assert!(rents(&decide(&confined)).is_empty());
    for kvm in [None, Some(false)] {
        let mut without = queue(60, 9.0);
        without.offers[0].kvm = kvm;
        assert!(rents(&decide(&without)).is_empty());
        without.jobs.iter_mut().for_each(|job| job.without_kvm = true);
        assert!(!rents(&decide(&without)).is_empty());
    }
}

#[test]
fn offers_at_which_no_job_can_run_take_no_other_s_place() {
    let mut snapshot = queue(60, 1.0);
    let (good, cheap) = (snapshot.offers.remove(0), offer("k", Some(0.01)));
    let useless = [
        Offer { cpus: 1, ..cheap.clone() },
        Offer { memory_bytes: GIB - 1, ..cheap.clone() },
        Offer { kvm: None, ..cheap.clone() },
        Offer { kind: "not predicted".to_owned(), ..cheap },
    ];
    for one in useless {
        snapshot.offers = vec![one.clone(); OFFERS_MOST];
        let decided = decide(&snapshot);
        assert!(rents(&decided).is_empty(), "{one:?}");
        let why = &decided.no_more_because;
        assert!(why.contains("no job that waits can run at the others"), "{why}");
        snapshot.offers.push(good.clone());
        assert!(!rents(&decide(&snapshot)).is_empty(), "{one:?}");
    }
}

#[test]
fn egress_whose_price_is_not_known_is_not_free() {
    let mut snapshot = queue(60, 9.0);
    snapshot.offers[0].price.egress_per_gib_micros = None;
    assert!(!rents(&decide(&snapshot)).is_empty(), "nothing leaves");
    for job in &mut snapshot.jobs {
        if let Some(run) = job.rented.get_mut("k") {
            run.egress_bytes = 1;
        }
    }
    assert!(rents(&decide(&snapshot)).is_empty());
}

#[test]
fn a_deadline_rents_when_the_own_hosts_would_miss_it() {
    let mut snapshot = queue(8, 0.0);
    for (in_s, wanted) in [(9000.0, 0), (2000.0, 1), (300.0, 0), (-5.0, 0)] {
        for job in &mut snapshot.jobs {
            job.worth = Worth {
                waiting_per_hour: None,
                deadline_in_s: Some(in_s),
                budget: Some(dollars(1.0)),
            };
        }
        assert_eq!(rents(&decide(&snapshot)).len(), wanted, "in {in_s} s");
    }
}

#[test]
fn a_job_spends_no_more_than_its_own_budget() {
    let mut snapshot = queue(60, 9.0);
    snapshot.jobs.iter_mut().for_each(|job| job.worth.budget = Some(Money::from_micros(1000)));
    assert!(rents(&decide(&snapshot)).is_empty());
}

#[test]
fn what_was_refused_is_not_asked_for_until_some_time_has_passed() {
    let mut snapshot = queue(60, 1.0);
    let refusal = |ago_s, times| Refusal {
        kind: "k".to_owned(),
        zone: "a".to_owned(),
        spot: false,
        ago_s,
        times,
    };
    for (ago_s, times, is_asked) in
        [(299.0, 1, false), (301.0, 1, true), (301.0, 2, false), (3601.0, 9, true)]
    {
        snapshot.refusals = vec![refusal(ago_s, times)];
        assert_eq!(!rents(&decide(&snapshot)).is_empty(), is_asked, "{ago_s} s ago, {times}");
    }
}

#[test]
fn a_tight_budget_takes_the_offer_that_saves_most_for_a_dollar() {
    let mut snapshot = queue(60, 1.0);
    // Twice as fast for five times the price.
    snapshot.offers.push(offer("l", Some(1.8)));
    for job in &mut snapshot.jobs {
        let fast = Run { expected_s: 600.0, high_s: 750.0, egress_bytes: 0 };
        job.rented.insert("l".to_owned(), fast);
    }
    snapshot.starts.insert("l".to_owned(), snapshot.starts["k"]);
    assert_eq!(rents(&decide(&snapshot))[0].offer.kind, "l");
    snapshot.period = Some(Period { left_s: 36_000.0 });
    snapshot.budget_left = dollars(10.0);
    assert_eq!(rents(&decide(&snapshot))[0].offer.kind, "k");
}

#[test]
fn an_idle_host_goes_when_idling_has_cost_as_much_as_a_new_start() {
    let mut snapshot = queue(0, 1.0);
    // A start takes 90 s at $0.36, and $1 for those who wait: as much as 340 s of idling.
    for (idle_s, paid_s, back) in [(339.0, 4000.0, 0), (341.0, 4000.0, 1), (341.0, 59.0, 0)] {
        let mut idle = rented(1, Some(idle_s));
        if let Some(rented) = &mut idle.rented {
            rented.paid_s = paid_s;
        }
        snapshot.hosts = vec![host(0), idle];
        assert_eq!(given_back(&decide(&snapshot)), back, "idle for {idle_s} s");
    }
}

#[test]
fn a_host_for_which_nothing_is_left_is_given_back_though_jobs_run_there() {
    let mut busy = rented(1, None);
    busy.running = vec![Running { cpus: 2, memory_bytes: GIB, left_s: 900.0, left_high_s: 1200.0 }];
    let mut snapshot = queue(0, 1.0);
    snapshot.hosts = vec![host(0), busy];
    assert_eq!(given_back(&decide(&snapshot)), 0);
    snapshot.budget_left = Money::from_micros(10);
    assert_eq!(given_back(&decide(&snapshot)), 1);
}

#[test]
fn a_host_whose_longer_stay_is_not_paid_stays_until_the_last_minutes_of_its_reservation() {
    let mut busy = rented(1, None);
    busy.running = vec![Running { cpus: 2, memory_bytes: GIB, left_s: 900.0, left_high_s: 4000.0 }];
    let mut snapshot = queue(0, 1.0);
    snapshot.budget_left = Money::from_micros(10);
    for (reserved_s, back) in [(AHEAD_S + 1.0, 0), (AHEAD_S - 1.0, 1)] {
        if let Some(rented) = &mut busy.rented {
            rented.reserved_s = reserved_s;
        }
        snapshot.hosts = vec![host(0), busy.clone()];
        let decided = decide(&snapshot);
        assert_eq!(
            (given_back(&decided), reserved(&decided)),
            (back, Money::ZERO),
            "{reserved_s} s"
        );
    }
    if let Some(rented) = &mut busy.rented {
        rented.reserved_s = AHEAD_S + 1.0;
    }
    // A job needs some $0.04 there, and the host $0.40 more for the one that it has.
    let waits = Snapshot { hosts: vec![busy], budget_left: dollars(0.2), ..queue(1, 9.0) };
    assert!(planned(&waits).is_empty(), "it takes no more jobs");
    let paid = Snapshot { budget_left: dollars(1.0), ..waits };
    assert_eq!(planned(&paid).len(), 1);
}

#[test]
fn what_is_reserved_for_a_host_pays_its_lease_when_nobody_hears_of_it_any_more() {
    let decided = decide(&queue(60, 1.0));
    let rent = rents(&decided)[0];
    // A run takes 1,500 s at most, and a start 120 s.
    assert!(rent.reserved_s >= 1500.0 + 120.0 + LEASE_S, "{rent:?}");
    let mut short = queue(60, 9.0);
    short.jobs.iter_mut().for_each(|job| {
        let run = Run { expected_s: 60.0, high_s: 60.0, egress_bytes: 0 };
        job.rented.insert("k".to_owned(), run);
    });
    let decided = decide(&short);
    assert!(rents(&decided)[0].reserved_s >= UNHEARD_S, "{decided:?}");
    let mut idle = queue(0, 1.0);
    let mut there = rented(1, None);
    if let Some(rented) = &mut there.rented {
        rented.reserved_s = LEASE_S;
    }
    idle.hosts = vec![host(0), there];
    let kept = decide(&idle).decisions;
    let [Decision::Keep(keep)] = kept.as_slice() else { panic!("{kept:?}") };
    assert!(keep.reserve > Money::ZERO && keep.reserved_s > LEASE_S, "{keep:?}");
}

#[test]
fn spot_hosts_that_are_taken_back_often_are_not_cheap() {
    let mut snapshot = queue(60, 1.0);
    let spot = Offer { kind: "s".to_owned(), spot: true, ..offer("s", Some(0.15)) };
    snapshot.offers.push(spot);
    for job in &mut snapshot.jobs {
        let run = job.rented["k"];
        job.rented.insert("s".to_owned(), run);
    }
    for (every_s, kind) in [(100_000.0, "s"), (600.0, "k")] {
        let start = Start { expected_s: 90.0, high_s: 120.0, taken_back_every_s: Some(every_s) };
        snapshot.starts.insert("s".to_owned(), start);
        assert_eq!(rents(&decide(&snapshot))[0].offer.kind, kind, "every {every_s} s");
    }
}

/// Any snapshot: what is left, jobs, own and rented hosts, and offers of which some have no price.
fn snapshots() -> impl Strategy<Value = Snapshot> {
    let run =
        (1.0..5000.0f64, 1.0..3.0f64, 0..4 * GIB).prop_map(|(expected_s, more, egress_bytes)| {
            Run { expected_s, high_s: expected_s * more, egress_bytes }
        });
    let worth = (
        proptest::option::of(0.0..5.0f64),
        proptest::option::of(-100.0..9000.0f64),
        proptest::option::of(0.0..3.0f64),
    )
        .prop_map(|(per_hour, deadline_in_s, budget)| Worth {
            waiting_per_hour: per_hour.map(dollars),
            deadline_in_s,
            budget: budget.map(dollars),
        });
    let one =
        (1..10_u32, 1..40_u64, proptest::option::of(run.clone()), run, any::<[bool; 2]>(), worth);
    let jobs = proptest::collection::vec(one, 0..30).prop_map(|all| {
        let job_of = |(number, (cpus, gib, own, there, may, worth))| {
            let [may_leave, without_kvm]: [bool; 2] = may;
            let rented = ["k", "l", "free"].map(|kind: &str| (kind.to_owned(), there)).into();
            let memory_bytes = gib * GIB;
            Job {
                cpus,
                memory_bytes,
                own,
                rented,
                may_leave,
                without_kvm,
                worth,
                ..job(number, 1.0)
            }
        };
        all.into_iter().enumerate().map(job_of).collect::<Vec<Job>>()
    });
    let there = (proptest::option::of(0.0..900.0f64), 0.0..900.0f64, 0.0..9000.0f64, any::<bool>());
    let hosts = proptest::collection::vec(there, 0..5).prop_map(|all| {
        let host_of = |(number, (idle_s, ready_in_s, paid_s, spot))| {
            let mut one = rented(number + 1, idle_s);
            one.ready_in_s = if idle_s.is_some() { 0.0 } else { ready_in_s };
            if let Some(rented) = &mut one.rented {
                (rented.paid_s, rented.reserved_s, rented.spot) = (paid_s, ready_in_s, spot);
            }
            one
        };
        let rented = all.into_iter().enumerate().map(host_of);
        std::iter::once(host(0)).chain(rented).collect::<Vec<_>>()
    });
    let offers = (0.01..4.0f64, 0.01..4.0f64, any::<bool>()).prop_map(|(one, other, spot)| {
        vec![offer("k", Some(one)), Offer { spot, ..offer("l", Some(other)) }, offer("free", None)]
    });
    (jobs, hosts, offers, 0.0..20.0f64, 0..8_usize).prop_map(
        |(jobs, hosts, offers, left, rented_most)| {
            let period = Period { left_s: 9000.0 };
            Snapshot {
                jobs,
                hosts,
                offers,
                budget_left: dollars(left),
                period: (rented_most % 2 == 0).then_some(period),
                rented_most,
                ..queue(0, 0.0)
            }
        },
    )
}

fn reserved(decided: &Decided) -> Money {
    let of = |decision: &Decision| match decision {
        Decision::Rent(rent) => rent.reserve,
        Decision::Keep(keep) => keep.reserve,
        Decision::GiveBack(_) => Money::ZERO,
    };
    decided.decisions.iter().map(of).sum()
}

proptest! {
    #[test]
    fn no_more_is_decided_than_is_left(snapshot in snapshots()) {
        let decided = decide(&snapshot);
        prop_assert!(reserved(&decided) <= snapshot.budget_left, "{decided:?}");
    }

    #[test]
    fn an_offer_without_a_price_is_never_asked_for_and_no_job_that_must_stay_goes(snapshot in snapshots()) {
        let decided = decide(&snapshot);
        for rent in rents(&decided) {
            prop_assert!(rent.offer.kind != "free");
            prop_assert!(rent.saves > rent.costs, "{rent:?}");
            for job in &rent.jobs {
                let job = snapshot.jobs.iter().find(|one| one.job == *job).expect("it waits");
                prop_assert!(job.may_leave && job.cpus <= 8);
            }
        }
        let hosts = snapshot.hosts.iter().filter(|host| host.rented.is_some()).count();
        prop_assert!(rents(&decided).len() + hosts <= snapshot.rented_most.max(hosts));
    }

    /// A single job: what is rented at a price is rented at each lower price, and with each dearer wait.
    #[test]
    fn a_lower_price_and_dearer_waiting_never_rent_less(
        price in 0.01..10.0f64, lower in 0.1..1.0f64, per_hour in 0.0..50.0f64, dearer in 1.0..5.0f64, busy_s in 0.0..20_000.0f64,
    ) {
        let rents_at = |price: f64, per_hour: f64| {
            let mut snapshot = queue(1, per_hour);
            let running = Running { cpus: 8, memory_bytes: GIB, left_s: busy_s, left_high_s: busy_s };
            snapshot.hosts[0].running = vec![running];
            snapshot.offers = vec![offer("k", Some(price))];
            rents(&decide(&snapshot)).len()
        };
        let rented = rents_at(price, per_hour);
        prop_assert!(rents_at(price * lower, per_hour) >= rented);
        prop_assert!(rents_at(price, per_hour * dearer) >= rented);
    }

    /// Each decision is carried out at once. As long as nothing arrives, no host goes before its minimum time, and none that has gone is
    /// asked for again.
    #[test]
    fn nothing_is_rented_and_given_back_to_and_fro(jobs in 0..40_usize, per_hour in 0.0..9.0f64, minimum_s in 60..4000_u32) {
        let mut snapshot = queue(jobs, per_hour);
        snapshot.offers[0].price.minimum_s = minimum_s;
        let (mut next, mut has_gone) = (1, false);
        for _ in 0..200 {
            let decided = decide(&snapshot);
            for decision in decided.decisions {
                match decision {
                    Decision::Rent(rent) => {
                        prop_assert!(!has_gone, "{}", rent.why);
                        let mut starting = rented(next, None);
                        next += 1;
                        starting.ready_in_s = 90.0;
                        if let Some(rented) = &mut starting.rented {
                            (rented.price, rented.paid_s) = (rent.offer.price, 0.0);
                        }
                        snapshot.hosts.push(starting);
                    }
                    Decision::GiveBack(back) => {
                        let at = snapshot.hosts.iter().position(|host| host.host == back.host).expect("it is there");
                        let gone = snapshot.hosts.remove(at).rented.expect("it is rented");
                        prop_assert!(gone.paid_s >= f64::from(minimum_s), "{}", back.why);
                        has_gone = true;
                    }
                    Decision::Keep(_) => {}
                }
            }
            a_minute_passes(&mut snapshot);
        }
        prop_assert!(snapshot.hosts.iter().all(|host| host.rented.is_none()), "all have gone at last");
    }
}

/// Jobs end and start where the rule has planned them.
fn a_minute_passes(snapshot: &mut Snapshot) {
    for host in &mut snapshot.hosts {
        host.ready_in_s = (host.ready_in_s - 60.0).max(0.0);
        for job in &mut host.running {
            (job.left_s, job.left_high_s) = (job.left_s - 60.0, job.left_high_s - 60.0);
        }
        host.running.retain(|job| job.left_s > 0.0);
    }
    for goes in planned(snapshot) {
        if goes.start_s > 0.0 {
            continue;
        }
        let host = snapshot.hosts.iter_mut().find(|host| Some(&host.host) == goes.host.as_ref());
        let running = Running { cpus: 2, memory_bytes: GIB, left_s: 1200.0, left_high_s: 1500.0 };
        host.expect("it is there").running.push(running);
        snapshot.jobs.retain(|job| job.job != goes.job);
    }
    for host in &mut snapshot.hosts {
        let is_idle = host.running.is_empty() && host.ready_in_s <= 0.0;
        if let Some(rented) = &mut host.rented {
            rented.paid_s += 60.0;
            rented.reserved_s = (rented.reserved_s - 60.0).max(0.0);
            rented.idle_s = is_idle.then(|| rented.idle_s.unwrap_or(0.0) + 60.0);
        }
    }
}
