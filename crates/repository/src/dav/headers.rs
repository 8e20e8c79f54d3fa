//! Headers and bodies that are checked before the library sees them. It reads past the end of a header that ends early, takes a
//! condition that it can't understand for none, and builds trees of XML by recursion: a body that nests deep enough
//! ends the process. RFC 4918, 10.

use axum::http::header::{IF_MATCH, IF_NONE_MATCH, IF_RANGE};
use axum::http::{HeaderMap, HeaderValue, Method};
use perigee_model::Problem;
use reqwest::Url;
use xml::reader::{EventReader, XmlEvent};

use super::properties::to_live;

/// The longest body of a request that is not a file. That of a lock stays in memory as long as the lock.
const BODY_BYTES_MAX: usize = 64 << 10;
const LOCK_BYTES_MAX: usize = 4 << 10;
/// How deep the elements of a body are.
const DEPTH_MAX: usize = 32;
/// Properties' values, entities and the like, which the library copies.
const BODY_EVENTS_MAX: usize = 10_000;

fn refused(why: impl Into<String>) -> Problem {
    Problem::invalid("can't answer the request", why.into())
}

/// The one value of a header.
fn one<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, Problem> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    match (value.to_str(), values.next()) {
        (Ok(text), None) => Ok(Some(text)),
        _ => Err(refused(format!("it needs one {name} that is text"))),
    }
}

/// Checks what the library would understand wrongly.
///
/// # Errors
/// `Invalid` with the name of the header.
pub fn check(headers: &mut HeaderMap) -> Result<(), Problem> {
    for name in [IF_MATCH, IF_NONE_MATCH, IF_RANGE] {
        for value in headers.get_all(&name) {
            let text = value.to_str().ok();
            let are_tags = text.is_some_and(|text| text.split(',').all(is_tag_or_other));
            if !are_tags {
                return Err(refused(format!("its {name} is no list of entity tags")));
            }
        }
    }
    let Some(condition) = one(headers, "if")? else { return Ok(()) };
    let whole = condition_of(condition).and_then(|text| HeaderValue::from_str(&text).ok());
    let whole =
        whole.ok_or_else(|| refused("its If is not of the form `(<LOCK-TOKEN> [ETAG])`"))?;
    headers.insert("if", whole);
    Ok(())
}

/// One tag with both its quotes, or something without any, which is none and matches nothing.
fn is_tag_or_other(text: &str) -> bool {
    let text = text.trim();
    is_tag(text) || !text.contains('"')
}

fn is_tag(text: &str) -> bool {
    let text = text.strip_prefix("W/").unwrap_or(text);
    let inner = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
    inner.is_some_and(|inner| inner.bytes().all(|byte| byte > b' ' && byte != b'"'))
}

/// A condition (RFC 4918, 10.4), in which each list has its own resource, as an absolute address: the library knows no
/// others, and gives a resource only to the list that follows it. `None` if it can't be understood.
fn condition_of(text: &str) -> Option<String> {
    let mut lists = Vec::new();
    let (mut rest, mut resource) = (text.trim(), String::new());
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix('<') {
            let (address, after) = after.split_once('>')?;
            let base = Url::parse("http://localhost/").ok()?;
            resource = format!("<{}> ", base.join(plain(address)?).ok()?);
            rest = after.trim_start();
        }
        let (inside, after) = list_of(rest.strip_prefix('(')?)?;
        lists.push(format!("{resource}({inside})"));
        rest = after.trim_start();
    }
    (!lists.is_empty()).then(|| lists.join(" "))
}

/// Conditions up to the end of their list, one or more, and what follows.
fn list_of(text: &str) -> Option<(String, &str)> {
    let mut conditions = Vec::new();
    let mut rest = text.trim_start();
    while !rest.starts_with(')') {
        let negated = rest.strip_prefix("Not").map(str::trim_start);
        let not = if negated.is_some() { "Not " } else { "" };
        rest = negated.unwrap_or(rest);
        let condition;
        if let Some(after) = rest.strip_prefix('<') {
            (condition, rest) = after.split_once('>')?;
            plain(condition)?.contains(':').then_some(())?;
            conditions.push(format!("{not}<{condition}>"));
        } else {
            (condition, rest) = rest.strip_prefix('[')?.split_once(']')?;
            is_tag(condition).then_some(())?;
            conditions.push(format!("{not}[{condition}]"));
        }
        rest = rest.trim_start();
    }
    (!conditions.is_empty()).then(|| (conditions.join(" "), &rest[1..]))
}

/// A text without what means something else in a condition.
fn plain(text: &str) -> Option<&str> {
    let is_plain = |byte: u8| byte.is_ascii_graphic() && !b"<>\"".contains(&byte);
    (!text.is_empty() && text.bytes().all(is_plain)).then_some(text)
}

