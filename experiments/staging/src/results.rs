//! What was measured, and what is computed of it.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use perigee_lab::measuring::{Goal, median};
use perigee_lab::paper::Figure;
use serde::{Deserialize, Serialize};

use crate::paper;
use crate::series::{EVERY, Phase, Point};

/// The migrated encoder may take this much longer than expected. Theirs took 0.1 to 0.5 % longer.
pub const OVERHEAD_MAX: f64 = 0.05;

/// What a VM that reads a remote disk keeps of its speed while another job's inputs are staged over the same link, which
/// staging may take a half of.
const KEPT_MIN: f64 = 0.5;

/// How much a remote disk may cost the encoder. Theirs cost it at most 0.2 %.
pub const REMOTE_MAX: f64 = 0.05;

/// Their encoder, migrated, in seconds: [run time, expected time] from A to B and from B to A.
pub const MIGRATED: [[f64; 2]; 2] = [[611.0, 610.67], [613.0, 610.25]];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    Copy,
    Encode,
}

impl Task {
    pub fn name(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::Encode => "encode",
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Creation {
    pub round: u32,
    /// 0: host A, 1: host B.
    pub host: usize,
    pub is_local: bool,
    /// From the request to the first command.
    pub seconds: f64,
    /// The part from QEMU's start on.
    pub boot_s: f64,
    pub load_1min: f64,
}

/// A task on a local or a remote disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Run {
    pub round: u32,
    pub task: Task,
    pub host: usize,
    pub is_local: bool,
    /// Of work, by the guest's clock.
    pub seconds: f64,
    pub probe: Option<Probe>,
    pub load_1min: f64,
}

/// What ffprobe says of an encoder's result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    pub codec: String,
    pub width: u32,
    pub height: u32,
    pub frames: u32,
    pub bytes: u64,
    pub sha256: String,
}

impl Probe {
    /// `stored_sha256` is that of the file in the repository, and must be that of the guest's file.
    pub fn parse(said: &str, bytes: u64, stored_sha256: Option<&str>) -> Result<Self> {
        let fields: BTreeMap<&str, &str> =
            said.lines().filter_map(|line| line.split_once('=')).collect();
        let field = |name: &str| {
            fields.get(name).copied().with_context(|| format!("ffprobe says no {name}: {said}"))
        };
        let sha256 = field("sha256")?.to_owned();
        ensure!(stored_sha256 == Some(sha256.as_str()), "the repository has another result");
        Ok(Self {
            codec: field("codec_name")?.to_owned(),
            width: field("width")?.parse()?,
            height: field("height")?.parse()?,
            frames: field("nb_read_frames")?.parse()?,
            bytes,
            sha256,
        })
    }
}

/// An encoder whose VM was migrated.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Migrated {
    pub round: u32,
    /// The host where it began, and where its data stays.
    pub from: usize,
    pub seconds: f64,
    /// The part of the work that was done when the migration was asked for.
    pub done_before: f64,
    pub moved_at_s: f64,
    pub there_at_s: f64,
    pub migration_ms: u64,
    pub downtime_ms: u64,
    pub memory_bytes: u64,
    pub probe: Probe,
    pub series: Vec<Point>,
    pub load_1min: f64,
}

impl Migrated {
    /// Before, during and after the migration. A point is a mean of the time before it.
    pub fn phases(&self) -> Option<[Phase; 3]> {
        let after_s = self.there_at_s + EVERY.as_secs_f64();
        let of = |from_s: f64, to_s: f64| {
            let is_in = |point: &&Point| from_s < point.at_s && point.at_s <= to_s;
            Phase::of(self.series.iter().filter(is_in), self.from)
        };
        let before = of(0.0, self.moved_at_s)?;
        let during = of(self.moved_at_s, after_s)?;
        Some([before, during, of(after_s, f64::INFINITY)?])
    }
}

/// The encoder with the video as an input of the job.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FromInput {
    pub round: u32,
    /// The host had the image of the inputs already.
    pub is_staged: bool,
    /// From the request to the first command.
    pub begun_s: f64,
    /// Of work, by the guest's clock.
    pub seconds: f64,
    pub probe: Probe,
    pub load_1min: f64,
}

/// What uses the link beside a VM that reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Other {
    /// The inputs of another job are staged.
    Staging,
    /// A TCP connection carries as many bytes, as fast as it can.
    Copy,
}

impl Other {
    pub const ALL: [Self; 2] = [Self::Staging, Self::Copy];
}

