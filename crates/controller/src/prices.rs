//! Reads the file with the prices again when it changes.

use std::sync::Arc;

use crate::cluster::Cluster;
use crate::cluster::tasks::Task;

/// The endless task that reads the file with the prices. While the file is broken the task says why.
pub async fn keep(cluster: Arc<Cluster>, task: Task) {
    loop {
        task.round(async {
            let is_new = cluster.prices.read_again().await?;
            if is_new {
                // A job may wait for other prices.
                cluster.index.changed.notify_one();
            }
            Ok(if is_new { "read new prices" } else { "found nothing new" }.to_owned())
        })
        .await;
        tokio::time::sleep(cluster.timing.monitor).await;
    }
}
