//! Which hosts may open which volumes at their homes. A home lets in nobody else.
//!
//! A host is let in before it attaches a volume, and let out when it has it attached no more. [`keep`] compares what each home has
//! with what is needed, again and again: a home may come from a backup or an earlier version, or may not have answered
//! when it was told. A home of an earlier version has no such list and answers that it does not know the request: it lets
//! every host in.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use perigee_model::volume::{AllOpeners, Attachment, Openers};
use perigee_model::{HostId, Problem, ProblemKind, VolumeName};

use crate::cluster::{Cluster, Detachment, HostLink};

/// A home that was told is compared again after so many checks of the hosts.
const MONITORED: u32 = 30;

/// Lets a host open a volume at its home.
pub async fn allow(home: &HostLink, volume: &VolumeName, host: &HostId) -> Result<(), Problem> {
    let path = format!("/v1/volumes/{volume}/hosts/{host}");
    unless_unknown(home.volume.put(&path, &()).await)
}

/// Ends that, when the host has the volume attached no more.
pub async fn disallow(home: &HostLink, volume: &VolumeName, host: &HostId) -> Result<(), Problem> {
    let path = format!("/v1/volumes/{volume}/hosts/{host}");
    unless_unknown(home.volume.delete(&path).await)
}

/// These requests never answer of a volume that it is not there.
fn unless_unknown<T: Default>(answer: Result<T, Problem>) -> Result<T, Problem> {
    match answer {
        Err(problem) if problem.kind == ProblemKind::NotFound => Ok(T::default()),
        answer => answer,
    }
}

/// Tells the host that is to become the volume's home which hosts may open it, beside those that it knows. Its old home may
/// too: it serves the volume to those who do not know the new one yet.
pub async fn allow_the_same(
    cluster: &Cluster,
    from: &HostLink,
    to: &HostLink,
    volume: &VolumeName,
) -> Result<(), Problem> {
    let path = format!("/v1/volumes/{volume}/hosts");
    let here: Openers = unless_unknown(from.volume.get(&path).await)?;
    let needed = Needed::now(cluster).hosts_of(volume);
    let hosts: BTreeSet<HostId> =
        here.hosts.into_iter().chain(needed).chain([from.id.clone()]).collect();
    let openers = Openers { hosts: hosts.into_iter().filter(|host| *host != to.id).collect() };
    unless_unknown(to.volume.put(&path, &openers).await)
}

/// Lets the hosts that were let in at the old home while the volume moved open it at its new one too. An old home that does not
/// answer has let nobody in.
pub async fn allow_those_too(from: &HostLink, to: &HostLink, volume: &VolumeName) {
    let path = format!("/v1/volumes/{volume}/hosts");
    let Ok(mut openers) = from.volume.get::<Openers>(&path).await else { return };
    openers.hosts.retain(|host| *host != to.id);
    let told: Result<(), Problem> = unless_unknown(to.volume.put(&path, &openers).await);
    if let Err(problem) = told {
        tracing::warn!("not all hosts can open volume {volume} at {}: {problem}", to.id);
    }
}

/// What the VMs of the cluster need at this moment.
struct Needed {
    /// By volume: the homes that VMs' records name, and the VMs' hosts.
    volumes: BTreeMap<VolumeName, (BTreeSet<HostId>, BTreeSet<HostId>)>,
}

impl Needed {
    fn now(cluster: &Cluster) -> Self {
        let mut volumes: BTreeMap<VolumeName, (BTreeSet<HostId>, BTreeSet<HostId>)> =
            BTreeMap::new();
        let moving = cluster.unfinished_migrations();
        for job in cluster.unfinished_jobs() {
            let Some(placement) = &job.placement else { continue };
            let moves = moving.iter().filter(|one| Some(&one.migration.vm) == job.job.vm.as_ref());
            let ends = moves.flat_map(|one| [&one.migration.from, &one.migration.to]);
            let hosts = ends.chain(&job.job.host).chain(&job.left).chain([&placement.start]);
            let hosts: BTreeSet<HostId> = hosts.cloned().collect();
            for disk in &placement.disks {
                let (homes, all) = volumes.entry(disk.volume.clone()).or_default();
                homes.insert(disk.home.clone());
                all.extend(hosts.iter().cloned());
            }
        }
        for moved in cluster.index.unfinished_volume_moves() {
            let shown = &moved.shown;
            let (homes, hosts) = volumes.entry(shown.volume.clone()).or_default();
            homes.extend([shown.from.clone(), shown.to.clone()]);
            hosts.extend([shown.from.clone(), shown.to.clone()]);
        }
        Self { volumes }
    }

    fn hosts_of(&self, volume: &VolumeName) -> BTreeSet<HostId> {
        self.volumes.get(volume).map(|(_, hosts)| hosts.clone()).unwrap_or_default()
    }

    /// What a home must let in.
    fn at(&self, home: &HostId) -> BTreeMap<VolumeName, Vec<HostId>> {
        let here = self.volumes.iter().filter(|(_, (homes, _))| homes.contains(home));
        let hosts =
            |hosts: &BTreeSet<HostId>| hosts.iter().filter(|host| *host != home).cloned().collect();
        here.map(|(volume, (_, all))| (volume.clone(), hosts(all))).collect()
    }
}

