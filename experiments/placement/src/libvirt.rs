//! `virsh migrate --copy-storage-inc`: the same guest, overlay and WAN, under libvirt. Each host gets a libvirtd of
//! its own, without systemd, whose files are below the lab's directory.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use perigee_lab::bare::{Running, wait_for_console};
use perigee_lab::measuring::load_1min;
use perigee_model::HostId;

use crate::bench::Bench;
use crate::case::BEGUN;
use crate::mirror::make_disks;
use crate::moves::{FILL_DEADLINE, command};
use crate::results::{Direction, DiskMove, System, float};

const DOMAIN: &str = include_str!("domain.xml");
/// The domain's name, as in its description.
const NAME: &str = "moved";
/// Where libvirtd keeps its files, in a mount namespace of its own. The directories must exist.
const PLACES: [(&str, &str); 5] = [
    ("run", "/run"),
    ("lib", "/var/lib/libvirt"),
    ("etc", "/etc/libvirt"),
    ("cache", "/var/cache/libvirt"),
    ("log", "/var/log/libvirt"),
];
const START_DEADLINE: Duration = Duration::from_secs(60);

/// Whether this machine has libvirt.
pub fn is_installed() -> bool {
    ["libvirtd", "virsh"].iter().all(|program| {
        let found = Command::new(program).arg("--version").output();
        found.is_ok_and(|output| output.status.success())
    })
}

/// A host's libvirtd.
struct Daemon {
    process: Running,
    dir: PathBuf,
    address: String,
}

impl Daemon {
    async fn start(bench: &Bench<'_>, host: &HostId, number: u32) -> Result<Self> {
        let dir = bench.lab.dir().join("libvirt").join(host.as_str());
        let address = bench.lab.definition.host_address(host).context("an address")?.to_string();
        for (name, place) in PLACES {
            std::fs::create_dir_all(dir.join(name))?;
            std::fs::create_dir_all(place)?;
        }
        let conf = format!(
            "listen_tls = 0\nlisten_tcp = 1\nauth_tcp = \"none\"\nlisten_addr = \"{address}\"\n\
             host_uuid = \"00000000-0000-4000-8000-{number:012}\"\n"
        );
        std::fs::write(dir.join("etc/libvirtd.conf"), conf)?;
        let conf = format!(
            "user = \"root\"\ngroup = \"root\"\nsecurity_driver = \"none\"\ncgroup_controllers = [ ]\n\
             namespaces = [ ]\nstdio_handler = \"file\"\ndynamic_ownership = 0\nremember_owner = 0\n\
             migration_address = \"{address}\"\n"
        );
        std::fs::write(dir.join("etc/qemu.conf"), conf)?;
        std::fs::write(dir.join("begin"), begin(&dir, host))?;
        let script = dir.join("begin").display().to_string();
        let line = ["unshare", "--mount", "--uts", "sh", &script].map(str::to_owned);
        let process = Running::start(bench.lab, host, &line, &dir.join("libvirtd.log"))?;
        let daemon = Self { process, dir, address };
        let end = Instant::now() + START_DEADLINE;
        while daemon.virsh(&["list"]).is_err() {
            ensure!(
                Instant::now() < end,
                "libvirtd at {host} did not answer within {START_DEADLINE:?}"
            );
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        Ok(daemon)
    }

    fn virsh(&self, arguments: &[&str]) -> Result<String> {
        let pid = self.process.pid().to_string();
        let mut command = Command::new("nsenter");
        command.args(["-t", &pid, "--mount", "--net", "--uts", "virsh", "-c", "qemu:///system"]);
        let output = command.args(arguments).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "virsh {}: {}", arguments.join(" "), said.trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn vm_dir(&self) -> PathBuf {
        self.dir.join("lib/vm")
    }
}

/// The script that becomes libvirtd. Its user must exist, though the guests run as root.
fn begin(dir: &Path, host: &HostId) -> String {
    let dir = dir.display();
    let mounts: String =
        PLACES.iter().map(|(name, place)| format!("mount --bind {dir}/{name} {place}\n")).collect();
    format!(
        "set -eu\nmount --make-rprivate /\n{mounts}\
         for file in passwd group; do cp /etc/$file {dir}/$file; done\n\
         echo 'libvirt-qemu:x:64055:0::/:/usr/sbin/nologin' >>{dir}/passwd\n\
         printf 'libvirt-qemu:x:64055:\\nlibvirt:x:64056:\\n' >>{dir}/group\n\
         for file in passwd group; do mount --bind {dir}/$file /etc/$file; done\n\
         hostname {host}\nexec libvirtd --listen\n"
    )
}

pub async fn measure(bench: &Bench<'_>, image: &Path, overlay_bytes: u64) -> Result<DiskMove> {
    let mib = overlay_bytes >> 20;
    let step = bench.step(format!("a VM with {mib} MiB on its disk, libvirt: fill"));
    let source = Daemon::start(bench, &bench.near, 1).await?;
    let destination = Daemon::start(bench, &bench.far, 2).await?;
    for daemon in [&source, &destination] {
        make_disks(&daemon.vm_dir(), image, command(overlay_bytes))?;
    }
    std::fs::write(source.dir.join("lib/domain.xml"), DOMAIN)?;
    source.virsh(&["create", "/var/lib/libvirt/domain.xml"])?;
    wait_for_console(&source.vm_dir().join("console.log"), BEGUN, FILL_DEADLINE).await?;
    step.done("");
    let words = format!("a VM with {mib} MiB on its disk, libvirt: move to {}", bench.far);
    let step = bench.step(words);
    let load_1min = load_1min()?;
    let before = bench.wan_bytes();
    let asked = Instant::now();
    let uris = [
        format!("qemu+tcp://{}/system", destination.address),
        format!("tcp://{}", destination.address),
    ];
    let what =
        ["migrate", "--live", "--copy-storage-inc", "--migrate-disks", "vda", "--unsafe", NAME];
    source.virsh(&[&what[..], &[&uris[0], &uris[1]]].concat())?;
    let runs_after_ms = asked.elapsed().as_secs_f64() * 1e3;
    let wan_bytes = bench.wan_bytes_since(before);
    let said = destination.virsh(&["domjobinfo", NAME, "--completed", "--rawstats"])?;
    let (pause_ms, memory_bytes) = figures(&said)?;
    destination.virsh(&["destroy", NAME])?;
    step.done(&format!("runs after {:.1} s, pause {pause_ms} ms", runs_after_ms / 1e3));
    Ok(DiskMove {
        system: System::Libvirt,
        direction: Direction::There,
        overlay_bytes,
        runs_after_ms,
        complete_after_ms: runs_after_ms,
        pause_ms: float(pause_ms),
        memory_bytes,
        wan_bytes_running: wan_bytes,
        wan_bytes_complete: wan_bytes,
        written_since: None,
        load_1min,
        perigee: String::new(),
    })
}

/// The pause and the memory that was sent, of `domjobinfo --rawstats`.
fn figures(said: &str) -> Result<(u64, u64)> {
    let figure = |name: &str| -> Result<u64> {
        let mut pairs = said.lines().filter_map(|line| line.split_once(':'));
        let found = pairs.find(|(key, _)| key.trim() == name).context(name.to_owned())?;
        Ok(found.1.trim().parse()?)
    };
    Ok((figure("downtime")?, figure("memory_processed")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_are_read_from_what_virsh_says() {
        let said = "Job type:         Completed\n  time_elapsed: 7128\n  downtime: 629\n  memory_processed: 110387200\n";
        assert_eq!(figures(said).expect("both"), (629, 110_387_200));
        assert!(figures("Job type: None\n").is_err());
    }
}
