//! Which ports of this host lead to VMs: those that VMs publish whose network has its gateway here. A port on which a program of
//! this host listens stays that program's.

use std::collections::BTreeSet;

use perigee_model::network::{HostNetworks, Protocol};

use super::plan::{Gateway, Segment};
use super::rules::Door;

/// Files with the sockets of this thread's network namespace. The fourth column is the socket's state.
const SOCKETS: [(&str, Protocol); 4] = [
    ("/proc/thread-self/net/tcp", Protocol::Tcp),
    ("/proc/thread-self/net/tcp6", Protocol::Tcp),
    ("/proc/thread-self/net/udp", Protocol::Udp),
    ("/proc/thread-self/net/udp6", Protocol::Udp),
];
/// Of a socket that waits for connections, and of one of UDP without a peer.
const WAITS: [&str; 2] = ["0A", "07"];

/// Returns the doors, and what can't be one.
pub fn of(wanted: &HostNetworks, segments: &[Segment]) -> (Vec<Door>, Vec<String>) {
    let is_here = |vni| segments.iter().any(|s| s.vni == vni && s.gateway == Gateway::Here);
    let here = wanted.networks.iter().filter(|network| network.nat && is_here(network.vni));
    let all: Vec<(&str, Door)> = here
        .flat_map(|network| {
            network.published.iter().map(|one| {
                let (protocol, port) = (one.publish.protocol, one.publish.outside);
                (network.name.as_str(), Door { vni: network.vni, protocol, port })
            })
        })
        .collect();
    // Most hosts have none.
    let taken = if all.is_empty() { BTreeSet::new() } else { taken() };
    let (mut doors, mut troubles) = (Vec::new(), Vec::new());
    for (network, door) in all {
        let Door { protocol, port, .. } = door;
        if taken.contains(&(protocol, port)) {
            troubles.push(format!(
                "the port {port} ({protocol}) of network {network} is not published, because a program of this host listens there"
            ));
        } else {
            doors.push(door);
        }
    }
    (doors, troubles)
}

fn taken() -> BTreeSet<(Protocol, u16)> {
    let mut taken = BTreeSet::new();
    for (path, protocol) in SOCKETS {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        taken.extend(waiting(&text).map(|port| (protocol, port)));
    }
    taken
}

fn waiting(text: &str) -> impl Iterator<Item = u16> {
    text.lines().skip(1).filter_map(|line| {
        let mut fields = line.split_whitespace();
        let (local, state) = (fields.nth(1)?, fields.nth(1)?);
        let port = u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok()?;
        WAITS.contains(&state).then_some(port)
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
        let found = taken();
        assert!(found.contains(&(Protocol::Tcp, tcp)) && found.contains(&(Protocol::Udp, udp)));
        assert!(!found.contains(&(Protocol::Tcp, own)), "it waits for nobody");
    }
}
