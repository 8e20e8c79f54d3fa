//! What is decided about a VM and its migration: pure functions, without I/O or clock.

use perigee_model::states::VmEvent;
use perigee_model::vm::{MigrateOut, MigrationPhase, MigrationReport, VmStatus};

use crate::qmp::{BlockIoError, MigrateInfo};

/// What QEMU's run state means to the VM's state machine; `None` where it says nothing new.
fn event_of(run_state: &str) -> Option<VmEvent> {
    match run_state {
        "running" => Some(VmEvent::Resumed),
        "io-error" => Some(VmEvent::DiskError),
        "shutdown" => Some(VmEvent::PoweredOff),
        "postmigrate" => Some(VmEvent::HandedOver),
        "paused" | "finish-migrate" | "internal-error" | "guest-panicked" | "suspended"
        | "debug" | "save-vm" | "restore-vm" | "watchdog" => Some(VmEvent::Stopped),
        _ => None,
    }
}

/// The status after QEMU said `run_state`. What the state machine refuses changes nothing.
pub fn observe(status: VmStatus, run_state: &str) -> VmStatus {
    if run_state == "inmigrate" && status == VmStatus::Starting {
        return VmStatus::Incoming;
    }
    let Some(event) = event_of(run_state) else { return status };
    status.next(event).unwrap_or(status)
}

/// Whether a VM that came by migration has its whole state here. One that a disk error had stopped,
/// or that was powered off, arrives without running; from here it goes on.
pub fn has_arrived(status: VmStatus) -> bool {
    matches!(status, VmStatus::Running | VmStatus::IoError | VmStatus::Shutdown)
}

pub fn is_final(phase: MigrationPhase) -> bool {
    use MigrationPhase as P;
    matches!(phase, P::Completed | P::Failed | P::Cancelled)
}

/// Why a VM is not migrated as asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("it is {0:?}, and only a running VM can be moved")]
    NotRunning(VmStatus),
    #[error("its migration {0} is under way")]
    Busy(String),
    #[error("its destination is this host")]
    SameHost,
    #[error("its destination {0:?} is not tcp:IP:PORT")]
    Uri(String),
}

/// Whether to begin the migration; `Ok(false)` when it is the one that was begun before.
pub fn may_begin(
    status: VmStatus,
    last: Option<&MigrationReport>,
    order: &MigrateOut,
    own_url: &str,
) -> Result<bool, Refusal> {
    if let Some(last) = last {
        if last.migration == order.migration {
            return Ok(false);
        }
        if !is_final(last.phase) {
            return Err(Refusal::Busy(last.migration.to_string()));
        }
    }
    if status != VmStatus::Running {
        return Err(Refusal::NotRunning(status));
    }
    if order.destination_agent_url.trim_end_matches('/') == own_url.trim_end_matches('/') {
        return Err(Refusal::SameHost);
    }
    // QEMU knows other kinds of addresses: `exec:` would start a program.
    if !order.uri.starts_with("tcp:") {
        return Err(Refusal::Uri(order.uri.clone()));
    }
    Ok(true)
}

/// What the state of QEMU's migration asks for while RAM is copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Copying {
    GoOn,
    /// Paused before the switch.
    AtSwitch,
    /// The switch was made before: only its end is to be waited for.
    BehindSwitch,
    Completed,
    Ended(String),
}

pub fn while_copying(info: &MigrateInfo) -> Copying {
    match info.status.as_str() {
        "setup" | "active" | "wait-unplug" => Copying::GoOn,
        "pre-switchover" => Copying::AtSwitch,
        "device" => Copying::BehindSwitch,
        "completed" => Copying::Completed,
        "" | "none" => Copying::Ended("QEMU knows of no migration".to_owned()),
        other if info.error_desc.is_empty() => Copying::Ended(format!("QEMU says: {other}")),
        _ => Copying::Ended(info.error_desc.clone()),
    }
}

/// Whether QEMU still sends; `None` while it is on its way to an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sending {
    Active,
    Ending,
    Completed,
    Ended,
}

pub fn while_stopping(status: &str) -> Sending {
    match status {
        "completed" => Sending::Completed,
        "" | "none" | "failed" | "cancelled" => Sending::Ended,
        "cancelling" => Sending::Ending,
        _ => Sending::Active,
    }
}

/// Whether to try to continue a VM that a disk error has stopped. Not while a migration holds it,
/// and not after its write right went elsewhere; a VM that came here by migration waits for its
/// right instead, because a source that gave up and then learned that it ran gives it back.
pub fn may_retry(
    status: VmStatus,
    phase: Option<MigrationPhase>,
    fenced: bool,
    incoming: bool,
) -> bool {
    let free = match phase {
        Some(MigrationPhase::Switching | MigrationPhase::Completed) => false,
        Some(_) | None => true,
    };
    status == VmStatus::IoError && free && (!fenced || incoming)
}

/// A refused write has this reason in QEMU's event: the text of EPERM.
pub fn is_fenced(error: &BlockIoError) -> bool {
    error.reason == "Operation not permitted"
}

/// The words for an error of a disk.
pub fn describe(error: &BlockIoError) -> String {
    let disk = if error.node_name.is_empty() { &error.device } else { &error.node_name };
    let why = if error.nospace {
        "no space left in the pool".to_owned()
    } else if is_fenced(error) {
        "the volume has another writer (epoch)".to_owned()
    } else {
        error.reason.clone()
    };
    format!("disk {disk}: {} failed: {why}", error.operation)
}

