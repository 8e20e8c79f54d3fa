//! The goals of the volume engine, and which of them a run has reached. All functions are pure.

use serde::{Deserialize, Serialize};

use crate::results::{CPU, Column, IOPS, IOPS_WITH_FLUSH, P99_US, Results};
use crate::servers::Server;
use crate::stats::ratio;
use crate::workloads::WORKLOADS;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Goal {
    pub goal: String,
    /// The condition on the measured value.
    pub target: String,
    /// A ratio, or the figure itself.
    pub measured: Option<f64>,
    /// What is compared, and with which server.
    pub how: String,
    /// `None` if the run did not measure it.
    pub met: Option<bool>,
}

/// The server that a goal compares with.
#[derive(Clone, Copy)]
enum Against {
    /// The best of the servers that serve clones.
    ClonePeer,
    /// The best of the servers that keep their metadata.
    DurablePeer,
    AnyPeer,
    Qemu,
    /// nbdkit on the plain file or with its own overlay.
    Nbdkit,
    NbdkitFile,
    Echo,
}

impl Against {
    fn includes(self, server: &str) -> bool {
        match self {
            Self::ClonePeer => Server::is_clone_peer(server),
            Self::DurablePeer => Server::keeps_metadata(server),
            Self::AnyPeer => Server::is_peer(server),
            Self::Qemu => server.starts_with("qemu-nbd"),
            Self::Nbdkit => server.starts_with("nbdkit"),
            Self::NbdkitFile => server == "nbdkit file",
            Self::Echo => server == "echo",
        }
    }
}

#[derive(Clone, Copy)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

impl Bound {
    fn holds(self, value: f64) -> bool {
        match self {
            Self::AtLeast(bound) => value >= bound,
            Self::AtMost(bound) => value <= bound,
        }
    }

    fn text(self, unit: &str) -> String {
        match self {
            Self::AtLeast(bound) => format!("≥ {bound:.2}{unit}"),
            Self::AtMost(bound) => format!("≤ {bound:.2}{unit}"),
        }
    }
}

