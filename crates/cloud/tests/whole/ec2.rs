//! EC2 as moto plays it.

use std::sync::Arc;

use perigee_cloud::{CloudErrorKind, Provider, Snapshots, providers};
use perigee_model::kept::{NewSnapshot, PoolDisk, SnapshotState};
use perigee_model::rental::{Instance, InstanceState, NewInstance, Notice};
use tempfile::TempDir;

use crate::faults::{Fault, Faults};
use crate::moto::{IMAGE, Moto};
use crate::new_instance;

const SECRET: &str = "a-secret-that-nobody-sees";

struct Cloud {
    ec2: Arc<dyn Provider>,
    faults: Faults,
    _moto: Moto,
    _keys: TempDir,
}

async fn cloud() -> Cloud {
    let moto = Moto::start().await;
    let faults = Faults::before(moto.port).await;
    let keys = tempfile::tempdir().expect("a directory");
    let file = keys.path().join("keys");
    let lines = format!("[default]\naws_access_key_id = test\naws_secret_access_key = {SECRET}\n");
    std::fs::write(&file, lines).expect("it is written");
    let text = format!(
        "amazon:\n  ec2:\n    region: eu-central-1\n    kinds: [m5.large, m5.metal, m6g.large, c8i.large]\n    \
         prices: {{m5.large: $0.115/h, m5.metal: 0/h}}\n    as-of: 2026-11-29\n    egress: $0.09/GiB\n    \
         credentials: {}\n    endpoint: {}\n  \
         snapshots: {{price: $0.05/GiB-month, as-of: 2026-11-29}}\n",
        file.display(),
        faults.endpoint
    );
    let ec2 = providers(&text).expect("a provider").pop().expect("one");
    Cloud { ec2, faults, _moto: moto, _keys: keys }
}

fn new(rental: &str) -> NewInstance {
    NewInstance {
        kind: "m5.large".to_owned(),
        zone: "eu-central-1a".to_owned(),
        image: IMAGE.to_owned(),
        disk_bytes: 30 << 30,
        ..new_instance(rental)
    }
}

impl Cloud {
    async fn make(&self, new: &NewInstance) -> Instance {
        self.ec2.create(new).await.expect("an instance")
    }

    fn snapshots(&self) -> &dyn Snapshots {
        self.ec2.snapshots().expect("EC2 keeps disks")
    }

    /// Those that cost money.
    async fn living(&self) -> Vec<Instance> {
        let mut all = self.ec2.list("c1").await.expect("a list");
        all.retain(|instance| {
            !matches!(instance.state, InstanceState::Gone | InstanceState::Ending)
        });
        all
    }
}

#[tokio::test]
async fn a_host_is_rented_listed_on_all_pages_and_given_back() {
    let cloud = cloud().await;
    let mut made = Vec::new();
    for number in 0..5 {
        made.push(cloud.make(&new(&format!("r{number}"))).await);
    }
    let theirs = NewInstance { cluster: "c2".to_owned(), ..new("theirs") };
    let theirs = cloud.make(&theirs).await;
    let living = cloud.living().await;
    assert_eq!(living.len(), 5, "{living:?}");
    assert!(cloud.faults.seen("DescribeInstances").len() >= 3, "there are several pages");
    for instance in &made {
        let listed = living.iter().find(|one| one.id == instance.id).expect("it is listed");
        assert_eq!(listed.rental, instance.rental);
        assert_eq!((listed.kind.as_str(), listed.zone.as_str()), ("m5.large", "eu-central-1a"));
        assert_eq!((listed.state, listed.spot), (InstanceState::Running, false));
        assert!(listed.address.is_some() && listed.started_unix_s.is_some(), "{listed:?}");
        cloud.ec2.end(&instance.id).await.expect("its end");
        cloud.ec2.end(&instance.id).await.expect("it may be gone already");
    }
    assert_eq!(cloud.living().await, []);
    cloud.ec2.end("i-0123456789abcdef0").await.expect("nobody knows it");
    let others = cloud.ec2.list("c2").await.expect("a list");
    assert_eq!(others.len(), 1);
    assert_eq!((&others[0].id, others[0].state), (&theirs.id, InstanceState::Running));
}

fn with_pool(rental: &str, snapshot: Option<String>) -> NewInstance {
    let pool = PoolDisk { bytes: 34 << 30, snapshot };
    NewInstance { disk_bytes: 50 << 30, pool: Some(pool), ..new(rental) }
}

