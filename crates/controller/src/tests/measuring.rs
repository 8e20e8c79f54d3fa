//! Measurements of hosts: who is asked for what, what is left, and which are refused.

use perigee_model::client::target_name;
use perigee_model::measurement::{
    DiskPath, HostMeasurement, MEASURED_PREFIX, MeasureHost, MeasuredDisk, MeasurementState,
    RentedKind,
};
use perigee_model::vm::HostAddresses;
use perigee_model::{HostId, ProblemKind};

use super::fake::FakeHost;
use super::gone::second_home;
use super::{Lab, data_volume, running, wait_for};
use crate::cluster::Cluster;
use crate::measuring::idle_neighbour;
use crate::records::{MEASURED_KINDS, MEASUREMENTS, MeasurementRecord};
use crate::storage::unknown;
use crate::{hosts, measuring};

fn ask() -> MeasureHost {
    MeasureHost { against: Vec::new(), length_s: 1, beside_vms: false }
}

fn home1() -> HostId {
    HostId::new("home1").expect("a name")
}

fn has_room(hosts: &[&FakeHost]) {
    hosts.iter().for_each(|host| host.inside().pool_free_bytes = Some(1 << 40));
}

/// Fakes have no such address: nobody connects to their volumes.
async fn has_an_ip(lab: &Lab, host: &FakeHost, ip: &str) {
    let addresses = HostAddresses { nbd_addr: format!("{ip}:10809"), ..host.addresses.clone() };
    hosts::register(&lab.cluster, &host.id, addresses).await.expect("registered");
}

async fn begin(cluster: &Cluster) -> HostMeasurement {
    measuring::start(cluster, &home1(), ask(), "ann".to_owned()).await.expect("it begins")
}

async fn ended(cluster: &Cluster) -> HostMeasurement {
    wait_for("the end of the measurement", async || {
        let now = measuring::get(cluster, &home1()).expect("it is known");
        (now.state != MeasurementState::Measuring).then_some(now)
    })
    .await
}

/// No volume, no attachment and no portal of it.
async fn nothing_is_left(lab: &Lab) {
    wait_for("nothing of the measurement to be left", async || {
        let clean = [&lab.home, &lab.cloud].iter().all(|host| {
            let inside = host.inside();
            let made = |name: &str| name.starts_with(MEASURED_PREFIX);
            inside.volumes.keys().all(|name| !made(name.as_str()))
                && inside.attachments.keys().all(|name| !made(name.as_str()))
                && inside.measured.portals.is_empty()
        });
        clean.then_some(())
    })
    .await;
    assert!(lab.cloud.inside().volumes.contains_key(&data_volume()), "other volumes stay");
}

#[tokio::test]
async fn a_host_is_measured_by_itself_and_against_one_of_another_site_and_nothing_is_left() {
    let lab = Lab::up().await;
    has_room(&[&lab.home, &lab.cloud]);
    lab.home.inside().measured.no_iscsi = true;
    has_an_ip(&lab, &lab.cloud, "127.0.0.1").await;
    let begun = begin(&lab.cluster).await;
    assert_eq!((begun.state, begun.networks.len()), (MeasurementState::Measuring, 1));
    let measured = ended(&lab.cluster).await;
    assert_eq!(measured.state, MeasurementState::Done, "{measured:?}");
    let link = &measured.networks[0];
    assert_eq!((link.with.as_str(), link.rtt_ms), ("cloud1", Some(16.0)));
    for rate in [
        link.to_bytes_per_s,
        link.from_bytes_per_s,
        link.to_streams_bytes_per_s,
        link.from_streams_bytes_per_s,
    ] {
        assert_eq!(rate, Some(50 << 20), "{link:?}");
    }
    let disks: Vec<_> = measured
        .disks
        .iter()
        .map(|disk| (disk.path, disk.at.as_str(), disk.figures.is_some()))
        .collect();
    let expected = [
        (DiskPath::Pool, "home1", true),
        (DiskPath::Nbd, "cloud1", true),
        (DiskPath::Iscsi, "cloud1", false),
    ];
    assert_eq!(disks, expected, "{measured:?}");
    assert!(measured.disks[2].problem.contains("there is no driver"), "{measured:?}");
    {
        let inside = lab.home.inside();
        let asked: Vec<_> = inside.measured.asked.iter().map(|ask| &ask.disk).collect();
        let MeasuredDisk::Export { export } = asked[1] else { panic!("{asked:?}") };
        let filled = lab.cloud.inside().measured.filled[0].to_string();
        assert!(export.starts_with(&format!("{filled}@")), "{export}");
        let MeasuredDisk::Iscsi { at, .. } = asked[2] else { panic!("{asked:?}") };
        assert_eq!(at.target, target_name(&filled));
    }
    nothing_is_left(&lab).await;
    let unknown = unknown::list(&lab.cluster).await.expect("a list");
    assert!(unknown.iter().all(|one| !one.name.starts_with(MEASURED_PREFIX)), "{unknown:?}");
}

