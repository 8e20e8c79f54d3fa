//! The SHA-256 of what an image shows. A copy is compared with it before it counts as complete, so a host that serves an
//! image can't change it: checksums ([`crate::layers::checksums`]) come from the host that serves, and find damage only.
//!
//! It is the SHA-256 of a tag, the size in bytes (64 bits, little endian as every number here), and, for each piece of 1 MiB
//! in which some block is not all zeros: the piece's number, and the SHA-256 of those blocks, each after its number. So zeros
//! cost nothing and may take space or not, and it is the same however the content is spread over layers.
//!
//! The host that makes an image computes it: of an import while the data is in memory, together with the checksums; of a
//! volume's snapshot afterwards in the background ([`crate::upkeep::background`]). The catalog keeps it with the image's topmost layer.
//! Of a copy that is not complete the catalog has what it has to be, if the controller has said that.

use std::io;
use std::sync::Arc;

use perigee_block::device::{Device, IoError};
use perigee_model::volume::{BLOCK_BYTES, ContentDigest};
use sha2::{Digest as _, Sha256};

use crate::blocking::blocking;
use crate::disk::blocks::{BlockState, index};
use crate::layers::layer::Layer;
use crate::work::Work;

const TAG: &[u8] = b"perigee content 1\n";
const PIECE_BLOCKS: u64 = 256;
const PIECE_BYTES: u64 = PIECE_BLOCKS * BLOCK_BYTES;

/// Takes blocks from the first to the last.
pub(crate) struct Content {
    whole: Sha256,
    /// The piece to which blocks were added last.
    piece: Option<(u64, Sha256)>,
}

impl Content {
    pub(crate) fn new(blocks: u64) -> Self {
        let mut whole = Sha256::new();
        whole.update(TAG);
        whole.update((blocks * BLOCK_BYTES).to_le_bytes());
        Self { whole, piece: None }
    }

    /// Adds the bytes of the blocks from `block` on. What is left out is zeros.
    pub(crate) fn add(&mut self, block: u64, bytes: &[u8]) {
        const ZEROS: [u8; 4096] = [0; 4096];
        for (block, bytes) in (block..).zip(bytes.chunks(ZEROS.len())) {
            if *bytes == ZEROS[..bytes.len()] {
                continue;
            }
            let piece = block / PIECE_BLOCKS;
            if self.piece.as_ref().is_none_or(|(now, _)| *now != piece) {
                self.end_piece();
                self.piece = Some((piece, Sha256::new()));
            }
            if let Some((_, blocks)) = &mut self.piece {
                blocks.update(block.to_le_bytes());
                blocks.update(bytes);
            }
        }
    }

    fn end_piece(&mut self) {
        if let Some((piece, blocks)) = self.piece.take() {
            self.whole.update(piece.to_le_bytes());
            self.whole.update(blocks.finalize());
        }
    }

    pub(crate) fn digest(mut self) -> ContentDigest {
        self.end_piece();
        ContentDigest(self.whole.finalize().into())
    }
}

/// What the data of one layer is, with zeros everywhere else.
///
/// # Errors
/// When it can't be read, or the work should stop.
pub(crate) fn of_layer(layer: &Layer, work: &Work) -> io::Result<ContentDigest> {
    let mut content = Content::new(layer.blocks());
    let mut buffer = vec![0; index(PIECE_BYTES)];
    for first in (0..layer.blocks()).step_by(index(PIECE_BLOCKS)) {
        let piece = first..(first + PIECE_BLOCKS).min(layer.blocks());
        let runs: Vec<_> = layer.states.runs(piece).collect();
        for (run, _) in runs.into_iter().filter(|(_, state)| *state == BlockState::Data) {
            let length_bytes = (run.end - run.start) * BLOCK_BYTES;
            let bytes = &mut buffer[..index(length_bytes)];
            layer.data().read_at(run.start * BLOCK_BYTES, bytes)?;
            content.add(run.start, bytes);
            work.step(length_bytes)?;
        }
    }
    Ok(content.digest())
}

/// What a chain of layers shows.
///
/// # Errors
/// When it can't be read, or the work should stop.
pub(crate) async fn of_device(
    device: &dyn Device,
    work: &Arc<Work>,
) -> Result<ContentDigest, IoError> {
    let size_bytes = device.size_bytes();
    let mut content = Content::new(size_bytes / BLOCK_BYTES);
    for at in (0..size_bytes).step_by(index(PIECE_BYTES)) {
        let length_bytes = PIECE_BYTES.min(size_bytes - at);
        let extents = device.extents(at, length_bytes).await?;
        let told_bytes: u64 = extents.iter().map(|extent| extent.length_bytes).sum();
        if told_bytes >= length_bytes && extents.iter().all(|extent| extent.zero) {
            continue;
        }
        let length = u32::try_from(length_bytes).expect("a piece is small");
        let bytes = device.read(at, length).await?;
        let work = Arc::clone(work);
        content = blocking(move || {
            content.add(at / BLOCK_BYTES, &bytes);
            work.step(length_bytes).map(|()| content)
        })
        .await?;
    }
    Ok(content.digest())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(blocks: u64, parts: &[(u64, &[u8])]) -> ContentDigest {
        let mut content = Content::new(blocks);
        parts.iter().for_each(|(block, bytes)| content.add(*block, bytes));
        content.digest()
    }

    #[test]
    fn zeros_are_the_same_whether_they_are_told_or_left_out_and_everything_else_differs() {
        let (one, two, none) = ([1; 4096], [2; 4096], [0; 4096]);
        let sparse = of(600, &[(3, &one), (256, &two)]);
        let all: Vec<u8> = (0..600)
            .flat_map(|block| match block {
                3 => one,
                256 => two,
                _ => none,
            })
            .collect();
        assert_eq!(of(600, &[(0, &all)]), sparse);
        let others = [
            of(601, &[(3, &one), (256, &two)]),
            of(600, &[(4, &one), (256, &two)]),
            of(600, &[(3, &one), (512, &two)]),
            of(600, &[(3, &one), (255, &two)]),
            of(600, &[(3, &one)]),
            of(600, &[(3, &two), (256, &one)]),
        ];
        assert!(others.iter().all(|other| *other != sparse), "{others:?}");
    }

    /// It is in records of controllers, so it never changes.
    #[test]
    fn the_digest_is_what_it_is_defined_to_be() {
        let mut inner = Sha256::new();
        inner.update(257_u64.to_le_bytes());
        inner.update([7; 4096]);
        let mut whole = Sha256::new();
        whole.update(b"perigee content 1\n");
        whole.update((300_u64 * 4096).to_le_bytes());
        whole.update(1_u64.to_le_bytes());
        whole.update(inner.finalize());
        assert_eq!(of(300, &[(257, &[7; 4096])]).0, <[u8; 32]>::from(whole.finalize()));
    }
}
