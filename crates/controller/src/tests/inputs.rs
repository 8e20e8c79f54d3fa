//! A job's inputs: what becomes of a list, whose files it may name, and when something is made or removed.

use std::collections::BTreeMap;

use perigee_http::{Client, Method};
use perigee_model::data::FileEntry;
use perigee_model::guest::GuestBody;
use perigee_model::inputs::{Input, InputFrom, InputList, UPLOADED_INPUTS, UploadedFile};
use perigee_model::job::{Access, ClusterImage, Job, JobSpec, JobState, Start};
use perigee_model::{DiskRole, ImageName, Problem, ProblemKind};
use sha2::{Digest, Sha256};

use super::tenants::{Tenants, small};
use super::{Lab, finish, running_as, spec, vm_of, wait_for};
use crate::files::inputs::collect_once;
use crate::records::{ImageRecord, RefusedSource, image_key};

fn sha256(bytes: &[u8]) -> String {
    crate::hash::hex(&Sha256::digest(bytes))
}

async fn put(client: &Client, path: &str, bytes: &[u8]) -> FileEntry {
    let url = format!("/v1/data/~/{path}");
    client.send_body(Method::PUT, &url, bytes.to_vec()).await.expect("a file")
}

async fn put_named(client: &Client, bytes: &[u8]) -> String {
    let sha256 = sha256(bytes);
    put(client, &format!("{UPLOADED_INPUTS}/{sha256}"), bytes).await;
    sha256
}

pub async fn put_list(client: &Client, inputs: Vec<Input>) -> String {
    let list = serde_json::to_vec(&InputList { inputs }).expect("JSON");
    put_named(client, &list).await
}

fn input(to: &str, from: InputFrom) -> Input {
    Input { to: to.to_owned(), from }
}

fn repository(to: &str, address: &str) -> Input {
    input(to, InputFrom::Repository(address.to_owned()))
}

/// Uploads files as `job submit` does, and returns the name of their list.
pub async fn upload(client: &Client, files: &[(&str, &str)]) -> String {
    let mut inputs = Vec::new();
    for (to, text) in files {
        let sha256 = put_named(client, text.as_bytes()).await;
        let size_bytes = text.len() as u64;
        let file = UploadedFile { sha256, size_bytes, executable: false };
        inputs.push(input(to, InputFrom::File(file)));
    }
    put_list(client, inputs).await
}

fn tree(files: &[(&str, &str)]) -> BTreeMap<String, Vec<u8>> {
    let entry = |(path, text): &(&str, &str)| ((*path).to_owned(), text.as_bytes().to_vec());
    files.iter().map(entry).collect()
}

async fn run(lab: &Lab, list: &str) -> Job {
    let ask = JobSpec { inputs: Some(list.to_owned()), ..spec(Access::Clone) };
    let id = lab.submit(ask).await;
    let vm = vm_of(&id);
    lab.wait_for_vm(&lab.home, &vm).await;
    finish(&lab.home, &lab.home, &vm);
    lab.wait_for_state(&id, JobState::Succeeded).await
}

fn images_of_inputs(lab: &Lab) -> Vec<ImageName> {
    let inside = lab.home.inside();
    inside.images.keys().filter(|name| name.as_str().starts_with("inputs-")).cloned().collect()
}

