//! Headers about parts of files. RFC 9110, 13 and 14.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::HeaderMap;
use axum::http::header::{
    CONTENT_RANGE, HeaderName, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, RANGE,
};
use perigee_model::Problem;
use perigee_model::data::FileEntry;

/// When the client has last changed what it sends: seconds since 1970. ownCloud's header, and rclone's.
pub const MODIFIED: &str = "x-oc-mtime";

/// `Content-Range: bytes 0-99/200` of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContentRange {
    /// The first byte.
    pub from: u64,
    /// The byte after the last one.
    pub until: u64,
    /// How long the file will be, if that is known.
    pub total: Option<u64>,
}

/// What a client wants of a file.
#[derive(Debug, PartialEq, Eq)]
pub enum Wanted {
    All,
    /// From this byte until before that one.
    Part(u64, u64),
    /// Bytes that the file does not have.
    Nothing,
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// When the client says that the file was changed, in milliseconds since 1970.
///
/// # Errors
/// `Invalid` if it is no time.
pub fn modified_ms(headers: &HeaderMap) -> Result<Option<u64>, Problem> {
    let Some(value) = headers.get(MODIFIED) else { return Ok(None) };
    match value.to_str().ok().and_then(unix_time_ms) {
        Some(ms) => Ok(Some(ms)),
        None => Err(Problem::invalid(
            "can't write a file",
            "its X-OC-Mtime is no number of seconds since 1970",
        )),
    }
}

/// Seconds since 1970, with a fraction or without one.
pub fn unix_time_ms(text: &str) -> Option<u64> {
    let (seconds, fraction) = text.trim().split_once('.').unwrap_or((text.trim(), "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (digits(seconds) && digits(fraction)).then_some(())?;
    let ms = format!("{fraction:0<3}").get(..3)?.parse::<u64>().ok()?;
    // To the end of the year 9999: clients show no later one.
    let seconds = seconds.parse::<u64>().ok().filter(|seconds| *seconds < 253_402_300_800)?;
    Some(seconds * 1000 + ms)
}

/// # Errors
/// `Invalid` if it can't be understood: to write the bytes elsewhere would damage the file.
pub fn content_range(headers: &HeaderMap) -> Result<Option<ContentRange>, Problem> {
    if !headers.contains_key(CONTENT_RANGE) {
        return Ok(None);
    }
    let parsed = text(headers, &CONTENT_RANGE).and_then(parse_content_range);
    parsed.map(Some).ok_or_else(|| {
        Problem::invalid(
            "can't write a file",
            "its Content-Range is not of the form `bytes FIRST-LAST/LENGTH`",
        )
    })
}

fn parse_content_range(text: &str) -> Option<ContentRange> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (from, last) = range.split_once('-')?;
    let from = number(from)?;
    let until = number(last)?.checked_add(1)?;
    let total = if total == "*" { None } else { Some(number(total)?) };
    (from < until && total.is_none_or(|total| until <= total)).then_some(ContentRange {
        from,
        until,
        total,
    })
}

/// Digits only: Rust's own parser takes a plus sign too.
pub fn number(text: &str) -> Option<u64> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// What a request wants of a file. A range that can't be understood, or that is of another version of the file, counts
/// as none; so do several ranges.
pub fn wanted(headers: &HeaderMap, entry: &FileEntry) -> Wanted {
    let Some(range) = text(headers, &RANGE).and_then(|range| range.strip_prefix("bytes=")) else {
        return Wanted::All;
    };
    if headers.contains_key(IF_RANGE)
        && !text(headers, &IF_RANGE).is_some_and(|etag| is_etag(etag, entry))
    {
        return Wanted::All;
    }
    let size = entry.size_bytes;
    let parsed = match range.split_once('-') {
        Some(("", last)) => {
            number(last).filter(|last| *last > 0).map(|last| (size.saturating_sub(last), size))
        }
        Some((from, "")) => number(from).map(|from| (from, size)),
        Some((from, last)) => number(from)
            .zip(number(last))
            .filter(|(from, last)| from <= last)
            .map(|(from, last)| (from, last.saturating_add(1).min(size))),
        None => None,
    };
    match parsed {
        None => Wanted::All,
        Some((from, until)) if from < until => Wanted::Part(from, until),
        Some(_) => Wanted::Nothing,
    }
}

/// Whether the client has this version of the file already.
pub fn is_unchanged(headers: &HeaderMap, entry: &FileEntry) -> bool {
    if let Some(known) = text(headers, &IF_NONE_MATCH) {
        return known.split(',').any(|etag| is_etag(etag.trim(), entry));
    }
    let since = text(headers, &IF_MODIFIED_SINCE).and_then(|at| httpdate::parse_http_date(at).ok());
    since.is_some_and(|since| modified_s(entry) <= since)
}

/// What a client expects to be there when it changes a file. RFC 9110, 13.1.1 and 13.1.2.
#[derive(Debug, Clone)]
pub struct Expected {
    one_of: Option<String>,
    none_of: Option<String>,
}

/// # Errors
/// `Invalid` if it can't be understood: a client that expects something must not lose what is there.
pub fn expected(headers: &HeaderMap) -> Result<Option<Expected>, Problem> {
    let tags = |name: HeaderName| -> Result<Option<String>, Problem> {
        let values = headers.get_all(&name).iter().map(|value| value.to_str());
        let texts: Result<Vec<&str>, _> = values.collect();
        let texts = texts.map_err(|_| {
            Problem::invalid("can't change a file", format!("its {name} is no text"))
        })?;
        Ok((!texts.is_empty()).then(|| texts.join(",")))
    };
    let expected = Expected { one_of: tags(IF_MATCH)?, none_of: tags(IF_NONE_MATCH)? };
    Ok((expected.one_of.is_some() || expected.none_of.is_some()).then_some(expected))
}

impl Expected {
    /// Whether what is there is as it should be.
    pub fn holds(&self, there: Option<&FileEntry>) -> bool {
        let is_there = |tags: &str| {
            let mut tags = tags.split(',').map(str::trim);
            there.is_some_and(|entry| tags.any(|tag| tag == "*" || is_etag(tag, entry)))
        };
        self.one_of.as_deref().is_none_or(is_there)
            && !self.none_of.as_deref().is_some_and(is_there)
    }

    /// What is said to a client that was wrong.
    pub fn failed(what: impl Into<String>) -> Problem {
        Problem::conflict(
            what,
            "what is there is not what the request expects (If-Match, If-None-Match)",
        )
        .next("ask for its ETag, and decide anew")
    }
}

/// The time of a file's last change, as a header has it: whole seconds.
pub fn modified_s(entry: &FileEntry) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(entry.modified_ms / 1000)
}

fn is_etag(text: &str, entry: &FileEntry) -> bool {
    let known = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
    known.is_some() && known == entry.sha256.as_deref()
}

#[cfg(test)]
mod tests {
    use perigee_model::data::FileKind;

