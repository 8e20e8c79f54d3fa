//! Quotas and limits of tenants.

use perigee_http::{Client, Method};
use perigee_model::job::{ClusterImage, ClusterVolume, Job, JobSpec, JobState, Start, Vm};
use perigee_model::limits::{JOB_NAMES, JOBS, UNFINISHED_JOBS, VOLUMES};
use perigee_model::persistent_vm::{NewVm, ResizeVm};
use perigee_model::tenant::{Quota, Tenant};
use perigee_model::volume::Upload;
use perigee_model::{JobId, Problem, ProblemKind, VmId};

use super::persistent_vms::new_vm;
use super::tenants::{Tenants, is_kind, new_volume, small};
use super::{PATIENCE, wait_for};
use crate::accounts;
use crate::records::JobRecord;

#[tokio::test]
async fn volumes_beyond_a_quota_are_refused_with_the_figures() {
    let tenants = Tenants::up().await;
    tenants.set_quota("acme", Quota { volume_bytes: Some(3 << 30), ..Quota::default() }).await;
    let make = async |name: &str, bytes: u64| {
        tenants.ann.post::<ClusterVolume>("/v1/volumes", &new_volume(name, bytes)).await
    };
    make("a", 2 << 30).await.expect("there is room");
    let problem = is_kind(make("b", 2 << 30).await, ProblemKind::NoSpace);
    let why = "tenant acme may have 3 GiB of volumes and images and has 2 GiB; this one has 2 GiB";
    assert_eq!(problem.why, why);
    // What two ask for at once does not fit together.
    let both = tokio::join!(make("c", 1 << 30), make("d", 1 << 30));
    assert_eq!([&both.0, &both.1].iter().filter(|made| made.is_ok()).count(), 1, "{both:?}");
    let _: ClusterVolume = tenants
        .bob
        .post("/v1/volumes", &new_volume("b", 9 << 30))
        .await
        .expect("blue has no quota");
    let mine: Tenant = tenants.ann.get("/v1/tenants/acme").await.expect("an operator sees it");
    assert_eq!(mine.volume_bytes, 3 << 30);
    is_kind(tenants.amy.get::<Tenant>("/v1/tenants/acme").await, ProblemKind::Forbidden);
    is_kind(tenants.bob.get::<Tenant>("/v1/tenants/acme").await, ProblemKind::NotFound);
    tenants.ann.delete("/v1/volumes/a").await.expect("deleted");
    make("b", 2 << 30).await.expect("there is room again");
}

#[tokio::test]
async fn an_upload_gives_back_what_it_took_when_its_tenant_has_no_quota_any_more() {
    let tenants = Tenants::up().await;
    let limited = Quota { volume_bytes: Some(2 << 30), ..Quota::default() };
    tenants.set_quota("acme", limited).await;
    let making = async || {
        let shown: Tenant = tenants.ann.get("/v1/tenants/acme").await.expect("an operator sees it");
        shown.volume_bytes
    };
    let cluster = &tenants.lab.cluster;
    let room = accounts::UploadRoom::new(std::sync::Arc::clone(cluster), "acme".to_owned());
    room.add(1 << 30).await.expect("there is room");
    tenants.set_quota("acme", Quota::default()).await;
    room.add(1 << 30).await.expect("without a quota");
    tenants.set_quota("acme", limited).await;
    drop(room);
    assert_eq!(making().await, 0);
    accounts::hold_volume(cluster, "acme~v", 2 << 30).await.expect("all of the room is there");
}

/// A tenant without a quota filled the controller's store with volumes of one block.
#[tokio::test]
async fn a_tenant_has_a_limited_number_of_volumes() {
    let tenants = Tenants::up().await;
    let make = async |by: &Client, name: &str| {
        by.post::<ClusterVolume>("/v1/volumes", &new_volume(name, 1 << 20)).await
    };
    make(&tenants.ann, "a").await.expect("there is room");
    {
        let most = u64::try_from(VOLUMES.max).expect("a number") - 1;
        let _making = accounts::pretend_to_make(&tenants.lab.cluster, "acme", most);
        let problem = is_kind(make(&tenants.ann, "b").await, ProblemKind::NoSpace);
        assert!(problem.why.contains("number of volumes and images is 10001"), "{problem}");
        make(&tenants.bob, "b").await.expect("another tenant's do not count");
    }
    make(&tenants.ann, "b").await.expect("there is room again");
}

