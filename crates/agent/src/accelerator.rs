//! Finds out whether KVM works by booting a small guest once.
//!
//! `/dev/kvm` may exist although a stock Linux kernel can't run: some nested hypervisors start the guest and
//! hang. So the agent boots a kernel without a root filesystem; the panic with which it ends proves that it
//! ran. The result is cached in the state directory until something changes on which it depends: the boot,
//! QEMU, the kernel or the device's owner.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use nix::unistd::Gid;
use perigee_model::vm::Accelerator;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, BufReader};

use crate::command::{QEMU, accelerator_arguments};
use crate::files::{read_json, write_json};
use crate::lines::next_line;
use crate::process::{QemuUser, detached};
use perigee_http::memory::LockedMemory;

const KVM: &str = "/dev/kvm";
/// The answer of before, in the state directory.
pub const CACHE: &str = "accelerator.json";
/// Under KVM a kernel boots in less than 2 s.
const BOOT_DEADLINE: Duration = Duration::from_secs(6);
/// The last message of a kernel without a root filesystem.
const PROOF: &str = "Unable to mount root fs";
/// `auto`, `kvm` or `tcg`.
const CHOICE_VARIABLE: &str = "PERIGEE_ACCELERATOR";

/// The accelerator, and a warning if it is not KVM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    pub kind: Accelerator,
    pub warning: Option<String>,
}

impl Found {
    fn tcg(why: impl Into<String>) -> Self {
        let warning = format!("KVM is not used, guests run much slower: {}", why.into());
        Self { kind: Accelerator::Tcg, warning: Some(warning) }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Cached {
    key: String,
    found: Found,
}

/// Finds the accelerator. `user` is the user of QEMU if that is not the agent's user; its group is changed to
/// one that may open `/dev/kvm`.
pub async fn find(
    state: &Path,
    kernel: Option<&Path>,
    qemu_version: &str,
    user: &mut Option<QemuUser>,
) -> Found {
    let forced = match std::env::var(CHOICE_VARIABLE).as_deref() {
        Ok("tcg") => return Found { kind: Accelerator::Tcg, warning: None },
        Ok("kvm") => true,
        _ => false,
    };
    let Ok(device) = std::fs::metadata(KVM) else {
        return Found::tcg(format!("{KVM} does not exist"));
    };
    if let Some(user) = user {
        match group_for(device.mode(), Gid::from_raw(device.gid()), user.gid) {
            Some(gid) => user.gid = gid,
            None => {
                return Found::tcg(format!(
                    "{KVM} (mode {:03o}, group {}) is closed to unprivileged users",
                    device.mode() & 0o777,
                    device.gid()
                ));
            }
        }
    }
    if forced {
        return Found { kind: Accelerator::Kvm, warning: None };
    }
    let Some(kernel) = kernel.map(Path::to_path_buf).or_else(newest_kernel) else {
        return Found::tcg("there is no kernel in /boot for a test: name one with --probe-kernel");
    };
    let key = cache_key(qemu_version, &kernel, &device);
    let cache = state.join(CACHE);
    if let Ok(Some(cached)) = read_json::<Cached>(&cache)
        && cached.key == key
    {
        return cached.found;
    }
    let found = try_kvm(state, &kernel, *user).await;
    if let Err(problem) = write_json(&cache, &Cached { key, found: found.clone() }) {
        tracing::warn!(%problem, "the accelerator will be probed again at the next start");
    }
    found
}

/// The group with which QEMU's user can open the device.
fn group_for(mode: u32, device: Gid, own: Gid) -> Option<Gid> {
    if mode & 0o006 == 0o006 {
        return Some(own);
    }
    // Root's group has access to much more than this device.
    (mode & 0o060 == 0o060 && device.as_raw() != 0).then_some(device)
}

fn newest_kernel() -> Option<PathBuf> {
    let entries = std::fs::read_dir("/boot").ok()?.flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("vmlinuz-"))
        .max_by_key(|entry| entry.metadata().and_then(|meta| meta.modified()).ok())
        .map(|entry| entry.path())
}

fn cache_key(qemu_version: &str, kernel: &Path, device: &std::fs::Metadata) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let (size, modified) =
        std::fs::metadata(kernel).map_or((0, 0), |meta| (meta.size(), meta.mtime()));
    format!(
        "{} {qemu_version} {} {size} {modified} {:o} {}",
        boot.trim(),
        kernel.display(),
        device.mode(),
        device.gid()
    )
}

