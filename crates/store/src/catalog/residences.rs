//! The catalog's part in a volume's moves: tenures, volumes that departed, and tenures that are over.
//! What is decided, [`Residence`] decides, inside the transaction that stores it.

use std::collections::HashSet;

use perigee_model::home::{
    Departed, HomeRefused, HomeState, Place, Residence, ServerAddresses, Tenure,
};
use perigee_model::switchover::WriterEpochs;
use perigee_model::volume::CachePolicy;
use perigee_model::{Epoch, LayerId, OwnerName, TenantName, VolumeName};
use rusqlite::{OptionalExtension, Row, Transaction, params};

use crate::catalog::columns::{layer_bytes, optional_parsed, parsed, signed, unsigned};
use crate::catalog::epochs::{returned_max, set_returned_max};
use crate::catalog::replicas::complete_chain;
use crate::catalog::{
    Catalog, LayerRow, NewVolume, Result, Sealed, above, admissions, chain, confined,
    delete_unneeded, insert_layer, insert_volume,
};

/// As many tenures that are over are remembered; then the oldest are forgotten. They matter only against
/// messages that come late: as long as a move is not wholly ended.
const SPENT_MAX: i64 = 10_000;

/// A volume that departed. Its layers are kept for its new home.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DepartedRow {
    /// At the new home.
    pub(crate) tenure: Tenure,
    /// `None` if it had no bytes but zeros.
    pub(crate) top: Option<LayerId>,
    pub(crate) to: ServerAddresses,
    pub(crate) size_bytes: u64,
    pub(crate) epochs: WriterEpochs,
    pub(crate) tenant: TenantName,
    pub(crate) cache: CachePolicy,
    pub(crate) owner: Option<OwnerName>,
    /// The volume's head was confined itself, and not only layers below it.
    pub(crate) confined: bool,
}

const DEPARTED_ROWS: &str = "
    SELECT tenure, top, nbd_addr, control_url, size_bytes, epoch, epoch_issued_max,
           epoch_returned_max, tenant, cache, owner, held
    FROM departed";

/// What a request came to: the layers that nothing needs any more, or why nothing was changed.
type Decided<T> = Result<std::result::Result<T, HomeRefused>>;

/// Returns from the enclosing transaction with a refusal.
macro_rules! decided {
    ($decision:expr) => {
        match $decision {
            Ok(decided) => decided,
            Err(refused) => return Ok(Err(refused)),
        }
    };
}
pub(super) use decided;

impl Catalog {
    /// The tenure of a volume that is here.
    pub(crate) fn tenure(&self, volume: &VolumeName) -> Result<Option<Tenure>> {
        tenure_here(&self.lock(), volume)
    }

    /// What is known of a volume of this name. Of several that had the name, it is the latest.
    pub(crate) fn home_state(&self, volume: &VolumeName) -> Result<HomeState> {
        let connection = self.lock();
        if let Some(tenure) = tenure_here(&connection, volume)? {
            return Ok(HomeState::Here { tenure, missing_bytes: 0 });
        }
        let sql = format!("{DEPARTED_ROWS} WHERE volume = ?1 ORDER BY rowid DESC LIMIT 1");
        let row = connection.query_row(&sql, [volume.as_str()], departed_row).optional()?;
        if let Some(DepartedRow { tenure, to, .. }) = row {
            return Ok(HomeState::Departed { tenure, to });
        }
        let sql =
            "SELECT tenure, had FROM spent_tenures WHERE volume = ?1 ORDER BY rowid DESC LIMIT 1";
        let spent = connection.query_row(sql, [volume.as_str()], spent_row).optional()?;
        let (refused, had) = spent.unwrap_or_default();
        Ok(HomeState::NotHere { refused, had })
    }

    /// What this server has of the volume that a tenure is about.
    pub(crate) fn residence(&self, volume: &VolumeName, of: Tenure) -> Result<Residence> {
        self.change(|tx| residence(tx, volume, of))
    }

    pub(crate) fn departed(
        &self,
        volume: &VolumeName,
        tenure: Tenure,
    ) -> Result<Option<DepartedRow>> {
        departed(&self.lock(), volume, tenure)
    }

