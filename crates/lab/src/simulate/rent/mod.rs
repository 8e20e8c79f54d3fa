//! Hosts that are rented in a simulation: the planner's rule beside others, and what each costs with the waiting.
//!
//! | question | file |
//! |---|---|
//! | Which fields has `rent` in a scenario? | `file.rs` |
//! | Which jobs arrive? | `arrivals.rs` |
//! | What does the provider do: prices, spot hosts that are taken back, refusals? | `market.rs` |
//! | Which rules rent? | `rules.rs`; the planner's: `ours.rs` |
//! | What happens to jobs and hosts? | `world.rs`; where a job starts: `queue.rs` |
//! | What do hosts cost, and what is reserved? | `hosts.rs` |
//! | What is on the page? | `page.rs` |

mod arrivals;
mod file;
mod hosts;
mod market;
mod ours;
pub(super) mod page;
mod queue;
mod rules;
#[cfg(test)]
mod tests;
mod world;

pub use file::{Renting, parse};
use rules::RentRule;

use super::outcome::OfRule;
use super::scenario::Scenario;

/// Each rule with each seed.
pub fn rules(scenario: &Scenario, renting: &Renting, seeds: u64) -> Vec<OfRule> {
    let of_rule = |rule: RentRule| {
        let runs = (1..=seeds).map(|seed| {
            let mut run = world::run(scenario, renting, rule, seed);
            if seed > 1 {
                run.trace.clear();
            }
            run
        });
        OfRule {
            rule: rule.word().to_owned(),
            title: rule.title().to_owned(),
            runs: runs.collect(),
        }
    };
    let all = RentRule::ALL.into_iter();
    all.filter(|rule| *rule != RentRule::Stopped || renting.budget.is_some()).map(of_rule).collect()
}
