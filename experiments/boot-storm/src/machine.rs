//! The resources of a storm on this machine: separate disks for source and private data, and limits for the
//! server's memory and its disks' speed. Everything carries this process's id and is removed when it is
//! dropped.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::mount::{MntFlags, umount2};

const SECTOR_BYTES: u64 = 512;
/// How long a device or a group may stay busy after it was released.
const BUSY_MAX: Duration = Duration::from_secs(20);

/// Runs a program and waits for its end.
pub fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("can't run {program}"))?;
    if !output.status.success() {
        bail!("{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn until_it_works(what: &str, mut work: impl FnMut() -> Result<()>) -> Result<()> {
    let deadline = Instant::now() + BUSY_MAX;
    while let Err(error) = work() {
        if Instant::now() > deadline {
            return Err(error.context(format!("waited {} s for {what}", BUSY_MAX.as_secs())));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// A file as a block device with an ext4 filesystem on it.
pub struct LoopDisk {
    device: PathBuf,
    pub dir: PathBuf,
    mounted: bool,
}

impl LoopDisk {
    pub fn make(scratch: &Path, name: &str, size_bytes: u64) -> Result<Self> {
        let file = scratch.join(format!("{name}.disk"));
        fs::File::create(&file)?.set_len(size_bytes)?;
        let path = file.to_string_lossy().into_owned();
        // The filesystem is for a few large files.
        let kind = ["-q", "-t", "ext4", "-T", "largefile", "-E", "lazy_itable_init=0"];
        run("mke2fs", &[&kind[..], &[&path]].concat())?;
        // Direct I/O, because the host's page cache would otherwise keep everything a second time.
        let device = run("losetup", &["--find", "--show", "--direct-io=on", &path])?;
        let dir = scratch.join(name);
        fs::create_dir_all(&dir)?;
        let mut disk = Self { device: device.into(), dir, mounted: false };
        disk.mount()?;
        Ok(disk)
    }

    fn mount(&mut self) -> Result<()> {
        let (device, dir) = (self.device.to_string_lossy(), self.dir.to_string_lossy());
        run("mount", &["-t", "ext4", "-o", "noatime", &device, &dir])?;
        self.mounted = true;
        Ok(())
    }

    fn unmount(&mut self) -> Result<()> {
        if self.mounted {
            until_it_works("the disk to be free", || {
                umount2(&self.dir, MntFlags::empty()).context("can't unmount")
            })?;
            self.mounted = false;
        }
        Ok(())
    }

    /// Removes all of its data from memory.
    pub fn forget(&mut self) -> Result<()> {
        self.unmount()?;
        self.mount()
    }

    /// The bytes that were read from the disk since it was created.
    pub fn read_bytes(&self) -> Result<u64> {
        let name = self.device.file_name().context("a device's name")?;
        let path = Path::new("/sys/block").join(name).join("stat");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let sectors: u64 = text.split_whitespace().nth(2).context("a count of sectors")?.parse()?;
        Ok(sectors * SECTOR_BYTES)
    }

    /// `MAJOR:MINOR`.
    fn number(&self) -> Result<String> {
        let device = fs::metadata(&self.device)?.rdev();
        Ok(format!("{}:{}", nix::sys::stat::major(device), nix::sys::stat::minor(device)))
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        let freed = self.unmount();
        let device = self.device.to_string_lossy().into_owned();
        if let Err(error) = freed.and_then(|()| run("losetup", &["--detach", &device])) {
            eprintln!("can't give back {device}: {error:#}");
        }
    }
}

const MEMORY: &str = "/sys/fs/cgroup/memory";
const BLOCKS: &str = "/sys/fs/cgroup/blkio";

/// A control group for the servers of one storm. It counts their memory with the page cache that they fill, and
/// can limit it.
pub struct Group {
    dirs: Vec<PathBuf>,
}

impl Group {
    /// # Errors
    /// If the kernel has no memory controller of cgroup version 1.
    pub fn make(
        name: &str,
        memory_max_bytes: Option<u64>,
        disks: &[(&LoopDisk, Option<u64>)],
    ) -> Result<Self> {
        ensure!(
            Path::new(MEMORY).join("memory.max_usage_in_bytes").exists(),
            "the kernel has no memory controller of cgroup version 1 at {MEMORY}"
        );
        let name = format!("perigee-storm-{}-{name}", std::process::id());
        let mut group = Self { dirs: Vec::new() };
        for controller in [MEMORY, BLOCKS] {
            let dir = Path::new(controller).join(&name);
            fs::create_dir(&dir).with_context(|| format!("can't make {}", dir.display()))?;
            group.dirs.push(dir);
        }
        if let Some(bytes) = memory_max_bytes {
            group.set(0, "memory.limit_in_bytes", &bytes.to_string())?;
        }
        for (disk, reads_per_s) in disks {
            if let Some(reads) = reads_per_s {
                let limit = format!("{} {reads}", disk.number()?);
                group.set(1, "blkio.throttle.read_iops_device", &limit)?;
            }
        }
        Ok(group)
    }

    fn set(&self, controller: usize, name: &str, value: &str) -> Result<()> {
        let path = self.dirs[controller].join(name);
        fs::write(&path, value)
            .with_context(|| format!("can't write {value} to {}", path.display()))
    }

    /// Starts a program that is in the group from its first instruction.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("sh");
        let join =
            "for g in $1 $2; do echo $$ > $g/cgroup.procs || exit 125; done; shift 2; exec \"$@\"";
        command.args(["-c", join, "sh"]).args(&self.dirs).arg(program);
        command
    }

    pub fn memory_peak_bytes(&self) -> Result<u64> {
        Ok(fs::read_to_string(self.dirs[0].join("memory.max_usage_in_bytes"))?.trim().parse()?)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for dir in &self.dirs {
            let removed = until_it_works("the group to be empty", || Ok(fs::remove_dir(dir)?));
            if let Err(error) = removed {
                eprintln!("can't remove {}: {error:#}", dir.display());
            }
        }
    }
}
