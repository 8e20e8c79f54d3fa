//! `results.json`: the measurements, and what follows from them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};
use perigee_lab::measuring::{Goal, median};
use perigee_lab::paper::Figure;
use serde::{Deserialize, Serialize};

use crate::case::{Way, Work};
use crate::{goals, paper};

/// One run of the job.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Run {
    pub rtt_ms: u32,
    pub round: u32,
    pub work: Work,
    pub way: Way,
    /// From the start of the VM until the work begins.
    pub boot_s: f64,
    /// From then until the work is done.
    pub work_s: f64,
    /// The scan's passes, by the guest's clock.
    #[serde(default)]
    pub passes_s: Vec<f64>,
    /// Of the queries' answers.
    #[serde(default)]
    pub answers_sha256: String,
    #[serde(default)]
    pub migration: Option<Moved>,
    #[serde(default)]
    pub copy: Option<Copied>,
    /// What the WAN carried in both directions meanwhile, frames' headers included.
    pub wan_bytes: Option<u64>,
    /// The machine's load when the run began.
    pub load_1min: f64,
    /// The version of Perigee.
    #[serde(default)]
    pub perigee: String,
}

/// A VM's live migration.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Moved {
    pub total_ms: u64,
    pub pause_ms: u64,
    pub memory_bytes: u64,
    /// The work was not done yet when the VM ran at its destination.
    pub during_work: bool,
}

/// A volume's move to the VM's host.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Copied {
    /// Until the new home had the volume.
    pub taken_ms: Option<u64>,
    /// Until all of it was there.
    pub total_ms: u64,
    pub during_work: bool,
}

/// One move of a VM whose disk has data of its own.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DiskMove {
    pub system: System,
    /// `there` or `back`.
    pub direction: Direction,
    /// Data that the VM has written to its disk.
    pub overlay_bytes: u64,
    /// From asking until the guest runs at its destination.
    pub runs_after_ms: f64,
    /// From asking until the destination has all of the disk.
    pub complete_after_ms: f64,
    pub pause_ms: f64,
    pub memory_bytes: u64,
    /// What the WAN had carried until the guest ran there, and until all of the disk was there.
    pub wan_bytes_running: Option<u64>,
    pub wan_bytes_complete: Option<u64>,
    /// What the guest wrote to its disks between the move before and this one.
    #[serde(default)]
    pub written_since: Option<Written>,
    pub load_1min: f64,
    /// The version of Perigee, also for a row of its peers.
    #[serde(default)]
    pub perigee: String,
}

/// What a guest wrote between two moves. Its counters are read every second, so there are two bounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Written {
    pub least_bytes: u64,
    pub most_bytes: u64,
}

/// The name of Perigee among the programs.
const PERIGEE: &str = "perigee";

/// The share of a TCP segment of 1,448 bytes in its Ethernet frame of 1,514.
const PAYLOAD_SHARE: f64 = 1448.0 / 1514.0;

impl DiskMove {
    /// The largest share of the overlay that can have been at the destination when the guest ran there: all that the
    /// WAN had carried, without the memory.
    pub fn share_there(&self) -> Option<f64> {
        let disk = self.wan_bytes_running?.saturating_sub(self.memory_bytes);
        (self.overlay_bytes > 0).then(|| (float(disk) / float(self.overlay_bytes)).min(1.0))
    }

