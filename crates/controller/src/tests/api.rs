//! The HTTP API from outside, with the client that everybody uses.

use std::collections::BTreeMap;

use perigee_http::{Client, Peer};
use perigee_model::ProblemKind;
use perigee_model::guest::GuestBody;
use perigee_model::job::{
    Access, ClusterImage, ClusterVolume, Host, Job, JobState, Link, LogLine, Sample, Site, Vm,
};
use perigee_model::plan::{Decision, Plan};

use super::inputs::upload;
use super::{Lab, finish, spec, vm_of, wait_for};

pub async fn client(lab: &Lab) -> Client {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let url = format!("http://{}", listener.local_addr().expect("address"));
    let router = crate::api::router(lab.cluster.clone()).layer(axum::Extension(Peer::Local));
    lab.supervisor.spawn(async move { axum::serve(listener, router).await.expect("serve") });
    Client::new(&url, super::PATIENCE).expect("client")
}

#[tokio::test]
async fn a_job_is_submitted_watched_and_fetched() {
    let lab = Lab::up().await;
    let client = client(&lab).await;
    let mut spec = spec(Access::Clone);
    spec.inputs = Some(upload(&client, &[("q.sql", "hi")]).await);
    let plan: Plan = client.post("/v1/jobs/plan", &spec).await.expect("plan");
    assert!(!plan.options.is_empty());
    let job: Job = client.post("/v1/jobs", &spec).await.expect("submit");
    let vm = vm_of(&job.id);
    lab.wait_for_vm(&lab.home, &vm).await;
    let seed = {
        let inside = lab.home.inside();
        let volume = inside.volumes.iter().find(|(name, _)| name.as_str().ends_with("-seed"));
        volume.expect("seed volume").1.data.clone()
    };
    let mut seed = tar::Archive::new(&seed[..]);
    let paths: Vec<_> = seed
        .entries()
        .expect("entries")
        .map(|e| e.expect("entry").path().expect("path").to_string_lossy().into_owned())
        .collect();
    assert_eq!(paths, ["job.json"]);
    let trees = lab.home.inside().trees.clone();
    assert_eq!(trees, [BTreeMap::from([("q.sql".to_owned(), b"hi".to_vec())])]);
    let vms: Vec<Vm> = client.get("/v1/vms").await.expect("vms");
    assert_eq!(vms[0].job.as_ref(), Some(&job.id));
    let console = client.get_bytes(&format!("/v1/vms/{vm}/console")).await.expect("console");
    assert_eq!(&console[..], b"panic: no root");
    lab.home.say(&vm, GuestBody::Started);
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&job.id, JobState::Succeeded).await;
    let path = |rest: &str| format!("/v1/jobs/{}{rest}", job.id);
    let output = client.get_bytes(&path("/output")).await.expect("output");
    let is_there = output.windows(11).any(|bytes| bytes == b"the answers");
    assert!(is_there && output.starts_with(b"output"), "a tar of it");
    assert_eq!(client.get::<Vec<LogLine>>(&path("/log?after=0")).await.expect("log").len(), 0);
    assert_eq!(client.get::<Vec<Decision>>(&path("/decisions")).await.expect("decisions").len(), 1);
    assert!(!client.get::<Vec<Sample>>(&path("/samples")).await.expect("samples").is_empty());
    client.delete(&path("")).await.expect("delete");
    assert_eq!(client.get::<Vec<Job>>("/v1/jobs").await.expect("jobs").len(), 0);
}

#[tokio::test]
async fn the_cluster_is_listed() {
    let lab = Lab::up().await;
    let client = client(&lab).await;
    let hosts: Vec<Host> = client.get("/v1/hosts").await.expect("hosts");
    assert_eq!(hosts.len(), 2);
    assert_eq!(client.get::<Vec<Site>>("/v1/sites").await.expect("sites").len(), 2);
    let links: Vec<Link> = client.post("/v1/links/probe", &()).await.expect("links");
    assert_eq!(links.len(), 2);
    assert!(links.iter().any(|link| link.blocks.is_some()), "cloud1 has something to read");
    let images: Vec<ClusterImage> = client.get("/v1/images").await.expect("images");
    assert_eq!(images[0].hosts.len(), 2);
    let volumes: Vec<ClusterVolume> = client.get("/v1/volumes").await.expect("volumes");
    assert_eq!((volumes.len(), &volumes[0].home), (1, &lab.cloud.id));
    client.delete("/v1/volumes/tpch").await.expect("delete");
    assert_eq!(client.get::<Vec<ClusterVolume>>("/v1/volumes").await.expect("volumes").len(), 0);
}

