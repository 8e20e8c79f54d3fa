//! Money: what things cost, in millionths of the currency that the cluster's prices are in.
//!
//! Amounts are integers, so that sums come out the same in every order. A price that is missing, 0 or too old is not known, and what is
//! not known is never free. What costs nothing is only what nobody has to be paid for: the cluster's own machines.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

use serde::{Deserialize, Serialize, Serializer};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, Schema, SchemaFormat, Type};
use utoipa::{PartialSchema, ToSchema};

use crate::units::format_duration;

/// Millionths of a dollar in a dollar. "Dollar" is the word for the currency of the prices, whichever it is.
const MICROS: u64 = 1_000_000;

/// An amount of money in millionths of a dollar. Sums saturate: what is too large to say is too dear.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(transparent)]
pub struct Money {
    /// Millionths of a dollar.
    pub micros: u64,
}

/// The largest amount that is said or named, in millionths of a dollar: JSON's readers have integers of 64 bits with a sign. A sum may be larger in memory.
pub const MICROS_MAX: u64 = i64::MAX.cast_unsigned();

impl Serialize for Money {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.micros.min(MICROS_MAX))
    }
}

/// On the wire it is a number.
impl PartialSchema for Money {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::Integer)
            .format(Some(SchemaFormat::KnownFormat(KnownFormat::Int64)))
            .minimum(Some(0))
            .description(Some("An amount of money in millionths of a dollar."))
            .into()
    }
}

impl ToSchema for Money {}

impl Money {
    /// No money.
    pub const ZERO: Self = Self::from_micros(0);

    /// So many millionths of a dollar.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self { micros }
    }

    /// Both together.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self::from_micros(self.micros.saturating_add(other.micros))
    }

    /// What is left of this amount without the other one; nothing if the other one is larger.
    #[must_use]
    pub const fn less(self, other: Self) -> Self {
        Self::from_micros(self.micros.saturating_sub(other.micros))
    }

    /// With all of its decimals, as a price is said: `$0.085`. [`fmt::Display`] rounds up to cents.
    #[must_use]
    pub fn exact(self) -> String {
        let (whole, fraction) = (self.micros / MICROS, self.micros % MICROS);
        let text = format!("${whole}.{fraction:06}");
        let short = text.trim_end_matches('0');
        // Two decimals, as people write money, or none.
        match short.split_once('.') {
            Some((whole, "")) => whole.to_owned(),
            Some((_, tenths)) if tenths.len() == 1 => format!("{short}0"),
            _ => short.to_owned(),
        }
    }

    /// What `amount` units cost if `per` of them cost this much, rounded up: nobody is told less than the bill will say.
    ///
    /// `per` is at least 1.
    #[must_use]
    pub fn of(self, amount: u64, per: u64) -> Self {
        let micros =
            (u128::from(self.micros) * u128::from(amount)).div_ceil(u128::from(per.max(1)));
        Self::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
    }
}

impl std::iter::Sum for Money {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::ZERO, Self::plus)
    }
}

/// `$1.25`, cents rounded up; below a cent as many digits as tell the amount, as in `$0.0004`; `$0` is nothing.
impl fmt::Display for Money {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.micros {
            0 => "$0".to_owned(),
            micros if micros < 10_000 => format!("$0.{micros:06}").trim_end_matches('0').to_owned(),
            micros => {
                let cents = micros.div_ceil(10_000);
                format!("${}.{:02}", cents / 100, cents % 100)
            }
        };
        f.pad(&text)
    }
}

/// Why a text is no amount of money.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not an amount of money: write dollars with at most six decimals, as in $1.50 or 0.25, and no more than $9223372036854"
)]
pub struct BadMoney(String);

/// `$1`, `1.50` or `$0.000004`.
impl FromStr for Money {
    type Err = BadMoney;

