//! The outputs of gangs.

use super::*;

#[tokio::test]
async fn outputs_of_a_member_are_kept_for_as_long_as_those_of_its_gang() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let id = lab.submit(JobSpec { keep_outputs_s: Some(3600), ..gang(2) }).await;
    let does = |rank| if rank == 1 { Does::Ends(0) } else { Does::RunsOn };
    let early = |job: &Job| job.members.get(1).is_some_and(|one| one.state == JobState::Succeeded);
    until(&lab, &hosts, &id, does, early).await;
    let later = crate::cluster::now_ms() + 2 * 3600 * 1000;
    let tree = lab.dir.path().join("data/tenants/default/tree/jobs/g-0001");
    assert_eq!(crate::outputs::expire(&lab.cluster, later).await.expect("a search"), 0);
    assert!(tree.join("rank-1/output/who").exists(), "the job has not ended");
    until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert_eq!(crate::outputs::expire(&lab.cluster, later).await.expect("a search"), 1);
    assert!(!tree.exists());
    assert_eq!(lab.job(&id).await.outputs, None);
}

#[tokio::test]
async fn a_place_for_outputs_is_refused_that_has_no_room_for_the_names_of_the_ranks() {
    let lab = Lab::up().await;
    for (names, length) in [(64, 1), (16, 255)] {
        let deep = vec!["a".repeat(length); names].join("/");
        let to = Some(format!("repo://default/{deep}"));
        let spec = JobSpec { outputs_to: to, ..gang(2) };
        crate::outputs::check(&lab.cluster, &JobSpec { count: 1, ..spec.clone() })
            .await
            .expect("room");
        let refused = jobs::submit(&lab.cluster, spec).await.expect_err("no room");
        assert_eq!(refused.kind, ProblemKind::Invalid, "{refused}");
    }
}

#[tokio::test]
async fn outputs_that_could_not_go_where_the_file_says_go_with_their_gang() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let id =
        lab.submit(JobSpec { outputs_to: Some("repo://default/results".into()), ..gang(2) }).await;
    until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    let tree = lab.dir.path().join("data/tenants/default/tree");
    std::fs::create_dir(tree.join("results")).expect("a directory");
    std::fs::write(tree.join("results/rank-1"), "in the way").expect("a file");
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
    assert!(job.reason.contains("repo://default/results/rank-1 is a file"), "{}", job.reason);
    assert!(tree.join("jobs/g-0001/rank-1/output/who").exists());
    jobs::delete(&lab.cluster, &id, false).await.expect("delete");
    assert!(!tree.join("jobs").exists(), "nothing of it is left among the jobs");
    assert!(tree.join("results/rank-0/output/who").exists(), "what the file names is kept");
}
