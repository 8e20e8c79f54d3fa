//! Requests with an `Idempotency-Key`: each makes one thing, whatever becomes of the answers and of the controller.

use std::collections::BTreeSet;

use axum::Extension;
use perigee_http::Peer;
use serde_json::{Value, json};

use super::tenants::{Tenants, make_token, small};
use super::web::{Said, send};
use super::*;
use crate::records::asked::KEPT_MS;

const HEADER: &str = "idempotency-key";

/// Where a controller's API is asked.
struct Door {
    address: String,
}

impl Door {
    /// As the controller's own host asks.
    async fn of(lab: &Lab) -> Self {
        Self::with(lab, Peer::Local).await
    }

    async fn with(lab: &Lab, peer: Peer) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("address").to_string();
        let router = crate::api::router(lab.cluster.clone()).layer(Extension(peer));
        lab.supervisor.spawn(async move { axum::serve(listener, router).await.expect("serve") });
        Self { address }
    }

    async fn post(&self, path: &str, key: &str, body: &Value) -> Said {
        let headers = [(HEADER, key), ("content-type", "application/json")];
        send(&self.address, "POST", path, &headers, &body.to_string()).await
    }

    /// Asks until it is carried out: a host may not be heard yet, or the first request not be over.
    async fn made(&self, path: &str, key: &str, body: &Value) -> Value {
        wait_for(&format!("POST {path}"), async || {
            let said = self.post(path, key, body).await;
            match said.status {
                200 => Some(json_of(&said)),
                409 | 503 => None,
                _ => panic!("POST {path}: {said:?}"),
            }
        })
        .await
    }

    async fn get(&self, path: &str) -> Value {
        let said = send(&self.address, "GET", path, &[], "").await;
        assert_eq!(said.status, 200, "GET {path}: {said:?}");
        json_of(&said)
    }
}

fn json_of(said: &Said) -> Value {
    serde_json::from_str(&said.body).unwrap_or_else(|e| panic!("{e}: {said:?}"))
}

fn job(name: &str) -> Value {
    serde_json::to_value(small(name)).expect("JSON")
}

async fn jobs(door: &Door) -> usize {
    door.get("/v1/jobs").await.as_array().expect("a list").len()
}

#[tokio::test]
async fn a_submission_that_is_repeated_is_answered_with_the_same_job() {
    let lab = Lab::up().await;
    let door = Door::of(&lab).await;
    for _ in 0..3 {
        let said = door.post("/v1/jobs", "a", &job("q")).await;
        assert_eq!((said.status, &json_of(&said)["id"]), (200, &json!("q-0001")), "{said:?}");
    }
    let other = door.post("/v1/jobs", "b", &job("q")).await;
    assert_eq!(json_of(&other)["id"], "q-0002", "another key makes another job");
    assert_eq!(jobs(&door).await, 2);
}

#[tokio::test]
async fn a_submission_whose_job_was_deleted_makes_no_other_job() {
    let lab = Lab::up().await;
    let door = Door::of(&lab).await;
    let made = door.made("/v1/jobs", "a", &job("q")).await;
    let id: JobId = made["id"].as_str().expect("an id").parse().expect("a name");
    crate::jobs::intend(&lab.cluster, &id, |intent| intent.cancel = true).await.expect("cancelled");
    lab.wait_for_state(&id, JobState::Cancelled).await;
    wait_for("its deletion", async || crate::jobs::delete(&lab.cluster, &id, false).await.ok())
        .await;
    let again = door.post("/v1/jobs", "a", &job("q")).await;
    assert_eq!(again.status, 404, "{again:?}");
    assert!(again.body.contains("has made job q-0001, which is not there any more"), "{again:?}");
    assert_eq!(jobs(&door).await, 0);
}

#[tokio::test]
async fn a_key_of_another_request_is_refused() {
    let lab = Lab::up().await;
    let door = Door::of(&lab).await;
    door.made("/v1/jobs", "a", &job("q")).await;
    let network = json!({"name": "q", "subnet": "10.7.0.0/24"});
    for (path, body) in [("/v1/jobs", job("p")), ("/v1/networks", network)] {
        let said = door.post(path, "a", &body).await;
        assert_eq!(said.status, 422, "{said:?}");
        assert!(said.body.contains("was used for another request"), "{said:?}");
    }
    let said = door.post("/v1/jobs/q-0001/cancel", "b", &json!({})).await;
    assert_eq!(said.status, 400, "it makes nothing: {said:?}");
    assert!(said.body.contains("takes no Idempotency-Key"), "{said:?}");
    let said = door.post("/v1/jobs", &"k".repeat(256), &job("q")).await;
    assert_eq!(said.status, 400, "{said:?}");
    assert!(said.body.contains("the length of an Idempotency-Key is 256"), "{said:?}");
    let headers = [(HEADER, "c"), (HEADER, "d"), ("content-type", "application/json")];
    let said = send(&door.address, "POST", "/v1/jobs", &headers, &job("q").to_string()).await;
    assert_eq!(said.status, 400, "which one counts?: {said:?}");
    assert_eq!(jobs(&door).await, 1);
}

