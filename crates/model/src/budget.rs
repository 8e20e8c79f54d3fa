//! What a job may cost and by when it is to end; what was reserved for it and what it cost.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::limits::{DEADLINE_S, OutOfLimits};
use crate::money::Money;
use crate::units::{BadUnit, format_duration, parse_duration};

/// What a job's file says about money and about the time by which the job is to end. Without any of it the planner chooses by time alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MoneyRules {
    /// The most that the job may cost, in millionths of a dollar. It starts only where the high end of its predicted price is not above that.
    #[serde(default, rename = "budget_micros", skip_serializing_if = "Option::is_none")]
    pub budget: Option<Money>,
    /// By when it is to end, as `18:00` (the next such time after its submission, UTC) or `in 2h`. It is not ended for being late.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub deadline: Option<Deadline>,
    /// What an hour until its end is worth, in millionths of a dollar: more is paid only for as much time as is worth it.
    #[serde(
        default,
        rename = "waiting_costs_per_hour_micros",
        skip_serializing_if = "Option::is_none"
    )]
    pub waiting_costs_per_hour: Option<Money>,
}

/// By when a job is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Deadline {
    /// At the next such time of a day, UTC.
    At {
        /// Minutes since midnight, below 1440.
        minute: u16,
    },
    /// So long after its submission.
    In {
        /// See [`DEADLINE_S`].
        seconds: u64,
    },
}

const DAY_MS: u64 = 86_400_000;

impl Deadline {
    /// When that is for a job that was submitted then; both Unix time.
    #[must_use]
    pub fn at_ms(self, submitted_ms: u64) -> u64 {
        match self {
            Self::In { seconds } => submitted_ms.saturating_add(seconds.saturating_mul(1000)),
            Self::At { minute } => {
                let today_ms = submitted_ms - submitted_ms % DAY_MS + u64::from(minute) * 60_000;
                if today_ms > submitted_ms { today_ms } else { today_ms.saturating_add(DAY_MS) }
            }
        }
    }
}

/// Why a text is no deadline.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadDeadline {
    /// Neither of the two forms.
    #[error("{0:?} is not a deadline: write a time of the day in UTC, as in 18:00, or in 2h")]
    Form(String),
    /// What follows `in` is no duration.
    #[error(transparent)]
    Duration(#[from] BadUnit),
    /// Too soon or too late.
    #[error(transparent)]
    Limit(#[from] OutOfLimits),
}

/// `18:00`, `18:00 UTC` or `in 2h`.
impl FromStr for Deadline {
    type Err = BadDeadline;

    fn from_str(text: &str) -> Result<Self, BadDeadline> {
        let bad = || BadDeadline::Form(text.chars().take(40).collect());
        let trimmed = text.trim();
        if let Some(rest) = trimmed.strip_prefix("in ") {
            let seconds = DEADLINE_S.check(parse_duration(rest)?)?;
            return Ok(Self::In { seconds });
        }
        let clock = trimmed.strip_suffix("UTC").map_or(trimmed, str::trim_end);
        let (hour, minute) = clock.split_once(':').ok_or_else(bad)?;
        let part = |digits: &str, below: u16| -> Result<u16, BadDeadline> {
            let is_number =
                (1..=2).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
            let number = digits.parse::<u16>().ok().filter(|number| is_number && *number < below);
            number.ok_or_else(bad)
        };
        if minute.len() != 2 {
            return Err(bad());
        }
        let minute = part(hour, 24)? * 60 + part(minute, 60)?;
        Ok(Self::At { minute })
    }
}

impl TryFrom<String> for Deadline {
    type Error = BadDeadline;

    fn try_from(text: String) -> Result<Self, BadDeadline> {
        text.parse()
    }
}

impl From<Deadline> for String {
    fn from(deadline: Deadline) -> Self {
        deadline.to_string()
    }
}

impl fmt::Display for Deadline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At { minute } => write!(f, "{:02}:{:02} UTC", minute / 60, minute % 60),
            Self::In { seconds } => write!(f, "in {}", format_duration(*seconds)),
        }
    }
}

/// An amount that is not known exactly. The truth is meant to be between `low` and `high` 9 times of 10.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MoneyRange {
    /// The most likely amount, in millionths of a dollar.
    #[serde(rename = "expected_micros")]
    pub expected: Money,
    /// The least amount that is expected, in millionths of a dollar.
    #[serde(rename = "low_micros")]
    pub low: Money,
    /// The largest amount that is expected, in millionths of a dollar. This much is reserved.
    #[serde(rename = "high_micros")]
    pub high: Money,
}

