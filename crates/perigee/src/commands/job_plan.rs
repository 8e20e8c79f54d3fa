//! How plans are printed

use perigee_model::Problem;
use perigee_model::job_plan::{JobPlan, NotConsidered, RentOption};
use perigee_model::plan::{Estimate, OptionCost, Part, Plan, PlanOption};

use crate::output::{self, Column, Format};

/// Prints a plan of a job that is not submitted.
pub fn print(plan: &JobPlan, format: Format) -> Result<(), Problem> {
    // Nothing is waited for, and nothing can be rented.
    if plan.waits.is_empty() && plan.rented.is_empty() {
        match format {
            Format::Json | Format::Yaml => output::one(format, plan, &[])?,
            Format::Csv | Format::Table => print_options(&plan.plan, format)?,
        }
        if format == Format::Table {
            print_not_considered(&plan.not_considered);
        }
        return Ok(());
    }
    match format {
        Format::Json | Format::Yaml => output::one(format, plan, &[]),
        Format::Csv => output::list(format, &rows(plan), ROWS),
        Format::Table => {
            output::list(format, &rows(plan), ROWS)?;
            print_not_considered(&plan.not_considered);
            print_costs(&plan.plan);
            for rent in &plan.rented {
                let called = called(rent);
                print_cost(&output::word(&rent.way), &called, &rent.cost, Some((rent, &called)));
            }
            print_figures(&plan.plan);
            for rent in plan.rented.iter().filter(|rent| rent.possible) {
                let called = called(rent);
                for unknown in &rent.unknown {
                    let why = unknown.why.replace(rent.host.as_str(), &called);
                    output::text(&format!("  not known: {}: {why}", unknown.part.name()));
                }
            }
            Ok(())
        }
    }
}

/// One way, at a host that is there or at one that would be rented.
#[derive(serde::Serialize)]
struct Row {
    chosen: bool,
    way: String,
    /// At which host.
    place: String,
    seconds: String,
    money: String,
    is_best_trade: bool,
    ships: Option<u64>,
    why: String,
}

const ROWS: &[Column<Row>] = &[
    ("", |row| if row.chosen { "*".to_owned() } else { String::new() }),
    ("way", |row| row.way.clone()),
    ("where", |row| row.place.clone()),
    ("seconds", |row| row.seconds.clone()),
    ("money", |row| row.money.clone()),
    ("best trade", |row| if row.is_best_trade { "yes".to_owned() } else { String::new() }),
    ("ships", |row| output::or_dash(row.ships.map(output::bytes).as_ref())),
    ("why", |row| row.why.clone()),
];

/// All ways in the order of the plan, and then the rented ones.
fn rows(plan: &JobPlan) -> Vec<Row> {
    let own = plan.plan.options.iter().map(|option| own_row(plan, option));
    own.chain(plan.rented.iter().map(rented_row)).collect()
}

fn own_row(plan: &JobPlan, option: &PlanOption) -> Row {
    let is_possible = option.is_possible();
    let wait = plan.wait_of(option).filter(|_| is_possible);
    let (start, end) = (option.starts_at(), option.ends_at());
    let place = if start == end { start } else { format!("{start}, then {end}") };
    let why = match wait {
        Some(wait) => match wait.wait {
            Some(seconds) => format!("{}, {seconds}; {}", wait.why, option.reason),
            None => format!("{}; {}", wait.why, option.reason),
        },
        None => option.reason.clone(),
    };
    let ends = plan.ends(option).filter(|_| is_possible);
    let unknown = if is_possible { "not known" } else { "-" };
    Row {
        chosen: option.chosen,
        way: output::word(&option.way),
        place,
        seconds: ends.as_ref().map_or_else(|| unknown.to_owned(), Estimate::or_at_least),
        money: money(option),
        is_best_trade: option.cost.as_ref().is_some_and(|cost| cost.is_best_trade),
        ships: option.shipped_bytes,
        why,
    }
}

fn rented_row(rent: &RentOption) -> Row {
    Row {
        chosen: false,
        way: output::word(&rent.way),
        place: called(rent),
        seconds: if rent.possible { rent.ends().or_at_least() } else { "-".to_owned() },
        money: money_of(&rent.cost),
        is_best_trade: rent.cost.is_best_trade,
        ships: rent.shipped_bytes,
        why: rent.reason.replace(rent.host.as_str(), &called(rent)),
    }
}

/// `rent c8i.2xlarge`, `rent c8i.2xlarge as spot`
fn called(rent: &RentOption) -> String {
    format!("rent {}{}", rent.kind, as_spot(rent.spot))
}

fn as_spot(spot: bool) -> &'static str {
    if spot { " as spot" } else { "" }
}

