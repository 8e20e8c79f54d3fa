//! The network cards of a lab's hosts: how fast they are, in each direction, and what they have carried. Without this they are as fast as the
//! machine.
//!
//! What VMs say to each other in Perigee's networks goes through WireGuard's port. It can have a rate of its own beside all else, as if a
//! second card carried it.

use perigee_model::{HostId, Problem};

use crate::command::run;
use crate::up::Lab;
use crate::wan::Rate;

/// Perigee's networks between hosts (docs/networks.md).
const TUNNELS_PORT: &str = "51871";
const ALL_ELSE: &str = "1:10";
const TUNNELS: &str = "1:20";

/// How a host's traffic shares its cards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cards {
    /// All of it shares one.
    One,
    /// What VMs say to each other has one, and all else another, each with the whole rate.
    Two,
}

/// What a host's cards have carried in one direction since their rate was set, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Carried {
    /// Of VMs that talk to each other. Only known while that has a rate of its own.
    pub tunnels_bytes: u64,
    pub others_bytes: u64,
}

/// The two ends of a host's cable: the namespace and the device that sends. The first sends to the host, the second from it.
fn ends(lab: &Lab, host: &HostId) -> Result<[(String, String); 2], Problem> {
    let none = || Problem::not_found(format!("can't find host {host}"), "the lab has none");
    let place = lab.definition.sites.iter().find_map(|site| {
        let port = site.hosts.iter().position(|one| one == host)?;
        Some((lab.definition.site_namespace(&site.name), format!("port{port}")))
    });
    Ok([place.ok_or_else(none)?, (lab.definition.host_namespace(host), "eth0".to_owned())])
}

/// Sets the rate of a host's cards, in each direction. What they have carried is counted anew.
///
/// # Errors
/// `Internal` when `tc` fails, as on a kernel without HTB.
pub async fn set(lab: &Lab, host: &HostId, rate: Rate, cards: Cards) -> Result<(), Problem> {
    for (namespace, device) in ends(lab, host)? {
        let tc = async |words: &[&str]| {
            run("tc", &[&["-n", &namespace], words].concat()).await.map(drop)
        };
        // There may be none yet.
        drop(tc(&["qdisc", "delete", "dev", &device, "root"]).await);
        let Rate(Some(bits_per_s)) = rate else { continue };
        tc(&["qdisc", "add", "dev", &device, "root", "handle", "1:", "htb", "default", "10"])
            .await?;
        let rate = format!("{bits_per_s}bit");
        for class in [ALL_ELSE, TUNNELS] {
            let of = ["class", "add", "dev", &device, "parent", "1:", "classid", class];
            tc(&[&of[..], &["htb", "rate", &rate]].concat()).await?;
        }
        if cards == Cards::Two {
            let of = ["filter", "add", "dev", &device, "parent", "1:", "protocol", "ip", "u32"];
            let port = ["match", "ip", "protocol", "17", "0xff", "match", "ip", "dport"];
            let class = [TUNNELS_PORT, "0xffff", "flowid", TUNNELS];
            tc(&[&of[..], &port, &class].concat()).await?;
        }
    }
    Ok(())
}

/// What a host's cards have carried, to the host and from it. All 0 without a rate.
///
/// # Errors
/// `Internal` when `tc` fails.
pub async fn carried(lab: &Lab, host: &HostId) -> Result<[Carried; 2], Problem> {
    let mut both = [Carried::default(); 2];
    for ((namespace, device), carried) in ends(lab, host)?.into_iter().zip(&mut both) {
        let said = run("tc", &["-n", &namespace, "-s", "class", "show", "dev", &device]).await?;
        *carried = Carried {
            tunnels_bytes: sent_bytes(&said, TUNNELS),
            others_bytes: sent_bytes(&said, ALL_ELSE),
        };
    }
    Ok(both)
}

/// What a class has sent, as `tc -s class show` says it; 0 if there is no such class.
fn sent_bytes(said: &str, class: &str) -> u64 {
    let mut words = said.split_whitespace().skip_while(|word| *word != class);
    words.find(|word| *word == "Sent");
    words.next().and_then(|bytes| bytes.parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_class_has_its_own_bytes() {
        let said = "class htb 1:10 root prio 0 rate 50Mbit ceil 50Mbit burst 1600b cburst 1600b\n \
                    Sent 4242 bytes 40 pkt (dropped 0, overlimits 0 requeues 0)\n backlog 0b 0p\n\
                    class htb 1:20 root prio 0 rate 50Mbit ceil 50Mbit burst 1600b cburst 1600b\n \
                    Sent 77 bytes 1 pkt (dropped 0, overlimits 0 requeues 0)\n";
        assert_eq!((sent_bytes(said, ALL_ELSE), sent_bytes(said, TUNNELS)), (4242, 77));
        assert_eq!(sent_bytes("", TUNNELS), 0);
    }
}
