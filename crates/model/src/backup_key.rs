//! The key with which a tenant's backups are encrypted at their target.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What stands before the digits in a key file.
const PREFIX: &str = "perigee-backup-key-1:";

/// 256 random bits. Whoever has them, and the target, reads the backups.
#[derive(Clone, PartialEq, Eq)]
pub struct BackupKey([u8; Self::BYTES]);

/// A text that is no key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "it is not a key for backups: one line that begins with {PREFIX}, and 64 hexadecimal digits"
)]
pub struct BadBackupKey;

impl BackupKey {
    /// Its length.
    pub const BYTES: usize = 32;

    /// A key of these random bytes.
    #[must_use]
    pub const fn new(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    #[must_use]
    pub const fn bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// As in a key file: one line, without its end.
    #[must_use]
    pub fn to_line(&self) -> String {
        let digits = self.0.iter().map(|byte| format!("{byte:02x}"));
        std::iter::once(PREFIX.to_owned()).chain(digits).collect()
    }
}

impl FromStr for BackupKey {
    type Err = BadBackupKey;

    fn from_str(text: &str) -> Result<Self, BadBackupKey> {
        let digits = text.trim().strip_prefix(PREFIX).ok_or(BadBackupKey)?;
        let is_hex = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        if digits.len() != 2 * Self::BYTES || !is_hex {
            return Err(BadBackupKey);
        }
        let mut bytes = [0; Self::BYTES];
        for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
            *byte = u8::from_str_radix(&digits[at..at + 2], 16).map_err(|_| BadBackupKey)?;
        }
        Ok(Self(bytes))
    }
}

/// Nothing of it is in a log.
impl fmt::Debug for BackupKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BackupKey(…)")
    }
}

impl Serialize for BackupKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.to_line())
    }
}

impl<'de> Deserialize<'de> for BackupKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_read_as_it_was_written_and_shown_to_nobody() {
        let mut bytes = [7; BackupKey::BYTES];
        (bytes[0], bytes[31]) = (0, 0xfe);
        let key = BackupKey::new(bytes);
        let line = key.to_line();
        assert!(line.starts_with("perigee-backup-key-1:0007") && line.ends_with("07fe"), "{line}");
        assert_eq!(format!("{line}\n").parse(), Ok(key.clone()));
        assert!(!format!("{key:?}").contains("07"));
        for bad in
            ["", "0007", &line[..line.len() - 1], &format!("{line}0"), &line.replace("fe", "f~")]
        {
            assert_eq!(bad.parse::<BackupKey>(), Err(BadBackupKey), "{bad}");
        }
    }
}
