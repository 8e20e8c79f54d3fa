//! Secrets that somebody has given where a public thing is wanted: they are refused before they leave the machine, and are
//! never shown in an error.

use std::fmt;

/// What a text has that nobody else may know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Secret {
    /// The private half of a key, of SSH, TLS, PGP or age, also with a passphrase.
    PrivateKey,
    /// A token with which a user logs in.
    Token,
}

impl Secret {
    /// The first one in a text.
    pub fn of(text: &str) -> Option<Self> {
        if PRIVATE_KEYS.iter().any(|mark| text.contains(mark)) {
            return Some(Self::PrivateKey);
        }
        tokens(text).next().map(|_| Self::Token)
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PrivateKey => "a private key",
            Self::Token => "a token with which a user logs in",
        })
    }
}

/// Where a private key begins.
const PRIVATE_KEYS: [&str; 6] = [
    // PEM (RFC 7468) of all kinds, OpenSSH, SSH2 (`---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----`).
    "PRIVATE KEY-----",
    "PRIVATE KEY ----",
    "PGP PRIVATE KEY BLOCK",
    "PuTTY-User-Key-File-",
    "AGE-SECRET-KEY-1",
    // `openssh-key-v1`, without the line above it.
    "b3BlbnNzaC1rZXktdjE",
];

/// Before the id of a user's token; the secret follows, after another `_`.
pub const TOKEN_PREFIX: &str = "perigee_";
/// As hexadecimal digits.
const TOKEN_ID_DIGITS: usize = 16;
const TOKEN_SECRET_DIGITS: usize = 64;

/// Of each token in a text: where it begins, and its id.
fn tokens(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let begins = text.match_indices(TOKEN_PREFIX);
    begins.filter_map(|(at, prefix)| {
        let rest = &text[at + prefix.len()..];
        let id = rest.get(..TOKEN_ID_DIGITS)?;
        let secret = rest.get(TOKEN_ID_DIGITS..)?.strip_prefix('_')?.get(..TOKEN_SECRET_DIGITS)?;
        let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
        (is_hex(id) && is_hex(secret)).then_some((at, id))
    })
}

/// The id of the token that this text is.
pub fn id_of_token(text: &str) -> Option<&str> {
    let (at, id) = tokens(text).next()?;
    let length = TOKEN_PREFIX.len() + TOKEN_ID_DIGITS + 1 + TOKEN_SECRET_DIGITS;
    (at == 0 && text.len() == length).then_some(id)
}

/// The text without the secrets of the tokens in it.
pub fn without_tokens(text: &str) -> String {
    let mut shown = String::new();
    let mut rest = text;
    while let Some((at, id)) = tokens(rest).next() {
        let secret = at + TOKEN_PREFIX.len() + id.len() + 1;
        shown.push_str(&rest[..secret]);
        shown.push('…');
        rest = &rest[secret + TOKEN_SECRET_DIGITS..];
    }
    shown.push_str(rest);
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_keys_of_all_kinds_are_found() {
        for key in [
            "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl\n",
            "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2gtZW",
            "-----BEGIN RSA PRIVATE KEY-----",
            "-----BEGIN ENCRYPTED PRIVATE KEY-----",
            "---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----",
            "PuTTY-User-Key-File-3: ssh-ed25519",
            "-----BEGIN PGP PRIVATE KEY BLOCK-----",
            "AGE-SECRET-KEY-1QQPZ",
        ] {
            assert_eq!(Secret::of(key), Some(Secret::PrivateKey), "{key}");
        }
        for public in [
            "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKey ann@desk",
            "-----BEGIN PUBLIC KEY-----",
            "-----BEGIN CERTIFICATE-----",
            "---- BEGIN SSH2 PUBLIC KEY ----",
            "perigee_is_nice",
        ] {
            assert_eq!(Secret::of(public), None, "{public}");
        }
    }

    #[test]
    fn a_token_is_found_and_not_shown() {
        let (id, secret) = ("0123456789abcdef", "ab".repeat(32));
        let token = format!("{TOKEN_PREFIX}{id}_{secret}");
        assert_eq!(Secret::of(&token), Some(Secret::Token));
        assert_eq!(id_of_token(&token), Some(id));
        assert_eq!(id_of_token(&format!("{token}0")), None);
        assert_eq!(id_of_token(id), None);
        let path = format!("DELETE /v1/tokens/{token}?x={token}");
        let shown = without_tokens(&path);
        assert!(!shown.contains(&secret) && shown.contains(id), "{shown}");
        assert_eq!(shown, format!("DELETE /v1/tokens/perigee_{id}_…?x=perigee_{id}_…"));
        assert_eq!(without_tokens("GET /v1/perigee_ä"), "GET /v1/perigee_ä");
    }
}