    use super::*;

    fn entry() -> FileEntry {
        let sha256 = Some("a".repeat(64));
        FileEntry {
            name: "f".into(),
            kind: FileKind::File,
            size_bytes: 100,
            modified_ms: 0,
            sha256,
        }
    }

    fn ask(range: &str) -> Wanted {
        let mut headers = HeaderMap::new();
        headers.insert(RANGE, range.parse().expect("a value"));
        wanted(&headers, &entry())
    }

    #[test]
    fn a_range_is_cut_to_the_file() {
        for (range, from, until) in [
            ("bytes=0-0", 0, 1),
            ("bytes=10-19", 10, 20),
            ("bytes=90-", 90, 100),
            ("bytes=-5", 95, 100),
            ("bytes=-500", 0, 100),
            ("bytes=99-18446744073709551615", 99, 100),
        ] {
            assert_eq!(ask(range), Wanted::Part(from, until), "{range}");
        }
        assert_eq!(ask("bytes=100-"), Wanted::Nothing);
        for range in [
            "bytes=",
            "bytes=a-b",
            "bytes=9-1",
            "bytes=1-2,4-5",
            "bytes=-0",
            "lines=1-2",
            "bytes=+1-2",
        ] {
            assert_eq!(ask(range), Wanted::All, "{range}");
        }
    }

