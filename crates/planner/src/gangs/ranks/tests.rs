//! Ranks whose true times are known, and what is learnt from their runs.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::facts::{CopyFacts, VolumeFacts};
use crate::fixture::*;
use crate::hosts::computing_factor;

/// A rank that computes for so long, reads so often, one at a time, and waits this long for something else.
#[derive(Debug, Clone, Copy)]
struct Truth {
    cpu_s: f64,
    reads: f64,
    other_s: f64,
}

impl Truth {
    fn alone_s(&self, round_trip_s: f64) -> f64 {
        self.cpu_s + self.other_s + self.reads * (LOCAL_US as f64 / 1e6 + round_trip_s)
    }

    /// As its host measures it, if it ends after `wall_s`.
    fn run(&self, round_trip_s: f64, wall_s: f64) -> PastRun {
        let run = past_run(round_trip_s, self.reads);
        PastRun { cpu_s: self.cpu_s, wall_s, boot_s: 15.0, ..run }
    }
}

/// All ranks wait for the slowest one, also in what they took.
fn coupled(truths: &[Truth], round_trip_s: f64) -> RanksRun {
    let wall_s = truth_s(truths, round_trip_s);
    let ranks = truths.iter().map(|rank| rank.run(round_trip_s, wall_s)).collect();
    RanksRun { program: String::new(), ranks, talk: Talked::default() }
}

/// Each ends when its own work is done.
fn independent(truths: &[Truth], round_trip_s: f64) -> RanksRun {
    let each = truths.iter().map(|rank| rank.run(round_trip_s, rank.alone_s(round_trip_s)));
    RanksRun { program: String::new(), ranks: each.collect(), talk: Talked::default() }
}

fn truth_s(truths: &[Truth], round_trip_s: f64) -> f64 {
    truths.iter().map(|rank| rank.alone_s(round_trip_s)).fold(0.0, f64::max)
}

fn ranks(runs: Vec<RanksRun>) -> Ranks {
    let count = runs[0].ranks.len();
    let gang = GangFacts { volumes: vec![vec![0]; count], runs, ..GangFacts::default() };
    let snapshot =
        Snapshot { cluster: cluster(), job: job(), history: Vec::new(), others: Vec::new() };
    Ranks::of(&snapshot, &gang, &mut Figures::default()).expect("ranks")
}

fn at(ranks: &Ranks, round_trip_s: f64, talk: Spread) -> Together {
    let cluster = cluster();
    let factor = computing_factor(&cluster, &cluster.hosts[0], 1);
    let place = Place { round_trip_s, ..Place::local(factor) };
    let each: Vec<Somewhere> = ranks.all.iter().map(|rank| rank.somewhere(place)).collect();
    ranks.together(&each, talk)
}

fn predicted(ranks: &Ranks, round_trip_s: f64) -> Spread {
    at(ranks, round_trip_s, Spread::default()).command
}

fn truth() -> impl Strategy<Value = Truth> {
    (10.0..60.0_f64, prop_oneof![Just(0.0), 10.0..4000.0_f64], 0.0..0.5_f64)
        .prop_map(|(cpu_s, reads, other_s)| Truth { cpu_s, reads, other_s })
}

proptest! {
    /// The slowest rank at one distance is another one than at the next.
    #[test]
    fn runs_at_two_distances_predict_a_third(
        truths in prop::collection::vec(truth(), 1..6), far_s in 0.008..0.02_f64, is_coupled: bool,
    ) {
        let run = |s| if is_coupled { coupled(&truths, s) } else { independent(&truths, s) };
        let ranks = ranks(vec![run(0.0), run(far_s)]);
        for round_trip_s in [0.0, 0.004, far_s, 0.03] {
            let (found, truth_s) = (predicted(&ranks, round_trip_s), truth_s(&truths, round_trip_s));
            prop_assert!((found.expected / truth_s - 1.0).abs() < 0.1, "{found:?}, {truth_s}");
            prop_assert!(found.low() <= truth_s && truth_s <= found.high(), "{found:?}, {truth_s}");
        }
    }

    #[test]
    fn one_rank_is_predicted_as_a_job_of_its_own(
        one in truth(), distances in prop::collection::vec(0.0..0.02_f64, 1..6), to_s in 0.0..0.03_f64,
    ) {
        let runs: Vec<RanksRun> = distances.iter().map(|s| independent(&[one], *s)).collect();
        let history: Vec<PastRun> = runs.iter().map(|run| run.ranks[0].clone()).collect();
        let ranks = ranks(runs);
        let figures = &mut Figures::default();
        let alone = Learned::from_history(&cluster(), &traits(), &history, figures).expect("runs");
        let cluster = cluster();
        let factor = computing_factor(&cluster, &cluster.hosts[0], 1);
        let (seconds, command) = alone.at(&Place { round_trip_s: to_s, ..Place::local(factor) });
        let together = at(&ranks, to_s, Spread::default());
        prop_assert_eq!(together.seconds, seconds);
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9 * a.abs().max(1.0);
        prop_assert!(close(together.command.expected, command.expected));
        prop_assert!(close(together.command.low(), command.low()));
        prop_assert!(close(together.command.high(), command.high()));
    }
}

