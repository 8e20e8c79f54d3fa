//! The background work of a volume server: it computes checksums of sealed layers and the contents of images, and merges the
//! layers of deep chains and of snapshots that were deleted.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use perigee_block::locking::lock;
use perigee_model::{ImageName, LayerId, Problem, VolumeName};

use crate::catalog::{LayerRow, failed};
use crate::layers::checksums;
use crate::layers::content;
use crate::pool::Pool;
use crate::volume::io_problem;
use crate::work::{StopOnDrop, Work};

/// A chain with more sealed layers than this is merged, as far as its layers have no other user.
pub(crate) const SEALED_LAYERS_MAX: usize = 16;
/// After so long the keeper looks again what can be merged.
const LOOK_AGAIN: Duration = Duration::from_secs(600);

impl Pool {
    /// Works at once, and again whenever a layer was sealed, imported or released. It runs until it is dropped. A merge may take
    /// hours: what others wait for goes on beside it.
    pub async fn keep(self: Arc<Self>) {
        tokio::join!(self.keep_merged(), self.keep_compared());
    }

    async fn keep_merged(self: &Arc<Self>) {
        loop {
            self.merge_all_released().await;
            self.compact_deep_chains().await;
            // A layer that could not be merged may be free by now, or the head on it larger.
            drop(tokio::time::timeout(LOOK_AGAIN, self.to_merge.notified()).await);
        }
    }

    async fn keep_compared(self: &Arc<Self>) {
        let mut checksummed = HashSet::new();
        loop {
            self.make_missing_checksums(&mut checksummed).await;
            self.find_contents().await;
            self.sealed.notified().await;
        }
    }

    /// Tells the keeper that a layer was sealed, imported or released.
    pub(crate) fn note_sealed(&self) {
        self.sealed.notify_one();
        self.to_merge.notify_one();
    }

    async fn merge_all_released(self: &Arc<Self>) {
        let released = match self.run(|pool| pool.catalog.released()).await {
            Ok(released) => released,
            Err(error) => return tracing::error!(%error, "can't find the layers without names"),
        };
        for layer in released {
            let work = Arc::new(Work::gentle());
            let _stop = StopOnDrop(Arc::clone(&work));
            if let Err(problem) = self.merge_released(layer, work).await {
                tracing::warn!(%problem, "the space of a deleted snapshot is not free yet; trying again later");
            }
        }
    }

    async fn compact_deep_chains(self: &Arc<Self>) {
        let deep = match self.run(move |pool| pool.deep_chains()).await {
            Ok(deep) => deep,
            Err(error) => return tracing::error!(%error, "can't find the deep chains"),
        };
        for name in deep {
            let work = Arc::new(Work::gentle());
            let _stop = StopOnDrop(Arc::clone(&work));
            if let Err(problem) = self.compact_deep(&name, work).await {
                tracing::error!(%problem, "can't merge a deep chain");
            }
        }
    }

    /// Volumes with more than [`SEALED_LAYERS_MAX`] sealed layers.
    fn deep_chains(&self) -> rusqlite::Result<Vec<VolumeName>> {
        let spaces = self.catalog.layer_spaces(None)?;
        let depth = |head: LayerId| {
            let below = |id: &LayerId| spaces.get(id).and_then(|space| space.parent);
            std::iter::successors(below(&head), below).count()
        };
        let volumes = self.catalog.volumes()?.into_iter();
        let deep = volumes.filter(|volume| depth(volume.head) > SEALED_LAYERS_MAX);
        Ok(deep.map(|volume| volume.name).collect())
    }

    async fn make_missing_checksums(self: &Arc<Self>, checksummed: &mut HashSet<LayerId>) {
        let layers = match self.catalog.layers() {
            Ok(layers) => layers,
            Err(error) => return tracing::error!(%error, "can't list the sealed layers"),
        };
        for (row, head) in layers {
            let id = row.id;
            if head || row.is_copy() || checksummed.contains(&id) {
                continue;
            }
            let work = Arc::new(Work::gentle());
            let _stop = StopOnDrop(Arc::clone(&work));
            let made = self.run(move |pool| pool.make_checksums(&row, &work)).await;
            match made {
                Ok(true) => {
                    checksummed.insert(id);
                }
                // If that fails, it is tried again when the next layer is sealed.
                Ok(false) => {}
                Err(why) => tracing::error!(layer = %id, why, "can't compute a layer's checksums"),
            }
        }
    }

