//! What is decided about a VM and its migration: pure functions, without I/O or clock.

use perigee_model::states::VmEvent;
use perigee_model::switchover::{NotBegun, Sending, Switchover, may_begin};
use perigee_model::vm::{MigrateOut, MigrationReport, VmStatus};

use super::tunnel::SCHEME;
use crate::qmp::{BlockIoError, MigrateInfo};

/// The event of the VM's state machine for a run state of QEMU. `None` if the run state says nothing new.
/// `postmigrate` does not mean that the VM was handed over, because it also follows a migration that failed while
/// the guest was stopped. Only the end of a migration says that.
pub fn event_of(run_state: &str) -> Option<VmEvent> {
    match run_state {
        "inmigrate" => Some(VmEvent::Waits),
        "running" => Some(VmEvent::Resumed),
        "io-error" => Some(VmEvent::DiskError),
        "shutdown" | "guest-panicked" => Some(VmEvent::PoweredOff),
        "paused" | "finish-migrate" | "postmigrate" | "internal-error" | "suspended" | "debug"
        | "save-vm" | "restore-vm" | "watchdog" => Some(VmEvent::Stopped),
        _ => None,
    }
}

/// Whether a failed migration has done all it can to let the guest run again. A guest may be stopped for good, for
/// example after an error of KVM. Then the migration ends too, when it is late. An empty run state is not known.
pub fn is_resume_over(run_state: &str, is_late: bool) -> bool {
    match run_state {
        "running" | "shutdown" | "guest-panicked" => true,
        "" => false,
        _ => is_late,
    }
}

/// The reason for which the guest is stopped in this run state, if the state itself says it.
pub fn reason_of(run_state: &str) -> Option<&'static str> {
    match run_state {
        "internal-error" => Some("QEMU stopped the guest: an internal error of QEMU or of KVM"),
        "guest-panicked" => Some("the guest's kernel panicked"),
        "watchdog" => Some("QEMU stopped the guest: it did not reset its watchdog in time"),
        "suspended" => Some("the guest has gone to sleep"),
        "debug" => Some("QEMU stopped the guest: a debugger holds it"),
        _ => None,
    }
}

/// Why a guest has powered off, from the reason in QEMU's event `SHUTDOWN`.
pub fn shutdown_reason(reason: &str) -> Option<&'static str> {
    match reason {
        "guest-reset" => Some("the guest rebooted, and a job runs only once"),
        "guest-panic" => Some("the guest's kernel panicked"),
        _ => None,
    }
}

/// Why an order to migrate a VM is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error(transparent)]
    NotBegun(#[from] NotBegun),
    #[error("its destination is this host")]
    SameHost,
    #[error("its destination {0:?} is neither tunnel:IP:PORT nor tcp:IP:PORT")]
    Uri(String),
}

/// Whether to begin the migration. `Ok(false)` if this migration was begun before.
pub fn may_migrate(
    status: VmStatus,
    last: Option<&MigrationReport>,
    order: &MigrateOut,
    own_url: &str,
) -> Result<bool, Refusal> {
    let last = last.map(|last| (last.number, last.phase));
    if !may_begin(status, last, order.number)? {
        return Ok(false);
    }
    if order.destination_agent_url.trim_end_matches('/') == own_url.trim_end_matches('/') {
        return Err(Refusal::SameHost);
    }
    // QEMU accepts other kinds of addresses, and `exec:` would start a program.
    if !["tcp:", SCHEME].iter().any(|kind| order.uri.starts_with(kind)) {
        return Err(Refusal::Uri(order.uri.clone()));
    }
    Ok(true)
}

/// How far QEMU is with sending, from its answer to `query-migrate`. A QEMU that was not told to send yet answers
/// with the migration by which its VM came. That answer has no figures of the memory
/// (`fill_source_migration_info` in QEMU's `migration.c`).
pub fn sending(info: &MigrateInfo) -> Sending {
    match info.status.as_str() {
        "completed" if info.ram.page_size == 0 => Sending::Ended,
        "pre-switchover" => Sending::AtSwitch,
        "device" => Sending::BehindSwitch,
        "cancelling" => Sending::Ending,
        "completed" => Sending::Completed,
        "" | "none" | "failed" | "cancelled" => Sending::Ended,
        _ => Sending::Copying,
    }
}

