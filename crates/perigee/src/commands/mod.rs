//! The commands. Each noun has a file, whose enum `Verb` lists the noun's verbs.

pub mod agent;
mod asking;
pub mod boot;
pub mod check;
pub mod client;
pub mod cluster_network;
mod console;
pub mod controller;
pub mod data;
pub mod dev;
mod download;
mod exec;
mod faults;
mod guest_files;
pub mod host;
pub mod image;
mod inputs;
pub mod iscsi_clients;
pub mod job;
mod job_log;
mod join;
pub mod lab;
mod lasting;
pub mod login;
pub mod moving;
pub mod moving_jobs;
pub mod moving_volumes;
pub mod nbd_clients;
pub mod network;
pub mod planner;
pub mod pool;
mod public_keys;
pub mod remotes;
mod replicas;
pub mod soak;
mod ssh;
mod storm;
pub mod tenant;
pub mod top;
pub mod trace;
mod unknown;
pub mod user;
pub mod vm;
mod vnc;
pub mod volume;
pub mod wan;

use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::unistd::AccessFlags;
use perigee_http::{Client, Expected, Identity, Network, PeerIdentity};
use perigee_model::Problem;
use perigee_volume::Offline;
use tokio::net::UnixStream;

use crate::Context;

/// A client of the controller. Its errors say how to start a controller or name another one.
pub fn controller_client(context: &Context) -> Result<Client, Problem> {
    controller_client_within(context, Duration::from_secs(120))
}

/// For a request whose answer may take this long.
pub fn controller_client_within(context: &Context, wait: Duration) -> Result<Client, Problem> {
    if let Some(kept) = login::kept(context)? {
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
