//! Whether a qcow2 file has all of its tables and compressed clusters. `qemu-img` reads a table that was cut off as zeros, which make
//! the disk zeros there, and neither its `check` nor its `map` tells. Nothing that is read here becomes content: `qemu-img` alone reads the
//! disk. See QEMU's docs/interop/qcow2.txt.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::disk::blocks::index;
use crate::work::Work;

const MAGIC: &[u8; 4] = b"QFI\xfb";
const HEADER_BYTES: usize = 80;
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// As much as QEMU reads.
const L1_BYTES_MAX: u64 = 32 << 20;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COMPRESSED: u64 = 1 << 62;
/// An incompatible feature: the entries of L2 tables have 16 bytes.
const EXTENDED_L2: u64 = 1 << 4;
/// The length of compressed data is counted in these.
const SECTOR_BYTES: u64 = 512;

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().copied().map_or(0, u64::from_be_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().copied().map_or(0, u32::from_be_bytes)
}

/// What lies beyond the file's end, if anything does. `qemu-img` has found that it is a qcow2 file.
pub(super) fn missing(file: &File, length_bytes: u64, work: &Work) -> io::Result<Option<String>> {
    let mut header = [0; HEADER_BYTES];
    if length_bytes < HEADER_BYTES as u64 {
        return Ok(Some("its header is longer".to_owned()));
    }
    file.read_exact_at(&mut header, 0)?;
    let cluster_bits = u32_at(&header, 20);
    if !header.starts_with(MAGIC) || !CLUSTER_BITS.contains(&cluster_bits) {
        return Err(io::Error::other("qemu-img takes it for a qcow2 file, and it is none"));
    }
    let features = if u32_at(&header, 4) < 3 { 0 } else { u64_at(&header, 72) };
    let layout = Layout { length_bytes, cluster_bits, is_extended: features & EXTENDED_L2 != 0 };
    let (l1_bytes, l1_at) = (u64::from(u32_at(&header, 36)) * 8, u64_at(&header, 40));
    if l1_bytes > L1_BYTES_MAX || l1_at.saturating_add(l1_bytes) > length_bytes {
        return Ok(Some(format!("its first table has {l1_bytes} bytes from {l1_at} on")));
    }
    let mut l1 = vec![0; index(l1_bytes)];
    file.read_exact_at(&mut l1, l1_at)?;
    let cluster_bytes = 1 << cluster_bits;
    let mut table = vec![0; index(cluster_bytes)];
    // Each table is there once, so all together are not longer than the file.
    let mut left_bytes = length_bytes;
    let tables = l1.chunks_exact(8).map(|entry| u64_at(entry, 0) & OFFSET);
    for at in tables.filter(|at| *at != 0) {
        work.step(0)?;
        if at.saturating_add(cluster_bytes) > length_bytes {
            return Ok(Some(format!("one of its tables has {cluster_bytes} bytes from {at} on")));
        }
        let Some(left) = left_bytes.checked_sub(cluster_bytes) else {
            return Ok(Some("its tables together are longer".to_owned()));
        };
        left_bytes = left;
        file.read_exact_at(&mut table, at)?;
        if let Some(end) = layout.compressed_beyond(&table) {
            return Ok(Some(format!("its compressed data goes on to byte {end}")));
        }
    }
    Ok(None)
}

struct Layout {
    length_bytes: u64,
    cluster_bits: u32,
    is_extended: bool,
}

impl Layout {
    /// Where compressed data of a table ends that ends beyond the file. `qemu-img` writes its last sector whole; and if a part of it is not there,
    /// what was cut off is not known.
    fn compressed_beyond(&self, table: &[u8]) -> Option<u64> {
        let entry_bytes = if self.is_extended { 16 } else { 8 };
        let sectors_shift = 62 - (self.cluster_bits - 8);
        let sectors_mask = (1 << (self.cluster_bits - 8)) - 1;
        let entries = table.chunks_exact(entry_bytes).map(|entry| u64_at(entry, 0));
        let end = |entry: u64| {
            let offset = entry & ((1 << sectors_shift) - 1);
            let sectors = ((entry >> sectors_shift) & sectors_mask) + 1;
            offset - offset % SECTOR_BYTES + sectors * SECTOR_BYTES
        };
        let compressed = entries.filter(|entry| entry & COMPRESSED != 0);
        compressed.map(end).find(|end| *end > self.length_bytes)
    }
}
