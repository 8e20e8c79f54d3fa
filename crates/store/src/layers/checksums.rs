//! Checksums of a sealed layer's data, by which changed bytes are found.
//!
//! File `UUID.sum`, pages of 4096 bytes. Page 0 is a header as the maps have it, with magic
//! `PERIGEES`. It is written after everything else is durable, so a file without it is not finished.
//! Then follows one page for each 1022 chunks of 64 KiB, a hole if the layer has no data there:
//!
//! | bytes | |
//! |---|---|
//! | 0..4 | CRC32C of the rest of the page, little endian as every number here |
//! | 4..8 | which page this is, from 0 |
//! | 8..4096 | CRC32C of each chunk: of the bytes of its data blocks, one after the other |
//!
//! **Meaning.** The checksum of a chunk changes if the bytes of its data blocks change, or if other blocks
//! become data blocks. So it also finds damage of the map that the map itself can't tell from a torn
//! write.
//!
//! Another host that copies the layer also fetches this file, and compares its copy with it. If it copies all that the layer
//! shows and the layer stands on others, it gets checksums of that ([`crate::volume::visible_checksums`]).
//!
//! **Limits.** The checksums are computed from the files after sealing. Earlier damage is not found.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::try_join;
use perigee_block::device::{Device, IoError};
use perigee_model::LayerId;
use perigee_model::volume::{BLOCK_BYTES, ContentDigest};

use crate::blocking::blocking;
use crate::disk::blocks::{BlockState, blocks_of, index};
use crate::disk::files::{BlockFile, LayerFiles};
use crate::disk::map::{self, Magic, PAGE_BYTES};
use crate::layers::content::Content;
use crate::layers::copy::LayerCopy;
use crate::layers::layer::{Layer, checksums_name};
use crate::layers::remote::ANSWER_MAX;
use crate::work::Work;

const CHUNK_BLOCKS: u64 = 16;
pub(crate) const CHUNK_BYTES: u64 = CHUNK_BLOCKS * BLOCK_BYTES;
pub(crate) const PAGE_BYTES_U32: u32 = 4096;
const PAGE_HEADER_BYTES: usize = 8;
pub(crate) const PAGE_CHECKSUMS: usize = (PAGE_BYTES - PAGE_HEADER_BYTES) / 4;
const PAGE_BLOCKS: u64 = PAGE_CHECKSUMS as u64 * CHUNK_BLOCKS;
/// Chunks are read in pieces of at most this many blocks.
const PIECE_BLOCKS: u64 = 16 * CHUNK_BLOCKS;

pub(crate) fn page_count(blocks: u64) -> u64 {
    blocks.div_ceil(PAGE_BLOCKS)
}

pub(crate) fn page_offset(page: u64) -> u64 {
    (1 + page) * PAGE_BYTES as u64
}

/// A fault in a layer: the range, if it is known, and a description.
pub(crate) type Finding = (Option<Range<u64>>, String);

/// The result of comparing a layer with its checksums.
pub(crate) enum Compared {
    /// The layer has no checksums yet.
    WithoutChecksums,
    DamagedChecksums(Vec<Finding>),
    Data {
        compared_bytes: u64,
        findings: Vec<Finding>,
    },
}

/// The checksums of the chunks of one page, and the ranges that could not be read.
struct PageChecksums {
    checksums: Vec<u32>,
    data_bytes: u64,
    unreadable: Vec<Finding>,
}

/// The blocks whose chunks have their checksums in a page.
pub(crate) fn page_blocks(page: u64, blocks: u64) -> Range<u64> {
    let first = page * PAGE_BLOCKS;
    first..(first + PAGE_BLOCKS).min(blocks)
}

/// Reads the data of a page's chunks.
fn page_checksums(layer: &Layer, page: u64, work: &Work) -> io::Result<PageChecksums> {
    page_checksums_of(layer, page, page_data(layer, page), work, None)
}

/// The blocks of a page that are data.
fn page_data(layer: &Layer, page: u64) -> impl Iterator<Item = Range<u64>> {
    let runs = layer.states.runs(page_blocks(page, layer.blocks()));
    runs.filter(|(_, state)| *state == BlockState::Data).map(|(run, _)| run)
}

