//! The page of a simulation: for each scenario a table, what was lost by each rule, and how it grew.

use std::fmt::Write;

use super::outcome::{
    BesideLab, JobTimes, OfRule, Outcome, PLAN_GOAL_MS, Pair, Run, Simulated, Size, Spread,
};
use super::rent;
use crate::report::page::{self, TABLE_END, figure, row, table};
use crate::report::plots::{Bar, Line, Trace, bars, curve, traces};

const LEAD: &str = "Simulated hosts and VMs, with the balancer and the queue of the planner and a clock of their own. Lost is what VMs wanted \
    and did not get, what they lost to the network between them and their data, and what moves cost, in seconds of a vCPU. A job's time is from \
    its arrival to its end. Each figure is the mean of the seeds, with the standard deviation.";

/// The rules whose losses are drawn over time: as many as a chart has colours.
const DRAWN: [&str; 4] = ["none", "proxlb", "crs", "perigee"];

pub fn html(outcome: &Outcome) -> String {
    let mut page = page::start("Perigee: a simulation", "");
    let seeds = outcome.scenarios.iter().flat_map(|one| &one.rules).map(|rule| rule.runs.len());
    let _ = writeln!(
        page,
        "<h1>A simulation</h1>\n<p class=\"lead\">{LEAD} Seeds: {}.</p>",
        seeds.max().unwrap_or(0)
    );
    rent::page::summary(&mut page, outcome);
    for scenario in &outcome.scenarios {
        one(&mut page, scenario);
    }
    page::end(&mut page, &outcome.versions);
    page
}

// Writing to a String cannot fail, so the results of `write!` are ignored.

fn one(page: &mut String, scenario: &Simulated) {
    if rent::page::judged(scenario).is_some() {
        rent::page::scenario(page, scenario);
    } else if !scenario.rules.is_empty() {
        rules(page, scenario);
    }
    if !scenario.sizes.is_empty() {
        sizes(page, scenario);
    }
    if let Some(beside) = &scenario.beside_lab {
        beside_lab(page, scenario, beside);
    }
}

fn beside_lab(page: &mut String, scenario: &Simulated, beside: &BesideLab) {
    let percent = |share: f64| format!("{:+.1} %", 100.0 * share);
    let alone = &beside.alone;
    let about = crate::report::svg::escape(&format!(
        "{} The same jobs in a lab of real VMs, and in the simulator, which knows of the lab what one job alone took: {:.1} s to be \
        staged, {:.1} s to boot, {:.1} s to compute and {:.1} s to be collected. The makespan is {:.1} s in the lab and {:.1} s in the \
        simulator ({}). The error of a job's time is {:.1} % for the job in the middle and {:.1} % for the worst. {} of {} jobs were at \
        the same host.",
        scenario.about,
        alone.stage_s,
        alone.boot_s,
        alone.compute_s,
        alone.end_s,
        beside.makespan.lab_s,
        beside.makespan.simulated_s,
        percent(beside.makespan.error),
        100.0 * beside.median_error,
        100.0 * beside.most_error,
        beside.same_host,
        beside.jobs.len(),
    ));
    let columns = [
        "job",
        "vCPUs",
        "compute, s",
        "arrives, s",
        "host",
        "began, s",
        "ended, s",
        "simulated host",
        "began, s",
        "ended, s",
        "error of its time",
    ];
    table(page, &scenario.title, &about, &columns);
    let second = |time: Option<f64>| time.map_or_else(|| "-".to_owned(), |s| format!("{s:.1}"));
    let of = |times: &JobTimes| {
        let host = times.host.clone().unwrap_or_default();
        [host, second(times.running_s), second(times.ended_s)]
    };
    for (number, pair) in (1..).zip(&beside.jobs) {
        let Pair { cpus, compute_s, lab, simulated, took } = pair;
        let what = [cpus.to_string(), format!("{compute_s:.0}"), second(Some(simulated.at_s))];
        let mut cells = vec![format!("{number}")];
        cells.extend(what.into_iter().chain(of(lab)).chain(of(simulated)));
        cells.push(percent(took.error));
        row(page, "", &cells);
    }
    page.push_str(TABLE_END);
}

