//! CHAP (RFC 1994, and RFC 7143, chapter 12): proves the knowledge of a shared secret without sending it.
//!
//! Secrets are compared in constant time and never printed. A challenge is used once.

use std::fmt;

use md5::Md5;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::text::number_in;

const CHALLENGE_BYTES: usize = 32;
/// The limit of a challenge or response of the initiator, as in the standard.
const BINARY_BYTES_MAX: usize = 1024;

/// A secret. Printing it does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// The bytes as the two sides share them, without a terminator.
    pub fn new(text: impl Into<Vec<u8>>) -> Self {
        Self(text.into())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// A name and its secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    pub user: String,
    pub secret: Secret,
}

/// The credentials of a login.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chap {
    /// The initiator's credentials.
    pub initiator: Credentials,
    /// This target's credentials, if it can authenticate itself.
    pub target: Option<Credentials>,
}

/// The hash over an identifier, a secret and a challenge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    Md5,
    Sha256,
}

impl Algorithm {
    /// The first algorithm in the initiator's list that is supported.
    pub fn choose(list: &str) -> Option<Self> {
        list.split(',').find_map(|number| match number {
            "5" => Some(Self::Md5),
            "7" => Some(Self::Sha256),
            _ => None,
        })
    }

    /// The algorithm's number in `CHAP_A`, as IANA lists them: 5 is MD5 (RFC 1994), 7 is SHA-256.
    pub fn number(self) -> u8 {
        match self {
            Self::Md5 => 5,
            Self::Sha256 => 7,
        }
    }

    /// The hash over `id`, the secret and the challenge, in this order (RFC 1994, 4.1): 16 bytes for MD5, 32 for
    /// SHA-256.
    pub fn respond(self, id: u8, secret: &Secret, challenge: &[u8]) -> Vec<u8> {
        fn mix<D: Digest>(id: u8, secret: &Secret, challenge: &[u8]) -> Vec<u8> {
            D::new()
                .chain_update([id])
                .chain_update(&secret.0)
                .chain_update(challenge)
                .finalize()
                .to_vec()
        }
        match self {
            Self::Md5 => mix::<Md5>(id, secret, challenge),
            Self::Sha256 => mix::<Sha256>(id, secret, challenge),
        }
    }
}

/// An unanswered challenge to the initiator.
#[derive(Debug)]
pub struct Challenge {
    pub algorithm: Algorithm,
    pub id: u8,
    bytes: [u8; CHALLENGE_BYTES],
}

impl Challenge {
    /// # Errors
    /// When the kernel provides no random bytes.
    pub fn new(algorithm: Algorithm) -> std::io::Result<Self> {
        let mut random = [0; CHALLENGE_BYTES + 1];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let [id, bytes @ ..] = random;
        Ok(Self { algorithm, id, bytes })
    }

    /// The challenge as `CHAP_C` has it: `0x` and hexadecimal digits.
    pub fn text(&self) -> String {
        binary_text(&self.bytes)
    }

    /// Whether the response proves the secret. It takes the same time for a wrong response as for a right one.
    pub fn is_met(&self, wanted: &Credentials, user: &str, response: &[u8]) -> bool {
        let right = self.algorithm.respond(self.id, &wanted.secret, &self.bytes);
        let same_user = wanted.user.as_bytes().ct_eq(user.as_bytes());
        bool::from(same_user & right.ct_eq(response))
    }

    /// Whether the initiator's challenge equals ours: it could then use our response as its own.
    pub fn is_reflected(&self, theirs: &[u8]) -> bool {
        self.bytes == theirs
    }
}

/// The response that proves this target's secret to the initiator.
pub fn prove(algorithm: Algorithm, target: &Credentials, id: u8, challenge: &[u8]) -> String {
    binary_text(&algorithm.respond(id, &target.secret, challenge))
}

/// Parses `CHAP_I`, decimal or with `0x`; `None` beyond 0 to 255.
pub fn identifier(value: &str) -> Option<u8> {
    number_in(value, 0..=255).and_then(|number| u8::try_from(number).ok())
}

fn binary_text(bytes: &[u8]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("0x{hex}")
}