/// As [`page_checksums`], for the given blocks. They are added to the content too, if one is given.
fn page_checksums_of(
    layer: &Layer,
    page: u64,
    runs: impl Iterator<Item = Range<u64>>,
    work: &Work,
    mut content: Option<&mut Content>,
) -> io::Result<PageChecksums> {
    let first = page * PAGE_BLOCKS;
    let mut found =
        PageChecksums { checksums: vec![0; PAGE_CHECKSUMS], data_bytes: 0, unreadable: Vec::new() };
    let mut buffer = vec![0; index(PIECE_BLOCKS * BLOCK_BYTES)];
    for (run, state) in runs.flat_map(|run| layer.states.runs(run)) {
        for piece in pieces(run) {
            let (at, length) = bytes_of(&piece);
            let buffer = &mut buffer[..index(length)];
            // The file of a copy may have something else under blocks that are known to be zeros.
            let read = match state {
                BlockState::Zero => {
                    buffer.fill(0);
                    Ok(())
                }
                _ => layer.data().read_at(at, buffer),
            };
            match read {
                Ok(()) => {
                    add(&mut found.checksums, piece.start - first, buffer);
                    if let Some(content) = &mut content {
                        content.add(piece.start, buffer);
                    }
                }
                Err(error) => {
                    let why = format!("its data can't be read: {error}");
                    found.unreadable.push((Some(at..at + length), why));
                }
            }
            found.data_bytes += length;
            work.step(length)?;
        }
    }
    Ok(found)
}

fn bytes_of(blocks: &Range<u64>) -> (u64, u64) {
    (blocks.start * BLOCK_BYTES, (blocks.end - blocks.start) * BLOCK_BYTES)
}

/// Parts of a run that end where a chunk ends.
fn pieces(run: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut at = run.start;
    std::iter::from_fn(move || {
        (at < run.end).then(|| {
            let end = (at / PIECE_BLOCKS + 1) * PIECE_BLOCKS;
            let piece = at..end.min(run.end);
            at = piece.end;
            piece
        })
    })
}

/// Adds the bytes of blocks from `block` of the page on to their chunks' checksums.
fn add(checksums: &mut [u32], block: u64, bytes: &[u8]) {
    let to_chunk_end = index(CHUNK_BYTES - block * BLOCK_BYTES % CHUNK_BYTES);
    let (first, rest) = bytes.split_at(to_chunk_end.min(bytes.len()));
    let parts = std::iter::once(first).chain(rest.chunks(index(CHUNK_BYTES)));
    for (sum, part) in checksums[index(block / CHUNK_BLOCKS)..].iter_mut().zip(parts) {
        *sum = crc32c::crc32c_append(*sum, part);
    }
}

fn page_number(page: u64) -> [u8; 4] {
    u32::try_from(page).expect("a layer of less than 2^32 pages of checksums").to_le_bytes()
}

/// A page with these checksums of its chunks.
pub(crate) fn page_of(page: u64, checksums: &[u32]) -> Vec<u8> {
    let mut bytes = vec![0; PAGE_BYTES];
    bytes[4..8].copy_from_slice(&page_number(page));
    bytes.splice(PAGE_HEADER_BYTES.., checksums.iter().flat_map(|sum| sum.to_le_bytes()));
    map::seal(&mut bytes);
    bytes
}

/// Computes the checksums of a sealed layer, and stores them durably. Returns what the layer shows if it stands on no other.
pub(crate) fn make(
    files: &dyn LayerFiles,
    layer: &Layer,
    work: &Work,
) -> io::Result<ContentDigest> {
    let mut content = Content::new(layer.blocks());
    let pages = page_count(layer.blocks());
    let file = files.create(&checksums_name(layer.id), page_offset(pages))?;
    for page in 0..pages {
        let data = page_data(layer, page);
        let found = page_checksums_of(layer, page, data, work, Some(&mut content))?;
        if let Some((_, why)) = found.unreadable.into_iter().next() {
            return Err(io::Error::other(why));
        }
        if found.data_bytes > 0 {
            file.write_at(page_offset(page), &page_of(page, &found.checksums))?;
        }
    }
    file.sync_created()?;
    file.write_at(0, &map::header(Magic::Checksums, layer.id, layer.blocks(), &[0; 16]))?;
    file.sync()?;
    files.sync_names()?;
    Ok(content.digest())
}

