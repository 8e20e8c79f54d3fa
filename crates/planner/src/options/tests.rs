use std::sync::Arc;

use perigee_model::SiteId;
use perigee_model::job::Start;
use perigee_model::load::VcpuUse;
use proptest::prelude::*;

use perigee_model::plan::Basis;

use super::*;
use crate::facts::{CopyFacts, CpuLoad};
use crate::fixture::*;

fn snapshot(reads: f64) -> Snapshot {
    Snapshot { cluster: cluster(), job: job(), history: history(reads), others: Vec::new() }
}

fn at_site_home(reads: f64) -> Snapshot {
    let mut snapshot = snapshot(reads);
    snapshot.job.start = Start::Site(SiteId::new("home").unwrap());
    snapshot
}

fn option(plan: &Plan, way: Way) -> &PlanOption {
    plan.options.iter().find(|o| o.way == way).unwrap()
}

#[test]
fn a_job_that_may_start_anywhere_starts_beside_its_data() {
    let mut snapshot = snapshot(2500.0);
    snapshot.cluster.hosts[2].running_vcpus = 1;
    let plan = plan(&snapshot).unwrap();
    let best = &plan.options[0];
    assert_eq!((best.way, best.start.as_str()), (Way::Beside, "cloud1"));
    assert!(best.chosen && plan.moves);
    assert_close(best.predicted.total_s, 12.0 + 20.0 + 0.5 + 1.0);
    assert_close(option(&plan, Way::Remote).predicted.network_s, 40.5);
}

#[test]
fn a_job_that_starts_far_from_its_data_is_migrated() {
    let plan = plan(&at_site_home(2500.0)).unwrap();
    let best = &plan.options[0];
    assert_eq!((best.way, best.end.as_str()), (Way::Migrate, "cloud1"));
    assert!(best.chosen && plan.moves);
    // Its runs are sure, so it moves at once.
    assert_close(best.predicted.migration_s, 2.064);
    assert_close(best.predicted.network_s, 0.0);
    assert_eq!(
        best.reason,
        "36 s instead of 74 s remote: 40 s less waiting for the 16.0 ms link costs 2.1 s to move"
    );
    // One run is not sure: half of its cost is lost before the move.
    let mut once = at_site_home(2500.0);
    once.history = vec![past_run(ROUND_TRIP_S, 2500.0)];
    assert_close(option(&super::plan(&once).unwrap(), Way::Migrate).predicted.network_s, 1.032);
    let beside = option(&plan, Way::Beside);
    assert!(beside.reason.starts_with("not possible"), "{}", beside.reason);
}

#[test]
fn no_move_is_proposed_between_hosts_whose_processors_differ() {
    let mut snapshot = at_site_home(2500.0);
    snapshot.cluster.hosts[2].cpu_model = "Xeon".to_owned();
    let plan = plan(&snapshot).unwrap();
    assert_eq!(plan.options[0].way, Way::Remote);
    let reason = &option(&plan, Way::Migrate).reason;
    assert!(reason.contains("not possible") && reason.contains("\"EPYC\" is not \"Xeon\""));
}

#[test]
fn a_host_that_takes_no_jobs_now_is_not_started_at() {
    let mut snapshot = snapshot(2500.0);
    snapshot.cluster.hosts[2].takes_jobs = false;
    let plan = plan(&snapshot).unwrap();
    assert_eq!(plan.options[0].way, Way::Migrate, "it may still be moved there");
    let beside = option(&plan, Way::Beside);
    assert!(beside.reason.contains("cloud1 takes no job now"), "{}", beside.reason);
    assert_eq!(beside.longer, None, "what is not possible takes no time");
}

#[test]
fn a_place_that_the_jobs_file_rules_out_is_said_to_be_ruled_out_by_the_file() {
    let plan = plan(&at_site_home(100.0)).unwrap();
    let beside = option(&plan, Way::Beside);
    assert_eq!(beside.reason, "not possible: its file lets the job start only at site home");
    assert_eq!(beside.longer, None);
}

