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
use perigee_model::units::format_bytes;

use crate::error::Error;

/// Every filesystem and partition table has nonzero bytes in this part of a disk.
const PROBED_BYTES: u64 = 128 * 1024;
/// 16 MiB.
const WORTH_GROWING_SECTORS: u64 = 32 << 10;
const DISK_DEADLINE: Duration = Duration::from_secs(30);
const UNMOUNT_DEADLINE: Duration = Duration::from_secs(20);
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// A disk that the job sees at `path`.
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
    let (device, path) = (mounted.device.display(), mounted.path.display());
    nix::mount::mount(Some(&mounted.device), &mounted.path, Some("ext4"), flags, Some(options))
        .map_err(|error| match error {
            // ext4 refuses nothing else so of a disk that can't be written.
            Errno::EROFS if read_only => {
                Error::WantsRecovery { disk: device.to_string(), path: path.to_string() }
            }
            error => Error::io(format!("mount {device} as ext4 at {path}"))(error),
        })
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

/// Grows the root filesystem to the end of its disk, if nothing but its own partition lies before that. The root disk of a job
/// may be larger than its image.
pub fn grow_root() -> Result<(), Error> {
    let disk = find(DiskRole::Root)?;
    let about = Path::new("/sys/block").join(disk.file_name().unwrap_or_default());
    let Some(last) = last_partition(&about) else { return Ok(()) };
    if last.unused_sectors < WORTH_GROWING_SECTORS {
        return Ok(());
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")
        .map_err(Error::io("look at the root filesystem"))?;
    let root = root_filesystem(&mounts).ok_or(Error::RootNotLast)?;
    if root.device()? != last.device {
        return Err(Error::RootNotLast);
    }
    let node = format!("/dev/{}", last.name);
    // What can't be grown keeps its partition as it was.
    let step = resize(root.kind, &node)?;
    let number = last.number.to_string();
    let mut table = Command::new("sfdisk");
    table.args(["--quiet", "--no-reread", "--no-tell-kernel", "-N", &number]).arg(&disk);
    grow(table, Some(", +\n"))?;
    let mut tell = Command::new("partx");
    tell.args(["--update", "--nr", &number]).arg(&disk);
    grow(tell, None)?;
    let mut resize = Command::new(step[0]);
    resize.args(&step[1..]);
    grow(resize, None)
}

/// What to say if the root filesystem, on which `/output` lies, has not the room that the job's file gives its outputs.
pub fn lacks_room_for_outputs(output_bytes: u64) -> Option<String> {
    let about = nix::sys::statvfs::statvfs("/output").ok()?;
    let free_bytes = about.blocks_available() * about.fragment_size();
    (free_bytes < output_bytes).then(|| {
        let (free, wanted) = (format_bytes(free_bytes), format_bytes(output_bytes));
        format!(
            "perigee: the root disk, where /output is, has room for {free} and not for the {wanted} of `output`: say a larger `root`"
        )
    })
}

/// The program, with its arguments, that makes a mounted filesystem of this kind as large as its partition.
fn resize<'a>(kind: &str, partition: &'a str) -> Result<Vec<&'a str>, Error> {
    match kind {
        "ext2" | "ext3" | "ext4" => Ok(vec!["resize2fs", partition]),
        "xfs" => Ok(vec!["xfs_growfs", "/"]),
        "btrfs" => Ok(vec!["btrfs", "filesystem", "resize", "max", "/"]),
        _ => Err(Error::RootKind(kind.to_owned())),
    }
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

/// The filesystem that is mounted at `/`.
#[derive(Debug, PartialEq, Eq)]
struct RootFilesystem<'a> {
    /// `MAJOR:MINOR`
    device: &'a str,
    kind: &'a str,
    source: &'a str,
}

impl RootFilesystem<'_> {
    /// The number of its partition. btrfs has a number of its own there, which is no disk's.
    fn device(&self) -> Result<String, Error> {
        if !self.device.starts_with("0:") {
            return Ok(self.device.to_owned());
        }
        let doing = format!("find {}, where the root filesystem is", self.source);
        let device = std::fs::metadata(self.source).map_err(Error::io(doing))?.rdev();
        Ok(format!("{}:{}", nix::sys::stat::major(device), nix::sys::stat::minor(device)))
    }
}

