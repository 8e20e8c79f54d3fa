//! Headers about parts of files. RFC 9110, 13 and 14.

use axum::http::HeaderMap;
use axum::http::header::{CONTENT_RANGE, IF_NONE_MATCH, IF_RANGE, RANGE};
use perigee_model::Problem;
use perigee_model::data::FileEntry;

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

fn text<'a>(headers: &'a HeaderMap, name: &axum::http::HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
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
    let known = text(headers, &IF_NONE_MATCH).unwrap_or_default();
    known.split(',').any(|etag| is_etag(etag.trim(), entry))
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
}
