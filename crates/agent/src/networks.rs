//! Networks of tenants at this host: makes what the controller wants ([`HostNetworks`]), and keeps it.
//!
//! One pass ([`Networks::bring_about`]) compares what is wanted with what the kernel has, and changes what differs. It runs
//! when the controller says something new, when a VM starts, and every few seconds. So what somebody has removed
//! is there again soon, and the host's report says so. Nothing is made at a host that has no part in a network.
//!
//! What was wanted last is in a file: a host that boots without its controller has its networks.
//!
//! | what | file |
//! |---|---|
//! | the names in the kernel | `names.rs` |
//! | bridges, VXLAN, and where frames go | `plan.rs` |
//! | the packet filter | `rules.rs` |
//! | WireGuard between hosts | `tunnel.rs` |
//! | DHCP, names, and the way out | `gateway.rs` |

mod gateway;
mod names;
mod plan;
mod rules;
mod tap;
#[cfg(test)]
mod tests;
mod tools;
mod tunnel;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use perigee_model::network::{Card, HostNetwork, HostNetworks, TunnelEnd};
use perigee_model::vm::VmStatus;
use perigee_model::{HostId, Problem, VmId};
use tokio::sync::Notify;
use tokio::time::Instant;

use self::gateway::Running;
use self::names::Tag;
use self::plan::{Gateway, Segment, There};
use self::rules::Tap;
use self::tools::{batch, list, run};
use self::tunnel::Tunnel;
use crate::files::{read_json, write_json};
use crate::host::Host;
use crate::vms::Vms;

const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// For how long the host's report says what was mended.
const MENDED_FOR: Duration = Duration::from_secs(3600);
/// As many things that were mended are said.
const MENDED_MAX: usize = 8;

pub struct Networks {
    tag: Tag,
    host: HostId,
    dir: PathBuf,
    /// What other hosts need to know for tunnels; an error says why VMs here are in no tenant's network.
    pub end: Result<TunnelEnd, String>,
    wanted: Mutex<HostNetworks>,
    /// Whoever changes the kernel's state takes turns.
    turn: tokio::sync::Mutex<Made>,
    now: Notify,
    said: Mutex<Said>,
}

impl std::fmt::Debug for Networks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Networks").field("end", &self.end).finish_non_exhaustive()
    }
}

/// What was made, as far as the kernel does not say it.
#[derive(Default)]
struct Made {
    cards: BTreeMap<VmId, Card>,
    /// Nothing is wanted, and nothing is left of earlier.
    is_idle: bool,
    rules: String,
    /// The rules as the kernel lists them.
    listed: String,
    tunnel: Tunnel,
    gateways: BTreeMap<u16, Running>,
    /// Interfaces that were there after the last pass.
    interfaces: BTreeSet<String>,
}

#[derive(Default)]
struct Said {
    trouble: Option<String>,
    mended: Vec<(Instant, String)>,
}

/// Which cards are connected here.
pub enum Cards<'a> {
    /// Those of these VMs.
    Of(&'a Vms),
    /// Those of before, and this one.
    And(&'a VmId, &'a Card),
    /// Those of before.
    #[cfg(test)]
    Those,
}

impl Networks {
    /// Makes the host's key, and reads what was wanted last.
    pub async fn prepare(state: &Path, host: &HostId, ip: &str, is_root: bool) -> Self {
        let dir = state.join("networks");
        let tag = Tag::new(host, state);
        let mut end = Err("the agent is not root".to_owned());
        let mut wanted = HostNetworks::default();
        if is_root {
            end = match make_directory(&dir) {
                Ok(()) => tunnel::prepare(&dir, ip).await,
                Err(error) => Err(format!("can't make {}: {error}", dir.display())),
            };
            match read_json(&dir.join("wanted.json")) {
                Ok(read) => wanted = read.unwrap_or_default(),
                // The controller says it again.
                Err(problem) => tracing::warn!(%problem, "which networks are here is not known"),
            }
        }
        Self {
            tag,
            host: host.clone(),
            dir,
            end,
            wanted: Mutex::new(wanted),
            turn: tokio::sync::Mutex::default(),
            now: Notify::new(),
            said: Mutex::default(),
        }
    }

    /// Takes what the controller wants, and brings it about.
    ///
    /// # Errors
    /// What could not be done. It is tried again.
    pub async fn take(&self, wanted: HostNetworks, vms: &Vms) -> Result<(), Problem> {
        let what = "can't set up the networks of this host";
        let is_nothing = wanted.networks.is_empty();
        if let (Err(why), false) = (&self.end, is_nothing) {
            return Err(Problem::unsupported(what, why));
        }
        if self.end.is_err() {
            return Ok(());
        }
        if !self.store(wanted)? {
            return Ok(());
        }
        self.pass(Cards::Of(vms)).await.map_err(|why| Problem::unavailable(what, why))
    }

