//! Looks at a machine before it is a host, and when something is wrong with it: what its agent needs, and what VMs there will lack.

use std::path::{Path, PathBuf};

use nix::unistd::Uid;
use perigee_model::finding::Finding;
use perigee_model::vm::{Accelerator, Firmware};

use crate::command::{QEMU, firmware_file};
use crate::host::{check_reachable, qemu_version};
use crate::programs::{SWTPM, which};
use crate::users::{Users, VmUids};
use crate::{accelerator, cgroup, confinement, programs};

/// Without these no VM runs here: the program, and Debian's package of it.
const NEEDED: [(&str, &str); 3] =
    [(QEMU, "qemu-system-x86"), ("qemu-img", "qemu-utils"), ("mke2fs", "e2fsprogs")];

/// Without these VMs lack something: the program, its package, and what is lacking.
const WANTED: [(&str, &str, &str); 7] = [
    ("passt", "passt", "VMs have no network cards by default"),
    ("ip", "iproute2", "VMs can't be in networks"),
    ("nft", "nftables", "VMs have no network cards by default, and can't be in networks"),
    ("wg", "wireguard-tools", "VMs can't be in networks"),
    ("dnsmasq", "dnsmasq-base", "VMs can't be in networks"),
    ("conntrack", "conntrack", "VMs can't publish ports"),
    (SWTPM, "swtpm", "VMs can't have a TPM"),
];
const UEFI: (&str, &str, &str) = ("UEFI's firmware", "ovmf", "VMs can't boot with UEFI");

/// What is looked at.
#[derive(Debug)]
pub struct Examined<'a> {
    /// The agent's directory. It may not exist yet.
    pub state: &'a Path,
    /// A directory for files of the test of KVM, which every user may pass through.
    pub scratch: &'a Path,
    /// The users of VMs.
    pub vm_uids: VmUids,
    /// The kernel to boot; by default the newest in `/boot`.
    pub probe_kernel: Option<&'a Path>,
}

/// Looks at everything that does not depend on other machines. This takes some seconds: a kernel is booted to see whether KVM works.
pub async fn examine(of: &Examined<'_>) -> Vec<Finding> {
    let mut findings = vec![root(), needed()];
    let (users, of_users) = users(of.vm_uids);
    findings.push(of_users);
    findings.push(directory(of.state));
    findings.push(kvm(of, users).await);
    findings.push(wanted());
    findings.push(match cgroup::available() {
        Ok(()) => Finding::good("cgroups", "QEMU's CPU and memory can be limited"),
        Err(why) => Finding::warning(
            "cgroups",
            why,
            "boot with cgroup v2: systemd.unified_cgroup_hierarchy=1 on the kernel's command line",
        ),
    });
    findings.push(match confinement::missing() {
        None => Finding::good("landlock", "the kernel has it, and QEMU is confined by it"),
        Some(why) => {
            Finding::warning("landlock", why, "boot a kernel with Landlock (Debian's has it)")
        }
    });
    let has_swtpm = which(SWTPM).is_some();
    findings.extend(programs::no_tpm().filter(|_| has_swtpm).map(|why| {
        Finding::warning("tpm", format!("VMs can't have a TPM: {why}"), "as it says in brackets")
    }));
    findings
}

fn root() -> Finding {
    match Uid::effective() {
        uid if uid.is_root() => Finding::good("user", "root"),
        uid => Finding::error(
            "user",
            format!("this command runs as user {uid}, and the agent has to be root"),
            "run it as root",
        ),
    }
}

/// A program that only root's PATH has is there too.
fn is_there(program: &str) -> bool {
    let beside = ["/usr/sbin", "/sbin", "/usr/local/sbin"].map(PathBuf::from);
    which(program).is_some() || beside.iter().any(|dir| dir.join(program).is_file())
}

