//! Shadows: what a volume's old home keeps of it for a while after a move, so that moving back ships only what
//! changed. A shadow is deleted when its time is over, when its host's pool has little room, when the volume was
//! deleted or has come back, and when somebody deletes an image that may be below it.

use std::sync::Arc;

use perigee_model::home::Tenure;
use perigee_model::job::HostState;
use perigee_model::leave_site::{FindLayers, FoundLayers};
use perigee_model::volume::PoolInfo;
use perigee_model::{HostId, LayerId, Problem, ProblemKind, SiteId, VolumeName};
use serde::{Deserialize, Serialize};

use crate::clock::now_ms;
use crate::cluster::tasks::Task;
use crate::cluster::{Cluster, HostLink};
use crate::records::{VolumeRecord, volume_key};

const PREFIX: &str = "shadows/";
/// A pool with less room than this part of its disk keeps no shadows.
const FREE_PART_MIN: f64 = 0.1;

/// One shadow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shadow {
    pub volume: VolumeName,
    pub host: HostId,
    /// The volume's tenure at the home that it went to.
    pub tenure: Tenure,
    pub since_ms: u64,
}

impl Shadow {
    fn key(&self) -> String {
        format!("{}{}/{}", prefix(&self.volume), self.host, self.tenure)
    }
}

fn prefix(volume: &VolumeName) -> String {
    format!("{PREFIX}{volume}/")
}

/// Keeps what a volume has left at a host.
pub async fn keep(
    cluster: &Cluster,
    volume: &VolumeName,
    host: &HostId,
    tenure: Tenure,
) -> Result<(), Problem> {
    let shadow = Shadow { volume: volume.clone(), host: host.clone(), tenure, since_ms: now_ms() };
    cluster.records.put(&shadow.key(), &shadow).await
}

/// Drops the shadows whose time is over. This runs until the controller ends.
pub async fn run(cluster: Arc<Cluster>, task: Task) {
    loop {
        task.round(async { look(&cluster).await.map(|()| "looked after them".to_owned()) }).await;
        tokio::time::sleep(cluster.timing.monitor).await;
    }
}

async fn look(cluster: &Cluster) -> Result<(), Problem> {
    for shadow in cluster.records.list::<Shadow>(PREFIX).await? {
        let Ok(host) = cluster.hosts.get(&shadow.host) else {
            cluster.records.remove(&shadow.key()).await?;
            continue;
        };
        if cluster.hosts.state(&shadow.host) == HostState::Unreachable {
            continue;
        }
        if is_over(cluster, &shadow, &host).await?
            && let Err(problem) = drop_at(cluster, &shadow, &host).await
        {
            tracing::debug!("the shadow of volume {} at {}: {problem}", shadow.volume, host.id);
        }
    }
    Ok(())
}

async fn is_over(cluster: &Cluster, shadow: &Shadow, host: &HostLink) -> Result<bool, Problem> {
    // A move that is under way may be using it.
    if cluster.index.volume_move(&shadow.volume).is_some_and(|last| !last.view.state.is_final()) {
        return Ok(false);
    }
    let age_ms = cluster.clock.age_ms(shadow.since_ms);
    if u128::from(age_ms) >= cluster.timing.shadow.as_millis() {
        return Ok(true);
    }
    let record: Option<VolumeRecord> = cluster.records.read(&volume_key(&shadow.volume)).await?;
    let of_job = crate::storage::moves::home_in_a_job(cluster, &shadow.volume);
    match record.map(|record| record.home).or(of_job) {
        None => return Ok(true),
        Some(home) if home == shadow.host => return Ok(true),
        Some(_) => {}
    }
    Ok(!has_room(cluster, host).await)
}

/// Whether a host's pool has room for shadows. A host that does not answer may have it.
pub async fn has_room(cluster: &Cluster, host: &HostLink) -> bool {
    let pool = host.volume.get::<PoolInfo>("/v1/pool").await;
    !cluster.timing.shadow.is_zero() && !pool.is_ok_and(|pool| is_short(&pool))
}

#[expect(clippy::cast_precision_loss, reason = "a part of a disk needs no exact bytes")]
fn is_short(pool: &PoolInfo) -> bool {
    (pool.free_bytes as f64) < pool.total_bytes as f64 * FREE_PART_MIN
}

async fn drop_at(cluster: &Cluster, shadow: &Shadow, host: &HostLink) -> Result<(), Problem> {
    let Shadow { volume, tenure: Tenure(tenure), .. } = shadow;
    let path = format!("/v1/volumes/{volume}/departed?tenure={tenure}");
    match host.volume.delete(&path).await {
        Err(problem) if problem.kind != ProblemKind::NotFound => Err(problem),
        _ => cluster.records.remove(&shadow.key()).await,
    }
}

/// Drops the shadows that a volume has at other sites than this one, at the hosts that answer.
pub async fn drop_beyond(
    cluster: &Cluster,
    site: &SiteId,
    volume: &VolumeName,
) -> Result<(), Problem> {
    for shadow in cluster.records.list::<Shadow>(&prefix(volume)).await? {
        if let Ok(host) = cluster.hosts.get(&shadow.host)
            && host.addresses.site != *site
            && cluster.hosts.state(&shadow.host) != HostState::Unreachable
        {
            drop_at(cluster, &shadow, &host).await?;
        }
    }
    Ok(())
}

/// Drops the shadows at a host that stand on a layer, because that is to be deleted. Others stay: they are other users'.
pub async fn drop_on(cluster: &Cluster, host: &HostLink, layer: LayerId) -> Result<(), Problem> {
    let find = FindLayers { layers: vec![layer], volume: None };
    let found: FoundLayers = host.volume.post("/v1/layers/find", &find).await?;
    for volume in found.departed {
        for shadow in cluster.records.list::<Shadow>(&prefix(&volume)).await? {
            if shadow.host == host.id {
                drop_at(cluster, &shadow, host).await?;
            }
        }
    }
    Ok(())
}
