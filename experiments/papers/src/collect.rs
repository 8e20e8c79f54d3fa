//! What the experiments' results say of each figure and table of the papers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use perigee_lab::paper::{Figure, Verdict};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::list::{Item, Kind, PAPERS, Paper};

#[derive(Debug, Serialize)]
pub struct Results {
    /// The version of Perigee that each experiment has measured. `scripts/check-runs` compares them with the experiments' own.
    pub runs: BTreeMap<String, String>,
    pub papers: Vec<PaperRows>,
}

#[derive(Debug, Serialize)]
pub struct PaperRows {
    #[serde(flatten)]
    pub paper: &'static Paper,
    pub rows: Vec<Row>,
}

/// One figure or table, with what is said of it. The judgements of what is the same as another figure are there.
#[derive(Debug, Serialize)]
pub struct Row {
    #[serde(flatten)]
    pub item: &'static Item,
    pub outcome: Outcome,
    pub judgements: Vec<Judgement>,
}

/// All judgements of a figure or table together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Agrees,
    AgreesInPart,
    DoesNotAgree,
    NotJudged,
    NotMeasured,
    /// A drawing, or machines and settings.
    NothingToAgree,
}

impl Outcome {
    pub fn words(self) -> &'static str {
        match self {
            Self::Agrees => "agrees",
            Self::AgreesInPart => "agrees in part",
            Self::DoesNotAgree => "does not agree",
            Self::NotJudged => "not judged",
            Self::NotMeasured => "not measured",
            Self::NothingToAgree => "nothing to agree with",
        }
    }

    /// What is not judged or not measured decides only if there is nothing else.
    pub fn of(verdicts: impl IntoIterator<Item = Verdict>) -> Self {
        let verdicts: Vec<Verdict> = verdicts.into_iter().collect();
        let has = |verdict| verdicts.contains(&verdict);
        match (has(Verdict::Agrees), has(Verdict::DoesNotAgree)) {
            (true, true) => Self::AgreesInPart,
            (true, false) => Self::Agrees,
            (false, true) => Self::DoesNotAgree,
            _ if has(Verdict::NotJudged) || has(Verdict::RangesOverlap) => Self::NotJudged,
            _ => Self::NotMeasured,
        }
    }
}

/// What one experiment says of a figure.
#[derive(Debug, Clone, Serialize)]
pub struct Judgement {
    pub experiment: &'static str,
    /// What of the figure is judged; empty: all of it.
    pub of: String,
    pub ours: String,
    pub verdict: Verdict,
    pub why: Option<String>,
    /// The program that stands in the repository has not measured it.
    pub is_of_earlier_program: bool,
}

/// A figure in the results of an earlier program of `seeds`, which judged the paper 000 alone. The next full run has none.
#[derive(Deserialize)]
struct Earlier {
    figure: String,
    theirs: String,
    ours: String,
    agrees: Option<bool>,
    why: Option<String>,
}

impl From<Earlier> for Figure {
    fn from(Earlier { figure, theirs, ours, agrees, why }: Earlier) -> Self {
        let verdict = match agrees {
            Some(true) => Verdict::Agrees,
            Some(false) => Verdict::DoesNotAgree,
            None => Verdict::NotJudged,
        };
        let figure = format!("000 Fig. {}", figure.replace(" and ", ", 000 Fig. "));
        Self { figure, theirs, ours, verdict, why }
    }
}

/// The run of one experiment.
pub struct Run {
    experiment: &'static str,
    version: Option<String>,
    /// With whether it is of an earlier program.
    figures: Vec<(Figure, bool)>,
}

