//! What a lab consists of, and the names and addresses that follow from its id.
//!
//! Everything a lab makes on the machine carries its id: namespaces `pg-ID-…`, the directory `ID`
//! and the subnet. So two labs do not get in each other's way, and `down` finds all parts of a lab.

use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::str::FromStr;

use perigee_model::{HostId, Problem, SiteId};
use serde::{Deserialize, Serialize};

use crate::process::own_cpus;
use crate::rent::Rent;
use crate::wan::LinkSettings;

/// The controller's API in the lab's network. Each daemon has an address of its own, so that the ports can be the
/// same everywhere.
pub const CONTROLLER_PORT: u16 = 7000;
/// The control API of each host's volume server.
pub const VOLUME_PORT: u16 = 7001;
/// The API of each host's agent.
pub const AGENT_PORT: u16 = 7002;
/// NBD of each host's volume server: the port that IANA lists for it.
pub const NBD_PORT: u16 = 10809;

/// The last number of the controller's address. Hosts have 10 and up.
const CONTROLLER_NUMBER: u8 = 2;
/// Above the users of an agent's VMs by default, and that of `qemu-img`.
const FIRST_VM_UID: usize = 1_901_000_000;
const VM_UIDS_PER_HOST: usize = 1000;
const FIRST_HOST_NUMBER: u8 = 10;
const HOSTS_MAX: usize = 200;
/// The last numbers of the addresses of hosts that are rented.
const RENTED_NUMBERS: std::ops::Range<u8> = 210..250;
/// Every pair of sites has a link of its own: 16 sites have 120.
const SITES_MAX: usize = 16;

/// Four lower-case hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LabId(u16);

impl LabId {
    /// Any of 65,536 ids. Whether a lab of this id is there already is not checked.
    pub fn random() -> Self {
        let [high, low, ..] = *uuid::Uuid::new_v4().as_bytes();
        Self(u16::from_be_bytes([high, low]))
    }

    /// The prefix of the names of all the lab's namespaces.
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
                format!("can't use the lab id {text:?}"),
                "a lab's id has four digits of 0-9 and a-f",
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

/// A site with its hosts, which share a bridge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SiteDef {
    pub name: SiteId,
    pub hosts: Vec<HostId>,
}

/// The WAN between two sites.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    pub sites: [SiteId; 2],
    #[serde(flatten)]
    pub settings: LinkSettings,
}

impl Link {
    /// Whether it is the link between these two, in either order.
    pub fn joins(&self, one: &SiteId, other: &SiteId) -> bool {
        let [a, b] = &self.sites;
        (a, b) == (one, other) || (a, b) == (other, one)
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.sites[0], self.sites[1])
    }
}

/// What a lab is made of. [`Definition::check`] says whether it can be built.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Definition {
    pub id: LabId,
    pub sites: Vec<SiteDef>,
    /// A link for each pair of sites, with the settings at the lab's start.
    pub links: Vec<Link>,
    /// The CPUs of the machine on which a host's daemons and VMs run. A host that is not listed has all of them, and shares them with
    /// the other hosts, so that no host of the lab is idle while another one works.
    pub cpus: BTreeMap<HostId, Vec<usize>>,
    /// The kernel that the agents boot once to find out whether KVM works.
    pub probe_kernel: Option<PathBuf>,
    /// Nothing between the hosts is encrypted. It is for measuring what encryption costs.
    pub insecure: bool,
    /// What VMs in user networks reach beside the internet's addresses.
    pub guests_reach: Vec<String>,
    /// Bridges of the hosts' own in which VMs may have cards. Who starts the lab makes them.
    pub bridges: Vec<String>,
    /// How long a VM's request waits for the home of its volume that does not answer; `None`: as by default.
    pub home_patience_s: Option<u64>,
    /// How much per second hosts fetch in the background, of images as of backups; `None`: as by default.
    pub fill_bytes_per_s: Option<u64>,
    /// Hosts that can be rented while the lab runs.
    #[serde(default)]
    pub rent: Rent,
}

