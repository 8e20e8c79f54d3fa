//! The guest's clock, which stands still while its VM does: in the pause of a move, or while a disk does not answer.

use std::time::Duration;

use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime, clock_settime};

use crate::console;

/// A clock that is less behind stays as it is: the host's word takes a moment too.
const BEHIND_MIN: Duration = Duration::from_millis(50);

/// Sets the clock to the host's time if it is behind. It never goes back: programs rely on that.
pub fn catch_up(host_us: u64) {
    let host = Duration::from_micros(host_us);
    let Ok(own) = clock_gettime(ClockId::CLOCK_REALTIME).map(Duration::from) else { return };
    let Some(behind) = behind(own, host) else { return };
    match clock_settime(ClockId::CLOCK_REALTIME, TimeSpec::from_duration(host)) {
        Ok(()) => console(&format!("the clock was {} ms behind and is set", behind.as_millis())),
        Err(error) => console(&format!("the clock is {} ms behind: {error}", behind.as_millis())),
    }
}

fn behind(own: Duration, host: Duration) -> Option<Duration> {
    host.checked_sub(own).filter(|behind| *behind >= BEHIND_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_set_forward_only() {
        let at = Duration::from_millis;
        assert_eq!(behind(at(10_000), at(10_960)), Some(at(960)));
        assert_eq!(behind(at(10_000), at(10_020)), None);
        assert_eq!(behind(at(10_000), at(9_000)), None);
    }
}
