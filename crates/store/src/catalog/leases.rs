//! Which host keeps blocks of a volume in memory, or has since nobody else has written.

use perigee_block::lease::HostTag;
use perigee_model::VolumeName;
use rusqlite::{OptionalExtension, Transaction, params};

use crate::catalog::{Catalog, Result};

impl Catalog {
    pub(crate) fn lease(&self, volume: &VolumeName) -> Result<Option<HostTag>> {
        let sql = "SELECT host FROM leases WHERE volume = ?1";
        let host: Option<i64> =
            self.lock().query_row(sql, [volume.as_str()], |row| row.get(0)).optional()?;
        Ok(host.map(i64::cast_unsigned))
    }

    /// `None`: it is forgotten.
    /// Records who holds it, with a new holder.
    pub(crate) fn remember_lease(&self, volume: &VolumeName, host: HostTag) -> Result<()> {
        self.change(|tx| set_lease(tx, volume, Some(host)))
    }

    /// Records who still holds it. `None`: nobody. A write waits for this.
    pub(crate) fn forget_lease(&self, volume: &VolumeName, left: Option<HostTag>) -> Result<()> {
        self.change_on_full_disk(|tx| set_lease(tx, volume, left))
    }
}

fn set_lease(tx: &Transaction<'_>, volume: &VolumeName, host: Option<HostTag>) -> Result<()> {
    let done = match host {
        Some(host) => {
            let sql = "INSERT INTO leases VALUES (?1, ?2)
                       ON CONFLICT (volume) DO UPDATE SET host = excluded.host";
            tx.execute(sql, params![volume.as_str(), host.cast_signed()])
        }
        None => tx.execute("DELETE FROM leases WHERE volume = ?1", [volume.as_str()]),
    };
    done.map(drop)
}
