//! What a lab consists of, and the names and addresses that follow from its id.
//!
//! Everything a lab makes on the machine carries its id: namespaces `pg-ID-…`, the directory `ID`
//! and the subnet. So two labs live beside each other, and `down` finds what is one lab's.

use std::fmt;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::str::FromStr;

use perigee_model::{HostId, Problem, SiteId};
use serde::{Deserialize, Serialize};

pub const CONTROLLER_PORT: u16 = 7000;
pub const VOLUME_PORT: u16 = 7001;
pub const AGENT_PORT: u16 = 7002;
pub const NBD_PORT: u16 = 10809;

/// The controller's address; hosts have 10 and up.
const CONTROLLER_NUMBER: u8 = 2;
const FIRST_HOST_NUMBER: u8 = 10;
const HOSTS_MAX: usize = 200;

/// Four lower-case hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LabId(u16);

impl LabId {
    pub fn random() -> Self {
        let [high, low, ..] = *uuid::Uuid::new_v4().as_bytes();
        Self(u16::from_be_bytes([high, low]))
    }

    /// What the names of all the lab's namespaces begin with.
    pub fn namespace_prefix(&self) -> String {
        format!("pg-{self}-")
    }
}

impl fmt::Display for LabId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}", self.0)
    }
}

impl FromStr for LabId {
    type Err = Problem;

    fn from_str(text: &str) -> Result<Self, Problem> {
        let digits = text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        match u16::from_str_radix(text, 16) {
            Ok(number) if digits && text.len() == 4 => Ok(Self(number)),
            _ => Err(Problem::invalid(
                format!("lab id {text:?}"),
                "a lab's id is four digits of 0-9 and a-f",
            )
            .next("`perigee lab list` shows the labs")),
        }
    }
}

impl TryFrom<String> for LabId {
    type Error = Problem;
    fn try_from(text: String) -> Result<Self, Problem> {
        text.parse()
    }
}

