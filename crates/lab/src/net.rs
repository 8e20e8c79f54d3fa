//! A lab's network: namespaces, bridges, and a WAN with delay between the sites.
//!
//! ```text
//! pg-ID-home1   pg-ID-ctl            pg-ID-cloud1
//!    eth0          eth0                 eth0
//!      \ veth      / veth                 | veth
//!   br0 in pg-ID-site-home       br0 in pg-ID-site-cloud
//!          |                              |
//!        wan0 = vde_switch == wirefilter == vde_switch = wan0
//!                          (rtt/2 each way)
//! ```
//!
//! One subnet spans all sites. `wirefilter` is used because a kernel need not have netem. All
//! processes run inside the sites' namespaces, so that taking a namespace down finds them.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use perigee_model::Problem;
use tokio::process::{Child, Command};

use crate::command::{cannot_start, run};
use crate::definition::{Definition, HUB};
use crate::process::wait_until;
use crate::state::LabDir;

/// Bytes that may wait on a wire: many times what fits into the WAN's round trip.
const WIRE_QUEUE_BYTES: u32 = 64 << 20;

/// Makes everything and gives back the switches and wires by name. They outlive their handles.
///
/// # Errors
/// Names the first step that failed; what was made until then stays for [`crate::down()`].
pub async fn create(
    definition: &Definition,
    dir: &LabDir,
) -> Result<Vec<(String, Child)>, Problem> {
    let fifo = dir.path().join("net/stdin");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU)
        .map_err(|e| Problem::internal(format!("make {}", fifo.display()), e))?;
    let wires = definition.wires();
    let mut processes = Vec::new();
    for (index, site) in definition.sites.iter().enumerate() {
        let namespace = definition.site_namespace(&site.name);
        add_namespace(&namespace).await?;
        run("ip", &["-n", &namespace, "link", "add", "br0", "type", "bridge"]).await?;
        run("ip", &["-n", &namespace, "link", "set", "br0", "up"]).await?;
        for (port, host) in site.hosts.iter().enumerate() {
            let address = definition
                .host_address(host)
                .ok_or_else(|| Problem::internal(format!("host {host}"), "it has no address"))?;
            let host_namespace = definition.host_namespace(host);
            attach(&namespace, &format!("port{port}"), &host_namespace, address).await?;
        }
        if index == 0 {
            let address = definition.controller_address();
            attach(&namespace, "ctl", &definition.controller_namespace(), address).await?;
        }
        if !wires.is_empty() {
            let name = site.name.as_str();
            let switch = start_switch(&namespace, dir, name, true).await?;
            processes.push((format!("switch {name}"), switch));
            run("ip", &["-n", &namespace, "link", "set", "wan0", "master", "br0", "up"]).await?;
        }
    }
    if let Some(first) = definition.sites.first() {
        let namespace = definition.site_namespace(&first.name);
        if wires.iter().any(|w| w.right == HUB) {
            let switch = start_switch(&namespace, dir, HUB, false).await?;
            processes.push((format!("switch {HUB}"), switch));
        }
        for wire in &wires {
            let ends = format!(
                "{}:{}",
                dir.switch(&wire.left).display(),
                dir.switch(&wire.right).display()
            );
            let (delay, queue) = (wire.delay_ms.to_string(), WIRE_QUEUE_BYTES.to_string());
            let args = ["wirefilter", "-v", &ends, "-d", &delay, "-c", &queue];
            let child = start(&namespace, &args, dir, &format!("wire-{}", wire.left))?;
            processes.push((format!("wire {}-{}", wire.left, wire.right), child));
        }
    }
    Ok(processes)
}

/// A command that runs in a namespace. `nsenter` becomes the program itself, so its pid is the
/// program's, and other than `ip netns exec` it leaves `/sys` (cgroups) as it is.
pub fn in_namespace(namespace: &str, program: &Path) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net=/run/netns/{namespace}")).arg("--").arg(program);
    command
}

pub(crate) async fn add_namespace(namespace: &str) -> Result<(), Problem> {
    run("ip", &["netns", "add", namespace]).await?;
    run("ip", &["-n", namespace, "link", "set", "lo", "up"]).await.map(drop)
}

/// Makes a host's namespace and a cable from it to its site's bridge.
async fn attach(
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
    run("ip", &["-n", host, "link", "set", "eth0", "up"]).await.map(drop)
}

async fn start_switch(
    namespace: &str,
    dir: &LabDir,
    name: &str,
    tap: bool,
) -> Result<Child, Problem> {
    let socket = dir.switch(name);
    let socket_text = socket.to_string_lossy();
    let mut args = vec!["vde_switch", "-f", "/dev/null", "-n", "256", "-s", &socket_text];
    if tap {
        args.extend(["-tap", "wan0"]);
    }
    let child = start(namespace, &args, dir, &format!("switch-{name}"))?;
    let control = socket.join("ctl");
    if wait_until(Duration::from_secs(5), || control.exists()).await {
        return Ok(child);
    }
    let log = dir.path().join(format!("net/switch-{name}.log"));
    let said = std::fs::read_to_string(&log).unwrap_or_default();
    Err(Problem::internal(
        format!("start switch {name}"),
        format!("no {} within 5 s; it said: {}", control.display(), said.trim()),
    )
    .next("the lab needs root and /dev/net/tun"))
}

/// Switches and wires end when their stdin does. A FIFO open both ways never ends, also not when
/// the supervisor is killed.
fn start(namespace: &str, args: &[&str], dir: &LabDir, log: &str) -> Result<Child, Problem> {
    let fail =
        |what: &Path, e: std::io::Error| Problem::internal(format!("open {}", what.display()), e);
    let fifo = dir.path().join("net/stdin");
    let stdin =
        std::fs::File::options().read(true).write(true).open(&fifo).map_err(|e| fail(&fifo, e))?;
    let log = dir.path().join(format!("net/{log}.log"));
    let out = std::fs::File::create(&log).map_err(|e| fail(&log, e))?;
    let err = out.try_clone().map_err(|e| fail(&log, e))?;
    in_namespace(namespace, Path::new(args[0]))
        .args(&args[1..])
        .stdin(stdin)
        .stdout(out)
        .stderr(Stdio::from(err))
        .spawn()
        .map_err(|e| cannot_start("nsenter", &e))
}
