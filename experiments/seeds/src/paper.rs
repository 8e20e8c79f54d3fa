//! For each figure: what Toyoshima's papers say of it, and whether these rounds agree. The measurements decide that, so a report never
//! contradicts its own figures. The papers' text names shapes, and hardly any values. A shape is claimed only where the ranges of the rounds part.

use perigee_lab::paper::{Figure, Verdict, judge_nothing};

use crate::bench::DATABASE_MEMORY_BYTES;
use crate::cell::Kind;
use crate::results::{Column, Measured, Results, Side, Work};
use crate::rounds::{ROUNDS_MIN, Range, all, verdict};

/// "Almost 100 %", of figures 9 to 11.
pub const ALMOST_ALL: f64 = 1.0;
/// From here on it is almost all.
const ALMOST: f64 = 0.85;
/// Up to here a time is hardly another one.
const HARDLY: f64 = 1.25;

fn percent(range: &Range) -> String {
    let times = |share: f64| share * 100.0;
    let Range { low, median, high, rounds } = *range;
    format!(
        "{} %",
        Range { low: times(low), median: times(median), high: times(high), rounds }.words(0)
    )
}

pub fn figures(results: &Results) -> Vec<Figure> {
    let mut figures = Vec::new();
    for kind in [Kind::IscsiPerigee, Kind::IscsiTgt, Kind::Distance] {
        figures
            .extend([dbt3(results, kind, true), dbt3(results, kind, false)].into_iter().flatten());
    }
    let of = [
        hpa(results, true),
        hpa(results, false),
        initiator(results),
        target(results),
        hpa_cpu(results),
    ];
    figures.extend(of.into_iter().flatten());
    figures.extend([initiator_memory(results), target_memory(results)].into_iter().flatten());
    figures.extend(
        [migration(results), moved(results, true), moved(results, false)].into_iter().flatten(),
    );
    figures.extend([planner(results), machines(results)].into_iter().flatten());
    figures.extend([network(results, true), network(results, false)].into_iter().flatten());
    if results.is_quick {
        judge_nothing(&mut figures);
    }
    figures
}

fn figure(
    number: &str,
    theirs: &str,
    ours: String,
    (found, rounds): (Option<bool>, usize),
    why: &str,
) -> Figure {
    let verdict = verdict(found, rounds);
    let why = match verdict {
        Verdict::DoesNotAgree => Some(why.to_owned()),
        Verdict::NotJudged => Some(format!("There are fewer than {ROUNDS_MIN} rounds.")),
        _ => None,
    };
    Figure { figure: number.to_owned(), theirs: theirs.to_owned(), ours, verdict, why }
}

fn dilated(is_dilated: bool) -> &'static str {
    if is_dilated { "" } else { ", undilated" }
}

/// The path, in words.
pub fn path(kind: Kind) -> &'static str {
    match kind {
        Kind::IscsiPerigee => "iSCSI in the guest, Perigee's target",
        Kind::IscsiTgt => "iSCSI in the guest, tgt",
        _ => "Perigee's own path",
    }
}

fn dbt3(results: &Results, kind: Kind, is_dilated: bool) -> Option<Figure> {
    let rtts = results.rtts(kind, is_dilated);
    let (first, last) = (*rtts.first()?, *rtts.last()?);
    let ratio = |rtt| results.ratio((kind, rtt, is_dilated), Work::Tpch);
    let far = ratio(last)?;
    // With one distance only, the site's own target is the other one.
    let near = ratio(first).filter(|_| first != last);
    let grows = near.map_or_else(|| far.is_above(1.0), |near| far.is_above_range(&near));
    let middle = rtts.contains(&4).then(|| ratio(4)).flatten().filter(|_| last > 4);
    let severe = middle.map(|middle| far.is_above_range(&middle));
    let found = all(&[Some(grows), severe].into_iter().flatten().collect::<Vec<_>>());
    let at =
        |rtt: u32, range: &Option<Range>| range.map(|it| format!("; {} at {rtt} ms", it.words(2)));
    let more: String = [at(first, &near), at(4, &middle)].into_iter().flatten().collect();
    Some(figure(
        &format!("000 Fig. 5, {}{}", path(kind), dilated(is_dilated)),
        "The execution time of DBT-3 grows with the round trip, and severely beyond 4 ms.",
        format!(
            "With its data {last} ms away TPC-H takes {} times as long as with the data at the site's target{more}.",
            far.words(2)
        ),
        (found, far.rounds),
        match kind {
            Kind::Distance => {
                "Perigee reads ahead over the link and keeps what was read at the VM's host, so few reads wait a whole round trip."
            }
            _ if !is_dilated => {
                "Without dilation the guests compute many times as long as theirs beside the same round trips, which are a small part then."
            }
            _ => "The guest's kernel reads ahead, so that few reads wait a whole round trip.",
        },
    ))
}