impl From<LabId> for String {
    fn from(id: LabId) -> String {
        id.to_string()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SiteDef {
    pub name: SiteId,
    pub hosts: Vec<HostId>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Definition {
    pub id: LabId,
    /// Round-trip time between any two sites.
    pub rtt_ms: u32,
    pub sites: Vec<SiteDef>,
    /// A kernel the agents boot once to find out whether KVM works.
    pub probe_kernel: Option<PathBuf>,
}

/// A wire between two switches, by their names, with its delay in each direction.
#[derive(Debug, Clone, PartialEq)]
pub struct Wire {
    pub left: String,
    pub right: String,
    pub delay_ms: f64,
}

/// The switch in the middle when there are more than two sites.
pub const HUB: &str = "hub";

impl Definition {
    /// Site `home` with two hosts and site `cloud` with one.
    ///
    /// # Panics
    /// Never: the names are constants that are names.
    pub fn default_demo(id: LabId, rtt_ms: u32) -> Self {
        let site = |name: &str, hosts: &[&str]| SiteDef {
            name: SiteId::new(name).expect("a constant name"),
            hosts: hosts.iter().map(|h| HostId::new(*h).expect("a constant name")).collect(),
        };
        let sites = vec![site("home", &["home1", "home2"]), site("cloud", &["cloud1"])];
        Self { id, rtt_ms, sites, probe_kernel: None }
    }

    /// # Errors
    /// `Invalid` when a name is used twice or reserved, or when there are no hosts or too many.
    pub fn check(&self) -> Result<(), Problem> {
        let refuse = |why: String| Err(Problem::invalid(format!("lab {}", self.id), why));
        let mut hosts: Vec<&HostId> = self.hosts().map(|(_, host)| host).collect();
        let mut sites: Vec<&SiteId> = self.sites.iter().map(|s| &s.name).collect();
        if hosts.is_empty() || self.sites.iter().any(|s| s.hosts.is_empty()) {
            return refuse("every site needs a host".to_owned());
        }
        if hosts.len() > HOSTS_MAX {
            return refuse(format!("{} hosts are more than {HOSTS_MAX}", hosts.len()));
        }
        for host in &hosts {
            if host.as_str() == "ctl" || host.as_str().starts_with("site-") {
                return refuse(format!("a host cannot be called {host}: the lab uses that name"));
            }
        }
        if sites.iter().any(|s| s.as_str() == HUB) {
            return refuse(format!("a site cannot be called {HUB}: the lab uses that name"));
        }
        hosts.sort();
        sites.sort();
        if let Some(pair) = hosts.windows(2).find(|p| p[0] == p[1]) {
            return refuse(format!("host {} is there twice", pair[0]));
        }
        if let Some(pair) = sites.windows(2).find(|p| p[0] == p[1]) {
            return refuse(format!("site {} is there twice", pair[0]));
        }
        Ok(())
    }

    /// All hosts with their sites, in order.
    pub fn hosts(&self) -> impl Iterator<Item = (&SiteId, &HostId)> {
        self.sites.iter().flat_map(|s| s.hosts.iter().map(move |h| (&s.name, h)))
    }

    pub fn host_namespace(&self, host: &HostId) -> String {
        format!("pg-{}-{host}", self.id)
    }

    pub fn site_namespace(&self, site: &SiteId) -> String {
        format!("pg-{}-site-{site}", self.id)
    }

    pub fn controller_namespace(&self) -> String {
        format!("pg-{}-ctl", self.id)
    }

    pub fn host_address(&self, host: &HostId) -> Option<Ipv4Addr> {
        let index = self.hosts().position(|(_, h)| h == host)?;
        Some(self.address(FIRST_HOST_NUMBER + u8::try_from(index).ok()?))
    }

    pub fn controller_address(&self) -> Ipv4Addr {
        self.address(CONTROLLER_NUMBER)
    }

    /// One subnet for all sites, told apart from other labs' by the id.
    fn address(&self, number: u8) -> Ipv4Addr {
        let [high, low] = self.id.0.to_be_bytes();
        Ipv4Addr::new(10, high, low, number)
    }

    /// The WAN. Two sites have one wire; more have one each to a hub, with half the delay, so that
    /// no loop arises and any two sites are `rtt_ms` apart.
    pub fn wires(&self) -> Vec<Wire> {
        let one_way_ms = f64::from(self.rtt_ms) / 2.0;
        match &self.sites[..] {
            [] | [_] => Vec::new(),
            [a, b] => vec![Wire {
                left: a.name.to_string(),
                right: b.name.to_string(),
                delay_ms: one_way_ms,
            }],
            many => many
                .iter()
                .map(|site| Wire {
                    left: site.name.to_string(),
                    right: HUB.to_owned(),
                    delay_ms: one_way_ms / 2.0,
                })
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demo() -> Definition {
        Definition::default_demo("0a1f".parse().expect("an id"), 16)
    }

    #[test]
    fn an_id_is_four_hexadecimal_digits() {
        assert_eq!("0a1f".parse::<LabId>().expect("an id").to_string(), "0a1f");
        for bad in ["", "a1f", "0a1f0", "0A1F", "+a1f", "../x"] {
            assert!(bad.parse::<LabId>().is_err(), "{bad:?} must be refused");
        }
    }

    #[test]
    fn addresses_follow_from_the_id_and_differ() {
        let lab = demo();
        let addresses: std::collections::BTreeSet<_> =
            lab.hosts().filter_map(|(_, h)| lab.host_address(h)).collect();
        assert_eq!(addresses.len(), 3);
        assert!(addresses.iter().all(|a| a.octets()[..3] == [10, 0x0a, 0x1f]));
        assert!(!addresses.contains(&lab.controller_address()));
    }

    #[test]
    fn names_used_twice_or_by_the_lab_are_refused() {
        assert!(demo().check().is_ok());
        for name in ["home1", "ctl", "site-home"] {
            let mut lab = demo();
            lab.sites[1].hosts.push(HostId::new(name).expect("a name"));
            assert!(lab.check().is_err(), "{name} must be refused");
        }
    }

    #[test]
    fn three_sites_meet_at_a_hub_with_half_the_delay() {
        let mut lab = demo();
        assert_eq!(lab.wires().len(), 1);
        assert!((lab.wires()[0].delay_ms - 8.0).abs() < 1e-9);
        lab.sites.push(SiteDef {
            name: SiteId::new("edge").expect("a name"),
            hosts: vec![HostId::new("edge1").expect("a name")],
        });
        let wires = lab.wires();
        assert_eq!(wires.len(), 3);
        assert!(wires.iter().all(|w| w.right == HUB && (w.delay_ms - 4.0).abs() < 1e-9));
    }
}
