//! Opening a volume and moving it take turns: whoever opens a session finds the volume before a move or
//! after it, and never within.
//!
//! Turns are fair: a step of a move that waits holds up who opens after it. So within a turn nobody waits for
//! another host, or for this one over the network, and a turn waits only for this host's disk and for requests in
//! flight, up to a deadline. The locks that are taken within a turn (the pool's `changes`, a volume's gate) are
//! never held by who waits for a turn.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use perigee_model::{Problem, VolumeName};
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

/// A step of a move takes less, where no other host is slow.
const WAIT_MAX: Duration = Duration::from_secs(30);

#[derive(Default)]
pub struct Turns(Mutex<HashMap<VolumeName, Arc<RwLock<()>>>>);

impl Turns {
    fn of(&self, volume: &VolumeName) -> Arc<RwLock<()>> {
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|of, turn| of == volume || Arc::strong_count(turn) > 1);
        Arc::clone(turns.entry(volume.clone()).or_default())
    }

    /// Sessions are opened; many may be at the same time.
    ///
    /// # Errors
    /// When a move of the volume takes too long.
    pub async fn opening(&self, volume: &VolumeName) -> Result<OwnedRwLockReadGuard<()>, Problem> {
        let turn = tokio::time::timeout(WAIT_MAX, self.of(volume).read_owned()).await;
        turn.map_err(|_| too_long(format!("can't open volume {volume}")))
    }

    /// A step of a move.
    ///
    /// # Errors
    /// When another step of a move of the volume takes too long.
    pub async fn moving(&self, volume: &VolumeName) -> Result<OwnedRwLockWriteGuard<()>, Problem> {
        let turn = tokio::time::timeout(WAIT_MAX, self.of(volume).write_owned()).await;
        turn.map_err(|_| too_long(format!("can't move volume {volume}")))
    }
}

fn too_long(what: String) -> Problem {
    let why = format!("a move of it has been under way for more than {} s", WAIT_MAX.as_secs());
    Problem::unavailable(what, why).next("try again in a moment")
}
