//! The network cards of VMs. One in a network of its tenant, or in a bridge of the operator, is a TAP, which
//! [`crate::networks`] makes. A card in a user network is connected to a `passt` of its own, which makes the guest's
//! connections as connections of this host. It is a process of the VM's user, and ends when the VM's QEMU does: the
//! socket between them closes. When it ends before, it is started again ([`mod@keep`]).
//!
//! **What a guest reaches.** Public addresses, and those that the operator allows ([`GuestsReach`]): neither this host nor the
//! cluster's others, no private and no link-local addresses. (A cloud's metadata service at 169.254.169.254 tells whoever asks
//! the host's keys.) A guest can send to any address, so the kernel's packet filter keeps it from these. All `passt` have a group
//! of their own, and the filter's rules are for this group. It also limits the connections of each VM: they are its host's.
//! Without the filter no VM gets a card, and none before the controller has said the addresses of the cluster's hosts. Whoever sets the host's firewall up anew may flush it, so it is looked at while VMs with
//! cards run ([`keep_filtered`]).
//!
//! **Who reaches a guest.** Nobody, but for the answers to what it sends ([`ports`]): `passt` has UDP sockets that take everything,
//! and the filter drops what comes to them from strangers.
//!
//! **Names.** A guest reaches port 53 of its host's resolvers, wherever they are. `passt` knows those that the host had when the
//! guest started, so these stay allowed while VMs with cards run.

mod keep;
mod ports;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::fcntl::Flock;
use nix::unistd::{Gid, Uid};
use perigee_model::guest::USER_NETWORK;
use perigee_model::vm::VmNetwork;
use perigee_model::{Problem, ProblemKind};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

pub use keep::keep;

use super::Vm;
use crate::files::{self, listen, read_json, write_json};
use crate::host::Host;
use crate::networks::tools::{is_there, only_one, run, was_late};
use crate::networks::watch::Watch;
use crate::networks::{DIAL_MAX, FIND_AGAIN, SSH_PORT, connections_max, doors, tunnel};
use crate::process::{self, Process, QemuUser};
use crate::users::VmUids;
use crate::vms::Vms;

const PASST: &str = "passt";
/// `passt` is ready after some milliseconds.
const START_DEADLINE: Duration = Duration::from_secs(20);
const LOOK_AGAIN: Duration = Duration::from_millis(5);
/// What is read of passt's files: a number, and its last words.
const SHORT_BYTES: u64 = 4096;
/// The network's end of the cable has this address at every host. QEMU gives the guest's end the address
/// 52:54:00:12:34:56 by default.
const GATEWAY_MAC: &str = "52:55:0a:00:02:02";

/// How often the filter is looked at while it is needed.
const LOOK_AT_FILTER: Duration = Duration::from_secs(2);
/// And no oftener, whatever others change.
const REST: Duration = Duration::from_millis(20);
const RESOLVERS: &str = "/etc/resolv.conf";
/// In the agent's directory: the resolvers that guests may know.
const KNOWN_RESOLVERS: &str = "resolvers.json";
/// As many of them.
const RESOLVERS_MAX: usize = 16;
/// A guest that is refused hears it at once: the kernel heeds an ICMP message for TCP only when it has sent its first packet again, a second later.
const REFUSE: &str = "goto refuse";

/// No guest reaches these, whatever the operator allows: this host itself, link-local addresses, multicast and all.
const NEVER: &str = "0.0.0.0/8, 127.0.0.0/8, 169.254.0.0/16, 224.0.0.0/3";
/// Addresses that are not of the internet, and clouds' metadata services. The operator may allow them.
const PRIVATE: &str = "10.0.0.0/8, 100.64.0.0/10, 168.63.129.16, 172.16.0.0/12, 192.0.0.0/24, 192.168.0.0/16, 198.18.0.0/15";
/// Connections of one VM, and new ones in a second.
const CONNECTIONS: u32 = if cfg!(test) { 50 } else { 2048 };
const NEW_PER_S: u32 = 200;
const BURST: u32 = 5 * NEW_PER_S;
/// Files of a VM's `passt`: it has a socket for each connection, and for each port from which the guest sends UDP.
const FILES: u32 = 2048 + 256;
/// `passt` closes a UDP socket that was not used for 180 s.
const USED_FOR: &str = "10m";

/// Addresses that VMs in user networks reach beside those of the internet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestsReach {
    address: Ipv4Addr,
    prefix_bits: u8,
}

