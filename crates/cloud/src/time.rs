//! Points in time as EC2 writes them, and as seconds since 1970 (UTC).

use std::time::{SystemTime, UNIX_EPOCH};

use perigee_model::units::format_time;

const DAY_S: u64 = 24 * 3600;
/// Days from 0000-03-01 to 1970-01-01, in the Gregorian calendar.
const DAYS_BEFORE_1970: u64 = 719_468;
const DAYS_IN_400_YEARS: u64 = 146_097;

/// Seconds since 1970.
pub fn now_unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// As in `2026-11-29T12:36:00Z`.
pub fn extended(unix_s: u64) -> String {
    format_time(unix_s.saturating_mul(1000)).replacen(' ', "T", 1).replace(" UTC", "Z")
}

/// As in `20261129T123600Z`.
pub fn basic(unix_s: u64) -> String {
    extended(unix_s).replace(['-', ':'], "")
}

/// Reads a date, or a date and a time in UTC with or without parts of a second. `None` for all else, and for what is before 1970.
pub fn parse(text: &str) -> Option<u64> {
    let (date, time) = text.split_once('T').unwrap_or((text, "00:00:00Z"));
    let mut parts = date.splitn(3, '-').map(number);
    let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
    let time = time.strip_suffix('Z').or_else(|| time.strip_suffix("+00:00"))?;
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    number(fraction.get(..fraction.len().min(9))?)?;
    let mut parts = time.splitn(3, ':').map(number);
    let (hour, minute, second) = (parts.next()??, parts.next()??, parts.next()??);
    let is_date = (1970..=9999).contains(&year)
        && (1..=12).contains(&month)
        && (1..=days_in(year, month)).contains(&day);
    // A minute may have a leap second.
    if !is_date || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    Some(days(year, month, day)? * DAY_S + hour * 3600 + minute * 60 + second)
}

fn number(digits: &str) -> Option<u64> {
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    if is_number && digits.len() <= 9 { digits.parse().ok() } else { None }
}

fn days_in(year: u64, month: u64) -> u64 {
    match month {
        2 if year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400)) => {
            29
        }
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days since 1970, the inverse of [`format_time`]. Years begin in March here, so that a leap day is the last one.
fn days(year: u64, month: u64, day: u64) -> Option<u64> {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year) = (year / 400, year % 400);
    let day = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day = year * 365 + year / 4 - year / 100 + day;
    (era * DAYS_IN_400_YEARS + day).checked_sub(DAYS_BEFORE_1970)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_and_written() {
        for (unix_s, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_440_938_160, "2015-08-30T12:36:00Z"),
            (4_107_542_399, "2100-02-28T23:59:59Z"),
        ] {
            assert_eq!(extended(unix_s), text);
            assert_eq!(parse(text), Some(unix_s));
        }
        assert_eq!(basic(1_440_938_160), "20150830T123600Z");
        assert_eq!(parse("2006-01-02T15:04:05.999999999Z"), Some(1_136_214_245));
        assert_eq!(parse("2015-08-30T12:36:00.000+00:00"), Some(1_440_938_160));
        assert_eq!(parse("2000-02-29"), Some(951_782_400));
    }

    #[test]
    fn each_day_comes_back() {
        for day in 0..100_000 {
            assert_eq!(parse(&extended(day * DAY_S)), Some(day * DAY_S));
        }
    }

    #[test]
    fn what_is_no_time_is_none() {
        for text in [
            "",
            "T",
            "Z",
            "2015",
            "2015-8",
            "1969-12-31",
            "2015-13-01",
            "2015-02-29",
            "2100-02-29",
            "2015-08-30T12:36",
            "2015-08-30T24:00:00Z",
            "2015-08-30T12:36:00+02:00",
            "2015-08-30T12:36:00.xZ",
            "10000-01-01",
            "2015-08-30T12:36:00.ääääZ",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
