//! Networks of tenants, which span hosts and sites.
//!
//! A network has a number, its VNI. With it and a VM's address in the network the card's hardware address is known
//! ([`Card::mac`]), so it is unique in the cluster, and there is nothing else to store.
//!
//! The controller tells each agent what it needs with `PUT /v1/networks` ([`HostNetworks`]): the whole state that is
//! wanted, which may come twice or late.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::limits::{NETWORK_PREFIX_BITS, OutOfLimits};
use crate::{HostId, NetworkName, Problem, VmId};

/// WireGuard over IPv6 adds 80 bytes to a packet: IPv6 40, UDP 8, WireGuard 32. Over IPv4 it adds 60.
const WIREGUARD_BYTES: u16 = 80;
/// VXLAN over IPv4 adds 50 bytes to a packet: IPv4 20, UDP 8, VXLAN 8, Ethernet 14.
const VXLAN_BYTES: u16 = 50;
/// The least that IPv6 needs, and what every guest can use.
const MTU_MIN: u16 = 1280;
/// More is of no use to guests, and WireGuard would not carry it everywhere.
const MTU_MAX: u16 = 8870;

/// The names of a network's VMs end with this.
pub const DOMAIN: &str = "perigee.internal";

/// The tunnels' own addresses: the hosts' numbers are in the last two bytes. (RFC 6598: no host of the internet has them.)
pub const TUNNEL_NETWORK: Subnet =
    Subnet { address: Ipv4Addr::new(100, 127, 0, 0), prefix_bits: 16 };

/// The largest packet of a tunnel over a network with this one.
pub fn tunnel_mtu(underlay: u16) -> u16 {
    underlay.saturating_sub(WIREGUARD_BYTES).clamp(MTU_MIN + VXLAN_BYTES, MTU_MAX + VXLAN_BYTES)
}

/// The largest packet of a guest over hosts with this one.
pub fn guest_mtu(underlay: u16) -> u16 {
    tunnel_mtu(underlay) - VXLAN_BYTES
}

/// The addresses of a network: `10.7.0.0/24`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Subnet {
    address: Ipv4Addr,
    prefix_bits: u8,
}

/// Why a text names no network's addresses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadSubnet {
    /// It is something else.
    #[error("{0:?} is not ADDRESS/BITS, for example 10.7.0.0/24")]
    Form(String),
    /// It is too large or too small.
    #[error(transparent)]
    Bits(#[from] OutOfLimits),
    /// The address is not the network's first one.
    #[error("{0} is not the first address of a network: use {1}")]
    NotFirst(Subnet, Subnet),
    /// Somebody else has these addresses.
    #[error("{0} is not private: use addresses in 10.0.0.0/8, 172.16.0.0/12 or 192.168.0.0/16")]
    NotPrivate(Subnet),
}

impl Subnet {
    /// # Errors
    /// When no network of a tenant may have these addresses.
    pub fn new(address: Ipv4Addr, prefix_bits: u8) -> Result<Self, BadSubnet> {
        NETWORK_PREFIX_BITS.check(prefix_bits)?;
        let subnet = Self { address, prefix_bits };
        let first = Self { address: Ipv4Addr::from(u32::from(address) & subnet.mask()), ..subnet };
        if first != subnet {
            return Err(BadSubnet::NotFirst(subnet, first));
        }
        if !address.is_private() {
            return Err(BadSubnet::NotPrivate(subnet));
        }
        Ok(subnet)
    }

    fn mask(self) -> u32 {
        u32::MAX << (32 - u32::from(self.prefix_bits))
    }

    /// How many bits of an address are the network's.
    pub fn prefix_bits(self) -> u8 {
        self.prefix_bits
    }

    /// The same as four bytes.
    pub fn netmask(self) -> Ipv4Addr {
        Ipv4Addr::from(self.mask())
    }

    /// Whether the address is one of them.
    pub fn contains(self, address: Ipv4Addr) -> bool {
        u32::from(address) & self.mask() == u32::from(self.address)
    }