fn of(instance: &Instance, rental: &str) -> NewSnapshot {
    NewSnapshot {
        rental: rental.to_owned(),
        cluster: "c1".to_owned(),
        instance: instance.id.clone(),
    }
}

#[tokio::test]
async fn the_disk_of_a_pool_is_kept_and_the_next_host_has_one_made_of_it() {
    let cloud = cloud().await;
    let first = cloud.make(&with_pool("r1", None)).await;
    let taken = cloud.snapshots().take(&of(&first, "r1")).await.expect("a snapshot");
    cloud.ec2.end(&first.id).await.expect("its end");
    let listed = cloud.snapshots().list("c1").await.expect("a list");
    assert_eq!(listed.len(), 1, "{listed:?}");
    let one = &listed[0];
    assert_eq!((&one.id, one.rental.as_deref()), (&taken.id, Some("r1")));
    assert_eq!(one.state, SnapshotState::Complete);
    assert!(cloud.snapshots().list("c2").await.expect("a list").is_empty(), "another cluster's");
    cloud.make(&with_pool("r2", Some(taken.id.clone()))).await;
    let asked = cloud.faults.seen("RunInstances");
    let of_snapshot = format!("BlockDeviceMapping.2.Ebs.SnapshotId={}", taken.id);
    assert!(asked[1].contains(&of_snapshot) && !asked[0].contains("SnapshotId"), "{asked:?}");
    for _ in 0..2 {
        cloud.snapshots().delete(&taken.id).await.expect("it may be deleted already");
    }
    assert!(cloud.snapshots().list("c1").await.expect("a list").is_empty());
}

#[tokio::test]
async fn a_snapshot_whose_answer_was_lost_is_found_by_its_rental() {
    let cloud = cloud().await;
    let made = cloud.make(&with_pool("r1", None)).await;
    cloud.faults.next("CreateSnapshot", &[Fault::LoseAnswer]);
    let error = cloud.snapshots().take(&of(&made, "r1")).await.expect_err("nobody knows");
    assert_eq!(error.kind, CloudErrorKind::Unclear, "{error}");
    assert_eq!(cloud.faults.seen("CreateSnapshot").len(), 1, "it is asked for once");
    let listed = cloud.snapshots().list("c1").await.expect("a list");
    assert_eq!(listed.len(), 1, "{listed:?}");
    assert_eq!(listed[0].rental.as_deref(), Some("r1"));
}

#[tokio::test]
async fn an_instance_whose_pool_is_on_its_root_disk_has_nothing_kept() {
    let cloud = cloud().await;
    let made = cloud.make(&new("r1")).await;
    let error = cloud.snapshots().take(&of(&made, "r1")).await.expect_err("no such disk");
    assert_eq!(error.kind, CloudErrorKind::Refused, "{error}");
    assert!(cloud.faults.seen("CreateSnapshot").is_empty());
}

#[tokio::test]
async fn offers_have_the_prices_that_are_known() {
    let cloud = cloud().await;
    let offers = cloud.ec2.offers().await.expect("offers");
    let of = |kind: &str, spot: bool| {
        let mut found = offers.iter().filter(|offer| offer.kind == kind && offer.spot == spot);
        found.find(|offer| offer.zone == "eu-central-1a").expect(kind)
    };
    let large = of("m5.large", false);
    assert_eq!((large.cpus, large.memory_bytes, large.kvm), (2, 8 << 30, Some(false)));
    assert_eq!(large.price.per_hour_micros.map(u64::from), Some(115_000));
    assert_eq!((large.price.minimum_s, large.price.as_of_unix_s), (60, 1_795_910_400));
    assert_eq!(large.price.egress_per_gib_micros.map(u64::from), Some(90_000));
    assert_eq!(large.price.disk_per_gib_month_micros, None);
    let metal = of("m5.metal", false);
    assert_eq!((metal.kvm, metal.price.per_hour_micros), (Some(true), None));
    assert_eq!(of("c8i.large", false).kvm, Some(true), "it nests KVM");
    // moto's only spot price is of 2006: who reads it sees how old it is.
    let spot = of("m5.large", true);
    assert_eq!(spot.price.per_hour_micros.map(u64::from), Some(10));
    assert_eq!(spot.price.as_of_unix_s, 1_136_214_245);
    assert!(offers.iter().all(|offer| offer.kind != "m6g.large"), "it runs no programs for x86-64");
}

