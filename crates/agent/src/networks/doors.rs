//! Which ports of this host lead to VMs: those that VMs publish whose network has its gateway here. A port on which a program of
//! this host listens stays that program's. While it is not known where programs listen, no port becomes a VM's, and those that are
//! VMs' stay theirs.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::Ipv4Addr;

use perigee_model::network::{HostNetworks, Protocol};

use super::names::{is_uplink, uplink_addresses};
use super::plan::{Gateway, Segment};
use super::rules::Door;
use super::tools;

use crate::programs;
use crate::users::VmUids;

const CONNTRACK: &str = "conntrack";

/// Files with the sockets of this thread's network namespace. The fourth column is the socket's state, the eighth its user.
const SOCKETS: [(&str, Protocol); 4] = [
    ("/proc/thread-self/net/tcp", Protocol::Tcp),
    ("/proc/thread-self/net/tcp6", Protocol::Tcp),
    ("/proc/thread-self/net/udp", Protocol::Udp),
    ("/proc/thread-self/net/udp6", Protocol::Udp),
];
/// Of a socket that waits for connections, and of one of UDP without a peer.
const WAITS: [&str; 2] = ["0A", "07"];

/// A port of this host.
type Port = (Protocol, u16);

/// Returns the doors, and what can't be one. `before` are those of the last time; without it, they are those of an earlier agent.
pub fn of(
    wanted: &HostNetworks,
    segments: &[Segment],
    before: Option<&[Door]>,
    taken: impl FnOnce() -> Result<BTreeSet<Port>, String>,
) -> (Vec<Door>, Vec<String>) {
    let is_here = |vni| segments.iter().any(|s| s.vni == vni && s.gateway == Gateway::Here);
    let here = wanted.networks.iter().filter(|network| network.nat && is_here(network.vni));
    let all: Vec<(&str, Door)> = here
        .flat_map(|network| {
            network.published.iter().map(|one| {
                let (protocol, port) = (one.publish.protocol, one.publish.outside);
                let to = (one.address, one.publish.inside);
                let (vni, subnet) = (network.vni, network.subnet);
                (network.name.as_str(), Door { vni, subnet, protocol, port, to })
            })
        })
        .collect();
    // Most hosts have none.
    if all.is_empty() {
        return Default::default();
    }
    let taken = taken();
    let (mut doors, mut troubles) = (Vec::new(), Vec::new());
    for (network, door) in all {
        let Door { vni, protocol, port, .. } = door;
        let was = |old: &Door| (old.vni, old.protocol, old.port) == (vni, protocol, port);
        match &taken {
            Ok(taken) if taken.contains(&(protocol, port)) => troubles.push(format!(
                "the port {port} ({protocol}) of network {network} is not published, because a program of this host listens there"
            )),
            Err(why) if before.is_some_and(|before| !before.iter().any(was)) => troubles.push(format!(
                "the port {port} ({protocol}) of network {network} is not published, because it is not known whether a program of \
                 this host listens there: {why}"
            )),
            Ok(_) | Err(_) => doors.push(door),
        }
    }
    (doors, troubles)
}

/// The ports on which programs of this host listen. What guests send UDP from is none.
pub fn taken(guests: VmUids) -> Result<BTreeSet<Port>, String> {
    let is_program = |port: &Port, uid| port.0 == Protocol::Tcp || !guests.contains(uid);
    let all = sockets()?.into_iter();
    Ok(all.filter(|(port, uid)| is_program(port, *uid)).map(|(port, _)| port).collect())
}

/// The UDP ports that guests in user networks have.
pub fn udp_of(guests: VmUids) -> Result<BTreeSet<u16>, String> {
    let is_guests = |port: &Port, uid| port.0 == Protocol::Udp && guests.contains(uid);
    let all = sockets()?.into_iter();
    Ok(all.filter(|(port, uid)| is_guests(port, *uid)).map(|(port, _)| port.1).collect())
}

