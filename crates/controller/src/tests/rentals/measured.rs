//! The first rented host of each kind is measured by itself.

use perigee_model::measurement::{HostMeasurement, MeasureHost, MeasurementState};

use super::*;
use crate::measuring;

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
