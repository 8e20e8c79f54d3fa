//! The network cards of VMs. One in a network of its tenant is a TAP, which [`crate::networks`] makes. A card in a user network is connected to a `passt` of its own, which makes the guest's
//! connections as connections of this host. It is a process of the VM's user, and ends when the VM's QEMU does: the
//! socket between them closes.
//!
//! **What a guest reaches.** What other programs of this host reach, but neither the host itself over its loopback
//! addresses nor link-local ones: a cloud's metadata service at 169.254.169.254 tells whoever asks the host's keys.
//! A guest can send to any address, so the kernel's packet filter keeps it from these. All `passt` have a group of their
//! own, and the filter's rule is for this group. Without the filter no VM gets a card. Whoever sets the host's firewall up
//! anew may flush it, so it is looked at while VMs with cards run ([`keep_filtered`]).
//!
//! **Names.** A host's resolver may be at such an address itself (systemd's is at 127.0.0.53). Then the guests reach its
//! port 53, and no other.

use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::unistd::Gid;
use perigee_model::Problem;
use perigee_model::guest::USER_NETWORK;
use perigee_model::vm::VmNetwork;
use tokio::io::AsyncWriteExt;
use tokio::time::{Instant, sleep};

use super::Vm;
use crate::host::Host;
use crate::process::{self, Process, QemuUser};
use crate::vms::Vms;

const PASST: &str = "passt";
/// `passt` is ready after some milliseconds.
const START_DEADLINE: Duration = Duration::from_secs(20);
const LOOK_AGAIN: Duration = Duration::from_millis(5);
const FILTER_DEADLINE: Duration = Duration::from_secs(10);
/// The network's end of the cable has this address at every host. QEMU gives the guest's end the address
/// 52:54:00:12:34:56 by default.
const GATEWAY_MAC: &str = "52:55:0a:00:02:02";

/// How often the filter is looked at while it is needed.
const LOOK_AT_FILTER: Duration = Duration::from_secs(2);
const RESOLVERS: &str = "/etc/resolv.conf";

/// The user networks of this host.
#[derive(Debug)]
pub struct UserNetworks {
    /// The group of all `passt`.
    group: Gid,
    /// What has last happened to the filter, for people.
    trouble: Mutex<Option<String>>,
}

impl UserNetworks {
    /// Sets up the packet filter. An error says why VMs here have no network cards, and what to do.
    pub async fn prepare(group: Option<Gid>) -> Result<Self, String> {
        let group = group.ok_or("the agent is not root")?;
        if !is_there(PASST) {
            return Err("passt is not installed (package passt)".to_owned());
        }
        filter(&rules(group, &local_resolvers())).await?;
        Ok(Self { group, trouble: Mutex::default() })
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

    /// Sets the filter up again if somebody has removed it.
    async fn look_at_filter(&self) {
        if is_filtered(self.group).await {
            return;
        }
        match filter(&rules(self.group, &local_resolvers())).await {
            Ok(()) => self.say(format!(
                "somebody has removed the packet filter of VMs' network cards (nftables, table inet {}): the agent has \
                 set it up again, and until then, for {} s at most, VMs with cards could reach this host's loopback addresses",
                table(self.group),
                LOOK_AT_FILTER.as_secs()
            )),
            Err(why) => self.say(format!(
                "VMs with network cards reach this host's loopback addresses, because somebody has removed the packet \
                 filter and the agent can't set it up again: {why}"
            )),
        }
    }
}

/// Looks at the filter for as long as VMs with cards run.
pub async fn keep_filtered(host: Arc<Host>, vms: Arc<Vms>) {
    let Ok(networks) = &host.user_networks else { return std::future::pending().await };
    loop {
        sleep(LOOK_AT_FILTER).await;
        if vms.list().iter().any(|vm| vm.spec.network == VmNetwork::User) {
            networks.look_at_filter().await;
        }
    }
}

/// The addresses of resolvers to which the filter would not let a guest.
fn local_resolvers() -> Vec<Ipv4Addr> {
    resolvers_in(&std::fs::read_to_string(RESOLVERS).unwrap_or_default())
}

fn resolvers_in(text: &str) -> Vec<Ipv4Addr> {
    let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let named = lines.filter(|words| words.first() == Some(&"nameserver"));
    let addresses = named.filter_map(|words| words.get(1)?.parse::<Ipv4Addr>().ok());
    addresses.filter(|ip| ip.is_loopback() || ip.is_link_local()).collect()
}

fn is_there(program: &str) -> bool {
    let dirs = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&dirs).any(|dir| dir.join(program).is_file())
}