fn farthest(results: &Results, kind: Kind, is_dilated: bool) -> Option<Column> {
    Some((kind, *results.rtts(kind, is_dilated).last()?, is_dilated))
}

fn hpa(results: &Results, is_dilated: bool) -> Option<Figure> {
    let column = farthest(results, Kind::Distance, is_dilated)?;
    let range = results.ratio(column, Work::Hpa)?;
    let others = [Work::Pfp, Work::Blast].into_iter().filter_map(|work| {
        Some(format!("; {} {}", work.words(), results.ratio(column, work)?.words(2)))
    });
    Some(figure(
        &format!("000 Fig. 6{}", dilated(is_dilated)),
        "The execution time of HPA (20 MB) hardly changes with the round trip.",
        format!(
            "HPA takes {} times as long with its data {} ms away{}.",
            range.words(2),
            column.1,
            others.collect::<String>()
        ),
        (range.is_above(HARDLY).map(|above| !above), range.rounds),
        "Its data is small here and it computes shortly, so that its first reads, and MPI's exchanges, are a larger part.",
    ))
}

/// A mean of the guests with TPC-H over iSCSI at the farthest, or over Perigee's path where that was not measured.
fn of_tpch(
    results: &Results,
    value: impl Fn(&crate::results::Means) -> Option<f64>,
) -> Option<(Range, Kind)> {
    let of = |kind| {
        let column = farthest(results, kind, true)?;
        Some((results.mean(column, (Work::Tpch, Side::Far), &value)?, kind))
    };
    of(Kind::IscsiPerigee).or_else(|| of(Kind::Distance))
}

fn initiator(results: &Results) -> Option<Figure> {
    let (busy, kind) = of_tpch(results, |means| means.busy)?;
    Some(figure(
        "000 Fig. 7",
        "With DBT-3 the initiator's CPU has a margin.",
        format!(
            "The guests' CPUs are busy for {} of the time with TPC-H ({}).",
            percent(&busy),
            path(kind)
        ),
        (busy.is_above(0.9).map(|above| !above), busy.rounds),
        "Four guests share this machine's CPUs, and a guest without KVM that waits for one of them counts that as work.",
    ))
}

fn target(results: &Results) -> Option<Figure> {
    let (cpus, kind) = of_tpch(results, |means| means.target_cpus[1])?;
    Some(figure(
        "000 Fig. 8",
        "With DBT-3 the target's CPU has a margin too.",
        format!(
            "The target at the other site uses {} CPUs ({}). It is not dilated: it runs at this machine's speed.",
            cpus.words(2),
            path(kind)
        ),
        (cpus.is_above(0.9).map(|above| !above), cpus.rounds),
        "Not known.",
    ))
}

fn hpa_cpu(results: &Results) -> Option<Figure> {
    let column = farthest(results, Kind::Distance, true)?;
    let busy = results.mean(column, (Work::Hpa, Side::Far), |means| means.busy)?;
    Some(figure(
        "000 Fig. 9",
        "HPA uses almost 100 % of the initiator's CPU.",
        format!("The guests' CPUs are busy for {} of the time with HPA.", percent(&busy)),
        (busy.is_above(ALMOST), busy.rounds),
        "The guests wait for each other in HPA's exchanges, and four of them share this machine's CPUs.",
    ))
}

fn initiator_memory(results: &Results) -> Option<Figure> {
    let (used, kind) = of_tpch(results, |means| means.used_most)?;
    let larger = results.database_bytes as f64 / DATABASE_MEMORY_BYTES as f64;
    Some(figure(
        "000 Fig. 10",
        "With DBT-3 almost 100 % of the initiator's memory is in use, with the disk cache.",
        format!(
            "Up to {} of the {} MiB are in use that PostgreSQL and the disk cache of its files have ({}). The database is {larger:.1} times as large.",
            percent(&used),
            DATABASE_MEMORY_BYTES >> 20,
            path(kind)
        ),
        (used.is_above(ALMOST), used.rounds),
        "The steps here read a part of the database, and forget the tables before each of them.",
    ))
}

fn target_memory(results: &Results) -> Option<Figure> {
    let (used, kind) = of_tpch(results, |means| means.target_memory_last[1])?;
    let limit = results.target_memory_bytes? >> 20;
    Some(figure(
        "000 Fig. 11",
        "With DBT-3 almost 100 % of the target's memory is in use, with the disk cache: the initiator uses it as a cache.",
        format!(
            "At the end {} of the target's {limit} MiB are in use, with the disk cache ({}).",
            percent(&used),
            path(kind)
        ),
        (used.is_above(ALMOST), used.rounds),
        "What the four guests read is less than the target's memory: their databases are clones, and share their blocks there.",
    ))
}