/// Parses binary data of a key's value: `0x` and hexadecimal digits, or `0b` and base64.
pub fn binary(value: &str) -> Option<Vec<u8>> {
    let (kind, digits) = value.split_at_checked(2)?;
    if digits.is_empty() || digits.len() > BINARY_BYTES_MAX * 2 {
        return None;
    }
    match kind {
        "0x" | "0X" => hexadecimal(digits),
        "0b" | "0B" => base64(digits),
        _ => None,
    }
}

fn hexadecimal(digits: &str) -> Option<Vec<u8>> {
    let value = |digit: u8| char::from(digit).to_digit(16).and_then(|v| u8::try_from(v).ok());
    // An odd number of digits: the first byte has one.
    let (first, rest) = digits.as_bytes().split_at(digits.len() % 2);
    let mut bytes: Vec<u8> = first.iter().map(|digit| value(*digit)).collect::<Option<_>>()?;
    for pair in rest.chunks_exact(2) {
        bytes.push(value(pair[0])? << 4 | value(pair[1])?);
    }
    Some(bytes)
}

fn base64(digits: &str) -> Option<Vec<u8>> {
    let digits = digits.trim_end_matches('=').as_bytes();
    let value = |digit: u8| match digit {
        b'A'..=b'Z' => Some(digit - b'A'),
        b'a'..=b'z' => Some(digit - b'a' + 26),
        b'0'..=b'9' => Some(digit - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    if digits.len() % 4 == 1 {
        return None;
    }
    let mut bytes = Vec::with_capacity(digits.len() * 3 / 4);
    for group in digits.chunks(4) {
        let mut bits = 0_u32;
        for at in 0..4 {
            bits = bits << 6 | u32::from(group.get(at).map_or(Some(0), |digit| value(*digit))?);
        }
        bytes.extend(&bits.to_be_bytes()[1..group.len()]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alice() -> Credentials {
        Credentials { user: "alice".into(), secret: Secret::new("correct horse") }
    }

    #[test]
    fn only_the_right_user_with_the_right_secret_meets_a_challenge() {
        for algorithm in [Algorithm::Md5, Algorithm::Sha256] {
            let challenge = Challenge::new(algorithm).expect("randomness");
            let asked = binary(&challenge.text()).expect("bytes");
            let right = algorithm.respond(challenge.id, &alice().secret, &asked);
            assert!(challenge.is_met(&alice(), "alice", &right));
            assert!(!challenge.is_met(&alice(), "bob", &right));
            assert!(!challenge.is_met(&alice(), "alice", &right[..15]));
            let wrong = algorithm.respond(challenge.id, &Secret::new("wrong"), &asked);
            assert!(!challenge.is_met(&alice(), "alice", &wrong));
        }
    }

    #[test]
    fn md5_is_the_one_of_rfc_1994() {
        let response = Algorithm::Md5.respond(1, &Secret::new("secret"), b"challenge");
        let by_hand = Md5::digest(b"\x01secretchallenge");
        assert_eq!(response, by_hand.to_vec());
    }

    #[test]
    fn no_two_challenges_are_alike() {
        let first = Challenge::new(Algorithm::Md5).expect("randomness");
        let second = Challenge::new(Algorithm::Md5).expect("randomness");
        assert_ne!(first.bytes, second.bytes);
        assert!(first.is_reflected(&first.bytes) && !first.is_reflected(&second.bytes));
    }

    #[test]
    fn a_secret_is_not_printed() {
        assert!(!format!("{:?}", alice()).contains("horse"));
    }

    #[test]
    fn bytes_are_hexadecimal_or_base64() {
        assert_eq!(binary("0x0aFf"), Some(vec![0x0a, 0xff]));
        assert_eq!(binary("0xa0b"), Some(vec![0x0a, 0x0b]));
        assert_eq!(binary("0bSGVsbG8="), Some(b"Hello".to_vec()));
        assert_eq!(binary("0bSGVsbA=="), Some(b"Hell".to_vec()));
        assert_eq!(binary("0bSGVs"), Some(b"Hel".to_vec()));
        for bad in ["", "0x", "0xg0", "0b*", "0bA", "1234", "\u{20ac}x"] {
            assert_eq!(binary(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn the_first_known_algorithm_of_the_list_is_chosen() {
        assert_eq!(Algorithm::choose("8,7,5"), Some(Algorithm::Sha256));
        assert_eq!(Algorithm::choose("5"), Some(Algorithm::Md5));
        assert_eq!(Algorithm::choose("6,"), None);
    }
}
