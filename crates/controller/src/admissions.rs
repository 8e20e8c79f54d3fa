//! Which hosts may open which volumes at their homes. A home lets in nobody else.
//!
//! A host is let in before it attaches a volume, and let out when it has it attached no more. [`keep`] compares what each home has
//! with what is needed, again and again: a home may come from a backup, or may not have answered when it was told.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use perigee_model::job::HostState;
use perigee_model::volume::{AdmittedHosts, AllAdmittedHosts, Attachment, ImageInfo, VolumeInfo};
use perigee_model::{HostId, Problem, VolumeName};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use crate::cluster::tasks::Task;
use crate::cluster::{Cluster, Detachment, HostLink};
use crate::records::{VolumeRecord, volume_key};

/// A home that was told is compared again after so many checks of the hosts.
const MONITORED: u32 = 30;
/// The same for one that could not be told.
const FAILED: u32 = 3;
/// A host that is being let out of a volume, and is to be let in again, is waited for so long.
const LEFT_MAX: Duration = Duration::from_secs(60);

/// So long a home's hosts are let out in one round. The rest waits for the next one.
const LET_OUT_MAX: Duration = Duration::from_secs(10);
/// A home may say anything.
const SURPLUS_MAX: usize = 10_000;

/// Lets a host open a volume at its home.
pub async fn allow(home: &HostLink, volume: &VolumeName, host: &HostId) -> Result<(), Problem> {
    let path = format!("/v1/volumes/{volume}/hosts/{host}");
    home.volume.put(&path, &()).await
}

/// Ends that, when the host has the volume attached no more.
pub async fn disallow(home: &HostLink, volume: &VolumeName, host: &HostId) -> Result<(), Problem> {
    let path = format!("/v1/volumes/{volume}/hosts/{host}");
    home.volume.delete(&path).await
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
    let here: AdmittedHosts = from.volume.get(&path).await?;
    let needed = Needed::now(cluster).await?.hosts_of(volume);
    let hosts: BTreeSet<HostId> =
        here.hosts.into_iter().chain(needed).chain([from.id.clone()]).collect();
    let admissions =
        AdmittedHosts { hosts: hosts.into_iter().filter(|host| *host != to.id).collect() };
    to.volume.put(&path, &admissions).await
}

/// Lets the hosts that were let in at the old home while the volume moved open it at its new one too. An old home that does not
/// answer has let nobody in.
pub async fn allow_those_too(from: &HostLink, to: &HostLink, volume: &VolumeName) {
    let path = format!("/v1/volumes/{volume}/hosts");
    let Ok(mut admissions) = from.volume.get::<AdmittedHosts>(&path).await else { return };
    admissions.hosts.retain(|host| *host != to.id);
    if let Err(problem) = to.volume.put::<()>(&path, &admissions).await {
        tracing::warn!("not all hosts can open volume {volume} at {}: {problem}", to.id);
    }
}

/// What the cluster needs at this moment.
struct Needed {
    /// By volume: the homes that the records of its users name, and the users' hosts.
    volumes: BTreeMap<VolumeName, (BTreeSet<HostId>, BTreeSet<HostId>)>,
}

impl Needed {
    async fn now(cluster: &Cluster) -> Result<Self, Problem> {
        let mut needed = Self::of_vms(cluster);
        for reader in readers(cluster, READERS).await?.into_iter().flatten() {
            let read: Option<VolumeRecord> =
                cluster.records.read(&volume_key(&reader.read)).await?;
            let Some(VolumeRecord { home, .. }) = read else { continue };
            let (homes, hosts) = needed.volumes.entry(reader.read).or_default();
            homes.insert(home);
            hosts.insert(reader.host);
        }
        Ok(needed)
    }

