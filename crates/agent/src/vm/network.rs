//! The network card of one VM. One in a network of its tenant, or in a bridge of the operator, is a TAP, which
//! [`crate::networks`] makes. A card in a user network is connected to a `passt` of its own ([`crate::user_networks`]), which is
//! started again when it has ended ([`mod@keep`]).

mod keep;
mod patience;

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;

use nix::unistd::Uid;
use perigee_model::vm::{MigrationPhase, VmNetwork, VmStatus};
use perigee_model::{HostId, Problem, ProblemKind};
use tokio::net::TcpStream;

pub use keep::keep;

use super::Vm;
use crate::files::{listen, write_json};
use crate::host::Host;
use crate::networks::tools::was_late;
use crate::networks::{DIAL_MAX, SSH_PORT};
use crate::process::{Process, QemuUser};

/// A card that is connected.
pub struct Cable {
    /// QEMU's end: a TAP, or where it waits for its `passt`.
    pub qemus: OwnedFd,
    /// The network, if it is the VM's own.
    pub passt: Option<Process>,
}

impl Vm {
    /// In the pause of a move from here or to here frames for the VM wait at this host.
    pub fn send_frames_to(&self, host: HostId) {
        self.observed(|seen| seen.frames_to = Some(host));
    }

    /// The move has failed.
    pub fn keep_frames(&self) {
        self.observed(|seen| seen.frames_to = None);
    }

    /// The host to which frames for the VM go, whatever the controller has said last; `None`: to where it says. `own`: this host.
    pub fn frames_go_to(&self, own: &HostId) -> Option<HostId> {
        self.observed(|seen| {
            let phase = seen.migration.as_ref().map(|migration| migration.phase);
            let is_leaving = phase == Some(MigrationPhase::Switching);
            match seen.status() == VmStatus::Running && !is_leaving {
                true => Some(own.clone()),
                false => seen.frames_to.clone(),
            }
        })
    }
}

/// Connects the VM's card, if it has one.
///
/// # Errors
/// `Unsupported` if this host can't, `Unavailable` if it can't yet.
pub async fn connect(vm: &Vm, host: &Host) -> Result<Option<Cable>, Problem> {
    match &vm.spec.network {
        VmNetwork::None => return Ok(None),
        VmNetwork::User => {}
        VmNetwork::Cluster(card) => {
            let qemus = host.networks.connect(vm.id(), card).await?;
            return Ok(Some(Cable { qemus, passt: None }));
        }
        VmNetwork::Bridge(card) => {
            let qemus = host.bridged.connect(vm.id(), card).await?;
            return Ok(Some(Cable { qemus, passt: None }));
        }
    }
    let qemus = listen(&vm.dir.network_socket())
        .map_err(|error| Problem::internal(cannot_connect(vm), error))?;
    let passt = begin_passt(vm, host).await?;
    Ok(Some(Cable { qemus: qemus.into(), passt: Some(passt) }))
}

fn cannot_connect(vm: &Vm) -> String {
    format!("can't connect the network card of the VM {}", vm.id())
}

/// Starts the `passt` of a VM whose QEMU waits for it, or will.
async fn begin_passt(vm: &Vm, host: &Host) -> Result<Process, Problem> {
    let what = || cannot_connect(vm);
    let networks = &host.user_networks;
    networks.cards().map_err(|why| Problem::unsupported(what(), why))?;
    let hosts = host.networks.hosts().ok_or_else(|| {
        let why = "the controller has not said yet which addresses the cluster's hosts have, which guests must not reach";
        Problem::unavailable(what(), why).next("it says them within a minute")
    })?;
    // Somebody may have set up the host's firewall anew meanwhile.
    let filtered = networks.filter(Some(&hosts)).await;
    filtered.map_err(|why| match was_late(&why) {
        true => Problem::unavailable(what(), why),
        false => Problem::unsupported(what(), why),
    })?;
    let user = host.user_of(&vm.dir)?;
    let user = user.map(|user| QemuUser { gid: networks.group(), ..user });
    let forward = user.as_ref().map(|user| door_of(user.uid));
    let (at, ready, log) = (vm.dir.network_socket(), vm.dir.network_pid(), vm.dir.network_log());
    let begin = async |forward| {
        let begun = networks.begin((&at, &ready, &log), &host.ip, user, forward).await;
        begun.map_err(|problem| Problem { what: what(), ..problem })
    };
    let passt = match begin(forward).await {
        // Another program has the port: the VM is there all the same, and `vm ssh` is not.
        Err(problem) if problem.kind == ProblemKind::Unsupported && forward.is_some() => {
            tracing::warn!(%problem, "the VM {} is not reached by `vm ssh`", vm.id());
            begin(None).await?
        }
        begun => begun?,
    };
    write_json(&vm.dir.network_process(), &passt)?;
    Ok(passt)
}

/// Where this host reaches port 22 of a guest: each VM has a loopback address of its own, as it has a user.
fn door_of(uid: Uid) -> SocketAddrV4 {
    /// No program has it by default.
    const PORT: u16 = 22_022;
    let [_, a, b, c] = uid.as_raw().to_be_bytes();
    SocketAddrV4::new(Ipv4Addr::new(127, a, b, c), PORT)
}

/// Connects to port 22 of a guest in a user network.
///
/// # Errors
/// `Unsupported` if it is in none, `Unavailable` if nothing listens there.
pub async fn dial(vm: &Vm, host: &Host) -> Result<TcpStream, Problem> {
    let what = || format!("can't reach port {SSH_PORT} of VM {}", vm.id());
    let user = host.user_of(&vm.dir)?.filter(|_| vm.spec.network == VmNetwork::User);
    let Some(user) = user else {
        return Err(Problem::unsupported(what(), "it has no card in a user network"));
    };
    let connected = tokio::time::timeout(DIAL_MAX, TcpStream::connect(door_of(user.uid))).await;
    let connected = connected.map_err(|error| Problem::unavailable(what(), error))?;
    connected.map_err(|error| {
        Problem::unavailable(what(), error).next("is an SSH server running in the guest?")
    })
}
