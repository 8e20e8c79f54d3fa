//! A lab's network: namespaces, bridges, and a WAN with delay between the sites.
//!
//! ```text
//! pg-ID-home1   pg-ID-ctl            pg-ID-cloud1
//!    eth0          eth0                 eth0
//!      \ veth      / veth                 | veth
//!   br0 in pg-ID-site-home       br0 in pg-ID-site-cloud
//!          |                              |
//!        wan1 ===== the relay, or ===== wan0
//!               a cable with netem
//! ```
//!
//! One subnet spans all sites. Each pair of sites has its own link, with a network card at both ends.
//! A bridge does not forward frames between two of these cards. All processes run inside the lab's
//! namespaces, where `down` finds them.

use std::path::Path;

use perigee_model::Problem;
use tokio::process::Command;

use crate::command::run;
use crate::definition::Definition;
use crate::netns;
use crate::state::LabDir;
use crate::wan::{self, Emulator};

/// Buffer limits for TCP, enough for 16 Gbit/s with a round-trip time of 32 ms. The kernel's default of
/// 4 MiB limits a stream to 200 MiB/s at 16 ms.
const TCP_MEMORY: [(&str, &str); 2] =
    [("tcp_rmem", "4096 131072 67108864"), ("tcp_wmem", "4096 65536 67108864")];

/// Makes the namespaces and the network between them. Returns what carries the frames between sites.
///
/// # Errors
/// The first step that failed. [`crate::down()`] removes what was made before.
pub async fn create(definition: &Definition, dir: &LabDir) -> Result<Emulator, Problem> {
    for (index, site) in definition.sites.iter().enumerate() {
        let namespace = definition.site_namespace(&site.name);
        add_namespace(&namespace).await?;
        run("ip", &["-n", &namespace, "link", "add", "br0", "type", "bridge"]).await?;
        run("ip", &["-n", &namespace, "link", "set", "br0", "up"]).await?;
        for (port, host) in site.hosts.iter().enumerate() {
            let address = definition.host_address(host).ok_or_else(|| {
                Problem::internal(format!("can't attach host {host}"), "it has no address")
            })?;
            let host_namespace = definition.host_namespace(host);
            attach(&namespace, &format!("port{port}"), &host_namespace, address).await?;
        }
        if index == 0 {
            let address = definition.controller_address();
            attach(&namespace, "ctl", &definition.controller_namespace(), address).await?;
        }
    }
    wan::create(definition, dir).await
}

/// A command that runs in a namespace. `nsenter` replaces itself with the program, so the child's pid
/// is the program's. Unlike `ip netns exec` it does not remount `/sys` (cgroups).
pub fn in_namespace(namespace: &str, program: &Path) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net=/run/netns/{namespace}")).arg("--").arg(program);
    command
}

pub(crate) async fn add_namespace(namespace: &str) -> Result<(), Problem> {
    run("ip", &["netns", "add", namespace]).await?;
    run("ip", &["-n", namespace, "link", "set", "lo", "up"]).await.map(drop)
}

/// Makes a host's namespace and connects it to its site's bridge with a veth pair.
pub(crate) async fn attach(
    site: &str,
    port: &str,
    host: &str,
    address: std::net::Ipv4Addr,
) -> Result<(), Problem> {
    add_namespace(host).await?;
    let cable = ["type", "veth", "peer", "name", "eth0", "netns", host];
    run("ip", &[&["link", "add", port, "netns", site][..], &cable].concat()).await?;
    run("ip", &["-n", site, "link", "set", port, "master", "br0", "up"]).await?;
    run("ip", &["-n", host, "addr", "add", &format!("{address}/24"), "dev", "eth0"]).await?;
    run("ip", &["-n", host, "link", "set", "eth0", "up"]).await?;
    netns::within(host, || {
        for (name, value) in TCP_MEMORY {
            let path = format!("/proc/sys/net/ipv4/{name}");
            std::fs::write(&path, value)
                .map_err(|e| Problem::internal(format!("can't write {path} in {host}"), e))?;
        }
        Ok(())
    })
}