fn move_s(results: &Results, column: Column) -> Option<Range> {
    let pace = results.pace(column.0, column.2);
    Range::of(results.of(column).filter_map(|one| Some(pace.theirs_s(one.moved.as_ref()?.seconds))))
}

fn migration(results: &Results) -> Option<Figure> {
    let rtts = results.rtts(Kind::MoveHand, true);
    let (first, last) = (*rtts.first()?, *rtts.last()?);
    let [near, far] = [
        move_s(results, (Kind::MoveHand, first, true))?,
        move_s(results, (Kind::MoveHand, last, true))?,
    ];
    let found = if first == last { None } else { far.is_above_range(&near) };
    Some(figure(
        "000 Fig. 14, 001 Fig. 7",
        "A migration takes 21 s up to 4 ms (8 ms in 001), and 52 s at 16 ms.",
        format!(
            "Moving both VMs takes {} s at {first} ms and {} s at {last} ms, in their seconds.",
            near.words(1),
            far.words(1)
        ),
        (found, near.rounds.min(far.rounds)),
        "Perigee sends memory in streams that fill the link at each of these round trips, so that the rate decides and not the distance.",
    ))
}

/// In each round: the move and the run after it, beside the run with the data far away.
fn move_and_run(results: &Results, column: Column) -> Option<Range> {
    let of = |one: &Measured| {
        let after_s = one.run(Work::Tpch, Side::Near)?.seconds;
        Some((one.moved.as_ref()?.seconds + after_s) / one.run(Work::Tpch, Side::Far)?.seconds)
    };
    Range::of(results.of(column).filter_map(of))
}

fn moved(results: &Results, is_dilated: bool) -> Option<Figure> {
    let column = farthest(results, Kind::MoveHand, is_dilated)?;
    let range = move_and_run(results, column)?;
    let alone = results.ratio(column, Work::Tpch)?;
    Some(figure(
        &format!("000 Fig. 15, 001 Fig. 8{}", dilated(is_dilated)),
        "With a long round trip, migrating and running at the data takes less time than running far from it.",
        format!(
            "At {} ms the move and the run take {} times as long as the run far away. Without the move's time, the far run takes {} times as long.",
            column.1,
            range.words(2),
            alone.words(2)
        ),
        (range.is_above(1.0).map(|above| !above), range.rounds),
        "The run is short beside the move here: theirs took minutes, and a move pays off after as many runs as it takes times what one of them gains.",
    ))
}

/// Their future work: a system that migrates by itself.
fn planner(results: &Results) -> Option<Figure> {
    let column = farthest(results, Kind::MovePlanner, true)?;
    let count = results.of(column).count();
    let moved = results.of(column).filter(|one| one.moved.is_some()).count();
    let by_hand = (Kind::MoveHand, column.1, column.2);
    let beside = results.of(column).filter_map(|one| {
        let stays = results.of(by_hand).find(|other| other.cell.round == one.cell.round)?;
        Some(one.run(Work::Tpch, Side::Far)?.seconds / stays.run(Work::Tpch, Side::Far)?.seconds)
    });
    let beside = Range::of(beside).map_or_else(String::new, |range| {
        format!(
            " The first run took {} times as long as without moves in the same round.",
            range.words(2)
        )
    });
    Some(Figure {
        figure: "000 VI, future work".to_owned(),
        theirs: "A system that migrates virtual machines to the remote site automatically."
            .to_owned(),
        ours: format!(
            "At {} ms the planner moved the VMs in {moved} of {count} rounds.{beside}",
            column.1
        ),
        verdict: Verdict::NotJudged,
        why: Some("The paper only announces such a system.".to_owned()),
    })
}

fn machines(results: &Results) -> Option<Figure> {
    let host: Column = (Kind::Host, 0, false);
    let own = farthest(results, Kind::IscsiPerigee, false)?;
    // Cells of one round are beside each other.
    let ratio = results.of(host).filter_map(|one| {
        let vms = results.of(own).find(|other| other.cell.round == one.cell.round)?;
        Some(vms.run(Work::Tpch, Side::Near)?.seconds / one.run(Work::Tpch, Side::Far)?.seconds)
    });
    let range = Range::of(ratio)?;
    let how = if results.accelerator == "tcg" {
        " QEMU interprets the guests (TCG): that is nearly all of it."
    } else {
        ""
    };
    Some(figure(
        "004 Fig. 8",
        "Over iSCSI a virtual machine is a little slower than the real machine.",
        format!(
            "Over iSCSI to the site's target, TPC-H takes {} times as long in the VMs as on the host itself, undilated.{how}",
            range.words(1)
        ),
        (range.is_above(1.5).map(|above| !above), range.rounds),
        "Without KVM, QEMU translates each instruction of a guest. Xen did not.",
    ))
}

