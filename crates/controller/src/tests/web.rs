//! The pages, through the router that the controller serves: who sees what, and which request of a browser counts.

use axum::Extension;
use perigee_http::{Peer, Refusal};
use perigee_model::JobId;
use perigee_model::guest::{GuestBody, LogStream};
use perigee_model::job::{Access, ClusterVolume, Job, JobSpec, JobState};
use perigee_model::persistent_vm::StopVm;
use perigee_model::tenant::{AuditEntry, NewUser, Role, User};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::tenants::{Tenants, make_token, new_volume, small};
use super::{PATIENCE, finish, spec, vm_of, wait_for};
use crate::cluster::Index;

/// Where browsers ask, and the address as they write it.
struct Site {
    tenants: Tenants,
    /// For clients without a certificate.
    address: String,
}

/// What a server has said.
#[derive(Debug)]
pub struct Said {
    pub status: u16,
    /// In lower case.
    head: String,
    pub body: String,
}

impl Said {
    pub fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines();
        lines.filter_map(|line| line.split_once(": ")).find(|(n, _)| *n == name).map(|(_, v)| v)
    }
}

async fn serve(tenants: &Tenants, peer: Peer) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("address").to_string();
    let router = crate::web::router(tenants.lab.cluster.clone()).layer(Extension(peer));
    tenants
        .lab
        .supervisor
        .spawn(async move { axum::serve(listener, router).await.expect("serve") });
    address
}