#[tokio::test]
async fn a_wrong_request_is_answered_with_what_is_wrong() {
    let lab = Lab::up().await;
    let client = client(&lab).await;
    let wrong = [
        ("/v1/jobs/no-such-job", ProblemKind::NotFound),
        ("/v1/jobs/NO%2F..", ProblemKind::Invalid),
        ("/v1/volumes/none", ProblemKind::NotFound),
        ("/v1/images/none", ProblemKind::NotFound),
        ("/v1/vms/none", ProblemKind::NotFound),
        ("/v1/hosts/none", ProblemKind::NotFound),
        ("/v1/jobs/q-0001/log?after=x", ProblemKind::Invalid),
        ("/v1/images?all=x", ProblemKind::Invalid),
        ("/v1/data/default/a?limit=x", ProblemKind::Invalid),
        ("/v2/jobs", ProblemKind::NotFound),
    ];
    for (path, kind) in wrong {
        let problem = client.get::<serde_json::Value>(path).await.expect_err(path);
        assert_eq!(problem.kind, kind, "{path}: {problem}");
    }
    let body = serde_json::json!({"name": "q", "cpu": 1});
    let problem = client.post::<Job>("/v1/jobs", &body).await.expect_err("not a job");
    assert_eq!(problem.kind, ProblemKind::Invalid);
}

#[tokio::test]
async fn an_image_in_use_at_one_host_is_deleted_at_none() {
    let lab = Lab::up().await;
    let client = client(&lab).await;
    for (used, free) in [(&lab.home, &lab.cloud), (&lab.cloud, &lab.home)] {
        used.inside().image_children = 1;
        let problem = client.delete("/v1/images/debian").await.expect_err("it is in use");
        assert_eq!(problem.kind, ProblemKind::Conflict, "{problem}");
        assert!(!free.inside().images.is_empty(), "the copy at {} is kept", free.id);
        used.inside().image_children = 0;
    }
    lab.cloud.inside().readers = vec!["volume far".to_owned()];
    let problem = client.delete("/v1/images/debian").await.expect_err("another host reads it");
    assert!(problem.why.contains("volume far at cloud1"), "{problem}");
    assert!(!lab.home.inside().images.is_empty() && !lab.cloud.inside().images.is_empty());
    lab.cloud.inside().readers.clear();
    client.delete("/v1/images/debian").await.expect("nothing stands on it");
    assert!(lab.home.inside().images.is_empty() && lab.cloud.inside().images.is_empty());
}

#[tokio::test]
async fn a_snapshot_does_not_take_the_name_of_another_hosts_image() {
    let lab = Lab::up().await;
    let ask = serde_json::json!({"image": "debian"});
    let answer = client(&lab).await.post::<ClusterImage>("/v1/volumes/tpch/snapshot", &ask).await;
    let problem = answer.expect_err("two contents of one name");
    assert_eq!(problem.kind, ProblemKind::Conflict, "{problem}");
}

#[tokio::test]
async fn a_probe_that_reads_nothing_keeps_the_figures_of_before() {
    let lab = Lab::up().await;
    let blocks = |lab: &Lab| {
        let (home, cloud) = (&lab.home.id, &lab.cloud.id);
        let of_link = lab.cluster.links.get(home, cloud).expect("a link").blocks;
        (of_link, lab.cluster.links.local(home).expect("its own reads").blocks)
    };
    crate::planning::links::probe_all(&lab.cluster).await.expect("figures");
    let before = blocks(&lab);
    assert!(before.0.is_some() && before.1.is_some());
    lab.home.inside().reads_no_blocks = true;
    crate::planning::links::probe_all(&lab.cluster).await.expect("round trips, as before");
    assert_eq!(format!("{:?}", blocks(&lab)), format!("{before:?}"));
}

/// A cluster in which nothing was stored yet would send 8 MiB over each link every half a minute.
#[tokio::test]
async fn a_link_over_which_there_is_nothing_to_read_is_not_measured_again_and_again() {
    let lab = Lab::up().await;
    crate::planning::links::probe_all(&lab.cluster).await.expect("figures");
    let hosts = [&lab.home, &lab.cloud];
    hosts.iter().for_each(|host| host.inside().reads_no_blocks = true);
    for link in lab.cluster.links.all() {
        let measured_ms = link.measured_ms - 60_000;
        let link = Link { blocks: None, measured_ms, ..link };
        lab.cluster.links.put(&lab.cluster.records, link).await.expect("a link");
    }
    let probes = || hosts.map(|host| host.inside().link_probes);
    let before = probes();
    // The task that measures looks several times meanwhile.
    tokio::time::sleep(std::time::Duration::from_millis(600)).await;
    assert_eq!(probes(), before);
    // When there is something to read, it is read.
    hosts.iter().for_each(|host| host.inside().reads_no_blocks = false);
    wait_for("the reads of blocks", async || {
        lab.cluster.links.all().iter().all(|link| link.blocks.is_some()).then_some(())
    })
    .await;
    assert_eq!(probes(), before);
}

#[test]
fn the_ports_of_the_ftps_gateway_are_those_of_its_unit() {
    let unit = include_str!("../../../../gateways/ftps/perigee-ftps.service");
    let [commands, data] = crate::FTPS_PORTS;
    assert!(unit.contains(&format!("--listen 0.0.0.0:{} ", commands.start())), "{unit}");
    let data = format!("--passive-ports {}-{}\n", data.start(), data.end());
    assert!(unit.contains(&data), "{unit}");
}
