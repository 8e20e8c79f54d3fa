//! Sizes, durations and rates as people write and read them.
//!
//! What has one meaning for everybody is taken: `2GiB`, `2Gi` and `2G` are the same, as in Slurm, HTCondor, QEMU and LVM, and
//! `1:30:00` is an hour and a half. What people mean differently is refused, with its meanings named: a number without a
//! unit, `2GB`, `1:30`. Parsing never panics and checks for overflow.

const SIZE_UNITS: [(&str, u64); 6] = [
    ("EiB", 1 << 60),
    ("PiB", 1 << 50),
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
];

const TIME_UNITS: [(char, u64); 4] = [('d', 86_400), ('h', 3600), ('m', 60), ('s', 1)];

/// How people write a unit of time out.
const TIME_WORDS: [(char, &[&str]); 4] = [
    ('d', &["d", "day", "days"]),
    ('h', &["h", "hour", "hours"]),
    ('m', &["m", "min", "minute", "minutes"]),
    ('s', &["s", "sec", "second", "seconds"]),
];

/// Why a text is no size or no duration. Each has the text, cut to 40 characters.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadUnit {
    /// The number or the unit is none.
    #[error("{0:?} is not a size: use K, M, G or T (512M, 512Mi and 512MiB are 512 × 1024² bytes)")]
    Size(String),
    /// It has no unit.
    #[error(
        "{0:?} has no unit, and programs mean bytes, KiB or MiB by it: write {0}B for bytes, {0}K for KiB or {0}M for MiB"
    )]
    NoSizeUnit(String),
    /// Its unit is a decimal one, such as `GB`, which many take for a binary one.
    #[error(
        "{text:?} may be powers of 1000 or of 1024: write {number}{letter}iB for 1024, or the number of bytes with B"
    )]
    Decimal {
        /// All of it.
        text: String,
        /// Without the unit.
        number: String,
        /// Of the unit.
        letter: char,
    },
    /// A unit is not known or out of order.
    #[error(
        "{0:?} is not a duration: use d, h, m and s (90s, 10m, 1h30m), or HOURS:MINUTES:SECONDS (1:30:00)"
    )]
    Duration(String),
    /// It is no time in UTC.
    #[error("{0:?} is not a time as 2026-11-23T16:07:02Z")]
    Time(String),
    /// It has no unit.
    #[error(
        "{0:?} has no unit, and Slurm means minutes by it, HTCondor seconds: write {0}m or {0}s"
    )]
    NoTimeUnit(String),
    /// Two numbers with a colon.
    #[error(
        "{text:?} may be hours and minutes, or minutes and seconds: write {text}:00 or 0:{text}"
    )]
    TwoParts {
        /// All of it.
        text: String,
    },
    /// It does not fit into 64 bits.
    #[error("{0:?} is too large")]
    TooLarge(String),
}

/// `512MiB`, `512M`, `1.5 GiB` or `4096B`. A fraction of a byte is dropped.
///
/// # Errors
/// [`BadUnit`] when it is none, when its unit means different things, or when the size does not fit in 64 bits.
pub fn parse_bytes(text: &str) -> Result<u64, BadUnit> {
    let bad = || BadUnit::Size(shortened(text));
    let trimmed = text.trim();
    let number_end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.');
    let (number, unit) = trimmed.split_at(number_end.unwrap_or(trimmed.len()));
    let unit = unit.trim_start();
    let (whole, fraction) = match number.split_once('.') {
        None => (number, ""),
        Some((_, "")) => return Err(bad()),
        Some((whole, fraction)) => (whole, fraction),
    };
    if whole.is_empty() || fraction.contains('.') || fraction.len() > 9 {
        return Err(bad());
    }
    let scale = size_unit(text, number, unit)?;
    let too_large = || BadUnit::TooLarge(shortened(text));
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let mut bytes = u128::from(whole) * u128::from(scale);
    if !fraction.is_empty() {
        let numerator: u128 = fraction.parse().map_err(|_| bad())?;
        let digits = fraction.chars().fold(1u128, |scale, _| scale * 10);
        bytes += numerator * u128::from(scale) / digits;
    }
    u64::try_from(bytes).map_err(|_| too_large())
}

