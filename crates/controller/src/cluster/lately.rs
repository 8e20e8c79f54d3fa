//! What was gathered a short time ago about all VMs at once, for those who look at each of them again and again.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use perigee_model::{HostId, JobId, VolumeName};
use perigee_planner::Cluster as Facts;

use super::Lane;

/// What decisions about all running VMs have in common.
#[derive(Debug)]
pub struct Gathered {
    /// As for a decision about no VM.
    pub facts: Facts,
    /// How many running VMs use their disks over each link, whatever the direction.
    pub users: BTreeMap<Lane, usize>,
    /// The volumes that VMs write away from their homes: when each VM came to its host (Unix time), its job, and the host.
    pub written: BTreeMap<VolumeName, Vec<(u64, JobId, HostId)>>,
}

/// The last of them, and when it was gathered.
#[derive(Debug, Default)]
pub struct Lately(Mutex<Option<(Instant, Arc<Gathered>)>>);

impl Lately {
    /// What was gathered no longer ago than this, or is gathered now. Whoever asks meanwhile waits for the same: nothing is waited
    /// for while it is gathered.
    pub fn get(&self, age_max: Duration, gather: impl FnOnce() -> Gathered) -> Arc<Gathered> {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, gathered)) = &*last
            && at.elapsed() < age_max
        {
            return Arc::clone(gathered);
        }
        let begun = Instant::now();
        let gathered = Arc::new(gather());
        *last = Some((begun, Arc::clone(&gathered)));
        gathered
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn many_who_ask_at_once_cost_one_walk_over_all_vms() {
        let (lately, walks) = (Lately::default(), Cell::new(0));
        let ask = |age_max| {
            lately.get(age_max, || {
                walks.set(walks.get() + 1);
                let (users, written) = (BTreeMap::new(), BTreeMap::new());
                Gathered { facts: Facts::default(), users, written }
            })
        };
        let first = ask(Duration::from_secs(3600));
        for _ in 0..500 {
            assert!(Arc::ptr_eq(&first, &ask(Duration::from_secs(3600))));
        }
        assert_eq!(walks.get(), 1);
        ask(Duration::ZERO);
        assert_eq!(walks.get(), 2, "what is too old is gathered anew");
    }
}