#[test]
fn a_job_that_loses_less_than_a_move_costs_stays_remote() {
    let plan = plan(&at_site_home(100.0)).unwrap();
    assert_eq!(plan.options[0].way, Way::Remote);
    assert!(!plan.moves);
    assert_eq!(
        plan.options[0].reason,
        "35 s instead of 37 s migrate: a move costs 2.1 s and saves 0 s"
    );
}

/// The data may come to the VM, and are so many.
fn set_bytes(snapshot: &mut Snapshot, bytes: u64) {
    let volume = &mut snapshot.job.volumes[0];
    volume.allocated_bytes = bytes;
    volume.copy = CopyFacts { bytes, ..CopyFacts::default() };
}

/// The data may come to the VM: 32 MiB of them.
fn small_data(reads: f64) -> Snapshot {
    let mut snapshot = at_site_home(reads);
    set_bytes(&mut snapshot, 32 * MIB);
    snapshot
}

#[test]
fn a_host_with_a_replica_reads_only_the_difference_remotely() {
    let mut snapshot = at_site_home(2500.0);
    snapshot.job.may_migrate = false;
    let volume = &mut snapshot.job.volumes[0];
    volume.copy.lacking = vec![(host_id("home2"), 32 * MIB)];
    let plan = plan(&snapshot).unwrap();
    let best = &plan.options[0];
    assert_eq!((best.way, best.start.as_str()), (Way::Replica, "home2"));
    assert!(best.chosen && plan.moves, "it would start at home1 otherwise");
    let remote = option(&plan, Way::Remote);
    assert_eq!(remote.start.as_str(), "home1");
    assert_close(best.predicted.network_s, remote.predicted.network_s / 8.0);
    assert_eq!(best.shipped_bytes.map(|b| b * 8), remote.shipped_bytes);
    assert!(best.reason.contains("instead of"), "{}", best.reason);
    // It may read nothing of what has changed, or hardly anything else.
    assert!(best.total.low_s < best.total.expected_s - best.predicted.network_s);
    assert!(best.total.high_s > remote.total.expected_s, "{:?}", best.total);
    assert!(best.unknown.iter().any(|unknown| unknown.why.contains("since the replica")));
    // A replica that has everything.
    snapshot.job.volumes[0].copy.lacking = vec![(host_id("home2"), 0)];
    let plan = super::plan(&snapshot).unwrap();
    assert_close(plan.options[0].predicted.network_s, 0.0);
    assert!(plan.options[0].unknown.is_empty(), "{:?}", plan.options[0].unknown);
}

#[test]
fn a_first_run_beside_a_replica_takes_no_less_than_no_time() {
    let mut snapshot = at_site_home(0.0);
    snapshot.history.clear();
    snapshot.job.volumes[0].copy.lacking = vec![(host_id("home1"), 200 * MIB)];
    for host in &mut snapshot.cluster.hosts {
        host.boots = vec![booted_in(0.1)].into();
    }
    let plan = plan(&snapshot).unwrap();
    let total = option(&plan, Way::Replica).total;
    assert!(total.low_s >= 0.0, "{total}");
}

#[test]
fn a_replica_of_a_volume_that_another_host_writes_is_not_used() {
    let mut snapshot = at_site_home(2500.0);
    snapshot.job.may_migrate = false;
    let copy = &mut snapshot.job.volumes[0].copy;
    copy.lacking = vec![(host_id("home1"), 0)];
    copy.written_at = Some(host_id("home1"));
    assert_eq!(plan(&snapshot).unwrap().options[0].way, Way::Replica, "that host is this one");
    snapshot.job.volumes[0].copy.written_at = Some(host_id("home2"));
    let plan = plan(&snapshot).unwrap();
    let best = &plan.options[0];
    assert_eq!((best.way, best.start.as_str()), (Way::Remote, "home1"));
    assert_close(best.predicted.network_s, 40.5);
    let why = "the replica of volume data at home1 is not used, because home2 writes the volume";
    assert!(best.reason.contains(why), "{}", best.reason);
}

