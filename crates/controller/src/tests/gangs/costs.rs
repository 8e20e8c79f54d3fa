//! What a gang costs.

use perigee_model::budget::Spending;
use perigee_model::money::Money;

use super::*;
use crate::tests::money::{PRICES, lab_with};

#[tokio::test]
async fn a_gang_whose_price_is_not_known_any_more_costs_once_what_was_reserved() {
    let lab = lab_with(PRICES).await;
    let hosts = [&lab.home, &lab.cloud];
    let start = Start::Site("cloud".parse().expect("a name"));
    let new = JobSpec { start, root_bytes: Some(1 << 30), timeout_s: Some(600), ..gang(2) };
    let id = lab.submit(new).await;
    until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    std::fs::write(lab.dir.path().join("prices.yaml"), "max-age: 30d\n").expect("write");
    wait_for("no prices", async || {
        lab.cluster.prices.now(&lab.cluster.rentals).is_none().then_some(())
    })
    .await;
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
    let cost = job.cost.expect("a cost");
    assert!(cost.predicted.high > Money::ZERO, "{cost:?}");
    assert_eq!(cost.spent, Some(cost.predicted.high));
    let spent = cost.predicted.high;
    assert_eq!(lab.spending(), Spending { spent, reserved: Money::ZERO });
}
