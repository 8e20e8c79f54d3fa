//! A unit: the state that all sessions of one volume share. It has the reservations, the settings, and the
//! lock for commands that must not be interleaved with writes.
//!
//! A unit exists while a session of its volume is open, or while the volume is reserved. Reservations that
//! must survive the server are stored through [`Keep`] before the command is answered.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::future::BoxFuture;
use perigee_model::Problem;
use tokio::sync::{RwLock, mpsc, oneshot};

use super::scsi::Outcome;
use super::scsi::command::Command;
use super::scsi::inquiry::Identity;
use super::scsi::mode::Settings;
use super::scsi::reservations::{Effects, Out, Port, Reservations};
use super::scsi::sense::Sense;
use super::tasks::MANAGEMENT_MAX;

/// The unit attentions that tell a session of the actions of others.
pub mod attention {
    /// Power on, or a reset: what every new session hears first.
    pub const POWER_ON: u16 = 0x2900;
    /// Somebody has reset the unit.
    pub const UNIT_RESET: u16 = 0x2903;
    /// Somebody has changed the settings with MODE SELECT.
    pub const MODE_CHANGED: u16 = 0x2a01;
    /// The volume's size has changed.
    pub const CAPACITY_CHANGED: u16 = 0x2a09;
    /// Another initiator has aborted this one's commands.
    pub const COMMANDS_CLEARED: u16 = 0x2f00;
}

/// The storage of persistent reservations, and of what initiators have seen.
pub trait Keep: Send + Sync + 'static {
    /// The stored reservations of a volume.
    ///
    /// # Errors
    /// When it can't be read.
    fn load<'a>(&'a self, volume: &'a str) -> BoxFuture<'a, Result<Option<String>, Problem>>;

    /// Stores reservations durably; `None` deletes them.
    ///
    /// # Errors
    /// When it can't be written.
    fn save<'a>(
        &'a self,
        volume: &'a str,
        state: Option<String>,
    ) -> BoxFuture<'a, Result<(), Problem>>;

    /// The serial number that this port of an initiator has last found under an export's name.
    ///
    /// # Errors
    /// When it can't be read.
    fn seen<'a>(
        &'a self,
        export: &'a str,
        port: &'a str,
    ) -> BoxFuture<'a, Result<Option<String>, Problem>>;

    /// Stores it durably.
    ///
    /// # Errors
    /// When it can't be written.
    fn see<'a>(
        &'a self,
        export: &'a str,
        port: &'a str,
        serial: String,
    ) -> BoxFuture<'a, Result<(), Problem>>;
}

/// Asks a session to end its tasks. The session drops the sender when none of them runs any more.
pub type Abort = oneshot::Sender<()>;

/// One session at a unit.
pub struct Nexus {
    pub port: Port,
    attentions: Mutex<Vec<u16>>,
    has_attention: AtomicBool,
    aborts: mpsc::UnboundedSender<Abort>,
    size_bytes: AtomicU64,
    /// One of the numbers in [`knows`].
    knows: AtomicU8,
}

/// Which unit of its export's name an initiator knows.
mod knows {
    /// This one.
    pub const THIS: u8 = 0;
    /// Another one. It has not asked in this session what this one is.
    pub const ANOTHER: u8 = 1;
    /// Another one, and it has read or written before it asked: a session of the other unit goes on. If it asks later, somebody
    /// else does (udev, after an error), and what it still has to write is the other unit's.
    pub const ANOTHER_TO_THE_END: u8 = 2;
}

impl Nexus {
    /// Whether what it writes may be meant for the unit of this name that it knew before.
    pub fn knows_another(&self) -> bool {
        self.knows.load(Ordering::Acquire) != knows::THIS
    }

