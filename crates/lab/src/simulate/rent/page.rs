//! What the rules that rent cost, as a part of the page.

use std::fmt::Write;

use crate::report::page::{TABLE_END, figure, row, table};
use crate::report::plots::{Bar, Trace, bars, traces};
use crate::simulate::outcome::{Bill, OfRule, Outcome, RENT_GOAL, Run, Simulated, Spread};

/// A figure of a run's bill.
fn of(rule: &OfRule, figure: impl Fn(&Bill) -> f64) -> Spread {
    rule.spread(|run| run.bill.as_ref().map_or(0.0, &figure))
}

fn dollars(spread: Spread) -> String {
    format!("{:.2} ± {:.2}", spread.mean, spread.deviation)
}

fn count(spread: Spread) -> String {
    format!("{:.1}", spread.mean)
}

/// How the rule of the planner compares in a scenario.
pub struct Judged {
    pub ours: f64,
    /// The cheapest other rule that kept the budget in each run.
    pub peer: Option<(String, f64)>,
    /// By how much ours is dearer, as a share. Below 0: it is cheaper.
    pub dearer: Option<f64>,
    pub is_met: bool,
}

/// `None` if nothing was rented in the scenario.
pub fn judged(scenario: &Simulated) -> Option<Judged> {
    let all_in = |rule: &OfRule| of(rule, Bill::all_in).mean;
    let is_ours = |rule: &&OfRule| rule.rule == "perigee";
    let ours = scenario.rules.iter().find(is_ours)?;
    ours.runs.first()?.bill.as_ref()?;
    let keeps = |rule: &&OfRule| of(rule, |bill| bill.over_budget).mean <= 0.0;
    let kept = keeps(&ours);
    let peers = scenario.rules.iter().filter(|rule| !is_ours(rule)).filter(keeps);
    let peer = peers.min_by(|one, other| all_in(one).total_cmp(&all_in(other)));
    let peer = peer.map(|rule| (rule.title.clone(), all_in(rule)));
    let ours = all_in(ours);
    let dearer = peer.as_ref().map(|(_, peer)| (ours - peer) / peer.max(f64::MIN_POSITIVE));
    let is_met = kept && dearer.is_none_or(|dearer| dearer <= RENT_GOAL);
    Some(Judged { ours, peer, dearer, is_met })
}

/// All scenarios in which something can be rented, at a glance.
pub fn summary(page: &mut String, outcome: &Outcome) {
    let all = outcome.scenarios.iter().filter_map(|one| Some((one, judged(one)?)));
    let all: Vec<_> = all.collect();
    if all.is_empty() {
        return;
    }
    let about = format!(
        "All-in is money (machines and egress) and the cost of waiting, with missed deadlines, in dollars. The goal: no rule that keeps the \
         budget is cheaper by more than {:.0} %, and the budget is kept in each run.",
        100.0 * RENT_GOAL
    );
    let columns =
        ["scenario", "Perigee all-in, $", "cheapest other rule", "its all-in, $", "dearer", "goal"];
    table(page, "All-in", &about, &columns);
    for (scenario, judged) in &all {
        let (name, peer) = judged.peer.clone().unwrap_or_default();
        let cells = [
            scenario.title.clone(),
            format!("{:.2}", judged.ours),
            name,
            format!("{peer:.2}"),
            judged
                .dearer
                .map_or_else(|| "-".to_owned(), |dearer| format!("{:+.1} %", 100.0 * dearer)),
            if judged.is_met { "met" } else { "missed" }.to_owned(),
        ];
        row(page, "", &cells);
    }
    page.push_str(TABLE_END);
}

/// One scenario. Writing to a String cannot fail, so the results of `write!` are ignored.
pub fn scenario(page: &mut String, scenario: &Simulated) {
    let about = crate::report::svg::escape(&format!(
        "{} {} own hosts, {} hours of arrivals, and then until the last job has ended.",
        scenario.about, scenario.hosts, scenario.hours
    ));
    let columns = [
        "rule",
        "all-in, $",
        "machines, $",
        "egress, $",
        "waiting, $",
        "missed deadlines, $",
        "over budget, $",
        "hosts",
        "host hours",
        "refused",
        "taken back",
        "jobs begun anew",
        "a job's time, s",
    ];
    table(page, &scenario.title, &about, &columns);
    let least = scenario.rules.iter().map(|rule| of(rule, Bill::all_in).mean);
    let least = least.fold(f64::INFINITY, f64::min);
    for rule in &scenario.rules {
        let all_in = of(rule, Bill::all_in);
        let cells = [
            rule.title.clone(),
            dollars(all_in),
            dollars(of(rule, |bill| bill.machines)),
            dollars(of(rule, |bill| bill.egress)),
            dollars(of(rule, |bill| bill.waiting)),
            dollars(of(rule, |bill| bill.late)),
            dollars(of(rule, |bill| bill.over_budget)),
            count(of(rule, |bill| f64::from(bill.rented))),
            count(of(rule, |bill| bill.host_hours)),
            count(of(rule, |bill| f64::from(bill.refused))),
            count(of(rule, |bill| f64::from(bill.taken_back))),
            count(of(rule, |bill| f64::from(bill.lost_jobs))),
            format!("{:.0}", rule.spread(|run| run.jobs_s / f64::from(run.ended.max(1))).mean),
        ];
        row(page, if all_in.mean <= least { "chosen" } else { "" }, &cells);
    }
    page.push_str(TABLE_END);
    let bar = |rule: &OfRule| {
        let all_in = of(rule, Bill::all_in);
        let class = if rule.rule == "perigee" { "ours" } else { "peer" };
        Bar { name: rule.title.clone(), class, value: all_in.mean, label: dollars(all_in) }
    };
    let drawn: Vec<Bar> = scenario.rules.iter().map(bar).collect();
    figure(page, "All-in", "Less is better.", &bars(&drawn, "dollars", &scenario.title));
    let line = |rule: &OfRule| {
        let points = rule.runs.first().map(|run: &Run| run.trace.clone())?;
        Some(Trace { name: rule.rule.clone(), points })
    };
    let shown = ["at-once", "annex", "cheapest", "perigee"];
    let shown = scenario.rules.iter().filter(|rule| shown.contains(&rule.rule.as_str()));
    let lines: Vec<Trace> = shown.filter_map(line).collect();
    let title = "Money until then, with the first seed";
    figure(page, title, "", &traces(&lines, ("hours", "dollars"), title));
    let _ = writeln!(page);
}
