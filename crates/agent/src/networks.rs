//! Networks of tenants at this host: makes what the controller wants ([`HostNetworks`]), and keeps it.
//!
//! One pass (`pass.rs`) compares what is wanted with what the kernel has, and changes what differs. It runs
//! when the controller says something new, when a VM starts, and every few seconds. So what somebody has removed
//! is there again soon, and the host's report says so. Nothing is made at a host that has no part in a network.
//!
//! What was wanted last is in a file: a host that boots without its controller has its networks. While it is not known what is
//! wanted, nothing is removed. One part that fails holds up no other.
//!
//! | what | file |
//! |---|---|
//! | the names in the kernel | `names.rs` |
//! | bridges, VXLAN, and where frames go | `plan.rs` |
//! | frames for a VM in the pause of a move | `follow.rs` |
//! | the packet filter | `rules.rs` |
//! | what VMs of a job send to each other | `gang_traffic.rs` |
//! | WireGuard between hosts | `tunnel.rs` |
//! | DHCP, names, and the way out | `gateway.rs` |
//! | cards in bridges of the operator | `bridged.rs` |
//! | which ports of this host lead to VMs | `doors.rs` |
//! | whether the kernel forwards packets | `forwarding.rs` |
//! | who removes rules of the packet filter | `watch.rs` |

pub mod bridged;
pub(crate) mod doors;
mod follow;
mod forwarding;
mod gang_traffic;
mod gateway;
pub mod interface;
pub mod names;
mod pass;
mod plan;
mod rules;
mod tap;
#[cfg(test)]
mod tests;
pub(crate) mod tools;
pub(crate) mod tunnel;
pub(crate) mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::fcntl::Flock;
use perigee_model::network::{Card, HostNetworks, NetworksKnown, TunnelEnd};
use perigee_model::vm::{SentTo, VmNetwork};
use perigee_model::{HostId, Problem, VmId};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use self::gateway::Running;
use self::names::Tag;
use self::rules::Door;
use self::tools::{list, run};
use self::tunnel::Tunnel;
use self::watch::Watch;
use crate::files::{read_json, write_json};
use crate::users::VmUids;

/// Files in the directory of networks.
const WANTED: &str = "wanted.json";
const END: &str = "end.json";
/// For how long the host's report says what was mended.
const MENDED_FOR: Duration = Duration::from_secs(3600);
/// Guests' SSH servers.
pub const SSH_PORT: u16 = 22;
/// A guest answers within this time, or nothing is there.
pub const DIAL_MAX: Duration = Duration::from_secs(10);
/// As many things that were mended are said.
const MENDED_MAX: usize = 8;
/// How often a host that can't have networks looks whether it can.
pub const FIND_AGAIN: Duration = Duration::from_secs(10);
/// Whoever starts a VM waits no longer for those who change networks.
const TURN_MAX: Duration = Duration::from_secs(30);

/// The networks of tenants at this host: what is wanted, and what was made.
pub struct Networks {
    tag: Tag,
    host: HostId,
    dir: PathBuf,
    ip: String,
    is_root: bool,
    /// UDP sockets of these users are guests'.
    vm_uids: VmUids,
    end: Mutex<End>,
    /// `None` while it is not known.
    wanted: Mutex<Option<HostNetworks>>,
    /// It could not be kept over a restart.
    is_unsaved: AtomicBool,
    /// Of the agents in one network namespace the one that has this makes networks.
    alone: Mutex<Option<Flock<File>>>,
    /// Whoever changes the kernel's state takes turns.
    turn: tokio::sync::Mutex<Made>,
    now: Notify,
    said: Mutex<Said>,
    /// What VMs of a job here have sent to each other, as last read.
    sent: Mutex<gang_traffic::Sent>,
}

impl std::fmt::Debug for Networks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Networks").field("end", &self.end).finish_non_exhaustive()
    }
}

