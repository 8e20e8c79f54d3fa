//! Replicas of volumes. This pool keeps points of a volume whose home is elsewhere, and keeps for replicas of its own
//! volumes the layers that they stand on.
//!
//! A point is a sealed layer with everything below it. It is complete when nothing below it is a copy that
//! still lacks blocks: a copy is complete only when it was compared with the home's checksums and is durable.
//!
//! **Chains stay short.** For each replica the home keeps only the newest layer that the replica has, and all
//! layers below it while the replica copies them. A replica keeps the topmost layer of each point. Compaction merges
//! all other layers, at each place on its own: only the newest common layer has to be the same at both.

use std::sync::Arc;

use perigee_block::locking::lock;
use perigee_model::home::{Place, Tenure, VolumeHome};
use perigee_model::replica::{
    PinReplica, PromoteReplica, PullReplica, ReplicaPin, ReplicaPoint, SealedReplica, Supersede,
    Superseded, VolumeReplica,
};
use perigee_model::volume::{CachePolicy, Compacted, Keep};
use perigee_model::{ImageName, LayerId, Problem, ProblemKind, TenantName, VolumeName};

use crate::catalog::{self, LayerRow, PointRow, failed};
use crate::homes::handover::refused;
use crate::layers::layer::live_name;
use crate::pool::Pool;
use crate::volume::{Stack, Unflushed};
use crate::work::Work;

impl Pool {
    // --- at the volume's home ---

    /// # Errors
    /// When the catalog can't be written.
    pub async fn pin_replica(
        self: &Arc<Self>,
        name: &VolumeName,
        PinReplica { replica, layer }: PinReplica,
    ) -> Result<(), Problem> {
        let name = name.clone();
        self.run(move |pool| {
            let what = format!("can't keep what the replica of volume {name} at {replica} needs");
            pool.catalog.pin_complete(&name, replica.as_str(), layer).map_err(failed(&what))?;
            // Layers that were kept for the replica may be free to be merged now.
            pool.note_sealed();
            Ok(())
        })
        .await
    }

    /// What is kept for the volume's replicas, and how far they are behind.
    ///
    /// # Errors
    /// Not found; the catalog can't be read.
    pub async fn replica_pins(
        self: &Arc<Self>,
        name: &VolumeName,
    ) -> Result<Vec<ReplicaPin>, Problem> {
        let name = name.clone();
        self.run(move |pool| {
            let what = format!("can't say what the replicas of volume {name} need");
            let row = pool.catalog.volume(&name).map_err(failed(&what))?;
            let row = row.ok_or_else(|| Problem::not_found(&what, "there is no such volume"))?;
            let chain = pool.catalog.chain(row.head).map_err(failed(&what))?;
            let spaces = pool.catalog.layer_spaces(Some(row.head)).map_err(failed(&what))?;
            let bytes = |id| spaces.get(&id).map_or(0, |space| pool.layer_bytes(id, space));
            let pins = pool.catalog.replica_pins(&name).map_err(failed(&what))?;
            let newer_bytes = |layer: LayerId| {
                chain.iter().take_while(|row| row.id != layer).map(|row| bytes(row.id)).sum()
            };
            Ok(pins
                .into_iter()
                .map(|pin| ReplicaPin {
                    newer_bytes: newer_bytes(pin.layer),
                    replica: pin.replica,
                    layer: pin.layer,
                    filling: pin.filling,
                })
                .collect())
        })
        .await
    }

    // --- at the replica ---

    /// What this pool has of a replica; also of one that it never had.
    ///
    /// # Errors
    /// When the catalog can't be read.
    pub async fn replica(self: &Arc<Self>, name: &VolumeName) -> Result<VolumeReplica, Problem> {
        let name = name.clone();
        self.run(move |pool| pool.replica_now(&name)).await
    }