    pub(crate) fn departed_count(&self) -> Result<u64> {
        self.lock().query_row("SELECT count(*) FROM departed", [], |row| unsigned(row, 0))
    }

    /// The layers that stay as they are for other hosts: those of volumes that departed, those that replicas are
    /// copying, and the newest one that each replica has.
    pub(crate) fn layers_kept_for_others(&self) -> Result<HashSet<LayerId>> {
        let chain = chain(
            "SELECT top FROM departed WHERE top IS NOT NULL
             UNION SELECT layer FROM replica_pins WHERE filling",
        );
        let sql = format!("{chain} SELECT id FROM chain UNION SELECT layer FROM replica_pins");
        self.lock().prepare_cached(&sql)?.query_map([], |row| parsed(row, 0))?.collect()
    }

    /// Whether a machine boots from the volume or may do so.
    pub(crate) fn is_of_client(&self, volume: &VolumeName) -> Result<bool> {
        let sql = "SELECT EXISTS (SELECT 1 FROM client_clones WHERE volume = ?1)
                       OR EXISTS (SELECT 1 FROM clients WHERE volume = ?1 OR bound_volume = ?1)";
        self.lock().query_row(sql, [volume.as_str()], |row| row.get(0))
    }

    /// The volume goes to another server: `top` and the layers below it stay. Its head becomes one of them
    /// if it was `sealed`. Returns the layers that are not needed any more.
    pub(crate) fn depart(
        &self,
        volume: &VolumeName,
        tenure: Tenure,
        to: &ServerAddresses,
        top: Option<LayerId>,
        sealed: Option<Sealed>,
    ) -> Decided<Vec<LayerId>> {
        self.change(|tx| {
            let before = residence(tx, volume, tenure)?;
            let Some(after) = decided!(before.depart(tenure, to)) else {
                return Ok(Ok(Vec::new()));
            };
            let Place::Departed { tenure: next, .. } = after.place else {
                unreachable!("who departs is not here")
            };
            if let Some(sealed) = sealed {
                let sql = "UPDATE layers SET data_bytes = ?2 WHERE id = ?1";
                tx.execute(sql, params![sealed.layer.to_string(), signed(sealed.data_bytes)?])?;
            }
            let name = volume.as_str();
            let sql =
                "INSERT INTO departed (volume, tenure, top, nbd_addr, control_url, size_bytes,
                           epoch, epoch_issued_max, epoch_returned_max, tenant, cache, owner, held)
                       SELECT name, ?2, ?3, ?4, ?5, size_bytes, epoch, epoch_issued_max, ?6, tenant,
                              cache, owner,
                              EXISTS (SELECT 1 FROM held WHERE layer = head)
                       FROM volumes WHERE name = ?1";
            let top = top.map(|top| top.to_string());
            let returned = signed(returned_max(tx, volume)?.0)?;
            let row = params![name, signed(next.0)?, top, to.nbd_addr, to.control_url, returned];
            tx.execute(sql, row)?;
            let sql = "INSERT INTO attachments VALUES (?1, ?2)
                       ON CONFLICT (volume) DO UPDATE SET nbd_addr = excluded.nbd_addr";
            tx.execute(sql, params![name, to.nbd_addr])?;
            let sql = "DELETE FROM volumes WHERE name = ?1 RETURNING head";
            let head = tx.query_row(sql, [name], |row| parsed(row, 0))?;
            Ok(Ok(delete_unneeded(tx, head)?))
        })
    }

    /// The volume is here from now on, over these layers. `completed` are layers that were here already, as
    /// copies that may lack blocks: they get all of them.
    pub(crate) fn arrive(
        &self,
        volume: &VolumeName,
        tenure: Tenure,
        from: &Departed,
        rows: &[LayerRow],
        parent: Option<LayerId>,
    ) -> Decided<()> {
        self.change(|tx| {
            let before = residence(tx, volume, tenure)?;
            let Some(after) = decided!(before.take(tenure)) else { return Ok(Ok(())) };
            rows.iter().try_for_each(|row| insert_layer(tx, row))?;
            if let Some(parent) = parent {
                complete_chain(tx, parent)?;
            }
            for layer in from.chain.iter().filter(|layer| layer.leave_site.is_never()) {
                confined::mark_present(tx, layer.layer)?;
            }
            let head = LayerRow::new_head(from.size_bytes, parent);
            let new = NewVolume {
                name: volume.clone(),
                head: LayerRow { confined: from.leave_site.is_never(), ..head },
                epoch: from.epochs.current,
                tenant: from.tenant.clone(),
                cache: from.cache,
                owner: from.owner.clone(),
            };
            put_here(tx, &new, &after, from.epochs)?;
            Ok(Ok(()))
        })
    }

    /// See [`Residence::refuse`]. Returns what holds from now on. The volume's clients may be waiting for this.
    pub(crate) fn refuse_home(&self, volume: &VolumeName, tenure: Tenure) -> Result<Residence> {
        self.change_on_full_disk(|tx| {
            let before = residence(tx, volume, tenure)?;
            let Some(after) = before.refuse(tenure) else { return Ok(before) };
            // Who was let in before it came.
            if after.place == Place::NotHere && tenure_here(tx, volume)?.is_none() {
                admissions::forget(tx, volume)?;
            }
            set_spent(tx, volume, &after)?;
            Ok(after)
        })
    }

    /// The volume is here again, with an empty head on what departed. Until then it is nowhere.
    pub(crate) fn take_back(&self, volume: &VolumeName, tenure: Tenure) -> Decided<()> {
        self.change_on_full_disk(|tx| {
            let before = residence(tx, volume, tenure)?;
            let Some(after) = decided!(before.take_back(tenure)) else { return Ok(Ok(())) };
            if let Place::Departed { tenure: gone, .. } = before.place {
                let row = departed(tx, volume, gone)?.expect("the residence was made of it");
                let new = NewVolume {
                    name: volume.clone(),
                    head: LayerRow {
                        confined: row.confined,
                        ..LayerRow::new_head(row.size_bytes, row.top)
                    },
                    epoch: row.epochs.current,
                    tenant: row.tenant,
                    cache: row.cache,
                    owner: row.owner,
                };
                put_here(tx, &new, &after, row.epochs)?;
                let sql = "DELETE FROM departed WHERE volume = ?1 AND tenure = ?2";
                tx.execute(sql, params![volume.as_str(), signed(gone.0)?])?;
            } else {
                set_tenure(tx, volume, &after)?;
            }
            Ok(Ok(()))
        })
    }

    /// What departed in this tenure is kept no longer. Returns the layers that are not needed any more.
    pub(crate) fn forget_departed(
        &self,
        volume: &VolumeName,
        tenure: Tenure,
    ) -> Result<Vec<LayerId>> {
        self.change_on_full_disk(|tx| {
            if let Some(after) = residence(tx, volume, tenure)?.forget(tenure) {
                set_spent(tx, volume, &after)?;
            }
            let sql = "DELETE FROM departed WHERE volume = ?1 AND tenure = ?2 RETURNING top";
            let row = params![volume.as_str(), signed(tenure.0)?];
            let top = tx.query_row(sql, row, |row| optional_parsed(row, 0)).optional()?;
            top.flatten().map_or(Ok(Vec::new()), |top| delete_unneeded(tx, top))
        })
    }
}