/// `not considered: m5.large (no KVM), ec2 (it has not answered for 3 s)`
fn print_not_considered(all: &[NotConsidered]) {
    if all.is_empty() {
        return;
    }
    let each = all.iter().map(|one| {
        let what = one.kind.as_ref().unwrap_or(&one.provider);
        format!("{what}{} ({})", as_spot(one.spot), one.why)
    });
    output::text(&format!("not considered: {}", each.collect::<Vec<_>>().join(", ")));
}

/// Prints the ways at the hosts that are there.
pub fn print_options(plan: &Plan, format: Format) -> Result<(), Problem> {
    match format {
        Format::Json | Format::Yaml => output::one(format, plan, &[]),
        Format::Csv => output::list(format, &plan.options, OPTIONS),
        // A move that a user asked for has no options.
        Format::Table if plan.options.is_empty() => Ok(()),
        Format::Table => {
            let has_money = plan.options.iter().any(|option| option.cost.is_some());
            let with_money = has_money.then(options_with_money);
            output::list(format, &plan.options, with_money.as_deref().unwrap_or(OPTIONS))?;
            print_costs(plan);
            print_figures(plan);
            Ok(())
        }
    }
}

/// What the predictions rest on.
fn print_figures(plan: &Plan) {
    output::text(&format!("\nprediction based on: {}", output::word(&plan.basis)));
    for figure in &plan.figures {
        output::text(&format!("  {figure}"));
    }
    for unknown in plan.chosen().iter().flat_map(|option| &option.unknown) {
        output::text(&format!("  not known: {}: {}", unknown.part.name(), unknown.why));
    }
}

const OPTIONS: &[Column<PlanOption>] = &[
    ("", |o| if o.chosen { "*".to_owned() } else { String::new() }),
    ("way", |o| output::word(&o.way)),
    ("start", PlanOption::starts_at),
    ("end", PlanOption::ends_at),
    ("total", |o| o.total.or_at_least()),
    ("ships", |o| output::or_dash(o.shipped_bytes.map(output::bytes).as_ref())),
    ("boot", |o| seconds_of(o, Part::Boot)),
    ("cpu", |o| seconds_of(o, Part::Cpu)),
    ("local i/o", |o| seconds_of(o, Part::LocalIo)),
    ("network", |o| seconds_of(o, Part::Network)),
    ("other", |o| seconds_of(o, Part::Other)),
    ("migration", |o| seconds_of(o, Part::Migration)),
    ("longer by", |o| o.longer.map_or_else(String::new, |longer| longer.to_string())),
    ("reason", |o| o.reason.clone()),
];

/// The columns of a plan in a cluster where hosts cost something: money stands beside the time.
fn options_with_money() -> Vec<Column<PlanOption>> {
    let money: [Column<PlanOption>; 2] = [("money", money), ("best trade", best_trade)];
    let beside = OPTIONS.iter().position(|(name, _)| *name == "ships").unwrap_or(OPTIONS.len());
    let (first, last) = OPTIONS.split_at(beside);
    [first, &money, last].concat()
}

/// `$0.09 ($0.07..$0.14)`
fn money(option: &PlanOption) -> String {
    option.cost.as_ref().map_or_else(String::new, money_of)
}

fn money_of(cost: &OptionCost) -> String {
    cost.total.map_or_else(|| "unknown".to_owned(), |total| total.to_string())
}

/// Whether nothing is both sooner and cheaper.
fn best_trade(option: &PlanOption) -> String {
    let is_best = option.cost.as_ref().is_some_and(|cost| cost.is_best_trade);
    if is_best { "yes".to_owned() } else { String::new() }
}

/// What each option's money is made of, one line for each item.
fn print_costs(plan: &Plan) {
    for option in &plan.options {
        if let Some(cost) = &option.cost {
            print_cost(&output::word(&option.way), &option.starts_at(), cost, None);
        }
    }
}

/// `rent` is what a host that is not there is called.
fn print_cost(way: &str, at: &str, cost: &OptionCost, rent: Option<(&RentOption, &str)>) {
    if cost.items.is_empty() {
        return;
    }
    output::text(&format!("money of {way} at {at}: {}", money_of(cost)));
    for item in &cost.items {
        let amount = item.cost.map_or_else(|| "unknown".to_owned(), |cost| cost.to_string());
        let rented = rent.filter(|(rent, _)| rent.host == item.host);
        let host = rented.map_or(item.host.as_str(), |(_, called)| called);
        output::text(&format!("  {} of {host}: {amount}: {}", item.of.name(), item.why));
    }
}

/// `?` beside what is a guess.
pub fn seconds_of(option: &PlanOption, part: Part) -> String {
    let unknown = option.unknown.iter().any(|unknown| unknown.part == part);
    format!("{:.1}{}", option.predicted.of(part), if unknown { "?" } else { "" })
}
