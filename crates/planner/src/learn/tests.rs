//! Simulated jobs with known times, and what is learned from their runs.

use perigee_model::plan::Part;
use proptest::prelude::*;

use super::*;
use crate::fixture::*;
use crate::measured::MeasuredHost;
use crate::measured::tests::nothing;
use crate::replay::Replayed;

fn learned(runs: &[PastRun]) -> Learned {
    Learned::from_history(&cluster(), &traits(), runs, &mut Figures::default()).expect("runs")
}

fn at(learned: &Learned, round_trip_s: f64) -> Spread {
    let cpu_factor = Spread::exactly(1.0);
    learned.at(&Place { round_trip_s, ..Place::local(cpu_factor) }).1
}

/// The time that `past_run` takes.
fn truth_s(round_trip_s: f64, reads: f64) -> f64 {
    past_run(round_trip_s, reads).wall_s
}

/// A remote run whose counters show nothing: all of its waiting looks like something else.
fn counted_wrong(round_trip_s: f64, reads: f64, factor: f64) -> PastRun {
    let run = past_run(round_trip_s, reads);
    PastRun { network_s: run.network_s * factor, ..run }
}

#[test]
fn one_remote_run_and_its_counters_tell_every_distance() {
    let learned = learned(&[past_run(0.016, 2500.0)]);
    assert_close(learned.round_trips.expected, 2500.0);
    for round_trip_s in [0.0, 0.004, 0.016, 0.1] {
        let predicted = at(&learned, round_trip_s);
        assert_close(predicted.expected, truth_s(round_trip_s, 2500.0));
    }
    let width = |s| at(&learned, s).distance() / at(&learned, s).expected;
    assert!(width(0.016) < width(0.0), "what was seen is known best");
    assert!(width(0.016) < 0.42);
}

#[test]
fn two_distances_correct_wrong_counters() {
    let wrong = |round_trip_s| counted_wrong(round_trip_s, 2500.0, 0.6);
    let of_one = learned(&[wrong(0.016)]);
    let of_both = learned(&[wrong(0.016), wrong(0.0)]);
    let of_many = learned(&[0.0, 0.016, 0.0, 0.016, 0.0, 0.016].map(wrong));
    let error =
        |learned: &Learned| (at(learned, 0.008).expected / truth_s(0.008, 2500.0) - 1.0).abs();
    assert!(error(&of_one) > 0.15, "{}", error(&of_one));
    assert!(error(&of_both) < 0.07, "{}", error(&of_both));
    assert!(error(&of_many) < 0.05, "{}", error(&of_many));
    assert!(of_many.round_trips.distance() < of_one.round_trips.distance());
}

#[test]
fn a_local_run_does_not_know_the_depth_and_says_so() {
    let learned = learned(&[past_run(0.0, 12_000.0)]);
    let remote = at(&learned, 0.016);
    // With 8 requests in flight it has 1,500 dependent round trips.
    assert!(remote.low() < truth_s(0.016, 1500.0) && remote.high() > truth_s(0.016, 12_000.0));
    assert_eq!(learned.unknown[0].part, Part::Network);
    let local = at(&learned, 0.0);
    assert!(local.distance() < 0.42 * local.expected, "where it ran, that is of no matter");
}

#[test]
fn a_replayed_trace_is_better_than_counters() {
    let mut run = past_run(0.0, 12_000.0);
    run.replayed = Some(Replayed { round_trips: 1500.0, ..Replayed::default() });
    let learned = learned(&[run]);
    assert_close(learned.round_trips.expected, 1500.0);
}

#[test]
fn a_job_that_changes_is_followed() {
    let mut runs: Vec<PastRun> = vec![past_run(0.016, 1000.0); 10];
    runs.extend(vec![past_run(0.016, 2000.0); 5]);
    let predicted_s = at(&learned(&runs), 0.016).expected;
    let between =
        (predicted_s - truth_s(0.016, 1000.0)) / (truth_s(0.016, 2000.0) - truth_s(0.016, 1000.0));
    assert!(between > 0.4, "{between}");
}

/// A run far from its data that took so long.
fn taking(wall_s: f64) -> PastRun {
    PastRun { wall_s, ..past_run(0.016, 1000.0) }
}

/// What is predicted after ten runs of 100 s and these.
fn after_ten(newer: Vec<PastRun>) -> Spread {
    let runs: Vec<PastRun> = vec![taking(100.0); 10].into_iter().chain(newer).collect();
    at(&learned(&runs), 0.016)
}