    fn replica_now(&self, name: &VolumeName) -> Result<VolumeReplica, Problem> {
        let what = format!("can't say what is here of the replica of volume {name}");
        let rows = self.catalog.replica_points(name).map_err(failed(&what))?;
        let point = |row: &PointRow| {
            let missing_bytes = self.missing_bytes(row.layer)?;
            let copies = match missing_bytes {
                0 => Vec::new(),
                _ => self.catalog.chain(row.layer)?,
            };
            let copies = copies.into_iter().filter(LayerRow::is_copy);
            let copies: Vec<_> = copies.filter_map(|row| self.layer_copy(row.id)).collect();
            // What can't be mended is named first.
            let worst = copies.iter().find(|copy| copy.is_broken());
            let problem = worst.into_iter().chain(&copies).find_map(|copy| copy.why_not_filled());
            Ok(ReplicaPoint {
                layer: row.layer,
                taken_ms: row.taken_ms,
                missing_bytes,
                problem: problem.unwrap_or_default(),
                broken: worst.is_some(),
            })
        };
        let points = rows.iter().map(point).collect::<rusqlite::Result<_>>();
        let newest = rows.first();
        let layers = newest.map(|row| self.catalog.chain(row.layer)).transpose();
        Ok(VolumeReplica {
            volume: name.clone(),
            tenure: newest.map(|row| row.tenure),
            points: points.map_err(failed(&what))?,
            layers: layers.map_err(failed(&what))?.map_or(0, |chain| chain.len() as u64),
        })
    }

    /// Begins a round, and drops the oldest points beyond the number that is kept. The copies of a round that is not
    /// complete stay, so that only what they lack is shipped again. They are opened anew, and what is damaged in them
    /// is missing. Returns the number of the round, which it has until another one begins or the replica is no more.
    ///
    /// # Errors
    /// A conflict when the volume has its home here.
    pub async fn begin_pull(
        self: &Arc<Self>,
        name: &VolumeName,
        keep: u32,
    ) -> Result<u64, Problem> {
        let name = name.clone();
        self.change(move |pool| {
            let what = format!("can't make a replica of volume {name}");
            if pool.catalog.tenure(&name).map_err(failed(&what))?.is_some() {
                let why = "the volume has its home in this pool";
                return Err(Problem::conflict(what, why));
            }
            let points = pool.replica_now(&name)?.points;
            let (complete, incomplete): (Vec<_>, Vec<_>) =
                points.iter().partition(|point| point.missing_bytes == 0);
            let surplus = complete.iter().skip(usize::try_from(keep.max(1)).unwrap_or(usize::MAX));
            let mut dropped: Vec<_> = surplus.map(|point| point.layer).collect();
            for point in incomplete {
                if !pool.renew_copies(&what, point.layer)? {
                    dropped.push(point.layer);
                }
            }
            pool.drop_points_now(&what, &name, &dropped)?;
            let mut pulls = lock(&pool.pulls);
            pulls.last += 1;
            let number = pulls.last;
            pulls.of.insert(name, number);
            Ok(number)
        })
        .await
    }

    /// Whether a replica of this volume is made here.
    pub fn is_pulled(&self, name: &VolumeName) -> bool {
        lock(&self.pulls).of.contains_key(name)
    }

    fn drop_points_now(
        &self,
        what: &str,
        name: &VolumeName,
        tops: &[LayerId],
    ) -> Result<(), Problem> {
        let unneeded = self.catalog.drop_points(name, tops).map_err(failed(what))?;
        self.drop_copies(&unneeded);
        self.remove_layers(&unneeded);
        Ok(())
    }