/// How many bytes a unit of a size is.
fn size_unit(text: &str, number: &str, unit: &str) -> Result<u64, BadUnit> {
    let bad = || BadUnit::Size(shortened(text));
    let mut letters = unit.chars();
    let letter = match letters.next() {
        None => return Err(BadUnit::NoSizeUnit(shortened(text.trim()))),
        Some('B') if unit == "B" => return Ok(1),
        Some(letter) => letter.to_ascii_uppercase(),
    };
    let known = SIZE_UNITS.iter().find(|(name, _)| name.starts_with(letter));
    let (_, scale) = known.ok_or_else(bad)?;
    let is_small = unit.starts_with(|c: char| c.is_ascii_lowercase());
    match letters.as_str() {
        "" => Ok(*scale),
        "i" | "iB" if !is_small => Ok(*scale),
        "B" | "b" => Err(BadUnit::Decimal {
            text: shortened(text.trim()),
            number: shortened(number),
            letter,
        }),
        _ => Err(bad()),
    }
}

/// `512 MiB`, `1.5 GiB`, `17 B`: at most one decimal, which is left out where it is zero.
pub fn format_bytes(bytes: u64) -> String {
    // What would round to 1024 of a unit is shown as 1 of the next.
    let fits = |(_, scale): &&(&str, u64)| bytes >= scale - scale / 20_480;
    let Some((name, scale)) = SIZE_UNITS.iter().find(fits) else {
        return format!("{bytes} B");
    };
    let tenths = (u128::from(bytes) * 10 + u128::from(scale / 2)) / u128::from(*scale);
    match (tenths / 10, tenths % 10) {
        (whole, 0) => format!("{whole} {name}"),
        (whole, tenth) => format!("{whole}.{tenth} {name}"),
    }
}

/// `83.4 MiB/s`.
pub fn format_rate(bytes_per_s: u64) -> String {
    format!("{}/s", format_bytes(bytes_per_s))
}

/// The Unix time, in milliseconds, of `2026-11-23T16:07:02Z`, as other programs write a time in UTC (RFC 3339). A fraction of the second
/// counts as nothing.
///
/// # Errors
/// [`BadUnit`] when it is anything else, or before 1970.
pub fn parse_time(text: &str) -> Result<u64, BadUnit> {
    let read = || {
        let (date, clock) = text.trim().strip_suffix('Z')?.split_once('T')?;
        let (clock, fraction) = clock.split_once('.').unwrap_or((clock, "0"));
        let number = |digits: &str| -> Option<u64> {
            let is_number = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
            digits.parse().ok().filter(|_| is_number)
        };
        number(fraction)?;
        let parts: Vec<u64> = clock.split(':').map(number).collect::<Option<_>>()?;
        let [hour @ 0..24, minute @ 0..60, second @ 0..60] = parts[..] else { return None };
        Some((parse_date(date).ok()? + hour * 3600 + minute * 60 + second) * 1000)
    };
    read().ok_or_else(|| BadUnit::Time(shortened(text)))
}

