//! Plans of gangs in a cluster where everything is measured.

use std::sync::Arc;

use perigee_model::job::Start;
use perigee_model::plan::{Estimate, PlanOption};

use super::*;
use crate::facts::CopyFacts;
use crate::fixture::*;
use crate::gangs::RanksRun;
use crate::runs::PastRun;

fn run(ranks: Vec<PastRun>) -> RanksRun {
    RanksRun { program: String::new(), ranks, talk: Talked::default() }
}

/// So many VMs that each read so often, with runs beside the data and far from them.
fn gang(count: usize, reads: f64) -> Snapshot {
    let of = |round_trip_s| run(vec![past_run(round_trip_s, reads); count]);
    let runs = [0.0, ROUND_TRIP_S, 0.0].map(of).to_vec();
    let gang = GangFacts {
        volumes: vec![vec![0]; count],
        runs,
        vcpus_per_cpu: 4,
        least_cpus: 1,
        ..GangFacts::default()
    };
    let mut job = job();
    job.gang = Some(Arc::new(gang));
    Snapshot { cluster: cluster(), job, history: Vec::new(), others: Vec::new() }
}

fn facts(snapshot: &mut Snapshot) -> &mut GangFacts {
    Arc::make_mut(snapshot.job.gang.as_mut().expect("a gang"))
}

fn planned(snapshot: &Snapshot) -> Plan {
    crate::plan(snapshot).expect("a plan")
}

fn option(plan: &Plan, way: Way) -> &PlanOption {
    plan.options.iter().find(|option| option.way == way).expect("such a way")
}

fn names(hosts: &[HostId]) -> Vec<&str> {
    hosts.iter().map(HostId::as_str).collect()
}

#[track_caller]
fn assert_alike(one: &Estimate, other: &Estimate) {
    assert_close(one.expected_s, other.expected_s);
    assert_close(one.low_s, other.low_s);
    assert_close(one.high_s, other.high_s);
}

/// One run is not sure: a job whose runs are is moved at once, and a gang is not.
#[test]
fn a_gang_of_one_rank_is_planned_as_the_job() {
    let comes = CopyFacts { bytes: 64 * MIB, ..CopyFacts::default() };
    let starts = [Start::Anywhere, Start::Host(host_id("home1"))];
    let stays = job().volumes[0].copy.clone();
    let all = starts.iter().flat_map(|start| [(start, &stays), (start, &comes)]);
    for (start, copy) in all {
        let mut alone = gang(1, 2500.0);
        alone.job.start = start.clone();
        alone.job.volumes[0].copy = copy.clone();
        let runs = vec![run(vec![past_run(ROUND_TRIP_S, 2500.0)])];
        alone.history = runs[0].ranks.clone();
        facts(&mut alone).runs = runs;
        let of_gang = planned(&alone);
        alone.job.gang = None;
        let of_job = planned(&alone);
        assert_eq!(of_gang.moves, of_job.moves);
        for way in [Way::Beside, Way::Remote, Way::Migrate, Way::Copy] {
            let Some(job) = of_job.options.iter().find(|option| option.way == way) else {
                continue;
            };
            let gang = option(&of_gang, way);
            assert_eq!((&gang.start, &gang.end, gang.chosen), (&job.start, &job.end, job.chosen));
            assert_alike(&gang.total, &job.total);
            assert_close(gang.predicted.network_s, job.predicted.network_s);
            assert_close(gang.predicted.migration_s, job.predicted.migration_s);
            assert_eq!(gang.shipped_bytes, job.shipped_bytes);
            assert_eq!(gang.longer.is_some(), job.longer.is_some());
        }
    }
}