    /// Makes copies of what the home has sealed, and records them as the replica's newest point, instead of one that
    /// is not complete. They get their blocks in the background. Returns how many bytes have to be shipped.
    ///
    /// # Errors
    /// As [`Self::stage_layers`]; a conflict when the replica is one of another volume with this name, or when the
    /// round is over: another one has begun, or the replica was dropped or promoted.
    pub async fn add_point(
        self: &Arc<Self>,
        name: &VolumeName,
        ask: &PullReplica,
        round: u64,
        sealed: SealedReplica,
    ) -> Result<u64, Problem> {
        let what = format!("can't make a replica of volume {name}");
        let (named, tenure, now) = (name.clone(), sealed.tenure, what.clone());
        self.run(move |pool| pool.check_replica_of(&now, &named, tenure)).await?;
        let to_come_bytes = self.stage_layers(name, &ask.from.nbd_addr, &sealed.chain).await?;
        let (name, taken_ms) = (name.clone(), ask.taken_ms);
        self.change(move |pool| {
            if lock(&pool.pulls).of.get(&name) != Some(&round) {
                pool.drop_staged(&name);
                let why =
                    "the replica was dropped or promoted meanwhile, or another round has begun";
                return Err(Problem::conflict(&what, why));
            }
            let Some(top) = sealed.chain.first().filter(|top| top.size_bytes <= sealed.size_bytes)
            else {
                let why = "the home answered with layers that are not the volume's";
                return Err(Problem::internal(&what, why));
            };
            if !pool.has_staged(&what, top)? {
                let why = "a layer of it was deleted here meanwhile";
                return Err(Problem::unavailable(&what, why).next("it is tried again"));
            }
            let chain = pool.catalog.chain(top.layer).map_err(failed(&what))?;
            let keeps_nothing = |remote: &catalog::RemoteRow| remote.keep == Keep::Never;
            if let Some(row) =
                chain.iter().find(|row| row.remote.as_ref().is_some_and(keeps_nothing))
            {
                let why = format!("layer {} is here as a copy that keeps nothing", row.id);
                return Err(Problem::conflict(&what, why)
                    .next("delete that image or volume at this host, or choose another host"));
            }
            let copies = chain.iter().filter(|row| row.is_copy());
            let copies = copies.filter_map(|row| pool.layer_copy(row.id));
            // The filler may have begun with what was just staged. Copies of earlier rounds only lack something.
            let missing_bytes = copies.map(|copy| copy.missing_bytes()).sum();
            let ships_bytes = to_come_bytes.max(missing_bytes);
            let added = pool.catalog.add_point(&name, top.layer, taken_ms, &sealed);
            added.map_err(failed(&what))?;
            pool.drop_staged(&name);
            pool.drop_incomplete(&what, &name, Some(top.layer))?;
            pool.to_fill.notify_one();
            Ok(ships_bytes)
        })
        .await
    }

    /// Drops the points that are not complete, but for this one. Layers that it stands on stay. The caller holds the
    /// lock `changes`.
    pub(crate) fn drop_incomplete(
        &self,
        what: &str,
        name: &VolumeName,
        but: Option<LayerId>,
    ) -> Result<(), Problem> {
        let points = self.catalog.replica_points(name).map_err(failed(what))?;
        let mut dropped = Vec::new();
        for point in points.iter().filter(|point| Some(point.layer) != but) {
            if self.missing_bytes(point.layer).map_err(failed(what))? > 0 {
                dropped.push(point.layer);
            }
        }
        self.drop_points_now(what, name, &dropped)
    }

    fn check_replica_of(
        &self,
        what: &str,
        name: &VolumeName,
        tenure: Tenure,
    ) -> Result<(), Problem> {
        let points = self.catalog.replica_points(name).map_err(failed(what))?;
        if points.iter().all(|point| point.tenure.incarnation() == tenure.incarnation()) {
            return Ok(());
        }
        let why = "the replica here is of an earlier volume with this name";
        Err(Problem::conflict(what, why)
            .next(format!("drop it (`perigee volume replicate {name} --to SITE --stop`)")))
    }

    /// Drops all points of a replica. It is no error if there is none.
    ///
    /// # Errors
    /// When the catalog can't be written.
    pub async fn drop_replica(self: &Arc<Self>, name: &VolumeName) -> Result<(), Problem> {
        let name = name.clone();
        self.change(move |pool| {
            let what = format!("can't drop the replica of volume {name}");
            let points = pool.catalog.replica_points(&name).map_err(failed(&what))?;
            let tops: Vec<_> = points.iter().map(|point| point.layer).collect();
            lock(&pool.pulls).of.remove(&name);
            pool.drop_points_now(&what, &name, &tops)
        })
        .await
    }

