//! The packet filter's rules for tenants' networks, as `nft` reads them. All functions are pure.
//!
//! **What a card may send.** Frames from its own hardware address: IPv4 from its own address, ARP for its own address,
//! and what a DHCP client sends. Nothing else leaves it: no IPv6, no answers of a DHCP server, no VLANs. What goes to all
//! is limited. A card of which the filter knows nothing sends nothing.
//!
//! **What passes between hosts.** IPv4, and what goes to all only if it is DHCP. ARP is answered at the host itself.
//!
//! **What a guest reaches through its gateway.** Not the gateway's host, none of the cluster's hosts, no other network,
//! and neither loopback nor link-local addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};

use perigee_model::network::{Mac, Protocol, Publish, Published, Subnet, TUNNEL_NETWORK};

use super::names::{Tag, uplink_addresses};

/// The port of VXLAN between hosts. It is another one than VXLAN's own, which other programs may use.
pub const VXLAN_PORT: u16 = 51_872;
/// Frames to all, and messages to a DHCP server, that a card may send in a second.
const TO_ALL_PER_S: u32 = 100;

/// What is never an address of a guest's peer outside: this host, link-local ones, those of tunnels and uplinks,
/// multicast, all, and clouds' metadata services.
const NEVER: &str = "0.0.0.0/8, 100.64.0.0/10, 127.0.0.0/8, 168.63.129.16, 169.254.0.0/16, 192.0.0.0/24, 224.0.0.0/3";

/// Connections that a gateway follows for one VM. The kernel's table of connections is the host's too, which needs it for
/// its own.
const CONNECTIONS: u32 = 2048;
/// New ones in a second: of one VM, and of all gateways of a host. And questions for names of one VM.
const NEW_PER_S: u32 = 200;
const BURST: u32 = 5 * NEW_PER_S;
const NEW_OF_ALL_PER_S: u32 = 2000;
/// New connections to the published ports of one tenant in a second. And the same of what its VMs, and its gateways for their names,
/// open outside: half of [`NEW_OF_ALL_PER_S`].
const NEW_OF_TENANT_PER_S: u32 = NEW_OF_ALL_PER_S / 2;
const BURST_OF_TENANT: u32 = 2 * NEW_OF_TENANT_PER_S;

/// A card that is connected here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tap {
    pub name: String,
    pub vni: u16,
    pub mac: Mac,
    pub address: Ipv4Addr,
}

/// The hosts that have a part of the same networks, by their addresses in the tunnels, and the networks' numbers.
pub type Peers = BTreeMap<Ipv4Addr, BTreeSet<u16>>;

/// A port of the host that leads to a network's gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Door {
    pub vni: u16,
    pub subnet: Subnet,
    pub protocol: Protocol,
    pub port: u16,
    /// The VM's address, and its port.
    pub to: (Ipv4Addr, u16),
}

/// What the host's own table is made of.
#[derive(Debug, Clone, Default)]
pub struct OfHost<'a> {
    /// The cards that are connected here.
    pub taps: &'a [Tap],
    pub peers: Peers,
    /// The cluster's hosts.
    pub hosts: &'a [IpAddr],
    pub doors: &'a [Door],
    /// The host forwards packets for the networks only.
    pub forwards_nothing_else: bool,
}

/// A table that is made anew, so that what was there before does not add up.
fn anew(family: &str, table: &str, chains: &str) -> String {
    let table = format!("table {family} {table}");
    format!("{table}\ndelete {table}\n{table} {{\n{chains}}}\n")
}

/// The bridges' table, and the host's own.
pub fn of_host(tag: &Tag, host: &OfHost) -> String {
    let mut text = anew("bridge", &tag.table(), &bridge_chains(tag, host.taps));
    text.push_str(&anew("inet", &tag.table(), &host_chains(tag, host)));
    text
}

