//! Data that may not leave its site ([`perigee_model::leave_site`]). The volume servers enforce it. The
//! controller tells them the sites of the hosts, and asks for nothing that they would refuse.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use futures_util::future::join_all;
use perigee_http::authority_of;
use perigee_model::job::{JobSpec, JobState};
use perigee_model::leave_site::{
    FindLayers, FoundLayers, LeaveSite, LeaveSiteAsker, LeaveSiteSet, SetLayersLeaveSite,
    SetLeaveSite, SetLeaveSiteAs, SiteAddress, SiteMap,
};
use perigee_model::vm::{Machine, NetworkKind, VmSpec};
use perigee_model::volume::{ImageInfo, VolumeInfo};
use perigee_model::{
    DiskRole, HostId, ImageName, JobId, LayerId, Problem, ProblemKind, SiteId, TenantName, VmId,
    VolumeName,
};

use crate::cluster::{Cluster, HostLink};
use crate::records::{ImageRecord, JobRecord, PlacedDisk, Placement, image_key, vm_of};
use crate::storage::{left_behind, replicas, volumes};
use crate::{level, networks};

/// What a policy is about.
#[derive(Debug, Clone)]
pub enum Of {
    Volume(VolumeName),
    Image(ImageName),
}

impl Of {
    fn path(&self) -> String {
        match self {
            Self::Volume(volume) => format!("/v1/volumes/{volume}"),
            Self::Image(image) => format!("/v1/images/{image}"),
        }
    }

    /// What copies of it have: these layers, or what is kept under a volume's name.
    fn find(&self, layers: &[LayerId]) -> FindLayers {
        let volume = match self {
            Self::Volume(volume) => Some(volume.clone()),
            Self::Image(_) => None,
        };
        FindLayers { layers: layers.to_vec(), volume }
    }
}

impl std::fmt::Display for Of {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Volume(volume) => write!(f, "volume {volume}"),
            Self::Image(image) => write!(f, "image {image}"),
        }
    }
}

/// Tells each host that is up the sites of all hosts, unless it was told the same before.
pub async fn tell_sites(cluster: &Cluster) {
    let sites = Arc::new(addresses(&cluster.hosts.all()));
    let up = cluster.hosts.up();
    let asked = up.iter().filter(|host| !cluster.hosts.knows_sites(&host.id, &sites));
    let asked = asked.map(async |host| {
        let hosts = sites.to_vec();
        let here = host.addresses.site.clone();
        let map = SiteMap { here, hosts, teller: cluster.settings.site.clone() };
        match host.volume.put::<()>("/v1/sites", &map).await {
            Ok(()) => cluster.hosts.note_sites(&host.id, &sites),
            Err(problem) => tracing::debug!("host {} is not told the sites: {problem}", host.id),
        }
    });
    join_all(asked).await;
}

/// The addresses of the hosts. An address that hosts of two sites share is left out.
fn addresses(hosts: &[Arc<HostLink>]) -> Vec<SiteAddress> {
    let mut sites: BTreeMap<IpAddr, Option<SiteId>> = BTreeMap::new();
    for host in hosts {
        let all = &host.addresses;
        for address in [&all.nbd_addr, &all.volume_url, &all.agent_url] {
            let Some(address) = ip_of(address) else { continue };
            let site = sites.entry(address).or_insert_with(|| Some(all.site.clone()));
            if site.as_ref() != Some(&all.site) {
                *site = None;
            }
        }
    }
    let known = sites.into_iter().filter_map(|(address, site)| Some((address, site?)));
    known.map(|(address, site)| SiteAddress { address, site }).collect()
}

/// The address in `IP:PORT`, `http://IP:PORT` or `https://IP:PORT`.
fn ip_of(address: &str) -> Option<IpAddr> {
    let (host, _) = authority_of(address).unwrap_or(address).rsplit_once(':')?;
    host.trim_matches(['[', ']']).parse().ok()
}

fn site_of(cluster: &Cluster, host: &HostId) -> Result<SiteId, Problem> {
    Ok(cluster.hosts.get(host)?.addresses.site.clone())
}

