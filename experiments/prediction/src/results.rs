//! `results.json`: what was predicted, what was measured, and how both compare.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};
use perigee_model::plan::{Estimate, Seconds, Way};
use serde::{Deserialize, Serialize};

use crate::ends::{self, ShownEnd};
use crate::workload::Workload;

/// The key of Perigee's own version.
pub const PERIGEE: &str = "perigee";

/// What the controller knew of the job when it predicted it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Learned {
    /// Nothing: it had never run.
    Nothing,
    /// Runs beside its data.
    Beside,
    /// Runs in all placements, at another round trip.
    All,
}

impl Learned {
    pub const ALL: [Self; 3] = [Self::Nothing, Self::Beside, Self::All];

    pub fn words(self) -> &'static str {
        match self {
            Self::Nothing => "no run",
            Self::Beside => "runs beside the data",
            Self::All => "runs in all placements at another round trip",
        }
    }
}

/// Where a job may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Question {
    Anywhere,
    /// At the site without the data.
    Home,
}

impl Question {
    pub const ALL: [Self; 2] = [Self::Anywhere, Self::Home];

    pub fn words(self) -> &'static str {
        match self {
            Self::Anywhere => "it may start anywhere",
            Self::Home => "it starts away from its data",
        }
    }
}

/// How a run is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Beside the data.
    Beside,
    /// Away from the data, and neither moves.
    Remote,
    /// Away from the data, and the planner may change that while the job runs.
    Auto,
    /// Away from the data, and the VM moves to the data as soon as the job runs.
    Migrate,
    /// Away from the data, and the data moves to the VM as soon as the job runs.
    Copy,
    /// As `migrate`, and the root and output disks come after the VM.
    Follow,
    /// Away from the data, at a site with a replica of it.
    Replica,
}

impl Placement {
    pub const ALL: [Self; 7] = [
        Self::Beside,
        Self::Remote,
        Self::Auto,
        Self::Migrate,
        Self::Copy,
        Self::Follow,
        Self::Replica,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Beside => "beside",
            Self::Remote => "remote",
            Self::Auto => "auto",
            Self::Migrate => "migrate",
            Self::Copy => "copy",
            Self::Follow => "follow",
            Self::Replica => "replica",
        }
    }
}

/// One option of one plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    pub workload: Workload,
    pub learned: Learned,
    /// The round trip at which it was learned.
    pub learned_at_ms: u32,
    /// The round trip that is predicted for.
    pub rtt_ms: u32,
    pub question: Question,
    pub way: Way,
    pub total: Estimate,
    pub parts: Seconds,
    /// The names of the parts that were guessed.
    pub unknown: Vec<String>,
    pub chosen: bool,
    /// The version of Perigee.
    #[serde(default)]
    pub perigee: String,
}

/// One run of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    pub workload: Workload,
    pub rtt_ms: u32,
    pub placement: Placement,
    /// What happened. If the planner was allowed to change the placement, this is what it did.
    pub way: Way,
    pub round: u32,
    /// From the VM's start to the command's end.
    pub total_s: f64,
    pub boot_s: f64,
    pub load_1min: f64,
    /// How long after the command's start the move or the copy began; `None` if there was none.
    #[serde(default)]
    pub change_began_s: Option<f64>,
    /// The ends that the API showed while it ran.
    #[serde(default)]
    pub shown_ends: Vec<ShownEnd>,
    /// The version of Perigee.
    #[serde(default)]
    pub perigee: String,
}

/// How well the ends came true that were shown when this share of the command's time had passed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShownEnds {
    pub at: f64,
    /// The errors are shares of the command's whole time.
    pub score: Score,
    /// In so many runs no end was known then.
    pub unknown: usize,
}

/// A prediction beside its truth.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    pub prediction: Prediction,
    /// The median of the runs.
    pub measured_s: f64,
    /// The error of the expected time, as a share of the measured one.
    pub error: f64,
    /// The width of the range, and the mean interval score of the rounds, as shares of their times.
    pub width: f64,
    pub interval_score: f64,
    /// The rounds whose time was in the range, and all.
    pub in_range: usize,
    pub rounds: usize,
}