#[test]
fn what_a_job_writes_at_a_complete_replica_goes_to_the_home() {
    let mut snapshot = at_site_home(2500.0);
    snapshot.job.may_migrate = false;
    let volume = &mut snapshot.job.volumes[0];
    (volume.copy.lacking, volume.only_read) = (vec![(host_id("home2"), 0)], false);
    for run in &mut snapshot.history {
        run.volumes[0].reads = Some(2500.0 / 4.0);
    }
    let by_runs = plan(&snapshot).unwrap();
    let network_s = |plan: &Plan, way| option(plan, way).predicted.network_s;
    let remote_s = network_s(&by_runs, Way::Remote);
    assert!(remote_s > 0.0);
    assert_close(network_s(&by_runs, Way::Replica), remote_s * 3.0 / 4.0);
    // What it writes is not known before its first run.
    snapshot.history.clear();
    let first = plan(&snapshot).unwrap();
    assert_close(network_s(&first, Way::Replica), network_s(&first, Way::Remote));
}

#[test]
fn data_that_are_small_beside_the_memory_come_to_the_vm() {
    let plan = plan(&small_data(2500.0)).unwrap();
    let best = &plan.options[0];
    assert_eq!((best.way, best.start.as_str(), best.end.as_str()), (Way::Copy, "home1", "home1"));
    assert!(plan.moves && best.chosen);
    // 0.32 s for 32 MiB, of which it waits 44 %, and 0.082 s for the switch.
    let waits_s = 0.32 * (1.0 - (1.0f64 + 40.5 / 21.5).ln() / (40.5 / 21.5));
    assert_close(best.predicted.migration_s, waits_s + 0.082);
    assert_close(best.predicted.network_s, 0.0);
    assert!(best.reason.contains("to copy"), "{}", best.reason);
    assert!(best.shipped_bytes.is_some_and(|bytes| bytes >= 32 * MIB), "{best:?}");
    let ways: Vec<Way> = plan.options.iter().map(|option| option.way).collect();
    assert_eq!(ways, [Way::Copy, Way::Migrate, Way::Follow, Way::Remote, Way::Beside]);
}

#[test]
fn data_that_are_larger_than_the_memory_stay() {
    let mut snapshot = small_data(2500.0);
    set_bytes(&mut snapshot, 2048 * MIB);
    let plan = plan(&snapshot).unwrap();
    assert_eq!(plan.options[0].way, Way::Migrate);
    let (migrate, follow) = (option(&plan, Way::Migrate), option(&plan, Way::Follow));
    assert_close(follow.total.expected_s - migrate.total.expected_s, 2.0 * 0.082);
    assert_eq!((migrate.shipped_bytes, follow.shipped_bytes), (Some(512 * MIB), None));
}

#[test]
fn data_that_cannot_come_are_listed_with_the_reason() {
    let shared = plan(&at_site_home(2500.0)).unwrap();
    let copy = option(&shared, Way::Copy);
    assert_eq!(copy.reason, "not possible: volume data stays at cloud1: others read it");
    let mut snapshot = small_data(2500.0);
    snapshot.job.may_migrate = false;
    let plan = plan(&snapshot).unwrap();
    assert_eq!(plan.options[0].way, Way::Remote);
    assert!(option(&plan, Way::Copy).reason.contains("may not move"));
}

#[test]
fn data_that_may_not_leave_their_site_are_listed_as_staying_there() {
    let mut snapshot = small_data(2500.0);
    snapshot.job.uses_confined = true;
    snapshot.job.volumes[0].copy.confined = true;
    let far = plan(&snapshot).unwrap();
    assert_eq!(far.options[0].way, Way::Remote);
    for way in [Way::Copy, Way::Migrate, Way::Follow] {
        let reason = &option(&far, way).reason;
        assert!(reason.starts_with("not possible") && reason.contains("leave-site"), "{reason}");
    }
    snapshot.job.start = Start::Host(host_id("home1"));
    snapshot.job.volumes[0].home = host_id("home2");
    let near = plan(&snapshot).unwrap();
    for way in [Way::Copy, Way::Migrate, Way::Follow] {
        let reason = &option(&near, way).reason;
        assert!(!reason.starts_with("not possible"), "within the site: {reason}");
    }
}