/// Whether a layer's checksums are complete.
pub(crate) fn are_made(files: &dyn LayerFiles, layer: LayerId) -> io::Result<bool> {
    Ok(open(files, layer)?.is_some_and(|(_, header)| header.iter().any(|byte| *byte != 0)))
}

/// A file of checksums and its first page.
type Opened = (Arc<dyn BlockFile>, Vec<u8>);

fn open(files: &dyn LayerFiles, layer: LayerId) -> io::Result<Option<Opened>> {
    let file = match files.open(&checksums_name(layer)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut header = vec![0; PAGE_BYTES];
    match file.read_at(0, &mut header) {
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => Err(error),
        _ => Ok(Some((file, header))),
    }
}

/// Reads all data of a sealed layer and compares them with its checksums.
///
/// # Errors
/// When the work should stop.
pub(crate) fn compare(files: &dyn LayerFiles, layer: &Layer, work: &Work) -> io::Result<Compared> {
    let blocks = layer.blocks();
    let damaged = |why: String| Ok(Compared::DamagedChecksums(vec![(None, why)]));
    let (file, header) = match open(files, layer.id) {
        Ok(None) => return Ok(Compared::WithoutChecksums),
        Ok(Some((_, header))) if header.iter().all(|byte| *byte == 0) => {
            return Ok(Compared::WithoutChecksums);
        }
        Ok(Some(found)) => found,
        Err(error) => return damaged(format!("its checksums can't be read: {error}")),
    };
    if header != map::header(Magic::Checksums, layer.id, blocks, &[0; 16]) {
        return damaged("the header of its checksums is damaged".to_owned());
    }
    let (mut compared_bytes, mut findings) = (0, Vec::new());
    for page in 0..page_count(blocks) {
        let stored = match read_page(&*file, page) {
            Ok(stored) => stored,
            Err(why) => {
                let (at, length) = bytes_of(&page_blocks(page, blocks));
                return Ok(Compared::DamagedChecksums(vec![(Some(at..at + length), why)]));
            }
        };
        let found = page_checksums(layer, page, work)?;
        compared_bytes += found.data_bytes;
        if found.unreadable.is_empty() {
            findings.extend(differing(page, blocks, &stored, &found.checksums));
        } else {
            findings.extend(found.unreadable);
        }
    }
    Ok(Compared::Data { compared_bytes, findings })
}

/// What is wrong with the data of one page of a layer. `None` if nothing is, or the layer has no checksums yet.
///
/// # Errors
/// When the checksums can't be read, or the work should stop.
pub(crate) fn page_finding(
    files: &dyn LayerFiles,
    layer: &Layer,
    page: u64,
    work: &Work,
) -> io::Result<Option<Finding>> {
    let blocks = layer.blocks();
    let Some(file) = finished(files, layer.id)?.filter(|_| page < page_count(blocks)) else {
        return Ok(None);
    };
    let stored = read_page(&*file, page).map_err(io::Error::other)?;
    let found = page_checksums(layer, page, work)?;
    let differing = differing(page, blocks, &stored, &found.checksums);
    Ok(found.unreadable.into_iter().chain(differing).next())
}

/// A layer's file of checksums for another host, if it is finished.
pub(crate) fn finished(
    files: &dyn LayerFiles,
    layer: LayerId,
) -> io::Result<Option<Arc<dyn BlockFile>>> {
    let finished = |(_, header): &Opened| header.iter().any(|byte| *byte != 0);
    Ok(open(files, layer)?.filter(finished).map(|(file, _)| file))
}

/// Compares a fully fetched copy with the checksums of its source host.
///
/// # Errors
/// When the other host can't be asked, when its file does not have this layer's checksums, or when the
/// work should stop.
pub(crate) async fn compare_with_source(
    copy: &LayerCopy,
    checksums: &dyn Device,
    work: &Arc<Work>,
) -> Result<Vec<Finding>, IoError> {
    let layer = copy.layer();
    let wrong = |why: &str| IoError::from(io::Error::other(format!("at the other host: {why}")));
    let size_bytes = page_offset(page_count(layer.blocks()));
    let header = map::header(Magic::Checksums, layer.id, layer.blocks(), &[0; 16]);
    if checksums.size_bytes() != size_bytes || told(checksums, 0).await? != header {
        return Err(wrong("the checksums are not this layer's"));
    }
    let mut findings = Vec::new();
    for page in 0..page_count(layer.blocks()) {
        let blocks = page_blocks(page, layer.blocks());
        if copy.is_own() && layer.states.all_are(&blocks, BlockState::Absent) {
            continue;
        }
        let (mut at, length) = bytes_of(&blocks);
        let (stored, extents) =
            try_join(told(checksums, page_offset(page)), copy.remote.extents(&(at..at + length)))
                .await?;
        let stored = parse_page(&stored, page).map_err(|why| wrong(&why))?;
        // Data blocks of the source may be zeros that take no space here.
        let mut data = Vec::new();
        for extent in extents {
            if copy.remote.has_bytes(&extent) {
                data.push(blocks_of(at, extent.length_bytes));
            }
            at += extent.length_bytes;
        }
        let (same, work) = (Arc::clone(layer), Arc::clone(work));
        let found =
            blocking(move || page_checksums_of(&same, page, data.into_iter(), &work, None)).await?;
        findings.extend(found.unreadable);
        findings.extend(differing(page, layer.blocks(), &stored, &found.checksums));
    }
    Ok(findings)
}

/// A page of another host's checksums.
async fn told(checksums: &dyn Device, offset: u64) -> Result<Bytes, IoError> {
    let answer = tokio::time::timeout(ANSWER_MAX, checksums.read(offset, PAGE_BYTES_U32));
    answer.await.unwrap_or_else(|_| {
        let why = format!("it did not say a layer's checksums in {} s", ANSWER_MAX.as_secs());
        Err(IoError::Unreachable(why))
    })
}

/// A page's checksums. They are all zero if the layer has no data there.
fn read_page(file: &dyn BlockFile, page: u64) -> Result<Vec<u32>, String> {
    let mut bytes = vec![0; PAGE_BYTES];
    file.read_at(page_offset(page), &mut bytes)
        .map_err(|error| format!("page {page} of its checksums can't be read: {error}"))?;
    parse_page(&bytes, page)
}

pub(crate) fn parse_page(bytes: &[u8], page: u64) -> Result<Vec<u32>, String> {
    let hole = bytes.iter().all(|byte| *byte == 0);
    let ours = map::is_sealed(bytes) && bytes[4..8] == page_number(page);
    if !hole && !ours {
        return Err(format!("page {page} of its checksums is damaged"));
    }
    let checksums = bytes[PAGE_HEADER_BYTES..].chunks(4);
    Ok(checksums.map(|sum| u32::from_le_bytes(sum.try_into().expect("four bytes"))).collect())
}

/// Runs of chunks whose checksums differ, as byte ranges of the layer.
pub(crate) fn differing(page: u64, blocks: u64, stored: &[u32], found: &[u32]) -> Vec<Finding> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let chunks = (page * PAGE_CHECKSUMS as u64..).zip(stored.iter().zip(found));
    for (chunk, _) in chunks.filter(|(_, (stored, found))| stored != found) {
        let at = chunk * CHUNK_BYTES;
        let end = (at + CHUNK_BYTES).min(blocks * BLOCK_BYTES);
        match ranges.last_mut() {
            Some(last) if last.end == at => last.end = end,
            _ => ranges.push(at..end),
        }
    }
    let why = "its data is not what was sealed";
    ranges.into_iter().map(|range| (Some(range), why.to_owned())).collect()
}
