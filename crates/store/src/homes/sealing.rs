//! A volume's head is sealed while the volume is in use: what was written until then is a layer, and what is written
//! next goes into a new head. A move and a replica's round do this so that other hosts can copy the layer.

use std::sync::Arc;

use perigee_model::home::DepartedLayer;
use perigee_model::replica::{SealReplica, SealedReplica};
use perigee_model::volume::CachePolicy;
use perigee_model::{ImageName, LayerId, Problem, VolumeName};
use tokio::sync::OwnedMutexGuard;

use crate::catalog::{LayerRow, Sealed, failed};
use crate::layers::head::Head;
use crate::layers::layer::live_name;
use crate::pool::Pool;
use crate::volume::{Stack, io_problem};

/// For whom the sealed layers are kept.
#[derive(Clone)]
pub(crate) struct Pin {
    /// A replica's site, or `backup:` and a backup's target. No site has such a name.
    pub(crate) keeper: String,
    /// Whether the data leave this site.
    pub(crate) leaves_site: bool,
}

impl Pool {
    /// Seals what was written until now, so that little is new when the volume departs and its new home can
    /// have copies of these layers before. Returns the sealed layers, topmost first.
    ///
    /// # Errors
    /// Not found; the flush failed; no space for the new head.
    pub async fn seal_ahead(
        self: &Arc<Self>,
        name: &VolumeName,
    ) -> Result<Vec<DepartedLayer>, Problem> {
        let what = format!("can't seal what volume {name} has");
        self.flush_before_sealing(&what, name).await?;
        let guard = self.changes().await;
        Ok(self.seal_in_use(&what, name, None, guard).await?.chain)
    }

    /// As [`Self::seal_ahead`], and keeps the layers for a replica.
    ///
    /// # Errors
    /// As [`Self::seal_ahead`]; a conflict when the volume may not leave its site.
    pub async fn seal_replica(
        self: &Arc<Self>,
        name: &VolumeName,
        SealReplica { replica }: SealReplica,
    ) -> Result<SealedReplica, Problem> {
        let what = format!("can't seal what volume {name} has for its replica at {replica}");
        self.flush_before_sealing(&what, name).await?;
        let guard = self.wait_for_changes(&what).await?;
        let pin = Pin { keeper: replica.into(), leaves_site: true };
        self.seal_in_use(&what, name, Some(pin), guard).await
    }

    /// Nothing is sealed if the head adds nothing. The guard is of the lock `changes`.
    pub(crate) async fn seal_in_use(
        self: &Arc<Self>,
        what: &str,
        name: &VolumeName,
        pin: Option<Pin>,
        guard: OwnedMutexGuard<()>,
    ) -> Result<SealedReplica, Problem> {
        let volume = self.volume(name).await?;
        let (pool, named, now) = (Arc::clone(self), name.clone(), what.to_owned());
        let (guard, pinned) = volume
            .replace_stack(what, move |stack| {
                let (new, pinned) = pool.seal_stack(&now, &named, pin.as_ref(), stack)?;
                // The volume has its new layers even if the pin can't be stored.
                Ok((new, (guard, pinned)))
            })
            .await?;
        pinned.map_err(failed(what))?;
        let (name, what) = (name.clone(), what.to_owned());
        self.run(move |pool| {
            // Nothing else is sealed before the chain is read.
            let _guard = guard;
            pool.sealed_layers(&what, &name)
        })
        .await
    }

    /// A volume's new layers, if its head adds something to those below; and what became of the pin: the topmost sealed layer, if there is one.
    fn seal_stack(
        &self,
        what: &str,
        volume: &VolumeName,
        pin: Option<&Pin>,
        stack: &Stack,
    ) -> Result<(Option<Stack>, rusqlite::Result<Option<LayerId>>), Problem> {
        let rows = self.catalog.chain(stack.head.layer.id).map_err(failed(what))?;
        let leaves = pin.is_some_and(|pin| pin.leaves_site);
        if leaves && rows.iter().any(|row| row.confined) {
            let why = "it, or what it stands on, may not leave its site";
            return Err(Problem::conflict(what, why));
        }
        let below = stack.below.layers().next().map(|below| below.id);
        let adds_nothing = self.head_adds_nothing(stack).map_err(failed(what))?;
        let (new, top) = match below.filter(|_| adds_nothing) {
            Some(below) => (None, below),
            None if pin.is_none() && stack.head.is_untouched() => return Ok((None, Ok(None))),
            None => {
                let sealed = self.seal(what, volume, stack.size_bytes(), stack, None)?;
                (Some(sealed), stack.head.layer.id)
            }
        };
        let pinned = match pin {
            Some(pin) => self.catalog.pin_filling(volume, &pin.keeper, top),
            None => Ok(()),
        };
        Ok((new, pinned.map(|()| Some(top))))
    }