/// The problem of the other host's disk over that path, and over what the first host was asked to measure.
async fn refused(lab: &Lab, path: DiskPath) -> (String, Vec<MeasuredDisk>) {
    begin(&lab.cluster).await;
    let measured = ended(&lab.cluster).await;
    let disk = measured.disks.iter().find(|disk| disk.path == path);
    let disk = disk.expect("it was tried");
    assert!(disk.figures.is_none(), "{measured:?}");
    let asked = lab.home.inside().measured.asked.iter().map(|ask| ask.disk.clone()).collect();
    (disk.problem.clone(), asked)
}

#[tokio::test]
async fn a_host_that_answers_with_another_volume_has_nothing_overwritten() {
    let lab = Lab::up().await;
    has_room(&[&lab.home, &lab.cloud]);
    has_an_ip(&lab, &lab.cloud, "127.0.0.1").await;
    lab.cloud.inside().measured.makes = Some(data_volume());
    let (problem, asked) = refused(&lab, DiskPath::Nbd).await;
    assert!(problem.contains("answers with another volume"), "{problem}");
    assert_eq!(asked.len(), 1, "only the own disk: {asked:?}");
    assert!(lab.cloud.inside().measured.filled.is_empty());
}

#[tokio::test]
async fn a_host_that_answers_with_a_target_of_another_volume_or_host_has_nothing_overwritten() {
    let lab = Lab::up().await;
    has_room(&[&lab.home, &lab.cloud]);
    has_an_ip(&lab, &lab.cloud, "127.0.0.1").await;
    lab.cloud.inside().measured.answers_with = Some(data_volume());
    let (problem, asked) = refused(&lab, DiskPath::Iscsi).await;
    assert!(problem.contains("answers with another target"), "{problem}");
    let no_iscsi = |asked: &[MeasuredDisk]| {
        asked.iter().all(|disk| !matches!(disk, MeasuredDisk::Iscsi { .. }))
    };
    assert!(no_iscsi(&asked), "{asked:?}");
    lab.cloud.inside().measured.answers_with = None;
    // Its portal is at another address than the host is.
    has_an_ip(&lab, &lab.cloud, "127.0.0.2").await;
    let (problem, asked) = wait_for("the hosts to be free", async || {
        let is_free = !lab.cluster.measurements.is_busy(&lab.home.id);
        if is_free { Some(refused(&lab, DiskPath::Iscsi).await) } else { None }
    })
    .await;
    assert!(problem.contains("answers with another target"), "{problem}");
    assert!(no_iscsi(&asked), "{asked:?}");
}

#[tokio::test]
async fn by_itself_a_host_is_measured_only_against_an_idle_one_of_its_site() {
    let lab = Lab::up().await;
    let of = |host: &FakeHost| idle_neighbour(&lab.cluster, &host.id);
    assert_eq!(of(&lab.home), None, "the other host is at another site");
    running(&lab).await;
    let second = second_home(&lab).await;
    assert_eq!(of(&lab.home), Some(second.id.clone()));
    assert_eq!(of(&second), None, "a VM is at the other host");
}

#[tokio::test]
async fn a_measurement_is_carried_out_only_after_it_is_recorded() {
    let lab = Lab::up().await;
    let measurements = &lab.cluster.measurements;
    measurements.reserve(&home1(), &[]).expect("it is free");
    assert!(measurements.take().is_none(), "its record may not be there");
    measurements.ready(&home1());
    assert_eq!(measurements.take().expect("it is there").0, home1());
    assert!(measurements.take().is_none(), "it is carried out once");
    measurements.ended(&home1());
}

#[tokio::test]
async fn a_pool_without_room_is_not_filled_and_says_so() {
    let lab = Lab::up().await;
    has_room(&[&lab.home]);
    lab.cloud.inside().pool_free_bytes = Some(1 << 20);
    begin(&lab.cluster).await;
    let measured = ended(&lab.cluster).await;
    let remote: Vec<_> = measured.disks.iter().filter(|disk| disk.path != DiskPath::Pool).collect();
    assert_eq!(remote.len(), 2, "{measured:?}");
    for disk in remote {
        assert!(
            disk.problem.contains("1 MiB free") && disk.problem.contains("an eighth"),
            "{disk:?}"
        );
    }
    assert!(lab.cloud.inside().measured.filled.is_empty());
}

