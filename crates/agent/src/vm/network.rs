//! The network cards of VMs. One in a network of its tenant, or in a bridge of the operator, is a TAP, which
//! [`crate::networks`] makes. A card in a user network is connected to a `passt` of its own, which makes the guest's
//! connections as connections of this host. It is a process of the VM's user, and ends when the VM's QEMU does: the
//! socket between them closes.
//!
//! **What a guest reaches.** Public addresses, and those that the operator allows ([`GuestsReach`]): neither this host nor the
//! cluster's others, no private and no link-local addresses. (A cloud's metadata service at 169.254.169.254 tells whoever asks
//! the host's keys.) A guest can send to any address, so the kernel's packet filter keeps it from these. All `passt` have a group
//! of their own, and the filter's rules are for this group. It also limits the connections of each VM: they are its host's.
//! Without the filter no VM gets a card. Whoever sets the host's firewall up anew may flush it, so it is looked at while VMs with
//! cards run ([`keep_filtered`]).
//!
//! **Names.** A guest reaches port 53 of its host's resolvers, wherever they are.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::unistd::{Gid, Uid};
use perigee_model::guest::USER_NETWORK;
use perigee_model::vm::VmNetwork;
use perigee_model::{Problem, ProblemKind};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

use super::Vm;
use crate::host::Host;
use crate::networks::tools::{is_there, run};
use crate::networks::{DIAL_MAX, SSH_PORT, connections_max};
use crate::process::{self, Process, QemuUser};
use crate::vms::Vms;

const PASST: &str = "passt";
/// `passt` is ready after some milliseconds.
const START_DEADLINE: Duration = Duration::from_secs(20);
const LOOK_AGAIN: Duration = Duration::from_millis(5);
/// The network's end of the cable has this address at every host. QEMU gives the guest's end the address
/// 52:54:00:12:34:56 by default.
const GATEWAY_MAC: &str = "52:55:0a:00:02:02";

/// How often the filter is looked at while it is needed.
const LOOK_AT_FILTER: Duration = Duration::from_secs(2);
const RESOLVERS: &str = "/etc/resolv.conf";

/// No guest reaches these, whatever the operator allows: this host itself, link-local addresses, multicast and all.
const NEVER: &str = "0.0.0.0/8, 127.0.0.0/8, 169.254.0.0/16, 224.0.0.0/3";
/// Addresses that are not of the internet, and clouds' metadata services. The operator may allow them.
const PRIVATE: &str = "10.0.0.0/8, 100.64.0.0/10, 168.63.129.16, 172.16.0.0/12, 192.0.0.0/24, 192.168.0.0/16, 198.18.0.0/15";
/// Connections of one VM, and new ones in a second.
const CONNECTIONS: u32 = if cfg!(test) { 50 } else { 2048 };
const NEW_PER_S: u32 = 200;
const BURST: u32 = 5 * NEW_PER_S;

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

/// The user networks of this host.
#[derive(Debug)]
pub struct UserNetworks {
    /// The group of all `passt`.
    group: Gid,
    reach: Vec<GuestsReach>,
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
    /// Sets up the packet filter. An error says why VMs here have no network cards, and what to do.
    pub async fn prepare(group: Option<Gid>, reach: Vec<GuestsReach>) -> Result<Self, String> {
        let group = group.ok_or("the agent is not root")?;
        if !is_there(PASST) {
            return Err("passt is not installed (package passt)".to_owned());
        }
        let networks = Self::new(group, reach);
        networks.filter(&[]).await?;
        Ok(networks)
    }