impl Definition {
    /// Gives all links the same settings.
    pub fn new(id: LabId, sites: Vec<SiteDef>, settings: LinkSettings) -> Self {
        let mut links = Vec::new();
        for (index, one) in sites.iter().enumerate() {
            for other in &sites[index + 1..] {
                links.push(Link { sites: [one.name.clone(), other.name.clone()], settings });
            }
        }
        Self {
            id,
            sites,
            links,
            cpus: BTreeMap::new(),
            probe_kernel: None,
            insecure: false,
            guests_reach: Vec::new(),
            bridges: Vec::new(),
            home_patience_s: None,
            fill_bytes_per_s: None,
            rent: Rent::default(),
        }
    }

    /// Site `home` with two hosts and site `cloud` with one.
    pub fn default_demo(id: LabId, rtt_ms: u32) -> Self {
        Self::new(id, Self::default_sites(), LinkSettings::of_rtt_us(u64::from(rtt_ms) * 1000))
    }

    /// # Panics
    /// Never: the names are valid constants.
    pub fn default_sites() -> Vec<SiteDef> {
        let site = |name: &str, hosts: &[&str]| SiteDef {
            name: SiteId::new(name).expect("a constant name"),
            hosts: hosts.iter().map(|h| HostId::new(*h).expect("a constant name")).collect(),
        };
        vec![site("home", &["home1", "home2"]), site("cloud", &["cloud1"])]
    }

    /// # Errors
    /// `Invalid` when a name is used twice or reserved, when there are no hosts or too many, or when a host is to run on CPUs that this
    /// process may not use.
    pub fn check(&self) -> Result<(), Problem> {
        let refuse =
            |why: String| Err(Problem::invalid(format!("can't make lab {}", self.id), why));
        let mut hosts: Vec<&HostId> = self.hosts().map(|(_, host)| host).collect();
        let mut sites: Vec<&SiteId> = self.sites.iter().map(|s| &s.name).collect();
        if hosts.is_empty() || self.sites.iter().any(|s| s.hosts.is_empty()) {
            return refuse("every site needs a host".to_owned());
        }
        if hosts.len() > HOSTS_MAX {
            return refuse(format!("it has {} hosts; the limit is {HOSTS_MAX}", hosts.len()));
        }
        for host in &hosts {
            let taken = ["site-", "rent-"];
            if host.as_str() == "ctl" || taken.iter().any(|name| host.as_str().starts_with(name)) {
                return refuse(format!("a host cannot be called {host}: the lab uses that name"));
            }
        }
        if sites.len() > SITES_MAX {
            return refuse(format!("it has {} sites; the limit is {SITES_MAX}", sites.len()));
        }
        hosts.sort();
        sites.sort();
        if let Some(pair) = hosts.windows(2).find(|p| p[0] == p[1]) {
            return refuse(format!("host {} is named twice", pair[0]));
        }
        if let Some(pair) = sites.windows(2).find(|p| p[0] == p[1]) {
            return refuse(format!("site {} is named twice", pair[0]));
        }
        if let Some(zone) = self.rent.zones.iter().find(|zone| !sites.contains(zone)) {
            return refuse(format!("hosts are for rent at site {zone}, which the lab has not"));
        }
        self.check_cpus().or_else(refuse)
    }

    fn check_cpus(&self) -> Result<(), String> {
        let there = own_cpus();
        for (host, cpus) in &self.cpus {
            if self.hosts().all(|(_, known)| known != host) {
                return Err(format!("it gives CPUs to host {host}, which no site has"));
            }
            if cpus.is_empty() {
                return Err(format!(
                    "host {host} has an empty list of CPUs; without a list it has all"
                ));
            }
            if let Some(cpu) = cpus.iter().find(|cpu| !there.contains(cpu)) {
                let there: Vec<String> = there.iter().map(ToString::to_string).collect();
                let there = there.join(", ");
                return Err(format!(
                    "host {host} is to run on CPU {cpu}; the CPUs here are {there}"
                ));
            }
        }
        Ok(())
    }

