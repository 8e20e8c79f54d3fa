//! Homes that were lost, and are told that a replica has become the volume when they answer again.

use std::sync::Arc;

use perigee_model::home::{ServerAddresses, Tenure};
use perigee_model::job::HostState;
use perigee_model::replica::{Supersede, Superseded};
use perigee_model::{HostId, Problem, VolumeName};
use serde::{Deserialize, Serialize};

use super::promote;
use crate::cluster::Cluster;
use crate::given_up;

const PREFIX: &str = "superseded/";

/// What a lost home is to be told. It is kept until the host has answered, also while the host is removed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SupersededVolume {
    pub volume: VolumeName,
    pub host: HostId,
    pub lost: Tenure,
    pub tenure: Tenure,
    pub to: HostId,
}

impl SupersededVolume {
    fn key(&self) -> String {
        format!("{PREFIX}{}/{}/{}", self.host, self.volume, self.lost.incarnation())
    }
}

pub(super) async fn keep(cluster: &Cluster, what: &SupersededVolume) -> Result<(), Problem> {
    cluster.records.put(&what.key(), what).await
}

/// Tells the host. From its answer on it has the volume no more.
pub(super) async fn tell(cluster: &Cluster, what: &SupersededVolume) -> Result<(), Problem> {
    let SupersededVolume { volume, host, lost, tenure, to } = what;
    let (link, to) = (cluster.hosts.get(host)?, cluster.hosts.get(to)?);
    let addresses = ServerAddresses {
        nbd_addr: to.addresses.nbd_addr.clone(),
        control_url: to.addresses.volume_url.clone(),
    };
    let ask = Supersede { lost: *lost, tenure: *tenure, to: addresses };
    let path = format!("/v1/volumes/{volume}/supersede");
    let done: Superseded = link.volume.post(&path, &ask).await?;
    if let Some(image) = done.image {
        tracing::warn!("what {host} had of volume {volume} is image {image} there");
    }
    given_up::found_again(cluster, host, volume).await?;
    cluster.records.remove(&what.key()).await
}

/// Tells lost homes that are back, and goes on with promotions. This runs until the controller ends.
pub async fn run(cluster: Arc<Cluster>) {
    loop {
        if let Err(problem) = tell_all(&cluster).await {
            tracing::warn!("can't tell hosts of promoted volumes: {problem}");
        }
        if let Err(problem) = promote::resume(&cluster).await {
            tracing::warn!("can't go on with promotions: {problem}");
        }
        tokio::time::sleep(cluster.timing.monitor).await;
    }
}

async fn tell_all(cluster: &Cluster) -> Result<(), Problem> {
    for what in cluster.records.list::<SupersededVolume>(PREFIX).await? {
        if cluster.hosts.get(&what.host).is_err()
            || cluster.hosts.state(&what.host) == HostState::Unreachable
        {
            continue;
        }
        if let Err(problem) = tell(cluster, &what).await {
            tracing::debug!("volume {} at {}: {problem}", what.volume, what.host);
        }
    }
    Ok(())
}
