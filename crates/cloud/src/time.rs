//! Now, and points in time as EC2 wants them written. [`perigee_model::units::parse_time`] reads what EC2 writes.

use std::time::{SystemTime, UNIX_EPOCH};

use perigee_model::units::format_time;

/// Seconds since 1970.
pub fn now_unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// As in `2026-11-29T12:36:00Z`.
pub fn extended(unix_s: u64) -> String {
    format_time(unix_s.saturating_mul(1000)).replacen(' ', "T", 1).replace(" UTC", "Z")
}

/// As in `20261129T123600Z`.
pub fn basic(unix_s: u64) -> String {
    extended(unix_s).replace(['-', ':'], "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written() {
        assert_eq!(extended(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(basic(1_440_938_160), "20150830T123600Z");
    }
}
