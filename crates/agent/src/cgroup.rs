//! Limits for QEMU by cgroup v2, where the machine has its CPU and memory controllers.
//!
//! A group is named after QEMU's pid, which is unique on the machine, so several agents never use the same
//! group. It is removed with the VM.

use std::path::{Path, PathBuf};

use crate::process::Process;

const ROOT: &str = "/sys/fs/cgroup";
const PERIOD_US: u64 = 100_000;
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

/// Puts QEMU into its own group. QEMU gets one CPU more than the guest, for its I/O.
pub fn limit(process: &Process, cpus: u32, memory_bytes: u64) -> std::io::Result<()> {
    let group = group(process);
    std::fs::write(Path::new(ROOT).join("cgroup.subtree_control"), "+cpu +memory")?;
    std::fs::create_dir_all(&group)?;
    std::fs::write(Path::new(ROOT).join("perigee/cgroup.subtree_control"), "+cpu +memory")?;
    let quota_us = (u64::from(cpus) + 1) * PERIOD_US;
    std::fs::write(group.join("cpu.max"), format!("{quota_us} {PERIOD_US}"))?;
    std::fs::write(group.join("memory.max"), (memory_bytes + OVERHEAD_BYTES).to_string())?;
    std::fs::write(group.join("cgroup.procs"), process.pid.to_string())
}

/// Removes the group of a process that has ended; there may be none.
pub fn forget(process: &Process) {
    // It does no harm if an empty group stays.
    let _ = std::fs::remove_dir(group(process));
}
