//! Whether a running VM moves now.

use perigee_model::HostId;
use perigee_model::plan::Plan;

#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    Stay {
        reason: String,
        /// Lost to the network since the VM came to this host.
        lost_s: f64,
        /// Of the best move, if there is a better place.
        cost_s: Option<f64>,
    },
    Move {
        to: HostId,
        reason: String,
        plan: Plan,
    },
}