/// Whether another host may be reading the layer: a volume that departed stands on it, or what a replica is copying.
pub(super) fn is_read_elsewhere(tx: &Transaction<'_>, layer: Option<LayerId>) -> Result<bool> {
    let above = above("SELECT ?1");
    let sql = format!(
        "{above} SELECT EXISTS (SELECT 1 FROM departed WHERE top IN above)
                     OR EXISTS (SELECT 1 FROM replica_pins WHERE filling AND layer IN above)"
    );
    tx.query_row(&sql, [layer.map(|layer| layer.to_string())], |row| row.get(0))
}

pub(super) fn tenure_here(
    tx: &rusqlite::Connection,
    volume: &VolumeName,
) -> Result<Option<Tenure>> {
    let sql = "SELECT tenure FROM volumes WHERE name = ?1";
    tx.query_row(sql, [volume.as_str()], |row| unsigned(row, 0).map(Tenure)).optional()
}

fn departed(
    tx: &rusqlite::Connection,
    volume: &VolumeName,
    tenure: Tenure,
) -> Result<Option<DepartedRow>> {
    let sql = format!("{DEPARTED_ROWS} WHERE volume = ?1 AND tenure = ?2");
    tx.query_row(&sql, params![volume.as_str(), signed(tenure.0)?], departed_row).optional()
}

