//! A gang leaves a host that is drained as a whole.

use perigee_model::drain::DrainHost;

use super::moves::{Way, carry};
use super::*;
use crate::drain;

#[tokio::test]
async fn the_vms_of_a_gang_leave_a_drained_host_in_one_move() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    for host in hosts {
        host.inside().pool_free_bytes = Some(1 << 40);
    }
    let start = Start::Site("home".parse().expect("a name"));
    let id = lab.submit(JobSpec { start, may_migrate: true, ..gang(2) }).await;
    until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    let (by, ask) = ("ann".to_owned(), DrainHost::default());
    drain::drain(&lab.cluster, &lab.home.id, by, ask).await.expect("drained");
    let begun = Instant::now();
    loop {
        play(&hosts, &|_| Does::RunsOn);
        carry(&hosts, &|_, _| Way::Arrives);
        let host = crate::hosts::info(&lab.cluster, &lab.home.id).await.expect("the host");
        let drain = host.drain.expect("it is drained");
        if drain.is_drained() {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "it does not come to that: {drain:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let job = lab.job(&id).await;
    assert_eq!(job.gang_move.expect("one move").number, 1);
    assert!(job.members.iter().all(|one| one.host.as_ref() == Some(&lab.cloud.id)));
    assert!(!lab.home.inside().volumes.keys().any(|name| name.as_str().starts_with("g-0001")));
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
    lab.wait_for_clean_hosts().await;
}
