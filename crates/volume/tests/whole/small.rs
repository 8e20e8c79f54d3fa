//! Small filesystems for pools that run full or lose their disk.

use std::path::{Path, PathBuf};

use crate::server::{run, try_run};

/// A small filesystem; it goes when this goes.
pub struct Small {
    pub path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Small {
    pub fn mount() -> Option<Self> {
        Self::mount_with(|_| Some("-t tmpfs -o size=24m perigee-test".to_owned()))
    }

    /// ext4 in a file. It reserves, delays and journals, as what pools are really on.
    pub fn mount_ext4() -> Option<Self> {
        Self::mount_with(|dir| {
            let image = dir.join("ext4.img").display().to_string();
            run(&["truncate", "--size=32M", &image]);
            let made = try_run(&["mkfs.ext4", "-q", "-m", "0", &image]);
            made.status.success().then(|| format!("-o loop {image}"))
        })
    }

    fn mount_with(arguments: impl FnOnce(&Path) -> Option<String>) -> Option<Self> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("small");
        std::fs::create_dir(&path).expect("a directory");
        let (arguments, text) = (arguments(dir.path())?, path.display().to_string());
        let args: Vec<&str> = arguments.split(' ').collect();
        let mounted = try_run(&[&["mount"], &args[..], &[&text]].concat());
        mounted.status.success().then_some(Self { path, _dir: dir })
    }

    /// Takes so many MiB of its space, until [`Self::make_room`].
    pub fn fill(&self, mib: usize) {
        let (count, of) = (format!("count={mib}"), format!("of={}", self.ballast().display()));
        run(&["dd", "if=/dev/zero", "bs=1M", &count, &of]);
    }

    pub fn make_room(&self) {
        std::fs::remove_file(self.ballast()).expect("the ballast");
    }

    fn ballast(&self) -> PathBuf {
        self.path.join("ballast")
    }

    /// From now on every access to the disk is an I/O error, as when its cable is pulled (ext4's
    /// `SHUTDOWN` without a last write of its journal).
    pub fn pull_the_cable(&self) {
        let ioctl = "open(my $dir, '<', $ARGV[0]) or die $!; my $how = pack('L', 2);
                     ioctl($dir, 0x8004587d, $how) or die $!";
        run(&["perl", "-e", ioctl, &self.path.display().to_string()]);
    }

    pub fn plug_it_in_again(&self) {
        let (path, image) = (self.path.display().to_string(), self.path.with_file_name("ext4.img"));
        run(&["umount", &path]);
        run(&["mount", "-o", "loop", &image.display().to_string(), &path]);
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        run(&["umount", "--lazy", &self.path.display().to_string()]);
    }
}
