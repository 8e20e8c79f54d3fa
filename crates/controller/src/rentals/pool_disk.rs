//! The part of a rented host's user-data that has the pool on a disk of its own.

use perigee_model::kept::{POOL_LABEL, PoolDisk};

/// Commands of a shell. A provider whose machines have the disk where the pool is already is left alone. Else it is the disk with the filesystem's
/// label, which a snapshot has; if the disk is blank, it is the one of this size that has nothing on it.
///
/// What is put into the commands is a number and a word.
pub fn commands(pool: Option<&PoolDisk>) -> String {
    let Some(PoolDisk { bytes, snapshot }) = pool else { return String::new() };
    let blank = if snapshot.is_some() { "no" } else { "yes" };
    COMMANDS
        .replace("@BYTES@", &bytes.to_string())
        .replace("@BLANK@", blank)
        .replace("@LABEL@", POOL_LABEL)
}

const COMMANDS: &str = r#"find_disk() {
    disk=$(blkid -L @LABEL@) && return
    [ @BLANK@ = yes ] || return
    for name in $(lsblk -bdnro NAME,SIZE | awk '$2 == @BYTES@ {print $1}'); do
        if [ "$(lsblk -nro NAME "/dev/$name" | wc -l)" -eq 1 ] && ! blkid "/dev/$name" >/dev/null; then
            mkfs.ext4 -q -L @LABEL@ "/dev/$name"
            disk=/dev/$name
            return
        fi
    done
    return 1
}
if ! mountpoint -q "$pool"; then
    tries=0
    until find_disk; do
        tries=$((tries + 1))
        if [ "$tries" -ge 60 ]; then
            echo "host @HOST@ has no disk for its pool; it will be powered off" >&2
            exit 1
        fi
        sleep 2
    done
    echo "LABEL=@LABEL@ $pool ext4 nofail 0 2" >>/etc/fstab
    mount "$disk" "$pool"
    resize2fs "$disk" || true
fi
chmod 0700 "$pool"
"#;

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use super::*;

    fn program(dir: &Path, name: &str, says: &str) {
        use std::os::unix::fs::PermissionsExt as _;
        let file = dir.join(name);
        std::fs::write(&file, format!("#!/bin/sh\n{says}\n")).expect("a program");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).expect("its mode");
    }

    /// What the commands have called, at a machine with a root disk of another size and a blank one. `has` is the disk with the label.
    fn calls(pool: &PoolDisk, has: &str, is_mounted: bool) -> (bool, String) {
        let dir = tempfile::tempdir().expect("a directory");
        let (at, log) = (dir.path(), dir.path().join("called"));
        let log_text = log.display();
        program(at, "mountpoint", if is_mounted { "exit 0" } else { "exit 1" });
        program(
            at,
            "blkid",
            &format!("case $1 in -L) echo {has}; [ -n \"{has}\" ] ;; *) exit 2 ;; esac"),
        );
        let disks =
            "case $1 in -bdnro) echo vda 17179869184; echo vdb 36507222016 ;; *) echo vdb ;; esac";
        program(at, "lsblk", disks);
        program(at, "sleep", "");
        for name in ["mkfs.ext4", "mount", "resize2fs", "chmod"] {
            program(at, name, &format!("echo \"{name} $*\" >>{log_text}"));
        }
        let script =
            commands(Some(pool)).replace("/etc/fstab", &at.join("fstab").to_string_lossy());
        let path = format!("{}:{}", at.display(), std::env::var("PATH").expect("a path"));
        let script = format!("set -eu\npool=/pool\n{script}");
        let run = Command::new("/bin/sh").arg("-c").arg(&script).env("PATH", path).output();
        let ended = run.expect("a shell").status.success();
        (ended, std::fs::read_to_string(&log).unwrap_or_default())
    }

    const BLANK: PoolDisk = PoolDisk { bytes: 34 << 30, snapshot: None };

    #[test]
    fn a_blank_disk_of_the_right_size_gets_a_filesystem() {
        let (done, called) = calls(&BLANK, "", false);
        assert!(done, "{called}");
        let first: Vec<&str> = called.lines().take(2).collect();
        assert_eq!(first, ["mkfs.ext4 -q -L perigee-pool /dev/vdb", "mount /dev/vdb /pool"]);
    }

    #[test]
    fn a_disk_made_of_a_snapshot_is_never_formatted() {
        let kept = PoolDisk { snapshot: Some("snap-1".to_owned()), ..BLANK };
        let (done, called) = calls(&kept, "/dev/vdb", false);
        assert!(done && !called.contains("mkfs") && called.contains("mount /dev/vdb"), "{called}");
        let (done, called) = calls(&kept, "", false);
        assert!(!done && called.is_empty(), "the disk never came: {called}");
    }

    #[test]
    fn a_pool_that_is_mounted_is_left_alone() {
        let (done, called) = calls(&BLANK, "", true);
        assert_eq!((done, called.as_str()), (true, "chmod 0700 /pool\n"));
    }
}
