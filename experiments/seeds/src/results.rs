//! What was measured, and what is computed of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};
use perigee_lab::measuring::Goal;
use perigee_lab::paper::Figure;
use serde::{Deserialize, Serialize};

use crate::bench::Size;
use crate::cell::{Cell, Kind};
use crate::dilation::{Dilation, Pace};
use crate::paper;
use crate::report;
use crate::rounds::Range;
use crate::series::{GuestPoint, ServerPoint};

/// Of the file. A file of an earlier one is not read.
const FORMAT: u32 = 2;

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
    /// TPC-H: some steps of the power test, and a throughput test.
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

/// One half of a pair: [`Kind`] says what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    Near,
    Far,
}

impl Side {
    pub const BOTH: [Self; 2] = [Self::Near, Self::Far];

    pub fn name(self) -> &'static str {
        match self {
            Self::Near => "near",
            Self::Far => "far",
        }
    }

    pub fn index(self) -> usize {
        usize::from(self == Self::Far)
    }
}

/// Means over a run, in shares of the time or of the memory; of targets in CPUs and shares of their memory.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Means {
    pub busy: Option<f64>,
    pub waits: Option<f64>,
    /// The most in a run, as a mean of the VMs.
    pub used_most: Option<f64>,
    pub cached_most: Option<f64>,
    pub target_cpus: [Option<f64>; 2],
    pub target_memory_last: [Option<f64>; 2],
    pub wan_bytes: Option<f64>,
}

/// What the hosts' network cards carried while a program ran.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CardsUse {
    /// What the ranks said to each other, and all else, summed over the VMs' hosts. Without networks of their own the first is in the second.
    pub tunnels_bytes: u64,
    pub others_bytes: u64,
    /// The share of its rate that the busiest card carried in its busier direction.
    pub busiest: f64,
}

/// One program of one side of a cell.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Run {
    pub work: Work,
    pub side: Side,
    /// From its start in all VMs until it has ended in all, by the machine's clock.
    pub seconds: f64,
    /// Of what it found.
    pub found_sha256: String,
    /// TPC-H's, in their order.
    #[serde(default)]
    pub steps: Vec<StepTime>,
    pub means: Means,
    /// By rank; only of the first round.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub guests: Vec<Vec<GuestPoint>>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub servers: Vec<ServerPoint>,
    #[serde(default)]
    pub cards: Option<CardsUse>,
}

/// What one step of TPC-H took: the mean of the VMs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StepTime {
    /// The number of a query, `refresh-1` and `refresh-2`, or `throughput`.
    pub name: String,
    pub seconds: f64,
}

/// A move of all VMs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Moved {
    pub seconds: f64,
    pub reason: String,
}

/// A cell that was measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Measured {
    #[serde(flatten)]
    pub cell: Cell,
    /// When it began; Unix time.
    pub at_ms: u64,
    /// Before it.
    pub load_1min: f64,
    /// The fixed computation in these VMs; it shows how the machine's speed changes.
    pub fixed_s: Option<f64>,
    /// How fast the first VM's clock went beside the machine's.
    pub clock: f64,
    pub runs: Vec<Run>,
    /// `None`: no VM moved.
    #[serde(default)]
    pub moved: Option<Moved>,
    /// What could not be measured in it, in words.
    #[serde(default)]
    pub lacks: Vec<String>,
}

impl Measured {
    pub fn run(&self, work: Work, side: Side) -> Option<&Run> {
        self.runs.iter().find(|run| (run.work, run.side) == (work, side))
    }

    /// How many times as long as near it takes far.
    pub fn ratio(&self, work: Work) -> Option<f64> {
        Some(self.run(work, Side::Far)?.seconds / self.run(work, Side::Near)?.seconds)
    }
}

/// The same cells of all rounds.
pub type Column = (Kind, u32, bool);

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Results {
    pub format: u32,
    pub cpus: usize,
    /// One round of little data: the figures say nothing.
    pub is_quick: bool,
    pub transactions: u32,
    pub transactions_bytes: u64,
    pub sequences: u32,
    pub scale_factor: f64,
    pub table_bytes: u64,
    /// The database's files.
    pub database_bytes: u64,
    /// Of each guest.
    pub memory_bytes: u64,
    /// Of each target, with its disk cache; `None`: it has no limit.
    pub target_memory_bytes: Option<u64>,
    /// By the number of VMs that compute at once. Measured before the first cell; all cells' networks are set from them.
    pub dilations: BTreeMap<u32, Dilation>,
    pub cells: Vec<Measured>,
    /// Cells that could not be measured, and why. The next run tries them again.
    pub failed: BTreeMap<String, String>,
    /// What the VMs ran with: `kvm`, or `tcg` where QEMU interprets them.
    pub accelerator: String,
    /// Of all runs of this experiment that have added cells, with their preparations.
    pub whole_s: f64,
    /// What the papers say of their figures, and what these rounds say. It follows from the rest.
    #[serde(skip_deserializing)]
    pub paper: Vec<Figure>,
    /// In words.
    pub not_measured: Vec<String>,
    pub goals: Vec<Goal>,
    pub versions: BTreeMap<String, String>,
}

