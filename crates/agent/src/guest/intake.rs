//! Which of a guest's messages to store: a pure decision by their numbers.
//!
//! If the last stored number is known, the next one is stored; every other message is either known or too
//! early. At the destination of a migration the first number is not known: the guest continues with any
//! number, and it repeats the messages that the source has not acknowledged only after it has read
//! `resume`. Acknowledging a later number would lose them. So nothing is stored until the guest starts
//! again: at the first message `resume` is sent once more, and the message at which the numbers step back
//! (or repeat) is the oldest unacknowledged one.

/// What is done with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Store,
    /// It was stored before; acknowledge it again.
    Known,
    /// Send `resume`.
    AskAgain,
    /// Neither store nor acknowledge it; it will come again.
    Wait,
}

/// Which of the messages of one connection are stored.
#[derive(Debug, PartialEq, Eq)]
pub struct Intake {
    place: Position,
}

#[derive(Debug, PartialEq, Eq)]
enum Position {
    After {
        last: u64,
        /// `resume` was sent because of a gap, and the guest has not stepped back yet.
        asked: bool,
    },
    Unknown {
        previous: Option<u64>,
    },
}

impl Intake {
    /// The state for a new connection. `last` is the last stored number, or 0.
    pub fn new(last: u64, from_start: bool) -> Self {
        let place = if last > 0 || from_start {
            Position::After { last, asked: false }
        } else {
            Position::Unknown { previous: None }
        };
        Self { place }
    }

    /// Decides about the message with this number.
    pub fn judge(&mut self, seq: u64) -> Verdict {
        match &mut self.place {
            Position::After { last, asked } => {
                if seq == *last + 1 {
                    *last = seq;
                    *asked = false;
                    Verdict::Store
                } else if seq <= *last {
                    Verdict::Known
                } else if *asked {
                    Verdict::Wait
                } else {
                    *asked = true;
                    Verdict::AskAgain
                }
            }
            Position::Unknown { previous: None } => {
                self.place = Position::Unknown { previous: Some(seq) };
                Verdict::AskAgain
            }
            Position::Unknown { previous: Some(previous) } if seq > *previous => {
                *previous = seq;
                Verdict::Wait
            }
            Position::Unknown { .. } => {
                self.place = Position::After { last: seq, asked: false };
                Verdict::Store
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Verdict::{AskAgain, Known, Store, Wait};
    use super::*;

    fn judge_all(mut intake: Intake, numbers: &[u64]) -> Vec<Verdict> {
        numbers.iter().map(|seq| intake.judge(*seq)).collect()
    }

    #[test]
    fn numbers_in_order_are_stored_and_old_ones_are_known() {
        assert_eq!(judge_all(Intake::new(0, true), &[1, 2, 1, 3]), [Store, Store, Known, Store]);
        assert_eq!(judge_all(Intake::new(5, false), &[5, 6]), [Known, Store]);
    }

    #[test]
    fn a_gap_is_asked_for_once() {
        let verdicts = judge_all(Intake::new(1, true), &[3, 4, 2, 3, 5]);
        assert_eq!(verdicts, [AskAgain, Wait, Store, Store, AskAgain]);
    }

    #[test]
    fn after_a_migration_nothing_is_stored_before_the_guest_starts_again() {
        // 13 was new; 10 to 12 were on their way to the source when the guest moved.
        let verdicts = judge_all(Intake::new(0, false), &[13, 10, 11, 12, 13, 10, 14]);
        assert_eq!(verdicts, [AskAgain, Store, Store, Store, Store, Known, Store]);
    }

    #[test]
    fn after_a_migration_one_message_twice_is_enough() {
        assert_eq!(judge_all(Intake::new(0, false), &[10, 10, 11]), [AskAgain, Store, Store]);
        assert_eq!(judge_all(Intake::new(0, false), &[10, 11, 10]), [AskAgain, Wait, Store]);
    }
}