async fn open(
    address: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> TcpStream {
    let mut request =
        format!("{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n");
    for (name, value) in headers {
        request.push_str(&format!("{name}: {value}\r\n"));
    }
    request.push_str(&format!("content-length: {}\r\n\r\n{body}", body.len()));
    let mut stream = TcpStream::connect(address).await.expect("a connection");
    stream.write_all(request.as_bytes()).await.expect("sent");
    stream
}

pub async fn send(
    address: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Said {
    let mut stream = open(address, method, path, headers, body).await;
    let mut answer = Vec::new();
    let read = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await;
    read.expect("an answer in time").expect("an answer");
    let text = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    let status = head[9..12].parse().expect("a status");
    // A cookie's value is looked at as it is.
    let lower = |line: &str| match line.split_once(": ") {
        Some((name, value)) => format!("{}: {value}", name.to_lowercase()),
        None => line.to_owned(),
    };
    let head = head.lines().map(lower).collect::<Vec<_>>().join("\n");
    Said { status, head, body: body.to_owned() }
}

impl Site {
    async fn up() -> Self {
        let tenants = Tenants::up().await;
        let address = serve(&tenants, Peer::Stranger).await;
        Self { tenants, address }
    }

    /// Amy's job `q-0001`, whose VM is at `home1`.
    async fn with_a_vm(&self) -> JobId {
        self.tenants.share_debian().await;
        let asked = JobSpec { start: spec(Access::Read).start, ..small("q") };
        let job: Job = self.tenants.amy.post("/v1/jobs", &asked).await.expect("a job");
        let lab = &self.tenants.lab;
        lab.wait_for_vm(&lab.home, &vm_of(&job.id)).await;
        job.id
    }

    async fn token(&self, of: &str) -> String {
        make_token(&self.tenants.admin, of).await.token
    }

    async fn cookie(&self, of: &str) -> String {
        format!("__Host-perigee={}", self.token(of).await)
    }

    fn origin(&self) -> String {
        format!("http://{}", self.address)
    }

    async fn get(&self, cookie: &str, path: &str) -> Said {
        send(&self.address, "GET", path, &[("cookie", cookie)], "").await
    }

    async fn post(&self, cookie: &str, path: &str, origin: Option<&str>) -> Said {
        let mut headers = vec![("cookie", cookie)];
        headers.extend(origin.map(|origin| ("origin", origin)));
        send(&self.address, "POST", path, &headers, "").await
    }
}

#[tokio::test]
async fn a_user_logs_in_with_a_token_once_and_out_again() {
    let site = Site::up().await;
    let origin = site.origin();
    let token = site.token("acme/ann").await;
    let stranger = send(&site.address, "GET", "/jobs?find=a", &[], "").await;
    assert_eq!(
        (stranger.status, stranger.header("location")),
        (303, Some("/login?to=/jobs%3Ffind%3Da"))
    );
    let form = send(&site.address, "GET", "/login?to=/jobs", &[], "").await;
    assert!(form.status == 200 && form.body.contains("name=\"to\" value=\"/jobs\""), "{form:?}");
    let headers =
        [("origin", origin.as_str()), ("content-type", "application/x-www-form-urlencoded")];
    let wrong = send(&site.address, "POST", "/login", &headers, "token=perigee_1_2&to=/jobs").await;
    assert_eq!((wrong.status, wrong.header("set-cookie")), (401, None));
    assert!(wrong.body.contains("wrong, expired or revoked"), "{wrong:?}");
    let body = format!("token={token}%0A&to=%2Fjobs");
    let known = send(&site.address, "POST", "/login", &headers, &body).await;
    assert_eq!((known.status, known.header("location")), (303, Some("/jobs")));
    let cookie = known.header("set-cookie").expect("a cookie").to_owned();
    for part in ["__Host-perigee=", "Secure", "HttpOnly", "SameSite=Strict", "Path=/", "Max-Age="] {
        assert!(cookie.contains(part), "{part}: {cookie}");
    }
    let life = cookie
        .split("Max-Age=")
        .nth(1)
        .and_then(|rest| rest.split(';').next()?.parse::<u64>().ok());
    assert!((1..=3600).contains(&life.expect("a life")), "it ends with the token: {cookie}");
    let cookie = cookie.split(';').next().expect("a value");
    let first = site.get(cookie, "/").await;
    assert!(first.status == 200 && first.body.contains("acme/ann"), "{first:?}");
    assert!(first.body.contains("Log out"), "{first:?}");
    let out = site.post(cookie, "/logout", Some(&origin)).await;
    assert_eq!((out.status, out.header("location")), (303, Some("/login")));
    assert!(out.header("set-cookie").is_some_and(|set| set.contains("Max-Age=0")), "{out:?}");
    let path = "/v1/audit";
    wait_for("an entry for the log in", async || {
        let entries: Vec<AuditEntry> = site.tenants.ann.get(path).await.expect("the log");
        entries
            .iter()
            .any(|one| one.request == "POST /login" && one.who == "acme/ann")
            .then_some(())
    })
    .await;
}

/// Anybody can ask for these as often as they like, and would push out of the log what users have done.
#[tokio::test]
async fn what_strangers_read_is_not_in_the_audit_log() {
    let site = Site::up().await;
    let origin = site.origin();
    let headers = [("origin", origin.as_str())];
    for path in [
        "/web/style.css",
        "/web/page.js",
        "/web/console.js",
        "/web/xterm.css",
        "/web/xterm.mjs",
        "/web/novnc.mjs",
        "/authority.pem",
        "/login",
    ] {
        assert_eq!(send(&site.address, "GET", path, &[], "").await.status, 200, "{path}");
    }
    assert_eq!(send(&site.address, "POST", "/logout", &headers, "").await.status, 303);
    let path = "/v1/tenants/default/users/root";
    let role = Role::Admin;
    let _: User = site.tenants.admin.put(path, &NewUser { role }).await.expect("an admin");
    let entries = wait_for("a later entry", async || {
        let all: Vec<AuditEntry> = site.tenants.admin.get("/v1/audit").await.expect("the log");
        all.iter().any(|one| one.request.ends_with(path)).then_some(all)
    })
    .await;
    let by_strangers =
        |one: &&AuditEntry| one.request.starts_with("GET") || one.request.contains("/logout");
    assert_eq!(entries.iter().find(by_strangers), None, "{entries:?}");
}

/// What a browser sends by itself must not do what a program has to show a token for.
#[tokio::test]
async fn a_cookie_counts_for_the_pages_and_nowhere_else() {
    let site = Site::up().await;
    let cookie = site.cookie("acme/ann").await;
    assert_eq!(site.get(&cookie, "/jobs").await.status, 200);
    for path in ["/v1/jobs", "/v1/me", "/v1/data/acme", "/metrics", "/v1/vms/a/console/attach"] {
        assert_eq!(site.get(&cookie, path).await.status, 403, "{path}");
    }
    assert_eq!(site.get(&cookie, "/dav/acme").await.status, 401);
    let origin = site.origin();
    assert_eq!(site.post(&cookie, "/v1/jobs", Some(&origin)).await.status, 403);
}

#[tokio::test]
async fn a_request_that_no_page_of_this_server_has_sent_does_nothing() {
    let site = Site::up().await;
    site.tenants.share_debian().await;
    let cookie = site.cookie("acme/ann").await;
    let job: Job = site.tenants.ann.post("/v1/jobs", &small("q")).await.expect("a job");
    let path = "/jobs/q-0001/cancel";
    let asked = site.get(&cookie, path).await;
    assert!(asked.status == 200 && asked.body.contains("perigee job cancel q-0001"), "{asked:?}");
    for origin in [None, Some("http://evil.example"), Some("null"), Some("http://127.0.0.1:1")] {
        let refused = site.post(&cookie, path, origin).await;
        assert_eq!(refused.status, 403, "{origin:?}");
    }
    let cross = [("cookie", cookie.as_str()), ("sec-fetch-site", "cross-site")];
    assert_eq!(send(&site.address, "GET", "/jobs", &cross, "").await.status, 403);
    let socket = [("cookie", cookie.as_str()), ("connection", "upgrade"), ("upgrade", "websocket")];
    assert_eq!(send(&site.address, "GET", "/live?of=/", &socket, "").await.status, 403);
    let evil = [("origin", "http://evil.example")];
    assert_eq!(send(&site.address, "POST", "/login", &evil, "token=x").await.status, 403);
    assert_eq!(send(&site.address, "POST", "/logout", &evil, "").await.status, 403);
    let still: Job = site.tenants.ann.get("/v1/jobs/q-0001").await.expect("the job");
    assert!(!still.state.is_final(), "nobody has cancelled it");
    let own = site.post(&cookie, path, Some(&site.origin())).await;
    assert_eq!((own.status, own.header("location")), (303, Some("/jobs/q-0001")));
    site.tenants.lab.wait_for_state(&job.id, JobState::Cancelled).await;
}

#[tokio::test]
async fn a_cookie_ends_with_its_token() {
    let site = Site::up().await;
    let made = make_token(&site.tenants.admin, "acme/amy").await;
    let cookie = format!("__Host-perigee={}", made.token);
    assert_eq!(site.get(&cookie, "/").await.status, 200);
    crate::accounts::expire(&site.tenants.lab.cluster, &made.id);
    let over = site.get(&cookie, "/jobs").await;
    assert_eq!((over.status, over.header("location")), (303, Some("/login?to=/jobs")));
    assert!(over.header("set-cookie").is_some_and(|set| set.contains("Max-Age=0")), "{over:?}");
    assert_eq!(site.get(&cookie, "/live?of=/").await.status, 401);
    let acts = site.post(&cookie, "/jobs/q-0001/cancel", Some(&site.origin())).await;
    assert_eq!(
        (acts.status, acts.header("location")),
        (303, Some("/login?to=/jobs/q-0001/cancel")),
        "the question is asked again after the log in"
    );
}

#[tokio::test]
async fn whoever_has_a_certificate_or_the_unix_socket_needs_no_cookie() {
    let site = Site::up().await;
    let address = serve(&site.tenants, Peer::Local).await;
    let first = send(&address, "GET", "/", &[], "").await;
    assert!(first.status == 200 && first.body.contains("a process of this host"), "{first:?}");
    assert!(
        !first.body.contains("Log out") && first.body.contains("href=\"/hosts/home1\""),
        "{first:?}"
    );
    // Who has a token as well is who the token says.
    let cookie = site.cookie("acme/amy").await;
    let member = send(&address, "GET", "/", &[("cookie", &cookie)], "").await;
    assert!(
        member.body.contains("acme/amy") && !member.body.contains("href=\"/hosts\""),
        "{member:?}"
    );
}

#[tokio::test]
async fn a_role_sees_the_pages_that_the_api_would_tell_it() {
    let site = Site::up().await;
    let path = "/v1/tenants/default/users/root";
    let role = Role::Admin;
    let _: User = site.tenants.admin.put(path, &NewUser { role }).await.expect("an admin");
    let pages = ["/jobs", "/queue", "/vms", "/volumes", "/sites"];
    for (of, operator, admin) in
        [("acme/amy", 403, 403), ("acme/ann", 200, 403), ("default/root", 200, 200)]
    {
        let cookie = site.cookie(of).await;
        for path in pages {
            assert_eq!(site.get(&cookie, path).await.status, 200, "{of} {path}");
        }
        for path in ["/audit", "/tenants"] {
            assert_eq!(site.get(&cookie, path).await.status, operator, "{of} {path}");
        }
        for path in ["/hosts", "/hosts/home1", "/rentals", "/hosts/home1/drain", "/live?of=/hosts"]
        {
            if path.starts_with("/live") && admin == 200 {
                continue;
            }
            assert_eq!(site.get(&cookie, path).await.status, admin, "{of} {path}");
        }
    }
    let cookie = site.cookie("acme/ann").await;
    assert_eq!(
        site.get(&cookie, "/tenants/blue").await.status,
        404,
        "as for a tenant that never was"
    );
    let own = site.get(&cookie, "/tenants").await;
    assert!(own.body.contains("Tenant acme") && !own.body.contains("blue"), "{own:?}");
    let drained = site.post(&cookie, "/hosts/home1/drain", Some(&site.origin())).await;
    assert_eq!(drained.status, 403);
}

/// Everything that `acme` has is called `topsecret`.
async fn fill(site: &Site) {
    site.tenants.share_debian().await;
    let ann = &site.tenants.ann;
    let _: ClusterVolume =
        ann.post("/v1/volumes", &new_volume("topsecret1", 1 << 30)).await.expect("a volume");
    let spec = JobSpec { start: spec(Access::Read).start, ..small("topsecret2") };
    let job: Job = ann.post("/v1/jobs", &spec).await.expect("a job");
    let lab = &site.tenants.lab;
    lab.wait_for_vm(&lab.home, &vm_of(&job.id)).await;
    let waits: JobSpec = JobSpec { cpus: 200, ..small("topsecret3") };
    let _: Job = ann.post("/v1/jobs", &waits).await.expect("a job");
}

#[tokio::test]
async fn the_second_tenant_finds_nothing_of_the_first_on_any_page() {
    let site = Site::up().await;
    fill(&site).await;
    let own = site.cookie("acme/ann").await;
    for (path, name) in [
        ("/", "topsecret2-0001"),
        ("/volumes", "topsecret1"),
        ("/queue", "topsecret3"),
        ("/vms", "topsecret2"),
        ("/audit", "topsecret2"),
    ] {
        wait_for(&format!("{name} on {path}"), async || {
            site.get(&own, path).await.body.contains(name).then_some(())
        })
        .await;
    }
    let lists = [
        "/",
        "/jobs",
        "/queue",
        "/vms",
        "/volumes",
        "/sites",
        "/tenants",
        "/audit",
        "/jobs?find=x",
        "/login",
    ];
    for of in ["blue/bob", "blue/bea", "acme/amy"] {
        let cookie = site.cookie(of).await;
        for path in lists {
            let said = site.get(&cookie, path).await;
            // A tenant's volumes are all its users'.
            let volume = if of == "acme/amy" { "topsecret1" } else { "no such name" };
            let text = said.body.replace(volume, "");
            assert!(!text.contains("topsecret"), "{of} {path}: {said:?}");
        }
        let things = [
            "/jobs/NAME2-0001",
            "/jobs/NAME2-0001/cancel",
            "/jobs/NAME2-0001/output.tar",
            "/live?of=/jobs/NAME2-0001&after=0",
            "/vms/NAME2-0001",
            "/vms/NAME2-0001/stop",
            "/vms/NAME2-0001/console",
            "/vms/NAME2-0001/console/attach",
            "/vms/NAME2-0001/screen",
            "/vms/NAME2-0001/vnc",
            "/volumes/NAME2-0001-out",
        ];
        for path in things {
            for full in ["", "acme~"] {
                let ask = async |name: &str| {
                    let path = path.replace("NAME", &format!("{full}{name}"));
                    let said = site.get(&cookie, &path).await;
                    (said.status, said.body.replace(name, "NAME"))
                };
                let (there, never) = (ask("topsecret").await, ask("neverthere").await);
                assert_eq!(there, never, "{of} {path}");
                assert_eq!(there.0, 404, "{of} {path}");
            }
        }
        let path = "/jobs/topsecret2-0001/cancel";
        assert_eq!(site.post(&cookie, path, Some(&site.origin())).await.status, 404);
    }
    let job: Job = site.tenants.ann.get("/v1/jobs/topsecret2-0001").await.expect("her job");
    assert!(!job.state.is_final(), "{job:?}");
}

#[tokio::test]
async fn each_page_tells_the_browser_to_run_nothing_but_the_own_script() {
    let site = Site::up().await;
    let cookie = site.cookie("acme/ann").await;
    for path in
        ["/", "/login", "/jobs/none-0001", "/hosts", "/web/page.js", "/vms/none-0001/console"]
    {
        let said = site.get(&cookie, path).await;
        let policy = said.header("content-security-policy").expect(path);
        for part in [
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "frame-ancestors 'none'",
            "base-uri 'none'",
            "form-action 'self'",
            "connect-src 'self'",
        ] {
            assert!(policy.contains(part), "{path}: {policy}");
        }
        assert_eq!(said.header("x-content-type-options"), Some("nosniff"), "{path}");
        assert_eq!(said.header("referrer-policy"), Some("same-origin"), "{path}");
        let kept = said.header("cache-control").expect(path);
        assert_eq!(kept.contains("no-store"), !path.starts_with("/web/"), "{path}: {kept}");
    }
    let refused = site.get(&cookie, "/jobs/none-0001").await;
    assert!(
        refused.status == 404 && refused.body.contains("perigee job list"),
        "a page says why: {refused:?}"
    );
}

/// A stream of events, of which lines are read one after the other.
struct Stream {
    stream: TcpStream,
    text: String,
}

impl Stream {
    async fn open(site: &Site, cookie: &str, path: &str) -> Self {
        let stream = open(&site.address, "GET", path, &[("cookie", cookie)], "").await;
        Self { stream, text: String::new() }
    }

    /// Reads until what has come satisfies this.
    async fn until(&mut self, what: &str, is: impl Fn(&str) -> bool) {
        let read = async {
            while !is(&self.text) {
                let mut bytes = [0; 4096];
                let count = self.stream.read(&mut bytes).await.expect("more");
                assert!(count > 0, "it ended before {what}: {}", self.text);
                self.text.push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
        };
        tokio::time::timeout(PATIENCE, read).await.unwrap_or_else(|_| panic!("waited for {what}"));
    }

    async fn until_states(&mut self, number: usize) {
        let is = |text: &str| text.matches("event: state").count() >= number;
        self.until(&format!("state {number}"), is).await;
    }
}

/// The value of an attribute that only one element of a page has.
fn attribute<'a>(page: &'a str, name: &str) -> &'a str {
    let value = page.split(&format!("{name}=\"")).nth(1).and_then(|rest| rest.split('"').next());
    value.unwrap_or_else(|| panic!("no {name}: {page}"))
}

/// A WebSocket that a page asks for: what the server has answered, and the connection.
async fn handshake(site: &Site, path: &str, cookie: &str, origin: &str) -> (String, TcpStream) {
    let request = format!(
        "GET {path} HTTP/1.1\r\nhost: {}\r\ncookie: {cookie}\r\norigin: {origin}\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-protocol: binary, perigee-refused\r\n\r\n",
        site.address
    );
    let mut stream = TcpStream::connect(&site.address).await.expect("a connection");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut head = Vec::new();
    let read = async {
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.expect("an answer"));
        }
    };
    tokio::time::timeout(PATIENCE, read).await.expect("an answer in time");
    (String::from_utf8_lossy(&head).to_lowercase(), stream)
}

