//! The demo's result: the content of `result.json`, and the checks of it.

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
    pub scale_factor: f64,
    pub table_bytes: u64,
    /// The home of the volume with the tables.
    pub data_home: HostId,
    pub queries: Vec<String>,
    /// Whether SQLite gives the same answers from the same tables.
    pub answers_checked: bool,
    pub runs: Vec<Run>,
    /// The measurements between the hosts.
    pub links: Vec<Link>,
    pub versions: BTreeMap<String, String>,
    /// The parts of the lab that still existed after it was taken down.
    pub left_behind: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunName {
    /// The VM stays on the other side of the WAN.
    Remote,
    /// The job file places the VM beside the data.
    Beside,
    /// The VM starts on the other side of the WAN, and the planner may migrate it.
    Planned,
    /// The same, with a replica of the data there.
    Replica,
}

impl RunName {
    pub fn word(self) -> &'static str {
        match self {
            Self::Remote => "remote",
            Self::Beside => "beside",
            Self::Planned => "planned",
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
        let mut chosen = self.decisions.iter().filter_map(|decision| {
            (decision.trigger == Trigger::TimeLost).then(|| decision.plan.chosen())?
        });
        chosen.any(|option| option.way == Way::Copy)
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

    /// The faults, in sentences; empty when the demo is right. Speed is judged in [`Self::shape`] only.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let Some([remote, beside, planned]) = self.three() else {
            return vec!["not all three runs took place".to_owned()];
        };
        if self.runs.iter().any(|run| run.answers_sha256 != remote.answers_sha256) {
            faults.push("the runs gave different answers".to_owned());
        }
        if !self.answers_checked {
            faults.push("the answers are not those that SQLite finds".to_owned());
        }
        for run in [remote, beside] {
            if !run.migrations.is_empty() {
                faults.push(format!("the run {} migrated although it may not", run.name.word()));
            }
        }
        match planned.migrations.first() {
            // On a thin link the data are the smaller part.
            None if planned.data_came() => {}
            None => faults.push(
                "the planner did not migrate the VM, nor did it bring the data to it".to_owned(),
            ),
            Some(first) if first.job_progress.is_some_and(|p| p >= 1.0) => {
                faults.push("the VM was migrated only when its work was done".to_owned());
            }
            Some(_) => {}
        }
        if !self.left_behind.is_empty() {
            faults.push(format!("the lab left something behind: {}", self.left_behind.join(", ")));
        }
        faults
    }

    /// On an idle machine the planned run takes nearly as long as the one beside the data. If it did
    /// not, a sentence that says where the time went.
    pub fn shape(&self) -> Option<String> {
        let [remote, beside, planned] = self.three()?;
        let to_beside = (planned.measured_s - beside.measured_s).abs();
        let to_remote = (planned.measured_s - remote.measured_s).abs();
        if to_beside < to_remote {
            return None;
        }
        let went =
            planned.migrations.first().map_or_else(String::new, |m| where_it_went(planned, m));
        Some(format!(
            "The planned run ({:.1} s) was not closer to the run beside the data ({:.1} s) than to the remote one ({:.1} s){went}.",
            planned.measured_s, beside.measured_s, remote.measured_s
        ))
    }

    fn three(&self) -> Option<[&Run; 3]> {
        Some([self.run(RunName::Remote)?, self.run(RunName::Beside)?, self.run(RunName::Planned)?])
    }
}

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
        let mut planned = run(RunName::Planned, 42, 22, "home1", "cloud1");
        planned.migrations.push(Move {
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
            scale_factor: 0.1,
            table_bytes: 92 << 20,
            data_home: host("cloud1"),
            queries: vec!["Q6".to_owned(), "Q14".to_owned()],
            answers_checked: true,
            runs: vec![
                run(RunName::Remote, 80, 99, "home1", "cloud1"),
                run(RunName::Beside, 35, 0, "cloud1", "cloud1"),
                planned,
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
        told(|o| o.runs[2].migrations.clear(), "did not migrate");
        told(|o| o.runs[2].migrations[0].job_progress = Some(1.0), "only when its work was done");
        let mut copied = good();
        copied.runs[2].migrations.clear();
        copied.runs[2].decisions = vec![Decision {
            job: copied.runs[2].job.clone(),
            at_ms: 0,
            trigger: Trigger::TimeLost,
            plan: Plan {
                basis: Basis::Running,
                options: vec![option(Way::Copy, "home1", "home1", 20.0, true)],
                figures: Vec::new(),
                moves: true,
            },
            summary: String::new(),
            outcome: String::new(),
            measured_s: None,
            measured: None,
        }];
        assert!(copied.faults().is_empty(), "{:?}", copied.faults());
        told(|o| o.left_behind.push("process 7".to_owned()), "process 7");
        told(|o| drop(o.runs.pop()), "three runs");
    }

    #[test]
    fn a_slow_demo_is_right_and_says_where_its_time_went() {
        assert_eq!(good().shape(), None);
        let mut slow = good();
        slow.runs[2].measured_s = 70.0;
        slow.runs[2].migrations[0].total_ms = 10_400;
        assert_eq!(slow.faults(), Vec::<String>::new());
        let told = slow.shape().expect("a sentence");
        for words in [
            "70.0 s",
            "19.0 s went by before",
            "10.4 s in the migration",
            "1.7 s, in its phase \"copy 1\"",
            "40.6 s after",
        ] {
            assert!(told.contains(words), "{told:?} must say {words:?}");
        }
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
        assert_eq!(json["versions"]["qemu"], "7.2.22");
        let names: Vec<_> =
            json["runs"].as_array().expect("runs").iter().map(|r| &r["name"]).collect();
        assert_eq!(names, ["remote", "beside", "planned"]);
        for field in ["predicted", "measured_s", "answers_sha256", "migrations"] {
            assert!(!json["runs"][2][field].is_null(), "{field}");
        }
        let migration = &json["runs"][2]["migrations"][0];
        for field in ["from", "to", "reason", "total_ms", "downtime_ms", "bytes", "job_progress"] {
            assert!(!migration[field].is_null(), "{field}");
        }
    }
}
