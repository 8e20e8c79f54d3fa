//! What the user of an image is to know about it that its import did not fail for.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::images::import::inspect::Found;
use crate::images::progress::SECTOR_BYTES;

/// The sectors of disks that are not ours.
const LARGE_SECTOR_BYTES: u64 = 4096;
const TABLE: &[u8; 8] = b"EFI PART";

/// About an image of this size that was converted into this file. Empty if there is nothing to say.
pub(super) fn of(found: &Found, size_bytes: u64, converted: &Path) -> io::Result<String> {
    let added = size_bytes - found.disk_bytes;
    let longer = (added > 0).then(|| {
        format!(
            "the disk has {} bytes, which is no whole number of 4 KiB blocks: the image has {size_bytes} bytes, the last {added} of \
             them zeros",
            found.disk_bytes
        )
    });
    let disk = File::open(converted)?;
    let has_table = |at: u64| {
        let mut found = *TABLE;
        found.fill(0);
        // A small disk ends before it.
        let length = disk.read_at(&mut found, at)?;
        Ok::<_, io::Error>(length == TABLE.len() && found == *TABLE)
    };
    let other = (has_table(LARGE_SECTOR_BYTES)? && !has_table(SECTOR_BYTES)?).then(|| {
        format!(
            "its partition table (GPT) is made for sectors of {LARGE_SECTOR_BYTES} bytes, and the disks of guests and clients have \
             sectors of {SECTOR_BYTES} bytes: they find no partitions on it"
        )
    });
    let notes: Vec<String> = found.note.iter().cloned().chain(longer).chain(other).collect();
    Ok(notes.join("; "))
}