#[tokio::test]
async fn a_page_opens_a_console_with_its_cookie_and_a_page_of_another_server_does_not() {
    let site = Site::up().await;
    site.with_a_vm().await;
    let (cookie, own) = (site.cookie("acme/amy").await, site.origin());
    let page = site.get(&cookie, "/vms/q-0001/console").await;
    assert!(page.body.contains("data-socket=\"/vms/acme~q-0001/console/attach\""), "{page:?}");
    assert!(page.body.contains("panic: no root") && !page.body.contains("data-live"), "{page:?}");
    let path = "/vms/q-0001/console/attach";
    for origin in ["http://evil.example", "null", "http://127.0.0.1:1"] {
        let (head, _) = handshake(&site, path, &cookie, origin).await;
        assert!(head.starts_with("http/1.1 403"), "{origin}: {head}");
    }
    let (head, _) = handshake(&site, path, &site.cookie("blue/bob").await, &own).await;
    assert!(head.starts_with("http/1.1 404"), "{head}");
    let (head, mut stream) = handshake(&site, path, &cookie, &own).await;
    assert!(head.starts_with("http/1.1 101") && head.contains("protocol: binary"), "{head}");
    // A frame with four bytes, and a mask that changes nothing.
    stream.write_all(b"\x82\x84\0\0\0\0echo").await.expect("sent");
    let mut came = [0; 6];
    let read = tokio::time::timeout(PATIENCE, stream.read_exact(&mut came)).await;
    read.expect("in time").expect("what was typed");
    assert_eq!(&came, b"\x82\x04echo");
    let entries = async || {
        let all: Vec<AuditEntry> = site.tenants.ann.get("/v1/audit").await.expect("the log");
        all.iter()
            .any(|one| one.request == format!("GET {path}") && one.status == 101)
            .then_some(())
    };
    wait_for("an entry: whoever is attached can type", entries).await;
}

