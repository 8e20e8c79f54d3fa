//! Figure 5 of Goiri, Julià and Guitart (003), "Efficient data management support for virtualized service providers": a Tomcat under load
//! while its VM is migrated. Theirs, and whether this run agrees. The measurements decide that.

use perigee_lab::paper::{Figure, judge_nothing};

use crate::results::{Results, Run, System};

/// Up to this part of it, the rate of replies is kept.
const KEPT: f64 = 0.9;

pub fn figures(results: &Results) -> Vec<Figure> {
    let mut figures = vec![
        uptime(results),
        rate(results),
        Figure::not_measured(
            "003 Fig. 5, Domain-0's CPU",
            "Domain-0's CPU usage is noticed only during the migration.",
            "The hosts' CPU time is measured with an encoder, in experiments/staging.",
        ),
    ];
    if results.is_quick {
        judge_nothing(&mut figures);
    }
    figures
}

fn uptime(results: &Results) -> Figure {
    let ours = results.of(System::Perigee).map(|run| {
        let tomcat = &run.tomcat;
        let text = format!(
            "In {} moves {} requests to Tomcat had a reply and {} had none. The longest time without a reply was {:.0} ms.",
            run.moves.len(),
            tomcat.replies,
            tomcat.failed,
            tomcat.longest_gap_ms
        );
        (text, tomcat.failed == 0 && tomcat.replies > 0)
    });
    Figure::new(
        "003 Fig. 5, uptime",
        "The server answers during the migration too: it is up for 100 % of the time.",
        ours,
        "Connections were lost while the guest moved.",
    )
}

fn rate(results: &Results) -> Figure {
    let kept = |system| kept(results.of(system)?);
    let own = kept(System::Perigee);
    let bare = kept(System::Bare).map_or_else(String::new, |[during, otherwise]| {
        format!(" With bare QEMU {:.0} % remain.", during / otherwise * 100.0)
    });
    let ours = own.map(|[during, otherwise]| {
        let text = format!(
            "{during:.1} replies a second while the guest moves and {otherwise:.1} otherwise: {:.0} % remain.{bare}",
            during / otherwise * 100.0
        );
        (text, during >= KEPT * otherwise)
    });
    let run = results.of(System::Perigee);
    let pause_ms =
        run.and_then(|run| run.moves.iter().map(|moved| moved.sending.pause_ms).max()).unwrap_or(0);
    let mean_s = run.map_or(0.0, |run| {
        let all_s: f64 = run.moves.iter().map(|moved| moved.ended_s - moved.begun_s).sum();
        all_s / f64::from(u32::try_from(run.moves.len()).unwrap_or(u32::MAX).max(1))
    });
    Figure::new(
        "003 Fig. 5, reply rate",
        "The reply rate is the same during the whole execution, the migration included.",
        ours,
        &format!(
            "A move takes {mean_s:.1} s on average, and the guest stands still for up to {pause_ms} ms of it. Their text names no pause."
        ),
    )
}

/// Tomcat's replies in a second while the guest moves, and otherwise. `None` without moves.
fn kept(run: &Run) -> Option<[f64; 2]> {
    let mut all = [(0_u32, 0_u32); 2];
    for (tenth, count) in run.tomcat.per_100_ms.iter().enumerate() {
        let at_s = f64::from(u32::try_from(tenth).ok()?) / 10.0;
        let moves = run.moves.iter().any(|moved| (moved.begun_s..moved.ended_s).contains(&at_s));
        let (tenths, replies) = &mut all[usize::from(!moves)];
        (*tenths, *replies) = (*tenths + 1, *replies + count);
    }
    all.iter()
        .all(|(tenths, _)| *tenths > 0)
        .then(|| all.map(|(tenths, replies)| f64::from(replies) * 10.0 / f64::from(tenths)))
}

#[cfg(test)]
pub mod tests {
    use perigee_lab::paper::Verdict;

    use super::*;
    use crate::results::{Load, Moved, Sending, Stream};

    /// A move in the second tenth of a second.
    pub fn run(per_100_ms: Vec<u32>, failed: u32) -> Run {
        let stream = Stream { goes_on: true, longest_gap_ms: 300.0, bytes: 1 << 30 };
        let tomcat = Load { replies: 100, failed, longest_gap_ms: 200.0, per_100_ms };
        Run {
            system: System::Perigee,
            replies: 100,
            failed: 1,
            longest_gap_ms: 250.0,
            per_100_ms: vec![5, 0, 6],
            tomcat,
            ssh: stream.clone(),
            vm_ssh: Some(stream.clone()),
            download: stream,
            clients_resent: 3,
            guest_resent: 4,
            moves: vec![Moved {
                to: "cloud1".to_owned(),
                begun_s: 0.1,
                ended_s: 0.2,
                sending: Sending { pause_ms: 60, ..Sending::default() },
            }],
        }
    }

    fn verdicts(run: Run) -> Vec<Verdict> {
        let results = Results { runs: vec![run], ..Results::default() };
        figures(&results).iter().map(|figure| figure.verdict).collect()
    }

    #[test]
    fn replies_during_the_moves_decide() {
        use Verdict::{Agrees, DoesNotAgree, NotMeasured};
        assert_eq!(verdicts(run(vec![5, 5, 5], 0)), [Agrees, Agrees, NotMeasured]);
        assert_eq!(verdicts(run(vec![5, 1, 5], 0)), [Agrees, DoesNotAgree, NotMeasured]);
        assert_eq!(verdicts(run(vec![5, 5, 5], 1)), [DoesNotAgree, Agrees, NotMeasured]);
    }

    #[test]
    fn without_a_run_nothing_is_measured() {
        let all = figures(&Results::default());
        assert!(all.iter().all(|figure| figure.verdict == Verdict::NotMeasured), "{all:?}");
    }
}
