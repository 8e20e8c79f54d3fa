//! The links between hosts: round-trip time, rate and the latency of a block read, measured by the hosts.
//!
//! One task measures one link after another, because concurrent measurements would disturb each other. Code
//! that needs a figure asks this task and waits for its answer, without holding locks. For each ordered pair
//! of sites one pair of hosts is measured: when both sites are up for the first time, when a plan needs the
//! link and its figures are old, and on request.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use perigee_model::job::Link;
use perigee_model::vm::{LinkProbe, ProbeLink};
use perigee_model::volume::{AllAdmittedHosts, BlockProbe, ImageInfo, ProbeBlocks, VolumeInfo};
use perigee_model::{HostId, Problem, SiteId};
use perigee_planner::queue::NotMeasured;
use perigee_planner::{Cluster as Facts, LinkFacts, LinkForMoves};
use tokio::sync::oneshot;

use crate::clock::now_ms;
use crate::cluster::tasks::Task;
use crate::cluster::{Ask, Cluster, HostLink, Local};
use crate::storage::images;

/// The size of a block read in a probe: PostgreSQL's page, and close to what guests send.
pub const PROBE_REQUEST_BYTES: u32 = 8192;

const PROBE_REQUESTS: u32 = 64;

/// Enough for a rate on a fast link, and short on a slow one.
const PROBE_LENGTH_BYTES: u64 = 8 << 20;

/// A plan measures links again whose figures are older.
const FRESH_MS: u64 = 10 * 60 * 1000;

/// The same for links that something uses: a measurement disturbs that, and shows less than the link carries.
const IN_USE_FRESH_MS: u64 = 24 * 60 * 60 * 1000;

/// A plan measures again after this time where there was nothing to read.
const EMPTY_MS: u64 = 30 * 1000;

/// How many exports of a host are tried at most.
const EXPORTS_TRIED_MAX: usize = 4;

/// The longest wait for a measurement.
const MEASURE_DEADLINE: Duration = Duration::from_secs(120);

/// The longest time for the reads of blocks in one. A host whose disk does not answer holds up no other measurement.
const BLOCKS_DEADLINE: Duration = Duration::from_secs(60);

/// The last measurement of the direction from one host to the other, which the reading host makes. Any pair of
/// hosts of the same sites counts.
pub fn toward(cluster: &Cluster, from: &HostId, to: &HostId) -> Option<LinkProbe> {
    let exact = cluster.links.get(to, from);
    exact.or_else(|| of_sites(cluster, to, from).into_iter().next()).map(|link| link.probe)
}

/// Drops all measurements of a host that is removed. What they say of its site is kept: hosts may be rented there again.
///
/// # Errors
/// If the store fails.
pub async fn forget(cluster: &Cluster, host: &HostId) -> Result<(), Problem> {
    let site_of = |host: &HostId| cluster.hosts.get(host).ok().map(|h| h.addresses.site.clone());
    let of_host = cluster.links.all().into_iter().filter(|l| l.from == *host || l.to == *host);
    for link in of_host {
        let (Some(from), Some(to)) = (site_of(&link.from), site_of(&link.to)) else { continue };
        cluster.links.keep_of_sites(&cluster.records, (from, to), link).await?;
    }
    cluster.links.forget(&cluster.records, host).await
}

/// Adds to the facts what was measured between sites whose hosts are removed, as far as nothing was measured since.
pub fn add_remembered(cluster: &Cluster, facts: &mut Facts) {
    let known: BTreeSet<(SiteId, SiteId)> =
        facts.links.iter().map(|link| (link.from_site.clone(), link.to_site.clone())).collect();
    let remembered = cluster.links.of_sites().into_iter().filter(|(of, _)| !known.contains(of));
    facts.links.extend(remembered.map(|((from_site, to_site), link)| LinkFacts {
        from: link.from,
        to: link.to,
        from_site,
        to_site,
        probe: link.probe,
        blocks: link.blocks,
        moves: LinkForMoves::default(),
    }));
}

/// Measures now, once for each ordered pair of sites.
///
/// # Errors
/// If a host that is up does not measure. Earlier measurements are kept.
pub async fn probe_all(cluster: &Cluster) -> Result<Vec<Link>, Problem> {
    let sites = by_site(cluster);
    let now = now_ms();
    for hosts in sites.values() {
        for host in hosts {
            ask(cluster, host, host, now).await?;
        }
    }
    for (from, to) in pairs(&sites) {
        ask(cluster, &from, &to, now).await?;
    }
    Ok(cluster.links.all())
}

