//! One pass: what is wanted is compared with what the kernel has, and what differs is changed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::Duration;

use perigee_model::network::{HostNetwork, HostNetworks, mac};
use perigee_model::tenant::tenant_of;
use perigee_model::vm::FAILING_GATEWAYS_MAX;
use perigee_model::{HostId, VmId};
use tokio::time::{Instant, timeout};

use super::names::Tag;
use super::plan::{self, Gateway, Link, Segment, There};
use super::rules::{self, Door, OfHost, Tap};
use super::tools::{batch, list, run};
use super::tunnel::Tunnel;
use super::{
    CardHere, Cards, Failed, Made, Networks, TURN_MAX, connections_max, doors, forwarding,
    gang_traffic, gateway, tap,
};

/// A gateway that does not start is tried again after this time, and then after twice as long, up to the second.
const START_AGAIN: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(60)];

impl Networks {
    /// Compares what is wanted with what is there, and mends it.
    pub async fn pass(&self, cards: Cards<'_>) -> Result<(), String> {
        let turn = timeout(TURN_MAX, self.turn.lock()).await;
        let late =
            |_| format!("the host was busy with other networks for {} s", TURN_MAX.as_secs());
        let mut made = turn.map_err(late)?;
        match cards {
            Cards::Of(here, are_all_known) => {
                made.cards = here;
                made.cards_unknown = !are_all_known;
            }
            Cards::And(vm, card) => {
                let here = CardHere { card: card.clone(), at: None };
                made.cards.insert(vm.clone(), here);
            }
            #[cfg(test)]
            Cards::Those => {}
        }
        let wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let is_nothing = made.cards.is_empty()
            && wanted.as_ref().is_none_or(|wanted| wanted.networks.is_empty());
        // A host that never could have networks has nothing of them.
        if is_nothing && (made.is_idle || wanted.is_none() || self.tunnel().is_none()) {
            return Ok(());
        }
        let result = match &wanted {
            Some(wanted) => self.bring_about(&mut made, wanted).await,
            None => self.guard(&mut made).await,
        };
        made.is_idle = is_nothing && result.is_ok() && made.strange.is_empty();
        let trouble =
            result.as_ref().err().map(|why| format!("a tenant's network is not right: {why}"));
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.trouble != trouble
            && let Some(trouble) = &trouble
        {
            tracing::warn!("{trouble}");
        }
        said.trouble = trouble;
        // One that runs and can't be told something new is no reason to end what goes through it.
        let failing = made.failed.keys().filter(|vni| !gateway::runs(made.gateways.get(*vni)));
        said.failing_gateways = failing.take(FAILING_GATEWAYS_MAX).copied().collect();
        said.carried_by_others.clone_from(&made.carried_by_others);
        said.no_resolvers.clone_from(&made.no_resolvers);
        result
    }

    /// While it is not known what is wanted, all stays as an earlier agent has made it. But no card is without its filter.
    async fn guard(&self, made: &mut Made) -> Result<(), String> {
        if self.listed().await.is_err() {
            let wanted = HostNetworks::default();
            let segments = segments(&self.tag, &self.host, &wanted, &made.cards);
            self.filter(made, &segments, &wanted, (&[], false)).await?;
        }
        Err("which networks are here is not known until the controller says it".to_owned())
    }

