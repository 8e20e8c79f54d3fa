//! What the planner says: options with predictions, a choice, a reason, and later the measurement.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{HostId, JobId};

/// How a job gets to its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// The VM stays where it starts and reads over the network.
    Remote,
    /// The VM starts there and is migrated live to its data.
    Migrate,
    /// As `migrate`, and then the VM's own disks come after it.
    Follow,
    /// The VM stays where it starts, and its data volumes come there while it runs.
    Copy,
    /// The VM starts at a host with replicas of its data, and reads only what has changed since from their homes.
    Replica,
    /// The VM starts beside its data.
    Beside,
}

/// A predicted time. The truth is meant to be between `low_s` and `high_s` 9 times of 10.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Estimate {
    /// The most likely time.
    pub expected_s: f64,
    /// The shortest time that is expected.
    pub low_s: f64,
    /// The longest time that is expected.
    pub high_s: f64,
}

impl Estimate {
    /// Whether a measured time lies in the range.
    pub fn holds(&self, seconds: f64) -> bool {
        (self.low_s..=self.high_s).contains(&seconds)
    }

    /// What is left of this time when `seconds` have passed. Once all that was expected has passed, only the rest of
    /// the range is known, and its middle is expected.
    pub fn after(&self, seconds: f64) -> Self {
        let left = |s: f64| (s - seconds).max(0.0);
        let (expected_s, low_s, high_s) =
            (left(self.expected_s), left(self.low_s), left(self.high_s));
        let expected_s = if expected_s > 0.0 { expected_s } else { high_s / 2.0 };
        Self { expected_s, low_s, high_s }
    }
}

impl fmt::Display for Estimate {
    /// `42 s (35..51)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let decimals = if self.high_s.abs() >= 9.95 { 0 } else { 1 };
        let (low, high) = (self.low_s, self.high_s);
        write!(f, "{:.decimals$} s ({low:.decimals$}..{high:.decimals$})", self.expected_s)
    }
}

/// When a running job's command is predicted to end, as its figures of this moment say.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PredictedEnd {
    /// The seconds until then, if its VM and its data stay where they are, or where a migration takes the VM; `None` if
    /// that is not known.
    pub left: Option<Estimate>,
    /// What they are predicted from, or why they are not known, in plain words.
    pub why: String,
}

impl fmt::Display for PredictedEnd {
    /// `in 42 s (35..51), from its earlier runs`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.left {
            Some(left) => write!(f, "in {left}, {}", self.why),
            None => write!(f, "not known: {}", self.why),
        }
    }
}

/// A part of a job's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// From VM start to the command's start.
    Boot,
    /// vCPU time of the command.
    Cpu,
    /// Waiting for blocks as if they were local.
    LocalIo,
    /// Waiting for the network on top of that.
    Network,
    /// Waiting for anything else.
    Other,
    /// Slow-down and pause by the migration.
    Migration,
}

impl Part {
    /// Every part, in the order in which they are shown.
    pub const ALL: [Self; 6] =
        [Self::Boot, Self::Cpu, Self::LocalIo, Self::Network, Self::Other, Self::Migration];

    /// As it is shown.
    pub fn name(self) -> &'static str {
        match self {
            Self::Boot => "boot",
            Self::Cpu => "CPU",
            Self::LocalIo => "local I/O",
            Self::Network => "network",
            Self::Other => "other",
            Self::Migration => "migration",
        }
    }
}

/// A part that nothing was measured of yet: its seconds are a guess, and the range is wide.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Unknown {
    /// The part that is guessed.
    pub part: Part,
    /// What would have to be measured, in plain words.
    pub why: String,
}

/// Where a time's seconds go. They add up to `total_s`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Seconds {
    /// From VM start to the command's start.
    pub boot_s: f64,
    /// vCPU time of the command.
    pub cpu_s: f64,
    /// Waiting for blocks as if they were local.
    pub local_io_s: f64,
    /// Waiting for the network on top of that.
    pub network_s: f64,
    /// Waiting for anything else, as in the measured runs: the root disk, timers, the host's CPU.
    pub other_s: f64,
    /// Slow-down and pause by the migration.
    pub migration_s: f64,
    /// From VM start to the command's end: the sum of the others.
    pub total_s: f64,
}

impl Seconds {
    /// One part's seconds.
    pub fn of(&self, part: Part) -> f64 {
        match part {
            Part::Boot => self.boot_s,
            Part::Cpu => self.cpu_s,
            Part::LocalIo => self.local_io_s,
            Part::Network => self.network_s,
            Part::Other => self.other_s,
            Part::Migration => self.migration_s,
        }
    }

    /// The same for a part of the work.
    #[must_use]
    pub fn times(self, share: f64) -> Self {
        Self {
            boot_s: self.boot_s * share,
            cpu_s: self.cpu_s * share,
            local_io_s: self.local_io_s * share,
            network_s: self.network_s * share,
            other_s: self.other_s * share,
            migration_s: self.migration_s * share,
            total_s: self.total_s * share,
        }
    }

