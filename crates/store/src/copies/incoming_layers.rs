//! Copies of the layers of a volume that comes from another host, made before the volume's head is here.
//!
//! Layers that this pool has already are used as they are, complete or not. The others become copies of their own
//! blocks on top of them ([`crate::layers::copy`]), so that only what this pool lacks is fetched. A layer of which the
//! other host does not have everything itself becomes a whole copy, with nothing below it.
//!
//! A copy of own blocks that this pool has already may come from an earlier home of the volume, which may be gone.
//! So it gets what it still lacks from the volume's present home, if that has these blocks.
//!
//! 1. For each lacking layer, the other host is asked what the layer has (the extents of export
//!    `layer:UUID@own`), unless it has told this with the chain. No lock is held meanwhile.
//! 2. The copy's files are made with a map of that, and are made durable.
//! 3. One transaction adds all the layers. Before it, a crash leaves only files that the next server removes.
//!
//! Then the caller can put a head on the topmost layer. When the volume has come, or is refused, or a server
//! starts, staged layers on which nothing stands are removed.
//!
//! Until the volume departs, the other host may merge its layers. Then it does not have the layers any more whose
//! copies were staged. These copies are dropped and staged anew ([`Pool::drop_stale`]).

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, stream};
use perigee_block::exports::{LAYER_PREFIX, OWN_SUFFIX};
use perigee_block::locking::lock;
use perigee_model::home::{DepartedLayer, OwnBlocks, TakeVolume};
use perigee_model::volume::{BLOCK_BYTES, Keep};
use perigee_model::{LayerId, Problem, ProblemKind, VolumeName};

use crate::catalog::{LayerRow, RemoteRow, failed};
use crate::disk::blocks::{BlockState, BlockStates};
use crate::disk::map::{self, MapFile};
use crate::layers::layer::{self, data_name, map_name};
use crate::layers::remote::RemoteParent;
use crate::pool::Pool;
use crate::volume::io_problem;

/// As many layers of one chain are asked about at once.
const ASKED_AT_ONCE: usize = 8;
/// A volume with more layers has to be compacted first.
pub(crate) const CHAIN_MAX: usize = 4096;

/// A chain tells what a layer has in at most so many parts.
const OWN_BLOCKS_MAX: usize = 4096;

/// What the other host has of a layer.
enum LayerAnswer {
    Own(Box<Own>),
    /// Only all that the layer shows.
    Whole(RemoteRow),
}

/// A layer's own blocks at another host.
struct Own {
    row: RemoteRow,
    /// With the connection over which its map came, if it came over one.
    remote: RemoteParent,
    states: BlockStates,
}

impl Pool {
    /// Makes sure that this pool has these sealed layers of another host's volume, topmost first. Missing ones
    /// are made as copies, which get their blocks from `nbd_addr`. A repeated request does nothing. Returns how
    /// many bytes are to come for what was made.
    ///
    /// The caller then holds the lock `changes` while it checks that the topmost layer is still here and puts a
    /// head on it.
    ///
    /// # Errors
    /// Unavailable when the other host does not answer; a conflict when a layer is not what the chain says, or a
    /// layer was deleted here meanwhile; no space.
    pub async fn stage_layers(
        self: &Arc<Self>,
        volume: &VolumeName,
        nbd_addr: &str,
        chain: &[DepartedLayer],
    ) -> Result<u64, Problem> {
        self.stage_while(volume, nbd_addr, chain, |_, _| Ok(true)).await
    }

    /// As [`Self::stage_layers`], for a volume that this server takes. Nothing is made for a volume that has come
    /// already.
    ///
    /// # Errors
    /// As [`Self::stage_layers`] and [`Self::may_arrive`]: nothing is made after this server has refused the volume.
    pub async fn stage_arrival(
        self: &Arc<Self>,
        volume: &VolumeName,
        take: &TakeVolume,
        chain: &[DepartedLayer],
    ) -> Result<u64, Problem> {
        let (named, tenure) = (volume.clone(), take.tenure);
        let may_arrive = move |pool: &Self, what: &str| pool.may_arrive_now(what, &named, tenure);
        self.stage_while(volume, &take.from.nbd_addr, chain, may_arrive).await
    }

