//! What may not leave its site: marked layers and all that stands on them. Also the sites of the hosts.

use std::collections::HashSet;

use perigee_model::leave_site::{SiteAddress, SiteMap};
use perigee_model::{LayerId, SiteId, VolumeName};
use rusqlite::{Transaction, params};

use crate::catalog::columns::{Parsed, parsed};
use crate::catalog::{Catalog, Result, above, chain};

pub(super) fn mark(tx: &Transaction<'_>, layer: LayerId) -> Result<()> {
    let sql = "INSERT INTO held VALUES (?1) ON CONFLICT DO NOTHING";
    tx.prepare_cached(sql)?.execute([layer.to_string()]).map(drop)
}

/// Marks a layer that takes the place of these, if one of them is marked.
pub(super) fn take_over(tx: &Transaction<'_>, run: &[LayerId], by: LayerId) -> Result<()> {
    let mut is_marked = tx.prepare_cached("SELECT 1 FROM held WHERE layer = ?1")?;
    for layer in run {
        if is_marked.exists([layer.to_string()])? {
            return mark(tx, by);
        }
    }
    Ok(())
}

/// Marks a layer if it is here.
pub(super) fn mark_present(tx: &Transaction<'_>, layer: LayerId) -> Result<()> {
    let sql = "INSERT INTO held SELECT id FROM layers WHERE id = ?1 ON CONFLICT DO NOTHING";
    tx.prepare_cached(sql)?.execute([layer.to_string()]).map(drop)
}

impl Catalog {
    /// Whether the layer, or one below it, is marked.
    pub(crate) fn is_confined(&self, top: LayerId) -> Result<bool> {
        let chain = chain("SELECT ?1");
        let sql = format!("{chain} SELECT EXISTS (SELECT 1 FROM held WHERE layer IN chain)");
        self.lock().prepare_cached(&sql)?.query_row([top.to_string()], |row| row.get(0))
    }

    /// Marks all these layers, or removes their marks, in one transaction.
    pub(crate) fn set_confined(&self, layers: &[LayerId], confined: bool) -> Result<()> {
        self.change(|tx| {
            layers.iter().try_for_each(|layer| match confined {
                true => mark(tx, *layer),
                false => {
                    let sql = "DELETE FROM held WHERE layer = ?1";
                    tx.prepare_cached(sql)?.execute([layer.to_string()]).map(drop)
                }
            })
        })
    }

    /// Whether an image or a volume has the layer in its chain, and not the layer `above` it. What departed from
    /// here, and points of replicas, count only for a volume, and only if they are another volume's.
    pub(crate) fn has_other_users(
        &self,
        layer: LayerId,
        above: LayerId,
        volume: Option<&VolumeName>,
    ) -> Result<bool> {
        let sql = "WITH RECURSIVE others(id) AS (
                       SELECT ?1
                       UNION SELECT l.id FROM layers l JOIN others ON l.parent = others.id
                       WHERE l.id <> ?2
                   )
                   SELECT EXISTS (SELECT 1 FROM keepers WHERE layer IN others
                                  AND (what IN ('volume', 'image') OR name <> ?3))";
        let volume = volume.map(VolumeName::as_str);
        let row = params![layer.to_string(), above.to_string(), volume];
        // Nothing is unequal to NULL in SQL, so without a volume none of them counts.
        self.lock().prepare_cached(sql)?.query_row(row, |row| row.get(0))
    }

    /// The topmost layers of what is kept here of a volume that has its home elsewhere.
    pub(crate) fn kept_of(&self, volume: &VolumeName) -> Result<Vec<LayerId>> {
        let sql = "SELECT DISTINCT layer FROM keepers
                   WHERE what IN ('departed', 'replica') AND name = ?1 ORDER BY 1";
        let connection = self.lock();
        let mut statement = connection.prepare_cached(sql)?;
        statement.query_map([volume.as_str()], |row| parsed(row, 0))?.collect()
    }

    /// The volumes that have departed from here, and of which something stands on the layer.
    pub(crate) fn departed_on(&self, layer: LayerId) -> Result<Vec<VolumeName>> {
        let sql = format!(
            "{} SELECT DISTINCT name FROM keepers WHERE layer IN above AND what = 'departed'",
            above("SELECT ?1")
        );
        let connection = self.lock();
        let mut statement = connection.prepare_cached(&sql)?;
        statement.query_map([layer.to_string()], |row| parsed(row, 0))?.collect()
    }

    /// Those of these layers that are here.
    pub(crate) fn present(&self, layers: &[LayerId]) -> Result<Vec<LayerId>> {
        let connection = self.lock();
        let mut statement = connection.prepare_cached("SELECT 1 FROM layers WHERE id = ?1")?;
        let mut present = Vec::new();
        for layer in layers.iter().collect::<HashSet<_>>() {
            if statement.exists([layer.to_string()])? {
                present.push(*layer);
            }
        }
        present.sort();
        Ok(present)
    }

    /// `None`: this pool has not got them yet.
    pub(crate) fn sites(&self) -> Result<Option<SiteMap>> {
        let connection = self.lock();
        let here: Option<Parsed<SiteId>> =
            connection.query_row("SELECT site FROM pool", [], |row| row.get(0))?;
        let Some(Parsed(here)) = here else { return Ok(None) };
        let mut statement = connection.prepare("SELECT address, site FROM sites ORDER BY 1")?;
        let rows = statement.query_map([], |row| {
            Ok(SiteAddress { address: parsed(row, 0)?, site: parsed(row, 1)? })
        })?;
        Ok(Some(SiteMap { here, hosts: rows.collect::<Result<_>>()?, teller: None }))
    }

    pub(crate) fn set_sites(&self, map: &SiteMap) -> Result<()> {
        self.change(|tx| {
            tx.execute("UPDATE pool SET site = ?1", [map.here.as_str()])?;
            tx.execute("DELETE FROM sites", [])?;
            let sql = "INSERT INTO sites VALUES (?1, ?2)
                       ON CONFLICT (address) DO UPDATE SET site = excluded.site";
            let mut insert = tx.prepare(sql)?;
            map.hosts.iter().try_for_each(|host| {
                insert.execute(params![host.address.to_string(), host.site.as_str()]).map(drop)
            })
        })
    }
}