fn sizes(page: &mut String, scenario: &Simulated) {
    let columns = [
        "hosts",
        "VMs",
        "moves",
        "balance, ms",
        "longest, ms",
        "queue, ms",
        "plan, ms",
        "plan's goal",
        "pass, ms",
        "simulated, s",
        "took, s",
    ];
    table(page, &scenario.title, &crate::report::svg::escape(&scenario.about), &columns);
    for size in &scenario.sizes {
        let cells = [
            size.hosts.to_string(),
            size.vms.to_string(),
            size.moves.to_string(),
            format!("{:.2}", size.balance_ms),
            format!("{:.2}", size.balance_most_ms),
            format!("{:.3}", size.queue_ms),
            format!("{:.2}", size.plan_ms),
            goal(size),
            format!("{:.1}", size.pass_ms),
            format!("{:.0}", size.simulated_s),
            format!("{:.1}", size.took_s),
        ];
        row(page, "", &cells);
    }
    page.push_str(TABLE_END);
    let places: Vec<String> = scenario.sizes.iter().map(|size| size.hosts.to_string()).collect();
    let line = |name: &str, us: &dyn Fn(&Size) -> Option<f64>| Line {
        name: name.to_owned(),
        values: scenario.sizes.iter().map(us).collect(),
    };
    let each = |ms: f64, count: usize| 1e3 * ms / count.max(1) as f64;
    let lines = [
        line("balance, for each VM", &|size| Some(each(size.balance_ms, size.vms))),
        line("queue, for each host", &|size| Some(each(size.queue_ms, size.hosts))),
        line("plan, for each host", &|size| Some(each(size.plan_ms, size.hosts))),
        line("pass of 100 jobs, for each host", &|size| Some(each(size.pass_ms, size.hosts))),
    ];
    let title = "How decisions grow";
    let caption = "A line that stays level grows as the cluster does.";
    figure(page, title, caption, &curve(&places, &lines, ("hosts", "microseconds"), title));
    let lines = [
        line("plan of one job", &|size| Some(size.plan_ms)),
        line("goal", &|_| Some(PLAN_GOAL_MS)),
    ];
    let title = "The plan of one job";
    let caption = "At every size the plan is to be below the goal.";
    figure(page, title, caption, &curve(&places, &lines, ("hosts", "milliseconds"), title));
}

/// Whether the plan was in time.
fn goal(size: &Size) -> String {
    let word = if size.plan_met_goal { "met" } else { "missed" };
    format!("{word}: at most {PLAN_GOAL_MS} ms")
}

fn rules(page: &mut String, scenario: &Simulated) {
    let left_out = match scenario.left_out {
        0 => String::new(),
        jobs => format!(" {jobs} jobs of the log never ran, and are left out."),
    };
    let about = crate::report::svg::escape(&format!(
        "{} {} hosts, {} VMs, {} hours.{left_out}",
        scenario.about, scenario.hosts, scenario.vms, scenario.hours
    ));
    let mut columns = vec![
        "rule",
        "lost, s",
        "of it by moves, s",
        "lost, % of wanted",
        "moves",
        "to and fro",
        "refused",
    ];
    let have_jobs =
        scenario.rules.iter().any(|rule| rule.spread(|run| run.ended.into()).mean > 0.0);
    if have_jobs {
        columns.extend(["jobs that ended", "a job's time, s", "waits in the queue, s"]);
    }
    table(page, &scenario.title, &about, &columns);
    let least = scenario.rules.iter().map(|rule| rule.spread(Run::lost_s).mean);
    let least = least.fold(f64::INFINITY, f64::min);
    for rule in &scenario.rules {
        let lost = rule.spread(Run::lost_s);
        let share = rule.spread(|run| 100.0 * run.lost_s() / run.wanted_s.max(1.0));
        let mut cells = vec![
            rule.title.clone(),
            shown(lost),
            shown(rule.spread(|run| run.moving_s)),
            format!("{:.2}", share.mean),
            shown(rule.spread(|run| f64::from(run.moves))),
            shown(rule.spread(|run| f64::from(run.back))),
            shown(rule.spread(|run| f64::from(run.refused))),
        ];
        if have_jobs {
            let each = |all_s: f64, jobs: u32| all_s / f64::from(jobs.max(1));
            cells.extend([
                shown(rule.spread(|run| f64::from(run.ended))),
                shown(rule.spread(|run| each(run.jobs_s, run.ended))),
                shown(rule.spread(|run| each(run.queued_s, run.started))),
            ]);
        }
        row(page, if lost.mean <= least { "chosen" } else { "" }, &cells);
    }
    page.push_str(TABLE_END);
    figure(
        page,
        "Lost",
        "Less is better.",
        &bars(&lost_bars(scenario), "seconds", &scenario.title),
    );
    let title = "Lost until then, with the first seed";
    let drawn = scenario.rules.iter().filter(|rule| DRAWN.contains(&rule.rule.as_str()));
    let lines: Vec<Trace> = drawn.filter_map(trace).collect();
    figure(page, title, "", &traces(&lines, ("hours", "seconds"), title));
}

fn trace(rule: &OfRule) -> Option<Trace> {
    Some(Trace { name: rule.rule.clone(), points: rule.runs.first()?.trace.clone() })
}

fn lost_bars(scenario: &Simulated) -> Vec<Bar> {
    let bar = |rule: &OfRule| {
        let lost = rule.spread(Run::lost_s);
        let class = if rule.rule == "perigee" { "ours" } else { "peer" };
        Bar { name: rule.title.clone(), class, value: lost.mean, label: shown(lost) }
    };
    scenario.rules.iter().map(bar).collect()
}

/// The mean with its deviation, with as many digits as say something.
pub fn shown(spread: Spread) -> String {
    let decimals = if spread.mean.abs() < 10.0 { 1 } else { 0 };
    format!("{:.decimals$} ± {:.decimals$}", spread.mean, spread.deviation)
}