    fn from_str(text: &str) -> Result<Self, BadMoney> {
        let bad = || BadMoney(text.chars().take(40).collect());
        let number = text.trim();
        let number = number.strip_prefix('$').unwrap_or(number);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        let is_number =
            |digits: &str| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        if !is_number(whole) || !is_number(fraction) || fraction.len() > 6 {
            return Err(bad());
        }
        let whole: u64 = whole.parse().map_err(|_| bad())?;
        let fraction: u64 = format!("{fraction:0<6}").parse().map_err(|_| bad())?;
        whole
            .checked_mul(MICROS)
            .and_then(|w| w.checked_add(fraction))
            .filter(|micros| *micros <= MICROS_MAX)
            .map(Self::from_micros)
            .ok_or_else(bad)
    }
}

/// How old a price may be if nobody says another age.
pub const PRICE_AGE_S_DEFAULT: u64 = 30 * 86_400;

/// Clocks may differ, and the day of a date begins earlier elsewhere.
pub(crate) const AHEAD_MAX_S: u64 = 86_400;

/// Seconds in the month that disks are paid by: 730 hours, as cloud providers count.
pub const MONTH_S: u64 = 730 * 3600;

/// What a machine, its disk and its traffic cost. Each figure is `None` if it is not known, which a 0 is taken for: it is never free.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Price {
    /// The machine, in millionths of a dollar for an hour. An hour, because a cheap machine costs 3 millionths a second.
    #[schema(value_type = Option<u64>, minimum = 1)]
    pub per_hour_micros: Option<NonZeroU64>,
    /// The least time that is paid for.
    pub minimum_s: u32,
    /// What leaves the provider's site, in millionths of a dollar for each GiB.
    #[schema(value_type = Option<u64>, minimum = 1)]
    pub egress_per_gib_micros: Option<NonZeroU64>,
    /// Its disk, in millionths of a dollar for each GiB and month ([`MONTH_S`]).
    #[schema(value_type = Option<u64>, minimum = 1)]
    pub disk_per_gib_month_micros: Option<NonZeroU64>,
    /// Who says so, as in `prices.yaml` or `ec2 spot history`.
    pub source: String,
    /// When that was so, in seconds since 1970.
    pub as_of_unix_s: u64,
}

impl Price {
    /// Why nothing of it counts at this Unix time, in seconds: it is older than `max_age_s`, or holds only later. `None` if it counts.
    #[must_use]
    pub fn out_of_date(&self, now_s: u64, max_age_s: u64) -> Option<String> {
        if self.as_of_unix_s > now_s.saturating_add(AHEAD_MAX_S) {
            return Some("its time is not yet".to_owned());
        }
        let age_s = now_s.saturating_sub(self.as_of_unix_s);
        let (days, max) = (age_s / 86_400, format_duration(max_age_s));
        (age_s > max_age_s).then(|| format!("it is {days} days old, more than {max}"))
    }

    /// The same where nothing is known that does not count any more.
    #[must_use]
    pub fn as_known(self, now_s: u64, max_age_s: u64) -> Self {
        match self.out_of_date(now_s, max_age_s) {
            None => self,
            Some(_) => Self {
                per_hour_micros: None,
                egress_per_gib_micros: None,
                disk_per_gib_month_micros: None,
                ..self
            },
        }
    }

    /// What the machine costs for so many seconds, at least its minimum; `None` if that is not known.
    #[must_use]
    pub fn machine(&self, seconds: u64) -> Option<Money> {
        let per_hour = Money::from_micros(self.per_hour_micros?.get());
        Some(per_hour.of(seconds.max(u64::from(self.minimum_s)), 3600))
    }

    /// What so many bytes cost that leave the site; `None` if that is not known. No bytes cost nothing.
    #[must_use]
    pub fn egress(&self, bytes: u64) -> Option<Money> {
        if bytes == 0 {
            return Some(Money::ZERO);
        }
        Some(Money::from_micros(self.egress_per_gib_micros?.get()).of(bytes, 1 << 30))
    }