/// Whether what is at the destination is replaced.
///
/// # Errors
/// `Invalid` if it is neither said nor left out.
pub fn overwrites(headers: &HeaderMap) -> Result<bool, Problem> {
    match one(headers, "overwrite")? {
        None | Some("T") => Ok(true),
        Some("F") => Ok(false),
        Some(_) => Err(refused("its Overwrite is neither T nor F")),
    }
}

/// The path of the destination, as it was sent.
///
/// # Errors
/// `Invalid` if there is none.
pub fn destination(headers: &HeaderMap) -> Result<String, Problem> {
    let missing = || refused("its Destination is no address");
    let text = one(headers, "destination")?.ok_or_else(missing)?;
    if text.starts_with('/') {
        return Ok(text.to_owned());
    }
    Url::parse(text).map(|url| url.path().to_owned()).map_err(|_| missing())
}

/// The most bytes of the body of a request that has one but is no file; `None` for a file.
pub fn body_bytes_max(method: &Method) -> Option<usize> {
    match method.as_str() {
        "PUT" | "PATCH" => None,
        "LOCK" => Some(LOCK_BYTES_MAX),
        _ => Some(BODY_BYTES_MAX),
    }
}

/// A body of XML as the library may have it.
///
/// # Errors
/// `Invalid` if it is no XML, or nests too deep.
pub fn checked_body(method: &Method, body: Vec<u8>) -> Result<Vec<u8>, Problem> {
    if body.is_empty() || !matches!(method.as_str(), "PROPFIND" | "PROPPATCH" | "LOCK") {
        return Ok(body);
    }
    let mut depth = 0_usize;
    for (count, event) in EventReader::new(&body[..]).into_iter().enumerate() {
        let event = event.map_err(|e| refused(format!("its body is no XML: {e}")))?;
        if count > BODY_EVENTS_MAX {
            return Err(refused(format!("its body has more than {BODY_EVENTS_MAX} parts")));
        }
        match event {
            XmlEvent::StartElement { .. } => depth += 1,
            XmlEvent::EndElement { .. } => depth -= 1,
            _ => {}
        }
        if depth > DEPTH_MAX {
            return Err(refused(format!(
                "its body has more than {DEPTH_MAX} elements in each other"
            )));
        }
    }
    if method.as_str() == "PROPPATCH" {
        return to_live(&body).ok_or_else(|| refused("its body can't be understood"));
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(name: &'static str, value: &[u8]) -> Result<HeaderMap, Problem> {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_bytes(value).expect("a value"));
        check(&mut headers).map(|()| headers)
    }

    #[test]
    fn conditions_that_end_early_are_refused() {
        for bad in [
            "",
            "(<a",
            "(<",
            "<",
            "(",
            "()",
            "[",
            "([\"",
            "([\"]",
            "([W/\"])",
            "([\"a\"",
            "(<a>",
            "(<a>)",
            "(<a:b c>)",
            "(<a:\"b>)",
            "(Not",
            "(Not)",
            "(Not Not <a:b>)",
            "<http://x/>",
            "<http://x/ (<a:b>)",
            "(<a:b>) x",
            "a:b",
        ] {
            checked("if", bad.as_bytes()).expect_err(bad);
        }
        checked("if", b"\xff").expect_err("it is no text");
        for name in ["if-match", "if-none-match", "if-range"] {
            for bad in [&b"\""[..], b"W/\"", b"\"a\", \"", b"\"a", b"\xff"] {
                checked(name, bad).expect_err(name);
            }
            for good in [&b"*"[..], b"\"a\"", b"W/\"a\", \"b\"", b"a"] {
                checked(name, good).expect("a list");
            }
        }
    }

    #[test]
    fn each_list_of_a_condition_has_its_resource() {
        for (sent, whole) in [
            ("(<a:b>)", "(<a:b>)"),
            ("( Not <a:b>[W/\"e\"] ) (<c:d>)", "(Not <a:b> [W/\"e\"]) (<c:d>)"),
            (
                "</dav/a/f> (<a:b>) (<c:d>)",
                "<http://localhost/dav/a/f> (<a:b>) <http://localhost/dav/a/f> (<c:d>)",
            ),
            ("<https://h:1/x>(<a:b>)", "<https://h:1/x> (<a:b>)"),
        ] {
            let headers = checked("if", sent.as_bytes()).expect("a condition");
            assert_eq!(headers["if"], whole);
        }
    }

    #[test]
    fn a_body_that_nests_deep_is_refused() {
        let nested =
            |depth: usize| ["<a>".repeat(depth), "</a>".repeat(depth)].concat().into_bytes();
        let propfind = Method::from_bytes(b"PROPFIND").expect("a method");
        checked_body(&propfind, nested(DEPTH_MAX)).expect("that deep");
        checked_body(&propfind, nested(DEPTH_MAX + 1)).expect_err("too deep");
        checked_body(&propfind, nested(9000)).expect_err("much too deep");
        checked_body(&propfind, b"<a>".repeat(20_000)).expect_err("without an end");
        checked_body(&propfind, b"<a".to_vec()).expect_err("no XML");
    }
}