/// Runs weighed by the inverse square of their time, so ten old ones of 100 s still predicted 107 s after three of 1,000 s.
#[test]
fn a_job_that_has_grown_tenfold_is_followed_after_three_runs() {
    for seconds in [1000.0, 10.0] {
        let predicted = after_ten(vec![taking(seconds); 3]);
        assert_close(predicted.expected, seconds.max(20.0));
        assert!(predicted.high() < 100.0 || predicted.low() > 100.0, "{predicted:?}");
    }
}

#[test]
fn after_two_runs_that_took_longer_the_range_also_holds_what_was_before() {
    let predicted = after_ten(vec![taking(1000.0); 2]);
    assert_close(predicted.expected, 1000.0);
    assert!(predicted.estimate().holds(100.0), "{predicted:?}");
}

#[test]
fn how_many_runs_do_not_count_any_more_is_said() {
    for (old, words) in [(1, "1 older run does not count"), (10, "10 older runs do not count")] {
        let mut runs = vec![taking(100.0); old];
        runs.extend(vec![taking(1000.0); 2]);
        let mut figures = Figures::default();
        Learned::from_history(&cluster(), &traits(), &runs, &mut figures).expect("runs");
        let said = figures.into_vec();
        assert!(said.contains(&format!("the job has changed: {words}")), "{said:?}");
    }
}

#[test]
fn one_odd_run_makes_the_range_wider_and_does_not_move_the_prediction() {
    let predicted = after_ten(vec![taking(1000.0)]);
    assert!(predicted.expected < 110.0, "{predicted:?}");
    assert!(predicted.estimate().holds(1000.0), "{predicted:?}");
    let old_again = after_ten(vec![taking(1000.0), taking(100.0)]);
    assert!(old_again.expected < 110.0 && old_again.high() < 300.0, "{old_again:?}");
}

#[test]
fn runs_with_other_inputs_do_not_show_that_a_job_has_changed() {
    let mut other = taking(1000.0);
    other.traits.inputs = "other".to_owned();
    let predicted = after_ten(vec![other; 3]);
    assert!(predicted.expected < 110.0, "{predicted:?}");
}

#[test]
fn a_job_that_takes_a_little_longer_each_time_is_followed() {
    let runs: Vec<PastRun> = (0..16).map(|run| taking(100.0 * 1.05_f64.powi(run))).collect();
    let (predicted, newest_s) = (at(&learned(&runs), 0.016), runs[15].wall_s);
    assert!(predicted.expected > 0.8 * newest_s, "{predicted:?}, and the last took {newest_s} s");
    assert!(predicted.estimate().holds(newest_s * 1.05), "{predicted:?}");
}

#[test]
fn one_run_that_found_nothing_to_do_does_not_hide_the_others() {
    let mut runs = vec![past_run(0.016, 2500.0); 15];
    let short = PastRun { wall_s: 1.0, cpu_s: 0.5, ..past_run(0.016, 10.0) };
    runs[10] = short;
    let (predicted, truth_s) = (at(&learned(&runs), 0.016), truth_s(0.016, 2500.0));
    assert!(predicted.expected > 0.8 * truth_s, "{predicted:?}, and most took {truth_s} s");
    assert!(predicted.estimate().holds(truth_s), "{predicted:?}");
    assert!(predicted.high() < 3.0 * truth_s, "{predicted:?}");
}

#[test]
fn a_relative_counts_less_and_makes_the_range_wider() {
    let mut relative = past_run(0.016, 1000.0);
    relative.traits.inputs = "other".to_owned();
    let alone = at(&learned(std::slice::from_ref(&relative)), 0.016);
    let own = at(&learned(&[past_run(0.016, 1000.0)]), 0.016);
    assert!(alone.distance() > 1.3 * own.distance());
    let both = at(&learned(&[relative, past_run(0.016, 2000.0)]), 0.016).expected;
    assert!(both > f64::midpoint(truth_s(0.016, 1000.0), truth_s(0.016, 2000.0)));
}

#[test]
fn bytes_over_a_thin_link_are_a_bound() {
    let mut run = past_run(0.016, 100.0);
    run.volumes[0].bytes = 128.0 * MIB as f64;
    run.wall_s += 1.0;
    let learned = learned(&[run]);
    let home = host_id("cloud1");
    let sources = [Source::home(&home)];
    let mut cluster = cluster();
    for link in &mut cluster.links {
        link.probe.rate_bytes_per_s = MIB;
    }
    let host = cluster.hosts[0].clone();
    let place = learned.place(&cluster, &host, &sources, &mut Figures::default()).unwrap();
    let (seconds, total) = learned.at(&place);
    assert!(seconds.network_s >= 128.0 && total.expected >= 128.0);
}

