//! Cards in bridges of this host's operator. The agent connects a VM's TAP to a bridge that the operator has allowed, and changes
//! nothing else of it.
//!
//! A guest sends from its own hardware address only, and answers no DHCP client and announces no router of IPv6. Who has which IP
//! address in the operator's network is the operator's business.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use perigee_model::network::{BridgeCard, BridgeName};
use perigee_model::{Problem, VmId};

use super::names::Tag;
use super::tools::{batch, run};
use super::{interface, tap};

/// Frames to all that a card may send in a second.
const TO_ALL_PER_S: u32 = 100;

/// The cards of VMs in bridges of the operator, and their packet filter.
#[derive(Debug)]
pub struct Bridged {
    tag: Tag,
    allowed: Vec<BridgeName>,
    /// Which of them are there, as the kernel has said last.
    known: Mutex<BTreeMap<BridgeName, bool>>,
    loaded: tokio::sync::Mutex<Loaded>,
    /// What has last happened to the filter, for people.
    trouble: Mutex<Option<String>>,
}

#[derive(Debug, Default)]
struct Loaded {
    cards: BTreeSet<BridgeCard>,
    rules: String,
    /// The rules as the kernel lists them.
    listed: String,
}

impl Bridged {
    /// `allowed` are the bridges in which VMs may have cards. Nothing is made yet.
    pub fn new(tag: Tag, allowed: Vec<BridgeName>) -> Self {
        let (known, loaded, trouble) = Default::default();
        Self { tag, allowed, known, loaded, trouble }
    }

    /// The bridges in which VMs may have cards here.
    pub fn there(&self) -> Vec<BridgeName> {
        let is_there = |name: &&BridgeName| self.is_there(name) == Some(true);
        self.allowed.iter().filter(is_there).cloned().collect()
    }

    /// As the kernel says now, or has said last; `None` if it has never said it.
    fn is_there(&self, name: &BridgeName) -> Option<bool> {
        self.note(name, interface::is_bridge(name.as_str()))
    }

