//! Persistent reservations of volumes. They survive a restart of the server, and are deleted with their
//! volume. And what iSCSI initiators have seen, which outlives the volume: a session that goes on when another volume has its name must not write into that.

use perigee_model::VolumeName;
use rusqlite::{OptionalExtension, params};

use crate::catalog::{Catalog, Result};

/// The most ports whose last unit is known. Beyond it, what was recorded first is forgotten.
const SEEN_MAX: i64 = 1 << 16;

impl Catalog {
    pub(crate) fn seen_by_initiator(&self, export: &str, port: &str) -> Result<Option<String>> {
        let sql = "SELECT serial FROM seen_units WHERE export = ?1 AND port = ?2";
        self.lock().query_row(sql, [export, port], |row| row.get(0)).optional()
    }

    pub(crate) fn keep_seen_by_initiator(
        &self,
        export: &str,
        port: &str,
        serial: &str,
    ) -> Result<()> {
        let connection = self.lock();
        let sql = "INSERT OR REPLACE INTO seen_units VALUES (?1, ?2, ?3)";
        connection.execute(sql, [export, port, serial])?;
        let last = connection.last_insert_rowid();
        connection.execute("DELETE FROM seen_units WHERE rowid <= ?1", [last - SEEN_MAX]).map(drop)
    }

    pub(crate) fn reservations(&self, volume: &VolumeName) -> Result<Option<String>> {
        let sql = "SELECT state FROM reservations WHERE volume = ?1";
        self.lock().query_row(sql, [volume.as_str()], |row| row.get(0)).optional()
    }

    /// Stores a volume's reservations; `None` deletes them.
    pub(crate) fn keep_reservations(&self, volume: &VolumeName, state: Option<&str>) -> Result<()> {
        let connection = self.lock();
        let kept = match state {
            Some(state) => {
                let sql = "INSERT INTO reservations VALUES (?1, ?2)
                           ON CONFLICT (volume) DO UPDATE SET state = excluded.state";
                connection.execute(sql, params![volume.as_str(), state])
            }
            None => {
                let sql = "DELETE FROM reservations WHERE volume = ?1";
                connection.execute(sql, [volume.as_str()])
            }
        };
        kept.map(drop)
    }
}
