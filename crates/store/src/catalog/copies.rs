//! Layers that are copies of another host's layers. They have a remote parent until they are complete.

use perigee_model::LayerId;
use perigee_model::volume::Keep;
use rusqlite::{Transaction, params};

use crate::catalog::columns::{parsed, signed};
use crate::catalog::{Catalog, LayerRow, RemoteRow, Result, Sealed, delete_unneeded, insert_layer};

impl Catalog {
    /// Sets what a copy keeps from now on.
    pub(crate) fn set_keep(&self, layer: LayerId, keep: Keep) -> Result<()> {
        let sql = "UPDATE remote_parents SET keep = ?2 WHERE layer = ?1";
        self.lock().execute(sql, params![layer.to_string(), keep.to_string()]).map(drop)
    }

    /// Sets from which export a layer gets what it lacks. What it has stays, so nobody knows any more from whom that is.
    pub(crate) fn set_source(&self, layer: LayerId, source: &RemoteRow) -> Result<()> {
        let sql =
            "UPDATE remote_parents SET nbd_addr = ?2, export = ?3, refused = 0, one_source = 0
                   WHERE layer = ?1";
        let RemoteRow { nbd_addr, export, .. } = source;
        self.lock().execute(sql, params![layer.to_string(), nbd_addr, export]).map(drop)
    }

    pub(crate) fn copies_to_fill(&self) -> Result<Vec<LayerId>> {
        let sql = "SELECT layer FROM remote_parents WHERE keep = ?1 AND NOT refused ORDER BY layer";
        self.lock()
            .prepare_cached(sql)?
            .query_map([Keep::All.to_string()], |row| parsed(row, 0))?
            .collect()
    }

    /// Records that a copy is complete and durable. It is a sealed layer like any other from now on.
    pub(crate) fn complete_copy(&self, copy: Sealed) -> Result<()> {
        self.change(|tx| {
            let id = copy.layer.to_string();
            let sql = "UPDATE layers SET data_bytes = ?2 WHERE id = ?1";
            tx.execute(sql, params![id, signed(copy.data_bytes)?])?;
            tx.execute("DELETE FROM remote_parents WHERE layer = ?1", [id]).map(drop)
        })
    }

    /// Adds layers on which nothing stands yet, from the bottom up, either all of them or none.
    pub(crate) fn stage(&self, layers: &[LayerRow]) -> Result<()> {
        self.change(|tx| {
            layers.iter().try_for_each(|layer| {
                insert_layer(tx, layer)?;
                let sql = "INSERT INTO staged VALUES (?1)";
                tx.execute(sql, [layer.id.to_string()]).map(drop)
            })
        })
    }

    /// Removes all staged layers on which nothing stands, and forgets which ones were staged. Returns the removed
    /// ones.
    pub(crate) fn drop_all_staged(&self) -> Result<Vec<LayerId>> {
        self.change_on_full_disk(|tx| {
            let staged: Vec<LayerId> = tx
                .prepare("SELECT layer FROM staged")?
                .query_map([], |row| parsed(row, 0))?
                .collect::<Result<_>>()?;
            if staged.is_empty() {
                return Ok(staged);
            }
            let dropped = drop_unneeded(tx, &staged)?;
            tx.execute("DELETE FROM staged", [])?;
            Ok(dropped)
        })
    }

    /// Removes those of these staged layers on which nothing stands. Returns the removed ones.
    pub(crate) fn drop_staged(&self, staged: &[LayerId]) -> Result<Vec<LayerId>> {
        self.change_on_full_disk(|tx| drop_unneeded(tx, staged))
    }

    /// Records that a copy of own blocks has none of them any more, only their map.
    pub(crate) fn renew_copy(&self, layer: LayerId) -> Result<()> {
        let sql = "UPDATE layers SET poisoned = NULL WHERE id = ?1";
        self.lock().execute(sql, [layer.to_string()]).map(drop)
    }

    /// Records that a copy's files are gone and that all of it has to be fetched again.
    pub(crate) fn empty_copy(&self, layer: LayerId) -> Result<()> {
        self.change(|tx| {
            let id = layer.to_string();
            tx.execute("UPDATE layers SET poisoned = NULL WHERE id = ?1", [&id])?;
            tx.execute("INSERT INTO untouched VALUES (?1) ON CONFLICT DO NOTHING", [&id]).map(drop)
        })
    }
}

fn drop_unneeded(tx: &Transaction<'_>, layers: &[LayerId]) -> Result<Vec<LayerId>> {
    let mut dropped = Vec::new();
    for layer in layers {
        dropped.extend(delete_unneeded(tx, *layer)?);
    }
    Ok(dropped)
}
