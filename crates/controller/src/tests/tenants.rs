//! What users of tenants see, may do, and may use.

use axum::Extension;
use perigee_http::{Client, Method, Peer};
use perigee_model::guest::GuestBody;
use perigee_model::job::{
    Access, AdoptVolume, ClusterImage, ClusterVolume, Job, JobSpec, JobState, JobVolume, NewVolume,
    Start, Unknown, Vm,
};
use perigee_model::leave_site::{LeaveSiteSet, SetLeaveSite};
use perigee_model::tenant::{
    AccessToken, AuditEntry, MadeAccessToken, Me, NewAccessToken, NewTenant, NewUser, Quota, Role,
    ShareImage, SshKey, Tenant, User,
};
use perigee_model::volume::VolumeSource;
use perigee_model::{ImageName, LeaveSite, Problem, ProblemKind, TenantName, UserName, VolumeName};

use super::{Lab, finish, spec, vm_of, wait_for};

/// A cluster with two tenants: `acme` with the operator `ann` and the member `amy`, and `blue` with the operator `bob`
/// and the member `bea`.
pub struct Tenants {
    pub lab: Lab,
    pub admin: Client,
    pub ann: Client,
    pub amy: Client,
    pub bob: Client,
    pub bea: Client,
    /// Where users ask, who have no certificate.
    pub url: String,
}

pub fn user_name(name: &str) -> UserName {
    UserName::new(name).expect("a name")
}

pub fn tenant(name: &str) -> TenantName {
    TenantName::new(name).expect("a name")
}

pub fn volume(name: &str) -> VolumeName {
    VolumeName::new(name).expect("a name")
}

async fn serve(lab: &Lab, peer: Peer) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let url = format!("http://{}", listener.local_addr().expect("address"));
    let router = crate::api::router(lab.cluster.clone()).layer(Extension(peer));
    lab.supervisor.spawn(async move { axum::serve(listener, router).await.expect("serve") });
    url
}

pub fn client(url: &str) -> Client {
    Client::new(url, super::PATIENCE).expect("a client")
}

pub async fn make_token(admin: &Client, of: &str) -> MadeAccessToken {
    let (tenant, user) = of.split_once('/').expect("TENANT/USER");
    let path = format!("/v1/tenants/{tenant}/users/{user}/tokens");
    admin.post(&path, &NewAccessToken { life_s: 3600 }).await.expect("a token")
}

impl Tenants {
    pub async fn up() -> Self {
        let lab = Lab::up().await;
        for host in [&lab.home, &lab.cloud] {
            host.inside().pool_free_bytes = Some(1 << 40);
        }
        let admin = client(&serve(&lab, Peer::Local).await);
        let url = serve(&lab, Peer::Stranger).await;
        for name in ["acme", "blue"] {
            let new = NewTenant { name: tenant(name), quota: Quota::default() };
            let _: Tenant = admin.post("/v1/tenants", &new).await.expect("a tenant");
        }
        let mut users = Vec::new();
        for (of, role) in [
            ("acme/ann", Role::Operator),
            ("acme/amy", Role::Member),
            ("blue/bob", Role::Operator),
            ("blue/bea", Role::Member),
        ] {
            let path = format!("/v1/tenants/{}", of.replace('/', "/users/"));
            let _: User = admin.put(&path, &NewUser { role }).await.expect("a user");
            let token = make_token(&admin, of).await.token;
            users.push(client(&url).with_token(&token).expect("a token"));
        }
        let [ann, amy, bob, bea] = users.try_into().expect("four");
        Self { lab, admin, ann, amy, bob, bea, url }
    }

    pub async fn set_quota(&self, of: &str, quota: Quota) {
        let path = format!("/v1/tenants/{of}/quota");
        let _: Tenant = self.admin.put(&path, &quota).await.expect("a quota");
    }

    pub async fn share_debian(&self) {
        let ask = ShareImage { shared: true };
        let path = "/v1/images/debian/shared";
        let shared: ClusterImage = self.admin.put(path, &ask).await.expect("shared");
        assert!(shared.shared);
    }
}

pub fn new_volume(name: &str, size_bytes: u64) -> NewVolume {
    let (host, size_bytes, source) = (None, Some(size_bytes), VolumeSource::Empty);
    NewVolume { name: volume(name), host, size_bytes, source, leave_site: Default::default() }
}

/// A job that needs nothing but the shared image.
pub fn small(name: &str) -> JobSpec {
    let (name, volumes) = (name.to_owned(), Vec::new());
    JobSpec { name, start: Start::Anywhere, memory_bytes: 256 << 20, volumes, ..spec(Access::Read) }
}

pub fn is_kind<T: std::fmt::Debug>(result: Result<T, Problem>, kind: ProblemKind) -> Problem {
    let problem = result.expect_err("it must be refused");
    assert_eq!(problem.kind, kind, "{problem}");
    problem
}