/// Rank 0 computes, and rank 1 reads: far from the data it was the slowest one, and rank 0 has waited for it.
#[test]
fn a_wait_for_another_rank_far_from_its_data_is_not_the_rank_s_own() {
    let truths = [
        Truth { cpu_s: 20.0, reads: 0.0, other_s: 0.0 },
        Truth { cpu_s: 5.0, reads: 2500.0, other_s: 0.0 },
    ];
    let ranks = ranks(vec![coupled(&truths, 0.016)]);
    let far = at(&ranks, 0.016, Spread::default());
    assert_eq!(far.slowest, 1);
    assert!((far.command.expected - 45.5).abs() < 0.1, "{:?}", far.command);
    let near = at(&ranks, 0.0, Spread::default());
    assert_eq!(near.slowest, 0);
    assert!((near.command.expected - 20.0).abs() < 0.5, "{:?}", near.command);
    // That run does not show whether rank 0 has done something of its own all the time.
    assert!(near.command.high() > 45.0, "{:?}", near.command);
    let both = super::tests::ranks(vec![coupled(&truths, 0.016), coupled(&truths, 0.0)]);
    let near = predicted(&both, 0.0);
    assert!(near.high() < 40.0 && (near.expected - 20.0).abs() < 1.0, "{near:?}");
}

/// In each step another rank is the slowest, so the gang takes longer than each of its ranks alone.
#[test]
fn what_the_runs_took_beyond_their_slowest_rank_is_predicted_too() {
    let truths = [Truth { cpu_s: 20.0, reads: 100.0, other_s: 1.0 }; 3];
    let uneven = |cpu_s: [f64; 3]| {
        let mut run = coupled(&truths, 0.0);
        for (past, cpu_s) in run.ranks.iter_mut().zip(cpu_s) {
            (past.cpu_s, past.wall_s) = (cpu_s, 30.0);
        }
        run
    };
    let runs = vec![uneven([28.0, 20.0, 20.0]), uneven([20.0, 28.0, 20.0])];
    let found = predicted(&ranks(runs), 0.0);
    assert!((found.expected - 30.0).abs() < 1.0, "{found:?}");
    assert!(found.low() < 30.0 && found.high() > 30.0, "{found:?}");
}

fn hosts(names: &[&str]) -> Vec<HostId> {
    names.iter().map(|name| host_id(name)).collect()
}

#[test]
fn talk_between_sites_takes_the_busiest_link_and_the_distance() {
    let sent = vec![vec![0, 128 * MIB, 0], vec![64 * MIB, 0, 0], vec![0, 64 * MIB, 0]];
    let near = Talked::at(&cluster(), &hosts(&["home1", "home2", "home1"]), &sent).expect("links");
    assert_close(near.link_s + near.round_trip_s, 0.0);
    assert_close(near.most_bytes, 128.0 * MIB as f64);
    let apart =
        Talked::at(&cluster(), &hosts(&["home1", "cloud1", "home2"]), &sent).expect("links");
    // Ranks 0 and 2 send to the cloud, and rank 1 sends back meanwhile.
    assert_close(apart.link_s, 1.5);
    assert_close(apart.round_trip_s, 0.016);
    let refused = Talked::at(&cluster(), &hosts(&["home1", "gone1", "home2"]), &sent);
    assert!(matches!(refused, Err(Refused::HostNotUp(_))), "{refused:?}");
}

/// A program with 500 round trips between its ranks, and 1 s for its bytes if they are apart.
#[test]
fn runs_apart_and_together_tell_how_often_the_ranks_wait_for_each_other() {
    let truths = [Truth { cpu_s: 20.0, reads: 10.0, other_s: 1.0 }; 2];
    let apart_s = 0.016;
    let talked = |round_trip_s: f64| Talked {
        most_bytes: 128.0 * MIB as f64,
        link_s: if round_trip_s > 0.0 { 1.0 } else { 0.0 },
        round_trip_s,
    };
    let run = |round_trip_s: f64| {
        let mut run = coupled(&truths, 0.0);
        run.talk = talked(round_trip_s);
        run.ranks.iter_mut().for_each(|past| past.wall_s += run.talk.link_s + 500.0 * round_trip_s);
        run
    };
    let took_s = |ranks: &Ranks, s: f64| at(ranks, 0.0, ranks.talk(&talked(s))).command;
    let never_apart = ranks(vec![run(0.0)]);
    assert!((took_s(&never_apart, 0.0).expected - truth_s(&truths, 0.0)).abs() < 0.1);
    assert!(never_apart.talk_unknown(&talked(apart_s)).is_some(), "it is a guess");
    assert!(never_apart.talk_unknown(&talked(0.0)).is_none(), "which is not needed there");
    assert!(took_s(&never_apart, apart_s).high() > truth_s(&truths, 0.0) + 9.0);
    let known = ranks(vec![run(0.0), run(apart_s)]);
    for round_trip_s in [0.0, 0.008, apart_s, 0.03] {
        let link_s = if round_trip_s > 0.0 { 1.0 } else { 0.0 };
        let truth_s = truth_s(&truths, 0.0) + link_s + 500.0 * round_trip_s;
        let found = took_s(&known, round_trip_s);
        assert!((found.expected / truth_s - 1.0).abs() < 0.05, "{found:?}, {truth_s}");
        assert!(found.low() <= truth_s && truth_s <= found.high(), "{found:?}, {truth_s}");
    }
    // Where all were apart, the same is predicted for the same place.
    let only_apart = ranks(vec![run(apart_s)]);
    let truth_s = truth_s(&truths, 0.0) + 9.0;
    assert!((took_s(&only_apart, apart_s).expected / truth_s - 1.0).abs() < 0.05);
}

