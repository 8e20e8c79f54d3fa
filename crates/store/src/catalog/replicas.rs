//! Replicas of volumes whose home is elsewhere, and the layers of this pool's volumes that replicas elsewhere stand on.

use perigee_model::home::{HomeRefused, Tenure};
use perigee_model::replica::SealedReplica;
use perigee_model::switchover::WriterEpochs;
use perigee_model::volume::{CachePolicy, Keep};
use perigee_model::{Epoch, ImageName, LayerId, SiteId, TenantName, VolumeName};
use rusqlite::{Row, Transaction, params};

use crate::catalog::columns::{layer_bytes, parsed, signed, unsigned};
use crate::catalog::residences::{decided, put_here, residence, set_spent, tenure_here};
use crate::catalog::{Catalog, LayerRow, NewVolume, Result, chain, delete_unneeded, insert_image};

/// What a replica has of a volume at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PointRow {
    pub(crate) layer: LayerId,
    pub(crate) tenure: Tenure,
    pub(crate) taken_ms: u64,
    pub(crate) size_bytes: u64,
    pub(crate) tenant: TenantName,
    pub(crate) cache: CachePolicy,
}

/// A layer that a volume here keeps for a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PinRow {
    pub(crate) replica: SiteId,
    pub(crate) layer: LayerId,
    pub(crate) filling: bool,
}

impl Catalog {
    /// The points of a replica, the newest first.
    pub(crate) fn replica_points(&self, volume: &VolumeName) -> Result<Vec<PointRow>> {
        points(&self.lock(), volume)
    }

    /// Adds a point whose layers are here, or makes it newer. The copies below it get all that they lack.
    pub(crate) fn add_point(
        &self,
        volume: &VolumeName,
        top: LayerId,
        taken_ms: u64,
        from: &SealedReplica,
    ) -> Result<()> {
        self.change(|tx| {
            let sql = "INSERT INTO replicas VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
                       ON CONFLICT (volume, layer) DO UPDATE
                       SET tenure = excluded.tenure, taken_ms = excluded.taken_ms";
            tx.execute(
                sql,
                params![
                    volume.as_str(),
                    top.to_string(),
                    signed(from.tenure.0)?,
                    signed(taken_ms)?,
                    signed(from.size_bytes)?,
                    from.tenant.as_str(),
                    from.cache.to_string()
                ],
            )?;
            complete_chain(tx, top)
        })
    }

    /// Returns the layers that are not needed any more.
    pub(crate) fn drop_points(
        &self,
        volume: &VolumeName,
        tops: &[LayerId],
    ) -> Result<Vec<LayerId>> {
        self.change_on_full_disk(|tx| drop_points(tx, volume, tops))
    }

    /// A replica here becomes the volume, with a new incarnation and an empty head on the point. Its points are
    /// removed. Returns the layers that are not needed any more. Until then the volume may be nowhere.
    pub(crate) fn promote(
        &self,
        volume: &VolumeName,
        point: &PointRow,
        tenure: Tenure,
    ) -> Result<std::result::Result<Vec<LayerId>, HomeRefused>> {
        self.change_on_full_disk(|tx| {
            let before = residence(tx, volume, tenure)?;
            let Some(after) = decided!(before.promote(tenure)) else { return Ok(Ok(Vec::new())) };
            if let Some(here) = tenure_here(tx, volume)? {
                return Ok(Err(HomeRefused::OtherTenure { here, asked: tenure }));
            }
            let epoch = Epoch::first(tenure.incarnation());
            let new = NewVolume {
                name: volume.clone(),
                head: LayerRow::new_head(point.size_bytes, Some(point.layer)),
                epoch,
                tenant: point.tenant.clone(),
                cache: point.cache,
                owner: None,
            };
            let epochs = WriterEpochs { current: epoch, issued_max: epoch, returned_max: Epoch(0) };
            put_here(tx, &new, &after, epochs)?;
            let tops: Vec<_> = points(tx, volume)?.into_iter().map(|point| point.layer).collect();
            Ok(Ok(drop_points(tx, volume, &tops)?))
        })
    }

    /// A replica elsewhere has become the volume. The volume is removed here, an image keeps what it had, and the new
    /// home's address is attached. `head` is its head, and how many bytes of it are data if that is known. Returns
    /// `false` if the volume was not here.
    pub(crate) fn supersede(
        &self,
        volume: &VolumeName,
        lost: Tenure,
        to_nbd_addr: &str,
        image: &ImageName,
        head: Option<(LayerId, Option<u64>)>,
    ) -> Result<bool> {
        self.change_on_full_disk(|tx| {
            let Some(after) = residence(tx, volume, lost)?.supersede(lost) else {
                return Ok(false);
            };
            set_spent(tx, volume, &after)?;
            let here = tenure_here(tx, volume)?;
            let Some((head, data_bytes)) =
                head.filter(|_| here.is_some_and(|here| here.incarnation() == lost.incarnation()))
            else {
                return Ok(false);
            };
            let sql = "UPDATE layers SET data_bytes = ?2 WHERE id = ?1";
            tx.execute(sql, params![head.to_string(), data_bytes.map(signed).transpose()?])?;
            insert_image(tx, image, head)?;
            tx.execute("DELETE FROM volumes WHERE name = ?1", [volume.as_str()])?;
            let sql = "INSERT INTO attachments VALUES (?1, ?2)
                       ON CONFLICT (volume) DO UPDATE SET nbd_addr = excluded.nbd_addr";
            tx.execute(sql, params![volume.as_str(), to_nbd_addr])?;
            Ok(true)
        })
    }

