//! By what an image's content is known.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The SHA-256 of what an image shows, in hexadecimal: of its size, and of its blocks that are not all zeros. It does not
/// depend on the layers that the image has at a host.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String)]
pub struct ContentDigest(pub [u8; 32]);

/// A text that is no [`ContentDigest`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the SHA-256 of a content has 64 hexadecimal digits in lower case")]
pub struct BadContentDigest;

impl FromStr for ContentDigest {
    type Err = BadContentDigest;

    fn from_str(text: &str) -> Result<Self, BadContentDigest> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err(BadContentDigest),
        };
        let text = text.as_bytes();
        if text.len() != 64 {
            return Err(BadContentDigest);
        }
        let mut digest = [0; 32];
        for (byte, digits) in digest.iter_mut().zip(text.chunks(2)) {
            *byte = digit(digits[0])? << 4 | digit(digits[1])?;
        }
        Ok(Self(digest))
    }
}

impl TryFrom<String> for ContentDigest {
    type Error = BadContentDigest;

    fn try_from(text: String) -> Result<Self, BadContentDigest> {
        text.parse()
    }
}

impl From<ContentDigest> for String {
    fn from(digest: ContentDigest) -> Self {
        digest.to_string()
    }
}

impl fmt::Display for ContentDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ContentDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_read_as_it_is_shown_and_nothing_else_is() {
        let digest = ContentDigest(std::array::from_fn(|at| u8::try_from(at * 8).unwrap_or(9)));
        assert_eq!(digest.to_string().parse(), Ok(digest));
        for bad in ["", "00", &"g".repeat(64), &"A".repeat(64), &"é".repeat(32), &"0".repeat(65)] {
            assert_eq!(bad.parse::<ContentDigest>(), Err(BadContentDigest), "{bad}");
        }
    }
}
