//! Opening a volume and moving it take turns. A session is opened before a step of a move or after it, and never
//! during one.
//!
//! Turns are fair: a step of a move that waits delays all openings after it. So during a turn nothing waits for
//! another host, or for this host over the network. A turn waits only for this host's disk and for requests in flight,
//! up to a deadline. Nobody who waits for a turn holds one of the locks that are taken during a turn (the pool's
//! `changes`, a volume's gate).

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use perigee_block::locking;
use perigee_model::{Problem, VolumeName};
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

/// A step of a move takes less than this, because it waits for no other host.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// Who may change where a volume is, one after the other.
#[derive(Default)]
pub struct Turns(Mutex<HashMap<VolumeName, Arc<RwLock<()>>>>);

impl Turns {
    fn of(&self, volume: &VolumeName) -> Arc<RwLock<()>> {
        let mut turns = locking::lock(&self.0);
        turns.retain(|of, turn| of == volume || Arc::strong_count(turn) > 1);
        Arc::clone(turns.entry(volume.clone()).or_default())
    }

    /// Takes a turn to open a session. Several openings may have a turn at the same time.
    ///
    /// # Errors
    /// If a move of the volume takes too long.
    pub async fn opening(&self, volume: &VolumeName) -> Result<OwnedRwLockReadGuard<()>, Problem> {
        let turn = tokio::time::timeout(WAIT_MAX, self.of(volume).read_owned()).await;
        turn.map_err(|_| too_long(format!("can't open volume {volume}")))
    }

    /// Takes a turn for a step of a move.
    ///
    /// # Errors
    /// If another step of a move of the volume takes too long.
    pub async fn moving(&self, volume: &VolumeName) -> Result<OwnedRwLockWriteGuard<()>, Problem> {
        let turn = tokio::time::timeout(WAIT_MAX, self.of(volume).write_owned()).await;
        turn.map_err(|_| too_long(format!("can't move volume {volume}")))
    }
}

fn too_long(what: String) -> Problem {
    let why = format!("a move of it has been under way for more than {} s", WAIT_MAX.as_secs());
    Problem::unavailable(what, why).next("try again in a moment")
}
