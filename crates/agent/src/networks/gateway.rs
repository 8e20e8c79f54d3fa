//! A network's gateway: `dnsmasq` in a network namespace of its own, which answers DHCP and names, and through which the
//! network's VMs reach the world if that is wanted.
//!
//! The namespace is there for as long as that process is, so nothing is left when it ends: not even its cables. Networks
//! of the same addresses do not meet, and none of the host's services is in the namespace.
//!
//! ```text
//! bridge -- pg… ====== inner [ dnsmasq, NAT ] outer ====== pu… -- the host's routes, NAT
//! ```

use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Gid, Group, Pid, Uid, User, chown};
use perigee_model::network::{DOMAIN, HostNetwork, mac};
use perigee_model::tenant::SEPARATOR;

use super::interface;
use super::names::{Tag, uplink_addresses};
use super::rules::of_gateway;
use super::tools::{batch, batch_within, namespace_of, run};
use crate::files;
use crate::process::{self, Looks, Process};

const DNSMASQ: &str = "dnsmasq";
/// Who has `systemd-resolved` finds an address of this host in the first file, and the resolvers that it asks in the second one.
const RESOLVERS: [&str; 2] = ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"];
/// Names that are no VM's.
const KEPT: [&str; 2] = ["gateway", "localhost"];
/// One that does not start holds up the others of its host for so long.
const START_DEADLINE: Duration = Duration::from_secs(10);
const LOG_BYTES_MAX: u64 = 1 << 20;
const LOG_KEEP_BYTES: u64 = 256 << 10;

/// A gateway that runs here.
#[derive(Debug)]
pub struct Running {
    process: Process,
    /// The files that it has read.
    told: Names,
    /// The packet filter's rules in its namespace.
    rules: String,
    /// Whether its cables surely have their addresses: an agent that was ended while it made them may have left them without.
    is_set_up: bool,
}

/// The files of names and addresses, and of who is asked for other names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Names {
    dhcp: String,
    dns: String,
    servers: String,
}

impl Running {
    /// The process in whose network namespace the gateway is.
    pub fn pid(&self) -> u32 {
        self.process.pid
    }
}

impl Names {
    fn of(network: &HostNetwork, resolvers: &[Ipv4Addr]) -> Self {
        let mut names = Self::default();
        for ip in resolvers.iter().filter(|_| network.nat) {
            let _ = writeln!(names.servers, "server={ip}");
        }
        let _ = writeln!(names.dns, "{} gateway", network.subnet.gateway());
        for member in &network.members {
            let (address, name) = (member.address, member.vm.as_str());
            let name = name.rsplit(SEPARATOR).next().unwrap_or(name);
            let mac = mac(network.vni, network.subnet, address);
            let is_host_name = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
            let is_told = is_host_name && !is_dnsmasqs(name);
            let host_name = if is_told { format!(",{name}") } else { String::new() };
            let _ = writeln!(names.dhcp, "{mac},{address}{host_name}");
            // A name with dots could be one of the internet's.
            let own = if is_host_name && !KEPT.contains(&name) { name } else { "" };
            let _ = writeln!(names.dns, "{address} {name}.{DOMAIN} {own}");
        }
        names
    }

    /// While the host has no resolvers, the gateway keeps those that it knows.
    fn or_servers_of(mut self, told: &Self) -> Self {
        if self.servers.is_empty() {
            self.servers.clone_from(&told.servers);
        }
        self
    }
}

/// Whether dnsmasq would take this name of a client for something else: a word of its own, or a lease time such as `12h`
/// (`--dhcp-host` in its manual).
fn is_dnsmasqs(name: &str) -> bool {
    let number = name.strip_suffix(['s', 'm', 'h', 'd', 'w']).unwrap_or(name);
    let is_number = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    ["ignore", "infinite"].contains(&name) || is_number
}

fn directory(dir: &Path, vni: u16) -> PathBuf {
    dir.join(format!("gateway-{vni:04x}"))
}

/// The user that dnsmasq becomes, and its group, which reads the files of names.
fn user() -> Result<(String, String, Gid), String> {
    let unknown = || "there is no user nobody".to_owned();
    let user = User::from_name("nobody").ok().flatten().ok_or_else(unknown)?;
    let group = Group::from_gid(user.gid).ok().flatten().ok_or_else(unknown)?;
    Ok((user.name, group.name, user.gid))
}

/// The addresses of this host, with which the packet filter lets no gateway speak.
fn own_addresses() -> Vec<Ipv4Addr> {
    interface::interfaces().collect()
}