    /// It has read or written before it asked. Returns whether that is new.
    pub fn goes_on_with_another(&self) -> bool {
        let (from, to) = (knows::ANOTHER, knows::ANOTHER_TO_THE_END);
        self.knows.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Adds a unit attention, which the session's next command reports.
    fn attend(&self, code: u16) {
        let mut attentions = lock(&self.attentions);
        if code == attention::POWER_ON || code == attention::UNIT_RESET {
            attentions.clear();
        }
        if !attentions.contains(&code) {
            attentions.push(code);
        }
        self.has_attention.store(true, Ordering::Release);
    }

    /// The oldest of what the session has to be told, once. The command that meets it is not carried out.
    pub fn take_attention(&self) -> Option<Sense> {
        if !self.has_attention.load(Ordering::Acquire) {
            return None;
        }
        let mut attentions = lock(&self.attentions);
        let first = (!attentions.is_empty()).then(|| attentions.remove(0));
        self.has_attention.store(!attentions.is_empty(), Ordering::Release);
        first.map(Sense::attention)
    }

    /// Checks whether the volume's size has changed since the last command.
    pub fn note_size(&self, size_bytes: u64) {
        if self.size_bytes.load(Ordering::Relaxed) != size_bytes {
            self.size_bytes.store(size_bytes, Ordering::Relaxed);
            self.attend(attention::CAPACITY_CHANGED);
        }
    }
}

/// What all sessions of a volume share.
pub struct Unit {
    volume: String,
    pub identity: Identity,
    settings: Mutex<Settings>,
    pub write_protected: AtomicBool,
    reservations: Mutex<Reservations>,
    /// Whether there are reservations, so that each command has to be checked.
    restricted: AtomicBool,
    /// Serializes changes of reservations. Each one is stored before the next one.
    changing: tokio::sync::Mutex<()>,
    nexuses: Mutex<Vec<Arc<Nexus>>>,
    /// Commands that read and then write hold the write side; writes hold the read side.
    pub order: RwLock<()>,
    keep: Arc<dyn Keep>,
}

impl Unit {
    /// As MODE SELECT of any session has left them.
    pub fn settings(&self) -> Settings {
        *lock(&self.settings)
    }

    /// MODE SELECT of one session.
    pub fn set(&self, by: &Nexus, settings: Settings) {
        let mut present = lock(&self.settings);
        if *present == settings {
            return;
        }
        *present = settings;
        self.write_protected.store(settings.write_protected, Ordering::Release);
        drop(present);
        for nexus in self.others(by) {
            nexus.attend(attention::MODE_CHANGED);
        }
    }

    fn others(&self, by: &Nexus) -> Vec<Arc<Nexus>> {
        let nexuses = lock(&self.nexuses);
        nexuses.iter().filter(|nexus| nexus.port != by.port).cloned().collect()
    }

    /// The initiator has asked what this unit is. When it returns, that is stored. If it can't be, the initiator has to ask again
    /// in its next session.
    pub async fn get_known(&self, nexus: &Nexus) {
        let (from, to) = (knows::ANOTHER, knows::THIS);
        if nexus.knows.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return;
        }
        let stored = self.keep.see(&self.volume, &nexus.port.0, self.identity.serial()).await;
        if let Err(problem) = stored {
            tracing::warn!(volume = %self.volume, initiator = %nexus.port.0, %problem, "can't store what an initiator has seen");
        }
    }

    /// The volume's name, which is also the last part of the target's.
    pub fn volume(&self) -> &str {
        &self.volume
    }

    /// Whether no reservation of another port forbids the command.
    pub fn allows(&self, nexus: &Nexus, command: &Command) -> bool {
        !self.restricted.load(Ordering::Acquire)
            || lock(&self.reservations).allows(&nexus.port, command)
    }

    /// Takes the unit for this session, as RESERVE (6) asks for it.
    pub fn reserve(&self, nexus: &Nexus) -> Outcome {
        self.with_reservations(|reservations| reservations.reserve(&nexus.port))
    }

    /// Gives up what [`Unit::reserve`] has taken. Without a reservation it does nothing.
    pub fn release(&self, nexus: &Nexus) {
        self.with_reservations(|reservations| reservations.release(&nexus.port));
    }

    fn with_reservations<T>(&self, change: impl FnOnce(&mut Reservations) -> T) -> T {
        let mut reservations = lock(&self.reservations);
        let result = change(&mut reservations);
        self.restricted.store(!reservations.is_empty(), Ordering::Release);
        result
    }

    /// PERSISTENT RESERVE IN.
    pub fn report_reservations(&self, action: u8, allocated_bytes: u16) -> Outcome {
        lock(&self.reservations).report(action, allocated_bytes)
    }

    /// PERSISTENT RESERVE OUT. When it returns, the change is stored if it must survive the server.
    pub async fn change_reservations(&self, nexus: &Nexus, out: &Out) -> Outcome {
        let guard = self.changing.lock().await;
        let before = lock(&self.reservations).clone();
        let mut after = before.clone();
        let effects = match after.change(&nexus.port, out) {
            Ok(effects) => effects,
            Err(outcome) => return outcome,
        };
        if (before.kept || after.kept)
            && before != after
            && let Err(problem) = self.save(&after).await
        {
            tracing::error!(volume = %self.volume, %problem, "can't store reservations");
            return Sense::TARGET_FAILURE.into();
        }
        self.with_reservations(|reservations| *reservations = after);
        // Released first, because tasks that have to end may wait for this lock.
        drop(guard);
        self.carry_out(effects).await;
        Outcome::DONE
    }