    /// Which of the addresses it is, from 0.
    pub fn number_of(self, address: Ipv4Addr) -> u16 {
        // A network has at most 2^16 addresses.
        u16::try_from(u32::from(address) & !self.mask()).unwrap_or(u16::MAX)
    }

    /// The address with this number.
    pub fn address(self, number: u16) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.address) | (u32::from(number) & !self.mask()))
    }

    /// The way out of the network, and its resolver of names.
    pub fn gateway(self) -> Ipv4Addr {
        self.address(1)
    }

    /// The numbers of the addresses that VMs may have. The first is the network's name, the second the gateway's, and the
    /// last one all VMs'.
    pub fn of_vms(self) -> std::ops::Range<u16> {
        2..u16::try_from(!self.mask()).unwrap_or(u16::MAX)
    }
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix_bits)
    }
}

impl FromStr for Subnet {
    type Err = BadSubnet;

    fn from_str(text: &str) -> Result<Self, BadSubnet> {
        let parts =
            text.split_once('/').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        let form = || BadSubnet::Form(text.chars().take(80).collect());
        let (address, prefix_bits) = parts.ok_or_else(form)?;
        Self::new(address, prefix_bits)
    }
}

impl TryFrom<String> for Subnet {
    type Error = BadSubnet;

    fn try_from(text: String) -> Result<Self, BadSubnet> {
        text.parse()
    }
}

impl From<Subnet> for String {
    fn from(subnet: Subnet) -> String {
        subnet.to_string()
    }
}

/// The hardware address of a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac(pub [u8; 6]);

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// The hardware address of who has this address in a network. The first byte says that it is locally administered.
pub fn mac(vni: u16, subnet: Subnet, address: Ipv4Addr) -> Mac {
    let ([a, b], [c, d]) = (vni.to_be_bytes(), subnet.number_of(address).to_be_bytes());
    Mac([0x02, 0x50, a, b, c, d])
}

/// The name of a bridge that the operator of a host has made there.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BridgeName(String);

impl BridgeName {
    /// As the kernel has it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for BridgeName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        /// The kernel's own limit.
        const BYTES: usize = 15;
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let begins = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
        if begins && text.len() <= BYTES && text.bytes().all(is_plain) {
            return Ok(Self(text.to_owned()));
        }
        let text: String = text.chars().take(80).collect();
        Err(format!(
            "{text:?} is not the name of a bridge: it has up to {BYTES} letters, digits, dots, _ and -"
        ))
    }
}

impl TryFrom<String> for BridgeName {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<BridgeName> for String {
    fn from(name: BridgeName) -> String {
        name.0
    }
}

impl fmt::Display for BridgeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A VM's card in a bridge of a host's operator. It keeps it when it moves or is started again.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct BridgeCard {
    /// Of each host at which the VM is.
    #[schema(value_type = String)]
    pub bridge: BridgeName,
    /// The last four bytes of its hardware address.
    pub number: u32,
}

impl BridgeCard {
    /// Its hardware address.
    pub fn mac(&self) -> Mac {
        let [a, b, c, d] = self.number.to_be_bytes();
        Mac([0x02, 0x51, a, b, c, d])
    }
}

/// A VM's card in a network. It keeps it when it moves or is started again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Card {
    /// The network's full name.
    pub network: NetworkName,
    /// Its number, unique in the cluster.
    pub vni: u16,
    /// Its addresses.
    #[schema(value_type = String)]
    pub subnet: Subnet,
    /// The card's own one.
    #[schema(value_type = String)]
    pub address: Ipv4Addr,
    /// The largest packet, without Ethernet's header.
    pub mtu: u16,
}

impl Card {
    /// Its hardware address.
    pub fn mac(&self) -> Mac {
        mac(self.vni, self.subnet, self.address)
    }
}

/// What a published port carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// `8080:80`
    Tcp,
    /// `5353:53/udp`
    Udp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Tcp { "tcp" } else { "udp" })
    }
}

