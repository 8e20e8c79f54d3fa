//! Copies the agents' reports of a migration to its record: state, bytes, times.

use perigee_model::Problem;
use perigee_model::job::{Migration, MigrationState};
use perigee_model::states::MigrationEvent;
use perigee_model::vm::{MigrationPhase, MigrationReport};

use super::Run;

impl Run {
    /// Copies the source's figures and phase to the record.
    pub(super) async fn mirror(&mut self, report: Option<&MigrationReport>) -> Result<(), Problem> {
        let Some(report) = report else { return Ok(()) };
        let before = self.record.value.migration.clone();
        self.take_figures(report);
        self.record.value.migration.error = self.cluster.hosts.named(&report.reason);
        match report.phase {
            MigrationPhase::Setup | MigrationPhase::Copying => {
                self.advance_to(MigrationState::Copying)?;
            }
            _ => self.advance_to(MigrationState::Switching)?,
        }
        let after = &self.record.value.migration;
        let of = |m: &Migration| (m.state, m.bytes, m.error.clone());
        if of(&before) != of(after) {
            self.record.value.watched_ms =
                u64::try_from(self.age().as_millis()).unwrap_or(u64::MAX);
            self.record.save().await?;
        }
        Ok(())
    }

    pub(super) fn take_figures(&mut self, report: &MigrationReport) {
        let migration = &mut self.record.value.migration;
        migration.downtime_ms = report.downtime_ms;
        migration.bytes = report.transferred_bytes;
        migration.remaining_bytes = report.remaining_bytes;
        migration.rate_bytes_per_s = report.rate_bytes_per_s;
        if report.dirty_bytes_per_s > 0 {
            migration.dirty_bytes_per_s = report.dirty_bytes_per_s;
        }
        if let (Some(own), Some(source)) = (&mut migration.phases.prepare, report.phases.prepare) {
            own.begin_ms = source.begin_ms;
        }
        migration.phases.rounds.clone_from(&report.phases.rounds);
        migration.phases.pause = report.phases.pause;
        let prepare_ms = migration.phases.prepare.map_or(0, |prepare| prepare.total_ms());
        migration.total_ms = prepare_ms + report.total_ms;
    }

    /// Goes through the states in order. Several may have passed between two reports.
    pub(super) fn advance_to(&mut self, target: MigrationState) -> Result<(), Problem> {
        let state = &mut self.record.value.migration.state;
        while *state != target && !state.is_final() {
            let event = match *state {
                MigrationState::Preparing => MigrationEvent::Sending,
                MigrationState::Copying => MigrationEvent::Paused,
                MigrationState::Switching if target == MigrationState::Completed => {
                    MigrationEvent::Arrived
                }
                // A late report shows an earlier phase. The state never goes back.
                _ => return Ok(()),
            };
            *state = state.next(event)?;
        }
        Ok(())
    }

    /// The destination's agent lets the VM run after it has stored that the VM is there. This time belongs to
    /// the pause.
    pub(super) fn take_resume(&mut self, resume_us: u64) {
        let migration = &mut self.record.value.migration;
        if let Some(pause) = &mut migration.phases.pause {
            pause.resume_us = resume_us;
        }
        migration.downtime_ms += resume_us.div_ceil(1000);
        migration.total_ms += resume_us.div_ceil(1000);
    }
}
