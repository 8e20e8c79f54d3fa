//! The second tenant walks through the whole API with the first one's names, and learns nothing.
//!
//! Each operation of the API's document is asked for with the name of a thing of `acme`, and with a name that nothing ever
//! had. The answers have to be the same but for the name. A parameter or a body that the walk does not know how to fill
//! fails it, so whoever adds a route adds it here too.

use std::collections::BTreeSet;
use std::slice;

use perigee_http::{Client, Method};
use perigee_model::backup::Backup;
use perigee_model::job::{Access, ClusterImage, ClusterVolume, Job, JobSpec, JobVolume};
use perigee_model::tenant::{AccessToken, SshKey, Tenant, User};
use perigee_model::{Problem, ProblemKind};
use serde_json::{Value, json};

use super::tenants::{Tenants, new_volume, small, user_name, volume};
use super::vm_of;

/// The name of something that `acme` has, and one that nothing has.
#[derive(Debug, Clone)]
struct Names {
    secret: String,
    never: String,
}

fn names(secret: &str, never: &str) -> Names {
    Names { secret: secret.to_owned(), never: never.to_owned() }
}

/// What the first tenant has.
struct Secrets {
    /// The short name.
    backup: String,
    token: Names,
    inputs: Names,
}

const VOLUME: [&str; 2] = ["topsecret1", "neverthere1"];
const IMAGE: [&str; 2] = ["topsecret2", "neverthere2"];
const NETWORK: [&str; 2] = ["topsecret7", "neverthere7"];
const JOB: [&str; 2] = ["topsecret3-0001", "neverthere3-0001"];

/// Where `acme` may have backups.
const BACKUPS: &str = "/srv/acme";

/// `acme` has a backup of its volume, and a schedule of others. Returns the short name of the backup.
async fn back_up(tenants: &Tenants) -> String {
    let targets = json!({"targets": [{"address": BACKUPS}]});
    let path = "/v1/tenants/acme/backup-targets";
    let _: Tenant = tenants.admin.put(path, &targets).await.expect("a target");
    let mut ask = json!({"volume": VOLUME[0], "to": {"address": BACKUPS}});
    let backup: Backup = tenants.ann.post("/v1/backups", &ask).await.expect("a backup");
    ask["every_s"] = json!(3600);
    let _: Value = tenants.ann.post("/v1/backup-schedules", &ask).await.expect("a schedule");
    backup.name.as_str().trim_start_matches("acme~").to_owned()
}

/// `acme` has one of everything.
async fn fill(tenants: &Tenants) -> Secrets {
    tenants.share_debian().await;
    let ann = &tenants.ann;
    let _: ClusterVolume =
        ann.post("/v1/volumes", &new_volume(VOLUME[0], 1 << 30)).await.expect("a volume");
    let import = json!({"name": IMAGE[0], "source": "upload:1"});
    let _: ClusterImage = ann.post("/v1/images", &import).await.expect("an image");
    let network = json!({"name": NETWORK[0], "subnet": "10.7.0.0/24"});
    let _: Value = ann.post("/v1/networks", &network).await.expect("a network");
    let key = SshKey::new(user_name("topsecret4"), "ssh-ed25519 AAAAC3Nza x").expect("a key");
    let _: User = ann.put("/v1/tenants/acme/users/ann/keys", &key).await.expect("a key");
    let list = super::inputs::upload(ann, &[("q.sql", "hi")]).await;
    let data = JobVolume {
        volume: volume(VOLUME[0]),
        mount: "/data".to_owned(),
        access: Access::Write,
        ranks: Vec::new(),
    };
    let home1 = super::spec(Access::Read).start;
    let inputs = Some(list.clone());
    let spec = JobSpec { volumes: vec![data], start: home1, inputs, ..small("topsecret3") };
    let job: Job = ann.post("/v1/jobs", &spec).await.expect("a job");
    assert_eq!(job.id.as_str(), format!("acme~{}", JOB[0]));
    tenants.lab.wait_for_vm(&tenants.lab.home, &vm_of(&job.id)).await;
    for path in ["/v1/data/acme/topsecret5", "/dav/acme/topsecret6"] {
        let put = ann.send_body::<Value>(Method::PUT, path, "the plan").await;
        assert!(!matches!(&put, Err(problem) if problem.kind != ProblemKind::Internal), "{put:?}");
    }
    let tokens: Vec<AccessToken> =
        ann.get("/v1/tenants/acme/users/ann/tokens").await.expect("tokens");
    Secrets {
        backup: back_up(tenants).await,
        token: names(&tokens[0].id, "0123456789abcdef"),
        inputs: names(&list, &"0".repeat(64)),
    }
}

