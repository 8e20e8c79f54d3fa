//! The user networks of this host's VMs. A card in a user network is connected to a `passt` of its own, which makes the guest's
//! connections as connections of this host. A `passt` is a process of the VM's user, and ends when the VM's QEMU does: the
//! socket between them closes. When it ends before, it is started again (`vm/network/keep.rs`).
//!
//! Nothing here knows VMs: `vm/network.rs` connects a VM's card, and `upkeep/user_networks.rs` looks after the filter.
//!
//! **What a guest reaches.** Public addresses, and those that the operator allows ([`GuestsReach`]): neither this host nor the
//! cluster's others, no private and no link-local addresses. (A cloud's metadata service at 169.254.169.254 tells whoever asks
//! the host's keys.) A guest can send to any address, so the kernel's packet filter keeps it from these. All `passt` have a group
//! of their own, and the filter's rules are for this group. It also limits the connections of each VM: they are its host's.
//! Without the filter no VM gets a card, and none before the controller has said the addresses of the cluster's hosts. Whoever sets the
//! host's firewall up anew may flush it, so it is looked at while VMs with cards run.
//!
//! **Who reaches a guest.** Nobody, but for the answers to what it sends ([`ports`]): `passt` has UDP sockets that take everything,
//! and the filter drops what comes to them from strangers.
//!
//! **Names.** A guest reaches port 53 of its host's resolvers, wherever they are. `passt` knows those that the host had when the
//! guest started, so these stay allowed while VMs with cards run.

mod passt;
mod ports;
mod rules;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::fcntl::Flock;
use nix::unistd::Gid;

use self::passt::PASST;
use self::rules::{rules, table};
use crate::files::{read_json, write_json};
use crate::networks::tools::{only_one, run};
use crate::networks::{doors, tunnel};
use crate::programs;
use crate::users::VmUids;

/// How often the filter is looked at while it is needed.
pub const LOOK_AT_FILTER: Duration = Duration::from_secs(2);
const RESOLVERS: &str = "/etc/resolv.conf";
/// In the agent's directory: the resolvers that guests may know.
const KNOWN_RESOLVERS: &str = "resolvers.json";
/// As many of them.
const RESOLVERS_MAX: usize = 16;

/// Addresses that VMs in user networks reach beside those of the internet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestsReach {
    address: Ipv4Addr,
    prefix_bits: u8,
}

impl FromStr for GuestsReach {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not ADDRESS or ADDRESS/BITS, for example 10.1.0.0/16");
        let (address, bits) = text.split_once('/').unwrap_or((text, "32"));
        let address: Ipv4Addr = address.parse().map_err(|_| wrong())?;
        let prefix_bits: u8 = bits.parse().ok().filter(|bits| *bits <= 32).ok_or_else(wrong)?;
        let host_bits = u32::MAX.checked_shr(prefix_bits.into()).unwrap_or(0);
        if u32::from(address) & host_bits != 0 {
            return Err(format!("{text:?} is not a network: its last bits are not 0"));
        }
        Ok(Self { address, prefix_bits })
    }
}

impl GuestsReach {
    fn has(self, ip: Ipv4Addr) -> bool {
        let host_bits = u32::MAX.checked_shr(self.prefix_bits.into()).unwrap_or(0);
        u32::from(ip) & !host_bits == u32::from(self.address)
    }
}

/// Whether guests reach this address at most where the operator allows it, whoever has it.
pub fn is_private(ip: Ipv4Addr) -> bool {
    let networks = rules::NEVER.split(", ").chain(rules::PRIVATE.split(", "));
    networks.filter_map(|text| text.parse().ok()).any(|network: GuestsReach| network.has(ip))
}

/// The user networks of this host.
#[derive(Debug)]
pub struct UserNetworks {
    /// The group of all `passt`; `None` if the agent is not root.
    group: Option<Gid>,
    uids: VmUids,
    reach: Vec<GuestsReach>,
    state: PathBuf,
    /// The cgroup of all `passt`; an error says why VMs here have no network cards.
    cards: Mutex<Result<PathBuf, String>>,
    /// Of the agents in one network namespace with the same users the one that has this keeps the filter.
    alone: Mutex<Option<Flock<File>>>,
    resolvers: Mutex<BTreeSet<Ipv4Addr>>,
    loaded: tokio::sync::Mutex<Loaded>,
    /// What has last happened to the filter, for people.
    trouble: Mutex<Option<String>>,
}

/// The filter as it was loaded, and as the kernel lists it.
#[derive(Debug, Default)]
struct Loaded {
    rules: String,
    listed: String,
}

impl UserNetworks {
    /// Sets up the packet filter. What is missing is looked for again later.
    pub async fn prepare(
        is_root: bool,
        uids: VmUids,
        reach: Vec<GuestsReach>,
        state: &Path,
        hosts: Option<&[IpAddr]>,
    ) -> Self {
        let networks = Self::new(is_root.then(|| uids.group()), uids, reach, state);
        networks.look_again(hosts).await;
        networks
    }

    fn new(group: Option<Gid>, uids: VmUids, reach: Vec<GuestsReach>, state: &Path) -> Self {
        let known = read_json(&state.join(KNOWN_RESOLVERS)).unwrap_or_default();
        Self {
            group,
            uids,
            reach,
            state: state.to_owned(),
            cards: Mutex::new(Err("the agent has not looked yet".to_owned())),
            alone: Mutex::default(),
            resolvers: Mutex::new(known.unwrap_or_default()),
            loaded: Default::default(),
            trouble: Mutex::default(),
        }
    }

