//! The agent: runs a host's virtual machines with QEMU and reports their state.
//!
//! VMs outlive the agent. Everything that it must know after a restart is in its state directory and in
//! the QEMU processes; [`vms::Vms::adopt`] matches the two. Each VM has one owner task ([`vm::owner`]),
//! which alone acts on its QEMU. All other code sends it requests and reads what it publishes.
//!
//! The agent never reads or writes a disk: QEMU does, through the volume server of this host. The agent
//! changes a volume's writer epoch only in the pause of a migration.

mod accelerator;
mod api;
mod callers;
mod certificate;
mod cgroup;
mod changes;
mod command;
mod confinement;
mod files;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod guest;
mod host;
mod lines;
mod link;
mod metrics;
mod networks;
mod process;
mod qmp;
mod register;
mod sockets;
mod users;
mod vm;
mod vms;

use std::path::PathBuf;
use std::sync::Arc;

use futures_util::future::{BoxFuture, FutureExt as _};
use perigee_http::terms::obey;
use perigee_http::{Listen, Network};
use perigee_model::network::BridgeName;
use perigee_model::vm::HostAddresses;
use perigee_model::{HostId, Problem, SiteId};

pub use users::VmUids;
pub use vm::network::GuestsReach;

/// The configuration of an agent.
#[derive(Debug, Clone)]
pub struct Config {
    pub host: HostId,
    pub site: SiteId,
    pub listen: Vec<Listen>,
    /// The state directory. QEMU's users must be able to enter the directories above it.
    pub state: PathBuf,
    /// The users of VMs, one for each.
    pub vm_uids: VmUids,
    /// What VMs in user networks reach beside the internet's addresses.
    pub guests_reach: Vec<GuestsReach>,
    /// Addresses of this host that are on none of its interfaces.
    pub outside_addresses: Vec<std::net::Ipv4Addr>,
    /// The bridges of this host in which VMs may have cards.
    pub bridges: Vec<BridgeName>,
    /// Control API of this host's volume server: `unix:PATH`.
    pub volume_control: String,
    /// The same control API's address for other hosts.
    pub volume_url: String,
    pub nbd_addr: String,
    /// `https://IP:PORT`, or `http://IP:PORT` without TLS; incoming migrations listen on the same IP.
    pub agent_url: String,
    pub controller: Option<String>,
    /// The kernel to boot once to find out whether KVM works; by default the newest `/boot/vmlinuz-*`.
    pub probe_kernel: Option<PathBuf>,
    /// The file with the id of this boot: [`perigee_http::boot_id`]. Hosts that share a kernel have one file each.
    pub boot_id: PathBuf,
    /// How it talks with the controller and the other hosts.
    pub network: Network,
}

/// Runs the agent until SIGTERM or SIGINT. VMs keep running. The future is boxed, so that it is compiled in this crate only.
///
/// # Errors
/// If the state directory can't be used, another agent uses it, QEMU is missing, or an address is in use.
pub fn run(config: Config) -> BoxFuture<'static, Result<(), Problem>> {
    until_stopped(config).boxed()
}

async fn until_stopped(config: Config) -> Result<(), Problem> {
    perigee_http::prepare_daemon();
    let stop = perigee_http::stopped()?;
    let (host, network, controller) =
        (config.host.clone(), config.network.clone(), config.controller.clone());
    tokio::select! {
        result = serve(config) => result,
        () = stop => {
            if let Some(url) = controller {
                let client = register::client(&url, &network, register::ANSWER_MAX);
                register::say_stop(client, &host).await;
            }
            Ok(())
        }
    }
}

/// Like [`run`], without the signals: until a listener fails or the future is dropped.
///
/// # Errors
/// As [`run`].
pub async fn serve(config: Config) -> Result<(), Problem> {
    let _lock = files::prepare_state(&config.state)?;
    let host = Arc::new(host::Host::find_out(&config).await?);
    let vms = vms::Vms::adopt(host.clone()).await?;
    let addresses = || HostAddresses {
        site: config.site.clone(),
        agent_url: config.agent_url.clone(),
        volume_url: config.volume_url.clone(),
        nbd_addr: config.nbd_addr.clone(),
        // It may become known later.
        tunnel: host.networks.tunnel(),
    };
    let heartbeat = async {
        match &config.controller {
            Some(url) => {
                let client = register::client(url, &config.network, register::ANSWER_MAX);
                register::keep_registered(client, &config.host, addresses).await
            }
            None => std::future::pending().await,
        }
    };
    let sockets = sockets::keep(host.clone(), vms.clone());
    let filter = vm::network::keep_filtered(host.clone(), vms.clone());
    let networks = networks::keep(host.clone(), vms.clone());
    let router = obey(api::router(vms), Arc::clone(&host.terms));
    tracing::info!(host = %config.host, accelerator = ?host.accelerator.kind, "the agent is ready");
    tokio::select! {
        result = perigee_http::serve(router, &config.listen, &config.network) => result,
        problem = heartbeat => Err(problem),
        () = sockets => Ok(()),
        () = filter => Ok(()),
        () = networks => Ok(()),
        () = certificate::keep(&config) => Ok(()),
    }
}