    async fn save(&self, state: &Reservations) -> Result<(), Problem> {
        let text = state
            .kept
            .then(|| serde_json::to_string(state))
            .transpose()
            .map_err(|error| Problem::internal("can't encode reservations", error))?;
        self.keep.save(&self.volume, text).await
    }

    async fn carry_out(&self, effects: Effects) {
        let nexuses = lock(&self.nexuses).clone();
        for (port, code) in effects.attentions {
            nexuses.iter().filter(|n| n.port == port).for_each(|nexus| nexus.attend(code));
        }
        let concerned = |nexus: &&Arc<Nexus>| effects.aborted.contains(&nexus.port);
        let ended = abort(nexuses.iter().filter(concerned));
        if tokio::time::timeout(MANAGEMENT_MAX, ended).await.is_err() {
            tracing::warn!(volume = %self.volume, "tasks of a preempted initiator are still running");
        }
    }

    /// Ends the tasks of all sessions, and the reservations that a reset ends. `quiet` is the session that
    /// asked for the reset; it gets an answer and no unit attention.
    pub async fn reset(&self, quiet: Option<&Nexus>) {
        self.with_reservations(Reservations::reset);
        let nexuses = lock(&self.nexuses).clone();
        abort(nexuses.iter()).await;
        let told = nexuses.iter().filter(|nexus| quiet.is_none_or(|by| by.port != nexus.port));
        told.for_each(|nexus| nexus.attend(attention::UNIT_RESET));
    }

    /// Ends the tasks of all sessions.
    pub async fn clear_tasks(&self, by: &Nexus) {
        let nexuses = lock(&self.nexuses).clone();
        abort(nexuses.iter()).await;
        let others = nexuses.iter().filter(|nexus| nexus.port != by.port);
        others.for_each(|nexus| nexus.attend(attention::COMMANDS_CLEARED));
    }
}

/// Returns when none of these sessions' tasks runs any more.
async fn abort(nexuses: impl Iterator<Item = &Arc<Nexus>>) {
    let mut waits = Vec::new();
    for nexus in nexuses {
        let (done, ended) = oneshot::channel();
        // A session that has ended has no tasks.
        if nexus.aborts.send(done).is_ok() {
            waits.push(ended);
        }
    }
    for ended in waits {
        // An error means that the sender was dropped, as expected.
        drop(ended.await);
    }
}

/// The existing units.
pub struct Units {
    keep: Arc<dyn Keep>,
    units: Arc<Mutex<HashMap<String, Arc<Unit>>>>,
}

/// A session's registration at its unit. Everything that ends with the session ends when this is dropped.
pub struct Place {
    pub unit: Arc<Unit>,
    pub nexus: Arc<Nexus>,
    pub aborts: mpsc::UnboundedReceiver<Abort>,
    units: Arc<Mutex<HashMap<String, Arc<Unit>>>>,
}

impl Units {
    /// `keep` stores what has to survive the server.
    pub fn new(keep: Arc<dyn Keep>) -> Self {
        Self { keep, units: Arc::default() }
    }

    /// # Errors
    /// When what is stored of the volume and the initiator can't be read.
    pub async fn join(
        &self,
        volume: &str,
        identity: Identity,
        port: Port,
        size_bytes: u64,
    ) -> Result<Place, Problem> {
        let serial = identity.serial();
        let knows = match self.keep.seen(volume, &port.0).await? {
            Some(seen) if seen != serial => knows::ANOTHER,
            Some(_) => knows::THIS,
            None => {
                if let Err(problem) = self.keep.see(volume, &port.0, serial).await {
                    // A full pool still serves its volumes.
                    tracing::warn!(volume, initiator = %port.0, %problem, "can't store what an initiator has seen");
                }
                knows::THIS
            }
        };
        let there = self.forget_another(volume, &identity);
        // If another session creates the unit first, these reservations are not used.
        let loaded = if there { Reservations::default() } else { self.load(volume).await? };
        let (aborts, receiver) = mpsc::unbounded_channel();
        let nexus = Arc::new(Nexus {
            port,
            attentions: Mutex::default(),
            has_attention: AtomicBool::new(false),
            aborts,
            size_bytes: AtomicU64::new(size_bytes),
            knows: AtomicU8::new(knows),
        });
        nexus.attend(attention::POWER_ON);
        let mut units = lock(&self.units);
        let unit = units.entry(volume.to_owned()).or_insert_with(|| {
            Arc::new(Unit {
                volume: volume.to_owned(),
                identity,
                settings: Mutex::default(),
                write_protected: AtomicBool::new(false),
                restricted: AtomicBool::new(!loaded.is_empty()),
                reservations: Mutex::new(loaded),
                changing: tokio::sync::Mutex::default(),
                nexuses: Mutex::default(),
                order: RwLock::default(),
                keep: Arc::clone(&self.keep),
            })
        });
        lock(&unit.nexuses).push(Arc::clone(&nexus));
        let unit = Arc::clone(unit);
        Ok(Place { unit, nexus, aborts: receiver, units: Arc::clone(&self.units) })
    }