/// The reported hosts that are up, by their sites.
fn by_site(cluster: &Cluster) -> BTreeMap<SiteId, Vec<HostId>> {
    let mut sites: BTreeMap<SiteId, Vec<HostId>> = BTreeMap::new();
    for host in cluster.hosts.up() {
        if cluster.hosts.report(&host.id).is_some() {
            sites.entry(host.addresses.site.clone()).or_default().push(host.id.clone());
        }
    }
    sites
}

/// One pair of different hosts for each ordered pair of sites, also of a site with itself.
fn pairs(sites: &BTreeMap<SiteId, Vec<HostId>>) -> Vec<(HostId, HostId)> {
    let mut pairs = Vec::new();
    for (from_site, from) in sites {
        for (to_site, to) in sites {
            let to = if from_site == to_site { to.get(1) } else { to.first() };
            if let (Some(from), Some(to)) = (from.first(), to) {
                pairs.push((from.clone(), to.clone()));
                if from_site == to_site {
                    pairs.push((to.clone(), from.clone()));
                }
            }
        }
    }
    pairs
}

/// The missing measurements for a plan with these homes, as [`NotMeasured::of_homes`] has them.
pub fn missing(cluster: &Cluster, homes: &[HostId]) -> Vec<(HostId, HostId)> {
    let hosts = cluster.hosts.up();
    let sites: BTreeMap<&HostId, &SiteId> =
        hosts.iter().map(|host| (&host.id, &host.addresses.site)).collect();
    not_measured(cluster).of_homes(homes, |host| sites.get(host).copied())
}

/// All measurements that are missing between the hosts that are up.
pub fn not_measured(cluster: &Cluster) -> NotMeasured {
    let site_of = |host: &HostId| cluster.hosts.get(host).ok().map(|h| h.addresses.site.clone());
    let does_count = |link: &Link| counts(link.blocks.is_some(), link.measured_ms, 0);
    let known = cluster.links.all().into_iter().filter(does_count);
    let known: BTreeSet<_> = known.map(|link| (site_of(&link.from), site_of(&link.to))).collect();
    let mut between = pairs(&by_site(cluster));
    between.retain(|(from, to)| !known.contains(&(site_of(from), site_of(to))));
    let up = cluster.hosts.up().into_iter().map(|host| host.id.clone());
    let at = up.filter(|host| !is_known(cluster, host, host, 0)).collect();
    NotMeasured { at, between }
}

/// Whether a figure that was measured then is one since the oldest time. If there was nothing to read before, there may be
/// something now. What was measured while the clock was ahead is not new.
fn counts(has_blocks: bool, measured_ms: u64, oldest_ms: u64) -> bool {
    let now = now_ms();
    match has_blocks {
        true if oldest_ms == 0 => true,
        true => (oldest_ms..=now).contains(&measured_ms),
        false => (oldest_ms.max(now.saturating_sub(EMPTY_MS))..=now).contains(&measured_ms),
    }
}

/// Whether the figure was measured since then; for a link, by any hosts of these sites.
fn is_known(cluster: &Cluster, from: &HostId, to: &HostId, oldest_ms: u64) -> bool {
    let counts = |has_blocks, measured_ms| counts(has_blocks, measured_ms, oldest_ms);
    if from == to {
        let local = cluster.links.local(from);
        return local.is_some_and(|local| counts(local.blocks.is_some(), local.measured_ms));
    }
    if oldest_ms > 0 {
        let link = cluster.links.get(from, to);
        return link.is_some_and(|link| counts(link.blocks.is_some(), link.measured_ms));
    }
    let counts = |link: &Link| counts(link.blocks.is_some(), link.measured_ms);
    of_sites(cluster, from, to).iter().any(counts)
}

/// The measurements between any hosts of the sites of these two.
fn of_sites(cluster: &Cluster, from: &HostId, to: &HostId) -> Vec<Link> {
    let site = |host: &HostId| cluster.hosts.get(host).ok().map(|h| h.addresses.site.clone());
    let (from_site, to_site) = (site(from), site(to));
    let mut links = cluster.links.all();
    links.retain(|link| site(&link.from) == from_site && site(&link.to) == to_site);
    links
}