#[tokio::test]
async fn two_tenants_use_one_name_for_two_volumes() {
    let tenants = Tenants::up().await;
    for (user, full) in [(&tenants.ann, "acme~data"), (&tenants.bob, "blue~data")] {
        let made: ClusterVolume =
            user.post("/v1/volumes", &new_volume("data", 1 << 20)).await.expect("a volume");
        assert_eq!(made.name, volume(full));
        let found: ClusterVolume = user.get("/v1/volumes/data").await.expect("its own");
        assert_eq!(found.name, volume(full));
        let listed: Vec<ClusterVolume> = user.get("/v1/volumes").await.expect("volumes");
        assert_eq!(listed.iter().map(|v| v.name.as_str()).collect::<Vec<_>>(), [full]);
    }
    let all: Vec<ClusterVolume> = tenants.admin.get("/v1/volumes").await.expect("volumes");
    assert_eq!(all.len(), 3, "an admin sees those of all tenants");
    let of_acme: ClusterVolume = tenants.admin.get("/v1/volumes/acme~data").await.expect("it");
    assert_eq!(of_acme.name, volume("acme~data"));
    is_kind(tenants.bob.get::<ClusterVolume>("/v1/volumes/acme~data").await, ProblemKind::NotFound);
    let taken = tenants.bob.post::<ClusterVolume>("/v1/volumes", &new_volume("acme~x", 1)).await;
    is_kind(taken, ProblemKind::Invalid);
    let unknown = tenants.admin.post::<ClusterVolume>("/v1/volumes", &new_volume("red~x", 1)).await;
    is_kind(unknown, ProblemKind::Invalid);
}

#[tokio::test]
async fn a_member_sees_its_own_jobs_and_an_operator_those_of_its_tenant() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    let job: Job = tenants.ann.post("/v1/jobs", &small("q")).await.expect("a job");
    assert_eq!((job.id.as_str(), job.spec.owner.as_str()), ("acme~q-0001", "ann"));
    let own: Job = tenants.amy.post("/v1/jobs", &small("q")).await.expect("a job");
    assert_eq!((own.id.as_str(), own.spec.owner.as_str()), ("acme~q-0002", "amy"));
    tenants.lab.wait_for_state(&job.id, JobState::Starting).await;
    let ids = async |user: &Client| {
        let jobs: Vec<Job> = user.get("/v1/jobs").await.expect("jobs");
        jobs.into_iter().map(|job| job.id.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(ids(&tenants.ann).await, ["acme~q-0001", "acme~q-0002"]);
    assert_eq!(ids(&tenants.amy).await, ["acme~q-0002"]);
    assert!(ids(&tenants.bob).await.is_empty());
    let vms: Vec<Vm> = tenants.amy.get("/v1/vms").await.expect("VMs");
    assert!(vms.iter().all(|vm| vm.id.as_str() == "acme~q-0002"), "{vms:?}");
    let problem = |number| {
        let path = format!("/v1/jobs/q-{number}");
        let amy = &tenants.amy;
        async move { is_kind(amy.get::<Job>(&path).await, ProblemKind::NotFound).to_string() }
    };
    let (other, none) = (problem("0001").await, problem("0009").await);
    assert_eq!(other.replace("0001", "0009"), none);
    let path = "/v1/vms/q-0001/stop";
    is_kind(tenants.amy.post::<()>(path, &()).await, ProblemKind::NotFound);
    tenants.ann.get::<Job>("/v1/jobs/q-0002").await.expect("an operator sees it");
    tenants.ann.post::<Job>("/v1/jobs/q-0002/cancel", &()).await.expect("and cancels it");
}

#[tokio::test]
async fn a_job_of_a_tenant_runs_to_its_end() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    let asked = JobSpec { start: spec(Access::Read).start, ..small("q") };
    let job: Job = tenants.amy.post("/v1/jobs", &asked).await.expect("a job");
    let (vm, home) = (vm_of(&job.id), &tenants.lab.home);
    tenants.lab.wait_for_vm(home, &vm).await;
    home.say(&vm, GuestBody::Started);
    finish(home, home, &vm);
    tenants.lab.wait_for_state(&job.id, JobState::Succeeded).await;
    let output = tenants.amy.get_bytes("/v1/jobs/q-0001/output").await.expect("its output");
    let is_there = output.windows(11).any(|bytes| bytes == b"the answers");
    assert!(is_there && output.starts_with(b"output"), "a tar of it");
    tenants.amy.delete("/v1/jobs/q-0001").await.expect("it has ended");
}

#[tokio::test]
async fn a_shared_image_is_used_where_a_tenant_has_none_of_that_name() {
    let tenants = Tenants::up().await;
    let use_it = async || {
        let source = VolumeSource::Image(ImageName::new("debian").expect("a name"));
        let new = NewVolume { source, ..new_volume("root", 1 << 30) };
        tenants.ann.post::<ClusterVolume>("/v1/volumes", &new).await
    };
    is_kind(use_it().await, ProblemKind::NotFound);
    assert!(tenants.ann.get::<Vec<ClusterImage>>("/v1/images").await.expect("none").is_empty());
    tenants.share_debian().await;
    use_it().await.expect("it is shared");
    let images: Vec<ClusterImage> = tenants.ann.get("/v1/images").await.expect("images");
    assert_eq!(images.len(), 1);
    let refused = tenants.ann.delete("/v1/images/debian").await;
    is_kind(refused, ProblemKind::NotFound);
    // A user of the tenant that has it uses it as all do.
    let path = "/v1/tenants/default/users/dora";
    let role = Role::Operator;
    let _: User = tenants.admin.put(path, &NewUser { role }).await.expect("a user");
    let token = make_token(&tenants.admin, "default/dora").await.token;
    let dora = client(&tenants.url).with_token(&token).expect("a token");
    let refused = dora.delete("/v1/images/debian").await;
    is_kind(refused, ProblemKind::Forbidden);
    let never = serde_json::json!({"leave_site": "never"});
    let refused = dora.put::<serde_json::Value>("/v1/images/debian/leave-site", &never).await;
    is_kind(refused, ProblemKind::Forbidden);
    let body = ShareImage { shared: true };
    let refused = tenants.ann.put::<ClusterImage>("/v1/images/debian/shared", &body).await;
    is_kind(refused, ProblemKind::Forbidden);
}