/// Refuses to bring a confined volume to another site. If its home does not answer now, the home itself refuses later.
///
/// # Errors
/// `Conflict`, which names the volume, its policy and the sites.
pub async fn check_move(
    cluster: &Cluster,
    volume: &VolumeName,
    from: &HostId,
    to: &HostId,
) -> Result<(), Problem> {
    let (here, there) = (site_of(cluster, from)?, site_of(cluster, to)?);
    if here == there {
        return Ok(());
    }
    let home = cluster.hosts.get(from)?;
    match home.volume.get::<VolumeInfo>(&format!("/v1/volumes/{volume}")).await {
        Ok(info) if info.leave_site.is_never() => {
            let what = format!("can't move volume {volume} to {to}");
            let why = format!(
                "its policy is leave-site: never; it is at site {here}, and {to} is at {there}"
            );
            Err(Problem::conflict(what, why).next(
                "use it where it is: a VM elsewhere reads and writes it there, over an encrypted link",
            ))
        }
        _ => Ok(()),
    }
}

/// Whether the controller is at the host's site, as its option `--site` says.
pub fn is_controller_at(cluster: &Cluster, host: &HostId) -> bool {
    let site = cluster.settings.site.as_ref();
    site.is_some() && site_of(cluster, host).ok().as_ref() == site
}

/// Whether what the job prints stays with its VM: what it writes may not leave a site, and its VM or the
/// controller is not at that site.
pub fn hides_output(cluster: &Cluster, disks: &[PlacedDisk], at: &HostId) -> bool {
    let site = |host: &HostId| site_of(cluster, host).ok();
    let here = site(at).filter(|here| cluster.settings.site.as_ref() == Some(here));
    // A VM without a job has no output. A job's root disk may have an image's confined data, and what the job writes may leave all the same.
    let of = |role| disks.iter().find(move |disk| disk.role == role);
    let written = of(DiskRole::Output).or_else(|| of(DiskRole::Root));
    written.is_some_and(|disk| {
        disk.leave_site.is_never() && (here.is_none() || site(&disk.home) != here)
    })
}

/// Whether a VM at this host uses confined data of another site. A home that is not known any more counts as one.
pub fn is_far_from_confined(cluster: &Cluster, disks: &[PlacedDisk], at: &HostId) -> bool {
    let site = |host: &HostId| site_of(cluster, host).ok();
    let here = site(at);
    let mut confined = disks.iter().filter(|disk| disk.leave_site.is_never());
    confined.any(|disk| here.is_none() || site(&disk.home) != here)
}

/// Whether the memory of this record's VM may have to be locked at another site, to which a person moves it. A VM whose memory has a range
/// is never moved there, and a VM of a gang only if the gang's file lets its VMs go.
pub fn may_be_locked(record: &JobRecord, placement: &Placement) -> bool {
    let is_confined = placement.disks.iter().any(|disk| disk.leave_site.is_never());
    let may_go = record.kind.member().is_none() || !record.job.spec.ranks.is_never();
    is_confined && record.job.spec.memory_max_bytes.is_none() && may_go
}

/// Refuses to move a VM to another site than that of its confined data, unless a person asks for it, or the file of its gang lets its VMs go: its
/// memory has some of the data. There the memory is locked, as that of a VM that starts there.
///
/// # Errors
/// `Conflict`, which names a volume and the sites.
pub fn check_migration(
    cluster: &Cluster,
    record: &JobRecord,
    (from, to): (&HostId, &HostId),
    is_asked: bool,
) -> Result<(), Problem> {
    let (here, there) = (site_of(cluster, from)?, site_of(cluster, to)?);
    let Some(placement) = &record.placement else { return Ok(()) };
    if here == there || !is_far_from_confined(cluster, &placement.disks, to) {
        return Ok(());
    }
    let may_be_locked = may_be_locked(record, placement);
    let is_wanted = is_asked || record.kind.member().is_some();
    let confined = placement.disks.iter().find(|disk| disk.leave_site.is_never());
    let Some(disk) = confined.filter(|_| !(is_wanted && may_be_locked)) else { return Ok(()) };
    let why = format!(
        "it uses volume {}, whose policy is leave-site: never, so its memory may have some of that; \
         {from} is at site {here} and {to} at {there}, and a live migration brings the memory there",
        disk.volume
    );
    let refused = Problem::conflict(format!("can't move it to {to}"), why);
    Err(match may_be_locked {
        true => {
            let vm = vm_of(&record.job.id);
            refused.next(format!("let it run where it is, or ask: perigee vm move {vm} {to}"))
        }
        false => refused.next("let it run where it is: its memory can't be locked there"),
    })
}

