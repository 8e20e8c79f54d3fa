//! The cluster's volumes. Each home has the state of its volumes. The store only records the homes, so that
//! a volume is still known while its home does not answer.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};

use futures_util::future::join_all;
use perigee_model::job::{ClusterVolume, JobSpec, NewVolume};
use perigee_model::units::format_bytes;
use perigee_model::volume::{CreateVolume, PoolInfo, VolumeInfo, VolumeSource};
use perigee_model::volume_move::VolumeMove;
use perigee_model::waiting::{Waiting, WaitsFor};
use perigee_model::{Epoch, HostId, LeaveSite, Problem, ProblemKind, VolumeName};

use crate::cleaner::{self, Cleanup};
use crate::clock::now_ms;
use crate::cluster::{Cluster, HostLink};
use crate::records::{JobRecord, VolumeRecord, VolumeSeen, volume_key};
use crate::storage::backups::{self, schedules};
use crate::storage::{given_up, images, moves, replicas};
use crate::{accounts, admissions};

/// All volumes that a record names or a host that answers has, with their replicas. What a silent home said last is
/// shown as it was.
///
/// # Errors
/// If the store does not answer.
pub async fn volumes(cluster: &Cluster) -> Result<Vec<ClusterVolume>, Problem> {
    let replicas = replicas::list(cluster).await?;
    let jobs = cluster.unfinished_jobs();
    let writers = writers(&jobs);
    let writer = |name: &VolumeName| writers.get(name).copied();
    let mut volumes = BTreeMap::new();
    let hosts = cluster.hosts.serving();
    let asked = hosts.iter().map(|host| host.volume.get::<Vec<VolumeInfo>>("/v1/volumes"));
    let answers = join_all(asked).await;
    let records: Vec<VolumeRecord> = cluster.records.list("volumes/").await?;
    let homes: BTreeMap<&VolumeName, &HostId> =
        records.iter().map(|record| (&record.name, &record.home)).collect();
    let given_up = given_up::all(cluster).await?;
    let disks: BTreeMap<&VolumeName, &HostId> = disks_of(&jobs).collect();
    let mut answered = BTreeSet::new();
    for (host, answer) in hosts.iter().zip(answers) {
        let answer = or_silent(host, answer);
        answered.extend(answer.is_some().then_some(&host.id));
        for info in answer.into_iter().flatten() {
            // A host can say anything. A volume is where the records say it is.
            let is_here = match homes.get(&info.name).or_else(|| disks.get(&info.name)) {
                Some(home) => **home == host.id || is_moving_to(cluster, &info.name, &host.id),
                None => given_up.get(&host.id).is_some_and(|all| all.contains(&info.name)),
            };
            if is_here && !volumes.contains_key(&info.name) {
                let view =
                    view(cluster, &info.name, &host.id, Some(&seen(&info)), writer(&info.name));
                volumes.insert(info.name, view);
            }
        }
    }
    for record in records {
        // In the middle of a move, neither home may name it. One that is not made yet, perhaps because the controller was
        // stopped, has its name all the same.
        let silent =
            !answered.contains(&record.home) || cluster.index.is_changing_home(&record.name);
        if silent || record.seen.is_none() {
            let writer = writer(&record.name);
            let view = view(cluster, &record.name, &record.home, record.seen.as_ref(), writer);
            volumes.entry(record.name).or_insert(view);
        }
    }
    // Jobs' own disks have no records.
    for (volume, home) in disks.into_iter().filter(|(_, home)| !answered.contains(*home)) {
        if !volumes.contains_key(volume) {
            volumes.insert(volume.clone(), view(cluster, volume, home, None, writer(volume)));
        }
    }
    for volume in volumes.values_mut().filter(|volume| !answered.contains(&volume.home)) {
        volume.waits = silent_home(cluster, &volume.home);
    }
    for replica in replicas {
        if let Some(volume) = volumes.get_mut(&replica.volume) {
            volume.replicas.push(replica);
        }
    }
    for (name, restoring) in backups::restoring(cluster).await? {
        if let Some(volume) = volumes.get_mut(&name) {
            volume.restoring = Some(restoring);
        }
    }
    Ok(volumes.into_values().collect())
}