    /// Drops what was staged for a volume that does not come.
    pub async fn forget_staged(self: &Arc<Self>, volume: &VolumeName) {
        let volume = volume.clone();
        let Ok(()) = self
            .change(move |pool| {
                pool.drop_staged(&volume);
                Ok::<_, Infallible>(())
            })
            .await;
    }

    /// `wanted` says under the lock `changes` whether the layers are still wanted.
    async fn stage_while(
        self: &Arc<Self>,
        volume: &VolumeName,
        nbd_addr: &str,
        chain: &[DepartedLayer],
        wanted: impl FnOnce(&Self, &str) -> Result<bool, Problem> + Send + 'static,
    ) -> Result<u64, Problem> {
        let what = format!("can't make copies of a volume's layers at {nbd_addr}");
        let (now, all) = (what.clone(), chain.to_vec());
        let named = volume.clone();
        let at = nbd_addr.to_owned();
        let (lacking, elsewhere) = self
            .change(move |pool| {
                pool.drop_stale(&now, &named, &all)?;
                Ok::<_, Problem>((
                    pool.lacking(&now, &all)?,
                    pool.own_from_elsewhere(&now, &at, &all)?,
                ))
            })
            .await?;
        self.continue_from(&what, elsewhere).await?;
        if lacking == 0 {
            return Ok(0);
        }
        let told = self.ask_all(&what, nbd_addr, &chain[..lacking]).await?;
        let (volume, chain) = (volume.clone(), chain.to_vec());
        self.change(move |pool| {
            if !wanted(pool, &what)? {
                return Ok(0);
            }
            pool.make_staged(&what, &volume, &chain, told)
        })
        .await
    }

    /// Drops what was staged for the volume, or is a point of its replica, if it stands on copies of layers that the
    /// other host has no more. The caller holds the lock `changes`.
    fn drop_stale(
        &self,
        what: &str,
        volume: &VolumeName,
        chain: &[DepartedLayer],
    ) -> Result<(), Problem> {
        let there: HashSet<LayerId> = chain.iter().map(|layer| layer.layer).collect();
        for layer in chain {
            if !self.catalog.has_layer(layer.layer).map_err(failed(what))? {
                continue;
            }
            let here = self.catalog.chain(layer.layer).map_err(failed(what))?;
            let is_own = |row: &LayerRow| row.remote.as_ref().is_some_and(|remote| remote.own);
            if here.iter().any(|row| is_own(row) && !there.contains(&row.id)) {
                self.drop_staged(volume);
                self.drop_incomplete(what, volume, None)?;
            }
            break;
        }
        Ok(())
    }

    /// Drops the layers that were staged for the volume and on which nothing stands. Failures are tried again at
    /// the next start. The caller holds the lock `changes`.
    pub(crate) fn drop_staged(&self, volume: &VolumeName) {
        let staged = lock(&self.staged).remove(volume).unwrap_or_default();
        match self.catalog.drop_staged(&staged) {
            Ok(dropped) => {
                self.drop_copies(&dropped);
                self.remove_layers(&dropped);
            }
            Err(error) => tracing::error!(%volume, %error, "can't drop layers that were staged"),
        }
    }

    /// The number of layers from the top down to the first one that this pool has.
    fn lacking(&self, what: &str, chain: &[DepartedLayer]) -> Result<usize, Problem> {
        if chain.len() > CHAIN_MAX {
            let why = format!("it has {} layers, and {CHAIN_MAX} are possible", chain.len());
            return Err(Problem::conflict(what, why).next("compact the volume first"));
        }
        for (depth, layer) in chain.iter().enumerate() {
            if Self::layer_size(what, layer.size_bytes)? != layer.size_bytes {
                let why = format!("layer {} has {} bytes", layer.layer, layer.size_bytes);
                return Err(Problem::invalid(what, why));
            }
            if self.has_staged(what, layer)? {
                return Ok(depth);
            }
        }
        Ok(chain.len())
    }