/// The spec with which the VM arrives at this host. If the VM uses confined data of another site, its memory and what it prints stay off the
/// disks there.
///
/// # Errors
/// `Conflict` if the VM's machine does not allow it.
pub fn confine_arriving(
    cluster: &Cluster,
    disks: &[PlacedDisk],
    spec: VmSpec,
    to: &HostId,
) -> Result<VmSpec, Problem> {
    let locks_memory = is_far_from_confined(cluster, disks, to);
    let keeps_free_memory = spec.machine.keeps_free_memory || spec.locks_memory;
    if locks_memory && !keeps_free_memory {
        let what = format!("can't move VM {} to {to}", spec.vm);
        let why = "its memory would have to be locked there, and it was started by an earlier version of Perigee";
        return Err(Problem::conflict(what, why).next("start it again first"));
    }
    Ok(VmSpec {
        locks_memory,
        hides_output: hides_output(cluster, disks, to),
        machine: Machine { keeps_free_memory, ..spec.machine },
        ..spec
    })
}

/// What a job uses that may not leave its site.
#[derive(Debug, Clone, Default)]
pub struct Confined {
    /// Its data volumes that may not leave, by the names in the job file.
    pub volumes: Vec<VolumeName>,
    /// A host that has its image, if the image may not leave.
    pub image_at: Option<HostId>,
    /// A host at the site of the data, where what the job writes stays. `None`: it may be anywhere.
    pub writes_at: Option<HostId>,
    /// Whether all VMs of the job have to be at that site too, if it has several VMs.
    pub holds_ranks: bool,
}

impl Confined {
    /// Whether the job has data that may not leave its site.
    pub fn is_any(&self) -> bool {
        !self.volumes.is_empty() || self.image_at.is_some()
    }
}

/// # Errors
/// `Conflict` when the data are at different sites, when the job writes a volume that may leave its site, or when its VM
/// has a network card that leads anywhere; for a gang also when what it writes is to leave its site.
pub async fn confined_of(cluster: &Cluster, spec: &JobSpec) -> Result<Confined, Problem> {
    let mut confined: Option<(String, HostId)> = None;
    let (mut free, mut found, mut volumes) = (None, Vec::new(), Vec::new());
    let image_at = image_confined_at(cluster, &spec.image).await?;
    if let Some(at) = &image_at {
        found.push((format!("image {}", spec.image), at.clone()));
    }
    for volume in &spec.volumes {
        let record = volumes::find(cluster, &volume.volume).await?;
        let is_confined = is_confined_at(cluster, &record.home, &volume.volume).await?;
        if is_confined {
            found.push((format!("volume {}", volume.volume), record.home));
            volumes.push(volume.volume.clone());
        } else if volume.access == perigee_model::job::Access::Write {
            free = Some(volume.volume.clone());
        }
    }
    let what = || format!("can't place job {}", spec.name);
    // Where nothing is said, such a VM has no card, and several VMs have a network that leads nowhere else.
    // The version before would let people log in to VMs of a gang.
    let leads_out = leads_out(&spec.network)
        || (matches!(spec.network, NetworkKind::Cluster(_))
            && level::in_force(&cluster.records).await? < level::DATA_OF_GANGS);
    if let (Some((name, _)), true) = (found.first(), leads_out) {
        let why = format!("{name} may not leave its site, and the job could send it anywhere");
        return Err(Problem::conflict(what(), why)
            .next("say `network: none` in the job file, or use data that may leave"));
    }
    if let (Some((name, _)), true, LeaveSite::Allowed) =
        (found.first(), spec.is_gang(), spec.writes)
    {
        let why = format!(
            "{name} may not leave its site, and a VM of the job may have it from another one"
        );
        return Err(Problem::conflict(what(), why)
            .next("leave `writes` out: what several VMs write stays with their data"));
    }
    let holds_ranks = spec.is_gang() && !may_have_ranks_elsewhere(cluster, spec).await?;
    if spec.writes == LeaveSite::Allowed {
        return Ok(Confined { volumes, image_at, writes_at: None, holds_ranks });
    }
    let next =
        "or say `writes: {leave-site: allowed}` in the job file, if what it writes may leave";
    for (name, home) in found {
        let site = site_of(cluster, &home)?;
        match &confined {
            Some((first, at)) if site_of(cluster, at)? != site => {
                let why = format!(
                    "{first} and {name} may not leave their sites, {} and {site}, and what it writes \
                     could carry both",
                    site_of(cluster, at)?
                );
                return Err(Problem::conflict(what(), why).next(format!("use one of them, {next}")));
            }
            Some(_) => {}
            None => confined = Some((name, home)),
        }
    }
    if let (Some((name, _)), Some(free)) = (&confined, free) {
        let why = format!(
            "{name} may not leave its site, and the job could carry it to volume {free}, which may"
        );
        let confine =
            format!("confine that one as well: perigee volume update {free} --leave-site never, ");
        return Err(Problem::conflict(what(), why).next(confine + next));
    }
    Ok(Confined { volumes, image_at, writes_at: confined.map(|(_, home)| home), holds_ranks })
}

