//! Sessions on volumes of other hosts.
//!
//! The sessions of an export are numbered, and the number is a part of the session's key. A session that
//! comes back after a lost connection gets a number that is free again, and the volume's home first drains
//! the old session with this number. After a restart of this server the numbers belong to other clients.
//! So the key also has an id of the server's start, and the home drains all sessions of earlier starts on
//! the export.
//!
//! A client's session keeps its [`Switch`] as long as it is open. The device in it is a
//! [`ProxySession`](crate::proxy). It is replaced when the volume's home has another address (see
//! [`crate::repoint`]).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use perigee_block::locking;
use perigee_block::stats::StatsTable;
use perigee_block::switch::Switch;
use perigee_model::{Incarnation, VolumeName};

use crate::cache::ReadCache;
use crate::coherent::CachedVolume;
use crate::proxy::ProxySession;

/// Of more volumes than this, something is remembered only while they have sessions or are distrusted.
const CACHED_VOLUMES_MAX: usize = 1024;

/// The sessions on volumes of other hosts, and what is in memory of these volumes.
pub struct Proxies {
    stats: Arc<StatsTable>,
    open: Mutex<Open>,
    cache: Arc<ReadCache>,
    /// What this host has in memory of each volume, whether a session is open or not. See [`CACHED_VOLUMES_MAX`].
    cached: Mutex<HashMap<(VolumeName, Incarnation), Arc<CachedVolume>>>,
}

#[derive(Default)]
struct Open {
    /// The numbers in use, by volume and export.
    taken: HashMap<(VolumeName, String), BTreeSet<u64>>,
    /// Volumes that are no longer attached but still have open sessions.
    detached: HashSet<VolumeName>,
    sessions: HashMap<VolumeName, Vec<OpenSession>>,
    /// Volumes whose sessions are just getting another device.
    changing: HashSet<VolumeName>,
}

/// A client's session on an attached volume. It is open as long as both objects exist.
#[derive(Clone)]
struct OpenSession {
    switch: Weak<Switch>,
    device: Weak<ProxySession>,
}

impl OpenSession {
    fn get(&self) -> Option<(Arc<Switch>, Arc<ProxySession>)> {
        Some((self.switch.upgrade()?, self.device.upgrade()?))
    }
}

/// Held while the sessions of one volume get another device.
pub struct Changing {
    proxies: Arc<Proxies>,
    volume: VolumeName,
}

impl Drop for Changing {
    fn drop(&mut self) {
        self.proxies.lock().changing.remove(&self.volume);
    }
}

impl Open {
    fn count(&self, volume: &VolumeName) -> u64 {
        let of_volume = self.taken.iter().filter(|((v, _), _)| v == volume);
        of_volume.map(|(_, numbers)| numbers.len() as u64).sum()
    }
}

impl Proxies {
    /// No session is open. The memory for blocks has at most so many bytes.
    pub fn new(stats: Arc<StatsTable>, cache_bytes: u64) -> Self {
        let cache = Arc::new(ReadCache::new(cache_bytes));
        let (open, cached) = Default::default();
        Self { stats, open, cache, cached }
    }

    /// The object that all sessions on a volume share. Each session has it: the home does not recall blocks that
    /// this host writes, so a session without it would leave old blocks in the memory of the others.
    pub fn cached(&self, volume: &VolumeName, which: Incarnation) -> Arc<CachedVolume> {
        let mut cached = locking::lock(&self.cached);
        let key = (volume.clone(), which);
        if !cached.contains_key(&key) && cached.len() >= CACHED_VOLUMES_MAX {
            cached.retain(|_, one| is_needed(one));
        }
        let new = || Arc::new(CachedVolume::new(Arc::clone(&self.cache)));
        Arc::clone(cached.entry(key).or_insert_with(new))
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        locking::lock(&self.open)
    }

    /// `None` while somebody else changes them.
    pub fn change(proxies: &Arc<Self>, volume: &VolumeName) -> Option<Changing> {
        let first = proxies.lock().changing.insert(volume.clone());
        // Dropping it ends the turn, so it is made only for the caller that has the turn.
        first.then(|| Changing { proxies: Arc::clone(proxies), volume: volume.clone() })
    }