/// A Unix time as `2026-11-23 16:07:02 UTC`.
pub fn format_time(unix_ms: u64) -> String {
    let (seconds, days) = (unix_ms / 1000 % 86_400, unix_ms / 86_400_000);
    // A year that begins in March has its leap day at its end; 400 years have 146097 days.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// The same for names: `20261123-160702`.
pub fn compact_time(unix_ms: u64) -> String {
    let digits: String = format_time(unix_ms).chars().filter(char::is_ascii_digit).collect();
    match digits.split_at_checked(8) {
        Some((day, time)) => format!("{day}-{time}"),
        None => digits,
    }
}

/// A day as `2026-11-29`: the Unix time of its beginning (UTC), in seconds.
///
/// # Errors
/// [`BadDate`] when there is no such day, or it is before 1970.
pub fn parse_date(text: &str) -> Result<u64, BadDate> {
    let bad = || BadDate(shortened(text));
    let parts: Vec<&str> = text.trim().split('-').collect();
    let [year, month, day] = parts.as_slice() else { return Err(bad()) };
    let number = |digits: &str, length: usize| {
        let is_number = digits.len() == length && digits.bytes().all(|b| b.is_ascii_digit());
        digits.parse::<u64>().ok().filter(|_| is_number).ok_or_else(bad)
    };
    let (year, month, day) = (number(year, 4)?, number(month, 2)?, number(day, 2)?);
    let is_month = (1..=12).contains(&month);
    if year < 1970 || !is_month || !(1..=31).contains(&day) {
        return Err(bad());
    }
    // The inverse of `format_time`: the year begins in March.
    let shifted_year = if month > 2 { year } else { year - 1 };
    let (era, year_of_era) = (shifted_year / 400, shifted_year % 400);
    let from_march = (month + 9) % 12;
    let day_of_year = (153 * from_march + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    let seconds = (era * 146_097 + day_of_era - 719_468) * 86_400;
    // The 31st of February would be shown as a day of March.
    let shown = format_time(seconds * 1000);
    if shown.starts_with(text.trim()) { Ok(seconds) } else { Err(bad()) }
}

/// Why a text is no day.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a day: write year, month and day, as in 2026-11-29")]
pub struct BadDate(String);

/// `90s`, `10m`, `1h30m`, `2d`, `10 min`, and `1:30:00` or `1-12:00:00` as in Slurm: in seconds. Units go from large to small, each
/// once.
///
/// # Errors
/// [`BadUnit`] when it is anything else, or does not fit.
pub fn parse_duration(text: &str) -> Result<u64, BadUnit> {
    let bad = || BadUnit::Duration(shortened(text));
    let too_large = || BadUnit::TooLarge(shortened(text));
    let mut rest = text.trim();
    if rest.contains(':') {
        return parse_clock(rest);
    }
    if !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(BadUnit::NoTimeUnit(shortened(rest)));
    }
    let mut units = TIME_UNITS.as_slice();
    let mut total_s: u64 = 0;
    if rest.is_empty() {
        return Err(bad());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).filter(|n| *n > 0).ok_or_else(bad)?;
        let (number, tail) = rest.split_at(digits);
        let tail = tail.trim_start();
        let word_end = tail.find(|c: char| !c.is_ascii_lowercase()).unwrap_or(tail.len());
        let (word, after) = tail.split_at(word_end);
        let known = TIME_WORDS.iter().find(|(_, words)| words.contains(&word)).ok_or_else(bad)?;
        let index = units.iter().position(|(name, _)| *name == known.0).ok_or_else(bad)?;
        let number: u64 = number.parse().map_err(|_| too_large())?;
        let part_s = number.checked_mul(units[index].1).ok_or_else(too_large)?;
        total_s = total_s.checked_add(part_s).ok_or_else(too_large)?;
        units = &units[index + 1..];
        rest = after.trim_start();
    }
    Ok(total_s)
}

/// `HOURS:MINUTES:SECONDS`, `DAYS-HOURS:MINUTES` or `DAYS-HOURS:MINUTES:SECONDS`.
fn parse_clock(text: &str) -> Result<u64, BadUnit> {
    let bad = || BadUnit::Duration(shortened(text));
    let too_large = || BadUnit::TooLarge(shortened(text));
    let (days, clock) = match text.split_once('-') {
        Some((days, clock)) => (Some(days), clock),
        None => (None, text),
    };
    let parts: Vec<&str> = clock.split(':').collect();
    let is_number = |part: &&str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !parts.iter().chain(&days).all(is_number) {
        return Err(bad());
    }
    let (hours, minutes, seconds) = match (days, parts.as_slice()) {
        (_, [hours, minutes, seconds]) => (*hours, *minutes, *seconds),
        (Some(_), [hours, minutes]) => (*hours, *minutes, "0"),
        (None, [_, _]) => return Err(BadUnit::TwoParts { text: shortened(text) }),
        _ => return Err(bad()),
    };
    let mut total_s: u64 = 0;
    for (part, unit_s, below) in [
        (days.unwrap_or("0"), 86_400, None),
        (hours, 3600, days.map(|_| 24)),
        (minutes, 60, Some(60)),
        (seconds, 1, Some(60)),
    ] {
        let number: u64 = part.parse().map_err(|_| too_large())?;
        if below.is_some_and(|below| number >= below) {
            return Err(bad());
        }
        let part_s = number.checked_mul(unit_s).ok_or_else(too_large)?;
        total_s = total_s.checked_add(part_s).ok_or_else(too_large)?;
    }
    Ok(total_s)
}