/// Measures what a plan with these homes needs. Known but old figures are measured again; those of links that something
/// uses, only once a day.
///
/// A host that fails to measure does not prevent the others' plans: the first problem is returned.
pub async fn ensure(cluster: &Cluster, homes: &[HostId]) -> Option<Problem> {
    let in_use = match super::shared_links::in_use(cluster).await {
        Ok(in_use) => in_use,
        Err(problem) => return Some(problem),
    };
    let now = now_ms();
    let missing = missing(cluster, homes).into_iter().map(|pair| (pair, 0));
    let mut wanted: BTreeMap<(HostId, HostId), u64> = missing.collect();
    for (from, to) in pairs(&by_site(cluster)) {
        let due_since = if in_use.has(cluster, &from, &to) {
            let oldest_ms = now.saturating_sub(IN_USE_FRESH_MS);
            let measured_ms = of_sites(cluster, &from, &to).iter().map(|l| l.measured_ms).max();
            measured_ms.is_some_and(|measured_ms| measured_ms < oldest_ms).then_some(oldest_ms)
        } else {
            let oldest_ms = now.saturating_sub(FRESH_MS);
            (!is_known(cluster, &from, &to, oldest_ms)).then_some(oldest_ms)
        };
        if let Some(oldest_ms) = due_since {
            wanted.insert((from, to), oldest_ms);
        }
    }
    let mut failed = None;
    for ((from, to), oldest_ms) in wanted {
        if let Err(problem) = ask(cluster, &from, &to, oldest_ms).await {
            tracing::warn!("can't measure between {from} and {to}: {problem}");
            failed.get_or_insert(problem);
        }
    }
    failed
}

/// Requests a measurement, and waits for it.
async fn ask(cluster: &Cluster, from: &HostId, to: &HostId, since_ms: u64) -> Result<(), Problem> {
    let what = || format!("can't measure the link from {from} to {to}");
    let (answer, answered) = oneshot::channel();
    want(cluster, from, to, since_ms, Some(answer));
    match tokio::time::timeout(MEASURE_DEADLINE, answered).await {
        Ok(Ok(measured)) => measured,
        Ok(Err(_)) => Err(Problem::unavailable(what(), "the controller is stopping")),
        Err(_) => {
            let why = format!(
                "the measurement of other links took longer than {} s",
                MEASURE_DEADLINE.as_secs()
            );
            Err(Problem::unavailable(what(), why))
        }
    }
}

/// Requests a measurement.
fn want(
    cluster: &Cluster,
    from: &HostId,
    to: &HostId,
    oldest_ms: u64,
    answer: Option<oneshot::Sender<Result<(), Problem>>>,
) {
    cluster.links.ask(Ask { from: from.clone(), to: to.clone(), oldest_ms, answer });
}

/// Requests a missing measurement, if nobody has a short time ago: many jobs wait for the same one, and one that fails takes
/// long. Nobody waits for the answer.
pub fn want_missing(cluster: &Cluster, from: &HostId, to: &HostId) {
    if cluster.links.is_wanted_anew(from, to, cluster.timing.links_again) {
        want(cluster, from, to, 0, None);
    }
}

/// Measures on request, and also measures links between sites that were never measured.
pub async fn run(cluster: Arc<Cluster>, task: Task) {
    loop {
        tokio::select! {
            ask = cluster.links.next_ask() => {
                let answer = async {
                    let measured = measure(&cluster, &ask.from, &ask.to, ask.oldest_ms).await;
                    if let Err(problem) = &measured {
                        cluster.links.fail_others(&ask.from, &ask.to, problem);
                    }
                    let did = format!("measured from {} to {}, as somebody asked", ask.from, ask.to);
                    ask.answer(measured.clone());
                    cluster.index.changed.notify_one();
                    measured.map(|()| did)
                };
                task.round(answer).await;
            }
            () = tokio::time::sleep(cluster.timing.monitor) => {
                let look = async {
                    measure_one_new_link(&cluster).await?;
                    Ok("looked for links that nobody has measured".to_owned())
                };
                task.round(look).await;
            }
        }
    }
}

async fn measure(
    cluster: &Cluster,
    from: &HostId,
    to: &HostId,
    oldest_ms: u64,
) -> Result<(), Problem> {
    let (from, to) = (cluster.hosts.get(from)?, cluster.hosts.get(to)?);
    if is_known(cluster, &from.id, &to.id, oldest_ms) {
        return Ok(());
    }
    if from.id == to.id {
        return probe_local(cluster, &from).await;
    }
    // Where there was nothing to read, only that is tried again.
    let probed = cluster.links.get(&from.id, &to.id).filter(|_| oldest_ms == 0);
    match probed {
        Some(link) => {
            let Some(blocks) = probe_blocks(&from, &to).await else { return Ok(()) };
            let link = Link { blocks: Some(blocks), ..link };
            cluster.links.put(&cluster.records, link).await
        }
        None => probe_link(cluster, &from, &to).await,
    }
}

