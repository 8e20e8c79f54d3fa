//! What makes the switch of a volume's home short for the sessions that wait for it.
//!
//! The old home makes its connections to the new one before it holds its sessions ([`Preconnected`]). Then it takes one round
//! trip until they are open there. The new home has not stored the volume yet when they come, so they wait there
//! ([`Arriving`]) and need not ask again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use perigee_block::locking::lock;
use perigee_model::VolumeName;
use perigee_nbd::{NbdDevice, Prepared};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::remotes::Remotes;

/// The new home closes a connection that opens nothing after a while.
const KEPT: Duration = Duration::from_secs(5);
/// The most connections that are kept at the same time.
const PRECONNECTED_MAX: usize = 64;
/// How long a departure waits for them. Its sessions go on meanwhile.
const PREPARE_MAX: Duration = Duration::from_secs(1);

/// How long a session waits for a volume that is about to come here. It is shorter than its client waits.
const ARRIVAL_MAX: Duration = Duration::from_secs(4);

/// Connections to other hosts that were made ahead.
#[derive(Default)]
pub(crate) struct Preconnected(Mutex<Vec<Connection>>);

struct Connection {
    nbd_addr: String,
    until: Instant,
    connection: Prepared,
}

impl Preconnected {
    /// Makes so many connections to a server.
    pub async fn make(self: &Arc<Self>, nbd_addr: &str, number: usize, remotes: &Remotes) {
        let remote = || remotes.export(nbd_addr.to_owned(), "");
        let made =
            join_all((0..number.min(PRECONNECTED_MAX)).map(|_| NbdDevice::prepare(remote())));
        let Ok(made) = tokio::time::timeout(PREPARE_MAX, made).await else { return };
        let until = Instant::now() + KEPT;
        let mut kept = lock(&self.0);
        kept.retain(|ready| ready.until > Instant::now());
        for connection in made.into_iter().filter_map(Result::ok) {
            if kept.len() < PRECONNECTED_MAX {
                kept.push(Connection { nbd_addr: nbd_addr.to_owned(), until, connection });
            }
        }
        drop(kept);
        let preconnected = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep_until(until).await;
            lock(&preconnected.0).retain(|ready| ready.until > Instant::now());
        });
    }

    /// A connection to this server that was made ahead, if there is one.
    pub fn take(&self, nbd_addr: &str) -> Option<Prepared> {
        let mut kept = lock(&self.0);
        kept.retain(|ready| ready.until > Instant::now());
        let at = kept.iter().position(|ready| ready.nbd_addr == nbd_addr)?;
        Some(kept.swap_remove(at).connection)
    }
}

/// The volumes that are about to come here.
#[derive(Default)]
pub(crate) struct Arriving(Mutex<HashMap<VolumeName, watch::Sender<u32>>>);

/// A volume is about to come here, until this is dropped.
pub(crate) struct Arrival {
    arriving: Arc<Arriving>,
    volume: VolumeName,
}

impl Arriving {
    /// The volume is about to come here. Sessions wait for it until what this returns is dropped.
    pub fn begin(arriving: &Arc<Self>, volume: &VolumeName) -> Arrival {
        let mut all = lock(&arriving.0);
        all.entry(volume.clone()).or_default().send_modify(|steps| *steps += 1);
        Arrival { arriving: Arc::clone(arriving), volume: volume.clone() }
    }

    /// Waits while the volume is about to come.
    pub async fn wait(&self, volume: &VolumeName) {
        let Some(mut steps) = lock(&self.0).get(volume).map(watch::Sender::subscribe) else {
            return;
        };
        // When its sender is dropped, it is over too.
        let _over = tokio::time::timeout(ARRIVAL_MAX, steps.wait_for(|steps| *steps == 0)).await;
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        let mut all = lock(&self.arriving.0);
        let Some(steps) = all.get(&self.volume) else { return };
        steps.send_modify(|steps| *steps -= 1);
        if *steps.borrow() == 0 {
            all.remove(&self.volume);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_comes_before_the_volume_waits_until_it_is_here() {
        let (arriving, volume) = (Arc::<Arriving>::default(), VolumeName::new("data").unwrap());
        arriving.wait(&volume).await;
        let steps = [(); 2].map(|()| Arriving::begin(&arriving, &volume));
        let waits = {
            let (arriving, volume) = (Arc::clone(&arriving), volume.clone());
            tokio::spawn(async move { arriving.wait(&volume).await })
        };
        let [first, second] = steps;
        drop(first);
        tokio::time::sleep(ARRIVAL_MAX / 2).await;
        assert!(!waits.is_finished(), "the other step goes on");
        drop(second);
        waits.await.unwrap();
        let began = Instant::now();
        let _hangs = Arriving::begin(&arriving, &volume);
        arriving.wait(&volume).await;
        assert_eq!(began.elapsed(), ARRIVAL_MAX, "not for ever");
    }
}