    /// Keeps what is wanted from now on, also over a restart; `false` if something newer is known.
    fn store(&self, wanted: HostNetworks) -> Result<bool, Problem> {
        wanted.peers.iter().try_for_each(|peer| peer.end.check())?;
        let mut known = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        if wanted.made_ms < known.made_ms {
            return Ok(false);
        }
        let said = |wanted: &HostNetworks| HostNetworks { made_ms: 0, ..wanted.clone() };
        let is_new = said(&known) != said(&wanted);
        *known = wanted;
        if is_new {
            write_json(&self.dir.join("wanted.json"), &*known)?;
        }
        Ok(true)
    }

    /// Makes a VM's card, and connects it to its network.
    ///
    /// # Errors
    /// `Unsupported` if this host can't; `Unavailable` if it can't now.
    pub async fn connect(&self, vm: &VmId, card: &Card) -> Result<OwnedFd, Problem> {
        let what = || format!("can't connect the network card of the VM {vm}");
        if let Err(why) = &self.end {
            return Err(Problem::unsupported(what(), why));
        }
        let name = self.tag.tap(card);
        let tap = tap::make(&name).map_err(|error| Problem::unavailable(what(), error))?;
        let passed = self.pass(Cards::And(vm, card)).await;
        let links: Vec<plan::Link> =
            list("ip", &["-json", "-details", "link", "show", "dev", &name])
                .await
                .map_err(|why| Problem::unavailable(what(), why))?;
        let bridge = self.tag.bridge(card.vni);
        if links.first().is_some_and(|link| link.master.as_deref() == Some(&bridge)) {
            return Ok(tap);
        }
        let why = passed.err().unwrap_or_else(|| "it is not on its bridge".to_owned());
        Err(Problem::unavailable(what(), why))
    }

    /// What is wrong, and what was mended in the last hour.
    pub fn warnings(&self) -> Vec<String> {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        said.mended.retain(|(at, _)| at.elapsed() < MENDED_FOR);
        let cannot = self.end.as_ref().err();
        let cannot = cannot.map(|why| format!("VMs here can't be in tenants' networks: {why}"));
        let mended = said.mended.iter().map(|(_, text)| text.clone());
        cannot.into_iter().chain(said.trouble.clone()).chain(mended).collect()
    }

    fn mended(&self, text: String) {
        tracing::warn!("{text}");
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        said.mended.retain(|(_, other)| *other != text);
        said.mended.push((Instant::now(), text));
        if said.mended.len() > MENDED_MAX {
            said.mended.remove(0);
        }
    }

    /// Compares what is wanted with what is there, and mends it.
    async fn pass(&self, cards: Cards<'_>) -> Result<(), String> {
        let mut made = self.turn.lock().await;
        match cards {
            Cards::Of(vms) => made.cards = cards_of(vms),
            Cards::And(vm, card) => drop(made.cards.insert(vm.clone(), card.clone())),
            #[cfg(test)]
            Cards::Those => {}
        }
        let wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let is_nothing = wanted.networks.is_empty() && made.cards.is_empty();
        if is_nothing && made.is_idle {
            return Ok(());
        }
        let result = self.bring_about(&mut made, &wanted).await;
        made.is_idle = is_nothing && result.is_ok();
        let trouble =
            result.as_ref().err().map(|why| format!("a tenant's network is not right: {why}"));
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.trouble != trouble
            && let Some(trouble) = &trouble
        {
            tracing::warn!("{trouble}");
        }
        said.trouble = trouble;
        result
    }

