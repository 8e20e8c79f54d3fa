//! The writer epochs of a volume: the issued ones, and the one that may write.

use perigee_model::switchover::{EpochRefused, WriterEpochs};
use perigee_model::volume::EpochChange;
use perigee_model::{Epoch, VolumeName};
use rusqlite::{OptionalExtension, Transaction, params};

use crate::catalog::columns::{signed, unsigned};
use crate::catalog::{Catalog, Result};

pub(super) fn returned_max(tx: &Transaction<'_>, volume: &VolumeName) -> Result<Epoch> {
    let sql = "SELECT epoch_max FROM returned_epochs WHERE volume = ?1";
    let found = tx.query_row(sql, [volume.as_str()], |row| unsigned(row, 0)).optional()?;
    Ok(Epoch(found.unwrap_or(0)))
}

pub(super) fn set_returned_max(
    tx: &Transaction<'_>,
    volume: &VolumeName,
    epoch: Epoch,
) -> Result<()> {
    let sql = "INSERT INTO returned_epochs VALUES (?1, ?2)
               ON CONFLICT (volume) DO UPDATE SET epoch_max = excluded.epoch_max";
    tx.execute(sql, params![volume.as_str(), signed(epoch.0)?]).map(drop)
}

impl Catalog {
    /// Returns `None` if all epoch numbers of the volume were issued.
    pub(crate) fn issue_epoch(&self, volume: &VolumeName) -> Result<Option<Epoch>> {
        self.change(|tx| {
            let sql = "SELECT epoch_issued_max FROM volumes WHERE name = ?1";
            let last = tx.query_row(sql, [volume.as_str()], |row| unsigned(row, 0).map(Epoch))?;
            let Some(next) = last.next() else { return Ok(None) };
            let sql = "UPDATE volumes SET epoch_issued_max = ?2 WHERE name = ?1";
            tx.execute(sql, params![volume.as_str(), signed(next.0)?])?;
            Ok(Some(next))
        })
    }

    /// Changes the epoch by the rules of [`WriterEpochs::apply`]. A VM may be paused until this is done.
    pub(crate) fn change_epoch(
        &self,
        volume: &VolumeName,
        change: EpochChange,
    ) -> Result<std::result::Result<(), EpochRefused>> {
        self.change_on_full_disk(|tx| {
            let sql = "SELECT epoch, epoch_issued_max FROM volumes WHERE name = ?1";
            let (current, issued_max) = tx.query_row(sql, [volume.as_str()], |row| {
                Ok((Epoch(unsigned(row, 0)?), Epoch(unsigned(row, 1)?)))
            })?;
            let before =
                WriterEpochs { current, issued_max, returned_max: returned_max(tx, volume)? };
            let after = match before.apply(change) {
                Ok(after) => after,
                Err(refused) => return Ok(Err(refused)),
            };
            if after.returned_max != before.returned_max {
                set_returned_max(tx, volume, after.returned_max)?;
            }
            let sql = "UPDATE volumes SET epoch = ?2 WHERE name = ?1";
            tx.execute(sql, params![volume.as_str(), signed(after.current.0)?])?;
            Ok(Ok(()))
        })
    }
}
