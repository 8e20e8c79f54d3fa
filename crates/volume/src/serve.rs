//! The volume server as a process: it opens the pool, listens, and shuts down cleanly.

use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _, try_join_all};
use perigee_block::stats::StatsTable;
use perigee_http::terms::{Terms, obey};
use perigee_http::{Listen, notify};
use perigee_iscsi::Target;
use perigee_iscsi::access::ClientFile;
use perigee_model::Problem;
use perigee_nbd::server::{Listener, Server};
use perigee_nbd::{ServerOptions, ServerTls};
use perigee_store::{Pool, PoolConfig};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::backups::source;
use crate::control::{self, Control};
use crate::exports::{self, Here, PoolExports};
use crate::iscsi_clients::{Kept, KnownClients};
use crate::measure::Measuring;
use crate::remotes::{RemoteOptions, Remotes};
use crate::sources::Sources;
use crate::vm_sockets::VmSockets;

/// Connections that are not drained within this time are closed. Their clients reconnect to the next server.
const DRAIN_MAX: Duration = Duration::from_secs(10);

/// The pause before background work that panicked is started again.
const AFTER_PANIC: Duration = Duration::from_secs(10);

/// The configuration of a volume server.
#[derive(Debug, Clone)]
pub struct Config {
    /// The pool's directory. It is created if it does not exist.
    pub pool: PathBuf,
    /// A directory for the volumes' own data; by default the pool's.
    pub private: Option<PathBuf>,
    /// Where NBD clients connect.
    pub nbd: Vec<Listen>,
    /// The limits of NBD clients, and how they prove who they are.
    pub clients: ServerOptions,
    /// The iSCSI target.
    pub iscsi: IscsiOptions,
    /// How other hosts are reached.
    pub remotes: RemoteOptions,
    /// The addresses of the control API; may be empty.
    pub control: Vec<Listen>,
    /// Directories from which everybody who reaches the control API may make images.
    pub image_dirs: Vec<PathBuf>,
    /// The directory of the VMs' NBD sockets. It is made when the first VM needs one.
    pub vm_sockets: PathBuf,
    /// The file with the id of this boot: [`perigee_http::boot_id`].
    pub boot_id: PathBuf,
}

impl Config {
    /// The cluster's certificates, unless there are others for NBD.
    fn nbd_options(&self) -> ServerOptions {
        let cluster = || self.remotes.network.identity().cloned().map(ServerTls::Cluster);
        let tls = self.clients.tls.clone().or_else(cluster);
        ServerOptions { tls, ..self.clients.clone() }
    }
}

/// The options about iSCSI.
#[derive(Debug, Clone, Default)]
pub struct IscsiOptions {
    /// Addresses `HOST:PORT`. If this is empty, there is no target.
    pub listen: Vec<String>,
    /// The file that says which initiator may use which volume, in addition to the pool's clients. See
    /// [`perigee_iscsi::access`].
    pub clients: Option<PathBuf>,
}

impl IscsiOptions {
    fn known_clients(&self, pool: &Arc<Pool>, in_cluster: bool) -> Result<KnownClients, Problem> {
        let file = self.clients.as_deref().map(ClientFile::new).transpose()?;
        Ok(KnownClients { in_cluster, file, pool: Arc::clone(pool) })
    }
}

/// Runs a volume server until SIGTERM or SIGINT. Every volume is flushed when it returns. The future is
/// boxed, so that its code is compiled only in this crate, and with this crate's optimisation.
///
/// # Errors
/// `Conflict` when the pool is open elsewhere or an address is taken; `Internal` when a volume
/// could not be flushed at the end.
pub fn serve(config: Config) -> BoxFuture<'static, Result<(), Problem>> {
    async { serve_until(config, perigee_http::stopped()?).await }.boxed()
}

/// As [`serve`], until `stop` ends.
///
/// # Errors
/// As [`serve`].
pub fn serve_until(
    config: Config,
    stop: BoxFuture<'static, ()>,
) -> BoxFuture<'static, Result<(), Problem>> {
    run(config, stop).boxed()
}

