//! Reads and writes that bypass the page cache, for volumes with the policy `direct`.
//!
//! The kernel requires whole blocks, in buffers that are aligned to blocks. A partial block is read,
//! changed and written back. The caller holds the locks of the blocks that it writes.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use perigee_model::volume::BLOCK_BYTES;

use crate::disk::blocks::{blocks_of, index};
use crate::disk::closing::ClosedLater;

/// A file that is read and written past the page cache (`O_DIRECT`), in whole blocks.
pub(crate) struct DirectFile(ClosedLater);

/// Memory that begins at a multiple of a block.
struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Aligned {
    fn new(length: usize) -> Self {
        let block = index(BLOCK_BYTES);
        let bytes = vec![0; length + block];
        let start = bytes.as_ptr().align_offset(block);
        Self { bytes, start, length }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.length]
    }
}

/// The offset and length of the blocks that a range touches, and the offset of the range in them.
fn whole_blocks(offset: u64, length: usize) -> (u64, usize, usize) {
    let blocks = blocks_of(offset, length as u64);
    let start = blocks.start * BLOCK_BYTES;
    (start, index(blocks.end * BLOCK_BYTES - start), index(offset - start))
}

/// The file, opened a second time with O_DIRECT.
///
/// # Errors
/// `InvalidInput` if the filesystem does not support that.
pub fn open_direct(file: &File) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(nix::libc::O_DIRECT)
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

impl DirectFile {
    /// Opens the file a second time, with O_DIRECT. Fails if the filesystem does not support it.
    pub(crate) fn open(file: &File) -> io::Result<Self> {
        open_direct(file).map(|file| Self(file.into()))
    }

    pub(crate) fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let (start, length, from) = whole_blocks(offset, buffer.len());
        let mut whole = Aligned::new(length);
        self.0.read_exact_at(whole.bytes(), start)?;
        buffer.copy_from_slice(&whole.bytes()[from..from + buffer.len()]);
        Ok(())
    }

    pub(crate) fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let (start, length, from) = whole_blocks(offset, data.len());
        let mut whole = Aligned::new(length);
        if length != data.len() {
            self.0.read_exact_at(whole.bytes(), start)?;
        }
        whole.bytes()[from..from + data.len()].copy_from_slice(data);
        self.0.write_all_at(whole.bytes(), start)
    }
}
