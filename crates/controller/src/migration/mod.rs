//! Live migrations. Each has one task, and only this task writes the migration's record.
//!
//! ```text
//! preparing   other moves over the link are waited for, epochs issued and volumes attached, then the destination's QEMU waits;
//!             a host that does not answer is asked again for a while
//! copying     the source sends memory
//! switching   the source is paused, epochs are raised, the rest is sent
//! completed | aborted
//! ```
//!
//! [`sharing`] lets migrations over one link wait for each other, [`prepare`] does the work before the source is asked, [`watch`] reads the reports of both agents until one
//! of them reports the end, and [`figures`] records them. [`aborted`] says how long a VM stays where it is after migrations
//! that failed; [`by_itself`] has what holds for moves that nobody has asked for. This module contains the driver.
//!
//! The source's agent sends the VM and raises the epochs; the controller prepares and watches this. It judges
//! the result from the reports of both agents ([`judge()`]), so a controller that was restarted in the middle
//! comes to the same result. Once the source was asked, only an agent's report ends a migration. If a migration
//! takes too long, it is cancelled at the source, which then reports its end. A host that a person removed
//! counts as dead, and is not waited for. Then the other agent decides, and the VM's job takes the writer
//! epochs from any VM that may still run ([`crate::jobs`]).

mod aborted;
pub mod by_itself;
mod figures;
mod prepare;
mod request;
mod sharing;
mod watch;

use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::job::MigrationState;
use perigee_model::states::MigrationEvent;
#[cfg(doc)]
use perigee_model::switchover::judge;
use perigee_model::{MigrationId, Problem, VmId};

use crate::clock::now_ms;
use crate::cluster::{Cluster, HostLink};
use crate::records::{
    MigrationIntent, MigrationRecord, Owned, migration_intent_key, migration_intent_prefix,
    migration_key, migration_prefix,
};

#[cfg(test)]
pub(crate) use request::new_record;
pub use request::{ASKED, Request, cancel, check, not_alone, of_vm, request, ruled_out};
pub use sharing::queue_all;

/// The reason of a migration that a person cancelled.
const CANCELLED: &str = "cancelled";

/// How many migrations of a VM are kept.
pub const KEPT: u32 = 100;

/// Forgets the oldest migrations of a VM, all of which its job has settled.
///
/// # Errors
/// If the store fails.
pub async fn forget_old(cluster: &Cluster, vm: &VmId, settled: u32) -> Result<(), Problem> {
    let Some(last) = settled.checked_sub(KEPT).filter(|last| *last > 0) else { return Ok(()) };
    let all = [
        (migration_prefix(vm), migration_key(vm, last)),
        (migration_intent_prefix(vm), migration_intent_key(vm, last)),
    ];
    for (prefix, last) in all {
        for key in cluster.records.keys(&prefix).await?.into_iter().filter(|key| *key <= last) {
            cluster.records.remove(&key).await?;
        }
    }
    cluster.index.forget_migrations(vm, last);
    Ok(())
}

/// Drives a migration to its end.
///
/// # Errors
/// If the store fails. The caller tries again.
pub async fn drive(cluster: Arc<Cluster>, vm: VmId, number: u32) -> Result<(), Problem> {
    let intent_key = migration_intent_key(&vm, number);
    let mut intents = cluster.records.watch_key(&intent_key);
    loop {
        let Some(record) = cluster.own_migration(&vm, number).await? else {
            cluster.lanes.leave(&name_of(&vm, number)?);
            return Ok(());
        };
        let mut run = Run {
            cluster: Arc::clone(&cluster),
            vm: vm.clone(),
            earlier: Duration::from_millis(record.value.watched_ms),
            begun: Instant::now(),
            record,
            cancel: false,
        };
        if run.state().is_final() {
            run.leave_queue();
            return Ok(());
        }
        let intent: Option<MigrationIntent> = cluster.records.read(&intent_key).await?;
        let intent = intent.unwrap_or_default();
        if intent.abandon {
            // The job removes both VMs itself.
            return run.abort("its job ended".to_owned()).await;
        }
        if intent.cancel && !run.record.value.asked_source {
            return run.abort(CANCELLED.to_owned()).await;
        }
        run.cancel = intent.cancel;
        let ended = tokio::select! {
            ended = run.phases() => ended,
            _ = intents.next() => continue,
        };
        match ended {
            Ok(()) => {}
            Err(problem) if run.record.value.asked_source => return Err(problem),
            Err(problem) => run.give_up(&problem).await?,
        }
    }
}

fn name_of(vm: &VmId, number: u32) -> Result<MigrationId, Problem> {
    MigrationId::new(format!("{vm}-m{number}"))
        .map_err(|e| Problem::internal("can't name a migration", e))
}

struct Run {
    cluster: Arc<Cluster>,
    vm: VmId,
    record: Owned<MigrationRecord>,
    /// A person cancelled it; the source is told.
    cancel: bool,
    begun: Instant,
    /// For how long earlier controllers watched it.
    earlier: Duration,
}

impl Run {
    /// Each phase can be repeated after a restart. An error before the source was asked ends the migration in
    /// [`Run::give_up`]. Afterwards only the reports of both agents end it.
    async fn phases(&mut self) -> Result<(), Problem> {
        self.take_turn().await?;
        let mut waiting = None;
        if !self.record.value.asked_source {
            waiting = Some(self.prepare_patiently().await?);
            self.record.value.asked_source = true;
            self.record.save().await?;
        }
        self.watch_over(waiting).await
    }

    fn state(&self) -> MigrationState {
        self.record.value.migration.state
    }

    fn source(&self) -> Result<Arc<HostLink>, Problem> {
        self.cluster.hosts.get(&self.record.value.migration.from)
    }

    fn destination(&self) -> Result<Arc<HostLink>, Problem> {
        self.cluster.hosts.get(&self.record.value.migration.to)
    }

    fn path(&self) -> String {
        format!("/v1/vms/{}", self.vm)
    }

    fn age(&self) -> Duration {
        self.earlier + self.begun.elapsed()
    }

    /// The VM is at the destination.
    async fn complete(&mut self) -> Result<(), Problem> {
        self.advance_to(MigrationState::Completed)?;
        self.record.value.migration.ended_ms = Some(now_ms());
        self.record.value.migration.error.clear();
        self.record.save().await?;
        self.leave_queue();
        let migration = &self.record.value.migration;
        tracing::info!(
            "VM {} moved from {} to {} in {} ms",
            self.vm,
            migration.from,
            migration.to,
            migration.total_ms
        );
        Ok(())
    }

    /// The source was never asked, so the destination's QEMU never ran the VM and is simply removed.
    async fn give_up(&mut self, problem: &Problem) -> Result<(), Problem> {
        self.abort(format!("{}: {}", problem.what, problem.why)).await
    }

    /// The only place where a migration fails: the VM is at the source. The job's driver sees the record, and
    /// records a cleanup for what was made at the destination.
    async fn abort(&mut self, why: String) -> Result<(), Problem> {
        tracing::warn!("{} is aborted: {why}", self.record.value.migration.id);
        let migration = &mut self.record.value.migration;
        migration.state = migration.state.next(MigrationEvent::GivenUp)?;
        migration.error = self.cluster.hosts.named(&why);
        migration.ended_ms = Some(now_ms());
        self.record.save().await?;
        self.leave_queue();
        Ok(())
    }
}
