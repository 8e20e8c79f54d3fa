//! Staging: how fast it may be beside VMs that run, and how far it is.

use perigee_model::job::{Access, JobSpec, JobState, Link, Start};
use perigee_model::vm::LinkProbe;
use perigee_model::{HostId, JobId, SiteId};

use super::fake::FakeHost;
use super::{Lab, finish, spec, vm_of, wait_for};
use crate::clock::now_ms;
use crate::cluster::Settings;
use crate::cluster::paces::Way;
use crate::files::pace::while_kept;
use crate::hosts;
use crate::planning::links;

/// The limit that holds now for what is staged at a host.
async fn limit(lab: &Lab, host: &FakeHost, way: Way) -> Option<u64> {
    let (cluster, host) = (&lab.cluster, lab.cluster.hosts.get(&host.id).expect("a host"));
    let pace = cluster.paces.of(&host, way);
    while_kept(cluster, &host, way, &pace, async { pace.bytes_per_s() }).await
}

/// The link's rate as `from` has measured it, which reads from `to`.
async fn measured(lab: &Lab, from: &HostId, to: &HostId, rate_bytes_per_s: u64) {
    let link = Link {
        from: from.clone(),
        to: to.clone(),
        probe: LinkProbe { rtt_ms: 16.0, rate_bytes_per_s },
        blocks: None,
        // No plan finds it old.
        measured_ms: now_ms() + 3_600_000,
    };
    lab.cluster.links.put(&lab.cluster.records, link).await.expect("a link");
}

async fn run_at(lab: &Lab, host: &FakeHost, volumes: bool) -> JobId {
    let mut new = JobSpec { start: Start::Host(host.id.clone()), ..spec(Access::Read) };
    if !volumes {
        new.volumes.clear();
    }
    let id = lab.submit(new).await;
    lab.wait_for_vm(host, &vm_of(&id)).await;
    id
}

/// The controller is at the site `cloud`, and hosts have measured its link with `home` in both directions.
async fn measured_lab() -> Lab {
    let site = Some(SiteId::new("cloud").expect("a name"));
    let lab = Lab::up_with(Settings { site, ..Settings::default() }).await;
    links::probe_all(&lab.cluster).await.expect("figures");
    measured(&lab, &lab.home.id, &lab.cloud.id, 40_000_000).await;
    measured(&lab, &lab.cloud.id, &lab.home.id, 10_000_000).await;
    lab
}

#[tokio::test]
async fn staging_has_half_of_what_its_link_carries_in_its_direction_while_a_vm_runs_there() {
    let lab = measured_lab().await;
    assert_eq!(limit(&lab, &lab.home, Way::In).await, None, "nothing runs");
    let id = run_at(&lab, &lab.home, false).await;
    wait_for("a limit", async || limit(&lab, &lab.home, Way::In).await).await;
    assert_eq!(limit(&lab, &lab.home, Way::In).await, Some(20_000_000));
    assert_eq!(limit(&lab, &lab.home, Way::Out).await, Some(5_000_000));
    finish(&lab.home, &lab.home, &vm_of(&id));
    lab.wait_for_state(&id, JobState::Succeeded).await;
    wait_for("the end", async || limit(&lab, &lab.home, Way::In).await.is_none().then_some(()))
        .await;
}

#[tokio::test]
async fn a_vm_that_reads_its_disk_over_the_link_slows_staging_at_the_other_end() {
    let lab = measured_lab().await;
    let far = FakeHost::start("far1", "far").await;
    hosts::register(&lab.cluster, &far.id, far.addresses.clone()).await.expect("register");
    links::probe_all(&lab.cluster).await.expect("figures");
    measured(&lab, &far.id, &lab.cloud.id, 8_000_000).await;
    // Its volume is at `cloud`, where the controller is.
    run_at(&lab, &lab.home, true).await;
    let rate = wait_for("a limit", async || limit(&lab, &far, Way::In).await).await;
    assert_eq!(rate, 4_000_000, "the link between the controller and that host counts");
}

#[tokio::test]
async fn a_vm_elsewhere_slows_no_staging() {
    let lab = measured_lab().await;
    let far = FakeHost::start("far1", "far").await;
    hosts::register(&lab.cluster, &far.id, far.addresses.clone()).await.expect("register");
    run_at(&lab, &far, false).await;
    wait_for("a limit", async || limit(&lab, &far, Way::In).await).await;
    assert_eq!(limit(&lab, &lab.home, Way::In).await, None);
}

#[tokio::test]
async fn the_slowest_link_counts_where_nobody_knows_the_controllers_site() {
    let lab = Lab::up().await;
    links::probe_all(&lab.cluster).await.expect("figures");
    measured(&lab, &lab.home.id, &lab.cloud.id, 6_000_000).await;
    measured(&lab, &lab.home.id, &HostId::new("cloud2").expect("name"), 9_000_000).await;
    run_at(&lab, &lab.home, false).await;
    let rate = wait_for("a limit", async || limit(&lab, &lab.home, Way::In).await).await;
    assert_eq!(rate, 3_000_000);
}

#[tokio::test]
async fn a_job_says_how_much_of_its_inputs_has_been_sent() {
    let lab = Lab::up().await;
    let client = super::api::client(&lab).await;
    let text = "x".repeat(2_500_000);
    let list = super::inputs::upload(&client, &[("a", &text)]).await;
    lab.home.inside().trees_hang = true;
    let id = lab.submit(JobSpec { inputs: Some(list), ..spec(Access::Clone) }).await;
    let said = |job: &perigee_model::job::Job| job.reason.contains("staging inputs: 3 of 3 MB");
    lab.wait_for_job(&id, "all sent", said).await;
    (lab.home.inside().imports_hang, lab.home.inside().trees_hang) = (true, false);
    let made = |job: &perigee_model::job::Job| job.reason.contains("making a disk of 3 MB");
    lab.wait_for_job(&id, "the disk to be made", made).await;
    lab.home.inside().imports_hang = false;
    let done = |job: &perigee_model::job::Job| job.state == JobState::Starting;
    let job = lab.wait_for_job(&id, "its start", done).await;
    assert!(!job.reason.contains("staging"), "{}", job.reason);
}
