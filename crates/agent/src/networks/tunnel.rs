//! The tunnels between hosts: one WireGuard interface for all. The kernel makes it where it can, and otherwise
//! `wireguard-go` does. That ends when the interface is gone, and the interface is gone when that is killed.

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

use perigee_model::network::{HostNetworks, TUNNEL_NETWORK, TunnelEnd, TunnelPeer, tunnel_mtu};
use serde::Deserialize;
use tokio::time::{Instant, sleep};

use super::names::is_uplink;
use super::tools::{batch, list, run};
use crate::programs;
use crate::{files, process};

/// WireGuard's port (UDP).
pub const PORT: u16 = 51_871;
const LOG: &str = "tunnel.log";
const LOG_BYTES_MAX: u64 = 1 << 20;
const LOG_KEEP_BYTES: u64 = 256 << 10;
const USERSPACE: &str = "wireguard-go";
const START_DEADLINE: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// A host behind a NAT is reached for as long as it sends something.
const KEEPALIVE_S: u32 = 25;
/// Of a host whose address is at no interface, or at its loopback's.
const MTU_DEFAULT: u16 = 1500;

/// The host's key, made once, and what others need to know of it. The error says why this host has no tunnels.
pub async fn prepare(dir: &Path, ip: &str) -> Result<TunnelEnd, String> {
    for (program, package) in [
        ("wg", "wireguard-tools"),
        ("ip", "iproute2"),
        ("bridge", "iproute2"),
        ("nft", "nftables"),
        ("dnsmasq", "dnsmasq-base"),
        ("nsenter", "util-linux"),
    ] {
        if programs::which(program).is_none() {
            return Err(format!("{program} is not installed (package {package})"));
        }
    }
    let interfaces: Vec<Interface> = list("ip", &["-json", "address", "show"]).await?;
    if let Some((name, address)) = of_others(&interfaces) {
        // The packet filter would drop what comes to it.
        return Err(format!(
            "its interface {name} has the address {address}, and those of 100.124.0.0/14 are the networks' own: give it another one"
        ));
    }
    let key = key(dir).await?;
    let public_key = run("wg", &["pubkey"], &key).await?.trim().to_owned();
    let ip: std::net::IpAddr = ip
        .trim_matches(['[', ']'])
        .parse()
        .map_err(|_| format!("its address {ip} is not an IP address"))?;
    let endpoint = std::net::SocketAddr::new(ip, PORT).to_string();
    let mtu = if ip.is_loopback() { MTU_DEFAULT } else { mtu_at(ip, &interfaces) };
    let end = TunnelEnd { public_key, endpoint, mtu };
    end.check().map_err(|problem| problem.why)?;
    Ok(end)
}

/// Whether an end is at this address.
pub fn is_at(end: &TunnelEnd, ip: &str) -> bool {
    let endpoint: Option<std::net::SocketAddr> = end.endpoint.parse().ok();
    endpoint.is_some_and(|endpoint| endpoint.ip().to_string() == ip)
}