#[tokio::test]
async fn two_users_with_one_key_make_two_jobs() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    let door = Door::with(&tenants.lab, Peer::Stranger).await;
    let mut made = BTreeSet::new();
    for user in ["acme/ann", "acme/amy", "blue/bob"] {
        let token = format!("Bearer {}", make_token(&tenants.admin, user).await.token);
        for _ in 0..2 {
            let headers =
                [(HEADER, "a"), ("authorization", &token), ("content-type", "application/json")];
            let body = job("q").to_string();
            let said = send(&door.address, "POST", "/v1/jobs", &headers, &body).await;
            assert_eq!(said.status, 200, "{said:?}");
            made.insert(json_of(&said)["id"].as_str().expect("an id").to_owned());
        }
    }
    assert_eq!(made, ["acme~q-0001", "acme~q-0002", "blue~q-0001"].map(str::to_owned).into());
}

#[tokio::test]
async fn a_user_who_was_removed_has_asked_for_nothing() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    let door = Door::with(&tenants.lab, Peer::Stranger).await;
    let token = format!("Bearer {}", make_token(&tenants.admin, "acme/ann").await.token);
    let headers = [(HEADER, "a"), ("authorization", &token), ("content-type", "application/json")];
    let said = send(&door.address, "POST", "/v1/jobs", &headers, &job("q").to_string()).await;
    assert_eq!(said.status, 200, "{said:?}");
    let cluster = &tenants.lab.cluster;
    let asked = async || cluster.records.keys("requests/acme/ann/").await.expect("keys").len();
    assert_eq!(asked().await, 1);
    let (acme, ann) = ("acme".parse().expect("a name"), "ann".parse().expect("a name"));
    crate::accounts::remove_user(cluster, &acme, &ann).await.expect("removed");
    assert_eq!(asked().await, 0);
}

#[tokio::test]
async fn requests_with_one_key_at_once_make_one_job() {
    let lab = Lab::up().await;
    let door = Door::of(&lab).await;
    let body = job("q");
    let all = futures_util::future::join_all((0..8).map(|_| door.post("/v1/jobs", "a", &body)));
    let (mut done, mut ids) = (0, BTreeSet::new());
    for said in all.await {
        match said.status {
            200 => {
                done += 1;
                ids.insert(json_of(&said)["id"].to_string());
            }
            409 => assert!(said.header("retry-after").is_some(), "{said:?}"),
            _ => panic!("{said:?}"),
        }
    }
    assert!(done > 0 && ids.len() == 1, "{done} answers of {ids:?}");
    assert_eq!(jobs(&door).await, 1);
}

#[tokio::test]
async fn a_request_goes_on_without_its_client_and_is_waited_for() {
    let lab = Lab::up().await;
    let door = Arc::new(Door::of(&lab).await);
    lab.cloud.inside().holds_snapshots = true;
    let (path, body) = ("/v1/volumes/tpch/snapshot", json!({"image": "s"}));
    let (first, ask) = (Arc::clone(&door), body.clone());
    let first = tokio::spawn(async move { first.post(path, "a", &ask).await });
    wait_for("the first request's record", async || {
        let keys = lab.cluster.records.keys("images/s").await.expect("the store");
        (!keys.is_empty()).then_some(())
    })
    .await;
    let said = door.post(path, "a", &body).await;
    assert_eq!(said.status, 409, "{said:?}");
    assert_eq!(said.header("retry-after"), Some("1"), "{said:?}");
    first.abort();
    lab.cloud.inside().holds_snapshots = false;
    assert_eq!(door.made(path, "a", &body).await["name"], "s");
    assert_eq!(door.made(path, "a", &body).await["name"], "s", "and again");
}

#[tokio::test]
async fn a_snapshot_that_was_broken_off_before_its_host_had_made_it_is_made_by_the_same_request() {
    let mut lab = Lab::up().await;
    let door = Door::of(&lab).await;
    lab.cloud.inside().holds_snapshots = true;
    // The first controller writes only that the name is taken.
    let _cut = lab.cluster.records.counts.cut_at("images/s", 2);
    let (path, body) = ("/v1/volumes/tpch/snapshot", json!({"image": "s"}));
    let ask = body.clone();
    let first = tokio::spawn(async move { door.post(path, "a", &ask).await });
    wait_for("the first request's record", async || {
        let keys = lab.cluster.records.keys("images/s").await.expect("the store");
        (!keys.is_empty()).then_some(())
    })
    .await;
    first.abort();
    lab.restart_controller().await;
    lab.cloud.inside().holds_snapshots = false;
    let door = Door::of(&lab).await;
    assert_eq!(door.made(path, "a", &body).await["name"], "s");
    let other = door.post(path, "b", &body).await;
    assert_eq!(other.status, 409, "the name is taken for every other request: {other:?}");
}