/// Those of the first file that has some.
fn resolvers_in(files: [impl AsRef<Path>; 2], own: &[Ipv4Addr]) -> Vec<Ipv4Addr> {
    let read = files.map(|file| resolvers(&std::fs::read_to_string(file).unwrap_or_default(), own));
    read.into_iter().find(|found| !found.is_empty()).unwrap_or_default()
}

/// Why gateways here find no names of the outside, if this host has resolvers and a gateway can reach none of them.
pub fn no_resolvers() -> Option<String> {
    no_resolvers_in(RESOLVERS, &own_addresses())
}

fn no_resolvers_in(files: [impl AsRef<Path> + Clone; 2], own: &[Ipv4Addr]) -> Option<String> {
    if !resolvers_in(files.clone(), own).is_empty() {
        return None;
    }
    let [first, _] = files;
    let named = named(&std::fs::read_to_string(first).unwrap_or_default());
    let named: Vec<String> = named.iter().map(ToString::to_string).collect();
    (!named.is_empty()).then(|| {
        format!(
            "VMs in networks whose gateway is here find no names of the outside: the resolvers of this host ({}) are on the host \
             itself or have link-local addresses, which VMs don't reach: name another one in {}",
            named.join(", "),
            RESOLVERS[0]
        )
    })
}

/// Resolvers that a gateway can reach: those that are not on this host.
fn resolvers(text: &str, own: &[Ipv4Addr]) -> Vec<Ipv4Addr> {
    let is_away = |ip: &Ipv4Addr| !ip.is_loopback() && !ip.is_link_local() && !own.contains(ip);
    named(text).into_iter().filter(is_away).collect()
}

fn named(text: &str) -> Vec<Ipv4Addr> {
    let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let named = lines.filter(|words| words.first() == Some(&"nameserver"));
    named.filter_map(|words| words.get(1)?.parse().ok()).collect()
}

fn arguments(network: &HostNetwork, dir: &Path, user: &str, group: &str) -> Vec<String> {
    let (subnet, mtu) = (network.subnet, network.mtu);
    let first = subnet.address(0);
    let mut line: Vec<String> = ["--net", "--", DNSMASQ, "-l"].map(str::to_owned).into();
    line.push(leases(dir));
    line.extend(
        [
            "--keep-in-foreground",
            "--log-facility=-",
            "--quiet-dhcp",
            "--conf-file=/dev/null",
            "--pid-file",
            "--no-hosts",
            "--no-resolv",
            "--interface=inner",
            "--except-interface=lo",
            "--bind-dynamic",
            "--dhcp-authoritative",
            "--no-ping",
            // Who a client is says its hardware address, which the packet filter looks at.
            "--dhcp-ignore-clid",
            "--domain-needed",
            "--bogus-priv",
            "--expand-hosts",
        ]
        .map(str::to_owned),
    );
    line.extend([
        format!("--user={user}"),
        format!("--group={group}"),
        format!("--domain={DOMAIN}"),
        format!("--local=/{DOMAIN}/"),
        format!("--dhcp-range={first},static,{},12h", subnet.netmask()),
        format!("--dhcp-lease-max={}", subnet.of_vms().len()),
        format!("--dhcp-hostsfile={}", dir.join("dhcp").display()),
        format!("--addn-hosts={}", dir.join("dns").display()),
        format!("--dhcp-option=option:mtu,{mtu}"),
        format!("--dhcp-option=option:domain-search,{DOMAIN}"),
    ]);
    if network.nat {
        line.push(format!("--servers-file={}", servers(dir).display()));
    } else {
        // It leads nowhere.
        line.push("--dhcp-option=option:router".to_owned());
    }
    line
}

fn servers(dir: &Path) -> PathBuf {
    dir.join("servers")
}

/// The argument by which a gateway's process is found.
fn leases(dir: &Path) -> String {
    dir.join("leases").display().to_string()
}