    fn note(&self, name: &BridgeName, answer: std::io::Result<bool>) -> Option<bool> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        match answer {
            Ok(is_there) => drop(known.insert(name.clone(), is_there)),
            Err(error) => tracing::warn!(%error, "the kernel does not say whether {name} is there"),
        }
        known.get(name).copied()
    }

    /// Bridges that the operator has allowed and that are not there, and what has happened to the filter.
    pub fn warnings(&self) -> Vec<String> {
        let missing = self.allowed.iter().filter_map(|name| {
            let why = match self.is_there(name) {
                Some(true) => return None,
                Some(false) => "it is not there",
                None => "the kernel does not say whether it is there",
            };
            Some(format!("VMs can't be in bridge {name}: {why}"))
        });
        let said = self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone();
        missing.chain(said).collect()
    }

    /// Makes a VM's card, and connects it to its bridge.
    ///
    /// # Errors
    /// `Unsupported` if the bridge is not allowed or not there, `Unavailable` if this host can't now.
    pub async fn connect(&self, vm: &VmId, card: &BridgeCard) -> Result<OwnedFd, Problem> {
        let what = || format!("can't connect the network card of the VM {vm}");
        let bridge = &card.bridge;
        let unavailable = |why: String| Problem::unavailable(what(), why);
        let is_allowed = self.allowed.contains(bridge);
        let is_there = interface::is_bridge(bridge.as_str());
        if !is_allowed || !is_there.map_err(|error| unavailable(error.to_string()))? {
            let why = match is_allowed {
                true => format!("bridge {bridge} is not there"),
                false => format!("the operator of this host allows no VM in bridge {bridge}"),
            };
            return Err(Problem::unsupported(what(), why)
                .next("an operator allows it with `perigee agent run --bridge`"));
        }
        let name = self.tag.bridged(card);
        let tap = tap::make(&name).map_err(|error| unavailable(error.to_string()))?;
        let mut loaded = self.loaded.lock().await;
        loaded.cards.insert(card.clone());
        // Without the filter nothing is connected.
        self.filter(&mut loaded).await.map_err(unavailable)?;
        drop(loaded);
        let mtu =
            interface::mtu(bridge.as_str()).map_err(|error| unavailable(error.to_string()))?;
        let lines = [
            format!("link set dev {name} addrgenmode none"),
            format!("link set dev {name} mtu {mtu}"),
            format!("link set dev {name} master {bridge}"),
            format!("link set dev {name} up"),
        ];
        batch("ip", &lines).await.map_err(unavailable)?;
        Ok(tap)
    }

    /// Sets the filter up again if somebody has removed it, for as long as there are cards. `cards` are those of VMs that run here.
    pub async fn look_for(&self, cards: Vec<BridgeCard>) {
        let mut loaded = self.loaded.lock().await;
        // One that is being started is in no list yet.
        let is_there = |card: &BridgeCard| !interface::is_gone(&self.tag.bridged(card));
        loaded.cards.retain(is_there);
        loaded.cards.extend(cards.into_iter().filter(is_there));
        if loaded.cards.is_empty() && loaded.rules.is_empty() {
            return;
        }
        let said = match self.filter(&mut loaded).await {
            Ok(false) => return,
            Ok(true) => format!(
                "somebody has changed the packet filter of VMs' cards in bridges (nftables, table bridge {}): the agent has set it up \
                 again",
                self.tag.bridged_table()
            ),
            Err(why) => {
                format!("the packet filter of VMs' cards in bridges can't be set up: {why}")
            }
        };
        let mut trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        if trouble.as_ref() != Some(&said) {
            tracing::warn!("{said}");
            *trouble = Some(said);
        }
    }

    /// Loads the filter unless it is there. Returns whether somebody has changed it.
    async fn filter(&self, loaded: &mut Loaded) -> Result<bool, String> {
        let table = self.tag.bridged_table();
        let rules = rules(&self.tag, &loaded.cards);
        let list = async || run("nft", &["-s", "list", "table", "bridge", &table], "").await;
        let was_there = !loaded.listed.is_empty();
        let is_there = was_there && list().await.is_ok_and(|listed| listed == loaded.listed);
        if is_there && loaded.rules == rules {
            return Ok(false);
        }
        run("nft", &["-f", "-"], &rules).await?;
        (loaded.rules, loaded.listed) = (rules, list().await?);
        Ok(was_there && !is_there)
    }
}

