//! One controller commands the hosts, and another one only when it is told to.

use std::path::Path;

use perigee_http::{Client, Peer};
use perigee_model::ProblemKind;
use perigee_model::job::{Access, Job, JobState};

use super::{Lab, PATIENCE, TIMING, Traffic, answers, finish, running, spec, wait_for};
use crate::supervisor::Supervisor;
use crate::{jobs, term};

/// A copy of the store, as a backup has it.
pub fn copy_store(from: &Path, to: &Path) {
    let store = rusqlite::Connection::open(from.join("state.db")).expect("the store");
    let copy = to.join("state.db").display().to_string();
    store.execute("VACUUM INTO ?1", [copy]).expect("a copy");
}

/// Puts the copy's content into the store, whose file stays the same.
pub fn restore_store(backup: &Path, to: &Path) {
    let store = rusqlite::Connection::open(to.join("state.db")).expect("the store");
    let copy = backup.join("state.db").display().to_string();
    store.execute("ATTACH ?1 AS backup", [copy]).expect("the backup");
    let restored = "DELETE FROM entries; INSERT INTO entries SELECT * FROM backup.entries;";
    store.execute_batch(restored).expect("restored");
}

/// The API of the lab's controller, which goes on when its tasks end.
async fn client(lab: &Lab) -> Client {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let url = format!("http://{}", listener.local_addr().expect("address"));
    let router = crate::api::router(lab.cluster.clone()).layer(axum::Extension(Peer::Local));
    tokio::spawn(async move { axum::serve(listener, router).await.expect("serve") });
    Client::new(&url, PATIENCE).expect("client")
}

pub async fn is_refused(lab: &Lab) -> u64 {
    let refused = async || lab.cluster.claim.refusal();
    wait_for("a host to refuse the controller", refused).await.by
}

#[tokio::test]
async fn a_second_controller_on_a_copy_does_not_start_until_it_takes_over() {
    let mut lab = Lab::up().await;
    let (id, vm) = running(&lab).await;
    let (client, copy) = (client(&lab).await, tempfile::tempdir().expect("a directory"));
    copy_store(lab.dir.path(), copy.path());
    let second = async || Supervisor::start(copy.path(), TIMING, Traffic::Plain).await;
    let refused = second().await.err().expect("it is a copy");
    assert_eq!(refused.kind, ProblemKind::Superseded, "{refused}");
    assert!(refused.next.contains("perigee controller take-over --state"), "{refused}");
    let _: Job = client.get(&format!("/v1/jobs/{id}")).await.expect("the first one goes on");
    assert_eq!(term::take_over(copy.path()).await.expect("told"), 1_000_000);
    let second = second().await.expect("it is the controller now");
    assert_eq!(is_refused(&lab).await, 1_000_001);
    for path in [format!("/v1/jobs/{id}/cancel"), format!("/v1/vms/{vm}/stop")] {
        let ask = serde_json::json!({ "force": true });
        let refused = client.post::<serde_json::Value>(&path, &ask).await.expect_err(&path);
        assert_eq!(refused.kind, ProblemKind::Superseded, "{refused}");
        assert!(refused.why.contains("term 1000001") && refused.next.contains("take-over"));
    }
    // Whatever it was asked before, or is asked after its next start.
    jobs::intend(&lab.cluster, &id, |intent| intent.cancel = true).await.expect("an intent");
    lab.restart_controller().await;
    assert!(lab.cluster.claim.refusal().is_some(), "it remembers");
    // The first refusal ends all that it does, so only one daemon of all may have heard of it.
    let daemons = [&lab.home, &lab.cloud].into_iter().flat_map(|host| &host.terms);
    let warnings: Vec<String> = daemons.flat_map(|daemon| daemon.warnings()).collect();
    assert!(warnings.iter().any(|said| said.contains("is refused")), "{warnings:?}");
    finish(&lab.home, &lab.home, &vm);
    let is_done = async || {
        let job = jobs::get(&second.cluster, &id).await.expect("the job");
        job.state.is_final().then_some(job)
    };
    let done = wait_for("the job to end", is_done).await;
    assert_eq!(done.state, JobState::Succeeded, "{done:?}");
    assert_eq!(lab.job(&id).await.state, JobState::Running, "the first one did nothing");
    second.stop().await;
}

#[tokio::test]
async fn a_restored_controller_is_refused_until_it_is_told_that_it_is_the_one() {
    let mut lab = Lab::up().await;
    let backup = tempfile::tempdir().expect("a directory");
    copy_store(lab.dir.path(), backup.path());
    lab.restart_controller().await;
    lab.restart_controller().await;
    let (id, vm) = running(&lab).await;
    lab.supervisor.stop().await;
    restore_store(backup.path(), lab.dir.path());
    lab.start_controller(TIMING).await;
    assert_eq!(is_refused(&lab).await, 3);
    let client = client(&lab).await;
    let refused = client.post::<Job>("/v1/jobs", &spec(Access::Read)).await.expect_err("refused");
    assert!(refused.next.contains("perigee controller take-over"), "{refused}");
    let _: Vec<Job> = client.get("/v1/jobs").await.expect("it shows what it has");
    let held = term::take_over(lab.dir.path()).await.expect_err("it runs");
    assert_eq!(held.kind, ProblemKind::Conflict, "{held}");
    lab.supervisor.stop().await;
    term::take_over(lab.dir.path()).await.expect("told");
    lab.start_controller(TIMING).await;
    let [of_agent, _] = &lab.home.terms;
    wait_for("the hosts to obey", async || (of_agent.number() > 1_000_000).then_some(())).await;
    assert!(lab.cluster.claim.refusal().is_none());
    assert!(lab.home.inside().vms.contains_key(&vm), "of {id}, which it does not know");
    assert!(answers(&lab, &id).is_none());
}