#[tokio::test]
async fn a_token_counts_until_it_is_revoked_or_its_user_is_removed() {
    let tenants = Tenants::up().await;
    let me: Me = tenants.amy.get("/v1/me").await.expect("who");
    assert_eq!(me, Me { tenant: tenant("acme"), user: Some(user_name("amy")), role: Role::Member });
    let own = "/v1/tenants/acme/users/amy";
    let ask = NewAccessToken { life_s: 3600 };
    let made: MadeAccessToken =
        tenants.amy.post(&format!("{own}/tokens"), &ask).await.expect("a token");
    let other = client(&tenants.url).with_token(&made.token).expect("a token");
    other.get::<Me>("/v1/me").await.expect("it counts");
    // Nothing that is stored is the secret.
    let secret = made.token.rsplit_once('_').expect("a secret").1;
    let stored: Vec<serde_json::Value> =
        tenants.lab.cluster.records.list("tokens/").await.expect("records");
    assert_eq!(secret.len(), 64);
    assert!(!serde_json::to_string(&stored).expect("JSON").contains(secret));
    for wrong in [
        format!("{}0", made.token),
        made.token.replace(secret, &"0".repeat(64)),
        format!("perigee_{}_", made.id),
        "perigee__".to_owned(),
        "x".to_owned(),
    ] {
        let wrong = client(&tenants.url).with_token(&wrong).expect("a word");
        is_kind(wrong.get::<Me>("/v1/me").await, ProblemKind::Forbidden);
    }
    tenants.amy.delete(&format!("{own}/tokens/{}", made.id)).await.expect("revoked");
    is_kind(other.get::<Me>("/v1/me").await, ProblemKind::Forbidden);
    let left: Vec<AccessToken> = tenants.amy.get(&format!("{own}/tokens")).await.expect("tokens");
    assert_eq!(left.len(), 1);
    tenants.admin.delete(own).await.expect("removed");
    is_kind(tenants.amy.get::<Me>("/v1/me").await, ProblemKind::Forbidden);
    let nobody = client(&tenants.url);
    is_kind(nobody.get::<Me>("/v1/me").await, ProblemKind::Forbidden);
}

#[tokio::test]
async fn a_wrong_token_is_answered_with_401_and_how_to_log_in() {
    let tenants = Tenants::up().await;
    let address = tenants.url.trim_start_matches("http://").to_owned();
    for (path, scheme) in [("/v1/jobs", "bearer"), ("/dav/acme", "basic")] {
        let request = format!(
            "GET {path} HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer wrong\r\nconnection: close\r\n\r\n"
        );
        let answer = tokio::task::spawn_blocking({
            let address = address.clone();
            move || {
                use std::io::{Read as _, Write as _};
                let mut stream = std::net::TcpStream::connect(address).expect("a connection");
                stream.write_all(request.as_bytes()).expect("sent");
                let mut answer = String::new();
                stream.read_to_string(&mut answer).expect("an answer");
                answer.to_lowercase()
            }
        })
        .await
        .expect("a thread");
        assert!(answer.starts_with("http/1.1 401 "), "{answer}");
        assert!(answer.contains(&format!("www-authenticate: {scheme} realm=")), "{answer}");
    }
}

#[tokio::test]
async fn a_member_finds_no_disk_of_another_members_job() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    let home1 = spec(Access::Read).start;
    let of = async |user: &Client| -> Job {
        let asked = JobSpec { start: home1.clone(), ..small("q") };
        user.post("/v1/jobs", &asked).await.expect("a job")
    };
    let (hers, own) = (of(&tenants.ann).await, of(&tenants.amy).await);
    for job in [&hers, &own] {
        tenants.lab.wait_for_vm(&tenants.lab.home, &vm_of(&job.id)).await;
    }
    let names = async |user: &Client| {
        let volumes: Vec<ClusterVolume> = user.get("/v1/volumes").await.expect("volumes");
        volumes.into_iter().map(|volume| volume.name.to_string()).collect::<Vec<_>>()
    };
    let amy = names(&tenants.amy).await;
    assert!(amy.iter().all(|name| name.starts_with("acme~q-0002-")) && amy.len() == 3, "{amy:?}");
    assert_eq!(names(&tenants.ann).await.len(), 6, "an operator sees all of the tenant");
    tenants.amy.get::<ClusterVolume>("/v1/volumes/q-0002-out").await.expect("its own");
    let said = |problem: Problem, name: &str| problem.to_string().replace(name, "NAME");
    let ask = async |name: &str| {
        let path = format!("/v1/volumes/{name}");
        let amy = &tenants.amy;
        let clone = NewVolume {
            source: VolumeSource::Volume(volume(name)),
            size_bytes: None,
            ..new_volume("mine", 1)
        };
        let mount = JobVolume {
            volume: volume(name),
            mount: "/data".to_owned(),
            access: Access::Read,
            ranks: Vec::new(),
        };
        let job = JobSpec { volumes: vec![mount], ..small("spy") };
        let snapshot = serde_json::json!({"image": "copy"});
        [
            amy.get::<ClusterVolume>(&path).await.map(drop),
            amy.delete(&path).await,
            amy.post::<ClusterImage>(&format!("{path}/snapshot"), &snapshot).await.map(drop),
            amy.post::<ClusterVolume>("/v1/volumes", &clone).await.map(drop),
            amy.post::<Job>("/v1/jobs", &job).await.map(drop),
        ]
        .map(|answer| said(is_kind(answer, ProblemKind::NotFound), name))
    };
    assert_eq!(ask("q-0001-out").await, ask("q-0009-out").await);
    assert!(tenants.lab.home.inside().volumes.contains_key(&volume("acme~q-0001-out")));
}

