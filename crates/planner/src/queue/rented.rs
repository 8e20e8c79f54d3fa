//! Hosts that the cluster has rented by itself. They cost money, and are there for jobs for which waiting costs more. So a job starts there only if
//! the renting rule has put it there ([`crate::rent::planned`]), or if its file names the host. A job that the rule has put there leaves the
//! cluster's own hosts to others, also while the host is still starting.

use std::collections::{BTreeMap, BTreeSet};

use perigee_model::units::format_seconds;
use perigee_model::{HostId, JobId};

/// A job that starts in so many seconds starts now.
const NOW_S: f64 = 1.0;

/// What the renting rule says of the jobs that wait.
#[derive(Debug, Clone, Default)]
pub struct Rented {
    /// The hosts that it has rented.
    pub hosts: BTreeSet<HostId>,
    /// The jobs that it has put there.
    pub goes: BTreeMap<JobId, Goes>,
}

/// Where the renting rule has put a job.
#[derive(Debug, Clone, PartialEq)]
pub struct Goes {
    /// Which host.
    pub host: HostId,
    /// In how many seconds the job would start there.
    pub start_s: f64,
    /// Whether the host is still starting.
    pub is_starting: bool,
}

impl Goes {
    /// Why the job waits for it; `None` if the job starts there now.
    pub(super) fn why_wait(&self) -> Option<String> {
        let (host, in_s) = (&self.host, format_seconds(self.start_s));
        match (self.is_starting, self.start_s <= NOW_S) {
            (true, _) => {
                Some(format!("rented host {host} is starting for it, and is expected in {in_s}"))
            }
            (false, false) => Some(format!(
                "it is to run at rented host {host}, where room for it is expected in {in_s}"
            )),
            (false, true) => None,
        }
    }
}