/// Parsed from `/proc/self/mountinfo` (proc(5)). Of several, the last one lies on top.
fn root_filesystem(mounts: &str) -> Option<RootFilesystem<'_>> {
    mounts.lines().rev().find_map(|line| {
        let (place, what) = line.split_once(" - ")?;
        let mut what = what.split(' ');
        match place.split(' ').collect::<Vec<_>>()[..] {
            [_, _, device, _, "/", ..] => {
                Some(RootFilesystem { device, kind: what.next()?, source: what.next()? })
            }
            _ => None,
        }
    })
}

/// A partition of a disk.
#[derive(Debug, PartialEq, Eq)]
struct Partition {
    name: String,
    /// `MAJOR:MINOR`
    device: String,
    /// From 1 on.
    number: u32,
    /// Of 512 bytes, behind it to the end of the disk.
    unused_sectors: u64,
}

/// The partition that ends last of the disk that sysfs has here; `None` if it has none.
fn last_partition(disk: &Path) -> Option<Partition> {
    let text = |path: PathBuf| Some(std::fs::read_to_string(path).ok()?.trim().to_owned());
    let sectors = |path: PathBuf| text(path)?.parse::<u64>().ok();
    let size = sectors(disk.join("size"))?;
    let partitions = std::fs::read_dir(disk).ok()?.flatten().filter_map(|entry| {
        let path = entry.path();
        let end = sectors(path.join("start"))? + sectors(path.join("size"))?;
        Some(Partition {
            name: entry.file_name().into_string().ok()?,
            device: text(path.join("dev"))?,
            number: text(path.join("partition"))?.parse().ok()?,
            unused_sectors: size.saturating_sub(end),
        })
    });
    partitions.min_by_key(|partition| partition.unused_sectors)
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
    fn the_partition_that_ends_last_is_found_and_a_disk_without_any_has_none() {
        let sys = tempfile::tempdir().unwrap();
        let disk = sys.path();
        std::fs::write(disk.join("size"), "1000\n").unwrap();
        std::fs::create_dir(disk.join("queue")).unwrap();
        assert_eq!(last_partition(disk), None);
        // As in Debian's and Ubuntu's images: the root has the first number, and the others lie before it.
        for (number, start, size) in [(1, 100, 300), (14, 2, 8), (15, 10, 90)] {
            let directory = disk.join(format!("vda{number}"));
            std::fs::create_dir(&directory).unwrap();
            for (name, value) in [
                ("start", start.to_string()),
                ("size", size.to_string()),
                ("partition", number.to_string()),
                ("dev", format!("254:{number}")),
            ] {
                std::fs::write(directory.join(name), format!("{value}\n")).unwrap();
            }
        }
        let (name, device) = ("vda1".to_owned(), "254:1".to_owned());
        let wanted = Partition { name, device, number: 1, unused_sectors: 600 };
        assert_eq!(last_partition(disk), Some(wanted));
    }

    /// The number of a root on btrfs is no partition's, and it stayed as small as in the image without a word.
    #[test]
    fn a_root_on_btrfs_is_found_by_the_name_of_its_partition() {
        let mounts = "22 1 0:30 /root / rw,relatime shared:1 - btrfs /dev/null rw,compress=zstd:1,subvol=/root\n\
                      23 22 0:30 /home /home rw,relatime shared:2 - btrfs /dev/vda4 rw,subvol=/home\n";
        let root = root_filesystem(mounts).unwrap();
        assert_eq!((root.kind, root.source), ("btrfs", "/dev/null"));
        assert_eq!(root.device().unwrap(), "1:3", "that of /dev/null");
        let gone = RootFilesystem { source: "/dev/nothing", ..root };
        assert!(gone.device().unwrap_err().to_string().contains("/dev/nothing"));
    }

    #[test]
    fn the_root_filesystem_is_the_one_on_top() {
        let mounts = "1 1 0:2 / / rw - rootfs rootfs rw\n22 1 254:4 / / rw - xfs /dev/vda4 rw\n";
        let root = root_filesystem(mounts).unwrap();
        assert_eq!((root.kind, root.device().unwrap().as_str()), ("xfs", "254:4"));
        assert_eq!(root_filesystem(""), None);
    }

    /// A root on xfs was given to resize2fs, which knows only ext4.
    #[test]
    fn each_filesystem_is_grown_by_its_own_program() {
        let grown = |kind| resize(kind, "/dev/vda4").unwrap();
        assert_eq!(grown("ext4"), ["resize2fs", "/dev/vda4"]);
        assert_eq!(grown("xfs"), ["xfs_growfs", "/"]);
        assert_eq!(grown("btrfs"), ["btrfs", "filesystem", "resize", "max", "/"]);
        assert!(resize("f2fs", "/dev/vda4").unwrap_err().to_string().contains("f2fs"));
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