#[tokio::test]
async fn a_tenant_that_is_made_again_has_nothing_of_the_earlier_one() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    let asked = JobSpec { start: spec(Access::Read).start, ..small("q") };
    let job: Job = tenants.bob.post("/v1/jobs", &asked).await.expect("a job");
    let (vm, home) = (vm_of(&job.id), &tenants.lab.home);
    tenants.lab.wait_for_vm(home, &vm).await;
    home.say(&vm, GuestBody::Started);
    finish(home, home, &vm);
    tenants.lab.wait_for_state(&job.id, JobState::Succeeded).await;
    // What such jobs have taught, whether or not this one has.
    let cluster = &tenants.lab.cluster;
    let history = |name: &str| {
        let mut run = super::sure::some_run(&tenants.lab);
        run.traits.name = name.to_owned();
        crate::cluster::history_cache::History { runs: vec![run], ..Default::default() }
    };
    for (key, name) in [("runs/1", "blue~q"), ("runs/2", "acme~q"), ("runs/3", "q")] {
        cluster.records.put(key, &history(name)).await.expect("a record");
        cluster.history_cache.set_history(key, std::sync::Arc::new(history(name)));
    }
    let put = async |path: &str| {
        let put = tenants.bob.send_body::<serde_json::Value>(Method::PUT, path, "x").await;
        assert!(!matches!(&put, Err(problem) if problem.kind != ProblemKind::Internal), "{put:?}");
    };
    // The job has left its outputs there.
    let before: Tenant = tenants.bob.get("/v1/tenants/blue").await.expect("an operator sees it");
    put("/v1/data/blue/shared").await;
    let shown: Tenant = tenants.bob.get("/v1/tenants/blue").await.expect("an operator sees it");
    assert_eq!((shown.file_bytes, shown.files), (before.file_bytes + 1, before.files + 1));
    let path = "/v1/data/blue/shared?share=acme";
    tenants.bob.send_body::<serde_json::Value>(Method::PUT, path, "").await.expect("shared");
    is_kind(tenants.admin.delete("/v1/tenants/blue").await, ProblemKind::Conflict);
    tenants.bob.delete("/v1/jobs/q-0001").await.expect("deleted");
    is_kind(tenants.admin.delete("/v1/tenants/blue").await, ProblemKind::Conflict);
    tenants.bob.delete("/v1/data/blue/shared").await.expect("deleted");
    tenants.admin.delete("/v1/tenants/blue").await.expect("it is empty");
    let new = NewTenant { name: tenant("blue"), quota: Quota::default() };
    let _: Tenant = tenants.admin.post("/v1/tenants", &new).await.expect("a tenant");
    assert_eq!(cluster.records.keys("runs/").await.expect("keys"), ["runs/2", "runs/3"]);
    assert!(cluster.history_cache.others("", "blue").is_empty());
    assert_eq!(cluster.history_cache.others("", "acme").len(), 1);
    let role = Role::Operator;
    let path = "/v1/tenants/blue/users/bob";
    let _: User = tenants.admin.put(path, &NewUser { role }).await.expect("a user");
    let token = make_token(&tenants.admin, "blue/bob").await.token;
    let bob = client(&tenants.url).with_token(&token).expect("a token");
    let shares: serde_json::Value = bob.get("/v1/data/blue?shares").await.expect("shares");
    assert_eq!(shares, serde_json::json!([]));
}

#[tokio::test]
async fn a_token_expires() {
    let tenants = Tenants::up().await;
    let (acme, amy) = (tenant("acme"), user_name("amy"));
    let cluster = &tenants.lab.cluster;
    let made = crate::accounts::make_token(cluster, &acme, &amy, 60, None).await.expect("a token");
    assert!(cluster.accounts.by_token(&made.token).is_some());
    assert!(cluster.accounts.by_token_at(&made.token, made.expires_ms - 1).is_some());
    assert!(cluster.accounts.by_token_at(&made.token, made.expires_ms).is_none());
    let long = crate::accounts::make_token(cluster, &acme, &amy, 366 * 86_400, None).await;
    is_kind(long, ProblemKind::Invalid);
}

