//! `perigee boot check`: finds what is missing on the network for machines to boot.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use perigee_http::Client;
use perigee_model::Problem;
use perigee_model::client::{ClientInfo, Over};
use serde::Serialize;
use tokio::net::TcpStream;
use tokio::process::Command;

use crate::config::{Config, Dhcp, Interface};
use crate::dhcp;
use crate::dnsmasq::{BIOS_IPXE, EFI_IPXE, PROGRAM, cannot_start};

const DHCP_PATIENCE: Duration = Duration::from_secs(3);
const CONNECT_MAX: Duration = Duration::from_secs(3);
const PROGRAM_MAX: Duration = Duration::from_secs(10);

/// The result of one check.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// The condition that was checked.
    pub what: String,
    pub ok: bool,
    /// What was found.
    pub found: String,
    /// What to do next; empty if the condition is met.
    pub next: String,
}

fn good(what: &str, found: impl ToString) -> Finding {
    Finding { what: what.to_owned(), ok: true, found: found.to_string(), next: String::new() }
}

fn bad(what: &str, found: impl ToString, next: &str) -> Finding {
    Finding { what: what.to_owned(), ok: false, found: found.to_string(), next: next.to_owned() }
}

fn wrong(what: &str, problem: Problem) -> Finding {
    let found = format!("{}: {}", problem.what, problem.why);
    Finding { what: what.to_owned(), ok: false, found, next: problem.next }
}

/// Makes all checks, even after some have failed.
pub async fn check(config: &Config) -> Vec<Finding> {
    let mut findings = vec![program().await, ipxe(&config.ipxe)];
    let clients = clients(config).await;
    let interface = match config.interface() {
        Ok(interface) if !interface.is_up => {
            let next = format!("ip link set {} up", interface.name);
            findings.push(bad("network card", format!("{} is down", interface.name), &next));
            Some(interface)
        }
        Ok(interface) => {
            let Interface { name, address, netmask, .. } = &interface;
            findings.push(good("network card", format!("{name}: {address}, {netmask}")));
            Some(interface)
        }
        Err(problem) => {
            findings.push(wrong("network card", problem));
            None
        }
    };
    if let Some(interface) = interface {
        let serves = http(config, &interface, &mut findings).await;
        if !serves {
            findings.extend(ports(config, &interface));
        }
        findings.push(dhcp_servers(config, &interface).await);
        let wants = |over| {
            let bound = clients.as_ref().is_ok_and(|clients| {
                clients.iter().any(|c| c.binding.as_ref().is_some_and(|b| b.over == over))
            });
            bound || clients.is_err()
        };
        if wants(Over::Iscsi) {
            let (address, port) = (interface.address, config.iscsi_port);
            let next = format!("perigee volume serve --insecure --iscsi {address}:{port}");
            findings.push(reachable("iSCSI", interface.address, config.iscsi_port, &next).await);
        }
        if wants(Over::Nbd) {
            let (address, port) = (interface.address, config.nbd_port);
            let next = format!("perigee volume serve --insecure --nbd {address}:{port}");
            findings.push(reachable("NBD", interface.address, config.nbd_port, &next).await);
            findings.push(kernel(config));
        }
    }
    findings.push(match clients {
        Ok(clients) => told(&clients),
        Err(problem) => wrong("clients", problem),
    });
    findings
}

async fn program() -> Finding {
    let what = "dnsmasq is installed";
    let version =
        Command::new(PROGRAM).arg("--version").stdin(Stdio::null()).kill_on_drop(true).output();
    match tokio::time::timeout(PROGRAM_MAX, version).await {
        Ok(Ok(output)) => {
            let said = String::from_utf8_lossy(&output.stdout);
            good(what, said.lines().next().unwrap_or_default())
        }
        Ok(Err(error)) => wrong(what, cannot_start(&error)),
        Err(_) => {
            bad(what, format!("it did not end within {PROGRAM_MAX:?}"), "run dnsmasq --version")
        }
    }
}

/// Checks for iPXE, which machines need whose firmware is not iPXE itself.
fn ipxe(dir: &Path) -> Finding {
    let missing: Vec<_> =
        [BIOS_IPXE, EFI_IPXE].into_iter().filter(|file| !dir.join(file).exists()).collect();
    let what = "iPXE for machines that have only PXE";
    if missing.is_empty() {
        return good(what, dir.display());
    }
    let found = format!("{} has no {}", dir.display(), missing.join(" and no "));
    bad(what, found, "install it (apt-get install ipxe), or name its directory with --ipxe")
}

