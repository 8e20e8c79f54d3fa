//! Finds out which blocks of a proxied volume are also in layers of this host's pool: of a replica, of an image below
//! the volume, or of what a move has left. These are read here, and only the difference is read from the home.

use std::sync::Arc;
use std::time::Duration;

use perigee_model::VolumeName;
use perigee_store::Pool;

use crate::coherent::CachedVolume;

/// How long the home may take to tell.
const LEARN_MAX: Duration = Duration::from_secs(60);
/// How often it is asked again: a replica may have a newer point, or a layer has come since.
const LOOK_EVERY: Duration = Duration::from_secs(60);

/// Asks the home of a volume when nothing is known, and now and then. Only one of a volume's sessions does this at a
/// time. Until the home has told, and if it does not, everything is read there.
pub async fn keep(
    pool: Arc<Pool>,
    volume: VolumeName,
    nbd_addr: String,
    cached: Arc<CachedVolume>,
) {
    let _turn = cached.learning.lock().await;
    loop {
        if let Some((number, known)) = cached.learn() {
            let asked = pool.common_with(&volume, &nbd_addr, known);
            let common = match tokio::time::timeout(LEARN_MAX, asked).await {
                Ok(Ok(common)) => common,
                Ok(Err(problem)) => {
                    tracing::debug!(%volume, %problem, "everything is read from the home");
                    None
                }
                Err(_) => {
                    let limit_s = LEARN_MAX.as_secs();
                    tracing::info!(%volume, %nbd_addr, limit_s, "it was not told in time what is common");
                    None
                }
            };
            let told = common.as_ref().map(|common| (common.layer(), common.changed_bytes()));
            if cached.learned(number, common)
                && let Some((layer, changed_bytes)) = told
            {
                tracing::info!(%volume, %layer, changed_bytes, "read here, but for what has changed");
            }
        }
        let _late = tokio::time::timeout(LOOK_EVERY, cached.unlearned.notified()).await;
    }
}