/// Where the disks of jobs are.
fn disks_of(jobs: &[Arc<JobRecord>]) -> impl Iterator<Item = (&VolumeName, &HostId)> {
    let disks = jobs.iter().filter_map(|job| job.placement.as_ref()).flat_map(|p| &p.disks);
    disks.map(|disk| (&disk.volume, &disk.home))
}

/// Whether the controller has ordered a move of the volume to this host, which may have it already.
fn is_moving_to(cluster: &Cluster, name: &VolumeName, host: &HostId) -> bool {
    cluster.index.volume_move(name).is_some_and(|last| last.view.to == *host)
}

/// One volume, from its record: its home is not asked.
///
/// # Errors
/// `NotFound` if there is no such volume; it says so if a replica is left.
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
    let shown = view(cluster, name, &record.home, record.seen.as_ref(), writer(&jobs, name));
    let restoring = backups::restoring(cluster).await?.remove(name);
    Ok(ClusterVolume { replicas, restoring, ..shown })
}

fn view(
    cluster: &Cluster,
    name: &VolumeName,
    home: &HostId,
    seen: Option<&VolumeSeen>,
    writer: Option<&JobRecord>,
) -> ClusterVolume {
    ClusterVolume {
        name: name.clone(),
        home: home.clone(),
        size_bytes: seen.map_or(0, |s| s.size_bytes),
        allocated_bytes: seen.map_or(0, |s| s.allocated_bytes),
        epoch: seen.map_or(Epoch(0), |s| s.epoch),
        used_by: writer.map(|record| record.job.id.clone()),
        moving: cluster
            .index
            .volume_move(name)
            .map(|last| last.view.clone())
            .filter(|shown| !shown.state.is_final()),
        leave_site: seen.map_or(LeaveSite::Allowed, |s| s.leave_site),
        replicas: Vec::new(),
        restoring: None,
        waits: cluster.hosts.waits_for_volume_server(home).into_iter().collect(),
    }
}

/// Why a home could not be asked just now. What has just begun to be silent is not known as silent yet.
fn silent_home(cluster: &Cluster, home: &HostId) -> Vec<Waiting> {
    let waits = cluster.hosts.waits_for_volume_server(home).unwrap_or_else(|| Waiting {
        waits_for: WaitsFor::VolumeServer { host: home.clone() },
        since_ms: now_ms(),
    });
    vec![waits]
}

fn seen(info: &VolumeInfo) -> VolumeSeen {
    VolumeSeen {
        size_bytes: info.size_bytes,
        allocated_bytes: info.allocated_bytes,
        epoch: info.epoch,
        leave_site: info.leave_site,
    }
}

/// The jobs that have volumes open for writing, as [`writer`] finds them.
fn writers(jobs: &[Arc<JobRecord>]) -> BTreeMap<&VolumeName, &JobRecord> {
    let mut writers = BTreeMap::new();
    for record in jobs {
        let disks = record.placement.iter().flat_map(|placement| &placement.disks);
        for disk in disks.filter(|disk| !disk.read_only) {
            writers.entry(&disk.volume).or_insert(&**record);
        }
    }
    writers
}

/// The job that has the volume open for writing.
pub fn writer<'a>(jobs: &'a [Arc<JobRecord>], name: &VolumeName) -> Option<&'a JobRecord> {
    let record = jobs.iter().find(|record| {
        let disks = record.placement.iter().flat_map(|placement| &placement.disks);
        disks.into_iter().any(|disk| disk.volume == *name && !disk.read_only)
    })?;
    Some(record)
}

/// The homes of a job's volumes, as far as they are recorded. No host is asked.
pub async fn homes(cluster: &Cluster, spec: &JobSpec) -> Vec<HostId> {
    let mut homes = Vec::new();
    for volume in &spec.volumes {
        let record = cluster.records.read::<VolumeRecord>(&volume_key(&volume.volume)).await;
        homes.extend(record.ok().flatten().map(|record| record.home));
    }
    homes.sort();
    homes.dedup();
    homes
}

