//! Looks for leftovers of jobs on the hosts. After the last job there must be none.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use perigee_http::Client;
use perigee_model::job::{ClusterVolume, Vm};
use perigee_model::volume::{Attachment, VolumeInfo};
use perigee_model::{HostId, Problem, VolumeName};

use crate::command::run;
use crate::process::signal_pid;
use crate::up::Lab;

const QUICK: Duration = Duration::from_secs(20);

/// Waits until no leftovers exist, for at most `patience`. Returns a list of the leftovers for people.
///
/// # Errors
/// A daemon does not answer at the end, so the leftovers are not known.
pub async fn wait_until_nothing(lab: &Lab, patience: Duration) -> Result<Vec<String>, Problem> {
    let end = Instant::now() + patience;
    loop {
        match look(lab).await {
            Ok(left) if left.is_empty() => return Ok(left),
            Ok(left) if Instant::now() >= end => return Ok(left),
            Err(problem) if Instant::now() >= end => return Err(problem),
            Ok(_) | Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
        }
    }
}

async fn look(lab: &Lab) -> Result<Vec<String>, Problem> {
    let client = lab.client(QUICK)?;
    let mut left = Vec::new();
    let vms: Vec<Vm> = client.get("/v1/vms").await?;
    left.extend(vms.iter().map(|vm| format!("VM {} on {:?}", vm.id, vm.host)));
    let kept: Vec<ClusterVolume> = client.get("/v1/volumes").await?;
    for (_, host) in lab.definition.hosts() {
        let home = lab.dir().join("hosts").join(host.as_str());
        let control = home.join("volume-control.sock");
        let server = Client::new(&format!("unix:{}", control.display()), QUICK)?;
        let volumes: Vec<VolumeInfo> = server.get("/v1/volumes").await?;
        let extra = volumes.iter().filter(|volume| {
            !kept.iter().any(|kept| kept.name == volume.name && kept.home == *host)
        });
        left.extend(extra.map(|volume| format!("volume {} on {host}", volume.name)));
        let attached: Vec<Attachment> = server.get("/v1/attachments").await?;
        left.extend(attached.iter().map(|a| format!("attachment {} on {host}", a.volume)));
        left.extend(directories(&home.join("agent/vms"))?.map(|vm| format!("{vm} on {host}")));
        left.extend(qemus(lab, host).await?);
    }
    Ok(left)
}

/// What other hosts than its own still have of a running VM.
///
/// # Errors
/// A daemon does not answer.
pub async fn elsewhere(lab: &Lab, vm: &Vm) -> Result<Vec<String>, Problem> {
    let mut left = Vec::new();
    let is_own = |name: &VolumeName| vm.volumes.iter().any(|own| own.volume == *name);
    let others = lab.definition.hosts().filter(|(_, host)| Some(*host) != vm.host.as_ref());
    for (_, host) in others {
        let home = lab.lab_dir().host(host);
        let control = home.join("volume-control.sock");
        let server = Client::new(&format!("unix:{}", control.display()), QUICK)?;
        let volumes: Vec<VolumeInfo> = server.get("/v1/volumes").await?;
        let not_at_home = |volume: &&VolumeInfo| {
            !vm.volumes.iter().any(|own| own.volume == volume.name && own.home == *host)
        };
        let own = volumes.iter().filter(|volume| is_own(&volume.name));
        left.extend(
            own.filter(not_at_home).map(|volume| format!("volume {} on {host}", volume.name)),
        );
        let attached: Vec<Attachment> = server.get("/v1/attachments").await?;
        let own = attached.iter().filter(|attached| is_own(&attached.volume));
        left.extend(own.map(|attached| format!("attachment {} on {host}", attached.volume)));
        left.extend(directories(&home.join("agent/vms"))?.map(|vm| format!("{vm} on {host}")));
        left.extend(qemus(lab, host).await?);
    }
    Ok(left)
}

fn directories(at: &std::path::Path) -> Result<impl Iterator<Item = String>, Problem> {
    let entries = std::fs::read_dir(at)
        .map_err(|e| Problem::internal(format!("can't read {}", at.display()), e))?;
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    Ok(names.map(|name| format!("the directory of VM {name}")))
}

async fn qemus(lab: &Lab, host: &HostId) -> Result<Vec<String>, Problem> {
    let name = |pid: &i32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let pids = processes(lab, host).await?.into_iter();
    let qemu = pids.filter(|pid| name(pid).starts_with("qemu-system"));
    Ok(qemu.map(|pid| format!("QEMU (process {pid}) on {host}")).collect())
}

/// Everything that runs on a host.
pub async fn processes(lab: &Lab, host: &HostId) -> Result<Vec<i32>, Problem> {
    let namespace = lab.definition.host_namespace(host);
    let pids = run("ip", &["netns", "pids", &namespace]).await?;
    Ok(pids.lines().filter_map(|pid| pid.trim().parse().ok()).collect())
}

/// Kills a host's daemons and QEMUs at once. The supervisor starts the daemons again, and the host has another boot id
/// then.
///
/// # Errors
/// If its processes can't be found or ended.
pub async fn cut_power(lab: &Lab, host: &HostId) -> Result<(), Problem> {
    let mut pids = processes(lab, host).await?;
    lab.lab_dir().boot_anew(host)?;
    // The agent comes first: it must not see that the others end.
    if let Ok(agent) = lab.host_pid(host, "agent") {
        pids.insert(0, agent);
    }
    for pid in pids {
        signal_pid(pid, Signal::SIGKILL)?;
    }
    Ok(())
}
