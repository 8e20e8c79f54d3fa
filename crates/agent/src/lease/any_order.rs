//! In whatever order the controller is heard, the agent is away and the machine is started again: no host outlives its lease, and none ends while the
//! lease runs.
//!
//! The reference counts the time for which the machine was on since its controller was heard. It knows two things of the lease: what is kept may be some
//! seconds old when the agent or the machine is started again, and nobody counts the time before a reboot in which no agent ran.

use std::path::PathBuf;
use std::sync::Mutex;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const LENGTH_S: u64 = 100;
const LENGTH_MS: u64 = LENGTH_S * 1000;
const TICK_MS: u64 = 1000;
/// The agent starts so long after the kernel.
const BOOT_MS: u64 = 5000;

#[derive(Debug, Clone, Copy)]
enum Step {
    /// The agent runs, and hears the controller in each of so many seconds.
    Heard(u64),
    /// The agent runs, and hears nobody.
    Silent(u64),
    /// No agent runs. Then it is started again.
    Away(u64),
    /// The machine is started again.
    Reboot,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (1..30_u64).prop_map(Step::Heard),
        4 => (1..60_u64).prop_map(Step::Silent),
        1 => (0..60_u64).prop_map(Step::Away),
        1 => Just(Step::Reboot),
    ]
}

struct World {
    lease: Lease,
    disk: Option<Kept>,
    boot: u32,
    now_ms: u64,
    /// When this agent has heard the controller.
    commanded_ms: Option<u64>,
    /// For how long the machine was on since the controller was heard.
    silent_ms: u64,
    /// What of that nobody counts.
    unseen_ms: u64,
    /// The newest renewal may not have been kept.
    was_started_again: bool,
    has_ended: bool,
}

fn lease(disk: Option<Kept>, boot: u32, now_ms: u64) -> Lease {
    let boot_id = format!("boot {boot}");
    let state = Mutex::new(State::begin(disk, &boot_id, now_ms, LENGTH_MS));
    Lease { length_s: LENGTH_S, end: String::new(), boot_id, path: PathBuf::new(), state }
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            lease: lease(None, 0, BOOT_MS),
            disk: None,
            boot: 0,
            now_ms: BOOT_MS,
            commanded_ms: None,
            silent_ms: 0,
            unseen_ms: 0,
            was_started_again: false,
            has_ended: false,
        };
        world.disk = world.lease.look(BOOT_MS, None).keep;
        world
    }

    fn pass(&mut self, is_heard: bool) {
        self.now_ms += TICK_MS;
        self.silent_ms += TICK_MS;
        if is_heard {
            self.commanded_ms = Some(self.now_ms);
            (self.silent_ms, self.unseen_ms, self.was_started_again) = (0, 0, false);
        }
    }

    fn look(&mut self) -> Result<(), TestCaseError> {
        let look = self.lease.look(self.now_ms, self.commanded_ms);
        self.disk = look.keep.or(self.disk.take());
        self.has_ended = look.ends;
        let late_ms = LENGTH_MS + self.unseen_ms + TICK_MS;
        prop_assert!(look.ends || self.silent_ms < late_ms, "silent for {} ms", self.silent_ms);
        // What was kept last may be older than the last renewal.
        let early_ms = if self.was_started_again { KEEP_EVERY_MS + TICK_MS } else { 0 };
        let is_due = self.silent_ms + early_ms >= LENGTH_MS;
        prop_assert!(!look.ends || is_due, "ended after {} ms", self.silent_ms);
        Ok(())
    }

    fn start_again(&mut self) {
        self.lease = lease(self.disk.clone(), self.boot, self.now_ms);
        (self.commanded_ms, self.was_started_again) = (None, true);
    }

    fn go(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Heard(seconds) | Step::Silent(seconds) => {
                for _ in 0..seconds {
                    self.pass(matches!(step, Step::Heard(_)));
                    self.look()?;
                    if self.has_ended {
                        return Ok(());
                    }
                }
            }
            Step::Away(seconds) => {
                (0..seconds).for_each(|_| self.pass(false));
                self.start_again();
                self.look()?;
            }
            Step::Reboot => {
                let kept_ms = self.disk.as_ref().map_or(0, |kept| kept.seen_ms);
                self.unseen_ms += self.now_ms - kept_ms;
                self.boot += 1;
                self.now_ms = BOOT_MS;
                self.silent_ms += BOOT_MS;
                self.start_again();
                self.look()?;
            }
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn no_host_outlives_its_lease_and_none_ends_before(steps in vec(step(), 1..40)) {
        let mut world = World::new();
        for step in steps {
            world.go(step)?;
            if world.has_ended {
                return Ok(());
            }
        }
        // Its controller is gone for good.
        world.go(Step::Silent(LENGTH_S + world.unseen_ms / TICK_MS + 2))?;
        prop_assert!(world.has_ended);
    }
}