pub(super) fn residence(
    tx: &Transaction<'_>,
    volume: &VolumeName,
    of: Tenure,
) -> Result<Residence> {
    let which = of.incarnation();
    if let Some(here) = tenure_here(tx, volume)?
        && here.incarnation() == which
    {
        return Ok(Residence::here(here));
    }
    let sql = "SELECT tenure, had FROM spent_tenures WHERE volume = ?1 AND incarnation = ?2";
    let row = params![volume.as_str(), which.0];
    let (spent, had) = tx.query_row(sql, row, spent_row).optional()?.unwrap_or_default();
    let mut found = Residence { place: Place::NotHere, spent, had };
    let sql = format!("{DEPARTED_ROWS} WHERE volume = ?1 ORDER BY tenure DESC");
    let mut statement = tx.prepare_cached(&sql)?;
    for row in statement.query_map([volume.as_str()], departed_row)? {
        let row = row?;
        if row.tenure.incarnation() == which {
            found.spent = found.spent.max(row.tenure);
            found.had = found.had.max(row.tenure.before());
            found.place = Place::Departed { tenure: row.tenure, to: row.to };
            break;
        }
    }
    Ok(found)
}

/// Adds a volume that comes from another home or comes back. It is not attached any more.
pub(super) fn put_here(
    tx: &Transaction<'_>,
    new: &NewVolume,
    after: &Residence,
    epochs: WriterEpochs,
) -> Result<()> {
    insert_volume(tx, new)?;
    let name = new.name.as_str();
    let sql = "UPDATE volumes SET epoch_issued_max = ?2 WHERE name = ?1";
    tx.execute(sql, params![name, signed(epochs.issued_max.0)?])?;
    if epochs.returned_max > Epoch(0) {
        set_returned_max(tx, &new.name, epochs.returned_max)?;
    }
    tx.execute("DELETE FROM attachments WHERE volume = ?1", [name])?;
    set_tenure(tx, &new.name, after)
}

fn set_tenure(tx: &Transaction<'_>, volume: &VolumeName, after: &Residence) -> Result<()> {
    let sql = "UPDATE volumes SET tenure = ?2 WHERE name = ?1";
    tx.execute(sql, params![volume.as_str(), signed(after.spent.0)?]).map(drop)
}

/// Records the tenures that are over here: none up to `spent` begins any more, and `had` is the last one that
/// began. Only the latest rows are kept.
pub(super) fn set_spent(tx: &Transaction<'_>, volume: &VolumeName, of: &Residence) -> Result<()> {
    let Residence { spent, had, .. } = of;
    let sql = "INSERT OR REPLACE INTO spent_tenures VALUES (?1, ?2, ?3, ?4)";
    let which = spent.incarnation().0;
    tx.execute(sql, params![volume.as_str(), which, signed(spent.0)?, signed(had.0)?])?;
    let sql = "DELETE FROM spent_tenures
               WHERE rowid <= (SELECT max(rowid) FROM spent_tenures) - ?1";
    tx.execute(sql, [SPENT_MAX]).map(drop)
}

fn spent_row(row: &Row<'_>) -> Result<(Tenure, Tenure)> {
    Ok((Tenure(unsigned(row, 0)?), Tenure(unsigned(row, 1)?)))
}

fn departed_row(row: &Row<'_>) -> Result<DepartedRow> {
    let [current, issued_max, returned_max] = [5, 6, 7].map(|column| unsigned(row, column));
    Ok(DepartedRow {
        tenure: Tenure(unsigned(row, 0)?),
        top: optional_parsed(row, 1)?,
        to: ServerAddresses { nbd_addr: row.get(2)?, control_url: row.get(3)? },
        size_bytes: layer_bytes(row, 4)?,
        epochs: WriterEpochs {
            current: Epoch(current?),
            issued_max: Epoch(issued_max?),
            returned_max: Epoch(returned_max?),
        },
        tenant: parsed(row, 8)?,
        cache: parsed(row, 9)?,
        owner: optional_parsed(row, 10)?,
        confined: row.get(11)?,
    })
}
