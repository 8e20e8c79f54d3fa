//! Checksums of all that a sealed layer shows, computed when another host asks for them.
//!
//! A layer that stands on others, or of which a part is still at another host, has no file with such checksums: its own
//! ([`crate::layers::checksums`]) are only of what it has itself. A host that copies all that it shows compares its copy with these.
//!
//! The export has the layout of that file, with another tag in the header. The checksum of a chunk is of all its bytes, and 0
//! if they are all zeros. So it does not depend on which layer has a block, or on whether zeros take space.
//!
//! Before a page is told, what the complete layers here have there is compared with their own checksums. So damage of
//! this host's disk is found, and is not what copies are compared with.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use perigee_block::device::{Device, Extent, IoError, Zeroing};
use perigee_model::LayerId;
use perigee_model::volume::BLOCK_BYTES;
use tokio::sync::Semaphore;

use crate::blocking::blocking;
use crate::disk::blocks::{BlockState, index};
use crate::disk::files::LayerFiles;
use crate::disk::map::{self, Magic};
use crate::layers::checksums::{
    self, CHUNK_BYTES, Finding, PAGE_BYTES_U32, PAGE_CHECKSUMS, page_blocks, page_count,
    page_offset,
};
use crate::layers::copy::LayerCopy;
use crate::layers::layer::Layer;
use crate::volume::session::read_only;
use crate::work::{StopOnDrop, Work};

/// The tag of the header, which tells these from the checksums of a layer's own data.
const TAG: [u8; 16] = *b"PERIGEE SHOWN   ";
/// Chunks are read in pieces of this much.
const PIECE_BYTES: u64 = 16 * CHUNK_BYTES;
/// The other host may compute a page for this long.
const PAGE_MAX: Duration = Duration::from_secs(180);

fn header(layer: LayerId, blocks: u64) -> Vec<u8> {
    map::header(Magic::Checksums, layer, blocks, &TAG)
}

/// The checksum of a chunk.
fn checksum(chunk: &[u8]) -> u32 {
    const ZEROS: [u8; 4096] = [0; 4096];
    let is_zero = chunk.chunks(ZEROS.len()).all(|part| *part == ZEROS[..part.len()]);
    if is_zero { 0 } else { crc32c::crc32c(chunk) }
}

/// Where the pieces of a page begin and end, in bytes of the layer.
fn pieces(page: u64, blocks: u64) -> impl Iterator<Item = Range<u64>> {
    let of = page_blocks(page, blocks);
    let (mut at, end) = (of.start * BLOCK_BYTES, of.end * BLOCK_BYTES);
    std::iter::from_fn(move || {
        let piece = at..(at + PIECE_BYTES).min(end);
        at = piece.end;
        (!piece.is_empty()).then_some(piece)
    })
}

/// The checksums of all that a sealed layer shows, read-only. A request reads one page.
pub(crate) struct VisibleSums {
    layer: LayerId,
    blocks: u64,
    device: Arc<dyn Device>,
    /// The layers of its chain that are complete here, and where their checksums are.
    here: Vec<Arc<Layer>>,
    files: Arc<dyn LayerFiles>,
    /// Whoever has it open gets one page at a time: a small answer is much work.
    turn: Semaphore,
}

impl VisibleSums {
    pub(crate) fn new(
        (layer, blocks): (LayerId, u64),
        device: Arc<dyn Device>,
        here: Vec<Arc<Layer>>,
        files: &Arc<dyn LayerFiles>,
    ) -> Self {
        Self { layer, blocks, device, here, files: Arc::clone(files), turn: Semaphore::new(1) }
    }

    async fn page(&self, page: u64) -> Result<Bytes, IoError> {
        let _turn = self.turn.acquire().await.expect("it is never closed");
        self.check_here(page).await?;
        let first = page_blocks(page, self.blocks).start * BLOCK_BYTES;
        let mut sums = vec![0; PAGE_CHECKSUMS];
        for piece in pieces(page, self.blocks) {
            if self.is_zero(&piece).await? {
                continue;
            }
            let length = u32::try_from(piece.end - piece.start).expect("a piece is small");
            let bytes = self.device.read(piece.start, length).await?;
            let chunks = bytes.chunks(index(CHUNK_BYTES)).map(checksum);
            for (sum, chunk) in
                sums[index((piece.start - first) / CHUNK_BYTES)..].iter_mut().zip(chunks)
            {
                *sum = chunk;
            }
        }
        Ok(checksums::page_of(page, &sums).into())
    }

