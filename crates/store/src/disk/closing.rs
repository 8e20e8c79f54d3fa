//! Closes removed files on a separate thread, so that no request waits for it.
//!
//! The kernel frees a removed file's space when its last descriptor is closed. For a fragmented file on
//! ext4 with the option `discard` this takes long (measured: 38 to 73 s for 2 GiB that were written at
//! random), and the thread that closes the file waits. A crash loses nothing: the name is already
//! removed, and the filesystem finishes the rest.

use std::fs::File;
use std::ops::Deref;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Smaller files are closed at once: a thread costs more.
const UNITS_MIN: u64 = (16 << 20) / 512; // st_blocks counts units of 512 bytes

/// A file that is closed on another thread if its name was removed.
pub(crate) struct ClosedLater(Option<File>);

impl From<File> for ClosedLater {
    fn from(file: File) -> Self {
        Self(Some(file))
    }
}

impl Deref for ClosedLater {
    type Target = File;

    fn deref(&self) -> &File {
        self.0.as_ref().expect("taken when it is dropped")
    }
}

impl Drop for ClosedLater {
    fn drop(&mut self) {
        let Some(file) = self.0.take() else { return };
        let is_large = |found: std::fs::Metadata| found.nlink() == 0 && found.blocks() >= UNITS_MIN;
        if file.metadata().is_ok_and(is_large) {
            let closer = std::thread::Builder::new().name("closer".into());
            if let Err(error) = closer.spawn(move || drop(file)) {
                tracing::debug!(%error, "can't start a thread to close a removed file; closing it here");
            }
        }
    }
}

/// Removes the name. The space is freed soon after.
pub(crate) fn remove(path: &Path) -> std::io::Result<()> {
    // Kept open, so that the removal itself does not close the last descriptor.
    let _held = File::open(path).map(ClosedLater::from);
    std::fs::remove_file(path)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_removed_large_file_is_closed_by_another_thread() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("large");
        std::fs::write(&path, vec![1; 16 << 20]).unwrap();
        let file = ClosedLater::from(File::open(&path).unwrap());
        assert!(file.metadata().unwrap().blocks() >= UNITS_MIN);
        let inode = file.metadata().unwrap().ino();
        let here = file.try_clone().unwrap();
        remove(&path).unwrap();
        assert!(!path.exists());
        drop(file);
        // Only `here` is left once the closer is through.
        let deadline = Instant::now() + Duration::from_secs(120);
        while open_descriptors(inode) > 1 {
            assert!(Instant::now() < deadline, "waited 120 s for the closer");
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(here);
    }

    fn open_descriptors(inode: u64) -> usize {
        std::fs::read_dir("/proc/self/fd")
            .unwrap()
            .filter_map(|entry| std::fs::metadata(entry.ok()?.path()).ok())
            .filter(|found| found.ino() == inode && found.nlink() == 0)
            .count()
    }
}
