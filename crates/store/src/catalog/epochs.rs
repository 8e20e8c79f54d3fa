//! Which writer epochs of a volume were issued, and which one may write.

use perigee_model::volume::EpochChange;
use perigee_model::{Epoch, VolumeName};
use rusqlite::{OptionalExtension, Transaction, params};

use super::columns::{signed, unsigned};
use super::{Catalog, Result};

/// Why an epoch stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EpochRefused {
    NotIssued {
        issued_max: Epoch,
    },
    NotFrom {
        epoch: Epoch,
    },
    /// A migration gave it up: this is its raise, which comes late.
    Returned,
}

fn returned_max(tx: &Transaction<'_>, volume: &VolumeName) -> Result<Epoch> {
    let sql = "SELECT epoch_max FROM returned_epochs WHERE volume = ?1";
    let found = tx.query_row(sql, [volume.as_str()], |row| unsigned(row, 0)).optional()?;
    Ok(Epoch(found.unwrap_or(0)))
}

fn return_epoch(tx: &Transaction<'_>, volume: &VolumeName, epoch: Epoch) -> Result<()> {
    let sql = "INSERT INTO returned_epochs VALUES (?1, ?2)
               ON CONFLICT (volume) DO UPDATE SET epoch_max = max(epoch_max, excluded.epoch_max)";
    tx.execute(sql, params![volume.as_str(), signed(epoch.0)?]).map(drop)
}

impl Catalog {
    pub(crate) fn issue_epoch(&self, volume: &VolumeName) -> Result<Epoch> {
        let sql = "UPDATE volumes SET epoch_issued_max = epoch_issued_max + 1 WHERE name = ?1
                   RETURNING epoch_issued_max";
        self.change(|tx| tx.query_row(sql, [volume.as_str()], |row| unsigned(row, 0).map(Epoch)))
    }

    /// Compare-and-swap; a repeated one succeeds.
    pub(crate) fn change_epoch(
        &self,
        volume: &VolumeName,
        change: EpochChange,
    ) -> Result<std::result::Result<(), EpochRefused>> {
        self.change(|tx| {
            let sql = "SELECT epoch, epoch_issued_max FROM volumes WHERE name = ?1";
            let (epoch, issued_max) = tx.query_row(sql, [volume.as_str()], |row| {
                Ok((Epoch(unsigned(row, 0)?), Epoch(unsigned(row, 1)?)))
            })?;
            if change.to.0 == 0 || change.to > issued_max {
                return Ok(Err(EpochRefused::NotIssued { issued_max }));
            }
            if epoch != change.from && epoch != change.to {
                return Ok(Err(EpochRefused::NotFrom { epoch }));
            }
            if change.to < change.from {
                return_epoch(tx, volume, change.from.min(issued_max))?;
            } else if epoch != change.to && change.to <= returned_max(tx, volume)? {
                return Ok(Err(EpochRefused::Returned));
            }
            let sql = "UPDATE volumes SET epoch = ?2 WHERE name = ?1";
            tx.execute(sql, params![volume.as_str(), signed(change.to.0)?])?;
            Ok(Ok(()))
        })
    }
}
