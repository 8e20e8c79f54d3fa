//! A gang leaves a host that is drained as a whole.

use perigee_model::HostId;
use perigee_model::drain::DrainHost;
use perigee_model::volume_move::VolumesOnMove;

use super::moves::{Way, carry};
use super::*;
use crate::drain;
use crate::records::{GangMoveRequest, JobIntent, job_intent_key};

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

async fn asked(lab: &Lab, id: &JobId) -> Option<(u64, GangMoveRequest)> {
    let asked = lab.cluster.records.read::<JobIntent>(&job_intent_key(id)).await;
    asked.expect("the store").and_then(|asked| asked.move_gang)
}

/// The host to which they would go does not answer, so their move has not begun.
#[tokio::test]
async fn a_gang_that_has_not_begun_to_leave_stays_when_the_drain_of_its_host_is_called_off() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let start = Start::Site("home".parse().expect("a name"));
    let id = lab.submit(JobSpec { start, may_migrate: true, ..gang(2) }).await;
    until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    unreachable(&lab, &lab.cloud).await;
    let leave = |old: Option<JobIntent>| {
        let to: Vec<HostId> = vec![lab.cloud.id.clone(); 2];
        let request = GangMoveRequest::To {
            hosts: to,
            drains: Some(lab.home.id.clone()),
            volumes: VolumesOnMove::Stay,
        };
        JobIntent { move_gang: Some((1, request)), ..old.unwrap_or_default() }
    };
    lab.cluster.records.update(&job_intent_key(&id), leave).await.expect("asked");
    drain::undrain(&lab.cluster, &lab.cloud.id).await.expect("another host");
    assert_eq!(asked(&lab, &id).await.map(|(number, _)| number), Some(1), "it is not of that host");
    drain::undrain(&lab.cluster, &lab.home.id).await.expect("called off");
    assert_eq!(asked(&lab, &id).await, Some((2, GangMoveRequest::Stay)));
    let job = until(&lab, &hosts, &id, |_| Does::RunsOn, |job| job.gang_move.is_some()).await;
    let of = job.gang_move.expect("it was asked for");
    assert!(!of.is_open() && of.undone == "cancelled on request", "{of:?}");
    assert!(job.members.iter().all(|one| one.host.as_ref() == Some(&lab.home.id)));
    assert!(job.migrations.is_empty(), "{:?}", job.migrations);
}
