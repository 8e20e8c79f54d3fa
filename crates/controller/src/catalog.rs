//! The cluster's volumes. Each home has the state of its volumes. The store only records the homes, so that
//! a volume is still known while its home does not answer.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::join_all;
use perigee_model::job::{ClusterVolume, NewVolume};
use perigee_model::units::format_bytes;
use perigee_model::volume::{CreateVolume, PoolInfo, VolumeInfo, VolumeSource};
use perigee_model::volume_move::VolumeMove;
use perigee_model::{Epoch, HostId, LeaveSite, Problem, ProblemKind, VolumeName};

use crate::cleaner::{self, Cleanup};
use crate::cluster::{Cluster, HostLink};
use crate::records::{JobRecord, VolumeRecord, VolumeSeen, volume_key};
use crate::{accounts, given_up, images, replicas, volume_moves};

pub async fn volumes(cluster: &Cluster) -> Result<Vec<ClusterVolume>, Problem> {
    let replicas = replicas::list(cluster).await?;
    let jobs = cluster.unfinished_jobs();
    let mut volumes = BTreeMap::new();
    let hosts = cluster.hosts.up();
    let asked = hosts.iter().map(|host| host.volume.get::<Vec<VolumeInfo>>("/v1/volumes"));
    let answers = join_all(asked).await;
    let records: Vec<VolumeRecord> = cluster.records.list("volumes/").await?;
    let is_home = |name: &VolumeName, host: &HostId| {
        records.iter().any(|record| record.name == *name && record.home == *host)
    };
    for (host, answer) in hosts.iter().zip(answers) {
        for info in or_silent(host, answer).into_iter().flatten() {
            // A host that was removed may come back with a volume that has another home now.
            if !volumes.contains_key(&info.name) || is_home(&info.name, &host.id) {
                let view = view(cluster, &info.name, &host.id, Some(&seen(&info)), &jobs);
                volumes.insert(info.name, view);
            }
        }
    }
    for record in records {
        // In the middle of a move, neither home may name it.
        let silent = !hosts.iter().any(|host| host.id == record.home)
            || cluster.index.is_changing_home(&record.name);
        if silent {
            let view = view(cluster, &record.name, &record.home, record.seen.as_ref(), &jobs);
            volumes.entry(record.name).or_insert(view);
        }
    }
    for replica in replicas {
        if let Some(volume) = volumes.get_mut(&replica.volume) {
            volume.replicas.push(replica);
        }
    }
    Ok(volumes.into_values().collect())
}

pub async fn volume(cluster: &Cluster, name: &VolumeName) -> Result<ClusterVolume, Problem> {
    let replicas = replicas::of_volume(cluster, name).await?;
    let record = find(cluster, name).await.map_err(|problem| match replicas.first() {
        Some(replica) if problem.kind == ProblemKind::NotFound => {
            let why = format!("its home was removed, and {} has a replica", replica.host);
            Problem::not_found(&problem.what, why)
                .next(format!("to make the replica the volume: perigee volume promote {name}"))
        }
        _ => problem,
    })?;
    let jobs = cluster.unfinished_jobs();
    let shown = view(cluster, name, &record.home, record.seen.as_ref(), &jobs);
    Ok(ClusterVolume { replicas, ..shown })
}

fn view(
    cluster: &Cluster,
    name: &VolumeName,
    home: &HostId,
    seen: Option<&VolumeSeen>,
    jobs: &[Arc<JobRecord>],
) -> ClusterVolume {
    ClusterVolume {
        name: name.clone(),
        home: home.clone(),
        size_bytes: seen.map_or(0, |s| s.size_bytes),
        allocated_bytes: seen.map_or(0, |s| s.allocated_bytes),
        epoch: seen.map_or(Epoch(0), |s| s.epoch),
        used_by: writer(jobs, name).map(|record| record.job.id.clone()),
        moving: cluster
            .index
            .volume_move(name)
            .map(|last| last.shown.clone())
            .filter(|shown| !shown.state.is_final()),
        leave_site: seen.map_or(LeaveSite::Allowed, |s| s.leave_site),
        replicas: Vec::new(),
    }
}