    fn new(group: Gid, reach: Vec<GuestsReach>) -> Self {
        Self { group, reach, loaded: Default::default(), trouble: Mutex::default() }
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

    /// Sets the filter up unless it is there. Returns whether somebody has changed it.
    async fn filter(&self, hosts: &[IpAddr]) -> Result<bool, String> {
        let table = table(self.group);
        let rules = rules(self.group, &resolvers(), &self.reach, hosts);
        let list = async || run("nft", &["-s", "-t", "list", "table", "inet", &table], "").await;
        let mut loaded = self.loaded.lock().await;
        let was_there = !loaded.listed.is_empty();
        let is_there = was_there && list().await.is_ok_and(|listed| listed == loaded.listed);
        if is_there && loaded.rules == rules {
            return Ok(false);
        }
        run("nft", &["-f", "-"], &rules).await?;
        *loaded = Loaded { rules, listed: list().await? };
        Ok(was_there && !is_there)
    }

    /// Sets the filter up again if somebody has removed it.
    async fn look_at_filter(&self, hosts: &[IpAddr]) {
        match self.filter(hosts).await {
            Ok(false) => {}
            Ok(true) => self.say(format!(
                "somebody has changed the packet filter of VMs' network cards (nftables, table inet {}): the agent has \
                 set it up again, and until then, for {} s at most, VMs with cards could reach this host's addresses",
                table(self.group),
                LOOK_AT_FILTER.as_secs()
            )),
            Err(why) => self.say(format!(
                "VMs with network cards may reach this host's addresses, because the agent can't set up the packet \
                 filter: {why}"
            )),
        }
    }
}

/// Looks at the filter for as long as VMs with cards run.
pub async fn keep_filtered(host: Arc<Host>, vms: Arc<Vms>) {
    loop {
        sleep(LOOK_AT_FILTER).await;
        host.bridged.look(&vms).await;
        let Ok(networks) = &host.user_networks else { continue };
        if vms.list().iter().any(|vm| vm.spec.network == VmNetwork::User) {
            networks.look_at_filter(&host.networks.hosts()).await;
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
/// address of a host is reached only if just this address is allowed.
fn rules(group: Gid, resolvers: &[Ipv4Addr], reach: &[GuestsReach], hosts: &[IpAddr]) -> String {
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
    let many =
        many.map(|reach| format!("    ip daddr {}/{} accept\n", reach.address, reach.prefix_bits));
    // While the cluster's hosts are not known, they may be in these.
    let many: String = if hosts.is_empty() { String::new() } else { many.collect() };
    let hosts =
        to(hosts.iter().filter(|ip| ip.is_ipv4()).map(ToString::to_string).collect(), "reject");
    let connections = connections_max();
    let hook = "type filter hook output priority filter; policy accept;";
    format!(
        "table inet {name} {{
  set fresh {{ type uid; size 65535; flags dynamic,timeout; timeout 1m; }}
  set open {{ type uid; size 65535; flags dynamic; }}
  set total {{ type nf_proto; size 16; flags dynamic; }}
  chain guests {{ }}
  chain out {{ {hook} }}
}}
flush chain inet {name} out
flush chain inet {name} guests
table inet {name} {{
  chain guests {{
    ct direction reply ct state {{ established, related }} accept
    ct state new update @fresh {{ meta skuid limit rate over {NEW_PER_S}/second burst {BURST} packets }} reject
    ct state new add @total {{ meta nfproto ct count over {connections} }} reject
    ct state new add @open {{ meta skuid ct count over {CONNECTIONS} }} reject
{names}    meta nfproto ipv6 reject
    ip daddr {{ {NEVER} }} reject
{one}    fib daddr type local reject
{hosts}{many}    ip daddr {{ {PRIVATE} }} reject
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
    /// QEMU's end. The network is there while it is open.
    pub qemus: OwnedFd,
    /// The network, if it is the VM's own.
    pub passt: Option<Process>,
}

/// Connects the VM's card, if it has one.
///
/// # Errors
/// `Unsupported` if this host can't.
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
    let what = || format!("can't connect the network card of the VM {}", vm.id());
    let networks = host.user_networks.as_ref().map_err(|why| Problem::unsupported(what(), why))?;
    // Somebody may have set up the host's firewall anew meanwhile.
    let filtered = networks.filter(&host.networks.hosts()).await;
    filtered.map_err(|why| Problem::unsupported(what(), why))?;
    let user = host.user_of(&vm.dir)?;
    let user = user.map(|user| QemuUser { gid: networks.group, ..user });
    let forward = user.as_ref().map(|user| door_of(user.uid));
    match begin(vm, host, user, forward).await {
        // Another program has the port: the VM is there all the same, and `vm ssh` is not.
        Err(problem) if problem.kind == ProblemKind::Unsupported && forward.is_some() => {
            tracing::warn!(%problem, "the VM {} is not reached by `vm ssh`", vm.id());
            begin(vm, host, user, None).await.map(Some)
        }
        begun => begun.map(Some),
    }
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

/// Starts the VM's `passt`. `forward` leads to the guest's port 22.
async fn begin(
    vm: &Vm,
    host: &Host,
    user: Option<QemuUser>,
    forward: Option<SocketAddrV4>,
) -> Result<Cable, Problem> {
    let what = || format!("can't connect the network card of the VM {}", vm.id());
    let kind = (AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC);
    let (qemus, networks) = socketpair(kind.0, kind.1, kind.2, kind.3)
        .map_err(|error| Problem::internal(what(), error))?;
    let (ready, log) = (vm.dir.network_pid(), vm.dir.network_log());
    // One of an earlier start says nothing.
    for old in [&ready, &log] {
        match std::fs::remove_file(old) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Problem::internal(what(), error));
            }
            _ => {}
        }
    }
    let interface = interface_of(&host.ip);
    let arguments = arguments(networks.as_raw_fd(), &ready, interface.as_deref(), forward);
    let started = process::start(PASST, &arguments, user, &log, Some(networks.as_fd()), None);
    drop(networks);
    let (process, _exit) = started?;
    let deadline = Instant::now() + START_DEADLINE;
    while !std::fs::read_to_string(&ready).is_ok_and(|pid| pid.ends_with('\n')) {
        if process.has_ended() {
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            let last = said.lines().next_back().unwrap_or("it said nothing").to_owned();
            return Err(Problem::unsupported(what(), format!("passt ended: {last}"))
                .next("passt needs an interface with an address on this host"));
        }
        if Instant::now() > deadline {
            process.kill().await?;
            let limit_s = START_DEADLINE.as_secs();
            let why = format!("passt was not ready within {limit_s} s");
            return Err(Problem::unsupported(what(), why));
        }
        sleep(LOOK_AGAIN).await;
    }
    Ok(Cable { qemus, passt: Some(process) })
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

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTES: &str = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
         eth0\t00000000\t0102000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
         eth0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n\
         br0\t0002000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";

    #[test]
    fn the_interface_is_the_one_of_the_nearest_network() {
        let to = |ip: [u8; 4]| interface_to(ip.into(), ROUTES);
        assert_eq!(to([10, 0, 2, 7]).as_deref(), Some("br0"));
        assert_eq!(to([10, 9, 2, 7]).as_deref(), Some("eth0"));
        assert_eq!(to([192, 0, 2, 7]), None, "the default route is passt's own choice");
        assert_eq!(interface_to([10, 0, 2, 7].into(), "Iface\nbroken\n"), None);
    }

    #[test]
    fn guests_reach_the_resolvers_of_their_host() {
        let text = "# nameserver 127.0.0.1\nnameserver 127.0.0.53\nnameserver 10.1.1.1\n\
                    options edns0\nnameserver ::1\nnameserver\n";
        assert_eq!(resolvers_in(text), [Ipv4Addr::new(127, 0, 0, 53), Ipv4Addr::new(10, 1, 1, 1)]);
    }

    #[test]
    fn what_guests_may_reach_is_a_network_or_an_address() {
        let reach = |text: &str| text.parse::<GuestsReach>();
        let network = GuestsReach { address: Ipv4Addr::new(10, 1, 0, 0), prefix_bits: 16 };
        assert_eq!(reach("10.1.0.0/16"), Ok(network));
        assert_eq!(reach("10.1.0.7").map(|reach| reach.prefix_bits), Ok(32));
        assert!(reach("0.0.0.0/0").is_ok());
        for wrong in ["10.1.0.7/16", "10.1.0.0/33", "web", "::1", ""] {
            assert!(reach(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn no_address_of_the_host_is_mapped_into_the_network() {
        let line = arguments(7, Path::new("/run/p"), Some("br0"), None).join(" ");
        assert!(line.contains("--no-map-gw"), "{line}");
        assert!(line.ends_with("--interface br0 --fd 7"), "{line}");
    }

    /// Whether a process of this group connects to an address.
    fn connects(group: u32, address: &str, port: u16) -> bool {
        use std::os::unix::process::CommandExt as _;
        let script = format!("exec 3<>/dev/tcp/{address}/{port}");
        let mut bash = std::process::Command::new("bash");
        bash.args(["-c", &script]).gid(group).stderr(std::process::Stdio::null());
        bash.status().expect("bash runs").success()
    }

    fn shell(line: &str) {
        let ended = std::process::Command::new("sh").args(["-c", line]).status();
        assert!(ended.expect("sh runs").success(), "{line}");
    }

    const GROUP: u32 = 1_900_065_535;

    /// The real kernel, in network namespaces of its own: that of the host, and one in which everything else is.
    #[test]
    fn guests_reach_neither_hosts_nor_private_addresses_unless_the_operator_allows_them() {
        if !nix::unistd::Uid::effective().is_root() {
            return;
        }
        std::thread::spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("a namespace");
            let own = || std::fs::File::open("/proc/thread-self/ns/net").expect("a namespace");
            let enter = |namespace: &std::fs::File| {
                nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).expect("it is there");
            };
            // Everything else.
            let outside = own();
            let all = ["10.9.9.9", "10.1.2.3", "192.0.2.9", "192.0.2.10", "203.0.113.5", "169.254.169.254"];
            shell("ip link set lo up");
            for address in all {
                shell(&format!("ip address add {address}/32 dev lo"));
            }
            let there = std::net::TcpListener::bind("0.0.0.0:0").expect("a port");
            let port = there.local_addr().expect("an address").port();
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("a namespace");
            let host = own();
            let at = format!("/proc/{}/fd/{}", std::process::id(), outside.as_raw_fd());
            shell("ip link set lo up; ip address add 10.8.8.8/32 dev lo; ip address add 198.51.100.2/24 dev lo");
            shell(&format!("ip link add eth0 type veth peer name eth0 netns {at}"));
            shell("ip address add 10.8.0.1/24 dev eth0; ip link set eth0 up; ip route add default via 10.8.0.2");
            enter(&outside);
            shell("ip address add 10.8.0.2/24 dev eth0; ip link set eth0 up; ip route add default via 10.8.0.1");
            enter(&host);
            let here = std::net::TcpListener::bind(("0.0.0.0", port)).expect("the same port");
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.expect("a runtime");
            let reach = ["10.1.0.0/16", "192.0.2.10", "10.8.0.0/24"].map(|text| text.parse().expect("one"));
            let networks = UserNetworks::new(Gid::from_raw(GROUP), reach.into());
            let hosts = ["192.0.2.9", "192.0.2.10", "fd00::1"].map(|ip| ip.parse().expect("an address"));
            runtime.block_on(networks.filter(&[])).expect("the kernel takes it");
            assert!(connects(GROUP, "192.0.2.9", port), "nobody has said that it is a host");
            assert!(!connects(GROUP, "10.1.2.3", port), "it could be a host");
            runtime.block_on(networks.filter(&hosts)).expect("the kernel takes it");
            let refused =
                ["127.0.0.1", "10.8.8.8", "10.8.0.1", "198.51.100.2", "169.254.169.254", "10.9.9.9", "192.0.2.9"];
            for address in refused {
                assert!(!connects(GROUP, address, port), "a guest reaches {address}");
                assert!(connects(0, address, port), "others reach {address}");
            }
            for address in ["203.0.113.5", "10.1.2.3", "192.0.2.10"] {
                assert!(connects(GROUP, address, port), "a guest reaches {address}");
            }
            // This host connects to a guest, and gets answers.
            let root = nix::unistd::setfsgid(Gid::from_raw(GROUP));
            let guest = std::net::TcpListener::bind("127.63.179.7:0").expect("a port");
            nix::unistd::setfsgid(root);
            assert!(connects(0, "127.63.179.7", guest.local_addr().expect("an address").port()));
            runtime.block_on(async {
                networks.look_at_filter(&hosts).await;
                assert_eq!(networks.warning(), None);
                for flush in [
                    "flush ruleset",
                    "flush table inet perigee_guests_1900065535",
                    "delete table inet perigee_guests_1900065535",
                ] {
                    shell(&format!("nft {flush}"));
                    assert!(connects(GROUP, "10.9.9.9", port), "{flush}: the filter is gone");
                    networks.look_at_filter(&hosts).await;
                    assert!(!connects(GROUP, "10.9.9.9", port), "{flush}: it is back");
                    let said = networks.warning().expect("it is said");
                    assert!(said.contains("has set it up again"), "{said}");
                }
            });
            // Many connections at once, also if the rules are loaded again.
            let open = |from: u32| {
                let script = format!(
                    "for n in $(seq 60); do exec {{fd}}<>/dev/tcp/203.0.113.5/{port} && echo $n; done; exit 0"
                );
                let mut bash = std::process::Command::new("bash");
                use std::os::unix::process::CommandExt as _;
                bash.args(["-c", &script]).gid(GROUP).uid(from).stderr(std::process::Stdio::null());
                String::from_utf8_lossy(&bash.output().expect("bash runs").stdout).lines().count()
            };
            assert!((40..=51).contains(&open(1_900_000_001)), "a guest has no more connections than it may");
            assert!((40..=51).contains(&open(1_900_000_002)), "and others have theirs");
            drop((there, here));
        })
        .join()
        .expect("no panic");
    }

    #[test]
    fn a_host_is_reached_through_no_larger_network() {
        let reach = ["0.0.0.0/0", "192.0.2.10"].map(|text| text.parse().expect("one"));
        let text =
            rules(Gid::from_raw(7), &[], &reach, &["192.0.2.9".parse().expect("an address")]);
        let at = |part: &str| text.find(part).expect(part);
        assert!(at("224.0.0.0/3 } reject") < at("{ 192.0.2.10 } accept"), "{text}");
        assert!(at("{ 192.0.2.10 } accept") < at("fib daddr type local reject"), "{text}");
        assert!(at("{ 192.0.2.9 } reject") < at("0.0.0.0/0 accept"), "{text}");
        assert!(at("0.0.0.0/0 accept") < at("192.168.0.0/16, "), "{text}");
    }
}