#[test]
fn a_slower_host_scales_the_computing_alone() {
    let learned = learned(&[past_run(0.0, 1000.0), past_run(0.016, 1000.0)]);
    let place = |factor| Place { round_trip_s: 0.016, ..Place::local(Spread::exactly(factor)) };
    let (one, two) = (learned.at(&place(1.0)).0, learned.at(&place(2.0)).0);
    assert_close(two.cpu_s, 2.0 * one.cpu_s);
    assert_close(two.network_s, one.network_s);
    assert_close(two.total_s, one.total_s + one.cpu_s);
}

/// A small random generator with a seed, so that a test's noise is the same each time.
fn noise(seed: &mut u64) -> f64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    (*seed >> 11) as f64 / (1u64 << 53) as f64
}

/// Noise as it was measured for repeated runs: 7 % in the median and above 24 % in 1 of 10 cases.
fn repeated(seed: &mut u64, run: PastRun) -> PastRun {
    let share = noise(seed);
    let size = if share < 0.5 { share * 0.14 } else { 0.07 + (share - 0.5) * 0.425 };
    let factor = if noise(seed) < 0.5 { 1.0 + size } else { 1.0 - size };
    PastRun {
        wall_s: run.wall_s * factor,
        cpu_s: run.cpu_s * factor,
        network_s: run.network_s * factor,
        local_io_s: run.local_io_s * factor,
        ..run
    }
}

/// Simulated jobs with depths of 1 to 16, which ran at one to four distances, are predicted at another one.
#[test]
fn the_truth_is_in_the_range_nine_times_of_ten() {
    let mut seed = 88_172_645_463_325_252;
    let (mut inside, mut cases, mut errors) = (0, 0, Vec::new());
    for case in 0..2000 {
        let depth = f64::from(1 << (case % 5));
        let reads = 500.0 + 5000.0 * noise(&mut seed);
        let run = |round_trip_s: f64| {
            let mut run = past_run(round_trip_s, reads / depth);
            run.volumes[0].requests = reads;
            // A local run answers each request before the next one is sent.
            run.volumes[0].queue_depth = if round_trip_s > 0.0 { depth } else { 1.0 };
            run
        };
        let distances = [0.0, 0.004, 0.016, 0.001];
        let seen = 1 + case % 4;
        let runs: Vec<PastRun> =
            (0..seen).map(|i| repeated(&mut seed, run(distances[(i + case / 4) % 4]))).collect();
        let truth = repeated(&mut seed, run(0.008)).wall_s;
        let predicted = at(&learned(&runs), 0.008).estimate();
        inside += usize::from(predicted.holds(truth));
        cases += 1;
        if seen >= 2 {
            errors.push((predicted.expected_s / truth - 1.0).abs());
        }
    }
    let held = inside as f64 / f64::from(cases);
    errors.sort_by(f64::total_cmp);
    let median = errors[errors.len() / 2];
    // Measured here: 90.6 % are in the range; the median error is 11.6 %, of which 7 % are the run's own noise.
    assert!((0.87..0.97).contains(&held), "{held}");
    assert!(median < 0.125, "{median}");
}

/// A simulated job: it computes, waits and holds data as jobs do, from a tenth of the mean to ten times it.
fn some_job(seed: &mut u64) -> (PastRun, f64) {
    let mut factor = || 10f64.powf(2.0 * noise(seed) - 1.0);
    let (cpu_s, round_trips) = (2.0 * factor(), 300.0 * factor());
    let mut run = past_run(0.016, round_trips);
    run.traits.data_bytes = vec![256 * MIB];
    run.wall_s += cpu_s - run.cpu_s - 1.0;
    run.cpu_s = cpu_s;
    (run, cpu_s + round_trips * (0.008 + LOCAL_US as f64 / 1e6))
}

/// Jobs that have never run are predicted on clusters where no other job has run, or a few, or many.
#[test]
fn the_truth_of_a_first_run_is_in_the_range_nine_times_of_ten() {
    let mut seed = 88_172_645_463_325_252;
    let mut widths = Vec::new();
    for others in [0, 3, 20] {
        let (mut inside, mut width) = (0, 0.0);
        for _ in 0..300 {
            let others: Vec<PastRun> = (0..others).map(|_| some_job(&mut seed).0).collect();
            let (_, truth_s) = some_job(&mut seed);
            let snapshot = Snapshot { cluster: cluster(), job: job(), history: vec![], others };
            let learned = Learned::of(&snapshot, &mut Figures::default()).expect("a guess");
            let predicted = at(&learned, 0.008).estimate();
            inside += usize::from(predicted.holds(truth_s));
            width += predicted.high_s / 300.0;
        }
        let held = inside as f64 / 300.0;
        assert!(held >= 0.9, "{held} of the jobs after {} others", widths.len());
        widths.push(width);
    }
    assert!(widths[0] > widths[1] && widths[0] > 4.0 * widths[2], "{widths:?}");
}