#[tokio::test]
async fn the_same_inputs_are_staged_once_and_each_job_has_its_own_disk() {
    let lab = Lab::up().await;
    let client = super::api::client(&lab).await;
    put(&client, "measured/a.csv", b"1").await;
    put(&client, "measured/deep/b.csv", b"2").await;
    put(&client, "one.txt", b"3").await;
    let sha256 = put_named(&client, b"echo hi").await;
    let script = UploadedFile { sha256, size_bytes: 7, executable: true };
    let list = put_list(
        &client,
        vec![
            input("run.sh", InputFrom::File(script)),
            input("empty", InputFrom::Directory {}),
            repository("data", "repo://default/measured"),
            repository("renamed.txt", "one.txt"),
        ],
    )
    .await;
    let ask = JobSpec { inputs: Some(list.clone()), ..spec(Access::Clone) };
    let id = lab.submit(ask).await;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    let disks = lab.home.inside().vms[&vm_of(&id)].report.spec.disks.clone();
    let roles: Vec<_> = disks.iter().map(|disk| disk.role).collect();
    let data = DiskRole::Data(0);
    assert_eq!(roles, [DiskRole::Root, DiskRole::Seed, DiskRole::Output, DiskRole::Inputs, data]);
    assert!(!disks[3].read_only, "a job may write beside its inputs");
    assert_eq!(disks[3].volume.as_str(), format!("{id}-inputs"));
    let expected = tree(&[
        ("data", ""),
        ("data/a.csv", "1"),
        ("data/deep", ""),
        ("data/deep/b.csv", "2"),
        ("empty", ""),
        ("renamed.txt", "3"),
        ("run.sh", "echo hi"),
    ]);
    assert_eq!(lab.home.inside().trees, [expected]);
    finish(&lab.home, &lab.home, &vm_of(&id));
    lab.wait_for_state(&id, JobState::Succeeded).await;
    lab.wait_for_clean_hosts().await;
    run(&lab, &list).await;
    assert_eq!(lab.home.inside().trees.len(), 1, "nothing was staged again");
    assert_eq!(images_of_inputs(&lab).len(), 1);
    // Files of the repository may change.
    put(&client, "one.txt", b"4").await;
    run(&lab, &list).await;
    assert_eq!(lab.home.inside().trees.len(), 2);
    assert_eq!(images_of_inputs(&lab).len(), 2);
}

#[tokio::test]
async fn two_jobs_at_once_with_the_same_inputs_stage_them_once() {
    let lab = Lab::up().await;
    let client = super::api::client(&lab).await;
    let list = upload(&client, &[("a", "1"), ("b", "2")]).await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        let memory_bytes = 256 << 20;
        let ask = JobSpec { inputs: Some(list.clone()), memory_bytes, ..spec(Access::Clone) };
        ids.push(lab.submit(ask).await);
    }
    // The host boots one VM after the other, in any order.
    let boots = ids.iter().map(async |id| {
        lab.wait_for_vm(&lab.home, &vm_of(id)).await;
        lab.home.say(&vm_of(id), GuestBody::Started);
    });
    futures_util::future::join_all(boots).await;
    assert_eq!(lab.home.inside().trees.len(), 1);
    assert_eq!(lab.home.inside().imports, 1);
}

#[tokio::test]
async fn a_job_names_its_own_tenant_s_files_and_what_is_shared_with_it() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    put(&tenants.ann, "shared/x", b"acme's").await;
    put(&tenants.ann, "secret/y", b"acme's own").await;
    let nothing = serde_json::json!({});
    let _: serde_json::Value =
        tenants.ann.put("/v1/data/~/shared?share=blue", &nothing).await.expect("a share");
    let submit = async |client: &Client, address: &str| {
        let list = put_list(client, vec![repository("in", address)]).await;
        let ask = JobSpec { inputs: Some(list), ..small("q") };
        client.post::<Job>("/v1/jobs", &ask).await
    };
    submit(&tenants.bob, "repo://acme/shared").await.expect("it is shared");
    let said = |refused: Result<Job, Problem>, path: &str| {
        let problem = refused.expect_err("it may not be read");
        assert_eq!(problem.kind, ProblemKind::NotFound, "{problem}");
        serde_json::to_string(&problem).expect("JSON").replace(path, "PATH")
    };
    let secret = said(submit(&tenants.bob, "repo://acme/secret/y").await, "secret/y");
    let never = said(submit(&tenants.bob, "repo://acme/nothing/z").await, "nothing/z");
    assert_eq!(secret, never);
    // Not even an admin's job has the files of a tenant that does not share them.
    said(submit(&tenants.admin, "repo://acme/secret/y").await, "secret/y");
    submit(&tenants.amy, "repo://acme/secret/y").await.expect("it is the own tenant's");
}