/// What may lie between the two QEMUs, in the buffers of sockets and of what encrypts.
const BETWEEN_BYTES_MAX: u64 = 16 << 20;

/// Whether the destination may not have taken anything yet. The guest runs.
pub fn is_connecting(info: &MigrateInfo) -> bool {
    let is_sending = info.status == "active" && info.ram.transferred < BETWEEN_BYTES_MAX;
    info.status == "setup" || is_sending
}

/// Why QEMU has stopped sending.
pub fn why_ended(info: &MigrateInfo) -> String {
    match info.status.as_str() {
        // The order was stored, and QEMU has not got it.
        "" | "none" | "completed" => {
            "the agent ended before it told QEMU to send the VM".to_owned()
        }
        "failed" if info.error_desc.is_empty() => {
            "QEMU could not send the VM, and does not say why".to_owned()
        }
        other if info.error_desc.is_empty() => format!("QEMU says: {other}"),
        _ => info.error_desc.clone(),
    }
}

/// Whether to try to continue a VM that a disk error has stopped. `switchover` is the state of its last migration,
/// and `None` if that is not known. After a fenced write, only a VM that came by migration is continued: its source
/// may have taken the write right back, and gives it up again when it learns that the VM has run here.
pub fn may_retry(
    status: VmStatus,
    switchover: Option<Switchover>,
    is_fenced: bool,
    has_come: bool,
) -> bool {
    let free = switchover.is_some_and(Switchover::may_source_run);
    status == VmStatus::IoError && free && (!is_fenced || has_come)
}

/// Why a disk has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskError {
    NoSpace,
    /// Another epoch writes the volume now. The volume server answers `EPERM`.
    Fenced,
    Other(String),
}

impl DiskError {
    /// What QEMU's event says of the disk.
    pub fn of(error: &BlockIoError) -> Self {
        // The event has only the C library's text of the error, and no error number.
        let fenced = std::io::Error::from_raw_os_error(nix::libc::EPERM).to_string();
        if error.nospace {
            Self::NoSpace
        } else if fenced.strip_suffix(" (os error 1)") == Some(error.reason.as_str()) {
            Self::Fenced
        } else {
            Self::Other(error.reason.clone())
        }
    }
}

