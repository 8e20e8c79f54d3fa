//! What was measured, and what is computed of it.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use perigee_lab::measuring::{Goal, median};
use serde::{Deserialize, Serialize};

use crate::bench::Size;
use crate::report;
use crate::series::{GuestPoint, ServerPoint};

/// As in the paper's experiment: four worker nodes.
pub const VM_COUNT: u32 = 4;

/// A program that computes may take this much longer with its data far away.
const REMOTE_MAX: f64 = 0.25;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Hash-Partitioned Apriori.
    #[default]
    Hpa,
    /// Parallel FP-growth.
    Pfp,
    /// BLAST over a partitioned database.
    Blast,
    /// TPC-H's queries.
    Tpch,
}

impl Work {
    pub const ALL: [Self; 4] = [Self::Hpa, Self::Pfp, Self::Blast, Self::Tpch];

    pub fn name(self) -> &'static str {
        match self {
            Self::Hpa => "hpa",
            Self::Pfp => "pfp",
            Self::Blast => "blast",
            Self::Tpch => "tpch",
        }
    }

    pub fn words(self) -> &'static str {
        match self {
            Self::Hpa => "HPA",
            Self::Pfp => "PFP",
            Self::Blast => "BLAST",
            Self::Tpch => "TPC-H",
        }
    }
}

/// One program at one distance of its data.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Run {
    pub work: Work,
    /// `None`: the data is at the VMs' host.
    pub rtt_ms: Option<u32>,
    /// From its start in all VMs until it has ended in all, by the machine's clock.
    pub seconds: f64,
    /// How fast each VM's clock went beside the machine's, by rank; its program begins a little later. Their points are corrected.
    pub clocks: Vec<f64>,
    /// Of what it found.
    pub found_sha256: String,
    /// TPC-H's queries and refresh functions, in their order.
    #[serde(default)]
    pub steps: Vec<StepTime>,
    /// By rank.
    pub guests: Vec<Vec<GuestPoint>>,
    pub servers: Vec<ServerPoint>,
    /// Before the VMs were started.
    pub load_1min: f64,
}

/// What one step of TPC-H's power test took: the mean of the VMs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StepTime {
    /// The number of a query, or `refresh-1` and `refresh-2`.
    pub name: String,
    pub seconds: f64,
}

/// One program on the host itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HostRun {
    pub work: Work,
    pub seconds: f64,
    /// The share of its time in which the host's CPUs worked, for whomever.
    pub busy: f64,
    /// Before it was started.
    pub load_1min: f64,
}

/// Means over a run, in shares of the time or of the memory; of servers in CPUs and bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Means {
    pub busy: Option<f64>,
    pub waits: Option<f64>,
    /// At the end of the run, when the caches are as full as they get.
    pub used_last: Option<f64>,
    pub cached_last: Option<f64>,
    pub server_cpus: [Option<f64>; 2],
    pub far_resident_bytes: Option<f64>,
    pub wan_bytes: Option<f64>,
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (mut sum, mut count) = (0.0, 0_u32);
    for value in values {
        sum += value;
        count += 1;
    }
    (count > 0).then(|| sum / f64::from(count))
}

impl Run {
    /// Where its data is, in words.
    pub fn place(&self) -> String {
        place(self.rtt_ms)
    }

    pub fn means(&self) -> Means {
        let guests = || self.guests.iter().flatten();
        let last = || self.guests.iter().filter_map(|points| points.last());
        let mut wan_bytes = None;
        for pair in self.servers.windows(2) {
            let [before, now] = pair else { continue };
            *wan_bytes.get_or_insert(0.0) += now.wan_bytes_per_s * (now.at_s - before.at_s);
        }
        Means {
            busy: mean(guests().map(|point| point.busy)),
            waits: mean(guests().map(|point| point.waits)),
            used_last: mean(last().map(|point| point.used)),
            cached_last: mean(last().map(|point| point.cached)),
            server_cpus: [0, 1].map(|host| mean(self.servers.iter().map(|point| point.cpus[host]))),
            far_resident_bytes: self.servers.last().map(|point| point.resident_bytes[1] as f64),
            wan_bytes,
        }
    }
}