    async fn bring_about(&self, made: &mut Made, wanted: &HostNetworks) -> Result<(), String> {
        let tag = &self.tag;
        let segments = segments(tag, &self.host, wanted, &made.cards);
        let mut there = observe().await?;
        // What fails is said at the end; the rest is done all the same.
        let mut troubles = Vec::new();
        self.note_what_is_gone(made, &there);
        // Without the filter nothing is connected.
        self.filter(made, &segments, wanted).await?;
        let name = tag.tunnel();
        if let (Some(_), Ok(end)) = (wanted.address, &self.end) {
            let known = there.link(&name).is_some();
            let tunnel = made.tunnel.bring_about(&name, known, wanted, end, &self.dir).await;
            troubles.extend(tunnel.err());
        } else if there.link(&name).is_some() {
            troubles.extend(run("ip", &["link", "delete", "dev", &name], "").await.err());
            made.tunnel = Tunnel::default();
        }
        let lines = plan::links(tag, &segments, &there);
        let mut is_changed = !lines.is_empty();
        troubles.extend(batch("ip", &lines).await.err());
        let gateways = self.keep_gateways(made, wanted, &segments, &there).await;
        is_changed |= *gateways.as_ref().unwrap_or(&true);
        troubles.extend(gateways.err());
        if is_changed {
            there = observe().await?;
            // A cable to a new gateway is connected now.
            troubles.extend(batch("ip", &plan::links(tag, &segments, &there)).await.err());
        }
        let entries = plan::entries(tag, &segments, &there);
        troubles.extend(batch("bridge", &entries).await.err());
        let neighbours = plan::neighbours(tag, &segments, &there);
        troubles.extend(batch("ip", &neighbours).await.err());
        if is_changed {
            there = observe().await?;
        }
        for tap in segments.iter().flat_map(|segment| &segment.taps) {
            if there.link(&tap.name).is_none() {
                let vm = made.cards.iter().find(|(_, card)| tag.tap(card) == tap.name);
                let vm = vm.map(|(vm, _)| vm.to_string()).unwrap_or_default();
                troubles.push(format!(
                    "the card of VM {vm} ({}) was removed: move the VM, or start it again",
                    tap.name
                ));
            }
        }
        let own = there.links.iter().map(|link| link.ifname.clone());
        made.interfaces = own.filter(|name| tag.is_own(name)).collect();
        match troubles.is_empty() {
            true => Ok(()),
            false => Err(troubles.join("; ")),
        }
    }

    /// Says which interfaces somebody has removed that are made again now.
    fn note_what_is_gone(&self, made: &Made, there: &There) {
        for name in &made.interfaces {
            // A card is gone with its QEMU, and cannot be made again.
            if there.link(name).is_none() && !name.starts_with("pt") {
                self.mended(format!(
                    "the interface {name} of tenants' networks was removed: the agent makes it again"
                ));
            }
        }
    }

    /// Loads the packet filter if it is to be another one, or if it is not as it was.
    async fn filter(
        &self,
        made: &mut Made,
        segments: &[Segment],
        wanted: &HostNetworks,
    ) -> Result<(), String> {
        let table = self.tag.table();
        if segments.is_empty() {
            for family in ["bridge", "inet"] {
                // One that is not there cannot be deleted, so it is made first.
                let rules = format!("table {family} {table}\ndelete table {family} {table}\n");
                run("nft", &["-f", "-"], &rules).await?;
            }
            (made.rules, made.listed) = Default::default();
            return Ok(());
        }
        let taps: Vec<Tap> = segments.iter().flat_map(|segment| segment.taps.clone()).collect();
        let mut peers = rules::Peers::new();
        for segment in segments {
            for host in segment.hosts() {
                peers.entry(host).or_default().insert(segment.vni);
            }
        }
        let rules = rules::of_host(&self.tag, &taps, &peers, &wanted.hosts);
        let is_same = rules == made.rules;
        if is_same && self.listed().await.is_ok_and(|listed| listed == made.listed) {
            return Ok(());
        }
        if is_same {
            self.mended(format!(
                "somebody has changed the packet filter of tenants' networks (nftables, {table}): the agent has set it \
                 up again"
            ));
        }
        run("nft", &["-f", "-"], &rules).await?;
        made.rules = rules;
        made.listed = self.listed().await?;
        Ok(())
    }

    async fn listed(&self) -> Result<String, String> {
        let table = self.tag.table();
        let bridge = run("nft", &["-s", "list", "table", "bridge", &table], "").await?;
        Ok(bridge + &run("nft", &["-s", "list", "table", "inet", &table], "").await?)
    }

