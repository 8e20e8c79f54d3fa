//! Whether a program that makes an image gets on, and why it is ended.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::time::TimeValLike as _;
use nix::time::ClockId;
use nix::unistd::Pid;
use perigee_model::Problem;

pub(crate) const SECTOR_BYTES: u64 = 512;

pub(crate) fn no_room(what: &str) -> Problem {
    let why = "the pool's disk has no room for it beside what is left free for clients' writes";
    Problem::no_space(what, why).next("free space in the pool")
}

/// Since when nothing has changed.
pub(crate) struct Silence {
    seen: Footprint,
    since: Instant,
}

impl Silence {
    pub(crate) fn new(now: Instant) -> Self {
        Self { seen: Footprint::default(), since: now }
    }

    /// What was written since the last look.
    pub(crate) fn newly_written(&self, now: &Footprint) -> u64 {
        now.written_bytes.saturating_sub(self.seen.written_bytes)
    }

    /// How long nothing has changed, when this is seen now.
    pub(crate) fn after(&mut self, seen: Footprint, now: Instant) -> Duration {
        if seen != self.seen {
            *self = Self { seen, since: now };
        }
        now.saturating_duration_since(self.since)
    }
}

/// What changes while `qemu-img` makes progress.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Footprint {
    /// Space of its file on the disk.
    pub(crate) written_bytes: u64,
    /// It reads also where it writes nothing, because there are only zeros.
    pub(crate) cpu_ns: u64,
}

impl Footprint {
    pub(crate) fn of(pid: Option<u32>, writes: Option<&Path>) -> Self {
        let file = writes.and_then(|path| std::fs::metadata(path).ok());
        Self {
            written_bytes: file.map_or(0, |file| file.blocks() * SECTOR_BYTES),
            cpu_ns: pid.and_then(cpu_ns).unwrap_or(0),
        }
    }
}

/// The CPU time that a process has used. Its clock can be read also where `/proc` hides processes of other users (`ProtectProc=` of the unit).
fn cpu_ns(pid: u32) -> Option<u64> {
    let clock = ClockId::pid_cpu_clock_id(Pid::from_raw(i32::try_from(pid).ok()?)).ok()?;
    u64::try_from(clock.now().ok()?.num_nanoseconds()).ok()
}

pub(crate) fn no_progress(what: &str, silence_max: Duration) -> Problem {
    let why = format!("its source has sent nothing for {} s", silence_max.as_secs());
    Problem::unavailable(what, why).next(
        "check that the source answers: for an nbd:// address, that an NBD server runs there and that the \
         network lets this host connect to it; for a file, its disk or file server. Then import it again",
    )
}

pub(crate) fn stopped(what: &str) -> Problem {
    Problem::conflict(what, "it was stopped, because the image was deleted or nobody waited for it")
        .next("import it again if it is still wanted")
}
