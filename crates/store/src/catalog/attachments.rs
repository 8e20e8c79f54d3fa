//! The catalog's attachments: volumes of other hosts that clients can reach through this host.

use perigee_model::VolumeName;
use rusqlite::params;

use crate::catalog::columns::parsed;
use crate::catalog::{Catalog, Result};

impl Catalog {
    pub(crate) fn attachments(&self) -> Result<Vec<(VolumeName, String)>> {
        self.lock()
            .prepare("SELECT volume, nbd_addr FROM attachments ORDER BY volume")?
            .query_map([], |row| Ok((parsed(row, 0)?, row.get(1)?)))?
            .collect()
    }

    pub(crate) fn attach(&self, volume: &VolumeName, nbd_addr: &str) -> Result<()> {
        let sql = "INSERT INTO attachments VALUES (?1, ?2)
                   ON CONFLICT (volume) DO UPDATE SET nbd_addr = excluded.nbd_addr";
        self.lock().execute(sql, params![volume.as_str(), nbd_addr]).map(drop)
    }

    pub(crate) fn attach_where_found(
        &self,
        volume: &VolumeName,
        known: &str,
        found: &str,
    ) -> Result<()> {
        let sql = "UPDATE attachments SET nbd_addr = ?3 WHERE volume = ?1 AND nbd_addr = ?2";
        self.lock().execute(sql, params![volume.as_str(), known, found]).map(drop)
    }

    /// Returns whether the volume was attached.
    pub(crate) fn detach(&self, volume: &VolumeName) -> Result<bool> {
        let sql = "DELETE FROM attachments WHERE volume = ?1";
        self.lock().execute(sql, [volume.as_str()]).map(|rows| rows > 0)
    }
}
