//! Versions of daemons, and the end of an upgrade.

use perigee_model::job::{Access, JobState};
use perigee_model::upgrade::{DaemonVersion, FORMAT_LEVEL, FinishUpgrade, Upgrade};
use perigee_model::{Problem, ProblemKind};
use serde_json::{Value, json};

use super::fake::FakeHost;
use super::{Lab, TIMING, finish, running_as, spec, wait_for};
use crate::cluster::Traffic;
use crate::level;
use crate::records::{HostRecord, job_key};
use crate::supervisor::Supervisor;
use crate::upgrade::{raise_to, status};

/// Of the version that comes next.
const NEXT: u32 = FORMAT_LEVEL + 1;

fn version(format_level: u32) -> DaemonVersion {
    DaemonVersion { format_level, ..DaemonVersion::own() }
}

/// Both daemons of the host say this.
fn says(host: &FakeHost, version: Option<DaemonVersion>) {
    let mut inside = host.inside();
    inside.pool_free_bytes = Some(1 << 40);
    inside.version = version;
}

async fn refusal(lab: &Lab) -> Problem {
    let problem = raise_to(&lab.cluster, FinishUpgrade::default(), NEXT).await;
    assert_eq!(level::in_force(&lab.cluster.records).await.expect("a level"), FORMAT_LEVEL);
    problem.expect_err("it is refused")
}

#[tokio::test]
async fn an_upgrade_does_not_end_while_a_daemon_is_older_or_silent_or_does_not_say_its_version() {
    let lab = Lab::up().await;
    says(&lab.home, Some(version(NEXT)));
    says(&lab.cloud, None);
    let problem = refusal(&lab).await;
    assert!(
        problem.why.starts_with("host cloud1: its agent does not say its version"),
        "{problem}"
    );
    assert!(!problem.why.contains("home1"), "{problem}");
    says(&lab.cloud, Some(version(FORMAT_LEVEL)));
    let problem = refusal(&lab).await;
    assert!(problem.why.contains("host cloud1: its volume server has version"), "{problem}");
    says(&lab.cloud, Some(version(NEXT)));
    lab.cloud.inside().server_down = true;
    let problem = refusal(&lab).await;
    assert!(problem.why.starts_with("host cloud1: its volume server does not answer"), "{problem}");
}

#[tokio::test]
async fn an_upgrade_ends_without_a_host_that_is_given_up_and_an_older_controller_does_not_start_then()
 {
    let lab = Lab::up().await;
    says(&lab.home, Some(version(NEXT)));
    lab.cloud.inside().down = true;
    refusal(&lab).await;
    let ask = FinishUpgrade { without: vec![lab.cloud.id.clone()] };
    let ended = raise_to(&lab.cluster, ask, NEXT).await.expect("it ends");
    assert_eq!((ended.format_level, ended.held_back_level), (NEXT, None));
    lab.supervisor.stop().await;
    let started = Supervisor::start(lab.dir.path(), TIMING, Traffic::Plain).await;
    let Err(problem) = started else { panic!("a controller started that can't read the store") };
    assert_eq!(problem.kind, ProblemKind::Unsupported);
    let raised = format!("has raised its format level to {NEXT}");
    assert!(problem.why.contains(&raised), "{problem}");
    assert!(problem.next.contains("install the version again"), "{problem}");
}

#[tokio::test]
async fn a_host_that_is_off_has_the_versions_that_it_last_said_also_for_the_next_controller() {
    let mut lab = Lab::up().await;
    let said = Some(version(NEXT));
    says(&lab.home, said.clone());
    wait_for("the record to have both versions", async || {
        let record = lab.cluster.records.read::<HostRecord>("hosts/home1").await;
        let versions = record.expect("the store").expect("the host").versions;
        (versions.agent == said && versions.volume_server == said).then_some(())
    })
    .await;
    lab.home.inside().down = true;
    lab.restart_controller().await;
    let shown = status(&lab.cluster).await.expect("a status");
    let home = shown.hosts.iter().find(|of| of.host == lab.home.id).expect("the host");
    assert_eq!((&home.agent.version, &home.volume_server.version), (&said, &said));
    assert_eq!(home.agent.differs, Some(true));
    assert!(home.agent.silent.is_some() && home.volume_server.silent.is_some(), "{home:?}");
}

#[tokio::test]
async fn nothing_is_held_back_where_all_know_the_level_in_force() {
    let lab = Lab::up().await;
    for host in [&lab.home, &lab.cloud] {
        says(host, Some(DaemonVersion::own()));
    }
    let client = super::api::client(&lab).await;
    let shown: Upgrade = client.get("/v1/upgrade").await.expect("a status");
    assert_eq!((shown.format_level, shown.held_back_level), (FORMAT_LEVEL, None));
    assert!(shown.blocks.is_empty() && shown.hosts.len() == 2, "{shown:?}");
    let ask = FinishUpgrade::default();
    let ended: Upgrade = client.post("/v1/upgrade/finish", &ask).await.expect("it ends");
    assert_eq!(ended, shown);
}

/// As after a way back from the next version, which had the job running.
#[tokio::test]
async fn a_running_job_loses_no_field_of_a_newer_version() {
    let mut lab = Lab::up().await;
    let (id, vm) = running_as(&lab, spec(Access::Read)).await;
    lab.supervisor.stop().await;
    let key = job_key(&id);
    let read = async |lab: &Lab| -> Value {
        lab.cluster.records.read(&key).await.expect("the store").expect("the job")
    };
    let mut record = read(&lab).await;
    record["newer"] = json!([1]);
    record["job"]["spec"]["newer"] = json!({"a": 1});
    record["meter"]["newer"] = json!(2);
    lab.cluster.records.put(&key, &record).await.expect("as the next version has it");
    lab.start_controller(TIMING).await;
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await;
    let record = read(&lab).await;
    assert_eq!(record["newer"], json!([1]));
    assert_eq!(record["job"]["spec"]["newer"], json!({"a": 1}));
    assert_eq!(record["meter"]["newer"], json!(2));
}

#[tokio::test]
async fn a_host_that_is_given_up_has_to_be_known() {
    let lab = Lab::up().await;
    let ask = FinishUpgrade { without: vec!["home9".parse().expect("a name")] };
    let problem = raise_to(&lab.cluster, ask, NEXT).await.expect_err("there is no such host");
    assert_eq!(problem.kind, ProblemKind::NotFound);
}