impl FromStr for GuestsReach {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not ADDRESS or ADDRESS/BITS, for example 10.1.0.0/16");
        let (address, bits) = text.split_once('/').unwrap_or((text, "32"));
        let address: Ipv4Addr = address.parse().map_err(|_| wrong())?;
        let prefix_bits: u8 = bits.parse().ok().filter(|bits| *bits <= 32).ok_or_else(wrong)?;
        let host_bits = u32::MAX.checked_shr(prefix_bits.into()).unwrap_or(0);
        if u32::from(address) & host_bits != 0 {
            return Err(format!("{text:?} is not a network: its last bits are not 0"));
        }
        Ok(Self { address, prefix_bits })
    }
}

impl GuestsReach {
    fn has(self, ip: Ipv4Addr) -> bool {
        let host_bits = u32::MAX.checked_shr(self.prefix_bits.into()).unwrap_or(0);
        u32::from(ip) & !host_bits == u32::from(self.address)
    }
}

/// Whether guests reach this address at most where the operator allows it, whoever has it.
pub fn is_private(ip: Ipv4Addr) -> bool {
    let networks = NEVER.split(", ").chain(PRIVATE.split(", "));
    networks.filter_map(|text| text.parse().ok()).any(|network: GuestsReach| network.has(ip))
}

/// The user networks of this host.
#[derive(Debug)]
pub struct UserNetworks {
    /// The group of all `passt`; `None` if the agent is not root.
    group: Option<Gid>,
    uids: VmUids,
    reach: Vec<GuestsReach>,
    state: PathBuf,
    /// The cgroup of all `passt`; an error says why VMs here have no network cards.
    cards: Mutex<Result<PathBuf, String>>,
    /// Of the agents in one network namespace with the same users the one that has this keeps the filter.
    alone: Mutex<Option<Flock<File>>>,
    resolvers: Mutex<BTreeSet<Ipv4Addr>>,
    loaded: tokio::sync::Mutex<Loaded>,
    /// What has last happened to the filter, for people.
    trouble: Mutex<Option<String>>,
}

/// The filter as it was loaded, and as the kernel lists it.
#[derive(Debug, Default)]
struct Loaded {
    rules: String,
    listed: String,
}

impl UserNetworks {
    /// Sets up the packet filter. What is missing is looked for again later.
    pub async fn prepare(
        is_root: bool,
        uids: VmUids,
        reach: Vec<GuestsReach>,
        state: &Path,
        hosts: Option<&[IpAddr]>,
    ) -> Self {
        let networks = Self::new(is_root.then(|| uids.group()), uids, reach, state);
        networks.look_again(hosts).await;
        networks
    }

    fn new(group: Option<Gid>, uids: VmUids, reach: Vec<GuestsReach>, state: &Path) -> Self {
        let known = read_json(&state.join(KNOWN_RESOLVERS)).unwrap_or_default();
        Self {
            group,
            uids,
            reach,
            state: state.to_owned(),
            cards: Mutex::new(Err("the agent has not looked yet".to_owned())),
            alone: Mutex::default(),
            resolvers: Mutex::new(known.unwrap_or_default()),
            loaded: Default::default(),
            trouble: Mutex::default(),
        }
    }

    /// Why VMs here have no network cards.
    pub fn cannot(&self) -> Option<String> {
        self.cards().err()
    }