fn seen(info: &VolumeInfo) -> VolumeSeen {
    VolumeSeen {
        size_bytes: info.size_bytes,
        allocated_bytes: info.allocated_bytes,
        epoch: info.epoch,
        leave_site: info.leave_site,
    }
}

/// The job that has the volume open for writing.
pub fn writer<'a>(jobs: &'a [Arc<JobRecord>], name: &VolumeName) -> Option<&'a JobRecord> {
    let record = jobs.iter().find(|record| {
        let disks = record.placement.iter().flat_map(|placement| &placement.disks);
        disks.into_iter().any(|disk| disk.volume == *name && !disk.read_only)
    })?;
    Some(record)
}

/// A volume's home, and what is known of the volume. The home is asked if it answers. If the volume was made at
/// a host without the controller, it is recorded now.
pub async fn find(cluster: &Cluster, name: &VolumeName) -> Result<VolumeRecord, Problem> {
    let key = format!("volumes/{name}");
    let path = format!("/v1/volumes/{name}");
    if let Some(mut record) = cluster.records.read::<VolumeRecord>(&key).await? {
        let Ok(home) = cluster.hosts.get(&record.home) else { return Ok(record) };
        if let Ok(info) = home.volume.get::<VolumeInfo>(&path).await {
            let now = Some(seen(&info));
            if record.seen != now {
                record.seen = now;
                // Its home may have changed since it was read.
                let seen = |stored: Option<VolumeRecord>| match stored {
                    Some(stored) if stored.home != record.home => stored,
                    _ => record.clone(),
                };
                return cluster.records.update(&key, seen).await;
            }
        }
        return Ok(record);
    }
    for host in cluster.hosts.up() {
        // What a lost home still has is not the volume.
        if replicas::is_superseded(cluster, &host.id, name).await? {
            continue;
        }
        if let Ok(info) = host.volume.get::<VolumeInfo>(&path).await {
            let record =
                VolumeRecord { name: name.clone(), home: host.id.clone(), seen: Some(seen(&info)) };
            let jobs = cluster.unfinished_jobs();
            let mut disks = jobs.iter().filter_map(|j| j.placement.as_ref()).flat_map(|p| &p.disks);
            let made_by_a_job =
                info.owner.is_some() || disks.any(|disk| disk.temporary && disk.volume == *name);
            if !made_by_a_job {
                cluster.records.create(&key, &record).await?;
                given_up::found_again(cluster, &host.id, name).await?;
            }
            return Ok(record);
        }
    }
    Err(unknown(name))
}

/// The problem of a volume that does not exist, or that somebody may not know of.
pub fn unknown(name: &VolumeName) -> Problem {
    Problem::not_found(format!("volume {name}"), "no host that is up has a volume with this name")
        .next("`perigee volume list` shows the volumes, `perigee volume create` makes one")
}