    /// Whether the layer is here, and is what the other host says.
    pub(crate) fn has_staged(&self, what: &str, layer: &DepartedLayer) -> Result<bool, Problem> {
        if !self.catalog.has_layer(layer.layer).map_err(failed(what))? {
            return Ok(false);
        }
        let here = &self.catalog.chain(layer.layer).map_err(failed(what))?[0];
        let is_sealed = self.catalog.is_sealed(layer.layer).map_err(failed(what))?;
        if is_sealed && here.size_bytes == layer.size_bytes {
            return Ok(true);
        }
        let why = format!("this pool has another layer {}, or a volume writes it", layer.layer);
        Err(Problem::conflict(what, why))
    }

    /// What the other host has of these layers, down to the first of which it has no own blocks.
    async fn ask_all(
        &self,
        what: &str,
        nbd_addr: &str,
        layers: &[DepartedLayer],
    ) -> Result<Vec<LayerAnswer>, Problem> {
        let asked: Vec<_> = layers.iter().map(|layer| self.ask(what, nbd_addr, layer)).collect();
        let mut answers = std::pin::pin!(stream::iter(asked).buffered(ASKED_AT_ONCE));
        let mut told = Vec::new();
        while let Some(answer) = answers.try_next().await? {
            let is_whole = matches!(answer, LayerAnswer::Whole(_));
            told.push(answer);
            if is_whole {
                break;
            }
        }
        Ok(told)
    }

    async fn ask(
        &self,
        what: &str,
        nbd_addr: &str,
        layer: &DepartedLayer,
    ) -> Result<LayerAnswer, Problem> {
        let differs = |why: &str| {
            Problem::conflict(what, format!("layer {} at the other host: {why}", layer.layer))
        };
        let whole = format!("{LAYER_PREFIX}{}", layer.layer);
        let row = RemoteRow {
            nbd_addr: nbd_addr.to_owned(),
            export: format!("{whole}{OWN_SUFFIX}"),
            size_bytes: layer.size_bytes,
            keep: Keep::All,
            is_layer: Some(layer.layer),
            own: true,
        };
        if let Some(own) = &layer.own {
            let states = told_states(layer, own)
                .ok_or_else(|| differs("it is said to have blocks that it can't have"))?;
            let remote = RemoteParent::new(row.clone(), &self.connect);
            return Ok(LayerAnswer::Own(Box::new(Own { row, remote, states })));
        }
        match (self.connect.connect)(nbd_addr.to_owned(), row.export.clone()).await {
            Ok(device) => {
                if device.layer() != row.is_layer {
                    return Err(differs("it does not say that it is this layer"));
                }
                let remote = RemoteParent::connected(row.clone(), &self.connect, device)
                    .map_err(|why| differs(&why))?;
                let states = remote.own_states().await.map_err(|e| io_problem(what, &e))?;
                Ok(LayerAnswer::Own(Box::new(Own { row, remote, states })))
            }
            Err(problem) if problem.kind == ProblemKind::NotFound => {
                let (row, _) = self.remote_row(what, nbd_addr, &whole).await?;
                if row.is_layer != Some(layer.layer) {
                    return Err(differs("it does not say that it is this layer"));
                }
                if row.size_bytes != layer.size_bytes {
                    return Err(differs(&format!("it has {} bytes", row.size_bytes)));
                }
                Ok(LayerAnswer::Whole(RemoteRow { keep: Keep::All, ..row }))
            }
            Err(problem) => Err(Problem::unavailable(what, problem)),
        }
    }

    /// What a sealed layer itself has, if it is all here and can be told in few parts.
    pub(crate) fn own_blocks(&self, row: &LayerRow) -> Option<Vec<OwnBlocks>> {
        if row.remote.is_some() {
            return None;
        }
        let opened = || self.open_sealed(row).ok().map(Arc::new);
        let layer = self.opened_layer(row.id).or_else(opened)?;
        let runs = layer.states.runs(0..layer.blocks());
        let own = runs.filter(|(_, state)| *state != BlockState::Absent).map(|(run, state)| {
            let zero = state == BlockState::Zero;
            OwnBlocks { first: run.start, count: run.end - run.start, zero }
        });
        let own: Vec<_> = own.take(OWN_BLOCKS_MAX + 1).collect();
        (own.len() <= OWN_BLOCKS_MAX).then_some(own)
    }