#[tokio::test]
async fn an_instance_whose_answer_was_lost_is_found_by_its_rental() {
    let cloud = cloud().await;
    cloud.faults.next("RunInstances", &[Fault::LoseAnswer]);
    let error = cloud.ec2.create(&new("r1")).await.expect_err("nobody knows");
    assert_eq!(error.kind, CloudErrorKind::Unclear, "{error}");
    assert_eq!(cloud.faults.seen("RunInstances").len(), 1, "it is asked for once");
    // EC2 lists an instance late, and so does a list that was asked for at once.
    let none =
        Fault::Say("<DescribeInstancesResponse><reservationSet/></DescribeInstancesResponse>");
    cloud.faults.next("DescribeInstances", &[none, Fault::LoseAnswer, Fault::LoseRequest]);
    assert_eq!(cloud.living().await, []);
    let living = cloud.living().await;
    assert_eq!(living.len(), 1, "{living:?}");
    assert_eq!(living[0].rental.as_deref(), Some("r1"));
    assert!(cloud.faults.all_happened());
    // moto ignores the token. Who asks twice sees both.
    cloud.make(&new("r1")).await;
    let forms = cloud.faults.seen("RunInstances");
    assert!(forms.iter().all(|form| form.contains("ClientToken=r1&")), "{forms:?}");
    let living = cloud.living().await;
    assert_eq!(living.iter().filter(|one| one.rental.as_deref() == Some("r1")).count(), 2);
    cloud.faults.next("RunInstances", &[Fault::LoseRequest]);
    let error = cloud.ec2.create(&new("r2")).await.expect_err("nobody knows");
    assert_eq!(error.kind, CloudErrorKind::Unclear, "{error}");
    assert_eq!(cloud.living().await.len(), 2);
}

#[tokio::test]
async fn what_ec2_refuses_is_not_asked_again_and_what_it_has_no_time_for_is() {
    let cloud = cloud().await;
    for (status, code, kind) in [
        (500, "InsufficientInstanceCapacity", CloudErrorKind::NoCapacity),
        (400, "VcpuLimitExceeded", CloudErrorKind::Quota),
        (400, "MaxSpotInstanceCountExceeded", CloudErrorKind::Quota),
        (403, "UnauthorizedOperation", CloudErrorKind::NotAllowed),
        (401, "AuthFailure", CloudErrorKind::NotAllowed),
        (400, "InvalidParameterValue", CloudErrorKind::Refused),
        (500, "InternalError", CloudErrorKind::Unclear),
        (400, "IdempotentParameterMismatch", CloudErrorKind::Unclear),
    ] {
        let before = cloud.faults.seen("RunInstances").len();
        cloud.faults.next("RunInstances", &[Fault::Refuse(status, code)]);
        let error = cloud.ec2.create(&new("r1")).await.expect_err(code);
        assert_eq!(error.kind, kind, "{error}");
        assert!(error.message.contains(code) && error.message.contains("m5.large"), "{error}");
        assert!(!error.message.contains(SECRET) && !error.message.contains("join-token"));
        assert_eq!(cloud.faults.seen("RunInstances").len(), before + 1, "{code}");
    }
    let busy = [Fault::Refuse(503, "RequestLimitExceeded"), Fault::Refuse(400, "Throttling")];
    cloud.faults.next("RunInstances", &busy);
    cloud.faults.next("TerminateInstances", &[busy[0], Fault::LoseAnswer]);
    let made = cloud.make(&new("r1")).await;
    cloud.ec2.end(&made.id).await.expect("its end");
    assert_eq!(cloud.living().await, []);
    assert!(cloud.faults.all_happened());
    cloud.faults.next("DescribeInstances", &[Fault::Refuse(403, "UnauthorizedOperation")]);
    let error = cloud.ec2.list("c1").await.expect_err("no list is no empty list");
    assert_eq!(error.kind, CloudErrorKind::NotAllowed, "{error}");
    // A page without an end.
    let page = Fault::Say(
        "<DescribeInstancesResponse><reservationSet/><nextToken>again</nextToken></DescribeInstancesResponse>",
    );
    cloud.faults.next("DescribeInstances", &[page; 3]);
    let error = cloud.ec2.list("c1").await.expect_err("half a list is none");
    assert!(error.message.contains("no end"), "{error}");
}

