//! Hosts whose VMs wait for a CPU: what is shown of them, and what follows.

use perigee_model::VmId;
use perigee_model::job::Access;
use perigee_model::load::{HostPressure, Pressure, StalledTime, VcpuUse, VmLoad};

use super::fake::FakeHost;
use super::{Lab, running_as, spec, wait_for};
use crate::{hosts, vms};

/// The agent says of a VM that its vCPUs had CPUs and waited for CPUs like this in the last minute.
fn loaded(host: &FakeHost, vm: &VmId, running_vcpus: f64, waiting_vcpus: f64) {
    let load = VmLoad {
        run_delay_ms: Some(7_000),
        longest_run_delay_ms: Some(5_000),
        vcpus_1m: Some(VcpuUse { running_vcpus, waiting_vcpus }),
    };
    host.inside().vms.get_mut(vm).expect("a VM").report.load = load;
}

#[tokio::test]
async fn load_is_shown_of_vms_and_hosts_and_what_is_not_known_is_null() {
    let lab = Lab::up().await;
    let (_, vm) = running_as(&lab, spec(Access::Read)).await;
    let shown = async || {
        let host = hosts::info(&lab.cluster, &lab.home.id).await.expect("a host");
        (host, vms::get(&lab.cluster, &vm).await.expect("a VM"))
    };
    let (host, of_vm) = shown().await;
    let host = serde_json::to_value(host).expect("JSON");
    assert!(host["vcpus_1m"].is_null() && host["pressure"]["cpu"].is_null(), "{host}");
    let of_vm = serde_json::to_value(of_vm).expect("JSON");
    assert!(of_vm["load"]["run_delay_ms"].is_null(), "{of_vm}");

    loaded(&lab.home, &vm, 1.5, 0.5);
    let some = StalledTime { share_10s: 0.9, share_60s: 0.8, total_us: 9 };
    let cpu = Some(Pressure { some, full: None });
    lab.home.inside().pressure = HostPressure { cpu, ..HostPressure::default() };
    wait_for("the load to be shown", async || {
        let (host, of_vm) = shown().await;
        let share = host.vcpus_1m?.run_delay_share();
        let is_right = (share - 0.25).abs() < 1e-9 && of_vm.load.run_delay_ms == Some(7_000);
        (is_right && host.pressure.cpu == cpu).then_some(())
    })
    .await;
}
