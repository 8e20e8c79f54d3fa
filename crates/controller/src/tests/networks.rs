//! Networks of tenants.

use std::time::Duration;

use perigee_model::drain::{DrainHost, DrainedKind};
use perigee_model::guest::GuestBody;
use perigee_model::job::{JobState, Start};
use perigee_model::network::NewNetwork;
use perigee_model::vm::{
    HostAddresses, MigrationPhase, MigrationReport, NetworkKind, VmNetwork, VmReport, VmStatus,
};
use perigee_model::{HostId, JobId, MigrationId, NetworkName, ProblemKind};
use tokio::time::sleep;

use super::fake::FakeHost;
use super::{Access, JobSpec, Lab, spec, vm_of, wait_for};
use crate::cluster::Settings;
use crate::networks::{self, create, delete, find};
use crate::records::HostRecord;
use crate::{drain, hosts, jobs, migration};

fn name(text: &str) -> NetworkName {
    NetworkName::new(text).expect("a name")
}

fn new(text: &str) -> NewNetwork {
    NewNetwork { name: name(text), subnet: "10.7.0.0/24".parse().expect("addresses"), nat: false }
}

#[tokio::test]
async fn a_network_is_its_tenant_s_and_stays_while_vms_use_it() {
    let lab = Lab::up().await;
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

#[tokio::test]
async fn a_network_is_not_deleted_under_a_job_that_comes_at_the_same_instant() {
    let lab = Lab::up().await;
    for round in 0..8 {
        let text = format!("blue{round}");
        let network = name(&text);
        create(&lab.cluster, new(&text)).await.expect("a network");
        let kind = NetworkKind::Cluster(network.clone());
        let job = JobSpec { name: format!("j{round}"), network: kind, ..spec(Access::Read) };
        let cluster = lab.cluster.clone();
        let submitted = tokio::spawn(async move { jobs::submit(&cluster, job).await });
        for _ in 0..round * 8 {
            tokio::task::yield_now().await;
        }
        let deleted = delete(&lab.cluster, &network).await;
        match (submitted.await.expect("no panic"), deleted) {
            (Ok(_), Err(used)) => assert_eq!(used.kind, ProblemKind::Conflict, "{used}"),
            (Err(gone), Ok(())) => assert_eq!(gone.kind, ProblemKind::NotFound, "{gone}"),
            both => panic!("{both:?}"),
        }
    }
}

/// In the pause of a migration what is sent to the VM waits for it at its destination.
#[tokio::test]
async fn a_vm_that_moves_counts_as_where_it_runs_or_is_about_to() {
    let lab = Lab::up().await;
    let id = lab.submit(spec(Access::Read)).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    let record = lab.cluster.index.of_vm(&vm).expect("a record");
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

/// Placed only where it can be; and a host that can't any more does not end the job.
#[tokio::test]
async fn a_job_in_a_network_waits_for_a_host_that_can_have_networks() {
    let lab = Lab::up().await;
    create(&lab.cluster, new("blue")).await.expect("a network");
    let says = async |host: &FakeHost, why: Option<&str>| {
        host.inside().no_networks = why.map(str::to_owned);
        wait_for("the report", async || {
            let report = lab.cluster.hosts.report(&host.id)?;
            (report.no_networks.as_deref() == why).then_some(())
        })
        .await;
    };
    says(&lab.home, Some("dnsmasq is not installed")).await;
    says(&lab.cloud, Some("wg took longer than 10 s")).await;
    let network = NetworkKind::Cluster(name("blue"));
    let (start, volumes) = (Start::Anywhere, Vec::new());
    let spec = JobSpec { network, start, volumes, ..spec(Access::Read) };
    let id = lab.submit(spec).await;
    wait_for("the reason", async || {
        lab.job(&id)
            .await
            .reason
            .contains("a host that can have VMs in networks such as its own")
            .then_some(())
    })
    .await;
    let others = lab.submit(super::spec(Access::Read)).await;
    lab.wait_for_vm(&lab.home, &vm_of(&others)).await;
    says(&lab.cloud, None).await;
    lab.wait_for_vm(&lab.cloud, &vm_of(&id)).await;
    // And it does not move to one that can't.
    let record = lab.cluster.index.of_vm(&vm_of(&id)).expect("a record");
    let why = networks::refusal(&lab.cluster, &lab.home.id, &record.job.spec.network);
    assert_eq!(why.as_deref(), Some("dnsmasq is not installed"));
    let request = migration::Request {
        to: lab.home.id.clone(),
        reason: String::new(),
        job_progress: None,
        volumes: Default::default(),
    };
    wait_for("the refusal", async || {
        let record = lab.cluster.index.of_vm(&vm_of(&id))?;
        let asked = migration::request(&lab.cluster, &record, request.clone()).await;
        asked.expect_err("it can't").why.contains("dnsmasq").then_some(())
    })
    .await;
}

async fn blue_has_vms_at_both(lab: &Lab) {
    let network = NetworkKind::Cluster(name("blue"));
    for host in [&lab.home, &lab.cloud] {
        let (network, volumes) = (network.clone(), Vec::new());
        let start = Start::Host(host.id.clone());
        let id = lab.submit(JobSpec { network, start, volumes, ..spec(Access::Read) }).await;
        lab.wait_for_vm(host, &vm_of(&id)).await;
    }
}

#[tokio::test]
async fn a_gateway_leaves_a_host_that_can_t_have_networks_any_more() {
    let lab = Lab::up().await;
    create(&lab.cluster, new("blue")).await.expect("a network");
    blue_has_vms_at_both(&lab).await;
    let gateway = async || find(&lab.cluster, &name("blue")).await.ok()?.gateway;
    let first = wait_for("a gateway", gateway).await;
    let host = if first == lab.home.id { &lab.home } else { &lab.cloud };
    host.inside().no_networks = Some("dnsmasq is not installed".to_owned());
    wait_for("another gateway", async || gateway().await.filter(|host| *host != first)).await;
}

/// Its VMs may stay there: their jobs say `move: never`.
#[tokio::test]
async fn a_gateway_leaves_a_host_that_is_drained() {
    let lab = Lab::up().await;
    create(&lab.cluster, new("blue")).await.expect("a network");
    blue_has_vms_at_both(&lab).await;
    let gateway = async || find(&lab.cluster, &name("blue")).await.ok()?.gateway;
    let first = wait_for("a gateway", gateway).await;
    let ask = DrainHost::default();
    drain::drain(&lab.cluster, &first, "ann".to_owned(), ask).await.expect("a drain");
    wait_for("another gateway", async || gateway().await.filter(|host| *host != first)).await;
    wait_for("only the VM to be left", async || {
        let left = hosts::info(&lab.cluster, &first).await.ok()?.drain?.left?;
        left.iter().all(|step| step.kind != DrainedKind::Network).then_some(())
    })
    .await;
}

/// Until now only a host that can't have any networks lost its gateways.
#[tokio::test]
async fn a_gateway_that_does_not_start_goes_to_another_host_and_not_to_and_fro() {
    let lab = Lab::up().await;
    let vni = create(&lab.cluster, new("blue")).await.expect("a network").vni;
    blue_has_vms_at_both(&lab).await;
    let gateway = async || find(&lab.cluster, &name("blue")).await.ok()?.gateway;
    let first = wait_for("a gateway", gateway).await;
    let [host, other] = match first == lab.home.id {
        true => [&lab.home, &lab.cloud],
        false => [&lab.cloud, &lab.home],
    };
    let says = async |host: &FakeHost, failing: &[u16]| {
        host.inside().failing_gateways = failing.to_vec();
        wait_for("the report", async || {
            let report = lab.cluster.hosts.report(&host.id)?;
            (report.failing_gateways == failing).then_some(())
        })
        .await;
    };
    says(host, &[vni + 1]).await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(gateway().await, Some(first.clone()), "another network's");
    says(host, &[vni]).await;
    wait_for("another gateway", async || gateway().await.filter(|host| *host != first)).await;
    says(host, &[]).await;
    says(other, &[vni]).await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(gateway().await, Some(other.id.clone()), "it has failed at the other one lately");
}

/// A job that says nothing of a card has one where its host can, and it moves only to hosts that can.
#[tokio::test]
async fn a_vm_has_a_card_by_default_where_its_host_can() {
    let lab = Lab::up().await;
    let says = async |host: &FakeHost, why: Option<&str>| {
        host.inside().no_user_networks = why.map(str::to_owned);
        wait_for("the report", async || {
            let report = lab.cluster.hosts.report(&host.id)?;
            (report.no_user_networks.as_deref() == why).then_some(())
        })
        .await;
    };
    let at = |host: &FakeHost| JobSpec {
        start: Start::Host(host.id.clone()),
        volumes: Vec::new(),
        memory_bytes: 128 << 20,
        ..spec(Access::Read)
    };
    let card_of = |host: &FakeHost, id: &JobId| {
        let inside = host.inside();
        inside.vms.get(&vm_of(id)).map(|vm| vm.report.spec.network.clone())
    };
    let with = lab.submit(JobSpec { start: Start::Anywhere, ..at(&lab.home) }).await;
    let (from, to) = wait_for("the VM", async || match card_of(&lab.home, &with) {
        Some(_) => Some((&lab.home, &lab.cloud)),
        None => card_of(&lab.cloud, &with).map(|_| (&lab.cloud, &lab.home)),
    })
    .await;
    assert_eq!(card_of(from, &with), Some(VmNetwork::User));
    // A host starts only so many VMs at a time.
    from.say(&vm_of(&with), GuestBody::Started);
    says(to, Some("passt is not installed")).await;
    let asked = wait_for("the refusal", async || {
        let record = lab.cluster.index.of_vm(&vm_of(&with))?;
        let request = migration::Request {
            to: to.id.clone(),
            reason: String::new(),
            job_progress: None,
            volumes: Default::default(),
        };
        let why =
            migration::request(&lab.cluster, &record, request).await.expect_err("it can't").why;
        why.contains("network card").then_some(why)
    })
    .await;
    assert!(asked.contains("passt is not installed"), "{asked}");
    says(to, None).await;
    says(&lab.cloud, Some("passt is not installed")).await;
    let without = lab.submit(at(&lab.cloud)).await;
    lab.wait_for_vm(&lab.cloud, &vm_of(&without)).await;
    assert_eq!(card_of(&lab.cloud, &without), Some(VmNetwork::None));
    lab.cloud.say(&vm_of(&without), GuestBody::Started);
    let wants = lab.submit(JobSpec { network: NetworkKind::User, ..at(&lab.cloud) }).await;
    let none = lab.submit(JobSpec { network: NetworkKind::None, ..at(&lab.home) }).await;
    lab.wait_for_vm(&lab.home, &vm_of(&none)).await;
    assert_eq!(card_of(&lab.home, &none), Some(VmNetwork::None));
    wait_for("the reason", async || {
        lab.job(&wants).await.reason.contains("passt is not installed").then_some(())
    })
    .await;
    says(&lab.cloud, None).await;
    lab.wait_for_vm(&lab.cloud, &vm_of(&wants)).await;
}

#[tokio::test]
async fn a_vm_starts_without_a_card_that_nobody_asked_for_where_it_can_t_be_made() {
    let lab = Lab::up().await;
    lab.home.inside().refuses_cards = true;
    let id = lab.submit(JobSpec { volumes: Vec::new(), ..spec(Access::Read) }).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    let network = lab.home.inside().vms[&vm_of(&id)].report.spec.network.clone();
    assert_eq!(network, VmNetwork::None);
}

/// The answer to its start was lost, and then its host can't make cards any more: the VM runs, so it stays.
#[tokio::test]
async fn a_vm_that_has_started_is_not_ended_because_its_host_can_have_no_more_cards() {
    let lab = Lab::up().await;
    lab.home.inside().loses_answers = true;
    let id = lab.submit(JobSpec { volumes: Vec::new(), ..spec(Access::Read) }).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    assert_eq!(lab.home.inside().vms[&vm].report.spec.network, VmNetwork::User);
    lab.home.inside().no_user_networks = Some("passt was removed".to_owned());
    wait_for("the report", async || {
        lab.cluster.hosts.report(&lab.home.id)?.no_user_networks.is_some().then_some(())
    })
    .await;
    lab.home.inside().loses_answers = false;
    lab.home.say(&vm, GuestBody::Started);
    lab.wait_for_state(&id, JobState::Running).await;
    assert_eq!(lab.home.inside().starts[&vm], 1);
}

/// It keeps its hardware address, and is only at hosts that have the bridge.
#[tokio::test]
async fn a_vm_is_in_a_bridge_where_the_operator_allows_it() {
    let lab = Lab::up().await;
    let kind: NetworkKind = "bridge:br0".parse().expect("a bridge");
    let at = JobSpec { start: Start::Anywhere, volumes: Vec::new(), ..spec(Access::Read) };
    let id = lab.submit(JobSpec { network: kind.clone(), ..at }).await;
    wait_for("the reason", async || {
        lab.job(&id).await.reason.contains("no bridge br0").then_some(())
    })
    .await;
    lab.cloud.inside().bridges.push("br0".parse().expect("a name"));
    lab.wait_for_vm(&lab.cloud, &vm_of(&id)).await;
    let card = lab.cloud.inside().vms[&vm_of(&id)].report.spec.network.clone();
    let record = lab.cluster.index.of_vm(&vm_of(&id)).expect("a record");
    assert_eq!(networks::of_vm(&record).expect("a card"), card);
    assert!(matches!(card, VmNetwork::Bridge(card) if card.bridge.as_str() == "br0"));
    let why = networks::refusal(&lab.cluster, &lab.home.id, &kind).expect("it has none");
    assert!(why.contains("--bridge"), "{why}");
}

/// One VM has a port of the cluster, and tenants have only those that the operator allows.
#[tokio::test]
async fn a_port_is_published_by_one_vm_in_a_network_with_a_way_out() {
    let lab = Lab::up_with(Settings { own_ports: vec![2022], ..Settings::default() }).await;
    let subnet = "10.7.0.0/24".parse().expect("addresses");
    for (text, nat) in [("blue", true), ("inner", false), ("acme~blue", true)] {
        create(&lab.cluster, NewNetwork { name: name(text), subnet, nat })
            .await
            .expect("a network");
    }
    let with = |job: &str, network: &str, publish: &str| JobSpec {
        name: job.to_owned(),
        network: NetworkKind::Cluster(name(network)),
        publish: vec![publish.parse().expect("ports")],
        ..spec(Access::Read)
    };
    let refused = async |spec: JobSpec| {
        let problem = jobs::check(&lab.cluster, &spec).await.expect_err("it can't");
        (problem.kind, problem.why)
    };
    let id = lab.submit(with("web", "blue", "8080:80")).await;
    let (kind, why) = refused(with("other", "blue", "8080:81")).await;
    assert_eq!((kind, why), (ProblemKind::Conflict, format!("VM {} publishes it", vm_of(&id))));
    jobs::check(&lab.cluster, &with("other", "blue", "8080:81/udp")).await.expect("it is free");
    assert_eq!(refused(with("a", "inner", "8081:80")).await.0, ProblemKind::Invalid);
    let (kind, why) = refused(with("acme~a", "acme~blue", "8081:80")).await;
    assert!(kind == ProblemKind::Forbidden && why.contains("28000-29999"), "{why}");
    // One tenant does not take them all.
    for number in 0..8 {
        let publish = (0..32).map(|n| format!("{}:80", 28_000 + 32 * number + n));
        let publish = publish.map(|one| one.parse().expect("ports")).collect();
        let name = format!("acme~m{number}");
        lab.submit(JobSpec { publish, ..with(&name, "acme~blue", "1:1") }).await;
    }
    let (kind, why) = refused(with("acme~z", "acme~blue", "29999:80")).await;
    assert!(kind == ProblemKind::Invalid && why.contains("256"), "{why}");
    jobs::check(&lab.cluster, &with("z", "blue", "29999:80")).await.expect("another tenant may");
    assert_eq!(refused(with("a", "blue", "2022:22")).await.0, ProblemKind::Conflict);
    assert_eq!(refused(with("a", "blue", "51871:1/udp")).await.0, ProblemKind::Conflict);
    // All come at once.
    let all = (0..8).map(|number| {
        let (cluster, spec) =
            (lab.cluster.clone(), with(&format!("r{number}"), "blue", "29000:80"));
        tokio::spawn(async move { jobs::submit(&cluster, spec).await })
    });
    let mut made = 0;
    for one in all.collect::<Vec<_>>() {
        match one.await.expect("no panic") {
            Ok(_) => made += 1,
            Err(problem) => assert_eq!(problem.kind, ProblemKind::Conflict, "{problem}"),
        }
    }
    assert_eq!(made, 1, "one of them has it, and the others know that they have not");
    let own = lab.home.addresses.agent_url.rsplit_once(':').expect("a port").1.to_owned();
    let (kind, why) = refused(with("a", "blue", &format!("{own}:80"))).await;
    assert!(kind == ProblemKind::Conflict && why.contains("hosts have it"), "{why}");
    wait_for("the port", async || {
        let inside = lab.home.inside();
        let network = inside.networks.networks.first()?;
        let address = network.members.first()?.address;
        let published = network.published.first()?;
        (published.address == address && published.publish.outside == 8080).then_some(())
    })
    .await;
}

/// Its clock was set back, or its store was. What the host knows is later than all that it is told.
#[tokio::test]
async fn a_host_is_told_what_is_new_also_when_the_clock_was_set_back() {
    let lab = Lab::up().await;
    let later = u64::MAX / 2;
    lab.home.inside().networks.made_ms = later;
    let second_card = std::net::Ipv4Addr::new(10, 99, 0, 77);
    lab.cloud.inside().addresses.push(second_card);
    create(&lab.cluster, new("blue")).await.expect("a network");
    let network = NetworkKind::Cluster(name("blue"));
    let id = lab.submit(JobSpec { network, ..spec(Access::Read) }).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    wait_for("the network", async || {
        let inside = lab.home.inside();
        let is_new = inside.networks.made_ms > later && inside.networks.networks.len() == 1;
        // Guests reach no address of another host.
        (is_new && inside.networks.hosts.contains(&second_card.into())).then_some(())
    })
    .await;
}

/// Until now, a controller that had just started told a list without the addresses of hosts that it had not heard yet.
#[tokio::test]
async fn guests_are_kept_from_a_host_that_a_new_controller_has_not_heard_yet() {
    let mut lab = Lab::up().await;
    let second_card = std::net::Ipv4Addr::new(10, 99, 0, 77);
    lab.cloud.inside().addresses.push(second_card);
    let told = async |lab: &Lab, later_than_ms, least: &[std::net::IpAddr]| {
        wait_for("the hosts to be told", async || {
            let networks = lab.home.inside().networks.clone();
            let has_least = least.iter().all(|address| networks.hosts.contains(address));
            (networks.made_ms > later_than_ms && has_least).then_some(networks)
        })
        .await
    };
    wait_for("its address to be kept", async || {
        let record: Option<HostRecord> =
            lab.cluster.records.read(&format!("hosts/{}", lab.cloud.id)).await.expect("read");
        (record?.interfaces == [second_card]).then_some(())
    })
    .await;
    lab.cloud.inside().down = true;
    let before_ms = lab.home.inside().networks.made_ms;
    lab.restart_controller().await;
    let networks = told(&lab, before_ms, &[]).await;
    assert!(networks.hosts.contains(&second_card.into()), "{networks:?}");
    // Its daemons have moved, and it has not reported since.
    let nbd_addr = "192.0.2.9:10809".to_owned();
    let addresses = HostAddresses { nbd_addr, ..lab.cloud.addresses.clone() };
    hosts::register(&lab.cluster, &lab.cloud.id, addresses).await.expect("registered");
    let moved = "192.0.2.9".parse().expect("an address");
    // A list that was on its way when the host registered has the old one.
    let networks = told(&lab, networks.made_ms, &[moved]).await;
    assert!(networks.hosts.contains(&second_card.into()), "{networks:?}");
}