/// A member filled the controller's store with jobs in a loop.
#[tokio::test]
async fn a_tenant_has_a_limited_number_of_jobs() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    let index = &tenants.lab.cluster.index;
    let id = |number: u64| JobId::new(format!("acme~j-{number}")).expect("a name");
    let most = u64::try_from(JOBS.max).expect("a number");
    (0..most).for_each(|number| index.note_kept(&id(number)));
    let submit = async |by: &Client| by.post::<Job>("/v1/jobs", &small("j")).await;
    let problem = is_kind(submit(&tenants.amy).await, ProblemKind::NoSpace);
    assert!(problem.why.contains("a tenant's number of jobs is 100001"), "{problem}");
    submit(&tenants.bob).await.expect("another tenant's do not count");
    index.note_erased(&id(0));
    assert_eq!(index.unfinished_of("acme"), 0);
    submit(&tenants.amy).await.expect("there is room again");
    assert_eq!((index.unfinished_of("acme"), index.kept_of("acme")), (1, most));
}

/// They are all in the controller's memory.
#[tokio::test]
async fn a_tenant_has_a_limited_number_of_jobs_that_have_not_ended() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    let index = &tenants.lab.cluster.index;
    let submit = async |by: &Client| by.post::<Job>("/v1/jobs", &small("j")).await;
    let first = submit(&tenants.amy).await.expect("a job");
    tenants.lab.wait_for_state(&first.id, JobState::Starting).await;
    // As if it had many more, which nobody drives.
    let like = index.job(&first.id).expect("it has not ended");
    let most = u64::try_from(UNFINISHED_JOBS.max).expect("a number");
    let mut other = JobRecord::clone(&like);
    other.placement = None;
    other.job.vm = None;
    for number in 1..most {
        other.job.id = JobId::new(format!("acme~other-{number}")).expect("a name");
        index.put_job(&other);
    }
    let problem = is_kind(submit(&tenants.amy).await, ProblemKind::NoSpace);
    let why = "a tenant's number of jobs that have not ended is 10001";
    assert!(problem.why.contains(why), "{problem}");
    submit(&tenants.bob).await.expect("another tenant's do not count");
    other.job.state = JobState::Succeeded;
    index.put_job(&other);
    submit(&tenants.amy).await.expect("there is room again");
}

/// A member filled the controller's store with the numbers of jobs of ever new names, though the jobs were deleted.
#[tokio::test]
async fn a_tenant_has_a_limited_number_of_names_of_jobs() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    let store = rusqlite::Connection::open(tenants.lab.dir.path().join("state.db")).expect("open");
    store.busy_timeout(PATIENCE).expect("patience");
    let many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
                INSERT INTO entries SELECT 'counters/acme~n' || i, '1', 1 FROM n";
    store.execute(many, [i64::try_from(JOB_NAMES.max).expect("a number")]).expect("names");
    let submit = async |by: &Client, name: &str| by.post::<Job>("/v1/jobs", &small(name)).await;
    let problem = is_kind(submit(&tenants.amy, "new").await, ProblemKind::NoSpace);
    let why = "a tenant's number of names of jobs is 100001";
    assert!(problem.why.contains(why), "{problem}");
    let again = submit(&tenants.amy, "n7").await.expect("it has this name already");
    assert_eq!(again.id.as_str(), "acme~n7-0002");
    submit(&tenants.bob, "new").await.expect("another tenant's do not count");
}

/// The numbers of a tenant's jobs stayed when it was deleted.
#[tokio::test]
async fn a_tenant_that_is_deleted_leaves_no_numbers_of_jobs() {
    let tenants = Tenants::up().await;
    let records = &tenants.lab.cluster.records;
    records.put("counters/acme~j", &3_u64).await.expect("a record");
    records.put("counters/j", &4_u64).await.expect("a record");
    tenants.admin.delete("/v1/tenants/acme").await.expect("it has nothing");
    assert_eq!(records.keys("counters/").await.expect("keys"), ["counters/j"]);
}

#[tokio::test]
async fn an_image_beyond_a_quota_is_not_kept() {
    let tenants = Tenants::up().await;
    tenants.set_quota("acme", Quota { volume_bytes: Some(1 << 20), ..Quota::default() }).await;
    let new = serde_json::json!({"name": "own", "source": "upload:1"});
    let problem =
        is_kind(tenants.ann.post::<ClusterImage>("/v1/images", &new).await, ProblemKind::NoSpace);
    assert!(problem.why.contains("this one has 1 GiB"), "{problem}");
    let all: Vec<ClusterImage> = tenants.admin.get("/v1/images").await.expect("images");
    assert!(all.iter().all(|image| image.name.as_str() == "debian"), "{all:?}");
    let of_a_host = serde_json::json!({"name": "own", "source": "/etc/shadow"});
    let refused = tenants.ann.post::<ClusterImage>("/v1/images", &of_a_host).await;
    is_kind(refused, ProblemKind::Forbidden);
}