/// The values of a path's parameter: full names of the first tenant, and the short ones.
fn values(parameter: &str, secrets: &Secrets) -> Vec<Names> {
    let both = |[secret, never]: [&str; 2]| {
        vec![names(&format!("acme~{secret}"), &format!("acme~{never}")), names(secret, never)]
    };
    match parameter {
        "volume" | "schedule" => both(VOLUME),
        "backup" => {
            let never = format!("{}-20000101-000000", VOLUME[1]);
            both([secrets.backup.as_str(), never.as_str()])
        }
        "image" => both(IMAGE),
        "network" => both(NETWORK),
        "job" | "vm" => both(JOB),
        "tenant" => vec![names("acme", "void")],
        "user" => vec![names("ann", "zzz")],
        "token" => vec![secrets.token.clone()],
        "key" => vec![names("topsecret4", "neverthere4")],
        // The cluster's, and only an admin's to see.
        "host" => vec![names("home1", "home9")],
        "rental" => vec![names("rent-1", "rent-2")],
        "site" => vec![names("home", "elsewhere")],
        _ => panic!("the walk does not know what {{{parameter}}} is: give it a value"),
    }
}

/// The bodies with which an operation is tried, with `NAME` where a name of the first tenant may stand, and the kind of
/// that thing. They lead as far as whoever has the named thing gets.
fn bodies(operation: &str) -> Vec<(&'static str, Value)> {
    let plain = |body: Value| vec![("", body)];
    let job = |kind, part: Value| {
        let mut body = serde_json::to_value(small("own")).expect("JSON");
        body.as_object_mut().expect("a map").extend(part.as_object().expect("a map").clone());
        (kind, body)
    };
    let jobs = || {
        let data = json!([{"volume": "NAME", "mount": "/data", "access": "read"}]);
        vec![
            job("volume", json!({"volumes": data})),
            job("image", json!({"image": "NAME"})),
            job("network", json!({"network": "NAME"})),
            job("inputs", json!({"inputs": "NAME"})),
            job("full job", json!({"name": "NAME"})),
        ]
    };
    match operation {
        "POST /v1/images" => vec![("full image", json!({"name": "NAME", "source": "upload:1"}))],
        "POST /v1/volumes" => vec![
            ("full volume", json!({"name": "NAME", "size_bytes": 4096, "source": "empty"})),
            ("volume", json!({"name": "own", "source": {"volume": "NAME"}})),
            ("image", json!({"name": "own", "source": {"image": "NAME"}})),
        ],
        "POST /v1/jobs" | "POST /v1/jobs/plan" => jobs(),
        "POST /v1/backups" => vec![
            ("volume", json!({"volume": "NAME", "to": {"address": BACKUPS}})),
            ("vm", json!({"vm": "NAME", "to": {"address": BACKUPS}})),
            ("image", json!({"image": "NAME", "to": {"address": BACKUPS}})),
        ],
        "POST /v1/backup-schedules" => {
            let to = json!({"address": BACKUPS});
            vec![("volume", json!({"volume": "NAME", "to": to, "every_s": 3600}))]
        }
        "POST /v1/backups/{backup}/verify" => {
            vec![("", json!({})), ("", json!({"at": {"address": BACKUPS}, "host": "cloud1"}))]
        }
        "POST /v1/backups/{backup}/restore" => {
            let from = json!({"address": BACKUPS});
            vec![("", json!({"volume": "own"})), ("", json!({"volume": "own", "from": from}))]
        }
        "POST /v1/backups/{backup}/restore-vm" => plain(json!({"vm": "own"})),
        "POST /v1/backups/{backup}/restore-image" => plain(json!({"image": "own"})),
        "POST /v1/look-for-backups" => vec![
            ("", json!({"at": {"address": BACKUPS}})),
            ("tenant", json!({"at": {"address": BACKUPS}, "tenant": "NAME"})),
        ],
        "POST /v1/networks" => {
            vec![("full network", json!({"name": "NAME", "subnet": "10.7.0.0/24"}))]
        }
        "POST /v1/vms/{vm}/exec" => plain(json!({"command": ["id"]})),
        "POST /v1/volumes/{volume}/snapshot" | "POST /v1/vms/{vm}/snapshot" => {
            vec![("", json!({"image": "own"})), ("full image", json!({"image": "NAME"}))]
        }
        "POST /v1/vms/{vm}/restore" => {
            vec![("", json!({"image": "debian"})), ("image", json!({"image": "NAME"}))]
        }
        "POST /v1/vms/{vm}/attach" | "POST /v1/vms/{vm}/detach" => {
            vec![("", json!({"volume": "own"})), ("volume", json!({"volume": "NAME"}))]
        }
        "POST /v1/vms/{vm}/resize" => plain(json!({"cpus": 2})),
        "PUT /v1/vms/{vm}/set" => plain(json!({"may_migrate": false, "rules": {"apart": "db"}})),
        "PUT /v1/vms/{vm}/file" => plain(json!({})),
        "PUT /v1/volumes/{volume}/leave-site" | "PUT /v1/images/{image}/leave-site" => {
            plain(json!({"leave_site": "never"}))
        }
        "PUT /v1/images/{image}/shared" => plain(json!({"shared": true})),
        "POST /v1/images/{image}/replicate" => plain(json!({"to": "home"})),
        "POST /v1/volumes/{volume}/adopt"
        | "POST /v1/images/{image}/adopt"
        | "POST /v1/vms/{vm}/end-unknown"
        | "POST /v1/vms/{vm}/adopt" => plain(json!({"host": "home1"})),
        "POST /v1/volumes/{volume}/move" => plain(json!({"to": "home1"})),
        "POST /v1/volumes/{volume}/replicas" => plain(json!({"to": "cloud"})),
        "POST /v1/volumes/{volume}/replicas/stop" => plain(json!({"to": "cloud"})),
        "POST /v1/volumes/{volume}/promote" => plain(json!({})),
        "POST /v1/vms" => vec![
            (
                "full vm",
                json!({"name": "NAME", "image": "debian", "cpus": 1, "memory_bytes": 1 << 28}),
            ),
            ("image", json!({"name": "own", "image": "NAME", "cpus": 1, "memory_bytes": 1 << 28})),
            (
                "volume",
                json!({"name": "own", "image": "debian", "cpus": 1, "memory_bytes": 1 << 28,
                    "volumes": [{"volume": "NAME"}]}),
            ),
        ],
        "POST /v1/vms/{vm}/stop" | "POST /v1/vms/{vm}/restart" => plain(json!({"force": true})),
        "POST /v1/jobs/{job}/move" => plain(json!({"hosts": ["cloud1"]})),
        "POST /v1/vms/{vm}/move" => plain(json!({"host": "cloud1"})),
        "POST /v1/tenants/{tenant}/users/{user}/tokens" => plain(json!({"life_s": 3600})),
        "PUT /v1/tenants/{tenant}/users/{user}/keys" => {
            plain(json!({"name": "own", "key": "ssh-ed25519 AAAA"}))
        }
        // Only admins and hosts get as far as the body.
        "PUT /v1/hosts/{host}"
        | "POST /v1/upgrade/finish"
        | "PUT /v1/hosts/{host}/site"
        | "POST /v1/hosts/{host}/token"
        | "POST /v1/hosts/{host}/certificate"
        | "POST /v1/hosts/{host}/stops"
        | "POST /v1/hosts/{host}/shuts-down"
        | "POST /v1/hosts/{host}/drain"
        | "POST /v1/hosts/{host}/undrain"
        | "POST /v1/hosts/{host}/measure"
        | "POST /v1/hosts/{host}/check"
        | "POST /v1/enrol"
        | "POST /v1/enrol/check"
        | "POST /v1/rentals"
        | "POST /v1/rentals/{rental}/end"
        | "PUT /v1/renting"
        | "POST /v1/tenants"
        | "PUT /v1/sites/{site}/balance"
        | "PUT /v1/sites/{site}/place"
        | "PUT /v1/tenants/{tenant}/quota"
        | "PUT /v1/tenants/{tenant}/backup-targets"
        | "PUT /v1/tenants/{tenant}/backup-key"
        | "PUT /v1/tenants/{tenant}/users/{user}" => plain(json!({})),
        // No JSON.
        "POST /v1/uploads" => plain(Value::Null),
        _ => panic!("the walk does not know the body of {operation}: give it one"),
    }
}