#[test]
fn data_that_have_no_room_at_the_vm_stay() {
    let mut snapshot = small_data(2500.0);
    snapshot.cluster.hosts[0].pool_free_bytes = Some(31 * MIB);
    assert_eq!(option(&plan(&snapshot).unwrap(), Way::Copy).start.as_str(), "home2");
    snapshot.cluster.hosts[1].pool_free_bytes = Some(31 * MIB);
    let plan = plan(&snapshot).unwrap();
    assert_eq!(plan.options[0].way, Way::Migrate);
    let reason = &option(&plan, Way::Copy).reason;
    assert!(reason.contains("31 MiB of disk space free"), "{reason}");
}

#[test]
fn no_move_is_listed_that_the_rule_for_running_vms_would_not_make() {
    let mut snapshot = at_site_home(500.0);
    assert!(plan(&snapshot).unwrap().options.iter().any(|option| option.way == Way::Migrate));
    for (host, cpu_s) in snapshot.cluster.hosts.iter_mut().zip([2.0, 2.0, 6.0]) {
        Arc::make_mut(&mut host.boots)[0].cpu_s = cpu_s;
    }
    // It computes for 20 s, and loses 8.1 s to the network.
    let plan = plan(&snapshot).unwrap();
    assert!(plan.options.iter().all(|option| option.way != Way::Migrate), "{plan:?}");
}

#[test]
fn the_reason_names_what_makes_the_difference() {
    let mut snapshot = snapshot(10.0);
    snapshot.job.may_migrate = false;
    for (host, boot_s) in snapshot.cluster.hosts.iter_mut().zip([12.0, 12.0, 60.0]) {
        host.boots = vec![booted_in(boot_s); 3].into();
    }
    let plan = plan(&snapshot).unwrap();
    let best = &plan.options[0];
    assert_eq!(best.way, Way::Remote);
    assert!(best.reason.ends_with(" beside: 48 s less booting"), "{}", best.reason);
}

#[test]
fn a_job_that_may_not_move_stays_remote() {
    let mut snapshot = at_site_home(2500.0);
    snapshot.job.may_migrate = false;
    let plan = plan(&snapshot).unwrap();
    assert_eq!(plan.options[0].way, Way::Remote);
    assert!(option(&plan, Way::Migrate).reason.contains("may not move"));
    assert!(!plan.moves);
}

#[test]
fn a_job_bound_to_the_data_s_host_moves_nothing() {
    let mut snapshot = snapshot(2500.0);
    snapshot.job.start = Start::Host(host_id("cloud1"));
    let plan = plan(&snapshot).unwrap();
    assert_eq!((plan.options[0].way, plan.moves), (Way::Beside, false));
}

#[test]
fn without_history_one_pass_over_the_data_is_assumed_and_said() {
    let mut snapshot = at_site_home(0.0);
    snapshot.history.clear();
    let plan = plan(&snapshot).unwrap();
    assert_eq!(plan.basis, Basis::OnePass);
    assert!(plan.figures.iter().any(|f| f.starts_with("assumed: one pass over the data")));
    assert!(plan.figures.contains(&"volume data at cloud1 holds 256 MiB".to_owned()));
    // 2048 reads of 128 KiB, of which every eighth waits for the network, and 2 s for the bytes.
    let remote = option(&plan, Way::Remote);
    assert_close(remote.predicted.network_s, 256.0 * ROUND_TRIP_S + 2.0);
    let unknown: Vec<Part> = remote.unknown.iter().map(|unknown| unknown.part).collect();
    assert_eq!(unknown, [Part::Cpu, Part::Network]);
    assert!(remote.total.high_s > 5.0 * remote.total.expected_s, "{:?}", remote.total);
}