    #[test]
    fn a_range_of_another_version_is_the_whole_file() {
        let mut headers = HeaderMap::new();
        headers.insert(RANGE, "bytes=10-".parse().expect("a value"));
        headers.insert(IF_RANGE, "\"b\"".parse().expect("a value"));
        assert_eq!(wanted(&headers, &entry()), Wanted::All);
        let same = format!("\"{}\"", "a".repeat(64));
        headers.insert(IF_RANGE, same.parse().expect("a value"));
        assert_eq!(wanted(&headers, &entry()), Wanted::Part(10, 100));
    }

    #[test]
    fn what_is_expected_is_there_or_not() {
        let (own, other) = (format!("\"{}\"", "a".repeat(64)), "\"b\"".to_owned());
        let both = format!("{other}, {own}");
        for (name, tags, holds_of_it, holds_of_nothing) in [
            (IF_MATCH, "*", true, false),
            (IF_MATCH, &own, true, false),
            (IF_MATCH, &both, true, false),
            (IF_MATCH, &other, false, false),
            (IF_NONE_MATCH, "*", false, true),
            (IF_NONE_MATCH, &own, false, true),
            (IF_NONE_MATCH, &other, true, true),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(&name, tags.parse().expect("a value"));
            let expected = expected(&headers).expect("text").expect("something");
            assert_eq!(expected.holds(Some(&entry())), holds_of_it, "{name} {tags}");
            assert_eq!(expected.holds(None), holds_of_nothing, "{name} {tags}");
        }
        assert!(expected(&HeaderMap::new()).expect("nothing").is_none());
    }

    #[test]
    fn a_file_that_is_not_newer_than_what_the_client_has_is_unchanged() {
        let entry = FileEntry { modified_ms: 784_111_777_500, ..entry() };
        let mut headers = HeaderMap::new();
        for (since, is_so) in [
            ("Sun, 06 Nov 1994 08:49:37 GMT", true),
            ("Sun, 06 Nov 1994 08:49:36 GMT", false),
            ("yesterday", false),
        ] {
            headers.insert(IF_MODIFIED_SINCE, since.parse().expect("a value"));
            assert_eq!(is_unchanged(&headers, &entry), is_so, "{since}");
        }
        headers
            .insert(IF_MODIFIED_SINCE, "Sun, 06 Nov 2094 08:49:37 GMT".parse().expect("a value"));
        headers.insert(IF_NONE_MATCH, "\"b\"".parse().expect("a value"));
        assert!(!is_unchanged(&headers, &entry), "a tag counts more");
    }

    #[test]
    fn a_content_range_that_can_not_be_understood_is_refused() {
        let of = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_RANGE, text.parse().expect("a value"));
            content_range(&headers)
        };
        let range = ContentRange { from: 5, until: 10, total: Some(10) };
        assert_eq!(of("bytes 5-9/10").expect("a range"), Some(range));
        for bad in [
            "",
            "bytes",
            "bytes 5-9",
            "bytes 9-5/10",
            "bytes 5-10/10",
            "bytes */10",
            "bytes 1-18446744073709551615/*",
        ] {
            of(bad).expect_err(bad);
        }
    }

    #[test]
    fn a_time_is_a_number_of_seconds() {
        assert_eq!(unix_time_ms("1000000000"), Some(1_000_000_000_000));
        assert_eq!(unix_time_ms("1.5"), Some(1500));
        assert_eq!(unix_time_ms("1.123456789"), Some(1123));
        for bad in ["", "-1", "1e9", "now", ".", "1.", "253402300800", "99999999999999999999"] {
            assert_eq!(unix_time_ms(bad), None, "{bad}");
        }
    }
}