pub async fn create(cluster: &Cluster, new: NewVolume) -> Result<ClusterVolume, Problem> {
    if let Ok(present) = find(cluster, &new.name).await {
        let why = format!("there is a volume with this name at {}", present.home);
        return Err(Problem::conflict(format!("can't create volume {}", new.name), why)
            .next("choose another name, or delete it first"));
    }
    if cluster.index.volume_move(&new.name).is_some_and(|last| !last.shown.state.is_final()) {
        let why = "a volume of this name has moved, and what it left behind is not deleted yet";
        return Err(Problem::conflict(format!("can't create volume {}", new.name), why)
            .next("try again in some seconds, or choose another name"));
    }
    volume_moves::forget(cluster, &new.name).await?;
    let home = home_for(cluster, &new).await?;
    if let VolumeSource::Image(image) = &new.source {
        images::ensure(cluster, &home, image).await?;
    }
    let _room = room_for(cluster, &new).await?;
    let key = format!("volumes/{}", new.name);
    let mut record = VolumeRecord { name: new.name.clone(), home: home.id.clone(), seen: None };
    if !cluster.records.create(&key, &record).await? {
        let why = "another request is creating a volume with this name";
        return Err(Problem::conflict(format!("can't create volume {}", new.name), why));
    }
    let ask = CreateVolume::new(new.name.clone(), new.size_bytes, new.source.clone());
    let ask = CreateVolume { leave_site: new.leave_site, ..ask };
    match home.volume_slow.post::<VolumeInfo>("/v1/volumes", &ask).await {
        Ok(info) => {
            record.seen = Some(seen(&info));
            cluster.records.put(&key, &record).await?;
            Ok(view(cluster, &new.name, &home.id, record.seen.as_ref(), &[]))
        }
        Err(problem) => {
            // If the answer was lost, the volume may exist. The record then stays, so that it can be deleted.
            if problem.kind != ProblemKind::Unavailable {
                cluster.records.remove(&key).await?;
            }
            Err(problem)
        }
    }
}

/// Takes room for a new volume in its tenant's quota.
async fn room_for<'a>(
    cluster: &'a Cluster,
    new: &NewVolume,
) -> Result<accounts::Held<'a>, Problem> {
    let full = new.name.as_str();
    let limited = cluster.accounts.quota_of(full).volume_bytes.is_some();
    let of_source = match &new.source {
        VolumeSource::Image(image) if limited => images::image(cluster, image).await?.size_bytes,
        VolumeSource::Volume(source) => limited_size(cluster, full, source).await?,
        VolumeSource::Image(_) | VolumeSource::Empty | VolumeSource::Remote { .. } => 0,
    };
    accounts::hold_volume(cluster, full, new.size_bytes.unwrap_or(of_source)).await
}

/// The size of a volume of which something is made. 0 if the tenant of that has no quota for it: then nobody is asked.
pub async fn limited_size(cluster: &Cluster, made: &str, of: &VolumeName) -> Result<u64, Problem> {
    if cluster.accounts.quota_of(made).volume_bytes.is_none() {
        return Ok(0);
    }
    Ok(find(cluster, of).await?.seen.map_or(0, |seen| seen.size_bytes))
}

async fn home_for(cluster: &Cluster, new: &NewVolume) -> Result<Arc<HostLink>, Problem> {
    let source_home = match &new.source {
        VolumeSource::Volume(source) => Some(settled_home(cluster, source).await?),
        VolumeSource::Empty | VolumeSource::Image(_) | VolumeSource::Remote { .. } => None,
    };
    match (&new.host, source_home) {
        (Some(host), Some(home)) if *host != home => Err(Problem::invalid(
            format!("can't create volume {} at {host}", new.name),
            format!("its source has its home at {home}, and a clone must have the same home"),
        )),
        (Some(host), _) => reachable(cluster, host),
        (None, Some(home)) => reachable(cluster, &home),
        (None, None) => roomiest(cluster).await,
    }
}