pub fn place(rtt_ms: Option<u32>) -> String {
    rtt_ms.map_or_else(|| "local".to_owned(), |rtt| format!("{rtt} ms"))
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Results {
    pub cpus: usize,
    /// Little data: the figures say nothing.
    pub is_quick: bool,
    pub transactions: u32,
    pub transactions_bytes: u64,
    pub sequences: u32,
    pub scale_factor: f64,
    pub table_bytes: u64,
    pub runs: Vec<Run>,
    /// The paper's Domain0, where the VMs are its DomainU.
    #[serde(default)]
    pub on_host: Vec<HostRun>,
    /// What the VMs ran with: `kvm`, or `tcg` where QEMU interprets them.
    #[serde(default)]
    pub accelerator: String,
    /// All of it, with the preparations.
    #[serde(default)]
    pub whole_s: f64,
    /// What the paper says of its figures, and what these runs say.
    #[serde(default)]
    pub paper: Vec<crate::paper::Figure>,
    /// In words.
    pub not_measured: Vec<String>,
    pub goals: Vec<Goal>,
    pub versions: BTreeMap<String, String>,
}

impl Results {
    /// Those of an earlier run in this directory, if there are any.
    pub fn load(out: &Path) -> Result<Self> {
        let path = out.join("results.json");
        match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).with_context(|| path.display().to_string()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error).with_context(|| path.display().to_string()),
        }
    }

    /// How much data its runs have had.
    pub fn size(&self) -> Size {
        let Self { transactions, sequences, scale_factor, .. } = *self;
        Size { transactions, sequences, scale_factor }
    }

    /// Judges, and writes results.json and report.html.
    pub fn write(&mut self, out: &Path) -> Result<()> {
        self.runs.sort_by_key(|run| (run.work, run.rtt_ms));
        self.goals = self.judged();
        self.paper = crate::paper::figures(self);
        self.not_measured = self.missing();
        std::fs::create_dir_all(out)?;
        for (name, content) in [
            ("results.json", serde_json::to_string_pretty(self)?),
            ("report.html", report::html(self)),
        ] {
            let path = out.join(name);
            std::fs::write(&path, content)
                .with_context(|| format!("can't write {}", path.display()))?;
        }
        Ok(())
    }

    /// Where the data was, the local one first.
    pub fn places(&self) -> Vec<Option<u32>> {
        let mut places: Vec<Option<u32>> = self.runs.iter().map(|run| run.rtt_ms).collect();
        places.sort_unstable();
        places.dedup();
        places
    }

    pub fn run(&self, work: Work, rtt_ms: Option<u32>) -> Option<&Run> {
        self.runs.iter().find(|run| (run.work, run.rtt_ms) == (work, rtt_ms))
    }

    pub fn seconds(&self, work: Work, rtt_ms: Option<u32>) -> Option<f64> {
        let runs = self.runs.iter().filter(|run| (run.work, run.rtt_ms) == (work, rtt_ms));
        median(runs.map(|run| run.seconds))
    }

    /// How many times as long it takes with its data there as with local data.
    pub fn growth(&self, work: Work, rtt_ms: Option<u32>) -> Option<f64> {
        Some(self.seconds(work, rtt_ms)? / self.seconds(work, None)?)
    }

    /// How many times as long a program takes in the VMs as on the host itself, with its data local to both.
    pub fn overhead(&self, work: Work) -> Option<f64> {
        let on_host = self.on_host.iter().find(|run| run.work == work)?;
        Some(self.seconds(work, None)? / on_host.seconds)
    }

    /// The longest round trip of which there are runs.
    pub fn farthest(&self) -> Option<u32> {
        self.places().into_iter().flatten().max()
    }

    fn judged(&self) -> Vec<Goal> {
        let mut goals = Vec::new();
        let far = self.farthest();
        for work in [Work::Hpa, Work::Pfp, Work::Blast] {
            let growth = far.and_then(|far| self.growth(work, Some(far)));
            let at = far.map_or_else(|| "16 ms".to_owned(), |far| format!("{far} ms"));
            goals.push(Goal {
                goal: format!(
                    "{} takes at most 25 % longer with its data {at} away than with local data",
                    work.words()
                ),
                met: growth.filter(|_| !self.is_quick).map(|growth| growth <= 1.0 + REMOTE_MAX),
                measured: growth.map_or_else(
                    || "not measured".to_owned(),
                    |growth| {
                        let quick = if self.is_quick {
                            ", with so little data that it is not judged"
                        } else {
                            ""
                        };
                        format!("{growth:.2} times as long{quick}")
                    },
                ),
            });
        }
        for work in Work::ALL {
            let mut found: Vec<&str> = self
                .runs
                .iter()
                .filter(|run| run.work == work)
                .map(|run| run.found_sha256.as_str())
                .collect();
            let count = found.len();
            found.sort_unstable();
            found.dedup();
            let beside = match work {
                Work::Hpa | Work::Pfp => ", and what one process finds",
                Work::Tpch => ", and what SQLite answers",
                Work::Blast => "",
            };
            goals.push(Goal {
                goal: format!("{} finds the same wherever its data is{beside}", work.words()),
                met: (count > 0).then_some(found.len() == 1),
                measured: format!("{} different results of {count} runs", found.len()),
            });
        }
        goals
    }

    fn missing(&self) -> Vec<String> {
        let mut missing = vec![
            "The paper's own figures as numbers: its text names hardly any of figures 5 to 11, so their shapes are compared.".to_owned(),
            "DBT-3's throughput test: each VM runs its power test (refresh, 22 queries, refresh) on a database of its own.".to_owned(),
            "The target's disk cache: all hosts are network namespaces of one machine and share its page cache, so only the memory of \
             the volume server's process is shown."
                .to_owned(),
            "The initiator's memory and CPU are those of the guests, as each one's kernel counts them (the paper's DomainU). While guests \
             without KVM wait for a CPU of the machine, their kernels count that as work."
                .to_owned(),
            "Times by the guests' clocks: without KVM on a busy machine they can go several times too fast (the column \"fastest guest clock\"), so \
             times are the machine's, and the guests' points over time are stretched to them."
                .to_owned(),
            "Worker nodes at several hosts: all four VMs are at one host, so what they tell each other crosses no link. In the paper each has a \
             machine of its own, with CPUs and memory of its own. Here all hosts are network namespaces of one machine: four of them would share its CPUs, its disk cache and its \
             disk as the four VMs do now, and what goes between them would be copied in memory. What would be measured is four volume servers instead of one."
                .to_owned(),
        ];
        if !Path::new("/dev/kvm").exists() {
            missing.push("KVM: this machine has none. QEMU interprets the guests, which makes computing slower and not reading.".to_owned());
        }
        let load = self.runs.iter().map(|run| run.load_1min).fold(0.0, f64::max);
        if load > self.cpus as f64 {
            missing.push(format!(
                "A quiet machine: before the VMs were started, up to {load:.1} threads ran or waited for its {} CPUs, so times are longer and differ by chance.",
                self.cpus
            ));
        }
        let places = self.places();
        let lacking: Vec<String> = [None, Some(1), Some(2), Some(4), Some(8), Some(16)]
            .into_iter()
            .filter(|place| !places.contains(place))
            .map(place)
            .collect();
        if !lacking.is_empty() {
            missing.push(format!("These places of the data: {}.", lacking.join(", ")));
        }
        for work in Work::ALL {
            let without: Vec<String> = places
                .iter()
                .filter(|place| self.run(work, **place).is_none())
                .map(|at| place(*at))
                .collect();
            if !without.is_empty() {
                missing.push(format!("{}: {}.", work.words(), without.join(", ")));
            }
        }
        missing
    }
}