/// A port of a VM that is reached from outside, at the host that has its network's gateway: `8080:80` or `5353:53/udp`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Publish {
    /// The port of the host.
    pub outside: u16,
    /// The port of the VM.
    pub inside: u16,
    /// What they carry.
    pub protocol: Protocol,
}

impl fmt::Display for Publish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = if self.protocol == Protocol::Udp { "/udp" } else { "" };
        write!(f, "{}:{}{end}", self.outside, self.inside)
    }
}

impl FromStr for Publish {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            let text: String = text.chars().take(80).collect();
            format!("{text:?} is not PORT:PORT or PORT:PORT/udp, for example 8080:80")
        };
        let (ports, protocol) = match text.split_once('/') {
            None | Some((_, "tcp")) => (text.trim_end_matches("/tcp"), Protocol::Tcp),
            Some((ports, "udp")) => (ports, Protocol::Udp),
            Some(_) => return Err(wrong()),
        };
        let (outside, inside) = ports.split_once(':').ok_or_else(wrong)?;
        let port = |text: &str| text.parse().ok().filter(|port: &u16| *port > 0).ok_or_else(wrong);
        Ok(Self { outside: port(outside)?, inside: port(inside)?, protocol })
    }
}

impl TryFrom<String> for Publish {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Publish> for String {
    fn from(publish: Publish) -> String {
        publish.to_string()
    }
}

/// The ports of hosts that tenants may publish: `28000-29999`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PublishPorts {
    /// The first one.
    pub first: u16,
    /// The last one.
    pub last: u16,
}

impl PublishPorts {
    /// Whether the port is one of them.
    pub fn contains(self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }
}

impl Default for PublishPorts {
    fn default() -> Self {
        // No common program listens there, no connection of a host begins there, and Kubernetes' ports of nodes are others.
        Self { first: 28_000, last: 29_999 }
    }
}

impl fmt::Display for PublishPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl FromStr for PublishPorts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ports = text.split_once('-').and_then(|(first, last)| {
            Some(Self { first: first.parse().ok()?, last: last.parse().ok()? })
        });
        let ports = ports.filter(|ports| ports.first > 0 && ports.first <= ports.last);
        ports.ok_or_else(|| format!("{text:?} is not FIRST-LAST, for example 28000-29999"))
    }
}

/// `POST /v1/networks`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewNetwork {
    /// Unique in its tenant.
    pub name: NetworkName,
    /// Its addresses, private ones. Networks may have the same: they don't reach each other.
    #[schema(value_type = String)]
    pub subnet: Subnet,
    /// Its VMs reach what its gateway's host reaches, but not the cluster's hosts.
    #[serde(default)]
    pub nat: bool,
}

/// A network as people see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterNetwork {
    /// Its full name.
    pub name: NetworkName,
    /// Its addresses.
    #[schema(value_type = String)]
    pub subnet: Subnet,
    /// Whether its VMs reach the world outside.
    pub nat: bool,
    /// Its number, unique in the cluster.
    pub vni: u16,
    /// The largest packet of its VMs.
    pub mtu: u16,
    /// Where its VMs find names and the way out.
    #[schema(value_type = String)]
    pub gateway: Ipv4Addr,
    /// The host that has this address now; `None` while no VM needs it.
    pub gateway_host: Option<HostId>,
    /// Its VMs.
    pub vms: Vec<NetworkVm>,
}

/// A VM in a network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkVm {
    /// The VM.
    pub vm: VmId,
    /// `None` before it is staged first.
    #[schema(value_type = Option<String>)]
    pub address: Option<Ipv4Addr>,
    /// The same, of its card.
    pub mac: Option<String>,
    /// Where it is now.
    pub host: Option<HostId>,
    /// Its ports that are reached at the gateway's host.
    #[schema(value_type = Vec<String>)]
    pub publish: Vec<Publish>,
}

/// One end of the tunnels between hosts, as its host says it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TunnelEnd {
    /// WireGuard's, in base64.
    pub public_key: String,
    /// `IP:PORT` (UDP)
    pub endpoint: String,
    /// The largest packet of the host's interface with that address.
    pub mtu: u16,
}