    fn cards(&self) -> Result<PathBuf, String> {
        self.cards.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Finds out whether VMs here can have network cards.
    async fn look_again(&self, hosts: Option<&[IpAddr]>) {
        let found = self.find(hosts).await;
        *self.cards.lock().unwrap_or_else(PoisonError::into_inner) = found;
    }

    async fn find(&self, hosts: Option<&[IpAddr]>) -> Result<PathBuf, String> {
        self.group.ok_or("the agent is not root")?;
        if !is_there(PASST) {
            return Err("passt is not installed (package passt)".to_owned());
        }
        self.be_alone()?;
        let cards = ports::prepare()?;
        ports::reserve(tunnel::PORT);
        self.filter(hosts).await?;
        Ok(cards)
    }

    /// Two agents whose guests have the same group would load the same table, each with its own rules.
    fn be_alone(&self) -> Result<(), String> {
        let mut alone = self.alone.lock().unwrap_or_else(PoisonError::into_inner);
        if alone.is_none() {
            let own = only_one(&format!("guests-{}", self.uids.group()))?;
            *alone = Some(own.ok_or("another agent of this machine has the same users for its VMs: give each its own (--vm-uids)")?);
        }
        Ok(())
    }

    /// What is wrong, or was, with the filter.
    pub fn warning(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn say(&self, trouble: String) {
        let mut said = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        if said.as_ref() != Some(&trouble) {
            tracing::warn!("{trouble}");
            *said = Some(trouble);
        }
    }

    /// The resolvers that guests may know: those of this host now, and those that it had while VMs with cards ran.
    fn resolvers(&self, now: Vec<Ipv4Addr>) -> Vec<Ipv4Addr> {
        let known = self.resolvers.lock().unwrap_or_else(PoisonError::into_inner);
        known.iter().copied().chain(now).collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn remember_resolvers(&self, now: Vec<Ipv4Addr>, has_guests: bool) {
        let mut known = self.resolvers.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = if has_guests { known.clone() } else { BTreeSet::new() };
        if has_guests {
            next.extend(now.into_iter().take(RESOLVERS_MAX.saturating_sub(next.len())));
        }
        if *known != next {
            if let Err(problem) = write_json(&self.state.join(KNOWN_RESOLVERS), &next) {
                tracing::warn!(%problem, "after a restart of the agent guests may not reach their resolvers");
            }
            *known = next;
        }
    }

    /// Sets the filter up unless it is there. Returns whether somebody has changed it.
    async fn filter(&self, hosts: Option<&[IpAddr]>) -> Result<bool, String> {
        let group = self.uids.group();
        let table = table(group);
        let rules = rules(group, &self.resolvers(resolvers()), &self.reach, hosts);
        let list = async || run("nft", &["-s", "-t", "list", "table", "inet", &table], "").await;
        let mut loaded = self.loaded.lock().await;
        let was_there = !loaded.listed.is_empty();
        let is_there = was_there && list().await.is_ok_and(|listed| listed == loaded.listed);
        if is_there && loaded.rules == rules {
            return Ok(false);
        }
        // Those that guests have already: what the kernel knew of them may be gone.
        let used = if is_there { Ok(Default::default()) } else { doors::udp_of(self.uids) };
        let used: Vec<String> = used?.iter().map(ToString::to_string).collect();
        let used = match used.is_empty() {
            true => String::new(),
            false => format!("add element inet {table} used {{ {} }}\n", used.join(", ")),
        };
        run("nft", &["-f", "-"], &format!("{rules}{used}")).await?;
        *loaded = Loaded { rules, listed: list().await? };
        Ok(was_there && !is_there)
    }

    /// Sets the filter up again if somebody has removed it.
    async fn look_at_filter(&self, hosts: Option<&[IpAddr]>) {
        match self.filter(hosts).await {
            Ok(false) => {}
            Ok(true) => self.say(format!(
                "somebody has changed the packet filter of VMs' network cards (nftables, table inet {}): the agent has \
                 set it up again, and until then, for {} s at most, VMs with cards could reach this host's addresses",
                table(self.uids.group()),
                LOOK_AT_FILTER.as_secs()
            )),
            Err(why) => self.say(format!(
                "VMs with network cards may reach this host's addresses, because the agent can't set up the packet \
                 filter: {why}"
            )),
        }
    }
}

/// Looks at the filter for as long as VMs with cards run, and now and then whether VMs can have cards that couldn't.
pub async fn keep_filtered(host: Arc<Host>, vms: Arc<Vms>) {
    let networks = &host.user_networks;
    let watch = Watch::new();
    if let Err(error) = &watch {
        tracing::warn!(%error, "the agent sees only every {} s whether somebody has changed the packet filter", LOOK_AT_FILTER.as_secs());
    }
    let mut looked = Instant::now();
    loop {
        sleep(REST).await;
        let heard = async {
            let heard = watch.as_ref().map_err(drop)?.removed().await;
            heard.map_err(drop)
        };
        // Without a watch it is looked at now and then.
        if let Ok(Err(())) = timeout(LOOK_AT_FILTER, heard).await {
            sleep(LOOK_AT_FILTER).await;
        }
        host.bridged.look(&vms).await;
        if networks.group.is_none() {
            continue;
        }
        let hosts = host.networks.hosts();
        if networks.cannot().is_some() && looked.elapsed() > FIND_AGAIN {
            networks.look_again(hosts.as_deref()).await;
            looked = Instant::now();
        }
        let has_guests = vms.list().iter().any(|vm| vm.spec.network == VmNetwork::User);
        networks.remember_resolvers(resolvers(), has_guests);
        if has_guests && networks.be_alone().is_ok() {
            networks.look_at_filter(hosts.as_deref()).await;
        }
    }
}

/// The addresses of this host's resolvers.
fn resolvers() -> Vec<Ipv4Addr> {
    resolvers_in(&std::fs::read_to_string(RESOLVERS).unwrap_or_default())
}

fn resolvers_in(text: &str) -> Vec<Ipv4Addr> {
    let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let named = lines.filter(|words| words.first() == Some(&"nameserver"));
    named.filter_map(|words| words.get(1)?.parse::<Ipv4Addr>().ok()).collect()
}

fn table(group: Gid) -> String {
    format!("perigee_guests_{group}")
}

/// The rules are made anew, so that an earlier agent's don't add up; the sets stay, with what the kernel has counted. An
/// address of a host is reached only if just this address is allowed. While the cluster's hosts are not known (`None`), they may
/// be anywhere: guests begin no other connection.
fn rules(
    group: Gid,
    resolvers: &[Ipv4Addr],
    reach: &[GuestsReach],
    hosts: Option<&[IpAddr]>,
) -> String {
    let name = table(group);
    let to = |addresses: BTreeSet<String>, what: &str| match addresses.is_empty() {
        true => String::new(),
        false => {
            let addresses: Vec<String> = addresses.into_iter().collect();
            format!("    ip daddr {{ {} }} {what}\n", addresses.join(", "))
        }
    };
    let names: String = resolvers
        .iter()
        .flat_map(|ip| {
            ["udp", "tcp"].map(|kind| format!("    ip daddr {ip} {kind} dport 53 accept\n"))
        })
        .collect();
    let one = reach.iter().filter(|reach| reach.prefix_bits == 32);
    let one = to(one.map(|reach| reach.address.to_string()).collect(), "accept");
    let many = reach.iter().filter(|reach| reach.prefix_bits < 32);
    let many: String = many
        .map(|reach| format!("    ip daddr {}/{} accept\n", reach.address, reach.prefix_bits))
        .collect();
    let hosts = match hosts {
        Some(hosts) => {
            to(hosts.iter().filter(|ip| ip.is_ipv4()).map(ToString::to_string).collect(), REFUSE)
        }
        None => format!("    ct state new {REFUSE}\n"),
    };
    let connections = connections_max();
    let hook = "type filter hook output priority filter; policy accept;";
    let input = "type filter hook input priority filter; policy accept;";
    format!(
        "table inet {name} {{
  set fresh {{ type uid; size 65535; flags dynamic,timeout; timeout 1m; }}
  set open {{ type uid; size 65535; flags dynamic; }}
  set total {{ type nf_proto; size 16; flags dynamic; }}
  set used {{ type inet_service; size 65535; flags dynamic,timeout; timeout {USED_FOR}; }}
  chain guests {{ }}
  chain refuse {{ }}
  chain strangers {{ }}
  chain in {{ {input} }}
  chain out {{ {hook} }}
}}
flush chain inet {name} out
flush chain inet {name} guests
flush chain inet {name} refuse
flush chain inet {name} in
flush chain inet {name} strangers
table inet {name} {{
  chain strangers {{
    ct direction reply update @used {{ udp dport }} accept
    drop
  }}
  chain in {{ {input}
    udp dport @used jump strangers
  }}
  chain guests {{
    meta l4proto udp update @used {{ udp sport }}
    ct direction reply ct state {{ established, related }} accept
    ct state new update @fresh {{ meta skuid limit rate over {NEW_PER_S}/second burst {BURST} packets }} {REFUSE}
    ct state new add @total {{ meta nfproto ct count over {connections} }} {REFUSE}
    ct state new add @open {{ meta skuid ct count over {CONNECTIONS} }} {REFUSE}
{names}    meta nfproto ipv6 {REFUSE}
    ip daddr {{ {NEVER} }} {REFUSE}
{one}    fib daddr type local {REFUSE}
{hosts}{many}    ip daddr {{ {PRIVATE} }} {REFUSE}
  }}
  chain refuse {{
    meta l4proto tcp reject with tcp reset
    reject
  }}
  chain out {{ {hook}
    meta skgid {group} jump guests
  }}
}}
"
    )
}

/// A card that is connected.
pub struct Cable {
    /// QEMU's end: a TAP, or where it waits for its `passt`.
    pub qemus: OwnedFd,
    /// The network, if it is the VM's own.
    pub passt: Option<Process>,
}

/// Connects the VM's card, if it has one.
///
/// # Errors
/// `Unsupported` if this host can't, `Unavailable` if it can't yet.
pub async fn connect(vm: &Vm, host: &Host) -> Result<Option<Cable>, Problem> {
    match &vm.spec.network {
        VmNetwork::None => return Ok(None),
        VmNetwork::User => {}
        VmNetwork::Cluster(card) => {
            let qemus = host.networks.connect(vm.id(), card).await?;
            return Ok(Some(Cable { qemus, passt: None }));
        }
        VmNetwork::Bridge(card) => {
            let qemus = host.bridged.connect(vm.id(), card).await?;
            return Ok(Some(Cable { qemus, passt: None }));
        }
    }
    let qemus = listen(&vm.dir.network_socket())
        .map_err(|error| Problem::internal(cannot_connect(vm), error))?;
    let passt = begin_passt(vm, host).await?;
    Ok(Some(Cable { qemus: qemus.into(), passt: Some(passt) }))
}

fn cannot_connect(vm: &Vm) -> String {
    format!("can't connect the network card of the VM {}", vm.id())
}

/// Starts the `passt` of a VM whose QEMU waits for it, or will.
async fn begin_passt(vm: &Vm, host: &Host) -> Result<Process, Problem> {
    let what = || cannot_connect(vm);
    let networks = &host.user_networks;
    networks.cards().map_err(|why| Problem::unsupported(what(), why))?;
    let hosts = host.networks.hosts().ok_or_else(|| {
        let why = "the controller has not said yet which addresses the cluster's hosts have, which guests must not reach";
        Problem::unavailable(what(), why).next("it says them within a minute")
    })?;
    // Somebody may have set up the host's firewall anew meanwhile.
    let filtered = networks.filter(Some(&hosts)).await;
    filtered.map_err(|why| match was_late(&why) {
        true => Problem::unavailable(what(), why),
        false => Problem::unsupported(what(), why),
    })?;
    let user = host.user_of(&vm.dir)?;
    let user = user.map(|user| QemuUser { gid: networks.uids.group(), ..user });
    let forward = user.as_ref().map(|user| door_of(user.uid));
    let (at, ready, log) = (vm.dir.network_socket(), vm.dir.network_pid(), vm.dir.network_log());
    let begin = async |forward| {
        let begun = networks.begin((&at, &ready, &log), &host.ip, user, forward).await;
        begun.map_err(|problem| Problem { what: what(), ..problem })
    };
    let passt = match begin(forward).await {
        // Another program has the port: the VM is there all the same, and `vm ssh` is not.
        Err(problem) if problem.kind == ProblemKind::Unsupported && forward.is_some() => {
            tracing::warn!(%problem, "the VM {} is not reached by `vm ssh`", vm.id());
            begin(None).await?
        }
        begun => begun?,
    };
    write_json(&vm.dir.network_process(), &passt)?;
    Ok(passt)
}

/// Where this host reaches port 22 of a guest: each VM has a loopback address of its own, as it has a user.
fn door_of(uid: Uid) -> SocketAddrV4 {
    /// No program has it by default.
    const PORT: u16 = 22_022;
    let [_, a, b, c] = uid.as_raw().to_be_bytes();
    SocketAddrV4::new(Ipv4Addr::new(127, a, b, c), PORT)
}

/// Connects to port 22 of a guest in a user network.
///
/// # Errors
/// `Unsupported` if it is in none, `Unavailable` if nothing listens there.
pub async fn dial(vm: &Vm, host: &Host) -> Result<TcpStream, Problem> {
    let what = || format!("can't reach port {SSH_PORT} of VM {}", vm.id());
    let user = host.user_of(&vm.dir)?.filter(|_| vm.spec.network == VmNetwork::User);
    let Some(user) = user else {
        return Err(Problem::unsupported(what(), "it has no card in a user network"));
    };
    let connected = tokio::time::timeout(DIAL_MAX, TcpStream::connect(door_of(user.uid))).await;
    let connected = connected.map_err(|error| Problem::unavailable(what(), error))?;
    connected.map_err(|error| {
        Problem::unavailable(what(), error).next("is an SSH server running in the guest?")
    })
}

impl UserNetworks {
    /// Starts a VM's `passt`, connected to the socket `at`. `forward` leads to the guest's port 22.
    async fn begin(
        &self,
        (at, ready, log): (&Path, &Path, &Path),
        own_ip: &str,
        user: Option<QemuUser>,
        forward: Option<SocketAddrV4>,
    ) -> Result<Process, Problem> {
        const WHAT: &str = "can't connect a network card";
        let networks = keep::reach(at).await.map_err(|error| Problem::internal(WHAT, error))?;
        // One of an earlier start says nothing.
        for old in [ready, log] {
            match std::fs::remove_file(old) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Problem::internal(WHAT, error));
                }
                _ => {}
            }
        }
        let interface = interface_of(own_ip);
        let own = arguments(networks.as_raw_fd(), ready, interface.as_deref(), forward);
        let limited = [format!("--nofile={FILES}:{FILES}"), PASST.to_owned()];
        let arguments: Vec<String> = limited.into_iter().chain(own).collect();
        let cards = self.cards().map_err(|why| Problem::unsupported(WHAT, why))?;
        let socket = Some(networks.as_fd());
        let started = process::start("prlimit", &arguments, user, log, socket, None);
        drop(networks);
        let (process, _exit) = started?;
        let deadline = Instant::now() + START_DEADLINE;
        // QEMU's user can write there, and could make them as long as it likes.
        while !files::tail(ready, SHORT_BYTES).is_ok_and(|pid| pid.ends_with(b"\n")) {
            if process.has_ended() {
                let said = files::tail(log, SHORT_BYTES).unwrap_or_default();
                let said = String::from_utf8_lossy(&said);
                let last = said.lines().next_back().unwrap_or("it said nothing").to_owned();
                return Err(Problem::unsupported(WHAT, format!("passt ended: {last}"))
                    .next("passt needs an interface with an address on this host"));
            }
            if Instant::now() > deadline {
                process.kill().await?;
                let limit_s = START_DEADLINE.as_secs();
                let why = format!("passt was not ready within {limit_s} s");
                return Err(Problem::unavailable(WHAT, why));
            }
            sleep(LOOK_AGAIN).await;
        }
        if let Err(error) = ports::enter(&cards, &process) {
            process.kill().await?;
            let why = format!("passt can't be put into {}: {error}", cards.display());
            return Err(Problem::unsupported(WHAT, why));
        }
        Ok(process)
    }
}

