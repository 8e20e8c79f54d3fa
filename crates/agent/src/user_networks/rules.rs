//! The packet filter of user networks, as text for `nft`.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use nix::unistd::Gid;

use super::GuestsReach;
use crate::networks::connections_max;

/// A guest that is refused hears it at once: the kernel heeds an ICMP message for TCP only when it has sent its first packet again, a second later.
const REFUSE: &str = "goto refuse";
/// No guest reaches these, whatever the operator allows: this host itself, link-local addresses, multicast and all.
pub const NEVER: &str = "0.0.0.0/8, 127.0.0.0/8, 169.254.0.0/16, 224.0.0.0/3";
/// Addresses that are not of the internet, and clouds' metadata services. The operator may allow them.
pub const PRIVATE: &str = "10.0.0.0/8, 100.64.0.0/10, 168.63.129.16, 172.16.0.0/12, 192.0.0.0/24, 192.168.0.0/16, 198.18.0.0/15";
/// Connections of one VM, and new ones in a second.
const CONNECTIONS: u32 = if cfg!(test) { 50 } else { 2048 };
const NEW_PER_S: u32 = 200;
const BURST: u32 = 5 * NEW_PER_S;
/// `passt` closes a UDP socket that was not used for 180 s.
const USED_FOR: &str = "10m";

/// The name of the table.
pub fn table(group: Gid) -> String {
    format!("perigee_guests_{group}")
}

const OUTPUT: &str = "type filter hook output priority filter; policy accept;";
const INPUT: &str = "type filter hook input priority filter; policy accept;";

/// The rules are made anew, so that an earlier agent's don't add up; the sets stay, with what the kernel has counted. An
/// address of a host is reached only if just this address is allowed. While the cluster's hosts are not known (`None`), they may
/// be anywhere: guests begin no other connection.
pub fn rules(
    group: Gid,
    resolvers: &[Ipv4Addr],
    reach: &[GuestsReach],
    hosts: Option<&[IpAddr]>,
) -> String {
    let name = table(group);
    let to = |addresses: BTreeSet<String>, what: &str| match addresses.is_empty() {
        true => String::new(),
        false => {
            let addresses: Vec<String> = addresses.into_iter().collect();
            format!("    ip daddr {{ {} }} {what}\n", addresses.join(", "))
        }
    };
    let names: String = resolvers
        .iter()
        .flat_map(|ip| {
            ["udp", "tcp"].map(|kind| format!("    ip daddr {ip} {kind} dport 53 accept\n"))
        })
        .collect();
    let one = reach.iter().filter(|reach| reach.prefix_bits == 32);
    let one = to(one.map(|reach| reach.address.to_string()).collect(), "accept");
    let many = reach.iter().filter(|reach| reach.prefix_bits < 32);
    let many: String = many
        .map(|reach| format!("    ip daddr {}/{} accept\n", reach.address, reach.prefix_bits))
        .collect();
    let hosts = match hosts {
        Some(hosts) => {
            to(hosts.iter().filter(|ip| ip.is_ipv4()).map(ToString::to_string).collect(), REFUSE)
        }
        None => format!("    ct state new {REFUSE}\n"),
    };
    let connections = connections_max();
    let begin = begin_anew(&name);
    format!(
        "{begin}table inet {name} {{
  chain strangers {{
    ct direction reply update @used {{ udp dport }} accept
    drop
  }}
  chain in {{ {INPUT}
    udp dport @used jump strangers
  }}
  chain guests {{
    meta l4proto udp update @used {{ udp sport }}
    ct direction reply ct state {{ established, related }} accept
    ct state new update @fresh {{ meta skuid limit rate over {NEW_PER_S}/second burst {BURST} packets }} {REFUSE}
    ct state new add @total {{ meta nfproto ct count over {connections} }} {REFUSE}
    ct state new add @open {{ meta skuid ct count over {CONNECTIONS} }} {REFUSE}
{names}    meta nfproto ipv6 {REFUSE}
    ip daddr {{ {NEVER} }} {REFUSE}
{one}    fib daddr type local {REFUSE}
{hosts}{many}    ip daddr {{ {PRIVATE} }} {REFUSE}
  }}
  chain refuse {{
    meta l4proto tcp reject with tcp reset
    reject
  }}
  chain out {{ {OUTPUT}
    meta skgid {group} jump guests
  }}
}}
"
    )
}

/// Makes what is not there of the table, and empties its chains. The sets stay as they are.
fn begin_anew(name: &str) -> String {
    format!(
        "table inet {name} {{
  set fresh {{ type uid; size 65535; flags dynamic,timeout; timeout 1m; }}
  set open {{ type uid; size 65535; flags dynamic; }}
  set total {{ type nf_proto; size 16; flags dynamic; }}
  set used {{ type inet_service; size 65535; flags dynamic,timeout; timeout {USED_FOR}; }}
  chain guests {{ }}
  chain refuse {{ }}
  chain strangers {{ }}
  chain in {{ {INPUT} }}
  chain out {{ {OUTPUT} }}
}}
flush chain inet {name} out
flush chain inet {name} guests
flush chain inet {name} refuse
flush chain inet {name} in
flush chain inet {name} strangers
"
    )
}