async fn try_kvm(state: &Path, kernel: &Path, user: Option<QemuUser>) -> Found {
    // QEMU's user may not be able to read the original.
    let copy = state.join("probe-kernel");
    let open_copy = std::fs::copy(kernel, &copy)
        .and_then(|_| std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o644)));
    let result = match open_copy {
        Ok(()) => boot(&copy, Accelerator::Kvm, user, BOOT_DEADLINE).await,
        Err(error) => Err(format!("cannot copy {}: {error}", kernel.display())),
    };
    let _ = std::fs::remove_file(&copy);
    match result {
        Ok(()) => Found { kind: Accelerator::Kvm, warning: None },
        Err(why) => Found::tcg(why),
    }
}

/// Boots the kernel until it reports that its root filesystem is missing. The process has ended when this
/// returns.
async fn boot(
    kernel: &Path,
    accelerator: Accelerator,
    user: Option<QemuUser>,
    deadline: Duration,
) -> Result<(), String> {
    let mut arguments: Vec<String> = accelerator_arguments(accelerator).map(str::to_owned).to_vec();
    let rest = "-machine q35 -m 256M -nodefaults -no-user-config -display none -no-reboot \
        -serial stdio -append";
    arguments.extend(rest.split_whitespace().map(str::to_owned));
    arguments.push("console=ttyS0 panic=-1".to_owned());
    arguments.extend(["-kernel".to_owned(), kernel.display().to_string()]);
    let mut child = detached(QEMU, &arguments, user, LockedMemory::Unlimited)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|e| format!("cannot start {QEMU}: {e}"))?;
    let (Some(stdout), Some(mut stderr)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(format!("cannot read what {QEMU} says"));
    };
    let watch = async {
        let mut reader = BufReader::new(stdout);
        let mut partial = Vec::new();
        while let Ok(Some(line)) = next_line(&mut reader, &mut partial, 64 << 10).await {
            if String::from_utf8_lossy(&line).contains(PROOF) {
                return true;
            }
        }
        false
    };
    let result = match tokio::time::timeout(deadline, watch).await {
        Ok(true) => Ok(()),
        Ok(false) => {
            let mut said = Vec::new();
            // If the reason can't be read, it stays empty.
            let _ = (&mut stderr).take(4096).read_to_end(&mut said).await;
            let said = String::from_utf8_lossy(&said);
            Err(format!("a test guest did not boot: {}", said.lines().next().unwrap_or_default()))
        }
        Err(_) => Err(format!("a test guest did not boot within {} s", deadline.as_secs())),
    };
    // It may have ended by itself.
    let _ = child.kill().await;
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_devices_group_is_taken_only_where_it_may_write_and_is_not_roots() {
        let (kvm, own, root) = (Gid::from_raw(104), Gid::from_raw(64055), Gid::from_raw(0));
        assert_eq!(group_for(0o20660, kvm, own), Some(kvm));
        assert_eq!(group_for(0o20666, root, own), Some(own));
        assert_eq!(group_for(0o20660, root, own), None);
        assert_eq!(group_for(0o20600, kvm, own), None);
    }

    #[tokio::test]
    async fn what_is_no_kernel_does_not_boot_and_says_why() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "no kernel").unwrap();
        let result = boot(file.path(), Accelerator::Tcg, None, Duration::from_secs(60)).await;
        assert!(result.as_ref().is_err_and(|why| why.contains("did not boot: ")), "{result:?}");
    }
}
