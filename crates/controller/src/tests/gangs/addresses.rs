//! The networks of gangs, and their addresses.

use std::sync::atomic::Ordering;

use super::*;

#[tokio::test]
async fn a_gang_that_waits_for_addresses_holds_no_host() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let name = small_network(&lab).await;
    let network = NetworkKind::Cluster(name);
    let mut others = Vec::new();
    for _ in 0..3 {
        let one = JobSpec { network: network.clone(), ..gang(1) };
        others.push(lab.submit(one).await);
    }
    for id in &others {
        run_alone(&lab, &hosts, id).await;
    }
    let id = lab.submit(JobSpec { network, memory_bytes: 400 << 20, ..gang(3) }).await;
    let why = |job: &Job| job.reason.contains("of the 5 addresses of 10.7.0.0/29, 2 are free");
    let job = lab.wait_for_job(&id, "waiting", why).await;
    assert_eq!((job.state, job.members.len()), (JobState::Queued, 0), "{}", job.reason);
    // It would have taken this room.
    let mut meanwhile = Vec::new();
    for host in ["home1", "cloud1"] {
        let start = Start::Host(perigee_model::HostId::new(host).expect("a name"));
        meanwhile.push(lab.submit(JobSpec { start, memory_bytes: 700 << 20, ..gang(1) }).await);
    }
    for id in &meanwhile {
        run_alone(&lab, &hosts, id).await;
    }
    for id in others.iter().chain(&meanwhile) {
        jobs::intend(&lab.cluster, id, |intent| intent.cancel = true).await.expect("cancel");
    }
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
}

#[tokio::test]
async fn a_gang_that_waits_for_a_network_holds_no_host() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let other = small_network(&lab).await;
    lab.cluster.networks.counted.store(65_534, Ordering::SeqCst);
    let id = lab.submit(JobSpec { memory_bytes: 400 << 20, ..gang(3) }).await;
    let why = |job: &Job| job.reason.contains("it waits until a network is deleted");
    let job = lab.wait_for_job(&id, "waiting", why).await;
    assert_eq!((job.state, job.members.len()), (JobState::Queued, 0), "{}", job.reason);
    // It would have taken this room.
    for host in ["home1", "cloud1"] {
        let start = Start::Host(perigee_model::HostId::new(host).expect("a name"));
        let one = JobSpec { start, memory_bytes: 700 << 20, ..gang(1) };
        let one = lab.submit(one).await;
        run_alone(&lab, &hosts, &one).await;
        jobs::intend(&lab.cluster, &one, |intent| intent.cancel = true).await.expect("cancel");
    }
    networks::delete(&lab.cluster, &other).await.expect("nobody uses it");
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
}

#[tokio::test]
async fn the_networks_that_gangs_have_for_themselves_are_none_of_the_tenant_s() {
    let lab = Lab::up().await;
    let subnet: perigee_model::network::Subnet = "10.7.0.0/29".parse().expect("addresses");
    let new = |number: usize| {
        let name = format!("n{number}").parse().expect("a name");
        perigee_model::network::NewNetwork { name, subnet, nat: false }
    };
    let running = lab.submit(gang(2)).await;
    let hosts = [&lab.home, &lab.cloud];
    until(&lab, &hosts, &running, |_| Does::RunsOn, all_run).await;
    for number in 0..100 {
        networks::create(&lab.cluster, new(number)).await.expect("a network");
    }
    networks::create(&lab.cluster, new(100)).await.expect_err("too many");
    let id = lab.submit(gang(2)).await;
    let job = until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
}

#[tokio::test]
async fn a_gang_s_own_network_is_nobody_else_s() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let id = lab.submit(gang(2)).await;
    until(&lab, &hosts, &id, |_| Does::RunsOn, all_run).await;
    let network = NetworkKind::Cluster(networks::own_name(&id).expect("a name"));
    let vm = NewVm { network: network.clone(), ..persistent_vms::new_vm("home1") };
    let made = crate::vms::persistent::create(&lab.cluster, vm, "ann".to_owned()).await;
    let refused = made.expect_err("it goes with the job");
    assert!(refused.why.contains("is job g-0001's own"), "{refused}");
    let other = JobSpec { network, ..gang(1) };
    jobs::submit(&lab.cluster, other).await.expect_err("it goes with the job");
    let subnet = "10.7.0.0/24".parse().expect("addresses");
    let name: perigee_model::NetworkName = "sort-0007".parse().expect("a name");
    let new = perigee_model::network::NewNetwork { name, subnet, nat: false };
    let refused = networks::create(&lab.cluster, new).await.expect_err("a job's name");
    assert_eq!(refused.kind, ProblemKind::Invalid, "{refused}");
}

async fn small_network(lab: &Lab) -> perigee_model::NetworkName {
    let name: perigee_model::NetworkName = "tiny".parse().expect("a name");
    let subnet = "10.7.0.0/29".parse().expect("addresses");
    let new = perigee_model::network::NewNetwork { name: name.clone(), subnet, nat: false };
    networks::create(&lab.cluster, new).await.expect("a network");
    name
}

#[tokio::test]
async fn a_gang_in_a_named_network_leaves_it_there() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let name: perigee_model::NetworkName = "blue".parse().expect("a name");
    let subnet = "10.7.0.0/24".parse().expect("addresses");
    let new = perigee_model::network::NewNetwork { name: name.clone(), subnet, nat: false };
    networks::create(&lab.cluster, new).await.expect("a network");
    let id = lab.submit(JobSpec { network: NetworkKind::Cluster(name.clone()), ..gang(2) }).await;
    let running = |job: &Job| job.state == JobState::Running;
    until(&lab, &hosts, &id, |_| Does::RunsOn, running).await;
    let vm = member(&id, 1);
    let network = host_of(&hosts, &vm).inside().vms[&vm].report.spec.network.clone();
    assert!(matches!(network, VmNetwork::Cluster(card) if card.network == name));
    let shown = networks::info(&lab.cluster, &name).await.expect("a network");
    assert_eq!(shown.vms.len(), 2, "the gang itself is no VM: {shown:?}");
    networks::delete(&lab.cluster, &name).await.expect_err("it is used");
    until(&lab, &hosts, &id, |_| Does::Ends(0), |job| job.state.is_final()).await;
    networks::find(&lab.cluster, &name).await.expect("it stays");
}

#[tokio::test]
async fn two_gangs_in_a_small_network_never_wait_for_each_other_s_addresses() {
    let lab = Lab::up().await;
    let hosts = [&lab.home, &lab.cloud];
    let network = NetworkKind::Cluster(small_network(&lab).await);
    let few = JobSpec { network: network.clone(), ..gang(3) };
    let ids = [lab.submit(few.clone()).await, lab.submit(few).await];
    for id in &ids {
        let job = until(&lab, &hosts, id, |_| Does::Ends(0), |job| job.state.is_final()).await;
        assert_eq!(job.state, JobState::Succeeded, "{}", job.reason);
    }
    let many = JobSpec { network, memory_bytes: 64 << 20, ..gang(6) };
    let refused = jobs::submit(&lab.cluster, many).await.expect_err("it never fits");
    assert!(refused.why.contains("tiny has 5 addresses"), "{refused}");
}
