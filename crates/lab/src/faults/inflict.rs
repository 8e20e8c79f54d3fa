//! Causes a fault, and ends it again.

use std::time::Duration;

use nix::sys::signal::Signal;
use perigee_model::{HostId, Problem, VmId};

use super::disk;
use super::table::Fault;
use crate::process::{Process, wait_until};
use crate::up::Lab;
use crate::wan::{self, Change, LinkSettings, Rate};

/// How long it may take until a killed program runs again.
const RESTART_MAX: Duration = Duration::from_secs(60);
const LOSS_PPM: u32 = 10_000;
const SLOW_BITS_PER_S: u64 = 1_000_000;

/// The hosts of a cell, and its VM if it has one.
#[derive(Debug, Clone)]
pub struct Ends {
    pub old: HostId,
    pub new: HostId,
    pub vm: Option<VmId>,
}

/// Causes the fault and ends it. Returns when all programs run again.
///
/// # Errors
/// The lab can't be changed.
pub async fn inflict(lab: &Lab, fault: Fault, ends: &Ends) -> Result<(), Problem> {
    let Ends { old, new, .. } = ends;
    match fault {
        Fault::WanDown1s | Fault::WanDown10s | Fault::WanDown60s => {
            let down = Change { down: Some(true), ..Change::default() };
            change_wan(lab, down, fault.lasts()).await
        }
        Fault::WanLoss => {
            let loss = Change { loss_ppm: Some(LOSS_PPM), ..Change::default() };
            change_wan(lab, loss, fault.lasts()).await
        }
        Fault::WanSlow => {
            let rate = Some(Rate(Some(SLOW_BITS_PER_S)));
            change_wan(lab, Change { rate, ..Change::default() }, fault.lasts()).await
        }
        Fault::KillOldVolume => kill(lab, Some(old), "volume").await,
        Fault::KillNewVolume => kill(lab, Some(new), "volume").await,
        Fault::KillOldAgent => kill(lab, Some(old), "agent").await,
        Fault::KillNewAgent => kill(lab, Some(new), "agent").await,
        Fault::KillController => kill(lab, None, "controller").await,
        Fault::KillNewQemu => kill_qemu(lab, ends),
        Fault::FullOldPool => full(lab, old, fault.lasts()).await,
        Fault::FullNewPool => full(lab, new, fault.lasts()).await,
        Fault::OldDiskFails => failing_disk(lab, old, fault.lasts()).await,
        Fault::NewDiskFails => failing_disk(lab, new, fault.lasts()).await,
    }
}

/// Changes every link of the WAN for a while. All have the same settings.
async fn change_wan(lab: &Lab, change: Change, lasts: Duration) -> Result<(), Problem> {
    let Some(link) = lab.links()?.into_iter().next() else { return Ok(()) };
    wan::set_all(lab, change).await?;
    tokio::time::sleep(lasts).await;
    set_wan(lab, link.settings).await
}

/// Gives every link these settings.
///
/// # Errors
/// The WAN can't be changed.
pub async fn set_wan(lab: &Lab, settings: LinkSettings) -> Result<(), Problem> {
    let LinkSettings { rtt_us, rate, loss_ppm, down } = settings;
    let all = Change {
        rtt_us: Some(rtt_us),
        rate: Some(rate),
        loss_ppm: Some(loss_ppm),
        down: Some(down),
    };
    wan::set_all(lab, all).await
}

/// Kills a daemon of a host, or the controller, with SIGKILL and waits until its supervisor has started it again.
///
/// # Errors
/// The daemon does not run, or is not started again in time.
pub async fn kill(lab: &Lab, host: Option<&HostId>, daemon: &str) -> Result<(), Problem> {
    let find = || match host {
        Some(host) => lab.host_pid(host, daemon),
        None => lab.controller_pid(),
    };
    let old = find()?;
    if let Some(process) = Process::of(old) {
        process.signal(Signal::SIGKILL)?;
    }
    if wait_until(RESTART_MAX, || find().is_ok_and(|pid| pid != old)).await {
        return Ok(());
    }
    let why = format!("its supervisor has not started it again for {} s", RESTART_MAX.as_secs());
    Err(Problem::unavailable(format!("can't go on after the kill of the {daemon}"), why))
}

/// The process of a VM at a host, if there is one.
pub fn qemu_of(lab: &Lab, host: &HostId, vm: &VmId) -> Option<Process> {
    let file = lab.lab_dir().host(host).join(format!("agent/vms/{vm}/run/qemu.pid"));
    Process::of(std::fs::read_to_string(file).ok()?.trim().parse().ok()?)
}

fn kill_qemu(lab: &Lab, ends: &Ends) -> Result<(), Problem> {
    let qemu = ends.vm.as_ref().and_then(|vm| qemu_of(lab, &ends.new, vm));
    let qemu = qemu.ok_or_else(|| {
        Problem::not_found("can't kill the destination's QEMU", "it does not run at this moment")
    })?;
    qemu.signal(Signal::SIGKILL)
}

async fn full(lab: &Lab, host: &HostId, lasts: Duration) -> Result<(), Problem> {
    disk::fill(lab, host).await?;
    tokio::time::sleep(lasts).await;
    disk::make_room(lab, host)
}

async fn failing_disk(lab: &Lab, host: &HostId, lasts: Duration) -> Result<(), Problem> {
    disk::fail(lab, host)?;
    tokio::time::sleep(lasts).await;
    disk::heal(lab, host).await
}