/// A browser tells a page nothing of an answer that is no WebSocket.
#[tokio::test]
async fn a_page_is_told_why_it_gets_no_console() {
    let site = Site::up().await;
    site.with_a_vm().await;
    let (amy, lab) = (&site.tenants.amy, &site.tenants.lab);
    // The controller has heard of the VM before its host is silent.
    let shown = async || amy.get::<perigee_model::job::Vm>("/v1/vms/q-0001").await.ok();
    wait_for("the VM to be shown", shown).await;
    lab.home.inside().down = true;
    let (cookie, own) = (site.cookie("acme/amy").await, site.origin());
    let (head, mut stream) = handshake(&site, "/vms/q-0001/vnc", &cookie, &own).await;
    assert!(
        head.starts_with("http/1.1 101") && head.contains("protocol: perigee-refused"),
        "{head}"
    );
    let mut came = [0; 4];
    let read = tokio::time::timeout(PATIENCE, stream.read_exact(&mut came)).await;
    read.expect("in time").expect("the end");
    // It ends with 1013: it may be tried again.
    assert!(came[0] == 0x88 && came[1] > 2 && came[2..] == [0x03, 0xf5], "{came:?}");
}

/// The first page reads nothing of the store for jobs that have ended, however many there are.
#[tokio::test]
async fn a_job_that_has_failed_is_on_the_first_page_until_it_is_deleted() {
    let site = Site::up().await;
    let job = site.with_a_vm().await;
    let (amy, lab) = (&site.tenants.amy, &site.tenants.lab);
    amy.post::<()>("/v1/vms/q-0001/stop", &StopVm::default()).await.expect("stopped");
    lab.wait_for_state(&job, JobState::Failed).await;
    let is_told = async |of: &str| {
        let page = site.get(&site.cookie(of).await, "/").await;
        page.body.contains("q-0001 failed")
    };
    assert!(is_told("acme/amy").await && is_told("acme/ann").await && !is_told("blue/bob").await);
    let again = Index::load(&lab.cluster.records).await.expect("after a restart");
    assert_eq!(again.failed().len(), 1);
    let delete = async || amy.delete("/v1/jobs/q-0001").await.ok();
    wait_for("the job to be deleted", delete).await;
    assert!(!is_told("acme/amy").await);
}

