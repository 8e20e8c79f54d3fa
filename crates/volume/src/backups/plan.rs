//! Which piece of a backup has which block. This is known before any piece is read: from the heads of the pieces, each compared with its checksum.

use std::collections::BTreeMap;
use std::ops::Range;

use futures_util::{StreamExt as _, stream};
use perigee_model::volume::BLOCK_BYTES;
use perigee_model::{LayerId, Problem};

use super::format::{LayerIndex, Manifest, Run};
use super::restore::Reading;

/// So many heads are asked for at once.
const HEADS_AT_ONCE: usize = 16;
/// A backup with more runs of blocks is not planned: a plan is in memory.
const RUNS_MAX: usize = 4 << 20;

/// What a backup shows, and which of its pieces has it.
#[derive(Debug, Default)]
pub struct Plan {
    pub size_bytes: u64,
    /// The topmost layer; `None`: the volume never had any data.
    pub layer: Option<LayerId>,
    /// Topmost first.
    pub indexes: Vec<LayerIndex>,
    /// By the first block: the block after the last one, and the piece. Other blocks are zeros.
    runs: BTreeMap<u64, (u64, usize)>,
    pieces: Vec<PlannedPiece>,
}

/// A piece that has something of what the backup shows.
#[derive(Debug)]
pub struct PlannedPiece {
    /// The layer's place in [`Plan::indexes`].
    pub index: usize,
    /// The piece's number in the layer.
    pub number: usize,
    /// The blocks for which the piece is needed, in order.
    pub blocks: Vec<Range<u64>>,
}

impl Plan {
    /// The plan of a backup; `None` if it has too many runs. Pieces of an older version have no heads, and are read whole.
    ///
    /// # Errors
    /// `Conflict` if it is damaged; when the target fails.
    pub async fn read(reading: Reading<'_>, manifest: &Manifest) -> Result<Option<Self>, Problem> {
        let indexes = reading.indexes(manifest).await?;
        let layer = indexes.first().map(|index| index.layer);
        let mut plan = Self { size_bytes: manifest.size_bytes, layer, ..Self::default() };
        // The lowest layer first: what stands on it hides what it has.
        for (at, index) in indexes.iter().enumerate().rev() {
            let heads = (0..index.pieces.len()).map(|number| head(reading, index, number));
            // Whole pieces are large.
            let has_heads = index.pieces.iter().all(|piece| piece.head.is_some());
            let at_once = if has_heads { HEADS_AT_ONCE } else { 1 };
            let mut heads = stream::iter(heads).buffered(at_once);
            let (mut layer, mut count) = (Vec::new(), 0);
            while let Some(runs) = heads.next().await {
                let runs = runs?;
                count += runs.as_ref().map_or(1, Vec::len);
                layer.push(runs);
                if plan.runs.len() + count > RUNS_MAX {
                    return Ok(None);
                }
            }
            plan.put_layer(at, layer, index.size_bytes / BLOCK_BYTES);
        }
        plan.hide(manifest.size_bytes / BLOCK_BYTES..u64::MAX);
        plan.indexes = indexes;
        plan.note_blocks();
        Ok(Some(plan))
    }

    /// Adds a layer of so many blocks over those that are there. `None` is a piece with a damaged head: each block that it may have is taken for one of its blocks, and
    /// can't be read then.
    fn put_layer(&mut self, index: usize, heads: Vec<Option<Vec<Run>>>, blocks: u64) {
        let first = |runs: &Vec<Run>| runs.first().map(|run| run.blocks.start);
        let starts = heads.iter().map(|runs| runs.as_ref().and_then(first));
        let starts: Vec<Option<u64>> = starts.collect();
        let mut end = 0;
        for (number, runs) in heads.into_iter().enumerate() {
            let piece = self.pieces.len();
            self.pieces.push(PlannedPiece { index, number, blocks: Vec::new() });
            let Some(runs) = runs else {
                let next = starts[number + 1..].iter().find_map(|start| *start).unwrap_or(blocks);
                if end < next {
                    self.put(end..next, Some(piece));
                }
                continue;
            };
            end = runs.last().map_or(end, |run| run.blocks.end);
            for run in runs {
                self.put(run.blocks, (!run.is_zero).then_some(piece));
            }
        }
        // A layer hides what layers below have beyond its end.
        self.hide(blocks..u64::MAX);
    }

    fn put(&mut self, blocks: Range<u64>, piece: Option<usize>) {
        self.hide(blocks.clone());
        if let Some(piece) = piece {
            self.runs.insert(blocks.start, (blocks.end, piece));
        }
    }

    /// What was put so far shows nothing here.
    fn hide(&mut self, blocks: Range<u64>) {
        let before = self.runs.range(..blocks.start).next_back().map(|(start, run)| (*start, *run));
        if let Some((start, (end, piece))) = before.filter(|(_, (end, _))| *end > blocks.start) {
            self.runs.insert(start, (blocks.start, piece));
            if end > blocks.end {
                self.runs.insert(blocks.end, (end, piece));
            }
        }
        let within: Vec<u64> = self.runs.range(blocks.clone()).map(|(start, _)| *start).collect();
        for start in within {
            if let Some((end, piece)) =
                self.runs.remove(&start).filter(|(end, _)| *end > blocks.end)
            {
                self.runs.insert(blocks.end, (end, piece));
            }
        }
    }