/// The ports on which processes of this host wait, and whose they are.
fn sockets() -> Result<Vec<(Port, u32)>, String> {
    let mut found = Vec::new();
    for (path, protocol) in SOCKETS {
        match std::fs::read_to_string(path) {
            Ok(text) => found.extend(waiting(&text).map(|(port, uid)| ((protocol, port), uid))),
            // A kernel without IPv6 has no such file.
            Err(error) if error.kind() == ErrorKind::NotFound && path.ends_with('6') => {}
            Err(error) => return Err(format!("can't read {path}: {error}")),
        }
    }
    Ok(found)
}

/// Ends the connections that lead elsewhere than their port does now: the kernel would go on with them as they have begun, to a VM
/// that had the port before. `gateways` are the processes of this host's gateways.
pub async fn forget(doors: &[Door], gateways: &[(u16, u32)]) -> Result<(), String> {
    if doors.is_empty() {
        // The packet filter leads nothing to a VM then.
        return Ok(());
    }
    if programs::which(CONNTRACK).is_none() {
        return Err(format!(
            "connections to ports that another VM had before are not ended: {CONNTRACK} is not installed (package conntrack)"
        ));
    }
    let mut begun = begun(None).await?;
    begun.retain(|begun| {
        let mut own = doors.iter().filter(|door| begun.is_at(door));
        is_uplink(begun.to.0) && own.all(|door| uplink_addresses(door.vni).1 != begun.to.0)
    });
    end(None, begun).await?;
    for (vni, pid) in gateways {
        let own: Vec<&Door> = doors.iter().filter(|door| door.vni == *vni).collect();
        if !own.is_empty() {
            let mut begun = self::begun(Some(*pid)).await?;
            begun.retain(|begun| !own.iter().any(|door| begun.is_at(door) && door.to == begun.to));
            end(Some(*pid), begun).await?;
        }
    }
    Ok(())
}

/// A connection that the kernel leads elsewhere than its client has sent it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Begun {
    protocol: Protocol,
    port: u16,
    to: (Ipv4Addr, u16),
}

impl Begun {
    fn is_at(&self, door: &Door) -> bool {
        (self.protocol, self.port) == (door.protocol, door.port)
    }

    /// A line of what `conntrack` says: addresses and ports as the client has sent them, and then those of the answers.
    fn read(line: &str) -> Option<Self> {
        let protocol = match line.split_whitespace().next()? {
            "tcp" => Protocol::Tcp,
            "udp" => Protocol::Udp,
            _ => return None,
        };
        let values = |name: &'static str| {
            line.split_whitespace().filter_map(move |word| word.strip_prefix(name))
        };
        let port = values("dport=").next()?.parse().ok()?;
        let to = values("src=").nth(1)?.parse().ok()?;
        Some(Self { protocol, port, to: (to, values("sport=").nth(1)?.parse().ok()?) })
    }
}

/// `conntrack`, at this host or in the network namespace of a process.
async fn conntrack(within: Option<u32>, line: &str) -> Result<String, String> {
    let namespace = within.map(tools::namespace_of);
    let mut words: Vec<&str> = match &namespace {
        Some(namespace) => vec!["nsenter", namespace, "--", CONNTRACK],
        None => vec![CONNTRACK],
    };
    words.extend(line.split(' '));
    tools::run(words[0], &words[1..], "").await
}

async fn begun(within: Option<u32>) -> Result<BTreeSet<Begun>, String> {
    let listed = conntrack(within, "-L -f ipv4 --dst-nat").await?;
    Ok(listed.lines().filter_map(Begun::read).collect())
}

async fn end(within: Option<u32>, begun: BTreeSet<Begun>) -> Result<(), String> {
    for Begun { protocol, port, to: (address, inside) } in begun {
        let line = format!(
            "-D -f ipv4 -p {protocol} --orig-port-dst {port} --reply-src {address} --reply-port-src {inside}"
        );
        match conntrack(within, &line).await {
            // It has ended meanwhile.
            Err(why) if why.contains("0 flow entries") => {}
            ended => drop(ended?),
        }
    }
    Ok(())
}

