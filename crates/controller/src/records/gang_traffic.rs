//! What the VMs of a gang have sent to each other.

use std::collections::BTreeMap;

use perigee_model::HostId;
use perigee_model::gang::of_member;
use perigee_model::vm::SentTo;
use serde::{Deserialize, Serialize};

/// What one member has sent to the others, by their ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Talk {
    /// Since its VM was first started.
    pub bytes: BTreeMap<u32, u64>,
    /// Where it was counted last, and how far the counters were.
    at: Option<HostId>,
    last: BTreeMap<u32, u64>,
}

impl Talk {
    /// Adds what the member has sent since the last reading. `sent` are the counters of the host where its VM is; those
    /// of another host begin anew.
    pub fn read(&mut self, host: &HostId, sent: &[SentTo]) {
        if self.at.as_ref() != Some(host) {
            self.at = Some(host.clone());
            self.last.clear();
        }
        for SentTo { to, bytes } in sent {
            let Some((_, rank)) = of_member(to.as_str()) else { continue };
            let last = self.last.insert(rank, *bytes).unwrap_or_default();
            // Counters that are smaller than before have begun anew.
            let more = bytes.checked_sub(last).unwrap_or(*bytes);
            *self.bytes.entry(rank).or_default() += more;
        }
    }

    /// To each rank. Empty if nothing was counted.
    pub fn by_rank(&self, count: u32) -> Vec<u64> {
        let of = |rank| self.bytes.get(&rank).copied().unwrap_or_default();
        if self.bytes.is_empty() { Vec::new() } else { (0..count).map(of).collect() }
    }
}
