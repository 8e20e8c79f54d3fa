//! What was measured of hosts, and which of them are measured now.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use perigee_model::measurement::{HostMeasurement, RentedKind};
use perigee_model::{HostId, Problem, VolumeName};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::records::{MEASURED_KINDS, MEASUREMENTS, MeasurementRecord, Records, measurement_key};

/// One that is under way.
struct Running {
    /// The hosts that it keeps busy.
    hosts: Vec<HostId>,
    stop: CancellationToken,
    /// Whether the task that carries it out has it, or may not have it yet.
    begun: bool,
    /// The volumes that were made for it, and their homes.
    volumes: Vec<(HostId, VolumeName)>,
}

#[derive(Default)]
struct Inside {
    running: BTreeMap<HostId, Running>,
    hosts: BTreeMap<HostId, HostMeasurement>,
    kinds: BTreeMap<RentedKind, HostMeasurement>,
}

/// The last measurement of each host and of each kind of rented ones.
#[derive(Default)]
pub struct Measurements {
    inside: Mutex<Inside>,
    /// Wakes the task that measures.
    pub wanted: Notify,
}

impl Measurements {
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) async fn load(records: &Records) -> Result<Self, Problem> {
        let all = Self::default();
        for record in records.list::<MeasurementRecord>(MEASUREMENTS).await? {
            all.note(record.view);
        }
        for kind in records.list(MEASURED_KINDS).await? {
            all.note_kind(kind);
        }
        Ok(all)
    }

    /// Reserves a host and those against which it is measured. Nobody carries that out before [`Self::ready`].
    ///
    /// # Errors
    /// One that another measurement keeps busy, and the host of that measurement.
    pub fn reserve(&self, host: &HostId, with: &[HostId]) -> Result<(), (HostId, HostId)> {
        let hosts: Vec<HostId> = [host].into_iter().chain(with).cloned().collect();
        let mut inside = self.lock();
        for (other, running) in &inside.running {
            if let Some(busy) = hosts.iter().find(|host| running.hosts.contains(host)) {
                return Err((busy.clone(), other.clone()));
            }
        }
        let (stop, volumes) = Default::default();
        inside.running.insert(host.clone(), Running { hosts, stop, begun: true, volumes });
        Ok(())
    }

    /// Its record is written: the task that carries measurements out may take it.
    pub fn ready(&self, host: &HostId) {
        if let Some(running) = self.lock().running.get_mut(host) {
            running.begun = false;
        }
        self.wanted.notify_one();
    }

    /// One that nobody carries out yet.
    pub fn take(&self) -> Option<(HostId, CancellationToken)> {
        let mut inside = self.lock();
        let (host, running) = inside.running.iter_mut().find(|(_, running)| !running.begun)?;
        running.begun = true;
        Some((host.clone(), running.stop.clone()))
    }

    /// Calls it off; whether there was one.
    pub fn stop(&self, host: &HostId) -> bool {
        let inside = self.lock();
        let running = inside.running.get(host);
        running.inspect(|running| running.stop.cancel()).is_some()
    }

    /// Whether it takes part in one.
    pub fn is_busy(&self, host: &HostId) -> bool {
        self.lock().running.values().any(|running| running.hosts.contains(host))
    }

    pub fn is_running(&self, host: &HostId) -> bool {
        self.lock().running.contains_key(host)
    }

    /// The host is free again.
    pub fn ended(&self, host: &HostId) {
        self.lock().running.remove(host);
    }

    pub fn note_volumes(&self, host: &HostId, volumes: Vec<(HostId, VolumeName)>) {
        if let Some(running) = self.lock().running.get_mut(host) {
            running.volumes = volumes;
        }
    }

    /// Whether the volume at this home is for a measurement that is under way.
    pub fn has(&self, home: &HostId, volume: &VolumeName) -> bool {
        let inside = self.lock();
        let mut all = inside.running.values().flat_map(|running| &running.volumes);
        all.any(|(at, one)| at == home && one == volume)
    }

    pub fn note(&self, view: HostMeasurement) {
        self.lock().hosts.insert(view.host.clone(), view);
    }

    pub fn note_kind(&self, view: HostMeasurement) {
        if let Some(kind) = view.kind.clone() {
            self.lock().kinds.insert(kind, view);
        }
    }

    /// What was measured of the host itself.
    pub fn of(&self, host: &HostId) -> Option<HostMeasurement> {
        self.lock().hosts.get(host).cloned()
    }

    /// What was measured of the first host of such a kind, or of a later one.
    pub fn of_kind(&self, kind: &RentedKind) -> Option<HostMeasurement> {
        self.lock().kinds.get(kind).cloned()
    }

    /// Those of all hosts, and of all kinds.
    pub fn all(&self) -> (Vec<HostMeasurement>, Vec<HostMeasurement>) {
        let inside = self.lock();
        (inside.hosts.values().cloned().collect(), inside.kinds.values().cloned().collect())
    }

    /// The kinds, those first that were measured first.
    pub fn kinds(&self) -> Vec<(u64, RentedKind)> {
        let inside = self.lock();
        let kinds = inside.kinds.iter().map(|(kind, view)| (view.begun_ms, kind.clone()));
        let mut kinds: Vec<_> = kinds.collect();
        kinds.sort();
        kinds
    }

    pub fn forget_kind(&self, kind: &RentedKind) {
        self.lock().kinds.remove(kind);
    }

    /// Drops what was measured of a removed host. Figures of its kind stay.
    ///
    /// # Errors
    /// If the store does not answer.
    pub async fn forget(&self, records: &Records, host: &HostId) -> Result<(), Problem> {
        // Whoever measures it removes the record at the end.
        if !self.stop(host) {
            records.remove(&measurement_key(host)).await?;
        }
        self.forget_host(host);
        Ok(())
    }

    /// Drops what is in memory of it.
    pub fn forget_host(&self, host: &HostId) {
        self.lock().hosts.remove(host);
    }
}