#[test]
fn all_vms_start_beside_their_data_where_there_is_room() {
    let plan = planned(&gang(3, 2500.0));
    let best = &plan.options[0];
    assert_eq!((best.way, best.chosen), (Way::Beside, true));
    assert_eq!(names(&best.hosts), ["cloud1"; 3]);
    assert_eq!(plan.basis, Basis::History);
    // Three VMs share two CPUs: of those without figures, half are expected to compute.
    assert_close(best.predicted.cpu_s, 25.0);
    let remote = option(&plan, Way::Remote);
    assert!(remote.hosts.iter().all(|host| host.as_str() != "cloud1"), "{:?}", remote.hosts);
    assert!(remote.predicted.network_s > 40.0 && remote.longer.is_some());
    assert!(plan.figures.iter().any(|f| f.starts_with("the slowest VM is rank")));
}

#[test]
fn without_room_for_all_beside_the_data_they_start_where_all_have_room() {
    let mut tight = gang(3, 2500.0);
    tight.cluster.hosts[2].memory_free_bytes = 1024 * MIB;
    let plan = planned(&tight);
    assert!(plan.options.iter().all(|option| option.way != Way::Beside));
    let best = plan.chosen().expect("a choice");
    assert_eq!(best.way, Way::Remote);
    assert!(best.hosts.iter().all(|host| host.as_str().starts_with("home")), "{:?}", best.hosts);
    // No site is large enough: they are spread.
    for host in tight.cluster.hosts.iter_mut() {
        host.memory_free_bytes = 512 * MIB;
    }
    let spread = planned(&tight);
    let mut hosts = names(&spread.chosen().expect("a choice").hosts);
    hosts.sort_unstable();
    assert_eq!(hosts, ["cloud1", "home1", "home2"]);
    tight.cluster.hosts[0].memory_free_bytes = 0;
    let refused = crate::plan(&tight).expect_err("no room");
    assert!(refused.to_string().contains("its 3 VMs need 512 MiB of memory"), "{refused}");
}

/// One site is large enough once all jobs have ended.
#[test]
fn a_gang_that_fits_one_site_is_not_spread_over_several_ones() {
    let mut snapshot = gang(3, 2500.0);
    for host in snapshot.cluster.hosts.iter_mut() {
        host.memory_free_bytes = 512 * MIB;
    }
    assert!(planned(&snapshot).chosen().is_some(), "no site is large enough");
    facts(&mut snapshot).one_site = true;
    let refused = crate::plan(&snapshot).expect_err("no room at one site").to_string();
    assert!(refused.contains("all at one site") && refused.contains("room for 2"), "{refused}");
}

/// What a [`Placer`] is made from, beside the snapshot.
fn ranks_of(snapshot: &Snapshot) -> (Arc<GangFacts>, Ranks) {
    let gang = Arc::clone(snapshot.job.gang.as_ref().expect("a gang"));
    let ranks = Ranks::of(snapshot, &gang, &mut Figures::default()).expect("ranks");
    (gang, ranks)
}

/// The host with the data, and one of the two hosts of the other site, take no jobs.
#[test]
fn sites_and_hosts_where_its_vms_may_start_come_first() {
    let mut snapshot = gang(2, 2500.0);
    for host in snapshot.cluster.hosts.iter_mut() {
        host.takes_jobs = host.id.as_str() == "home2";
    }
    let (gang, ranks) = ranks_of(&snapshot);
    let placer = Placer::of(&snapshot, &gang, &ranks);
    assert_eq!(placer.scopes(), [vec![1, 0], vec![2]]);
    let plan = planned(&snapshot);
    assert_eq!(names(&plan.chosen().expect("a choice").hosts), ["home2", "home2"]);
}

/// Its VMs have eight vCPUs each, of which they may lend seven.
#[test]
fn the_least_vcpus_count_for_room() {
    let mut snapshot = gang(2, 2500.0);
    snapshot.job.traits.cpus = 8;
    let holds = |snapshot: &Snapshot| {
        let (gang, ranks) = ranks_of(snapshot);
        let placer = Placer::of(snapshot, &gang, &ranks);
        placer.holds(&snapshot.cluster.hosts[2])
    };
    assert_eq!(holds(&snapshot), 8);
    facts(&mut snapshot).least_cpus = 4;
    assert_eq!(holds(&snapshot), 2);
}

