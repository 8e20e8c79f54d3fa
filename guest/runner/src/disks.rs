//! Finds disks by their serial number, and handles the filesystems of the data disks.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags};
use perigee_model::DiskRole;
use perigee_model::guest::Mount;

use crate::error::Error;

/// Every filesystem and partition table has nonzero bytes in this part of a disk.
const PROBED_BYTES: u64 = 128 * 1024;
/// 16 MiB.
const WORTH_GROWING_SECTORS: u64 = 32 << 10;
const DISK_DEADLINE: Duration = Duration::from_secs(30);
const UNMOUNT_DEADLINE: Duration = Duration::from_secs(20);
const RETRY_DELAY: Duration = Duration::from_millis(100);

#[derive(Debug, Clone)]
pub struct Mounted {
    pub device: PathBuf,
    pub path: PathBuf,
    pub read_only: bool,
}

/// The device node of the disk with this role as its serial number. Waits a little, because the kernel may find
/// a disk late.
pub fn find(role: DiskRole) -> Result<PathBuf, Error> {
    let deadline = Instant::now() + DISK_DEADLINE;
    loop {
        if let Some(device) = find_in(Path::new("/sys/block"), role) {
            return Ok(device);
        }
        if Instant::now() >= deadline {
            return Err(Error::NoDisk(role));
        }
        std::thread::sleep(RETRY_DELAY);
    }
}

fn find_in(sys_block: &Path, role: DiskRole) -> Option<PathBuf> {
    let serial = role.to_string();
    let entries = std::fs::read_dir(sys_block).ok()?;
    entries.flatten().find_map(|entry| {
        let found = std::fs::read_to_string(entry.path().join("serial")).ok()?;
        (found.trim() == serial).then(|| Path::new("/dev").join(entry.file_name()))
    })
}

/// Mounts a data disk; an empty one gets a filesystem first.
pub fn mount(wanted: &Mount) -> Result<Mounted, Error> {
    let path = PathBuf::from(&wanted.path);
    if !path.is_absolute() || path == Path::new("/") {
        return Err(Error::MountPath(wanted.path.clone()));
    }
    let device = find(wanted.role)?;
    let disk = File::open(&device).map_err(Error::io(format!("open disk `{}`", wanted.role)))?;
    let empty = is_empty(disk).map_err(Error::io(format!("read from disk `{}`", wanted.role)))?;
    match (empty, wanted.read_only) {
        (true, true) => return Err(Error::EmptyReadOnly(wanted.role)),
        (true, false) => format(wanted.role, &device)?,
        (false, _) => {}
    }
    std::fs::create_dir_all(&path)
        .map_err(Error::io(format!("make the directory {}", wanted.path)))?;
    let mounted = Mounted { device, path, read_only: wanted.read_only };
    attach(&mounted, wanted.read_only)?;
    Ok(mounted)
}

/// Mounts a disk to read from it, as a VM left it that ended at any moment. The kernel recovers its filesystem first.
pub fn mount_read_only(wanted: &Mount) -> Result<(), Error> {
    let path = PathBuf::from(&wanted.path);
    std::fs::create_dir_all(&path)
        .map_err(Error::io(format!("make the directory {}", wanted.path)))?;
    let device = find(wanted.role)?;
    attach(&Mounted { device, path, read_only: wanted.read_only }, true)
}

/// Mounts a disk again that [`unmount`] left clean, to read from it. This writes nothing to the disk.
pub fn mount_again_read_only(mounted: &Mounted) -> Result<(), Error> {
    attach(mounted, true)
}

fn attach(mounted: &Mounted, read_only: bool) -> Result<(), Error> {
    let mut flags = MsFlags::MS_NOATIME;
    if read_only {
        flags |= MsFlags::MS_RDONLY;
    }
    // A damaged filesystem stops the job instead of being damaged further. Unused inode tables are not
    // initialized, because that would only cause writes in the background to a disk that may be far away.
    let options = "errors=remount-ro,noinit_itable";
    nix::mount::mount(Some(&mounted.device), &mounted.path, Some("ext4"), flags, Some(options))
        .map_err(Error::io(format!(
            "mount {} as ext4 at {}",
            mounted.device.display(),
            mounted.path.display()
        )))
}

/// Writes everything back and unmounts. Only after this may the job be reported as ended: it returns an error
/// if a write failed or the filesystem is still in use.
pub fn unmount(mounted: &Mounted) -> Result<(), Error> {
    let place = mounted.path.display();
    if !mounted.read_only {
        let root = File::open(&mounted.path).map_err(Error::io(format!("open {place}")))?;
        nix::unistd::syncfs(&root).map_err(Error::io(format!("write back {place}")))?;
    }
    let deadline = Instant::now() + UNMOUNT_DEADLINE;
    loop {
        match nix::mount::umount2(&mounted.path, MntFlags::empty()) {
            Ok(()) => break,
            Err(Errno::EBUSY) if Instant::now() < deadline => std::thread::sleep(RETRY_DELAY),
            Err(error) => return Err(Error::io(format!("unmount {place}"))(error)),
        }
    }
    if mounted.read_only {
        return Ok(());
    }
    OpenOptions::new()
        .write(true)
        .open(&mounted.device)
        .and_then(|device| device.sync_all())
        .map_err(Error::io(format!("flush {} after unmounting {place}", mounted.device.display())))
}