#[tokio::test]
async fn accounts_are_there_after_the_controller_starts_again() {
    let mut tenants = Tenants::up().await;
    let made = make_token(&tenants.admin, "acme/ann").await;
    let key = SshKey::new(user_name("laptop"), "ssh-ed25519 AAAAC3Nza x").expect("a key");
    let path = "/v1/tenants/acme/users/ann/keys";
    let _: User = tenants.ann.put(path, &key).await.expect("a key");
    let path = "/v1/tenants/blue/users/bob/keys";
    let _: User = tenants.bob.put(path, &key).await.expect("anybody can register a public key");
    tenants.lab.restart_controller().await;
    let accounts = &tenants.lab.cluster.accounts;
    let (ann, _) = accounts.by_token(&made.token).expect("it is known");
    assert_eq!((ann.name.as_str(), ann.role), ("ann", Role::Operator));
    for login in ["acme/ann", "acme~ann"] {
        assert_eq!(accounts.by_key(&key.key, login).as_ref(), Some(&ann), "{login}");
    }
    let bob = accounts.by_key(&key.key, "blue/bob").expect("his own login");
    assert_eq!(bob.name.as_str(), "bob");
    for nobody in ["ann", "blue/ann", "acme/bob", "acme/amy", "", "/", "acme/"] {
        assert!(accounts.by_key(&key.key, nobody).is_none(), "{nobody}");
    }
    assert!(accounts.by_key("ssh-ed25519 AAAAother", "acme/ann").is_none());
}

#[tokio::test]
async fn an_admin_writes_no_more_files_than_a_tenant_s_quota_has_after_a_restart() {
    let mut tenants = Tenants::up().await;
    tenants.set_quota("acme", Quota { files: Some(1), ..Quota::default() }).await;
    tenants.lab.restart_controller().await;
    let admin = client(&serve(&tenants.lab, Peer::Local).await);
    let put = async |name: &str| {
        let path = format!("/v1/data/acme/{name}");
        admin.send_body::<serde_json::Value>(Method::PUT, &path, "x").await
    };
    put("a").await.expect("it fits");
    is_kind(put("b").await, ProblemKind::NoSpace);
}

#[tokio::test]
async fn only_an_empty_tenant_is_deleted_and_only_default_has_admins() {
    let tenants = Tenants::up().await;
    let path = "/v1/tenants/blue/users/bob";
    let admin = tenants.admin.put::<User>(path, &NewUser { role: Role::Admin }).await;
    is_kind(admin, ProblemKind::Invalid);
    let _: ClusterVolume =
        tenants.bob.post("/v1/volumes", &new_volume("data", 1 << 20)).await.expect("a volume");
    let problem = is_kind(tenants.admin.delete("/v1/tenants/blue").await, ProblemKind::Conflict);
    assert!(problem.why.contains("volume blue~data"), "{problem}");
    tenants.bob.delete("/v1/volumes/data").await.expect("deleted");
    tenants.admin.delete("/v1/tenants/blue").await.expect("it is empty");
    is_kind(tenants.bob.get::<Me>("/v1/me").await, ProblemKind::Forbidden);
    // A later tenant of this name has not the earlier one's log.
    let new = NewTenant { name: tenant("blue"), quota: Quota::default() };
    let _: Tenant = tenants.admin.post("/v1/tenants", &new).await.expect("a tenant");
    let role = Role::Operator;
    let _: User = tenants.admin.put(path, &NewUser { role }).await.expect("a user");
    let token = make_token(&tenants.admin, "blue/bob").await.token;
    let bob = client(&tenants.url).with_token(&token).expect("a token");
    assert!(bob.get::<Vec<AuditEntry>>("/v1/audit").await.expect("a log").is_empty());
    wait_for("the earlier one's log, which an admin sees", async || {
        let all = tenants.admin.get::<Vec<AuditEntry>>("/v1/audit?tenant=blue").await;
        (!all.expect("a log").is_empty()).then_some(())
    })
    .await;
    for bad in ["image", "default", &"x".repeat(17)] {
        let new = NewTenant { name: tenant(bad), quota: Quota::default() };
        tenants.admin.post::<Tenant>("/v1/tenants", &new).await.expect_err(bad);
    }
}