#[test]
fn nothing_unknown_is_predicted_to_take_no_time() {
    let mut snapshot = snapshot(0.0);
    snapshot.history.clear();
    snapshot.job.volumes.clear();
    snapshot.cluster.hosts.iter_mut().for_each(|host| host.boots = Arc::default());
    let plan = plan(&snapshot).unwrap();
    let best = &plan.options[0];
    assert!(best.predicted.boot_s > 0.0 && best.predicted.cpu_s > 0.0);
    assert!(best.total.low_s > 0.0 && best.total.high_s > 10.0 * best.total.low_s);
    let unknown: Vec<Part> = best.unknown.iter().map(|unknown| unknown.part).collect();
    assert_eq!(unknown, [Part::Boot, Part::Cpu]);
}

#[test]
fn what_options_have_in_common_cancels_out() {
    let plan = plan(&snapshot(2500.0)).unwrap();
    let remote = option(&plan, Way::Remote);
    let longer = remote.longer.unwrap();
    let best = &plan.options[0];
    assert!(best.longer.is_none());
    assert_close(longer.expected_s, remote.total.expected_s - best.total.expected_s);
    let width = |estimate: &Estimate| estimate.high_s - estimate.low_s;
    // If the totals were independent, the range would be wider.
    assert!(width(&longer) < 0.9 * width(&remote.total).hypot(width(&best.total)), "{longer:?}");
    assert!(longer.low_s > 0.0, "it is sure that remote takes longer: {longer}");
}

#[test]
fn of_equal_hosts_the_least_busy_is_taken() {
    let mut snapshot = at_site_home(10.0);
    snapshot.cluster.hosts[0].running_vcpus = 1;
    assert_eq!(plan(&snapshot).unwrap().options[0].start.as_str(), "home2");
}

/// As measured: the VMs there, with 4 vCPUs, have this many CPUs and wait for this many.
fn busy(running_vcpus: f64, waiting_vcpus: f64) -> Option<CpuLoad> {
    let vcpus_1m = VcpuUse { running_vcpus, waiting_vcpus };
    Some(CpuLoad { measured_vcpus: 4, vcpus_1m, pressure_share: None })
}

#[test]
fn a_job_does_not_start_beside_its_data_where_vms_starve() {
    // 2.4 s over the network, and 20 s of computing.
    let mut snapshot = snapshot(150.0);
    snapshot.job.may_migrate = false;
    let of_data = &mut snapshot.cluster.hosts[2];
    (of_data.running_vcpus, of_data.cpu_load) = (4, busy(0.05, 0.0));
    assert_eq!(plan(&snapshot).unwrap().options[0].start.as_str(), "cloud1", "its VMs are idle");
    snapshot.cluster.hosts[2].cpu_load = busy(1.3, 0.7);
    let plan = plan(&snapshot).unwrap();
    assert_eq!(plan.options[0].start.as_str(), "home1");
    let said = "cloud1 is busy: its VMs wait 35 % of their time for a CPU";
    let beside = option(&plan, Way::Beside);
    assert!(beside.reason.ends_with(said), "{}", beside.reason);
    assert_close(beside.predicted.cpu_s, 20.0 / 0.65);
    let figure = format!("{said}, so computing there takes 1.5 times as long");
    assert!(plan.figures.contains(&figure), "{:?}", plan.figures);
}

#[test]
fn a_host_whose_load_is_not_known_counts_as_before_and_says_so() {
    let mut snapshot = snapshot(150.0);
    snapshot.cluster.hosts[2].running_vcpus = 3;
    let plan = plan(&snapshot).unwrap();
    assert_close(option(&plan, Way::Beside).predicted.cpu_s, 20.0 * 1.5);
    let said = "assumed: the 3 vCPUs of the VMs at cloud1 compute half of the time, because how busy cloud1 is was not measured";
    assert!(plan.figures.iter().any(|figure| figure == said), "{:?}", plan.figures);
}

#[test]
fn no_room_is_a_refusal_with_figures() {
    let mut snapshot = at_site_home(10.0);
    snapshot.cluster.hosts.iter_mut().for_each(|h| h.memory_free_bytes = 100 * MIB);
    let refused = plan(&snapshot).unwrap_err().to_string();
    assert_eq!(
        refused,
        "no host can take the job: it needs 512 MiB of memory, and the most that is free at site \
         home is 100 MiB at home2"
    );
}