impl TunnelEnd {
    /// # Errors
    /// When it could mean something else to WireGuard's configuration.
    pub fn check(&self) -> Result<(), Problem> {
        let invalid = |why: &str| Problem::invalid("can't use a host's tunnel", why);
        let is_base64 = |byte: u8| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte);
        if self.public_key.len() != 44 || !self.public_key.bytes().all(is_base64) {
            return Err(invalid("its key is not 32 bytes in base64"));
        }
        match self.endpoint.parse::<std::net::SocketAddr>() {
            Ok(_) => Ok(()),
            Err(_) => Err(invalid("its endpoint is not IP:PORT")),
        }
    }
}

/// The answer to `PUT /v1/networks` of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworksKnown {
    /// Of what the agent knows. It is later than that of the request if the request came late, or if the controller's clock
    /// was set back.
    pub made_ms: u64,
}

/// `PUT /v1/networks` of an agent: all that its host has to do with networks. What it does not name is removed there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostNetworks {
    /// When the controller made it, Unix time; an older one that comes late changes nothing.
    pub made_ms: u64,
    /// This host's address in the tunnels; `None` if it needs no tunnel.
    #[schema(value_type = Option<String>)]
    pub address: Option<Ipv4Addr>,
    /// The hosts with which it shares a network.
    pub peers: Vec<TunnelPeer>,
    /// The networks that are here.
    pub networks: Vec<HostNetwork>,
    /// The addresses of the cluster's hosts, which guests don't reach.
    #[schema(value_type = Vec<String>)]
    pub hosts: Vec<IpAddr>,
}

/// Another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TunnelPeer {
    /// The host.
    pub host: HostId,
    /// Its address in the tunnels.
    #[schema(value_type = String)]
    pub address: Ipv4Addr,
    /// What it has said of itself.
    pub end: TunnelEnd,
}

/// A network at a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostNetwork {
    /// Its full name.
    pub name: NetworkName,
    /// Its number.
    pub vni: u16,
    /// Its addresses.
    #[schema(value_type = String)]
    pub subnet: Subnet,
    /// The largest packet of its VMs.
    pub mtu: u16,
    /// Its VMs reach the world outside.
    pub nat: bool,
    /// The host that has the gateway's address.
    pub gateway: Option<HostId>,
    /// Its VMs, at whichever host.
    pub members: Vec<Member>,
    /// What the gateway's host publishes.
    pub published: Vec<Published>,
}

/// A published port and its VM's address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Published {
    /// The ports.
    #[schema(value_type = String)]
    pub publish: Publish,
    /// The VM's address.
    #[schema(value_type = String)]
    pub address: Ipv4Addr,
}