pub async fn delete(cluster: &Cluster, name: &VolumeName) -> Result<(), Problem> {
    find(cluster, name).await?;
    let _deletion = cluster.index.begin_deletion(name).map_err(|why| {
        Problem::conflict(format!("can't delete volume {name}"), why)
            .next("wait until that is over, or cancel it")
    })?;
    // From here on it does not move; it may have moved since.
    if let Some(last) = cluster.index.incomplete_move(name) {
        return Err(still_copied(&last.shown));
    }
    if let Some(replica) = replicas::of_volume(cluster, name).await?.first() {
        let why = format!("it has a replica at {}", replica.host);
        return Err(Problem::conflict(format!("can't delete volume {name}"), why).next(format!(
            "drop the replica first: perigee volume replicate {name} --to {} --stop",
            replica.site
        )));
    }
    let record = find(cluster, name).await?;
    let home = reachable(cluster, &record.home)?;
    match home.volume.delete(&format!("/v1/volumes/{name}")).await {
        Err(problem) if problem.kind != ProblemKind::NotFound => Err(problem),
        _ => {
            // A client that had the volume open at one of its earlier homes, or at another host, may have left an
            // attachment there.
            let hosts = cluster.hosts.all().into_iter().map(|host| host.id.clone());
            cleaner::hand_over(cluster, &Cleanup::of_deleted(name, hosts)).await?;
            cluster.records.remove(&volume_key(name)).await?;
            match cluster.index.volume_move(name) {
                // Its driver sees that the volume is gone, and deletes the rest.
                Some(last) if !last.shown.state.is_final() => {}
                _ => volume_moves::forget(cluster, name).await?,
            }
            cleaner::detach_now(cluster, name).await
        }
    }
}

fn still_copied(moved: &VolumeMove) -> Problem {
    let VolumeMove { volume, from, to, .. } = moved;
    let rest = moved.missing_bytes.map_or_else(
        || "the rest of it".to_owned(),
        |bytes| format!("{} of it", format_bytes(bytes)),
    );
    let why = format!(
        "{to} still has to copy {rest} from {from}, and what was made of the volume may need that"
    );
    Problem::conflict(format!("can't delete volume {volume}"), why).next(format!(
        "wait until that is over; `perigee volume info {volume}` shows how much is left"
    ))
}

/// A volume's home, for what is to be done there at once.
///
/// # Errors
/// `Unavailable` while it is changing.
pub async fn settled_home(cluster: &Cluster, name: &VolumeName) -> Result<HostId, Problem> {
    let home = find(cluster, name).await?.home;
    if cluster.index.is_changing_home(name) {
        return Err(Problem::unavailable(format!("volume {name}"), "it is moving to another home")
            .next("try again in some seconds"));
    }
    Ok(home)
}

/// # Errors
/// `Unavailable` if the host does not answer.
pub fn reachable(cluster: &Cluster, host: &HostId) -> Result<Arc<HostLink>, Problem> {
    let link = cluster.hosts.get(host)?;
    if cluster.hosts.state(host) == perigee_model::job::HostState::Unreachable {
        return Err(Problem::unavailable(format!("host {host}"), cluster.hosts.silence(host))
            .next("bring it back, or see `perigee host list`"));
    }
    Ok(link)
}

pub async fn roomiest(cluster: &Cluster) -> Result<Arc<HostLink>, Problem> {
    roomiest_of(cluster, |_| true).await
}

/// The host with the most free space, among those that are wanted.
pub async fn roomiest_of(
    cluster: &Cluster,
    is_wanted: impl Fn(&HostLink) -> bool,
) -> Result<Arc<HostLink>, Problem> {
    let mut hosts = cluster.hosts.up();
    hosts.retain(|host| is_wanted(host));
    let asked = hosts.iter().map(|host| host.volume.get::<PoolInfo>("/v1/pool"));
    let pools = join_all(asked).await;
    hosts
        .iter()
        .zip(pools)
        .filter_map(|(host, pool)| pool.ok().map(|pool| (pool.free_bytes, host)))
        .max_by_key(|(free_bytes, _)| *free_bytes)
        .map(|(_, host)| Arc::clone(host))
        .ok_or_else(|| {
            Problem::unavailable("can't find a host", "no such host is up")
                .next("see `perigee host list`")
        })
}

/// The host's answer for a list. If the host does not answer, this is logged, and its part is left out.
pub fn or_silent<T>(host: &HostLink, answer: Result<T, Problem>) -> Option<T> {
    answer.inspect_err(|problem| tracing::warn!("host {}: {problem}", host.id)).ok()
}