/// A host that a home lets in and that seems not to need it.
type Surplus = (VolumeName, HostId);

/// What is known of a home while it answers.
struct Told {
    at: Instant,
    surplus: BTreeSet<Surplus>,
}

/// Keeps the homes' lists as they are to be. This runs until the controller ends.
pub async fn keep(cluster: Arc<Cluster>) {
    let mut told: BTreeMap<HostId, Told> = BTreeMap::new();
    loop {
        let up = cluster.hosts.up();
        // Who was away may come back as another.
        told.retain(|id, _| up.iter().any(|host| host.id == *id));
        let again: Duration = cluster.timing.monitor * MONITORED;
        let is_due = |home: &&Arc<HostLink>| {
            told.get(&home.id).is_none_or(|told| told.at.elapsed() >= again)
        };
        let due: Vec<_> = up.iter().filter(is_due).collect();
        let needed = Needed::now(&cluster);
        let asked = due.iter().map(|home| {
            let before = told.get(&home.id).map(|told| &told.surplus);
            tell(&cluster, home, needed.at(&home.id), before)
        });
        let answers = join_all(asked).await;
        let answers: Vec<_> = due.iter().map(|home| home.id.clone()).zip(answers).collect();
        for (home, answer) in answers {
            match answer {
                Ok(surplus) => drop(told.insert(home, Told { at: Instant::now(), surplus })),
                Err(problem) => {
                    tracing::debug!("host {home} was not told who may open its volumes: {problem}");
                    told.remove(&home);
                }
            }
        }
        tokio::time::sleep(cluster.timing.monitor).await;
    }
}

/// Lets in who needs it, and lets out who did not need it the last time either. Returns who seems not to need it now.
async fn tell(
    cluster: &Cluster,
    home: &HostLink,
    needed: BTreeMap<VolumeName, Vec<HostId>>,
    before: Option<&BTreeSet<Surplus>>,
) -> Result<BTreeSet<Surplus>, Problem> {
    match home.volume.put::<()>("/v1/openers", &AllOpeners { volumes: needed }).await {
        Err(problem) if problem.kind == ProblemKind::NotFound => return Ok(BTreeSet::new()),
        done => done?,
    }
    let here: AllOpeners = home.volume.get("/v1/openers").await?;
    // Afterwards: what begins in the meantime is needed too.
    let now = Needed::now(cluster);
    let mut surplus = BTreeSet::new();
    for (volume, hosts) in here.volumes {
        let needed = now.hosts_of(&volume);
        let is_busy = cluster.index.is_promoted(&volume) || cluster.index.is_changing_home(&volume);
        for host in hosts.into_iter().filter(|host| !is_busy && !needed.contains(host)) {
            let one = (volume.clone(), host);
            let is_old = before.is_some_and(|before| before.contains(&one));
            if !is_old || !let_out(cluster, home, &one).await {
                surplus.insert(one);
            }
        }
    }
    Ok(surplus)
}

/// Returns false if the host may need it after all, or if that is not known.
async fn let_out(cluster: &Cluster, home: &HostLink, (volume, host): &Surplus) -> bool {
    let Detachment::Held(_detaching) = cluster.index.begin_detachment(host, volume) else {
        return false;
    };
    // A removed host needs nothing. Clients of another one may use the volume without a VM.
    if let Ok(link) = cluster.hosts.get(host) {
        match link.volume.get::<Vec<Attachment>>("/v1/attachments").await {
            Ok(attached) if attached.iter().all(|one| one.volume != *volume) => {}
            _ => return false,
        }
        match is_read(cluster, volume, host).await {
            Ok(false) => {}
            _ => return false,
        }
    }
    let done = disallow(home, volume, host).await;
    if let Err(problem) = &done {
        tracing::warn!("host {host} may still open volume {volume} at {}: {problem}", home.id);
    }
    done.is_ok()
}

/// Of a volume that reads another one.
fn reader_key(read: &VolumeName, host: &HostId, reader: &VolumeName) -> String {
    format!("{}{reader}", readers_of(read, host))
}

fn readers_of(read: &VolumeName, host: &HostId) -> String {
    format!("volume_readers/{read}/{host}/")
}

/// Lets the home of a new volume read what that is made of, as long as there is the new one.
pub async fn allow_reader(
    cluster: &Cluster,
    home: &HostLink,
    read: &VolumeName,
    host: &HostId,
    reader: &VolumeName,
) -> Result<(), Problem> {
    cluster.records.put(&reader_key(read, host, reader), reader).await?;
    allow(home, read, host).await
}

/// Whether a volume that was made at the host reads this one. Records of volumes that are gone are removed.
async fn is_read(cluster: &Cluster, read: &VolumeName, host: &HostId) -> Result<bool, Problem> {
    let mut found = false;
    for reader in cluster.records.list::<VolumeName>(&readers_of(read, host)).await? {
        let key = crate::records::volume_key(&reader);
        match cluster.records.read::<crate::records::VolumeRecord>(&key).await? {
            Some(_) => found = true,
            None => cluster.records.remove(&reader_key(read, host, &reader)).await?,
        }
    }
    Ok(found)
}
