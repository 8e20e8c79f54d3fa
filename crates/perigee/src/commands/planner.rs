//! `perigee planner`

use clap::Subcommand;
use perigee_model::Problem;
use perigee_model::plan::{Score, ScoreOf};

use crate::context::Context;
use crate::output::{self, Column, Format};
use crate::servers::controller_client;

/// `perigee planner VERB`. What stands at a variant and its fields is their help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Show how well the predictions of all jobs came true.
    ///
    /// For each way that was chosen: how often the measured time was in the stated range (the goal
    /// is 9 of 10), how wide the range was, both in one figure, and the median error of the expected time. All are shares
    /// of the measured time. The figure is the interval score: the width, and 20 times how far the time was outside. The
    /// lower, the better. Jobs that failed or were deleted do
    /// not count. The last line is the floor of noise: how much the same job in the same placement
    /// differs from its own mean. No prediction can be better. If jobs with several VMs have ended, a line says the same of them alone. Where jobs or rented hosts cost something, a line each
    /// says the same of what they were predicted to cost, as shares of what was spent; rented hosts are for admins.
    Score,
}

#[derive(serde::Serialize)]
struct Row {
    chosen: String,
    known_from: String,
    jobs: u64,
    /// `None` where nothing was predicted.
    in_range: Option<u64>,
    median_width: Option<f64>,
    interval_score: Option<f64>,
    median_error: Option<f64>,
    /// The error that 9 of 10 do not exceed.
    nine_of_ten: Option<f64>,
}

const SCORES: &[Column<Row>] = &[
    ("chosen", |row| row.chosen.clone()),
    ("work known from", |row| row.known_from.clone()),
    ("jobs", |row| row.jobs.to_string()),
    ("in range", |row| output::or_dash(row.in_range.as_ref())),
    ("median width", |row| percent(row.median_width)),
    ("interval score", |row| percent(row.interval_score)),
    ("median error", |row| percent(row.median_error)),
    ("9 of 10 below", |row| percent(row.nine_of_ten)),
];

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.0} %", share * 100.0))
}

/// Prints the predictions of finished jobs against what the jobs took. JSON and YAML have the shares and errors as
/// numbers of 0 to 1.
pub async fn run(verb: Verb, context: &Context) -> Result<(), Problem> {
    let Verb::Score = verb;
    let score: Score = controller_client(context)?.get("/v1/planner/score").await?;
    match context.format {
        Format::Json | Format::Yaml => output::one(context.format, &score, &[]),
        Format::Table | Format::Csv => output::list(context.format, &rows(&score), SCORES),
    }
}

fn rows(score: &Score) -> Vec<Row> {
    let row = |chosen: String, known_from: String, score: &ScoreOf| Row {
        chosen,
        known_from,
        jobs: score.jobs,
        in_range: Some(score.in_range),
        median_width: score.median_width,
        interval_score: score.interval_score,
        median_error: score.median_error,
        nine_of_ten: score.nine_of_ten,
    };
    let options = score.by_option.iter();
    let mut rows: Vec<Row> =
        options.map(|of| row(output::word(&of.way), output::word(&of.basis), &of.score)).collect();
    rows.push(row("all".to_owned(), String::new(), &score.all));
    for (what, known_from, score) in [
        ("of these: several VMs", "", &score.gangs),
        ("money: jobs", "their plans", &score.money),
        ("money: rented hosts", "the requests", &score.rentals),
    ] {
        if score.jobs > 0 {
            rows.push(row(what.to_owned(), known_from.to_owned(), score));
        }
    }
    rows.push(Row {
        chosen: "noise: the same again".to_owned(),
        known_from: "their own mean".to_owned(),
        jobs: score.noise.map_or(0, |noise| noise.runs),
        in_range: None,
        median_width: None,
        interval_score: None,
        median_error: score.noise.map(|noise| noise.median),
        nine_of_ten: score.noise.map(|noise| noise.nine_of_ten),
    });
    rows
}

#[cfg(test)]
mod tests {
    use perigee_model::plan::Noise;

    use super::*;

    #[test]
    fn the_floor_of_noise_stands_below_the_errors() {
        let mut score = Score::default();
        let noise = |score: &Score| {
            let row = rows(score).pop().expect("a row");
            SCORES.iter().map(|(_, cell)| cell(&row)).skip(2).collect::<Vec<_>>()
        };
        assert_eq!(noise(&score), ["0", "-", "-", "-", "-", "-"], "nothing has run twice");
        score.money = ScoreOf { jobs: 2, in_range: 1, ..ScoreOf::default() };
        let money = rows(&score).into_iter().rev().nth(1).expect("a row");
        assert_eq!((money.chosen.as_str(), money.in_range), ("money: jobs", Some(1)));
        score.gangs = ScoreOf { jobs: 3, in_range: 2, ..ScoreOf::default() };
        let gangs = rows(&score).into_iter().rev().nth(2).expect("a row");
        assert_eq!((gangs.chosen.as_str(), gangs.in_range), ("of these: several VMs", Some(2)));
        score.noise = Some(Noise { runs: 9, median: 0.07, nine_of_ten: 0.24 });
        assert_eq!(noise(&score), ["9", "-", "-", "-", "7 %", "24 %"]);
    }
}