#[tokio::test]
async fn one_that_is_called_off_keeps_what_it_has_and_frees_its_hosts() {
    let lab = Lab::up().await;
    has_room(&[&lab.home, &lab.cloud]);
    lab.home.inside().measured.hangs = true;
    begin(&lab.cluster).await;
    wait_for("the first disk", async || {
        (!lab.home.inside().measured.asked.is_empty()).then_some(())
    })
    .await;
    let again = measuring::start(&lab.cluster, &home1(), ask(), "ann".to_owned()).await;
    let again = again.expect_err("one at a time");
    assert_eq!(again.kind, ProblemKind::Conflict, "{again}");
    let other = measuring::start(&lab.cluster, &lab.cloud.id, ask(), "ann".to_owned()).await;
    let other = other.expect_err("it takes part in that of home1");
    assert!(other.to_string().contains("the measurement of host home1"), "{other}");
    measuring::cancel(&lab.cluster, &home1()).expect("it is called off");
    let measured = ended(&lab.cluster).await;
    assert_eq!(measured.state, MeasurementState::CalledOff);
    assert!(measured.now.contains("called off"), "{measured:?}");
    lab.home.inside().measured.hangs = false;
    wait_for("the hosts to be free", async || {
        measuring::start(&lab.cluster, &home1(), ask(), "ann".to_owned()).await.ok()
    })
    .await;
    assert_eq!(ended(&lab.cluster).await.state, MeasurementState::Done);
    let nothing = measuring::cancel(&lab.cluster, &home1()).expect_err("none is under way");
    assert_eq!(nothing.kind, ProblemKind::Conflict, "{nothing}");
}

#[tokio::test]
async fn beside_vms_a_host_is_measured_only_on_request() {
    let lab = Lab::up().await;
    has_room(&[&lab.home, &lab.cloud]);
    running(&lab).await;
    let refused = measuring::start(&lab.cluster, &home1(), ask(), "ann".to_owned()).await;
    let refused = refused.expect_err("a VM is there");
    assert!(refused.to_string().contains("--beside-vms"), "{refused}");
    let beside = MeasureHost { beside_vms: true, ..ask() };
    measuring::start(&lab.cluster, &home1(), beside, "ann".to_owned()).await.expect("on request");
    assert_eq!(ended(&lab.cluster).await.state, MeasurementState::Done);
}

#[tokio::test]
async fn what_is_beyond_a_limit_or_named_twice_is_refused() {
    let lab = Lab::up().await;
    let cloud1 = lab.cloud.id.clone();
    for (bad, why) in [
        (MeasureHost { length_s: 61, ..ask() }, "1m"),
        (MeasureHost { length_s: 0, ..ask() }, "1s"),
        (MeasureHost { against: vec![home1()], ..ask() }, "home1"),
        (MeasureHost { against: vec![cloud1.clone(), cloud1], ..ask() }, "cloud1"),
        (MeasureHost { against: vec!["nowhere".parse().expect("a name")], ..ask() }, "nowhere"),
    ] {
        let refused = measuring::start(&lab.cluster, &home1(), bad, "ann".to_owned()).await;
        let refused = refused.expect_err("it is refused");
        assert!(refused.to_string().contains(why), "{why}: {refused}");
    }
    let unknown = measuring::get(&lab.cluster, &home1()).expect_err("it was never measured");
    assert_eq!(unknown.kind, ProblemKind::NotFound, "{unknown}");
}

#[tokio::test]
async fn a_controller_that_is_killed_meanwhile_removes_what_it_had_made() {
    let mut lab = Lab::up().await;
    has_room(&[&lab.home, &lab.cloud]);
    lab.home.inside().measured.hangs = true;
    begin(&lab.cluster).await;
    // The volume is there, as if the disk of the other host was being measured.
    let record = |mut record: MeasurementRecord| {
        let name = format!("{MEASURED_PREFIX}1").parse().expect("a name");
        lab.cloud.make_volume(&name);
        record.volumes.push((lab.cloud.id.clone(), name));
        record
    };
    let key = format!("{MEASUREMENTS}home1");
    let stored: MeasurementRecord =
        lab.cluster.records.read(&key).await.expect("the store").expect("a record");
    lab.cluster.records.put(&key, &record(stored)).await.expect("the store");
    lab.restart_controller().await;
    let measured = ended(&lab.cluster).await;
    assert_eq!(measured.state, MeasurementState::CalledOff);
    assert!(measured.now.contains("started again"), "{measured:?}");
    nothing_is_left(&lab).await;
}

#[tokio::test]
async fn kinds_have_figures_of_their_own_and_the_oldest_are_dropped_beyond_the_limit() {
    let lab = Lab::up().await;
    has_room(&[&lab.home, &lab.cloud]);
    begin(&lab.cluster).await;
    let measured = ended(&lab.cluster).await;
    let kind = |name: &str| RentedKind { provider: "lab".to_owned(), kind: name.to_owned() };
    let most = u64::try_from(perigee_model::limits::MEASURED_KINDS.max).expect("a count");
    for number in 0..=most {
        let kind = Some(kind(&format!("m/{number}")));
        let view = HostMeasurement { kind, begun_ms: number, ..measured.clone() };
        measuring::keep_kind(&lab.cluster, &view).await.expect("the store");
    }
    let stored = lab.cluster.records.keys(MEASURED_KINDS).await.expect("the store").len();
    assert_eq!(stored as u64, most);
    let of = |name: &str| lab.cluster.measurements.of_kind(&kind(name));
    assert!(of("m/0").is_none() && of("m/1").is_some());
}