/// How many connections of guests, and to guests, the host follows. The kernel counts them in sets, and forgets them with these. So
/// the sets are made once, and only what is asked of them is made anew. `connections` is as many as all guests may have, and as
/// many as all published ports may have: the kernel's table is the host's own too. A tenant has at most half of them, in all its
/// networks, so that it leaves some to the others. `networks` says whose each network is.
pub fn limits(tag: &Tag, networks: &BTreeMap<u16, &str>, connections: u32) -> String {
    let (table, uplinks) = (format!("table inet {}", tag.limits()), tag.uplinks());
    let of_one = (connections / 2).max(1);
    let rate =
        format!("limit rate over {NEW_OF_TENANT_PER_S}/second burst {BURST_OF_TENANT} packets");
    let mut cables: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (vni, tenant) in networks {
        cables.entry(tenant).or_default().push(format!("\"{}\"", tag.uplink(*vni)));
    }
    let mut of_tenants = String::new();
    for (tenant, cables) in cables {
        let (number, cables) = (number_of(tenant), cables.join(", "));
        for (cable, address, fresh, open) in
            [("oifname", "daddr", "fresh", "inside"), ("iifname", "saddr", "begun", "outside")]
        {
            // nft 1.0.6 takes no constant and no map as a key: of the packet's address no bit is left but the tenant's number.
            let _ = write!(
                of_tenants,
                "    {cable} {{ {cables} }} update @{fresh} {{ ip {address} & 0.0.0.0 | {number} {rate} }} drop
    {cable} {{ {cables} }} add @{open} {{ ip {address} & 0.0.0.0 | {number} ct count over {of_one} }} drop
"
            );
        }
    }
    format!(
        "{table} {{
  set fresh {{ type ipv4_addr; size 65535; flags dynamic,timeout; timeout 1m; }}
  set inside {{ type ipv4_addr; size 65535; flags dynamic; }}
  set begun {{ type ipv4_addr; size 65535; flags dynamic,timeout; timeout 1m; }}
  set outside {{ type ipv4_addr; size 65535; flags dynamic; }}
  set all_in {{ type nf_proto; size 16; flags dynamic; }}
  set all_out {{ type nf_proto; size 16; flags dynamic; }}
  chain pass {{ type filter hook forward priority -310; policy accept; }}
}}
flush chain inet {} pass
{table} {{
  chain pass {{
    ct state != new accept
{of_tenants}    oifname \"{uplinks}\" add @all_in {{ meta nfproto ct count over {connections} }} drop
    iifname \"{uplinks}\" add @all_out {{ meta nfproto ct count over {connections} }} drop
  }}
}}
",
        tag.limits()
    )
}

/// A tenant's number, by which its connections are counted: FNV-1a of its name. It is the same for every version of the agent, because
/// the kernel goes on counting when another one begins.
fn number_of(tenant: &str) -> Ipv4Addr {
    let hash = tenant
        .bytes()
        .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    Ipv4Addr::from(hash)
}

fn bridge_chains(tag: &Tag, taps: &[Tap]) -> String {
    let mut text = String::new();
    for Tap { name, mac, address, .. } in taps {
        // In a DHCP message the client's hardware address is 28 bytes behind UDP's header.
        let own = mac.0.iter().fold("0x".to_owned(), |text, byte| format!("{text}{byte:02x}"));
        let _ = write!(
            text,
            "  chain from_{name} {{
    ether saddr != {mac} drop
    meta pkttype {{ broadcast, multicast }} limit rate over {TO_ALL_PER_S}/second burst {TO_ALL_PER_S} packets drop
    ether type ip udp dport 67 limit rate over {TO_ALL_PER_S}/second burst {TO_ALL_PER_S} packets drop
    ether type arp arp saddr ether {mac} arp saddr ip {{ 0.0.0.0, {address} }} accept
    ether type ip ip saddr {{ 0.0.0.0, {address} }} udp sport 68 udp dport 67 @th,288,48 {own} accept
    ether type ip udp sport 67 drop
    meta pkttype {{ broadcast, multicast }} drop
    ether type ip ip saddr {address} accept
    drop
  }}
"
        );
    }
    let known: Vec<String> =
        taps.iter().map(|tap| format!("\"{0}\" : jump from_{0}", tap.name)).collect();
    let dispatch = match known.is_empty() {
        true => String::new(),
        false => format!("    iifname vmap {{ {} }}\n", known.join(", ")),
    };
    let (taps, vxlans, gateways) = (tag.taps(), tag.vxlans(), tag.gateways());
    let _ = write!(
        text,
        "  chain come {{
    type filter hook prerouting priority -300; policy accept;
{dispatch}    iifname \"{taps}\" drop
    iifname \"{vxlans}\" jump between_hosts
  }}
  chain go {{
    type filter hook forward priority -300; policy accept;
    oifname \"{vxlans}\" jump between_hosts
  }}
  chain to_this_host {{
    type filter hook input priority -300; policy accept;
    iifname \"{taps}\" drop
    iifname \"{vxlans}\" drop
    iifname \"{gateways}\" drop
  }}
  chain between_hosts {{
    ether type != ip drop
    meta pkttype {{ broadcast, multicast }} udp dport {{ 67, 68 }} accept
    meta pkttype {{ broadcast, multicast }} drop
  }}