/// The ports, and the users of their sockets.
fn waiting(text: &str) -> impl Iterator<Item = (u16, u32)> {
    text.lines().skip(1).filter_map(|line| {
        let mut fields = line.split_whitespace();
        let (local, state, uid) = (fields.nth(1)?, fields.nth(1)?, fields.nth(3)?);
        let port = u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok()?;
        WAITS.contains(&state).then_some((port, uid.parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_with_a_program_of_the_host_is_taken() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let socket = std::net::UdpSocket::bind("[::1]:0").expect("a port");
        let port = |address: std::net::SocketAddr| address.port();
        let tcp = port(listener.local_addr().expect("an address"));
        let udp = port(socket.local_addr().expect("an address"));
        let client = std::net::TcpStream::connect(("127.0.0.1", tcp)).expect("it listens");
        let own = port(client.local_addr().expect("an address"));
        let found = taken(VmUids::default()).expect("they are known");
        assert!(found.contains(&(Protocol::Tcp, tcp)) && found.contains(&(Protocol::Udp, udp)));
        assert!(!found.contains(&(Protocol::Tcp, own)), "it waits for nobody");
    }

    #[test]
    fn a_port_from_which_a_guest_sends_is_nobody_s_program() {
        let line = " 1355: 00000000:6D60 00000000:0000 07 00000000:00000000 00:00000000 00000000 1900000001        0 5297910 2 00000000aef46408 0";
        let text = format!("  sl  local_address rem_address   st\n{line}\n");
        assert_eq!(waiting(&text).collect::<Vec<_>>(), [(28_000, 1_900_000_001)]);
        let guests = VmUids::default();
        assert!(guests.contains(1_900_000_001) && !guests.contains(0));
    }

    #[test]
    fn while_it_is_not_known_who_listens_no_port_changes_hands() {
        use perigee_model::network::{HostNetwork, Publish, Published};
        let address = std::net::Ipv4Addr::new(10, 7, 0, 2);
        let published = |outside| Published {
            publish: Publish { outside, inside: 80, protocol: Protocol::Tcp },
            address,
        };
        let subnet = "10.7.0.0/24".parse().expect("addresses");
        let network = HostNetwork {
            name: perigee_model::NetworkName::new("blue").expect("a name"),
            vni: 1,
            subnet,
            mtu: 1370,
            nat: true,
            gateway: None,
            members: Vec::new(),
            published: vec![published(8080), published(8081)],
        };
        let wanted = HostNetworks { networks: vec![network], ..HostNetworks::default() };
        let segment = Segment {
            vni: 1,
            subnet,
            mtu: 1370,
            tunnel: None,
            taps: Vec::new(),
            others: Default::default(),
            gateway: Gateway::Here,
        };
        let of = |before: &[Door], taken| {
            let (doors, troubles) =
                of(&wanted, std::slice::from_ref(&segment), Some(before), || taken);
            (doors.iter().map(|door| door.port).collect::<Vec<_>>(), troubles.join(";"))
        };
        let (protocol, to) = (Protocol::Tcp, (address, 80));
        let before = [Door { vni: 1, subnet, protocol, port: 8080, to }];
        let (ports, said) = of(&before, Err("no memory".to_owned()));
        assert!(ports == [8080] && said.contains("8081") && said.contains("no memory"), "{said}");
        let (ports, said) = of(&before, Ok([(Protocol::Tcp, 8080)].into()));
        assert!(ports == [8081] && said.contains("8080"), "{said}");
    }

    #[test]
    fn a_line_of_the_kernels_table_says_where_a_connection_leads() {
        let line = "udp      17 25 src=10.99.0.9 dst=10.99.0.1 sport=4711 dport=8080 [UNREPLIED] src=10.7.0.3 dst=10.99.0.9 \
                    sport=80 dport=4711 mark=0 use=1";
        let to = (Ipv4Addr::new(10, 7, 0, 3), 80);
        assert_eq!(Begun::read(line), Some(Begun { protocol: Protocol::Udp, port: 8080, to }));
        let icmp = "icmp     1 29 src=10.0.0.1 dst=10.0.0.2 type=8 code=0 id=1 src=10.0.0.2 dst=10.0.0.1 type=0 code=0 id=1";
        assert_eq!((Begun::read(icmp), Begun::read("")), (None, None));
    }
}