/// A volume's home, and what is known of the volume. The home is asked if it answers.
///
/// A host that reports a volume which the controller does not know says nothing: it may have been broken into, and the
/// volume would become its tenant's. Only one that was given up with this host is found again, and one that an admin
/// names with its host: [`adopt`].
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
    if let Some(record) = disk_of_a_job(cluster, name).await? {
        return Ok(record);
    }
    for host in cluster.hosts.serving() {
        // What a lost home still has is not the volume.
        if !given_up::has(cluster, &host.id, name).await?
            || replicas::is_superseded(cluster, &host.id, name).await?
        {
            continue;
        }
        if let Ok(info) = host.volume.get::<VolumeInfo>(&path).await {
            return record_found(cluster, &host.id, &info).await;
        }
    }
    Err(unknown(name))
}

/// A job's own disk. It has no record, and is where the job says.
async fn disk_of_a_job(
    cluster: &Cluster,
    name: &VolumeName,
) -> Result<Option<VolumeRecord>, Problem> {
    let jobs = cluster.unfinished_jobs();
    let Some((_, home)) = disks_of(&jobs).find(|(volume, _)| *volume == name) else {
        return Ok(None);
    };
    // It may just have moved, and the job is not told yet.
    let moved_to = cluster.index.volume_move(name).map(|last| last.view.to.clone());
    let mut not_known = None;
    for host in [Some(home.clone()), moved_to].into_iter().flatten() {
        let Ok(link) = cluster.hosts.get(&host) else { continue };
        match link.volume.get::<VolumeInfo>(&format!("/v1/volumes/{name}")).await {
            Ok(info) => {
                let seen = Some(seen(&info));
                return Ok(Some(VolumeRecord { name: name.clone(), home: host, seen }));
            }
            Err(problem) if problem.kind == ProblemKind::NotFound => {}
            Err(problem) => not_known = Some(problem),
        }
    }
    match not_known {
        Some(problem) => {
            let why = format!("its home does not answer: {}", problem.why);
            Err(Problem::unavailable(format!("volume {name}"), why).next(problem.next))
        }
        None => Ok(None),
    }
}

async fn record_found(
    cluster: &Cluster,
    host: &HostId,
    info: &VolumeInfo,
) -> Result<VolumeRecord, Problem> {
    let (name, home) = (info.name.clone(), host.clone());
    let record = VolumeRecord { name, home, seen: Some(seen(info)) };
    if !cluster.records.create(&volume_key(&info.name), &record).await? {
        let why = "another request has recorded a volume with this name";
        return Err(Problem::conflict(format!("volume {}", info.name), why).next("try again"));
    }
    given_up::found_again(cluster, host, &info.name).await?;
    Ok(record)
}

/// Makes a volume known that a host has and no record names there, as the volume of this name. If its record names another home, that one must
/// have answered that it does not have it.
///
/// # Errors
/// `Conflict` if there is one, or if a job needs it; `NotFound` if the host has none; `NoSpace` beyond the tenant's quota.
pub async fn adopt(
    cluster: &Cluster,
    name: &VolumeName,
    host: &HostId,
) -> Result<ClusterVolume, Problem> {
    let what = format!("can't adopt volume {name} of host {host}");
    let refused = |why: String| Err(Problem::conflict(&what, why));
    let key = volume_key(name);
    let jobs = cluster.unfinished_jobs();
    if disks_of(&jobs).any(|(disk, _)| disk == name) {
        return refused("a job or VM has it as a disk".to_owned());
    }
    let before = cluster.records.own::<VolumeRecord>(&key).await?;
    if let Some(record) = &before {
        let home = &record.value.home;
        if home == host || !lacks(cluster, home, name).await {
            return refused(format!(
                "there is a volume with this name at {home}, or that home does not answer"
            ));
        }
    }
    if cluster.index.volume_move(name).is_some_and(|last| !last.view.state.is_final()) {
        return refused("it is moving".to_owned());
    }
    if replicas::is_superseded(cluster, host, name).await? {
        return refused("a replica became the volume when this host was lost".to_owned());
    }
    let link = reachable(cluster, host)?;
    let info: VolumeInfo = link.volume.get(&format!("/v1/volumes/{name}")).await?;
    if info.name != *name {
        return Err(Problem::internal(what, "the host answers with another volume"));
    }
    if let Some(owner) = &info.owner
        && cleaner::needs_volume(cluster, host, name).await?
    {
        return refused(format!("it was made for {owner}, and is being removed"));
    }
    let _room = accounts::hold_volume(cluster, name.as_str(), info.size_bytes).await?;
    let record = match before {
        // Nobody else may have changed it since.
        Some(mut before) => {
            before.value.home = host.clone();
            before.value.seen = Some(seen(&info));
            before.save().await?;
            before.value.clone()
        }
        None => record_found(cluster, host, &info).await?,
    };
    Ok(view(cluster, name, host, record.seen.as_ref(), None))
}

