//! The demo's result: the content of `results.json`, and the checks of it.

use std::collections::BTreeMap;
use std::time::Duration;

use perigee_model::job::{Job, Link, Migration, MigrationState, Sample};
use perigee_model::phases::Phases;
use perigee_model::plan::{Decision, Estimate, Plan, Trigger, Way};
use perigee_model::{HostId, JobId, Problem};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    pub rtt_ms: f64,
    /// Of the link between the sites, in each direction: `200Mbit`, or `unlimited`.
    pub rate: String,
    pub scale_factor: f64,
    pub table_bytes: u64,
    /// What the volume of the run `large` has beside the tables; no query reads it.
    pub archive_bytes: u64,
    /// The home of the volume with the tables.
    pub data_home: HostId,
    pub queries: Vec<String>,
    /// Whether SQLite gives the same answers from the same tables.
    pub answers_checked: bool,
    /// The run without Perigee.
    pub plain: Option<Plain>,
    pub runs: Vec<Run>,
    /// The measurements between the hosts.
    pub links: Vec<Link>,
    pub versions: BTreeMap<String, String>,
    /// The parts of the lab that still existed after it was taken down.
    pub left_behind: Vec<String>,
}

/// QEMU reads from qemu-nbd over the WAN.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Plain {
    /// From the VM's start to the end of its command.
    pub measured_s: f64,
    pub answers_sha256: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunName {
    /// The VM stays on the other side of the WAN.
    Remote,
    /// The job file places the VM beside the data.
    Beside,
    /// The VM starts on the other side of the WAN, and the planner may move the VM or its data.
    Planned,
    /// The same, with the tables on a volume that is too large to copy.
    Large,
    /// As `Planned`, with a replica of the data there.
    Replica,
}

impl RunName {
    pub fn word(self) -> &'static str {
        match self {
            Self::Remote => "remote",
            Self::Beside => "beside",
            Self::Planned => "planned",
            Self::Large => "large",
            Self::Replica => "replica",
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Run {
    pub name: RunName,
    pub job: JobId,
    pub predicted: Option<Estimate>,
    /// From the VM's start to the end of the job's command.
    pub measured_s: f64,
    pub answers_sha256: String,
    pub migrations: Vec<Move>,
    /// The prediction just before the run, as `job plan` prints it.
    pub plan: Plan,
    pub decisions: Vec<Decision>,
    pub samples: Vec<Sample>,
    /// Unix time of the VM's start.
    pub started_ms: u64,
    /// Unix time of the command's start.
    pub running_ms: Option<u64>,
}

impl Run {
    /// Whether the planner brought the data to the VM while it ran.
    pub fn data_came(&self) -> bool {
        self.changes().any(|decision| {
            decision.plan.chosen().is_some_and(|option| option.way == Way::Copy)
                && decision.outcome.is_empty()
        })
    }

    /// What the planner decided while the run lasted.
    fn changes(&self) -> impl Iterator<Item = &Decision> {
        self.decisions.iter().filter(|decision| decision.trigger == Trigger::TimeLost)
    }

    /// Why the run went as it did, in one sentence, as the planner said it.
    pub fn why(&self) -> String {
        if let Some(decision) = self.changes().next() {
            let after = decision.at_ms.saturating_sub(self.started_ms);
            let after_s = Duration::from_millis(after).as_secs_f64();
            return format!("{after_s:.1} s after the VM's start: {}.", decision.summary);
        }
        let planned = self.plan.chosen().map_or("", |option| option.reason.as_str());
        let asked = match self.name {
            RunName::Remote => "The job file says where the VM starts, and forbids moves",
            RunName::Beside => "The job file asks for the host of the data",
            RunName::Planned | RunName::Large => "Nothing was changed",
            RunName::Replica => "The VM starts at the host with the replica",
        };
        if planned.is_empty() { format!("{asked}.") } else { format!("{asked}: {planned}.") }
    }
}

/// A migration that was completed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Move {
    pub from: HostId,
    pub to: HostId,
    pub reason: String,
    pub predicted_total_ms: Option<u64>,
    pub total_ms: u64,
    pub downtime_ms: u64,
    pub bytes: u64,
    pub job_progress: Option<f64>,
    pub started_ms: u64,
    pub ended_ms: Option<u64>,
    /// The duration of each phase.
    pub phases: Phases,
}

impl From<&Migration> for Move {
    fn from(migration: &Migration) -> Self {
        Self {
            from: migration.from.clone(),
            to: migration.to.clone(),
            reason: migration.reason.clone(),
            predicted_total_ms: migration.predicted_total_ms,
            total_ms: migration.total_ms,
            downtime_ms: migration.downtime_ms,
            bytes: migration.bytes,
            job_progress: migration.job_progress,
            started_ms: migration.started_ms,
            ended_ms: migration.ended_ms,
            phases: migration.phases.clone(),
        }
    }
}

/// Figures of a run that its job's record does not have.
pub struct Evidence {
    pub plan: Plan,
    pub decisions: Vec<Decision>,
    pub samples: Vec<Sample>,
    pub answers_sha256: String,
}

impl Run {
    /// # Errors
    /// `Internal` when the record of a successful job lacks a time.
    pub fn new(name: RunName, job: &Job, evidence: Evidence) -> Result<Self, Problem> {
        let missing = |what| {
            Problem::internal(format!("can't use job {}", job.id), format!("it has no {what}"))
        };
        let completed = job.migrations.iter().filter(|m| m.state == MigrationState::Completed);
        Ok(Self {
            name,
            job: job.id.clone(),
            predicted: job.predicted,
            measured_s: job.measured_s.ok_or_else(|| missing("measured time"))?,
            answers_sha256: evidence.answers_sha256,
            migrations: completed.map(Move::from).collect(),
            plan: evidence.plan,
            decisions: evidence.decisions,
            samples: evidence.samples,
            started_ms: job.started_ms.ok_or_else(|| missing("start time"))?,
            running_ms: job.running_ms,
        })
    }
}

impl Run {
    /// Whether the measured time is in the predicted range; `None` without a prediction.
    pub fn in_range(&self) -> Option<bool> {
        Some(self.predicted?.holds(self.measured_s))
    }

