use perigee_model::plan::Estimate;
use proptest::prelude::*;

use super::*;
use crate::PastRun;
use crate::facts::StillToCome;
use crate::fixture::*;
use crate::running::tests::{COST_S, reading, remembered};

/// A whole run of 1,000 reads far from its data: 20 s of computing, 1 s of other time, 16.4 ms for each read.
const WHOLE_S: f64 = 20.0 + 1.0 + 16.4;

fn left(running: &Running) -> Estimate {
    let end = predicted_end(running);
    end.left.unwrap_or_else(|| panic!("{end}"))
}

fn why_not_known(running: &Running) -> String {
    let end = predicted_end(running);
    assert_eq!(end.left, None, "{end}");
    end.why
}

/// Runs of this job's image, but of other jobs, which all took alike.
fn others(count: usize) -> Vec<PastRun> {
    let mut run = past_run(0.016, 1000.0);
    run.traits.name = "another".to_owned();
    vec![run; count]
}

#[test]
fn a_first_run_among_many_alike_has_an_end_before_its_progress_shows_one() {
    let running = Running { others: others(30), ..reading(140, 1.0) };
    let end = predicted_end(&running);
    assert!(end.why.contains("other jobs of its tenant"), "{end}");
    assert!(end.left.expect("an end").helps(), "{end}");
    // Its own pace counts as soon as there is one.
    let later = Running { progress: Some(0.5), ..running };
    assert_eq!(predicted_end(&later).why, "from its progress here alone");
}

#[test]
fn a_range_that_helps_nobody_is_no_predicted_end() {
    assert!(why_not_known(&reading(140, 1.0)).contains("no earlier run of such a job"));
}

#[test]
fn half_of_a_known_job_takes_half_of_its_time() {
    let known = left(&remembered(500, WHOLE_S / 2.0, 1000.0));
    assert_close(known.expected_s, WHOLE_S / 2.0);
    assert!(known.low_s > WHOLE_S / 8.0 && known.high_s < WHOLE_S, "{known}");
    // Since the VM came here it has worked for 3 s only.
    let moved = Running { moves: 1, ..remembered(500, 3.0, 1000.0) };
    assert_close(left(&moved).expected_s, WHOLE_S / 2.0);
}

/// 500 of 1,000 reads are to come. Beside the data they are answered at once: half of 20 s of computing and 1 s of
/// other time are left, and the move.
#[test]
fn a_job_on_its_way_ends_as_at_the_host_to_which_it_goes() {
    let stays = remembered(500, WHOLE_S / 2.0, 1000.0);
    let moving = |to: &str, left_s| Some(Moving { to: host_id(to), left_s });
    let goes = Running { moving: moving("cloud1", None), progress: Some(0.5), ..stays.clone() };
    let (stays_s, goes_s) = (left(&stays).expected_s, left(&goes).expected_s);
    assert!(
        (10.5..10.5 + 2.0 * COST_S).contains(&goes_s) && goes_s < stays_s,
        "{goes_s} {stays_s}"
    );
    // Half of the memory is there: so much of the move is over.
    let half_there = Running { moving: moving("cloud1", Some(2.0)), ..goes };
    let saved_s = goes_s - left(&half_there).expected_s;
    assert!((0.9..1.1).contains(&saved_s), "{saved_s}");
    // An unknown host: as if it stayed.
    let lost = Running { moving: moving("nowhere", None), ..stays };
    assert_close(left(&lost).expected_s, stays_s);
}

#[test]
fn a_job_on_its_way_does_not_wait_for_itself_at_its_destination() {
    let moving = Some(Moving { to: host_id("cloud1"), left_s: None });
    let mut goes = Running { moving, cpus: 2, ..remembered(500, WHOLE_S / 2.0, 1000.0) };
    goes.traits.cpus = 2;
    let alone_s = left(&goes).expected_s;
    goes.cluster.hosts[2].running_vcpus = 2;
    assert_close(left(&goes).expected_s, alone_s);
}

/// It was predicted as if its data stayed far away until the last block was there, and then as if nothing had to come.
#[test]
fn a_job_whose_data_comes_ends_between_one_beside_them_and_one_far_away() {
    let stays = remembered(500, WHOLE_S / 2.0, 1000.0);
    let far_s = left(&stays).expected_s;
    let coming = |bytes| {
        let mut running = Running { progress: Some(0.5), ..stays.clone() };
        running.disks[0].coming = Some(StillToCome { from: host_id("cloud1"), bytes });
        running
    };
    let end_s = |bytes| left(&coming(bytes)).expected_s;
    assert!((10.5..11.0).contains(&end_s(MIB)), "{}", end_s(MIB));
    let few_s = end_s(256 * MIB);
    assert!(end_s(MIB) < few_s && few_s < far_s, "{few_s} {far_s}");
    assert!(few_s < end_s(1024 * MIB) && end_s(1024 * MIB) < far_s, "the more, the longer");
    // The home is here already, and the rest comes.
    let mut filling = coming(256 * MIB);
    filling.disks[0].home = host_id("home1");
    assert_close(left(&filling).expected_s, few_s);
}

