//! Orders to migrate the VM, to cancel that, and to power it off.

use std::sync::PoisonError;

use perigee_model::switchover::{OnCancel, on_cancel};
use perigee_model::vm::{CancelMigration, MigrateOut, RenewGrant};
use perigee_model::{Problem, VmId};
use serde_json::json;

use super::Owner;
use crate::vm::decide;
use crate::vm::migrate::{self, Record};
use crate::vm::tpm;

impl Owner {
    pub(super) fn migrate(&mut self, order: MigrateOut) -> Result<(), Problem> {
        let (status, last) = self.vm.observed(|seen| (seen.status(), seen.migration.clone()));
        let begin = decide::may_migrate(status, last.as_ref(), &order, &self.host.agent_url)
            .map_err(|refusal| migrate_refused(self.vm.id(), &refusal))?;
        if !begin {
            return Ok(());
        }
        if tpm::has_ended(&self.vm) {
            let what = format!("can't migrate the VM {}", self.vm.id());
            let why = "its TPM has ended, and QEMU can't send it without the TPM's state";
            let next = format!("perigee vm restart {}", self.vm.id());
            return Err(Problem::unsupported(what, why).next(next));
        }
        let record = Record::new(order.clone());
        self.keep(&record)?;
        self.migration =
            Some(migrate::spawn(self.vm.clone(), self.host.clone(), record, order, false));
        Ok(())
    }

    /// The guest powers itself off, if it listens to ACPI. An event says when it has.
    pub(super) async fn press_power_button(&mut self) -> Result<(), Problem> {
        let what = || format!("can't tell the guest of {} to power off", self.vm.id());
        let qmp = self.vm.observed(|seen| seen.qmp.clone());
        let qmp = qmp.ok_or_else(|| Problem::unavailable(what(), "its QEMU does not answer"))?;
        let told = qmp.execute("system_powerdown", json!({})).await;
        told.map(drop).map_err(|error| Problem::unavailable(what(), error))
    }

    fn keep(&self, record: &Record) -> Result<(), Problem> {
        record.save(&self.vm)?;
        self.vm.observed(|seen| {
            seen.migration = Some(record.report.clone());
            seen.switchover = Some(record.switchover);
        });
        Ok(())
    }

    /// A running migration ends as soon as possible. One that has not started never starts.
    pub(super) fn cancel_migration(&mut self, asked: &CancelMigration) -> Result<(), Problem> {
        let what = || format!("can't cancel the migration {}", asked.migration);
        let (last, at) = self.vm.observed(|seen| {
            (seen.migration.as_ref().map(|last| (last.number, last.phase)), seen.switchover)
        });
        let Some(at) = at else {
            return Err(Problem::unavailable(what(), "the VM's last migration is not known"));
        };
        match on_cancel(last, at, asked.number).map_err(|e| Problem::conflict(what(), e))? {
            OnCancel::Nothing => Ok(()),
            OnCancel::Store => self.keep(&Record::called_off(asked)),
            OnCancel::Stop => {
                if let Some(migration) = &self.migration {
                    let mut why = migration.cancel.lock().unwrap_or_else(PoisonError::into_inner);
                    why.get_or_insert_with(|| asked.reason.clone());
                    migration.nudge.notify_one();
                }
                Ok(())
            }
        }
    }
}

impl Owner {
    /// The migration's task takes it before it asks a home again.
    pub(super) fn renew_grant(&self, renewed: RenewGrant) -> Result<(), Problem> {
        let RenewGrant { migration, grant } = renewed;
        let is_under_way = self.vm.observed(|seen| {
            let own = seen.migration.as_ref().filter(|own| own.migration == migration);
            own.is_some_and(|own| !own.phase.is_final())
        });
        let Some(handle) = self.migration.as_ref().filter(|_| is_under_way) else {
            let what = format!("can't renew what the migration {migration} may do");
            return Err(Problem::conflict(what, "it is not under way here"));
        };
        *handle.renewed.lock().unwrap_or_else(PoisonError::into_inner) = Some(grant);
        handle.nudge.notify_one();
        Ok(())
    }
}

fn migrate_refused(vm: &VmId, refusal: &decide::Refusal) -> Problem {
    let what = format!("can't migrate the VM {vm}");
    match refusal {
        decide::Refusal::Uri(_) => Problem::invalid(what, refusal),
        _ => Problem::conflict(what, refusal),
    }
}