    /// Records a session that was opened, or that has another device from now on.
    pub fn enter(&self, volume: &VolumeName, switch: &Arc<Switch>, device: &Arc<ProxySession>) {
        let mut open = self.lock();
        let sessions = open.sessions.entry(volume.clone()).or_default();
        sessions.retain(|session| {
            session.switch.strong_count() > 0 && !session.switch.ptr_eq(&Arc::downgrade(switch))
        });
        let (switch, device) = (Arc::downgrade(switch), Arc::downgrade(device));
        sessions.push(OpenSession { switch, device });
    }

    /// Removes a session that has no proxy any more.
    pub fn leave(&self, volume: &VolumeName, switch: &Arc<Switch>) {
        if let Some(sessions) = self.lock().sessions.get_mut(volume) {
            sessions.retain(|session| !session.switch.ptr_eq(&Arc::downgrade(switch)));
        }
    }

    /// The open sessions on an attached volume.
    pub fn sessions(&self, volume: &VolumeName) -> Vec<(Arc<Switch>, Arc<ProxySession>)> {
        // No home has this address.
        self.elsewhere(volume, "")
    }

    /// To be called when the volume has come to this server. Blocks that were kept of it are not read any more.
    pub fn moved_here(&self, volume: &VolumeName) {
        let cached = locking::lock(&self.cached);
        for (_, kept) in cached.iter().filter(|((of, _), _)| of == volume) {
            kept.ended(true);
        }
    }

    /// The open sessions whose device uses another address, or has to be opened again.
    pub fn elsewhere(
        &self,
        volume: &VolumeName,
        nbd_addr: &str,
    ) -> Vec<(Arc<Switch>, Arc<ProxySession>)> {
        let sessions = self.lock().sessions.get(volume).cloned().unwrap_or_default();
        // A session that ends at this moment is dropped here, because its drop takes the lock.
        let open = sessions.iter().filter_map(OpenSession::get);
        let is_old =
            |device: &ProxySession| device.nbd_addr != nbd_addr || device.is_to_be_opened_again();
        open.filter(|(_, device)| is_old(device)).collect()
    }

    /// A number for a new session, which no other session with this export has.
    pub fn take(proxies: &Arc<Self>, volume: &VolumeName, export: &str) -> ProxySlot {
        let key = (volume.clone(), export.to_owned());
        let mut open = proxies.lock();
        let numbers = open.taken.entry(key.clone()).or_default();
        let number = (0..=u64::MAX).find(|n| !numbers.contains(n)).unwrap_or(u64::MAX);
        numbers.insert(number);
        ProxySlot { proxies: Arc::clone(proxies), key, number }
    }

    /// How many sessions on the volume are open.
    pub fn count(&self, volume: &VolumeName) -> u64 {
        self.lock().count(volume)
    }

    /// The volume's figures stay when its last session ends.
    pub fn attached(&self, volume: &VolumeName) {
        self.lock().detached.remove(volume);
    }

    /// Removes the volume's figures, at once or when its last open session ends. Its blocks stay in memory: the
    /// next job here that reads the volume may read them if the home says that they are still right.
    pub fn detached(&self, volume: &VolumeName) {
        let mut open = self.lock();
        if open.count(volume) > 0 {
            open.detached.insert(volume.clone());
        } else {
            drop(open);
            self.stats.forget(volume);
        }
    }
}

/// There is only one object for each volume, and it is kept as long as it is distrusted.
fn is_needed(cached: &Arc<CachedVolume>) -> bool {
    Arc::strong_count(cached) > 1 || cached.is_distrusted()
}

/// The number of a session. It is free again when this is dropped.
pub struct ProxySlot {
    proxies: Arc<Proxies>,
    key: (VolumeName, String),
    number: u64,
}

impl ProxySlot {
    /// The number, from 0 on.
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for ProxySlot {
    fn drop(&mut self) {
        let mut open = self.proxies.lock();
        if let Some(numbers) = open.taken.get_mut(&self.key) {
            numbers.remove(&self.number);
            if numbers.is_empty() {
                open.taken.remove(&self.key);
            }
        }
        let volume = &self.key.0;
        if open.count(volume) > 0 {
            return;
        }
        open.sessions.remove(volume);
        if open.detached.remove(volume) {
            drop(open);
            self.proxies.stats.forget(volume);
        }
    }
}

#[cfg(test)]
mod tests {
    use perigee_model::Epoch;
    use tokio::time::Instant;

    use super::*;
    use crate::coherent::DISTRUST;

    fn volume(name: &str) -> VolumeName {
        VolumeName::new(name).expect("a name")
    }