    /// What a disk of so many bytes costs for so many seconds; `None` if that is not known. No disk costs nothing.
    #[must_use]
    pub fn disk(&self, bytes: u64, seconds: u64) -> Option<Money> {
        if bytes == 0 {
            return Some(Money::ZERO);
        }
        let per_month = Money::from_micros(self.disk_per_gib_month_micros?.get());
        Some(per_month.of(bytes.div_ceil(1 << 30).saturating_mul(seconds), MONTH_S))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn money_is_read_and_written() {
        for (text, micros, shown) in [
            ("$1", 1_000_000, "$1.00"),
            ("0.25", 250_000, "$0.25"),
            ("$0.0004", 400, "$0.0004"),
            ("$1.005", 1_005_000, "$1.01"),
            ("0", 0, "$0"),
            ("$1.999999", 1_999_999, "$2.00"),
        ] {
            let money: Money = text.parse().expect("money");
            assert_eq!((money.micros, money.to_string().as_str()), (micros, shown), "{text}");
        }
    }

    #[test]
    fn a_price_is_said_exactly() {
        for (micros, shown) in [
            (0, "$0"),
            (85_000, "$0.085"),
            (90_000, "$0.09"),
            (200_000, "$0.20"),
            (1_000_000, "$1"),
            (4, "$0.000004"),
        ] {
            let money = Money::from_micros(micros);
            assert_eq!((money.exact().as_str(), money.exact().parse()), (shown, Ok(money)));
        }
    }

    /// The document said that an amount is an object, and no answer with one was as it said.
    #[test]
    fn money_is_a_number_in_answers_and_in_their_schema() {
        assert_eq!(
            serde_json::to_value(Money::from_micros(7)).expect("JSON"),
            serde_json::json!(7)
        );
        let schema = serde_json::to_value(Money::schema()).expect("JSON");
        assert_eq!(schema["type"], "integer");
        let too_dear = serde_json::to_value(Money::from_micros(u64::MAX)).expect("JSON");
        assert_eq!(too_dear, serde_json::json!(i64::MAX), "the schema has no larger ones");
        let largest = "9223372036854.775807".parse::<Money>().expect("money");
        assert_eq!(largest, Money::from_micros(MICROS_MAX));
        assert!("9223372036854.775808".parse::<Money>().is_err());
    }

    #[test]
    fn what_is_no_money_is_refused() {
        for text in ["", "$", "1.", ".5", "-1", "1e3", "€1", "1.0000001", "99999999999999999999"]
        {
            assert!(text.parse::<Money>().is_err(), "{text}");
        }
    }

    #[test]
    fn parts_of_a_unit_are_rounded_up() {
        assert_eq!(Money::from_micros(10).of(1, 3600), Money::from_micros(1));
        assert_eq!(Money::from_micros(u64::MAX).of(u64::MAX, 1), Money::from_micros(u64::MAX));
    }

    #[test]
    fn a_price_that_is_not_known_is_not_free() {
        let price = Price {
            per_hour_micros: NonZeroU64::new(3_600_000),
            minimum_s: 60,
            egress_per_gib_micros: None,
            disk_per_gib_month_micros: None,
            source: "test".to_owned(),
            as_of_unix_s: 0,
        };
        assert_eq!(price.machine(10), Some(Money::from_micros(60_000)));
        assert_eq!((price.egress(0), price.egress(1)), (Some(Money::ZERO), None));
        assert_eq!(price.disk(1, 1), None);
    }

    #[test]
    fn a_price_that_is_too_old_or_of_later_is_not_known() {
        const DAY_S: u64 = 86_400;
        let some = NonZeroU64::new(1);
        let price = Price {
            per_hour_micros: some,
            minimum_s: 60,
            egress_per_gib_micros: some,
            disk_per_gib_month_micros: some,
            source: "test".to_owned(),
            as_of_unix_s: 100 * DAY_S,
        };
        let known = |day: u64| {
            let known = price.clone().as_known(day * DAY_S, 30 * DAY_S);
            (known.machine(1).is_some(), known.egress(1).is_some(), known.disk(1, 1).is_some())
        };
        for (day, expected) in [(98, false), (99, true), (100, true), (130, true), (131, false)] {
            assert_eq!(known(day), (expected, expected, expected), "day {day}");
        }
        let why = price.out_of_date(200 * DAY_S, 30 * DAY_S).expect("it is old");
        assert_eq!(why, "it is 100 days old, more than 30d");
    }
}
