//! Starts the `passt` of one VM.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use perigee_model::Problem;
use perigee_model::guest::USER_NETWORK;
use tokio::time::{Instant, sleep};

use super::{UserNetworks, ports};
use crate::files;
use crate::networks::SSH_PORT;
use crate::process::{self, Process, QemuUser};

/// The program that is a guest's user network (<https://passt.top>).
pub const PASST: &str = "passt";
/// `passt` is ready after some milliseconds.
const START_DEADLINE: Duration = Duration::from_secs(20);
const LOOK_AGAIN: Duration = Duration::from_millis(5);
/// What is read of passt's files: a number, and its last words.
const SHORT_BYTES: u64 = 4096;
/// The network's end of the cable has this address at every host. QEMU gives the guest's end the address
/// 52:54:00:12:34:56 by default.
const GATEWAY_MAC: &str = "52:55:0a:00:02:02";
/// Files of a VM's `passt`: it has a socket for each connection, and for each port from which the guest sends UDP.
const FILES: u32 = 2048 + 256;

impl UserNetworks {
    /// Starts a VM's `passt`, connected to the socket `at`. `forward` leads to the guest's port 22.
    pub async fn begin(
        &self,
        (at, ready, log): (&Path, &Path, &Path),
        own_ip: &str,
        user: Option<QemuUser>,
        forward: Option<SocketAddrV4>,
    ) -> Result<Process, Problem> {
        const WHAT: &str = "can't connect a network card";
        let networks = reach(at).await.map_err(|error| Problem::internal(WHAT, error))?;
        // One of an earlier start says nothing.
        for old in [ready, log] {
            match std::fs::remove_file(old) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Problem::internal(WHAT, error));
                }
                _ => {}
            }
        }
        let interface = interface_of(own_ip);
        let own = arguments(networks.as_raw_fd(), ready, interface.as_deref(), forward);
        let limited = [format!("--nofile={FILES}:{FILES}"), PASST.to_owned()];
        let arguments: Vec<String> = limited.into_iter().chain(own).collect();
        let cards = self.cards().map_err(|why| Problem::unsupported(WHAT, why))?;
        let socket = Some(networks.as_fd());
        let started = process::start("prlimit", &arguments, user, log, socket, None);
        drop(networks);
        let (process, _exit) = started?;
        let deadline = Instant::now() + START_DEADLINE;
        // QEMU's user can write there, and could make them as long as it likes.
        while !files::tail(ready, SHORT_BYTES).is_ok_and(|pid| pid.ends_with(b"\n")) {
            if process.has_ended() {
                let said = files::tail(log, SHORT_BYTES).unwrap_or_default();
                let said = String::from_utf8_lossy(&said);
                let last = said.lines().next_back().unwrap_or("it said nothing").to_owned();
                return Err(Problem::unsupported(WHAT, format!("passt ended: {last}"))
                    .next("passt needs an interface with an address on this host"));
            }
            if Instant::now() > deadline {
                process.kill().await?;
                let limit_s = START_DEADLINE.as_secs();
                let why = format!("passt was not ready within {limit_s} s");
                return Err(Problem::unavailable(WHAT, why));
            }
            sleep(LOOK_AGAIN).await;
        }
        if let Err(error) = ports::enter(&cards, &process) {
            process.kill().await?;
            let why = format!("passt can't be put into {}: {error}", cards.display());
            return Err(Problem::unsupported(WHAT, why));
        }
        Ok(process)
    }
}

fn arguments(
    socket: i32,
    ready: &Path,
    interface: Option<&str>,
    forward: Option<SocketAddrV4>,
) -> Vec<String> {
    let network = USER_NETWORK;
    let mut line: Vec<String> = [
        // No address of the host is mapped into the network.
        "--foreground",
        "--quiet",
        "--ipv4-only",
        "--no-map-gw",
        "--mac-addr",
        GATEWAY_MAC,
    ]
    .map(str::to_owned)
    .into();
    let mut add = |option: &str, value: String| line.extend([option.to_owned(), value]);
    add("--address", network.address.to_string());
    add("--netmask", network.prefix_bits.to_string());
    add("--gateway", network.gateway.to_string());
    add("--dns-forward", network.dns.to_string());
    add("--pid", ready.display().to_string());
    if let Some(interface) = interface {
        add("--interface", interface.to_owned());
    }
    if let Some(at) = forward {
        add("--tcp-ports", format!("{}/{}:{SSH_PORT}", at.ip(), at.port()));
    }
    add("--fd", socket.to_string());
    line
}

/// The interface through which this host's own network is reached. Without it `passt` takes the one of the default
/// route, which a host need not have.
fn interface_of(own_ip: &str) -> Option<String> {
    let routes = std::fs::read_to_string("/proc/net/route").ok()?;
    let own = own_ip.parse().ok().filter(|ip: &Ipv4Addr| !ip.is_loopback())?;
    interface_to(own, &routes)
}

/// The table has a line for each route: the interface's name, the destination, six other fields, and the mask;
/// addresses in hexadecimal digits, in the machine's order of bytes.
fn interface_to(own: Ipv4Addr, routes: &str) -> Option<String> {
    let own = u32::from_ne_bytes(own.octets());
    let found = routes.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| u32::from_str_radix(fields.get(at)?, 16).ok();
        let (to, mask) = (number(1)?, number(7)?);
        let name = (*fields.first()?).to_owned();
        (mask != 0 && own & mask == to).then(|| (mask.count_ones(), name))
    });
    found.max_by_key(|(bits, _)| *bits).map(|(_, name)| name)
}

/// The network's end of the cable. A QEMU that takes no connection does not hold this up.
async fn reach(at: &Path) -> std::io::Result<UnixStream> {
    let stream = tokio::net::UnixStream::connect(at).await?.into_std()?;
    stream.set_nonblocking(false)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTES: &str = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
         eth0\t00000000\t0102000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
         eth0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n\
         br0\t0002000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";

    #[test]
    fn the_interface_is_the_one_of_the_nearest_network() {
        let to = |ip: [u8; 4]| interface_to(ip.into(), ROUTES);
        assert_eq!(to([10, 0, 2, 7]).as_deref(), Some("br0"));
        assert_eq!(to([10, 9, 2, 7]).as_deref(), Some("eth0"));
        assert_eq!(to([192, 0, 2, 7]), None, "the default route is passt's own choice");
        assert_eq!(interface_to([10, 0, 2, 7].into(), "Iface\nbroken\n"), None);
    }

    #[test]
    fn no_address_of_the_host_is_mapped_into_the_network() {
        let line = arguments(7, Path::new("/run/p"), Some("br0"), None).join(" ");
        assert!(line.contains("--no-map-gw"), "{line}");
        assert!(line.ends_with("--interface br0 --fd 7"), "{line}");
    }
}
