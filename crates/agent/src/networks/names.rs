//! The names of what the agent makes in the kernel. Each has the agent's tag, so that several agents never touch what
//! another one's is, and what a killed agent has left is found.

use std::net::Ipv4Addr;
use std::path::Path;

use perigee_model::HostId;
use perigee_model::network::{BridgeCard, Card};

/// Five digits of the host's name and the agent's state directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tag(String);

impl Tag {
    /// The tag of the agent of this host with this state directory.
    pub fn new(host: &HostId, state: &Path) -> Self {
        // FNV-1a: the same for every version of the agent.
        let text = format!("{host}\0{}", state.display());
        let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Self(format!("{:05x}", (hash ^ (hash >> 20) ^ (hash >> 40)) & 0xf_ffff))
    }

    /// The tunnels to all hosts.
    pub fn tunnel(&self) -> String {
        format!("pw{}", self.0)
    }

    /// A network's bridge.
    pub fn bridge(&self, vni: u16) -> String {
        format!("pb{}{vni:04x}", self.0)
    }

    /// A network's way to other hosts.
    pub fn vxlan(&self, vni: u16) -> String {
        format!("px{}{vni:04x}", self.0)
    }

    /// The bridge's end of the cable to the gateway.
    pub fn gateway(&self, vni: u16) -> String {
        format!("pg{}{vni:04x}", self.0)
    }

    /// The host's end of the cable over which the gateway reaches the world.
    pub fn uplink(&self, vni: u16) -> String {
        format!("pu{}{vni:04x}", self.0)
    }

    /// A VM's card.
    pub fn tap(&self, card: &Card) -> String {
        format!("pt{}{:04x}{:04x}", self.0, card.vni, card.subnet.number_of(card.address))
    }

    /// The numbers of a card's network and address, by the name of its device.
    pub fn numbers_of(&self, tap: &str) -> Option<(u16, u16)> {
        let (vni, number) = tap.strip_prefix("pt")?.strip_prefix(&self.0)?.split_at_checked(4)?;
        Some((u16::from_str_radix(vni, 16).ok()?, u16::from_str_radix(number, 16).ok()?))
    }

    /// A VM's card in a bridge of the operator.
    pub fn bridged(&self, card: &BridgeCard) -> String {
        format!("pn{}{:08x}", self.0, card.number)
    }

    /// Whether it is such a card.
    pub fn is_bridged(&self, interface: &str) -> bool {
        interface.strip_prefix("pn").is_some_and(|rest| rest.starts_with(&self.0))
    }

    /// Of all of them.
    pub fn all_bridged(&self) -> String {
        format!("pn{}*", self.0)
    }

    /// Their packet filter's table.
    pub fn bridged_table(&self) -> String {
        format!("perigee_bridged_{}", self.0)
    }

    /// Of all uplinks, for the packet filter.
    pub fn uplinks(&self) -> String {
        format!("pu{}*", self.0)
    }

    /// Of all cards.
    pub fn taps(&self) -> String {
        format!("pt{}*", self.0)
    }

    /// Of all bridges.
    pub fn bridges(&self) -> String {
        format!("pb{}*", self.0)
    }

    /// Of all cables to gateways.
    pub fn gateways(&self) -> String {
        format!("pg{}*", self.0)
    }

    /// Of all ways to other hosts.
    pub fn vxlans(&self) -> String {
        format!("px{}*", self.0)
    }

    /// The packet filter's tables.
    pub fn table(&self) -> String {
        format!("perigee_net_{}", self.0)
    }

    /// The packet filter's table that counts connections.
    pub fn limits(&self) -> String {
        format!("perigee_limits_{}", self.0)
    }

    /// The packet filter's table that counts what VMs of a job send to each other.
    pub fn talk(&self) -> String {
        format!("perigee_talk_{}", self.0)
    }

    /// Whether two interfaces of this agent are of the same network.
    pub fn same_network(&self, one: &str, other: &str) -> bool {
        let vni = |name: &str| name.get(7..11).map(str::to_owned);
        vni(one).is_some() && vni(one) == vni(other)
    }

    /// Whether this agent has made the interface, or one before it.
    pub fn is_own(&self, interface: &str) -> bool {
        let kinds = ["pw", "pb", "px", "pg", "pu", "pt"];
        kinds
            .iter()
            .any(|kind| interface.strip_prefix(kind).is_some_and(|rest| rest.starts_with(&self.0)))
    }
}

/// The two ends of a gateway's cable to its host: the host's and the gateway's own. (RFC 6598, beside the tunnels'
/// addresses.)
pub fn uplink_addresses(vni: u16) -> (Ipv4Addr, Ipv4Addr) {
    let first = u32::from(Ipv4Addr::new(100, 124, 0, 0)) + 2 * u32::from(vni);
    (Ipv4Addr::from(first), Ipv4Addr::from(first + 1))
}

/// Whether an address is that of a gateway at its cable.
pub fn is_uplink(address: Ipv4Addr) -> bool {
    let (first, last) = (uplink_addresses(0).0, uplink_addresses(u16::MAX).1);
    (first..=last).contains(&address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag(host: &str, state: &str) -> Tag {
        Tag::new(&HostId::new(host).expect("a name"), Path::new(state))
    }

    #[test]
    fn every_name_fits_into_the_kernels_fifteen_bytes() {
        let tag = tag("home1", "/var/lib/perigee/agent");
        let subnet = "10.0.0.0/16".parse().expect("addresses");
        let network = perigee_model::NetworkName::new("n").expect("a name");
        let address = Ipv4Addr::new(10, 0, 255, 254);
        let card = Card { network, vni: u16::MAX, subnet, address, mtu: 1370 };
        let vni = u16::MAX;
        for name in [
            tag.tunnel(),
            tag.bridge(vni),
            tag.vxlan(vni),
            tag.gateway(vni),
            tag.uplink(vni),
            tag.tap(&card),
        ] {
            assert!(name.len() <= 15, "{name}");
            assert!(tag.is_own(&name), "{name}");
        }
        assert_eq!(tag.numbers_of(&tag.tap(&card)), Some((vni, 0xfffe)));
        assert_eq!(tag.numbers_of(&tag.bridge(vni)), None);
        assert!(!tag.is_own("eth0") && !tag.is_own("pb"));
        let bridged = tag.all_bridged().replace('*', "00000001");
        assert!(tag.is_bridged(&bridged) && !tag.is_bridged(&tag.tunnel()), "{bridged}");
    }

    #[test]
    fn two_agents_of_a_machine_have_different_names() {
        let one = tag("home1", "/a");
        assert_ne!(one, tag("home2", "/a"));
        assert_ne!(one, tag("home1", "/b"));
        assert!(!one.is_own(&tag("home2", "/a").tunnel()));
    }

    #[test]
    fn gateways_have_addresses_of_their_own() {
        let text = |vni| {
            let (host, own) = uplink_addresses(vni);
            format!("{host} {own}")
        };
        assert_eq!(text(1), "100.124.0.2 100.124.0.3");
        assert_eq!(text(u16::MAX), "100.125.255.254 100.125.255.255");
    }
}