    /// What the WAN carried after the guest ran at its destination, without the headers of its frames. The disk begins
    /// to come only then, and the memory has come before.
    pub fn disk_bytes(&self) -> Option<f64> {
        let after = self.wan_bytes_complete?.saturating_sub(self.wan_bytes_running?);
        Some(float(after) * PAYLOAD_SHARE)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum System {
    /// `vm move --volumes follow`.
    Perigee,
    /// QEMU's `blockdev-mirror` over NBD and its migration, driven over QMP.
    Mirror,
    /// `virsh migrate --copy-storage-inc`.
    Libvirt,
}

impl System {
    pub fn words(self) -> &'static str {
        match self {
            Self::Perigee => "Perigee, follow",
            Self::Mirror => "QEMU, drive-mirror",
            Self::Libvirt => "libvirt, copy-storage-inc",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    There,
    Back,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Results {
    pub cpus: usize,
    pub versions: BTreeMap<String, String>,
    pub scale_factor: f64,
    pub table_bytes: u64,
    pub scan_bytes: u64,
    pub memory_bytes: u64,
    /// The WAN of the moves of a VM with its disk.
    pub moves_wan: String,
    pub goals: Vec<Goal>,
    /// What the paper says of its figures, and what these runs say. It follows from the rest.
    #[serde(skip_deserializing)]
    pub paper: Vec<Figure>,
    pub runs: Vec<Run>,
    pub disk_moves: Vec<DiskMove>,
    /// What was not measured, and why.
    pub not_measured: Vec<String>,
}

impl Results {
    /// The results of an earlier run.
    pub fn load(out: &Path) -> Result<Self> {
        let path = out.join("results.json");
        let Ok(bytes) = std::fs::read(&path) else { return Ok(Self::default()) };
        let mut results: Self = serde_json::from_slice(&bytes)
            .with_context(|| format!("{} is not of this experiment", path.display()))?;
        results.note_versions();
        Ok(results)
    }

    /// Notes the present version in each row that has none.
    fn note_versions(&mut self) {
        let Some(present) = self.versions.get(PERIGEE) else { return };
        let of_runs = self.runs.iter_mut().map(|run| &mut run.perigee);
        let of_moves = self.disk_moves.iter_mut().map(|moved| &mut moved.perigee);
        for of_row in of_runs.chain(of_moves).filter(|version| version.is_empty()) {
            of_row.clone_from(present);
        }
    }

    /// The versions of all programs. Rows may have been measured with several versions of Perigee.
    pub fn all_versions(&self) -> BTreeMap<String, String> {
        let of_rows = self.runs.iter().map(|run| &run.perigee);
        let of_rows = of_rows.chain(self.disk_moves.iter().map(|moved| &moved.perigee));
        let distinct: BTreeSet<&str> =
            of_rows.map(String::as_str).filter(|version| !version.is_empty()).collect();
        let mut versions = self.versions.clone();
        if !distinct.is_empty() {
            let distinct = distinct.into_iter().collect::<Vec<_>>().join("; ");
            versions.insert(PERIGEE.to_owned(), distinct);
        }
        versions
    }

    /// Judges the goals and writes everything.
    pub fn write(&mut self, out: &Path) -> Result<()> {
        self.note_versions();
        self.runs.sort_by_key(|run| (run.work, run.rtt_ms, run.way, run.round));
        self.goals = goals::judge(self);
        self.paper = paper::figures(self);
        std::fs::create_dir_all(out)?;
        std::fs::write(out.join("results.json"), serde_json::to_string_pretty(self)? + "\n")?;
        std::fs::write(out.join("report.html"), crate::report::html(self))?;
        Ok(())
    }

    pub fn of(&self, work: Work, rtt_ms: u32, way: Way) -> Vec<&Run> {
        let is_it = |run: &&Run| (run.work, run.rtt_ms, run.way) == (work, rtt_ms, way);
        self.runs.iter().filter(is_it).collect()
    }

    /// The median of a figure over the rounds of one case.
    pub fn median(
        &self,
        work: Work,
        rtt_ms: u32,
        way: Way,
        figure: impl Fn(&Run) -> Option<f64>,
    ) -> Option<f64> {
        median(self.of(work, rtt_ms, way).into_iter().filter_map(figure))
    }

    pub fn work_s(&self, work: Work, rtt_ms: u32, way: Way) -> Option<f64> {
        self.median(work, rtt_ms, way, |run| Some(run.work_s))
    }

    /// One pass of the scan, 0 or 1.
    pub fn pass_s(&self, rtt_ms: u32, way: Way, pass: usize) -> Option<f64> {
        self.median(Work::Scan, rtt_ms, way, |run| run.passes_s.get(pass).copied())
    }

    pub fn rtts_ms(&self) -> Vec<u32> {
        let mut rtts: Vec<u32> = self.runs.iter().map(|run| run.rtt_ms).collect();
        rtts.sort_unstable();
        rtts.dedup();
        rtts
    }

    pub fn disk_moves_of(
        &self,
        system: System,
        direction: Direction,
        with_overlay: bool,
    ) -> Vec<&DiskMove> {
        let is_it = |m: &&DiskMove| {
            m.system == system && m.direction == direction && (m.overlay_bytes > 0) == with_overlay
        };
        self.disk_moves.iter().filter(is_it).collect()
    }
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds and bytes of one run")]
pub fn float(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A job whose scan is twice as slow remotely, and a VM that leaves most of its disk behind at first.
    pub fn results() -> Results {
        let mut results = Results::default();
        let run = |rtt_ms, work, way, work_s: f64| Run {
            rtt_ms,
            round: 1,
            work,
            way,
            boot_s: 4.0,
            work_s,
            passes_s: if work == Work::Scan { vec![work_s, 1.05] } else { Vec::new() },
            answers_sha256: String::new(),
            migration: (way == Way::Stay).then_some(Moved {
                total_ms: 800,
                pause_ms: 200,
                memory_bytes: 100 << 20,
                during_work: true,
            }),
            copy: None,
            wan_bytes: Some(1 << 20),
            load_1min: 0.5,
            perigee: String::new(),
        };
        for rtt_ms in [0, 16] {
            let slow = if rtt_ms > 0 { 2.0 } else { 1.0 };
            results.runs.push(run(rtt_ms, Work::Scan, Way::Local, 1.0));
            results.runs.push(run(rtt_ms, Work::Scan, Way::Remote, slow));
            results.runs.push(run(rtt_ms, Work::Tpch, Way::Local, 8.0));
            results.runs.push(run(rtt_ms, Work::Tpch, Way::Iscsi, 10.0 * slow));
            results.runs.push(run(rtt_ms, Work::Tpch, Way::Stay, 9.0));
        }
        let disk_move = |direction, overlay_bytes, pause_ms| DiskMove {
            system: System::Perigee,
            direction,
            overlay_bytes,
            runs_after_ms: 2000.0,
            complete_after_ms: 20_000.0,
            pause_ms,
            memory_bytes: 100 << 20,
            wan_bytes_running: Some(110 << 20),
            wan_bytes_complete: Some((100 << 20) + (overlay_bytes / 4)),
            written_since: (direction == Direction::Back)
                .then_some(Written { least_bytes: 510 << 20, most_bytes: 512 << 20 }),
            load_1min: 0.5,
            perigee: String::new(),
        };
        for (overlay_bytes, pause_ms) in [(0, 250.0), (2 << 30, 300.0)] {
            results.disk_moves.push(disk_move(Direction::There, overlay_bytes, pause_ms));
            results.disk_moves.push(disk_move(Direction::Back, overlay_bytes, pause_ms));
        }
        results.goals = goals::judge(&results);
        results.paper = paper::figures(&results);
        results
    }

    #[test]
    fn goals_are_met_missed_or_not_measured() {
        let met: Vec<Option<bool>> = results().goals.iter().map(|goal| goal.met).collect();
        assert_eq!(met, [Some(false), Some(true), None, Some(true), Some(true), Some(true)]);
    }

    #[test]
    fn a_row_keeps_the_version_that_it_was_measured_with() {
        let mut results = results();
        results.versions.insert(PERIGEE.to_owned(), "commit 1".to_owned());
        results.note_versions();
        results.runs[0].perigee.clear();
        results.versions.insert(PERIGEE.to_owned(), "commit 2".to_owned());
        results.note_versions();
        assert_eq!(results.runs[0].perigee, "commit 2");
        assert_eq!(results.runs[1].perigee, "commit 1");
        assert_eq!(results.all_versions()[PERIGEE], "commit 1; commit 2");
    }
}
