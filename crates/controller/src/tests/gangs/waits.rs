//! What a plan says of a gang whose VMs have no room together now.

use super::*;
use crate::rentals;

/// Each host has room for two VMs of the gang, the one with the VM without a job for one.
#[tokio::test]
async fn a_gang_is_planned_beside_vms_without_a_job_and_waits_for_room_for_all_of_its_vms() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let vm =
        NewVm { memory_bytes: 400 << 20, volumes: Vec::new(), ..persistent_vms::new_vm("home1") };
    lab.make_vm(vm).await;
    lab.runs().await;
    let start = Start::Host(lab.cloud.id.clone());
    let busy = lab.submit(JobSpec { start, memory_bytes: 600 << 20, ..gang(1) }).await;
    run_alone(&lab, &hosts, &busy).await;
    let spec = JobSpec { memory_bytes: 400 << 20, ..gang(3) };
    let planned = rentals::plan(&lab.cluster, &spec).await.expect("a plan");
    let chosen = planned.plan.chosen().expect("a choice");
    let mut at: Vec<&str> = chosen.hosts.iter().map(|host| host.as_str()).collect();
    at.sort_unstable();
    assert_eq!(at, ["cloud1", "cloud1", "home1"]);
    let wait = planned.wait_of(chosen).expect("it has no room now");
    // How long the job at cloud1 takes is not known.
    assert!(wait.wait.is_none(), "{wait:?}");
    assert!(wait.why.starts_with("not known when all of its VMs have room"), "{wait:?}");
    let more = JobSpec { count: 4, ..spec };
    let refused = rentals::plan(&lab.cluster, &more).await.expect_err("never at once");
    assert!(refused.why.contains("room for 3"), "{refused}");
}

#[tokio::test]
async fn how_long_a_gang_takes_that_waits_is_known_from_its_own_runs() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let spec = JobSpec { memory_bytes: 600 << 20, ..gang(2) };
    let first = lab.submit(spec.clone()).await;
    until(&lab, &hosts, &first, |_| Does::Ends(0), |job| job.state.is_final()).await;
    let second = lab.submit(spec.clone()).await;
    until(&lab, &hosts, &second, |_| Does::RunsOn, all_run).await;
    let third = lab.submit(spec).await;
    lab.wait_for_job(&third, "waiting", |job| !job.reason.is_empty()).await;
    let behind = JobSpec { name: "behind".to_owned(), memory_bytes: 600 << 20, ..gang(1) };
    let planned = rentals::plan(&lab.cluster, &behind).await.expect("a plan");
    let wait = planned.wait_of(planned.plan.chosen().expect("a choice")).expect("it waits");
    assert!(!wait.why.contains("how long"), "{wait:?}");
    // Without a run of its own.
    let other = JobSpec { name: "other".to_owned(), memory_bytes: 600 << 20, ..gang(2) };
    let other = lab.submit(other).await;
    lab.wait_for_job(&other, "waiting", |job| !job.reason.is_empty()).await;
    let planned = rentals::plan(&lab.cluster, &behind).await.expect("a plan");
    let wait = planned.wait_of(planned.plan.chosen().expect("a choice")).expect("it waits");
    assert!(wait.why.contains("how long job other-0001 takes"), "{wait:?}");
}