impl Run {
    /// An experiment without results has no figures.
    fn read(dir: &Path, experiment: &'static str) -> Result<Self> {
        let path = dir.join(experiment).join("results.json");
        let said = match std::fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Value::Null,
            read => serde_json::from_slice(&read.with_context(|| path.display().to_string())?)
                .with_context(|| path.display().to_string())?,
        };
        Self::of(experiment, &said).with_context(|| path.display().to_string())
    }

    /// `said`: a results.json.
    fn of(experiment: &'static str, said: &Value) -> Result<Self> {
        let version = said.pointer("/versions/perigee").and_then(Value::as_str).map(str::to_owned);
        let list = said.get("paper").and_then(Value::as_array).map(Vec::as_slice);
        let mut figures = Vec::new();
        for entry in list.unwrap_or_default() {
            let is_earlier = entry.get("verdict").is_none();
            let figure: Figure = if is_earlier {
                serde_json::from_value::<Earlier>(entry.clone())?.into()
            } else {
                serde_json::from_value(entry.clone())?
            };
            let is_known = PAPERS
                .iter()
                .any(|paper| paper.items.iter().any(|item| names(&figure, &key(paper, item))));
            ensure!(is_known, "“{}” is in no list of a paper (src/list.rs)", figure.figure);
            figures.push((figure, is_earlier));
        }
        Ok(Self { experiment, version, figures })
    }

    /// What it says of a figure: that it has not measured it, if nothing else.
    fn judgements(&self, key: &str) -> Vec<Judgement> {
        let experiment = self.experiment;
        let of_it = self.figures.iter().filter(|(figure, _)| names(figure, key));
        let found: Vec<Judgement> = of_it
            .map(|(figure, is_earlier)| Judgement {
                experiment,
                of: words_after_numbers(figure),
                ours: figure.ours.clone(),
                verdict: figure.verdict,
                why: figure.why.clone(),
                is_of_earlier_program: *is_earlier,
            })
            .collect();
        if !found.is_empty() {
            return found;
        }
        let why = format!("The run of experiments/{experiment} has nothing of it.");
        vec![Judgement {
            experiment,
            of: String::new(),
            ours: String::new(),
            verdict: Verdict::NotMeasured,
            why: Some(why),
            is_of_earlier_program: false,
        }]
    }
}

/// `000 Fig. 5`: as the judgements name it.
fn key(paper: &Paper, item: &Item) -> String {
    format!("{} {}", paper.number, item.number)
}

fn names(figure: &Figure, key: &str) -> bool {
    figure.figure.split(", ").any(|part| part == key)
}

/// What follows the papers' numbers: `both VMs` of `000 Fig. 14, 001 Fig. 7, both VMs`.
fn words_after_numbers(figure: &Figure) -> String {
    let is_number = |part: &&str| {
        let is_of =
            |paper: &Paper| part.strip_prefix(paper.number).is_some_and(|it| it.starts_with(' '));
        PAPERS.iter().any(is_of)
    };
    figure.figure.split(", ").skip_while(is_number).collect::<Vec<_>>().join(", ")
}

impl PaperRows {
    /// How many figures and tables have which outcome.
    pub fn counts(&self) -> BTreeMap<Outcome, usize> {
        let mut counts = BTreeMap::new();
        for row in &self.rows {
            *counts.entry(row.outcome).or_default() += 1;
        }
        counts
    }
}

impl Results {
    /// From the results.json of the experiments in this directory.
    pub fn collect(experiments: &Path) -> Result<Self> {
        let names: BTreeSet<&str> =
            PAPERS.iter().flat_map(|paper| paper.items).flat_map(repeats).collect();
        let runs: Result<Vec<Run>> =
            names.into_iter().map(|name| Run::read(experiments, name)).collect();
        Ok(Self::of(&runs?))
    }

    pub fn of(runs: &[Run]) -> Self {
        let rows = |paper: &'static Paper| PaperRows {
            paper,
            rows: paper.items.iter().map(|item| row(paper, item, runs)).collect(),
        };
        let version = |run: &Run| Some((run.experiment.to_owned(), run.version.clone()?));
        Self {
            runs: runs.iter().filter_map(version).collect(),
            papers: PAPERS.iter().map(rows).collect(),
        }
    }
}