fn network(results: &Results, is_dilated: bool) -> Option<Figure> {
    let column = (Kind::Network, 0, is_dilated);
    let mut said = Vec::new();
    let (mut found, mut rounds) = (Vec::new(), usize::MAX);
    for work in Work::ALL {
        let Some(ratio) = results.ratio(column, work) else { continue };
        let busiest =
            results.of(column).filter_map(|one| Some(one.run(work, Side::Far)?.cards?.busiest));
        let busiest = Range::of(busiest);
        let share = busiest.map_or_else(String::new, |it| {
            format!(", the busiest card carries {} of its rate", percent(&it))
        });
        said.push(format!(
            "{} takes {} times as long with one network as with two{share}",
            work.words(),
            ratio.words(2)
        ));
        found.push(ratio.is_above(HARDLY).map(|above| !above));
        found.extend(busiest.map(|it| it.is_above(0.8).map(|above| !above)));
        rounds = rounds.min(ratio.rounds);
    }
    (!said.is_empty()).then(|| figure(
        &format!("000 III.C, 004 3.1{}", dilated(is_dilated)),
        "With ranks' talk and storage in one network, HPA, PFP and mpiBLAST are bound by CPU or I/O, and not by the network.",
        format!("{}.", said.join("; ")),
        (all(&found), rounds),
        "The programs wait for the network here: their transfers are as large as theirs beside what they compute, or larger.",
    ))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::cell::Cell;
    use crate::results::{Means, Moved, Run};

    fn run(work: Work, side: Side, seconds: f64) -> Run {
        Run {
            work,
            side,
            seconds,
            found_sha256: String::new(),
            steps: Vec::new(),
            means: Means::default(),
            guests: Vec::new(),
            servers: Vec::new(),
            cards: None,
        }
    }

    fn cell(
        kind: Kind,
        rtt_ms: u32,
        round: u32,
        [near_s, far_s]: [f64; 2],
        moved_s: Option<f64>,
    ) -> Measured {
        Measured {
            cell: Cell { round, kind, rtt_ms, is_dilated: true },
            at_ms: 0,
            load_1min: 0.0,
            fixed_s: None,
            clock: 1.0,
            runs: vec![run(Work::Tpch, Side::Near, near_s), run(Work::Tpch, Side::Far, far_s)],
            moved: moved_s.map(|seconds| Moved { seconds, reason: String::new() }),
            lacks: Vec::new(),
        }
    }

    /// Three rounds, in which the far run takes so many times as long at each round trip, and a little more from round to round.
    fn results(kind: Kind, far: &[(u32, f64)], moved_s: Option<f64>) -> Results {
        let mut results = Results { dilations: BTreeMap::new(), ..Results::default() };
        for round in 1..=3 {
            for (rtt_ms, times) in far {
                let more = 1.0 + 0.02 * f64::from(round);
                results.keep(cell(kind, *rtt_ms, round, [10.0, 10.0 * times * more], moved_s));
            }
        }
        results
    }

    #[test]
    fn a_time_that_grows_severely_beyond_4_ms_agrees() {
        let found = results(Kind::IscsiTgt, &[(0, 1.1), (4, 1.4), (16, 3.0)], None);
        let figure = dbt3(&found, Kind::IscsiTgt, true).expect("a figure");
        assert_eq!((figure.verdict, figure.why), (Verdict::Agrees, None));
    }

    #[test]
    fn a_time_that_falls_with_the_distance_does_not_agree_and_says_why() {
        let found = results(Kind::Distance, &[(0, 1.5), (16, 1.1)], None);
        let figure = dbt3(&found, Kind::Distance, true).expect("a figure");
        assert_eq!(figure.verdict, Verdict::DoesNotAgree);
        assert!(figure.why.is_some());
    }

    #[test]
    fn where_the_ranges_overlap_nothing_is_claimed() {
        let found = results(Kind::Distance, &[(0, 1.0), (16, 1.01)], None);
        let figure = dbt3(&found, Kind::Distance, true).expect("a figure");
        assert_eq!(figure.verdict, Verdict::RangesOverlap);
    }

    #[test]
    fn a_quick_run_judges_nothing() {
        let found = results(Kind::Distance, &[(0, 1.0), (16, 3.0)], None);
        let found = Results { is_quick: true, ..found };
        let all = figures(&found);
        assert!(!all.is_empty());
        assert!(all.iter().all(|figure| figure.verdict == Verdict::NotJudged));
    }

    #[test]
    fn a_move_agrees_if_it_and_the_run_take_less_than_the_far_run() {
        for (moved_s, verdict) in [(5.0, Verdict::Agrees), (25.0, Verdict::DoesNotAgree)] {
            let found = results(Kind::MoveHand, &[(16, 2.0)], Some(moved_s));
            assert_eq!(moved(&found, true).expect("a figure").verdict, verdict, "{moved_s} s");
        }
    }
}