impl MoneyRange {
    /// Both together.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            expected: self.expected.plus(other.expected),
            low: self.low.plus(other.low),
            high: self.high.plus(other.high),
        }
    }

    /// Three amounts, each of another number: the expected one, the least and the largest one.
    ///
    /// `None` if one of them is not known.
    #[must_use]
    pub fn of<T>(
        [expected, low, high]: [T; 3],
        price: impl Fn(T) -> Option<Money>,
    ) -> Option<Self> {
        Some(Self { expected: price(expected)?, low: price(low)?, high: price(high)? })
    }
}

/// `$0.09 ($0.07..$0.14)`; one amount where all three are shown alike.
impl fmt::Display for MoneyRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [expected, low, high] = [self.expected, self.low, self.high].map(|m| m.to_string());
        if low == high && low == expected {
            return f.pad(&expected);
        }
        write!(f, "{expected} ({low}..{high})")
    }
}

/// What a job costs, as its record says it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobCost {
    /// As its plan said; its high end was reserved before its VM was asked for.
    pub predicted: MoneyRange,
    /// In millionths of a dollar; `None` before its end.
    #[serde(default, rename = "spent_micros", skip_serializing_if = "Option::is_none")]
    pub spent: Option<Money>,
}

/// What a tenant has spent in this month (UTC), and what is reserved beside that.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Spending {
    /// In millionths of a dollar.
    #[serde(rename = "spent_micros")]
    pub spent: Money,
    /// For what has begun and is not settled, in millionths of a dollar.
    #[serde(rename = "reserved_micros")]
    pub reserved: Money,
}

impl Spending {
    /// Both together: this much of the budget is gone, or may be.
    #[must_use]
    pub const fn taken(self) -> Money {
        self.spent.plus(self.reserved)
    }

    /// Why a budget has no room for this much more; `None` if it has.
    #[must_use]
    pub fn lacks(self, budget: Money, more: Money) -> Option<String> {
        (self.taken().plus(more) > budget).then(|| {
            format!(
                "it may cost {more}, and of the tenant's {budget} for this month {} are spent and {} reserved",
                self.spent, self.reserved
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY_S: u64 = 86_400;

    #[test]
    fn a_time_of_the_day_is_the_next_one_after_the_submission() {
        let at: Deadline = "18:00".parse().expect("a deadline");
        let day_ms = 20_000 * DAY_S * 1000;
        let six_pm_ms = day_ms + 18 * 3_600_000;
        assert_eq!(at.at_ms(day_ms), six_pm_ms);
        assert_eq!(at.at_ms(six_pm_ms - 1), six_pm_ms);
        assert_eq!(at.at_ms(six_pm_ms), six_pm_ms + DAY_S * 1000, "now is too late");
        assert_eq!("in 2h".parse::<Deadline>().expect("a deadline").at_ms(5), 7_200_005);
    }

    #[test]
    fn a_deadline_is_written_as_it_is_read() {
        for (text, shown) in [
            ("18:00", "18:00 UTC"),
            ("7:05 UTC", "07:05 UTC"),
            ("in 90 min", "in 1h30m"),
            ("00:00", "00:00 UTC"),
        ] {
            let read: Deadline = text.parse().expect("a deadline");
            assert_eq!((read.to_string().as_str(), read.to_string().parse()), (shown, Ok(read)));
        }
        for bad in [
            "",
            "24:00",
            "18:60",
            "18",
            "18:0",
            "in",
            "in 2",
            "2h",
            "18:00 CET",
            "-1:00",
            "in 0s",
            "in 400d",
            "+1:00",
        ] {
            assert!(bad.parse::<Deadline>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_range_that_is_shown_as_one_amount_is_one() {
        let range = |low: u64, expected: u64, high: u64| {
            let [low, expected, high] = [low, expected, high].map(Money::from_micros);
            MoneyRange { expected, low, high }.to_string()
        };
        assert_eq!(range(51_000, 51_001, 51_002), "$0.06");
        assert_eq!(range(40_000, 51_001, 90_000), "$0.06 ($0.04..$0.09)");
    }

    #[test]
    fn a_budget_has_room_for_what_is_neither_spent_nor_reserved() {
        let dollars = |n: u64| Money::from_micros(n * 1_000_000);
        let spending = Spending { spent: dollars(5), reserved: dollars(3) };
        assert_eq!(spending.lacks(dollars(10), dollars(2)), None);
        assert_eq!(
            spending.lacks(dollars(10), Money::from_micros(2_000_001)).as_deref(),
            Some(
                "it may cost $2.01, and of the tenant's $10.00 for this month $5.00 are spent and $3.00 reserved"
            )
        );
    }
}