    /// The CPUs on which a host runs, as `taskset --cpu-list` takes them; `None`: all.
    pub fn cpu_list(&self, host: &HostId) -> Option<String> {
        let cpus: Vec<String> = self.cpus.get(host)?.iter().map(ToString::to_string).collect();
        Some(cpus.join(","))
    }

    /// All hosts with their sites, in the definition's order.
    pub fn hosts(&self) -> impl Iterator<Item = (&SiteId, &HostId)> {
        self.sites.iter().flat_map(|s| s.hosts.iter().map(move |h| (&s.name, h)))
    }

    /// The network namespace of a host's daemons and VMs.
    pub fn host_namespace(&self, host: &HostId) -> String {
        format!("pg-{}-{host}", self.id)
    }

    /// The network namespace of a site's bridge and of its end of the WAN.
    pub fn site_namespace(&self, site: &SiteId) -> String {
        format!("pg-{}-site-{site}", self.id)
    }

    /// The network namespace of the controller.
    pub fn controller_namespace(&self) -> String {
        format!("pg-{}-ctl", self.id)
    }

    /// The host's address in the lab's network; `None` for a host of another lab.
    pub fn host_address(&self, host: &HostId) -> Option<Ipv4Addr> {
        let index = self.hosts().position(|(_, h)| h == host)?;
        Some(self.address(FIRST_HOST_NUMBER + u8::try_from(index).ok()?))
    }

    /// The network namespace of a rented instance.
    pub fn rented_namespace(&self, instance: &str) -> String {
        format!("pg-{}-rent-{instance}", self.id)
    }

    /// The addresses of rented hosts, each with its last number.
    pub fn rented_addresses(&self) -> impl Iterator<Item = (u8, Ipv4Addr)> {
        RENTED_NUMBERS.map(|number| (number, self.address(number)))
    }

    /// As [`Definition::vm_uids`], of the rented host with this last number of its address.
    pub fn rented_vm_uids(&self, number: u8) -> String {
        uids(usize::from(number.saturating_sub(FIRST_HOST_NUMBER)))
    }

    /// The users of a host's VMs: no other host of the lab has them.
    pub fn vm_uids(&self, host: &HostId) -> String {
        let index = self.hosts().position(|(_, h)| h == host).unwrap_or_default();
        uids(index)
    }

    /// The controller's address in the lab's network.
    pub fn controller_address(&self) -> Ipv4Addr {
        self.address(CONTROLLER_NUMBER)
    }

    /// All sites share one subnet, which is derived from the lab's id.
    fn address(&self, number: u8) -> Ipv4Addr {
        let [high, low] = self.id.0.to_be_bytes();
        Ipv4Addr::new(10, high, low, number)
    }

    /// # Errors
    /// `NotFound` when the lab has no such link.
    pub fn link(&self, one: &SiteId, other: &SiteId) -> Result<&Link, Problem> {
        find_link(&self.links, one, other).map(|index| &self.links[index])
    }

    /// The name of the network card that leads to the site `to`: `wan0` leads to the first site.
    pub fn wan_device(&self, to: &SiteId) -> String {
        let index = self.sites.iter().position(|s| &s.name == to);
        format!("wan{}", index.unwrap_or(self.sites.len()))
    }
}

fn uids(host: usize) -> String {
    let first = FIRST_VM_UID + host * VM_UIDS_PER_HOST;
    format!("{first}-{}", first + VM_UIDS_PER_HOST - 1)
}