#[tokio::test]
async fn uploads_beyond_a_quota_are_refused_and_count_until_an_image_is_made_of_them() {
    let tenants = Tenants::up().await;
    tenants.set_quota("acme", Quota { volume_bytes: Some(2 << 30), ..Quota::default() }).await;
    let _: ClusterVolume = tenants
        .ann
        .post("/v1/volumes", &new_volume("a", (2 << 30) - (1 << 20)))
        .await
        .expect("room");
    let send = async |client: &Client, bytes: usize| {
        client.send_body::<Upload>(Method::POST, "/v1/uploads?host=home1", vec![0_u8; bytes]).await
    };
    let problem = is_kind(send(&tenants.amy, (1 << 20) + 1).await, ProblemKind::NoSpace);
    let words = "tenant acme may have 2 GiB of volumes and images";
    assert!(problem.why.contains(words), "{problem}");
    let used = async || {
        let shown: Tenant = tenants.ann.get("/v1/tenants/acme").await.expect("an operator sees it");
        shown.volume_bytes - ((2 << 30) - (1 << 20))
    };
    assert_eq!(used().await, 0, "what was refused does not count");
    let sent = send(&tenants.amy, 700 << 10).await.expect("there is room");
    assert_eq!(used().await, 700 << 10);
    is_kind(send(&tenants.amy, 700 << 10).await, ProblemKind::NoSpace);
    send(&tenants.bob, 3 << 20).await.expect("blue has no quota");
    tenants.ann.delete("/v1/volumes/a").await.expect("deleted");
    let import = serde_json::json!({"name": "own", "source": sent.source, "host": "home1"});
    let image: ClusterImage = tenants.amy.post("/v1/images", &import).await.expect("an image");
    let shown: Tenant = tenants.ann.get("/v1/tenants/acme").await.expect("an operator sees it");
    assert_eq!(shown.volume_bytes, image.size_bytes, "only the image counts now");
}

#[tokio::test]
async fn files_beyond_a_quota_are_refused_with_the_figures() {
    let tenants = Tenants::up().await;
    tenants.set_quota("acme", Quota { file_bytes: Some(1 << 20), ..Quota::default() }).await;
    let put = async |client: &Client, door: &str, name: &str, bytes: usize| {
        let body = vec![7_u8; bytes];
        client.send_body::<serde_json::Value>(Method::PUT, &format!("{door}/{name}"), body).await
    };
    // Over WebDAV there is no JSON in an answer.
    let is_done = |put: Result<serde_json::Value, Problem>| {
        assert!(!matches!(&put, Err(problem) if problem.kind != ProblemKind::Internal), "{put:?}");
    };
    is_done(put(&tenants.amy, "/v1/data/acme", "a", 700 << 10).await);
    let shown: Tenant = tenants.ann.get("/v1/tenants/acme").await.expect("an operator sees it");
    assert_eq!(shown.file_bytes, 700 << 10);
    let problem =
        is_kind(put(&tenants.amy, "/v1/data/acme", "b", 700 << 10).await, ProblemKind::NoSpace);
    assert!(problem.to_string().contains("1 MiB"), "{problem}");
    put(&tenants.amy, "/dav/acme", "c", 700 << 10).await.expect_err("no room over WebDAV either");
    let kept: Tenant = tenants.ann.get("/v1/tenants/acme").await.expect("an operator sees it");
    assert_eq!((kept.file_bytes, kept.files), (700 << 10, 1), "nothing of it stays");
    is_done(put(&tenants.bob, "/v1/data/blue", "a", 2 << 20).await);
    tenants.amy.delete("/v1/data/acme/a").await.expect("deleted");
    is_done(put(&tenants.amy, "/v1/data/acme", "b", 700 << 10).await);
}

#[tokio::test]
async fn more_files_than_a_quota_has_are_refused_with_the_figures() {
    let tenants = Tenants::up().await;
    tenants.set_quota("acme", Quota { files: Some(2), ..Quota::default() }).await;
    let put = async |client: &Client, path: &str| {
        client.send_body::<serde_json::Value>(Method::PUT, path, "x").await
    };
    // The directory counts too.
    put(&tenants.amy, "/v1/data/acme/in/a").await.expect("it fits");
    let problem = is_kind(put(&tenants.amy, "/v1/data/acme/b").await, ProblemKind::NoSpace);
    let words = "the tenant has 2 files and directories, and its quota is 2";
    assert!(problem.why.contains(words), "{problem}");
    let shown: Tenant = tenants.ann.get("/v1/tenants/acme").await.expect("an operator sees it");
    assert_eq!((shown.files, shown.quota.files), (2, Some(2)));
    put(&tenants.bob, "/v1/data/blue/b").await.expect("blue has no quota");
    tenants.set_quota("acme", Quota { files: Some(3), ..Quota::default() }).await;
    put(&tenants.amy, "/v1/data/acme/b").await.expect("it fits now");
}