    /// Merges the layers of a replica that are neither a point's topmost nor needed by anything else.
    ///
    /// # Errors
    /// As [`Self::compact_volume`].
    pub async fn compact_replica(
        self: &Arc<Self>,
        name: &VolumeName,
        work: Arc<Work>,
    ) -> Result<Compacted, Problem> {
        let what = format!("can't compact the replica of volume {name}");
        let (named, now) = (name.clone(), what.clone());
        let points =
            self.run(move |pool| pool.catalog.replica_points(&named).map_err(failed(&now))).await?;
        match points.first() {
            Some(newest) => self.compact_below(what, newest.layer, work).await,
            None => Ok(Compacted { layers_before: 0, layers_after: 0, copied_bytes: 0 }),
        }
    }

    /// A complete point of the replica becomes the volume. Its other points are dropped.
    ///
    /// # Errors
    /// Not found; a conflict when the point is not complete, or a volume of this name is here.
    pub async fn promote(
        self: &Arc<Self>,
        name: &VolumeName,
        PromoteReplica { layer, tenure }: PromoteReplica,
    ) -> Result<VolumeHome, Problem> {
        let what = format!("can't make the replica of volume {name} the volume");
        let guard = self.wait_for_changes(&what).await?;
        let name = name.clone();
        self.run(move |pool| {
            let _guard = guard;
            pool.promote_now(&name, layer, tenure)?;
            pool.home_now(&name)
        })
        .await
    }

    fn promote_now(
        &self,
        name: &VolumeName,
        layer: LayerId,
        tenure: Tenure,
    ) -> Result<(), Problem> {
        let what = format!("can't make the replica of volume {name} the volume");
        let before = self.catalog.residence(name, tenure).map_err(failed(&what))?;
        if before.promote(tenure).map_err(|why| refused(&what, why))?.is_none() {
            return Ok(());
        }
        let points = self.catalog.replica_points(name).map_err(failed(&what))?;
        let Some(point) = points.into_iter().find(|point| point.layer == layer) else {
            let why = format!("this pool has no point {layer} of it");
            return Err(Problem::not_found(&what, why).next("look which points there are"));
        };
        let missing_bytes = self.missing_bytes(layer).map_err(failed(&what))?;
        if missing_bytes > 0 {
            let why = format!("{missing_bytes} bytes of point {layer} are not here");
            return Err(Problem::conflict(&what, why).next("choose an earlier point"));
        }
        let promoted = self.catalog.promote(name, &point, tenure).map_err(failed(&what))?;
        let unneeded = promoted.map_err(|why| refused(&what, why))?;
        lock(&self.pulls).of.remove(name);
        self.drop_copies(&unneeded);
        self.remove_layers(&unneeded);
        Ok(())
    }

    // --- at the home that was lost ---

    /// A replica became the volume while this server did not answer, so the volume is removed here. What it had stays
    /// as an image, also if its disk fails to write it or is full, or if its files can't be opened.
    ///
    /// # Errors
    /// No space in the catalog; unavailable while other hosts have blocks of it in memory.
    pub async fn supersede(
        self: &Arc<Self>,
        name: &VolumeName,
        ask: &Supersede,
    ) -> Result<Superseded, Problem> {
        let what = format!("can't give up volume {name}, which is at {} now", ask.to.nbd_addr);
        let image = lost_image(name, ask.lost);
        let (named, now, lost) = (name.clone(), what.clone(), ask.lost);
        let is_here = self
            .run(move |pool| {
                let before = pool.catalog.residence(&named, lost).map_err(failed(&now))?;
                Ok::<_, Problem>(matches!(before.place, Place::Here(_)))
            })
            .await?;
        let opened = match is_here {
            true => self.volume(name).await.map(Some),
            false => Ok(None),
        };
        let opened = match opened {
            // What is only in its live map would be lost.
            Err(problem) if problem.kind == ProblemKind::Unavailable => return Err(problem),
            Err(problem) => {
                tracing::warn!(%image, %problem, "the image has what the volume's files have");
                None
            }
            Ok(opened) => opened,
        };
        if let Some(volume) = opened {
            self.end_leases(&what, &volume).await?;
            let guard = self.wait_for_changes(&what).await?;
            let (pool, named, ask, now) =
                (Arc::clone(self), name.clone(), ask.clone(), what.clone());
            let kept = image.clone();
            volume
                .leave(&what, Unflushed::Kept, move |stack| {
                    let _guard = guard;
                    pool.supersede_now(&now, &named, &ask, &kept, stack)
                })
                .await?;
        } else {
            let (named, ask, now) = (name.clone(), ask.clone(), what.clone());
            let kept = image.clone();
            let guard = self.wait_for_changes(&what).await?;
            self.run(move |pool| {
                let _guard = guard;
                pool.supersede_closed(&now, &named, &ask, &kept)
            })
            .await?;
        }
        let kept = image.clone();
        let is_kept =
            self.run(move |pool| pool.catalog.image(&kept).map_err(failed(&what))).await?.is_some();
        Ok(Superseded { image: is_kept.then_some(image) })
    }

