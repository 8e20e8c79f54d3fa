//! The network namespace of the clients, with two cables to the first host: one to a published port of Perigee, and one to the
//! plain bridge of bare QEMU's guest, which is in both hosts.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use perigee_lab::Lab;
use perigee_lab::netns;
use perigee_model::{HostId, Problem};

use crate::guest::{HTTP_PORT, SSH_PORT, TOMCAT_PORT};

pub const SUBNET: &str = "10.7.0.0/24";
/// The first address that a network gives.
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 7, 0, 2);
const OF_CLIENTS: Ipv4Addr = Ipv4Addr::new(10, 7, 0, 1);
/// The cable to the published port. No host of a cluster has these addresses.
const HOST_END: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const CLIENTS_END: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
pub const PUBLISHED_HTTP: u16 = 30_080;
pub const PUBLISHED_SSH: u16 = 30_022;
pub const PUBLISHED_TOMCAT: u16 = 30_081;
/// Bare QEMU's card at both hosts, and its VXLAN.
pub const TAP: &str = "bare0";
const BRIDGE: &str = "plain0";
const VNI: u32 = 4_000_000;
const MTU: u32 = 1370;
/// The kernel keeps no more bytes than these (least, at first, most) for a client that reads slowly: it would read on from megabytes while
/// nothing comes.
const RECEIVED_BYTES: &str = "4096 65536 131072";

/// Where the clients find the guest.
#[derive(Debug, Clone)]
pub struct Target {
    pub address: Ipv4Addr,
    pub http: u16,
    pub ssh: u16,
    pub tomcat: u16,
}

pub struct Ground {
    pub clients: String,
    /// The key with which the clients log in.
    pub key: PathBuf,
}

/// The clients' namespace is the experiment's own; the lab removes its hosts with all that is in them.
impl Drop for Ground {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "delete", &self.clients]).status();
    }
}

impl Ground {
    pub fn make(lab: &Lab, hosts: &[HostId; 2]) -> Result<Self> {
        let clients = format!("{}-clients", lab.definition.id);
        let key = lab.dir().join("clients-key");
        run(&["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", &key.display().to_string()])?;
        run(&["ip", "netns", "add", &clients])?;
        let ground = Self { clients, key };
        let near = lab.definition.host_namespace(&hosts[0]);
        let within = |line: &str| ground.run_in(&ground.clients, line);
        within("ip link set lo up")?;
        netns::within(&ground.clients, || {
            std::fs::write("/proc/sys/net/ipv4/tcp_rmem", RECEIVED_BYTES)
                .map_err(|error| Problem::internal("can't limit the clients' buffers", error))
        })?;
        for (ours, theirs) in [("pub0", "pub1"), ("plain", "plain1")] {
            within(&format!("ip link add {ours} type veth peer name {theirs} netns {near}"))?;
            within(&format!("ip link set {ours} mtu {MTU} up"))?;
        }
        within(&format!("ip address add {CLIENTS_END}/30 dev pub0"))?;
        within(&format!("ip address add {OF_CLIENTS}/24 dev plain"))?;
        let at_near = |line: &str| ground.run_in(&near, line);
        at_near(&format!("ip address add {HOST_END}/30 dev pub1"))?;
        at_near("ip link set pub1 up")?;
        for (host, other) in [(&hosts[0], &hosts[1]), (&hosts[1], &hosts[0])] {
            let namespace = lab.definition.host_namespace(host);
            let address = |host| lab.definition.host_address(host).context("a host has an address");
            let (own, remote) = (address(host)?, address(other)?);
            for line in [
                format!("ip link add {BRIDGE} type bridge"),
                format!(
                    "ip link add vx{BRIDGE} type vxlan id {VNI} local {own} remote {remote} dstport 4789"
                ),
                format!("ip link set vx{BRIDGE} mtu {MTU} master {BRIDGE} up"),
                format!("ip tuntap add mode tap name {TAP} vnet_hdr"),
                format!("ip link set {TAP} mtu {MTU} master {BRIDGE} up"),
                format!("ip link set {BRIDGE} up"),
            ] {
                ground.run_in(&namespace, &line)?;
            }
        }
        at_near(&format!("ip link set plain1 mtu {MTU} master {BRIDGE} up"))?;
        Ok(ground)
    }

    pub fn published(&self) -> Target {
        let (http, ssh, tomcat) = (PUBLISHED_HTTP, PUBLISHED_SSH, PUBLISHED_TOMCAT);
        Target { address: HOST_END, http, ssh, tomcat }
    }

    pub fn plain(&self) -> Target {
        Target { address: GUEST, http: HTTP_PORT, ssh: SSH_PORT, tomcat: TOMCAT_PORT }
    }

    /// A program of the clients.
    pub fn client(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.clients)).args(["--", program]);
        command.stdin(Stdio::null());
        command
    }

    fn run_in(&self, namespace: &str, line: &str) -> Result<()> {
        let net = format!("--net=/run/netns/{namespace}");
        run(&["nsenter", &net, "--"].into_iter().chain(line.split(' ')).collect::<Vec<_>>())
    }
}

fn run(line: &[&str]) -> Result<()> {
    let done = Command::new(line[0]).args(&line[1..]).stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{} failed: {said}", line.join(" "));
    Ok(())
}