"
    );
    text
}

/// What passes between hosts is not tracked: each of a guest's connections would be one of its host too.
fn host_chains(tag: &Tag, host: &OfHost) -> String {
    let (tunnel, uplinks, bridges) = (tag.tunnel(), tag.uplinks(), tag.bridges());
    let (doors, to_doors) = doors(tag, host.doors);
    let carried = format!(
        "  chain carried {{
    type filter hook prerouting priority -300; policy accept;
    iifname \"{bridges}\" notrack
    iifname \"{tunnel}\" udp dport {VXLAN_PORT} notrack
  }}
"
    );
    let leave = format!(
        "  chain leave {{
    type filter hook output priority -300; policy accept;
    ip daddr {TUNNEL_NETWORK} oifname != {{ \"{tunnel}\", \"lo\" }} drop
    oifname \"{tunnel}\" udp dport {VXLAN_PORT} notrack
  }}
"
    );
    let hide = hide_likes(tag, host.doors);
    let hide = format!(
        "  chain hide {{
    type nat hook postrouting priority srcnat; policy accept;
    iifname \"{uplinks}\" masquerade
{hide}  }}
"
    );
    [doors, carried, come(tag, host), leave, pass(tag, host, &to_doors), hide].concat()
}

/// The interfaces inside of a network, between a card and its gateway.
fn inner(tag: &Tag) -> [String; 4] {
    [tag.taps(), tag.bridges(), tag.vxlans(), tag.gateways()]
}

/// What may come to the host itself.
fn come(tag: &Tag, host: &OfHost) -> String {
    let (tunnel, uplinks) = (tag.tunnel(), tag.uplinks());
    // What a bridge does not carry comes up on the port itself.
    let not_in: String =
        inner(tag).iter().map(|name| format!("    iifname \"{name}\" drop\n")).collect();
    // A frame's number is 12 bytes behind the begin of UDP. A host may send frames of the networks that it has a part of.
    let from_peers: String = host
        .peers
        .iter()
        .map(|(peer, vnis)| {
            let vnis: Vec<String> = vnis.iter().map(ToString::to_string).collect();
            format!(
                "    iifname \"{tunnel}\" ip saddr {peer} udp dport {VXLAN_PORT} @th,96,24 {{ {} }} accept\n",
                vnis.join(", ")
            )
        })
        .collect();
    format!(
        "  chain come {{
    type filter hook input priority -300; policy accept;
{not_in}    udp dport {VXLAN_PORT} iifname != \"{tunnel}\" drop
    ip daddr {TUNNEL_NETWORK} iifname != {{ \"{tunnel}\", \"lo\" }} drop
{from_peers}    iifname \"{tunnel}\" icmp type {{ echo-request, echo-reply, destination-unreachable }} accept
    iifname \"{tunnel}\" drop
    iifname \"{uplinks}\" ct direction reply ct state {{ established, related }} accept
    iifname \"{uplinks}\" drop
  }}
"
    )
}