    /// Seals what volumes have at one moment, and keeps their layers for this pin. Returns the topmost sealed layer of each, and the size of its disk. If one can't
    /// be sealed, those before it are.
    pub(crate) async fn seal_together(
        self: &Arc<Self>,
        what: &str,
        names: &[VolumeName],
        pin: &Pin,
    ) -> Result<Vec<(LayerId, u64)>, Problem> {
        // A volume that is named twice would wait for itself.
        if let Some(twice) = names.iter().enumerate().find(|(at, name)| names[..*at].contains(name))
        {
            return Err(Problem::invalid(what, format!("volume {} is named twice", twice.1)));
        }
        for name in names {
            self.flush_before_sealing(what, name).await?;
        }
        // Until the last volume is sealed. So nobody else waits for several volumes to stand still.
        let _guard = self.wait_for_changes(what).await?;
        let mut still = Vec::new();
        for name in names {
            let volume = self.volume(name).await?;
            let stands = volume.stand_still(what).await?;
            still.push((name, volume, stands));
        }
        // This is the moment. A write that one of them takes from here on comes after it, and the others take none before they are sealed too.
        let mut tops = Vec::new();
        for (name, volume, stands) in still {
            let (pool, named, now, pin) =
                (Arc::clone(self), name.clone(), what.to_owned(), pin.clone());
            let sealed = volume.replace_still_stack(what, stands, move |stack| {
                let (new, pinned) = pool.seal_stack(&now, &named, Some(&pin), stack)?;
                Ok((new, (pinned, stack.size_bytes())))
            });
            let (top, size_bytes) = sealed.await?;
            let gone = || Problem::internal(what, "a volume has no layer after it was sealed");
            tops.push((top.map_err(failed(what))?.ok_or_else(gone)?, size_bytes));
        }
        Ok(tops)
    }

    /// The layers below a volume's head, and what is known of the volume.
    fn sealed_layers(&self, what: &str, name: &VolumeName) -> Result<SealedReplica, Problem> {
        let gone = || Problem::not_found(what, "it is not here any more");
        let row = self.catalog.volume(name).map_err(failed(what))?.ok_or_else(gone)?;
        let tenure = self.catalog.tenure(name).map_err(failed(what))?.ok_or_else(gone)?;
        let head = self.catalog.chain(row.head).map_err(failed(what))?.swap_remove(0);
        let chain = head.parent.map(|top| self.departed_chain(top)).transpose();
        Ok(SealedReplica {
            tenure,
            size_bytes: row.size_bytes,
            chain: chain.map_err(failed(what))?.unwrap_or_default(),
            tenant: row.tenant,
            cache: row.cache,
        })
    }

    /// As [`Self::sealed_layers`], from this layer down. The size is that of now.
    ///
    /// # Errors
    /// A conflict if the layer is not among the volume's any more.
    pub(crate) fn layers_sealed_before(
        &self,
        what: &str,
        name: &VolumeName,
        top: LayerId,
    ) -> Result<SealedReplica, Problem> {
        let mut sealed = self.sealed_layers(what, name)?;
        let Some(at) = sealed.chain.iter().position(|layer| layer.layer == top) else {
            let why = "the layer that was sealed for it is not the volume's any more";
            return Err(Problem::conflict(what, why).next("begin another backup"));
        };
        sealed.chain.drain(..at);
        Ok(sealed)
    }

    /// Flushes a volume whose head is to be sealed, before the caller takes the lock `changes`. So little is left to
    /// flush while others wait for the lock.
    pub(crate) async fn flush_before_sealing(
        self: &Arc<Self>,
        what: &str,
        name: &VolumeName,
    ) -> Result<(), Problem> {
        let volume = self.volume(name).await?;
        volume.flush().await.map_err(|error| io_problem(what, &error))
    }

    /// Puts an empty head on a flushed one, which is a sealed layer from then on. The caller ensures that
    /// nothing writes to the volume.
    pub(crate) fn seal(
        &self,
        what: &str,
        volume: &VolumeName,
        size_bytes: u64,
        stack: &Stack,
        image: Option<&ImageName>,
    ) -> Result<Stack, Problem> {
        let sealed = &stack.head.layer;
        let row = LayerRow::new_head(size_bytes, Some(sealed.id));
        let figures = Sealed { layer: sealed.id, data_bytes: sealed.data_bytes() };
        self.catalog.seal(volume, figures, &row, image).map_err(failed(what))?;
        let head = Head::new(&self.home, row.id, size_bytes).with_cache(stack.head.cache);
        sealed.set_cache(CachePolicy::Shared);
        let below = Arc::new(stack.below.under(sealed));
        self.share(&head, &below);
        self.note_sealed();
        if let Err(error) = self.files.remove(&live_name(sealed.id)) {
            tracing::warn!(layer = %sealed.id, %error, "can't remove a sealed layer's live map");
        }
        Ok(Stack { head: Arc::new(head), below })
    }
}
