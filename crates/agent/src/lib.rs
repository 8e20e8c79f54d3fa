//! The agent: runs a host's virtual machines with QEMU and reports their state.
//!
//! VMs outlive the agent. Everything that it must know after a restart is in its state directory and in
//! the QEMU processes; [`vms::Vms::adopt`] matches the two. Each VM has one owner task ([`vm::owner`]),
//! which alone acts on its QEMU. All other code sends it requests and reads what it publishes.
//!
//! The agent never reads or writes a disk: QEMU does, through the volume server of this host. The agent
//! changes a volume's writer epoch only in the pause of a migration.
//!
//! Each top-level module is a room, and a room imports only from the floors below its own (`scripts/check-floors`):
//!
//! ```text
//! floors, from the ground up:
//! lines, programs, files, lease, notices
//! command, changes, link, load
//! confinement
//! process
//! accelerator, users, guest, qmp, cgroup
//! networks
//! user_networks
//! config, ended
//! host
//! vm, metrics, examine
//! callers, register
//! vms, certificate
//! api, upkeep
//! fuzzing
//! ```
//!
//! | question | file |
//! |---|---|
//! | What may be asked of a guest's agent, and what of its answers is kept? | `vm/guest_agent.rs`, `model/src/guest_agent.rs`; files: `controller/src/vms/guest_files.rs`; programs, and their ends: `controller/src/vms/exec.rs` |
//! | As which user does a VM's QEMU run? | `users.rs` |
//! | How does a VM's network card reach the network, and what does a guest reach? | `vm/network.rs`; in the guest: `guest/runner/src/network.rs` |
//! | Who starts a VM's `passt` again when it has ended, and how does QEMU take the new one? | `vm/network/keep.rs` |
//! | Who hears at once that somebody has removed the packet filter? | `networks/watch.rs` |
//! | Which endless tasks keep right what VMs need? | `upkeep.rs` |
//! | Which ports of its host has a guest in a user network? | `user_networks/ports.rs` |
//! | How does a card get into a bridge of the operator, and what may it send there? | `networks/bridged.rs`; which interfaces are there: `networks/interface.rs` |
//! | How does a VNC viewer reach a VM's screen? | `view` in `vm/console.rs`; at the viewer's machine: `perigee/src/commands/vnc.rs` |
//! | Which CPU does a guest see, and to which hosts can it move with it? | `arguments` in `command.rs`, `as_its_guest_sees` in `controller/src/planning.rs` |
//! | How does a frame get from one VM to another in a tenant's network? | `networks/plan.rs`; between hosts: `networks/tunnel.rs`; who mends what was removed: `networks/pass.rs` |
//! | What may a VM send in its tenant's network, and what does it reach through the gateway? | `networks/rules.rs`, `networks/gateway.rs` |
//! | When does a host forward packets? | `networks/forwarding.rs` |
//! | What is QEMU's command line? | `command.rs` |
//! | What boots a VM's disk, and which variables does its UEFI firmware have at first? | `firmware_file` in `command.rs`, `controller/src/guest/nvram.rs` |
//! | How does a VM get a TPM, and where is what it keeps? | `vm/tpm.rs`; which hosts can: `controller/src/tpm.rs` |
//! | How is a VM adopted after a restart? | `vms.rs`, `vm/owner.rs` |
//! | What ends a migration whose destination does not answer QEMU's handshake? | `vm/migrate/cut.rs` |
//! | Who ends strangers' connections to a QEMU that waits for a VM? | `vm/strangers.rs` |
//! | With which key is a VM's memory encrypted on its way, and who has it? | `vm/tls.rs` |
//! | What encrypts it? | `vm/tunnel.rs` |
//! | Which task acts on a QEMU, and what may a migration ask of it? | `vm/owner.rs`, `vm/owner/qemu_requests.rs` |
//! | Does KVM work here? | `accelerator.rs` |
//! | What does a machine lack for being a host? | `examine.rs`; what depends on other machines: `perigee/src/commands/doctor.rs` |
//! | What do its VMs send to each other, and what follows from it? | counted: `networks/gang_traffic.rs`; added up and remembered: `controller/src/planning/gang_traffic.rs`; which rank gets which host: `planner/src/arrange.rs`; how long a gang takes: `planner/src/gangs.rs` |
//! | How busy are the host and its VMs? | `load.rs`; who looks at the VMs: `upkeep/load.rs`; the units: `model/src/load.rs` |
//! | When does a rented host end itself? | `lease.rs`; who renews the lease: `commanded_ms` in `http/src/terms.rs` |
//! | How does a rented host hear that its provider takes it back? | `notices.rs`; what follows: `controller/src/drain/mod.rs` |
//! | How does the controller hear what changed on a host? | `changes.rs`, `controller/src/hosts/watching.rs` |

#![warn(missing_docs)]

mod accelerator;
mod api;
mod callers;
mod certificate;
mod cgroup;
mod changes;
mod command;
mod config;
mod confinement;
mod ended;
mod examine;
mod files;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod guest;
mod host;
mod lease;
mod lines;
mod link;
mod load;
mod metrics;
mod networks;
mod notices;
mod process;
mod programs;
mod qmp;
mod register;
mod upkeep;
mod user_networks;
mod users;
mod vm;
mod vms;

use std::path::Path;
use std::sync::Arc;

use futures_util::future::{BoxFuture, FutureExt as _};
use perigee_http::notify;
use perigee_http::terms::obey;
use perigee_model::Problem;
use perigee_model::vm::HostAddresses;

pub use config::{Config, Leased};
pub use examine::{Examined, examine};
pub use notices::METADATA;
pub use register::machine_goes_down;
pub use user_networks::GuestsReach;
pub use users::VmUids;
pub use vm::tunnel::carry_for_ever;

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

/// Looks at the lease of a rented host once, and ends the host if the lease is over: for an agent that can't run.
///
/// # Errors
/// If the state directory can't be used, or another agent uses it.
pub async fn look_at_lease(state: &Path, boot_id: &Path, leased: &Leased) -> Result<(), Problem> {
    let _lock = files::prepare_state(state)?;
    host::lease(state, boot_id, leased).await;
    Ok(())
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
    let load = upkeep::load::keep(host.clone(), vms.clone());
    let sockets = upkeep::sockets::keep(host.clone(), vms.clone());
    let filter = upkeep::user_networks::keep(host.clone(), vms.clone());
    let networks = upkeep::networks::keep(host.clone(), vms.clone());
    let lease = upkeep::lease::keep(host.clone());
    let notices = upkeep::notices::keep(host.clone());
    let router = obey(api::router(vms), Arc::clone(&host.terms));
    let bound = perigee_http::bind(router, &config.listen, &config.network).await?;
    notify::ready("");
    tracing::info!(host = %config.host, accelerator = ?host.accelerator.kind, "the agent is ready");
    tokio::select! {
        result = bound.serve() => result,
        problem = heartbeat => Err(problem),
        () = load => Ok(()),
        () = sockets => Ok(()),
        () = filter => Ok(()),
        () = networks => Ok(()),
        () = lease => Ok(()),
        () = notices => Ok(()),
        () = certificate::keep(&config) => Ok(()),
    }
}