/// Whether the job's file lets its VMs be at other sites than its data, and every version that may drive the job knows that.
async fn may_have_ranks_elsewhere(cluster: &Cluster, spec: &JobSpec) -> Result<bool, Problem> {
    Ok(!spec.ranks.is_never() && level::in_force(&cluster.records).await? >= level::RANKS_ELSEWHERE)
}

/// Whether a card in such a network leads anywhere else than to the other VMs of a gang.
fn leads_out(network: &NetworkKind) -> bool {
    match network {
        NetworkKind::None | NetworkKind::Default => false,
        NetworkKind::Cluster(name) => !networks::is_own(name),
        NetworkKind::User | NetworkKind::Bridge(_) => true,
    }
}

/// The site where all VMs of a gang have to be, because it uses data that may not leave that site; `None`: any will do.
///
/// # Errors
/// As [`confined_of`].
pub async fn site_of_gang(cluster: &Cluster, spec: &JobSpec) -> Result<Option<SiteId>, Problem> {
    if !spec.is_gang() {
        return Ok(None);
    }
    let confined = confined_of(cluster, spec).await?;
    let home = confined.writes_at.filter(|_| confined.holds_ranks);
    home.map(|home| site_of(cluster, &home)).transpose()
}

/// Refuses hosts that are not at the site of the gang's data.
///
/// # Errors
/// `Conflict`, which names the first one.
pub fn check_hosts(
    cluster: &Cluster,
    confined: &Confined,
    job: &JobId,
    hosts: &[HostId],
) -> Result<(), Problem> {
    let Some(home) = confined.writes_at.as_ref().filter(|_| confined.holds_ranks) else {
        return Ok(());
    };
    let site = site_of(cluster, home)?;
    for host in hosts {
        let there = site_of(cluster, host)?;
        if there != site {
            let why = format!(
                "data of it may not leave site {site} since it was placed, and {host} is at {there}"
            );
            return Err(
                Problem::conflict(format!("can't start job {job}"), why).next("submit it again")
            );
        }
    }
    Ok(())
}

/// Refuses a way into the VM's network: who asks may be at any site.
///
/// # Errors
/// `Conflict` if the VM uses data that may not leave their site.
pub fn check_way_in(vm: &VmId, record: &JobRecord) -> Result<(), Problem> {
    let disks = record.placement.iter().flat_map(|placement| &placement.disks);
    if !disks.into_iter().any(|disk| disk.leave_site.is_never()) {
        return Ok(());
    }
    let why =
        "it uses data that may not leave their site, and only the other VMs of its job reach it";
    Err(Problem::conflict(format!("can't log in to VM {vm}"), why)
        .next("have the job write what you need to a file in /output"))
}