    /// With the sum of the parts as its total.
    #[must_use]
    pub fn added_up(self) -> Self {
        Self { total_s: Part::ALL.iter().map(|part| self.of(*part)).sum(), ..self }
    }
}

/// One way to run the job, with its prediction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlanOption {
    /// How the job would get to its data.
    pub way: Way,
    /// Where the VM would start.
    pub start: HostId,
    /// Where the VM ends: the same host, but for `migrate`.
    pub end: HostId,
    /// The expected seconds, part by part.
    pub predicted: Seconds,
    /// Their sum, and how far from it the truth may be.
    pub total: Estimate,
    /// The bytes that it would send between hosts; `None` if that is not known.
    pub shipped_bytes: Option<u64>,
    /// Parts of it that are guessed.
    pub unknown: Vec<Unknown>,
    /// How much longer it takes than the chosen option. What both have in common cancels out, so
    /// this is known better than either total. None for the chosen one.
    pub longer: Option<Estimate>,
    /// At most one option of a plan is.
    pub chosen: bool,
    /// Why it was chosen, or why not.
    pub reason: String,
}

/// What a prediction of the job's work rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// Earlier runs of the same job, measured.
    History,
    /// No such job has run: one pass over the data its volumes hold; its CPU time is not known.
    OnePass,
    /// This job's own figures while it runs.
    Running,
}

/// All that the planner weighed for one decision.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Plan {
    /// Where what it knows of the job's work comes from.
    pub basis: Basis,
    /// The best first.
    pub options: Vec<PlanOption>,
    /// The measurements used, in plain words with units ("RTT home1-cloud1 16.2 ms").
    pub figures: Vec<String>,
    /// Whether the chosen option moves a running VM or places it away from where it would start.
    pub moves: bool,
}

impl Plan {
    /// The option that was chosen; `None` where a person decided.
    pub fn chosen(&self) -> Option<&PlanOption> {
        self.options.iter().find(|option| option.chosen)
    }
}

/// Why the planner was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Trigger {
    /// The job waits for a host to start at.
    Submitted,
    /// The ski-rental rule: time lost to the network reached the predicted cost of moving.
    TimeLost,
    /// A person asked (`vm move`).
    Asked,
}

/// One decision. Of each job the first one and the last 100 are kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Decision {
    /// The job that was decided on.
    pub job: JobId,
    /// Unix time of the controller.
    pub at_ms: u64,
    /// Why the planner was asked.
    pub trigger: Trigger,
    /// What it weighed; empty where a person decided.
    pub plan: Plan,
    /// The choice and its reason in one sentence.
    pub summary: String,
    /// What of it was not carried out, and why; empty if nothing is known of that kind.
    pub outcome: String,
    /// Filled in when the job or the migration has ended.
    pub measured_s: Option<f64>,
    /// Where the whole job's time went; of a job that succeeded, once it has ended.
    pub measured: Option<Seconds>,
}

/// How well the predictions with which jobs began came true.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Score {
    /// All of them together.
    pub all: ScoreOf,
    /// By what was chosen, and what the prediction rested on.
    pub by_option: Vec<ScoreOfOption>,
    /// How much equal runs differ: no prediction can be better. `None` if no job has run twice in one placement.
    pub noise: Option<Noise>,
}

/// How much runs of the same job in the same placement differ from their own mean, as shares of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Noise {
    /// Runs that were compared.
    pub runs: u64,
    /// Half of them differ by at most this share.
    pub median: f64,
    /// 9 of 10 of them differ by at most this share.
    pub nine_of_ten: f64,
}

/// How well some predictions came true.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ScoreOf {
    /// Jobs that succeeded.
    pub jobs: u64,
    /// Jobs of them whose time was in the stated range; the goal is 9 of 10.
    pub in_range: u64,
    /// Of the differences between expected and measured time, as shares of the measured one. None
    /// without jobs.
    pub median_error: Option<f64>,
    /// The difference that 9 of 10 of them do not exceed.
    pub nine_of_ten: Option<f64>,
}

/// The score of the predictions of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ScoreOfOption {
    /// What was chosen.
    pub way: Way,
    /// What the predictions rested on.
    pub basis: Basis,
    /// How well they came true, flat beside the others in JSON.
    #[serde(flatten)]
    pub score: ScoreOf,
}

/// Of one job: whether its time was in the range, and the error.
type CameTrue = (bool, f64);

impl Decision {
    /// For the decision with which a job began that has ended well: whether the measured time was in the stated range, and how
    /// far the expected time was from it, as a share of the measured one. Others have no result.
    #[must_use]
    pub fn came_true(&self) -> Option<(bool, f64)> {
        let (option, measured_s) = (self.plan.chosen()?, self.measured_s?);
        let counts = self.trigger == Trigger::Submitted && self.measured.is_some();
        if !counts || measured_s <= 0.0 || option.total == Estimate::default() {
            return None;
        }
        let error = (option.total.expected_s / measured_s - 1.0).abs();
        Some((option.total.holds(measured_s), error))
    }
}

