//! `perigee lab simulate`: the planner's balancer and queue over simulated hosts, beside other rules.
//!
//! | question | file |
//! |---|---|
//! | Which fields has a scenario? | `scenario.rs` |
//! | What do VMs want, and when? Which statistics do generators have? | `loads.rs` |
//! | Which jobs arrive? | `jobs.rs`; from logs: `swf.rs` |
//! | Which rules move VMs and place jobs? | `rules.rs`, `world/place.rs` |
//! | What happens at a host, in a move, at a failure? | `world/mod.rs` |
//! | What does a move cost? | `price.rs` |
//! | How do those share links that send something? | `network.rs` |
//! | How far is the simulator from a lab? | `beside_lab.rs` |
//! | How long do decisions take with many hosts? | `growth.rs` |
//! | Which rule rents hosts, and what does that cost? | `rent/` |
//! | What is in `results.json`, and on the page? | `outcome.rs`, `page.rs` |

mod beside_lab;
mod growth;
mod jobs;
mod loads;
mod network;
mod outcome;
mod page;
mod price;
mod rent;
mod rules;
mod scenario;
mod swf;
mod world;

use std::path::{Path, PathBuf};
use std::time::Instant;

use perigee_model::Problem;
use perigee_model::units::format_seconds;

use crate::measuring;
use crate::progress::Steps;
pub use beside_lab::Options as BesideLabOptions;
use jobs::Jobs;
pub use outcome::{BesideLab, Bill, OfRule, Outcome, Run, Simulated, Size, Spread};
pub use page::shown;
use scenario::Scenario;

/// What is simulated.
pub struct Options {
    /// Scenarios, each a YAML file.
    pub files: Vec<PathBuf>,
    /// How many runs each rule has, with the seeds 1, 2, and so on.
    pub seeds: u64,
    /// A scenario that is also run in a lab of real VMs.
    pub beside_lab: Option<BesideLabOptions>,
    /// Directory for `results.json` and `report.html`.
    pub out: PathBuf,
}

/// A wait that is shorter is not foretold.
const TOLD_S: f64 = 60.0;

/// Runs all scenarios and writes the results.
///
/// # Errors
/// A scenario is wrong, the lab failed, or the results can't be written.
pub async fn simulate(options: &Options, steps: &Steps) -> Result<Outcome, Problem> {
    let read = |file: &PathBuf| Ok((file.clone(), scenario::read(file)?));
    let scenarios: Vec<(PathBuf, Scenario)> =
        options.files.iter().map(read).collect::<Result<_, Problem>>()?;
    let programs: &[_] = if options.beside_lab.is_some() { &[measuring::QEMU] } else { &[] };
    let versions = measuring::versions(measuring::own_version(), programs);
    let mut outcome = Outcome { versions, scenarios: Vec::new() };
    for (file, scenario) in &scenarios {
        outcome.scenarios.push(one(file, scenario, options.seeds, steps));
    }
    if let Some(options) = &options.beside_lab {
        outcome.scenarios.push(beside_lab::beside_lab(options, steps).await?);
    }
    write(&outcome, &options.out)?;
    Ok(outcome)
}

fn one(file: &Path, scenario: &Scenario, seeds: u64, steps: &Steps) -> Simulated {
    let began = Instant::now();
    let step = steps.begin(scenario.title.as_str());
    let rules: Vec<OfRule> = match &scenario.rent {
        Some(renting) => rent::rules(scenario, renting, seeds),
        None => all_rules(scenario, seeds, steps),
    };
    let sizes = growth::sizes(scenario);
    step.done(&format!("{} rules, {seeds} seeds", rules.len()));
    let left_out = match &scenario.jobs {
        Jobs::Listed(listed) => listed.left_out,
        Jobs::AtRandom(_) => 0,
    };
    Simulated {
        file: name_of(file),
        title: scenario.title.clone(),
        about: scenario.about.clone(),
        hours: scenario.length_s as f64 / 3600.0,
        hosts: scenario.hosts,
        vms: scenario.vms,
        left_out,
        rules,
        beside_lab: None,
        sizes,
        took_s: began.elapsed().as_secs_f64(),
    }
}