#[tokio::test]
async fn a_job_waits_for_its_tenant_s_quota() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    tenants.set_quota("acme", Quota { vms: Some(1), cpus: Some(2), ..Quota::default() }).await;
    let huge = JobSpec { cpus: 3, ..small("huge") };
    let problem = is_kind(tenants.ann.post::<Job>("/v1/jobs", &huge).await, ProblemKind::Invalid);
    assert!(problem.why.contains("it needs 3 of the tenant's 2 vCPUs"), "{problem}");
    let first: Job = tenants.ann.post("/v1/jobs", &small("q")).await.expect("a job");
    tenants.lab.wait_for_state(&first.id, JobState::Starting).await;
    let second: Job = tenants.ann.post("/v1/jobs", &small("q")).await.expect("a job");
    let why = "it needs 1 of the tenant's 1 VMs, and 1 are in use";
    tenants.lab.wait_for_job(&second.id, "waiting", |job| job.reason.contains(why)).await;
    let other: Job = tenants.bob.post("/v1/jobs", &small("q")).await.expect("a job");
    tenants.lab.wait_for_state(&other.id, JobState::Starting).await;
    tenants.ann.post::<Job>("/v1/jobs/q-0001/cancel", &()).await.expect("cancelled");
    tenants.lab.wait_for_state(&second.id, JobState::Starting).await;
}

/// A VM without a job that needs nothing but the shared image.
fn lone(name: &str) -> NewVm {
    let name = VmId::new(name).expect("a name");
    NewVm { name, volumes: Vec::new(), start: Start::Anywhere, ..new_vm("home1") }
}

impl Tenants {
    /// Gives a VM of ann's another number of vCPUs.
    async fn resize(&self, name: &str, cpus: u32) -> Result<Vm, Problem> {
        let ask = ResizeVm { cpus: Some(cpus), ..ResizeVm::default() };
        self.ann.post(&format!("/v1/vms/{name}/resize"), &ask).await
    }

    /// A VM of ann's, with one vCPU, that runs as its driver knows.
    async fn run_lone(&self, name: &str) {
        let made: Vm = self.ann.post("/v1/vms", &lone(name)).await.expect("a VM");
        wait_for("the VM to run", async || {
            let record = self.lab.cluster.index.of_vm(&made.id).expect("its record");
            (record.job.state == JobState::Running).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_vm_without_a_job_is_not_made_or_resized_beyond_a_quota() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    tenants.set_quota("acme", Quota { cpus: Some(2), ..Quota::default() }).await;
    let make = async |new: NewVm| tenants.ann.post::<Vm>("/v1/vms", &new).await;
    let why = "it needs 3 of the tenant's 2 vCPUs";
    let problem = is_kind(make(NewVm { cpus: 3, ..lone("web") }).await, ProblemKind::Invalid);
    assert!(problem.why.contains(why), "{problem}");
    make(NewVm { stopped: true, ..lone("web") }).await.expect("it fits");
    let problem = is_kind(tenants.resize("web", 3).await, ProblemKind::Invalid);
    assert!(problem.why.contains(why), "{problem}");
    tenants.resize("web", 2).await.expect("it fits");
}

#[tokio::test]
async fn a_vm_that_runs_gets_no_vcpus_beyond_a_quota() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    tenants.set_quota("acme", Quota { cpus: Some(3), ..Quota::default() }).await;
    tenants.run_lone("web").await;
    tenants.run_lone("other").await;
    let problem = is_kind(tenants.resize("web", 3).await, ProblemKind::NoSpace);
    let why = "it needs 2 of the tenant's 3 vCPUs, and 2 are in use";
    assert!(problem.why.contains(why), "{problem}");
    // Two that ask for the last one at the same time do not both get it.
    let both = tokio::join!(tenants.resize("web", 2), tenants.resize("other", 2));
    assert!(both.0.is_err() || both.1.is_err(), "{both:?}");
    let shown: Tenant = tenants.ann.get("/v1/tenants/acme").await.expect("an operator sees it");
    assert!(shown.running.cpus <= 3, "{shown:?}");
}
