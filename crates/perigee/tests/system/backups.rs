//! A VM that is made of a backup, with real guests.

use std::path::{Path, PathBuf};
use std::process::Command;

use perigee_lab::{Definition, LabId};
use perigee_model::backup::{Backup, BackupState, RestoreVmBackup};
use perigee_model::job::{ClusterVolume, Vm};
use perigee_model::persistent_vm::VmState;

use super::persistent_vms::UP;
use super::{Checked, System, ensure, succeeded, until, with_system_of};

const MIB: u64 = 1 << 20;
/// Of data that no guest reads. At the rate of [`slow`] they need two hours.
const UNREAD_MIB: u64 = 512;

/// One host, which fetches next to nothing in the background.
fn slow() -> Definition {
    let mut definition = Definition::default_demo(LabId::random(), 16);
    definition.sites.truncate(1);
    definition.sites[0].hosts.truncate(1);
    definition.links.clear();
    definition.fill_bytes_per_s = Some(64 << 10);
    definition
}

/// What a volume of `home1` shows.
fn bytes_of(system: &System, volume: &str) -> Checked<Vec<u8>> {
    let socket = system.host_file("home1", "volume.sock");
    let copy: PathBuf = system.lab.dir().join(format!("{volume}.copy"));
    let converted = Command::new("timeout")
        .args(["60", "qemu-img", "convert", "-f", "raw", "-O", "raw"])
        .arg(format!("nbd+unix:///{volume}?socket={}", socket.display()))
        .arg(&copy)
        .output()
        .expect("qemu-img runs");
    ensure!(converted.status.success(), "{converted:?}");
    Ok(std::fs::read(copy).expect("the copy"))
}

async fn backed_up(system: &System, to: &Path) -> Checked<Backup> {
    let to = to.display().to_string();
    let said = system.does(&["-f", "json", "backup", "create", "--vm", "web", "--to", &to])?;
    let backup: Backup = serde_json::from_str(&said).expect("a backup");
    ensure!(backup.state == BackupState::Completed, "{backup:?}");
    let parts = ["data0", "nvram", "tpm"].map(|end| format!("{}.{end}", backup.name));
    let named: Vec<&str> = backup.parts.iter().map(|part| part.as_str()).collect();
    ensure!(named == parts, "{named:?}");
    Ok(backup)
}

#[test]
fn a_vm_is_restored_with_its_firmware_and_tpm_and_boots_before_its_bytes_are_there() {
    with_system_of(slow(), async |system| {
        system.volume("data", "home1", 16 * MIB).await?;
        let create = ["vm", "create", "web", "--image", "debian", "--memory", "256MiB"];
        let disks = ["--disk", "4GiB", "--volume", "data", "--firmware", "uefi", "--tpm"];
        system.does(&[&create[..], &disks].concat())?;
        system.console_says("web", UP).await?;
        system.does(&["vm", "stop", "web", "--force"])?;
        // A little at a time: each has a deadline.
        let of_root =
            (0..UNREAD_MIB).step_by(32).map(|at| format!("write -P 7 {}M 32M", 3072 + at));
        let writes = of_root.map(|write| ("web-root", write));
        for (volume, write) in writes.chain([("data", "write -P 9 0 1M".to_owned())]) {
            let written = system.qemu_io("home1", volume, &write);
            ensure!(succeeded(&written), "{written:?}");
        }
        let own = ["nvram", "tpm"];
        let mut was = Vec::new();
        for end in own {
            was.push(bytes_of(&system, &format!("web-{end}"))?);
        }
        let to = system.lab.dir().join("backups");
        std::fs::create_dir(&to).expect("a directory");
        let backup = backed_up(&system, &to).await?;

        // Nothing of it is left in the cluster.
        system.does(&["vm", "delete", "web"])?;
        until("the VM and its data to be gone", async || {
            system.does(&["volume", "delete", "data"])?;
            Ok(Some(()))
        })
        .await?;
        until("the image to be gone", async || {
            system.does(&["image", "delete", "debian"])?;
            Ok(Some(()))
        })
        .await?;

        let vm = "web2".parse().expect("a name");
        let ask = RestoreVmBackup { vm, host: None, from: None, whole: false };
        let made: Vm =
            system.post(&format!("/v1/backups/{}/restore-vm", backup.name), &ask).await?;
        ensure!(made.status == VmState::Stopped, "{made:?}");
        for (end, was) in own.iter().zip(&was) {
            ensure!(bytes_of(&system, &format!("web2-{end}"))? == *was, "{end} is as it was");
        }
        system.does(&["vm", "start", "web2"])?;
        system.console_says("web2", UP).await?;
        let root: ClusterVolume = system.get("/v1/volumes/web2-root").await?;
        let left = root.restoring.as_ref().map(|restoring| restoring.missing_bytes);
        // A guest that has booted has written to its disk, and was not given what is to come.
        ensure!(left >= Some(UNREAD_MIB * MIB * 3 / 4), "{root:?}");
        let data = system.qemu_io("home1", "web2-data0", "read -P 9 0 1M");
        ensure!(succeeded(&data), "{data:?}");
        system.does(&["vm", "delete", "web2", "--force"]).map(drop)
    });
}
