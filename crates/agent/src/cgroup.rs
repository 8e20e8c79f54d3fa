//! Limits for QEMU by cgroup v2, where the machine has its CPU and memory controllers.
//!
//! A group is named after QEMU's pid, which is unique on the machine, so several agents never use the same
//! group. It is removed with the VM.

use std::path::{Path, PathBuf};
use std::time::Duration;

use perigee_model::vm::VmSpec;

use crate::process::Process;

const ROOT: &str = "/sys/fs/cgroup";
const PERIOD_US: u64 = 100_000;
/// The part of one vCPU, and the largest one that the kernel takes (cgroup-v2.rst).
const VCPU_WEIGHT: u32 = 100;
const WEIGHT_MAX: u32 = 10_000;
/// For how long a group is removed whose processes are just ending.
const FORGET_TRIES: u32 = 50;
const FORGET_AGAIN: Duration = Duration::from_millis(10);
/// QEMU itself: translated code, device state, migration buffers.
const OVERHEAD_BYTES: u64 = 1 << 30;

/// Whether limits can be set; the error is a plain warning.
pub fn available() -> Result<(), String> {
    let path = Path::new(ROOT).join("cgroup.controllers");
    let text = std::fs::read_to_string(&path)
        .map_err(|_| format!("no cgroup v2 at {ROOT}: QEMU's CPU and memory are not limited"))?;
    let missing: Vec<_> = ["cpu", "memory"]
        .into_iter()
        .filter(|name| !text.split_whitespace().any(|w| w == *name))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!(
        "no cgroup v2 controllers: {} missing in {}: QEMU's CPU and memory are not limited",
        missing.join(" and "),
        path.display()
    ))
}

fn group(process: &Process) -> PathBuf {
    Path::new(ROOT).join("perigee").join(process.pid.to_string())
}

/// Puts QEMU into its own group, with what serves its network card and its TPM. They get one CPU more than the guest, for its I/O.
pub fn limit(process: &Process, servants: &[Process], spec: &VmSpec) -> std::io::Result<()> {
    let group = group(process);
    std::fs::write(Path::new(ROOT).join("cgroup.subtree_control"), "+cpu +memory")?;
    std::fs::create_dir_all(&group)?;
    std::fs::write(Path::new(ROOT).join("perigee/cgroup.subtree_control"), "+cpu +memory")?;
    std::fs::write(group.join("cpu.max"), cpu_max(spec.cpus))?;
    std::fs::write(group.join("memory.max"), (spec.memory_bytes + OVERHEAD_BYTES).to_string())?;
    join(process, process)?;
    servants.iter().try_for_each(|servant| join(process, servant))?;
    weigh(process, spec.machine.cpus_least.unwrap_or(spec.cpus))
}

/// Puts a process into QEMU's group.
pub fn join(qemu: &Process, process: &Process) -> std::io::Result<()> {
    std::fs::write(group(qemu).join("cgroup.procs"), process.pid.to_string())
}

/// Lets a QEMU with so many vCPUs use their time.
pub fn allow_cpus(process: &Process, cpus: u32) -> std::io::Result<()> {
    std::fs::write(group(process).join("cpu.max"), cpu_max(cpus))?;
    weigh(process, cpus)
}

/// While several want the CPUs, each gets the part of the vCPUs of which its guest always has the time.
fn weigh(process: &Process, vcpus: u32) -> std::io::Result<()> {
    let weight = vcpus.saturating_mul(VCPU_WEIGHT).min(WEIGHT_MAX);
    std::fs::write(group(process).join("cpu.weight"), weight.to_string())
}

/// One CPU more than the guest has, for its I/O.
fn cpu_max(cpus: u32) -> String {
    format!("{} {PERIOD_US}", (u64::from(cpus) + 1) * PERIOD_US)
}

/// Removes the group of a QEMU that has ended; there may be none. What serves its network card ends a moment later.
pub async fn forget(process: &Process) {
    let group = group(process);
    for _ in 0..FORGET_TRIES {
        match std::fs::remove_dir(&group) {
            Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {}
            // It does no harm if an empty group stays.
            _ => return,
        }
        tokio::time::sleep(FORGET_AGAIN).await;
    }
    tracing::warn!(group = %group.display(), "processes of a VM that was deleted go on");
}