#[cfg(test)]
mod tests {
    use perigee_model::MigrationId;

    use super::*;

    fn order(name: &str) -> MigrateOut {
        MigrateOut {
            migration: MigrationId::new(name).unwrap(),
            uri: "tcp:10.0.0.2:4444".into(),
            destination_agent_url: "http://10.0.0.2:1".into(),
            epochs: vec![],
            downtime_limit_ms: 300,
        }
    }

    fn report(name: &str, phase: MigrationPhase) -> MigrationReport {
        MigrationReport::new(MigrationId::new(name).unwrap(), phase)
    }

    fn info(status: &str, error: &str) -> MigrateInfo {
        MigrateInfo { status: status.into(), error_desc: error.into(), ..MigrateInfo::default() }
    }

    const OWN: &str = "http://10.0.0.1:1";

    #[test]
    fn a_vm_whose_state_was_sent_never_runs_again() {
        let sent = observe(VmStatus::Running, "postmigrate");
        assert_eq!(sent, VmStatus::Migrated);
        assert_eq!(observe(sent, "running"), VmStatus::Migrated);
        assert_eq!(observe(VmStatus::IoError, "postmigrate"), VmStatus::Migrated);
    }

    #[test]
    fn an_incoming_vm_runs_when_its_state_has_arrived() {
        let waiting = observe(VmStatus::Starting, "inmigrate");
        assert_eq!(waiting, VmStatus::Incoming);
        assert_eq!(observe(waiting, "inmigrate"), VmStatus::Incoming);
        assert_eq!(observe(waiting, "running"), VmStatus::Running);
    }

    #[test]
    fn a_vm_that_a_disk_error_stopped_in_the_migration_arrives_and_is_tried_again() {
        let arrived = observe(VmStatus::Incoming, "io-error");
        assert_eq!(arrived, VmStatus::IoError);
        assert!(has_arrived(arrived) && may_retry(arrived, None, false, true));
        assert_eq!(observe(VmStatus::Incoming, "shutdown"), VmStatus::Shutdown);
        assert_eq!(observe(VmStatus::Incoming, "paused"), VmStatus::Incoming);
        assert!(!has_arrived(VmStatus::Incoming));
    }

    #[test]
    fn an_unknown_run_state_changes_nothing() {
        assert_eq!(observe(VmStatus::Running, "colo"), VmStatus::Running);
        assert_eq!(observe(VmStatus::Starting, "prelaunch"), VmStatus::Starting);
    }

    #[test]
    fn the_same_migration_again_changes_nothing() {
        let last = report("m-1", MigrationPhase::Copying);
        assert_eq!(may_begin(VmStatus::Running, Some(&last), &order("m-1"), OWN), Ok(false));
    }

    #[test]
    fn one_migration_at_a_time() {
        let last = report("m-1", MigrationPhase::Switching);
        let refusal = may_begin(VmStatus::Paused, Some(&last), &order("m-2"), OWN);
        assert_eq!(refusal, Err(Refusal::Busy("m-1".into())));
        let last = report("m-1", MigrationPhase::Failed);
        assert_eq!(may_begin(VmStatus::Running, Some(&last), &order("m-2"), OWN), Ok(true));
    }

    #[test]
    fn a_destination_that_is_a_program_or_this_host_is_refused() {
        let exec = MigrateOut { uri: "exec:cat".into(), ..order("m-1") };
        assert!(matches!(may_begin(VmStatus::Running, None, &exec, OWN), Err(Refusal::Uri(_))));
        let here = MigrateOut { destination_agent_url: format!("{OWN}/"), ..order("m-1") };
        assert_eq!(may_begin(VmStatus::Running, None, &here, OWN), Err(Refusal::SameHost));
    }

    #[test]
    fn a_failed_copy_says_why() {
        let ended = while_copying(&info("failed", "Unable to write to socket"));
        assert_eq!(ended, Copying::Ended("Unable to write to socket".into()));
        assert_eq!(
            while_copying(&info("cancelled", "")),
            Copying::Ended("QEMU says: cancelled".into())
        );
        assert_eq!(while_copying(&info("pre-switchover", "")), Copying::AtSwitch);
    }

    #[test]
    fn a_disk_error_is_not_retried_while_the_write_right_may_be_elsewhere() {
        use MigrationPhase as P;
        let retry = |phase, fenced, incoming| may_retry(VmStatus::IoError, phase, fenced, incoming);
        assert!(retry(None, false, false));
        assert!(retry(Some(P::Copying), false, false));
        assert!(retry(Some(P::Failed), false, false));
        assert!(!retry(Some(P::Switching), false, true));
        assert!(!retry(Some(P::Completed), false, true));
        assert!(!retry(None, true, false));
        assert!(retry(None, true, true));
        assert!(!may_retry(VmStatus::Paused, None, false, false));
    }

    #[test]
    fn a_full_pool_is_said_in_plain_words() {
        let error = BlockIoError {
            node_name: "data0".into(),
            operation: "write".into(),
            nospace: true,
            ..BlockIoError::default()
        };
        assert_eq!(describe(&error), "disk data0: write failed: no space left in the pool");
    }
}