    /// Starts the gateways that are to be here, and ends the others. Returns whether something has changed.
    async fn keep_gateways(
        &self,
        made: &mut Made,
        wanted: &HostNetworks,
        segments: &[Segment],
        there: &There,
    ) -> Result<bool, String> {
        let (tag, dir) = (&self.tag, &self.dir);
        let is_here = |vni| segments.iter().any(|s| s.vni == vni && s.gateway == Gateway::Here);
        let mut is_changed = false;
        let left = gateway::left(dir).into_iter().chain(made.gateways.keys().copied());
        for vni in left.filter(|vni| !is_here(*vni)).collect::<BTreeSet<u16>>() {
            gateway::end(tag, dir, vni, made.gateways.remove(&vni)).await?;
            is_changed = true;
        }
        for network in wanted.networks.iter().filter(|network| is_here(network.vni)) {
            let vni = network.vni;
            if !made.gateways.contains_key(&vni)
                && let Some(running) = gateway::adopt(dir, vni)?
            {
                made.gateways.insert(vni, running);
            }
            let known = made.gateways.get(&vni);
            let has_cable = there.link(&tag.gateway(vni)).is_some()
                && (!network.nat || there.link(&tag.uplink(vni)).is_some());
            if gateway::runs(known) && has_cable {
                if let Some(running) = made.gateways.get_mut(&vni) {
                    gateway::update(running, dir, network)?;
                }
                continue;
            }
            if known.is_some() {
                self.mended(format!(
                    "the gateway of network {} (dnsmasq) was ended: the agent has started it again",
                    network.name
                ));
            }
            if let Some(old) = made.gateways.remove(&vni) {
                gateway::end(tag, dir, vni, Some(old)).await?;
            }
            made.gateways.insert(vni, gateway::start(tag, dir, network).await?);
            is_changed = true;
        }
        Ok(is_changed)
    }
}

fn make_directory(dir: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    // The gateways' user finds its own directories in it.
    match nix::unistd::User::from_name("nobody") {
        Ok(Some(user)) => gateway::give(dir, user.gid, 0o710),
        _ => Ok(()),
    }
}

/// Brings about what is wanted now and then. It does not end.
pub async fn keep(host: Arc<Host>, vms: Arc<Vms>) {
    if host.networks.end.is_err() {
        return std::future::pending().await;
    }
    loop {
        // It is said in the host's report.
        let _ = host.networks.pass(Cards::Of(&vms)).await;
        tokio::select! {
            () = host.networks.now.notified() => {}
            () = tokio::time::sleep(LOOK_AGAIN) => {}
        }
    }
}

/// The cards of the VMs that have a QEMU here.
fn cards_of(vms: &Vms) -> BTreeMap<VmId, Card> {
    let here = vms.list().into_iter().filter(|vm| vm.status() != VmStatus::Gone);
    here.filter_map(|vm| Some((vm.id().clone(), vm.spec.network.card()?.clone()))).collect()
}

async fn observe() -> Result<There, String> {
    let (links, entries, neighbours) = tokio::try_join!(
        list("ip", &["-json", "-details", "link", "show"]),
        list("bridge", &["-json", "fdb", "show"]),
        list("ip", &["-json", "neighbour", "show", "nud", "permanent"]),
    )?;
    Ok(There { links, entries, neighbours })
}

/// The networks with a part at this host: those that the controller has named, and those of the cards that are here.
fn segments(
    tag: &Tag,
    host: &HostId,
    wanted: &HostNetworks,
    cards: &BTreeMap<VmId, Card>,
) -> Vec<Segment> {
    let mut all: BTreeMap<u16, Segment> = BTreeMap::new();
    let address_of = |other: &HostId| {
        wanted.peers.iter().find(|peer| peer.host == *other).map(|peer| peer.address)
    };
    for HostNetwork { vni, subnet, mtu, gateway, members, .. } in &wanted.networks {
        let segment = all.entry(*vni).or_insert_with(|| Segment {
            vni: *vni,
            subnet: *subnet,
            mtu: *mtu,
            tunnel: wanted.address,
            taps: Vec::new(),
            others: BTreeMap::new(),
            gateway: Gateway::Nowhere,
        });
        segment.gateway = match gateway {
            Some(at) if at == host => Gateway::Here,
            Some(at) => address_of(at).map_or(Gateway::Nowhere, Gateway::At),
            None => Gateway::Nowhere,
        };
        let away = members.iter().filter(|member| member.host.as_ref() != Some(host));
        let away =
            away.filter_map(|member| Some((member.address, address_of(member.host.as_ref()?)?)));
        segment.others = away.collect();
    }
    for card in cards.values() {
        // A number may be another network's by now. Then the card of before is connected to nothing.
        let named = wanted.networks.iter().find(|network| network.vni == card.vni);
        if named.is_some_and(|named| named.name != card.network || named.subnet != card.subnet) {
            continue;
        }
        let segment = all.entry(card.vni).or_insert_with(|| Segment {
            vni: card.vni,
            subnet: card.subnet,
            mtu: card.mtu,
            tunnel: wanted.address,
            taps: Vec::new(),
            others: BTreeMap::new(),
            gateway: Gateway::Nowhere,
        });
        let (name, mac) = (tag.tap(card), card.mac());
        segment.taps.push(Tap { name, vni: card.vni, mac, address: card.address });
    }
    all.into_values().collect()
}
