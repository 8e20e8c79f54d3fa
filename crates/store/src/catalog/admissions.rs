//! Which other hosts may open a volume here.

use std::collections::BTreeMap;

use perigee_model::limits::ADMITTED_HOSTS;
use perigee_model::{HostId, ImageName, LayerId, VolumeName};
use rusqlite::{Transaction, params};

use crate::catalog::columns::parsed;
use crate::catalog::{Catalog, Result};

/// More rows than a volume may have were asked for. Nothing was changed.
#[derive(Debug)]
pub(crate) struct TooMany(pub(crate) usize);

impl Catalog {
    pub(crate) fn admitted_hosts(&self, volume: &VolumeName) -> Result<Vec<HostId>> {
        self.lock()
            .prepare_cached("SELECT host FROM admissions WHERE volume = ?1 ORDER BY host")?
            .query_map([volume.as_str()], |row| parsed(row, 0))?
            .collect()
    }

    pub(crate) fn all_admitted_hosts(&self) -> Result<BTreeMap<VolumeName, Vec<HostId>>> {
        let mut all = BTreeMap::<VolumeName, Vec<HostId>>::new();
        let connection = self.lock();
        let mut rows = connection
            .prepare_cached("SELECT volume, host FROM admissions ORDER BY volume, host")?;
        for row in rows.query_map([], |row| Ok((parsed(row, 0)?, parsed(row, 1)?)))? {
            let (volume, host) = row?;
            all.entry(volume).or_default().push(host);
        }
        Ok(all)
    }

    pub(crate) fn images_of(&self, layer: LayerId) -> Result<Vec<ImageName>> {
        self.lock()
            .prepare_cached("SELECT name FROM images WHERE layer = ?1 ORDER BY name")?
            .query_map([layer.to_string()], |row| parsed(row, 0))?
            .collect()
    }

    pub(crate) fn may_open(&self, volume: &VolumeName, host: &HostId) -> Result<bool> {
        let sql = "SELECT EXISTS (SELECT 1 FROM admissions WHERE volume = ?1 AND host = ?2)";
        let row = params![volume.as_str(), host.as_str()];
        self.lock().prepare_cached(sql)?.query_row(row, |row| row.get(0))
    }

    /// Lets these hosts open the volume too.
    pub(crate) fn admit(
        &self,
        volume: &VolumeName,
        hosts: &[HostId],
    ) -> Result<std::result::Result<(), TooMany>> {
        self.change(|tx| {
            let count = count_with(tx, volume, hosts)?;
            if ADMITTED_HOSTS.check(count).is_err() {
                return Ok(Err(TooMany(count)));
            }
            insert(tx, volume, hosts).map(Ok)
        })
    }

    /// The same for all volumes at once. Returns the volumes that would have too many, which stay as they are.
    pub(crate) fn admit_all(
        &self,
        added: &BTreeMap<VolumeName, Vec<HostId>>,
    ) -> Result<Vec<(VolumeName, TooMany)>> {
        self.change(|tx| {
            let mut refused = Vec::new();
            for (volume, hosts) in added {
                let count = count_with(tx, volume, hosts)?;
                match ADMITTED_HOSTS.check(count) {
                    Ok(_) => insert(tx, volume, hosts)?,
                    Err(_) => refused.push((volume.clone(), TooMany(count))),
                }
            }
            Ok(refused)
        })
    }

    pub(crate) fn end_admission(&self, volume: &VolumeName, host: &HostId) -> Result<()> {
        let sql = "DELETE FROM admissions WHERE volume = ?1 AND host = ?2";
        self.lock().execute(sql, params![volume.as_str(), host.as_str()]).map(drop)
    }
}

fn insert(tx: &Transaction<'_>, volume: &VolumeName, hosts: &[HostId]) -> Result<()> {
    let sql = "INSERT INTO admissions VALUES (?1, ?2) ON CONFLICT DO NOTHING";
    let mut add = tx.prepare_cached(sql)?;
    for host in hosts {
        add.execute(params![volume.as_str(), host.as_str()])?;
    }
    Ok(())
}

/// The volume of this name is another one, or never came.
pub(super) fn forget(tx: &Transaction<'_>, volume: &VolumeName) -> Result<()> {
    tx.execute("DELETE FROM admissions WHERE volume = ?1", [volume.as_str()]).map(drop)
}

/// How many hosts may open the volume when these may too.
fn count_with(tx: &Transaction<'_>, volume: &VolumeName, hosts: &[HostId]) -> Result<usize> {
    let mut here = tx.prepare_cached("SELECT host FROM admissions WHERE volume = ?1")?;
    let here: std::collections::BTreeSet<HostId> =
        here.query_map([volume.as_str()], |row| parsed(row, 0))?.collect::<Result<_>>()?;
    let new: std::collections::BTreeSet<&HostId> =
        hosts.iter().filter(|host| !here.contains(host)).collect();
    // Who is in already is not counted against a limit that was lower once.
    Ok(if new.is_empty() { 0 } else { here.len() + new.len() })
}
