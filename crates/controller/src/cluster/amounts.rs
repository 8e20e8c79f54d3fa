//! What was decided last about the memory of VMs that may have more or less of it while they run.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use perigee_model::amounts::{CpuAmount, MemoryAmount};
use perigee_model::vm::VmReport;
use perigee_model::{HostId, VmId};

use super::Cluster;
use crate::records::{JobRecord, start_of, vm_of};

/// Why a VM has no more than its least, although it was asked for with a range.
const LOCKED: &str = "it has the least: data of another site is to stay off its host's disks, so all of its memory is locked";

/// What was decided about one VM. It is found out anew after a restart of the controller.
#[derive(Debug, Clone, Default)]
pub struct Amount {
    /// The VM's run that is meant.
    pub run: u32,
    /// What its guest was asked to have, and since when it is to have no more.
    pub asked: Option<(u64, Instant)>,
    /// Why it has what it has.
    pub reason: String,
}

/// What the last look has shown.
#[derive(Debug, Default)]
pub struct Looked {
    /// Of the VMs that have a range.
    pub vms: BTreeMap<VmId, Amount>,
    /// The hosts whose VMs were asked to give memory back.
    pub giving: BTreeSet<HostId>,
}

/// What was decided last about all VMs.
#[derive(Debug, Default)]
pub struct Amounts(Mutex<Looked>);

impl Amounts {
    fn lock(&self) -> MutexGuard<'_, Looked> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was decided about this run of the VM.
    pub fn of(&self, vm: &VmId, run: u32) -> Option<Amount> {
        self.lock().vms.get(vm).filter(|amount| amount.run == run).cloned()
    }

    /// Whether VMs of this host are about to give memory back.
    pub fn gives_back(&self, host: &HostId) -> bool {
        self.lock().giving.contains(host)
    }

    /// Notes the next look.
    pub fn note(&self, looked: Looked) {
        *self.lock() = looked;
    }
}

/// How the memory of a job's VM is shown; `None` if it was asked for without a range. `report` is its host's last one.
pub fn shown(
    cluster: &Cluster,
    record: &JobRecord,
    report: Option<&VmReport>,
) -> Option<MemoryAmount> {
    let spec = &record.job.spec;
    let has = report.and_then(|report| report.load.memory);
    let amount = cluster.amounts.of(&vm_of(&record.job.id), start_of(record, 0).run);
    let shown = MemoryAmount {
        least_bytes: spec.memory_bytes,
        most_bytes: spec.memory_max_bytes?,
        has_bytes: has.map(|has| has.has_bytes),
        used_bytes: has.and_then(|has| Some(has.has_bytes.saturating_sub(has.available_bytes?))),
        reason: amount.map(|amount| amount.reason).unwrap_or_default(),
    };
    let locked = report.filter(|report| report.spec.machine.memory_least_bytes.is_none());
    Some(match locked {
        Some(report) => {
            let (has_bytes, reason) = (Some(report.spec.memory_bytes), LOCKED.to_owned());
            MemoryAmount { has_bytes, used_bytes: None, reason, ..shown }
        }
        None => shown,
    })
}

/// How the vCPUs of a job's VM are shown; `None` if it was asked for without a range of them.
pub fn cpu_time(record: &JobRecord, report: Option<&VmReport>) -> Option<CpuAmount> {
    let spec = &record.job.spec;
    let load = report.and_then(|report| report.load.vcpus_1m);
    Some(CpuAmount::of(spec.cpus, spec.cpus_max?, load))
}
