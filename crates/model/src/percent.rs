//! What a URL or a header can't have in a text is written as `%XX` (RFC 3986, 2.1).

use percent_encoding::{AsciiSet, CONTROLS, NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};

/// All but the unreserved characters of RFC 3986.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
const RESERVED_IN_PATHS: &AsciiSet = &RESERVED.remove(b'/');
const NOT_PRINTED: &AsciiSet = &CONTROLS.add(b'%');

/// A text as one name in a path, or as a field of a query or form.
#[must_use]
pub fn encoded(text: &str) -> PercentEncode<'_> {
    utf8_percent_encode(text, RESERVED)
}

/// A path, in a URL's path or in a query: its slashes stay.
#[must_use]
pub fn encoded_path(path: &str) -> PercentEncode<'_> {
    utf8_percent_encode(path, RESERVED_IN_PATHS)
}

/// A text in ASCII for people: all that ASCII can print stays, but for `%`.
#[must_use]
pub fn in_ascii(text: &str) -> PercentEncode<'_> {
    utf8_percent_encode(text, NOT_PRINTED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_url_or_a_header_cannot_have_is_encoded() {
        let text = "a-B_9.~ +/=&%ä\n";
        assert_eq!(encoded(text).to_string(), "a-B_9.~%20%2B%2F%3D%26%25%C3%A4%0A");
        assert_eq!(encoded_path(text).to_string(), "a-B_9.~%20%2B/%3D%26%25%C3%A4%0A");
        assert_eq!(in_ascii(text).to_string(), "a-B_9.~ +/=&%25%C3%A4%0A");
    }
}