/// The controller keeps what it has seen for one reader, and shows it to others who see the same.
#[tokio::test]
async fn what_was_seen_for_one_reader_is_shown_to_nobody_who_may_not_see_it() {
    let site = Site::up().await;
    fill(&site).await;
    let ann = site.cookie("acme/ann").await;
    let page = wait_for("her job", async || {
        let page = site.get(&ann, "/jobs").await.body;
        page.contains("topsecret2-0001").then_some(page)
    })
    .await;
    let mut stream = Stream::open(&site, &ann, "/live?of=/jobs").await;
    stream.until_states(1).await;
    let mut told: Vec<String> = stream
        .text
        .lines()
        .filter_map(|line| Some(line.strip_prefix("data: ")?.to_owned()))
        .collect();
    told.push(attribute(&page, "data-state").to_owned());
    for of in ["acme/ann", "blue/bob", "acme/amy"] {
        let cookie = site.cookie(of).await;
        for state in &told {
            let headers = [("cookie", cookie.as_str()), ("perigee-state", state.as_str())];
            let said = send(&site.address, "GET", "/jobs", &headers, "").await;
            assert_eq!(said.status, 200, "{said:?}");
            assert_eq!(said.body.contains("topsecret"), of == "acme/ann", "{of}: {said:?}");
            assert!(said.body.contains(&format!("<span>{of}</span>")), "{said:?}");
        }
    }
}

