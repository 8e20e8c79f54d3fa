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

/// The last lines of what a terminal was sent, without what it does with the terminal: colours, and moves of the cursor.
pub fn plain_lines(sent: &str, most: usize) -> Vec<String> {
    let mut plain = String::new();
    let mut chars = sent.chars().peekable();
    while let Some(char) = chars.next() {
        match char {
            '\u{1b}' => match chars.next() {
                // Parameters, and then a letter that says what is done.
                Some('[') => {
                    chars.by_ref().find(|char| ('@'..='~').contains(char));
                }
                // A title, until a bell or the beginning of the next sequence.
                Some(']') => {
                    let is_end = |char: &char| ['\u{7}', '\u{1b}'].contains(char);
                    if chars.by_ref().find(is_end) == Some('\u{1b}') {
                        chars.next();
                    }
                }
                Some('(' | ')') => drop(chars.next()),
                _ => {}
            },
            '\n' | '\t' => plain.push(char),
            char if char.is_control() => {}
            char => plain.push(char),
        }
    }
    let lines: Vec<&str> = plain.lines().map(str::trim_end).collect();
    let from = lines.len().saturating_sub(most);
    lines[from..].iter().map(|line| (*line).to_owned()).collect()
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
    fn what_was_printed_is_read_without_its_colours() {
        let sent = "\u{1b}[0m\u{1b}[1;31mpanic\u{1b}[0m: no root\r\n\u{1b}]0;title\u{7}\u{1b}(Blogin: \u{1b}[";
        assert_eq!(plain_lines(sent, 9), ["panic: no root", "login:"]);
        assert_eq!(plain_lines(sent, 1), ["login:"]);
        assert!(plain_lines("", 9).is_empty());
    }

    #[test]
    fn a_long_text_is_cut_between_two_characters() {
        let long = "ä".repeat(TEXT_CHARS_MAX + 1);
        assert_eq!(short(&long), format!("{} …", "ä".repeat(TEXT_CHARS_MAX)));
        assert_eq!(short("ä"), "ä");
    }
}
