//! Sessions on a volume that has left the home which they know: that home says where it went.

use std::sync::Arc;
use std::time::Duration;

use crate::exports::PoolExports;
use crate::proxy::ProxySession;
use perigee_model::{Problem, VolumeName};

/// A volume does not move on so often while it is looked for; homes that name each other are told by this.
const HOPS_MAX: usize = 4;
/// A home that is named may not be ready yet.
const AGAIN_PAUSE: Duration = Duration::from_millis(300);

impl PoolExports {
    /// A session on an attached volume, wherever it is now. Where it went is recorded.
    pub(crate) async fn open_moving(
        &self,
        volume: &VolumeName,
        export: &str,
        nbd_addr: String,
    ) -> Result<Arc<ProxySession>, Problem> {
        let mut at = nbd_addr.clone();
        for _ in 0..HOPS_MAX {
            let key = self.new_key(volume, export);
            match self.try_open_proxy(volume, export, at.clone(), key, None).await? {
                Ok(device) => {
                    if at != nbd_addr {
                        tracing::info!(%volume, from = nbd_addr, to = at, "the volume has moved");
                        // It may have come here meanwhile. Then it is found here by who looks again.
                        self.pool.attach(volume, &at).await.map_err(|problem| {
                            Problem::unavailable(problem.what, problem.why).next("open it again")
                        })?;
                    }
                    return Ok(device);
                }
                Err(next) => at = next,
            }
        }
        let what = format!("can't open volume {volume} at {nbd_addr}");
        let why = format!("it was said to be elsewhere {HOPS_MAX} times, at last at {at}");
        Err(Problem::unavailable(what, why).next("attach it at its home"))
    }

    /// Follows the volume when the session's home says that it has moved.
    pub(crate) fn watch(&self, volume: &VolumeName, device: &Arc<ProxySession>) {
        let mut moves = device.upstream.moves();
        let (exports, volume, device) = (self.this.clone(), volume.clone(), Arc::downgrade(device));
        tokio::spawn(async move {
            while moves.changed().await.is_ok() {
                let Some(to) = moves.borrow_and_update().clone() else { continue };
                let Some(device) = device.upgrade() else { return };
                let (from, export) = (device.nbd_addr.clone(), device.export.clone());
                drop(device);
                let Some(exports) = exports.upgrade() else { return };
                if let Err(problem) = exports.follow(&volume, &export, &from, &to).await {
                    tracing::info!(%volume, to, %problem, "can't follow the volume yet");
                }
                drop(exports);
                tokio::time::sleep(AGAIN_PAUSE).await;
            }
        });
    }

    async fn follow(
        &self,
        volume: &VolumeName,
        export: &str,
        from: &str,
        to: &str,
    ) -> Result<(), Problem> {
        let attached = {
            // Not while it moves here.
            let _turn = self.turns.opening(volume).await?;
            self.attachment(volume).await?
        };
        let Some(attached) = attached else { return Ok(()) };
        if attached == from {
            let at = self.open_moving(volume, export, to.to_owned()).await?.nbd_addr.clone();
            self.pool.attach(volume, &at).await?;
        }
        self.repoint(volume).await
    }
}