/// A host that was broken into says that it has a volume and an image of a tenant. Nobody has made them.
#[tokio::test]
async fn what_a_host_says_that_a_tenant_has_is_not_the_tenant_s() {
    let tenants = Tenants::up().await;
    let planted = volume("acme~data");
    tenants.lab.cloud.make_volume(&planted);
    let image = ImageName::new("acme~debian").expect("a name");
    let info = perigee_model::volume::ImageInfo { name: image.clone(), ..super::fake::image() };
    tenants.lab.cloud.inside().images.insert(image, info);
    for who in [&tenants.ann, &tenants.admin] {
        let name = "/v1/volumes/acme~data";
        is_kind(who.get::<ClusterVolume>(name).await, ProblemKind::NotFound);
        let all: Vec<ClusterVolume> = who.get("/v1/volumes").await.expect("volumes");
        assert!(all.iter().all(|one| one.name != planted), "{all:?}");
        let all: Vec<ClusterImage> = who.get("/v1/images").await.expect("images");
        assert!(all.iter().all(|one| one.name.as_str() != "acme~debian"), "{all:?}");
    }
    let data = JobVolume {
        volume: volume("data"),
        mount: "/data".to_owned(),
        access: Access::Read,
        ranks: Vec::new(),
    };
    tenants.share_debian().await;
    let reads = JobSpec { volumes: vec![data], ..small("q") };
    is_kind(tenants.ann.post::<Job>("/v1/jobs", &reads).await, ProblemKind::NotFound);
    let job: Job = tenants.ann.post("/v1/jobs", &small("q")).await.expect("the shared image");
    assert_eq!(job.spec.image.as_str(), "debian", "and not what the host says");
    let unknown = "/v1/unknown";
    is_kind(tenants.ann.get::<Vec<Unknown>>(unknown).await, ProblemKind::Forbidden);
    let all: Vec<Unknown> = tenants.admin.get(unknown).await.expect("what hosts have");
    let all: Vec<_> = all.iter().map(|one| (one.name.as_str(), one.host.as_str())).collect();
    let both = [("acme~data", "cloud1"), ("acme~debian", "cloud1")];
    assert_eq!(all, both, "an admin sees what there is to adopt");
    let ask = AdoptVolume { host: tenants.lab.cloud.id.clone() };
    let adopt = "/v1/volumes/acme~data/adopt";
    is_kind(tenants.ann.post::<ClusterVolume>(adopt, &ask).await, ProblemKind::Forbidden);
    let elsewhere = AdoptVolume { host: tenants.lab.home.id.clone() };
    is_kind(tenants.admin.post::<ClusterVolume>(adopt, &elsewhere).await, ProblemKind::NotFound);
    let taken: ClusterVolume = tenants.admin.post(adopt, &ask).await.expect("an admin says so");
    assert_eq!(taken.home, tenants.lab.cloud.id);
    is_kind(tenants.admin.post::<ClusterVolume>(adopt, &ask).await, ProblemKind::Conflict);
    tenants.ann.get::<ClusterVolume>("/v1/volumes/data").await.expect("now it is the tenant's");
    let all: Vec<Unknown> = tenants.admin.get(unknown).await.expect("what hosts have");
    assert_eq!(all.len(), 1, "the image is left: {all:?}");
}

#[tokio::test]
async fn the_audit_log_says_who_asked_for_what_and_shows_no_secret() {
    let tenants = Tenants::up().await;
    let _: ClusterVolume =
        tenants.amy.post("/v1/volumes", &new_volume("data", 1 << 20)).await.expect("a volume");
    is_kind(tenants.amy.get::<Vec<Tenant>>("/v1/tenants").await, ProblemKind::Forbidden);
    let token = make_token(&tenants.admin, "acme/amy").await;
    tenants.share_debian().await;
    let _: Job = tenants.amy.post("/v1/jobs", &small("q")).await.expect("a job");
    let log = async |user: &Client, tenant: &str| {
        user.get::<Vec<AuditEntry>>(&format!("/v1/audit?tenant={tenant}")).await
    };
    let has = |entries: &[AuditEntry], who: &str, request: &str, thing: &str, status: u16| {
        entries.iter().any(|entry| {
            (entry.who.as_str(), entry.request.as_str(), entry.thing.as_str(), entry.status)
                == (who, request, thing, status)
        })
    };
    wait_for("the entries", async || {
        let own = log(&tenants.ann, "acme").await.expect("an operator sees it");
        let all = has(&own, "acme/amy", "POST /v1/volumes", "acme~data", 200)
            && has(&own, "acme/amy", "POST /v1/jobs", "acme~q-0001", 200)
            && has(&own, "acme/amy", "GET /v1/tenants", "", 403);
        all.then_some(())
    })
    .await;
    let put = Method::PUT;
    tenants.ann.send_body::<serde_json::Value>(put, "/v1/data/acme/in", "x").await.expect("a file");
    let put = Method::PUT;
    let path = "/v1/data/acme/in?share=blue";
    tenants.ann.send_body::<serde_json::Value>(put, path, "").await.expect("shared");
    let find = Method::from_bytes(b"PROPFIND").expect("a method");
    let _ = tenants.ann.send_body::<serde_json::Value>(find, "/dav/acme", "").await;
    wait_for("the share", async || {
        let own = log(&tenants.ann, "acme").await.expect("an operator sees it");
        assert!(!own.iter().any(|entry| entry.request.contains("PROPFIND") && entry.status != 403));
        has(&own, "acme/ann", "PUT /v1/data/acme/in?share=blue", "", 200).then_some(())
    })
    .await;
    let made = format!("token {}", token.id);
    let path = "POST /v1/tenants/acme/users/amy/tokens";
    wait_for("the admin's entries", async || {
        let own = log(&tenants.admin, "default").await.expect("an admin sees it");
        has(&own, "a process of this host", path, &made, 200).then_some(())
    })
    .await;
    is_kind(log(&tenants.amy, "acme").await, ProblemKind::Forbidden);
    let (other, none) = (log(&tenants.bob, "acme").await, log(&tenants.bob, "none").await);
    let [other, none] = [other, none].map(|log| is_kind(log, ProblemKind::NotFound).to_string());
    assert_eq!(other.replace("acme", "none"), none);
    let dir = tenants.lab.dir.path().join("audit");
    for file in std::fs::read_dir(dir).expect("files") {
        let text = std::fs::read_to_string(file.expect("a file").path()).expect("text");
        assert!(!text.contains(token.token.rsplit_once('_').expect("a secret").1));
    }
}