/// One row of the table below: workload, transport, column, other server, bound.
type Compared = (&'static str, &'static str, &'static str, Column, Against, Bound);

const COMPARED: &[Compared] = {
    use Against::{AnyPeer, ClonePeer, DurablePeer, Echo, Nbdkit, NbdkitFile, Qemu};
    use Bound::{AtLeast, AtMost};
    &[
        ("read-4k-qd32", "tcp", "IOPS", IOPS, ClonePeer, AtLeast(4.0)),
        ("read-4k-qd32", "unix", "IOPS", IOPS, ClonePeer, AtLeast(3.5)),
        ("read-4k-qd32", "tcp", "IOPS", IOPS, NbdkitFile, AtLeast(2.0)),
        ("read-4k-qd32", "unix", "IOPS", IOPS, NbdkitFile, AtLeast(2.0)),
        ("write-4k-qd32", "tcp", "IOPS", IOPS, DurablePeer, AtLeast(3.5)),
        ("write-4k-qd32", "unix", "IOPS", IOPS, DurablePeer, AtLeast(3.5)),
        (
            "write-4k-qd32",
            "unix",
            "IOPS, flush included",
            IOPS_WITH_FLUSH,
            DurablePeer,
            AtLeast(3.5),
        ),
        ("first-touch-4k-qd32", "unix", "IOPS", IOPS, DurablePeer, AtLeast(5.0)),
        (
            "first-touch-4k-qd32",
            "unix",
            "IOPS, flush included",
            IOPS_WITH_FLUSH,
            DurablePeer,
            AtLeast(5.0),
        ),
        ("read-4k-64-clients", "tcp", "IOPS", IOPS, ClonePeer, AtLeast(1.7)),
        ("read-4k-64-clients", "unix", "IOPS", IOPS, ClonePeer, AtLeast(1.7)),
        ("read-4k-64-clients", "tcp", "IOPS", IOPS, Echo, AtLeast(0.7)),
        ("read-4k-64-clients", "unix", "IOPS", IOPS, Echo, AtLeast(0.7)),
        ("read-4k-qd1-same-cpu", "unix", "IOPS", IOPS, Qemu, AtLeast(1.6)),
        ("read-4k-qd1-same-cpu", "unix", "IOPS", IOPS, Echo, AtLeast(0.85)),
        ("read-4k-qd1-two-cpus", "unix", "IOPS", IOPS, Qemu, AtLeast(1.6)),
        ("read-4k-qd1-two-cpus", "unix", "IOPS", IOPS, Echo, AtLeast(0.85)),
        ("cold-4k-qd32", "unix", "IOPS", IOPS, AnyPeer, AtLeast(1.0)),
        ("cold-4k-64-clients", "unix", "IOPS", IOPS, AnyPeer, AtLeast(1.5)),
        ("read-128k-qd8", "unix", "MiB/s", IOPS, Nbdkit, AtLeast(1.1)),
        ("read-128k-qd8", "unix", "MiB/s", IOPS, Echo, AtLeast(0.8)),
        ("read-128k-qd8", "tcp", "MiB/s", IOPS, Nbdkit, AtLeast(1.0)),
        ("read-4k-qd32", "unix", "server CPU", CPU, ClonePeer, AtMost(0.33)),
        ("read-4k-qd32", "tcp", "server CPU", CPU, ClonePeer, AtMost(0.33)),
        ("write-4k-qd32", "unix", "server CPU", CPU, ClonePeer, AtMost(0.33)),
        ("read-4k-64-clients", "unix", "server CPU", CPU, ClonePeer, AtMost(0.33)),
        ("read-4k-qd32", "unix", "server CPU", CPU, Echo, AtMost(1.5)),
        ("read-4k-qd32", "tcp", "server CPU", CPU, Echo, AtMost(1.5)),
        ("read-4k-64-clients", "unix", "server CPU", CPU, Echo, AtMost(1.5)),
        ("read-4k-64-clients", "tcp", "server CPU", CPU, Echo, AtMost(1.5)),
        ("read-4k-64-clients", "unix", "p99", P99_US, ClonePeer, AtMost(1.0)),
        ("read-4k-64-clients", "tcp", "p99", P99_US, ClonePeer, AtMost(1.0)),
    ]
};

pub const CACHE_GROWTH: &str = "page cache growth, 64 clones read the same 500 MiB";
pub const CLIENT_GROWTH: &str = "private memory a client, 64 clones";
pub const IDLE_CPU: &str = "CPU while idle, 64 clients connected";
pub const CLONES_TIME: &str = "creating 1000 clones";
pub const CLONE_BYTES: &str = "space of one of 1000 clones";
pub const OPEN_TIME: &str = "opening a pool, by its volumes";
pub const OPEN_TIME_MOST: &str = "opening a pool of 10000 volumes";
pub const SINGLE_FLIGHT: &str = "device reads for each byte, 64 clients read the same cold blocks";
pub const SIZE_RATIO: &str = "IOPS on 16 TiB for each on 16 GiB";
pub const ATTACH_RATIO: &str = "attaching 16 TiB beside 16 GiB";
pub const CHAIN_RATIO: &str = "time of a read through 32 layers for one through 1";

/// Figures of the volume server that have an absolute bound.
const BOUNDED: &[(&str, &str, Bound)] = &[
    (CACHE_GROWTH, " MiB", Bound::AtMost(550.0)),
    (CLIENT_GROWTH, " MiB", Bound::AtMost(0.2)),
    (IDLE_CPU, " ms a second", Bound::AtMost(1.0)),
    (CLONES_TIME, " s", Bound::AtMost(2.0)),
    (CLONE_BYTES, " KiB", Bound::AtMost(64.0)),
    (OPEN_TIME_MOST, " s", Bound::AtMost(2.0)),
    (SINGLE_FLIGHT, "", Bound::AtMost(1.1)),
    (SIZE_RATIO, "", Bound::AtLeast(0.9)),
    (ATTACH_RATIO, "", Bound::AtMost(1.5)),
    (CHAIN_RATIO, "", Bound::AtMost(1.1)),
];

/// All goals with the result of the run.
pub fn judge(results: &Results) -> Vec<Goal> {
    let compared = COMPARED.iter().copied().chain(never_behind());
    let compared = compared.map(|line| compare(results, &line));
    let bounded = BOUNDED.iter().map(|(name, unit, bound)| {
        let measured = results.figure(name, "perigee");
        Goal {
            goal: (*name).to_owned(),
            target: bound.text(unit),
            measured,
            how: measured.map_or_else(String::new, |value| format!("{value:.2}{unit}")),
            met: measured.map(|value| bound.holds(value)),
        }
    });
    compared.chain(bounded).collect()
}

/// On every machine: no peer is faster in any workload.
fn never_behind() -> impl Iterator<Item = Compared> {
    let all = WORKLOADS.iter().filter(|workload| !workload.once).map(|workload| {
        let transport = workload.transport.word();
        (workload.name, transport, "IOPS", IOPS, Against::AnyPeer, Bound::AtLeast(1.0))
    });
    let stands = |line: &Compared| {
        let mut known = COMPARED.iter();
        known.any(|one| (one.0, one.1) == (line.0, line.1) && matches!(one.4, Against::AnyPeer))
    };
    all.filter(move |line| !stands(line))
}

fn compare(results: &Results, line: &Compared) -> Goal {
    let (workload, transport, what, column, against, bound) = *line;
    let value = |server: &str| results.median(workload, transport, server, column);
    let better = |a: f64, b: f64| match bound {
        Bound::AtLeast(_) => a > b,
        Bound::AtMost(_) => a < b,
    };
    let mut best: Option<(String, f64)> = None;
    for server in results.servers(workload, transport) {
        if against.includes(&server)
            && let Some(theirs) = value(&server)
            && best.as_ref().is_none_or(|(_, best)| better(theirs, *best))
        {
            best = Some((server, theirs));
        }
    }
    let ours = value("perigee");
    let measured = match (ours, &best) {
        (Some(ours), Some((_, theirs))) => ratio(ours, *theirs),
        _ => None,
    };
    let how = match (ours, best) {
        (Some(ours), Some((server, theirs))) => {
            format!("{} : {} of {server}", short(ours), short(theirs))
        }
        _ => String::new(),
    };
    Goal {
        goal: format!("{workload} {transport}, {what}, against {}", against.words()),
        target: bound.text(""),
        measured,
        how,
        met: measured.map(|value| bound.holds(value)),
    }
}

fn short(value: f64) -> String {
    if value >= 1000.0 { format!("{:.1} k", value / 1000.0) } else { format!("{value:.1}") }
}

impl Against {
    fn words(self) -> &'static str {
        match self {
            Self::ClonePeer => "the best that serves clones",
            Self::DurablePeer => "the best with durable metadata",
            Self::AnyPeer => "the best peer",
            Self::Qemu => "the best qemu-nbd",
            Self::Nbdkit => "the best nbdkit",
            Self::NbdkitFile => "nbdkit on the plain file",
            Self::Echo => "echo",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Figure;
    use crate::results::tests::measurement;

    fn find<'a>(goals: &'a [Goal], start: &str) -> &'a Goal {
        goals.iter().find(|goal| goal.goal.starts_with(start)).expect("the goal")
    }

    #[test]
    fn a_goal_compares_with_the_best_that_serves_clones() {
        let mut results = Results::default();
        let servers = [
            ("perigee", 400.0),
            ("qemu-nbd threads", 50.0),
            ("nbdkit cow", 100.0),
            ("nbdkit file", 190.0),
            ("echo", 500.0),
        ];
        for (server, iops) in servers {
            results.results.push(measurement("read-4k-qd32", server, "tcp", iops));
        }
        let goals = judge(&results);
        let goal = find(&goals, "read-4k-qd32 tcp, IOPS, against the best that serves clones");
        assert_eq!((goal.measured, goal.met), (Some(4.0), Some(true)));
        assert!(goal.how.contains("nbdkit cow"), "{}", goal.how);
        let cpu = find(&goals, "read-4k-qd32 tcp, server CPU");
        assert_eq!((cpu.measured, cpu.met), (Some(0.25), Some(true)));
    }

    #[test]
    fn what_was_not_measured_is_neither_met_nor_missed() {
        assert!(judge(&Results::default()).iter().all(|goal| goal.met.is_none()));
    }

    #[test]
    fn a_figure_beyond_its_bound_is_a_goal_missed() {
        let mut results = Results::default();
        let figure = |value| Figure {
            name: CLONES_TIME.into(),
            server: "perigee".into(),
            value,
            unit: "s".into(),
            at: None,
        };
        results.figures.push(figure(2.5));
        assert_eq!(find(&judge(&results), CLONES_TIME).met, Some(false));
        results.figures[0] = figure(1.5);
        assert_eq!(find(&judge(&results), CLONES_TIME).met, Some(true));
    }

    #[test]
    fn every_goal_is_about_a_workload_that_runs() {
        for (workload, transport, ..) in COMPARED {
            let known = |w: &&crate::workloads::Workload| {
                w.name == *workload && w.transport.word() == *transport
            };
            assert!(WORKLOADS.iter().any(|w| known(&w)), "{workload} {transport}");
        }
    }
}
