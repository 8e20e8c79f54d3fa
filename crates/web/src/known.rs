//! What a page is told: answers of the controller's API, for the one who asks, and what the API did not answer.

use perigee_model::Problem;
use perigee_model::backup_schedule::BackupSchedule;
use perigee_model::job::{ClusterVolume, Host, Job, Migration, Vm};
use perigee_model::rental::Rental;
use perigee_model::tasks::TaskStatus;
use perigee_model::tenant::AuditEntry;

/// What the first page shows. `None` is what the caller may not ask for, or what was not answered.
#[derive(Debug, Default)]
pub struct Known {
    /// The present time; Unix time.
    pub now_ms: u64,
    /// The hosts; for admins.
    pub hosts: Option<Vec<Host>>,
    /// The VMs that the caller sees.
    pub vms: Option<Vec<Vm>>,
    /// The jobs that the caller sees and that have not ended, and the last ones that have failed.
    pub jobs: Option<Vec<Job>>,
    /// The volumes that the caller sees.
    pub volumes: Option<Vec<ClusterVolume>>,
    /// The migrations that are under way, of these VMs.
    pub migrations: Vec<Migration>,
    /// How many more VMs move, which were not asked for.
    pub more_migrations: usize,
    /// The controller's tasks; for admins.
    pub tasks: Option<Vec<TaskStatus>>,
    /// The schedules of backups.
    pub schedules: Option<Vec<BackupSchedule>>,
    /// The rented hosts; for admins.
    pub rentals: Option<Vec<Rental>>,
    /// The audit log of the caller's tenant, the newest last; for operators.
    pub audit: Option<Vec<AuditEntry>>,
    /// What could not be asked. What is not known is not well.
    pub problems: Vec<Problem>,
}
