//! `report.html`: predictions beside measurements on one page. A pure function of [`Results`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use perigee_lab::measuring::Goal;
use perigee_lab::report::page::{self, figure, row};
use perigee_lab::report::plots::{Bar, bars};
use perigee_lab::report::svg::escape;

use crate::results::{Compared, Learned, Results, Score, ShownEnds, count, score_name, way_name};
use crate::workload::Workload;

const IN_RANGE_GOAL: f64 = 0.9;
const GOOD_GOAL: f64 = 0.95;
const ERROR_GOAL: f64 = 0.1;

// Writing to a String cannot fail, so the results of `write!` below are ignored.

pub fn html(results: &Results) -> String {
    let mut page = page::start("Perigee: predictions", "");
    let rtts: Vec<String> = results.rtts_ms().iter().map(u32::to_string).collect();
    let floor = results.floor.map_or_else(
        || "is not known".to_owned(),
        |floor| format!("is {:.0} % in the median", floor * 100.0),
    );
    let _ = writeln!(
        page,
        "<h1>Predictions beside measurements</h1>\n<p class=\"lead\">Jobs are predicted with <code>job plan</code> and then \
         run, at round trips of {} ms, {} in each placement. What is predicted from runs is predicted for another \
         round trip than theirs. The distance of single runs beside the data from their mean {floor}: no prediction can \
         be better than that. All jobs share one lab, so boots and moves of other jobs are known to the planner.</p>",
        escape(&rtts.join(" and ")),
        repeats(results)
    );
    began(&mut page, results);
    page::goals(&mut page, &goals(results));
    choices(&mut page, results);
    scores(&mut page, results);
    shown_ends(&mut page, results);
    for learned in Learned::ALL {
        errors(&mut page, results, learned);
    }
    measured(&mut page, results);
    page::end(&mut page, &results.all_versions());
    page
}

/// How often each case was run.
fn repeats(results: &Results) -> String {
    let mut cases = BTreeMap::<_, usize>::new();
    for run in &results.runs {
        *cases.entry((run.workload, run.rtt_ms, run.placement)).or_default() += 1;
    }
    let counts: BTreeSet<usize> = cases.into_values().collect();
    match (counts.first(), counts.last()) {
        (Some(1), Some(1)) => "once".to_owned(),
        (Some(least), Some(most)) if least == most => format!("{most} times"),
        (Some(least), Some(most)) => format!("{least} to {most} times"),
        _ => "not yet".to_owned(),
    }
}

/// What differs between the changes that the experiment asks for and those that the planner makes.
fn began(page: &mut String, results: &Results) {
    let after = |seconds: Option<f64>| {
        seconds.map_or_else(|| "(there was none)".to_owned(), |s| format!("{s:.1} s after it"))
    };
    let _ = writeln!(
        page,
        "<p>In <code>migrate</code>, <code>copy</code> and <code>follow</code> the experiment asks for the change as soon as \
         it sees that the command runs, in the median {}. In <code>auto</code> the planner makes it by itself, in the \
         median {}. What differs between them is this time.</p>",
        after(results.asked_began_s),
        after(results.auto_began_s)
    );
}

pub fn shown_words(shown: &ShownEnds) -> String {
    format!("shown after {} of the command's time", percent(shown.at))
}

/// How well the ends came true that the API shows while a job runs.
fn shown_ends(page: &mut String, results: &Results) {
    if results.shown_ends.is_empty() {
        return;
    }
    page.push_str(
        "<h2>The end that is shown while a job runs</h2>\n<p>As <code>job status</code> shows it, in all runs. It says when the \
         command ends if its VM and its data stay where they are, or where a migration takes the VM. The errors are shares of the command's whole time.</p>\n\
         <div class=\"scroll\"><table>\n<tr><th>shown</th><th>number</th><th>median error</th><th>90th percentile</th>\
         <th>in range</th><th>median width</th><th>interval score</th><th>not known</th></tr>\n",
    );
    let or_dash = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), percent);
    for shown in &results.shown_ends {
        let score = &shown.score;
        let cells = [
            shown_words(shown),
            score.predictions.to_string(),
            or_dash(score.median_error),
            or_dash(score.p90_error),
            or_dash(score.in_range),
            or_dash(score.median_width),
            or_dash(score.interval_score),
            shown.unknown.to_string(),
        ];
        row(page, "", &cells);
    }
    page.push_str("</table></div>\n");
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

