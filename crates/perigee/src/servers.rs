//! Where a command's requests go: to the controller, to a pool's volume server, or to a pool that this process opens itself.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::unistd::AccessFlags;
use perigee_http::{Client, Expected, Identity, Network, PeerIdentity};
use perigee_model::Problem;
use perigee_volume::Offline;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use crate::context::Context;
use crate::kept_login;
use crate::output::{self, Column};

/// A client of the controller. Its errors say how to start a controller or name another one.
pub fn controller_client(context: &Context) -> Result<Client, Problem> {
    controller_client_within(context, Duration::from_secs(120))
}

/// For a request whose answer may take this long.
pub fn controller_client_within(context: &Context, wait: Duration) -> Result<Client, Problem> {
    if let Some(kept) = kept_login::kept(context)? {
        let hint = format!(
            "you are logged in at {}: ask whoever runs it whether it is up, or log out (perigee logout) to use another one",
            kept.url()
        );
        return Ok(kept.client(wait)?.hint(hint));
    }
    let api = api(context);
    if let Some(path) = api.strip_prefix("unix:") {
        check_socket(path)?;
    }
    if api.starts_with("https://") {
        let network = Network::Tls(Identity::load(&context.operator).map_err(|problem| {
            problem.next("log in with a token: perigee login; or make a certificate at the controller: perigee controller operator DIR, and name it with --operator")
        })?);
        let expected = Expected::Identity(PeerIdentity::Controller);
        let hint = format!(
            "check that the controller runs and listens at {api}, or name another one with --api or PERIGEE_API"
        );
        return Ok(network.client(&api, expected, wait)?.hint(hint));
    }
    Ok(Client::new(&api, wait)?.hint(NO_CONTROLLER))
}

/// Whether this user may use the controller's socket.
fn check_socket(path: &str) -> Result<(), Problem> {
    let what = "can't reach the controller";
    match nix::unistd::access(path, AccessFlags::W_OK) {
        Err(Errno::ENOENT) => {
            let why = format!("the socket {path} does not exist");
            Err(Problem::unavailable(what, why).next(NO_CONTROLLER))
        }
        Err(Errno::EACCES) => {
            let why = format!("this user may not use the socket {path}");
            Err(Problem::forbidden(what, why).next(
                "log in with a token that an admin has made for you (perigee login), or be root or the controller's own user",
            ))
        }
        // Whoever connects is told the rest.
        _ => Ok(()),
    }
}

/// The controller's address for those who have not logged in.
pub fn api(context: &Context) -> String {
    context.api.clone().unwrap_or_else(|| "unix:/run/perigee/controller.sock".to_owned())
}

const NO_CONTROLLER: &str = "start one (perigee dev, perigee controller run, or perigee lab up), or name it with --api or PERIGEE_API";

/// A client of the controller, of a pool's volume server, or of a pool that this process has opened itself.
pub struct Server {
    client: Client,
    /// Keeps the pool open while the client is in use.
    _offline: Option<Offline>,
}

impl std::ops::Deref for Server {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl From<Client> for Server {
    fn from(client: Client) -> Self {
        Self { client, _offline: None }
    }
}

/// A client of the pool's volume server. If none runs, this process opens the pool itself.
pub async fn pool_server(pool: &Path) -> Result<Server, Problem> {
    let client = |socket: &Path| {
        Client::new(&format!("unix:{}", socket.display()), Duration::from_secs(3600))
    };
    let socket = pool.join(CONTROL_SOCKET);
    if UnixStream::connect(&socket).await.is_ok() {
        return Ok(client(&socket)?.into());
    }
    let offline = Offline::open(pool).await?;
    Ok(Server { client: client(offline.socket())?, _offline: Some(offline) })
}

/// The default socket of a volume server's control API, in the pool's directory.
pub const CONTROL_SOCKET: &str = "control.sock";

/// The option of commands that also work without a controller.
#[derive(Debug, clap::Args)]
pub struct PoolOption {
    /// Use this pool instead of a controller, through its volume server if one runs
    #[arg(long, value_name = "DIR")]
    pub pool: Option<PathBuf>,
}

/// A client of the pool's server if a pool is given, else of the controller.
pub async fn server(context: &Context, pool: PoolOption) -> Result<Server, Problem> {
    match pool.pool {
        Some(pool) => pool_server(&pool).await,
        None => Ok(controller_client(context)?.into()),
    }
}

/// Lists what a pool has, or without a pool what the cluster has.
pub async fn list<L, C>(
    context: &Context,
    pool: PoolOption,
    path: &str,
    local: &[Column<L>],
    cluster: &[Column<C>],
) -> Result<(), Problem>
where
    L: Serialize + DeserializeOwned,
    C: Serialize + DeserializeOwned,
{
    match pool.pool {
        Some(pool) => {
            let all: Vec<L> = pool_server(&pool).await?.get(path).await?;
            output::list(context.format, &all, local)
        }
        None => {
            let all: Vec<C> = controller_client(context)?.get(path).await?;
            output::list(context.format, &all, cluster)
        }
    }
}

/// Shows one thing of a pool, or without a pool one of the cluster.
pub async fn info<L, C>(
    context: &Context,
    pool: PoolOption,
    path: &str,
    local: &[Column<L>],
    cluster: &[Column<C>],
) -> Result<(), Problem>
where
    L: Serialize + DeserializeOwned,
    C: Serialize + DeserializeOwned,
{
    match pool.pool {
        Some(pool) => {
            let found: L = pool_server(&pool).await?.get(path).await?;
            output::one(context.format, &found, local)
        }
        None => {
            let found: C = controller_client(context)?.get(path).await?;
            output::one(context.format, &found, cluster)
        }
    }
}