/// It is in a network of the hosts' operator then.
#[tokio::test]
async fn only_an_admin_s_vm_is_in_a_bridge_of_the_operator() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    let network = "bridge:br0".parse().expect("a bridge");
    let with_card = JobSpec { network, ..small("q") };
    is_kind(tenants.ann.post::<Job>("/v1/jobs", &with_card).await, ProblemKind::Forbidden);
    let _: Job = tenants.admin.post("/v1/jobs", &with_card).await.expect("an admin may");
}

#[tokio::test]
async fn input_files_are_their_tenant_s() {
    let tenants = Tenants::up().await;
    tenants.share_debian().await;
    let list = super::inputs::upload(&tenants.ann, &[("q.sql", "hi")]).await;
    let with = |inputs: &str| JobSpec { inputs: Some(inputs.to_owned()), ..small("q") };
    let problem =
        is_kind(tenants.bob.post::<Job>("/v1/jobs", &with(&list)).await, ProblemKind::Invalid);
    assert!(problem.why.contains("was uploaded"), "{problem}");
    let _: Job = tenants.amy.post("/v1/jobs", &with(&list)).await.expect("its tenant's");
    // It becomes a part of a file's name.
    let outside = format!("../../{}", &list[6..]);
    for wrong in ["", "..", &outside, &list.to_uppercase(), &list[1..]] {
        let problem =
            is_kind(tenants.amy.post::<Job>("/v1/jobs", &with(wrong)).await, ProblemKind::Invalid);
        assert!(problem.why.contains("not the SHA-256"), "{problem}");
    }
}

/// A clone of a shared image has layers that other tenants' clones have as well.
#[tokio::test]
async fn a_tenant_that_confines_its_volume_learns_no_name_of_another_tenant_s() {
    let tenants = Tenants::up().await;
    let host = Some(tenants.lab.cloud.id.clone());
    let new = NewVolume { host, ..new_volume("data", 1 << 20) };
    let _: ClusterVolume = tenants.bob.post("/v1/volumes", &new).await.expect("a volume");
    let others = ["volume acme~secret", "image debian", "volume acme~secret, which departed,"];
    let users = others.iter().chain(&["volume blue~own"]).map(ToString::to_string).collect();
    tenants.lab.cloud.inside().users_of_layers = users;
    let set = async |leave_site| {
        let ask = SetLeaveSite { leave_site, confirmed: true };
        tenants.bob.put::<LeaveSiteSet>("/v1/volumes/data/leave-site", &ask).await
    };
    for leave_site in [LeaveSite::Never, LeaveSite::Allowed] {
        let done = set(leave_site).await.expect("its own");
        let own = vec!["volume blue~own".to_owned()];
        assert_eq!((&done.also, &done.may_leave), (&own, &own), "{done:?}");
        let asker =
            tenants.lab.cloud.inside().leave_site_asker.take().expect("it is told who asks");
        assert_eq!(asker.tenant, tenant("blue"));
    }
    tenants.lab.home.inside().copies = vec!["the replica of volume acme~secret".to_owned()];
    let refused = is_kind(set(LeaveSite::Never).await, ProblemKind::Conflict).to_string();
    assert!(refused.contains("home1") && !refused.contains("secret"), "{refused}");
    let ask = SetLeaveSite { leave_site: LeaveSite::Allowed, confirmed: true };
    let path = "/v1/volumes/blue~data/leave-site";
    let _: LeaveSiteSet = tenants.admin.put(path, &ask).await.expect("an admin may");
    assert_eq!(tenants.lab.cloud.inside().leave_site_asker, None);
}

#[tokio::test]
async fn what_a_token_has_made_ends_with_it() {
    let tenants = Tenants::up().await;
    let own = "/v1/tenants/acme/users/amy";
    let year = NewAccessToken { life_s: 365 * 86_400 };
    let make = async |by: &Client| {
        let made = by.post::<MadeAccessToken>(&format!("{own}/tokens"), &year).await;
        let made = made.expect("a token");
        (made.id.clone(), client(&tenants.url).with_token(&made.token).expect("a token"), made)
    };
    let first: Vec<AccessToken> =
        tenants.amy.get(&format!("{own}/tokens")).await.expect("the first");
    let (stolen, thief, made) = make(&tenants.amy).await;
    assert_eq!(made.expires_ms, first[0].expires_ms, "it does not outlive the one that made it");
    let (_, further, _) = make(&thief).await;
    let (_, furthest, _) = make(&further).await;
    let key = |name: &str| {
        SshKey::new(user_name(name), &format!("ssh-ed25519 AAAA{name}")).expect("a key")
    };
    let keys = format!("{own}/keys");
    let _: User = further.put(&keys, &key("thiefs")).await.expect("a key");
    let _: User = tenants.amy.put(&keys, &key("own")).await.expect("a key");
    let _: User = tenants.admin.put(&keys, &key("admins")).await.expect("a key");
    tenants.amy.delete(&format!("{own}/tokens/{stolen}")).await.expect("revoked");
    for gone in [thief, further, furthest] {
        gone.get::<Me>("/v1/me").await.expect_err("it ended");
    }
    let amy: User = tenants.amy.get(own).await.expect("she is known");
    let left: Vec<&str> = amy.keys.iter().map(|key| key.name.as_str()).collect();
    assert_eq!(left, ["own", "admins"]);
}

