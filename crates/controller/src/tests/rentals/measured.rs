//! The first rented host of each kind is measured by itself, and what was measured enters predictions.

use perigee_model::job::{Access, JobSpec, NewVolume, Start};
use perigee_model::job_plan::RentOption;
use perigee_model::measurement::{
    HostMeasurement, MeasureHost, MeasurementState, NetworkFigures, RentedKind,
};
use perigee_model::plan::Way;
use perigee_model::volume::VolumeSource;

use super::*;
use crate::measuring;
use crate::planning::renting::{Kind, predict};
use crate::storage::volumes;
use crate::tests::{data_volume, spec};

/// Another host than a rented one.
async fn own_host(rented: &Rented, name: &str, site: &str) -> FakeHost {
    let host = FakeHost::start(name, site).await;
    let registered = hosts::register(&rented.cluster, &host.id, host.addresses.clone());
    registered.await.expect("it registers");
    host
}

/// The rental's host joins. No measurement of its own disk ends.
async fn joins_and_hangs(rented: &Rented, name: &str) -> FakeHost {
    rented.rent(name).await;
    rented.wait_for_state(name, RentalState::Starting).await;
    let host = FakeHost::start(name, "lab").await;
    host.inside().measured.hangs = true;
    let registered = hosts::register(&rented.cluster, &host.id, host.addresses.clone());
    registered.await.expect("it registers");
    rented.wait_for_state(name, RentalState::Joined).await;
    host
}

async fn measured(
    rented: &Rented,
    host: &FakeHost,
    what: &str,
    is: impl Fn(&HostMeasurement) -> bool,
) -> HostMeasurement {
    wait_for(what, async || rented.cluster.measurements.of(&host.id).filter(|view| is(view))).await
}

#[tokio::test]
async fn against_no_host_of_another_site_and_its_figures_are_those_of_its_kind() {
    let rented = Rented::up(TIMING).await;
    own_host(&rented, "home1", "home").await;
    let first = joins_and_hangs(&rented, "rent-1").await;
    first.inside().measured.hangs = false;
    let done = |view: &HostMeasurement| view.state == MeasurementState::Done;
    let view = measured(&rented, &first, "the figures", done).await;
    assert!(view.networks.is_empty() && view.by.contains("no host of this kind"), "{view:?}");
    let free = async || (!rented.cluster.measurements.is_busy(&first.id)).then_some(());
    wait_for("the host to be free", free).await;
    // The second one is measured by a person, who calls that off before there are figures.
    let second = joins_and_hangs(&rented, "rent-2").await;
    let ask = MeasureHost { against: Vec::new(), length_s: 1, beside_vms: false };
    let by = "ann".to_owned();
    measuring::start(&rented.cluster, &second.id, ask, by).await.expect("it begins");
    measuring::cancel(&rented.cluster, &second.id).expect("it is called off");
    let off = |view: &HostMeasurement| view.state == MeasurementState::CalledOff;
    let view = measured(&rented, &second, "its end", off).await;
    assert_eq!(measuring::get(&rented.cluster, &second.id).expect("it is known"), view);
    let known = measuring::known(&rented.cluster, &second.id).expect("its kind has figures");
    assert_eq!((known.host, known.state), (first.id.clone(), MeasurementState::Done));
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_vm_that_comes_to_the_other_host_ends_that() {
    let rented = Rented::up(TIMING).await;
    let other = own_host(&rented, "lab1", "lab").await;
    let host = joins_and_hangs(&rented, "rent-1").await;
    let view = measured(&rented, &host, "the beginning", |_| true).await;
    assert_eq!((view.state, view.networks.len()), (MeasurementState::Measuring, 1), "{view:?}");
    assert_eq!(view.networks[0].with, other.id);
    let mut vm = new_vm("lab1");
    vm.volumes.clear();
    persistent::create(&rented.cluster, vm, "ann".to_owned()).await.expect("a VM");
    let off = |view: &HostMeasurement| view.state == MeasurementState::CalledOff;
    measured(&rented, &host, "its end", off).await;
    rented.supervisor.stop().await;
}

/// What the rental's host has shown: that `home1` is 16 ms away, and how fast its data come.
fn shows(rented: &Rented, from_bytes_per_s: u64) {
    let link = NetworkFigures {
        with: HostId::new("home1").expect("a name"),
        site: "home".parse().expect("a name"),
        rtt_ms: Some(16.0),
        to_bytes_per_s: Some(from_bytes_per_s),
        from_bytes_per_s: Some(from_bytes_per_s),
        to_streams_bytes_per_s: None,
        from_streams_bytes_per_s: None,
        problem: String::new(),
    };
    rented.cluster.measurements.note_kind(HostMeasurement {
        host: HostId::new("rent-1").expect("a name"),
        kind: Some(RentedKind { provider: "lab".to_owned(), kind: "m1".to_owned() }),
        state: MeasurementState::Done,
        now: String::new(),
        by: "ann".to_owned(),
        begun_ms: now_ms(),
        ended_ms: Some(now_ms()),
        length_s: 3,
        networks: vec![link],
        disks: Vec::new(),
    });
}

#[tokio::test]
async fn a_plan_and_the_rule_predict_a_kind_by_the_links_that_were_measured_of_it() {
    let rented = Rented::up(TIMING).await;
    let home = own_host(&rented, "home1", "home").await;
    let new = NewVolume {
        name: data_volume(),
        host: Some(home.id.clone()),
        size_bytes: Some(1 << 30),
        source: VolumeSource::Empty,
        leave_site: Default::default(),
    };
    volumes::create(&rented.cluster, new).await.expect("create");
    // Its site is known from then on.
    rented.rent("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Starting).await;
    let job = JobSpec { start: Start::Anywhere, ..spec(Access::Read) };
    let plan = async || rentals::plan(&rented.cluster, &job).await.expect("a plan");
    let offer = double::offer("m1", "a", false);
    let site = rented.get("rent-1").site;
    let kinds = [Kind { provider: "lab".to_owned(), offer, site }];
    let assumed = async || predict(&rented.cluster, &[], &kinds).await.1.join("; ");
    let before = plan().await;
    let unknown = "not known how far home1 is from site lab";
    let is_unknown = before.not_considered.iter().any(|one| one.why.contains(unknown));
    assert!(is_unknown && before.rented.is_empty(), "{before:?}");
    assert!(assumed().await.contains("was not measured"), "{}", assumed().await);

    let measured = async |rate| {
        shows(&rented, rate);
        let remote = |one: &RentOption| one.way == Way::Remote && one.kind == "m1";
        plan().await.rented.into_iter().find(remote).expect("it is predicted")
    };
    // The volume has 100 MiB.
    let (fast, slow) = (measured(100 << 20).await, measured(1 << 20).await);
    assert!(slow.total.expected_s > fast.total.expected_s + 90.0, "{slow:?} after {fast:?}");
    assert!(slow.reason.contains("links as measured on m1 "), "{slow:?}");
    let (says, known) = (
        "the link of lab/m1 between sites lab and home counts as measured on m1 ",
        assumed().await,
    );
    assert!(known.starts_with(says) && !known.contains("was not measured"), "{known}");
    rented.supervisor.stop().await;
}
