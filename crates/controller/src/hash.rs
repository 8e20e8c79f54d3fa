//! Texts of hashes.

pub use perigee_http::certificate::hex;

/// Whether a text is a SHA-256. It becomes part of a path, so this must be checked.
pub fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}
