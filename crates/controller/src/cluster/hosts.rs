//! The registry of hosts: their addresses and their last reports.
//!
//! The address is the one that the host registered. The report is an observation with its time. A host that has
//! not answered since the controller started has no report. Of such a host only [`Said`] is known.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use perigee_http::{Claim, Client, Expected, Network, PeerIdentity};
use perigee_model::drain::{Drain, DrainStep};
use perigee_model::home::ServerAddresses;
use perigee_model::job::HostState;
use perigee_model::leave_site::SiteAddress;
use perigee_model::load::VcpuUse;
use perigee_model::upgrade::{DaemonVersion, HostVersions};
use perigee_model::vm::{HOST_ADDRESSES_MAX, HostAddresses, HostReport, VmChanges, VmReport};
use perigee_model::volume::{ExportStats, PoolInfo};
use perigee_model::{HostId, Problem, VmId};
use perigee_planner::CpuLoad;

use super::parts::{Heard, VolumeServer};
use crate::records::{HostRecord, Records};

/// A pool is asked for its free bytes this often: it reads its whole catalog for the answer.
const POOL_AGE_MAX: Duration = Duration::from_secs(30);

/// Volume servers are told the sites of the hosts so often, even if nothing has changed.
const TELL_SITES_EVERY: Duration = Duration::from_secs(60);

/// What VMs did in a minute is said of the present for so long.
const LOAD_AGE_MAX: Duration = Duration::from_secs(60);

/// How hosts are reached, and by what they are commanded.
#[derive(Debug)]
pub(super) struct Ways {
    pub network: Network,
    pub claim: Arc<Claim>,
}

/// The clients for one host. Each has its deadline.
#[derive(Debug, Clone)]
pub struct HostLink {
    pub id: HostId,
    pub addresses: HostAddresses,
    pub agent: Client,
    pub volume: Client,
    /// For requests that the agent answers when something has changed.
    pub agent_wait: Client,
    /// For requests whose time depends on the amount of data: imports, copies, probes.
    pub agent_slow: Client,
    pub volume_slow: Client,
}

impl HostLink {
    fn new(id: HostId, addresses: HostAddresses, ways: &Ways) -> Result<Self, Problem> {
        let client = |address: &str, answer_max_s| -> Result<Client, Problem> {
            let expected = Expected::Identity(PeerIdentity::Host(id.clone()));
            let client =
                ways.network.client(address, expected, Duration::from_secs(answer_max_s))?;
            Ok(client.claiming(&ways.claim))
        };
        Ok(Self {
            agent: client(&addresses.agent_url, 10)?,
            volume: client(&addresses.volume_url, 10)?,
            agent_wait: client(&addresses.agent_url, 30)?,
            agent_slow: client(&addresses.agent_url, 120)?,
            volume_slow: client(&addresses.volume_url, 3600)?,
            id,
            addresses,
        })
    }

    /// Where other hosts reach its volume server.
    pub fn volume_server(&self) -> ServerAddresses {
        ServerAddresses {
            nbd_addr: self.addresses.nbd_addr.clone(),
            control_url: self.addresses.volume_url.clone(),
        }
    }
}

/// What a host says of itself and its record keeps. Guests must not reach the addresses of its interfaces at any time, and people ask for
/// versions also while a host is off.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Said {
    pub interfaces: Vec<Ipv4Addr>,
    pub versions: HostVersions,
}

/// What a volume server has said of its pool.
#[derive(Debug, Clone)]
struct Pool {
    free_bytes: u64,
    total_bytes: u64,
    version: Option<DaemonVersion>,
}