pub fn score_words(score: &Score) -> String {
    let or_dash = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), percent);
    format!(
        "{} predictions, median error {}, 90th percentile {}, in range {}, interval score {}",
        score.predictions,
        or_dash(score.median_error),
        or_dash(score.p90_error),
        or_dash(score.in_range),
        or_dash(score.interval_score)
    )
}

/// The goals of which something was measured.
fn goals(results: &Results) -> Vec<Goal> {
    let mut goals = Vec::new();
    let mut judge = |goal: String, met: bool, measured: String| {
        goals.push(Goal { goal, met: Some(met), measured });
    };
    for of_gangs in [false, true] {
        let of = jobs_of(of_gangs);
        let seen = results.scores.get(&score_name(Learned::All, of_gangs));
        if let Some((score, error)) = seen.and_then(|score| Some((score, score.median_error?))) {
            judge(
                format!("{of}: the median error for those that were seen before is below 10 %"),
                error < ERROR_GOAL,
                format!("{} of {} predictions", percent(error), score.predictions),
            );
        }
        for learned in [Learned::All, Learned::Nothing] {
            let score = results.scores.get(&score_name(learned, of_gangs));
            if let Some(held) = score.and_then(|score| score.in_range) {
                let from = learned.words();
                let goal =
                    format!("{of}: the truth is in the stated range 9 times of 10, from {from}");
                judge(goal, held >= IN_RANGE_GOAL, percent(held));
            }
        }
    }
    for choices in results.choices.iter().filter(|c| c.learned == Learned::All) {
        judge(
            format!(
                "{}: the chosen option is the best or within 10 % of it in 95 % of the cases, when {}",
                jobs_of(choices.of_gangs),
                choices.question.words()
            ),
            count(choices.good) >= count(choices.plans) * GOOD_GOAL,
            format!("{} of {}", choices.good, choices.plans),
        );
    }
    goals
}

fn jobs_of(of_gangs: bool) -> &'static str {
    if of_gangs { "jobs with several VMs" } else { "jobs with one VM" }
}

fn choices(page: &mut String, results: &Results) {
    for choices in &results.choices {
        let _ = writeln!(
            page,
            "<p class=\"soft\">{}: choices from {}, when {}: {} of {} good. {}</p>",
            jobs_of(choices.of_gangs),
            choices.learned.words(),
            choices.question.words(),
            choices.good,
            choices.plans,
            escape(&choices.missed.join("; "))
        );
    }
}

fn scores(page: &mut String, results: &Results) {
    page.push_str(
        "<h2>Errors and ranges</h2>\n<div class=\"scroll\"><table>\n<tr><th>predictions</th><th>number</th>\
         <th>median error</th><th>90th percentile</th><th>in range</th><th>median width</th><th>interval score</th></tr>\n",
    );
    let or_dash = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), percent);
    for (name, score) in &results.scores {
        let cells = [
            name.clone(),
            score.predictions.to_string(),
            or_dash(score.median_error),
            or_dash(score.p90_error),
            or_dash(score.in_range),
            or_dash(score.median_width),
            or_dash(score.interval_score),
        ];
        row(page, "", &cells);
    }
    page.push_str("</table></div>\n");
    let bar = |(name, score): (&String, &Score)| {
        let error = score.median_error?;
        let class = if error < ERROR_GOAL { "ours" } else { "peer" };
        let [of_one, of_gangs] = [false, true].map(|of_gangs| score_name(Learned::All, of_gangs));
        let (of, way) = match (name.strip_prefix(&of_one), name.strip_prefix(&of_gangs)) {
            (Some(way), _) => ("", way),
            (None, way) => ("2 VMs, ", way?),
        };
        let way = if way.is_empty() { "all" } else { way.trim_start_matches(": ") };
        let name = format!("{of}{way}");
        Some(Bar { name, class, value: error * 100.0, label: percent(error) })
    };
    let found: Vec<Bar> = results.scores.iter().filter_map(bar).collect();
    let title = "Median error, from runs in all placements at another round trip";
    figure(page, title, "The goal is below 10 %.", &bars(&found, "%", title));
}