/// An answer as text; a problem's kind stands for the status.
async fn ask(client: &Client, method: &str, path: &str, body: Option<&Value>) -> String {
    let shown = |answer: Result<Value, Problem>| match answer {
        Ok(value) => format!("done: {value}"),
        Err(problem) => serde_json::to_string(&problem).expect("JSON"),
    };
    let nothing = json!({});
    let body = body.unwrap_or(&nothing);
    match method {
        "GET" => match client.get_bytes(path).await {
            Ok(bytes) => format!("done: {}", String::from_utf8_lossy(&bytes)),
            Err(problem) => shown(Err(problem)),
        },
        "POST" if body.is_null() => shown(client.send_body(Method::POST, path, "no tar").await),
        "POST" => shown(client.post(path, body).await),
        "PUT" => shown(client.put(path, body).await),
        "DELETE" => shown(client.delete(path).await.map(|()| Value::Null)),
        _ => {
            let method = Method::from_bytes(method.as_bytes()).expect("a method");
            shown(client.send_body(method, path, "").await)
        }
    }
}

/// The parameters of a path.
fn parameters(path: &str) -> Vec<&str> {
    let parts = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    parts.collect()
}

/// The ways to fill a path: each has names for its parameters.
fn fillings(path: &str, secrets: &Secrets) -> Vec<Vec<(String, Names)>> {
    let mut ways = vec![Vec::new()];
    for parameter in parameters(path) {
        let values = values(parameter, secrets);
        ways = ways
            .into_iter()
            .flat_map(|way: Vec<(String, Names)>| {
                values.iter().map(move |value| {
                    let mut way = way.clone();
                    way.push((parameter.to_owned(), value.clone()));
                    way
                })
            })
            .collect();
    }
    ways
}