/// Grows the root filesystem to the end of its disk, if only its own partition lies before that. The root disk of a job
/// may be larger than its image.
pub fn grow_root() -> Result<(), Error> {
    let device = std::fs::metadata("/").map_err(Error::io("look at the root filesystem"))?.dev();
    let device = format!("{}:{}", nix::sys::stat::major(device), nix::sys::stat::minor(device));
    let Some(root) = partition(Path::new("/sys"), &device) else { return Ok(()) };
    let disk = Path::new("/dev").join(&root.disk);
    if find(DiskRole::Root)? != disk || root.unused_sectors < WORTH_GROWING_SECTORS {
        return Ok(());
    }
    let number = root.number.to_string();
    let mut table = Command::new("sfdisk");
    table.args(["--quiet", "--no-reread", "--no-tell-kernel", "-N", &number]).arg(&disk);
    grow(table, Some(", +\n"))?;
    let mut tell = Command::new("partx");
    tell.args(["--update", "--nr", &number]).arg(&disk);
    grow(tell, None)?;
    let mut resize = Command::new("resize2fs");
    resize.arg(Path::new("/dev").join(&root.name));
    grow(resize, None)
}

/// Runs a step of growing.
fn grow(mut command: Command, input: Option<&str>) -> Result<(), Error> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut run = || {
        let (stdin, out) = (Stdio::piped(), Stdio::piped());
        let mut child = command.stdin(stdin).stdout(Stdio::null()).stderr(out).spawn()?;
        if let (Some(mut stdin), Some(input)) = (child.stdin.take(), input) {
            stdin.write_all(input.as_bytes())?;
        }
        child.wait_with_output()
    };
    let run = run().map_err(Error::io(format!("run {name}")))?;
    if run.status.success() {
        return Ok(());
    }
    Err(Error::Grow { name, detail: String::from_utf8_lossy(&run.stderr).trim().to_owned() })
}

/// A partition of a disk.
#[derive(Debug, PartialEq, Eq)]
struct Partition {
    name: String,
    disk: String,
    /// From 1 on.
    number: u32,
    /// Of 512 bytes, behind it to the end of the disk.
    unused_sectors: u64,
}

/// The partition with this device number (`MAJOR:MINOR`); `None` if that is none.
fn partition(sys: &Path, device: &str) -> Option<Partition> {
    let link = std::fs::canonicalize(sys.join("dev/block").join(device)).ok()?;
    let disk = link.parent()?;
    let number = |path: &Path, name: &str| -> Option<u64> {
        std::fs::read_to_string(path.join(name)).ok()?.trim().parse().ok()
    };
    let name = |path: &Path| Some(path.file_name()?.to_str()?.to_owned());
    let end = number(&link, "start")? + number(&link, "size")?;
    Some(Partition {
        name: name(&link)?,
        disk: name(disk)?,
        number: u32::try_from(number(&link, "partition")?).ok()?,
        unused_sectors: number(disk, "size")?.saturating_sub(end),
    })
}

fn is_empty(disk: impl Read) -> io::Result<bool> {
    let mut start = Vec::new();
    disk.take(PROBED_BYTES).read_to_end(&mut start)?;
    Ok(start.iter().all(|byte| *byte == 0))
}

fn format(role: DiskRole, device: &Path) -> Result<(), Error> {
    let run = Command::new("mkfs.ext4")
        .args(["-q", "-F", "-m", "0"])
        .args(["-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard"])
        .arg(device)
        .output()
        .map_err(Error::io("run mkfs.ext4"))?;
    if run.status.success() {
        return Ok(());
    }
    Err(Error::Format { role, detail: String::from_utf8_lossy(&run.stderr).trim().to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_found_by_its_serial_and_disks_without_one_are_passed_over() {
        let sys = tempfile::tempdir().unwrap();
        for (name, serial) in [("loop0", None), ("vda", Some("root\n")), ("vdb", Some("data0"))] {
            std::fs::create_dir(sys.path().join(name)).unwrap();
            if let Some(serial) = serial {
                std::fs::write(sys.path().join(name).join("serial"), serial).unwrap();
            }
        }
        assert_eq!(find_in(sys.path(), DiskRole::Data(0)), Some("/dev/vdb".into()));
        assert_eq!(find_in(sys.path(), DiskRole::Data(1)), None);
    }

    #[test]
    fn a_partition_is_found_by_its_device_number_and_a_whole_disk_is_none() {
        let sys = tempfile::tempdir().unwrap();
        let disk = sys.path().join("devices/vda");
        std::fs::create_dir_all(disk.join("vda2")).unwrap();
        for (name, number) in
            [("size", 1000), ("vda2/start", 100), ("vda2/size", 300), ("vda2/partition", 2)]
        {
            std::fs::write(disk.join(name), format!("{number}\n")).unwrap();
        }
        let devices = sys.path().join("dev/block");
        std::fs::create_dir_all(&devices).unwrap();
        std::os::unix::fs::symlink(disk.join("vda2"), devices.join("254:2")).unwrap();
        std::os::unix::fs::symlink(&disk, devices.join("254:0")).unwrap();
        let (name, disk) = ("vda2".to_owned(), "vda".to_owned());
        let wanted = Partition { name, disk, number: 2, unused_sectors: 600 };
        assert_eq!(partition(sys.path(), "254:2"), Some(wanted));
        assert_eq!(partition(sys.path(), "254:0"), None);
    }

    #[test]
    fn one_byte_makes_a_disk_not_empty() {
        let mut disk = vec![0; 1024 * 1024];
        assert!(is_empty(&disk[..]).unwrap());
        disk[100_000] = 1;
        assert!(!is_empty(&disk[..]).unwrap());
    }

    #[test]
    fn a_mount_path_must_be_absolute() {
        for path in ["data", "/"] {
            let wanted = Mount { role: DiskRole::Data(0), path: path.to_owned(), read_only: false };
            assert!(matches!(mount(&wanted), Err(Error::MountPath(_))));
        }
    }
}
