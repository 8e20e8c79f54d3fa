//! What the planner says: options with predictions, a choice, a reason, and later the measurement.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::budget::MoneyRange;
use crate::money::Money;
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

/// A range of at most this width is shown, whatever is expected.
const HELPS_S: f64 = 60.0;
/// A wider one is shown if it ends at most this many times later than expected.
const HELPS_TIMES: f64 = 10.0;
/// The share of the times that may be outside their ranges.
const OUTSIDE: f64 = 0.1;
/// What is said where [`Estimate::helps`] is not true.
pub const NOT_WELL_KNOWN: &str = "not well known:";

impl Estimate {
    /// Whether a measured time lies in the range.
    pub fn holds(&self, seconds: f64) -> bool {
        (self.low_s..=self.high_s).contains(&seconds)
    }

    /// Whether the range tells more than that it may take any time: it is short, or its end is not far beyond what is expected.
    pub fn helps(&self) -> bool {
        self.high_s - self.low_s <= HELPS_S || self.high_s <= HELPS_TIMES * self.expected_s
    }

    /// As a job's predicted time is shown: `42 s (35..51)`, or where the range does not help only its low end.
    pub fn or_at_least(&self) -> String {
        if self.helps() {
            return self.to_string();
        }
        let decimals = if self.low_s >= 9.95 { 0 } else { 1 };
        format!("at least {:.decimals$} s", self.low_s)
    }

    /// The interval score of the range for a measured time, in seconds: the width of the range, and 20 times how far the
    /// time is outside. The lower, the better; a wide range is as bad as one that is often missed (Gneiting and Raftery:
    /// Strictly proper scoring rules, prediction, and estimation, JASA 2007, equation 43, for a range of 90 %).
    pub fn interval_score_s(&self, seconds: f64) -> f64 {
        interval_score(self.low_s, self.high_s, seconds)
    }

    /// This time and then another one. Both may be as late as they can.
    #[must_use]
    pub fn and_then(self, other: Self) -> Self {
        Self {
            expected_s: self.expected_s + other.expected_s,
            low_s: self.low_s + other.low_s,
            high_s: self.high_s + other.high_s,
        }
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

/// As [`Estimate::interval_score_s`], for a range of anything.
fn interval_score(low: f64, high: f64, truth: f64) -> f64 {
    let outside = (low - truth).max(truth - high).max(0.0);
    (high - low) + 2.0 / OUTSIDE * outside
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
#[schema(as = UnmeasuredPart)]
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
    /// What it would cost; `None` if no host that the plan knows costs anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<OptionCost>,
    /// Of a job with several VMs: where each of them would start, in the order of their ranks. `predicted` has the parts of the slowest one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostId>,
    /// Where each of them ends, if that is another host for one of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub end_hosts: Vec<HostId>,
}

/// What one way to run a job would cost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OptionCost {
    /// What it is made of. What costs nothing is not among them.
    pub items: Vec<CostItem>,
    /// Their sum; `None` if one of them is not known.
    pub total: Option<MoneyRange>,
    /// No other option that is possible is both as soon and as cheap, and better in one of the two.
    pub is_best_trade: bool,
}

/// A part of what a way would cost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CostItem {
    /// What is paid for.
    pub of: CostOf,
    /// To whose price it belongs.
    pub host: HostId,
    /// `None` if it is not known.
    pub cost: Option<MoneyRange>,
    /// What was reckoned, or why it is not known, in plain words.
    pub why: String,
}

/// What is paid for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CostOf {
    /// The host.
    Machine,
    /// The disks of the job's VM.
    Disk,
    /// Bytes that leave the host's site.
    Egress,
}

impl CostOf {
    /// As it is shown.
    pub fn name(self) -> &'static str {
        match self {
            Self::Machine => "machine",
            Self::Disk => "disk",
            Self::Egress => "egress",
        }
    }
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

impl PlanOption {
    /// Whether the job could run so.
    pub fn is_possible(&self) -> bool {
        // What is not possible takes no longer than the chosen one.
        self.chosen || self.longer.is_some()
    }

    /// Where it starts, as it is shown: `home1`, or of several VMs `home1 x2, home2`.
    pub fn starts_at(&self) -> String {
        at_hosts(&self.start, &self.hosts)
    }

    /// The same of where it ends.
    pub fn ends_at(&self) -> String {
        let ends = if self.end_hosts.is_empty() { &self.hosts } else { &self.end_hosts };
        at_hosts(&self.end, ends)
    }
}