/// What is known of a host that has registered. All but its link may be old.
#[derive(Debug)]
pub struct HostEntry {
    pub link: Arc<HostLink>,
    pub report: Option<Arc<HostReport>>,
    /// What it says of itself, as its record has it.
    kept: Said,
    /// When its agent was heard of.
    pub heard: Heard,
    /// Why the last request to it has failed, if it does not answer.
    pub(super) trouble: String,
    /// When its agent has said that it stops, if it was not heard of since.
    pub(super) stopped: Option<Instant>,
    pub(super) volume_server: VolumeServer,
    /// The last reports of its VMs. They are shown while it does not answer.
    vms: BTreeMap<VmId, (Instant, VmReport)>,
    /// When it has last said which VMs it has, and how all of them are.
    all_vms_at: Option<Instant>,
    /// The sites of the hosts, as its volume server was told them.
    sites: Option<(Instant, Arc<Vec<SiteAddress>>)>,
    /// The last figures of its volume server.
    stats: Option<(Instant, Arc<Vec<ExportStats>>)>,
    /// When its pool was last asked for its free bytes, and the last answer.
    pool: Option<(Instant, Option<Pool>)>,
    /// That it is to be drained, as its record has it.
    pub(super) drain: Option<Drain>,
    /// What was still there when that was last looked at.
    pub(super) left: Option<Arc<Vec<DrainStep>>>,
}

/// The hosts that have registered, and their last reports.
#[derive(Debug)]
pub struct Hosts {
    pub deadline: Duration,
    ways: Ways,
    known: Mutex<BTreeMap<HostId, HostEntry>>,
}

impl HostEntry {
    /// How long its agent has not answered, and why, in plain words.
    pub fn silence(&self, id: &HostId) -> String {
        let silent_s = self.heard.at.elapsed().as_secs();
        let colon = if self.trouble.is_empty() { "" } else { ": " };
        format!("host {id} has not answered for {silent_s} s{colon}{}", self.trouble)
    }

    /// The vCPUs of those VMs there whose load is known, and what these vCPUs do, without this VM; `None` if there are none. What was
    /// last reported long ago says nothing of the last minute.
    pub fn vcpus_1m(&self, except: Option<&VmId>) -> Option<(u32, VcpuUse)> {
        let counts = |vm: &VmId, at: &Instant| Some(vm) != except && at.elapsed() < LOAD_AGE_MAX;
        let fresh = self.vms.iter().filter(|(vm, (at, _))| counts(vm, at));
        let known = fresh.filter_map(|(_, (_, vm))| Some((vm.spec.cpus, vm.load.vcpus_1m?)));
        known.reduce(|(cpus, load), (more, other)| (cpus.saturating_add(more), load.plus(other)))
    }

    /// How busy its CPUs are, its VMs' without this one; `None` if that is not known. The pressure at the host where this VM is has
    /// the VM's own part in it, so it says nothing there of what others take.
    pub fn cpu_load(&self, except: Option<&VmId>) -> Option<CpuLoad> {
        let pressure = self.report.as_ref().and_then(|report| report.pressure.cpu);
        let vms = self.vcpus_1m(except);
        let is_known = vms.is_some() || pressure.is_some();
        let is_its_host = except.is_some_and(|vm| self.vms.contains_key(vm));
        let pressure = pressure.filter(|_| !is_its_host);
        let pressure_share = pressure.map(|cpu| cpu.some.share_60s);
        let (measured_vcpus, vcpus_1m) = vms.unwrap_or_default();
        is_known.then_some(CpuLoad { measured_vcpus, vcpus_1m, pressure_share })
    }

    /// The bytes that were free in its pool when the pool was last asked.
    pub fn pool_free_bytes(&self) -> Option<u64> {
        Some(self.pool_seen()?.free_bytes)
    }

    /// The size of the filesystem that its pool is on, as last said.
    pub fn pool_size_bytes(&self) -> Option<u64> {
        Some(self.pool_seen()?.total_bytes)
    }

    fn pool_seen(&self) -> Option<&Pool> {
        self.pool.as_ref()?.1.as_ref()
    }

    /// What it has said of itself last, also to an earlier controller.
    fn said(&self) -> Said {
        let Said { interfaces, versions } = self.kept.clone();
        let (interfaces, agent) = match &self.report {
            Some(report) => (in_bounds(report), report.version.clone()),
            None => (interfaces, versions.agent),
        };
        let volume_server = match self.pool_seen() {
            Some(pool) => pool.version.clone(),
            None => versions.volume_server,
        };
        Said { interfaces, versions: HostVersions { agent, volume_server } }
    }
}