/// A VM that reads a remote disk, first alone, then with something else on the link.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Beside {
    pub round: u32,
    pub other: Other,
    /// Of the other one, from its first byte to its last.
    pub other_s: f64,
    /// What the VM read while it was alone. `None`: no read of it was wholly within that time.
    pub alone_bytes_per_s: Option<f64>,
    pub beside_bytes_per_s: Option<f64>,
    pub load_1min: f64,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Results {
    pub versions: BTreeMap<String, String>,
    pub cpus: usize,
    pub file_bytes: u64,
    pub frames: u32,
    pub video_bytes: u64,
    /// Little data: the figures say nothing.
    #[serde(default)]
    pub is_quick: bool,
    pub goals: Vec<Goal>,
    /// What the paper says of its figures, and what this run says. It follows from the rest.
    #[serde(skip_deserializing)]
    pub paper: Vec<Figure>,
    pub creations: Vec<Creation>,
    pub runs: Vec<Run>,
    pub migrations: Vec<Migrated>,
    pub inputs: Vec<FromInput>,
    pub beside: Vec<Beside>,
}

impl Results {
    pub fn creation_s(&self, host: usize, is_local: bool) -> Option<f64> {
        let all = self.creations.iter().filter(|c| (c.host, c.is_local) == (host, is_local));
        median(all.map(|creation| creation.seconds))
    }

    pub fn run_s(&self, task: Task, host: usize, is_local: bool) -> Option<f64> {
        let is_it = |run: &&Run| (run.task, run.host, run.is_local) == (task, host, is_local);
        median(self.runs.iter().filter(is_it).map(|run| run.seconds))
    }

    pub fn migrated_s(&self, from: usize) -> Option<f64> {
        let all = self.migrations.iter().filter(|migrated| migrated.from == from);
        median(all.map(|migrated| migrated.seconds))
    }

    /// As the paper computes it: the part that was done before at the speed of the local disk, and the rest at that of a
    /// remote disk at the other host.
    pub fn expected_s(&self, from: usize) -> Option<f64> {
        let (before, after) =
            (self.run_s(Task::Encode, from, true)?, self.run_s(Task::Encode, 1 - from, false)?);
        let all = self.migrations.iter().filter(|migrated| migrated.from == from);
        median(all.map(|m| m.done_before * before + (1.0 - m.done_before) * after))
    }

    /// A median of all rounds with this other one.
    pub fn beside(&self, other: Other, figure: fn(&Beside) -> Option<f64>) -> Option<f64> {
        let all = self.beside.iter().filter(|one| one.other == other);
        median(all.filter_map(figure))
    }

    /// Compares with the goals, and with the paper.
    pub fn judge(&mut self) {
        let over = |measured: Option<f64>, base: Option<f64>| Some(measured? / base? - 1.0);
        let mut goals = Vec::new();
        for (host, name) in ["A", "B"].into_iter().enumerate() {
            let cost =
                over(self.run_s(Task::Encode, host, false), self.run_s(Task::Encode, host, true));
            goals.push(goal(
                format!("a remote disk costs the encoder at host {name} at most 5 %"),
                cost,
                REMOTE_MAX,
            ));
        }
        for (from, words) in ["A to B", "B to A"].into_iter().enumerate() {
            let cost = over(self.migrated_s(from), self.expected_s(from));
            goals.push(goal(
                format!("the encoder that is migrated from {words} takes at most 5 % longer than expected"),
                cost,
                OVERHEAD_MAX,
            ));
        }
        let alone = self.beside(Other::Staging, |one| one.alone_bytes_per_s);
        let kept = self.beside(Other::Staging, |one| one.beside_bytes_per_s);
        let kept = kept.zip(alone).map(|(kept, alone)| kept / alone);
        goals.push(Goal {
            goal: format!(
                "a VM that reads a remote disk keeps half of its speed while {} MB are staged over the same link",
                self.file_bytes / 1_000_000
            ),
            met: kept.map(|kept| kept >= KEPT_MIN),
            measured: kept.map_or_else(
                || "staging was over too soon to tell".to_owned(),
                |kept| format!("{:.0} %", kept * 100.0),
            ),
        });
        let probes = self.runs.iter().filter_map(|run| run.probe.as_ref());
        let probes = probes.chain(self.migrations.iter().map(|migrated| &migrated.probe));
        let mut results: Vec<&Probe> =
            probes.chain(self.inputs.iter().map(|run| &run.probe)).collect();
        let count = results.len();
        results.dedup();
        goals.push(Goal {
            goal: "every encoder's result in the repository is the same, whole video".to_owned(),
            met: (count > 0).then_some(results.len() == 1),
            measured: match results[..] {
                [probe] => format!(
                    "{count} times {} of {}x{} with {} frames, {} bytes",
                    probe.codec, probe.width, probe.height, probe.frames, probe.bytes
                ),
                _ => format!("{} different ones of {count}", results.len()),
            },
        });
        self.goals = goals;
        self.paper = paper::figures(self);
    }
}

fn goal(goal: String, cost: Option<f64>, max: f64) -> Goal {
    let measured =
        cost.map_or_else(|| "no runs".to_owned(), |cost| format!("{:+.1} %", cost * 100.0));
    Goal { goal, met: cost.map(|cost| cost <= max), measured }
}