/// Whether the host answers that it has no such volume.
async fn lacks(cluster: &Cluster, host: &HostId, name: &VolumeName) -> bool {
    let Ok(link) = cluster.hosts.get(host) else { return false };
    let answer = link.volume.get::<VolumeInfo>(&format!("/v1/volumes/{name}")).await;
    answer.is_err_and(|problem| problem.kind == ProblemKind::NotFound)
}

/// The problem of a volume that does not exist, or that somebody may not know of.
pub fn unknown(name: &VolumeName) -> Problem {
    Problem::not_found(format!("volume {name}"), "no host that is up has a volume with this name")
        .next(
            "`perigee volume list` shows the volumes, `perigee volume create` makes one, `perigee volume adopt` takes one \
             of a host's pool",
        )
}

/// Makes a volume and its record. The host that [`home_for`] chooses becomes its home.
///
/// # Errors
/// `Conflict` if the name is taken, `NoSpace` beyond the quota, and what the home answers.
pub async fn create(cluster: &Cluster, new: NewVolume) -> Result<ClusterVolume, Problem> {
    let _making = Making::begin(cluster, &new.name)?;
    free_name(cluster, &new.name).await?;
    if let VolumeSource::Volume(source) = &new.source {
        let what = format!("can't create volume {} of volume {source}", new.name);
        backups::check_whole(cluster, what, source).await?;
    }
    let home = home_for(cluster, &new).await?;
    check_free(&home, &new.name).await?;
    if let VolumeSource::Image(image) = &new.source {
        images::ensure(cluster, &home, image).await?;
    }
    let _room = room_for(cluster, &new).await?;
    let key = format!("volumes/{}", new.name);
    let mut record = VolumeRecord { name: new.name.clone(), home: home.id.clone(), seen: None };
    if !cluster.records.create_asked(&key, &record).await? {
        let why = "another request is creating a volume with this name";
        return Err(Problem::conflict(format!("can't create volume {}", new.name), why));
    }
    // Now nobody else makes a volume of this name, and nothing reads it yet.
    let ready = async {
        admissions::forget_readers(cluster, &new.name).await?;
        source_elsewhere(cluster, &new, &home.id).await
    };
    let source = match ready.await {
        Ok(source) => source,
        Err(problem) => {
            cluster.records.remove(&key).await?;
            return Err(problem);
        }
    };
    let ask = CreateVolume::new(new.name.clone(), new.size_bytes, source);
    let ask = CreateVolume { leave_site: new.leave_site, ..ask };
    match home.volume_slow.post::<VolumeInfo>("/v1/volumes", &ask).await {
        Ok(info) => {
            record.seen = Some(seen(&info));
            cluster.records.put(&key, &record).await?;
            Ok(view(cluster, &new.name, &home.id, record.seen.as_ref(), None))
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

/// Makes sure that no volume has this name, and forgets one that was not made.
async fn free_name(cluster: &Cluster, name: &VolumeName) -> Result<(), Problem> {
    let what = format!("can't create volume {name}");
    if let Ok(present) = find(cluster, name).await {
        // The answer to an earlier request was lost, and it has made none.
        if present.seen.is_some() || !lacks(cluster, &present.home, name).await {
            let why = format!("there is a volume with this name at {}", present.home);
            return Err(
                Problem::conflict(what, why).next("choose another name, or delete it first")
            );
        }
        cluster.records.remove(&volume_key(name)).await?;
    }
    if cluster.index.volume_move(name).is_some_and(|last| !last.view.state.is_final()) {
        let why = "a volume of this name has moved, and what it left behind is not deleted yet";
        return Err(
            Problem::conflict(what, why).next("try again in some seconds, or choose another name")
        );
    }
    moves::forget(cluster, name).await
}

/// Makes a volume at a host by a request that may take long, and its record. `room` is that in the tenant's quota.
///
/// # Errors
/// `Conflict` if the name is taken, and what the host answers.
pub(super) async fn make_at(
    cluster: &Cluster,
    name: &VolumeName,
    home: &HostLink,
    make: impl Future<Output = Result<Result<VolumeInfo, Problem>, Problem>>,
    room: accounts::QuotaHold<'_>,
) -> Result<ClusterVolume, Problem> {
    let (_making, _room) = (Making::begin(cluster, name)?, room);
    free_name(cluster, name).await?;
    check_free(home, name).await?;
    let key = volume_key(name);
    let mut record = VolumeRecord { name: name.clone(), home: home.id.clone(), seen: None };
    if !cluster.records.create_asked(&key, &record).await? {
        let why = "another request is creating a volume with this name";
        return Err(Problem::conflict(format!("can't create volume {name}"), why));
    }
    admissions::forget_readers(cluster, name).await?;
    match make.await {
        Ok(Ok(info)) => {
            record.seen = Some(seen(&info));
            cluster.records.put(&key, &record).await?;
            Ok(view(cluster, name, &home.id, record.seen.as_ref(), None))
        }
        Ok(Err(problem)) => {
            cluster.records.remove(&key).await?;
            Err(problem)
        }
        // The answer was lost. The volume may be there: its record stays, so that it can be deleted, or made by the next request.
        Err(problem) => Err(problem.next("try again")),
    }
}

/// A volume of which its maker has found that its home has it: its record says so.
///
/// # Errors
/// If the store fails.
pub(super) async fn record_made(
    cluster: &Cluster,
    home: &HostId,
    info: &VolumeInfo,
) -> Result<(), Problem> {
    let (name, home) = (info.name.clone(), home.clone());
    let record = VolumeRecord { name, home, seen: Some(seen(info)) };
    cluster.records.put(&volume_key(&info.name), &record).await
}

/// Forgets a volume whose maker has ended before its home had made it.
///
/// # Errors
/// `Conflict` if another request is creating a volume with this name; if the store fails.
pub(super) async fn forget_not_made(cluster: &Cluster, name: &VolumeName) -> Result<(), Problem> {
    let _making = Making::begin(cluster, name)?;
    let key = volume_key(name);
    match cluster.records.read::<VolumeRecord>(&key).await? {
        Some(record) if record.seen.is_none() && lacks(cluster, &record.home, name).await => {
            cluster.records.remove(&key).await
        }
        _ => Ok(()),
    }
}

/// A name of which a volume is being made.
struct Making<'a>(&'a Cluster, VolumeName);

impl<'a> Making<'a> {
    fn begin(cluster: &'a Cluster, name: &VolumeName) -> Result<Self, Problem> {
        let mut making = cluster.making.lock().unwrap_or_else(PoisonError::into_inner);
        if !making.insert(name.clone()) {
            let why = "another request is creating a volume with this name";
            return Err(Problem::conflict(format!("can't create volume {name}"), why));
        }
        Ok(Self(cluster, name.clone()))
    }
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.0.making.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.1);
    }
}