    /// Gives up a volume that is not here, or that nobody has open. Its files may be damaged. The caller holds the lock
    /// `changes`.
    fn supersede_closed(
        &self,
        what: &str,
        name: &VolumeName,
        ask: &Supersede,
        image: &ImageName,
    ) -> Result<(), Problem> {
        let supersede = |head| {
            let done = self.catalog.supersede(name, ask.lost, &ask.to.nbd_addr, image, head);
            done.map(drop).map_err(failed(what))
        };
        let opened = self.unless_opened(name, || {
            let row = self.catalog.volume(name).map_err(failed(what))?;
            supersede(row.map(|row| (row.head, None)))
        })?;
        match opened {
            None => Ok(()),
            Some(volume) if volume.incarnation() == ask.lost.incarnation() => {
                Err(Problem::unavailable(what, "it was opened meanwhile").next("ask again"))
            }
            // It is the one that took its place.
            Some(_) => supersede(None),
        }
    }

    fn supersede_now(
        &self,
        what: &str,
        name: &VolumeName,
        ask: &Supersede,
        image: &ImageName,
        stack: &Stack,
    ) -> Result<(), (Problem, bool)> {
        let layer = &stack.head.layer;
        let head = (layer.id, Some(layer.data_bytes()));
        if let Some(why) = stack.head.why_unflushed() {
            tracing::warn!(%image, why, "the image may lack the volume's last writes");
            if let Err(error) = stack.head.keep_unflushed() {
                tracing::error!(%image, %error, "the image will lack what was written since the last flush");
            }
        }
        let done = self.catalog.supersede(name, ask.lost, &ask.to.nbd_addr, image, Some(head));
        self.forget_volume(name);
        // It is not known whether this was recorded. The next one who opens the volume looks.
        done.map_err(|error| (failed(what)(error), true))?;
        layer.set_cache(CachePolicy::Shared);
        if let Err(error) = self.files.remove(&live_name(layer.id)) {
            tracing::warn!(layer = %layer.id, %error, "can't remove a sealed layer's live map");
        }
        self.note_sealed();
        Ok(())
    }
}

/// The name of the image that keeps what a lost volume had at its home.
fn lost_image(name: &VolumeName, lost: Tenure) -> ImageName {
    let which = lost.incarnation();
    ImageName::new(format!("{name}-lost-{which}"))
        .or_else(|_| ImageName::new(TenantName::of(name.as_str()).full(&format!("lost-{which}"))))
        .expect("a tenant and an incarnation make a name")
}

#[cfg(test)]
mod tests {
    use perigee_model::Incarnation;

    use super::*;

    #[test]
    fn what_a_lost_home_keeps_has_the_volume_s_tenant_however_long_its_name_is() {
        let lost = Tenure::first(Incarnation(u32::MAX));
        let names = (1..=200)
            .filter_map(|length| VolumeName::new(format!("acme~{}", "d".repeat(length))).ok());
        let names: Vec<VolumeName> = names.collect();
        assert!(names.last().is_some_and(|longest| longest.as_str().len() > 50));
        for name in names {
            let image = lost_image(&name, lost);
            assert!(image.as_str().starts_with("acme~"), "{name}: {image}");
        }
    }
}