    /// Keeps all layers of a volume from this one down as they are, while a replica or backup copies them. `keeper` is a replica's site, or a
    /// backup's target ([`crate::homes::sealing::Pin`]).
    pub(crate) fn pin_filling(
        &self,
        volume: &VolumeName,
        keeper: &str,
        layer: LayerId,
    ) -> Result<()> {
        self.change(|tx| {
            let of_replica = params![volume.as_str(), keeper];
            let sql = "DELETE FROM replica_pins WHERE volume = ?1 AND replica = ?2 AND filling";
            tx.execute(sql, of_replica)?;
            let sql = "INSERT INTO replica_pins VALUES (?1, ?2, ?3, 1)
                       ON CONFLICT (volume, replica, layer) DO UPDATE SET filling = 1";
            tx.execute(sql, params![volume.as_str(), keeper, layer.to_string()]).map(drop)
        })
    }

    /// What was copied is not needed any more. What is complete stays.
    pub(crate) fn drop_filling_pin(&self, volume: &VolumeName, keeper: &str) -> Result<()> {
        self.change(|tx| {
            let sql = "DELETE FROM replica_pins WHERE volume = ?1 AND replica = ?2 AND filling";
            tx.execute(sql, params![volume.as_str(), keeper]).map(drop)
        })
    }

    /// The keeper has all of this layer, and the home keeps only this one for it. With `None` it keeps none.
    pub(crate) fn pin_complete(
        &self,
        volume: &VolumeName,
        keeper: &str,
        layer: Option<LayerId>,
    ) -> Result<()> {
        self.change(|tx| {
            let layer = layer.map(|layer| layer.to_string());
            let sql = "DELETE FROM replica_pins
                       WHERE volume = ?1 AND replica = ?2 AND layer IS NOT ?3";
            let row = params![volume.as_str(), keeper, layer];
            tx.execute(sql, row)?;
            // A volume that has moved has no pins yet at its new home.
            let chain = chain("SELECT head FROM volumes WHERE name = ?1");
            let sql = format!(
                "{chain} INSERT INTO replica_pins SELECT ?1, ?2, ?3, 0 WHERE ?3 IN chain
                 ON CONFLICT (volume, replica, layer) DO UPDATE SET filling = 0"
            );
            tx.execute(&sql, row).map(drop)
        })
    }

    pub(crate) fn replica_pins(&self, volume: &VolumeName) -> Result<Vec<PinRow>> {
        let sql = "SELECT replica, layer, filling FROM replica_pins
                   WHERE volume = ?1 AND replica NOT LIKE 'backup:%' ORDER BY replica, filling";
        self.lock()
            .prepare_cached(sql)?
            .query_map([volume.as_str()], |row| {
                Ok(PinRow {
                    replica: parsed(row, 0)?,
                    layer: parsed(row, 1)?,
                    filling: row.get(2)?,
                })
            })?
            .collect()
    }
}

/// The copies from this layer down fetch all that they lack. Those that keep nothing are left as they are.
pub(super) fn complete_chain(tx: &Transaction<'_>, top: LayerId) -> Result<()> {
    let chain = chain("SELECT ?1");
    let sql = format!(
        "{chain} UPDATE remote_parents SET keep = ?2 WHERE layer IN chain AND keep <> 'never'"
    );
    tx.execute(&sql, params![top.to_string(), Keep::All.to_string()]).map(drop)
}

fn drop_points(
    tx: &Transaction<'_>,
    volume: &VolumeName,
    tops: &[LayerId],
) -> Result<Vec<LayerId>> {
    let mut unneeded = Vec::new();
    for top in tops {
        let sql = "DELETE FROM replicas WHERE volume = ?1 AND layer = ?2";
        if tx.execute(sql, params![volume.as_str(), top.to_string()])? > 0 {
            unneeded.extend(delete_unneeded(tx, *top)?);
        }
    }
    Ok(unneeded)
}

fn points(tx: &rusqlite::Connection, volume: &VolumeName) -> Result<Vec<PointRow>> {
    let sql = "SELECT layer, tenure, taken_ms, size_bytes, tenant, cache FROM replicas
               WHERE volume = ?1 ORDER BY rowid DESC";
    tx.prepare_cached(sql)?.query_map([volume.as_str()], point_row)?.collect()
}

fn point_row(row: &Row<'_>) -> Result<PointRow> {
    Ok(PointRow {
        layer: parsed(row, 0)?,
        tenure: Tenure(unsigned(row, 1)?),
        taken_ms: unsigned(row, 2)?,
        size_bytes: layer_bytes(row, 3)?,
        tenant: parsed(row, 4)?,
        cache: parsed(row, 5)?,
    })
}