impl Score {
    /// Of the decisions with which jobs began that have ended well; the others do not count.
    pub fn of(decisions: &[Decision]) -> Self {
        let mut all = Vec::new();
        let mut by_option: Vec<(Way, Basis, Vec<CameTrue>)> = Vec::new();
        for decision in decisions {
            let (Some(option), Some(result)) = (decision.plan.chosen(), decision.came_true())
            else {
                continue;
            };
            all.push(result);
            let kind = (option.way, decision.plan.basis);
            match by_option.iter_mut().find(|(way, basis, _)| (*way, *basis) == kind) {
                Some((_, _, results)) => results.push(result),
                None => by_option.push((kind.0, kind.1, vec![result])),
            }
        }
        let by_option = by_option.into_iter().map(|(way, basis, results)| ScoreOfOption {
            way,
            basis,
            score: ScoreOf::results(results),
        });
        Self { by_option: by_option.collect(), all: ScoreOf::results(all), noise: None }
    }
}

impl ScoreOf {
    fn results(mut results: Vec<CameTrue>) -> Self {
        results.sort_by(|a, b| a.1.total_cmp(&b.1));
        Self {
            jobs: results.len() as u64,
            in_range: results.iter().filter(|(held, _)| *held).count() as u64,
            median_error: results.get(results.len() / 2).map(|(_, error)| *error),
            nine_of_ten: results.get(results.len() * 9 / 10).map(|(_, error)| *error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision(trigger: Trigger, measured_s: Option<f64>) -> Decision {
        let host = HostId::new("home1").expect("a name");
        let option = PlanOption {
            way: Way::Remote,
            start: host.clone(),
            end: host,
            predicted: Seconds::default(),
            total: Estimate { expected_s: 10.0, low_s: 8.0, high_s: 13.0 },
            shipped_bytes: None,
            unknown: Vec::new(),
            longer: None,
            chosen: true,
            reason: String::new(),
        };
        let options = vec![option];
        let (basis, figures) = (Basis::History, Vec::new());
        Decision {
            job: JobId::new("q-0001").expect("a name"),
            at_ms: 0,
            trigger,
            plan: Plan { basis, options, figures, moves: false },
            summary: String::new(),
            outcome: String::new(),
            measured_s,
            measured: measured_s.map(|_| Seconds::default()),
        }
    }

    #[test]
    fn a_predicted_time_becomes_shorter_while_it_passes() {
        let whole = Estimate { expected_s: 10.0, low_s: 8.0, high_s: 14.0 };
        let left = |expected_s, low_s, high_s| Estimate { expected_s, low_s, high_s };
        assert_eq!(whole.after(3.0), left(7.0, 5.0, 11.0));
        assert_eq!(whole.after(9.0), left(1.0, 0.0, 5.0));
        assert_eq!(whole.after(12.0), left(1.0, 0.0, 2.0));
        assert_eq!(whole.after(20.0), left(0.0, 0.0, 0.0));
    }

    #[test]
    fn the_score_counts_jobs_that_ended_well_and_were_predicted() {
        let mut decisions = vec![
            decision(Trigger::Submitted, Some(10.0)),
            decision(Trigger::Submitted, Some(8.0)),
            decision(Trigger::Submitted, Some(20.0)),
            decision(Trigger::Submitted, None),
            decision(Trigger::TimeLost, Some(10.0)),
        ];
        let score = Score::of(&decisions);
        assert_eq!((score.all.jobs, score.all.in_range), (3, 2));
        assert_eq!(score.all.median_error, Some(0.25));
        assert_eq!(score.by_option.len(), 1);
        assert_eq!(score.by_option[0].score, score.all);
        decisions[0].plan.basis = Basis::OnePass;
        assert_eq!(Score::of(&decisions).by_option.len(), 2);
        assert_eq!(Score::of(&[]).all, ScoreOf::default());
    }

    #[test]
    fn an_end_that_is_not_known_is_no_end_in_0_seconds() {
        let left = Some(Estimate { expected_s: 42.0, low_s: 35.0, high_s: 51.0 });
        let known = PredictedEnd { left, why: "from its earlier runs".to_owned() };
        assert_eq!(known.to_string(), "in 42 s (35..51), from its earlier runs");
        let not_known = PredictedEnd { left: None, why: "it is new".to_owned() };
        assert_eq!(not_known.to_string(), "not known: it is new");
    }

    #[test]
    fn an_estimate_is_shown_as_exactly_as_it_is_worth() {
        let shown = |expected_s, low_s, high_s| Estimate { expected_s, low_s, high_s }.to_string();
        assert_eq!(shown(42.34, 34.9, 51.1), "42 s (35..51)");
        assert_eq!(shown(1.26, 0.9, 2.14), "1.3 s (0.9..2.1)");
    }
}
