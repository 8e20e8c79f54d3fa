//! What is stored of a migration.

use perigee_model::Problem;
use perigee_model::switchover::Switchover;
use perigee_model::vm::{CancelMigration, MigrateOut, MigrationPhase, MigrationReport};
use serde::{Deserialize, Serialize};

use crate::files::{self, VmDir};
use crate::vm::Vm;

/// The part of a migration that must survive a restart of the agent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// `None` for a migration that was cancelled before its order arrived.
    pub order: Option<MigrateOut>,
    pub report: MigrationReport,
    pub switchover: Switchover,
}

impl Record {
    /// The record of a migration that begins.
    pub fn new(order: MigrateOut) -> Self {
        let MigrateOut { migration, number, .. } = &order;
        let report = MigrationReport::new(migration.clone(), *number, MigrationPhase::Setup);
        Self { order: Some(order), report, switchover: Switchover::Source }
    }

    /// The record of a cancelled migration: if its order arrives late, it is recognized and starts nothing.
    pub fn called_off(asked: &CancelMigration) -> Self {
        let CancelMigration { migration, number, .. } = asked;
        let mut report =
            MigrationReport::new(migration.clone(), *number, MigrationPhase::Cancelled);
        report.reason.clone_from(&asked.reason);
        Self { order: None, report, switchover: Switchover::Source }
    }

    /// # Errors
    /// If there is a record that cannot be read. Then it is not known where the VM may run.
    pub fn load(dir: &VmDir) -> Result<Option<Self>, Problem> {
        files::read_json(&dir.migration())
    }

    /// Keeps it in the VM's directory, durably.
    ///
    /// # Errors
    /// `Internal` if it can't be written: the migration must not go on.
    pub fn save(&self, vm: &Vm) -> Result<(), Problem> {
        files::write_json(&vm.dir.migration(), self)
    }
}