#[tokio::test]
async fn a_request_that_made_nothing_is_carried_out_when_it_is_repeated() {
    let lab = Lab::up().await;
    let door = Door::of(&lab).await;
    let body = json!({"name": "v", "host": "home1", "size_bytes": 4096, "source": "empty"});
    lab.home.inside().no_new_volumes = true;
    let said = door.post("/v1/volumes", "a", &body).await;
    assert!(said.status >= 400, "{said:?}");
    lab.home.inside().no_new_volumes = false;
    assert_eq!(door.made("/v1/volumes", "a", &body).await["home"], "home1");
    let again = door.post("/v1/volumes", "a", &body).await;
    assert_eq!(again.status, 200, "{again:?}");
    let (headers, body) = ([("content-type", "application/json")], body.to_string());
    let without = send(&door.address, "POST", "/v1/volumes", &headers, &body).await;
    assert_eq!(without.status, 409, "the name is taken for every other request");
}

#[tokio::test]
async fn a_key_is_forgotten_after_a_day() {
    let lab = Lab::up().await;
    let door = Door::of(&lab).await;
    assert_eq!(door.made("/v1/jobs", "a", &job("q")).await["id"], "q-0001");
    lab.cluster.clock.pretend_passed(Duration::from_millis(KEPT_MS));
    assert_eq!(door.made("/v1/jobs", "a", &job("q")).await["id"], "q-0002");
    door.made("/v1/jobs", "b", &job("q")).await;
    let kept = lab.cluster.records.keys("requests/").await.expect("the store");
    assert_eq!(kept.len(), 1, "the old ones are removed: {kept:?}");
}

/// A kind of thing that is made once, and the part of its records' keys by which its writes are counted.
struct Kind {
    path: &'static str,
    body: Value,
    /// Where such things are listed, and how many are there without it.
    list: &'static str,
    others: usize,
    of: &'static str,
}

fn kinds() -> Vec<Kind> {
    let kind = |path, list, others, of, body| Kind { path, body, list, others, of };
    let (name, memory_bytes) = ("once", 1_u64 << 28);
    let vm = json!({"name": name, "image": "debian", "cpus": 1, "memory_bytes": memory_bytes});
    let volume = json!({"name": name, "host": "home1", "size_bytes": 4096, "source": "empty"});
    let backup = json!({"volume": "tpch", "to": {"address": "/backups"}});
    vec![
        kind("/v1/jobs", "/v1/jobs", 0, "once", job(name)),
        kind("/v1/vms", "/v1/vms", 0, "once", vm),
        kind("/v1/volumes", "/v1/volumes", 1, "once", volume),
        kind(
            "/v1/networks",
            "/v1/networks",
            0,
            "once",
            json!({"name": name, "subnet": "10.7.0.0/24"}),
        ),
        kind("/v1/volumes/tpch/snapshot", "/v1/images", 1, "once", json!({"image": name})),
        kind("/v1/tenants", "/v1/tenants", 1, "once", json!({"name": name})),
        kind("/v1/backups", "/v1/backups", 0, "backups/", backup),
    ]
}

