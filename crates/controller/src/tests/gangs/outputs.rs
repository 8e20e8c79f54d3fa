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
    lab.cluster.clock.pretend_passed(Duration::from_secs(2 * 3600));
    let tree = lab.dir.path().join("data/tenants/default/tree/jobs/g-0001");
    assert_eq!(crate::files::outputs::expire(&lab.cluster).await.expect("a search"), 0);
    assert!(tree.join("rank-1/output/who").exists(), "the job has not ended");
    lab.cluster.clock.pretend_set(-2 * 3600 * 1000);
    until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    lab.cluster.clock.pretend_passed(Duration::from_secs(2 * 3600));
    assert_eq!(crate::files::outputs::expire(&lab.cluster).await.expect("a search"), 1);
    assert!(!tree.exists());
    assert_eq!(lab.job(&id).await.outputs, None);
}

#[tokio::test]
async fn a_member_whose_vm_ends_gives_its_outputs_as_the_others_do() {
    let mut lab = Lab::up().await;
    lab.supervisor.stop().await;
    let (cancel_deadline, collect_deadline) = (PATIENCE, PATIENCE);
    lab.start_controller(Timing { cancel_deadline, collect_deadline, ..TIMING }).await;
    let hosts = [&lab.home, &lab.cloud];
    let id = lab.submit(gang(2)).await;
    until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    let vm = member(&id, 1);
    for host in hosts {
        if let Some(ended) = host.inside().vms.get_mut(&vm) {
            ended.report.status = VmStatus::Gone;
        }
    }
    let job = until(&lab, &hosts, &id, |_| Does::RunsOn, |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Failed);
    assert!(job.reason.starts_with("rank 1: the VM ended"), "{}", job.reason);
    for rank in 0..2 {
        let tree = lab.dir.path().join("data/tenants/default/tree/jobs/g-0001");
        assert!(tree.join(format!("rank-{rank}/output/who")).exists(), "rank {rank}");
    }
    assert_eq!((starts(&hosts, &vm), starts(&hosts, &member(&id, 0))), (2, 1));
}

#[tokio::test]
async fn a_place_for_outputs_is_refused_that_has_no_room_for_the_names_of_the_ranks() {
    let lab = Lab::up().await;
    for (names, length) in [(64, 1), (16, 255)] {
        let deep = vec!["a".repeat(length); names].join("/");
        let to = Some(format!("repo://default/{deep}"));
        let spec = JobSpec { outputs_to: to, ..gang(2) };
        crate::files::outputs::check(&lab.cluster, &JobSpec { count: 1, ..spec.clone() })
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