#[tokio::test]
async fn a_list_that_names_what_was_not_uploaded_or_was_changed_is_refused() {
    let lab = Lab::up().await;
    let client = super::api::client(&lab).await;
    let with = |list: &str| JobSpec { inputs: Some(list.to_owned()), ..spec(Access::Clone) };
    let refused = async |list: &str| {
        let problem = client.post::<Job>("/v1/jobs", &with(list)).await.expect_err("refused");
        assert_eq!(problem.kind, ProblemKind::Invalid, "{problem}");
        problem.why
    };
    assert!(refused(&"0".repeat(64)).await.contains("was uploaded"));
    let file = |sha256: &str, size_bytes| {
        let sha256 = sha256.to_owned();
        InputFrom::File(UploadedFile { sha256, size_bytes, executable: false })
    };
    let never = put_list(&client, vec![input("a", file(&"1".repeat(64), 1))]).await;
    assert!(refused(&never).await.contains("was not uploaded"));
    let good = put_named(&client, b"good").await;
    let longer = put_list(&client, vec![input("a", file(&good, 5))]).await;
    assert!(refused(&longer).await.contains("was not uploaded"), "another length");
    let list = put_list(&client, vec![input("a", file(&good, 4))]).await;
    put(&client, &format!("{UPLOADED_INPUTS}/{good}"), b"evil").await;
    assert!(refused(&list).await.contains("was not uploaded"), "replaced by something else");
    for bad in ["../a", "/a", "a//b", ""] {
        let list = put_list(&client, vec![input(bad, InputFrom::Directory {})]).await;
        refused(&list).await;
    }
    let no_list = put_named(&client, b"no list").await;
    refused(&no_list).await;
    let twice = vec![
        input("a", InputFrom::Directory {}),
        input("a/b", file(&good, 4)),
        repository("a", "x"),
    ];
    put(&client, "x", b"y").await;
    put(&client, &format!("{UPLOADED_INPUTS}/{good}"), b"good").await;
    let list = put_list(&client, twice).await;
    assert!(refused(&list).await.contains("two inputs"));
}

#[tokio::test]
async fn a_job_whose_inputs_vanish_while_it_waits_fails_and_says_so() {
    let lab = Lab::up().await;
    let client = super::api::client(&lab).await;
    put(&client, "in/a", b"1").await;
    let list = put_list(&client, vec![repository("a", "in/a")]).await;
    lab.home.inside().imports_hang = true;
    let id = lab.submit(JobSpec { inputs: Some(list), ..spec(Access::Clone) }).await;
    wait_for("the tree", async || (!lab.home.inside().trees.is_empty()).then_some(())).await;
    client.delete("/v1/data/~/in/a").await.expect("deleted");
    {
        // The host says so; otherwise the controller would wait for its next word.
        let mut home = lab.home.inside();
        (home.imports_hang, home.refuses_imports) = (false, true);
    }
    let job = lab.wait_for_job(&id, "the end", |job| job.state.is_final()).await;
    assert_eq!(job.state, JobState::Failed);
    assert!(job.reason.contains("in/a"), "{}", job.reason);
}

#[tokio::test]
async fn staging_goes_on_after_a_restart_of_the_controller_and_a_lost_answer() {
    let mut lab = Lab::up().await;
    let client = super::api::client(&lab).await;
    let list = upload(&client, &[("a", "1")]).await;
    lab.home.inside().imports_hang = true;
    let ask = JobSpec { inputs: Some(list), ..spec(Access::Clone) };
    let id = lab.submit(ask).await;
    wait_for("the tree", async || (!lab.home.inside().trees.is_empty()).then_some(())).await;
    lab.restart_controller().await;
    lab.home.inside().imports_hang = false;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    assert_eq!(images_of_inputs(&lab).len(), 1);
}

/// What is sent for an image that is there already, or whose name another one has, would be sent for nothing.
#[tokio::test]
async fn the_name_of_an_image_of_inputs_is_taken_before_its_files_are_sent() {
    let mut lab = Lab::up().await;
    let client = super::api::client(&lab).await;
    let list = upload(&client, &[("a", "1")]).await;
    lab.home.inside().trees_hang = true;
    let ask = JobSpec { inputs: Some(list), ..spec(Access::Clone) };
    let id = lab.submit(ask).await;
    wait_for("the name", async || {
        let images = lab.cluster.records.list::<ImageRecord>("images/").await.expect("records");
        images.iter().any(|image| image.inputs.is_some()).then_some(())
    })
    .await;
    assert!(lab.home.inside().trees.is_empty(), "nothing has arrived yet");
    // The host has no tree then, and is asked for the image.
    lab.restart_controller().await;
    wait_for("the import's end", async || (lab.home.inside().imports > 0).then_some(())).await;
    assert!(images_of_inputs(&lab).is_empty());
    lab.home.inside().trees_hang = false;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    assert_eq!(images_of_inputs(&lab).len(), 1);
}