/// `1h30m`, `90s` as `1m30s`, `0s`: exact.
pub fn format_duration(total_s: u64) -> String {
    let mut rest_s = total_s;
    let mut text = String::new();
    for (name, unit_s) in TIME_UNITS {
        let count = rest_s / unit_s;
        rest_s %= unit_s;
        if count > 0 {
            text.push_str(&format!("{count}{name}"));
        }
    }
    if text.is_empty() { "0s".to_owned() } else { text }
}

/// `74 s`, `3.4 s`, `0.21 s`: a measured or predicted time, as exact as it is worth.
pub fn format_seconds(seconds: f64) -> String {
    if seconds == 0.0 {
        return "0 s".to_owned();
    }
    let decimals = match seconds.abs() {
        s if s >= 9.95 => 0,
        s if s >= 0.995 => 1,
        _ => 2,
    };
    format!("{seconds:.decimals$} s")
}

fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_time_is_shown_with_its_date() {
        for (unix_s, shown) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_709_251_199, "2024-02-29 23:59:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
            (1_795_450_022, "2026-11-23 16:07:02 UTC"),
        ] {
            assert_eq!(format_time(unix_s * 1000), shown);
            let as_others_write = shown.replace(" UTC", "Z").replace(' ', "T");
            assert_eq!(parse_time(&as_others_write), Ok(unix_s * 1000));
            assert_eq!(parse_time(&as_others_write.replace('Z', ".123Z")), Ok(unix_s * 1000));
        }
        for bad in [
            "",
            "Z",
            "2026-11-23 16:07:02 UTC",
            "2026-11-23T16:07:02",
            "2026-11-23T16:07:02+01:00",
            "2026-02-29T00:00:00Z",
            "2026-11-23T24:00:00Z",
            "2026-11-23T16:60:00Z",
            "1969-12-31T23:59:59Z",
            "2026-13-01T00:00:00Z",
            "2026-11-23T16:07Z",
            "2026-1-2T16:07:02Z",
            "2026-11-23T16:07:02.xZ",
            "99999999999999999999-01-01T00:00:00Z",
            "2026-11-23T99999999999999:00:00Z",
        ] {
            assert!(parse_time(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_day_is_read_as_it_is_shown() {
        for (text, days) in [("1970-01-01", 0), ("2000-02-29", 11_016), ("2026-11-29", 20_786)] {
            assert_eq!(parse_date(text), Ok(days * 86_400), "{text}");
        }
        for bad in [
            "2026-02-29",
            "2026-13-01",
            "2026-11-31",
            "1969-12-31",
            "2026-1-1",
            "29.11.2026",
            "",
            "2026-11-29 10:00",
        ] {
            assert_eq!(parse_date(bad), Err(BadDate(bad.to_owned())), "{bad:?}");
        }
    }

    #[test]
    fn sizes_are_taken_as_slurm_htcondor_and_kubernetes_write_them() {
        for size in ["512MiB", "512Mi", "512M", "512m", " 512 MiB "] {
            assert_eq!(parse_bytes(size), Ok(512 << 20), "{size}");
        }
        assert_eq!(parse_bytes(" 1.5 GiB "), Ok(3 << 29));
        assert_eq!((parse_bytes("2G"), parse_bytes("2Gi")), (Ok(2 << 30), Ok(2 << 30)));
        assert_eq!((parse_bytes("4096B"), parse_bytes("4k")), (Ok(4096), Ok(4096)));
        for bad in ["512mib", "MiB", "G", ".5GiB", "1.GiB", "1.2.3GiB", "-1GiB", "", "2b", "2 x"] {
            assert_eq!(parse_bytes(bad), Err(BadUnit::Size(bad.to_owned())), "{bad:?}");
        }
    }

    #[test]
    fn a_size_that_people_mean_differently_is_refused_with_what_to_write() {
        let plain = parse_bytes("67108864").expect_err("no unit").to_string();
        assert!(plain.contains("67108864B for bytes"), "{plain}");
        for text in ["2GB", "2gb", "2 GB"] {
            let decimal = parse_bytes(text).expect_err("1000 or 1024").to_string();
            assert!(decimal.contains("2GiB"), "{decimal}");
        }
    }

    #[test]
    fn a_size_above_64_bits_is_too_large() {
        assert!(matches!(parse_bytes("16EiB"), Err(BadUnit::TooLarge(_))));
        assert!(matches!(parse_bytes("99999999999999999999B"), Err(BadUnit::TooLarge(_))));
        assert_eq!(parse_bytes("18446744073709551615B"), Ok(u64::MAX));
    }

    #[test]
    fn sizes_are_shown_with_one_decimal_at_most() {
        assert_eq!(format_bytes(1023), "1023 B");
        assert_eq!(format_bytes(512 << 20), "512 MiB");
        assert_eq!(format_bytes(3 << 29), "1.5 GiB");
        assert_eq!(format_bytes((1 << 20) - 1), "1 MiB");
        assert_eq!(format_bytes(u64::MAX), "16 EiB");
    }

    #[test]
    fn durations_go_from_large_units_to_small_ones() {
        assert_eq!(parse_duration("90s"), Ok(90));
        assert_eq!(parse_duration("1h30m"), Ok(5400));
        assert_eq!(parse_duration("2d"), Ok(172_800));
        assert_eq!(parse_duration("10 min"), Ok(600));
        assert_eq!(parse_duration("1 hour 30 minutes"), Ok(5400));
        for bad in ["", "m", "30m1h", "1h1h", "1.5h", "10ms", "-1s", "10M", "1h30"] {
            assert!(matches!(parse_duration(bad), Err(BadUnit::Duration(_))), "{bad:?}");
        }
        assert!(matches!(parse_duration("999999999999999999d"), Err(BadUnit::TooLarge(_))));
    }

    #[test]
    fn durations_are_taken_as_slurm_writes_them_where_they_have_one_meaning() {
        assert_eq!(parse_duration("1:30:00"), Ok(5400));
        assert_eq!(parse_duration("36:00:00"), Ok(36 * 3600));
        assert_eq!(parse_duration("1-12:00:00"), Ok(36 * 3600));
        assert_eq!(parse_duration("1-12:30"), Ok(36 * 3600 + 1800));
        for bad in ["1:60:00", "1:00:60", "1-24:00:00", "1::00", "1:2:3:4", "-1:00:00", "1:-1:00"] {
            assert!(matches!(parse_duration(bad), Err(BadUnit::Duration(_))), "{bad:?}");
        }
        let plain = parse_duration("90").expect_err("no unit").to_string();
        assert!(plain.contains("minutes") && plain.contains("90s"), "{plain}");
        let two = parse_duration("1:30").expect_err("two meanings").to_string();
        assert!(two.contains("1:30:00") && two.contains("0:1:30"), "{two}");
        assert_eq!(parse_duration("0:1:30"), Ok(90));
        let large = format!("{}:00:00", u64::MAX);
        assert!(matches!(parse_duration(&large), Err(BadUnit::TooLarge(_))));
    }

    #[test]
    fn seconds_are_shown_as_exactly_as_they_are_worth() {
        let shown = [0.213, 0.999, 3.44, 9.97, 74.4].map(format_seconds);
        assert_eq!(shown, ["0.21 s", "1.0 s", "3.4 s", "10 s", "74 s"]);
    }

    proptest! {
        #[test]
        fn what_is_shown_as_a_size_is_read_as_the_same(bytes in 0u64..(15 << 60)) {
            let shown = format_bytes(bytes);
            let read = parse_bytes(&shown).unwrap();
            prop_assert_eq!(format_bytes(read), shown);
            prop_assert!(read.abs_diff(bytes) <= bytes / 18, "{} was read as {}", bytes, read);
        }

        #[test]
        fn a_duration_is_read_as_it_was(total_s: u64) {
            prop_assert_eq!(parse_duration(&format_duration(total_s)), Ok(total_s));
        }

        #[test]
        fn no_text_makes_a_parser_panic(text in "\\PC*", number in "[0-9.:-]{0,30}[a-zA-Z ]{0,4}") {
            for text in [text, number] {
                let _ = (parse_bytes(&text), parse_duration(&text), parse_date(&text));
            }
        }
    }
}
