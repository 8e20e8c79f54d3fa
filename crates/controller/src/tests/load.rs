//! Hosts whose VMs wait for a CPU: what is shown of them, and what follows.

use std::sync::Arc;

use perigee_model::VmId;
use perigee_model::guest::GuestBody;
use perigee_model::job::{Access, JobSpec, JobState, Start};
use perigee_model::load::{HostPressure, Pressure, StalledTime, VcpuUse, VmLoad};
use perigee_model::plan::Trigger;
use perigee_planner::PastRun;

use super::fake::FakeHost;
use super::gone::second_home;
use super::sure::some_run;
use super::{Lab, running_as, spec, vm_of, wait_for};
use crate::cluster::history_cache::History;
use crate::planning::links;
use crate::{hosts, planning, rentals, vms};

/// The agent says of a VM that its vCPUs had CPUs and waited for CPUs like this in the last minute.
fn loaded(host: &FakeHost, vm: &VmId, running_vcpus: f64, waiting_vcpus: f64) {
    let load = VmLoad {
        run_delay_ms: Some(7_000),
        longest_run_delay_ms: Some(5_000),
        vcpus_1m: Some(VcpuUse { running_vcpus, waiting_vcpus }),
        memory: None,
        dirty_bytes_per_s: None,
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
    // For the VM itself the host is not busy: what is measured there, the VM has made.
    let busy = |except| lab.cluster.hosts.cpu_load(&lab.home.id, except).expect("it is known");
    assert_eq!((busy(None).measured_vcpus, busy(None).pressure_share), (1, Some(0.8)));
    assert_eq!((busy(Some(&vm)).measured_vcpus, busy(Some(&vm)).pressure_share), (0, None));
}

/// A small job without data.
fn small(start: Start) -> JobSpec {
    JobSpec { start, memory_bytes: 128 << 20, volumes: Vec::new(), ..spec(Access::Read) }
}

/// A job of which earlier runs show that it computes for 20 s.
async fn computes(lab: &Lab) -> JobSpec {
    let wanted = JobSpec { name: "computes".into(), ..small(Start::Anywhere) };
    let traits = planning::prepare(&lab.cluster, &wanted).await.expect("facts").job.traits;
    let (network_s, volumes) = (0.0, Vec::new());
    let run = PastRun { traits, wall_s: 21.0, busy_s: 0.0, network_s, volumes, ..some_run(lab) };
    let history = History { runs: vec![run.clone(), run], ..History::default() };
    lab.cluster.history_cache.set_history(&planning::history_key(&wanted), Arc::new(history));
    wanted
}

async fn runs_at(lab: &Lab, host: &FakeHost) -> VmId {
    let id = lab.submit(small(Start::Host(host.id.clone()))).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(host, &vm).await;
    host.say(&vm, GuestBody::Started);
    lab.wait_for_state(&id, JobState::Running).await;
    vm
}

#[tokio::test]
async fn a_job_starts_where_vms_do_nothing_and_not_where_one_starves() {
    let lab = Lab::up().await;
    let starves = runs_at(&lab, &lab.home).await;
    let idle = [runs_at(&lab, &lab.cloud).await, runs_at(&lab, &lab.cloud).await];
    let wanted = computes(&lab).await;
    let start = async || {
        let plan = rentals::plan(&lab.cluster, &wanted).await.expect("a plan").plan;
        plan.chosen().expect("a way").start.clone()
    };
    assert_eq!(start().await, lab.home.id, "where there are fewer vCPUs, while no load is known");
    loaded(&lab.home, &starves, 0.3, 0.7);
    idle.iter().for_each(|vm| loaded(&lab.cloud, vm, 0.01, 0.0));
    wait_for("the job to be planned elsewhere", async || {
        (start().await == lab.cloud.id).then_some(())
    })
    .await;
    let id = lab.submit(wanted.clone()).await;
    lab.wait_for_vm(&lab.cloud, &vm_of(&id)).await;
    let decisions = planning::decisions(&lab.cluster, &id).await.expect("decisions");
    let figures = decisions[0].plan.figures.join("\n");
    let said = "home1 is busy: its VMs wait 70 % of their time for a CPU";
    assert!(figures.contains(said), "{figures}");
}

/// The counters say what it has lost, so the test does not take that time.
#[tokio::test]
async fn a_job_that_starves_is_moved_to_a_host_that_is_known_to_be_idle() {
    let lab = Lab::up().await;
    let idle = second_home(&lab).await;
    idle.inside().pressure = HostPressure { cpu: Some(Pressure::default()), ..Default::default() };
    let start = Start::Host(lab.home.id.clone());
    let wanted = JobSpec { may_migrate: true, memory_bytes: 64 << 20, ..small(start) };
    links::probe_all(&lab.cluster).await.expect("figures");
    let (id, vm) = running_as(&lab, wanted).await;
    wait_for("the planner to move the VM", async || {
        let mut home = lab.home.inside();
        let load = &mut home.vms.get_mut(&vm).expect("a VM").report.load;
        let waited_ms = load.longest_run_delay_ms.get_or_insert(0);
        *waited_ms += 1_000;
        home.vms.get(&vm).and_then(|vm| vm.asked.as_ref()).map(drop)
    })
    .await;
    assert_eq!(lab.job(&id).await.migrations[0].to, idle.id);
    wait_for("the decision", async || {
        let decisions = planning::decisions(&lab.cluster, &id).await.expect("decisions");
        let last = decisions.last()?;
        (last.trigger == Trigger::TimeLost && last.summary.contains("waited for a CPU at home1"))
            .then_some(())
    })
    .await;
}