#[test]
fn the_rules_among_its_vms_are_kept() {
    let mut apart = gang(2, 2500.0);
    facts(&mut apart).apart = true;
    let plan = planned(&apart);
    let mut hosts = names(&plan.options[0].hosts);
    hosts.dedup();
    assert_eq!(hosts.len(), 2, "each at its own host");
    let mut together = gang(2, 2500.0);
    facts(&mut together).together = true;
    together.cluster.hosts[2].memory_free_bytes = 512 * MIB;
    for option in &planned(&together).options {
        let mut hosts = names(&option.hosts);
        hosts.dedup();
        assert_eq!(hosts.len(), 1, "{option:?}");
    }
}

/// Only rank 0 has the data: it alone decides where the gang is near them.
#[test]
fn the_slowest_rank_decides() {
    let mut snapshot = gang(2, 2500.0);
    let of = |round_trip_s| {
        let mut other = past_run(0.0, 0.0);
        (other.wall_s, other.cpu_s) = (2.0, 2.0);
        other.volumes.clear();
        other.traits.data_bytes.clear();
        run(vec![past_run(round_trip_s, 2500.0), other])
    };
    let facts = facts(&mut snapshot);
    facts.volumes[1].clear();
    facts.runs = vec![of(0.0), of(ROUND_TRIP_S)];
    let plan = planned(&snapshot);
    assert_eq!(plan.options[0].hosts[0].as_str(), "cloud1");
    assert!(plan.figures.iter().any(|figure| figure.contains("rank 0")), "{:?}", plan.figures);
    let mut alone = snapshot.clone();
    alone.job.gang = None;
    alone.history = vec![past_run(0.0, 2500.0), past_run(ROUND_TRIP_S, 2500.0)];
    let of_job = planned(&alone);
    let (gang, job) = (option(&plan, Way::Remote), option(&of_job, Way::Remote));
    assert!((gang.predicted.network_s - job.predicted.network_s).abs() < 0.5);
}

#[test]
fn a_replica_of_the_data_is_a_way_of_its_own() {
    let mut snapshot = gang(2, 2500.0);
    let copy = CopyFacts {
        bytes: 256 * MIB,
        lacking: vec![(host_id("home1"), MIB)],
        ..CopyFacts::default()
    };
    snapshot.job.volumes[0].copy = copy;
    snapshot.job.start = Start::Site("home".parse().expect("a name"));
    let plan = planned(&snapshot);
    let replica = option(&plan, Way::Replica);
    assert_eq!(names(&replica.hosts), ["home1", "home1"]);
    assert!(replica.predicted.network_s < 2.0, "{:?}", replica.predicted);
    assert!(option(&plan, Way::Copy).is_possible(), "{plan:?}");
    assert!(option(&plan, Way::Beside).reason.contains("its file lets the job start only at site"));
}

/// Without figures the first VM would start at `home1`, which boots slower. One of the VMs does.
#[test]
fn no_move_is_said_where_a_vm_starts_at_the_default_host() {
    let mut snapshot = gang(2, 2500.0);
    let lacking = ["home1", "home2"].map(|host| (host_id(host), 0)).to_vec();
    let copy = CopyFacts { bytes: 256 * MIB, lacking, ..CopyFacts::default() };
    snapshot.job.volumes[0].copy = copy;
    snapshot.job.start = Start::Site("home".parse().expect("a name"));
    facts(&mut snapshot).apart = true;
    for (host, boot_s) in snapshot.cluster.hosts.iter_mut().zip([12.0, 6.0]) {
        host.boots = vec![booted_in(boot_s); 8].into();
    }
    let plan = planned(&snapshot);
    let best = plan.chosen().expect("a choice");
    assert_eq!((best.way, names(&best.hosts)), (Way::Replica, vec!["home2", "home1"]));
    assert!(!plan.moves);
}