/// A host has room for few trees, and would keep each for an hour.
#[tokio::test]
async fn a_tree_whose_answer_is_lost_does_not_stay_at_its_host() {
    let lab = Lab::up().await;
    let client = super::api::client(&lab).await;
    let list = upload(&client, &[("a", "1")]).await;
    lab.home.inside().loses_trees = true;
    let ask = JobSpec { inputs: Some(list), ..spec(Access::Clone) };
    let id = lab.submit(ask).await;
    lab.wait_for_job(&id, "a later try", |job| job.reason.contains("staged again in")).await;
    assert!(!lab.home.inside().trees.is_empty() && lab.home.inside().whole_trees.is_empty());
    lab.home.inside().loses_trees = false;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
    assert!(lab.home.inside().whole_trees.is_empty(), "an image was made of it");
}

#[tokio::test]
async fn images_of_inputs_are_hidden_and_nobody_makes_one() {
    let lab = Lab::up().await;
    let client = super::api::client(&lab).await;
    let list = upload(&client, &[("a", "1")]).await;
    run(&lab, &list).await;
    let image = images_of_inputs(&lab).pop().expect("one");
    let names = async |path: &str| {
        let images: Vec<ClusterImage> = client.get(path).await.expect("images");
        images.into_iter().map(|image| image.name).collect::<Vec<_>>()
    };
    assert!(!names("/v1/images").await.contains(&image));
    assert!(names("/v1/images?all=true").await.contains(&image));
    let name = format!("inputs-{}", "0".repeat(32));
    let import = serde_json::json!({"name": name, "source": "upload:1"});
    let problem = client.post::<ClusterImage>("/v1/images", &import).await.expect_err("reserved");
    assert!(problem.why.contains("jobs' inputs"), "{problem}");
}

#[tokio::test]
async fn what_no_job_needs_any_more_is_removed_after_its_time() {
    const HOUR_MS: i64 = 3_600_000;
    let lab = Lab::up().await;
    let client = super::api::client(&lab).await;
    let list = upload(&client, &[("a", "1")]).await;
    let pass = |hours: f64| {
        lab.cluster.clock.pretend_passed(std::time::Duration::from_secs_f64(hours * 3600.0));
    };
    let ask = JobSpec { inputs: Some(list.clone()), ..spec(Access::Clone) };
    let (id, _) = running_as(&lab, ask).await;
    let files = async || {
        let list: perigee_model::data::FileList =
            client.get("/v1/data/~/.inputs").await.expect("a list");
        list.entries.len()
    };
    pass(1000.0);
    collect_once(&lab.cluster).await;
    assert_eq!((images_of_inputs(&lab).len(), files().await), (1, 2), "a job needs them");
    lab.cluster.clock.pretend_set(-1000 * HOUR_MS);
    // Its use is noted by a clock that is right again.
    collect_once(&lab.cluster).await;
    let image = images_of_inputs(&lab).pop().expect("one");
    let problem = client.delete(&format!("/v1/images/{image}")).await.expect_err("in use");
    assert_eq!(problem.kind, ProblemKind::Conflict, "{problem}");
    finish(&lab.home, &lab.home, &vm_of(&id));
    lab.wait_for_state(&id, JobState::Succeeded).await;
    pass(0.5);
    collect_once(&lab.cluster).await;
    assert_eq!((images_of_inputs(&lab).len(), files().await), (1, 2), "the next job may come");
    pass(1.5);
    collect_once(&lab.cluster).await;
    assert_eq!((images_of_inputs(&lab).len(), files().await), (0, 2));
    pass(23.0);
    collect_once(&lab.cluster).await;
    assert_eq!(files().await, 0);
}

#[tokio::test]
async fn inputs_of_a_job_that_waits_in_the_queue_are_staged_meanwhile() {
    let lab = Lab::up().await;
    let client = super::api::client(&lab).await;
    // Both start at `home1`. Two of them do not fit.
    let memory_bytes = 700 << 20;
    let ask = |inputs| JobSpec { inputs, memory_bytes, ..spec(Access::Clone) };
    let first = lab.submit(ask(None)).await;
    lab.wait_for_vm(&lab.home, &vm_of(&first)).await;
    let list = upload(&client, &[("a", "1")]).await;
    let second = lab.submit(ask(Some(list))).await;
    wait_for("the image", async || (!images_of_inputs(&lab).is_empty()).then_some(())).await;
    assert_eq!(lab.job(&second).await.state, JobState::Queued);
}