/// Finds the gateway that an earlier agent has started.
fn find(dir: &Path) -> Result<Option<Process>, String> {
    let leases = leases(dir);
    // It becomes another user after its start, and the kernel may show root for it.
    let nobody = User::from_name("nobody").ok().flatten().map(|user| user.uid);
    for uid in [Some(Uid::from_raw(0)), nobody].into_iter().flatten() {
        let looks = Looks { program: DNSMASQ, arguments: ["-l", &leases], uid };
        let found =
            Process::find(looks).map_err(|error| format!("can't find a gateway: {error}"))?;
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// Whether the gateway's process runs.
pub fn runs(running: Option<&Running>) -> bool {
    running.is_some_and(|running| !running.process.has_ended())
}

/// Starts the gateway anew, with its cables.
pub async fn start(tag: &Tag, dir: &Path, network: &HostNetwork) -> Result<Running, String> {
    let vni = network.vni;
    end(tag, dir, vni, None).await?;
    let started = tokio::time::timeout(START_DEADLINE, begin(tag, dir, network));
    let why = match started.await {
        Ok(Ok(running)) => return Ok(running),
        Ok(Err(why)) => why,
        Err(_) => format!("it took longer than {} s", START_DEADLINE.as_secs()),
    };
    let said = files::tail(&directory(dir, vni).join("log"), LOG_KEEP_BYTES).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    let last = said.lines().next_back().unwrap_or_default();
    let why = format!("the gateway of network {} did not start: {why} {last}", network.name);
    end(tag, dir, vni, None).await.map_err(|also| format!("{why}; {also}"))?;
    Err(why)
}

async fn begin(tag: &Tag, dir: &Path, network: &HostNetwork) -> Result<Running, String> {
    let own = directory(dir, network.vni);
    let (user, group, gid) = user()?;
    let made = std::fs::create_dir_all(&own).and_then(|()| give(&own, gid, 0o750));
    made.map_err(|error| format!("can't make {}: {error}", own.display()))?;
    let told = Names::of(network, &resolvers_in(RESOLVERS, &own_addresses()));
    write(&own, &told)?;
    let line = arguments(network, &own, &user, &group);
    let (process, _exit) = process::start("unshare", &line, None, &own.join("log"), None, None)
        .map_err(|problem| format!("{}: {}", problem.what, problem.why))?;
    connect(tag, network, &process).await?;
    let rules = of_gateway(network.nat, &network.published);
    Ok(Running { process, told, rules, is_set_up: true })
}

/// Lets a group read a file, or enter a directory, and nobody else. (The daemons' umask lets nobody.)
pub fn give(path: &Path, group: Gid, mode: u32) -> std::io::Result<()> {
    chown(path, None, Some(group))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
}

fn write(own: &Path, names: &Names) -> Result<(), String> {
    let (_, _, gid) = user()?;
    for (file, text) in [("dhcp", &names.dhcp), ("dns", &names.dns), ("servers", &names.servers)] {
        let (path, new) = (own.join(file), own.join(format!("{file}.new")));
        let written = std::fs::write(&new, text);
        let written = written.and_then(|()| give(&new, gid, 0o640));
        let written = written.and_then(|()| std::fs::rename(&new, &path));
        written.map_err(|error| format!("can't write {}: {error}", path.display()))?;
    }
    Ok(())
}

/// Makes the cables, and gives the gateway its addresses.
async fn connect(tag: &Tag, network: &HostNetwork, process: &Process) -> Result<(), String> {
    let (vni, pid) = (network.vni, process.pid);
    wait_for_namespace(process).await?;
    let (inner, outer) = (tag.gateway(vni), tag.uplink(vni));
    let mac = mac(vni, network.subnet, network.subnet.gateway());
    // The filter comes first, and the cables after it.
    filter(pid, &of_gateway(network.nat, &network.published)).await?;
    let mut cables =
        vec![format!("link add name {inner} type veth peer name inner address {mac} netns {pid}")];
    if network.nat {
        cables.push(format!("link add name {outer} type veth peer name outer netns {pid}"));
    }
    batch("ip", &cables).await?;
    set_up(tag, network, pid).await
}

/// Gives the cables their addresses. This can be repeated, and changes nothing then.
async fn set_up(tag: &Tag, network: &HostNetwork, pid: u32) -> Result<(), String> {
    let (vni, mtu) = (network.vni, network.mtu);
    let (inner, outer) = (tag.gateway(vni), tag.uplink(vni));
    let gateway = network.subnet.gateway();
    let mut outside = vec![format!("link set dev {inner} addrgenmode none")];
    let mut inside = vec![
        "link set dev lo up".to_owned(),
        "link set dev inner addrgenmode none".to_owned(),
        format!("link set dev inner mtu {mtu} up"),
        format!("address replace {gateway}/{} dev inner", network.subnet.prefix_bits()),
    ];
    if network.nat {
        let (host, own) = uplink_addresses(vni);
        outside.push(format!("link set dev {outer} addrgenmode none"));
        outside.push(format!("link set dev {outer} up"));
        outside.push(format!("address replace {host}/31 dev {outer}"));
        inside.push("link set dev outer addrgenmode none".to_owned());
        inside.push("link set dev outer up".to_owned());
        inside.push(format!("address replace {own}/31 dev outer"));
        inside.push(format!("route replace default via {host}"));
    }
    batch("ip", &outside).await?;
    batch_within(pid, &inside).await?;
    if network.nat {
        let forward = "echo 1 > /proc/sys/net/ipv4/ip_forward";
        run("nsenter", &[&namespace_of(pid), "--", "sh", "-c", forward], "").await?;
    }
    Ok(())
}

async fn filter(pid: u32, rules: &str) -> Result<(), String> {
    run("nsenter", &[&namespace_of(pid), "--", "nft", "-f", "-"], rules).await.map(drop)
}

/// `unshare` makes the namespace, and becomes dnsmasq then.
async fn wait_for_namespace(process: &Process) -> Result<(), String> {
    let own = std::fs::read_link("/proc/thread-self/ns/net").map_err(|error| error.to_string())?;
    let path = format!("/proc/{}/ns/net", process.pid);
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    loop {
        match std::fs::read_link(&path) {
            Ok(its) if its != own => return Ok(()),
            _ if process.has_ended() => return Err("it ended at once".to_owned()),
            _ if tokio::time::Instant::now() > deadline => {
                return Err("it has no namespace after 10 s".to_owned());
            }
            _ => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

/// Tells a gateway its VMs, their published ports and the host's resolvers, if they have changed, and keeps its log short.
pub async fn update(
    tag: &Tag,
    running: &mut Running,
    dir: &Path,
    network: &HostNetwork,
) -> Result<(), String> {
    let log = directory(dir, network.vni).join("log");
    if let Err(error) = files::bound(&log, LOG_BYTES_MAX, LOG_KEEP_BYTES) {
        tracing::debug!(path = %log.display(), %error, "a long log is not cut");
    }
    if !running.is_set_up {
        set_up(tag, network, running.process.pid).await?;
        running.is_set_up = true;
    }
    let rules = of_gateway(network.nat, &network.published);
    if rules != running.rules {
        filter(running.process.pid, &rules).await?;
        running.rules = rules;
    }
    let names =
        Names::of(network, &resolvers_in(RESOLVERS, &own_addresses())).or_servers_of(&running.told);
    if names == running.told {
        return Ok(());
    }
    write(&directory(dir, network.vni), &names)?;
    let pid = Pid::from_raw(i32::try_from(running.process.pid).unwrap_or(i32::MAX));
    kill(pid, Signal::SIGHUP).map_err(|error| format!("can't tell the gateway: {error}"))?;
    running.told = names;
    Ok(())
}

/// Takes over the gateway of an earlier agent. It is told everything again.
pub fn adopt(dir: &Path, vni: u16) -> Result<Option<Running>, String> {
    let own = directory(dir, vni);
    let process = find(&own)?;
    let servers = std::fs::read_to_string(servers(&own)).unwrap_or_default();
    Ok(process.map(|process| Running {
        process,
        told: Names { servers, ..Names::default() },
        rules: String::new(),
        is_set_up: false,
    }))
}

/// Ends a gateway; its cables go with it.
pub async fn end(tag: &Tag, dir: &Path, vni: u16, running: Option<Running>) -> Result<(), String> {
    let own = directory(dir, vni);
    let process = match running {
        Some(running) => Some(running.process),
        None => find(&own)?,
    };
    if let Some(process) = process {
        process.kill().await.map_err(|problem| problem.why)?;
    }
    for cable in [tag.gateway(vni), tag.uplink(vni)] {
        // A namespace may end a moment after its last process.
        let _ = run("ip", &["link", "delete", "dev", &cable], "").await;
    }
    match std::fs::remove_dir_all(&own) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("can't remove {}: {error}", own.display()))
        }
        _ => Ok(()),
    }
}

/// The networks of which an earlier agent has left a gateway.
pub fn left(dir: &Path) -> Vec<u16> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let numbers =
        names.filter_map(|name| u16::from_str_radix(name.strip_prefix("gateway-")?, 16).ok());
    numbers.collect()
}

#[cfg(test)]
mod tests {
    use perigee_model::network::Member;
    use perigee_model::{NetworkName, VmId};

    use super::*;

    fn network() -> HostNetwork {
        let member = |name: &str, last| Member {
            vm: VmId::new(name).expect("a name"),
            address: Ipv4Addr::new(10, 7, 0, last),
            host: None,
        };
        HostNetwork {
            name: NetworkName::new("acme~blue").expect("a name"),
            vni: 7,
            subnet: "10.7.0.0/24".parse().expect("addresses"),
            mtu: 1370,
            nat: false,
            gateway: None,
            members: vec![member("acme~web", 2), member("acme~a_b.c", 3), member("ignore", 4)],
            published: Vec::new(),
        }
    }

    #[test]
    fn a_vm_is_found_by_its_short_name() {
        let names = Names::of(&network(), &[]);
        assert_eq!(
            names.dns,
            "10.7.0.1 gateway\n10.7.0.2 web.perigee.internal web\n10.7.0.3 a_b.c.perigee.internal \n\
             10.7.0.4 ignore.perigee.internal ignore\n"
        );
        let told: Vec<&str> = names.dhcp.lines().collect();
        let [web, dots, word] = told[..] else { panic!("{told:?}") };
        assert_eq!(web, "02:50:00:07:00:02,10.7.0.2,web");
        assert_eq!((dots, word), ("02:50:00:07:00:03,10.7.0.3", "02:50:00:07:00:04,10.7.0.4"));
        assert!(["7", "12h", "infinite"].into_iter().all(is_dnsmasqs) && !is_dnsmasqs("web7"));
    }

    #[test]
    fn only_a_network_with_a_way_out_asks_other_resolvers() {
        let text = "nameserver 127.0.0.53\nnameserver 10.1.1.1\nnameserver 169.254.169.253\n";
        assert_eq!(resolvers(text, &[]), [Ipv4Addr::new(10, 1, 1, 1)]);
        let line = arguments(&network(), Path::new("/d"), "nobody", "nogroup").join(" ");
        assert!(line.contains("--net -- dnsmasq -l /d/leases"), "{line}");
        assert!(line.contains("--dhcp-range=10.7.0.0,static,255.255.255.0,12h"), "{line}");
        assert!(line.contains("--dhcp-option=option:mtu,1370"), "{line}");
        assert!(line.ends_with("--dhcp-option=option:router"), "{line}");
        let names = |nat| Names::of(&HostNetwork { nat, ..network() }, &resolvers(text, &[]));
        assert_eq!(
            (names(false).servers.as_str(), names(true).servers.as_str()),
            ("", "server=10.1.1.1\n")
        );
        let line = arguments(&HostNetwork { nat: true, ..network() }, Path::new("/d"), "a", "b");
        assert!(line.contains(&"--servers-file=/d/servers".to_owned()), "{line:?}");
    }

    /// Until now the gateway asked it, and the packet filter dropped the questions.
    #[test]
    fn a_resolver_on_the_gateway_s_host_is_not_asked_and_the_host_says_so() {
        let dir = tempfile::tempdir().expect("a directory");
        let files = ["resolv.conf", "resolved.conf"].map(|name| dir.path().join(name));
        let own = Ipv4Addr::new(10, 1, 1, 1);
        std::fs::write(&files[0], "nameserver 10.1.1.1\n").expect("a file");
        assert!(resolvers_in(files.clone(), &[own]).is_empty());
        let said = no_resolvers_in(files.clone(), &[own]);
        assert!(said.is_some_and(|said| said.contains("10.1.1.1")));
        std::fs::write(&files[0], "nameserver 10.1.1.1\nnameserver 10.1.1.2\n").expect("a file");
        assert_eq!(resolvers_in(files.clone(), &[own]), [Ipv4Addr::new(10, 1, 1, 2)]);
        assert_eq!(no_resolvers_in(files.clone(), &[own]), None);
        std::fs::remove_file(&files[0]).expect("a file");
        assert_eq!(no_resolvers_in(files, &[own]), None, "it has none");
    }

    /// Until now its guests found no name of the internet for as long as the gateway ran.
    #[test]
    fn a_gateway_learns_its_host_s_resolvers_later_too_and_keeps_them_while_there_are_none() {
        let dir = tempfile::tempdir().expect("a directory");
        let files = ["resolv.conf", "resolved.conf"].map(|name| dir.path().join(name));
        let told = |before: &Names| {
            let network = HostNetwork { nat: true, ..network() };
            Names::of(&network, &resolvers_in(files.clone(), &[])).or_servers_of(before)
        };
        // The host boots.
        let first = told(&Names::default());
        assert_eq!(first.servers, "");
        std::fs::write(&files[0], "nameserver 127.0.0.53\n").expect("a file");
        std::fs::write(&files[1], "nameserver 10.1.1.1\n").expect("a file");
        let second = told(&first);
        assert_eq!(second.servers, "server=10.1.1.1\n", "those that systemd-resolved asks");
        std::fs::write(&files[0], "nameserver 10.1.1.2\n").expect("a file");
        let third = told(&second);
        assert_eq!(third.servers, "server=10.1.1.2\n");
        files.iter().for_each(|file| std::fs::remove_file(file).expect("a file"));
        assert_eq!(told(&third).servers, third.servers);
    }
}
