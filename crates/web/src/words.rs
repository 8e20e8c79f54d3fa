//! How figures, times and states are said.

use perigee_model::units::{format_bytes, format_rate, format_time};
use serde::Serialize;

use crate::parts::{Cell, Tone};

/// What is not known.
pub const DASH: &str = "–";

/// The longest text of a person or a guest in a table. All of it is on the thing's own page.
const TEXT_CHARS_MAX: usize = 160;

/// A text, cut where it is too long for a table.
pub fn short(text: &str) -> String {
    let mut chars = text.chars();
    let cut: String = chars.by_ref().take(TEXT_CHARS_MAX).collect();
    if chars.next().is_some() { format!("{cut} …") } else { cut }
}

/// A value's name as in JSON, with blanks.
pub fn word<T: Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(text)) => text.replace('_', " "),
        Ok(other) => other.to_string(),
        Err(error) => error.to_string(),
    }
}

/// A size.
pub fn bytes(bytes: u64) -> Cell {
    Cell::number(format_bytes(bytes))
}

/// A size that may not be known.
pub fn maybe_bytes(bytes: Option<u64>) -> Cell {
    bytes.map_or_else(|| Cell::number(DASH), self::bytes)
}

/// A rate.
pub fn rate(bytes_per_s: u64) -> Cell {
    Cell::number(format_rate(bytes_per_s))
}

/// A share in percent.
pub fn percent(share: Option<f64>) -> Cell {
    share
        .map_or_else(|| Cell::number(DASH), |share| Cell::number(format!("{:.0} %", share * 100.0)))
}

/// A value, or a dash.
pub fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| DASH.to_owned(), |value| value.to_string())
}

/// How long ago something was. Coarse, so that a page that stays the same says the same.
pub fn ago(at_ms: u64, now_ms: u64) -> String {
    let minutes = now_ms.saturating_sub(at_ms) / 60_000;
    match minutes {
        0 => "just now".to_owned(),
        1..=90 => format!("{minutes} min ago"),
        91..=2880 => format!("{} h ago", minutes / 60),
        _ => format!("{} d ago", minutes / 1440),
    }
}

/// A Unix time, in UTC.
pub fn time(unix_ms: u64) -> String {
    format_time(unix_ms)
}

/// How long a time is that goes on. Coarse too.
pub fn lasting(from_ms: u64, to_ms: u64) -> String {
    let seconds = to_ms.saturating_sub(from_ms) / 1000;
    match seconds {
        0..60 => "under 1 min".to_owned(),
        60..5400 => format!("{} min", seconds / 60),
        5400..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// How many of something: `1 VM`, `2 VMs`.
pub fn count(number: usize, of: &str) -> String {
    let s = if number == 1 { "" } else { "s" };
    format!("{number} {of}{s}")
}

/// The page of a job, VM, volume, host, tenant or rental. Names have no character that a path may not have.
pub fn page_of(kind: &str, name: impl std::fmt::Display) -> String {
    format!("/{kind}/{name}")
}

/// A link to a thing's page.
pub fn thing(kind: &str, name: impl std::fmt::Display) -> Cell {
    let href = page_of(kind, &name);
    Cell::link(name, href)
}

/// The same, or a dash.
pub fn maybe_thing<T: std::fmt::Display>(kind: &str, name: Option<T>) -> Cell {
    name.map_or_else(|| Cell::text(DASH), |name| thing(kind, name))
}

/// Something that is said as a warning if there is something to say.
pub fn trouble_or_fine(text: &str) -> Cell {
    if text.is_empty() { Cell::text(DASH) } else { Cell::status(short(text), Tone::Warn) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_that_has_passed_is_said_in_the_largest_unit_that_tells_it() {
        let minute = 60_000;
        for (passed_ms, said) in [
            (0, "just now"),
            (59_999, "just now"),
            (minute, "1 min ago"),
            (90 * minute, "90 min ago"),
            (120 * minute, "2 h ago"),
            (48 * 60 * minute, "48 h ago"),
            (72 * 60 * minute, "3 d ago"),
        ] {
            assert_eq!(ago(1000, 1000 + passed_ms), said);
        }
        assert_eq!(ago(5000, 1000), "just now", "clocks differ");
    }

    #[test]
    fn a_long_text_is_cut_between_two_characters() {
        let long = "ä".repeat(TEXT_CHARS_MAX + 1);
        assert_eq!(short(&long), format!("{} …", "ä".repeat(TEXT_CHARS_MAX)));
        assert_eq!(short("ä"), "ä");
    }
}