/// Describes an error of a disk for people.
pub fn describe(error: &BlockIoError) -> String {
    let disk = if error.node_name.is_empty() { &error.device } else { &error.node_name };
    let why = match DiskError::of(error) {
        DiskError::NoSpace => "no space left in the pool".to_owned(),
        DiskError::Fenced => "the volume has another writer (epoch)".to_owned(),
        DiskError::Other(reason) => {
            format!("{reason} (the log of this host's volume server says why)")
        }
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
            number: 1,
            uri: "tcp:10.0.0.2:4444".into(),
            destination_agent_url: "http://10.0.0.2:1".into(),
            destination: None,
            epochs: vec![],
            downtime_limit_ms: 300,
            compressed: false,
            max_bytes_per_s: None,
            throttle_percent: None,
            grant: None,
        }
    }

    fn info(status: &str, error: &str) -> MigrateInfo {
        MigrateInfo { status: status.into(), error_desc: error.into(), ..MigrateInfo::default() }
    }

    const OWN: &str = "http://10.0.0.1:1";

    #[test]
    fn a_migration_that_failed_while_the_guest_stood_still_has_not_handed_it_over() {
        assert_eq!(event_of("postmigrate"), Some(VmEvent::Stopped));
    }

    #[test]
    fn a_migration_that_failed_ends_though_its_guest_cannot_run_again() {
        for state in ["internal-error", "io-error", "paused", "postmigrate", "watchdog"] {
            assert!(!is_resume_over(state, false), "{state}");
            assert!(is_resume_over(state, true), "{state}");
        }
        assert!(is_resume_over("running", false) && !is_resume_over("", true));
    }

    #[test]
    fn a_guest_that_panicked_or_rebooted_has_ended_and_the_reason_is_said() {
        assert_eq!(event_of("guest-panicked"), Some(VmEvent::PoweredOff));
        assert_eq!(reason_of("guest-panicked"), Some("the guest's kernel panicked"));
        assert!(shutdown_reason("guest-reset").unwrap().contains("rebooted"));
        assert_eq!(shutdown_reason("guest-shutdown"), None);
    }

    #[test]
    fn an_internal_error_of_qemu_is_named() {
        assert_eq!(event_of("internal-error"), Some(VmEvent::Stopped));
        assert!(reason_of("internal-error").unwrap().contains("internal error"));
    }

    #[test]
    fn an_unknown_run_state_changes_nothing() {
        assert_eq!((event_of("colo"), event_of("prelaunch")), (None, None));
    }

    #[test]
    fn a_destination_that_is_a_program_or_this_host_is_refused() {
        let exec = MigrateOut { uri: "exec:cat".into(), ..order("m-1") };
        assert!(matches!(may_migrate(VmStatus::Running, None, &exec, OWN), Err(Refusal::Uri(_))));
        let tunnel = MigrateOut { uri: "tunnel:10.0.0.2:4444".into(), ..order("m-1") };
        assert_eq!(may_migrate(VmStatus::Running, None, &tunnel, OWN), Ok(true));
        let here = MigrateOut { destination_agent_url: format!("{OWN}/"), ..order("m-1") };
        assert_eq!(may_migrate(VmStatus::Running, None, &here, OWN), Err(Refusal::SameHost));
    }

    #[test]
    fn a_failed_copy_says_why() {
        assert_eq!(why_ended(&info("failed", "Unable to write")), "Unable to write");
        assert!(why_ended(&info("failed", "")).contains("does not say why"));
        assert_eq!(why_ended(&info("cancelled", "")), "QEMU says: cancelled");
        let never_told = "the agent ended before it told QEMU to send the VM";
        assert_eq!(why_ended(&info("none", "")), never_told);
        assert_eq!(sending(&info("pre-switchover", "")), Sending::AtSwitch);
        assert_eq!(sending(&info("wait-unplug", "")), Sending::Copying);
    }

    #[test]
    fn the_migration_by_which_a_vm_came_is_not_one_from_here() {
        let mut completed = info("completed", "");
        assert_eq!(sending(&completed), Sending::Ended);
        completed.ram.page_size = 4096;
        assert_eq!(sending(&completed), Sending::Completed);
    }

    #[test]
    fn a_disk_error_is_not_retried_while_the_write_right_may_be_elsewhere() {
        use Switchover as S;
        let retry = |at, fenced, has_come| may_retry(VmStatus::IoError, at, fenced, has_come);
        assert!(retry(Some(S::Source), false, false));
        for elsewhere in [None, Some(S::LetGo), Some(S::Returning), Some(S::Destination)] {
            assert!(!retry(elsewhere, false, true), "{elsewhere:?}");
        }
        assert!(!retry(Some(S::Source), true, false));
        assert!(retry(Some(S::Source), true, true));
        assert!(!may_retry(VmStatus::Paused, Some(S::Source), false, false));
    }

    #[test]
    fn errors_of_a_disk_are_told_apart_and_said_in_plain_words() {
        let full = BlockIoError {
            node_name: "data0".into(),
            operation: "write".into(),
            nospace: true,
            ..BlockIoError::default()
        };
        assert_eq!(describe(&full), "disk data0: write failed: no space left in the pool");
        let lost = BlockIoError { operation: "flush".into(), nospace: false, ..full.clone() };
        let lost = BlockIoError { reason: "Input/output error".into(), ..lost };
        assert_eq!(
            describe(&lost),
            "disk data0: flush failed: Input/output error (the log of this host's volume server says why)"
        );
        let reason = |reason: &str| BlockIoError { reason: reason.into(), ..Default::default() };
        assert_eq!(DiskError::of(&reason("Operation not permitted")), DiskError::Fenced);
        let other = DiskError::Other("Input/output error".into());
        assert_eq!(DiskError::of(&reason("Input/output error")), other);
    }
}
