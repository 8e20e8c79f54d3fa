//! The volume server as a process: opens the pool, listens, and ends in order.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _, try_join_all};
use perigee_block::stats::StatsTable;
use perigee_http::Listen;
use perigee_iscsi::Target;
use perigee_iscsi::access::ClientFile;
use perigee_model::Problem;
use perigee_nbd::ServerOptions;
use perigee_nbd::server::{Listener, Server};
use perigee_store::{Pool, PoolConfig};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::control::{self, Control};
use crate::exports::{self, PoolExports};
use crate::iscsi_clients::{KeptReservations, KnownClients};
use crate::remotes::{RemoteOptions, Remotes};

/// Connections that are not drained by then are cut: their clients come back to the next server.
const DRAIN_MAX: Duration = Duration::from_secs(10);

/// What a volume server needs to know.
#[derive(Debug, Clone)]
pub struct Config {
    /// Made if it does not exist.
    pub pool: PathBuf,
    /// A directory for the volumes' own data, if not the pool's.
    pub private: Option<PathBuf>,
    pub nbd: Vec<Listen>,
    pub clients: ServerOptions,
    pub iscsi: IscsiOptions,
    pub remotes: RemoteOptions,
    /// The control API; may be empty.
    pub control: Vec<Listen>,
}

/// How a volume server meets iSCSI initiators.
#[derive(Debug, Clone, Default)]
pub struct IscsiOptions {
    /// `HOST:PORT`; empty: there is no target.
    pub listen: Vec<String>,
    /// Which initiator may use which volume, besides the clients that the pool has. See
    /// [`perigee_iscsi::access`].
    pub clients: Option<PathBuf>,
}

impl IscsiOptions {
    fn known_clients(&self, pool: &Arc<Pool>) -> Result<KnownClients, Problem> {
        let file = self.clients.as_deref().map(ClientFile::new).transpose()?;
        Ok(KnownClients { file, pool: Arc::clone(pool) })
    }
}

/// Runs a volume server until SIGTERM or SIGINT; every volume is flushed when it returns. The future is boxed: so all that it
/// runs is compiled in this crate, optimised like it, and not again in each caller.
///
/// # Errors
/// `Conflict` when the pool is open elsewhere or an address is taken; `Internal` when a volume
/// could not be flushed at the end.
pub fn serve(config: Config) -> BoxFuture<'static, Result<(), Problem>> {
    run(config).boxed()
}

async fn run(config: Config) -> Result<(), Problem> {
    perigee_http::allow_many_files();
    let mut terminate = on(SignalKind::terminate())?;
    let mut interrupt = on(SignalKind::interrupt())?;
    std::fs::create_dir_all(&config.pool).map_err(|error| {
        Problem::invalid(format!("can't make the pool {}", config.pool.display()), error)
    })?;
    let remotes = Remotes::load(&config.remotes)?;
    let pool = Pool::open(PoolConfig {
        private: config.private.clone(),
        dir: config.pool.clone(),
        connect: remotes.connector(),
    })
    .await?;
    let stats = Arc::new(StatsTable::default());
    let server_id = exports::server_id(&config.pool)?;
    let exports =
        Arc::new(PoolExports::new(pool.clone(), stats.clone(), server_id, remotes.clone()));
    let server = Server::new(exports.clone(), config.clients.clone())?;
    let listeners = try_join_all(config.nbd.iter().map(Listener::bind)).await?;
    let portals = config.iscsi.listen.iter().map(|address| perigee_iscsi::Listener::bind(address));
    let portals = try_join_all(portals).await?;
    let target = Target::new(perigee_iscsi::Options {
        exports: exports.clone(),
        clients: Arc::new(config.iscsi.known_clients(&pool)?),
        keep: Arc::new(KeptReservations(pool.clone())),
        pool: server_id,
        sessions_max: config.clients.clients_max,
    });
    let stop = CancellationToken::new();
    let nbd = tokio::spawn(server.serve(listeners, stop.clone()));
    let iscsi = tokio::spawn(target.serve(portals, stop.clone()));
    let background = [
        tokio::spawn(pool.clone().keep()),
        tokio::spawn(pool.clone().fill_copies(config.remotes.fill_bytes_per_s)),
        tokio::spawn(pool.clone().keep_dropping_spent_clones()),
    ];
    let control = Control { pool: pool.clone(), exports, stats: stats.clone(), remotes };
    let api = perigee_http::serve(control::router(Arc::new(control)), &config.control);
    let ready = async {
        tracing::info!(pool = %config.pool.display(), nbd = addresses(&config.nbd), iscsi = config.iscsi.listen.join(","), control = addresses(&config.control), "ready");
        std::future::pending().await
    };
    // In this order: the API is bound before the log says that the server is ready.
    let ended = tokio::select! {
        biased;
        failed = api, if !config.control.is_empty() => failed,
        () = ready => Ok(()),
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    };
    tracing::info!("stopping");
    background.iter().for_each(JoinHandle::abort);
    stop.cancel();
    let (cut_nbd, cut_iscsi) = (nbd.abort_handle(), iscsi.abort_handle());
    let drained = futures_util::future::join(nbd, iscsi);
    if tokio::time::timeout(DRAIN_MAX, drained).await.is_err() {
        tracing::warn!("some connections did not end in time; cutting them");
        cut_nbd.abort();
        cut_iscsi.abort();
    }
    if let Ok(trace) = stats.stop_trace() {
        tracing::info!(file = %trace.file.display(), requests = trace.requests, "ended the trace");
    }
    pool.flush().await?;
    ended
}

fn addresses(listen: &[Listen]) -> String {
    listen.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn on(kind: SignalKind) -> Result<Signal, Problem> {
    signal(kind).map_err(|error| Problem::internal("listen for signals", error))
}