    fn note_blocks(&mut self) {
        for (start, (end, piece)) in &self.runs {
            self.pieces[*piece].blocks.push(*start..*end);
        }
    }

    /// The piece with a block, and the block at which another piece begins or ends. `None`: zeros.
    pub fn run(&self, block: u64) -> (Option<usize>, u64) {
        let at = self.runs.range(..=block).next_back().filter(|(_, (end, _))| *end > block);
        match at {
            Some((_, (end, piece))) => (Some(*piece), *end),
            None => {
                let next = self.runs.range(block..).next().map(|(start, _)| *start);
                (None, next.unwrap_or(self.size_bytes / BLOCK_BYTES).max(block + 1))
            }
        }
    }

    pub fn piece(&self, piece: usize) -> &PlannedPiece {
        &self.pieces[piece]
    }
}

/// The runs of a piece; `None` if its head is missing or damaged at a target that is there.
async fn head(
    reading: Reading<'_>,
    index: &LayerIndex,
    number: usize,
) -> Result<Option<Vec<Run>>, Problem> {
    let read = async || match index.pieces[number].head {
        Some(_) => reading.head(index, number).await,
        None => reading.piece(index, number).await.map(|(_, runs)| runs),
    };
    let mut runs = read().await;
    if runs.is_err() {
        // A head that can't be read is one piece's trouble, if the target is there. It may just have come back.
        reading.target.look().await?;
        runs = read().await;
    }
    match runs {
        Ok(runs) => Ok(Some(runs.into_iter().map(|(run, _)| run).collect())),
        Err(problem) => {
            reading.target.look().await?;
            tracing::error!(%problem, "the blocks of a piece can't be restored");
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const BLOCKS: u64 = 40;

    type Layer = (u64, Vec<(Vec<Run>, bool)>);

    fn block(number: u64) -> usize {
        usize::try_from(number).expect("few")
    }

    /// Layers of some blocks, with pieces of which some have a damaged head.
    fn layers() -> impl Strategy<Value = Vec<Layer>> {
        let run = (0..4_u64, 1..6_u64, any::<bool>());
        let piece = (proptest::collection::vec(run, 1..4), proptest::bool::weighted(0.2));
        let layer =
            (1..=BLOCKS, proptest::collection::vec(piece, 0..5)).prop_map(|(end, pieces)| {
                let mut at = 0;
                let mut placed = |(skip, length, is_zero): (u64, u64, bool)| {
                    let start = (at + skip).min(end);
                    at = (start + length).min(end);
                    Run { blocks: start..at, is_zero }
                };
                let mut runs = |runs: Vec<_>| -> Vec<Run> {
                    runs.into_iter().map(&mut placed).filter(|run| !run.blocks.is_empty()).collect()
                };
                let pieces = pieces.into_iter().map(|(of, is_damaged)| (runs(of), is_damaged));
                (end, pieces.filter(|(runs, _)| !runs.is_empty()).collect())
            });
        proptest::collection::vec(layer, 1..6)
    }

    proptest! {
        #[test]
        fn a_plan_finds_what_the_topmost_layer_with_the_block_has(layers in layers()) {
            let mut plan = Plan { size_bytes: BLOCKS * BLOCK_BYTES, ..Plan::default() };
            // What each block really has.
            let (mut shown, mut damaged) = (vec![None; block(BLOCKS)], BTreeSet::new());
            // The lowest layer comes first.
            for (end, pieces) in layers {
                let first = plan.pieces.len();
                for (number, (runs, is_damaged)) in pieces.iter().enumerate() {
                    damaged.extend(is_damaged.then_some(first + number));
                    for run in runs {
                        let has = (!run.is_zero).then_some(first + number);
                        shown[block(run.blocks.start)..block(run.blocks.end)].fill(has);
                    }
                }
                shown[block(end)..].fill(None);
                let heads = pieces.into_iter().map(|(runs, is)| (!is).then_some(runs));
                plan.put_layer(0, heads.collect(), end);
            }
            plan.note_blocks();
            let mut at = 0;
            while at < BLOCKS {
                let (piece, end) = plan.run(at);
                prop_assert!(end > at && end <= BLOCKS);
                // A block that may be of a damaged piece is never taken for another one's.
                if piece.is_none_or(|piece| !damaged.contains(&piece)) {
                    prop_assert!(shown[block(at)..block(end)].iter().all(|of| *of == piece));
                }
                for at in at..end {
                    let has = |piece: usize| plan.piece(piece).blocks.iter().any(|run| run.contains(&at));
                    prop_assert!(piece.is_none_or(has));
                }
                at = end;
            }
        }
    }
}
