//! A pool without a volume server: one command runs the same control API in its own process.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::Extension;
use perigee_block::stats::StatsTable;
use perigee_http::{ClientAddress, Listen, Peer, bind_unix, cannot_listen};
use perigee_model::Problem;
use perigee_store::{Pool, PoolConfig};
use tokio::task::JoinHandle;

use crate::backups::source;
use crate::control::{self, Control};
use crate::exports::{self, Here, PoolExports};
use crate::remotes::{RemoteOptions, Remotes};
use crate::sources::Sources;

/// Keeps the pool open until it is dropped.
pub struct Offline {
    socket: PathBuf,
    server: JoinHandle<std::io::Result<()>>,
}

impl Offline {
    /// Opens the pool in a directory. This changes nothing: unneeded files stay until the next volume server
    /// removes them.
    ///
    /// # Errors
    /// Not found when the directory has no pool; a conflict when another process has it open.
    pub async fn open(dir: &Path) -> Result<Self, Problem> {
        if !dir.join("catalog.sqlite").exists() {
            let what = format!("can't open the pool {}", dir.display());
            return Err(Problem::not_found(what, "the directory has no pool")
                .next(format!("create one: perigee pool create --pool {}", dir.display())));
        }
        Self::open_or_make(dir).await
    }

    /// As [`Self::open`], but creates the pool if it does not exist.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn open_or_make(dir: &Path) -> Result<Self, Problem> {
        // What this process makes in the pool is closed to other users, as a server's files are.
        perigee_http::prepare_daemon();
        let remotes = Remotes::load(&RemoteOptions::default())?;
        let connect = source::connector(remotes.connector());
        let config = PoolConfig { private: None, dir: dir.to_owned(), connect };
        let pool = Pool::open_as_is(config).await?;
        let stats = Arc::new(StatsTable::default());
        let sources = Arc::new(Sources::new(&[], dir)?);
        // No other host reaches it, so nobody asks for its boot.
        let here = Here { server_id: exports::server_id(dir)?, boot: String::new() };
        let exports = PoolExports::new(pool.clone(), stats.clone(), here, remotes.clone());
        let router = control::router(Arc::new(Control {
            pool,
            exports,
            stats,
            remotes,
            vm_sockets: None,
            sources,
            measuring: None,
        }))
        .layer(Extension(ClientAddress(None)))
        .layer(Extension(Peer::Local));
        // Not the server's socket name, because other programs expect a volume server there.
        let socket = dir.join(format!("command-{}.sock", std::process::id()));
        let listener = bind_unix(&socket)
            .await
            .map_err(|error| cannot_listen("listen on", &Listen::Unix(socket.clone()), &error))?;
        let server = tokio::spawn(async move { axum::serve(listener, router).await });
        Ok(Self { socket, server })
    }

    /// The unix socket at which the API is, for as long as this lives.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Offline {
    fn drop(&mut self) {
        self.server.abort();
        if let Err(error) = std::fs::remove_file(&self.socket) {
            tracing::warn!(path = %self.socket.display(), %error, "can't remove the socket");
        }
    }
}
