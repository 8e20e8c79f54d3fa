//! A repository with two tenants behind all its doors, and clients for it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::IntoResponse;
use axum::routing::get;
use perigee_http::{Failure, Listen, Network, unused_port};
use perigee_model::Problem;
use perigee_repository::{Account, Accounts, Credential, Objects, Quota, Repository, sftp};
use tempfile::TempDir;

/// Something that a client waits for takes as long as the machine needs.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub fn account(tenant: &str) -> Account {
    Account {
        tenant: tenant.parse().expect("a name"),
        user: format!("{tenant}/tester"),
        may_write: true,
        is_admin: false,
        quota: Quota { bytes: 1 << 30, files: 1000 },
    }
}

/// The token of a user is `token-of-TENANT`.
fn by_token() -> BTreeMap<String, Account> {
    ["a", "b"].map(|tenant| (format!("token-of-{tenant}"), account(tenant))).into()
}

/// The users, as a cluster would have them: by their keys, and by their tokens.
pub struct Users {
    keys: Mutex<BTreeMap<String, Account>>,
    tokens: Mutex<BTreeMap<String, Account>>,
    /// Who did what, and whether it was done; and which logins were refused.
    log: Mutex<Vec<String>>,
}

impl Users {
    /// What was logged, in its order.
    pub fn log(&self) -> Vec<String> {
        self.log.lock().expect("a lock").clone()
    }

    /// Lets the owner of a public key in, in OpenSSH's form.
    pub fn allow_key(&self, key: &str, tenant: &str) {
        let words: Vec<&str> = key.split_whitespace().take(2).collect();
        self.keys.lock().expect("a lock").insert(words.join(" "), account(tenant));
    }

    /// No key and no token counts any more.
    pub fn forget_all(&self) {
        self.keys.lock().expect("a lock").clear();
        self.tokens.lock().expect("a lock").clear();
    }

    /// Changes what all may do.
    pub fn change(&self, change: impl Fn(&mut Account)) {
        self.keys.lock().expect("a lock").values_mut().for_each(&change);
        self.tokens.lock().expect("a lock").values_mut().for_each(change);
    }
}

impl Accounts for Users {
    fn by_token(&self, secret: &str) -> Option<Credential> {
        let tokens = self.tokens.lock().expect("a lock");
        tokens.contains_key(secret).then(|| Credential::Token(secret.to_owned()))
    }

    fn account(&self, credential: &Credential) -> Option<Account> {
        match credential {
            Credential::Token(token) => self.tokens.lock().expect("a lock").get(token).cloned(),
            Credential::Key { key, .. } => self.keys.lock().expect("a lock").get(key).cloned(),
        }
    }

    fn did(&self, account: &Account, what: &str, done: Result<(), &Problem>) {
        let how = done.map_or_else(|problem| problem.http_status(), |()| 200);
        self.log.lock().expect("a lock").push(format!("{} {what}: {how}", account.user));
    }

    fn refused(&self, _from: std::net::IpAddr, why: &str) {
        self.log.lock().expect("a lock").push(why.to_owned());
    }
}

/// A server in this process. It ends with the runtime of the test.
pub struct Server {
    pub dir: TempDir,
    pub http: String,
    pub sftp_port: u16,
    pub accounts: Arc<Users>,
}

impl Server {
    pub async fn start() -> Self {
        Self::start_in(tempfile::tempdir().expect("a directory"), None).await
    }

    /// It waits so long for who does not log in over SFTP.
    pub async fn start_that_waits(login_max: Duration) -> Self {
        Self::start_with(tempfile::tempdir().expect("a directory"), None, (login_max, PATIENCE))
            .await
    }

    /// It looks so often whether a connection's user is still one.
    pub async fn start_that_looks(every: Duration) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        Self::start_with(dir, None, (5 * every, every)).await
    }

    /// With the contents of files in a store, if one is given. What is in the directory already is served.
    pub async fn start_in(dir: TempDir, objects: Option<Arc<Objects>>) -> Self {
        Self::start_with(dir, objects, (sftp::LOGIN_MAX, PATIENCE)).await
    }

    async fn start_with(
        dir: TempDir,
        objects: Option<Arc<Objects>>,
        (login_max, look_every): (Duration, Duration),
    ) -> Self {
        let repository = Repository::open(&dir.path().join("data")).expect("a repository");
        objects.into_iter().for_each(|objects| repository.keep_in(objects));
        tokio::spawn(Arc::clone(&repository).tidy());
        let address = format!("127.0.0.1:{}", unused_port());
        let tokens = Mutex::new(by_token());
        let accounts = Arc::new(Users { keys: Mutex::default(), tokens, log: Mutex::default() });
        let router = perigee_repository::router(Arc::clone(&repository))
            .route("/v1/me", get(me))
            .layer(from_fn_with_state(Arc::clone(&accounts), admit));
        let listen = Listen::Tcp(address.clone());
        tokio::spawn(async move {
            perigee_http::serve(router, &[listen], &Network::Plain).await.expect("it serves");
        });
        wait_for(&address).await;
        let sftp_port = unused_port();
        let server = sftp::Server {
            address: format!("127.0.0.1:{sftp_port}"),
            key_file: dir.path().join("host-key"),
            repository,
            accounts: Arc::clone(&accounts) as Arc<dyn Accounts>,
            login_max,
            look_every,
        };
        let sftp_address = server.address.clone();
        tokio::spawn(async move { sftp::serve(server).await.expect("it serves") });
        wait_for(&sftp_address).await;
        Self { dir, http: format!("http://{address}"), sftp_port, accounts }
    }

    pub fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, content).expect("a file");
        path
    }

    /// A file in a tenant's tree, as it is on the disk.
    pub fn stored(&self, tenant: &str, path: &str) -> PathBuf {
        self.dir.path().join("data/tenants").join(tenant).join("tree").join(path)
    }
}