    async fn is_zero(&self, piece: &Range<u64>) -> Result<bool, IoError> {
        let mut at = piece.start;
        while at < piece.end {
            let before = at;
            for extent in self.device.extents(at, piece.end - at).await? {
                if !extent.zero {
                    return Ok(false);
                }
                at += extent.length_bytes;
            }
            if at == before {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// # Errors
    /// What a layer has here is not what was sealed, or can't be read.
    async fn check_here(&self, page: u64) -> Result<(), IoError> {
        let work = Arc::<Work>::default();
        // It ends with the connection of the host that asks.
        let _stop = StopOnDrop(Arc::clone(&work));
        let (here, files) = (self.here.clone(), Arc::clone(&self.files));
        blocking(move || {
            here.iter().try_for_each(|layer| {
                match checksums::page_finding(&*files, layer, page, &work)? {
                    None => Ok(()),
                    Some((range, why)) => {
                        let at = range.map_or(0, |range| range.start);
                        let why = format!("layer {} is damaged at offset {at}: {why}", layer.id);
                        tracing::error!(why, "another host can't copy it");
                        Err(io::Error::other(why))
                    }
                }
            })
        })
        .await?;
        Ok(())
    }
}

impl Device for VisibleSums {
    fn size_bytes(&self) -> u64 {
        page_offset(page_count(self.blocks))
    }

    fn read(&self, offset: u64, length_bytes: u32) -> BoxFuture<'_, Result<Bytes, IoError>> {
        Box::pin(async move {
            // A client asks for nothing to hear whether this server answers.
            if length_bytes == 0 {
                return Ok(Bytes::new());
            }
            let page_bytes = u64::from(PAGE_BYTES_U32);
            let is_page = length_bytes == PAGE_BYTES_U32 && offset.is_multiple_of(page_bytes);
            if !is_page || offset + page_bytes > self.size_bytes() {
                let why = format!("{length_bytes} bytes at {offset} of checksums are not a page");
                return Err(IoError::Invalid(why));
            }
            match (offset / page_bytes).checked_sub(1) {
                None => Ok(header(self.layer, self.blocks).into()),
                Some(page) => self.page(page).await,
            }
        })
    }

    read_only!();

    fn extents(&self, _: u64, length: u64) -> BoxFuture<'_, Result<Vec<Extent>, IoError>> {
        Box::pin(async move { Ok(vec![Extent { length_bytes: length, hole: false, zero: false }]) })
    }
}

/// Compares a fully fetched copy of all that a layer shows with such checksums of its source host.
///
/// # Errors
/// When the other host can't be asked, or finds damage in what it has; when these are not this layer's checksums, or when the
/// work should stop.
pub(crate) async fn compare_with_source(
    copy: &LayerCopy,
    sums: &dyn Device,
    work: &Arc<Work>,
) -> Result<Vec<Finding>, IoError> {
    let layer = copy.layer();
    let blocks = layer.blocks();
    let wrong = |why: &str| IoError::from(io::Error::other(format!("at the other host: {why}")));
    let is_size = sums.size_bytes() == page_offset(page_count(blocks));
    if !is_size || read_page(sums, 0).await? != header(layer.id, blocks) {
        return Err(wrong("the checksums are not this layer's"));
    }
    let mut findings = Vec::new();
    for page in 0..page_count(blocks) {
        let told = read_page(sums, page_offset(page)).await?;
        let told = checksums::parse_page(&told, page).map_err(|why| wrong(&why))?;
        let (same, work) = (Arc::clone(layer), Arc::clone(work));
        let (found, unreadable) = blocking(move || page_here(&same, page, &work)).await?;
        findings.extend(unreadable);
        findings.extend(checksums::differing(page, blocks, &told, &found));
    }
    Ok(findings)
}

async fn read_page(sums: &dyn Device, offset: u64) -> Result<Bytes, IoError> {
    let answer = tokio::time::timeout(PAGE_MAX, sums.read(offset, PAGE_BYTES_U32));
    answer.await.unwrap_or_else(|_| {
        let why = format!("it did not say a layer's checksums in {} s", PAGE_MAX.as_secs());
        Err(IoError::Unreachable(why))
    })
}

/// The checksums of a page of a copy's bytes, and what of them can't be read.
fn page_here(layer: &Layer, page: u64, work: &Work) -> io::Result<(Vec<u32>, Vec<Finding>)> {
    let first = page_blocks(page, layer.blocks()).start * BLOCK_BYTES;
    let (mut sums, mut unreadable) = (vec![0; PAGE_CHECKSUMS], Vec::new());
    let mut buffer = vec![0; index(PIECE_BYTES)];
    for piece in pieces(page, layer.blocks()) {
        let buffer = &mut buffer[..index(piece.end - piece.start)];
        buffer.fill(0);
        let blocks = piece.start / BLOCK_BYTES..piece.end / BLOCK_BYTES;
        let mut data_bytes = 0;
        // The file may have something else under blocks that are known to be zeros.
        for (run, _) in layer.states.runs(blocks).filter(|(_, state)| *state == BlockState::Data) {
            let span = run.start * BLOCK_BYTES..run.end * BLOCK_BYTES;
            let part = &mut buffer[index(span.start - piece.start)..index(span.end - piece.start)];
            if let Err(error) = layer.data().read_at(span.start, part) {
                unreadable.push((Some(span.clone()), format!("its data can't be read: {error}")));
            }
            data_bytes += span.end - span.start;
        }
        work.step(data_bytes)?;
        if data_bytes > 0 {
            let chunks = buffer.chunks(index(CHUNK_BYTES)).map(checksum);
            for (sum, chunk) in
                sums[index((piece.start - first) / CHUNK_BYTES)..].iter_mut().zip(chunks)
            {
                *sum = chunk;
            }
        }
    }
    Ok((sums, unreadable))
}
