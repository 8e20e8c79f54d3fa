//! Opens sessions on other hosts' volumes before their client connects.
//!
//! A VM's QEMU opens its disks one after the other, and each takes some round trips to the volume's home. So an
//! agent that is about to start a QEMU sends the names of the exports that it will open, and their sessions are
//! opened at the same time while QEMU starts.
//!
//! A session is kept for the first client that opens its export. It always has the number that the first client
//! would have had. No session is opened ahead for an export that a client has open, so a client that connects
//! again gets its own number, and the home drains its old session.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use perigee_block::locking;
use perigee_model::{Problem, VolumeName};
use tokio::task::JoinHandle;

use crate::proxy::ProxySession;

/// The most sessions that are opened ahead at the same time. Beyond this, clients open their sessions
/// themselves.
pub const AHEAD_MAX: usize = 256;

/// How long a session waits for a client. Then it is closed.
const KEPT: Duration = Duration::from_secs(30);

struct Session {
    number: u64,
    volume: VolumeName,
    opening: JoinHandle<Result<Arc<ProxySession>, Problem>>,
}

#[derive(Default)]
struct Kept {
    last: u64,
    /// By the name of the export.
    sessions: HashMap<String, Session>,
}

/// Sessions that were opened before their client came.
#[derive(Default)]
pub struct Ahead {
    kept: Mutex<Kept>,
}

impl Ahead {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        locking::lock(&self.kept)
    }

    /// Starts to open a session and keeps it for a while. It does nothing if the export has a session, or
    /// beyond [`AHEAD_MAX`].
    pub fn open(
        ahead: &Arc<Self>,
        volume: &VolumeName,
        export: &str,
        opening: impl Future<Output = Result<Arc<ProxySession>, Problem>> + Send + 'static,
    ) {
        let mut kept = ahead.lock();
        if kept.sessions.len() >= AHEAD_MAX || kept.sessions.contains_key(export) {
            tracing::debug!(export, "no session is opened ahead");
            return;
        }
        kept.last += 1;
        let number = kept.last;
        let opening = tokio::spawn(opening);
        kept.sessions
            .insert(export.to_owned(), Session { number, volume: volume.clone(), opening });
        drop(kept);
        let (ahead, export) = (Arc::clone(ahead), export.to_owned());
        tokio::spawn(async move {
            tokio::time::sleep(KEPT).await;
            let mut kept = ahead.lock();
            if kept.sessions.get(&export).is_some_and(|session| session.number == number) {
                let unused = kept.sessions.remove(&export);
                drop(kept);
                unused.inspect(|session| session.opening.abort());
            }
        });
    }

    /// The session that was opened for this client, if it was opened successfully. Waits until this is known.
    pub async fn take(&self, export: &str) -> Option<Arc<ProxySession>> {
        let session = self.lock().sessions.remove(export)?;
        match session.opening.await {
            Ok(Ok(device)) => Some(device),
            Ok(Err(problem)) => {
                tracing::debug!(export, %problem, "a session that was opened ahead does not stand");
                None
            }
            Err(_) => None,
        }
    }

    /// Drops the sessions of a volume that is reached in another way from now on, or not any more.
    pub fn forget(&self, volume: &VolumeName) {
        self.lock().sessions.retain(|_, session| {
            if session.volume == *volume {
                session.opening.abort();
            }
            session.volume != *volume
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume() -> VolumeName {
        VolumeName::new("data").expect("a name")
    }

    async fn fails() -> Result<Arc<ProxySession>, Problem> {
        Err(Problem::unavailable("open", "the test wants it so"))
    }

    #[tokio::test]
    async fn a_session_that_does_not_stand_leaves_its_client_to_open_one() {
        let ahead = Arc::new(Ahead::default());
        Ahead::open(&ahead, &volume(), "data@1", fails());
        assert!(ahead.take("data@1").await.is_none());
        assert!(ahead.take("data@1").await.is_none(), "it is taken once");
    }

    #[tokio::test]
    async fn sessions_ahead_are_bounded_and_go_with_their_volume() {
        let ahead = Arc::new(Ahead::default());
        for number in 0..2 * AHEAD_MAX {
            Ahead::open(&ahead, &volume(), &format!("data@{number}"), fails());
        }
        assert_eq!(ahead.lock().sessions.len(), AHEAD_MAX);
        ahead.forget(&volume());
        assert_eq!(ahead.lock().sessions.len(), 0);
    }
}
