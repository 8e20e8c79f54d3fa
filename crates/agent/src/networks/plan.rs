//! What is to be changed in the kernel, from what is wanted and what is there. All functions are pure.
//!
//! ```text
//! VM 10.7.0.2       VM 10.7.0.3       gateway 10.7.0.1 (at one host)
//!   pt… (tap)         pt… (tap)         pg… (veth)
//!      \_______________ | ______________/
//!                    pb… (bridge)
//!                       |
//!                    px… (vxlan, to each VM's host)
//!                       |
//!                    pw… (WireGuard, to all hosts)
//! ```
//!
//! No part learns: for each VM of a network there is an entry that says where frames for it go, and one with its hardware
//! address, from which the bridge answers ARP.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::net::Ipv4Addr;

use perigee_model::network::{Card, Mac, Subnet, mac};
use serde::Deserialize;

use super::names::Tag;
use super::rules::{Tap, VXLAN_PORT};

/// A network at this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    pub vni: u16,
    pub subnet: Subnet,
    pub mtu: u16,
    /// This host's address in the tunnels; `None` while it has none.
    pub tunnel: Option<Ipv4Addr>,
    /// The cards that are connected here.
    pub taps: Vec<Tap>,
    /// Where the others are: their hosts' addresses in the tunnels.
    pub others: BTreeMap<Ipv4Addr, Ipv4Addr>,
    pub gateway: Gateway,
}

/// Where the gateway of a network is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gateway {
    /// It is at no host.
    Nowhere,
    Here,
    /// It is at the host with this address in the tunnels.
    At(Ipv4Addr),
}

impl Segment {
    /// The hosts that have a part of it.
    pub fn hosts(&self) -> BTreeSet<Ipv4Addr> {
        let gateway = match self.gateway {
            Gateway::At(host) => Some(host),
            Gateway::Here | Gateway::Nowhere => None,
        };
        self.others.values().copied().chain(gateway).collect()
    }

    fn mac_of(&self, address: Ipv4Addr) -> Mac {
        mac(self.vni, self.subnet, address)
    }

    /// Hosts to which frames go that are for all: the gateway sends its offers so, and is asked so.
    fn to_all(&self) -> BTreeSet<Ipv4Addr> {
        match self.gateway {
            Gateway::Nowhere => BTreeSet::new(),
            Gateway::Here => self.others.values().copied().collect(),
            Gateway::At(host) => BTreeSet::from([host]),
        }
    }
}

/// An interface, as `ip -json -details link show` has it.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Link {
    pub ifname: String,
    #[serde(default)]
    pub mtu: u32,
    #[serde(default)]
    pub master: Option<String>,
    #[serde(default)]
    pub flags: Vec<String>,
    #[serde(default)]
    pub linkinfo: Info,
}

/// What `ip` says about a link of a special kind.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Info {
    #[serde(default)]
    pub info_data: Data,
    #[serde(default)]
    pub info_slave_data: Port,
}

/// Of a VXLAN interface.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Data {
    #[serde(default)]
    pub local: Option<String>,
}

/// Of an interface on a bridge. What is not said is as the kernel makes it.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Port {
    #[serde(default)]
    pub learning: Option<bool>,
    #[serde(default)]
    pub flood: Option<bool>,
    #[serde(default)]
    pub neigh_suppress: Option<bool>,
}

impl Link {
    fn is_up(&self) -> bool {
        self.flags.iter().any(|flag| flag == "UP")
    }
}

/// An entry of `bridge -json fdb show`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Entry {
    #[serde(default)]
    pub mac: String,
    #[serde(default)]
    pub ifname: String,
    #[serde(default)]
    pub dst: Option<String>,
    #[serde(default)]
    pub flags: Vec<String>,
    #[serde(default)]
    pub state: String,
    #[serde(default)]
    pub master: Option<String>,
}

/// An entry of `ip -json neighbour show`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Neighbour {
    #[serde(default)]
    pub dst: String,
    #[serde(default)]
    pub dev: String,
    #[serde(default)]
    pub lladdr: String,
}

/// The kernel's state.
#[derive(Debug, Default)]
pub struct There {
    pub links: Vec<Link>,
    pub entries: Vec<Entry>,
    pub neighbours: Vec<Neighbour>,
}

impl There {
    /// The link with this name.
    pub fn link(&self, name: &str) -> Option<&Link> {
        self.links.iter().find(|link| link.ifname == name)
    }
}

const TO_ALL: &str = "ff:ff:ff:ff:ff:ff";

/// The interfaces that are to be there, without cards: these are their QEMUs'.
pub fn wanted_links(tag: &Tag, segments: &[Segment]) -> BTreeSet<String> {
    let of = |segment: &Segment| {
        let vxlan = segment.tunnel.map(|_| tag.vxlan(segment.vni));
        let gateway = (segment.gateway == Gateway::Here)
            .then(|| [tag.gateway(segment.vni), tag.uplink(segment.vni)]);
        let both = gateway.into_iter().flatten();
        [tag.bridge(segment.vni)].into_iter().chain(vxlan).chain(both).collect::<Vec<_>>()
    };
    segments.iter().flat_map(of).collect()
}