    /// Of what was predicted, as a share of what was measured.
    pub fn error(&self) -> Option<f64> {
        Some(self.predicted?.expected_s / self.measured_s - 1.0)
    }
}

impl Outcome {
    pub fn run(&self, name: RunName) -> Option<&Run> {
        self.runs.iter().find(|run| run.name == name)
    }

    /// The runs in the order of their bars: name, prediction and measured seconds. The first one is that without Perigee.
    pub fn bars(&self) -> Vec<(&'static str, Option<Estimate>, f64)> {
        let plain = self.plain.iter().map(|plain| ("plain NBD", None, plain.measured_s));
        let runs = self.runs.iter().map(|run| (run.name.word(), run.predicted, run.measured_s));
        plain.chain(runs).collect()
    }

    /// What happened, for a title.
    pub fn title(&self) -> &'static str {
        let vm_moved = self.runs.iter().any(|run| !run.migrations.is_empty());
        let data_came = self.runs.iter().any(Run::data_came);
        match (vm_moved, data_came) {
            (true, true) => "A running VM moves to its data, or its data to the VM",
            (true, false) => "A running VM moves to its data",
            (false, true) => "The data of a running VM come to it",
            (false, false) => "A VM near its data, and far from them",
        }
    }

    /// The faults, in sentences; empty when the demo is right. Speed is judged in [`Self::out_of_order`] only.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let (Some(plain), 5) = (&self.plain, self.runs.len()) else {
            return vec!["not all six runs took place".to_owned()];
        };
        if self.runs.iter().any(|run| run.answers_sha256 != plain.answers_sha256) {
            faults.push("the runs gave different answers".to_owned());
        }
        if !self.answers_checked {
            faults.push("the answers are not those that SQLite finds".to_owned());
        }
        for run in &self.runs {
            let word = run.name.word();
            let may_change = !matches!(run.name, RunName::Remote | RunName::Beside);
            // With a replica at its host a VM has little to gain.
            let must_change = matches!(run.name, RunName::Planned | RunName::Large);
            match run.migrations.first() {
                Some(_) if !may_change => {
                    faults.push(format!("the run {word} migrated although it may not"));
                }
                Some(first) if first.job_progress.is_some_and(|p| p >= 1.0) => {
                    faults.push(format!("the VM of the run {word} was migrated only when its work was done"));
                }
                None if must_change && !run.data_came() => faults.push(format!(
                    "in the run {word} the planner did not migrate the VM, nor did it bring the data to it"
                )),
                _ => {}
            }
        }
        if !self.left_behind.is_empty() {
            faults.push(format!("the lab left something behind: {}", self.left_behind.join(", ")));
        }
        faults
    }

    /// The bars are in the order of [`ORDER_WORDS`], however busy the machine is. If they are not, sentences that say
    /// which one is not, and where its time went.
    pub fn out_of_order(&self) -> Vec<String> {
        let (Some(plain), Some(remote)) = (&self.plain, self.run(RunName::Remote)) else {
            return Vec::new();
        };
        let mut told = Vec::new();
        if plain.measured_s <= remote.measured_s {
            told.push(format!(
                "The run without Perigee ({:.1} s) was not longer than the run remote ({:.1} s).",
                plain.measured_s, remote.measured_s
            ));
        }
        for run in self.runs.iter().filter(|run| run.name != RunName::Remote) {
            if run.measured_s >= remote.measured_s {
                let went =
                    run.migrations.first().map_or_else(String::new, |m| where_it_went(run, m));
                told.push(format!(
                    "The run {} ({:.1} s) was not shorter than the run remote ({:.1} s){went}.",
                    run.name.word(),
                    run.measured_s,
                    remote.measured_s
                ));
            }
        }
        told
    }
}