/// Whether the home of a new volume answers, and has none of its name. Until it does, nothing is recorded that would take the name.
async fn check_free(home: &HostLink, name: &VolumeName) -> Result<(), Problem> {
    match home.volume.get::<VolumeInfo>(&format!("/v1/volumes/{name}")).await {
        Err(problem) if problem.kind == ProblemKind::NotFound => Ok(()),
        Err(problem) => Err(problem),
        Ok(_) => {
            let why = format!("host {} has a volume with this name that no record names", home.id);
            Err(Problem::conflict(format!("can't create volume {name}"), why).next(format!(
                "choose another name, or use that one: perigee volume adopt {name} --host {}",
                home.id
            )))
        }
    }
}

/// What a new volume is made of. The host may read it from then on if it is at another host of the cluster.
async fn source_elsewhere(
    cluster: &Cluster,
    new: &NewVolume,
    host: &HostId,
) -> Result<VolumeSource, Problem> {
    let VolumeSource::Remote { nbd_addr, export } = &new.source else {
        return Ok(new.source.clone());
    };
    let_read(cluster, nbd_addr, export, host, &new.name).await?;
    let is_of_cluster = cluster.hosts.all().iter().any(|one| one.addresses.nbd_addr == *nbd_addr);
    let image = export.strip_prefix("image:").and_then(|name| name.parse().ok());
    let export = match image.filter(|_| is_of_cluster) {
        Some(image) => images::by_layer(images::layer_of(cluster, &image).await?),
        None => export.clone(),
    };
    Ok(VolumeSource::Remote { nbd_addr: nbd_addr.clone(), export })
}