/// Requests take turns. What it had made would have stayed.
#[tokio::test]
async fn a_token_that_is_revoked_while_its_request_waits_makes_nothing() {
    let tenants = Tenants::up().await;
    let (acme, amy) = (tenant("acme"), user_name("amy"));
    let cluster = &tenants.lab.cluster;
    let stolen = make_token(&tenants.admin, "acme/amy").await;
    let (_, used) = cluster.accounts.by_token(&stolen.token).expect("it is good");
    tenants
        .amy
        .delete(&format!("/v1/tenants/acme/users/amy/tokens/{}", stolen.id))
        .await
        .expect("revoked");
    let made = crate::accounts::make_token(cluster, &acme, &amy, 3600, Some(&used)).await;
    is_kind(made, ProblemKind::Forbidden);
    let key = SshKey::new(user_name("thiefs"), "ssh-ed25519 AAAAthiefs").expect("a key");
    let key = SshKey { by_token: Some(used.id), ..key };
    is_kind(crate::accounts::put_key(cluster, (&acme, &amy), key).await, ProblemKind::Forbidden);
}

/// A token that is over is forgotten when the user gets another one.
#[tokio::test]
async fn a_key_that_was_added_with_a_forgotten_token_ends_with_that_tokens_maker() {
    let tenants = Tenants::up().await;
    let own = "/v1/tenants/acme/users/amy";
    let make = async |by: &Client| {
        let life = NewAccessToken { life_s: 86_400 };
        let made = by.post::<MadeAccessToken>(&format!("{own}/tokens"), &life).await;
        let made = made.expect("a token");
        (made.id, client(&tenants.url).with_token(&made.token).expect("a token"))
    };
    let (stolen, thief) = make(&tenants.amy).await;
    let (short, further) = make(&thief).await;
    let key = SshKey::new(user_name("thiefs"), "ssh-ed25519 AAAAthiefs").expect("a key");
    let _: User = further.put(&format!("{own}/keys"), &key).await.expect("a key");
    crate::accounts::expire(&tenants.lab.cluster, &short);
    make(&tenants.amy).await;
    let list: Vec<AccessToken> = tenants.amy.get(&format!("{own}/tokens")).await.expect("tokens");
    assert!(list.iter().all(|token| token.id != short), "it is forgotten");
    tenants.amy.delete(&format!("{own}/tokens/{stolen}")).await.expect("revoked");
    let amy: User = tenants.amy.get(own).await.expect("she is known");
    assert_eq!(amy.keys, []);
}

/// The gateway of FTPS asks from one address for all of its clients. What it says is noted, and is never taken for who asks.
#[tokio::test]
async fn the_audit_log_says_for_which_client_a_gateway_has_tried_a_token() {
    let tenants = Tenants::up().await;
    let ask = async |client: &str| {
        let told = asked_for(&tenants.url, client).await;
        assert!(told.starts_with("HTTP/1.1 401"), "{told}");
    };
    ask("192.0.2.7").await;
    let tried = wait_for("an entry", async || {
        let log: Vec<AuditEntry> = tenants.admin.get("/v1/audit").await.expect("a log");
        log.into_iter().find(|entry| entry.who.starts_with("a client at"))
    })
    .await;
    assert!(tried.who.ends_with(", which says that it asks for 192.0.2.7"), "{tried:?}");
    // What is no address is left out.
    ask("root, who has the right token").await;
}

#[tokio::test]
async fn the_audit_log_says_that_somebody_tries_tokens_but_not_each_time() {
    let tenants = Tenants::up().await;
    let thief = client(&tenants.url).with_token("perigee_0123456789abcdef_0").expect("a word");
    for _ in 0..20 {
        thief.get::<Me>("/v1/me").await.expect_err("a wrong token");
    }
    let tried = wait_for("an entry", async || {
        let log: Vec<AuditEntry> = tenants.admin.get("/v1/audit").await.expect("a log");
        let of_thief = log.into_iter().filter(|entry| entry.who.starts_with("a client at"));
        let of_thief: Vec<AuditEntry> = of_thief.collect();
        (!of_thief.is_empty()).then_some(of_thief)
    })
    .await;
    assert!(tried[0].thing.contains("wrong, expired or revoked"), "{tried:?}");
    // On a slow machine there is one every ten seconds.
    assert!(tried.len() < 10, "{tried:?}");
}

/// The answer to a request with a wrong token which says for whom it asks.
async fn asked_for(url: &str, client: &str) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let at = url.strip_prefix("http://").expect("plain");
    let mut stream = tokio::net::TcpStream::connect(at).await.expect("a connection");
    let request = format!(
        "GET /v1/me HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n\
         Authorization: Bearer perigee_0123456789abcdef_0\r\nPerigee-Asks-For: {client}\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.expect("it is sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("an answer");
    answer
}