    async fn bring_about(&self, made: &mut Made, wanted: &HostNetworks) -> Result<(), String> {
        let tag = &self.tag;
        let mut segments = segments(tag, &self.host, wanted, &made.cards);
        // A gateway that is at another host now answers nobody here, also where there can't be a filter. What fails is said at the end;
        // the rest is done all the same.
        let (mut is_changed, mut troubles) = self.end_gateways(made, &segments).await;
        let mut there = observe().await?;
        if made.cards_unknown {
            add_unknown(tag, &mut segments, &there);
        }
        self.note_what_is_gone(made, &there);
        let has_way_out = wanted
            .networks
            .iter()
            .any(|network| network.nat && has_gateway(&segments, network.vni));
        made.no_resolvers = if has_way_out { gateway::no_resolvers() } else { None };
        let (doors, taken) =
            doors::of(wanted, &segments, made.doors.as_deref(), || doors::taken(self.vm_uids));
        troubles.extend(taken);
        let own_forwarding = forwarding::is_own(&self.dir, has_way_out);
        let forwards = own_forwarding.as_ref().is_ok_and(|own| *own);
        // Without the filter nothing is connected.
        self.filter(made, &segments, wanted, (&doors, forwards)).await?;
        self.count_talk(made, wanted).await;
        let before = made.doors.replace(doors);
        let forwarding =
            own_forwarding.and_then(|own| forwarding::bring_about(&self.dir, has_way_out, own));
        troubles.extend(forwarding.err());
        if !made.cards_unknown {
            let removed = tap::remove_strange(tag, &segments, &there, &mut made.strange);
            troubles.extend(removed.await.err());
        }
        troubles.extend(self.keep_tunnel(made, wanted, &there).await);
        let lines = plan::links(tag, &segments, &there);
        is_changed |= !lines.is_empty();
        troubles.extend(batch("ip", &lines).await.err());
        let (gateways_changed, failed) = self.keep_gateways(made, wanted, &segments, &there).await;
        is_changed |= gateways_changed;
        troubles.extend(failed);
        // The filters lead to where they should now, and what has begun before still goes the old way.
        made.leads |= before != made.doors;
        troubles.extend(lead_anew(made).await);
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
            made.carried_by_others = carried_by_others().await;
        }
        troubles.extend(self.missing_cards(made, &segments, &there));
        let own = there.links.iter().map(|link| link.ifname.clone());
        made.interfaces = own.filter(|name| tag.is_own(name)).collect();
        match troubles.is_empty() {
            true => Ok(()),
            false => Err(troubles.join("; ")),
        }
    }

    /// Makes or removes this host's end of the tunnels between hosts. Returns what is wrong.
    async fn keep_tunnel(
        &self,
        made: &mut Made,
        wanted: &HostNetworks,
        there: &There,
    ) -> Option<String> {
        let name = self.tag.tunnel();
        let is_there = there.link(&name).is_some();
        match (wanted.address, self.tunnel()) {
            (Some(_), Some(end)) => {
                let tunnel = made.tunnel.bring_about(&name, is_there, wanted, &end, &self.dir);
                tunnel.await.err()
            }
            // What this host's end is can't be found out now, and what an earlier agent has set up goes on.
            (Some(_), None) => None,
            (None, _) if is_there => {
                let deleted = run("ip", &["link", "delete", "dev", &name], "").await;
                made.tunnel = Tunnel::default();
                deleted.err()
            }
            (None, _) => None,
        }
    }

    /// The VMs whose cards somebody has removed: a card can't be made again for a QEMU that runs.
    fn missing_cards(&self, made: &Made, segments: &[Segment], there: &There) -> Vec<String> {
        let taps = segments.iter().flat_map(|segment| &segment.taps);
        let missing = taps.filter(|tap| there.link(&tap.name).is_none());
        let line = |tap: &Tap| {
            let vm = made.cards.iter().find(|(_, here)| self.tag.tap(&here.card) == tap.name);
            let vm = vm.map(|(vm, _)| vm.to_string()).unwrap_or_default();
            format!(
                "the card of VM {vm} ({}) was removed: move the VM, or start it again",
                tap.name
            )
        };
        missing.map(line).collect()
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
        (doors, forwards_nothing_else): (&[Door], bool),
    ) -> Result<(), String> {
        let table = self.tag.table();
        if segments.is_empty() {
            // The watch would hear each removal.
            if made.has_no_filter {
                return Ok(());
            }
            for family in ["bridge", "inet"] {
                // One that is not there cannot be deleted, so it is made first.
                let rules = format!("table {family} {table}\ndelete table {family} {table}\n");
                run("nft", &["-f", "-"], &rules).await?;
            }
            let limits = self.tag.limits();
            let none = format!("table inet {limits}\ndelete table inet {limits}\n");
            run("nft", &["-f", "-"], &(none + &gang_traffic::none(&self.tag))).await?;
            (made.rules, made.listed, made.limits, made.counted) = Default::default();
            made.has_no_filter = true;
            return Ok(());
        }
        made.has_no_filter = false;
        let taps: Vec<Tap> = segments.iter().flat_map(|segment| segment.taps.clone()).collect();
        let mut peers = rules::Peers::new();
        for segment in segments {
            for host in segment.hosts() {
                peers.entry(host).or_default().insert(segment.vni);
            }
        }
        let hosts = &wanted.hosts;
        let host = OfHost { taps: &taps, peers, hosts, doors, forwards_nothing_else };
        let rules = rules::of_host(&self.tag, &host);
        let is_same = rules == made.rules;
        self.limit(made, wanted).await?;
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

    /// Loads the limits of connections if they are to be others, or if they are not as they were.
    async fn limit(&self, made: &mut Made, wanted: &HostNetworks) -> Result<(), String> {
        let table = self.tag.limits();
        let listed = async || run("nft", &["-s", "-t", "list", "table", "inet", &table], "").await;
        let of_cards = made.cards.values().map(|CardHere { card, .. }| (card.vni, &card.network));
        let named = wanted.networks.iter().map(|network| (network.vni, &network.name));
        let whose = of_cards.chain(named).map(|(vni, name)| (vni, tenant_of(name.as_str())));
        let connections = if cfg!(test) { 400 } else { connections_max() };
        let limits = rules::limits(&self.tag, &whose.collect(), connections);
        let is_same = limits == made.limits && !made.counted.is_empty();
        if is_same && listed().await.is_ok_and(|listed| listed == made.counted) {
            return Ok(());
        }
        if is_same {
            self.mended(format!(
                "somebody has changed the limits of tenants' connections (nftables, {table}): the agent has set them up again"
            ));
        }
        run("nft", &["-f", "-"], &limits).await?;
        made.counted = listed().await?;
        made.limits = limits;
        Ok(())
    }

    async fn listed(&self) -> Result<String, String> {
        let table = self.tag.table();
        let bridge = run("nft", &["-s", "list", "table", "bridge", &table], "").await?;
        Ok(bridge + &run("nft", &["-s", "list", "table", "inet", &table], "").await?)
    }

    /// Ends the gateways that are not to be here any more. Returns whether there were some, and what failed.
    async fn end_gateways(&self, made: &mut Made, segments: &[Segment]) -> (bool, Vec<String>) {
        let (tag, dir) = (&self.tag, &self.dir);
        let (mut is_changed, mut troubles) = (false, Vec::new());
        made.failed.retain(|vni, _| has_gateway(segments, *vni));
        let left = gateway::left(dir).into_iter().chain(made.gateways.keys().copied());
        for vni in left.filter(|vni| !has_gateway(segments, *vni)).collect::<BTreeSet<u16>>() {
            troubles.extend(gateway::end(tag, dir, vni, made.gateways.remove(&vni)).await.err());
            // Nobody else has removed them.
            for cable in [tag.gateway(vni), tag.uplink(vni)] {
                made.interfaces.remove(&cable);
            }
            is_changed = true;
        }
        (is_changed, troubles)
    }

    /// Starts the gateways that are to be here. Returns whether something has changed, and what failed.
    async fn keep_gateways(
        &self,
        made: &mut Made,
        wanted: &HostNetworks,
        segments: &[Segment],
        there: &There,
    ) -> (bool, Vec<String>) {
        let (mut is_changed, mut troubles) = (false, Vec::new());
        let here = wanted.networks.iter().filter(|network| has_gateway(segments, network.vni));
        for network in here {
            let vni = network.vni;
            let failed = made.failed.get(&vni);
            if let Some(failed) = failed.filter(|failed| failed.at.elapsed() < failed.wait) {
                troubles.push(failed.why.clone());
                continue;
            }
            match self.keep_gateway(made, network, there).await {
                Ok(changed) => {
                    is_changed |= changed;
                    made.failed.remove(&vni);
                }
                Err(why) => {
                    let [least, most] = START_AGAIN;
                    let before = made.failed.get(&vni).map(|failed| failed.wait);
                    let wait = before.map_or(least, |wait| (wait * 2).min(most));
                    let failed = Failed { at: Instant::now(), wait, why: why.clone() };
                    made.failed.insert(vni, failed);
                    troubles.push(why);
                    is_changed = true;
                }
            }
        }
        (is_changed, troubles)
    }

    /// Returns whether it had to be started.
    async fn keep_gateway(
        &self,
        made: &mut Made,
        network: &HostNetwork,
        there: &There,
    ) -> Result<bool, String> {
        let (tag, dir, vni) = (&self.tag, &self.dir, network.vni);
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
                gateway::update(tag, running, dir, network).await?;
            }
            return Ok(false);
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
        Ok(true)
    }
}