/// Skips the measurement while a job runs that it would disturb.
async fn measure_one_new_link(cluster: &Cluster) -> Result<(), Problem> {
    if !cluster.unfinished_jobs().is_empty() {
        return Ok(());
    }
    for (from, to) in pairs(&by_site(cluster)) {
        let again = cluster.timing.links_again;
        if !is_known(cluster, &from, &to, 0) && cluster.links.is_wanted_anew(&from, &to, again) {
            return measure(cluster, &from, &to, 0).await;
        }
    }
    Ok(())
}

async fn probe_link(cluster: &Cluster, from: &HostLink, to: &HostLink) -> Result<(), Problem> {
    let ask = ProbeLink {
        peer_agent_url: to.addresses.agent_url.clone(),
        length_bytes: PROBE_LENGTH_BYTES,
        for_s: None,
        streams: 1,
    };
    let probe: LinkProbe = from.agent_slow.post("/v1/probe", &ask).await?;
    let before = cluster.links.get(&from.id, &to.id).and_then(|link| link.blocks);
    let link = Link {
        from: from.id.clone(),
        to: to.id.clone(),
        probe,
        blocks: probe_blocks(from, to).await.or(before),
        measured_ms: now_ms(),
    };
    cluster.links.put(&cluster.records, link).await
}

async fn probe_local(cluster: &Cluster, host: &HostLink) -> Result<(), Problem> {
    let before = cluster.links.local(&host.id).and_then(|local| local.blocks);
    let blocks = probe_blocks(host, host).await.or(before);
    let local = Local { blocks, measured_ms: now_ms() };
    cluster.links.put_local(&cluster.records, &host.id, local).await
}

/// Reads at `from` an export whose home is `to`; `None` if there is nothing that could be read so. What was measured
/// before counts then: that nothing could be read now says nothing about the link.
async fn probe_blocks(from: &HostLink, to: &HostLink) -> Option<BlockProbe> {
    match tokio::time::timeout(BLOCKS_DEADLINE, read_blocks(from, to)).await {
        Ok(Ok(probe)) => probe,
        Ok(Err(problem)) => {
            tracing::info!("{} can't read blocks of {} for a probe: {problem}", from.id, to.id);
            None
        }
        Err(_) => {
            let seconds = BLOCKS_DEADLINE.as_secs();
            tracing::warn!("{} has read no blocks of {} within {seconds} s", from.id, to.id);
            None
        }
    }
}

async fn read_blocks(from: &HostLink, to: &HostLink) -> Result<Option<BlockProbe>, Problem> {
    for export in exports_to_read(from, to).await? {
        let ask = ProbeBlocks {
            nbd_addr: to.addresses.nbd_addr.clone(),
            export,
            requests: PROBE_REQUESTS,
            request_bytes: PROBE_REQUEST_BYTES,
        };
        match from.volume_slow.post("/v1/probe", &ask).await {
            Ok(probe) => return Ok(Some(probe)),
            // It may not leave its site, or its clients need a secret.
            Err(problem) => {
                tracing::info!("{} of {} is not read for a probe: {problem}", ask.export, to.id);
            }
        }
    }
    Ok(None)
}

/// The exports of `to` with the most data, so that the probe reads blocks and not holes.
async fn exports_to_read(from: &HostLink, to: &HostLink) -> Result<Vec<String>, Problem> {
    let volumes: Vec<VolumeInfo> = to.volume.get("/v1/volumes").await?;
    let images: Vec<ImageInfo> = to.volume.get("/v1/images").await?;
    let known: Vec<ImageInfo> = from.volume.get("/v1/images").await?;
    // Whoever knows a layer's id may read it, so a host is told only of those that it has.
    let images = images.into_iter().filter(|image| known.iter().any(|k| k.layer == image.layer));
    let images = images.map(|i| (true, i.allocated_bytes, images::by_layer(i.layer)));
    // With its epoch: without one, nobody elsewhere may open a volume that is written with epochs.
    let export = |v: &VolumeInfo| format!("{}@{}", v.name, v.epoch);
    // Of other tenants' volumes it is told nothing.
    let admissions: AllAdmittedHosts = to.volume.get("/v1/admissions").await.unwrap_or_default();
    let volumes = volumes.into_iter().filter(|volume| {
        admissions.volumes.get(&volume.name).is_some_and(|hosts| hosts.contains(&from.id))
    });
    let volumes = volumes.map(|v| (false, v.allocated_bytes, export(&v)));
    let mut all: Vec<_> = volumes.chain(images).filter(|(_, bytes, _)| *bytes > 0).collect();
    all.sort_unstable_by(|a, b| b.cmp(a));
    Ok(all.into_iter().take(EXPORTS_TRIED_MAX).map(|(.., export)| export).collect())
}
