//! Persistent reservations of volumes. They survive a restart of the server, and are deleted with their
//! volume.

use perigee_model::VolumeName;
use rusqlite::{OptionalExtension, params};

use super::{Catalog, Result};

impl Catalog {
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