    /// Whether the unit of this volume exists. The unit of a deleted volume with the same name is removed. If it has sessions, they keep it.
    fn forget_another(&self, volume: &str, identity: &Identity) -> bool {
        let mut units = lock(&self.units);
        if units.get(volume).is_some_and(|unit| unit.identity != *identity) {
            units.remove(volume);
        }
        units.contains_key(volume)
    }

    async fn load(&self, volume: &str) -> Result<Reservations, Problem> {
        match self.keep.load(volume).await? {
            None => Ok(Reservations::default()),
            Some(text) => serde_json::from_str(&text).map_err(|error| {
                Problem::internal(format!("can't read the reservations of volume {volume}"), error)
            }),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // The table's lock comes first, so that no session joins a unit that is being removed.
        let mut units = lock(&self.units);
        self.unit.release(&self.nexus);
        let mut nexuses = lock(&self.unit.nexuses);
        nexuses.retain(|nexus| !Arc::ptr_eq(nexus, &self.nexus));
        let idle = nexuses.is_empty()
            && lock(&self.unit.reservations).is_empty()
            && self.unit.settings() == Settings::default();
        let is_listed =
            units.get(&self.unit.volume).is_some_and(|unit| Arc::ptr_eq(unit, &self.unit));
        if idle && is_listed {
            units.remove(&self.unit.volume);
        }
    }
}

/// Ignores poisoning. Data under these locks is changed by single assignments or calls, so it is consistent
/// even after a panic, and the locks are still needed to end a session properly.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps nothing, for tests and fuzzing.
#[cfg(any(test, feature = "fuzzing"))]
pub struct KeepNothing;

#[cfg(any(test, feature = "fuzzing"))]
impl Keep for KeepNothing {
    fn load<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Option<String>, Problem>> {
        Box::pin(async { Ok(None) })
    }

    fn save<'a>(&'a self, _: &'a str, _: Option<String>) -> BoxFuture<'a, Result<(), Problem>> {
        Box::pin(async { Ok(()) })
    }

    fn seen<'a>(
        &'a self,
        _: &'a str,
        _: &'a str,
    ) -> BoxFuture<'a, Result<Option<String>, Problem>> {
        Box::pin(async { Ok(None) })
    }

    fn see<'a>(&'a self, _: &'a str, _: &'a str, _: String) -> BoxFuture<'a, Result<(), Problem>> {
        Box::pin(async { Ok(()) })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A PERSISTENT RESERVE OUT: for exclusive access, where that means something.
    fn out(action: u8, key: u64, action_key: u64) -> Out {
        let list = [&key.to_be_bytes()[..], &action_key.to_be_bytes(), &[0; 8]].concat();
        Out::parse(action, 3, &list).expect("a list")
    }

    fn identity() -> Identity {
        Identity::new("target".to_owned(), "data", None, None)
    }

    #[tokio::test]
    async fn initiators_that_preempt_each_other_both_get_an_answer() {
        const REGISTER: u8 = 0;
        const PREEMPT_AND_ABORT: u8 = 5;
        let units = Units::new(Arc::new(KeepNothing));
        let join = |port: &str| units.join("data", identity(), Port(port.to_owned()), 1 << 20);
        let a = join("a").await.expect("a place");
        let mut b = join("b").await.expect("a place");
        for (place, key) in [(&a, 1), (&b, 2)] {
            let outcome =
                place.unit.change_reservations(&place.nexus, &out(REGISTER, 0, key)).await;
            assert_eq!(outcome, Outcome::DONE);
        }
        let preempt_b = {
            let (unit, nexus) = (Arc::clone(&a.unit), Arc::clone(&a.nexus));
            async move { unit.change_reservations(&nexus, &out(PREEMPT_AND_ABORT, 1, 2)).await }
        };
        let preempt_b = tokio::spawn(preempt_b);
        // B's session has been asked to end its tasks, and one of those is just beginning.
        let asked = b.aborts.recv().await.expect("an abort");
        let preempt_a = out(PREEMPT_AND_ABORT, 2, 1);
        let answer = b.unit.change_reservations(&b.nexus, &preempt_a);
        let answer = tokio::time::timeout(Duration::from_secs(120), answer).await;
        assert_eq!(answer.expect("an answer in time"), Outcome::Conflict, "it is not registered");
        drop(asked);
        assert_eq!(preempt_b.await.expect("no panic"), Outcome::DONE);
    }
}