fn errors(page: &mut String, results: &Results, learned: Learned) {
    let found: Vec<&Compared> =
        results.compared.iter().filter(|c| c.prediction.learned == learned).collect();
    if found.is_empty() {
        return;
    }
    let _ = writeln!(
        page,
        "<h2>Predicted from {}</h2>\n<div class=\"scroll\"><table>\n<tr><th>job</th><th>way</th><th>learned at, ms</th>\
         <th>predicted for, ms</th><th>predicted</th><th>measured, s</th><th>error</th><th>in range</th></tr>",
        learned.words()
    );
    for c in &found {
        let p = &c.prediction;
        let learned_at = match learned {
            Learned::Nothing => "–".to_owned(),
            Learned::Beside | Learned::All => p.learned_at_ms.to_string(),
        };
        let cells = [
            p.workload.words().to_owned(),
            way_name(p.way),
            learned_at,
            p.rtt_ms.to_string(),
            p.total.to_string(),
            format!("{:.1}", c.measured_s),
            format!("{:+.0} %", c.error * 100.0),
            format!("{} of {}", c.in_range, c.rounds),
        ];
        row(page, if c.in_range < c.rounds { "missed" } else { "" }, &cells);
    }
    page.push_str("</table></div>\n");
    let bar = |c: &&Compared| Bar {
        name: format!(
            "{}, {}, {} ms",
            c.prediction.workload.name(),
            way_name(c.prediction.way),
            c.prediction.rtt_ms
        ),
        class: if c.in_range == c.rounds { "ours" } else { "peer" },
        value: c.error.abs() * 100.0,
        label: format!("{:+.0} %", c.error * 100.0),
    };
    let title = format!("Errors, predicted from {}", learned.words());
    let caption = "Without their sign. The grey ones were outside of the stated range.";
    let all: Vec<Bar> = found.iter().map(bar).collect();
    figure(page, &title, caption, &bars(&all, "%", &title));
}

fn measured(page: &mut String, results: &Results) {
    page.push_str(
        "<h2>Measured</h2>\n<div class=\"scroll\"><table>\n<tr><th>job</th><th>RTT, ms</th><th>placement</th><th>what happened</th><th>round</th>\
         <th>from VM start to end, s</th><th>boot, s</th><th>change began after, s</th><th>load</th></tr>\n",
    );
    for workload in Workload::ALL {
        for run in results.runs.iter().filter(|run| run.workload == workload) {
            let cells = [
                workload.words().to_owned(),
                run.rtt_ms.to_string(),
                run.placement.name().to_owned(),
                way_name(run.way),
                run.round.to_string(),
                format!("{:.1}", run.total_s),
                format!("{:.1}", run.boot_s),
                run.change_began_s.map_or_else(String::new, |s| format!("{s:.1}")),
                format!("{:.1}", run.load_1min),
            ];
            row(page, "", &cells);
        }
    }
    page.push_str("</table></div>\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::results;

    #[test]
    fn the_page_stands_alone_and_names_what_is_missed() {
        let page = html(&results());
        for outside in ["<script", "http://", "https://", "<link", "url("] {
            assert!(!page.contains(outside), "{outside} is in the page");
        }
        assert!(page.contains("Missed: jobs with one VM: the chosen option is the best"), "{page}");
    }
}