#[test]
fn a_gang_that_starts_far_from_its_data_may_be_moved_as_a_whole() {
    let mut snapshot = gang(2, 20_000.0);
    snapshot.job.start = Start::Site("home".parse().expect("a name"));
    let plan = planned(&snapshot);
    let best = plan.chosen().expect("a choice");
    assert_eq!((best.way, names(&best.end_hosts)), (Way::Migrate, vec!["cloud1", "cloud1"]));
    let mut alone = snapshot.clone();
    alone.job.gang = None;
    alone.history = vec![past_run(ROUND_TRIP_S, 20_000.0)];
    let one = planned(&alone);
    let (gang_s, job_s) =
        (best.predicted.migration_s, option(&one, Way::Migrate).predicted.migration_s);
    assert_close(gang_s, 2.0 * job_s);
    assert!(best.predicted.total_s < option(&plan, Way::Remote).predicted.total_s);
    snapshot.job.may_migrate = false;
    let stays = planned(&snapshot);
    assert!(option(&stays, Way::Migrate).reason.contains("may not move"), "{stays:?}");
}

#[test]
fn the_data_come_to_all_vms_and_what_clones_share_is_shipped_once_to_each_host() {
    let mut snapshot = gang(2, 2500.0);
    snapshot.job.start = Start::Site("home".parse().expect("a name"));
    snapshot.job.volumes[0].copy = CopyFacts { bytes: 256 * MIB, ..CopyFacts::default() };
    snapshot.cluster.hosts[2].price = Some(price(3_600_000));
    snapshot.job.money.disk_bytes = Some(0);
    let egress = |copy: &PlanOption| {
        copy.cost.as_ref().and_then(|cost| cost.total).expect("a cost").expected.micros
    };
    facts(&mut snapshot).apart = true;
    let apart = planned(&snapshot);
    let copy = apart.chosen().expect("a choice");
    let mut hosts = names(&copy.hosts);
    hosts.sort_unstable();
    assert_eq!((copy.way, hosts), (Way::Copy, vec!["home1", "home2"]));
    assert!(apart.moves && copy.end_hosts.is_empty(), "{copy:?}");
    assert_eq!(copy.shipped_bytes, Some(512 * MIB));
    assert_eq!(egress(copy), 45_000, "half a GiB");
    let apart_s = copy.predicted.migration_s;
    assert!(copy.predicted.total_s < option(&apart, Way::Remote).predicted.total_s);
    facts(&mut snapshot).apart = false;
    let together = planned(&snapshot);
    let copy = option(&together, Way::Copy);
    assert_eq!((names(&copy.hosts), copy.shipped_bytes), (vec!["home1"; 2], Some(256 * MIB)));
    assert_eq!(egress(copy), 22_500);
    // The link to both hosts is shared by what comes to them.
    assert!(copy.predicted.migration_s < apart_s, "{apart_s}, {copy:?}");
}

#[test]
fn the_data_do_not_come_to_vms_if_those_of_one_may_not() {
    let mut snapshot = gang(2, 2500.0);
    snapshot.job.start = Start::Site("home".parse().expect("a name"));
    let why = |snapshot: &Snapshot| option(&planned(snapshot), Way::Copy).reason.clone();
    assert_eq!(why(&snapshot), "not possible: volume data stays at cloud1: others read it");
    snapshot.job.volumes[0].copy = CopyFacts { bytes: MIB, ..CopyFacts::default() };
    snapshot.job.may_migrate = false;
    assert_eq!(why(&snapshot), "not possible: the job file says that it may not move");
}

#[test]
fn ranks_that_talk_are_together_and_talk_between_sites_takes_time() {
    let mut snapshot = gang(4, 0.0);
    for host in snapshot.cluster.hosts.iter_mut() {
        host.memory_free_bytes = 1024 * MIB;
    }
    snapshot.cluster.hosts[1].memory_free_bytes = 0;
    let quiet = planned(&snapshot).options[0].total.expected_s;
    // 0 talks with 3, and 1 with 2.
    let mut sent = vec![vec![0; 4]; 4];
    (sent[0][3], sent[1][2]) = (512 * MIB, 512 * MIB);
    facts(&mut snapshot).sent = sent;
    let plan = planned(&snapshot);
    let hosts = names(&plan.options[0].hosts);
    assert!(hosts[0] == hosts[3] && hosts[1] == hosts[2] && hosts[0] != hosts[1], "{hosts:?}");
    assert_close(plan.options[0].total.expected_s, quiet);
    // Each talks with each: some of it crosses the sites wherever they are.
    let row = |rank: usize| (0..4).map(|to| if to == rank { 0 } else { 128 * MIB }).collect();
    facts(&mut snapshot).sent = (0..4).map(row).collect();
    let plan = planned(&snapshot);
    // 4 s for the bytes on the link, and a guess of one wait for each of 384 MiB, of which two thirds go far.
    assert_close(plan.options[0].predicted.network_s, 4.0 + 384.0 * 0.016 * 2.0 / 3.0);
    assert!(plan.options[0].unknown.iter().any(|unknown| unknown.part == Part::Network));
    assert_eq!(plan.options[0].shipped_bytes, Some(8 * 128 * MIB));
}