/// Asks the volume's home: what was known of the volume before may not be so any more.
async fn is_confined_at(
    cluster: &Cluster,
    home: &HostId,
    volume: &VolumeName,
) -> Result<bool, Problem> {
    let home = cluster.hosts.get(home)?;
    let info: VolumeInfo = home.volume.get(&format!("/v1/volumes/{volume}")).await?;
    Ok(info.leave_site.is_never())
}

/// A host that has an image which is confined; `None` for one that may leave.
async fn image_confined_at(
    cluster: &Cluster,
    image: &ImageName,
) -> Result<Option<HostId>, Problem> {
    let record = cluster.records.read::<ImageRecord>(&image_key(image)).await?;
    if !record.is_some_and(|record| record.leave_site.is_never()) {
        return Ok(None);
    }
    let path = format!("/v1/images/{image}");
    for host in cluster.hosts.up() {
        if host.volume.get::<ImageInfo>(&path).await.is_ok() {
            return Ok(Some(host.id.clone()));
        }
    }
    let why = "it may not leave its site, and no host that is up has it";
    Err(Problem::unavailable(format!("image {image}"), why).next("see `perigee host list`"))
}

/// Changes whether a volume or an image may leave its site. Its home confines it first, so that no new copies are
/// made. Then copies are looked for.
///
/// # Errors
/// `Conflict` when it is to be confined and another site has a copy; `Unavailable` when a host that may have one
/// does not answer; `Invalid` when it is released and that is not confirmed; `Forbidden` when it is released and is not
/// the asker's alone. What is not the asker's is not named.
pub async fn set(
    cluster: &Cluster,
    of: &Of,
    ask: SetLeaveSite,
    asker: Option<LeaveSiteAsker>,
) -> Result<LeaveSiteSet, Problem> {
    let homes = homes(cluster, of).await?;
    let Some(first) = homes.first() else {
        return Err(Problem::not_found(format!("{of}"), "no host that is up has it"));
    };
    let site = first.addresses.site.clone();
    let what = format!("can't change whether {of} may leave its site");
    let path = format!("{}/leave-site", of.path());
    if ask.leave_site == LeaveSite::Never
        && let Some(other) = homes.iter().find(|host| host.addresses.site != site)
    {
        return Err(copies(&what, &[format!("{of} at {} and {}", first.id, other.id)]));
    }
    if let (LeaveSite::Never, Of::Volume(volume)) = (ask.leave_site, of) {
        left_behind::drop_beyond(cluster, &site, volume).await?;
        check_replicas(cluster, &what, volume, &site).await?;
    }
    let passed_on = SetLeaveSiteAs { set: ask, asker: asker.clone() };
    let mut set: LeaveSiteSet = first.volume.put(&path, &passed_on).await?;
    let find = of.find(&set.layers);
    let asked = Asked { leave_site: ask.leave_site, asker: asker.as_ref() };
    let mut done = look(cluster, first, &find, asked).await;
    let was_confined = set.before.is_never();
    if ask.leave_site.is_never() {
        // Also if it was confined before: an earlier request may have been cut here.
        done = done.and_then(|()| check_jobs(cluster, of, &set, asker.as_ref()));
        if done.is_err() && !was_confined {
            undo(cluster, first, &find).await;
        }
    }
    let done = match done {
        Err(problem) if ask.leave_site == LeaveSite::Allowed => {
            tracing::warn!("{of} stays confined at some hosts: {problem}");
            Ok(())
        }
        done => done.map_err(|problem| Problem { what, ..problem }),
    };
    // What was confined before stays confined, whatever stands against it.
    if let Of::Image(image) = of
        && (done.is_ok() || was_confined)
    {
        let change = |record: Option<ImageRecord>| {
            let record = record.unwrap_or_else(|| ImageRecord::new(image.clone()));
            ImageRecord { leave_site: ask.leave_site, ..record }
        };
        cluster.records.update(&image_key(image), change).await?;
    }
    done?;
    if let Some(asker) = &asker {
        set.also.retain(|user| asker.sees(user));
        set.may_leave.retain(|user| asker.sees(user));
    }
    Ok(set)
}