#[tokio::test]
async fn an_open_page_is_told_when_what_it_shows_has_changed() {
    let site = Site::up().await;
    site.tenants.share_debian().await;
    let cookie = site.cookie("acme/amy").await;
    let page = site.get(&cookie, "/jobs").await;
    assert!(page.body.contains("data-live=\"/live?of=/jobs\""), "{page:?}");
    let mut stream = Stream::open(&site, &cookie, "/live?of=/jobs").await;
    stream.until_states(1).await;
    assert!(
        stream.text.to_lowercase().contains("content-type: text/event-stream"),
        "{}",
        stream.text
    );
    let state = attribute(&page.body, "data-state");
    assert!(stream.text.contains(state), "the page is as fresh as that");
    let _: Job = site.tenants.amy.post("/v1/jobs", &small("q")).await.expect("a job");
    stream.until_states(2).await;
}

#[tokio::test]
async fn an_open_page_is_told_that_this_controller_does_not_command_any_more() {
    let site = Site::up().await;
    let cookie = site.cookie("acme/amy").await;
    let mut stream = Stream::open(&site, &cookie, "/live?of=/jobs").await;
    stream.until_states(1).await;
    site.tenants.lab.cluster.claim.refuse(Refusal { by: 9, why: "there is another".to_owned() });
    stream.until_states(2).await;
}