/// The private key, in a file that only root reads.
async fn key(dir: &Path) -> Result<String, String> {
    let path = dir.join("tunnel.key");
    let unreadable = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    match std::fs::read_to_string(&path) {
        Ok(key) => return Ok(key.trim().to_owned()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(unreadable(&error)),
    }
    let key = run("wg", &["genkey"], "").await?;
    perigee_http::write_private(&path, key.as_bytes()).map_err(|problem| problem.why)?;
    Ok(key.trim().to_owned())
}

#[derive(Deserialize)]
struct Interface {
    #[serde(default)]
    ifname: String,
    #[serde(default)]
    mtu: u32,
    #[serde(default)]
    addr_info: Vec<Address>,
}

#[derive(Deserialize)]
struct Address {
    #[serde(default)]
    local: String,
}

/// The largest packet of the interface with this address.
fn mtu_at(ip: std::net::IpAddr, interfaces: &[Interface]) -> u16 {
    let own = ip.to_string();
    let found = interfaces.iter().find(|i| i.addr_info.iter().any(|a| a.local == own));
    found.map_or(MTU_DEFAULT, |found| u16::try_from(found.mtu).unwrap_or(u16::MAX))
}

/// An interface that is not of tenants' networks and has an address of the tunnels or of gateways.
fn of_others(interfaces: &[Interface]) -> Option<(&str, Ipv4Addr)> {
    let is_agents = |name: &str| name.starts_with("pw") || name.starts_with("pu");
    let others = interfaces.iter().filter(|interface| !is_agents(&interface.ifname));
    let mut all = others.flat_map(|interface| {
        let addresses = interface.addr_info.iter();
        let addresses = addresses.filter_map(|address| address.local.parse::<Ipv4Addr>().ok());
        addresses.map(move |address| (interface.ifname.as_str(), address))
    });
    all.find(|(_, address)| TUNNEL_NETWORK.contains(*address) || is_uplink(*address))
}

/// What `wg setconf` reads.
fn configuration(key: &str, peers: &[TunnelPeer]) -> String {
    let mut text = format!("[Interface]\nPrivateKey = {key}\nListenPort = {PORT}\n");
    for TunnelPeer { host, address, end } in peers {
        text.push_str(&format!(
            "\n# {host}\n[Peer]\nPublicKey = {}\nEndpoint = {}\nAllowedIPs = {address}/32\nPersistentKeepalive = {KEEPALIVE_S}\n",
            end.public_key, end.endpoint
        ));
    }
    text
}

/// The tunnels as they were last set up.
#[derive(Debug, Default)]
pub struct Tunnel {
    configured: String,
    at: Option<Instant>,
}

/// After this time all is set up again that can't be seen cheaply: addresses, routes, peers.
const AGAIN: Duration = Duration::from_secs(30);

impl Tunnel {
    /// Sets the tunnels up as they are wanted. Returns whether the interface had to be made.
    pub async fn bring_about(
        &mut self,
        name: &str,
        is_there: bool,
        wanted: &HostNetworks,
        own: &TunnelEnd,
        dir: &Path,
    ) -> Result<bool, String> {
        let Some(address) = wanted.address else { return Ok(false) };
        if let Err(error) = files::bound(&dir.join(LOG), LOG_BYTES_MAX, LOG_KEEP_BYTES) {
            tracing::debug!(%error, "a long log is not cut");
        }
        if !is_there {
            self.configured.clear();
            make(name, dir).await?;
        }
        // What is compared has everything but the key.
        let configured = format!("{address} {}", configuration("", &wanted.peers));
        let is_old = self.at.is_none_or(|at| at.elapsed() > AGAIN);
        if self.configured == configured && !is_old {
            return Ok(false);
        }
        let text = configuration(&key(dir).await?, &wanted.peers);
        run("wg", &["syncconf", name, "/dev/stdin"], &text).await?;
        let mtu = tunnel_mtu(own.mtu);
        let lines = [
            format!("address replace {address}/32 dev {name}"),
            format!("link set dev {name} mtu {mtu} up"),
            format!("route replace {TUNNEL_NETWORK} dev {name} src {address}"),
        ];
        batch("ip", &lines).await?;
        (self.configured, self.at) = (configured, Some(Instant::now()));
        Ok(!is_there)
    }
}

/// Makes the interface.
async fn make(name: &str, dir: &Path) -> Result<(), String> {
    let in_kernel = run("ip", &["link", "add", "name", name, "type", "wireguard"], "").await;
    let Err(why) = in_kernel else { return Ok(()) };
    if programs::which(USERSPACE).is_none() {
        return Err(format!(
            "the kernel has no WireGuard ({why}), and {USERSPACE} is not installed"
        ));
    }
    // It says on its output why it does not start; what is kept is what comes on the other one, for errors.
    let arguments = ["-c", "exec \"$0\" \"$@\" >&2", USERSPACE, "--foreground", name];
    let log = dir.join(LOG);
    let started = process::start("sh", &arguments.map(str::to_owned), None, &log, None, None);
    let (process, _exit) = started.map_err(|problem| problem.why)?;
    let deadline = Instant::now() + START_DEADLINE;
    while run("wg", &["show", name, "public-key"], "").await.is_err() {
        if process.has_ended() || Instant::now() > deadline {
            process.kill().await.map_err(|problem| problem.why)?;
            // A log that was cut is as long as before, with a hole.
            let said = files::tail(&log, LOG_KEEP_BYTES).unwrap_or_default();
            let said = String::from_utf8_lossy(&said);
            let last = said.lines().next_back().unwrap_or("it said nothing");
            return Err(format!("{USERSPACE} did not start: {last}"));
        }
        sleep(LOOK_AGAIN).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_has_one_address_in_the_tunnels_and_no_more() {
        let peer = TunnelPeer {
            host: perigee_model::HostId::new("cloud1").expect("a name"),
            address: std::net::Ipv4Addr::new(100, 127, 0, 2),
            end: TunnelEnd {
                public_key: "key".to_owned(),
                endpoint: "10.0.0.2:51871".to_owned(),
                mtu: 1500,
            },
        };
        let text = configuration("secret", &[peer]);
        for part in [
            "PrivateKey = secret\n",
            "AllowedIPs = 100.127.0.2/32\n",
            "Endpoint = 10.0.0.2:51871\n",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }

    /// Until now these were not kept, and all of the log was read as text.
    #[tokio::test]
    async fn a_tunnel_that_does_not_start_says_its_last_words() {
        if programs::which(USERSPACE).is_none() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join(LOG), b"what is no text: \xff\n").expect("a log");
        let name = "a-name-that-is-too-long";
        let why = make(name, dir.path()).await.expect_err("no interface has such a name");
        assert!(why.contains("did not start: ERROR") && why.contains("too long"), "{why}");
    }

    #[tokio::test]
    async fn the_key_is_made_once_and_nobody_else_reads_it() {
        if programs::which("wg").is_none() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let first = key(dir.path()).await.expect("a key");
        assert_eq!(key(dir.path()).await.expect("the same key"), first);
        let file = std::fs::metadata(dir.path().join("tunnel.key")).expect("a file");
        assert_eq!(std::os::unix::fs::MetadataExt::mode(&file) & 0o777, 0o600);
    }
}