/// The index of the link between two sites.
///
/// # Errors
/// `NotFound`, which lists the links of the lab.
pub fn find_link(links: &[Link], one: &SiteId, other: &SiteId) -> Result<usize, Problem> {
    links.iter().position(|link| link.joins(one, other)).ok_or_else(|| {
        let there: Vec<String> = links.iter().map(ToString::to_string).collect();
        let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
        Problem::not_found(
            format!("can't find the link {one}-{other}"),
            format!("the lab has no such link; its links: {there}"),
        )
    })
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
    fn the_vms_of_a_large_lab_do_not_have_the_user_of_qemu_img() {
        let mut lab = demo();
        let name = |number: usize| HostId::new(format!("h{number}")).expect("a name");
        // The other site has one more.
        lab.sites[0].hosts = (1..HOSTS_MAX).map(name).collect();
        let uids = |host: &HostId| -> Vec<u64> {
            let range = lab.vm_uids(host);
            range.split('-').map(|uid| uid.parse().expect("a number")).collect()
        };
        let mut last = 1_900_065_536;
        for (_, host) in lab.hosts() {
            let range = uids(host);
            assert!(last < range[0] && range[0] < range[1], "{host}: {range:?} after {last}");
            last = range[1];
        }
        for (number, address) in lab.rented_addresses() {
            let range = lab.rented_vm_uids(number);
            let first: u64 =
                range.split('-').next().and_then(|uid| uid.parse().ok()).expect("a uid");
            assert!(first > last, "{range} of {address} are a host's");
            last = first;
        }
        assert_eq!(lab.rented_addresses().count(), crate::rent::INSTANCES_MAX);
    }

    #[test]
    fn names_used_twice_or_by_the_lab_are_refused() {
        assert!(demo().check().is_ok());
        for name in ["home1", "ctl", "site-home", "rent-i-1"] {
            let mut lab = demo();
            lab.sites[1].hosts.push(HostId::new(name).expect("a name"));
            assert!(lab.check().is_err(), "{name} must be refused");
        }
    }

    #[test]
    fn a_host_runs_on_the_cpus_that_it_is_given_and_only_on_those_that_are_there() {
        let host = |name: &str| HostId::new(name).expect("a name");
        let first = *own_cpus().first().expect("this test runs on a CPU");
        let of = |name: &str, cpus: &[usize]| {
            let mut lab = demo();
            lab.cpus.insert(host(name), cpus.to_vec());
            lab
        };
        let lab = of("home1", &[first]);
        assert!(lab.check().is_ok());
        assert_eq!(lab.cpu_list(&host("home1")), Some(first.to_string()));
        assert_eq!(lab.cpu_list(&host("home2")), None);
        for (lab, why) in [
            (of("home1", &[first, 4711]), "CPU 4711; the CPUs here are "),
            (of("home1", &[]), "empty list"),
            (of("home9", &[first]), "home9, which no site has"),
        ] {
            let refused = lab.check().expect_err(why);
            assert!(refused.why.contains(why), "{refused}");
        }
    }

    #[test]
    fn every_pair_of_sites_has_a_link_and_a_device_at_each_end() {
        let name = |text: &str| SiteId::new(text).expect("a name");
        let mut sites = Definition::default_sites();
        sites.push(SiteDef {
            name: name("edge"),
            hosts: vec![HostId::new("edge1").expect("a name")],
        });
        let lab = Definition::new(LabId::random(), sites, LinkSettings::of_rtt_us(1000));
        let links: Vec<String> = lab.links.iter().map(ToString::to_string).collect();
        assert_eq!(links, ["home-cloud", "home-edge", "cloud-edge"]);
        assert_eq!(
            lab.link(&name("edge"), &name("home")).expect("either way round"),
            &lab.links[1]
        );
        assert!(lab.link(&name("home"), &name("home")).is_err());
        let refused = lab.link(&name("home"), &name("moon")).expect_err("no such site");
        assert!(refused.why.contains("cloud-edge"), "{refused}");
        assert_eq!(lab.wan_device(&name("home")), "wan0");
        assert_eq!(lab.wan_device(&name("edge")), "wan2");
    }
}
