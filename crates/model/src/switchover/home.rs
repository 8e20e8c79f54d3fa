//! The writer epochs of one volume, as its home keeps them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Epoch;
use crate::volume::EpochChange;

/// Which epochs were issued and which one may write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub struct WriterEpochs {
    /// Sessions of this epoch may write, and no others.
    pub current: Epoch,
    /// The highest that was ever given out; none is given out twice.
    pub issued_max: Epoch,
    /// Up to this one, epochs were given back by migrations that failed.
    pub returned_max: Epoch,
}

/// Why an epoch stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EpochRefused {
    /// Nobody was ever given the epoch to change to.
    #[error("epochs up to {issued_max} were issued")]
    NotIssued {
        /// The highest that was given out.
        issued_max: Epoch,
    },
    /// Another change came first.
    #[error("its epoch is {current}, not {from}")]
    NotFrom {
        /// The volume's epoch.
        current: Epoch,
        /// What the change took it for.
        from: Epoch,
    },
    /// A migration gave it up: this is its raise, which comes late.
    #[error("this epoch was given back before")]
    Returned,
}

impl WriterEpochs {
    /// One more epoch, with which nobody writes until it is raised.
    #[must_use]
    pub fn issue(self) -> Self {
        Self { issued_max: Epoch(self.issued_max.0 + 1), ..self }
    }

    /// Compare-and-swap, where a repeated call succeeds. A change to an older epoch gives `from`
    /// back for good.
    ///
    /// # Errors
    /// [`EpochRefused`] when the change is not the next one, or comes late.
    pub fn apply(self, change: EpochChange) -> Result<Self, EpochRefused> {
        let EpochChange { from, to } = change;
        if to.0 == 0 || to > self.issued_max {
            return Err(EpochRefused::NotIssued { issued_max: self.issued_max });
        }
        if self.current != from && self.current != to {
            return Err(EpochRefused::NotFrom { current: self.current, from });
        }
        if to < from {
            let returned_max = self.returned_max.max(from.min(self.issued_max));
            return Ok(Self { current: to, returned_max, ..self });
        }
        if self.current != to && to <= self.returned_max {
            return Err(EpochRefused::Returned);
        }
        Ok(Self { current: to, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epochs(current: u64, issued_max: u64, returned_max: u64) -> WriterEpochs {
        let [current, issued_max, returned_max] = [current, issued_max, returned_max].map(Epoch);
        WriterEpochs { current, issued_max, returned_max }
    }

    fn change(from: u64, to: u64) -> EpochChange {
        EpochChange { from: Epoch(from), to: Epoch(to) }
    }

    #[test]
    fn an_epoch_changes_only_from_the_one_expected_to_one_that_was_issued() {
        let at_3 = epochs(3, 5, 0);
        let at_5 = at_3.apply(change(3, 5)).unwrap();
        assert_eq!(at_5, epochs(5, 5, 0));
        assert_eq!(at_5.apply(change(3, 5)), Ok(at_5), "a repeated call");
        let refused = epochs(4, 5, 0).apply(change(3, 5));
        assert_eq!(refused, Err(EpochRefused::NotFrom { current: Epoch(4), from: Epoch(3) }));
        let refused = epochs(3, 4, 0).apply(change(3, 5));
        assert_eq!(refused, Err(EpochRefused::NotIssued { issued_max: Epoch(4) }));
        assert!(at_3.apply(change(3, 0)).is_err(), "no epoch");
    }

    #[test]
    fn a_raise_that_comes_after_its_epoch_was_given_back_is_refused() {
        let back = epochs(2, 2, 0).apply(change(2, 1)).unwrap();
        assert_eq!(back, epochs(1, 2, 2));
        assert_eq!(back.apply(change(2, 1)), Ok(back), "a repeated call");
        assert_eq!(back.apply(change(1, 2)), Err(EpochRefused::Returned));
        assert_eq!(back.issue().apply(change(1, 3)), Ok(epochs(3, 3, 2)), "the next migration");
    }

    #[test]
    fn an_epoch_that_was_never_raised_is_given_back_as_well() {
        let back = epochs(1, 2, 0).apply(change(2, 1)).unwrap();
        assert_eq!(back.apply(change(1, 2)), Err(EpochRefused::Returned));
    }
}
