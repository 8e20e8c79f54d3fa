//! Looks at the system's clock, and says when it was set by much.
//!
//! Ages count from what was seen to pass ([`perigee_http::Clock`]), so a clock that is set deletes nothing. Tokens and certificates go by the
//! system's clock all the same: their end means that moment for whoever has made them, and the refusal says so.

use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_http::clock::{ClockRecord, Jump};
use perigee_model::Problem;

use crate::clock::{CLOCK, in_words};
use crate::cluster::Cluster;
use crate::cluster::tasks::Task;

const LOOK_EVERY: Duration = Duration::from_secs(2);

/// So much of what was seen to pass is lost at most if the machine stops: what is to be deleted is deleted later by that.
const STORE_EVERY: Duration = Duration::from_secs(60);

/// It does not end.
pub async fn watch(cluster: Arc<Cluster>, task: Task) {
    let (mut jumps, mut stored) = (cluster.clock.seen().jumps, Instant::now());
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let seen = cluster.clock.seen();
        let is_new = seen.jumps != jumps;
        if let Some(jump) = seen.last_jump.filter(|_| is_new) {
            tell(&cluster, jump);
        }
        if is_new || stored.elapsed() >= STORE_EVERY {
            let store = async {
                store(&cluster, &seen).await?;
                (jumps, stored) = (seen.jumps, Instant::now());
                Ok("stored what was seen of the clock".to_owned())
            };
            task.round(store).await;
        }
    }
}

async fn store(cluster: &Cluster, seen: &ClockRecord) -> Result<(), Problem> {
    cluster.records.put(CLOCK, seen).await
}

fn tell(cluster: &Cluster, jump: Jump) {
    tracing::warn!(
        "{}: nothing is deleted because of that; while the clock is wrong, tokens and certificates may be refused",
        in_words(jump)
    );
    // One that was made while the clock was wrong does not count for the hosts.
    if let Err(problem) = cluster.traffic.renew(&cluster.authority, &cluster.network) {
        tracing::error!(%problem, "the controller can't renew its own certificate");
    }
}