/// Returns whether a boot server is already running here.
async fn http(config: &Config, interface: &Interface, findings: &mut Vec<Finding>) -> bool {
    let address = format!("http://{}:{}", interface.address, config.http_port);
    let script = match Client::new(&address, CONNECT_MAX) {
        Ok(client) => client.get_bytes("/boot.ipxe").await,
        Err(problem) => Err(problem),
    };
    let serves = script.is_ok_and(|script| script.starts_with(b"#!ipxe"));
    if serves {
        findings.push(good("boot server", format!("runs at {address}")));
    }
    serves
}

/// Checks the ports on which the boot server will listen.
fn ports(config: &Config, interface: &Interface) -> Vec<Finding> {
    let any = Ipv4Addr::UNSPECIFIED;
    let http = SocketAddr::from((interface.address, config.http_port));
    let udp = |port: u16| UdpSocket::bind((any, port)).map(drop);
    let mut wanted = vec![
        (format!("HTTP, TCP port {}", config.http_port), TcpListener::bind(http).map(drop)),
        ("DHCP, UDP port 67".to_owned(), udp(67)),
        ("TFTP, UDP port 69".to_owned(), udp(69)),
    ];
    if config.dhcp == Dhcp::Proxy {
        wanted.push(("PXE, UDP port 4011".to_owned(), udp(4011)));
    }
    let finding = |(what, bound): (String, io::Result<()>)| match bound {
        Ok(()) => good(&what, "free"),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            bad(&what, error, "run this as root")
        }
        Err(error) => bad(&what, error, "stop the process that listens there; ss -lnptu shows it"),
    };
    wanted.into_iter().map(finding).collect()
}

async fn dhcp_servers(config: &Config, interface: &Interface) -> Finding {
    let what = match config.dhcp {
        Dhcp::Serve { .. } => "no other DHCP server",
        Dhcp::Proxy => "a DHCP server that gives out addresses",
    };
    let asked = interface.clone();
    let offers = tokio::task::spawn_blocking(move || dhcp::offers(&asked, DHCP_PATIENCE)).await;
    let offers = match offers {
        Ok(Ok(offers)) => offers,
        Ok(Err(error)) => {
            return bad(
                what,
                format!("can't ask: {error}"),
                "run this as root, and stop the DHCP client on this interface",
            );
        }
        Err(error) => return bad(what, error, "try again"),
    };
    let others: Vec<_> = offers
        .iter()
        .filter(|offer| offer.server != interface.address)
        .map(|offer| format!("{} offers {}", offer.server, offer.address))
        .collect();
    match (config.dhcp, &others[..]) {
        (Dhcp::Serve { .. }, []) => good(what, format!("none answered within {DHCP_PATIENCE:?}")),
        (Dhcp::Serve { .. }, found) => {
            bad(what, found.join(", "), "use --proxy-dhcp instead of a range, or stop that server")
        }
        (Dhcp::Proxy, []) => {
            let found = format!("none answered within {DHCP_PATIENCE:?}");
            bad(what, found, "give out addresses with --range instead of --proxy-dhcp")
        }
        (Dhcp::Proxy, found) => good(what, found.join(", ")),
    }
}

async fn reachable(name: &str, address: Ipv4Addr, port: u16, next: &str) -> Finding {
    let what = format!("{name} at {address}:{port}");
    match tokio::time::timeout(CONNECT_MAX, TcpStream::connect((address, port))).await {
        Ok(Ok(_)) => good(&what, "answers"),
        Ok(Err(error)) => bad(&what, error, next),
        Err(_) => bad(&what, format!("no answer within {CONNECT_MAX:?}"), next),
    }
}

fn kernel(config: &Config) -> Finding {
    let what = "kernel and initramfs for NBD";
    let next = "name them with --kernel and --initrd";
    match (&config.kernel, &config.initrd) {
        (Some(kernel), Some(initrd)) => {
            match [kernel, initrd].into_iter().find(|file| !file.exists()) {
                Some(missing) => bad(what, format!("there is no {}", missing.display()), next),
                None => good(what, format!("{}, {}", kernel.display(), initrd.display())),
            }
        }
        _ => bad(what, "not named", next),
    }
}

async fn clients(config: &Config) -> Result<Vec<ClientInfo>, Problem> {
    let client = Client::new(&config.control, CONNECT_MAX)?;
    client.hint("start it: perigee volume serve").get("/v1/clients").await
}

fn told(clients: &[ClientInfo]) -> Finding {
    let bound = clients.iter().filter(|c| c.binding.is_some() && c.mac.is_some()).count();
    let found = format!("{}, {bound} of them bound, with a network card", clients.len());
    if bound > 0 {
        return good("clients", found);
    }
    let next = "perigee client add NAME --mac MAC; perigee client bind NAME --image IMAGE";
    bad("clients", found, next)
}