/// Where frames for a VM go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Member {
    /// The VM.
    pub vm: VmId,
    /// Its address.
    #[schema(value_type = String)]
    pub address: Ipv4Addr,
    /// Where it is; `None`: nowhere now.
    pub host: Option<HostId>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subnet(text: &str) -> Subnet {
        text.parse().expect("a network's addresses")
    }

    #[test]
    fn only_whole_private_networks_are_taken() {
        assert_eq!(subnet("10.7.0.0/24").to_string(), "10.7.0.0/24");
        assert!(matches!("10.7.0.1/24".parse::<Subnet>(), Err(BadSubnet::NotFirst(..))));
        assert!(matches!("8.8.8.0/24".parse::<Subnet>(), Err(BadSubnet::NotPrivate(_))));
        for bits in [0, 8, 15, 30, 32, 99] {
            let text = format!("10.0.0.0/{bits}");
            assert!(matches!(text.parse::<Subnet>(), Err(BadSubnet::Bits(_))), "{text}");
        }
        for text in ["", "10.7.0.0", "10.7.0.0/", "a/24", "10.7.0.0/256", "fd00::/64"] {
            assert!(matches!(text.parse::<Subnet>(), Err(BadSubnet::Form(_))), "{text}");
        }
    }

    #[test]
    fn the_gateway_and_the_first_and_last_address_are_no_vm_s() {
        let small = subnet("192.168.3.8/29");
        let of_vms: Vec<String> =
            small.of_vms().map(|number| small.address(number).to_string()).collect();
        assert_eq!(small.gateway().to_string(), "192.168.3.9");
        assert_eq!(
            of_vms,
            ["192.168.3.10", "192.168.3.11", "192.168.3.12", "192.168.3.13", "192.168.3.14"]
        );
        assert_eq!(small.netmask().to_string(), "255.255.255.248");
        assert_eq!(subnet("10.1.0.0/16").of_vms(), 2..0xffff);
    }

    #[test]
    fn each_address_of_each_network_has_a_card_of_its_own() {
        let large = subnet("10.1.0.0/16");
        let mac = |vni, number| mac(vni, large, large.address(number)).to_string();
        assert_eq!(mac(0x1234, 0xabcd), "02:50:12:34:ab:cd");
        assert_ne!(mac(1, 2), mac(2, 2));
        for number in [1, 2, 255, 256, 0xfffe] {
            assert_eq!(large.number_of(large.address(number)), number);
            assert!(large.contains(large.address(number)));
        }
        assert!(!subnet("10.7.0.0/24").contains(Ipv4Addr::new(10, 7, 1, 0)));
    }

    #[test]
    fn a_guests_packet_fits_into_the_tunnel() {
        assert_eq!((tunnel_mtu(1500), guest_mtu(1500)), (1420, 1370));
        assert_eq!(guest_mtu(9000), 8870);
        assert_eq!(guest_mtu(65535), 8870);
        assert_eq!(guest_mtu(1280), 1280, "then the tunnel's packets are cut");
    }

    #[test]
    fn a_port_is_published_as_docker_s_users_write_it() {
        let text = |text: &str| text.parse::<Publish>().map(|publish| publish.to_string());
        assert_eq!(text("8080:80").as_deref(), Ok("8080:80"));
        assert_eq!(text("8080:80/tcp").as_deref(), Ok("8080:80"));
        assert_eq!(text("53:5353/udp").as_deref(), Ok("53:5353/udp"));
        for wrong in ["", "80", "0:80", "80:0", "80:80/sctp", "65536:1", "1:2:3", "80:80/tcp/tcp"] {
            assert!(text(wrong).is_err(), "{wrong}");
        }
        let ports = |text: &str| text.parse::<PublishPorts>();
        assert!(
            ports("8000-8999").is_ok_and(|ports| ports.contains(8080) && !ports.contains(9000))
        );
        for wrong in ["", "8000", "9000-8000", "0-1", "1-65536"] {
            assert!(ports(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn nothing_but_a_key_gets_into_the_configuration() {
        let good = TunnelEnd {
            public_key: format!("{}=", "a".repeat(43)),
            endpoint: "10.0.0.1:51871".to_owned(),
            mtu: 1500,
        };
        good.check().expect("a key");
        let key = |key: &str| TunnelEnd { public_key: key.to_owned(), ..good.clone() }.check();
        let at = |end: &str| TunnelEnd { endpoint: end.to_owned(), ..good.clone() }.check();
        assert!(key("short").is_err() && key(&format!("{}\n", "a".repeat(43))).is_err());
        assert!(at("host:1").is_err() && at("10.0.0.1").is_err() && at("10.0.0.1:1\n").is_err());
        at("[fd00::1]:5").expect("an address");
    }

    #[test]
    fn a_bridge_has_a_name_that_the_kernel_takes() {
        use crate::vm::NetworkKind;
        for right in ["br0", "vmbr0.100", "a_b-c", "123456789012345"] {
            let kind: NetworkKind = format!("bridge:{right}").parse().expect("a bridge");
            assert_eq!(String::from(kind), format!("bridge:{right}"));
        }
        for wrong in ["", ".", "-x", "br 0", "br/0", "1234567890123456", "br0;", "br0\n"] {
            assert!(format!("bridge:{wrong}").parse::<NetworkKind>().is_err(), "{wrong}");
        }
    }
}
