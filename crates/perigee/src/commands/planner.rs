//! `perigee planner`

use clap::Subcommand;
use perigee_model::Problem;
use perigee_model::plan::{Score, ScoreOf};

use crate::Context;
use crate::commands::controller_client;
use crate::output::{self, Column, Format};

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Show how well the predictions of all jobs came true.
    ///
    /// For each way that was chosen: how often the measured time was in the stated range (the goal
    /// is 9 of 10), and the median error of the expected time. Jobs that failed or were deleted do
    /// not count.
    Score,
}

#[derive(serde::Serialize)]
struct Row {
    chosen: String,
    known_from: String,
    score: ScoreOf,
}

const SCORES: &[Column<Row>] = &[
    ("chosen", |row| row.chosen.clone()),
    ("work known from", |row| row.known_from.clone()),
    ("jobs", |row| row.score.jobs.to_string()),
    ("in range", |row| row.score.in_range.to_string()),
    ("median error", |row| {
        row.score.median_error.map_or_else(String::new, |error| format!("{:.0} %", error * 100.0))
    }),
];

pub async fn run(verb: Verb, context: &Context) -> Result<(), Problem> {
    let Verb::Score = verb;
    let score: Score = controller_client(context)?.get("/v1/planner/score").await?;
    match context.format {
        Format::Json | Format::Yaml => output::one(context.format, &score, &[]),
        Format::Table | Format::Csv => output::list(context.format, &rows(&score), SCORES),
    }
}

fn rows(score: &Score) -> Vec<Row> {
    let mut rows: Vec<Row> = score
        .by_option
        .iter()
        .map(|option| Row {
            chosen: output::word(&option.way),
            known_from: output::word(&option.basis),
            score: option.score,
        })
        .collect();
    let (chosen, known_from) = ("all".to_owned(), String::new());
    rows.push(Row { chosen, known_from, score: score.all });
    rows
}
