//! The end of a VM: it is deleted, or given back to the source of its migration.

use std::time::Duration;

use perigee_model::switchover::{Arrival, Fate, fate};
use perigee_model::{MigrationId, Problem};

use super::Owner;
use crate::cgroup;
use crate::ended::Arrived;
use crate::files::read_json;
use crate::process::Process;
use crate::vm::tls::End;
use crate::vm::{tpm, tunnel};

/// The deadline for a QEMU that may hang. The requester waits some seconds.
const LOOK_DEADLINE: Duration = Duration::from_secs(2);

impl Owner {
    /// Returns the fate of the VM that a migration was to bring. The requester wants to run it again, so a VM
    /// that has not run here is stopped. Only this task could have let it run.
    pub(super) async fn end_unless_ran(&mut self, asked: &MigrationId) -> Result<Fate, Problem> {
        let Some(own) = self.vm.spec.arrives_by.clone() else { return Ok(Fate::NotKnown) };
        if own == *asked && self.vm.observed(|seen| seen.arrival) == Arrival::Waits {
            // A VM whose state has arrived completely stays here.
            self.look_once().await;
        }
        let arrival = self.vm.observed(|seen| seen.arrival);
        let answer = fate(Some((&own, arrival)), asked);
        if answer == Fate::DidNotRun {
            self.end_process().await?;
            // This comes before anything is removed, because the request may be repeated.
            self.keep_end()?;
            self.forget()?;
        }
        Ok(answer)
    }

    async fn look_once(&mut self) {
        let Some(qmp) = self.vm.observed(|seen| seen.qmp.clone()) else { return };
        if tokio::time::timeout(LOOK_DEADLINE, self.look(&qmp)).await.is_err() {
            tracing::warn!(vm = %self.vm.id(), "QEMU does not say whether the VM has come");
        }
    }

    /// Stops QEMU and removes the VM.
    pub(super) async fn delete(&mut self) -> Result<(), Problem> {
        if let Some(migration) = self.migration.take() {
            migration.task.abort();
        }
        self.end_process().await?;
        if let Err(problem) = self.keep_end() {
            tracing::warn!(vm = %self.vm.id(), %problem, "whether it has run here is not kept");
        }
        self.forget()
    }

    fn keep_end(&self) -> Result<(), Problem> {
        let arrival = self.vm.observed(|seen| seen.arrival);
        let migration = self.vm.spec.arrives_by.clone();
        let arrived = migration.map(|migration| Arrived {
            migration,
            arrival,
            from: self.vm.spec.arrives_from.clone(),
        });
        self.host.ends.hold(self.vm.id()).add(self.vm.spec.start, arrived)
    }

    /// Ends what watches this start of the VM, so that it finds nothing of the next one.
    pub(super) fn end_tasks(&mut self) {
        let tasks =
            [&mut self.guest, &mut self.network, &mut self.tpm, &mut self.door, &mut self.tunnel];
        for task in tasks.into_iter().filter_map(Option::take) {
            task.abort();
        }
    }

    fn forget(&mut self) -> Result<(), Problem> {
        self.end_tasks();
        self.vm.dir.remove()?;
        tracing::info!(vm = %self.vm.id(), "deleted");
        Ok(())
    }

    pub(super) async fn end_process(&mut self) -> Result<(), Problem> {
        if self.vm.observed(|seen| seen.is_searched) {
            self.find_process();
        }
        let (process, is_searched) = self.vm.observed(|seen| (seen.process, seen.is_searched));
        if is_searched {
            let why =
                "the processes of this host cannot be read: whether its QEMU runs is not known";
            return Err(Problem::unavailable(format!("can't delete the VM {}", self.vm.id()), why)
                .next("try again when the host has file descriptors to spare"));
        }
        if let Some(process) = process {
            process.kill().await?;
        }
        // It ends by itself, unless it hangs or its guest has taken it over.
        match read_json::<Process>(&self.vm.dir.network_process()) {
            Ok(Some(passt)) => passt.kill().await?,
            Ok(None) => {}
            Err(problem) => tracing::warn!(vm = %self.vm.id(), %problem, "its passt may go on"),
        }
        tpm::end(&self.vm).await?;
        for end in [End::Source, End::Destination] {
            tunnel::end(&self.vm.dir, end).await?;
        }
        if let Some(process) = process {
            cgroup::forget(&process).await;
        }
        Ok(())
    }
}