fn needed() -> Finding {
    let missing: Vec<_> = NEEDED.iter().filter(|(program, _)| !is_there(program)).collect();
    if missing.is_empty() {
        return Finding::good("programs", "all that a host needs");
    }
    let names: Vec<&str> = missing.iter().map(|(program, _)| *program).collect();
    let packages: Vec<&str> = missing.iter().map(|(_, package)| *package).collect();
    let found = format!("missing: {}", names.join(", "));
    Finding::error("programs", found, format!("apt-get install {}", packages.join(" ")))
}

fn wanted() -> Finding {
    let missing = WANTED.iter().filter(|(program, ..)| !is_there(program));
    let is_missing = |file: &&str| !Path::new(file).exists();
    let no_uefi = firmware_file(Firmware::Uefi).filter(is_missing).map(|_| &UEFI);
    let missing: Vec<&(&str, &str, &str)> = missing.chain(no_uefi).collect();
    if missing.is_empty() {
        return Finding::good("more programs", "all that VMs may need");
    }
    let lacks = missing.iter().map(|(program, _, lack)| format!("no {program}: {lack}"));
    let packages: Vec<&str> = missing.iter().map(|(_, package, _)| *package).collect();
    Finding::warning(
        "more programs",
        lacks.collect::<Vec<_>>().join("; "),
        format!("apt-get install {}", packages.join(" ")),
    )
}

fn users(range: VmUids) -> (Option<Users>, Finding) {
    match Users::new(range) {
        Ok(users) => (Some(users), Finding::good("users of VMs", range.to_string())),
        Err(problem) => (None, Finding::error("users of VMs", problem.why, problem.next)),
    }
}

fn directory(state: &Path) -> Finding {
    match check_reachable(&state.join("vms")) {
        Ok(()) => Finding::good("directories", "QEMU's users reach the VMs' directories"),
        Err(problem) => Finding::error("directories", problem.why, problem.next),
    }
}

async fn kvm(of: &Examined<'_>, users: Option<Users>) -> Finding {
    const KVM: &str = "kvm";
    let qemu = match qemu_version().await {
        Ok(version) => version,
        Err(problem) => {
            let found = format!("not known whether it works: {}: {}", problem.what, problem.why);
            return Finding::error(KVM, found, problem.next);
        }
    };
    let mut user = users.filter(|_| Uid::effective().is_root()).map(|u| u.for_tests_of_the_host());
    // What the agent has found out is not found out again.
    let is_known = of.state.join(accelerator::CACHE).exists();
    let dir = if is_known { of.state } else { of.scratch };
    let found = accelerator::find(dir, of.probe_kernel, &qemu, &mut user).await;
    match (found.kind, found.warning) {
        (Accelerator::Kvm, _) => {
            Finding::good(KVM, format!("a kernel boots with it (QEMU {qemu})"))
        }
        (Accelerator::Tcg, None) => Finding::good(KVM, "not used, as PERIGEE_ACCELERATOR says"),
        (Accelerator::Tcg, Some(why)) => Finding::warning(
            KVM,
            why,
            "turn virtualisation on in the machine's firmware, or nested virtualisation where the machine is a VM; then: modprobe kvm_intel or kvm_amd",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `apt` installs what is recommended, unless the operator says no.
    #[test]
    fn the_debian_package_names_each_package_that_a_host_is_told_to_install() {
        let control = include_str!("../../../deploy/debian/control");
        let named = |fields: &[&str]| -> Vec<&str> {
            let lines = control.lines().filter_map(|line| line.split_once(": "));
            let lines = lines.filter(|(field, _)| fields.contains(field));
            let names = lines.flat_map(|(_, all)| all.split([',', '|']));
            names.filter_map(|name| name.split_whitespace().next()).collect()
        };
        let installed = named(&["Depends", "Recommends"]);
        for (program, package) in NEEDED {
            assert!(installed.contains(&package), "{package}, which has {program}: {installed:?}");
        }
        let all = named(&["Depends", "Recommends", "Suggests"]);
        for (program, package, _) in WANTED.into_iter().chain([UEFI]) {
            assert!(all.contains(&package), "{package}, which has {program}: {all:?}");
        }
    }
}