fn has_gateway(segments: &[Segment], vni: u16) -> bool {
    segments.iter().any(|segment| segment.vni == vni && segment.gateway == Gateway::Here)
}

/// With it, what bridges carry passes through the filter of other programs too.
const CARRIED_BY_OTHERS: &str = "/proc/sys/net/bridge/bridge-nf-call-iptables";

async fn carried_by_others() -> Option<String> {
    let text = std::fs::read_to_string(CARRIED_BY_OTHERS).unwrap_or_default();
    if text.trim() != "1" {
        return None;
    }
    let chains = run("nft", &["list", "chains"], "").await.ok()?;
    let drops = |line: &str| line.contains("hook forward") && line.contains("policy drop");
    chains.lines().any(drops).then(|| {
        "rules of another program, for example Docker's, drop frames between VMs of this host (net.bridge.bridge-nf-call-iptables \
         is 1): set it to 0, or let these rules accept what comes from the bridges pb*"
            .to_owned()
    })
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
pub(super) fn segments(
    tag: &Tag,
    host: &HostId,
    wanted: &HostNetworks,
    cards: &BTreeMap<VmId, CardHere>,
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
    for CardHere { card, at } in cards.values() {
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
        match at {
            Some(at) if at == host => drop(segment.others.remove(&card.address)),
            Some(at) => {
                let there = address_of(at).map(|there| (card.address, there));
                segment.others.extend(there);
            }
            None => {}
        }
        let (name, mac) = (tag.tap(card), card.mac());
        segment.taps.push(Tap { name, vni: card.vni, mac, address: card.address });
    }
    all.into_values().collect()
}

/// The cards that are there and are no known VM's: what a card may send is known by its name.
fn add_unknown(tag: &Tag, segments: &mut [Segment], there: &There) {
    for Link { ifname: name, .. } in &there.links {
        let Some((vni, number)) = tag.numbers_of(name) else { continue };
        let Some(segment) = segments.iter_mut().find(|segment| segment.vni == vni) else {
            continue;
        };
        if segment.taps.iter().all(|tap| tap.name != *name) {
            let address = segment.subnet.address(number);
            let mac = mac(vni, segment.subnet, address);
            segment.taps.push(Tap { name: name.clone(), vni, mac, address });
        }
    }
}

/// Ends what goes another way than the filters lead now. What fails is tried again with the next pass, and is returned.
async fn lead_anew(made: &mut Made) -> Option<String> {
    if !made.leads {
        return None;
    }
    let gateways = made.gateways.iter().map(|(vni, running)| (*vni, running.pid()));
    let gateways: Vec<(u16, u32)> = gateways.collect();
    let doors = made.doors.as_deref().unwrap_or_default();
    let forgotten = doors::forget(doors, &gateways).await;
    made.leads = forgotten.is_err();
    forgotten.err()
}