    /// Computes what images show that were made of volumes here, or are copies that nobody could
    /// compare.
    pub(crate) async fn find_contents(self: &Arc<Self>) {
        let images = match self.run(|pool| pool.catalog.images_without_content()).await {
            Ok(images) => images,
            Err(error) => return tracing::error!(%error, "can't list the images"),
        };
        for (name, layer) in images {
            if let Err(problem) = self.find_content(&name, layer).await {
                tracing::error!(%problem, "can't compute an image's content; trying again later");
            }
        }
    }

    async fn find_content(
        self: &Arc<Self>,
        name: &ImageName,
        layer: LayerId,
    ) -> Result<(), Problem> {
        let what = format!("can't compute the content of image {name}");
        let now = what.clone();
        let device = self.run(move |pool| {
            let chain = pool.catalog.chain(layer).map_err(failed(&now))?;
            // When the copy is complete, this is done again. The image may have been deleted meanwhile.
            if chain.is_empty() || chain.iter().any(LayerRow::is_copy) {
                return Ok(None);
            }
            pool.sealed_device(&now, layer).map(Some)
        });
        let Some(device) = device.await? else { return Ok(()) };
        let work = Arc::new(Work::gentle());
        let _stop = StopOnDrop(Arc::clone(&work));
        let content = content::of_device(&device, &work).await;
        let content = content.map_err(|error| io_problem(&what, &error))?;
        self.change(move |pool| pool.catalog.found_content(layer, content).map_err(failed(&what)))
            .await
    }

    /// Computes a sealed layer's checksums if it has none. Returns `false` if that is just being done.
    pub(crate) fn make_checksums(&self, row: &LayerRow, work: &Work) -> Result<bool, String> {
        let Some(_turn) = Turn::take(&self.checksumming, row.id) else { return Ok(false) };
        if checksums::are_made(&*self.files, row.id).map_err(|error| error.to_string())? {
            return Ok(true);
        }
        let layer = self.open_sealed(row).map_err(|error| error.to_string())?;
        if !layer.has_files() {
            return Ok(true);
        }
        let made = checksums::make(&*self.files, &layer, work).map_err(|error| error.to_string());
        if let Ok(false) = self.catalog.has_layer(row.id) {
            // The layer was deleted in the meantime.
            self.remove_layers(&[row.id]);
        }
        let content = made?;
        // An image of one layer needs no second reading.
        if row.parent.is_none()
            && let Err(error) = self.catalog.found_content(row.id, content)
        {
            tracing::warn!(layer = %row.id, %error, "can't record a layer's content");
        }
        Ok(true)
    }
}

/// Nobody else computes the checksums of a layer meanwhile.
struct Turn<'a> {
    taken: &'a Mutex<HashSet<LayerId>>,
    layer: LayerId,
}

impl<'a> Turn<'a> {
    fn take(taken: &'a Mutex<HashSet<LayerId>>, layer: LayerId) -> Option<Self> {
        // A turn exists only once it is taken: its end takes the lock, and removes the layer.
        let is_taken = lock(taken).insert(layer);
        is_taken.then(|| Self { taken, layer })
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        lock(self.taken).remove(&self.layer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The refused turn was made and dropped while the lock was held. So its thread waited for itself for ever, and after it
    /// everybody who asked for checksums.
    #[test]
    fn a_layer_whose_turn_is_taken_is_refused_until_the_turn_ends() {
        let taken = Mutex::new(HashSet::new());
        let layer = LayerId(uuid::Uuid::new_v4());
        let turn = Turn::take(&taken, layer).expect("it is free");
        assert!(Turn::take(&taken, layer).is_none());
        assert!(Turn::take(&taken, layer).is_none(), "a refusal does not end the turn");
        drop(turn);
        assert!(Turn::take(&taken, layer).is_some());
    }
}