/// It began apart, and came together: its talk was not that of its first hosts all the time.
#[test]
fn a_run_in_which_the_gang_moved_does_not_tell_how_often_the_ranks_wait_for_each_other() {
    let truths = [Truth { cpu_s: 20.0, reads: 10.0, other_s: 1.0 }; 2];
    let talked = |round_trip_s: f64| Talked { most_bytes: MIB as f64, link_s: 0.0, round_trip_s };
    let run = |round_trip_s: f64, moved: bool| {
        let mut run = coupled(&truths, 0.0);
        run.talk = talked(round_trip_s);
        run.ranks.iter_mut().for_each(|past| past.moved = moved);
        run
    };
    let stayed = ranks(vec![run(0.0, false), run(0.016, false)]);
    assert!(stayed.talk_unknown(&talked(0.016)).is_none());
    let moved = ranks(vec![run(0.0, false), run(0.016, true)]);
    assert!(moved.talk_unknown(&talked(0.016)).is_some(), "it is a guess");
}

#[test]
fn the_boot_of_all_vms_is_what_they_took_to_be_ready_together() {
    let truths = [Truth { cpu_s: 20.0, reads: 10.0, other_s: 1.0 }; 2];
    let known = ranks(vec![coupled(&truths, 0.0), coupled(&truths, 0.0)]);
    let alone = [Spread::relative(12.0, 0.2); 2];
    let (boot, is_known) = known.boot(&alone, &hosts(&["cloud1", "cloud1"]));
    assert_close(boot.expected, 15.0);
    assert!(is_known && boot.high() < 22.0, "{boot:?}");
    let (elsewhere, _) = known.boot(&alone, &hosts(&["cloud1", "home1"]));
    assert!(elsewhere.low() < boot.low() && elsewhere.high() > boot.high(), "{elsewhere:?}");
    let one = ranks(vec![coupled(&truths[..1], 0.0)]);
    assert_eq!(one.boot(&alone[..1], &hosts(&["cloud1"])), (alone[0], false), "as one VM's");
}

#[test]
fn of_many_runs_the_rare_distance_stays_and_the_ranks_are_bounded() {
    let truths = |count| vec![Truth { cpu_s: 20.0, reads: 10.0, other_s: 1.0 }; count];
    let mut runs = Vec::new();
    keep(&mut runs, coupled(&truths(2), 0.016));
    for _ in 0..100 {
        keep(&mut runs, coupled(&truths(2), 0.0));
    }
    assert_eq!((runs.len(), runs[0].distance().1), (RUNS_KEPT, 16));
    let mut large = Vec::new();
    for _ in 0..10 {
        keep(&mut large, coupled(&truths(RANKS_KEPT / 2 + 1), 0.0));
    }
    assert_eq!(large.len(), 1, "the newest one is kept, however many ranks it has");
}

/// Only rank 0 has the second volume.
#[test]
fn each_rank_has_the_volumes_that_are_its_own() {
    let mut job = job();
    let more = VolumeFacts {
        volume: volume_name("more"),
        home: host_id("home1"),
        allocated_bytes: MIB,
        only_read: false,
        copy: CopyFacts::default(),
    };
    job.volumes.push(more);
    job.traits.data_bytes = vec![256 * MIB, MIB];
    let gang = GangFacts { volumes: vec![vec![0, 1], vec![0], vec![]], ..GangFacts::default() };
    job.gang = Some(Arc::new(gang.clone()));
    let snapshot = Snapshot { cluster: cluster(), job, history: Vec::new(), others: Vec::new() };
    let ranks = Ranks::of(&snapshot, &gang, &mut Figures::default()).expect("ranks");
    let sizes: Vec<_> = ranks.all.iter().map(|rank| rank.job.traits.data_bytes.clone()).collect();
    assert_eq!(sizes, [vec![256 * MIB, MIB], vec![256 * MIB], vec![]]);
    assert_eq!(ranks.basis(), Basis::OnePass);
}