/// Each host once, with how many of the VMs are there.
fn at_hosts(first: &HostId, all: &[HostId]) -> String {
    let mut counts: Vec<(&HostId, usize)> = Vec::new();
    for host in all {
        match counts.iter_mut().find(|(other, _)| *other == host) {
            Some((_, count)) => *count += 1,
            None => counts.push((host, 1)),
        }
    }
    if counts.is_empty() {
        return first.to_string();
    }
    let each = counts.into_iter().map(|(host, count)| match count {
        1 => host.to_string(),
        _ => format!("{host} x{count}"),
    });
    each.collect::<Vec<_>>().join(", ")
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
    /// The host where it is, is drained.
    Drained,
    /// The host where it is, is overloaded.
    Balanced,
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
    /// Those of them that had several VMs.
    #[serde(default)]
    pub gangs: ScoreOf,
    /// How much equal runs differ: no prediction can be better. `None` if no job has run twice in one placement.
    pub noise: Option<Noise>,
    /// Of what the jobs that cost something were predicted to cost, against what was spent. Jobs that began anew do not count.
    pub money: ScoreOf,
    /// The same of rented hosts that are over, as they were predicted when they were asked for. Only admins are told.
    pub rentals: ScoreOf,
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

/// How well some predictions came true: of the time of jobs, or of money, where what was spent stands for the measured time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ScoreOf {
    /// Jobs that succeeded, or hosts that were given back.
    pub jobs: u64,
    /// Those of them whose time was in the stated range; the goal is 9 of 10.
    pub in_range: u64,
    /// Of the differences between expected and measured time, as shares of the measured one. None
    /// without jobs.
    pub median_error: Option<f64>,
    /// The widths of the ranges as shares of the measured times, in the median. None without jobs.
    pub median_width: Option<f64>,
    /// The mean of [`Estimate::interval_score_s`] as a share of the measured time: wide ranges count as bad ones. None
    /// without jobs.
    pub interval_score: Option<f64>,
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

/// How the prediction of one job came true. Errors and widths are shares of the measured time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CameTrue {
    /// Whether the measured time was in the range.
    pub in_range: bool,
    /// Of the expected time, without its sign.
    pub error: f64,
    /// Of the range.
    pub width: f64,
    /// [`Estimate::interval_score_s`].
    pub interval_score: f64,
}

impl Decision {
    /// How the decision with which a job began came true, if the job has ended well. Others have no result.
    #[must_use]
    pub fn came_true(&self) -> Option<CameTrue> {
        let (option, measured_s) = (self.plan.chosen()?, self.measured_s?);
        let counts = self.trigger == Trigger::Submitted && self.measured.is_some();
        if !counts || measured_s <= 0.0 || option.total == Estimate::default() {
            return None;
        }
        let total = option.total;
        Some(CameTrue::of([total.expected_s, total.low_s, total.high_s], measured_s))
    }
}

impl CameTrue {
    /// Of what was expected, the ends of its range, and what it came to, which is above 0.
    fn of([expected, low, high]: [f64; 3], truth: f64) -> Self {
        Self {
            in_range: (low..=high).contains(&truth),
            error: (expected / truth - 1.0).abs(),
            width: (high - low) / truth,
            interval_score: interval_score(low, high, truth) / truth,
        }
    }
}

impl Score {
    /// Of the decisions with which jobs began that have ended well; the others do not count.
    pub fn of(decisions: &[Decision]) -> Self {
        let (mut all, mut gangs) = (Vec::new(), Vec::new());
        let mut by_option: Vec<(Way, Basis, Vec<CameTrue>)> = Vec::new();
        for decision in decisions {
            let (Some(option), Some(result)) = (decision.plan.chosen(), decision.came_true())
            else {
                continue;
            };
            all.push(result);
            if option.hosts.len() > 1 {
                gangs.push(result);
            }
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
        let by_option = by_option.collect();
        let (all, gangs) = (ScoreOf::results(all), ScoreOf::results(gangs));
        Self { by_option, all, gangs, ..Self::default() }
    }
}

impl ScoreOf {
    /// Of amounts that were predicted, each with what was spent. What cost nothing, or was not to cost anything, does not count.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "amounts of money")]
    pub fn of_money(amounts: impl IntoIterator<Item = (MoneyRange, Money)>) -> Self {
        let counts = amounts
            .into_iter()
            .filter(|(predicted, spent)| predicted.high > Money::ZERO && *spent > Money::ZERO);
        let results = counts.map(|(predicted, spent)| {
            let MoneyRange { expected, low, high } = predicted;
            let [expected, low, high, spent] =
                [expected, low, high, spent].map(|money| money.micros as f64);
            CameTrue::of([expected, low, high], spent)
        });
        Self::results(results.collect())
    }

