//! The format level of a cluster ([`perigee_model::upgrade`]), as the store has it. A new store has the level of the version that makes the store. One
//! that says nothing is older than levels, and has the first one.

use std::path::Path;

use perigee_model::Problem;
use perigee_model::units::format_time;
use perigee_model::upgrade::{DaemonVersion, FORMAT_LEVEL};
use serde::{Deserialize, Serialize};

use crate::clock::now_ms;
use crate::records::Records;

const KEY: &str = "format";

/// Of a store that says nothing else.
const FIRST: u32 = 1;

/// From this level on the logs and samples of jobs are in files ([`crate::job_files`]).
pub const JOB_FILES: u32 = 2;

/// From this level on a volume may be in some VMs of a gang only, and gangs use data that may not leave its site. The version before would give all
/// VMs a volume that one of them writes.
pub const DATA_OF_GANGS: u32 = 2;

/// From this level on VMs of a gang may be at other sites than confined data that they use. The version before would not go on with such a gang.
pub const RANKS_ELSEWHERE: u32 = 3;

/// From this level on users of tenants have backups made. A volume server of the version before counts no bytes for the quota.
pub const BACKUPS_OF_TENANTS: u32 = 2;

/// From this level on images are backed up. The version before has no records of such backups, and its volume servers ship no image.
pub const BACKUPS_OF_IMAGES: u32 = 2;

#[derive(Debug, Clone, Serialize, Deserialize)]
struct FormatRecord {
    level: u32,
    /// When the upgrade was ended; Unix time.
    since_ms: u64,
}

/// The format level in force.
///
/// # Errors
/// If the store can't be read.
pub async fn in_force(records: &Records) -> Result<u32, Problem> {
    let record: Option<FormatRecord> = records.read(KEY).await?;
    Ok(record.map_or(FIRST, |record| record.level))
}

/// Gives a store without any record the level of this version: no version of before has anything to read there.
///
/// # Errors
/// If the store fails.
pub async fn begin(records: &Records) -> Result<(), Problem> {
    let any = records.list_after::<serde_json::Value>("", "", 1).await?;
    if any.is_empty() {
        raise(records, FORMAT_LEVEL).await?;
    }
    Ok(())
}

/// Refuses a store that this version can't read. This is asked before anything is written.
///
/// # Errors
/// `Unsupported` if the level in force is above that of this version.
pub async fn check(records: &Records, state_dir: &Path) -> Result<(), Problem> {
    let record: Option<FormatRecord> = records.read(KEY).await?;
    let Some(FormatRecord { level, since_ms }) = record.filter(|known| known.level > FORMAT_LEVEL)
    else {
        return Ok(());
    };
    let own = DaemonVersion::own();
    let why = format!(
        "`perigee upgrade finish` has raised its format level to {level} at {}, and version {own} knows levels up to {FORMAT_LEVEL}",
        format_time(since_ms)
    );
    let what = format!("can't start the controller with the state in {}", state_dir.display());
    Err(Problem::unsupported(what, why).next(
        "install the version again with which the upgrade was ended, or a newer one; to go back for good, restore a backup of the controller that is older",
    ))
}

/// From now on this is the level in force.
///
/// # Errors
/// If the store fails.
pub async fn raise(records: &Records, level: u32) -> Result<(), Problem> {
    records.put(KEY, &FormatRecord { level, since_ms: now_ms() }).await
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::store::SqliteStore;

    #[tokio::test]
    async fn a_new_store_has_the_level_of_its_version_and_an_older_one_the_first() {
        let dir = tempfile::tempdir().expect("a directory");
        let open = |name: &str| {
            let store = SqliteStore::open(&dir.path().join(name)).expect("a store");
            Records::new(Arc::new(store))
        };
        let (new, older) = (open("new.db"), open("older.db"));
        older.put("counters/q", &1).await.expect("a record");
        for records in [&new, &older] {
            begin(records).await.expect("begun");
        }
        let levels =
            [in_force(&new).await, in_force(&older).await].map(|level| level.expect("a level"));
        assert_eq!(levels, [FORMAT_LEVEL, FIRST]);
    }
}
