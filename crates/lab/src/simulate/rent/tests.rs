//! What rented hosts cost in a simulation, and what the rules do.

use super::rules::RentRule;
use super::world::run;
use crate::simulate::outcome::Run;
use crate::simulate::scenario::{self, Scenario};

const OFFER: &str =
    "{kind: k, cpus: 8, memory: 32GiB, price: $0.40, egress: $0.09, kvm: true, boot: 60s}";

fn scenario(hours: u64, jobs: &str, more: &str) -> Scenario {
    let text = format!(
        "title: T\nabout: A\nhours: {hours}\nhosts: 2\ncpus: 4\nmemory: 16GiB\nvms: 0\nlook: 60s\nrent:\n  jobs: [{jobs}]\n  \
         offers: [{OFFER}]\n{more}"
    );
    scenario::parse(&text, "s.yaml").expect("a scenario")
}

fn simulated(scenario: &Scenario, rule: RentRule) -> Run {
    let mut run = run(scenario, scenario.rent.as_ref().expect("it rents"), rule, 3);
    run.decided_s.clear();
    run
}

const BUSY: &str = "{per-hour: 40, cpus: 2, memory: 2GiB, compute: 20m, waiting-costs: $1}";

#[test]
fn a_seed_gives_the_same_run_again_and_all_jobs_end() {
    let busy = scenario(2, BUSY, "");
    for rule in RentRule::ALL {
        let run = simulated(&busy, rule);
        assert_eq!(run, simulated(&busy, rule), "{}", rule.word());
        assert_eq!(run.ended, 80, "{}", rule.word());
    }
}

#[test]
fn who_never_rents_pays_only_by_waiting() {
    let bill = simulated(&scenario(2, BUSY, ""), RentRule::Never).bill.expect("a bill");
    assert!(
        bill.rented == 0 && bill.machines + bill.egress <= 0.0 && bill.waiting > 0.0,
        "{bill:?}"
    );
}

#[test]
fn dear_waiting_is_worth_hosts_and_cheap_waiting_is_not() {
    let all_in = |costs: &str, rule| {
        let jobs = BUSY.replace("$1}", costs);
        simulated(&scenario(4, &jobs, ""), rule).bill.expect("a bill")
    };
    let (dear, never) = (all_in("$5}", RentRule::Perigee), all_in("$5}", RentRule::Never));
    assert!(dear.rented > 0 && dear.all_in() < never.all_in(), "{dear:?} {never:?}");
    assert_eq!(all_in("$0.000001}", RentRule::Perigee).rented, 0);
}

#[test]
fn the_budget_is_never_overspent() {
    for budget in ["$0.10", "$1", "$3"] {
        let busy = scenario(
            4,
            &BUSY.replace("$1}", "$9, writes: 64MiB}"),
            &format!("  budget: {budget}\n"),
        );
        let bill = simulated(&busy, RentRule::Perigee).bill.expect("a bill");
        assert!(bill.over_budget <= 0.0, "{budget}: {bill:?}");
    }
}

#[test]
fn confined_data_stay_and_jobs_without_kvm_are_asked_for() {
    let confined = BUSY.replace("$1}", "$9, confined: true}");
    for rule in RentRule::ALL {
        let bill = simulated(&scenario(1, &confined, ""), rule).bill.expect("a bill");
        assert_eq!(bill.rented, 0, "{}", rule.word());
    }
}

#[test]
fn an_offer_without_a_price_is_never_rented() {
    let jobs = BUSY.replace("$1}", "$9}");
    let text = format!(
        "title: T\nabout: A\nhours: 1\nhosts: 2\ncpus: 4\nvms: 0\nlook: 60s\nrent:\n  jobs: [{jobs}]\n  offers: [{{kind: k, cpus: 8, kvm: true}}]\n"
    );
    let scenario = scenario::parse(&text, "s.yaml").expect("a scenario");
    for rule in RentRule::ALL {
        assert_eq!(simulated(&scenario, rule).bill.expect("a bill").rented, 0, "{}", rule.word());
    }
}

#[test]
fn what_is_wrong_is_named_with_its_line() {
    for (line, said) in [
        ("  jobs: []", "is missing"),
        ("  offers: []", "is missing"),
        ("  refused: 1\n  jobs: []\n  offers: []", "less than 1"),
        ("  jobs: [{waiting-costs: much}]\n  offers: []", "not an amount of money"),
        ("  jobs: []\n  offers: [{kvm: perhaps}]", "true or false"),
    ] {
        let text = format!("title: T\nabout: A\nvms: 0\nrent:\n{line}\n");
        let shown = format!("{:?}", scenario::parse(&text, "s.yaml").expect_err(line));
        assert!(shown.contains(said), "{line}: {shown}");
    }
}