/// A policy, and who wants it.
#[derive(Debug, Clone, Copy)]
struct Asked<'a> {
    leave_site: LeaveSite,
    asker: Option<&'a LeaveSiteAsker>,
}

/// Who asks, for whoever may not change the data of all: its tenant, with the images of that which all tenants use.
///
/// # Errors
/// When the records can't be read.
pub async fn asker(cluster: &Cluster, tenant: &TenantName) -> Result<LeaveSiteAsker, Problem> {
    let tenant = tenant.clone();
    let mut shared = Vec::new();
    if tenant == TenantName::default() {
        let images = cluster.records.list::<ImageRecord>("images/").await?;
        shared.extend(images.into_iter().filter(|image| image.shared).map(|image| image.name));
    }
    Ok(LeaveSiteAsker { tenant, shared })
}

/// The hosts that have it under its name.
async fn homes(cluster: &Cluster, of: &Of) -> Result<Vec<Arc<HostLink>>, Problem> {
    match of {
        Of::Volume(volume) => {
            let home = volumes::settled_home(cluster, volume).await?;
            Ok(vec![volumes::reachable(cluster, &home)?])
        }
        Of::Image(_) => {
            let hosts = cluster.hosts.up();
            let path = of.path();
            let asked = hosts.iter().map(|host| host.volume.get::<ImageInfo>(&path));
            let found = hosts.iter().zip(join_all(asked).await);
            Ok(found
                .filter(|(_, answer)| answer.is_ok())
                .map(|(host, _)| Arc::clone(host))
                .collect())
        }
    }
}

/// A replica at another site is a copy, whatever ids its layers have.
async fn check_replicas(
    cluster: &Cluster,
    what: &str,
    volume: &VolumeName,
    site: &SiteId,
) -> Result<(), Problem> {
    let replicas = replicas::of_volume(cluster, volume).await?;
    let Some(replica) = replicas.iter().find(|replica| replica.site != *site) else {
        return Ok(());
    };
    let why = format!("it has a replica at {}, at site {}", replica.host, replica.site);
    Err(Problem::conflict(what, why).next(format!(
        "drop the replica first: perigee volume replicate {volume} --to {} --stop",
        replica.site
    )))
}

/// Refuses while a job uses the data, or something else that stands on them. What the policy asks of the job's
/// VM is decided when the VM starts. A job that gets its host after this finds the data confined. So has one that was
/// placed when they were confined already.
fn check_jobs(
    cluster: &Cluster,
    of: &Of,
    set: &LeaveSiteSet,
    asker: Option<&LeaveSiteAsker>,
) -> Result<(), Problem> {
    let of = of.to_string();
    let is_confined = |name: String| name == of || set.also.contains(&name);
    let jobs = cluster.unfinished_jobs();
    let user = jobs.iter().find(|record| {
        let (job, placement) = (&record.job, record.placement.as_ref());
        // A gang has hosts before its members have records, which then count.
        let is_being_made = record.kind.gang().is_some_and(|gang| !gang.state.made)
            && job.state != JobState::Queued;
        let is_placed =
            placement.is_some() || is_being_made || cluster.index.grant_of(&job.id).is_some();
        let wanted = job.spec.volumes.iter().map(|volume| &volume.volume);
        let placed = placement.iter().flat_map(|placement| &placement.disks);
        let mut volumes = wanted.chain(placed.map(|disk| &disk.volume));
        is_placed
            && (is_confined(format!("image {}", job.spec.image))
                || volumes.any(|volume| is_confined(format!("volume {volume}"))))
            && !(set.before.is_never() && found_confined(record, is_confined))
    });
    let Some(user) = user else { return Ok(()) };
    let is_seen = asker.is_none_or(|asker| asker.tenant.owns(user.job.id.as_str()));
    let user = if is_seen { user.in_words() } else { "a job or VM".to_owned() };
    let why = format!("{user} uses it, and was started while it could leave its site");
    Err(Problem::conflict("can't confine it to its site", why).next("wait for its end, or end it"))
}

