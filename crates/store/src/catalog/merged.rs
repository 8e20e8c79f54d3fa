//! The catalog's part in merging: layers whose names were deleted, and layers that something takes the place of.

use perigee_model::{ImageName, LayerId, VolumeName};
use rusqlite::{OptionalExtension, Transaction, params};

use crate::catalog::columns::{optional_parsed, parsed, unsigned};
use crate::catalog::{
    Catalog, LayerRow, Result, above, confined, delete_unneeded, insert_layer, residences,
};

/// How much may stand on the topmost layer of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Above {
    One,
    Some,
}

impl Catalog {
    /// Removes the name. Returns the layers that are no longer needed. If something stands on the layer, it is
    /// released: it is to be merged into that.
    pub(crate) fn delete_image(&self, name: &ImageName) -> Result<Vec<LayerId>> {
        self.change_on_full_disk(|tx| {
            let sql = "DELETE FROM images WHERE name = ?1 RETURNING layer";
            let layer = tx.query_row(sql, [name.as_str()], |row| parsed(row, 0)).optional()?;
            let Some(layer) = layer else { return Ok(Vec::new()) };
            let unneeded = delete_unneeded(tx, layer)?;
            if unneeded.is_empty() {
                let sql = "INSERT INTO released VALUES (?1) ON CONFLICT DO NOTHING";
                tx.execute(sql, [layer.to_string()])?;
            }
            Ok(unneeded)
        })
    }

    /// The layers whose names were deleted while something stood on them, and which are still there.
    pub(crate) fn released(&self) -> Result<Vec<LayerId>> {
        self.lock()
            .prepare_cached("SELECT layer FROM released ORDER BY layer")?
            .query_map([], |row| parsed(row, 0))?
            .collect()
    }

    /// The topmost layer of a chain with this layer: a volume's head, or else an image.
    pub(crate) fn top_above(
        &self,
        layer: LayerId,
    ) -> Result<Option<(LayerId, Option<VolumeName>)>> {
        let sql = format!(
            "{} SELECT layer, CASE what WHEN 'volume' THEN name END FROM keepers
                WHERE layer IN above ORDER BY what <> 'volume', name LIMIT 1",
            above("SELECT ?1")
        );
        self.lock()
            .prepare_cached(&sql)?
            .query_row([layer.to_string()], |row| Ok((parsed(row, 0)?, optional_parsed(row, 1)?)))
            .optional()
    }

    /// Replaces a run of layers, given from the top down, by one layer. Returns `false` and changes nothing
    /// unless the run is still in the catalog, no other host may be reading a layer of it, and each of its layers
    /// has no name, no volume for which it is the head, and, below the topmost one, exactly one layer above it.
    pub(crate) fn replace_layers(&self, run: &[LayerId], by: &LayerRow) -> Result<bool> {
        self.change(|tx| {
            if below(tx, run, Above::Some)? != Some(by.parent) {
                return Ok(false);
            }
            insert_layer(tx, by)?;
            tx.execute(
                "UPDATE layers SET parent = ?2 WHERE parent = ?1",
                params![run[0].to_string(), by.id.to_string()],
            )?;
            forget(tx, run, by.id)?;
            Ok(true)
        })
    }

    /// Puts a volume's head, which has all that the run shows, on what is below the run. Returns `false` and changes
    /// nothing as [`Self::replace_layers`], and unless the head alone stands on the run.
    pub(crate) fn absorb_layers(&self, run: &[LayerId], head: LayerId) -> Result<bool> {
        self.change_on_full_disk(|tx| {
            let sql = "SELECT EXISTS (SELECT 1 FROM layers l JOIN volumes v ON v.head = l.id
                                      WHERE l.id = ?1 AND l.parent = ?2)";
            let row = params![head.to_string(), run[0].to_string()];
            let stands_on_it: bool = tx.query_row(sql, row, |row| row.get(0))?;
            let Some(parent) = below(tx, run, Above::One)?.filter(|_| stands_on_it) else {
                return Ok(false);
            };
            let parent = parent.map(|parent| parent.to_string());
            let sql = "UPDATE layers SET parent = ?2 WHERE id = ?1";
            tx.execute(sql, params![head.to_string(), parent])?;
            // The export below the run is below the head now.
            let bottom = run.last().map(LayerId::to_string);
            let sql = "UPDATE remote_parents SET layer = ?2 WHERE layer = ?1";
            tx.execute(sql, params![bottom, head.to_string()])?;
            forget(tx, run, head)?;
            Ok(true)
        })
    }
}

/// The parent of a run's lowest layer. `None` if the run may not be merged.
fn below(tx: &Transaction<'_>, run: &[LayerId], on_top: Above) -> Result<Option<Option<LayerId>>> {
    if residences::is_read_elsewhere(tx, run.last().copied())? {
        return Ok(None);
    }
    let sql = "SELECT parent, (SELECT count(*) FROM layers c WHERE c.parent = l.id),
                      EXISTS (SELECT 1 FROM keepers k WHERE k.layer = l.id)
                          OR EXISTS (SELECT 1 FROM replica_pins p WHERE p.layer = l.id)
               FROM layers l WHERE id = ?1";
    let mut statement = tx.prepare_cached(sql)?;
    let mut last = None;
    for (at, id) in run.iter().enumerate() {
        let found = statement.query_row([id.to_string()], |row| {
            let (children, kept) = (unsigned(row, 1)?, row.get::<_, bool>(2)?);
            let is_free = children == 1 || (at == 0 && on_top == Above::Some);
            Ok((optional_parsed::<LayerId>(row, 0)?, is_free && !kept))
        });
        let Some((parent, true)) = found.optional()? else { return Ok(None) };
        if run.get(at + 1).is_some_and(|next| parent != Some(*next)) {
            return Ok(None);
        }
        last = Some(parent);
    }
    Ok(last)
}

/// Deletes the layers of a run, whose place another one has taken.
fn forget(tx: &Transaction<'_>, run: &[LayerId], by: LayerId) -> Result<()> {
    confined::take_over(tx, run, by)?;
    for id in run {
        tx.execute("DELETE FROM layers WHERE id = ?1", [id.to_string()])?;
    }
    Ok(())
}