struct Walk<'a> {
    client: &'a Client,
    asked: BTreeSet<String>,
}

impl Walk<'_> {
    /// Asks with the secret names and with those that never were, and compares the answers.
    async fn compare(
        &mut self,
        method: &str,
        path: &str,
        body: Option<Value>,
        all: &[(String, Names)],
    ) {
        let fill = |text: &str, which: fn(&Names) -> &String| {
            all.iter().fold(text.to_owned(), |text, (hole, names)| text.replace(hole, which(names)))
        };
        let mut answers = Vec::new();
        for which in [(|names| &names.secret) as fn(&Names) -> &String, |names| &names.never] {
            let url = fill(path, which);
            let body = body.as_ref().map(|body| {
                serde_json::from_str::<Value>(&fill(&body.to_string(), which)).expect("JSON")
            });
            let answer = ask(self.client, method, &url, body.as_ref()).await;
            // What was asked for may be in the answer.
            let said = all.iter().enumerate().fold(answer.clone(), |said, (number, (_, names))| {
                said.replace(which(names), &format!("NAME{number}"))
            });
            assert!(!said.contains("topsecret"), "{method} {url}: {answer}");
            answers.push(said);
        }
        assert_eq!(answers[0], answers[1], "{method} {path} {body:?} {all:?}");
        self.asked.insert(format!("{method} {path}"));
    }

    async fn operation(&mut self, operation: &Value, method: &str, path: &str, secrets: &Secrets) {
        let name = format!("{method} {path}");
        let bodies = match operation.get("requestBody") {
            Some(_) => bodies(&name).into_iter().map(|(kind, body)| (kind, Some(body))).collect(),
            None => vec![("", None)],
        };
        for way in fillings(path, secrets) {
            let way: Vec<(String, Names)> =
                way.into_iter().map(|(hole, names)| (format!("{{{hole}}}"), names)).collect();
            for (kind, body) in &bodies {
                let in_body = match *kind {
                    "" => vec![None],
                    "inputs" => vec![Some(secrets.inputs.clone())],
                    // A short name is one of the own tenant, and would be made.
                    full if full.starts_with("full ") => {
                        vec![values(full.trim_start_matches("full "), secrets).into_iter().next()]
                    }
                    kind => values(kind, secrets).into_iter().map(Some).collect(),
                };
                for in_body in in_body {
                    let mut all = way.clone();
                    all.extend(in_body.map(|names| ("NAME".to_owned(), names)));
                    self.compare(method, path, body.clone(), &all).await;
                }
            }
        }
    }
}

/// The repository's doors over HTTP are not in the document.
async fn walk_files(walk: &mut Walk<'_>) {
    let hole = |hole: &str, names: Names| (hole.to_owned(), names);
    for door in ["/v1/data", "/dav"] {
        for method in ["GET", "PUT", "DELETE", "POST", "MKCOL", "PROPFIND", "MOVE", "COPY", "LOCK"]
        {
            let tenant = hole("{tenant}", names("acme", "void"));
            walk.compare(method, &format!("{door}/{{tenant}}"), None, slice::from_ref(&tenant))
                .await;
            for file in ["topsecret5", "topsecret6"] {
                let file = hole("NAME", names(file, "neverthere"));
                for query in
                    ["", "?stat", "?shares", "?share=blue", "?directory", "?rename=a", "?upload"]
                {
                    let path = format!("{door}/{{tenant}}/NAME{query}");
                    let both = [tenant.clone(), file.clone()];
                    walk.compare(method, &path, None, &both).await;
                    let own = path.replace("{tenant}", "acme");
                    walk.compare(method, &own, None, slice::from_ref(&file)).await;
                }
            }
        }
        walk.compare("GET", door, None, &[]).await;
        walk.compare("PROPFIND", door, None, &[]).await;
    }
}