/// Each try sends all files to the host.
#[tokio::test]
async fn inputs_that_can_not_be_staged_are_not_sent_all_the_time() {
    let lab = Lab::up().await;
    let client = super::api::client(&lab).await;
    let list = upload(&client, &[("a", "1")]).await;
    lab.home.inside().refuses_imports = true;
    let ask = JobSpec { inputs: Some(list), ..spec(Access::Clone) };
    let id = lab.submit(ask).await;
    lab.wait_for_job(&id, "a later try", |job| job.reason.contains("staged again in")).await;
    tokio::time::sleep(super::TIMING.monitor * 20).await;
    assert!(lab.home.inside().trees.len() <= 3);
    lab.home.inside().refuses_imports = false;
    lab.wait_for_vm(&lab.home, &vm_of(&id)).await;
}

/// Until now, the job has waited for ever: what is not there was to be deleted.
#[tokio::test]
async fn inputs_that_only_a_deceiving_host_has_are_made_anew_of_their_files() {
    let lab = Lab::up().await;
    let client = super::api::client(&lab).await;
    let list = upload(&client, &[("a", "1")]).await;
    run(&lab, &list).await;
    let image = images_of_inputs(&lab).pop().expect("one");
    let key = image_key(&image);
    let made = lab.cluster.records.read::<ImageRecord>(&key).await.expect("read").expect("known");
    let pair = RefusedSource { at: lab.cloud.id.clone(), from: lab.home.id.clone() };
    let known = ImageRecord { refused: vec![pair], ..made.clone() };
    lab.cluster.records.put(&key, &known).await.expect("put");
    let start = Start::Host(lab.cloud.id.clone());
    let id = lab.submit(JobSpec { inputs: Some(list), start, ..spec(Access::Clone) }).await;
    lab.wait_for_vm(&lab.cloud, &vm_of(&id)).await;
    assert_eq!(lab.cloud.inside().trees, [tree(&[("a", "1")])]);
    assert!(lab.cloud.inside().copied.iter().all(|copy| copy.layer != made.layer));
}

/// It may show anything under this name.
#[tokio::test]
async fn what_a_host_has_of_inputs_without_a_record_is_not_used() {
    let lab = Lab::up().await;
    let client = super::api::client(&lab).await;
    let list = upload(&client, &[("a", "1")]).await;
    run(&lab, &list).await;
    let image = images_of_inputs(&lab).pop().expect("one");
    lab.cluster.records.remove(&image_key(&image)).await.expect("removed");
    let start = Start::Host(lab.cloud.id.clone());
    let id = lab.submit(JobSpec { inputs: Some(list), start, ..spec(Access::Clone) }).await;
    lab.wait_for_vm(&lab.cloud, &vm_of(&id)).await;
    assert_eq!(lab.cloud.inside().trees.len(), 1, "it was made of its files");
}

#[tokio::test]
async fn a_tenant_goes_with_what_was_kept_for_its_next_jobs() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    let list = upload(&tenants.ann, &[("a", "1")]).await;
    let start = Start::Host(tenants.lab.home.id.clone());
    let ask = JobSpec { inputs: Some(list), start, ..small("q") };
    let job: Job = tenants.ann.post("/v1/jobs", &ask).await.expect("a job");
    let lab = &tenants.lab;
    lab.wait_for_vm(&lab.home, &vm_of(&job.id)).await;
    let refused = tenants.admin.delete("/v1/tenants/acme").await.expect_err("it has a job");
    assert!(refused.why.contains("it has job"), "{refused}");
    finish(&lab.home, &lab.home, &vm_of(&job.id));
    lab.wait_for_state(&job.id, JobState::Succeeded).await;
    lab.wait_for_clean_hosts().await;
    tenants.admin.delete(&format!("/v1/jobs/{}", job.id)).await.expect("deleted");
    tenants.admin.delete("/v1/tenants/acme").await.expect("it has nothing that anybody sees");
    let images: Vec<ImageName> = lab.home.inside().images.keys().cloned().collect();
    assert!(images.iter().all(|image| !image.as_str().starts_with("acme~")), "{images:?}");
}
