//! The system's clock, and what is said of it when it was set by much.

use std::time::{SystemTime, UNIX_EPOCH};

use perigee_http::clock::Jump;
use perigee_model::units::format_duration;

/// What the controller has seen of the system's clock.
pub const CLOCK: &str = "clock";

pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// What has happened to the clock.
pub fn in_words(jump: Jump) -> String {
    let way = if jump.is_ahead() { "ahead" } else { "back" };
    format!("the controller's clock was set {way} by {}", format_duration(jump.length().as_secs()))
}