/// Lets a host read a volume of another host of the cluster, of which it makes its own.
async fn let_read(
    cluster: &Cluster,
    nbd_addr: &str,
    export: &str,
    host: &HostId,
    reader: &VolumeName,
) -> Result<(), Problem> {
    let volume = export.split('@').next().and_then(|name| name.parse::<VolumeName>().ok());
    let homes = cluster.hosts.all();
    let home = homes.iter().find(|home| home.addresses.nbd_addr == nbd_addr && home.id != *host);
    match (home, volume) {
        (Some(home), Some(volume)) => {
            admissions::allow_reader(cluster, home, &volume, host, reader).await
        }
        _ => Ok(()),
    }
}

/// Takes room for a new volume in its tenant's quota.
async fn room_for<'a>(
    cluster: &'a Cluster,
    new: &NewVolume,
) -> Result<accounts::QuotaHold<'a>, Problem> {
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
    let home = match (&new.host, source_home) {
        (Some(host), Some(home)) if *host != home => Err(Problem::invalid(
            format!("can't create volume {} at {host}", new.name),
            format!("its source has its home at {home}, and a clone must have the same home"),
        )),
        (Some(host), _) => reachable(cluster, host),
        (None, Some(home)) => reachable(cluster, &home),
        (None, None) => roomiest(cluster).await,
    }?;
    let what = format!("can't create volume {} at {}", new.name, home.id);
    cluster.hosts.check_not_drained(&home.id, what)?;
    Ok(home)
}

/// Deletes a volume and its record, at its home and wherever it is attached.
///
/// # Errors
/// `NotFound` if there is no such volume; `Conflict` while a job uses it, it moves, or a replica of it is left.
pub async fn delete(cluster: &Cluster, name: &VolumeName) -> Result<(), Problem> {
    find(cluster, name).await?;
    let _deletion = cluster.index.begin_deletion(name).map_err(|why| {
        Problem::conflict(format!("can't delete volume {name}"), why)
            .next("wait until that is over, or end it")
    })?;
    // From here on it does not move; it may have moved since.
    if let Some(last) = cluster.index.incomplete_move(name) {
        return Err(still_copied(&last.view));
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
            schedules::end_of_volume(cluster, name).await?;
            cluster.records.remove(&volume_key(name)).await?;
            match cluster.index.volume_move(name) {
                // Its driver sees that the volume is gone, and deletes the rest.
                Some(last) if !last.view.state.is_final() => {}
                _ => moves::forget(cluster, name).await?,
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

/// The host with the most free space.
///
/// # Errors
/// `Unavailable` if no host answers.
pub async fn roomiest(cluster: &Cluster) -> Result<Arc<HostLink>, Problem> {
    roomiest_of(cluster, |_| true).await
}

/// The host with the most free space, among those that are wanted and not drained.
pub async fn roomiest_of(
    cluster: &Cluster,
    is_wanted: impl Fn(&HostLink) -> bool,
) -> Result<Arc<HostLink>, Problem> {
    let mut hosts = cluster.hosts.able();
    hosts.retain(|host| is_wanted(host) && cluster.hosts.drain(&host.id).is_none());
    let asked = hosts.iter().map(|host| host.volume.get::<PoolInfo>("/v1/pool"));
    let pools = join_all(asked).await;
    hosts
        .iter()
        .zip(pools)
        .filter_map(|(host, pool)| pool.ok().map(|pool| (pool.free_bytes, host)))
        .max_by_key(|(free_bytes, _)| *free_bytes)
        .map(|(_, host)| Arc::clone(host))
        .ok_or_else(|| {
            Problem::unavailable("can't find a host", "no such host is up, or all are drained")
                .next("see `perigee host list`")
        })
}

/// The host's answer for a list. If the host does not answer, this is logged, and its part is left out.
pub fn or_silent<T>(host: &HostLink, answer: Result<T, Problem>) -> Option<T> {
    answer.inspect_err(|problem| tracing::warn!("host {}: {problem}", host.id)).ok()
}