fn table(group: Gid) -> String {
    format!("perigee_guests_{group}")
}

/// The table is made anew, so that an earlier agent's rules don't add up.
fn rules(group: Gid, resolvers: &[Ipv4Addr]) -> String {
    let table = format!("table inet {}", table(group));
    let names: String = resolvers
        .iter()
        .flat_map(|ip| ["udp", "tcp"].map(|kind| (ip, kind)))
        .map(|(ip, kind)| format!("    meta skgid {group} ip daddr {ip} {kind} dport 53 accept\n"))
        .collect();
    format!(
        "{table}\ndelete {table}\n{table} {{\n  chain out {{\n    type filter hook output priority filter;\n{names}    \
         meta skgid {group} ip daddr {{ 127.0.0.0/8, 169.254.0.0/16 }} reject\n    \
         meta skgid {group} ip6 daddr {{ ::1, fe80::/10, fd00:ec2::/32 }} reject\n  }}\n}}\n"
    )
}

/// Whether both rules that reject are there.
async fn is_filtered(group: Gid) -> bool {
    let mut nft = tokio::process::Command::new("nft");
    nft.args(["--numeric", "list", "chain", "inet", &table(group), "out"]);
    nft.stdin(Stdio::null()).kill_on_drop(true);
    match tokio::time::timeout(FILTER_DEADLINE, nft.output()).await {
        Ok(Ok(listed)) if listed.status.success() => {
            let text = String::from_utf8_lossy(&listed.stdout);
            let rejects = |line: &&str| line.contains("skgid") && line.contains("reject");
            text.contains("hook output") && text.lines().filter(rejects).count() == 2
        }
        _ => false,
    }
}

async fn filter(rules: &str) -> Result<(), String> {
    let failed = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => "nft is not installed (package nftables)".to_owned(),
        _ => format!("can't run nft: {error}"),
    };
    let mut nft = tokio::process::Command::new("nft");
    nft.args(["-f", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut running = nft.spawn().map_err(failed)?;
    let mut input = running.stdin.take().expect("it was asked for");
    let ended = async {
        input.write_all(rules.as_bytes()).await?;
        drop(input);
        running.wait_with_output().await
    };
    let limit_s = FILTER_DEADLINE.as_secs();
    let ended = tokio::time::timeout(FILTER_DEADLINE, ended);
    let ended = ended.await.map_err(|_| format!("nft took longer than {limit_s} s"))?;
    let ended = ended.map_err(failed)?;
    if ended.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&ended.stderr);
    let first = said.lines().next().unwrap_or_default();
    Err(format!("the kernel's packet filter can't be set up: {first}"))
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
    }
    let what = || format!("can't connect the network card of the VM {}", vm.id());
    let networks = host.user_networks.as_ref().map_err(|why| Problem::unsupported(what(), why))?;
    // Somebody may have set up the host's firewall anew meanwhile.
    let filtered = filter(&rules(networks.group, &local_resolvers())).await;
    filtered.map_err(|why| Problem::unsupported(what(), why))?;
    let user = host.user_of(&vm.dir)?;
    let user = user.map(|user| QemuUser { gid: networks.group, ..user });
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
    let arguments = arguments(networks.as_raw_fd(), &ready, interface_of(&host.ip).as_deref());
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
            return Err(Problem::unavailable(what(), why));
        }
        sleep(LOOK_AGAIN).await;
    }
    Ok(Some(Cable { qemus, passt: Some(process) }))
}