impl Results {
    /// Those of an earlier run in this directory, if there are any of this format.
    pub fn load(out: &Path) -> Result<Self> {
        let path = out.join("results.json");
        let text = match std::fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Self::default());
            }
            read => read.with_context(|| path.display().to_string())?,
        };
        let found: serde_json::Value =
            serde_json::from_slice(&text).with_context(|| path.display().to_string())?;
        if found.get("format").and_then(serde_json::Value::as_u64) != Some(u64::from(FORMAT)) {
            return Ok(Self::default());
        }
        serde_json::from_value(found).with_context(|| path.display().to_string())
    }

    /// How much data its runs have had.
    pub fn size(&self) -> Size {
        let Self { transactions, sequences, scale_factor, memory_bytes, .. } = *self;
        Size { transactions, sequences, scale_factor, memory_bytes }
    }

    /// Adds a cell, in place of an earlier one.
    pub fn keep(&mut self, measured: Measured) {
        self.cells.retain(|one| one.cell != measured.cell);
        self.failed.remove(&measured.cell.to_string());
        self.cells.push(measured);
        self.cells.sort_by_key(|one| one.cell);
    }

    pub fn has(&self, cell: Cell) -> bool {
        self.cells.iter().any(|one| one.cell == cell)
    }

    /// Judges, and writes results.json and report.html.
    pub fn write(&mut self, out: &Path) -> Result<()> {
        self.format = FORMAT;
        self.goals = self.judged();
        self.paper = paper::figures(self);
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

    /// What a second of theirs takes in such cells.
    pub fn pace(&self, kind: Kind, is_dilated: bool) -> Pace {
        let dilation = self.dilations.get(&kind.vms()).filter(|_| is_dilated);
        Pace(dilation.map_or(1.0, Dilation::factor))
    }

    pub fn of(&self, column: Column) -> impl Iterator<Item = &Measured> {
        self.cells.iter().filter(move |one| one.cell.column() == column)
    }

    /// The round trips of this kind, the shortest first.
    pub fn rtts(&self, kind: Kind, is_dilated: bool) -> Vec<u32> {
        let of = |one: &&Measured| (one.cell.kind, one.cell.is_dilated) == (kind, is_dilated);
        let rtts: BTreeSet<u32> = self.cells.iter().filter(of).map(|one| one.cell.rtt_ms).collect();
        rtts.into_iter().collect()
    }

    /// In each round, how many times as long as near it takes far.
    pub fn ratio(&self, column: Column, work: Work) -> Option<Range> {
        Range::of(self.of(column).filter_map(|one| one.ratio(work)))
    }

    /// In the paper's seconds.
    pub fn seconds(&self, column: Column, work: Work, side: Side) -> Option<Range> {
        let pace = self.pace(column.0, column.2);
        let of = |one: &Measured| Some(pace.theirs_s(one.run(work, side)?.seconds));
        Range::of(self.of(column).filter_map(of))
    }

    /// A mean of each round.
    pub fn mean(
        &self,
        column: Column,
        (work, side): (Work, Side),
        value: impl Fn(&Means) -> Option<f64>,
    ) -> Option<Range> {
        let of = |one: &Measured| value(&one.run(work, side)?.means);
        Range::of(self.of(column).filter_map(of))
    }

    fn judged(&self) -> Vec<Goal> {
        let found_by = |work: Work| -> Goal {
            let all = self.cells.iter().flat_map(|one| &one.runs).filter(|run| run.work == work);
            let texts: Vec<&str> = all.map(|run| run.found_sha256.as_str()).collect();
            let different = texts.iter().collect::<BTreeSet<_>>().len();
            Goal {
                goal: format!(
                    "{} finds the same in each run, and what its reference finds",
                    work.words()
                ),
                met: (!texts.is_empty()).then_some(different == 1),
                measured: format!("{different} different results of {} runs", texts.len()),
            }
        };
        Work::ALL.into_iter().map(found_by).collect()
    }

    fn missing(&self) -> Vec<String> {
        let mut missing = vec![
            "The papers' own figures as numbers: their text names hardly any, so shapes are compared.".to_owned(),
            "HPA with 20 MB: in Python, in guests that QEMU interprets, that would take hours. `--transactions 700000` has as much.".to_owned(),
            "All 22 queries: the power test here has both refresh functions and the steps in the table below, so that a cell takes about a minute. `experiments/workloads/check` runs all.".to_owned(),
            "The paper's machine: that it takes the dilation's `theirs` times as long as this one is an assumption. The undilated rows are what this machine is without any.".to_owned(),
            "Dilated clocks in the guests, and dilated disks: QEMU 7.2 can't slow a guest's clock by a factor, and the targets' disks are as fast as this machine's.".to_owned(),
            "Equal memory on the host and in the VMs: beside the VMs, the host's databases have its whole disk cache.".to_owned(),
            "Machines of their own: six servers and two targets are network namespaces of one machine, and share its CPUs.".to_owned(),
        ];
        if self.accelerator == "tcg" {
            missing.push("KVM: the guests are interpreted, which makes computing slower and not reading. That is what the dilation is for.".to_owned());
        }
        if self.target_memory_bytes.is_none() {
            missing.push("The targets' memory with the disk cache: this kernel counts it for no group of processes.".to_owned());
        }
        missing.extend(self.failed.iter().map(|(cell, why)| format!("{cell}: {why}")));
        for one in &self.cells {
            missing.extend(one.lacks.iter().map(|text| format!("{}: {text}", one.cell)));
        }
        let load = self.cells.iter().map(|one| one.load_1min).fold(0.0, f64::max);
        if load > 3.0 * self.cpus as f64 {
            missing.push(format!("A quiet machine: before a cell, up to {load:.1} threads ran or waited for its {} CPUs.", self.cpus));
        }
        let fixed = Range::of(self.cells.iter().filter_map(|one| one.fixed_s));
        if let Some(fixed) = fixed.filter(|it| it.high > 1.3 * it.low) {
            missing.push(format!(
                "A machine of one speed: the fixed computation took {} s in the cells.",
                fixed.words(1)
            ));
        }
        missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(round: u32, near_s: f64, far_s: f64) -> Measured {
        let run = |side, seconds| Run {
            work: Work::Tpch,
            side,
            seconds,
            found_sha256: String::new(),
            steps: Vec::new(),
            means: Means::default(),
            guests: Vec::new(),
            servers: Vec::new(),
            cards: None,
        };
        Measured {
            cell: Cell { round, kind: Kind::Distance, rtt_ms: 16, is_dilated: true },
            at_ms: 0,
            load_1min: 0.0,
            fixed_s: None,
            clock: 1.0,
            runs: vec![run(Side::Near, near_s), run(Side::Far, far_s)],
            moved: None,
            lacks: Vec::new(),
        }
    }

    #[test]
    fn the_ratio_is_that_of_each_round_whatever_the_machine_s_speed_was_then() {
        let dilation = Dilation::new(0.8, 0.01, 4.0).expect("times");
        let mut results =
            Results { dilations: BTreeMap::from([(4, dilation)]), ..Results::default() };
        for (round, speed) in [(1, 1.0), (2, 1.7), (3, 1.2)] {
            results.keep(measured(round, 10.0 * speed, 15.0 * speed));
        }
        let column = (Kind::Distance, 16, true);
        let ratio = results.ratio(column, Work::Tpch).expect("ratios");
        assert!((ratio.low - 1.5).abs() < 1e-9 && (ratio.high - 1.5).abs() < 1e-9, "{ratio:?}");
        let seconds = results.seconds(column, Work::Tpch, Side::Near).expect("seconds");
        assert!((seconds.low - 0.5).abs() < 1e-9, "a factor of 20: {seconds:?}");
        assert_eq!(results.ratio((Kind::Distance, 16, false), Work::Tpch), None);
    }

    #[test]
    fn a_cell_that_is_measured_again_takes_the_place_of_the_first() {
        let mut results = Results::default();
        results.keep(measured(1, 10.0, 11.0));
        results.keep(measured(1, 10.0, 12.0));
        assert_eq!(results.cells.len(), 1);
        assert!(results.has(results.cells[0].cell));
        assert_eq!(results.cells[0].ratio(Work::Tpch), Some(1.2));
    }

    #[test]
    fn a_run_is_read_again_as_it_was_written_and_one_of_another_format_is_not() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut results = Results::default();
        results.keep(measured(1, 10.0, 11.0));
        results.write(dir.path()).expect("it is written");
        assert_eq!(Results::load(dir.path()).expect("it is read").cells.len(), 1);
        std::fs::write(dir.path().join("results.json"), "{\"runs\": []}").expect("an old file");
        assert!(Results::load(dir.path()).expect("it is left out").cells.is_empty());
    }
}