#[test]
fn a_home_that_is_not_up_is_a_refusal() {
    let mut snapshot = snapshot(10.0);
    snapshot.cluster.hosts.retain(|h| h.id.as_str() != "cloud1");
    assert!(matches!(plan(&snapshot), Err(Refused::HomeNotUp { .. })));
}

#[test]
fn a_link_that_is_not_measured_is_a_refusal() {
    let mut snapshot = at_site_home(10.0);
    snapshot.cluster.links.clear();
    assert!(matches!(plan(&snapshot), Err(Refused::LinkNotMeasured { .. })));
}

/// What the runs did with each volume is known by its place in the job file.
#[test]
fn runs_with_fewer_volumes_say_nothing_of_each_one() {
    let mut snapshot = at_site_home(500.0);
    assert_eq!(plan(&snapshot).unwrap().basis, Basis::History);
    let mut other = snapshot.job.volumes[0].clone();
    other.volume = volume_name("other");
    snapshot.job.volumes.push(other);
    snapshot.job.traits.data_bytes.push(32 * MIB);
    assert_eq!(plan(&snapshot).unwrap().basis, Basis::OnePass);
}

#[test]
fn a_job_with_data_at_two_sites_equally_gains_nothing_by_a_move() {
    let mut snapshot = at_site_home(500.0);
    let mut other = snapshot.job.volumes[0].clone();
    (other.volume, other.home) = (volume_name("other"), host_id("home1"));
    snapshot.job.volumes.push(other);
    for run in &mut snapshot.history {
        run.volumes.push(run.volumes[0]);
    }
    let plan = plan(&snapshot).unwrap();
    assert_eq!((plan.options[0].way, plan.options[0].start.as_str()), (Way::Remote, "home1"));
}

proptest! {
    #[test]
    fn parts_add_up_and_the_best_possible_is_chosen(
        runs in proptest::collection::vec((0.0..1e6f64, 0.0..1e4f64, 0.0..0.5f64, 1.0..64.0f64), 0..5),
        rtt_ms in 0.0..500.0f64,
        rate in 1u64..1 << 40,
        dirty in proptest::option::of(0u64..1 << 32),
        boots in proptest::collection::vec(0.0..1e3f64, 0..4),
        copied in proptest::option::of(0u64..1 << 42),
    ) {
        let mut snapshot = at_site_home(0.0);
        if let Some(bytes) = copied {
            set_bytes(&mut snapshot, bytes);
        }
        snapshot.job.dirty_bytes_per_s = dirty;
        for link in &mut snapshot.cluster.links {
            link.probe = perigee_model::vm::LinkProbe { rtt_ms, rate_bytes_per_s: rate };
        }
        for host in &mut snapshot.cluster.hosts {
            let boots = boots.iter().map(|seconds| booted_in(*seconds));
            host.boots = Arc::new(boots.collect());
        }
        snapshot.history.clear();
        for (reads, cpu_s, round_trip_s, queue_depth) in runs {
            let mut run = past_run(round_trip_s, reads);
            run.wall_s += cpu_s - run.cpu_s;
            run.cpu_s = cpu_s;
            run.volumes[0].queue_depth = queue_depth;
            run.volumes[0].bytes = reads * 8192.0;
            snapshot.history.push(run);
        }
        let plan = plan(&snapshot).unwrap();
        prop_assert_eq!(plan.options.iter().filter(|o| o.chosen).count(), 1);
        for option in &plan.options {
            let s = &option.predicted;
            for part in Part::ALL {
                prop_assert!(s.of(part).is_finite() && s.of(part) >= -1e-9, "{:?}", s);
            }
            let total = &option.total;
            prop_assert!((s.added_up().total_s - s.total_s).abs() < 1e-6 * s.total_s.max(1.0));
            prop_assert!((total.expected_s - s.total_s).abs() < 1e-6 * s.total_s.max(1.0), "{:?}", option);
            prop_assert!(total.low_s >= -1e-9 && total.holds(total.expected_s), "{:?}", total);
            let possible = !option.reason.starts_with("not possible");
            prop_assert!(!possible || plan.options[0].predicted.total_s <= s.total_s);
        }
    }
}