#[tokio::test]
async fn an_instance_is_asked_for_with_all_that_it_needs() {
    let cloud = cloud().await;
    let wanted = NewInstance {
        spot: true,
        max_per_hour_micros: std::num::NonZeroU64::new(34_500),
        kvm: true,
        disk_bytes: (30 << 30) + 1,
        ..new("r1")
    };
    let made = cloud.make(&wanted).await;
    assert!(made.spot, "{made:?}");
    let form = cloud.faults.seen("RunInstances").remove(0);
    for field in [
        "ClientToken=r1",
        "MinCount=1",
        "MaxCount=1",
        "InstanceInitiatedShutdownBehavior=terminate",
        "CpuOptions.NestedVirtualization=enabled",
        "InstanceMarketOptions.MarketType=spot",
        "InstanceMarketOptions.SpotOptions.MaxPrice=0.034500",
        "InstanceMarketOptions.SpotOptions.SpotInstanceType=one-time",
        "InstanceMarketOptions.SpotOptions.InstanceInterruptionBehavior=terminate",
        "BlockDeviceMapping.1.Ebs.VolumeSize=31",
        "BlockDeviceMapping.1.Ebs.DeleteOnTermination=true",
        "UserData=IyEvYmluL3NoCmVjaG8gam9pbi10b2tlbgo%3D",
        "TagSpecification.1.ResourceType=instance",
        "TagSpecification.1.Tag.1.Key=perigee-rental",
        "TagSpecification.1.Tag.1.Value=r1",
        "TagSpecification.1.Tag.2.Key=perigee-cluster",
        "TagSpecification.1.Tag.2.Value=c1",
        "TagSpecification.3.ResourceType=spot-instances-request",
    ] {
        assert!(form.split('&').any(|part| part == field), "{field}: {form}");
    }
    let metal = NewInstance { kind: "m5.metal".to_owned(), kvm: true, ..new("r2") };
    cloud.make(&metal).await;
    let form = cloud.faults.seen("RunInstances").remove(1);
    assert!(!form.contains("NestedVirtualization") && !form.contains("MarketType"), "{form}");
    let long = NewInstance { user_data: "x".repeat(16 * 1024 + 1), ..new("r3") };
    let error = cloud.ec2.create(&long).await.expect_err("too long");
    assert_eq!(error.kind, CloudErrorKind::Refused, "{error}");
    let unnamed = NewInstance { image: String::new(), ..new("r3") };
    let error = cloud.ec2.create(&unnamed).await.expect_err("no image");
    assert!(error.message.contains("providers.yaml"), "{error}");
    assert_eq!(cloud.faults.seen("RunInstances").len(), 2);
}

#[tokio::test]
async fn notices_are_read() {
    let cloud = cloud().await;
    assert_eq!(cloud.ec2.notices("c1").await.expect("none"), []);
    let marked = Fault::Say(
        "<DescribeSpotInstanceRequestsResponse><spotInstanceRequestSet><item><instanceId>i-1</instanceId><status>\
         <code>marked-for-termination</code><updateTime>2015-08-30T12:36:00Z</updateTime></status></item>\
         </spotInstanceRequestSet></DescribeSpotInstanceRequestsResponse>",
    );
    cloud.faults.next("DescribeSpotInstanceRequests", &[marked]);
    let notice = Notice { instance: "i-1".to_owned(), ends_unix_s: 1_440_938_280 };
    assert_eq!(cloud.ec2.notices("c1").await.expect("one"), [notice]);
}

#[tokio::test]
async fn an_endpoint_where_nobody_listens_is_no_empty_list() {
    let keys = tempfile::NamedTempFile::new().expect("a file");
    let lines = "[default]\naws_access_key_id = test\naws_secret_access_key = test\n";
    std::fs::write(keys.path(), lines).expect("it is written");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    drop(listener);
    let text = format!(
        "a:\n  ec2: {{region: a, kinds: [b], credentials: {}, endpoint: \"http://{address}\"}}\n",
        keys.path().display()
    );
    let ec2 = providers(&text).expect("a provider").remove(0);
    let error = ec2.list("c1").await.expect_err("nobody answers");
    assert_eq!(error.kind, CloudErrorKind::Unclear, "{error}");
    assert!(error.message.contains(&address.to_string()), "{error}");
}
