//! What a rented host says of itself: when it ends without its controller, and when its provider takes it back.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::units::{format_duration, format_time};

/// That a rented host ends itself when its controller is not heard for too long, as its agent says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostLease {
    /// How long the controller may be silent.
    pub length_s: u64,
    /// How much of that was left when the agent reported.
    pub left_s: u64,
    /// The command that ends the host.
    pub end: String,
    /// Was that command carried out? While the host still runs, it is repeated every 10 minutes.
    pub is_over: bool,
}

impl HostLease {
    /// In words, as `host info` shows it.
    pub fn in_words(&self) -> String {
        let Self { length_s, left_s, end, is_over } = self;
        if *is_over {
            return format!("it is over, and `{end}` was carried out");
        }
        let (length, left) = (format_duration(*length_s), format_duration(*left_s));
        format!("{left} of {length} without the controller are left; then the host runs `{end}`")
    }
}

/// A provider's word that it will take the machine of a host back, as the machine itself has heard it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostNotice {
    /// What becomes of the machine, in the provider's word: `terminate`, `stop` or `hibernate` on EC2.
    pub action: String,
    /// When, in seconds since 1970.
    pub ends_unix_s: u64,
}

impl HostNotice {
    /// In words, as `host info` shows it.
    pub fn in_words(&self) -> String {
        let when = format_time(self.ends_unix_s.saturating_mul(1000));
        format!("{} at {when}", self.action)
    }
}