#[tokio::test]
async fn the_second_tenant_finds_no_file_of_the_first() {
    let tenants = Tenants::up().await;
    fill(&tenants).await;
    for client in [&tenants.bob, &tenants.bea] {
        walk_files(&mut Walk { client, asked: BTreeSet::new() }).await;
    }
    for (door, file) in [("/v1/data", "topsecret5"), ("/dav", "topsecret6")] {
        let kept = tenants.ann.get_bytes(&format!("{door}/acme/{file}")).await.expect("her file");
        assert_eq!(&kept[..], b"the plan");
    }
}

/// How often the first of two answers takes longer, from 0 to 1.
fn how_often_longer(times: &[[std::time::Duration; 2]]) -> f64 {
    let longer = |one: std::time::Duration| times.iter().filter(|[_, other]| one > *other).count();
    let all: usize = times.iter().map(|[one, _]| longer(*one)).sum();
    let pairs = times.len() * times.len();
    f64::from(u32::try_from(all).expect("few")) / f64::from(u32::try_from(pairs).expect("few"))
}

/// Both kinds of requests take turns, so whatever else the machine does takes as long from the one as from the other.
#[tokio::test]
async fn the_time_of_an_answer_does_not_tell_what_the_first_tenant_has() {
    let tenants = Tenants::up().await;
    let secrets = fill(&tenants).await;
    let of = |kind: &str| values(kind, &secrets).remove(0);
    for (path, thing) in [
        ("/v1/volumes/NAME", of("volume")),
        ("/v1/images/NAME", of("image")),
        ("/v1/jobs/NAME", of("job")),
        ("/v1/vms/NAME", of("vm")),
        ("/v1/tenants/NAME", of("tenant")),
        ("/v1/tenants/acme/users/NAME/tokens", of("user")),
        ("/v1/data/acme/NAME?stat", names("topsecret5", "neverthere")),
    ] {
        let mut times = Vec::new();
        for _ in 0..200 {
            let mut both = [std::time::Duration::ZERO; 2];
            for (time, name) in both.iter_mut().zip([&thing.secret, &thing.never]) {
                let path = path.replace("NAME", name);
                let begun = std::time::Instant::now();
                tenants.bob.get::<Value>(&path).await.expect_err("nothing of bob's");
                *time = begun.elapsed();
            }
            times.push(both);
        }
        let longer = how_often_longer(&times);
        assert!((0.15..0.85).contains(&longer), "{path}: {longer}");
    }
}

#[tokio::test]
async fn the_second_tenant_finds_nothing_of_the_first_in_the_whole_api() {
    let tenants = Tenants::up().await;
    let secrets = fill(&tenants).await;
    let document = crate::api::document();
    // An operator gets as far as the things' names in more places, and a member is refused in others.
    for client in [&tenants.bob, &tenants.bea] {
        let mut walk = Walk { client, asked: BTreeSet::new() };
        for (path, item) in document["paths"].as_object().expect("paths") {
            for (method, operation) in item.as_object().expect("operations") {
                walk.operation(operation, &method.to_uppercase(), path, &secrets).await;
            }
        }
        assert_eq!(walk.asked.len(), crate::api::operations().len());
        let audit = "/v1/audit?tenant={tenant}";
        walk.compare("GET", audit, None, &[("{tenant}".to_owned(), names("acme", "void"))]).await;
    }
    let volumes: Vec<ClusterVolume> = tenants.bob.get("/v1/volumes").await.expect("volumes");
    assert!(volumes.is_empty(), "the walk has made {volumes:?}");
    // What the first one has is as it was.
    let ann = &tenants.ann;
    ann.get::<ClusterVolume>(&format!("/v1/volumes/{}", VOLUME[0])).await.expect("its volume");
    ann.get::<ClusterImage>(&format!("/v1/images/{}", IMAGE[0])).await.expect("its image");
    let job: Job = ann.get(&format!("/v1/jobs/{}", JOB[0])).await.expect("its job");
    assert!(!job.state.is_final(), "{job:?}");
}