/// The comparison of one kind of predictions.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Score {
    pub predictions: usize,
    pub median_error: Option<f64>,
    pub p90_error: Option<f64>,
    /// The share of the measured times that were in the stated range; the goal is 0.9.
    pub in_range: Option<f64>,
    /// Of the ranges, as shares of the measured times.
    pub median_width: Option<f64>,
    /// The mean interval score of the ranges, as a share of the measured times: wide ranges count as bad ones. The lower,
    /// the better.
    pub interval_score: Option<f64>,
}

/// How good the chosen options were.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Choices {
    pub learned: Learned,
    pub question: Question,
    /// Of jobs with several VMs, or of those with one.
    #[serde(default)]
    pub of_gangs: bool,
    pub plans: usize,
    /// The chosen option took at most 10 % longer than the best one that was measured.
    pub good: usize,
    /// The others, in words.
    pub missed: Vec<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Results {
    pub cpus: usize,
    pub versions: BTreeMap<String, String>,
    pub setting: String,
    /// How long the experiment took.
    #[serde(default)]
    pub minutes: u64,
    pub scores: BTreeMap<String, Score>,
    pub choices: Vec<Choices>,
    #[serde(default)]
    pub shown_ends: Vec<ShownEnds>,
    /// How long after a command's start its change began, in the median: when the experiment asked for it, and when the
    /// planner made it.
    #[serde(default)]
    pub asked_began_s: Option<f64>,
    #[serde(default)]
    pub auto_began_s: Option<f64>,
    /// Of runs beside the data, which do not depend on the round trip: how far single runs are from their mean.
    pub floor: Option<f64>,
    pub compared: Vec<Compared>,
    pub runs: Vec<Run>,
    pub predictions: Vec<Prediction>,
}