    fn of_vms(cluster: &Cluster) -> Self {
        let mut volumes: BTreeMap<VolumeName, (BTreeSet<HostId>, BTreeSet<HostId>)> =
            BTreeMap::new();
        let moving = cluster.unfinished_migrations();
        for job in cluster.unfinished_jobs() {
            let Some(placement) = &job.placement else { continue };
            // A VM that is off keeps its disks, and nobody opens them.
            if job.kind.is_persistent_vm() && job.job.host.is_none() {
                continue;
            }
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
            let shown = &moved.view;
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

/// What is known of a home.
#[derive(Default)]
struct Sent {
    /// When it was told last, or when it could not be.
    at: Option<Instant>,
    surplus: BTreeSet<Surplus>,
    /// Whether it could not be. An administrator hears of it once.
    failed: bool,
    is_asked: bool,
}

impl Sent {
    fn is_due(&self, monitor: Duration) -> bool {
        let pause = monitor * if self.failed { FAILED } else { MONITORED };
        !self.is_asked && self.at.is_none_or(|at| at.elapsed() >= pause)
    }

    fn note(&mut self, home: &HostId, answer: Result<BTreeSet<Surplus>, Problem>) {
        let had_failed = self.failed;
        let surplus = match answer {
            Ok(surplus) => Some(surplus),
            Err(problem) => {
                if !had_failed {
                    tracing::warn!("host {home} was not told who may open its volumes: {problem}");
                }
                None
            }
        };
        let failed = surplus.is_none();
        let at = Some(Instant::now());
        *self = Self { at, surplus: surplus.unwrap_or_default(), failed, is_asked: false };
    }
}

/// Keeps the homes' lists as they are to be. This runs until the controller ends. Each home has a task of its own: one that
/// answers slowly keeps no other one waiting.
pub async fn keep(cluster: Arc<Cluster>, task: Task) {
    let mut sent: BTreeMap<HostId, Sent> = BTreeMap::new();
    let mut asked = JoinSet::new();
    loop {
        while let Some(done) = asked.try_join_next() {
            let (home, answer): (HostId, _) =
                done.unwrap_or_else(|error| match error.try_into_panic() {
                    Ok(panic) => std::panic::resume_unwind(panic),
                    Err(error) => panic!("nobody ends it: {error}"),
                });
            sent.entry(home.clone()).or_default().note(&home, answer);
        }
        let up = cluster.hosts.up();
        // Who was away may come back as another.
        sent.retain(|id, last| last.is_asked || up.iter().any(|host| host.id == *id));
        let monitor = cluster.timing.monitor;
        let is_due =
            |home: &&Arc<HostLink>| sent.get(&home.id).is_none_or(|last| last.is_due(monitor));
        let due: Vec<_> = up.iter().filter(is_due).cloned().collect();
        if !due.is_empty() {
            let count = due.len();
            let tell_all = async {
                let needed = Needed::now(&cluster).await?;
                for home in due {
                    let last = sent.entry(home.id.clone()).or_default();
                    last.is_asked = true;
                    let before = last.surplus.clone();
                    let (cluster, needed) = (Arc::clone(&cluster), needed.at(&home.id));
                    asked.spawn(async move {
                        let answer = tell(&cluster, &home, needed, &before).await;
                        (home.id.clone(), answer)
                    });
                }
                Ok(format!("tells {count} homes"))
            };
            task.round(tell_all).await;
        }
        tokio::time::sleep(monitor).await;
    }
}

/// Lets in who needs it, and lets out who did not need it the last time either. Returns who seems not to need it now.
async fn tell(
    cluster: &Cluster,
    home: &HostLink,
    mut needed: BTreeMap<VolumeName, Vec<HostId>>,
    before: &BTreeSet<Surplus>,
) -> Result<BTreeSet<Surplus>, Problem> {
    let here: AllAdmittedHosts = home.volume.get("/v1/admissions").await?;
    let key = let_in_key(&home.id);
    let known: LetIn = cluster.records.read(&key).await?.unwrap_or_default();
    let lost = known.hosts.iter().filter(|(volume, host)| {
        !here.volumes.get(volume).is_some_and(|hosts| hosts.contains(host))
    });
    let (again, mut kept) = still_attached(cluster, home, lost.cloned().collect()).await;
    for (volume, host) in again {
        needed.entry(volume.clone()).or_default().push(host.clone());
        kept.insert((volume, host));
    }
    needed.retain(|_, hosts| !hosts.is_empty());
    let ask = AllAdmittedHosts { volumes: needed };
    home.volume.put::<()>("/v1/admissions", &ask).await?;
    // Afterwards: what begins in the meantime is needed too. Who reads a volume is asked.
    let now = Needed::of_vms(cluster);
    let mut surplus = BTreeSet::new();
    let until = Instant::now() + LET_OUT_MAX;
    for (volume, hosts) in here.volumes {
        let needed = now.hosts_of(&volume);
        let is_busy = cluster.index.is_promoted(&volume) || cluster.index.is_changing_home(&volume);
        for host in hosts.into_iter().filter(|host| !is_busy && !needed.contains(host)) {
            let one = (volume.clone(), host);
            let is_old = before.contains(&one);
            if surplus.len() >= SURPLUS_MAX {
                tracing::warn!("host {} lets in more hosts than can be looked at", home.id);
                return Ok(surplus);
            }
            // Hosts that do not answer must not keep those waiting that are to be let in.
            let may_ask = is_old && Instant::now() < until;
            if !may_ask || !let_out(cluster, home, &one).await {
                if is_old || known.hosts.contains(&one) {
                    kept.insert(one.clone());
                }
                surplus.insert(one);
            }
        }
    }
    let now = LetIn { hosts: kept.into_iter().take(SURPLUS_MAX).collect() };
    if now != known {
        cluster.records.put(&key, &now).await?;
    }
    Ok(surplus)
}

/// Hosts that a home lets in without a VM of theirs, because they have a volume attached. Only the home knows them, and one that
/// was restored from a backup may have forgotten them.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct LetIn {
    hosts: BTreeSet<Surplus>,
}

/// The key of the record of [`LetIn`] of a home.
pub fn let_in_key(home: &HostId) -> String {
    format!("let_in/{home}")
}

/// Which of these, which a home lets in no more, have the volume attached from there as before; and those of which that is not
/// known. Whoever was let out has ended that before.
async fn still_attached(
    cluster: &Cluster,
    home: &HostLink,
    lost: BTreeSet<Surplus>,
) -> (BTreeSet<Surplus>, BTreeSet<Surplus>) {
    let hosts: BTreeSet<HostId> = lost.iter().map(|(_, host)| host.clone()).collect();
    let asked =
        hosts.into_iter().filter_map(|host| cluster.hosts.get(&host).ok()).map(async |host| {
            let is_up = cluster.hosts.state(&host.id) == HostState::Up;
            let answer = if is_up {
                host.volume.get::<Vec<Attachment>>("/v1/attachments").await.ok()
            } else {
                None
            };
            (host.id.clone(), answer)
        });
    let answers: BTreeMap<HostId, Option<Vec<Attachment>>> =
        join_all(asked).await.into_iter().collect();
    let (mut attached, mut not_known) = (BTreeSet::new(), BTreeSet::new());
    for (volume, host) in lost {
        // A host that was removed needs nothing.
        let Some(answer) = answers.get(&host) else { continue };
        let Some(answer) = answer else {
            not_known.insert((volume, host));
            continue;
        };
        let is_there = answer
            .iter()
            .any(|one| one.volume == volume && one.nbd_addr == home.addresses.nbd_addr);
        if is_there && !cluster.index.is_being_detached(&host, &volume) {
            attached.insert((volume, host));
        }
    }
    (attached, not_known)
}

/// Returns false if the host may need it after all, or if that is not known.
async fn let_out(cluster: &Cluster, home: &HostLink, (volume, host): &Surplus) -> bool {
    // A removed host needs nothing. Clients of another one may use the volume without a VM; one that is away is not asked.
    let link = cluster.hosts.get(host).ok();
    if link.is_some() && cluster.hosts.state(host) != HostState::Up {
        return false;
    }
    let Detachment::Held(_detaching) = cluster.index.begin_detachment(host, volume) else {
        return false;
    };
    if let Some(link) = link {
        match link.volume.get::<Vec<Attachment>>("/v1/attachments").await {
            Ok(attached) if attached.iter().all(|one| one.volume != *volume) => {}
            _ => return false,
        }
        // What was made at the host itself has no record.
        let asked = async {
            Ok::<_, Problem>(
                reads_elsewhere(&link).await? || is_read(cluster, volume, &link).await?,
            )
        };
        match asked.await {
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

const READERS: &str = "volume_readers/";

/// A volume that is made of an export of another one. Its home reads that one as long as something stands on it there.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Reader {
    read: VolumeName,
    /// The home of the volume that reads it, when it was made.
    host: HostId,
    reader: VolumeName,
}

impl Reader {
    fn key(&self) -> String {
        format!("{}{}", readers_of(&self.read, &self.host), self.reader)
    }
}

fn readers_of(read: &VolumeName, host: &HostId) -> String {
    format!("{READERS}{read}/{host}/")
}

/// `None` stands for a record that can't be read: something reads there.
async fn readers(cluster: &Cluster, prefix: &str) -> Result<Vec<Option<Reader>>, Problem> {
    let all: Vec<serde_json::Value> = cluster.records.list(prefix).await?;
    let read = all.into_iter().map(|record| {
        let reader = serde_json::from_value(record);
        reader.inspect_err(|error| tracing::debug!("a reader's record: {error}")).ok()
    });
    Ok(read.collect())
}

/// Lets the home of a new volume, which has its record already, read what that is made of.
pub async fn allow_reader(
    cluster: &Cluster,
    home: &HostLink,
    read: &VolumeName,
    host: &HostId,
    reader: &VolumeName,
) -> Result<(), Problem> {
    let record = Reader { read: read.clone(), host: host.clone(), reader: reader.clone() };
    cluster.records.put(&record.key(), &record).await?;
    // Whoever lets the host out at this moment may have looked before there was this record.
    let until = Instant::now() + LEFT_MAX;
    while cluster.index.is_being_detached(host, read) {
        if Instant::now() > until {
            let what = format!("can't let host {host} read volume {read}");
            return Err(
                Problem::unavailable(what, "it is still being detached there").next("try again")
            );
        }
        tokio::time::sleep(cluster.timing.monitor.min(Duration::from_millis(100))).await;
    }
    allow(home, read, host).await
}

/// To be called before there is a new volume of this name: nothing reads it yet.
pub async fn forget_readers(cluster: &Cluster, read: &VolumeName) -> Result<(), Problem> {
    cluster.records.remove_all(&format!("{READERS}{read}/")).await
}

/// Whether something at the host reads this volume. What no volume and no image needs any more is forgotten.
pub async fn is_read(
    cluster: &Cluster,
    read: &VolumeName,
    host: &HostLink,
) -> Result<bool, Problem> {
    for reader in readers(cluster, &readers_of(read, &host.id)).await? {
        let Some(reader) = reader else { return Ok(true) };
        let key = volume_key(&reader.reader);
        let is_there = async || -> Result<bool, Problem> {
            Ok(cluster.records.read::<VolumeRecord>(&key).await?.is_some())
        };
        // An image or a clone may have been made of it.
        if is_there().await? || reads_elsewhere(host).await? {
            return Ok(true);
        }
        cluster.records.remove(&reader.key()).await?;
        // Another one of this name may just have been recorded.
        if is_there().await? {
            cluster.records.put(&reader.key(), &reader).await?;
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether anything at the host lacks blocks that are at another one.
async fn reads_elsewhere(host: &HostLink) -> Result<bool, Problem> {
    let volumes: Vec<VolumeInfo> = host.volume.get("/v1/volumes").await?;
    let images: Vec<ImageInfo> = host.volume.get("/v1/images").await?;
    Ok(volumes.iter().any(|volume| volume.remote_bytes > 0)
        || images.iter().any(|image| image.remote.is_some()))
}