#[tokio::test]
async fn a_stream_ends_when_its_reader_may_not_read_any_more() {
    let site = Site::up().await;
    let made = make_token(&site.tenants.admin, "acme/amy").await;
    let cookie = format!("__Host-perigee={}", made.token);
    let mut stream = Stream::open(&site, &cookie, "/live?of=/vms").await;
    stream.until_states(1).await;
    let path = format!("/v1/tenants/acme/users/amy/tokens/{}", made.id);
    site.tenants.admin.delete(&path).await.expect("revoked");
    let mut rest = Vec::new();
    let ended = tokio::time::timeout(PATIENCE, stream.stream.read_to_end(&mut rest)).await;
    ended.expect("it ends").expect("without an error");
}

#[tokio::test]
async fn too_many_open_pages_are_refused_with_the_limit() {
    let site = Site::up().await;
    let cookie = site.cookie("acme/amy").await;
    let mut streams = Vec::new();
    for _ in 0..perigee_model::limits::LIVE_PAGES_OF_ONE.max {
        let mut stream = Stream::open(&site, &cookie, "/live?of=/sites").await;
        stream.until_states(1).await;
        streams.push(stream);
    }
    let refused = site.get(&cookie, "/live?of=/sites").await;
    assert_eq!(refused.status, 503);
    assert!(refused.body.contains("number of pages that are kept fresh is 21"), "{refused:?}");
    // Another user has a place, and so has this one when a page is closed.
    let other = site.cookie("acme/ann").await;
    Stream::open(&site, &other, "/live?of=/sites").await.until_states(1).await;
    streams.pop();
    wait_for("a free place", async || {
        let mut stream = Stream::open(&site, &cookie, "/live?of=/sites").await;
        stream.until("an answer", |text| text.contains("\r\n\r\n")).await;
        stream.text.starts_with("HTTP/1.1 200").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_jobs_log_is_on_its_page_and_goes_on_while_the_page_is_open() {
    let site = Site::up().await;
    site.tenants.share_debian().await;
    let amy = &site.tenants.amy;
    let asked = JobSpec { start: spec(Access::Read).start, ..small("q") };
    let job: Job = amy.post("/v1/jobs", &asked).await.expect("a job");
    let (vm, home) = (vm_of(&job.id), &site.tenants.lab.home);
    site.tenants.lab.wait_for_vm(home, &vm).await;
    home.say(&vm, GuestBody::Started);
    home.say(&vm, GuestBody::log(LogStream::Stdout, "the <first> line"));
    let cookie = site.cookie("acme/amy").await;
    let path = "/jobs/q-0001";
    wait_for("the first line", async || {
        site.get(&cookie, path).await.body.contains("the &#60;first&#62; line").then_some(())
    })
    .await;
    let page = site.get(&cookie, path).await.body;
    let live = format!("{}&{}", attribute(&page, "data-live"), attribute(&page, "data-log"));
    let have = [("cookie", cookie.as_str()), ("perigee-without-log", "1")];
    let rest = send(&site.address, "GET", path, &have, "").await.body;
    assert!(
        rest.contains("data-keep=\"log\"") && !rest.contains("first"),
        "it is not read: {rest}"
    );
    let mut stream = Stream::open(&site, &cookie, &live.replace("&#38;", "&")).await;
    stream.until_states(1).await;
    home.say(&vm, GuestBody::log(LogStream::Stderr, "the second line"));
    stream.until("the second line", |text| text.contains("the second line")).await;
    assert!(!stream.text.contains("<first>"), "it is told once: {}", stream.text);
    assert!(stream.text.contains("\"is_error\":true"), "{}", stream.text);
    finish(home, home, &vm);
    stream.until("the end", |text| text.contains("event: end")).await;
    let ended = site.get(&cookie, path).await.body;
    assert!(!ended.contains("data-log=") && ended.contains("/output.tar"), "{ended}");
    let tar = site.get(&cookie, "/jobs/q-0001/output.tar").await;
    assert_eq!(tar.status, 200);
    assert!(
        tar.header("content-disposition").is_some_and(|d| d.contains("acme~q-0001.tar")),
        "{}",
        tar.head
    );
}

/// A guest says more than lines: the last line may be far before the last message.
#[tokio::test]
async fn the_end_of_a_log_is_shown_wherever_its_lines_are() {
    let site = Site::up().await;
    site.tenants.share_debian().await;
    let asked = JobSpec { start: spec(Access::Read).start, ..small("q") };
    let job: Job = site.tenants.amy.post("/v1/jobs", &asked).await.expect("a job");
    let (vm, home) = (vm_of(&job.id), &site.tenants.lab.home);
    site.tenants.lab.wait_for_vm(home, &vm).await;
    home.say(&vm, GuestBody::Started);
    for number in 0..1700 {
        home.say(&vm, GuestBody::log(LogStream::Stdout, format!("line {number}.")));
    }
    let cookie = site.cookie("acme/amy").await;
    let page = async || site.get(&cookie, "/jobs/q-0001").await.body;
    let lines = wait_for("the last line", async || {
        Some(page().await).filter(|page| page.contains("line 1699."))
    })
    .await;
    assert!(lines.contains("The last 500 lines") && lines.contains("line 1200."), "{lines}");
    assert!(!lines.contains("line 1199."), "{lines}");
    for number in 0..2000 {
        home.say(&vm, GuestBody::Progress { done: number, total: 2000, label: String::new() });
    }
    wait_for("the last message", async || page().await.contains("1999 of 2000").then_some(()))
        .await;
    let same = page().await;
    assert!(same.contains("line 1200.") && same.contains("line 1699."), "{same}");
}

#[tokio::test]
async fn a_host_is_drained_and_the_drain_called_off_on_its_page() {
    let site = Site::up().await;
    let address = serve(&site.tenants, Peer::Local).await;
    let ask = async |method: &str, path: &str| send(&address, method, path, &[], "").await;
    let question = ask("GET", "/hosts/home1/drain").await;
    assert!(question.body.contains("perigee host drain home1"), "{question:?}");
    assert_eq!(ask("POST", "/hosts/home1/drain").await.status, 303);
    let page = ask("GET", "/hosts/home1").await;
    assert!(page.body.contains("/hosts/home1/undrain"), "{page:?}");
    assert_eq!(ask("POST", "/hosts/home1/undrain").await.status, 303);
    assert!(ask("GET", "/hosts/home1").await.body.contains("/hosts/home1/drain"));
    assert_eq!(ask("GET", "/hosts/none").await.status, 404);
}