/// The experiments that repeat it.
fn repeats(item: &'static Item) -> Vec<&'static str> {
    match item.kind {
        Kind::Measured { by, .. } => by.to_vec(),
        _ => Vec::new(),
    }
}

/// All that is said of a figure.
fn judgements(key: &str, item: &'static Item, runs: &[Run]) -> Vec<Judgement> {
    let by = repeats(item);
    runs.iter()
        .filter(|run| by.contains(&run.experiment))
        .flat_map(|run| run.judgements(key))
        .collect()
}

fn row(paper: &Paper, item: &'static Item, runs: &[Run]) -> Row {
    let of = |all: &[Judgement]| Outcome::of(all.iter().map(|one| one.verdict));
    let (outcome, judgements) = match item.kind {
        Kind::Drawing(_) | Kind::Setting(_) => (Outcome::NothingToAgree, Vec::new()),
        Kind::Measured { .. } => {
            let all = judgements(&key(paper, item), item, runs);
            (of(&all), all)
        }
        Kind::Same { as_of, .. } => {
            let all = PAPERS.iter().flat_map(|paper| paper.items.iter().map(move |it| (paper, it)));
            let other = all.filter(|(paper, it)| key(paper, it) == as_of);
            let all: Vec<_> = other.flat_map(|(_, it)| judgements(as_of, it, runs)).collect();
            (of(&all), Vec::new())
        }
    };
    Row { item, outcome, judgements }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn outcome(results: &Results, paper: &str, number: &str) -> Outcome {
        let paper = results.papers.iter().find(|it| it.paper.number == paper).expect("a paper");
        paper.rows.iter().find(|row| row.item.number == number).expect("a figure").outcome
    }

    fn run(experiment: &'static str, paper: &Value) -> Run {
        Run::of(experiment, &json!({ "paper": paper })).expect("a run")
    }

    fn judged(figure: &str, verdict: &str) -> Value {
        json!({"figure": figure, "theirs": "", "ours": "", "verdict": verdict, "why": null})
    }

    #[test]
    fn each_figure_and_table_of_the_papers_is_listed_once() {
        let theirs =
            [("000", 15, vec!["I"]), ("001", 12, vec!["1", "2"]), ("002", 4, vec!["1", "2"])];
        let theirs =
            theirs.into_iter().chain([("003", 5, vec!["1", "2", "3"]), ("004", 15, vec!["1"])]);
        for ((number, figures, tables), paper) in theirs.zip(&PAPERS) {
            assert_eq!(number, paper.number);
            let figures = (1..=figures).map(|figure| format!("Fig. {figure}"));
            let wanted: BTreeSet<String> =
                figures.chain(tables.iter().map(|table| format!("Table {table}"))).collect();
            let listed: Vec<&str> = paper.items.iter().map(|item| item.number).collect();
            let listed_once: BTreeSet<&str> = listed.iter().copied().collect();
            assert_eq!(listed.len(), listed_once.len(), "{number}: {listed:?}");
            let of_figures =
                listed_once.iter().filter(|it| it.starts_with("Fig. ") || it.starts_with("Table "));
            assert_eq!(
                of_figures.map(|it| (*it).to_owned()).collect::<BTreeSet<_>>(),
                wanted,
                "{number}"
            );
        }
    }

    #[test]
    fn a_run_without_a_figure_has_not_measured_it() {
        for runs in [vec![run("seeds", &json!([]))], vec![run("seeds", &Value::Null)]] {
            let results = Results::of(&runs);
            assert_eq!(outcome(&results, "000", "Fig. 9"), Outcome::NotMeasured);
            assert_eq!(outcome(&results, "004", "Fig. 6"), Outcome::NotMeasured);
            assert_eq!(outcome(&results, "000", "Fig. 1"), Outcome::NothingToAgree);
        }
    }

    #[test]
    fn a_judgement_counts_for_its_figures_and_for_the_same_ones_of_other_papers() {
        let figures = json!([
            judged("000 Fig. 14, 001 Fig. 7, both VMs", "agrees"),
            judged("000 Fig. 6", "does_not_agree"),
            judged("000 Fig. 6, undilated", "agrees"),
        ]);
        let results = Results::of(&[run("seeds", &figures)]);
        for (paper, number) in [("000", "Fig. 14"), ("001", "Fig. 7"), ("004", "Fig. 11")] {
            assert_eq!(outcome(&results, paper, number), Outcome::Agrees, "{paper} {number}");
        }
        assert_eq!(outcome(&results, "000", "Fig. 6"), Outcome::AgreesInPart);
        let row =
            &results.papers[0].rows.iter().find(|row| row.item.number == "Fig. 14").expect("it");
        assert_eq!(row.judgements[0].of, "both VMs");
    }

    #[test]
    fn what_an_earlier_program_has_judged_is_said_to_be_of_it() {
        let figure = |figure, agrees: Option<bool>| json!({"figure": figure, "theirs": "", "ours": "", "agrees": agrees, "why": null});
        let figures = json!([figure("6", Some(true)), figure("5 and 6, Domain0", None)]);
        let results = Results::of(&[run("seeds", &figures)]);
        assert_eq!(outcome(&results, "000", "Fig. 6"), Outcome::Agrees);
        assert_eq!(outcome(&results, "000", "Fig. 5"), Outcome::NotJudged);
        let judged = results.papers[0].rows.iter().flat_map(|row| &row.judgements);
        let judged: Vec<&Judgement> =
            judged.filter(|one| one.verdict != Verdict::NotMeasured).collect();
        assert_eq!(judged.len(), 3);
        assert!(judged.iter().all(|one| one.is_of_earlier_program));
    }

    #[test]
    fn a_judgement_of_no_listed_figure_is_an_error() {
        let figures = json!([judged("000 Fig. 16", "agrees")]);
        assert!(Run::of("seeds", &json!({ "paper": figures })).is_err());
    }
}
