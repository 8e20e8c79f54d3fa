//! A volume's head takes the blocks of the sealed layers right below it, which are then not needed any more. Clients go on
//! meanwhile.
//!
//! 1. The layers are compared with their checksums, so that damage does not become the volume's newest state.
//! 2. Piece by piece, each block that the head still lacks is written into the head, under the same locks as a client's
//!    write. The volume shows the same bytes before and after each piece.
//! 3. The head is flushed: all that it has taken is durable.
//! 4. One catalog transaction puts the head on what was below the layers, and deletes them. It does not if one of them was
//!    named or cloned in the meantime, or if another host may be reading one.
//!
//! A crash before 4 leaves the old chain, whose head has some blocks twice; a crash after it leaves the new chain. A head that
//! is sealed, deleted or moved away meanwhile ends the work, and shows what it did.

use std::ops::Range;
use std::sync::Arc;

use perigee_block::device::{IoError, Zeroing};
use perigee_model::volume::BLOCK_BYTES;
use perigee_model::{LayerId, Problem, VolumeName};

use crate::blocking::blocking;
use crate::catalog::failed;
use crate::disk::blocks::{BlockState, by_page, index, overlap};
use crate::disk::files::BlockFile;
use crate::layers::head::Head;
use crate::layers::layer::Layer;
use crate::pool::Pool;
use crate::upkeep::compact::{PIECE_BLOCKS, Run, Shown, changed, showing, stopped_or_failed};
use crate::volume::{Volume, io_problem};
use crate::work::Work;

/// Blocks in a row that the layers show in the same way.
struct Piece {
    blocks: Range<u64>,
    /// `None`: zeros.
    data: Option<Arc<dyn BlockFile>>,
}

impl Pool {
    /// `head` is the volume's head, and stands on the run. Returns how many bytes were copied at most.
    ///
    /// # Errors
    /// As [`Pool::compact_volume`].
    pub(crate) async fn absorb(
        self: &Arc<Self>,
        what: &str,
        name: &VolumeName,
        head: LayerId,
        run: Run,
        work: Arc<Work>,
    ) -> Result<u64, Problem> {
        let volume = self.volume(name).await?;
        let stack = volume.stack();
        if stack.head.layer.id != head {
            return Err(changed(what));
        }
        let (now, for_check, on) = (what.to_owned(), Arc::clone(&work), Arc::clone(&stack.head));
        let (run, layers) = self
            .run(move |pool| {
                let layers = pool.open_run(&now, &run, &for_check)?;
                pool.check_room(&now, lacking_bytes(&on, &layers), &for_check)?;
                pool.check_before_merge(&now, &layers, &for_check)?;
                Ok::<_, Problem>((run, layers))
            })
            .await?;
        let mut copied_bytes = 0;
        for (_, page) in by_page(0..stack.head.layer.blocks()) {
            for piece in pieces(&layers, page, run.below_blocks) {
                let bytes = (piece.blocks.end - piece.blocks.start) * BLOCK_BYTES;
                let is_data = piece.data.is_some();
                let taken = take(&volume, head, piece).await;
                copied_bytes += taken.map_err(|error| io_problem(what, &error))?;
                if is_data {
                    // It may pause, so it holds no lock.
                    let work = Arc::clone(&work);
                    let stepped = blocking(move || work.step(bytes)).await;
                    stepped.map_err(|error| stopped_or_failed(what, error))?;
                }
            }
        }
        volume.flush().await.map_err(|error| io_problem(what, &error))?;
        let now = what.to_owned();
        // While this lock is held, no head is sealed, and no layer cloned or named.
        self.change(move |pool| pool.put_below(&now, &volume, head, &run)).await?;
        Ok(copied_bytes)
    }

    /// Puts the head on what is below the run. The caller holds the lock `changes`.
    fn put_below(
        &self,
        what: &str,
        volume: &Volume,
        head: LayerId,
        run: &Run,
    ) -> Result<(), Problem> {
        volume.check_there().map_err(|error| io_problem(what, &error))?;
        let old: Vec<LayerId> = run.rows.iter().map(|row| row.id).collect();
        let is_head = volume.stack().head.layer.id == head;
        if !is_head || !self.catalog.absorb_layers(&old, head).map_err(failed(what))? {
            return Err(changed(what));
        }
        self.forget_merged(&old);
        Ok(())
    }
}

/// The bytes that the layers show and the head lacks.
fn lacking_bytes(head: &Head, layers: &[Layer]) -> u64 {
    let states = &head.layer.states;
    let mut lacking_blocks = 0;
    for (_, page) in by_page(0..head.layer.blocks()) {
        for (run, shown) in showing(layers, page) {
            if let Shown::Data(_) = shown {
                let absent = states.runs(run).filter(|(_, state)| *state == BlockState::Absent);
                lacking_blocks += absent.map(|(run, _)| run.end - run.start).sum::<u64>();
            }
        }
    }
    lacking_blocks * BLOCK_BYTES
}

/// What a head has to take of these blocks.
fn pieces(layers: &[Layer], blocks: Range<u64>, below_blocks: u64) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (run, shown) in showing(layers, blocks) {
        match shown {
            Shown::Nothing => {}
            // Zeros are needed only where a layer below the run could show through.
            Shown::Zeros => {
                let blocks = overlap(&run, &(0..below_blocks));
                if !blocks.is_empty() {
                    pieces.push(Piece { blocks, data: None });
                }
            }
            Shown::Data(layer) => {
                for start in (run.start..run.end).step_by(index(PIECE_BLOCKS)) {
                    let blocks = start..(start + PIECE_BLOCKS).min(run.end);
                    pieces.push(Piece { blocks, data: Some(Arc::clone(layer.data())) });
                }
            }
        }
    }
    pieces
}

/// Gives the head the blocks of a piece that it lacks. Returns how many bytes of data that were.
async fn take(volume: &Arc<Volume>, head: LayerId, piece: Piece) -> Result<u64, IoError> {
    let gate = Arc::clone(&volume.gate).read_owned().await;
    volume.check_there()?;
    let head_now = volume.stack().head;
    if head_now.layer.id != head {
        return Err(IoError::Refused("its head was sealed meanwhile".to_owned()));
    }
    let locked = head_now.locks.lock(piece.blocks.clone()).await;
    blocking(move || {
        let _locks = (gate, locked);
        let states = head_now.layer.states.runs(piece.blocks);
        let absent: Vec<_> = states.filter(|(_, state)| *state == BlockState::Absent).collect();
        let mut copied_bytes = 0;
        for (run, _) in absent {
            let Some(data) = &piece.data else {
                head_now.zero(run, Zeroing::KeepSpace)?;
                continue;
            };
            let mut bytes = vec![0; index((run.end - run.start) * BLOCK_BYTES)];
            data.read_at(run.start * BLOCK_BYTES, &mut bytes)?;
            head_now.write(run.start * BLOCK_BYTES, &bytes)?;
            copied_bytes += bytes.len() as u64;
        }
        Ok(copied_bytes)
    })
    .await
}