    #[expect(clippy::cast_precision_loss, reason = "a number of jobs")]
    fn results(results: Vec<CameTrue>) -> Self {
        let sorted = |of: fn(&CameTrue) -> f64| {
            let mut values: Vec<f64> = results.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values
        };
        let (errors, widths) = (sorted(|job| job.error), sorted(|job| job.width));
        let scores: f64 = results.iter().map(|job| job.interval_score).sum();
        Self {
            jobs: results.len() as u64,
            in_range: results.iter().filter(|job| job.in_range).count() as u64,
            median_error: errors.get(errors.len() / 2).copied(),
            median_width: widths.get(widths.len() / 2).copied(),
            interval_score: (!results.is_empty()).then(|| scores / results.len() as f64),
            nine_of_ten: errors.get(errors.len() * 9 / 10).copied(),
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
            cost: None,
            hosts: Vec::new(),
            end_hosts: Vec::new(),
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
        // Ranges of 5 s for times of 10, 8 and 20 s, and the last one is 7 s outside.
        assert_eq!(score.all.median_width, Some(0.5));
        let scores = [5.0 / 10.0, 5.0 / 8.0, (5.0 + 20.0 * 7.0) / 20.0];
        let mean = scores.iter().sum::<f64>() / 3.0;
        assert!((score.all.interval_score.expect("a score") - mean).abs() < 1e-9);
        assert_eq!(score.by_option.len(), 1);
        assert_eq!(score.by_option[0].score, score.all);
        assert_eq!(score.gangs, ScoreOf::default());
        decisions[1].plan.options[0].hosts = vec![HostId::new("home1").expect("a name"); 2];
        let gangs = Score::of(&decisions).gangs;
        assert_eq!((gangs.jobs, gangs.median_error), (1, Some(0.25)), "it counts among all too");
        decisions[0].plan.basis = Basis::OnePass;
        assert_eq!(Score::of(&decisions).by_option.len(), 2);
        assert_eq!(Score::of(&[]).all, ScoreOf::default());
    }

    #[test]
    fn money_is_scored_as_seconds_are() {
        let range = |expected, low, high| {
            let [expected, low, high] = [expected, low, high].map(Money::from_micros);
            MoneyRange { expected, low, high }
        };
        let spent = Money::from_micros;
        let score = ScoreOf::of_money([
            (range(10, 8, 13), spent(10)),
            (range(10, 8, 13), spent(20)),
            (range(0, 0, 0), spent(5)),
            (range(10, 8, 13), spent(0)),
        ]);
        let mean = (5.0 / 10.0 + (5.0 + 20.0 * 7.0) / 20.0) / 2.0;
        assert_eq!((score.jobs, score.in_range, score.median_error), (2, 1, Some(0.5)));
        assert_eq!((score.median_width, score.interval_score), (Some(0.5), Some(mean)));
        assert_eq!(ScoreOf::of_money([]), ScoreOf::default());
    }

    #[test]
    fn the_hosts_of_several_vms_are_shown_each_once() {
        let mut plan = decision(Trigger::Submitted, None).plan;
        let option = &mut plan.options[0];
        assert_eq!((option.starts_at(), option.ends_at()), ("home1".into(), "home1".into()));
        let hosts =
            |names: &[&str]| names.iter().map(|n| HostId::new(*n).expect("a name")).collect();
        option.hosts = hosts(&["home1", "home2", "home1"]);
        assert_eq!(option.starts_at(), "home1 x2, home2");
        assert_eq!(option.ends_at(), option.starts_at());
        option.end_hosts = hosts(&["cloud1", "cloud1", "cloud1"]);
        assert_eq!(option.ends_at(), "cloud1 x3");
    }

    /// `2..1621` was shown, which tells nobody anything.
    #[test]
    fn a_range_is_shown_as_long_as_it_helps() {
        let shown =
            |expected_s, low_s, high_s| Estimate { expected_s, low_s, high_s }.or_at_least();
        assert_eq!(shown(16.0, 2.0, 1621.0), "at least 2.0 s");
        assert_eq!(shown(50.0, 19.0, 811.0), "at least 19 s");
        assert_eq!(shown(42.0, 35.0, 51.0), "42 s (35..51)");
        assert_eq!(shown(1.0, 0.1, 40.0), "1 s (0..40)");
        assert_eq!(shown(300.0, 100.0, 2000.0), "300 s (100..2000)");
    }

    #[test]
    fn a_wide_range_is_as_bad_as_one_that_is_missed() {
        let range = |low_s, high_s| Estimate { expected_s: 10.0, low_s, high_s };
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} is not {b}");
        close(range(8.0, 13.0).interval_score_s(10.0), 5.0);
        close(range(8.0, 13.0).interval_score_s(14.0), 25.0);
        close(range(8.0, 13.0).interval_score_s(7.5), 15.0);
        close(range(1.0, 1001.0).interval_score_s(10.0), 1000.0);
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