/// A run whose data moved was slow far from them and fast beside them, which says nothing about either distance.
#[test]
fn a_run_whose_data_moved_teaches_no_distance() {
    let moved = PastRun { distance_changed: true, ..past_run(0.016, 9000.0) };
    let own = past_run(0.0, 2500.0);
    let (with, without) = (learned(&[own.clone(), moved.clone()]), learned(&[own]));
    assert_close(with.round_trips.expected, without.round_trips.expected);
    assert_close(at(&with, 0.016).expected, at(&without, 0.016).expected);
    let mut snapshot =
        Snapshot { cluster: cluster(), job: job(), history: vec![moved], others: vec![] };
    let near = Learned::of(&snapshot, &mut Figures::default()).expect("a guess");
    snapshot.history.clear();
    let none = Learned::of(&snapshot, &mut Figures::default()).expect("a guess");
    assert_eq!(near.basis, Basis::OnePass);
    assert!(near.cpu.high() < none.cpu.high() / 2.0, "how long it computes is known");
    assert!((near.cpu.expected / 20.0 - 1.0).abs() < 0.3, "{:?}", near.cpu);
}

proptest! {
    /// For any runs, no prediction is negative, and a longer distance never takes less time.
    #[test]
    fn farther_is_never_faster(
        runs in proptest::collection::vec((0.0..0.1f64, 0.0..1e5f64, 0.0..2.0f64), 1..6),
        near_s in 0.0..0.1f64,
        more_s in 0.0..0.1f64,
    ) {
        let runs: Vec<PastRun> =
            runs.iter().map(|(s, reads, wrong)| counted_wrong(*s, *reads, *wrong)).collect();
        let learned = learned(&runs);
        let (near, far) = (at(&learned, near_s), at(&learned, near_s + more_s));
        prop_assert!(near.low() >= 0.0 && near.expected.is_finite());
        prop_assert!(far.expected >= near.expected - 1e-6 * near.expected);
    }
}

#[test]
fn a_run_over_an_older_proxy_teaches_nothing() {
    let older = PastRun { proxy_generation: 0, ..past_run(0.016, 9000.0) };
    let local = past_run(0.0, 2500.0);
    let with_older = learned(&[local.clone(), older.clone()]);
    let without = learned(&[local]);
    assert_close(with_older.round_trips.expected, without.round_trips.expected);
    let none = Learned::from_history(&cluster(), &traits(), &[older], &mut Figures::default());
    assert!(none.is_none());
}

#[test]
fn bytes_that_are_read_ahead_or_kept_are_not_waited_for() {
    let mut run = past_run(0.0, 1000.0);
    run.volumes[0].bytes = 400.0 * MIB as f64;
    let mib = MIB as f64;
    run.replayed = Some(Replayed {
        round_trips: 100.0,
        waited_bytes: 32.0 * mib,
        sent_bytes: 256.0 * mib,
        ..Replayed::default()
    });
    let learned = learned(&[run]);
    let (host, home) = (cluster().hosts[0].clone(), host_id("cloud1"));
    let sources = [Source::home(&home)];
    let place = learned.place(&cluster(), &host, &sources, &mut Figures::default()).unwrap();
    assert_close(place.bytes_s, 0.25);
    assert_close(place.links_s, 2.0);
}

#[test]
fn data_whose_home_answered_no_probe_are_read_as_fast_as_its_disk_was_measured() {
    let local = |read_bytes_per_s: Option<u64>| {
        let mut cluster = cluster();
        cluster.hosts[2].local_blocks = None;
        let measured = MeasuredHost { read_bytes_per_s, ..nothing("cloud1") };
        cluster.hosts[2].measured = Some(std::sync::Arc::new(measured));
        let snapshot = Snapshot { cluster, job: job(), history: Vec::new(), others: Vec::new() };
        let learned = Learned::of(&snapshot, &mut Figures::default()).expect("its home is up");
        let (seconds, _) = learned.at(&Place::local(Spread::exactly(1.0)));
        let is_unknown = learned.unknown.iter().any(|one| one.part == Part::LocalIo);
        (seconds.local_io_s, is_unknown)
    };
    assert_eq!(local(None), (0.0, true));
    let (seconds, is_unknown) = local(Some(8 * MIB));
    assert_close(seconds, 32.0);
    assert!(!is_unknown);
}
