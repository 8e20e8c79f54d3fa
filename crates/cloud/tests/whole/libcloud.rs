//! The example of a program: `examples/providers/libcloud`, asked as a controller does, with EC2 as moto plays it.

use perigee_cloud::{CloudErrorKind, providers};
use perigee_model::kept::PoolDisk;
use perigee_model::rental::{InstanceState, NewInstance};

use crate::faults::{Fault, Faults};
use crate::moto::{IMAGE, Moto, programs};
use crate::new_instance;

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/providers/libcloud");

#[tokio::test]
async fn the_example_rents_a_host_and_gives_it_back() {
    let moto = Moto::start().await;
    let faults = Faults::before(moto.port).await;
    let port: u16 =
        faults.endpoint.rsplit(':').next().and_then(|p| p.parse().ok()).expect("a port");
    let dir = tempfile::tempdir().expect("a directory");
    let config = dir.path().join("config.json");
    let settings = serde_json::json!({
        "driver": "ec2",
        "arguments": {
            "key": "test", "secret": "test", "region": "eu-central-1",
            "host": "127.0.0.1", "port": port, "secure": false,
        },
        "sizes": ["m5.large", "m4.xlarge"],
        "prices": {"m5.large": 0.115},
        "disk": 0.0952,
        "as_of": "2026-11-29",
        "create": {"ex_terminate_on_shutdown": true},
        "root_device": "/dev/sda1",
    });
    std::fs::write(&config, settings.to_string()).expect("it is written");
    let yaml =
        format!("other:\n  program: [{}/python3, {EXAMPLE}, {}]\n", programs(), config.display());
    let other = providers(&yaml).expect("a provider").remove(0);
    let offers = other.offers().await.expect("offers");
    let offer = offers.iter().find(|offer| offer.kind == "m5.large").expect("an offer");
    assert_eq!((offer.cpus, offer.memory_bytes, offer.kvm), (2, 8 << 30, None));
    assert!(offer.price.source.contains("config.json"), "{offer:?}");
    assert_eq!(offer.price.per_hour_micros.map(u64::from), Some(115_000));
    assert_eq!(offer.price.disk_per_gib_month_micros.map(u64::from), Some(95_200));
    assert_eq!(
        (offer.price.egress_per_gib_micros, offer.price.as_of_unix_s),
        (None, 1_795_910_400)
    );
    let listed = offers.iter().find(|offer| offer.kind == "m4.xlarge").expect("another one");
    assert!(listed.price.source.contains("libcloud"), "{listed:?}");
    assert!(listed.price.as_of_unix_s < offer.price.as_of_unix_s, "of libcloud's own date");
    let new = NewInstance {
        kind: offer.kind.clone(),
        zone: offer.zone.clone(),
        image: IMAGE.to_owned(),
        disk_bytes: 20 << 30,
        ..new_instance("r1")
    };
    let made = other.create(&new).await.expect("an instance");
    assert_eq!(made.rental.as_deref(), Some("r1"));
    let again = other.create(&new).await.expect("the same one");
    assert_eq!(again.id, made.id);
    let listed = other.list("c1").await.expect("a list");
    assert_eq!(listed.len(), 1, "{listed:?}");
    assert_eq!((&listed[0].id, listed[0].state), (&made.id, InstanceState::Running));
    assert_eq!((&listed[0].kind, &listed[0].zone), (&offer.kind, &offer.zone));
    assert_eq!(other.list("c2").await.expect("none"), []);
    assert_eq!(other.notices("c1").await.expect("none"), []);
    let nested = NewInstance { rental: "r2".to_owned(), kvm: true, ..new.clone() };
    let error = other.create(&nested).await.expect_err("nobody knows whether it has KVM");
    assert_eq!(error.kind, CloudErrorKind::Refused, "{error}");
    let pool = Some(PoolDisk { bytes: 4 << 30, snapshot: None });
    let second = NewInstance { rental: "r2".to_owned(), pool, ..new.clone() };
    let error = other.create(&second).await.expect_err("it makes no second disk");
    assert_eq!(error.kind, CloudErrorKind::Refused, "{error}");
    assert!(error.message.contains("snapshots"), "{error}");
    faults.next("TerminateInstances", &[Fault::Say("<TerminateInstancesResponse/>")]);
    let error = other.end(&made.id).await.expect_err("libcloud does not say that it ends");
    assert_eq!(error.kind, CloudErrorKind::Unclear, "{error}");
    assert!(error.message.contains(&made.id), "{error}");
    other.end(&made.id).await.expect("its end");
    other.end(&made.id).await.expect("it is gone already");
    let listed = other.list("c1").await.expect("a list");
    assert!(listed.iter().all(|one| one.state != InstanceState::Running), "{listed:?}");
    for (fault, kind) in [
        (Fault::Refuse(400, "VcpuLimitExceeded"), CloudErrorKind::Quota),
        (Fault::Refuse(500, "InsufficientInstanceCapacity"), CloudErrorKind::NoCapacity),
        (Fault::Refuse(400, "InvalidAMIID.NotFound"), CloudErrorKind::Refused),
        (Fault::Refuse(408, "Late"), CloudErrorKind::Unclear),
        (Fault::Refuse(409, "Conflict"), CloudErrorKind::Unclear),
        (Fault::Refuse(429, "Busy"), CloudErrorKind::Throttled),
        (Fault::LoseRequest, CloudErrorKind::Unclear),
    ] {
        faults.next("RunInstances", &[fault]);
        let error = other.create(&NewInstance { rental: "r3".to_owned(), ..new.clone() }).await;
        let error = error.expect_err("a fault");
        assert_eq!(error.kind, kind, "{error}");
    }
}
