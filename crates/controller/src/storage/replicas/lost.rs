//! Hosts that have a volume no more, because a replica elsewhere has become it, or because a replica of theirs
//! should have and the promotion was called off. They are told when they answer.

use std::sync::Arc;

use perigee_model::home::{HomeState, Tenure, VolumeHome};
use perigee_model::job::HostState;
use perigee_model::replica::{Supersede, Superseded};
use perigee_model::volume::ImageInfo;
use perigee_model::{HostId, ImageName, Problem, ProblemKind, TenantName, VolumeName};
use serde::{Deserialize, Serialize};

use super::carry_out;
use crate::admissions;
use crate::cluster::tasks::Task;
use crate::cluster::{Cluster, HostLink};
use crate::records::{VolumeRecord, volume_key};
use crate::storage::{given_up, images};

const PREFIX: &str = "superseded/";

/// What a host is to be told. It is kept until the host has answered, also while the host is removed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SupersededVolume {
    pub volume: VolumeName,
    pub host: HostId,
    /// The tenure there; `None` if the host never told it.
    pub lost: Option<Tenure>,
    /// The volume's tenure at its home.
    pub tenure: Tenure,
    /// The home.
    pub to: HostId,
}

impl SupersededVolume {
    fn key(&self) -> String {
        format!("{}{}", prefix(&self.host, &self.volume), self.tenure.incarnation())
    }
}

fn prefix(host: &HostId, volume: &VolumeName) -> String {
    format!("{PREFIX}{host}/{volume}/")
}

pub(super) async fn keep(cluster: &Cluster, what: &SupersededVolume) -> Result<(), Problem> {
    cluster.records.put(&what.key(), what).await
}

/// Whether what a host has of a volume is not the volume any more.
///
/// # Errors
/// If the store can't be read.
pub async fn is_superseded(
    cluster: &Cluster,
    host: &HostId,
    volume: &VolumeName,
) -> Result<bool, Problem> {
    Ok(!cluster.records.keys(&prefix(host, volume)).await?.is_empty())
}

/// Tells the host. From its answer on it has the volume no more.
pub(super) async fn tell(cluster: &Cluster, what: &SupersededVolume) -> Result<(), Problem> {
    let SupersededVolume { volume, host, tenure, .. } = what;
    let link = cluster.hosts.get(host)?;
    let home: VolumeHome = link.volume.get(&format!("/v1/volumes/{volume}/home")).await?;
    let lost = match home.home {
        HomeState::Here { tenure: here, .. } if here.incarnation() == tenure.incarnation() => None,
        // It may have got it by another promotion, of which its record knows nothing.
        HomeState::Here { tenure: here, .. } => Some(here),
        _ => what.lost,
    };
    if let Some(lost) = lost {
        let home = present_home(cluster, what).await?;
        // What clients still have open there goes on at the new home, as fenced sessions.
        if let Err(problem) = admissions::allow(&home, volume, host).await {
            tracing::warn!("what {host} has open of volume {volume} does not go on: {problem}");
        }
        let ask = Supersede { lost, tenure: *tenure, to: home.volume_server() };
        let path = format!("/v1/volumes/{volume}/supersede");
        let done: Superseded = link.volume.post(&path, &ask).await?;
        if let Some(image) = done.image {
            tracing::warn!("what {host} had of volume {volume} is image {image} there");
            take_note(cluster, &link, volume, &image).await?;
        }
        given_up::found_again(cluster, host, volume).await?;
    }
    cluster.records.remove(&what.key()).await
}

/// What the lost home has kept is an image like one that somebody has made: the volume's tenant sees it, uses it and deletes it.
async fn take_note(
    cluster: &Cluster,
    at: &HostLink,
    volume: &VolumeName,
    image: &ImageName,
) -> Result<(), Problem> {
    // A host that was broken into may name anything.
    if !TenantName::of(volume.as_str()).owns(image.as_str()) || !image.as_str().contains("lost-") {
        tracing::warn!("host {} has named {image} as what it had of volume {volume}", at.id);
        return Ok(());
    }
    match at.volume.get::<ImageInfo>(&format!("/v1/images/{image}")).await {
        Ok(info) => images::bind(cluster, image, &info, Some(&at.id)).await,
        // Somebody has deleted it there meanwhile.
        Err(problem) if problem.kind == ProblemKind::NotFound => Ok(()),
        Err(problem) => Err(problem),
    }
}

/// Where the volume is now. When it is nowhere, some other host will do: the lost one is not to have it.
async fn present_home(
    cluster: &Cluster,
    what: &SupersededVolume,
) -> Result<Arc<HostLink>, Problem> {
    let record: Option<VolumeRecord> = cluster.records.read(&volume_key(&what.volume)).await?;
    let known = [record.map(|record| record.home), Some(what.to.clone())];
    let is_other = |link: &Arc<HostLink>| link.id != what.host;
    let known = known.iter().flatten().filter_map(|id| cluster.hosts.get(id).ok()).find(is_other);
    let other = || cluster.hosts.all().into_iter().find(is_other);
    known.or_else(other).ok_or_else(|| {
        let why = "there is no other host";
        Problem::not_found(format!("the home of volume {}", what.volume), why)
    })
}

/// Tells hosts that are back, and goes on with promotions. This runs until the controller ends.
pub async fn run(cluster: Arc<Cluster>, task: Task) {
    loop {
        let look = async {
            // One does not wait for the other's trouble.
            let (informed, resumed) = (tell_all(&cluster).await, carry_out::resume(&cluster).await);
            informed.and(resumed)?;
            Ok("told hosts that are back, and went on with promotions".to_owned())
        };
        task.round(look).await;
        tokio::time::sleep(cluster.timing.monitor).await;
    }
}

async fn tell_all(cluster: &Cluster) -> Result<(), Problem> {
    for what in cluster.records.list::<SupersededVolume>(PREFIX).await? {
        if cluster.hosts.get(&what.host).is_err()
            || cluster.hosts.state(&what.host) == HostState::Unreachable
            || cluster.index.is_changing_home(&what.volume)
            || cluster.index.is_promoted(&what.volume)
        {
            continue;
        }
        // It was told, and the volume has come to it since.
        let home: Option<VolumeRecord> = cluster.records.read(&volume_key(&what.volume)).await?;
        if home.is_some_and(|record| record.home == what.host) {
            cluster.records.remove(&what.key()).await?;
            continue;
        }
        if let Err(problem) = tell(cluster, &what).await {
            tracing::debug!("volume {} at {}: {problem}", what.volume, what.host);
        }
    }
    Ok(())
}