/// A card of which the filter knows nothing sends nothing.
fn rules(tag: &Tag, cards: &BTreeSet<BridgeCard>) -> String {
    let table = format!("table bridge {}", tag.bridged_table());
    let mut text = format!("{table}\ndelete {table}\n{table} {{\n");
    let mut known = Vec::new();
    for card in cards {
        // What a first fragment of IPv6 carries has to stand in it: behind other headers the second one could announce a router.
        // 47 is GRE.
        let (name, mac) = (tag.bridged(card), card.mac());
        known.push(format!("\"{name}\" : jump from_{name}"));
        let _ = write!(
            text,
            "  chain from_{name} {{
    ether saddr != {mac} drop
    meta pkttype {{ broadcast, multicast }} limit rate over {TO_ALL_PER_S}/second burst {TO_ALL_PER_S} packets drop
    ether type arp arp saddr ether {mac} accept
    ether type ip udp sport 67 drop
    ether type ip6 icmpv6 type nd-router-advert drop
    ether type ip6 udp sport 547 drop
    ether type ip6 frag frag-off 0 icmpv6 type != nd-router-advert accept
    ether type ip6 frag frag-off 0 udp sport != 547 accept
    ether type ip6 frag frag-off 0 meta l4proto {{ tcp, esp, sctp, 47 }} accept
    ether type ip6 frag frag-off 0 drop
    ether type {{ ip, ip6, 0x8035 }} accept
    drop
  }}
"
        );
    }
    let dispatch = match known.is_empty() {
        true => String::new(),
        false => format!("    iifname vmap {{ {} }}\n", known.join(", ")),
    };
    let _ = write!(
        text,
        "  chain come {{
    type filter hook prerouting priority -300; policy accept;
{dispatch}    iifname \"{}\" drop
  }}
}}
",
        tag.all_bridged()
    );
    text
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read as _, Write as _};
    use std::net::{Ipv4Addr, Ipv6Addr};
    use std::os::fd::AsRawFd as _;
    use std::time::{Duration, Instant};

    use nix::sched::{CloneFlags, setns, unshare};
    use perigee_model::network::Mac;
    use perigee_model::{HostId, ProblemKind};

    use super::*;

    fn shell(line: &str) {
        let ended = std::process::Command::new("sh").args(["-c", line]).status();
        assert!(ended.expect("sh runs").success(), "{line}");
    }

    /// A frame to all, with this payload.
    fn frame(from: Mac, kind: [u8; 2], rest: &[u8]) -> Vec<u8> {
        [&[0; 10][..], &[0xff; 6], &from.0, &kind, rest].concat()
    }

    /// IPv4 with UDP.
    fn udp(port: u16, payload: &[u8]) -> Vec<u8> {
        let length = u8::try_from(28 + payload.len()).expect("a short one");
        let mut packet = vec![0x45, 0, 0, length, 0, 0, 0, 0, 64, 17, 0, 0];
        packet.extend(Ipv4Addr::new(192, 0, 2, 7).octets());
        packet.extend([255; 4]);
        // Where `br_netfilter` is loaded, the kernel looks at it.
        let words = packet.chunks(2).map(|two| u32::from(two[0]) << 8 | u32::from(two[1]));
        let sum: u32 = words.sum();
        let sum = !u16::try_from((sum & 0xffff) + (sum >> 16)).expect("a short header");
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
        packet.extend(port.to_be_bytes());
        packet.extend([0, 9, 0, length - 20, 0, 0]);
        packet.extend(payload);
        packet
    }

    /// The first fragment of an IPv6 packet.
    fn fragment(next_header: u8, rest: &[u8]) -> Vec<u8> {
        let length = u8::try_from(8 + rest.len()).expect("a short one");
        let mut packet = vec![0x60, 0, 0, 0, 0, length, 44, 255];
        for address in ["fe80::7", "ff02::1"] {
            packet.extend(address.parse::<Ipv6Addr>().expect("an address").octets());
        }
        packet.extend([next_header, 0, 0, 1, 0, 0, 0, 7]);
        packet.extend(rest);
        packet
    }

    /// VMs left their host.
    #[test]
    fn a_bridge_that_the_kernel_says_nothing_of_is_as_it_was() {
        let tag = Tag::new(&HostId::new("home1").expect("a name"), std::path::Path::new("/state"));
        let name = "br0".parse::<BridgeName>().expect("a name");
        let bridged = Bridged::new(tag, vec![name.clone()]);
        let fails = || Err(std::io::Error::from(nix::errno::Errno::EMFILE));
        assert_eq!(bridged.note(&name, fails()), None);
        for is_there in [true, false] {
            bridged.note(&name, Ok(is_there));
            assert_eq!(bridged.note(&name, fails()), Some(is_there));
        }
    }

    /// With the real kernel, in network namespaces of its own: the host, and what is behind its bridge.
    #[test]
    fn a_card_is_connected_to_a_bridge_that_the_operator_allows_and_sends_as_itself_only() {
        if nix::unistd::Uid::effective().is_root() {
            std::thread::spawn(in_a_bridge).join().expect("no panic");
        }
    }

    fn in_a_bridge() {
        let new = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("a namespace");
            File::open("/proc/thread-self/ns/net").expect("it is there")
        };
        let (lan, host) = (new(), new());
        let at = format!("/proc/{}/fd/{}", std::process::id(), lan.as_raw_fd());
        shell(
            "ip link add br0 mtu 1400 type bridge; ip link set br0 up; ip link add br1 type bridge",
        );
        shell(&format!("ip link add port type veth peer name eth0 netns {at}"));
        shell("ip link set port mtu 1400 master br0 up");
        setns(&lan, CloneFlags::CLONE_NEWNET).expect("it is there");
        shell("ip link set eth0 mtu 1400 up");
        let all = nix::sys::socket::SockProtocol::EthAll;
        let (family, kind) =
            (nix::sys::socket::AddressFamily::Packet, nix::sys::socket::SockType::Raw);
        let flags = nix::sys::socket::SockFlag::SOCK_NONBLOCK;
        let heard =
            File::from(nix::sys::socket::socket(family, kind, flags, all).expect("a socket"));
        setns(&host, CloneFlags::CLONE_NEWNET).expect("it is there");

        let bridge = |name: &str| name.parse::<BridgeName>().expect("a name");
        let tag = Tag::new(&HostId::new("home1").expect("a name"), std::path::Path::new("/state"));
        let bridged = Bridged::new(tag, vec![bridge("br0"), bridge("br7"), bridge("port")]);
        assert_eq!(bridged.there(), [bridge("br0")]);
        assert!(!interface::is_bridge("port").expect("it is known") && !interface::is_gone("port"));
        assert!(interface::is_gone("br7") && interface::mtu("br0").expect("it is there") == 1400);
        assert!(bridged.warnings()[0].contains("br7"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        let card = |name: &str, number| BridgeCard { bridge: bridge(name), number };
        let vm = VmId::new("web").expect("a name");
        for name in ["br1", "br7"] {
            let refused = runtime.block_on(bridged.connect(&vm, &card(name, 1)));
            assert_eq!(refused.expect_err("it is not allowed").kind, ProblemKind::Unsupported);
        }
        let own = card("br0", 7);
        let connected = runtime.block_on(bridged.connect(&vm, &own)).expect("a card");
        let mut connected = File::from(connected);
        let second = runtime.block_on(bridged.connect(&vm, &own)).expect_err("there is one");
        assert_eq!(second.kind, ProblemKind::Unavailable);

        let hears = |connected: &mut File, frame: &[u8]| {
            // What comes after a frame has not overtaken it.
            let last = self::frame(own.mac(), [8, 0], &udp(9, b"the end"));
            let (mut found, begun, mut buffer) = (false, Instant::now(), [0; 2048]);
            connected.write_all(frame).expect("the card is there");
            while begun.elapsed() < Duration::from_secs(20) {
                connected.write_all(&last).expect("the card is there");
                std::thread::sleep(Duration::from_millis(20));
                while let Ok(length) = (&heard).read(&mut buffer) {
                    found |= buffer[..length] == frame[10..];
                    if buffer[..length] == last[10..] {
                        return found;
                    }
                }
            }
            panic!("nothing comes through {frame:?}");
        };
        let mine = frame(own.mac(), [8, 0], &udp(9, b"mine"));
        let stranger = frame(Mac([2, 0x51, 0, 0, 0, 8]), [8, 0], &udp(9, b"stranger"));
        let dhcp = frame(own.mac(), [8, 0], &udp(67, b"dhcp"));
        let arp = |from: Mac| {
            let mut rest = vec![0, 1, 8, 0, 6, 4, 0, 1];
            rest.extend(from.0);
            rest.extend([192, 0, 2, 7, 0, 0, 0, 0, 0, 0, 192, 0, 2, 1]);
            frame(own.mac(), [8, 6], &rest)
        };
        let ipv6 = |packet: Vec<u8>| frame(own.mac(), [0x86, 0xdd], &packet);
        let large = ipv6(fragment(17, &[0, 9, 0, 9, 5, 0, 0, 0]));
        // Of a VPN's.
        let esp = ipv6(fragment(50, &[7; 16]));
        // Options, and behind them ICMPv6, of which all is in the second fragment: the announcement of a router.
        let hidden = ipv6(fragment(60, &[58, 0, 1, 4, 0, 0, 0, 0]));
        for round in 0..2 {
            assert!(hears(&mut connected, &mine) && hears(&mut connected, &arp(own.mac())));
            assert!(hears(&mut connected, &large) && hears(&mut connected, &esp));
            for bad in [&stranger, &dhcp, &arp(Mac([2, 0x51, 0, 0, 0, 8])), &hidden] {
                assert!(!hears(&mut connected, bad), "{bad:?} in round {round}");
            }
            if round == 0 {
                shell("nft flush ruleset");
                assert!(hears(&mut connected, &stranger), "the filter is gone");
                runtime.block_on(bridged.look_for(Vec::new()));
                assert!(bridged.warnings().iter().any(|said| said.contains("set it up again")));
            }
        }
    }
}
