//! Which controller commands the hosts.
//!
//! Each start of a controller has a number that is greater than that of the start before, and a random id. Both are in each request to a
//! host ([`TERM_HEADER`]). A host keeps the greatest that it has seen, and refuses older ones: [`Shown::of`]. What proves a term is the signature of
//! the cluster's authority, so no host can stop a controller with a number that it has made up.

use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The header of a request that shows a [`SignedTerm`], and of the answer that refuses it because of another one.
pub const TERM_HEADER: &str = "perigee-term";

/// A copy that becomes the controller gets the next multiple of this: the original has not been started so often since.
pub const TAKE_OVER_STEP: u64 = 1_000_000;

/// One start of a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Term {
    /// Grows by one with each start.
    pub number: u64,
    /// Which start it is: two copies of one state reach the same number.
    pub start: Uuid,
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (start {})", self.number, &self.start.simple().to_string()[..8])
    }
}

/// A [`Term`] as the controller shows it: the authority's signature in hexadecimal, a blank, and the term as JSON. Nothing is signed in a
/// cluster without certificates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SignedTerm(pub String);

/// What a host makes of a term that it is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// The one that commands here.
    Same,
    /// It commands from now on.
    Newer,
    /// It does not command any more, or another start has got its number first.
    Older,
}

impl Shown {
    /// Compared with the greatest so far; `None` if there was none.
    pub fn of(shown: Term, greatest: Option<Term>) -> Self {
        match greatest {
            Some(greatest) if greatest == shown => Self::Same,
            Some(greatest) if greatest.number >= shown.number => Self::Older,
            _ => Self::Newer,
        }
    }
}

/// The number that a copy takes over with: above this one, and above what an original with it has reached. `None` if there is none.
pub fn taken_over(greatest: u64) -> Option<u64> {
    (greatest / TAKE_OVER_STEP).checked_add(1)?.checked_mul(TAKE_OVER_STEP)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn term(number: u64) -> Term {
        Term { number, start: Uuid::new_v4() }
    }

    #[test]
    fn a_host_is_commanded_by_the_greatest_term_and_by_the_first_start_that_has_it() {
        let (old, now) = (term(6), term(7));
        assert_eq!(Shown::of(now, None), Shown::Newer);
        assert_eq!(Shown::of(now, Some(old)), Shown::Newer);
        assert_eq!(Shown::of(now, Some(now)), Shown::Same);
        assert_eq!(Shown::of(old, Some(now)), Shown::Older);
        assert_eq!(Shown::of(term(7), Some(now)), Shown::Older, "a copy that has counted as far");
    }

    #[test]
    fn who_takes_over_is_above_what_the_original_reaches_by_its_starts() {
        assert_eq!(taken_over(7), Some(1_000_000));
        assert_eq!(taken_over(1_000_000), Some(2_000_000));
        assert_eq!(taken_over(u64::MAX), None);
    }
}
