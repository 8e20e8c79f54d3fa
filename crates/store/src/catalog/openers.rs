//! Which other hosts may open a volume here.

use perigee_model::{HostId, VolumeName};
use rusqlite::params;

use super::columns::parsed;
use super::{Catalog, Result};

const ADD: &str = "INSERT INTO openers VALUES (?1, ?2) ON CONFLICT DO NOTHING";

impl Catalog {
    pub(crate) fn openers(&self, volume: &VolumeName) -> Result<Vec<HostId>> {
        self.lock()
            .prepare_cached("SELECT host FROM openers WHERE volume = ?1 ORDER BY host")?
            .query_map([volume.as_str()], |row| parsed(row, 0))?
            .collect()
    }

    pub(crate) fn may_open(&self, volume: &VolumeName, host: &HostId) -> Result<bool> {
        self.lock()
            .prepare_cached("SELECT 1 FROM openers WHERE volume = ?1 AND host = ?2")?
            .exists(params![volume.as_str(), host.as_str()])
    }

    pub(crate) fn set_openers(&self, volume: &VolumeName, hosts: &[HostId]) -> Result<()> {
        self.change(|tx| {
            tx.execute("DELETE FROM openers WHERE volume = ?1", [volume.as_str()])?;
            let mut add = tx.prepare(ADD)?;
            hosts
                .iter()
                .try_for_each(|host| add.execute(params![volume.as_str(), host.as_str()]).map(drop))
        })
    }

    pub(crate) fn set_opener(&self, volume: &VolumeName, host: &HostId, may: bool) -> Result<()> {
        let sql = match may {
            true => ADD,
            false => "DELETE FROM openers WHERE volume = ?1 AND host = ?2",
        };
        self.lock().execute(sql, params![volume.as_str(), host.as_str()]).map(drop)
    }
}