#[test]
fn a_job_without_data_ends_by_its_time_or_its_progress() {
    let by_time = remembered(0, 10.0, 0.0);
    assert_close(left(&by_time).expected_s, 11.0);
    let both = left(&Running { progress: Some(0.5), ..by_time });
    assert!((10.0..11.0).contains(&both.expected_s), "{both}");
}

#[test]
fn a_new_job_ends_as_its_progress_says() {
    let mut running = Running { progress: Some(0.5), ..reading(500, 20.0) };
    assert_eq!(left(&running), Estimate { expected_s: 20.0, low_s: 10.0, high_s: 40.0 });
    running.progress_at_arrival = 0.25;
    assert_close(left(&running).expected_s, 40.0);
}

#[test]
fn the_time_of_an_outage_is_not_the_jobs_pace() {
    let mut running = Running { progress: Some(0.5), ..reading(500, 80.0) };
    running.disks[0].outage_ns = 60_000_000_000;
    assert_close(left(&running).expected_s, 20.0);
}

#[test]
fn what_is_not_known_of_an_end_is_said() {
    let why = why_not_known(&reading(500, 20.0));
    assert!(why.contains("no earlier run") && why.contains("not report its progress"), "{why}");
    let why = why_not_known(&Running { progress: Some(0.04), ..reading(500, 20.0) });
    assert!(why.contains("too little progress here"), "{why}");
    let why = why_not_known(&Running { progress: Some(1.0), ..reading(500, 20.0) });
    assert!(why.contains("reports that all is done"), "{why}");
    let why = why_not_known(&remembered(2000, 200.0, 1000.0));
    assert!(why.contains("longer than its earlier runs"), "{why}");
    let mut running = remembered(500, 20.0, 1000.0);
    running.cluster.links.clear();
    let why = why_not_known(&running);
    assert!(why.contains("is not measured yet"), "{why}");
}

/// It has made all the reads of its earlier runs and goes on, but not for much longer than they did.
#[test]
fn a_job_beyond_its_expected_end_is_not_to_end_in_0_seconds() {
    let late = left(&remembered(1000, WHOLE_S + 1.0, 1000.0));
    assert!(late.expected_s > 1.0 && late.low_s == 0.0, "{late}");
}

#[test]
fn other_vms_at_the_host_make_it_longer_and_the_vm_itself_does_not() {
    let mut running = remembered(500, WHOLE_S / 2.0, 1000.0);
    running.cluster.hosts[0].running_vcpus = 2;
    assert_close(left(&running).expected_s, WHOLE_S / 2.0);
    running.cluster.hosts[0].running_vcpus = 4;
    assert!(left(&running).expected_s > WHOLE_S / 2.0);
}

proptest! {
    /// Whatever has become slower or faster since the earlier runs.
    #[test]
    fn the_true_end_of_a_steady_job_is_in_the_range(done in 0.05..0.99f64, slower in 0.2..5.0f64) {
        let whole_s = WHOLE_S * slower;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small, positive")]
        let reads = (1000.0 * done) as u64;
        let running = Running { progress: Some(done), ..remembered(reads, whole_s * done, 1000.0) };
        let (predicted, true_s) = (left(&running), whole_s * (1.0 - done));
        prop_assert!(predicted.low_s <= true_s + 1e-6 && true_s <= predicted.high_s + 1e-6, "{}", predicted);
        // The more is done, the less the earlier runs count.
        let error = (predicted.expected_s - true_s).abs();
        let by_time_s = (WHOLE_S - whole_s * done).max(0.0);
        let worst = (WHOLE_S * (1.0 - done) - true_s).abs().max((by_time_s - true_s).abs());
        prop_assert!(error <= (1.0 - done) * (worst + 1.0), "{} is not {}", predicted, true_s);
    }

    #[test]
    fn an_end_is_never_in_0_seconds(
        reads in 0u64..3000, wall_s in 0.0..200.0f64, known in any::<bool>(), moves in 0u32..2,
        progress in proptest::option::of(0.0..=1.0f64),
    ) {
        let base = if known { remembered(reads, wall_s, 1000.0) } else { reading(reads, wall_s) };
        let end = predicted_end(&Running { moves, progress, ..base });
        prop_assert!(!end.why.is_empty());
        if let Some(left) = end.left {
            prop_assert!(left.expected_s > 0.0 && left.low_s >= -1e-9, "{}", left);
        }
    }
}
