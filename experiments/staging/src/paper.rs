//! For each table and figure of Goiri, Julià and Guitart (003) that is repeated here: theirs, and whether this run agrees. The measurements
//! decide that. Their text names values, so relations are compared: their machines are not at hand.

use perigee_lab::paper::{Figure, judge_nothing};

use crate::results::{MIGRATED, OVERHEAD_MAX, REMOTE_MAX, Results, Task};
use crate::series::Phase;

/// With a remote disk their copies and their creations of VMs take 1.9 to 2.8 times as long. From here on ours do too, as an order.
const MUCH: f64 = 1.5;
/// The traffic before a migration, beside that during the migration, is none up to here.
const NO_TRAFFIC: f64 = 0.01;
/// CPUs: what is less is not noticed.
const NOTICED: f64 = 0.05;

pub fn figures(results: &Results) -> Vec<Figure> {
    let mut figures = vec![creation(results), copy(results), encoder(results)];
    figures.extend([task(results), servers(results), network(results), migrated(results)]);
    if results.is_quick {
        judge_nothing(&mut figures);
    }
    figures
}

/// Local and remote seconds at both hosts, in words, and how many times as long the remote ones take.
fn beside(of: impl Fn(usize, bool) -> Option<f64>) -> Option<(String, [f64; 2])> {
    let at = |host| Some([of(host, true)?, of(host, false)?]);
    let [a, b] = [at(0)?, at(1)?];
    let times = [a, b].map(|[local, remote]| remote / local);
    let words =
        [a, b].map(|[local, remote]| format!("{local:.1} s local and {remote:.1} s remote"));
    let text = format!(
        "Host A: {}; host B: {}. With a remote disk {:.2} and {:.2} times as long.",
        words[0], words[1], times[0], times[1]
    );
    Some((text, times))
}

fn creation(results: &Results) -> Figure {
    let ours = beside(|host, is_local| results.creation_s(host, is_local));
    Figure::new(
        "003 5.2, creation of a VM",
        "With a remote disk the creation of a VM takes 2.1 times as long at host A, and 1.9 times at host B.",
        ours.map(|(text, times)| (text, times.iter().all(|times| *times >= MUCH))),
        "Theirs makes an image and installs a system in it. Ours clones an image, and only what the boot reads comes over the link.",
    )
}

fn copy(results: &Results) -> Figure {
    let ours = beside(|host, is_local| results.run_s(Task::Copy, host, is_local));
    Figure::new(
        "003 Table 2, file copy",
        "With a remote disk the copy of a file of 580 MB takes 2.8 times as long at host A, and 1.9 times at host B.",
        ours.map(|(text, times)| (text, times.iter().all(|times| *times >= MUCH))),
        "The link carries what the file needs about as fast as the local disk takes it.",
    )
}

fn encoder(results: &Results) -> Figure {
    let ours = beside(|host, is_local| results.run_s(Task::Encode, host, is_local));
    Figure::new(
        "003 Table 2, encoder",
        "The encoder takes as long with a remote disk as with a local one, within 0.2 %.",
        ours.map(|(text, times)| (text, times.iter().all(|times| *times <= 1.0 + REMOTE_MAX))),
        "The encoder waits for the remote disk, or the machine was slower then: there are few runs.",
    )
}

/// Before, during and after each migration. `None`: a phase has no point.
fn phases(results: &Results) -> Option<Vec<[Phase; 3]>> {
    let all: Option<Vec<_>> = results.migrations.iter().map(|one| one.phases()).collect();
    all.filter(|all| !all.is_empty())
}

/// The means over all migrations.
fn means(all: &[[Phase; 3]], value: fn(&Phase) -> f64) -> [f64; 3] {
    let count = f64::from(u32::try_from(all.len()).unwrap_or(u32::MAX).max(1));
    [0, 1, 2].map(|phase| all.iter().map(|one| value(&one[phase])).sum::<f64>() / count)
}

fn task(results: &Results) -> Figure {
    let ours = phases(results).map(|all| {
        let [source, destination] = [|of: &Phase| of.vm_cpus[0], |of: &Phase| of.vm_cpus[1]]
            .map(|of: fn(&Phase) -> f64| means(&all, of));
        let text = format!(
            "The VM uses {:.2} CPUs at its first host before the migration and {:.2} after it, and {:.2} and {:.2} at the other one.",
            source[0], source[2], destination[0], destination[2]
        );
        let moves = source[2] < NOTICED && destination[0] < NOTICED;
        (text, moves && source[0] > NOTICED && destination[2] > NOTICED)
    });
    Figure::new(
        "003 Fig. 4, the task's CPU",
        "The task's CPU time is at its first host until the migration, and at the other one from then on.",
        ours,
        "Not known.",
    )
}

fn servers(results: &Results) -> Figure {
    let ours = phases(results).map(|all| {
        let [before, during, after] = means(&all, |of| of.server_cpus);
        let vm = means(&all, |of| of.vm_cpus.iter().sum())[1];
        let text = format!(
            "The volume servers of both hosts use {before:.3} CPUs before the migration, {during:.3} during it and {after:.3} after it. The VM's QEMU \
             processes at both hosts use {vm:.2} CPUs during it, with the task."
        );
        (text, during > NOTICED && during > before.max(after))
    });
    Figure::new(
        "003 Fig. 4, Domain-0's CPU",
        "Domain-0, which migrates the VM and serves its disk, is busy at both hosts during the migration only.",
        ours,
        "Here QEMU, and not what serves the disks, sends and receives the guest's memory.",
    )
}

