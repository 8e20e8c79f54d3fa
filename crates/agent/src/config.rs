//! What an agent is told at its start.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use perigee_http::{Listen, Network};
use perigee_model::network::BridgeName;
use perigee_model::{HostId, SiteId};

use crate::user_networks::GuestsReach;
use crate::users::VmUids;

/// The configuration of an agent.
#[derive(Debug, Clone)]
pub struct Config {
    /// The name of this host.
    pub host: HostId,
    /// The site that the agent says at its first registration. Later an admin decides it.
    pub site: SiteId,
    /// Where the control API is.
    pub listen: Vec<Listen>,
    /// The state directory. QEMU's users must be able to enter the directories above it.
    pub state: PathBuf,
    /// The users of VMs, one for each.
    pub vm_uids: VmUids,
    /// What VMs in user networks reach beside the internet's addresses.
    pub guests_reach: Vec<GuestsReach>,
    /// Addresses of this host that are on none of its interfaces.
    pub outside_addresses: Vec<Ipv4Addr>,
    /// The bridges of this host in which VMs may have cards.
    pub bridges: Vec<BridgeName>,
    /// Control API of this host's volume server: `unix:PATH`.
    pub volume_control: String,
    /// The same control API's address for other hosts.
    pub volume_url: String,
    /// `HOST:PORT` of the volume server for NBD clients of other hosts.
    pub nbd_addr: String,
    /// `https://IP:PORT`, or `http://IP:PORT` without TLS; incoming migrations listen on the same IP.
    pub agent_url: String,
    /// The address of the controller; `None` for an agent that registers nowhere.
    pub controller: Option<String>,
    /// The kernel to boot once to find out whether KVM works; by default the newest `/boot/vmlinuz-*`.
    pub probe_kernel: Option<PathBuf>,
    /// The file with the id of this boot: [`perigee_http::boot_id`]. Hosts that share a kernel have one file each.
    pub boot_id: PathBuf,
    /// How it talks with the controller and the other hosts.
    pub network: Network,
    /// How a rented host ends; `None` for a host that stays.
    pub leased: Option<Leased>,
}

/// What the agent of a rented host is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leased {
    /// How long the controller may be silent.
    pub length_s: u64,
    /// What is run with `sh -c` then.
    pub end: String,
    /// Where the machine hears that its provider takes it back; `None` if the provider does not say so.
    pub metadata: Option<String>,
}