impl Hosts {
    pub(super) async fn load(
        records: &Records,
        deadline: Duration,
        ways: Ways,
    ) -> Result<Self, Problem> {
        let hosts = Self { deadline, ways, known: Mutex::default() };
        for key in records.keys("hosts/").await? {
            let Some(record) = records.read::<HostRecord>(&key).await? else { continue };
            let id = HostId::new(key.trim_start_matches("hosts/"))
                .map_err(|e| Problem::internal("can't read the hosts", e))?;
            match hosts.link(&id, record.addresses) {
                Ok(link) => {
                    let said = Said { interfaces: record.interfaces, versions: record.versions };
                    hosts.set(link, record.registered_ms, said);
                    hosts.note_drain(&id, record.drain);
                }
                // Its addresses are of the other kind, encrypted or not. It will register again.
                Err(problem) => {
                    tracing::warn!(host = %id, %problem, "can't use a host's addresses")
                }
            }
        }
        Ok(hosts)
    }

    /// The clients for a host with these addresses.
    ///
    /// # Errors
    /// `Invalid` when an address can't be used over the network.
    pub fn link(&self, id: &HostId, addresses: HostAddresses) -> Result<HostLink, Problem> {
        HostLink::new(id.clone(), addresses, &self.ways)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, BTreeMap<HostId, HostEntry>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a host, or replaces all that is known of it but its drain. It was last seen at the Unix time `seen_ms`.
    pub fn set(&self, link: HostLink, seen_ms: u64, kept: Said) {
        let id = link.id.clone();
        let mut hosts = self.lock();
        let before = hosts.remove(&id);
        let (drain, left) = before.map(|before| (before.drain, before.left)).unwrap_or_default();
        let known = HostEntry {
            link: Arc::new(link),
            report: None,
            kept,
            heard: Heard::new(seen_ms),
            trouble: String::new(),
            stopped: None,
            volume_server: VolumeServer::new(seen_ms),
            vms: BTreeMap::new(),
            all_vms_at: None,
            sites: None,
            stats: None,
            pool: None,
            drain,
            left,
        };
        hosts.insert(id, known);
    }

    /// # Errors
    /// `NotFound` if no such host has registered.
    pub fn get(&self, id: &HostId) -> Result<Arc<HostLink>, Problem> {
        self.lock().get(id).map(|known| Arc::clone(&known.link)).ok_or_else(|| {
            Problem::not_found(format!("host {id}"), "no host with this name has registered")
                .next("`perigee host list` shows the hosts")
        })
    }

    /// Whether the host answers; one that is not known counts as unreachable.
    pub fn state(&self, id: &HostId) -> HostState {
        let known = self.lock();
        known.get(id).map_or(HostState::Unreachable, |host| host.state(self.deadline))
    }

    /// Whether the host has answered since then.
    pub fn heard_since(&self, id: &HostId, then: Instant) -> bool {
        self.lock().get(id).is_some_and(|known| known.heard.at >= then)
    }

    /// The host's last report; `None` if it has not answered yet.
    pub fn report(&self, id: &HostId) -> Option<Arc<HostReport>> {
        self.lock().get(id).and_then(|known| known.report.clone())
    }

    /// The addresses of its interfaces, as it last said them, also to an earlier controller.
    pub fn interfaces(&self, id: &HostId) -> Vec<Ipv4Addr> {
        self.said(id).interfaces
    }

    /// What the host has said of itself last, also to an earlier controller.
    pub fn said(&self, id: &HostId) -> Said {
        self.lock().get(id).map(HostEntry::said).unwrap_or_default()
    }

    /// What its record should have of that, if it has something else.
    pub fn new_said(&self, id: &HostId) -> Option<Said> {
        let hosts = self.lock();
        let known = hosts.get(id)?;
        Some(known.said()).filter(|said| *said != known.kept)
    }

    /// What the host says of itself, after its record.
    pub fn note_said(&self, id: &HostId, said: Said) {
        if let Some(known) = self.lock().get_mut(id) {
            known.kept = said;
        }
    }

    /// The clients for all hosts, sorted by id.
    pub fn all(&self) -> Vec<Arc<HostLink>> {
        self.lock().values().map(|known| Arc::clone(&known.link)).collect()
    }

    /// As [`Self::all`], of the hosts that are up.
    pub fn up(&self) -> Vec<Arc<HostLink>> {
        let mut hosts = self.all();
        hosts.retain(|host| self.state(&host.id) == HostState::Up);
        hosts
    }

    /// How long ago the host has last answered; nothing if it answers.
    pub fn silent_for(&self, id: &HostId) -> Duration {
        let known = self.lock();
        let silent = known.get(id).filter(|known| known.heard.missed > 0);
        silent.map_or(Duration::ZERO, |known| known.heard.at.elapsed())
    }

    /// How long the host has not answered, in plain words.
    pub fn silence(&self, id: &HostId) -> String {
        match self.lock().get(id) {
            Some(known) => known.silence(id),
            None => format!("host {id} is not known"),
        }
    }

    /// A text in which each address of a host has the host's name before it.
    pub fn named(&self, text: &str) -> String {
        let mut text = text.to_owned();
        // Most texts have none, and are asked for once for each VM.
        if !text.contains("://") {
            return text;
        }
        for (id, known) in self.lock().iter() {
            let HostAddresses { agent_url, volume_url, .. } = &known.link.addresses;
            for address in [agent_url, volume_url] {
                if text.contains(address.as_str()) {
                    text = name_address(&text, id.as_str(), address);
                }
            }
        }
        text
    }

    /// The host's agent has answered with this report.
    pub fn heard(&self, id: &HostId, report: HostReport) {
        if let Some(known) = self.lock().get_mut(id) {
            known.report = Some(Arc::new(report));
            known.is_heard();
        }
    }

    /// A request for the host's report has failed.
    pub fn missed(&self, id: &HostId, problem: &Problem) {
        if let Some(known) = self.lock().get_mut(id) {
            known.heard.missed();
            known.trouble.clone_from(&problem.why);
        }
    }

    /// Asks the host's pool for its free bytes, unless it was asked a short time ago.
    pub async fn look_at_pool(&self, id: &HostId) {
        let link = {
            let mut hosts = self.lock();
            let Some(known) = hosts.get_mut(id) else { return };
            // What was never known is asked for again at once: a volume comes to no pool of which nothing is known.
            let fresh = |(asked, seen): &(Instant, Option<Pool>)| {
                seen.is_some() && asked.elapsed() < POOL_AGE_MAX
            };
            if known.pool.as_ref().is_some_and(fresh) {
                return;
            }
            known.pool = Some((Instant::now(), known.pool.take().and_then(|(_, seen)| seen)));
            Arc::clone(&known.link)
        };
        let answer = link.volume.get::<PoolInfo>("/v1/pool").await;
        if let (Ok(pool), Some(known)) = (answer, self.lock().get_mut(id)) {
            let PoolInfo { free_bytes, total_bytes, version, .. } = pool;
            known.pool = Some((Instant::now(), Some(Pool { free_bytes, total_bytes, version })));
        }
    }

    /// As [`HostEntry::cpu_load`].
    pub fn cpu_load(&self, id: &HostId, except: Option<&VmId>) -> Option<CpuLoad> {
        self.lock().get(id)?.cpu_load(except)
    }

    /// How busy the CPUs of each host are that has reported this VM, without it.
    pub fn loads_without(&self, vm: &VmId) -> Vec<(HostId, Option<CpuLoad>)> {
        let hosts = self.lock();
        let its = hosts.iter().filter(|(_, known)| known.vms.contains_key(vm));
        its.map(|(id, known)| (id.clone(), known.cpu_load(Some(vm)))).collect()
    }

    /// The bytes that were free in the host's pool when it was last asked; `None` if it has not answered.
    pub fn pool_free_bytes(&self, id: &HostId) -> Option<u64> {
        self.lock().get(id)?.pool_free_bytes()
    }

    /// Whether its volume server was told the same not long ago. It may have a new pool since, and know nothing.
    pub fn knows_sites(&self, id: &HostId, sites: &[SiteAddress]) -> bool {
        let known = self.lock();
        let sent = known.get(id).and_then(|known| known.sites.as_ref());
        sent.is_some_and(|(at, sent)| at.elapsed() < TELL_SITES_EVERY && **sent == sites)
    }

    /// The host's volume server was just told these addresses of sites.
    pub fn note_sites(&self, id: &HostId, sites: &Arc<Vec<SiteAddress>>) {
        if let Some(known) = self.lock().get_mut(id) {
            known.sites = Some((Instant::now(), Arc::clone(sites)));
        }
    }

    /// Records what the host has just reported of one VM.
    pub fn remember_vm(&self, id: &HostId, report: &VmReport) {
        if let Some(known) = self.lock().get_mut(id) {
            known.vms.insert(report.spec.vm.clone(), (Instant::now(), report.clone()));
        }
    }

    /// Records a complete list of its VMs. Other VMs do not exist there.
    pub fn remember_vms(&self, id: &HostId, reports: &[VmReport]) {
        if let Some(known) = self.lock().get_mut(id) {
            let now = Instant::now();
            known.all_vms_at = Some(now);
            known.vms = reports.iter().map(|r| (r.spec.vm.clone(), (now, r.clone()))).collect();
        }
    }

    /// Records the changes that the agent has reported; with `all`, they include all its VMs. Returns the VMs
    /// that no longer exist.
    pub fn take_changes(&self, id: &HostId, changes: &VmChanges, all: bool) -> Vec<VmId> {
        let mut hosts = self.lock();
        let Some(known) = hosts.get_mut(id) else { return Vec::new() };
        let now = Instant::now();
        known.is_heard();
        for report in &changes.changed {
            known.vms.insert(report.spec.vm.clone(), (now, report.clone()));
        }
        if all {
            let changed: BTreeSet<&VmId> = changes.changed.iter().map(|one| &one.spec.vm).collect();
            known.vms.retain(|vm, _| changed.contains(vm));
            known.all_vms_at = Some(now);
        }
        let present: BTreeSet<&VmId> = changes.present.iter().collect();
        let gone = known.vms.keys().filter(|vm| !present.contains(vm));
        let gone: Vec<VmId> = gone.cloned().collect();
        gone.iter().for_each(|vm| drop(known.vms.remove(vm)));
        gone
    }

    /// The last report of a VM, if it is not older than `age_max`, and when it came.
    pub fn fresh_vm(
        &self,
        id: &HostId,
        vm: &VmId,
        age_max: Duration,
    ) -> Option<(Instant, VmReport)> {
        let hosts = self.lock();
        let (at, report) = hosts.get(id)?.vms.get(vm)?;
        (at.elapsed() <= age_max).then(|| (*at, report.clone()))
    }

    /// The last reports of a VM, by the hosts that have made them.
    pub fn seen(&self, vm: &VmId) -> Vec<(HostId, VmReport)> {
        let hosts = self.lock();
        let seen = hosts.iter().filter_map(|(id, known)| {
            let (_, report) = known.vms.get(vm)?;
            Some((id.clone(), report.clone()))
        });
        seen.collect()
    }

    /// The figures of the host's volume server. Concurrent callers share one request.
    pub async fn volume_stats(
        &self,
        id: &HostId,
        age_max: Duration,
    ) -> Result<Option<Arc<Vec<ExportStats>>>, Problem> {
        let link = self.get(id)?;
        if let Some(stats) = self.kept_stats(id, age_max) {
            return Ok(Some(stats));
        }
        let Ok(stats) = link.volume.get::<Vec<ExportStats>>("/v1/stats").await else {
            return Ok(None);
        };
        let stats = Arc::new(stats);
        if let Some(known) = self.lock().get_mut(id) {
            known.stats = Some((Instant::now(), Arc::clone(&stats)));
        }
        Ok(Some(stats))
    }

    fn kept_stats(&self, id: &HostId, age_max: Duration) -> Option<Arc<Vec<ExportStats>>> {
        let mut hosts = self.lock();
        let (at, stats) = hosts.get_mut(id)?.stats.as_mut()?;
        if at.elapsed() <= age_max {
            return Some(Arc::clone(stats));
        }
        // This caller sends the request; callers that come in the meantime take the previous figures.
        *at = Instant::now();
        None
    }

    /// The reports of all of the host's VMs, if all of them are younger than this.
    pub fn fresh_vms(&self, id: &HostId, age_max: Duration) -> Option<Vec<VmReport>> {
        let hosts = self.lock();
        let known = hosts.get(id)?;
        let is_fresh = known.all_vms_at.is_some_and(|at| at.elapsed() < age_max);
        is_fresh.then(|| known.vms.values().map(|(_, report)| report.clone()).collect())
    }

    /// The last reports of the host's VMs. They may be old.
    pub fn remembered_vms(&self, id: &HostId) -> Vec<VmReport> {
        self.lock()
            .get(id)
            .map(|k| k.vms.values().map(|(_, r)| r.clone()).collect())
            .unwrap_or_default()
    }
}

fn in_bounds(report: &HostReport) -> Vec<Ipv4Addr> {
    report.addresses.iter().copied().take(HOST_ADDRESSES_MAX).collect()
}

/// Puts a host's name before its address, wherever that is in the text.
fn name_address(text: &str, host: &str, address: &str) -> String {
    let mut named = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(address) {
        let (before, from) = rest.split_at(at);
        let after = &from[address.len()..];
        named.push_str(before);
        // Of a longer port, this is only the beginning.
        let is_whole = !after.starts_with(|next: char| next.is_ascii_digit());
        if is_whole && !before.ends_with(&format!("{host} (")) {
            named.push_str(&format!("{host} ({address})"));
        } else {
            named.push_str(address);
        }
        rest = after;
    }
    named + rest
}

#[cfg(test)]
mod tests {
    use perigee_model::SiteId;

