//! Hosts of which one part does not answer: the agent, or the volume server.

use perigee_model::guest::{GuestBody, LogStream};
use perigee_model::job::{HostState, JobState, Restart};
use perigee_model::vm::VmReport;
use perigee_model::waiting::{Waiting, WaitsFor};
use perigee_model::{HostId, JobId};

use super::fake::FakeHost;
use super::gone::{ends_anew, restarting, running, second_home};
use super::{Lab, data_volume, running_as, vm_of, wait_for};
use crate::storage::volumes;
use crate::{hosts, jobs, vms};

fn words(waits: &[Waiting]) -> Vec<&'static str> {
    waits.iter().map(|waiting| waiting.waits_for.word()).collect()
}

async fn waits_of(lab: &Lab, host: &HostId) -> Vec<&'static str> {
    words(&hosts::info(&lab.cluster, host).await.expect("host").waits)
}

async fn wait_until_told(lab: &Lab, host: &HostId, told: &[&str]) {
    wait_for(&format!("{host} to wait for {told:?}"), async || {
        (waits_of(lab, host).await == told).then_some(())
    })
    .await;
}

/// It was shown as up, without a word, and its volumes were in no list.
#[tokio::test]
async fn a_volume_server_that_is_dead_is_told_and_its_volumes_are_listed_as_last_seen() {
    let lab = Lab::up().await;
    lab.cloud.inside().server_down = true;
    wait_until_told(&lab, &lab.cloud.id, &["volume_server"]).await;
    assert_eq!(lab.cluster.hosts.state(&lab.cloud.id), HostState::Up, "its agent answers");
    let listed = volumes::volumes(&lab.cluster).await.expect("a list");
    let data = listed.iter().find(|volume| volume.name == data_volume()).expect("it is listed");
    let WaitsFor::VolumeServer { host } = &data.waits[0].waits_for else { panic!("{data:?}") };
    assert_eq!(*host, lab.cloud.id);
    let page = crate::api::metrics_page(&lab.cluster).await.expect("a page");
    let told = r#"perigee_host_part_up{host="cloud1",site="cloud",part="volume_server"} 0"#;
    assert!(page.contains(told), "{page}");
    lab.cloud.inside().server_down = false;
    wait_until_told(&lab, &lab.cloud.id, &[]).await;
    let listed = volumes::volumes(&lab.cluster).await.expect("a list");
    assert!(listed.iter().all(|volume| volume.waits.is_empty()), "{listed:?}");
}

/// The agent says that the VM's home does not answer, by the address that it knows.
#[tokio::test]
async fn a_job_whose_vm_waits_for_a_home_says_which_and_since_when() {
    let lab = Lab::up().await;
    let (id, vm) = running_as(&lab, super::spec(perigee_model::job::Access::Write)).await;
    let home = lab.cloud.addresses.nbd_addr.clone();
    let waits_for = WaitsFor::Home { volume: data_volume(), home };
    let set = |waits: Vec<Waiting>| {
        let mut inside = lab.home.inside();
        let report: &mut VmReport = &mut inside.vms.get_mut(&vm).expect("a VM").report;
        report.waits = waits;
    };
    set(vec![Waiting { waits_for, since_ms: 1_764_352_284_000 }]);
    let job = lab.wait_for_job(&id, "to wait", |job| !job.waits.is_empty()).await;
    let said =
        "waits for volume tpch: its home cloud1 does not answer (since 2025-11-28 17:51:24 UTC)";
    assert_eq!((job.state, job.reason.as_str()), (JobState::Running, said));
    let shown = vms::get(&lab.cluster, &vm).await.expect("a VM");
    assert_eq!((words(&shown.waits), shown.reason.as_str()), (vec!["home"], said));
    // The store knows it a moment before the rest of the controller.
    wait_for("the metric", async || {
        let page = crate::api::metrics_page(&lab.cluster).await.expect("a page");
        page.contains(r#"perigee_job_waiting_seconds{job="q-0001",for="home"} "#).then_some(())
    })
    .await;
    set(Vec::new());
    lab.wait_for_job(&id, "to go on", |job| job.waits.is_empty() && job.reason.is_empty()).await;
}

/// A job that begins anew when its host is lost, and runs at the first of these.
async fn running_here<'a>(lab: &'a Lab, other: &'a FakeHost) -> (JobId, [&'a FakeHost; 2]) {
    let id = lab.submit(restarting()).await;
    let hosts = running(lab, other, &id).await;
    (id, hosts)
}

async fn restarts(lab: &Lab, id: &JobId) -> u32 {
    jobs::record(&lab.cluster, id).await.expect("a record").restarts
}

/// Its VM was fenced and begun anew, while it did its work.
#[tokio::test]
async fn a_job_goes_on_without_its_agent_while_the_volume_server_sees_its_vm() {
    let lab = Lab::up().await;
    let other = second_home(&lab).await;
    let (id, [host, _]) = running_here(&lab, &other).await;
    host.inside().agent_down = true;
    let said = |job: &perigee_model::job::Job| job.reason.contains("its VM goes on");
    let job = lab.wait_for_job(&id, "to say that it goes on", said).await;
    assert_eq!(words(&job.waits), ["agent"]);
    assert_eq!(lab.cluster.hosts.state(&host.id), HostState::Unreachable);
    // For longer than a silent host takes to be lost.
    tokio::time::sleep(2 * lab.cluster.timing.host_deadline).await;
    assert_eq!(restarts(&lab, &id).await, 0);
    host.inside().agent_down = false;
    lab.wait_for_job(&id, "to be seen again", |job| job.reason.is_empty()).await;
}

/// All parts of the host are upgraded at once.
#[tokio::test]
async fn a_job_waits_for_an_agent_that_was_stopped_in_order() {
    let lab = Lab::up().await;
    let other = second_home(&lab).await;
    let (id, [host, _]) = running_here(&lab, &other).await;
    hosts::stops(&lab.cluster, &host.id).expect("it is noted");
    host.inside().down = true;
    wait_until_told(&lab, &host.id, &["stopped_agent", "volume_server"]).await;
    lab.wait_for_job(&id, "to say what it waits for", |job| job.reason.contains("goes on")).await;
    tokio::time::sleep(2 * lab.cluster.timing.host_deadline).await;
    assert_eq!(restarts(&lab, &id).await, 0);
    host.inside().down = false;
    lab.wait_for_job(&id, "to be seen again", |job| job.reason.is_empty()).await;
}

/// Neither the agent nor a connection of its QEMU is there. What the lost run has printed is kept.
#[tokio::test]
async fn a_job_whose_vm_no_part_of_its_host_sees_begins_anew_and_keeps_its_log() {
    let lab = Lab::up().await;
    let other = second_home(&lab).await;
    let (id, [host, second]) = running_here(&lab, &other).await;
    let line = "the last words".to_owned();
    host.say(&vm_of(&id), GuestBody::log(LogStream::Stdout, line));
    let log = async || jobs::log(&lab.cluster, &id, 0, 100).await.expect("a log");
    wait_for("the line", async || (!log().await.is_empty()).then_some(())).await;
    {
        let mut inside = host.inside();
        (inside.agent_down, inside.sees_no_vms) = (true, true);
    }
    ends_anew(&lab, [second, second], &id).await;
    let lines: Vec<String> = log().await.into_iter().map(|line| line.line).collect();
    assert_eq!(lines[0], "the last words");
    assert!(lines[1].contains(&format!("host {} was lost", host.id)), "{lines:?}");
    assert_eq!(restarts(&lab, &id).await, 1);
    assert_eq!(lab.job(&id).await.spec.restart, Restart::OnHostFailure);
}