/// The controller is killed instead of this write, before or after it has answered, and started again. Then the client repeats its request.
async fn killed_at(write: u64, kind: &Kind) {
    let mut lab = Lab::up().await;
    let door = Door::of(&lab).await;
    let cut = lab.cluster.records.counts.cut_at(kind.of, write);
    let (path, body) = (kind.path, kind.body.clone());
    let mut first = tokio::spawn(async move { door.post(path, "a", &body).await });
    let first_id = tokio::select! {
        answered = &mut first => Some(json_of(&answered.expect("no panic"))),
        () = wait_for("the cut", async || cut.is_reached().then_some(())) => None,
    };
    first.abort();
    lab.restart_controller().await;
    let door = Door::of(&lab).await;
    let made = door.made(kind.path, "a", &kind.body).await;
    let name = |thing: &Value| thing.get("id").or(thing.get("name")).cloned();
    if let Some(first) = first_id {
        assert_eq!(name(&made), name(&first), "{path} without write {write}");
    }
    let all = door.get(kind.list).await;
    let all = all.as_array().expect("a list");
    assert_eq!(all.len(), kind.others + 1, "{path} without write {write}: {all:?}");
    assert!(all.iter().any(|one| name(one) == name(&made)), "{path}: {made} among {all:?}");
    lab.supervisor.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_that_is_killed_at_any_write_of_a_request_makes_its_thing_once() {
    for kind in kinds() {
        futures_util::future::join_all((1..=4).map(|write| killed_at(write, &kind))).await;
    }
}

#[tokio::test]
async fn a_job_file_is_a_body_too() {
    let lab = Lab::up().await;
    let door = Door::of(&lab).await;
    let headers = [("content-type", "application/yaml")];
    let text = "name: file\nimage: debian\ncommand: run\ncpus: 2\n";
    let said = send(&door.address, "POST", "/v1/jobs", &headers, text).await;
    let job = json_of(&said);
    assert_eq!((&job["id"], &job["spec"]["cpus"]), (&json!("file-0001"), &json!(2)), "{said:?}");
    let unnamed = send(
        &door.address,
        "POST",
        "/v1/jobs",
        &headers,
        r#"{"image": "debian", "command": ["run"]}"#,
    )
    .await;
    assert_eq!(json_of(&unnamed)["id"], "job-0001", "JSON is YAML: {unnamed:?}");
    let plan = send(&door.address, "POST", "/v1/jobs/plan", &headers, text).await;
    assert_eq!(plan.status, 200, "{plan:?}");
    let wrong =
        send(&door.address, "POST", "/v1/jobs", &headers, "image: debian\ncommand: run\ncpu: 2\n")
            .await;
    assert!(wrong.status == 400 && wrong.body.contains("job:3: cpu"), "{wrong:?}");
    let with_files = format!("{text}inputs: [a]\n");
    let refused = send(&door.address, "POST", "/v1/jobs", &headers, &with_files).await;
    assert!(refused.status == 400 && refused.body.contains("no files beside it"), "{refused:?}");
}

#[tokio::test]
async fn a_wait_is_answered_when_the_job_has_ended() {
    let lab = Lab::up().await;
    let door = Arc::new(Door::of(&lab).await);
    let (id, vm) = running_as(&lab, spec(Access::Clone)).await;
    let path = format!("/v1/jobs/{id}");
    let now = door.get(&format!("{path}?wait=1s")).await;
    assert_eq!(now["state"], "running", "the time is over before");
    let (asks, wait) = (Arc::clone(&door), format!("{path}?wait=60s"));
    let ended = tokio::spawn(async move {
        // A busy machine may need more than one wait.
        loop {
            let job = asks.get(&wait).await;
            if job["state"] != "running" && job["state"] != "collecting" {
                return job;
            }
        }
    });
    finish(&lab.home, &lab.home, &vm);
    assert_eq!(ended.await.expect("no panic")["state"], "succeeded");
    for wrong in ["61s", "5", "soon"] {
        let said = send(&door.address, "GET", &format!("{path}?wait={wrong}"), &[], "").await;
        assert!(said.status == 400 && said.body.contains("wait: "), "{said:?}");
    }
}

#[tokio::test]
async fn a_vm_says_with_what_body_such_a_vm_is_made() {
    let lab = Lab::up().await;
    let door = Door::of(&lab).await;
    let new = json!({
        "name": "web", "image": "debian", "cpus": 2, "cpus_max": 4, "memory_bytes": 1_u64 << 28, "memory_max_bytes": 1_u64 << 29,
        "disk_bytes": 2_u64 << 30, "network": "none", "publish": [],
        "volumes": [{"volume": "tpch", "read_only": true, "mount": "/data"}],
        "start": {"site": "home"}, "may_migrate": false, "restart_elsewhere": true, "stopped": true,
        "firmware": "uefi", "labels": {"team": "blue"}, "rules": {"apart": "db"},
        "cloud_init": {"user_data": "#!/bin/sh\necho secret"},
    });
    let said = send(
        &door.address,
        "POST",
        "/v1/vms",
        &[("content-type", "application/json")],
        &new.to_string(),
    )
    .await;
    assert_eq!(said.status, 200, "{said:?}");
    let mut declared = door.get("/v1/vms/web").await["declared"].take();
    assert!(!declared.to_string().contains("secret"), "{declared}");
    for (field, asked) in new.as_object().expect("a map") {
        if field != "cloud_init" && field != "rules" {
            assert_eq!(declared[field], *asked, "{field}");
        }
    }
    assert_eq!(declared["rules"]["apart"], "db");
    declared["name"] = json!("web2");
    let said = send(
        &door.address,
        "POST",
        "/v1/vms",
        &[("content-type", "application/json")],
        &declared.to_string(),
    )
    .await;
    assert_eq!(said.status, 200, "{said:?}");
}