pub fn way_name(way: Way) -> String {
    let name = serde_json::to_value(way).ok();
    name.and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
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
        let of_predictions = self.predictions.iter_mut().map(|prediction| &mut prediction.perigee);
        for of_row in of_runs.chain(of_predictions).filter(|version| version.is_empty()) {
            of_row.clone_from(present);
        }
    }

    /// The versions of all programs. Rows may have been measured with several versions of Perigee.
    pub fn all_versions(&self) -> BTreeMap<String, String> {
        let distinct: BTreeSet<&str> = self.runs.iter().map(|run| run.perigee.as_str()).collect();
        let mut versions = self.versions.clone();
        if !distinct.is_empty() {
            let distinct = distinct.into_iter().collect::<Vec<_>>().join("; ");
            versions.insert(PERIGEE.to_owned(), distinct);
        }
        versions
    }

    /// Takes the place of what earlier versions have measured in the same case, and of the same round.
    pub fn add_run(&mut self, mut run: Run) {
        run.perigee = self.versions.get(PERIGEE).cloned().unwrap_or_default();
        let case = |run: &Run| (run.workload, run.rtt_ms, run.placement);
        let is_old = |other: &Run| {
            case(other) == case(&run) && (other.perigee != run.perigee || other.round == run.round)
        };
        self.runs.retain(|other| !is_old(other));
        self.runs.push(run);
    }

    /// Takes the place of the same prediction of an earlier run.
    pub fn add_prediction(&mut self, mut prediction: Prediction) {
        prediction.perigee = self.versions.get(PERIGEE).cloned().unwrap_or_default();
        let case =
            |p: &Prediction| (p.workload, p.learned, p.learned_at_ms, p.rtt_ms, p.question, p.way);
        self.predictions.retain(|other| case(other) != case(&prediction));
        self.predictions.push(prediction);
    }

    pub fn write(&mut self, out: &Path) -> Result<()> {
        self.runs.sort_by_key(|run| (run.workload, run.rtt_ms, run.placement, run.round));
        self.predictions
            .sort_by_key(|p| (p.workload, p.learned, p.learned_at_ms, p.rtt_ms, p.question));
        self.compare();
        std::fs::create_dir_all(out)?;
        std::fs::write(out.join("results.json"), serde_json::to_string_pretty(self)? + "\n")?;
        std::fs::write(out.join("report.html"), crate::report::html(self))?;
        Ok(())
    }

    pub fn rtts_ms(&self) -> Vec<u32> {
        let mut rtts: Vec<u32> = self.runs.iter().map(|run| run.rtt_ms).collect();
        rtts.sort_unstable();
        rtts.dedup();
        rtts
    }

    fn times(&self, workload: Workload, rtt_ms: u32, way: Way) -> Vec<f64> {
        let is_it = |run: &&Run| (run.workload, run.rtt_ms, run.way) == (workload, rtt_ms, way);
        self.runs.iter().filter(is_it).map(|run| run.total_s).collect()
    }

    pub fn measured_s(&self, workload: Workload, rtt_ms: u32, way: Way) -> Option<f64> {
        quantile(self.times(workload, rtt_ms, way), 0.5)
    }

    fn compare(&mut self) {
        let mut compared: Vec<Compared> = Vec::new();
        // Both questions predict the same for an option; the second one is only about the choice.
        for prediction in self.predictions.iter().filter(|p| p.question == Question::Anywhere) {
            let times = self.times(prediction.workload, prediction.rtt_ms, prediction.way);
            let Some(measured_s) = quantile(times.clone(), 0.5) else { continue };
            let total = prediction.total;
            let scores: f64 = times.iter().map(|s| total.interval_score_s(*s) / s).sum();
            compared.push(Compared {
                prediction: prediction.clone(),
                measured_s,
                error: total.expected_s / measured_s - 1.0,
                width: (total.high_s - total.low_s) / measured_s,
                interval_score: scores / count(times.len()),
                in_range: times.iter().filter(|s| total.holds(**s)).count(),
                rounds: times.len(),
            });
        }
        self.compared = compared;
        self.scores = self.score();
        self.choices = self.choose();
        let of_share = |at| {
            let ends = self.runs.iter().flat_map(|run| &run.shown_ends);
            let (score, unknown) = ends::score(at, ends);
            ShownEnds { at, score, unknown }
        };
        self.shown_ends = ends::AT.into_iter().map(of_share).collect();
        self.shown_ends.retain(|shown| shown.score.predictions + shown.unknown > 0);
        self.asked_began_s = self.began_s(false);
        self.auto_began_s = self.began_s(true);
        self.floor = self.floor();
    }

    fn score(&self) -> BTreeMap<String, Score> {
        let mut scores = BTreeMap::new();
        let mut add = |name: String, wanted: &dyn Fn(&Prediction) -> bool| {
            let found: Vec<&Compared> =
                self.compared.iter().filter(|c| wanted(&c.prediction)).collect();
            if !found.is_empty() {
                scores.insert(name, Score::of(&found));
            }
        };
        for (learned, of_gangs) in kinds() {
            let from = score_name(learned, of_gangs);
            let is_it = |p: &Prediction| (p.learned, p.workload.is_gang()) == (learned, of_gangs);
            add(from.clone(), &is_it);
            add(format!("{from}: held out"), &|p| is_it(p) && p.workload.is_held_out());
            for way in
                [Way::Remote, Way::Migrate, Way::Follow, Way::Copy, Way::Replica, Way::Beside]
            {
                add(format!("{from}: {}", way_name(way)), &|p| is_it(p) && p.way == way);
            }
        }
        scores
    }

    fn choose(&self) -> Vec<Choices> {
        let mut all = Vec::new();
        for (learned, of_gangs) in kinds() {
            for question in Question::ALL {
                let mut choices =
                    Choices { learned, question, of_gangs, plans: 0, good: 0, missed: Vec::new() };
                let of_kind = |p: &&Prediction| {
                    let kind = (p.learned, p.workload.is_gang(), p.question);
                    kind == (learned, of_gangs, question) && p.chosen
                };
                for chosen in self.predictions.iter().filter(of_kind) {
                    self.judge(chosen, &mut choices);
                }
                if choices.plans > 0 {
                    all.push(choices);
                }
            }
        }
        all
    }

    /// A plan whose chosen way was not measured at that round trip is not judged. There is no replica when a plan is to
    /// choose.
    fn judge(&self, chosen: &Prediction, choices: &mut Choices) {
        let (workload, rtt_ms) = (chosen.workload, chosen.rtt_ms);
        let ways = [Way::Beside, Way::Remote, Way::Migrate, Way::Follow, Way::Copy];
        let possible = ways
            .into_iter()
            .filter(|way| chosen.question == Question::Anywhere || *way != Way::Beside);
        let measured =
            possible.filter_map(|way| Some((way, self.measured_s(workload, rtt_ms, way)?)));
        let best = measured.min_by(|a, b| a.1.total_cmp(&b.1));
        let taken = self.measured_s(workload, rtt_ms, chosen.way);
        let (Some((best_way, best_s)), Some(taken_s)) = (best, taken) else { return };
        choices.plans += 1;
        if taken_s <= best_s * 1.1 {
            choices.good += 1;
        } else {
            choices.missed.push(format!(
                "{} at {rtt_ms} ms: {} took {taken_s:.1} s, {} {best_s:.1} s",
                workload.words(),
                way_name(chosen.way),
                way_name(best_way)
            ));
        }
    }

    fn began_s(&self, auto: bool) -> Option<f64> {
        let of_kind = self.runs.iter().filter(|run| (run.placement == Placement::Auto) == auto);
        quantile(of_kind.filter_map(|run| run.change_began_s).collect(), 0.5)
    }

    fn floor(&self) -> Option<f64> {
        let mut apart = Vec::new();
        for workload in Workload::ALL {
            let is_it = |run: &&Run| run.workload == workload && run.way == Way::Beside;
            let times: Vec<f64> = self.runs.iter().filter(is_it).map(|run| run.total_s).collect();
            let mean = times.iter().sum::<f64>() / count(times.len());
            if times.len() > 1 {
                apart.extend(times.iter().map(|s| (s / mean - 1.0).abs()));
            }
        }
        quantile(apart, 0.5)
    }
}