/// This host's end of the tunnels.
#[derive(Debug, Default)]
struct End {
    /// What other hosts need to know. It is kept in a file, so that what runs goes on when it can't be found out.
    known: Option<TunnelEnd>,
    /// Why VMs of tenants' networks can't start here now.
    trouble: Option<String>,
}

/// A card of a VM that has a QEMU here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CardHere {
    pub card: Card,
    /// The host to which frames for the VM go, whatever the controller has said last: this one while the VM runs here, and its
    /// destination in the pause of a move. `None`: to where the controller says.
    pub at: Option<HostId>,
}

/// A gateway that did not start.
struct Failed {
    at: Instant,
    wait: Duration,
    why: String,
}

/// What was made, as far as the kernel does not say it.
#[derive(Default)]
struct Made {
    cards: BTreeMap<VmId, CardHere>,
    /// Nothing is wanted, and nothing is left of earlier.
    is_idle: bool,
    /// There is no filter, because no network is here.
    has_no_filter: bool,
    rules: String,
    /// The rules as the kernel lists them.
    listed: String,
    /// The same of the rules that count connections, as they were loaded and as the kernel lists them.
    limits: String,
    counted: String,
    /// The ports of this host that lead to VMs; `None` before the first pass: those of an earlier agent go on.
    doors: Option<Vec<Door>>,
    /// Connections of before may lead to a VM that had the port then.
    leads: bool,
    tunnel: Tunnel,
    gateways: BTreeMap<u16, Running>,
    failed: BTreeMap<u16, Failed>,
    /// It is not known of all VMs here which cards they have: one that is no known VM's may be another one's.
    cards_unknown: bool,
    /// Cards that are no VM's, and since when.
    strange: BTreeMap<String, Instant>,
    /// Other programs' rules may drop what bridges carry.
    carried_by_others: Option<String>,
    /// Gateways here have nobody to ask for names of the outside.
    no_resolvers: Option<String>,
    /// Interfaces that were there after the last pass.
    interfaces: BTreeSet<String>,
    /// What VMs of a job send to each other is counted.
    counts_talk: bool,
}

#[derive(Default)]
struct Said {
    trouble: Option<String>,
    failing_gateways: Vec<u16>,
    carried_by_others: Option<String>,
    no_resolvers: Option<String>,
    mended: Vec<(Instant, String)>,
}

/// Which cards are connected here.
pub enum Cards<'a> {
    /// These, of the VMs that have a QEMU here, and whether it is known of all VMs here what they have.
    Of(BTreeMap<VmId, CardHere>, bool),
    /// Those of before, and this one.
    And(&'a VmId, &'a Card),
    /// Those of before.
    #[cfg(test)]
    Those,
}

impl Networks {
    /// Makes the host's key, and reads what was wanted last.
    pub async fn prepare(state: &Path, host: &HostId, ip: &str, is_root: bool) -> Self {
        let dir = state.join("networks");
        let ip = ip.trim_matches(['[', ']']).to_owned();
        let mut wanted = Some(HostNetworks::default());
        let mut end = End::default();
        if is_root {
            wanted = read_wanted(&dir);
            // Of another address it is not this host's any more.
            let kept: Option<TunnelEnd> = read_json(&dir.join(END)).ok().flatten();
            end.known = kept.filter(|kept| tunnel::is_at(kept, &ip));
        }
        let networks = Self {
            tag: Tag::new(host, state),
            host: host.clone(),
            dir,
            ip,
            is_root,
            vm_uids: VmUids::default(),
            end: Mutex::new(end),
            wanted: Mutex::new(wanted),
            is_unsaved: AtomicBool::new(false),
            alone: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            now: Notify::new(),
            said: Mutex::default(),
            sent: Mutex::default(),
        };
        networks.look_at_end().await;
        networks
    }

    /// The same, where UDP sockets of these users are guests'.
    pub fn with_users(self, vm_uids: VmUids) -> Self {
        Self { vm_uids, ..self }
    }

    /// Whether this host could have networks of tenants: its agent is root.
    pub fn are_possible(&self) -> bool {
        self.is_root
    }

