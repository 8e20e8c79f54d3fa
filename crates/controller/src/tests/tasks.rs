//! What the endless tasks report.

use perigee_model::tasks::TaskStatus;

use super::{Lab, wait_for};

async fn status(lab: &Lab, name: &str) -> TaskStatus {
    let client = super::api::client(lab).await;
    let all: Vec<TaskStatus> = client.get("/v1/tasks").await.expect("a list");
    all.into_iter().find(|task| task.name == name).expect("the task")
}

#[tokio::test]
async fn each_task_says_what_it_did_last_when_and_how_long_that_took() {
    let lab = Lab::up().await;
    let task = wait_for("a round of the monitor", async || {
        let task = status(&lab, "the monitor of the hosts").await;
        (task.did == "asked 2 hosts, of which 2 are up").then_some(task)
    })
    .await;
    assert!(task.rounds > 0 && task.ended_ms.is_some() && task.problem.is_empty(), "{task:?}");
    let page = crate::api::metrics_page(&lab.cluster).await.expect("a page");
    let figure = "perigee_task_failures_total{task=\"the monitor of the hosts\"} 0";
    assert!(page.contains(figure), "{page}");
}

#[tokio::test]
async fn a_task_whose_round_fails_says_why() {
    let lab = Lab::up().await;
    let key = "cleanups/broken";
    lab.cluster.records.put(key, &"no cleanup".to_owned()).await.expect("written");
    let task = wait_for("a failure of the cleaner", async || {
        let task = status(&lab, "the cleaner").await;
        (!task.problem.is_empty()).then_some(task)
    })
    .await;
    assert!(task.problem.contains(key) && task.did.is_empty() && task.failures > 0, "{task:?}");
    lab.cluster.records.remove(key).await.expect("removed");
    let task = wait_for("a good round", async || {
        let task = status(&lab, "the cleaner").await;
        task.problem.is_empty().then_some(task)
    })
    .await;
    let failure = task.last_failure.expect("the failure is remembered");
    assert!(failure.why.contains(key) && failure.at_ms > 0, "{failure:?}");
}