    fn proxies() -> Arc<Proxies> {
        Arc::new(Proxies::new(Arc::default(), 0))
    }

    #[test]
    fn a_freed_session_number_is_taken_again() {
        let slots = proxies();
        let first = Proxies::take(&slots, &volume("data"), "data@1");
        let second = Proxies::take(&slots, &volume("data"), "data@1");
        let other = Proxies::take(&slots, &volume("data"), "data@2");
        assert_eq!((first.number, second.number, other.number), (0, 1, 0));
        assert_eq!(slots.count(&volume("data")), 3);
        drop(first);
        assert_eq!(Proxies::take(&slots, &volume("data"), "data@1").number, 0);
        drop((second, other));
        assert_eq!(slots.count(&volume("data")), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_detached_volume_is_still_distrusted_when_it_is_attached_again() {
        let (proxies, which) = (Proxies::new(Arc::default(), 1 << 20), Epoch(1).incarnation());
        let cached = || proxies.cached(&volume("data"), which);
        let keeps = || {
            let cached = cached();
            cached.granted(Instant::now(), false);
            cached.write(0, 4096).done(0, &[1; 4096]);
            cached.read(0, &mut [0; 4096])
        };
        assert!(keeps());
        drop(cached().write(0, 4096));
        proxies.detached(&volume("data"));
        assert!(!keeps(), "a write of unknown fate may still come");
        tokio::time::sleep(DISTRUST).await;
        assert!(keeps());
    }

    #[tokio::test]
    async fn a_volume_that_is_attached_again_is_read_from_memory_if_nobody_wrote_it() {
        let (proxies, which) = (Proxies::new(Arc::default(), 1 << 20), Epoch(1).incarnation());
        let cached = || proxies.cached(&volume("data"), which);
        let reads = || cached().read(0, &mut [0; 4096]);
        cached().enter();
        cached().granted(Instant::now(), false);
        cached().write(0, 4096).done(0, &[1; 4096]);
        assert!(reads());
        cached().leave();
        proxies.detached(&volume("data"));
        proxies.attached(&volume("data"));
        assert!(!reads(), "the home was not asked yet");
        cached().granted(Instant::now(), true);
        assert!(reads());
        cached().granted(Instant::now(), false);
        assert!(!reads(), "somebody may have written");
    }

    #[test]
    fn volumes_that_nobody_uses_any_more_are_forgotten_when_there_are_too_many() {
        let (proxies, which) = (proxies(), Epoch(1).incarnation());
        let used = proxies.cached(&volume("used"), which);
        for number in 0..3 * CACHED_VOLUMES_MAX {
            drop(proxies.cached(&volume(&format!("data-{number}")), which));
        }
        assert!(proxies.cached.lock().expect("no holder panics").len() <= CACHED_VOLUMES_MAX);
        let again = proxies.cached(&volume("used"), which);
        assert!(Arc::ptr_eq(&used, &again));
    }

    #[test]
    fn sessions_on_a_volume_share_one_object_however_many_volumes_are_in_use() {
        let (proxies, which) = (proxies(), Epoch(1).incarnation());
        let of = |number| proxies.cached(&volume(&format!("data-{number}")), which);
        let used: Vec<_> = (0..=CACHED_VOLUMES_MAX).map(of).collect();
        let last = used.last().expect("many");
        assert!(Arc::ptr_eq(last, &of(CACHED_VOLUMES_MAX)));
        assert!(Arc::ptr_eq(&used[0], &of(0)), "what is in use is kept");
    }

    #[test]
    fn figures_of_a_detached_volume_go_with_its_last_session() {
        let proxies = proxies();
        let listed = || proxies.stats.list().len();
        drop(proxies.stats.of(&volume("idle")));
        proxies.detached(&volume("idle"));
        assert_eq!(listed(), 0, "nobody has it open");
        drop(proxies.stats.of(&volume("data")));
        let slots = [(); 2].map(|()| Proxies::take(&proxies, &volume("data"), "data@1"));
        proxies.detached(&volume("data"));
        let [first, second] = slots;
        drop(first);
        assert_eq!(listed(), 1, "one session still counts");
        drop(second);
        assert_eq!(listed(), 0);
        let again = Proxies::take(&proxies, &volume("data"), "data@1");
        drop(proxies.stats.of(&volume("data")));
        proxies.detached(&volume("data"));
        proxies.attached(&volume("data"));
        drop(again);
        assert_eq!(listed(), 1, "it is attached again");
    }
}