impl Score {
    fn of(compared: &[&Compared]) -> Self {
        let errors: Vec<f64> = compared.iter().map(|c| c.error.abs()).collect();
        let rounds: usize = compared.iter().map(|c| c.rounds).sum();
        let held: usize = compared.iter().map(|c| c.in_range).sum();
        let scores: f64 = compared.iter().map(|c| c.interval_score * count(c.rounds)).sum();
        Self {
            predictions: compared.len(),
            median_error: quantile(errors.clone(), 0.5),
            p90_error: quantile(errors, 0.9),
            in_range: (rounds > 0).then(|| count(held) / count(rounds)),
            median_width: quantile(compared.iter().map(|c| c.width).collect(), 0.5),
            interval_score: (rounds > 0).then(|| scores / count(rounds)),
        }
    }
}

/// What predictions are learned from, for jobs with one VM and for those with several.
fn kinds() -> impl Iterator<Item = (Learned, bool)> {
    [false, true].into_iter().flat_map(|of_gangs| Learned::ALL.map(|learned| (learned, of_gangs)))
}

/// The name of a score in `results.json`.
pub fn score_name(learned: Learned, of_gangs: bool) -> String {
    let of = if of_gangs { "several VMs, " } else { "" };
    format!("{of}from {}", learned.words())
}

#[expect(clippy::cast_precision_loss, reason = "some hundreds")]
pub fn count(number: usize) -> f64 {
    number as f64
}