    /// Whether this host could have user networks: its agent is root.
    pub fn are_possible(&self) -> bool {
        self.group.is_some()
    }

    /// The group of all `passt`.
    pub fn group(&self) -> Gid {
        self.uids.group()
    }

    /// Why VMs here have no network cards.
    pub fn cannot(&self) -> Option<String> {
        self.cards().err()
    }

    /// The cgroup of all `passt`.
    ///
    /// # Errors
    /// Why VMs here have no network cards.
    pub fn cards(&self) -> Result<PathBuf, String> {
        self.cards.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Finds out whether VMs here can have network cards.
    pub async fn look_again(&self, hosts: Option<&[IpAddr]>) {
        let found = self.find(hosts).await;
        *self.cards.lock().unwrap_or_else(PoisonError::into_inner) = found;
    }

    async fn find(&self, hosts: Option<&[IpAddr]>) -> Result<PathBuf, String> {
        self.group.ok_or("the agent is not root")?;
        if programs::which(PASST).is_none() {
            return Err("passt is not installed (package passt)".to_owned());
        }
        self.be_alone()?;
        let cards = ports::prepare()?;
        ports::reserve(tunnel::PORT);
        self.filter(hosts).await?;
        Ok(cards)
    }

    /// Two agents whose guests have the same group would load the same table, each with its own rules.
    pub fn be_alone(&self) -> Result<(), String> {
        let mut alone = self.alone.lock().unwrap_or_else(PoisonError::into_inner);
        if alone.is_none() {
            let own = only_one(&format!("guests-{}", self.uids.group()))?;
            *alone = Some(own.ok_or("another agent of this machine has the same users for its VMs: give each its own (--vm-uids)")?);
        }
        Ok(())
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

    /// The resolvers that guests may know: those of this host now, and those that it had while VMs with cards ran.
    fn resolvers(&self, now: Vec<Ipv4Addr>) -> Vec<Ipv4Addr> {
        let known = self.resolvers.lock().unwrap_or_else(PoisonError::into_inner);
        known.iter().copied().chain(now).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Notes which resolvers this host has now. They are kept, also over a restart, for as long as VMs with cards run.
    pub fn remember_resolvers(&self, now: Vec<Ipv4Addr>, has_guests: bool) {
        let mut known = self.resolvers.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = if has_guests { known.clone() } else { BTreeSet::new() };
        if has_guests {
            next.extend(now.into_iter().take(RESOLVERS_MAX.saturating_sub(next.len())));
        }
        if *known != next {
            if let Err(problem) = write_json(&self.state.join(KNOWN_RESOLVERS), &next) {
                tracing::warn!(%problem, "after a restart of the agent guests may not reach their resolvers");
            }
            *known = next;
        }
    }

    /// Sets the filter up unless it is there. Returns whether somebody has changed it.
    pub async fn filter(&self, hosts: Option<&[IpAddr]>) -> Result<bool, String> {
        let group = self.uids.group();
        let table = table(group);
        let rules = rules(group, &self.resolvers(resolvers()), &self.reach, hosts);
        let list = async || run("nft", &["-s", "-t", "list", "table", "inet", &table], "").await;
        let mut loaded = self.loaded.lock().await;
        let was_there = !loaded.listed.is_empty();
        let is_there = was_there && list().await.is_ok_and(|listed| listed == loaded.listed);
        if is_there && loaded.rules == rules {
            return Ok(false);
        }
        // Those that guests have already: what the kernel knew of them may be gone.
        let used = if is_there { Ok(Default::default()) } else { doors::udp_of(self.uids) };
        let used: Vec<String> = used?.iter().map(ToString::to_string).collect();
        let used = match used.is_empty() {
            true => String::new(),
            false => format!("add element inet {table} used {{ {} }}\n", used.join(", ")),
        };
        run("nft", &["-f", "-"], &format!("{rules}{used}")).await?;
        *loaded = Loaded { rules, listed: list().await? };
        Ok(was_there && !is_there)
    }

    /// Sets the filter up again if somebody has removed it.
    pub async fn look_at_filter(&self, hosts: Option<&[IpAddr]>) {
        match self.filter(hosts).await {
            Ok(false) => {}
            Ok(true) => self.say(format!(
                "somebody has changed the packet filter of VMs' network cards (nftables, table inet {}): the agent has \
                 set it up again, and until then, for {} s at most, VMs with cards could reach this host's addresses",
                table(self.uids.group()),
                LOOK_AT_FILTER.as_secs()
            )),
            Err(why) => self.say(format!(
                "VMs with network cards may reach this host's addresses, because the agent can't set up the packet \
                 filter: {why}"
            )),
        }
    }
}

/// The addresses of this host's resolvers.
pub fn resolvers() -> Vec<Ipv4Addr> {
    resolvers_in(&std::fs::read_to_string(RESOLVERS).unwrap_or_default())
}

fn resolvers_in(text: &str) -> Vec<Ipv4Addr> {
    let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let named = lines.filter(|words| words.first() == Some(&"nameserver"));
    named.filter_map(|words| words.get(1)?.parse::<Ipv4Addr>().ok()).collect()
}
