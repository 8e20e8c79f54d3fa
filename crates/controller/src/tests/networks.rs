//! Networks of tenants.

use perigee_model::network::NewNetwork;
use perigee_model::vm::{
    MigrationPhase, MigrationReport, NetworkKind, VmNetwork, VmReport, VmStatus,
};
use perigee_model::{HostId, MigrationId, NetworkName, ProblemKind};

use super::{Access, JobSpec, Lab, spec, vm_of};
use crate::jobs;
use crate::networks::{self, create, delete, find};

fn name(text: &str) -> NetworkName {
    NetworkName::new(text).expect("a name")
}

#[tokio::test]
async fn a_network_is_its_tenant_s_and_stays_while_vms_use_it() {
    let lab = Lab::up().await;
    let new = |text: &str| NewNetwork {
        name: name(text),
        subnet: "10.7.0.0/24".parse().expect("addresses"),
        nat: false,
    };
    let blue = create(&lab.cluster, new("blue")).await.expect("a network");
    assert_eq!((blue.mtu, blue.gateway.to_string().as_str()), (1370, "10.7.0.1"));
    let twice = create(&lab.cluster, new("blue")).await.expect_err("it is there");
    assert_eq!(twice.kind, ProblemKind::Conflict);
    let word = create(&lab.cluster, new("user")).await.expect_err("a word");
    assert_eq!(word.kind, ProblemKind::Invalid);
    let other = create(&lab.cluster, new("acme~blue")).await.expect("another tenant's");
    assert_ne!(blue.vni, other.vni);
    let network = NetworkKind::Cluster(name("blue"));
    let spec = JobSpec { network, ..spec(Access::Read) };
    let id = lab.submit(spec).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    let has = lab.home.inside().vms[&vm].report.spec.network.clone();
    let VmNetwork::Cluster(card) = has else { panic!("{has:?}") };
    assert_eq!((card.address.to_string().as_str(), card.vni), ("10.7.0.2", blue.vni));
    let used = delete(&lab.cluster, &name("blue")).await.expect_err("a VM uses it");
    assert_eq!(used.kind, ProblemKind::Conflict);
    assert!(used.why.contains(vm.as_str()), "{used}");
    delete(&lab.cluster, &name("acme~blue")).await.expect("nobody uses it");
    let gone = find(&lab.cluster, &name("acme~blue")).await.expect_err("it was deleted");
    assert_eq!(gone.kind, ProblemKind::NotFound);
}

/// In the pause of a migration what is sent to the VM waits for it at its destination.
#[tokio::test]
async fn a_vm_that_moves_counts_as_where_it_runs_or_is_about_to() {
    let lab = Lab::up().await;
    let id = lab.submit(spec(Access::Read)).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    let record = jobs::of_vm(&lab.cluster, &vm).expect("a record");
    let report = lab.home.inside().vms[&vm].report.clone();
    let (home, cloud) = (lab.home.id.clone(), lab.cloud.id.clone());
    let at = |seen: &[(HostId, VmReport)]| networks::place_of(seen, &record, &[], None);
    assert_eq!(at(&[]), record.job.host, "as it was placed");
    let mut source = report.clone();
    source.status = VmStatus::Paused;
    let migration = MigrationId::new("m").expect("a name");
    source.migration = Some(MigrationReport::new(migration, 1, MigrationPhase::Copying));
    let mut there = report.clone();
    there.status = VmStatus::Incoming;
    there.spec.start.migration = 1;
    let both = |there: &VmReport| [(home.clone(), source.clone()), (cloud.clone(), there.clone())];
    assert_eq!(at(&both(&there)), Some(home.clone()), "it has not arrived");
    there.status = VmStatus::Running;
    assert_eq!(
        at(&both(&there)),
        Some(home.clone()),
        "a host to which it never was sent says nothing"
    );
    let after = networks::place_of(&both(&there), &record, &[], Some(&cloud));
    assert_eq!(after, Some(cloud), "its last start counts");
}