/// The order of the bars.
pub const ORDER_WORDS: &str =
    "Without Perigee the job takes longest, then comes the run remote; every other run is shorter.";

/// The time before, in and after the migration, and the migration's longest phase.
fn where_it_went(run: &Run, migration: &Move) -> String {
    let seconds = |ms: u64| Duration::from_millis(ms).as_secs_f64();
    let before_s = seconds(migration.started_ms.saturating_sub(run.started_ms));
    let total_s = seconds(migration.total_ms);
    let after_s = (run.measured_s - before_s - total_s).max(0.0);
    let longest = migration.phases.parts().into_iter().max_by_key(|part| part.duration_us);
    let longest = longest.map_or_else(String::new, |part| {
        let part_s = Duration::from_micros(part.duration_us).as_secs_f64();
        format!(" (most of it, {part_s:.1} s, in its phase {:?})", part.name)
    });
    format!(
        ": {before_s:.1} s went by before its migration began, {total_s:.1} s in the migration{longest} and {after_s:.1} s after it"
    )
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use perigee_model::phases::{CopyRound, Pause, Prepare};
    use perigee_model::plan::{Basis, PlanOption, Seconds};
    use perigee_model::volume::IoStats;

    fn host(name: &str) -> HostId {
        HostId::new(name).expect("a name")
    }

    fn option(way: Way, start: &str, end: &str, total_s: f64, chosen: bool) -> PlanOption {
        PlanOption {
            way,
            start: host(start),
            end: host(end),
            predicted: Seconds {
                total_s,
                boot_s: 12.0,
                cpu_s: total_s - 12.0,
                ..Seconds::default()
            },
            total: Estimate { expected_s: total_s, low_s: total_s * 0.8, high_s: total_s * 1.3 },
            shipped_bytes: None,
            unknown: Vec::new(),
            longer: None,
            chosen,
            reason: "the earliest end <&>".to_owned(),
            cost: None,
            hosts: Vec::new(),
            end_hosts: Vec::new(),
        }
    }

    fn samples(seconds: u32, moved_at: u32, to: &str, from: &str) -> Vec<Sample> {
        let sample = |second: u32| {
            let near = second.saturating_sub(moved_at);
            Sample {
                at_ms: 1_000_000 + u64::from(second) * 1000,
                host: host(if second >= moved_at { to } else { from }),
                progress: (second > 12).then(|| f64::from(second - 12) / f64::from(seconds - 12)),
                io: IoStats {
                    read_bytes: (u64::from(second - near) * 3 + u64::from(near) * 9) << 20,
                    ..IoStats::default()
                },
                vcpu_ms: u64::from(second) * 700,
            }
        };
        (0..=seconds).map(sample).collect()
    }

    fn run(name: RunName, seconds: u32, moved_at: u32, from: &str, to: &str) -> Run {
        let measured_s = f64::from(seconds);
        Run {
            name,
            job: JobId::new("tpch-0001").expect("a name"),
            predicted: Some(Estimate {
                expected_s: measured_s * 0.9,
                low_s: measured_s * 0.7,
                high_s: measured_s * 1.2,
            }),
            measured_s,
            answers_sha256: "aa".repeat(32),
            migrations: Vec::new(),
            plan: Plan {
                basis: Basis::History,
                options: vec![
                    option(Way::Migrate, "home1", "cloud1", 41.0, true),
                    option(Way::Remote, "home1", "home1", 78.0, false),
                ],
                figures: vec!["RTT home1-cloud1 16.2 ms".to_owned()],
                moves: true,
            },
            decisions: Vec::new(),
            samples: samples(seconds, moved_at, to, from),
            started_ms: 1_000_000,
            running_ms: Some(1_012_000),
        }
    }

    fn phases() -> Phases {
        let round = |number, duration_ms, mib: u64| CopyRound {
            first: number,
            last: number,
            duration_ms,
            bytes: mib << 20,
            dirty_bytes_per_s: 3 << 20,
        };
        Phases {
            prepare: Some(Prepare { epochs_ms: 40, attach_ms: 60, qemu_ms: 700, begin_ms: 50 }),
            rounds: vec![round(1, 1700, 150), round(2, 170, 10)],
            pause: Some(Pause { epochs_us: 17_000, arrival_us: 90_000, ..Pause::default() }),
        }
    }

    /// An outcome as a good demo has it.
    pub fn good() -> Outcome {
        let mut planned = run(RunName::Planned, 40, 99, "home1", "cloud1");
        planned.decisions = vec![Decision {
            job: planned.job.clone(),
            at_ms: 1_014_500,
            trigger: Trigger::TimeLost,
            plan: Plan {
                basis: Basis::Running,
                options: vec![option(Way::Copy, "home1", "home1", 20.0, true)],
                figures: Vec::new(),
                moves: true,
            },
            summary: "copying them costs 2.0 s".to_owned(),
            outcome: String::new(),
            measured_s: None,
            measured: None,
        }];
        let mut large = run(RunName::Large, 42, 22, "home1", "cloud1");
        large.migrations.push(Move {
            from: host("home1"),
            to: host("cloud1"),
            reason: "6.1 s lost to the network reached the predicted 5.9 s of a move".to_owned(),
            predicted_total_ms: Some(3100),
            total_ms: 2900,
            downtime_ms: 180,
            bytes: 160 << 20,
            job_progress: Some(0.17),
            started_ms: 1_019_000,
            ended_ms: Some(1_021_900),
            phases: phases(),
        });
        Outcome {
            rtt_ms: 16.0,
            rate: "200Mbit".to_owned(),
            scale_factor: 0.1,
            table_bytes: 92 << 20,
            archive_bytes: 512 << 20,
            data_home: host("cloud1"),
            queries: vec!["Q6".to_owned(), "Q14".to_owned()],
            answers_checked: true,
            plain: Some(Plain { measured_s: 95.0, answers_sha256: "aa".repeat(32) }),
            runs: vec![
                run(RunName::Remote, 80, 99, "home1", "cloud1"),
                planned,
                large,
                run(RunName::Replica, 36, 99, "home1", "cloud1"),
                run(RunName::Beside, 35, 0, "cloud1", "cloud1"),
            ],
            links: Vec::new(),
            versions: BTreeMap::from([("qemu".to_owned(), "7.2.22".to_owned())]),
            left_behind: Vec::new(),
        }
    }

    #[test]
    fn a_good_outcome_has_no_faults() {
        assert_eq!(good().faults(), Vec::<String>::new());
    }

    #[test]
    fn a_run_beyond_its_range_is_told() {
        let mut outcome = good();
        assert_eq!(outcome.runs[0].in_range(), Some(true));
        outcome.runs[0].measured_s *= 3.0;
        assert_eq!(outcome.runs[0].in_range(), Some(false));
        outcome.runs[0].predicted = None;
        assert_eq!(outcome.runs[0].in_range(), None);
    }

    #[test]
    fn each_claim_that_fails_is_told() {
        let told = |change: fn(&mut Outcome), word: &str| {
            let mut outcome = good();
            change(&mut outcome);
            let faults = outcome.faults();
            assert!(faults.len() == 1 && faults[0].contains(word), "{faults:?} must say {word:?}");
        };
        told(|o| o.runs[1].answers_sha256 = "bb".to_owned(), "different answers");
        told(|o| o.answers_checked = false, "SQLite");
        told(|o| o.runs[0].migrations = o.runs[2].migrations.clone(), "may not");
        told(|o| o.runs[1].decisions.clear(), "did not migrate");
        told(|o| o.runs[1].decisions[0].outcome = "it failed".to_owned(), "did not migrate");
        told(|o| o.runs[2].migrations.clear(), "did not migrate");
        told(|o| o.runs[2].migrations[0].job_progress = Some(1.0), "only when its work was done");
        told(|o| o.left_behind.push("process 7".to_owned()), "process 7");
        told(|o| drop(o.runs.pop()), "six runs");
        told(|o| o.plain = None, "six runs");
    }

    #[test]
    fn the_title_says_only_what_happened() {
        let mut outcome = good();
        assert_eq!(outcome.title(), "A running VM moves to its data, or its data to the VM");
        outcome.runs[1].decisions.clear();
        assert_eq!(outcome.title(), "A running VM moves to its data");
        outcome.runs[2].migrations.clear();
        assert!(!outcome.title().contains("moves"), "{}", outcome.title());
    }

    #[test]
    fn the_first_bar_is_the_run_without_perigee() {
        let names: Vec<&str> = good().bars().iter().map(|(name, ..)| *name).collect();
        assert_eq!(names, ["plain NBD", "remote", "planned", "large", "replica", "beside"]);
    }

    #[test]
    fn each_run_says_why_it_went_so() {
        let outcome = good();
        let why = |name| outcome.run(name).expect("the run").why();
        assert_eq!(why(RunName::Planned), "14.5 s after the VM's start: copying them costs 2.0 s.");
        assert!(why(RunName::Remote).starts_with("The job file"), "{}", why(RunName::Remote));
    }

    #[test]
    fn a_slow_demo_is_right_and_says_where_its_time_went() {
        assert_eq!(good().out_of_order(), Vec::<String>::new());
        let mut slow = good();
        slow.runs[2].measured_s = 85.0;
        slow.runs[2].migrations[0].total_ms = 10_400;
        assert_eq!(slow.faults(), Vec::<String>::new());
        let told = slow.out_of_order().join(" ");
        for words in [
            "85.0 s",
            "19.0 s went by before",
            "10.4 s in the migration",
            "1.7 s, in its phase \"copy 1\"",
            "55.6 s after",
        ] {
            assert!(told.contains(words), "{told:?} must say {words:?}");
        }
        slow.plain = Some(Plain { measured_s: 70.0, answers_sha256: String::new() });
        assert!(slow.out_of_order()[0].contains("without Perigee (70.0 s)"));
    }

    #[test]
    fn the_result_tells_where_a_migrations_time_went() {
        let json = serde_json::to_value(good()).expect("JSON");
        let phases = &json["runs"][2]["migrations"][0]["phases"];
        assert_eq!(phases["prepare"]["qemu_ms"], 700);
        assert_eq!(phases["rounds"][0]["bytes"], 150 << 20);
        assert_eq!(phases["pause"]["epochs_us"], 17_000);
    }

    #[test]
    fn the_result_has_the_fields_that_others_read() {
        let json = serde_json::to_value(good()).expect("JSON");
        assert_eq!(json["rtt_ms"], 16.0);
        assert_eq!(json["plain"]["measured_s"], 95.0);
        assert_eq!(json["versions"]["qemu"], "7.2.22");
        let names: Vec<_> =
            json["runs"].as_array().expect("runs").iter().map(|r| &r["name"]).collect();
        assert_eq!(names, ["remote", "planned", "large", "replica", "beside"]);
        for field in ["predicted", "measured_s", "answers_sha256", "migrations"] {
            assert!(!json["runs"][2][field].is_null(), "{field}");
        }
        let migration = &json["runs"][2]["migrations"][0];
        for field in ["from", "to", "reason", "total_ms", "downtime_ms", "bytes", "job_progress"] {
            assert!(!migration[field].is_null(), "{field}");
        }
    }
}