/// The value below which this share of the values lies, between the two nearest ones.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an index into the values"
)]
pub fn quantile(mut values: Vec<f64>, share: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let at = count(values.len().checked_sub(1)?) * share;
    let (low, high) = (values[at.floor() as usize], values[at.ceil() as usize]);
    Some(low + (high - low) * at.fract())
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn results() -> Results {
        let mut results = Results::default();
        let run = |way, total_s, round| Run {
            workload: Workload::Merge,
            rtt_ms: 16,
            placement: match way {
                Way::Beside => Placement::Beside,
                Way::Remote => Placement::Auto,
                _ => Placement::Migrate,
            },
            way,
            round,
            total_s,
            boot_s: 4.0,
            load_1min: 1.0,
            change_began_s: (way == Way::Migrate).then_some(0.25),
            shown_ends: vec![ShownEnd { at: 0.5, error: Some(0.1), in_range: true, range: None }],
            perigee: String::new(),
        };
        let times = [(Way::Beside, 10.0), (Way::Remote, 20.0), (Way::Migrate, 14.0)];
        for (round, more_s) in [(1, 0.0), (2, 0.4)] {
            results.runs.extend(times.map(|(way, total_s)| run(way, total_s + more_s, round)));
        }
        let total = |expected_s| Estimate { expected_s, low_s: expected_s - 0.3, high_s: 21.0 };
        for question in Question::ALL {
            for (way, expected_s) in [(Way::Beside, 9.0), (Way::Remote, 20.2), (Way::Migrate, 30.0)]
            {
                results.predictions.push(Prediction {
                    workload: Workload::Merge,
                    learned: Learned::All,
                    learned_at_ms: 4,
                    rtt_ms: 16,
                    question,
                    way,
                    total: total(expected_s),
                    parts: Seconds::default(),
                    unknown: Vec::new(),
                    chosen: way
                        == if question == Question::Home { Way::Remote } else { Way::Beside },
                    perigee: String::new(),
                });
            }
        }
        results.compare();
        results
    }

    #[test]
    fn predictions_are_compared_with_the_median_of_the_rounds() {
        let results = results();
        assert_eq!(results.compared.len(), 3);
        let remote = &results.compared[1];
        assert!((remote.measured_s - 20.2).abs() < 1e-9 && remote.error.abs() < 1e-9);
        assert_eq!((remote.in_range, remote.rounds), (2, 2));
        let score = &results.scores["from runs in all placements at another round trip"];
        assert_eq!(score.predictions, 3);
        assert!((score.in_range.expect("a share") - 4.0 / 6.0).abs() < 1e-9);
        assert!((results.floor.expect("two runs") - 0.2 / 10.2).abs() < 1e-9);
        assert_eq!((results.asked_began_s, results.auto_began_s), (Some(0.25), None));
        let [shown] = results.shown_ends.as_slice() else { panic!("one share of the time") };
        assert_eq!((shown.score.predictions, shown.score.in_range), (6, Some(1.0)));
    }

    /// A run of a part of the cases threw away all the others.
    #[test]
    fn a_run_of_a_part_replaces_only_what_it_measures_anew() {
        let mut results = results();
        results.versions.insert(PERIGEE.to_owned(), "1".to_owned());
        results.note_versions();
        results.versions.insert(PERIGEE.to_owned(), "2".to_owned());
        let is_new = |run: &&Run| run.placement == Placement::Beside;
        let again = results.runs.iter().find(is_new).expect("it was measured").clone();
        for round in [1, 2, 2] {
            results.add_run(Run { round, total_s: 5.0, ..again.clone() });
        }
        let of = |placement| {
            let of_case = results.runs.iter().filter(move |run| run.placement == placement);
            of_case.map(|run| (run.round, run.perigee.as_str())).collect::<Vec<_>>()
        };
        assert_eq!(of(Placement::Beside), [(1, "2"), (2, "2")]);
        assert_eq!(of(Placement::Auto), [(1, "1"), (2, "1")]);
        assert_eq!(results.all_versions()[PERIGEE], "1; 2");
        let (all, first) = (results.predictions.len(), results.predictions[0].clone());
        results.add_prediction(first);
        assert_eq!(results.predictions.len(), all);
        assert_eq!(results.predictions[all - 1].perigee, "2");
    }

    #[test]
    fn a_choice_is_good_within_a_tenth_of_the_best_that_was_possible() {
        let results = results();
        let good: Vec<(usize, usize)> = results.choices.iter().map(|c| (c.good, c.plans)).collect();
        assert_eq!(good, [(1, 1), (0, 1)]);
        assert!(results.choices[1].missed[0].contains("remote took 20.2 s, migrate 14.2 s"));
    }

    #[test]
    fn a_quantile_lies_between_its_neighbours() {
        assert_eq!(quantile(vec![4.0, 1.0, 2.0, 3.0], 0.5), Some(2.5));
        assert_eq!(quantile(vec![1.0, 2.0], 1.0), Some(2.0));
        assert_eq!(quantile(Vec::new(), 0.5), None);
    }
}