impl Server {
    /// Kills a client in the middle of an upload by a user of the tenant `a`: when some bytes of it have arrived.
    pub async fn cut_upload(&self, client: &mut tokio::process::Command, input: &str) {
        let parts = self.dir.path().join("data/tenants/a/parts");
        let arrived = || -> u64 {
            let parts = std::fs::read_dir(&parts).into_iter().flatten().flatten();
            parts.filter_map(|part| part.metadata().ok()).map(|part| part.len()).sum()
        };
        cut(client, input, "some bytes arrive", || arrived() > 0).await;
    }

    /// All bytes of a file have come from a user of the tenant `a`, but not that these are all.
    pub async fn cut_at_the_end(&self, at: &str, file: &Path) {
        let length = std::fs::metadata(file).expect("a file").len();
        let range = format!("Content-Range: bytes 0-{}/{}", length - 1, length + 1);
        let url = format!("{}/v1/data/a/{at}", self.http);
        let token = "Authorization: Bearer token-of-a";
        let all = ["-sS", "-f", "-H", token, "-H", &range, "-T", path(file), &url];
        assert!(run("curl", &all, "").await.status.success());
        assert!(!self.stored("a", at).exists(), "it is not whole");
    }
}

/// Kills a client in the middle of a download into a file: when some bytes of it have come, and not all that was sent.
pub async fn cut_download(
    client: &mut tokio::process::Command,
    input: &str,
    (got, sent): (&Path, &[u8]),
) {
    for _ in 0..20 {
        // What an earlier one has left.
        let _ = std::fs::remove_file(got);
        let come = || std::fs::metadata(got).map_or(0, |got| got.len());
        cut(client, input, "some bytes come", || come() > 0).await;
        if std::fs::read(got).expect("a part") != sent {
            return;
        }
        // On a busy machine all may come before anybody looks.
    }
    panic!("all of it came each time");
}

/// Kills a client when something is so, if it has not ended by then.
async fn cut(
    client: &mut tokio::process::Command,
    input: &str,
    what: &str,
    is_so: impl Fn() -> bool,
) {
    let client = client.stdin(Stdio::piped()).kill_on_drop(true).spawn();
    let mut client = client.expect("the client; `make setup` installs it");
    let mut stdin = client.stdin.take().expect("it has one");
    tokio::io::AsyncWriteExt::write_all(&mut stdin, input.as_bytes()).await.expect("it reads");
    drop(stdin);
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "not in time: {what}");
        let ended = client.try_wait().expect("its state");
        assert!(ended.is_none() || is_so(), "it ended by itself: {ended:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    client.kill().await.expect("a kill");
}

pub async fn wait_for(address: &str) {
    let until = Instant::now() + PATIENCE;
    while tokio::net::TcpStream::connect(address).await.is_err() {
        assert!(Instant::now() < until, "nobody listens on {address}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// As the controller says who asks.
async fn me(Extension(account): Extension<Account>) -> axum::Json<serde_json::Value> {
    axum::Json(serde_json::json!({
        "tenant": account.tenant, "user": account.user, "role": "member"
    }))
}

async fn admit(
    State(users): State<Arc<Users>>,
    mut request: Request,
    next: Next,
) -> axum::response::Response {
    let text = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    // A client of WebDAV sends it as the password of some user.
    let token = text.and_then(|text| match text {
        "Basic YW55OnRva2VuLW9mLWE=" => Some("token-of-a"),
        text => text.strip_prefix("Bearer "),
    });
    let credential = token.and_then(|token| users.by_token(token));
    match credential.and_then(|credential| users.account(&credential)) {
        Some(account) => {
            request.extensions_mut().insert(account);
            next.run(request).await
        }
        // Who can send a password waits until it is asked for.
        None if request.uri().path().starts_with("/dav") && text.is_none() => {
            (StatusCode::UNAUTHORIZED, [(WWW_AUTHENTICATE, "Basic realm=\"files\"")])
                .into_response()
        }
        None => Failure(Problem::forbidden("can't answer", "no token")).into_response(),
    }
}

/// Runs a program in a thread of its own. Its output is shown if a test fails.
pub async fn run(program: &str, arguments: &[&str], input: &str) -> Output {
    let (program, input) = (program.to_owned(), input.to_owned());
    let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
    let ran = tokio::task::spawn_blocking(move || {
        let mut child = Command::new(&program)
            .args(&arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .env("HOME", "/nonexistent")
            .spawn()
            .unwrap_or_else(|e| panic!("{program}: {e}; `make setup` installs it"));
        let mut stdin = child.stdin.take().expect("it has one");
        std::io::Write::write_all(&mut stdin, input.as_bytes()).expect("it reads");
        drop(stdin);
        child.wait_with_output().expect("it ends")
    });
    let output = ran.await.expect("a thread");
    eprintln!("{}{}", text(&output.stdout), text(&output.stderr));
    output
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub fn path(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Bytes that do not repeat soon.
pub fn content(length: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[0]
    };
    std::iter::repeat_with(next).take(length).collect()
}