/// What the host may forward, from guests to elsewhere and back.
fn pass(tag: &Tag, host: &OfHost, to_doors: &str) -> String {
    let (tunnel, uplinks, bridges) = (tag.tunnel(), tag.uplinks(), tag.bridges());
    // With br_netfilter, frames that a bridge carries pass here too.
    let not_through: String = inner(tag)
        .iter()
        .map(|name| format!("    iifname \"{name}\" oifname != \"{bridges}\" drop\n"))
        .collect();
    let hosts = host.hosts.iter().filter(|ip| ip.is_ipv4() && !ip.is_loopback());
    let hosts: Vec<String> = hosts.map(ToString::to_string).collect();
    let to_hosts = match hosts.is_empty() {
        true => String::new(),
        // What another program of the host sends elsewhere is looked at as the guest has sent it.
        false => ["ip daddr", "ct original ip daddr"]
            .map(|to| format!("    iifname \"{uplinks}\" {to} {{ {} }} drop\n", hosts.join(", ")))
            .concat(),
    };
    let nothing_else = match host.forwards_nothing_else {
        false => String::new(),
        true => format!(
            "    meta nfproto ipv4 iifname != \"{uplinks}\" oifname != \"{uplinks}\" iifname != \"{bridges}\" drop\n"
        ),
    };
    format!(
        "  chain pass {{
    type filter hook forward priority -300; policy accept;
{not_through}    iifname \"{tunnel}\" drop
    oifname \"{tunnel}\" drop
    iifname \"{uplinks}\" oifname \"{uplinks}\" drop
{to_doors}    iifname \"{uplinks}\" ct direction reply ct state {{ established, related }} accept
    iifname \"{uplinks}\" ip daddr {{ {NEVER} }} drop
    iifname \"{uplinks}\" ct original ip daddr {{ {NEVER} }} drop
{to_hosts}    iifname \"{uplinks}\" ct state new limit rate over {NEW_OF_ALL_PER_S}/second burst {NEW_OF_ALL_PER_S} packets drop
{nothing_else}    oifname \"{uplinks}\" ct state related icmp type {{ destination-unreachable, time-exceeded, parameter-problem }} accept
    oifname \"{uplinks}\" ct direction original drop
    oifname \"{uplinks}\" ct state != {{ established, related }} drop
  }}
"
    )
}

/// A client with an address like those of a network's VMs: its answers would stay in that network. So its VMs see the address of the
/// gateway's cable in place of it.
fn hide_likes(tag: &Tag, doors: &[Door]) -> String {
    let networks: BTreeMap<u16, Subnet> =
        doors.iter().map(|door| (door.vni, door.subnet)).collect();
    let line = |(vni, subnet): (u16, Subnet)| {
        format!("    oifname \"{}\" ip saddr {subnet} masquerade\n", tag.uplink(vni))
    };
    networks.into_iter().map(line).collect()
}

/// Ports of this host that lead to gateways: for whoever comes from outside, and for this host's own programs.
fn doors(tag: &Tag, doors: &[Door]) -> (String, String) {
    if doors.is_empty() {
        return Default::default();
    }
    let (mut lead, mut pass) = (String::new(), String::new());
    for Door { vni, protocol, port, .. } in doors {
        let (own, uplink) = (uplink_addresses(*vni).1, tag.uplink(*vni));
        let _ = writeln!(
            lead,
            "    fib daddr type local {protocol} dport {port} dnat ip to {own}:{port}"
        );
        let _ = writeln!(
            pass,
            "    oifname \"{uplink}\" ip daddr {own} {protocol} dport {port} accept"
        );
    }
    let (tunnel, uplinks) = (tag.tunnel(), tag.uplinks());
    let chains = format!(
        "  chain doors {{
    type nat hook prerouting priority dstnat; policy accept;
    iifname \"{tunnel}\" return
    iifname \"{uplinks}\" return
{lead}  }}
  chain own_doors {{
    type nat hook output priority -100; policy accept;
    ip daddr 127.0.0.0/8 return
{lead}  }}
"
    );
    (chains, pass)
}