fn arguments(
    socket: i32,
    ready: &Path,
    interface: Option<&str>,
    forward: Option<SocketAddrV4>,
) -> Vec<String> {
    let network = USER_NETWORK;
    let mut line: Vec<String> = [
        // No address of the host is mapped into the network.
        "--foreground",
        "--quiet",
        "--ipv4-only",
        "--no-map-gw",
        "--mac-addr",
        GATEWAY_MAC,
    ]
    .map(str::to_owned)
    .into();
    let mut add = |option: &str, value: String| line.extend([option.to_owned(), value]);
    add("--address", network.address.to_string());
    add("--netmask", network.prefix_bits.to_string());
    add("--gateway", network.gateway.to_string());
    add("--dns-forward", network.dns.to_string());
    add("--pid", ready.display().to_string());
    if let Some(interface) = interface {
        add("--interface", interface.to_owned());
    }
    if let Some(at) = forward {
        add("--tcp-ports", format!("{}/{}:{SSH_PORT}", at.ip(), at.port()));
    }
    add("--fd", socket.to_string());
    line
}

/// The interface through which this host's own network is reached. Without it `passt` takes the one of the default
/// route, which a host need not have.
fn interface_of(own_ip: &str) -> Option<String> {
    let routes = std::fs::read_to_string("/proc/net/route").ok()?;
    let own = own_ip.parse().ok().filter(|ip: &Ipv4Addr| !ip.is_loopback())?;
    interface_to(own, &routes)
}

/// The table has a line for each route: the interface's name, the destination, six other fields, and the mask;
/// addresses in hexadecimal digits, in the machine's order of bytes.
fn interface_to(own: Ipv4Addr, routes: &str) -> Option<String> {
    let own = u32::from_ne_bytes(own.octets());
    let found = routes.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| u32::from_str_radix(fields.get(at)?, 16).ok();
        let (to, mask) = (number(1)?, number(7)?);
        let name = (*fields.first()?).to_owned();
        (mask != 0 && own & mask == to).then(|| (mask.count_ones(), name))
    });
    found.max_by_key(|(bits, _)| *bits).map(|(_, name)| name)
}