#[test]
fn where_nothing_is_known_of_its_ranks_the_whole_times_count() {
    let mut snapshot = gang(2, 2500.0);
    let whole = Estimate { expected_s: 100.0, low_s: 50.0, high_s: 150.0 };
    let facts = facts(&mut snapshot);
    (facts.whole, facts.runs) = (Some(whole), Vec::new());
    let plan = planned(&snapshot);
    assert_eq!((plan.basis, plan.options[0].total), (Basis::History, whole));
    assert_close(plan.options[0].predicted.total_s, 100.0);
    let mut paid = snapshot.clone();
    paid.cluster.hosts[2].price = Some(price(3_600_000));
    paid.job.money.vms = 2;
    paid.job.money.disk_bytes = Some(0);
    let paid = planned(&paid);
    let cost = option(&paid, Way::Beside).cost.as_ref().and_then(|cost| cost.total);
    let cost = cost.expect("a cost").expected.micros;
    // Two VMs for 100 s each, at a thousandth of a dollar a second.
    assert!(cost.abs_diff(200_000) < 1000, "{cost}");
    self::facts(&mut snapshot).whole = None;
    let first = planned(&snapshot);
    assert_eq!(first.basis, Basis::OnePass);
    assert!(first.options[0].unknown.iter().any(|unknown| unknown.part == Part::Cpu));
}

/// Each VM is paid for, and the budget is that of all.
#[test]
fn a_gang_costs_what_all_of_its_vms_cost() {
    use perigee_model::money::Money;

    let paid = |count: u32| {
        let mut snapshot = gang(count as usize, 2500.0);
        snapshot.cluster.hosts[2].price = Some(price(3_600_000));
        snapshot.job.money.vms = count;
        snapshot.job.money.disk_bytes = Some(1 << 30);
        snapshot
    };
    let cost = |snapshot: &Snapshot| {
        let plan = planned(snapshot);
        option(&plan, Way::Beside).cost.as_ref().and_then(|cost| cost.total).expect("a cost")
    };
    let mut snapshot = paid(2);
    let (one, cost) = (cost(&paid(1)), cost(&snapshot));
    let twice = 2 * one.expected.micros;
    assert!(cost.expected.micros.abs_diff(twice) < 10, "{cost:?}, {one:?}");
    let half = Money::from_micros(cost.high.micros / 2 + 1);
    snapshot.job.money.budget = Some(half);
    assert!(option(&planned(&snapshot), Way::Beside).is_possible(), "just within the budget");
    snapshot.job.money.budget = Some(Money::from_micros(cost.high.micros / 2 - 1));
    let over = planned(&snapshot);
    assert!(option(&over, Way::Beside).reason.contains("over the job's budget"), "{over:?}");
}

/// A large gang takes no long time: ranks that are alike are placed as the first of them.
#[test]
fn a_gang_of_as_many_vms_as_there_may_be_is_planned() {
    let mut snapshot = gang(128, 2500.0);
    for host in snapshot.cluster.hosts.iter_mut() {
        (host.memory_free_bytes, host.cpus) = (1 << 40, 64);
    }
    let plan = planned(&snapshot);
    assert_eq!(names(&plan.options[0].hosts), ["cloud1"; 128]);
}