    /// Finds out whether VMs here can be in tenants' networks.
    pub async fn look_at_end(&self) {
        let found = self.find_end().await;
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        match found {
            Ok(found) => *end = End { known: Some(found), trouble: None },
            Err(why) => end.trouble = Some(why),
        }
    }

    async fn find_end(&self) -> Result<TunnelEnd, String> {
        if !self.is_root {
            return Err("the agent is not root".to_owned());
        }
        make_directory(&self.dir)
            .map_err(|error| format!("can't make {}: {error}", self.dir.display()))?;
        self.be_alone()?;
        let found = tunnel::prepare(&self.dir, &self.ip).await?;
        write_json(&self.dir.join(END), &found).map_err(|problem| problem.why)?;
        Ok(found)
    }

    /// Two agents in one network namespace would take each other's frames: there is one port for all tunnels.
    fn be_alone(&self) -> Result<(), String> {
        let mut alone = self.alone.lock().unwrap_or_else(PoisonError::into_inner);
        if alone.is_some() {
            return Ok(());
        }
        let lock = tools::only_one("networks")?.ok_or(
            "another agent of this machine has tenants' networks; a second one needs a network namespace of its own",
        )?;
        *alone = Some(lock);
        Ok(())
    }

    /// What other hosts need to know for tunnels; `None` if VMs here never could be in tenants' networks.
    pub fn tunnel(&self) -> Option<TunnelEnd> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).known.clone()
    }

    /// Connects to port 22 of a VM, from within its network's gateway.
    ///
    /// # Errors
    /// `NotFound` if there is no such VM, `Unavailable` if the gateway is not here or nothing listens there.
    pub async fn dial(&self, vni: u16, address: Ipv4Addr) -> Result<TcpStream, Problem> {
        let what = || format!("can't reach port {SSH_PORT} of {address}");
        let is_known = {
            let wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
            let networks = wanted.iter().flat_map(|wanted| &wanted.networks);
            let mut network = networks.filter(|network| network.vni == vni);
            network.any(|network| network.members.iter().any(|vm| vm.address == address))
        };
        if !is_known {
            return Err(Problem::not_found(what(), "no VM of that network has it"));
        }
        let namespace = {
            let turn = timeout(TURN_MAX, self.turn.lock()).await;
            let made = turn.map_err(|_| Problem::unavailable(what(), "the host is busy"))?;
            let running = made.gateways.get(&vni).filter(|running| gateway::runs(Some(running)));
            let opened = running.map(|running| {
                let file = File::open(format!("/proc/{}/ns/net", running.pid()));
                // Its number may have become another process's meanwhile.
                file.ok().filter(|_| gateway::runs(Some(running)))
            });
            opened.flatten().ok_or_else(|| {
                Problem::unavailable(what(), "the gateway of the network does not run here now")
            })?
        };
        let (tell, told) = tokio::sync::oneshot::channel();
        // A thread of its own: it is in the network's namespace until it ends.
        let begun = std::thread::Builder::new().name("dial".to_owned()).spawn(move || {
            let connected = nix::sched::setns(&namespace, nix::sched::CloneFlags::CLONE_NEWNET)
                .map_err(std::io::Error::from)
                .and_then(|()| {
                    let to = (address, SSH_PORT).into();
                    let stream = std::net::TcpStream::connect_timeout(&to, DIAL_MAX)?;
                    stream.set_nonblocking(true)?;
                    Ok(stream)
                });
            // Whoever has asked may have gone.
            let _ = tell.send(connected);
        });
        begun.map_err(|error| Problem::unavailable(what(), error))?;
        let connected = told.await.map_err(|error| Problem::internal(what(), error))?;
        connected.and_then(TcpStream::from_std).map_err(|error| {
            Problem::unavailable(what(), error).next("is an SSH server running in the guest?")
        })
    }

    /// The device of this host that is a VM's card. In a user network there is none.
    pub fn card_name(&self, network: &VmNetwork) -> Option<String> {
        match network {
            VmNetwork::Cluster(card) => Some(self.tag.tap(card)),
            VmNetwork::Bridge(card) => Some(self.tag.bridged(card)),
            VmNetwork::None | VmNetwork::User => None,
        }
    }

    /// Whether an agent here has made this device of the host.
    pub fn has_made(&self, device: &str) -> bool {
        self.tag.is_own(device) || self.tag.is_bridged(device)
    }

    /// What a VM of a job has sent to the job's others since its card was made here. It is some seconds old.
    pub fn sent(&self, vm: &VmId) -> Vec<SentTo> {
        let sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        let each = sent.get(vm).into_iter().flatten();
        each.map(|(to, bytes)| SentTo { to: to.clone(), bytes: *bytes }).collect()
    }

    /// Counts what the VMs of a job send to each other. Where the kernel can't, it is not known, and nothing else is missing.
    async fn count_talk(&self, made: &mut Made, wanted: &HostNetworks) {
        let pairs = gang_traffic::pairs(&self.tag, &wanted.networks, &made.cards);
        if pairs.is_empty() {
            if std::mem::take(&mut made.counts_talk) {
                let _ = run("nft", &["-f", "-"], &gang_traffic::none(&self.tag)).await;
                self.sent.lock().unwrap_or_else(PoisonError::into_inner).clear();
            }
            return;
        }
        made.counts_talk = true;
        match gang_traffic::bring_about(&self.tag, &pairs).await {
            Ok(sent) => *self.sent.lock().unwrap_or_else(PoisonError::into_inner) = sent,
            Err(why) => tracing::debug!("what VMs send to each other is not counted: {why}"),
        }
    }

    /// The addresses of the cluster's hosts; `None` while the controller has not said them.
    pub fn hosts(&self) -> Option<Vec<std::net::IpAddr>> {
        let wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        wanted.as_ref().filter(|wanted| wanted.made_ms > 0).map(|wanted| wanted.hosts.clone())
    }

    /// Why VMs can't start here in tenants' networks now.
    pub fn trouble(&self) -> Option<String> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).trouble.clone()
    }

    /// The numbers of the networks whose gateways do not start here.
    pub fn failing_gateways(&self) -> Vec<u16> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).failing_gateways.clone()
    }

    /// Waits until the controller has said something new, or, from `rested` on, somebody has removed a packet filter.
    pub async fn is_to_pass(&self, watch: &std::io::Result<Watch>, rested: Instant) {
        let removed = async {
            tokio::time::sleep_until(rested).await;
            if let Ok(watch) = watch
                && watch.removed().await.is_ok()
            {
                return;
            }
            // The kernel does not tell.
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = self.now.notified() => {}
            () = removed => {}
        }
    }

    /// Takes what the controller wants. It is brought about soon, and what can't be done stands in the host's report.
    ///
    /// # Errors
    /// `Unsupported` if this host can't have networks.
    pub fn take(&self, wanted: HostNetworks) -> Result<NetworksKnown, Problem> {
        let made_ms = wanted.made_ms;
        if self.tunnel().is_none() {
            let why = self.trouble().unwrap_or_default();
            return match wanted.networks.is_empty() {
                // Guests in user networks don't reach these hosts.
                true if self.is_root => {
                    make_directory(&self.dir).map_err(|error| {
                        Problem::internal(format!("can't make {}", self.dir.display()), error)
                    })?;
                    Ok(NetworksKnown { made_ms: self.store(wanted)? })
                }
                true => Ok(NetworksKnown { made_ms }),
                false => Err(Problem::unsupported("can't set up the networks of this host", why)),
            };
        }
        let stored = self.store(wanted);
        self.now.notify_one();
        Ok(NetworksKnown { made_ms: stored? })
    }

    /// Keeps what is wanted from now on, also over a restart, unless something later is known. Returns when what is known was
    /// made.
    fn store(&self, wanted: HostNetworks) -> Result<u64, Problem> {
        wanted.peers.iter().try_for_each(|peer| peer.end.check())?;
        let mut known = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = known.as_ref().filter(|known| wanted.made_ms < known.made_ms) {
            return Ok(known.made_ms);
        }
        let said = |wanted: &HostNetworks| HostNetworks { made_ms: 0, ..wanted.clone() };
        // What nobody has said yet (0) differs from all that is said.
        let is_same = |known: &HostNetworks| known.made_ms > 0 && said(known) == said(&wanted);
        let is_saved = !self.is_unsaved.load(Ordering::Relaxed);
        let saved = match is_saved && known.as_ref().is_some_and(is_same) {
            true => Ok(()),
            false => write_json(&self.dir.join(WANTED), &wanted),
        };
        self.is_unsaved.store(saved.is_err(), Ordering::Relaxed);
        let made_ms = wanted.made_ms;
        // It is made all the same, and said again until it is kept.
        *known = Some(wanted);
        saved.map(|()| made_ms)
    }

    /// Makes a VM's card, and connects it to its network.
    ///
    /// # Errors
    /// `Unavailable` if this host can't, at least now.
    pub async fn connect(&self, vm: &VmId, card: &Card) -> Result<OwnedFd, Problem> {
        let what = || format!("can't connect the network card of the VM {vm}");
        if let Some(why) = self.trouble() {
            // The controller knows which hosts can, and starts the VM at another one.
            return Err(Problem::unavailable(what(), why));
        }
        let name = self.tag.tap(card);
        let tap = tap::make(&name).map_err(|error| Problem::unavailable(what(), error))?;
        let passed = self.pass(Cards::And(vm, card)).await;
        let links: Vec<plan::Link> =
            list("ip", &["-json", "-details", "link", "show", "dev", &name])
                .await
                .map_err(|why| Problem::unavailable(what(), why))?;
        let bridge = self.tag.bridge(card.vni);
        if links.first().is_some_and(|link| link.master.as_deref() == Some(&bridge)) {
            return Ok(tap);
        }
        let why = passed.err().unwrap_or_else(|| "it is not on its bridge".to_owned());
        Err(Problem::unavailable(what(), why))
    }

    /// What is wrong, and what was mended in the last hour.
    pub fn warnings(&self) -> Vec<String> {
        let cannot =
            self.trouble().map(|why| format!("VMs here can't be in tenants' networks: {why}"));
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        said.mended.retain(|(at, _)| at.elapsed() < MENDED_FOR);
        let mended = said.mended.iter().map(|(_, text)| text.clone());
        let troubles = said.trouble.iter().chain(&said.carried_by_others);
        let troubles = troubles.chain(&said.no_resolvers).cloned();
        cannot.into_iter().chain(troubles).chain(mended).collect()
    }

    fn mended(&self, text: String) {
        tracing::warn!("{text}");
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        said.mended.retain(|(_, other)| *other != text);
        said.mended.push((Instant::now(), text));
        if said.mended.len() > MENDED_MAX {
            said.mended.remove(0);
        }
    }
}

/// What was wanted last; `None` if that is not known.
fn read_wanted(dir: &Path) -> Option<HostNetworks> {
    match read_json(&dir.join(WANTED)) {
        Ok(read) => Some(read.unwrap_or_default()),
        Err(problem) => {
            tracing::warn!(%problem, "which networks are here is not known until the controller says it");
            None
        }
    }
}

/// As many connections as guests may begin, and as many as may be made to them. The other half of the kernel's table is the host's.
pub fn connections_max() -> u32 {
    const DEFAULT: u32 = 65_536;
    let text = std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_max");
    let all: u32 = text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(DEFAULT);
    // The kernel's limit may be switched off.
    if all == 0 { DEFAULT } else { (all / 4).max(1) }
}

fn make_directory(dir: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    // The gateways' user finds its own directories in it.
    match nix::unistd::User::from_name("nobody") {
        Ok(Some(user)) => gateway::give(dir, user.gid, 0o710),
        _ => Ok(()),
    }
}
