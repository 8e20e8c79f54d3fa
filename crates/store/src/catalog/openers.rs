//! Which other hosts may open a volume here.

use std::collections::BTreeMap;

use perigee_model::limits::OPENERS;
use perigee_model::{HostId, VolumeName};
use rusqlite::{Transaction, params};

use super::columns::parsed;
use super::{Catalog, Result};

/// More rows than a volume may have were asked for. Nothing was changed.
#[derive(Debug)]
pub(crate) struct TooMany(pub(crate) usize);

impl Catalog {
    pub(crate) fn openers(&self, volume: &VolumeName) -> Result<Vec<HostId>> {
        self.lock()
            .prepare_cached("SELECT host FROM openers WHERE volume = ?1 ORDER BY host")?
            .query_map([volume.as_str()], |row| parsed(row, 0))?
            .collect()
    }

    pub(crate) fn all_openers(&self) -> Result<BTreeMap<VolumeName, Vec<HostId>>> {
        let mut all = BTreeMap::<VolumeName, Vec<HostId>>::new();
        let connection = self.lock();
        let mut rows =
            connection.prepare_cached("SELECT volume, host FROM openers ORDER BY volume, host")?;
        for row in rows.query_map([], |row| Ok((parsed(row, 0)?, parsed(row, 1)?)))? {
            let (volume, host) = row?;
            all.entry(volume).or_default().push(host);
        }
        Ok(all)
    }

    /// Until the controller has told the pool for the first time.
    pub(crate) fn admits_all(&self) -> Result<bool> {
        let sql = "SELECT EXISTS (SELECT 1 FROM pool WHERE NOT openers_told)";
        self.lock().prepare_cached(sql)?.query_row([], |row| row.get(0))
    }

    /// Every host may until the controller has told the pool for the first time.
    pub(crate) fn may_open(&self, volume: &VolumeName, host: &HostId) -> Result<bool> {
        let sql = "SELECT EXISTS (SELECT 1 FROM openers WHERE volume = ?1 AND host = ?2)
                       OR EXISTS (SELECT 1 FROM pool WHERE NOT openers_told)";
        let row = params![volume.as_str(), host.as_str()];
        self.lock().prepare_cached(sql)?.query_row(row, |row| row.get(0))
    }

    /// Lets these hosts in too. `told`: these are all that need it, of all volumes.
    pub(crate) fn add_openers(
        &self,
        added: &BTreeMap<VolumeName, Vec<HostId>>,
        told: bool,
    ) -> Result<std::result::Result<(), TooMany>> {
        self.change(|tx| {
            for (volume, hosts) in added {
                let count = count_with(tx, volume, hosts)?;
                if OPENERS.check(count).is_err() {
                    return Ok(Err(TooMany(count)));
                }
            }
            let mut add =
                tx.prepare("INSERT INTO openers VALUES (?1, ?2) ON CONFLICT DO NOTHING")?;
            for (volume, hosts) in added {
                for host in hosts {
                    add.execute(params![volume.as_str(), host.as_str()])?;
                }
            }
            if told {
                tx.execute("UPDATE pool SET openers_told = 1 WHERE NOT openers_told", [])?;
            }
            Ok(Ok(()))
        })
    }

    pub(crate) fn remove_opener(&self, volume: &VolumeName, host: &HostId) -> Result<()> {
        let sql = "DELETE FROM openers WHERE volume = ?1 AND host = ?2";
        self.lock().execute(sql, params![volume.as_str(), host.as_str()]).map(drop)
    }
}

/// The volume of this name is another one, or never came.
pub(super) fn forget(tx: &Transaction<'_>, volume: &VolumeName) -> Result<()> {
    tx.execute("DELETE FROM openers WHERE volume = ?1", [volume.as_str()]).map(drop)
}

/// How many hosts may open the volume when these may too.
fn count_with(tx: &Transaction<'_>, volume: &VolumeName, hosts: &[HostId]) -> Result<usize> {
    let mut here = tx.prepare_cached("SELECT host FROM openers WHERE volume = ?1")?;
    let here: std::collections::BTreeSet<HostId> =
        here.query_map([volume.as_str()], |row| parsed(row, 0))?.collect::<Result<_>>()?;
    let new: std::collections::BTreeSet<&HostId> =
        hosts.iter().filter(|host| !here.contains(host)).collect();
    // Who is in already is not counted against a limit that was lower once.
    Ok(if new.is_empty() { 0 } else { here.len() + new.len() })
}
