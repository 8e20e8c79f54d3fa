//! The goals, and whether the measurements meet them. What was not measured is neither met nor missed.

use perigee_lab::measuring::{Goal, median};

use crate::case::{Way, Work};
use crate::results::{Direction, DiskMove, Results, System, float};

pub fn judge(results: &Results) -> Vec<Goal> {
    let mut goals: Vec<Goal> =
        results.rtts_ms().last().map(|rtt_ms| times(results, *rtt_ms)).unwrap_or_default();
    goals.extend([pause(results), share_there(results), back(results)]);
    goals
}

/// A ratio with a limit.
fn ratio(goal: String, part: Option<f64>, whole: Option<f64>, most: f64) -> Goal {
    let found = part.zip(whole).filter(|(_, whole)| *whole > 0.0);
    Goal {
        goal,
        met: found.map(|(part, whole)| part / whole <= most),
        measured: found.map_or_else(not_measured, |(part, whole)| {
            format!("{:.2} times ({part:.2} s, local {whole:.2} s)", part / whole)
        }),
    }
}

fn not_measured() -> String {
    "not measured".to_owned()
}

fn times(results: &Results, rtt_ms: u32) -> Vec<Goal> {
    let tpch = |way| results.work_s(Work::Tpch, rtt_ms, way);
    vec![
        ratio(
            format!("A remote scan at {rtt_ms} ms takes at most 1.5 times as long as a local one"),
            results.pass_s(rtt_ms, Way::Remote, 0),
            results.pass_s(rtt_ms, Way::Local, 0),
            1.5,
        ),
        ratio(
            format!(
                "A second remote scan at {rtt_ms} ms takes at most 1.1 times as long as a local one"
            ),
            results.pass_s(rtt_ms, Way::Remote, 1),
            results.pass_s(rtt_ms, Way::Local, 1),
            1.1,
        ),
        ratio(
            format!(
                "The queries again, over the same remote data at {rtt_ms} ms, take at most 1.1 times as long as local ones"
            ),
            tpch(Way::Again),
            tpch(Way::Local),
            1.1,
        ),
    ]
}

fn pauses(moves: &[&DiskMove]) -> Option<f64> {
    median(moves.iter().map(|m| m.pause_ms))
}

fn pause(results: &Results) -> Goal {
    let of = |overlay| {
        let there = results.disk_moves_of(System::Perigee, Direction::There, overlay);
        let back = results.disk_moves_of(System::Perigee, Direction::Back, overlay);
        pauses(&[there, back].concat())
    };
    let found = of(true).zip(of(false));
    Goal {
        goal: "A live move of a VM with a 2 GiB overlay pauses it at most 100 ms longer than one without".to_owned(),
        met: found.map(|(with, without)| with - without <= 100.0),
        measured: found.map_or_else(not_measured, |(with, without)| {
            format!("{:+.0} ms ({with:.0} ms, without overlay {without:.0} ms)", with - without)
        }),
    }
}

fn share_there(results: &Results) -> Goal {
    let moves = results.disk_moves_of(System::Perigee, Direction::There, true);
    let share = median(moves.iter().filter_map(|m| m.share_there()));
    Goal {
        goal: "The VM runs at its destination before a tenth of its disk is there".to_owned(),
        met: share.map(|share| share < 0.1),
        measured: share
            .map_or_else(not_measured, |share| format!("at most {:.1} % was there", share * 100.0)),
    }
}

fn back(results: &Results) -> Goal {
    let moves = results.disk_moves_of(System::Perigee, Direction::Back, true);
    let median_of =
        |figure: fn(&DiskMove) -> Option<f64>| median(moves.iter().filter_map(|m| figure(m)));
    let shipped = median_of(DiskMove::disk_bytes);
    let least = median_of(|m| m.written_since.map(|written| float(written.least_bytes)));
    let most = median_of(|m| m.written_since.map(|written| float(written.most_bytes)));
    let all = shipped.zip(least.zip(most));
    let mib = f64::from(1 << 20);
    Goal {
        goal: "Moving back within an hour ships at most what has changed plus 1 %".to_owned(),
        met: all.map(|(shipped, (_, most))| shipped <= most * 1.01),
        measured: all.map_or_else(not_measured, |(shipped, (least, most))| {
            format!(
                "{:.1} MiB over the WAN after the guest ran there, without the frames' headers; the guest had written {:.1} to {:.1} MiB (its counters are read every second)",
                shipped / mib,
                least / mib,
                most / mib
            )
        }),
    }
}