async fn run(config: Config, stopped: BoxFuture<'static, ()>) -> Result<(), Problem> {
    perigee_http::prepare_daemon();
    perigee_http::private_directory(&config.pool)?;
    let remotes = Remotes::load(&config.remotes)?;
    let pool = Pool::open(PoolConfig {
        private: config.private.clone(),
        dir: config.pool.clone(),
        connect: source::connector(remotes.connector()),
    })
    .await?;
    let stats = Arc::new(StatsTable::default());
    let server_id = exports::server_id(&config.pool)?;
    let here = Here { server_id, boot: perigee_http::boot_id(&config.boot_id) };
    let exports = PoolExports::new(pool.clone(), stats.clone(), here, remotes.clone());
    exports.sites.set(pool.sites().await?);
    exports.know_attached_before().await?;
    let server = Server::new(exports.clone(), config.nbd_options())?;
    let listeners = try_join_all(config.nbd.iter().map(Listener::bind)).await?;
    let portals = config.iscsi.listen.iter().map(|address| perigee_iscsi::Listener::bind(address));
    let portals = try_join_all(portals).await?;
    let target = target(&config, &pool, &exports).await?;
    let stop = CancellationToken::new();
    let vm_sockets =
        Arc::new(VmSockets::load(config.vm_sockets.clone(), server_id, server.clone()).await?);
    let measuring =
        Measuring::new(pool.clone(), exports.clone(), server.clone(), config.pool.clone());
    let nbd = tokio::spawn(server.serve(listeners, stop.clone()));
    let iscsi = tokio::spawn(target.serve(portals, stop.clone()));
    let sources = Arc::new(Sources::new(&config.image_dirs, &config.pool)?);
    let background = background(&config, &pool, &sources);
    let control = Control {
        pool: pool.clone(),
        exports,
        stats: stats.clone(),
        remotes,
        vm_sockets: Some(vm_sockets.clone()),
        sources,
        measuring: Some(measuring),
    };
    let network = &config.remotes.network;
    let terms = Terms::open(&config.pool, network);
    let router = obey(control::router(Arc::new(control)), terms);
    let api = perigee_http::bind(router, &config.control, network).await;
    let api = async { api?.serve().await };
    let ready = async {
        notify::ready(&format!("serves the pool {}", config.pool.display()));
        tracing::info!(pool = %config.pool.display(), nbd = addresses(&config.nbd), iscsi = config.iscsi.listen.join(","), control = addresses(&config.control), "ready");
        std::future::pending().await
    };
    // In this order, so that the log says that the server is ready only if the API is bound.
    let ended = tokio::select! {
        biased;
        failed = api, if !config.control.is_empty() => failed,
        () = ready => Ok(()),
        () = network.follow() => Ok(()),
        () = stopped => Ok(()),
    };
    tracing::info!("stopping");
    background.iter().for_each(JoinHandle::abort);
    pool.stop_work();
    stop.cancel();
    drain(nbd, iscsi, &vm_sockets).await;
    if let Ok(trace) = stats.stop_trace() {
        tracing::info!(file = %trace.file.display(), requests = trace.requests, "ended the trace");
    }
    pool.flush().await?;
    ended
}

/// The iSCSI target, which may listen nowhere.
async fn target(
    config: &Config,
    pool: &Arc<Pool>,
    exports: &Arc<PoolExports>,
) -> Result<Target, Problem> {
    let known = config.iscsi.known_clients(pool, config.remotes.network.identity().is_some())?;
    if !config.iscsi.listen.is_empty()
        && let Some(warning) = known.warning().await?
    {
        tracing::warn!("{warning}");
    }
    Ok(Target::new(perigee_iscsi::Options {
        exports: exports.clone(),
        clients: Arc::new(known),
        keep: Arc::new(Kept(pool.clone())),
        sessions_max: config.clients.clients_max,
    }))
}

/// What goes on as long as the server runs, without being asked to.
fn background(config: &Config, pool: &Arc<Pool>, sources: &Arc<Sources>) -> [JoinHandle<()>; 4] {
    let (kept, filled, swept) = (pool.clone(), pool.clone(), pool.clone());
    let (uploads, bytes_per_s) = (sources.clone(), config.remotes.fill_bytes_per_s);
    [
        keep_running("the keeper of layers", move || kept.clone().keep()),
        keep_running("the completing of copies", move || filled.clone().fill_copies(bytes_per_s)),
        keep_running("the removal of used clones", move || {
            swept.clone().keep_dropping_spent_clones()
        }),
        keep_running("the removal of old uploads", move || uploads.clone().keep_removing_old()),
    ]
}

/// Waits until the connections, which were told to end, have ended; after [`DRAIN_MAX`] it cuts them.
async fn drain(nbd: JoinHandle<()>, iscsi: JoinHandle<()>, vm_sockets: &VmSockets) {
    let (cut_nbd, cut_iscsi) = (nbd.abort_handle(), iscsi.abort_handle());
    let drained = futures_util::future::join3(nbd, iscsi, vm_sockets.drain());
    if tokio::time::timeout(DRAIN_MAX, drained).await.is_err() {
        tracing::warn!("some connections did not end in time; closing them");
        cut_nbd.abort();
        cut_iscsi.abort();
    }
}

/// Runs work that has no end in a task of its own, and starts it again after a panic.
fn keep_running<F>(name: &'static str, work: impl Fn() -> F + Send + 'static) -> JoinHandle<()>
where
    F: Future<Output = ()> + Send + 'static,
{
    tokio::spawn(async move {
        while AssertUnwindSafe(work()).catch_unwind().await.is_err() {
            tracing::error!("{name} panicked; it is started again in {AFTER_PANIC:?}");
            tokio::time::sleep(AFTER_PANIC).await;
        }
    })
}

fn addresses(listen: &[Listen]) -> String {
    listen.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn background_work_is_started_again_after_a_panic() {
        let starts = Arc::new(AtomicU32::new(0));
        let (counted, running) = (Arc::clone(&starts), Arc::new(tokio::sync::Notify::new()));
        let runs = Arc::clone(&running);
        let work = keep_running("a task", move || {
            let (first, runs) = (counted.fetch_add(1, Ordering::SeqCst) == 0, Arc::clone(&runs));
            async move {
                assert!(!first, "the first time");
                runs.notify_one();
                std::future::pending().await
            }
        });
        running.notified().await;
        assert_eq!(starts.load(Ordering::SeqCst), 2);
        work.abort();
    }
}