/// Lines for `ip -batch`: they remove what is not wanted, and make what is missing. A cable to a gateway is made by who
/// makes the gateway.
pub fn links(tag: &Tag, segments: &[Segment], there: &There) -> Vec<String> {
    let wanted = wanted_links(tag, segments);
    let mut lines = Vec::new();
    for link in &there.links {
        let name = &link.ifname;
        let is_ours = tag.is_own(name) && !name.starts_with("pt") && !name.starts_with("pw");
        if is_ours && !wanted.contains(name) {
            lines.push(format!("link delete dev {name}"));
        }
    }
    for segment in segments {
        let bridge = tag.bridge(segment.vni);
        let found = there.link(&bridge);
        if found.is_none() {
            // Number 0 is no VM's, so its hardware address is the bridge's own.
            let own = segment.mac_of(segment.subnet.address(0));
            lines.push(format!(
                "link add name {bridge} address {own} type bridge mcast_snooping 0 stp_state 0"
            ));
            lines.push(format!("link set dev {bridge} addrgenmode none"));
        }
        up(&mut lines, &bridge, found, segment.mtu, None);
        if let Some(tunnel) = segment.tunnel {
            let vxlan = tag.vxlan(segment.vni);
            let mut found = there.link(&vxlan);
            let local = |link: &Link| link.linkinfo.info_data.local.clone();
            if found.is_some_and(|link| local(link) != Some(tunnel.to_string())) {
                lines.push(format!("link delete dev {vxlan}"));
                found = None;
            }
            if found.is_none() {
                let vni = segment.vni;
                lines.push(format!(
                    "link add name {vxlan} type vxlan id {vni} local {tunnel} dstport {VXLAN_PORT} nolearning"
                ));
                lines.push(format!("link set dev {vxlan} addrgenmode none"));
            }
            up(&mut lines, &vxlan, found, segment.mtu, Some(&bridge));
            port(&mut lines, &vxlan, found, &bridge, true);
        }
        for tap in &segment.taps {
            // Without its QEMU there is none.
            let Some(found) = there.link(&tap.name) else { continue };
            if !found.is_up() {
                // The host itself gets no address on it.
                lines.push(format!("link set dev {} addrgenmode none", tap.name));
            }
            up(&mut lines, &tap.name, Some(found), segment.mtu, Some(&bridge));
            port(&mut lines, &tap.name, Some(found), &bridge, false);
        }
        if let (Gateway::Here, Some(found)) =
            (&segment.gateway, there.link(&tag.gateway(segment.vni)))
        {
            up(&mut lines, &found.ifname, Some(found), segment.mtu, Some(&bridge));
            port(&mut lines, &found.ifname, Some(found), &bridge, false);
        }
    }
    lines
}

fn up(lines: &mut Vec<String>, name: &str, found: Option<&Link>, mtu: u16, master: Option<&str>) {
    let is_right = found.is_some_and(|link| {
        link.is_up() && link.mtu == u32::from(mtu) && link.master.as_deref() == master
    });
    if !is_right {
        let master = master.map(|bridge| format!(" master {bridge}")).unwrap_or_default();
        lines.push(format!("link set dev {name} mtu {mtu}{master} up"));
    }
}

/// A bridge learns nothing from this port, and sends nothing there of which it does not know where it goes.
fn port(
    lines: &mut Vec<String>,
    name: &str,
    found: Option<&Link>,
    bridge: &str,
    answers_arp: bool,
) {
    let is_right = found.is_some_and(|link| {
        let port = &link.linkinfo.info_slave_data;
        link.master.as_deref() == Some(bridge)
            && port.learning == Some(false)
            && port.flood == Some(false)
            && port.neigh_suppress == Some(answers_arp)
    });
    if !is_right {
        let suppress = if answers_arp { "on" } else { "off" };
        lines.push(format!(
            "link set dev {name} type bridge_slave learning off flood off mcast_flood off neigh_suppress {suppress}"
        ));
    }
}

/// Where frames for one card go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// To the card, which is here.
    Card,
    /// To the host with this address in the tunnels.
    Host(Ipv4Addr),
}

/// Lines for `bridge -batch`: frames for a card go this way from now on. At no moment they go nowhere.
pub fn lead(tag: &Tag, card: &Card, way: Way) -> Vec<String> {
    let (mac, vxlan) = (card.mac().to_string(), tag.vxlan(card.vni));
    match way {
        Way::Card => vec![to_port(&mac, &tag.tap(card))],
        Way::Host(host) => vec![to_host("replace", &mac, &vxlan, host), to_port(&mac, &vxlan)],
    }
}