/// Whether the job was placed as one that uses these data confined.
fn found_confined(record: &JobRecord, is_confined: impl Fn(String) -> bool) -> bool {
    let Some(placement) = &record.placement else { return false };
    let leads_out = leads_out(&networks::kind_of(record));
    let spec = &record.job.spec;
    let mut unaware = placement.disks.iter().filter(|disk| !disk.leave_site.is_never());
    let is_wrong = |disk: &PlacedDisk| {
        if disk.role == DiskRole::Root {
            // What it writes on an image may leave if its file says so.
            let of_image = is_confined(format!("image {}", spec.image));
            return of_image && spec.writes.is_never();
        }
        let mut names = std::iter::once(&disk.volume).chain(&disk.data_of);
        names.any(|name| is_confined(format!("volume {name}")))
    };
    !leads_out && !unaware.any(is_wrong)
}

fn copies(what: &str, copies: &[String]) -> Problem {
    let why = format!("there are copies at other sites: {}", copies.join("; "));
    Problem::conflict(what, why).next("delete them there first")
}

/// Has the hosts of the home's site confine or release the layers. For layers that are confined, also looks for
/// copies at other sites.
async fn look(
    cluster: &Cluster,
    home: &HostLink,
    find: &FindLayers,
    asked: Asked<'_>,
) -> Result<(), Problem> {
    let what = "can't look for copies";
    let mut elsewhere = Vec::new();
    for host in cluster.hosts.all().iter().filter(|host| host.id != home.id) {
        let found = if host.addresses.site == home.addresses.site {
            mark(host, find, asked).await.map(|()| None)
        } else if asked.leave_site == LeaveSite::Never {
            host.volume.post::<FoundLayers>("/v1/layers/find", find).await.map(Some)
        } else {
            continue;
        };
        match found {
            Ok(Some(found)) if !found.layers.is_empty() => {
                let is_seen = |user: &&String| asked.asker.is_none_or(|asker| asker.sees(user));
                let seen: Vec<&str> =
                    found.users.iter().filter(is_seen).map(String::as_str).collect();
                let users = match &seen[..] {
                    [] if found.users.is_empty() => "layers that a move has left".to_owned(),
                    [] => "something of others".to_owned(),
                    seen => seen.join(", "),
                };
                elsewhere.push(format!("{users} at {}", host.id));
            }
            Ok(_) => {}
            Err(problem) => {
                let why = format!("host {} may have one: {}", host.id, problem.why);
                return Err(Problem::new(ProblemKind::Unavailable, what, why)
                    .next("bring the host back, or remove it if it is gone for good"));
            }
        }
    }
    if elsewhere.is_empty() { Ok(()) } else { Err(copies(what, &elsewhere)) }
}

/// Has a host confine or release the layers that it has.
async fn mark(host: &HostLink, find: &FindLayers, asked: Asked<'_>) -> Result<(), Problem> {
    let (leave_site, asker) = (asked.leave_site, asked.asker.cloned());
    let ask = SetLayersLeaveSite { of: find.clone(), leave_site, asker };
    host.volume.put("/v1/layers/leave-site", &ask).await
}

/// What was confined for a moment may leave again.
async fn undo(cluster: &Cluster, home: &HostLink, find: &FindLayers) {
    let near = cluster.hosts.all().into_iter();
    let asked = Asked { leave_site: LeaveSite::Allowed, asker: None };
    for host in near.filter(|host| host.addresses.site == home.addresses.site) {
        if let Err(problem) = mark(&host, find, asked).await {
            tracing::warn!("host {} still confines what was not to be: {problem}", host.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_found_in_a_url_and_beside_a_port() {
        let address = |text: &str| ip_of(text).map(|ip| ip.to_string());
        assert_eq!(address("http://10.0.0.1:8080"), Some("10.0.0.1".to_owned()));
        assert_eq!(address("10.0.0.1:10809"), Some("10.0.0.1".to_owned()));
        assert_eq!(address("[fd00::1]:10809"), Some("fd00::1".to_owned()));
        assert_eq!(address("home1:10809"), None);
    }
}