/// The gateway's own table, in its namespace: its inner card is `inner`, the one to its host `outer`.
pub fn of_gateway(nat: bool, published: &[Published]) -> String {
    let lead: String = published
        .iter()
        .map(|Published { publish: Publish { outside, inside, protocol }, address }| {
            format!(
                "    iifname \"outer\" {protocol} dport {outside} dnat ip to {address}:{inside}\n"
            )
        })
        .collect();
    let nat_chains = match nat {
        false => String::new(),
        true => format!(
            "  chain hide {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname \"outer\" masquerade
  }}
  chain doors {{
    type nat hook prerouting priority dstnat; policy accept;
{lead}  }}
"
        ),
    };
    let chains = format!(
        "  set fresh {{
    type ipv4_addr; size 65535; flags dynamic,timeout; timeout 1m;
  }}
  set open {{
    type ipv4_addr; size 65535; flags dynamic;
  }}
  set asks {{
    type ipv4_addr; size 65535; flags dynamic,timeout; timeout 1m;
  }}
  chain come {{
    type filter hook input priority filter; policy drop;
    iifname \"lo\" accept
    iifname \"inner\" meta l4proto {{ tcp, udp }} th dport 53 update @asks {{ ip saddr limit rate over {NEW_PER_S}/second burst {BURST} packets }} drop
    iifname \"inner\" udp dport {{ 53, 67 }} accept
    iifname \"inner\" tcp dport 53 accept
    iifname \"inner\" icmp type echo-request accept
    ct state {{ established, related }} accept
  }}
  chain pass {{
    type filter hook forward priority filter; policy drop;
    iifname \"inner\" oifname \"outer\" ct direction reply accept
    iifname \"outer\" oifname \"inner\" ct status dnat accept
    iifname \"inner\" oifname \"outer\" ip daddr {{ {NEVER} }} drop
    iifname \"inner\" ct state invalid drop
    iifname \"inner\" ct state new update @fresh {{ ip saddr limit rate over {NEW_PER_S}/second burst {BURST} packets }} drop
    iifname \"inner\" ct state new add @open {{ ip saddr ct count over {CONNECTIONS} }} drop
    iifname \"inner\" oifname \"outer\" accept
    iifname \"outer\" oifname \"inner\" ct state {{ established, related }} accept
  }}
{nat_chains}"
    );
    anew("inet", "gateway", &chains)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn taps() -> Vec<Tap> {
        [2_u8, 3]
            .map(|number| Tap {
                name: format!("pt00000000{number}"),
                vni: 1,
                mac: Mac([2, 0x50, 0, 1, 0, number]),
                address: Ipv4Addr::new(10, 7, 0, number),
            })
            .into()
    }

    fn tag() -> Tag {
        Tag::new(
            &perigee_model::HostId::new("home1").expect("a name"),
            std::path::Path::new("/state"),
        )
    }

    /// The real kernel takes them, in a network namespace of its own, and makes them anew when they come again.
    #[test]
    fn the_kernel_takes_the_rules() {
        if !nix::unistd::Uid::effective().is_root() {
            return;
        }
        let hosts = ["10.1.0.1", "fd00::1", "127.0.0.1"].map(|ip| ip.parse().expect("an address"));
        let peers = [(Ipv4Addr::new(100, 127, 0, 2), [1, 7].into())].into();
        let to = (Ipv4Addr::new(10, 7, 0, 2), 80);
        let doors = [Protocol::Tcp, Protocol::Udp].map(|protocol| Door {
            vni: 1,
            subnet: "10.7.0.0/24".parse().expect("addresses"),
            protocol,
            port: 8080,
            to,
        });
        let published = doors.map(|door| Published {
            publish: Publish { outside: door.port, inside: 80, protocol: door.protocol },
            address: to.0,
        });
        let full = OfHost {
            taps: &taps(),
            peers,
            hosts: &hosts,
            doors: &doors,
            forwards_nothing_else: true,
        };
        let all = [
            of_host(&tag(), &full),
            of_host(&tag(), &OfHost::default()),
            limits(&tag(), &[(1, "default"), (2, "acme"), (7, "acme")].into(), 16_384),
            limits(&tag(), &BTreeMap::new(), 16_384),
            of_gateway(true, &published),
            of_gateway(true, &[]),
            of_gateway(false, &published),
        ];
        let load = move || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("a namespace");
            for rules in all.iter().chain(&all) {
                use std::io::Write as _;
                let mut nft = std::process::Command::new("nft");
                let nft = nft.args(["-f", "-"]).stdin(std::process::Stdio::piped());
                let mut nft = nft.spawn().expect("nft runs");
                let mut input = nft.stdin.take().expect("it was asked for");
                input.write_all(rules.as_bytes()).expect("it reads");
                drop(input);
                assert!(nft.wait().expect("it ends").success(), "{rules}");
            }
        };
        std::thread::spawn(load).join().expect("no panic");
    }

    #[test]
    fn a_card_of_which_the_filter_knows_nothing_sends_nothing() {
        let text = of_host(&tag(), &OfHost { taps: &taps(), ..OfHost::default() });
        let (known, unknown) =
            (text.find("vmap"), text.find(&format!("iifname \"{}\" drop", tag().taps())));
        assert!(known.is_some() && known < unknown, "{text}");
        assert!(!of_host(&tag(), &OfHost::default()).contains("vmap"));
    }
}