fn network(results: &Results) -> Figure {
    let ours = phases(results).map(|all| {
        let [before, during, after] = means(&all, |of| of.bytes_per_s / 1e6);
        let text = format!(
            "Between the hosts there are {before:.2} MB/s before the migration, {during:.1} MB/s during it and {after:.1} MB/s after it."
        );
        (text, before <= NO_TRAFFIC * during && before < after && after < during)
    });
    Figure::new(
        "003 Fig. 4, network",
        "There is no traffic while the task is local, much during the migration, and some while the task reads its disk remotely.",
        ours,
        "Not known.",
    )
}

fn migrated(results: &Results) -> Figure {
    let at = |from| Some([results.migrated_s(from)?, results.expected_s(from)?]);
    let both = at(0).zip(at(1)).map(|(a, b)| [a, b]);
    let ours = both.map(|both| {
        let over = both.map(|[run_s, expected_s]| run_s / expected_s - 1.0);
        let words =
            both.map(|[run_s, expected_s]| format!("{run_s:.1} s, expected {expected_s:.1} s"));
        let text = format!(
            "A to B: {} ({:+.1} %). B to A: {} ({:+.1} %).",
            words[0],
            over[0] * 100.0,
            words[1],
            over[1] * 100.0
        );
        (text, over.iter().all(|over| *over <= OVERHEAD_MAX))
    });
    let why = both.map_or_else(String::new, |both| {
        let more = both.map(|[run_s, expected_s]| run_s - expected_s);
        let share = more[0].max(more[1]) / MIGRATED[0][0] * 100.0;
        format!(
            "The migration costs {:.1} s and {:.1} s. Theirs runs {:.0} times as long: as many seconds are at most {share:.1} % of it.",
            more[0],
            more[1],
            MIGRATED[0][0] / both[0][0]
        )
    });
    Figure::new(
        "003 Table 3",
        "An encoder that is migrated in the middle of its run takes 0.1 % (A to B) and 0.5 % (B to A) longer than expected.",
        ours,
        &why,
    )
}

#[cfg(test)]
mod tests {
    use perigee_lab::paper::Verdict;

    use super::*;
    use crate::results::{Creation, Migrated, Probe};
    use crate::series::Point;

    fn created(host: usize, is_local: bool, seconds: f64) -> Creation {
        Creation { round: 1, host, is_local, seconds, boot_s: seconds, load_1min: 0.0 }
    }

    /// A VM that moves after 10 s, and is there after 12 s.
    fn moved(server_cpus_during: f64) -> Migrated {
        let series = (1..=24).map(|at_s| {
            let (vm, server, bytes_per_s) = match at_s {
                ..=10 => ([1.0, 0.0], 0.01, 0.0),
                11..=12 => ([1.0, 1.0], server_cpus_during, 5e7),
                _ => ([0.0, 1.0], 0.01, 1e6),
            };
            Point { at_s: f64::from(at_s), vm_cpus: vm, server_cpus: [server; 2], bytes_per_s }
        });
        Migrated {
            round: 1,
            from: 0,
            seconds: 24.0,
            done_before: 0.5,
            moved_at_s: 10.0,
            there_at_s: 12.0,
            migration_ms: 2000,
            downtime_ms: 50,
            memory_bytes: 1 << 28,
            probe: Probe {
                codec: String::new(),
                width: 0,
                height: 0,
                frames: 0,
                bytes: 0,
                sha256: String::new(),
            },
            series: series.collect(),
            load_1min: 0.0,
        }
    }

    #[test]
    fn what_is_judged_follows_from_the_numbers() {
        let mut results = Results::default();
        assert_eq!(creation(&results).verdict, Verdict::NotMeasured);
        for (remote_s, verdict) in [(2.4, Verdict::DoesNotAgree), (4.0, Verdict::Agrees)] {
            results.creations =
                [(0, true, 2.0), (0, false, remote_s), (1, true, 2.0), (1, false, remote_s)]
                    .map(|(host, is_local, seconds)| created(host, is_local, seconds))
                    .into();
            assert_eq!(creation(&results).verdict, verdict, "{remote_s} s");
        }
    }

    #[test]
    fn a_migration_is_judged_by_what_it_changes() {
        for (during, verdict) in [(0.01, Verdict::DoesNotAgree), (0.5, Verdict::Agrees)] {
            let results = Results { migrations: vec![moved(during)], ..Results::default() };
            assert_eq!(servers(&results).verdict, verdict);
            assert_eq!(task(&results).verdict, Verdict::Agrees);
            assert_eq!(network(&results).verdict, Verdict::Agrees);
        }
    }

    #[test]
    fn a_quick_run_judges_nothing() {
        let results =
            Results { is_quick: true, migrations: vec![moved(0.5)], ..Results::default() };
        assert!(figures(&results).iter().all(|figure| figure.verdict == Verdict::NotJudged));
    }
}