/// The first seed with all rules says how long the others will take.
fn all_rules(scenario: &Scenario, seeds: u64, steps: &Steps) -> Vec<OfRule> {
    let of_rule = |rule: &rules::Rule| {
        let (word, title) = (rule.word().to_owned(), rule.title().to_owned());
        OfRule { rule: word, title, runs: Vec::new() }
    };
    let mut all: Vec<OfRule> = scenario.rules.iter().map(of_rule).collect();
    let began = Instant::now();
    for seed in 1..=seeds {
        for (rule, of_rule) in scenario.rules.iter().zip(&mut all) {
            let mut run = world::run(scenario, *rule, seed);
            // Only the table of growth has them, and there may be millions.
            run.decided_s = Vec::new();
            if seed > 1 {
                run.trace.clear();
            }
            of_rule.runs.push(run);
        }
        let took_s = began.elapsed().as_secs_f64();
        let left_s = took_s * (seeds - seed) as f64;
        if seed == 1 && left_s >= TOLD_S {
            let [took, left] = [took_s, left_s].map(format_seconds);
            steps.say(&format!(
                "    seed 1 took {took} with all rules: the other {} take about {left}",
                seeds - 1
            ));
        }
    }
    all
}

fn name_of(file: &Path) -> String {
    file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn write(outcome: &Outcome, out: &Path) -> Result<(), Problem> {
    let write = || -> std::io::Result<()> {
        std::fs::create_dir_all(out)?;
        let mut text = serde_json::to_vec_pretty(outcome)?;
        text.push(b'\n');
        std::fs::write(out.join("results.json"), text)?;
        std::fs::write(out.join("report.html"), page::html(outcome))
    };
    let what = || format!("can't write the results to {}", out.display());
    write().map_err(|error| Problem::internal(what(), error))
}

#[cfg(test)]
mod tests {
    use super::rules::Rule;
    use super::*;

    fn scenario(lines: &str) -> Scenario {
        let text = format!("title: T\nabout: A\nhours: 1\n{lines}");
        scenario::parse(&text, "s.yaml").expect("a scenario")
    }

    fn run(scenario: &Scenario, rule: Rule) -> Run {
        let mut run = world::run(scenario, rule, 3);
        run.decided_s.clear();
        run
    }

    #[test]
    fn a_seed_gives_the_same_run_again() {
        let busy =
            scenario("load: noise\nstart: half\njobs: 60\nfailures: 2\nfar: 0.3\nsites: 2\n");
        for rule in Rule::ALL {
            assert_eq!(run(&busy, rule), run(&busy, rule), "{}", rule.word());
        }
    }

    /// Of a log of months most looks are such.
    #[test]
    fn a_look_at_which_nothing_is_lost_decides_nothing() {
        let calm = scenario("load: steady\nvms: 1\n");
        let run = world::run(&calm, Rule::Perigee, 3);
        assert!(
            run.looks > 300 && run.decided_s.is_empty(),
            "{} of {}",
            run.decided_s.len(),
            run.looks
        );
        let busy = scenario("load: steady\nstart: half\n");
        let run = world::run(&busy, Rule::Perigee, 3);
        assert!(run.moves > 0 && !run.decided_s.is_empty());
    }

    #[test]
    fn what_vms_want_does_not_depend_on_the_rule() {
        let noise = scenario("load: noise\nstart: half\n");
        let wanted = Rule::ALL.map(|rule| run(&noise, rule).wanted_s);
        assert!(wanted.iter().all(|one| (one - wanted[0]).abs() < 1.0), "{wanted:?}");
    }

    #[test]
    fn a_balancer_loses_less_where_the_load_is_skewed() {
        let skewed = scenario("load: steady\nstart: half\n");
        let [none, ours] = [Rule::None, Rule::Perigee].map(|rule| run(&skewed, rule));
        assert_eq!(none.moves, 0);
        assert!(ours.lost_s() < 0.5 * none.lost_s(), "{} of {}", ours.lost_s(), none.lost_s());
        assert_eq!(ours.back, 0);
    }

    /// As in a cluster: the balancer looks at each site by itself.
    #[test]
    fn no_vm_leaves_its_site_for_a_cpu() {
        let moves = |sites| {
            let lines = format!("load: steady\nstart: half\nhosts: 2\nvms: 12\nsites: {sites}\n");
            run(&scenario(&lines), Rule::Perigee).moves
        };
        assert!(moves(1) > 0, "the other host is idle");
        assert_eq!(moves(2), 0, "the other host is at another site");
    }

    #[test]
    fn jobs_and_the_vms_of_a_host_that_fails_are_placed_by_the_queue() {
        let busy = scenario("load: steady\njobs: 100\nfailures: 3\n");
        let run = run(&busy, Rule::Perigee);
        assert!(run.failed > 0 && run.started > run.failed, "{run:?}");
    }
}