    /// Makes the topmost layers, of which the other host has told, unless they were made meanwhile. The caller
    /// holds the lock `changes`.
    fn make_staged(
        &self,
        what: &str,
        volume: &VolumeName,
        chain: &[DepartedLayer],
        told: Vec<LayerAnswer>,
    ) -> Result<u64, Problem> {
        let (top, rest) = chain.split_at(told.len());
        let ends = matches!(told.last(), Some(LayerAnswer::Whole(_)));
        let below = rest.first().filter(|_| !ends);
        if let Some(below) = below
            && !self.has_staged(what, below)?
        {
            let why = format!("layer {} was deleted here meanwhile", below.layer);
            return Err(Problem::conflict(what, why).next("try it again"));
        }
        let mut parent = below.map(|below| below.layer);
        let (mut rows, mut remotes, mut to_come_bytes) = (Vec::new(), Vec::new(), 0);
        for (layer, told) in top.iter().zip(told).rev() {
            if !self.has_staged(what, layer)? {
                // A whole copy has what is in the layers below, too.
                let depth = if matches!(told, LayerAnswer::Whole(_)) { usize::MAX } else { 1 };
                let (remote_row, remote, made) = match told {
                    LayerAnswer::Own(own) => {
                        to_come_bytes += own.states.remote_bytes();
                        let made = self.make_own_files(layer.layer, layer.size_bytes, &own.states);
                        (own.row, Some(own.remote), made)
                    }
                    LayerAnswer::Whole(row) => {
                        to_come_bytes += row.size_bytes;
                        (row, None, layer::clear(&*self.files, layer.layer))
                    }
                };
                let new = LayerRow::new(layer.layer, layer.size_bytes, parent);
                // A whole copy gets its files with its first block.
                let untouched = remote.is_none();
                let confined = chain.iter().skip_while(|one| one.layer != layer.layer);
                let confined = confined.take(depth).any(|one| one.leave_site.is_never());
                rows.push(LayerRow { remote: Some(remote_row), untouched, confined, ..new });
                remotes.push(remote);
                if let Err(error) = made {
                    self.remove_layers(&rows.iter().map(|row| row.id).collect::<Vec<_>>());
                    return Err(io_problem(what, &error.into()));
                }
            }
            parent = Some(layer.layer);
        }
        let made: Vec<_> = rows.iter().map(|row| row.id).collect();
        let staged = self.catalog.stage(&rows);
        staged.map_err(|error| self.not_recorded(what, &made, &error))?;
        let mut all = lock(&self.staged);
        all.entry(volume.clone()).or_default().extend(made);
        drop(all);
        for (row, remote) in rows.iter().zip(remotes) {
            let Some(remote) = remote else { continue };
            if let Err(error) = self.open_new_copy(row, remote) {
                tracing::error!(%error, "can't open a copy that was just made");
            }
        }
        self.to_fill.notify_one();
        Ok(to_come_bytes)
    }

    /// Makes the files of a copy of a layer's own blocks, durably, with a map of what the layer has.
    pub(crate) fn make_own_files(
        &self,
        id: LayerId,
        size_bytes: u64,
        states: &BlockStates,
    ) -> std::io::Result<()> {
        layer::clear(&*self.files, id)?;
        let data = self.files.create(&data_name(id), size_bytes)?;
        data.sync_created()?;
        let map = self.files.create(&map_name(id), map::file_bytes(states.blocks()))?;
        MapFile::create_reserved(map, id, states)?;
        self.files.sync_names()
    }
}

/// The map of a layer, as its chain tells it. `None` if no layer of this size can have these blocks.
fn told_states(layer: &DepartedLayer, own: &[OwnBlocks]) -> Option<BlockStates> {
    let states = BlockStates::new(layer.size_bytes / BLOCK_BYTES);
    let mut at = 0;
    for OwnBlocks { first, count, zero } in own {
        let end = first.checked_add(*count).filter(|end| *end <= states.blocks())?;
        if *first < at || *count == 0 {
            return None;
        }
        at = end;
        states.set(*first..end, if *zero { BlockState::Zero } else { BlockState::Remote });
    }
    Some(states)
}
