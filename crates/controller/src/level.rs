//! The format level of a cluster ([`perigee_model::upgrade`]), as the store has it. A store in which no upgrade was ended has the first level.

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