fn to_port(mac: &str, name: &str) -> String {
    format!("fdb replace {mac} dev {name} master static")
}

fn to_host(how: &str, mac: &str, vxlan: &str, host: impl Display) -> String {
    format!("fdb {how} {mac} dev {vxlan} dst {host} self permanent")
}

/// Lines for `bridge -batch`: where frames for each card go.
pub fn entries(tag: &Tag, segments: &[Segment], there: &There) -> Vec<String> {
    // By bridge port, and by the host beyond a VXLAN interface.
    let (mut ports, mut hosts) = (BTreeSet::new(), BTreeSet::new());
    for segment in segments {
        let vxlan = tag.vxlan(segment.vni);
        let mut port = |mac: Mac, name: &str| ports.insert((mac.to_string(), name.to_owned()));
        let mut away = |mac: String, host: Ipv4Addr| {
            if segment.tunnel.is_some() {
                hosts.insert((mac, vxlan.clone(), host.to_string()));
            }
        };
        for tap in segment.taps.iter().filter(|tap| !segment.others.contains_key(&tap.address)) {
            if there.link(&tap.name).is_some() {
                port(tap.mac, &tap.name);
            }
        }
        for (address, host) in &segment.others {
            port(segment.mac_of(*address), &vxlan);
            away(segment.mac_of(*address).to_string(), *host);
        }
        let gateway = segment.mac_of(segment.subnet.gateway());
        match segment.gateway {
            Gateway::Nowhere => {}
            Gateway::Here => drop(port(gateway, &tag.gateway(segment.vni))),
            Gateway::At(host) => {
                port(gateway, &vxlan);
                away(gateway.to_string(), host);
            }
        }
        for host in segment.to_all() {
            away(TO_ALL.to_owned(), host);
        }
    }
    let (mut ports_there, mut hosts_there) = (BTreeSet::new(), BTreeSet::new());
    for entry in there.entries.iter().filter(|entry| tag.is_own(&entry.ifname)) {
        let Entry { mac, ifname, dst, .. } = entry.clone();
        match dst {
            Some(dst) => drop(hosts_there.insert((mac, ifname, dst))),
            None if entry.master.is_some() && entry.state == "static" => {
                ports_there.insert((mac, ifname));
            }
            None => {}
        }
    }
    let mut lines = Vec::new();
    // An entry that goes elsewhere is replaced at once, so that there is always one.
    for (mac, name) in ports.difference(&ports_there) {
        lines.push(to_port(mac, name));
    }
    for (mac, name, host) in hosts.difference(&hosts_there) {
        let how = if mac == TO_ALL { "append" } else { "replace" };
        lines.push(to_host(how, mac, name, host));
    }
    for (mac, name) in ports_there.difference(&ports) {
        // The bridge has one entry for each card: a replaced one is gone.
        let is_replaced =
            ports.iter().any(|(other, at)| other == mac && tag.same_network(at, name));
        if !is_replaced {
            lines.push(format!("fdb delete {mac} dev {name} master"));
        }
    }
    for (mac, name, host) in hosts_there.difference(&hosts) {
        let is_replaced = mac != TO_ALL && hosts.iter().any(|(m, n, _)| m == mac && n == name);
        if !is_replaced {
            lines.push(format!("fdb delete {mac} dev {name} dst {host} self"));
        }
    }
    lines
}

/// Lines for `ip -batch`: whose hardware address is whose.
pub fn neighbours(tag: &Tag, segments: &[Segment], there: &There) -> Vec<String> {
    let mut wanted = BTreeSet::new();
    for segment in segments {
        let bridge = tag.bridge(segment.vni);
        let here = segment.taps.iter().map(|tap| tap.address);
        let gateway = (segment.gateway != Gateway::Nowhere).then(|| segment.subnet.gateway());
        for address in here.chain(segment.others.keys().copied()).chain(gateway) {
            let mac = segment.mac_of(address).to_string();
            wanted.insert((address.to_string(), bridge.clone(), mac));
        }
    }
    let found = there.neighbours.iter().filter(|found| tag.is_own(&found.dev));
    let found: BTreeSet<(String, String, String)> =
        found.map(|n| (n.dst.clone(), n.dev.clone(), n.lladdr.clone())).collect();
    let new = wanted.difference(&found).map(|(address, bridge, mac)| {
        format!("neighbour replace {address} lladdr {mac} dev {bridge} nud permanent")
    });
    let old = found.difference(&wanted).filter(|(address, bridge, _)| {
        !wanted.iter().any(|(other, at, _)| other == address && at == bridge)
    });
    let old = old.map(|(address, bridge, _)| format!("neighbour delete {address} dev {bridge}"));
    new.chain(old).collect()
}

#[cfg(test)]
mod tests;
