//! Asks the home of a proxied volume which of its blocks are also in layers of this host's pool: a replica, an image
//! below the volume, or what a move has left. These blocks are read here, and only the others from the home.

use std::sync::Arc;
use std::time::Duration;

use perigee_model::VolumeName;
use perigee_store::Pool;

use crate::coherent::CachedVolume;

/// How long the home may take to answer.
const LEARN_MAX: Duration = Duration::from_secs(60);
/// How often the home is asked again, because a replica may have a newer point, or a layer may have become complete.
const LOOK_EVERY: Duration = Duration::from_secs(60);

/// Asks the home of a volume as soon as no answer is valid, and again every minute. Only one of a volume's sessions
/// does this at a time. Without an answer everything is read from the home.
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
                    tracing::info!(%volume, %nbd_addr, limit_s, "no answer in time: everything is read from the home");
                    None
                }
            };
            let told = common.as_ref().map(|common| (common.layer(), common.changed_bytes()));
            if cached.learned(number, common)
                && let Some((layer, changed_bytes)) = told
            {
                tracing::info!(%volume, %layer, changed_bytes, "what has not changed is read from this layer here");
            }
        }
        let _late = tokio::time::timeout(LOOK_EVERY, cached.unlearned.notified()).await;
    }
}
