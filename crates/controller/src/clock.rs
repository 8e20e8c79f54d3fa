//! The system's clock, and what is said of it when it was set by much.

pub use perigee_http::certificate::now_ms;
use perigee_http::clock::Jump;
use perigee_model::units::format_duration;

/// What the controller has seen of the system's clock.
pub const CLOCK: &str = "clock";

/// What has happened to the clock.
pub fn in_words(jump: Jump) -> String {
    let way = if jump.is_ahead() { "ahead" } else { "back" };
    format!("the controller's clock was set {way} by {}", format_duration(jump.length().as_secs()))
}