    use super::*;

    #[test]
    fn a_controller_that_stood_still_takes_no_host_for_gone() {
        let id = HostId::new("home1").expect("a name");
        let deadline = Duration::from_secs(1);
        let term = perigee_model::term::Term { number: 1, start: Default::default() };
        let signed = perigee_model::term::SignedTerm("unsigned".to_owned());
        let claim = Claim::new(term, &signed, &Network::Plain).expect("a claim");
        let ways = Ways { network: Network::Plain, claim };
        let hosts = Hosts { deadline, ways, known: Mutex::default() };
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let addresses = HostAddresses {
            site: SiteId::new("here").expect("a name"),
            agent_url: url(1),
            volume_url: url(2),
            nbd_addr: "127.0.0.1:3".to_owned(),
            tunnel: None,
        };
        hosts.set(hosts.link(&id, addresses).expect("a link"), 0, Said::default());
        let asleep = 2 * deadline;
        let woke = Instant::now().checked_sub(asleep).expect("a clock that began before");
        hosts.lock().get_mut(&id).expect("the host").heard.at = woke;
        assert_eq!(hosts.state(&id), HostState::Up);
        let problem = Problem::unavailable("no answer", "it is asleep");
        hosts.missed(&id, &problem);
        assert_eq!(hosts.state(&id), HostState::Up, "the request that the sleep has cut");
        hosts.missed(&id, &problem);
        assert_eq!(hosts.state(&id), HostState::Unreachable);
        hosts.lock().get_mut(&id).expect("the host").is_heard();
        assert_eq!(hosts.state(&id), HostState::Up);
    }

    #[test]
    fn an_address_is_shown_with_its_host_s_name() {
        let name = |text: &str| name_address(text, "home1", "http://10.0.0.1:7002");
        let said = "no answer from http://10.0.0.1:7002: Connection refused";
        let named = "no answer from home1 (http://10.0.0.1:7002): Connection refused";
        assert_eq!(name(said), named);
        assert_eq!(name(named), named, "once is enough");
        assert_eq!(name("http://10.0.0.1:70021 is another"), "http://10.0.0.1:70021 is another");
    }
}
