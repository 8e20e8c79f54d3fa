//! Where copies get what they lack, when that is another host than before.
//!
//! A host that lacks blocks itself may get them from this one, or be this one. Then a read of such a block would go
//! round and never end. So a copy goes on only from a host that serves the layer's own blocks, which it does when it
//! has all of them.

use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, stream};
use perigee_block::exports::{LAYER_PREFIX, OWN_SUFFIX};
use perigee_model::home::DepartedLayer;
use perigee_model::{LayerId, Problem, ProblemKind};

use crate::catalog::{RemoteRow, Verdict, failed};
use crate::pool::Pool;

/// As many layers of one chain are asked about at once.
const ASKED_AT_ONCE: usize = 8;

impl Pool {
    /// The copies of own blocks of these layers that this pool has and that get what they lack from another host
    /// than this one. Each with this host as its source.
    pub(crate) fn own_from_elsewhere(
        &self,
        what: &str,
        nbd_addr: &str,
        chain: &[DepartedLayer],
    ) -> Result<Vec<(LayerId, RemoteRow)>, Problem> {
        let mut elsewhere = Vec::new();
        for layer in chain {
            let id = layer.layer;
            if !self.catalog.has_layer(id).map_err(failed(what))? {
                continue;
            }
            let remote = self.catalog.chain(id).map_err(failed(what))?.swap_remove(0).remote;
            // No host has what a backup shows as one layer.
            let goes_on = |remote: &RemoteRow| remote.own && remote.target().is_none();
            let remote = remote.filter(|remote| goes_on(remote) && remote.nbd_addr != nbd_addr);
            elsewhere.extend(
                remote.map(|remote| (id, RemoteRow { nbd_addr: nbd_addr.to_owned(), ..remote })),
            );
        }
        Ok(elsewhere)
    }

    /// These copies go on from these sources, but for those of which the source does not have all blocks itself.
    pub(crate) async fn continue_from(
        self: &Arc<Self>,
        what: &str,
        copies: Vec<(LayerId, RemoteRow)>,
    ) -> Result<(), Problem> {
        let has = copies.into_iter().map(|(layer, to)| async move {
            Ok::<_, Problem>(self.has_all(what, &to).await?.then_some((layer, to)))
        });
        let found: Vec<_> = stream::iter(has).buffered(ASKED_AT_ONCE).try_collect().await?;
        let found: Vec<_> = found.into_iter().flatten().collect();
        if found.is_empty() {
            return Ok(());
        }
        let what = what.to_owned();
        self.change(move |pool| {
            // A copy may have been completed or deleted meanwhile.
            let here = |layer| pool.catalog.has_layer(layer).map_err(failed(&what));
            for (layer, to) in found {
                if here(layer)? {
                    pool.change_source(&what, layer, &to)?;
                }
            }
            pool.to_fill.notify_one();
            Ok(())
        })
        .await
    }

    /// Whether another host has all own blocks of the layer of which this is an export there.
    ///
    /// # Errors
    /// Unavailable when it does not answer.
    async fn has_all(&self, what: &str, there: &RemoteRow) -> Result<bool, Problem> {
        let Some(layer) = there.is_layer else { return Ok(false) };
        let export = format!("{LAYER_PREFIX}{layer}{OWN_SUFFIX}");
        match (self.connect.connect)(there.nbd_addr.clone(), export).await {
            Ok(device) => Ok(device.layer() == Some(layer)),
            Err(problem) if problem.kind == ProblemKind::NotFound => Ok(false),
            Err(problem) => Err(Problem::unavailable(what, problem)),
        }
    }

    /// Where a copy that is here gets what it lacks, if it is a copy of the kind of this export.
    fn source(
        &self,
        what: &str,
        layer: LayerId,
        to: &RemoteRow,
    ) -> Result<Option<RemoteRow>, Problem> {
        let chain = self.catalog.chain(layer).map_err(failed(what))?;
        let remote = chain.into_iter().next().and_then(|row| row.remote);
        Ok(remote.filter(|now| now.own == to.own))
    }

    /// Refuses an export as the next source of a copy that is here if its host lacks blocks of the layer too.
    ///
    /// # Errors
    /// A conflict if it lacks some, unavailable when it does not answer.
    pub(crate) async fn check_next_source(
        self: &Arc<Self>,
        what: &str,
        layer: LayerId,
        to: &RemoteRow,
    ) -> Result<(), Problem> {
        let (now, there) = (what.to_owned(), to.clone());
        let source = self.run(move |pool| {
            if !pool.catalog.has_layer(layer).map_err(failed(&now))? {
                return Ok(None);
            }
            pool.source(&now, layer, &there)
        });
        let source = source.await?;
        if source.is_none_or(|now| now.nbd_addr == to.nbd_addr) || self.has_all(what, to).await? {
            return Ok(());
        }
        let why = format!("{} does not have all of layer {layer} itself", to.nbd_addr);
        Err(Problem::conflict(what, why).next("copy it from a host that has a complete image"))
    }

    /// What a layer lacks comes from this export of the same layer from now on. Nothing changes for a layer that
    /// lacks nothing, nor where one is a copy of own blocks and the other is not. The caller holds the lock
    /// `changes`. Returns whether that is another source than before, or the same is tried again.
    pub(crate) fn change_source(
        &self,
        what: &str,
        layer: LayerId,
        to: &RemoteRow,
    ) -> Result<bool, Problem> {
        let Some(now) = self.source(what, layer, to)? else { return Ok(false) };
        if (&now.nbd_addr, &now.export) == (&to.nbd_addr, &to.export) {
            // There may be no other one, and what was wrong may be mended.
            let refused = self.catalog.refused_source(layer).map_err(failed(what))?;
            let is_unclear = refused == Some(Verdict::Unclear);
            if is_unclear {
                self.catalog.try_source_again(layer).map_err(failed(what))?;
            }
            return Ok(is_unclear);
        }
        if now.size_bytes != to.size_bytes {
            let why = format!("it has {} bytes there, not {}", to.size_bytes, now.size_bytes);
            return Err(Problem::conflict(what, why).next("check the image on the other host"));
        }
        // A server that is killed after this goes on from there.
        self.catalog.set_source(layer, to).map_err(failed(what))?;
        tracing::info!(%layer, from = now.nbd_addr, to = to.nbd_addr, "a copy has another source");
        for remote in self.remotes_of(layer) {
            remote.change_source(to);
        }
        Ok(true)
    }
}
