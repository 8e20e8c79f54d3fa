//! The records of rented hosts.

use perigee_model::RentalId;
use perigee_model::rental::Rental;
use serde::{Deserialize, Serialize};

/// The prefix of the records of rentals.
pub const RENTALS: &str = "rentals/";

/// A rented host with everything its driver must know after a restart.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RentalRecord {
    /// As shown to people.
    pub view: Rental,
    /// Where its host reaches the controller.
    pub controller_url: Option<String>,
    /// The secret of its host's join token, until nobody needs the token any more. Each request for the instance has the same one: a provider that
    /// honours the request's token refuses another request with it.
    pub secret: Option<String>,
}

/// How many sources of what has left a site are known one by one.
const SOURCES_KEPT: usize = 256;

/// What has left the site of a rented host because of what is over: runs of VMs, and moves of volumes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftSite {
    /// The sum of the sources that are not listed any more.
    earlier_bytes: u64,
    /// The last sources and their bytes, the newest one last: to note one once more changes nothing.
    last: Vec<(String, u64)>,
}

impl LeftSite {
    /// Notes what has left because of a source, in all.
    pub fn note(&mut self, source: &str, bytes: u64) {
        if let Some((_, known)) = self.last.iter_mut().find(|(of, _)| of == source) {
            *known = bytes.max(*known);
            return;
        }
        self.last.push((source.to_owned(), bytes));
        if self.last.len() > SOURCES_KEPT {
            let (_, bytes) = self.last.remove(0);
            self.earlier_bytes = self.earlier_bytes.saturating_add(bytes);
        }
    }

    /// All of them together.
    pub fn bytes(&self) -> u64 {
        let last = self.last.iter().map(|(_, bytes)| *bytes);
        last.fold(self.earlier_bytes, u64::saturating_add)
    }

    /// Whether the source is one of the last ones.
    pub fn knows(&self, source: &str) -> bool {
        self.last.iter().any(|(of, _)| of == source)
    }
}

/// The prefix of the records of [`LeftSite`].
pub const LEFT_SITES: &str = "left_sites/";

/// The key of a [`LeftSite`].
pub fn left_site_key(rental: &RentalId) -> String {
    format!("{LEFT_SITES}{rental}")
}

/// What people asked for, and the task that rents by itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RentalIntent {
    /// Who wants it to end, as the audit log names them.
    pub ended_by: Option<String>,
    /// Whether that is the rule that rents hosts.
    #[serde(default)]
    pub by_rule: bool,
    /// Its VMs end with it.
    pub now: bool,
    /// Why it is to end, if the cluster gives it back by itself.
    #[serde(default)]
    pub why: Option<String>,
    /// Until when its money is to be reserved, for the jobs that run there; Unix time.
    #[serde(default)]
    pub reserve_until_ms: Option<u64>,
}

/// The key of a [`RentalRecord`].
pub fn rental_key(rental: &RentalId) -> String {
    format!("{RENTALS}{rental}")
}

/// The key of a [`RentalIntent`].
pub fn rental_intent_key(rental: &RentalId) -> String {
    format!("intents/rentals/{rental}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_left_a_site_counts_once_and_old_sources_stay_in_the_sum() {
        let mut left = LeftSite::default();
        for _ in 0..2 {
            left.note("job/a/0", 5);
        }
        left.note("job/a/0", 3);
        assert_eq!(left.bytes(), 5);
        for number in 0..SOURCES_KEPT {
            left.note(&format!("job/b/{number}"), 1);
        }
        assert!(!left.knows("job/a/0") && left.knows("job/b/0"));
        assert_eq!((left.bytes(), left.last.len()), (5 + 256, SOURCES_KEPT));
    }
}
