//! A pool without a volume server: the same control API, in the caller's process, for as long as
//! one command needs it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use perigee_block::stats::StatsTable;
use perigee_http::{Listen, bind_unix, cannot_listen};
use perigee_model::Problem;
use perigee_store::{Pool, PoolConfig};
use tokio::task::JoinHandle;

use crate::control::{self, Control};
use crate::exports::{self, PoolExports};
use crate::remotes::{RemoteOptions, Remotes};

/// Holds the pool open until it is dropped.
pub struct Offline {
    socket: PathBuf,
    server: JoinHandle<std::io::Result<()>>,
}

impl Offline {
    /// Opens the pool that is in a directory. It changes nothing by itself: files that nothing
    /// needs stay for the next volume server to remove.
    ///
    /// # Errors
    /// Not found when there is no pool; a conflict when another process has it open.
    pub async fn open(dir: &Path) -> Result<Self, Problem> {
        if !dir.join("catalog.sqlite").exists() {
            let what = format!("can't open the pool {}", dir.display());
            return Err(Problem::not_found(what, "there is no pool in this directory")
                .next(format!("make one: perigee pool create --pool {}", dir.display())));
        }
        Self::open_or_make(dir).await
    }

    /// As [`Self::open`], and makes the pool if there is none.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn open_or_make(dir: &Path) -> Result<Self, Problem> {
        let remotes = Remotes::load(&RemoteOptions::default())?;
        let connect = remotes.connector();
        let config = PoolConfig { private: None, dir: dir.to_owned(), connect };
        let pool = Pool::open_as_is(config).await?;
        let stats = Arc::new(StatsTable::default());
        let id = exports::server_id(dir)?;
        let exports = Arc::new(PoolExports::new(pool.clone(), stats.clone(), id, remotes.clone()));
        let router = control::router(Arc::new(Control { pool, exports, stats, remotes }));
        // A name of its own: whoever finds the server's socket expects the server there.
        let socket = dir.join(format!("command-{}.sock", std::process::id()));
        let listener = bind_unix(&socket)
            .await
            .map_err(|error| cannot_listen("listen on", &Listen::Unix(socket.clone()), &error))?;
        let server = tokio::spawn(async move { axum::serve(listener, router).await });
        Ok(Self { socket, server })
    }

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