fn arguments(socket: i32, ready: &Path, interface: Option<&str>) -> Vec<String> {
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
    fn only_resolvers_that_the_filter_would_keep_guests_from_are_let_through() {
        let text = "# nameserver 127.0.0.1\nnameserver 127.0.0.53\nnameserver 10.1.1.1\n\
                    options edns0\nnameserver 169.254.169.254\nnameserver ::1\nnameserver\n";
        let found = resolvers_in(text);
        assert_eq!(found, [Ipv4Addr::new(127, 0, 0, 53), Ipv4Addr::new(169, 254, 169, 254)]);
    }

    #[test]
    fn no_address_of_the_host_is_mapped_into_the_network() {
        let line = arguments(7, Path::new("/run/p"), Some("br0")).join(" ");
        assert!(line.contains("--no-map-gw"), "{line}");
        assert!(line.ends_with("--interface br0 --fd 7"), "{line}");
    }

    /// Whether a process of this group connects to an address.
    fn connects(group: u32, address: &str, port: u16) -> bool {
        use std::os::unix::process::CommandExt as _;
        let script = format!("exec 3<>/dev/tcp/{address}/{port}");
        let mut bash = std::process::Command::new("bash");
        bash.args(["-c", &script]).gid(group).stderr(Stdio::null());
        bash.status().expect("bash runs").success()
    }

    /// The real kernel, in a network namespace of its own. The filter can be set up again.
    #[test]
    fn guests_reach_neither_their_hosts_loopback_nor_link_local_addresses() {
        if !nix::unistd::Uid::effective().is_root() {
            return;
        }
        let looked = std::thread::spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("a namespace");
            let ip = |line: &str| {
                let ended = std::process::Command::new("ip").args(line.split(' ')).status();
                assert!(ended.expect("ip runs").success(), "{line}");
            };
            ip("link set lo up");
            ip("address add 169.254.169.254/32 dev lo");
            ip("address add 10.9.9.9/32 dev lo");
            let listener = std::net::TcpListener::bind("0.0.0.0:0").expect("a port");
            let port = listener.local_addr().expect("an address").port();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let group = 1_900_065_535;
            let resolver = Ipv4Addr::new(127, 0, 0, 53);
            let _names = std::net::TcpListener::bind((resolver, 53)).expect("a port");
            let runtime = runtime.expect("a runtime");
            runtime.block_on(async {
                for _ in 0..2 {
                    filter(&rules(Gid::from_raw(group), &[resolver]))
                        .await
                        .expect("the kernel takes them");
                }
            });
            for address in ["127.0.0.1", "127.9.9.9", "169.254.169.254"] {
                assert!(!connects(group, address, port), "a guest reaches {address}");
                assert!(connects(0, address, port), "others reach {address}");
            }
            assert!(connects(group, "10.9.9.9", port), "a guest reaches the others");
            assert!(connects(group, "127.0.0.53", 53), "a guest reaches its host's resolver");
            assert!(!connects(group, "127.0.0.53", port), "and nothing else there");
            runtime.block_on(async {
                let networks =
                    UserNetworks { group: Gid::from_raw(group), trouble: Mutex::default() };
                networks.look_at_filter().await;
                assert_eq!(networks.warning(), None);
                for flush in [
                    "flush ruleset",
                    "flush table inet perigee_guests_1900065535",
                    "delete table inet perigee_guests_1900065535",
                ] {
                    let mut nft = std::process::Command::new("nft");
                    assert!(nft.args(flush.split(' ')).status().expect("nft runs").success());
                    assert!(connects(group, "127.9.9.9", port), "{flush}: the filter is gone");
                    networks.look_at_filter().await;
                    assert!(!connects(group, "127.9.9.9", port), "{flush}: it is back");
                    let said = networks.warning().expect("it is said");
                    assert!(said.contains("has set it up again"), "{said}");
                }
            });
        });
        looked.join().expect("no panic");
    }
}
